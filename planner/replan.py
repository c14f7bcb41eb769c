"""A plan for what is left of a cluster, and what each device has to fetch before it can go on under it.

    item    state that belongs together: the weights and optimizer state of one layer, or of a tensor that layers share
    part    1/N of an item; N is the least common multiple of the tp degrees, so that every tp rank holds whole parts
    holds   a device holds the parts of its stage's layers; after a loss, those of the devices that are left

Every part that a device needs and does not hold comes from a device that holds it: the one, among all holders, that
is done first if it sends this beside what it sends already. Gradients and activations are not fetched: the run goes on
from the last whole step.

Where no device holds a part, it is in the checkpoint only. Since the others have gone on since, all then go back. So it
is wherever optimizer state is sharded over pipelines: every device has the only copy of its share.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from planner.cluster import Cluster, Node
from planner.files import Document, did_you_mean
from planner.plans import Infeasible, Pipeline, Plan, places, seconds, size, spans, table, wrapped

if TYPE_CHECKING:
    from planner.job import Job
    from planner.profile import LayerKind, ModelProfile
    from planner.question import Progress

CHECKPOINT = "checkpoint"
Holder = TypeVar("Holder", bound=Hashable)
Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """State that one device fetches from one source.

    Parameters
    ----------
    device
        Who needs it.
    source
        A device that holds it, or ``checkpoint``.
    layers
        Whose state it is, or part of it.
    nbytes
        Weights and optimizer state.
    """

    device: str
    source: str
    layers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned(Document):
    """A new plan, and the way to it.

    Parameters
    ----------
    plan
        For what is left.
    old_s
        Seconds per iteration before.
    without
        Devices that are gone.
    moves
        By device and source.
    move_s
        Seconds that the moves between devices take if all run at once: those of the most loaded port.
    lost
        Layers of which no device that is left holds the whole state. If there are any, the run goes back to the last
        checkpoint, from which every device then reads all its layers.
    """

    SCHEMA: ClassVar[str] = "hpp-replan/1"

    plan: Plan
    old_s: float
    without: tuple[str, ...]
    moves: tuple[Move, ...]
    move_s: float
    lost: tuple[int, ...] = ()

    @property
    def moved_bytes(self) -> int:
        """Bytes fetched from other devices."""
        return sum(move.nbytes for move in self.moves if move.source != CHECKPOINT)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that are in the checkpoint only."""
        return sum(move.nbytes for move in self.moves if move.source == CHECKPOINT)

    @property
    def state_bytes(self) -> int:
        """Weights and optimizer state of all devices: what they read if the run goes back to the checkpoint."""
        return sum(stage.tp * (stage.memory.weights + stage.memory.optimizer) for stage in self.plan.stages)

    def __str__(self) -> str:
        return "\n".join(_printed(self))


def replan(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    without: Collection[str],
    time_limit: float | None = None,
    progress: Progress | None = None,
    effort: float = 1.0,
) -> Replanned:
    """The fastest plan without some nodes or devices, and what each device has to fetch for it.

    Parameters
    ----------
    plan
        The one that runs, on devices of `cluster`.
    without
        Names of nodes ("a100-3") and devices ("a100-3:1") that are gone.
    time_limit, progress, effort
        Of the search, as in `planner.search.plan`.

    Raises
    ------
    Infeasible
        If nothing fits on what is left; says how much memory the model state takes and how much there is.
    ValueError
        If a name is unknown, or plan, profile and cluster do not belong together.
    """
    check(plan, profile, cluster)
    gone = _gone(cluster, without)
    left = _left(cluster, gone)
    if left is None:
        raise Infeasible(f"without {_words(without)} no device is left", remedy="keep at least one device")

    from planner import search  # brings the solvers along

    try:
        found = search.plan(profile, left.cluster, plan.job, time_limit=time_limit, progress=progress, effort=effort)
    except Infeasible as error:
        raise _with_floor(error, profile, left.cluster, plan.job, without) from None
    new = _renamed(found, left.names, cluster, gone)
    moves, lost = _moves(plan, new, profile, cluster, gone)
    return Replanned(
        plan=new,
        old_s=plan.predicted.simulated_s or plan.predicted.iteration_s,
        without=tuple(device.name for device in cluster.devices if device.name in gone),
        moves=moves,
        move_s=_busiest_s(moves, cluster),
        lost=lost,
    )


