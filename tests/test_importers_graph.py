"""Graphs as chains, and the importers of formats that hold graphs, on small inputs written here."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import pytest

from planner import plan
from planner.cluster import Cluster, DeviceType, Link, Node
from planner.importers import dnn_partitioning, pipedream, piper
from planner.importers.graph import Segment, chain, graph_of
from planner.job import Job
from planner.profile import Cell, LayerKind, ModelProfile

# Chains -------------------------------------------------------------------------------------------------------------


def chained(edges: dict[str, float], seconds: dict[str, float] | None = None) -> list[tuple[str, float]]:
    """Layers of the graph with edges "a b", as ("members", bytes)."""
    ends = {(edge[0], edge[-1]): nbytes for edge, nbytes in edges.items()}
    nodes = dict.fromkeys((end for pair in ends for end in pair), 1.0) | (seconds or {})
    return [("".join(each.members), each.output_bytes) for each in chain(graph_of(nodes, ends, "g"))]


def test_a_chain_stays_a_chain() -> None:
    """Every node of a chain is a layer that hands its edge on."""
    assert chained({"a b": 5, "b c": 7}) == [("a", 5), ("b", 7), ("c", 0)]


def test_branches_between_two_cuts_are_one_layer() -> None:
    """a -> {b, c -> d} -> e: b runs beside c and d; behind a both branches' inputs are one tensor of a."""
    edges = {"a b": 4, "a c": 4, "c d": 2, "b e": 8, "d e": 16}
    assert chained(edges) == [("a", 4), ("bcd", 24), ("e", 0)]


def test_a_residual_edge_is_handed_on() -> None:
    """x -> b -> c -> y with x -> y: b and c stay cuts, x's tensor travels along: 3 + 10, 5 + 10."""
    assert chained({"x b": 10, "b c": 3, "c y": 5, "x y": 10}) == [("x", 10), ("b", 13), ("c", 15), ("y", 0)]


def test_tensors_count_once_however_many_use_them() -> None:
    """a's tensor is used by b, c and d: behind b it is handed on once, besides b's own."""
    assert chained({"a b": 4, "b c": 2, "a c": 4, "c d": 1, "a d": 4}) == [("a", 4), ("b", 6), ("c", 5), ("d", 0)]


def test_inputs_go_to_the_layer_that_uses_them_first() -> None:
    """A mask m for b and c is in b's layer and handed on from there; i alone feeds c. They do not hinder the cuts."""
    seconds = {"m": 0.0, "i": 0.0}
    edges = {"a b": 4, "m b": 2, "b c": 4, "m c": 2, "i c": 1}
    assert chained(edges, seconds) == [("a", 4), ("mb", 6), ("ic", 0)]


def test_a_second_encoder_is_with_its_reader() -> None:
    """What only feeds the longest path, such as a decoder's embedding (e, f), is in the layer it feeds."""
    seconds = {"a": 3.0, "b": 3.0, "c": 3.0}
    assert chained({"a b": 4, "b c": 4, "e f": 9, "f c": 9}, seconds) == [("a", 4), ("b", 4), ("efc", 0)]


def test_second_outputs_are_with_what_they_read_last() -> None:
    """o reads a and b and nothing reads o: it is in b's layer; p, which only feeds o, too."""
    seconds = {"o": 0.0, "p": 0.0}
    assert chained({"a b": 4, "b c": 4, "a o": 1, "b o": 1, "p o": 7}, seconds) == [("a", 4), ("bpo", 4), ("c", 0)]


def test_a_graph_has_to_be_one() -> None:
    """A cycle, an edge to nowhere and a graph without nodes are refused."""
    with pytest.raises(ValueError, match="g: the nodes b -> c -> b form a cycle"):
        chained({"a b": 1, "b c": 1, "c b": 1})
    with pytest.raises(ValueError, match="g: edge a -> z: there is no node 'z'"):
        graph_of({"a": 1.0}, {("a", "z"): 1.0}, "g")
    with pytest.raises(ValueError, match="g: no nodes"):
        graph_of({}, {}, "g")


