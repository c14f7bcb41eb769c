"""``hpp simulate``, ``draw``, ``trace``, ``compare``: a plan played, pictured, and beside others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner import files
from planner.cluster import Cluster
from planner.plans import Plan, grouped, inclusive, places, seconds, size, table, wrapped

if TYPE_CHECKING:
    from planner.measured import Comparison
    from planner.schedule import Schedule
    from planner.simulate import Idle, Lane, Timeline

PICTURES = ("overview", "gantt", "memory", "memory_over_time", "devices")
PATH_STEPS = 8  # of the critical path, at each end


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands."""
    simulate = commands.add_parser("simulate", help="play a plan action by action")
    simulate.set_defaults(run=_simulate)
    _playing(simulate)
    simulate.add_argument("--all", action="store_true", help="every pipeline, not one of each group of equal ones")
    simulate.add_argument("--json", action="store_true", help="print the timeline as JSON")

    draw = commands.add_parser("draw", help="draw a plan as PNG, SVG, PDF or a page of HTML")
    draw.set_defaults(run=_draw)
    _playing(draw)
    draw.add_argument("-o", "--output", required=True, metavar="FILE", help="the suffix decides: png, svg, pdf, html")
    draw.add_argument("--what", choices=PICTURES, default=PICTURES[0], help="one picture alone")

    trace = commands.add_parser("trace", help="write a plan's timeline for Perfetto or chrome://tracing")
    trace.set_defaults(run=_trace)
    _playing(trace)
    trace.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="FILE.json or FILE.json.gz")

    compare = commands.add_parser("compare", help="say why one plan beats others, or how a run differs from its plan")
    compare.set_defaults(run=_compare)
    compare.add_argument("plans", nargs="+", metavar="PLAN")
    _played_as(compare)
    compare.add_argument("--measured", metavar="RUN.csv", help="a run of the one plan, to hold against it")
    compare.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="the run under its simulation: png, svg, pdf, html, or json and json.gz for Perfetto; may be given again",
    )


def _playing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN")
    _played_as(parser)


def _played_as(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="CLUSTER", help="tells which devices share nodes and network ports")
    parser.add_argument(
        "--schedule",
        default="plan",
        metavar="NAME|FILE",
        help="plan, 1f1b, eager-1f1b, gpipe, zero-bubble, or the file of a list (.txt, .csv)",
    )
    parser.add_argument("--blocking", action="store_true", help="computing waits for transfers at both ends")
    parser.add_argument(
        "--framework", metavar="NAME", help="play it as deepspeed, megatron or torch does; needs the cluster"
    )


def _played(options: argparse.Namespace) -> tuple[Plan, Cluster | None, Timeline]:
    plan = Plan.load(options.plan)
    cluster = _cluster(options, [plan])
    timeline = _timeline(options, plan, cluster)
    if not timeline.iteration_s:
        raise ValueError(f"{options.plan}: no stage takes any time, there is nothing to show")
    return plan, cluster, timeline


def _timeline(options: argparse.Namespace, plan: Plan, cluster: Cluster | None) -> Timeline:
    """The plan played as the options of `_played_as` say."""
    from planner import simulate

    if options.framework is not None:
        from planner import frameworks

        if cluster is None or options.schedule != "plan" or options.blocking:
            raise ValueError("--framework: brings its own order of actions, and needs --cluster for its hand-overs")
        return frameworks.named(options.framework).play(plan, cluster)
    schedule = _schedule(options.schedule, plan)
    return simulate.simulate(plan, cluster, schedule=schedule, blocking=options.blocking)


def _cluster(options: argparse.Namespace, plans: Sequence[Plan]) -> Cluster | None:
    """The cluster given; says so if a plan was made for another, since hand-overs take what the plan says."""
    if options.cluster is None:
        return None
    cluster = Cluster.load(options.cluster)
    if any(plan.provenance.cluster != cluster.digest for plan in plans):
        print(f"hpp: {options.cluster}: not the cluster the plan was made for", file=sys.stderr)
    return cluster


