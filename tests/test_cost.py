"""`planner.cost`: figures by hand, recomputation against all subsets, pipelines against an event simulation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.cost import (
    Costs,
    DeviceClass,
    fits,
    floor_s,
    layer_costs,
    one_f_one_b_s,
    pipeline_s,
    rank_parameters,
    recomputed_layers,
    ring_all_reduce_s,
    ring_links,
    stage_bytes,
    stage_table,
    sync_buffer_bytes,
    sync_table,
)
from planner.job import BytesPerParameter, Job
from planner.profile import Cell, Conditions, LayerKind, ModelProfile
from planner.stage_split import Template

MB, GB, GIB = 10**6, 10**9, 2**30
FAST = DeviceClass(device_type="fast", tp=1)
SLOW = DeviceClass(device_type="slow", tp=1)
SLOW2 = DeviceClass(device_type="slow", tp=2)
BARE = Job(
    recompute=False,
    memory_margin=0.0,
    context_bytes=0,
    tp_context_bytes=0,
    sync="exposed",
    sync_granularity="model",
    bytes_per_parameter=BytesPerParameter(weights=1, gradients=1, optimizer=1),
)


# Four layers on two device types. `fast` takes 1, 2, 3, 4 s forward and twice that backward per sample, `slow` three
# times as long, tp halves it. Every figure per sample scales with the micro-batch (1 or 2), bytes per rank with 1 / tp.


def model(*kinds: LayerKind, conditions: Conditions | None = None) -> ModelProfile:
    kinds = kinds or tuple(LayerKind(name=f"k{l}", parameters=10 * MB, output_bytes=(l + 1) * MB) for l in range(4))
    cells = [
        Cell(
            kind=kind.name,
            device_type=name,
            tp=tp,
            micro_batch=b,
            forward_s=float(l + 1) * b * slowness / tp,
            backward_s=2.0 * (l + 1) * b * slowness / tp,
            update_s=0.25 * slowness,
            activation_bytes=(8 + 2 * l) * MB * b // tp,
            workspace_bytes=(5 - l) * MB * b // tp,
        )
        for l, kind in enumerate(kinds)
        for name, slowness in (("fast", 1), ("slow", 3))
        for tp in (1, 2)
        for b in (1, 2)
    ]
    return ModelProfile(
        name="by hand",
        layers=tuple(kind.name for kind in kinds),
        kinds=kinds,
        cells=tuple(cells),
        conditions=conditions or Conditions(),
    )


def kinds(count: int = 4, **fields: Any) -> list[LayerKind]:
    return [LayerKind(name=f"k{l}", parameters=10 * MB, output_bytes=(l + 1) * MB, **fields) for l in range(count)]


def cluster(
    fast_memory: int = 80 * GB,
    slow_memory: int = 40 * GB,
    *,
    links: dict[tuple[str, str], Link] | None = None,
    nodes: Sequence[Node] | None = None,
) -> Cluster:
    """Two nodes of two `fast` and two of two `slow` devices: 100 MB/s inside, 20, 10, 5 MB/s and 0.1 s between them."""
    inside = Link(bytes_per_s=100 * MB)
    between = {
        ("fast", "fast"): Link(alpha_s=0.1, bytes_per_s=20 * MB),
        ("slow", "slow"): Link(alpha_s=0.1, bytes_per_s=10 * MB),
        ("fast", "slow"): Link(alpha_s=0.1, bytes_per_s=5 * MB),
    } | (links or {})
    return Cluster(
        name="by hand",
        device_types=(
            DeviceType(name="fast", memory_bytes=fast_memory),
            DeviceType(name="slow", memory_bytes=slow_memory),
        ),
        nodes=tuple(
            nodes or [Node(name=f"{t}{i}", devices=(t, t), link=inside) for t in ("fast", "slow") for i in (0, 1)]
        ),
        links=tuple(NetworkLink(between=pair, link=link) for pair, link in between.items()),
    )


def chain(forward: Any, **fields: Any) -> Costs:
    """Costs straight from (K, L) forward seconds; backward twice that, free links and memory unless said otherwise."""
    forward = np.array(forward, dtype=float)
    num_classes, num_layers = forward.shape
    per_layer = dict.fromkeys(("update", "state", "kept", "saved", "logits", "workspace"), 0.0)
    values: dict[str, Any] = {
        "classes": tuple(DeviceClass(device_type="ABC"[k], tp=1) for k in range(num_classes)),
        "micro_batch": 1,
        "forward": forward,
        "backward": 2 * forward,
        "inputs": np.zeros(num_layers),
        "rework": np.zeros(num_classes),
        "usable": np.full(num_classes, 1e9),
        "sync_buffer": 0.0,
        "gradients": np.zeros(num_layers),
        "calls": np.ones(num_layers),
        "cut": np.zeros((num_classes, num_classes, num_layers + 1)),
        "cut_floor": np.zeros((num_classes, num_classes, num_layers + 1)),
        "tied": None,
        "update_per_stage": False,
        "extrapolated": np.zeros(num_classes, dtype=bool),
    }
    for name, value in (per_layer | fields).items():
        like = forward if name in per_layer or name == "backward" else values.get(name)
        if isinstance(like, np.ndarray):
            value = np.broadcast_to(np.array(value, dtype=float), like.shape).copy()
        values[name] = value
    return Costs(**values)


# Rings -----------------------------------------------------------------------------------------------------------


def test_a_ring_takes_two_rounds_of_all_shards_but_one() -> None:
    """2 (n - 1) steps of V / n bytes: 8 MB over 4 ranks at 1 MB/s after 0.5 s are 6 x (0.5 + 2) = 15 s."""
    link = Link(alpha_s=0.5, bytes_per_s=1 * MB)
    assert float(ring_all_reduce_s(8e6, 4, [link])) == pytest.approx(15)
    # two ranks: 2 x (0.5 + 4) = 9
    assert float(ring_all_reduce_s(8e6, 2, [link])) == pytest.approx(9)
    assert ring_all_reduce_s(np.array([0.0, 8e6]), 4, [link]) == pytest.approx([0, 15])


def test_a_ring_of_one_rank_or_without_bytes_takes_no_time() -> None:
    """Not even the alphas: nothing is sent."""
    link = Link(alpha_s=0.5, bytes_per_s=1 * MB)
    assert float(ring_all_reduce_s(8e6, 1, [link])) == 0
    assert float(ring_all_reduce_s(0.0, 4, [link])) == 0


def test_a_ring_is_as_fast_as_its_slowest_link_at_the_size_of_a_step() -> None:
    """Of a link of 1 s + 10 MB/s and one of 0 s + 1 MB/s the first is slower below 10/9 MB, the second above.

    Two ranks: V = 1 MB makes steps of 0.5 MB, 1.05 and 0.5 s: 2.1. V = 4 MB makes steps of 2 MB, 1.2 and 2 s: 4.
    """
    links = [Link(alpha_s=1.0, bytes_per_s=10 * MB), Link(bytes_per_s=1 * MB)]
    assert ring_all_reduce_s(np.array([1e6, 4e6]), 2, links) == pytest.approx([2.1, 4])


def test_a_ring_reads_the_bandwidth_at_the_size_of_a_step() -> None:
    """2 MB/s at 1 MB, 8 MB/s at 4 MB, in between over log2: 8 MB over 4 ranks are 6 steps of 2 MB at 5 MB/s, 2.4 s."""
    link = Link(table=((1e6, 2e6), (4e6, 8e6)))
    assert float(ring_all_reduce_s(8e6, 4, [link])) == pytest.approx(2.4)


def test_rings_of_unequal_types_are_bound_by_their_own_network_link() -> None:
    """`fast` by its 20 MB/s, `slow` by its 10 MB/s; a path of 5 MB/s between them, slower than both, binds both."""
    c = cluster()
    fast, slow, path = (c.links[n].link for n in range(3))
    assert ring_links(c, "fast", ("fast",)) == (fast,)
    assert set(ring_links(c, "fast", ("fast", "slow"))) == {fast, path}
    assert set(ring_links(c, "slow", ("fast", "slow"))) == {slow, path}
    # a path that is as slow as the slower end's own link adds nothing
    c = cluster(links={("fast", "slow"): Link(alpha_s=0.1, bytes_per_s=10 * MB)})
    assert ring_links(c, "fast", ("fast", "slow")) == (fast,)
    assert ring_links(c, "slow", ("fast", "slow")) == (slow,)


def test_a_type_in_one_node_syncs_over_its_best_way_out() -> None:
    """One node of `fast` beside two of `slow`: its network link is the path to them; alone it syncs inside the node."""
    inside = Link(bytes_per_s=100 * MB)
    nodes = [Node(name=f"n{i}", devices=(t, t), link=inside) for i, t in enumerate(("fast", "slow", "slow"))]
    c = cluster(nodes=nodes)
    assert ring_links(c, "fast", ("fast", "slow")) == (c.links[2].link,)
    assert ring_links(cluster(nodes=nodes[:1]), "fast", ("fast",)) == (inside,)


# Sync and update --------------------------------------------------------------------------------------------------

# Layers of 10, 20, 30, 40 MB of gradients; the ring of V over two ranks on a link of 0.1 s + 10 MB/s takes
# 2 (0.1 + V / 2 / 10 MB/s) = 0.2 + V / 10 MB: 1.2, 2.2, 3.2, 4.2 s each alone.
LINK = Link(alpha_s=0.1, bytes_per_s=10 * MB)


def gradients(**fields: Any) -> Costs:
    return chain([[1.0, 2, 3, 4], [3.0, 6, 9, 12]], gradients=[10e6, 20e6, 30e6, 40e6], **fields)


def ring(costs: Costs, job: Job, num_pipelines: int = 2, min_tp: int = 1) -> Any:
    return sync_table(costs, job, [(LINK,)] * len(costs.classes), num_pipelines, min_tp).ring[0]


def test_one_call_for_all_or_one_per_layer_or_tensor() -> None:
    """`model`: 0.2 + 10 s for 100 MB. `layer`: 1.2 + 2.2 + 3.2 + 4.2 = 10.8. `tensor`, two a layer: 0.2 more each."""
    table = ring(gradients(), BARE)
    assert table[0, 4] == pytest.approx(10.2)
    assert table[1, 3] == pytest.approx(0.2 + 5)
    assert ring(gradients(), replace(BARE, sync_granularity="layer"))[0, 4] == pytest.approx(10.8)
    tensors = replace(BARE, sync_granularity="tensor")
    assert ring(gradients(calls=2.0), tensors)[0, 4] == pytest.approx(11.6)
    assert ring(gradients(calls=2.0), tensors)[3, 4] == pytest.approx(4.4)


def test_a_block_goes_in_full_chunks_and_a_rest() -> None:
    """100 MB in chunks of 40 MB: 4.2 + 4.2 + 2.2 = 10.6; a stage of 40 MB one chunk, 4.2; of 30 MB only a rest, 3.2."""
    job = replace(BARE, sync_granularity="block", sync_chunk_bytes=40 * MB)
    table = ring(gradients(), job)
    assert [table[0, 4], table[3, 4], table[2, 3]] == pytest.approx([10.6, 4.2, 3.2])


def test_more_pipelines_make_more_and_smaller_steps() -> None:
    """100 MB over 4 owners: 6 (0.1 + 25 / 10) = 15.6 s; over one none."""
    assert ring(gradients(), BARE, num_pipelines=4)[0, 4] == pytest.approx(15.6)
    assert not ring(gradients(), BARE, num_pipelines=1).any()


def test_shards_of_the_smallest_degree_are_exchanged() -> None:
    """tau = 2: half of 100 MB, 0.2 + 5 s; chunks count what a rank sends, 50 MB are 40 + 10: 4.2 + 1.2 = 5.4."""
    assert ring(gradients(), BARE, min_tp=2)[0, 4] == pytest.approx(5.2)
    job = replace(BARE, sync_granularity="block", sync_chunk_bytes=40 * MB)
    assert ring(gradients(), job, min_tp=2)[0, 4] == pytest.approx(5.4)


def test_the_last_backward_hides_the_ring_but_for_its_last_message() -> None:
    """tail = update + max(ring - B, last). Ring of layers 2, 3 in chunks of 40 MB: 70 MB, 4.2 + 3.2 = 7.4 s.

    B of the stage is 2 (3 + 4) = 14 s: all hidden but the last message, which counts as a full chunk, 4.2 s. On layer 0
    (B = 2 s, one message of 1.2 s) the message is left. With B = 2.5 and 0.5 s on layers 2 and 3, 7.4 - 3 = 4.4 s are.
    """
    job = replace(BARE, sync="overlapped", sync_granularity="block", sync_chunk_bytes=40 * MB)
    links = [(LINK,)] * 2
    table = sync_table(gradients(update=0.5), job, links, 2, 1)
    assert table.tail[0, 2, 4] == pytest.approx(1.0 + 4.2) and table.ring[0, 2, 4] == pytest.approx(7.4)
    assert table.tail[0, 0, 1] == pytest.approx(0.5 + 1.2)
    short = gradients(backward=[[2.0, 2, 2.5, 0.5]] * 2)
    assert sync_table(short, job, links, 2, 1).tail[0, 2, 4] == pytest.approx(4.4)
    exposed = sync_table(short, replace(job, sync="exposed"), links, 2, 1)
    assert exposed.tail[0, 2, 4] == pytest.approx(7.4)


def test_one_call_for_the_model_cannot_start_before_the_backward_ends() -> None:
    """`model`: 100 MB take 10.2 s although the stage's backward lasts 20."""
    table = sync_table(gradients(), replace(BARE, sync="overlapped"), [(LINK,)] * 2, 2, 1)
    assert table.tail[0, 0, 4] == pytest.approx(10.2)


