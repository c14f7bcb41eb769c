"""Trains a model under a plan: this process's stage, its micro-batches, its gradients.

    loss = sum over tokens / tokens of the global batch      scaled on the last stages, so that gradients add up
    step = all actions, all reductions, one exchange of loss and squared norms, update

The exchange is the commit: a process that has its result knows that every other has complete gradients. So either all
processes can finish the step, or none has begun to apply it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from planner import schedule as schedules
from planner.plans import Plan
from planner.schedule import Action, Kind, Schedule
from runtime import execute, reduce
from runtime.clock import Clock, Played
from runtime.execute import Executor
from runtime.groups import Groups, agree, communication, gathered
from runtime.layout import Layout
from runtime.model import Model, Stage, Tensors, as_tuple, same_random_state
from runtime.reduce import Reducer, total_norm

TIMEOUT_S = 300.0
T = TypeVar("T")
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
    """One process of a training run. `torch.distributed` has to be initialised with one process per device of the plan;
    it ends with the trainer (`close`, or the end of a ``with``).

    Parameters
    ----------
    plan
        Value or file.
    model
        Chain of as many layers as the plan's.
    optimizer
        Makes one from parameters. Where state is sharded it gets flat parts of blocks, so it has to be elementwise and
        to treat all parameters alike.
    clip
        Largest norm of the gradient; None for none.
    dtype
        Of weights and activations, as built if None; gradients of bf16 weights are summed in fp32, and fp32 master
        weights updated.
    seed
        Of the layers' first weights, and of what they draw in a step.
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

    Raises
    ------
    ValueError
        On all processes alike: if model, plan and world do not fit each other, if processes were given different
        options, or if replicas of a layer do not start equal.
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
        self.plan = _on_all(lambda: plan if isinstance(plan, Plan) else Plan.load(plan))
        self.model, self.clip, self.device, self.engine = model, clip, torch.device(device), engine
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # what collectives of objects go by
        job = self.plan.job
        how = {
            "granularity": granularity or job.sync_granularity,
            "chunk_bytes": job.sync_chunk_bytes if chunk_bytes is None else chunk_bytes,
            "overlap": job.sync == "overlapped" if overlap is None else overlap,
            "shard": job.shard_optimizer if shard_optimizer is None else shard_optimizer,
        }
        self.seed, given = seed, {"engine": engine, "seed": seed, "dtype": dtype, "clip": clip, **how}
        self.layout, lists = _agreed(self.plan, model, schedule, given)
        self.place = self.layout.places[dist.get_rank()]
        self.pipeline, stage = self.layout.pipeline(self.place), self.layout.stage(self.place)
        self.schedule = lists[self.place.pipeline]
        self.groups = Groups(timeout_s)
        self._create_groups(how["granularity"])
        self.mesh = self._mesh()
        self.stage = _on_all(
            lambda: Stage(
                model,
                stage.layers,
                recompute=stage.recompute,
                seed=seed,
                dtype=dtype,
                device=self.device,
                mesh=self.mesh,
            )
        )
        self.reducer = _on_all(lambda: Reducer(self.layout, self.place, self.stage, self.groups, **how))
        self.reducer.agree()
        self.optimizer = _optimizer(optimizer, self.reducer)
        self.executor: Any = None
        self.on_action: Callable[[Action], None] | None = None  # called before each action of the own engine
        self.step_index = 0  # steps applied
        self.committed: tuple[int, Result] | None = None  # the last step whose gradients are known to be complete
        self.tracing = False
        self.trace: tuple[Played, ...] = ()  # of the last step that began with `tracing`
        self.clock = Clock(self.device)

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
        x = self._micro_batches("inputs", inputs, self.is_first)
        y = self._micro_batches("targets", targets, self.is_last)
        if self.executor is None:
            self.executor = self._executor(x[0] if x else None)
        self.executor.on_action = self.on_action
        tokens = self._count_tokens(y)
        if self.tracing:
            with communication(self._during("the barrier that begins the trace")):
                dist.barrier(group=self.groups.world)
        self.clock = Clock(self.device, running=self.tracing)
        self.reducer.zero(self.clock)
        targets = [each if len(each) > 1 else each[0] for each in y]
        with same_random_state():
            torch.manual_seed(self._seed_of_step())
            loss = self.executor.run(x, targets, 1.0 / max(tokens, 1), self.clock)
        self.reducer.finish()
        result = self._commit(float(loss), tokens)
        self.committed = self.step_index, result
        return result

    def apply(self, result: Result) -> None:
        """Clip and update, on complete gradients."""
        began = self.clock.now()
        if self.clip is not None and result.norm > self.clip:
            self.reducer.scale(self.clip / (result.norm + 1e-6))
        self.optimizer.step()
        with communication(self._during("the exchange of updated weights")):
            self.reducer.publish()
        self.step_index += 1
        if self.clock.running:
            self.clock.keep(Action(self.place.stage, Kind.UPDATE, None), began, self.clock.now())
            self.trace = self.clock.played()

    def close(self) -> None:
        """Drop hooks, groups and the connection, so that others notice at once if this process leaves."""
        self.reducer.close()
        self.executor = None
        if self.mesh is not None:  # weights that are sharded over it live on, and would keep its group open
            getattr(self.mesh, "_pg_registry", {}).clear()
        self.groups.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Parts

    def _create_groups(self, granularity: str) -> None:
        layout, most = self.layout, max(stage.tp for stage in self.plan.stages)
        sets = [shared.ranks for t in range(most) for shared in layout.shared(t)]
        sets += [layout.unit(place.pipeline, place.stage) for place in layout.places]
        sets += [self._last_ranks(t) for t in range(self.plan.pipelines[0].stages[-1].tp)]
        sets.append(tuple(range(layout.world_size)))
        if granularity == "model":
            sets += [tuple(p.rank for p in layout.places if p.tp_rank == t) for t in range(most)]
        self.groups.create(sets)
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
        """Device mesh of this stage's tp group."""
        unit = self.layout.unit(self.place.pipeline, self.place.stage)
        if len(unit) == 1:
            return None
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.groups.of(unit), self.device.type)

    def _executor(self, sample: Tensors | None) -> Any:
        channels = execute.channels(self.layout, self.place, self.groups, self.device)
        boundaries = execute.agree(self.place, self.stage, sample, channels)
        if self.engine == "torch":
            from runtime.torch_engine import TorchEngine

            return TorchEngine(self, self.schedule, boundaries, sample)
        return Executor(
            self.layout,
            self.place,
            self.stage,
            self.model,
            self.schedule,
            self.reducer,
            channels,
            boundaries,
            self.device,
        )

    def _seed_of_step(self) -> int:
        """Of what layers draw (dropout): another one for every step, pipeline and stage, one for all tp ranks."""
        return zlib.crc32(f"{self.seed} {self.step_index} {self.place.pipeline} {self.place.stage}".encode())

    def _during(self, what: str) -> str:
        return f"{self.place} in {what} of step {self.step_index + 1}"

    def _micro_batches(self, what: str, value: Any, wanted: bool) -> list[Tensors]:
        if not wanted:
            return []
        if value is None:
            raise ValueError(f"{what}: {self.place} needs those of samples {self.samples.start} to {self.samples[-1]}")
        tensors, b = as_tuple(value), self.pipeline.micro_batch
        for tensor in tensors:
            if len(tensor) != len(self.samples):
                raise ValueError(
                    f"{what}: {len(tensor)} samples given, {self.place} takes {len(self.samples)} (Trainer.samples)"
                )
        parts = [tensor.to(self.device).split(b) for tensor in tensors]
        return list(zip(*parts, strict=True))

    def _count_tokens(self, targets: Sequence[Tensors]) -> int:
        """Tokens of the global batch: counted on the last stages, where the loss is scaled."""
        if not self.is_last:
            return 0
        count = sum(self.model.count_tokens(each if len(each) > 1 else each[0]) for each in targets)
        total = torch.tensor([count], dtype=torch.int64, device=self.device)
        if len(self.plan.pipelines) > 1:
            with communication(self._during("the count of tokens over the last stages")):
                dist.all_reduce(total, group=self.groups.of(self._last_ranks(self.place.tp_rank)))
        return int(total)

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
            with communication(self._during("the commit, the exchange of loss and norm")):
                dist.all_reduce(flat, group=self.groups.world)
        rows = flat.tolist()
        losses, counts = rows[0 : 2 * len(self.plan.pipelines) : 2], rows[1 : 2 * len(self.plan.pipelines) : 2]
        return Result(sum(losses), total_norm(rows[2 * len(self.plan.pipelines) :]), int(max(counts)))


