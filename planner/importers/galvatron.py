"""Import the profiles of Galvatron (github.com/PKU-DAIR/Hetu-Galvatron, VLDB 2023): forward times and memory, links.

A model is a pair of files, `computation_profiling_NAME.json` and `memory_profiling_NAME.json`:

    layernum[4]_bsz2_seq2048                milliseconds of a forward pass of 4 layers, 2 samples
    1_2_4 > layernum[2]_bsz8_rank0_act      MB (2^20 bytes) on rank 0 with pipeline 1, tensor 2, data 4, of 8 samples:
                                            `ms` model states, `act` activations, `act_peak` with temporary memory

What the figures mean, and what we make of it:

- A layer is the difference between two layer counts; embedding and head together are what is left. Their times cannot
  be told apart: they are put on the head. Their memory comes from the first and the last rank of pipeline 2.
- Times are of tp 1. Other degrees have memory but no times; `tp_efficiency` fills them in.
- Only the forward pass was timed: backward = `backward_factor` x forward, an argument (Galvatron itself takes 2).
- Model states were sharded over the data-parallel ranks, 16 bytes per parameter.
- Rows with a trailing `c` (checkpointing) and `layertype_...` rows (worked out from the others) are not read; of the
  variants `vtp` and `sp` (vocabulary and sequence parallel) the plain one is, or `sp` where there is no plain one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from planner.cluster import Cluster, Link
from planner.importers.layers import MEGABYTE, NO_UPDATE, Layer, Row, model_profile
from planner.importers.links import GIGABYTE, skeleton
from planner.importers.reading import MOST_LAYERS, Json, counted, fingerprints, needed, positive
from planner.profile import Conditions, ModelProfile

TIMES, MEMORY = "computation_profiling_", "memory_profiling_"
TIME_KEY = re.compile(r"layernum\[(?P<layers>\d+)\]_bsz(?P<batch>\d+)(_seq(?P<sequence>\d+))?")
MEMORY_KEY = re.compile(
    r"layernum\[(?P<layers>\d+)\]_bsz(?P<batch>\d+)(_seq(?P<sequence>\d+))?_rank(?P<rank>\d+)_(?P<what>ms|act|act_peak)"
)
STRATEGY = re.compile(r"(?P<pp>\d+)_(?P<tp>\d+)_(?P<dp>\d+)(?P<sp>_sp)?")
SHAPE = re.compile(r"hidden(?P<hidden>\d+)_head(?P<heads>\d+)")
WORKED_OUT = ("layertype_", "other_memory_")
MOST_HIDDEN = 10**6
DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def profiles(
    path: str | Path,
    *,
    device: str | None = None,
    backward_factor: float | None = None,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    tp_efficiency: float | None = None,
    other_ms: float | None = None,
    layer_parameters: int | None = None,
    state_bytes: float = 16.0,
) -> tuple[ModelProfile, ...]:
    """The models of a directory, or the one of a computation file, as profiles.

    Parameters
    ----------
    device
        Name of the device type; the files do not name it.
    backward_factor
        Backward seconds per forward second; only forward was timed.
    num_layers
        Transformer layers; by default those of the searched plans (`galvatron_config_...`) beside the files.
    hidden_size
        Size of the hidden state, where the file name does not tell it.
    tp_efficiency
        If given, tp degrees with memory figures get the times of tp 1 / (tp x this), communication outside.
    other_ms
        Forward milliseconds of embedding and head for one sample, for files with a single layer count.
    layer_parameters
        Parameters of a layer, for memory files with a single layer count; its activations are then all that was kept.
    state_bytes
        Bytes of model state per parameter in the memory files.

    Raises
    ------
    ValueError
        If a file or an argument is missing or damaged; names the file, the key and the value.
    """
    needed("device", device, "the files do not name the device", "A100-40")
    needed("backward_factor", backward_factor, "the files hold forward times only", "2")
    assert device is not None
    assert backward_factor is not None
    if backward_factor:
        positive("backward_factor", backward_factor)
    for key, value in (("tp_efficiency", tp_efficiency), ("state_bytes", state_bytes), ("other_ms", other_ms)):
        if value is not None:
            positive(key, value)
    counted("num_layers", num_layers, MOST_LAYERS)
    counted("hidden_size", hidden_size, MOST_HIDDEN)
    counted("layer_parameters", layer_parameters)
    root = Path(path)
    files = [root] if root.is_file() else sorted(root.glob(f"{TIMES}*.json"))
    if not files or not files[0].name.startswith(TIMES):
        raise ValueError(f"{root}: is not, and does not hold, a {TIMES}NAME.json")
    options = _Options(
        device=device,
        backward_factor=backward_factor,
        num_layers=num_layers,
        hidden_size=hidden_size,
        tp_efficiency=tp_efficiency,
        other_ms=other_ms,
        layer_parameters=layer_parameters,
        state_bytes=state_bytes,
    )
    return tuple(_profile(file, options) for file in files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    device: str
    backward_factor: float
    num_layers: int | None
    hidden_size: int | None
    tp_efficiency: float | None
    other_ms: float | None
    layer_parameters: int | None
    state_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Forward seconds of a layer and of everything else, by micro-batch size."""

    layer_s: dict[int, float]
    other_s: dict[int, float]
    sequence: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What a layer, or the first or last rank's rest, takes."""

    parameters: int
    activation_bytes: float  # of one sample
    workspace_bytes: float  # of one sample


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """Memory by tp degree: a layer, the embedding, the head."""

    layer: dict[int, _Part]
    embedding: dict[int, _Part]
    head: dict[int, _Part]
    whole: bool  # the ends were not told apart: all of it is with the head
    notes: tuple[str, ...] = field(default=())


