"""planner.cluster: devices, and the links between them."""

from __future__ import annotations

import pickle
import random
import time
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import cluster

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node

PCIE, NVLINK, ETHERNET = Link(bytes_per_s=12e9), Link(bytes_per_s=250e9), Link(alpha_s=5e-5, bytes_per_s=1.25e9)
TYPES = (DeviceType(name="A100", memory_bytes=40 * 10**9), DeviceType(name="V100", memory_bytes=16 * 10**9))


def node(name: str, *devices: str, **fields: Any) -> Node:
    return Node(name=name, devices=devices, **{"link": PCIE, **fields})


def nodes(**devices: int) -> tuple[Node, ...]:
    """Nodes of A100s: name -> number."""
    return tuple(node(name, *["A100"] * count) for name, count in devices.items())


def between(a: str, b: str, link: Link = ETHERNET, devices: int = 1) -> NetworkLink:
    return NetworkLink(between=(a, b), link=link, devices=devices)


def build(*members: Node, links: tuple[NetworkLink, ...] = (), **fields: Any) -> Cluster:
    return Cluster(name="c", device_types=TYPES, nodes=members, links=links, **fields)


def speed(gigabytes: float, alpha_s: float = 0.0) -> Link:
    return Link(alpha_s=alpha_s, bytes_per_s=gigabytes * 1e9)


def joined(c: Cluster, a: str, b: str, devices: int = 1) -> Link:
    return c.link(c.device(a), c.device(b), devices)


# Link


def test_a_number_is_alpha_plus_bytes_over_bandwidth() -> None:
    """10 us + 1 GB / 2 GB/s = 0.50001 s, for one number and for arrays; nothing to send takes no time."""
    link = Link(alpha_s=1e-5, bytes_per_s=2e9)
    assert link.seconds(1e9) == pytest.approx(0.50001, rel=1e-12)
    assert link.seconds(0) == 0.0
    np.testing.assert_allclose(link.seconds(np.array([0.0, 1e9, 4e9])), [0, 0.50001, 2.00001], rtol=1e-12)
    assert isinstance(link.seconds(np.int64(5)), float)
    assert Link(bytes_per_s=2e9, cap_bytes_per_s=1e9).seconds(1e9) == 1.0


def test_a_table_is_linear_over_the_logarithm_and_constant_outside() -> None:
    """1 GB/s at 1 MB, 3 at 4 MB, 6 at 16 MB: 2 at 2 MB (half way), 1 below, 6 above; capped it is at most 5."""
    link = Link(table=((1e6, 1e9), (4e6, 3e9), (16e6, 6e9)))
    sizes = np.array([1e3, 1e6, 2e6, 4e6, 8e6, 16e6, 1e9])
    expected = np.array([1, 1, 2, 3, 4.5, 6, 6]) * 1e9
    np.testing.assert_allclose(link.bandwidth(sizes), expected, rtol=1e-12)
    np.testing.assert_allclose(link.seconds(sizes), sizes / expected, rtol=1e-12)
    assert [link.seconds(float(x)) for x in sizes] == pytest.approx(list(sizes / expected), rel=1e-12)
    assert replace(link, cap_bytes_per_s=5e9).bandwidth(16e6) == 5e9


def test_a_fit_is_taken_at_its_word_where_it_is_positive() -> None:
    """The published NVLink fit gives 33, 127.2 and 206.5 GB/s at 1, 2^4.64 = 25 and 200 MB, and is capped above."""
    # a x^2 + b x + c with x = log2(MB): x = 4.6439 gives 17.43 + 76.17 + 32.98 = 126.57; x = 7.6439 gives 47.22 +
    # 125.37 + 32.98 = 205.57; at 16 GB 0.808 * 195 + 16.4 * 13.97 + 33 = 419, over the cap of 249.
    link = Link(fit=(0.80818532, 16.40103598, 32.98046678), cap_bytes_per_s=248.9e9)
    np.testing.assert_allclose(
        link.bandwidth(np.array([1e6, 25e6, 200e6, 16e9])), [32.98046678e9, 126.57e9, 205.57e9, 248.9e9], rtol=1e-3
    )


