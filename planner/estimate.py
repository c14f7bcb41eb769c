"""A profile without a measurement: what every layer costs, worked out from a model's config and the devices' sheets.

*Time.* A layer is a list of kernels. A kernel takes as long as its arithmetic or its memory traffic, whichever is more,
and what it takes to start one:

    t = max(FLOP / (share x peak), bytes / (share x bandwidth)) + launch

The shares are few, the same for every device and model, and stand in `Efficiency`. ``launch`` is also what makes small
matrix products inefficient: half of the top rate is reached at ``launch x share x peak`` FLOP. Backward repeats each
matrix product for its inputs and, where weights are trained, once more for them; a frozen layer runs it once, and a
layer with nothing to train in or before it has no backward pass and keeps nothing.

*Bytes kept for the backward pass*, elements of one token, e bytes each (2, or 4 in fp32); h hidden width, d width of
all query heads, g of all key-value heads, f inner width of the MLP over the experts a token meets, s sequence length:

    every rank     2 h for each norm: its input and its output
                   h for each RMS norm that is not fused (eager)
                   2 x h x 1 byte: masks of dropout on hidden states, if any
    divided by tp  d + 2 g + d            queries, keys, values, and what leaves attention
                   f | 2 f | 3 f | 4 f    MLP: ReLU | GELU | gated, fused (flash) | gated, eager
                   2 h k                  routing: inputs and outputs of the k experts of a token
                   heads x s              softmax, unless flash; + (1 + 1 / e) x heads x s with dropout on it
                   heads x 4 bytes        log-sum-exp, if flash

which for GPT in 16 bit is h (34 + 5 heads s / h) bytes (Korthikanti et al. 2022). Logits are kept apart, in fp32.
Workspace is the gradient of the widest intermediate result twice (scores unless flash, else the MLP) and that of the
largest matrix.

*Tensor parallelism* divides matrices as Megatron-LM does; its all-reduces are left to the planner.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from planner import architecture, catalogue, files
from planner.architecture import PARTS, Architecture, Images, Layer, Matrix
from planner.catalogue import DTYPES, Device
from planner.profile import Cell, Conditions, LayerKind, ModelProfile

FLOAT = 4  # bytes of logits, of master weights and of optimizer moments
WARNING = "times and bytes are estimated from the model's config and data sheets, not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of peak rates that kernels reach, the same for every device and model.

    Fitted to the half of the measurements that `benchmarks/estimate` names; the flash shares are those its authors
    publish (Dao 2023, A100).

    Parameters
    ----------
    tensor, vector
        Share of the peak of a large matrix product: on tensor cores, and in fp32 without them.
    bandwidth
        Share of the peak bandwidth of memory.
    launch_s
        Seconds between two kernels.
    flash_forward, flash_backward
        Share of the peak of fused attention.
    score_passes_forward, score_passes_backward
        How often eager attention reads or writes the matrix of scores, beside its matrix products.
    """

    tensor: float = 0.76
    vector: float = 0.94
    bandwidth: float = 0.80
    launch_s: float = 28e-6
    flash_forward: float = 0.6
    flash_backward: float = 0.5
    score_passes_forward: float = 4.8
    score_passes_backward: float = 19.0


EFFICIENCY = Efficiency()


