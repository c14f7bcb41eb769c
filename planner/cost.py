"""What stages and pipelines cost: numbers in, seconds and bytes out.

The formulas and letters are those of ``docs/model.md``. Everything is a pure function of a profile, a cluster and a
job; nothing here chooses. Each function says whether it is exact, a bound or an approximation under that model.

    L layers, K classes, Q in-flight limits; l, k, q indices; (i, j) the half-open layer range of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from planner.cluster import Cluster, Link
    from planner.job import BytesPerParameter, Job
    from planner.profile import ModelProfile

Array = NDArray[np.float64]

# Up to this many ways to choose recomputed layers outside the largest group of equal savings are enumerated.
RECOMPUTE_CHOICES = 64
# Points of the Pareto set of (bytes, seconds) of recomputed layers that are kept.
RECOMPUTE_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """A kind of stage unit: `tp` devices of one type."""

    device_type: str
    tp: int

    def __str__(self) -> str:
        return self.device_type if self.tp == 1 else f"{self.device_type} x tp {self.tp}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """Per-layer costs of every class at one micro-batch size; a class without measurements has infinite times.

    Parameters
    ----------
    classes
        K device classes, the first index of the arrays below.
    micro_batch
        Samples per micro-batch.
    forward, backward, update
        (K, L) seconds per micro-batch (update: per iteration), tp communication included.
    state, kept, saved, logits, workspace
        (K, L) bytes per rank: model state; activations kept per micro-batch in flight; what recomputing the layer saves
        of them; logits per micro-batch in flight; temporary bytes.
    inputs
        (L,) bytes of one micro-batch arriving at layer l; 0 at l = 0.
    rework
        (K,) bytes of the working set of recomputation: the largest recomputable layer.
    usable
        (K,) bytes per rank left for a stage after margin and context.
    sync_buffer
        Bytes per rank set aside for gradient sync when there is more than one pipeline.
    gradients
        (L,) gradient bytes of the whole layer; a rank reduces 1/tau of it.
    calls
        (L,) all-reduce calls of the layer at granularity ``tensor``.
    cut
        (K, K, L + 1) seconds to hand one micro-batch over the cut before layer l, one way, between units of two
        classes; 0 at both ends. Slowest link between the types: a placement can only be faster.
    cut_floor
        (K, K, L + 1) the same over the fastest link.
    tied
        (first layer, second layer, (K,) state bytes, gradient bytes) of weights shared by two layers, or None.
    update_per_stage
        True if `update` is one figure per stage, the largest of its layers; else it adds up.
    extrapolated
        (K,) True where times lie outside the measured micro-batch sizes.
    divided
        (K, L) bytes of `state` that the owners of a layer divide among them, if the job shards the optimizer.
    """

    classes: tuple[DeviceClass, ...]
    micro_batch: int
    forward: Array
    backward: Array
    update: Array
    state: Array
    kept: Array
    saved: Array
    logits: Array
    workspace: Array
    inputs: Array
    rework: Array
    usable: Array
    sync_buffer: float
    gradients: Array
    calls: Array
    cut: Array
    cut_floor: Array
    tied: tuple[int, int, Array, float] | None
    update_per_stage: bool
    extrapolated: NDArray[np.bool_]
    divided: Array | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.forward.shape[1])

    def with_owners(self, num_pipelines: float) -> Costs:
        """The costs if so many pipelines, at least, divide the optimizer state of every layer."""
        return self if self.divided is None else _divided(self, num_pipelines)

    @property
    def measured(self) -> NDArray[np.bool_]:
        """(K,) True where the class has times at this micro-batch size."""
        return np.asarray(np.isfinite(self.forward).all(axis=1))


@lru_cache(maxsize=64)
def _divided(costs: Costs, num_pipelines: float) -> Costs:
    assert costs.divided is not None
    less = (1 - 1 / num_pipelines) * costs.divided
    tied = costs.tied
    if tied is not None:
        a, b, share, gradients = tied
        tied = a, b, share * (1 - less[:, b] / np.maximum(costs.state[:, b], 1.0)), gradients
    return replace(costs, state=costs.state - less, tied=tied)


def layer_costs(
    profile: ModelProfile, cluster: Cluster, job: Job, classes: Sequence[DeviceClass], micro_batch: int
) -> Costs:
    """Collect the costs of every layer on every class at one micro-batch size. Exact: measured or interpolated
    figures."""
    num_classes, num_layers = len(classes), profile.num_layers
    kinds = [profile.kind_of(l) for l in range(num_layers)]
    per_parameter = job.state
    forward, backward, update, kept, workspace = np.full((5, num_classes, num_layers), math.inf)
    extrapolated = np.zeros(num_classes, dtype=bool)
    outside = profile.conditions.tp_communication == "outside"
    for k, unit in enumerate(classes):
        measured = profile.layer_costs(unit.device_type, unit.tp, micro_batch, extrapolate=job.extrapolate)
        if measured is None:
            continue
        extrapolated[k] = measured.extrapolated
        forward[k], backward[k], update[k] = measured.forward_s, measured.backward_s, measured.update_s
        kept[k], workspace[k] = measured.activation_bytes, measured.workspace_bytes
        if outside and unit.tp > 1:
            extra = _tp_communication_s(profile, cluster, unit, micro_batch)
            forward[k] += extra
            backward[k] += extra

    state = np.array(
        [[rank_parameters(kind.parameters, kind.shard_parameters, unit.tp) for kind in kinds] for unit in classes],
        dtype=float,
    ).reshape(num_classes, num_layers)
    trained = np.array([[kind.trained_shard(unit.tp) for kind in kinds] for unit in classes], dtype=float)
    state = state * per_parameter.weights + trained.reshape(state.shape) * (
        per_parameter.gradients + per_parameter.optimizer
    )
    output = np.array([kind.output_bytes for kind in kinds], dtype=float) * micro_batch
    inputs = np.concatenate([[0.0], output[:-1]])
    logits = np.array([[kind.logits_bytes * micro_batch / unit.tp for kind in kinds] for unit in classes], dtype=float)
    recomputable = np.array([kind.recomputable for kind in kinds])
    finite_kept = np.where(np.isfinite(kept), kept, 0.0)
    saved = np.where(recomputable & job.recompute, np.maximum(finite_kept - inputs, 0.0), 0.0)
    rework = np.where(recomputable, finite_kept, 0.0).max(axis=1)
    memory = {d.name: d.memory_bytes for d in cluster.device_types}
    usable = np.array(
        [
            (1.0 - job.memory_margin) * memory[unit.device_type]
            - job.context_bytes
            - (job.tp_context_bytes if unit.tp > 1 else 0)
            for unit in classes
        ]
    )
    gradients = np.array([kind.trained for kind in kinds], dtype=float) * per_parameter.gradients
    cut, cut_floor = _hand_over_s(cluster, classes, inputs)
    return Costs(
        classes=tuple(classes),
        micro_batch=micro_batch,
        forward=forward,
        backward=backward,
        update=update,
        state=state,
        kept=finite_kept,
        saved=saved,
        logits=logits,
        workspace=np.where(np.isfinite(workspace), workspace, 0.0),
        inputs=inputs,
        rework=rework,
        usable=usable,
        sync_buffer=sync_buffer_bytes(job, gradients),
        gradients=gradients,
        calls=np.array([kind.num_tensors if kind.trainable else 0 for kind in kinds], dtype=float),
        cut=cut,
        cut_floor=cut_floor,
        tied=_tied(profile, classes, per_parameter),
        update_per_stage=profile.conditions.update_per == "stage",
        extrapolated=extrapolated,
        divided=trained.reshape(state.shape) * per_parameter.optimizer if job.shard_optimizer else None,
    )


def rank_parameters(parameters: int, shards: Sequence[tuple[int, int]], tp: int) -> int:
    """Parameters one rank of a tp group holds: the measured figure, else an even share rounded up."""
    return dict(shards).get(tp, parameters if tp == 1 else -(-parameters // tp))


def sync_buffer_bytes(job: Job, gradients: Array) -> float:
    """Bytes set aside per rank for gradient sync; an upper bound over stages (the largest message that can be sent)."""
    if job.sync_buffer_bytes is not None:
        return float(job.sync_buffer_bytes)
    if job.sync_granularity == "block":
        return float(min(job.sync_chunk_bytes, gradients.sum()))
    return float(gradients.sum() if job.sync_granularity == "model" else gradients.max())


def tied_share(profile: ModelProfile, tp: int) -> int:
    """Parameters per rank that the second of two tied layers shares with the first; 0 if nothing is tied."""
    return max((-(-profile.kind_of(l).tied_parameters // tp) for l in range(profile.num_layers)), default=0)


def _tied(
    profile: ModelProfile, classes: Sequence[DeviceClass], per_parameter: BytesPerParameter
) -> tuple[int, int, Array, float] | None:
    tied = [l for l in range(profile.num_layers) if profile.kind_of(l).tied_parameters > 0]
    if not tied:
        return None
    if len(tied) > 1:
        raise ValueError(
            f"tied_to: layers {', '.join(map(str, tied))} of {profile.name!r} are tied to another; one pair can be"
        )
    kind = profile.kind_of(tied[0])
    assert kind.tied_to is not None
    a, b = sorted((profile.layers.index(kind.tied_to), tied[0]))
    share = np.array([-(-kind.tied_parameters // unit.tp) for unit in classes], dtype=float)
    held = per_parameter.total if kind.trainable else per_parameter.weights
    return a, b, share * held, float(kind.tied_parameters * per_parameter.gradients * kind.trainable)


def _tp_communication_s(profile: ModelProfile, cluster: Cluster, unit: DeviceClass, micro_batch: int) -> Array:
    """All-reduce seconds of one forward inside a tp group, per layer, on the slowest link such a group may use."""
    own = [node for node in cluster.nodes if unit.device_type in node.devices]
    inside = list(dict.fromkeys(link for node in own if (link := node.group_link or node.link) is not None))
    inside = inside or list(cluster.links_between(unit.device_type, unit.device_type, 1))
    kinds = [profile.kind_of(l) for l in range(profile.num_layers)]
    volume = np.array([k.tp_bytes if k.tp_bytes is not None else 2 * k.output_bytes for k in kinds], dtype=float)
    return ring_all_reduce_s(volume * micro_batch, unit.tp, inside)


def _hand_over_s(cluster: Cluster, classes: Sequence[DeviceClass], inputs: Array) -> tuple[Array, Array]:
    num_classes, num_layers = len(classes), len(inputs)
    slow, fast = np.zeros((2, num_classes, num_classes, num_layers + 1))
    sizes, where = np.unique(inputs, return_inverse=True)
    for a, first in enumerate(classes):
        for b, second in enumerate(classes[a:], start=a):
            links = cluster.links_between(first.device_type, second.device_type, min(first.tp, second.tp))
            if not links:  # a single device of the type: never its own neighbour
                slow[a, b], fast[a, b] = math.inf, math.inf
            else:
                seconds = np.array([np.asarray(link.seconds(sizes)) for link in links])
                slow[a, b, :-1], fast[a, b, :-1] = seconds.max(axis=0)[where], seconds.min(axis=0)[where]
            slow[a, b, [0, -1]] = fast[a, b, [0, -1]] = 0.0
            slow[b, a], fast[b, a] = slow[a, b], fast[a, b]
    return slow, fast


def ring_all_reduce_s(nbytes: float | Array, num_ranks: int, links: Sequence[Link], fastest: bool = False) -> Array:
    """Seconds of a ring all-reduce of `nbytes` per rank over `num_ranks` ranks on the slowest of `links`, or the
    fastest.

    Exact for the alpha-beta model: 2 (n - 1) steps of nbytes / n each. 0 for one rank or no bytes.
    """
    volume = np.asarray(nbytes, dtype=float)
    if num_ranks <= 1 or not links:
        return np.zeros_like(volume)
    steps = [np.asarray(link.seconds(volume / num_ranks)) for link in links]
    step = np.min(steps, axis=0) if fastest else np.max(steps, axis=0)
    return np.where(volume > 0, 2 * (num_ranks - 1) * step, 0.0)


def ring_links(cluster: Cluster, device_type: str, types: Collection[str]) -> tuple[Link, ...]:
    """Links that bound the gradient rings of a device type, given the types that take part.

    Rings over different links run side by side, so a device is bound by its own network link: the one between nodes of
    its type (a slower peer accounts for itself). A link slower than both ends' own links is a property of the path,
    which every ring has to cross, so it counts for both ends.
    """
    own = own_links(cluster, device_type)
    reference = float(1 << 26)
    own_s = max(float(link.seconds(reference)) for link in own) if own else 0.0
    crossing = []
    for other in sorted(types):
        if other != device_type:
            other_own = own_links(cluster, other)
            other_s = max(float(link.seconds(reference)) for link in other_own) if other_own else 0.0
            for link in cluster.links_between(device_type, other, 1):
                if float(link.seconds(reference)) > max(own_s, other_s) * 1.001:
                    crossing.append(link)
    return (*own, *crossing)


def own_links(cluster: Cluster, device_type: str) -> tuple[Link, ...]:
    """The links between nodes of a device type; of a type on one node only, the best that reaches it."""
    across = cluster.links_across(device_type, device_type, 1)
    if across:
        return across
    outward = [
        link for other in cluster.types if other != device_type for link in cluster.links_across(device_type, other, 1)
    ]
    if outward:  # one node of this type: its network link is the best that reaches it
        return (min(outward, key=lambda link: float(link.seconds(float(1 << 26)))),)
    return cluster.links_between(device_type, device_type, 1)


# Stage tables: every class, in-flight limit and layer range at once.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTable:
    """Costs of every possible stage.

    Parameters
    ----------
    load
        (K, Q, L + 1, L + 1) seconds per micro-batch of layers [i, j) with q + 1 in flight, without hand-overs; infinite
        if it does not fit or is no range.
    cut
        (K, K, L + 1) seconds of a hand-over between two classes before layer l.
    left, level_of
        (K, N, L + 1) the distinct left cuts a stage of each class can have, and (K, K) which of them a predecessor of
        the first class gives to a stage of the second.
    exact
        False if some set of recomputed layers was picked from a thinned list (many different savings): a bound there.
    """

    load: Array
    cut: Array
    left: Array
    level_of: NDArray[np.int64]
    exact: bool = True

    def with_one_left(self) -> StageTable:
        """As if every left cut were the slowest: an upper bound with a single level, exact if links are all alike."""
        slowest = np.where(np.isfinite(self.left), self.left, -math.inf).max(axis=1, keepdims=True)
        return replace(self, left=slowest, level_of=np.zeros_like(self.level_of))


def ranges(values: Array) -> Array:
    """(..., L) per-layer values to (..., L + 1, L + 1) sums over [i, j); entries with j < i are negative and unused."""
    prefix = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
    sums: Array = prefix[..., None, :] - prefix[..., :, None]
    return sums


def range_max(values: Array) -> Array:
    """(..., L) per-layer values to (..., L + 1, L + 1) maxima over [i, j); 0 for empty ranges."""
    num_layers = values.shape[-1]
    out = np.zeros((*values.shape[:-1], num_layers + 1, num_layers + 1))
    for i in range(num_layers):
        out[..., i, i + 1 :] = np.maximum.accumulate(values[..., i:], axis=-1)
    return out


def stage_table(costs: Costs, in_flight: Sequence[int], synced: bool, floor: bool = False) -> StageTable:
    """Seconds of every stage at every in-flight limit. Exact, unless `StageTable.exact` says otherwise.

    Parameters
    ----------
    in_flight
        Micro-batches in flight for each index q.
    synced
        Whether a gradient sync buffer is set aside (more than one pipeline).
    floor
        Where it is not exact, a lower bound instead of an upper one.
    """
    num_layers = costs.num_layers
    base, per_micro_batch = stage_bytes(costs)
    usable = costs.usable - (costs.sync_buffer if synced else 0.0)
    finite = np.where(costs.measured[:, None], costs.forward + costs.backward, 0.0)
    times = ranges(finite)
    times[~costs.measured] = math.inf
    valid = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=bool), 1)
    flights = np.array(in_flight, dtype=float)
    over = base[:, None] + flights[None, :, None, None] * per_micro_batch[:, None] - usable[:, None, None, None]
    load = np.where(over <= 0.0, times[:, None], math.inf)
    exact = True
    if costs.saved.any():
        for k in range(len(costs.classes)):
            if costs.measured[k] and costs.saved[k].any():
                short = (over[k] > 0) & valid
                if short.any():
                    extra, sound = _recompute_s(costs, k, _at_least(max(in_flight)), floor)
                    rows = np.array(in_flight) - 1
                    load[k] = np.where(short, times[k] + extra[int(synced)][rows], load[k])
                    exact &= sound
    load[:, :, ~valid] = math.inf
    left, level_of = left_levels(costs.cut)
    return StageTable(load=load, cut=costs.cut, left=left, level_of=level_of, exact=exact)


def left_levels(cut: Array) -> tuple[Array, NDArray[np.int64]]:
    """Distinct left cuts of each class, padded by repeating the last, and the level each predecessor gives."""
    num_classes = cut.shape[0]
    level_of = np.zeros((num_classes, num_classes), dtype=np.int64)
    distinct: list[list[Array]] = []
    for k in range(num_classes):
        rows: list[Array] = []
        for k0 in range(num_classes):
            known = next((n for n, row in enumerate(rows) if np.array_equal(row, cut[k0, k])), None)
            if known is None:
                known = len(rows)
                rows.append(cut[k0, k])
            level_of[k0, k] = known
        distinct.append(rows)
    width = max(map(len, distinct))
    return np.stack([np.stack([*rows, *[rows[-1]] * (width - len(rows))]) for rows in distinct]), level_of


@lru_cache(maxsize=64)
def stage_bytes(costs: Costs) -> tuple[Array, Array]:
    """((K, L+1, L+1) bytes held once, the same per micro-batch in flight) of every range, nothing recomputed. Exact."""
    base = ranges(costs.state) + range_max(costs.workspace)
    if costs.tied is not None:
        a, b, share, _ = costs.tied
        base[:, : a + 1, b + 1 :] -= share[:, None, None]
    per_micro_batch = ranges(costs.kept + costs.logits) + np.append(costs.inputs, 0.0)[None, :, None]
    return base, per_micro_batch


def _at_least(in_flight: int) -> int:
    """A round number of micro-batches in flight, so that the tables of different depths are one."""
    return max(8, 1 << (in_flight - 1).bit_length())


@lru_cache(maxsize=64)
def _recompute_s(costs: Costs, k: int, most: int, floor: bool) -> tuple[Array, bool]:
    """(2, most, L + 1, L + 1) least extra forward seconds whose recomputation makes each stage of class k fit, without
    and with a sync buffer, at 1 to `most` micro-batches in flight. 0 where it fits as it is, infinite if it cannot.

    Layers of equal savings and forwards are interchangeable, so the cheapest forwards of a saving go first: with one
    saving that is a prefix, with few the counts of all groups but the largest are enumerated, with many the Pareto set
    of (bytes, seconds) is built layer by layer. Exact, unless that set has to be thinned; then an upper bound, or with
    `floor` a lower one.
    """
    base, per_micro_batch = stage_bytes(costs)
    flights = np.arange(1.0, most + 1)[None, :, None, None]
    usable = costs.usable[k] - np.array([0.0, costs.sync_buffer])[:, None, None, None]
    over = base[k] + flights * per_micro_batch[k] - usable
    need = (over + costs.rework[k]) / flights
    # To recompute everything is not enough: nothing to be chosen. (Half a byte: sums in another order.)
    wanted = (over > 0) & (need <= ranges(costs.saved[k]) + 0.5)
    wanted &= np.triu(np.ones(over.shape[2:], dtype=bool), 1)
    out = np.where(over > 0, math.inf, 0.0)
    groups = _savings_groups(costs.saved[k], range(costs.num_layers))
    if math.prod(len(layers) + 1 for layers in groups[1:]) <= RECOMPUTE_CHOICES:
        out[wanted] = _by_counts(costs, k, groups, need, wanted)
        return out, True
    return out, _by_points(costs, k, need, wanted, floor, out)


def _by_counts(costs: Costs, k: int, groups: list[list[int]], need: Array, wanted: NDArray[np.bool_]) -> Array:
    """Least seconds for each entry of `wanted`, over the counts of recomputed layers in all groups but the largest."""
    saved, forward = costs.saved[k], costs.forward[k]
    _, _, i, j = np.nonzero(wanted)
    free, best = need[wanted], np.full(len(i), math.inf)
    cheapest = [
        _cheapest_sums(tuple(float(forward[l]) for l in layers), tuple(layers), costs.num_layers) for layers in groups
    ]
    sizes = [saved[layers[0]] for layers in groups]
    most = cheapest[0].shape[2] - 1
    for counts in np.ndindex(*(len(layers) + 1 for layers in groups[1:])):
        cost, rest = np.zeros(len(i)), free.copy()
        for table, size, count in zip(cheapest[1:], sizes[1:], counts, strict=True):
            cost += table[i, j, count]
            rest -= size * count
        count0 = np.ceil(np.maximum(rest, 0.0) / sizes[0] - 1e-12).astype(np.int64)
        cost += np.where(count0 <= most, cheapest[0][i, j, np.minimum(count0, most)], math.inf)
        best = np.minimum(best, cost)
    return best


def _by_points(costs: Costs, k: int, need: Array, wanted: NDArray[np.bool_], floor: bool, out: Array) -> bool:
    """Writes the least seconds for each entry of `wanted` to `out`, from Pareto sets; False if one was thinned."""
    saved, forward, exact = costs.saved[k], costs.forward[k], True
    ends = np.asarray(wanted.any(axis=(0, 1)))
    for i in np.unique(np.nonzero(ends)[0]):
        points = np.zeros((2, 1))
        for j in range(int(i) + 1, int(np.nonzero(ends[i])[0][-1]) + 1):
            points, whole = _with_choice(points, saved[j - 1], forward[j - 1], floor)
            exact &= whole
            if ends[i, j]:
                here = wanted[:, :, i, j]
                enough = np.searchsorted(points[0], need[:, :, i, j][here] * (1 - 1e-12))
                out[:, :, i, j][here] = np.append(points[1], math.inf)[enough]
    return exact


def _savings_groups(saved: Array, layers: Iterable[int]) -> list[list[int]]:
    """Layers that save something, grouped by how much, the largest group first."""
    groups: dict[float, list[int]] = {}
    for l in layers:
        if saved[l] > 0:
            groups.setdefault(float(saved[l]), []).append(l)
    return sorted(groups.values(), key=lambda group: (-len(group), group))


def _with_choice(points: Array, saved: float, forward: float, floor: bool = False) -> tuple[Array, bool]:
    """Pareto set, (2, n) bytes freed and seconds, both ascending, with one more layer to recompute or not; False if
    thinned."""
    if saved <= 0:
        return points, True
    both = np.concatenate([points, points + np.array([[saved], [forward]])], axis=1)
    both = both[:, np.argsort(both[0], kind="stable")]  # two ascending runs: merged
    behind = np.minimum.accumulate(both[1, ::-1])[::-1]
    both = both[:, np.append(both[1, :-1] < behind[1:], True)]
    both = both[:, np.append(True, both[0, 1:] > both[0, :-1])]
    if both.shape[1] <= RECOMPUTE_POINTS:
        return both, True
    keep = np.unique(np.linspace(0, both.shape[1] - 1, RECOMPUTE_POINTS).astype(np.int64))
    seconds = np.append(0, keep[:-1] + 1) if floor else keep  # of those left out before each, the least
    return np.stack([both[0, keep], both[1, seconds]]), False


@lru_cache(maxsize=256)
def _cheapest_sums(forward: tuple[float, ...], layers: tuple[int, ...], num_layers: int) -> Array:
    """(L+1, L+1, n+1): seconds of the c cheapest of n layers (with these forwards) inside [i, j); infinite if there
    are fewer."""
    seconds, where = np.array(forward), np.array(layers)
    inside = np.zeros(num_layers + 1, dtype=np.int64)
    inside[1:] = np.cumsum(np.isin(np.arange(num_layers), where))
    count = inside[None, :] - inside[:, None]
    steps = np.arange(len(layers) + 1)
    if np.ptp(seconds) == 0.0:
        return np.where(steps <= count[:, :, None], steps * seconds[0], math.inf)
    table = np.full((num_layers + 1, num_layers + 1, len(layers) + 1), math.inf)
    for i in range(num_layers + 1):
        for j in range(i, num_layers + 1):
            chosen = np.sort(seconds[(where >= i) & (where < j)])
            table[i, j, : len(chosen) + 1] = np.concatenate([[0.0], np.cumsum(chosen)])
    return table


def fits(costs: Costs, k: int, i: int, j: int, in_flight: int, synced: bool) -> bool:
    """Whether the stage [i, j) fits on class k, recomputing all it may. As `stage_table` has it."""
    over = _over(costs, k, i, j, in_flight, synced)
    return over <= 0 or (over + float(costs.rework[k])) / in_flight <= float(costs.saved[k, i:j].sum()) * (1 + 1e-12)


def _over(costs: Costs, k: int, i: int, j: int, in_flight: int, synced: bool) -> float:
    """Bytes that a stage is short of, nothing recomputed."""
    base, per_micro_batch = stage_bytes(costs)
    usable = costs.usable[k] - (costs.sync_buffer if synced else 0.0)
    return float(base[k, i, j] + in_flight * per_micro_batch[k, i, j] - usable)


def recomputed_layers(costs: Costs, k: int, i: int, j: int, in_flight: int, synced: bool) -> tuple[int, ...]:
    """The layers the stage [i, j) on class k recomputes: a cheapest set that makes it fit, as `stage_table` charges
    it."""
    over = _over(costs, k, i, j, in_flight, synced)
    if over <= 0:
        return ()
    need = (over + float(costs.rework[k])) / in_flight
    saved, forward = costs.saved[k], costs.forward[k]
    groups = [sorted(group, key=lambda l: (forward[l], l)) for group in _savings_groups(saved, range(i, j))]
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    if math.prod(len(group) + 1 for group in _savings_groups(saved, range(costs.num_layers))[1:]) <= RECOMPUTE_CHOICES:
        for counts in np.ndindex(*(len(group) + 1 for group in groups[1:])):
            chosen = [l for group, count in zip(groups[1:], counts, strict=True) for l in group[:count]]
            rest = need - sum(saved[l] for l in chosen)
            count0 = max(0, math.ceil(rest / saved[groups[0][0]] - 1e-12))
            if count0 <= len(groups[0]):
                chosen += groups[0][:count0]
                best = min(best, (float(sum(forward[l] for l in chosen)), tuple(sorted(chosen))))
    else:
        steps = [np.zeros((2, 1))]
        for l in range(i, j):
            steps.append(_with_choice(steps[-1], saved[l], forward[l])[0])
        enough = int(np.searchsorted(steps[-1][0], need * (1 - 1e-12)))
        assert enough < steps[-1].shape[1], "a stage outside the table was chosen"
        bytes_, seconds = steps[-1][:, enough]
        chosen = []
        for l in range(j - 1, i - 1, -1):  # undo the choices layer by layer
            before = steps[l - i]
            same = np.isclose(before[0], bytes_, rtol=1e-12, atol=0.5) & np.isclose(before[1], seconds, rtol=1e-12)
            if not same.any():
                chosen.append(l)
                bytes_, seconds = bytes_ - saved[l], seconds - forward[l]
        best = (0.0, tuple(sorted(chosen)))
    assert best[0] < math.inf, "a stage outside the table was chosen"
    return best[1]


def least_tail(load: Array, tail: Array) -> Array:
    """(L,) least tail of a stage that holds each layer, of any class and in-flight limit; infinite if none fits.

    Parameters
    ----------
    load
        (K, Q, L + 1, L + 1) of a `StageTable`.
    tail
        (K, L + 1, L + 1).
    """
    least = np.where(np.isfinite(load).any(axis=1), tail, math.inf).min(axis=0)
    least = np.minimum.accumulate(least, axis=0)
    least = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]
    layer = np.arange(len(least) - 1)
    return least[layer, layer + 1]


# Gradient sync.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SyncTable:
    """Seconds after the last micro-batch: (K, L + 1, L + 1) of the ring alone, of the update alone, and their exposed
    sum."""

    ring: Array
    update: Array
    tail: Array


def sync_table(
    costs: Costs,
    job: Job,
    links: Sequence[Sequence[Link]],
    num_pipelines: int,
    min_tp: int,
    fastest: bool = False,
) -> SyncTable:
    """Gradient sync and update of every stage when `num_pipelines` pipelines take part. Exact for equal tp degrees.

    Parameters
    ----------
    links
        Per class, the links that bound its rings (`ring_links`).
    min_tp
        Smallest tp degree of the plan: gradients are exchanged in that many shards. Where all owners of a layer have a
        larger degree this is an upper bound.
    fastest
        Take the fastest of the links instead of the slowest: a lower bound over placements.
    """
    seconds = np.where(np.isfinite(costs.update), costs.update, 0.0)
    update = range_max(seconds) if costs.update_per_stage else ranges(seconds)
    ring, last = ring_seconds(costs, job, links, num_pipelines, min_tp, fastest)
    if job.shard_optimizer:
        # Half of the ring's steps reduce and scatter gradients; the other half gather weights, after the update.
        update = update + ring / 2 * job.state.weights / max(job.state.gradients, 1)
        ring, last = ring / 2, last / 2
    backward = ranges(np.where(np.isfinite(costs.backward), costs.backward, 0.0))
    hidden = np.zeros_like(ring) if job.sync == "exposed" or job.sync_granularity == "model" else backward
    exposed = np.where(ring > 0, np.maximum(ring - hidden, np.minimum(last, ring)), 0.0) if hidden.any() else ring
    return SyncTable(ring=ring, update=update, tail=update + exposed)


def ring_seconds(
    costs: Costs,
    job: Job,
    links: Sequence[Sequence[Link]],
    num_pipelines: int,
    min_tp: int,
    fastest: bool = False,
) -> tuple[Array, Array]:
    """(K, L+1, L+1) seconds of a stage's gradient rings and of the last message alone."""
    num_classes, num_layers = len(costs.classes), costs.num_layers
    share = costs.gradients / min_tp
    volume = np.maximum(ranges(share), 0.0)
    lone: Array = np.zeros((num_layers + 1, num_layers + 1))
    both, tied_bytes = np.zeros((num_layers + 1, num_layers + 1), dtype=bool), 0.0
    if costs.tied is not None:
        a, b, _, tied_bytes = costs.tied
        has_a = (np.arange(num_layers + 1)[:, None] <= a) & (np.arange(num_layers + 1)[None, :] > a)
        has_b = (np.arange(num_layers + 1)[:, None] <= b) & (np.arange(num_layers + 1)[None, :] > b)
        lone = np.where(has_a ^ has_b, tied_bytes / min_tp, 0.0)
        both = has_a & has_b
        volume = np.where(both, volume - tied_bytes / min_tp, volume) - lone
        share = share.copy()
        share[[a, b]] -= tied_bytes / min_tp  # at finer granularity the tied weights are a call of their own
    ring, last = np.zeros((2, num_classes, num_layers + 1, num_layers + 1))
    done: dict[tuple[Link, ...], tuple[Array, Array]] = {}
    for k in range(num_classes):
        key = tuple(links[k])
        if key not in done:
            done[key] = _chunked_ring(volume, share, costs.calls, job, key, num_pipelines, fastest)
            if both.any() and job.sync_granularity in ("layer", "tensor"):
                # In one stage they go with the first layer's own call.
                alone, whole = (
                    float(ring_all_reduce_s(share[a] + extra, num_pipelines, key, fastest))
                    for extra in (0.0, tied_bytes / min_tp)
                )
                done[key] = (done[key][0] + both * (whole - alone), np.maximum(done[key][1], both * whole))
            if lone.any():
                tied_ring = _chunked_ring(lone, share, costs.calls, job, key, 2 * num_pipelines, fastest, whole=True)
                done[key] = (done[key][0] + tied_ring[0], np.maximum(done[key][1], tied_ring[1]))
        ring[k], last[k] = done[key]
    return ring, last


