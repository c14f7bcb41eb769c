"""The solvers, and nothing else runs one: GLOP for linear programs, CP-SAT and CBC for integer programs.

Whatever a library says ends up as one plain value: optimal, feasible, infeasible or unknown, a value and a bound.
Integers are rounded and checked again in exact arithmetic before anyone sees them. One thread, fixed seed, sorted
columns: the same question gets the same answer. Libraries are imported on first use, so importing this module costs
nothing.

HiGHS is never touched: loaded by PuLP before OR-Tools it crashes the process.

Level 1 at a fixed time, as `fill` solves it (letters of ``docs/model.md``; b_t samples per micro-batch, at most v_t
micro-batches per pipeline):

    find integers   n_t <= M_t <= v_t n_t,   n_t <= limit_t                                              (1)
    with            sum_t b_t M_t = need                                                                 (2)
                    sum_t n_t use_t <= available                                                         (3)
                    sum_t n_t <= max_pipelines                                                           (4)

Only the number N_b of micro-batches of each size b matters. A size with fewer micro-batches than pipelines can drop
pipelines, which breaks neither (3) nor (4), so n_t <= M_t is restored afterwards:

    0 <= N_b <= sum over t of size b of v_t n_t                                                          (1')
    sum_b b N_b = need                                                                                   (2')

With one size this is a knapsack: the most micro-batches under (3) and (4) against need / b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import pulp

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]

# CP-SAT stops here without a time limit: about seconds of one core, but the same on every machine.
DETERMINISTIC_TIME = 30.0
# The grid knapsack refuses more cells x items than this: about 3e5 cells x 1000 columns, some seconds.
GRID_WORK = 300_000_000
# ``auto`` leaves it to CP-SAT from here, which then is quicker.
GRID_QUICK = 5_000_000
# Columns added per round of constraint generation, and rows kept between calls of `Packing.solve`.
NEW_COLUMNS, HOT_COLUMNS = 8, 96
TOLERANCE = 1e-9


class NoSolutionError(Exception):
    """A linear program without an optimum."""


class UnboundedError(NoSolutionError):
    """The objective falls without limit."""


class InfeasibleError(NoSolutionError):
    """No x satisfies the rows."""


class GridTooLargeError(ValueError):
    """The grid knapsack would take too many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a solver proved: a value with a bound (minimisation), or that there is none, or nothing."""

    status: Status
    value: float | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearSolution:
    """Optimal vertex of a linear program.

    Parameters
    ----------
    prices
        Per row of `rows x <= upper`, >= 0: the value falls by the price if `upper` rises by one.
    """

    value: float
    x: Floats
    prices: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Pipelines and micro-batches per column; empty unless `status` is ``optimal`` (found)."""

    status: Status
    counts: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()


# Linear programs.


def linear_program(
    objective: ArrayLike,
    rows: ArrayLike,
    upper: ArrayLike,
    *,
    equal_rows: ArrayLike | None = None,
    equal_to: ArrayLike | None = None,
) -> LinearSolution:
    """Minimise `objective . x` subject to `rows x <= upper`, `equal_rows x = equal_to`, `x >= 0`.

    Rows and columns are scaled by powers of two inside, so any units will do. The value is evaluated from x.

    Parameters
    ----------
    objective
        (n,).
    rows, upper
        (r, n) and (r,); an infinite `upper` is no constraint.
    equal_rows, equal_to
        (e, n) and (e,).

    Raises
    ------
    UnboundedError, InfeasibleError
    """
    c = np.asarray(objective, dtype=float)
    less = np.asarray(rows, dtype=float).reshape(-1, len(c))
    equal = np.zeros((0, len(c))) if equal_rows is None else np.asarray(equal_rows, dtype=float).reshape(-1, len(c))
    right = np.zeros(0) if equal_to is None else np.asarray(equal_to, dtype=float).ravel()
    matrix, high = np.concatenate([less, equal]), np.concatenate([np.asarray(upper, dtype=float).ravel(), right])
    if len(high) != len(matrix) or len(right) != len(equal):
        raise ValueError(f"linear program: {len(less)} + {len(equal)} rows, {len(high)} right-hand sides")
    if not (
        np.isfinite(matrix).all() and np.isfinite(c).all() and np.isfinite(right).all() and (high > -math.inf).all()
    ):
        raise ValueError("linear program: a coefficient is not finite")
    row_scale, column_scale = _scales(matrix)
    high = high * row_scale
    finite = high[np.isfinite(high)]
    size = _power(float(np.abs(finite).max())) if finite.any() else 1.0  # unit of x: its right-hand sides become O(1)
    cost = c * column_scale
    price = _power(float(np.abs(cost).max())) if cost.any() else 1.0
    matrix = matrix * row_scale[:, None] * column_scale
    found = _glop(cost / price, matrix, high / size, len(less))
    if found is None:
        words = f"linear program of {len(c)} variables and {len(matrix)} rows"
        if _glop(np.zeros(len(c)), matrix, high / size, len(less)) is None:
            raise InfeasibleError(f"{words}: no solution")
        raise UnboundedError(f"{words}: the objective is unbounded")
    x = found[0] * column_scale * size
    return LinearSolution(value=float(c @ x), x=x, prices=found[1] * price * row_scale[: len(less)])