def test_update_adds_up_over_layers_or_is_one_figure_per_stage() -> None:
    """Updates of 1, 2, 3, 4 s: 10 for all four as a sum, 4 as one figure of the stage."""
    update = [[1.0, 2, 3, 4]] * 2
    links = [(LINK,)] * 2
    assert sync_table(gradients(update=update), BARE, links, 1, 1).tail[1, 0, 4] == pytest.approx(10)
    once = gradients(update=update, update_per_stage=True)
    assert sync_table(once, BARE, links, 1, 1).tail[1, 0, 4] == pytest.approx(4)


def test_each_class_is_charged_at_its_own_links() -> None:
    """100 MB over two: 10.2 s at 10 MB/s, on a link of 5 MB/s 0.2 + 20 s."""
    table = sync_table(gradients(), BARE, [(LINK,), (LINK, Link(alpha_s=0.1, bytes_per_s=5 * MB))], 2, 1)
    assert table.ring[:, 0, 4] == pytest.approx([10.2, 20.2])


def test_the_sync_buffer_is_one_message() -> None:
    """One chunk, or all gradients if they are less; the largest layer; everything; or what the job says."""
    sizes = np.array([10e6, 20e6, 30e6, 40e6])
    block = replace(BARE, sync_granularity="block")
    assert sync_buffer_bytes(block, sizes) == 64 * 2**20
    assert sync_buffer_bytes(block, sizes / 10) == 10e6
    assert sync_buffer_bytes(replace(BARE, sync_granularity="layer"), sizes) == 40e6
    assert sync_buffer_bytes(BARE, sizes) == 100e6
    assert sync_buffer_bytes(replace(BARE, sync_buffer_bytes=7), sizes) == 7


