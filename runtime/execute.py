"""Runs a stage's action list as written, over point-to-point transfers.

Actions run one at a time, in order. A receive is posted ahead of the action that needs it, a send goes on beside the
computing that follows, so that transfers hide behind arithmetic. What stages hand over is a tuple of tensors whose
shapes and precision are agreed at load and checked before every send: a short message would arrive silently in a
larger buffer, a long one would end the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from planner.schedule import Action, Kind, Schedule
from runtime.clock import Clock
from runtime.groups import Groups, communication
from runtime.layout import Layout, Place
from runtime.model import Model, Stage, Tensors, as_tuple, outputs
from runtime.reduce import Reducer

TAGS_PER_MESSAGE = 32  # most tensors in one hand-over, times two directions
AHEAD = 1  # receives posted beyond the one that is needed now


class Shape(NamedTuple):
    """One tensor of a hand-over."""

    size: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.is_floating_point() or tensor.is_complex())


Boundary = tuple[Shape, ...]


def boundary(place: Place, out: Any) -> Boundary:
    """Of what a stage returns."""
    for each in as_tuple(out):
        if not isinstance(each, Tensor):
            raise ValueError(f"{place}: hands over a {type(each).__name__}, expected a tensor or a tuple of tensors")
    return tuple(Shape.of(tensor) for tensor in as_tuple(out))


def check(place: Place, out: Any, agreed: Boundary) -> None:
    """Refuse to hand over what the next stage does not expect."""
    found = boundary(place, out)
    if found != agreed:
        raise ValueError(
            f"{place}: hands over {_words(found)}, agreed at load was {_words(agreed)}; shapes may not change between"
            " micro-batches or steps"
        )


@dataclass(slots=True)
class _Message:
    """A hand-over under way: buffers, and the requests that fill or empty them."""

    tensors: list[Tensor | None]
    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Channel:
    """Transfers between a process and one neighbouring stage.

    Both stages' tp ranks hold whole activations. Each process receives from one of the other stage's, and sends to
    those that receive from it. gloo keeps messages apart by tag. NCCL has no tags and one queue per communicator, so
    there each direction of each pair of processes has a group of its own.

    Parameters
    ----------
    source
        Rank it receives from.
    targets
        Ranks it sends to.
    """

    def __init__(self, rank: int, source: int, targets: Sequence[int], groups: Groups, device: torch.device) -> None:
        self.source, self.targets, self.device = source, tuple(targets), device
        self.group = groups.world
        self.inward = _pair_group(groups, source, rank)
        self.outward = [_pair_group(groups, rank, target) for target in targets]

    def send(self, tensors: Sequence[Tensor | None], index: int, backward: bool) -> _Message:
        works = [
            dist.isend(_bytes(tensor), target, group=group, tag=self._tag(index, backward, k))
            for target, group in zip(self.targets, self.outward, strict=True)
            for k, tensor in enumerate(tensors)
            if tensor is not None
        ]
        return _Message(list(tensors), works)

    def receive(self, boundary: Boundary, index: int, backward: bool) -> _Message:
        buffers: list[Tensor | None] = [
            torch.empty(shape.size, dtype=shape.dtype, device=self.device)
            if shape.differentiable or not backward
            else None
            for shape in boundary
        ]
        works = [
            dist.irecv(_bytes(buffer), self.source, group=self.inward, tag=self._tag(index, backward, k))
            for k, buffer in enumerate(buffers)
            if buffer is not None
        ]
        return _Message(buffers, works)

    @staticmethod
    def _tag(index: int, backward: bool, k: int) -> int:
        return (2 * index + backward) * TAGS_PER_MESSAGE + k


class Executor:
    """One stage of a pipeline, playing its actions.

    Parameters
    ----------
    schedule
        Of the pipeline. F and B of this stage are played as written; transfers, reductions and update have their place
        after what they need, and are found there without being listed.
    arrives, leaves
        What the stage takes from the one before and hands to the one after; empty at the ends of the pipeline.
    """

    def __init__(
        self,
        layout: Layout,
        place: Place,
        stage: Stage,
        model: Model,
        schedule: Schedule,
        reducer: Reducer,
        channels: tuple[Channel | None, Channel | None],
        boundaries: tuple[Boundary, Boundary],
        device: torch.device,
    ) -> None:
        self.layout, self.place, self.stage, self.model = layout, place, stage, model
        self.schedule = schedule
        self.actions = [action for action in schedule.ranks[place.stage] if action.kind in (Kind.F, Kind.B)]
        self.reducer, self.device = reducer, device
        self.before, self.after = channels
        self.arrives, self.leaves = boundaries
        self.on_action: Callable[[Action], None] | None = None

    def run(self, inputs: Sequence[Tensors], targets: Sequence[Any], scale: float, clock: Clock) -> Tensor:
        """All micro-batches forward and backward; returns the loss, summed and scaled, where this is the last stage.

        Parameters
        ----------
        inputs, targets
            Per micro-batch; looked at on the first and the last stage.
        scale
            One over the tokens of the global batch.
        """
        flow = _Flow(self, clock)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        held: dict[int, tuple[Tensors, Tensors]] = {}
        last = [action for action in self.actions if action.kind == Kind.B][-1]
        for action in self.actions:
            if self.on_action is not None:
                self.on_action(action)
            flow.post(action)
            k = _index(action)
            if action.kind == Kind.F:
                x = inputs[k] if self.before is None else flow.arrived(action)
                began = clock.now()
                with communication(flow.in_layers(action), computing=True):
                    held[k] = x, self._forward(x, None if self.after is not None else targets[k], scale, loss)
                clock.keep(action, began, clock.now())
                if self.after is not None:
                    flow.send(action, [tensor.detach() for tensor in held[k][1]])
            else:
                gradient = flow.arrived(action) if self.after is not None else None
                began = clock.now()
                x, y = held.pop(k)
                if action == last:
                    self.reducer.arm()
                with communication(flow.in_layers(action), computing=True):
                    self._backward(y, gradient)
                clock.keep(action, began, clock.now())
                if self.before is not None:
                    flow.send(action, [_gradient(tensor) for tensor in x])
                del x, y, gradient
        flow.finish()
        return loss

    def _forward(self, x: Tensors, targets: Any, scale: float, loss: Tensor) -> Tensors:
        y = self.stage(*x)
        if self.after is not None:
            check(self.place, y, self.leaves)
            return as_tuple(y)
        out = self.model.loss(y, targets) * scale
        loss += out.detach()
        return (out,)

    @staticmethod
    def _backward(y: Tensors, gradient: Sequence[Tensor | None] | None) -> None:
        if gradient is None:
            y[0].backward()
            return
        pairs = [(out, grad) for out, grad in zip(y, gradient, strict=True) if grad is not None and out.requires_grad]
        if pairs:  # none where the stage and all before it are frozen
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])


@dataclass(slots=True)
class _Direction:
    """The receives of one direction: where from, what, those still to post, how many actions have begun."""

    channel: Channel
    boundary: Boundary
    actions: deque[Action]
    begun: int = 0
    posted: int = 0


class _Flow:
    """Messages of one step: receives posted ahead in the order of the actions, sends kept until they are gone.

    gloo does not say that a send is done unless one waits for it. But what arrives tells how far the other stage is in
    its list: whatever it has received by then is let go of.
    """

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self.executor, self.clock = executor, clock
        self.sends: list[tuple[Action, Any, _Message]] = []
        self.progress = {  # when, in its list, a neighbour runs each action
            action: n
            for s in (executor.place.stage - 1, executor.place.stage + 1)
            if 0 <= s < len(executor.schedule.ranks)
            for n, action in enumerate(executor.schedule.ranks[s])
        }
        self.waiting: dict[Action, _Message] = {}
        self.directions = {
            kind: _Direction(channel, boundary, deque(action for action in executor.actions if action.kind == kind))
            for kind, channel, boundary in (
                (Kind.F, executor.before, executor.arrives),
                (Kind.B, executor.after, executor.leaves),
            )
            if channel is not None
        }

    def post(self, action: Action) -> None:
        """Receives for an action that begins and, of each direction, `AHEAD` beyond what was needed so far."""
        for kind, way in self.directions.items():
            way.begun += action.kind == kind
            while way.actions and way.posted < way.begun + AHEAD:
                later = way.actions.popleft()
                with communication(self._waiting(action, way.channel.source)):
                    self.waiting[later] = way.channel.receive(way.boundary, _index(later), kind == Kind.B)
                way.posted += 1

    def arrived(self, action: Action) -> Tensors:
        """The tensors an action needs, once they are here."""
        message, began = self.waiting.pop(action), self.clock.now()
        with communication(self._waiting(action, self.directions[action.kind].channel.source)):
            message.wait()
        kind = Kind.RECV_F if action.kind == Kind.F else Kind.RECV_B
        self.clock.keep(action._replace(kind=kind), began, self.clock.now())
        self._let_go(self._neighbour(action, backwards=action.kind == Kind.F))
        if action.kind == Kind.B:
            return tuple(message.tensors)  # type: ignore[arg-type]  # None where no gradient flows
        for tensor, shape in zip(message.tensors, self.executor.arrives, strict=True):
            assert tensor is not None
            tensor.requires_grad_(shape.differentiable)
        return tuple(message.tensors)  # type: ignore[arg-type]

    def send(self, action: Action, tensors: Sequence[Tensor | None]) -> None:
        """Start to hand over what an action made."""
        channel, began = self._onward(action), self.clock.now()
        whole = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        with communication(self._waiting(action, *channel.targets)):
            message = channel.send(whole, _index(action), action.kind == Kind.B)
        self.sends.append((action, began, message))

    def finish(self) -> None:
        """Wait for the last sends."""
        for each in self.sends:
            self._end(*each)
        self.sends.clear()

    def _let_go(self, reached: Action) -> None:
        """Of what a neighbour has received if it ran an action."""
        left = []
        for each in self.sends:
            action = each[0]
            user = self._neighbour(action, backwards=action.kind == Kind.B)
            if user.stage == reached.stage and self.progress[user] <= self.progress[reached]:
                self._end(*each)
            else:
                left.append(each)
        self.sends = left

    @staticmethod
    def _neighbour(action: Action, *, backwards: bool) -> Action:
        """The same pass of the same micro-batch on the stage before or after."""
        return action._replace(stage=action.stage - 1 if backwards else action.stage + 1)

    def _end(self, action: Action, began: Any, message: _Message) -> None:
        with communication(self._waiting(action, *self._onward(action).targets)):
            message.wait()
        kind = Kind.SEND_F if action.kind == Kind.F else Kind.SEND_B
        self.clock.keep(action._replace(kind=kind), began, self.clock.now())

    def _onward(self, action: Action) -> Channel:
        channel = self.executor.after if action.kind == Kind.F else self.executor.before
        assert channel is not None
        return channel

    def in_layers(self, action: Action) -> str:
        """What an error says of layers that communicate by themselves, over their tp group."""
        place = self.executor.place
        others = [rank for rank in self.executor.layout.unit(place.pipeline, place.stage) if rank != place.rank]
        return self._waiting(action, *others)

    def _waiting(self, action: Action, *ranks: int) -> str:
        peers = " or ".join(str(self.executor.layout.places[rank]) for rank in ranks)
        return f"{self.executor.place} at {action}: no answer from {peers}"


def channels(
    layout: Layout, place: Place, groups: Groups, device: torch.device
) -> tuple[Channel | None, Channel | None]:
    """To the stage before and the stage after."""
    found: list[Channel | None] = []
    for other in (place.stage - 1, place.stage + 1):
        if not 0 <= other < len(layout.pipeline(place).stages):
            found.append(None)
            continue
        mine, theirs = layout.unit(place.pipeline, place.stage), layout.unit(place.pipeline, other)
        targets = [rank for t, rank in enumerate(theirs) if t % len(mine) == place.tp_rank]
        found.append(Channel(place.rank, theirs[place.tp_rank % len(theirs)], targets, groups, device))
    return found[0], found[1]


def create_pairs(layout: Layout, groups: Groups) -> None:
    """With NCCL, a group for each two processes of neighbouring stages and each direction; gloo needs none."""
    if dist.get_backend() != "nccl":
        return
    pairs = []
    for p, pipeline in enumerate(layout.plan.pipelines):
        for s in range(len(pipeline.stages) - 1):
            a, b = layout.unit(p, s), layout.unit(p, s + 1)
            pairs += [(x, y) for x in a for y in b]
    groups.create([pair if pair[0] < pair[1] else pair[::-1] for pair in pairs], "up")
    groups.create([pair if pair[0] < pair[1] else pair[::-1] for pair in pairs], "down")


def _pair_group(groups: Groups, sender: int, receiver: int) -> Any:
    if dist.get_backend() != "nccl":
        return groups.world
    return groups.of((min(sender, receiver), max(sender, receiver)), "up" if sender < receiver else "down")


def agree(
    place: Place, stage: Stage, sample: Tensors | None, to: tuple[Channel | None, Channel | None]
) -> tuple[Boundary, Boundary]:
    """Shapes of what arrives and leaves, worked out once along the pipeline with one micro-batch, before any step.

    Parameters
    ----------
    sample
        Input of a micro-batch, on the first stage.
    """
    before, after = to
    arrives: Boundary = ()
    if before is not None:
        found: list[Any] = [None]
        with communication(f"{place} before its first step: no shapes from rank {before.source}"):
            dist.recv_object_list(found, src=before.source, group=before.group)
        arrives = found[0]
        sample = tuple(torch.zeros(shape.size, dtype=shape.dtype, device=before.device) for shape in arrives)
    if after is None:
        return arrives, ()
    assert sample is not None
    leaves = boundary(place, outputs(stage, sample))
    if len(leaves) > TAGS_PER_MESSAGE:
        raise ValueError(f"{place}: hands over {len(leaves)} tensors, at most {TAGS_PER_MESSAGE} are supported")
    for target in after.targets:
        with communication(f"{place} before its first step: shapes not taken by rank {target}"):
            dist.send_object_list([leaves], dst=target, group=after.group)
    return arrives, leaves


def _bytes(tensor: Tensor) -> Tensor:
    """Truth values travel as bytes: gloo knows no bool."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _index(action: Action) -> int:
    assert action.index is not None
    return action.index


def _gradient(tensor: Tensor) -> Tensor | None:
    if not Shape.of(tensor).differentiable:
        return None
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)


def _words(shapes: Boundary) -> str:
    return ", ".join(f"{list(shape.size)} {str(shape.dtype).removeprefix('torch.')}" for shape in shapes) or "nothing"
