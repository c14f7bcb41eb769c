"""Import the text graphs of PipeDream (github.com/msr-fiddle/pipedream, SOSP 2019).

A file has one line per node, then one line per edge, indented by a tab:

    node4 -- ReLU(inplace) -- forward_compute_time=0.5, backward_compute_time=0.2, activation_size=4, parameter_size=0
        node4 -- node5

Times are milliseconds of one batch, sizes bytes. What we make of it:

- The size of the batch is not in the file: it is one sample, unless `micro_batch` says otherwise.
- A node with several outputs lists their sizes as `[4096.0; 512.0]`; the nodes `__getitem__(0)`, ... behind it pick
  one each, are views (no memory of their own), and an edge to one of them has the size of that output.
- `Input` nodes hold the time of loading data; as in PipeDream's own planner they take none, and no memory.
- Parameters are 4 bytes each.
- The graph becomes a chain at its cut nodes (see `graph`); the profile keeps the nodes of each layer in `members`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from planner.importers import graph
from planner.importers.layers import NO_UPDATE, Layer, Row, model_profile
from planner.importers.reading import Line, counted, fingerprint, lines, needed, positive
from planner.profile import Conditions, ModelProfile

FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
FIGURES = re.compile(r", (?=[a-z_]+=)")
PICK = re.compile(r"__getitem__\((?P<index>\d+)\)")


def profiles(
    path: str | Path,
    *,
    device: str | None = None,
    micro_batch: int = 1,
    bytes_per_parameter: float = 4.0,
) -> tuple[ModelProfile, ...]:
    """The model of a file, or of the file `graph.txt` of a directory, as a profile.

    Parameters
    ----------
    device
        Name of the device type; the file does not name it.
    micro_batch
        Samples of the batch that was profiled; by default the batch counts as one sample.
    bytes_per_parameter
        Bytes of one parameter in `parameter_size`.

    Raises
    ------
    ValueError
        If the file is missing or damaged, or no graph; names the file, the line and the value.
    """
    needed("device", device, "the file does not name the device", "V100-16")
    positive("bytes_per_parameter", bytes_per_parameter)
    counted("micro_batch", micro_batch)
    assert device is not None
    file = Path(path)
    file = file / "graph.txt" if file.is_dir() else file
    nodes, edges = _read(file)
    segments = graph.chain(
        graph.graph_of(
            {node.name: node.forward_s + node.backward_s for node in nodes.values()},
            {(tail, head): _edge_bytes(nodes, tail, head, line) for (tail, head), line in edges.items()},
            str(file),
            {(tail, head): nodes[head].pick or 0 for tail, head in edges},
        )
    )
    layers = []
    for segment in segments:
        parts = [nodes[name] for name in segment.members]
        row = Row(
            device_type=device,
            tp=1,
            micro_batch=micro_batch,
            forward_s=sum(node.forward_s for node in parts),
            backward_s=sum(node.backward_s for node in parts),
            activation_bytes=round(sum(0.0 if node.pick is not None else sum(node.outputs) for node in parts)),
        )
        heaviest = max(parts, key=lambda node: node.forward_s + node.backward_s)
        layer = Layer(
            name=heaviest.kind,
            parameters=round(sum(node.parameter_bytes for node in parts) / bytes_per_parameter),
            output_bytes=-(-round(segment.output_bytes) // micro_batch),
            rows=(row,),
        )
        layers.append(layer)
    profile = model_profile(
        file,
        file.resolve().parent.name,
        layers,
        conditions=Conditions(
            tp_communication="inside",
            source=f"PipeDream format: {fingerprint(file)}",
            notes=(
                f"{len(nodes)} nodes, {len(edges)} edges; a layer is named after the node in it that takes longest",
                f"the profiled batch is {micro_batch} sample{'s' if micro_batch > 1 else ''}; milliseconds, bytes",
                f"parameters of {bytes_per_parameter:g} bytes; activations are the outputs of the nodes, views without",
                "the time and the size of Input nodes (loading data) are left out",
            ),
        ),
        warnings=(NO_UPDATE,),
        members=[segment.members for segment in segments],
    )
    return (profile,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str
    kind: str
    pick: int | None  # of a view: which output of the node before it
    forward_s: float
    backward_s: float
    outputs: tuple[float, ...]  # bytes
    parameter_bytes: float


def _read(file: Path) -> tuple[dict[str, _Node], dict[tuple[str, str], Line]]:
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], Line] = {}
    for line in lines(file):
        parts = line.text.strip().split(" -- ")
        if line.text.startswith("\t"):
            if len(parts) != 2:
                raise line.wrong("an edge, a tab and nodeA -- nodeB")
            for end in parts:
                if end not in nodes:
                    raise ValueError(f"{line.where}: there is no node {end!r} above")
            edges[parts[0], parts[1]] = line
            continue
        if len(parts) < 3:
            raise line.wrong("a node, name -- description -- " + "=..., ".join(FIELDS) + "=...")
        if parts[0] in nodes:
            raise ValueError(f"{line.where}: the node {parts[0]!r} is there twice")
        nodes[parts[0]] = _node(line, parts[0], " -- ".join(parts[1:-1]), parts[-1])
    if not nodes:
        raise ValueError(f"{file}: no nodes")
    return nodes, edges


def _node(line: Line, name: str, description: str, figures: str) -> _Node:
    given = dict(part.partition("=")[::2] for part in FIGURES.split(figures))
    for key in FIELDS:
        if key not in given:
            raise ValueError(f"{line.where}: {key} is missing; there are {', '.join(given)}")
    forward, backward, outputs, parameters = (line.part(given[key].strip(), key) for key in FIELDS)
    inner = outputs.text.removeprefix("[").removesuffix("]")
    picked = PICK.fullmatch(description)
    if description.startswith("Input"):
        return _Node(
            name=name, kind="Input", pick=None, forward_s=0.0, backward_s=0.0, outputs=(0.0,), parameter_bytes=0.0
        )
    return _Node(
        name=name,
        kind=description.partition("(")[0].strip() or name,
        pick=int(picked["index"]) if picked else None,
        forward_s=forward.value() / 1e3,
        backward_s=backward.value() / 1e3,
        outputs=tuple(line.part(each.strip(), "activation_size").value() for each in inner.split(";")),
        parameter_bytes=parameters.value(),
    )


def _edge_bytes(nodes: dict[str, _Node], tail: str, head: str, line: Line) -> float:
    outputs, pick = nodes[tail].outputs, nodes[head].pick
    if pick is None or len(outputs) == 1:
        return sum(outputs)
    if pick >= len(outputs):
        raise ValueError(f"{line.where}: {head} picks output {pick} of {tail}, which has {len(outputs)}")
    return outputs[pick]
