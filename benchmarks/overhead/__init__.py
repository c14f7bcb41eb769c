"""What the runtime costs where it has nothing to do: one stage, one pipeline, against a plain loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A GPT and a batch."""

    name: str
    num_layers: int
    hidden: int
    length: int
    micro_batch: int
    num_micro_batches: int


CASES = {
    case.name: case
    for case in (
        Case(name="small_8", num_layers=8, hidden=128, length=128, micro_batch=2, num_micro_batches=8),
        Case(name="wide_4", num_layers=6, hidden=512, length=64, micro_batch=2, num_micro_batches=4),
        Case(name="wide_1", num_layers=6, hidden=512, length=64, micro_batch=4, num_micro_batches=1),
    )
}
