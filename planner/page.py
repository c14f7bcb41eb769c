"""What people look at: a plan as HTML in a notebook, plans side by side, the report page, rows for a data frame.

Everything is a pure function of its arguments: the same plan gives the same bytes. HTML is built by `_tag`, which
escapes every text that is not markup already, so no name can break a page. Fragments take their text colour from
where they stand and paint no background, which is what keeps them readable in any theme; every fill has at least three
times the contrast of white and of a dark page. Where a viewer strips style sheets and SVG, the text still says it all.

    t = compute + transfer    load of a stage, seconds per micro-batch
    iteration = slowest pipeline + exposed gradient sync + update
    slowest pipeline = fill and drain + m x t of its bottleneck stage
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from xml.etree import ElementTree

from planner.plans import (
    CATEGORIES,
    Pipeline,
    Plan,
    Stage,
    StageMemory,
    grouped,
    inclusive,
    number,
    places,
    seconds,
    size,
    spans,
    table,
    wrapped,
)

if TYPE_CHECKING:
    import pandas

    from planner.cluster import Cluster
    from planner.profile import ModelProfile
    from planner.simulate import Lane, Timeline

# What a notebook keeps per cell must stay below 50 kB, 3 kB of it style: bytes that the parts may grow to.
ALL_BYTES = 45_000
STAGE_BYTES = 20_000
DETAIL_BYTES = 4_000
NOTE_BYTES = 4_000
RANK_BYTES = 36_000
NAME_LENGTH = 60  # characters of a name that are shown
GANTT_LANES = 12
BAR = 190  # pixels of a full bar

# Okabe and Ito's hues, which colour-blind readers tell apart, at a luminance between white and a dark page (#1e1e1e).
TIME_COLOURS = {"forward": "#3d98d0", "backward": "#c98600", "recompute": "#d55e00", "transfer": "#868686"}
MEMORY_COLOURS = {
    "weights": "#0072b2",
    "gradients": "#3d98d0",
    "optimizer": "#009e73",
    "activations": "#c98600",
    "logits": "#a3961c",
    "workspace": "#cc79a7",
    "sync_buffer": "#d55e00",
    "context": "#868686",
}
ACTION_COLOURS = {
    "F": ("forward", "#3d98d0"),
    "B": ("backward", "#c98600"),
    "I": ("backward for the input", "#a3961c"),
    "W": ("backward for the weights", "#009e73"),
    "UPDATE": ("update", "currentColor"),
    "SEND": ("transfer", "#868686"),
    "REDUCE_GRAD": ("gradient reduction", "#cc79a7"),
}
FREE, MARGIN = 0.10, 0.30  # opacity of the text colour


# Markup.


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def _escaped(text: str) -> str:
    """Text for a page; characters that no page may hold become a replacement mark."""
    if isinstance(text, Markup):
        return text
    return html.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text))


def _joined(parts: Iterable[str | None], between: str = "") -> Markup:
    return Markup(between.join(_escaped(part) for part in parts if part is not None))


def _tag(element: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """One element: ``_`` in attribute names is a dash, one at the end is dropped, None leaves the attribute out."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = _joined(children)
    if inner or element not in ("br", "meta", "path"):
        return Markup(f"<{element}{words}>{inner}</{element}>")
    return Markup(f"<{element}{words}/>")


def _short(name: str) -> str:
    """A name, or its two ends where it is long."""
    if len(name) <= NAME_LENGTH:
        return name
    return name[: NAME_LENGTH - 20] + " ... " + name[-15:]


def _row(cells: Iterable[str], numeric: Iterable[int] = (), head: int | None = None) -> Markup:
    """Table row; cells of `numeric` columns are right-aligned, the one of column `head` names the row."""
    right = set(numeric)
    return _tag(
        "tr",
        *(
            _tag("th", text, scope="row") if c == head else _tag("td", text, class_="n" if c in right else None)
            for c, text in enumerate(cells)
        ),
    )


def _table(header: Sequence[str], rows: Iterable[str], numeric: Iterable[int] = (), label: str | None = None) -> Markup:
    """Table with a header row; `rows` are markup."""
    right = set(numeric)
    names = (_tag("th", name, scope="col", class_="n" if c in right else None) for c, name in enumerate(header))
    body = _tag("tbody", *rows)
    return _tag("div", _tag("table", _tag("thead", _tag("tr", *names)), body, aria_label=label), class_="wide")


def _fitting(rows: Sequence[Markup], budget: float) -> tuple[list[Markup], int]:
    """The first rows that take at most `budget` bytes together, at least one; how many are left out."""
    shown: list[Markup] = []
    for row in rows:
        budget -= len(row.encode())
        if budget < 0 and shown:
            break
        shown.append(row)
    return shown, len(rows) - len(shown)


def _percent(share: float, digits: int = 1) -> str:
    return f"{share:.{digits}%}"


def _style(rules: Mapping[str, str], scope: str) -> Markup:
    """Style sheet whose rules hold inside `scope` only; naming it twice outweighs a notebook's own rules for tables."""
    lines = []
    for selectors, declarations in rules.items():
        scoped = ",".join(f"{scope}{scope} {each}".rstrip() for each in selectors.split(","))
        lines.append(f"{scoped}{{{declarations}}}")
    return Markup("<style>" + "".join(lines) + "</style>")


STYLE = {
    "": 'font:13px/1.45 var(--jp-content-font-family,system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif);'
    "max-width:1080px",
    "p": "margin:.4em 0",
    "ul": "margin:.4em 0;padding-left:1.2em",
    "dl": "display:flex;flex-wrap:wrap;gap:.3em 1.8em;margin:.5em 0",
    "dl div": "margin:0",
    "dt": "font-size:11px;font-weight:normal;opacity:.75;margin:0",
    "dd": "margin:0;font-size:15px;font-weight:600",
    "dd small": "font-size:11px;font-weight:normal;opacity:.75",
    "small,.q": "font-size:11px;opacity:.75;font-weight:normal",
    "table": "border-collapse:collapse;table-layout:auto;margin:.4em 0;font-size:inherit;color:inherit;border:0;"
    "font-variant-numeric:tabular-nums",
    "thead": "border:0",
    "tr,tbody tr:nth-child(n)": "background:none;border:0;border-top:1px solid rgba(128,128,128,.3)",
    "th,td": "text-align:left;vertical-align:top;padding:.25em 1.2em .25em 0;border:0;max-width:none;"
    "white-space:normal;font-weight:normal;color:inherit",
    "th[scope=row]": "white-space:nowrap",
    "thead th": "font-size:11px;opacity:.75;white-space:nowrap;vertical-align:bottom",
    "tbody th[scope=rowgroup]": "font-weight:600;padding-top:.7em",
    "td.n,th.n": "text-align:right;white-space:nowrap",
    "svg": "display:block;max-width:none;height:10px",
    "td svg": "margin:4px 0 3px",
    ".w .m": "margin-left:0",
    "tr.y,tbody tr.y:nth-child(n)": "border:0",
    ".y td": "padding-top:0",
    ".k": "white-space:nowrap;margin-right:1.1em;font-size:11px",
    ".k svg": "display:inline-block;height:9px;vertical-align:-1px;margin-right:.4em",
    ".m": "border:1px solid currentColor;border-radius:3px;padding:0 .35em;font-size:11px;font-weight:600;"
    "white-space:nowrap;margin-left:.5em",
    "summary": "cursor:pointer;margin:.3em 0",
    ".wide": "overflow-x:auto;max-width:100%",
    ".g": "width:100%",
    ".g td": "padding:0;width:100%",
    ".g svg": "margin:0;height:16px",
    ".g th": "padding:0 1em 0 0;white-space:nowrap;font-size:11px;line-height:16px",
    ".g tr,.g tbody tr:nth-child(n)": "border:0",
}


# Bars.


class Part(NamedTuple):
    """One colour of a bar."""

    name: str
    value: float
    colour: str
    opacity: float | None = None


