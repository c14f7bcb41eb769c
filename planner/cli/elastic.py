"""``hpp replan``: a plan for what is left, and what each device has to fetch for it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from planner import files
from planner.cluster import Cluster
from planner.plans import Plan
from planner.profile import ModelProfile


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    replan = commands.add_parser("replan", help="find a plan without some nodes, and what each device has to fetch")
    replan.set_defaults(run=_replan)
    replan.add_argument("plan", metavar="PLAN", help="the plan that runs")
    replan.add_argument("cluster", metavar="CLUSTER", help="the cluster it runs on")
    replan.add_argument(
        "--without",
        required=True,
        action="append",
        metavar="NAME",
        help="node (a100-3) or device (a100-3:1) that is gone; again for each",
    )
    replan.add_argument("--profile", required=True, metavar="PROFILE", help="the profile that the plan was made from")
    replan.add_argument("--time-limit", type=float, metavar="S", help="search for at most S seconds")
    replan.add_argument("--json", action="store_true", help="print plan and moves as JSON")
    replan.add_argument("-o", "--output", metavar="FILE", help="write the new plan")
    replan.add_argument("--left", metavar="FILE", help="write the cluster that is left, to hold the new plan against")


def _replan(options: argparse.Namespace) -> int:
    plan, cluster = Plan.load(options.plan), Cluster.load(options.cluster)
    profile = ModelProfile.load(options.profile)
    if options.time_limit is not None and not options.time_limit > 0:
        raise ValueError(f"--time-limit: {options.time_limit} is not a time in seconds")
    for path in (options.output, options.left):
        if path is not None and not Path(path).parent.is_dir():
            raise ValueError(f"{path}: there is no directory {Path(path).parent}")
    from planner.replan import remaining, replan

    left = remaining(cluster, options.without) if options.left is not None else None
    found = replan(plan, profile, cluster, without=options.without, time_limit=options.time_limit)
    for path, value in ((options.output, found.plan), (options.left, left)):
        if path is not None and value is not None:
            value.save(path)
            print(f"wrote {path}", file=sys.stderr)
    print(files.dumps(found.to_dict()) if options.json else f"{found}\n", end="")
    return 0
