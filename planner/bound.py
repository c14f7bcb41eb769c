"""A lower bound on the iteration time of every plan: any depth, any mix of classes, any placement, any micro-batch
sizes.

Split the plans into boxes: smallest tp degree tau, number of pipelines P in [P1, P2], tail in (D1, D2]. In a box the
iteration takes at least T + D1, where T bounds the slowest pipeline by linear-programming duality. With prices pi of
the resources and mu of a pipeline, ``N.pi + P2 mu = global batch``, no fractional set of pipelines runs the batch
faster than

    T(pi, mu) = min over micro-batch sizes b and pipelines of   sum + (max / b) (pi.use + mu) - max.

For max within a bucket (c1, c2] this is a shortest path over (class, first layer): stages up to c2 are allowed, c1
stands in the formula, and every link is the fastest there is. Prices come from cutting planes, buckets are halved where
the minimum lies, and boxes where the bound is least. Everything is valid at any point; more work only tightens it.

A pipeline with fewer micro-batches than stages keeps fewer in flight; such pipelines are bounded by tables with one in
flight, over the depths at which they could be worth their price at all.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner import cost, data_split, solver
from planner.cost import Array, Costs
from planner.data_split import Columns
from planner.question import Clock, Question
from planner.stage_split import Ints

Single = NDArray[np.float32]

# Stages closer to the end than this have their own in-flight count, the others that of this position (fewer than true).
POSITIONS = 8
BUCKETS = 10  # per micro-batch size, to start with
SINGLE = 1e-5  # relative safety of shortest paths, which are solved in single precision
FINEST = 1.004  # ratio of a bucket's ends below which it is not halved
NEAR, NARROW = 1.1, 1.12  # columns so near to worth their price set where buckets of so small a ratio are
ROUNDS = 4  # of bounding and halving buckets in a box
CUTTING_PLANES = 5
WIDEST = 12  # buckets bounded or halved per round
RACING = 24  # buckets, the lowest, that prices are tried on
USUAL_LAYERS = 40
PATHS = 3000  # shortest paths solved at most by default; deterministic, unlike a time limit
PRECISION = 1e-3  # of the value: a box this near to it is done


def work_bound(question: Question) -> float:
    """No plan is faster than all devices busy all the time, each with the layers it is best at.

    Potentials u_l (least device-seconds per sample of layer l) and rates rho (largest potential per second of a device
    type): time >= batch x sum u / sum devices x rho.
    """
    per_sample = np.full((len(question.classes), question.num_layers), math.inf)
    for costs in question.costs:
        seconds = (costs.forward + costs.backward) * question.tp[:, None] / costs.micro_batch
        per_sample = np.minimum(per_sample, seconds)
    potential = per_sample.min(axis=0)
    rate: dict[str, float] = {}
    for unit, row in zip(question.classes, per_sample, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            best = np.where(row > 0, potential / row, 0.0).max()
        rate[unit.device_type] = max(rate.get(unit.device_type, 0.0), float(best))
    total = sum(question.cluster.num_devices(name) * value for name, value in rate.items())
    return question.need * float(potential.sum()) / total if total > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """What a shortest path reads, for one micro-batch size: (K, Q, L+1, L+1) loads; cuts; least cut at either end."""

    costs: Costs
    load: Array
    twice: Array
    ends: Array
    position: Ints
    compute: Array
    shallow: bool = False


class _Bucket(NamedTuple):
    """Pipelines of one table whose largest load is in (low, high], and the least T of them under the box's prices.

    Not `fresh`: the figure was found in a larger box, so it may be too low.
    """

    table: int
    low: float
    high: float
    time_s: float
    fresh: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Box:
    """Plans of smallest degree `min_tp` with so many pipelines and such a tail.

    `solved`: its buckets were bounded under its own mask. `priced`: its prices were made for its number of pipelines.
    """

    min_tp: int
    pipelines: tuple[int, int]
    tail: tuple[float, float]
    prices: Array
    pipeline_price: float = 0.0
    buckets: tuple[_Bucket, ...] = ()
    time_s: float = 0.0
    solved: bool = False
    priced: bool = False

    @property
    def bound_s(self) -> float:
        return self.time_s + self.tail[0]


class Hint(NamedTuple):
    """Columns of level 1 under a deadline on the tail: the prices of their fractional plans are a good start."""

    deadline: float
    columns: Columns


def lower_bound(
    question: Question,
    value_s: float,
    clock: Clock,
    hints: Mapping[int, Sequence[Hint]] | None = None,
    effort: float = 1.0,
) -> float:
    """Lower bound on the iteration time of every plan; at most `value_s`, the time of a plan at hand.

    Parameters
    ----------
    hints
        For each smallest tp degree, from a search: where to start. Any others give a valid bound, with more effort.
    effort
        Multiple of the shortest paths solved by default.
    """
    budget = effort * PATHS * min(1.0, USUAL_LAYERS / question.num_layers)  # a path takes longer through more layers
    floor = work_bound(question)
    search = _Search(question.fast, value_s, clock)
    heap: list[tuple[float, int, _Box]] = []
    number = 0
    for root in search.roots(hints or {}):
        (box,) = search.work(root)  # whatever the budget: no root may be left at its tail alone
        heapq.heappush(heap, (max(box.bound_s, floor), number, box))
        number += 1
    tight = value_s
    while heap and not clock.over and heap[0][0] < value_s * (1 - PRECISION) and search.paths < budget:
        clock.tell(search.paths / budget, "lower bound")
        least, _, box = heapq.heappop(heap)
        children = search.work(box)
        if not children:  # as tight as it gets
            tight = least
            break
        for child in children:
            heapq.heappush(heap, (max(child.bound_s, least), number, child))
            number += 1
    remaining = min((entry[0] for entry in heap), default=value_s)
    return max(floor, min(tight, remaining, value_s))


class _Search:
    def __init__(self, question: Question, value_s: float, clock: Clock) -> None:
        self.question, self.value_s, self.clock = question, value_s, clock
        self.target_s = value_s * (1 - PRECISION)
        self.paths = 0
        self.near: dict[int, tuple[float, float]] = {}
        self._none = np.zeros(len(question.available), dtype=np.int64)
        self._tables: dict[bool, list[_Tables]] = {}
        units = int(max(question.limits.sum(), 1))
        self.most_pipelines = max(1, min(units, question.need))

    def _first_prices(self) -> Array:
        """Prices in proportion to how fast a device type runs the model, spent on the global batch."""
        question = self.question
        rate = np.zeros(len(question.available))
        for costs in question.costs:
            seconds = (costs.forward + costs.backward).sum(axis=1)
            per_unit = np.where(np.isfinite(seconds), costs.micro_batch / seconds, 0.0)
            for r in range(len(rate)):
                takes = question.use[:, r]
                rate[r] = max(rate[r], float(np.where(takes > 0, per_unit / np.maximum(takes, 1), 0.0).max()))
        main = np.array(
            [bool((question.use[question.tp == 1, r] > 0).any()) or len(rate) == 1 for r in range(len(rate))]
        )
        if main.any():
            rate = np.where(main, rate, 0.0)
        return rate * question.need / max(float(rate @ question.available), 1e-300)

    def roots(self, hints: Mapping[int, Sequence[Hint]]) -> list[_Box]:
        """Two or more pipelines for each smallest degree; a single one has no ring, so the smallest degree speaks for
        all."""
        self.hints = hints
        boxes = []
        for min_tp in self.question.degrees:
            inside = min(
                max(self.question.node_size // min_tp, 1), self.most_pipelines
            )  # pipelines whose rings fit a node
            ranges = [(1, 1)] if min_tp == self.question.degrees[0] else []
            ranges += [ends for ends in ((2, inside), (inside + 1, self.most_pipelines)) if 2 <= ends[0] <= ends[1]]
            for ends in ranges:
                least = self._least_tail(min_tp, ends[0]) if ends[0] <= self.most_pipelines else math.inf
                if math.isfinite(least):
                    prices, pipeline_price = self._hinted(min_tp, ends[1], math.inf)
                    boxes.append(_Box(min_tp, ends, (least, math.inf), prices, pipeline_price))
        return boxes

    def _hinted(self, min_tp: int, most: int, deadline: float) -> tuple[Array, float]:
        """Prices of the fractional plan of at most so many pipelines whose deadline is nearest."""
        known = self.hints.get(min_tp, ())
        if known:
            distance = [abs(math.log(min(hint.deadline, 1e9)) - math.log(min(deadline, 1e9))) for hint in known]
            hint = known[int(np.argmin(distance))]
            limit = most if most < self.most_pipelines else None
            relaxed = data_split.relaxed_time(
                hint.columns, self.question.available, self.question.need, max_pipelines=limit, calls=self.clock.calls
            )
            if relaxed is not None:
                self._note_range(hint.columns, relaxed)
                return relaxed.prices, relaxed.pipeline_price
        return self._first_prices(), 0.0

    def _note_range(self, columns: Columns, relaxed: data_split.Relaxation) -> None:
        """Where the maxima of pipelines near to worth their price lie, per micro-batch size: buckets are narrow
        there."""
        near = relaxed.column_time_s <= relaxed.time_s * NEAR
        for size in np.unique(columns.size[near]):
            largest = columns.max_s[near & (columns.size == size)]
            low, high = float(largest.min()), float(largest[np.isfinite(largest)].max())
            before = self.near.get(int(size), (math.inf, 0.0))
            self.near[int(size)] = min(before[0], low), max(before[1], high)

    def work(self, box: _Box) -> list[_Box]:
        """The next thing to do for a box: bound its buckets, find prices for it, or split it; nothing if all is
        done."""
        if not box.solved:
            return [self._tighten(box)]
        if not box.priced:
            return [self._price(box)]
        return self.split(box)

    def tables(self, synced: bool) -> list[_Tables]:
        """Stage tables of every micro-batch size, and those with one micro-batch in flight where memory makes them
        differ."""
        if synced not in self._tables:
            out, few = [], []
            for costs in self.question.costs:
                positions = min(POSITIONS, costs.num_layers)
                roomiest = costs.with_owners(math.inf) if synced else costs
                load = cost.stage_table(roomiest, range(1, positions + 1), synced, floor=True).load
                if not np.isfinite(load).any():
                    continue
                cut = np.where(np.isfinite(costs.cut), costs.cut, math.inf)
                ends = cut.min(axis=1)
                both = ends[:, :, None] + ends[:, None, :]
                compute = costs.forward + costs.backward
                out.append(_Tables(costs, load, 2 * cut, both, _first_equal(load), compute))
                first = np.repeat(load[:, :1], positions, axis=1)
                if not np.array_equal(first, load):
                    few.append(
                        _Tables(costs, first[:, :1], 2 * cut, both, _first_equal(first[:, :1]), compute, shallow=True)
                    )
            self._tables[synced] = out + few
        return self._tables[synced]

    def _least_tail(self, min_tp: int, num_pipelines: int) -> float:
        """No plan of so many pipelines has a smaller tail: each layer is on some stage."""
        least = np.full(self.question.num_layers, math.inf)
        allowed = self.question.tp >= min_tp
        for table in self.tables(num_pipelines > 1):
            tail = self.question.sync(table.costs, num_pipelines, min_tp).tail
            least = np.minimum(least, cost.least_tail(table.load[allowed], tail[allowed]))
        return float(least.max())

    def _masked(self, box: _Box) -> list[Array]:
        """Loads of the stages a box allows."""
        allowed = (self.question.tp >= box.min_tp)[:, None, None, None]
        out = []
        for table in self.tables(box.pipelines[0] > 1):
            tail = self.question.sync(table.costs, box.pipelines[0], box.min_tp).tail
            banned = tail[:, None] > box.tail[1] if box.tail[1] < math.inf else np.zeros((1, 1, 1, 1), dtype=bool)
            out.append(np.where(allowed & ~banned, table.load, math.inf))
        return out

    def _tighten(self, box: _Box, loads: list[Array] | None = None) -> _Box:
        """Bound the buckets of a box, the lowest first: under its own mask, then halved until they are narrow."""
        loads = self._masked(box) if loads is None else loads
        target = self.target_s - box.tail[0]
        if not box.buckets:
            return self._started(box, loads)
        buckets = sorted(box.buckets, key=lambda b: b.time_s)
        for _ in range(ROUNDS):
            low = [b for b in buckets[:WIDEST] if b.time_s < target and not (b.fresh and b.high < b.low * FINEST)]
            if not low or (buckets[0].fresh and buckets[0].high < buckets[0].low * FINEST):
                break
            work = [b for b in low if not b.fresh]
            for bucket in low:
                if bucket.fresh:
                    middle = math.sqrt(bucket.low * bucket.high)
                    work += [bucket._replace(high=middle), bucket._replace(low=middle)]
            buckets = sorted(
                [b for b in buckets if b not in low] + self._evaluate(box, loads, work), key=lambda b: b.time_s
            )
        time_s = min(max(box.time_s, buckets[0].time_s if buckets else self.value_s), self.value_s)
        narrow = not buckets or buckets[0].time_s >= target or buckets[0].high < buckets[0].low * FINEST
        return replace(box, buckets=tuple(buckets), time_s=time_s, solved=narrow)

    def _started(self, box: _Box, loads: list[Array]) -> _Box:
        """Coarse buckets under the best of a few prices: those of the box, and between dear devices and dear
        pipelines."""
        starts = [(box.prices, box.pipeline_price)]
        if box.pipelines[1] < self.most_pipelines:
            free, _ = self._hinted(box.min_tp, self.most_pipelines, box.tail[1])
            most = self.question.need / box.pipelines[1]
            starts += [(free * (1 - part), most * part) for part in (0.25,)]
        best: _Box | None = None
        for prices, pipeline_price in starts:
            trial = replace(box, prices=prices, pipeline_price=pipeline_price)
            buckets = self._evaluate(trial, loads, self._grid(trial, loads))
            time_s = min((b.time_s for b in buckets), default=math.inf)
            if best is None or time_s > min(b.time_s for b in best.buckets):
                best = replace(trial, buckets=tuple(buckets))
            if time_s >= self.target_s - box.tail[0]:
                break
        assert best is not None
        time_s = min((b.time_s for b in best.buckets), default=self.value_s)
        return replace(best, time_s=min(max(box.time_s, time_s), self.value_s), solved=not best.buckets)

    def split(self, box: _Box) -> list[_Box]:
        """Two boxes that make up this one: by number of pipelines, or by tail; none if it is a point."""
        low, high = box.tail
        first, last = box.pipelines
        # A longer tail than this cannot pay, whatever the pipelines do.
        top = max(low, min(high if high < math.inf else self._largest_tail(box), self.target_s - box.time_s))
        by_pipelines = (1 - 1 / last) / (1 - 1 / first) if first < last else 1.0
        by_tail = top / max(low, 1e-12) if top - low > PRECISION * self.value_s else 1.0
        if max(by_pipelines, by_tail) < 1.01:
            return []
        if by_pipelines > min(by_tail, 1.5):
            parting = min(max(first, math.isqrt(first * last)), last - 1)
            least = max(low, self._least_tail(box.min_tp, parting + 1))
            return [
                self._under(box, (first, parting), box.tail),
                replace(
                    box, pipelines=(parting + 1, last), tail=(least, high), buckets=_stale(box.buckets), solved=False
                ),
            ]
        middle = math.sqrt(max(low, top / 16) * top)
        return [self._under(box, box.pipelines, (low, middle)), replace(box, tail=(middle, high))]

    def _under(self, box: _Box, pipelines: tuple[int, int], tail: tuple[float, float]) -> _Box:
        """A tighter box: with hinted prices if they differ, else with what is known of its buckets."""
        prices, pipeline_price = self._hinted(box.min_tp, pipelines[1], tail[1])
        child = replace(box, pipelines=pipelines, tail=tail, solved=False, priced=False)
        if np.allclose(prices, box.prices, rtol=1e-3) and math.isclose(
            pipeline_price, box.pipeline_price, rel_tol=1e-3
        ):
            return replace(child, buckets=_stale(box.buckets))
        return replace(child, prices=prices, pipeline_price=pipeline_price, buckets=())

    def _largest_tail(self, box: _Box) -> float:
        largest = 0.0
        for table in self.tables(box.pipelines[0] > 1):
            tail = self.question.sync(table.costs, box.pipelines[0], box.min_tp).tail
            fits = np.isfinite(table.load).any(axis=1) & (self.question.tp >= box.min_tp)[:, None, None]
            largest = max(largest, float(np.where(fits, tail, 0.0).max()))
        return largest

    def _price(self, box: _Box) -> _Box:
        """Prices by cutting planes over coarse buckets: every shortest path found is a constraint on the prices."""
        question = self.question
        loads = self._masked(box)
        limited = box.pipelines[1] < self.most_pipelines
        cuts: list[tuple[float, float, Ints]] = []  # sum - max, max / b, use
        prices, mu = box.prices, box.pipeline_price
        buckets = box.buckets
        found: _Box | None = None
        for _ in range(CUTTING_PLANES):
            trial = replace(box, prices=prices, pipeline_price=mu)
            racing = sorted(buckets, key=lambda b: b.time_s)[:RACING]
            racing = self._evaluate(trial, loads, racing, cuts)
            time_s = min((b.time_s for b in racing), default=self.value_s)
            if found is None or time_s > found.time_s:
                found = replace(trial, time_s=time_s)
            if not cuts or time_s >= self.target_s - box.tail[0] or self.clock.over:
                break
            rows = np.array(
                [[1.0, *(-rate * use), *([-rate] if limited else [])] for _, rate, use in cuts], dtype=float
            )
            upper = np.array([lead for lead, _, _ in cuts])
            budget = np.array(
                [[0.0, *question.available, *([float(box.pipelines[1])] if limited else [])]], dtype=float
            )
            objective = np.zeros(rows.shape[1])
            objective[0] = -1.0
            self.clock.calls.linear_programs += 1
            try:
                solution = solver.linear_program(
                    objective, rows, upper, equal_rows=budget, equal_to=np.array([float(question.need)])
                )
            except solver.NoSolutionError:
                break
            if float(solution.x[0]) <= found.time_s * 1.003:
                break
            # Part of the way to the new prices: cutting planes alone jump from corner to corner.
            prices = 0.4 * prices + 0.6 * solution.x[1 : 1 + len(prices)]
            mu = 0.4 * mu + 0.6 * float(solution.x[-1]) if limited else 0.0
        assert found is not None
        buckets = tuple(self._evaluate(found, loads, list(buckets)))
        found = self._tighten(replace(found, buckets=buckets, time_s=0.0, priced=True), loads)
        return found if found.time_s > box.time_s else replace(box, solved=True, priced=True)

    def _grid(self, box: _Box, loads: list[Array]) -> list[_Bucket]:
        """Coarse buckets for the maximum, from the least it can be to the value at hand."""
        grid = []
        for index, (table, load) in enumerate(zip(self.tables(box.pipelines[0] > 1), loads, strict=True)):
            # Each layer has to be run: no pipeline's maximum is below the largest of the layers' least times.
            usable = np.isfinite(load).any(axis=(1, 2, 3))
            least = float(table.compute[usable].min(axis=0).max()) if usable.any() else math.inf
            if least < self.value_s:
                edges = self._edges(least * (1 - 1e-9), table.costs.micro_batch)
                grid += [_Bucket(index, float(a), float(b), 0.0) for a, b in itertools.pairwise(edges)]
        return grid

    def _edges(self, least: float, size: int) -> Array:
        """Ends of the buckets from the least maximum to the value at hand, narrow where good pipelines lie."""
        if size not in self.near:
            return np.geomspace(least, self.value_s, BUCKETS + 1)
        low, high = (min(max(x, least), self.value_s) for x in self.near[size])
        low, high = max(low / NARROW, least), min(high * NARROW, self.value_s)
        narrow = min(BUCKETS, math.ceil(math.log(high / low) / math.log(NARROW)))
        parts = [np.geomspace(least, low, 8), np.geomspace(low, high, narrow + 1), np.geomspace(high, self.value_s, 4)]
        return np.unique(np.concatenate(parts))

    def _evaluate(
        self, box: _Box, loads: list[Array], buckets: list[_Bucket], cuts: list[tuple[float, float, Ints]] | None = None
    ) -> list[_Bucket]:
        """The buckets with the least T of their pipelines, or a value from which on it does not matter; cuts on
        request."""
        out = []
        for index, table in enumerate(self.tables(box.pipelines[0] > 1)):
            own = [b for b in buckets if b.table == index]
            if not own:
                continue
            low = np.array([b.low for b in own])
            high = np.array([b.high for b in own])
            rate = low / table.costs.micro_batch
            target = self.target_s - box.tail[0]
            limit = target - rate * box.pipeline_price + low
            value, use = self._paths(table, loads[index], rate, high, limit, box, cuts is not None)
            time_s = value + rate * box.pipeline_price - low
            out += [b._replace(time_s=float(t), fresh=True) for b, t in zip(own, time_s, strict=True)]
            if cuts is not None:
                for n in np.nonzero(value < limit)[0]:
                    spent = float(rate[n] * (use[n] @ box.prices))
                    cuts.append((float(value[n]) - spent - float(low[n]), float(rate[n]), use[n]))
        return out

    def _paths(
        self, table: _Tables, load: Array, rate: Array, cap: Array, limit: Array, box: _Box, want_use: bool
    ) -> tuple[Array, list[Ints]]:
        """(C,) least of sum + rate x price over pipelines with stages below each cap, or `limit`; resources of each if
        wanted.

        `value[c, k, i]` is the least cost of the stages from layer i on when the first of them is of class k, one
        array per number of stages.
        """
        unit_price = self.question.use @ box.prices
        usable = np.nonzero(np.isfinite(load).any(axis=(1, 2, 3)))[0]
        best: Single = limit.astype(np.float32)
        cheapest = float(unit_price[usable].min(initial=math.inf))
        if not len(usable) or (table.shallow and cheapest >= table.costs.micro_batch):
            return limit, [self._none] * len(rate)
        self.paths += len(rate)
        num_layers = self.question.num_layers
        loads = load[usable].transpose(1, 0, 3, 2).astype(np.float32)  # (q, k, j, i)
        reach = loads + table.ends[usable].transpose(0, 2, 1).astype(np.float32)
        joins = table.twice[np.ix_(usable, usable)].transpose(1, 0, 2)[None].astype(np.float32)  # (1, k2, k, j)
        price = (rate[:, None] * unit_price[usable])[:, :, None].astype(np.float32)
        top: Single = (cap * (1 + SINGLE)).astype(np.float32)
        deepest = min(num_layers, self.question.job.max_depth or num_layers, int(self.question.limits.sum()))
        # Whatever is put before layer i costs the least seconds of its layers, and the price of as many stages as
        # those need.
        before = np.concatenate([[0.0], np.cumsum(table.compute[usable].min(axis=0))])
        stages = np.maximum(np.ceil(before[None, :] / cap[:, None] * (1 - 2 * SINGLE)), 1.0)
        ahead: Single = (before[None, :] + rate[:, None] * cheapest * stages).astype(np.float32)
        values: list[Single] = []
        stops = np.full(len(rate), -1)
        block: Single = np.zeros(0, dtype=np.float32)
        block_of = -1
        value: Single
        for depth in range(1, deepest + 1):
            q = int(table.position[min(depth, loads.shape[0]) - 1])
            if q != block_of:
                block = np.where(reach[None, q] <= top[:, None, None, None], loads[None, q], np.float32(math.inf))
                block_of = q
            if depth == 1:
                value = block[:, :, num_layers] + price
            else:
                after = (joins + values[-1][:, :, None]).min(axis=1)  # (c, k, j)
                value = (block + after[:, :, :, None]).min(axis=2) + price
            values = [*values, value] if want_use else [value]
            # Few micro-batches: only pipelines that are not worth their price with fewer micro-batches than stages.
            worth = table.costs.micro_batch * (depth - 1) * (1 + SINGLE)
            if not (table.shallow and cheapest * depth + box.pipeline_price > worth):
                whole = value[:, :, 0].min(axis=1)
                stops[whole < best] = depth
                best = np.minimum(best, whole)
            if (value.min(axis=1)[:, 1:] + ahead[:, 1:] >= best[:, None]).all():
                break
        found = np.where(stops > 0, np.minimum(best.astype(np.float64) * (1 - SINGLE), limit), limit)
        if not want_use:
            return found, []
        return found, [
            self._trace(values[: stops[c]], loads, reach, joins[0], table, top[c], c, usable)
            if stops[c] > 0
            else self._none
            for c in range(len(rate))
        ]

    def _trace(
        self,
        values: list[Single],
        loads: Single,
        reach: Single,
        joins: Single,
        table: _Tables,
        cap: np.float32,
        c: int,
        usable: Ints,
    ) -> Ints:
        """Resources of the pipeline behind `values[-1][c, :, 0]`."""
        use = np.zeros(self.question.use.shape[1], dtype=np.int64)
        i, k = 0, int(values[-1][c, :, 0].argmin())
        for depth in range(len(values), 0, -1):
            use += self.question.use[usable[k]]
            if depth > 1:
                q = int(table.position[min(depth, loads.shape[0]) - 1])
                seconds = np.where(reach[q, k, :, i] <= cap, loads[q, k, :, i], math.inf)
                score = seconds[None, :] + joins[:, k] + values[depth - 2][c]
                k, i = (int(x) for x in np.unravel_index(int(score.argmin()), score.shape))
        return use


def _stale(buckets: tuple[_Bucket, ...]) -> tuple[_Bucket, ...]:
    return tuple(b._replace(fresh=False) for b in buckets)


def _first_equal(load: Array) -> Ints:
    """(Q,) for each position the first one with the same loads: where memory does not bind, in-flight counts do not
    matter."""
    out = np.arange(load.shape[1])
    for q in range(1, load.shape[1]):
        if np.array_equal(load[:, q], load[:, q - 1]):
            out[q] = out[q - 1]
    return out