def _schedule(text: str, plan: Plan) -> str | Sequence[Schedule]:
    """A name, or a list that a user wrote, which every pipeline then runs."""
    from planner.schedule import Schedule

    if Path(text).suffix not in (".txt", ".csv"):
        return text
    if not Path(text).is_file():
        raise ValueError(f"{text}: no such file")
    return [Schedule.load(text)] * len(plan.pipelines)


# hpp simulate


def _simulate(options: argparse.Namespace) -> int:
    plan, _, timeline = _played(options)
    if options.json:
        print(files.dumps(timeline), end="")
    else:
        print("\n".join(_simulated(plan, timeline, options)))
    return 0


def _simulated(plan: Plan, timeline: Timeline, options: argparse.Namespace) -> Iterator[str]:
    predicted = plan.predicted
    how = options.framework or options.schedule + (", transfers block" if options.blocking else "")
    if any(event.action.kind == "W" for lane in timeline.lanes for event in lane.events):
        how += ", W is half of a backward"
    yield f"{plan.profile_name} on {plan.cluster_name}, played as {how}"
    difference = timeline.iteration_s / predicted.iteration_s - 1
    yield (
        f"{seconds(timeline.iteration_s)} per iteration; the planning form says {seconds(predicted.iteration_s)}"
        f" ({difference:+.1%})"
    )
    yield ""
    yield from wrapped("pipelines", ", ".join(seconds(value) for value in dict.fromkeys(timeline.pipelines_s)))
    yield from wrapped("sync", f"{seconds(timeline.exposed_sync_s)} after the last backward pass")
    yield from wrapped("idle", f"{timeline.bubble_fraction:.1%} of the devices' time without forward or backward")
    yield ""
    yield from _lane_table(plan, timeline, options.all)
    yield ""
    yield from wrapped("path", _path(timeline))


def _lane_table(plan: Plan, timeline: Timeline, every: bool) -> list[str]:
    rows = []
    for letter, members in grouped(plan):
        for p in members if every else members[:1]:
            name = f"{letter} {p}" if every or len(members) == 1 else f"{len(members)} x {letter}"
            rows += [_lane_row(name, lane, plan, timeline) for lane in timeline.lanes if lane.pipeline == p]
    header = [">", ">stage", ">layers", "device", ">busy", "idle for", ">in flight", ">peak memory", "where"]
    return table(header, rows, fold=5)


def _lane_row(name: str, lane: Lane, plan: Plan, timeline: Timeline) -> list[str]:
    stages = [plan.pipelines[lane.pipeline].stages[s] for s in lane.stages]
    peak = "" if lane.memory is None else size(lane.memory.peak_bytes)
    if lane.memory is not None and lane.memory.limit is not None and lane.memory.peak_bytes > lane.memory.limit:
        peak += " !"
    return [
        name,
        ",".join(map(str, lane.stages)),
        ",".join(inclusive(stage.layers) for stage in stages),
        lane.device_type,
        f"{lane.busy_s / timeline.iteration_s:.1%}",
        _reasons(lane.idle, timeline.iteration_s),
        str(max(timeline.peak_in_flight(lane.pipeline, s) for s in lane.stages)),
        peak,
        places(lane.devices),
    ]


def _reasons(idle: Idle, iteration_s: float) -> str:
    words = {
        "warm_up_s": "start",
        "activation_s": "activations",
        "gradient_s": "gradients",
        "transfer_s": "transfers",
        "peers_s": "peers",
        "sync_s": "sync",
        "end_s": "end",
    }
    shares = [(getattr(idle, name) / iteration_s, word) for name, word in words.items()]
    return ", ".join(f"{word} {share:.1%}" for share, word in shares if share >= 0.0005) or "nothing"


def _path(timeline: Timeline) -> str:
    steps = [f"{p}:{event.action}" for p, event in timeline.critical_path]
    if len(steps) > 2 * PATH_STEPS:
        left_out = f"... {len(steps) - 2 * PATH_STEPS} more ..."
        steps = [*steps[:PATH_STEPS], left_out, *steps[-PATH_STEPS:]]
    return "critical, as pipeline:action: " + " ".join(steps)


# hpp draw, hpp trace


