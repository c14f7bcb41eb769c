"""Traces: rows without overlaps, arrows that match, an end at the iteration time, a cap that keeps the ends."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_draw import BYTES, made_plan, works

from planner import schedule, trace
from planner.schedule import Action, Kind, Schedule
from planner.simulate import Reduction, StageWork, Timeline, Workload, play, simulate


def played(*lists: Schedule, reductions: tuple[Reduction, ...] = (), **options: Any) -> Timeline:
    """The timeline of these schedules, one pipeline each."""
    pipelines = tuple((each, works(each.num_stages, **options)) for each in lists)
    return play(Workload(pipelines=pipelines, reductions=reductions))


REDUCTIONS = (
    Reduction(block="late", seconds=0.030, members=((0, 1), (1, 0)), nbytes=1000),
    Reduction(block="early", seconds=0.020, members=((0, 0), (1, 0)), nbytes=500),
)


def two_pipelines() -> Timeline:
    """Depths 2 and 1; pipeline 1 reduces two blocks side by side."""
    return played(schedule.one_f_one_b(2, 4), schedule.one_f_one_b(1, 6), reductions=REDUCTIONS)


def crossing() -> Timeline:
    """Stages whose sends and receives overlap: activations and gradients take as long as the compute."""
    return played(schedule.eager_one_f_one_b(3, 12), send_s=0.025)


def by_row(data: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """X events of each row in order."""
    rows = defaultdict(list)
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    return {row: sorted(events, key=lambda event: event["ts"]) for row, events in rows.items()}


def of_kind(data: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    return [event for event in data["traceEvents"] if event["ph"] == ph]


TIMELINES = {
    "1f1b": two_pipelines(),
    "crossing": crossing(),
    "zero-bubble": played(schedule.zero_bubble(3, 5)),
    "interleaved": played(schedule.interleaved(2, 2, 4)),
}
each_timeline = pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES.keys())


@each_timeline
def test_no_two_events_of_a_row_overlap(timeline: Timeline) -> None:
    """In each row an event begins when the one before has ended, to the nanosecond."""
    for events in by_row(trace.chrome(timeline)).values():
        for one, other in pairwise(events):
            assert round(one["ts"] + one["dur"], 3) <= other["ts"]


@each_timeline
def test_every_event_is_there_once_at_its_time(timeline: Timeline) -> None:
    """Names parse as actions; start and end are those of the timeline in microseconds."""
    data = trace.chrome(timeline)
    found = {(event["pid"], event["name"]): event for event in of_kind(data, "X")}
    expected = [
        (lane.pipeline, event)
        for lane in timeline.lanes
        for event in (*lane.events, *lane.transfers, *lane.reductions)
        if event.action.kind != Kind.REDUCE_GRAD or event in lane.reductions
    ]
    assert len(of_kind(data, "X")) == len(expected)
    for p, event in expected:
        shown = found[p, str(event.action)]
        assert Action.parse(shown["name"]) == event.action
        assert shown["ts"] == pytest.approx(1e6 * event.start_s, abs=0.001)
        assert shown["ts"] + shown["dur"] == pytest.approx(1e6 * event.end_s, abs=0.002)


@each_timeline
def test_the_last_end_is_the_iteration_time(timeline: Timeline) -> None:
    """Nothing ends after the iteration, and something ends with it."""
    data = trace.chrome(timeline)
    last = max(event["ts"] + event["dur"] for event in of_kind(data, "X"))
    assert last == pytest.approx(1e6 * timeline.iteration_s, abs=0.002)
    assert data["otherData"]["iteration_us"] == pytest.approx(last, abs=0.002)


@each_timeline
def test_arrows_lead_from_each_send_to_its_receive(timeline: Timeline) -> None:
    """Every number occurs once as start and once as finish, each inside the slice of the send and of the receive."""
    data = trace.chrome(timeline)
    rows = by_row(data)
    starts, ends = ({event["id"]: event for event in of_kind(data, ph)} for ph in "sf")
    num_sends = sum(
        event.action.kind in (Kind.SEND_F, Kind.SEND_B) for lane in timeline.lanes for event in lane.transfers
    )
    assert starts.keys() == ends.keys()
    assert len(starts) == len(of_kind(data, "s")) == len(of_kind(data, "f")) == num_sends

    def slice_at(event: dict[str, Any]) -> Action:
        row = rows[event["pid"], event["tid"]]
        (around,) = [each for each in row if each["ts"] <= event["ts"] < each["ts"] + each["dur"]]
        return Action.parse(around["name"])

    for number, start in starts.items():
        end = ends[number]
        assert isinstance(number, int)
        assert start["name"] == end["name"]
        assert (start["pid"], end["bp"]) == (end["pid"], "e")
        sent, received = slice_at(start), slice_at(end)
        step = 1 if sent.kind == Kind.SEND_F else -1
        assert received.kind == {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}[sent.kind]
        assert (received.stage, received.index) == (sent.stage + step, sent.index)


def test_a_slice_comes_before_the_arrows_in_it() -> None:
    """Readers bind an arrow to a slice they have met: metadata first, then by time, a slice ahead of its arrow."""
    order = [(event["ph"], event.get("ts", -1.0)) for event in trace.chrome(crossing())["traceEvents"]]
    times = [ts for _, ts in order]
    assert times == sorted(times)
    for (one, at), (other, then) in pairwise(order):
        assert not (at == then and one in "sf" and other == "X")


def test_processes_are_pipelines_and_threads_are_stages() -> None:
    """Compute of stage 1 of pipeline 0 stands in row (0, 1); transfers and sync have rows above the stages."""
    data = trace.chrome(two_pipelines())
    for (p, tid), events in by_row(data).items():
        num_stages = (2, 1)[p]
        kinds = {Action.parse(event["name"]).kind for event in events}
        if tid < num_stages:
            assert {Action.parse(event["name"]).stage for event in events} == {tid}
            assert kinds == {Kind.F, Kind.B, Kind.UPDATE}
        else:
            assert not kinds & {Kind.F, Kind.B, Kind.UPDATE}


def test_overlapping_reductions_have_rows_of_their_own() -> None:
    """Pipeline 1 reduces two blocks at once: two rows of gradient sync, in order below its compute row."""
    data = trace.chrome(two_pipelines())
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in of_kind(data, "M")
        if event["name"] == "thread_name"
    }
    ordered = {
        (event["pid"], event["tid"]): event["args"]["sort_index"]
        for event in of_kind(data, "M")
        if event["name"] == "thread_sort_index"
    }
    ours = sorted((row for row in names if row[0] == 1), key=ordered.__getitem__)
    assert [names[row] for row in ours] == ["stage 0, fast", "stage 0 gradient sync", "stage 0 gradient sync 2"]
    assert names.keys() == ordered.keys() == by_row(data).keys()


def test_memory_counters_follow_the_trace_of_the_rank() -> None:
    """Each change of memory is a counter in MiB; the highest is the peak."""
    timeline = played(schedule.one_f_one_b(2, 4))
    counters = of_kind(trace.chrome(timeline), "C")
    for lane in timeline.lanes:
        assert lane.memory is not None
        ours = [event for event in counters if event["name"] == f"memory of stage {lane.rank} (MiB)"]
        assert [event["args"]["MiB"] for event in ours] == [nbytes / (1 << 20) for nbytes in lane.memory.totals]
        assert [event["ts"] for event in ours] == pytest.approx([1e6 * at for at in lane.memory.times_s], abs=0.001)
        assert max(event["args"]["MiB"] for event in ours) == lane.memory.peak_bytes / (1 << 20)


def test_a_plan_gives_layers_bytes_and_provenance() -> None:
    """Stage 1 has layers 2-3; stage 0 sends 1000 bytes and gets as many back; digests and versions stand beside."""
    plan = made_plan(3, 3)
    data = trace.chrome(simulate(plan), plan)
    found = {(event["pid"], event["name"]): event["args"] for event in of_kind(data, "X")}
    assert found[0, "1F2"] == {"stage": 1, "layers": "2-3", "micro-batch": 2}
    for name, nbytes in (("0SEND_F0", 1000), ("1RECV_F0", 1000), ("1SEND_B0", 1000), ("0RECV_B0", 1000)):
        assert found[0, name]["bytes"] == nbytes
    assert found[0, "1SEND_F0"]["bytes"] == found[0, "1RECV_B0"]["bytes"] == 2000
    assert data["otherData"]["plan"] == plan.digest
    assert data["otherData"]["versions"] == {"planner": "0.1"}
    names = {event["pid"]: event["args"]["name"] for event in of_kind(data, "M") if event["name"] == "process_name"}
    assert names == {0: "pipeline 0 (A1)", 1: "pipeline 1 (A2)"}


def test_reductions_tell_their_block_and_bytes() -> None:
    """A reduction shows the block, the bytes and how many take part."""
    data = trace.chrome(two_pipelines(), reductions=REDUCTIONS)
    args = {(event["pid"], event["name"]): event["args"] for event in of_kind(data, "X")}
    assert args[1, "0REDUCE_GRAD0"] == {"stage": 0, "block": "late", "bytes": 1000, "members": 2}
    assert args[0, "0REDUCE_GRAD1"] == {"stage": 0, "block": "early", "bytes": 500, "members": 2}


def test_the_source_is_named() -> None:
    """A measured timeline says so in its pipelines and beside them."""
    data = trace.chrome(two_pipelines(), source="measured")
    assert data["otherData"]["source"] == "measured"
    labels = [event["args"]["labels"] for event in of_kind(data, "M") if event["name"] == "process_labels"]
    assert labels == ["measured", "measured"]


def test_a_run_stands_below_its_simulation() -> None:
    """Pipelines 0 and 1 and their runs, 2 and 3: processes of their own, in turns, with both times beside."""
    simulated, measured = two_pipelines(), played(schedule.one_f_one_b(2, 4), schedule.one_f_one_b(1, 6), slower=1.5)
    data = trace.chrome(simulated, measured=measured)
    facts = {what: {} for what in ("process_name", "process_sort_index", "process_labels")}
    for event in of_kind(data, "M"):
        facts.get(event["name"], {})[event["pid"]] = next(iter(event["args"].values()))
    assert facts["process_name"] == {
        0: "pipeline 0, simulated",
        1: "pipeline 1, simulated",
        2: "pipeline 0, measured",
        3: "pipeline 1, measured",
    }
    order = facts["process_sort_index"]
    assert sorted(order, key=order.__getitem__) == [0, 2, 1, 3]
    assert facts["process_labels"] == {0: "simulated", 1: "simulated", 2: "measured", 3: "measured"}
    alone, run = by_row(trace.chrome(simulated)), by_row(trace.chrome(measured, source="measured"))
    found = by_row(data)
    assert {row: events for row, events in found.items() if row[0] < 2} == alone
    timed = [{(p + 2, tid): [(e["name"], e["ts"]) for e in row] for (p, tid), row in run.items()}]
    assert [{row: [(e["name"], e["ts"]) for e in each] for row, each in found.items() if row[0] >= 2}] == timed
    assert data["otherData"]["measured_us"] == pytest.approx(1e6 * measured.iteration_s, abs=0.001)
    starts, ends = (sorted(event["id"] for event in of_kind(data, ph)) for ph in "sf")
    assert starts == ends == list(range(1, len(starts) + 1))


def test_a_transfer_of_which_one_end_is_known_has_no_arrow() -> None:
    """A measured receive without its send, or the other way round, is a slice alone."""
    timeline = played(schedule.one_f_one_b(2, 2))
    lanes = tuple(
        replace(lane, transfers=tuple(e for e in lane.transfers if e.action != Action(0, Kind.SEND_F, 1)))
        for lane in timeline.lanes
    )
    data = trace.chrome(timeline, measured=replace(timeline, lanes=lanes))
    assert "1RECV_F1" in {event["name"] for event in of_kind(data, "X") if event["pid"] == 1}
    for ph in "sf":
        assert len([event for event in of_kind(data, ph) if event["pid"] == 0]) == 4
        assert len([event for event in of_kind(data, ph) if event["pid"] == 1]) == 3


# Too many events.


@pytest.mark.parametrize("max_events", [300, 1000, 2500])
def test_a_cap_keeps_the_ends_and_a_run_in_the_middle(max_events: int) -> None:
    """At most so many events; first and last micro-batches stay on every stage, with all that belongs to them."""
    timeline = played(schedule.one_f_one_b(4, 200), schedule.one_f_one_b(2, 100))
    data = trace.chrome(timeline, max_events=max_events)
    counted = [event for event in data["traceEvents"] if event["ph"] != "M"]
    assert max_events / 2 < len(counted) <= max_events
    names = {(event["pid"], event["name"]) for event in of_kind(data, "X")}
    for p, num_stages, m in ((0, 4, 200), (1, 2, 100)):
        for s in range(num_stages):
            assert {(p, f"{s}{kind}{k}") for kind in "FB" for k in (0, m - 1)} <= names
    kept = sorted(Action.parse(name).index for p, name in names if p == 0 and name.startswith("0F"))
    assert {0, 1, 198, 199} <= set(kept)
    for k in kept:
        assert {(0, f"2{kind}{k}") for kind in ("F", "B", "SEND_F", "RECV_B", "RECV_F", "SEND_B")} <= names
    assert "shortened to the first and last micro-batches" in data["otherData"]["sampled"]
    assert f"pipeline 0 {len(kept)} of 200" in data["otherData"]["sampled"]


def test_a_capped_trace_keeps_its_laws() -> None:
    """Arrows still match, rows do not overlap, the end is the iteration time, and the middle run is contiguous."""
    timeline = played(schedule.one_f_one_b(3, 300))
    data = trace.chrome(timeline, max_events=1500)
    assert {event["id"] for event in of_kind(data, "s")} == {event["id"] for event in of_kind(data, "f")}
    for events in by_row(data).values():
        assert all(round(one["ts"] + one["dur"], 3) <= other["ts"] for one, other in pairwise(events))
    last = max(event["ts"] + event["dur"] for event in of_kind(data, "X"))
    assert last == pytest.approx(1e6 * timeline.iteration_s, abs=0.002)
    kept = sorted({event["args"]["micro-batch"] for event in of_kind(data, "X") if "micro-batch" in event["args"]})
    jumps = [other - one for one, other in pairwise(kept) if other - one > 1]
    assert len(jumps) == 2
    assert any(140 < k < 160 for k in kept)


def test_a_trace_below_the_cap_is_whole() -> None:
    """Without need nothing is left out and nothing is said; a cap below one is refused."""
    data = trace.chrome(two_pipelines())
    assert "sampled" not in data["otherData"]
    with pytest.raises(ValueError, match="max_events: 0 is not at least 1"):
        trace.chrome(two_pipelines(), max_events=0)


def test_a_cap_is_shared_with_the_run() -> None:
    """The same micro-batches of both stay, together no more events than asked for."""
    timeline = played(schedule.one_f_one_b(4, 200))
    data = trace.chrome(timeline, measured=timeline, max_events=1500)
    assert 700 < len([event for event in data["traceEvents"] if event["ph"] != "M"]) <= 1500
    kept = [{e["name"] for e in of_kind(data, "X") if e["pid"] == pid} for pid in (0, 1)]
    assert kept[0] == kept[1]


def test_the_smallest_cap_keeps_first_and_last() -> None:
    """A cap nothing fits under leaves micro-batches 0 and 39."""
    data = trace.chrome(played(schedule.one_f_one_b(2, 40)), max_events=1)
    kept = {event["args"]["micro-batch"] for event in of_kind(data, "X") if "micro-batch" in event["args"]}
    assert kept == {0, 39}


# Files.


def test_files_read_back_and_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    """JSON and packed JSON hold the trace; written twice, under another name, they do not differ."""
    data = trace.chrome(two_pipelines())
    for name in ("a.json", "b.json", "a.json.gz", "b.json.gz"):
        trace.save(data, tmp_path / name)
    plain, packed = (tmp_path / "a.json").read_bytes(), (tmp_path / "a.json.gz").read_bytes()
    assert json.loads(plain) == data
    assert gzip.decompress(packed) == plain
    assert (tmp_path / "b.json").read_bytes() == plain
    assert (tmp_path / "b.json.gz").read_bytes() == packed
    assert trace.dumps(trace.chrome(two_pipelines())).encode() == plain
    assert data["displayTimeUnit"] == "ms"
    assert len(list(tmp_path.iterdir())) == 4


def test_a_bad_file_name_is_one_clear_error(tmp_path: Path) -> None:
    """Another suffix is refused, with those that would do."""
    with pytest.raises(ValueError, match=r"plan\.trace: suffix '\.trace' is not among \.json, \.json\.gz"):
        trace.save(trace.chrome(two_pipelines()), tmp_path / "plan.trace")


def test_transfers_that_take_no_time_leave_no_rows() -> None:
    """Free links: compute rows only, and no arrows."""
    data = trace.chrome(played(schedule.one_f_one_b(3, 4), send_s=0.0))
    assert by_row(data).keys() == {(0, 0), (0, 1), (0, 2)}
    assert not of_kind(data, "s")


def test_without_memory_there_are_no_counters() -> None:
    """A timeline that traced no memory gives a trace without C events."""
    work = StageWork(forward_s=0.01, backward_s=0.02)
    timeline = play(Workload(pipelines=((schedule.one_f_one_b(1, 3), (work,)),)))
    assert not of_kind(trace.chrome(timeline), "C")
    assert of_kind(trace.chrome(played(schedule.one_f_one_b(1, 3), memory=BYTES)), "C")
