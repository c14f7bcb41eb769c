"""A configuration as a system that runs it describes it: stages by counts of decoder layers, devices if it names them.

What the parsers of other formats return and what `planner.evaluate` prices; also a file of its own, for a
configuration that no format here describes.
"""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from planner import files
from planner.cluster import Cluster, Device
from planner.files import Document
from planner.plans import Plan

MOST_MICRO_BATCHES = 10**7  # more is a slip


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """One stage.

    Parameters
    ----------
    layers
        Half-open range of the profile's layers, where that is known; else the counts below say what it runs.
    blocks
        Decoder layers.
    embedding, head
        Whether it runs what comes before and after the decoder layers.
    mtp
        Layers that predict further tokens.
    tp
        Devices it runs on.
    devices
        Their names, or positions in the order of the cluster's devices; empty if the ranks decide.
    recompute
        Recomputed layers: of the profile if `layers` is given, else counted among the stage's decoder layers.
    in_flight
        Micro-batches held at once; None for 1F1B.
    """

    BRIEF: ClassVar[bool] = True

    layers: tuple[int, int] | None = None
    blocks: int = 0
    embedding: bool = False
    head: bool = False
    mtp: int = 0
    tp: int = 1
    devices: tuple[int | str, ...] = ()
    recompute: tuple[int, ...] = ()
    in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.blocks < 0 or self.mtp < 0:
            raise ValueError(f"blocks: {min(self.blocks, self.mtp)} is negative, expected a number of layers")
        if self.tp < 1:
            raise ValueError(f"tp: {self.tp} is less than 1")
        if self.devices and len(self.devices) != self.tp:
            raise ValueError(f"devices: {len(self.devices)} for tp {self.tp}")

    @property
    def empty(self) -> bool:
        """Whether it runs nothing."""
        return self.layers is None and not (self.blocks or self.embedding or self.head or self.mtp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """One pipeline, or the shape of several.

    Parameters
    ----------
    micro_batch, num_micro_batches
        Samples per micro-batch, and how many; one of them None if the global batch decides it.
    """

    BRIEF: ClassVar[bool] = True

    stages: tuple[StageLayout, ...]
    micro_batch: int | None = None
    num_micro_batches: int | None = None

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages: a pipeline needs at least one")
        for key in ("micro_batch", "num_micro_batches"):
            value = getattr(self, key)
            if value is not None and not 1 <= value <= MOST_MICRO_BATCHES:
                raise ValueError(f"{key}: {value} is not between 1 and {MOST_MICRO_BATCHES}")

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return sum(stage.tp for stage in self.stages)

    def sized(self, samples: int | None) -> PipelineLayout:
        """With both numbers known; `samples` of the global batch fall to it."""
        b, m = self.micro_batch, self.num_micro_batches
        if b is not None and m is not None:
            return self
        if samples is None:
            raise ValueError("num_micro_batches: unknown without the global batch; give a job with global_batch")
        known = b or m or 1
        if samples % known:
            what = "samples per micro-batch" if b is not None else "micro-batches"
            raise ValueError(f"global batch: {samples} samples per pipeline are no multiple of {known} {what}")
        return replace(self, micro_batch=b or samples // known, num_micro_batches=m or samples // known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Document):
    """Pipelines, and how they meet the devices.

    Parameters
    ----------
    copies
        How often the pipelines are repeated; None for as often as there are devices.
    global_batch
        Samples per step, where the pipelines leave it open.
    world_size
        Devices in use, the first of the cluster; None for all.
    order
        Where stages name no devices: ranks stage by stage (``stage``) or pipeline by pipeline (``pipeline``), in the
        order of the cluster's devices.
    warnings
        What the configuration says that the planner does not model.
    """

    SCHEMA: ClassVar[str] = "hpp-layout/1"
    BRIEF: ClassVar[bool] = True

    pipelines: tuple[PipelineLayout, ...]
    copies: int | None = 1
    global_batch: int | None = None
    world_size: int | None = None
    order: Literal["stage", "pipeline"] = "pipeline"
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise ValueError("pipelines: at least one")
        if self.copies is not None and self.copies < 1:
            raise ValueError(f"copies: {self.copies} is less than 1")

    @classmethod
    def of_plan(cls, plan: Plan) -> Layout:
        """The configuration that a plan is."""
        return cls(
            pipelines=tuple(
                PipelineLayout(
                    stages=tuple(
                        StageLayout(
                            layers=s.layers, tp=s.tp, devices=s.devices, recompute=s.recompute, in_flight=s.in_flight
                        )
                        for s in pipeline.stages
                    ),
                    micro_batch=pipeline.micro_batch,
                    num_micro_batches=pipeline.num_micro_batches,
                )
                for pipeline in plan.pipelines
            )
        )

    @property
    def named(self) -> bool:
        """Whether the stages name their devices."""
        return any(isinstance(each, str) for p in self.pipelines for stage in p.stages for each in stage.devices)

    def placed(
        self, cluster: Cluster, global_batch: int | None = None, ranks: Sequence[str] | None = None
    ) -> tuple[PipelineLayout, ...]:
        """Every pipeline with its numbers and the names of its devices.

        Parameters
        ----------
        global_batch
            Samples per step, where the layout leaves it open.
        ranks
            Device of every rank, where the layout names none; those of the cluster in order by default.

        Raises
        ------
        ValueError
            If devices are missing, of two types or on two nodes in one stage, or used twice.
        """
        order = cluster.devices if ranks is None else tuple(cluster.device(name) for name in ranks)
        copies = self._copies(order)
        count = copies * len(self.pipelines)
        total = self.global_batch or global_batch
        if total is not None and any(None in (p.micro_batch, p.num_micro_batches) for p in self.pipelines):
            if total % count:
                raise ValueError(f"global batch: {total} samples are no multiple of {count} pipelines")
            total //= count
        pipelines = [pipeline.sized(total) for pipeline in self.pipelines for _ in range(copies)]
        if ranks is not None and self.named:
            raise ValueError("ranks: no effect, the configuration names its devices")
        if any(stage.devices for pipeline in pipelines for stage in pipeline.stages):
            return tuple(_named(pipeline, cluster, order, p) for p, pipeline in enumerate(pipelines))
        return tuple(self._ranked(pipelines, cluster, order))

    def _copies(self, order: Sequence[Device]) -> int:
        if self.copies is not None:
            return self.copies
        world = self.world_size or len(order)
        each = sum(pipeline.num_devices for pipeline in self.pipelines)
        if world % each:
            raise ValueError(f"world size: {world} devices are no multiple of the {each} that one pipeline takes")
        return world // each

    def _ranked(
        self, pipelines: list[PipelineLayout], cluster: Cluster, order: Sequence[Device]
    ) -> Iterator[PipelineLayout]:
        """Devices by rank."""
        places = [(p, s) for p, pipeline in enumerate(pipelines) for s in range(len(pipeline.stages))]
        if self.order == "stage":
            places.sort(key=lambda place: (place[1], place[0]))
        needed = sum(pipeline.num_devices for pipeline in pipelines)
        if needed > len(order):
            raise ValueError(f"world size: {needed} devices in use, there are {len(order)} of {cluster.name}")
        rank, chosen = 0, {}
        for p, s in places:
            tp = pipelines[p].stages[s].tp
            chosen[p, s] = tuple(range(rank, rank + tp))
            rank += tp
        for p, pipeline in enumerate(pipelines):
            stages = tuple(replace(stage, devices=chosen[p, s]) for s, stage in enumerate(pipeline.stages))
            yield _named(replace(pipeline, stages=stages), cluster, order, p)


def _named(pipeline: PipelineLayout, cluster: Cluster, order: Sequence[Device], p: int) -> PipelineLayout:
    stages = []
    for s, stage in enumerate(pipeline.stages):
        where = f"pipeline {p} stage {s}"
        if not stage.devices:
            raise ValueError(f"{where}: names no devices, as other stages do")
        found = [_device(cluster, order, each, where) for each in stage.devices]
        types, nodes = {device.type for device in found}, {device.node for device in found}
        if len(types) > 1 or len(nodes) > 1:
            what = f"types {', '.join(sorted(types))}" if len(types) > 1 else f"{len(nodes)} nodes"
            raise ValueError(
                f"{where}: its tp group {', '.join(device.name for device in found)} is of {what}; the planner keeps a "
                "tp group on one type inside one node"
            )
        stages.append(replace(stage, devices=tuple(device.name for device in found)))
    return replace(pipeline, stages=tuple(stages))


def _device(cluster: Cluster, order: Sequence[Device], place: int | str, where: str) -> Device:
    if isinstance(place, str):
        return cluster.device(place)
    if not 0 <= place < len(order):
        raise ValueError(f"{where}: device {place} does not exist, there are {len(order)} of {cluster.name}")
    return order[place]


# Command lines.


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of a command line, ``--a-b 1 2`` and ``--a_b=1`` alike; errors name the flag."""

    values: Mapping[str, tuple[str, ...]]
    where: str

    @classmethod
    def parse(cls, text: str, where: str) -> Flags:
        """Read a command line or a shell fragment: line ends, ``\\`` and ``#`` comments do not matter."""
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise ValueError(f"{where}: not a command line: {error}") from None
        values: dict[str, list[str]] = {}
        current: list[str] | None = None
        for word in words:
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                current = values.setdefault(name.replace("-", "_"), [])
                current.clear()  # the last one counts
                if equals:
                    current.append(value)
            elif current is not None:
                current.append(word)
        return cls({name: tuple(found) for name, found in values.items()}, where)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def wrong(self, name: str, problem: str) -> ValueError:
        """The error about a flag."""
        return ValueError(f"{self.where}: --{name.replace('_', '-')}: {problem}")

    def words(self, name: str) -> tuple[str, ...] | None:
        """Everything behind a flag, up to the next one."""
        found = self.values.get(name)
        if found == ():
            raise self.wrong(name, "without a value")
        return found

    def text(self, name: str) -> str | None:
        """The value of a flag: one word; what follows is not its own."""
        found = self.words(name)
        return None if found is None else found[0]

    def counts(self, name: str) -> tuple[int, ...] | None:
        """Whole numbers of at least 0, separated by blanks or commas."""
        found = self.words(name)
        return None if found is None else self._numbers(name, " ".join(found).replace(",", " ").split())

    def count(self, name: str, default: int | None = None) -> int | None:
        """One whole number of at least 1."""
        found = self.text(name)
        if found is None:
            return default
        (number,) = self._numbers(name, [found])
        if number < 1:
            raise self.wrong(name, f"{number} is less than 1")
        return number

    def _numbers(self, name: str, words: list[str]) -> tuple[int, ...]:
        for word in words:
            if not word.isdecimal():
                raise self.wrong(name, f"{word!r} is not a whole number")
        return tuple(map(int, words))

    def numbers(self, name: str) -> list[int] | None:
        """A Python list of whole numbers of at least 0, with ``*`` and ``+`` of lists."""
        found = self._literal(name)
        if found is not None and not _is_numbers(found):
            raise self._no_literal(name, "a list of numbers such as [5,3]")
        return cast("list[int] | None", found)

    def rows(self, name: str) -> list[list[int]] | None:
        """A Python list of such lists."""
        found = self._literal(name)
        if found is not None and not (isinstance(found, list) and all(map(_is_numbers, found))):
            raise self._no_literal(name, "a list of lists of numbers such as [[3,5],[8]]")
        return cast("list[list[int]] | None", found)

    def tables(self, name: str) -> list[list[list[int]]] | None:
        """A Python list of lists of such lists."""
        found = self._literal(name)
        if found is not None and not (
            isinstance(found, list) and all(isinstance(table, list) and all(map(_is_numbers, table)) for table in found)
        ):
            raise self._no_literal(name, "lists of lists of numbers such as [[[0],[1]],[[2]]]")
        return cast("list[list[list[int]]] | None", found)

    def mapping(self, name: str) -> dict[int, int] | None:
        """A Python dict of whole numbers."""
        found = self._literal(name)
        if found is not None and not (isinstance(found, dict) and _is_numbers([*found, *found.values()])):
            raise self._no_literal(name, "a mapping such as {0:0,1:2}")
        return cast("dict[int, int] | None", found)

    def _literal(self, name: str) -> object:
        found = self.words(name)
        if found is None:
            return None
        try:
            return _literal(ast.parse(" ".join(found).strip(), mode="eval").body)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            raise self._no_literal(name, "a list of numbers such as [5,3]") from None

    def _no_literal(self, name: str, expected: str) -> ValueError:
        return self.wrong(name, f"{' '.join(self.values[name])[:60]!r} is not {expected}")


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _literal(node: ast.expr) -> Any:
    """The value of a literal; no names and no calls."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values) if key is not None}
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add)):
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(node.op, ast.Mult) and max((n for n in (left, right) if isinstance(n, int)), default=0) > 10**5:
            raise ValueError("too long")
        return left * right if isinstance(node.op, ast.Mult) else left + right
    raise ValueError(type(node).__name__)


def text_of(source: str | Path) -> tuple[str, str]:
    """The text itself, or that of the file it names; and what errors call it."""
    try:
        if isinstance(source, Path) or ("\n" not in source and Path(source).is_file()):
            return Path(source).read_text(encoding="utf-8-sig"), str(source)
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(source, Path) or not isinstance(error, OSError):  # a text too long for a file name is no file
            raise ValueError(f"{source}: cannot be read: {error}") from None
    return str(source), ""


def object_of(text: str, where: str) -> dict[str, Any]:
    """The object in a JSON text, or in the JSON or YAML file it was read from."""
    if Path(where).suffix.lower() in files.SUFFIXES and Path(where).is_file():
        return files.read(where)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: line {error.lineno} column {error.colno}: {error.msg}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object with keys at the top level")
    return data
