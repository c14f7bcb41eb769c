"""Links between the processes of a run, measured: a cluster as the planner reads it.

    links.cluster(device_type="A100-40").save("cluster.yaml")      # on every process, under torchrun

Two processes send a message to and fro; half of the shortest round trip is what it takes one way. A line through the
times over message sizes, in relative terms, gives alpha and beta:

    t(n) = alpha + n / beta,    the least sum over n of ((alpha + n / beta) / t(n) - 1)^2,  alpha >= 0

Small messages that are faster than this line are left out of it: a traffic shaper lets a burst of bytes pass unshaped.
Where no line fits, the link is a table of bandwidths. Links that differ little are made one, so that nodes that are
alike look alike to the planner.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.cost import ring_all_reduce_s
from runtime.measure import device_name

SIZES = tuple(1 << k for k in range(12, 25, 2))  # 4 KiB to 16 MiB
REPEATS = 5
ENOUGH_S = 0.1  # a message that takes longer is the largest that is sent
FEWEST = 5  # sizes, however long they take
POINTS = 3  # that a line goes through, at least
ERROR = 0.15  # most by which a line may miss a measured time
ALIKE = 1.25  # links that differ by less, at the largest message, are taken for one
FAST = 2.0  # devices of a node that reach each other so many times as fast as others form a group
Times = Mapping[int, float]  # message bytes -> seconds one way
Pairs = tuple[tuple[int, int], ...]  # of ranks


# Times to links


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a process says of itself: its node, its device's type, and the memory it may use."""

    name: str
    device_type: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """alpha + n / beta, the smallest message it is meant for, and its largest relative error from there on."""

    alpha_s: float
    bytes_per_s: float
    least_bytes: int
    error: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + nbytes / self.bytes_per_s


def fit(times: Times, burst_bytes: int = 0) -> Line:
    """The line through times of messages; where it fits badly, through those of the larger ones.

    Small messages are left out only if all that are left out are faster than the line, as they are with a shaper.

    Parameters
    ----------
    burst_bytes
        Smaller messages are left out in any case.
    """
    sizes = sorted(size for size in times if size >= burst_bytes)
    if len(sizes) < 2:
        raise ValueError(f"times: of {len(sizes)} message sizes of at least {burst_bytes} bytes, expected 2 or more")
    whole = _line({size: times[size] for size in sizes})
    if whole.error <= ERROR:
        return whole
    shorter = [_line({size: times[size] for size in sizes[k:]}) for k in range(1, len(sizes) - POINTS + 1)]
    passed = [
        line
        for line in shorter
        if all(times[size] < line.seconds(size) for size in sizes if size < line.least_bytes) and line.error <= ERROR
    ]
    return min(passed, key=lambda line: line.error, default=whole)


def _line(times: Times) -> Line:
    rows = [(1 / t, n / t) for n, t in times.items()]  # alpha u + v / beta = 1
    uu, uv, vv = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = uu * vv - uv * uv
    alpha, slope = ((u * vv - v * uv) / determinant, (uu * v - uv * u) / determinant) if determinant else (0.0, 0.0)
    if alpha < 0 or slope <= 0:
        alpha, slope = 0.0, v / vv
    error = max(abs((alpha + slope * n) / t - 1) for n, t in times.items())
    return Line(alpha, 1 / slope, min(times), error)


def as_link(times: Times, burst_bytes: int = 0) -> Link:
    """A line where one fits; else a table of bandwidths beyond the line's alpha."""
    line = fit(times, burst_bytes)
    if line.error <= ERROR:
        return Link(alpha_s=line.alpha_s, bytes_per_s=line.bytes_per_s)
    alpha_s = min(line.alpha_s, 0.9 * min(times.values()))
    sizes = sorted(size for size in times if size >= burst_bytes)
    return Link(alpha_s=alpha_s, table=tuple((float(n), n / (times[n] - alpha_s)) for n in sizes))


