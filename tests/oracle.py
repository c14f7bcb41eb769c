"""The best plan of a tiny case, by exhaustive search. Ground truth for the planner; shares no code with it.

    L layers, units k = (device type, tp), P pipelines of S stages, m micro-batches of b samples
    T_p  = sum_s v_s + (m - 1) max_s v_s        v_s: seconds per micro-batch of stage s, hand-overs included
    plan = max_p T_p + max_s tail_s             tail_s: gradient ring left exposed, and update

Every multiset of units, every order of them, every contiguous cut, every split of the batch and every number of
pipelines is covered. What is dropped is dominated: a way to run a pipeline that another one equals in sum, max and
tail, a way to fill the cluster that cannot beat the best plan so far. `value_of` computes a given plan from scratch;
`by_brute_force` lists plans literally, for the tiniest cases, and proves `optimum`.

Assumes that placement does not matter: every pair of devices of two types sees the same link, written down as a type
pair (or, for a type that sits in one node, as the link inside the node).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.job import Job
from planner.profile import Cell, Conditions, LayerKind, ModelProfile

Counts = tuple[int, ...]
Tail = Callable[[int, int, int, int], float]  # (unit, micro-batch size, first, last) -> seconds

# A plan must be better by this much to count as better; far above rounding, far below what tests ask for.
BETTER = 1e-11


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [first, last) on one unit."""

    device_type: str
    tp: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that hold the model, and their share of the batch."""

    micro_batch: int
    num_micro_batches: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Optimum:
    """The least iteration seconds, and a plan that takes them."""

    value: float
    pipelines: tuple[Pipeline, ...]


# Numbers of one stage.


class Numbers:
    """Seconds and bytes of every stage, straight from the files and the page of formulas (`docs/model.md`)."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, job: Job) -> None:
        assert job.max_depth is None and job.max_classes is None and not job.extrapolate
        assert profile.conditions.tp_communication == "inside"
        self.profile, self.cluster, self.job = profile, cluster, job
        self.kinds = [profile.kind_of(l) for l in range(len(profile.layers))]
        self.num_layers = len(self.kinds)
        self.cells: dict[tuple[str, str, int, int], Cell] = {
            (c.kind, c.device_type, c.tp, c.micro_batch): c for c in profile.cells
        }
        degrees = sorted({c.tp for c in profile.cells}) if job.tp is None else sorted(job.tp)
        sizes = sorted({c.micro_batch for c in profile.cells}) if job.micro_batches is None else job.micro_batches
        self.micro_batches = sorted(sizes)
        self.units = [
            (name, tp)
            for name in cluster.types
            for tp in degrees
            if self.capacity(name, tp) and profile.tp_allowed(tp) and any(self.measured(name, tp, b) for b in sizes)
        ]
        state = job.state
        self.trained_bytes = state.weights + state.gradients + state.optimizer
        self.gradients = [k.parameters * state.gradients if k.trainable else 0 for k in self.kinds]
        self.tied = self._tied()
        self.savings = cache(self._savings)
        self.ring_links = cache(self._ring_links)

    def _tied(self) -> tuple[int, int, int] | None:
        for l, kind in enumerate(self.kinds):
            if kind.tied_to is not None and kind.tied_parameters:
                other = self.profile.layers.index(kind.tied_to)
                return min(l, other), max(l, other), kind.tied_parameters
        return None

    def nodes(self, name: str) -> list[int]:
        """Devices of a type in each node that has some."""
        return [n.devices.count(name) for n in self.cluster.nodes if name in n.devices]

    def capacity(self, name: str, tp: int) -> int:
        return sum(count // tp for count in self.nodes(name))

    def measured(self, name: str, tp: int, b: int) -> bool:
        return all((kind.name, name, tp, b) in self.cells for kind in self.kinds)

    def cell(self, k: int, b: int, l: int) -> Cell:
        name, tp = self.units[k]
        return self.cells[self.kinds[l].name, name, tp, b]

    # Memory.

    def input_bytes(self, b: int, l: int) -> int:
        return self.kinds[l - 1].output_bytes * b if l else 0

    def state_bytes(self, k: int, i: int, j: int) -> int:
        tp, total = self.units[k][1], 0
        for kind in self.kinds[i:j]:
            held = dict(kind.shard_parameters).get(tp, math.ceil(kind.parameters / tp))
            total += held * (self.trained_bytes if kind.trainable else self.job.state.weights)
        if self.tied is not None and i <= self.tied[0] and self.tied[1] < j:
            total -= math.ceil(self.tied[2] / tp) * self.trained_bytes
        return total

    def sync_buffer_bytes(self) -> float:
        job = self.job
        if job.sync_buffer_bytes is not None:
            return job.sync_buffer_bytes
        if job.sync_granularity == "block":
            return min(job.sync_chunk_bytes, sum(self.gradients))
        return sum(self.gradients) if job.sync_granularity == "model" else max(self.gradients)

    def short_bytes(self, k: int, b: int, i: int, j: int, window: int, synced: bool) -> float:
        """Bytes by which the stage is over its memory with nothing recomputed; negative or zero if it fits."""
        name, tp = self.units[k]
        memory = next(d.memory_bytes for d in self.cluster.device_types if d.name == name)
        usable = (1 - self.job.memory_margin) * memory - self.job.context_bytes
        usable -= self.job.tp_context_bytes if tp > 1 else 0
        usable -= self.sync_buffer_bytes() if synced else 0
        layers = range(i, j)
        kept = sum(self.cell(k, b, l).activation_bytes + self.kinds[l].logits_bytes * b / tp for l in layers)
        workspace = max(self.cell(k, b, l).workspace_bytes for l in layers)
        return self.state_bytes(k, i, j) + workspace + window * (kept + self.input_bytes(b, i)) - usable

    def saved_bytes(self, k: int, b: int, l: int) -> float:
        """What recomputing the layer frees per micro-batch in flight: all that is kept but its input."""
        if not (self.job.recompute and self.kinds[l].recomputable):
            return 0.0
        return max(0.0, self.cell(k, b, l).activation_bytes - self.input_bytes(b, l))

    def rework_bytes(self, k: int, b: int) -> float:
        """Working set while a layer is recomputed: the largest recomputable layer of the model."""
        kept = [self.cell(k, b, l).activation_bytes for l in range(self.num_layers) if self.kinds[l].recomputable]
        return max(kept, default=0.0)

    def _savings(self, k: int, b: int, i: int, j: int) -> list[tuple[float, float]]:
        """(saved bytes, forward seconds) of the sets of recomputed layers that no other set beats in both."""
        if i == j:
            return [(0.0, 0.0)]
        rest, saved = self.savings(k, b, i, j - 1), self.saved_bytes(k, b, j - 1)
        if saved == 0.0:
            return rest
        forward, kept = self.cell(k, b, j - 1).forward_s, []
        for bytes_, seconds in sorted(rest + [(s + saved, f + forward) for s, f in rest], key=lambda p: (-p[0], p[1])):
            if not kept or seconds < kept[-1][1]:
                kept.append((bytes_, seconds))
        return kept

    def recompute_s(self, k: int, b: int, i: int, j: int, window: int, synced: bool) -> float:
        """Forward seconds of the cheapest set of layers to recompute; infinite if none makes the stage fit."""
        short = self.short_bytes(k, b, i, j, window, synced)
        if short <= 0:
            return 0.0
        need = short + self.rework_bytes(k, b)
        return min((f for s, f in self.savings(k, b, i, j) if window * s >= need), default=math.inf)

    # Time.

    def link(self, name: str, other: str) -> Link:
        for network in self.cluster.links:
            if sorted(network.between) == sorted((name, other)):
                return network.link
        inside = [n.link for n in self.cluster.nodes if name in n.devices and other in n.devices]
        assert len(inside) == 1, f"no link {name} to {other}"
        return inside[0]

    def hand_over_s(self, k: int, next_k: int, b: int, l: int) -> float:
        """One micro-batch over the cut before layer l, one way."""
        return seconds(self.link(self.units[k][0], self.units[next_k][0]), self.input_bytes(b, l))

    def compute_s(self, k: int, b: int, i: int, j: int) -> float:
        return sum(c.forward_s + c.backward_s for c in (self.cell(k, b, l) for l in range(i, j)))

    def _ring_links(self, name: str, types: tuple[str, ...]) -> list[Link]:
        """The type's own network link, and the paths to types in the plan that are slower than both ends' own links."""
        own, size = self._own_link(name), float(2**26)
        paths = [own]
        for other in types:
            if other != name:
                path = self.link(name, other)
                ends = max(seconds(own, size), seconds(self._own_link(other), size))
                if seconds(path, size) > 1.001 * ends:
                    paths.append(path)
        return paths

    def _own_link(self, name: str) -> Link:
        others = [self.link(name, other) for other in self.cluster.types if other != name]
        if len(self.nodes(name)) > 1 or not others:
            return self.link(name, name)  # raises for a lone device, which has nobody to sync with
        return min(others, key=lambda link: seconds(link, float(2**26)))

    def ring_s(self, volume: float, num_ranks: int, links: Sequence[Link]) -> tuple[float, float]:
        """Ring all-reduce of `volume` bytes per rank in messages of the job's size; and the last message alone."""

        def one(nbytes: float) -> float:
            return 2 * (num_ranks - 1) * max(seconds(link, nbytes / num_ranks) for link in links) if nbytes > 0 else 0.0

        if num_ranks == 1:
            return 0.0, 0.0
        if self.job.sync_granularity == "model":
            return one(volume), one(volume)
        assert self.job.sync_granularity == "block"
        chunk = self.job.sync_chunk_bytes
        whole = math.floor(volume / chunk)
        rest = one(volume - whole * chunk)
        return whole * one(chunk) + rest, one(chunk) if whole else rest

    def tail_s(self, k: int, b: int, i: int, j: int, num_pipelines: int, tau: int, types: tuple[str, ...]) -> float:
        """What follows the stage's last backward: the ring it does not hide, and the update."""
        cells = [self.cell(k, b, l) for l in range(i, j)]
        per_stage = self.profile.conditions.update_per == "stage"
        update = max(c.update_s for c in cells) if per_stage else sum(c.update_s for c in cells)
        links = self.ring_links(self.units[k][0], types)
        volume, shared = float(sum(self.gradients[i:j])), 0.0
        if self.tied is not None:
            ends = (i <= self.tied[0] < j) + (i <= self.tied[1] < j)
            tied = float(self.tied[2] * self.job.state.gradients)
            volume -= tied if ends else 0.0  # two ends in one stage: one copy too many; one end: its own ring
            shared = tied if ends == 1 else 0.0
        ring, last = self.ring_s(volume / tau, num_pipelines, links)
        if shared:
            more, more_last = self.ring_s(shared / tau, 2 * num_pipelines, links)
            ring, last = ring + more, max(last, more_last)
        if self.job.sync == "overlapped" and self.job.sync_granularity != "model":
            ring = max(ring - sum(c.backward_s for c in cells), min(last, ring))
        return update + ring


def seconds(link: Link, nbytes: float) -> float:
    """Seconds of one message over a link with a constant bandwidth."""
    assert link.bytes_per_s is not None
    return link.alpha_s + nbytes / link.bytes_per_s if nbytes > 0 else 0.0


# A given plan, from scratch.


def value_of(numbers: Numbers, pipelines: Sequence[Pipeline]) -> float:
    """Iteration seconds of a plan; infinite if a stage does not fit in memory. Asserts that it is a plan at all."""
    assert sum(p.micro_batch * p.num_micro_batches for p in pipelines) == numbers.job.global_batch
    stages = [s for p in pipelines for s in p.stages]
    tau, types = min(s.tp for s in stages), tuple(sorted({s.device_type for s in stages}))
    for name in types:
        for degree in {s.tp for s in stages}:
            used = sum(s.tp // degree for s in stages if s.device_type == name and s.tp >= degree)
            assert used <= numbers.capacity(name, degree), f"{used} units of {name} x {degree}"
    longest, tail = 0.0, 0.0
    for p in pipelines:
        depth, b, m, loads = len(p.stages), p.micro_batch, p.num_micro_batches, []
        assert [s.first for s in p.stages] == [0, *(s.last for s in p.stages[:-1])] and m > 0
        assert p.stages[-1].last == numbers.num_layers and all(s.first < s.last for s in p.stages)
        units = [numbers.units.index((s.device_type, s.tp)) for s in p.stages]
        for s, (k, stage) in enumerate(zip(units, p.stages, strict=True)):
            i, j = stage.first, stage.last
            load = numbers.compute_s(k, b, i, j)
            load += numbers.recompute_s(k, b, i, j, min(m, depth - s), len(pipelines) > 1)
            load += numbers.hand_over_s(units[s - 1], k, b, i) if s else 0.0
            load += numbers.hand_over_s(k, units[s + 1], b, j) if s + 1 < depth else 0.0
            loads.append(load)
            tail = max(tail, numbers.tail_s(k, b, i, j, len(pipelines), tau, types))
        longest = max(longest, sum(loads) + (m - 1) * max(loads) if max(loads) < math.inf else math.inf)
    return longest + tail


# Exhaustive search.


@dataclass(frozen=True, slots=True)
class Label:
    """One way to run the layers from some layer on: (unit, first, last) of each stage."""

    sum_s: float
    max_s: float
    tail_s: float
    stages: tuple[tuple[int, int, int], ...]


def undominated(labels: list[Label]) -> list[Label]:
    """The labels that no other one equals or beats in sum, max and tail."""
    kept: list[Label] = []
    for label in sorted(labels, key=lambda x: (x.sum_s, x.max_s, x.tail_s)):
        if not any(x.max_s <= label.max_s and x.tail_s <= label.tail_s for x in kept):
            kept.append(label)
    return kept


class Tables:
    """Seconds of every stage at every number of micro-batches in flight, computed once."""

    def __init__(self, numbers: Numbers, depth: int) -> None:
        self.numbers, self.depth = numbers, depth
        self.loads, self.levels, self.cuts = cache(self._loads), cache(self._levels), cache(self._cuts)

    def _loads(self, b: int, synced: bool) -> list[list[list[list[float]]]]:
        """[in flight][unit][first][last] seconds without hand-overs; infinite if it does not fit."""
        numbers, num_layers = self.numbers, self.numbers.num_layers
        empty = [[math.inf] * (num_layers + 1) for _ in range(num_layers)]
        tables = [[[row[:] for row in empty] for _ in numbers.units] for _ in range(self.depth + 1)]
        for k, (name, tp) in enumerate(numbers.units):
            if numbers.measured(name, tp, b):
                for i, j in itertools.combinations(range(num_layers + 1), 2):
                    compute = numbers.compute_s(k, b, i, j)
                    for window in range(1, self.depth + 1):
                        extra = numbers.recompute_s(k, b, i, j, window, synced)
                        tables[window][k][i][j] = compute + extra
                        if extra == math.inf:
                            break
        return tables

    def _levels(self, b: int, synced: bool) -> list[int]:
        """The least number in flight that costs every stage the same as this one: memory often does not bind."""
        loads, levels = self.loads(b, synced), [0, 1]
        for window in range(2, self.depth + 1):
            levels.append(levels[-1] if loads[window] == loads[window - 1] else window)
        return levels

    def _cuts(self, b: int) -> list[list[list[float]]]:
        """[unit][next unit][layer] seconds of the hand-over before the layer."""
        units, layers = range(len(self.numbers.units)), range(1, self.numbers.num_layers)
        pair = cache(lambda x, y, l: self.numbers.hand_over_s(x, y, b, l) if self._may_meet(x, y) else math.inf)
        return [[[0.0, *(pair(x, y, l) for l in layers), 0.0] for y in units] for x in units]

    def _may_meet(self, x: int, y: int) -> bool:
        """A single device is never its own neighbour."""
        (name, tp), (other, other_tp) = self.numbers.units[x], self.numbers.units[y]
        return name != other or self.numbers.capacity(name, 1) >= tp + other_tp


class Fronts:
    """Undominated ways to run a pipeline, for every multiset of the allowed units, one micro-batch size."""

    def __init__(self, tables: Tables, b: int, synced: bool, units: Sequence[int], tail: Tail, limit: float) -> None:
        self.num_layers, self.units, self.limit = tables.numbers.num_layers, units, limit
        self.loads, self.levels, self.cuts = tables.loads(b, synced), tables.levels(b, synced), tables.cuts(b)
        self.tail = cache(lambda k, i, j: tail(k, b, i, j))
        self.suffix, self.whole = cache(self._suffix), cache(self._whole)

    def pipelines(self, counts: Counts, num_micro_batches: int) -> list[Label]:
        """The undominated ways to run a pipeline of exactly these units with that many micro-batches."""
        return self.whole(counts, self.levels[min(num_micro_batches, sum(counts))])

    def _whole(self, counts: Counts, level: int) -> list[Label]:
        return undominated([x for k in self.units if counts[k] for x in self.suffix(counts, level, k, 0, 0.0)])

    def _suffix(self, counts: Counts, level: int, k: int, i: int, left: float) -> list[Label]:
        """Layers from i on over exactly these units, k first, its left hand-over `left`, at most `level` in flight."""
        num_left, end = sum(counts), self.num_layers
        loads = self.loads[min(level, num_left)][k][i]
        if num_left == 1:
            v = left + loads[end]
            return [Label(v, v, self.tail(k, i, end), ((k, i, end),))] if v < self.limit else []
        rest = tuple(count - (k == x) for x, count in enumerate(counts))
        below, out = self.levels[min(level, num_left - 1)], []
        for j in range(i + 1, end - num_left + 2):
            if left + loads[j] < self.limit:
                tail, stage = self.tail(k, i, j), ((k, i, j),)
                for y in self.units:
                    if rest[y]:
                        cut = self.cuts[k][y][j]
                        v = left + loads[j] + cut
                        for x in self.suffix(rest, below, y, j, cut):
                            if v + x.sum_s < self.limit:
                                out.append(Label(v + x.sum_s, max(v, x.max_s), max(tail, x.tail_s), stage + x.stages))
        return undominated(out)


class Fleet:
    """Fills the cluster with P pipelines: a knapsack over the devices left, every template, every split of the batch.

    `use` of a pipeline counts, per type and tp degree d, the groups of d devices that it takes up.
    """

    def __init__(self, numbers: Numbers, units: Sequence[int], fronts: dict[int, Fronts]) -> None:
        self.numbers, self.batch = numbers, numbers.job.global_batch
        chosen = [numbers.units[k] for k in units]
        rows = sorted(set(chosen) | {(name, 1) for name, _ in chosen})
        self.available = tuple(numbers.capacity(name, d) for name, d in rows)
        weight = {
            k: tuple(tp // d if name == t and tp >= d else 0 for t, d in rows)
            for k, (name, tp) in zip(units, chosen, strict=True)
        }
        most = [numbers.capacity(*unit) if k in weight else 0 for k, unit in enumerate(numbers.units)]
        # (use, micro-batch size, least and most m, labels): pipelines that share their labels.
        self.runs: list[tuple[Counts, int, int, int, list[Label], Counts]] = []
        for counts in itertools.product(*(range(n + 1) for n in most)):
            use = tuple(sum(counts[k] * w[r] for k, w in weight.items()) for r in range(len(rows)))
            if 0 < sum(counts) <= numbers.num_layers and all(u <= a for u, a in zip(use, self.available, strict=True)):
                for b, front in fronts.items():
                    limits = range(1, min(sum(counts), self.batch // b) + 1)
                    for level, group in itertools.groupby(limits, key=lambda m: front.levels[m]):
                        least, last = min(ms := list(group)), max(ms)
                        labels = front.whole(counts, level)
                        top = self.batch // b if last == limits[-1] else last
                        if labels:
                            self.runs.append((use, b, least, top, labels, counts))
        self.tails = sorted({x.tail_s for run in self.runs for x in run[4]})
        states = list(itertools.product(*(range(a + 1) for a in self.available)))
        uses = dict.fromkeys(run[0] for run in self.runs)
        index = {state: n for n, state in enumerate(states)}
        #: For every number of devices left, the pipelines that fit: (what is left after it, its use).
        self.moves = [
            [(index[rest], use) for use in uses if min(rest := tuple(map(int.__sub__, state, use))) >= 0]
            for state in states
        ]

    def most(self, run: tuple[Counts, int, int, int, list[Label], Counts], longest: float, tail: float) -> int:
        """Most micro-batches of a run within the time and the tail; 0 if it cannot do its least."""
        _, _, least, top, labels, _ = run
        m = max((_num_within(x, longest, top) for x in labels if x.tail_s <= tail), default=0)
        return m if m >= least else 0

    def fill(self, num_pipelines: int, longest: float, tail: float) -> list[tuple[Counts, int, int]] | None:
        """Pipelines as (use, micro-batch size, m) that run exactly the batch within both limits, or None.

        Within a time a pipeline that can do m micro-batches can do fewer (less memory, less work), so what P pipelines
        of given devices can do is a set of sample counts: a bit each.
        """
        ability: dict[Counts, dict[int, int]] = {}
        for run in self.runs:
            m = self.most(run, longest, tail)
            if m:
                sizes = ability.setdefault(run[0], {})
                sizes[run[1]] = max(sizes.get(run[1], 0), m)
        moves = [[(r, use) for r, use in fit if use in ability] for fit in self.moves]
        most = {use: max(b * m for b, m in sizes.items()) for use, sizes in ability.items()}
        samples = [0] * len(moves)  # the most that can be done, splits ignored: cheap, and mostly enough to say no
        for _ in range(num_pipelines):
            samples = [max((samples[r] + most[u] for r, u in fit if samples[r] >= 0), default=-1) for fit in moves]
        if samples[-1] < self.batch:
            return None
        mask, reach = (2 << self.batch) - 1, [[1] * len(moves)]
        for _ in range(num_pipelines):
            row = []
            for fit in moves:
                bits = 0
                for r, use in fit:
                    if reach[-1][r]:
                        for b, m in ability[use].items():
                            bits |= _spread(reach[-1][r], b, m)
                row.append(bits & mask)
            reach.append(row)
        return self._trace(reach, moves, ability) if reach[-1][-1] >> self.batch & 1 else None

    def _trace(
        self, reach: list[list[int]], moves: list[list[tuple[int, Counts]]], ability: dict[Counts, dict[int, int]]
    ) -> list[tuple[Counts, int, int]]:
        """One way to the full batch, read back from the bits."""
        out, state, left = [], len(moves) - 1, self.batch
        for row in reversed(reach[:-1]):
            state, use, b, m = next(
                (r, use, b, m)
                for r, use in moves[state]
                for b, most in ability[use].items()
                for m in range(1, most + 1)
                if left >= b * m and row[r] >> (left - b * m) & 1
            )
            out.append((use, b, m))
            left -= b * m
        assert left == 0
        return out

    def least_time(self, num_pipelines: int, tail: float, below: float) -> float:
        """Least time of the slowest pipeline, tails within `tail`; infinite if it is not below `below`."""
        if self.fill(num_pipelines, below, tail) is None:
            return math.inf
        times = sorted(
            {
                x.sum_s + (m - 1) * x.max_s
                for _, _, least, top, labels, _ in self.runs
                for x in labels
                if x.tail_s <= tail
                for m in range(least, _num_within(x, below, top) + 1)
            }
        )
        low, high = 0, len(times) - 1
        while low < high:
            middle = (low + high) // 2
            if self.fill(num_pipelines, times[middle], tail) is None:
                low = middle + 1
            else:
                high = middle
        return times[low]

    def plan(self, num_pipelines: int, longest: float, tail: float) -> tuple[Pipeline, ...]:
        """A plan within both limits."""
        chosen = self.fill(num_pipelines, longest, tail)
        assert chosen is not None
        return tuple(self._pipeline(use, b, m, longest, tail) for use, b, m in chosen)

    def _pipeline(self, use: Counts, b: int, m: int, longest: float, tail: float) -> Pipeline:
        for run in self.runs:
            if run[:2] == (use, b) and self.most(run, longest, tail) >= m:
                # With fewer micro-batches than the run was meant for it takes no more time or memory.
                for x in run[4]:
                    if x.tail_s <= tail and _num_within(x, longest, run[3]) >= m:
                        stages = tuple(Stage(*self.numbers.units[k], i, j) for k, i, j in x.stages)
                        return Pipeline(b, m, stages)
        raise AssertionError("the knapsack used a pipeline that does not exist")


def _num_within(x: Label, longest: float, top: int) -> int:
    """Micro-batches within a time: the largest m with sum + (m - 1) max <= longest, up to rounding."""
    if longest == math.inf:
        return top
    slack = (longest - x.sum_s) / x.max_s
    return min(top, math.floor(slack + 1e-9) + 1) if slack > -1e-9 else 0


def _spread(bits: int, step: int, most: int) -> int:
    """Every set bit moved up by step, 2 step, ... most * step."""
    out, done = bits << step, 1
    while done < most:
        more = min(done, most - done)
        out |= out << (step * more)
        done += more
    return out


@dataclass(frozen=True, slots=True)
class Box:
    """What gradient sync depends on beside the stage: smallest tp, types in the plan, P.

    Rings cost what they cost with all types and the smallest tp of the box, so a plan with fewer types or larger tp is
    overcharged here, and charged rightly in its own box.
    """

    tau: int
    types: tuple[str, ...]
    units: tuple[int, ...]
    num_pipelines: int


class Search:
    """Box by box, the most promising first."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.num_devices = sum(self.numbers.capacity(name, 1) for name in numbers.cluster.types)
        self.tables = Tables(self.numbers, min(self.num_devices, self.numbers.num_layers))
        self.best: Optimum | None = None
        self.relaxed, self.least_tail = cache(self._without_tails), cache(self._least_tail)

    @property
    def value(self) -> float:
        return math.inf if self.best is None else self.best.value

    def run(self) -> Optimum | None:
        for bound, box in sorted(((self._bound(box), box) for box in self._boxes()), key=lambda x: x[0]):
            if bound < self.value * (1 - BETTER):
                self._search(box)
        return self.best

    def _boxes(self) -> Iterator[Box]:
        for tau in sorted({tp for _, tp in self.numbers.units}):
            for types in self._type_sets():
                units = tuple(k for k, (name, tp) in enumerate(self.numbers.units) if tp >= tau and name in types)
                if any(self.numbers.units[k][1] == tau for k in units):
                    for num_pipelines in range(1, min(self.num_devices, self.numbers.job.global_batch) + 1):
                        yield Box(tau, types, units, num_pipelines)

    def _type_sets(self) -> Iterator[tuple[str, ...]]:
        """Sets of types a plan may use; a set whose rings cost the same inside a larger one is left to that one."""
        names = sorted({name for name, _ in self.numbers.units})
        done: list[tuple[str, ...]] = []
        for size in range(len(names), 0, -1):
            for types in itertools.combinations(names, size):
                links = {t: self.numbers.ring_links(t, types) for t in types}
                if not any(
                    set(types) <= set(d) and all(self.numbers.ring_links(t, d) == links[t] for t in types) for d in done
                ):
                    done.append(types)
                    yield types

    def _fleet(self, units: tuple[int, ...], synced: bool, tail: Tail, limit: float) -> Fleet:
        fronts = {b: Fronts(self.tables, b, synced, units, tail, limit) for b in self.numbers.micro_batches}
        return Fleet(self.numbers, units, fronts)

    def _without_tails(self, units: tuple[int, ...], synced: bool) -> Fleet:
        return self._fleet(units, synced, lambda k, b, i, j: 0.0, math.inf)

    def _bound(self, box: Box) -> float:
        """No plan in the box is faster: best without tails, plus a tail that no plan avoids."""
        fleet = self.relaxed(box.units, box.num_pipelines > 1)
        least = fleet.least_time(box.num_pipelines, math.inf, math.inf)
        return least + self.least_tail(box) if least < math.inf else math.inf

    def _least_tail(self, box: Box) -> float:
        """Some stage holds the layer that is worst in this respect."""
        numbers, num_layers = self.numbers, self.numbers.num_layers
        least = [math.inf] * num_layers
        for b in numbers.micro_batches:
            for k in box.units:
                if numbers.measured(*numbers.units[k], b):
                    for i, j in itertools.combinations(range(num_layers + 1), 2):
                        tail = self._tail(box, k, b, i, j)
                        least[i:j] = [min(x, tail) for x in least[i:j]]
        return max(least)

    def _tail(self, box: Box, k: int, b: int, i: int, j: int) -> float:
        return self.numbers.tail_s(k, b, i, j, box.num_pipelines, box.tau, box.types)

    def _search(self, box: Box) -> None:
        floor = self.least_tail(box)

        def tail(k: int, b: int, i: int, j: int) -> float:
            return max(floor, self._tail(box, k, b, i, j))

        fleet = self._fleet(box.units, box.num_pipelines > 1, tail, self.value - floor)
        if fleet.tails:
            self._improve(fleet, box.num_pipelines, fleet.tails[-1])
            self._split(fleet, box.num_pipelines, 0, len(fleet.tails) - 1)

    def _split(self, fleet: Fleet, num_pipelines: int, low: int, high: int) -> None:
        """Plans whose largest tail is one of tails[low..high]: dropped together if they cannot be better."""
        below = self.value * (1 - BETTER) - fleet.tails[low]
        if fleet.fill(num_pipelines, below, fleet.tails[high]) is not None:
            if low == high:
                self._improve(fleet, num_pipelines, fleet.tails[low])
            else:
                middle = (low + high) // 2
                self._split(fleet, num_pipelines, low, middle)
                self._split(fleet, num_pipelines, middle + 1, high)

    def _improve(self, fleet: Fleet, num_pipelines: int, tail: float) -> None:
        """The best plan with tails within `tail`, if it is better than the best so far."""
        longest = fleet.least_time(num_pipelines, tail, self.value * (1 - BETTER) - tail)
        if longest < math.inf:
            pipelines = fleet.plan(num_pipelines, longest, tail)
            value = value_of(self.numbers, pipelines)
            assert value <= (longest + tail) * (1 + 1e-9), "a plan takes longer than its labels say"
            if value < self.value:
                self.best = Optimum(value, pipelines)


def optimum(profile: ModelProfile, cluster: Cluster, job: Job) -> Optimum | None:
    """The best plan of all, or None if nothing fits."""
    return Search(Numbers(profile, cluster, job)).run()


# The same by listing every plan.


def by_brute_force(profile: ModelProfile, cluster: Cluster, job: Job) -> float:
    """The least `value_of` over a literal list of all plans; infinite if none fits. For 4 devices and 4 layers."""
    numbers = Numbers(profile, cluster, job)
    num_units = sum(numbers.capacity(name, 1) for name in cluster.types)
    shapes: list[tuple[Stage, ...]] = []
    for depth in range(1, min(num_units, numbers.num_layers) + 1):
        for inner in itertools.combinations(range(1, numbers.num_layers), depth - 1):
            cuts = (0, *inner, numbers.num_layers)
            for units in itertools.product(numbers.units, repeat=depth):
                shapes.append(tuple(Stage(*u, i, j) for u, i, j in zip(units, cuts, cuts[1:], strict=False)))
    best = math.inf
    for num_pipelines in range(1, min(num_units, job.global_batch) + 1):
        for chosen in _choices(numbers, shapes, num_pipelines):
            sizes = [
                [b for b in numbers.micro_batches if all(numbers.measured(s.device_type, s.tp, b) for s in shape)]
                for shape in chosen
            ]
            for micro_batches in itertools.product(*sizes):
                for ms in _splits(job.global_batch, micro_batches):
                    plan = [Pipeline(b, m, s) for b, m, s in zip(micro_batches, ms, chosen, strict=True)]
                    best = min(best, value_of(numbers, plan))
    return best


def _choices(
    numbers: Numbers, shapes: Sequence[tuple[Stage, ...]], count: int, start: int = 0, taken: tuple[Stage, ...] = ()
) -> Iterator[tuple[tuple[Stage, ...], ...]]:
    """Multisets of `count` pipelines that the devices suffice for."""
    if count == 0:
        yield ()
        return
    for x in range(start, len(shapes)):
        if _available(numbers, taken + shapes[x]):
            for rest in _choices(numbers, shapes, count - 1, x, taken + shapes[x]):
                yield (shapes[x], *rest)


def _available(numbers: Numbers, stages: Sequence[Stage]) -> bool:
    degrees = {s.tp for s in stages}
    return all(
        sum(s.tp // d for s in stages if s.device_type == name and s.tp >= d) <= numbers.capacity(name, d)
        for name in {s.device_type for s in stages}
        for d in degrees
    )


def _splits(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every m >= 1 with sum of size * m equal to the total."""
    if not sizes:
        if total == 0:
            yield ()
        return
    for m in range(1, total // sizes[0] + 1):
        for rest in _splits(total - m * sizes[0], sizes[1:]):
            yield (m, *rest)


# One chain of devices in a fixed order.


def best_cut(times: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], float]:
    """Layer counts with the least bottleneck of all contiguous cuts; times[s][l]: seconds of layer l on stage s."""
    num_stages, num_layers = len(times), len(times[0])

    def bottleneck(cuts: tuple[int, ...]) -> float:
        return max(sum(t[i:j]) for t, i, j in zip(times, cuts, cuts[1:], strict=False))

    inner = itertools.combinations(range(1, num_layers), num_stages - 1)
    best = min(((0, *c, num_layers) for c in inner), key=bottleneck)
    return tuple(j - i for i, j in itertools.pairwise(best)), bottleneck(best)


# Tiny cases.


def draw(seed: int, num_devices: int | None = None, num_layers: int | None = None) -> tuple[ModelProfile, Cluster, Job]:
    """A random case: unequal devices and layers, and of the things that matter each in a good share of the seeds.

    Memory binds in about half of them and is too small in some; small batches give m < S; links are slow or fast by
    pair of types; ends are tied, sync is exposed, layers may be recomputed, tp 2 is there, nodes hold several devices.
    """
    rng = random.Random(seed)
    num_types = rng.choice((2, 2, 3)) if (num_devices or 4) > 2 else 2
    num_devices = num_devices or rng.choice((4, 4, 4, 5, 5, 5, 6, 6, 7, 8, 10))
    num_layers = num_layers or rng.choice((3, 4, 5, 5, 6, 6, 7, 8, 10))
    degrees = (1, 2) if rng.random() < 0.3 and num_devices <= 6 else (1,)
    sizes = (1, 2) if rng.random() < 0.45 else (1,)
    tied, recompute, memory_binds = rng.random() < 0.3, rng.random() < 0.65, rng.random() < 0.75
    names = [f"T{t}" for t in range(num_types)]

    # Layers: all different, or a few kinds that repeat.
    num_kinds = num_layers if rng.random() < 0.5 else rng.randint(2, 3)
    layers = [f"k{l if num_kinds == num_layers else rng.randrange(num_kinds)}" for l in range(num_layers)]
    if tied:
        layers[0], layers[-1] = "ends", "other end"
    elif rng.random() < 0.4:
        layers[0] = "ends"  # an embedding: many parameters, little time
    kinds, scale = [], rng.choice((1e5, 1e6, 1e7, 5e7))
    for name in sorted(set(layers)):
        parameters = round(scale * rng.uniform(0.1, 2.0))
        if name in ("ends", "other end"):
            parameters = round(scale * 3) + (name == "other end") * round(scale * rng.uniform(0, 0.2))
        kinds.append(
            LayerKind(
                name=name,
                parameters=parameters,
                output_bytes=round(1e6 * 10 ** rng.uniform(0, 1.5)),
                logits_bytes=round(1e7 * rng.random()) if name == layers[-1] and rng.random() < 0.5 else 0,
                recomputable=rng.random() < 0.8,
                trainable=name in ("ends", "other end") or rng.random() < 0.9,
                tied_to="ends" if name == "other end" else None,
                tied_parameters=round(scale * 3) if name == "other end" else 0,
            )
        )
    cells = []
    kept = {kind.name: 10 ** rng.uniform(7.5, 8.8) for kind in kinds}
    for t, name in enumerate(names):
        speed = 3.0 ** (t * rng.uniform(0.2, 1.0))
        for kind in kinds:
            base, share = speed * rng.uniform(0.02, 0.1), rng.uniform(0.25, 0.45)
            base *= 0.1 if kind.name == "ends" else 1.0
            for tp in degrees:
                for b in sizes:
                    if b == 1 or rng.random() < 0.95:  # holes are legal
                        total = base * b ** rng.uniform(0.5, 1.0) / tp ** rng.uniform(0.5, 1.0)
                        cells.append(
                            Cell(
                                kind=kind.name,
                                device_type=name,
                                tp=tp,
                                micro_batch=b,
                                forward_s=total * share,
                                backward_s=total * (1 - share),
                                update_s=total * rng.uniform(0, 0.1),
                                activation_bytes=round(kept[kind.name] * b / tp * rng.uniform(0.9, 1.1)),
                                workspace_bytes=round(1e6 * rng.random()),
                            )
                        )
    profile = ModelProfile(
        name=f"seed {seed}",
        layers=tuple(layers),
        kinds=tuple(kinds),
        cells=tuple(cells),
        conditions=Conditions(update_per=rng.choice(("layer", "stage"))),
    )

    # Devices: at least one of each type; nodes of one device, or of up to three where tp is a choice.
    counts = [1] * num_types
    for _ in range(num_devices - num_types):
        counts[rng.randrange(num_types)] += 1
    own = {name: _draw_link(rng) for name in names}
    nodes = []
    for name, count in zip(names, counts, strict=True):
        while count:
            size = min(count, rng.choice((1, 2, 2, 3)) if len(degrees) > 1 else 1)
            nodes.append(Node(name=f"n{len(nodes)}", devices=(name,) * size, link=own[name]))
            count -= size
    pairs = [NetworkLink(between=(name, name), link=own[name]) for name in names]
    for a, b in itertools.combinations(names, 2):
        # As in a network: the slower end decides, or a path that is slower than both.
        path = max(own[a], own[b], key=lambda link: seconds(link, float(2**26)))
        if rng.random() < 0.25:
            path = Link(alpha_s=path.alpha_s, bytes_per_s=max(2e6, path.bytes_per_s * 10 ** rng.uniform(-1.5, -0.1)))
        pairs.append(NetworkLink(between=(a, b), link=path))

    job = Job(
        global_batch=rng.choice((1, 2, 3, 4, 6, 8, 11, 16, 24, 40)),
        recompute=recompute,
        memory_margin=rng.choice((0.0, 0.05)),
        context_bytes=round(1e6),
        tp_context_bytes=round(1e6),
        sync=rng.choice(("overlapped", "overlapped", "exposed")),
        sync_granularity=rng.choice(("block", "block", "block", "model")),
        sync_chunk_bytes=2 ** rng.choice((22, 24, 26)),
        sync_buffer_bytes=rng.choice((None, None, 0, 10**7)),
    )
    model_bytes = sum(k.parameters for k in map(profile.kind_of, range(num_layers))) * job.state.total
    batch_bytes = sum(kept[name] for name in layers)
    types = []
    for name in names:
        room = rng.uniform(0.1, 0.8) if memory_binds else rng.uniform(8, 12)
        types.append(DeviceType(name=name, memory_bytes=round(room * (model_bytes + 2 * batch_bytes)) + 10**7))
    cluster = Cluster(name=f"seed {seed}", device_types=tuple(types), nodes=tuple(nodes), links=tuple(pairs))
    return profile, cluster, job


def _draw_link(rng: random.Random) -> Link:
    return Link(alpha_s=rng.choice((0.0, 1e-5, 1e-3)), bytes_per_s=10 ** rng.uniform(7.7, 10.3))
