"""Pictures of plans and timelines: Gantt, memory against capacity, memory over time, device map.

    figure = gantt(simulate(plan, cluster), plan)
    save(figure, "plan.svg")

Figures are made without pyplot: nothing needs a display, keeps a figure alive, or reads the user's style. A picture
is a panel of known height, laid out in inches from its top left corner, so that `overview` is the panels one below
the other. Every bar has a group id, in SVG too: ``p0-1B3`` is the action ``1B3`` of pipeline 0.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from planner import files
from planner.plans import CATEGORIES, GIB, grouped, inclusive, number, seconds, size
from planner.schedule import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Rectangle

    from planner.cluster import Cluster
    from planner.plans import Pipeline, Plan, Stage
    from planner.simulate import Event, Lane, MemoryTrace, Timeline

WIDTH, MIN_WIDTH, EDGE = 12.0, 6.0, 0.2  # inches: of a picture, and left free at its sides
SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's palette, which colour-blind readers tell apart: forward blue, backward orange.
COLOURS = {
    Kind.F: "#56B4E9",
    Kind.B: "#E69F00",
    Kind.I: "#F0E442",
    Kind.W: "#009E73",
    Kind.SEND_F: "#8C8C8C",
    Kind.RECV_F: "#8C8C8C",
    Kind.SEND_B: "#4D4D4D",
    Kind.RECV_B: "#4D4D4D",
    Kind.REDUCE_GRAD: "#CC79A7",
    Kind.UPDATE: "#333333",
}
KIND_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for inputs",
    Kind.W: "backward for weights",
    Kind.SEND_F: "activations (upper: sent, lower: received)",
    Kind.SEND_B: "gradients between stages",
    Kind.REDUCE_GRAD: "gradient all-reduce",
    Kind.UPDATE: "update",
}
# What is held throughout comes first, so that a stack over time has a flat base.
CATEGORY_COLOURS = {
    "weights": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "sync_buffer": "#D55E00",
    "context": "#999999",
    "activations": "#E69F00",
    "logits": "#F0E442",
    "workspace": "#CC79A7",
}
assert set(CATEGORY_COLOURS) == set(CATEGORIES)
INK, FAINT, OVER, NODE, MEASURED = "#222222", "#8A8A8A", "#B2182B", "#F6F6F6", "#F2F2F2"
BOLD = 1.16  # how much wider bold letters are
DASHES = (0, (2, 1.2))
BUSY = ((0.1, "#9E9E9E"), (0.3, "#E69F00"), (0.6, "#D55E00"), (float("inf"), "#7A0403"))  # busy share below, colour

MAX_LANES = 128  # lanes of one picture; the pipelines that end first are left out above
MAX_BARS = 6000  # bars with an id each; above, those of one kind in a lane are one shape


# The pictures.


def gantt(
    timeline: Timeline,
    plan: Plan | None = None,
    *,
    width: float = WIDTH,
    max_micro_batches: int = 24,
    fold: bool = True,
    critical: bool = False,
    title: str | None = None,
    measured: Timeline | None = None,
) -> Figure:
    """One lane per rank over time: compute, under it transfers and gradient sync; what is idle stays white.

    Parameters
    ----------
    plan
        The plan that was played, for the layers of each stage.
    width
        Inches.
    max_micro_batches
        Pipelines with more show fill, a steady stretch and drain, with break marks where time is left out.
    fold
        Draw one of several equal pipelines, the one that ends last (as measured, if it was).
    critical
        Frame the actions of the critical path.
    title
        Instead of what was played and how long it took.
    measured
        A run of the same lists, drawn in a lane of its own under each of the simulated ones; its bars are named
        ``measured-p0-1B3``.
    """
    with _drawing(width):
        return _figure(width, [_Gantt(timeline, plan, width, max_micro_batches, fold, critical, title, measured)])


def memory_bars(plan: Plan, *, width: float = WIDTH) -> Figure:
    """Bytes of every stage by category against the capacity of its device, and the limit that the job's margin leaves.

    Of equal pipelines the fullest device is shown.
    """
    with _drawing(width):
        return _figure(width, [_MemoryBars(plan, width)])


def memory_over_time(
    timeline: Timeline, plan: Plan | None = None, *, width: float = WIDTH, fold: bool = True
) -> Figure:
    """Bytes in use over time by category, one small picture per rank, all on the same axes.

    Raises
    ------
    ValueError
        If the timeline traces no memory.
    """
    if all(lane.memory is None for lane in timeline.lanes):
        raise ValueError("timeline: memory was not traced on any of its ranks, expected a timeline of a plan")
    with _drawing(width):
        return _figure(width, [_MemoryOverTime(timeline, plan, width, fold)])


def device_map(plan: Plan, cluster: Cluster | None = None, *, width: float = WIDTH) -> Figure:
    """Nodes with their devices, each in the colour of its pipeline, and the hand-overs between neighbouring stages.

    Parameters
    ----------
    cluster
        For the types of idle devices, and for devices that the plan does not name.
    """
    with _drawing(width):
        return _figure(width, [_DeviceMap(plan, cluster, width)])


def overview(plan: Plan, timeline: Timeline, cluster: Cluster | None = None, *, width: float = WIDTH) -> Figure:
    """Everything about one plan: Gantt, memory bars, memory over time, device map."""
    with _drawing(width):
        panels: list[_Panel] = [_Gantt(timeline, plan, width), _MemoryBars(plan, width)]
        if any(lane.memory is not None for lane in timeline.lanes):
            panels.append(_MemoryOverTime(timeline, plan, width))
        panels.append(_DeviceMap(plan, cluster, width))
        return _figure(width, panels)


def save(figure: Figure, path: str | Path, *, dpi: int = 150) -> None:
    """Write a figure whole, as PNG, SVG or PDF by its suffix; the same picture always gives the same bytes."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: suffix {path.suffix!r} is not among {', '.join(SUFFIXES)}")
    files.write(path, render(figure, suffix[1:], dpi=dpi))


def render(figure: Figure, suffix: str, *, dpi: int = 150) -> bytes:
    """The bytes of a figure as "png", "svg" or "pdf", without a date; text in SVG stays text."""
    undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    if suffix not in undated:
        raise ValueError(f"suffix: {suffix!r} is not among {', '.join(undated)}")
    buffer = io.BytesIO()
    with _style():
        figure.savefig(buffer, format=suffix, dpi=dpi, metadata=undated[suffix], facecolor="white")
    if suffix == "svg":  # a name may hold characters that no XML may
        return re.sub(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]", "\ufffd".encode(), buffer.getvalue())
    return buffer.getvalue()


# Figures in inches.


