"""A profile, a cluster and a job as the numbers the search works on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from planner import cost, data_split
from planner.cluster import Cluster, Link
from planner.cost import Costs, DeviceClass, SyncTable
from planner.job import Job
from planner.profile import ModelProfile
from planner.stage_split import Ints

Progress = Callable[[float, str], None]


@dataclass(slots=True)
class Clock:
    """Time limit and progress of one search, and the work done."""

    time_limit: float | None = None
    progress: Progress | None = None
    calls: data_split.Calls = field(default_factory=data_split.Calls)
    templates: int = 0
    started: float = field(default_factory=time.perf_counter)
    effort: float = 1.0
    ran_out: bool = False
    told: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the time limit has passed; once seen, the plan is unproved."""
        if self.time_limit is not None and time.perf_counter() - self.started > self.time_limit:
            self.ran_out = True
        return self.ran_out

    def tell(self, fraction: float, what: str) -> None:
        """Report progress; a search that turns to its next part does not go back."""
        if self.progress is not None:
            self.told = max(self.told, min(fraction, 1.0))
            self.progress(self.told, what)


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What is asked, in arrays.

    Parameters
    ----------
    classes
        K classes: device type and tp degree.
    costs
        One per micro-batch size.
    use, available
        (K, R) and (R,): units of a class take resources; a resource is the places for tp groups of one degree or more
        on one device type.
    limits
        (K,) units of each class that can exist.
    rings
        Per class, the links that bound its gradient rings.
    optimistic
        Whether hand-overs and rings take the fastest links there are: then every time is a lower bound over placements.
    """

    profile: ModelProfile
    cluster: Cluster
    job: Job
    classes: tuple[DeviceClass, ...]
    costs: tuple[Costs, ...]
    use: Ints
    available: Ints
    limits: Ints
    rings: tuple[tuple[Link, ...], ...]
    optimistic: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def need(self) -> int:
        """Samples of the global batch."""
        return self.job.global_batch

    @property
    def num_layers(self) -> int:
        """L."""
        return self.profile.num_layers

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Tp degrees of the classes, ascending."""
        return tuple(sorted({unit.tp for unit in self.classes}))

    @cached_property
    def tp(self) -> Ints:
        """(K,) tp degree of each class."""
        return np.array([unit.tp for unit in self.classes], dtype=np.int64)

    @cached_property
    def fast(self) -> Question:
        """The same question with every hand-over and ring on the fastest link it could have."""
        costs = tuple(replace(each, cut=each.cut_floor) for each in self.costs)
        rings = tuple(cost.own_links(self.cluster, unit.device_type) for unit in self.classes)
        return replace(self, costs=costs, rings=rings, optimistic=True)

    @cached_property
    def inner_rings(self) -> tuple[tuple[Link, ...], ...]:
        """Per class, the links of a ring that stays inside a node, where there are any."""
        types = self.cluster.types
        return tuple(
            tuple(
                dict.fromkeys(link for other in types for link in self.cluster.links_inside(unit.device_type, other, 1))
            )
            for unit in self.classes
        )

    @cached_property
    def node_size(self) -> int:
        """Devices of the largest node: rings of more devices leave it."""
        return max(len(node.devices) for node in self.cluster.nodes)

    @cached_property
    def uniform(self) -> bool:
        """Whether links depend on the device types alone, so that any placement is as good as any other."""
        types = sorted({unit.device_type for unit in self.classes})
        return all(
            len(self.cluster.links_between(a, b, tp)) <= 1 for a in types for b in types for tp in {1, *self.degrees}
        )

    def with_types(self, types: Collection[str]) -> Question:
        """The question with devices of these types only, and rings that only those take part in."""
        chosen = [unit.device_type in types for unit in self.classes]
        rings = tuple(
            cost.ring_links(self.cluster, unit.device_type, types) if own else ()
            for unit, own in zip(self.classes, chosen, strict=True)
        )
        return replace(self, limits=np.where(chosen, self.limits, 0), rings=rings)

    def sync(self, costs: Costs, num_pipelines: int, min_tp: int) -> SyncTable:
        """Seconds after the last micro-batch of every stage; memoised."""
        key = (costs.micro_batch, num_pipelines, min_tp)
        found = self._sync_memo.get(key)
        if found is None:
            rings = self.rings
            if self.optimistic and num_pipelines * min_tp <= self.node_size:
                rings = tuple((*inner, *ring) for inner, ring in zip(self.inner_rings, self.rings, strict=True))
            found = cost.sync_table(costs, self.job, rings, num_pipelines, min_tp, self.optimistic)
            self._sync_memo[key] = found
        return found

    @cached_property
    def _sync_memo(self) -> dict[tuple[int, int, int], SyncTable]:
        return {}

    def parts(self) -> Iterator[Question]:
        """The whole, then what may do better alone: device types, nodes and islands, where the rest slows their rings
        or hand-overs down. Where nodes do not all reach one another, the groups that do."""
        if not self.cluster.complete:
            for members in self.cluster.cliques():
                yield from self._of_nodes([self.cluster.nodes[index].name for index in members])
            return
        yield self
        types = tuple(dict.fromkeys(unit.device_type for unit in self.classes))
        for size in range(len(types) - 1, 0, -1):
            for chosen in itertools.combinations(types, size):
                part = self.with_types(chosen)
                if any(own and own != ring for own, ring in zip(part.rings, self.rings, strict=True)):
                    yield part
        if self.uniform:
            return
        nodes = self.cluster.nodes
        islands = list(dict.fromkeys(node.island for node in nodes if node.island is not None))
        groups = [tuple(node for node in nodes if node.island == name) for name in islands] if len(islands) > 1 else []
        if len(nodes) > 1:
            kinds = {
                (tuple(sorted(node.devices)), node.link, node.groups, node.group_link): node for node in reversed(nodes)
            }
            groups += [(node,) for node in reversed(kinds.values()) if len(node.devices) > 1]
        for group in groups:
            yield from self._of_nodes([node.name for node in group])

    def _of_nodes(self, names: list[str]) -> Iterator[Question]:
        """The question on some nodes, unless none of their devices can run the model."""
        try:
            yield ask(self.profile, self.cluster.only(names), self.job)
        except ValueError:
            return