def _chunked_ring(
    volume: Array,
    share: Array,
    calls: Array,
    job: Job,
    links: Sequence[Link],
    num_ranks: int,
    fastest: bool,
    whole: bool = False,
) -> tuple[Array, Array]:
    if num_ranks <= 1:
        return np.zeros_like(volume), np.zeros_like(volume)
    if job.sync_granularity == "model":
        ring = ring_all_reduce_s(volume, num_ranks, links, fastest)
        return ring, ring
    if job.sync_granularity in ("layer", "tensor") and not whole:
        pieces = np.maximum(calls, 1.0) if job.sync_granularity == "tensor" else np.ones_like(calls)
        single = ring_all_reduce_s(share / pieces, num_ranks, links, fastest)
        return ranges(single * pieces), range_max(single)
    chunk = float(job.sync_chunk_bytes)
    full = np.floor(volume / chunk)
    one = float(ring_all_reduce_s(chunk, num_ranks, links, fastest))
    rest = ring_all_reduce_s(volume - full * chunk, num_ranks, links, fastest)
    return full * one + rest, np.where(full > 0, one, rest)


# Pipelines.


def pipeline_s(loads: Sequence[float], num_micro_batches: int) -> float:
    """Planning form: sum of stage loads + (m - 1) x the largest.

    Exact for equal stages with free links, where it is (m + S - 1)(F + B); otherwise an approximation, mostly from
    above.
    """
    return sum(loads) + (num_micro_batches - 1) * max(loads)