class _Panel(Protocol):
    """A picture that knows its height in inches and draws itself with its top edge anywhere on a page."""

    height: float

    def paint(self, page: _Page, top: float) -> None: ...


class _Page:
    """A figure measured in inches from its top left corner."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), facecolor="white")

    def axes(self, left: float, top: float, width: float, height: float, gid: str) -> Axes:
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, gid=gid)
        axes.tick_params(labelsize=7.5, colors=INK, length=3)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        return axes

    def chart(self, left: float, top: float, width: float, height: float, gid: str) -> Axes:
        """Axes whose y runs in inches downwards and has no ticks."""
        axes = self.axes(left, top, width, height, gid)
        axes.set_ylim(height, 0)
        axes.set_yticks([])
        return axes

    def text(self, x: float, y: float, words: str, points: float = 8, **style: Any) -> None:
        """Words with their left end at x and baseline at y; a dollar sign is a dollar sign."""
        style = {"color": INK, "parse_math": False, **style}
        self.figure.text(x / self.width, 1 - y / self.height, words, fontsize=points, **style)

    def headline(self, top: float, words: str) -> None:
        """A title, in smaller letters if it is long, cut if it is very long."""
        room = self.width - 2 * EDGE
        points = max(7.5, min(10.5, 10.5 * room / (_inches(words, BOLD * 10.5) or room)))
        self.text(EDGE, top + 0.24, _cut(words, room, BOLD * points), points, fontweight="bold")

    def legend(self, left: float, top: float, entries: Sequence[tuple[str, str]], gid: str) -> float:
        """Coloured squares with their names in one row, smaller if it is a long one; where it ends."""
        from matplotlib.patches import Rectangle

        wide = sum(0.41 + _inches(name) for _, name in entries)
        scale = min(1.0, (self.width - EDGE - left) / wide) if wide else 1.0
        for colour, name in entries:
            corner = (left / self.width, 1 - (top + 0.12) / self.height)
            square = Rectangle(corner, 0.14 * scale / self.width, 0.11 * scale / self.height, facecolor=colour)
            square.set(edgecolor="none", transform=self.figure.transFigure, gid=f"{gid}-{name}")
            self.figure.add_artist(square)
            self.text(left + 0.19 * scale, top + 0.115, name, 8 * scale)
            left += scale * (0.41 + _inches(name))
        return left


@contextlib.contextmanager
def _drawing(width: float) -> Iterator[None]:
    """Where a picture is drawn: in our style, if it is wide enough to be read."""
    if not MIN_WIDTH <= width < math.inf:
        raise ValueError(f"width: {width} inches, expected at least {MIN_WIDTH:g}")
    with _style():
        yield


def _figure(width: float, panels: Sequence[_Panel]) -> Figure:
    page = _Page(width, sum(panel.height for panel in panels))
    top = 0.0
    for panel in panels:
        panel.paint(page, top)
        top += panel.height
    return page.figure


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """matplotlib as it comes out of the box, whatever the user has set."""
    try:
        import matplotlib
        import matplotlib.style
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'hpp-planner[viz]'") from None
    fixed: dict[Any, Any] = {
        "svg.hashsalt": "hpp",
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "font.family": ["DejaVu Sans"],
    }
    with matplotlib.style.context("default"), matplotlib.rc_context(fixed):
        yield


@functools.cache
def _inches(words: str, points: float = 8) -> float:
    """Width of text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    if not words:
        return 0.0
    font = FontProperties(family="DejaVu Sans", size=points)
    return float(text_to_path.get_text_width_height_descent(words, font, ismath=False)[0]) / 72


def _cut(words: str, inches: float, points: float = 8) -> str:
    """Words that fit, the end left out if need be."""
    if _inches(words, points) <= inches:
        return words
    kept = len(words)
    while kept > 1 and _inches(words[:kept] + "…", points) > inches:
        kept -= 1
    return words[:kept].rstrip() + "…"


def _bar(axes: Axes, span: tuple[float, float], box: tuple[float, float], colour: str, gid: str, **style: Any) -> None:
    """A rectangle from span[0] to span[1] whose top and height are `box`."""
    from matplotlib.patches import Rectangle

    bar = Rectangle((span[0], box[0]), span[1] - span[0], box[1], facecolor=colour, gid=gid)
    bar.set(**{"linewidth": 0.0, **style})
    axes.add_artist(bar)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10, 20) if m * power >= value * (1 - 1e-9))


def _time_unit(total_s: float) -> tuple[float, str]:
    return (1.0, "s") if total_s >= 2 else (1e-3, "ms")


def _ticks(start_s: float, end_s: float, step: float, unit: float) -> list[tuple[float, str]]:
    """Multiples of `step` units from start to end: seconds and label."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    numbers = range(math.ceil(start_s / unit / step - 1e-9), math.floor(end_s / unit / step + 1e-9) + 1)
    return [(n * step * unit, f"{n * step:,.{decimals}f}") for n in numbers]


# Pipelines and lanes.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Pipelines that look alike: the one shown, its lanes, and what stands above them."""

    label: str
    shown: int
    lanes: tuple[Lane, ...]
    title: str


def _groups(timeline: Timeline, plan: Plan | None, fold: bool) -> list[_Group]:
    """The pipelines to draw, in order; at most MAX_LANES lanes, those that end last."""
    lanes: dict[int, list[Lane]] = defaultdict(list)
    for lane in timeline.lanes:
        lanes[lane.pipeline].append(lane)
    groups = []
    for letter, members in _alike(lanes, plan):
        for shown in [_last(timeline, members)] if fold else members:
            alone = fold or len(members) == 1
            label = letter if alone else f"{letter}{members.index(shown) + 1}"  # A2: the second of the pipelines A
            what = plan.pipelines[shown] if plan is not None else _micro_batches(lanes[shown][0])
            title = _title(label, len(members) if fold else 1, what)
            groups.append(_Group(label=label, shown=shown, lanes=tuple(lanes[shown]), title=title))
    return _most(timeline, groups)


def _alike(lanes: dict[int, list[Lane]], plan: Plan | None) -> list[tuple[str, list[int]]]:
    """Name and members of each group of equal pipelines: by the plan, or by what their lanes show."""
    if plan is not None:
        return grouped(plan)
    same: dict[object, list[int]] = defaultdict(list)
    for p, rows in lanes.items():
        spans = [
            [(event.action, round(event.start_s, 9), round(event.end_s, 9)) for event in row.events] for row in rows
        ]
        same[tuple((row.device_type, row.stages, *each) for row, each in zip(rows, spans))].append(p)
    return [(str(members[0]), members) for members in same.values()]


