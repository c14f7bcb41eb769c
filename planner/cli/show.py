"""``hpp inspect`` and ``hpp explain``: what is in a file, and where each figure of a plan comes from."""

from __future__ import annotations

import argparse
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from planner import files
from planner.cluster import Cluster
from planner.job import Job
from planner.plans import (
    CATEGORIES,
    WIDTH,
    Audit,
    HandOver,
    Plan,
    grouped,
    inclusive,
    places,
    seconds,
    size,
    spans,
    table,
    wrapped,
)
from planner.profile import ModelProfile

if TYPE_CHECKING:
    from planner.cluster import Device, Link, Node
    from planner.profile import LayerKind

MESSAGE_BYTES = float(64 << 20)  # at which links are compared
LINES_OF_HOLES = 12
RATE_COLUMNS = ("device", ">tp", ">size", ">forward ms", ">backward ms")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands."""
    inspect = commands.add_parser("inspect", help="say what is in a profile, a cluster or a plan")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("file", metavar="FILE")
    inspect.add_argument("--cluster", metavar="CLUSTER", help="peak FLOP/s to hold a profile's times against")
    inspect.add_argument("--json", action="store_true", help="print the file in canonical JSON")

    explain = commands.add_parser("explain", help="show where each figure of a plan comes from")
    explain.set_defaults(run=_explain)
    explain.add_argument("plan", metavar="PLAN")
    explain.add_argument("--profile", required=True, metavar="PROFILE")
    explain.add_argument("--cluster", required=True, metavar="CLUSTER")
    explain.add_argument("--framework", metavar="NAME", help="that the plan was made for")
    explain.add_argument("--all", action="store_true", help="every pipeline, not one of each group of equal ones")


# hpp inspect


def _inspect(options: argparse.Namespace) -> int:
    data = files.read(options.file)
    schema = data.get("schema")
    if schema == "hpp-profile/1":
        profile = ModelProfile.from_dict(data, where=options.file)
        cluster = Cluster.load(options.cluster) if options.cluster is not None else None
        value: ModelProfile | Cluster | Plan | Job = profile
        lines = _profile_lines(profile, cluster)
    elif schema == "hpp-cluster/1":
        value = cluster = Cluster.from_dict(data, where=options.file)
        lines = _cluster_lines(cluster)
    elif schema == "hpp-plan/1":
        value = Plan.from_dict(data, where=options.file)
        lines = iter(str(value).splitlines())
    elif schema == "hpp-job/1":
        value = Job.from_dict(data, where=options.file)
        lines = iter(files.dumps(value.to_dict()).splitlines())
    else:
        known = "hpp-profile/1, hpp-cluster/1, hpp-job/1, hpp-plan/1"
        raise ValueError(f"{options.file}: schema {schema!r} is not among {known}")
    if options.json:
        print(files.dumps(value.to_dict()), end="")
    else:
        print("\n".join(lines))
    return 0


def _profile_lines(profile: ModelProfile, cluster: Cluster | None) -> Iterator[str]:
    heads = [
        f"{count} {what}"
        for count, what in ((profile.num_heads, "heads"), (profile.num_kv_heads, "kv heads"))
        if count is not None
    ]
    size = f"{profile.parameters / 1e6:,.1f} M parameters"
    yield ", ".join([f"{profile.name}: {profile.num_layers} layers", size, *heads])
    yield from wrapped("measured", _conditions(profile))
    for note in profile.conditions.notes:
        yield from wrapped("note", note)
    yield ""
    yield "Layers by kind"
    yield from _kind_table(profile)
    yield ""
    yield "Micro-batch sizes measured"
    yield from _coverage_table(profile)
    yield ""
    yield "Time of the whole model per sample at the largest size, and the rate per device it implies"
    yield from _rate_table(profile, cluster)
    holes = profile.holes()
    if holes:
        yield ""
        yield f"Holes: {len(holes)}"
        for hole in holes[:LINES_OF_HOLES]:
            yield f"  {hole}"
        if len(holes) > LINES_OF_HOLES:
            yield f"  and {len(holes) - LINES_OF_HOLES} more"
    warnings = list(profile.warnings)
    if cluster is not None:
        from planner.profile import sanity

        warnings += [text for text in sanity(profile, cluster) if text not in warnings]
    if warnings:
        yield ""
        for text in warnings:
            yield from wrapped("warning", text)


def _conditions(profile: ModelProfile) -> str:
    conditions = profile.conditions
    tf32 = {True: "on", False: "off", None: "unknown"}[conditions.tf32]
    sequence = "unknown" if conditions.sequence_length is None else f"{conditions.sequence_length:,}"
    return ", ".join(
        [
            f"dtype {conditions.dtype}",
            f"tf32 {tf32}",
            f"attention {conditions.attention}",
            f"sequence {sequence}",
            f"tp communication {conditions.tp_communication} the times",
            f"update time per {conditions.update_per}",
            f"timer {conditions.timer}",
            f"date {conditions.date}",
            f"source {conditions.source}",
        ]
    )


def _kind_table(profile: ModelProfile) -> list[str]:
    rows = []
    for kind in profile.kinds:
        positions = [l for l, name in enumerate(profile.layers) if name == kind.name]
        marks = [] if kind.recomputable else ["not recomputable"]
        marks += [] if kind.trainable else ["not trainable"]
        if kind.tied_to is not None:
            marks.append(f"{kind.tied_parameters / 1e6:,.1f} M tied to {kind.tied_to}")
        rows.append(
            [
                kind.name,
                spans(positions) or "-",
                str(len(positions)),
                f"{kind.parameters / 1e6:,.2f} M" if kind.parameters >= 1e5 else f"{kind.parameters:,}",
                size(kind.output_bytes),
                size(kind.logits_bytes) if kind.logits_bytes else "-",
                ", ".join(marks),
            ]
        )
    return _trimmed(["kind", "layers", ">n", ">parameters", ">output/sample", ">logits/sample", ""], rows)


def _trimmed(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table without columns that say nothing in any row."""
    used = [c for c in range(len(header)) if any(row[c] not in ("", "-") for row in rows)]
    return table([header[c] for c in used], [[row[c] for c in used] for row in rows])


