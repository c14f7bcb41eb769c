"""Measurements in formats that others publish, read into our own.

`FORMATS` maps a name to its importer of profiles, `NETWORKS` to its importer of a cluster, for the formats that carry
network measurements. An importer takes a path and options, converts units once (to seconds and bytes), keeps where the
figures came from in `conditions` or `notes`, fills a gap only by an option and says so in the profile's warnings, and
answers a damaged file with one `ValueError` that names the file, and the key or the line.

`options` lists what an importer takes besides the path; `load` and `network` call one with options given as text.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from planner.cluster import Cluster
from planner.files import did_you_mean
from planner.importers import (
    aceso,
    dnn_partitioning,
    galvatron,
    megatron,
    metis,
    nnscaler,
    pipedream,
    piper,
    sailor,
    vtrain,
)
from planner.profile import ModelProfile

T = TypeVar("T")
Importer = Callable[..., tuple[ModelProfile, ...]]

FORMATS: dict[str, Importer] = {
    "aceso": aceso.profiles,
    "dnn-partitioning": dnn_partitioning.profiles,
    "galvatron": galvatron.profiles,
    "megatron": megatron.profiles,
    "metis": metis.profiles,
    "pipedream": pipedream.profiles,
    "piper": piper.profiles,
    "sailor": sailor.profiles,
}
NETWORKS: dict[str, Callable[..., Cluster]] = {
    "aceso": aceso.cluster,
    "dnn-partitioning": dnn_partitioning.cluster,
    "galvatron": galvatron.cluster,
    "metis": metis.cluster,
    "nnscaler": nnscaler.cluster,
    "piper": piper.cluster,
    "sailor": sailor.network,
    "vtrain": vtrain.cluster,
}

__all__ = ["FORMATS", "NETWORKS", "Importer", "Option", "load", "network", "options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What an importer takes besides the path.

    Parameters
    ----------
    type
        int, float or str.
    default
        None where it has to be given, or where leaving it out means something of its own.
    choices
        The values it may have, if these are few.
    help
        What it is.
    """

    name: str
    type: type
    default: int | float | str | None
    choices: tuple[str, ...]
    help: str


def options(name: str, *, of_network: bool = False) -> tuple[Option, ...]:
    """Options of an importer, of profiles or of a cluster, in its order."""
    importer: Callable[..., object] = _importer(name, NETWORKS) if of_network else _importer(name, FORMATS)
    hints = typing.get_type_hints(importer)
    texts = _described(importer.__doc__ or "")
    found = []
    for parameter in list(inspect.signature(importer).parameters.values())[1:]:
        members = [hint for hint in _members(hints[parameter.name]) if hint is not types.NoneType]
        choices = typing.get_args(members[0]) if typing.get_origin(members[0]) is typing.Literal else ()
        found.append(
            Option(
                name=parameter.name,
                type=str if choices else members[0],
                default=parameter.default,
                choices=choices,
                help=texts.get(parameter.name, ""),
            )
        )
    return tuple(found)


def load(name: str, path: str | Path, /, **given: object) -> tuple[ModelProfile, ...]:
    """The profiles of a format; options as values or as text. ``ValueError`` for one that the format does not take."""
    return _importer(name, FORMATS)(path, **_converted(name, given, of_network=False))


def network(name: str, path: str | Path, /, **given: object) -> Cluster:
    """The cluster of a format; options as values or as text."""
    return _importer(name, NETWORKS)(path, **_converted(name, given, of_network=True))


def _importer(name: str, importers: Mapping[str, Callable[..., T]]) -> Callable[..., T]:
    if name not in importers:
        what = " with network measurements" if importers is NETWORKS else ""
        raise ValueError(f"format {name!r} is not among those{what}: {did_you_mean(name, importers)}")
    return importers[name]


def _converted(name: str, given: Mapping[str, object], *, of_network: bool) -> dict[str, object]:
    taken = {option.name: option for option in options(name, of_network=of_network)}
    converted = {}
    for key, value in given.items():
        if key not in taken:
            raise ValueError(f"{key}: format {name} takes no such option, but {did_you_mean(key, taken)}")
        option = taken[key]
        if option.choices and value not in option.choices:
            raise ValueError(f"{key}: {value!r} is not one of: {', '.join(option.choices)}")
        try:
            converted[key] = option.type(value) if isinstance(value, str) else value
        except ValueError:
            kind = {int: "a whole number", float: "a number"}[option.type]
            raise ValueError(f"{key}: {value!r} is not {kind}") from None
        if value == "":
            raise ValueError(f"{key}: nothing is given")
    return converted


def _members(hint: object) -> tuple[typing.Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _described(docstring: str) -> dict[str, str]:
    """What the Parameters section of a docstring says of each name."""
    section = re.search(r"Parameters\n-+\n(.*?)(\n\n\S|\Z)", inspect.cleandoc(docstring), re.DOTALL)
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in section[1].split("\n") if section else ():
        if line and not line.startswith(" "):
            names = [name.strip() for name in line.split(",")]
        else:
            for name in names:
                texts[name] = f"{texts.get(name, '')} {line.strip()}".strip()
    return texts
