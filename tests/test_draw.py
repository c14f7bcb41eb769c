"""Pictures: what is drawn stands where it should, nothing is clipped, and the same picture is the same bytes."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from factories import cluster

from planner import draw, schedule
from planner.job import Job
from planner.plans import CATEGORIES, GIB, Pipeline, Plan, Predicted, Provenance, Stage, StageMemory
from planner.schedule import Kind, Schedule
from planner.simulate import Lane, Reduction, StageBytes, StageWork, Timeline, Workload, play

matplotlib = pytest.importorskip("matplotlib")
agg = pytest.importorskip("matplotlib.backends.backend_agg")
colors = pytest.importorskip("matplotlib.colors")
texts = pytest.importorskip("matplotlib.text")
COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
BYTES = StageBytes(weights=2 << 30, optimizer=3 << 30, activations=1 << 30, workspace=1 << 29, capacity=16 << 30)


# What is drawn.


def works(num_stages: int, *, send_s: float = 0.002, slower: float = 1.0, memory: StageBytes | None = BYTES) -> Any:
    """Stages that take 10 and 20 ms forward and backward, every other one a tenth longer."""
    return tuple(
        StageWork(
            forward_s=0.010 * slower * (1.1 if s % 2 else 1.0),
            backward_s=0.020 * slower * (1.1 if s % 2 else 1.0),
            send_s=send_s if s < num_stages - 1 else 0.0,
            update_s=0.004,
            device_type="slow" if s % 2 else "fast",
            devices=(f"node:{s}",),
            memory=memory,
        )
        for s in range(num_stages)
    )


def played(*lists: Schedule, reductions: tuple[Reduction, ...] = (), **options: Any) -> Timeline:
    """The timeline of these schedules, one pipeline each."""
    pipelines = tuple((each, works(each.num_stages, **options)) for each in lists)
    return play(Workload(pipelines=pipelines, reductions=reductions))


def two_pipelines() -> Timeline:
    """Depths 2 and 1, gradients of both stages reduced side by side."""
    reductions = (
        Reduction(block="late", seconds=0.030, members=((0, 1), (1, 0)), nbytes=1000),
        Reduction(block="early", seconds=0.020, members=((0, 0), (1, 0)), nbytes=500),
    )
    return played(schedule.one_f_one_b(2, 4), schedule.one_f_one_b(1, 6), reductions=reductions)


def memory(total: float, capacity: float) -> StageMemory:
    """So many GiB, half of it activations."""
    parts = dict.fromkeys(CATEGORIES, 0) | {"weights": round(total * GIB / 2), "activations": round(total * GIB / 2)}
    return StageMemory(**parts, capacity=round(capacity * GIB))


def made_plan(*depths: int, m: int = 4, tp: int = 1, idle: tuple[str, ...] = (), per_node: int = 4) -> Plan:
    """Pipelines of these depths over nodes of `per_node` devices, stages of 2 layers, 10 of 16 GiB in use."""
    pipelines, used = [], 0
    for depth in depths:
        stages = []
        for s in range(depth):
            devices = tuple(f"node-{n // per_node}:{n % per_node}" for n in range(used, used + tp))
            used += tp
            stage = Stage(
                device_type="slow" if s % 2 else "fast",
                tp=tp,
                layers=(2 * s, 2 * s + 2),
                devices=devices,
                in_flight=min(m, depth - s),
                forward_s=0.010,
                backward_s=0.020,
                send_s=0.002 if s < depth - 1 else 0.0,
                send_bytes=1000 * (s + 1) if s < depth - 1 else 0,
                memory=memory(10.0, 16.0),
            )
            stages.append(stage)
        pipelines.append(Pipeline(micro_batch=1, num_micro_batches=m, stages=tuple(stages), time_s=1.0))
    figures = dict.fromkeys(("pipeline_s", "sync_s", "update_s", "floor_s", "one_f_one_b_s", "samples_per_s"), 1.0)
    return Plan(
        profile_name="model",
        cluster_name="cluster",
        predicted=Predicted(iteration_s=0.5, bubble_fraction=0.1, **figures),
        lower_bound_s=1.0,
        gap=0.0,
        pipelines=tuple(pipelines),
        blocks=(),
        idle_devices=idle,
        job=Job(global_batch=m * len(depths)),
        provenance=Provenance(profile="p", cluster="c", job="j", versions=(("planner", "0.1"),)),
    )


# Reading pictures.


def elements(figure: Any) -> dict[str, ElementTree.Element]:
    """Groups of the SVG by id."""
    root = ElementTree.fromstring(draw.render(figure, "svg"))
    return {element.get("id", ""): element for element in root.iter("{http://www.w3.org/2000/svg}g")}


def box(element: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of the path in a group, in points."""
    path = element.find("{http://www.w3.org/2000/svg}path")
    assert path is not None
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", path.get("d", ""))]
    return min(numbers[::2]), min(numbers[1::2]), max(numbers[::2]), max(numbers[1::2])


