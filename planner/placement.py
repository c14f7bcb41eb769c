"""Chosen stage units onto physical devices.

The search counts units; here each unit gets `tp` devices of one type in one place (a node, or a fast group of it for
tp >= 2). Units are cut out of the places largest degree first, which always succeeds when the degrees divide one
another, and are then dealt to the stages so that neighbours along a pipeline share fast links. Swaps of equal units
improve the deal until none helps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.cluster import Cluster, Device, Link
from planner.cost import DeviceClass

# Pipelines with more swaps to try than this keep the first deal.
_SWAPS = 4000


class DoesNotPack(Exception):
    """The units fit by count but not into the nodes."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The devices of one stage: one type, one node, one fast group."""

    devices: tuple[Device, ...]

    @property
    def node(self) -> int:
        """Index of the node."""
        return self.devices[0].node

    @property
    def position(self) -> tuple[int, int]:
        """Node and index of the first device: the order of units."""
        return self.devices[0].node, self.devices[0].index


def place(
    cluster: Cluster,
    pipelines: Sequence[Sequence[DeviceClass]],
    message_bytes: float,
    *,
    by_stage: bool = False,
    improve: bool = True,
) -> tuple[tuple[Unit, ...], ...]:
    """Devices for every stage of every pipeline, near to the neighbours along it.

    Parameters
    ----------
    pipelines
        The class of each stage.
    message_bytes
        Typical size of a hand-over, to compare links.
    by_stage
        Near to the same stage of the other pipelines instead: for gradient rings that stay inside a node.
    improve
        Swap units while hand-overs get shorter; to no avail where links depend on device types alone.

    Raises
    ------
    DoesNotPack
        If degrees that do not divide one another leave no room in the nodes, or no link joins neighbours.
    """
    wanted: dict[DeviceClass, int] = {}
    for pipeline in pipelines:
        for unit in pipeline:
            wanted[unit] = wanted.get(unit, 0) + 1
    free = _carve(cluster, wanted)
    seconds: dict[tuple[Unit, Unit], float] = {}

    def hand_over_s(a: Unit, b: Unit) -> float:
        if (a, b) not in seconds:
            try:
                seconds[a, b] = float(unit_link(cluster, a, b).seconds(message_bytes))
            except ValueError:  # nothing joins the two
                seconds[a, b] = math.inf
        return seconds[a, b]

    if by_stage:
        placed = _deal_by_stage(pipelines, free, hand_over_s)
    else:
        placed = [_deal(pipeline, free, hand_over_s) for pipeline in pipelines]
        if improve:
            _swap(placed, pipelines, hand_over_s)
    for units in placed:
        if any(math.isinf(hand_over_s(a, b)) for a, b in itertools.pairwise(units)):
            raise DoesNotPack("neighbouring stages without a link")
    return tuple(map(tuple, placed))


def unit_link(cluster: Cluster, a: Unit, b: Unit) -> Link:
    """The link a hand-over between two units takes: the slower direction of their first devices."""
    return cluster.link(a.devices[0], b.devices[0], min(len(a.devices), len(b.devices)))


def _carve(cluster: Cluster, wanted: dict[DeviceClass, int]) -> dict[DeviceClass, list[Unit]]:
    """Cut the wanted units out of the nodes, the largest degree first, each where the least room is left over."""
    rooms: dict[str, list[list[Device]]] = {}
    loose: dict[str, list[list[Device]]] = {}
    devices_of: dict[int, list[Device]] = {}
    for device in cluster.devices:
        devices_of.setdefault(device.node, []).append(device)
    for index, node in enumerate(cluster.nodes):
        groups = node.groups or (tuple(range(len(node.devices))),)
        grouped = {i for group in groups for i in group}
        for device_type in dict.fromkeys(node.devices):
            for group in groups:
                room = [devices_of[index][i] for i in group if node.devices[i] == device_type]
                if room:
                    rooms.setdefault(device_type, []).append(room)
            rest = [d for d in devices_of[index] if d.type == device_type and d.index not in grouped]
            if rest:
                loose.setdefault(device_type, []).append(rest)
    units: dict[DeviceClass, list[Unit]] = {}
    for unit in sorted(wanted, key=lambda u: (u.device_type, -u.tp)):
        own = rooms.get(unit.device_type, []) + (loose.get(unit.device_type, []) if unit.tp == 1 else [])
        for _ in range(wanted[unit]):
            fitting = [room for room in own if len(room) >= unit.tp]
            if not fitting:
                raise DoesNotPack(str(unit))
            room = min(fitting, key=lambda r: (len(r) % unit.tp, len(r), r[0].node, r[0].index))
            units.setdefault(unit, []).append(Unit(tuple(room[: unit.tp])))
            del room[: unit.tp]
    for cut in units.values():
        cut.sort(key=lambda u: u.position)
    return units