@dataclass(frozen=True, slots=True)
class Kernel:
    """FLOP and bytes of one kernel; `rate` says which share of the peak its arithmetic reaches."""

    nbytes: float
    flops: float = 0.0
    rate: Literal["matmul", "flash_forward", "flash_backward"] = "matmul"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a layer is run with: precision, attention, tp ranks, and the tokens of a micro-batch."""

    dtype: str
    attention: Literal["flash", "eager", "fused-softmax"]
    tp: int
    micro_batch: int
    sequence_length: int

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.dtype in ("fp32", "tf32") else 2

    def tokens(self, layer: Layer) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * (layer.tokens or self.sequence_length)


# Kernels ------------------------------------------------------------------------------------------------------------


def seconds(kernels: Iterable[Kernel], device: Device, dtype: str, efficiency: Efficiency = EFFICIENCY) -> float:
    """Seconds of kernels that run one after another."""
    peak, bandwidth = device.peak(dtype), efficiency.bandwidth * device.bytes_per_s
    # tf32 no faster than fp32 (GeForce) is not held up by feeding the units, whichever they are
    plain = dtype in ("fp32", "tf32") and peak == device.peak("fp32")
    fused = device.peak("bf16") if dtype == "fp8" else peak
    rates = {
        "matmul": peak * (efficiency.vector if plain else efficiency.tensor),
        "flash_forward": fused * efficiency.flash_forward,
        "flash_backward": fused * efficiency.flash_backward,
    }
    return sum(max(each.flops / rates[each.rate], each.nbytes / bandwidth) + efficiency.launch_s for each in kernels)


def forward(layer: Layer, setting: Setting, efficiency: Efficiency = EFFICIENCY) -> list[Kernel]:
    """Kernels of the forward pass of one micro-batch on one of the tp ranks."""
    tokens, e, h = setting.tokens(layer), setting.element, layer.width
    kernels = [_product(matrix, setting, tokens) for matrix in layer.matrices if matrix.used]
    if layer.part == "embedding":
        kernels += _elementwise(2 * tokens * h * e, 1 + bool(layer.vectors))
    kernels += _elementwise(3 * tokens * h * e, layer.norms)
    if layer.attention:
        kernels += _attention(layer, setting, efficiency, backward=False)
    if layer.mlp:
        kernels += _elementwise((5 if layer.mlp.gated else 2) * tokens * _inner(layer, setting) * e)
        kernels += _elementwise(4 * tokens * h * layer.mlp.experts * e, 2 * bool(layer.mlp.experts))
    kernels += _elementwise(3 * tokens * h * e, _halves(layer))  # residual sums
    if layer.dropout:
        kernels += _elementwise((2 * e + 1) * tokens * h, max(1, _halves(layer)))
    if layer.part == "head":
        logits = tokens * _logits(layer, setting)
        kernels += _elementwise((e + FLOAT) * logits, int(e < FLOAT)) + _elementwise(8 * FLOAT * logits / 5, 5)
    return kernels


def backward(
    layer: Layer, setting: Setting, efficiency: Efficiency = EFFICIENCY, *, trained: bool = True
) -> list[Kernel]:
    """Kernels of the backward pass of one micro-batch; weights get no gradients unless `trained`."""
    tokens, e, h = setting.tokens(layer), setting.element, layer.width
    kernels = [_product(matrix, setting, tokens) for matrix in layer.matrices if matrix.used] * (1 + trained)
    if layer.part == "embedding" and trained:  # a gradient of the whole table, added to that of earlier micro-batches
        kernels += _elementwise(4 * e * layer.shard(setting.tp)) + _elementwise(8 * tokens * h * e)
    kernels += _elementwise(5 * tokens * h * e, layer.norms)
    if layer.attention:
        kernels += _attention(layer, setting, efficiency, backward=True)
    if layer.mlp:
        kernels += _elementwise((8 if layer.mlp.gated else 3) * tokens * _inner(layer, setting) * e)
        kernels += _elementwise(4 * tokens * h * layer.mlp.experts * e, 2 * bool(layer.mlp.experts))
    kernels += _elementwise(3 * tokens * h * e, _halves(layer))
    if layer.dropout:
        kernels += _elementwise((2 * e + 1) * tokens * h, _halves(layer))
    if layer.part == "head":
        logits = tokens * _logits(layer, setting)
        kernels += _elementwise(2 * FLOAT * logits) + _elementwise((e + FLOAT) * logits, int(e < FLOAT))
    return kernels


def update_s(parameters: int, setting: Setting, device: Device, efficiency: Efficiency = EFFICIENCY) -> float:
    """Seconds of a fused Adam: weights, gradients and two moments read, all but the gradients written."""
    per_parameter = 28 if setting.element == FLOAT else 30  # 16-bit weights are written beside the fp32 master
    return per_parameter * parameters / (efficiency.bandwidth * device.bytes_per_s) + efficiency.launch_s


def _elementwise(nbytes: float, count: int = 1) -> list[Kernel]:
    return [Kernel(nbytes)] * count


def _halves(layer: Layer) -> int:
    """Residual sums of a layer: one behind attention, one behind the MLP."""
    return 2 if layer.attention and layer.mlp else 0


def _product(matrix: Matrix, setting: Setting, tokens: int) -> Kernel:
    """Tokens times a matrix (all its copies in one grouped product): reads both, writes the result."""
    inputs, outputs = matrix.shape(setting.tp)
    rows = tokens * matrix.used
    moved = rows * (inputs + outputs) + min(matrix.copies, rows) * inputs * outputs
    return Kernel(setting.element * moved, 2.0 * rows * inputs * outputs)


def _inner(layer: Layer, setting: Setting) -> float:
    assert layer.mlp is not None
    return layer.mlp.width / setting.tp


def _logits(layer: Layer, setting: Setting) -> int:
    """Logits of one token on one rank."""
    return layer.matrices[-1].shape(setting.tp)[1]


def _attention(layer: Layer, setting: Setting, efficiency: Efficiency, *, backward: bool) -> list[Kernel]:
    """Rotation of queries and keys, and scores, softmax and weighted sum: fused, or one kernel each."""
    attention, e = layer.attention, setting.element
    assert attention is not None
    tokens, s = setting.tokens(layer), layer.tokens or setting.sequence_length
    heads, kv_heads = attention.heads / setting.tp, max(attention.kv_heads / setting.tp, 1.0)
    key, value = attention.key_width, attention.value_width
    kernels = _elementwise(4 * tokens * (heads + kv_heads) * key * e) if attention.rotary else []
    operands = tokens * e * (heads * (key + value) + kv_heads * (key + value))
    if setting.attention == "flash":
        flops = 2.0 * tokens * heads * _seen(attention.window, attention.causal, s) * (key + value)
        if backward:  # five products instead of two
            return kernels + [Kernel(2 * operands, 2.5 * flops, "flash_backward")]
        return kernels + [Kernel(operands, flops, "flash_forward")]
    scores = tokens * heads * s
    products = [Kernel(e * (tokens * heads * (key + width) + scores), 2 * scores * width) for width in (key, value)]
    if setting.attention == "fused-softmax":
        passes = 3.0 if backward else 2.0
    else:
        passes = efficiency.score_passes_backward if backward else efficiency.score_passes_forward
    kernels += products * (1 + backward) + _elementwise(passes * e * scores)
    return kernels + _elementwise((2 * e + 1) * scores, int(attention.dropout))


def _seen(window: int | None, causal: bool, s: int) -> float:
    """Tokens that a token looks at, on average over the sequence."""
    reach = min(window or s, s)
    return reach - reach * reach / (2 * s) if causal else float(reach)


# Bytes --------------------------------------------------------------------------------------------------------------


def activation_bytes(layer: Layer, setting: Setting) -> int:
    """Bytes kept on one rank for the backward pass of one micro-batch, without logits."""
    e, h, eager = setting.element, layer.width, setting.attention != "flash"
    shared = (2 + (layer.rms and eager)) * h * layer.norms * e + h * _halves(layer) * layer.dropout
    divided = 0.0
    if attention := layer.attention:
        d, g = attention.heads * attention.key_width, attention.kv_heads * attention.key_width
        divided += e * (d + g * (1 + attention.value_width / attention.key_width))
        divided += e * attention.heads * attention.value_width
        if eager:
            scores = attention.heads * (layer.tokens or setting.sequence_length)
            divided += scores * (e + attention.dropout * (e + 1))
        else:
            divided += FLOAT * attention.heads
    if mlp := layer.mlp:
        results = (3 + eager) if mlp.gated else 1 if mlp.activation == "relu" else 2
        divided += e * (results * mlp.width + 2 * h * mlp.experts)
    if layer.part == "embedding":
        shared += 8 + h * layer.dropout  # the token's number
    if layer.part in ("projector", "vision") and not layer.attention:
        shared += e * sum(matrix.inputs for matrix in layer.matrices[:1])
    return round(setting.tokens(layer) * (shared + divided / setting.tp))


def workspace_bytes(layer: Layer, setting: Setting, *, trained: bool) -> int:
    """Largest temporary memory of a forward or backward pass on one rank."""
    tokens, e = setting.tokens(layer), setting.element
    widest = float(2 * layer.width * e)
    if attention := layer.attention:
        width = 4 * attention.heads * attention.key_width * e
        if setting.attention != "flash":
            width = 2 * attention.heads * (layer.tokens or setting.sequence_length) * e
        widest = max(widest, width / setting.tp)
    if layer.mlp:
        widest = max(widest, 2 * layer.mlp.width * e / setting.tp)
    if layer.part == "head":  # logits as they leave the product, and their gradient in fp32
        widest = max(widest, _logits(layer, setting) * (FLOAT + e * (e < FLOAT)))
    largest = max((each.shard(setting.tp) // each.copies for each in layer.matrices), default=0)
    return round(tokens * widest + trained * largest * e)


# What is trained ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters beside frozen matrices of every block.

    Parameters
    ----------
    rank
        Width of the adapters.
    targets
        Matrices that get one, by name: q, k, v, o of attention; gate, up, down of the MLP (not of experts).
    """

    rank: int = 16
    targets: tuple[str, ...] = ("q", "v")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora: rank is {self.rank}, expected at least 1")
        known = ("q", "k", "v", "o", "gate", "up", "down")
        for name in self.targets:
            if name not in known:
                raise ValueError(f"lora: target {name!r} is not among {files.did_you_mean(name, known)}")

    def adapters(self, layer: Layer) -> tuple[Matrix, ...]:
        """Two matrices per target; tensor parallelism divides the one beside the divided side of the target."""
        return tuple(
            adapter
            for matrix in layer.matrices
            if layer.part == "block" and matrix.copies == 1 and matrix.name.split(".", 1)[-1] in self.targets
            for adapter in self._pair(matrix)
        )

    def _pair(self, target: Matrix) -> tuple[Matrix, Matrix]:
        row = target.split == "row"
        down = Matrix(
            name=f"lora.{target.name}.down",
            inputs=target.inputs,
            outputs=self.rank,
            split="row" if row else "none",
            grain=target.grain if row else 1,
        )
        up = Matrix(
            name=f"lora.{target.name}.up",
            inputs=self.rank,
            outputs=target.outputs,
            split="none" if row else target.split,
            grain=1 if row else target.grain,
        )
        return down, up


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A layer and what of it is trained.

    Parameters
    ----------
    layer
        The layer, without adapters.
    frozen
        Whether its own weights stay as they are.
    adapters
        Matrices that are trained beside them.
    gradients
        Whether gradients reach it: something in it or before it is trained.
    """

    layer: Layer
    frozen: bool
    adapters: tuple[Matrix, ...]
    gradients: bool

    def trained(self, tp: int) -> int:
        """Trained parameters on one of `tp` ranks."""
        own = 0 if self.frozen else self.layer.shard(tp)
        return own + sum(matrix.shard(tp) for matrix in self.adapters)

    def forward(self, setting: Setting, efficiency: Efficiency) -> list[Kernel]:
        return forward(self.layer, setting, efficiency) + self._adapters(setting, 1)

    def backward(self, setting: Setting, efficiency: Efficiency) -> list[Kernel]:
        if not self.gradients:
            return []
        return backward(self.layer, setting, efficiency, trained=not self.frozen) + self._adapters(setting, 2)

    def activation_bytes(self, setting: Setting) -> int:
        if not self.gradients:
            return 0
        narrow = sum(each.outputs for each in self.adapters[::2])  # what lies between the two matrices of an adapter
        return activation_bytes(self.layer, setting) + setting.tokens(self.layer) * narrow * setting.element

    def _adapters(self, setting: Setting, times: int) -> list[Kernel]:
        tokens = setting.tokens(self.layer)
        products = [_product(matrix, setting, tokens) for matrix in self.adapters]
        sums = [Kernel(3.0 * tokens * matrix.shape(setting.tp)[1] * setting.element) for matrix in self.adapters[1::2]]
        return products * times + sums


def _trained(found: Architecture, frozen: Sequence[str], lora: Lora | None) -> tuple[Trained, ...]:
    """Every layer with what of it is trained; gradients flow from the first layer with anything trained."""
    parts = set(PARTS) if "all" in frozen else set(frozen)
    for part in sorted(parts):
        if part not in PARTS:
            raise ValueError(f"frozen: {part!r} is not among {files.did_you_mean(part, (*PARTS, 'all'))}")
    tied = any(layer.tied for layer in found.layers)
    if tied and ("embedding" in parts) != ("head" in parts):
        raise ValueError("frozen: embedding and head share a matrix in this model, freeze both or neither")
    layers, gradients = [], False
    for layer in found.layers:
        adapters = lora.adapters(layer) if lora else ()
        gradients = gradients or layer.part not in parts or bool(adapters)
        layers.append(Trained(layer=layer, frozen=layer.part in parts, adapters=adapters, gradients=gradients))
    if lora and not any(each.adapters for each in layers):
        raise ValueError(f"lora: no matrix of a {found.family} block is among {', '.join(lora.targets)}")
    if not gradients:
        raise ValueError(f"frozen: {', '.join(frozen)} leaves nothing to train")
    return tuple(layers)


# Calibration --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a throughput was measured: equal pipelines of one kind of device.

    Parameters
    ----------
    device
        Device type, as named to `profile`; None for the first.
    tp, stages, pipelines
        Devices per stage, stages per pipeline, pipelines.
    micro_batch
        Samples per micro-batch; None for the largest of the profile.
    num_micro_batches
        Micro-batches per pipeline and iteration.
    recompute
        Whether every layer ran forward again in the backward pass.
    """

    device: str | None = None
    tp: int = 1
    stages: int = 1
    pipelines: int = 1
    micro_batch: int | None = None
    num_micro_batches: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        for key in ("tp", "stages", "pipelines", "num_micro_batches"):
            if getattr(self, key) < 1:
                raise ValueError(f"measured_on: {key} is {getattr(self, key)}, expected at least 1")


