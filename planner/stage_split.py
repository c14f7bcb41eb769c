"""Level 2: layers to stages, for every template at once.

A template is a multiset of stage units (how many of each class); any device order along the pipeline is allowed.
Pipelines are built from the last stage backwards, so the position of a stage, and with it its in-flight count, is
known when it is placed, and one table serves every template:

    state  (units used so far, class k of the first stage, load of its left cut, first layer i)
    value  (sum, max) of the stage loads v = load_k,q(i, j) + cut(left) + cut(right)
    step   put a stage of class k on [i, j) before a state whose first stage is of class k2 and starts at layer j

A sweep minimises ``a * sum + b * max``: exactly for b = 0 (also under a cap on max) and for a = 0; with both it keeps
one pair per state, which makes it a heuristic whose pairs are real. `walk` gives the exact minimum of sum + (m - 1)
max of one template: cap the maximum, minimise the sum, tighten the cap, until no smaller maximum can pay.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost import Array, StageTable, left_levels

Ints = NDArray[np.int64]

# Elements of one temporary array: large enough to hide the call, small enough to stay in the cache.
_CHUNK = 1 << 15
# Weight of the sum in a minimum of the maximum: breaks ties, too small to change the maximum.
_TIE = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """States of one depth, in blocks of equal first class and equal classes of the successors (-1: none)."""

    states: Ints
    block_of: Ints
    first_class: Ints
    next_class: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Templates:
    """Every multiset of units within limits, and the states (multiset, class of the first stage) that build it.

    Parameters
    ----------
    counts
        (M, K) units of each class; row 0 is the empty template.
    state_template, state_class
        (V,) the template of each state and the class of its first stage, sorted by number of stages.
    successor
        (V, D) states that may follow the first stage, padded with V (no state).
    levels
        The states with 1, 2, ... stages.
    """

    counts: Ints
    state_template: Ints
    state_class: Ints
    successor: Ints
    levels: tuple[Level, ...]

    @property
    def num_stages(self) -> Ints:
        """(M,) stages of each template."""
        total: Ints = self.counts.sum(axis=1)
        return total


class TooManyTemplates(Exception):
    """The limits admit more templates than allowed."""


def templates(
    limits: Ints, use: Ints, available: Ints, max_depth: int, max_classes: int, at_most: int = 1 << 62
) -> Templates:
    """Enumerate all templates with at most `max_depth` units of at most `max_classes` classes that fit the cluster.

    Parameters
    ----------
    limits
        (K,) units of each class that exist.
    use, available
        (K, R) resources a unit takes and (R,) resources there are.
    at_most
        Raise TooManyTemplates beyond this many.
    """
    num_classes = len(limits)
    rows = [np.zeros((1, num_classes), dtype=np.int64)]
    last = np.zeros(1, dtype=np.int64)
    for _ in range(max_depth):
        new, new_last = [], []
        for k in range(num_classes):
            grown = rows[-1][last <= k].copy()
            grown[:, k] += 1
            fits = (grown[:, k] <= limits[k]) & (grown @ use <= available).all(axis=1)
            fits &= (grown > 0).sum(axis=1) <= max_classes
            new.append(grown[fits])
            new_last.append(np.full(int(fits.sum()), k, dtype=np.int64))
        level = np.concatenate(new)
        if not len(level):
            break
        if sum(map(len, rows)) + len(level) > at_most:
            raise TooManyTemplates
        order = np.lexsort(level.T)
        rows.append(level[order])
        last = np.concatenate(new_last)[order]
    counts = np.concatenate(rows)
    return _with_states(counts)


def union(first: Templates, second: Templates, more: Ints) -> Templates:
    """The templates of both, and `more` counts of units, each with all that it is built from."""
    counts = np.unique(np.concatenate([first.counts, second.counts, more]), axis=0)
    return _with_states(counts[np.lexsort((*counts.T, counts.sum(axis=1)))])


def below(graph: Templates, kept: NDArray[np.bool_]) -> Templates:
    """The kept templates and all that they are built from."""
    part = np.zeros(len(graph.counts), dtype=bool)
    part[0] = True
    for counts in graph.counts[kept]:
        part |= (graph.counts <= counts).all(axis=1)
    return graph if part.all() else _with_states(graph.counts[part])


def _with_states(counts: Ints) -> Templates:
    num_classes = counts.shape[1]
    index = {row.tobytes(): t for t, row in enumerate(counts)}
    state_of = np.full((len(counts), num_classes), -1, dtype=np.int64)
    template, first = np.nonzero(counts)  # sorted by template, hence by number of stages
    state_of[template, first] = np.arange(len(template))
    smaller = counts[template].copy()
    smaller[np.arange(len(template)), first] -= 1
    before = np.array([index[row.tobytes()] for row in smaller], dtype=np.int64)
    follow = state_of[before] if len(template) else np.zeros((0, num_classes), dtype=np.int64)
    width = max(1, int((follow >= 0).sum(axis=1).max(initial=1)))
    none = len(template)
    follow = np.sort(np.where(follow < 0, none, follow), axis=1)[:, :width]
    stages = counts[template].sum(axis=1)
    edge = np.searchsorted(stages, np.arange(1, int(stages.max(initial=0)) + 2))
    kinds = np.concatenate([first[:, None], np.where(follow < none, np.append(first, -1)[follow], -1)], axis=1)
    levels = []
    for low, high in itertools.pairwise(edge):
        blocks, block_of = np.unique(kinds[low:high], axis=0, return_inverse=True)
        levels.append(Level(np.arange(low, high), block_of.reshape(-1), blocks[:, 0], blocks[:, 1:]))
    return Templates(counts, template.astype(np.int64), first.astype(np.int64), follow, tuple(levels))


class Sweep(NamedTuple):
    """(M,) sum and max of the stage loads of each template's best split, infinite where nothing fits."""

    sum_s: Array
    max_s: Array