def _draw(options: argparse.Namespace) -> int:
    output = Path(options.output)
    html = output.suffix.lower() == ".html"
    from planner import draw

    if not html and output.suffix.lower() not in draw.SUFFIXES:
        raise ValueError(f"{output}: suffix {output.suffix!r} is not among {', '.join(draw.SUFFIXES)}, .html")
    if html and options.what != PICTURES[0]:
        raise ValueError(f"--what: a page holds all pictures, {options.what} alone needs {', '.join(draw.SUFFIXES)}")
    plan, cluster, timeline = _played(options)
    if html:
        write_report(output, [plan], [timeline], cluster)
    else:
        draw.save(_figure(options.what, plan, cluster, timeline), output)
    print(f"wrote {output}", file=sys.stderr)
    return 0


def _figure(what: str, plan: Plan, cluster: Cluster | None, timeline: Timeline) -> Any:
    from planner import draw

    if what == "gantt":
        return draw.gantt(timeline, plan)
    if what == "memory":
        return draw.memory_bars(plan)
    if what == "memory_over_time":
        return draw.memory_over_time(timeline, plan)
    return draw.device_map(plan, cluster) if what == "devices" else draw.overview(plan, timeline, cluster)


def write_report(
    path: Path,
    plans: Sequence[Plan],
    timelines: Sequence[Timeline],
    cluster: Cluster | None,
    profile: Any = None,
    instead: Mapping[str, str] | None = None,
) -> None:
    """One self-contained page on the first plan, with the others beside it; `instead`: SVG for some of its pictures."""
    from planner import draw, page

    names = [name for name in PICTURES if name != "overview"]
    pictures = {name: draw.render(_figure(name, plans[0], cluster, timelines[0]), "svg").decode() for name in names}
    files.write(path, page.report(plans, timelines, cluster, profile, pictures | dict(instead or {})))


def _trace(options: argparse.Namespace) -> int:
    from planner import trace

    plan, _, timeline = _played(options)
    trace.save(trace.chrome(timeline, plan), options.output)
    print(f"wrote {options.output}; open it at ui.perfetto.dev", file=sys.stderr)
    return 0


# hpp compare


def _compare(options: argparse.Namespace) -> int:
    from planner import page

    if options.measured is None:
        for name in ("framework", "output"):
            if getattr(options, name):
                raise ValueError(f"--{name}: goes with --measured, the run to hold against the plan")
    plans = [Plan.load(path) for path in options.plans]
    cluster = _cluster(options, plans)
    if options.measured is not None:
        if len(plans) > 1:
            raise ValueError(f"--measured: a run of one plan is held against it, {len(plans)} plans are given")
        return _compare_run(options, plans[0], cluster)
    timelines = [_timeline(options, plan, cluster) for plan in plans]
    print(page.comparison_text(page.compare(plans, options.plans, timelines)))
    return 0


def _compare_run(options: argparse.Namespace, plan: Plan, cluster: Cluster | None) -> int:
    from planner import draw, measured, trace

    suffixes = (*draw.SUFFIXES, ".html", *trace.SUFFIXES)
    for path in options.output:
        if not path.lower().endswith(suffixes):
            raise ValueError(f"{path}: suffix {Path(path).suffix!r} is not among {', '.join(suffixes)}")
    run = measured.load(options.measured)
    comparison = measured.compare(plan, run, _timeline(options, plan, cluster))
    if options.output and comparison.measured is None:
        raise ValueError(f"{options.measured}: no trace to show beside the simulation: {comparison.incomplete}")
    print(measured.comparison_text(comparison))
    for path in options.output:
        _write_comparison(Path(path), comparison, cluster)
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _write_comparison(path: Path, comparison: Comparison, cluster: Cluster | None) -> None:
    """The run under its simulation, in the form that the suffix says."""
    from planner import draw, trace

    plan, simulated = comparison.plan, comparison.simulated
    if path.name.lower().endswith(trace.SUFFIXES):
        trace.save(trace.chrome(simulated, plan, measured=comparison.measured), path)
        return
    figure = draw.gantt(simulated, plan, measured=comparison.measured)
    if path.suffix.lower() == ".html":
        picture = {"gantt": draw.render(figure, "svg").decode()}
        write_report(path, [plan], [simulated], cluster, instead=picture)
    else:
        draw.save(figure, path)