def tokens_per_s(profile: ModelProfile, run: Run) -> float:
    """Tokens per second of a run by the figures of a profile: equal shares of the layers, no communication.

    Exact for one device. With stages it is the time of equal stages, (m + S - 1) (F + B) / S, plus the update.
    """
    device = run.device or profile.cells[0].device_type
    sizes = profile.micro_batches(device, run.tp)
    if not sizes:
        raise ValueError(f"measured_on: tp {run.tp} on {device!r} is not in the profile")
    micro_batch = run.micro_batch or sizes[-1]
    costs = profile.layer_costs(device, run.tp, micro_batch)
    if costs is None:
        raise ValueError(
            f"measured_on: micro_batch {micro_batch} is not between {sizes[0]} and {sizes[-1]}, those of the profile"
        )
    one = float(costs.forward_s.sum() * (1 + run.recompute) + costs.backward_s.sum())
    seconds = (run.num_micro_batches + run.stages - 1) * one / run.stages + float(costs.update_s.sum()) / run.stages
    tokens = profile.conditions.sequence_length or 0
    return run.pipelines * run.num_micro_batches * micro_batch * tokens / seconds


def calibrated(
    profile: ModelProfile, measured_tokens_per_s: float, run: Run = Run(), *, everywhere: bool = True
) -> ModelProfile:
    """The profile with its times scaled so that it predicts a measured throughput.

    Parameters
    ----------
    measured_tokens_per_s, run
        The throughput, and the run it was measured in.
    everywhere
        True: all device types take the factor, so that their ratios, which decide a plan, stay those of the estimate.
        False: the measured one alone; for measurements of several, one after another.

    Raises
    ------
    ValueError
        If the throughput is no positive number, or is more than ten times off the estimate.
    """
    predicted = tokens_per_s(profile, run)
    if not (math.isfinite(measured_tokens_per_s) and measured_tokens_per_s > 0):
        raise ValueError(f"measured_tokens_per_s: {measured_tokens_per_s}, expected a number above 0")
    factor = predicted / measured_tokens_per_s
    if not 0.1 <= factor <= 10:
        raise ValueError(
            f"measured_tokens_per_s: {measured_tokens_per_s:g} is {1 / factor:.3g} times the estimate of"
            f" {predicted:.4g}; expected tokens per second of the whole run that measured_on describes"
        )
    device = run.device or profile.cells[0].device_type
    cells = tuple(
        replace(
            cell,
            forward_s=cell.forward_s * factor,
            backward_s=cell.backward_s * factor,
            update_s=cell.update_s * factor,
        )
        if everywhere or cell.device_type == device
        else cell
        for cell in profile.cells
    )
    where = f"{measured_tokens_per_s:g} tokens/s measured on {_layout(profile, run)}"
    note = f"times {'' if everywhere else f'on {device} '}x {factor:.4g}, so that the estimate meets {where}"
    if run.tp > 1:
        note += " (its all-reduces between tp ranks are inside the factor, and come on top in a plan)"
    return replace(
        profile,
        cells=cells,
        conditions=replace(profile.conditions, notes=(*profile.conditions.notes, note)),
        warnings=(f"{profile.warnings[0]}; scaled to {where}", *profile.warnings[1:]),
    )


