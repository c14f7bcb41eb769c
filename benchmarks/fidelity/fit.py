"""The constants of a framework, fitted to runs: a search over a coarse grid, so that no run can be met by digits.

Time: least mean absolute error. Memory: the same, among those that put no run more than 5 % too low, because an
estimate that is too low lets a run die.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.fidelity import LOW, Case, outcome
from planner.frameworks import GIB, Framework
from planner.job import BytesPerParameter
from planner.plans import Plan

HAND_OVER_SHARES = [0.5 + 0.05 * n for n in range(11)]
LAUNCH_SHARES = [0.7 + 0.05 * n for n in range(7)]
EXTRA_BYTES = (0, 4, 8)  # per parameter, beside 16
CONTEXTS = [GIB * n // 4 for n in range(23)]
WORKSPACES = [0.5 * n for n in range(9)]
LOGITS = [float(n) for n in range(7)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What was found, and the mean absolute error on what it was fitted to."""

    framework: Framework
    error: float


def fit_time(cases: Sequence[Case], base: Framework) -> Fit:
    """`hand_over_share` and `launch_share`, one after the other, twice."""

    @cache
    def plan(i: int, launch_share: float) -> Plan:
        return cases[i].plan(replace(base, launch_share=launch_share))

    played: dict[tuple[object, ...], float] = {}

    def error(framework: Framework) -> float:
        errors = []
        for i, case in enumerate(cases):
            own = plan(i, framework.launch_share)
            share = framework.hand_over_share if any(len(p.stages) > 1 for p in own.pipelines) else 1.0
            key = (i, share, tuple((stage.forward_s, stage.backward_s) for stage in own.stages))
            if key not in played:
                played[key] = outcome(case, own, framework).error
            errors.append(abs(played[key]))
        return statistics.fmean(errors)

    best = replace(base, hand_over_share=1.0, launch_share=1.0)
    for _ in range(2):
        best = _least((replace(best, launch_share=round(x, 2)) for x in LAUNCH_SHARES), error)
        best = _least((replace(best, hand_over_share=round(x, 2)) for x in HAND_OVER_SHARES), error)
    return Fit(framework=best, error=error(best))


def _least(frameworks: Iterable[Framework], error: object) -> Framework:
    return min(frameworks, key=error)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage in the terms that memory is linear in."""

    parameters: float
    kept: float
    layers: tuple[tuple[float, float], ...]  # activations and logits of one micro-batch


def fit_memory(cases: Sequence[Case], base: Framework) -> Fit:
    """State beside 16 bytes, context, and the two workspace factors."""
    credible = [case for case in cases if case.measured_bytes]
    stages = [_terms(case) for case in credible]
    measured = [float(case.measured_bytes or 0) for case in credible]
    best: tuple[float, ...] = (math.inf,)
    for extra, factor, logits in itertools.product(EXTRA_BYTES, WORKSPACES, LOGITS):
        bare = [max(_bytes(stage, 16 + extra, factor, logits) for stage in each) for each in stages]
        for context in CONTEXTS:
            errors = [(nbytes + context) / real - 1 for nbytes, real in zip(bare, measured, strict=True)]
            if min(errors) >= -LOW:
                best = min(best, (statistics.fmean(map(abs, errors)), extra, context, factor, logits))
    error, extra, context, factor, logits = best
    framework = replace(
        base,
        state=BytesPerParameter(weights=4, gradients=4, optimizer=8 + int(extra)),
        context_bytes=int(context),
        workspace_layers=factor,
        workspace_logits=logits,
    )
    return Fit(framework=framework, error=error)


def _terms(case: Case) -> list[_Stage]:
    plan = case.plan(replace(case.framework, workspace_layers=0.0, workspace_logits=0.0))
    profile = case.profile
    cells = {(cell.kind, cell.tp, cell.micro_batch): cell.activation_bytes for cell in profile.cells}
    found = []
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            kinds = {profile.kind_of(l) for l in range(*stage.layers)}
            layers = tuple(
                (
                    float(cells[kind.name, stage.tp, pipeline.micro_batch]),
                    kind.logits_bytes * pipeline.micro_batch / stage.tp,
                )
                for kind in kinds
            )
            memory = stage.memory
            found.append(_Stage(memory.weights / plan.job.state.weights, memory.activations + memory.logits, layers))
    return list(dict.fromkeys(found))


def _bytes(stage: _Stage, per_parameter: float, factor: float, logits: float) -> float:
    workspace = max(factor * own + logits * of_logits for own, of_logits in stage.layers)
    return stage.parameters * per_parameter + stage.kept + workspace