def _glop(cost: Floats, matrix: Floats, high: Floats, num_less: int) -> tuple[Floats, Floats] | None:
    """(x, prices of the first `num_less` rows; the others are equalities), or None if there is no optimum."""
    from ortools.linear_solver import linear_solver_pb2, pywraplp

    model = linear_solver_pb2.MPModelProto()  # several times faster to fill than a solver's variables and rows
    for coefficient in cost.tolist():
        model.variable.add(lower_bound=0.0, objective_coefficient=coefficient)
    columns = list(range(len(cost)))
    for i, (row, limit) in enumerate(zip(matrix.tolist(), high.tolist(), strict=True)):
        if limit < math.inf:
            low = -math.inf if i < num_less else limit
            model.constraint.add(var_index=columns, coefficient=row, lower_bound=low, upper_bound=limit)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.LoadModelFromProto(model)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    x = np.maximum(np.array([variable.solution_value() for variable in solver.variables()], dtype=float), 0.0)
    prices = np.zeros(num_less)
    constraints = iter(solver.constraints())
    slack = high[:num_less] - matrix[:num_less] @ x
    for i in np.nonzero(slack < math.inf)[0].tolist():
        constraint = next(constraints)
        if slack[i] <= 1e-6:  # the others have no price; asking takes longer than solving
            prices[i] = max(-constraint.dual_value(), 0.0)
    return x, prices


def _power(value: float) -> float:
    """The power of two next to a positive value: multiplying by it loses no digit."""
    return math.ldexp(1.0, math.frexp(value)[1])


def _scales(matrix: Floats) -> tuple[Floats, Floats]:
    """Powers of two by which rows and columns are multiplied to bring their largest entries near one."""
    rows, columns = np.ones(matrix.shape[0]), np.ones(matrix.shape[1])
    if matrix.size:
        for _ in range(2):
            size = np.abs(matrix * rows[:, None] * columns[None, :])
            largest = size.max(axis=0)
            columns /= np.where(largest > 0, np.ldexp(1.0, np.frexp(largest)[1]), 1.0)
            largest = np.abs(matrix * rows[:, None] * columns[None, :]).max(axis=1)
            rows /= np.where(largest > 0, np.ldexp(1.0, np.frexp(largest)[1]), 1.0)
    return rows, columns


