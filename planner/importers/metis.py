"""Import profiles in the format of Metis (github.com/SamsungLabs/Metis, ATC 2024).

One JSON file per device type, tp degree and micro-batch size. Two layouts are read:

    GPU/mbs2_tmp4.json              one folder per device type; parameter bytes are those of one tp rank (as Sailor
                                    rewrites its own measurements)
    DeviceType.GPU_tp4_bs2.json     Metis' own naming; parameter bytes are those of the whole layer

What the format leaves out is supplied by arguments and written into the profile's notes and warnings:

- Times are ms of forward and backward together: forward = total / (1 + backward_factor).
- Memory is MB (2^20 bytes) per layer, model state and activations together. Activations are what is left after
  `state_factor` bytes per byte of parameters; where less than the layer's own output is left, its output is taken.
- `optimizer_time_ms` is a sum over the layers: each layer is charged an equal share. Sailor adds up the update of a
  whole stage once per layer, so there the share is the figure of a stage (`update_per` in the conditions).

A list that is longer or shorter than `num_layers` is an error, not cut: Sailor's Llama-3-8B files hold 35 layers of
memory but 34 of times, and the one left out is the head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.importers.layers import Json, Layer, Row, model_profile, short, vocabulary_bytes
from planner.profile import Conditions, ModelProfile

MEGABYTE = 2**20
FOLDERS = re.compile(r"mbs(?P<micro_batch>[1-9]\d*)_tmp(?P<tp>[1-9]\d*)\.json")
FLAT = re.compile(r"DeviceType\.(?P<device_type>.+)_tp(?P<tp>[1-9]\d*)_bs(?P<micro_batch>[1-9]\d*)\.json")


def profiles(
    directory: str | Path,
    *,
    backward_factor: float = 2.0,
    state_factor: float = 5.0,
    bytes_per_parameter: float = 4.0,
    output_bytes: int | None = None,
) -> tuple[ModelProfile, ...]:
    """The model of the directory as a profile (a tuple of one, like every importer's answer).

    Parameters
    ----------
    backward_factor
        Backward seconds per forward second; the format holds only their sum.
    state_factor
        Bytes of model state per byte of parameters inside `layer_memory_total_mb`. Sailor's files hold 5.
    bytes_per_parameter
        Bytes of one parameter in `parameters_per_layer_bytes`.
    output_bytes
        Bytes per sample that a layer hands on, for files without `activation_parameters_bytes`.

    Raises
    ------
    ValueError
        If no file is found, or one is damaged or of another model; names the file, the key and the value.
    """
    _check_positive("backward_factor", backward_factor)
    _check_positive("bytes_per_parameter", bytes_per_parameter)
    if state_factor:
        _check_positive("state_factor", state_factor)
    root = Path(directory)
    found = sorted(_files(root, output_bytes), key=lambda file: (file.device_type, file.tp, file.micro_batch))
    if not found:
        raise ValueError(f"{root}: holds neither GPU/mbsX_tmpY.json nor DeviceType.GPU_tpY_bsX.json")
    _check_one_model(found)

    profile = model_profile(
        found[0].model,
        _layers(found, backward_factor, state_factor, bytes_per_parameter),
        conditions=Conditions(
            tp_communication="inside",
            update_per="layer" if found[0].whole_layers else "stage",
            source=f"Metis format, {root.resolve().name}: {len(found)} files",
            notes=(
                f"forward = ms / {1 + backward_factor:g}: the format holds the sum of forward and backward",
                f"activations = memory of the layer (MB of 2^20 bytes) - {state_factor:g} x its parameter bytes",
                "update_s = optimizer_time_ms in equal shares of the layers",
                "precision, attention, sequence length and attention heads are not in the format",
            ),
        ),
        logits_bytes=_logits_bytes(found),
        warnings=_warnings(found, backward_factor, state_factor),
    )
    return (profile,)


def _layers(
    found: list[_File], backward_factor: float, state_factor: float, bytes_per_parameter: float
) -> list[Layer]:
    first = _of_least_tp(found)
    whole = 1 if first.whole_layers else first.tp
    of_tp = {file.tp: file.parameter_bytes for file in found if not first.whole_layers and file.tp > 1}
    rows = [file.rows(backward_factor, state_factor) for file in found]
    return [
        Layer(
            parameters=whole * round(first.parameter_bytes[layer] / bytes_per_parameter),
            shard_parameters=tuple((tp, round(of_tp[tp][layer] / bytes_per_parameter)) for tp in sorted(of_tp)),
            output_bytes=first.output_per_sample(layer),
            rows=tuple(of_file[layer] for of_file in rows),
        )
        for layer in range(first.num_layers)
    ]


def _logits_bytes(found: list[_File]) -> int:
    first = _of_least_tp(found)
    if first.num_layers == 1:
        return 0
    degrees = sorted({file.tp for file in found})
    return vocabulary_bytes(first.output_per_sample(-1), first.output_per_sample(-2), degrees, first.tp)


def _warnings(found: list[_File], backward_factor: float, state_factor: float) -> list[str]:
    first = _of_least_tp(found)
    warnings = [f"forward and backward were not measured apart: backward taken as {backward_factor:g} x forward"]
    if first.tp > 1 and not first.whole_layers:
        warnings.append(f"tp 1 was not measured: layers taken as {first.tp} x their share at tp {first.tp}")
    bounded = [file.label for file in found if file.bounded(state_factor)]
    if bounded:
        warnings.append(
            f"less than an output left after {state_factor:g} x parameters in some layer, its output taken: "
            + ", ".join(bounded)
        )
    return warnings


def _of_least_tp(found: list[_File]) -> _File:
    return min(found, key=lambda file: file.tp)


def _check_positive(key: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{key}: {value!r} is not a finite number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file: a device type at a tp degree and a micro-batch size, its figures per layer in seconds and bytes."""

    content: Json
    device_type: str
    tp: int
    micro_batch: int
    whole_layers: bool  # parameter bytes are those of the whole layer, not of one rank
    model: str
    parameter_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]  # of the micro-batch
    seconds: tuple[float, ...]  # forward + backward
    memory_bytes: tuple[int, ...]
    update_s: float  # of all layers

    @property
    def num_layers(self) -> int:
        return len(self.seconds)

    @property
    def label(self) -> str:
        return f"{self.device_type} tp {self.tp} micro-batch {self.micro_batch}"

    def output_per_sample(self, layer: int) -> int:
        return -(-self.output_bytes[layer] // self.micro_batch)

    def left(self, state_factor: float) -> list[int]:
        """Bytes per layer that are not model state."""
        ranks = self.tp if self.whole_layers else 1
        return [
            round(memory - state_factor * nbytes / ranks)
            for memory, nbytes in zip(self.memory_bytes, self.parameter_bytes)
        ]

    def bounded(self, state_factor: float) -> bool:
        """Whether some layer's activations would come out smaller than its output."""
        return any(left < output for left, output in zip(self.left(state_factor), self.output_bytes))

    def rows(self, backward_factor: float, state_factor: float) -> list[Row]:
        return [
            Row(
                device_type=self.device_type,
                tp=self.tp,
                micro_batch=self.micro_batch,
                forward_s=seconds / (1 + backward_factor),
                backward_s=seconds - seconds / (1 + backward_factor),
                update_s=self.update_s / self.num_layers,
                activation_bytes=max(left, output),
            )
            for seconds, left, output in zip(self.seconds, self.left(state_factor), self.output_bytes)
        ]


def _files(root: Path, output_bytes: int | None) -> Iterator[_File]:
    for path in sorted(root.glob("*/mbs*_tmp*.json")):
        if match := FOLDERS.fullmatch(path.name):
            yield _read(path, path.parent.name, int(match["tp"]), int(match["micro_batch"]), False, output_bytes)
    for path in sorted(root.glob("DeviceType.*.json")):
        if match := FLAT.fullmatch(path.name):
            yield _read(path, match["device_type"], int(match["tp"]), int(match["micro_batch"]), True, output_bytes)


def _read(path: Path, device_type: str, tp: int, micro_batch: int, whole: bool, output_bytes: int | None) -> _File:
    content = Json.read(path)
    model, times, memory = (content.at(key) for key in ("model", "execution_time", "execution_memory"))
    num_layers, parameters = model.at("num_layers").count(1), model.at("parameters")
    if output_bytes is None and not parameters.has("activation_parameters_bytes"):
        raise ValueError(f"{parameters.where}: key 'activation_parameters_bytes' is missing; give output_bytes instead")
    outputs = (
        (output_bytes * micro_batch,) * num_layers
        if output_bytes is not None
        else tuple(entry.count() for entry in parameters.at("activation_parameters_bytes").list(num_layers))
    )
    return _File(
        content=content,
        device_type=device_type,
        tp=tp,
        micro_batch=micro_batch,
        whole_layers=whole,
        model=model.at("model_name").text(),
        parameter_bytes=tuple(entry.count() for entry in parameters.at("parameters_per_layer_bytes").list(num_layers)),
        output_bytes=outputs,
        seconds=tuple(entry.number() / 1e3 for entry in times.at("layer_compute_total_ms").list(num_layers)),
        memory_bytes=tuple(
            round(entry.number() * MEGABYTE) for entry in memory.at("layer_memory_total_mb").list(num_layers)
        ),
        update_s=times.at("optimizer_time_ms").number() / 1e3,
    )


def _check_one_model(found: list[_File]) -> None:
    """Every file is of the same model, in the same layout, and each case is there once."""
    first = found[0]
    seen: dict[str, _File] = {}
    of_degree: dict[int, _File] = {}
    for file in found:
        here = file.content.where
        twin, sibling = seen.setdefault(file.label, file), of_degree.setdefault(file.tp, file)
        if twin is not file:
            raise ValueError(f"{here}: {file.label} is already in {twin.content.where}")
        for key, value, expected, other in (
            ("model_name", file.model, first.model, first),
            ("number of layers", file.num_layers, first.num_layers, first),
            ("whole layers by its name", file.whole_layers, first.whole_layers, first),
            ("parameters_per_layer_bytes", file.parameter_bytes, sibling.parameter_bytes, sibling),
        ):
            if value != expected:
                raise ValueError(f"{here}: {key} is {short(value)}, but {short(expected)} in {other.content.where}")