def _px(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def _bar(parts: Iterable[Part], full: float, title: str) -> Markup:
    """Parts one after another on a track of `full`, as SVG."""
    x, drawn = 0.0, []
    for part in parts:
        width = BAR * min(part.value / full, 1.0) if full else 0.0
        if width >= 0.05:
            opacity = part.opacity and f"{part.opacity:g}"
            drawn.append(_tag("path", d=f"M{_px(x)} 5h{_px(width)}", stroke=part.colour, opacity=opacity))
        x += width
    box = {"viewBox": f"0 0 {BAR} 10", "width": str(BAR), "height": "10", "role": "img"}
    return _tag("svg", _tag("title", title), *drawn, stroke_width=10, **box)


def _key(name: str, colour: str, opacity: float | None = None) -> Markup:
    """Entry of a legend."""
    swatch = _tag("path", d="M0 0h9v9h-9z", fill=colour, opacity=opacity and f"{opacity:g}")
    square = _tag("svg", swatch, width="9", height="9", aria_hidden="true")
    return _joined((_tag("span", square, name, class_="k"), " "))


def _time_parts(stage: Stage) -> list[Part]:
    values = (stage.forward_s, stage.backward_s, stage.recompute_s, stage.transfer_s)
    return [Part(name, value, TIME_COLOURS[name]) for name, value in zip(TIME_COLOURS, values, strict=True)]


def _memory_parts(memory: StageMemory, margin: float) -> list[Part]:
    """Categories, what is free below the limit, and the margin that is left unused: together the capacity."""
    parts = [Part(_category(name), getattr(memory, name), colour) for name, colour in MEMORY_COLOURS.items()]
    free, unused = _left(memory, margin)
    return [*parts, Part("free", free, "currentColor", FREE), Part("margin", unused, "currentColor", MARGIN)]


def _left(memory: StageMemory, margin: float) -> tuple[float, float]:
    """Bytes free below the limit, and bytes of the margin, of which a plan that does not fit uses some."""
    limit = memory.capacity * (1 - margin)
    return max(limit - memory.total, 0.0), max(memory.capacity - max(limit, memory.total), 0.0)


def _category(name: str) -> str:
    return name.replace("_", " ")


def _said(parts: Iterable[Part], write: Callable[[float], str]) -> str:
    return ", ".join(f"{part.name} {write(part.value)}" for part in parts if part.value)


# A plan.


class Group(NamedTuple):
    """Pipelines that differ in their devices only."""

    letter: str
    members: list[int]
    slowest: int  # index of the one whose times stand for all
    pipeline: Pipeline
    alike: list[Pipeline]

    @property
    def name(self) -> str:
        """``2 x A``."""
        return (f"{len(self.members)} x " if len(self.members) > 1 else "") + self.letter


def _groups(plan: Plan) -> list[Group]:
    found = []
    for letter, members in grouped(plan):
        slowest = max(members, key=lambda p: plan.pipelines[p].time_s)
        found.append(Group(letter, members, slowest, plan.pipelines[slowest], [plan.pipelines[p] for p in members]))
    return found


def _slowest(plan: Plan) -> int:
    return max(range(len(plan.pipelines)), key=lambda p: plan.pipelines[p].time_s)


def plan_html(plan: Plan, timeline: Timeline | None = None, cluster: Cluster | None = None) -> str:
    """A plan as a fragment for notebooks: no script, nothing fetched, under 50 kB, readable in light and dark.

    Parameters
    ----------
    timeline
        The plan as `planner.simulate` played it; gives a small Gantt chart.
    cluster
        Gives the cost of an iteration if its device types have prices.
    """
    return _tag("div", _style(STYLE, ".hpp-plan"), *_plan_parts(plan, timeline, cluster), class_="hpp-plan")


def _plan_parts(plan: Plan, timeline: Timeline | None, cluster: Cluster | None) -> list[Markup]:
    """What a notebook shows; the Gantt chart gets the bytes that the rest leaves."""
    name = _tag("p", _tag("strong", _short(plan.profile_name)), " on ", _tag("strong", _short(plan.cluster_name)))
    above = [name, *_tiles(plan, timeline, cluster), _stage_table(plan, STAGE_BYTES), _legend(plan)]
    below = [
        _notes(plan, NOTE_BYTES),
        _folded("Share of the batch", _share_table(plan, DETAIL_BYTES)),
        _folded("Network", *_network(plan, DETAIL_BYTES)),
        _folded("Where the numbers come from", _provenance(plan)),
    ]
    if timeline is not None:
        used = sum(len(part.encode()) for part in (*above, *below))
        above.append(_gantt(plan, timeline, ALL_BYTES - used))
    return above + below


def _folded(summary: str, *body: str) -> Markup:
    return _tag("details", _tag("summary", summary), *body)


def _tiles(plan: Plan, timeline: Timeline | None, cluster: Cluster | None) -> Iterator[Markup]:
    """The figures a person looks for first, and the terms of the iteration."""
    tiles = (_tag("div", _tag("dt", name), _tag("dd", figure)) for name, figure in _figures(plan, timeline, cluster))
    yield _tag("dl", *tiles)
    predicted = plan.predicted
    terms = [f"slowest pipeline {seconds(predicted.pipeline_s)}"]
    terms += [f"exposed gradient sync {seconds(predicted.sync_s)}"] if predicted.sync_s else []
    terms += [f"update {seconds(predicted.update_s)}"] if predicted.update_s else []
    yield _tag("p", f"{seconds(predicted.iteration_s)} = " + " + ".join(terms))


def _figures(plan: Plan, timeline: Timeline | None, cluster: Cluster | None) -> Iterator[tuple[str, str]]:
    """Name and figure of every tile."""
    predicted = plan.predicted
    yield "iteration", seconds(predicted.iteration_s)
    simulated = simulated_s(plan, timeline)
    if simulated is not None:
        off = f"({simulated / predicted.iteration_s - 1:+.1%})"
        yield "simulated", _joined((seconds(simulated), " ", _tag("small", off)))
    if plan.lower_bound_s:
        bound = _tag("small", f"above {seconds(plan.lower_bound_s)}" + ("" if plan.proved else ", search cut short"))
        yield "gap to the lower bound", _joined((_percent(plan.gap, 2), " ", bound))
    yield _throughput(plan)
    if predicted.model_flops_utilization is not None:
        yield "MFU", _percent(predicted.model_flops_utilization)
    yield "bubble", _percent(predicted.bubble_fraction)
    yield "devices", f"{len(plan.devices)} of {_given(plan)}"
    cost = iteration_cost(plan, cluster) if cluster is not None else None
    if cost is not None:
        yield "cost per iteration", _cost(plan, *cost)


def _cost(plan: Plan, used: float, every: float) -> str:
    """Price of the devices in use; what the idle ones add, and the price of a million tokens."""
    words = [f"{_money(every)} with idle devices"] if every > used else []
    if plan.predicted.tokens_per_s:
        tokens = plan.predicted.tokens_per_s * plan.predicted.iteration_s
        words.append(f"{_money(1e6 * used / tokens)} per million tokens")
    return _joined((_money(used), *((" ", _tag("small", "(" + "; ".join(words) + ")")) if words else ())))


def _money(value: float) -> str:
    """Four significant digits, at least two after the point; the unit is that of the prices."""
    return f"{value:,.{max(2, 3 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _throughput(plan: Plan) -> tuple[str, str]:
    if plan.predicted.tokens_per_s is not None:
        return "tokens/s", f"{plan.predicted.tokens_per_s:,.0f}"
    return "samples/s", f"{plan.predicted.samples_per_s:,.4g}"


def _given(plan: Plan) -> int:
    return len(plan.devices) + len(plan.idle_devices)


def simulated_s(plan: Plan, timeline: Timeline | None = None) -> float | None:
    """Iteration time of the timeline, else the one the plan carries, if either is known."""
    return timeline.iteration_s if timeline is not None else plan.predicted.simulated_s


def iteration_cost(plan: Plan, cluster: Cluster) -> tuple[float, float] | None:
    """Price of one iteration: of the devices in use, and with the idle ones; None where a price is missing.

    Raises
    ------
    ValueError
        If the plan uses devices that the cluster does not have.
    """
    prices = {each.name: each.price_per_hour for each in cluster.device_types}
    types = [cluster.device(name).type for name in (*plan.devices, *plan.idle_devices)]
    rates = [prices[name] for name in types]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    hours = plan.predicted.iteration_s / 3600
    return hours * math.fsum(known[: len(plan.devices)]), hours * math.fsum(known)


# Its stages.


def _stage_table(plan: Plan, budget: float) -> Markup:
    """Rows of every group of equal pipelines, as many as fit, the slowest pipeline first among those that must."""
    groups, slowest = _groups(plan), _slowest(plan)
    blocks = {group.letter: _stage_block(plan, group, slowest in group.members) for group in groups}
    first = next(group for group in groups if slowest in group.members)
    shown: dict[str, list[Markup]] = {}
    for group in sorted(groups, key=lambda group: group is not first):
        title, *rows = blocks[group.letter]
        need = sum(len(row.encode()) for row in (title, *rows))
        if need > budget and shown:
            break
        kept = _chosen(group.pipeline, rows, budget)
        shown[group.letter] = [title, *kept]
        budget -= need
    bodies = [_tag("tbody", *shown[group.letter]) for group in groups if group.letter in shown]
    header = ("stage", "layers", "devices", "load of one micro-batch", "compute ms", "transfer ms", "memory per device")
    names = (_tag("th", name, scope="col", class_="n" if c in (0, 4, 5) else None) for c, name in enumerate(header))
    grid = _tag("table", _tag("thead", _tag("tr", *names)), *bodies, aria_label="stages of the plan")
    return _joined((_tag("div", grid, class_="wide"), _left_out(groups, shown)))


def _left_out(groups: Sequence[Group], shown: Mapping[str, Sequence[Markup]]) -> Markup | None:
    hidden = [group for group in groups if group.letter not in shown]
    if not hidden:
        return None
    pipelines = sum(len(group.members) for group in hidden)
    stages = sum(len(group.members) * len(group.pipeline.stages) for group in hidden)
    counts = f"{number(pipelines, 'more pipeline')} with {number(stages, 'stage')}"
    return _tag("p", f"{counts}, none of them slower, not shown here; print(plan) lists all.")


def _chosen(pipeline: Pipeline, rows: Sequence[Markup], budget: float) -> list[Markup]:
    """All rows of a pipeline, or where they are too many the first ones, the bottleneck and the last."""
    sizes = [len(row.encode()) for row in rows]
    if sum(sizes) <= budget:
        return list(rows)
    keep = {pipeline.bottleneck, len(rows) - 1}
    room = budget - sum(sizes[s] for s in keep)
    for s, nbytes in enumerate(sizes):
        if s not in keep:
            room -= nbytes
            if room < 0:
                break
            keep.add(s)
    chosen: list[Markup] = []
    before = -1
    for s in sorted(keep):
        if s > before + 1:
            words = f"{number(s - before - 1, 'stage')} ({spans(range(before + 1, s))}) not shown here"
            chosen.append(_tag("tr", _tag("td"), _tag("td", _tag("small", words), colspan="6")))
        chosen.append(rows[s])
        before = s
    return chosen


def _stage_block(plan: Plan, group: Group, slowest: bool) -> list[Markup]:
    """Title row, then a row per stage."""
    pipeline, batch = group.pipeline, plan.job.global_batch
    copies = len(group.members)
    who = f"{copies} x pipeline {group.letter}, each" if copies > 1 else f"pipeline {group.letter}"
    words = (
        f"{who}: {number(pipeline.num_micro_batches, 'micro-batch')} of {pipeline.micro_batch} = "
        f"{number(pipeline.samples, 'sample')} ({_percent(pipeline.samples / batch)} of the batch) "
        f"in {seconds(pipeline.time_s)}"
    )
    mark = _joined((" ", _tag("span", "slowest", class_="m"))) if slowest and len(plan.pipelines) > copies else None
    title = _tag("tr", _tag("th", words, mark, colspan="7", scope="rowgroup"))
    return [title, *(_stage_row(plan, group, s) for s in range(len(pipeline.stages)))]


def _stage_row(plan: Plan, group: Group, s: int) -> Markup:
    pipeline = group.pipeline
    stage, bottleneck = pipeline.stages[s], pipeline.bottleneck
    times = _time_parts(stage)
    mark = _tag("span", "bottleneck", class_="m") if s == bottleneck and len(pipeline.stages) > 1 else None
    load = _bar(times, pipeline.stages[bottleneck].load_s, _said(times, seconds))
    memory = max((other.stages[s].memory for other in group.alike), key=lambda memory: memory.fraction)
    parts = _memory_parts(memory, plan.job.memory_margin)
    held = f"{size(memory.total)} of {size(memory.capacity)}, {memory.fraction:.0%}"
    fits = None if memory.total <= memory.capacity else _joined((" ", _tag("span", "does not fit", class_="m")))
    again = f"recomputes {len(stage.recompute)}" if stage.recompute else None
    return _tag(
        "tr",
        _tag("td", str(s), class_="n"),
        _tag("td", inclusive(stage.layers), " ", _tag("span", f"({stage.num_layers})", class_="q"), _below(again)),
        _tag("td", _short(_unit(stage)), _below(_short(_where(group, s)))),
        _tag("td", load, mark, class_="w"),
        _tag("td", f"{1e3 * stage.compute_s:,.2f}", class_="n"),
        _tag("td", f"{1e3 * stage.transfer_s:,.2f}", class_="n"),
        _tag("td", _bar(parts, memory.capacity, _said(parts, size)), held, fits, class_="w"),
    )


def _below(text: str | None) -> Markup | None:
    return _joined((_tag("br"), _tag("small", text))) if text else None


def _unit(stage: Stage) -> str:
    return stage.device_type if stage.tp == 1 else f"{stage.device_type} x tp {stage.tp}"


def _where(group: Group, s: int) -> str:
    return places(device for pipeline in group.alike for device in pipeline.stages[s].devices)


def _legend(plan: Plan) -> Markup:
    """Colours of the two bars: those that occur."""
    times = {part.name for stage in plan.stages for part in _time_parts(stage) if part.value}
    held = [name for name in CATEGORIES if any(getattr(stage.memory, name) for stage in plan.stages)]
    time_keys = [_key(name, colour) for name, colour in TIME_COLOURS.items() if name in times]
    memory_keys = [_key(_category(name), MEMORY_COLOURS[name]) for name in held]
    memory_keys += [_key("free", "currentColor", FREE), _key("margin kept free", "currentColor", MARGIN)]
    scale = _tag("small", "(full width: the bottleneck of the pipeline)")
    return _joined(
        (
            _tag("p", "time ", *time_keys, scale),
            _tag("p", "memory per device ", *memory_keys, _tag("small", "(of equal pipelines the fullest)")),
        )
    )


def _notes(plan: Plan, budget: float) -> Markup:
    """Idle devices, warnings and restrictions in words."""
    notes = []
    if plan.idle_devices:
        notes.append(("idle", f"{number(len(plan.idle_devices), 'device')}: {places(plan.idle_devices)}"))
    notes += [("warning", text) for text in plan.warnings]
    notes += [("restricted", text) for text in plan.restrictions]
    items = [_tag("li", _tag("strong", label), " ", text[:400]) for label, text in notes]
    shown, more = _fitting(items, budget)
    return _tag("ul", *shown, _tag("li", f"{more} more") if more else None) if items else Markup()


# Its details.


def _share_table(plan: Plan, budget: float) -> Markup:
    rows = []
    longest = max(pipeline.time_s for pipeline in plan.pipelines)
    for group in _groups(plan):
        pipeline = group.pipeline
        samples = pipeline.samples * len(group.members)
        cells = [
            group.name,
            f"{pipeline.num_micro_batches:,} x {pipeline.micro_batch}",
            f"{samples:,}",
            _percent(samples / plan.job.global_batch),
            seconds(pipeline.time_s),
            seconds(longest - pipeline.time_s),
        ]
        rows.append(_row(cells, range(1, 6), head=0))
    header = ("pipelines", "micro-batches x size", "samples", "of the batch", "time", "waits for the slowest")
    return _cut(header, rows, budget, range(1, 6), "pipeline shape")


def _cut(header: Sequence[str], rows: Sequence[Markup], budget: float, numeric: Iterable[int], noun: str) -> Markup:
    """Table of the rows that fit; says how many do not."""
    shown, more = _fitting(rows, budget)
    said = _tag("p", f"{number(more, f'more {noun}')} not shown here.") if more else None
    return _joined((_table(header, shown, numeric), said))


def _network(plan: Plan, budget: float) -> Iterator[Markup]:
    """Hand-overs between stages, then the blocks of gradient sync."""
    groups = _groups(plan)
    cuts = [
        _row(
            [f"{group.letter}, stage {s} to {s + 1}", size(stage.send_bytes), seconds(stage.send_s)],
            (1, 2),
            head=0,
        )
        for group in groups
        for s, stage in enumerate(group.pipeline.stages[:-1])
        if stage.send_bytes or stage.send_s
    ]
    if cuts:
        yield _cut(("transfer of one micro-batch, one way", "bytes", "time"), cuts, budget / 2, (1, 2), "transfer")
    if len(plan.pipelines) == 1 and not plan.tied_blocks:
        yield _tag("p", "One pipeline: no gradients to sync.")
        return
    how = f"{plan.job.sync}, by {plan.job.sync_granularity}"
    yield _tag("p", f"Gradient sync ({how}): {seconds(plan.predicted.sync_s)} are not hidden behind the backward pass.")
    rows = [
        _row(
            [
                f"{inclusive(block.layers)}",
                _owners(groups, block.owners),
                size(block.gradient_bytes),
                f"{block.num_chunks:,}",
                seconds(block.reduce_s),
            ],
            (2, 3, 4),
            head=0,
        )
        for block in plan.blocks
    ]
    for tied in plan.tied_blocks:
        i, j = tied.layers
        where = f"tied weights, held by {number(len(tied.owners), 'stage')}"
        cells = [f"{i} and {j}", where, size(tied.gradient_bytes), f"{tied.num_chunks:,}", seconds(tied.reduce_s)]
        rows.append(_row(cells, (2, 3, 4), head=0))
    header = ("layers of a block", "owners", "gradients per rank", "all-reduce calls", "alone on its links")
    yield _cut(header, rows, budget, (2, 3, 4), "block")


def _owners(groups: Sequence[Group], owners: Sequence[int], most: int = 6) -> str:
    """``stage 0 of A, 1 of B``: pipelines of a group have the same cuts."""
    words = [f"{owners[group.members[0]]} of {group.letter}" for group in groups[:most]]
    more = f" and {len(groups) - most} more" if len(groups) > most else ""
    return "stage " + ", ".join(words) + more


def _provenance(plan: Plan) -> Markup:
    predicted, made = plan.predicted, plan.provenance
    floor = f"no schedule of these stages with whole backward passes is below {seconds(predicted.floor_s)}"
    rows = [
        ("iteration", "sum of loads + (m - 1) x largest load of the slowest pipeline, then gradient sync and update"),
        ("other forms", f"slowest pipeline as 1F1B with its own idle {seconds(predicted.one_f_one_b_s)}; {floor}"),
        ("bound", f"by this form no plan under the same restrictions is below {seconds(plan.lower_bound_s)}"),
        ("profile", f"{_short(plan.profile_name)}, digest {made.profile}"),
        ("cluster", f"{_short(plan.cluster_name)}, digest {made.cluster}"),
        ("job", f"{_job(plan)}, digest {made.job}"),
        ("made by", ", ".join(f"{_short(name)} {_short(version)}" for name, version in made.versions[:8]) or "unknown"),
        ("more", "hpp explain PLAN --profile PROFILE --cluster CLUSTER shows the origin of each figure"),
    ]
    body = _tag("tbody", *(_row(row, head=0) for row in rows))
    return _tag("table", body)


def _job(plan: Plan) -> str:
    job = plan.job
    state = job.state
    return ", ".join(
        [
            f"global batch {job.global_batch:,}",
            f"{job.precision} precision, {job.optimizer}",
            f"{state.weights} + {state.gradients} + {state.optimizer} bytes per parameter",
            f"memory margin {job.memory_margin:.0%}",
            f"sync {job.sync} by {job.sync_granularity}",
            "recompute allowed" if job.recompute else "no recompute",
        ]
    )


# A small Gantt chart: a table row per lane, so that the names stay text.


def _gantt(plan: Plan, timeline: Timeline, budget: float) -> Markup:
    """Fill, a steady part and drain of one pipeline of each shape, the slowest first."""
    groups = sorted(_groups(plan), key=lambda group: -group.pipeline.time_s)
    every = [(group, lane) for group in groups for lane in timeline.lanes if lane.pipeline == group.slowest]
    lanes = every[:GANTT_LANES]
    windows = _windows([lane for _, lane in lanes], timeline.iteration_s)
    rows = [_lane(group, lane, windows) for group, lane in lanes]
    shown, _ = _fitting(rows, budget)
    kinds = {_shown_kind(event.action.kind) for _, lane in lanes for event in (*lane.events, *lane.reductions)}
    kinds |= {"SEND"} if any(lane.transfers for _, lane in lanes) else set()
    keys = [_key(name, colour) for kind, (name, colour) in ACTION_COLOURS.items() if kind in kinds]
    cut = f"{len(shown)} of {len(timeline.lanes)} lanes" if len(shown) < len(timeline.lanes) else "all lanes"
    cut += ", of equal pipelines one" if len(shown) == len(every) < len(timeline.lanes) else ""
    grid = _tag("table", _tag("tbody", *shown), class_="g", aria_label="Gantt chart")
    return _joined((grid, _tag("p", *keys, _tag("small", f"{cut}; {_span_words(windows)}"))))


def _shown_kind(kind: str) -> str:
    return "SEND" if kind.startswith(("SEND", "RECV")) else str(kind)


def _windows(lanes: Sequence[Lane], end_s: float) -> list[tuple[float, float]]:
    """The whole run, or its beginning and its end where there are more actions than one can tell apart."""
    if not lanes:
        return [(0.0, end_s)]
    depth = max(sum(1 for _ in _leading(lane)) for lane in lanes)
    most = min(max(depth + 6, 12), max(240 // len(lanes), 12))
    longest = [lane.events for lane in lanes if len(lane.events) > 2 * most]
    if not longest:
        return [(0.0, end_s)]
    crowded = [events for events in longest if len(events) > 6 * most]
    head = max(events[most - 1].end_s for events in longest)
    tail = min(events[-most].start_s for events in longest)
    head = min([head, *(events[3 * most - 1].end_s for events in crowded)])
    tail = max([tail, *(events[-3 * most].start_s for events in crowded)])
    return [(0.0, head), (tail, end_s)] if tail > head else [(0.0, end_s)]


def _leading(lane: Lane) -> Iterator[None]:
    """One per forward before the first backward."""
    for event in lane.events:
        if event.action.kind != "F":
            return
        yield


def _span_words(windows: Sequence[tuple[float, float]]) -> str:
    if len(windows) == 1:
        return f"0 to {seconds(windows[0][1])}"
    (_, head), (tail, end) = windows
    return f"0 to {seconds(head)}, break, {seconds(tail)} to {seconds(end)}; what is left out repeats the steady part"


def _lane(group: Group, lane: Lane, windows: Sequence[tuple[float, float]]) -> Markup:
    """A row: compute 10 high, under it transfers and reductions 2 high, each kind one path of horizontal strokes."""
    drawn = []
    for y, height, events in ((5.0, 10, lane.events), (12.0, 2, lane.transfers), (14.5, 2, lane.reductions)):
        kinds = [_shown_kind(event.action.kind) for event in events]
        for kind, (_, colour) in ACTION_COLOURS.items():
            spans_s = [(event.start_s, event.end_s) for event, each in zip(events, kinds) if each == kind]
            path = "".join(f"M{_px(x)} {_px(y)}h{_px(width)}" for x, width in _strokes(spans_s, windows, height == 10))
            if path:
                drawn.append(_tag("path", d=path, stroke=colour, stroke_width=height))
    if len(windows) > 1:
        x = _px(_scale(windows)[1][0] - 6)
        drawn.append(_tag("path", d=f"M{x} 0l3 4l-3 4l3 4l-3 4", fill="none", stroke="currentColor"))
    name = f"{group.letter} {spans(lane.stages)} {_short(lane.device_type)}"
    title = _tag("title", f"pipeline {group.letter} stage {spans(lane.stages)} on {lane.device_type}")
    box = {"viewBox": "0 0 700 16", "width": "100%", "height": "16", "preserveAspectRatio": "none", "role": "img"}
    return _tag("tr", _tag("th", name, scope="row"), _tag("td", _tag("svg", title, *drawn, **box)))


def _scale(windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Left edge and units per second of every window on a width of 700, with 12 for the break."""
    length = sum(end - start for start, end in windows) or 1.0
    unit = (700 - 12 * (len(windows) - 1)) / length
    edges, x = [], 0.0
    for start, end in windows:
        edges.append((x, unit))
        x += (end - start) * unit + 12
    return edges


def _strokes(
    spans_s: Iterable[tuple[float, float]], windows: Sequence[tuple[float, float]], apart: bool
) -> Iterator[tuple[float, float]]:
    """Left edge and width of what lies in a window; neighbours stay apart, or flow together where they touch."""
    spans_s = sorted(spans_s)
    for (start, end), (x, unit) in zip(windows, _scale(windows), strict=True):
        left = right = -1.0
        for a, b in spans_s:
            a, b = x + (max(a, start) - start) * unit, x + (min(b, end) - start) * unit
            if not apart and left >= 0 and a <= right + 0.5:
                right = max(right, b)
                continue
            if right - left >= 0.05:
                yield left, right - left
            left, right = (a, b - 0.4 if apart and b - a > 2 else b) if b - a >= 0.05 else (-1.0, -1.0)
        if right - left >= 0.05:
            yield left, right - left


# Plans side by side.


class Row(NamedTuple):
    """One figure of every plan.

    Parameters
    ----------
    depth
        0 for a figure of its own; a row of depth d + 1 is a part of the row of depth d above it.
    """

    name: str
    depth: int
    values: tuple[float | str | None, ...]
    unit: Literal["s", "share", "count", "rate", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Plans term by term.

    Parameters
    ----------
    names
        As given, or plan 1, plan 2, ...
    shapes
        Pipelines in short, one text per plan.
    best
        Index of the fastest: by the simulation if all were simulated, else by the planning form.
    rows
        Figures; the parts of a sum follow it, one level deeper, and add up to it.
    reasons
        Why each plan is slower than the best, in words; for the best, what decides its time.
    notes
        What makes the comparison doubtful.
    """

    names: tuple[str, ...]
    shapes: tuple[str, ...]
    best: int
    rows: tuple[Row, ...]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    def row(self, name: str) -> Row:
        """The row of this name."""
        return next(row for row in self.rows if row.name == name)

    def differences(self, name: str) -> tuple[float | None, ...]:
        """Value of every plan minus that of the best."""
        values = self.row(name).values
        base = values[self.best]
        return tuple(
            value - base if isinstance(value, (int, float)) and isinstance(base, (int, float)) else None
            for value in values
        )


def compare(
    plans: Sequence[Plan], names: Sequence[str] | None = None, timelines: Sequence[Timeline | None] | None = None
) -> Comparison:
    """Why one plan beats the others, term by term.

    Parameters
    ----------
    names
        One per plan; plan 1, plan 2, ... if None.
    timelines
        The plans as simulated, where known.
    """
    if not plans:
        raise ValueError("plans: none given, expected at least one to compare")
    names = tuple(names) if names is not None else tuple(map(_plan_number, range(len(plans))))
    played = tuple(timelines) if timelines is not None else (None,) * len(plans)
    for what, count in (("names", len(names)), ("timelines", len(played))):
        if count != len(plans):
            raise ValueError(f"{what}: {count} for {len(plans)} plans, expected one per plan")
    simulated = [simulated_s(plan, timeline) for plan, timeline in zip(plans, played, strict=True)]
    figures = [plan.predicted.iteration_s for plan in plans]
    if all(figure is not None for figure in simulated):
        figures = [figure for figure in simulated if figure is not None]
    per_sample = [figure / plan.job.global_batch for plan, figure in zip(plans, figures, strict=True)]
    best = min(range(len(plans)), key=lambda n: (per_sample[n], n))
    rows = tuple(_rows(plans, played))
    return Comparison(
        names=names,
        shapes=tuple(shape(plan) for plan in plans),
        best=best,
        rows=rows,
        reasons=tuple(_reason(plans, names, rows, best, n) for n in range(len(plans))),
        notes=tuple(_doubts(plans, rows)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds that make up an iteration in the planning form; all but `steady_s` add up to it."""

    fill_s: float
    steady_compute_s: float
    steady_transfer_s: float
    sync_s: float
    update_s: float

    @property
    def steady_s(self) -> float:
        """m x load of the bottleneck stage of the slowest pipeline."""
        return self.steady_compute_s + self.steady_transfer_s


#: Terms of the iteration and, of the slowest pipeline, its own.
PARTS = {
    "slowest pipeline": {
        "fill and drain": "fill_s",
        "compute at the bottleneck": "steady_compute_s",
        "transfers at the bottleneck": "steady_transfer_s",
    },
    "exposed gradient sync": {"": "sync_s"},
    "update": {"": "update_s"},
}


def terms(plan: Plan) -> Terms:
    """Terms of the planning form; `fill_s` is what the slowest pipeline takes beyond m x its largest load."""
    pipeline = plan.pipelines[_slowest(plan)]
    m, stage = pipeline.num_micro_batches, pipeline.stages[pipeline.bottleneck]
    return Terms(
        fill_s=plan.predicted.pipeline_s - m * stage.load_s,
        steady_compute_s=m * stage.compute_s,
        steady_transfer_s=m * stage.transfer_s,
        sync_s=plan.predicted.sync_s,
        update_s=plan.predicted.update_s,
    )


def _rows(plans: Sequence[Plan], timelines: Sequence[Timeline | None]) -> Iterator[Row]:
    parts = [terms(plan) for plan in plans]
    predicted = [plan.predicted for plan in plans]
    yield Row("iteration", 0, tuple(each.iteration_s for each in predicted), "s")
    yield Row("slowest pipeline", 1, tuple(each.pipeline_s for each in predicted), "s")
    yield Row("fill and drain", 2, tuple(each.fill_s for each in parts), "s")
    yield Row("steady, m x bottleneck", 2, tuple(each.steady_s for each in parts), "s")
    yield Row("compute", 3, tuple(each.steady_compute_s for each in parts), "s")
    yield Row("transfers", 3, tuple(each.steady_transfer_s for each in parts), "s")
    yield Row("exposed gradient sync", 1, tuple(each.sync_s for each in parts), "s")
    yield Row("update", 1, tuple(each.update_s for each in parts), "s")
    simulated = [simulated_s(plan, timeline) for plan, timeline in zip(plans, timelines, strict=True)]
    if any(figure is not None for figure in simulated):
        yield Row("simulated iteration", 0, tuple(simulated), "s")
    if any(timeline is not None for timeline in timelines):
        idle = tuple(None if each is None else each.bubble_fraction for each in timelines)
        sync = tuple(None if each is None else each.exposed_sync_s for each in timelines)
        yield Row("simulated exposed sync", 0, sync, "s")
        yield Row("simulated bubble", 0, idle, "share")
    yield Row("lower bound", 0, tuple(plan.lower_bound_s or None for plan in plans), "s")
    yield Row("bubble", 0, tuple(each.bubble_fraction for each in predicted), "share")
    yield Row("samples/s", 0, tuple(each.samples_per_s for each in predicted), "rate")
    if any(each.tokens_per_s is not None for each in predicted):
        yield Row("tokens/s", 0, tuple(each.tokens_per_s for each in predicted), "rate")
    if any(each.model_flops_utilization is not None for each in predicted):
        yield Row("MFU", 0, tuple(each.model_flops_utilization for each in predicted), "share")
    yield Row("devices in use", 0, tuple(len(plan.devices) for plan in plans), "count")
    yield Row("idle devices", 0, tuple(len(plan.idle_devices) for plan in plans), "count")
    yield Row("pipelines", 0, tuple(len(plan.pipelines) for plan in plans), "count")
    yield Row("stages", 0, tuple(len(plan.stages) for plan in plans), "count")
    yield Row("fullest device", 0, tuple(max(s.memory.fraction for s in plan.stages) for plan in plans), "share")
    yield Row("bottleneck stage", 0, tuple(_bottleneck(plan) for plan in plans), "text")


def _bottleneck(plan: Plan) -> str:
    """``B stage 1: 13 layers on A100-40, 402.3 ms x 33``."""
    p = _slowest(plan)
    pipeline = plan.pipelines[p]
    letter = next(letter for letter, members in grouped(plan) if p in members)
    s = pipeline.bottleneck
    stage = pipeline.stages[s]
    load = f"{seconds(stage.load_s)} x {pipeline.num_micro_batches:,}"
    return f"{letter} stage {s}: {number(stage.num_layers, 'layer')} on {_short(_unit(stage))}, {load}"


def shape(plan: Plan, most: int = 3) -> str:
    """``8 x (A100-40 9+8 > V100-16 tp 2 9) of 2``: layers per stage, samples per micro-batch."""
    words = []
    for _, members in grouped(plan):
        pipeline = plan.pipelines[members[0]]
        runs: list[tuple[str, list[int]]] = []
        for stage in pipeline.stages:
            name = _short(stage.device_type) + (f" tp {stage.tp}" if stage.tp > 1 else "")
            if not runs or runs[-1][0] != name:
                runs.append((name, []))
            runs[-1][1].append(stage.num_layers)
        chain = " > ".join(f"{name} {_sum_of(counts)}" for name, counts in runs)
        words.append((f"{len(members)} x " if len(members) > 1 else "") + f"({chain}) of {pipeline.micro_batch}")
    return " + ".join(words) if len(words) <= most else " + ".join(words[:most]) + f" + {len(words) - most} more"


def _sum_of(counts: Sequence[int], most: int = 12) -> str:
    text = "+".join(map(str, counts[:most]))
    return text if len(counts) <= most else f"{text}+ ... ({len(counts)} stages)"


def _reason(plans: Sequence[Plan], names: Sequence[str], rows: Sequence[Row], best: int, n: int) -> str:
    plan, winner = plans[n], plans[best]
    if n == best:
        return _decides(plan)
    delta = plan.predicted.iteration_s - winner.predicted.iteration_s
    words = [f"{_signed(delta)} ({delta / winner.predicted.iteration_s:+.2%}) against {names[best]}"]
    simulated = next((row.values for row in rows if row.name == "simulated iteration"), None)
    here, there = (simulated[n], simulated[best]) if simulated is not None else (None, None)
    if isinstance(here, float) and isinstance(there, float):
        words[0] += f", {_signed(here - there)} simulated"
    noise_s = max(0.02 * abs(delta), 1e-4 * winner.predicted.iteration_s)
    moved = sorted(_moved(plan, winner, noise_s), reverse=True)
    lost = [text for value, text in moved if value >= 0]
    won = [text for value, text in reversed(moved) if value < 0]
    words += ["loses by " + ", ".join(lost)] if lost else []
    words += [("but gains by " if lost else "gains by ") + ", ".join(won)] if won else []
    words += [] if moved else [_alike(plan, winner)]
    words += _other_differences(plan, winner)
    return "; ".join(words)


def _moved(plan: Plan, winner: Plan, noise_s: float) -> Iterator[tuple[float, str]]:
    """Change of each term of the iteration by more than `noise_s`, in seconds and in words with that of its parts."""
    mine, base = terms(plan), terms(winner)
    for name, parts in PARTS.items():
        changes = {part: getattr(mine, field) - getattr(base, field) for part, field in parts.items()}
        total = math.fsum(changes.values())
        large = [(value, part) for part, value in changes.items() if part and abs(value) > noise_s]
        if large or abs(total) > noise_s:
            inner = ", ".join(f"{part} {_signed(value)}" for value, part in sorted(large, reverse=True))
            yield total, f"{name} {_signed(total)}" + (f" ({inner})" if inner else "")


def _decides(plan: Plan) -> str:
    """What the time of a plan consists of, largest first."""
    mine, whole = terms(plan), plan.predicted.iteration_s
    parts = [(getattr(mine, field), part or name) for name, inner in PARTS.items() for part, field in inner.items()]
    large = sorted((each for each in parts if each[0] >= 5e-4 * whole), reverse=True)
    shares = ", ".join(f"{text} {_percent(value / whole)}" for value, text in large)
    return f"fastest; its time is {shares}; bottleneck {_bottleneck(plan)}"


def _alike(plan: Plan, winner: Plan) -> str:
    """Why two plans take the same time."""
    if Counter(_shapes(plan)) == Counter(_shapes(winner)):
        return "the same pipelines on other devices"
    return "no term differs by more than a ten-thousandth"


def _shapes(plan: Plan) -> Iterator[object]:
    for pipeline in plan.pipelines:
        stages = tuple((stage.device_type, stage.tp, stage.layers) for stage in pipeline.stages)
        yield pipeline.micro_batch, pipeline.num_micro_batches, stages


def _other_differences(plan: Plan, winner: Plan) -> Iterator[str]:
    """What goes along with a loss of time: another bottleneck, more idle."""
    mine, base = _bottleneck(plan), _bottleneck(winner)
    if mine.partition(" ")[2] != base.partition(" ")[2]:  # the letter of a pipeline means nothing in another plan
        yield f"bottleneck {mine}"
    a, b = plan.predicted.bubble_fraction, winner.predicted.bubble_fraction
    if a - b >= 0.005:
        yield f"bubble grew from {_percent(b)} to {_percent(a)}"
    if len(plan.idle_devices) != len(winner.idle_devices):
        yield f"{number(len(plan.idle_devices), 'device')} idle against {len(winner.idle_devices)}"


def _doubts(plans: Sequence[Plan], rows: Sequence[Row]) -> Iterator[str]:
    """Reasons not to take the comparison at its word."""
    for what in ("profile", "cluster", "job"):
        if len({getattr(plan.provenance, what) for plan in plans}) > 1:
            yield f"the plans were not made for the same {what}"
    batches = {plan.job.global_batch for plan in plans}
    if len(batches) > 1:
        sizes = ", ".join(f"{batch:,}" for batch in sorted(batches))
        yield f"global batches differ ({sizes}): the fastest is the one with the least time per sample"
    simulated = next((row.values for row in rows if row.name == "simulated iteration"), None)
    if simulated is not None and any(value is None for value in simulated):
        yield "not all plans were simulated: the fastest is the one of the planning form"
    elif simulated is not None:
        formula = [plan.predicted.iteration_s / plan.job.global_batch for plan in plans]
        played = [float(value or 0) / plan.job.global_batch for value, plan in zip(simulated, plans, strict=True)]
        if formula.index(min(formula)) != played.index(min(played)):
            yield "planning form and simulation disagree on the fastest; the simulation decides"


def _signed(value_s: float) -> str:
    return ("+" if value_s > 0 else "-" if value_s < 0 else "") + seconds(abs(value_s))


def _value(value: float | str | None, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if unit == "s":
        return seconds(value) if value >= 0 else "-" + seconds(-value)
    if unit == "share":
        return _percent(value)
    return f"{value:,.0f}" if unit == "count" or value >= 1000 else f"{value:,.4g}"


def _difference(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if value == 0 or (unit == "share" and abs(value) < 5e-4):
        return "="
    if unit == "s":
        return _signed(value)
    if unit == "share":
        return f"{100 * value:+.1f} points"
    return f"{value:+,.0f}" if unit == "count" or abs(value) >= 1000 else f"{value:+,.4g}"


def comparison_text(comparison: Comparison) -> str:
    """Fixed-width text for a terminal: the plans, their figures term by term, and why each is slower."""
    return "\n".join(_comparison_lines(comparison))


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    for n, (name, text) in enumerate(zip(comparison.names, comparison.shapes, strict=True)):
        label = _plan_number(n)
        yield from wrapped(label, text if name == label else f"{name}: {text}")
    others = [n for n in range(len(comparison.names)) if n != comparison.best]
    for start in range(0, max(len(others), 1), 3):
        yield ""
        yield from _text_table(comparison, others[start : start + 3])
    yield ""
    for n, reason in enumerate(comparison.reasons):
        yield from wrapped(_plan_number(n), reason)
    for note in comparison.notes:
        yield from wrapped("note", note)


def _plan_number(n: int) -> str:
    return f"plan {n + 1}"


def _text_table(comparison: Comparison, others: Sequence[int]) -> list[str]:
    """The best plan and up to three others, each with its difference to the best."""
    header = ["", f">{_plan_number(comparison.best)}"]
    for n in others:
        header += [f">{_plan_number(n)}", ">difference"]
    rows = []
    for row in comparison.rows:
        if row.unit == "text":
            continue
        differences = comparison.differences(row.name)
        cells = ["  " * row.depth + row.name, _value(row.values[comparison.best], row.unit)]
        for n in others:
            cells += [_value(row.values[n], row.unit), _difference(differences[n], row.unit)]
        rows.append(cells)
    return table(header, rows)


def plans_html(plans: Sequence[Plan], timelines: Sequence[Timeline | None] | None = None) -> str:
    """Plans as a ranked table for notebooks: the difference to the best, and why each of the others lost."""
    return _tag("div", _style(STYLE, ".hpp-plan"), *_ranking(plans, timelines, RANK_BYTES), class_="hpp-plan")


def _ranking(plans: Sequence[Plan], timelines: Sequence[Timeline | None] | None, budget: float) -> Iterator[Markup]:
    comparison = compare(plans, timelines=timelines)
    simulated = next((row.values for row in comparison.rows if row.name == "simulated iteration"), None)
    header = ["rank", "iteration", "to the best", _throughput(plans[0])[0], "devices", "fullest", "pipelines"]
    if simulated is not None:
        header.insert(2, "simulated")
    numeric = range(len(header) - 1)
    decides = simulated if simulated is not None and None not in simulated else comparison.row("iteration").values
    rows = []
    for n, plan in enumerate(plans):
        cells = [
            str(n + 1),
            seconds(plan.predicted.iteration_s),
            *([_value(simulated[n], "s")] if simulated is not None else []),
            "best" if n == comparison.best else _more(decides[n], decides[comparison.best]),
            _throughput(plan)[1],
            f"{len(plan.devices)} of {_given(plan)}",
            _percent(max(stage.memory.fraction for stage in plan.stages), 0),
            comparison.shapes[n],
        ]
        why = _tag("td", _tag("small", comparison.reasons[n]), colspan=len(header) - 1)
        rows.append(_joined((_row(cells, numeric, head=0), _tag("tr", _tag("td"), why, class_="y"))))
    yield _cut(header, rows, budget, numeric, "plan")
    if comparison.notes:
        yield _tag("ul", *(_tag("li", _tag("strong", "note"), " ", note) for note in comparison.notes))


def _more(mine: float | str | None, best: float | str | None) -> str:
    return f"{mine / best - 1:+.2%}" if isinstance(mine, float) and isinstance(best, float) and best else "-"


# Rows.


def stage_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row per stage, units in the names.

    Seconds are per micro-batch, of sync and update per iteration; bytes are per device and add up to its capacity.
    """
    return [_stage_record(plan, p, s) for p, each in enumerate(plan.pipelines) for s in range(len(each.stages))]


def _stage_record(plan: Plan, p: int, s: int) -> dict[str, Any]:
    pipeline = plan.pipelines[p]
    stage = pipeline.stages[s]
    memory = stage.memory
    free = round(_left(memory, plan.job.memory_margin)[0])
    return {
        "pipeline": p,
        "stage": s,
        "first_layer": stage.layers[0],
        "last_layer": stage.layers[1] - 1,
        "num_layers": stage.num_layers,
        "num_recomputed": len(stage.recompute),
        "device_type": stage.device_type,
        "tp": stage.tp,
        "devices": " ".join(stage.devices),
        "micro_batch": pipeline.micro_batch,
        "num_micro_batches": pipeline.num_micro_batches,
        "in_flight": stage.in_flight,
        "bottleneck": s == pipeline.bottleneck,
        "forward_s": stage.forward_s,
        "backward_s": stage.backward_s,
        "recompute_s": stage.recompute_s,
        "compute_s": stage.compute_s,
        "transfer_s": stage.transfer_s,
        "load_s": stage.load_s,
        "send_s": stage.send_s,
        "send_bytes": stage.send_bytes,
        "sync_s": stage.sync_s,
        "update_s": stage.update_s,
        **{f"{name}_bytes": getattr(memory, name) for name in CATEGORIES},
        "total_bytes": memory.total,
        "free_bytes": free,
        "margin_bytes": memory.capacity - memory.total - free,
        "capacity_bytes": memory.capacity,
        "memory_fraction": memory.fraction,
    }


def to_pandas(plan: Plan) -> pandas.DataFrame:
    """`stage_rows` as a data frame.

    Raises
    ------
    ImportError
        Without pandas.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError("to_pandas needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(stage_rows(plan))


# The report.

#: What `report` shows of `pictures`, in this order: title and description. Others follow under their own names.
PICTURES = {
    "gantt": ("Timeline", "Every action of every stage over one iteration"),
    "memory": ("Memory against capacity", "Bytes on each stage by category, against the capacity of its device"),
    "memory_over_time": ("Memory over time", "Bytes in use on each stage while the iteration runs"),
    "devices": ("Device map", "Which device serves which pipeline and stage, and what their links carry"),
}

PAGE_STYLE = {
    "": "color-scheme:light dark;--ink:#1b1b1b;--paper:#fff;--link:#1f5fae;color:var(--ink);background:var(--paper);"
    'max-width:1120px;margin:0 auto;padding:1em 1.2em 4em;font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,'
    "Arial,sans-serif",
    "h1": "font-size:22px;line-height:1.25;margin:.6em 0 .2em",
    "h2": "font-size:17px;margin:2em 0 .4em;border-bottom:1px solid rgba(128,128,128,.5);padding-bottom:.15em",
    "h3": "font-size:14px;margin:1.4em 0 .3em",
    "a": "color:var(--link)",
    "nav ol": "columns:2;margin:.4em 0;padding-left:1.6em;max-width:44em",
    "figure": "margin:1em 0;break-inside:avoid",
    "figure svg": "width:100%;height:auto;background:#fff;color:#1b1b1b;border-radius:4px",
    "figcaption": "font-size:12px;opacity:.8;margin-top:.3em",
    "tr,li": "break-inside:avoid",
    "dl.words": "display:grid;grid-template-columns:max-content 1fr;gap:.3em 1.2em",
    "dl.words dt": "font-weight:600;font-size:13px;opacity:1",
    "dl.words dd": "font-size:13px;font-weight:normal",
}
PAGE_MEDIA = (
    "@page{size:A4 landscape;margin:12mm}"
    "@media (prefers-color-scheme:dark){.hpp-page.hpp-page{--ink:#e6e6e6;--paper:#161616;--link:#8ab8f0}}"
    "@media print{.hpp-page.hpp-page{--ink:#000;--paper:#fff;--link:#000;max-width:none;padding:0}"
    ".hpp-plan.hpp-plan.hpp-plan{font-size:11px;max-width:none}"
    ".hpp-plan.hpp-plan.hpp-plan .wide{overflow:visible}"
    ".hpp-plan.hpp-plan.hpp-plan td,.hpp-plan.hpp-plan.hpp-plan th{padding-right:.8em}"
    ".hpp-page.hpp-page nav{display:none}"
    ".hpp-page details::details-content{content-visibility:visible;display:block}}"
)

WORDS = {
    "pipeline": "stages that hold the whole model; the pipelines share the global batch and sum their gradients",
    "stage": "contiguous layers on the devices of one kind; x tp n: n devices share each layer",
    "bottleneck": "the stage with the largest load (compute + transfer of one micro-batch): it sets the pace",
    "fill and drain": "time of a pipeline beyond m micro-batches at its bottleneck: until the last stage has work, and "
    "until the first has its last gradient",
    "bubble": "share of the time of the devices in use that they are idle; the planning form counts transfers as work, "
    "the simulation forward and backward alone",
    "exposed sync": "gradient all-reduce that the backward pass does not hide",
    "lower bound": "by the planning form no plan under the same restrictions is faster; the gap says how far from "
    "optimal this one can be",
    "MFU": "FLOP of the model, without recompute, over peak FLOP of the devices in use",
    "margin": "part of each device's memory that the plan leaves alone, by the job",
}


def report(
    plans: Sequence[Plan],
    timelines: Sequence[Timeline | None] | None = None,
    cluster: Cluster | None = None,
    profile: ModelProfile | None = None,
    pictures: Mapping[str, str] | None = None,
) -> str:
    """A page of its own for the first plan and its runners-up; nothing is fetched, nothing runs.

    Parameters
    ----------
    plans
        Ranked, the one the page is about first.
    timelines
        The plans as simulated, None where one was not.
    cluster, profile
        What the plans were made for: prices, and what the section on the inputs says.
    pictures
        SVG text by name, of the first plan: gantt, memory, memory_over_time, devices.
    """
    if not plans:
        raise ValueError("plans: none given, expected the plan to report on")
    played = tuple(timelines) if timelines is not None else (None,) * len(plans)
    title = f"{_short(plans[0].profile_name)} on {_short(plans[0].cluster_name)}"
    sections = [each for each in _sections(plans, played, cluster, profile, pictures or {}) if each[2]]
    links = (_tag("li", _tag("a", name, href=f"#{anchor}")) for anchor, name, _ in sections)
    contents = _tag("nav", _tag("ol", *links), aria_label="contents")
    body = [
        _tag("section", _tag("h2", name, id=f"{anchor}-title"), *parts, id=anchor, aria_labelledby=f"{anchor}-title")
        for anchor, name, parts in sections
    ]
    head = _tag(
        "head",
        _tag("meta", charset="utf-8"),
        _tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _tag("meta", name="color-scheme", content="light dark"),
        _tag("title", f"{title}: training plan"),
        _style(STYLE, ".hpp-plan"),
        _style(PAGE_STYLE, ".hpp-page"),
        Markup(f"<style>{PAGE_MEDIA}</style>"),
    )
    main = _tag("main", _tag("h1", title), contents, *body, class_="hpp-plan")
    return "<!DOCTYPE html>\n" + _tag("html", head, _tag("body", main, class_="hpp-page"), lang="en") + "\n"


def _sections(
    plans: Sequence[Plan],
    timelines: Sequence[Timeline | None],
    cluster: Cluster | None,
    profile: ModelProfile | None,
    pictures: Mapping[str, str],
) -> Iterator[tuple[str, str, list[Markup]]]:
    """Anchor, title and content of each section; empty ones are dropped."""
    plan, timeline, whole = plans[0], timelines[0], math.inf
    yield "summary", "Summary", [*_tiles(plan, timeline, cluster), _notes(plan, whole)]
    yield "stages", "Stages", [_stage_table(plan, whole), _legend(plan)]
    for key in (*PICTURES, *(key for key in pictures if key not in PICTURES)):
        if key in pictures:
            title, described = PICTURES.get(key, (key.replace("_", " ").capitalize(), key.replace("_", " ")))
            yield f"picture-{_anchor(key)}", title, [_figure(key, pictures[key], described)]
        elif key == "gantt" and timeline is not None:
            yield "timeline", "Timeline", [_gantt(plan, timeline, whole)]
    yield "idle", "Idle time", [_idle_table(plan, timeline)] if timeline is not None else []
    yield "memory", "Memory by category", [_memory_table(plan)]
    yield "batch", "Share of the batch", [_share_table(plan, whole)]
    yield "network", "Network", list(_network(plan, whole))
    if len(plans) > 1:
        yield "runners-up", "Runners-up", _runners_up(plans, timelines)
    yield "inputs", "Inputs and origin of the numbers", list(_inputs(plan, cluster, profile))
    words = (part for term, meaning in WORDS.items() for part in (_tag("dt", term), _tag("dd", meaning)))
    yield "words", "Words", [_tag("dl", *words, class_="words")]


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "other"


REASONS = {
    "warm_up_s": "before the first action",
    "activation_s": "awaits activations",
    "gradient_s": "awaits gradients",
    "transfer_s": "a transfer blocks",
    "peers_s": "awaits other pipelines",
    "sync_s": "gradient sync",
    "end_s": "done before others",
}


def _idle_table(plan: Plan, timeline: Timeline) -> Markup:
    """Seconds each lane is busy, and idle by reason, of one pipeline of each shape; reasons that occur."""
    groups = {group.slowest: group for group in _groups(plan)}
    lanes = [lane for lane in timeline.lanes if lane.pipeline in groups]
    reasons = {name: text for name, text in REASONS.items() if any(getattr(lane.idle, name) > 0 for lane in lanes)}
    rows = []
    for lane in lanes:
        name = f"{groups[lane.pipeline].name}, stage {spans(lane.stages)} on {_short(lane.device_type)}"
        cells = [name, seconds(lane.busy_s), *(seconds(getattr(lane.idle, reason)) for reason in reasons)]
        rows.append(_row(cells, range(1, len(cells)), head=0))
    return _table(("stage", "busy", *reasons.values()), rows, range(1, len(reasons) + 2))


def _memory_table(plan: Plan) -> Markup:
    """GiB of every category, of the fullest of equal pipelines."""
    rows = []
    for group in _groups(plan):
        for s, stage in enumerate(group.pipeline.stages):
            memory = max((other.stages[s].memory for other in group.alike), key=lambda memory: memory.fraction)
            parts = _memory_parts(memory, plan.job.memory_margin)
            figures = [size(part.value) if part.value else "-" for part in parts]
            name = f"{group.letter}, stage {s} on {_short(_unit(stage))}"
            cells = [name, str(stage.in_flight), *figures, size(memory.capacity)]
            rows.append(_row(cells, range(1, len(cells)), head=0))
    names = ("stage", "in flight", *map(_category, CATEGORIES), "free", "margin", "capacity")
    return _table(names, rows, range(1, len(names)))


def _runners_up(plans: Sequence[Plan], timelines: Sequence[Timeline | None]) -> list[Markup]:
    comparison = compare(plans, timelines=timelines)
    parts = [*_ranking(plans, timelines, math.inf), _tag("h3", "Term by term"), _comparison_table(comparison)]
    for n, plan in enumerate(plans[1:], 2):
        parts.append(_folded(f"Stages of plan {n}", _stage_table(plan, 10 * STAGE_BYTES)))
    return parts


def _comparison_table(comparison: Comparison) -> Markup:
    """Figures of every plan, each with its difference to the best."""
    others = [n for n in range(len(comparison.names)) if n != comparison.best]
    header = ["", comparison.names[comparison.best]]
    for n in others:
        header += [comparison.names[n], "difference"]
    rows = []
    for row in comparison.rows:
        if row.unit == "text":
            continue
        differences = comparison.differences(row.name)
        indent = f"padding-left:{1.2 * row.depth:.1f}em;white-space:nowrap"
        cells: list[str] = [_tag("span", row.name, style=indent), _value(row.values[comparison.best], row.unit)]
        for n in others:
            cells += [_value(row.values[n], row.unit), _difference(differences[n], row.unit)]
        rows.append(_row(cells, range(1, len(cells)), head=0))
    return _table(header, rows, range(1, len(header)))


def _inputs(plan: Plan, cluster: Cluster | None, profile: ModelProfile | None) -> Iterator[Markup]:
    yield _provenance(plan)
    if profile is not None:
        conditions = profile.conditions
        yield _tag("h3", "Profile")
        sequence = "" if conditions.sequence_length is None else f", sequence length {conditions.sequence_length:,}"
        words = f"{number(profile.num_layers, 'layer')}, {profile.parameters / 1e6:,.1f} M parameters{sequence}"
        source = (
            f"measured with {conditions.dtype}, {conditions.timer}, date {conditions.date}; source {conditions.source}"
        )
        yield _tag("p", f"{words}; {source}.")
        yield _tag("ul", *(_tag("li", note) for note in (*conditions.notes, *profile.warnings)))
    if cluster is not None:
        yield _tag("h3", "Cluster")
        rows = [
            _row(
                [
                    _short(each.name),
                    str(cluster.num_devices(each.name)),
                    size(each.memory_bytes),
                    "-" if each.peak_flops_per_s is None else f"{each.peak_flops_per_s / 1e12:,.0f} TFLOP/s",
                    "-" if each.price_per_hour is None else _money(each.price_per_hour),
                ],
                range(1, 5),
                head=0,
            )
            for each in cluster.device_types
        ]
        yield _table(("device type", "count", "memory", "peak", "price per hour"), rows, range(1, 5))
        yield _tag("ul", *(_tag("li", note) for note in cluster.notes))


# Pictures of others: only what draws is taken over.

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"
DRAWING = re.compile(
    "svg|g|path|rect|circle|ellipse|line|polyline|polygon|text|tspan|defs|use|clipPath|mask|marker|pattern|symbol|title|"
    "desc|linearGradient|radialGradient|stop|image"
)


def _figure(key: str, text: str, described: str) -> Markup:
    """An SVG picture with its description; its ids get the name of the picture, so that two can share a page."""
    if "<!ENTITY" in text:
        raise ValueError(f"pictures: {key}: SVG with entities, expected a plain drawing")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"pictures: {key}: not SVG: {error}") from None
    if root.tag not in (SVG + "svg", "svg"):
        raise ValueError(f"pictures: {key}: the outermost element is {root.tag!r}, expected svg")
    if "viewBox" not in root.attrib and {"width", "height"} <= set(root.attrib):
        sides = (re.sub(r"[a-z%]+$", "", root.attrib[name]) for name in ("width", "height"))
        root.set("viewBox", " ".join(("0 0", *sides)))
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": described, "stroke-linejoin": "round"}
    return _tag("figure", _drawn(root, _anchor(key) + "-"), _tag("figcaption", described + "."))


def _drawn(element: ElementTree.Element, prefix: str) -> Markup | None:
    """An element and what is in it as HTML, or None for one that does not draw."""
    name = element.tag.removeprefix(SVG) if isinstance(element.tag, str) else ""
    if not DRAWING.fullmatch(name):
        return None
    words = []
    for key, value in element.attrib.items():
        kept = _attribute(key.removeprefix(XLINK), value, prefix)
        if kept is not None:
            words.append(f' {key.removeprefix(XLINK)}="{_escaped(kept)}"')
    inner: list[str | None] = [element.text if (element.text or "").strip() else None]
    for child in element:
        inner += [_drawn(child, prefix), child.tail if (child.tail or "").strip() else None]
    return Markup(f"<{name}{''.join(words)}>{_joined(inner)}</{name}>")


def _attribute(key: str, value: str, prefix: str) -> str | None:
    """The value with ids renamed; None for an attribute that could run or fetch something."""
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z-]*\d?", key) or key.startswith("on") or key == "class":
        return None
    if key == "id":
        return prefix + value
    if key == "href":
        inside = value.startswith("#")
        return f"#{prefix}{value[1:]}" if inside else (value if value.startswith("data:image/png") else None)
    renamed = re.sub(r"url\(\s*['\"]?#([^'\")]+)['\"]?\s*\)", rf"url(#{prefix}\1)", value)
    if re.search(r"url\((?!#)|@import|expression|javascript:", renamed, re.IGNORECASE):
        return None
    return renamed
