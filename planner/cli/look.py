"""``hpp simulate``, ``draw``, ``trace``, ``compare``: a plan played, pictured, and beside others."""

from __future__ import annotations

import argparse


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands."""
