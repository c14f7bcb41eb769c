"""A graph of operators as a chain of layers.

Pipelines cut a chain, the formats of PipeDream, Piper and dnn-partitioning hold directed acyclic graphs. A node at
which the graph can be cut is one that no other node runs beside: every other one comes before it or after it on some
path. (The dominators of the sink are among them; a residual edge that skips a node does not prevent a cut there, its
tensor is handed on along with the node's output.)

           +-> c --+
    a -> b +-> d --+-> e        layers: a, b, {c, d}, e

- A cut node is a layer of its own; the parallel branches between two cut nodes are one layer.
- The chain runs along the longest path. What only feeds it (inputs, masks, weights, the embedding of a decoder) goes
  to the layer that uses it first; what only reads from it (a second output) to the layer it reads from last.
- A layer hands on every tensor that is made up to it and used behind it, each once, in the size of its largest edge.
  A node makes one tensor, unless its edges are named after several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes of the graph that form one layer, in topological order, and the bytes handed on behind it."""

    members: tuple[str, ...]
    output_bytes: float


def graph_of(
    nodes: Mapping[str, float],
    edges: Mapping[tuple[str, str], float],
    where: str,
    tensors: Mapping[tuple[str, str], int] | None = None,
) -> networkx.DiGraph[str]:
    """The graph of nodes (with seconds) and edges (with bytes, and which tensor of several they carry).

    `where` starts the errors of a graph that is none.
    """
    import networkx

    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for name, seconds in nodes.items():
        graph.add_node(name, seconds=seconds)
    for (tail, head), nbytes in edges.items():
        for end in (tail, head):
            if end not in nodes:
                raise ValueError(f"{where}: edge {tail} -> {head}: there is no node {end!r}")
        graph.add_edge(tail, head, nbytes=nbytes, tensor=(tensors or {}).get((tail, head), 0))
    if not nodes:
        raise ValueError(f"{where}: no nodes")
    if not networkx.is_directed_acyclic_graph(graph):
        cycle = [tail for tail, _ in networkx.find_cycle(graph)]
        raise ValueError(f"{where}: the nodes {' -> '.join([*cycle, cycle[0]])} form a cycle")
    return graph


def chain(graph: networkx.DiGraph[str]) -> tuple[Segment, ...]:
    """The layers of a graph made by `graph_of`, first to last."""
    import networkx

    order = list(networkx.lexicographical_topological_sort(graph, key=_in_file(graph).__getitem__))
    layer_of = _layers(graph, order)
    members: list[list[str]] = [[] for _ in range(max(layer_of.values()) + 1)]
    for node in order:
        members[layer_of[node]].append(node)
    handed_on = [0.0] * len(members)
    for node in order:
        uses: dict[int, dict[int, float]] = {}  # tensor -> layer -> bytes of the largest edge to a node in it
        for head in graph.successors(node):
            edge, used = graph.edges[node, head], layer_of[head]
            users = uses.setdefault(edge["tensor"], {})
            users[used] = max(users.get(used, 0.0), edge["nbytes"])
        for users in uses.values():
            for layer in range(layer_of[node], max(users)):
                handed_on[layer] += max(nbytes for used, nbytes in users.items() if used > layer)
    return tuple(Segment(tuple(nodes), nbytes) for nodes, nbytes in zip(members, handed_on, strict=True))


def _in_file(graph: networkx.DiGraph[str]) -> dict[str, int]:
    return {node: i for i, node in enumerate(graph)}


def _layers(graph: networkx.DiGraph[str], order: list[str]) -> dict[str, int]:
    """Layer of every node."""
    import networkx

    path = _longest_path(graph, order)
    after = networkx.descendants(graph, path[0]) | {path[0]}
    before = networkx.ancestors(graph, path[-1]) | {path[-1]}
    main = [node for node in order if node in after and node in before]
    layer_of = _main_layers(graph, main)
    for node in order:  # reads from the chain only
        if node in after and node not in layer_of:
            layer_of[node] = max(layer_of[tail] for tail in graph.predecessors(node) if tail in layer_of)
    for node in reversed(order):  # feeds the chain only
        if node not in layer_of:
            layer_of[node] = min((layer_of[head] for head in graph.successors(node)), default=0)
    return layer_of


def _longest_path(graph: networkx.DiGraph[str], order: list[str]) -> list[str]:
    """The path that takes longest, among equals the one with most nodes."""
    length: dict[str, tuple[float, int]] = {}
    came_from: dict[str, str | None] = {}
    for node in order:
        tail = max(graph.predecessors(node), key=length.__getitem__, default=None)
        seconds, count = (0.0, 0) if tail is None else length[tail]
        length[node] = seconds + graph.nodes[node]["seconds"], count + 1
        came_from[node] = tail
    node = max(order, key=length.__getitem__)
    path = [node]
    while (tail := came_from[path[-1]]) is not None:
        path.append(tail)
    return path[::-1]


def _main_layers(graph: networkx.DiGraph[str], main: list[str]) -> dict[str, int]:
    """Layers of nodes with one source and one sink: a new one at every cut node, and behind it."""
    bit = {node: 1 << i for i, node in enumerate(main)}
    behind: dict[str, int] = {}
    ahead: dict[str, int] = {}
    for node in reversed(main):
        behind[node] = _union(bit[head] | behind[head] for head in graph.successors(node) if head in bit)
    for node in main:
        ahead[node] = _union(bit[tail] | ahead[tail] for tail in graph.predecessors(node) if tail in bit)
    layers: dict[str, int] = {}
    layer, fresh = -1, True
    for node in main:
        cut = (ahead[node] | behind[node]).bit_count() == len(main) - 1
        if cut or fresh:
            layer += 1
        layers[node], fresh = layer, cut
    return layers


def _union(masks: Iterable[int]) -> int:
    whole = 0
    for mask in masks:
        whole |= mask
    return whole
