"""What a plan is worth: the example clusters and three generated ones, each with a model that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.common import ROOT
from benchmarks.search_time import generate
from planner import Cluster, Job, ModelProfile

Question = tuple[ModelProfile, Cluster, Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question, made when it is asked."""

    name: str
    ask: Callable[[], Question]


def _example(name: str, profile: str, cluster: str, global_batch: int) -> Case:
    def ask() -> Question:
        return (
            ModelProfile.load(ROOT / "examples" / profile),
            Cluster.load(ROOT / "examples" / cluster),
            Job(global_batch=global_batch, precision="fp32"),
        )

    return Case(name=name, ask=ask)


def _generated(
    name: str, model: str, devices: dict[str, int], tps: tuple[int, ...], sizes: tuple[int, ...], global_batch: int
) -> Case:
    def ask() -> Question:
        profile = generate.profile(model, list(devices), tps, sizes)
        return profile, generate.cluster(devices), Job(global_batch=global_batch)

    return Case(name=name, ask=ask)


CASES = {
    case.name: case
    for case in (
        _example("opt-350m_a100-v100", "opt-350m.json", "a100-v100.yaml", 1024),
        _example("opt-350m_mixed-rtx", "opt-350m.json", "mixed-rtx.yaml", 1024),
        _example("opt-350m_odd-counts", "opt-350m.json", "odd-counts.yaml", 256),
        _example("opt-350m_homogeneous", "opt-350m.json", "homogeneous.yaml", 1024),
        _example("gpt-neo-2.7b_a100-v100", "gpt-neo-2.7b.json", "a100-v100.yaml", 2048),
        _example("gpt-neo-2.7b_odd-counts", "gpt-neo-2.7b.json", "odd-counts.yaml", 256),
        _example("gpt-neo-2.7b_homogeneous", "gpt-neo-2.7b.json", "homogeneous.yaml", 2048),
        _generated("llama-7b_8a100-8v100", "7B", {"A100": 8, "V100": 8}, (1, 2, 4), (1, 2), 128),
        _generated("llama-13b_8h100-16a100-16v100", "13B", {"H100": 8, "A100": 16, "V100": 16}, (1, 2), (1, 2), 256),
        _generated("llama-70b_24h100-24a100-16v100", "70B", {"H100": 24, "A100": 24, "V100": 16}, (4, 8), (1,), 256),
    )
}