def _schedules(plan: Plan, schedule: str | Sequence[Schedule], engine: str) -> list[Schedule]:
    if isinstance(schedule, str):
        found = [schedules.of_plan(pipeline, schedule) for pipeline in plan.pipelines]
    else:
        found = list(schedule)
    if len(found) != len(plan.pipelines):
        raise ValueError(f"schedule: {len(found)} lists, expected one for each of {len(plan.pipelines)} pipelines")
    for p, (each, pipeline) in enumerate(zip(found, plan.pipelines, strict=True)):
        schedules.validate(each)
        given = (each.num_stages, len(each.ranks), each.num_micro_batches)
        stages = len(pipeline.stages)
        if given != (stages, stages, pipeline.num_micro_batches):
            raise ValueError(
                f"schedule of pipeline {p}: {given[0]} stages on {given[1]} ranks, {given[2]} micro-batches; the plan"
                f" has {stages} stages, each on a rank of its own, and {pipeline.num_micro_batches} micro-batches"
            )
        split = next((str(a) for rank in each.ranks for a in rank if a.kind in (Kind.I, Kind.W)), None)
        if engine == "own" and split is not None:
            raise ValueError(f"{split}: this engine runs whole backward passes; use engine 'torch' for split ones")
    return found


def _agreed(
    plan: Plan, model: Model, schedule: str | Sequence[Schedule], options: Mapping[str, Any]
) -> tuple[Layout, list[Schedule]]:
    """Layout and schedules, if nothing is wrong on any process and all were given the same; else one error on all.

    This comes before any group exists: who leaves while others connect would break their connections.
    """

    def own() -> tuple[Layout, list[Schedule]]:
        reduce.check(options["granularity"], options["shard"], options["chunk_bytes"])
        layout = Layout(plan)
        _fits(layout, model, options["engine"], options["dtype"])
        return layout, _schedules(plan, schedule, options["engine"])

    layout, lists = _on_all(own)
    names = [f"{each.name} {zlib.crc32(str(each).encode()):08x}" for each in lists]
    first, *others = gathered(None, {"plan": plan.digest, "schedule": names, **options}, _at_load())
    for rank, given in enumerate(others, 1):
        for key, value in given.items():
            if value != first[key]:
                raise ValueError(f"{key}: {value!r} on rank {rank}, {first[key]!r} on rank 0; expected the same on all")
    return layout, lists