# Measuring


def check(world: int, sizes: Sequence[int] = SIZES, burst_bytes: int = 0) -> None:
    """Whether `cluster` can measure; to be asked before processes are started for it.

    Raises
    ------
    ValueError
        If there are fewer than two processes, or fewer than two message sizes of at least `burst_bytes`.
    """
    if world < 2:
        raise ValueError("links: one process runs, expected two or more (torchrun --nproc-per-node N)")
    if len(sizes) < 2:
        raise ValueError(f"sizes: {list(sizes)}, expected two message sizes or more")
    most = sorted(sizes)[-2]
    if not 0 <= burst_bytes <= most:
        raise ValueError(f"burst: {burst_bytes} bytes, expected 0 to {most}, the last message size but one")


def ping_pong(first: int, second: int, device: torch.device, sizes: Sequence[int] = SIZES) -> dict[int, float]:
    """Seconds one way by message size, on the first of two ranks; the second, which has to call it too, gets nothing.

    The first tells the second before each size whether to go on.
    """
    found: dict[int, float] = {}
    leads = dist.get_rank() == first
    going = torch.ones(1, device=device)
    for size in sizes:
        if leads:
            going.fill_(float(_goes_on(found)))
            dist.send(going, second)
        else:
            dist.recv(going, first)
        if not going.item():
            break
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        trips = [_round_trip(message, first, second) for _ in range(REPEATS + 1)]
        if leads:
            found[size] = min(trips[1:]) / 2
    return found


def _goes_on(found: Times) -> bool:
    return len(found) < FEWEST or max(found.values()) < ENOUGH_S


def _round_trip(message: torch.Tensor, first: int, second: int) -> float:
    began = time.perf_counter()
    if dist.get_rank() == first:
        dist.send(message, second)
        dist.recv(message, second)
    else:
        dist.recv(message, first)
        dist.send(message, first)
    _settle(message.device)
    return time.perf_counter() - began


def all_reduce(device: torch.device, sizes: Sequence[int] = SIZES) -> dict[int, float]:
    """Seconds of an all-reduce over all ranks by message size, as rank 0 saw it, on every rank."""
    found: dict[int, float] = {}
    for size in sizes:
        going = torch.tensor([float(_goes_on(found))], device=device)
        dist.broadcast(going, 0)
        if not going.item():
            break
        message = torch.zeros(size // 4, device=device)
        runs = []
        for _ in range(REPEATS + 1):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(message)
            _settle(device)
            runs.append(time.perf_counter() - began)
        found[size] = min(runs[1:])
    return found


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cluster(
    *,
    device: torch.device | str = "cpu",
    device_type: str | None = None,
    memory_bytes: int | None = None,
    host: str | None = None,
    name: str = "measured",
    sizes: Sequence[int] = SIZES,
    burst_bytes: int = 0,
) -> Cluster:
    """Measure the links between all processes, two nodes or two devices of a node at a time; all call it, all get it.

    Parameters
    ----------
    device
        This process's device.
    device_type
        What the cluster calls it; by default its name.
    memory_bytes
        Its memory; by default all of a GPU's, and an equal part of the machine's.
    host
        Name of this process's node; by default the machine's.
    name
        Of the cluster.
    sizes
        Message sizes.
    burst_bytes
        As for `fit`.

    Raises
    ------
    ValueError
        As `check`.
    """
    device = torch.device(device)
    world = dist.get_world_size()
    check(world, sizes, burst_bytes)
    names: list[Any] = [None] * world
    dist.all_gather_object(names, host or socket.gethostname())
    me = Host(
        name=names[dist.get_rank()],
        device_type=device_type or device_name(device),
        memory_bytes=memory_bytes or _memory(device, names.count(names[dist.get_rank()])),
    )
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, me)
    rounds = _rounds(_nodes(hosts))
    times = dict(zip(rounds, _play(rounds, device, sizes), strict=True))
    together: list[Any] = [all_reduce(device, sizes)]
    dist.broadcast_object_list(together, 0)
    return assemble(name, hosts, times, together[0], burst_bytes)


