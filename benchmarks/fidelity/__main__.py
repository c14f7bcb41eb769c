"""Predicted against measured iteration time and peak memory of runs that others published."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import common
from benchmarks.common import figure, percent, table
from benchmarks.fidelity import CALIBRATED, HELD_OUT, LOW, Case, Outcome, outcome
from benchmarks.fidelity import sailor as sailor_runs
from benchmarks.fidelity.fit import fit_memory, fit_time
from benchmarks.fidelity.others import aceso_350m, dlperf, published
from benchmarks.fidelity.remarks import REMARKS
from planner.frameworks import DEEPSPEED, GIB, MIB, Framework
from planner.job import BytesPerParameter

Variant = tuple[str, Framework, Callable[[Case], Case]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.parser("fidelity", __doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants again, to each half in turn (2 minutes)")
    parser.set_defaults(runs=1)
    options = parser.parse_args(arguments)
    load_before = common.load()
    data = common.data_folder()
    if not (data / "sailor").is_dir():
        raise SystemExit(f"no published runs in {data}; HPP_DATA names their folder")
    cases, left_out = sailor_runs.cases(data / "sailor")
    more, also_left_out = dlperf(data / "dlperf_gpt" / "gpt_v100_flat.csv")
    every = [*cases, *more, aceso_350m(data / "aceso")]
    names = common.chosen([case.name for case in every], options.cases)
    outcomes = [outcome(case) for case in every if case.name in names]

    parts = [
        "Mean absolute error of each set. *Planning form*: the planner's own time of the same plan, without the order"
        " of sends, hand-overs and shared ports that the framework plays.",
        table(list(_summary(outcomes))),
        *_targets([each for each in outcomes if each.case.half == HELD_OUT]),
        "Every run. Sync and seconds as played.",
        table([_row(each) for each in outcomes]),
        "Left out: " + "; ".join(f"{name} ({why})" for name, why in (left_out | also_left_out).items()) + ".",
        "\n".join(f"- No memory figure of {name}: {why}." for name, why in _impossible(outcomes)),
        "What is left of the error:",
        "\n".join(_remarks(outcomes)),
    ]
    own = [each.case for each in outcomes if each.case.framework is DEEPSPEED]
    if own and options.cases is None:
        parts += ["Each constant taken back, all others kept: mean absolute error.", _ablation(own, data / "sailor")]
        parts += ["Aceso's own prediction beside what it measured.", table(list(_aceso(data / "aceso")))]
    if options.fit:
        parts += ["Constants fitted to one half and applied to the other.", table(list(_refits(own)))]
    _plot(outcomes, options.out)
    results = [_result(each) for each in outcomes]
    where = common.environment(load_before)
    common.finish("fidelity", options, where, "\n\n".join(parts), results=results)
    return 0


# Errors.


def _mean(errors: Iterable[float | None]) -> float | None:
    found = [abs(error) for error in errors if error is not None]
    return statistics.fmean(found) if found else None


def _summary(outcomes: Sequence[Outcome]) -> Iterable[dict[str, str]]:
    for group in dict.fromkeys(each.case.group for each in outcomes):
        own = [each for each in outcomes if each.case.group == group]
        yield _line(group, "all", own)
        for half in (CALIBRATED, HELD_OUT):
            if part := [each for each in own if each.case.half == half]:
                yield _line(group, half, part)
    fitted = [each for each in outcomes if each.case.half in (CALIBRATED, HELD_OUT)]
    for half in (CALIBRATED, HELD_OUT):
        if part := [each for each in fitted if each.case.half == half]:
            yield _line("three sets of Sailor", half, part)


def _line(group: str, half: str, own: Sequence[Outcome]) -> dict[str, str]:
    memory = [error for each in own if (error := each.memory_error) is not None]
    low = sum(error < -LOW for error in memory)
    return {
        "set": group,
        "runs": half,
        "number": str(len(own)),
        "time": percent(_mean(each.error for each in own)),
        "worst": percent(max((each.error for each in own), key=abs)),
        "planning form": percent(_mean(each.planned_error for each in own)),
        "memory": percent(_mean(memory)),
        "lowest": percent(min(memory)) if memory else "-",
        "> 5 % low": f"{low} of {len(memory)}",
    }


def _targets(held_out: Sequence[Outcome]) -> list[str]:
    """Whether the held-out half is as close as asked."""
    mixed = [each for each in held_out if each.case.group == sailor_runs.MIXED]
    others = [each for each in held_out if each.case.group != sailor_runs.MIXED]
    memory = [error for each in held_out if (error := each.memory_error) is not None]
    if not (mixed and others and memory):
        return []
    low = sum(error < -LOW for error in memory)
    checks = (
        ("time, mixed <= 8 %", _mean(each.error for each in mixed), 0.08),
        ("time, GH200 <= 5 %", _mean(each.error for each in others), 0.05),
        ("memory <= 15 %", _mean(memory), 0.15),
    )
    said = [
        f"{what}: {percent(value)} ({common.verdict(value is not None and value <= most)})"
        for what, value, most in checks
    ]
    said.append(
        f"at most 1 in 20 more than 5 % low: {low} of {len(memory)} ({common.verdict(20 * low <= len(memory))})"
    )
    return ["Held-out half: " + "; ".join(said) + "."]


def _row(each: Outcome) -> dict[str, str]:
    case = each.case
    return {
        "run": case.name,
        "half": case.half,
        "measured s": figure(case.measured_s, 4),
        "played s": figure(each.played_s, 4),
        "error": f"{100 * each.error:+.1f} %",
        "planning form": f"{100 * each.planned_error:+.1f} %",
        "sync s": figure(each.sync_s, 3),
        "measured sync s": figure(case.sync_s, 3),
        "measured GiB": figure(case.measured_bytes / GIB, 3) if case.measured_bytes else "-",
        "predicted GiB": figure(each.peak_bytes / GIB, 3),
        "memory error": f"{100 * each.memory_error:+.1f} %" if each.memory_error is not None else "-",
    }


def _remarks(outcomes: Sequence[Outcome]) -> Iterable[str]:
    for each in outcomes:
        said = [REMARKS[each.case.name]] if each.case.name in REMARKS else []
        if each.memory_error is not None and each.memory_error > 0.15 and len(each.stages_bytes) > 1:
            real = each.case.measured_bytes
            assert real
            s = min(range(len(each.stages_bytes)), key=lambda s: abs(each.stages_bytes[s] / real - 1))
            said.append(
                f"The published peak is what stage {s} of {len(each.stages_bytes)} needs"
                f" ({100 * (each.stages_bytes[s] / real - 1):+.1f} %), not the fullest."
            )
        if said:
            yield f"- {each.case.name}: {' '.join(said)}"


def _impossible(outcomes: Sequence[Outcome]) -> Iterable[tuple[str, str]]:
    for each in outcomes:
        if each.case.impossible:
            yield each.case.name, f"{each.case.impossible}; predicted {each.peak_bytes / MIB:,.0f} MiB"


# Constants.


def _variants(root: Path) -> list[Variant]:
    def same(case: Case) -> Case:
        return case

    def own_ports(case: Case) -> Case:
        nodes = tuple(replace(node, nics=None) for node in case.cluster.nodes)
        return replace(case, cluster=replace(case.cluster, nodes=nodes))

    def copied(case: Case) -> Case:
        return sailor_runs.with_copies(root, case)

    state = BytesPerParameter(weights=4, gradients=4, optimizer=8)
    return [
        ("as they are", DEEPSPEED, same),
        ("hand_over_share 1", replace(DEEPSPEED, hand_over_share=1.0), same),
        ("hand_over_devices all", replace(DEEPSPEED, hand_over_devices=None), same),
        ("order 1f1b", replace(DEEPSPEED, order="1f1b"), same),
        ("launch_share 1", replace(DEEPSPEED, launch_share=1.0), same),
        ("a port for every device", DEEPSPEED, own_ports),
        ("copied network fits kept", DEEPSPEED, copied),
        ("state 16 bytes", replace(DEEPSPEED, state=state), same),
        ("context_bytes 1 GiB", replace(DEEPSPEED, context_bytes=GIB), same),
        ("workspace_layers 0", replace(DEEPSPEED, workspace_layers=0.0), same),
        ("workspace_logits 0", replace(DEEPSPEED, workspace_logits=0.0), same),
    ]


def _ablation(cases: Sequence[Case], root: Path) -> str:
    rows = []
    for name, framework, change in _variants(root):
        outcomes = [outcome(change(case), framework=framework) for case in cases]
        row = {"constant": name}
        for what, mixed in (("mixed", True), ("GH200", False)):
            for half in (CALIBRATED, HELD_OUT):
                own = [e for e in outcomes if (e.case.group == sailor_runs.MIXED) == mixed and e.case.half == half]
                row[f"time, {what}, {half}"] = percent(_mean(each.error for each in own))
        for half in (CALIBRATED, HELD_OUT):
            memory = [e.memory_error for e in outcomes if e.case.half == half and e.memory_error is not None]
            row[f"memory, {half}"] = f"{percent(_mean(memory))}, {sum(e < -LOW for e in memory)} low"
        rows.append(row)
    return table(rows)


def _refits(cases: Sequence[Case]) -> Iterable[dict[str, str]]:
    for half, other in ((CALIBRATED, HELD_OUT), (HELD_OUT, CALIBRATED)):
        fitted_to = [case for case in cases if case.half == half]
        framework = fit_memory(fitted_to, fit_time(fitted_to, DEEPSPEED).framework).framework
        outcomes = [outcome(case, framework=framework) for case in cases if case.half == other]
        mixed = [each for each in outcomes if each.case.group == sailor_runs.MIXED]
        others = [each for each in outcomes if each.case.group != sailor_runs.MIXED]
        memory = [each.memory_error for each in outcomes if each.memory_error is not None]
        yield {
            "fitted to": half,
            "hand-over": f"{framework.hand_over_share:g}",
            "launch": f"{framework.launch_share:g}",
            "bytes per parameter": str(framework.state.total),
            "context GiB": f"{framework.context_bytes / GIB:g}",
            "workspace layers": f"{framework.workspace_layers:g}",
            "workspace logits": f"{framework.workspace_logits:g}",
            "the other half: mixed": percent(_mean(each.error for each in mixed)),
            "GH200": percent(_mean(each.error for each in others)),
            "memory": percent(_mean(memory)),
            "> 5 % low": f"{sum(error < -LOW for error in memory)} of {len(memory)}",
        }


def _aceso(root: Path) -> Iterable[dict[str, str]]:
    for each in published(root):
        yield {
            "model": f"`{each.model}`",
            "measured s": figure(each.measured_s, 4),
            "predicted s": figure(each.predicted_s, 4),
            "error": f"{100 * (each.predicted_s / each.measured_s - 1):+.1f} %",
            "measured MiB": f"{each.measured_mib:,}",
            "predicted MiB": f"{each.predicted_mib:,}",
            "memory error": f"{100 * (each.predicted_mib / each.measured_mib - 1):+.1f} %",
        }


# Results.


def _result(each: Outcome) -> dict[str, object]:
    case = each.case
    return {
        "set": case.group,
        "run": case.name,
        "half": case.half,
        "measured_s": case.measured_s,
        "played_s": each.played_s,
        "planned_s": each.planned_s,
        "sync_s": each.sync_s,
        "measured_sync_s": case.sync_s,
        "measured_bytes": case.measured_bytes,
        "stages_bytes": each.stages_bytes,
        "impossible": case.impossible,
    }


def _plot(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Predicted over measured, time and memory, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fidelity"  # same input, same bytes
    from matplotlib import pyplot, ticker

    picture, axes = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    groups = list(dict.fromkeys(each.case.group for each in outcomes))
    for axis, title, unit in zip(axes, ("iteration time", "peak memory"), ("s", "GiB"), strict=True):
        points: list[tuple[str, str, float, float]] = []
        for each in outcomes:
            if unit == "s":
                points.append((each.case.group, each.case.half, each.case.measured_s, each.played_s))
            elif each.case.measured_bytes:
                points.append((each.case.group, each.case.half, each.case.measured_bytes / GIB, each.peak_bytes / GIB))
        if not points:
            continue
        for i, group in enumerate(groups):
            own = [point for point in points if point[0] == group]
            axis.scatter(
                [point[2] for point in own],
                [point[3] for point in own],
                s=34,
                edgecolor=f"C{i}",
                facecolor=["none" if point[1] == CALIBRATED else f"C{i}" for point in own],
                label=group,
            )
        values = [value for point in points for value in point[2:]]
        ends = (0.8 * min(values), 1.25 * max(values))
        for factor, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
            axis.plot(ends, [factor * end for end in ends], color="0.6", linewidth=0.8, linestyle=style, zorder=0)
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title)
        axis.set_xlabel(f"measured, {unit}")
        axis.set_ylabel(f"predicted, {unit}")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter(ticker.FormatStrFormatter("%g"))
            side.set_minor_formatter(ticker.NullFormatter())
    axes[0].legend(fontsize=7, loc="lower right", title="hollow: fitted to; dotted: 10 % off", title_fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "svg"):
        picture.savefig(folder / f"fidelity.{suffix}", dpi=120, metadata={"Date": None} if suffix == "svg" else None)
    pyplot.close(picture)


if __name__ == "__main__":
    sys.exit(main())
