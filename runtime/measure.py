"""What the layers of a model cost on a device, measured: seconds, bytes kept for the backward pass, workspace.

    found = measure.profile(model, batch, device="cuda", micro_batches=(1, 2, 4))
    measure.merge([found, ModelProfile.load("other-device.json")]).save("profile.json")

*Seconds.* Passes go through a short stack of the model's layers (`runtime.chain`), all forward one after another, then
all backward, so that each layer finds the caches as in training. Each is timed apart, the last one with the loss.
Micro-batch sizes take turns, so that a slow minute of the machine is not taken for a property of one of them.

*Bytes kept* are those of the storages that saved tensors hold and a second micro-batch in flight adds to a first,
without parameters and buffers. A storage that two layers keep counts at the first: what a layer keeps of its input is
left out if the layer before it keeps it anyway. What the loss keeps stands apart, as logits.

*Workspace* is the most that is allocated beyond all this while the layer runs, gradients at its ends included.
"""

from __future__ import annotations

import gc
import math
import platform
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from planner.merge import profiles as merge
from planner.profile import MEASURES, Cell, Conditions, LayerKind, ModelProfile
from runtime.chain import Layer, Meter, Stack, scan
from runtime.given import Data, Source, as_model, batches
from runtime.model import Model, Tensors
from runtime.reduce import local
from runtime.trainer import Optimizers, adamw