def _profile(file: Path, options: _Options) -> ModelProfile:
    name = file.stem.removeprefix(TIMES)
    memory_file = file.with_name(f"{MEMORY}{name}.json")
    times = _times(Json.read(file), options.other_ms)
    memory = _memory(Json.read(memory_file), options.state_bytes, options.layer_parameters)
    shape, dtype = SHAPE.search(name), name.partition("_")[0]
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{file}: {dtype!r} in the name is not among {', '.join(DTYPE_BYTES)}")
    hidden = options.hidden_size or (int(shape["hidden"]) if shape else None)
    needed("hidden_size", hidden, f"{file.name} does not tell it", "4096")
    sequence = times.sequence or (int(found[1]) if (found := re.search(r"seqlen(\d+)", name)) else None)
    if sequence is None:
        raise ValueError(f"{file}: neither a key nor the name tells the sequence length (seq2048, seqlen2048)")
    count, origin = _num_layers(file, name, options.num_layers)
    assert hidden is not None
    output_bytes = hidden * sequence * DTYPE_BYTES[dtype]
    degrees = [1] if options.tp_efficiency is None else sorted(memory.layer)

    def layer(kind: str, seconds: dict[int, float] | None, part: dict[int, _Part]) -> Layer:
        shards = {tp: part[tp].parameters for tp in degrees if tp > 1 and tp in part}
        whole = part[1].parameters
        return Layer(
            name=kind,
            parameters=whole,
            shard_parameters=tuple(
                (tp, s) for tp, s in shards.items() if s <= whole < tp * (s + 1) and s * tp != whole
            ),
            output_bytes=output_bytes,
            rows=tuple(_rows(seconds or dict.fromkeys(times.layer_s, 0.0), part, degrees, options)),
        )

    layers = [
        layer("embedding", None, memory.embedding),
        *[layer("block", times.layer_s, memory.layer)] * count,
        layer("head", times.other_s, memory.head),
    ]
    return model_profile(
        file,
        name,
        layers,
        conditions=Conditions(
            dtype=dtype,
            sequence_length=sequence,
            tp_communication="inside" if options.tp_efficiency is None else "outside",
            source=f"Galvatron format: {fingerprints([file, memory_file])}",
            notes=(
                "a layer is the difference between two layer counts; MB of 2^20 bytes",
                f"{count} layers {origin}",
                f"parameters = model states x tp x dp / {options.state_bytes:g} bytes",
                "temporary memory is act_peak - act, of the first rank for embedding and layers, of the last for head",
                "logits are inside the head's activations",
                *memory.notes,
            ),
        ),
        num_heads=int(shape["heads"]) if shape else None,
        warnings=tuple(_warnings(times, memory, degrees, options)),
    )


