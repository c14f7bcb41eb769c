"""A run that was measured, read from a CSV file and held against the plan that it ran.

The file has a header and one row per figure. Columns, of which those that no row needs may be left out:

    metric          iteration_s, peak_bytes or action
    value           seconds of an iteration, most bytes in use on a device
    pipeline, stage where it was measured, counted from 0; a peak without them is that of the fullest device
    action          as schedules print it: 0F3, 1B0, 0SEND_F3, 0REDUCE_GRAD2, 0UPDATE; names the stage itself
    start_s, end_s  of the action, seconds from the start of the iteration

    metric,value,pipeline,stage,action,start_s,end_s
    iteration_s,0.512,,,,,
    iteration_s,0.508,,,,,
    peak_bytes,9551478784,0,0,,,
    action,,0,,0F0,0.000,0.021

Of several iterations the median counts, of several peaks the largest. A file of actions alone needs no metric column.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner.files import did_you_mean
from planner.importers import reading
from planner.importers.reading import Line
from planner.plans import Plan, Stage, seconds, size, table
from planner.schedule import Action, Kind

if TYPE_CHECKING:
    from planner.cluster import Cluster
    from planner.frameworks import Framework
    from planner.simulate import Timeline

METRICS = ("iteration_s", "peak_bytes", "action")
COLUMNS = ("metric", "value", "pipeline", "stage", "action", "start_s", "end_s")
# Compute actions of a trace that are compared, in words: kinds, and what the plan says.
TIMES: tuple[tuple[str, frozenset[Kind], Callable[[Stage], float]], ...] = (
    ("forward", frozenset((Kind.F,)), lambda stage: stage.forward_s),
    ("backward", frozenset((Kind.B, Kind.I, Kind.W)), lambda stage: stage.backward_s + stage.recompute_s),
    ("update", frozenset((Kind.UPDATE,)), lambda stage: stage.update_s),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """An action of a pipeline, and when it ran."""

    pipeline: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Most bytes in use on a device: of a stage, of a pipeline, or of all that are not named."""

    nbytes: float
    pipeline: int | None = None
    stage: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was measured.

    Parameters
    ----------
    iterations_s
        One per iteration.
    """

    iterations_s: tuple[float, ...] = ()
    peaks: tuple[Peak, ...] = ()
    actions: tuple[Ran, ...] = ()

    @property
    def iteration_s(self) -> float | None:
        """The median; of a trace alone the end of its last action."""
        if self.iterations_s:
            return statistics.median(self.iterations_s)
        return max((each.end_s for each in self.actions), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure, predicted and measured, in seconds or bytes."""

    what: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """Signed: above 0 where the prediction is too high."""
        return self.predicted / self.measured - 1


# Reading ----------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Run:
    """Read a run.

    Raises
    ------
    ValueError
        Naming the file, the line, the column and the value, and what would be right.
    """
    file = Path(path)
    head = reading.lines(file)[0]
    header = [name.strip() for name in head.text.split(",")]
    for name in header:
        if name not in COLUMNS:
            raise ValueError(f"{head.where}: column {name!r} is not among {did_you_mean(name, COLUMNS)}")
    if "metric" not in header and "action" not in header:
        raise ValueError(f"{head.where}: column 'metric' is missing; there are {', '.join(header)}")
    iterations, peaks, actions = [], [], []
    for row in reading.table(file, ()):
        metric = row["metric"].text if "metric" in row else "action"
        if metric == "iteration_s":
            iterations.append(_above_zero(_cell(row, "value")))
        elif metric == "peak_bytes":
            peaks.append(
                Peak(
                    nbytes=_above_zero(_cell(row, "value")),
                    pipeline=_index(row, "pipeline"),
                    stage=_index(row, "stage"),
                )
            )
        elif metric == "action":
            actions.append(_ran(row))
        else:
            raise ValueError(f"{row['metric'].where}: {metric!r} is not among {did_you_mean(metric, METRICS)}")
    return Run(iterations_s=tuple(iterations), peaks=tuple(peaks), actions=tuple(actions))


def _cell(row: Mapping[str, Line], name: str) -> Line:
    line = row.get(name)
    if line is None or not line.text:
        here = next(iter(row.values())) if line is None else line
        metric = row["metric"].text if "metric" in row else "action"
        raise ValueError(f"{here.file}: line {here.number}: {name}: missing, a row of metric {metric} needs it")
    return line


def _above_zero(line: Line) -> float:
    number = line.value()
    if number == 0:
        raise line.wrong("a number above 0")
    return number


def _index(row: Mapping[str, Line], name: str) -> int | None:
    line = row.get(name)
    if line is None or not line.text:
        return None
    if not line.text.isdecimal():
        raise line.wrong("an index from 0")
    return int(line.text)


def _ran(row: Mapping[str, Line]) -> Ran:
    line = _cell(row, "action")
    try:
        action = Action.parse(line.text)
    except ValueError as error:
        raise ValueError(f"{line.where}: {error}") from None
    stage = _index(row, "stage")
    if stage not in (None, action.stage):
        raise ValueError(f"{row['stage'].where}: {stage} is not the stage of {action}")
    start_s, end_s = _cell(row, "start_s").value(), _cell(row, "end_s").value()
    if end_s < start_s:
        raise ValueError(f"{row['end_s'].where}: {end_s:g} is before the start, {start_s:g}")
    return Ran(pipeline=_index(row, "pipeline") or 0, action=action, start_s=start_s, end_s=end_s)


