"""What a file hands to the launcher: a model, its data, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from planner.plans import Plan
from runtime.model import Model
from runtime.trainer import Optimizers, Trainer, adamw

Batch = Callable[[int, range], tuple[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training run without its plan.

    Parameters
    ----------
    model
        Of as many layers as the profile that the plan was made from.
    batch
        (step, samples of the global batch) -> inputs and targets of those samples, along the first dimension. Each
        process asks for its own samples; the answer must not depend on who asks, or when.
    steps
        How many.
    optimizer, clip, dtype, seed
        As in `Trainer`.
    """

    model: Model
    batch: Batch
    steps: int
    optimizer: Optimizers = adamw
    clip: float | None = 1.0
    dtype: torch.dtype | None = None
    seed: int = 0

    def trainer(self, plan: Plan, **options: Any) -> Trainer:
        """A trainer of it, with further options of `Trainer`."""
        return Trainer(
            plan,
            self.model,
            optimizer=self.optimizer,
            clip=self.clip,
            dtype=self.dtype,
            seed=self.seed,
            **options,
        )
