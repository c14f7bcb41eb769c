"""Trains under a plan, with torch: one process per device, the plan's action list as written, gradients by block.

    from runtime import Model, Trainer
    trainer = Trainer("plan.json", Model(num_layers=26, layer=build_layer))
    result = trainer.step(inputs, targets)

The names below are resolved on first use, so that ``import runtime`` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.groups import RankFailed
    from runtime.model import Model
    from runtime.recover import Elastic
    from runtime.task import Task
    from runtime.trainer import Trainer

__all__ = ["Elastic", "Model", "RankFailed", "Task", "Trainer"]

_HOMES = {
    "Elastic": "runtime.recover",
    "Model": "runtime.model",
    "RankFailed": "runtime.groups",
    "Task": "runtime.task",
    "Trainer": "runtime.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
