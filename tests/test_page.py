"""What people look at: HTML of plans, comparisons, rows for data frames, the report.

Two plans, worked out by hand, serve most tests. `first` has two pipelines: 0 with two stages, 3 micro-batches of 2,

    loads 20 + 40 + 10 = 70 ms and 30 + 60 + 10 = 100 ms: 170 + 2 x 100 = 370 ms

and 1 with one stage that recomputes, 4 micro-batches of 1, 30 + 50 + 10 = 90 ms: 360 ms. With 20 ms of exposed sync and
10 ms of update an iteration takes 400 ms. `second` is one pipeline of two stages, 5 micro-batches of 2,

    loads 25 + 45 + 10 = 80 ms and 30 + 50 + 10 = 90 ms: 170 + 4 x 90 = 530 ms, and 10 ms of update: 540 ms
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from planner import page
from planner.cluster import Cluster, DeviceType, Link, Node
from planner.job import Job
from planner.plans import CATEGORIES, WIDTH, Block, Pipeline, Plan, Predicted, Provenance, Stage, StageMemory, seconds
from planner.schedule import Action, Kind
from planner.simulate import Event, Idle, Lane, Timeline

GIB = 2**30
LIMIT = 50_000
NASTY = """<b>&"x'</b>"""


def memory(**changes: int) -> StageMemory:
    """In GiB: 1 + 2 + 3 + 4 + 1 + 1 + 1 + 1 = 14 of 20, of which a margin of a tenth leaves 18."""
    values = dict(zip(CATEGORIES, (1, 2, 3, 4, 1, 1, 1, 1))) | {"capacity": 20} | changes
    return StageMemory(**{name: value * GIB for name, value in values.items()})


def stage(layers: tuple[int, int], times: tuple[float, float, float], devices: Sequence[str], **changes: Any) -> Stage:
    """`times` are forward, backward, transfer in ms."""
    forward, backward, transfer = (1e-3 * time for time in times)
    values: dict[str, Any] = {
        "device_type": "fast",
        "tp": len(devices),
        "in_flight": 1,
        "memory": memory(),
        "update_s": 0.010,
    } | changes
    return Stage(
        layers=layers,
        devices=tuple(devices),
        forward_s=forward,
        backward_s=backward,
        transfer_s=transfer,
        **values,
    )


def pipeline(micro_batch: int, m: int, stages: Sequence[Stage]) -> Pipeline:
    """Planning form."""
    loads = [each.load_s for each in stages]
    time_s = sum(loads) + (m - 1) * max(loads)
    return Pipeline(micro_batch=micro_batch, num_micro_batches=m, stages=tuple(stages), time_s=time_s)


def plan(pipelines: Sequence[Pipeline], sync_s: float, update_s: float, **changes: Any) -> Plan:
    """Everything but the pipelines, sync and update is made up."""
    slowest = max(each.time_s for each in pipelines)
    iteration_s = slowest + sync_s + update_s
    batch = sum(each.samples for each in pipelines)
    values: dict[str, Any] = {
        "profile_name": "toy",
        "cluster_name": "two",
        "predicted": Predicted(
            iteration_s=iteration_s,
            pipeline_s=slowest,
            sync_s=sync_s,
            update_s=update_s,
            bubble_fraction=0.25,
            samples_per_s=batch / iteration_s,
            floor_s=0.3,
            one_f_one_b_s=0.36,
            tokens_per_s=1000 * batch / iteration_s,
        ),
        "lower_bound_s": 0.32,
        "gap": iteration_s / 0.32 - 1,
        "blocks": (),
        "job": Job(global_batch=batch, memory_margin=0.1),
        "provenance": Provenance(profile="p" * 16, cluster="c" * 16, job="j" * 16, versions=(("planner", "0.1.0"),)),
    } | changes
    return Plan(pipelines=tuple(pipelines), **values)


def first(**changes: Any) -> Plan:
    """Two pipelines, 400 ms."""
    pipelines = (
        pipeline(
            2,
            3,
            (
                stage((0, 4), (20, 40, 10), ["n0:0"], in_flight=2, send_s=0.010, send_bytes=GIB),
                stage((4, 6), (30, 60, 10), ["n1:0", "n1:1"], device_type="slow"),
            ),
        ),
        pipeline(1, 4, (stage((0, 6), (30, 50, 0), ["n0:1"], recompute=(1, 2), recompute_s=0.010),)),
    )
    values: dict[str, Any] = {
        "blocks": (
            Block(layers=(0, 4), owners=(0, 0), gradient_bytes=GIB, num_chunks=16, reduce_s=0.5),
            Block(layers=(4, 6), owners=(1, 0), gradient_bytes=GIB, num_chunks=16, reduce_s=0.25),
        ),
        "idle_devices": ("n1:2", "n1:3"),
    } | changes
    return plan(pipelines, 0.020, 0.010, **values)


