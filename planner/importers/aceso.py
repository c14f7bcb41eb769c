"""Import the profiles of Aceso (github.com/microsoft/SuperScaler, EuroSys 2024): operators of GPT and T5, and links.

A directory holds one CSV file per model, micro-batch size, tp degree and sharding, `gpt_1_3B_mbs2_tp4_algo0.csv`, one
row per operator: microseconds forward and backward, MB (2^20 bytes) of input, output, weights and activations, and MB
that the allocator reserved on top while it ran. What the figures mean, and what we make of it:

- One transformer layer is the run of `enc-` rows from the first layernorm to the last dropout (13 of them; 21 `dec-`
  rows in the decoder of T5). The rows before, between and behind are embedding, middle and head. The number of layers
  is not in the files: it is that of the published configurations, or an argument.
- Each operator was timed with all its tp ranks, and the all-reduce of a row-parallel one (of a column-parallel one
  backward) is part of it: `dense` takes longer at tp 4 than at tp 1. So tp communication is inside.
- `algo0` shards like Megatron-LM, `algo1` the other way round; then the gathers between operators are not in the times.
- The layer's activations are the sum over its rows, the score, softmax and dropout of the attention as the authors
  count them: softmax and dropout share memory, so 0 for the one and 1.5 times the other. Temporary memory is the
  largest reserved figure of a row.
- Weights are fp16 and without biases. A row of 10,000,000 stands for one that failed; the file is then left out.

`aceso_format/layer_time/DEVICE.csv`, as Sailor writes it, has the seconds of one layer per micro-batch size, tp and
algo, and nothing else; sizes are then arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planner.cluster import Cluster, Link
from planner.importers.layers import MEGABYTE, NO_UPDATE, Layer, Row, model_profile
from planner.importers.links import GIGABYTE, message_link, ring_link, ring_speeds, skeleton
from planner.importers.reading import MOST_DEVICES, MOST_LAYERS, Line, counted, fingerprints, lines, needed, table
from planner.profile import Conditions, ModelProfile

FILES = re.compile(r"(?P<model>.+)_mbs(?P<micro_batch>[1-9]\d*)_tp(?P<tp>[1-9]\d*)_algo(?P<algo>[01])\.csv")
LINKS = re.compile(r"prim_(?P<model>.+)_all_reduce_(?P<devices>[1-9]\d*)gpus\.csv")
OPERATOR = "op_name"
COLUMNS = (
    "forward-compute",
    "backward-compute",
    "output_size",
    "weights",
    "activations",
    "fwd_reserved",
    "bwd_reserved",
)
LAYER_COLUMNS = ("mbs", "tp", "algo", "fwd", "bwd")
BYTES = 2  # fp16
FAILED_US, FAILED_MS = 1e7, 1e6
SHARED = {"softmax": 0.0, "dropout": 1.5}  # of the attention: share of `activations` that counts

#: Layers (of the encoder and of the decoder, where there is one), tokens, heads, as published with the profiles.
PUBLISHED = {
    "gpt_350M": (24, 2048, 16),
    "gpt_1_3B": (24, 2048, 32),
    "gpt_2_6B": (32, 2048, 32),
    "gpt_6_7B": (32, 2048, 32),
    "gpt_13B": (40, 2048, 40),
    "t5_770M": (24, 2048, 16),
    "t5_3B": (24, 2048, 32),
    "t5_6B": (24, 2048, 64),
    "t5_11B": (24, 2048, 128),
}


def profiles(
    path: str | Path,
    *,
    device: str | None = None,
    num_layers: int | None = None,
    algo: int = 0,
    parameters: int | None = None,
    output_bytes: int | None = None,
    activation_bytes: int | None = None,
) -> tuple[ModelProfile, ...]:
    """Every model of the directory as a profile.

    Parameters
    ----------
    device
        Name of the device type; the files do not name it.
    num_layers
        Transformer layers (of the encoder, and as many of the decoder), for models that are not published ones.
    algo
        Sharding whose files are read, 0 or 1.
    parameters
        Parameters of a layer, for files of layer times only.
    output_bytes
        Bytes per sample that a layer hands on, for files of layer times only.
    activation_bytes
        Bytes per sample that a layer keeps at tp 1, for files of layer times only.

    Raises
    ------
    ValueError
        If no file is found, or one is damaged or of another model; names the file, the line and the value.
    """
    root = Path(path)
    files = [root] if root.is_file() else sorted(root.glob("*.csv"))
    if algo not in (0, 1):
        raise ValueError(f"algo: {algo!r} is not 0 or 1")
    counted("num_layers", num_layers, MOST_LAYERS)
    layer_files = [file for file in files if lines(file)[0].text.split(",")[0].strip() == LAYER_COLUMNS[0]]
    if layer_files:
        sizes = {"parameters": parameters, "output_bytes": output_bytes, "activation_bytes": activation_bytes}
        return (_of_layer_times(layer_files, num_layers, algo, sizes),)

    found: dict[str, list[_File]] = {}
    for file in files:
        match = FILES.fullmatch(file.name)
        if match and int(match["algo"]) == algo:
            each = _File(path=file, tp=int(match["tp"]), micro_batch=int(match["micro_batch"]), groups=_groups(file))
            found.setdefault(match["model"], []).append(each)
    if not found:
        raise ValueError(f"{root}: holds no MODEL_mbsX_tpY_algo{algo}.csv")
    for key, value in (
        ("parameters", parameters),
        ("output_bytes", output_bytes),
        ("activation_bytes", activation_bytes),
    ):
        if value is not None:
            raise ValueError(f"{key}: {value} given, but the files of {root} tell it, they are not of layer times only")
    needed("device", device, "the files do not name the device", "V100-32")
    assert device is not None
    return tuple(_profile(model, found[model], device, num_layers, algo) for model in sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    name: str
    seconds: tuple[float, float]  # forward, backward
    output_bytes: int
    weight_bytes: int
    activation_bytes: int
    reserved_bytes: int
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file: a tp degree and a micro-batch size, its operators by the part of the model they belong to."""

    path: Path
    tp: int
    micro_batch: int
    groups: tuple[tuple[str, tuple[_Operator, ...]], ...]  # embedding, encoder, ...

    @property
    def failed(self) -> bool:
        return any(operator.failed for _, operators in self.groups for operator in operators)

    def parameters(self, group: int) -> int:
        return sum(operator.weight_bytes for operator in self.groups[group][1]) // BYTES

    def row(self, group: int, device: str) -> Row:
        operators = self.groups[group][1]
        return Row(
            where=self.path,
            device_type=device,
            tp=self.tp,
            micro_batch=self.micro_batch,
            forward_s=sum(operator.seconds[0] for operator in operators),
            backward_s=sum(operator.seconds[1] for operator in operators),
            activation_bytes=sum(operator.activation_bytes for operator in operators),
            workspace_bytes=max(operator.reserved_bytes for operator in operators),
        )


