"""The command line, ``hpp``: one module per group of commands, each with an ``add`` that registers them.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 2 bad input, 3 no plan can exist.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Never

from planner import __version__, files
from planner.plans import Infeasible

OK, BAD_INPUT, INFEASIBLE = 0, 2, 3
GROUPS = ("planning", "show", "look", "convert", "measure", "elastic", "demo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except Infeasible as error:
        return _infeasible(error, options)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"hpp: {_one_line(text)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("hpp: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> Never:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hpp", description="Plan pipeline-parallel training on mixed devices.")
    parser.add_argument("--version", action="version", version=f"hpp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for group in GROUPS:
        import_module(f"planner.cli.{group}").add(commands)
    return parser


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _infeasible(error: Infeasible, options: argparse.Namespace) -> int:
    print(f"hpp: no plan: {_one_line(error.message)}", file=sys.stderr)
    if error.nearest_miss:
        print(f"  nearest miss     {error.nearest_miss}", file=sys.stderr)
    if error.remedy:
        print(f"  cheapest change  {error.remedy}", file=sys.stderr)
    if getattr(options, "json", False):
        fields = ("message", "stage", "layer", "device_type", "short_bytes", "remedy")
        print(files.dumps({"infeasible": {name: getattr(error, name) for name in fields}}), end="")
    return INFEASIBLE
