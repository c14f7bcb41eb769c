"""Predicted against measured: runs that others published, priced and played as they were laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner import ModelProfile
from planner.cluster import Cluster
from planner.evaluate import evaluate
from planner.exporters.layout import Layout
from planner.frameworks import Framework
from planner.plans import Plan
from planner.simulate import Timeline

CALIBRATED, HELD_OUT, NEITHER = "calibrated", "held out", "-"
LOW = 0.05  # a memory estimate that is lower by more is one that lets a run die


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One published run.

    Parameters
    ----------
    group
        The set it belongs to.
    measured_s, measured_bytes
        Seconds of an iteration; most bytes on a device, None if not published or `impossible`.
    sync_s
        Gradient sync as published.
    impossible
        Why the published bytes cannot be right; the run counts for time alone.
    half
        Whether constants were fitted to it.
    """

    group: str
    name: str
    profile: ModelProfile
    cluster: Cluster
    layout: Layout
    framework: Framework
    measured_s: float
    measured_bytes: int | None
    sync_s: float | None = None
    impossible: str = ""
    half: str = NEITHER

    def plan(self, framework: Framework | None = None) -> Plan:
        """What the planner says of this layout."""
        framework = framework or self.framework
        job = framework.job(memory_margin=0.0, recompute=True)
        return evaluate(framework.profile(self.profile), self.cluster, self.layout, job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A case and what is predicted for it.

    Parameters
    ----------
    planned_s
        By the planning form, which knows nothing of frameworks.
    stages_bytes
        Per stage, the fullest of all pipelines.
    """

    case: Case
    planned_s: float
    played_s: float
    sync_s: float
    stages_bytes: tuple[int, ...]

    @property
    def error(self) -> float:
        """Of the time, signed."""
        return self.played_s / self.case.measured_s - 1

    @property
    def planned_error(self) -> float:
        """Of the planning form."""
        return self.planned_s / self.case.measured_s - 1

    @property
    def peak_bytes(self) -> int:
        """On the fullest device."""
        return max(self.stages_bytes)

    @property
    def memory_error(self) -> float | None:
        """Signed; below 0 where more was needed than predicted. None if nothing credible was published."""
        return self.peak_bytes / self.case.measured_bytes - 1 if self.case.measured_bytes else None


def outcome(case: Case, plan: Plan | None = None, framework: Framework | None = None) -> Outcome:
    """Price and play a case."""
    framework = framework or case.framework
    plan = plan or case.plan(framework)
    timeline = framework.play(plan, case.cluster)
    return Outcome(
        case=case,
        planned_s=plan.predicted.iteration_s,
        played_s=timeline.iteration_s,
        sync_s=timeline.exposed_sync_s,
        stages_bytes=_stages_bytes(timeline),
    )


def _stages_bytes(timeline: Timeline) -> tuple[int, ...]:
    peaks: dict[int, int] = {}
    for lane in timeline.lanes:
        assert lane.memory is not None
        for s in lane.stages:
            peaks[s] = max(peaks.get(s, 0), lane.memory.peak_bytes)
    return tuple(peaks[s] for s in sorted(peaks))


def halves(cases: Sequence[Case]) -> list[Case]:
    """Every second case of a set is for calibration: in the order of number of stages, then name, so that both halves
    have pipelines of every depth."""
    found: list[Case] = []
    for group in dict.fromkeys(case.group for case in cases):
        own = [case for case in cases if case.group == group]
        own.sort(key=lambda case: (max(len(pipeline.stages) for pipeline in case.layout.pipelines), case.name))
        found += [replace(case, half=HELD_OUT if i % 2 else CALIBRATED) for i, case in enumerate(own)]
    return found
