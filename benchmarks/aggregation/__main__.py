"""Steps of two unequal pipelines over shaped links, with their gradients reduced in eight ways by turns."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.aggregation import BASE, RATES, VARIANTS, Variant
from benchmarks.common import figure, table
from planner import Cluster, Plan, simulate
from planner.evaluate import evaluate
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.profile import ModelProfile
from runtime import Trainer, demo
from runtime.emulate import Emulation, Group, Network, pace_as_stated, start
from runtime.layout import Layout as Ranks
from runtime.reduce import Reducer

NUM_LAYERS, HIDDEN, LENGTH, VOCABULARY = 10, 256, 8, 1000
PIPELINES = (((4, 6), 3), ((3, 3, 4), 2))  # layers per stage, micro-batches
MICRO_BATCH = 2
FORWARD_S, BACKWARD_S = 0.004, 0.008  # of a layer
REACHABLE = {"tensor, after backward, one by one": 1.45, "model": 1.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant over links of one rate.

    Parameters
    ----------
    step_s
        Forward, backward and gradient sync, from the common start to the last rank's last reduction.
    exposed_s
        Of it what comes after the last backward pass on any rank.
    num_calls
        All-reduce calls, over all groups.
    simulated_s
        None for what the simulator does not know.
    """

    links: str
    variant: str
    step_s: float
    exposed_s: float
    num_calls: int
    simulated_s: float | None
    steps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """One step on one rank, on the clock of the machine."""

    begun_s: float
    backward_s: float
    ended_s: float
    calls: tuple[tuple[int, int], ...]  # of each group it is in


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.parser("aggregation", __doc__)
    parser.set_defaults(runs=7)
    options = parser.parse_args(arguments)
    names = common.chosen(list(RATES), options.cases)
    load_before = common.load()
    refusal = Network.refusal()
    rows = []
    if refusal is None:
        for name in names:
            rows += measure(name, RATES[name], VARIANTS, options.runs)
            print(f"{name}: done", file=sys.stderr)
    text = _text(rows) if refusal is None else f"Not run: links cannot be shaped here, {refusal}."
    where = common.environment(load_before)
    common.finish("aggregation", options, where, text, results=[asdict(row) for row in rows])
    return 0


def measure(links: str, bytes_per_s: float | None, variants: Sequence[Variant], rounds: int) -> list[Row]:
    """All variants, by turns in the same processes; the first round does not count."""
    emulation = Emulation(
        name=links,
        groups=(
            Group(
                device_type="device",
                count=sum(len(split) for split, _ in PIPELINES),
                forward_s=FORWARD_S,
                backward_s=BACKWARD_S,
                bytes_per_s=bytes_per_s,
            ),
        ),
    )
    model = demo.gpt(NUM_LAYERS, hidden=HIDDEN, vocabulary=VOCABULARY, length=LENGTH)
    batch = demo.counting(MICRO_BATCH * sum(m for _, m in PIPELINES), vocabulary=VOCABULARY, length=LENGTH)
    profile = emulation.profile(model, batch(0)[0][:1], micro_batches=(MICRO_BATCH,), name="GPT of 8 blocks")
    # Times are stated per micro-batch here.
    profile = replace(
        profile, cells=tuple(replace(cell, forward_s=FORWARD_S, backward_s=BACKWARD_S) for cell in profile.cells)
    )
    plan = evaluate(profile, emulation.cluster, _layout(), emulation.job(1, sync_chunk_bytes=variants[0].chunk_bytes))
    ranks = Ranks(plan)
    with emulation.network(ranks) as network:
        limit_s = 60.0 + 10.0 * (rounds + 1) * len(variants)
        arguments = (plan, profile, model, batch, variants, rounds)
        marks = start(ranks.world_size, _rank, *arguments, network=network, punctual=True, limit_s=limit_s)
    return [
        _row(links, each, [of[each.name] for of in marks], _simulated(plan, emulation.cluster, each))
        for each in variants
    ]


def _layout() -> Layout:
    return Layout(
        pipelines=tuple(
            PipelineLayout(
                stages=tuple(StageLayout(layers=pair) for pair in pairwise(accumulate(split, initial=0))),
                micro_batch=MICRO_BATCH,
                num_micro_batches=m,
            )
            for split, m in PIPELINES
        )
    )