def fill(element: ElementTree.Element) -> str:
    path = element.find("{http://www.w3.org/2000/svg}path")
    assert path is not None
    match = re.search(r"fill: (#\w+)", path.get("style", ""))
    return match.group(1) if match else ""


def point_at(figure: Any, seconds: float, window: int = 0) -> float:
    """Where a time lies in a window, in points from the left of the page."""
    axes = next(axes for axes in figure.axes if axes.get_gid() == f"window-{window}")
    start, end = axes.get_xlim()
    position = axes.get_position()
    return 72 * figure.get_figwidth() * (position.x0 + (seconds - start) / (end - start) * position.width)


def gids(figure: Any) -> set[str]:
    return {gid for artist in figure.findobj() if (gid := artist.get_gid())}


def words(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(texts.Text) if text.get_text()]


def events(lane: Lane) -> tuple[Any, ...]:
    return (*lane.events, *lane.transfers, *lane.reductions)


# Gantt.


@pytest.mark.parametrize(
    "timeline",
    [
        pytest.param(two_pipelines(), id="1f1b"),
        pytest.param(played(schedule.gpipe(3, 4)), id="gpipe"),
        pytest.param(played(schedule.zero_bubble(3, 5)), id="zero-bubble"),
        pytest.param(played(schedule.interleaved(2, 2, 4)), id="interleaved"),
    ],
)
def test_every_event_has_a_bar_from_its_start_to_its_end(timeline: Timeline) -> None:
    """Each event has a bar with its name in the SVG whose edges are its times."""
    figure = draw.gantt(timeline)
    drawn = elements(figure)
    for lane in timeline.lanes:
        for event in events(lane):
            left, _, right, _ = box(drawn[f"p{lane.pipeline}-{event.action}"])
            assert left == pytest.approx(point_at(figure, event.start_s), abs=0.01)
            assert right == pytest.approx(point_at(figure, event.end_s), abs=0.01)


def test_lanes_and_bars_do_not_overlap() -> None:
    """Bars of one lane are disjoint in time, those of different lanes in height, transfers and sync included."""
    timeline = two_pipelines()
    drawn = elements(draw.gantt(timeline))
    extents = []
    for lane in timeline.lanes:
        bars = [box(drawn[f"p{lane.pipeline}-{event.action}"]) for event in lane.events]
        assert all(one[2] <= other[0] + 0.01 for one, other in pairwise(sorted(bars)))
        everything = [box(drawn[f"p{lane.pipeline}-{event.action}"]) for event in events(lane)]
        extents.append((min(each[1] for each in everything), max(each[3] for each in everything)))
    assert all(one[1] < other[0] for one, other in pairwise(extents))


def test_reductions_at_one_time_are_drawn_one_below_the_other() -> None:
    """Pipeline 1 reduces both blocks at once: their bars share a time, not a place."""
    drawn = elements(draw.gantt(two_pipelines()))
    one, other = (box(drawn[f"p1-0REDUCE_GRAD{i}"]) for i in (0, 1))
    assert max(one[0], other[0]) < min(one[2], other[2])
    assert one[3] <= other[1] + 0.01 or other[3] <= one[1] + 0.01


