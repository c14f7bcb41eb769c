"""The plan as a torch runtime executes it, rank by rank: ``hpp-run/1``, plain data that needs no planner to read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from planner import files, schedule
from planner.exporters.base import Export, Request
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.files import Document
from planner.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process: its device and what it does there."""

    device: str
    device_type: str
    pipeline: int
    stage: int
    tp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStage:
    """One stage.

    Parameters
    ----------
    ranks
        Global ranks of its tp group.
    layers
        Half-open range.
    recompute
        Layers run again in the backward pass.
    in_flight
        Micro-batches held at once.
    actions
        What its ranks compute, in order, separated by blanks: ``0F0 0F1 0B0``.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int]
    recompute: tuple[int, ...] = ()
    in_flight: int
    actions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPipeline:
    """One pipeline.

    Parameters
    ----------
    first_sample
        Of the global batch it takes `micro_batch` x `num_micro_batches` samples from this one on.
    """

    micro_batch: int
    num_micro_batches: int
    first_sample: int
    stages: tuple[RunStage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBlock:
    """Layers, or tied weights of two layers, whose gradients are summed together.

    Parameters
    ----------
    layers
        Half-open range; of tied weights the two layers.
    tied
        Whether it is the tied weights.
    groups
        Ranks that sum one slice of every tensor, for as many equal slices along the dimension tp divides.
    gradient_bytes
        Bytes a rank of the smallest tp degree reduces.
    """

    layers: tuple[int, int]
    tied: bool = False
    groups: tuple[tuple[int, ...], ...]
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Document):
    """A plan, rank by rank.

    Parameters
    ----------
    plan
        Digest of the plan.
    num_layers, layer_kinds
        Layers of the model, and their kinds where the profile is known.
    loss
        ``sum/global_tokens``: the loss of a micro-batch is the sum over its tokens, divided by the tokens of the whole
        global batch; gradients are summed over micro-batches and over `blocks`, never averaged.
    sync_overlap
        Whether a block is reduced as soon as its last backward is done, or after all.
    reductions
        In the order every rank issues them; a rank leaves out those it has no part in.
    """

    SCHEMA: ClassVar[str] = "hpp-run/1"

    plan: str
    model: str
    world_size: int
    num_layers: int
    layer_kinds: tuple[str, ...] = ()
    global_batch: int
    loss: Literal["sum/global_tokens"] = "sum/global_tokens"
    precision: str
    optimizer: str
    sync_overlap: bool
    sync_granularity: str
    sync_chunk_bytes: int
    ranks: tuple[Rank, ...]
    pipelines: tuple[RunPipeline, ...]
    reductions: tuple[RunBlock, ...]

    def __post_init__(self) -> None:
        if self.world_size != len(self.ranks):
            raise ValueError(f"world_size: {self.world_size}, but there are {len(self.ranks)} ranks")
        used = sorted(rank for pipeline in self.pipelines for stage in pipeline.stages for rank in stage.ranks)
        if used != list(range(self.world_size)):
            raise ValueError(f"pipelines: their stages use ranks {used}, expected each of 0-{self.world_size - 1} once")


def of_plan(request: Request) -> Run:
    """The plan, its devices numbered node by node."""
    plan = request.plan
    launch = request.launch("node", "")
    ranks = launch.ranks
    pipelines, first = [], 0
    for pipeline in plan.pipelines:
        depths = [stage.in_flight for stage in pipeline.stages]
        planned = schedule.depths(len(pipeline.stages), pipeline.num_micro_batches, depths)
        stages = tuple(
            RunStage(
                ranks=tuple(ranks[device] for device in stage.devices),
                layers=stage.layers,
                recompute=stage.recompute,
                in_flight=stage.in_flight,
                actions=" ".join(map(str, actions)),
            )
            for stage, actions in zip(pipeline.stages, planned.ranks, strict=True)
        )
        pipelines.append(
            RunPipeline(
                micro_batch=pipeline.micro_batch,
                num_micro_batches=pipeline.num_micro_batches,
                first_sample=first,
                stages=stages,
            )
        )
        first += pipeline.samples
    job = plan.job
    return Run(
        plan=plan.digest,
        model=plan.profile_name,
        world_size=len(ranks),
        num_layers=request.plan_layers,
        layer_kinds=request.profile.layers if request.profile is not None else (),
        global_batch=job.global_batch,
        precision=job.precision,
        optimizer=job.optimizer,
        sync_overlap=job.sync == "overlapped",
        sync_granularity=job.sync_granularity,
        sync_chunk_bytes=job.sync_chunk_bytes,
        ranks=tuple(
            Rank(
                device=each.device,
                device_type=each.device_type,
                pipeline=each.pipeline,
                stage=each.stage,
                tp_rank=each.tp_rank,
            )
            for each in launch.processes
        ),
        pipelines=tuple(pipelines),
        reductions=_reductions(plan, pipelines),
    )


def _reductions(plan: Plan, pipelines: Sequence[RunPipeline]) -> tuple[RunBlock, ...]:
    """Descending blocks, tied weights last: what is complete first is issued first, on every rank in one order."""
    out = []
    for block in reversed(plan.blocks):
        members = [pipeline.stages[s].ranks for pipeline, s in zip(pipelines, block.owners, strict=True)]
        if len(members) > 1:
            out.append(RunBlock(layers=block.layers, groups=_slices(members), gradient_bytes=block.gradient_bytes))
    for tied in plan.tied_blocks:
        members = [pipelines[p].stages[s].ranks for p, s in tied.owners]
        out.append(RunBlock(layers=tied.layers, tied=True, groups=_slices(members), gradient_bytes=tied.gradient_bytes))
    return tuple(out)


def _slices(members: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """For every slice of a tensor, the rank of each owner that holds it: as many slices as all tp degrees divide."""
    count = math.lcm(*(len(ranks) for ranks in members))
    return tuple(tuple(ranks[n * len(ranks) // count] for ranks in members) for n in range(count))


def export(request: Request) -> Export:
    """The run and one launch line per node."""
    launch = request.launch("node", "-m runtime run.json train.py:build")
    return Export(
        format="run",
        files=(("run.json", files.dumps(of_plan(request))), ("ranks.csv", launch.table)),
        commands=launch.commands,
        warnings=launch.warnings,
        plan=request.plan,
    )


def layout_of(run: Run) -> Layout:
    """The configuration that a run is."""
    return Layout(
        pipelines=tuple(
            PipelineLayout(
                stages=tuple(
                    StageLayout(
                        layers=stage.layers,
                        tp=len(stage.ranks),
                        devices=tuple(run.ranks[rank].device for rank in stage.ranks),
                        recompute=stage.recompute,
                        in_flight=stage.in_flight,
                    )
                    for stage in pipeline.stages
                ),
                micro_batch=pipeline.micro_batch,
                num_micro_batches=pipeline.num_micro_batches,
            )
            for pipeline in run.pipelines
        )
    )