def _nodes(hosts: Sequence[Host]) -> dict[str, list[int]]:
    """Ranks by node."""
    nodes: dict[str, list[int]] = {}
    for rank, each in enumerate(hosts):
        nodes.setdefault(each.name, []).append(rank)
    return nodes


def _rounds(nodes: Mapping[str, Sequence[int]]) -> list[Pairs]:
    """Pairs to measure at once: two devices of a node; one of each of two nodes; then as many as the smaller has."""
    rounds: list[Pairs] = [(pair,) for ranks in nodes.values() for pair in combinations(ranks, 2)]
    for a, b in combinations(nodes.values(), 2):
        rounds += [((a[0], b[0]),), *([tuple(zip(a, b))] if min(len(a), len(b)) > 1 else [])]
    return rounds


def _play(rounds: Sequence[Pairs], device: torch.device, sizes: Sequence[int]) -> list[dict[int, float]]:
    """Times of each round, of its slowest pair; the pairs of a round run at once."""
    me, mine = dist.get_rank(), []
    for pairs in rounds:
        dist.barrier()
        own = next((pair for pair in pairs if me in pair), None)
        mine.append(ping_pong(*own, device, sizes) if own is not None else {})
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    found = []
    for n in range(len(rounds)):
        times = [each[n] for each in gathered if each[n]]
        common = set.intersection(*(set(each) for each in times))
        found.append({size: max(each[size] for each in times) for size in sorted(common)})
    return found


