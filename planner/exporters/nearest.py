"""The fastest plan whose pipelines are all alike: what a system of one rectangular topology can run in a plan's place.

Such a plan is P times one chain of stages, so its search is small: for each number of pipelines P, micro-batch size and
tp degree, the stages of all templates that fit P times at once, the best of them split exactly and placed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner import assemble, cost, equal, simulate, stage_split
from planner.assemble import Candidate, Chain, Found
from planner.cluster import Cluster
from planner.exporters.base import Export, Exporter, NotExpressible, Request, difference
from planner.plans import Pipeline, Plan, seconds
from planner.question import Clock, Question, ask
from planner.stage_split import Ints

PESSIMISM = 1.06  # placement finds faster links than the search counts on
TRIED = 50  # uniform plans offered to the exporter


def nearest_uniform(request: Request, cluster: Cluster, exporter: Exporter, why: str) -> Export:
    """Export the fastest uniform plan that the exporter accepts, and say what it costs.

    Raises
    ------
    NotExpressible
        If there is none.
    ValueError
        If profile or cluster are not those of the plan.
    """
    plan, profile = request.plan, request.profile
    assert profile is not None
    for what, made_for, now in (
        ("profile", plan.provenance.profile, profile.digest),
        ("cluster", plan.provenance.cluster, cluster.digest),
    ):
        if made_for != now:
            raise ValueError(
                f"uniform: the {what} is not the one the plan was made for ({now}, the plan has {made_for})"
            )
    question = ask(profile, cluster, plan.job)
    found = sorted(_uniform(question, plan), key=lambda each: (each.time_s, each.num_pipelines, each.key))
    reasons: dict[str, None] = {}
    for each in found[:TRIED]:
        uniform = assemble.to_plan(
            question, each, plan.lower_bound_s, Clock(), (*plan.restrictions, "all pipelines alike")
        )
        simulated_s = simulate.simulate(uniform, cluster).iteration_s
        uniform = replace(uniform, predicted=replace(uniform.predicted, simulated_s=simulated_s))
        try:
            done = exporter(request.with_plan(uniform))
        except NotExpressible as error:
            reasons[str(error)] = None
            continue
        return replace(done, notes=(_price(plan, uniform, why), *done.notes))
    raise NotExpressible("; ".join((why, "and no uniform plan can be exported instead", *list(reasons)[:1])))


def _price(plan: Plan, uniform: Plan, why: str) -> str:
    first, what = uniform.pipelines[0], "simulated"
    times_s = [each.predicted.simulated_s or math.inf for each in (uniform, plan)]
    if math.inf in times_s:
        times_s, what = [each.predicted.iteration_s for each in (uniform, plan)], "predicted"
    slower = times_s[0] / times_s[1] - 1
    split = " + ".join(str(stage.num_layers) for stage in first.stages)
    return (
        f"{why}. In its place the nearest uniform plan: {len(uniform.pipelines)} x ({split}) layers, "
        f"{first.num_micro_batches} micro-batches of {first.micro_batch} each, {what} at {seconds(times_s[0])} per "
        f"iteration against {seconds(times_s[1])}: {abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
    )


def _uniform(question: Question, plan: Plan) -> Iterator[Found]:
    """Plans of equal pipelines, the best few of each kind."""
    best = math.inf
    for chains in itertools.chain(_repeated(question, plan), equal.candidates(question, even=True)):
        time_s = chains.time_s
        if time_s > best * (1.0 if question.uniform else PESSIMISM):
            continue
        found = assemble.evaluate(question, chains, reshare=False)
        if found is not None:
            best = min(best, found.time_s)
            yield found


def _repeated(question: Question, plan: Plan) -> Iterator[Candidate]:
    """Each pipeline of the plan, as often as it fits and divides the batch."""
    index = {(unit.device_type, unit.tp): k for k, unit in enumerate(question.classes)}
    seen: list[Pipeline] = []
    for pipeline in plan.pipelines:
        if any(_alike(pipeline, other) for other in seen):
            continue
        seen.append(pipeline)
        stages = tuple(stage_split.Stage(index[s.device_type, s.tp], *s.layers) for s in pipeline.stages)
        counts = np.bincount([stage.class_index for stage in stages], minlength=len(question.classes))
        costs = next((each for each in question.costs if each.micro_batch == pipeline.micro_batch), None)
        for copies in range(_most_copies(question, counts), 0, -1):
            m, rest = divmod(question.need, copies * pipeline.micro_batch)
            if costs is None or rest or not m:
                continue
            stage_costs = equal.table(costs, len(stages), m, copies)
            loads = [float(stage_costs.load[k, len(stages) - 1 - s, i, j]) for s, (k, i, j) in enumerate(stages)]
            if all(map(math.isfinite, loads)):
                yield Candidate((Chain(copies, pipeline.micro_batch, m, stages),), cost.pipeline_s(loads, m))
                break


def _alike(a: Pipeline, b: Pipeline) -> bool:
    """Whether two pipelines are of the same classes and cuts."""
    types = [[stage.device_type for stage in each.stages] for each in (a, b)]
    return not difference(a, b) and types[0] == types[1]


def _most_copies(question: Question, counts: Ints) -> int:
    """How often units of these counts can be had at once."""
    have = np.concatenate([question.limits, question.available])
    take = np.concatenate([counts, counts @ question.use])
    return int((have[take > 0] // take[take > 0]).min())