def _warnings(times: _Times, memory: _Memory, degrees: list[int], options: _Options) -> Iterator[str]:
    yield f"only forward was timed: backward taken as {options.backward_factor:g} x forward"
    yield "embedding and head were timed together: all of their time is with the head"
    yield NO_UPDATE
    if memory.whole:
        yield "memory of embedding and head was not measured apart: all of it is with the head"
    if len(degrees) > 1:
        yield f"times of tp > 1 were not measured: those of tp 1 / (tp x {options.tp_efficiency:g})"
    if options.other_ms is not None:
        yield f"embedding and head taken as {options.other_ms:g} ms per sample: the files hold a single layer count"
    if options.layer_parameters is not None:
        yield (
            f"a layer taken to have {options.layer_parameters} parameters and to keep all activations, where the memory"
            " file holds a single layer count"
        )


def _rows(seconds: dict[int, float], part: dict[int, _Part], degrees: list[int], options: _Options) -> Iterator[Row]:
    for tp in degrees:
        if tp not in part:
            continue
        speed = 1.0 if tp == 1 or options.tp_efficiency is None else tp * options.tp_efficiency
        for batch, forward_s in seconds.items():
            yield Row(
                device_type=options.device,
                tp=tp,
                micro_batch=batch,
                forward_s=forward_s / speed,
                backward_s=options.backward_factor * forward_s / speed,
                activation_bytes=round(part[tp].activation_bytes * batch),
                workspace_bytes=round(part[tp].workspace_bytes * batch),
            )


def _times(content: Json, other_ms: float | None) -> _Times:
    """Differences between the smallest and the largest layer count of every micro-batch size."""
    measured: dict[int, dict[int, tuple[float, Json]]] = {}
    sequences: dict[int, str] = {}
    for key, entry in content.items():
        if key.startswith(WORKED_OUT):
            continue
        match = TIME_KEY.fullmatch(key)
        if not match:
            raise ValueError(f"{content.where}: key {key!r} is not layernum[N]_bszB_seqS or layertype_...")
        measured.setdefault(int(match["batch"]), {})[int(match["layers"])] = (entry.number() / 1e3, entry)
        if match["sequence"]:
            sequences[int(match["sequence"])] = key
    if not measured:
        raise ValueError(f"{content.where}: no key layernum[N]_bszB")
    if len(sequences) > 1:
        raise ValueError(f"{content.where}: sequence lengths {sorted(sequences)} in one file, expected one")
    layer_s, other_s = {}, {}
    for batch, by_count in sorted(measured.items()):
        few, many = min(by_count), max(by_count)
        seconds, entry = by_count[few]
        if few == many and other_ms is None:
            raise ValueError(
                f"{entry.where}: layernum[{few}] alone for bsz{batch}, expected two layer counts; give other_ms, the"
                " milliseconds of embedding and head for one sample, to do without"
            )
        rest = (other_ms or 0.0) * batch / 1e3
        each = (seconds - rest) / few if few == many else (by_count[many][0] - seconds) / (many - few)
        if each <= 0 or seconds - few * each < 0:
            raise ValueError(f"{entry.where}: {entry.value} ms of {few} layers leave no time for a layer or the rest")
        layer_s[batch], other_s[batch] = each, seconds - few * each
    return _Times(layer_s=layer_s, other_s=other_s, sequence=next(iter(sequences), None))


def _num_layers(file: Path, name: str, given: int | None) -> tuple[int, str]:
    if given is not None:
        return given, "by argument"
    counts: dict[int, Path] = {}
    for plan in sorted(file.parent.glob("galvatron_config_*.json")):
        division = Json.read(plan).at("pp_division")
        parts = division.text().split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise division.wrong("counts of layers, separated by commas")
        counted(division.where, count := sum(map(int, parts)), MOST_LAYERS)
        counts[count] = plan
    if len(counts) != 1:
        found = "; ".join(f"{plan.name}: {count}" for count, plan in counts.items()) or "there is none"
        raise ValueError(
            f"num_layers: missing; {name} has a layer's figures, and how many there are only a plan beside it tells"
            f" ({found}); give for example num_layers=32, with the path of one computation file"
        )
    ((count, plan),) = counts.items()
    return count, f"as in {plan.name}"