def test_the_axis_ends_with_the_iteration() -> None:
    """The right edge of the picture is the iteration time, where the last bar ends."""
    timeline = two_pipelines()
    figure = draw.gantt(timeline)
    assert figure.axes[-1].get_xlim()[1] == timeline.iteration_s
    right = max(box(element)[2] for gid, element in elements(figure).items() if re.match(r"p\d-\d", gid))
    assert right == pytest.approx(point_at(figure, timeline.iteration_s), abs=0.01)


def test_every_kind_has_its_colour() -> None:
    """F, B, I, W, transfers, reductions and update are filled as the legend says."""
    split, plain = played(schedule.zero_bubble(2, 4)), two_pipelines()
    seen = set()
    for timeline in (split, plain):
        drawn = elements(draw.gantt(timeline))
        for lane in timeline.lanes:
            for event in events(lane):
                assert fill(drawn[f"p{lane.pipeline}-{event.action}"]) == draw.COLOURS[event.action.kind].lower()
                seen.add(event.action.kind)
    assert seen == set(Kind)


def test_colours_differ_by_kind() -> None:
    """No two kinds of compute share a colour, nor do memory categories."""
    kinds = [draw.COLOURS[kind] for kind in (*COMPUTE, Kind.REDUCE_GRAD, Kind.UPDATE, Kind.SEND_F, Kind.SEND_B)]
    assert len(set(kinds)) == len(kinds)
    assert len(set(draw.CATEGORY_COLOURS.values())) == len(CATEGORIES)


def test_the_legend_names_what_is_drawn_and_nothing_else() -> None:
    """1F1B shows no W in its legend; a zero-bubble run shows no plain backward."""
    assert "backward for weights" not in words(draw.gantt(two_pipelines()))
    split = words(draw.gantt(played(schedule.zero_bubble(2, 4))))
    assert "backward for weights" in split
    assert "backward" not in split


def test_numbers_stand_inside_their_bars() -> None:
    """A micro-batch number is drawn only where the bar is wide enough for it."""
    figure = draw.gantt(played(schedule.one_f_one_b(3, 20)))
    renderer = agg.FigureCanvasAgg(figure).get_renderer()
    bars = {gid: artist for artist in figure.findobj() if (gid := artist.get_gid()) and re.match(r"p0-\d[FB]", gid)}
    extents = [bar.get_window_extent(renderer) for bar in bars.values()]
    numbers = [text for axes in figure.axes for text in axes.texts if text.get_text().isdecimal()]
    assert len(numbers) > 20
    for number in numbers:
        inner = number.get_window_extent(renderer)
        assert any(outer.x0 <= inner.x0 + 0.5 and inner.x1 <= outer.x1 + 0.5 for outer in extents)


def test_a_short_run_is_drawn_whole_and_a_long_one_with_breaks() -> None:
    """24 micro-batches: one window, no break mark. 60: fill, steady stretch and drain with two break marks."""
    short, long = (draw.gantt(played(schedule.one_f_one_b(3, m))) for m in (24, 60))
    assert not any(gid.startswith("break") for gid in gids(short))
    assert {gid for gid in gids(long) if gid.startswith("break")} == {
        "break-0-0",
        "break-0-1",
        "break-1-0",
        "break-1-1",
    }
    names = words(long)
    assert [name for name in ("fill", "steady", "drain") if name in names] == ["fill", "steady", "drain"]
    assert "fill" not in words(short)


def test_a_long_run_shows_its_ends_and_a_steady_stretch() -> None:
    """Of 60 micro-batches the first and last ones are drawn, and about three in the middle, all at one scale."""
    figure = draw.gantt(played(schedule.one_f_one_b(3, 60)))
    drawn = gids(figure)
    for s in range(3):
        assert {f"p0-{s}F{k}" for k in (0, 1, 2, 59)} <= drawn
        assert {f"p0-{s}B{k}" for k in (0, 57, 58, 59)} <= drawn
        middle = [k for k in range(10, 50) if f"p0-{s}F{k}" in drawn]
        assert 2 <= len(middle) <= 6
    scales = [axes.get_position().width / (axes.get_xlim()[1] - axes.get_xlim()[0]) for axes in figure.axes]
    assert max(scales) == pytest.approx(min(scales))


