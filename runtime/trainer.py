"""Trains a model under a plan: this process's stage, its micro-batches, its gradients.

    loss = sum over tokens / tokens of the global batch      scaled on the last stages, so that gradients add up
    step = all actions, all reductions, one exchange of loss and squared norms, update

The exchange is the commit: a process that has its result knows that every other has complete gradients. So either all
processes can finish the step, or none has begun to apply it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner import schedule as schedules
from planner.plans import Plan
from planner.schedule import Action, Kind, Schedule
from runtime import execute
from runtime.execute import Executor, Played
from runtime.groups import Disconnected, Groups, RankFailed, communication
from runtime.layout import Layout
from runtime.model import Model, Stage, Tensors, as_tuple
from runtime.reduce import Reducer, total_norm

TIMEOUT_S = 300.0
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW at the common settings for language models."""
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class Result:
    """One step, equal on every process.

    Parameters
    ----------
    loss
        Mean over the tokens of the global batch.
    norm
        Of the whole gradient, before clipping.
    """

    loss: float
    norm: float
    num_tokens: int


class Trainer:
    """One process of a training run. `torch.distributed` has to be initialised with one process per device of the plan.

    Parameters
    ----------
    plan
        Value or file.
    model
        Chain of as many layers as the plan's.
    optimizer
        Makes one from parameters; elementwise where state is sharded.
    clip
        Largest norm of the gradient; None for none.
    dtype
        Of weights and activations; gradients of 16-bit weights are summed in fp32, with fp32 master weights.
    schedule
        ``plan``, or a name or list that `planner.schedule` knows; one list per pipeline.
    granularity, chunk_bytes, overlap
        Of gradient reduction; the plan's job decides where they are None.
    shard_optimizer
        Shard the optimizer state of a block over its owners; the plan's job decides where it is None.
    engine
        ``own``, or ``torch`` for `torch.distributed.pipelining`.
    timeout_s
        After so long without an answer a peer counts as dead.
    sample
        Inputs of one micro-batch, for shapes; taken from the first step where it is None.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        model: Model,
        *,
        optimizer: Optimizers = adamw,
        clip: float | None = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        schedule: str | Sequence[Schedule] = "plan",
        granularity: str | None = None,
        chunk_bytes: int | None = None,
        overlap: bool | None = None,
        shard_optimizer: bool | None = None,
        engine: str = "own",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if engine not in ("own", "torch"):
            raise ValueError(f"engine: {engine!r} is not among own, torch")
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        self.model, self.clip, self.device, self.engine = model, clip, torch.device(device), engine
        self.layout = Layout(self.plan)
        _fits(self.layout, model)
        self.place = self.layout.places[dist.get_rank()]
        self.pipeline, stage = self.layout.pipeline(self.place), self.layout.stage(self.place)
        self.schedule = _schedules(self.plan, schedule)[self.place.pipeline]
        self.groups = Groups(timeout_s)
        self._create_groups()
        self.stage = Stage(
            model,
            stage.layers,
            recompute=stage.recompute,
            seed=seed,
            dtype=dtype,
            device=self.device,
            mesh=self._mesh(),
        )
        job = self.plan.job
        self.reducer = Reducer(
            self.layout,
            self.place,
            self.stage,
            self.groups,
            granularity=granularity or job.sync_granularity,
            chunk_bytes=chunk_bytes or job.sync_chunk_bytes,
            overlap=job.sync == "overlapped" if overlap is None else overlap,
            shard=job.shard_optimizer if shard_optimizer is None else shard_optimizer,
        )
        self.optimizer = optimizer([parameter for _, parameter in self.reducer.optimized()])
        self.executor: Any = None
        self.on_action: Callable[[Action], None] | None = None  # called before each action of the own engine
        self.step_index = 0  # steps applied
        self.committed: tuple[int, Result] | None = None  # the last step whose gradients are known to be complete
        self.tracing = False
        self.trace: tuple[Played, ...] = ()  # of the last step that began with `tracing`: compute, reductions, update
        self.began_s = 0.0

    # What this process needs

    @property
    def samples(self) -> range:
        """Samples of the global batch that this process's pipeline takes."""
        return self.layout.samples(self.place.pipeline)

    @property
    def is_first(self) -> bool:
        """Whether it runs the first stage, which looks at inputs."""
        return self.place.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it runs the last stage, which looks at targets."""
        return self.place.stage == len(self.pipeline.stages) - 1

    # Steps

    def step(self, inputs: Any = None, targets: Any = None) -> Result:
        """One optimizer step.

        Parameters
        ----------
        inputs, targets
            Those of this pipeline's `samples`, along the first dimension; a tensor or a tuple. Inputs on the first
            stage, targets on the last; others may leave them out.

        Raises
        ------
        RankFailed
            If a process does not answer; no process has applied the step, or all can.
        """
        result = self.gradients(inputs, targets)
        self.apply(result)
        return result

    def gradients(self, inputs: Any = None, targets: Any = None) -> Result:
        """Everything up to the commit: afterwards all processes have complete gradients, and none has used them."""
        x, y = self._micro_batches(inputs, self.is_first), self._micro_batches(targets, self.is_last)
        try:
            if self.tracing:
                with communication():
                    dist.barrier()
            if self.executor is None:
                self.executor = self._executor(x[0] if x else None)
            if self.on_action is not None:
                self.executor.on_action = self.on_action
            self.reducer.zero()
            tokens = self._count_tokens(y)
            self.began_s = time.perf_counter()
            loss = self.executor.run(x, [each if len(each) > 1 else each[0] for each in y], 1.0 / tokens)
            self.reducer.finish()
            result = self._commit(float(loss), tokens)
        except Disconnected as error:
            raise RankFailed(f"{self.place} in the gradient sync of step {self.step_index}: {error}") from None
        self.committed = self.step_index, result
        if self.tracing:
            self.trace = (*self.executor.trace, *self._reductions())
        return result

    def apply(self, result: Result) -> None:
        """Clip and update, on complete gradients."""
        begun = time.perf_counter()
        if self.clip is not None and result.norm > self.clip:
            self.reducer.scale(self.clip / (result.norm + 1e-6))
        self.optimizer.step()
        try:
            with communication():
                self.reducer.publish()
        except Disconnected as error:
            raise RankFailed(f"{self.place} in the update of step {self.step_index}: {error}") from None
        self.step_index += 1
        if self.tracing:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.trace = (*self.trace, self._played(Kind.UPDATE, None, begun, time.perf_counter()))

    def close(self) -> None:
        """Drop hooks, groups and the connection, so that others notice at once if this process leaves."""
        self.reducer.close()
        self.executor = None
        self.groups.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Parts

    def _create_groups(self) -> None:
        layout, most = self.layout, max(stage.tp for stage in self.plan.stages)
        last = [self._last_ranks(t) for t in range(self.plan.pipelines[0].stages[-1].tp)]
        self.groups.create([shared.ranks for t in range(most) for shared in layout.shared(t)])
        self.groups.create([tuple(p.rank for p in layout.places if p.tp_rank == t) for t in range(most)])
        self.groups.create(last, "last")
        self.groups.create([tuple(range(layout.world_size))], "world")
        if self.engine == "torch":
            pipelines = [
                tuple(sorted(layout.unit(p, s)[t] for s in range(len(pipeline.stages))))
                for p, pipeline in enumerate(self.plan.pipelines)
                for t in range(min(stage.tp for stage in pipeline.stages))
            ]
            self.groups.create(pipelines, "pipeline", single=True)
        execute.create_pairs(layout, self.groups)

    def _last_ranks(self, tp_rank: int) -> tuple[int, ...]:
        """Processes of one tp rank on the last stages, all of equal tp degree since they own one block."""
        ends = [self.layout.unit(p, len(each.stages) - 1) for p, each in enumerate(self.plan.pipelines)]
        return tuple(sorted(unit[tp_rank] for unit in ends))

    def _mesh(self) -> Any:
        """Device mesh of this stage's tp group; meshes of all stages are made by all processes in one order."""
        if all(stage.tp == 1 for stage in self.plan.stages):
            return None
        from torch.distributed.device_mesh import DeviceMesh

        mine = None
        for p, pipeline in enumerate(self.plan.pipelines):
            for s in range(len(pipeline.stages)):
                unit = self.layout.unit(p, s)
                mesh = DeviceMesh(self.device.type, list(unit)) if len(unit) > 1 else None
                if self.place.rank in unit:
                    mine = mesh
        return mine

    def _executor(self, sample: Tensors | None) -> Any:
        wires = execute.wires(self.layout, self.place, self.groups, self.device)
        boundaries = execute.agree(self.place, self.stage, sample, wires)
        actions = self.schedule.ranks[self.place.stage]
        if self.engine == "torch":
            from runtime.torch_engine import TorchEngine

            return TorchEngine(self, self.schedule, boundaries, sample)
        return Executor(
            self.layout, self.place, self.stage, self.model, actions, self.reducer, wires, boundaries, self.device
        )

    def _reductions(self) -> list[Played]:
        return [self._played(Kind.REDUCE_GRAD, *each) for each in self.reducer.log]

    def _played(self, kind: Kind, index: int | None, begun: float, ended: float) -> Played:
        return Played(Action(self.place.stage, kind, index), begun - self.began_s, ended - self.began_s)

    def _micro_batches(self, value: Any, wanted: bool) -> list[Tensors]:
        if not wanted:
            return []
        what = "inputs" if self.is_first and value is None else "targets"
        if value is None:
            raise ValueError(f"{what}: {self.place} needs those of samples {self.samples.start} to {self.samples[-1]}")
        tensors, b = as_tuple(value), self.pipeline.micro_batch
        for tensor in tensors:
            if len(tensor) != len(self.samples):
                raise ValueError(
                    f"{len(tensor)} samples given, {self.place} takes {len(self.samples)} (Trainer.samples)"
                )
        parts = [tensor.to(self.device).split(b) for tensor in tensors]
        return list(zip(*parts, strict=True))

    def _count_tokens(self, targets: Sequence[Tensors]) -> int:
        """Tokens of the global batch: counted on the last stages, where the loss is scaled."""
        if not self.is_last:
            return 1
        count = sum(self.model.count_tokens(each if len(each) > 1 else each[0]) for each in targets)
        total = torch.tensor([count], dtype=torch.int64, device=self.device)
        if len(self.plan.pipelines) > 1:
            with communication():
                dist.all_reduce(total, group=self.groups.of(self._last_ranks(self.place.tp_rank), "last"))
        return max(int(total), 1)

    def _commit(self, loss: float, tokens: int) -> Result:
        """Loss, tokens and squared norms to all, each figure from one process, zeros from the others: exact in any
        order."""
        most_tp = max(stage.tp for stage in self.plan.stages)
        slots = 2 * len(self.plan.pipelines)
        table = torch.zeros((len(self.plan.pipelines), 2), dtype=torch.float64)
        norms = torch.zeros((self.reducer.num_shared, slots, most_tp), dtype=torch.float64)
        if self.is_last and self.place.tp_rank == 0:
            table[self.place.pipeline] = torch.tensor([loss, tokens], dtype=torch.float64)
        for index, owner, square in self.reducer.squares():
            norms[index, owner, self.place.tp_rank] = square
        flat = torch.cat([table.flatten(), norms.flatten()]).to(self.device)
        if self.layout.world_size > 1:
            with communication():
                dist.all_reduce(flat, group=self.groups.of(tuple(range(self.layout.world_size)), "world"))
        rows = flat.tolist()
        losses, counts = rows[0 : 2 * len(self.plan.pipelines) : 2], rows[1 : 2 * len(self.plan.pipelines) : 2]
        return Result(sum(losses), total_norm(rows[2 * len(self.plan.pipelines) :]), int(max(counts)))


