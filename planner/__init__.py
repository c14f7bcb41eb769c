"""Plans heterogeneous pipeline-parallel training: measured profile + cluster + job -> the fastest plan and its bound.

    from planner import Cluster, Job, ModelProfile, plan
    print(plan(ModelProfile.load("profile.json"), Cluster.load("cluster.yaml"), Job(global_batch=512)))

The names below are resolved on first use, so that ``import planner`` loads neither numpy nor a solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.cluster import Cluster
    from planner.job import Job
    from planner.plans import Infeasible, Plan
    from planner.profile import ModelProfile
    from planner.search import plan

__version__ = "0.1.0"
__all__ = ["Cluster", "Infeasible", "Job", "ModelProfile", "Plan", "plan"]

_HOMES = {
    "Cluster": "planner.cluster",
    "Infeasible": "planner.plans",
    "Job": "planner.job",
    "ModelProfile": "planner.profile",
    "Plan": "planner.plans",
    "plan": "planner.search",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