# Memory --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """One rank's MB with so many layers."""

    layers: int
    states: float
    kept: float
    peak: float


def _memory(content: Json, state_bytes: float, layer_parameters: int | None) -> _Memory:
    chosen = _strategies(content)
    layer, embedding, head = {}, {}, {}
    for (pp, tp, dp), entry in chosen.items():
        if pp != 1:
            continue
        points, batch = _points(entry, last=False)
        few, many = points[0], points[-1]
        samples, scale = batch / dp, MEGABYTE * tp * dp / state_bytes
        if few.layers < many.layers:
            each = 1 / (many.layers - few.layers)
            states, kept = (many.states - few.states) * each, (many.kept - few.kept) * each
        elif layer_parameters is None:
            raise ValueError(
                f"{entry.where}: layernum[{few.layers}] alone, expected two layer counts; give layer_parameters, those"
                " of one layer, to do without"
            )
        elif few.layers * layer_parameters > few.states * scale:
            raise ValueError(
                f"layer_parameters: {few.layers} x {layer_parameters} are more than the {few.states * scale:.0f} of"
                f" {entry.where}"
            )
        else:
            states, kept = layer_parameters / scale, few.kept / few.layers
        layer[tp] = _part(entry, states * scale / tp, kept / samples, 0.0)
        rest = few.states - few.layers * states, few.kept - few.layers * kept, few.peak - few.kept
        head[tp] = _part(entry, rest[0] * scale / tp, rest[1] / samples, rest[2] / samples)
        embedding[tp] = _Part(parameters=0, activation_bytes=0.0, workspace_bytes=0.0)
    if 1 not in layer:
        raise ValueError(f"{content.where}: no strategy 1_1_N (pipeline 1, tensor 1) with two layer counts")
    apart = {tp: (dp, entry) for (pp, tp, dp), entry in chosen.items() if pp == 2 and tp in layer}
    whole = 1 not in apart
    if not whole:  # a degree without: all of the ends would be counted with the head, on top of the embedding
        layer = {tp: part for tp, part in layer.items() if tp in apart}
    for tp, (dp, entry) in apart.items():
        for ends, last in ((embedding, False), (head, True)):
            points, batch = _points(entry, last=last)
            own, samples = points[0].layers // 2, batch / dp
            states = points[0].states * MEGABYTE * dp / state_bytes - own * layer[tp].parameters
            kept = points[0].kept / samples - own * layer[tp].activation_bytes / MEGABYTE
            ends[tp] = _part(entry, max(states, 0.0), max(kept, 0.0), (points[0].peak - points[0].kept) / samples)
        layer[tp] = _Part(
            parameters=layer[tp].parameters,
            activation_bytes=layer[tp].activation_bytes,
            workspace_bytes=embedding[tp].workspace_bytes,
        )
    variants = sorted({entry.keys[-1] for entry in chosen.values()})
    return _Memory(
        layer=layer, embedding=embedding, head=head, whole=whole, notes=(f"memory of strategies {', '.join(variants)}",)
    )


def _strategies(content: Json) -> dict[tuple[int, int, int], Json]:
    """The entries by (pp, tp, dp), of each the plain one or else the one with sequence parallelism."""
    chosen: dict[tuple[int, int, int], Json] = {}
    for key, entry in sorted(content.items()):
        if key.startswith(WORKED_OUT):
            continue
        match = STRATEGY.fullmatch(key)
        if not match:
            if not re.fullmatch(r"\d+_\d+_\d+(_[a-z]+)+", key):
                raise ValueError(f"{content.where}: key {key!r} is not PP_TP_DP or layertype_... or other_memory_...")
            continue
        chosen.setdefault((int(match["pp"]), int(match["tp"]), int(match["dp"])), entry)
    return chosen


