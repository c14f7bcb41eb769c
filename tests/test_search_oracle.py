"""`planner.search.plan` against the exhaustive oracle, on tiny cases of unequal devices."""

from __future__ import annotations

import pytest
from oracle import Numbers, Pipeline, Stage, draw, optimum, value_of

from planner.plans import Infeasible, Plan
from planner.search import plan

SEEDS, CHUNK = 220, 10
TOLERANCE = 1e-3


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_plans_are_as_good_as_the_best_of_all(start: int) -> None:
    wrong = [f"seed {seed}: {what}" for seed in range(start, start + CHUNK) for what in differences(seed)]
    assert not wrong, "\n".join(wrong)


def differences(seed: int) -> list[str]:
    """What is wrong with the plan for a case; empty if nothing is."""
    profile, cluster, job = draw(seed)
    best = optimum(profile, cluster, job)
    try:
        found = plan(profile, cluster, job, judge="formula")
    except Infeasible as no_plan:
        return [] if best is None else [f"no plan ({no_plan}), but {best.value} s by {best.pipelines}"]
    if best is None:
        return [f"a plan, but nothing fits: {found!r}"]
    out = list(found.problems(profile, cluster, job))
    value = value_of(Numbers(profile, cluster, job), bare(found))
    if found.predicted.iteration_s != pytest.approx(value, rel=1e-9):
        out.append(f"predicted {found.predicted.iteration_s} s, but the same plan takes {value} s")
    if value > best.value * (1 + TOLERANCE):
        out.append(f"{value} s is {value / best.value - 1:.3%} above {best.value} s by {best.pipelines}")
    if found.lower_bound_s > best.value * (1 + 1e-9):
        out.append(f"lower bound {found.lower_bound_s} s, but {best.value} s by {best.pipelines}")
    assert value >= best.value * (1 - 1e-9), f"seed {seed}: the oracle missed {found!r}"
    return out


def bare(found: Plan) -> list[Pipeline]:
    """The choices of a plan, without any figure it carries."""
    return [
        Pipeline(p.micro_batch, p.num_micro_batches, tuple(Stage(s.device_type, s.tp, *s.layers) for s in p.stages))
        for p in found.pipelines
    ]
