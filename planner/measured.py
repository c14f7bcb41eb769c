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

The actions are a trace of one iteration, each there once. One with all forwards and backwards is laid over the
simulated timeline, action by action; other kinds may be missing.

    F, B, I, W, UPDATE  while the stage computes
    RECV                from when the stage begins to wait, until it has arrived
    SEND                from its start until it is known to be done, which may be later than it was
    REDUCE_GRAD         from its launch until it is known to be done. Its index counts launches, of which a run may have
                        others than the plan: reductions of a stage are looked at together

A stage that waits in a receive is idle, measured as simulated, whether bytes move meanwhile or not. Shown as transfer
is what can have been one: at the sender from the start of the SEND until the receiver has it, at the receiver the part
of its wait after that start (after the end of the action that made it, where the trace has no SEND).

Each process counts from the start of its step after a barrier, so clocks of different hosts agree as well as that
barrier let them go at once. A clock that is ahead shows as slow hand-overs into its stage and fast ones out of it;
durations, and what a stage is idle between its first forward and its last backward, do not depend on it.

Where time is lost (`Loss`) is found by following what each action waited for: the action before it on its stage, and
the hand-over of its input, which may take as long as simulated. What goes beyond is lost here; what is late because
others are late is not. Summed on the way to the last backward it is at least as much as that one is late: some of it
fits into slack that the simulation has.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planner.files import did_you_mean
from planner.importers import reading
from planner.importers.reading import Line
from planner.plans import GIB, Plan, Stage, number, seconds, size, table, wrapped
from planner.schedule import COMPUTE, TRANSFERS, Action, Kind, other_end

if TYPE_CHECKING:
    from planner.simulate import Event, Lane, Timeline

