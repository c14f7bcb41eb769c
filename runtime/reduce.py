"""Block-wise gradient aggregation: gradients of layers with the same owners, summed in few calls, while backward runs.

A `Bucket` holds the gradients of one block (or of tied weights) in one flat tensor, of which every ``param.grad`` is a
view: nothing is packed or copied. It is cut into chunks, the last layer first; a chunk is reduced as soon as the last
micro-batch has passed all its parameters. All processes start their chunks in one order (`Layout.shared`), whatever
order gradients become ready in: two processes that share two groups would otherwise wait for each other.

With `shard` every owner keeps the optimizer state of an equal part of each chunk only (ZeRO-1 by block): gradients are
reduce-scattered, the owner updates its part, weights are gathered.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.schedule import Action, Kind
from runtime.clock import Clock
from runtime.groups import Groups, communication, gathered
from runtime.layout import Layout, Place, Shared
from runtime.model import Stage

GRANULARITIES = ("tensor", "layer", "block", "model")
SUMMED = 1 << 16  # elements whose squares are added up in their own precision
FP16 = "fp16 needs its loss scaled, which the runtime does not do; expected torch.bfloat16"
Named = tuple[str, nn.Parameter]


@dataclass(slots=True, eq=False)
class Chunk:
    """A slice [start, end) of a bucket that one call reduces, and how many of its parameters are not ready."""

    start: int
    end: int
    number: int  # position in the bucket
    members: tuple[int, ...]  # positions of its parameters in the bucket
    missing: int = 0


@dataclass(slots=True, eq=False)
class Bucket:
    """The gradients of a block on one process.

    Parameters
    ----------
    parameters
        Named, the last layer first.
    offsets
        Where each begins in the flat tensors.
    gradients
        Flat, in the precision they are summed in.
    weights
        Flat, where the optimizer state is sharded: every parameter is a view of it.
    """

    shared: Shared
    group: Any
    parameters: list[Named]
    offsets: list[int]
    chunks: list[Chunk]
    gradients: Tensor
    weights: Tensor | None = None
    shards: list[nn.Parameter] = field(default_factory=list)

    @property
    def num_owners(self) -> int:
        """Processes that hold these gradients."""
        return len(self.shared.ranks)

    def chunks_of_parameters(self) -> list[list[Chunk]]:
        """The chunks that hold each parameter."""
        found: list[list[Chunk]] = [[] for _ in self.parameters]
        for chunk in self.chunks:
            for index in chunk.members:
                found[index].append(chunk)
        return found

    def part(self, chunk: Chunk, flat: Tensor, owner: int) -> Tensor:
        """An owner's equal part of a chunk of a flat tensor."""
        length = (chunk.end - chunk.start) // self.num_owners
        return flat[chunk.start + owner * length : chunk.start + (owner + 1) * length]


