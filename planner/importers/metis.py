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
memory but 34 of times, and the one left out is the head. `head_blocks` fills in its time.

The cluster of Metis is a `clusterfile.json` (per host name: instance type, bandwidths inside and to other nodes,
memory in GB of 2^30 bytes) beside a `hostfile` (lines `host slots=4`). Bandwidths are GB/s in Metis' own file and
bytes/s in others'; the size tells which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.importers.layers import MEGABYTE, Layer, Row, model_profile, vocabulary_bytes
from planner.importers.links import GIGABYTE
from planner.importers.reading import Json, counted, fingerprints, lines, positive, short
from planner.profile import Conditions, ModelProfile

FOLDERS = re.compile(r"mbs(?P<micro_batch>[1-9]\d*)_tmp(?P<tp>[1-9]\d*)\.json")
MACHINES, HOSTS = "clusterfile.json", "hostfile"
HOST = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[1-9]\d*)")
LARGEST_GB_S = 1e5  # a larger bandwidth is in bytes/s
FLAT = re.compile(r"DeviceType\.(?P<device_type>.+)_tp(?P<tp>[1-9]\d*)_bs(?P<micro_batch>[1-9]\d*)\.json")


def profiles(
    directory: str | Path,
    *,
    backward_factor: float = 2.0,
    state_factor: float = 5.0,
    bytes_per_parameter: float = 4.0,
    output_bytes: int | None = None,
    head_blocks: float | None = None,
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
    head_blocks
        Time of the head, in times of the second layer, for files whose times lack it.

    Raises
    ------
    ValueError
        If no file is found, or one is damaged or of another model; names the file, the key and the value.
    """
    positive("backward_factor", backward_factor)
    positive("bytes_per_parameter", bytes_per_parameter)
    if state_factor:
        positive("state_factor", state_factor)
    if head_blocks is not None:
        positive("head_blocks", head_blocks)
    counted("output_bytes", output_bytes)
    root = Path(directory)
    found = sorted(
        _files(root, output_bytes, head_blocks), key=lambda file: (file.device_type, file.tp, file.micro_batch)
    )
    if not found:
        raise ValueError(f"{root}: holds neither GPU/mbsX_tmpY.json nor DeviceType.GPU_tpY_bsX.json")
    _check_one_model(found)

    profile = model_profile(
        root,
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
        warnings=_warnings(found, backward_factor, state_factor, head_blocks),
    )
    return (profile,)


def _layers(found: list[_File], backward_factor: float, state_factor: float, bytes_per_parameter: float) -> list[Layer]:
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


def _warnings(found: list[_File], backward_factor: float, state_factor: float, head_blocks: float | None) -> list[str]:
    first = _of_least_tp(found)
    warnings = [f"forward and backward were not measured apart: backward taken as {backward_factor:g} x forward"]
    if any(file.headless for file in found):
        warnings.append(f"the head was not timed: taken as {head_blocks:g} x the second layer")
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
    headless: bool  # the time of the head was filled in

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
                where=self.content.where,
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


def _files(root: Path, output_bytes: int | None, head_blocks: float | None) -> Iterator[_File]:
    fill = output_bytes, head_blocks
    for path in sorted(root.glob("*/mbs*_tmp*.json")):
        if match := FOLDERS.fullmatch(path.name):
            yield _read(path, path.parent.name, int(match["tp"]), int(match["micro_batch"]), False, *fill)
    for path in sorted(root.glob("DeviceType.*.json")):
        if match := FLAT.fullmatch(path.name):
            yield _read(path, match["device_type"], int(match["tp"]), int(match["micro_batch"]), True, *fill)


def _read(
    path: Path,
    device_type: str,
    tp: int,
    micro_batch: int,
    whole: bool,
    output_bytes: int | None,
    head_blocks: float | None,
) -> _File:
    content = Json.read(path)
    model, times, memory = (content.at(key) for key in ("model", "execution_time", "execution_memory"))
    num_layers, parameters = model.at("num_layers").count(1), model.at("parameters")
    if output_bytes is None and not parameters.has("activation_parameters_bytes"):
        raise ValueError(f"{parameters.where}: key 'activation_parameters_bytes' is missing; give output_bytes instead")
    seconds = [entry.number() / 1e3 for entry in times.at("layer_compute_total_ms").list()]
    headless = head_blocks is not None and len(seconds) == num_layers == len(_sizes(parameters)) - 1
    if headless and head_blocks is not None and num_layers > 1:
        num_layers += 1
        seconds.append(head_blocks * seconds[1])
    elif len(seconds) != num_layers or (len(_sizes(parameters)) != num_layers):
        times.at("layer_compute_total_ms").list(num_layers)
        parameters.at("parameters_per_layer_bytes").list(num_layers)
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
        parameter_bytes=tuple(entry.count() for entry in _sizes(parameters)),
        output_bytes=outputs,
        seconds=tuple(seconds),
        memory_bytes=tuple(
            round(entry.number() * MEGABYTE) for entry in memory.at("layer_memory_total_mb").list(num_layers)
        ),
        update_s=times.at("optimizer_time_ms").number() / 1e3,
        headless=headless,
    )


def _sizes(parameters: Json) -> tuple[Json, ...]:
    return parameters.at("parameters_per_layer_bytes").list()


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


def cluster(directory: str | Path) -> Cluster:
    """The cluster of `clusterfile.json` and `hostfile`, one node per line of the latter.

    Between two nodes the slower of their bandwidths holds.

    Raises
    ------
    ValueError
        If a file is missing or damaged, or a host is not in the other; names the file, the line, the key.
    """
    root = Path(directory)
    machines = Json.read(root / MACHINES)
    hosts = []
    for line in lines(root / HOSTS):
        match = HOST.fullmatch(line.text.strip())
        if not match:
            raise line.wrong("a host and its slots, such as 10.0.0.1 slots=4")
        if not machines.has(match["host"]):
            raise ValueError(f"{line.where}: {match['host']!r} is not in {machines.file}")
        hosts.append((machines.at(match["host"]), int(match["slots"])))
    memory: dict[str, int] = {}
    between: dict[str, float] = {}
    for machine, _ in hosts:
        name = machine.at("instance_type").text()
        nbytes, speed = round(machine.at("memory").number() * 2**30), _bandwidth(machine.at("inter_bandwidth"))
        if memory.setdefault(name, nbytes) != nbytes:
            raise ValueError(f"{machine.at('memory').where}: {name} has {memory[name] / 2**30:g} GB elsewhere")
        between[name] = min(between.get(name, speed), speed)
    nodes = tuple(
        Node(
            name=f"{machine.keys[-1]}-{i}",
            devices=(machine.at("instance_type").text(),) * slots,
            link=Link(bytes_per_s=_bandwidth(machine.at("intra_bandwidth"))) if slots > 1 else None,
        )
        for i, (machine, slots) in enumerate(hosts)
    )
    types = list(between)
    return Cluster(
        name=f"{sum(slots for _, slots in hosts)} devices",
        device_types=tuple(DeviceType(name=name, memory_bytes=nbytes) for name, nbytes in memory.items()),
        nodes=nodes,
        links=tuple(
            NetworkLink(between=(a, b), link=Link(bytes_per_s=min(between[a], between[b])))
            for i, a in enumerate(types)
            for b in types[i:]
            if len(hosts) > 1
        ),
        notes=(
            f"Metis cluster: {fingerprints([root / MACHINES, root / HOSTS])}",
            "bandwidths below 100,000 taken as GB/s, others as bytes/s; memory in GB of 2^30 bytes",
        ),
    )


def _bandwidth(entry: Json) -> float:
    speed = entry.number() * (GIGABYTE if entry.number() < LARGEST_GB_S else 1.0)
    try:
        Link(bytes_per_s=speed)
    except ValueError:
        raise entry.wrong("a bandwidth in GB/s or bytes/s") from None
    return speed
