"""Profiles of one model, measured apart, as one: each device type is measured on a machine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from planner.profile import LayerKind, ModelProfile

COMPARABLE = ("dtype", "tf32", "attention", "sequence_length", "tp_communication", "update_per")
OWN = ("shard_parameters", "logits_bytes")  # of a kind, what may differ between profiles


def profiles(given: Sequence[ModelProfile], names: Sequence[str] | None = None) -> ModelProfile:
    """One profile of several of one model: each of another device type, tp degree, or micro-batch size.

    Parameters
    ----------
    names
        What error messages call them: their files.

    Raises
    ------
    ValueError
        If they are not of one model under the same conditions, or two measured the same.
    """
    if not given:
        raise ValueError("merge: no profile given")
    names = names or [f"profile {i}" for i in range(len(given))]
    first = given[0]
    for name, other in zip(names[1:], given[1:]):
        _check_alike(first, other, names[0], name)
    _check_apart(given, names)
    conditions = [each.conditions for each in given]
    return replace(
        first,
        kinds=tuple(_merged([each.kinds[i] for each in given]) for i in range(len(first.kinds))),
        cells=tuple(cell for each in given for cell in each.cells),
        conditions=replace(
            first.conditions,
            tf32=next((each.tf32 for each in conditions if each.tf32 is not None), None),
            timer=_joined([each.timer for each in conditions]),
            date=_joined([each.date for each in conditions]),
            source=_joined([each.source for each in conditions]),
            notes=tuple(dict.fromkeys(note for each in conditions for note in each.notes)),
        ),
        warnings=tuple(dict.fromkeys(warning for each in given for warning in each.warnings)),
    )


def _joined(texts: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _check_alike(first: ModelProfile, other: ModelProfile, first_name: str, name: str) -> None:
    rows = [("name", first.name, other.name), ("layers", first.num_layers, other.num_layers)]
    rows += [(f"layers[{l}]", a, b) for l, (a, b) in enumerate(zip(first.layers, other.layers))]
    rows += [("kinds", len(first.kinds), len(other.kinds))]
    for a, b in zip(first.kinds, other.kinds):
        keys = [each.name for each in fields(LayerKind) if each.name not in OWN]
        rows += [(f"kinds: {key} of {b.name!r}", getattr(a, key), getattr(b, key)) for key in keys]
    for key in COMPARABLE:
        values = getattr(first.conditions, key), getattr(other.conditions, key)
        if not (key == "tf32" and None in values):  # a device without it says nothing
            rows.append((f"conditions.{key}", *values))
    for key in ("num_heads", "num_kv_heads"):
        rows.append((key, getattr(first, key), getattr(other, key)))
    for key, ours, theirs in rows:
        if ours != theirs:
            raise ValueError(f"{name}: {key}: {theirs!r}, expected {ours!r} as in {first_name}")


def _check_apart(given: Sequence[ModelProfile], names: Sequence[str]) -> None:
    seen: dict[tuple[str, str, int, int], str] = {}
    for name, each in zip(names, given):
        for cell in each.cells:
            key = (cell.kind, cell.device_type, cell.tp, cell.micro_batch)
            if key in seen:
                raise ValueError(f"{name}: {cell.label} is in {seen[key]} too; give devices different names")
            seen[key] = name


def _merged(kinds: Sequence[LayerKind]) -> LayerKind:
    """One kind of all: every tp degree's shards; of the logits the most, kernels of devices may keep different ones."""
    shards = dict(sorted(shard for kind in kinds for shard in kind.shard_parameters))
    logits = max(kind.logits_bytes for kind in kinds)
    return replace(kinds[0], shard_parameters=tuple(shards.items()), logits_bytes=logits)
