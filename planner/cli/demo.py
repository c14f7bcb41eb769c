"""``hpp demo``: a small GPT trained on an emulated mixed cluster, by the even plan and by the planner's."""

from __future__ import annotations

import argparse
import sys

from planner.cli.arguments import count


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    demo = commands.add_parser(
        "demo",
        help="train a small model on an emulated mixed cluster, evenly and as planned (needs torch; about a minute)",
        description="Train a small GPT on two fast and two slow devices that this machine emulates: four processes that"
        " sleep as long as the devices would compute. Once with equal stages and equal batches, once as planned.",
    )
    demo.set_defaults(run=_demo)
    demo.add_argument("--steps", type=count, default=8, metavar="N", help="training steps of each plan (8)")
    demo.add_argument(
        "--link", type=float, metavar="MBIT", help="shape the links between devices to MBIT/s (needs root and tc)"
    )


def _demo(options: argparse.Namespace) -> int:
    if options.link is not None and not options.link > 0:
        raise ValueError(f"--link: {options.link} is not a rate in Mbit/s")
    try:
        from runtime import demo
    except ImportError as error:
        if error.name != "torch":
            raise
        raise ValueError("the demo trains, which needs torch: pip install 'hpp-planner[runtime]'") from None
    demo.run(options.steps, options.link, say=lambda text: print(text, file=sys.stderr), show=print)
    return 0