def _memory(device: torch.device, processes: int) -> int:
    """Bytes of a GPU, or an equal part of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes


# A cluster of what was measured


def assemble(
    name: str, hosts: Sequence[Host], times: Mapping[Pairs, Times], together: Times, burst_bytes: int = 0
) -> Cluster:
    """The cluster that measured times describe.

    Parameters
    ----------
    hosts
        By rank.
    times
        Of pairs of ranks measured at once.
    together
        Of an all-reduce over all ranks; for the notes.
    """
    ranks = _nodes(hosts)
    inside = {node: {p[0]: t for p, t in times.items() if {hosts[r].name for r in p[0]} == {node}} for node in ranks}
    groups = {node: _fast_groups(pairs) for node, pairs in inside.items()}
    slow, fast = {}, {}
    for node, pairs in inside.items():
        grouped = {pair: any(set(pair) <= set(group) for group in groups[node]) for pair in pairs}
        if not all(grouped.values()):
            slow[node] = _medians([pairs[pair] for pair in pairs if not grouped[pair]])
        if any(grouped.values()):
            fast[node] = _medians([pairs[pair] for pair in pairs if grouped[pair]])
    link, group_link = _common(slow, burst_bytes), _common(fast, burst_bytes)
    nodes = tuple(
        Node(
            name=node,
            devices=tuple(hosts[rank].device_type for rank in ranks[node]),
            link=link.get(node),
            groups=tuple(tuple(ranks[node].index(rank) for rank in group) for group in groups[node]),
            group_link=group_link.get(node),
        )
        for node in ranks
    )
    across = {
        (hosts[p[0][0]].name, hosts[p[0][1]].name, len(p)): t
        for p, t in times.items()
        if hosts[p[0][0]].name != hosts[p[0][1]].name
    }
    links = _network(nodes, _common(across, burst_bytes))
    memory: dict[str, int] = {}
    for each in hosts:
        memory[each.device_type] = min(each.memory_bytes, memory.get(each.device_type, each.memory_bytes))
    return Cluster(
        name=name,
        device_types=tuple(DeviceType(name=kind, memory_bytes=nbytes) for kind, nbytes in memory.items()),
        nodes=nodes,
        links=links,
        notes=_notes(len(hosts), times, together, [*link.values(), *group_link.values(), *(x.link for x in links)]),
    )


def _fast_groups(pairs: Mapping[tuple[int, int], Times]) -> list[tuple[int, ...]]:
    """Ranks of a node that reach each other `FAST` times as fast as any others do."""
    seconds = _at_largest(pairs)
    ordered = sorted(seconds, key=lambda pair: seconds[pair])
    steps = [seconds[b] / seconds[a] for a, b in pairwise(ordered)]
    if not steps or max(steps) < FAST:
        return []
    close = ordered[: steps.index(max(steps)) + 1]
    peers: dict[int, set[int]] = {}
    for a, b in close:
        peers.setdefault(a, {a}).add(b)
        peers.setdefault(b, {b}).add(a)
    groups = {tuple(sorted(group)) for group in peers.values()}
    return sorted(groups) if sum(map(len, groups)) == len(peers) else []  # each is in one group only


def _at_largest(measured: Mapping[Any, Times]) -> dict[Any, float]:
    """Seconds at the largest message that all were sent."""
    if not measured:
        return {}
    largest = max(set.intersection(*(set(times) for times in measured.values())))
    return {key: times[largest] for key, times in measured.items()}


def _medians(measured: Sequence[Times]) -> Times:
    sizes = set.intersection(*(set(times) for times in measured))
    return {size: statistics.median(times[size] for times in measured) for size in sorted(sizes)}


def _common(measured: Mapping[Any, Times], burst_bytes: int) -> dict[Any, Link]:
    """A link for each, the same one for those that are `ALIKE`."""
    seconds = _at_largest(measured)
    alike: list[list[Any]] = []
    for key in sorted(seconds, key=lambda key: seconds[key]):
        if alike and seconds[key] <= ALIKE * seconds[alike[-1][0]]:
            alike[-1].append(key)
        else:
            alike.append([key])
    found = {}
    for keys in alike:
        shared = as_link(_medians([measured[key] for key in keys]), burst_bytes)
        found.update(dict.fromkeys(keys, shared))
    return found


def _network(nodes: Sequence[Node], measured: Mapping[tuple[str, str, int], Link]) -> tuple[NetworkLink, ...]:
    """Links between nodes, by device type where all nodes of two types are joined alike."""
    types = {node.name: set(node.devices) for node in nodes}
    by_type: dict[tuple[str, str], list[tuple[str, str, int]]] = {}
    for a, b, devices in measured:
        alike = len(types[a]) == len(types[b]) == 1
        first, second = sorted((min(types[a]), min(types[b]))) if alike else (a, b)
        by_type.setdefault((first, second), []).append((a, b, devices))
    found = []
    for ends, keys in by_type.items():
        shared = {devices: {measured[key] for key in keys if key[2] == devices} for _, _, devices in keys}
        if all(len(links) == 1 for links in shared.values()):
            found += [NetworkLink(between=ends, link=links.pop(), devices=devices) for devices, links in shared.items()]
        else:
            found += [NetworkLink(between=(a, b), link=measured[a, b, n], devices=n) for a, b, n in keys]
    return tuple(found)


def _notes(world: int, times: Mapping[Pairs, Times], together: Times, links: Sequence[Link]) -> tuple[str, ...]:
    sizes = sorted({size for each in times.values() for size in each})
    rings = [
        f"{size >> 10} KiB {seconds * 1e3:.3g} ms ({float(ring_all_reduce_s(size, world, links)) * 1e3:.3g})"
        for size, seconds in sorted(together.items())
    ]
    return (
        f"runtime.links, torch {torch.__version__}, {date.today().isoformat()}: ping-pong of {sizes[0]} to {sizes[-1]}"
        f" bytes, the least of {REPEATS} round trips",
        f"all-reduce over {world} ranks, in brackets as a ring of these links: {', '.join(rings)}",
    )