def _last(timeline: Timeline, members: Sequence[int]) -> int:
    return max(members, key=lambda p: (timeline.pipelines_s[p], -p))


def _most(timeline: Timeline, groups: list[_Group]) -> list[_Group]:
    kept: set[int] = set()
    room = MAX_LANES
    for n in sorted(range(len(groups)), key=lambda n: (-timeline.pipelines_s[groups[n].shown], n)):
        if not kept or len(groups[n].lanes) <= room:
            kept.add(n)
            room -= len(groups[n].lanes)
    return [group for n, group in enumerate(groups) if n in kept]


def _title(label: str, copies: int, what: Pipeline | int) -> str:
    """What stands above pipelines that look alike; `what`: one of them, or just how many micro-batches it takes."""
    name = f"pipeline {label}" if copies == 1 else f"{copies} x pipeline {label}, each"
    m, of = (what, "") if isinstance(what, int) else (what.num_micro_batches, f" of {what.micro_batch}")
    return f"{name}: {number(m, 'micro-batch')}{of}"


def _micro_batches(lane: Lane) -> int:
    return len({event.action.index for event in lane.events if event.action.kind == Kind.F})


def _lane_label(lane: Lane, plan: Plan | None) -> str:
    if len(lane.stages) > 1:
        words = (f"rank {lane.rank}", f"stages {', '.join(map(str, lane.stages))}", lane.device_type)
        return " · ".join(word for word in words if word)
    if plan is None:
        return " · ".join(word for word in (f"stage {lane.stages[0]}", lane.device_type) if word)
    return _stage_label(lane.stages[0], plan.pipelines[lane.pipeline].stages[lane.stages[0]])


def _stage_label(s: int, stage: Stage) -> str:
    tp = f" tp {stage.tp}" if stage.tp > 1 else ""
    noun = "layer" if stage.num_layers == 1 else "layers"
    return f"stage {s} · {noun} {inclusive(stage.layers)} · {stage.device_type}{tp}"


def apart(events: Iterable[Event]) -> list[list[Event]]:
    """As few rows as it takes for no two events of a row to overlap, to the nanosecond."""
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event[1:]):
        row = next((row for row in rows if round(row[-1].end_s, 9) <= round(event.start_s, 9)), None)
        if row is None:
            rows.append(row := [])
        row.append(event)
    return rows


# Gantt.


class _Window(NamedTuple):
    """A stretch of time that is drawn, and where: inches from the left of the page, and inches per second."""

    start_s: float
    end_s: float
    name: str
    left: float
    scale: float

    @property
    def width(self) -> float:
        """Inches."""
        return (self.end_s - self.start_s) * self.scale


