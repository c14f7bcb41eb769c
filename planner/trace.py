"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    pid     pipeline; of a run shown beside it, further on
    tid     rank: the stage, where a rank runs one. Above the ranks: rows for what a rank sends, receives and reduces;
            what overlaps stands in several rows, because events of one row must not overlap
    X       an action, named as the schedule prints it (``0F3``), with its layers, micro-batch and bytes
    s, f    arrow from a send to its receive
    C       memory of a rank
    M       names and order of the rows

Times are microseconds to the nanosecond. A trace with too many events keeps the first and last micro-batches and a run
in the middle, and says so in ``otherData``.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from planner import files
from planner.draw import apart
from planner.plans import grouped, inclusive
from planner.schedule import TRANSFERS, Kind

if TYPE_CHECKING:
    from planner.plans import Plan, Stage
    from planner.schedule import Action
    from planner.simulate import Event, Lane, Reduction, Timeline

SUFFIXES = (".json", ".json.gz")
SENDS = (Kind.SEND_F, Kind.SEND_B)
MIB = 1 << 20

CATEGORY = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward",
    Kind.W: "backward",
    Kind.REDUCE_GRAD: "sync",
    Kind.UPDATE: "update",
} | dict.fromkeys(TRANSFERS, "transfer")


def chrome(
    timeline: Timeline,
    plan: Plan | None = None,
    *,
    reductions: Sequence[Reduction] = (),
    source: str = "simulated",
    measured: Timeline | None = None,
    max_events: int = 200_000,
) -> dict[str, Any]:
    """The trace as plain data.

    Parameters
    ----------
    plan
        The plan that was played, for layers, bytes and where it came from.
    reductions
        Those of the workload, by the index of their actions; of the plan's own workload if left out.
    source
        What made the timeline, shown beside the name of each pipeline: "simulated", "measured".
    measured
        A run of the same lists: one more process below that of each pipeline, its pid as many pipelines further on.
    max_events
        Events of all kinds but M; more are thinned out by whole micro-batches. Gradient sync and update always stay.
    """
    if max_events < 1:
        raise ValueError(f"max_events: {max_events} is not at least 1")
    if plan is not None and not reductions:
        from planner.simulate import workload

        reductions = workload(plan).reductions
    facts = _Facts(plan=plan, reductions=tuple(reductions))
    kept = _kept(timeline, max_events if measured is None else max_events // 2)
    events: list[dict[str, Any]] = []
    for p in dict.fromkeys(lane.pipeline for lane in timeline.lanes):
        if measured is None:
            events += _pipeline(p, timeline, facts, kept.get(p), _Process(p, p, "", source))
        else:
            events += _pipeline(p, timeline, facts, kept.get(p), _Process(p, 2 * p, f", {source}", source))
            run = _Process(p + len(timeline.pipelines_s), 2 * p + 1, ", measured", "measured")
            # Its reductions are numbered as it launched them, which need not be as played.
            events += _pipeline(p, measured, replace(facts, reductions=()), kept.get(p), run)
    events = _paired(events)
    arrows: dict[tuple[int, str], int] = {}
    for event in events:
        if event["ph"] in "sf":  # Perfetto takes a number, or text only if it is hexadecimal
            event["id"] = arrows.setdefault((event["pid"], event["name"]), len(arrows) + 1)
    # Metadata first; at one time a slice before the arrows that begin or end in it.
    events.sort(key=lambda event: ("MCXsf".index(event["ph"]) > 0, event.get("ts", 0.0), "MCXsf".index(event["ph"])))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _other(timeline, plan, source, kept, measured)}


def save(trace: Mapping[str, Any], path: str | Path) -> None:
    """Write a trace whole, one event per line; packed if `path` ends in ``.gz``. Same trace, same bytes."""
    path = Path(path)
    if not path.name.lower().endswith(SUFFIXES):
        raise ValueError(f"{path}: suffix {''.join(path.suffixes[-2:])!r} is not among {', '.join(SUFFIXES)}")
    data = dumps(trace).encode()
    files.write(path, gzip.compress(data, mtime=0) if path.suffix.lower() == ".gz" else data)


