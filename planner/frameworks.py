"""What a training framework adds to a model's own times and bytes: to plan for it, and to play a plan as it runs it.

    framework = frameworks.named("deepspeed")
    profile = framework.profile(profile)                 bytes a layer needs while it runs
    job = framework.job(global_batch=1024)               bytes per parameter, context, when gradients are reduced
    plan = planner.plan(profile, cluster, job)           or `planner.evaluate`, for a configuration as it is
    timeline = framework.play(plan, cluster)             its order of sends, its hand-overs, rings that share a port

Each figure says in `Framework.sources` whether it follows from how the framework works or was fitted, and to what. What
was fitted is checked against runs that it was not fitted to by `benchmarks/fidelity`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Literal

from planner import schedule, simulate
from planner.files import did_you_mean
from planner.job import BytesPerParameter, Job
from planner.schedule import Action, Kind, Schedule

if TYPE_CHECKING:
    from planner.cluster import Cluster
    from planner.plans import Block, Pipeline, Plan, Stage
    from planner.profile import Cell, ModelProfile
    from planner.simulate import Timeline

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """How a framework trains.

    Parameters
    ----------
    precision, state
        Arithmetic, and bytes per parameter; with buffers as large as the model where it keeps such.
    context_bytes
        Driver, libraries and communicators on every device.
    workspace_layers
        Bytes held while a layer runs, as a multiple of the activations it keeps.
    workspace_logits
        The same for the head, as a multiple of its logits.
    launch_share
        Share of the profiled time that a layer takes in a run where starting its kernels decides: hooks around each
        layer hold up the host while it is profiled.
    sync, sync_granularity, sync_chunk_bytes, sync_buffer_bytes
        When and in which messages gradients are reduced, and memory for it, as in `Job`.
    order
        ``1f1b``: an activation is sent as soon as it is there. ``deepspeed``: see `deepspeed`.
    hand_over_devices
        Devices of a stage whose network ports a hand-over uses at once; None for all.
    hand_over_share
        Share of the bandwidth of the network that hand-overs reach; inside nodes all of it.
    sources
        Pairs (field, where the figure comes from and how sure it is).
    """

    name: str
    precision: Literal["fp32", "mixed"]
    state: BytesPerParameter
    context_bytes: int
    workspace_layers: float = 0.0
    workspace_logits: float = 0.0
    launch_share: float = 1.0
    sync: Literal["overlapped", "exposed"] = "exposed"
    sync_granularity: Literal["tensor", "layer", "block", "model"] = "block"
    sync_chunk_bytes: int = 64 * MIB
    sync_buffer_bytes: int | None = None
    order: Literal["1f1b", "deepspeed"] = "1f1b"
    hand_over_devices: int | None = None
    hand_over_share: float = 1.0
    sources: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("context_bytes", "workspace_layers", "workspace_logits"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative")
        for name in ("launch_share", "hand_over_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not in (0, 1], expected a share")
        if self.hand_over_devices is not None and self.hand_over_devices < 1:
            raise ValueError(f"hand_over_devices: {self.hand_over_devices} is less than 1")

    def job(self, **fields: Any) -> Job:
        """The job on this framework; `fields` are those of `Job` and win over what the framework says."""
        own: dict[str, Any] = {
            "precision": self.precision,
            "bytes_per_parameter": self.state,
            "context_bytes": self.context_bytes,
            "tp_context_bytes": 0,
            "sync": self.sync,
            "sync_granularity": self.sync_granularity,
            "sync_chunk_bytes": self.sync_chunk_bytes,
            "sync_buffer_bytes": self.sync_buffer_bytes,
        }
        return Job(**(own | fields))

    def profile(self, profile: ModelProfile) -> ModelProfile:
        """The profile as this framework runs it: launch-bound layers, and workspace unless that was measured."""
        cells, notes = profile.cells, list(profile.conditions.notes)
        if self.launch_share < 1:
            cells = _launched(cells, self.launch_share)
            notes.append(
                f"layers that kernel launches decide: {self.launch_share:g} x their profiled time ({self.name})"
            )
        if (self.workspace_layers or self.workspace_logits) and not any(cell.workspace_bytes for cell in cells):
            logits = {kind.name: kind.logits_bytes for kind in profile.kinds}
            cells = tuple(
                replace(cell, workspace_bytes=self.workspace_bytes(cell, logits[cell.kind])) for cell in cells
            )
            notes.append(
                f"workspace: {self.workspace_layers:g} x the activations of a layer, {self.workspace_logits:g} x logits"
                f" ({self.name})"
            )
        return replace(profile, cells=cells, conditions=replace(profile.conditions, notes=tuple(notes)))

    def workspace_bytes(self, cell: Cell, logits_bytes: int) -> int:
        """Bytes held while a layer runs; `logits_bytes` are those of one sample at tp 1."""
        logits = logits_bytes * cell.micro_batch / cell.tp
        return math.ceil(self.workspace_layers * cell.activation_bytes + self.workspace_logits * logits)

    def schedules(self, plan: Plan) -> tuple[Schedule, ...]:
        """What each pipeline of the plan runs."""
        if self.order == "deepspeed":
            return tuple(deepspeed(len(each.stages), each.num_micro_batches) for each in plan.pipelines)
        return tuple(schedule.of_plan(pipeline) for pipeline in plan.pipelines)

    def play(self, plan: Plan, cluster: Cluster) -> Timeline:
        """One iteration of the plan as this framework runs it."""
        pipelines = tuple(self._handed_over(pipeline, cluster) for pipeline in plan.pipelines)
        blocks, tied = plan.blocks, plan.tied_blocks
        if len(plan.pipelines) > 1:
            blocks = tuple(
                replace(block, reduce_s=_rings_s(cluster, plan, enumerate(block.owners), _messages(block, plan.job)))
                for block in blocks
            )
        tied = tuple(
            replace(block, reduce_s=_rings_s(cluster, plan, block.owners, [block.gradient_bytes])) for block in tied
        )
        played = replace(plan, pipelines=pipelines, blocks=blocks, tied_blocks=tied)
        return simulate.simulate(played, cluster, schedule=self.schedules(plan), weight_share=1.0)

    def _handed_over(self, pipeline: Pipeline, cluster: Cluster) -> Pipeline:
        """The pipeline with this framework's hand-overs; recomputation is a part of the backward."""
        stages = []
        for s, stage in enumerate(pipeline.stages):
            send_s = 0.0
            if s + 1 < len(pipeline.stages):
                send_s = self._hand_over_s(cluster, stage, pipeline.stages[s + 1])
            backward_s = stage.backward_s + stage.recompute_s
            stages.append(replace(stage, send_s=send_s, backward_s=backward_s, recompute_s=0.0))
        return replace(pipeline, stages=tuple(stages))

    def _hand_over_s(self, cluster: Cluster, sender: Stage, receiver: Stage) -> float:
        a, b = cluster.device(sender.devices[0]), cluster.device(receiver.devices[0])
        at_once = min(sender.tp, receiver.tp, self.hand_over_devices or sender.tp)
        seconds = float(cluster.link(a, b, at_once).seconds(sender.send_bytes))
        return seconds if a.node == b.node else seconds / self.hand_over_share


