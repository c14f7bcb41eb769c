"""Import the workloads of Piper (github.com/msr-fiddle/piper, NeurIPS 2021).

One JSON file per model: `nodes` with, per tp degree, one or two ways to run (`TMPCs`: vanilla, activation recomp), and
`edges` with bytes. What the figures mean, and what we make of it:

- `timePerSample` is seconds of forward and backward together, communication between tp ranks inside. A *sample* is
  what was profiled at once, a micro-batch; it counts as one sample here too.
- Recomputing runs forward once more, so the two ways tell forward and backward apart: forward = recomp - vanilla.
  Where that does not leave a backward pass, or there is one way only, the sum is split by `backward_factor`.
- `memoryUsageA` is what one micro-batch keeps, `memoryUsageB` what is there anyway: twice the weights (with their
  gradients) and, recomputing, temporary memory. A node with two ways is recomputable.
- `parameterSize` is bytes of weights of one rank, 4 each.
- `syncTimeFw` and `syncTimeBw`, the bytes that a tp group exchanges on top where a stage begins or ends, have no place
  in our cost model and are left out.
- The graph becomes a chain at its cut nodes (see `graph`); the profile keeps the nodes of each layer in `members`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planner.cluster import Cluster, Link
from planner.importers import graph
from planner.importers.layers import NO_UPDATE, Layer, Row, model_profile
from planner.importers.links import skeleton
from planner.importers.reading import Json, fingerprint, needed, positive
from planner.profile import Conditions, ModelProfile

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
LONGEST_S = 1.0  # seconds of a node and a sample; above, the unit has to be stated


def profiles(
    path: str | Path,
    *,
    device: str | None = None,
    unit: Literal["s", "ms", "us"] | None = None,
    backward_factor: float = 2.0,
    bytes_per_parameter: float = 4.0,
) -> tuple[ModelProfile, ...]:
    """The model of a file as a profile (a tuple of one, like every importer's answer).

    Parameters
    ----------
    device
        Name of the device type; the file does not name it.
    unit
        Unit of `timePerSample`; by default seconds, refused if a node takes more than one.
    backward_factor
        Backward seconds per forward second, for nodes without a second way to run.
    bytes_per_parameter
        Bytes of one parameter in `parameterSize`.

    Raises
    ------
    ValueError
        If the file is missing or damaged, or no graph; names the file, the key and the value.
    """
    needed("device", device, "the file does not name the device", "A100-80")
    assert device is not None
    positive("bytes_per_parameter", bytes_per_parameter)
    positive("backward_factor", backward_factor)
    if unit is not None and unit not in UNITS:
        raise ValueError(f"unit: {unit!r} is not among {', '.join(UNITS)}")
    file = Path(path)
    content = Json.read(file)
    nodes = _nodes(content, unit, backward_factor)
    edges = _edges(content, nodes)
    segments = graph.chain(
        graph.graph_of({name: node.ways[node.least].seconds for name, node in nodes.items()}, edges, str(file))
    )
    degrees = sorted(set.intersection(*(set(node.ways) for node in nodes.values())))
    if not degrees:
        raise ValueError(f"{file}: no tensor-parallel degree that every node has")
    split = sum(way.split for node in nodes.values() for way in node.ways.values())
    profile = model_profile(
        file,
        file.stem,
        [
            _layer([nodes[name] for name in segment.members], segment, degrees, device, bytes_per_parameter)
            for segment in segments
        ],
        conditions=Conditions(
            tp_communication="inside",
            source=f"Piper format: {fingerprint(file)}",
            notes=(
                f"{len(nodes)} nodes, {len(edges)} edges; a layer is named after the node in it that takes longest",
                f"times in {unit or 's'}; a sample is the micro-batch that was profiled",
                "forward = time with recomputation - time without",
                f"parameters of {bytes_per_parameter:g} bytes",
                "what a tp group exchanges where a stage begins or ends (syncTime) is left out",
            ),
        ),
        warnings=(
            NO_UPDATE,
            *([f"backward taken as {backward_factor:g} x forward for {split} of the measurements"] if split else []),
        ),
        members=[tuple(nodes[name].label for name in segment.members) for segment in segments],
    )
    return (profile,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A node at a tp degree."""

    seconds: float  # forward + backward
    forward_s: float
    split: bool  # forward and backward were told apart by a factor
    weight_bytes: float
    kept_bytes: float
    temporary_bytes: float
    recomputable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str  # the id, as in the edges
    kind: str
    ways: Mapping[int, _Way]

    @property
    def least(self) -> int:
        return min(self.ways)

    @property
    def label(self) -> str:
        return f"{self.name} {self.kind}"


def _nodes(content: Json, unit: str | None, backward_factor: float) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    for entry in content.at("nodes").list():
        name = str(entry.at("id").count())
        if name in nodes:
            raise ValueError(f"{entry.where}: id {name} is there twice")
        ways = {}
        for tp, options in entry.at("TMPCs").by_count().items():
            if tp < 1 or not 1 <= len(options.list()) <= 2:
                raise options.wrong("a list of one way to run, or of two, for a tp degree of at least 1")
            ways[tp] = _way(options.list(), unit, backward_factor)
        if not ways:
            raise ValueError(f"{entry.where}: TMPCs is empty")
        kind = entry.at("name").text() if entry.has("name") else f"node{name}"
        nodes[name] = _Node(name=name, kind=kind, ways=ways)
    return nodes


def _way(options: tuple[Json, ...], unit: str | None, backward_factor: float) -> _Way:
    vanilla, *others = options
    seconds, *again = (_seconds(option.at("timePerSample"), unit) for option in options)
    forward_s = again[0] - seconds if again else 0.0
    told = 0 < forward_s <= seconds
    weights, fixed = vanilla.at("parameterSize").number(), vanilla.at("memoryUsageB").number()
    kept = vanilla.at("memoryUsageA").number()
    temporary = max(
        fixed - 2 * weights, *(other.at("memoryUsageB").number() - 2 * weights - kept for other in others), 0.0
    )
    for other in others:
        if not seconds or other.at("memoryUsageA").number() <= kept:
            continue
        raise ValueError(f"{other.where}: memoryUsageA is above the {kept:g} of the way without recomputation")
    return _Way(
        seconds=seconds,
        forward_s=forward_s if told else seconds / (1 + backward_factor),
        split=bool(seconds) and not told,
        weight_bytes=weights,
        kept_bytes=kept,
        temporary_bytes=temporary,
        recomputable=bool(others),
    )


def _seconds(entry: Json, unit: str | None) -> float:
    seconds = entry.number() * UNITS[unit or "s"]
    if unit is None and seconds > LONGEST_S:
        raise ValueError(
            f"{entry.where}: {seconds:g} s of one sample looks like another unit; state it, for example unit=ms"
        )
    return seconds


def _edges(content: Json, nodes: Mapping[str, _Node]) -> dict[tuple[str, str], float]:
    edges = {}
    for entry in content.at("edges").list():
        ends = []
        for key in ("sourceId", "destId"):
            name = str(entry.at(key).count())
            if name not in nodes:
                raise ValueError(f"{entry.at(key).where}: there is no node {name}")
            ends.append(name)
        edges[ends[0], ends[1]] = entry.at("communicationCost").number()
    return edges


def _layer(
    nodes: list[_Node], segment: graph.Segment, degrees: list[int], device: str, bytes_per_parameter: float
) -> Layer:
    least = degrees[0]
    shares = {tp: round(sum(node.ways[tp].weight_bytes for node in nodes) / bytes_per_parameter) for tp in degrees}
    whole = least * shares[least]
    return Layer(
        name=max(nodes, key=lambda node: node.ways[least].seconds).kind,
        parameters=whole,
        shard_parameters=tuple((tp, share) for tp, share in shares.items() if tp > 1 and share != -(-whole // tp)),
        output_bytes=round(segment.output_bytes),
        recomputable=all(way.recomputable for node in nodes for way in node.ways.values()),
        rows=tuple(_rows(nodes, degrees, device)),
    )


def _rows(nodes: list[_Node], degrees: list[int], device: str) -> Iterator[Row]:
    for tp in degrees:
        ways = [node.ways[tp] for node in nodes]
        forward_s = sum(way.forward_s for way in ways)
        yield Row(
            device_type=device,
            tp=tp,
            micro_batch=1,
            forward_s=forward_s,
            backward_s=max(sum(way.seconds for way in ways) - forward_s, 0.0),
            activation_bytes=round(sum(way.kept_bytes for way in ways)),
            workspace_bytes=round(max(way.temporary_bytes for way in ways)),
        )


def cluster(path: str | Path, *, device: str | None = None, node_size: int | None = None) -> Cluster:
    """The `maxDevices` devices of a file with its memory and its one bandwidth between any two.

    Parameters
    ----------
    device
        Name of the device type.
    node_size
        Devices in a node; by default all in one.

    Raises
    ------
    ValueError
        If the file is missing or damaged; names the file, the key and the value.
    """
    file = Path(path)
    content = Json.read(file)
    total = content.at("maxDevices").count(1)
    size = total if node_size is None else node_size
    if not 1 <= size <= total:
        raise ValueError(f"node_size: {size} is not between 1 and the {total} devices of {file.name}")
    link = Link(bytes_per_s=content.at("bandwidth").number(1.0))
    sizes = (size,) * (total // size) + ((total % size,) if total % size else ())
    return skeleton(
        name=f"{total} {device}",
        device=device,
        memory_gb=content.at("maxMemoryPerDevice").number(1.0) / 2**30,
        sizes=sizes,
        link=link,
        network=link if len(sizes) > 1 else None,
        notes=(f"Piper format: {fingerprint(file)}", "one bandwidth for all"),
    )