def _layout(profile: ModelProfile, run: Run) -> str:
    device = run.device or profile.cells[0].device_type
    number = run.tp * run.stages * run.pipelines
    size = run.micro_batch or profile.micro_batches(device, run.tp)[-1]
    text = f"{number} x {device}, micro-batch {size}"
    for what, value in (("tp", run.tp), ("stages", run.stages), ("pipelines", run.pipelines)):
        text += f", {what} {value}" if value > 1 else ""
    text += f", {run.num_micro_batches} micro-batches" if run.num_micro_batches > 1 else ""
    return text + (", recompute" if run.recompute else "")


# The profile --------------------------------------------------------------------------------------------------------


def profile(
    config: Mapping[str, Any] | str | Path,
    devices: Sequence[str | Device],
    *,
    sequence_length: int,
    dtype: str = "bf16",
    attention: Literal["flash", "eager", "fused-softmax"] = "flash",
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    tp: Sequence[int] | None = None,
    frozen: Sequence[str] = (),
    lora: Lora | int | None = None,
    images: Images | None = None,
    measured_tokens_per_s: float | None = None,
    measured_on: Run = Run(),
    name: str | None = None,
    efficiency: Efficiency = EFFICIENCY,
) -> ModelProfile:
    """Estimate what every layer of a model costs on some devices.

    Parameters
    ----------
    config
        Path of a Hugging Face ``config.json``, or its content.
    devices
        Names or aliases of the catalogue; ``LABEL=NAME`` calls the device type LABEL, as a cluster file may.
    sequence_length
        Tokens per sample, those of images included.
    dtype
        fp32, tf32, fp16, bf16 or fp8 (matrix products; activations then are bf16).
    attention
        ``flash``: fused; ``eager``: one kernel each, scores in memory; ``fused-softmax``: scores in memory, mask and
        softmax in one kernel (Megatron-LM).
    micro_batches, tp
        Sizes and degrees to estimate; tp None for those of 1, 2, 4, 8 that the model's heads and widths allow.
    frozen
        Parts that are not trained: vision, projector, embedding, block, head, or all.
    lora
        Adapters (or their rank) beside the matrices of the blocks; freezes all parts, unless `frozen` names some: then
        those and the blocks.
    images
        Images per sample and their size, for models that see.
    measured_tokens_per_s, measured_on
        A measured throughput to scale all times to, and the run it was measured in.
    name
        Name of the model; by default that in the config, else its family and size.

    Raises
    ------
    ValueError
        One message that names the file and the key, or the argument, and what would be right.
    """
    found = architecture.read(config, images)
    adapters = Lora(rank=lora) if isinstance(lora, int) else lora
    parts = (*(frozen or ("all",)), "block") if adapters else tuple(frozen)
    trained = _trained(found, parts, adapters)
    labels = _devices(devices)
    _check(dtype, attention, sequence_length, micro_batches, tp)
    degrees, refused = _degrees(found, tp)
    kinds = {each.layer.kind: each for each in trained}
    setting = Setting(dtype=dtype, attention=attention, tp=1, micro_batch=1, sequence_length=sequence_length)
    out = ModelProfile(
        name=name or _name(config, found),
        layers=tuple(layer.kind for layer in found.layers),
        kinds=tuple(_kind(each, setting, degrees) for each in kinds.values()),
        cells=tuple(
            _cell(each, label, device, replace(setting, tp=degree, micro_batch=size), efficiency)
            for label, device in labels.items()
            for degree in degrees
            for size in sorted(set(micro_batches))
            for each in kinds.values()
        ),
        conditions=Conditions(
            dtype="fp32" if dtype == "tf32" else dtype,
            tf32=dtype == "tf32" if dtype in ("fp32", "tf32") else None,
            attention=attention,
            sequence_length=sequence_length,
            tp_communication="outside",
            timer="none: estimated",
            source=f"estimated from {_origin(config)}",
            notes=(*_notes(labels, dtype, efficiency), *found.notes, *_training_notes(trained, adapters)),
        ),
        num_heads=found.heads[0],
        num_kv_heads=found.heads[1],
        warnings=(WARNING, *refused, *_warnings(found, sequence_length, frozen, images)),
    )
    return out if measured_tokens_per_s is None else calibrated(out, measured_tokens_per_s, measured_on)