def _groups(file: Path) -> tuple[tuple[str, tuple[_Operator, ...]], ...]:
    """The operators of a file in runs: those before the first layer, a layer, those between, ..."""
    rows = table(file, (OPERATOR, *COLUMNS))
    groups: list[tuple[str, list[_Operator]]] = []
    for row in rows:
        part = _part(row[OPERATOR].text)
        if not groups or groups[-1][0] != part:
            groups.append((part, []))
        groups[-1][1].append(_operator(row))
    parts = [part for part, _ in groups]
    if parts not in (["ends", "enc", "ends"], ["ends", "enc", "ends", "dec", "ends"]):
        raise ValueError(
            f"{file}: the rows are {' > '.join(parts)}, expected ends > enc > ends, or ends > enc > ends > dec > ends:"
            " the operators of one layer with those before and behind it"
        )
    names = ["embedding", "block", "head"] if len(parts) == 3 else ["embedding", "encoder", "middle", "decoder", "head"]
    return tuple((name, tuple(operators)) for name, (_, operators) in zip(names, groups))


def _part(operator: str) -> str:
    prefix = operator.partition("-")[0]
    return prefix if prefix in ("enc", "dec") and "final" not in operator else "ends"


def _operator(row: dict[str, Line]) -> _Operator:
    name = row[OPERATOR].text
    forward, backward, output, weights, kept, forward_reserved, backward_reserved = (row[c].value() for c in COLUMNS)
    step = name.removeprefix("enc-attention-").removeprefix("dec-attention-").partition("-")[0]
    share = SHARED.get(step, 1.0) if "-attention-" in name and "-post-" not in name else 1.0
    return _Operator(
        name=name,
        seconds=(forward / 1e6, backward / 1e6),
        output_bytes=round(output * MEGABYTE),
        weight_bytes=round(weights * MEGABYTE),
        activation_bytes=round(share * kept * MEGABYTE),
        reserved_bytes=round(max(forward_reserved, backward_reserved) * MEGABYTE),
        failed=max(forward, backward, forward_reserved) >= FAILED_US,
    )