def test_a_fit_that_turns_negative_takes_the_nearest_positive_value() -> None:
    """Below 0.21 MB the NVLink fit is negative: messages there go at the 3.41 GB/s of 1/4 MB, in positive time."""
    # x = -2: 0.808 * 4 - 16.401 * 2 + 32.980 = 3.411; x = -3: -8.95, so the value at -2 holds below.
    link = Link(fit=(0.80818532, 16.40103598, 32.98046678))
    sizes = np.array([1.0, 1e3, 3e4, 2e5, 2.5e5])
    np.testing.assert_allclose(link.bandwidth(sizes), np.full(5, 3.4111e9), rtol=1e-3)
    # A fit falling with size, 4 - x, is 0 at 16 MB: from 8 MB (x = 3, 1 GB/s) on that stays.
    falling = Link(fit=(0.0, -1.0, 4.0))
    np.testing.assert_allclose(falling.bandwidth(np.array([4e6, 8e6, 15e6, 16e6, 1e9])), [2e9, 1e9, 1e9, 1e9, 1e9])


@pytest.mark.parametrize("seed", range(20))
def test_every_link_takes_finite_positive_time(seed: int) -> None:
    """Whatever the fit, any message from 1 byte to 1 TB takes a finite time above 0, the same in an array as alone."""
    draw = random.Random(seed)
    sizes = np.logspace(0, 12, 200)
    link = Link(fit=(draw.uniform(-1, 1), draw.uniform(-10, 10), draw.uniform(1, 50)))
    times = link.seconds(sizes)
    assert np.all(np.isfinite(times)) and np.all(times > 0)
    assert [link.seconds(float(x)) for x in sizes] == pytest.approx(list(times), rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "bytes_per_s: none given, expected exactly one of bytes_per_s, table, fit"),
        ({"bytes_per_s": 1e9, "fit": (0, 0, 1)}, "bytes_per_s: bytes_per_s and fit given, expected exactly one of"),
        ({"bytes_per_s": 0}, "bytes_per_s: bandwidth 0, expected bytes per second above 0"),
        ({"bytes_per_s": -1e9}, "bytes_per_s: bandwidth -1000000000.0, expected bytes per second above 0"),
        ({"bytes_per_s": 12.5}, "bytes_per_s: 12.5 looks like another unit, expected bytes per second (12.5e9 for 100"),
        ({"bytes_per_s": 1e14}, "bytes_per_s: 1e+14 looks like another unit, expected bytes per second"),
        ({"bytes_per_s": 1e9, "cap_bytes_per_s": 25}, "cap_bytes_per_s: 25 looks like another unit"),
        ({"bytes_per_s": 1e9, "alpha_s": -1}, "alpha_s: -1, expected seconds of at least 0"),
        ({"table": ()}, "table: empty, expected pairs [message bytes, bytes/s]"),
        ({"table": ((2e6, 1e9), (1e6, 2e9))}, "table[1]: message of 1000000.0 bytes, expected positive sizes in incr"),
        ({"table": ((0.0, 1e9),)}, "table[0]: message of 0.0 bytes, expected positive sizes"),
        ({"table": ((1e6, 0.0),)}, "table[0]: bandwidth 0.0, expected bytes per second above 0"),
        ({"table": ((1e6, 10.0), (2e6, 20.0))}, "table: 20 looks like another unit"),
        ({"fit": (0.0, 0.0, -1.0)}, "fit: [0.0, 0.0, -1.0] is nowhere positive from 1 kB to 16 GB"),
        ({"fit": (0.0, 0.0, 1e9)}, "fit: 1e+18 from [0.0, 0.0, 1000000000.0] looks like another unit"),
    ],
)
def test_a_link_refuses(fields: dict[str, Any], message: str) -> None:
    """A link needs one bandwidth, in bytes per second: gigabits or gigabytes written there are caught."""
    with pytest.raises(ValueError) as caught:
        Link(**fields)
    assert str(caught.value).startswith(message)


# Devices, places for tp groups


