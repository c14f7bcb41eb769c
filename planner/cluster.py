"""What there is to train on: device types, nodes of devices, and the links inside and between nodes.

A link takes ``alpha + bytes / beta(bytes)`` seconds, beta a number, a measured table or a fit over message size.
Between two devices it is, first match first,

    in one fast group        the node's group link (NVLink pair, island of devices)
    in one node              the node's link
    in two nodes             the most specific network link: of the two nodes, islands, device types, or with "*"
    otherwise                the widest path through nodes and switches: its narrowest link, all its alphas

Nodes that look alike from everywhere form a *class*; links are worked out per pair of classes, never of devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.files import Document, cached, did_you_mean, from_dict, shorthand

if TYPE_CHECKING:
    import networkx

Array = NDArray[np.float64]
SLOWEST, FASTEST = 1e6, 1e13  # bytes/s; outside, a bandwidth is a unit slip
MOST_CLIQUES = 32
ANY, TYPE, ISLAND, NODE = range(4)  # how specific a name in a network link is
WIDTH_BYTES = 64e6  # message size at which links of a path are compared
FIT_X = np.arange(-10.0, 15.0)  # log2 of megabytes: sizes at which a fit is taken at its word, 1 kB to 16 GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Time of one message between two devices. Exactly one of `bytes_per_s`, `table` and `fit` is given.

    Parameters
    ----------
    alpha_s
        Seconds before the first byte.
    bytes_per_s
        Bandwidth at every message size.
    table
        Pairs (message bytes, bytes/s), measured; linear in between over the logarithm of the size, constant outside.
    fit
        (a, b, c) of ``a x^2 + b x + c`` GB/s (1e9 bytes/s), x = log2(bytes / 1e6), from 1 kB to 16 GB and constant
        outside. Where it is not positive, the value at the nearest power of two (megabytes) where it is.
    cap_bytes_per_s
        Upper limit of the bandwidth.
    """

    BRIEF: ClassVar[bool] = True

    alpha_s: float = 0.0
    bytes_per_s: float | None = None
    table: tuple[tuple[float, float], ...] | None = None
    fit: tuple[float, float, float] | None = None
    cap_bytes_per_s: float | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha_s) and self.alpha_s >= 0):
            raise ValueError(f"alpha_s: {self.alpha_s}, expected seconds of at least 0")
        given = [key for key in ("bytes_per_s", "table", "fit") if getattr(self, key) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"bytes_per_s: {got} given, expected exactly one of bytes_per_s, table, fit")
        for key in ("bytes_per_s", "cap_bytes_per_s"):
            if getattr(self, key) is not None:
                _check_bandwidth(key, getattr(self, key))
        if self.table is not None:
            self._check_table(self.table)
        if self.fit is not None:
            values = _polynomial(self.fit, FIT_X)
            if not np.all(np.isfinite(values)) or not np.any(values > 0):
                raise ValueError(f"fit: {list(self.fit)} is nowhere positive from 1 kB to 16 GB")
            _check_bandwidth("fit", 1e9 * float(values[(FIT_X >= 0) & (FIT_X <= 10)].max()), f" from {list(self.fit)}")

    @staticmethod
    def _check_table(table: tuple[tuple[float, float], ...]) -> None:
        if not table:
            raise ValueError("table: empty, expected pairs [message bytes, bytes/s]")
        for i, (nbytes, beta) in enumerate(table):
            if not nbytes > 0 or (i and nbytes <= table[i - 1][0]):
                raise ValueError(f"table[{i}]: message of {nbytes} bytes, expected positive sizes in increasing order")
            if not (math.isfinite(beta) and beta > 0):
                raise ValueError(f"table[{i}]: bandwidth {beta}, expected bytes per second above 0")
        _check_bandwidth("table", max(beta for _, beta in table))  # small messages may well be slow

    @overload
    def seconds(self, nbytes: float | np.integer[Any]) -> float: ...
    @overload
    def seconds(self, nbytes: Array) -> Array: ...
    def seconds(self, nbytes: float | ArrayLike) -> float | Array:
        """Seconds to send `nbytes` (one number, or an array of them); nothing to send takes no time."""
        if isinstance(nbytes, (int, float, np.number)):
            return self.alpha_s + float(nbytes) / self.bandwidth(float(nbytes)) if nbytes > 0 else 0.0
        sizes = np.asarray(nbytes, dtype=np.float64)
        sent = np.maximum(sizes, 1.0)
        return np.where(sizes > 0, self.alpha_s + sizes / self.bandwidth(sent), 0.0)

    @overload
    def bandwidth(self, nbytes: float) -> float: ...
    @overload
    def bandwidth(self, nbytes: Array) -> Array: ...
    def bandwidth(self, nbytes: float | Array) -> float | Array:
        """Bytes per second at a message size above 0, without the alpha."""
        if isinstance(nbytes, np.ndarray):
            return self._bandwidth(nbytes)
        return self._bandwidth_of_one(nbytes)

    @cached
    def _bandwidth_of_one(self, nbytes: float) -> float:
        return float(self._bandwidth(np.array([nbytes], dtype=np.float64))[0])

    def _bandwidth(self, nbytes: Array) -> Array:
        cap = math.inf if self.cap_bytes_per_s is None else self.cap_bytes_per_s
        if self.bytes_per_s is not None:
            return np.full(np.shape(nbytes), min(self.bytes_per_s, cap))
        curve_x, curve = self._curve()
        x = np.clip(np.log2(nbytes / 1e6), curve_x[0], curve_x[-1])
        values = np.interp(x, curve_x, curve)
        if self.fit is not None:
            fitted = 1e9 * _polynomial(self.fit, x)
            sound = _polynomial(self.fit, np.floor(x)), fitted, _polynomial(self.fit, np.ceil(x))
            values = np.where(np.minimum.reduce(sound) > 0, fitted, values)
        capped: Array = np.minimum(values, cap)
        return capped

    @cached
    def _curve(self) -> tuple[Array, Array]:
        """Bandwidth over log2(megabytes): the table, or the fit at powers of two, its non-positive part replaced."""
        if self.table is not None:
            table = np.array(self.table)
            return np.log2(table[:, 0] / 1e6), table[:, 1]
        assert self.fit is not None
        positive = FIT_X[_polynomial(self.fit, FIT_X) > 0]
        nearest = positive[np.abs(FIT_X[:, None] - positive[None, :]).argmin(axis=1)]
        return FIT_X, 1e9 * _polynomial(self.fit, nearest)