class Reducer:
    """All gradients of one process, and what the optimizer works on.

    Parameters
    ----------
    granularity
        What one call carries: a ``tensor``, a ``layer``, a ``block`` in chunks of at most `chunk_bytes`, or the whole
        ``model`` over all processes (to compare with).
    overlap
        Start a chunk as soon as its gradients are complete; otherwise after the whole backward pass.
    shard
        Shard the optimizer state of each block over its owners.

    Raises
    ------
    ValueError
        On this process only, if its layers cannot be reduced or sharded like that.
    """

    def __init__(
        self,
        layout: Layout,
        place: Place,
        stage: Stage,
        groups: Groups,
        *,
        granularity: str = "block",
        chunk_bytes: int = 64 << 20,
        overlap: bool = True,
        shard: bool = False,
    ) -> None:
        check(granularity, shard, chunk_bytes)
        self.layout, self.place, self.stage, self.groups, self.granularity = layout, place, stage, groups, granularity
        self.overlap, self.shard = overlap and granularity != "model", shard
        self.num_shared = len(layout.shared(0))
        members = list(self._members(stage))
        self._check(members)
        self.buckets = [self._bucket(shared, parameters, groups, chunk_bytes) for shared, parameters in members]
        self.masters = {} if shard else _masters(self.buckets)
        self.order = [(bucket, chunk) for bucket in self.buckets for chunk in bucket.chunks]
        self.hooks = [
            (parameter, self._hook(name, chunks))
            for bucket in self.buckets
            if bucket.group is not None
            for (name, parameter), chunks in zip(bucket.parameters, bucket.chunks_of_parameters(), strict=True)
        ]
        self.handles: list[Any] = []  # hooks in place: only for the last backward pass, since each call costs
        self.armed = False
        self.started = 0
        self.works: list[tuple[Any, Bucket, Chunk]] = []
        self.first_call = list(range(self.num_shared))  # number of a bucket's first reduction, over all processes
        self.whole: _Whole | None = None
        self.clock = Clock(torch.device("cpu"))
        self.silent: dict[Action, Any] = {}  # reductions that do not tell when they are done, and their start

    # Setting up

    def agree(self) -> None:
        """Hold what this process has against what the other owners have; a collective, once before the first step.

        Raises
        ------
        ValueError
            On all processes alike: if owners of the same layers differ in sizes, precision or first weights.
        """
        stage = self.stage
        held = _Held(
            {bucket.shared.index: _Facts.of(bucket) for bucket in self.buckets},
            {l: checksum(stage.layers[str(l)].state_dict().values()) for l in range(stage.first, stage.end)},
        )
        world = gathered(self.groups.world, held, f"{self.place} at load")
        for problem in _differences(world, self.layout):
            raise ValueError(problem)
        calls, sizes = [0] * self.num_shared, [0] * self.num_shared
        for index, facts in (item for each in world for item in each.buckets.items()):
            calls[index], sizes[index] = len(facts.bounds) - 1, max(sizes[index], facts.bounds[-1])
        self.first_call = list(accumulate(calls, initial=0))[:-1]
        if self.granularity == "model":
            self.first_call = [0] * self.num_shared
            dtypes = [facts.dtype for each in world for facts in each.buckets.values()]
            self.whole = _Whole(self, sizes, torch.float64 if torch.float64 in dtypes else torch.float32)

    def _check(self, members: Iterable[tuple[Shared, list[list[Named]]]]) -> None:
        """Refuse layers that cannot be reduced, or sharded where they should."""
        for shared, rows in members:
            named = [each for row in rows for each in row]
            where = f"{self.place}: layers {shared.layers[0]} to {shared.layers[1] - 1}"
            if any(parameter.dtype == torch.float16 for _, parameter in named):
                raise ValueError(f"{where}: {FP16}")
            if not self.shard:
                continue
            if any(hasattr(parameter, "placements") for _, parameter in named):
                raise ValueError(
                    f"{where}: sharded optimizer state is not supported for layers that tensor parallelism shards"
                )
            dtypes = {str(parameter.dtype).removeprefix("torch.") for _, parameter in named}
            if len(dtypes) > 1:
                raise ValueError(
                    f"{where}: weights of {' and '.join(sorted(dtypes))}; sharded optimizer state needs one precision"
                )

    def _members(self, stage: Stage) -> Iterator[tuple[Shared, list[list[Named]]]]:
        """What this process reduces, in order: parameters by layer, last layer first, tied ones on their own."""
        here = (self.place.pipeline, self.place.stage)
        mine = [shared for shared in self.layout.shared(self.place.tp_rank) if here in shared.owners]
        tied = {name for shared in mine if shared.tied for name, _ in _tied_parameters(stage, shared)}
        for shared in mine:
            if shared.tied:
                rows = [[each for each in _tied_parameters(stage, shared)[:1] if each[1].requires_grad]]
            else:
                layers = range(shared.layers[1] - 1, shared.layers[0] - 1, -1)
                rows = [
                    [each for each in reversed(stage.parameters_of(l)) if each[0] not in tied and each[1].requires_grad]
                    for l in layers
                ]
            rows = [row for row in rows if row]
            if rows:
                yield shared, rows

    def _bucket(self, shared: Shared, rows: list[list[Named]], groups: Groups, chunk_bytes: int) -> Bucket:
        parts = [[each] for row in rows for each in row] if self.granularity == "tensor" else rows
        if self.granularity in ("block", "model"):
            parts = [[each for row in rows for each in row]]
        named = [each for part in parts for each in part]
        first = named[0][1]
        summed = torch.float64 if any(p.dtype == torch.float64 for _, p in named) else torch.float32
        owners, itemsize = len(shared.ranks), torch.empty((), dtype=summed).element_size()
        multiple = owners if self.shard else 1
        most = max(chunk_bytes // itemsize // multiple, 1) * multiple
        offsets, bounds, at = [], [0], 0
        for part in parts:
            for _, parameter in part:
                offsets.append(at)
                at += local(parameter).numel()
            at = -(-at // multiple) * multiple
            if self.granularity == "block":
                bounds += range(bounds[-1] + most, at, most)
            bounds.append(at)
        ends = [o + local(p).numel() for o, (_, p) in zip(offsets, named, strict=True)]
        chunks = [
            Chunk(a, b, n, tuple(range(bisect_right(ends, a), bisect_left(offsets, b))))
            for n, (a, b) in enumerate(pairwise(bounds))
        ]
        device = local(first).device
        bucket = Bucket(
            shared=shared,
            group=groups.of(shared.ranks),
            parameters=named,
            offsets=offsets,
            chunks=chunks,
            gradients=torch.zeros(at, dtype=summed, device=device),
        )
        for offset, (_, parameter) in zip(offsets, named, strict=True):
            _use_as_gradient(parameter, bucket.gradients, offset)
        if self.shard:
            _shard_weights(bucket, shared.ranks.index(self.place.rank))
        return bucket

    def _hook(self, name: str, chunks: Sequence[Chunk]) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if self.armed:
                for chunk in chunks:
                    chunk.missing -= 1
                    if chunk.missing < 0:
                        raise ValueError(
                            f"{self.place}: {name} or one beside it gets its gradient in several parts (of reentrant"
                            " checkpoints?), and may have been reduced before the last; expected overlap=False"
                        )
                self._start(final=False)

        return ready

    # A step

    def zero(self, clock: Clock | None = None) -> None:
        """Before the first backward pass of a step, in which reductions are noted on a clock."""
        self.clock = clock or Clock(torch.device("cpu"))
        self.silent.clear()
        for bucket in self.buckets:
            bucket.gradients.zero_()
            self._attach(bucket)
        for _, chunk in self.order:
            chunk.missing = len(chunk.members)
        self.started = 0
        self._disarm()

    def _attach(self, bucket: Bucket) -> None:
        """Gradients that somebody took away (`Optimizer.zero_grad`) are views of the bucket again."""
        for offset, (name, parameter) in zip(bucket.offsets, bucket.parameters, strict=True):
            for each in (parameter, self.masters.get(name, parameter)):
                if each.grad is None:
                    _use_as_gradient(each, bucket.gradients, offset)
        for chunk, shard in zip(bucket.chunks, bucket.shards, strict=False):
            if shard.grad is None:
                shard.grad = bucket.part(chunk, bucket.gradients, self._owner(bucket))

    def arm(self) -> None:
        """Before the last backward pass of a step: what it completes may be reduced."""
        self.armed = self.overlap
        if self.armed:
            self.handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter, hook in self.hooks]

    def _disarm(self) -> None:
        self.armed = False
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _start(self, final: bool) -> None:
        """Start what is ready, in order; at the end everything, since a parameter may have had no gradient."""
        while self.started < len(self.order):
            bucket, chunk = self.order[self.started]
            if bucket.group is not None and chunk.missing > 0 and not final:
                return
            self.started += 1
            if bucket.group is not None:
                self.works.append((self._launch(bucket, chunk), bucket, chunk))

    def finish(self) -> None:
        """After the last backward pass: everything reduced."""
        self._disarm()
        if self.whole is not None:
            self.whole.reduce()
        else:
            self._start(final=True)
        for work, bucket, chunk in self.works:
            action = self._action(bucket, chunk)
            with communication(self._waiting(bucket, action)):
                work.wait()
            if action in self.silent:
                self.clock.keep(action, self.silent.pop(action), self.clock.now())
        self.works.clear()

    def _launch(self, bucket: Bucket, chunk: Chunk) -> Any:
        flat, action, clock = bucket.gradients[chunk.start : chunk.end], self._action(bucket, chunk), self.clock
        begun = clock.now()
        with communication(self._waiting(bucket, action)):
            if self.shard:
                work = reduce_scatter(bucket.part(chunk, bucket.gradients, self._owner(bucket)), flat, bucket.group)
            else:
                work = dist.all_reduce(flat, group=bucket.group, async_op=True)
            if clock.running and not _tells(work, lambda: clock.keep(action, begun, clock.now())):
                self.silent[action] = begun
        return work

    def _action(self, bucket: Bucket, chunk: Chunk) -> Action:
        """What a reduction is called in a trace: its number in the order in which all processes start them."""
        return Action(self.place.stage, Kind.REDUCE_GRAD, self.first_call[bucket.shared.index] + chunk.number)

    def _waiting(self, bucket: Bucket, action: Action) -> str:
        i, j = bucket.shared.layers
        layers = f"{i} and {j}, tied" if bucket.shared.tied else f"{i} to {j - 1}"
        others = " or ".join(str(self.layout.places[r]) for r in bucket.shared.ranks if r != self.place.rank)
        return f"{self.place} at {action}, the gradients of layers {layers}: no answer from {others}"

    def _owner(self, bucket: Bucket) -> int:
        return bucket.shared.ranks.index(self.place.rank)

    # Norm and update

    def squares(self) -> list[tuple[int, int, float]]:
        """Squared norms this process answers for, as (position in the order, owner, value); every gradient once."""
        here, rows = (self.place.pipeline, self.place.stage), []
        for bucket in self.buckets:
            if self.shard and bucket.num_owners > 1:
                owner = self._owner(bucket)
                parts = [bucket.part(chunk, bucket.gradients, owner) for chunk in bucket.chunks]
                rows.append((bucket.shared.index, owner, sum(map(square_sum, parts))))
            elif here == bucket.shared.owners[0]:
                parts = [bucket.gradients]
                if self.place.tp_rank > 0:  # what all tp ranks hold whole counts once
                    parts = [
                        bucket.gradients[offset : offset + local(parameter).numel()]
                        for offset, (_, parameter) in zip(bucket.offsets, bucket.parameters, strict=True)
                        if is_sharded(parameter)
                    ]
                rows.append((bucket.shared.index, 0, sum(map(square_sum, parts))))
        return rows

    def scale(self, factor: float) -> None:
        """Multiply all gradients, of which an owner of sharded ones needs its part only."""
        for bucket in self.buckets:
            if self.shard:
                for chunk in bucket.chunks:
                    bucket.part(chunk, bucket.gradients, self._owner(bucket)).mul_(factor)
            else:
                bucket.gradients.mul_(factor)

    def optimized(self) -> list[Named]:
        """What the optimizer works on: the parameters, their fp32 masters, or this process's shards."""
        if self.shard:
            return [
                (f"shard.{bucket.shared.index}.{c}", shard)
                for bucket in self.buckets
                for c, shard in enumerate(bucket.shards)
            ]
        return [
            (name, self.masters.get(name, parameter))
            for bucket in self.buckets
            for name, parameter in bucket.parameters
        ]

    @torch.no_grad()
    def publish(self) -> None:
        """After the update: new weights to where the layers read them."""
        for bucket in self.buckets:
            for name, parameter in bucket.parameters:
                if name in self.masters:
                    local(parameter).copy_(local(self.masters[name]))
            if self.shard:
                self._gather_weights(bucket)

    def _gather_weights(self, bucket: Bucket) -> None:
        assert bucket.weights is not None
        owner = self._owner(bucket)
        for chunk, shard in zip(bucket.chunks, bucket.shards, strict=True):
            part = bucket.part(chunk, bucket.weights, owner)
            part.copy_(shard)
            if bucket.group is not None:
                all_gather(bucket.weights[chunk.start : chunk.end], part, bucket.group)

    def whole_of(self, bucket: Bucket, parts: Sequence[Tensor]) -> Tensor:
        """A flat tensor of a bucket from every owner's parts, one per chunk; a collective over the owners."""
        flat = torch.zeros(bucket.gradients.numel(), dtype=parts[0].dtype, device=parts[0].device)
        for chunk, part in zip(bucket.chunks, parts, strict=True):
            if bucket.group is None:
                flat[chunk.start : chunk.end] = part
            else:
                all_gather(flat[chunk.start : chunk.end], part.contiguous(), bucket.group)
        return flat

    def close(self) -> None:
        """Let go of hooks and groups."""
        self._disarm()
        self.works.clear()
        for bucket in self.buckets:
            bucket.group = None
        if self.whole is not None:
            self.whole.group = None


class _Whole:
    """One call for the whole model over all processes of a tp rank, zeros where a process holds nothing.

    Parameters
    ----------
    sizes
        Elements of every bucket of the model.
    """

    def __init__(self, reducer: Reducer, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.reducer, self.place = reducer, reducer.place
        ranks = [place.rank for place in reducer.layout.places if place.tp_rank == reducer.place.tp_rank]
        self.group = reducer.groups.of(ranks)
        self.starts = list(accumulate(sizes, initial=0))
        self.flat = torch.zeros(self.starts[-1], dtype=dtype, device=reducer.stage.device)

    def reduce(self) -> None:
        self.flat.zero_()
        for bucket in self.reducer.buckets:
            self._slice(bucket).copy_(bucket.gradients)
        action, clock = Action(self.place.stage, Kind.REDUCE_GRAD, 0), self.reducer.clock
        begun = clock.now()
        if self.group is not None:
            with communication(f"{self.place} at {action}, all gradients: no answer from one of the others"):
                dist.all_reduce(self.flat, group=self.group)
        clock.keep(action, begun, clock.now())
        for bucket in self.reducer.buckets:
            bucket.gradients.copy_(self._slice(bucket))

    def _slice(self, bucket: Bucket) -> Tensor:
        start = self.starts[bucket.shared.index]
        return self.flat[start : start + bucket.gradients.numel()]


# What owners agree on


def check(granularity: str, shard: bool, chunk_bytes: int) -> None:
    """Refuse settings that do not exist or do not go together."""
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes: {chunk_bytes}, expected at least 1")
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity: {granularity!r} is not among {', '.join(GRANULARITIES)}")
    if granularity == "model" and shard:
        raise ValueError("granularity: 'model' sums the whole model everywhere, which leaves nothing to shard")


class _Facts(NamedTuple):
    """What all owners of a bucket have alike: elements of each parameter, edges of the chunks, precision of sums."""

    sizes: tuple[int, ...]
    bounds: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        precision = str(self.dtype).removeprefix("torch.")
        return (
            f"{len(self.sizes)} parameters of {sum(self.sizes):,} elements, in {len(self.bounds) - 1} chunks, summed in"
            f" {precision}"
        )

    @classmethod
    def of(cls, bucket: Bucket) -> _Facts:
        return cls(
            tuple(local(parameter).numel() for _, parameter in bucket.parameters),
            (0, *(chunk.end for chunk in bucket.chunks)),
            bucket.gradients.dtype,
        )


class _Held(NamedTuple):
    """What one process has: facts by bucket, checksums by layer."""

    buckets: dict[int, _Facts]
    layers: dict[int, int]


def _differences(world: Sequence[_Held], layout: Layout) -> Iterator[str]:
    """What does not fit between processes, in words."""
    first: dict[tuple[str, int, int], tuple[Place, Any]] = {}
    for place, held in zip(layout.places, world, strict=True):
        for shared in layout.shared(place.tp_rank):
            if place.rank not in shared.ranks:
                continue
            facts = held.buckets.get(shared.index, "nothing to train")
            other, theirs = first.setdefault(("bucket", shared.index, place.tp_rank), (place, facts))
            i, j = shared.layers
            layers = f"tied weights of layers {i} and {j}" if shared.tied else f"layers {i} to {j - 1}"
            if facts != theirs:
                yield f"{layers} differ: {place} has {facts}, {other} has {theirs}"
        for l, bits in held.layers.items():
            other, theirs = first.setdefault(("layer", l, place.tp_rank), (place, bits))
            if bits != theirs:
                yield (
                    f"layer {l} has other weights or buffers on {place} than on {other}, and replicas have to start"
                    " equal; the function that builds it may depend on its argument and on torch's random state only"
                )


def checksum(values: Iterable[Any]) -> int:
    """Of all tensors among some values: sums of the bits of their pieces as whole numbers, exact on any device."""
    found = 0
    for tensor in (value for value in values if isinstance(value, Tensor)):
        flat = local(tensor).contiguous()
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        pieces = flat.view(_WHOLE[flat.element_size()]).flatten().split(SUMMED)
        sums = torch.stack([piece.sum(dtype=torch.int64) for piece in pieces])
        found = zlib.crc32(sums.cpu().numpy().tobytes(), found)
    return found


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Tensors


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is sharded over a tp group; else the tensor."""
    data = tensor.detach()
    return data.to_local() if hasattr(data, "to_local") else data


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes of a tp group hold different parts of it."""
    return any(place.is_shard() for place in getattr(tensor, "placements", ()))


def reduce_scatter(out: Tensor, flat: Tensor, group: Any) -> Any:
    """Sum over a group, of which each process gets its equal part; `out` may be that part of `flat`."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, flat, group=group, async_op=True)


def all_gather(out: Tensor, part: Tensor, group: Any) -> None:
    """Equal parts of all processes of a group, in their order; `part` may be its own place in `out`."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(out, part, group=group)


def _tells(work: Any, note: Callable[[], None]) -> bool:
    """Have an operation call once it is done; False where its backend has no futures."""
    try:
        future = work.get_future()
    except RuntimeError:
        return False
    future.add_done_callback(lambda _: note())
    return True


def _use_as_gradient(parameter: nn.Parameter, flat: Tensor, offset: int) -> None:
    view = flat[offset : offset + local(parameter).numel()].view(local(parameter).shape)
    if parameter.dtype != flat.dtype:
        parameter.grad_dtype = flat.dtype
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import DTensor

        parameter.grad = DTensor.from_local(view, parameter.device_mesh, parameter.placements, run_check=False)
        return
    parameter.grad = view


def _masters(buckets: Iterable[Bucket]) -> dict[str, nn.Parameter]:
    """fp32 copies of low-precision weights, which the optimizer updates; their gradients are views of the buckets."""
    masters = {}
    for bucket in buckets:
        for offset, (name, parameter) in zip(bucket.offsets, bucket.parameters, strict=True):
            if parameter.dtype != bucket.gradients.dtype:
                masters[name] = nn.Parameter(parameter.detach().to(bucket.gradients.dtype))
                _use_as_gradient(masters[name], bucket.gradients, offset)
    return masters


def _shard_weights(bucket: Bucket, owner: int) -> None:
    """Move the weights into one flat tensor; this owner's parts of it, in the precision of sums, are its shards."""
    bucket.weights = torch.zeros_like(bucket.gradients, dtype=bucket.parameters[0][1].dtype)
    for offset, (_, parameter) in zip(bucket.offsets, bucket.parameters, strict=True):
        view = bucket.weights[offset : offset + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    for chunk in bucket.chunks:
        part = bucket.part(chunk, bucket.weights, owner)
        shard = nn.Parameter(part.to(bucket.gradients.dtype))  # the weights themselves if they are of that precision
        shard.grad = bucket.part(chunk, bucket.gradients, owner)
        bucket.shards.append(shard)


def _tied_parameters(stage: Stage, shared: Shared) -> list[Named]:
    """The tied weight on a stage, by the names of the layers that hold it here."""
    assert stage.tied is not None
    held = [(l, name) for l, name in stage.tied if stage.first <= l < stage.end]
    return [(f"layers.{l}.{name}", stage.layers[str(l)].get_parameter(name)) for l, name in held]


def square_sum(flat: Tensor) -> float:
    """Sum of squares, added up in double precision from pieces short enough for the tensor's own: within 1e-6 for fp32,
    at an eighth of the time of a copy in double precision."""
    return float(torch.stack([torch.dot(piece, piece) for piece in flat.split(SUMMED)]).double().sum())


def total_norm(squares: Sequence[float]) -> float:
    """Norm of the whole gradient: summed exactly, so that every process gets the same bits."""
    return math.sqrt(math.fsum(squares))
