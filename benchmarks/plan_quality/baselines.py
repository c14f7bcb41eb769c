"""Simpler ways to divide the work, each tuned as far as its idea goes and priced like a plan of ours.

    even          identical pipelines over all devices, equal layers per stage, equal micro-batches per pipeline
    layers        the same pipelines, but the best uneven layers
    data          pipelines of one device type each, equal layers per stage, micro-batches by speed

Identical pipelines have the same number of units of every type, in blocks of one type; tp degree per type, number of
pipelines, order of the types and micro-batch size are the best ones. Choices are made with the slowest links, as our
search does; the best few are then placed on the nodes and priced with the true ones. All may recompute. Only formulas
of the planner's cost model are shared with the search, the placement, and the exact split of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, permutations, product

import numpy as np

from planner import cost, data_split
from planner.assemble import Candidate, Chain, evaluate
from planner.cost import Array, Costs, StageTable
from planner.question import Question
from planner.stage_split import Stage

PRICED = 5  # candidates placed and priced with the true links


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Seconds per iteration, and what it looks like."""

    iteration_s: float
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Identical pipelines: the class of each stage, with m micro-batches each."""

    classes: tuple[int, ...]
    costs: Costs
    num_pipelines: int
    num_micro_batches: int


def even(question: Question) -> Baseline | None:
    """Identical pipelines, everything equal; None if nothing fits."""
    return _identical(question, balanced=False)


def layers_balanced(question: Question) -> Baseline | None:
    """Identical pipelines with the best layers for each stage; None if nothing fits."""
    return _identical(question, balanced=True)


# Identical pipelines.


def _identical(question: Question, balanced: bool) -> Baseline | None:
    layouts = sorted(((_at_least_s(each), n, each) for n, each in enumerate(_layouts(question))), key=lambda x: x[:2])
    tables = _Tables(question)
    found: list[tuple[float, int, Chain]] = []
    for least_s, n, layout in layouts:
        if len(found) >= PRICED and least_s >= found[PRICED - 1][0]:
            break
        depth, m = len(layout.classes), layout.num_micro_batches
        loads = _loads(tables.get(layout.costs, depth, m, layout.num_pipelines > 1), layout.classes)
        cuts = _best_cuts(loads, m) if balanced else _equal_cuts(question.num_layers, depth)
        seconds = [] if cuts is None else [float(v[i, j]) for v, i, j in zip(loads, cuts, cuts[1:])]
        if cuts is not None and all(map(math.isfinite, seconds)):
            stages = tuple(Stage(k, i, j) for k, i, j in zip(layout.classes, cuts, cuts[1:]))
            chain = Chain(layout.num_pipelines, layout.costs.micro_batch, m, stages)
            tail = _tail_s(question, layout.costs, [chain])
            found = sorted([*found, (cost.pipeline_s(seconds, m) + tail, n, chain)], key=lambda x: x[:2])[:PRICED]
    return _best(question, [[chain] for _, _, chain in found], fixed=True)


def _layouts(question: Question) -> Iterator[_Layout]:
    """All ways to form identical pipelines of all device types with equally many samples."""
    for chosen in product(*_classes_of_types(question)):
        units = [int(question.limits[k]) for k in chosen]
        for num_pipelines in range(1, math.gcd(*units) + 1):
            if any(number % num_pipelines for number in units):
                continue
            each = {k: number // num_pipelines for k, number in zip(chosen, units)}
            if sum(each.values()) > question.num_layers:
                continue
            for costs in question.costs:
                m, rest = divmod(question.need, num_pipelines * costs.micro_batch)
                if rest or m < 1 or not costs.measured[list(chosen)].all():
                    continue
                for order in permutations(chosen):
                    classes = tuple(k for k in order for _ in range(each[k]))
                    yield _Layout(classes=classes, costs=costs, num_pipelines=num_pipelines, num_micro_batches=m)


def _classes_of_types(question: Question) -> list[list[int]]:
    """Indices of the classes of each device type."""
    classes = question.classes
    return [list(group) for _, group in groupby(range(len(classes)), lambda k: classes[k].device_type)]


class _Tables:
    """Stage tables by what they depend on, made once."""

    def __init__(self, question: Question) -> None:
        self._depth = question.num_layers
        self._known: dict[tuple[int, int, bool], StageTable] = {}

    def get(self, costs: Costs, depth: int, num_micro_batches: int, synced: bool) -> StageTable:
        """For pipelines of up to `depth` stages that run so many micro-batches."""
        most = self._depth if num_micro_batches >= depth else num_micro_batches
        key = (costs.micro_batch, most, synced)
        if key not in self._known:
            in_flight = [min(q, most) for q in range(1, self._depth + 1)]
            self._known[key] = cost.stage_table(costs, in_flight, synced)
        return self._known[key]


def _at_least_s(layout: _Layout) -> float:
    """No split is faster: perfect balance, no hand-overs, no fill."""
    whole = (layout.costs.forward + layout.costs.backward).sum(axis=1)
    return layout.num_micro_batches / sum(1 / float(whole[k]) for k in layout.classes)


def _loads(table: StageTable, classes: Sequence[int]) -> list[Array]:
    """Per stage (L + 1, L + 1) seconds of a micro-batch on layers [i, j), with both hand-overs."""
    out = []
    depth = len(classes)
    for s, k in enumerate(classes):
        load = table.load[k, depth - 1 - s]
        before = table.cut[classes[s - 1], k][:, None] if s else 0.0
        after = table.cut[k, classes[s + 1]][None, :] if s + 1 < depth else 0.0
        out.append(load + before + after)
    return out


def _equal_cuts(num_layers: int, depth: int) -> list[int]:
    """First layers of the stages, sizes at most one apart, the larger ones first."""
    size, more = divmod(num_layers, depth)
    return [s * size + min(s, more) for s in range(depth + 1)]


def _best_cuts(loads: Sequence[Array], num_micro_batches: int) -> list[int] | None:
    """Cuts that minimise sum + (m - 1) max: least sums under falling caps on the maximum, until none can pay."""
    steps = num_micro_batches - 1
    best: tuple[float, list[int]] | None = None
    cap = math.inf
    while (found := _least_sum(loads, cap)) is not None:
        total, largest, cuts = found
        if best is None or total + steps * largest < best[0]:
            best = total + steps * largest, cuts
        if steps == 0 or total >= best[0]:
            break
        cap = min(largest * (1 - 1e-12), (best[0] - total) / steps)
    return None if best is None else best[1]


def _least_sum(loads: Sequence[Array], cap: float) -> tuple[float, float, list[int]] | None:
    num_layers = loads[0].shape[0] - 1
    rest = np.full(num_layers + 1, math.inf)
    rest[num_layers] = 0.0
    chosen = []
    for v in reversed(loads):
        total = np.where(v <= cap, v, math.inf) + rest[None, :]
        chosen.append(total.argmin(axis=1))
        rest = total.min(axis=1)
    if not math.isfinite(rest[0]):
        return None
    cuts = [0]
    for after in reversed(chosen):
        cuts.append(int(after[cuts[-1]]))
    return float(rest[0]), max(float(v[i, j]) for v, i, j in zip(loads, cuts, cuts[1:])), cuts


# Pipelines of one device type each.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """What the devices of one type may do: `count` pipelines of equal stages, then a sync of `tail_s`."""

    stages: tuple[Stage, ...]
    tp: int
    costs: Costs
    count: int
    sum_s: float
    max_s: float
    tail_s: float = 0.0

    def samples(self, time_s: float) -> int:
        """Samples that all pipelines run within a time."""
        left = time_s - self.tail_s - self.sum_s
        return 0 if left < 0 else self.count * (math.floor(left / self.max_s + 1e-9) + 1) * self.costs.micro_batch


def data_balanced(question: Question) -> Baseline | None:
    """Equal layers in pipelines of one device type, micro-batches by speed; None if no type can hold the model so.

    Per type the option that runs most samples in the time it takes; over all limits on pipelines per type and all
    smallest tp degrees, since both decide the gradient sync.
    """
    tables = _Tables(question)
    by_type = [
        [option for k in classes for option in _options(question, k, tables)] for classes in _classes_of_types(question)
    ]
    most = max((option.count for each in by_type for option in each), default=0)
    candidates: dict[tuple[Chain, ...], float] = {}
    for min_tp in question.degrees:
        for limit in sorted({*(1 << n for n in range(most.bit_length())), most}):
            allowed = [[o for o in each if o.tp >= min_tp and o.count <= limit] for each in by_type]
            tailed = [[_with_tail(question, o, limit * len(by_type), min_tp) for o in each] for each in allowed]
            chains = _shared(question, tailed)
            if chains is not None:
                candidates[tuple(chains)] = _estimate_s(question, chains, tables)
    ranked = sorted(candidates, key=lambda chains: (candidates[chains], chains))
    return _best(question, [list(chains) for chains in ranked[:PRICED]], fixed=False)


def _options(question: Question, k: int, tables: _Tables) -> Iterator[_Option]:
    for costs in question.costs:
        if not costs.measured[k]:
            continue
        for depth in range(1, min(int(question.limits[k]), question.num_layers) + 1):
            cuts = _equal_cuts(question.num_layers, depth)
            loads = _loads(tables.get(costs, depth, question.num_layers, True), [k] * depth)
            seconds = [float(v[i, j]) for v, i, j in zip(loads, cuts, cuts[1:])]
            if all(map(math.isfinite, seconds)):
                yield _Option(
                    stages=tuple(Stage(k, i, j) for i, j in pairwise(cuts)),
                    tp=question.classes[k].tp,
                    costs=costs,
                    count=int(question.limits[k]) // depth,
                    sum_s=sum(seconds),
                    max_s=max(seconds),
                )


def _with_tail(question: Question, option: _Option, num_pipelines: int, min_tp: int) -> _Option:
    tail = question.sync(option.costs, num_pipelines, min_tp).tail
    return replace(option, tail_s=max(float(tail[k, i, j]) for k, i, j in option.stages))


def _shared(question: Question, by_type: Sequence[Sequence[_Option]]) -> list[Chain] | None:
    """The option of each type that runs most, at the least time in which all of them run the batch."""
    if not any(by_type):
        return None

    def best(time_s: float) -> list[_Option]:
        picked = [max(each, key=lambda o: o.samples(time_s)) for each in by_type if each]
        return [option for option in picked if option.samples(time_s) > 0]

    low, high = 0.0, max(o.tail_s + o.sum_s + question.need * o.max_s for each in by_type for o in each)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        enough = sum(option.samples(middle) for option in best(middle)) >= question.need
        low, high = (low, middle) if enough else (middle, high)
    chosen = best(high)
    groups = [data_split.Group(o.count, o.costs.micro_batch, ((o.sum_s, o.max_s),), question.need) for o in chosen]
    split = data_split.share(groups, question.need)
    if split is None:
        return None
    chains = []
    for option, total in zip(chosen, split[1]):
        each, more = divmod(total, option.count)
        for m, count in ((each + 1, more), (each, option.count - more)):
            if count:
                chains.append(Chain(count, option.costs.micro_batch, m, option.stages))
    return chains


def _estimate_s(question: Question, chains: Sequence[Chain], tables: _Tables) -> float:
    costs_of = {costs.micro_batch: costs for costs in question.costs}
    slowest = 0.0
    for chain in chains:
        costs, depth = costs_of[chain.micro_batch], len(chain.stages)
        classes = [stage.class_index for stage in chain.stages]
        loads = _loads(tables.get(costs, depth, question.num_layers, True), classes)
        seconds = [float(v[stage.first, stage.end]) for v, stage in zip(loads, chain.stages)]
        slowest = max(slowest, cost.pipeline_s(seconds, chain.num_micro_batches))
    return slowest + max(_tail_s(question, costs_of[chain.micro_batch], chains) for chain in chains)


# Prices.


def _tail_s(question: Question, costs: Costs, chains: Sequence[Chain]) -> float:
    """Longest update and exposed sync of a stage, over the slowest links."""
    stages = [stage for chain in chains for stage in chain.stages]
    min_tp = min(question.classes[stage.class_index].tp for stage in stages)
    tail = question.sync(costs, sum(chain.number for chain in chains), min_tp).tail
    return max(float(tail[k, i, j]) for k, i, j in stages)


def _best(question: Question, candidates: Sequence[Sequence[Chain]], fixed: bool) -> Baseline | None:
    """The best candidate on its nodes; with `fixed`, its micro-batches stay as they are."""
    best: Baseline | None = None
    for chains in candidates:
        found = evaluate(question, Candidate(tuple(chains), 0.0))
        if found is None:
            continue
        time_s = found.time_s
        if fixed:
            slowest = max(
                cost.pipeline_s([stage.load_s for stage in pipeline.stages], chains[0].num_micro_batches)
                for pipeline in found.pipelines
            )
            time_s += slowest - found.predicted.pipeline_s
        if best is None or time_s < best.iteration_s:
            best = Baseline(iteration_s=time_s, layout=", ".join(_words(question, chain) for chain in chains))
    return best


def _words(question: Question, chain: Chain) -> str:
    stages = " | ".join(
        f"{question.classes[k].device_type} tp{question.classes[k].tp} {'+'.join(str(s.end - s.first) for s in same)}"
        for k, same in ((k, list(same)) for k, same in groupby(chain.stages, lambda stage: stage.class_index))
    )
    return f"{chain.number} x [{stages}] {chain.num_micro_batches} micro-batches of {chain.micro_batch}"
