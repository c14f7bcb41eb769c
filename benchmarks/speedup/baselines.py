"""Simpler plans of all devices, each the best of its kind by simulation.

    even      identical pipelines: equal layers per stage, equal micro-batches per pipeline  (`runtime.demo.even`)
    layers    the same pipelines, the best layers per stage, one split for all
    data      the same pipelines, the best micro-batches per pipeline

All numbers of pipelines are tried, with ranks following each other along pipelines or along stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Literal, get_args

from planner import Cluster, Job, ModelProfile, Plan
from planner.evaluate import evaluate
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from runtime.demo import equal_cuts, even, fits

__all__ = ["data", "even", "layers"]
Order = Literal["stage", "pipeline"]


def layers(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan:
    """Identical pipelines with the best layers."""
    return _best(_layers(profile, cluster, job))


def _layers(profile: ModelProfile, cluster: Cluster, job: Job) -> Iterator[Plan]:
    for copies, depth in _shapes(profile, cluster):
        if job.global_batch % copies:
            continue
        for inner in combinations(range(1, profile.num_layers), depth - 1):
            cuts = [0, *inner, profile.num_layers]
            for order in get_args(Order):
                yield _evaluate(profile, cluster, job, cuts, [job.global_batch // copies] * copies, order)


def data(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan:
    """Pipelines of equal layers with the best micro-batches."""
    return _best(_data(profile, cluster, job))


def _data(profile: ModelProfile, cluster: Cluster, job: Job) -> Iterator[Plan]:
    for copies, depth in _shapes(profile, cluster):
        cuts = equal_cuts(profile.num_layers, depth)
        for order in get_args(Order):
            counts = [1] * copies
            loads = [
                [stage.load_s for stage in pipeline.stages]
                for pipeline in _evaluate(profile, cluster, job, cuts, counts, order).pipelines
            ]
            while sum(counts) < job.global_batch:  # one more where it ends first: the best of all shares
                after = [sum(load) + m * max(load) for load, m in zip(loads, counts, strict=True)]
                counts[after.index(min(after))] += 1
            yield _evaluate(profile, cluster, job, cuts, counts, order)


def _shapes(profile: ModelProfile, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Numbers of pipelines and stages that use all devices."""
    world = len(cluster.devices)
    for copies in range(1, world + 1):
        if world % copies == 0 and world // copies <= profile.num_layers:
            yield copies, world // copies


def _evaluate(
    profile: ModelProfile, cluster: Cluster, job: Job, cuts: list[int], counts: list[int], order: Order
) -> Plan:
    stages = tuple(StageLayout(layers=pair) for pair in pairwise(cuts))
    pipelines = tuple(PipelineLayout(stages=stages, micro_batch=1, num_micro_batches=m) for m in counts)
    return evaluate(profile, cluster, Layout(pipelines=pipelines, order=order), job)


def _best(plans: Iterator[Plan]) -> Plan:
    return min(filter(fits, plans), key=lambda plan: plan.predicted.simulated_s or 0.0)