def second(**changes: Any) -> Plan:
    """One pipeline, 540 ms."""
    stages = (stage((0, 3), (25, 45, 10), ["n0:0"]), stage((3, 6), (30, 50, 10), ["n0:1"]))
    return plan((pipeline(2, 5, stages),), 0.0, 0.010, **changes)


def many(num_pipelines: int, num_stages: int, *, equal: bool = False, name: str = "fast", **changes: Any) -> Plan:
    """Pipelines that are all equal, or all different in the number of layers of their first stage."""
    pipelines = []
    for p in range(num_pipelines):
        i = 1 if equal else p + 1
        edges = [0, *range(i, i + num_stages)]
        stages = [
            stage(
                (edges[s], edges[s + 1]),
                (10 + s, 20 + p * (not equal), 1),
                [f"node-{p}:{s}"],
                device_type=name,
                send_s=0.001,
                send_bytes=GIB,
            )
            for s in range(num_stages)
        ]
        pipelines.append(pipeline(1, 16, stages))
    return plan(pipelines, 0.020, 0.010, **changes)


def timeline(given: Plan, m: int = 3) -> Timeline:
    """No schedule of the plan, but events in every lane: F and B of 1 s each in turn, a transfer, sync, an update."""
    lanes = []
    for p, each in enumerate(given.pipelines):
        for s, at in enumerate(each.stages):
            events = [
                Event(Action(s, kind, k), 2.0 * k + late, 2.0 * k + late + 1)
                for k in range(m)
                for late, kind in ((0.0, Kind.F), (1.0, Kind.B))
            ]
            lanes.append(
                Lane(
                    pipeline=p,
                    rank=s,
                    stages=(s,),
                    device_type=at.device_type,
                    devices=at.devices,
                    events=(*events, Event(Action(s, Kind.UPDATE, None), 2.0 * m + 1, 2.0 * m + 2)),
                    transfers=(Event(Action(s, Kind.SEND_F, 0), 1.0, 1.5),),
                    reductions=(Event(Action(s, Kind.REDUCE_GRAD, 0), 2.0 * m, 2.0 * m + 1),),
                    idle=Idle(sync_s=1.0),
                    memory=None,
                )
            )
    return Timeline(iteration_s=2.0 * m + 2, pipelines_s=(2.0 * m,) * len(given.pipelines), lanes=tuple(lanes))


def cluster(**prices: float | None) -> Cluster:
    """Node n0 with two fast devices, n1 with four slow ones."""
    return Cluster(
        name="two",
        device_types=tuple(
            DeviceType(name=name, memory_bytes=20 * GIB, price_per_hour=prices.get(name)) for name in ("fast", "slow")
        ),
        nodes=(
            Node(name="n0", devices=("fast",) * 2, link=Link(bytes_per_s=1e10)),
            Node(name="n1", devices=("slow",) * 4, link=Link(bytes_per_s=1e10)),
        ),
    )


