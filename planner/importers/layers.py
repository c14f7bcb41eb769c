"""What the importers share: layers with their measurements, grouped into kinds.

The formats list every layer of a model under every device type, tp degree and micro-batch size, although most layers
are equal. Layers that are equal in every figure become one kind, so that a profile stays readable and says which
layers were measured apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.importers.reading import naming
from planner.profile import Cell, Conditions, LayerKind, ModelProfile

MEGABYTE = 2**20
NO_UPDATE = "the optimizer's update was not measured: it is taken as 0 s"
FASTEST_S, SLOWEST_S = 1e-6, 100.0  # seconds; a longest layer outside of this is a slip of units


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer measured on one device type, at one tp degree and one micro-batch size; `where`, if the files are
    several."""

    where: object = field(default=None, compare=False)
    device_type: str
    tp: int
    micro_batch: int
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    activation_bytes: int  # per rank; the logits of the head included
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the model with all its rows. Layers that compare equal become one kind."""

    name: str = ""  # of its kind; empty for embedding, block, head
    parameters: int
    shard_parameters: tuple[tuple[int, int], ...] = ()
    output_bytes: int
    recomputable: bool = True
    tied_to: str | None = None
    tied_parameters: int = 0
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
    """The kind of each layer: its name, or `embedding`, `head`, `block` for the most frequent, `block-7` for others.

    The ends are an embedding and a head where no other layer equals them. Of several kinds with one name, all but the
    first add the index of their first layer.
    """
    times = Counter(layers)
    ends = {}
    if len(layers) > 1:
        ends = {layer: name for layer, name in ((layers[0], "embedding"), (layers[-1], "head")) if times[layer] == 1}
    most = max((layer for layer in times if layer not in ends), key=lambda layer: times[layer], default=None)
    names: dict[Layer, str] = {}
    for layer in times:
        index = layers.index(layer)
        if layer.name:
            names[layer] = layer.name if layer.name not in names.values() else f"{layer.name}-{index}"
        else:
            names[layer] = ends.get(layer, "block" if layer == most else f"block-{index}")
    return tuple(names[layer] for layer in layers)


def model_profile(
    where: object,
    name: str,
    layers: Sequence[Layer],
    *,
    conditions: Conditions,
    logits_bytes: int = 0,
    num_heads: int | None = None,
    warnings: Sequence[str] = (),
    members: Sequence[Sequence[str]] = (),
) -> ModelProfile:
    """The profile of these layers; `logits_bytes` (per sample, whole) are taken out of the last layer's activations.

    Errors start with `where`.
    """
    _check_unit(where, layers)
    with naming(where):
        names = kind_names(layers)
        kinds: dict[str, LayerKind] = {}
        cells: list[Cell] = []
        for kind, layer in zip(names, layers):
            if kind in kinds:
                continue
            last = layer == layers[-1]
            logits = logits_bytes if last else 0
            kinds[kind] = LayerKind(
                name=kind,
                parameters=layer.parameters,
                shard_parameters=layer.shard_parameters,
                output_bytes=0 if last and names.count(kind) == 1 else layer.output_bytes,  # nothing follows the last
                logits_bytes=logits,
                recomputable=layer.recomputable,
                tied_to=layer.tied_to,
                tied_parameters=layer.tied_parameters,
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
                    workspace_bytes=row.workspace_bytes,
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
            members=tuple(map(tuple, members)),
        )


def _check_unit(where: object, layers: Sequence[Layer]) -> None:
    """No layer takes minutes and no model takes less than a microsecond: then the figures have another unit."""
    longest: dict[tuple[str, int, int], Row] = {}
    for row in (row for layer in layers for row in layer.rows):
        measured = row.device_type, row.tp, row.micro_batch
        longest[measured] = max(longest.get(measured, row), row, key=_seconds)
    for (device_type, tp, micro_batch), row in longest.items():
        if _seconds(row) and not FASTEST_S <= _seconds(row) <= SLOWEST_S:
            raise ValueError(
                f"{row.where or where}: the longest layer on {device_type!r} at tp {tp}, micro-batch {micro_batch}"
                f" takes {_seconds(row):.3g} s, expected {FASTEST_S:g} to {SLOWEST_S:g} s: the times are in another"
                " unit than the format says"
            )


def _seconds(row: Row) -> float:
    return row.forward_s + row.backward_s