def test_uneven_nodes_are_all_used() -> None:
    """7, 2+3+3, 8+2 and 4+1 devices: every device counts, and tp groups are the whole ones that fit in each node."""
    shapes: dict[tuple[int, ...], dict[int, int]] = {
        (7,): {1: 7, 2: 3, 3: 2, 4: 1, 7: 1, 8: 0},
        (2, 3, 3): {1: 8, 2: 3, 3: 2, 4: 0},
        (8, 2): {1: 10, 2: 5, 4: 2, 8: 1},
        (4, 1): {1: 5, 2: 2, 4: 1},
    }
    for shape, capacities in shapes.items():
        c = build(*nodes(**{f"n{i}": count for i, count in enumerate(shape)}), links=(between("*", "*"),))
        assert c.slots("A100") == shape
        assert c.num_devices("A100") == sum(shape) == len(c.devices)
        assert {tp: c.capacity("A100", tp) for tp in capacities} == capacities
        assert c.types == ("A100",)
        assert c.num_devices("V100") == c.capacity("V100", 1) == 0


def test_interleaved_kinds_in_one_node() -> None:
    """4 big and 4 small devices that alternate by index: each kind has one place of 4, and names keep the index."""
    c = build(node("box", *["V100", "A100"] * 4))
    assert c.types == ("A100", "V100")  # in the order of device_types
    assert c.slots("A100") == c.slots("V100") == (4,)
    assert c.capacity("V100", 4) == 1
    assert [d.name for d in c.devices if d.type == "A100"] == ["box:1", "box:3", "box:5", "box:7"]
    assert c.links_between("A100", "V100") == (PCIE,)
    assert c.links_across("A100", "V100") == ()


def test_nvlink_pairs() -> None:
    """Groups (0, 1) and (2, 3): NVLink inside a pair, PCIe between pairs, tp 2 twice and tp 4 not at all."""
    c = build(node("box", *["A100"] * 4, groups=((0, 1), (2, 3)), group_link=NVLINK))
    assert joined(c, "box:0", "box:1") == joined(c, "box:3", "box:2") == NVLINK
    assert joined(c, "box:1", "box:2") == PCIE
    assert c.slots("A100") == (2, 2)
    assert [c.capacity("A100", tp) for tp in (1, 2, 4)] == [4, 2, 0]
    assert set(c.links_between("A100", "A100")) == {PCIE, NVLINK}


def test_a_device_outside_the_fast_groups() -> None:
    """5 devices, 2 pairs: the fifth has no tp peer, and reaches the others over the node's link."""
    c = build(node("box", *["A100"] * 5, groups=((0, 1), (2, 3)), group_link=NVLINK))
    assert c.capacity("A100", 2) == 2
    assert c.capacity("A100", 1) == 5
    assert joined(c, "box:4", "box:0") == PCIE


def test_a_fast_group_of_two_kinds() -> None:
    """In a group of 2 A100 and 2 V100 each kind has a place of 2."""
    c = build(node("box", "A100", "V100", "A100", "V100", groups=((0, 1, 2, 3),), group_link=NVLINK))
    assert c.slots("A100") == c.slots("V100") == (2,)
    assert c.links_between("A100", "V100") == (NVLINK,)


def test_find_by_name() -> None:
    """Devices and device types are found by name; a wrong name lists what there is."""
    c = build(*nodes(n=2))
    assert c.device("n:1").index == 1
    assert c.device_type("V100").memory_bytes == 16 * 10**9
    with pytest.raises(ValueError, match="device 'n:2' is not among n:0, n:1"):
        c.device("n:2")
    with pytest.raises(ValueError, match="device type 'A10' is not among A100, V100; did you mean 'A100'"):
        c.device_type("A10")


# Links between nodes


def test_the_most_specific_link_wins() -> None:
    """Node pair before island pair before type pair before '*', whatever their order in the file."""
    links = (
        between("*", "*", speed(1)),
        between("A100", "*", speed(2)),
        between("A100", "V100", speed(3)),
        between("A100", "west", speed(4)),
        between("east", "west", speed(5)),
        between("a", "west", speed(6)),
        between("a", "v", speed(7)),
    )
    a, v = node("a", "A100", island="east"), node("v", "V100", island="west")
    for kept in range(1, len(links) + 1):
        assert joined(build(a, v, links=links[:kept]), "a:0", "v:0") == speed(kept)
        assert joined(build(a, v, links=links[:kept][::-1]), "v:0", "a:0") == speed(kept)