class _Gantt:
    """Lanes below each other, windows of time beside each other."""

    TOP, HEADER, BOTTOM = 0.84, 0.26, 0.55  # inches: above the lanes, above each pipeline, below the lanes

    def __init__(
        self,
        timeline: Timeline,
        plan: Plan | None,
        width: float,
        max_micro_batches: int = 24,
        fold: bool = True,
        critical: bool = False,
        title: str | None = None,
        measured: Timeline | None = None,
    ) -> None:
        self.timeline, self.plan, self.critical, self.title = timeline, plan, critical, title
        self.measured = measured
        if timeline.iteration_s <= 0:
            raise ValueError(f"timeline: an iteration of {timeline.iteration_s} s has nothing to draw")
        self.total_s = timeline.iteration_s if measured is None else max(timeline.iteration_s, measured.iteration_s)
        if measured is None:
            self.groups = _groups(timeline, plan, fold)
        else:
            self.groups = [_doubled(group, timeline) for group in _groups(measured, plan, fold)]
        self.lanes = [lane for group in self.groups for lane in group.lanes]
        self.pitch = max(0.22, min(0.42, 9.0 / len(self.lanes)))  # inches of a lane
        self.tops = _tops(self.groups, self.pitch, self.HEADER)
        self.body = self.tops[-1] + self.pitch
        labels = ["measured" if self._is_measured(n) else _lane_label(lane, plan) for n, lane in enumerate(self.lanes)]
        self.labels = [_cut(label, 0.3 * width) for label in labels]
        self.left = EDGE + max(map(_inches, self.labels)) + 0.15
        self.num_bars = sum(len(lane.events) + len(lane.transfers) for lane in self.lanes)
        spans = _windows(self.lanes, self.total_s, max_micro_batches)
        self.windows = _side_by_side(spans, self.left, width - self.left - 0.25)
        self.top = self.TOP if len(self.windows) > 1 else self.TOP - 0.16  # without the names of the windows
        self.height = self.top + self.body + self.BOTTOM

    def paint(self, page: _Page, top: float) -> None:
        body_top = top + self.top
        page.headline(top, _played(self.timeline, self.plan, self.measured) if self.title is None else self.title)
        rows = [row for lane in self.lanes for row in (lane.events, lane.transfers, lane.reductions)]
        drawn = {event.action.kind for row in rows for event in row}
        entries = [(COLOURS[kind], name) for kind, name in KIND_NAMES.items() if kind in drawn]
        page.legend(EDGE, top + 0.36, entries, "kind")
        self._names(page, body_top)
        for n, window in enumerate(self.windows):
            axes = page.chart(window.left, body_top, window.width, self.body, gid=f"window-{n}")
            axes.set_xlim(window.start_s, window.end_s)
            for i in range(len(self.lanes)):
                self._lane(axes, i, window)
            if self.critical:
                self._critical_path(axes, window)
            self._time_axis(axes, window)
            page.text(window.left, body_top - 0.04, window.name, 7.5, color=FAINT, style="italic")
        for n, (one, other) in enumerate(pairwise(self.windows)):
            _break_mark(page, (one.left + one.width + other.left) / 2, body_top, self.body, f"break-{n}")
        middle = (self.left + self.windows[-1].left + self.windows[-1].width) / 2
        unit = _time_unit(self.total_s)[1]
        page.text(middle, body_top + self.body + 0.42, f"time ({unit})", ha="center")

    def _is_measured(self, i: int) -> bool:
        """Whether that lane is of the run: every other one."""
        return self.measured is not None and i % 2 == 1

    def _names(self, page: _Page, body_top: float) -> None:
        points = min(8.0, 72 * self.pitch * 0.6)
        labels = iter(zip(self.tops, self.labels))
        for group in self.groups:
            for n in range(len(group.lanes)):
                top, label = next(labels)
                if n == 0:
                    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # over a break mark
                    page.text(EDGE, body_top + top - 0.08, group.title, 8.5, fontweight="bold", bbox=ground)
                style = {"ha": "right", "color": FAINT} if self.measured is not None and n % 2 else {}
                left = self.left - 0.12 if style else EDGE
                page.text(left, body_top + top + 0.36 * self.pitch + 0.04, label, points, **style)

    def _boxes(self, top: float) -> dict[Kind, tuple[float, float]]:
        """Top and height of the bars in a lane: compute, and under it sync behind sends and receives."""
        high = self.pitch
        compute, sync = (top + 0.03 * high, 0.62 * high), (top + 0.68 * high, 0.25 * high)
        send, receive = (sync[0], 0.11 * high), (sync[0] + 0.14 * high, 0.11 * high)
        others = {
            Kind.REDUCE_GRAD: sync,
            Kind.SEND_F: send,
            Kind.SEND_B: send,
            Kind.RECV_F: receive,
            Kind.RECV_B: receive,
        }
        return dict.fromkeys(Kind, compute) | others

    def _lane(self, axes: Axes, i: int, window: _Window) -> None:
        lane, top = self.lanes[i], self.tops[i]
        bars, boxes, prefix = [], self._boxes(top), ""
        if self._is_measured(i):
            prefix = "measured-"
            axes.axhspan(top, top + self.pitch, facecolor=MEASURED, edgecolor="none", zorder=0.4)
        rows = apart(lane.reductions)  # those of different blocks may run at once
        row_of = {event: n for n, row in enumerate(rows) for event in row}
        for event in (*lane.events, *lane.reductions, *lane.transfers):
            if event.end_s < window.start_s or event.start_s > window.end_s or event.end_s == event.start_s:
                continue
            kind = event.action.kind
            position, of = lane.stages.index(event.action.stage), len(lane.stages)
            colour = _lighter(COLOURS[kind], 0.55 * position / of)
            cut = event.start_s < window.start_s and window.start_s > 0
            gid = f"{prefix}p{lane.pipeline}-{event.action}" + ("-continued" if cut else "")
            box = boxes[kind]
            if kind == Kind.REDUCE_GRAD:
                box = box[0] + box[1] * row_of[event] / len(rows), box[1] / len(rows)
            bars.append(_Bar(gid, event.start_s, event.end_s, *box, colour))
            if event.action.is_compute or kind == Kind.UPDATE:
                self._number(axes, event, box, window)
        _bars(axes, bars, together=self.num_bars > MAX_BARS)
        if i + 1 < len(self.lanes) and (self.measured is None or prefix):
            axes.axhline(top + 0.985 * self.pitch, color="#E2E2E2", linewidth=0.5, zorder=0.5)

    def _number(self, axes: Axes, event: Event, box: tuple[float, float], window: _Window) -> None:
        """The micro-batch in the middle of what is seen of a bar, if it is wide and high enough."""
        words = "update" if event.action.index is None else str(event.action.index)
        start, end = max(window.start_s, event.start_s), min(window.end_s, event.end_s)
        points = min(7.5, 72 * box[1] * 0.75)
        if points < 4.5 or _inches(words, points) + 0.025 > (end - start) * window.scale:
            return
        colour = "white" if event.action.kind in (Kind.UPDATE, Kind.W) else INK
        middle = (start + end) / 2, box[0] + box[1] / 2
        text = axes.text(*middle, words, fontsize=points, color=colour, ha="center", va="center_baseline")
        text.set_clip_on(True)

    def _critical_path(self, axes: Axes, window: _Window) -> None:
        every = 1 if self.measured is None else 2  # the path is of what was played
        lanes = list(zip(self.lanes, self.tops))[::every]
        tops = {(lane.pipeline, s): top for lane, top in lanes for s in lane.stages}
        frame = {"fill": False, "edgecolor": "black", "linewidth": 1.4, "zorder": 5}
        for pipeline, event in self.timeline.critical_path:
            top = tops.get((pipeline, event.action.stage))
            if top is None or event.end_s < window.start_s or event.start_s > window.end_s:
                continue
            box = self._boxes(top)[event.action.kind]
            _bar(axes, event[1:], box, "none", f"critical-p{pipeline}-{event.action}", **frame)

    def _time_axis(self, axes: Axes, window: _Window) -> None:
        """Round times, spaced alike in all windows; none whose label would reach across a break."""
        unit, _ = _time_unit(self.total_s)
        step = _round_up(0.75 / window.scale / unit)
        kept = []
        for at, label in _ticks(window.start_s, window.end_s, step, unit):
            half = _inches(label, 7.5) / 2 - 0.13  # a label may reach that far into the gap
            fits_left = window is self.windows[0] or (at - window.start_s) * window.scale >= half
            if fits_left and (window is self.windows[-1] or (window.end_s - at) * window.scale >= half):
                kept.append((at, label))
        axes.set_xticks([at for at, _ in kept], [label for _, label in kept])


class _Bar(NamedTuple):
    """A rectangle of a lane: seconds from left to right, inches from the top of the lanes and of its height."""

    gid: str
    start_s: float
    end_s: float
    top: float
    height: float
    colour: str