def _schedules(plan: Plan, schedule: str | Sequence[Schedule]) -> list[Schedule]:
    if not isinstance(schedule, str):
        found = list(schedule)
    else:
        found = [schedules.of_plan(pipeline, schedule) for pipeline in plan.pipelines]
    for each in found:
        schedules.validate(each)
    return found


def _fits(layout: Layout, model: Model) -> None:
    """Refuse a model or a world that is not the plan's before anything is built."""
    layers = layout.plan.blocks[-1].layers[1]
    if model.num_layers != layers:
        raise ValueError(f"the model has {model.num_layers} layers, the plan {layers} ({layout.plan.profile_name})")
    world = dist.get_world_size()
    if world != layout.world_size:
        raise ValueError(f"{world} processes run, the plan needs one for each of its {layout.world_size} devices")
    most_tp = max(stage.tp for stage in layout.plan.stages)
    if most_tp > 1 and model.parallelize is None:
        raise ValueError(
            f"the plan has stages of tp {most_tp}, and the model says no way to shard its layers (Model.parallelize)"
        )
    pairs = {tied.layers for tied in layout.plan.tied_blocks}
    tied = None if model.tied is None else (model.tied[0][0], model.tied[1][0])
    if pairs and pairs != {tied}:
        raise ValueError(
            f"the plan has layers {sorted(pairs)} share weights, the model {tied}; Model.tied has to agree"
        )
    deep = any(len(pipeline.stages) > 1 for pipeline in layout.plan.pipelines)
    if tied is not None and not pairs and deep and not _together(layout, tied):
        raise ValueError(f"the model has layers {tied} share weights, the profile of the plan did not say so")


def _together(layout: Layout, tied: tuple[int, int]) -> bool:
    return all(
        any(stage.layers[0] <= tied[0] and tied[1] < stage.layers[1] for stage in pipeline.stages)
        for pipeline in layout.plan.pipelines
    )