# Tied weights -----------------------------------------------------------------------------------------------------


def tied_model(**head: Any) -> ModelProfile:
    """Layers of 10 MB of parameters; the last shares 8 MB of them with the first."""
    first, *middle, _ = kinds(**{key: value for key, value in head.items() if key == "trainable"})
    last = LayerKind(name="k3", parameters=10 * MB, output_bytes=0, tied_to="k0", tied_parameters=8 * MB, **head)
    return model(first, *middle, last)


def test_tied_weights_are_stored_once_in_one_stage() -> None:
    """Three bytes a parameter: four layers 3 (40 - 8) = 96 MB in one stage, without either end 3 x 30; tp 2 halves."""
    costs = layer_costs(tied_model(), cluster(), BARE, (FAST, SLOW2), 1)
    base, _ = stage_bytes(replace(costs, workspace=np.zeros_like(costs.workspace)))
    assert base[:, 0, 4] == pytest.approx([96e6, 48e6])
    assert base[:, 0, 3] == pytest.approx([90e6, 45e6])
    assert base[:, 1, 4] == pytest.approx([90e6, 45e6])


def test_tied_weights_on_two_stages_have_a_ring_of_twice_the_owners() -> None:
    """Two pipelines, layers of 10 MB, 8 of them tied, on 0.1 s + 10 MB/s.

    Stage of layers 0, 1: 12 MB over two, 0.2 + 1.2, and 8 MB over four, 6 (0.1 + 0.2): 1.4 + 1.8 = 3.2. All in one
    stage: 32 MB over two, 0.2 + 3.2 = 3.4. The middle, 20 MB: 2.2. One pipeline: 8 MB over its two ends, 0.2 + 0.8.
    """
    costs = layer_costs(tied_model(), cluster(), BARE, (FAST,), 1)
    table = ring(costs, BARE)
    assert [table[0, 2], table[2, 4], table[0, 4], table[1, 3]] == pytest.approx([3.2, 3.2, 3.4, 2.2])
    alone = ring(costs, BARE, num_pipelines=1)
    assert [alone[0, 2], alone[2, 4], alone[0, 4], alone[1, 3]] == pytest.approx([1.0, 1.0, 0, 0])
    # shards: tau = 2 halves both volumes: 0.2 + 0.6, 6 (0.1 + 0.1)
    assert ring(costs, BARE, min_tp=2)[0, 2] == pytest.approx(0.8 + 1.2)


