"""Schedules as data: what each rank of a pipeline runs, in order, as values that print and parse (``0F3``).

A *rank* is the unit that runs one or more stages; stages are numbered along the pipeline. Letters: S stages, m
micro-batches, s a stage, k a micro-batch, W_s micro-batches in flight (held from the start of their F to the end of
their B or W).

    0F0 0F1 0B0 0F2 0B1 0B2        1F1B, S = 2, m = 3: W = (2, 1)
    1F0 1B0 1F1 1B1 1F2 1B2

A list is made by a generator (`one_f_one_b`, `zero_bubble`, ...), by `of_plan`, or written by hand and parsed. Two
passes complete it: `with_transfers` adds SEND and RECV, `with_reductions` REDUCE_GRAD and UPDATE; `action_lists` does
all of it for a plan. Two checks judge any list: `validate` looks at one pipeline's list, `deadlock` plays the lists of
all pipelines together.

What an executor may do with a list: everything from running it strictly in order, waiting at each SEND and RECV until
both ends are there, to starting sends and posting receives ahead and waiting only where a compute action needs what was
received. `with_transfers` gives an order that is safe for all of these. REDUCE_GRAD is launched in list order; UPDATE
waits for all of the rank's reductions.
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.files import cached, did_you_mean

if TYPE_CHECKING:
    from planner.plans import Pipeline, Plan


class Kind(StrEnum):
    """What an action does. A backward pass is B, or split: I (for the inputs) and later W (for the weights)."""

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    UPDATE = "UPDATE"

    __hash__ = str.__hash__  # Enum's own is a Python call, and actions are keys everywhere


COMPUTE = frozenset((Kind.F, Kind.B, Kind.I, Kind.W))
TRANSFERS = frozenset((Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B))
_ACTION = re.compile(rf"(\d+)({'|'.join(Kind)})(\d*)", re.ASCII)


class Action(NamedTuple):
    """One thing a rank does: ``0F3``, ``1B0``, ``2SEND_F1``, ``0REDUCE_GRAD2``, ``0UPDATE``.

    Parameters
    ----------
    stage
        The stage that runs it. A transfer is written at both ends: ``0SEND_F3`` (output of ``0F3``) arrives as
        ``1RECV_F3``, ``1SEND_B3`` (gradient from ``1B3`` or ``1I3``) as ``0RECV_B3``.
    index
        Micro-batch; of a REDUCE_GRAD the reduction; None for UPDATE.
    """

    stage: int
    kind: Kind
    index: int | None = None  # type: ignore[assignment]  # shadows tuple.index, which nobody calls on an action

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.index is None else self.index}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`; ``ValueError`` says what is wrong with any other."""
        text = text.strip()
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no action, expected stage, kind ({', '.join(Kind)}) and index, as in 0F3")
        stage, kind, index = match.groups()
        if kind == Kind.UPDATE and index:
            raise ValueError(f"{text!r} has an index, expected {stage}UPDATE")
        if kind != Kind.UPDATE and not index:
            raise ValueError(f"{text!r} lacks its index, expected {text}0 for the first")
        return cls(int(stage), Kind(kind), int(index) if index else None)

    @property
    def is_compute(self) -> bool:
        """Whether it is F, B, I or W."""
        return self.kind in COMPUTE

    @property
    def is_transfer(self) -> bool:
        """Whether it is one end of a transfer."""
        return self.kind in TRANSFERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The ordered actions of every rank of one pipeline.

    Parameters
    ----------
    ranks
        Actions per rank, in order. Where SEND and RECV are not listed they are implied: an action waits for what it
        needs.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in ("num_stages", "num_micro_batches"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: {getattr(self, key)} is less than 1")

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @classmethod
    def parse(cls, text: str | Iterable[str], name: str = "custom") -> Schedule:
        """The schedule that prints as `text`: a line per rank, actions separated by blanks, ``#`` starts a comment.

        The numbers of stages and micro-batches are taken from the highest that occur.
        """
        lines = text.splitlines() if isinstance(text, str) else list(text)
        cells = [(f"line {n}", line.partition("#")[0].split()) for n, line in enumerate(lines, 1)]
        return cls._from_cells(cells, name)

    @classmethod
    def from_csv(cls, text: str, name: str = "custom") -> Schedule:
        """The schedule in the form that torch.distributed.pipelining calls compute_only: a row per rank, a cell per
        action, empty cells for steps in which the rank idles."""
        rows = enumerate(csv.reader(io.StringIO(text)), 1)
        return cls._from_cells([(f"row {n}", [cell for cell in row if cell.strip()]) for n, row in rows], name)

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a list that someone wrote: ``.csv`` as in `from_csv`, anything else as in `parse`."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
        read = cls.from_csv if Path(path).suffix.lower() == ".csv" else cls.parse
        return read(text, str(path))

    @classmethod
    def _from_cells(cls, lines: Iterable[tuple[str, list[str]]], name: str) -> Schedule:
        ranks = []
        for where, cells in lines:
            try:
                actions = tuple(Action.parse(cell) for cell in cells)
            except ValueError as error:
                raise ValueError(f"{name}: {where}: {error}") from None
            if actions:
                ranks.append(actions)
        if not any(action.is_compute for actions in ranks for action in actions):
            raise ValueError(f"{name}: no actions, expected a line per rank such as 0F0 0F1 0B0 0B1")
        return cls(
            name=name,
            num_stages=1 + max(action.stage for actions in ranks for action in actions),
            num_micro_batches=1 + max(a.index or 0 for actions in ranks for a in actions if a.is_compute),
            ranks=tuple(ranks),
        )

    def to_csv(self) -> str:
        """The compute actions as torch.distributed.pipelining reads them (compute_only): a row per rank."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.compute_only().ranks)

    def compute_only(self) -> Schedule:
        """The same order of F, B, I and W without anything else."""
        return replace(self, ranks=tuple(tuple(a for a in actions if a.is_compute) for actions in self.ranks))

    def rank_of(self, stage: int) -> int:
        """The rank that runs `stage`."""
        homes = self._homes()
        if stage not in homes:
            raise ValueError(f"schedule {self.name!r}: no rank runs stage {stage}")
        return homes[stage]

    @cached
    def in_flight(self, stage: int) -> int:
        """Most micro-batches `stage` holds at once: F begun, B (or W) not ended."""
        return max(accumulate(map(_held, self._of_stage(stage))))

    @cached
    def warm_up(self, stage: int) -> int:
        """Forwards `stage` runs ahead of its first forward-backward pair: 0 for ``0F0 0B0 0F1 0B1``."""
        kinds = [action.kind for action in self._of_stage(stage)]
        first = next((n for n, kind in enumerate(kinds) if kind in (Kind.B, Kind.I)), len(kinds))
        return max(0, kinds[:first].count(Kind.F) - 1)

    def _of_stage(self, stage: int) -> list[Action]:
        return [action for action in self.ranks[self.rank_of(stage)] if action.stage == stage]

    @cached
    def _homes(self) -> dict[int, int]:
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    @cached
    def _listed(self) -> frozenset[Action]:
        return frozenset(action for actions in self.ranks for action in actions)

    @cached
    def _needs(self) -> dict[Action, tuple[Action, ...]]:
        """What must be done before each action may start."""
        listed = self._listed()
        return {action: _needed(action, self.num_stages, listed) for actions in self.ranks for action in actions}


def _held(action: Action) -> int:
    return (action.kind == Kind.F) - (action.kind in (Kind.B, Kind.W))


# Generators ---------------------------------------------------------------------------------------------------------


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards: every stage holds all m micro-batches."""
    return _depths("gpipe", num_stages, num_micro_batches, [num_micro_batches] * num_stages)


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B: W_s = min(m, S - s), the least that keeps equal stages busy when transfers are free."""
    return _depths("1f1b", num_stages, num_micro_batches, range(num_stages, 0, -1))


def eager_one_f_one_b(num_stages: int, num_micro_batches: int, warm_up: Sequence[int] | None = None) -> Schedule:
    """1F1B with forwards that run ahead, so that transfers hide behind them: W_s = min(m, warm_up[s] + 1).

    Parameters
    ----------
    warm_up
        Forwards per stage before its first forward-backward pair; 2 (S - 1 - s) if None, where 1F1B has S - 1 - s.
    """
    if warm_up is None:
        warm_up = range(2 * (num_stages - 1), -1, -2)
    return _depths("eager-1f1b", num_stages, num_micro_batches, [ahead + 1 for ahead in warm_up])


def depths(num_stages: int, num_micro_batches: int, in_flight: Sequence[int]) -> Schedule:
    """Stage s runs W_s - 1 forwards, then one forward and one backward in turn, then the backwards that are left.

    Parameters
    ----------
    in_flight
        W_s of every stage, never more than that of the stage before; m where it is larger.
    """
    return _depths("depths", num_stages, num_micro_batches, in_flight)


def interleaved(num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """Interleaved 1F1B: rank r runs the stages r, r + R, r + 2R, ... of the S = R x `num_chunks` stages.

    Micro-batches advance in groups: a rank runs all of a group through its first stage, then through its second, and so
    on; the backwards take the same groups, last stage first. Rank r runs (chunks - 1) x g + 2 (R - 1 - r) forwards
    before its first forward-backward pair, g the largest group, and so holds at most one more than that, all its
    stages together. There are max(1, m // R) groups as equal as can be, the larger ones first: groups of R where R
    divides m, else larger ones, since after a group of fewer than R ranks idle or wait for each other in a circle.

    References
    ----------
    Narayanan et al., Efficient large-scale language model training on GPU clusters using Megatron-LM, 2021.
    """
    for key, number in (("num_ranks", num_ranks), ("num_chunks", num_chunks), ("num_micro_batches", num_micro_batches)):
        if number < 1:
            raise ValueError(f"{key}: {number} is less than 1")
    groups = _groups(num_micro_batches, max(1, num_micro_batches // num_ranks))
    ranks = tuple(tuple(_interleaving(r, num_ranks, num_chunks, groups)) for r in range(num_ranks))
    return Schedule(
        name="interleaved-1f1b", num_stages=num_ranks * num_chunks, num_micro_batches=num_micro_batches, ranks=ranks
    )


def zero_bubble(
    num_stages: int,
    num_micro_batches: int,
    in_flight: Sequence[int] | None = None,
    split: Collection[int] | None = None,
) -> Schedule:
    """ZB-H1: 1F1B with the backward split into I and W; the W wait for the idle times at the end.

    I and F follow the order of 1F1B, so gradients reach the stage before without waiting for any W. A stage runs a W
    only when it may not hold another micro-batch, or when no forward is left.

    Parameters
    ----------
    in_flight
        Most micro-batches each stage may hold; min(m, S) for all if None, the memory of the first stage under 1F1B.
        With min(m, S - s), the memory of 1F1B on every stage, each W follows its I.
    split
        Stages whose backward is split, all if None; the others run B in the order of 1F1B.

    References
    ----------
    Qi et al., Zero bubble pipeline parallelism, 2024.
    """
    m = num_micro_batches
    limits = [num_stages] * num_stages if in_flight is None else in_flight
    pairs = zip(range(num_stages, 0, -1), _per_stage(limits, num_stages), strict=True)
    ahead = _checked_depths(num_stages, m, [min(depth, limit) for depth, limit in pairs])
    parted = range(num_stages) if split is None else split
    for s in parted:
        if not 0 <= s < num_stages:
            raise ValueError(f"split: stage {s} is not among 0 ... {num_stages - 1}")
    ranks = tuple(
        tuple(_weights_last(s, m, ahead[s], limits[s]) if s in parted else _alternating(s, m, ahead[s]))
        for s in range(num_stages)
    )
    return Schedule(name="zero-bubble", num_stages=num_stages, num_micro_batches=m, ranks=ranks)


def _depths(name: str, num_stages: int, m: int, in_flight: Sequence[int]) -> Schedule:
    held = _checked_depths(num_stages, m, in_flight)
    ranks = tuple(tuple(_alternating(s, m, held[s])) for s in range(num_stages))
    return Schedule(name=name, num_stages=num_stages, num_micro_batches=m, ranks=ranks)


def _per_stage(in_flight: Sequence[int], num_stages: int) -> Sequence[int]:
    if len(in_flight) != num_stages:
        raise ValueError(f"in_flight: {len(in_flight)} entries, expected one for each of {num_stages} stages")
    return in_flight


def _checked_depths(num_stages: int, m: int, in_flight: Sequence[int]) -> list[int]:
    held = [min(m, depth) for depth in _per_stage(in_flight, num_stages)]
    for s, depth in enumerate(held):
        if depth < 1 <= m:
            raise ValueError(f"in_flight[{s}]: {depth} is less than 1")
        if s and depth > held[s - 1]:
            # Stage s would wait for a forward that stage s - 1 runs only after a backward of stage s.
            raise ValueError(
                f"in_flight[{s}]: {depth} is more than the {held[s - 1]} of the stage before, which would wait for it"
            )
    return held


def _alternating(s: int, m: int, held: int) -> Iterator[Action]:
    yield from (Action(s, Kind.F, k) for k in range(held))
    for k in range(m):
        yield Action(s, Kind.B, k)
        if k + held < m:
            yield Action(s, Kind.F, k + held)


def _weights_last(s: int, m: int, ahead: int, limit: int) -> Iterator[Action]:
    weights = 0
    yield from (Action(s, Kind.F, k) for k in range(ahead))
    for k in range(m):
        yield Action(s, Kind.I, k)
        forward = k + ahead  # also the micro-batches begun so far
        if forward >= m or forward - weights == limit:
            yield Action(s, Kind.W, weights)
            weights += 1
        if forward < m:
            yield Action(s, Kind.F, forward)
    yield from (Action(s, Kind.W, k) for k in range(weights, m))


def _groups(m: int, num_groups: int) -> list[range]:
    """Micro-batches 0 ... m - 1 in groups as equal as can be, the larger ones first."""
    size, larger = divmod(m, num_groups)
    ends = list(accumulate(size + (n < larger) for n in range(num_groups)))
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _interleaving(r: int, num_ranks: int, num_chunks: int, groups: Sequence[range]) -> Iterator[Action]:
    passes = [(chunk, k) for group in groups for chunk in range(num_chunks) for k in group]
    forwards = [Action(chunk * num_ranks + r, Kind.F, k) for chunk, k in passes]
    backwards = [Action((num_chunks - 1 - chunk) * num_ranks + r, Kind.B, k) for chunk, k in passes]
    ahead = min(len(passes), (num_chunks - 1) * len(groups[0]) + 2 * (num_ranks - 1 - r))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        yield forward
        yield backward
    yield from backwards[len(passes) - ahead :]


# Of a plan ----------------------------------------------------------------------------------------------------------

NAMES = ("plan", "gpipe", "1f1b", "eager-1f1b", "zero-bubble")


class Launch(NamedTuple):
    """One all-reduce of a plan; its index is its place in the order in which every rank launches them.

    Parameters
    ----------
    block
        Index in ``(*plan.blocks, *plan.tied_blocks)``.
    chunk
        Position in the block, the last chunk (of its last layers) first.
    members
        (pipeline, stage) of every owner.
    """

    block: int
    chunk: int
    members: tuple[tuple[int, int], ...]


def of_plan(pipeline: Pipeline, name: str = "plan") -> Schedule:
    """The schedule of one pipeline of a plan.

    Parameters
    ----------
    name
        ``plan``: 1F1B with the depths the plan chose and reserved memory for. ``zero-bubble`` stays within the same
        depths; ``gpipe`` and ``eager-1f1b`` may hold more than the plan has memory for.
    """
    num_stages, m = len(pipeline.stages), pipeline.num_micro_batches
    in_flight = [stage.in_flight for stage in pipeline.stages]
    match name:
        case "plan":
            return _depths("plan", num_stages, m, in_flight)
        case "gpipe":
            return gpipe(num_stages, m)
        case "1f1b":
            return one_f_one_b(num_stages, m)
        case "eager-1f1b":
            return eager_one_f_one_b(num_stages, m)
        case "zero-bubble":
            return zero_bubble(num_stages, m, in_flight)
    if name.startswith("interleaved"):
        raise ValueError(f"schedule {name!r} needs several stages per unit, and each unit of a plan runs one")
    raise ValueError(f"schedule {name!r} is not among {did_you_mean(name, NAMES)}")


def launches(plan: Plan) -> tuple[Launch, ...]:
    """Every all-reduce of the plan in launch order: blocks from the last layer to the first, tied weights last.

    With one order on all ranks, no two ranks wait for each other in two groups at once.

    Raises
    ------
    ValueError
        An owner of a block does not run its layers.
    """
    for b, block in enumerate(plan.blocks):
        for p, s in enumerate(block.owners):
            (i, j), (first, end) = plan.pipelines[p].stages[s].layers, block.layers
            if not i <= first < end <= j:
                raise ValueError(f"blocks[{b}].layers: [{first}, {end}), pipeline {p} stage {s} runs [{i}, {j})")
    for b, each in enumerate(plan.tied_blocks):
        for p, s in each.owners:
            i, j = plan.pipelines[p].stages[s].layers
            if not any(i <= l < j for l in each.layers):
                raise ValueError(f"tied_blocks[{b}].layers: {each.layers}, pipeline {p} stage {s} runs [{i}, {j})")
    blocks = [(b, block.num_chunks, tuple(enumerate(block.owners))) for b, block in enumerate(plan.blocks)]
    tied = [(b, block.num_chunks, block.owners) for b, block in enumerate(plan.tied_blocks, len(plan.blocks))]
    return tuple(
        Launch(b, chunk, members)
        for b, num_chunks, members in (*reversed(blocks), *tied)
        for chunk in reversed(range(num_chunks))
    )


def action_lists(
    plan: Plan, schedules: Sequence[Schedule] | str = "plan"
) -> tuple[tuple[Schedule, ...], dict[int, tuple[tuple[int, int], ...]]]:
    """Complete lists of all pipelines (transfers, reductions, updates), and the (pipeline, rank) members of every
    reduction; what an executor runs and `check_deadlock` checks."""
    if isinstance(schedules, str):
        schedules = [of_plan(pipeline, schedules) for pipeline in plan.pipelines]
    order = list(enumerate(launches(plan)))
    complete = tuple(
        with_reductions(
            with_transfers(schedule),
            {index: [s for q, s in launch.members if q == p] for index, launch in order},
        )
        for p, schedule in enumerate(schedules)
    )
    groups = {
        index: tuple(dict.fromkeys((p, schedules[p].rank_of(s)) for p, s in launch.members)) for index, launch in order
    }
    return complete, groups


# Passes -------------------------------------------------------------------------------------------------------------


def with_transfers(schedule: Schedule) -> Schedule:
    """The schedule with SEND right after the compute action that makes what is sent, RECV right before the one that
    needs it. Stages on one rank hand over without.

    Written down without thought, 1F1B has two neighbours that both send first. So the transfers follow one sequence,
    of which each list is a part, and the lists finish even if every SEND and RECV waits for its other end. That mostly
    takes no more than the right order of a RECV and a SEND between the same two compute actions. Where it takes more
    (a stage that runs three or more forwards further ahead than the next one, interleaved stages), a RECV stands
    earlier; a SEND never stands later than the next compute action.

    Raises
    ------
    ValueError
        The schedule is not valid, lists transfers already, or its ranks wait for each other in a circle.
    """
    listed = next((a for actions in schedule.ranks for a in actions if a.is_transfer), None)
    if listed is not None:
        raise ValueError(f"schedule {schedule.name!r}: lists transfers already, such as {listed}")
    validate(schedule)
    return replace(schedule, ranks=tuple(map(tuple, _Gaps(schedule).filled())))


class _Gaps:
    """Plays the schedule in steps of one compute action per rank and writes each transfer down, at both ends, when it
    is made: one sequence of transfers, of which each rank's list is a part."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.home = schedule._homes()
        self.needs = schedule._needs()
        self.lists: list[list[Action]] = [[] for _ in schedule.ranks]
        self.todo = [deque(actions) for actions in schedule.ranks]
        self.here: list[set[Action]] = [set() for _ in schedule.ranks]  # computed or received
        self.unsent: dict[Action, Action] = {}  # made for another rank -> what needs it there, in the order made

    def filled(self) -> list[list[Action]]:
        while any(self.todo):
            sending = {self.home[made.stage] for made in self.unsent}
            running = [rank for rank in range(len(self.todo)) if rank not in sending and self.is_fed(rank)]
            for rank in running:
                self.run(rank)
            due = [made for made, user in self.unsent.items() if self.todo[self.home[user.stage]][0] == user]
            if not running and not due:
                due = list(self.unsent)[:1]  # every rank stands at a send that nobody is about to receive
                if not due:
                    check_deadlock([self.schedule])
            for made in due:
                self.move(made)
        return self.lists

    def is_fed(self, rank: int) -> bool:
        todo = self.todo[rank]
        return bool(todo) and self.here[rank].issuperset(self.needs[todo[0]])

    def run(self, rank: int) -> None:
        action = self.todo[rank].popleft()
        self.lists[rank].append(action)
        self.here[rank].add(action)
        user = _user(action, self.schedule)
        if user is not None and self.home[user.stage] != rank:
            self.unsent[action] = user

    def move(self, made: Action) -> None:
        user = self.unsent.pop(made)
        sender, receiver = self.home[made.stage], self.home[user.stage]
        send = Action(made.stage, Kind.SEND_F if made.kind == Kind.F else Kind.SEND_B, made.index)
        self.lists[sender].append(send)
        self.lists[receiver].append(other_end(send))
        self.here[receiver].add(made)


def with_reductions(schedule: Schedule, reductions: Mapping[int, Collection[int]]) -> Schedule:
    """The schedule with its REDUCE_GRAD, each as soon as its stage is done and those before it are launched, and one
    UPDATE per stage at the end. What the list has of them already stays where it is.

    Parameters
    ----------
    reductions
        Index -> stages of this pipeline that take part (none: left out), in the one order in which all ranks of all
        pipelines launch them. Where several take part (tied weights), each of their ranks launches it once, behind
        everything it computes, since that may be what the others still wait for.
    """
    for index, stages in reductions.items():
        for s in stages:
            if not 0 <= s < schedule.num_stages:
                raise ValueError(f"reduction {index}: stage {s} is not among 0 ... {schedule.num_stages - 1}")
    ranks = (tuple(_with_tail(schedule, rank, reductions)) for rank in range(len(schedule.ranks)))
    return replace(schedule, ranks=tuple(ranks))


def _with_tail(schedule: Schedule, rank: int, reductions: Mapping[int, Collection[int]]) -> Iterator[Action]:
    actions = schedule.ranks[rank]
    ends = {a.stage: n for n, a in enumerate(actions) if a.is_compute or a.is_transfer}
    written = {a.index for a in actions if a.kind == Kind.REDUCE_GRAD}
    after: dict[int, list[Action]] = {}
    latest = 0
    for index, stages in reductions.items():
        members = [s for s in stages if s in ends]
        if members and index not in written:
            last = max(members, key=ends.__getitem__)
            latest = max(latest, ends[last] if len(set(stages)) == 1 else max(ends.values()))
            after.setdefault(latest, []).append(Action(last, Kind.REDUCE_GRAD, index))
    for n, action in enumerate(actions):
        yield action
        yield from after.get(n, ())
    updates = (Action(s, Kind.UPDATE) for s in sorted(ends))
    yield from (update for update in updates if update not in actions)


# What waits for what ------------------------------------------------------------------------------------------------


def _gradient(stage: int, k: int | None, listed: frozenset[Action]) -> Action:
    """The action that makes the gradient for the stage before: I where the backward is split, else B."""
    split = Action(stage, Kind.I, k)
    return split if split in listed else Action(stage, Kind.B, k)


def _needed(action: Action, num_stages: int, listed: frozenset[Action]) -> tuple[Action, ...]:
    """What must be done before `action` may start: its RECV if listed, else what the neighbour makes for it."""
    s, kind, k = action
    if kind == Kind.F:
        if s == 0:
            return ()
        receive = Action(s, Kind.RECV_F, k)
        return (receive if receive in listed else Action(s - 1, Kind.F, k),)
    if kind in (Kind.B, Kind.I):
        forward = Action(s, Kind.F, k)
        if s == num_stages - 1:
            return (forward,)
        receive = Action(s, Kind.RECV_B, k)
        return forward, receive if receive in listed else _gradient(s + 1, k, listed)
    if kind == Kind.W:
        return (Action(s, Kind.I, k),)
    if kind == Kind.SEND_F:
        return (Action(s, Kind.F, k),)
    if kind == Kind.SEND_B:
        return (_gradient(s, k, listed),)
    return (other_end(action),) if kind in TRANSFERS else ()


def _user(action: Action, schedule: Schedule) -> Action | None:
    """What the neighbouring stage makes of the result of `action`."""
    s, kind, k = action
    if kind == Kind.F and s < schedule.num_stages - 1:
        return Action(s + 1, Kind.F, k)
    if kind in (Kind.B, Kind.I) and s > 0:
        return _gradient(s - 1, k, schedule._listed())
    return None


_ENDS = {Kind.SEND_F: Kind.RECV_F, Kind.RECV_F: Kind.SEND_F, Kind.SEND_B: Kind.RECV_B, Kind.RECV_B: Kind.SEND_B}


def other_end(transfer: Action) -> Action:
    """The RECV of a SEND, the SEND of a RECV."""
    later = transfer.kind in (Kind.SEND_F, Kind.RECV_B)
    return Action(transfer.stage + (1 if later else -1), _ENDS[transfer.kind], transfer.index)


# Checks -------------------------------------------------------------------------------------------------------------


def validate(schedule: Schedule, limits: Sequence[int] | None = None) -> None:
    """Check one pipeline's list: complete, nothing twice, every action after what it needs on its own rank.

    Each stage is on one rank and runs each micro-batch once forward and once backward (B, or I and W). Transfers, if
    any are listed, are all listed, and two ranks send and receive in the same order, since not every transport can tell
    messages apart. Reductions of a stage follow its last backward; updates, if any are listed, come last, one per
    stage. Whether ranks wait for each other in a circle is for `deadlock` to say.

    Parameters
    ----------
    limits
        Most micro-batches in flight per stage.

    Raises
    ------
    ValueError
        Names the first action that is missing, extra or out of order, and its rank.
    """
    checks = (_strangers, _homeless, _inner, _repeated, _missing, _misplaced, _crossed, _early, _updates)
    for check in checks:
        for problem in check(schedule):
            raise ValueError(f"schedule {schedule.name!r}: {problem}")
    for problem in _over(schedule, limits or ()):
        raise ValueError(f"schedule {schedule.name!r}: {problem}")


def _placed(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """Rank, position and action, in order."""
    for rank, actions in enumerate(schedule.ranks):
        for n, action in enumerate(actions):
            yield rank, n, action


def _strangers(schedule: Schedule) -> Iterator[str]:
    last, m = schedule.num_stages - 1, schedule.num_micro_batches
    no_peer = {(0, Kind.RECV_F), (0, Kind.SEND_B), (last, Kind.SEND_F), (last, Kind.RECV_B)}
    for rank, _, action in _placed(schedule):
        s, kind, k = action
        if not 0 <= s <= last:
            yield f"rank {rank}: {action} is of a stage that is not among 0 ... {last}"
        if (kind == Kind.UPDATE) != (k is None):
            yield f"rank {rank}: {action} {'lacks its' if k is None else 'has an'} index"
        if k is not None and not 0 <= k < m and kind != Kind.REDUCE_GRAD:
            yield f"rank {rank}: {action} is of a micro-batch that is not among 0 ... {m - 1}"
        if (s, kind) in no_peer:
            yield f"rank {rank}: {action} has no stage at its other end"


def _homeless(schedule: Schedule) -> Iterator[str]:
    homes: dict[int, int] = {}
    for rank, _, action in _placed(schedule):
        if homes.setdefault(action.stage, rank) != rank:
            yield f"rank {rank}: {action} is of stage {action.stage}, which rank {homes[action.stage]} runs"
    for s in range(schedule.num_stages):
        if s not in homes:
            yield f"no rank runs stage {s}: {Action(s, Kind.F, 0)} is missing"


def _repeated(schedule: Schedule) -> Iterator[str]:
    seen: set[object] = set()
    for rank, _, action in _placed(schedule):
        # A rank launches a reduction once, for all its stages.
        key = (rank, action.index) if action.kind == Kind.REDUCE_GRAD else action
        if key in seen:
            yield f"rank {rank}: {action} stands twice"
        seen.add(key)


def _missing(schedule: Schedule) -> Iterator[str]:
    listed, has_transfers = schedule._listed(), any(action.kind in TRANSFERS for action in schedule._listed())
    for s in range(schedule.num_stages):
        rank = schedule.rank_of(s)
        for k in range(schedule.num_micro_batches):
            forward, whole = Action(s, Kind.F, k), Action(s, Kind.B, k)
            halves = Action(s, Kind.I, k), Action(s, Kind.W, k)
            parts = [half for half in halves if half in listed]
            if whole in listed and parts:
                yield f"rank {rank}: {whole} is the whole backward, yet {parts[0]} stands there too"
            elif whole not in listed and not parts:
                yield f"rank {rank}: {whole} (or {halves[0]} and {halves[1]}) is missing"
            for action in (forward, *(halves if parts else ())):
                if action not in listed:
                    yield f"rank {rank}: {action} is missing"
        if has_transfers and s + 1 < schedule.num_stages and schedule.rank_of(s + 1) != rank:
            for send in _sends_between(s, schedule.num_micro_batches):
                for end in (send, other_end(send)):
                    if end not in listed:
                        yield f"rank {schedule.rank_of(end.stage)}: {end} is missing"


def _sends_between(s: int, m: int) -> Iterator[Action]:
    for k in range(m):
        yield Action(s, Kind.SEND_F, k)
        yield Action(s + 1, Kind.SEND_B, k)


def _inner(schedule: Schedule) -> Iterator[str]:
    homes = schedule._homes()
    for rank, _, action in _placed(schedule):
        if action.kind in TRANSFERS and homes[other_end(action).stage] == rank:
            yield f"rank {rank}: {action} has its other end on the same rank, where nothing needs to move"


def _misplaced(schedule: Schedule) -> Iterator[str]:
    positions = {action: (rank, n) for rank, n, action in _placed(schedule)}
    for action, needs in schedule._needs().items():
        rank, n = positions[action]
        for need in needs:
            home, at = positions[need]
            if home == rank and at > n:
                yield f"rank {rank}: {action} stands before {need}, which it needs"


def _crossed(schedule: Schedule) -> Iterator[str]:
    homes = schedule._homes()
    arrivals: dict[tuple[int, int], list[Action]] = {}
    expected: dict[tuple[int, int], list[Action]] = {}
    for rank, _, action in _placed(schedule):
        if action.kind in TRANSFERS:
            end = other_end(action)
            peer = homes[end.stage]
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                arrivals.setdefault((rank, peer), []).append(end)
            else:
                expected.setdefault((peer, rank), []).append(action)
    for (sender, receiver), ends in arrivals.items():
        for arrives, expects in zip(ends, expected[sender, receiver], strict=True):
            if arrives != expects:
                yield f"rank {receiver}: {expects} stands where rank {sender} sends what {arrives} receives"


def _early(schedule: Schedule) -> Iterator[str]:
    for rank, actions in enumerate(schedule.ranks):
        ends = {a.stage: n for n, a in enumerate(actions) if a.kind in (Kind.B, Kind.W)}
        for n, action in enumerate(actions):
            if action.kind == Kind.REDUCE_GRAD and n < ends[action.stage]:
                last = actions[ends[action.stage]]
                yield f"rank {rank}: {action} stands before {last}, the last backward of the stage"


def _updates(schedule: Schedule) -> Iterator[str]:
    if not any(action.kind == Kind.UPDATE for action in schedule._listed()):
        return
    for s in range(schedule.num_stages):
        if Action(s, Kind.UPDATE) not in schedule._listed():
            yield f"rank {schedule.rank_of(s)}: {Action(s, Kind.UPDATE)} is missing"
    for rank, actions in enumerate(schedule.ranks):
        first = next((n for n, action in enumerate(actions) if action.kind == Kind.UPDATE), len(actions))
        for action in actions[first:]:
            if action.kind != Kind.UPDATE:
                yield f"rank {rank}: {action} stands after {actions[first]}, expected updates last"


def _over(schedule: Schedule, limits: Sequence[int]) -> Iterator[str]:
    if limits and len(limits) != schedule.num_stages:
        yield f"{len(limits)} in-flight limits, expected one for each of {schedule.num_stages} stages"
    for s, limit in enumerate(limits):
        actions = schedule._of_stage(s)
        for action, held in zip(actions, accumulate(map(_held, actions))):
            if held > limit:
                rank = schedule.rank_of(s)
                yield f"rank {rank}: with {action} stage {s} holds {held} micro-batches, its limit is {limit}"


Place = tuple[int, int]  #: (pipeline, rank)


def deadlock(
    schedules: Sequence[Schedule],
    groups: Mapping[int, Collection[Place]] | None = None,
    rendezvous: bool = True,
) -> tuple[str, ...] | None:
    """Play the lists of all pipelines together: None if they finish, else who waits for whom, one wait a line.

    The lines form a circle, or end at a rank that does not list what is waited for.

    Parameters
    ----------
    schedules
        One per pipeline. Where transfers are not listed, an action waits for what it needs.
    groups
        Index of a reduction -> (pipeline, rank) of its members; the ranks that list it if None.
    rendezvous
        True: SEND, RECV and REDUCE_GRAD each hold their rank until every member is there. False: a SEND never waits;
        reductions of a rank are launched in list order, run one after another and hold up only its UPDATE.
    """
    return _Play(schedules, groups, rendezvous).stuck()


def check_deadlock(
    schedules: Sequence[Schedule],
    groups: Mapping[int, Collection[Place]] | None = None,
    rendezvous: bool = True,
) -> None:
    """Raise ``ValueError`` with what `deadlock` returns, if it does."""
    waits = deadlock(schedules, groups, rendezvous)
    if waits is not None:
        raise ValueError(f"deadlock: {'; '.join(waits)}")


class _Play:
    """The state of `deadlock`: how far each rank is, and what it waits for."""

    def __init__(
        self, schedules: Sequence[Schedule], groups: Mapping[int, Collection[Place]] | None, rendezvous: bool
    ) -> None:
        self.lists = {(p, rank): actions for p, each in enumerate(schedules) for rank, actions in enumerate(each.ranks)}
        self.members = _reductions(self.lists, groups)
        self.rendezvous = rendezvous
        self.homes = [schedule._homes() for schedule in schedules]
        self.needs = [schedule._needs() for schedule in schedules]
        self.at = dict.fromkeys(self.lists, 0)
        self.done: list[set[Action]] = [set() for _ in schedules]
        self.waiting: list[dict[Action, list[Place]]] = [{} for _ in schedules]
        self.ready = deque(self.lists)
        self.come: list[set[Action]] = [set() for _ in schedules]  # transfers whose rank stands at them
        self.met: list[set[Action]] = [set() for _ in schedules]  # of these, those whose other end has come, too
        self.launched: dict[Place, deque[int]] = {place: deque() for place in self.lists}  # and not over
        self.heads = dict.fromkeys(self.members, 0)  # members that have launched it and nothing before it
        self.launched_at = dict.fromkeys(self.lists, -1)

    def stuck(self) -> tuple[str, ...] | None:
        while self.ready:
            self.advance(self.ready.popleft())
        late = next((place for place in self.lists if not self.is_over(place)), None)
        return None if late is None else self.waits_from(late)

    def advance(self, place: Place) -> None:
        """Run the rank's list up to the first action that has to wait."""
        actions = self.lists[place]
        done, waiting = self.done[place[0]], self.waiting[place[0]]
        while self.at[place] < len(actions):
            action = actions[self.at[place]]
            if not self.may_pass(place, action):
                return
            self.at[place] += 1
            done.add(action)
            if action in waiting:
                self.ready.extend(waiting.pop(action))

    def may_pass(self, place: Place, action: Action) -> bool:
        p, kind = place[0], action.kind
        if kind == Kind.REDUCE_GRAD:
            return self.launch(place, action.index or 0)
        if kind == Kind.UPDATE:
            return not self.launched[place]
        unmet = self.unmet(p, action)
        if unmet is not None:
            self.waiting[p].setdefault(unmet, []).append(place)
            return False
        return not self.rendezvous or kind not in TRANSFERS or self.meet(p, action)

    def unmet(self, p: int, action: Action) -> Action | None:
        """The first thing that `action` needs and that is not done; a rendezvous is met, not waited for."""
        if self.rendezvous and action.kind in (Kind.RECV_F, Kind.RECV_B):
            return None
        done = self.done[p]
        for need in self.needs[p][action]:
            if need not in done:
                return need
        return None

    def meet(self, p: int, transfer: Action) -> bool:
        other = other_end(transfer)
        if other in self.come[p]:
            self.come[p].remove(other)
            self.met[p].add(other)
            self.ready.append(self.home(p, other))
            return True
        if transfer in self.met[p]:
            self.met[p].remove(transfer)
            return True
        self.come[p].add(transfer)
        return False

    def launch(self, place: Place, index: int) -> bool:
        if self.launched_at[place] < self.at[place]:
            self.launched_at[place] = self.at[place]
            self.launched[place].append(index)
            if len(self.launched[place]) == 1:
                self.come_to(index)
        return not self.rendezvous or not self.launched[place]

    def come_to(self, index: int) -> None:
        """One more member has this reduction as its next: the last one ends it, and all come to theirs after it."""
        due = [index]
        while due:
            index = due.pop()
            self.heads[index] += 1
            if self.heads[index] == len(self.members[index]):
                self.heads[index] = 0
                for place in self.members[index]:
                    self.launched[place].popleft()
                    self.ready.append(place)
                    if self.launched[place]:
                        due.append(self.launched[place][0])

    def is_next(self, place: Place, index: int) -> bool:
        return next(iter(self.launched[place]), None) == index

    def home(self, p: int, action: Action) -> Place:
        return p, self.homes[p].get(action.stage, -1)

    # Why nothing moves

    def is_over(self, place: Place) -> bool:
        return self.at[place] == len(self.lists[place]) and not self.launched[place]

    def waits_from(self, place: Place) -> tuple[str, ...]:
        """Who waits for whom, from `place` on: the circle it leads into, or all up to what is never going to come."""
        lines: list[str] = []
        first: dict[Place, int] = {}
        while place not in first:
            first[place] = len(lines)
            at = self.lists[place][self.at[place]] if self.at[place] < len(self.lists[place]) else "its end"
            other, wanted = self.waits_for(place)
            if other not in self.lists:
                return (*lines, f"{_name(place)} waits at {at} for {wanted}, but no rank runs stage {wanted.stage}")
            lines.append(f"{_name(place)} waits at {at} for {wanted} of {_name(other)}")
            if wanted not in self.lists[other]:
                return (*lines, f"{_name(other)} does not list {wanted}")
            if self.is_over(other):
                return (*lines, f"{_name(other)} has run its list to the end")
            place = other
        places = list(first)[first[place] :]
        circle = lines[first[place] :]
        start = places.index(min(places))  # the same circle reads the same, wherever one enters it
        return (*circle[start:], *circle[:start])

    def waits_for(self, place: Place) -> tuple[Place, Action]:
        p, n = place[0], self.at[place]
        action = self.lists[place][n] if n < len(self.lists[place]) else None
        unmet = None if action is None else self.unmet(p, action)
        if unmet is not None:
            return self.home(p, unmet), unmet
        if action is not None and action.kind in TRANSFERS:
            return self.home(p, other_end(action)), other_end(action)
        index = self.launched[place][0]
        late = next(member for member in self.members[index] if not self.is_next(member, index))
        written = (each for each in self.lists[late] if each[1:] == (Kind.REDUCE_GRAD, index))
        return late, next(written, Action(self.lists[late][0].stage, Kind.REDUCE_GRAD, index))


def _reductions(
    lists: Mapping[Place, Sequence[Action]], groups: Mapping[int, Collection[Place]] | None
) -> dict[int, tuple[Place, ...]]:
    """Members of every reduction that is listed."""
    listed: dict[int, dict[Place, Action]] = {}
    for place, actions in lists.items():
        for action in actions:
            if action.kind == Kind.REDUCE_GRAD:
                listed.setdefault(action.index or 0, {})[place] = action
    if groups is None:
        return {index: tuple(places) for index, places in listed.items()}
    members = {index: tuple(dict.fromkeys(places)) for index, places in groups.items()}
    for index, places in members.items():
        for place in places:
            if place not in lists:
                raise ValueError(f"groups: REDUCE_GRAD{index} has {_name(place)} as a member, which does not exist")
        if places and index not in listed:
            raise ValueError(f"groups: no rank lists REDUCE_GRAD{index}")
    for index, launching in listed.items():
        for place in sorted(launching.keys() - set(members.get(index, ()))):
            raise ValueError(f"groups: {_name(place)} lists {launching[place]} and is not among its members")
    return members


def _name(place: Place) -> str:
    return f"pipeline {place[0]} rank {place[1]}"
