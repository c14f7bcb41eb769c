"""How far the formulas are from the simulation: schedules, and random pipelines by unevenness and transfer share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.schedule import Schedule, eager_one_f_one_b, gpipe, one_f_one_b
from planner.simulate import StageWork

UNEVEN = (0.0, 0.1, 0.3, 0.5)
TRANSFERS = (0.0, 0.05, 0.25, 0.8)
SEED = 7

CASES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "gpipe": gpipe,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Seconds of every stage, of every transfer one way, and micro-batches."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hand_over: tuple[float, ...]
    num_micro_batches: int

    @property
    def works(self) -> tuple[StageWork, ...]:
        """As the simulator takes it."""
        rows = zip(self.forward, self.backward, (*self.hand_over, 0.0), strict=True)
        return tuple(StageWork(forward_s=f, backward_s=b, send_s=c) for f, b, c in rows)


def pipelines(uneven: float, transfers: float, count: int) -> Iterator[Pipeline]:
    """Random pipelines: S = 2 ... 8, m = S ... 4 S + 8, F about 1, B about 2, every transfer the same share of F.

    Parameters
    ----------
    uneven
        F and B are drawn within this fraction of 1 and 2, each for itself.
    transfers
        Seconds of one transfer, F = 1.
    """
    draw = random.Random(SEED)
    for _ in range(count):
        num_stages = draw.randint(2, 8)
        num_micro_batches = draw.randint(num_stages, 4 * num_stages + 8)
        yield Pipeline(
            forward=tuple(draw.uniform(1 - uneven, 1 + uneven) for _ in range(num_stages)),
            backward=tuple(2 * draw.uniform(1 - uneven, 1 + uneven) for _ in range(num_stages)),
            hand_over=(transfers,) * (num_stages - 1),
            num_micro_batches=num_micro_batches,
        )