class Packing:
    """The linear relaxation of level 1, for many value vectors over the same columns.

        max value . n    s.t.   use' n <= available,   sum n <= max_pipelines,   n >= 0

    solved through its dual, `min available . pi + max_pipelines mu, use_t . pi + mu >= value_t`, of R + 1 variables:
    price all columns with one matrix product, add the worst few, repeat. Columns once added stay for the next call.

    Parameters
    ----------
    use
        (M, R) units each pipeline takes of each resource.
    available
        (R,).
    max_pipelines
        Largest number of pipelines; None: no limit.

    Attributes
    ----------
    calls
        Number of `solve` calls.
    """

    def __init__(self, use: ArrayLike, available: ArrayLike, max_pipelines: int | None = None) -> None:
        available = np.asarray(available, dtype=float)
        use = np.asarray(use, dtype=float).reshape(-1, len(available))
        if (use < 0).any() or (available < 0).any():
            raise ValueError("packing: negative use or availability")
        self._matrix = use if max_pipelines is None else np.column_stack([use, np.ones(len(use))])
        self._supply = available if max_pipelines is None else np.append(available, float(max_pipelines))
        self._counted = max_pipelines is not None
        share = self._matrix @ (1.0 / np.maximum(self._supply, 0.5))
        self._share = np.maximum(share, 1e-300)
        self._hot: list[int] = []
        self._rows: dict[int, Any] = {}
        self._solver: Any = None
        self.calls = 0

    def solve(self, value: ArrayLike) -> tuple[float, Floats, float]:
        """Return (total, prices per resource, price per pipeline).

        The total is an upper bound even where GLOP stops short of the optimum: the prices are raised until they cover
        every column, and the total is what the resources are worth at these prices.
        """
        self.calls += 1
        value = np.asarray(value, dtype=float)
        if value.shape != (len(self._matrix),) or np.isnan(value).any():
            raise ValueError(f"packing: {value.shape} values for {len(self._matrix)} columns, or not a number")
        wanted = np.maximum(value, 0.0)
        free = (wanted > 0) & (self._matrix.max(axis=1, initial=0.0) <= 0)
        if free.any():
            raise UnboundedError(f"packing: column {int(np.argmax(free))} has a value and uses nothing")
        if not wanted.any():
            return 0.0, np.zeros(len(self._supply) - self._counted), 0.0
        scale = _power(float(wanted.max()))
        wanted = wanted / scale
        if self._solver is None or len(self._rows) > HOT_COLUMNS:
            self._restart()
        for t, row in self._rows.items():
            row.SetLb(float(wanted[t]))
        if not self._rows:
            self._add(np.argsort(-wanted / self._share, kind="stable")[:NEW_COLUMNS], wanted)
        while True:
            prices = self._prices()
            cover = self._matrix @ prices
            short = wanted - cover
            short[list(self._rows)] = -math.inf
            worst = np.argsort(-short, kind="stable")[:NEW_COLUMNS]
            worst = worst[short[worst] > TOLERANCE]
            if not len(worst):
                break
            self._add(worst, wanted)
        self._hot = [t for t, row in self._rows.items() if cover[t] - wanted[t] <= 1e-6]
        prices = self._covering(prices, wanted)
        total = float(self._supply @ prices) * scale
        prices = prices * scale
        return total, prices[: len(prices) - self._counted], float(prices[-1]) if self._counted else 0.0

    def _covering(self, prices: Floats, wanted: Floats) -> Floats:
        """The prices, raised by a hair, by a factor or alike, so that no column is worth more than what it uses."""
        cover = self._matrix @ prices
        short = np.nonzero(wanted > cover)[0]
        choices = [prices]
        if len(short):
            choices = [prices + float(((wanted - cover)[short] / self._matrix[short].sum(axis=1)).max())]
            if (cover[short] > 0).all():
                choices.append(prices * float((wanted[short] / cover[short]).max()))
        cheapest: Floats = min(choices, key=lambda raised: float(self._supply @ raised)) * (1 + 1e-12)
        return cheapest

    def _restart(self) -> None:
        from ortools.linear_solver import pywraplp

        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity = self._solver.infinity()
        self._variables = [self._solver.NumVar(0.0, infinity, "") for _ in self._supply]
        goal = self._solver.Objective()
        goal.SetMinimization()
        for variable, supply in zip(self._variables, self._supply.tolist(), strict=True):
            goal.SetCoefficient(variable, supply)
        self._rows = {}
        self._add(np.array(self._hot, dtype=np.int64), np.zeros(len(self._matrix)))

    def _add(self, columns: Integers, wanted: Floats) -> None:
        infinity = self._solver.infinity()
        for t in columns.tolist():
            row = self._solver.Constraint(float(wanted[t]), infinity)
            for variable, use in zip(self._variables, self._matrix[t].tolist(), strict=True):
                if use:
                    row.SetCoefficient(variable, use)
            self._rows[t] = row

    def _prices(self) -> Floats:
        if self._solver.Solve() != 0:
            raise NoSolutionError("packing: GLOP found no prices")
        prices: Floats = np.maximum(np.array([v.solution_value() for v in self._variables], dtype=float), 0.0)
        return prices