def _rank(
    rank: int, plan: Plan, profile: ModelProfile, model: Any, batch: Any, variants: Sequence[Variant], rounds: int
) -> dict[str, list[Mark]]:
    marks: dict[str, list[Mark]] = {each.name: [] for each in variants}
    with Trainer(plan, model, clip=None) as trainer:
        pace_as_stated(trainer, profile)
        for n in range(rounds + 1):
            inputs, targets = batch(n)
            part = slice(trainer.samples.start, trainer.samples.stop)
            for each in variants:
                marks[each.name].append(
                    _step(
                        trainer,
                        each,
                        inputs[part] if trainer.is_first else None,
                        targets[part] if trainer.is_last else None,
                    )
                )
    return {name: each[1:] for name, each in marks.items()}


def _step(trainer: Trainer, variant: Variant, inputs: Any, targets: Any) -> Mark:
    """Forward, backward and sync of one step, reduced in the way of a variant."""
    trainer.reducer.close()
    trainer.reducer = Reducer(
        trainer.layout,
        trainer.place,
        trainer.stage,
        trainer.groups,
        granularity=variant.granularity,
        chunk_bytes=variant.chunk_bytes,
        overlap=variant.overlap,
    )
    trainer.reducer.agree()
    if variant.one_by_one:
        _wait_for_each(trainer.reducer)
    if trainer.executor is not None:
        trainer.executor.reducer = trainer.reducer
    after = _note_finish(trainer.reducer)
    dist.barrier()
    begun = time.perf_counter()
    trainer.gradients(inputs, targets)
    calls = tuple((bucket.shared.index, len(bucket.chunks)) for bucket in trainer.reducer.buckets if bucket.group)
    backward, ended = after
    return Mark(begun, backward, ended, calls if variant.granularity != "model" else ((0, 1),))


def _wait_for_each(reducer: Reducer) -> None:
    launch = reducer._launch

    def waiting(*arguments: Any) -> Any:
        launched = launch(*arguments)
        launched.wait()
        return launched

    reducer._launch = waiting  # type: ignore[assignment,method-assign]


def _note_finish(reducer: Reducer) -> list[float]:
    """Times at which the last backward pass and the last reduction of a step end, once they have."""
    noted: list[float] = []
    finish = reducer.finish

    def noting() -> None:
        noted.append(time.perf_counter())
        finish()
        noted.append(time.perf_counter())

    reducer.finish = noting  # type: ignore[method-assign]
    return noted


def _row(links: str, variant: Variant, by_rank: Sequence[Sequence[Mark]], simulated_s: float | None) -> Row:
    steps, exposed = [], []
    for marks in zip(*by_rank, strict=True):
        ended = max(mark.ended_s for mark in marks)
        steps.append(ended - min(mark.begun_s for mark in marks))
        exposed.append(ended - max(mark.backward_s for mark in marks))
    calls: Mapping[int, int] = dict(each for marks in by_rank for each in marks[0].calls)
    return Row(
        links=links,
        variant=variant.name,
        step_s=statistics.median(steps),
        exposed_s=statistics.median(exposed),
        num_calls=sum(calls.values()),
        simulated_s=simulated_s,
        steps_s=tuple(steps),
    )


def _simulated(plan: Plan, cluster: Cluster, variant: Variant) -> float | None:
    if variant.one_by_one or variant.granularity in ("tensor", "model"):
        return None
    job = replace(plan.job, sync="overlapped" if variant.overlap else "exposed", sync_chunk_bytes=variant.chunk_bytes)
    return simulate.simulate(replace(plan, job=job), cluster, granularity=variant.granularity).iteration_s


def _text(rows: Sequence[Row]) -> str:
    parts = [
        "*step*: forward, backward and gradient sync, milliseconds; *ratio*: to the chunked block on the same links;"
        " *exposed*: from the last backward pass on any rank to the last reduction."
    ]
    for links in dict.fromkeys(row.links for row in rows):
        of = {row.variant: row for row in rows if row.links == links}
        base = of[BASE]
        parts.append(f"{links}:")
        parts.append(
            table(
                [
                    {
                        "one call carries": row.variant,
                        "step": figure(1e3 * row.step_s),
                        "ratio": f"{row.step_s / base.step_s:.2f}",
                        "ratio simulated": "-"
                        if row.simulated_s is None or base.simulated_s is None
                        else f"{row.simulated_s / base.simulated_s:.2f}",
                        "exposed": figure(1e3 * row.exposed_s),
                        "calls": str(row.num_calls),
                    }
                    for row in of.values()
                ]
            )
        )
        reached = [
            f"{name} {of[name].step_s / base.step_s:.2f}x (reachable {least}x)"
            for name, least in REACHABLE.items()
            if name in of
        ]
        parts.append(f"Against the chunked block: {'; '.join(reached)}.")
    parts.append(f"torch {torch.__version__}, gloo, one thread per rank.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