def test_windows_never_overlap_and_breaks_leave_out_time() -> None:
    """Windows are in order, from 0 to the end, with time between them; the fill is never cut."""
    lists = [schedule.one_f_one_b(4, 80), schedule.gpipe(3, 60), schedule.eager_one_f_one_b(4, 50)]
    for timeline in map(played, lists):
        limits = [axes.get_xlim() for axes in draw.gantt(timeline).axes]
        assert limits[0][0] == 0
        assert limits[-1][1] == timeline.iteration_s
        assert all(one[1] < other[0] for one, other in pairwise(limits))
        firsts = [lane.events[0].end_s for lane in timeline.lanes]
        assert limits[0][1] > max(firsts)


def test_ticks_are_round_and_do_not_collide() -> None:
    """Tick labels of all windows stand clear of each other, breaks included."""
    figure = draw.gantt(played(schedule.one_f_one_b(3, 60)))
    renderer = agg.FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    labels = [label for axes in figure.axes for label in axes.get_xticklabels() if label.get_text()]
    extents = sorted(label.get_window_extent(renderer).x0 for label in labels)
    ends = sorted(label.get_window_extent(renderer).x1 for label in labels)
    assert len(labels) >= 4
    assert all(end < start for end, start in zip(ends, extents[1:]))


def test_equal_pipelines_are_folded() -> None:
    """Three equal pipelines and another one: five lanes of eight, titled '3 x'; all eight if asked for."""
    timeline = played(*[schedule.one_f_one_b(2, 4)] * 3, schedule.one_f_one_b(2, 5))
    folded, unfolded = draw.gantt(timeline), draw.gantt(timeline, fold=False)
    assert {gid[:2] for gid in gids(folded) if re.match(r"p\d-\dF", gid)} == {"p0", "p3"}
    assert "3 x pipeline 0, each: 4 micro-batches" in words(folded)
    assert {gid[:2] for gid in gids(unfolded) if re.match(r"p\d-\dF", gid)} == {"p0", "p1", "p2", "p3"}


def test_of_equal_pipelines_the_last_to_end_is_drawn() -> None:
    """The plan says two pipelines are alike; the slower run of them is the one to see, under the plan's letters."""
    lists = schedule.one_f_one_b(2, 4)
    timeline = play(Workload(pipelines=((lists, works(2)), (lists, works(2, slower=1.5)))))
    figure = draw.gantt(timeline, made_plan(2, 2))
    assert {gid[:2] for gid in gids(figure) if re.match(r"p\d-\dF", gid)} == {"p1"}
    assert "2 x pipeline A, each: 4 micro-batches of 1" in words(figure)
    assert "stage 1 · layers 2-3 · slow" in words(figure)