# Level 1 at a fixed time.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Question:
    """Columns that can be used at all, in canonical order, with their largest counts; `index` is the caller's."""

    index: Integers
    use: Integers
    available: Integers
    most: Integers
    size: Integers
    highest: Integers
    need: int
    max_pipelines: int | None
    num_columns: int

    @property
    def sizes(self) -> list[int]:
        return sorted(set(self.size.tolist()))


def fill(
    use: ArrayLike,
    available: ArrayLike,
    most: ArrayLike,
    size: ArrayLike,
    need: int,
    *,
    limit: ArrayLike | None = None,
    max_pipelines: int | None = None,
    backend: str = "cp-sat",
    time_limit: float | None = None,
) -> Fill:
    """Find pipelines that run exactly `need` samples, each within the fixed time: (1) to (4) of the module.

    Status ``optimal`` means found, ``infeasible`` proven impossible, ``unknown`` stopped by a limit. Pipelines that the
    batch does not need are dropped, the shortest of each size first.

    Parameters
    ----------
    use, available
        (M, R) and (R,) units.
    most
        (M,) micro-batches one pipeline of the column runs within the time.
    size
        (M,) samples per micro-batch, or one for all.
    need
        Samples of the global batch.
    limit
        (M,) largest number of pipelines of each column.
    backend
        ``cp-sat``, ``pulp`` (CBC), ``numpy`` (grid knapsack without a solver, several times faster where it fits), or
        ``auto``: ``numpy`` where it fits, else ``cp-sat``.
    time_limit
        Seconds; None: a deterministic limit for CP-SAT, none for CBC. The grid knapsack ignores it.

    Raises
    ------
    GridTooLargeError
        A ValueError: the ``numpy`` backend would need too many steps.
    """
    question = _question(use, available, most, size, need, limit, max_pipelines)
    if need == 0:
        return Fill(status="optimal", counts=(0,) * question.num_columns, micro_batches=(0,) * question.num_columns)
    if not len(question.index) or need % math.gcd(*question.sizes):
        return Fill(status="infeasible")
    if backend == "cp-sat":
        status, counts = _fill_cp_sat(question, time_limit)
    elif backend == "pulp":
        status, counts = _fill_pulp(question, time_limit)
    elif backend == "numpy":
        status, counts = _fill_grid(question)
    elif backend == "auto":
        items = int(np.log2(np.maximum(question.highest, 1) + 1).sum())
        if math.prod((question.available + 1).tolist()) * items <= GRID_QUICK:
            try:
                status, counts = _fill_grid(question)
            except GridTooLargeError:
                status, counts = _fill_cp_sat(question, time_limit)
        else:
            status, counts = _fill_cp_sat(question, time_limit)
    else:
        raise ValueError(f"fill: backend {backend!r} is not one of cp-sat, pulp, numpy, auto")
    if status != "optimal":
        return Fill(status=status)
    found = _settle(question, counts)
    return Fill(status="unknown") if found is None else found


def greedy_fill(
    use: ArrayLike,
    available: ArrayLike,
    most: ArrayLike,
    size: ArrayLike,
    need: int,
    *,
    prices: ArrayLike | None = None,
    pipeline_price: float = 0.0,
    limit: ArrayLike | None = None,
    max_pipelines: int | None = None,
) -> Fill | None:
    """Take columns in the order of their reduced cost, as many of each as fit. Heuristic: None proves nothing.

    Parameters
    ----------
    prices, pipeline_price
        From `Packing.solve` for the values size x most; None: every unit costs the same share.
    """
    question = _question(use, available, most, size, need, limit, max_pipelines)
    if need == 0:
        return fill(use, available, most, size, need)
    if not len(question.index):
        return None
    value = (question.size * question.most).astype(float)
    if prices is None:
        unit = 1.0 / np.maximum(question.available, 1)
        worth = question.use @ unit
        orders = [np.argsort(-value / np.maximum(worth, 1e-300), kind="stable")]
    else:
        cost = question.use @ np.asarray(prices, dtype=float) + pipeline_price
        orders = [
            np.argsort(cost - value, kind="stable"),
            np.argsort(-value / np.maximum(cost, 1e-300), kind="stable"),
        ]
    for order in orders:
        counts = _take(question, order)
        if int(value @ counts) >= need:
            found = _settle(question, counts)
            if found is not None:
                return found
    return None


