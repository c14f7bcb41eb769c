"""Profiles in formats that others publish, read into our own. `FORMATS` maps a name to its importer.

An importer takes a directory and returns one `ModelProfile` per model in it. It converts units once (to seconds and
bytes), keeps where the figures came from in `conditions`, and answers a damaged file with one `ValueError` that names
the file, the key and the value.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planner.importers import metis, sailor
from planner.profile import ModelProfile

Importer = Callable[[str | Path], tuple[ModelProfile, ...]]

FORMATS: dict[str, Importer] = {"metis": metis.profiles, "sailor": sailor.profiles}

__all__ = ["FORMATS", "Importer"]