def _coverage_table(profile: ModelProfile) -> list[str]:
    measured: dict[tuple[str, int], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for cell in profile.cells:
        measured[cell.device_type, cell.tp][cell.kind].add(cell.micro_batch)
    kinds = [kind.name for kind in profile.kinds if kind.name in profile.layers]
    rows = []
    for (device_type, tp), by_kind in sorted(measured.items()):
        every = set.union(*by_kind.values())
        complete = profile.micro_batches(device_type, tp)
        gaps = [f"{name} at {_listed(every - by_kind[name])}" for name in kinds if every - by_kind[name]]
        rule = "" if profile.tp_allowed(tp) else "tp does not divide the heads"
        lacks = "missing: " + ", ".join(gaps) if gaps else ""
        rows.append([device_type, str(tp), _listed(complete) or "none", "; ".join(filter(None, (lacks, rule)))])
    return _trimmed(["device", ">tp", "every kind", ""], rows)


def _listed(numbers: Iterable[int]) -> str:
    return " ".join(str(number) for number in sorted(numbers))


def _rate_table(profile: ModelProfile, cluster: Cluster | None) -> list[str]:
    peaks = {d.name: d.peak_flops_per_s for d in cluster.device_types} if cluster is not None else {}
    kind, tokens = _largest_kind(profile), profile.conditions.sequence_length
    times = {(cell.device_type, cell.tp, cell.micro_batch, cell.kind): cell for cell in profile.cells}
    rows = []
    for device_type, tp in sorted({(cell.device_type, cell.tp) for cell in profile.cells}):
        sizes = profile.micro_batches(device_type, tp)
        if not sizes:
            continue
        b = sizes[-1]
        cells = [times[device_type, tp, b, name] for name in profile.layers]
        forward, backward = sum(cell.forward_s for cell in cells), sum(cell.backward_s for cell in cells)
        row = [device_type, str(tp), str(b), f"{1e3 * forward / b:,.2f}", f"{1e3 * backward / b:,.2f}"]
        cell = times[device_type, tp, b, kind.name]
        if tokens is not None and cell.forward_s > 0 and cell.backward_s > 0:
            work = kind.parameters * tokens * b / tp
            rates = 2 * work / cell.forward_s, 4 * work / cell.backward_s
            peak = peaks.get(device_type)
            shares = f"{rates[0] / peak:.0%}, {rates[1] / peak:.0%} of peak" if peak else ""
            row += [*(f"{rate / 1e12:,.1f}" for rate in rates), shares]
        rows.append(row + [""] * (8 - len(row)))
    if not any(row[5] for row in rows):
        why = "  the sequence length is unknown, so no FLOP/s" if tokens is None else ""
        return [*table([*RATE_COLUMNS], [row[:5] for row in rows]), *filter(None, [why])]
    return _trimmed([*RATE_COLUMNS, f">{kind.name} forward TFLOP/s", ">backward", ""], rows)


def _largest_kind(profile: ModelProfile) -> LayerKind:
    weight = {kind.name: kind.parameters * profile.layers.count(kind.name) for kind in profile.kinds}
    return max(profile.kinds, key=lambda kind: weight[kind.name])


def _cluster_lines(cluster: Cluster) -> Iterator[str]:
    nodes, devices = len(cluster.nodes), len(cluster.devices)
    yield f"{cluster.name}: {nodes} node{'s' * (nodes != 1)}, {devices} device{'s' * (devices != 1)}"
    rows = []
    for device_type in cluster.device_types:
        count, peak = cluster.num_devices(device_type.name), device_type.peak_flops_per_s
        price, watts = device_type.price_per_hour, device_type.watts
        rows.append(
            [
                device_type.name,
                str(count),
                size(device_type.memory_bytes),
                "-" if peak is None else f"{peak / 1e12:,.0f} TFLOP/s",
                "-" if price is None else f"{price:,.2f}",
                "-" if watts is None else f"{watts:,.0f} W",
            ]
        )
    yield ""
    yield from _trimmed(["device", ">count", ">memory", ">peak", ">price/hour", ">power"], rows)
    classes = _node_classes(cluster)
    yield ""
    yield "Nodes; links as GB/s at 64 MiB and alpha in us"
    rows = [
        [
            f"{letter}",
            places(node.name for node in members),
            _contents(members[0]),
            members[0].island or "-",
            "-" if members[0].link is None else _figure(members[0].link),
            _groups(members[0]),
        ]
        for letter, members in classes
    ]
    yield from _trimmed(["", "nodes", "devices", "island", ">inside", "fast groups"], rows)
    if len(cluster.nodes) > 1:
        yield ""
        yield "Links between nodes, one device at each end"
        yield from _link_matrix(cluster, classes)
    if cluster.notes:
        yield ""
        for note in cluster.notes:
            yield from wrapped("note", note)


def _node_classes(cluster: Cluster) -> list[tuple[str, list[Node]]]:
    """Nodes that look the same and have the same links to all others, with a letter each."""
    named = {end for link in cluster.links for end in link.between}
    alike: dict[object, list[Node]] = defaultdict(list)
    for node in cluster.nodes:
        by_name = node.name if node.name in named else None
        alike[node.devices, node.link, node.groups, node.group_link, node.island, by_name].append(node)
    return [(chr(ord("a") + n) if n < 26 else str(n), members) for n, members in enumerate(alike.values())]


def _contents(node: Node) -> str:
    runs = dict.fromkeys(node.devices, 0)
    for device_type in node.devices:
        runs[device_type] += 1
    return ", ".join(f"{count} x {device_type}" for device_type, count in runs.items())


def _groups(node: Node) -> str:
    if not node.groups or node.group_link is None:
        return ""
    return " ".join(spans(group) for group in node.groups) + f" at {_figure(node.group_link)}"


def _figure(link: Link) -> str:
    """``7.3 (20)``: GB/s once the message flows, and the microseconds before it does."""
    return f"{_rate(link)} ({_microseconds(link.alpha_s)})"


def _rate(link: Link) -> str:
    return f"{MESSAGE_BYTES / (link.seconds(MESSAGE_BYTES) - link.alpha_s) / 1e9:.3g}"


def _microseconds(time_s: float) -> str:
    value = 1e6 * time_s
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _link_matrix(cluster: Cluster, classes: Sequence[tuple[str, list[Node]]]) -> list[str]:
    first: dict[str, Device] = {}
    for device in cluster.devices:
        first.setdefault(cluster.nodes[device.node].name, device)
    rows = []
    for letter, members in classes:
        row = [letter, places(node.name for node in members)]
        for _, others in classes:
            pair = next(((a, b) for a in members for b in others if a.name != b.name), None)
            if pair is None:
                row.append("-")
                continue
            try:
                row.append(_figure(cluster.link(first[pair[0].name], first[pair[1].name])))
            except ValueError:
                row.append("no link")
        rows.append(row)
    return table(["", "", *(f">{letter}" for letter, _ in classes)], rows)


# hpp explain


def _explain(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    profile, cluster = ModelProfile.load(options.profile), Cluster.load(options.cluster)
    if options.framework is not None:
        from planner import frameworks

        profile = frameworks.named(options.framework).profile(profile)
    print("\n".join(_explained(plan, profile, cluster, options.all)))
    return 0


def _explained(plan: Plan, profile: ModelProfile, cluster: Cluster, every: bool) -> Iterator[str]:
    audit = Audit(plan, profile, cluster)
    predicted = plan.predicted
    yield f"{plan.profile_name} on {plan.cluster_name}: {seconds(predicted.iteration_s)} per iteration"
    for problem in audit.problems():
        yield from wrapped("problem", problem)
    yield ""
    slowest = max(range(len(plan.pipelines)), key=lambda p: plan.pipelines[p].time_s)
    form = "sum of loads + (m - 1) x largest load"
    rows = [
        ["slowest pipeline", seconds(predicted.pipeline_s), f"pipeline {slowest}, {form}"],
        ["gradient sync", seconds(predicted.sync_s), _sync_words(plan)],
        ["update", seconds(predicted.update_s), "optimizer step of the stage that ends last"],
        ["iteration", seconds(predicted.iteration_s), f"bound {seconds(plan.lower_bound_s)}, gap {plan.gap:.2%}"],
    ]
    yield from _explained_table(rows)
    for letter, members in grouped(plan):
        for p in members if every else members[:1]:
            yield ""
            yield from _explained_pipeline(audit, letter, p, len(members))


def _sync_words(plan: Plan) -> str:
    if len(plan.pipelines) == 1:
        return "a single pipeline exchanges no gradients but those of tied weights"
    shards = f", in {plan.min_tp} shards" if plan.min_tp > 1 else ""
    return f"{plan.job.sync}, {len(plan.pipelines)} owners of each of {len(plan.blocks)} blocks{shards}"


def _explained_table(rows: Sequence[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    """Name, figure, and the words beside them, folded."""
    name_width = max(16, *(len(row[0]) for row in rows))
    for name, figure, words in rows:
        lead = f"{indent}{name:<{name_width}} {figure:>11}   "
        yield from textwrap.wrap(lead + words, WIDTH, subsequent_indent=" " * len(lead), break_on_hyphens=False)


def _explained_pipeline(audit: Audit, letter: str, p: int, copies: int) -> Iterator[str]:
    pipeline = audit.plan.pipelines[p]
    alike = f", one of {copies} alike" if copies > 1 else ""
    m, loads = pipeline.num_micro_batches, [stage.load_s for stage in pipeline.stages]
    yield f"Pipeline {letter} (number {p}{alike}): {m} micro-batches of {pipeline.micro_batch}"
    largest = f"{m - 1} x {seconds(max(loads))} of stage {pipeline.bottleneck}"
    yield f"  {seconds(pipeline.time_s)} = {seconds(sum(loads))} through all stages + {largest}"
    for s in range(len(pipeline.stages)):
        yield ""
        yield from _explained_stage(audit, p, s)


def _explained_stage(audit: Audit, p: int, s: int) -> Iterator[str]:
    pipeline = audit.plan.pipelines[p]
    stage = pipeline.stages[s]
    mark = ", the bottleneck" if s == pipeline.bottleneck else ""
    yield f"  Stage {s}{mark}: layers {inclusive(stage.layers)} ({stage.num_layers}) at {places(stage.devices)}"
    yield f"  cells of {stage.device_type}, tp {stage.tp}, micro-batch {pipeline.micro_batch}"
    sources = {term.name: term.source for term in (*audit.times(p, s), *audit.memory(p, s))}

    def source(name: str) -> str:
        return sources.get(name, "not in this profile")

    computed = (("forward", stage.forward_s), ("backward", stage.backward_s), ("recompute", stage.recompute_s))
    times = [[name, seconds(value), source(f"{name}_s")] for name, value in computed]
    times.append(["transfer", seconds(stage.transfer_s), _transfer_words(audit, p, s)])
    times.append(["load", seconds(stage.load_s), "per micro-batch"])
    times.append(["sync", seconds(stage.sync_s), "per iteration, before overlap: " + _ring_words(audit, p, s)])
    times.append(["update", seconds(stage.update_s), "per iteration: " + source("update_s")])
    yield from _explained_table(times, indent="    ")
    memory, margin = stage.memory, audit.job.memory_margin
    spare = size((1 - margin) * memory.capacity - memory.total)
    sizes = [[name.replace("_", " "), size(getattr(memory, name)), source(name)] for name in CATEGORIES]
    sizes.append(["memory", size(memory.total), f"of {size(memory.capacity)}; {spare} spare at margin {margin:.0%}"])
    yield from _explained_table(sizes, indent="    ")


def _transfer_words(audit: Audit, p: int, s: int) -> str:
    cuts = [cut for cut in (s - 1, s) if 0 <= cut < len(audit.plan.pipelines[p].stages) - 1]
    words = [_hand_over_words(audit, audit.hand_over(p, cut)) for cut in cuts]
    return "; ".join(words) or "none, the whole model is here"


def _hand_over_words(audit: Audit, hand_over: HandOver | None) -> str:
    if hand_over is None:
        return "no such link or layer in these inputs"
    link, time_s = hand_over.link, seconds(hand_over.slowest_s)
    if not hand_over.nbytes:
        return "nothing to send"
    rate = hand_over.nbytes / (hand_over.slowest_s - link.alpha_s) / 1e9
    sum_of = f"{_microseconds(link.alpha_s)} us + {size(hand_over.nbytes)} at {rate:.3g} GB/s = {time_s}"
    return f"{_pair_words(audit.cluster, hand_over.slowest, link)}: {sum_of}"


def _ring_words(audit: Audit, p: int, s: int) -> str:
    plan, job = audit.plan, audit.job
    if len(plan.pipelines) == 1:
        return "a single pipeline, only tied weights are exchanged"
    mine = [block for block in plan.blocks if block.owners[p : p + 1] == (s,)]
    volume = sum(block.gradient_bytes for block in mine)
    calls = f" per {job.sync_granularity}"
    if job.sync_granularity == "block":
        calls = f" in chunks of {size(job.sync_chunk_bytes)}"
    return f"{len(plan.pipelines)} owners, {size(volume)} of gradients per rank{calls}; {_ring_link(audit, p, s)}"


def _ring_link(audit: Audit, p: int, s: int) -> str:
    """The slowest link between the stage and the other owners of its layers."""
    first = audit.plan.pipelines[p].stages[s].devices[0]
    i, j = audit.plan.pipelines[p].stages[s].layers
    others = [stage for q, pipeline in enumerate(audit.plan.pipelines) if q != p for stage in pipeline.stages]
    names = {stage.devices[0] for stage in others if stage.layers[0] < j and i < stage.layers[1]} - {first}
    if not names or not {first, *names} <= set(audit.devices):
        return "its devices are not those of this cluster"
    pairs = [(name, audit.cluster.link(audit.devices[first], audit.devices[name])) for name in sorted(names)]
    name, link = max(pairs, key=lambda pair: float(pair[1].seconds(MESSAGE_BYTES)))
    rate = f"{_rate(link)} GB/s, alpha {_microseconds(link.alpha_s)} us"
    return f"slowest link {_pair_words(audit.cluster, (first, name), link)} {rate}"


def _pair_words(cluster: Cluster, pair: tuple[str, str], link: Link) -> str:
    return f"{pair[0]} to {pair[1]} ({link_name(cluster, *pair, link)})"


def link_name(cluster: Cluster, a: str, b: str, link: Link) -> str:
    """Which entry of the cluster file a link between two devices came from."""
    node, other = (cluster.nodes[cluster.device(name).node] for name in (a, b))
    if node == other:
        return f"fast group of {node.name}" if link == node.group_link and link != node.link else f"inside {node.name}"
    ends = [_names_of(cluster, device) for device in (a, b)]
    for network in cluster.links:
        one, two = network.between
        joins = (one in ends[0] and two in ends[1]) or (one in ends[1] and two in ends[0])
        if joins and network.link == link:
            driven = f", {network.devices} devices at each end" if network.devices > 1 else ""
            return f"link {one} - {two}{driven}"
    return "path through the network"


def _names_of(cluster: Cluster, name: str) -> set[str | None]:
    """What a network link may call the node that a device is in."""
    device = cluster.device(name)
    node = cluster.nodes[device.node]
    return {node.name, node.island, device.type, "*"}