RUNS, WARM_UP, COPIES = 20, 5, 4
LARGE_SPREAD = 0.2  # of half of the runs; a machine with other work to do
FLOP_PER_S, BYTES_PER_S = 1e12, 1e11  # of the device that times are stated for where nothing runs
BYTES_OF_UPDATE = 28  # per parameter: weight, gradient and two moments read, all but the gradient written, in fp32
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
__all__ = ["Bytes", "count", "device_name", "memory", "merge", "profile"]


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory of a layer of the stack at one micro-batch size, and what its passes do.

    Parameters
    ----------
    kept, logits
        Kept for the backward pass, by the layer and by the loss.
    workspace
        Most beyond that while it runs.
    forward_s, backward_s
        At `FLOP_PER_S` and `BYTES_PER_S`; only where it was counted on a CPU.
    handed_on
        Of its output.
    """

    kept: int
    logits: int
    workspace: int
    forward_s: float
    backward_s: float
    handed_on: int


def profile(
    model: Any,
    inputs: Source,
    targets: Any = None,
    *,
    micro_batches: Collection[int] = (1,),
    device: torch.device | str = "cpu",
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    runs: int = RUNS,
    warm_up: int = WARM_UP,
    copies: int = COPIES,
    statistic: str | None = None,
    optimizer: Optimizers = adamw,
    sequence_length: int | None = None,
    attention: str = "unknown",
    mesh: Any = None,
) -> ModelProfile:
    """Measure every kind of layer at every micro-batch size on one device.

    Parameters
    ----------
    model
        As for `given.as_model`.
    inputs, targets
        As for `given.batches`. Targets may be left out where the loss is the one that a `Model` has by default.
    device_type
        What the profile calls the device; by default its name.
    dtype
        Of weights and activations, as for `Trainer`.
    name
        Of the model.
    runs, warm_up
        Timed passes per micro-batch size, and passes before them.
    copies
        Layers of a kind in the stack, at most.
    statistic
        ``min`` or ``median`` of the runs; by default the median on a GPU and the minimum on a CPU.
    optimizer
        Makes one from parameters.
    sequence_length, attention
        For the conditions; the length is that of whole-number inputs where it is None.
    mesh
        Device mesh of a tp group whose processes measure together; all get the profile.

    Raises
    ------
    ValueError
        If the model, a layer or the data are not what they should be, or the stack does not fit the device.
    """
    model, data, device = as_model(model), batches(inputs, targets), torch.device(device)
    sizes = _sizes(micro_batches)
    _check(runs, warm_up, copies, statistic)
    if mesh is not None and model.parallelize is None:
        raise ValueError(f"tp: {mesh.size()}, and the model says no way to shard its layers (Model.parallelize)")
    chain, scanned = _scanned(model, data(sizes[0]), dtype, device)
    label, clock = device_type or device_name(device), _Clock(device, wall=mesh is not None)
    pick = _Statistic(statistic or ("median" if device.type == "cuda" else "min"), runs)
    try:
        stack = Stack(model, chain, copies, dtype=dtype, device=device, mesh=mesh)
        given = {b: data(b).each(lambda tensor: tensor.to(device)) for b in sizes}
        found = _Figures(stack, {b: count(stack, given[b], device) for b in sizes})
        times = _times(stack, given, optimizer, clock, runs, warm_up)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{label}: a stack of {copies} layers of each kind does not fit; measure fewer copies or smaller"
            f" micro-batches ({' '.join(str(error).split())[:200]})"
        ) from None
    seconds = {key: pick(each, _words(*key)) for key, each in times.items()}
    cells = [
        Cell(
            kind=kind,
            device_type=label,
            tp=1 if mesh is None else mesh.size(),
            micro_batch=b,
            forward_s=seconds["forward", kind, b],
            backward_s=seconds["backward", kind, b],
            update_s=seconds["update", kind, 0],
            activation_bytes=found.kept(kind, b),
            workspace_bytes=found.workspace(kind, b),
        )
        for kind in _kinds(chain)
        for b in sizes
    ]
    timed = f"{label}: {len(stack.indices)} of {len(chain)} layers timed, {warm_up} passes to warm up"
    told = "" if scanned else "; kinds told apart by running the layers, fake tensors would not do"
    made = _profile(
        model,
        chain,
        found,
        cells if mesh is None else _slowest(cells, mesh),
        name=name,
        conditions=replace(
            _conditions(chain, sequence_length or _length(data(1)), attention, _machine(device)),
            tf32=torch.backends.cuda.matmul.allow_tf32 if device.type == "cuda" and _dtype(chain) == "fp32" else None,
            timer=f"{clock.name}, {pick}",
            notes=(timed + told, f"{label}: {pick.words}"),
        ),
        warnings=tuple(f"{label}: {text}" for text in pick.warnings),
    )
    return made if mesh is None else _with_shards(made, stack, mesh)


def memory(
    model: Any,
    inputs: Source,
    targets: Any = None,
    *,
    micro_batches: Collection[int] = (1,),
    device_type: str = "cpu",
    dtype: torch.dtype | None = None,
    name: str | None = None,
    copies: int = COPIES,
    sequence_length: int | None = None,
    attention: str = "unknown",
) -> ModelProfile:
    """Count the bytes of every kind of layer on fake CPU tensors: nothing runs, no memory is needed.

    The cells are marked as not measured: their times are FLOP and bytes written at `FLOP_PER_S` and `BYTES_PER_S`, so
    that the profile is whole, and a plan from it is made only where extrapolation is asked for.

    Parameters
    ----------
    model, inputs, targets, micro_batches, dtype, name, copies, sequence_length, attention
        As for `profile`.
    device_type
        What the profile calls the device.

    Raises
    ------
    ValueError
        As for `profile`, and if a layer does not run on fake tensors (it reads values, say).
    """
    model, data, sizes = as_model(model), batches(inputs, targets), _sizes(micro_batches)
    _check(1, 0, copies, None)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    chain = scan(model, data(sizes[0]), dtype, fake)
    stack = Stack(model, chain, copies, dtype=dtype, fake=fake)
    found = _Figures(stack, {b: count(stack, data(b).each(fake.from_tensor)) for b in sizes})
    trained = {layer.kind: layer.trained for layer in chain}
    cells = [
        Cell(
            kind=kind,
            device_type=device_type,
            tp=1,
            micro_batch=b,
            forward_s=found.last(kind, b).forward_s,
            backward_s=found.last(kind, b).backward_s,
            update_s=BYTES_OF_UPDATE * trained[kind] / BYTES_PER_S,
            activation_bytes=found.kept(kind, b),
            workspace_bytes=found.workspace(kind, b),
            extrapolated=True,
        )
        for kind in _kinds(chain)
        for b in sizes
    ]
    stated = f"FLOP at {FLOP_PER_S / 1e12:g} TFLOP/s plus bytes written at {BYTES_PER_S / 1e9:g} GB/s"
    return _profile(
        model,
        chain,
        found,
        cells,
        name=name,
        conditions=replace(
            _conditions(chain, sequence_length or _length(data(1)), attention, "fake CPU tensors"),
            timer="none: stated",
            notes=(f"{device_type}: bytes counted on fake tensors; times are {stated}",),
        ),
        warnings=(f"{device_type}: times are not measured, they are {stated}",),
    )


def _check(runs: int, warm_up: int, copies: int, statistic: str | None) -> None:
    for key, value, least in (("runs", runs, 1), ("warm_up", warm_up, 0), ("copies", copies, 1)):
        if value < least:
            raise ValueError(f"{key}: {value} is less than {least}")
    if statistic not in (None, "min", "median"):
        raise ValueError(f"statistic: {statistic!r} is not among min, median")


def _sizes(micro_batches: Collection[int]) -> list[int]:
    if not micro_batches or min(micro_batches) < 1:
        raise ValueError(f"micro_batches: {list(micro_batches)}, expected whole numbers of at least 1")
    return sorted(set(micro_batches))


def _scanned(
    model: Model, data: Data, dtype: torch.dtype | None, device: torch.device
) -> tuple[tuple[Layer, ...], bool]:
    """The chain, and whether fake tensors told it; layers that read values need real ones."""
    try:
        return scan(model, data, dtype, FakeTensorMode(allow_non_fake_inputs=True)), True
    except Exception:  # of a user's code, which if it is wrong fails again, in its own words
        return scan(model, data, dtype, device=device), False


def _kinds(chain: Sequence[Layer]) -> list[str]:
    return list(dict.fromkeys(layer.kind for layer in chain))


# Bytes


class _Saved:
    """Storages that saved tensors hold, by the layer that kept each first."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        self.known = {storage._cdata for storage in map(_storage, known) if storage is not None}
        self.found: dict[int, tuple[tuple[str, int], int, StorageWeakRef]] = {}

    @contextmanager
    def __call__(self, what: str, n: int, _: Tensors) -> Iterator[None]:
        def pack(tensor: Tensor) -> Tensor:
            storage = _storage(tensor)
            if storage is not None and storage._cdata not in self.known and storage._cdata not in self.found:
                self.found[storage._cdata] = (what, n), storage.nbytes(), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def kept(self, what: str, n: int) -> int:
        """Bytes that still exist."""
        here = [(size, ref) for place, size, ref in self.found.values() if place == (what, n)]
        sizes: list[int] = [size for size, ref in here if not ref.expired()]  # type: ignore[no-untyped-call]
        return sum(sizes)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    return local(tensor).untyped_storage() if tensor.layout == torch.strided else None