def _polynomial(fit: tuple[float, float, float], x: Array) -> Array:
    a, b, c = fit
    values: Array = (a * x + b) * x + c
    return values


def _check_bandwidth(key: str, beta: float, origin: str = "") -> None:
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"{key}: bandwidth {beta}{origin}, expected bytes per second above 0")
    if not SLOWEST <= beta <= FASTEST:
        expected = "expected bytes per second (12.5e9 for 100 Gb/s)"
        raise ValueError(f"{key}: {beta:g}{origin} looks like another unit, {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """A kind of accelerator.

    Parameters
    ----------
    memory_bytes
        Memory of one device.
    peak_flops_per_s
        Peak rate at the precision of the profile.
    price_per_hour
        Price of one device.
    watts
        Power of one device under load.
    """

    BRIEF: ClassVar[bool] = True

    name: str
    memory_bytes: int
    peak_flops_per_s: float | None = None
    price_per_hour: float | None = None
    watts: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name: empty, expected the name of a device type")
        if self.memory_bytes <= 0:
            raise ValueError(f"memory_bytes: {self.memory_bytes} of {self.name!r}, expected bytes above 0")
        if self.peak_flops_per_s is not None and not 0 < self.peak_flops_per_s < math.inf:
            raise ValueError(f"peak_flops_per_s: {self.peak_flops_per_s} of {self.name!r}, expected a positive number")
        for key in ("price_per_hour", "watts"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{key}: {value} of {self.name!r}, expected a number of at least 0")


def _expand_devices(data: Any) -> Any:
    """``{"A100-40": 4}`` stands for four entries."""
    if not isinstance(data, dict):
        return data
    for name, count in data.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{count!r} devices of {name!r}, expected a whole number above 0")
    return [str(name) for name, count in data.items() for _ in range(count)]


def _collapse_devices(devices: list[str]) -> Any:
    counts = Counter(devices)
    return dict(counts) if devices == [name for name, count in counts.items() for _ in range(count)] else devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Devices in one machine.

    Parameters
    ----------
    name
        Unique in the cluster.
    devices
        Device type of every device, by index. In a file also as ``{"A100-40": 4}``.
    link
        Link between two devices of the node; left out, they reach each other as devices on different nodes do.
    groups
        Fast groups: tuples of device indices joined by `group_link` (NVLink pairs, say). Each device is in one at most.
    group_link
        Link between two devices of one fast group.
    island
        Name of the part of the network the node stands in.
    nics
        Network ports that its devices share in equal parts, by index; None for one per device. In the simulation
        transfers of one port queue behind each other; the search takes every device to have its own.
    """

    BRIEF: ClassVar[bool] = True

    name: str
    devices: tuple[str, ...] = field(metadata=shorthand(_expand_devices, _collapse_devices))
    link: Link | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    group_link: Link | None = None
    island: str | None = None
    nics: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name: empty, expected the name of a node")
        if not self.devices:
            raise ValueError(f"devices: node {self.name!r} has none")
        if self.nics is not None and not 1 <= self.nics <= len(self.devices):
            raise ValueError(
                f"nics: {self.nics} of node {self.name!r}, expected between 1 and its {len(self.devices)} devices"
            )
        if bool(self.groups) != (self.group_link is not None):
            has = "groups without" if self.groups else "no groups, but"
            raise ValueError(f"group_link: node {self.name!r} has {has} a group_link, expected both or neither")
        seen: set[int] = set()
        for i, group in enumerate(self.groups):
            if not group:
                raise ValueError(f"groups[{i}]: empty in node {self.name!r}")
            for index in group:
                if not 0 <= index < len(self.devices):
                    last = len(self.devices) - 1
                    raise ValueError(f"groups[{i}]: device {index} is not in node {self.name!r}, which has 0 to {last}")
                if index in seen:
                    raise ValueError(f"groups[{i}]: device {index} of node {self.name!r} is in a group already")
                seen.add(index)

    def nic_of(self, index: int) -> int:
        """Index of the network port that a device uses."""
        return index if self.nics is None else index * self.nics // len(self.devices)

    def group_of(self, index: int) -> int | None:
        """Index of the fast group that a device is in."""
        return next((i for i, group in enumerate(self.groups) if index in group), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """Link between devices in different nodes.

    Parameters
    ----------
    between
        Two names, each of a node, an island, a device type or a switch, or "*" for any node.
    link
        Link of one device at each end, with `devices` at each end sending at once.
    devices
        How many devices drove the link at each end when it was measured.
    """

    BRIEF: ClassVar[bool] = True

    between: tuple[str, str]
    link: Link
    devices: int = 1

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"devices: {self.devices} at each end of {list(self.between)}, expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device: index of its node, index in it, type, and name ("node0:0")."""

    node: int
    index: int
    type: str
    name: str


def _expand_nodes(data: Any) -> Any:
    """``{"count": 8, "name": "a100", ...}`` stands for nodes a100-0 to a100-7."""
    if not isinstance(data, list):
        return data
    nodes: list[Any] = []
    for i, entry in enumerate(data):
        if not isinstance(entry, dict) or "count" not in entry:
            nodes.append(entry)
            continue
        count = entry["count"]
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"entry {i} has count {count!r}, expected a whole number above 0")
        if not isinstance(entry.get("name"), str):
            raise ValueError(f"entry {i} has name {entry.get('name')!r}, expected text that starts the {count} names")
        rest = {key: value for key, value in entry.items() if key != "count"}
        try:
            from_dict(Node, rest)
        except ValueError as error:  # named by its place in the file, not by the place of a copy
            raise ValueError(f"entry {i} ({entry['name']}): {error}") from None
        nodes += [{**rest, "name": f"{entry['name']}-{j}"} for j in range(count)]
    return nodes


def _collapse_nodes(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    runs: list[list[dict[str, Any]]] = []
    for node in nodes:
        base = node["name"].rpartition("-")[0]
        run = runs[-1] if runs else []
        if base and run and run[0]["name"] == f"{base}-0" and node == {**run[0], "name": f"{base}-{len(run)}"}:
            run.append(node)
        else:
            runs.append([node])
    return [
        run[0] if len(run) == 1 else {"name": run[0]["name"][:-2], "count": len(run), **_without_name(run[0])}
        for run in runs
    ]


def _without_name(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "name"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Document):
    """Nodes of devices and the links between them.

    Parameters
    ----------
    name
        Cluster.
    device_types
        The accelerators; their order is the order of `types`.
    nodes
        The machines. In a file ``{"count": 8, "name": "a100", ...}`` stands for nodes a100-0 to a100-7.
    links
        Links between nodes.
    switches
        Switches in `links`; needed only for one that a single link names, which would otherwise be a misspelt name.
    notes
        Where the numbers come from.
    """

    SCHEMA: ClassVar[str] = "hpp-cluster/1"
    BRIEF: ClassVar[bool] = True

    name: str
    device_types: tuple[DeviceType, ...]
    nodes: tuple[Node, ...] = field(metadata=shorthand(_expand_nodes, _collapse_nodes))
    links: tuple[NetworkLink, ...] = ()
    switches: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = [each.name for each in self.device_types]
        _check_unique("device_types", known)
        if not self.nodes:
            raise ValueError("nodes: empty, expected at least one node")
        _check_unique("nodes", [node.name for node in self.nodes])
        for i, node in enumerate(self.nodes):
            for name in node.devices:
                if name not in known:
                    types = did_you_mean(name, known)
                    raise ValueError(f"nodes[{i}].devices: {name!r} is not among device_types: {types}")
        self._check_links()

    def _check_links(self) -> None:
        homes = self._homes()
        partners: dict[str, set[str]] = {}
        seen: dict[tuple[frozenset[str], int], int] = {}
        for i, each in enumerate(self.links):
            a, b = each.between
            partners.setdefault(a, set()).add(b)
            partners.setdefault(b, set()).add(a)
            key = (frozenset(each.between), each.devices)
            if key in seen:
                already = f"is already links[{seen[key]}]"
                raise ValueError(f"links[{i}].between: {a!r} and {b!r} with devices {each.devices} {already}")
            seen[key] = i
            if a == b and homes.get(a, ["switch"])[0] in ("node", "switch"):
                raise ValueError(f"links[{i}].between: {a!r} twice; a link inside a node is that node's `link`")
        for i, each in enumerate(self.links):
            for name in each.between:
                if len(homes.get(name, ())) > 1:
                    both = " and ".join(homes[name])
                    raise ValueError(f"links[{i}].between: {name!r} is the name of a {both}; rename one of them")
                if name not in homes and len(partners[name]) < 2 and "*" not in partners[name]:
                    raise ValueError(
                        f"links[{i}].between: {name!r} is no node, island or device type, and no other link names it,"
                        f" as one would a switch; known: {did_you_mean(name, homes)}"
                    )

    @cached
    def _homes(self) -> dict[str, list[str]]:
        """What each name stands for: node, island, device type, switch."""
        homes: dict[str, list[str]] = {"*": ["any"]}
        for name in dict.fromkeys(each.name for each in self.device_types):
            homes.setdefault(name, []).append("device type")
        for name in dict.fromkeys(node.island for node in self.nodes if node.island is not None):
            homes.setdefault(name, []).append("island")
        for node in self.nodes:
            homes.setdefault(node.name, []).append("node")
        for name in dict.fromkeys(self.switches):
            homes.setdefault(name, []).append("switch")
        return homes

    # Devices

    @property
    @cached
    def devices(self) -> tuple[Device, ...]:
        """Every device, node by node."""
        return tuple(
            Device(node=i, index=j, type=name, name=f"{node.name}:{j}")
            for i, node in enumerate(self.nodes)
            for j, name in enumerate(node.devices)
        )

    @property
    @cached
    def types(self) -> tuple[str, ...]:
        """Names of the device types that occur, in the order of `device_types`."""
        present = {name for node in self.nodes for name in node.devices}
        return tuple(each.name for each in self.device_types if each.name in present)

    @cached
    def device_type(self, name: str) -> DeviceType:
        """The device type of this name."""
        for each in self.device_types:
            if each.name == name:
                return each
        names = [each.name for each in self.device_types]
        raise ValueError(f"device type {name!r} is not among {did_you_mean(name, names)}")

    def device(self, name: str) -> Device:
        """The device of this name, such as "node0:0"."""
        found = self._devices_by_name().get(name)
        if found is None:
            raise ValueError(f"device {name!r} is not among {did_you_mean(name, self._devices_by_name())}")
        return found

    @cached
    def _devices_by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached
    def sharing(self, names: tuple[str, ...]) -> int:
        """Most of these devices, all of one node, that use the same network port."""
        devices = [self.device(name) for name in names]
        ports = [self.nodes[device.node].nic_of(device.index) for device in devices]
        return max(ports.count(port) for port in ports)

    @cached
    def num_devices(self, device_type: str) -> int:
        """How many devices there are of a type."""
        return sum(node.devices.count(device_type) for node in self.nodes)

    @cached
    def slots(self, device_type: str) -> tuple[int, ...]:
        """Sizes of the places where a tp group may sit (tp >= 2): the fast groups of a node, or all of a node without.

        A place counts its devices of this type; in a node with fast groups a device outside them has no tp peer.
        """
        sizes = []
        for node in self.nodes:
            places = node.groups or (range(len(node.devices)),)
            sizes += [sum(node.devices[i] == device_type for i in place) for place in places]
        return tuple(size for size in sizes if size)

    @cached
    def capacity(self, device_type: str, tp: int) -> int:
        """How many tp groups of a degree fit at most, each in one slot."""
        if tp == 1:
            return self.num_devices(device_type)
        return sum(size // tp for size in self.slots(device_type))

    def without(self, node_name: str) -> Cluster:
        """The cluster after losing a node, with the links that are left."""
        names = [node.name for node in self.nodes]
        if node_name not in names:
            raise ValueError(f"node {node_name!r} is not among {did_you_mean(node_name, names)}")
        return self.only([name for name in names if name != node_name])

    def only(self, names: Collection[str]) -> Cluster:
        """The cluster of some of its nodes, with the links that are left."""
        nodes = tuple(node for node in self.nodes if node.name in names)
        gone = {name for node in self.nodes for name in (node.name, node.island) if name is not None}
        gone -= {name for node in nodes for name in (node.name, node.island) if name is not None}
        gone -= {each.name for each in self.device_types}
        links = tuple(each for each in self.links if not gone & set(each.between))
        known = self._homes()
        named = dict.fromkeys(name for each in links for name in each.between)
        switches = tuple(name for name in named if name not in known or "switch" in known[name])
        return replace(self, nodes=nodes, links=links, switches=switches)

    # Links

    def link(self, a: Device, b: Device, devices: int = 1) -> Link:
        """The link between two different devices.

        Parameters
        ----------
        devices
            How many devices send at each end at once: takes the measurement with the most devices that is not more.

        Raises
        ------
        ValueError
            If nothing joins the two.
        """
        if a == b:
            raise ValueError(f"a link joins two devices, got {a.name!r} twice")
        if a.node == b.node:
            inside = self._inside(a.node, a.index, b.index, devices)
            if inside is not None:
                return inside
        found = self._between(a.node, b.node, a.type, b.type, devices)
        if found is None:
            raise ValueError(f"no link between {a.name!r} ({a.type}) and {b.name!r} ({b.type}); add one to `links`")
        return found

    def links_between(self, type_a: str, type_b: str, devices: int = 1) -> tuple[Link, ...]:
        """The distinct links between two different devices of these types, inside nodes first."""
        inside, across = self.links_inside(type_a, type_b, devices), self.links_across(type_a, type_b, devices)
        return tuple(dict.fromkeys((*inside, *across)))

    @cached
    def links_inside(self, type_a: str, type_b: str, devices: int = 1) -> tuple[Link, ...]:
        """The distinct links between two different devices of these types in one node."""
        found: dict[Link, None] = {}
        for members in self._classes():
            node = self.nodes[members[0]]
            for i, j in _pairs(node.devices, type_a, type_b):
                link = self._inside(members[0], i, j, devices)
                if link is not None:
                    found[link] = None
        return tuple(found)

    @cached
    def links_across(self, type_a: str, type_b: str, devices: int = 1) -> tuple[Link, ...]:
        """The distinct links between two devices of these types on different nodes; pairs without one are left out."""
        found: dict[Link, None] = {}
        ends_a = [members for members in self._classes() if type_a in self.nodes[members[0]].devices]
        ends_b = [members for members in self._classes() if type_b in self.nodes[members[0]].devices]
        for members_a in ends_a:
            for members_b in ends_b:
                a, b = members_a[0], members_b[0]
                if a == b and len(members_b) == 1:
                    continue
                link = self._between(a, members_b[1] if a == b else b, type_a, type_b, devices)
                if link is not None:
                    found[link] = None
        return tuple(found)

    def joined(self, a: Device, b: Device) -> bool:
        """Whether a link joins two different devices."""
        inside = a.node == b.node and self._inside(a.node, a.index, b.index, 1) is not None
        return inside or self._between(a.node, b.node, a.type, b.type, 1) is not None

    @property
    @cached
    def complete(self) -> bool:
        """Whether a link joins any two devices."""
        ends = {(self._class_of()[device.node], device.type): device for device in reversed(self.devices)}
        others = {(self._class_of()[device.node], device.type): device for device in self.devices}
        pairs = [(a, b) for a in ends.values() for b in others.values() if a != b]
        return all(self.joined(a, b) for a, b in pairs)

    def _inside(self, index: int, i: int, j: int, devices: int) -> Link | None:
        node = self.nodes[index]
        group = node.group_of(i)
        if group is not None and group == node.group_of(j):
            return node.group_link
        return node.link or self._between(index, index, node.devices[i], node.devices[j], devices)

    @cached
    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """Node indices of each largest group of nodes whose devices all reach one another, at most `MOST_CLIQUES`."""
        import networkx

        graph: networkx.Graph[int] = networkx.Graph()
        graph.add_nodes_from(range(len(self.nodes)))
        on_node: dict[int, list[Device]] = {}
        for device in self.devices:
            alike = on_node.setdefault(device.node, [])
            if all(other.type != device.type for other in alike):
                alike.append(device)
        for a, b in combinations(on_node, 2):
            if all(self.joined(x, y) for x in on_node[a] for y in on_node[b]):
                graph.add_edge(a, b)
        found = sorted(tuple(sorted(each)) for each in islice(networkx.find_cliques(graph), MOST_CLIQUES))
        return tuple(sorted(found, key=lambda each: -len(each)))

    @cached
    def _class_of(self) -> tuple[int, ...]:
        """Class of every node. Nodes of one class have equal devices, links, island, and links that name them."""
        named: dict[str, list[tuple[str, int, Link]]] = {}
        for each in self.links:
            a, b = each.between
            named.setdefault(a, []).append((b, each.devices, each.link))
            named.setdefault(b, []).append((a, each.devices, each.link))
        classes: dict[Any, int] = {}
        return tuple(
            classes.setdefault((replace(node, name="-"), frozenset(named.get(node.name, ()))), len(classes))
            for node in self.nodes
        )

    @cached
    def _classes(self) -> tuple[tuple[int, ...], ...]:
        """Node indices of every class."""
        members: dict[int, list[int]] = {}
        for node, number in enumerate(self._class_of()):
            members.setdefault(number, []).append(node)
        return tuple(map(tuple, members.values()))

    def _between(self, node_a: int, node_b: int, type_a: str, type_b: str, devices: int) -> Link | None:
        """The link between devices in two different nodes, worked out once per pair of node classes."""
        classes = self._class_of()
        key = ("between", classes[node_a], classes[node_b], type_a, type_b, devices)
        if key not in self._cache:
            ends_a, ends_b = self._ends(node_a, type_a), self._ends(node_b, type_b)
            self._cache[key] = self._most_specific(ends_a, ends_b, devices) or self._path(node_a, node_b, devices)
        result: Link | None = self._cache[key]
        return result

    def _ends(self, node: int, device_type: str) -> list[tuple[int, str]]:
        """The names a network link may call this end by, each with how specific it is."""
        island = self.nodes[node].island
        ends = [(NODE, self.nodes[node].name), (TYPE, device_type), (ANY, "*")]
        return ends if island is None else [*ends, (ISLAND, island)]

    def _most_specific(self, ends_a: list[tuple[int, str]], ends_b: list[tuple[int, str]], devices: int) -> Link | None:
        """Both ends as specific as can be: node pair, island pair, type pair, then those with '*'."""
        index = self._links_by_ends()
        found = [
            (min(rank_a, rank_b), max(rank_a, rank_b), index[frozenset((a, b))])
            for rank_a, a in ends_a
            for rank_b, b in ends_b
            if frozenset((a, b)) in index
        ]
        return _driven_by(max(found, key=lambda each: each[:2])[2], devices) if found else None

    @cached
    def _links_by_ends(self) -> dict[frozenset[str], list[NetworkLink]]:
        index: dict[frozenset[str], list[NetworkLink]] = {}
        for each in self.links:
            index.setdefault(frozenset(each.between), []).append(each)
        return index

    # Paths through switches

    @property
    def graph(self) -> networkx.Graph[str]:
        """Nodes and switches, joined by the links that name them (attributes ``link`` and, in bytes/s, ``width``).

        A link between a switch and an island, a device type or "*" joins all nodes of that kind to the switch. Links
        between islands or device types are no edges: they hold for any two nodes of their kind.
        """
        return self._graph(1)

    @cached
    def _graph(self, devices: int) -> networkx.Graph[str]:
        import networkx

        graph: networkx.Graph[str] = networkx.Graph()
        graph.add_nodes_from(node.name for node in self.nodes)
        edges = [
            (*edge, _driven_by(links, devices))
            for links in self._links_by_ends().values()
            for edge in self._edges(*links[0].between)
        ]
        for _, a, b, link in sorted(edges, key=lambda edge: edge[0]):  # the more specific comes later and stays
            graph.add_edge(a, b, link=link, width=link.bandwidth(WIDTH_BYTES))
        return graph

    def _edges(self, a: str, b: str) -> Iterator[tuple[int, str, str]]:
        """Edges that a link makes, each with how specific it is."""
        homes = self._homes()
        home_a, home_b = homes.get(a, ["switch"])[0], homes.get(b, ["switch"])[0]
        if home_a in ("node", "switch") and home_b in ("node", "switch"):
            yield NODE, a, b
        elif "switch" in (home_a, home_b):
            switch, kind = (a, b) if home_a == "switch" else (b, a)
            for i, node in enumerate(self.nodes):
                ranks = [rank for name in set(node.devices) for rank, end in self._ends(i, name) if end == kind]
                if ranks:
                    yield max(ranks), node.name, switch

    @cached
    def _tree(self, devices: int) -> networkx.Graph[str]:
        """Spanning tree of the widest links: its path between two nodes is as wide as any."""
        import networkx

        tree: networkx.Graph[str] = networkx.maximum_spanning_tree(self._graph(devices), weight="width")
        return tree

    def _path(self, node_a: int, node_b: int, devices: int) -> Link | None:
        """Widest path as one link: the narrowest of its links, with the alphas of all; the least alpha among equals."""
        import networkx

        graph, tree = self._graph(devices), self._tree(devices)
        a, b = self.nodes[node_a].name, self.nodes[node_b].name
        if a == b or not networkx.has_path(tree, a, b):
            return None
        path = networkx.shortest_path(tree, a, b)
        if graph.number_of_edges() > tree.number_of_edges():
            width = min(graph.edges[edge]["width"] for edge in pairwise(path))
            wide = networkx.subgraph_view(graph, filter_edge=lambda u, v: graph.edges[u, v]["width"] >= width)
            path = networkx.shortest_path(wide, a, b, weight=lambda u, v, edge: edge["link"].alpha_s + 1e-9)
        links: list[Link] = [graph.edges[edge]["link"] for edge in pairwise(path)]
        narrowest = min(links, key=lambda link: link.bandwidth(WIDTH_BYTES))
        return replace(narrowest, alpha_s=math.fsum(link.alpha_s for link in links))


def _driven_by(links: list[NetworkLink], devices: int) -> Link:
    """The link measured with the most devices up to `devices`, or else with the fewest."""
    most = max((each.devices for each in links if each.devices <= devices), default=min(each.devices for each in links))
    return next(each.link for each in links if each.devices == most)


def _pairs(devices: tuple[str, ...], type_a: str, type_b: str) -> Iterator[tuple[int, int]]:
    for i, a in enumerate(devices):
        for j, b in enumerate(devices):
            if i != j and a == type_a and b == type_b:
                yield i, j


def _check_unique(key: str, names: list[str]) -> None:
    counts = Counter(names)
    for i, name in enumerate(names):
        if counts[name] > 1 and name in names[:i]:
            raise ValueError(f"{key}[{i}]: the name {name!r} occurs twice")