@pytest.mark.parametrize("seed", range(40))
def test_every_prefix_of_a_chain_can_run(seed: int) -> None:
    """On random graphs: each node in one layer, no edge back, dominators of the sink alone, bytes as by definition."""
    draw = random.Random(seed)
    names = [f"n{i:02}" for i in range(draw.randint(2, 14))]
    edges = {
        (a, b): float(draw.randint(0, 9))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if draw.random() < draw.choice((0.15, 0.4))
    }
    graph = graph_of({name: draw.choice((0.0, 1.0, 2.0)) for name in names}, edges, "g")
    segments = chain(graph)
    layer_of = {name: i for i, segment in enumerate(segments) for name in segment.members}
    assert sorted(layer_of) == names
    assert sum(len(segment.members) for segment in segments) == len(names)
    assert all(layer_of[a] <= layer_of[b] for a, b in edges)
    for i, segment in enumerate(segments):  # bytes handed on: per producer the largest edge to a later layer
        crossing = [
            max((nbytes for (a, b), nbytes in edges.items() if a == name and layer_of[b] > i), default=0.0)
            for name in names
            if layer_of[name] <= i
        ]
        assert segment.output_bytes == pytest.approx(sum(crossing))
    if (
        len([n for n in names if not graph.in_degree(n)]) == 1
        and len([n for n in names if not graph.out_degree(n)]) == 1
    ):
        source, sink = (
            next(n for n in names if not graph.in_degree(n)),
            next(n for n in names if not graph.out_degree(n)),
        )
        parents = networkx.immediate_dominators(graph, source)
        node = sink
        while node != source:  # a node that every path passes is alone in its layer
            node = parents[node]
            assert segments[layer_of[node]] == Segment((node,), segments[layer_of[node]].output_bytes)


# PipeDream ----------------------------------------------------------------------------------------------------------
# Input -> Linear (two outputs, of which two views) -> Concat, ReLU beside nothing.


def node(name: str, description: str, forward: float, backward: float, activation: str, parameters: float) -> str:
    return (
        f"{name} -- {description} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={activation}, parameter_size={parameters}"
    )


NODES = [
    node("node1", "Input0", 500.0, 0.0, "999.0", 0.0),
    node("node2", "LSTM(8, 8)", 1.5, 3.0, "[64.0; 16.0]", 400.0),
    node("node3", "__getitem__(0)", 0.0, 0.0, "64.0", 0.0),
    node("node4", "__getitem__(1)", 0.0, 0.0, "16.0", 0.0),
    node("node5", "Linear(in_features=8, out_features=8)", 2.0, 4.5, "32.0", 260.0),
    node("node6", "Concat(2)", 0.25, 0.5, "48.0", 0.0),
]
EDGES = ["node1 -- node2", "node2 -- node3", "node2 -- node4", "node3 -- node5", "node5 -- node6", "node4 -- node6"]
TEXT = "\n".join([*NODES, *(f"\t{edge}" for edge in EDGES)]) + "\n"


def text_graph(tmp_path: Path, text: str = TEXT) -> Path:
    (tmp_path / "small").mkdir(exist_ok=True)
    (tmp_path / "small" / "graph.txt").write_text(text)
    return tmp_path / "small"


def test_pipedream_profile(tmp_path: Path) -> None:
    """A text graph becomes a chain in seconds and bytes: inputs cost nothing, views keep nothing, edges have sizes."""
    (profile,) = pipedream.profiles(text_graph(tmp_path), device="V100", micro_batch=2)
    assert profile.name == "small"
    # node4, the view of output 1, runs beside node3 and node5: {3, 4, 5} is one layer
    assert profile.members == (("node1",), ("node2",), ("node3", "node4", "node5"), ("node6",))
    assert profile.layers == ("Input", "LSTM", "Linear", "Concat")
    assert profile.kinds == (
        LayerKind(name="Input", parameters=0, output_bytes=0),
        LayerKind(name="LSTM", parameters=100, output_bytes=40),  # outputs 64 + 16, of 2 samples
        LayerKind(name="Linear", parameters=65, output_bytes=24),  # 32 + 16
        LayerKind(name="Concat", parameters=0, output_bytes=0),
    )
    assert profile.cells[1] == Cell(
        kind="LSTM", device_type="V100", tp=1, micro_batch=2, forward_s=0.0015, backward_s=0.003, activation_bytes=80
    )
    assert profile.cells[2].activation_bytes == 32  # the views are not counted again
    assert "optimizer's update was not measured" in profile.warnings[0]