def _profile(model: str, files: list[_File], device: str, num_layers: int | None, algo: int) -> ModelProfile:
    sound = [file for file in files if not file.failed]
    if not sound:
        raise ValueError(f"{files[0].path}: an operator failed here and in every other file of {model}")
    first = min(sound, key=lambda file: (file.tp, file.micro_batch))
    _check_one_model(files, first)
    published = PUBLISHED.get(model)
    if num_layers is None and published is None:
        needed("num_layers", None, f"{model} is not among {', '.join(PUBLISHED)}", "24")
    count = num_layers if num_layers is not None or published is None else published[0]
    assert count is not None
    ordered = sorted(sound, key=lambda file: (file.tp, file.micro_batch))
    groups = [_layer(ordered, first, group, device) for group in range(len(first.groups))]
    layers = groups[:1] + groups[1:2] * count + groups[2:3] + groups[3:4] * count + groups[4:]

    warnings = [NO_UPDATE]
    if first.tp > 1:
        warnings.append(f"tp 1 was not measured: layers taken as {first.tp} x their share at tp {first.tp}")
    if algo:
        warnings.append("sharding algo1: the gathers between operators are not in the times")
    if len(sound) < len(files):
        warnings.append("an operator failed in " + ", ".join(file.path.name for file in files if file.failed))
    return model_profile(
        files[0].path.parent,
        model,
        layers,
        conditions=Conditions(
            dtype="fp16",
            sequence_length=published[1] if published else None,
            tp_communication="inside",
            timer="wall clock around synchronised repetitions of each operator",
            source=f"Aceso format: {fingerprints([file.path for file in files])}",
            notes=(
                f"a layer is the sum of its operators ({', '.join(_sizes(first))}), MB of 2^20 bytes",
                f"{count} layers" + (" of the published configuration" if num_layers is None else " by argument"),
                "activations as the authors count them: attention softmax 0, attention dropout 1.5 x its figure",
                "workspace is the largest reserved memory of an operator; logits are inside the head's activations",
                "parameters are fp16 weights / 2, biases not counted",
            ),
        ),
        num_heads=published[2] if published else None,
        warnings=warnings,
    )


def _sizes(file: _File) -> Iterator[str]:
    for name, operators in file.groups:
        yield f"{name} {len(operators)}"


def _check_one_model(files: Sequence[_File], first: _File) -> None:
    """Every file lists the same operators."""
    expected = [operator.name for _, operators in first.groups for operator in operators]
    for file in files:
        names = [operator.name for _, operators in file.groups for operator in operators]
        if names != expected:
            odd = next((name for name in (*expected, *names) if (name in expected) != (name in names)), "their order")
            raise ValueError(
                f"{file.path}: other operators than in {first.path} ({odd}), expected {len(expected)} rows"
            )


