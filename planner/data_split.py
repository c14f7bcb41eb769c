"""Level 1: which pipelines there are, and how many micro-batches each takes.

A *column* is a template with a micro-batch size and one or more (sum, max) points of level 2; within time T one such
pipeline runs at most

    v(T) = max over points floor((T - sum) / max) + 1      micro-batches, 0 before the first point fits.

    find the least T with   n_t <= M_t <= v_t(T) n_t                            n_t pipelines of column t        (1)
                            sum_t b_t M_t = global batch                         exactly                          (2)
                            sum_t n_t use_t <= available                         units of every kind              (3)
                            sum_t n_t <= P_max                                                                    (4)

Without the floor and with n real this is one linear program in prices (`relaxed_time`), the start of a bisection on T.
At each T: the linear program with the floor (no plan if it yields too little), reduced-cost fixing, a greedy fill, and
the integer program on the columns that are left. Symmetry is gone by construction: only counts appear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner import solver
from planner.cost import Array
from planner.stage_split import Ints

# Columns added to a linear program per round.
_ADD = 12


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Candidate pipelines.

    Parameters
    ----------
    use
        (M, R) units of each resource a pipeline takes.
    size
        (M,) samples per micro-batch.
    sum_s, max_s
        (M, points) sum and max of the stage loads; infinite where a column has fewer points.
    most
        (M,) micro-batches a pipeline may take at all (fewer than its depth where its memory was counted so).
    label
        (M, 2) index of the table and of the template the column came from.
    """

    use: Ints
    size: Ints
    sum_s: Array
    max_s: Array
    most: Ints
    label: Ints

    def yields(self, time_s: float) -> Ints:
        """(M,) micro-batches each column runs within `time_s`."""
        with np.errstate(invalid="ignore"):
            runs = np.floor((time_s - self.sum_s) / self.max_s + 1e-9) + 1
        runs = np.where(np.isfinite(self.sum_s) & (time_s >= self.sum_s * (1 - 1e-12)), runs, 0).max(axis=1)
        fit: Ints = np.minimum(runs, self.most).astype(np.int64)
        return fit

    def take(self, keep: Ints) -> Columns:
        """The columns at these indices."""
        return Columns(*(getattr(self, name)[keep] for name in ("use", "size", "sum_s", "max_s", "most", "label")))


