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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.groups import Groups, communication
from runtime.layout import Layout, Place, Shared
from runtime.model import Stage

GRANULARITIES = ("tensor", "layer", "block", "model")
SUMMED = 1 << 16  # elements whose squares are added up in their own precision
Named = tuple[str, nn.Parameter]


@dataclass(slots=True, eq=False)
class Chunk:
    """A slice [start, end) of a bucket that one call reduces, and how many of its parameters are not ready."""

    start: int
    end: int
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
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity: {granularity!r} is not among {', '.join(GRANULARITIES)}")
        if granularity == "model" and shard:
            raise ValueError("granularity: 'model' sums the whole model everywhere, which leaves nothing to shard")
        self.layout, self.place, self.granularity = layout, place, granularity
        self.overlap, self.shard = overlap and granularity != "model", shard
        self.num_shared = len(layout.shared(0))
        self.buckets = [
            self._bucket(shared, parameters, groups, chunk_bytes) for shared, parameters in self._members(stage)
        ]
        self.masters = {} if shard else _masters(self.buckets)
        self.order = [(bucket, chunk) for bucket in self.buckets for chunk in bucket.chunks]
        self.hooks = [
            (parameter, self._hook(bucket, index))
            for bucket in self.buckets
            for index, (_, parameter) in enumerate(bucket.parameters)
        ]
        self.handles: list[Any] = []  # hooks in place: only for the last backward pass, since each call costs
        self.armed = False
        self.started = 0
        self.works: list[tuple[Any, Tensor | None, Bucket, Chunk]] = []
        self.log: list[tuple[int, float, float]] = []
        self.whole = _Whole(self, groups) if granularity == "model" else None

    # Setting up

    def _members(self, stage: Stage) -> Iterator[tuple[Shared, list[list[Named]]]]:
        """What this process reduces, in order: parameters by layer, last layer first, tied ones on their own."""
        here = (self.place.pipeline, self.place.stage)
        mine = [shared for shared in self.layout.shared(self.place.tp_rank) if here in shared.owners]
        tied = {name for shared in mine if shared.tied for name, _ in _tied_parameters(stage, shared)}
        for shared in mine:
            if shared.tied:
                rows = [_tied_parameters(stage, shared)[:1]]
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
        summed = torch.float32 if first.dtype in (torch.bfloat16, torch.float16) else first.dtype
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
            Chunk(a, b, tuple(i for i, (o, e) in enumerate(zip(offsets, ends, strict=True)) if o < b and e > a))
            for a, b in pairwise(bounds)
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

    def _hook(self, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        chunks = [chunk for chunk in bucket.chunks if index in chunk.members]

        def ready(_: Tensor) -> None:
            if self.armed:
                for chunk in chunks:
                    chunk.missing -= 1
                self._start(final=False)

        return ready

    # A step

    def zero(self) -> None:
        """Before the first backward pass of a step."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for _, chunk in self.order:
            chunk.missing = len(chunk.members)
        self.started = 0
        self._disarm()
        self.log.clear()

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
            if chunk.missing > 0 and not final:
                return
            self.started += 1
            if bucket.group is not None:
                self.works.append((*self._launch(bucket, chunk), bucket, chunk))

    def finish(self) -> None:
        """After the last backward pass: everything reduced."""
        self._disarm()
        if self.whole is not None:
            self.whole.reduce()
        else:
            self._start(final=True)
        for work, out, bucket, chunk in self.works:
            with communication():
                work.wait()
            if out is not None:
                bucket.part(chunk, bucket.gradients, self._owner(bucket)).copy_(out)
        self.works.clear()

    def _launch(self, bucket: Bucket, chunk: Chunk) -> tuple[Any, Tensor | None]:
        flat = bucket.gradients[chunk.start : chunk.end]
        out = torch.empty_like(bucket.part(chunk, bucket.gradients, 0)) if self.shard else None
        index, begun = bucket.shared.index, time.perf_counter()
        with communication():
            if out is not None:
                work = reduce_scatter(out, flat, bucket.group)
            else:
                work = dist.all_reduce(flat, group=bucket.group, async_op=True)
                work.get_future().add_done_callback(lambda _: self.log.append((index, begun, time.perf_counter())))
        return work, out

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
                all_gather(bucket.weights[chunk.start : chunk.end], part.clone(), bucket.group)

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
    """One call for the whole model over all processes of a tp rank, zeros where a process holds nothing."""

    def __init__(self, reducer: Reducer, groups: Groups) -> None:
        self.reducer = reducer
        self.group = groups.of(tuple(p.rank for p in reducer.layout.places if p.tp_rank == reducer.place.tp_rank))
        sizes = torch.zeros(reducer.num_shared, dtype=torch.int64)
        for bucket in reducer.buckets:
            sizes[bucket.shared.index] = bucket.gradients.numel()
        device = reducer.buckets[0].gradients.device
        sizes = sizes.to(device)
        if self.group is not None:
            dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self.group)
        self.starts = [0, *sizes.cumsum(0).tolist()]
        self.flat = torch.zeros(self.starts[-1], dtype=reducer.buckets[0].gradients.dtype, device=device)

    def reduce(self) -> None:
        self.flat.zero_()
        for bucket in self.reducer.buckets:
            self._slice(bucket).copy_(bucket.gradients)
        begun = time.perf_counter()
        if self.group is not None:
            with communication():
                dist.all_reduce(self.flat, group=self.group)
        self.reducer.log.append((0, begun, time.perf_counter()))
        for bucket in self.reducer.buckets:
            bucket.gradients.copy_(self._slice(bucket))

    def _slice(self, bucket: Bucket) -> Tensor:
        start = self.starts[bucket.shared.index]
        return self.flat[start : start + bucket.gradients.numel()]


# Tensors


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is sharded over a tp group; else the tensor."""
    data = tensor.detach()
    return data.to_local() if hasattr(data, "to_local") else data


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes of a tp group hold different parts of it."""
    return any(place.is_shard() for place in getattr(tensor, "placements", ()))


def reduce_scatter(out: Tensor, flat: Tensor, group: Any) -> Any:
    """Sum over a group, of which each process gets its equal part."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, flat, group=group, async_op=True)


def all_gather(out: Tensor, part: Tensor, group: Any) -> None:
    """Equal parts of all processes of a group, in their order."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(out, part, group=group)


def _use_as_gradient(parameter: nn.Parameter, flat: Tensor, offset: int) -> None:
    view = flat[offset : offset + local(parameter).numel()].view(local(parameter).shape)
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import DTensor

        parameter.grad = DTensor.from_local(view, parameter.device_mesh, parameter.placements, run_check=False)
        return
    if parameter.dtype != flat.dtype:
        parameter.grad_dtype = flat.dtype
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
        if hasattr(parameter, "placements"):
            raise ValueError("sharded optimizer state is not supported for layers that tensor parallelism shards")
        view = bucket.weights[offset : offset + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    for chunk in bucket.chunks:
        part = bucket.part(chunk, bucket.weights, owner)
        shard = nn.Parameter(part.to(bucket.gradients.dtype, copy=True))
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