def _kind(each: Trained, setting: Setting, degrees: Sequence[int]) -> LayerKind:
    layer, e = each.layer, setting.element
    tokens = layer.tokens or setting.sequence_length
    head = layer.part == "head"
    own = tuple((tp, layer.shard(tp) + sum(matrix.shard(tp) for matrix in each.adapters)) for tp in degrees if tp > 1)
    return LayerKind(
        name=layer.kind,
        parameters=layer.parameters + sum(matrix.parameters for matrix in each.adapters),
        output_bytes=0 if head else tokens * layer.width * e,
        shard_parameters=own,
        logits_bytes=tokens * layer.matrices[-1].outputs * FLOAT if head else 0,
        num_tensors=len(each.adapters) if each.frozen and each.adapters else layer.num_tensors,
        trainable=not each.frozen or bool(each.adapters),
        trainable_parameters=each.trained(1) if each.frozen and each.adapters else None,
        active_parameters=_active(each, setting),
        tied_to="embedding" if layer.tied else None,
        tied_parameters=layer.tied,
        tp_bytes=round(layer.reduces * tokens * layer.width * e),
    )


def _active(each: Trained, setting: Setting) -> int | None:
    """Parameters that multiply a token of the sequence, if not all of the kind's: experts, vision towers."""
    matrices = (*each.layer.matrices, *each.adapters)
    tokens = each.layer.tokens or setting.sequence_length
    if tokens == setting.sequence_length and all(matrix.used in (0, matrix.copies) for matrix in matrices):
        return None
    idle = sum((matrix.copies - matrix.used) * (matrix.inputs + matrix.bias) * matrix.outputs for matrix in matrices)
    held = each.layer.parameters + sum(matrix.parameters for matrix in each.adapters)
    return (held - idle) * tokens // setting.sequence_length