def test_too_many_lanes_leave_out_the_pipelines_that_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for 3 lanes, the pipelines of 6 and 5 micro-batches (2 + 1 lanes) are drawn, that of 2 is not."""
    monkeypatch.setattr(draw, "MAX_LANES", 3)
    lists = (schedule.one_f_one_b(1, 2), schedule.one_f_one_b(2, 6), schedule.one_f_one_b(1, 5))
    drawn = gids(draw.gantt(played(*lists)))
    assert {gid[:2] for gid in drawn if re.match(r"p\d-\dF", gid)} == {"p1", "p2"}


def test_an_interleaved_rank_shows_its_stages_in_two_shades() -> None:
    """Stages 0 and 2 of rank 0 are both blue where they run forward, the later one lighter."""
    drawn = elements(draw.gantt(played(schedule.interleaved(2, 2, 4))))
    dark, light = fill(drawn["p0-0F0"]), fill(drawn["p0-2F0"])
    assert dark == draw.COLOURS[Kind.F].lower()
    assert all(int(light[n : n + 2], 16) > int(dark[n : n + 2], 16) for n in (1, 3, 5))


def test_the_critical_path_is_framed_on_request() -> None:
    """Every action of the path is framed, from the start to the end, and none otherwise."""
    timeline = played(schedule.one_f_one_b(2, 3))
    framed = {gid for gid in gids(draw.gantt(timeline, critical=True)) if gid.startswith("critical")}
    assert framed == {f"critical-p{p}-{event.action}" for p, event in timeline.critical_path}
    assert not any(gid.startswith("critical") for gid in gids(draw.gantt(timeline)))


def test_a_run_lies_under_its_simulation_on_one_axis() -> None:
    """Each measured bar has its own times, below all of the simulated lane of its stage and above that of the next."""
    lists = (schedule.one_f_one_b(2, 4), schedule.one_f_one_b(1, 6))
    simulated, measured = played(*lists), played(*lists, slower=1.4)
    figure = draw.gantt(simulated, measured=measured)
    drawn = elements(figure)
    edges = []
    for one, other in zip(simulated.lanes, measured.lanes, strict=True):
        for lane, prefix in ((one, ""), (other, "measured-")):
            boxes = [box(drawn[f"{prefix}p{lane.pipeline}-{event.action}"]) for event in events(lane)]
            for event, (left, _, right, _) in zip(events(lane), boxes, strict=True):
                assert left == pytest.approx(point_at(figure, event.start_s), abs=0.01)
                assert right == pytest.approx(point_at(figure, event.end_s), abs=0.01)
            edges.append((min(each[1] for each in boxes), max(each[3] for each in boxes)))
    assert all(above[1] < below[0] for above, below in pairwise(edges))
    assert figure.axes[-1].get_xlim() == (0, measured.iteration_s)
    assert words(figure).count("measured") == 3
    assert any("ms measured, " in word for word in words(figure))


def test_of_equal_pipelines_the_run_that_ends_last_is_drawn_beside_its_own_simulation() -> None:
    """Alike as planned, pipeline 0 is slower as measured: both of its lanes are drawn, on its axis."""
    lists = schedule.one_f_one_b(2, 4)
    simulated = play(Workload(pipelines=((lists, works(2)), (lists, works(2)))))
    measured = play(Workload(pipelines=((lists, works(2, slower=1.5)), (lists, works(2)))))
    shown = {gid.rpartition("-")[0] for gid in gids(draw.gantt(simulated, made_plan(2, 2), measured=measured))}
    assert {"p0", "measured-p0"} <= shown
    assert not {"p1", "measured-p1"} & shown


def test_very_many_bars_become_one_shape_per_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit a stage has one shape per kind, which covers just what its bars covered."""
    timeline = played(schedule.one_f_one_b(2, 6))
    single = elements(draw.gantt(timeline))
    monkeypatch.setattr(draw, "MAX_BARS", 3)
    together = elements(draw.gantt(timeline))
    bars = [box(single[f"p0-0F{k}"]) for k in range(6)]
    shape = box(together["p0-0F"])
    hull = *(min(bar[n] for bar in bars) for n in (0, 1)), *(max(bar[n] for bar in bars) for n in (2, 3))
    assert shape == pytest.approx(hull, abs=0.01)
    assert "p0-0F0" not in together


@pytest.mark.parametrize(("num_stages", "m"), [(1, 1), (1, 70), (2, 3), (16, 20), (64, 70)])
def test_one_to_64_stages_are_drawn(num_stages: int, m: int) -> None:
    """Each stage gets a lane and a label, and the picture is no taller than a page can be scrolled."""
    figure = draw.gantt(played(schedule.one_f_one_b(num_stages, m)))
    labels = [word for word in words(figure) if word.startswith("stage ")]
    assert len(labels) == num_stages
    assert figure.get_figheight() < 20


def test_a_timeline_of_no_time_is_one_clear_error() -> None:
    """Where nothing takes time there is nothing to draw; an empty title is none."""
    work = StageWork(forward_s=0.0, backward_s=0.0)
    with pytest.raises(ValueError, match=r"timeline: an iteration of 0\.0 s has nothing to draw"):
        draw.gantt(play(Workload(pipelines=((schedule.one_f_one_b(1, 2), (work,)),))))
    assert not any("per iteration" in word for word in words(draw.gantt(two_pipelines(), title="")))


