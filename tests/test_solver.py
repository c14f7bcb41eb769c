"""`planner.solver`: linear programs against vertices, packings against the full program, fills against enumeration."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from planner.solver import (
    GRID_WORK,
    Fill,
    GridTooLargeError,
    InfeasibleError,
    Packing,
    UnboundedError,
    fill,
    greedy_fill,
    linear_program,
    run_pulp,
    split_need,
)

BACKENDS = ("cp-sat", "pulp", "numpy")


# Linear programs.


def by_vertices(c, rows, upper, equal_rows, equal_to):
    """Least c.x over the basic points of a bounded polyhedron; infinite if it is empty."""
    n = len(c)
    everything = np.concatenate([equal_rows, rows, -np.eye(n)])
    right = np.concatenate([equal_to, upper, np.zeros(n)])
    num_equal, best = len(equal_rows), math.inf
    for chosen in itertools.combinations(range(num_equal, len(everything)), n - num_equal):
        index = [*range(num_equal), *chosen]
        if abs(np.linalg.det(everything[index])) > 1e-9:
            x = np.linalg.solve(everything[index], right[index])
            if (rows @ x <= upper + 1e-9).all() and (x >= -1e-9).all():
                best = min(best, float(c @ x))
    return best


def test_linear_program_finds_the_vertex_and_its_prices():
    """min -x - 2y with x + y <= 4, x + 3y <= 6: both rows meet at (3, 1), value -5.

    The prices solve p + q = 1, p + 3q = 2: one more unit of either is worth 1/2.
    """
    found = linear_program([-1, -2], [[1, 1], [1, 3]], [4, 6])
    assert found.value == pytest.approx(-5)
    assert found.x == pytest.approx([3, 1])
    assert found.prices == pytest.approx([0.5, 0.5])


def test_linear_program_equals_enumeration_of_vertices():
    """On 60 random programs of 3 variables, 4 rows, a box and at most 1 equality: the value of the best vertex."""
    infeasible = 0
    for seed in range(60):
        draw = np.random.default_rng(seed)
        rows = np.concatenate([draw.integers(-3, 6, (4, 3)), np.eye(3)]).astype(float)
        upper = np.concatenate([draw.integers(-2, 10, 4), np.full(3, 5)]).astype(float)
        num_equal = int(draw.integers(0, 2))
        equal_rows = draw.integers(1, 4, (num_equal, 3)).astype(float)
        equal_to = draw.integers(1, 9, num_equal).astype(float)
        c = draw.integers(-5, 6, 3).astype(float)
        best = by_vertices(c, rows, upper, equal_rows, equal_to)
        if best == math.inf:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                linear_program(c, rows, upper, equal_rows=equal_rows, equal_to=equal_to)
            continue
        found = linear_program(c, rows, upper, equal_rows=equal_rows, equal_to=equal_to)
        assert found.value == pytest.approx(best, abs=1e-7)
        assert (rows @ found.x <= upper + 1e-7).all() and (found.x >= 0).all() and (found.prices >= 0).all()
        assert found.prices @ (upper - rows @ found.x) == pytest.approx(0, abs=1e-6)  # slack rows have no price
    assert 0 < infeasible < 30


def test_linear_program_keeps_its_answer_in_any_units():
    """Bytes for GiB and microseconds for seconds: the vertex (3, 1) and the prices (1/2, 1/2) scale along.

    Columns are counted in 2^-30 and 1e6, rows in 1e-9 and 2^40; x scales inversely to its column, the price to its row.
    """
    columns, rows = np.array([2.0**-30, 1e6]), np.array([1e-9, 2.0**40])
    matrix = np.array([[1.0, 1.0], [1.0, 3.0]]) * columns * rows[:, None]
    found = linear_program(np.array([-1.0, -2.0]) * columns, matrix, np.array([4.0, 6.0]) * rows)
    assert found.value == pytest.approx(-5, rel=1e-9)
    assert found.x * columns == pytest.approx([3, 1], rel=1e-9)
    assert found.prices * rows == pytest.approx([0.5, 0.5], rel=1e-9)


def test_linear_program_says_unbounded_or_infeasible():
    """min -x with y <= 1 has no end; x <= -1 with x >= 0 has no beginning; a wrong shape is a ValueError."""
    with pytest.raises(UnboundedError, match="unbounded"):
        linear_program([-1, 0], [[0, 1]], [1])
    with pytest.raises(InfeasibleError, match="no solution"):
        linear_program([1], [[1]], [-1])
    with pytest.raises(ValueError, match="1 \\+ 0 rows, 2 right-hand sides"):
        linear_program([1], [[1]], [1, 2])
    with pytest.raises(ValueError, match="not finite"):
        linear_program([math.nan], [[1]], [1])


def test_infinite_upper_is_no_constraint():
    """min -x with x <= inf and x <= 2: value -2, the price of the infinite row is 0."""
    found = linear_program([-1], [[1], [1]], [math.inf, 2])
    assert found.value == pytest.approx(-2)
    assert found.prices == pytest.approx([0, 1])


# The packing relaxation.


def packing_case(seed, num_columns, num_resources):
    draw = np.random.default_rng(seed)
    use = draw.integers(0, 5, (num_columns, num_resources))
    use[use.sum(axis=1) == 0, 0] = 1
    return draw, use, draw.integers(0, 20, num_resources), None if seed % 2 else int(draw.integers(1, 12))


def test_packing_equals_the_full_linear_program():
    """Constraint generation loses nothing: on 40 cases x 3 value vectors the total is the value of the whole program.

    Prices cover every column (use.pi + mu >= value) and are worth the total (available.pi + max_pipelines mu), which is
    why the total bounds every packing.
    """
    for seed in range(40):
        draw, use, available, most = packing_case(seed, 60, 3)
        packing = Packing(use, available, most)
        limits = available if most is None else np.append(available, most)
        rows = use.T if most is None else np.vstack([use.T, np.ones(len(use))])
        for _ in range(3):
            value = draw.integers(0, 40, len(use)) * draw.random()
            total, prices, pipeline_price = packing.solve(value)
            assert total == pytest.approx(-linear_program(-value, rows, limits).value, rel=1e-7, abs=1e-7)
            assert (use @ prices + pipeline_price >= value).all()
            worth = float(available @ prices) + (most or 0) * pipeline_price
            assert worth == pytest.approx(total, rel=1e-12)
        assert packing.calls == 3


def test_packing_bounds_every_integer_packing():
    """Total >= the best whole packing found by enumeration, also with a resource nobody has."""
    for seed in range(20):
        draw, use, available, most = packing_case(seed, 4, 2)
        available = np.minimum(available, 8)
        available[0] *= seed % 3 > 0
        value = draw.integers(0, 9, 4).astype(float)
        total, _, _ = Packing(use, available, most).solve(value)
        best = max(
            float(value @ n)
            for n in map(np.array, itertools.product(range(9), repeat=4))
            if (n @ use <= available).all() and (most is None or n.sum() <= most)
        )
        assert total >= best


def test_packing_refuses_what_has_no_bound():
    """A column worth 2 that uses nothing has no largest packing; with a limit of 3 pipelines it is 3 x 2."""
    with pytest.raises(UnboundedError, match="column 1"):
        Packing([[1], [0]], [4]).solve([1, 2])
    assert Packing([[1], [0]], [4], 3).solve([1, 2])[0] == pytest.approx(6)
    assert Packing([[1], [0]], [4]).solve([0, 0]) == (0.0, pytest.approx([0.0]), 0.0)


def test_packing_stays_right_when_hot_columns_are_dropped():
    """60 unlike value vectors over 1000 columns add more rows than are kept; the last total is still the program's."""
    draw, use, available, _ = packing_case(0, 1000, 4)
    packing = Packing(use, available + 1)
    for _ in range(60):
        value = draw.random(1000) * use.sum(axis=1)
        total = packing.solve(value)[0]
    assert total == pytest.approx(-linear_program(-value, use.T, available + 1).value, rel=1e-7)