def _bars(axes: Axes, bars: Sequence[_Bar], together: bool) -> None:
    """Each bar for itself, or all of a kind and stage as one shape ``p0-1B``, which is 20 times as fast."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if not together:
        for gid, start, end, top, height, colour in bars:
            _bar(axes, (start, end), (top, height), colour, gid, edgecolor=_lighter(colour, -0.25), linewidth=0.3)
        return
    corners: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for gid, start, end, top, height, colour in bars:
        low = top + height
        kind = re.sub(r"\d*(-continued)?$", "", gid)
        corners[kind, colour] += [(start, top), (end, top), (end, low), (start, low), (start, top)]
    once = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    for (kind, colour), points in corners.items():
        outline = Outline(np.array(points), np.tile(once, len(points) // 5).astype(np.uint8))
        shape = PathPatch(outline, facecolor=colour, edgecolor=_lighter(colour, -0.25), linewidth=0.3, gid=kind)
        axes.add_artist(shape)


def _doubled(group: _Group, simulated: Timeline) -> _Group:
    """A group of measured lanes with the simulated one above each."""
    pairs = [(simulated.lane(lane.pipeline, lane.stages[0]), lane) for lane in group.lanes]
    return replace(group, lanes=tuple(lane for pair in pairs for lane in pair))


def _played(timeline: Timeline, plan: Plan | None, measured: Timeline | None = None) -> str:
    played, bubble = f"{seconds(timeline.iteration_s)} per iteration", f"bubble {timeline.bubble_fraction:.1%}"
    if measured is not None:
        name = f"{plan.profile_name} on {plan.cluster_name}: " if plan is not None else ""
        times = f"{seconds(measured.iteration_s)} measured, {seconds(timeline.iteration_s)} as played"
        return f"{name}{times}; bubble {measured.bubble_fraction:.1%} and {timeline.bubble_fraction:.1%}"
    if plan is None:
        return f"{played}, {bubble}"
    planned = f"{seconds(plan.predicted.iteration_s)} as planned"
    return f"{plan.profile_name} on {plan.cluster_name}: {played} as played, {planned}, {bubble}"


def _tops(groups: Sequence[_Group], pitch: float, header: float) -> list[float]:
    """Where each lane begins, with a header above each pipeline."""
    tops, y = [], 0.0
    for group in groups:
        y += header
        for _ in group.lanes:
            tops.append(y)
            y += pitch
    return tops


@functools.cache
def _lighter(colour: str, share: float) -> str:
    """The colour mixed with that share of white; of black if it is negative."""
    from matplotlib.colors import to_hex, to_rgb

    target = 1.0 if share >= 0 else 0.0
    red, green, blue = (c + (target - c) * abs(share) for c in to_rgb(colour))
    return to_hex((red, green, blue))


def _windows(lanes: Sequence[Lane], total_s: float, max_micro_batches: int) -> list[tuple[float, float, str]]:
    """All of a run, or fill, a steady stretch and drain: (start, end, name).

    Something happens at the first action, the first backward, the last forward and the end of every stage. Time that is
    further than one micro-batch from all of that repeats itself; one stretch of it stands for the rest.
    """
    whole = [(0.0, total_s, "")]
    if max(map(_micro_batches, lanes)) <= max_micro_batches:
        return whole
    period = max(map(_period, lanes))
    spans = [(0.0, 2 * period), (total_s - period, total_s)]
    for lane in lanes:
        compute = [event for event in lane.events if event.action.kind != Kind.UPDATE]
        turns = compute[:1] + [event for event in compute if event.action.kind in (Kind.B, Kind.I)][:1]
        turns += [event for event in compute if event.action.kind == Kind.F][-1:]
        spans += [(event.start_s - period, event.end_s + period) for event in (*turns, *compute[-1:])]
    merged = _merged(spans, total_s, 2 * period)
    done_s = max(event.start_s for lane in lanes for event in lane.events if event.action.kind != Kind.UPDATE)
    steady = None
    if _first_after(merged, done_s) == 1:  # nothing is drawn between fill and drain
        middle = (merged[0][1] + merged[1][0]) / 2
        steady = (middle - 1.5 * period, middle + 1.5 * period)
        merged = _merged([*merged, steady], total_s, 2 * period)
    if sum(end - start for start, end in merged) > 0.7 * total_s:
        return whole
    names = dict.fromkeys(merged, "") | {merged[-1]: "sync", merged[0]: "fill"}
    names[merged[_first_after(merged, done_s)]] = "drain"
    if steady in names:
        names[steady] = "steady"
    return [(*span, name) for span, name in names.items()]


def _first_after(spans: Sequence[tuple[float, float]], at_s: float) -> int:
    """Index of the first span that ends after a time."""
    return next(n for n, (_, end) in enumerate(spans) if end >= at_s)


def _period(lane: Lane) -> float:
    """Compute seconds of one micro-batch."""
    return lane.compute_s / _micro_batches(lane)


def _merged(spans: Iterable[tuple[float, float]], total_s: float, hole: float) -> list[tuple[float, float]]:
    """The union within [0, total], shorter holes filled."""
    out: list[tuple[float, float]] = []
    for start, end in sorted((max(0.0, start), min(total_s, end)) for start, end in spans):
        if out and start - out[-1][1] < hole:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _side_by_side(spans: Sequence[tuple[float, float, str]], left: float, width: float) -> list[_Window]:
    """Windows of one scale with gaps for the break marks between them."""
    gap = 0.3
    scale = (width - gap * (len(spans) - 1)) / sum(end - start for start, end, _ in spans)
    windows = []
    for start, end, name in spans:
        windows.append(_Window(start, end, name, left, scale))
        left += windows[-1].width + gap
    return windows


def _break_mark(page: _Page, middle: float, top: float, height: float, gid: str) -> None:
    """Two zigzag lines down a gap: time is left out here."""
    from matplotlib.lines import Line2D

    teeth = max(4, round(height / 0.09))
    y = [1 - (top + height * k / teeth) / page.height for k in range(teeth + 1)]
    for n, offset in enumerate((-0.06, 0.06)):
        x = [(middle + offset + (0.03 if k % 2 else -0.03)) / page.width for k in range(teeth + 1)]
        line = Line2D(x, y, color=FAINT, linewidth=0.8, transform=page.figure.transFigure, gid=f"{gid}-{n}")
        page.figure.add_artist(line)


# Memory.


class _MemoryBars:
    """A row per stage, pipelines below each other."""

    TOP, HEADER, BOTTOM, RIGHT = 0.72, 0.26, 0.6, 1.75  # inches around the bars and above each pipeline

    def __init__(self, plan: Plan, width: float) -> None:
        self.plan, self.width = plan, width
        self.groups = grouped(plan)
        stages = [_fullest(plan, members) for _, members in self.groups]
        self.pitch = 0.27 if sum(map(len, stages)) <= 40 else 0.2
        self.body = sum(map(len, stages)) * self.pitch + len(stages) * self.HEADER
        self.height = self.TOP + self.body + self.BOTTOM
        self.stages = stages
        labels = [_stage_label(s, stage) for rows in stages for s, stage in enumerate(rows)]
        self.left = EDGE + min(0.3 * width, max(map(_inches, labels))) + 0.15

    def paint(self, page: _Page, top: float) -> None:
        page.headline(top, "Memory of each stage against the capacity of its device")
        every = [stage.memory for rows in self.stages for stage in rows]
        used = [name for name in CATEGORY_COLOURS if any(getattr(memory, name) for memory in every)]
        page.legend(EDGE, top + 0.36, [(CATEGORY_COLOURS[name], _spoken(name)) for name in used], "category")
        axes = page.chart(self.left, top + self.TOP, self.width - self.left - self.RIGHT, self.body, gid="memory")
        axes.set_xlim(0, 1.02 * max(max(memory.capacity, memory.total) for memory in every) / GIB)
        axes.set_xlabel("GiB; grey frame: capacity, dashed: what the memory margin leaves", fontsize=8, color=INK)
        y = 0.0
        for (letter, members), rows in zip(self.groups, self.stages):
            title = _title(letter, len(members), self.plan.pipelines[members[0]])
            page.text(EDGE, top + self.TOP + y + 0.18, title, 8.5, fontweight="bold")
            y += self.HEADER
            for s, stage in enumerate(rows):
                self._row(page, axes, stage, y, top, f"{letter}{s}")
                label = _cut(_stage_label(s, stage), 0.3 * self.width)
                page.text(EDGE, top + self.TOP + y + self.pitch / 2 + 0.04, label)
                y += self.pitch

    def _row(self, page: _Page, axes: Axes, stage: Stage, y: float, top: float, gid: str) -> None:
        memory, box = stage.memory, (y + 0.14 * self.pitch, 0.72 * self.pitch)
        room = (0.0, memory.capacity / GIB)
        _bar(axes, room, box, "#F4F4F4", f"room-{gid}")
        _bar(axes, room, box, "none", f"capacity-{gid}", edgecolor=FAINT, linewidth=0.8, zorder=2.5)
        start = 0.0
        for name, colour in CATEGORY_COLOURS.items():
            end = start + getattr(memory, name) / GIB
            if end > start:
                _bar(axes, (start, end), box, colour, f"{name}-{gid}", zorder=2)
            start = end
        limit = (1 - self.plan.job.memory_margin) * memory.capacity / GIB
        height = [box[0], box[0] + box[1]]
        axes.plot([limit] * 2, height, color=INK, linewidth=1.1, linestyle=DASHES, gid=f"limit-{gid}")
        words = f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.1f} GiB, {memory.fraction:.0%}"
        colour = OVER if start > limit * (1 + 1e-9) else INK
        page.text(self.width - self.RIGHT + 0.1, top + self.TOP + y + self.pitch / 2 + 0.04, words, color=colour)


def _fullest(plan: Plan, members: Sequence[int]) -> list[Stage]:
    """Of every stage of equal pipelines the one with the fullest device."""
    alike = zip(*(plan.pipelines[p].stages for p in members))
    return [max(stages, key=lambda stage: stage.memory.fraction) for stages in alike]


def _spoken(name: str) -> str:
    return name.replace("_", " ")


class _MemoryOverTime:
    """One small chart per rank on a grid."""

    TOP, CELL, BOTTOM, LEFT = 0.72, 1.6, 0.1, 0.72  # inches around the grid, and the height of a chart with its title

    def __init__(self, timeline: Timeline, plan: Plan | None, width: float, fold: bool = True) -> None:
        self.timeline, self.width = timeline, width
        groups = _groups(timeline, plan, fold)
        traced = [(group.label, lane, lane.memory) for group in groups for lane in group.lanes]
        self.charts = [(label, lane, memory) for label, lane, memory in traced if memory is not None]
        self.columns = max(1, min(len(self.charts), int(width // 2.7)))
        self.height = self.TOP + -(-len(self.charts) // self.columns) * self.CELL + self.BOTTOM

    def paint(self, page: _Page, top: float) -> None:
        page.headline(top, "Memory over one iteration")
        every = [memory for *_, memory in self.charts]
        names = [name for name in CATEGORY_COLOURS if any(memory.peak(name) for memory in every)]
        page.legend(EDGE, top + 0.36, [(CATEGORY_COLOURS[name], _spoken(name)) for name in names], "over-time")
        most = max(max(memory.capacity or 0, memory.peak_bytes) for memory in every) / GIB
        wide = (self.width - self.LEFT - EDGE) / self.columns
        for n, (label, lane, memory) in enumerate(self.charts):
            row, column = divmod(n, self.columns)
            corner = self.LEFT + column * wide, top + self.TOP + row * self.CELL + 0.22
            axes = page.axes(*corner, wide - 0.2, self.CELL - 0.62, gid=f"memory-p{lane.pipeline}-r{lane.rank}")
            axes.set_ylim(0, 1.04 * most)
            axes.set_xlim(0, self.timeline.iteration_s)
            _memory_steps(axes, memory, names, self.timeline.iteration_s)
            self._frame(axes, column == 0)
            title = _cut(_memory_title(label, lane, memory), wide - 0.15)
            over = memory.limit is not None and memory.peak_bytes > memory.limit
            page.text(corner[0], corner[1] - 0.06, title, color=OVER if over else INK)

    def _frame(self, axes: Axes, first: bool) -> None:
        unit, name = _time_unit(self.timeline.iteration_s)
        step = _round_up(self.timeline.iteration_s / unit / 4)
        ticks = _ticks(0.0, self.timeline.iteration_s, step, unit)
        axes.set_xticks([at for at, _ in ticks], [label for _, label in ticks])
        axes.set_xlabel(f"time ({name})", fontsize=7.5, labelpad=1, color=INK)
        axes.tick_params(labelleft=first)
        axes.spines["left"].set(visible=True, color=FAINT)
        if first:
            axes.set_ylabel("GiB", fontsize=7.5, color=INK)


def _memory_title(label: str, lane: Lane, memory: MemoryTrace) -> str:
    stages = f"stage {lane.stages[0]}" if len(lane.stages) == 1 else f"rank {lane.rank}"
    room = f" of {memory.capacity / GIB:.1f}" if memory.capacity is not None else ""
    pipeline = f"pipeline {label}" if label.isdecimal() else label
    where = ", ".join(word for word in (f"{pipeline} {stages}", lane.device_type) if word)
    return f"{where}: {memory.peak_bytes / GIB:.1f}{room} GiB"


def _memory_steps(axes: Axes, memory: MemoryTrace, names: Sequence[str], total_s: float) -> None:
    times, levels = _thinned(memory.times_s, [memory.levels(name) for name in names])
    times = [*times, total_s]
    base = [0.0] * len(times)
    for name, level in zip(names, levels):
        if not any(level):
            continue
        top = [low + nbytes / GIB for low, nbytes in zip(base, [*level, level[-1]])]
        axes.fill_between(times, base, top, step="post", color=CATEGORY_COLOURS[name], linewidth=0, gid=f"area-{name}")
        base = top
    if memory.limit is not None:
        axes.axhline(memory.limit / GIB, color=INK, linewidth=1.0, linestyle=DASHES)
    if memory.capacity is not None:
        axes.axhline(memory.capacity / GIB, color=FAINT, linewidth=1.0)


def _thinned(
    times: Sequence[float], levels: Sequence[Sequence[int]], most: int = 300
) -> tuple[list[float], list[list[int]]]:
    """At most so many steps; of the steps that fall together the fullest stays, so that peaks do."""
    every = -(-len(times) // most)
    totals = [sum(level) for level in zip(*levels)]
    starts = range(0, len(times), every)
    kept = [max(range(n, min(n + every, len(times))), key=totals.__getitem__) for n in starts]
    return [times[n] for n in starts], [[level[k] for k in kept] for level in levels]


# Device map.


class _Cell(NamedTuple):
    """One device: its name and type ("" if unknown), and the pipeline and stage it serves (None if idle)."""

    name: str
    type: str
    pipeline: int | None
    stage: int | None


class _Box(NamedTuple):
    """A node: inches from the left and top of the map, width and height, where its devices begin, how many in a row."""

    name: str
    left: float
    top: float
    width: float
    height: float
    indent: float
    columns: int
    cells: tuple[_Cell, ...]


CELL = (0.72, 0.48)  # inches of a device, with the gap to the next
NODE_GAP = (0.32, 0.34)
SCALES = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2)  # of a device, until the map is lower than MAP_HEIGHT
MAP_HEIGHT = 11.0


class _DeviceMap:
    """Nodes in rows, by the first stage they serve, so that pipelines run down the page."""

    TOP, BOTTOM = 0.78, 0.2

    def __init__(self, plan: Plan, cluster: Cluster | None, width: float) -> None:
        self.plan, self.width = plan, width
        self.names = _pipeline_names(plan)
        nodes = _nodes(plan, cluster)
        for scale in SCALES:
            self.scale, self.boxes = scale, _arranged(nodes, width, scale, self.names)
            self.body = max(box.top + box.height for box in self.boxes) + 0.1
            if self.body < MAP_HEIGHT:
                break
        self.height = self.TOP + self.body + self.BOTTOM

    def paint(self, page: _Page, top: float) -> None:
        given = len(self.plan.devices) + len(self.plan.idle_devices)
        page.headline(top, f"Pipeline and stage of each device ({len(self.plan.devices)} of {given} in use)")
        uses = _uses(self.plan)
        if self.scale < 0.6:  # arrows between devices would be a thicket
            uses = _between_nodes(uses)
        self._legend(page, top + 0.36, uses)
        axes = page.chart(0, top + self.TOP, self.width, self.body, gid="map")
        axes.set_xlim(0, self.width)
        axes.set_axis_off()
        frames: dict[str, FancyBboxPatch | Rectangle] = {}
        for box in self.boxes:
            frames |= self._node(axes, box)
        _arrows(axes, uses, frames)

    def _legend(self, page: _Page, top: float, uses: Sequence[_Use]) -> None:
        if not uses:
            return
        shares = [share for share, _ in BUSY[:-1]]
        between = [f"{low:.0%} to {high:.0%}" for low, high in pairwise(shares)]
        names = [f"below {shares[0]:.0%}", *between, f"above {shares[-1]:.0%}"]
        page.text(EDGE, top + 0.115, "link busy with hand-overs:")
        left = EDGE + _inches("link busy with hand-overs:") + 0.15
        left = page.legend(left, top, [(colour, name) for (_, colour), name in zip(BUSY, names)], "busy")
        most = max(use.nbytes for use in uses)
        words = f"width: bytes both ways in an iteration, at most {size(most)}"
        page.text(left + 0.1, top + 0.115, _cut(words, page.width - EDGE - left - 0.1))

    def _node(self, axes: Axes, box: _Box) -> dict[str, FancyBboxPatch | Rectangle]:
        """Draws a node; the outlines of it and of its devices by name."""
        from matplotlib.patches import FancyBboxPatch, Rectangle

        frame = FancyBboxPatch((box.left, box.top), box.width, box.height, boxstyle="round,pad=0,rounding_size=0.05")
        frame.set(facecolor=NODE, edgecolor=FAINT, linewidth=0.8, zorder=1, gid=f"node-{box.name}")
        axes.add_artist(frame)
        points = _node_points(self.scale)
        for n, words in enumerate(_node_words(box.name, box.cells, self.scale, self.names)):
            y = box.top + (1.7 + 1.4 * n) * points / 72
            text = axes.text(box.left + 0.07, y, _cut(words, box.indent - 0.07, BOLD * points), fontsize=points)
            text.set_fontweight("bold" if n == 0 else "normal")
            text.set(color=INK, parse_math=False, zorder=4, bbox={"facecolor": NODE, "edgecolor": "none", "pad": 1.0})
        frames: dict[str, FancyBboxPatch | Rectangle] = {box.name: frame}
        pitch = CELL[0] * self.scale, CELL[1] * self.scale
        for n, cell in enumerate(box.cells):
            row, column = divmod(n, box.columns)
            x, y = box.left + box.indent + column * pitch[0], box.top + (0.08 + row * CELL[1]) * self.scale
            colour = "#FFFFFF" if cell.pipeline is None else _pipeline_colour(cell.pipeline)
            square = Rectangle((x, y), pitch[0] - 0.08 * self.scale, pitch[1] - 0.08 * self.scale, facecolor=colour)
            square.set(edgecolor=FAINT, linewidth=0.6, zorder=3, gid=f"device-{cell.name}")
            axes.add_artist(square)
            frames[cell.name] = square
            self._words(axes, cell, square)
        return frames

    def _words(self, axes: Axes, cell: _Cell, square: Rectangle) -> None:
        x, y = square.get_x() + square.get_width() / 2, square.get_y()
        style: dict[str, Any] = {"ha": "center", "zorder": 4, "parse_math": False}
        colour = INK if cell.pipeline is not None else FAINT
        name = "idle" if cell.pipeline is None else self.names[cell.pipeline]
        stage = "" if cell.pipeline is None else f"stage {cell.stage}"
        if self.scale >= 0.8:
            tall, points = square.get_height(), 8 * self.scale
            axes.text(
                x, y + (0.45 if stage else 0.62) * tall, name, fontsize=points, color=colour, fontweight="bold", **style
            )
            axes.text(x, y + 0.86 * tall, stage, fontsize=points - 0.5, color=colour, **style)
            index = cell.name.rpartition(":")[2]
            axes.text(square.get_x() + 0.05, y + 0.28 * tall, index, fontsize=5.5, color="#606060", zorder=4)
        elif self.scale >= 0.45 and cell.pipeline is not None:
            words = _cut(f"{name} {cell.stage}", square.get_width(), 11 * self.scale)
            axes.text(x, y + 0.7 * square.get_height(), words, fontsize=11 * self.scale, color=colour, **style)


def _pipeline_names(plan: Plan) -> dict[int, str]:
    """``B``, or ``A2`` for the second of equal pipelines."""
    return {
        p: letter if len(members) == 1 else f"{letter}{n + 1}"
        for letter, members in grouped(plan)
        for n, p in enumerate(members)
    }


def _nodes(plan: Plan, cluster: Cluster | None) -> list[tuple[str, tuple[_Cell, ...]]]:
    """Nodes and their devices; nodes that hand over to each other stand together, idle ones come last."""
    cells = {
        name: _Cell(name, stage.device_type, p, s)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        for name in stage.devices
    }
    types = {device.name: device.type for device in cluster.devices} if cluster is not None else {}
    for name in (*types, *plan.idle_devices):
        cells.setdefault(name, _Cell(name, types.get(name, ""), None, None))
    nodes: dict[str, list[_Cell]] = defaultdict(list)
    for name in sorted(cells, key=_natural):
        nodes[_node_of(name)].append(cells[name])
    return [(node, tuple(nodes[node])) for node in _visited(plan, list(nodes))]


def _natural(name: str) -> list[tuple[str, int]]:
    """``node-2:0`` before ``node-10:0``."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _node_of(device: str) -> str:
    return device.rpartition(":")[0] or device