def _on_all(make: Callable[[], T]) -> T:
    """What this process makes, once all have succeeded; what is wrong on one is raised on all."""
    made, problem = None, None
    try:
        made = make()
    except Exception as error:
        problem = error
    words = None
    if problem is not None:
        what = "" if isinstance(problem, ValueError) else f"rank {dist.get_rank()}: {type(problem).__name__}: "
        words = f"{what}{problem}"
    try:
        agree(None, words, _at_load())
    except ValueError as error:
        if problem is not None and not isinstance(problem, ValueError):
            raise problem from None  # here, what it really was
        raise error from problem
    return made  # type: ignore[return-value]


def _at_load() -> str:
    return f"rank {dist.get_rank()} at load: no answer from the others"


def _optimizer(make: Optimizers, reducer: Reducer) -> torch.optim.Optimizer:
    """The optimizer; where the stage has nothing to train, of one parameter without elements, since it needs some."""
    parameters = [parameter for _, parameter in reducer.optimized()]
    optimizer = make(parameters or [nn.Parameter(torch.empty(0))])
    if reducer.shard and len(optimizer.param_groups) > 1:
        raise ValueError(
            f"optimizer: {len(optimizer.param_groups)} parameter groups, and sharded optimizer state knows flat parts"
            " of blocks, not parameters; expected one group, or shard_optimizer=False"
        )
    return optimizer


def _fits(layout: Layout, model: Model, engine: str, dtype: torch.dtype | None) -> None:
    """Refuse a model, a world or a setting that does not go with the plan before anything is built."""
    if engine not in ("own", "torch"):
        raise ValueError(f"engine: {engine!r} is not among own, torch")
    degrees = [sorted({stage.tp for stage in pipeline.stages}) for pipeline in layout.plan.pipelines]
    if engine == "torch" and any(len(each) > 1 for each in degrees):
        raise ValueError(
            f"engine: 'torch' hands over between stages of equal tp only, a pipeline has tp {max(degrees, key=len)};"
            " expected 'own'"
        )
    if dtype == torch.float16:
        raise ValueError(f"dtype: {reduce.FP16}")
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