def ask(profile: ModelProfile, cluster: Cluster, job: Job) -> Question:
    """Collect classes, costs and resources.

    Raises
    ------
    ValueError
        If no device type of the cluster was measured, the micro-batch sizes cannot add up to the global batch, or no
        link joins two device types that have none of their own.
    """
    warnings = list(profile.warnings)
    missing = [name for name in cluster.types if not profile.degrees(name)]
    if len(missing) == len(cluster.types):
        raise ValueError(
            f"{cluster.name}: profile {profile.name!r} has complete times for none of {', '.join(cluster.types)}; "
            f"it has {', '.join(name for name in profile.device_types if profile.degrees(name)) or 'none'}"
        )
    warnings += [f"{name}: not in the profile, its devices stay idle" for name in missing]
    classes, heads_say = [], []
    for name in cluster.types:
        for tp in profile.degrees(name):
            if job.tp is not None and tp not in job.tp:
                continue
            if not profile.tp_allowed(tp):
                heads = f"{profile.num_heads} heads"
                if profile.num_kv_heads not in (None, profile.num_heads):
                    heads += f" and {profile.num_kv_heads} key-value heads"
                heads_say.append(f"{name}: tp {tp} left out, it does not divide {heads}")
            elif cluster.capacity(name, tp) > 0:
                classes.append(DeviceClass(device_type=name, tp=tp))
    if not classes:
        asked = "any measured degree" if job.tp is None else f"tp {', '.join(map(str, job.tp))}"
        measured = "; ".join(f"{name}: {', '.join(map(str, profile.degrees(name)))}" for name in cluster.types)
        raise ValueError(
            "; ".join([f"tp: no device type can run {asked}; measured degrees are {measured}", *heads_say])
        )
    warnings += heads_say
    possible = _sizes(profile, job, classes)
    sizes = [b for b in possible if b <= job.global_batch]
    if possible and not sizes:
        raise ValueError(
            f"global_batch: {job.global_batch} is below every micro-batch size, "
            f"{', '.join(map(str, possible))} samples; the nearest that is one: {possible[0]}"
        )
    if not sizes:
        known = _sizes(profile, replace(job, micro_batches=None), classes)
        raise ValueError(
            "micro_batches: no allowed size is measured on any device and at most the global batch of "
            f"{job.global_batch}; measured: {', '.join(map(str, known)) or 'none'}"
        )
    nearest = data_split.nearest_batches(possible, job.global_batch)
    if job.global_batch not in nearest and not data_split.adds_up(sizes, job.global_batch):
        raise ValueError(
            f"global_batch: {job.global_batch} is no sum of micro-batches of {', '.join(map(str, sizes))} samples; "
            f"the nearest that are: {' and '.join(map(str, nearest))}"
        )
    costs = tuple(cost.layer_costs(profile, cluster, job, classes, b) for b in sizes)
    use, available = _resources(cluster, classes)
    return Question(
        profile=profile,
        cluster=cluster,
        job=job,
        classes=tuple(classes),
        costs=tuple(each for each in costs if each.measured.any()),
        use=use,
        available=available,
        limits=np.array([cluster.capacity(unit.device_type, unit.tp) for unit in classes], dtype=np.int64),
        rings=tuple(
            cost.ring_links(cluster, unit.device_type, {each.device_type for each in classes}) for unit in classes
        ),
        warnings=tuple(warnings),
    )


def _sizes(profile: ModelProfile, job: Job, classes: list[DeviceClass]) -> list[int]:
    asked = job.micro_batches
    if asked is None:
        return sorted({b for unit in classes for b in profile.micro_batches(unit.device_type, unit.tp)})
    return sorted(
        b
        for b in set(asked)
        if any(profile.layer_costs(unit.device_type, unit.tp, b, job.extrapolate) is not None for unit in classes)
    )


def _resources(cluster: Cluster, classes: list[DeviceClass]) -> tuple[Ints, Ints]:
    """Resources that units take: for each type and degree d, places for d devices, taken by units of degree d or more.

    Enough exactly when the degrees divide one another (larger units are cut out of the nodes first); a row that the
    devices of the type already imply is left out.
    """
    rows, available = [], []
    for device_type in dict.fromkeys(unit.device_type for unit in classes):
        degrees = sorted({unit.tp for unit in classes if unit.device_type == device_type})
        total = cluster.num_devices(device_type)
        for d in (1, *(d for d in degrees if d > 1)):
            places = cluster.capacity(device_type, d)
            if d == 1 or places * d < total:
                rows.append(
                    [-(-unit.tp // d) if unit.device_type == device_type and unit.tp >= d else 0 for unit in classes]
                )
                available.append(places)
    return np.array(rows, dtype=np.int64).T.copy(), np.array(available, dtype=np.int64)