@pytest.mark.parametrize("granularity", ["layer", "tensor"])
def test_tied_weights_are_reduced_once_at_finer_granularity(granularity: Any) -> None:
    """One call a layer of 10 MB, 1.2 s; of the tied layer 2 MB, 0.4 s, and 8 MB over four owners, 1.8 s.

    Layers 0, 1: 0.4 + 1.2 + 1.8 = 3.4. All in one stage: the tied 8 MB once, at most 4 x 1.2.
    """
    costs = layer_costs(tied_model(), cluster(), BARE, (FAST,), 1)
    table = ring(costs, replace(BARE, sync_granularity=granularity))
    assert table[0, 2] == pytest.approx(3.4)
    assert table[0, 4] <= 4 * 1.2 - 0.8 + 1e-9


def test_a_second_tied_layer_is_refused() -> None:
    """Two heads tied to layer 0: an error that names both, rather than memory counted for one of them."""
    first, second, *_ = kinds()
    tied: dict[str, Any] = {"tied_to": "k0", "tied_parameters": 8 * MB}
    heads = [LayerKind(name=name, parameters=10 * MB, output_bytes=0, **tied) for name in ("k2", "k3")]
    with pytest.raises(ValueError, match="tied_to: layers 2, 3 "):
        layer_costs(model(first, second, *heads), cluster(), BARE, (FAST,), 1)


def test_frozen_tied_weights_save_their_weights_only_and_are_not_synced() -> None:
    """Four frozen layers of 10 MB, 8 tied, weights of one byte: 32 MB in one stage, and no ring whatever the cut."""
    costs = layer_costs(tied_model(trainable=False), cluster(), BARE, (FAST,), 1)
    base, _ = stage_bytes(replace(costs, workspace=np.zeros_like(costs.workspace)))
    assert base[0, 0, 4] == pytest.approx(32e6)
    for granularity in ("block", "layer", "model"):
        job = replace(BARE, sync_granularity=granularity, sync_chunk_bytes=3 * MB)
        assert np.triu(ring(costs, job), 1) == pytest.approx(0)


# Layers and hand-overs --------------------------------------------------------------------------------------------


def test_times_and_bytes_of_each_class_come_from_its_cells() -> None:
    """Micro-batch 2 on `slow` with tp 2: layer 1 takes 2 x 2 x 3 / 2 = 6 s, keeps 10 x 2 / 2 MB, is handed 1 x 2 MB."""
    costs = layer_costs(model(), cluster(), BARE, (FAST, SLOW2), 2)
    assert costs.forward.tolist() == [[2, 4, 6, 8], [3, 6, 9, 12]]
    assert costs.backward.tolist() == [[4, 8, 12, 16], [6, 12, 18, 24]]
    assert costs.kept[:, 1].tolist() == [20e6, 10e6]
    assert costs.workspace[:, 1].tolist() == [8e6, 4e6]
    assert costs.inputs.tolist() == [0, 2e6, 4e6, 6e6]


def test_a_class_without_cells_has_no_stage() -> None:
    """`fast` with tp 4 was never measured: infinite times, and so loads."""
    costs = layer_costs(model(), cluster(), BARE, (DeviceClass(device_type="fast", tp=4), SLOW), 1)
    assert costs.measured.tolist() == [False, True]
    table = stage_table(costs, [1], False)
    assert np.isinf(table.load[0]).all() and np.isfinite(table.load[1, 0, 0, 4])


def test_a_rank_holds_the_measured_shard_or_an_even_share_rounded_up() -> None:
    """10 parameters over 3 ranks: 4 each; as measured: 6."""
    assert rank_parameters(10, (), 3) == 4
    assert rank_parameters(10, ((3, 6),), 3) == 6
    assert rank_parameters(10, ((3, 6),), 1) == 10


def test_a_hand_over_takes_the_slowest_link_between_the_types_one_way() -> None:
    """Before layer 2, 2 MB: `fast` to `slow` 0.1 + 0.4; two `fast` on two nodes 0.1 + 0.1, at best inside one 0.02."""
    costs = layer_costs(model(), cluster(), BARE, (FAST, SLOW), 1)
    assert costs.cut[0, 1, 2] == costs.cut[1, 0, 2] == pytest.approx(0.5)
    assert costs.cut[0, 0, 2] == pytest.approx(0.2) and costs.cut_floor[0, 0, 2] == pytest.approx(0.02)
    assert costs.cut_floor[0, 1, 2] == pytest.approx(0.5)
    assert not costs.cut[:, :, [0, 4]].any()