def _kept(stack: Stack, data: Data) -> tuple[list[int], int]:
    """Bytes that each layer keeps, and the loss, of a second micro-batch in flight."""
    first, second = _Saved(stack.static()), _Saved(stack.static())
    with stack.fake or nullcontext():
        held = [stack.forward(data, first)]
        second.known |= first.found.keys()
        held.append(stack.forward(data.each(torch.clone), second))
    last = len(stack.layers) - 1
    return [second.kept("forward", n) for n in range(last + 1)], second.kept("loss", last)


def _unprobed(what: str, n: int, _: Tensors) -> AbstractContextManager[None]:
    return nullcontext()


class _CudaMeter:
    """As `Meter`, of what the allocator of a GPU says."""

    flops = written = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(slots=True)
class _Use:
    """What a layer allocates and does in a pass."""

    before: int = 0
    forward: int = 0  # most above `before`
    backward: int = 0  # most above what is kept
    handed_on: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0


class _Used:
    """Use of every layer, by a meter."""

    def __init__(self, stack: Stack, meter: Meter | _CudaMeter) -> None:
        self.meter = meter
        self.layers = [_Use() for _ in stack.layers]

    @contextmanager
    def __call__(self, what: str, n: int, arrived: Tensors) -> Iterator[None]:
        meter, use = self.meter, self.layers[n]
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in arrived)
        meter.reset()
        live, flops, written = meter.live, meter.flops, meter.written
        if what == "forward":
            use.before = live
            if n:
                self.layers[n - 1].handed_on = nbytes
        yield
        seconds = (meter.flops - flops) / FLOP_PER_S + (meter.written - written) / BYTES_PER_S
        if what == "backward":
            use.backward = meter.peak - (live - nbytes)  # the gradient that arrived is not kept
            use.backward_s += seconds
        else:
            use.forward = max(use.forward, meter.peak - use.before)
            use.forward_s += seconds