def _cell(each: Trained, label: str, device: Device, setting: Setting, efficiency: Efficiency) -> Cell:
    layer = each.layer
    return Cell(
        kind=layer.kind,
        device_type=label,
        tp=setting.tp,
        micro_batch=setting.micro_batch,
        forward_s=seconds(each.forward(setting, efficiency), device, setting.dtype, efficiency),
        backward_s=seconds(each.backward(setting, efficiency), device, setting.dtype, efficiency),
        activation_bytes=each.activation_bytes(setting),
        update_s=update_s(number, setting, device, efficiency) if (number := each.trained(setting.tp)) else 0.0,
        workspace_bytes=workspace_bytes(layer, setting, trained=not each.frozen),
    )


def _devices(devices: Sequence[str | Device]) -> dict[str, Device]:
    """Label -> device, in the order given."""
    if isinstance(devices, str) or not devices:
        raise ValueError(f"devices: {devices!r}, expected a list of names such as ['A100-80-SXM', 'V100-16-SXM']")
    labels: dict[str, Device] = {}
    for each in devices:
        if isinstance(each, Device):
            label, device = each.name, each
        else:
            label, sign, name = each.partition("=")
            if sign and not (label and name):
                raise ValueError(f"devices: {each!r} is not NAME or LABEL=NAME")
            device = catalogue.device(name or label)
        if label in labels:
            raise ValueError(f"devices: {label!r} is given twice")
        labels[label] = device
    return labels