def test_a_lone_device_is_never_its_own_neighbour() -> None:
    """One `fast` device: a cut between two of them is impossible, one to `slow` is not."""
    nodes = [Node(name="f", devices=("fast",)), Node(name="s", devices=("slow",))]
    costs = layer_costs(model(), cluster(nodes=nodes), BARE, (FAST, SLOW), 1)
    assert math.isinf(costs.cut[0, 0, 2]) and costs.cut[0, 1, 2] == pytest.approx(0.5)


def test_a_hand_over_loads_both_ends() -> None:
    """F + B = 3 and 4.5 on unequal devices and a cut of 1 s: loads 4 and 5.5, m = 4: 9.5 + 3 x 5.5 = 26."""
    cut = np.zeros((2, 2, 3))
    cut[:, :, 1] = 1.0
    table = stage_table(chain([[1.0, 9.0], [9.0, 1.5]], cut=cut), [1, 2], False)
    split = Template(table, np.array([1, 1])).walk(4)
    assert split is not None and split.sum_s + 3 * split.max_s == pytest.approx(26)


def test_tp_communication_outside_the_times_is_charged_forward_and_backward() -> None:
    """Layer 1 all-reduces 3 x its 2 MB of output, or what `tp_bytes` says, inside the node at 100 MB/s; tp 1 nothing.

    Default 2 x 2 MB over two ranks: 2 x 2 / 100 = 0.04 s; 10 MB: 0.1 s.
    """
    outside = Conditions(tp_communication="outside")
    plain = layer_costs(model(), cluster(), BARE, (SLOW, SLOW2), 1)
    more = layer_costs(model(conditions=outside), cluster(), BARE, (SLOW, SLOW2), 1)
    assert (more.forward - plain.forward)[:, 1] == pytest.approx([0, 0.04])
    assert (more.backward - plain.backward)[:, 1] == pytest.approx([0, 0.04])
    given = layer_costs(model(*kinds(tp_bytes=10 * MB), conditions=outside), cluster(), BARE, (SLOW2,), 1)
    assert (given.forward - plain.forward[1:])[0] == pytest.approx([0.1] * 4)


def test_tp_groups_of_nodes_with_fast_groups_communicate_inside_them() -> None:
    """NVLink pairs of 1 GB/s in a node of 100 MB/s: a tp group sits in one pair, 4 MB over two ranks take 4 ms."""
    link, pair = Link(bytes_per_s=100 * MB), Link(bytes_per_s=1 * GB)
    nodes = [
        Node(name="s", devices=("slow",) * 4, link=link, groups=((0, 1), (2, 3)), group_link=pair),
        Node(name="f", devices=("fast",)),
    ]
    profile = model(conditions=Conditions(tp_communication="outside"))
    costs = layer_costs(profile, cluster(nodes=nodes), BARE, (SLOW2,), 1)
    assert costs.forward[0, 1] == pytest.approx(2 * 3 / 2 + 0.004)


# Memory -----------------------------------------------------------------------------------------------------------


def test_model_state_counts_the_bytes_per_parameter_of_the_job() -> None:
    """Mixed Adam 2 + 4 + 12 = 18 bytes, fp32 SGD 8; a frozen layer its weights only; tp 2 half, rounded up."""
    frozen = [LayerKind(name="k0", parameters=11, output_bytes=1, trainable=False), *kinds()[1:]]
    job = replace(BARE, bytes_per_parameter=None, precision="mixed", optimizer="adam")
    costs = layer_costs(model(*frozen), cluster(), job, (FAST, SLOW2), 1)
    assert costs.state[0].tolist() == [22, 180e6, 180e6, 180e6]
    assert costs.state[1].tolist() == [12, 90e6, 90e6, 90e6]
    assert costs.gradients.tolist() == [0, 40e6, 40e6, 40e6]
    job = replace(job, precision="fp32", optimizer="sgd")
    assert layer_costs(model(), cluster(), job, (FAST,), 1).state[0, 0] == 80e6


def test_margin_and_contexts_come_off_the_device_memory() -> None:
    """95 % of 80 GB less 1 GiB on `fast`; 95 % of 40 GB less 1 and 2 GiB on `slow` with tp 2."""
    costs = layer_costs(model(), cluster(), Job(tp_context_bytes=2 * GIB), (FAST, SLOW2), 1)
    assert costs.usable == pytest.approx([0.95 * 80e9 - GIB, 0.95 * 40e9 - 3 * GIB])


def test_a_stage_holds_what_the_page_of_formulas_adds_up() -> None:
    """Layers 1, 2 on `fast`, micro-batch 1, three in flight, in MB.

    State 3 (10 + 10); kept 10 + 12 and the input of layer 1, 1, each three times; logits 7 + 7 three times;
    workspace max(4, 3); sync buffer 40 in sync with others: 60 + 3 (22 + 1 + 14) + 4 = 175, and 215.
    """
    profile = model(*kinds(logits_bytes=7 * MB))

    def loads(memory: int, synced: bool) -> float:
        costs = layer_costs(profile, cluster(memory), BARE, (FAST, SLOW), 1)
        return float(stage_table(costs, [1, 2, 3], synced).load[0, 2, 1, 3])

    assert loads(175 * MB, False) == pytest.approx(15)
    assert loads(175 * MB - 1, False) == math.inf
    assert loads(215 * MB, True) == pytest.approx(15)
    assert loads(215 * MB - 1, True) == math.inf


