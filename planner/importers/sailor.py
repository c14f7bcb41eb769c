"""Import the measurements of Sailor (github.com/eth-easl/sailor, SOSP 2025): profiles, and clusters of its machines.

A directory holds `profiles_tmp.json` (seconds by model, device type, micro-batch, tp, layer), `llm_info.json` (sizes
by model, tp, layer), and for clusters `configs/` and `network/`. What the figures mean, and what we make of it:

- Values are 4-byte floats, Adam. Activations are given for one sample and grow with the micro-batch.
- Sizes with tp > 1 are those of one rank. tp communication is inside the measured times.
- The update time of a whole stage is repeated on each of its layers.
- `act_mem_floats` of the head holds the logits; they become `logits_bytes` of their own.
- Bandwidth in GB/s (1e9) is a quadratic in log2 of the message in MB (1e6), with a cap in bytes/s. A type that the
  fits of the zone do not hold has those of nodes of its own type (`network_coeffs_all_homo.json`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.importers.layers import Layer, Row, model_profile, vocabulary_bytes
from planner.importers.reading import Json, fingerprint, needed
from planner.profile import Conditions, ModelProfile

FLOAT_BYTES = 4
TIMES, SIZES = "profiles_tmp.json", "llm_info.json"
ALONE = Path("network/network_coeffs_all_homo.json")
NETWORK, INSIDE = Path("network/multizone_bandwidths_het.json"), Path("network/intra_node_bandwidths.json")
MACHINES = Path("configs/basic_cluster_config.json")


def profiles(directory: str | Path) -> tuple[ModelProfile, ...]:
    """Every model of the directory as a profile: all device types, tp degrees and micro-batch sizes measured.

    Raises
    ------
    ValueError
        If a file is missing or damaged; names the file, the key and the value.
    """
    root = Path(directory)
    times, sizes = Json.read(root / TIMES), Json.read(root / SIZES)
    source = f"Sailor format, {root.resolve().name}: {fingerprint(root / TIMES)}, {fingerprint(root / SIZES)}"
    return tuple(
        _profile(model, entry, sizes.at(model), _training_config(root, model), source) for model, entry in times.items()
    )


def _training_config(root: Path, model: str) -> Json | None:
    for file in sorted((root / "configs").glob("training_config_*.json")):
        config = Json.read(file)
        if config.at("model").text() == model:
            return config
    return None


def _profile(model: str, times: Json, sizes: Json, config: Json | None, source: str) -> ModelProfile:
    layers, unsized = _layers(times, sizes)
    degrees = sorted(sizes.by_count())
    hidden_bytes = layers[-2].output_bytes if len(layers) > 1 else layers[-1].output_bytes
    logits_bytes = vocabulary_bytes(layers[-1].output_bytes, hidden_bytes, degrees)
    sequence = config.at("sequence_length").count(1) if config else None
    if config and (expected := config.at("num_all_layers")).count(1) != len(layers):
        raise ValueError(f"{expected.where}: {expected.value}, but {len(layers)} layers in {times.where}")

    notes = [
        "4-byte floats; activations given for one sample, taken as proportional to the micro-batch size",
        "update_s is the figure of a whole stage, repeated on every layer",
        "precision (TF32 or not) differs by model and device type and is not recorded: compare implied rates first",
    ]
    if sequence:
        notes.append(_implied_rates(layers, sequence))
    if not config:
        notes.append("no training config for this model: sequence length and attention heads unknown")
    if not logits_bytes:
        notes.append("the head hands on no more than a hidden state: its logits, if any, are inside activation_bytes")
    warnings = [
        f"{device_type}: no memory figures for tp {tp}, times left out" for device_type, tp in sorted(unsized)
    ] + [
        f"{device_type}: update_s is 0 everywhere, the update was not measured"
        for device_type in dict.fromkeys(row.device_type for row in layers[0].rows)
        if not any(row.update_s for layer in layers for row in layer.rows if row.device_type == device_type)
    ]
    conditions = Conditions(
        dtype="fp32",
        sequence_length=sequence,
        tp_communication="inside",
        update_per="stage",
        timer="CUDA events in module hooks",
        source=source,
        notes=tuple(notes),
    )
    return model_profile(
        times.where,
        model,
        layers,
        conditions=conditions,
        logits_bytes=logits_bytes,
        num_heads=config.at("heads").count(1) if config else None,
        warnings=warnings,
    )


def _layers(times: Json, sizes: Json) -> tuple[tuple[Layer, ...], set[tuple[str, int]]]:
    """The layers in order, and the (device type, tp) pairs that have times but no sizes."""
    by_tp = {tp: _in_order(entry) for tp, entry in sizes.by_count().items()}
    if 1 not in by_tp:
        raise ValueError(f"{sizes.where}: key '1' (sizes without tp) is missing")
    num_layers = len(by_tp[1])
    for tp, entries in by_tp.items():
        if len(entries) != num_layers:
            raise ValueError(f"{sizes.where} > {tp}: {len(entries)} layers, but {num_layers} at tp 1")

    rows: list[list[Row]] = [[] for _ in range(num_layers)]
    unsized: set[tuple[str, int]] = set()
    for device_type, by_batch in times.items():
        for micro_batch, by_degree in by_batch.by_count().items():
            for tp, entry in by_degree.by_count().items():
                measured = _in_order(entry)
                if len(measured) != num_layers:
                    raise ValueError(f"{entry.where}: {len(measured)} layers, but {num_layers} in {sizes.file}")
                if tp not in by_tp:
                    unsized.add((device_type, tp))
                    continue
                for layer, (row, size) in enumerate(zip(measured, by_tp[tp])):
                    forward, backward, update = (value.number() for value in row.list(3))
                    rows[layer].append(
                        Row(
                            where=entry.where,
                            device_type=device_type,
                            tp=tp,
                            micro_batch=micro_batch,
                            forward_s=forward,
                            backward_s=backward,
                            update_s=update,
                            activation_bytes=size.at("act_mem_floats").count() * FLOAT_BYTES * micro_batch,
                        )
                    )
    layers = tuple(
        Layer(
            parameters=by_tp[1][layer].at("params_floats").count(),
            shard_parameters=tuple((tp, by_tp[tp][layer].at("params_floats").count()) for tp in by_tp if tp > 1),
            output_bytes=by_tp[1][layer].at("act_output_floats").count() * FLOAT_BYTES,
            rows=tuple(sorted(rows[layer], key=lambda r: (r.device_type, r.tp, r.micro_batch))),
        )
        for layer in range(num_layers)
    )
    return layers, unsized


def _in_order(entry: Json) -> tuple[Json, ...]:
    """The entries of layers 0, 1, ... ; the keys are strings in any order."""
    layers = entry.by_count()
    if list(layers) != list(range(len(layers))) or not layers:
        missing = next((i for i in range(len(layers)) if i not in layers), 0)
        raise ValueError(f"{entry.where}: layer {missing} is missing")
    return tuple(layers.values())


def _implied_rates(layers: Sequence[Layer], sequence: int) -> str:
    """FLOP/s that the most frequent layer works out at on each device type, for a reader to compare precisions."""
    block = max(dict.fromkeys(layers), key=layers.count)
    rates = []
    for device_type in dict.fromkeys(row.device_type for row in block.rows):
        row = next(row for row in block.rows if row.device_type == device_type)
        flops = 6 * block.parameters * sequence * row.micro_batch / row.tp
        rates.append(f"{device_type} {flops / (row.forward_s + row.backward_s) / 1e12:.1f}")
    return "TFLOP/s of a block (6 x parameters x tokens, attention not counted): " + ", ".join(rates)


def cluster(
    directory: str | Path,
    devices: Mapping[str, int | Sequence[int]],
    *,
    zone: str | None = None,
    intra: Literal["measured", "network"] = "measured",
    name: str | None = None,
) -> Cluster:
    """A cluster of the measured machines, with the links fitted between them.

    Two nodes are linked by the fit for their device types, one for each number of devices that drive it at both ends.
    Where the two directions differ, the slower is taken. Inside a node, the slower of the fits for two and for all
    devices; where two devices alone are more than twice as fast, they are an NVLink pair.

    Parameters
    ----------
    devices
        Per device type either a number of devices, filled into nodes of the size in the config (the last node may hold
        fewer), or the sizes of the nodes: `{"A100-40": 8, "V100-16": (3, 3)}`.
    zone
        Zone whose fits are taken; by default the one named in the config.
    intra
        Link inside a node: `measured`, the fits between devices of one node, or `network`, none: devices of a node
        reach each other as if over the network (a cluster on which no hand-over is faster than that).

    Raises
    ------
    ValueError
        If a type or a pair of types is not in the files.
    """
    if intra not in ("measured", "network"):
        raise ValueError(f"intra: {intra!r} is not one of: measured, network")
    root = Path(directory)
    machines = Json.read(root / MACHINES)
    zone = machines.at("zone").text() if zone is None else zone
    network = Json.read(root / NETWORK).at(zone)
    inside = Json.read(root / INSIDE)

    sizes = {t: _node_sizes(t, count, machines.at(t).at("gpus_per_node").count(1)) for t, count in devices.items()}
    between: dict[tuple[str, str], dict[int, Link]] = {}
    types = list(devices)
    for index, first in enumerate(types):
        for second in types[index:]:
            if first != second or len(sizes[first]) > 1 or (intra == "network" and max(sizes[first]) > 1):
                most = min(max(sizes[first]), max(sizes[second]))
                if network.has(first) or first != second:
                    between[first, second] = _between(network, zone, first, second, most)
                else:
                    between[first, first] = _alone(Json.read(root / ALONE), first, most)

    nodes: list[Node] = []
    for t in types:
        for index, size in enumerate(sizes[t]):
            link, pair = _inside(inside.at(t), size) if intra == "measured" else (None, None)
            nodes.append(
                Node(
                    name=f"{t.lower()}-{index}",
                    devices=(t,) * size,
                    link=link if size > 1 else None,
                    groups=tuple((i, i + 1) for i in range(0, size - 1, 2)) if pair else (),
                    group_link=pair,
                )
            )
    return Cluster(
        name=name or " + ".join(f"{sum(sizes[t])} {t}" for t in types),
        device_types=tuple(DeviceType(name=t, memory_bytes=machines.at(t).at("mem_per_gpu").count(1)) for t in types),
        nodes=tuple(nodes),
        links=tuple(
            NetworkLink(between=pair, devices=count, link=link)
            for pair, fits in between.items()
            for count, link in fits.items()
        ),
        notes=_network_notes(root, zone, inside, between),
    )


def _node_sizes(device_type: str, devices: int | Sequence[int], full: int) -> tuple[int, ...]:
    if isinstance(devices, int):
        sizes = (full,) * (devices // full) + ((devices % full,) if devices % full else ())
    else:
        sizes = tuple(devices)
    if not sizes or any(not isinstance(size, int) or not 1 <= size <= full for size in sizes):
        raise ValueError(f"devices[{device_type!r}]: {devices!r} is not a count, or node sizes of 1 to {full}")
    return sizes


def _link(entry: Json) -> Link:
    """A `[[a, b, c], cap]` entry."""
    fit, cap = entry.list(2)
    a, b, c = (value.number(minimum=-float("inf")) for value in fit.list(3))
    return Link(fit=(a, b, c), cap_bytes_per_s=cap.number(minimum=1.0))


def _cap(link: Link) -> float:
    assert link.cap_bytes_per_s is not None
    return link.cap_bytes_per_s


def _between(network: Json, zone: str, first: str, second: str, most: int) -> dict[int, Link]:
    """Links between nodes of two types by number of devices at each end, the slower of the two directions."""
    fits: dict[int, list[Link]] = {}
    for here, there in dict.fromkeys(((first, second), (second, first))):
        for count, entry in network.at(here).by_count().items():
            targets = dict(entry.at(zone).items())
            if there in targets and count in (same := targets[there].by_count()):
                fits.setdefault(count, []).append(_link(same[count]))
    if not fits:
        raise ValueError(f"{network.where}: no fit between {first} and {second}")
    smallest = min(fits)
    return {count: min(links, key=_cap) for count, links in sorted(fits.items()) if count <= max(most, smallest)}


def _alone(homogeneous: Json, device_type: str, most: int) -> dict[int, Link]:
    """Links between nodes of one type by number of devices at each end."""
    fits = {count: _link(entry) for count, entry in homogeneous.at("inter").at(device_type).by_count().items()}
    if not fits:
        raise ValueError(f"{homogeneous.where}: no fit between nodes of {device_type}")
    return {count: link for count, link in fits.items() if count <= max(most, min(fits))}


def _inside(entry: Json, size: int) -> tuple[Link, Link | None]:
    """The link inside a node of `size` devices, and that of an NVLink pair if there are pairs."""
    fits = {count: _link(fit) for count, fit in entry.by_count().items()}
    if not fits:
        raise ValueError(f"{entry.where}: no fit")
    usable = [link for count, link in fits.items() if count <= size] or [fits[min(fits)]]
    slowest = min(usable, key=_cap)
    pair = fits.get(2)
    return slowest, pair if pair and size > 2 and _cap(pair) > 2 * _cap(slowest) else None


def _network_notes(
    root: Path, zone: str, inside: Json, between: Mapping[tuple[str, str], Mapping[int, Link]]
) -> tuple[str, ...]:
    notes = [f"Sailor network fits, zone {zone}: {fingerprint(root / NETWORK)}, {fingerprint(root / INSIDE)}"]
    tables = {t: entry.value for t, entry in inside.items()}
    notes += [
        f"figures inside a node of {t} and of {other} are equal to the last digit: one is probably a copy"
        for t in dict.fromkeys(t for pair in between for t in pair)
        for other in tables
        if other != t and tables[other] == tables[t]
    ]
    for (first, second), fits in between.items():
        slowest, fastest = min(fits.values(), key=_cap), max(fits.values(), key=_cap)
        if _cap(fastest) > 10 * _cap(slowest):
            speeds = ", ".join(f"{count}: {_cap(link) / 1e9:.2f}" for count, link in fits.items())
            notes.append(f"{first} - {second}: fits by number of devices contradict each other (GB/s {speeds})")
    return tuple(notes)


def network(
    path: str | Path,
    *,
    devices: str | None = None,
    zone: str | None = None,
    intra: Literal["measured", "network"] = "measured",
) -> Cluster:
    """`cluster` with the devices in words.

    Parameters
    ----------
    devices
        How many of each type: "A100-40=8,V100-16=4".
    zone
        Zone whose fits are taken; by default the one named in the config.
    intra
        Link inside a node: measured, or the network's.
    """
    needed("devices", devices, "the files hold fits, not a cluster", "A100-40=8,V100-16=4")
    assert devices is not None
    counts = {}
    for part in devices.split(","):
        name, equals, count = part.strip().rpartition("=")
        if not equals or not count.strip().isdecimal():
            raise ValueError(f"devices: {part.strip()!r} is not TYPE=COUNT, such as A100-40=8")
        counts[name.strip()] = int(count)
    return cluster(path, counts, zone=zone, intra=intra)