def _check(
    dtype: str, attention: str, sequence_length: int, micro_batches: Sequence[int], tp: Sequence[int] | None
) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not among {files.did_you_mean(dtype, DTYPES)}")
    kinds = ("flash", "eager", "fused-softmax")
    if attention not in kinds:
        raise ValueError(f"attention: {attention!r} is not among {files.did_you_mean(attention, kinds)}")
    for key, values in (("sequence_length", [sequence_length]), ("micro_batches", micro_batches), ("tp", tp)):
        if values is not None and (not values or min(values) < 1):
            raise ValueError(f"{key}: {values!r}, expected whole numbers of at least 1")


def _degrees(found: Architecture, tp: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tp degrees that divide every layer, and why the others do not."""
    degrees, refused = [], []
    for degree in sorted(set(tp or (1, 2, 4, 8))):
        reasons = [text for layer in found.layers if (text := layer.undivided(degree))]
        if reasons:
            refused.append(f"tp {degree} is left out: it does not divide the {reasons[0]}")
        else:
            degrees.append(degree)
    if not degrees:
        raise ValueError(f"tp: {list(tp or ())}: " + "; ".join(refused))
    return tuple(degrees), tuple(refused) if tp else ()


def _name(config: Mapping[str, Any] | str | Path, found: Architecture) -> str:
    data = config if isinstance(config, Mapping) else files.read(config)
    return str(data.get("_name_or_path") or f"{found.family} {found.parameters / 1e9:.3g}B")


def _origin(config: Mapping[str, Any] | str | Path) -> str:
    if isinstance(config, Mapping):
        return f"a config (digest {files.digest(config)})"
    return f"{Path(config).name} (sha256 {hashlib.sha256(Path(config).read_bytes()).hexdigest()[:12]})"


def _notes(labels: Mapping[str, Device], dtype: str, efficiency: Efficiency) -> tuple[str, ...]:
    shares = (
        "estimated: a kernel takes max(FLOP / (share x peak), bytes / (share x bandwidth)) +"
        f" {efficiency.launch_s * 1e6:.3g} us; shares: matrix products {efficiency.tensor:.3g} (fp32 units"
        f" {efficiency.vector:.3g}), bandwidth {efficiency.bandwidth:.3g}, flash attention"
        f" {efficiency.flash_forward:.3g} forward and {efficiency.flash_backward:.3g} backward"
    )
    figures = tuple(
        f"{label}{'' if label == device.name else f' = {device.name}'}: {device.peak(dtype) / 1e12:g} TFLOP/s {dtype}"
        f" [{device.source('peak').title}, {device.source('peak').year}], {device.bytes_per_s / 1e9:g} GB/s"
        f" [{device.source('bandwidth').title}, {device.source('bandwidth').year}]"
        for label, device in labels.items()
    )
    return (shares, *figures)


def _training_notes(trained: Sequence[Trained], lora: Lora | None) -> tuple[str, ...]:
    notes: list[str] = []
    frozen = dict.fromkeys(each.layer.part for each in trained if each.frozen)
    if frozen:
        notes.append(f"frozen: {', '.join(frozen)}" + (" (adapters are trained)" if lora else ""))
    still = dict.fromkeys(each.layer.kind for each in trained if not each.gradients)
    if still:
        notes.append(f"no gradients reach {', '.join(still)}: no backward pass, nothing kept for it")
    if lora:
        number = sum(matrix.parameters for each in trained for matrix in each.adapters)
        notes.append(f"LoRA of rank {lora.rank} on {', '.join(lora.targets)}: {number} trained parameters")
    return tuple(notes)


def _warnings(found: Architecture, sequence_length: int, frozen: Sequence[str], images: Images | None) -> Iterator[str]:
    longest, parts = found.most_tokens, {layer.part for layer in found.layers}
    if longest and sequence_length > longest:
        yield f"sequence_length {sequence_length} is more than the {longest} tokens the config allows for"
    seen = sum(layer.tokens or 0 for layer in found.layers if layer.part == "projector")
    if seen > sequence_length:
        yield f"the images take {seen} tokens, more than sequence_length {sequence_length}"
    if images is not None and "vision" not in parts:
        yield f"images have no effect: {found.family} does not see"
    absent = [part for part in frozen if part != "all" and part not in parts]
    if absent:
        yield f"frozen has no effect on {', '.join(absent)}: {found.family} has none"
