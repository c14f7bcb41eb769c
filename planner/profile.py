"""What a layer costs, measured: a profile of one model on every device type it may run on.

A model is a chain of layers; layers of the same *kind* cost the same. A *cell* is one measurement: a kind on a device
type, at a tensor-parallel degree and a micro-batch size. Cells may be missing. Between two measured micro-batch sizes
a layer is interpolated linearly; outside them it has no cost, unless extrapolation is asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from planner.files import MAPPING, Document, cached, did_you_mean, digest, shorthand

if TYPE_CHECKING:
    from planner.cluster import Cluster

Array = NDArray[np.float64]
MEASURES = ("forward_s", "backward_s", "update_s", "activation_bytes", "workspace_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What all layers of one kind have in common, on whatever device they run.

    Parameters
    ----------
    name
        Unique within the profile.
    parameters
        Parameters of the whole layer.
    output_bytes
        Bytes per sample handed to the next layer.
    shard_parameters
        Pairs (tp, parameters held by one rank), where that is not the parameters divided by tp, rounded up.
    logits_bytes
        Bytes per sample of logits at tp 1, kept apart from the activations; divided by tp.
    num_tensors
        Gradient tensors of the layer.
    recomputable
        Whether the layer may drop its activations and run forward again.
    trainable
        False for frozen layers: no gradient, no optimizer state, no sync.
    trainable_parameters
        Those of `parameters` that are trained, where it is not all of them (adapters beside frozen matrices).
    active_parameters
        Parameters that multiply a token of the sequence, where it is not all of them: of experts those it is sent to,
        of a vision tower in proportion to its tokens. Only for FLOP counts.
    tied_to
        Kind of the layer that holds the same tensor (the embedding, for a tied head).
    tied_parameters
        Those of `parameters` that are that tensor; stored once where both layers are in one stage.
    tp_bytes
        Bytes per sample all-reduced between tp ranks in a forward, and again in a backward pass; used only if
        ``conditions.tp_communication`` is ``outside``. None for twice `output_bytes`.
    """

    BRIEF: ClassVar[bool] = True

    name: str
    parameters: int
    output_bytes: int
    shard_parameters: tuple[tuple[int, int], ...] = field(default=(), metadata=MAPPING)
    logits_bytes: int = 0
    num_tensors: int = 1
    recomputable: bool = True
    trainable: bool = True
    trainable_parameters: int | None = None
    active_parameters: int | None = None
    tied_to: str | None = None
    tied_parameters: int = 0
    tp_bytes: int | None = None

    def __post_init__(self) -> None:
        for key in ("parameters", "output_bytes", "logits_bytes", "num_tensors", "tied_parameters", "tp_bytes",
                    "trainable_parameters", "active_parameters"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"{key}: {value} of kind {self.name!r} is negative")
        some = self.trainable_parameters
        if some is not None and not (self.trainable and some <= self.parameters):
            raise ValueError(
                f"trainable_parameters: {some} of kind {self.name!r}, expected at most its {self.parameters} parameters"
                " and trainable true"
            )
        if not self.name:
            raise ValueError("name: empty, expected the name of a layer kind")
        if bool(self.tied_parameters) != (self.tied_to is not None):
            raise ValueError(
                f"tied_parameters: {self.tied_parameters} with tied_to {self.tied_to!r} of kind {self.name!r}, expected"
                " both or neither"
            )
        if self.tied_parameters > self.parameters:
            raise ValueError(
                f"tied_parameters: {self.tied_parameters} of kind {self.name!r} is more than its {self.parameters}"
                " parameters"
            )
        if len({tp for tp, _ in self.shard_parameters}) < len(self.shard_parameters):
            raise ValueError(f"shard_parameters: kind {self.name!r} has a tp degree twice")
        for tp, share in self.shard_parameters:
            if tp < 1 or share > self.parameters or tp * (share + 1) <= self.parameters:
                raise ValueError(
                    f"shard_parameters: {share} per rank at tp {tp} of kind {self.name!r}, expected between"
                    f" {self.parameters} / tp and {self.parameters}"
                )

    def shard(self, tp: int) -> int:
        """Parameters that one of `tp` ranks holds."""
        return dict(self.shard_parameters).get(tp, -(-self.parameters // tp))

    @property
    def trained(self) -> int:
        """Parameters with gradients."""
        if not self.trainable:
            return 0
        return self.parameters if self.trainable_parameters is None else self.trainable_parameters

    def trained_shard(self, tp: int) -> int:
        """Parameters with gradients that one of `tp` ranks holds."""
        return self.shard(tp) if self.trained == self.parameters else -(-self.trained // tp)

    @property
    def active(self) -> int:
        """Parameters that multiply a token of the sequence."""
        return self.parameters if self.active_parameters is None else self.active_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: a layer kind on a device type, at a tp degree and a micro-batch size.

    Parameters
    ----------
    kind, device_type, tp, micro_batch
        What was measured; `micro_batch` in samples.
    forward_s, backward_s
        Seconds of one micro-batch, on each rank.
    activation_bytes
        Bytes kept for the backward pass of one micro-batch, per rank, logits excluded.
    update_s
        Seconds of the optimizer step, once per iteration.
    workspace_bytes
        Largest temporary memory while the layer runs, per rank.
    extrapolated
        True if the figures are not measured; such a cell is used only where extrapolation is asked for.
    """

    BRIEF: ClassVar[bool] = True

    kind: str
    device_type: str
    tp: int
    micro_batch: int
    forward_s: float
    backward_s: float
    activation_bytes: int
    update_s: float = 0.0
    workspace_bytes: int = 0
    extrapolated: bool = False

    def __post_init__(self) -> None:
        for key in ("tp", "micro_batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: {getattr(self, key)} is less than 1")
        for key in MEASURES:
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                unit = "seconds" if key.endswith("_s") else "bytes"
                raise ValueError(f"{key}: {value} of {self.label}, expected {unit} of at least 0")

    @property
    def label(self) -> str:
        return f"kind {self.kind!r} on {self.device_type!r}, tp {self.tp}, micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How the profile was measured. Profiles of different conditions are not comparable.

    Parameters
    ----------
    dtype, tf32, attention, sequence_length
        Arithmetic, attention implementation, and tokens per sample.
    tp_communication
        Whether the measured times hold the all-reduces between tp ranks (``inside``) or the planner adds them.
    update_per
        ``layer``: the update time of a stage is the sum over its layers; ``stage``: each `update_s` is the figure of a
        whole stage, which then takes the largest of its layers.
    timer, date, source, notes
        Where the numbers come from.
    """

    BRIEF: ClassVar[bool] = True

    dtype: str = "unknown"
    tf32: bool | None = None
    attention: str = "unknown"
    sequence_length: int | None = None
    tp_communication: Literal["inside", "outside"] = "inside"
    update_per: Literal["layer", "stage"] = "layer"
    timer: str = "unknown"
    date: str = "unknown"
    source: str = "unknown"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.sequence_length is not None and self.sequence_length < 1:
            raise ValueError(f"sequence_length: {self.sequence_length} is less than 1")
        for key, allowed in (("tp_communication", ("inside", "outside")), ("update_per", ("layer", "stage"))):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}: {getattr(self, key)!r} is not among {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """What every layer costs at one device type, tp degree and micro-batch size: read-only arrays of length L.

    Parameters
    ----------
    forward_s, backward_s, update_s
        Seconds, as in `Cell`.
    activation_bytes, workspace_bytes
        Bytes per rank, as in `Cell`; interpolated, so not always whole.
    measured
        True if every figure stands in the profile as measured.
    extrapolated
        True if some figure lies outside the measured sizes, or comes from a cell that is marked so.
    """

    forward_s: Array
    backward_s: Array
    update_s: Array
    activation_bytes: Array
    workspace_bytes: Array
    measured: bool
    extrapolated: bool


def _expand_layers(data: Any) -> Any:
    if not isinstance(data, list):
        raise ValueError(f'expected a list such as [["embedding", 1], ["block", 24], ["head", 1]], got {data!r}')
    layers: list[Any] = []
    for i, entry in enumerate(data):
        if isinstance(entry, str):
            layers.append(entry)
            continue
        pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
        if not pair or isinstance(entry[1], bool) or not isinstance(entry[1], int) or entry[1] < 1:
            raise ValueError(f'entry {i} is {entry!r}, expected a kind or a pair such as ["block", 24]')
        layers += [entry[0]] * entry[1]
    return layers


def _collapse_layers(layers: list[str]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for kind in layers:
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
    return runs


def _expand_cells(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    if set(data) != {"columns", "rows"}:
        keys = ", ".join(map(str, data))
        raise ValueError(f'expected a list of objects, or an object with keys "columns" and "rows", got keys {keys}')
    columns = data["columns"]
    for key, value in data.items():
        if not isinstance(value, list):
            raise ValueError(f"{key} is {value!r}, expected a list")
    names = [each.name for each in fields(Cell)]
    for name in columns:
        if name not in names:
            raise ValueError(f"column {name!r} is not among the columns: {did_you_mean(name, names)}")
    for i, row in enumerate(data["rows"]):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ValueError(f"row {i} is {row!r}, expected {len(columns)} entries: {', '.join(columns)}")
    return [dict(zip(columns, row)) for row in data["rows"]]


def _collapse_cells(cells: list[dict[str, Any]]) -> dict[str, Any]:
    defaults = {each.name: each.default for each in fields(Cell)}
    columns = [name for name in defaults if any(name in cell for cell in cells)]
    rows = [[cell.get(name, defaults[name]) for name in columns] for cell in cells]
    return {"columns": columns, "rows": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile(Document):
    """A chain of layers and what each was measured to cost.

    Parameters
    ----------
    name
        Model.
    layers
        Kind of every layer, first to last. In a file also as runs: ``[["embedding", 1], ["block", 24], ["head", 1]]``.
    kinds
        The layer kinds.
    cells
        The measurements; in a file as one header of columns and one row each, or as a list of objects.
    conditions
        How it was measured.
    num_heads, num_kv_heads
        Attention heads, which tensor parallelism divides; None if unknown.
    warnings
        What whoever made the profile wants to be known.
    members
        Nodes of the graph that each layer stands for, if the model was profiled as a graph; left out of the file if
        not.
    """

    SCHEMA: ClassVar[str] = "hpp-profile/1"

    name: str
    layers: tuple[str, ...] = field(metadata=shorthand(_expand_layers, _collapse_layers))
    kinds: tuple[LayerKind, ...]
    cells: tuple[Cell, ...] = field(metadata=shorthand(_expand_cells, _collapse_cells))
    conditions: Conditions = Conditions()
    num_heads: int | None = None
    num_kv_heads: int | None = None
    warnings: tuple[str, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_cells()
        for key in ("num_heads", "num_kv_heads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}: {value} is less than 1")
        if self.num_kv_heads and (not self.num_heads or self.num_heads % self.num_kv_heads):
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if len(self.members) not in (0, self.num_layers):
            raise ValueError(f"members: of {len(self.members)} layers, expected of all {self.num_layers} or of none")

    def to_dict(self) -> dict[str, Any]:
        """The value as plain JSON data, ``schema`` first; `members` only if there are any."""
        data = Document.to_dict(self)
        return data if self.members else {key: value for key, value in data.items() if key != "members"}

    @property
    def digest(self) -> str:
        """16 hex digits that change when anything in the value does."""
        return digest(self.to_dict())

    def _check_kinds(self) -> None:
        names = [kind.name for kind in self.kinds]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"kinds[{i}]: {name!r} occurs twice")
        if not self.layers:
            raise ValueError("layers: empty, expected at least one layer")
        known = set(names)
        for i, name in enumerate(self.layers):
            if name not in known:
                raise ValueError(f"layers[{i}]: kind {name!r} is not among kinds: {did_you_mean(name, names)}")
        counts = Counter(self.layers)
        for i, kind in enumerate(self.kinds):
            if kind.tied_to is None:
                continue
            if kind.tied_to not in known or kind.tied_to == kind.name:
                others = did_you_mean(kind.tied_to, [name for name in names if name != kind.name])
                raise ValueError(f"kinds[{i}].tied_to: {kind.tied_to!r} is not among the other kinds: {others}")
            target = self.kinds[names.index(kind.tied_to)]
            if target.tied_to is not None:
                raise ValueError(f"kinds[{i}].tied_to: {target.name!r} is tied to {target.tied_to!r} itself; name that")
            if kind.tied_parameters > target.parameters:
                raise ValueError(
                    f"kinds[{i}].tied_parameters: {kind.tied_parameters} is more than the {target.parameters}"
                    f" parameters of {target.name!r}"
                )
            if counts[kind.name] and counts[target.name] != 1:
                raise ValueError(
                    f"kinds[{i}].tied_to: {target.name!r} is the kind of {counts[target.name]} layers, expected one"
                )

    def _check_cells(self) -> None:
        if not self.cells:
            raise ValueError("cells: empty, expected at least one measurement")
        names = [kind.name for kind in self.kinds]
        known = set(names)
        seen: dict[tuple[str, str, int, int], int] = {}
        for i, cell in enumerate(self.cells):
            if cell.kind not in known:
                raise ValueError(f"cells[{i}].kind: {cell.kind!r} is not among kinds: {did_you_mean(cell.kind, names)}")
            key = (cell.kind, cell.device_type, cell.tp, cell.micro_batch)
            if key in seen:
                raise ValueError(f"cells[{i}]: {cell.label} is already cells[{seen[key]}]")
            seen[key] = i
        for device_type in self.device_types:
            if not any(cell.forward_s for cell in self.cells if cell.device_type == device_type):
                raise ValueError(f"cells: forward_s is 0 in every cell of {device_type!r}, expected seconds")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    @cached
    def device_types(self) -> tuple[str, ...]:
        """Device types with at least one cell, sorted."""
        return tuple(sorted({cell.device_type for cell in self.cells}))

    @property
    @cached
    def parameters(self) -> int:
        """Parameters of the model; a tied tensor counts once."""
        kinds = map(self.kind_of, range(self.num_layers))
        return sum(kind.parameters - kind.tied_parameters for kind in kinds)

    @property
    @cached
    def active_parameters(self) -> int:
        """Parameters that multiply a token of the sequence, for FLOP counts; a tied tensor counts once."""
        kinds = map(self.kind_of, range(self.num_layers))
        return sum(kind.active - kind.tied_parameters for kind in kinds)

    def kind_of(self, layer: int) -> LayerKind:
        """Kind of the layer at this index."""
        return self._layer_kinds()[layer]

    @cached
    def _layer_kinds(self) -> tuple[LayerKind, ...]:
        by_name = {kind.name: kind for kind in self.kinds}
        return tuple(by_name[name] for name in self.layers)

    @cached
    def _used_kinds(self) -> tuple[str, ...]:
        """Names of the kinds that some layer has, in order of first use."""
        return tuple(dict.fromkeys(self.layers))

    @cached
    def _table(self) -> dict[tuple[str, int], dict[str, list[Cell]]]:
        """(device type, tp) -> kind -> its cells by micro-batch size, for the kinds in use."""
        table: dict[tuple[str, int], dict[str, list[Cell]]] = {}
        used = set(self._used_kinds())
        for cell in sorted(self.cells, key=lambda cell: cell.micro_batch):
            if cell.kind in used:
                table.setdefault((cell.device_type, cell.tp), {}).setdefault(cell.kind, []).append(cell)
        return table

    def _sizes(self, device_type: str, tp: int) -> tuple[int, ...]:
        """Micro-batch sizes measured for some kind."""
        cells = [cell for row in self._table().get((device_type, tp), {}).values() for cell in row]
        return tuple(sorted({cell.micro_batch for cell in cells if not cell.extrapolated}))

    @cached
    def degrees(self, device_type: str) -> tuple[int, ...]:
        """Tensor-parallel degrees at which some micro-batch size has a cost for every layer."""
        degrees = sorted(tp for device, tp in self._table() if device == device_type)
        return tuple(
            tp for tp in degrees if any(self.layer_costs(device_type, tp, b) for b in self._sizes(device_type, tp))
        )

    @cached
    def micro_batches(self, device_type: str, tp: int) -> tuple[int, ...]:
        """Micro-batch sizes at which every kind was measured."""
        rows = self._table().get((device_type, tp), {})
        measured = [{c.micro_batch for c in rows.get(kind, ()) if not c.extrapolated} for kind in self._used_kinds()]
        return tuple(sorted(set.intersection(*measured)))

    @cached
    def holes(self) -> tuple[str, ...]:
        """What was not measured, in words, among the sizes and degrees measured for any kind of the device type."""
        measured = {(c.device_type, c.tp, c.micro_batch, c.kind) for c in self.cells if not c.extrapolated}
        used = self._used_kinds()
        lines = []
        for device_type in self.device_types:
            own = [key for key in measured if key[0] == device_type and key[3] in used]
            for tp in sorted({key[1] for key in own}):
                for b in sorted({key[2] for key in own}):
                    missing = [kind for kind in used if (device_type, tp, b, kind) not in measured]
                    if missing:
                        what = "every kind" if len(missing) == len(used) else ", ".join(missing)
                        lines.append(f"{device_type}, tp {tp}, micro-batch {b}: {what}")
        return tuple(lines)

    @cached
    def layer_costs(self, device_type: str, tp: int, micro_batch: int, extrapolate: bool = False) -> LayerCosts | None:
        """Costs of every layer, or None if some kind was not measured at, or around, this micro-batch size.

        Parameters
        ----------
        device_type, tp
            Class of the devices.
        micro_batch
            Size in samples; between two measured sizes every kind is interpolated linearly.
        extrapolate
            Whether to go on linearly through the two nearest measured sizes beyond their range (then never below the
            last figure for a larger size, nor, for a smaller one, below its share), and to use cells marked so.
        """
        rows = self._table().get((device_type, tp), {})
        used = self._used_kinds()
        figures = np.empty((len(used), len(MEASURES)))
        measured, extrapolated = True, False
        for i, kind in enumerate(used):
            found = _interpolate([cell for cell in rows.get(kind, ()) if not cell.extrapolated], micro_batch, False)
            if found is None and extrapolate:
                extrapolated = True
                found = _interpolate(rows.get(kind, []), micro_batch, True)
            if found is None:
                return None
            figures[i], exact = found
            measured = measured and exact and not extrapolated
        index = {kind: i for i, kind in enumerate(used)}
        columns = figures[[index[kind] for kind in self.layers]].T.copy()
        columns.flags.writeable = False
        return LayerCosts(**dict(zip(MEASURES, columns)), measured=measured, extrapolated=extrapolated)

    def tp_allowed(self, tp: int) -> bool:
        """Whether tp divides the attention heads, and the key-value heads or is a multiple of them, where known."""
        if self.num_heads is not None and self.num_heads % tp:
            return False
        return self.num_kv_heads is None or self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0


def _interpolate(cells: list[Cell], micro_batch: int, extrapolate: bool) -> tuple[Array, bool] | None:
    """Figures (in the order of `MEASURES`) at a micro-batch size, and whether a cell holds exactly them."""
    sizes = [cell.micro_batch for cell in cells]
    if micro_batch in sizes:
        return _figures(cells[sizes.index(micro_batch)]), True
    right = sum(size < micro_batch for size in sizes)
    inside = 0 < right < len(sizes)
    if len(sizes) < 2 or not (inside or extrapolate):
        return None
    right = min(max(right, 1), len(sizes) - 1)
    low, high = _figures(cells[right - 1]), _figures(cells[right])
    b0, b1 = sizes[right - 1], sizes[right]
    line = low + (high - low) * ((micro_batch - b0) / (b1 - b0))
    if micro_batch > b1:
        line = np.maximum(line, high)
    elif micro_batch < b0:
        line = np.clip(line, low * (micro_batch / b0), low)
    return line, False


def _figures(cell: Cell) -> Array:
    return np.array([getattr(cell, key) for key in MEASURES], dtype=np.float64)


def sanity(profile: ModelProfile, cluster: Cluster) -> tuple[str, ...]:
    """Warnings about cells whose implied FLOP/s exceed the device's peak or stay below 1 % of it: a unit slip, often.

    A matrix product takes 2 FLOP per parameter and token forward and 4 backward (2 if frozen), divided over the tp
    ranks. Attention comes on top, so the rate is a lower estimate. Left out: embeddings (no matrix product: backward
    of zero, or another kind is tied to it), kinds with under 1 % of the largest kind's parameters, unknown peak or
    sequence length.
    """
    tokens = profile.conditions.sequence_length
    if tokens is None:
        return ()
    peaks = {each.name: each.peak_flops_per_s for each in cluster.device_types}
    kinds = {kind.name: kind for kind in profile.kinds}
    embeddings = {kind.tied_to for kind in profile.kinds} | {name for name in kinds if "embed" in name.lower()}
    least = max(kind.active for kind in profile.kinds) / 100
    slips: dict[tuple[str, str, bool], list[tuple[float, Cell]]] = {}
    for cell in profile.cells:
        kind, peak = kinds[cell.kind], peaks.get(cell.device_type)
        if not peak or not cell.backward_s or kind.name in embeddings or not kind.active > least:
            continue
        share = kind.active / max(kind.parameters, 1)
        products = 6 if 2 * kind.trained > kind.parameters else 4
        flops = products * share * kind.shard(cell.tp) * cell.micro_batch * tokens
        fraction = flops / (cell.forward_s + cell.backward_s) / peak
        if not 0.01 <= fraction <= 1:
            slips.setdefault((cell.device_type, cell.kind, fraction > 1), []).append((fraction, cell))
    return tuple(_slip_warning(above, found) for (_, _, above), found in slips.items())


def _slip_warning(above: bool, found: list[tuple[float, Cell]]) -> str:
    fraction, cell = (max if above else min)(found, key=lambda each: each[0])
    time_s = cell.forward_s + cell.backward_s
    more = f" (so do {len(found) - 1} more cells of this kind)" if len(found) > 1 else ""
    advice = "is the peak the one for this dtype, and are the times seconds?" if above else "are the times seconds?"
    return (
        f"{cell.label}: forward + backward of {time_s:.3g} s implies {100 * fraction:.3g} % of the device's peak FLOP/s"
        f"{more}; {advice}"
    )
