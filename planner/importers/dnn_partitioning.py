"""Import the workloads of dnn-partitioning (github.com/msr-fiddle/dnn-partitioning, NeurIPS 2020).

One JSON file per workload: `nodes` with the time on an accelerator (called FPGA) and on a CPU core, with bytes, and
with a colour (nodes of one colour share a device), and `edges` with bytes. What we make of it:

- The two device types become `accelerator` and `cpu`. Times are milliseconds of one micro-batch, which counts as one
  sample. A node that the accelerator does not support has no cell there.
- In a training workload a backward node belongs to the layer of the forward node of its colour, or, of a colour
  without one, to the layer whose tensors it reads. An inference workload has no backward: `backward_factor` says what
  it would take (0 for a pipeline that only infers).
- The size of a node is its output and its weights: parameters = (size - output) / 4. A node without predecessor that
  takes next to no time holds weights alone; they are not handed on.
- The graph becomes a chain at its cut nodes (see `graph`), colours kept together; the profile keeps the forward nodes
  of each layer in `members`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.importers import graph
from planner.importers.layers import NO_UPDATE, Layer, Row, model_profile
from planner.importers.reading import Json, fingerprint, needed, positive
from planner.profile import Conditions, ModelProfile

if TYPE_CHECKING:
    import networkx

FASTEST = 1e12  # bytes/s of an edge; above, its cost is in seconds
WEIGHTS_MS = 1e-3  # a source that takes less holds weights
FLOAT_BYTES = 4


def profiles(
    path: str | Path,
    *,
    backward_factor: float | None = None,
    accelerator: str = "accelerator",
    cpu: str = "cpu",
) -> tuple[ModelProfile, ...]:
    """The model of a workload as a profile (a tuple of one, like every importer's answer).

    Parameters
    ----------
    backward_factor
        Backward seconds per forward second, for inference workloads.
    accelerator
        Name for the accelerator as a device type.
    cpu
        Name for a CPU core as a device type.

    Raises
    ------
    ValueError
        If the file is missing or damaged, or no graph; names the file, the key and the value.
    """
    file = Path(path)
    content = Json.read(file)
    nodes = _nodes(content)
    edges = _edges(content, nodes)
    forward = {name: node for name, node in nodes.items() if not node.backward}
    if not forward:
        raise ValueError(f"{file}: no forward node")
    trained = len(forward) < len(nodes)
    if not trained:
        needed("backward_factor", backward_factor, f"{file.name} has no backward nodes", "2")
    elif backward_factor is not None:
        raise ValueError(f"backward_factor: {backward_factor} given, but {file.name} has backward nodes of its own")
    if backward_factor:
        positive("backward_factor", backward_factor)

    inner = {ends: nbytes for ends, nbytes in edges.items() if ends[0] in forward and ends[1] in forward}
    held = _weights(forward, inner)
    segments = _segments(forward, {ends: 0.0 if ends[0] in held else nbytes for ends, nbytes in inner.items()}, file)
    layer_of = {name: i for i, segment in enumerate(segments) for name in segment.members}
    behind = _backward_layers(nodes, edges, layer_of)
    outputs = _output_bytes(nodes, edges)
    layers = [
        _layer(
            [forward[name] for name in segment.members],
            [nodes[name] for name, layer in behind.items() if layer == i],
            [0.0 if name in held else outputs.get(name, forward[name].nbytes) for name in segment.members],
            segment,
            backward_factor,
            (accelerator, cpu),
        )
        for i, segment in enumerate(segments)
    ]
    profile = model_profile(
        file,
        file.stem,
        layers,
        conditions=Conditions(
            tp_communication="inside",
            source=f"dnn-partitioning format: {fingerprint(file)}",
            notes=(
                f"{len(nodes)} nodes, {len(edges)} edges; a layer is named after the node in it that takes longest",
                "times in ms; a sample is the micro-batch that was profiled",
                "parameters = (size of a node - its output) / 4 bytes; activations are the outputs",
            ),
        ),
        warnings=(
            NO_UPDATE,
            *([] if trained else [f"inference was profiled: backward taken as {backward_factor:g} x forward"]),
        ),
        members=[tuple(forward[name].label for name in segment.members) for segment in segments],
    )
    return (profile,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str  # the id, as in the edges
    label: str
    seconds: tuple[float | None, float]  # accelerator, cpu
    nbytes: float
    backward: bool
    colour: str

    @property
    def longest_s(self) -> float:
        return self.seconds[1] if self.seconds[0] is None else self.seconds[0]


def _nodes(content: Json) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    for entry in content.at("nodes").list():
        name = str(entry.at("id").count())
        if name in nodes:
            raise ValueError(f"{entry.where}: id {name} is there twice")
        supported = entry.at("supportedOnFpga").flag()
        nodes[name] = _Node(
            name=name,
            label=entry.at("name").text() if entry.has("name") else f"node{name}",
            seconds=(
                entry.at("fpgaLatency").number() / 1e3 if supported else None,
                entry.at("cpuLatency").number() / 1e3,
            ),
            nbytes=entry.at("size").number() if entry.has("size") else 0.0,
            backward=entry.at("isBackwardNode").flag(),
            colour=str(entry.at("colorClass").count()) if entry.has("colorClass") else f"node {name}",
        )
    return nodes


def _edges(content: Json, nodes: Mapping[str, _Node]) -> dict[tuple[str, str], float]:
    edges = {}
    for entry in content.at("edges").list():
        ends = []
        for key in ("sourceId", "destId"):
            name = str(entry.at(key).count())
            if name not in nodes:
                raise ValueError(f"{entry.at(key).where}: there is no node {name}")
            ends.append(name)
        edges[ends[0], ends[1]] = entry.at("size").number()
    return edges


def _weights(nodes: Mapping[str, _Node], edges: Iterable[tuple[str, str]]) -> set[str]:
    """Nodes that hold weights alone: sources that take next to no time but have a size."""
    heads = {head for _, head in edges}
    return {
        name for name, node in nodes.items() if name not in heads and node.nbytes and node.longest_s <= WEIGHTS_MS / 1e3
    }


def _segments(
    forward: Mapping[str, _Node], inner: Mapping[tuple[str, str], float], file: Path
) -> tuple[graph.Segment, ...]:
    """The layers of the forward graph, nodes of one colour in one layer."""
    import networkx

    graph.graph_of({name: node.longest_s for name, node in forward.items()}, inner, str(file))  # only to be checked
    together: networkx.DiGraph[str] = networkx.DiGraph()
    together.add_nodes_from(forward)
    together.add_edges_from(inner)
    first: dict[str, str] = {}
    for name, node in forward.items():
        one = first.setdefault(node.colour, name)
        if one != name:  # a cycle: one component
            together.add_edges_from(((one, name), (name, one)))
    place = {name: i for i, name in enumerate(forward)}
    components = [sorted(each, key=place.__getitem__) for each in networkx.strongly_connected_components(together)]
    members = {each[0]: each for each in components}
    of = {name: each[0] for each in components for name in each}
    joined: dict[tuple[str, str], float] = {}
    for (tail, head), nbytes in inner.items():
        if of[tail] != of[head]:
            joined[of[tail], of[head]] = joined.get((of[tail], of[head]), 0.0) + nbytes
    seconds = {name: sum(forward[each].longest_s for each in members[name]) for name in forward if name in members}
    segments = graph.chain(graph.graph_of(seconds, joined, str(file)))
    return tuple(
        graph.Segment(tuple(each for name in segment.members for each in members[name]), segment.output_bytes)
        for segment in segments
    )


def _backward_layers(
    nodes: Mapping[str, _Node], edges: Mapping[tuple[str, str], float], layer_of: Mapping[str, int]
) -> dict[str, int]:
    """The layer of every backward node."""
    of_colour = {nodes[name].colour: layer for name, layer in layer_of.items()}
    near: dict[str, list[str]] = {}
    for tail, head in edges:
        near.setdefault(head, []).append(tail)
        near.setdefault(tail, []).append(head)
    layers = {
        name: of_colour[node.colour] for name, node in nodes.items() if node.backward and node.colour in of_colour
    }
    left = [name for name, node in nodes.items() if node.backward and name not in layers]
    while left:
        placed = [name for name in left if any(each in layer_of or each in layers for each in near.get(name, ()))]
        if not placed:
            return layers | dict.fromkeys(left, max(layer_of.values()))
        found = {}
        for name in placed:
            reads = [layer_of[each] for each in near[name] if each in layer_of]
            found[name] = max(reads or (layers[each] for each in near[name] if each in layers))
        layers |= found
        left = [name for name in left if name not in found]
    return layers


def _output_bytes(nodes: Mapping[str, _Node], edges: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Bytes that each forward node puts out, as far as an edge tells."""
    colours = {node.colour: name for name, node in nodes.items() if not node.backward}
    outputs: dict[str, float] = {}
    for (tail, head), nbytes in edges.items():
        if not nodes[tail].backward:
            outputs[tail] = max(outputs.get(tail, 0.0), nbytes)
        elif nodes[head].colour in colours:  # a gradient of what the forward node of this colour puts out
            sink = colours[nodes[head].colour]
            outputs.setdefault(sink, nbytes)
    return outputs


def _layer(
    forward: list[_Node],
    backward: list[_Node],
    outputs: list[float],
    segment: graph.Segment,
    backward_factor: float | None,
    names: tuple[str, str],
) -> Layer:
    kept = sum(min(output, node.nbytes) for node, output in zip(forward, outputs, strict=True))
    return Layer(
        name=max(forward, key=lambda node: node.longest_s).label,
        parameters=round((sum(node.nbytes for node in forward) - kept) / FLOAT_BYTES),
        output_bytes=round(segment.output_bytes),
        rows=tuple(_rows(forward, backward, kept, backward_factor, names)),
    )


def _rows(
    forward: list[_Node],
    backward: list[_Node],
    kept: float,
    backward_factor: float | None,
    names: tuple[str, str],
) -> Iterator[Row]:
    for which, name in enumerate(names):
        times = [node.seconds[which] for node in (*forward, *backward)]
        known = [seconds for seconds in times if seconds is not None]
        if len(known) < len(times):
            continue
        forward_s = sum(known[: len(forward)])
        yield Row(
            device_type=name,
            tp=1,
            micro_batch=1,
            forward_s=forward_s,
            backward_s=sum(known[len(forward) :]) if backward_factor is None else backward_factor * forward_s,
            activation_bytes=round(kept),
        )


def cluster(
    path: str | Path,
    *,
    accelerator: str = "accelerator",
    cpu: str = "cpu",
    cpu_memory_gb: float | None = None,
) -> Cluster:
    """The accelerators of a workload in one node, each joined to the others by what an edge's cost comes to.

    Parameters
    ----------
    accelerator
        Name for the accelerator as a device type.
    cpu
        Name for a CPU core as a device type.
    cpu_memory_gb
        Memory of a CPU core in units of 2^30 bytes; without it the cores are left out.

    Raises
    ------
    ValueError
        If the file is missing or damaged; names the file, the key and the value.
    """
    file = Path(path)
    content = Json.read(file)
    memory = round(content.at("maxSizePerFPGA").number(1.0))
    counts = {accelerator: content.at("maxFPGAs").count(1)}
    types = [DeviceType(name=accelerator, memory_bytes=memory)]
    if cpu_memory_gb is not None:
        counts[cpu] = content.at("maxCPUs").count(1)
        types.append(DeviceType(name=cpu, memory_bytes=round(positive("cpu_memory_gb", cpu_memory_gb) * 2**30)))
    costs = [(entry.at("size").number(), entry.at("cost").number()) for entry in content.at("edges").list()]
    speeds = sorted(size / cost * 1e3 for size, cost in costs if size and cost)
    if not speeds:
        raise ValueError(f"{file}: no edge with a size and a cost")
    speed, unit = speeds[len(speeds) // 2], "ms"
    if speed > FASTEST:
        speed, unit = speed / 1e3, "s (in the ms of the nodes they would be 1000 times as fast)"
    link = Link(bytes_per_s=speed)
    return Cluster(
        name=" + ".join(f"{count} {name}" for name, count in counts.items()),
        device_types=tuple(types),
        nodes=tuple(
            Node(name=f"{name}s", devices=(name,) * count, link=link if count > 1 else None)
            for name, count in counts.items()
        ),
        links=(NetworkLink(between=(accelerator, cpu), link=link),) if len(counts) > 1 else (),
        notes=(f"dnn-partitioning format: {fingerprint(file)}", f"one bandwidth for all; costs of edges in {unit}"),
    )