@dataclass(slots=True)
class Calls:
    """How much work the search did."""

    linear_programs: int = 0
    integer_programs: int = 0
    unproved: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """Least T without floors and with fractional pipelines.

    Parameters
    ----------
    prices, pipeline_price
        Samples a unit of each resource, and a pipeline, are worth.
    used
        Columns in the fractional solution, and how many pipelines they make together.
    column_time_s
        (M,) least T at which a column would be worth its price; `time_s` for those used.
    """

    time_s: float
    prices: Array
    pipeline_price: float
    used: Ints
    num_pipelines: float
    column_time_s: Array


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Pipelines chosen: (M,) counts of each column, feasible within `time_s`; proved if nothing below `bound_s`
    exists."""

    time_s: float
    counts: Ints
    bound_s: float
    proved: bool


def relaxed_time(
    columns: Columns, available: Ints, need: int, *, max_pipelines: int | None = None, calls: Calls | None = None
) -> Relaxation | None:
    """Lower bound on T over fractional combinations of `columns`; None if there are none.

    The dual of the fractional level 1: prices pi of the resources and mu of a pipeline with ``N.pi + P_max mu = need``,

        max T   s.t.   T <= sum_t + max_t ((pi.use_t + mu) / b_t - 1)   for every point,

    solved by adding violated columns. A column with few micro-batches allowed is bounded as if it had no limit.
    """
    usable = np.isfinite(columns.sum_s)
    if not usable.any():
        return None
    row, point = np.nonzero(usable)
    total, largest = columns.sum_s[row, point], columns.max_s[row, point]
    rate = largest / columns.size[row]
    num_resources = len(available)
    pipelines = max_pipelines is not None
    # T, pi (scaled so that they are O(1)), mu
    scale = need / np.maximum(available, 1)
    coefficients = np.concatenate(
        [np.ones((len(row), 1)), -rate[:, None] * columns.use[row] * scale]
        + ([-rate[:, None] * (need / max_pipelines)] if max_pipelines is not None else []),
        axis=1,
    )
    upper = total - largest
    budget = np.array([0.0] + [1.0 if a > 0 else 0.0 for a in available] + [1.0] * pipelines)
    objective = np.zeros(len(budget))
    objective[0] = -1.0
    start = coefficients[:, 1:].mean(axis=1) * -1.0
    hot = list(np.argsort(upper + start, kind="stable")[:_ADD])
    while True:
        if calls is not None:
            calls.linear_programs += 1
        solution = solver.linear_program(
            objective, coefficients[hot], upper[hot], equal_rows=budget[None, :], equal_to=np.ones(1)
        )
        x = solution.x
        slack = upper - coefficients @ x
        tolerance = 1e-7 * max(abs(float(x[0])), 1e-9)
        worst = np.argsort(slack, kind="stable")[:_ADD]
        new = [int(c) for c in worst if slack[c] < -tolerance and c not in hot]
        if not new:
            break
        hot += new
    prices = x[1 : 1 + num_resources] * scale
    mu = float(x[1 + num_resources]) * need / max_pipelines if max_pipelines is not None else 0.0
    # The weights are the shares of the columns in T; n = weight x rate / theta pipelines of a column, which spend the
    # budget.
    weights = np.asarray(solution.prices)
    spent = float(weights @ (rate[hot] * (columns.use[row[hot]] @ prices + mu))) / need
    used = row[hot][weights > 1e-9]
    column_time_s = np.full(len(columns.size), math.inf)
    np.minimum.at(column_time_s, row, x[0] + slack)
    return Relaxation(
        time_s=float(x[0] + min(0.0, slack.min())),
        prices=prices,
        pipeline_price=mu,
        used=np.unique(used),
        num_pipelines=float(weights @ rate[hot]) / spent if spent > 0 else 1.0,
        column_time_s=column_time_s,
    )


@dataclass(slots=True)
class _Problem:
    columns: Columns
    available: Ints
    need: int
    max_pipelines: int | None
    backend: str
    calls: Calls
    time_limit: float | None
    packing: solver.Packing = field(init=False)

    def __post_init__(self) -> None:
        self.packing = solver.Packing(self.columns.use, self.available, self.max_pipelines)

    def within(self, time_s: float, prune: bool = True) -> tuple[str, Ints]:
        """Counts that meet (1)-(4) within `time_s`: ("optimal", counts), or ("infeasible" | "unknown", empty)."""
        columns, need = self.columns, self.need
        most = columns.yields(time_s)
        value = (most * columns.size).astype(float)
        keep = np.nonzero(most > 0)[0]
        limit = np.full(len(most), need, dtype=np.int64)
        reduced = np.zeros(len(most))
        if prune:
            self.calls.linear_programs += 1
            total, prices, pipeline_price = self.packing.solve(value)
            if total < need * (1 - 1e-9) - 1e-6:
                return "infeasible", np.zeros(0, dtype=np.int64)
            reduced = np.maximum(columns.use @ prices + pipeline_price - value, 0.0)
            # A column is in no solution if one pipeline of it costs more than the linear program can spare.
            spare = total - need + 1e-6
            keep = np.nonzero((most > 0) & (reduced <= spare))[0]
            with np.errstate(divide="ignore"):
                limit = np.minimum(limit, np.floor(spare / np.maximum(reduced, 1e-300)).clip(max=need)).astype(np.int64)
        if not len(keep):
            return "infeasible", np.zeros(0, dtype=np.int64)
        keep = keep[np.lexsort((keep, reduced[keep]))]
        counts = np.zeros(len(most), dtype=np.int64)
        quick = self._greedy(keep, most)
        if quick is not None:
            counts[keep] = quick
            return "optimal", counts
        self.calls.integer_programs += 1
        fill = solver.fill(
            columns.use[keep],
            self.available,
            most[keep],
            columns.size[keep],
            need,
            limit=limit[keep],
            max_pipelines=self.max_pipelines,
            backend=self.backend,
            time_limit=self.time_limit,
        )
        if fill.status == "unknown":
            self.calls.unproved += 1
        if fill.status != "optimal":
            return fill.status, np.zeros(0, dtype=np.int64)
        counts[keep] = fill.counts
        return "optimal", counts

    def _greedy(self, order: Ints, most: Ints) -> Ints | None:
        """Take as many of each column as fit, in this order; None if that yields too little or cannot add up
        exactly."""
        use, size = self.columns.use[order], self.columns.size[order]
        rest = self.available.copy()
        left = self.max_pipelines if self.max_pipelines is not None else self.need
        counts = np.zeros(len(order), dtype=np.int64)
        yielded = 0
        for t in range(len(order)):
            used = use[t] > 0
            wanted = -(-(self.need - yielded) // int(most[order[t]] * size[t]))
            n = min(int((rest[used] // use[t][used]).min(initial=self.need)), left, wanted)
            if n > 0:
                counts[t] = n
                rest -= n * use[t]
                left -= n
                yielded += n * int(most[order[t]] * size[t])
                if yielded >= self.need:
                    taken = np.nonzero(counts)[0]
                    groups = [(int(counts[t]), int(size[t]), int(most[order[t]])) for t in taken]
                    return counts if totals(groups, self.need) is not None else None
        return None


def least_time(
    columns: Columns,
    available: Ints,
    need: int,
    *,
    start: float,
    upper: float = math.inf,
    max_pipelines: int | None = None,
    tolerance: float = 1e-4,
    backend: str = "cp-sat",
    prune: bool = True,
    calls: Calls | None = None,
    time_limit: float | None = None,
) -> Choice | None:
    """Least T, to a relative `tolerance`, for which the integer program has a solution; None if that is not below
    `upper`.

    Parameters
    ----------
    start
        A lower bound on T, from `relaxed_time`.
    prune
        False solves every integer program on all columns (used to show that pruning changes nothing).
    """
    problem = _Problem(columns, available, need, max_pipelines, backend, calls or Calls(), time_limit)
    low, high, found, proved = start, math.inf, None, True

    def attempt(time_s: float) -> bool:
        nonlocal low, high, found, proved
        status, counts = problem.within(time_s, prune)
        if status == "optimal":
            finish = share_columns(columns, counts, need)
            assert finish is not None
            high, found = min(finish, time_s), counts
            return True
        proved &= status == "infeasible"
        low = max(low, time_s)
        return False

    step = max(tolerance, 1e-3)
    guess = start * (1 + tolerance)
    while not attempt(min(guess, upper)):
        if guess >= upper or guess > 1e6 * max(start, 1e-9):
            return None
        guess *= 1 + step
        step *= 2
    while high - low > tolerance * high:
        attempt((low + high) / 2)
    assert found is not None
    return Choice(high, found, low if proved else start, proved)


def share_columns(columns: Columns, counts: Ints, need: int) -> float | None:
    """Finish time of the best exact micro-batch split between the chosen columns; None if the sizes cannot add up."""
    chosen = np.nonzero(counts)[0]
    groups = [
        Group(
            count=int(counts[t]),
            size=int(columns.size[t]),
            points=tuple(
                (float(s), float(c))
                for s, c in zip(columns.sum_s[t], columns.max_s[t], strict=True)
                if math.isfinite(s)
            ),
            most=int(columns.most[t]),
        )
        for t in chosen
    ]
    split = share(groups, need)
    return None if split is None else split[0]


@dataclass(frozen=True, slots=True)
class Group:
    """`count` equal pipelines: samples per micro-batch, (sum, max) points, micro-batches one of them may take."""

    count: int
    size: int
    points: tuple[tuple[float, float], ...]
    most: int

    def time_s(self, num_micro_batches: int) -> float:
        """Seconds of one pipeline with m micro-batches."""
        return min(s + (num_micro_batches - 1) * c for s, c in self.points)

    def within(self, time_s: float) -> int:
        """Micro-batches one pipeline runs within a time."""
        runs = max(
            (math.floor((time_s - s) / c + 1e-9) + 1 for s, c in self.points if time_s >= s * (1 - 1e-12)), default=0
        )
        return min(runs, self.most)


def share(groups: Sequence[Group], need: int) -> tuple[float, tuple[int, ...]] | None:
    """Exact micro-batch split: least finish time and the micro-batches of each group, at least one per pipeline.

    Bisection over the finish times that can occur; whether the group totals can add up to `need` samples is a
    reachability bitset. None if no split adds up.
    """
    low, high = 0.0, max(group.time_s(max(1, min(group.most, -(-need // group.size)))) for group in groups)

    def fits(time_s: float) -> tuple[int, ...] | None:
        return totals([(group.count, group.size, group.within(time_s)) for group in groups], need)

    best = fits(high)
    if best is None:
        return None
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        found = fits(middle)
        if found is None:
            low = middle
        else:
            best = found
            finish = max(g.time_s(-(-m // g.count)) for g, m in zip(groups, found, strict=True))
            high = min(middle, finish)
            if finish <= low:
                break
    finish = max(g.time_s(-(-m // g.count)) for g, m in zip(groups, best, strict=True))
    return finish, best


def totals(groups: Sequence[tuple[int, int, int]], need: int) -> tuple[int, ...] | None:
    """Micro-batches M_g with n_g <= M_g <= v_g n_g and sum b_g M_g = need, or None; groups are (n, b, v).

    A bit of `reach` is a number of samples the groups so far can add up to.
    """
    if any(most < 1 for _, _, most in groups):
        return None
    if sum(n * b for n, b, _ in groups) > need or sum(n * b * v for n, b, v in groups) < need:
        return None
    mask = (1 << (need + 1)) - 1
    reach = [1]
    for n, b, v in groups:
        reach.append(_spread(reach[-1] << (n * b), b, n * v - n, mask))
    if not reach[-1] >> need & 1:
        return None
    taken, rest = [], need
    for (n, b, v), before in zip(reversed(groups), reversed(reach[:-1]), strict=True):
        # As evenly as the batch was meant to be: prefer the largest share that leaves the others a possible total.
        count = next(m for m in range(min(n * v, rest // b), n - 1, -1) if before >> (rest - m * b) & 1)
        taken.append(count)
        rest -= count * b
    return tuple(reversed(taken))


def _spread(bits: int, step: int, times: int, mask: int) -> int:
    """OR of ``bits << (k * step)`` for k = 0 .. times, by doubling."""
    out, width, done = bits & mask, 1, 0
    while done < times:
        shift = min(width, times - done)
        out |= (out << (shift * step)) & mask
        done += shift
        width *= 2
    return out


def nearest_batches(sizes: Sequence[int], need: int) -> tuple[int, ...]:
    """Global batches next to `need` that micro-batches of these sizes add up to."""
    step = math.gcd(*sizes)
    below = next((b for b in range(need, 0, -1) if b % step == 0 and b >= min(sizes) and adds_up(sizes, b)), None)
    above = next(b for b in range(need + 1, need + 2 * max(sizes) * step + max(sizes) + 1) if adds_up(sizes, b))
    return tuple(b for b in (below, above) if b is not None)


def adds_up(sizes: Sequence[int], total: int) -> bool:
    """Whether micro-batches of these sizes can make up `total` samples."""
    reach = 1
    mask = (1 << (total + 1)) - 1
    for size in sizes:
        reach = _spread(reach, size, total // size, mask)
    return bool(reach >> total & 1)