def count(stack: Stack, data: Data, device: torch.device | None = None) -> list[Bytes]:
    """Bytes of every layer of a stack at the size of a micro-batch.

    Parameters
    ----------
    device
        That the stack is on; its allocator is asked where it is a GPU.
    """
    gpu = device if device is not None and device.type == "cuda" else None
    if gpu is not None:  # libraries take their workspaces at the first call of a kind, and hold them
        stack.play(data, _unprobed)
    kept, logits = _kept(stack, data)
    meter = Meter() if gpu is None else _CudaMeter(gpu)
    used = _Used(stack, meter)
    with stack.fake or nullcontext(), meter:
        stack.backward(stack.forward(data, used), used)
    out = []
    for n, (use, size) in enumerate(zip(used.layers, kept, strict=True)):
        own = logits if n == len(kept) - 1 else 0
        out.append(
            Bytes(
                kept=size,
                logits=own,
                workspace=max(use.forward - size - own, use.backward, 0),
                forward_s=use.forward_s,
                backward_s=use.backward_s,
                handed_on=use.handed_on,
            )
        )
    return out


class _Figures:
    """Bytes by kind: of several layers of a kind the last counts, which has others before it."""

    def __init__(self, stack: Stack, memory: Mapping[int, Sequence[Bytes]]) -> None:
        self.stack, self.memory = stack, memory

    def last(self, kind: str, b: int) -> Bytes:
        return self.memory[b][self.stack.positions(kind)[-1]]

    def kept(self, kind: str, b: int) -> int:
        """What the profile calls activations: all but a whole number of bytes of logits per sample."""
        found = self.last(kind, b)
        return found.kept + found.logits - b * self.logits(kind)

    def workspace(self, kind: str, b: int) -> int:
        return max(self.memory[b][n].workspace for n in self.stack.positions(kind))

    def logits(self, kind: str) -> int:
        """Bytes per sample."""
        return min(self.last(kind, b).logits // b for b in self.memory)

    def handed_on(self, kind: str) -> int:
        """Bytes per sample."""
        return max(-(-self.last(kind, b).handed_on // b) for b in self.memory)


# Seconds


class _Clock:
    """Marks in time, and seconds between them once the device is through.

    On a CPU with one thread the time this thread ran, which other work on the machine does not lengthen; with several
    the time that passed.
    """

    def __init__(self, device: torch.device, wall: bool) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.wall = wall or torch.get_num_threads() > 1
        self.name = "CUDA events" if self.cuda else "time.perf_counter" if self.wall else "time.thread_time"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter() if self.wall else time.thread_time()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        """Until all marks are made."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1e3 if self.cuda else float(ended - began)


class _Timer:
    """Times every part of a pass."""

    def __init__(self, clock: _Clock) -> None:
        self.clock = clock
        self.marks: list[tuple[str, int, Any, Any]] = []

    @contextmanager
    def __call__(self, what: str, n: int, _: Tensors) -> Iterator[None]:
        began = self.clock.now()
        yield
        self.marks.append((what, n, began, self.clock.now()))

    def seconds(self, positions: Sequence[int], whats: Collection[str]) -> float:
        """Mean over layers of the stack."""
        rows = [mark for mark in self.marks if mark[0] in whats and mark[1] in positions]
        return math.fsum(self.clock.seconds(began, ended) for _, _, began, ended in rows) / len(positions)


def _words(what: str, kind: str, b: int) -> str:
    return f"{kind}, micro-batch {b}, {what}" if b else f"{kind}, {what}"


def _times(
    stack: Stack, given: Mapping[int, Data], optimizer: Optimizers, clock: _Clock, runs: int, warm_up: int
) -> dict[tuple[str, str, int], list[float]]:
    """Seconds per run of (forward or backward, kind, micro-batch size) and (update, kind, 0).

    A run is a pass at every micro-batch size, then an update of every kind.
    """
    updates = {kind: _Update(stack, kind, optimizer) for kind in _kinds(stack.chain)}
    found: dict[tuple[str, str, int], list[float]] = {}
    with _no_collection():
        for run in range(-warm_up, runs):
            rows: dict[tuple[str, str, int], float] = {}
            for b, data in given.items():
                timer = _Timer(clock)
                stack.play(data, timer)
                clock.settle()
                for kind in updates:
                    positions = stack.positions(kind)
                    rows["forward", kind, b] = timer.seconds(positions, ("forward", "loss"))
                    rows["backward", kind, b] = timer.seconds(positions, ("backward",))
            for kind, update in updates.items():
                rows["update", kind, 0] = update.seconds(clock)
            for key, seconds in rows.items() if run >= 0 else ():
                found.setdefault(key, []).append(seconds)
    return found


class _Update:
    """Clipping and optimizer step of a kind's layers; of 16-bit weights on fp32 masters, as in training."""

    def __init__(self, stack: Stack, kind: str, optimizer: Optimizers) -> None:
        positions = stack.positions(kind)
        self.num_layers = len(positions)
        self.weights = [p for n in positions for p in stack.layers[n].parameters() if p.requires_grad]
        self.masters = [_master(each) for each in self.weights if each.grad is not None]
        self.optimizer = optimizer(self.masters) if self.masters else None

    @torch.no_grad()
    def seconds(self, clock: _Clock) -> float:
        """Of one layer."""
        if self.optimizer is None:
            return 0.0
        began = clock.now()
        for master in self.masters:
            assert master.grad is not None
            master.grad.mul_(1.0)
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight:
                weight.copy_(master)
        ended = clock.now()
        clock.settle()
        return clock.seconds(began, ended) / self.num_layers


def _master(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    assert weight.grad is not None
    if weight.grad.dtype == weight.dtype:
        return weight
    master = torch.nn.Parameter(weight.detach().to(weight.grad.dtype))
    master.grad = weight.grad
    return master


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection in the middle of a layer."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Statistic:
    """Figures from runs, and how far half of the runs are from them."""

    def __init__(self, name: str, runs: int) -> None:
        self.name, self.runs = name, runs
        self.rows: list[tuple[float, float, str]] = []  # spread, figure, what it is of

    def __call__(self, times: Sequence[float], words: str) -> float:
        figure = min(times) if self.name == "min" else statistics.median(times)
        if figure > 0:
            self.rows.append((statistics.median(abs(each - figure) for each in times) / figure, figure, words))
        return figure

    def __str__(self) -> str:
        return f"{'minimum' if self.name == 'min' else 'median'} of {self.runs} runs"

    @property
    def _worst(self) -> tuple[float, float, str]:
        """The largest spread, of figures that matter."""
        largest = max((figure for _, figure, _ in self.rows), default=0.0)
        return max((row for row in self.rows if row[1] >= largest / 20), default=(0.0, 0.0, "nothing"))

    @property
    def words(self) -> str:
        spread, _, words = self._worst
        return f"{self}, half of which lie within {100 * spread:.0f} % of it ({words}; the others closer)"

    @property
    def warnings(self) -> tuple[str, ...]:
        spread, _, words = self._worst
        if spread <= LARGE_SPREAD:
            return ()
        return (
            f"times vary: half of the runs of {words} are more than {100 * spread:.0f} % off the figure; measure on an"
            " idle machine, or with more runs",
        )


# Putting it together


def _profile(
    model: Model,
    chain: Sequence[Layer],
    figures: _Figures,
    cells: Sequence[Cell],
    *,
    conditions: Conditions,
    name: str | None,
    warnings: tuple[str, ...],
) -> ModelProfile:
    by_kind = {layer.kind: layer for layer in chain}
    tied = None
    if model.tied is not None:
        first, second = (chain[l] for l, _ in model.tied)
        if first.tied != second.tied:
            raise ValueError(f"tied: {first.title} has {first.tied} parameters there, {second.title} {second.tied}")
        tied = second.kind
    return ModelProfile(
        name=name or f"{len(chain)} layers",
        layers=tuple(layer.kind for layer in chain),
        kinds=tuple(
            LayerKind(
                name=kind,
                parameters=layer.parameters,
                output_bytes=figures.handed_on(kind),
                logits_bytes=figures.logits(kind),
                num_tensors=layer.num_tensors,
                trainable=layer.trained > 0 or not layer.parameters,
                trainable_parameters=layer.trained if 0 < layer.trained < layer.parameters else None,
                tied_to=first.kind if kind == tied else None,
                tied_parameters=layer.tied if kind == tied else 0,
            )
            for kind, layer in by_kind.items()
        ),
        cells=tuple(cells),
        conditions=conditions,
        warnings=warnings,
    )


def _conditions(chain: Sequence[Layer], sequence_length: int | None, attention: str, where: str) -> Conditions:
    return Conditions(
        dtype=_dtype(chain),
        attention=attention,
        sequence_length=sequence_length,
        date=date.today().isoformat(),
        source=f"runtime.measure, torch {torch.__version__}, {where}",
    )


def _dtype(chain: Sequence[Layer]) -> str:
    dtype = next((layer.dtype for layer in chain if layer.dtype is not None), None)
    return "unknown" if dtype is None else DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _length(data: Data) -> int | None:
    """Tokens per sample, where inputs are whole numbers."""
    first = data.inputs[0]
    return None if first.is_floating_point() or first.dim() < 2 else first.shape[1]


def device_name(device: torch.device) -> str:
    """What a device is called if it is not told otherwise."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


# A tp group


def _slowest(cells: Sequence[Cell], mesh: Any) -> list[Cell]:
    """Each figure of the process where it is largest."""
    gathered: list[Any] = [None] * mesh.size()
    dist.all_gather_object(gathered, list(cells), group=mesh.get_group())
    return [
        replace(each[0], **{name: max(getattr(cell, name) for cell in each) for name in MEASURES})
        for each in zip(*gathered, strict=True)
    ]


def _with_shards(found: ModelProfile, stack: Stack, mesh: Any) -> ModelProfile:
    """With the parameters that one process holds."""
    held = {}
    for kind in found.kinds:
        layer = stack.layers[stack.positions(kind.name)[0]]
        mine = sum(local(parameter).numel() for parameter in layer.parameters())
        held[kind.name] = ((mesh.size(), mine),)
    return replace(found, kinds=tuple(replace(kind, shard_parameters=held[kind.name]) for kind in found.kinds))
