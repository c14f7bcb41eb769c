"""What the importers share: checked access to foreign JSON, and layers grouped into kinds.

The formats list every layer of a model under every device type, tp degree and micro-batch size, although most layers
are equal. Layers that are equal in every figure become one kind, so that a profile stays readable and says which
layers were measured apart.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner import files
from planner.profile import Cell, Conditions, LayerKind, ModelProfile


@dataclass(frozen=True, slots=True)
class Json:
    """A value of a JSON file together with the file and the keys that lead to it, so that errors can name them."""

    value: object
    file: Path
    keys: tuple[str, ...] = ()

    @classmethod
    def read(cls, file: Path) -> Json:
        return cls(files.read(file), file)

    @property
    def where(self) -> str:
        return f"{self.file}: {' > '.join(self.keys)}" if self.keys else str(self.file)

    def wrong(self, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {short(self.value)} is not {expected}")

    def items(self) -> Iterator[tuple[str, Json]]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for key, value in self.value.items():
            yield str(key), Json(value, self.file, (*self.keys, str(key)))

    def by_count(self) -> dict[int, Json]:
        """Entries whose keys are whole numbers as strings, in the order of the numbers."""
        entries = {}
        for key, entry in self.items():
            if not key.isdecimal():
                raise ValueError(f"{self.where}: key {key!r} is not a whole number")
            entries[int(key)] = entry
        return dict(sorted(entries.items()))

    def has(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def at(self, key: str) -> Json:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if key not in self.value:
            raise ValueError(f"{self.where}: key {key!r} is missing")
        return Json(self.value[key], self.file, (*self.keys, key))

    def list(self, length: int | None = None) -> tuple[Json, ...]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        if length is not None and len(self.value) != length:
            raise ValueError(f"{self.where}: {len(self.value)} values, expected {length}")
        return tuple(Json(v, self.file, (*self.keys, str(i))) for i, v in enumerate(self.value))

    def number(self, minimum: float = 0.0) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.wrong("a number")
        if not (math.isfinite(self.value) and self.value >= minimum):
            raise self.wrong("a finite number" + (f" >= {minimum:g}" if math.isfinite(minimum) else ""))
        return float(self.value)

    def count(self, minimum: int = 0) -> int:
        number = self.number(minimum)
        if number != int(number):
            raise self.wrong("a whole number")
        return int(number)

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value


def short(value: object) -> str:
    """`value` as it fits into an error message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def fingerprint(file: Path) -> str:
    """Name and content hash of a file, for the source of a profile."""
    return f"{file.name} (sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer measured on one device type, at one tp degree and one micro-batch size."""

    device_type: str
    tp: int
    micro_batch: int
    forward_s: float
    backward_s: float
    update_s: float
    activation_bytes: int  # per rank; the logits of the head included


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the model with all its rows. Layers that compare equal become one kind."""

    parameters: int
    shard_parameters: tuple[tuple[int, int], ...]
    output_bytes: int
    rows: tuple[Row, ...]


def vocabulary_bytes(head_output_bytes: int, hidden_output_bytes: int, degrees: Sequence[int], tp: int = 1) -> int:
    """Bytes of logits per sample over all tp ranks if the head's output is one value per vocabulary entry, else 0.

    A head that ends in a norm or in the loss hands on no more than a hidden state (plus one number, the loss). The
    outputs are those of one rank of `tp`. The result is rounded down to a multiple of all tp degrees, so that every
    rank's share is a whole number; what is cut off stays with the activations.
    """
    loss_bytes = 8
    if head_output_bytes <= hidden_output_bytes + loss_bytes:
        return 0
    return tp * head_output_bytes - tp * head_output_bytes % math.lcm(*degrees)


def kind_names(layers: Sequence[Layer]) -> tuple[str, ...]:
    """The kind of each layer: `embedding`, `head`, `block` for the most frequent, `block-7` for others from layer 7 on.

    The ends are an embedding and a head where no other layer equals them.
    """
    times = Counter(layers)
    ends = {}
    if len(layers) > 1:
        ends = {layer: name for layer, name in ((layers[0], "embedding"), (layers[-1], "head")) if times[layer] == 1}
    most = max((layer for layer in times if layer not in ends), key=lambda layer: times[layer], default=None)
    names = {layer: "block" if layer == most else f"block-{layers.index(layer)}" for layer in times} | ends
    return tuple(names[layer] for layer in layers)


def model_profile(
    name: str,
    layers: Sequence[Layer],
    *,
    conditions: Conditions,
    logits_bytes: int = 0,
    num_heads: int | None = None,
    warnings: Sequence[str] = (),
) -> ModelProfile:
    """The profile of these layers; `logits_bytes` (per sample, whole) are taken out of the head's activations."""
    names = kind_names(layers)
    kinds: dict[str, LayerKind] = {}
    cells: list[Cell] = []
    for kind, layer in zip(names, layers):
        if kind in kinds:
            continue
        logits = logits_bytes if layer == layers[-1] else 0
        kinds[kind] = LayerKind(
            name=kind,
            parameters=layer.parameters,
            shard_parameters=layer.shard_parameters,
            output_bytes=0 if kind == "head" else layer.output_bytes,  # nothing follows the head
            logits_bytes=logits,
        )
        cells += [
            Cell(
                kind=kind,
                device_type=row.device_type,
                tp=row.tp,
                micro_batch=row.micro_batch,
                forward_s=row.forward_s,
                backward_s=row.backward_s,
                update_s=row.update_s,
                activation_bytes=row.activation_bytes - row.micro_batch * logits // row.tp,
            )
            for row in layer.rows
        ]
    return ModelProfile(
        name=name,
        layers=names,
        kinds=tuple(kinds.values()),
        cells=tuple(cells),
        conditions=conditions,
        num_heads=num_heads,
        warnings=tuple(warnings),
    )
