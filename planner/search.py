"""``plan(model_profile, cluster)``: which devices form which pipelines, their micro-batches and their stages.

    question   classes of units, costs per micro-batch size, units available            (question, cost)
    splits     stages of all templates, for a smallest tp degree and a sync deadline    (stage_split)
    choice     pipelines and micro-batches                                              (data_split)
    plan       chosen units onto nodes, everything recomputed with the true links       (placement, assemble)
    bound      what no plan can beat                                                    (bound)
    judge      the best few played action by action, the fastest of them taken          (simulate)

Small questions are searched exhaustively: every number of pipelines, every deadline that changes anything, all
templates, with the (sum, max) points of the chosen ones refined until they are exact. Larger ones restrict the
templates, which the plan says; its bound holds for all plans all the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner import assemble, bound, cost, data_split, equal, reasons, simulate, solver, stage_split
from planner.assemble import Candidate, Chain
from planner.cluster import Cluster
from planner.cost import Array, Costs, StageTable
from planner.data_split import Columns, Group
from planner.job import Job
from planner.plans import Plan, PlanSet
from planner.profile import ModelProfile
from planner.question import Clock, Progress, Question, ask
from planner.stage_split import Ints, Template, Templates, TooManyTemplates

Judge = Literal["simulation", "formula"]

# A question with at most so many devices and templates is searched exhaustively, to this relative precision.
EXACT_DEVICES = 12
EXACT_TEMPLATES = 500
EXACT_TOLERANCE = 1e-6
# A larger one: most templates, relative precision of T, ratio of neighbouring deadlines, stages per pipeline tried in
# turn.
MOST_TEMPLATES = 3000
ALL_CLASSES = 150  # templates up to which pipelines may mix more than two classes
TOLERANCE = 2e-4
DEADLINE_STEP = 0.85
DEPTHS = (4, 8, 16, 32, 64, 128)
THOROUGH = 0.5  # effort from which deeper pipelines of several classes are searched
DEEP_TEMPLATES = 300
DEEP, LONGEST = 16, 32  # stages of pipelines of several of the classes that came near, and of one class
REPLICAS = 16  # mixes of one class per type tried
MOST_EQUAL = 40  # plans of equal pipelines that are placed
PESSIMISM = 1.06  # a candidate under slow links is placed if it is so near to the best plan
KEEP = 1.08  # micro-batch sizes and classes whose columns are this near the best stay in the race
ROUGH = 0.02  # left cuts that differ by less than this share of a stage are taken as one
PART = 1.1  # a part of the cluster is searched if its devices could be so much faster than the best plan
ALONE = 1.2  # a single pipeline is tried if it may come so near to the best of several
# Plans so near to the best, and so many beyond those wanted, are played; forwards run ahead where a transfer takes such
# a share of a stage's arithmetic and where that gains so much.
RIVAL, RIVALS = 1.02, 3
SLOW_TRANSFER, AHEAD_GAINS = 0.01, 0.998


def plan(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job | None = None,
    *,
    time_limit: float | None = None,
    progress: Progress | None = None,
    effort: float = 1.0,
    judge: Judge = "simulation",
) -> Plan:
    """The fastest training configuration of a model on a cluster, with a bound on how far from optimal it can be.

    Parameters
    ----------
    profile
        Measured layer costs.
    cluster
        Nodes, devices and links.
    job
        What to train and which choices are allowed; defaults for all fields.
    time_limit
        Seconds; when they are over the best plan so far is returned, marked unproved.
    progress
        Called with (fraction done, what is being done).
    effort
        Work, as a multiple of the default: more narrows the gap; below 0.5 deeper pipelines are left out of large
        searches.
    judge
        What decides between plans within 2 % of the best: ``simulation``, or the planning ``formula`` that the bound
        is for.

    Raises
    ------
    Infeasible
        If nothing fits, naming the nearest miss and the cheapest change that would fit.
    ValueError
        If profile, cluster and job do not go together.
    """
    return plans(profile, cluster, job, time_limit=time_limit, progress=progress, effort=effort, judge=judge)[0]


def plans(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job | None = None,
    *,
    top: int = 1,
    time_limit: float | None = None,
    progress: Progress | None = None,
    effort: float = 1.0,
    judge: Judge = "simulation",
) -> PlanSet:
    """The best `top` different plans found, fastest first; parameters as in `plan`."""
    clock = Clock(time_limit=time_limit, progress=progress, effort=effort)
    question = ask(profile, cluster, job or Job())
    best = _Best(top)
    lower = _search_all(question, best, clock)
    if not best.found:
        raise reasons.infeasible(question)
    if lower is None:
        lower = bound.lower_bound(question, best.found[0].time_s, clock, best.hints, effort)
    rivals = best.found[:top] if judge == "formula" else best.near
    made = [_played(question, each, lower, clock, sorted(best.restrictions)) for each in rivals]
    if judge == "simulation":
        made.sort(key=lambda plan: plan.predicted.simulated_s or 0.0)
    return PlanSet(made[:top])


def _played(question: Question, found: assemble.Found, lower: float, clock: Clock, restrictions: Sequence[str]) -> Plan:
    """The plan with its simulated time; forwards run ahead where transfers are slow, memory allows and it helps."""
    plain = _with_simulated(assemble.to_plan(question, found, lower, clock, restrictions), question.cluster)
    if all(stage.send_s <= SLOW_TRANSFER * stage.compute_s for stage in plain.stages):
        return plain
    further = assemble.ahead(found)
    if further is None:
        return plain
    ahead = _with_simulated(assemble.to_plan(question, further, lower, clock, restrictions), question.cluster)
    plain_s, ahead_s = plain.predicted.simulated_s, ahead.predicted.simulated_s
    assert plain_s is not None and ahead_s is not None
    return ahead if ahead_s < AHEAD_GAINS * plain_s else plain


def _with_simulated(plan: Plan, cluster: Cluster) -> Plan:
    simulated_s = simulate.simulate(plan, cluster).iteration_s
    return replace(plan, predicted=replace(plan.predicted, simulated_s=simulated_s))


@dataclass(slots=True)
class _Best:
    """The best different plans so far, with their true times."""

    top: int
    found: list[assemble.Found] = field(default_factory=list)
    restrictions: set[str] = field(default_factory=set)
    hints: dict[int, list[bound.Hint]] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """A candidate has to be below this."""
        return self.found[self.top - 1].time_s if len(self.found) >= self.top else math.inf

    @property
    def near(self) -> list[assemble.Found]:
        """Those wanted, and more that are as good as the last of them by all that the planning form can tell."""
        wanted = self.found[: self.top]
        return wanted + [each for each in self.found[self.top :] if each.time_s <= RIVAL * wanted[-1].time_s]

    def offer(self, question: Question, candidate: Candidate) -> None:
        """Place a candidate on the nodes and keep it if it is among the best."""
        each = assemble.evaluate(question, candidate)
        if each is None:
            return
        twin = next((other for other in self.found if other.shape == each.shape), None)
        if twin is not None:
            if twin.time_s <= each.time_s:
                return
            self.found.remove(twin)
        self.found = sorted([*self.found, each], key=lambda f: (f.time_s, f.num_pipelines, f.key))
        del self.found[self.top + RIVALS :]


def _search_all(question: Question, best: _Best, clock: Clock) -> float | None:
    """Search the whole and its parts under pessimistic and optimistic links; the optimum of all plans if that was
    proved."""
    proved: float | None = None
    if not question.cluster.complete:
        best.restrictions.add("only nodes that all reach one another are used together")
    for part in question.parts():
        floor = bound.work_bound(part)
        if part is not question and floor >= best.limit_s:
            continue
        for view in (part,) if part.uniform else (part, part.fast):
            graphs = _exact_graphs(view)
            if graphs is not None:
                value = _exact(view, part, graphs, best, clock)
                if part is question and (question.uniform or view is not part) and not clock.over:
                    proved = value
            elif part is question or floor * PART < best.limit_s:
                if clock.effort >= THOROUGH:
                    _equal(view, part, best, clock)
                _broad(view, part, best, clock)
                several = len(view.classes) > 1 and view.job.max_classes != 1
                if part is question and several and clock.effort >= THOROUGH:
                    # Pipelines of one class each are few and a strong rival of what the restricted mixed search finds.
                    _broad(replace(view, job=replace(view.job, max_classes=1)), part, best, clock)
    return proved


@dataclass(slots=True, eq=False)
class _Row:
    """Stage costs of one micro-batch size under some in-flight rule, before a deadline masks stages.

    `most` is the largest number of micro-batches the in-flight counts were limited to, if they were; such a row is
    only for templates deeper than that.
    """

    costs: Costs
    table: StageTable
    most: int | None = None

    def masked(self, tail: Array, deadline: float) -> StageTable:
        if deadline == math.inf:
            return self.table
        return replace(self.table, load=np.where(tail[:, None] > deadline, math.inf, self.table.load))


@dataclass(slots=True, eq=False)
class _Splits:
    """All templates of all rows as columns of level 1."""

    columns: Columns
    tables: list[StageTable]
    graph: Templates
    memo: dict[tuple[int, int], Template] = field(default_factory=dict)

    def template(self, column: int) -> Template:
        row, t = (int(x) for x in self.columns.label[column])
        if (row, t) not in self.memo:
            self.memo[row, t] = Template(self.tables[row], self.graph.counts[t])
        return self.memo[row, t]


def _rows(view: Question, depth: int, synced: bool, corner: Collection[tuple[int, int]] = ()) -> list[_Row]:
    """One row per micro-batch size, in flight no more than the batch has of them; and one for each (micro-batch size,
    number of micro-batches fewer than stages) in `corner`."""
    rows = []
    for costs in (each.with_owners(2 if synced else 1) for each in view.costs):
        all_of_them = max(1, view.need // costs.micro_batch)
        table = cost.stage_table(costs, [min(q, all_of_them) for q in range(1, depth + 1)], synced)
        if np.isfinite(table.load).any():
            rows.append(_Row(costs, table))
        for most in range(1, depth):
            if (costs.micro_batch, most) in corner:
                limited = cost.stage_table(costs, [min(q, most) for q in range(1, depth + 1)], synced)
                if not np.array_equal(limited.load, table.load):
                    rows.append(_Row(costs, limited, most))
    return rows


def _split(
    view: Question,
    rows: list[_Row],
    graph: Templates,
    tails: list[Array],
    deadline: float,
    weights: list[tuple[float, float]],
) -> _Splits:
    """Stage splits of every template under a deadline, one (sum, max) point per pair of weights."""
    use = graph.counts @ view.use
    depth = graph.num_stages
    parts: list[tuple[Array, Array, Ints, int, int]] = []
    tables = []
    for index, (row, tail) in enumerate(zip(rows, tails, strict=True)):
        table = row.masked(tail, deadline)
        tables.append(table)
        if len(weights) == 1:
            table = _roughly(table)
        sweeps = [stage_split.sweep(table, graph, weight_sum=a, weight_max=b) for a, b in weights]
        fits = np.isfinite(sweeps[0].sum_s) & (depth > (row.most or 0))
        t = np.nonzero(fits)[0]
        sums = np.stack([each.sum_s[t] for each in sweeps], axis=1)
        maxs = np.stack([each.max_s[t] for each in sweeps], axis=1)
        parts.append((sums, maxs, t, index, row.most or view.need))
    columns = Columns(
        use=np.concatenate([use[t] for _, _, t, _, _ in parts]),
        size=np.concatenate([np.full(len(t), rows[i].costs.micro_batch) for _, _, t, i, _ in parts]),
        sum_s=np.concatenate([s for s, *_ in parts]),
        max_s=np.concatenate([c for _, c, *_ in parts]),
        most=np.concatenate([np.full(len(t), most) for _, _, t, _, most in parts]),
        label=np.concatenate([np.stack([np.full(len(t), i), t], axis=1) for _, _, t, i, _ in parts]),
    )
    return _Splits(columns, tables, graph)


def _roughly(table: StageTable) -> StageTable:
    """With a single left cut where they differ by little against the stages: a third of the work, near enough to
    choose by."""
    finite = table.load[np.isfinite(table.load)]
    left = np.where(np.isfinite(table.left), table.left, 0.0)
    alike = len(finite) and float(np.ptp(left, axis=1).max()) < ROUGH * float(np.median(finite))
    return table.with_one_left() if alike and np.isfinite(table.left).all() else table


def _candidate(view: Question, splits: _Splits, counts: Ints) -> Candidate | None:
    """The chosen columns with exact splits, exact micro-batches and the tail of the pipelines there really are."""
    columns = splits.columns
    chosen = np.nonzero(counts)[0]
    groups = []
    for t in chosen:
        most = min(int(columns.most[t]), -(-view.need // int(columns.size[t])))
        front = splits.template(int(t)).front(most)
        points = tuple((split.sum_s, split.max_s) for split in front)
        groups.append(Group(count=int(counts[t]), size=int(columns.size[t]), points=points, most=most))
    shared = data_split.share(groups, view.need)
    if shared is None:
        return None
    chains = []
    for t, group, total in zip(chosen, groups, shared[1], strict=True):
        each, more = divmod(total, group.count)
        for m, number in ((each + 1, more), (each, group.count - more)):
            if number:
                split = splits.template(int(t)).walk(m)
                assert split is not None
                chains.append(Chain(number, group.size, m, split.stages))
    return Candidate(tuple(sorted(chains)), shared[0])


# Exhaustive search.


def _exact_graphs(view: Question) -> dict[int, Templates] | None:
    """All templates for each smallest tp degree, or None if the question is too large for the exhaustive search."""
    if view.cluster is not None and len(view.cluster.devices) > EXACT_DEVICES:
        return None
    graphs = {}
    for min_tp in view.degrees:
        try:
            graphs[min_tp] = _graph(view, min_tp, view.num_layers, len(view.classes), EXACT_TEMPLATES)
        except TooManyTemplates:
            return None
    return graphs


def _graph(view: Question, min_tp: int, depth: int, max_classes: int, at_most: int) -> Templates:
    job = view.job
    depth = min(depth, view.num_layers, job.max_depth or depth)
    max_classes = min(max_classes, job.max_classes or max_classes)
    limits = np.where(view.tp >= min_tp, view.limits, 0)
    return stage_split.templates(limits, view.use, view.available, depth, max_classes, at_most)


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """Plans of at most so many pipelines: rows with the tails of that many, and all templates without a deadline."""

    num_pipelines: int
    rows: list[_Row]
    tails: list[Array]
    floor: float
    splits: _Splits


def _exact(view: Question, part: Question, graphs: dict[int, Templates], best: _Best, clock: Clock) -> float:
    """Search everything; returns the optimum under the view's links, or a lower bound on it that the best plan
    meets."""
    lowest = math.inf
    for index, (min_tp, graph) in enumerate(graphs.items()):
        clock.tell(index / len(graphs), f"all pipelines with tp >= {min_tp}")
        clock.templates += len(graph.counts)
        if graph.levels:
            known: dict[bool, _Splits] = {}
            lowest = _exact_cases(view, part, graph, min_tp, {}, known, lowest, best, clock)
            corner = _corner(view, graph, known, min(lowest, best.limit_s), clock)
            if corner:
                lowest = _exact_cases(view, part, graph, min_tp, corner, known, lowest, best, clock)
    return min(lowest, best.limit_s)


def _exact_cases(
    view: Question,
    part: Question,
    graph: Templates,
    min_tp: int,
    corner: dict[bool, set[tuple[int, int]]],
    known: dict[bool, _Splits],
    lowest: float,
    best: _Best,
    clock: Clock,
) -> float:
    """Every number of pipelines, the most promising first; with `corner`, again with pipelines of few micro-batches."""
    cases: list[tuple[float, int, _Case]] = []
    most_pipelines = min(int(view.available.sum()), view.need)
    for synced in corner or (False, True):
        rows = _rows(view, len(graph.levels), synced, corner.get(synced, ()))
        if not rows:
            continue
        splits = _split(view, rows, graph, [np.zeros(0)] * len(rows), math.inf, [(1.0, 0.0), (0.0, 1.0)])
        known[synced] = splits
        for num_pipelines in range(2, most_pipelines + 1) if synced else (1,):
            tails = [view.sync(row.costs, num_pipelines, min_tp).tail for row in rows]
            floor = _least_tail(rows, tails)
            relaxed = _relaxed(view, _optimistic(splits.columns), num_pipelines, clock)
            if relaxed is not None:
                cases.append((relaxed + floor, num_pipelines, _Case(num_pipelines, rows, tails, floor, splits)))
    for value, _, case in sorted(cases, key=lambda entry: entry[:2]):
        if value >= min(best.limit_s, lowest) or (clock.over and best.found):
            break
        lowest = min(lowest, _descend(view, part, case, best, clock))
    return lowest


def _corner(
    view: Question, graph: Templates, known: dict[bool, _Splits], limit: float, clock: Clock
) -> dict[bool, set[tuple[int, int]]]:
    """Which pipelines of fewer micro-batches than stages may be in a plan below `limit`: (micro-batch size,
    micro-batches).

    At the prices of the linear program without them, each needs the price of one more unit than it has micro-batches.
    """
    found: dict[bool, set[tuple[int, int]]] = {}
    for synced in (False, True):
        spare, unit, pipeline = math.inf, 0.0, 0.0
        if synced in known and limit < math.inf:
            columns = _optimistic(known[synced].columns)
            value = (columns.yields(limit) * columns.size).astype(float)
            total, prices, pipeline = solver.Packing(columns.use, view.available, None if synced else 1).solve(value)
            clock.calls.linear_programs += 1
            spare, unit = total - view.need + 1e-6, float((view.use @ prices).min())
        possible = {
            (costs.micro_batch, most)
            for costs in view.costs
            for most in range(1, len(graph.levels))
            if (most + 1) * unit + pipeline - costs.micro_batch * most <= spare
        }
        if possible:
            found[synced] = possible
    return found


def _descend(view: Question, part: Question, case: _Case, best: _Best, clock: Clock) -> float:
    """All plans of at most so many pipelines, from the slackest deadline on the tail to the tightest that can pay."""
    rows, tails, splits, floor = case.rows, case.tails, case.splits, case.floor
    least = math.inf
    while not (clock.over and best.found):
        limit = best.limit_s if best.top > 1 else min(best.limit_s, least)
        solved = _refine(view, splits, case.num_pipelines, limit - floor, clock)
        if solved is None:
            break
        time_s, counts = solved
        candidate = _candidate(view, splits, counts)
        assert candidate is not None
        best.offer(part, candidate)
        by_size = {row.costs.micro_batch: tail for row, tail in zip(rows, tails, strict=True)}
        tail = max(
            float(by_size[chain.micro_batch][stage.class_index, stage.first, stage.end])
            for chain in candidate.chains
            for stage in chain.stages
        )
        least = min(least, time_s + tail)
        # What is left has a smaller tail, and one that time_s can still make up for.
        limit = best.limit_s if best.top > 1 else min(best.limit_s, least)
        deadline = min(tail * (1 - 1e-9), limit - time_s)
        if deadline <= floor:
            break
        kept, graph = _surviving(view, splits, case.num_pipelines, limit - floor, clock)
        if not len(kept):
            break
        rows, tails = [rows[i] for i in kept], [tails[i] for i in kept]
        splits = _split(view, rows, graph, tails, deadline, [(1.0, 0.0), (0.0, 1.0)])
    return least


def _surviving(
    view: Question, splits: _Splits, num_pipelines: int, upper: float, clock: Clock
) -> tuple[Ints, Templates]:
    """Rows and templates that may be in a plan below `upper`, by their reduced cost; and what those are built from."""
    columns = _optimistic(splits.columns)
    value = (columns.yields(upper) * columns.size).astype(float)
    clock.calls.linear_programs += 1
    total, prices, pipeline = solver.Packing(columns.use, view.available, num_pipelines).solve(value)
    reduced = np.maximum(columns.use @ prices + pipeline - value, 0.0)
    label = columns.label[(value > 0) & (reduced <= total - view.need + 1e-6)]
    kept = np.zeros(len(splits.graph.counts), dtype=bool)
    kept[label[:, 1]] = True
    return np.unique(label[:, 0]), stage_split.below(splits.graph, kept)


def _least_tail(rows: list[_Row], tails: list[Array]) -> float:
    """No plan has a smaller tail: each layer is on some stage."""
    least = np.min([cost.least_tail(row.table.load, tail) for row, tail in zip(rows, tails, strict=True)], axis=0)
    return float(least.max())


def _optimistic(columns: Columns) -> Columns:
    """The least sum with the least maximum, as if one split had both."""
    return replace(columns, sum_s=columns.sum_s.min(axis=1)[:, None], max_s=columns.max_s.min(axis=1)[:, None])


def _relaxed(view: Question, columns: Columns, num_pipelines: int, clock: Clock) -> float | None:
    if not len(columns.size):
        return None
    found = _relax(view, columns, num_pipelines, clock)
    return None if found is None else found.time_s


def _refine(
    view: Question, splits: _Splits, num_pipelines: int, upper: float, clock: Clock
) -> tuple[float, Ints] | None:
    """Optimum of level 1: solve with optimistic points, make the chosen templates exact, until all chosen ones are."""
    real = splits.columns
    if not len(real.size):
        return None
    points = 8
    optimistic = _optimistic(real)
    sums, maxs = np.full((2, len(real.size), points), math.inf)
    sums[:, 0], maxs[:, 0] = optimistic.sum_s[:, 0], optimistic.max_s[:, 0]
    attained = np.asarray(((real.sum_s <= sums[:, :1]) & (real.max_s <= maxs[:, :1] * (1 + 1e-9))).any(axis=1))
    columns = replace(real, sum_s=sums, max_s=maxs)
    start = _relaxed(view, columns, num_pipelines, clock)
    while start is not None and start < upper:
        choice = data_split.least_time(
            columns,
            view.available,
            view.need,
            start=start,
            upper=upper,
            max_pipelines=num_pipelines,
            tolerance=EXACT_TOLERANCE,
            backend="auto",
            calls=clock.calls,
        )
        if choice is None or choice.time_s >= upper:
            return None
        vague = [t for t in np.nonzero(choice.counts)[0] if not attained[t]]
        if not vague:
            return choice.time_s, choice.counts
        for t in vague:
            most = min(int(columns.most[t]), -(-view.need // int(columns.size[t])))
            front = splits.template(int(t)).front(most)
            if len(front) > sums.shape[1]:
                more = np.full((len(sums), len(front) - sums.shape[1]), math.inf)
                sums, maxs = np.concatenate([sums, more], axis=1), np.concatenate([maxs, more], axis=1)
            sums[t], maxs[t] = math.inf, math.inf
            sums[t, : len(front)] = [split.sum_s for split in front]
            maxs[t, : len(front)] = [split.max_s for split in front]
            attained[t] = True
        columns = replace(columns, sum_s=sums, max_s=maxs)
        start = max(start, choice.bound_s)
    return None


# Restricted search.


@dataclass(frozen=True, slots=True, eq=False)
class _Cell:
    """Columns under one deadline, and the time fractional pipelines would reach with them; `tail_s` they then leave."""

    relaxed: data_split.Relaxation
    tail_s: float
    splits: _Splits
    min_tp: int
    max_pipelines: int | None = None
    masked: bool = False

    @property
    def total_s(self) -> float:
        return self.relaxed.time_s + self.tail_s


def _broad(view: Question, part: Question, best: _Best, clock: Clock) -> None:
    """Templates of limited depth and few classes over falling deadlines; then integer programs, the most promising
    first."""
    cells: list[_Cell] = []
    for index, min_tp in enumerate(view.degrees):
        if clock.over and cells:
            break
        clock.tell(index / len(view.degrees), f"templates with tp >= {min_tp}")
        for max_pipelines in _ranges(view, min_tp, cells, clock):
            least = min((cell.total_s for cell in cells), default=math.inf)
            cells += _cells(view, min_tp, max_pipelines, least, best, clock)
    cells.sort(key=lambda cell: (cell.total_s, cell.min_tp))
    for n, cell in enumerate(cells):
        # Placement finds faster links than a pessimistic view counts on.
        limit = best.limit_s * (1.0 if view.uniform or view.optimistic else PESSIMISM)
        if best.found and (clock.over or cell.total_s >= limit):
            break
        clock.tell(n / len(cells), "pipelines and micro-batches")
        choice = data_split.least_time(
            cell.splits.columns,
            view.available,
            view.need,
            start=cell.relaxed.time_s,
            upper=limit - cell.tail_s * (1 - 1e-6),
            max_pipelines=cell.max_pipelines,
            tolerance=TOLERANCE,
            backend="auto",
            calls=clock.calls,
        )
        candidate = None if choice is None else _candidate(view, cell.splits, choice.counts)
        if candidate is not None:
            best.offer(part, candidate)


def _equal(view: Question, part: Question, best: _Best, clock: Clock) -> None:
    """Equal pipelines of any mix of classes: few questions, and what comes of them shortens the general search."""
    clock.tell(0.0, "equal pipelines")
    limit = best.limit_s * (1.0 if view.uniform or view.optimistic else PESSIMISM)
    found = sorted(equal.candidates(view, limit_s=limit), key=lambda each: each.time_s)
    for candidate in found[:MOST_EQUAL]:
        if clock.over and best.found:
            return
        best.offer(part, candidate)


def _ranges(view: Question, min_tp: int, cells: list[_Cell], clock: Clock) -> Iterator[int | None]:
    """Limits on the number of pipelines worth a search of their own: none; as few as let rings stay in a node; one."""
    yield None
    inside = view.node_size // min_tp
    if view.optimistic and 2 <= inside < int(view.available.sum()):
        yield inside
    if min_tp == view.degrees[0]:  # a single pipeline has no ring, so its smallest degree does not matter
        least = min((cell.total_s for cell in cells), default=math.inf)
        near = [_relax(view, cell.splits.columns, 1, clock) for cell in cells[:1]]
        if not near or near[0] is None or near[0].time_s < least * ALONE:
            yield 1


def _cells(
    view: Question, min_tp: int, max_pipelines: int | None, least: float, best: _Best, clock: Clock
) -> list[_Cell]:
    """A cell without a deadline over all classes; another with deeper pipelines of the classes that came near; then one
    below the tail that each leaves, while that can pay."""
    cells: list[_Cell] = []
    graph, rows, splits, relaxed = _deep_enough(view, min_tp, max_pipelines, best, clock)
    if relaxed is None:
        return cells
    num_pipelines = max(2 if max_pipelines != 1 else 1, round(relaxed.num_pipelines))
    weights = [(1.0, _micro_batches(view, num_pipelines))]

    def add(deadline: float) -> _Cell:
        assert relaxed is not None
        if max_pipelines is None:
            best.hints.setdefault(min_tp, []).append(bound.Hint(deadline, splits.columns))
        masked = deadline < math.inf or max_pipelines is not None
        cells.append(_Cell(relaxed, _tail_left(splits, relaxed, tails), splits, min_tp, max_pipelines, masked))
        return cells[-1]

    tails = [view.sync(row.costs, num_pipelines, min_tp).tail for row in rows]
    cell = add(math.inf)
    least = min(least, cell.total_s)
    sizes, classes = _worth_keeping(rows, splits, relaxed)
    if clock.effort >= THOROUGH and not clock.over:
        graph = _fitting(view, min_tp, DEEP, best, clock, classes)
        rows = [row for row in _rows(view, len(graph.levels), max_pipelines != 1) if row.costs.micro_batch in sizes]
        tails = [view.sync(row.costs, num_pipelines, min_tp).tail for row in rows]
        deadline = math.inf
    else:
        best.restrictions.add(
            f"effort below {THOROUGH:g}: pipelines of several classes only as deep as they pay at first sight"
        )
        if relaxed.time_s + _least_tail(rows, tails) >= least or num_pipelines == 1:
            return cells
        rows = [row for row in rows if row.costs.micro_batch in sizes]
        tails = [view.sync(row.costs, num_pipelines, min_tp).tail for row in rows]
        deadline = min(cell.tail_s * DEADLINE_STEP, least - relaxed.time_s)
    floor = _least_tail(rows, tails)
    while not clock.over:
        splits = _split(view, rows, graph, tails, deadline, weights)
        relaxed = _relax(view, splits.columns, max_pipelines, clock)
        if relaxed is None:
            break
        cell = add(deadline)
        least = min(least, cell.total_s)
        if relaxed.time_s + floor >= least or cell.tail_s * DEADLINE_STEP < floor or num_pipelines == 1:
            break
        sizes, _ = _worth_keeping(rows, splits, relaxed)
        kept = [n for n, row in enumerate(rows) if row.costs.micro_batch in sizes]
        rows, tails = [rows[n] for n in kept], [tails[n] for n in kept]
        deadline = min(cell.tail_s * DEADLINE_STEP, least - relaxed.time_s)
    return cells


def _tail_left(splits: _Splits, relaxed: data_split.Relaxation, tails: list[Array]) -> float:
    """Largest tail among the stages of the columns in a fractional solution."""
    tail = 0.0
    for t in relaxed.used:
        split = splits.template(int(t)).walk(
            max(1.0, (relaxed.time_s - splits.columns.sum_s[t, 0]) / splits.columns.max_s[t, 0])
        )
        assert split is not None
        tail = max(
            tail, *(float(tails[int(splits.columns.label[t, 0])][s.class_index, s.first, s.end]) for s in split.stages)
        )
    return tail


def _worth_keeping(
    rows: list[_Row], splits: _Splits, relaxed: data_split.Relaxation
) -> tuple[set[int], NDArray[np.bool_]]:
    """Micro-batch sizes and classes of the columns that would be worth their price within KEEP of the time."""
    near = relaxed.column_time_s <= relaxed.time_s * KEEP
    label = splits.columns.label[near]
    used = np.asarray((splits.graph.counts[label[:, 1]] > 0).any(axis=0))
    return {rows[i].costs.micro_batch for i in np.unique(label[:, 0])}, used


def _deep_enough(
    view: Question, min_tp: int, max_pipelines: int | None, best: _Best, clock: Clock
) -> tuple[Templates, list[_Row], _Splits, data_split.Relaxation | None]:
    """Mixed templates of growing depth, and all of one class, until the fractional solution has no use for the
    deepest."""
    previous: tuple[Templates, list[_Row], _Splits, data_split.Relaxation | None] | None = None
    for depth in DEPTHS:
        depth = min(depth, view.num_layers)
        graph = _fitting(view, min_tp, depth, best, clock)
        rows = _rows(view, max(1, len(graph.levels)), synced=max_pipelines != 1)
        weight = _micro_batches(view, max_pipelines or max(2, int(view.limits.max()) // depth))
        splits = (
            _split(view, rows, graph, [np.zeros(0)] * len(rows), math.inf, [(1.0, weight)])
            if rows
            else _nothing(view, graph)
        )
        relaxed = _relax(view, splits.columns, max_pipelines, clock)
        clock.templates = max(clock.templates, len(graph.counts))
        found = graph, rows, splits, relaxed
        before = previous[3] if previous is not None else None
        if previous and before and relaxed and relaxed.time_s > before.time_s * (1 - 1e-3):
            return previous
        previous = found
        mixed = graph.num_stages[(graph.counts > 0).sum(axis=1) > 1] if clock.effort >= THOROUGH else graph.num_stages
        if depth == view.num_layers or mixed.max(initial=0) < depth:
            break
        if relaxed is not None:
            used = graph.counts[splits.columns.label[relaxed.used, 1]]
            if clock.effort >= THOROUGH:
                used = used[(used > 0).sum(axis=1) > 1]
            if used.sum(axis=1).max(initial=0) < depth:
                break
    assert previous is not None
    return previous


def _nothing(view: Question, graph: Templates) -> _Splits:
    ints, floats = np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1))
    empty = Columns(
        use=np.zeros((0, len(view.available)), dtype=np.int64),
        size=ints[:, 0],
        sum_s=floats,
        max_s=floats,
        most=ints[:, 0],
        label=np.zeros((0, 2), dtype=np.int64),
    )
    return _Splits(empty, [], graph)


def _fitting(
    view: Question, min_tp: int, depth: int, best: _Best, clock: Clock, classes: NDArray[np.bool_] | None = None
) -> Templates:
    """All templates of a depth if they are few, else those of at most two classes, of the depth that keeps them few;
    and templates of one class as deep as they may be."""
    part = view if classes is None else replace(view, limits=np.where(classes, view.limits, 0))
    longest = LONGEST if clock.effort >= THOROUGH else depth
    longest = min(view.num_layers, view.job.max_depth or view.num_layers, longest)
    alone = _graph(part, min_tp, longest, 1, MOST_TEMPLATES)
    for deep in range(depth, 0, -1):
        for max_classes in dict.fromkeys((len(view.classes), 2)):
            try:
                at_most = ALL_CLASSES if max_classes > 2 else MOST_TEMPLATES if classes is None else DEEP_TEMPLATES
                mixed = _graph(part, min_tp, deep, max_classes, at_most)
            except TooManyTemplates:
                continue
            if max_classes < len(view.classes):
                best.restrictions.add(
                    f"pipelines of more than {max_classes} classes of device and tp only if all are equal"
                )
            units = int(view.limits.sum())
            if classes is not None and len(mixed.levels) < min(view.num_layers, units):
                best.restrictions.add(f"at most {max(deep, DEEP)} stages in a pipeline of several classes")
            if longest > depth and longest < min(view.num_layers, int(view.limits.max())):
                best.restrictions.add(f"at most {longest} stages per pipeline")
            return stage_split.union(mixed, alone, _replicas(part, min_tp, longest))
    return alone


def _replicas(view: Question, min_tp: int, longest: int) -> Ints:
    """Equal shares of all device types, one class of each, and what they are built from: what mixing two classes leaves
    out."""
    kept = [np.zeros((1, len(view.classes)), dtype=np.int64)]
    of_type: dict[str, list[int]] = {}
    for k, unit in enumerate(view.classes):
        if unit.tp >= min_tp and view.limits[k] > 0:
            of_type.setdefault(unit.device_type, []).append(k)
    if len(of_type) < 3 or (view.job.max_classes or 3) < len(of_type):
        return kept[0]
    shares: set[tuple[int, ...]] = set()
    for chosen in itertools.islice(itertools.product(*of_type.values()), REPLICAS):
        units = np.where(np.isin(np.arange(len(view.classes)), chosen), view.limits, 0)
        shares |= {tuple(units // count) for count in range(1, int(units[units > 0].min()) + 1)}
    for share in sorted(shares):
        if sum(share) <= longest and math.prod(n + 1 for n in share) <= ALL_CLASSES:
            kept.append(np.array(list(np.ndindex(*(n + 1 for n in share))), dtype=np.int64))
    return np.concatenate(kept)


def _micro_batches(view: Question, num_pipelines: int) -> float:
    """Micro-batches of a typical pipeline: what a unit of the maximum is worth against one of the sum."""
    size = float(np.median([costs.micro_batch for costs in view.costs]))
    return max(1.0, view.need / size / num_pipelines)


def _relax(view: Question, columns: Columns, max_pipelines: int | None, clock: Clock) -> data_split.Relaxation | None:
    if not len(columns.size):
        return None
    return data_split.relaxed_time(columns, view.available, view.need, max_pipelines=max_pipelines, calls=clock.calls)
