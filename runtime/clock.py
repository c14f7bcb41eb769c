"""When each action of a step ran on this process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from planner.schedule import Action


@dataclass(frozen=True, slots=True)
class Played:
    """An action as it ran, in seconds from the start of the step.

    A RECV lasts from when the stage begins to wait until the tensors are here; a SEND and a REDUCE_GRAD from their
    start until they are known to be done, an upper bound where the backend does not tell by itself.
    """

    action: Action
    start_s: float
    end_s: float


class Clock:
    """Marks of one step: host times on a CPU; on a GPU, which runs behind the host, events of its streams.

    Parameters
    ----------
    running
        Otherwise it takes no marks and keeps nothing.
    """

    def __init__(self, device: torch.device, *, running: bool = False) -> None:
        self.device, self.running = device, running
        self.rows: list[tuple[Action, Any, Any]] = []
        self.zero = self.now()

    def now(self) -> Any:
        """A mark of this moment, on the current stream."""
        if not self.running:
            return None
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def keep(self, action: Action, began: Any, ended: Any) -> None:
        """An action between two marks; from any thread."""
        if self.running:
            self.rows.append((action, began, ended))

    def played(self) -> tuple[Played, ...]:
        """All actions that were kept, by start."""
        if self.running and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rows = [Played(action, self._since(began), self._since(ended)) for action, began, ended in self.rows]
        return tuple(sorted(rows, key=lambda each: (each.start_s, each.end_s)))

    def _since(self, mark: Any) -> float:
        return float(self.zero.elapsed_time(mark)) / 1e3 if self.device.type == "cuda" else mark - self.zero