def test_members_are_kept_in_the_file(tmp_path: Path) -> None:
    """A profile of a graph keeps the nodes of each layer when saved; of another profile the file has no such key."""
    (profile,) = pipedream.profiles(text_graph(tmp_path), device="V100")
    profile.save(tmp_path / "profile.json")
    assert ModelProfile.load(tmp_path / "profile.json") == profile
    data = profile.to_dict()
    without = ModelProfile.from_dict({key: value for key, value in data.items() if key != "members"})
    assert without.members == ()
    assert "members" not in without.to_dict()
    assert without.digest != profile.digest
    with pytest.raises(ValueError, match="members: of 1 layers, expected of all 4 or of none"):
        ModelProfile.from_dict({**data, "members": [["node1"]]})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.replace("backward_compute_time=4.5, ", ""), "line 5: backward_compute_time is missing"),
        (lambda t: t.replace("=4.5", "=4,5"), "line 5: backward_compute_time: '4,5' is not a number"),
        (lambda t: t.replace("=4.5", "=-4.5"), "line 5: backward_compute_time: '-4.5' is not a finite number >= 0"),
        (lambda t: t.replace("64.0; 16.0]", "64.0; ]"), "line 2: activation_size: '' is not a number"),
        (lambda t: t.replace("\tnode5 -- node6", "\tnode5 -- node9"), "line 11: there is no node 'node9' above"),
        (lambda t: t.replace("\tnode5 -- node6", "\tnode5"), "line 11: '\\tnode5' is not an edge"),
        (lambda t: t.replace("node6 -- Concat(2) -- forward", "node6 -- forward"), "line 6: 'node6 -- forward_comp"),
        (lambda t: t.replace("node6 -- Concat", "node5 -- Concat"), "line 6: the node 'node5' is there twice"),
        (lambda t: t.replace("__getitem__(1)", "__getitem__(2)"), "line 9: node4 picks output 2 of node2, which has 2"),
        (lambda t: t + "\tnode6 -- node2\n", "graph.txt: the nodes node2 -> node3 -> node5 -> node6 -> node2 form a"),
        (lambda t: "\n", "graph.txt: the file is empty"),
    ],
)
def test_damaged_text_graph_is_one_clear_error(tmp_path: Path, change: Callable[[str], str], says: str) -> None:
    """A damaged text graph is a ValueError that names the file, the line and what is wrong."""
    with pytest.raises(ValueError) as error:
        pipedream.profiles(text_graph(tmp_path, change(TEXT)), device="V100")
    assert says in str(error.value)
    assert "graph.txt" in str(error.value)


def test_pipedream_needs_a_device(tmp_path: Path) -> None:
    """The format names no device, so the user has to; a file that is not there is said."""
    with pytest.raises(
        ValueError, match="device: missing; the file does not name the device; give for example device="
    ):
        pipedream.profiles(text_graph(tmp_path))
    with pytest.raises(ValueError, match=r"graph\.txt: no such file"):
        pipedream.profiles(tmp_path, device="V100")


# Piper --------------------------------------------------------------------------------------------------------------
# Input 0 and layers 1, 2; at tp 2 the layers take more than half the time.


def way(name: str, seconds: float, weights: float, a: float, b: float) -> dict[str, Any]:
    return {
        "id": name, "timePerSample": seconds, "parameterSize": weights, "memoryUsageA": a, "memoryUsageB": b,
        "syncTimeFw": {}, "syncTimeBw": {},
    }  # fmt: skip


def layer_node(number: int, name: str) -> dict[str, Any]:
    return {
        "id": number,
        "name": name,
        "TMPCs": {
            "1": [way("vanilla", 0.03, 4000.0, 900.0, 8000.0), way("activation recomp", 0.04, 4000.0, 100.0, 9150.0)],
            "2": [way("vanilla", 0.02, 2004.0, 500.0, 4008.0), way("activation recomp", 0.026, 2004.0, 100.0, 4508.0)],
        },
    }