# Fills.


def fill_case(seed):
    draw = random.Random(seed)
    num_columns, num_resources = draw.randint(1, 6), draw.randint(1, 3)
    use = [[draw.randint(0, 3) for _ in range(num_resources)] for _ in range(num_columns)]
    use = [row if any(row) else [1] + row[1:] for row in use]
    sizes = draw.choice([[1], [2], [1, 2, 4], [2, 3], [3, 4, 6], [4, 5]])
    case = {
        "use": use,
        "available": [draw.randint(2, 9) for _ in range(num_resources)],
        "most": [draw.randint(0, 6) for _ in range(num_columns)],
        "size": [draw.choice(sizes) for _ in range(num_columns)],
    }
    options = {
        "limit": draw.choice([None, [draw.randint(0, 3) for _ in range(num_columns)]]),
        "max_pipelines": draw.choice([None, draw.randint(1, 4)]),
    }
    value = np.array(case["most"]) * np.array(case["size"])
    total = Packing(use, case["available"], options["max_pipelines"]).solve(value)[0]
    need = max(1, round(total * draw.choice([0.5, 0.8, 0.9, 1.0])))  # near the largest that could be done
    return case, need, options


def check_fill(found: Fill, case, need, limit, max_pipelines):
    """(1) to (4) of the module, in whole numbers."""
    counts, runs = np.array(found.counts), np.array(found.micro_batches)
    assert (counts <= runs).all() and (runs <= np.array(case["most"]) * counts).all()
    assert runs @ np.broadcast_to(case["size"], runs.shape) == need
    assert (counts @ np.array(case["use"]) <= case["available"]).all()
    assert limit is None or (counts <= limit).all()
    assert max_pipelines is None or counts.sum() <= max_pipelines