def _take(question: _Question, order: Integers) -> Integers:
    left, slots = question.available.copy(), question.max_pipelines
    counts = np.zeros(len(order), dtype=np.int64)
    for t in order.tolist():
        need = question.use[t]
        used = need > 0
        fits = int((left[used] // need[used]).min()) if used.any() else int(question.highest[t])
        count = min(fits, int(question.highest[t]))
        if slots is not None:
            count = min(count, slots)
            slots -= count
        counts[t] = count
        left = left - count * need
    return counts


def _question(
    use: ArrayLike,
    available: ArrayLike,
    most: ArrayLike,
    size: ArrayLike,
    need: int,
    limit: ArrayLike | None,
    max_pipelines: int | None,
) -> _Question:
    supply = np.asarray(available, dtype=np.int64)
    units = np.asarray(use, dtype=np.int64).reshape(-1, len(supply))
    num_columns = len(units)
    most_of = np.asarray(most, dtype=np.int64)
    size_of = np.broadcast_to(np.asarray(size, dtype=np.int64), (num_columns,))
    if most_of.shape != (num_columns,) or need < 0 or (size_of <= 0).any() or (units < 0).any():
        raise ValueError(f"fill: {num_columns} columns, {most_of.shape} limits, need {need}, or a size or use below 0")
    # No column is worth more pipelines than there are micro-batches.
    most_of = np.minimum(most_of, need // size_of)
    highest = np.where(most_of > 0, -(-need // (size_of * np.maximum(most_of, 1))), 0)
    for r in range(len(supply)):
        used = units[:, r] > 0
        highest[used] = np.minimum(highest[used], supply[r] // units[used, r])
    if limit is not None:
        highest = np.minimum(highest, np.asarray(limit, dtype=np.int64))
    if max_pipelines is not None:
        highest = np.minimum(highest, max_pipelines)
    index = np.nonzero(highest > 0)[0]
    keys = [*units[index].T[::-1], -highest[index], -most_of[index], size_of[index]]
    index = index[np.lexsort(keys)]
    return _Question(
        index=index,
        use=units[index],
        available=supply,
        most=most_of[index],
        size=size_of[index],
        highest=highest[index],
        need=int(need),
        max_pipelines=max_pipelines,
        num_columns=num_columns,
    )


def _settle(question: _Question, counts: Integers) -> Fill | None:
    """Turn counts that can reach the need into micro-batches and drop the pipelines not needed; None if they cannot."""
    sizes = question.sizes
    total = [int((question.most * counts)[question.size == b].sum()) for b in sizes]
    split = split_need(sizes, total, question.need)
    if split is None:
        return None
    kept, given = np.zeros((2, question.num_columns), dtype=np.int64)
    for b, target in zip(sizes, split, strict=True):
        left = target
        columns = [t for t in np.argsort(-question.most, kind="stable").tolist() if question.size[t] == b and counts[t]]
        for t in columns:  # longest pipelines first: each but the last is full, so there are no more than micro-batches
            number = min(int(counts[t]), -(-left // int(question.most[t])))
            kept[question.index[t]] = number
            given[question.index[t]] = min(left, number * int(question.most[t]))
            left -= int(given[question.index[t]])
        assert left == 0
    used = kept[question.index]
    assert ((used @ question.use) <= question.available).all() and (used <= question.highest).all()
    assert question.max_pipelines is None or int(used.sum()) <= question.max_pipelines
    return Fill(status="optimal", counts=tuple(kept.tolist()), micro_batches=tuple(given.tolist()))


def split_need(sizes: Sequence[int], most: Sequence[int], need: int) -> tuple[int, ...] | None:
    """Numbers 0 <= N_b <= most_b with sum b N_b = need, or None if there are none. Exact: sets of totals as bits."""
    mask, reach = (1 << (need + 1)) - 1, [1]
    for b, highest in zip(sizes, most, strict=True):
        bits, covered, number = reach[-1], 1, min(highest, need // b) + 1
        while covered < number:
            step = min(covered, number - covered)
            bits |= bits << (step * b) & mask
            covered += step
        reach.append(bits)
    if not reach[-1] >> need & 1:
        return None
    split, left = [0] * len(sizes), need
    for i in reversed(range(len(sizes))):
        while not reach[i] >> left & 1:
            left -= sizes[i]
            split[i] += 1
    return tuple(split)


def _fill_cp_sat(question: _Question, time_limit: float | None) -> tuple[Status, Integers]:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    n = [model.new_int_var(0, high, f"n{t}") for t, high in enumerate(question.highest.tolist())]
    totals = []
    for b in question.sizes:  # (1')
        of_size = np.nonzero(question.size == b)[0].tolist()
        runs = cp_model.LinearExpr.weighted_sum([n[t] for t in of_size], question.most[of_size].tolist())
        if len(question.sizes) == 1:
            model.add(runs >= question.need // b)
        else:
            total = model.new_int_var(0, question.need // b, f"N{b}")
            model.add(runs >= total)
            totals.append(total)
    if totals:  # (2')
        model.add(cp_model.LinearExpr.weighted_sum(totals, question.sizes) == question.need)
    for r, supply in enumerate(question.available.tolist()):  # (3)
        model.add(cp_model.LinearExpr.weighted_sum(n, question.use[:, r].tolist()) <= supply)
    if question.max_pipelines is not None:  # (4)
        model.add(cp_model.LinearExpr.sum(n) <= question.max_pipelines)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    if time_limit is None:
        solver.parameters.max_deterministic_time = DETERMINISTIC_TIME
    else:
        solver.parameters.max_time_in_seconds = time_limit
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return "optimal", np.array([solver.value(v) for v in n], dtype=np.int64)
    assert status != cp_model.MODEL_INVALID, model.validate()
    return "infeasible" if status == cp_model.INFEASIBLE else "unknown", np.zeros(len(n), dtype=np.int64)


def _fill_pulp(question: _Question, time_limit: float | None) -> tuple[Status, Integers]:
    import pulp

    problem = pulp.LpProblem("fill", pulp.LpMinimize)
    n = [problem.add_variable(f"n{t}", 0, high, pulp.LpInteger) for t, high in enumerate(question.highest.tolist())]
    problem += pulp.LpAffineExpression()
    totals = []
    for b in question.sizes:  # (1')
        of_size = np.nonzero(question.size == b)[0].tolist()
        runs = [(n[t], int(question.most[t])) for t in of_size]
        if len(question.sizes) == 1:
            problem += pulp.LpAffineExpression(runs) >= question.need // b
        else:
            total = problem.add_variable(f"N{b}", 0, question.need // b, pulp.LpInteger)
            problem += pulp.LpAffineExpression([*runs, (total, -1)]) >= 0
            totals.append((total, b))
    if totals:  # (2')
        problem += pulp.LpAffineExpression(totals) == question.need
    for r, supply in enumerate(question.available.tolist()):  # (3)
        used = [(v, units) for v, units in zip(n, question.use[:, r].tolist(), strict=True) if units]
        problem += pulp.LpAffineExpression(used) <= supply
    if question.max_pipelines is not None:  # (4)
        problem += pulp.LpAffineExpression([(v, 1) for v in n]) <= question.max_pipelines
    outcome = run_pulp(problem, time_limit)
    if outcome.value is None:
        return outcome.status, np.zeros(len(n), dtype=np.int64)
    counts = np.array([round(v.value() or 0.0) for v in n], dtype=np.int64)
    few = question.max_pipelines is None or int(counts.sum()) <= question.max_pipelines
    fits = few and bool((counts @ question.use <= question.available).all())
    right = bool((counts >= 0).all() and (counts <= question.highest).all())
    return "optimal" if fits and right else "unknown", counts


def run_pulp(problem: pulp.LpProblem, time_limit: float | None = None) -> Outcome:
    """Solve a PuLP minimisation with CBC: one thread, own temporary folder, and the truth about how it ended.

    `value` and `bound` are CBC's floats, good to about 1e-7: evaluate the integers before you show a number.

    Parameters
    ----------
    time_limit
        Seconds; soft.
    """
    import tempfile
    import time
    from pathlib import Path

    import pulp

    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        log = Path(folder, "log")
        solver = pulp.COIN_CMD(  # PULP_CBC_CMD is the same with a deprecation warning
            path=pulp.PULP_CBC_CMD.pulp_cbc_path,
            msg=False,
            threads=1,
            timeLimit=time_limit,
            gapRel=0.0,
            options=["randomSeed 1", "randomCbcSeed 1"],
            logPath=str(log),
        )
        solver.tmpDir = folder
        start = time.monotonic()
        problem.solve(solver)
        elapsed = time.monotonic() - start
        bound = _cbc_bound(log.read_text(), problem.objective.constant if problem.objective else 0.0)
    if problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        value = float(pulp.value(problem.objective) or 0.0)
        if problem.sol_status == pulp.LpSolutionOptimal:
            return Outcome(status="optimal", value=value, bound=value)
        return Outcome(status="feasible", value=value, bound=None if bound is None else min(bound, value))
    if problem.sol_status == pulp.LpSolutionUnbounded:
        raise UnboundedError(f"{problem.name}: the objective is unbounded")
    # "Integer infeasible" is in `status` only. Presolve cut short by the time limit calls any problem infeasible.
    infeasible = pulp.LpStatusInfeasible in (problem.status, problem.sol_status)
    if infeasible and (time_limit is None or elapsed < time_limit / 2):
        return Outcome(status="infeasible")
    return Outcome(status="unknown", bound=bound)


def _cbc_bound(log: str, constant: float) -> float | None:
    """The lower bound CBC prints when it stops early, less its rounding; CBC never sees the objective's constant."""
    for line in log.splitlines():
        if line.startswith("Lower bound:"):
            text = line.split(":")[1].strip()
            return float(text) - 10.0 ** -len(text.partition(".")[2]) + constant
    return None


# The grid knapsack: no solver.


def _fill_grid(question: _Question) -> tuple[Status, Integers]:
    """Exact multi-resource knapsack over the grid of counts.

    The most samples on the whole grid settle most questions; with several sizes, samples enough are not yet samples
    exactly, so the set of totals that each cell can run decides.
    """
    counts = np.zeros(len(question.index), dtype=np.int64)
    use, available = question.use, question.available
    for counted in (False, True):  # pipelines are counted as one more resource only where their limit binds
        if counted:
            assert question.max_pipelines is not None
            use = np.column_stack([use, np.ones(len(use), dtype=np.int64)])
            available = np.append(available, min(question.max_pipelines, int(question.highest.sum())))
        total, counts = _most_samples(use, available, question)
        if total < question.need:
            return "infeasible", counts
        found = _settle_within(question, counts)
        if found is not None:
            return "optimal", found
        if question.max_pipelines is None:
            break
    if len(question.sizes) == 1:
        raise AssertionError("one size: enough samples are samples exactly")
    return _reach(use, available, question)


def _settle_within(question: _Question, counts: Integers) -> Integers | None:
    """The counts after dropping unneeded pipelines, or None if they miss the need or the limit on pipelines."""
    found = _settle(replace(question, max_pipelines=None), counts)
    if found is None:
        return None
    kept = np.array(found.counts, dtype=np.int64)[question.index]
    return kept if question.max_pipelines is None or int(kept.sum()) <= question.max_pipelines else None


def _items(question: _Question) -> list[tuple[int, int]]:
    """(column, multiplicity): the counts 0 to `highest` of a column as sums of distinct items 1, 2, 4, ..., rest."""
    items = []
    for t, highest in enumerate(question.highest.tolist()):
        step = 1
        while highest:
            take = min(step, highest)
            items.append((t, take))
            highest -= take
            step *= 2
    return items


def _grid_shape(available: Integers, question: _Question, num_items: int, totals: int = 1) -> tuple[int, ...]:
    shape = tuple((available + 1).tolist())
    work = math.prod(shape) * totals * num_items
    if work > GRID_WORK:
        raise GridTooLargeError(
            f"fill: the grid of {' x '.join(map(str, shape))} counts{f' x {totals} totals' if totals > 1 else ''} and "
            f"{num_items} items of {len(question.index)} columns make {work:.1e} steps, more than {GRID_WORK:.1e}; "
            "use the backend cp-sat or pulp"
        )
    return shape


def _shifted(shape: tuple[int, ...], units: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Index of the cells that have `units` below them, and of the cells that many below."""
    upper = tuple(slice(u, None) for u in units)
    lower = tuple(slice(0, n - u) for n, u in zip(shape, units, strict=True))
    return upper, lower


def _most_samples(use: Integers, available: Integers, question: _Question) -> tuple[int, Integers]:
    items = _items(question)
    shape = _grid_shape(available, question, len(items))
    value = np.zeros(shape, dtype=np.int64)
    taken: list[NDArray[np.uint8] | None] = []
    for t, number in items:
        units = (number * use[t]).tolist()
        if any(u > n - 1 for u, n in zip(units, shape, strict=True)):
            taken.append(None)
            continue
        upper, lower = _shifted(shape, units)
        offer = value[lower] + number * int(question.most[t] * question.size[t])
        better = offer > value[upper]
        value[upper] = np.where(better, offer, value[upper])
        taken.append(np.packbits(better.ravel()))
    counts = np.zeros(len(question.index), dtype=np.int64)
    cell = available.copy()
    for (t, number), bits in zip(reversed(items), reversed(taken), strict=True):
        units = number * use[t]
        if bits is None or (cell < units).any():
            continue
        inner = tuple((available + 1 - units).tolist())
        position = int(np.ravel_multi_index(tuple((cell - units).tolist()), inner))
        if bits[position >> 3] >> (7 - (position & 7)) & 1:
            counts[t] += number
            cell = cell - units
    return int(value[tuple(available.tolist())]), counts


def _reach(use: Integers, available: Integers, question: _Question) -> tuple[Status, Integers]:
    """Which totals of samples each cell of the grid can run, as a boolean axis in units of the common divisor."""
    unit = math.gcd(*question.sizes)
    need = question.need // unit
    items = _items(question)
    shape = _grid_shape(available, question, len(items), need + 1)
    first = np.full((*shape, need + 1), -1, dtype=np.int32)  # item that made the total reachable: 0 is the empty plan
    first[..., 0] = 0
    for i, (t, number) in enumerate(items, start=1):
        units = (number * use[t]).tolist()
        if any(u > n - 1 for u, n in zip(units, shape, strict=True)):
            continue
        upper, lower = _shifted(shape, units)
        size, runs = int(question.size[t]) // unit, number * int(question.most[t])
        reach = first[lower] >= 0
        covered, wanted = 1, min(runs, need // size) + 1
        while covered < wanted:
            step = min(covered, wanted - covered)
            reach[..., step * size :] |= reach[..., : need + 1 - step * size].copy()
            covered += step
        target = first[upper]
        target[reach & (target < 0)] = i
    counts = np.zeros(len(question.index), dtype=np.int64)
    cell, total = available.copy(), need
    if first[(*cell.tolist(), total)] < 0:
        return "infeasible", counts
    while total:
        i = int(first[(*cell.tolist(), total)])
        t, number = items[i - 1]
        counts[t] += number
        cell = cell - number * use[t]
        size, runs = int(question.size[t]) // unit, number * int(question.most[t])
        before = first[tuple(cell.tolist())]
        total = next(
            left for left in range(total, max(total - runs * size, 0) - 1, -size) if 0 <= int(before[left]) < i
        )
    return "optimal", counts