def dumps(trace: Mapping[str, Any]) -> str:
    """JSON text with one event per line."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in trace["traceEvents"])
    rest = {key: value for key, value in trace.items() if key != "traceEvents"}
    return f'{{"traceEvents":[\n{lines}\n],\n{json.dumps(rest, ensure_ascii=False)[1:-1]}}}\n'


# What is known about an action.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """Looks up what a timeline does not say."""

    plan: Plan | None
    reductions: tuple[Reduction, ...]

    def stage(self, p: int, s: int) -> Stage | None:
        return self.plan.pipelines[p].stages[s] if self.plan is not None else None

    def args(self, p: int, action: Action) -> dict[str, Any]:
        """Layers, micro-batch and bytes, as far as they are known and make sense."""
        args: dict[str, Any] = {"stage": action.stage}
        stage = self.stage(p, action.stage)
        if action.kind == Kind.REDUCE_GRAD:
            if action.index is not None and action.index < len(self.reductions):
                reduction = self.reductions[action.index]
                args |= {"block": reduction.block, "bytes": reduction.nbytes, "members": len(reduction.members)}
            return args
        if stage is not None:
            args["layers"] = inclusive(stage.layers)
        if action.index is not None:
            args["micro-batch"] = action.index
        if action.kind in TRANSFERS and stage is not None:
            # An activation leaves this stage or comes from the one before; its gradient takes the same way back.
            ours = action.kind in (Kind.SEND_F, Kind.RECV_B)
            sender = stage if ours else self.stage(p, action.stage - 1)
            args["bytes"] = sender.send_bytes if sender is not None else 0
        return args

    def pipeline_name(self, p: int) -> str:
        """``pipeline 3 (A2)``: by index, and by the letter that the printed plan uses."""
        for letter, members in grouped(self.plan) if self.plan is not None else ():
            if p in members:
                return f"pipeline {p} ({letter}{members.index(p) + 1 if len(members) > 1 else ''})"
        return f"pipeline {p}"

    def rank_name(self, lane: Lane) -> str:
        if len(lane.stages) > 1:
            words = [f"rank {lane.rank}", f"stages {', '.join(map(str, lane.stages))}"]
        else:
            stage = self.stage(lane.pipeline, lane.stages[0])
            words = [f"stage {lane.stages[0]}", f"layers {inclusive(stage.layers)}" if stage is not None else ""]
        return ", ".join(word for word in (*words, lane.device_type) if word)


# Events.


class _Process(NamedTuple):
    """What a pipeline of one source is shown as."""

    pid: int
    position: int
    suffix: str  # of its name
    source: str


def _pipeline(
    p: int, timeline: Timeline, facts: _Facts, kept: Collection[int] | None, process: _Process
) -> Iterator[dict[str, Any]]:
    pid = process.pid
    lanes = [lane for lane in timeline.lanes if lane.pipeline == p]
    yield _metadata("process_name", pid, 0, name=facts.pipeline_name(p) + process.suffix)
    yield _metadata("process_labels", pid, 0, labels=process.source)
    yield _metadata("process_sort_index", pid, 0, sort_index=process.position)
    free_tid = 1 + max(lane.rank for lane in lanes)
    position = 0
    for lane in lanes:
        name = facts.rank_name(lane)
        for words, row in _rows(lane, kept):
            tid = lane.rank if words == "" else free_tid
            free_tid += words != ""
            yield _metadata("thread_name", pid, tid, name=name if words == "" else f"{name.split(',')[0]} {words}")
            yield _metadata("thread_sort_index", pid, tid, sort_index=position)
            position += 1
            for event in row:
                yield _slice(pid, tid, event, facts.args(p, event.action))
                if event.action.kind in TRANSFERS:
                    yield _arrow(pid, tid, event)
        yield from _memory(pid, lane, name.split(",")[0], kept)


def _rows(lane: Lane, kept: Collection[int] | None) -> Iterator[tuple[str, list[Event]]]:
    """What the rows of a rank are called, and their events: computing first, then sends, receives, reductions."""
    for words, events in (
        ("", lane.events),
        ("sends", [event for event in lane.transfers if event.action.kind in SENDS]),
        ("receives", [event for event in lane.transfers if event.action.kind not in SENDS]),
        ("gradient sync", lane.reductions),
    ):
        rows = apart(event for event in events if _stays(event, kept))
        for n, row in enumerate(rows or ([[]] if words == "" else [])):
            yield words if n == 0 else f"{words} {n + 1}", row


def _stays(event: Event, kept: Collection[int] | None) -> bool:
    by_micro_batch = event.action.kind not in (Kind.REDUCE_GRAD, Kind.UPDATE)
    return event.end_s > event.start_s and (kept is None or not by_micro_batch or event.action.index in kept)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _paired(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the arrows of which a measured trace has one end alone."""
    ends = Counter((event["pid"], event["name"]) for event in events if event["ph"] in "sf")
    return [event for event in events if event["ph"] not in "sf" or ends[event["pid"], event["name"]] == 2]


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _slice(pid: int, tid: int, event: Event, args: dict[str, Any]) -> dict[str, Any]:
    start = _us(event.start_s)
    return {
        "name": str(event.action),
        "cat": CATEGORY[event.action.kind],
        "ph": "X",
        "ts": start,
        "dur": round(_us(event.end_s) - start, 3),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _arrow(pid: int, tid: int, event: Event) -> dict[str, Any]:
    """The end of the arrow at this send or receive; both have the name of the send, which is unique in a pipeline.

    Viewers tie an end to the slice it lies in: it begins with the send and ends a nanosecond before the receive does.
    """
    stage, kind, index = event.action
    sends = kind in SENDS
    sender = stage if sends else stage - 1 if kind == Kind.RECV_F else stage + 1
    name = f"{sender}{(kind if sends else Kind.SEND_F if kind == Kind.RECV_F else Kind.SEND_B).value}{index}"
    end = {"name": name, "cat": "arrow", "pid": pid, "tid": tid}
    if sends:
        return {**end, "ph": "s", "ts": _us(event.start_s)}
    return {**end, "ph": "f", "bp": "e", "ts": max(_us(event.start_s), round(_us(event.end_s) - 0.001, 3))}


def _memory(pid: int, lane: Lane, name: str, kept: Collection[int] | None) -> Iterator[dict[str, Any]]:
    """Bytes in use whenever they change; in a thinned trace only where an event that stayed begins or ends."""
    if lane.memory is None:
        return
    edges = {at for event in lane.events if _stays(event, kept) for at in event[1:]} | {0.0}
    for at, nbytes in zip(lane.memory.times_s, lane.memory.totals):
        if kept is None or at in edges:
            yield {
                "name": f"memory of {name} (MiB)",
                "cat": "memory",
                "ph": "C",
                "ts": _us(at),
                "pid": pid,
                "args": {"MiB": round(nbytes / MIB, 3)},
            }


# Too many events.


def _kept(timeline: Timeline, max_events: int) -> dict[int, frozenset[int]]:
    """Micro-batches that stay, by pipeline; empty if all do.

    First and last of the fill and the drain by turns, then a run in the middle, as many as there is room for; at least
    the first and the last.
    """
    cost: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    num_ranks = Counter(lane.pipeline for lane in timeline.lanes)
    always = 0
    for lane in timeline.lanes:
        always += len(lane.reductions) + 2  # update and its memory
        for event in (*lane.events, *lane.transfers):
            if event.action.index is not None:
                # a slice, and the end of an arrow, or memory at both ends
                cost[lane.pipeline][event.action.index] += 2 if event.action.kind in TRANSFERS else 3
    total = sum(sum(each.values()) for each in cost.values())
    if total + always <= max_events:
        return {}
    share = max(0.0, (max_events - always) / total)
    return {p: frozenset(_chosen(each, num_ranks[p], share * sum(each.values()))) for p, each in cost.items()}


def _chosen(cost: Mapping[int, int], depth: int, room: float) -> Iterator[int]:
    """Micro-batches in order of what they show, until there is no room."""
    m = len(cost)
    outer = [k for n in range(min(depth + 1, m)) for k in (n, m - 1 - n)]
    middle = sorted(range(m), key=lambda k: (abs(k - m // 2), k))
    for n, k in enumerate(dict.fromkeys((*outer, *middle))):
        room -= cost[k]
        if room < 0 and n >= 2:
            return
        yield k


def _other(
    timeline: Timeline,
    plan: Plan | None,
    source: str,
    kept: Mapping[int, Collection[int]],
    measured: Timeline | None,
) -> dict[str, Any]:
    other: dict[str, Any] = {"source": source, "iteration_us": _us(timeline.iteration_s)}
    if measured is not None:
        other |= {"beside": "measured", "measured_us": _us(measured.iteration_s)}
    if plan is not None:
        made = plan.provenance
        other |= {"plan": plan.digest, "profile": made.profile, "cluster": made.cluster, "job": made.job}
        other["versions"] = dict(made.versions)
    if kept:
        of = {lane.pipeline: set[int]() for lane in timeline.lanes}
        for lane in timeline.lanes:
            of[lane.pipeline] |= {event.action.index for event in lane.events if event.action.index is not None}
        other["sampled"] = "shortened to the first and last micro-batches and a run in the middle: " + ", ".join(
            f"pipeline {p} {len(kept[p])} of {len(of[p])}" for p in kept
        )
    return other
