"""What to train: global batch, precision, optimizer, and the choices the planner is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from planner.files import Document

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParameter:
    """Model state in bytes per parameter. Gradients cross the network in the precision they are stored in.

    Parameters
    ----------
    weights
        Weights used in forward and backward.
    gradients
        Accumulated gradients.
    optimizer
        Optimizer moments and, with mixed precision, the fp32 master weights.
    """

    weights: int
    gradients: int
    optimizer: int

    def __post_init__(self) -> None:
        for key in ("weights", "gradients", "optimizer"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: {getattr(self, key)} is negative, expected bytes per parameter")

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


#: Moments: Adam two of 4 bytes, momentum one, SGD none. Mixed precision keeps fp32 gradients and adds a 4-byte master.
STATE_BYTES = {
    ("fp32", "sgd"): BytesPerParameter(weights=4, gradients=4, optimizer=0),
    ("fp32", "momentum"): BytesPerParameter(weights=4, gradients=4, optimizer=4),
    ("fp32", "adam"): BytesPerParameter(weights=4, gradients=4, optimizer=8),
    ("mixed", "sgd"): BytesPerParameter(weights=2, gradients=4, optimizer=4),
    ("mixed", "momentum"): BytesPerParameter(weights=2, gradients=4, optimizer=8),
    ("mixed", "adam"): BytesPerParameter(weights=2, gradients=4, optimizer=12),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Document):
    """What to train, and which choices the planner may take.

    Parameters
    ----------
    global_batch
        Samples per optimizer step, over all pipelines together.
    micro_batches
        Micro-batch sizes (samples) to choose from; None for those that are measured.
    tp
        Tensor-parallel degrees to choose from; None for those that are measured.
    precision, optimizer
        Decide the model state per parameter, unless `bytes_per_parameter` does.
    bytes_per_parameter
        Model state in bytes per parameter, in place of the figures for `precision` and `optimizer`.
    recompute
        Whether layers may drop their activations and run forward again in the backward pass.
    memory_margin
        Fraction of each device's memory that is left unused.
    context_bytes, tp_context_bytes
        Memory of the framework and its communicators on every device; the second comes on top where tp > 1.
    sync
        ``overlapped``: gradient sync runs beside the last backward pass; ``exposed``: after it.
    sync_granularity
        What one all-reduce call carries: a ``tensor``, a ``layer``, a ``block`` (the layers with the same owners,
        in chunks of at most `sync_chunk_bytes`) or the ``model``.
    sync_chunk_bytes
        Largest message of a ``block`` all-reduce.
    sync_buffer_bytes
        Memory for the sync; None for one chunk, the largest layer (``layer``, ``tensor``) or all gradients (``model``).
    shard_optimizer
        Whether the owners of a block each keep an equal part of its optimizer state and update it (ZeRO-1 by block):
        its gradients are reduce-scattered, its weights gathered after the update. The search counts on two owners; a
        plan counts all.
    max_depth
        Most stages in a pipeline; None for no limit.
    max_classes
        Most distinct (device type, tp) classes in a pipeline; None for no limit.
    extrapolate
        Whether micro-batch sizes outside the measured range may be used, flagged in the plan.
    """

    SCHEMA: ClassVar[str] = "hpp-job/1"

    global_batch: int = 256
    micro_batches: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    precision: Literal["fp32", "mixed"] = "mixed"
    optimizer: Literal["adam", "sgd", "momentum"] = "adam"
    bytes_per_parameter: BytesPerParameter | None = None
    recompute: bool = True
    memory_margin: float = 0.05
    context_bytes: int = GIB
    tp_context_bytes: int = GIB
    sync: Literal["overlapped", "exposed"] = "overlapped"
    sync_granularity: Literal["tensor", "layer", "block", "model"] = "block"
    sync_chunk_bytes: int = 64 * MIB
    sync_buffer_bytes: int | None = None
    shard_optimizer: bool = False
    max_depth: int | None = None
    max_classes: int | None = None
    extrapolate: bool = False

    def __post_init__(self) -> None:
        for key in ("global_batch", "sync_chunk_bytes", "max_depth", "max_classes"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}: {value} is less than 1")
        for key in ("context_bytes", "tp_context_bytes", "sync_buffer_bytes"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"{key}: {value} is negative, expected bytes")
        if not 0 <= self.memory_margin < 1:
            raise ValueError(f"memory_margin: {self.memory_margin} is not in [0, 1), expected a fraction such as 0.05")
        if self.shard_optimizer and self.sync_granularity == "model":
            raise ValueError("shard_optimizer: true with sync_granularity 'model', which has no blocks to shard")
        _check_choices("micro_batches", self.micro_batches)
        _check_choices("tp", self.tp)
        if self.micro_batches and min(self.micro_batches) > self.global_batch:
            smallest = min(self.micro_batches)
            raise ValueError(f"micro_batches: the smallest, {smallest}, exceeds global_batch {self.global_batch}")
        _check_literal("precision", self.precision, ("fp32", "mixed"))
        _check_literal("optimizer", self.optimizer, ("adam", "sgd", "momentum"))
        _check_literal("sync", self.sync, ("overlapped", "exposed"))
        _check_literal("sync_granularity", self.sync_granularity, ("tensor", "layer", "block", "model"))

    @property
    def state(self) -> BytesPerParameter:
        """Bytes per parameter of the model state, and per gradient on the wire (``state.gradients``)."""
        return self.bytes_per_parameter or STATE_BYTES[self.precision, self.optimizer]


def _check_choices(key: str, sizes: tuple[int, ...] | None) -> None:
    if sizes is None:
        return
    if not sizes:
        raise ValueError(f"{key}: the list is empty, expected sizes, or null for all that are measured")
    if min(sizes) < 1:
        raise ValueError(f"{key}: {min(sizes)} is less than 1")
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"{key}: {list(sizes)} has a value twice")


def _check_literal(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}: {value!r} is not among {', '.join(allowed)}")
