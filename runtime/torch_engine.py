"""The same plan on `torch.distributed.pipelining`: an oracle for our own executor, and the way to split backward
passes.

Overrides of `PipelineStage` connect it to our reducer. Its runtime class, which plays any action list, is not public in
torch 2.13; this module is the only one that touches it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipelining

from planner.schedule import COMPUTE, Action, Kind, Schedule
from runtime.execute import Boundary, Played
from runtime.groups import communication
from runtime.model import Tensors, as_tuple

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
    trace: list[Played]
    began_s = 0.0

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = super().forward_one_chunk(chunk, *args, **kwargs)
        self._note(Kind.F, chunk, start)
        return out

    def backward_one_chunk(
        self, chunk: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if last_backward and full_backward:
            self.reducer.arm()
        start = time.perf_counter()
        super().backward_one_chunk(chunk, loss=loss, full_backward=full_backward, last_backward=last_backward)
        self._note(Kind.B if full_backward else Kind.I, chunk, start)

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        start = time.perf_counter()
        super().backward_weight_one_chunk(chunk, last_backward=last_backward)
        self._note(Kind.W, chunk, start)

    def perform_reduce_grad(self, grad_scale_factor: float) -> None:
        """Nothing: the trainer ends the reductions after the schedule."""

    def _note(self, kind: Kind, chunk: int, start: float) -> None:
        action = Action(self.stage_index, kind, chunk)
        self.trace.append(Played(action, start - self.began_s, time.perf_counter() - self.began_s))


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
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = _examples(leaves, trainer.device) or tuple(
                out.requires_grad_() for out in as_tuple(trainer.stage(*inputs))
            )
        self.stage = _Stage(
            trainer.stage,
            place.stage,
            schedule.num_stages,
            trainer.device,
            input_args=inputs,
            output_args=outputs,
            group=group,
        )
        self.stage.stage_index_to_group_rank = {s: position[rank] for s, rank in enumerate(ranks)}
        self.stage.reducer, self.stage.trace = trainer.reducer, []
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

    @property
    def trace(self) -> list[Played]:
        """What ran in the last step."""
        return self.stage.trace

    def run(self, inputs: Sequence[Tensors], targets: Sequence[Any], scale: float) -> Tensor:
        """All micro-batches forward and backward; as `runtime.execute.Executor.run`."""
        self.scale, self.stage.began_s = scale, time.perf_counter()
        self.stage.trace.clear()
        losses: list[Tensor] = []
        args = tuple(torch.cat(parts) for parts in zip(*inputs, strict=True)) if self.is_first else ()
        last: dict[str, Any] = {"target": torch.cat(list(targets)), "losses": losses} if self.is_last else {}
        with communication():
            self.runner.step(*args, return_outputs=False, **last)
        return torch.stack([loss.detach().double() for loss in losses]).sum() if losses else torch.zeros(())


def _examples(boundary: Boundary, device: torch.device) -> Tensors:
    return tuple(
        torch.empty(shape.size, dtype=shape.dtype, device=device, requires_grad=shape.differentiable)
        for shape in boundary
    )