def _layer(files: Sequence[_File], first: _File, group: int, device: str) -> Layer:
    name, operators = first.groups[group]
    whole = first.tp * first.parameters(group)
    shards = {file.tp: file.parameters(group) for file in files if file.tp > 1}
    tied = name == "head" and first.groups[1][0] == "block"  # GPT: the head's weights are the embedding's
    return Layer(
        name=name,
        parameters=whole,
        shard_parameters=tuple((tp, share) for tp, share in sorted(shards.items()) if share != -(-whole // tp)),
        output_bytes=-(-operators[-1].output_bytes // first.micro_batch),
        tied_to="embedding" if tied else None,
        tied_parameters=whole if tied else 0,
        rows=tuple(file.row(group, device) for file in files),
    )


# Layer times ---------------------------------------------------------------------------------------------------------


def _of_layer_times(
    files: Sequence[Path], num_layers: int | None, algo: int, sizes: dict[str, int | None]
) -> ModelProfile:
    because = "the files hold the times of one layer and nothing else"
    for (key, value), example in zip(
        {**sizes, "num_layers": num_layers}.items(), ("12595200", "8388608", "200000000", "24")
    ):
        needed(key, value, because, example)
        counted(key, value)
    parameters, output, kept, count = (int(value) for value in (*sizes.values(), num_layers) if value is not None)
    rows = []
    for file in files:
        for entry in table(file, LAYER_COLUMNS):
            if entry["algo"].value() == algo:
                tp, micro_batch = (int(entry[key].value(1)) for key in ("tp", "mbs"))
                row = Row(
                    where=entry["fwd"].where,
                    device_type=file.stem,
                    tp=tp,
                    micro_batch=micro_batch,
                    forward_s=entry["fwd"].value(),
                    backward_s=entry["bwd"].value(),
                    activation_bytes=-(-kept * micro_batch // tp),
                )
                rows.append(row)
    if not rows:
        raise ValueError(f"{files[0]}: no row with algo {algo}")
    layer = Layer(name="block", parameters=parameters, output_bytes=output, rows=tuple(rows))
    return model_profile(
        files[0],
        "layer",
        [layer] * count,
        conditions=Conditions(
            tp_communication="inside",
            source=f"Aceso layer times: {fingerprints(files)}",
            notes=(f"algo {algo}; {count} layers, their parameters, output and activations by argument",),
        ),
        warnings=(
            NO_UPDATE,
            "embedding and head were not profiled: the model is its transformer layers alone",
            "activations were not measured: taken as given for one sample, x micro-batch / tp",
        ),
    )


# Links ---------------------------------------------------------------------------------------------------------------


def cluster(
    path: str | Path,
    *,
    device: str | None = None,
    memory_gb: float | None = None,
    link: Literal["p2p", "all_reduce"] = "p2p",
    group: int = 8,
) -> Cluster:
    """Two nodes with the links of `p2p_intra_node.csv` and `p2p_inter_node.csv`: sizes in MB, GB/s below.

    Parameters
    ----------
    device
        Name of the device type.
    memory_gb
        Memory of one device, in units of 2^30 bytes.
    link
        Link inside a node: measured between two devices, or what the all-reduces of a whole node come to.
    group
        Devices in a node.

    Raises
    ------
    ValueError
        If a file is missing or damaged; names the file, the line and the value.
    """
    if link not in ("p2p", "all_reduce"):
        raise ValueError(f"link: {link!r} is not one of: p2p, all_reduce")
    counted("group", group, MOST_DEVICES)
    root = Path(path)
    rings, files = _rings(root)
    if link == "all_reduce" and group not in rings:
        raise ValueError(f"group: an all-reduce of {group} devices was not measured, but {', '.join(map(str, rings))}")
    pairs = [root / "p2p_intra_node.csv", root / "p2p_inter_node.csv"]
    notes = [
        f"Aceso links: {fingerprints([*pairs, *files])}",
        "link inside a node from "
        + ("messages between two devices" if link == "p2p" else f"the all-reduce of {group} devices")
        + ", between nodes from messages between two devices; MB of 2^20, GB/s of 10^9 bytes",
    ]
    return skeleton(
        name=f"2 x {group} {device}",
        device=device,
        memory_gb=memory_gb,
        sizes=(group, group),
        link=_pair_link(pairs[0]) if link == "p2p" else rings[group],
        network=_pair_link(pairs[1]),
        notes=(*notes, *([ring_speeds("all-reduce", rings)] if rings else [])),
    )


def _pair_link(file: Path) -> Link:
    rows = lines(file)
    if len(rows) != 2:
        raise ValueError(f"{file}: {len(rows)} lines, expected 2: sizes in MB, and the GB/s of each")
    sizes, speeds = (row.text.split(",") for row in rows)
    if len(speeds) != len(sizes):
        raise ValueError(f"{rows[1].where}: {len(speeds)} values, expected {len(sizes)}")
    points = [
        (
            rows[0].part(size.strip(), "MB").value(1e-6) * MEGABYTE,
            rows[1].part(speed.strip(), "GB/s").value(1e-6) * GIGABYTE,
        )
        for size, speed in zip(sizes, speeds)
    ]
    return message_link(file, points)


def _rings(root: Path) -> tuple[dict[int, Link], list[Path]]:
    """Links by number of devices from the all-reduces of all models; a size measured for several counts as its mean."""
    points: dict[int, dict[float, list[float]]] = {}
    files = []
    for file in sorted(root.glob("prim_*_all_reduce_*gpus.csv")):
        match = LINKS.fullmatch(file.name)
        if not match or int(match["devices"]) < 2:
            continue
        files.append(file)
        for row in table(file, ("data_size(MB)", "time(ms)")):
            milliseconds = row["time(ms)"].value()
            nbytes = row["data_size(MB)"].value() * MEGABYTE
            if nbytes and 0 < milliseconds < FAILED_MS:
                points.setdefault(int(match["devices"]), {}).setdefault(nbytes, []).append(milliseconds / 1e3)
    means = {n: [(b, sum(s) / len(s)) for b, s in sizes.items()] for n, sizes in sorted(points.items())}
    return {n: ring_link(f"{root}: all-reduces of {n} devices", rows, n) for n, rows in means.items()}, files