PIPER: dict[str, Any] = {
    "maxDevices": 3,
    "maxMemoryPerDevice": 16 * 2.0**30,
    "bandwidth": 25e9,
    "mbsInBatch": 8,
    "nodes": [
        {
            "id": 0,
            "name": "tensor",
            "TMPCs": {tp: [way("vanilla", 0.0, 0.0, 64.0, 0.0)] for tp in ("1", "2")},
        },
        layer_node(1, "Layer"),
        layer_node(2, "Layer"),
    ],
    "edges": [
        {"sourceId": 0, "destId": 1, "communicationCost": 64.0},
        {"sourceId": 1, "destId": 2, "communicationCost": 128.0},
    ],
}


def saved(tmp_path: Path, content: Any, name: str = "small.json") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_piper_profile(tmp_path: Path) -> None:
    """Recomputing takes one more forward: 0.04 - 0.03; memory a is kept, b is twice the weights and temporary."""
    (profile,) = piper.profiles(saved(tmp_path, PIPER), device="A100")
    assert profile.layers == ("tensor", "Layer", "Layer-2")  # the last hands nothing on
    assert profile.members == (("0 tensor",), ("1 Layer",), ("2 Layer",))
    assert profile.kinds[1] == LayerKind(
        name="Layer", parameters=1000, shard_parameters=((2, 501),), output_bytes=128, recomputable=True
    )
    # 9150 - 8000 - 900: what recomputing takes on top of the activations it makes again
    cell = next(c for c in profile.cells if (c.kind, c.tp) == ("Layer", 1))
    assert (cell.forward_s, cell.backward_s) == (pytest.approx(0.01), pytest.approx(0.02))
    assert (cell.micro_batch, cell.activation_bytes, cell.workspace_bytes) == (1, 900, 250)
    assert profile.degrees("A100") == (1, 2)
    assert profile.conditions.tp_communication == "inside"
    assert not any("backward taken" in warning for warning in profile.warnings)
    assert not profile.kinds[0].recomputable


def test_piper_with_one_way_to_run(tmp_path: Path) -> None:
    """Without a recomputed time the sum is split by the factor, which the profile says."""
    content = copy.deepcopy(PIPER)
    for each in content["nodes"]:
        for ways in each["TMPCs"].values():
            del ways[1:]
    (profile,) = piper.profiles(saved(tmp_path, content), device="A100", backward_factor=3.0)
    cell = next(c for c in profile.cells if (c.kind, c.tp) == ("Layer", 1))
    assert (cell.forward_s, cell.backward_s) == (pytest.approx(0.0075), pytest.approx(0.0225))
    assert "backward taken as 3 x forward for 4 of the measurements" in profile.warnings


def test_piper_unit(tmp_path: Path) -> None:
    """A node of more than a second is refused until the unit is stated; milliseconds are then read as such."""
    content = copy.deepcopy(PIPER)
    for each in content["nodes"]:
        for ways in each["TMPCs"].values():
            for option in ways:
                option["timePerSample"] *= 1e3
    path = saved(tmp_path, content)
    with pytest.raises(ValueError, match=r"nodes > 1 > TMPCs > 1 > 0 > timePerSample: 30 s .*state it.* unit=ms"):
        piper.profiles(path, device="A100")
    (profile,) = piper.profiles(path, device="A100", unit="ms")
    (same,) = piper.profiles(saved(tmp_path, PIPER, "s.json"), device="A100")
    assert [cell.forward_s for cell in profile.cells] == pytest.approx([cell.forward_s for cell in same.cells])


def test_piper_cluster(tmp_path: Path) -> None:
    """The devices of a workload, in nodes of a size, with its one bandwidth."""
    cluster = piper.cluster(saved(tmp_path, PIPER), device="A100", node_size=2)
    assert [len(node.devices) for node in cluster.nodes] == [2, 1]
    assert cluster.device_types[0].memory_bytes == 16 * 2**30
    assert cluster.nodes[0].link == cluster.links[0].link == Link(bytes_per_s=25e9)


Change = Callable[[dict[str, Any]], object]