def _deal(
    pipeline: Sequence[DeviceClass], free: dict[DeviceClass, list[Unit]], hand_over_s: Callable[[Unit, Unit], float]
) -> list[Unit]:
    """One pipeline, stage by stage: the unit nearest to the one before, then the fullest node for what is still to
    come."""
    chosen: list[Unit] = []
    for s, unit in enumerate(pipeline):
        coming: dict[int, int] = {}
        for later in set(pipeline[s + 1 :]):
            for other in free[later]:
                coming[other.node] = coming.get(other.node, 0) + 1
        best = min(
            free[unit],
            key=lambda u: (hand_over_s(chosen[-1], u) if chosen else 0.0, -coming.get(u.node, 0), u.position),
        )
        free[unit].remove(best)
        chosen.append(best)
    return chosen


def _deal_by_stage(
    pipelines: Sequence[Sequence[DeviceClass]],
    free: dict[DeviceClass, list[Unit]],
    hand_over_s: Callable[[Unit, Unit], float],
) -> list[list[Unit]]:
    """Stage by stage over all pipelines: the unit nearest to the one that the pipeline before chose for it."""
    placed: list[list[Unit]] = [[] for _ in pipelines]
    for s in range(max(map(len, pipelines))):
        last: Unit | None = None
        for p, pipeline in enumerate(pipelines):
            if s < len(pipeline):
                room: dict[int, int] = {}
                for unit in free[pipeline[s]]:
                    room[unit.node] = room.get(unit.node, 0) + 1
                before = last
                best = min(
                    free[pipeline[s]],
                    key=lambda u: (hand_over_s(before, u) if before is not None else 0.0, -room[u.node], u.position),
                )
                free[pipeline[s]].remove(best)
                placed[p].append(best)
                last = best
    return placed


def _swap(
    placed: list[list[Unit]], pipelines: Sequence[Sequence[DeviceClass]], hand_over_s: Callable[[Unit, Unit], float]
) -> None:
    """Exchange equal units between stages while the pipelines' total hand-over time falls."""
    spots: dict[DeviceClass, list[tuple[int, int]]] = {}
    for p, pipeline in enumerate(pipelines):
        for s, unit in enumerate(pipeline):
            spots.setdefault(unit, []).append((p, s))
    pairs = [(a, b) for own in spots.values() for n, a in enumerate(own) for b in own[n + 1 :]]
    pairs = [((p, s), (q, t)) for (p, s), (q, t) in pairs if len(pipelines[p]) > 1 or len(pipelines[q]) > 1]
    if not pairs or len(pairs) > _SWAPS:
        return

    def around(p: int, s: int) -> float:
        chain = placed[p]
        return sum(hand_over_s(chain[i], chain[i + 1]) for i in range(max(0, s - 1), min(s + 1, len(chain) - 1)))

    improved = True
    while improved:
        improved = False
        for (p, s), (q, t) in pairs:
            before = around(p, s) + around(q, t)
            placed[p][s], placed[q][t] = placed[q][t], placed[p][s]
            if around(p, s) + around(q, t) < before * (1 - 1e-9):
                improved = True
            else:
                placed[p][s], placed[q][t] = placed[q][t], placed[p][s]
