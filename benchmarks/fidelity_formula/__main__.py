"""How far the formulas of an iteration are from playing it action by action; and how long that takes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks import common
from benchmarks.common import percent, table, timed, verdict
from benchmarks.fidelity_formula import CASES, TRANSFERS, UNEVEN, Pipeline, pipelines
from planner.cost import floor_s, one_f_one_b_s, pipeline_s
from planner.schedule import Schedule, one_f_one_b, with_transfers, zero_bubble
from planner.simulate import StageBytes, StageWork, Workload, play

SPEED = "speed"
ROUNDING = 1e-12
OTHERS = 10  # the formulas are those of 1F1B: a tenth of the pipelines for other schedules
LONG_STAGES, LONG_ACTIONS, LONG_WITHIN_S = 64, 1000, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """A formula over the simulation, minus 1."""

    least: float
    mean: float
    most: float

    def __str__(self) -> str:
        return " / ".join(f"{round(100 * x, 1) + 0.0:+.1f}" for x in (self.least, self.mean, self.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Errors of three formulas over random pipelines of one kind; `above_floor`: none was below the floor."""

    schedule: str
    uneven: float
    transfers: float
    pipelines: int
    textbook: Error
    planning: Error
    one_f_one_b: Error
    above_floor: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One long list, played."""

    schedule: str
    stages: int
    actions: int
    transfers: int
    play_s: float
    play_cpu_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.parser("fidelity_formula", __doc__)
    parser.add_argument("--pipelines", type=int, default=3000, metavar="N", help="random pipelines a row (3000)")
    parser.add_argument(
        "--length", type=int, default=LONG_ACTIONS, metavar="N", help=f"actions a stage ({LONG_ACTIONS})"
    )
    options = parser.parse_args(arguments)
    names = common.chosen([*CASES, SPEED], options.cases)
    load_before = common.load()
    speeds = _speeds(options.length, options.runs) if SPEED in names else []
    rows = []
    for name in names:
        for uneven in UNEVEN if name != SPEED else ():
            count = options.pipelines if name == "1f1b" else -(-options.pipelines // OTHERS)
            rows += [_row(name, uneven, transfers, count) for transfers in TRANSFERS]
            print(f"{name}, stages within {percent(uneven, 0)}", file=sys.stderr)
    results = {"results": [asdict(row) for row in rows], "speed": [asdict(speed) for speed in speeds]}
    common.finish("fidelity_formula", options, common.environment(load_before), _text(rows, speeds), **results)
    return 0


def _row(name: str, uneven: float, transfers: float, count: int) -> Row:
    drawn = list(pipelines(uneven, transfers, count))
    simulated = [_iteration_s(CASES[name](len(each.forward), each.num_micro_batches), each.works) for each in drawn]
    floors = [floor_s([f + b for f, b in zip(each.forward, each.backward)], each.num_micro_batches) for each in drawn]
    return Row(
        schedule=name,
        uneven=uneven,
        transfers=transfers,
        pipelines=count,
        textbook=_error(map(_textbook_s, drawn), simulated),
        planning=_error(map(_planning_s, drawn), simulated),
        one_f_one_b=_error(
            (one_f_one_b_s(each.forward, each.backward, each.hand_over, each.num_micro_batches) for each in drawn),
            simulated,
        ),
        above_floor=all(low <= exact * (1 + ROUNDING) for low, exact in zip(floors, simulated)),
    )


def _iteration_s(schedule: Schedule, works: tuple[StageWork, ...]) -> float:
    return play(Workload(pipelines=((schedule, works),))).iteration_s


def _textbook_s(each: Pipeline) -> float:
    """Every transfer once per direction, and the slowest stage m - 1 times."""
    loads = [f + b for f, b in zip(each.forward, each.backward)]
    return sum(loads) + 2 * sum(each.hand_over) + (each.num_micro_batches - 1) * max(loads)


def _planning_s(each: Pipeline) -> float:
    """What the search minimises: loads with one way over both cuts of a stage."""
    cuts = (0.0, *each.hand_over, 0.0)
    loads = [f + b + cuts[s] + cuts[s + 1] for s, (f, b) in enumerate(zip(each.forward, each.backward))]
    return pipeline_s(loads, each.num_micro_batches)


def _error(formula: Iterable[float], simulated: Sequence[float]) -> Error:
    errors = [about / exact - 1 for about, exact in zip(formula, simulated, strict=True)]
    return Error(least=min(errors), mean=statistics.fmean(errors), most=max(errors))


def _speeds(length: int, runs: int) -> list[Speed]:
    """Lists of so many actions per stage."""
    m = length // 2  # F and B; I and W make three, four transfers six
    long = one_f_one_b(LONG_STAGES, m)
    return [
        _speed("1f1b", one_f_one_b(8, m), runs),
        _speed("1f1b", long, runs),
        _speed("1f1b, blocking", long, runs, blocking=True),
        _speed("1f1b, transfers listed", with_transfers(one_f_one_b(LONG_STAGES, length // 6)), runs),
        _speed("zero-bubble", zero_bubble(LONG_STAGES, length // 3), runs),
    ]


def _speed(name: str, schedule: Schedule, runs: int, blocking: bool = False) -> Speed:
    """Unequal stages with memory and transfers on every cut."""
    memory = StageBytes(weights=1, activations=1, workspace=1)
    works = tuple(
        StageWork(forward_s=1 + 0.01 * s, backward_s=2, send_s=0.1, memory=memory) for s in range(schedule.num_stages)
    )
    load = Workload(pipelines=((schedule, works),))
    measured = timed(lambda: play(load, blocking=blocking), runs)
    return Speed(
        schedule=name,
        stages=schedule.num_stages,
        actions=sum(map(len, schedule.ranks)),
        transfers=sum(len(lane.transfers) for lane in measured.value.lanes) // 2,
        play_s=measured.wall_s,
        play_cpu_s=measured.cpu_s,
    )


def _text(rows: Sequence[Row], speeds: Sequence[Speed]) -> str:
    parts = []
    if rows:
        parts += ["Formula over simulation, per cent: least / mean / most over random pipelines."]
        parts += [table([_columns(row) for row in rows])]
        names = [f"{row.schedule} {percent(row.uneven, 0)} {percent(row.transfers, 0)}" for row in rows]
        missed = [name for name, row in zip(names, rows) if not row.above_floor]
        parts += [common.tally("The floor is never above the simulation", names, missed)]
    if speeds:
        parts += ["Time to play a list.", table([_speed_columns(speed) for speed in speeds])]
    return "\n\n".join(parts)


def _columns(row: Row) -> dict[str, str]:
    return {
        "schedule": row.schedule,
        "uneven": percent(row.uneven, 0),
        "transfer": percent(row.transfers, 0),
        "textbook": str(row.textbook),
        "planning form": str(row.planning),
        "1F1B form": str(row.one_f_one_b),
        "pipelines": f"{row.pipelines:,}",
    }


def _speed_columns(speed: Speed) -> dict[str, str]:
    return {
        "schedule": speed.schedule,
        "stages": str(speed.stages),
        "actions": f"{speed.actions:,}",
        "transfers": f"{speed.transfers:,}",
        "s": f"{speed.play_s:.2f}",
        "CPU s": f"{speed.play_cpu_s:.2f}",
        "us per action": f"{1e6 * speed.play_s / speed.actions:.0f}",
        f"CPU within {LONG_WITHIN_S:.0f} s": verdict(speed.play_cpu_s < LONG_WITHIN_S),
    }


if __name__ == "__main__":
    sys.exit(main())
