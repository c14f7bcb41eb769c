"""`planner.placement`: which devices the stages get."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.cost import DeviceClass
from planner.placement import DoesNotPack, Unit, place, unit_link

GB = 10**9
INSIDE, PAIR, NETWORK = Link(bytes_per_s=50 * GB), Link(bytes_per_s=300 * GB), Link(alpha_s=1e-5, bytes_per_s=1 * GB)
MESSAGE = 8e6
Pipelines = Sequence[Sequence[DeviceClass]]


def unit(device_type: str, tp: int = 1) -> DeviceClass:
    return DeviceClass(device_type=device_type, tp=tp)


def cluster(*nodes: Node | str, links: Sequence[NetworkLink] | None = None) -> Cluster:
    """Nodes, or words like "AAB" for a node of two A and a B; 50 GB/s inside and 1 GB/s between them."""
    made = tuple(
        Node(name=f"n{i}", devices=tuple(node), link=INSIDE) if isinstance(node, str) else node
        for i, node in enumerate(nodes)
    )
    types = sorted({device_type for node in made for device_type in node.devices})
    return Cluster(
        name="cluster",
        device_types=tuple(DeviceType(name=name, memory_bytes=16 * GB) for name in types),
        nodes=made,
        links=(NetworkLink(between=("*", "*"), link=NETWORK),) if links is None else tuple(links),
    )


def placed(c: Cluster, pipelines: Pipelines) -> tuple[tuple[Unit, ...], ...]:
    """As `place`, after what must hold for any answer.

    A unit has the devices of its class, in one node, at tp >= 2 in one fast group where the node has some; no device is
    used twice.
    """
    found = place(c, pipelines, MESSAGE)
    assert [len(row) for row in found] == [len(pipeline) for pipeline in pipelines]
    for wanted, got in zip(itertools.chain(*pipelines), itertools.chain(*found), strict=True):
        assert len(got.devices) == wanted.tp
        assert {device.type for device in got.devices} == {wanted.device_type}
        assert {device.node for device in got.devices} == {got.node}
        groups = c.nodes[got.node].groups
        if wanted.tp > 1 and groups:
            assert any({device.index for device in got.devices} <= set(group) for group in groups)
    used = Counter(device.name for row in found for got in row for device in got.devices)
    assert max(used.values()) == 1
    return found


def hand_overs_s(c: Cluster, found: Sequence[Sequence[Unit]]) -> float:
    return sum(unit_link(c, a, b).seconds(MESSAGE) for row in found for a, b in itertools.pairwise(row))


def names(units: Sequence[Unit]) -> list[str]:
    return [device.name for got in units for device in got.devices]


# Where tp groups sit ----------------------------------------------------------------------------------------------


def test_groups_of_one_kind_from_a_node_of_interleaved_kinds() -> None:
    """4 big and 4 small by turns in one node: tp 2 twice and tp 4, every group of one kind, all eight devices used."""
    c = cluster("BSBSBSBS")
    found = placed(c, [[unit("B", 2), unit("S", 4)], [unit("B", 2)]])
    assert len(names(found[0]) + names(found[1])) == 8
    assert {device.index % 2 for device in found[0][1].devices} == {1}


def test_a_mixed_node_gives_singles_and_pairs_of_both_kinds() -> None:
    """Interleaved 4 + 4 as one pipeline of two big, a pair of big, a pair of small and two small."""
    classes = [unit("B"), unit("B"), unit("B", 2), unit("S", 2), unit("S"), unit("S")]
    assert len(names(placed(cluster("BSBSBSBS"), [classes])[0])) == 8


@pytest.mark.parametrize(
    ("nodes", "pipelines"),
    [
        # 2 + 3 + 3: a pair in each node, the two devices left over as second stages beside a pair
        (("AA", "AAA", "AAA"), [[unit("A", 2), unit("A")], [unit("A", 2), unit("A")], [unit("A", 2)]]),
        # 8 + 2: tp 8 and tp 2, or tp 4 twice and tp 2, or five pairs
        (("AAAAAAAA", "AA"), [[unit("A", 8), unit("A", 2)]]),
        (("AAAAAAAA", "AA"), [[unit("A", 4), unit("A", 4)], [unit("A", 2)]]),
        (("AAAAAAAA", "AA"), [[unit("A", 2)] * 5]),
        # 4 + 1, on unequal devices
        (("AAAA", "B"), [[unit("A", 4), unit("B")]]),
        (("AAAA", "B"), [[unit("A", 2), unit("A"), unit("A"), unit("B")]]),
        # 1 + 4 + 2 of tp 1, 4, 2, the small nodes first
        (("A", "AA", "AAAA"), [[unit("A"), unit("A", 4), unit("A", 2)]]),
    ],
    ids=lambda value: "+".join(str(len(node)) for node in value) if isinstance(value[0], str) else "",
)
def test_uneven_nodes_are_used_up_with_groups_inside_nodes(nodes: Sequence[str], pipelines: Pipelines) -> None:
    """Nodes of (2, 3, 3), (8, 2), (4, 1) and (1, 2, 4) devices: tp groups stay inside nodes and no device is left."""
    c = cluster(*nodes)
    found = placed(c, pipelines)
    assert sorted(name for row in found for name in names(row)) == sorted(device.name for device in c.devices)


def test_small_groups_leave_room_for_large_ones() -> None:
    """tp 4 comes out of the only node of four, whatever the order it is asked in; pairs and singles take the rest."""
    c = cluster("AAAA", "AA", "AAA")
    for pipelines in itertools.permutations([[unit("A")], [unit("A", 2)], [unit("A", 4)], [unit("A", 2)]]):
        found = placed(c, pipelines)
        large = next(row[0] for row in found if len(row[0].devices) == 4)
        assert large.node == 0


def test_tp_groups_sit_in_fast_pairs() -> None:
    """NVLink on (0, 1) and (2, 3): tp 2 gets the pairs; the device outside them can only be used alone."""
    node = Node(name="n", devices=("A",) * 5, link=INSIDE, groups=((0, 1), (2, 3)), group_link=PAIR)
    found = placed(cluster(node), [[unit("A", 2), unit("A", 2), unit("A")]])
    assert sorted(sorted(device.index for device in got.devices) for got in found[0][:2]) == [[0, 1], [2, 3]]
    assert names(found[0][2:]) == ["n:4"]
    with pytest.raises(DoesNotPack):
        place(cluster(node), [[unit("A", 2)] * 3], MESSAGE)
    with pytest.raises(DoesNotPack):
        place(cluster(node), [[unit("A", 4)]], MESSAGE)


def test_pairs_that_cross_indices_and_kinds() -> None:
    """Pairs (0, 2) and (1, 3) of a node B S B S, and a pair (4, 5) of two kinds, which no tp group can use."""
    groups = ((0, 2), (1, 3), (4, 5))
    node = Node(name="n", devices=tuple("BSBSBS"), link=INSIDE, groups=groups, group_link=PAIR)
    found = placed(cluster(node), [[unit("B", 2), unit("S", 2)], [unit("B"), unit("S")]])
    assert names(found[1]) == ["n:4", "n:5"]
    with pytest.raises(DoesNotPack):
        place(cluster(node), [[unit("B", 2)], [unit("B", 2)]], MESSAGE)


def test_units_that_do_not_fit_into_the_nodes_do_not_pack() -> None:
    """Seven devices in nodes of four and three: no tp 2 four times, no tp 8; two tp 3 leave one device, no pair."""
    c = cluster("AAAA", "AAA")
    for pipeline in ([unit("A", 2)] * 4, [unit("A", 8)], [unit("A", 3), unit("A", 3), unit("A", 2)], [unit("A")] * 8):
        with pytest.raises(DoesNotPack):
            place(c, [pipeline], MESSAGE)
    placed(c, [[unit("A", 3), unit("A", 3), unit("A")]])


def test_degrees_that_divide_one_another_pack_whenever_they_are_few_enough() -> None:
    """200 random clusters of mixed nodes and pairs: units of tp 1, 2 and 4 within the capacities always find devices.

    Enough is: for each degree d, the units of tp >= d are worth no more than the places for d devices.
    """
    draw = random.Random(1)
    full = 0
    for _ in range(200):
        nodes = []
        for i in range(draw.randint(1, 5)):
            devices = tuple(draw.choice("AB") for _ in range(draw.randint(1, 8)))
            order = draw.sample(range(len(devices)), len(devices))
            pairs = tuple(zip(order[::2], order[1::2], strict=False)) if draw.random() < 0.3 else ()
            nodes.append(
                Node(name=f"n{i}", devices=devices, link=INSIDE, groups=pairs, group_link=PAIR if pairs else None)
            )
        c = cluster(*nodes)
        wanted = []
        for name in c.types:
            taken: Counter[int] = Counter()
            for _ in range(12):
                tp = draw.choice([1, 1, 2, 4])
                after = taken + Counter([tp])
                if all(sum(t // d * n for t, n in after.items() if t >= d) <= c.capacity(name, d) for d in (1, 2, 4)):
                    taken = after
            wanted += [unit(name, tp) for tp in taken.elements()]
        draw.shuffle(wanted)
        cut = draw.randint(1, len(wanted))
        found = placed(c, [row for row in (wanted[:cut], wanted[cut:]) if row])
        full += sum(len(names(row)) for row in found) == len(c.devices)
    assert full > 40


# Neighbours -------------------------------------------------------------------------------------------------------


def test_neighbours_share_a_node_when_they_can() -> None:
    """Three nodes of a B and an S each, three pipelines B S: every pipeline stays in one node."""
    found = placed(cluster("BS", "SB", "BS"), [[unit("B"), unit("S")]] * 3)
    assert all(a.node == b.node for a, b in found)
    assert len({row[0].node for row in found}) == 3


def test_a_pipeline_crosses_the_network_as_seldom_as_it_can() -> None:
    """S B B S S B B S over a node of four B and one of four S crosses four times, over two mixed nodes once."""
    order = [unit(name) for name in "SBBSSBBS"]
    apart, mixed = cluster("BBBB", "SSSS"), cluster("BBSS", "BBSS")
    assert crossings(placed(apart, [order])) == 4
    assert crossings(placed(mixed, [order])) == 1


def crossings(found: Sequence[Sequence[Unit]]) -> int:
    return sum(a.node != b.node for row in found for a, b in itertools.pairwise(row))


def test_equal_pipelines_take_a_node_each() -> None:
    """Four pipelines of four equal stages over four nodes of four: no hand-over between nodes."""
    assert crossings(placed(cluster(*["AAAA"] * 4), [[unit("A")] * 4] * 4)) == 0


def test_neighbours_sit_in_one_fast_pair() -> None:
    """NVLink on (0, 3) and (1, 2): two pipelines of two stages take a pair each."""
    node = Node(name="n", devices=("A",) * 4, link=INSIDE, groups=((0, 3), (1, 2)), group_link=PAIR)
    found = placed(cluster(node), [[unit("A"), unit("A")]] * 2)
    assert sorted(sorted(device.index for got in row for device in got.devices) for row in found) == [[0, 3], [1, 2]]


def test_neighbours_stay_on_an_island() -> None:
    """Two islands of two nodes, 10 GB/s inside and 1 GB/s between them: pipelines of two S and B stay on one."""
    nodes = [
        Node(name=f"{name}{i}", devices=(name,) * 2, link=INSIDE, island=f"island{i}") for i in (0, 1) for name in "BS"
    ]
    fast = Link(bytes_per_s=10 * GB)
    links = [NetworkLink(between=(f"island{i}", f"island{i}"), link=fast) for i in (0, 1)]
    c = cluster(*nodes, links=[*links, NetworkLink(between=("*", "*"), link=NETWORK)])
    for row in placed(c, [[unit("B"), unit("S"), unit("S"), unit("B")]] * 2):
        assert len({c.nodes[got.node].island for got in row}) == 1


def test_no_exchange_of_two_equal_units_saves_time() -> None:
    """60 random mixed clusters and pipelines: swapping any two units of a class makes the hand-overs no faster."""
    draw = random.Random(2)
    for _ in range(60):
        nodes = ["".join(draw.choice("AAB") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(2, 4))]
        c = cluster(*nodes)
        classes = [unit(device.type) for device in c.devices]
        draw.shuffle(classes)
        cut = draw.randint(1, len(classes))
        pipelines = [row for row in (classes[:cut], classes[cut:]) if row]
        found = [list(row) for row in placed(c, pipelines)]
        least = hand_overs_s(c, found)
        spots = [(p, s) for p, row in enumerate(found) for s in range(len(row))]
        for (p, s), (q, t) in itertools.combinations(spots, 2):
            if pipelines[p][s] == pipelines[q][t]:
                found[p][s], found[q][t] = found[q][t], found[p][s]
                assert hand_overs_s(c, found) >= least * (1 - 1e-9)
                found[p][s], found[q][t] = found[q][t], found[p][s]


def test_the_same_question_gets_the_same_devices() -> None:
    """Placement is deterministic."""
    c = cluster("BSBS", "BBS", "SSB")
    pipelines = [[unit("B"), unit("S"), unit("B")], [unit("S"), unit("B", 2)], [unit("S", 2)]]
    assert placed(c, pipelines) == placed(c, pipelines)


def test_units_without_a_link_are_no_neighbours() -> None:
    """Two nodes of two A that nothing joins: pipelines of two stages take a node each, one of four does not pack."""
    c = cluster("AA", "AA", links=[])
    assert crossings(placed(c, [[unit("A")] * 2] * 2)) == 0
    with pytest.raises(DoesNotPack):
        place(c, [[unit("A")] * 4], MESSAGE)