class Stage(NamedTuple):
    """Layers [first, end) on a class."""

    class_index: int
    first: int
    end: int


def sweep(table: StageTable, graph: Templates, *, weight_sum: float, weight_max: float, cap: float = math.inf) -> Sweep:
    """Best split of every template by ``weight_sum * sum + weight_max * max``, no stage above `cap`."""
    best_sum, best_max, _ = _run(table, graph, weight_sum, weight_max, cap)
    out_sum, out_max = np.full((2, len(graph.counts)), math.inf)
    score = np.where(np.isfinite(best_sum), weight_sum * np.where(np.isfinite(best_sum), best_sum, 0.0), math.inf)
    score += weight_max * np.where(np.isfinite(best_max), best_max, 0.0)
    order = np.lexsort((score, graph.state_template))
    template = graph.state_template[order]
    first = order[np.unique(template, return_index=True)[1]]
    out_sum[graph.state_template[first]] = best_sum[first]
    out_max[graph.state_template[first]] = best_max[first]
    return Sweep(out_sum, out_max)


def _run(
    table: StageTable, graph: Templates, weight_sum: float, weight_max: float, cap: float, keep: bool = False
) -> tuple[Array, Array, list[tuple[Ints, Ints]]]:
    """One sweep; sum and max at layer 0 of each state, and per level the (successor, end) chosen in each state if
    kept."""
    load, cut, left = table.load, table.cut, table.left
    num_layers = load.shape[-1] - 1
    num_states, width = graph.successor.shape
    num_left = left.shape[1]
    total, largest = np.full((2, num_states + 1, num_left, num_layers + 1), math.inf)
    choices: list[tuple[Ints, Ints]] = []

    for depth, level in enumerate(graph.levels, start=1):
        states, klass = level.states, level.first_class[level.block_of]
        q = min(depth, load.shape[1]) - 1
        if depth == 1:
            seconds = load[klass, q, :, num_layers][:, None] + left[klass]
            total[states] = largest[states] = np.where(seconds <= cap, seconds, math.inf)
            if keep:
                choices.append((np.zeros(seconds.shape, dtype=np.int64), np.full(seconds.shape, num_layers)))
            continue
        # The end of this stage leaves a layer to each stage after it; nothing is put before the deepest states.
        num_first = num_layers - depth + 1
        if num_first <= 0:
            break
        ends = slice(1, num_first + 1)
        if depth == len(graph.levels) and not keep:
            num_first = 1
        # (block, i, d, j) seconds of a stage before successor d, without its left cut
        after_cut = np.where(
            level.next_class[:, :, None] >= 0, cut[level.first_class[:, None], level.next_class][:, :, ends], math.inf
        )
        stage_s = load[level.first_class, q, :num_first, ends][:, :, None] + after_cut[:, None]
        num_ends = stage_s.shape[3]
        follow = graph.successor[states]
        with_left = [stage_s + left[level.first_class, n, :num_first][:, :, None, None] for n in range(num_left)]
        if cap < math.inf:
            for bare in with_left:
                bare[bare > cap] = math.inf
        after_level = np.where(level.next_class >= 0, table.level_of[level.first_class[:, None], level.next_class], 0)
        if keep:
            kept_d = np.zeros((len(states), num_left, num_layers + 1), dtype=np.int64)
            kept_j = np.zeros_like(kept_d)
        step = max(1, _CHUNK // (num_first * width * num_ends))
        for start in range(0, len(states), step):
            part = slice(start, min(start + step, len(states)))
            who, block = states[part], level.block_of[part]
            after_sum = total[follow[part], after_level[block]][:, None, :, ends]
            if not np.isfinite(after_sum).any():
                continue
            after_max = largest[follow[part], after_level[block]][:, None, :, ends]
            rows, firsts = np.arange(len(who))[:, None], np.arange(num_first)[None, :]
            for n, bare in enumerate(with_left):
                seconds = bare[block]
                if weight_max == 0.0:
                    score = seconds + after_sum
                else:
                    score = np.maximum(seconds, after_max)
                    score *= weight_max
                    seconds += after_sum
                    seconds *= weight_sum or _TIE
                    score += seconds
                pick = score.reshape(len(who), num_first, -1).argmin(axis=2)
                d, j = pick // num_ends, pick % num_ends
                chosen = bare[block[:, None], firsts, d, j]
                total[who, n, :num_first] = chosen + after_sum[rows, 0, d, j]
                largest[who, n, :num_first] = np.maximum(chosen, after_max[rows, 0, d, j])
                if keep:
                    kept_d[part, n, :num_first], kept_j[part, n, :num_first] = d, j + 1
        if keep:
            choices.append((kept_d, kept_j))
    return total[:-1, 0, 0], largest[:-1, 0, 0], choices


class Split(NamedTuple):
    """A split of one template: its stages, and the sum and max of their loads."""

    sum_s: float
    max_s: float
    stages: tuple[Stage, ...]


class Template:
    """One template by itself: exact splits by capped sweeps over its own sub-multisets.

    Parameters
    ----------
    table
        Stage costs.
    counts
        (K,) units of each class, at least one.
    """

    def __init__(self, table: StageTable, counts: Ints) -> None:
        self._used = np.nonzero(counts)[0]
        own = counts[self._used]
        part = _with_states(np.array(sorted(np.ndindex(*(own + 1)), key=lambda c: (sum(c), c)), dtype=np.int64))
        self._graph = part
        cut = table.cut[np.ix_(self._used, self._used)]
        left, level_of = left_levels(cut)
        self._table = StageTable(load=table.load[self._used], cut=cut, left=left, level_of=level_of)
        self._memo: dict[tuple[bool, float], Split | None] = {}

    def best(self, *, by_max: bool = False, cap: float = math.inf) -> Split | None:
        """Least sum under a cap on the maximum, or least maximum; None if no split fits."""
        key = (by_max, cap)
        if key not in self._memo:
            self._memo[key] = self._solve(by_max, cap)
        return self._memo[key]

    def _solve(self, by_max: bool, cap: float) -> Split | None:
        graph, num_layers = self._graph, self._table.load.shape[-1] - 1
        if int(graph.counts[-1].sum()) > num_layers:
            return None
        total, largest, choices = _run(self._table, graph, 0.0 if by_max else 1.0, float(by_max), cap, keep=True)
        last = np.nonzero(graph.state_template == len(graph.counts) - 1)[0]
        state = int(last[np.argmin((largest if by_max else total)[last])])
        sum_s, max_s = float(total[state]), float(largest[state])
        if not math.isfinite(sum_s):
            return None
        stages, i, n = [], 0, 0
        depth = len(graph.levels)
        while True:
            kept_d, kept_j = choices[depth - 1]
            row = state - int(graph.levels[depth - 1].states[0])
            j = int(kept_j[row, n, i])
            k = int(graph.state_class[state])
            stages.append(Stage(int(self._used[k]), i, j))
            if depth == 1:
                break
            following = int(graph.successor[state, kept_d[row, n, i]])
            n = int(self._table.level_of[k, graph.state_class[following]])
            state, i, depth = following, j, depth - 1
        return Split(sum_s, max_s, tuple(stages))

    def walk(self, num_micro_batches: float) -> Split | None:
        """The exact minimum of sum + (m - 1) max, by a walk along the Pareto set of (sum, max)."""
        least = self.best(by_max=True)
        current = self.best()
        if least is None or current is None:
            return None
        steps = num_micro_batches - 1

        def value(split: Split) -> float:
            return split.sum_s + steps * split.max_s

        found = min((current, least), key=value)
        while steps > 0 and current.sum_s + steps * least.max_s < value(found):
            cap = min(current.max_s * (1 - 1e-12), (value(found) - current.sum_s) / steps)
            following = self.best(cap=cap)
            if following is None:
                break
            current = following
            if value(current) < value(found):
                found = current
        return found

    def front(self, most: float) -> tuple[Split, ...]:
        """The points that minimise sum + (m - 1) max for some m in [1, most]: the lower hull of the Pareto set."""
        ends = self.walk(1), self.walk(most)
        if ends[0] is None or ends[1] is None:
            return ()
        hull = {ends[0].max_s: ends[0], ends[1].max_s: ends[1]}
        todo = [(ends[0], ends[1])]
        while todo:
            a, b = todo.pop()
            if a.max_s <= b.max_s * (1 + 1e-12):
                continue
            m = 1 + (b.sum_s - a.sum_s) / (a.max_s - b.max_s)
            between = self.walk(m)
            assert between is not None
            if between.sum_s + (m - 1) * between.max_s < (a.sum_s + (m - 1) * a.max_s) * (1 - 1e-12):
                hull[between.max_s] = between
                todo += [(a, between), (between, b)]
        return tuple(hull[c] for c in sorted(hull))