def test_the_measurement_with_the_most_devices_up_to_the_asked() -> None:
    """Measured with 1 and 4 devices: for 2 the first counts, for 4 and 8 the second; measured with 4 only, that."""
    links = (between("A100", "A100", speed(8)), between("A100", "A100", speed(2), devices=4))
    c = build(*nodes(a=8, b=8), links=links)
    assert [joined(c, "a:0", "b:0", n) for n in (1, 2, 4, 8)] == [speed(8), speed(8), speed(2), speed(2)]
    assert c.links_across("A100", "A100", 4) == (speed(2),)
    assert joined(build(*nodes(a=8, b=8), links=links[1:]), "a:0", "b:0", 1) == speed(2)


def test_islands_joined_by_slow_ethernet() -> None:
    """Two islands: fast inside, Ethernet between; both occur between devices of the one type they share."""
    members = [node(f"n{i}", "A100", island="east" if i < 3 else "west") for i in range(6)]
    fabric = Link(bytes_per_s=25e9)
    links = (between("east", "east", fabric), between("west", "west", fabric), between("east", "west"))
    c = build(*members, links=links)
    assert joined(c, "n0:0", "n2:0") == joined(c, "n3:0", "n5:0") == fabric
    assert joined(c, "n0:0", "n5:0") == ETHERNET
    assert set(c.links_between("A100", "A100")) == {fabric, ETHERNET}


def test_a_path_is_as_wide_as_its_narrowest_link() -> None:
    """Through two switches at 10, 1 and 5 GB/s the path has 1 GB/s, and the alphas add: 1 + 2 + 4 = 7 us."""
    links = (
        between("a", "core", speed(10, 1e-6)),
        between("core", "edge", speed(1, 2e-6)),
        between("edge", "v", speed(5, 4e-6)),
    )
    c = build(node("a", "A100"), node("v", "V100"), links=links)
    link = joined(c, "a:0", "v:0")
    assert link.bytes_per_s == 1e9
    assert link.alpha_s == pytest.approx(7e-6)
    assert sorted(c.graph.nodes) == ["a", "core", "edge", "v"]
    assert c.graph.edges["core", "edge"]["link"] == speed(1, 2e-6)


def test_the_widest_path_wins_then_the_least_alpha() -> None:
    """Of three routes the widest is taken, and of equally wide ones the one with the least alpha."""

    def route(switch: str, gigabytes: float, alpha_s: float) -> tuple[NetworkLink, ...]:
        return tuple(between(switch, end, speed(gigabytes, alpha_s)) for end in ("a", "b"))

    c = build(*nodes(a=1, b=1), links=(*route("s", 5, 1e-6), *route("t", 9, 9e-6), *route("u", 9, 2e-6)))
    assert joined(c, "a:0", "b:0") == speed(9, 4e-6)


def test_a_switch_of_an_island_joins_all_its_nodes() -> None:
    """A link of a switch to an island, a type or '*' holds for all nodes there; a node's own link goes before it."""
    members = [node(f"a{i}", "A100", island="east") for i in range(3)] + [node("v", "V100")]
    links = (between("east", "core", speed(8)), between("a2", "core", speed(2)), between("V100", "core", speed(4)))
    c = build(*members, links=links)
    assert joined(c, "a0:0", "a1:0") == speed(8)
    assert joined(c, "a0:0", "v:0") == speed(4)
    assert joined(c, "a2:0", "v:0") == speed(2)
    star = build(*nodes(a=1, b=1), links=(between("*", "core"),))
    assert joined(star, "a:0", "b:0").bytes_per_s == 1.25e9


def test_no_link_is_an_error_that_names_the_two() -> None:
    """Devices that nothing joins: link names both; links_across leaves the pair out."""
    c = build(*nodes(a=1, b=1), node("v", "V100"), links=(between("a", "b"),))
    with pytest.raises(ValueError, match=r"no link between 'a:0' \(A100\) and 'v:0' \(V100\); add one to `links`"):
        joined(c, "a:0", "v:0")
    assert c.links_across("A100", "V100") == ()
    assert c.links_across("A100", "A100") == (ETHERNET,)
    with pytest.raises(ValueError, match="got 'a:0' twice"):
        joined(c, "a:0", "a:0")


