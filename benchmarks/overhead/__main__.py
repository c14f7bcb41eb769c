"""Steps of the runtime with one stage and one pipeline beside those of a plain torch loop, by turns in one process."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.common import figure, percent, table, tally
from benchmarks.overhead import CASES, Case
from planner import Plan, plan
from runtime import Trainer, demo
from runtime.emulate import Emulation, Group, start
from runtime.model import Model, Stage
from runtime.trainer import adamw

MOST = 0.03
CLIP = 1.0
NUM_THREADS = 1
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case.

    Parameters
    ----------
    plain_s, runtime_s
        Seconds of every turn, by the clock.
    plain_cpu_s, runtime_cpu_s
        The same, of processor.
    apart
        Relative difference of the losses of the last step.
    """

    case: str
    parameters: int
    plain_s: tuple[float, ...]
    runtime_s: tuple[float, ...]
    plain_cpu_s: tuple[float, ...]
    runtime_cpu_s: tuple[float, ...]
    apart: float

    @property
    def overhead(self) -> float:
        """By the clock: the median, over the turns, of what the two steps of a turn differ by."""
        return _overhead(self.plain_s, self.runtime_s)

    @property
    def cpu_overhead(self) -> float:
        """The same, of processor."""
        return _overhead(self.plain_cpu_s, self.runtime_cpu_s)


def _overhead(plain: Sequence[float], runtime: Sequence[float]) -> float:
    return statistics.median(b / a for a, b in zip(plain, runtime, strict=True)) - 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.parser("overhead", __doc__)
    parser.set_defaults(runs=21)
    options = parser.parse_args(arguments)
    load_before = common.load()
    rows = []
    for name in common.chosen(list(CASES), options.cases):
        rows.append(measure(CASES[name], options.runs))
        print(f"{name}: done", file=sys.stderr)
    where = common.environment(load_before)
    results = [{**asdict(row), "overhead": row.overhead, "cpu_overhead": row.cpu_overhead} for row in rows]
    common.finish("overhead", options, where, _text(rows), results=results)
    return 0


def measure(case: Case, turns: int) -> Row:
    """Both loops, by turns, after two that do not count."""
    row: Row = start(1, _measure, case, _plan(case), turns, limit_s=LIMIT_S)[0]
    return row


def _plan(case: Case) -> Plan:
    group = Group(device_type="cpu", count=1, forward_s=0.01, backward_s=0.02, memory_bytes=1 << 40)
    sizes = (case.micro_batch,)
    sample = demo.counting(1, length=case.length)(0)[0]
    emulation = Emulation(groups=(group,))
    profile = emulation.profile(_model(case), sample, sizes)
    job = emulation.job(case.micro_batch * case.num_micro_batches, micro_batches=sizes)
    return plan(profile, emulation.cluster, job)


def _model(case: Case) -> Model:
    return demo.gpt(case.num_layers, hidden=case.hidden, length=case.length)


def _measure(rank: int, case: Case, one: Plan, turns: int) -> Row:
    torch.set_num_threads(NUM_THREADS)
    batch = demo.counting(one.job.global_batch, length=case.length)
    plain = Plain(Stage(_model(case), (0, case.num_layers)), case.micro_batch)
    with Trainer(one, _model(case), clip=CLIP) as trainer:
        loops: dict[str, Callable[[Tensor, Tensor], float]] = {
            "plain": plain.step,
            "runtime": lambda inputs, targets: trainer.step(inputs, targets).loss,
        }
        wall: dict[str, list[float]] = {name: [] for name in loops}
        cpu: dict[str, list[float]] = {name: [] for name in loops}
        losses = {}
        for turn in range(turns + 2):
            inputs, targets = batch(turn)
            for name in sorted(loops, reverse=turn % 2 == 1):
                began, began_cpu = time.perf_counter(), time.process_time()
                losses[name] = loops[name](inputs, targets)
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - began_cpu)
    return Row(
        case=case.name,
        parameters=sum(p.numel() for p in plain.model.parameters()),
        plain_s=tuple(wall["plain"][2:]),
        runtime_s=tuple(wall["runtime"][2:]),
        plain_cpu_s=tuple(cpu["plain"][2:]),
        runtime_cpu_s=tuple(cpu["runtime"][2:]),
        apart=abs(losses["runtime"] / losses["plain"] - 1),
    )


class Plain:
    """The loop one would write: gradients added up over micro-batches, clipped, AdamW."""

    def __init__(self, model: torch.nn.Module, micro_batch: int) -> None:
        self.model, self.micro_batch = model, micro_batch
        self.optimizer = adamw(model.parameters())

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        tokens, total = targets.numel(), 0.0
        for x, y in zip(inputs.split(self.micro_batch), targets.split(self.micro_batch), strict=True):
            logits = self.model(x)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def _text(rows: Sequence[Row]) -> str:
    parts = [
        table(
            [
                {
                    "case": row.case,
                    "parameters": f"{row.parameters / 1e6:.1f} M",
                    "plain ms": figure(1e3 * statistics.median(row.plain_s)),
                    "runtime ms": figure(1e3 * statistics.median(row.runtime_s)),
                    "overhead": percent(row.overhead),
                    "of processor time": percent(row.cpu_overhead),
                    "losses apart": f"{row.apart:.0e}",
                }
                for row in rows
            ]
        )
    ]
    over = [row.case for row in rows if row.overhead > MOST]
    parts.append(tally(f"At most {percent(MOST, 0)}", [row.case for row in rows], over))
    parts.append(f"torch {torch.__version__}, {NUM_THREADS} thread.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