def test_names_are_taken_literally() -> None:
    """A dollar sign, an underscore and a caret are no mathematics, and a long name is cut."""
    work = StageWork(forward_s=0.01, backward_s=0.02, device_type="a$x_1$ ^" + "y" * 200)
    figure = draw.gantt(play(Workload(pipelines=((schedule.one_f_one_b(1, 2), (work,)),))))
    label = next(word for word in words(figure) if word.startswith("stage 0"))
    assert label.startswith("stage 0 · a$x_1$ ^y")
    assert label.endswith("…")
    assert b"a$x_1$" in draw.render(figure, "svg")


@pytest.mark.filterwarnings("ignore:Glyph")
def test_characters_that_no_xml_may_hold_are_replaced() -> None:
    """A name with an escape character gives SVG that parses."""
    work = StageWork(forward_s=0.01, backward_s=0.02, device_type="a\x1b[31m<&")
    figure = draw.gantt(play(Workload(pipelines=((schedule.one_f_one_b(1, 2), (work,)),))))
    texts = ElementTree.fromstring(draw.render(figure, "svg")).itertext()
    assert any("a\ufffd[31m<&" in text for text in texts)


# Memory.


def test_memory_bars_stack_to_the_bytes_of_the_stage() -> None:
    """Weights end where activations begin, activations end at the total; capacity and limit stand where they are."""
    figure = draw.memory_bars(made_plan(2))
    axes = next(axes for axes in figure.axes if axes.get_gid() == "memory")
    bars = {artist.get_gid(): artist for artist in axes.findobj() if artist.get_gid()}
    weights, kept = bars["weights-A0"], bars["activations-A0"]
    assert weights.get_x() == 0.0
    assert weights.get_x() + weights.get_width() == pytest.approx(kept.get_x())
    assert kept.get_x() + kept.get_width() == pytest.approx(10.0)
    assert bars["capacity-A0"].get_width() == pytest.approx(16.0)
    assert bars["limit-A0"].get_xdata()[0] == pytest.approx(0.95 * 16.0)  # the job's margin is 5 %
    assert "10.0 of 16.0 GiB, 62%" in words(figure)


def test_what_does_not_fit_is_red() -> None:
    """15.5 of 16 GiB is more than a margin of 5 % allows: its figure is red, others are not."""
    plan = made_plan(2)
    stages = plan.pipelines[0].stages
    full = replace(stages[0], memory=memory(15.5, 16.0))
    figure = draw.memory_bars(replace(plan, pipelines=(replace(plan.pipelines[0], stages=(full, stages[1])),)))
    colours = {text.get_text(): text.get_color() for text in figure.texts}
    assert colours["15.5 of 16.0 GiB, 97%"] == draw.OVER
    assert colours["10.0 of 16.0 GiB, 62%"] != draw.OVER


def test_memory_over_time_reaches_the_peak_of_the_trace() -> None:
    """The highest point of each small picture is the peak, also where hundreds of steps are thinned out."""
    timeline = played(schedule.one_f_one_b(2, 300))
    figure = draw.memory_over_time(timeline)
    for lane in timeline.lanes:
        assert lane.memory is not None
        assert len(lane.memory.times_s) > 350
        axes = next(axes for axes in figure.axes if axes.get_gid() == f"memory-p0-r{lane.rank}")
        top = max(vertex[1] for area in axes.collections for path in area.get_paths() for vertex in path.vertices)
        assert top * GIB == pytest.approx(lane.memory.peak_bytes)


def test_memory_that_was_not_traced_is_one_clear_error() -> None:
    """Without a memory trace there is nothing to draw, and the error says so; the overview leaves it out."""
    timeline = played(schedule.one_f_one_b(2, 3), memory=None)
    with pytest.raises(ValueError, match="timeline: memory was not traced"):
        draw.memory_over_time(timeline)
    assert "Memory over one iteration" not in words(draw.overview(made_plan(2, m=3), timeline))