def random_cluster(seed: int) -> Cluster:
    """Nodes of 1 to 4 devices of two types, alike or not, some with fast groups, and links of every kind of name."""
    draw = random.Random(seed)
    shapes = [tuple(draw.choices(["A100", "V100"], k=draw.randint(1, 4))) for _ in range(2)]
    members = []
    for i in range(draw.randint(2, 6)):
        devices = draw.choice(shapes)
        pairs: dict[str, Any] = (
            {"groups": ((0, 1),), "group_link": NVLINK} if len(devices) > 1 and draw.random() < 0.4 else {}
        )
        members.append(node(f"n{i}", *devices, island=draw.choice([None, "east", "west"]), **pairs))
    names = ["A100", "V100", "*", *{m.island for m in members if m.island}, *(m.name for m in members)]
    links: dict[Any, NetworkLink] = {}
    for _ in range(draw.randint(1, 8)):
        a, b = draw.choice(names), draw.choice(names)
        count = draw.choice([1, 2])
        if a != b or not a.startswith("n"):
            links[frozenset((a, b)), count] = between(a, b, speed(draw.randint(1, 9), 1e-6), count)
    for member in draw.sample(members, k=draw.randint(0, len(members))):
        links[member.name, "s"] = between(member.name, "s", speed(draw.randint(1, 9), 1e-6))
    return build(*members, links=tuple(links.values()), switches=("s",))


@pytest.mark.parametrize("seed", range(60))
def test_links_between_types_are_those_of_all_pairs(seed: int) -> None:
    """Worked out per pair of node classes, the links equal those collected over every pair of devices."""
    c = random_cluster(seed)
    alone = [Cluster.from_dict(c.to_dict()) for _ in range(2)]
    for devices in (1, 2):
        across: dict[tuple[str, str], set[Link]] = {(a, b): set() for a in ("A100", "V100") for b in ("A100", "V100")}
        inside = {key: set[Link]() for key in across}
        for a, b in permutations(c.devices, 2):
            fresh = alone[devices - 1]
            fresh._cache.pop(
                ("between", fresh._class_of()[a.node], fresh._class_of()[b.node], a.type, b.type, devices), 0
            )
            try:
                link = fresh.link(a, b, devices)
            except ValueError:
                continue
            (inside if a.node == b.node else across)[a.type, b.type].add(link)
        for (one, other), links in across.items():
            assert set(c.links_across(one, other, devices)) == links
            assert set(c.links_between(one, other, devices)) == links | inside[one, other]
            again = Cluster.from_dict(c.to_dict()).links_between(one, other, devices)
            assert c.links_between(one, other, devices) == again


@pytest.mark.parametrize("seed", range(20))
def test_a_path_is_the_widest_there_is(seed: int) -> None:
    """In random graphs of switches the width of the link equals the widest over all simple paths."""
    import networkx

    draw = random.Random(seed)
    names = ["a", "b", "s", "t", "u"]
    links = {}
    for _ in range(8):
        x, y = draw.sample(names, 2)
        links[frozenset((x, y))] = between(x, y, speed(draw.randint(1, 9), draw.randint(1, 5) * 1e-6))
    c = build(*nodes(a=1, b=1), links=tuple(links.values()), switches=("s", "t", "u"))
    if frozenset(("a", "b")) in links or not networkx.has_path(c.graph, "a", "b"):
        return
    routes = [
        [links[frozenset(pair)].link for pair in pairwise(path)]
        for path in networkx.all_simple_paths(c.graph, "a", "b")
    ]
    widths = [min(link.bytes_per_s or 0 for link in route) for route in routes]
    alphas = [sum(link.alpha_s for link in route) for route in routes]
    link = joined(c, "a:0", "b:0")
    assert link.bytes_per_s == max(widths)
    assert link.alpha_s == pytest.approx(min(alpha for width, alpha in zip(widths, alphas) if width == max(widths)))


def test_a_thousand_nodes_are_fast() -> None:
    """1200 nodes of one device, joined by type pairs or each by its own link to a switch: answers within a second."""
    start = time.perf_counter()
    c = cluster({"fast": 600, "slow": 600}, across={("fast", "slow"): 1e9})
    assert len(c.links_between("fast", "slow")) == 1
    assert c.capacity("slow", 1) == 600
    members = tuple(node(f"n{i}", "A100" if i % 2 else "V100") for i in range(1200))
    star = build(*members, links=tuple(between(f"n{i}", "core", speed(1 + i % 4)) for i in range(1200)))
    # n_i has 1 + i % 4 GB/s: V100 (even i) 1 or 3, A100 (odd i) 2 or 4; a path has the smaller of its two ends.
    assert {link.bytes_per_s for link in star.links_across("A100", "V100")} == {1e9, 2e9, 3e9}
    devices = star.devices
    for i in range(1, 1200):
        star.link(devices[0], devices[i])
    assert time.perf_counter() - start < 2


