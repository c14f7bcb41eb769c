"""`planner.data_split`: level 1 against a literal list of pipelines and of their micro-batches, and by hand."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.data_split import Calls, Columns, Group, least_time, nearest_batches, relaxed_time, share, totals

BACKENDS = ("cp-sat", "pulp", "numpy")
NO_LIMIT = 10**6


def columns(*rows) -> Columns:
    """Rows of (units of each resource, samples per micro-batch, [(sum, max), ...], most micro-batches or None)."""
    points = max(len(row[2]) for row in rows)
    padded = [[*row[2], *[(math.inf, math.inf)] * (points - len(row[2]))] for row in rows]
    return Columns(
        use=np.array([row[0] for row in rows], dtype=np.int64),
        size=np.array([row[1] for row in rows], dtype=np.int64),
        sum_s=np.array([[s for s, _ in row] for row in padded], dtype=float),
        max_s=np.array([[c for _, c in row] for row in padded], dtype=float),
        most=np.array([row[3] or NO_LIMIT for row in rows], dtype=np.int64),
        label=np.array([(0, t) for t in range(len(rows))], dtype=np.int64),
    )


def seconds(row, num_micro_batches):
    """Time of one pipeline, from the formula: the best of its points."""
    return min(s + (num_micro_batches - 1) * c for s, c in row[2])


def by_listing(rows, available, need, max_pipelines=None):
    """Least time over a literal list of all pipelines and of the micro-batches of each; infinite if none adds up."""
    best = math.inf
    fits = [min(a // u for u, a in zip(row[0], available, strict=True) if u) for row in rows]
    for counts in itertools.product(*(range(n + 1) for n in fits)):
        chosen = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        if not chosen or len(chosen) > (max_pipelines or len(chosen)):
            continue
        if any(sum(row[0][r] for row in chosen) > a for r, a in enumerate(available)):
            continue
        # done: samples so far -> least time of the slowest pipeline so far
        done = {0: 0.0}
        for row in chosen:
            after: dict[int, float] = {}
            for samples, time in done.items():
                for m in range(1, min(row[3] or need, (need - samples) // row[1]) + 1):
                    total = samples + m * row[1]
                    after[total] = min(after.get(total, math.inf), max(time, seconds(row, m)))
            done = after
        best = min(best, done.get(need, math.inf))
    return best


def draw_problem(seed):
    """Up to 6 unlike columns on 1 to 3 resources, some with two points or a limit; need; most pipelines or None."""
    draw = random.Random(seed)
    num_resources = draw.randint(1, 3)
    available = [draw.randint(1, 4) for _ in range(num_resources)]
    sizes = draw.choice([(1,), (1, 2), (1, 2, 4), (2, 3), (2, 4)])
    rows, num_columns = [], draw.randint(2, 6)
    while len(rows) < num_columns:
        use = tuple(draw.randint(0, min(2, a)) for a in available)
        if sum(use):
            largest = draw.randint(2, 9)
            total = largest * draw.uniform(1, sum(use))
            points = [(total, float(largest))]
            if draw.random() < 0.4:  # a longer pipeline whose slowest stage is faster
                points.append((total * draw.uniform(1.05, 1.5), largest * draw.uniform(0.6, 0.95)))
            rows.append((use, draw.choice(sizes), points, draw.choice((None, None, None, 1, 2, 3))))
    return rows, available, draw.randint(1, 12), draw.choice((None, None, 1, 2, 3))


def solve(rows, available, need, max_pipelines, **others):
    """`least_time` from the relaxation on, as the search calls it."""
    table, units = columns(*rows), np.array(available, dtype=np.int64)
    relaxed = relaxed_time(table, units, need, max_pipelines=max_pipelines)
    assert relaxed is not None
    start = max(relaxed.time_s, 1e-6)
    return least_time(table, units, need, start=start, max_pipelines=max_pipelines, tolerance=1e-5, **others)


# Columns by hand. A does a micro-batch in 1 s, B in 3 s; together they form a pipeline of sum 1.8, max 0.9.

A = ((1, 0), 1, [(1.0, 1.0)], None)
B = ((0, 1), 1, [(3.0, 3.0)], None)
BOTH = ((1, 1), 1, [(1.8, 0.9)], None)


def test_unequal_pipelines_share_the_batch_in_whole_micro_batches():
    """Eight samples: A six and B two, 6 s; one pipeline of both 1.8 + 7 x 0.9 = 8.1. Nine: A seven, 7 s; seven: 6 s."""
    for need, value in ((8, 6.0), (9, 7.0), (7, 6.0)):
        found = solve([A, B, BOTH], [1, 1], need, None)
        assert found.time_s == pytest.approx(value)
        assert found.counts.tolist() == [1, 1, 0]


def test_a_limit_on_pipelines_leaves_one():
    """One pipeline, eight samples: A alone 8 s; of both 8.1 s, which wins from 10 on: 9.9 against 10 s."""
    assert solve([A, B, BOTH], [1, 1], 8, 1).time_s == pytest.approx(8.0)
    ten = solve([A, B, BOTH], [1, 1], 10, 1)
    assert ten.time_s == pytest.approx(9.9)
    assert ten.counts.tolist() == [0, 0, 1]


def test_sizes_add_up_exactly_or_there_is_none():
    """Size 2 takes 1 s, size 1 takes 3 s: odd batches need one of size 1, even ones beyond 6 samples would not."""
    rows = [((1, 0), 2, [(1.0, 1.0)], None), ((0, 1), 1, [(3.0, 3.0)], None)]
    for need, value in ((4, 2.0), (5, 3.0), (7, 3.0), (9, 4.0), (8, 3.0)):
        # 7: 3 x 2 on A and 1 on B, both 3 s. 8: 3 x 2 on A (3 s) and 2 on B (6 s), or 4 x 2 on A alone: 4 s.
        assert solve(rows, [1, 1], need, None).time_s == pytest.approx(4.0 if need == 8 else value)
    assert solve(rows[:1], [1, 1], 5, None) is None


def test_no_more_micro_batches_than_a_column_allows():
    """A may take three: 8 samples leave five to B, 15 s; two units of A take six, and B two: 6 s."""
    few = ((1, 0), 1, [(1.0, 1.0)], 3)
    assert solve([few, B], [1, 1], 8, None).time_s == pytest.approx(15.0)
    assert solve([few, B], [2, 1], 8, None).time_s == pytest.approx(6.0)


def test_the_better_of_two_points_depends_on_the_micro_batches():
    """Points (4, 2) and (5, 1): m = 2 takes min(6, 6) = 6, m = 1 min(4, 5) = 4, m = 5 min(12, 9) = 9."""
    row = ((1,), 1, [(4.0, 2.0), (5.0, 1.0)], None)
    assert [solve([row], [1], m, None).time_s for m in (1, 2, 5)] == pytest.approx([4.0, 6.0, 9.0])
    assert columns(row).yields(9.0).tolist() == [5]
    assert columns(row).yields(3.9).tolist() == [0]


def test_nothing_at_or_below_an_upper_limit():
    """The value is 6: an upper limit of 5.9 finds nothing, one of 6.1 finds 6."""
    assert solve([A, B], [1, 1], 8, None, upper=5.9) is None
    assert solve([A, B], [1, 1], 8, None, upper=6.1).time_s == pytest.approx(6.0)


# Against enumeration.


@pytest.mark.parametrize("start", range(0, 240, 60))
def test_least_time_equals_a_literal_list(start):
    """On 240 random problems, pruned and not: the least time of all choices, and a bound that none beats."""
    feasible = 0
    for seed in range(start, start + 60):
        rows, available, need, most = draw_problem(seed)
        best = by_listing(rows, available, need, most)
        for prune in (True, False):
            found = solve(rows, available, need, most, backend="numpy", prune=prune)
            if best == math.inf:
                assert found is None, seed
                continue
            assert found is not None, seed
            assert found.time_s == pytest.approx(best, rel=2e-5), (seed, prune)
            assert found.bound_s <= best * (1 + 1e-9) and found.proved, (seed, prune)
            # The counts keep to the units, and really make up the batch within the time.
            assert (found.counts @ np.array([row[0] for row in rows]) <= available).all()
            assert most is None or found.counts.sum() <= most
            only = [row for row, n in zip(rows, found.counts, strict=True) if n]
            units = (found.counts @ np.array([row[0] for row in rows])).tolist()
            assert by_listing(only, units, need) <= found.time_s * (1 + 1e-9), (seed, prune)
        feasible += best < math.inf
    assert feasible >= 30


def test_three_backends_agree():
    """CP-SAT, CBC and the grid knapsack, pruned and not, on problems that the greedy fill does not settle."""
    compared, calls = 0, {backend: Calls() for backend in BACKENDS}
    for seed in range(300, 324):
        rows, available, need, most = draw_problem(seed)
        values = {}
        for backend, prune in itertools.product(BACKENDS, (True, False)):
            found = solve(rows, available, need, most, backend=backend, prune=prune, calls=calls[backend])
            values[backend, prune] = None if found is None else found.time_s
        first = values[BACKENDS[0], True]
        if first is None:
            assert set(values.values()) == {None}, (seed, values)
        else:
            assert list(values.values()) == pytest.approx([first] * len(values), rel=2e-5), (seed, values)
            compared += 1
    assert compared >= 12
    assert all(each.integer_programs > 50 and not each.unproved for each in calls.values())


def test_an_unknown_backend_is_refused():
    """A backend that does not exist is named once an integer program has to be solved."""
    odd = [((1,), 2, [(1.0, 1.0)], 2), ((1,), 3, [(1.0, 1.0)], 1)]  # 7 = 2 + 2 + 3, which no greedy fill finds
    with pytest.raises(ValueError, match="simplex"):
        solve(odd, [2], 7, None, backend="simplex", prune=False)


# The relaxation.


def test_relaxed_time_of_unequal_devices_by_hand():
    """A is worth 6 of 8 samples and B 2: 6 s; the pipeline of both would be worth it from 1.8 + 0.9 x 7 = 8.1 s on."""
    found = relaxed_time(columns(A, B, BOTH), np.array([1, 1]), 8)
    assert found.time_s == pytest.approx(6.0)
    assert found.prices == pytest.approx([6.0, 2.0])
    assert found.used.tolist() == [0, 1]
    assert found.column_time_s == pytest.approx([6.0, 6.0, 8.1])


def test_relaxed_time_of_one_column_by_hand():
    """Sum 2, max 0.5 on 2 of 5 units: 2.5 pipelines with 4 micro-batches of 2 samples each: 2 + 3 x 0.5 = 3.5."""
    row = ((2,), 2, [(2.0, 0.5)], None)
    found = relaxed_time(columns(row), np.array([5]), 20)
    assert found.time_s == pytest.approx(3.5)
    assert found.num_pipelines == pytest.approx(2.5)
    # Two whole pipelines run 5 each: 2 + 4 x 0.5.
    assert solve([row], [5], 20, None).time_s == pytest.approx(4.0)


def test_relaxed_time_with_few_pipelines_by_hand():
    """At most one pipeline for 8 samples: all of A, 8 s. Fractions do not help: the pipeline of both takes 8.1."""
    found = relaxed_time(columns(A, B, BOTH), np.array([1, 1]), 8, max_pipelines=1)
    assert found.time_s == pytest.approx(8.0)
    assert float(found.prices @ [1, 1]) + found.pipeline_price == pytest.approx(8.0)
    assert relaxed_time(columns(A, B), np.array([1, 1]), 8, max_pipelines=2).time_s == pytest.approx(6.0)


def by_breakpoints(rows, available, need):
    """The relaxation for two resources, x of the batch the worth of the first: max over x of the least of lines."""
    lines = []
    for use, size, points, _ in rows:
        at = [need * u / a / size for u, a in zip(use, available, strict=True)]
        lines += [(s + c * (at[1] - 1), c * (at[0] - at[1])) for s, c in points]
    where = {0.0, 1.0}
    for (a, b), (c, d) in itertools.combinations(lines, 2):
        if b != d and 0 < (c - a) / (b - d) < 1:
            where.add((c - a) / (b - d))
    return max(min(a + b * x for a, b in lines) for x in where)


def test_relaxed_time_equals_the_linear_program_for_two_resources():
    """On 80 random problems, by the crossings of its lines; prices spend the batch and bear the value out."""
    for seed in range(400, 480):
        rows, available, need, _ = draw_problem(seed)
        if len(available) != 2:
            continue
        found = relaxed_time(columns(*rows), np.array(available), need)
        assert found.time_s == pytest.approx(by_breakpoints(rows, available, need), rel=1e-6, abs=1e-6), seed
        assert float(found.prices @ available) == pytest.approx(need), seed
        least = min(s + c * (float(found.prices @ row[0]) / row[1] - 1) for row in rows for s, c in row[2])
        assert found.time_s <= least + 1e-6, seed


def test_relaxed_time_is_a_lower_bound():
    """On 240 random problems no list of whole pipelines and micro-batches is faster, limits on pipelines included."""
    for seed in range(240):
        rows, available, need, most = draw_problem(seed)
        found = relaxed_time(columns(*rows), np.array(available), need, max_pipelines=most)
        assert found.time_s <= by_listing(rows, available, need, most) * (1 + 1e-9), seed


def test_relaxed_time_of_nothing_is_none():
    """Columns without a finite point: no relaxation."""
    nothing = columns(((1,), 1, [(math.inf, math.inf)], None))
    assert relaxed_time(nothing, np.array([1]), 4) is None


# Micro-batches between chosen pipelines.


def share_by_listing(groups, need):
    """Least time of the slowest over all M_g with n_g <= M_g <= most n_g that add up; groups as even as can be."""
    ranges = [range(g.count, min(g.count * g.most, need // g.size) + 1) for g in groups]
    return min(
        (
            max(g.time_s(-(-m // g.count)) for g, m in zip(groups, ms, strict=True))
            for ms in itertools.product(*ranges)
            if sum(g.size * m for g, m in zip(groups, ms, strict=True)) == need
        ),
        default=math.inf,
    )


def groups_of(max_groups=3):
    """Unequal groups: 1 to 3 equal pipelines of sizes 1, 2 and 4."""

    def group(count, size, largest, stages, second, most):
        points = [(largest * stages, float(largest))]
        if second:
            points.append((largest * stages * 1.25, largest * 0.75))
        return Group(count=count, size=size, points=tuple(points), most=most)

    one = st.builds(
        group,
        st.integers(1, 3),
        st.sampled_from((1, 2, 4)),
        st.integers(1, 9),
        st.sampled_from((1.0, 1.6, 2.3)),
        st.booleans(),
        st.sampled_from((1, 2, 5, 99)),
    )
    return st.lists(one, min_size=1, max_size=max_groups)


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(groups_of(), st.integers(1, 24))
def test_share_is_exact(groups, need):
    """The least finish time over every exact split between unequal pipelines, and a split that attains it."""
    best = share_by_listing(groups, need)
    found = share(groups, need)
    if best == math.inf:
        assert found is None
        return
    assert found is not None
    time_s, ms = found
    assert time_s == pytest.approx(best, rel=1e-9)
    assert sum(g.size * m for g, m in zip(groups, ms, strict=True)) == need
    assert all(g.count <= m <= g.count * g.most for g, m in zip(groups, ms, strict=True))
    assert max(g.time_s(-(-m // g.count)) for g, m in zip(groups, ms, strict=True)) == pytest.approx(time_s)


def test_share_by_hand():
    """A 1 s per sample, B 2 s per two, C 12 s per four; 13 samples: C four in 12 s, the others less; without C 7 s."""
    a = Group(count=1, size=1, points=((1.0, 1.0),), most=99)
    b = Group(count=1, size=2, points=((2.0, 2.0),), most=99)
    c = Group(count=1, size=4, points=((12.0, 12.0),), most=99)
    assert share([a, b, c], 13)[0] == pytest.approx(12.0)
    assert share([a, b, c], 13)[1][2] == 1
    # A 7, B 6: 7 s and 6 s.
    assert share([a, b], 13) == (pytest.approx(7.0), (7, 3))
    # Two equal pipelines share 5 micro-batches 3 + 2; sizes 2 and 4 never make 13.
    assert share([Group(count=2, size=1, points=((1.0, 1.0),), most=99)], 5) == (pytest.approx(3.0), (5,))
    assert share([b, c], 13) is None


def test_share_of_pipelines_that_do_not_divide_evenly():
    """Three pipelines of 9 s a micro-batch, three of 11.5 s and 5 s for each further one; 11 samples: 5 and 6, 18 s."""
    # Within 18 s: two each on the first (18 s), two each on the second (16.5 s), 12 in all; within 16.5 only 3 + 6.
    slow = Group(count=3, size=1, points=((9.0, 9.0),), most=5)
    long = Group(count=3, size=1, points=((11.5, 5.0), (14.375, 3.75)), most=99)
    assert share([slow, long], 11)[0] == pytest.approx(18.0)


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from((1, 2, 3, 4, 6)), st.integers(0, 4)), min_size=1, max_size=3),
    st.integers(1, 40),
)
def test_totals_reach_exactly_what_can_be_reached(groups, need):
    """Micro-batches with n <= M <= v n that add up to the batch, whenever there are some; None else."""
    ranges = [range(n, n * v + 1) for n, _, v in groups]
    sums = {sum(b * m for (_, b, _), m in zip(groups, ms, strict=True)) for ms in itertools.product(*ranges)}
    found = totals(groups, need)
    assert (found is not None) == (need in sums)
    if found is not None:
        assert sum(b * m for (_, b, _), m in zip(groups, found, strict=True)) == need
        assert all(n <= m <= n * v for (n, _, v), m in zip(groups, found, strict=True))


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(st.sets(st.sampled_from((1, 2, 3, 4, 5, 6, 9, 10)), min_size=1, max_size=3), st.integers(1, 60))
def test_nearest_batches_are_the_nearest(sizes, need):
    """The largest sum of the sizes up to the batch, if there is one, and the smallest above it."""
    sums = {0}
    for total in range(1, need + 120):
        if any(total - b in sums for b in sizes):
            sums.add(total)
    below, above = max((s for s in sums if 0 < s <= need), default=None), min(s for s in sums if s > need)
    assert nearest_batches(sorted(sizes), need) == tuple(s for s in (below, above) if s is not None)


def test_nearest_batches_by_hand():
    """4 and 6 make 4, 6, 8, 10, ...: 7 lies between 6 and 8, 3 below them all; 6 and 10 make neither 8 nor 14."""
    assert nearest_batches([4, 6], 7) == (6, 8)
    assert nearest_batches([4, 6], 3) == (4,)
    assert nearest_batches([6, 10], 14) == (12, 16)
    assert nearest_batches([1], 5)[0] == 5


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(groups_of(max_groups=1), st.integers(1, 30))
def test_a_column_yields_what_a_pipeline_runs_in_that_time(groups, num_micro_batches):
    """At exactly the time of m micro-batches a column and a group of it yield at least m, and fewer just before it."""
    group = groups[0]
    assume(num_micro_batches <= group.most)
    table = columns(((1,), group.size, list(group.points), group.most))
    time_s = group.time_s(num_micro_batches)
    assert table.yields(time_s)[0] == group.within(time_s) >= num_micro_batches
    assert table.yields(time_s * (1 - 1e-6))[0] == group.within(time_s * (1 - 1e-6)) < num_micro_batches
