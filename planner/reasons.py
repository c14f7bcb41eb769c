"""Why nothing fits: the nearest miss, and the cheapest change that would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner import cost, stage_split
from planner.cost import Costs
from planner.plans import GIB, Infeasible
from planner.question import Question, ask
from planner.stage_split import Template, TooManyTemplates

# Halvings of the memory a device is short of: to a thousandth of the first guess.
_HALVINGS = 24
_TEMPLATES = 400


def infeasible(question: Question) -> Infeasible:
    """The layer that no device holds, or the stage that comes nearest to fitting, and a change that would fit."""
    alone = _layer_alone(question)
    remedy = next((text for text, changed in _changes(question) if _fits(changed, 0.0)), None)
    if alone is not None:
        layer, device_type, missing = alone
        kind = question.profile.kind_of(layer).name
        return Infeasible(
            f"layer {layer} ({kind}) fits on no device, not even by itself with one micro-batch in flight",
            layer=layer,
            device_type=device_type,
            short_bytes=missing,
            remedy=remedy or _more_memory(question) or "a larger tp degree measured",
        )
    short = _least_short(question)
    if short is None:
        units = int(question.available.sum())
        return Infeasible(
            f"no pipeline of the {units} device groups holds all {question.num_layers} layers",
            remedy=remedy or "more devices",
        )
    stage, device_type = _tightest(question, short)
    return Infeasible(
        "the model does not fit: every split leaves some stage over its memory",
        stage=stage,
        device_type=device_type,
        short_bytes=short,
        remedy=remedy or _more_memory(question),
    )


def _more_memory(question: Question) -> str | None:
    """The memory that would do, on each device; the margin takes its share of it. None if no amount does."""
    short = _least_short(question)
    if short is None:
        return None
    return f"{_gib(short / (1.0 - question.job.memory_margin))} more memory on each device, or more devices"


def _gib(nbytes: float) -> str:
    return f"{math.ceil(nbytes / GIB * 100) / 100:.2f} GiB"


def _layer_alone(question: Question) -> tuple[int, str, float] | None:
    """The layer that is furthest from fitting anywhere by itself: its index, the device nearest to it, bytes short."""
    worst: tuple[int, str, float] | None = None
    num_layers = question.num_layers
    least = np.full((len(question.classes), num_layers), math.inf)
    for costs in question.costs:
        base, per_micro_batch = cost.stage_bytes(costs)
        layer = np.arange(num_layers)
        over = (base + per_micro_batch)[:, layer, layer + 1] - costs.usable[:, None]
        over[~costs.measured] = math.inf
        # Recomputing a layer frees its activations but needs room to work in.
        recomputed = np.where(costs.saved > 0, over + costs.rework[:, None] - costs.saved, math.inf)
        least = np.minimum(least, np.minimum(over, recomputed))
    for l in range(num_layers):
        k = int(least[:, l].argmin())
        if 0 < least[k, l] < math.inf and (worst is None or least[k, l] > worst[2]):
            worst = l, str(question.classes[k].device_type), float(least[k, l])
    return worst


def _changes(question: Question) -> Iterator[tuple[str, Question]]:
    """Changes of the job, the cheapest first."""
    job = question.job
    trials = []
    if not job.recompute:
        trials.append(("allow recompute (recompute: true)", replace(job, recompute=True)))
    if job.micro_batches is not None:
        trials.append(("allow all measured micro-batch sizes", replace(job, micro_batches=None)))
    if job.tp is not None:
        trials.append(("allow all measured tp degrees", replace(job, tp=None)))
    if job.max_depth is not None:
        trials.append(("lift max_depth", replace(job, max_depth=None)))
    if job.max_classes is not None:
        trials.append(("lift max_classes", replace(job, max_classes=None)))
    if job.precision == "fp32" and job.bytes_per_parameter is None:
        if job.optimizer == "adam":
            trials.append(("momentum instead of adam (optimizer: momentum)", replace(job, optimizer="momentum")))
        trials.append(("sgd (optimizer: sgd)", replace(job, optimizer="sgd")))
    if job.memory_margin > 0:
        trials.append(
            (f"a memory margin below {job.memory_margin:g} (memory_margin: 0)", replace(job, memory_margin=0.0))
        )
    for text, changed in trials:
        try:
            yield text, ask(question.profile, question.cluster, changed)
        except ValueError:
            continue


def _graph(question: Question) -> stage_split.Templates:
    """Templates deep enough to use every unit, of few enough classes to look at."""
    depth = min(question.num_layers, int(question.available.sum()), question.job.max_depth or question.num_layers)
    most = question.job.max_classes or len(question.classes)
    for classes in dict.fromkeys((most, min(most, 2), 1)):
        try:
            return stage_split.templates(
                question.limits, question.use, question.available, depth, classes, _TEMPLATES * question.num_layers
            )
        except TooManyTemplates:
            continue
    return stage_split.templates(question.limits, question.use, question.available, min(depth, 8), 1)


def _tables(question: Question, extra: float) -> Iterator[cost.StageTable]:
    depth = min(question.num_layers, int(question.available.sum()))
    for costs in question.costs:
        most = max(1, question.need // costs.micro_batch)
        roomier = replace(costs, usable=costs.usable + extra)
        yield cost.stage_table(roomier, [min(q, most) for q in range(1, depth + 1)], synced=False)


def _fits(question: Question, extra: float) -> bool:
    """Whether one pipeline fits with so many more bytes per device."""
    graph = _graph(question)
    return any(
        bool(np.isfinite(stage_split.sweep(table, graph, weight_sum=1.0, weight_max=0.0).sum_s).any())
        for table in _tables(question, extra)
        if np.isfinite(table.load).any()
    )


def _least_short(question: Question) -> float | None:
    """Least extra bytes per device with which something fits; None if no amount helps."""
    high = max(_all_bytes(costs) for costs in question.costs)
    if not _fits(question, high):
        return None
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _fits(question, middle):
            high = middle
        else:
            low = middle
        if high - low < 1e-3 * high:
            break
    return high


def _all_bytes(costs: Costs) -> float:
    base, per_micro_batch = cost.stage_bytes(costs)
    return float((base + costs.num_layers * per_micro_batch).max())


def _tightest(question: Question, extra: float) -> tuple[int, str]:
    """Stage index and device type that need the extra bytes, in the split that fits with the least of them."""
    graph = _graph(question)
    for table, costs in zip(_tables(question, extra), question.costs, strict=True):
        found = stage_split.sweep(table, graph, weight_sum=1.0, weight_max=0.0)
        if not np.isfinite(found.sum_s).any():
            continue
        split = Template(table, graph.counts[int(found.sum_s.argmin())]).best()
        assert split is not None
        base, per_micro_batch = cost.stage_bytes(costs)
        most = max(1, question.need // costs.micro_batch)
        over = []
        for s, (k, i, j) in enumerate(split.stages):
            flight = min(most, len(split.stages) - s)
            freed = sum(costs.saved[k, l] for l in range(i, j))
            bytes_ = base[k, i, j] + flight * (per_micro_batch[k, i, j] - freed) + (costs.rework[k] if freed else 0.0)
            over.append((float(bytes_ - costs.usable[k]), s, question.classes[k].device_type))
        _, s, name = max(over)
        return s, name
    return 0, question.classes[0].device_type