# Device map.


def test_the_map_shows_every_device_once_and_every_hand_over() -> None:
    """Two pipelines of 3 and 2 stages over nodes of 4: five devices in use, one idle, 2 + 1 arrows."""
    plan = made_plan(3, 2, idle=("node-1:1",))
    figure = draw.device_map(plan)
    drawn = sorted(gid for gid in gids(figure) if gid.startswith("device-"))
    assert drawn == sorted(f"device-{name}" for name in (*plan.devices, "node-1:1"))
    links = {gid for gid in gids(figure) if gid.startswith("link-")}
    assert links == {"link-node-0:0-node-0:1", "link-node-0:1-node-0:2", "link-node-0:3-node-1:0"}
    assert "idle" in words(figure)
    assert {"A", "B", "stage 2"} <= set(words(figure))


def test_the_cluster_adds_devices_and_types() -> None:
    """Devices that the plan does not name are idle on the map of the cluster, under the type of their node."""
    whole = cluster({"fast": 4, "slow": 4}, per_node=4)
    plan = made_plan(2)
    stages = (
        replace(plan.pipelines[0].stages[0], devices=("fast-0:0",)),
        replace(plan.pipelines[0].stages[1], devices=("slow-0:0",)),
    )
    figure = draw.device_map(replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),)), whole)
    drawn = {gid for gid in gids(figure) if gid.startswith("device-")}
    assert drawn == {f"device-{device.name}" for device in whole.devices}
    assert {"fast-0", "4 x fast", "slow-0", "4 x slow"} <= set(words(figure))


def test_devices_of_a_map_do_not_overlap() -> None:
    """No two devices share a place, in any of the sizes a map comes in."""
    for plan in (made_plan(3, 2), made_plan(2, 2, tp=2), made_plan(*[4] * 40, per_node=8)):
        figure = draw.device_map(plan)
        cells = [artist for artist in figure.findobj() if (artist.get_gid() or "").startswith("device-")]
        boxes = [cell.get_window_extent() for cell in cells]
        assert len(boxes) == len(plan.devices)
        assert not any(one.overlaps(other) for one, other in combinations(boxes[:60], 2))


def test_links_are_coloured_by_use() -> None:
    """4 x 2 ms of 500 ms is 1.6 %, grey; at 40 x 2 ms it is 16 %, and the colour another. More bytes, a wider line."""
    few, many = (draw.device_map(made_plan(3, m=m)) for m in (4, 40))

    def link(figure: Any, name: str) -> Any:
        return next(artist for artist in figure.findobj() if artist.get_gid() == name)

    quiet, busy = (link(figure, "link-node-0:0-node-0:1") for figure in (few, many))
    colours = [colors.to_hex(arrow.get_edgecolor()).upper() for arrow in (quiet, busy)]
    assert colours == [draw.BUSY[0][1], draw.BUSY[1][1]]
    assert quiet.get_linewidth() < link(few, "link-node-0:1-node-0:2").get_linewidth()


def test_a_large_map_draws_arrows_between_nodes() -> None:
    """With 160 nodes devices are small and hand-overs between two nodes are one arrow."""
    plan = made_plan(*[10] * 128, per_node=8)
    links = {gid for gid in gids(draw.device_map(plan)) if gid.startswith("link-")}
    assert "link-node-0-node-1" in links
    assert not any(":" in gid for gid in links)


# All of them.


def timeline_of(plan: Plan) -> Timeline:
    lists = [schedule.of_plan(pipeline) for pipeline in plan.pipelines]
    return play(Workload(pipelines=tuple((each, works(each.num_stages)) for each in lists)))


