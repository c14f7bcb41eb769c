"""The judge: plays the actions of every rank over devices, links and collectives, and returns what happened when.

It is the second opinion on `planner.cost` and shares no formula and no code with it. What it plays (a `Workload`) is
plain numbers; `workload` makes one from a plan, `play` plays it, `simulate` does both. A measured run of the same
lists becomes the same kind of value by `lay_out`.

Compute
    1. A rank runs its compute actions in the order of its list, one at a time, each as soon as it can.
    2. F of stage s waits for the activation of stage s - 1, B and I for the gradient of stage s + 1. Nothing waits for
       what its own rank computes (W for its I, or for a stage of the same rank): the list has it later.
    3. UPDATE starts when the last backward and all reductions of the rank have ended.
Transfers
    4. One is ready when its producer ends, or where a list has the SEND, when the rank comes to it. It takes the
       sender's out-port and the receiver's in-port at once; in and out of a port are independent.
    5. A port serves transfers one at a time in the order they are ready; ties: pipeline, stage, micro-batch.
    6. Between two ranks of one node they use the ranks' own ports, otherwise the network ports of the node, which
       several ranks may share. A transfer of no seconds arrives as it is ready.
    7. Computing goes on meanwhile. With ``blocking`` both ends compute nothing from the moment they come to a transfer
       until it ends, and it starts when both have come. What a rank sends after an action and receives for the next it
       does together, or where its list has SEND and RECV, one after the other as listed.
Gradient reductions
    8. One is ready when all its members are: a given part into the last backward (B or W) of their stage. A rank joins
       its reductions in the order of its list, or by index, never one before the one ahead of it.
    9. Reductions of one block run one after another, different blocks side by side.
   10. A running reduction uses the ports, in and out, of all its members. A port gives equal parts of itself to the
       reductions on it, and nothing while a transfer uses it in either direction; the slowest port sets the pace.
       So the most loaded port decides: three blocks of 1 s between ranks {0, 2}, {0, 3}, {1, 3} all end after 2 s.
   11. A part of a port suffices for full pace where the port alone would take less (`Reduction.port_s`).
Memory
   12. A micro-batch holds activations and logits of its stage from the start of F to the end of B, or of W; I frees
       nothing. Workspace is held while a compute action runs. At one instant bytes are freed before others are taken.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from planner import schedule as schedules
from planner.schedule import COMPUTE, TRANSFERS, Action, Kind, Schedule

if TYPE_CHECKING:
    from planner.cluster import Cluster, Device, Link
    from planner.plans import Block, Plan, Stage

RING_BYTES = float(1 << 26)  # message size at which links of a device are compared
_BY_TIME, _END = itemgetter(1, 2), itemgetter(2)
OVERLAP_S = 1e-9  # measured events may overlap by so much: rounding
BACKWARD = frozenset((Kind.B, Kind.I))  # make the gradient for the stage before
GRADIENTS = frozenset((Kind.B, Kind.W))  # complete the gradients of the weights
RUNS = COMPUTE | {Kind.UPDATE}
STATIC = ("weights", "gradients", "optimizer", "sync_buffer", "context")

# What is played --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes per device of one stage, by category.

    Parameters
    ----------
    weights, gradients, optimizer, sync_buffer, context
        Held throughout.
    activations, logits
        Per micro-batch in flight.
    workspace
        While an action computes.
    capacity, limit
        Memory of the device, and what may be used of it, if known.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    workspace: int = 0
    sync_buffer: int = 0
    context: int = 0
    capacity: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What one stage takes.

    Parameters
    ----------
    forward_s, backward_s
        Seconds per micro-batch; the backward with recomputation.
    weight_s
        The part of the backward that W takes where it is split, I the rest; None for half.
    send_s, send_back_s
        Seconds to move one activation to the next stage, and its gradient back; None for as long as the activation.
    update_s
        Seconds of UPDATE.
    node
        Ranks of one node do not use the network between them; None for a node of its own.
    ports
        Names of the network ports it uses; none for its own.
    device_type, devices
        What it runs on, for people.
    memory
        None if it is not to be traced.
    """

    forward_s: float
    backward_s: float
    weight_s: float | None = None
    send_s: float = 0.0
    send_back_s: float | None = None
    update_s: float = 0.0
    node: str | None = None
    ports: tuple[str, ...] = ()
    device_type: str = ""
    devices: tuple[str, ...] = ()
    memory: StageBytes | None = None

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "weight_s", "send_s", "send_back_s", "update_s"):
            _require_seconds(name, getattr(self, name))
        if self.weight_s is not None and self.weight_s > self.backward_s:
            raise ValueError(f"weight_s: {self.weight_s} is more than the backward_s {self.backward_s} it is a part of")

    def seconds(self, kind: Kind) -> float:
        """Seconds of a compute action or UPDATE."""
        weight_s = self.backward_s / 2 if self.weight_s is None else self.weight_s
        return {
            Kind.F: self.forward_s,
            Kind.B: self.backward_s,
            Kind.I: self.backward_s - weight_s,
            Kind.W: weight_s,
            Kind.UPDATE: self.update_s,
        }[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One all-reduce call of gradients.

    Parameters
    ----------
    block
        Reductions with the same name run one after another.
    seconds
        What it takes when it has its ports to itself.
    members
        (pipeline, stage) of everyone who takes part.
    ready
        Per member, the part of its last backward after which its gradients are complete; empty for the end.
    port_s
        Per member, the seconds it would take if only the port of that member limited it; empty for `seconds`.
    nbytes
        For people.
    """

    block: str
    seconds: float
    members: tuple[tuple[int, int], ...]
    ready: tuple[float, ...] = ()
    port_s: tuple[float, ...] = ()
    nbytes: int = 0

    def __post_init__(self) -> None:
        _require_seconds("seconds", self.seconds)
        if not self.members:
            raise ValueError(f"members: {self.block!r} has none")
        for name in ("ready", "port_s"):
            values = getattr(self, name)
            if values and len(values) != len(self.members):
                raise ValueError(f"{name}: {len(values)} values for {len(self.members)} members of {self.block!r}")
        for part in self.ready:
            if not 0 <= part <= 1:
                raise ValueError(f"ready: {part} of {self.block!r} is no part of a backward, expected 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that is played in one iteration.

    Parameters
    ----------
    pipelines
        The lists of each pipeline and what its stages take.
    reductions
        In the order in which every rank joins them; ``0REDUCE_GRAD2`` is the one at position 2.
    """

    pipelines: tuple[tuple[Schedule, tuple[StageWork, ...]], ...]
    reductions: tuple[Reduction, ...] = ()

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise ValueError("pipelines: there is none to play")
        for p, (lists, works) in enumerate(self.pipelines):
            if len(works) != lists.num_stages:
                raise ValueError(f"pipelines[{p}]: {len(works)} stages for the {lists.num_stages} of {lists.name!r}")
        for i, reduction in enumerate(self.reductions):
            for p, s in reduction.members:
                if not (0 <= p < len(self.pipelines) and 0 <= s < self.pipelines[p][0].num_stages):
                    raise ValueError(f"reductions[{i}]: pipeline {p} stage {s} of {reduction.block!r} does not exist")
            if len(set(reduction.members)) != len(reduction.members):
                raise ValueError(f"reductions[{i}]: {reduction.block!r} has a member twice")


def _require_seconds(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: {value}, expected seconds of at least 0")


# What happened ---------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An action and when it ran, in seconds from the start of the iteration."""

    action: Action
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Seconds in which a rank computes nothing, by reason.

    Parameters
    ----------
    warm_up_s
        Before its first action.
    activation_s, gradient_s
        Before a forward, and before a backward.
    transfer_s
        While a transfer blocks it.
    peers_s
        After its last backward, while none of its reductions runs yet: others are not ready.
    sync_s
        After its last backward, while its gradients are reduced.
    end_s
        After its last action or reduction, until the iteration ends.
    """

    warm_up_s: float = 0.0
    activation_s: float = 0.0
    gradient_s: float = 0.0
    transfer_s: float = 0.0
    peers_s: float = 0.0
    sync_s: float = 0.0
    end_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return math.fsum(getattr(self, name) for name in IDLE)


IDLE = ("warm_up_s", "activation_s", "gradient_s", "transfer_s", "peers_s", "sync_s", "end_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """Bytes per device of a rank over time: step functions, each value from its time to the next.

    Parameters
    ----------
    times_s
        Increasing, from 0.
    activations, logits, workspace
        One value per time.
    weights, gradients, optimizer, sync_buffer, context
        Held throughout.
    capacity, limit
        Memory of the device, and what may be used of it, if known.
    """

    times_s: tuple[float, ...]
    activations: tuple[int, ...]
    logits: tuple[int, ...]
    workspace: tuple[int, ...]
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    sync_buffer: int = 0
    context: int = 0
    capacity: int | None = None
    limit: int | None = None

    def levels(self, category: str) -> tuple[int, ...]:
        """Bytes of one of `planner.plans.CATEGORIES` at every time."""
        value: int | tuple[int, ...] = getattr(self, category)
        return value if isinstance(value, tuple) else (value,) * len(self.times_s)

    def peak(self, category: str) -> int:
        """Most bytes of one category."""
        value: int | tuple[int, ...] = getattr(self, category)
        return max(value) if isinstance(value, tuple) else value

    @property
    def static_bytes(self) -> int:
        """Held throughout."""
        return self.weights + self.gradients + self.optimizer + self.sync_buffer + self.context

    @property
    def totals(self) -> tuple[int, ...]:
        """All categories together at every time."""
        static = self.static_bytes
        return tuple(static + a + b + c for a, b, c in zip(self.activations, self.logits, self.workspace, strict=True))

    @property
    def peak_bytes(self) -> int:
        """Most bytes of all categories together."""
        return max(self.totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one rank did.

    Parameters
    ----------
    stages
        Those it runs.
    events
        Compute actions and UPDATE, in order; none overlap.
    transfers
        SEND of what it sent, RECV of what it received, by start. One of no seconds is not listed.
    reductions
        REDUCE_GRAD of those it is a member of, by start.
    memory
        None if it was not traced.
    """

    pipeline: int
    rank: int
    stages: tuple[int, ...]
    device_type: str
    devices: tuple[str, ...]
    events: tuple[Event, ...]
    transfers: tuple[Event, ...]
    reductions: tuple[Event, ...]
    idle: Idle
    memory: MemoryTrace | None

    @property
    def busy_s(self) -> float:
        """Seconds of its events; with its idle seconds they add up to the iteration."""
        return math.fsum(event.end_s - event.start_s for event in self.events)

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return math.fsum(event.end_s - event.start_s for event in self.events if event.action.kind != Kind.UPDATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What every rank did in one iteration.

    Parameters
    ----------
    iteration_s
        End of the last action.
    pipelines_s
        Per pipeline, end of its last backward.
    lanes
        By pipeline and rank.
    critical_path
        (pipeline, event) from 0 to `iteration_s`, each starting where the one before ended; a backward may be cut off
        where it has the gradients of a reduction ready. Empty for a measured run.
    """

    iteration_s: float
    pipelines_s: tuple[float, ...]
    lanes: tuple[Lane, ...]
    critical_path: tuple[tuple[int, Event], ...] = ()

    def lane(self, pipeline: int, stage: int) -> Lane:
        """The lane of the rank that runs a stage."""
        for each in self.lanes:
            if each.pipeline == pipeline and stage in each.stages:
                return each
        raise ValueError(f"pipeline {pipeline} stage {stage} is not in this timeline")

    @property
    def exposed_sync_s(self) -> float:
        """Seconds from the last backward of all pipelines to the end of the last reduction."""
        last = max((event.end_s for lane in self.lanes for event in lane.reductions), default=0.0)
        return max(0.0, last - max(self.pipelines_s))

    @property
    def bubble_fraction(self) -> float:
        """Share of the devices' time without forward or backward."""
        weights = [len(lane.devices) or 1 for lane in self.lanes]
        busy = math.fsum(weight * lane.compute_s for weight, lane in zip(weights, self.lanes, strict=True))
        return 1.0 - busy / (self.iteration_s * sum(weights)) if self.iteration_s else 0.0

    def peak_in_flight(self, pipeline: int, stage: int) -> int:
        """Most micro-batches a stage held at once: F begun, B (or W) not ended."""
        kinds = [action.kind for action, _, _ in self.lane(pipeline, stage).events if action.stage == stage]
        return max(itertools.accumulate((kind is Kind.F) - (kind in GRADIENTS) for kind in kinds), default=0)


# Playing ---------------------------------------------------------------------------------------------------------


def simulate(
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    schedule: str | Sequence[Schedule] = "plan",
    blocking: bool = False,
    weight_share: float = 0.5,
    granularity: str | None = None,
) -> Timeline:
    """Play one iteration of a plan. Parameters as in `workload` and `play`."""
    load = workload(plan, cluster, schedule=schedule, weight_share=weight_share, granularity=granularity)
    return play(load, blocking=blocking)


def play(load: Workload, *, blocking: bool = False) -> Timeline:
    """Play a workload by the rules above.

    Parameters
    ----------
    blocking
        Computing waits for transfers (rule 7).

    Raises
    ------
    ValueError
        If a list is damaged, or the lists wait for each other in a circle.
    """
    with _collector_off():
        return _play(load, blocking)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Playing makes hundreds of thousands of small values, none of which goes round in circles once it is over; the
    collector would look through all of them again and again, for a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _play(load: Workload, blocking: bool) -> Timeline:
    for p, (lists, _) in enumerate(load.pipelines):
        if not _is_sound(lists):
            _validate(p, lists)
    orders = _joining_orders(load)
    compute = _Compute(load, blocking)
    circle = compute.run()
    if circle:
        for p, (lists, _) in enumerate(load.pipelines):
            _validate(p, lists)
        raise ValueError(f"the lists wait for each other in a circle: {'; '.join(circle)}")
    sync = _Sync(load, compute, orders)
    sync.run()
    updates = _updates(load, compute, sync)
    ran = {rank.key: [*rank.events, *updates.get(rank.key, ())] for rank in compute.ranks}
    transfers = {rank.key: rank.transfers for rank in compute.ranks}
    reductions: dict[_Key, list[Event]] = {key: [] for key in ran}
    for i, each in enumerate(sync.all):
        for p, s in each.reduction.members if each.end_s > each.start_s else ():
            event = Event(Action(s, Kind.REDUCE_GRAD, i), each.start_s, each.end_s)
            reductions[p, load.pipelines[p][0].rank_of(s)].append(event)
    path = _critical_path(compute, sync, updates)
    compute.untie()
    return _timeline(load, ran, transfers, reductions, blocking, path)


def _validate(p: int, lists: Schedule) -> None:
    try:
        schedules.validate(lists)
    except ValueError as error:
        raise ValueError(f"pipeline {p}: {error}") from None


def _is_sound(lists: Schedule) -> bool:
    """Whether a list of compute actions is valid at first glance: each micro-batch forward, then backward, once.

    One quick pass; on all other lists `validate`, which takes as long as half the playing, has the last word.
    """
    num_stages, m = lists.num_stages, lists.num_micro_batches
    homes: dict[int, int] = {}
    seen: dict[Kind, list[set[int]]] = {kind: [set() for _ in range(num_stages)] for kind in COMPUTE}
    forward, whole, inputs, weights = (seen[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    for rank, actions in enumerate(lists.ranks):
        for s, kind, k in actions:
            if k is None or kind not in COMPUTE or not (0 <= s < num_stages and 0 <= k < m):
                return False
            if homes.setdefault(s, rank) != rank or k in seen[kind][s]:
                return False
            if kind is not Kind.F and (k not in forward[s] or k in whole[s]):
                return False
            if (kind is Kind.W) != (k in inputs[s]) and kind is not Kind.I:
                return False
            seen[kind][s].add(k)
    return all(len(forward[s]) == m == len(whole[s]) + len(weights[s]) for s in range(num_stages))


@dataclass(slots=True, eq=False)
class _Port:
    """One direction of a port: when it is free again, and after which transfer."""

    free_s: float = 0.0
    last: _Moved | None = None


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank while it plays: its steps, how far it is, and what it did."""

    key: _Key
    position: int  # among all ranks
    steps: list[_Step | _Exchange] = field(default_factory=list)
    at: int = 0
    now_s: float = 0.0
    cause: _Cause = None  # what ended at now_s
    waits: _Route | None = None
    waits_for: int = 0
    pending: int = 0  # transfers of the exchange it is in
    latest_s: float = 0.0  # when the last of them ends
    events: list[Event] = field(default_factory=list)
    causes: list[_Cause] = field(default_factory=list)  # per event, what ended as it started
    transfers: list[Event] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Route:
    """The way of all activations from one stage to the next, or of all gradients back."""

    kind: Kind
    stage: int
    to: int
    seconds: float
    sender: _Rank
    receiver: _Rank
    names: tuple[_Name, ...]
    ports: tuple[_Port, ...]
    arrival_s: dict[int, float] = field(default_factory=dict)
    causes: dict[int, _Cause] = field(default_factory=dict)
    posted: dict[int, _Rank] = field(default_factory=dict)

    @property
    def direct(self) -> bool:
        """Between two stages of one rank."""
        return self.sender is self.receiver

    def send(self, k: int) -> Action:
        """At the sender."""
        return Action(self.stage, self.kind, k)

    def receive(self, k: int) -> Action:
        """At the receiver."""
        return Action(self.to, Kind.RECV_F if self.kind is Kind.SEND_F else Kind.RECV_B, k)


@dataclass(slots=True, eq=False)
class _Moved:
    """A transfer that took place."""

    route: _Route
    k: int
    start_s: float
    end_s: float
    cause: _Cause


class _Step(NamedTuple):
    """A compute action, what it needs, and where its result goes as it ends."""

    action: Action
    k: int
    seconds: float
    needs: _Route | None
    gives: _Route | None
    sends: Sequence[tuple[_Route, int]]  # listed behind it


class _Exchange(NamedTuple):
    """Transfers for which the rank stops computing; (route, micro-batch)."""

    moves: list[tuple[_Route, int]]


_NONE: list[tuple[_Route, int]] = []
_Key = tuple[int, int]  # (pipeline, rank)
_Name = str | tuple[int, int]  # of a port: of the network, or of one rank
_Cause = tuple[int, int] | _Moved | None  # (position of a rank, its compute event), a transfer, or the start of it all


class _Compute:
    """Compute and transfers (rules 1 to 7), in the order of time.

    The heap holds one entry per rank that runs: when its action or exchange ends. A transfer is ready only when one
    does, so those that share a port come up in the order they are served, and each is placed once and for all.
    """

    def __init__(self, load: Workload, blocking: bool) -> None:
        self.ranks: list[_Rank] = []
        self.routes: list[_Route] = []
        self.moved: list[_Moved] = []
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.out_ports: dict[_Name, _Port] = {}
        self.in_ports: dict[_Name, _Port] = {}
        for p, (lists, works) in enumerate(load.pipelines):
            ranks = [_Rank((p, r), len(self.ranks) + r) for r in range(len(lists.ranks))]
            self.ranks += ranks
            forth, back = self._routes(p, lists, works, ranks)
            self.routes += [*forth, *back]
            explicit = any(action.kind in TRANSFERS for actions in lists.ranks for action in actions)
            for rank, actions in zip(ranks, lists.ranks, strict=True):
                rank.steps = list(_steps(actions, works, forth, back, explicit, blocking))

    def _routes(
        self, p: int, lists: Schedule, works: Sequence[StageWork], ranks: Sequence[_Rank]
    ) -> tuple[list[_Route], list[_Route]]:
        forth, back = [], []
        for s in range(lists.num_stages - 1):
            a, b = ranks[lists.rank_of(s)], ranks[lists.rank_of(s + 1)]
            near = works[s].node is not None and works[s].node == works[s + 1].node
            names_a = (a.key,) if near else _network(works[s], a.key)
            names_b = (b.key,) if near else _network(works[s + 1], b.key)
            back_s = works[s].send_back_s
            back_s = works[s].send_s if back_s is None else back_s
            names = tuple(dict.fromkeys((*names_a, *names_b)))
            forth.append(_Route(Kind.SEND_F, s, s + 1, works[s].send_s, a, b, names, self._ports(names_a, names_b)))
            back.append(_Route(Kind.SEND_B, s + 1, s, back_s, b, a, names, self._ports(names_b, names_a)))
        return forth, back

    def _ports(self, froms: Iterable[_Name], tos: Iterable[_Name]) -> tuple[_Port, ...]:
        out_ports = (self.out_ports.setdefault(name, _Port()) for name in froms)
        return (*out_ports, *(self.in_ports.setdefault(name, _Port()) for name in tos))

    def run(self) -> list[str]:
        """Play to the end, or until nothing moves: then who waits for whom."""
        for rank in self.ranks:
            self._go_on(rank)
        while self.heap:
            now_s, _, _, _, position = heapq.heappop(self.heap)
            rank = self.ranks[position]
            step = rank.steps[rank.at]
            rank.now_s = now_s
            rank.at += 1
            if isinstance(step, _Step):
                rank.cause = (position, len(rank.events) - 1)
                if step.gives is not None:
                    self._send(step.gives, step.k, rank)
                for route, k in step.sends:
                    self._send(route, k, rank)
            self._go_on(rank)
        stuck = next((rank for rank in self.ranks if rank.at < len(rank.steps)), None)
        return [] if stuck is None else _circle(stuck)

    def untie(self) -> None:
        """Drop what leads round in circles, so that everything goes as soon as nobody uses it."""
        for rank in self.ranks:
            rank.steps, rank.causes, rank.cause = [], [], None
        for port in (*self.out_ports.values(), *self.in_ports.values()):
            port.last = None
        for route in self.routes:
            route.causes.clear()

    def _go_on(self, rank: _Rank) -> None:
        """Begin the next step if nothing is missing."""
        if rank.at == len(rank.steps):
            return
        step = rank.steps[rank.at]
        if isinstance(step, _Exchange):
            self._exchange(rank, step)
            return
        action, k, seconds, needs, _, _ = step
        start_s, cause = rank.now_s, rank.cause
        if needs is not None:
            if k not in needs.arrival_s:
                rank.waits, rank.waits_for = needs, k
                return
            if needs.arrival_s[k] > start_s:
                start_s, cause = needs.arrival_s[k], needs.causes[k]
        end_s = start_s + seconds
        rank.events.append(Event(action, start_s, end_s))
        rank.causes.append(cause)
        heapq.heappush(self.heap, (end_s, rank.key[0], action.stage, k, rank.position))

    def _send(self, route: _Route, k: int, rank: _Rank) -> None:
        """Send off what a rank has just made, without waiting for it."""
        if route.direct or not route.seconds:
            self._deliver(route, k, rank.now_s, rank.cause)
        else:
            self._move(route, k, rank.now_s, rank.cause)

    def _move(self, route: _Route, k: int, ready_s: float, cause: _Cause) -> _Moved:
        """Queue a transfer at its ports (rule 5)."""
        start_s = ready_s
        for port in route.ports:
            if port.free_s > start_s:
                start_s, cause = port.free_s, port.last
        end_s = start_s + route.seconds
        moved = _Moved(route, k, start_s, end_s, cause)
        for port in route.ports:
            port.free_s, port.last = end_s, moved
        self.moved.append(moved)
        route.sender.transfers.append(Event(route.send(k), start_s, end_s))
        route.receiver.transfers.append(Event(route.receive(k), start_s, end_s))
        self._deliver(route, k, end_s, moved)
        return moved

    def _deliver(self, route: _Route, k: int, arrival_s: float, cause: _Cause) -> None:
        route.arrival_s[k], route.causes[k] = arrival_s, cause
        rank = route.receiver
        if rank.waits is route and rank.waits_for == k:
            rank.waits = None
            self._go_on(rank)

    def _exchange(self, rank: _Rank, exchange: _Exchange) -> None:
        """Come to the transfers of an exchange: those begin for which the other end waits already (rule 7)."""
        rank.pending, rank.latest_s = len(exchange.moves), rank.now_s
        now_s, cause = rank.now_s, rank.cause
        for route, k in exchange.moves:
            other = route.posted.pop(k, None)
            if other is None:
                route.posted[k] = rank
                continue
            moved = self._move(route, k, now_s, cause) if route.seconds else None
            end_s = moved.end_s if moved else now_s
            if moved is None:
                self._deliver(route, k, now_s, cause)
            for each in (other, rank):
                each.pending -= 1
                if end_s > each.latest_s:
                    each.latest_s, each.cause = end_s, moved or cause
                if not each.pending:
                    heapq.heappush(self.heap, (each.latest_s, each.key[0], each.key[1], k, each.position))


def _network(work: StageWork, key: _Key) -> tuple[_Name, ...]:
    return work.ports or (key,)


def _steps(
    actions: Sequence[Action],
    works: Sequence[StageWork],
    forth: Sequence[_Route],
    back: Sequence[_Route],
    explicit: bool,
    blocking: bool,
) -> Iterator[_Step | _Exchange]:
    """The steps of a rank: its compute actions, with their sends, or when blocking the exchanges, in between."""
    last = len(works) - 1
    left: list[tuple[_Route, int]] = []  # the send of the action before, for the exchange
    sends: list[tuple[_Route, int]] = []  # those listed behind the action before
    stages = {action.stage for action in actions}
    seconds = {s: {kind: works[s].seconds(kind) for kind in COMPUTE} for s in stages}
    for action in actions:
        stage, kind, index = action
        if index is None:
            continue
        if kind in COMPUTE:
            needs = gives = None
            if kind is Kind.F:
                needs = forth[stage - 1] if stage else None
                gives = forth[stage] if stage < last else None
            elif kind in BACKWARD:
                needs = back[stage] if stage < last else None
                gives = back[stage - 1] if stage else None
            if blocking and not explicit:
                moves = left + ([(needs, index)] if needs is not None and not needs.direct else [])
                if moves:
                    yield _Exchange(moves)
                left = [(gives, index)] if gives is not None and not gives.direct else []
            sends = [] if explicit else _NONE
            at_once = gives is not None and (gives.direct or not (blocking or explicit))
            yield _Step(action, index, seconds[stage][kind], needs, gives if at_once else None, sends)
        elif kind in TRANSFERS:
            at = stage - (kind in (Kind.RECV_F, Kind.SEND_B))
            route = forth[at] if kind in (Kind.SEND_F, Kind.RECV_F) else back[at]
            if blocking:
                yield _Exchange([(route, index)])
            elif kind in (Kind.SEND_F, Kind.SEND_B):
                sends.append((route, index))
    if left:
        yield _Exchange(left)


def _circle(rank: _Rank) -> list[str]:
    """Who waits for whom, from a rank that cannot go on until one comes round again."""
    seen: list[_Rank] = []
    waits = []
    while rank not in seen:
        seen.append(rank)
        text, rank = _wait(rank)
        waits.append(text)
    return waits[seen.index(rank) :]


def _wait(rank: _Rank) -> tuple[str, _Rank]:
    """What a rank that cannot go on waits for, and the rank that would have to do it."""
    step = rank.steps[rank.at]
    if isinstance(step, _Step):
        assert step.needs is not None
        other = step.needs.sender
        own, due = step.action, step.needs.send(step.k)
    else:
        route, k = next((route, k) for route, k in step.moves if route.posted.get(k) is rank)
        own, due, other = route.send(k), route.receive(k), route.receiver
        if route.receiver is rank:
            own, due, other = due, own, route.sender
    return f"pipeline {rank.key[0]} rank {rank.key[1]} waits at {own} for {due} of rank {other.key[1]}", other


# Reductions ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Running:
    """A reduction while it plays."""

    reduction: Reduction
    ports: dict[_Name, float]  # with the seconds it would take if only that port limited it
    before: _Running | None = None  # in the same block
    then: _Running | None = None
    joined_s: float = -1.0
    member: tuple[int, int] = (0, 0)  # who joins last
    backward: tuple[int, int] | None = None  # and the event that made its gradients complete
    start_s: float = 0.0
    end_s: float = math.inf  # as things stand
    rest_s: float = 0.0  # at full pace, from since_s on
    since_s: float = 0.0
    pace: float = 0.0
    over: bool = False

    @property
    def waited_for(self) -> _Running | None:
        """The one that ended as it started, if that is why it started then."""
        return self.before if self.joined_s < self.start_s else None


class _Sync:
    """Reductions (rules 8 to 11): a fluid that changes pace only when one starts or ends or a transfer takes a port.

    Transfers and compute never wait for a reduction, so all of those are known before.
    """

    def __init__(self, load: Workload, compute: _Compute, orders: Mapping[_Key, Sequence[int]]) -> None:
        self.all = [_Running(each, _ports(load, each)) for each in load.reductions]
        self.of_rank = {key: [self.all[i] for i in order] for key, order in orders.items()}
        latest: dict[str, _Running] = {}
        for each in self.all:
            each.before = latest.get(each.reduction.block)
            if each.before is not None:
                each.before.then = each
            latest[each.reduction.block] = each
        for rank in compute.ranks:
            self._join(rank)
        self.on: dict[_Name, list[_Running]] = {name: [] for each in self.all for name in each.ports}
        self.taken = dict.fromkeys(self.on, 0)  # transfers at each port
        self.order = itertools.count()  # keeps the heap from comparing what cannot be compared
        self.heap: list[tuple[float, int, _Running | None, _Name | None, int]] = []
        for each in self.all:
            if each.before is None:
                self._at(each.joined_s, each)
        first_s = min((each.joined_s for each in self.all), default=math.inf)
        for moved in compute.moved:
            if moved.end_s > first_s:
                for name in self.on.keys() & moved.route.names:
                    self._at(moved.start_s, None, name, 1)
                    self._at(moved.end_s, None, name, -1)

    def _join(self, rank: _Rank) -> None:
        """A rank joins its reductions one by one, each when its gradients are complete (rule 8)."""
        last = {event.action.stage: n for n, event in enumerate(rank.events) if event.action.kind in GRADIENTS}
        now_s, backward = -1.0, (rank.position, 0)
        for each in self.of_rank.get(rank.key, ()):
            own = [(n, s) for n, (p, s) in enumerate(each.reduction.members) if p == rank.key[0] and s in last]
            for n, s in own:
                _, start_s, end_s = rank.events[last[s]]
                part = each.reduction.ready[n] if each.reduction.ready else 1.0
                ready_s = end_s if part == 1 else start_s + part * (end_s - start_s)
                if ready_s > now_s:
                    now_s, backward = ready_s, (rank.position, last[s])
            if now_s > each.joined_s:
                each.joined_s, each.member, each.backward = now_s, (rank.key[0], own[0][1]), backward

    def _at(self, time_s: float, each: _Running | None, name: _Name | None = None, change: int = 0) -> None:
        heapq.heappush(self.heap, (time_s, next(self.order), each, name, change))

    def run(self) -> None:
        """Play all reductions."""
        while self.heap:
            now_s = self.heap[0][0]
            touched: dict[_Name, None] = {}
            while self.heap and self.heap[0][0] == now_s:
                _, _, each, name, change = heapq.heappop(self.heap)
                if name is not None:
                    self.taken[name] += change
                    touched[name] = None
                elif each is not None and not each.over and self._turn(each, now_s):
                    touched.update(dict.fromkeys(each.ports))
            for each in dict.fromkeys(each for name in touched for each in self.on[name]):
                self._keep_pace(each, now_s)
        assert all(each.over for each in self.all), "a reduction never ended"

    def _turn(self, each: _Running, now_s: float) -> bool:
        """Start or end a reduction if it is time."""
        if each not in self.on[next(iter(each.ports))]:
            each.start_s, each.since_s, each.rest_s = now_s, now_s, each.reduction.seconds
            for name in each.ports:
                self.on[name].append(each)
            return True
        if each.end_s != now_s:
            return False  # another pace since
        each.over = True
        for name in each.ports:
            self.on[name].remove(each)
        if each.then is not None:
            self._at(max(now_s, each.then.joined_s), each.then)
        return True

    def _keep_pace(self, each: _Running, now_s: float) -> None:
        """Set the pace of a reduction and when it ends at that pace (rules 10 and 11)."""
        pace = 1.0
        for name, alone_s in each.ports.items():
            if self.taken[name]:
                pace = 0.0
            elif alone_s > 0:
                pace = min(pace, each.reduction.seconds / (alone_s * len(self.on[name])))
        if pace == each.pace and each.since_s < now_s:
            return
        each.rest_s = max(0.0, each.rest_s - each.pace * (now_s - each.since_s))
        each.pace, each.since_s = pace, now_s
        if each.rest_s and not pace:
            each.end_s = math.inf
        else:
            each.end_s = now_s + each.rest_s / pace if each.rest_s else now_s
            self._at(each.end_s, each)


def _ports(load: Workload, reduction: Reduction) -> dict[_Name, float]:
    """Ports a reduction uses, and the seconds it would take if only that port limited it."""
    works = [load.pipelines[p][1][s] for p, s in reduction.members]
    near = works[0].node is not None and len({work.node for work in works}) == 1
    ports: dict[_Name, float] = {}
    for n, ((p, s), work) in enumerate(zip(reduction.members, works, strict=True)):
        key = (p, load.pipelines[p][0].rank_of(s))
        alone_s = reduction.port_s[n] if reduction.port_s else reduction.seconds
        for name in (key,) if near else _network(work, key):
            ports[name] = max(ports.get(name, 0.0), alone_s)
    return ports


def _joining_orders(load: Workload) -> dict[_Key, tuple[int, ...]]:
    """Per rank, its reductions in the order it joins them: as its list has them, or by index."""
    orders: dict[_Key, dict[int, None]] = {}
    for i, each in enumerate(load.reductions):
        for p, s in each.members:
            orders.setdefault((p, load.pipelines[p][0].rank_of(s)), {})[i] = None
    joined = {key: tuple(order) for key, order in orders.items()}
    astray = False
    for p, (lists, _) in enumerate(load.pipelines):
        for r, actions in enumerate(lists.ranks):
            listed = [i for _, kind, i in actions if kind is Kind.REDUCE_GRAD and i is not None]
            own = joined.get((p, r), ())
            if listed and set(listed) != set(own):
                i = min(set(listed) ^ set(own))
                problem = f"lists REDUCE_GRAD {i}, which" if i in listed else f"does not list REDUCE_GRAD {i}, which"
                verb = "it is no member of" if i in listed else "it is a member of"
                raise ValueError(f"pipeline {p}: rank {r} {problem} {verb}")
            if listed:
                joined[p, r] = tuple(listed)
                astray |= listed != sorted(listed)
    if astray:
        groups = {i: [key for key, order in joined.items() if i in order] for i in range(len(load.reductions))}
        schedules.check_deadlock([lists for lists, _ in load.pipelines], groups, rendezvous=False)
    return joined


def _updates(load: Workload, compute: _Compute, sync: _Sync) -> dict[_Key, list[Event]]:
    """UPDATE of every stage that takes some, after all backwards and reductions of its rank, one after another."""
    updates: dict[_Key, list[Event]] = {}
    for rank in compute.ranks:
        lists, works = load.pipelines[rank.key[0]]
        now_s = max([rank.now_s, *(each.end_s for each in sync.of_rank.get(rank.key, ()))])
        for s, work in enumerate(works):
            if work.update_s and lists.rank_of(s) == rank.key[1]:
                event = Event(Action(s, Kind.UPDATE), now_s, now_s + work.update_s)
                updates.setdefault(rank.key, []).append(event)
                now_s = event.end_s
    return updates


# The timeline ----------------------------------------------------------------------------------------------------


def lay_out(
    load: Workload,
    events: Mapping[_Key, Iterable[Event]],
    *,
    blocking: bool = False,
) -> Timeline:
    """The timeline of a measured run.

    Parameters
    ----------
    load
        What was run: its stages and their memory.
    events
        Per (pipeline, rank) everything the rank did, in any order: compute, UPDATE, SEND and RECV, REDUCE_GRAD; seconds
        from the start of the iteration.
    blocking
        Whether a rank that waits while one of its transfers moves waits for the transfer.

    Raises
    ------
    ValueError
        If two actions of a rank overlap, or a rank has no events.
    """
    ran: dict[_Key, list[Event]] = {}
    transfers: dict[_Key, list[Event]] = {}
    reductions: dict[_Key, list[Event]] = {}
    for key, each in events.items():
        own = list(each)
        ran[key] = sorted((event for event in own if event.action.kind in RUNS), key=_BY_TIME)
        transfers[key] = [event for event in own if event.action.kind in TRANSFERS]
        reductions[key] = [event for event in own if event.action.kind is Kind.REDUCE_GRAD]
    for p, (lists, _) in enumerate(load.pipelines):
        for r in range(len(lists.ranks)):
            if not any(event.action.kind in COMPUTE for event in ran.get((p, r), ())):
                raise ValueError(f"pipeline {p} rank {r}: no compute actions among the events")
    return _timeline(load, ran, transfers, reductions, blocking, ())


def _timeline(
    load: Workload,
    ran: Mapping[_Key, Sequence[Event]],
    transfers: Mapping[_Key, Iterable[Event]],
    reductions: Mapping[_Key, Iterable[Event]],
    blocking: bool,
    critical_path: tuple[tuple[int, Event], ...],
) -> Timeline:
    """The timeline of what every rank ran, in order, its transfers and its reductions."""
    moved = {key: tuple(sorted(each, key=_BY_TIME)) for key, each in transfers.items()}
    reduced = {key: tuple(sorted(each, key=_BY_TIME)) for key, each in reductions.items()}
    kinds = (ran, moved, reduced)
    iteration_s = max(max(map(_END, each), default=0.0) for kind in kinds for each in kind.values())
    lanes, pipelines_s = [], []
    for p, (lists, works) in enumerate(load.pipelines):
        ends_s = []
        for r in range(len(lists.ranks)):
            key = (p, r)
            stages = tuple(s for s in range(lists.num_stages) if lists.rank_of(s) == r)
            here = [works[s] for s in stages]
            waits = moved[key] if blocking else ()
            ends_s.append(next(event.end_s for event in reversed(ran[key]) if event.action.kind is not Kind.UPDATE))
            lanes.append(
                Lane(
                    pipeline=p,
                    rank=r,
                    stages=stages,
                    device_type=here[0].device_type,
                    devices=tuple(dict.fromkeys(name for work in here for name in work.devices)),
                    events=tuple(ran[key]),
                    transfers=moved[key],
                    reductions=reduced[key],
                    idle=_idle(f"pipeline {p} rank {r}", ran[key], waits, reduced[key], iteration_s),
                    memory=_memory(ran[key], {s: works[s].memory for s in stages}),
                )
            )
        pipelines_s.append(max(ends_s))
    return Timeline(
        iteration_s=iteration_s, pipelines_s=tuple(pipelines_s), lanes=tuple(lanes), critical_path=critical_path
    )


def _idle(
    where: str, ran: Sequence[Event], blocking: Sequence[Event], reductions: Sequence[Event], iteration_s: float
) -> Idle:
    """Every gap between the events of a rank, by what it waits for."""
    seconds: dict[str, list[float]] = {name: [] for name in IDLE}
    moving, reducing = _union(blocking), _union(reductions)

    def wait(now_s: float, until_s: float, reason: str) -> None:
        sync_s = _covered(reducing, now_s, until_s) if reason == "peers_s" else 0.0
        transfer_s = min(_covered(moving, now_s, until_s), until_s - now_s - sync_s)
        seconds["sync_s"].append(sync_s)
        seconds["transfer_s"].append(transfer_s)
        seconds[reason].append(until_s - now_s - sync_s - transfer_s)

    now_s = 0.0
    for (_, kind, _), start_s, end_s in ran:
        if start_s < now_s - OVERLAP_S:
            raise ValueError(f"{where}: an action begins at {start_s} s, before the one ahead of it ends at {now_s} s")
        if start_s > now_s:
            ahead = "warm_up_s" if not now_s else "activation_s" if kind is Kind.F else "gradient_s"
            wait(now_s, start_s, "peers_s" if kind is Kind.UPDATE else ahead)
        now_s = end_s
    computing = ran[-1].action.kind is not Kind.UPDATE
    last_s = max((end_s for _, end_s in (*reducing[-1:], *moving[-1:])), default=0.0)
    if computing and last_s > now_s:
        wait(now_s, last_s, "peers_s")
        now_s = last_s
    seconds["end_s"].append(iteration_s - now_s)
    return Idle(**{name: math.fsum(each) for name, each in seconds.items()})


def _union(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Disjoint spans of time, in order."""
    spans: list[tuple[float, float]] = []
    for _, start_s, end_s in events:
        if spans and start_s <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end_s))
        else:
            spans.append((start_s, end_s))
    return spans


def _covered(spans: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Seconds of [start, end) that lie in disjoint ordered spans."""
    covered = []
    for i in range(bisect_left(spans, start_s, key=lambda span: span[1]), len(spans)):
        if spans[i][0] >= end_s:
            break
        covered.append(min(spans[i][1], end_s) - max(spans[i][0], start_s))
    return math.fsum(covered)


def _memory(ran: Sequence[Event], needs: Mapping[int, StageBytes | None]) -> MemoryTrace | None:
    """Bytes of a rank over time (rule 12)."""
    known = [need for need in needs.values() if need is not None]
    if len(known) < len(needs):
        return None
    times, levels = [0.0], [(0, 0, 0)]
    activations = logits = 0

    def record(time_s: float, workspace: int) -> None:
        level = (activations, logits, workspace)
        if time_s <= times[-1]:
            levels[-1] = level
            if levels[-2:-1] == [level]:
                times.pop()
                levels.pop()
        elif level != levels[-1]:
            times.append(time_s)
            levels.append(level)

    for (stage, kind, _), start_s, end_s in ran:
        need = needs[stage]
        assert need is not None
        if kind is Kind.F:
            activations += need.activations
            logits += need.logits
        if kind is not Kind.UPDATE:
            record(start_s, need.workspace)
        if kind in GRADIENTS:
            activations -= need.activations
            logits -= need.logits
        record(end_s, 0)
    static = {name: sum(getattr(need, name) for need in known) for name in STATIC}
    return MemoryTrace(
        times_s=tuple(times),
        activations=tuple(level[0] for level in levels),
        logits=tuple(level[1] for level in levels),
        workspace=tuple(level[2] for level in levels),
        capacity=known[0].capacity,
        limit=known[0].limit,
        **static,
    )


def _critical_path(
    compute: _Compute, sync: _Sync, updates: Mapping[_Key, Sequence[Event]]
) -> tuple[tuple[int, Event], ...]:
    """Walk back from what ends last, each time to what ended as it started."""
    path: list[tuple[int, Event]] = []
    cause: _Cause = None
    reduction: _Running | None = None
    last = max(compute.ranks, key=lambda rank: (_end_s(rank, sync, updates), -rank.position))
    own = updates.get(last.key, ())
    path += [(last.key[0], event) for event in reversed(own)]
    at_s = own[0].start_s if own else _end_s(last, sync, updates)
    if last.now_s == at_s:
        cause = last.cause
    else:
        reduction = next(each for each in sync.of_rank[last.key] if each.end_s == at_s)
    while reduction is not None:
        p, s = reduction.member
        action = Action(s, Kind.REDUCE_GRAD, sync.all.index(reduction))
        path.append((p, Event(action, reduction.start_s, reduction.end_s)))
        at_s, cause, reduction = reduction.start_s, reduction.backward, reduction.waited_for
    while cause is not None:
        if isinstance(cause, _Moved):
            event = Event(cause.route.send(cause.k), cause.start_s, cause.end_s)
            path.append((cause.route.sender.key[0], event))
            cause = cause.cause
        else:
            rank, n = compute.ranks[cause[0]], cause[1]
            action, start_s, end_s = rank.events[n]
            path.append((rank.key[0], Event(action, start_s, min(end_s, at_s))))
            cause = rank.causes[n]
    return tuple((p, event) for p, event in reversed(path) if event.end_s > event.start_s)


def _end_s(rank: _Rank, sync: _Sync, updates: Mapping[_Key, Sequence[Event]]) -> float:
    """When everything of a rank is over."""
    if rank.key in updates:
        return updates[rank.key][-1].end_s
    return max([rank.now_s, *(each.end_s for each in sync.of_rank.get(rank.key, ()))])


# From a plan -----------------------------------------------------------------------------------------------------


def workload(
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    schedule: str | Sequence[Schedule] = "plan",
    weight_share: float = 0.5,
    granularity: str | None = None,
) -> Workload:
    """One iteration of a plan as it is played.

    Gradients become complete layer by layer, last first, the layers of a stage taken to run backward in equal times.
    With ``sync: exposed`` or granularity ``model`` they are reduced after the backward.

    Parameters
    ----------
    cluster
        Tells which devices share nodes and network ports, and how fast those are; without it each has its own.
    schedule
        A name that `planner.schedule.of_plan` knows, or one schedule per pipeline.
    weight_share
        Part of the backward that W takes where it is split, recomputation aside.
    granularity
        ``block``, ``layer`` or ``model`` instead of that of the job; needs the cluster.
    """
    if not 0 <= weight_share <= 1:
        raise ValueError(f"weight_share: {weight_share} is no part of a backward, expected 0 to 1")
    lists = _lists(plan, schedule)
    pipelines = []
    for p, pipeline in enumerate(plan.pipelines):
        works = tuple(_work(stage, weight_share, plan.job.memory_margin, cluster) for stage in pipeline.stages)
        pipelines.append((lists[p], works))
    return Workload(pipelines=tuple(pipelines), reductions=tuple(_reductions(plan, cluster, granularity)))


def _lists(plan: Plan, schedule: str | Sequence[Schedule]) -> tuple[Schedule, ...]:
    if isinstance(schedule, str):
        return tuple(schedules.of_plan(pipeline, schedule) for pipeline in plan.pipelines)
    if len(schedule) != len(plan.pipelines):
        raise ValueError(f"schedule: {len(schedule)} given, expected one for each of {len(plan.pipelines)} pipelines")
    for p, (lists, pipeline) in enumerate(zip(schedule, plan.pipelines, strict=True)):
        has = (lists.num_stages, len(lists.ranks), lists.num_micro_batches)
        wants = (len(pipeline.stages), len(pipeline.stages), pipeline.num_micro_batches)
        if has != wants:
            raise ValueError(
                f"schedule[{p}]: {lists.name!r} has {has[0]} stages on {has[1]} ranks and {has[2]} micro-batches, "
                f"expected {wants[0]} on {wants[1]} and {wants[2]}, as pipeline {p} of the plan"
            )
    return tuple(schedule)


def _work(stage: Stage, weight_share: float, margin: float, cluster: Cluster | None) -> StageWork:
    memory = stage.memory
    home: str | None = None
    ports: tuple[str, ...] = ()
    if cluster is not None:
        devices = [cluster.device(name) for name in stage.devices]
        node = cluster.nodes[devices[0].node]
        home = node.name
        ports = tuple(dict.fromkeys(f"{node.name} port {node.nic_of(device.index)}" for device in devices))
    return StageWork(
        forward_s=stage.forward_s,
        backward_s=stage.backward_s + stage.recompute_s,
        weight_s=weight_share * stage.backward_s,
        send_s=stage.send_s,
        update_s=stage.update_s,
        node=home,
        ports=ports,
        device_type=stage.device_type,
        devices=stage.devices,
        memory=StageBytes(
            weights=memory.weights,
            gradients=memory.gradients,
            optimizer=memory.optimizer,
            activations=memory.activations // stage.in_flight,
            logits=memory.logits // stage.in_flight,
            workspace=memory.workspace,
            sync_buffer=memory.sync_buffer,
            context=memory.context,
            capacity=memory.capacity,
            limit=math.floor((1 - margin) * memory.capacity),
        ),
    )


def _reductions(plan: Plan, cluster: Cluster | None, granularity: str | None) -> Iterator[Reduction]:
    if granularity is not None:
        plan = _at_granularity(plan, cluster, granularity)
    _require_calls(plan)
    late = plan.job.sync == "exposed" or plan.job.sync_granularity == "model"
    best: dict[tuple[int, str], Link | None] = {}
    for launch in schedules.launches(plan):
        own = launch.block < len(plan.blocks)
        block = plan.blocks[launch.block] if own else plan.tied_blocks[launch.block - len(plan.blocks)]
        low, high = 0, block.gradient_bytes
        if plan.job.sync_granularity == "block" and own:
            low = launch.chunk * plan.job.sync_chunk_bytes
            high = min(high, low + plan.job.sync_chunk_bytes)
        else:
            low, high = (high * (launch.chunk + n) // block.num_chunks for n in (0, 1))
        seconds = block.reduce_s * (high - low) / block.gradient_bytes
        stages = [plan.pipelines[p].stages[s] for p, s in launch.members]
        if own:
            first, end = block.layers
            lowest = [first + (end - first) * low // block.gradient_bytes] * len(stages)
        else:
            lowest = [min(l for l in block.layers if stage.layers[0] <= l < stage.layers[1]) for stage in stages]
        ready = tuple(
            (stage.layers[1] - l) / (stage.layers[1] - stage.layers[0]) for stage, l in zip(stages, lowest, strict=True)
        )
        yield Reduction(
            block=_block_name(block.layers, own),
            seconds=seconds,
            members=launch.members,
            ready=() if late else ready,
            port_s=() if cluster is None else _port_s(cluster, stages, seconds, high - low, best),
            nbytes=high - low,
        )


def _require_calls(plan: Plan) -> None:
    """Every call of a block has bytes to reduce."""
    for b, block in enumerate(plan.blocks):
        calls, nbytes = block.num_chunks, block.gradient_bytes
        due = -(-nbytes // plan.job.sync_chunk_bytes)
        if plan.job.sync_granularity == "block" and calls not in (0, due):
            raise ValueError(f"blocks[{b}].num_chunks: {calls}, its {nbytes} bytes take {due}")
        if calls > nbytes:
            raise ValueError(f"blocks[{b}].num_chunks: {calls} calls for {nbytes} bytes")
    for b, tied in enumerate(plan.tied_blocks):
        if tied.num_chunks > tied.gradient_bytes:
            raise ValueError(f"tied_blocks[{b}].num_chunks: {tied.num_chunks} calls for {tied.gradient_bytes} bytes")


def _block_name(layers: tuple[int, int], own: bool) -> str:
    if not own:
        return f"tied layers {layers[0]}, {layers[1]}"
    return f"layers {layers[0]}-{layers[1] - 1}" if layers[1] - layers[0] > 1 else f"layer {layers[0]}"


def _port_s(
    cluster: Cluster, stages: Sequence[Stage], seconds: float, nbytes: int, best: dict[tuple[int, str], Link | None]
) -> tuple[float, ...]:
    """Seconds of the ring if only the fastest network link at each member limited it."""
    devices = [cluster.device(stage.devices[0]) for stage in stages]
    if len({device.node for device in devices}) == 1:
        return ()
    found = []
    for device in devices:
        key = (device.node, device.type)
        if key not in best:
            best[key] = _best_link(cluster, device)
        link = best[key]
        found.append(seconds if link is None else min(seconds, _ring_s([link], len(devices), nbytes)))
    return tuple(found)


def _best_link(cluster: Cluster, device: Device) -> Link | None:
    """The fastest link of a device to another node."""
    others = {(other.node, other.type): other for other in cluster.devices if other.node != device.node}
    links = {cluster.link(device, other) for other in others.values() if cluster.joined(device, other)}
    return min(links, key=lambda link: link.seconds(RING_BYTES), default=None)


def _ring_s(links: Iterable[Link], num_ranks: int, nbytes: float) -> float:
    """Reduce-scatter and all-gather: 2 (n - 1) steps, each as slow as the slowest link carries an n-th."""
    return 2 * (num_ranks - 1) * max(link.seconds(nbytes / num_ranks) for link in links)


def _at_granularity(plan: Plan, cluster: Cluster | None, granularity: str) -> Plan:
    """The plan with its gradients reduced by other calls."""
    if granularity not in ("block", "layer", "model"):
        raise ValueError(f"granularity: {granularity!r} is not among block, layer, model")
    if cluster is None:
        raise ValueError(f"granularity: {granularity!r} needs the cluster, whose links tell what a call takes")
    chunk = plan.job.sync_chunk_bytes

    def again(block: Block, members: Sequence[tuple[int, int]]) -> Block:
        if not block.num_chunks:
            return block
        names = [plan.pipelines[p].stages[s].devices[0] for p, s in members]
        ring = sorted(map(cluster.device, names), key=lambda device: (device.node, device.index))
        links = [cluster.link(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
        sizes: list[float] = [block.gradient_bytes]
        if granularity == "block":
            sizes = [min(chunk, block.gradient_bytes - low) for low in range(0, block.gradient_bytes, chunk)]
        elif granularity == "layer":
            num_layers = block.layers[1] - block.layers[0]
            sizes = [block.gradient_bytes / num_layers] * num_layers
        seconds = math.fsum(_ring_s(links, len(ring), size) for size in sizes)
        return replace(block, num_chunks=len(sizes), reduce_s=seconds)

    return replace(
        plan,
        blocks=tuple(again(block, tuple(enumerate(block.owners))) for block in plan.blocks),
        job=replace(plan.job, sync_granularity=granularity),  # type: ignore[arg-type]
    )