def _points(entry: Json, *, last: bool) -> tuple[list[_Point], int]:
    """Figures of the first or the last rank by layer count, and the samples of the global batch."""
    figures: dict[tuple[int, int], dict[str, float]] = {}
    batches = set()
    for key, value in entry.items():
        match = MEMORY_KEY.fullmatch(key)
        if not match:
            raise ValueError(f"{entry.where}: key {key!r} is not layernum[N]_bszB_rankR_ms, _act or _act_peak")
        figures.setdefault((int(match["rank"]), int(match["layers"])), {})[match["what"]] = value.number()
        batches.add(int(match["batch"]))
    if len(batches) != 1:
        raise ValueError(f"{entry.where}: batch sizes {sorted(batches)}, expected one")
    rank = (max if last else min)(rank for rank, _ in figures)
    points = []
    for (of_rank, layers), found in sorted(figures.items()):
        if of_rank == rank:
            for what in ("ms", "act", "act_peak"):
                if what not in found:
                    raise ValueError(f"{entry.where}: layernum[{layers}] of rank {rank} has no {what}")
            points.append(_Point(layers=layers, states=found["ms"], kept=found["act"], peak=found["act_peak"]))
    return points, batches.pop()


def _part(entry: Json, parameters: float, kept_mb: float, temporary_mb: float) -> _Part:
    if parameters < 0 or kept_mb < 0:
        raise ValueError(
            f"{entry.where}: figures that fall with the number of layers ({kept_mb:.4g} MB of activations)"
        )
    return _Part(
        parameters=round(parameters),
        activation_bytes=kept_mb * MEGABYTE,
        workspace_bytes=max(temporary_mb, 0.0) * MEGABYTE,
    )


# Links ---------------------------------------------------------------------------------------------------------------

PAIRS = re.compile(r"p2p_bandwidth_(?P<nodes>\d+)nodes_(?P<devices>\d+)gpus_per_node\.json")
RINGS = "allreduce_bandwidth_{}nodes_{}gpus_per_node.json"


def cluster(
    path: str | Path,
    *,
    device: str | None = None,
    memory_gb: float | None = None,
    link: Literal["p2p", "all_reduce"] = "p2p",
) -> Cluster:
    """The measured nodes (`hardware_configs`): the most devices in one node, and two nodes if two were measured.

    Parameters
    ----------
    device
        Name of the device type.
    memory_gb
        Memory of one device, in units of 2^30 bytes.
    link
        Link inside a node: measured between two devices, or what the all-reduces of a whole node come to.

    Raises
    ------
    ValueError
        If a file is missing or damaged; names the file, the key and the value.
    """
    if link not in ("p2p", "all_reduce"):
        raise ValueError(f"link: {link!r} is not one of: p2p, all_reduce")
    root = Path(path)
    found = {}
    for file in sorted(root.glob("p2p_bandwidth_*.json")):
        if match := PAIRS.fullmatch(file.name):
            found[int(match["nodes"]), int(match["devices"])] = file
    inside = [devices for nodes, devices in found if nodes == 1]
    if not inside:
        raise ValueError(f"{root}: holds no p2p_bandwidth_1nodes_Ngpus_per_node.json")
    size = max(inside)
    nodes = max((nodes for nodes, devices in found if devices == size), default=1)
    used, notes = [found[1, size]], []
    network = None
    if nodes > 1:
        network = _speed(Json.read(found[nodes, size]).at("pp_size_2"))
        used.append(found[nodes, size])
        notes.append(f"link between nodes from pp_size_2, with {size} devices at each end sending at once")
    if link == "p2p":
        own = _speed(Json.read(found[1, size]).at("pp_size_2"))
    else:
        used.append(root / RINGS.format(1, size))
        own = _speed(Json.read(used[-1]).at(f"allreduce_size_{size}_consec_1"))
    overlap = root / "overlap_coefficient.json"
    if overlap.is_file():
        slowdown = Json.read(overlap).at("overlap_coe").number(1.0)
        notes.append(f"computing beside communication was measured to take {slowdown:.4g} x as long; not used")
    return skeleton(
        name=f"{nodes} x {size} {device}",
        device=device,
        memory_gb=memory_gb,
        sizes=(size,) * nodes,
        link=own,
        network=network,
        driven_by=size,
        notes=(f"Galvatron bandwidths ({link} inside a node), GB/s of 10^9 bytes: {fingerprints(used)}", *notes),
    )


def _speed(entry: Json) -> Link:
    speed = entry.number() * GIGABYTE
    try:
        return Link(bytes_per_s=speed)
    except ValueError:
        raise entry.wrong("a bandwidth in GB/s") from None