def _launched(cells: Sequence[Cell], share: float) -> tuple[Cell, ...]:
    """Cells whose times hardly grow with the micro-batch, by less than a quarter of what arithmetic would, are taken
    faster by `share`."""
    rows: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.micro_batch):
        rows.setdefault((cell.kind, cell.device_type, cell.tp), []).append(cell)
    larger = {cell: after for row in rows.values() for cell, after in pairwise(row)}

    def seconds(cell: Cell, name: str) -> float:
        own, after = getattr(cell, name), larger.get(cell)
        if after is None:
            return float(own)
        growth = getattr(after, name) - own
        return float(own * share) if growth < (after.micro_batch / cell.micro_batch - 1) * own / 4 else float(own)

    return tuple(
        replace(cell, forward_s=seconds(cell, "forward_s"), backward_s=seconds(cell, "backward_s")) for cell in cells
    )


def _messages(block: Block, job: Job) -> list[float]:
    """Bytes of each all-reduce of a block."""
    if job.sync_granularity != "block":
        return [block.gradient_bytes / block.num_chunks] * block.num_chunks
    starts = range(0, block.gradient_bytes, job.sync_chunk_bytes)
    return [float(min(job.sync_chunk_bytes, block.gradient_bytes - low)) for low in starts]


def _rings_s(cluster: Cluster, plan: Plan, owners: Iterable[tuple[int, int]], sizes: Sequence[float]) -> float:
    """Seconds of all-reduces between (pipeline, stage) owners, one after another.

    The tp ranks of a stage reduce their parts side by side, each in a ring of its own: rings that leave a node by the
    same port share it.
    """
    stages = [plan.pipelines[p].stages[s] for p, s in owners]
    ring = sorted(
        ((cluster.device(stage.devices[0]), stage) for stage in stages), key=lambda each: (each[0].node, each[0].index)
    )
    step_s = [0.0] * len(sizes)
    for (a, stage_a), (b, stage_b) in zip(ring, ring[1:] + ring[:1]):
        if a == b:
            continue
        side_by_side = 1 if a.node == b.node else max(cluster.sharing(each.devices) for each in (stage_a, stage_b))
        link = cluster.link(a, b)
        step_s = [
            max(least, side_by_side * float(link.seconds(nbytes / len(ring))))
            for least, nbytes in zip(step_s, sizes, strict=True)
        ]
    return 2 * (len(ring) - 1) * math.fsum(step_s)


