"""The same plan on `torch.distributed.pipelining`: an oracle for our own executor, and the way to split backward
passes.

Overrides of `PipelineStage` connect it to our reducer. Its runtime class, which plays any action list, is not public in
torch 2.13; this module is the only one that touches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipelining

from planner.schedule import COMPUTE, Action, Kind, Schedule
from runtime.clock import Clock
from runtime.execute import Boundary, check
from runtime.groups import Disconnected, RankFailed, communication
from runtime.layout import Place
from runtime.model import Tensors, outputs

if TYPE_CHECKING:
    from runtime.reduce import Reducer
    from runtime.trainer import Trainer

_KINDS = {
    Kind.F: pipelining.FORWARD,
    Kind.B: pipelining.FULL_BACKWARD,
    Kind.I: pipelining.BACKWARD_INPUT,
    Kind.W: pipelining.BACKWARD_WEIGHT,
}


class _Stage(PipelineStage):  # type: ignore[misc]
    """Tells the reducer when the last backward pass begins. Split ones add gradients by hand, which no hook sees: there
    everything is reduced at the end."""

    reducer: Reducer
    place: Place
    leaves: Boundary
    clock: Clock
    action: Action | None = None  # the last one that began

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        with self._computing(Kind.F, chunk):
            out = super().forward_one_chunk(chunk, *args, **kwargs)
        if not self.is_last:
            check(self.place, out, self.leaves)
        return out

    def backward_one_chunk(
        self, chunk: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if last_backward and full_backward:
            self.reducer.arm()
        with self._computing(Kind.B if full_backward else Kind.I, chunk):
            super().backward_one_chunk(chunk, loss=loss, full_backward=full_backward, last_backward=last_backward)
        if chunk in self.bwd_cache:
            self.bwd_cache[chunk] = tuple(None if g is None else g.contiguous() for g in self.bwd_cache[chunk])

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        with self._computing(Kind.W, chunk):
            super().backward_weight_one_chunk(chunk, last_backward=last_backward)

    def perform_reduce_grad(self, grad_scale_factor: float) -> None:
        """Nothing: the trainer ends the reductions after the schedule."""

    @contextmanager
    def _computing(self, kind: Kind, chunk: int) -> Iterator[None]:
        """Note when an action ran; errors of the model are not those of the network."""
        self.action, began = Action(self.stage_index, kind, chunk), self.clock.now()
        try:
            with communication(f"{self.place} at {self.action}: no answer in its layers", computing=True):
                yield
        except RankFailed:
            raise
        except RuntimeError as error:
            raise _ModelFailed(error) from None
        self.clock.keep(self.action, began, self.clock.now())


class _ModelFailed(Exception):
    """Carries an error of the model through torch's runtime."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.error = error


class _Contiguous(nn.Module):
    """A stage whose outputs can be sent."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *tensors: Tensor) -> Any:
        out = self.stage(*tensors)
        return tuple(each.contiguous() for each in out) if isinstance(out, tuple) else out.contiguous()


class TorchEngine:
    """Plays a pipeline's lists on torch's own runtime; steps like `runtime.execute.Executor`."""

    def __init__(
        self, trainer: Trainer, schedule: Schedule, boundaries: tuple[Boundary, Boundary], sample: Tensors | None
    ) -> None:
        place, layout = trainer.place, trainer.layout
        ranks = [layout.unit(place.pipeline, s)[place.tp_rank] for s in range(schedule.num_stages)]
        group = trainer.groups.of(tuple(sorted(ranks)), "pipeline", single=True)
        position = {rank: n for n, rank in enumerate(sorted(ranks))}
        arrives, leaves = boundaries
        inputs = tuple(sample) if sample is not None else _examples(arrives, trainer.device)
        returned = _examples(leaves, trainer.device) or tuple(
            out.requires_grad_() for out in outputs(trainer.stage, inputs)
        )
        self.stage = _Stage(
            _Contiguous(trainer.stage),
            place.stage,
            schedule.num_stages,
            trainer.device,
            input_args=inputs,
            output_args=returned,
            group=group,
        )
        self.stage.stage_index_to_group_rank = {s: position[rank] for s, rank in enumerate(ranks)}
        self.stage.reducer, self.stage.place, self.stage.leaves = trainer.reducer, place, leaves
        self.is_first, self.is_last = trainer.is_first, trainer.is_last
        self.scale = 1.0
        self.runner = pipelining._PipelineScheduleRuntime(
            [self.stage],
            schedule.num_micro_batches,
            loss_fn=lambda out, target: trainer.model.loss(out, target) * self.scale,
            scale_grads=False,
        )
        self.runner._prepare_schedule_with_comms(
            {
                position[ranks[actions[0].stage]]: [
                    pipelining._Action(action.stage, _KINDS[action.kind], action.index)
                    for action in actions
                    if action.kind in COMPUTE
                ]
                for actions in schedule.ranks
            }
        )

    def run(self, inputs: Sequence[Tensors], targets: Sequence[Any], scale: float, clock: Clock) -> Tensor:
        """All micro-batches forward and backward; as `runtime.execute.Executor.run`."""
        self.scale, self.stage.clock = scale, clock
        self.stage.has_backward = True
        self.stage.clear_runtime_states()
        losses: list[Tensor] = []
        last: dict[str, Any] = {"target_mbs": list(targets), "losses": losses} if self.is_last else {}
        try:
            with communication():  # not `step`: it can cut targets into micro-batches only if they are one tensor
                self.runner._step_microbatches(list(inputs) if self.is_first else None, return_outputs=False, **last)
        except Disconnected as error:
            stage = self.stage
            where = f"after {stage.action}" if stage.action is not None else "before its first action"
            raise RankFailed(f"{stage.place} {where}: no answer from a neighbour: {error}") from None
        except _ModelFailed as failed:
            raise failed.error from failed.error.__cause__
        return torch.stack([loss.detach().double() for loss in losses]).sum() if losses else torch.zeros(())


def _examples(boundary: Boundary, device: torch.device) -> Tensors:
    return tuple(
        torch.empty(shape.size, dtype=shape.dtype, device=device, requires_grad=shape.differentiable)
        for shape in boundary
    )
