"""What people ran into with other systems: the cases of the project's case list that concern planning, by their id.

Unless a test says otherwise: equal layers of 1 s forward and 2 s backward on a device of speed 1, `size` bytes of model
state (one byte per parameter, gradients and optimizer included), no activations, no margin, no context, links of 10
GB/s inside and 1 GB/s between nodes. "Memory of n" holds n such layers.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import cost
from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.cost import DeviceClass
from planner.importers import sailor
from planner.job import BytesPerParameter, Job
from planner.plans import GIB, Infeasible, Plan
from planner.profile import Cell, Conditions, LayerKind, ModelProfile
from planner.search import plan
from planner.stage_split import Template

GB = 10**9
SIZE = GB // 10
INSIDE, NETWORK = Link(bytes_per_s=10 * GB), Link(bytes_per_s=1 * GB)
PLAIN = Job(
    recompute=False,
    memory_margin=0.0,
    context_bytes=0,
    tp_context_bytes=0,
    sync_buffer_bytes=0,
    bytes_per_parameter=BytesPerParameter(weights=1, gradients=0, optimizer=0),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """`count` equal layers: parameters in units of `SIZE`, forward seconds, bytes per sample."""

    name: str
    count: int = 1
    size: float = 1.0
    forward_s: float = 1.0
    backward: float = 2.0
    kept: float = 0.0
    workspace: float = 0.0
    output_bytes: int = 1000
    kind: Mapping[str, Any] | None = None


def model(
    *rows: Row,
    speeds: Mapping[str, float] | None = None,
    tps: Mapping[int, float] | None = None,
    micro_batches: Iterable[int] = (1,),
    **others: Any,
) -> ModelProfile:
    """Layers on device types of different speed; `tps` gives how many times faster each tp degree is."""
    cells = [
        Cell(
            kind=row.name,
            device_type=name,
            tp=tp,
            micro_batch=b,
            forward_s=row.forward_s * b / speed / gain,
            backward_s=row.forward_s * row.backward * b / speed / gain,
            activation_bytes=round(row.kept * SIZE * b / tp),
            workspace_bytes=round(row.workspace * SIZE * b / tp),
        )
        for row in rows
        for name, speed in (speeds or {"gpu": 1.0}).items()
        for tp, gain in (tps or {1: 1.0}).items()
        for b in micro_batches
    ]
    kinds = (
        LayerKind(name=r.name, parameters=round(r.size * SIZE), output_bytes=r.output_bytes, **(r.kind or {}))
        for r in rows
    )
    return ModelProfile(
        name="case",
        layers=tuple(row.name for row in rows for _ in range(row.count)),
        kinds=tuple({kind.name: kind for kind in kinds}.values()),
        cells=tuple({(c.kind, c.device_type, c.tp, c.micro_batch): c for c in cells}.values()),
        conditions=others.pop("conditions", Conditions()),
        **others,
    )


def blocks(count: int, **fields: Any) -> Row:
    return Row(name="block", count=count, **fields)


def devices(
    *nodes: Mapping[str, int] | Node | Sequence[str],
    memory: float | Mapping[str, float] = 1000.0,
    network: Link = NETWORK,
    links: Sequence[NetworkLink] = (),
) -> Cluster:
    """Nodes as {"gpu": 4}, as device types by index, or whole; memory in units of `SIZE`, and 1 % for inputs."""
    made = []
    for i, node in enumerate(nodes):
        if not isinstance(node, Node):
            names = node if not isinstance(node, Mapping) else [name for name, n in node.items() for _ in range(n)]
            node = Node(name=f"n{i}", devices=tuple(names), link=INSIDE)
        made.append(node)
    types = sorted({name for node in made for name in node.devices})
    room = memory if isinstance(memory, Mapping) else dict.fromkeys(types, memory)
    return Cluster(
        name="case",
        device_types=tuple(
            DeviceType(name=name, memory_bytes=round(room[name] * SIZE) + SIZE // 100) for name in types
        ),
        nodes=tuple(made),
        links=(*links, NetworkLink(between=("*", "*"), link=network)),
    )


def solved(profile: ModelProfile, cluster: Cluster, job: Job | None = None, **fields: Any) -> Plan:
    """The plan, after the check: every layer once per pipeline, in order, within memory, on devices that exist."""
    job = replace(job or PLAIN, **fields)
    found = plan(profile, cluster, job)
    assert found.problems(profile, cluster, job) == ()
    assert found.lower_bound_s <= found.predicted.iteration_s * (1 + 1e-9)
    return found


def counts(found: Plan, p: int = 0) -> list[int]:
    """Layers of each stage of a pipeline."""
    return [stage.num_layers for stage in found.pipelines[p].stages]


def only(found: Plan) -> list[int]:
    """The same of the only pipeline."""
    assert len(found.pipelines) == 1
    return counts(found)


# Any number of layers on any number of devices --------------------------------------------------------------------


def test_n01_layers_need_not_divide() -> None:
    """N01: 7 layers on 2 devices that hold 4 are cut 3 + 4 or 4 + 3."""
    assert sorted(only(solved(model(blocks(7)), devices({"gpu": 2}, memory=4), global_batch=8))) == [3, 4]


def test_n02_no_layer_is_lost() -> None:
    """N02: 30 layers on 4 devices that hold 8: every layer exactly once, 8 at most."""
    found = only(solved(model(blocks(30)), devices({"gpu": 4}, memory=8), global_batch=16))
    assert sum(found) == 30 and max(found) == 8


def test_n03_more_stages_than_the_layers_divide_into() -> None:
    """N03: 40 layers on 16 devices that hold 3: every layer once, 2 or 3 a stage, 14 stages at least."""
    found = only(solved(model(blocks(40)), devices({"gpu": 8}, {"gpu": 8}, memory=3), global_batch=32))
    assert sum(found) == 40 and max(found) == 3 and len(found) >= 14


def test_n05_every_stage_gets_a_layer() -> None:
    """N05: 42 layers on 16 nodes of 4 with tp 4: 1 to 3 layers a stage; nodes that are not needed are said idle."""
    cluster = devices(*[{"gpu": 4}] * 16, memory=0.75)
    found = solved(model(blocks(42), tps={4: 3.0}), cluster, global_batch=32)
    assert sum(only(found)) == 42 and max(only(found)) == 3 and min(only(found)) >= 1
    assert len(found.idle_devices) == 4 * (16 - len(only(found)))


def test_n06_a_prime_number_of_layers_over_nodes() -> None:
    """N06: 46 layers over 4 nodes of 8 with tp 8, embedding and head of half a layer: 11 or 12 blocks a stage."""
    rows = [Row(name="embedding", forward_s=0.1), blocks(46), Row(name="head", forward_s=0.5)]
    found = only(solved(model(*rows, tps={8: 5.0}), devices(*[{"gpu": 8}] * 4, memory=13 / 8), global_batch=32))
    assert len(found) == 4 and sorted([found[0] - 1, *found[1:-1], found[-1] - 1]) == [11, 11, 12, 12]


def test_n07_the_remainder_is_not_dumped_on_the_last_stage() -> None:
    """N07: 27 layers on 4 devices that hold 9: 7 at most, also on the last stage."""
    found = only(solved(model(blocks(27)), devices({"gpu": 4}, memory=9), global_batch=16))
    assert max(found) == 7 and sum(found) == 27


def test_n08_a_head_that_weighs_three_layers_may_stand_alone() -> None:
    """N08: 6 layers and a head of 3 s (F) on 4 devices that hold two layers or a head: 2, 2, 2 and the head alone."""
    rows = [blocks(6), Row(name="head", forward_s=3.0, size=2.0)]
    assert only(solved(model(*rows), devices({"gpu": 4}, memory=2), global_batch=8)) == [2, 2, 2, 1]


def test_n10_two_kinds_of_layers_without_a_friendly_divisor() -> None:
    """N10: 3 dense layers of 3 s and 58 sparse of 1 s on 8 devices: 9 s (F) at most, the dense ones alone.

    8 s on each of 8 devices would be 64 of the 67.
    """
    rows = [Row(name="dense", count=3, forward_s=3.0), Row(name="sparse", count=58)]
    found = solved(model(*rows), devices({"gpu": 8}, memory=11), global_batch=64)
    assert sum(only(found)) == 61 and max(s.forward_s for s in found.stages) == pytest.approx(9)
    assert found.stages[0].layers[1] <= 3


# The ends and memory ----------------------------------------------------------------------------------------------


def test_n13_a_stage_of_the_embedding_alone() -> None:
    """N13: embedding and head, tied, as large as 3 layers on devices of 3: each end alone, with a longer memory bar."""
    head = Row(name="head", size=3, forward_s=0.5, kind={"tied_to": "embedding", "tied_parameters": 3 * SIZE})
    rows = [Row(name="embedding", size=3, forward_s=0.1), blocks(4), head]
    found = solved(model(*rows), devices({"gpu": 4}, memory=3), global_batch=8)
    assert only(found) == [1, 2, 2, 1]
    weights = [stage.memory.weights for stage in found.stages]
    assert min(weights[0], weights[-1]) > max(weights[1:-1])


def test_n14_time_is_balanced_and_not_parameters() -> None:
    """N14: embedding 0.05 s, 24 blocks of 1 s, head 1.5 s, parameters all alike, on 4 devices.

    7 s at most: the head's stage has 5 blocks (6.5 s) or fewer; 6 each would make 7.5 s.
    """
    rows = [Row(name="embedding", forward_s=0.05), blocks(24), Row(name="head", forward_s=1.5)]
    found = solved(model(*rows), devices({"gpu": 4}, memory=8), global_batch=32)
    assert max(stage.forward_s for stage in found.stages) == pytest.approx(7)
    assert only(found)[-1] - 1 <= 5


def test_n15_ends_are_lighter_than_the_middle_when_memory_binds() -> None:
    """N15: 8 stages that hold 4 layers, embedding and head of 2 layers: 2 blocks at each end, 3 or 4 in the middle."""
    rows = [Row(name="embedding", size=2, forward_s=0.1), blocks(26), Row(name="head", size=2, forward_s=0.5)]
    found = only(solved(model(*rows), devices({"gpu": 8}, memory=4), global_batch=64))
    assert found[0] - 1 <= 2 and found[-1] - 1 <= 2 and max(found[1:-1]) == 4 and sum(found) == 28


def test_n16_the_last_node_is_not_the_fullest() -> None:
    """N16: 61 layers and a head worth 8 in time and 6 in bytes on 3 nodes of 8 with tp 8: 23, 23, and 15 with the head.

    69 / 3 = 23 s (F over the gain of tp); in bytes the last holds 21, the others 23 of 24.
    """
    rows = [blocks(61), Row(name="head", size=6, forward_s=8.0)]
    found = solved(model(*rows, tps={8: 5.0}), devices(*[{"gpu": 8}] * 3, memory=3), global_batch=32)
    full = [stage.memory.total for stage in found.stages]
    assert only(found) == [23, 23, 16] and full[-1] < min(full[:-1])


def test_n17_tied_embeddings_cost_a_copy_and_a_sync_only_on_two_stages() -> None:
    """N17: tied ends of 1 GB on two devices: 1 GB more on the last, one all-reduce of 1 GB over two; on one nothing.

    2 (2 - 1) steps of 0.5 GB at 10 GB/s: 0.1 s.
    """
    fields = {"tied_to": "embedding", "tied_parameters": GB}
    rows = [Row(name="embedding", size=10), blocks(8), Row(name="head", size=10, kind=fields)]
    job = replace(PLAIN, bytes_per_parameter=BytesPerParameter(weights=1, gradients=1, optimizer=0), global_batch=64)
    job = replace(job, sync="exposed", sync_granularity="model")
    two = solved(model(*rows), devices({"gpu": 2}, memory=30), job)
    assert only(two) == [5, 5]
    assert [stage.memory.weights for stage in two.stages] == [GB + 4 * SIZE] * 2
    assert [stage.sync_s for stage in two.stages] == pytest.approx([0.1, 0.1])
    assert two.predicted.sync_s == pytest.approx(0.1)
    one = solved(model(*rows), devices({"gpu": 1}, memory=60), job)
    assert one.stages[0].memory.weights == GB + 8 * SIZE and one.predicted.sync_s == 0


def test_n18_logits_have_their_own_bar() -> None:
    """N18: 8192 tokens x 151,936 words x 4 bytes are 4.64 GiB a copy, counted on the last stage as logits."""
    rows = [blocks(4), Row(name="head", kind={"logits_bytes": 8192 * 151_936 * 4})]
    found = solved(model(*rows), devices({"gpu": 2}, memory=60), global_batch=8, max_depth=2)
    for pipeline in found.pipelines:
        for s, stage in enumerate(pipeline.stages):
            copies = stage.in_flight if s == len(pipeline.stages) - 1 else 0
            assert stage.memory.logits / GIB == pytest.approx(4.64 * copies, abs=0.005 * max(copies, 1))


def test_n19_memory_can_be_flattened() -> None:
    """N19: ends of 56 % and 32 layers of 5.125 % fill four devices 97/41/41/97 % if cut evenly, here below 75 %.

    276 % in all, 69 % each; beside an end 3 layers fit (71.4 %), in the middle 13 (66.6 %).
    """
    rows = [Row(name="embedding", size=56, forward_s=0.1), blocks(32, size=5.125), Row(name="head", size=56)]
    found = solved(model(*rows), devices({"gpu": 4}, memory=100), global_batch=32, memory_margin=0.25)
    assert only(found) == [4, 13, 13, 4]
    assert max(stage.memory.fraction for stage in found.stages) < 0.75


def test_n42_memory_falls_along_equal_stages() -> None:
    """N42: 8 equal stages that keep activations hold min(8 - s, m) micro-batches, and so less and less."""
    cluster = devices({"gpu": 8}, memory=10)
    for m in (3, 16):
        found = solved(model(blocks(8, size=6, kept=0.5)), cluster, global_batch=m)
        assert only(found) == [1] * 8
        assert [stage.in_flight for stage in found.stages] == [min(8 - s, m) for s in range(8)]
        assert [stage.memory.activations for stage in found.stages] == pytest.approx(
            [min(8 - s, m) * SIZE / 2 + (s > 0) * min(8 - s, m) * 1000 for s in range(8)]
        )


def test_n46_the_working_set_of_recomputation_counts() -> None:
    """N46: a layer keeps 4 and 2 are in flight on the first of two devices: 8 with its weights of 1 need 9.

    Recomputed it holds its weights, hardly any inputs and the working set of 4: 5 and a little. Memory of 6 fits.
    """
    profile = model(blocks(2, kept=4))
    found = solved(profile, devices({"gpu": 2}, memory=6), global_batch=2, recompute=True)
    assert found.pipelines[0].stages[0].recompute and found.stages[0].memory.workspace == 4 * SIZE
    with pytest.raises(Infeasible):
        plan(profile, devices({"gpu": 2}, memory=4.9), replace(PLAIN, global_batch=2, recompute=True))


def test_n49_a_layer_larger_than_every_card_is_named() -> None:
    """N49: a layer of 13 GB on cards of 12 GB: infeasible, names the layer, the device and the GB short."""
    rows = [blocks(3), Row(name="giant", size=130)]
    with pytest.raises(Infeasible) as raised:
        plan(model(*rows), devices({"gpu": 4}, memory=120), replace(PLAIN, global_batch=8))
    assert raised.value.layer == 3 and raised.value.device_type == "gpu"
    assert raised.value.short_bytes == pytest.approx(1 * GB, rel=0.01)
    assert "giant" in str(raised.value)


def test_n49_the_margin_is_a_parameter() -> None:
    """N49: a layer of 11.5 GB fits a card of 12 GB with a margin of 4 %, not with one of 5 %."""
    profile, cluster = model(blocks(2, size=115)), devices({"gpu": 2}, memory=120)
    assert only(solved(profile, cluster, global_batch=2, memory_margin=0.04)) == [1, 1]
    with pytest.raises(Infeasible):
        plan(profile, cluster, replace(PLAIN, global_batch=2, memory_margin=0.05))


def test_n55_nothing_fits_names_the_stage_and_the_bytes() -> None:
    """N55: 8 layers on 2 devices of 3: a stage has to hold 4, 0.1 GB short there; each layer alone would fit."""
    with pytest.raises(Infeasible) as raised:
        plan(model(blocks(8)), devices({"gpu": 2}, memory=3), replace(PLAIN, global_batch=8))
    why = raised.value
    assert why.stage in (0, 1) and why.device_type == "gpu" and why.remedy
    assert why.short_bytes == pytest.approx(0.1 * GB, rel=0.02)
    assert "short" in str(why)


def test_n59_a_frozen_base_needs_little_more_than_its_weights() -> None:
    """N59: a frozen base takes 2 of the 18 bytes a parameter of mixed Adam and is not synced; B as measured."""
    frozen = {"trainable": False}
    rows = [blocks(4, backward=1.0, kind=frozen), Row(name="adapter", size=0.01, backward=1.0)]
    job = replace(PLAIN, bytes_per_parameter=None, global_batch=8)
    found = solved(model(*rows), devices({"gpu": 1}, {"gpu": 1}, memory=10), job)
    assert len(found.pipelines) == 2
    for stage in found.stages:
        memory = stage.memory
        assert memory.weights == 4 * SIZE * 2 + SIZE // 100 * 2
        assert memory.gradients == SIZE // 100 * 4 and memory.optimizer == SIZE // 100 * 12
        assert stage.backward_s == pytest.approx(stage.forward_s)
        assert stage.sync_s == pytest.approx(SIZE / 100 * 4 / GB)  # 2 (2 - 1) steps of half the adapter's gradients
    with pytest.raises(Infeasible):
        plan(model(replace(rows[0], kind={}), rows[1]), devices({"gpu": 1}, memory=10), job)


def test_n59_frozen_and_tied_ends() -> None:
    """N59: a frozen base whose head is its embedding: in one stage the weights count once, and neither end is synced.

    Bytes a parameter: 2 of an end of 10 layers' size, 18 of each of the two layers: 20 + 36 = 56 on a device, 76 if the
    ends were not tied. Cut in two, 20 + 18 = 38 each, and no ring between the two copies.
    """
    tied = {"tied_to": "embedding", "tied_parameters": 10 * SIZE, "trainable": False}
    ends = [Row(name="embedding", size=10, kind={"trainable": False}), Row(name="head", size=10, kind=tied)]
    profile, job = model(ends[0], blocks(2), ends[1]), replace(PLAIN, bytes_per_parameter=None, global_batch=8)
    twice = solved(profile, devices({"gpu": 2}, memory=57), job)
    assert [stage.memory.weights for stage in twice.stages] == [2 * (10 + 2) * SIZE] * 2 and len(twice.pipelines) == 2
    cut = solved(profile, devices({"gpu": 2}, memory=39), job)
    assert only(cut) == [2, 2] and [stage.sync_s for stage in cut.stages] == [0, 0]


def test_n60_a_vision_tower_is_split_where_its_activations_ask_for_it() -> None:
    """N60: 24 tower layers with large activations and 32 blocks of twice the time on 4 devices: tower only on stage 0.

    44 s (F) in all. With 4 in flight a tower layer takes 0.5 + 4 x 0.2 = 1.3 of 24: 18 fit, 9 s, 35 s on three devices:
    12 s at most.
    """
    rows = [Row(name="tower", count=24, forward_s=0.5, size=0.5, kept=0.2), blocks(32)]
    found = solved(model(*rows), devices({"gpu": 4}, memory=24), global_batch=64)
    assert sum(only(found)) == 56 and max(stage.forward_s for stage in found.stages) == pytest.approx(12)
    assert 0 < found.stages[0].layers[1] <= 18


# Unequal devices --------------------------------------------------------------------------------------------------


def test_n21_a_device_too_slow_to_help_is_left_out_and_named() -> None:
    """N21: three laptops on 1 Gb/s, the third 20 times as slow as the first: its share would hold the others up."""
    speeds = {"4060": 1.0, "1080": 0.6, "960": 0.05}
    profile = model(blocks(12, output_bytes=SIZE), speeds=speeds)
    cluster = devices(*({name: 1} for name in speeds), memory=8, network=Link(bytes_per_s=1.25e8))
    found = solved(profile, cluster, global_batch=8)
    assert found.idle_devices == ("n2:0",) and "n2:0" in str(found)


def test_n22_unequal_cards_take_unequal_shares_of_the_batch() -> None:
    """N22: a 3090 of 24 GB and a 3060 of 12 GB, half as fast, one replica each: 2/3 and 1/3 of the batch exactly."""
    profile = model(blocks(4, kept=1), speeds={"3090": 1.0, "3060": 0.5}, micro_batches=(1, 2))
    cluster = devices({"3090": 1}, {"3060": 1}, memory={"3090": 24, "3060": 12})
    found = solved(profile, cluster, global_batch=12)
    assert {p.stages[0].device_type: p.samples for p in found.pipelines} == {"3090": 8, "3060": 4}
    # a batch that does not divide is shared exactly all the same
    assert sum(p.samples for p in solved(profile, cluster, global_batch=13).pipelines) == 13


def test_n24_a_small_card_gets_about_half_the_layers() -> None:
    """N24: 7 cards of 24 GB and one of 12 GB, 30 layers of 6 GB: 4 layers on each large card, 2 on the small one."""
    cluster = devices(["big"] * 7 + ["small"], memory={"big": 240, "small": 120})
    profile = model(blocks(30, size=60), speeds={"big": 1.0, "small": 1.0})
    found = solved(profile, cluster, global_batch=32)
    assert sorted(only(found)) == [2] + [4] * 7
    assert next(s.num_layers for s in found.stages if s.device_type == "small") == 2


def test_n26_tp_may_differ_from_stage_to_stage() -> None:
    """N26: nodes of 4, 1, 2, 1 devices that hold 2 layers each, 16 layers, one micro-batch: a tp group on each.

    One micro-batch makes perfect tp the fastest: 8/4 + 2 + 4/2 + 2 layers one after the other.
    """
    cluster = devices(*({"gpu": n} for n in (4, 1, 2, 1)), memory=2)
    found = solved(model(blocks(16), tps={1: 1.0, 2: 2.0, 4: 4.0}), cluster, global_batch=1)
    assert sorted(stage.tp for stage in found.stages) == [1, 1, 2, 4]
    assert sorted(zip((s.tp for s in found.stages), only(found), strict=True)) == [(1, 2), (1, 2), (2, 4), (4, 8)]


def test_n27_tp_groups_are_of_one_kind_in_a_node_of_interleaved_kinds() -> None:
    """N27: 4 big and 4 small by turns in one node, tp 2: groups of one kind, and the plan prints which devices."""
    cluster = devices(["big", "small"] * 4, memory={"big": 8, "small": 4})
    profile = model(blocks(40), speeds={"big": 2.0, "small": 1.0}, tps={2: 1.8})
    found = solved(profile, cluster, global_batch=32)
    for stage in found.stages:
        parity = {int(name.split(":")[1]) % 2 for name in stage.devices}
        assert parity == ({0} if stage.device_type == "big" else {1}) and len(stage.devices) == 2
    assert "n0:" in str(found)


@pytest.mark.parametrize("sizes", [(2, 3, 3), (8, 2), (4, 1)])
@pytest.mark.parametrize("tps", [{1: 1.0}, {1: 1.0, 2: 1.8}], ids=["tp1", "tp2"])
def test_n29_uneven_nodes_are_used_as_they_are(sizes: Sequence[int], tps: Mapping[int, float]) -> None:
    """N29: nodes of (2, 3, 3), (8, 2) and (4, 1), as many layers as the devices hold: all devices are used."""
    total = sum(sizes)
    found = solved(model(blocks(2 * total), tps=tps), devices(*({"gpu": n} for n in sizes), memory=2), global_batch=16)
    assert found.idle_devices == () and len(found.devices) == total


def test_n29_uneven_nodes_of_unequal_kinds() -> None:
    """N29: 12 layers on 4 fast devices and one at a third of the speed: 3 each, the slow one 1 at most."""
    profile = model(blocks(12), speeds={"fast": 3.0, "slow": 1.0})
    found = solved(profile, devices({"fast": 4}, {"slow": 1}, memory=3), global_batch=64)
    by_type = {t: [s.num_layers for s in found.stages if s.device_type == t] for t in ("fast", "slow")}
    assert sorted(by_type["fast"]) in ([2, 3, 3, 3], [3, 3, 3, 3]) and sum(by_type["slow"]) <= 1


def test_n30_seven_devices() -> None:
    """N30: 7 devices of one layer and 7 layers: 7 stages. 6 layers: 6 stages, and one device is said to be idle."""
    cluster = devices({"gpu": 7}, memory=1)
    assert only(solved(model(blocks(7)), cluster, global_batch=8)) == [1] * 7
    found = solved(model(blocks(6)), cluster, global_batch=8)
    assert only(found) == [1] * 6 and len(found.idle_devices) == 1


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(40, None, 3), (52, 4, 3), (40, 8, 6), (64, 8, 6), (32, 8, 5)])
def test_n31_tp_divides_the_heads_and_pipelines_take_the_rest(heads: int, kv_heads: int | None, tp: int) -> None:
    """N31: where tp does not divide the heads, a node of so many devices is used without, and a warning says why."""
    profile = model(blocks(4 * tp), tps={1: 1.0, tp: 0.9 * tp}, num_heads=heads, num_kv_heads=kv_heads)
    cluster = devices({"gpu": tp}, memory=5)
    found = solved(profile, cluster, global_batch=16)
    assert {stage.tp for stage in found.stages} == {1} and len(found.devices) == tp
    assert any(f"tp {tp}" in warning and f"{heads} heads" in warning for warning in found.warnings)


def test_n31_a_degree_asked_for_that_does_not_divide_names_the_heads() -> None:
    """N31: tp 3 asked for with 40 heads is an error that names both numbers."""
    profile = model(blocks(12), tps={1: 1.0, 3: 2.7}, num_heads=40)
    with pytest.raises(ValueError, match=r"(?s)tp 3.*40 heads|40 heads.*tp 3"):
        plan(profile, devices({"gpu": 3}), replace(PLAIN, tp=(3,), global_batch=16))


def test_n31_common_divisors_are_used() -> None:
    """N31: with 40 heads, 8 of them key-value, tp 2, 4 and 8 are all allowed; one micro-batch takes the largest."""
    tps = {1: 1.0, 2: 1.9, 4: 3.6, 8: 6.0}
    found = solved(
        model(blocks(8), tps=tps, num_heads=40, num_kv_heads=8), devices({"gpu": 8}, memory=8), global_batch=1
    )
    assert [stage.tp for stage in found.stages] == [8]


def test_n32_pipelines_rank_first_with_many_micro_batches_and_tp_with_few() -> None:
    """N32: 8 layers on a node of 8: stages win with 64 micro-batches, tp 8 (5 x as fast) with 2.

    A device holds one layer, so no replicas. 64: 64 + 7 against 64 x 8 / 5 = 102 layer times; 2: 9 against 3.2.
    """
    profile, cluster = model(blocks(8), tps={1: 1.0, 8: 5.0}), devices({"gpu": 8}, memory=1)
    many, few = (solved(profile, cluster, global_batch=m) for m in (64, 2))
    assert [stage.tp for stage in many.stages] == [1] * 8
    assert [stage.tp for stage in few.stages] == [8]


def test_n35_tp_never_crosses_and_pipelines_seldom() -> None:
    """N35: two islands joined by a slow link: tp groups stay in nodes, a pipeline changes the island once at most."""
    nodes = [Node(name=f"n{i}", devices=("gpu",) * 2, link=INSIDE, island=f"i{i // 2}") for i in range(4)]
    fast = [NetworkLink(between=(f"i{i}", f"i{i}"), link=Link(bytes_per_s=5 * GB)) for i in range(2)]
    cluster = devices(*nodes, memory=2.8, links=fast, network=Link(bytes_per_s=5e7))
    for tps, layers in (({2: 1.8}, 16), ({1: 1.0}, 8), ({1: 1.0}, 16)):
        found = solved(model(blocks(layers, output_bytes=10**7), tps=tps), cluster, global_batch=16)
        island = {f"n{i}:{j}": i // 2 for i in range(4) for j in range(2)}
        for pipeline in found.pipelines:
            visited = [island[stage.devices[0]] for stage in pipeline.stages]
            assert sum(a != b for a, b in itertools.pairwise(visited)) <= (layers == 16)
            assert all(len({name.split(":")[0] for name in stage.devices}) == 1 for stage in pipeline.stages)


def test_n37_replicas_sync_over_links_that_exist() -> None:
    """N37: two nodes of `fast` that reach `slow` but not each other: no two devices without a link share a layer."""
    speeds = {"fast": 1.0, "slow": 0.4}
    base = devices({"fast": 2}, {"fast": 2}, {"slow": 2}, memory=8)
    cluster = replace(base, links=(NetworkLink(between=("fast", "slow"), link=NETWORK),))
    job = replace(PLAIN, bytes_per_parameter=BytesPerParameter(weights=1, gradients=1, optimizer=0))
    found = solved(model(blocks(6), speeds=speeds), cluster, job, global_batch=16)
    for block in found.blocks:
        owners = [p.stages[s].devices[0] for p, s in zip(found.pipelines, block.owners, strict=True)]
        for a, b in itertools.combinations(owners, 2):
            cluster.link(cluster.device(a), cluster.device(b))  # raises where there is none


def test_n36_tp_pairs_are_the_nvlink_pairs() -> None:
    """N36: NVLink on (0, 2) and (1, 3) of four devices that hold 4 of 8 layers: each tp 2 group is such a pair."""
    pairs = ((0, 2), (1, 3))
    node = Node(
        name="n", devices=("gpu",) * 4, link=Link(bytes_per_s=GB), groups=pairs, group_link=Link(bytes_per_s=50 * GB)
    )
    found = solved(model(blocks(8), tps={2: 1.9}), devices(node, memory=2), global_batch=16)
    assert sorted(tuple(sorted(int(name[2:]) for name in stage.devices)) for stage in found.stages) == list(pairs)


# What the objective counts ----------------------------------------------------------------------------------------


def test_n51_fill_and_drain_count_and_unused_devices_are_listed() -> None:
    """N51: 4 layers on 6 devices that hold one: 4 stages, sum + (m - 1) max = (4 + 7) x 3 s, two devices idle."""
    found = solved(model(blocks(4, output_bytes=0)), devices({"gpu": 6}, memory=1), global_batch=8)
    assert found.predicted.pipeline_s == pytest.approx((4 + 7) * 3)
    assert len(found.idle_devices) == 2 and found.gap <= 1e-6


def test_n51_the_number_of_stages_follows_the_number_of_micro_batches() -> None:
    """N51: stages of 1 s and hand-overs of 0.2 s on 6 devices: few micro-batches leave devices idle, many do not."""
    profile = model(blocks(6, forward_s=1 / 3, output_bytes=SIZE * 2))
    cluster = devices(*[{"gpu": 1}] * 6, memory=5)
    stages = [len(solved(profile, cluster, global_batch=m).devices) for m in (1, 60)]
    assert stages[0] < stages[1] == 6


def test_n53_holes_are_legal_and_a_kind_that_was_never_measured_stays_idle() -> None:
    """N53: no times at micro-batch 2 for a head on one kind of device, none at all for another: planned, and said."""
    full = model(blocks(4), Row(name="head"), speeds={"old": 1.0, "new": 2.0, "mine": 3.0}, micro_batches=(1, 2))
    cells = [
        c
        for c in full.cells
        if c.device_type != "mine" and not (c.device_type == "old" and c.kind == "head" and c.micro_batch == 2)
    ]
    profile = replace(full, cells=tuple(cells))
    assert any("old" in hole and "head" in hole for hole in profile.holes())
    found = solved(profile, devices({"old": 1}, {"new": 1}, {"mine": 1}), global_batch=8)
    assert any("mine" in warning for warning in found.warnings) and "n2:0" in found.idle_devices
    assert {p.micro_batch for p in found.pipelines for s in p.stages if s.device_type == "old"} == {1}


def test_n53_a_cluster_of_devices_that_were_never_measured_is_refused() -> None:
    """N53: a profile of one kind for a cluster of another: an error that names both."""
    with pytest.raises(ValueError, match=r"mine.*gpu"):
        plan(model(blocks(4)), devices({"mine": 2}), replace(PLAIN, global_batch=8))


def test_n61_one_micro_batch_on_two_stages_is_warned_of() -> None:
    """N61: a batch of one on a pipeline of two stages: half of it idles, says a warning."""
    found = solved(model(blocks(2)), devices({"gpu": 2}, memory=1), global_batch=1)
    assert only(found) == [1, 1] and found.predicted.bubble_fraction == pytest.approx(0.5)
    assert any("idle" in warning for warning in found.warnings)


def test_n62_nothing_is_extrapolated_beyond_the_measured_micro_batches() -> None:
    """N62: sizes 1, 2, 4, 8 are measured: a larger one is refused unless the job allows it, and then said."""
    profile = model(blocks(4), micro_batches=(1, 2, 4, 8))
    cells = [replace(c, forward_s=c.forward_s * (0.4 + 0.6 / c.micro_batch)) for c in profile.cells]
    profile, cluster = replace(profile, cells=tuple(cells)), devices({"gpu": 1}, memory=8)
    assert solved(profile, cluster, global_batch=24).pipelines[0].micro_batch == 8
    with pytest.raises(ValueError, match="micro_batches"):
        plan(profile, cluster, replace(PLAIN, global_batch=24, micro_batches=(12,)))
    found = solved(profile, cluster, global_batch=24, micro_batches=(12,), extrapolate=True)
    assert any("extrapolat" in warning for warning in found.warnings)


def test_n64_one_node_may_be_faster_than_three() -> None:
    """N64: 3 nodes of 4 at 1 GB/s, 4 GB of gradients: a batch of 12 runs on one node, of 4000 on all three.

    A sample takes 0.24 s, 12 of them 0.72 s on 4 devices and 0.24 s on 12; a ring of 4 GB 0.6 s at 10 GB/s, 7.3 at 1.
    """
    profile, cluster = model(blocks(4, forward_s=0.02)), devices(*[{"gpu": 4}] * 3)
    job = replace(PLAIN, bytes_per_parameter=BytesPerParameter(weights=1, gradients=10, optimizer=0), max_depth=1)
    few = solved(profile, cluster, job, global_batch=12)
    assert len({name.split(":")[0] for name in few.devices}) == 1
    many = solved(profile, cluster, job, global_batch=4000)
    assert len({name.split(":")[0] for name in many.devices}) == 3


def test_n58_every_rest_of_a_cluster_has_a_plan_or_a_reason() -> None:
    """N58: of 8 nodes that hold 4 of 16 layers each, any 4 or more have a plan, and 3 have a reason for none."""
    cluster = devices(*[{"gpu": 1}] * 8, memory=4)
    for left in range(8, 3, -1):
        found = solved(model(blocks(16)), cluster, global_batch=16)
        assert {name.split(":")[0] for name in found.devices} <= {node.name for node in cluster.nodes}
        assert len(cluster.nodes) == left
        cluster = cluster.without(cluster.nodes[0].name)
    with pytest.raises(Infeasible) as raised:
        plan(model(blocks(16)), cluster, replace(PLAIN, global_batch=16))
    assert raised.value.short_bytes == pytest.approx(2 * SIZE, rel=0.05)  # 6 layers where 4 fit


# Time -------------------------------------------------------------------------------------------------------------


def test_n55_a_search_ends_at_its_time_limit_with_the_best_so_far() -> None:
    """N55: 64 devices of 4 kinds, 96 layers, a limit of 1 s: a plan that passes the check, with a gap, in time."""
    speeds = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}
    profile = model(Row(name="embedding", forward_s=0.1), blocks(94), Row(name="head", forward_s=2.0), speeds=speeds)
    cluster = devices(*({name: 8} for name in speeds for _ in range(2)), memory=24)
    job = replace(PLAIN, global_batch=512)
    start = time.perf_counter()
    found = plan(profile, cluster, job, time_limit=1.0)
    assert time.perf_counter() - start < 20
    assert found.problems(profile, cluster, job) == ()
    assert 0 < found.lower_bound_s <= found.predicted.iteration_s and math.isfinite(found.gap)


# Oracles: exhaustive search on measured times, forward + backward only ---------------------------------------------

DATA = Path(os.environ.get("HPP_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")) / "sailor"
NAMES = {
    "3090": "RTX-3090",
    "2080": "RTX-2080",
    "Titan": "Titan-RTX",
    "A100": "A100-40",
    "V100": "V100-16",
    "GH200": "GH-96",
}
CHAINS = [
    ("3090/2 Titan/2", "OPT-350", 2, (19, 7), (0.3368, 0.3280)),
    ("Titan/2 3090/2", "OPT-350", 2, (8, 18), (0.3256, 0.3417)),
    ("3090/8 2080/8 Titan/8", "OPT-350", 2, (5, 9, 12), (0.3275, 0.3306, 0.3630)),
    ("A100/4 V100/4", "GPT-Neo-2.7", 4, (28, 6), (0.5756, 0.4994)),
    ("V100/4 A100/4", "GPT-Neo-2.7", 4, (6, 28), (0.5059, 0.5711)),
    ("A100/1 A100/1 V100/1 V100/1", "GPT-Neo-2.7", 1, (15, 14, 2, 3), (0.2356, 0.2323, 0.1737, 0.1747)),
    ("GH200/4 A100/4 V100/4", "LLAMA-3-8", 1, (27, 4, 4), (1.103, 1.073, 0.964)),
]


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no measurements in {DATA} (set HPP_DATA)")
@pytest.mark.parametrize(("chain", "name", "micro_batch", "cut", "stage_s"), CHAINS, ids=lambda v: str(v)[:24])
def test_oracle_table(chain: str, name: str, micro_batch: int, cut: Sequence[int], stage_s: Sequence[float]) -> None:
    """The recursion on the imported profile finds the published bottleneck in this device order, and these times.

    Each stage is a class of its own with a free link to the next one only; memory is no limit.
    """
    units = [(NAMES[each.split("/")[0]], int(each.split("/")[1])) for each in chain.split()]
    profile = next(each for each in sailor.profiles(DATA) if each.name.lower().startswith(name.lower()))
    classes = [DeviceClass(device_type=device_type, tp=tp) for device_type, tp in units]
    cluster = devices(*({t: 8} for t in dict.fromkeys(t for t, _ in units)), memory=1e6)
    costs = cost.layer_costs(profile, cluster, replace(PLAIN, recompute=False), classes, micro_batch)
    num_layers, num_stages = costs.num_layers, len(classes)
    links = np.full((num_stages, num_stages, num_layers + 1), math.inf)
    links[:, :, [0, -1]] = 0.0
    links[range(num_stages - 1), range(1, num_stages)] = 0.0
    table = cost.stage_table(replace(costs, cut=links, cut_floor=links), range(1, num_stages + 1), synced=False)
    digits = 3 if name.startswith("LLAMA") else 4
    ends = [0, *itertools.accumulate(cut)]
    assert ends[-1] == num_layers
    for k, (i, j) in enumerate(itertools.pairwise(ends)):
        assert float(table.load[k, 0, i, j]) == pytest.approx(stage_s[k], abs=0.6 * 10**-digits)
    split = Template(table, np.ones(num_stages, dtype=np.int64)).best(by_max=True)
    assert split is not None
    assert [stage.class_index for stage in split.stages] == list(range(num_stages))
    assert split.max_s == pytest.approx(max(stage_s), abs=0.6 * 10**-digits)
    # the same by a long way of micro-batches: sum + (m - 1) max
    walked = Template(table, np.ones(num_stages, dtype=np.int64)).walk(10_000)
    assert walked is not None and walked.max_s == pytest.approx(split.max_s, rel=1e-3)


def test_tp_ranks_that_share_a_network_port_share_its_bandwidth() -> None:
    """Two nodes of a tp pair: one port each for both ranks makes the ring between the nodes take twice as long."""
    # 4 layers of 0.1 GB of gradients over 2 shards and 2 owners: 2 (2 - 1) steps of 0.1 GB at 1 GB/s = 0.2 s.
    job = replace(PLAIN, bytes_per_parameter=BytesPerParameter(weights=1, gradients=1, optimizer=0), tp=(2,))
    job = replace(job, sync_granularity="model", global_batch=16)
    reduced = []
    for nics in (None, 2, 1):
        cluster = devices(*(Node(name=name, devices=("gpu",) * 2, link=INSIDE, nics=nics) for name in "ab"), memory=100)
        found = solved(model(blocks(4), tps={2: 2.0}), cluster, job)
        assert [len(p.stages) for p in found.pipelines] == [1, 1]
        reduced.append(sum(block.reduce_s for block in found.blocks))
    assert reduced == pytest.approx([0.2, 0.2, 0.4])


def test_n50_sharded_optimizer_state_counts_by_owners() -> None:
    """N50: nothing gained by one pipeline; with two, half the optimizer state each, and models fit that did not."""
    # A layer holds 1 unit of weights, 1 of gradients and 2 of optimizer state; 4 layers are 16 units, 12 if halved.
    state = BytesPerParameter(weights=1, gradients=1, optimizer=2)
    job = replace(PLAIN, bytes_per_parameter=state, global_batch=8, tp=(1,), max_depth=1)
    profile = model(blocks(4, output_bytes=0))
    for memory, fits in ((16, True), (12, False)):
        cluster = devices({"gpu": 2}, memory=memory)
        if fits:
            assert len(solved(profile, cluster, job).pipelines) == 2
        else:
            with pytest.raises(Infeasible):
                plan(profile, cluster, job)
        sharded = solved(profile, cluster, replace(job, shard_optimizer=True))
        assert [stage.memory.optimizer for stage in sharded.stages] == [4 * SIZE, 4 * SIZE]
    # The ring: 2 (2 - 1) steps of 0.2 GB at 10 GB/s; its first half hides behind backward but for the last chunk, the
    # gathering half comes after the update.
    (block,) = sharded.blocks
    assert block.reduce_s == pytest.approx(0.02) and sharded.stages[0].update_s == pytest.approx(0.02)
    alone = replace(job, shard_optimizer=True, global_batch=1)
    with pytest.raises(Infeasible):
        plan(profile, devices({"gpu": 1}, memory=12), alone)