# Values and files


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("seed", range(5))
def test_round_trip(tmp_path: Path, suffix: str, seed: int) -> None:
    """A cluster saved and loaded is the same value with the same digest."""
    c = replace(random_cluster(seed), notes=("measured at night",))
    c.save(tmp_path / f"c.{suffix}")
    again = Cluster.load(tmp_path / f"c.{suffix}")
    assert again == c
    assert again.digest == c.digest != build(*nodes(a=1)).digest
    assert pickle.loads(pickle.dumps(c)) == c


def test_shorthands(tmp_path: Path) -> None:
    """{"count": 3} stands for three nodes, {"A100": 2} for two devices; saving writes them so again."""
    path = tmp_path / "c.yaml"
    path.write_text(
        """
schema: hpp-cluster/1
name: mixed
device_types:
  - {name: A100, memory_bytes: 40e9, peak_flops_per_s: 312e12}
  - {name: V100, memory_bytes: 16e9}
nodes:
  - {count: 3, name: a, devices: {A100: 2}, link: {fit: [-0.2, 7.2, 22.2], cap_bytes_per_s: 68e9}}
  - {name: v, devices: {V100: 1, A100: 1}, link: {table: [[1e6, 1e9], [64e6, 9e9]]}, island: lab}
  - {name: laptop, devices: [V100]}
links:
  - {between: ["*", "*"], link: {alpha_s: 5e-5, bytes_per_s: 1.25e9}}
"""
    )
    c = Cluster.load(path)
    assert [n.name for n in c.nodes] == ["a-0", "a-1", "a-2", "v", "laptop"]
    assert [n.devices for n in c.nodes[2:]] == [("A100", "A100"), ("V100", "A100"), ("V100",)]
    data = c.to_dict()
    assert [(n["name"], n.get("count"), n["devices"]) for n in data["nodes"]] == [
        ("a", 3, {"A100": 2}),
        ("v", None, {"V100": 1, "A100": 1}),
        ("laptop", None, {"V100": 1}),
    ]
    assert Cluster.from_dict(data) == c
    # names that only look like a run are written one by one
    odd = build(*nodes(**{"x-0": 1, "x-2": 1, "y-1": 1}))
    assert [n["name"] for n in odd.to_dict()["nodes"]] == ["x-0", "x-2", "y-1"]


