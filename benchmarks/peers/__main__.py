"""Our plans beside those of public planners: step time under one neutral judge, and time to plan.

The judge, and what the peers reach under it, is a file of its own (../shared/judge/judge.py, or the one HPP_JUDGE
names); the measurements are Sailor's (HPP_DATA, or ../shared/data).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import common, peers
from benchmarks.common import Timed, figure, percent, seconds, table, verdict
from benchmarks.peers import CASES, Case
from planner import ModelProfile, Plan, plan

# A 56th of the 99 s that Metis took on the smallest case.
PLAN_WITHIN_S = 1.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A plan under the judge, and what others reach there. Seconds per step."""

    step_s: float
    sync_s: float
    samples: int
    memory_violations: int
    best_peer_s: float
    simple_split_s: float
    floor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case. `plan_s` with the solver libraries loaded; `process_s` from the start of Python to its exit.

    Both are at a reduced effort on the lower bound, which does not touch the plan; `default_s` is at the default one.
    """

    name: str
    case: Case
    predicted_s: float
    lower_bound_s: float
    gap: float
    tight_gap: float
    judged: Judged | None
    plan_s: float
    plan_cpu_s: float
    default_s: float
    process_s: float | None
    process_cpu_s: float | None
    pipelines: int
    idle_devices: int
    stats: dict[str, float]

    @property
    def faster(self) -> bool | None:
        """Whether the step is below the best peer's and the simple split's, on all samples and within memory."""
        if self.judged is None:
            return None
        sound = self.judged.samples == self.case.global_batch and not self.judged.memory_violations
        return sound and self.judged.step_s < min(self.judged.best_peer_s, self.judged.simple_split_s)

    @property
    def quick(self) -> bool:
        """Whether the plan took less than a 56th of Metis' time."""
        return self.plan_s < PLAN_WITHIN_S


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.parser("peers", __doc__)
    parser.add_argument("--no-process", action="store_true", help="do not time whole processes")
    options = parser.parse_args(arguments)
    names = common.chosen(list(CASES), options.cases)
    folder = common.data_folder() / "sailor"
    if not folder.is_dir():
        print(f"peers: no measurements in {folder}; set HPP_DATA to the folder that holds sailor/", file=sys.stderr)
        return 2
    judge, why_not = _judge()
    load_before = common.load()
    common.import_solvers()
    options.out.mkdir(parents=True, exist_ok=True)
    profiles: dict[str, ModelProfile] = {}
    rows = []
    for name in names:
        case = CASES[name]
        if case.model not in profiles:
            profiles[case.model] = peers.profile(case, folder)
        measured = _plan(case, profiles[case.model], folder, options.runs, effort=peers.EFFORT)
        path = options.out / f"{name}.json"
        measured.value.save(path)
        default = _plan(case, profiles[case.model], folder, 1, effort=1.0)
        tight = _plan(case, profiles[case.model], folder, 1, effort=peers.TIGHT_EFFORT)
        judged = None if judge is None else _judged(judge, case, path)
        whole = None
        if not options.no_process:
            whole = common.timed_process(["-c", f"from benchmarks import peers; peers.answer({name!r})"])
        rows.append(_row(case, measured, default, tight, judged, whole))
        print(f"{name}: planned in {measured.wall_s:.2f} s", file=sys.stderr)
    text = _text(rows, why_not)
    results = [{**asdict(row), "name": row.name, "faster": row.faster, "quick": row.quick} for row in rows]
    where = common.environment(load_before)
    common.finish("peers", options, where, text, runs=options.runs, not_judged=why_not, results=results)
    return 0


def _plan(case: Case, profile: ModelProfile, folder: Path, runs: int, effort: float) -> Timed[Plan]:
    """The plan of a case; every run starts from values that have computed nothing yet."""
    job = peers.job(case)
    fresh = iter([(replace(profile), peers.cluster(case, folder)) for _ in range(runs)])
    measured = common.timed(lambda: plan(*next(fresh), job, effort=effort, judge="formula"), runs)
    measured.value.check(profile, peers.cluster(case, folder), job)
    return measured


