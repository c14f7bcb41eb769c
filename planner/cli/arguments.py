"""Kinds of arguments that several commands take."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        return _at_least_1(int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, between commas."""
    try:
        return tuple(_at_least_1(int(part)) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts such as 1,2,4") from None


def _at_least_1(number: int) -> int:
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