def by_enumeration(case, need, limit, max_pipelines) -> bool:
    """Whether any counts and micro-batches satisfy (1) to (4): all counts, then all sums of their micro-batches."""
    use, available = np.array(case["use"]), np.array(case["available"])
    highest = [
        min([a // u for u, a in zip(row, available, strict=True) if u] + ([] if limit is None else [limit[t]]))
        for t, row in enumerate(case["use"])
    ]
    for counts in itertools.product(*(range(high + 1) for high in highest)):
        if (np.array(counts) @ use > available).any() or (max_pipelines is not None and sum(counts) > max_pipelines):
            continue
        sums = {0}
        for n, most, size in zip(counts, case["most"], case["size"], strict=True):
            sums = {
                total + size * runs for total in sums for runs in range(n, n * most + 1) if total + size * runs <= need
            }
        if need in sums:
            return True
    return False


def test_backends_agree_with_enumeration():
    """On 150 random cases (unequal sizes, limits, needs at the edge) all three backends say what enumeration says.

    What they find satisfies (1) to (4) exactly; at least 30 cases each are possible and impossible.
    """
    seen = dict.fromkeys(("optimal", "infeasible"), 0)
    for seed in range(150):
        case, need, options = fill_case(seed)
        expected = "optimal" if by_enumeration(case, need, **options) else "infeasible"
        seen[expected] += 1
        for backend in BACKENDS:
            found = fill(**case, need=need, **options, backend=backend)
            assert found.status == expected, (seed, backend)
            if expected == "optimal":
                check_fill(found, case, need, **options)
    assert min(seen.values()) >= 30


def test_unequal_sizes_must_add_up():
    """Sizes 3 and 5, enough of both: 7 samples are no sum of threes and fives, 8 = 3 + 5 is: one micro-batch each."""
    case = {"use": [[1], [1]], "available": [10], "most": [4, 4], "size": [3, 5]}
    for backend in BACKENDS:
        assert fill(**case, need=7, backend=backend).status == "infeasible"
        found = fill(**case, need=8, backend=backend)
        assert found.micro_batches == (1, 1)


def test_unneeded_pipelines_are_dropped():
    """3 samples on up to 8 pipelines of at most 2 micro-batches: ceil(3 / 2) = 2 pipelines do."""
    for backend in BACKENDS:
        found = fill([[1]], [8], [2], 1, 3, backend=backend)
        assert found == Fill(status="optimal", counts=(2,), micro_batches=(3,))


def test_the_limit_on_pipelines_binds():
    """Ten samples from pipelines of at most 2 need five: not with four allowed, though there are twelve units.

    With a second column of 3 micro-batches 2 + 2 + 3 + 3 = 10 takes four pipelines and 8 units where it needs 3 units
    each, 10 where it needs 4; then 11 = 3 + 3 + 3 + 2 takes 13.
    """
    for backend in BACKENDS:
        assert fill([[1], [3]], [12], [2, 3], 1, 10, max_pipelines=4, backend=backend).status == "optimal"
        assert fill([[1], [4]], [12], [2, 3], 1, 10, max_pipelines=4, backend=backend).status == "optimal"
        assert fill([[1], [4]], [12], [2, 3], 1, 11, max_pipelines=4, backend=backend).status == "infeasible"
        assert fill([[1]], [12], [2], 1, 10, max_pipelines=4, backend=backend).status == "infeasible"
        assert fill([[1]], [12], [2], 1, 10, max_pipelines=5, backend=backend).status == "optimal"


def test_fill_does_not_depend_on_the_order_of_columns():
    """Columns are sorted inside: reversing them reverses the answer, with every backend."""
    case, need = {"use": [[1, 0], [0, 1], [1, 1], [2, 1]], "available": [7, 6], "most": [2, 3, 6, 8], "size": 1}, 31
    turned = {"use": case["use"][::-1], "available": case["available"], "most": case["most"][::-1], "size": 1}
    for backend in BACKENDS:
        found, other = fill(**case, need=need, backend=backend), fill(**turned, need=need, backend=backend)
        assert found.status == "optimal"
        assert found.counts == other.counts[::-1]
        assert found == fill(**case, need=need, backend=backend)


def test_a_grid_too_large_is_refused_by_size_and_auto_goes_on():
    """100^4 cells x 14 items (two columns of at most 99) exceed the budget: an error says so, `auto` asks CP-SAT."""
    case = {"use": [[1, 0, 1, 0], [0, 1, 0, 1]], "available": [99] * 4, "most": [1, 1], "size": 1, "need": 198}
    assert GRID_WORK < 14 * 100**4
    with pytest.raises(GridTooLargeError, match="100 x 100 x 100 x 100 counts and 14 items of 2 columns"):
        fill(**case, backend="numpy")
    assert issubclass(GridTooLargeError, ValueError)
    assert fill(**case, backend="auto").counts == (99, 99)
    with pytest.raises(ValueError, match="'glpk' is not one of"):
        fill(**case, backend="glpk")


def test_nothing_to_do_and_nothing_to_do_it_with():
    """Need 0 takes no pipeline; with no column that runs anything, or an odd need and even sizes, none will do."""
    for backend in BACKENDS:
        assert fill([[1]], [4], [3], 2, 0, backend=backend) == Fill(status="optimal", counts=(0,), micro_batches=(0,))
        assert fill([[1]], [4], [0], 1, 2, backend=backend).status == "infeasible"
        assert fill([[5]], [4], [3], 1, 2, backend=backend).status == "infeasible"
        assert fill([[1]], [4], [3], 2, 5, backend=backend).status == "infeasible"


def test_a_limit_of_no_time_is_unknown_not_infeasible():
    """The largest need a 40-column knapsack can meet: stopped after 0.1 ms a solver may miss it, not deny it."""
    draw = np.random.default_rng(5)
    use = draw.integers(1, 12, (40, 2))
    case = {"use": use, "available": [37, 41], "most": use.sum(axis=1) + draw.integers(0, 3, 40), "size": 1}
    need = max(n for n in range(70, 130) if fill(**case, need=n, backend="numpy").status == "optimal")
    for backend in ("cp-sat", "pulp"):
        assert fill(**case, need=need, backend=backend).status == "optimal"
        assert fill(**case, need=need + 1, backend=backend).status == "infeasible"
        assert fill(**case, need=need, backend=backend, time_limit=1e-4).status in ("optimal", "unknown")


def test_greedy_fill_is_valid_when_it_succeeds():
    """On the 150 cases it satisfies (1) to (4) whenever it answers, and it answers more than half of those possible."""
    possible = answered = 0
    for seed in range(150):
        case, need, options = fill_case(seed)
        value = (np.array(case["most"]) * np.array(case["size"])).astype(float)
        _, prices, pipeline_price = Packing(case["use"], case["available"], options["max_pipelines"]).solve(value)
        found = greedy_fill(**case, need=need, **options, prices=prices, pipeline_price=pipeline_price)
        possible += fill(**case, need=need, **options, backend="numpy").status == "optimal"
        if found is not None:
            answered += 1
            check_fill(found, case, need, **options)
    assert possible / 2 < answered <= possible


def test_split_need_is_exact():
    """For sizes (2, 3, 7) and every bound up to 3 the split exists exactly when enumeration finds one, and adds up."""
    for most in itertools.product(range(4), repeat=3):
        sums = {2 * a + 3 * b + 7 * c for a, b, c in itertools.product(*(range(n + 1) for n in most))}
        for need in range(40):
            split = split_need((2, 3, 7), most, need)
            assert (split is not None) == (need in sums)
            if split is not None:
                assert 2 * split[0] + 3 * split[1] + 7 * split[2] == need
                assert all(n <= m for n, m in zip(split, most, strict=True))


# CBC.


def knapsack(size):
    """A knapsack no presolve decides: least cost of at least half of all weights, with a constant of 1000."""
    import pulp

    draw = random.Random(1)
    problem = pulp.LpProblem("knapsack", pulp.LpMinimize)
    x = [problem.add_variable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(size)]
    weights = [[draw.randint(10, 99) for _ in x] for _ in range(6)]
    problem += pulp.lpSum(draw.randint(10, 99) * v for v in x) + 1000
    for row in weights:
        problem += pulp.lpSum(w * v for w, v in zip(row, x, strict=True)) >= sum(row) // 2
    return problem


def test_run_pulp_tells_optimal_from_feasible_and_unknown():
    """A proven knapsack is optimal with bound = value; the larger one, stopped, has a bound between 1000 and its value.

    PuLP's `status` calls both optimal. The objective's constant of 1000, which CBC never sees, is in value and bound.
    """
    proven = run_pulp(knapsack(12))
    assert proven.status == "optimal" and proven.bound == proven.value > 1000
    stopped = run_pulp(knapsack(400), time_limit=1.0)
    assert stopped.status == "feasible"
    assert 1000 < stopped.bound <= stopped.value


def test_run_pulp_tells_infeasible_from_unknown():
    """2x = 3 is infeasible for whole x; the same verdict after the time limit is not believed.

    CBC's presolve, cut short, calls any problem infeasible (seen on a stage split with a solution).
    """
    import pulp

    def odd():
        problem = pulp.LpProblem("odd", pulp.LpMinimize)
        x = problem.add_variable("x", 0, 9, pulp.LpInteger)
        problem += x
        problem += 2 * x == 3
        return problem

    assert run_pulp(odd()).status == "infeasible"
    assert run_pulp(odd(), time_limit=60).status == "infeasible"
    assert run_pulp(odd(), time_limit=1e-4).status == "unknown"


def test_run_pulp_leaves_no_file_behind(tmp_path, monkeypatch):
    """After a solve the temporary folder is as empty as before."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_pulp(knapsack(8))
    assert list(tmp_path.iterdir()) == []


def test_importing_the_solvers_module_loads_no_solver():
    """`import planner.solver` brings neither OR-Tools nor PuLP nor HiGHS; a fill with CP-SAT brings OR-Tools alone."""
    code = (
        "import sys; import planner.solver as s\n"
        "heavy = lambda: sorted({m.split('.')[0] for m in sys.modules} & {'ortools', 'pulp', 'highspy', 'pandas'})\n"
        "assert heavy() == [], heavy()\n"
        "assert s.fill([[1]], [2], [3], 1, 4, backend='numpy').status == 'optimal' and heavy() == [], heavy()\n"
        "s.linear_program([1], [[1]], [1]); assert heavy() == ['ortools'], heavy()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