def put(*keys: str | int, value: object) -> Change:
    def change(content: dict[str, Any]) -> None:
        inner: Any = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("nodes"), "small.json: key 'nodes' is missing; there are maxDevices"),
        (put("nodes", 1, "id", value=2), "nodes > 2: id 2 is there twice"),
        (lambda c: c["nodes"][1]["TMPCs"]["1"][0].pop("memoryUsageA"), "TMPCs > 1 > 0: key 'memoryUsageA' is missing"),
        (put("nodes", 1, "TMPCs", "1", 0, "parameterSize", value=-1), "parameterSize: -1 is not a finite number"),
        (put("nodes", 1, "TMPCs", "one", value=[]), "nodes > 1 > TMPCs: key 'one' is not a whole number"),
        (put("nodes", 1, "TMPCs", "1", value=[]), "TMPCs > 1: [] is not a list of one way to run, or of two"),
        (put("edges", 1, "destId", value=7), "edges > 1 > destId: there is no node 7"),
        (put("edges", 1, "destId", value=0), "small.json: the nodes 0 -> 1 -> 0 form a cycle"),
        (lambda c: c["nodes"][0]["TMPCs"].clear(), "nodes > 0: TMPCs is empty"),
    ],
)
def test_damaged_piper_file_is_one_clear_error(tmp_path: Path, change: Change, says: str) -> None:
    """A damaged workload is a ValueError that names the file and the keys; a truncated one its line."""
    content = copy.deepcopy(PIPER)
    change(content)
    with pytest.raises(ValueError, match=re.escape(says)):
        piper.profiles(saved(tmp_path, content), device="A100")
    with pytest.raises(ValueError, match=r"small\.json: line 1 column"):
        piper.profiles(saved(tmp_path, json.dumps(PIPER)[:300]), device="A100")


# dnn-partitioning ---------------------------------------------------------------------------------------------------
# Forward w -> 1 -> 2 -> 3 (w holds weights), backward 13 -> 12 -> 11 of the same colours, and a loss 20 of its own.


def operator(number: int, fpga: float, size: float, colour: int | None, backward: bool = False) -> dict[str, Any]:
    entry = {
        "name": f"op{number}", "id": number, "supportedOnFpga": 1, "cpuLatency": 10 * fpga, "fpgaLatency": fpga,
        "isBackwardNode": backward, "size": size,
    }  # fmt: skip
    return entry if colour is None else {**entry, "colorClass": colour}


def edge(tail: int, head: int, size: float) -> dict[str, Any]:
    return {"sourceId": tail, "destId": head, "size": size, "cost": size / 2e6}  # ms at 2 GB/s


FORWARD = [
    operator(5, 0.0, 4000.0, 1),
    operator(1, 2.0, 400.0, 1),
    operator(2, 3.0, 840.0, 2),
    operator(3, 4.0, 100.0, 3),
]
WORKLOAD: dict[str, Any] = {
    "maxSizePerFPGA": 16e9,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        *FORWARD,
        operator(13, 8.0, 100.0, 3, True),
        operator(12, 6.0, 840.0, 2, True),
        operator(11, 4.0, 400.0, 1, True),
        operator(20, 1.0, 8.0, None, True),
    ],
    "edges": [
        edge(5, 1, 4000.0), edge(1, 2, 400.0), edge(2, 3, 440.0), edge(3, 20, 40.0),
        edge(20, 13, 8.0), edge(13, 12, 440.0), edge(12, 11, 400.0),
    ],
}  # fmt: skip


def test_dnn_partitioning_training(tmp_path: Path) -> None:
    """Backward nodes join the forward node of their colour, or what they read; size is output and weights."""
    (profile,) = dnn_partitioning.profiles(saved(tmp_path, WORKLOAD))
    assert profile.members == (("op5", "op1"), ("op2",), ("op3",))
    # 4000 bytes of weights in op5, 0 in op1; 840 - 440 in op2; op3 puts out 40 of 100
    assert [kind.parameters for kind in profile.kinds] == [1000, 100, 15]
    assert [kind.output_bytes for kind in profile.kinds] == [400, 440, 0]
    cells = {(c.kind, c.device_type): c for c in profile.cells}
    assert cells["op3", "accelerator"].forward_s == pytest.approx(0.004)
    assert cells["op3", "accelerator"].backward_s == pytest.approx(0.009)  # 8 ms and the loss
    assert cells["op1", "cpu"].backward_s == pytest.approx(0.04)
    assert cells["op2", "accelerator"].activation_bytes == 440
    with pytest.raises(ValueError, match=r"backward_factor: 2.0 given, but small\.json has backward nodes of its own"):
        dnn_partitioning.profiles(saved(tmp_path, WORKLOAD), backward_factor=2.0)


