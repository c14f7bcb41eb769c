"""``hpp plan``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner import files
from planner.cli.arguments import count, counts
from planner.cluster import Cluster
from planner.job import Job
from planner.plans import Plan, PlanSet
from planner.profile import ModelProfile

RUNNERS_UP = 3  # that a report shows beside the best
PROGRESS_AFTER_S = 1.0  # shorter searches show no bar


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    plan = commands.add_parser("plan", help="find the fastest configuration and print it")
    plan.set_defaults(run=_plan)
    plan.add_argument("profile", metavar="PROFILE", help="measured layer profile (JSON or YAML)")
    plan.add_argument("cluster", metavar="CLUSTER", help="nodes, devices and links (JSON or YAML)")
    plan.add_argument("--job", metavar="FILE", help="what to train; the options below override it")
    plan.add_argument("--global-batch", type=int, metavar="N", help="samples per iteration")
    plan.add_argument("--micro-batch", type=counts, metavar="B,..", help="micro-batch sizes allowed, as 1,2,4")
    plan.add_argument("--tp", type=counts, metavar="D,..", help="tensor-parallel degrees allowed, as 1,2")
    plan.add_argument("--framework", metavar="NAME", help="memory and sync of deepspeed, megatron or torch")
    plan.add_argument("--precision", choices=("fp32", "mixed"))
    plan.add_argument("--optimizer", choices=("adam", "sgd", "momentum"))
    plan.add_argument("--memory-margin", type=float, metavar="SHARE", help="part of each device kept free, as 0.05")
    plan.add_argument("--sync", choices=("overlapped", "exposed"), help="how gradient sync is charged")
    plan.add_argument("--shard-optimizer", action="store_true", help="owners of a block share its optimizer state")
    plan.add_argument("--no-recompute", action="store_true", help="never recompute activations")
    plan.add_argument("--top", type=count, default=1, metavar="K", help="show the K best plans")
    plan.add_argument("--time-limit", type=float, metavar="S", help="stop after S seconds with the best plan so far")
    plan.add_argument(
        "--effort", type=float, default=1.0, metavar="X", help="work on the lower bound, as a multiple of the default"
    )
    plan.add_argument(
        "--judge",
        choices=("simulation", "formula"),
        default="simulation",
        help="what decides between plans within 2 %% of the best",
    )
    plan.add_argument("--report", metavar="FILE.html", help="write a page on the plan and its runners-up")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")


def _plan(options: argparse.Namespace) -> int:
    profile, cluster = ModelProfile.load(options.profile), Cluster.load(options.cluster)
    if options.framework is not None:
        from planner import frameworks

        profile = frameworks.named(options.framework).profile(profile)
    job = _job(options)
    if options.time_limit is not None and not options.time_limit > 0:
        raise ValueError(f"--time-limit: {options.time_limit} is not a time in seconds")
    if not 0 <= options.effort < float("inf"):
        raise ValueError(f"--effort: {options.effort} is not a multiple of at least 0")
    outputs = _outputs(options.output, options.top)
    top = options.top
    if options.report is not None:
        top = max(top, RUNNERS_UP + 1)
        if Path(options.report).suffix.lower() != ".html":
            raise ValueError(f"--report: {options.report} does not end in .html")
        if not Path(options.report).parent.is_dir():
            raise ValueError(f"--report: there is no directory {Path(options.report).parent}")

    from planner import search  # brings the solvers along

    with _Progress() as progress:
        plans = search.plans(
            profile,
            cluster,
            job,
            time_limit=options.time_limit,
            progress=progress,
            top=top,
            effort=options.effort,
            judge=options.judge,
        )
    for plan in plans:
        for problem in plan.problems(profile, cluster, job):
            raise RuntimeError(f"the planner made a plan that does not pass its own check, please report it: {problem}")

    for path, plan in zip(outputs, plans):
        plan.save(path)
        print(f"wrote {path}", file=sys.stderr)
    if options.report is not None:
        _report(Path(options.report), plans, profile, cluster)
    plans = PlanSet(plans[: options.top])
    if options.json:
        print(files.dumps(plans[0].to_dict() if options.top == 1 else [plan.to_dict() for plan in plans]), end="")
    else:
        if options.top > 1:
            print(plans, end="\n\n")
        print(plans[0])
    return 0


def _report(path: Path, plans: Sequence[Plan], profile: ModelProfile, cluster: Cluster) -> None:
    from planner import simulate
    from planner.cli.look import write_report

    write_report(path, plans, [simulate.simulate(plan, cluster) for plan in plans], cluster, profile)
    print(f"wrote {path}", file=sys.stderr)


def _job(options: argparse.Namespace) -> Job:
    job = Job.load(options.job) if options.job is not None else _default_job(options)
    given = {
        "global_batch": options.global_batch,
        "micro_batches": options.micro_batch,
        "tp": options.tp,
        "precision": options.precision,
        "optimizer": options.optimizer,
        "memory_margin": options.memory_margin,
        "sync": options.sync,
        "recompute": False if options.no_recompute else None,
        "shard_optimizer": options.shard_optimizer or None,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(job, **changes)


def _default_job(options: argparse.Namespace) -> Job:
    """The framework's, where one is named; a job file says everything itself."""
    if options.framework is None:
        return Job()
    from planner import frameworks

    return frameworks.named(options.framework).job()


def _outputs(output: str | None, count: int) -> list[Path]:
    """plan.json, plan-2.json, ...: refused before the search rather than after it."""
    if output is None:
        return []
    path = Path(output)
    if path.suffix.lower() not in files.SUFFIXES:
        raise ValueError(f"{path}: suffix {path.suffix!r} is not among {', '.join(files.SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.parent}")
    return [path, *(path.with_name(f"{path.stem}-{n}{path.suffix}") for n in range(2, count + 1))]


class _Progress:
    """A bar on stderr for long searches on a terminal; rich is loaded only when there is one to draw."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __call__(self, fraction: float, text: str) -> None:
        if self.bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self.started < PROGRESS_AFTER_S:
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self.bar = Progress(
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(text, total=1.0)
        self.bar.update(self.task, completed=min(max(fraction, 0.0), 1.0), description=text)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