def deepspeed(num_stages: int, num_micro_batches: int) -> Schedule:
    """The order in which DeepSpeed's pipeline engine computes and sends (its ``TrainSchedule``).

    It is 1F1B, but an activation that is ready before a backward is sent only after the gradient for that backward has
    come: ``F1, receive gradient 0, send activation 1, B0``. The send itself does not hold up the stage. A pipeline of
    fewer micro-batches than stages sends at once.

    A backward is listed as its two halves, I and W, to be played with all of its time in W: I waits for the gradient
    and takes no time, then comes the send.
    """
    plain = schedule.one_f_one_b(num_stages, num_micro_batches)
    ranks = tuple(tuple(_late_sends(s, num_stages, actions)) for s, actions in enumerate(plain.ranks))
    return replace(plain, name="deepspeed", ranks=ranks)


def _late_sends(s: int, num_stages: int, actions: Sequence[Action]) -> Iterator[Action]:
    behind = num_stages - 1 - s
    unsent: int | None = None  # micro-batch whose activation waits for the gradient of the one `behind` it
    for action, after in zip_longest(actions, actions[1:]):
        k = action.index
        assert k is not None
        if action.kind is Kind.F:
            if s:
                yield Action(s, Kind.RECV_F, k)
            yield action
            if behind and after is not None and after.kind is Kind.B and after.index == k - behind:
                unsent = k
            elif behind:
                yield Action(s, Kind.SEND_F, k)
            continue
        if behind:
            yield Action(s, Kind.RECV_B, k)
        yield Action(s, Kind.I, k)
        if unsent is not None:
            yield Action(s, Kind.SEND_F, unsent)
            unsent = None
        yield Action(s, Kind.W, k)
        if s:
            yield Action(s, Kind.SEND_B, k)


#: Fitted to half of the runs published by Sailor (SOSP 2025) and checked on the other half: `benchmarks/fidelity`.
DEEPSPEED = Framework(
    name="deepspeed",
    precision="fp32",
    state=BytesPerParameter(weights=4, gradients=4, optimizer=16),
    context_bytes=15 * GIB // 4,
    workspace_layers=2.5,
    workspace_logits=1.0,
    launch_share=0.9,
    sync="exposed",
    sync_granularity="block",
    sync_chunk_bytes=2_000_000_000,
    sync_buffer_bytes=0,
    order="deepspeed",
    hand_over_devices=1,
    hand_over_share=0.75,
    sources=(
        ("state", "weights, gradients, two Adam moments, a flat copy of the gradients and one of the update; fitted"),
        ("context_bytes", "CUDA context and NCCL buffers as nvidia-smi counts them; fitted, 3.5 to 4 GiB fit as well"),
        ("workspace_layers", "gradients of a layer's intermediate results, and fragments; fitted, 2 to 3 fit as well"),
        ("workspace_logits", "another copy of the logits; fitted, anything from 0 to 4 fits as well"),
        ("launch_share", "hooks of the profiler; fitted to three runs whose own best values are 0.79 to 0.92"),
        ("sync", "pipe/engine.py reduces after the last backward, flat, at most 500 million elements a call"),
        ("order", "pipe/schedule.py, TrainSchedule"),
        ("hand_over_devices", "runs on nodes with four ports go at the pace of one; an observation, cause unknown"),
        ("hand_over_share", "each tp rank sends its part and a header; fitted, 0.7 to 0.8 fit as well"),
    ),
)

#: Nothing fitted: what the documentation of Megatron-LM says of mixed precision with the distributed optimizer off.
MEGATRON = Framework(
    name="megatron",
    precision="mixed",
    state=BytesPerParameter(weights=2, gradients=4, optimizer=12),
    context_bytes=GIB,
    sync="overlapped",
    sources=(
        ("state", "weights in 16 bit, gradients accumulated in fp32, fp32 weights and two Adam moments"),
        ("context_bytes", "assumed"),
        ("sync", "--overlap-grad-reduce"),
    ),
)

#: Nothing fitted: plain torch with autocast, DistributedDataParallel and AdamW.
TORCH = Framework(
    name="torch",
    precision="mixed",
    state=BytesPerParameter(weights=6, gradients=4, optimizer=8),
    context_bytes=GIB,
    sync="overlapped",
    sync_chunk_bytes=25 * MIB,
    sources=(
        ("state", "fp32 weights and the copies that autocast keeps, fp32 gradients, two Adam moments"),
        ("context_bytes", "assumed"),
        ("sync", "gradients are reduced bucket by bucket during the last backward pass"),
        ("sync_chunk_bytes", "bucket_cap_mb of DistributedDataParallel, whose default is 25"),
    ),
)

FRAMEWORKS = {framework.name: framework for framework in (DEEPSPEED, MEGATRON, TORCH)}


def named(name: str) -> Framework:
    """The framework of that name."""
    if name not in FRAMEWORKS:
        raise ValueError(f"framework {name!r} is not among {did_you_mean(name, FRAMEWORKS)}")
    return FRAMEWORKS[name]
