"""How long a plan takes on 16, 64 and 256 devices of 2 to 4 types, with gradient sync and without; and a cold start."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import common
from benchmarks.common import Timed, figure, percent, table, timed, timed_process, verdict
from benchmarks.search_time import CASES, Case, question
from planner import Infeasible, Plan, plan

IMPORT_WITHIN_S, EXAMPLE_WITHIN_S = 0.050, 3.0
TIME_LIMIT_S = 60.0
IMPORT = "import time; t = time.perf_counter(); import planner; print(time.perf_counter() - t)"
EXAMPLE = ("plan", "examples/opt-350m.json", "examples/odd-counts.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One search; `iteration_s` is None where nothing was found."""

    case: Case
    synced: bool
    plan_s: float
    plan_cpu_s: float
    stopped: bool
    reachable_s: float
    iteration_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    pipelines: int = 0
    idle_devices: int = 0
    stats: dict[str, float] | None = None

    @property
    def quick(self) -> bool:
        """Whether the search took less than the prototype."""
        return not self.stopped and self.iteration_s is not None and self.plan_s < self.reachable_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Time to import the package, and of the README's example as a whole process."""

    import_s: float
    example_s: float
    example_cpu_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.parser("search_time", __doc__)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="S", help=f"({TIME_LIMIT_S:.0f})")
    parser.add_argument("--no-process", action="store_true", help="do not time whole processes")
    options = parser.parse_args(arguments)
    names = common.chosen(list(CASES), options.cases)
    load_before = common.load()
    common.import_solvers()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        for synced in (True, False):
            row, found = _search(CASES[name], synced, options.runs, options.time_limit)
            if found is not None:
                found.save(options.out / f"{name}{'' if synced else '_no-sync'}.json")
            rows.append(row)
            print(f"{name}, {'with' if synced else 'no'} sync: {row.plan_s:.2f} s", file=sys.stderr)
    start = None if options.no_process else _start(max(options.runs, 1))
    results = [{**asdict(row), "quick": row.quick} for row in rows]
    text = _text(rows, start, options.time_limit)
    where = common.environment(load_before)
    extra: dict[str, Any] = {"runs": options.runs, "time_limit_s": options.time_limit, "start": start and asdict(start)}
    common.finish("search_time", options, where, text, results=results, **extra)
    return 0


def _search(case: Case, synced: bool, runs: int, time_limit: float) -> tuple[Row, Plan | None]:
    """Time the search; not again if it took a third of the time limit."""
    times: list[Timed[Plan | None]] = []
    while len(times) < runs and (not times or times[0].wall_s < time_limit / 3):
        asked = question(case, synced)
        times.append(timed(lambda: _plan_or_none(asked, time_limit)))  # noqa: B023
    middle = sorted(times, key=lambda each: each.wall_s)[len(times) // 2]
    found = middle.value
    row = Row(
        case=case,
        synced=synced,
        plan_s=middle.wall_s,
        plan_cpu_s=middle.cpu_s,
        stopped=found is not None and not found.proved,
        reachable_s=case.reachable_s[0 if synced else 1],
    )
    if found is None:
        return row, None
    found.check(*question(case, synced))
    return _filled(row, found), found


def _plan_or_none(asked: Any, time_limit: float) -> Plan | None:
    try:
        return plan(*asked, time_limit=time_limit)
    except Infeasible as error:
        print(error, file=sys.stderr)
        return None


def _filled(row: Row, found: Plan) -> Row:
    return replace(
        row,
        iteration_s=found.predicted.iteration_s,
        lower_bound_s=found.lower_bound_s,
        gap=found.gap,
        pipelines=len(found.pipelines),
        idle_devices=len(found.idle_devices),
        stats=dict(found.stats),
    )


def _start(runs: int) -> Start:
    imports = sorted(float(timed_process(["-c", IMPORT]).value) for _ in range(max(5, runs)))
    example = timed_process(["-m", "planner.cli", *EXAMPLE], runs)
    return Start(import_s=imports[len(imports) // 2], example_s=example.wall_s, example_cpu_s=example.cpu_s)


def _text(rows: Sequence[Row], start: Start | None, time_limit: float) -> str:
    labels = [_label(row) for row in rows]
    missed = [_label(row) for row in rows if not row.quick]
    parts = ["Seconds to plan.", table([_columns(row) for row in rows])]
    if any(row.stopped for row in rows):
        parts.append(f"`>`: stopped at the time limit of {time_limit:g} s; the plan is the best so far.")
    parts.append(common.tally("Below the reachable figure", labels, missed))
    if start is not None:
        parts.append(table(_start_rows(start)))
    return "\n\n".join(parts)


def _label(row: Row) -> str:
    return row.case.name if row.synced else f"{row.case.name} without sync"


def _columns(row: Row) -> dict[str, str]:
    case, stats = row.case, row.stats or {}
    return {
        "case": f"case {case.name}",
        "devices": " + ".join(f"{count} {name}" for name, count in case.devices),
        "model": case.model,
        "tp": " ".join(map(str, case.tp)),
        "micro-batch": " ".join(map(str, case.micro_batches)),
        "batch": str(case.global_batch),
        "sync": "with" if row.synced else "without",
        "plan": f"{'> ' if row.stopped else ''}{row.plan_s:.2f}",
        "CPU": f"{row.plan_cpu_s:.2f}",
        "reachable": f"{row.reachable_s:g}",
        "below": verdict(row.quick),
        "templates": f"{stats.get('templates', 0):.0f}",
        "LPs": f"{stats.get('linear_programs', 0):.0f}",
        "ILPs": f"{stats.get('integer_programs', 0):.0f}",
        "step s": figure(row.iteration_s, 4),
        "bound s": figure(row.lower_bound_s, 4),
        "gap": percent(row.gap),
        "pipelines": str(row.pipelines),
        "idle": str(row.idle_devices),
    }


def _start_rows(start: Start) -> list[dict[str, str]]:
    return [
        {
            "start": "`import planner`",
            "seconds": f"{start.import_s:.3f}",
            "CPU": "-",
            "target": f"{IMPORT_WITHIN_S:g}",
            "reached": verdict(start.import_s < IMPORT_WITHIN_S),
        },
        {
            "start": f"`hpp {' '.join(EXAMPLE)}`",
            "seconds": f"{start.example_s:.3f}",
            "CPU": f"{start.example_cpu_s:.3f}",
            "target": f"{EXAMPLE_WITHIN_S:g}",
            "reached": verdict(start.example_s < EXAMPLE_WITHIN_S),
        },
    ]


if __name__ == "__main__":
    sys.exit(main())
