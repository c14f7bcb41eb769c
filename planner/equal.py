"""Equal pipelines: P times one chain of stages. Few questions, so each is answered over many more templates than the
general search can afford: whole shares of the cluster, any mix of classes, as deep as they go."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from planner import cost, stage_split
from planner.assemble import Candidate, Chain
from planner.cost import Costs, StageTable
from planner.question import Question
from planner.stage_split import Template, Templates, TooManyTemplates

MOST_TEMPLATES = 1000
DEPTHS = (64, 16, 8, 4)
SPLIT = 2  # templates of each number of pipelines, micro-batch size and degree that are split exactly
EVERY = 16  # numbers of pipelines up to which each is tried; beyond, the largest of those with the same share of units


def candidates(question: Question, *, even: bool = False, limit_s: float = math.inf) -> Iterator[Candidate]:
    """The best chains of every number of pipelines, micro-batch size and tp degree, by the links of the question.

    Parameters
    ----------
    even
        Only where all pipelines take the same number of micro-batches; else some take one more.
    limit_s
        Chains that take longer, gradient sync included, are left out.
    """
    graphs: dict[tuple[int, ...], Templates | None] = {}
    for copies, degree in itertools.product(_numbers(question), question.degrees):
        limits = np.where(question.tp == degree, question.limits, 0) // copies
        key = (degree, *map(int, limits), *map(int, question.available // copies))
        if key not in graphs:
            graphs[key] = _templates(question, copies, degree)
        graph = graphs[key]
        if graph is None:
            continue
        for costs in question.costs:
            total, rest = divmod(question.need, costs.micro_batch)
            if not rest and total >= copies and not (even and total % copies):
                yield from _chains(question, costs, graph, copies, total, degree, limit_s)


def table(costs: Costs, depth: int, num_micro_batches: int, copies: int) -> StageTable:
    """Stage costs of pipelines of at most so many stages and micro-batches."""
    in_flight = [min(q, num_micro_batches) for q in range(1, depth + 1)]
    return cost.stage_table(costs.with_owners(copies), in_flight, copies > 1)


def _numbers(question: Question) -> list[int]:
    most = min(int(question.available.sum()), question.need)
    largest = {tuple(question.available // copies): copies for copies in range(1, most + 1)}
    return sorted({*range(1, min(EVERY, most) + 1), *largest.values()})


def _chains(
    question: Question, costs: Costs, graph: Templates, copies: int, total: int, degree: int, limit_s: float
) -> Iterator[Candidate]:
    """Chains of one number of pipelines and micro-batch size."""
    each, more = divmod(total, copies)
    m = each + (more > 0)
    stage_costs = table(costs, len(graph.levels), each, copies)
    swept = stage_split.sweep(stage_costs, graph, weight_sum=1.0, weight_max=m - 1.0)
    longest = np.where(np.isfinite(swept.sum_s), swept.max_s, 0.0)
    times = swept.sum_s + (m - 1) * longest
    tail = question.sync(costs, copies, degree).tail if copies > 1 else None
    for t in np.argsort(times, kind="stable")[:SPLIT]:
        if not times[t] < limit_s:
            return
        split = Template(stage_costs, graph.counts[t]).walk(m)
        if split is None:
            continue
        time_s = split.sum_s + (m - 1) * split.max_s
        exposed_s = 0.0 if tail is None else max(float(tail[k, i, j]) for k, i, j in split.stages)
        if time_s + exposed_s < limit_s:
            shares = ((each + 1, more), (each, copies - more))
            chains = tuple(sorted(Chain(n, costs.micro_batch, count, split.stages) for count, n in shares if n))
            yield Candidate(chains, time_s)


def _templates(question: Question, copies: int, degree: int) -> Templates | None:
    """Templates of one degree that fit so many times; the deepest or mixed ones are left out where they are many."""
    limits = np.where(question.tp == degree, question.limits, 0) // copies
    if not limits.any():
        return None
    deepest = min(question.num_layers, question.job.max_depth or question.num_layers)
    classes = min(len(question.classes), question.job.max_classes or len(question.classes))
    for depth, most in itertools.product(DEPTHS, dict.fromkeys((classes, 2, 1))):
        try:
            return stage_split.templates(
                limits,
                question.use,
                question.available // copies,
                min(depth, deepest),
                min(most, classes),
                MOST_TEMPLATES,
            )
        except TooManyTemplates:
            continue
    return None