def inference() -> dict[str, Any]:
    content = copy.deepcopy(WORKLOAD)
    content["nodes"] = content["nodes"][:4]
    content["edges"] = content["edges"][:3]
    return content


def test_dnn_partitioning_inference_needs_a_factor(tmp_path: Path) -> None:
    """Without backward nodes the user says what a backward pass takes; the profile says that it was said."""
    path = saved(tmp_path, inference())
    with pytest.raises(ValueError, match=r"backward_factor: missing; small\.json has no backward nodes"):
        dnn_partitioning.profiles(path)
    (profile,) = dnn_partitioning.profiles(path, backward_factor=2.0, accelerator="FPGA")
    assert next(c for c in profile.cells if c.device_type == "FPGA").backward_s == pytest.approx(0.004)
    assert "inference was profiled: backward taken as 2 x forward" in profile.warnings


def test_the_factor_is_on_every_plan(tmp_path: Path) -> None:
    """A gap that was filled by a factor is a warning of each plan made from the profile."""
    (profile,) = dnn_partitioning.profiles(saved(tmp_path, inference()), backward_factor=2.0)
    cluster = Cluster(
        name="one",
        device_types=(DeviceType(name="accelerator", memory_bytes=16 * 2**30),),
        nodes=(Node(name="n", devices=("accelerator",)),),
    )
    made = plan(profile, cluster, Job(global_batch=4), effort=0.1)
    assert any("backward taken as 2 x forward" in warning for warning in made.warnings)


def test_colours_stay_together(tmp_path: Path) -> None:
    """Nodes of one colour are in one layer, and with them everything between: op1 and op3 take op2 along."""
    content = inference()
    content["nodes"][3]["colorClass"] = 1
    (profile,) = dnn_partitioning.profiles(saved(tmp_path, content), backward_factor=0.0)
    assert profile.members == (("op5", "op1", "op2", "op3"),)


def test_dnn_partitioning_cluster(tmp_path: Path) -> None:
    """Costs in ms are 2 GB/s; costs in s would be 2 TB/s in ms, so they are taken for seconds, and that is noted."""
    cluster = dnn_partitioning.cluster(saved(tmp_path, WORKLOAD), cpu_memory_gb=64)
    assert [node.devices for node in cluster.nodes] == [("accelerator",) * 2, ("cpu",)]
    assert cluster.link(*cluster.devices[:2]).bandwidth(1e6) == pytest.approx(2e9)
    content = copy.deepcopy(WORKLOAD)
    for each in content["edges"]:
        each["cost"] /= 1e3
    cluster = dnn_partitioning.cluster(saved(tmp_path, content))
    assert cluster.types == ("accelerator",)
    assert cluster.link(*cluster.devices[:2]).bandwidth(1e6) == pytest.approx(2e9)
    assert "costs of edges in s" in cluster.notes[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("nodes", 2, "supportedOnFpga", value="yes"), "supportedOnFpga: 'yes' is not true, false, 1 or 0"),
        (put("nodes", 2, "id", value=1), "nodes > 2: id 1 is there twice"),
        (lambda c: c["nodes"][2].pop("fpgaLatency"), "nodes > 2: key 'fpgaLatency' is missing"),
        (put("edges", 2, "size", value=None), "edges > 2 > size: None is not a number"),
        (put("edges", 2, "sourceId", value=9), "edges > 2 > sourceId: there is no node 9"),
        (put("edges", 2, "destId", value=1), "small.json: the nodes 1 -> 2 -> 1 form a cycle"),
        (put("nodes", value=[]), "small.json: no forward node"),
    ],
)
def test_damaged_workload_is_one_clear_error(tmp_path: Path, change: Change, says: str) -> None:
    """A damaged workload is a ValueError that names the file and the keys."""
    content = copy.deepcopy(WORKLOAD)
    if "no forward" in says:
        content["edges"] = []
    change(content)
    with pytest.raises(ValueError) as error:
        dnn_partitioning.profiles(saved(tmp_path, content))
    assert says in str(error.value)