def test_a_stage_holds_at_most_as_many_micro_batches_as_asked() -> None:
    """Keeping 10 and 30 bytes on unequal devices of 60: six fit on the first, two on the second, whatever the depth."""
    table = stage_table(chain([[1.0], [2.0]], kept=[[10.0], [30.0]], usable=60.0), range(1, 8), False)
    assert np.isfinite(table.load[:, :, 0, 1]).sum(axis=1).tolist() == [6, 2]


# Recomputation ----------------------------------------------------------------------------------------------------


def test_of_layers_with_equal_savings_the_cheapest_forwards_run_again() -> None:
    """Four layers keep 10 bytes, 8 of them saved; F = 4, 1, 3, 2 s, 3 x 10 = 30 s in all. 40 bytes fit as they are.

    With 30 bytes and 5 to recompute in, 40 + 5 - 30 = 15: two layers, F = 1 and 2. With 22, 23: three. With 14, 31: all
    four, 10 s. With 12, 33 > 32: none will do.
    """
    cases = ((40, 0, ()), (30, 3, (1, 3)), (22, 6, (1, 2, 3)), (14, 10, (0, 1, 2, 3)), (12, math.inf, None))
    for room, extra, chosen in cases:
        costs = chain([[4.0, 1, 3, 2]], kept=10.0, saved=8.0, rework=5.0, usable=float(room))
        assert stage_table(costs, [1], False).load[0, 0, 0, 4] == pytest.approx(30 + extra)
        if chosen is not None:
            assert recomputed_layers(costs, 0, 0, 4, 1, False) == chosen


def test_different_savings_are_combined() -> None:
    """Savings of 9, 9, 5, 5 bytes for 6, 7, 2, 3 s: to free 5 costs 2 s, 10 5 s, 14 8 s, 19 11 s, 23 15 s, 28 18 s.

    9 with 5 + 5 (5 s, not 6); 14 with 9 + 5; 19 with 9 + 5 + 5; 23 with 9 + 9 + 5. By seconds per byte, 5, 5, 9, 9, to
    free 14 would take 5 + 5 + 9, 11 s.
    """
    for need, extra in ((5, 2), (6, 5), (9, 5), (10, 5), (11, 8), (14, 8), (15, 11), (19, 11), (20, 15), (28, 18)):
        costs = chain([[6.0, 7, 2, 3]], kept=[[9.0, 9, 5, 5]], saved=[[9.0, 9, 5, 5]], usable=28.0 - need)
        assert stage_table(costs, [1], False).load[0, 0, 0, 4] == pytest.approx(54 + extra)


def test_recomputing_frees_the_savings_of_every_micro_batch_in_flight() -> None:
    """Two layers keep and save 10 bytes; 3 in flight hold 60 and need 41 in a memory of 31 with 12 to recompute in.

    One layer frees 30, two 60: both; with 2 in flight 40 + 12 - 31 = 21: 40 is needed; with one 20 fit.
    """
    costs = chain([[1.0, 2.0]], kept=10.0, saved=10.0, rework=12.0, usable=31.0)
    assert stage_table(costs, [1, 2, 3], False).load[0, :, 0, 2] == pytest.approx([9, 12, 12])
    roomy = replace(costs, usable=np.array([42.0]))
    assert stage_table(roomy, [1, 2, 3], False).load[0, :, 0, 2] == pytest.approx([9, 9, 10])


def test_the_working_set_is_the_largest_recomputable_layer_and_inputs_stay() -> None:
    """Kept 8, 10, 12, 14 MB, inputs 0, 1, 2, 3: recomputing saves 8, 9, 10; not the last layer, so 12 to work in."""
    fixed = [*kinds()[:3], LayerKind(name="k3", parameters=10 * MB, output_bytes=0, recomputable=False)]
    costs = layer_costs(model(*fixed), cluster(), replace(BARE, recompute=True), (FAST,), 1)
    assert costs.saved[0].tolist() == [8e6, 9e6, 10e6, 0]
    assert costs.rework.tolist() == [12e6]
    off = layer_costs(model(*fixed), cluster(), BARE, (FAST,), 1)
    assert not off.saved.any()


def random_layers(draw: random.Random, num_values: int, most_layers: int = 7) -> Costs:
    """Two unequal classes of 4 to 7 layers (or more) that keep and save a few different amounts, short of memory."""
    num_layers = draw.randint(4, most_layers)
    values = [draw.randint(3, 12) for _ in range(num_values)]
    saved = np.array([[draw.choice([0, *values]) for _ in range(num_layers)] for _ in range(2)], dtype=float)
    kept = saved + [[draw.randint(0, 3) for _ in range(num_layers)] for _ in range(2)]
    inputs = np.array([0, *(draw.randint(0, 2) for _ in range(num_layers - 1))], dtype=float)
    forward = [[draw.randint(1, 9) * slowness for _ in range(num_layers)] for slowness in (1, 3)]
    state = np.array([[draw.randint(1, 4) for _ in range(num_layers)] for _ in range(2)], dtype=float)
    workspace = np.array([[draw.randint(0, 5) for _ in range(num_layers)] for _ in range(2)], dtype=float)
    return chain(
        forward,
        kept=kept,
        saved=saved,
        state=state,
        workspace=workspace,
        inputs=inputs,
        rework=kept.max(axis=1),
        sync_buffer=2.0,
        usable=(kept + state).sum(axis=1) * [draw.uniform(0.3, 1.5) for _ in range(2)],
    )