def picture(name: str, width: float = draw.WIDTH) -> Any:
    plan = made_plan(3, 2, 2, m=5, idle=("node-7:0",))
    timeline = timeline_of(plan)
    drawn = {
        "gantt": lambda: draw.gantt(timeline, plan, width=width),
        "long": lambda: draw.gantt(played(schedule.one_f_one_b(3, 60)), width=width),
        "measured": lambda: draw.gantt(timeline, plan, width=width, measured=timeline),
        "bars": lambda: draw.memory_bars(plan, width=width),
        "time": lambda: draw.memory_over_time(timeline, plan, width=width),
        "map": lambda: draw.device_map(plan, width=width),
        "overview": lambda: draw.overview(plan, timeline, width=width),
    }
    return drawn[name]()


@pytest.mark.parametrize("name", ["gantt", "long", "measured", "bars", "time", "map", "overview"])
@pytest.mark.parametrize("width", [12.0, 6.5])
def test_no_text_is_clipped_or_covers_another(name: str, width: float) -> None:
    """Every label lies inside the picture, and no two labels overlap, in a wide and in a narrow picture."""
    figure = picture(name, width)
    canvas = agg.FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    shown = [text for text in figure.findobj(texts.Text) if text.get_text().strip() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    width, height = figure.bbox.width, figure.bbox.height
    for words_, box_ in boxes:
        assert min(box_.x0, box_.y0) >= 0, words_
        assert box_.x1 <= width, words_
        assert box_.y1 <= height, words_
    for (one, a), (other, b) in combinations(boxes, 2):
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert overlap[0] < 1 or overlap[1] < 2, (one, other)


def test_the_overview_holds_all_pictures() -> None:
    """Gantt, memory bars, memory over time and map are in it, under their headlines."""
    figure = picture("overview")
    assert {"window-0", "memory", "memory-p0-r0", "map"} <= {axes.get_gid() for axes in figure.axes}


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_picture_is_the_same_bytes(suffix: str) -> None:
    """Drawn twice, also under another style of the user, a picture has the same bytes, without a date."""
    plan = made_plan(2, m=2)
    timeline = timeline_of(plan)

    def drawn() -> bytes:
        figure = draw.overview(plan, timeline) if suffix == "svg" else draw.gantt(timeline, plan)
        return draw.render(figure, suffix, dpi=50)

    first = drawn()
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "lines.linewidth": 9, "svg.hashsalt": "other"}):
        assert drawn() == first
    assert b"dc:date" not in first
    assert b"CreationDate" not in first


def test_files_are_written_whole(tmp_path: Path) -> None:
    """Each suffix gives a file of its kind and nothing else in the directory."""
    figure = draw.memory_bars(made_plan(2))
    starts = {"a.png": b"\x89PNG", "a.svg": b"<?xml", "a.PDF": b"%PDF"}
    for name, start in starts.items():
        draw.save(figure, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert {path.name for path in tmp_path.iterdir()} == set(starts)


def test_a_bad_file_name_is_one_clear_error(tmp_path: Path) -> None:
    """An unknown suffix, and a directory that does not exist, are refused with the path named."""
    figure = draw.memory_bars(made_plan(1))
    with pytest.raises(ValueError, match=r"plan\.gif: suffix '\.gif' is not among \.png, \.svg, \.pdf"):
        draw.save(figure, tmp_path / "plan.gif")
    with pytest.raises(ValueError, match=r"plan\.svg: cannot be written: No such file or directory"):
        draw.save(figure, tmp_path / "missing" / "plan.svg")


def test_a_picture_too_narrow_to_read_is_one_clear_error() -> None:
    """Below 6 inches nothing is drawn, and the error says what would do."""
    with pytest.raises(ValueError, match="width: 3 inches, expected at least 6"):
        draw.memory_bars(made_plan(1), width=3)


def test_pictures_need_no_display_and_the_module_no_matplotlib() -> None:
    """Importing `planner.draw` loads neither matplotlib nor numpy; drawing leaves pyplot alone."""
    code = (
        "import sys, planner.draw as draw; assert not {'matplotlib', 'numpy'} & set(sys.modules), 'at import'\n"
        "import test_draw; draw.render(draw.memory_bars(test_draw.made_plan(2)), 'svg')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=here, env={"PYTHONPATH": f"{here}:{here.parent}"})