def remaining(cluster: Cluster, without: Collection[str]) -> Cluster:
    """The cluster without some whole nodes, which a plan made for it is to be held against.

    Raises
    ------
    ValueError
        If a name is unknown, nothing is left, or a node lost some of its devices only: what is left of it would be
        numbered anew, so its new plan is one of the whole cluster.
    """
    gone = _gone(cluster, without)
    left = _left(cluster, gone)
    if left is None:
        raise ValueError(f"without {_words(without)} no device is left")
    if _in_part(left.names, gone):
        raise ValueError(
            f"without {_words(without)} some node has lost a part of its devices only, expected whole nodes"
        )
    return left.cluster


def assign(
    needed: Mapping[Holder, Iterable[Part]],
    held: Mapping[Holder, Collection[Part]],
    cost: Callable[[Part, Holder, Holder], float],
) -> Iterator[tuple[Holder, Holder | None, Part]]:
    """(who needs, who gives, part) of every part that someone needs and does not hold; None gives what nobody holds.

    Parts are dealt out in the order given; each to the holder that is then done first.

    Parameters
    ----------
    cost
        (part, who gives, who needs) -> how long it takes; infinite where they cannot.
    """
    holders: dict[Part, list[Holder]] = defaultdict(list)
    for holder, owned in held.items():
        for part in owned:
            holders[part].append(holder)
    load: dict[Holder, float] = defaultdict(float)
    for who, parts in needed.items():
        mine = held.get(who, ())
        for part in parts:
            if part in mine:
                continue
            ends = [(load[giver] + cost(part, giver, who), n) for n, giver in enumerate(holders[part])]
            end, n = min(ends, default=(math.inf, 0))
            if end == math.inf:
                yield who, None, part
                continue
            load[holders[part][n]] = end
            yield who, holders[part][n], part


# What is left


class _Left(NamedTuple):
    cluster: Cluster
    names: dict[str, str]  # of its devices -> as they are called in the whole cluster


