"""Level 2 as a mixed-integer program: the stages of one pipeline under side constraints no recursion can hold.

`planner.stage_split` solves the plain question faster. This module is its second opinion, and the place for layers
pinned to a device class or to each other and for resources added up over stages. Letters of ``docs/model.md``; stages
0..S-1, a_k of them of class k, W_s = min(m, S - s):

    x[l,s]       in {0,1}   layer l runs on stage s
    u[k,s]       in {0,1}   stage s is of class k (given if the device order is)
    r[k,l,s]     in {0,1}   stage s is of class k and recomputes layer l
    y[k,l,s]     in [0,1]   x[l,s] u[k,s]
    h[l,s]       in [0,1]   layer l is the first of stage s
    p[k,k',g,s]  in [0,1]   stage s - 1 is of class k, stage s of class k' and begins at a layer of group g: layers
                            whose left cuts cost the same
    T            >= 0       load of the slowest stage

    min  sum_s v_s + (m - 1) T
    s.t. sum_s x[l,s] = 1                                     each layer once                                       (1)
         sum_l x[l,s] >= 1                                    no empty stage                                        (2)
         x[l+1,s] <= x[l,s] + x[l,s-1]                        order, no gaps                                        (3)
         sum_kl (state + W_s (kept + logits))[k,l] y[k,l,s] - W_s sum_kl saved[k,l] r[k,l,s]
             + W_s sum_l input[l] h[l,s] + workspace_s + rework_s - tied_s + sync buffer
             <= sum_k usable[k] u[k,s]                        memory                                                (4)
         v_s <= T                                             T is the slowest stage                                (5)
         sum_k u[k,s] = 1, sum_s u[k,s] = a_k                 free device order                                     (6)

         v_s = sum_kl ((F + B)[k,l] y[k,l,s] + F[k,l] r[k,l,s]) + c_s + c_{s+1}
         c_s = sum_kk'g cut[k,k',g] p[k,k',g,s], no cut before the first and after the last stage                   (7)
         sum_k y[k,l,s] = x[l,s],  y[k,l,s] <= u[k,s],  r[k,l,s] <= y[k,l,s]                                        (8)
         sum_l h[l,s] = 1,  h[l,s] >= x[l,s] - x[l-1,s],  h[l,s] <= x[l,s]                                          (9)
         sum_kk' p[k,k',g,s] = sum_{l in g} h[l,s],  sum_k'g p[k,k',g,s] = u[k,s-1],  sum_kg p[k,k',g,s] = u[k',s] (10)
         workspace_s >= workspace[k,l] y[k,l,s],  rework_s >= rework[k] r[k,l,s]                                   (11)
         tied_s <= sum_k share[k] y[k,a,s],  tied_s <= sum_k share[k] y[k,b,s]    weights shared by layers a and b (12)

    pinned    x[l,s] = 1,  or y[k',l,s] = 0 for all other classes k'                                               (13)
    together  x[l,s] = x[l',s]                                                                                     (14)
    caps      sum_l amount[l] x[l,s] <= limit for each s,  or sum_ls amount[l] y[k,l,s] <= limit                   (15)

y, h and p are integral where x and u are: (8) leaves one class per stage, (9) one first layer, and (10) a distribution
with unit margins. There is no big M. Bytes are counted in a power of two near 1/65536 of the largest memory (MiB at
80 GiB) and seconds in one near the load of an average stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.plans import Infeasible
from planner.solver import Outcome, run_pulp

if TYPE_CHECKING:
    import pulp

    from planner.cost import Costs

# Class index, first layer, layer after the last, recomputed layers.
StageChoice = tuple[int, int, int, tuple[int, ...]]

# Rounding in sums of bytes; a choice that is short of more fits by the solver's tolerance only and is refused.
ROUNDING_BYTES = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Layer `layer` runs on stage `stage`, or on some stage of class `class_index`."""

    layer: int
    stage: int | None = None
    class_index: int | None = None

    def __post_init__(self) -> None:
        if (self.stage is None) == (self.class_index is None):
            raise ValueError(f"pin of layer {self.layer}: stage {self.stage}, class {self.class_index}; give one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """A resource that layers take: at most `limit` on each stage, or on all stages of one class together.

    Parameters
    ----------
    name
        What it is, for messages.
    amounts
        (L,) taken by each layer, in any unit.
    limit
        In the same unit.
    class_index
        None: on each stage; else the sum over the stages of this class.
    """

    name: str
    amounts: tuple[float, ...]
    limit: float
    class_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """Stages of one pipeline.

    Parameters
    ----------
    value
        Seconds of the planning form, added up from the stages; infinite if time ran out before any split was found.
    bound
        No split is faster.
    stages
        (class index, first layer, layer after the last, recomputed layers) per stage.
    outcome
        What the solver proved, in seconds.
    """

    value: float
    bound: float
    stages: tuple[StageChoice, ...]
    outcome: Outcome


def solve(
    costs: Costs,
    counts: Sequence[int],
    num_micro_batches: int,
    *,
    synced: bool = True,
    order: Sequence[int] | None = None,
    pinned: Sequence[Pin] = (),
    together: Sequence[Sequence[int]] = (),
    caps: Sequence[Cap] = (),
    time_limit: float | None = None,
) -> StageSplit:
    """Split the layers over the units of one pipeline in the least time (planning form). Exact, unless time runs out.

    Parameters
    ----------
    counts
        (K,) units of each class; every unit becomes one stage.
    synced
        Whether a gradient sync buffer is set aside.
    order
        Class of each stage; None: free.
    pinned, together, caps
        Side constraints. `together` has groups of layers that share a stage.
    time_limit
        Seconds.

    Raises
    ------
    Infeasible
        With the stage and the bytes missing there; or, if side constraints are to blame, with those that cannot hold
        together: dropping any one of them would help.
    ValueError
        For an index that does not exist or an order that contradicts the counts.
    """
    chain = _Chain.of(costs, counts, num_micro_batches, synced, order)
    sides: list[_Side] = [*pinned, *(tuple(sorted(set(group))) for group in together), *caps]
    for side in sides:
        _check(chain, side)
    forbidden: list[tuple[StageChoice, ...]] = []
    while True:
        program = _Program(chain, sides)
        program.forbid(forbidden)
        outcome = _in_seconds(run_pulp(program.problem, time_limit), chain.time_unit)
        if outcome.status == "infeasible":
            raise _explanation(chain, sides, time_limit)
        bound = max(outcome.bound or 0.0, 0.0)
        if outcome.value is None:
            return StageSplit(value=math.inf, bound=bound, stages=(), outcome=outcome)
        stages = program.stages()
        value, short = evaluate(costs, stages, num_micro_batches, synced=synced)
        if max(short) <= ROUNDING_BYTES:
            return StageSplit(value=value, bound=min(bound, value), stages=stages, outcome=outcome)
        forbidden.append(stages)


def evaluate(
    costs: Costs, stages: Sequence[StageChoice], num_micro_batches: int, *, synced: bool = True
) -> tuple[float, tuple[float, ...]]:
    """Seconds of the planning form and the bytes each stage is short of (negative: to spare). Exact, layer by layer."""
    loads, short = [], []
    for s, (k, i, j, recomputed) in enumerate(stages):
        in_flight = min(num_micro_batches, len(stages) - s)
        load = sum(costs.forward[k, l] + costs.backward[k, l] for l in range(i, j))
        load += sum(costs.forward[k, l] for l in recomputed)
        if s > 0:
            load += costs.cut[stages[s - 1][0], k, i]
        if s + 1 < len(stages):
            load += costs.cut[k, stages[s + 1][0], j]
        held = sum(costs.state[k, l] for l in range(i, j)) + max(costs.workspace[k, l] for l in range(i, j))
        if costs.tied is not None and i <= costs.tied[0] < j and i <= costs.tied[1] < j:
            held -= costs.tied[2][k]
        held += in_flight * (costs.inputs[i] + sum(costs.kept[k, l] + costs.logits[k, l] for l in range(i, j)))
        held -= in_flight * sum(costs.saved[k, l] for l in recomputed)
        held += (costs.rework[k] if recomputed else 0.0) + (costs.sync_buffer if synced else 0.0)
        loads.append(float(load))
        short.append(float(held - costs.usable[k]))
    return sum(loads) + (num_micro_batches - 1) * max(loads), tuple(short)


_Side = Pin | Cap | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chain:
    """The question without side constraints: `candidates[s]` are the classes stage s may have."""

    costs: Costs
    counts: tuple[int, ...]
    num_micro_batches: int
    synced: bool
    candidates: tuple[tuple[int, ...], ...]
    time_unit: float
    byte_unit: float

    @classmethod
    def of(
        cls, costs: Costs, counts: Sequence[int], num_micro_batches: int, synced: bool, order: Sequence[int] | None
    ) -> _Chain:
        num_classes = len(costs.classes)
        counts = tuple(int(a) for a in counts)
        num_stages = sum(counts)
        if len(counts) != num_classes or min(counts) < 0 or num_stages == 0 or num_micro_batches < 1:
            raise ValueError(f"counts {counts} of {num_classes} classes, {num_micro_batches} micro-batches")
        if order is not None and tuple(list(order).count(k) for k in range(num_classes)) != counts:
            raise ValueError(f"order {tuple(order)} does not have the counts {counts}")
        used = tuple(k for k in range(num_classes) if counts[k])
        for k in used:
            if not costs.measured[k]:
                name = costs.classes[k].device_type
                raise Infeasible(f"{costs.classes[k]}: no times at micro-batch {costs.micro_batch}", device_type=name)
        if num_stages > costs.num_layers:
            raise Infeasible(f"{num_stages} stages need as many layers, there are {costs.num_layers}")
        work = (costs.forward + costs.backward)[list(used)].sum(axis=1).max() / num_stages
        memory = np.abs(costs.usable[list(used)]).max() / 65536.0
        return cls(
            costs=costs,
            counts=counts,
            num_micro_batches=num_micro_batches,
            synced=synced,
            candidates=tuple(used if order is None else (order[s],) for s in range(num_stages)),
            time_unit=_power(work),
            byte_unit=_power(memory),
        )

    @property
    def num_stages(self) -> int:
        return len(self.candidates)


def _power(value: float) -> float:
    return math.ldexp(1.0, math.frexp(value)[1] - 1) if value > 0 else 1.0


class _Program:
    """The formulation of the module docstring; its numbers are the comments."""

    def __init__(self, chain: _Chain, sides: Sequence[_Side], *, purpose: str = "time") -> None:
        """`purpose`: least time, any solution (``exists``), or least bytes short (``short``)."""
        import pulp

        self.chain, self._pulp = chain, pulp
        self.problem = pulp.LpProblem("stages", pulp.LpMinimize)
        costs, num_layers, num_stages = chain.costs, chain.costs.num_layers, chain.num_stages
        self.layers, self.indices = range(num_layers), range(num_stages)
        # Stage s leaves a layer for every stage before and after it.
        self.x = {
            (l, s): self._variable(f"x_{l}_{s}", 1 if s <= l <= num_layers - num_stages + s else 0, integer=True)
            for l in self.layers
            for s in self.indices
        }
        on = [(k, s) for s in self.indices for k in chain.candidates[s]]
        at = [(k, l, s) for k, s in on for l in self.layers]
        self.u = {(k, s): self._variable(f"u_{k}_{s}", 1, integer=True) for k, s in on}
        self.y = {(k, l, s): self._variable(f"y_{k}_{l}_{s}", 1) for k, l, s in at}
        self.r = {
            (k, l, s): self._variable(f"r_{k}_{l}_{s}", 1, integer=True) for k, l, s in at if costs.saved[k, l] > 0
        }
        self.h = {(l, s): self._variable(f"h_{l}_{s}", 1) for l in self.layers for s in self.indices}
        self.short = [self._variable(f"short_{s}", None if purpose == "short" else 0) for s in self.indices]
        self._structure()
        self._memory()
        loads = self._loads()
        slowest = self._variable("T", None)
        for s in self.indices:
            self._add([*loads[s], (slowest, -1.0)], "<=", 0.0)  # (5)
        if purpose == "time":
            everything = [term for load in loads for term in load]
            self.problem.setObjective(self._sum([*everything, (slowest, chain.num_micro_batches - 1.0)]))
        else:
            self.problem.setObjective(self._sum([(short, 1.0) for short in self.short]))
        for side in sides:
            self._restrict(side)

    def _variable(self, name: str, high: int | None, *, integer: bool = False) -> Any:
        return self.problem.add_variable(name, 0, high, self._pulp.LpInteger if integer else self._pulp.LpContinuous)

    def _sum(self, terms: Sequence[tuple[Any, float]]) -> pulp.LpAffineExpression:
        total: dict[Any, float] = {}
        for variable, factor in terms:
            total[variable] = total.get(variable, 0.0) + float(factor)
        return self._pulp.LpAffineExpression([(v, f) for v, f in total.items() if f])

    def _add(self, terms: Sequence[tuple[Any, float]], sense: str, right: float) -> None:
        left = self._sum(terms)
        self.problem += left == right if sense == "=" else (left <= right if sense == "<=" else left >= right)

    def _structure(self) -> None:
        x, u, y, r, h, candidates = self.x, self.u, self.y, self.r, self.h, self.chain.candidates
        for l in self.layers:
            self._add([(x[l, s], 1) for s in self.indices], "=", 1)  # (1)
        for s in self.indices:
            self._add([(x[l, s], 1) for l in self.layers], ">=", 1)  # (2)
            for l in self.layers[:-1]:
                before = [(x[l, s - 1], -1)] if s else []
                self._add([(x[l + 1, s], 1), (x[l, s], -1), *before], "<=", 0)  # (3)
            self._add([(u[k, s], 1) for k in candidates[s]], "=", 1)  # (6)
            self._add([(h[l, s], 1) for l in self.layers], "=", 1)  # (9)
            for l in self.layers:
                left = [(x[l - 1, s], 1)] if l else []
                self._add([(h[l, s], 1), (x[l, s], -1), *left], ">=", 0)  # (9)
                self._add([(h[l, s], 1), (x[l, s], -1)], "<=", 0)  # (9)
                self._add([*((y[k, l, s], 1) for k in candidates[s]), (x[l, s], -1)], "=", 0)  # (8)
        for k, count in enumerate(self.chain.counts):
            self._add([(u[k, s], 1) for s in self.indices if (k, s) in u], "=", count)  # (6)
        for (k, l, s), both in y.items():
            self._add([(both, 1), (u[k, s], -1)], "<=", 0)  # (8)
            if (k, l, s) in r:
                self._add([(r[k, l, s], 1), (both, -1)], "<=", 0)  # (8)

    def _memory(self) -> None:
        costs, unit, candidates = self.chain.costs, self.chain.byte_unit, self.chain.candidates
        for s in self.indices:
            flight = min(self.chain.num_micro_batches, self.chain.num_stages - s)
            per_layer = (costs.state + flight * (costs.kept + costs.logits)) / unit
            workspace, rework = self._variable(f"workspace_{s}", None), self._variable(f"rework_{s}", None)
            terms = [(self.y[k, l, s], per_layer[k, l]) for k in candidates[s] for l in self.layers]
            terms += [(v, -flight * costs.saved[k, l] / unit) for (k, l, t), v in self.r.items() if t == s]
            terms += [(self.h[l, s], flight * costs.inputs[l] / unit) for l in self.layers]
            terms += [(workspace, 1.0), (rework, 1.0)]
            for k in candidates[s]:
                for l in self.layers:
                    self._add([(self.y[k, l, s], costs.workspace[k, l] / unit), (workspace, -1)], "<=", 0)  # (11)
                    if (k, l, s) in self.r:
                        self._add([(self.r[k, l, s], costs.rework[k] / unit), (rework, -1)], "<=", 0)  # (11)
            if costs.tied is not None:
                tied = self._variable(f"tied_{s}", None)
                for l in costs.tied[:2]:
                    shares = [(self.y[k, l, s], costs.tied[2][k] / unit) for k in candidates[s]]
                    self._add([*shares, (tied, -1.0)], ">=", 0)  # (12)
                terms.append((tied, -1.0))
            buffer = costs.sync_buffer if self.chain.synced else 0.0
            terms += [(self.u[k, s], (buffer - costs.usable[k]) / unit) for k in candidates[s]]
            self._add([*terms, (self.short[s], -1.0)], "<=", 0)  # (4)

    def _loads(self) -> list[list[tuple[Any, float]]]:
        costs, unit, candidates = self.chain.costs, self.chain.time_unit, self.chain.candidates
        work = (costs.forward + costs.backward) / unit
        loads: list[list[tuple[Any, float]]] = []
        for s in self.indices:
            load = [(self.y[k, l, s], work[k, l]) for k in candidates[s] for l in self.layers]
            load += [(v, costs.forward[k, l] / unit) for (k, l, t), v in self.r.items() if t == s]
            loads.append(load)
        groups: dict[bytes, list[int]] = {}
        for l in self.layers:
            groups.setdefault(costs.cut[:, :, l].tobytes(), []).append(l)
        for s in self.indices[1:]:
            p = {
                (a, b, g): self._variable(f"p_{a}_{b}_{g}_{s}", 1 if math.isfinite(costs.cut[a, b, members[0]]) else 0)
                for a in candidates[s - 1]
                for b in candidates[s]
                for g, members in enumerate(groups.values())
            }
            for g, members in enumerate(groups.values()):
                begins = [(self.h[l, s], -1.0) for l in members]
                self._add([*((v, 1.0) for key, v in p.items() if key[2] == g), *begins], "=", 0)  # (10)
                for (a, b, at), v in p.items():
                    if at == g and math.isfinite(costs.cut[a, b, members[0]]):  # (7): both ends
                        loads[s - 1].append((v, costs.cut[a, b, members[0]] / unit))
                        loads[s].append((v, costs.cut[a, b, members[0]] / unit))
            for k in candidates[s - 1]:
                self._add([*((v, 1.0) for key, v in p.items() if key[0] == k), (self.u[k, s - 1], -1)], "=", 0)  # (10)
            for k in candidates[s]:
                self._add([*((v, 1.0) for key, v in p.items() if key[1] == k), (self.u[k, s], -1)], "=", 0)  # (10)
        return loads

    def _restrict(self, side: _Side) -> None:
        if isinstance(side, Pin):  # (13)
            if side.stage is not None:
                self._add([(self.x[side.layer, side.stage], 1)], "=", 1)
            else:
                elsewhere = [(v, 1) for (k, l, _), v in self.y.items() if l == side.layer and k != side.class_index]
                self._add(elsewhere, "=", 0)
        elif isinstance(side, Cap):  # (15)
            unit = max((abs(a) for a in side.amounts), default=0.0) or 1.0
            if side.class_index is None:
                for s in self.indices:
                    self._add([(self.x[l, s], a / unit) for l, a in enumerate(side.amounts)], "<=", side.limit / unit)
            else:
                terms = [(v, side.amounts[l] / unit) for (k, l, _), v in self.y.items() if k == side.class_index]
                self._add(terms, "<=", side.limit / unit)
        else:  # (14)
            for l in side[1:]:
                for s in self.indices:
                    self._add([(self.x[side[0], s], 1), (self.x[l, s], -1)], "=", 0)

    def forbid(self, choices: Sequence[tuple[StageChoice, ...]]) -> None:
        """Exclude exactly these solutions."""
        for stages in choices:
            chosen = [self.u[k, s] for s, (k, _, _, _) in enumerate(stages)]
            chosen += [self.x[l, s] for s, (_, i, j, _) in enumerate(stages) for l in range(i, j)]
            recomputed = {(k, l, s) for s, (k, _, _, layers) in enumerate(stages) for l in layers}
            others = [(v, 1.0 if key in recomputed else -1.0) for key, v in self.r.items()]
            self._add([*((v, 1.0) for v in chosen), *others], "<=", len(chosen) + len(recomputed) - 1)

    def stages(self) -> tuple[StageChoice, ...]:
        """The integer solution: x, u and r rounded."""
        out = []
        for s in self.indices:
            k = max(self.chain.candidates[s], key=lambda k: self.u[k, s].value() or 0.0)
            layers = [l for l in self.layers if round(self.x[l, s].value() or 0.0)]
            assert layers == list(range(layers[0], layers[-1] + 1))
            recomputed = tuple(l for l in layers if (k, l, s) in self.r and round(self.r[k, l, s].value() or 0.0))
            out.append((k, layers[0], layers[-1] + 1, recomputed))
        assert out[0][1] == 0 and out[-1][2] == len(self.layers)
        assert all(a[2] == b[1] for a, b in pairwise(out))
        return tuple(out)


def _in_seconds(outcome: Outcome, unit: float) -> Outcome:
    return Outcome(
        status=outcome.status,
        value=None if outcome.value is None else outcome.value * unit,
        bound=None if outcome.bound is None else outcome.bound * unit,
    )


def _check(chain: _Chain, side: _Side) -> None:
    layers: Sequence[int] = side if isinstance(side, tuple) else (side.layer,) if isinstance(side, Pin) else ()
    for l in layers:
        if not 0 <= l < chain.costs.num_layers:
            raise ValueError(f"{_name(chain, side)}: layer {l} is not among 0 to {chain.costs.num_layers - 1}")
    if isinstance(side, tuple):
        return
    if side.class_index is not None and not 0 <= side.class_index < len(chain.costs.classes):
        raise ValueError(f"class {side.class_index} is not among 0 to {len(chain.costs.classes) - 1}")
    if isinstance(side, Pin) and side.stage is not None and not 0 <= side.stage < chain.num_stages:
        raise ValueError(f"{_name(chain, side)}: there are {chain.num_stages} stages")
    if isinstance(side, Cap) and len(side.amounts) != chain.costs.num_layers:
        raise ValueError(f"{_name(chain, side)}: {len(side.amounts)} amounts for {chain.costs.num_layers} layers")
    if isinstance(side, Cap) and not all(map(math.isfinite, (*side.amounts, side.limit))):
        raise ValueError(f"{_name(chain, side)}: an amount or the limit is not finite")


def _name(chain: _Chain, side: _Side) -> str:
    if isinstance(side, Pin):
        place = f"stage {side.stage}" if side.class_index is None else f"{chain.costs.classes[side.class_index]}"
        return f"layer {side.layer} on {place}"
    if isinstance(side, Cap):
        place = "on each stage" if side.class_index is None else f"on {chain.costs.classes[side.class_index]} together"
        return f"{side.name} at most {side.limit:g} {place}"
    return f"layers {', '.join(map(str, side))} on one stage"


def _explanation(chain: _Chain, sides: Sequence[_Side], time_limit: float | None) -> Infeasible:
    """Find what cannot be: the memory alone, or side constraints that conflict, by dropping one at a time."""

    def impossible(some: Sequence[_Side]) -> bool:
        return run_pulp(_Program(chain, some, purpose="exists").problem, time_limit).status == "infeasible"

    if not sides or impossible(()):
        return _missing_memory(chain, time_limit)
    conflict = list(sides)
    for side in sides:
        rest = [other for other in conflict if other is not side]
        if impossible(rest):
            conflict = rest
    names = "; ".join(_name(chain, side) for side in conflict)
    if len(conflict) == 1:
        return Infeasible(f"cannot hold: {names}", remedy="drop it")
    return Infeasible(f"cannot hold together: {names}", remedy="drop one of them")


def _missing_memory(chain: _Chain, time_limit: float | None) -> Infeasible:
    costs = chain.costs
    units = " + ".join(f"{count} {costs.classes[k]}" for k, count in enumerate(chain.counts) if count)
    program = _Program(chain, (), purpose="short")
    outcome = run_pulp(program.problem, time_limit)
    if outcome.status == "infeasible":
        return Infeasible(f"no way to line up {units}: some have no link between them")
    if outcome.value is None:
        return Infeasible(f"{costs.num_layers} layers do not fit on {units}")
    stages = program.stages()
    _, short = evaluate(costs, stages, chain.num_micro_batches, synced=chain.synced)
    s = max(range(len(short)), key=lambda s: short[s])
    k, i, _, _ = stages[s]
    return Infeasible(
        f"{costs.num_layers} layers do not fit on {units} with micro-batches of {costs.micro_batch}",
        stage=s,
        layer=i,
        device_type=costs.classes[k].device_type,
        short_bytes=short[s],
    )