def test_losing_a_node() -> None:
    """without drops the node and the links that name it; switches and the other nodes' links stay."""
    members = (node("a", "A100", island="east"), node("b", "A100", island="east"), node("v", "V100", island="west"))
    links = (between("east", "core", speed(4)), between("v", "core", speed(2)), between("east", "west", speed(1)))
    c = build(*members, links=links)
    left = c.without("v")
    assert [n.name for n in left.nodes] == ["a", "b"]
    assert left.links == links[:1]
    assert joined(left, "a:0", "b:0") == joined(c, "a:0", "b:0") == speed(4)
    assert left.types == ("A100",)
    assert [n.name for n in left.without("a").nodes] == ["b"]
    assert Cluster.from_dict(left.to_dict()) == left
    with pytest.raises(ValueError, match="node 'w' is not among a, b, v"):
        c.without("w")
    with pytest.raises(ValueError, match="nodes: empty"):
        build(node("a", "A100")).without("a")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceType(name="X", memory_bytes=0), "memory_bytes: 0 of 'X', expected bytes above 0"),
        (lambda: DeviceType(name="", memory_bytes=1), "name: empty"),
        (
            lambda: DeviceType(name="X", memory_bytes=1, peak_flops_per_s=0),
            "peak_flops_per_s: 0 of 'X', expected a pos",
        ),
        (lambda: DeviceType(name="X", memory_bytes=1, watts=-1), "watts: -1 of 'X', expected a number of at least 0"),
        (lambda: node(""), "name: empty"),
        (lambda: node("n"), "devices: node 'n' has none"),
        (
            lambda: node("n", "A100", groups=((0,),)),
            "group_link: node 'n' has groups without a group_link, expected both",
        ),
        (
            lambda: node("n", "A100", group_link=PCIE),
            "group_link: node 'n' has no groups, but a group_link, expected both",
        ),
        (
            lambda: node("n", "A100", groups=((0, 1),), group_link=PCIE),
            "groups[0]: device 1 is not in node 'n', which has 0 to 0",
        ),
        (
            lambda: node("n", *["A100"] * 3, groups=((0, 1), (1, 2)), group_link=PCIE),
            "groups[1]: device 1 of node 'n' is in a group already",
        ),
        (lambda: node("n", "A100", groups=((0,), ()), group_link=PCIE), "groups[1]: empty in node 'n'"),
        (lambda: between("a", "b", devices=0), "devices: 0 at each end of ['a', 'b'], expected at least 1"),
        (lambda: build(), "nodes: empty, expected at least one node"),
        (
            lambda: build(node("n", "A10")),
            "nodes[0].devices: 'A10' is not among device_types: A100, V100; did you mean",
        ),
        (lambda: build(*nodes(a=1), *nodes(a=2)), "nodes[1]: the name 'a' occurs twice"),
        (
            lambda: replace(build(*nodes(a=1)), device_types=TYPES + TYPES),
            "device_types[2]: the name 'A100' occurs twice",
        ),
        (
            lambda: build(*nodes(node0=1), links=(between("node0", "nod1"),)),
            "links[0].between: 'nod1' is no node, island or device type, and no other link names it,",
        ),
        (lambda: build(*nodes(node0=1), links=(between("A100", "nod0"),)), "links[0].between: 'nod0' is no node"),
        (
            lambda: build(*nodes(a=2), links=(between("a", "a"),)),
            "links[0].between: 'a' twice; a link inside a node is that node's `link`",
        ),
        (
            lambda: build(*nodes(a=1, b=1), links=(between("a", "b"), between("b", "a"))),
            "links[1].between: 'b' and 'a' with devices 1 is already links[0]",
        ),
        (
            lambda: build(*nodes(A100=1, b=1), links=(between("A100", "b"),)),
            "links[0].between: 'A100' is the name of a device type and node; rename one of them",
        ),
    ],
)
def test_a_cluster_refuses(make: Any, message: str) -> None:
    """What does not fit together is refused with key, value and what would be right."""
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("nodes", [{"count": 0, "name": "a"}], "nodes: entry 0 has count 0, expected a whole number above 0"),
        ("nodes", [{"count": 2}], "nodes: entry 0 has name None, expected text that starts the 2 names"),
        ("nodes", [{"name": "a", "devices": {"A100": 0}}], "nodes[0].devices: 0 devices of 'A100', expected a whole"),
        (
            "nodes",
            [{"name": "a", "devices": "A100"}],
            "nodes[0].devices: expected a list, each entry text, got text 'A100'",
        ),
        (
            "nodes",
            [{"name": "a", "devices": ["A100"], "lnik": {}}],
            "nodes[0]: key 'lnik' is not among the keys: name, ",
        ),
        (
            "nodes",
            [
                {"name": "a", "devices": ["A100"]},
                {"count": 2, "name": "b", "devices": {"A100": 1}, "link": {"alpha": 1}},
            ],
            "nodes: entry 1 (b): link: key 'alpha' is not among the keys: alpha_s, bytes_per_s, ",
        ),
        (
            "links",
            [{"between": ["*", "*"], "link": {"bytes_per_s": 100}}],
            "links[0].link.bytes_per_s: 100 looks like another unit",
        ),
        (
            "links",
            [{"between": ["*"], "link": {}}],
            "links[0].between: expected a list of 2: text, text, got a list of 1",
        ),
        ("device_types", [{"name": "A100", "memory_bytes": "40 GB"}], "device_types[0].memory_bytes: expected a whole"),
    ],
)
def test_file_errors_name_the_key(key: str, value: Any, message: str) -> None:
    """Whatever is wrong in a cluster file is named: file, key, value, what would be right."""
    with pytest.raises(ValueError) as caught:
        Cluster.from_dict({**build(*nodes(a=1)).to_dict(), key: value}, "c.yaml")
    assert str(caught.value).startswith(f"c.yaml: {message}")