def floor_s(loads: Sequence[float], num_micro_batches: int) -> float:
    """Lower bound on any schedule that leaves backward passes whole: max_s (sum_{j<s} t_j + m t_s)."""
    before, best = 0.0, 0.0
    for load in loads:
        best = max(best, before + num_micro_batches * load)
        before += load
    return best


def one_f_one_b_s(
    forward: Sequence[float], backward: Sequence[float], hand_over: Sequence[float], num_micro_batches: int
) -> float:
    """1F1B iteration of unequal stages with transfers, without gradient sync.

    An approximation: 0.0 % off an event simulation for stages within 10 % of each other and free links, within -2.0 /
    +0.5 % for transfers of 5 % of F, -8 / +3 % for 25 %.

    Parameters
    ----------
    forward, backward
        Seconds per micro-batch of each of the S stages.
    hand_over
        Seconds of each of the S - 1 transfers, one way.
    """
    num_stages, m = len(forward), num_micro_batches
    after = [*hand_over, 0.0]
    longest, before = 0.0, 0.0
    for s in range(num_stages):
        f, b = forward[s], backward[s]
        t, window = f + b, min(m, num_stages - s)
        round_trip = sum(forward[s:]) + sum(backward[s:]) + 2 * sum(after[s:])
        if window < m:
            warm_up = max(0.0, round_trip - b - window * f)
            cool_down = max(0.0, round_trip - t - (window - 1) * b)
            time = max(m * t + warm_up + cool_down, round_trip + (m - 1) * round_trip / window)
        else:
            time = max(max(m * f, round_trip - b) + m * b, (m - 1) * f + round_trip)
        longest = max(longest, before + time)
        before += t + 2 * after[s]
    return longest
