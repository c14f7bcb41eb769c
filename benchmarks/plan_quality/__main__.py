"""Our plans beside simpler ways to divide the work, under the same cost model, and beside the lower bound."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks import common
from benchmarks.common import figure, percent, table, timed, verdict
from benchmarks.plan_quality import CASES, Case
from benchmarks.plan_quality.baselines import Baseline, data_balanced, even, layers_balanced
from planner import Infeasible, Plan, plan
from planner.question import ask

TIME_LIMIT_S = 120.0
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case; None for a baseline that does not fit."""

    name: str
    model: str
    cluster: str
    iteration_s: float
    lower_bound_s: float
    gap: float
    proved: bool
    pipelines: int
    idle_devices: int
    plan_s: float
    plan_cpu_s: float
    even: Baseline | None
    layers_balanced: Baseline | None
    data_balanced: Baseline | None
    homogeneous: Baseline | None

    @property
    def baselines(self) -> tuple[Baseline | None, ...]:
        """From the simplest to the strongest."""
        return self.even, self.layers_balanced, self.data_balanced, self.homogeneous

    @property
    def best(self) -> bool:
        """Whether no baseline is faster than the plan, nor below the bound."""
        least = min((each.iteration_s for each in self.baselines if each is not None), default=self.iteration_s)
        return self.lower_bound_s <= self.iteration_s * (1 + ROUNDING) and self.iteration_s <= least * (1 + ROUNDING)

    @property
    def strongest_s(self) -> float | None:
        """The best baseline."""
        return min((each.iteration_s for each in self.baselines if each is not None), default=None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.parser("plan_quality", __doc__)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="S", help=f"({TIME_LIMIT_S:.0f})")
    parser.set_defaults(runs=1)
    options = parser.parse_args(arguments)
    names = common.chosen(list(CASES), options.cases)
    load_before = common.load()
    common.import_solvers()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        row, plans = _row(CASES[name], options.runs, options.time_limit)
        for suffix, each in plans.items():
            each.save(options.out / f"{name}{suffix}.json")
        rows.append(row)
        print(f"{name}: planned in {row.plan_s:.2f} s", file=sys.stderr)
    results = [{**asdict(row), "best": row.best} for row in rows]
    where = common.environment(load_before)
    common.finish("plan_quality", options, where, _text(rows), time_limit_s=options.time_limit, results=results)
    return 0


def _row(case: Case, runs: int, time_limit: float) -> tuple[Row, dict[str, Plan]]:
    profile, cluster, job = case.ask()
    measured = timed(lambda: plan(profile, cluster, job, time_limit=time_limit, judge="formula"), runs)
    found = measured.value
    found.check(profile, cluster, job)
    plans = {"": found}
    alike = None
    try:
        plans["_homogeneous"] = alike = plan(
            profile, cluster, replace(job, max_classes=1), time_limit=time_limit, judge="formula"
        )
    except Infeasible as error:
        print(f"{case.name}, homogeneous pipelines: {error}", file=sys.stderr)
    question = ask(profile, cluster, job)
    row = Row(
        name=case.name,
        model=profile.name,
        cluster=cluster.name,
        iteration_s=found.predicted.iteration_s,
        lower_bound_s=found.lower_bound_s,
        gap=found.gap,
        proved=found.proved,
        pipelines=len(found.pipelines),
        idle_devices=len(found.idle_devices),
        plan_s=measured.wall_s,
        plan_cpu_s=measured.cpu_s,
        even=even(question),
        layers_balanced=layers_balanced(question),
        data_balanced=data_balanced(question),
        homogeneous=None if alike is None else Baseline(iteration_s=alike.predicted.iteration_s, layout="a plan file"),
    )
    return row, plans


def _text(rows: Sequence[Row]) -> str:
    title = "Seconds per iteration; in brackets how much slower than the plan."
    best = common.tally("No baseline is faster", [row.name for row in rows], [row.name for row in rows if not row.best])
    return "\n\n".join([title, table([_columns(row) for row in rows]), best])


def _columns(row: Row) -> dict[str, str]:
    def against(baseline: Baseline | None) -> str:
        if baseline is None:
            return "does not fit"
        return f"{figure(baseline.iteration_s, 4)} ({percent(baseline.iteration_s / row.iteration_s - 1)})"

    return {
        "case": row.name,
        "plan": figure(row.iteration_s, 4),
        "even split": against(row.even),
        "layers balanced": against(row.layers_balanced),
        "data balanced": against(row.data_balanced),
        "homogeneous pipelines": against(row.homogeneous),
        "gain on the best": "-" if row.strongest_s is None else percent(1 - row.iteration_s / row.strongest_s),
        "lower bound": figure(row.lower_bound_s, 4),
        "gap": percent(row.gap),
        "pipelines": str(row.pipelines),
        "idle": str(row.idle_devices),
        "planned in s": f"{'' if row.proved else '> '}{row.plan_s:.2f}",
        "CPU s": f"{row.plan_cpu_s:.2f}",
        "best": verdict(row.best),
    }


if __name__ == "__main__":
    sys.exit(main())