def literal_load(costs: Costs, k: int, i: int, j: int, in_flight: int, synced: bool) -> float:
    """F + B and the cheapest recomputation, from a list of all subsets of the layers."""
    layers = range(i, j)
    held = sum(costs.state[k, l] for l in layers) + max(costs.workspace[k, l] for l in layers)
    held += in_flight * (costs.inputs[i] + sum(costs.kept[k, l] + costs.logits[k, l] for l in layers))
    held += costs.sync_buffer if synced else 0.0
    work = sum(costs.forward[k, l] + costs.backward[k, l] for l in layers)
    best = math.inf
    for chosen in itertools.chain.from_iterable(itertools.combinations(layers, n) for n in range(j - i + 1)):
        if any(costs.saved[k, l] == 0 for l in chosen):
            continue
        freed = in_flight * sum(costs.saved[k, l] for l in chosen) - (costs.rework[k] if chosen else 0.0)
        if held - freed <= costs.usable[k] + 1e-9:
            best = min(best, work + sum(costs.forward[k, l] for l in chosen))
    return best


def test_recomputation_equals_the_cheapest_of_all_subsets() -> None:
    """120 random chains on unequal devices with one to three savings; working set, inputs and state included.

    The layers named add up to what the table charges.
    """
    draw = random.Random(7)
    recomputing = impossible = 0
    for case in range(120):
        costs, synced = random_layers(draw, 1 + case % 3), case % 2 == 0
        table = stage_table(costs, [1, 2, 4], synced)
        assert table.exact
        for k, q in itertools.product(range(2), range(3)):
            in_flight = (1, 2, 4)[q]
            for i, j in itertools.combinations(range(costs.num_layers + 1), 2):
                if draw.random() < 0.5:
                    continue
                expected = literal_load(costs, k, i, j, in_flight, synced)
                load = float(table.load[k, q, i, j])
                assert load == pytest.approx(expected), (case, k, in_flight, i, j)
                impossible += load == math.inf
                if load < math.inf:
                    chosen = recomputed_layers(costs, k, i, j, in_flight, synced)
                    work = float((costs.forward + costs.backward)[k, i:j].sum())
                    assert work + sum(costs.forward[k, l] for l in chosen) == pytest.approx(load)
                    recomputing += bool(chosen)
    assert recomputing > 500 and impossible > 500