# Comparing --------------------------------------------------------------------------------------------------------


def compare(
    plan: Plan, run: Run, cluster: Cluster | None = None, framework: Framework | None = None
) -> tuple[Compared, ...]:
    """Everything of the run that the plan predicts.

    Parameters
    ----------
    cluster
        To play the plan over the links and ports its devices share.
    framework
        To play it as that framework runs it; needs the cluster.

    Raises
    ------
    ValueError
        If the run has a pipeline or stage that the plan has not, or nothing that can be compared.
    """
    from planner import simulate

    _check_places(plan, run)
    if framework is not None and cluster is None:
        raise ValueError(f"framework: {framework.name!r} needs the cluster, whose links it uses in its own way")
    played = simulate.simulate(plan, cluster) if framework is None or cluster is None else framework.play(plan, cluster)
    found = tuple(_compared(plan, run, played))
    if not found:
        raise ValueError(f"run: nothing to compare; it has no rows of {', '.join(METRICS)}")
    return found


def _compared(plan: Plan, run: Run, played: Timeline) -> Iterator[Compared]:
    measured_s = run.iteration_s
    if measured_s:
        for what, predicted in (
            ("iteration, planned", plan.predicted.iteration_s),
            ("iteration, played", played.iteration_s),
        ):
            yield Compared(what=what, predicted=predicted, measured=measured_s, unit="s")
    largest: dict[tuple[int | None, int | None], float] = defaultdict(float)
    for peak in run.peaks:
        largest[peak.pipeline, peak.stage] = max(largest[peak.pipeline, peak.stage], peak.nbytes)
    for (p, s), nbytes in sorted(largest.items(), key=lambda each: tuple(-1 if i is None else i for i in each[0])):
        predicted = max(stage.memory.total for q, t, stage in _stages(plan) if p in (None, q) and s in (None, t))
        yield Compared(what=f"peak memory, {_where(p, s)}", predicted=predicted, measured=nbytes, unit="B")
    yield from _action_times(plan, run)


def _action_times(plan: Plan, run: Run) -> Iterator[Compared]:
    """Mean seconds per micro-batch of each stage, halves of a backward added up."""
    total: dict[tuple[int, int, str], float] = defaultdict(float)
    micro_batches: dict[tuple[int, int, str], set[int | None]] = defaultdict(set)
    for ran in run.actions:
        for what, kinds, _ in TIMES:
            if ran.action.kind in kinds:
                key = (ran.pipeline, ran.action.stage, what)
                total[key] += ran.end_s - ran.start_s
                micro_batches[key].add(ran.action.index)
    for p, s, stage in _stages(plan):
        for what, _, predicted in TIMES:
            if total.get((p, s, what)):
                mean = total[p, s, what] / len(micro_batches[p, s, what])
                yield Compared(what=f"{what}, {_where(p, s)}", predicted=predicted(stage), measured=mean, unit="s")


def _stages(plan: Plan) -> Iterator[tuple[int, int, Stage]]:
    for p, pipeline in enumerate(plan.pipelines):
        yield from ((p, s, stage) for s, stage in enumerate(pipeline.stages))


def _where(p: int | None, s: int | None) -> str:
    words = [f"pipeline {p}"] if p is not None else []
    words += [f"stage {s}"] if s is not None else []
    return " ".join(words) or "fullest device"


def _check_places(plan: Plan, run: Run) -> None:
    places: list[tuple[int | None, int | None, str]] = [(peak.pipeline, peak.stage, "a peak") for peak in run.peaks]
    places += [(ran.pipeline, ran.action.stage, str(ran.action)) for ran in run.actions]
    for p, s, what in places:
        if p is not None and p >= len(plan.pipelines):
            raise ValueError(f"run: {what} is of pipeline {p}, the plan has {len(plan.pipelines)}")
        own = plan.pipelines if p is None else plan.pipelines[p : p + 1]
        if s is not None and all(s >= len(pipeline.stages) for pipeline in own):
            most = max(len(pipeline.stages) for pipeline in own)
            raise ValueError(f"run: {what} is of stage {s} of {_where(p, None)}, which has {most}")


def comparison_text(plan: Plan, run: Run, cluster: Cluster | None = None, framework: Framework | None = None) -> str:
    """The comparison as a table to print; parameters as in `compare`."""
    compared = compare(plan, run, cluster, framework)
    rows = []
    for each in compared:
        show = size if each.unit == "B" else seconds
        rows.append([each.what, show(each.predicted), show(each.measured), f"{each.error:+.1%}"])
    count = len(run.iterations_s)
    iterations = f"median of {count} iterations" if count > 1 else "1 iteration" if count else "no iteration time"
    title = f"{plan.profile_name} on {plan.cluster_name}: {iterations}, {len(run.actions)} actions"
    return "\n".join([title, *table(["", ">predicted", ">measured", ">error"], rows)])
