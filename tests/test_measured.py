"""A measured run is read with its place, and held against the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import factories
import pytest
from test_draw import made_plan

from planner import Plan, measured
from planner import simulate as simulation
from planner.cluster import Cluster, DeviceType, Link, Node
from planner.evaluate import evaluate
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.job import Job
from planner.measured import Peak, Ran, Run
from planner.plans import Block
from planner.schedule import Action, Kind
from planner.simulate import Timeline, simulate

HEADER = "metric,value,pipeline,stage,action,start_s,end_s"


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster(
        name="one node",
        device_types=(DeviceType(name="fast", memory_bytes=64 * 2**30),),
        nodes=(Node(name="n", devices=("fast", "fast"), link=Link(bytes_per_s=1e12)),),
    )


@pytest.fixture(scope="module")
def plan(cluster: Cluster) -> Plan:
    """Two stages of two equal layers, F = 20 ms and B = 40 ms each; two micro-batches."""
    profile = factories.profile(num_layers=4, distinct=False, speeds={"fast": 1.0})
    stages = tuple(StageLayout(layers=(2 * s, 2 * s + 2), devices=(f"n:{s}",)) for s in range(2))
    layout = Layout(pipelines=(PipelineLayout(stages=stages, micro_batch=1, num_micro_batches=2),))
    return evaluate(profile, cluster, layout, Job())


def written(folder: Path, *lines: str) -> Path:
    path = folder / "run.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_run_is_read(tmp_path: Path) -> None:
    """Iterations, peaks with and without a place, actions; blank lines and the order of columns do not matter."""
    run = measured.load(
        written(
            tmp_path,
            "stage,metric,value,pipeline,action,start_s,end_s",
            ",iteration_s,0.5,,,,",
            "",
            "1,peak_bytes,1e9,0,,,",
            ",peak_bytes,2e9,,,,",
            ",action,,,1B0,0.1,0.2",
        )
    )
    assert run.iterations_s == (0.5,)
    assert run.peaks == (Peak(nbytes=1e9, pipeline=0, stage=1), Peak(nbytes=2e9))
    assert [(str(ran.action), ran.pipeline, ran.start_s, ran.end_s) for ran in run.actions] == [("1B0", 0, 0.1, 0.2)]


def test_columns_that_no_row_needs_may_be_missing(tmp_path: Path) -> None:
    """Two columns do for times; a trace alone needs no metric, and its end is the iteration."""
    assert measured.load(written(tmp_path, "metric,value", "iteration_s,0.25")).iteration_s == 0.25
    trace = measured.load(written(tmp_path, "pipeline,action,start_s,end_s", "1,0F0,0,0.5", "0,1B3,0.5,0.75"))
    assert (trace.iteration_s, trace.actions[0].pipeline, trace.iterations_s) == (0.75, 1, ())


def test_the_median_iteration_counts() -> None:
    """One slow iteration of three does not move it."""
    assert Run(iterations_s=(0.5, 9.0, 0.6)).iteration_s == 0.6
    assert Run().iteration_s is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["metric,valeu", "iteration_s,1"], "line 1: column 'valeu' is not among metric, value, "),
        (["value", "1"], "line 1: column 'metric' is missing; there are value"),
        (["metric,value", "iteration,1"], "line 2: metric: 'iteration' is not among iteration_s"),
        (["metric,value", "iteration_s,fast"], "line 2: value: 'fast' is not a number"),
        (["metric,value", "iteration_s,-1"], "line 2: value: '-1' is not a finite number >= 0"),
        (["metric,value", "iteration_s,0"], "line 2: value: '0' is not a number above 0"),
        (["metric,value", "iteration_s,"], "line 2: value: missing, a row of metric iteration_s needs it"),
        (["metric,pipeline", "peak_bytes,0"], "line 2: value: missing, a row of metric peak_bytes needs it"),
        (["metric,value", "iteration_s,1,2"], "line 2: 3 values, expected 2"),
        ([HEADER, "peak_bytes,5,first,0,,,"], "line 2: pipeline: 'first' is not an index from 0"),
        ([HEADER, "action,,0,0,0G1,0,1"], "line 2: action: '0G1' is no action"),
        ([HEADER, "action,,0,1,0F1,0,1"], "line 2: stage: 1 is not the stage of 0F1"),
        ([HEADER, "action,,0,0,0F1,2,1"], "line 2: end_s: 1 is before the start, 2"),
        ([HEADER, "action,,0,0,0F1,2,"], "line 2: end_s: missing, a row of metric action needs it"),
        ([HEADER], "no rows below the header"),
    ],
)
def test_damage_is_named_with_its_place(tmp_path: Path, lines: list[str], words: str) -> None:
    """One message: file, line, column, value, and what would be right."""
    path = written(tmp_path, *lines)
    with pytest.raises(ValueError) as error:
        measured.load(path)
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(ValueError, match=r"nowhere\.csv: no such file"):
        measured.load(tmp_path / "nowhere.csv")
    with pytest.raises(ValueError, match="the file is empty"):
        measured.load(written(tmp_path, ""))


def test_every_figure_has_a_signed_error(tmp_path: Path, plan: Plan, cluster: Cluster) -> None:
    """Iteration planned and played, peaks by place, mean forward and backward per stage."""
    total = [stage.memory.total for stage in plan.stages]
    text = [
        HEADER,
        f"iteration_s,{2 * plan.predicted.iteration_s},,,,,",
        f"peak_bytes,{2 * total[0]},0,0,,,",
        f"peak_bytes,{total[0]},0,0,,,",
        f"peak_bytes,{max(total)},,,,,",
        "action,,0,,1F0,0.1,0.13",
        "action,,0,,1F1,0.2,0.21",  # mean of 30 and 10 ms: 20 ms, as predicted
        "action,,0,,0I0,0.3,0.31",
        "action,,0,,0W0,0.4,0.43",  # halves of one backward: 40 ms
        "action,,0,,0SEND_F0,0,1",  # a transfer has no such figure
    ]
    run = measured.load(written(tmp_path, *text))
    comparison = measured.compare(plan, run, simulate(plan, cluster, schedule="zero-bubble"))
    found = {(each.what, each.stage): each for each in comparison.figures}
    assert list(found) == [
        ("iteration, planned", None),
        ("iteration, played", None),
        ("peak memory, fullest device", None),
        ("backward", 0),
        ("peak memory", 0),
        ("forward", 1),
    ]
    assert found["iteration, planned", None].error == -0.5
    assert found["peak memory", 0].error == -0.5  # the larger of two peaks
    assert found["peak memory, fullest device", None].error == 0
    assert abs(found["backward", 0].error) < 1e-9
    assert abs(found["forward", 1].error) < 1e-9


def test_the_text_is_a_table(plan: Plan) -> None:
    """A title, a header and a row per figure, with units."""
    # One iteration of 0.36 s: 2 stages x 60 ms + 1 x 60 ms = 0.18 s planned, half of it.
    run = Run(iterations_s=(0.36,), peaks=(Peak(nbytes=2.0**30),))
    lines = measured.comparison_text(measured.compare(plan, run, simulate(plan))).splitlines()
    assert lines[0].endswith("on one node: 1 iteration, 0 actions")
    assert lines[1].split() == ["predicted", "measured", "error"]
    assert lines[2].split("  ")[1:2] == ["iteration, planned"]
    assert "180.0 ms" in lines[2]
    assert lines[2].endswith("-50.0%")
    assert len(lines) == 5


# A trace over the simulated timeline.


@pytest.fixture(scope="module")
def unlike() -> Plan:
    """Pipelines of unlike stages, three and one deep, with hand-overs, reductions and updates; 5 micro-batches each.

    Forward 10, 14 and 12 ms, and 16 ms where one stage is the pipeline; backward twice that; a hand-over takes 2 ms.
    """
    plan = made_plan(3, 1, m=5)
    pipelines = []
    for pipeline, times in zip(plan.pipelines, ((0.010, 0.014, 0.012), (0.016,)), strict=True):
        stages = [
            replace(stage, forward_s=t, backward_s=2 * t, update_s=0.003)
            for stage, t in zip(pipeline.stages, times, strict=True)
        ]
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    whole = replace(pipelines[1].stages[0], layers=(0, 6))
    pipelines[1] = replace(pipelines[1], stages=(whole,))
    owners = ((2, 0), (1, 0), (0, 0))
    blocks = [
        Block(layers=(2 * s, 2 * s + 2), owners=both, gradient_bytes=1000, reduce_s=0.004, num_chunks=1)
        for s, both in zip((2, 1, 0), owners, strict=True)
    ]
    return replace(plan, pipelines=tuple(pipelines), blocks=tuple(blocks))


def traced(timeline: Timeline) -> tuple[Ran, ...]:
    """Everything that a timeline has, as a run would say it: a RECV begins as the stage begins to wait."""
    rows = []
    for lane in timeline.lanes:
        ends = [0.0, *(event.end_s for event in lane.events)]
        for action, start_s, end_s in (*lane.events, *lane.transfers, *lane.reductions):
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                needs = next(e for e in lane.events if e.action[::2] == action[::2] and takes(action, e.action))
                start_s = ends[lane.events.index(needs)]
                end_s = max(start_s, end_s)
            rows.append(Ran(pipeline=lane.pipeline, action=action, start_s=start_s, end_s=end_s))
    return tuple(rows)


def takes(receive: Action, action: Action) -> bool:
    """Whether an action needs what is received."""
    return action.kind in ((Kind.F,) if receive.kind == Kind.RECV_F else (Kind.B, Kind.I))


def slowed(plan: Plan, **seconds: float) -> tuple[Ran, ...]:
    """The run of a plan of which single actions take longer, or hand-overs; by name as in ``p0_1F3``.

    Played here by the rules of a pipeline in their plainest form: an action begins when the one before it and its
    input are there. Hand-overs do not queue: they are shorter than what computes between two of them.
    """
    load = simulation.workload(plan)
    ends: dict[tuple[int, Action], float] = {}
    rows: list[Ran] = []
    todo = {(p, r): list(acts) for p, (lists, _) in enumerate(load.pipelines) for r, acts in enumerate(lists.ranks)}
    now = dict.fromkeys(todo, 0.0)
    while any(todo.values()):
        for (p, r), actions in todo.items():
            works = load.pipelines[p][1]
            while actions:
                action = actions[0]
                s, kind, k = action
                step = -1 if kind == Kind.F else 1
                maker = Action(s + step, kind, k) if 0 <= s + step < len(works) else None
                if maker is not None and (p, maker) not in ends:
                    break
                start_s = now[p, r]
                if maker is not None:
                    made_s = ends[p, maker]
                    receive = Action(s, Kind.RECV_F if kind == Kind.F else Kind.RECV_B, k)
                    send = Action(s + step, Kind.SEND_F if kind == Kind.F else Kind.SEND_B, k)
                    here_s = made_s + works[min(s, s + step)].send_s + seconds.get(f"p{p}_{receive}", 0.0)
                    rows.append(Ran(pipeline=p, action=send, start_s=made_s, end_s=here_s + 0.001))
                    rows.append(Ran(pipeline=p, action=receive, start_s=start_s, end_s=max(start_s, here_s)))
                    start_s = max(start_s, here_s)
                start_s += seconds.get(f"before_p{p}_{action}", 0.0)
                ends[p, action] = now[p, r] = start_s + works[s].seconds(kind) + seconds.get(f"p{p}_{action}", 0.0)
                rows.append(Ran(pipeline=p, action=action, start_s=start_s, end_s=ends[p, action]))
                actions.pop(0)
    return tuple(rows)


def only(actions: Sequence[Ran], *kinds: Kind) -> tuple[Ran, ...]:
    return tuple(ran for ran in actions if ran.action.kind in kinds)


@pytest.mark.parametrize("kinds", [tuple(Kind), (Kind.F, Kind.B), (Kind.F, Kind.B, Kind.RECV_F, Kind.RECV_B)])
@pytest.mark.parametrize("blocking", [False, True])
def test_the_simulation_itself_drifts_nowhere(unlike: Plan, kinds: tuple[Kind, ...], blocking: bool) -> None:
    """A trace that is the simulated timeline, whole or of some kinds: no difference, no loss, the same timeline."""
    timeline = simulate(unlike, blocking=blocking)
    run = Run(actions=only(traced(timeline), *kinds))
    comparison = measured.compare(unlike, run, timeline)
    whole = kinds == tuple(Kind)
    assert comparison.incomplete == ""
    for each in comparison.figures:
        if whole or each.what not in ("iteration, planned", "iteration, played"):
            assert each.more == pytest.approx(0, abs=1e-12) or each.what == "iteration, planned"
    assert all(loss.seconds == pytest.approx(0, abs=1e-12) for loss in comparison.losses)
    assert comparison.measured is not None
    for ours, theirs in zip(comparison.measured.lanes, timeline.lanes, strict=True):
        assert ours.events == tuple(event for event in theirs.events if event.action.kind in kinds)
        assert ours.memory is None
        if whole:
            assert ours.reductions == theirs.reductions
    text = measured.comparison_text(comparison)
    assert "late        the last backward ends as simulated" in text
    assert "lost at     no place that held the run up" in text
    rows = [line for line in text.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert len(rows) == 8  # two tables of four stages
    assert all(set(line.split()[3::2]) == {"+0.00"} for line in rows)


@pytest.mark.parametrize(
    ("slow", "place", "why", "words"),
    [
        ("p0_1F2", "1F2", "computing", "forward of pipeline 0 stage 1: 50.00 ms, most at 1F2 (50.00 ms)"),
        ("p0_2B0", "2B0", "computing", "backward of pipeline 0 stage 2: 50.00 ms, most at 2B0 (50.00 ms)"),
        ("p1_0F4", "0F4", "computing", "forward of pipeline 1 stage 0: 50.00 ms, most at 0F4 (50.00 ms)"),
        ("before_p0_0F1", "0F1", "pause", "pauses of pipeline 0 stage 0 before forwards: 50.00 ms, most at 0F1"),
        ("before_p0_1B2", "1B2", "pause", "pauses of pipeline 0 stage 1 before backwards: 50.00 ms, most at 1B2"),
        ("p0_2RECV_F1", "2F1", "hand-over", "activations on their way to pipeline 0 stage 2: "),
        ("p0_0RECV_B4", "0B4", "hand-over", "gradients on their way to pipeline 0 stage 0: 50.00 ms, most at 0B4"),
    ],
)
def test_one_delay_is_found_where_it_arises(unlike: Plan, slow: str, place: str, why: str, words: str) -> None:
    """50 ms lost at one action move many others, on other stages too; that one alone is named."""
    timeline = simulate(unlike)
    comparison = measured.compare(unlike, Run(actions=slowed(unlike, **{slow: 0.050})), timeline)
    lost = [loss for loss in comparison.losses if loss.seconds > 1e-9]
    assert [(str(loss.action), loss.why) for loss in lost] == [(place, why)]
    # A late input is lost time from when the stage could have begun, which may be later than when it was due.
    assert 0.02 < lost[0].seconds <= 0.050 + 1e-9
    assert lost[0] in comparison.path
    text = measured.comparison_text(comparison)
    assert words in " ".join(text.split())
    named = [line for line in text.splitlines() if f"{place}, {why} +" in line]
    assert len(named) == 1
    assert named[0].split()[:2] == [str(lost[0].pipeline), str(lost[0].action.stage)]


def test_begin_end_and_idle_stand_beside_the_simulated_ones(plan: Plan) -> None:
    """Free hand-overs, F = 20 and B = 40 ms; measured, 1F0 takes 10 ms more, which moves all but the first forwards.

    Simulated 0F0 0-20, 0F1 20-40, 0B0 80-120, 0B1 140-180: of 180 ms it is idle for 60. 1F0 20-40, then without a
    break to 140. Measured, stage 0 ends at 190 and is idle for 70; stage 1 computes from 20 to 150.
    """
    free = [tuple(replace(stage, send_s=0.0) for stage in each.stages) for each in plan.pipelines]
    free_plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=free[0]),))
    run = Run(actions=slowed(free_plan, p0_1F0=0.010))
    figures = measured.compare(free_plan, run, simulate(free_plan)).figures
    found = {(each.what, each.stage): (each.predicted, each.measured) for each in figures if each.stage is not None}
    for place, expected in {
        ("first forward", 0): (0, 0),
        ("last backward", 0): (0.180, 0.190),
        ("idle", 0): (0.060, 0.070),
        ("first forward", 1): (0.020, 0.020),
        ("last backward", 1): (0.140, 0.150),
        ("idle", 1): (0, 0),
        ("forward", 1): (0.020, 0.025),
    }.items():
        assert found[place] == pytest.approx(expected, abs=1e-9), place


def test_what_is_lost_explains_how_late_the_end_is(unlike: Plan) -> None:
    """Summed on the way to the last backward, losses are at least its lateness; beside the way they do not count."""
    timeline = simulate(unlike)
    slow = {"p0_1F2": 0.011, "p0_0B1": 0.007, "p0_2RECV_F0": 0.005, "before_p0_1B3": 0.002, "p0_2B4": 0.003}
    comparison = measured.compare(unlike, Run(actions=slowed(unlike, **slow)), timeline)
    (end,) = [each for each in comparison.figures if each.what == "last backward" and each.pipeline is None]
    assert end.more > 0.005
    assert math.fsum(loss.seconds for loss in comparison.path) >= end.more - 1e-9
    beside = measured.compare(unlike, Run(actions=slowed(unlike, p1_0F0=0.0001)), timeline)
    assert not any(loss.pipeline == 1 for loss in beside.path)
    assert any(loss.pipeline == 1 and loss.seconds > 0 for loss in beside.losses)


def test_without_receives_a_late_start_is_a_wait(unlike: Plan) -> None:
    """A trace of F and B alone cannot tell a slow hand-over from a pause; where nothing is received it was a pause."""
    timeline = simulate(unlike)
    for slow, why in (("p0_2RECV_F1", "wait"), ("before_p0_2F1", "wait"), ("before_p0_0F1", "pause")):
        run = Run(actions=only(slowed(unlike, **{slow: 0.050}), Kind.F, Kind.B))
        lost = [loss for loss in measured.compare(unlike, run, timeline).losses if loss.seconds > 1e-9]
        assert [loss.why for loss in lost] == [why]


def test_a_receive_is_a_transfer_from_when_it_can_have_been_one(unlike: Plan) -> None:
    """The wait before the send began is idle; a send lasts no longer than until the other end has it."""
    actions = slowed(unlike)
    timeline = simulate(unlike)
    raw = {(ran.pipeline, ran.action): ran for ran in actions}
    for kinds in (tuple(Kind), (Kind.F, Kind.B, Kind.RECV_F, Kind.RECV_B)):
        laid_out = measured.compare(unlike, Run(actions=only(actions, *kinds)), timeline).measured
        assert laid_out is not None
        transfers = {event.action: event for lane in laid_out.lanes for event in lane.transfers}
        first = transfers[Action(1, Kind.RECV_F, 0)]  # from 0, when it began to wait, to 12 ms, when it had it
        assert raw[0, first.action].start_s == 0
        assert (first.start_s, first.end_s) == pytest.approx((0.010, 0.012))
        sent = transfers.get(Action(0, Kind.SEND_F, 0))
        assert (sent is not None) == (Kind.SEND_F in kinds)
        if sent is not None:
            assert (sent.start_s, sent.end_s) == pytest.approx((0.010, 0.012))
        idle = laid_out.lane(0, 1).idle
        assert idle.warm_up_s == pytest.approx(0.012)


def test_reductions_of_another_granularity_are_compared_as_a_whole(unlike: Plan) -> None:
    """Launches that the plan does not number are laid out; what counts is the end of the last."""
    timeline = simulate(unlike)
    actions = list(only(traced(timeline), Kind.F, Kind.B))
    last = max(timeline.pipelines_s)
    for n in range(20):
        action = Action(0, Kind.REDUCE_GRAD, n)
        actions.append(Ran(pipeline=1, action=action, start_s=last, end_s=last + 0.001 * (n + 1)))
    comparison = measured.compare(unlike, Run(actions=tuple(actions)), timeline)
    (sync,) = [each for each in comparison.figures if each.what == "gradient sync after it"]
    assert sync.measured == pytest.approx(0.020)
    assert sync.predicted == timeline.exposed_sync_s
    assert "gradient sync after the last backward: " in measured.comparison_text(comparison)


def test_a_trace_with_gaps_is_not_laid_over(unlike: Plan) -> None:
    """One backward missing: durations are compared all the same, and it is said what is missing."""
    timeline = simulate(unlike)
    gap = Action(1, Kind.B, 3)
    run = Run(actions=tuple(ran for ran in traced(timeline) if ran.action != gap))
    comparison = measured.compare(unlike, run, timeline)
    assert comparison.measured is None
    assert comparison.losses == comparison.path == ()
    assert comparison.incomplete == "pipeline 0 stage 1 lacks 1 of its 10 forwards and backwards, 1B3 first"
    text = measured.comparison_text(comparison)
    assert "trace       not laid over the simulation: pipeline 0 stage 1 lacks" in text
    assert "Per micro-batch" in text and "Timeline" not in text


def test_a_split_backward_is_matched_by_halves(unlike: Plan) -> None:
    """Under zero-bubble every I and W has its place."""
    timeline = simulate(unlike, schedule="zero-bubble")
    comparison = measured.compare(unlike, Run(actions=traced(timeline)), timeline)
    assert comparison.measured is not None
    assert all(loss.seconds == pytest.approx(0, abs=1e-12) for loss in comparison.losses)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["0,0F5,0,1"], "line 2: 0F5: pipeline 0 has 5 micro-batches, 0 to 4"),
        (["0,1RECV_B7,0,1"], "line 2: 1RECV_B7: pipeline 0 has 5 micro-batches, 0 to 4"),
        (["0,0F0,0,1", "0,0I1,1,2"], "line 3: 0I1: pipeline 0 stage 0 plays F, B, SEND_F, RECV_B, REDUCE_GRAD, UPDATE"),
        (["1,0SEND_F0,0,1"], "line 2: 0SEND_F0: pipeline 1 stage 0 plays F, B, REDUCE_GRAD, UPDATE as simulated"),
        (["2,0F0,0,1"], "line 2: 0F0 is of pipeline 2, the plan has 2"),
        (["0,3F0,0,1"], "line 2: 3F0 is of stage 3 of pipeline 0, which has 3"),
        (["0,0F0,0,1", "", "0,0F0,2,3"], "line 4: 0F0 of pipeline 0 is there twice ("),
        (["0,0F0,0,1", "0,0F1,0.5,2"], "line 3: 0F1 of pipeline 0 begins at 0.5 s, before 0F0 ends at 1 s"),
    ],
)
def test_a_trace_of_something_else_is_refused(tmp_path: Path, unlike: Plan, lines: list[str], words: str) -> None:
    """One message with file, line, action, and what the plan has."""
    path = tmp_path / "run.csv"
    rows = [line for line in lines if line]
    named = {tuple(line.split(",")[:2]) for line in rows}
    if "begins" in words:  # looked at in a whole trace only
        for ran in traced(simulate(unlike)):
            if (str(ran.pipeline), str(ran.action)) not in named:
                lines.append(f"{ran.pipeline},{ran.action},{ran.start_s + 5},{ran.end_s + 5}")
    path.write_text("\n".join(["pipeline,action,start_s,end_s", *lines]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        measured.compare(unlike, measured.load(path), simulate(unlike))
    assert str(error.value).startswith(f"{path}: ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(), "run: nothing to compare"),
        (Run(peaks=(Peak(nbytes=1, pipeline=3, stage=0),)), "a peak is of pipeline 3, the plan has 1"),
        (Run(peaks=(Peak(nbytes=1, pipeline=0, stage=2),)), "a peak is of stage 2 of pipeline 0, which has 2"),
    ],
)
def test_a_run_of_another_plan_is_refused(plan: Plan, run: Run, words: str) -> None:
    """What the plan has not is named."""
    with pytest.raises(ValueError) as error:
        measured.compare(plan, run, simulate(plan))
    assert words in str(error.value)