class Balance(HTMLParser):
    """Refuses an end tag that does not close the last open one."""

    VOID = frozenset(("br", "meta", "hr", "img", "input", "link"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs), (tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in (*self.VOID, "path"), f"<{tag}/> is an open element in HTML"

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def parsed(text: str) -> ElementTree.Element:
    """The page as a tree; fails unless it is well-formed, balanced HTML that fetches and runs nothing."""
    balance = Balance()
    balance.feed(text)
    balance.close()
    assert not balance.open
    lowered = text.lower()
    for harm in ("<script", "http:", "https:", "//", "@import", "url(h", "javascript:", "<iframe", "<link", "<img"):
        assert harm not in lowered, harm
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def words(element: ElementTree.Element, without: Sequence[str] = ("style", "svg")) -> str:
    """The text that is left where a viewer strips style sheets and pictures."""

    def inner(each: ElementTree.Element) -> Iterator[str]:
        if each.tag not in without:
            yield each.text or ""
            for child in each:
                apart = "" if child.tag in ("small", "span", "strong", "svg", "a") else " "  # inline or not
                yield apart
                yield from inner(child)
                yield apart + (child.tail or "")

    return " ".join("".join(inner(element)).split())


def rows(element: ElementTree.Element) -> list[str]:
    """Text of each table row."""
    return [words(row) for row in element.iter("tr")]


# A plan.


def test_says_what_a_plan_does() -> None:
    """Headline, terms, stages, idle devices, warnings and origin stand in the text, without style and pictures too."""
    given = first(warnings=("the profile is old",), restrictions=("at most 2 classes",))
    text = words(parsed(page.plan_html(given)))
    assert "toy on two" in text
    assert "400.0 ms = slowest pipeline 370.0 ms + exposed gradient sync 20.00 ms + update 10.00 ms" in text
    assert "25.00% above 320.0 ms" in text  # 400 / 320
    assert "25,000" in text  # tokens/s: 10 samples of 1000 in 0.4 s
    assert "pipeline A: 3 micro-batches of 2 = 6 samples (60.0% of the batch) in 370.0 ms" in text
    assert "recomputes 2" in text
    assert "slow x tp 2" in text and "n1:0-1" in text
    assert "14.00 GiB of 20.00 GiB, 70%" in text
    assert "idle 2 devices: n1:2-3" in text
    assert "warning the profile is old" in text
    assert "restricted at most 2 classes" in text
    assert "digest pppppppppppppppp" in text and "planner 0.1.0" in text


def test_marks_the_bottleneck() -> None:
    """Of several stages the one with the largest load is marked, by a word; of several pipelines the slowest."""
    found = rows(parsed(page.plan_html(first())))
    assert [row for row in found if "bottleneck" in row] == [row for row in found if "slow x tp 2" in row]
    assert [row for row in found if "slowest" in row and "micro-batches of" in row] == [
        row for row in found if row.startswith("pipeline A:")
    ]


def test_bars_show_every_part() -> None:
    """The widths of a memory bar are its categories, what is free and the margin; together the whole bar."""
    tree = parsed(page.plan_html(first()))
    bars = [svg for svg in tree.iter("svg") if "weights" in svg.findtext("title", "")]
    assert len(bars) == 3
    # 190 wide for 20 GiB: 9.5 per GiB; 18 GiB - 14 are free, 2 are the margin.
    widths = [float(re.findall(r"h([\d.]+)", path.get("d", ""))[0]) for path in bars[0].iter("path")]
    assert widths == [9.5 * gib for gib in (1, 2, 3, 4, 1, 1, 1, 1, 4, 2)]
    assert bars[0].findtext("title") == (
        "weights 1.00 GiB, gradients 2.00 GiB, optimizer 3.00 GiB, activations 4.00 GiB, logits 1.00 GiB, "
        "workspace 1.00 GiB, sync buffer 1.00 GiB, context 1.00 GiB, free 4.00 GiB, margin 2.00 GiB"
    )
    loads = [svg for svg in tree.iter("svg") if "forward" in svg.findtext("title", "")]
    # The bottleneck fills its bar, 100 ms: 30 + 60 + 10; the stage before it takes 70 ms of the same scale.
    ends = [sum(float(w) for p in svg.iter("path") for w in re.findall(r"h([\d.]+)", p.get("d", ""))) for svg in loads]
    assert ends == pytest.approx([0.7 * 190, 190, 190], abs=0.2)


def test_a_stage_that_does_not_fit_says_so() -> None:
    """More bytes than the device has never overflow the bar, and are said in words."""
    full = stage((0, 6), (30, 50, 0), ["n0:0"], memory=memory(activations=20))
    tree = parsed(page.plan_html(plan((pipeline(1, 4, (full,)),), 0.0, 0.0)))
    assert "30.00 GiB of 20.00 GiB, 150% does not fit" in words(tree)
    assert page._left(full.memory, 0.1) == (0.0, 0.0)


def test_memory_beyond_the_margin() -> None:
    """Where a stage uses a part of the margin, the rest of it and nothing else is left."""
    tight = memory(activations=9)  # 19 of 20 GiB, limit 18
    assert page._left(tight, 0.1) == (0.0, GIB)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("shape", [(64, 8), (1, 512), (512, 1)])
@pytest.mark.parametrize("name", ["fast", 500 * '"<'])
def test_stays_small(shape: tuple[int, int], equal: bool, name: str) -> None:
    """However large a plan and its names, its fragment stays below 50 kB and says what it leaves out."""
    given = many(*shape, equal=equal, name=name, cluster_name=3 * name, warnings=(name,) * 300)
    if not equal:
        blocks = [Block(layers=(l, l + 1), owners=(0,) * shape[0], gradient_bytes=GIB) for l in range(shape[0])]
        given = replace(given, blocks=tuple(blocks), idle_devices=tuple(f"idle-{i * i}:0" for i in range(3000)))
    text = page.plan_html(given, timeline(given, m=40))
    assert len(text.encode()) < LIMIT
    tree = parsed(text)
    shown = sum("GiB of" in row for row in rows(tree))
    assert shown >= 8 or shown == (1 if equal else shape[0]) * shape[1]
    if shown < (1 if equal else shape[0]) * shape[1]:
        assert "not shown here" in words(tree)
    assert any("bottleneck" in row for row in rows(tree)) or shape[1] == 1


def test_what_is_left_out_is_counted() -> None:
    """Pipelines shown and pipelines counted are all; the slowest is always among those shown."""
    given = many(64, 8)
    tree = parsed(page.plan_html(given))
    titles = [row for row in rows(tree) if re.match(r"pipeline \w+:", row)]
    found = re.search(r"(\d+) more pipelines with (\d+) stages, none of them slower", words(tree))
    assert found is not None
    assert len(titles) + int(found[1]) == 64
    assert int(found[2]) == 8 * int(found[1])
    assert sum("slowest" in title for title in titles) == 1


def test_stages_of_a_deep_pipeline_are_counted() -> None:
    """Rows shown and rows counted are all stages; the bottleneck and the last are always shown."""
    given = many(1, 300)
    found = rows(parsed(page.plan_html(given)))
    hidden = sum(int(number) for row in found for number in re.findall(r"^(\d+) stages \(", row))
    assert sum("GiB of" in row for row in found) + hidden == 300
    assert [row for row in found if "bottleneck" in row] == [row for row in found if row.startswith("299 ")]


def test_names_are_escaped() -> None:
    """Names with markup, quotes and characters that no page may hold stay text, in every view."""
    name = NASTY + "\x00\x1b[31m"
    stages = (stage((0, 6), (30, 50, 0), [f"{NASTY}:0"], device_type=name),)
    given = plan(
        (pipeline(1, 4, stages),),
        0.0,
        0.0,
        profile_name=name,
        cluster_name=name,
        warnings=(name,),
        restrictions=(name,),
        idle_devices=(f"{NASTY}:1",),
        provenance=Provenance(profile=name, cluster=name, job=name, versions=((name, name),)),
    )
    played = timeline(given)
    for text in (
        page.plan_html(given, played),
        page.plans_html([given, given], [played, played]),
        page.report([given, given], [played, None]),
    ):
        tree = parsed(text)
        assert not list(tree.iter("b"))
        assert NASTY in words(tree)
        assert "\ufffd[31m" in words(tree)
    assert NASTY in page.comparison_text(page.compare([given], [name]))


def test_same_plan_same_bytes() -> None:
    """Nothing but the arguments decides what is written."""
    pairs = [(first(), second()), (first(), second())]
    assert len({page.plan_html(a, timeline(a), cluster(fast=1.0, slow=2.0)) for a, _ in pairs}) == 1
    assert len({page.plans_html([a, b]) for a, b in pairs}) == 1
    assert len({page.report([a, b], [timeline(a), None], cluster(), None, {"x": SVG}) for a, b in pairs}) == 1


def test_colours_read_in_light_and_dark() -> None:
    """Every fill has three times the contrast of white and of a dark page; no rule sets a colour of text or page."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(x * weight for x, weight in zip(linear, (0.2126, 0.7152, 0.0722)))

    text = page.plan_html(first(), timeline(first()))
    fills = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', text))
    assert len(fills) == 8
    for fill in fills:
        assert 1.05 / (luminance(fill) + 0.05) >= 3
        assert (luminance(fill) + 0.05) / (luminance("#1e1e1e") + 0.05) >= 3
    sheet = re.search(r"<style>(.*?)</style>", text)
    assert sheet is not None
    assert not re.search(r"(?<![-\w])color:(?!inherit)|background:(?!none)", sheet[1])


def test_styles_hold_in_the_fragment_only() -> None:
    """Every selector begins with the class of the fragment; it has no ids to clash with those of another output."""
    text = page.plan_html(first(), timeline(first()))
    sheet = re.search(r"<style>(.*?)</style>", text)
    assert sheet is not None
    selectors = [each for rule in re.findall(r"([^{}]+)\{", sheet[1]) for each in rule.split(",")]
    assert len(selectors) > 20
    assert all(each.startswith(".hpp-plan.hpp-plan") for each in selectors)
    assert " id=" not in text


def test_cost_of_an_iteration() -> None:
    """Devices x price per hour x hours; idle ones are told apart; a missing price gives none."""
    # 2 fast at 9 and 2 slow at 4.5 an hour for 0.4 s: 27 x 0.4 / 3600 = 0.003; 2 idle slow ones add 0.001.
    assert page.iteration_cost(first(), cluster(fast=9.0, slow=4.5)) == pytest.approx((0.003, 0.004))
    assert page.iteration_cost(first(), cluster(fast=9.0)) is None
    text = words(parsed(page.plan_html(first(), cluster=cluster(fast=9.0, slow=4.5))))
    # 10,000 tokens for 0.003: a million for 0.3
    assert "cost per iteration 0.003000 (0.004000 with idle devices; 0.3000 per million tokens)" in text
    assert "cost" not in words(parsed(page.plan_html(first(), cluster=cluster(fast=9.0))))
    with pytest.raises(ValueError, match=r"device 'elsewhere:0' is not among"):
        page.iteration_cost(first(idle_devices=("elsewhere:0",)), cluster(fast=9.0, slow=4.5))


def test_simulated_time_stands_beside_the_formula() -> None:
    """The simulated iteration comes from the timeline, else from the plan; without either there is none."""
    assert "simulated" not in words(parsed(page.plan_html(first())))
    predicted = replace(first().predicted, simulated_s=0.5)
    assert "simulated 500.0 ms (+25.0%)" in words(parsed(page.plan_html(first(predicted=predicted))))
    assert "simulated 8.000 s (+1900.0%)" in words(
        parsed(page.plan_html(first(predicted=predicted), timeline(first())))
    )


# The small Gantt chart.


def lanes_of(tree: ElementTree.Element) -> list[ElementTree.Element]:
    """Pictures of the lanes."""
    return [svg for svg in tree.iter("svg") if svg.get("viewBox") == "0 0 700 16"]


def boxes(svg: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """x, middle, width and height of all that is drawn."""
    found = []
    for path in svg.iter("path"):
        for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", path.get("d", "")):
            found.append((float(x), float(y), float(width), float(path.get("stroke-width", "0"))))
    return found


def test_gantt_shows_every_action() -> None:
    """A short run is drawn whole: 3 F, 3 B, an update, a transfer, a reduction per lane; nothing overlaps."""
    found = lanes_of(parsed(page.plan_html(first(), timeline(first()))))
    assert len(found) == 3
    for svg in found:
        drawn = boxes(svg)
        assert len(drawn) == 9
        assert max(x + width for x, _, width, _ in drawn) == pytest.approx(700, abs=0.6)  # the last end, 8 s
        compute = sorted((x, width) for x, _, width, height in drawn if height == 10)
        assert all(x + width <= after + 1e-6 for (x, width), (after, _) in pairwise(compute))
        # 8 s on 700: F of micro-batch 1 runs from 2 to 3 s
        assert (175.0, pytest.approx(87.1, abs=0.05)) in [(x, width) for x, width in compute]


def test_gantt_breaks_a_long_run() -> None:
    """Of many micro-batches the first and the last are drawn, with a break between, and the text says where."""
    tree = parsed(page.plan_html(first(), timeline(first(), m=200)))
    # 12 actions of 1 s from 0; the last 12 are the update and 11 actions of 1 s before 400 s.
    assert "0 to 12.00 s, break, 389.0 s to 402.0 s; what is left out repeats the steady part" in words(tree)
    for svg in lanes_of(tree):
        assert max(x + width for x, _, width, _ in boxes(svg)) == pytest.approx(700, abs=0.6)
        assert sum(path.get("fill") == "none" for path in svg.iter("path")) == 1  # the break mark


def test_gantt_draws_one_of_equal_pipelines() -> None:
    """Of 64 equal pipelines of 4 stages 4 lanes are drawn, and the text says of how many."""
    given = many(64, 4, equal=True)
    tree = parsed(page.plan_html(given, timeline(given)))
    assert len(lanes_of(tree)) == 4
    assert "4 of 256 lanes, of equal pipelines one" in words(tree)


# Plans side by side.


def test_terms_by_hand() -> None:
    """Terms of the planning form are those of the slowest pipeline, and add up to the iteration."""
    found = page.terms(first())
    assert found.steady_compute_s == pytest.approx(0.270)  # 3 x (30 + 60) ms
    assert found.steady_transfer_s == pytest.approx(0.030)  # 3 x 10
    assert found.fill_s == pytest.approx(0.070)  # 370 - 300
    assert (found.sync_s, found.update_s) == (0.020, 0.010)
    assert found.fill_s + found.steady_s + found.sync_s + found.update_s == pytest.approx(0.400)


def test_compare_by_hand() -> None:
    """Differences are those of the two plans on paper; parts add up to what they are parts of."""
    found = page.compare([second(), first()], ["b.json", "a.json"])
    assert found.best == 1
    by_hand = {  # ms, second - first
        "iteration": 540 - 400,
        "slowest pipeline": 530 - 370,
        "fill and drain": (530 - 5 * 90) - (370 - 3 * 100),
        "steady, m x bottleneck": 5 * 90 - 3 * 100,
        "compute": 5 * 80 - 3 * 90,
        "transfers": 5 * 10 - 3 * 10,
        "exposed gradient sync": 0 - 20,
        "update": 0,
        "devices in use": 1e3 * (2 - 4),
        "idle devices": 1e3 * (0 - 2),
        "pipelines": 1e3 * (1 - 2),
    }
    for name, milliseconds in by_hand.items():
        assert found.differences(name)[0] == pytest.approx(1e-3 * milliseconds, abs=1e-12), name
        assert found.differences(name)[1] == 0
    assert found.row("bottleneck stage").values == (
        "A stage 1: 3 layers on fast, 90.00 ms x 5",
        f"A stage 1: 2 layers on slow x tp 2, {seconds(0.03 + 0.06 + 0.01)} x 3",
    )


def test_parts_of_a_row_add_up() -> None:
    """Each row that is followed by deeper ones is their sum, for every plan."""
    found = page.compare([first(), second(), many(3, 4)])
    for n, row in enumerate(found.rows):
        parts = []
        for later in found.rows[n + 1 :]:
            if later.depth <= row.depth:
                break
            if later.depth == row.depth + 1:
                parts.append(later)
        for v, value in enumerate(row.values):
            numbers = [each.values[v] for each in parts]
            assert not parts or value == pytest.approx(sum(float(x or 0) for x in numbers))


def test_says_why_a_plan_loses() -> None:
    """The term that grew most comes first, its parts behind it, what shrank after that."""
    found = page.compare([first(), second()])
    assert found.reasons[1] == (
        "+140.0 ms (+35.00%) against plan 1; loses by slowest pipeline +160.0 ms (compute at the bottleneck +130.0 ms, "
        "transfers at the bottleneck +20.00 ms, fill and drain +10.00 ms); but gains by exposed gradient sync -20.00 ms"
        "; bottleneck A stage 1: 3 layers on fast, 90.00 ms x 5; 0 devices idle against 2"
    )
    assert found.reasons[0] == (
        "fastest; its time is compute at the bottleneck 67.5%, fill and drain 17.5%, transfers at the bottleneck 7.5%, "
        "exposed gradient sync 5.0%, update 2.5%; bottleneck A stage 1: 2 layers on slow x tp 2, "
        f"{seconds(0.03 + 0.06 + 0.01)} x 3"
    )


def test_a_tie_is_called_one() -> None:
    """Plans that differ in the order of their pipelines only are said to be the same."""
    given = first()
    blocks = tuple(replace(block, owners=block.owners[::-1]) for block in given.blocks)
    other = replace(given, pipelines=given.pipelines[::-1], blocks=blocks)
    assert page.compare([given, other]).reasons[1] == "0 s (+0.00%) against plan 1; the same pipelines on other devices"


def test_the_simulation_decides() -> None:
    """Where all were simulated the fastest there is the best, and a formula that disagrees is pointed out."""
    slow = replace(first().predicted, simulated_s=0.60)
    quick = replace(second().predicted, simulated_s=0.55)
    found = page.compare([first(predicted=slow), second(predicted=quick)])
    assert found.best == 1
    assert found.row("simulated iteration").values == (0.60, 0.55)
    assert found.reasons[0].startswith("-140.0 ms (-25.93%) against plan 2, +50.00 ms simulated; loses by exposed")
    assert found.notes == ("planning form and simulation disagree on the fastest; the simulation decides",)
    partly = page.compare([first(predicted=slow), second()])
    assert partly.best == 0
    assert partly.notes == ("not all plans were simulated: the fastest is the one of the planning form",)


def test_timelines_add_what_they_know() -> None:
    """A timeline gives simulated time, exposed sync and bubble of its plan; a plan without one a dash."""
    found = page.compare([first(), second()], timelines=[timeline(first()), None])
    assert found.row("simulated iteration").values == (8.0, None)
    assert found.row("simulated exposed sync").values == (1.0, None)
    assert found.row("simulated bubble").values == (pytest.approx(0.25), None)  # 6 of 8 s of F and B
    assert re.search(r"simulated bubble +25.0% +- *$", page.comparison_text(found), re.MULTILINE)


def test_different_questions_are_pointed_out() -> None:
    """Plans of another profile or batch compare per sample, with a warning."""
    made = Provenance(profile="q" * 16, cluster="c" * 16, job="j" * 16)
    larger = plan((pipeline(2, 10, second().pipelines[0].stages),), 0.0, 0.010, provenance=made)
    # 170 + 9 x 90 + 10 = 990 ms for 20 samples beat 540 ms for 10
    found = page.compare([second(), larger])
    assert found.best == 1
    assert found.notes == (
        "the plans were not made for the same profile",
        "global batches differ (10, 20): the fastest is the one with the least time per sample",
    )


def test_comparison_text_survives_a_terminal() -> None:
    """Fixed width, no trailing blanks, every plan with its name, its shape and its reason; many plans fold."""
    plans = [first(), second(), many(3, 4), many(1, 8)]
    text = page.comparison_text(page.compare([*plans, *plans], [f"plan-of-{n}.json" for n in range(8)]))
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert all(line == line.rstrip() for line in lines)
    for n in range(8):
        assert sum(line.startswith(f"plan {n + 1} ") for line in lines) == 2
        assert f"plan-of-{n}.json: " in text
    assert sum("  iteration  " in line for line in lines) == 3  # the best beside 3 + 3 + 1 others


def test_one_plan_compares_with_itself() -> None:
    """A single plan gives its terms; none, or a name too many, is refused."""
    assert page.compare([first()]).best == 0
    assert "fill and drain" in page.comparison_text(page.compare([first()]))
    with pytest.raises(ValueError, match="plans: none given"):
        page.compare([])
    with pytest.raises(ValueError, match="names: 2 for 1 plans"):
        page.compare([first()], ["a", "b"])
    with pytest.raises(ValueError, match="timelines: 0 for 1 plans"):
        page.compare([first()], timelines=[])


def test_ranked_table() -> None:
    """Every plan has its rank, time, difference and pipelines; the reason stands below it."""
    found = rows(parsed(page.plans_html([first(), second()])))
    assert found[1] == "1 400.0 ms best 25,000 4 of 6 70% (fast 4 > slow tp 2 2) of 2 + (fast 6) of 1"
    assert found[2].startswith("fastest; its time is")
    assert found[3] == "2 540.0 ms +35.00% 18,519 2 of 2 70% (fast 3+3) of 2"
    assert found[4].startswith("+140.0 ms (+35.00%) against plan 1")
    assert len(found) == 5


def test_ranked_table_compares_what_decides() -> None:
    """Simulated 0.5 and 0.45 s: the second is the best, the first 11.11 % above it, whatever the planning form says."""
    one, two = (
        replace(each, predicted=replace(each.predicted, simulated_s=played_s))
        for each, played_s in ((first(), 0.5), (second(), 0.45))
    )
    found = rows(parsed(page.plans_html([one, two])))
    assert found[1].startswith("1 400.0 ms 500.0 ms +11.11%")
    assert found[3].startswith("2 540.0 ms 450.0 ms best")


def test_ranked_table_stays_small() -> None:
    """Many plans of many pipelines stay below 50 kB, and the rest is counted."""
    given = many(64, 8, name="<" * 300)
    text = page.plans_html([given] * 200)
    assert len(text.encode()) < LIMIT
    assert re.search(r"\d+ more plans not shown here", words(parsed(text)))


def test_shape_of_a_plan() -> None:
    """Layers per stage by device, samples per micro-batch; equal pipelines once, many in short."""
    assert page.shape(first()) == "(fast 4 > slow tp 2 2) of 2 + (fast 6) of 1"
    assert page.shape(many(8, 2, equal=True)) == "8 x (fast 1+1) of 1"
    assert page.shape(many(8, 1)).endswith(" + 5 more")
    assert page.shape(many(1, 20)) == "(fast 1+1+1+1+1+1+1+1+1+1+1+1+ ... (20 stages)) of 1"


# Rows.


def test_rows_carry_their_units() -> None:
    """One row per stage; bytes add up to the total and, with what is left, to the capacity."""
    found = page.stage_rows(first())
    assert [(row["pipeline"], row["stage"]) for row in found] == [(0, 0), (0, 1), (1, 0)]
    for row in found:
        assert sum(row[f"{name}_bytes"] for name in CATEGORIES) == row["total_bytes"] == 14 * GIB
        assert row["total_bytes"] + row["free_bytes"] + row["margin_bytes"] == row["capacity_bytes"] == 20 * GIB
        assert row["forward_s"] + row["backward_s"] + row["recompute_s"] == pytest.approx(row["compute_s"])
        assert row["compute_s"] + row["transfer_s"] == pytest.approx(row["load_s"])
    assert [row["bottleneck"] for row in found] == [False, True, True]
    assert (found[1]["first_layer"], found[1]["last_layer"], found[1]["num_layers"]) == (4, 5, 2)
    assert found[1]["devices"] == "n1:0 n1:1"
    plain = {
        "pipeline",
        "stage",
        "first_layer",
        "last_layer",
        "device_type",
        "tp",
        "devices",
        "micro_batch",
        "in_flight",
    }
    plain |= {"bottleneck", "memory_fraction"}
    assert all(name in plain or name.startswith("num_") or name.endswith(("_s", "_bytes")) for name in found[0])


def test_data_frame() -> None:
    """The frame has the rows, numbers as numbers."""
    pytest.importorskip("pandas", reason="needs pandas")
    frame = page.to_pandas(first())
    assert frame.shape == (3, len(page.stage_rows(first())[0]))
    assert list(frame["load_s"]) == pytest.approx([0.07, 0.10, 0.09])
    assert frame["weights_bytes"].dtype.kind == "i" and frame["forward_s"].dtype.kind == "f"
    assert frame.groupby("pipeline")["num_layers"].sum().tolist() == [6, 6]


def test_data_frame_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pandas the error says what to install."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        page.to_pandas(first())


# The report.

SVG = """<?xml version="1.0"?><!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/svg11.dtd">
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="72pt" height="36pt"
     viewBox="0 0 72 36" onload="alert(1)"><metadata><rdf xmlns="http://rdf.example">x</rdf></metadata>
<style type="text/css">*{stroke-linejoin: round}</style>
<defs><path id="glyph" d="M0 0h1"/><clipPath id="clip"><rect width="9" height="9"/></clipPath></defs>
<g id="a" class="k" clip-path="url(#clip)"><use xlink:href="#glyph" x="1"/><use xlink:href="http://evil.example/x"/></g>
<script>alert(2)</script><foreignObject><p>html</p></foreignObject><a href="javascript:alert(3)"><text>lost</text></a>
<text style="font: 10px sans-serif">1 &lt; 2</text><path style="fill: url(http://evil.example/y)" d="M1 1"/></svg>"""


def test_report_is_one_page() -> None:
    """A document with language, title, contents that lead somewhere, and every part of the plan."""
    given = [first(idle_devices=()), second()]
    text = page.report(given, [timeline(given[0]), None], cluster(fast=9.0, slow=4.5), None, {"gantt": SVG})
    tree = parsed(text)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert tree.findtext("head/title") == "toy on two: training plan"
    ids = [each.get("id") for each in tree.iter() if each.get("id")]
    assert len(ids) == len(set(ids))
    links = [link.get("href", "") for link in tree.iter("a")]
    assert links and all(link.startswith("#") and link[1:] in ids for link in links)
    titles = [each.text for each in tree.iter("h2")]
    assert titles == [
        "Summary",
        "Stages",
        "Timeline",
        "Idle time",
        "Memory by category",
        "Share of the batch",
        "Network",
        "Runners-up",
        "Inputs and origin of the numbers",
        "Words",
    ]
    for table in tree.iter("table"):
        assert [cell for cell in table.iter("th") if cell.get("scope")]
    for svg in tree.iter("svg"):
        assert svg.get("aria-hidden") or svg.get("aria-label") or svg.findtext("title")


def test_report_holds_all_stages() -> None:
    """Nothing is left out of the page: every stage of the plan has its row."""
    given = many(64, 8)
    tree = parsed(page.report([given]))
    assert sum("GiB of" in row for row in rows(tree)) == 512
    assert "not shown here" not in words(tree)


def test_idle_time_adds_up() -> None:
    """Busy and idle seconds of a lane are the iteration."""
    tree = parsed(page.report([first()], [timeline(first())]))
    found = [row for row in tree.iter("tr") if words(row).startswith("A, stage 0 on fast") and "7.000 s" in words(row)]
    cells = [words(cell) for cell in found[0]]
    assert cells[:2] == ["A, stage 0 on fast", "7.000 s"]  # 3 F, 3 B, an update
    assert cells.count("1.000 s") == 1  # sync


def test_pictures_lose_what_could_run_or_fetch() -> None:
    """Scripts, handlers, styles, links and foreign markup of a picture are dropped; what draws stays, ids renamed."""
    tree = parsed(page.report([first()], None, None, None, {"gantt": SVG, "my picture": SVG}))
    figures = list(tree.iter("figure"))
    assert [figure.findtext("figcaption") for figure in figures] == [
        "Every action of every stage over one iteration.",
        "my picture.",
    ]
    for figure, prefix in zip(figures, ("gantt-", "my-picture-")):
        picture = figure.find("svg")
        assert picture is not None
        assert picture.get("viewBox") == "0 0 72 36"
        assert picture.get("width") is None and picture.get("onload") is None
        assert picture.get("role") == "img" and picture.get("aria-label")
        assert [each.get("id") for each in picture.iter() if each.get("id")] == [
            prefix + n for n in ("glyph", "clip", "a")
        ]
        assert [each.get("href") for each in picture.iter("use")] == [f"#{prefix}glyph", None]
        group = picture.find("g")
        assert group is not None and group.get("clip-path") == f"url(#{prefix}clip)" and group.get("class") is None
        assert {each.tag for each in picture.iter()} == {"svg", "defs", "path", "clipPath", "rect", "g", "use", "text"}
        assert [each.text for each in picture.iter("text")] == ["1 < 2"]
        assert [each.get("style") for each in picture.findall("path")] == [None]


def test_pictures_that_are_none_are_refused() -> None:
    """What is not SVG, or defines entities, is refused by the name of the picture."""
    for text, wrong in (
        ("<svg", "pictures: gantt: not SVG"),
        ("<html></html>", "pictures: gantt: the outermost element is 'html', expected svg"),
        ('<!DOCTYPE svg [<!ENTITY a "b">]><svg>&a;</svg>', "pictures: gantt: SVG with entities"),
    ):
        with pytest.raises(ValueError, match=wrong):
            page.report([first()], None, None, None, {"gantt": text})
    with pytest.raises(ValueError, match="plans: none given"):
        page.report([])


def test_picture_without_a_box_gets_one() -> None:
    """A picture that only has a size still scales with the page."""
    tree = parsed(page.report([first()], None, None, None, {"x": '<svg width="72pt" height="36pt"><rect/></svg>'}))
    boxes_of = [svg.get("viewBox") for figure in tree.iter("figure") for svg in figure.iter("svg")]
    assert boxes_of == ["0 0 72 36"]