def _judge() -> tuple[ModuleType | None, str | None]:
    """The judge's module, or why there is none."""
    path = Path(os.environ.get("HPP_JUDGE", common.ROOT.parent / "shared" / "judge" / "judge.py"))
    if not path.is_file():
        return None, f"there is no judge at {path} (set HPP_JUDGE)"
    spec = importlib.util.spec_from_file_location("judge", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, None


def _judged(judge: Any, case: Case, path: Path) -> Judged:
    found = judge.judge(judge.World(case.model), judge.from_hpp(path))
    peer, simple, floor = judge.PEERS[case.model, case.a100, case.v100]
    return Judged(
        step_s=found["T"],
        sync_s=found["sync"],
        samples=found["samples"],
        memory_violations=len(found["oom"]),
        best_peer_s=peer,
        simple_split_s=simple,
        floor_s=floor,
    )


def _row(
    case: Case,
    measured: Timed[Plan],
    default: Timed[Plan],
    tight: Timed[Plan],
    judged: Judged | None,
    whole: Timed[str] | None,
) -> Row:
    found = measured.value
    return Row(
        name=case.name,
        case=case,
        predicted_s=found.predicted.iteration_s,
        lower_bound_s=found.lower_bound_s,
        gap=found.gap,
        tight_gap=tight.value.gap,
        judged=judged,
        plan_s=measured.wall_s,
        plan_cpu_s=measured.cpu_s,
        default_s=default.wall_s,
        process_s=None if whole is None else whole.wall_s,
        process_cpu_s=None if whole is None else whole.cpu_s,
        pipelines=len(found.pipelines),
        idle_devices=len(found.idle_devices),
        stats=dict(found.stats),
    )


def _text(rows: Sequence[Row], why_not: str | None) -> str:
    names = [row.name for row in rows]
    what = "Faster than the best peer and the simple split"
    judged = f"Not judged: {why_not}" if why_not else common.tally(what, names, [r.name for r in rows if not r.faster])
    within = f"Planned in less than {PLAN_WITHIN_S} s"
    quick = common.tally(within, names, [row.name for row in rows if not row.quick])
    slow = [row.name for row in rows if row.default_s >= PLAN_WITHIN_S]
    late = common.tally(f"{within} at the default effort", names, slow)
    steps, times = table([_step_columns(row) for row in rows]), table([_time_columns(row) for row in rows])
    return "\n\n".join(["Seconds per training step.", steps, "Seconds to plan.", times, f"{judged}\n{quick}\n{late}"])


def _step_columns(row: Row) -> dict[str, str]:
    each = row.judged
    return {
        "case": row.name,
        "predicted": seconds(row.predicted_s),
        "judged": "-" if each is None else seconds(each.step_s),
        "best peer": "-" if each is None else seconds(each.best_peer_s),
        "simple split": "-" if each is None else seconds(each.simple_split_s),
        "against the better": "-"
        if each is None
        else percent(each.step_s / min(each.best_peer_s, each.simple_split_s) - 1),
        "floor": "-" if each is None else seconds(each.floor_s),
        "of it sync": "-" if each is None else seconds(each.sync_s),
        "lower bound": seconds(row.lower_bound_s),
        "gap": percent(row.gap),
        "gap, more effort": percent(row.tight_gap),
        "samples": "-" if each is None else f"{each.samples} of {row.case.global_batch}",
        "over memory": "-" if each is None else f"{each.memory_violations} stages",
        "faster": verdict(row.faster),
    }


def _time_columns(row: Row) -> dict[str, str]:
    case, at_least = row.case, "> " if row.case.metis_stopped else ""
    return {
        "case": row.name,
        "plan": f"{row.plan_s:.2f}",
        "CPU": f"{row.plan_cpu_s:.2f}",
        "default effort": f"{row.default_s:.2f}",
        "process": figure(row.process_s),
        "process CPU": figure(row.process_cpu_s),
        "templates": f"{row.stats.get('templates', 0):.0f}",
        "LPs": f"{row.stats.get('linear_programs', 0):.0f}",
        "ILPs": f"{row.stats.get('integer_programs', 0):.0f}",
        "Metis": f"{at_least}{case.metis_s:g}",
        "Metis / plan": f"{at_least}{case.metis_s / row.plan_s:.0f}",
        "HARP": "-" if case.harp_s is None else f"{case.harp_s:g}",
        "Sailor": f"{case.sailor_s:.1f}",
        "quick": verdict(row.quick),
    }


if __name__ == "__main__":
    sys.exit(main())