@pytest.mark.parametrize("points", [3, 2000])
def test_many_savings_are_exact_until_their_points_are_thinned(points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every saving different the charge is the cheapest subset's; thinned, never less, and the table says so.

    The floor is never more, and is the same where nothing was thinned.
    """
    monkeypatch.setattr("planner.cost.RECOMPUTE_POINTS", points)
    draw = random.Random(8)
    greedy = 0
    for _ in range(40):
        costs = random_layers(draw, 12, 9)
        num_layers = costs.num_layers
        saved = np.array([[3.0 + 2 * l + k for l in range(num_layers)] for k in range(2)])  # all different
        costs = replace(costs, saved=saved, kept=saved + 1, usable=costs.usable * draw.uniform(0.5, 1.2))
        table = stage_table(costs, [1, 3], False)
        assert table.exact or points == 3
        greedy += not table.exact
        least = stage_table(costs, [1, 3], False, floor=True)
        assert np.array_equal(least.load, table.load) if table.exact else (least.load <= table.load).all()
        for k, (q, in_flight) in itertools.product(range(2), enumerate((1, 3))):
            load = float(table.load[k, q, 0, num_layers])
            expected = literal_load(costs, k, 0, num_layers, in_flight, False)
            assert load == pytest.approx(expected) if table.exact else load >= expected * (1 - 1e-9)
            assert float(least.load[k, q, 0, num_layers]) <= expected * (1 + 1e-9)
            assert math.isinf(load) == math.isinf(expected)
            if load < math.inf:
                chosen = recomputed_layers(costs, k, 0, num_layers, in_flight, False)
                base, each = stage_bytes(costs)
                held = base[k, 0, -1] + in_flight * (each[k, 0, -1] - sum(saved[k, l] for l in chosen))
                assert held + (costs.rework[k] if chosen else 0) <= costs.usable[k] * (1 + 1e-9)
    assert bool(greedy) == (points == 3)


def test_a_stage_fits_where_its_table_is_finite() -> None:
    """60 random chains, every range, 1 to 3 in flight, with and without the sync buffer."""
    draw = random.Random(9)
    found = set()
    for case in range(60):
        costs = random_layers(draw, 1 + case % 4)
        for synced in (False, True):
            load = stage_table(costs, [1, 2, 3], synced).load
            for k, q, (i, j) in itertools.product(
                range(2), range(3), itertools.combinations(range(costs.num_layers + 1), 2)
            ):
                found.add(math.isfinite(load[k, q, i, j]))
                assert fits(costs, k, i, j, q + 1, synced) == math.isfinite(load[k, q, i, j]), (case, k, q, i, j)
    assert found == {False, True}


# Pipelines --------------------------------------------------------------------------------------------------------


def simulate(
    forward: Sequence[float], backward: Sequence[float], hand_over: Sequence[float], num_micro_batches: int
) -> float:
    """Seconds of 1F1B, event by event; a transfer starts when its sender is done and keeps no stage busy.

    Stage s runs min(m, S - s) forwards, then backward and forward in turn, then the backwards that are left.
    """
    num_stages, m = len(forward), num_micro_batches
    actions: list[list[tuple[str, int]]] = []
    for s in range(num_stages):
        warm_up = min(m, num_stages - s)
        own = [("F", i) for i in range(warm_up)]
        for i in range(m):
            own.append(("B", i))
            if warm_up + i < m:
                own.append(("F", warm_up + i))
        actions.append(own)
    done: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * num_stages, [0] * num_stages
    while any(at[s] < len(actions[s]) for s in range(num_stages)):
        progress = False
        for s in range(num_stages):
            while at[s] < len(actions[s]):
                kind, i = actions[s][at[s]]
                neighbour = s - 1 if kind == "F" else s + 1
                ready = 0.0
                if 0 <= neighbour < num_stages:
                    if (kind, neighbour, i) not in done:
                        break
                    ready = done[kind, neighbour, i] + hand_over[min(s, neighbour)]
                start = max(clock[s], ready)
                clock[s] = done[kind, s, i] = start + (forward if kind == "F" else backward)[s]
                at[s] += 1
                progress = True
        assert progress, "deadlock"
    return max(clock)


def random_pipeline(
    draw: random.Random, uneven: float, transfers: float
) -> tuple[list[float], list[float], list[float], int]:
    """Up to 8 stages within `uneven` of each other, B between 1 and 3 F, transfers of that share of F, up to 32 m."""
    num_stages, ratio = draw.randint(1, 8), draw.uniform(1, 3)
    forward = [draw.uniform(1 - uneven, 1 + uneven) for _ in range(num_stages)]
    backward = [ratio * draw.uniform(1 - uneven, 1 + uneven) for _ in range(num_stages)]
    return forward, backward, [transfers] * (num_stages - 1), draw.randint(1, 32)


def test_the_simulation_itself_by_hand() -> None:
    """Two stages, F = 1 and 2, B = 1 and 2, a transfer of 0.5, m = 2, worked out on a time line.

    Stage 0: F0 0-1, F1 1-2. Stage 1: F0 1.5-3.5, B0 3.5-5.5, F1 5.5-7.5, B1 7.5-9.5. Stage 0: B0 6-7, B1 10-11.
    """
    assert simulate([1, 2], [1, 2], [0.5], 2) == pytest.approx(11)
    # without transfers: stage 1 F0 1-3, B0 3-5, F1 5-7, B1 7-9; stage 0 B1 9-10
    assert simulate([1, 2], [1, 2], [0.0], 2) == pytest.approx(10)


def test_the_planning_form_by_hand() -> None:
    """Loads 3 and 5, m = 4: 3 + 5 + 3 x 5 = 23."""
    assert pipeline_s([3, 5], 4) == 23


def test_the_planning_form_is_exact_for_equal_stages() -> None:
    """(m + S - 1)(F + B), for every S and m up to 8, fewer micro-batches than stages included."""
    for num_stages, m in itertools.product(range(1, 9), range(1, 9)):
        exact = simulate([1.0] * num_stages, [2.5] * num_stages, [0.0] * (num_stages - 1), m)
        assert pipeline_s([3.5] * num_stages, m) == pytest.approx((m + num_stages - 1) * 3.5) == exact


def test_the_planning_form_is_from_above_and_right_in_the_long_run() -> None:
    """Within 10 % of each other and free links: never below the simulation, 12 % above at most, 1 % at m = 200."""
    draw = random.Random(3)
    for case in range(300):
        forward, backward, free, m = random_pipeline(draw, 0.1, 0.0)
        loads = [f + b for f, b in zip(forward, backward, strict=True)]
        assert 1 - 1e-9 <= pipeline_s(loads, m) / simulate(forward, backward, free, m) <= 1.12
        if case % 10 == 0:
            assert pipeline_s(loads, 200) / simulate(forward, backward, free, 200) <= 1.01


def test_no_schedule_beats_the_floor() -> None:
    """Stages unequal by up to 6 x, transfers up to F: `floor_s` of the compute is never above the simulation."""
    draw = random.Random(4)
    for _ in range(300):
        forward, backward, hand_over, m = random_pipeline(draw, 0.7, draw.choice([0.0, 0.05, 0.25, 1.0]))
        loads = [f + b for f, b in zip(forward, backward, strict=True)]
        assert floor_s(loads, m) <= simulate(forward, backward, hand_over, m) * (1 + 1e-12)


def test_the_floor_by_hand() -> None:
    """Loads 3, 5, 4 and m = 2: 2 x 3, 3 + 2 x 5, 8 + 2 x 4: 16."""
    assert floor_s([3, 5, 4], 2) == 16


def test_one_f_one_b_is_exact_for_even_stages_with_free_links() -> None:
    """300 pipelines of stages within 10 % of each other: 0.0 % off."""
    draw = random.Random(5)
    for _ in range(300):
        forward, backward, free, m = random_pipeline(draw, 0.1, 0.0)
        exact = simulate(forward, backward, free, m)
        assert one_f_one_b_s(forward, backward, free, m) == pytest.approx(exact, rel=5e-4)


@pytest.mark.parametrize(("transfers", "low", "high"), [(0.05, -0.02, 0.005), (0.25, -0.08, 0.03)])
def test_one_f_one_b_is_within_its_stated_errors(transfers: float, low: float, high: float) -> None:
    """300 pipelines with transfers of 5 % and 25 % of F: within -2.0 / +0.5 % and -8 / +3 %."""
    draw = random.Random(6)
    for _ in range(300):
        forward, backward, hand_over, m = random_pipeline(draw, 0.1, transfers)
        exact = simulate(forward, backward, hand_over, m)
        assert low <= one_f_one_b_s(forward, backward, hand_over, m) / exact - 1 <= high