def check(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Refuse a profile or a cluster that the plan was not made from.

    Raises
    ------
    ValueError
        Naming the layers, or the device.
    """
    layers = plan.blocks[-1].layers[1]
    if profile.num_layers != layers:
        raise ValueError(
            f"the profile ({profile.name}) has {profile.num_layers} layers, the plan {layers} ({plan.profile_name})"
        )
    types = {device.name: device.type for device in cluster.devices}
    for stage in plan.stages:
        for name in stage.devices:
            if name not in types:
                raise ValueError(f"device {name!r} of the plan is not in cluster {cluster.name}")
            if types[name] != stage.device_type:
                raise ValueError(
                    f"device {name!r} is a {types[name]} in cluster {cluster.name}, the plan says {stage.device_type}"
                )


def _gone(cluster: Cluster, without: Collection[str]) -> frozenset[str]:
    by_node: dict[str, list[str]] = defaultdict(list)
    for device in cluster.devices:
        by_node[cluster.nodes[device.node].name].append(device.name)
    gone: set[str] = set()
    devices = {device.name for device in cluster.devices}
    for name in without:
        if name in by_node:
            gone.update(by_node[name])
        elif name in devices:
            gone.add(name)
        else:
            raise ValueError(f"without: {name!r} is not among {did_you_mean(name, [*by_node, *sorted(devices)])}")
    if not gone:
        raise ValueError("without: no node and no device named, expected what is gone")
    return frozenset(gone)


def _left(cluster: Cluster, gone: Collection[str]) -> _Left | None:
    """The nodes that still have devices, which are numbered anew in a node that lost some."""
    names: dict[str, str] = {}
    kept: dict[str, Node] = {}
    for node in cluster.nodes:
        indices = [j for j in range(len(node.devices)) if f"{node.name}:{j}" not in gone]
        if indices:
            names |= {f"{node.name}:{n}": f"{node.name}:{j}" for n, j in enumerate(indices)}
            kept[node.name] = _part(node, indices)
    if not kept:
        return None
    left = cluster.only(list(kept))
    return _Left(replace(left, nodes=tuple(kept[node.name] for node in left.nodes)), names)


def _part(node: Node, indices: Sequence[int]) -> Node:
    if len(indices) == len(node.devices):
        return node
    groups = [tuple(indices.index(j) for j in group if j in indices) for group in node.groups]
    groups = [group for group in groups if group]
    return replace(
        node,
        devices=tuple(node.devices[j] for j in indices),
        groups=tuple(groups),
        group_link=node.group_link if groups else None,
        nics=None if node.nics is None else len({node.nic_of(j) for j in indices}),
    )


def _renamed(plan: Plan, names: Mapping[str, str], cluster: Cluster, gone: Collection[str]) -> Plan:
    """The plan with the names of the whole cluster. If a node lost some of its devices only, it is a plan of that
    cluster which leaves them idle."""
    if not _in_part(names, gone):
        return plan

    def renamed(pipeline: Pipeline) -> Pipeline:
        stages = [replace(s, devices=tuple(names[name] for name in s.devices)) for s in pipeline.stages]
        return replace(pipeline, stages=tuple(stages))

    pipelines = tuple(renamed(pipeline) for pipeline in plan.pipelines)
    busy = {name for pipeline in pipelines for stage in pipeline.stages for name in stage.devices}
    return replace(
        plan,
        pipelines=pipelines,
        idle_devices=tuple(device.name for device in cluster.devices if device.name not in busy),
        provenance=replace(plan.provenance, cluster=cluster.digest),
        warnings=(*plan.warnings, f"made for a cluster without {places(gone)}"),
    )


def _in_part(names: Mapping[str, str], gone: Collection[str]) -> bool:
    nodes = {name.rpartition(":")[0] for name in names.values()}
    return any(name.rpartition(":")[0] in nodes for name in gone)


def _with_floor(
    error: Infeasible, profile: ModelProfile, left: Cluster, job: Job, without: Collection[str]
) -> Infeasible:
    """Why, beginning with what the model state takes and what there is for it."""
    items = _items(profile)
    state = sum(item.bytes_at(1, job) for item in items)
    state += sum(item.parameters(1) * job.state.gradients for item in items if item.kind.trainable)
    kept = 1.0 - job.memory_margin
    room = sum(kept * left.device_type(d.type).memory_bytes - job.context_bytes for d in left.devices)
    count = len(left.devices)
    devices = f"{count} devices have" if count > 1 else "1 device has"
    return Infeasible(
        f"without {_words(without)} {devices} room for {size(max(room, 0.0))}, the model state takes {size(state)}:"
        f" {error.message}",
        stage=error.stage,
        layer=error.layer,
        device_type=error.device_type,
        short_bytes=error.short_bytes,
        remedy=error.remedy,
    )


def _words(names: Collection[str]) -> str:
    every = sorted(names)
    return ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")


# What is held and what is needed


class _Item(NamedTuple):
    """State that belongs together: of one layer, or of a tensor that several layers share.

    Parameters
    ----------
    layers
        A stage with one of them holds it.
    kind
        Of the first of them.
    tied
        Parameters of the tensor that they share; of a single layer those that another item has.
    """

    layers: tuple[int, ...]
    kind: LayerKind
    tied: int

    def parameters(self, tp: int) -> int:
        """On one rank."""
        shared = -(-self.tied // tp)
        return shared if len(self.layers) > 1 else self.kind.shard(tp) - shared

    def bytes_at(self, tp: int, job: Job, owners: int = 1) -> float:
        """Weights and optimizer state on one rank, the latter sharded over so many owners."""
        trained = self.parameters(tp) if self.kind.trainable else 0
        return self.parameters(tp) * job.state.weights + trained * job.state.optimizer / owners


def _items(profile: ModelProfile) -> list[_Item]:
    """One for every layer, and one for every tensor that a layer of another kind shares, of which the layers' own then
    leave it out."""
    kinds = [profile.kind_of(l) for l in range(profile.num_layers)]
    shared: dict[str, list[int]] = defaultdict(list)
    for l, kind in enumerate(kinds):
        if kind.tied_to is not None:
            shared[kind.tied_to].append(l)
    tied = {name: max(kinds[l].tied_parameters for l in layers) for name, layers in shared.items()}
    items = [_Item((l,), kind, kind.tied_parameters or tied.get(kind.name, 0)) for l, kind in enumerate(kinds)]
    for name, layers in shared.items():
        home = profile.layers.index(name)
        items.append(_Item((home, *layers), kinds[home], tied[name]))
    return items


def _moves(
    old: Plan, new: Plan, profile: ModelProfile, cluster: Cluster, gone: Collection[str]
) -> tuple[tuple[Move, ...], tuple[int, ...]]:
    """What is fetched, and the layers that are in the checkpoint only."""
    items = _items(profile)
    num_parts = math.lcm(*(stage.tp for stage in (*old.stages, *new.stages)))
    sharded = old.job.shard_optimizer and len(old.pipelines) > 1
    held = {} if sharded else {n: parts for n, parts in _parts(old, items, num_parts).items() if n not in gone}
    owners = len(new.pipelines) if new.job.shard_optimizer else 1
    needed = _parts(new, items, num_parts)
    tp = {name: stage.tp for stage in new.stages for name in stage.devices}

    def nbytes(part: tuple[int, int], device: str) -> float:
        """Of a rank's share of an item, one of the parts that make it up."""
        return items[part[0]].bytes_at(tp[device], new.job, owners) * tp[device] / num_parts

    def cost(part: tuple[int, int], giver: str, device: str) -> float:
        a, b = cluster.device(giver), cluster.device(device)
        return cluster.link(a, b).seconds(nbytes(part, device)) if cluster.joined(a, b) else math.inf

    found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for device, giver, part in assign(needed, held, cost):
        if nbytes(part, device):
            found[device, giver or CHECKPOINT].append(part)
    moves = []
    for (device, source), parts in found.items():
        mine = _layers_of(new, device)
        layers = {l for i, _ in parts for l in items[i].layers if l in mine}
        total = round(sum(nbytes(part, device) for part in parts))
        moves.append(Move(device=device, source=source, layers=tuple(sorted(layers)), nbytes=total))
    lost = {l for move in moves if move.source == CHECKPOINT for l in move.layers}
    return tuple(moves), tuple(sorted(lost))


def _parts(plan: Plan, items: Sequence[_Item], num_parts: int) -> dict[str, dict[tuple[int, int], None]]:
    """(item, part of it) that each device holds under a plan, in order."""
    found: dict[str, dict[tuple[int, int], None]] = {}
    for stage in plan.stages:
        mine = [i for i, item in enumerate(items) if any(stage.layers[0] <= l < stage.layers[1] for l in item.layers)]
        share = num_parts // stage.tp
        for t, name in enumerate(stage.devices):
            found[name] = {(i, n): None for i in mine for n in range(t * share, (t + 1) * share)}
    return found


def _layers_of(plan: Plan, device: str) -> range:
    return next(range(*stage.layers) for stage in plan.stages if device in stage.devices)


def _busiest_s(moves: Iterable[Move], cluster: Cluster) -> float:
    """Seconds that the most loaded port is busy, which a good order of the moves attains; each port sends and receives
    at once, one message at a time."""
    load: dict[tuple[str, object], float] = defaultdict(float)
    for move in moves:
        if move.source == CHECKPOINT:
            continue
        a, b = cluster.device(move.source), cluster.device(move.device)
        taken = cluster.link(a, b).seconds(move.nbytes)
        for way, device in (("out", a), ("in", b)):
            port = device.name if a.node == b.node else (device.node, cluster.nodes[device.node].nic_of(device.index))
            load[way, port] += taken
    return max(load.values(), default=0.0)


# The printed form


def _printed(found: Replanned) -> Iterator[str]:
    plan = found.plan
    new_s = plan.predicted.simulated_s or plan.predicted.iteration_s
    change = f" ({new_s / found.old_s - 1:+.1%})" if found.old_s else ""
    yield from wrapped("without", places(found.without))
    yield from wrapped("iteration", f"{seconds(found.old_s)} before, {seconds(new_s)} now{change}")
    if not found.moves:
        yield from wrapped("fetch", "nothing, every device holds what it needs")
    else:
        words = f"{size(found.moved_bytes)} from other devices in {seconds(found.move_s)} at best"
        if found.lost:
            words += f", {size(found.checkpoint_bytes)} from the checkpoint"
        yield from wrapped("fetch", words)
    if found.lost:
        yield from wrapped(
            "lost",
            f"layers {spans(found.lost)} are in the checkpoint only: the run goes back to it, and every device reads"
            f" all its layers from there, {size(found.state_bytes)} in all",
        )
    if found.moves:
        yield ""
        rows = [[move.device, spans(move.layers), size(move.nbytes), move.source] for move in found.moves]
        yield from table(["device", "layers", ">bytes", "from"], rows)
    yield ""
    yield str(plan)