def _visited(plan: Plan, nodes: Sequence[str]) -> list[str]:
    """Nodes in the order of a walk along the hand-overs, from the first node in use; idle ones last."""
    beside: dict[str, list[str]] = defaultdict(list)
    for use in _uses(plan):
        a, b = _node_of(use.sender), _node_of(use.receiver)
        beside[a].append(b)
        beside[b].append(a)
    used = {_node_of(device) for device in plan.devices}
    order: dict[str, None] = {}
    for start in sorted(nodes, key=lambda node: node not in used):
        ahead = [start]
        while ahead:
            node = ahead.pop()
            if node not in order:
                order[node] = None
                ahead += sorted(set(beside[node]), key=nodes.index, reverse=True)
    return list(order)


def _arranged(
    nodes: Sequence[tuple[str, tuple[_Cell, ...]]], width: float, scale: float, names: Mapping[int, str]
) -> list[_Box]:
    """Nodes from left to right and top to bottom; where each serves one stage, in rows by stage."""
    depths = {node: _depth(cells) for node, cells in nodes}
    by_depth = len(set(depths.values())) <= 8 and all(len({cell.stage for cell in cells}) == 1 for _, cells in nodes)
    points = _node_points(scale)
    words = [line for node, cells in nodes for line in _node_words(node, cells, scale, names)]
    indent = min(max(_inches(line, BOLD * points) for line in words) + 0.2, 1.9)  # the same, so that devices line up
    boxes: list[_Box] = []
    left, top, low, before = EDGE, 0.1, 0.0, None
    for node, cells in sorted(nodes, key=lambda pair: depths[pair[0]]) if by_depth else nodes:
        columns = max(1, min(len(cells), 8, int((width - 2 * EDGE - indent) / (CELL[0] * scale))))
        wide = indent + columns * CELL[0] * scale + 0.04
        tall = max(-(-len(cells) // columns) * CELL[1] * scale, 2.2 * points / 72) + 0.08 * scale
        if boxes and (left + wide > width - 0.15 or (by_depth and depths[node] != before)):
            left, top = EDGE, low + NODE_GAP[1] * max(scale, 0.4)
        boxes.append(_Box(node, left, top, wide, tall, indent, columns, cells))
        low, left, before = max(low, top + tall), left + wide + NODE_GAP[0], depths[node]
    return boxes


def _depth(cells: Iterable[_Cell]) -> int:
    """The first stage that a node serves; an idle node comes after all stages."""
    return min((cell.stage for cell in cells if cell.stage is not None), default=10**6)


def _node_words(name: str, cells: Iterable[_Cell], scale: float, names: Mapping[int, str]) -> list[str]:
    """Its name, and below it what its devices are as far as is known; where they have no words, whom they serve."""
    if scale >= 0.45:
        types = Counter(cell.type for cell in cells if cell.type)
        return [name, ", ".join(f"{n} x {kind}" for kind, n in types.items())]
    served = list(dict.fromkeys(names[cell.pipeline] for cell in cells if cell.pipeline is not None))
    return [f"{name}: {' '.join(served[:3])}{'…' if len(served) > 3 else ''}" if served else f"{name}: idle"]


def _node_points(scale: float) -> float:
    return 8 * max(scale, 0.7)


def _pipeline_colour(p: int) -> str:
    """Light colours, neighbours far apart on the wheel; the words in the cell tell pipelines apart, not the colour."""
    import colorsys

    from matplotlib.colors import to_hex

    return to_hex(colorsys.hls_to_rgb((0.56 + p * 0.618034) % 1, 0.84 if p % 2 else 0.77, 0.65))


class _Use(NamedTuple):
    """Traffic of a hand-over in one iteration: bytes both ways, and the share of the time that it moves one way."""

    sender: str
    receiver: str
    nbytes: float
    busy: float


def _uses(plan: Plan) -> list[_Use]:
    uses = []
    for pipeline in plan.pipelines:
        m = pipeline.num_micro_batches
        for one, other in pairwise(pipeline.stages):
            busy = m * one.send_s / plan.predicted.iteration_s if plan.predicted.iteration_s else 0.0
            uses.append(_Use(one.devices[-1], other.devices[0], 2.0 * m * one.send_bytes, busy))
    return uses


def _between_nodes(uses: Sequence[_Use]) -> list[_Use]:
    """All hand-overs from one node to another as one: bytes add up, the busiest counts."""
    together: dict[tuple[str, str], _Use] = {}
    for use in uses:
        pair = _node_of(use.sender), _node_of(use.receiver)
        if pair[0] != pair[1]:
            before = together.get(pair, _Use(*pair, 0.0, 0.0))
            together[pair] = _Use(*pair, before.nbytes + use.nbytes, max(before.busy, use.busy))
    return list(together.values())


def _arrows(axes: Axes, uses: Sequence[_Use], frames: Mapping[str, FancyBboxPatch | Rectangle]) -> None:
    """From each sender to its receiver, wider for more bytes, darker for a busier link."""
    from matplotlib.patches import FancyArrowPatch

    most = max((use.nbytes for use in uses), default=0.0)
    for use in uses:
        one, other = frames[use.sender], frames[use.receiver]
        ends = [(box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2) for box in (one, other)]
        far = math.dist(*ends)
        level = abs(ends[0][1] - ends[1][1]) < 0.05
        bend = -min(0.25, 0.75 / far) if level and far > 1.2 * CELL[0] else 0.0  # over what stands between
        arrow = FancyArrowPatch(
            *ends, patchA=one, patchB=other, shrinkA=0, shrinkB=1, arrowstyle="-|>", mutation_scale=8,
            connectionstyle=f"arc3,rad={bend}", linewidth=0.8 + 2.2 * (use.nbytes / most if most else 0.0),
            color=next(colour for share, colour in BUSY if use.busy < share), zorder=2,
            gid=f"link-{use.sender}-{use.receiver}",
        )  # fmt: skip
        axes.add_artist(arrow).set_clip_on(False)