METRICS = ("iteration_s", "peak_bytes", "action")
COLUMNS = ("metric", "value", "pipeline", "stage", "action", "start_s", "end_s")
TIMES: dict[str, frozenset[Kind]] = {  # halves of a backward are added up
    "forward": frozenset((Kind.F,)),
    "backward": frozenset((Kind.B, Kind.I, Kind.W)),
    "update": frozenset((Kind.UPDATE,)),
}
# Columns of a stage: what a figure is called there.
HEADERS = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "peak memory": "peak",
    "first forward": "begins",
    "last backward": "ends",
    "idle": "idle",
}
TIMELINE = ("first forward", "last backward", "idle")
OVERLAP_S = 1e-9  # of actions of a stage: rounding
SHOWN = 3  # places where time is lost, in a line of text


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """An action of a pipeline, and when it ran: seconds from the start of the iteration.

    Parameters
    ----------
    where
        Where that is written, for errors.
    """

    pipeline: int
    action: Action
    start_s: float
    end_s: float
    where: str = field(default="run", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Most bytes in use on a device: of a stage, of a pipeline, or of all that are not named.

    Parameters
    ----------
    where
        Where that is written, for errors.
    """

    nbytes: float
    pipeline: int | None = None
    stage: int | None = None
    where: str = field(default="run", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was measured.

    Parameters
    ----------
    iterations_s
        One per iteration.
    actions
        The trace of one iteration, in any order.

    Raises
    ------
    ValueError
        If an action of a pipeline is there twice.
    """

    iterations_s: tuple[float, ...] = ()
    peaks: tuple[Peak, ...] = ()
    actions: tuple[Ran, ...] = ()

    def __post_init__(self) -> None:
        seen: dict[tuple[int, Action], Ran] = {}
        for ran in self.actions:
            other = seen.setdefault((ran.pipeline, ran.action), ran)
            if other is not ran:
                raise ValueError(
                    f"{ran.where}: {ran.action} of pipeline {ran.pipeline} is there twice ({other.where}), expected"
                    " the trace of one iteration"
                )

    @property
    def iteration_s(self) -> float | None:
        """The median; of a trace alone the end of its last action."""
        if self.iterations_s:
            return statistics.median(self.iterations_s)
        return max((each.end_s for each in self.actions), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure, predicted and measured, in seconds or bytes.

    Parameters
    ----------
    pipeline, stage
        What it is of; None for all.
    """

    what: str
    predicted: float
    measured: float
    unit: str
    pipeline: int | None = None
    stage: int | None = None

    @property
    def error(self) -> float:
        """Signed: above 0 where the prediction is too high."""
        if self.predicted == self.measured:
            return 0.0
        return self.predicted / self.measured - 1 if self.measured else math.inf

    @property
    def more(self) -> float:
        """By how much the measured figure is above the predicted one."""
        return self.measured - self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Time that a run loses against the simulation at one action; below 0 where it gains some.

    Parameters
    ----------
    why
        "computing": it takes longer. "hand-over": its input arrives later than its making and a simulated hand-over
        explain. "pause": it begins later than all it needs. "wait": one of the last two, the trace has no receive that
        would tell which.
    """

    pipeline: int
    action: Action
    why: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run beside the simulation of its plan.

    Parameters
    ----------
    figures
        Everything that was measured and is predicted: of the run, then stage by stage.
    measured
        The trace as a timeline, without memory; None if it does not have all forwards and backwards.
    incomplete
        Why `measured` is None.
    losses
        Of every forward and backward of the trace, by pipeline and stage, in order.
    path
        Those from the start to the backward that ends last, each action the one that held up the next.
    """

    plan: Plan
    run: Run
    simulated: Timeline
    figures: tuple[Compared, ...]
    measured: Timeline | None
    incomplete: str
    losses: tuple[Loss, ...]
    path: tuple[Loss, ...]


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
                    where=_place(_cell(row, "value")),
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
    p = _index(row, "pipeline") or 0
    return Ran(pipeline=p, action=action, start_s=start_s, end_s=end_s, where=_place(line))


def _place(line: Line) -> str:
    """The line, without the column."""
    return f"{line.file}: line {line.number}"


# Comparing --------------------------------------------------------------------------------------------------------

_Key = tuple[int, Action]  # with its pipeline
_Place = tuple[int, int]  # pipeline, stage


def compare(plan: Plan, run: Run, simulated: Timeline) -> Comparison:
    """Hold a run against the plan and its simulation, action by action where the trace allows.

    Parameters
    ----------
    simulated
        The plan played as it was run: its schedule, its links, its framework.

    Raises
    ------
    ValueError
        If the run has a pipeline, stage or action that the plan has not, actions of a stage that overlap, or nothing
        that can be compared.
    """
    _check(plan, run, simulated)
    incomplete = _incomplete(run, simulated)
    measured = None if incomplete else _laid_out(plan, run, simulated)
    figures = (*_of_run(plan, run, simulated, measured), *_of_stages(plan, run, simulated, measured))
    if not figures:
        raise ValueError(f"run: nothing to compare; it has no rows of {', '.join(METRICS)}")
    steps = _steps(run, simulated, measured) if measured is not None else {}
    return Comparison(
        plan=plan,
        run=run,
        simulated=simulated,
        figures=figures,
        measured=measured,
        incomplete=incomplete,
        losses=tuple(loss for step in steps.values() for loss in step.losses),
        path=tuple(_path(steps)),
    )


def _of_run(plan: Plan, run: Run, simulated: Timeline, measured: Timeline | None) -> Iterator[Compared]:
    """Figures of all stages together."""
    if run.iteration_s:
        for what, predicted in (
            ("iteration, planned", plan.predicted.iteration_s),
            ("iteration, played", simulated.iteration_s),
        ):
            yield Compared(what=what, predicted=predicted, measured=run.iteration_s, unit="s")
    if measured is not None:
        ends = max(simulated.pipelines_s), max(measured.pipelines_s)
        yield Compared(what="last backward", predicted=ends[0], measured=ends[1], unit="s")
        if any(lane.reductions for lane in measured.lanes):
            synced = simulated.exposed_sync_s, measured.exposed_sync_s
            yield Compared(what="gradient sync after it", predicted=synced[0], measured=synced[1], unit="s")
    for (p, s), nbytes in _largest(run):
        if p is None or s is None:
            totals = [each.memory.total for q, t, each in _stages(plan) if p in (None, q) and s in (None, t)]
            what = f"peak memory, {_where(p, s)}"
            yield Compared(what=what, predicted=max(totals), measured=nbytes, unit="B", pipeline=p, stage=s)


def _of_stages(plan: Plan, run: Run, simulated: Timeline, measured: Timeline | None) -> Iterator[Compared]:
    """Figures of one stage after the other."""
    peaks = dict(_largest(run))
    traced: dict[_Place, list[Event]] = defaultdict(list)
    for ran in run.actions:
        traced[ran.pipeline, ran.action.stage].append(_event(ran))
    for p, s, stage in _stages(plan):
        lane = simulated.lane(p, s)
        pairs = [(what, _mean_s(lane.events, what), _mean_s(traced[p, s], what)) for what in TIMES]
        if measured is not None:
            pairs += zip(("first forward", "last backward", "idle"), _span(lane), _span(measured.lane(p, s)))
        for what, predicted, value in pairs:
            if predicted is not None and value is not None:
                yield Compared(what=what, predicted=predicted, measured=value, unit="s", pipeline=p, stage=s)
        if (p, s) in peaks:
            total = stage.memory.total
            yield Compared(what="peak memory", predicted=total, measured=peaks[p, s], unit="B", pipeline=p, stage=s)


def _mean_s(events: Iterable[Event], what: str) -> float | None:
    """Mean seconds per micro-batch of what a stage does."""
    ours = [event for event in events if event.action.kind in TIMES[what]]
    if not ours:
        return None
    return math.fsum(event.seconds for event in ours) / len({event.action.index for event in ours})


def _span(lane: Lane) -> tuple[float, float, float]:
    """When its first forward begins, when its last backward ends, and the seconds between in which it is idle."""
    compute = [event for event in lane.events if event.action.is_compute]
    start_s, end_s = compute[0].start_s, compute[-1].end_s
    return start_s, end_s, end_s - start_s - lane.compute_s


def _largest(run: Run) -> list[tuple[tuple[int | None, int | None], float]]:
    """The largest peak of every place, those of no certain stage first."""
    largest: dict[tuple[int | None, int | None], float] = defaultdict(float)
    for peak in run.peaks:
        largest[peak.pipeline, peak.stage] = max(largest[peak.pipeline, peak.stage], peak.nbytes)
    return sorted(largest.items(), key=lambda each: tuple(-1 if i is None else i for i in each[0]))


def _stages(plan: Plan) -> Iterator[tuple[int, int, Stage]]:
    for p, pipeline in enumerate(plan.pipelines):
        yield from ((p, s, stage) for s, stage in enumerate(pipeline.stages))


def _where(p: int | None, s: int | None) -> str:
    words = [f"pipeline {p}"] if p is not None else []
    words += [f"stage {s}"] if s is not None else []
    return " ".join(words) or "fullest device"


def _check(plan: Plan, run: Run, simulated: Timeline) -> None:
    """Refuse what the plan has not."""
    for peak in run.peaks:
        _check_place(plan, peak.pipeline, peak.stage, f"{peak.where}: a peak")
    for ran in run.actions:
        _check_place(plan, ran.pipeline, ran.action.stage, f"{ran.where}: {ran.action}")
    kinds = {(p, s): _kinds(simulated.lane(p, s), s, len(plan.pipelines[p].stages)) for p, s, _ in _stages(plan)}
    for ran in run.actions:
        p, (s, kind, index) = ran.pipeline, ran.action
        m = plan.pipelines[p].num_micro_batches
        if kind not in kinds[p, s]:
            raise ValueError(
                f"{ran.where}: {ran.action}: {_where(p, s)} plays {', '.join(kinds[p, s])} as simulated; if it ran"
                " another schedule, simulate that"
            )
        if index is not None and index >= m and kind != Kind.REDUCE_GRAD:
            raise ValueError(f"{ran.where}: {ran.action}: pipeline {p} has {number(m, 'micro-batch')}, 0 to {m - 1}")


def _check_place(plan: Plan, p: int | None, s: int | None, what: str) -> None:
    if p is not None and p >= len(plan.pipelines):
        raise ValueError(f"{what} is of pipeline {p}, the plan has {len(plan.pipelines)}")
    own = plan.pipelines if p is None else plan.pipelines[p : p + 1]
    if s is not None and all(s >= len(pipeline.stages) for pipeline in own):
        most = max(len(pipeline.stages) for pipeline in own)
        raise ValueError(f"{what} is of stage {s} of {_where(p, None)}, which has {most}")


def _kinds(lane: Lane, s: int, num_stages: int) -> tuple[Kind, ...]:
    """What a stage may have done."""
    found = {event.action.kind for event in lane.events} | {Kind.REDUCE_GRAD, Kind.UPDATE}
    found |= {Kind.SEND_F, Kind.RECV_B} if s + 1 < num_stages else set()
    found |= {Kind.RECV_F, Kind.SEND_B} if s else set()
    return tuple(kind for kind in Kind if kind in found)


# The trace as a timeline ------------------------------------------------------------------------------------------


def _incomplete(run: Run, simulated: Timeline) -> str:
    """What keeps a trace from being laid over the simulation; empty if nothing does."""
    traced = {(ran.pipeline, ran.action) for ran in run.actions}
    if not traced:
        return "no actions"
    for lane in simulated.lanes:
        expected = [event.action for event in lane.events if event.action.is_compute]
        missing = [action for action in expected if (lane.pipeline, action) not in traced]
        if missing:
            where = _where(lane.pipeline, missing[0].stage)
            return f"{where} lacks {len(missing)} of its {len(expected)} forwards and backwards, {missing[0]} first"
    return ""


def _laid_out(plan: Plan, run: Run, simulated: Timeline) -> Timeline:
    from planner import simulate

    ran: dict[_Place, list[Ran]] = {(lane.pipeline, lane.rank): [] for lane in simulated.lanes}
    ranks = {(lane.pipeline, s): lane.rank for lane in simulated.lanes for s in lane.stages}
    for each in run.actions:
        ran[each.pipeline, ranks[each.pipeline, each.action.stage]].append(each)
    for own in ran.values():
        _check_overlaps(own)
    moved = _moved(run)
    events = {key: [*(_event(each) for each in own if each.action.kind not in TRANSFERS)] for key, own in ran.items()}
    for (p, action), event in moved.items():
        events[p, ranks[p, action.stage]].append(event)
    timeline = simulate.lay_out(simulate.workload(plan), events)
    # Its memory would be predicted bytes at measured times.
    return replace(timeline, lanes=tuple(replace(lane, memory=None) for lane in timeline.lanes))


def _event(ran: Ran) -> Event:
    from planner.simulate import Event

    return Event(ran.action, ran.start_s, ran.end_s)


def _check_overlaps(own: Sequence[Ran]) -> None:
    """A stage computes one thing at a time."""
    computing = [each for each in own if each.action.kind in COMPUTE or each.action.kind == Kind.UPDATE]
    computing.sort(key=lambda each: (each.start_s, each.end_s))
    for one, other in pairwise(computing):
        if other.start_s < one.end_s - OVERLAP_S:
            raise ValueError(
                f"{other.where}: {other.action} of pipeline {other.pipeline} begins at {other.start_s:g} s, before"
                f" {one.action} ends at {one.end_s:g} s"
            )


def _moved(run: Run) -> dict[_Key, Event]:
    """What can have been the transfer of each SEND and RECV; without those that leave no time for one."""
    ran = {(each.pipeline, each.action): each for each in run.actions}
    moved: dict[_Key, Event] = {}
    for (p, action), each in ran.items():
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            sent, made = ran.get((p, other_end(action))), _made(ran, p, action)
            since_s = sent.start_s if sent is not None else made.end_s if made is not None else each.start_s
            event = _event(replace(each, start_s=max(each.start_s, since_s)))
        elif action.kind in (Kind.SEND_F, Kind.SEND_B):
            here = ran.get((p, other_end(action)))
            event = _event(replace(each, end_s=min(each.end_s, here.end_s if here is not None else each.end_s)))
        else:
            continue
        if event.end_s > event.start_s:
            moved[p, action] = event
    return moved


def _makers(s: int, forward: bool, k: int | None) -> tuple[Action, ...]:
    """What may have made what stage s receives: one of these is there."""
    if forward:
        return (Action(s - 1, Kind.F, k),)
    return (Action(s + 1, Kind.I, k), Action(s + 1, Kind.B, k))


def _made(ran: Mapping[_Key, Ran], p: int, receive: Action) -> Ran | None:
    makers = _makers(receive.stage, receive.kind == Kind.RECV_F, receive.index)
    return next((ran[p, maker] for maker in makers if (p, maker) in ran), None)


# Where time is lost -----------------------------------------------------------------------------------------------


class _Wait(NamedTuple):
    """A forward or backward and what it waited for: the one before it on its stage, and its input."""

    event: Event
    before: _Key | None
    before_s: float  # when that ended
    maker: _Key | None
    made_s: float
    arrival_s: float | None  # of the input, None if that is not told


class _Step(NamedTuple):
    """What is lost at an action, and which one held it up."""

    losses: tuple[Loss, ...]
    cause: _Key | None
    end_s: float


def _steps(run: Run, simulated: Timeline, measured: Timeline) -> dict[_Key, _Step]:
    """Every forward and backward, by pipeline and stage, in the order of the run."""
    received = (Kind.RECV_F, Kind.RECV_B)
    theirs = {(lane.pipeline, e.action): e.end_s for lane in simulated.lanes for e in lane.transfers}
    ours = {(each.pipeline, each.action): each.end_s for each in run.actions if each.action.kind in received}
    as_simulated = _waits(simulated, theirs)
    return {key: _step(key[0], as_simulated[key], wait) for key, wait in _waits(measured, ours).items()}


def _waits(timeline: Timeline, arrivals: Mapping[_Key, float]) -> dict[_Key, _Wait]:
    compute = [(lane.pipeline, [e for e in lane.events if e.action.is_compute]) for lane in timeline.lanes]
    ends = {(p, event.action): event.end_s for p, events in compute for event in events}
    waits: dict[_Key, _Wait] = {}
    for p, events in compute:
        before: _Key | None = None
        for event in events:
            s, kind, k = event.action
            receive = Action(s, Kind.RECV_F if kind == Kind.F else Kind.RECV_B, k)
            makers = () if kind == Kind.W else _makers(s, kind == Kind.F, k)
            maker = next(((p, each) for each in makers if (p, each) in ends), None)
            waits[p, event.action] = _Wait(
                event=event,
                before=before,
                before_s=ends[before] if before is not None else 0.0,
                maker=maker,
                made_s=ends[maker] if maker is not None else 0.0,
                arrival_s=arrivals.get((p, receive)) if maker is not None else None,
            )
            before = p, event.action
    return waits


def _step(p: int, simulated: _Wait, measured: _Wait) -> _Step:
    """An action against its simulation, where others being late is not its own lateness."""
    arrival_s = simulated.made_s if simulated.arrival_s is None else simulated.arrival_s
    due_s = measured.made_s + arrival_s - simulated.made_s  # its input, by a hand-over as simulated
    free_s = max(measured.before_s, due_s)
    pause_s = simulated.event.start_s - max(simulated.before_s, arrival_s)  # where transfers block
    late_s = measured.event.start_s - free_s - pause_s
    longer_s = measured.event.seconds - simulated.event.seconds
    parts = (*_before(late_s, free_s, measured), ("computing", longer_s))
    losses = tuple(Loss(pipeline=p, action=measured.event.action, why=why, seconds=each) for why, each in parts)
    held_up = measured.maker is not None and due_s > measured.before_s
    return _Step(losses, measured.maker if held_up else measured.before, measured.event.end_s)


def _before(late_s: float, free_s: float, measured: _Wait) -> Iterator[tuple[str, float]]:
    """Lateness of a start by reason."""
    if measured.maker is None:
        yield "pause", late_s
    elif measured.arrival_s is None:
        yield "wait", late_s
    else:
        over_s = min(max(measured.arrival_s - free_s, 0.0), late_s) if late_s > 0 else late_s
        yield "hand-over", over_s
        yield "pause", late_s - over_s


def _path(steps: Mapping[_Key, _Step]) -> Iterator[Loss]:
    """Losses on the way to the end of the last backward, from the start."""
    way: list[_Step] = []
    at = max(steps, key=lambda key: steps[key].end_s, default=None)
    while at is not None:
        way.append(steps[at])
        at = steps[at].cause
    for step in reversed(way):
        yield from step.losses


# In words ---------------------------------------------------------------------------------------------------------


def comparison_text(comparison: Comparison) -> str:
    """The comparison to print: figures of the run, a row per stage, and where time is lost."""
    plan, run = comparison.plan, comparison.run
    count = len(run.iterations_s)
    alone = "iteration as traced" if run.actions else "no iteration time"
    iterations = f"median of {count} iterations" if count > 1 else "1 iteration" if count else alone
    lines = [f"{plan.profile_name} on {plan.cluster_name}: {iterations}, {number(len(run.actions), 'action')}"]
    rows = []
    for each in comparison.figures:
        if each.pipeline is None or each.stage is None:
            show = size if each.unit == "B" else seconds
            rows.append([each.what, show(each.predicted), show(each.measured), f"{each.error:+.1%}"])
    if rows:
        lines += table(["", ">predicted", ">measured", ">error"], rows)
    lines += _stage_tables(comparison)
    if comparison.measured is not None:
        lines += ["", *_lost(comparison)]
    elif run.actions:
        lines += ["", *wrapped("trace", f"not laid over the simulation: {comparison.incomplete}")]
    return "\n".join(lines)


def _stage_tables(comparison: Comparison) -> list[str]:
    """A row per stage, twice: what its actions take, and when they ran; as simulated, and what the run adds."""
    places: dict[_Place, dict[str, Compared]] = defaultdict(dict)
    for each in comparison.figures:
        if each.pipeline is not None and each.stage is not None:
            places[each.pipeline, each.stage][each.what] = each
    largest = max((row["peak memory"].predicted for row in places.values() if "peak memory" in row), default=0)
    byte, unit = (GIB, "GiB") if largest >= GIB else (1 << 20, "MiB")
    scales = {what: ((byte, 2) if what == "peak memory" else (1e-3, 2)) for what in HEADERS}
    worst = {(p, s): [_worst(comparison, p, s)] for p, s in places}
    of_actions = tuple(what for what in HEADERS if what not in TIMELINE)
    return [
        *_table(f"Per micro-batch, ms, and peak memory, {unit}", places, of_actions, scales),
        *_table("Timeline, ms; idle between begin and end", places, TIMELINE, scales, "loses most at", worst),
    ]


def _table(
    title: str,
    places: Mapping[_Place, Mapping[str, Compared]],
    columns: Sequence[str],
    scales: Mapping[str, tuple[float, int]],
    more: str = "",
    ends: Mapping[_Place, Sequence[str]] | None = None,
) -> list[str]:
    """Columns that some stage has, each with its difference; `more` is one more column, with texts by stage."""
    shown = [what for what in columns if any(what in row for row in places.values())]
    if not shown:
        return []
    header = [">pipeline", ">stage", *(name for what in shown for name in (f">{HEADERS[what]}", ">+-"))]
    rows = []
    for place, row in sorted(places.items()):
        cells = [cell for what in shown for cell in _cells(row.get(what), *scales[what])]
        rows.append([*map(str, place), *cells, *(ends[place] if ends is not None else ())])
    said = f"{title}: as simulated, and how much more was measured (+-)"
    return ["", said, *table([*header, *([more] if more else [])], rows)]


def _cells(each: Compared | None, scale: float, digits: int) -> tuple[str, str]:
    if each is None:
        return "", ""
    more = round(each.more / scale, digits) + 0.0  # no -0.00
    return f"{each.predicted / scale:,.{digits}f}", f"{more:+,.{digits}f}"


def _worst(comparison: Comparison, p: int, s: int) -> str:
    """The action of a stage that loses most."""
    ours = [loss for loss in comparison.losses if loss.pipeline == p and loss.action.stage == s]
    worst = max(ours, key=lambda loss: loss.seconds, default=None)
    if worst is None or worst.seconds < _least_s(comparison):
        return ""
    return f"{worst.action}, {worst.why} +{seconds(worst.seconds)}"


def _least_s(comparison: Comparison) -> float:
    """What is worth a word: a thousandth of the iteration."""
    return comparison.simulated.iteration_s / 1000


def _lost(comparison: Comparison) -> Iterator[str]:
    """How late the end of computing is, and the places on the way there that lose most."""
    figures = {each.what: each for each in comparison.figures if each.pipeline is None}
    end, sync, least_s = figures["last backward"], figures.get("gradient sync after it"), _least_s(comparison)
    if abs(end.more) < least_s:
        yield from wrapped("late", "the last backward ends as simulated")
    else:
        than = "later" if end.more > 0 else "earlier"
        share = f"{end.more / end.predicted:+.1%}"
        yield from wrapped("late", f"the last backward ends {seconds(abs(end.more))} {than} than simulated ({share})")
    groups: dict[tuple[int, int, str, bool], list[Loss]] = defaultdict(list)
    for loss in comparison.path:
        groups[loss.pipeline, loss.action.stage, loss.why, loss.action.kind == Kind.F].append(loss)
    found = [(sum(loss.seconds for loss in group), _group_words(*key, group)) for key, group in groups.items()]
    if sync is not None:
        found.append((sync.more, f"gradient sync after the last backward: {seconds(max(sync.more, 0.0))}"))
    found = sorted((each for each in found if each[0] >= least_s), key=lambda each: -each[0])
    most = [words for lost_s, words in found[:SHOWN] if lost_s >= 0.1 * found[0][0]]
    yield from wrapped("lost at", "; ".join(most) if most else "no place that held the run up")


def _group_words(p: int, s: int, why: str, forward: bool, group: Sequence[Loss]) -> str:
    """``backward of pipeline 0 stage 1: 9.100 ms, of it 4.000 ms at 1B3``."""
    where, total = _where(p, s), sum(loss.seconds for loss in group)
    what = {
        "computing": f"{'forward' if forward else 'backward'} of {where}",
        "hand-over": f"{'activations' if forward else 'gradients'} on their way to {where}",
        "pause": f"pauses of {where} before {'forwards' if forward else 'backwards'}",
        "wait": f"waits of {where} before {'forwards' if forward else 'backwards'} (hand-overs or pauses)",
    }[why]
    worst = max(group, key=lambda loss: loss.seconds)
    return f"{what}: {seconds(max(total, 0.0))}, most at {worst.action} ({seconds(max(worst.seconds, 0.0))})"
