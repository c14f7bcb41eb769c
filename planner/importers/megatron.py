"""Import per-layer resource profiles of Megatron-LM (github.com/NVIDIA/Megatron-LM, pull request 5662, in review).

What is known of the format, from the code of that request (July 2026): at each log interval every rank builds a report

    {"source": "trace", "layers": {"0": {"is_moe": false, "fwd": {...}, "bwd": {...}}, ...}, "global_peak_bytes": ...}

with, for each phase, `time_ms` and the memory `peak`, `retained`, `transient`, `largest`, `comm` in bytes, each a
`{"mean": ..., "max": ...}` or null, and prints it as a table `[per-layer report]` in ms and MiB. The request writes no
file of its own. Read here are

    run.jsonl    one report per line, as the profiler returns it: of several intervals, and of several pipeline ranks
    run.log      a training log with the printed tables

A directory may hold several runs, `DEVICE_tp2_mbs4.jsonl`; for a single file these three are arguments. What we make
of it:

- Several reports of one layer: the mean of the mean times, the largest memory. Reports before `skip` are left out, for
  they may hold the first, slow, steps. Layers are numbered over all pipeline ranks and have to be complete.
- `retained` forward is what a layer keeps for the backward pass, `transient` its temporary memory. With activation
  recomputation `retained` is too high.
- The time of the backward pass is the interval between two layers, so that waiting for other stages is part of it.
- Parameters and the size of the hidden state are not in the report: arguments. Embedding and head are not profiled.

Anything else in a report is an error, so that a later form of the format does not pass for this one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.importers.layers import MEGABYTE, NO_UPDATE, Layer, Row, model_profile
from planner.importers.reading import Json, Line, counted, fingerprints, lines, needed
from planner.profile import Conditions, ModelProfile

RUNS = re.compile(r"(?P<device>.+)_tp(?P<tp>[1-9]\d*)_mbs(?P<micro_batch>[1-9]\d*)\.(jsonl|log)")
PHASES = ("fwd", "bwd")
MEMORY = ("peak", "retained", "transient", "largest", "comm")
REPORT = ("source", "layers", "global_peak_bytes", "global_reserved_peak_bytes", "reserved_overhead_bytes", "rank")
TITLE, FORWARD, BACKWARD = "[per-layer report]", "-- forward --", "-- backward --"
CELL = r"\s+(?P<{0}_mean>[\d.]+|n/a)/\s*(?P<{0}_max>[\d.]+|n/a)"
TABLE_ROW = re.compile(
    r"\s*(?P<layer>\d+)\s+(?P<kind>dense|MoE)"
    + "".join(CELL.format(n) for n in ("time", *MEMORY[:2]))
    + r"(?P<rest>.*)"
)
TRANSIENT = re.compile(CELL.format("transient") + r".*")


def profiles(
    path: str | Path,
    *,
    device: str | None = None,
    tp: int | None = None,
    micro_batch: int | None = None,
    parameters: int | None = None,
    moe_parameters: int | None = None,
    output_bytes: int | None = None,
    activation_bytes: int | None = None,
    sequence_length: int | None = None,
    dtype: str = "unknown",
    name: str | None = None,
    skip: int = 0,
) -> tuple[ModelProfile, ...]:
    """The transformer layers of a run, or of the runs of a directory, as a profile.

    Parameters
    ----------
    device
        Name of the device type; of a directory, file names tell it.
    tp
        Tensor-parallel degree of the run.
    micro_batch
        Samples of a micro-batch.
    parameters
        Parameters of a layer, over all tp ranks.
    moe_parameters
        Parameters of a mixture-of-experts layer; by default those of any.
    output_bytes
        Bytes per sample that a layer hands on (sequence length x hidden size x bytes of the dtype).
    activation_bytes
        Bytes per sample and rank that a layer keeps, for reports without memory (`timing-only`).
    sequence_length
        Tokens per sample.
    dtype
        Arithmetic of the run.
    name
        Name of the model; by default that of the file or directory.
    skip
        Reports left out at the start of every file.

    Raises
    ------
    ValueError
        If a file is missing or damaged; names the file, the line, the key and the value.
    """
    because = "the report does not hold it"
    needed("parameters", parameters, because, "202383360")
    needed("output_bytes", output_bytes, because, "16777216")
    for key, value in (
        ("tp", tp),
        ("micro_batch", micro_batch),
        ("parameters", parameters),
        ("moe_parameters", moe_parameters),
        ("output_bytes", output_bytes),
        ("sequence_length", sequence_length),
    ):
        counted(key, value)
    if skip < 0:
        raise ValueError(f"skip: {skip} is negative")
    assert parameters is not None
    assert output_bytes is not None
    root = Path(path)
    runs = list(_runs(root, device, tp, micro_batch, skip))
    numbers = sorted(runs[0].layers)
    for run in runs:
        if sorted(run.layers) != numbers:
            raise ValueError(f"{run.file}: {len(run.layers)} layers, but {len(numbers)} in {runs[0].file}")
        if any(run.layers[i].is_moe != runs[0].layers[i].is_moe for i in numbers):
            raise ValueError(f"{run.file}: other layers are MoE than in {runs[0].file}")
    layers = []
    for number in numbers:
        is_moe = runs[0].layers[number].is_moe
        own = moe_parameters if is_moe and moe_parameters is not None else parameters
        rows = tuple(run.row(number, activation_bytes) for run in runs)
        layers.append(Layer(name="moe" if is_moe else "block", parameters=own, output_bytes=output_bytes, rows=rows))
    warnings = [
        "backward is the interval between two layers: waiting for other stages is part of it",
        "embedding and head were not profiled: the model is its transformer layers alone",
        NO_UPDATE,
    ]
    if activation_bytes is not None:
        warnings.append(f"activations taken as {activation_bytes} bytes per sample and rank, not as measured")
    profile = model_profile(
        root,
        name or (root.stem if root.is_file() else root.resolve().name),
        layers,
        conditions=Conditions(
            dtype=dtype,
            sequence_length=sequence_length,
            tp_communication="inside",
            timer="CUDA events: module hooks forward, autograd markers backward",
            source=f"Megatron-LM per-layer report: {fingerprints([run.file for run in runs])}",
            notes=(
                "times are means, memory the largest of all reports; activations are `retained`, workspace `transient`",
                f"{parameters} parameters and {output_bytes} output bytes of a layer by argument",
            ),
        ),
        warnings=warnings,
    )
    return (profile,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A layer in one report: mean milliseconds, largest bytes."""

    is_moe: bool
    forward_ms: float
    backward_ms: float
    kept_bytes: float | None
    transient_bytes: float
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """A layer over all reports of a run."""

    is_moe: bool
    measured: tuple[_Measured, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    file: Path
    device: str
    tp: int
    micro_batch: int
    layers: dict[int, _Summary]

    def row(self, number: int, activation_bytes: int | None) -> Row:
        found = self.layers[number].measured
        if activation_bytes is not None:
            kept = float(activation_bytes * self.micro_batch)
        elif any(each.kept_bytes is None for each in found):
            where = next(each.where for each in found if each.kept_bytes is None)
            raise ValueError(f"{where}: no memory (timing-only report); give activation_bytes, per sample and rank")
        else:
            kept = max(each.kept_bytes or 0.0 for each in found)
        return Row(
            where=self.file,
            device_type=self.device,
            tp=self.tp,
            micro_batch=self.micro_batch,
            forward_s=sum(each.forward_ms for each in found) / len(found) / 1e3,
            backward_s=sum(each.backward_ms for each in found) / len(found) / 1e3,
            activation_bytes=round(kept),
            workspace_bytes=round(max(each.transient_bytes for each in found)),
        )


def _runs(root: Path, device: str | None, tp: int | None, micro_batch: int | None, skip: int) -> Iterator[_Run]:
    if root.is_file():
        because = "a single file does not tell it"
        needed("device", device, because, "H100-80")
        needed("tp", tp, because, "2")
        needed("micro_batch", micro_batch, because, "1")
        assert device is not None
        assert tp is not None
        assert micro_batch is not None
        yield _Run(file=root, device=device, tp=tp, micro_batch=micro_batch, layers=_read(root, skip))
        return
    found = [(file, match) for file in sorted(root.glob("*")) if (match := RUNS.fullmatch(file.name))]
    if not found:
        raise ValueError(f"{root}: holds no DEVICE_tpX_mbsY.jsonl or .log")
    for file, match in found:
        yield _Run(
            file=file,
            device=match["device"],
            tp=int(match["tp"]),
            micro_batch=int(match["micro_batch"]),
            layers=_read(file, skip),
        )


def _read(file: Path, skip: int) -> dict[int, _Summary]:
    """Every layer of a file, over its reports."""
    reports = _reports_of_log(file) if file.suffix == ".log" else [_report(Json.parse(line)) for line in lines(file)]
    if len(reports) <= skip:
        raise ValueError(f"{file}: {len(reports)} reports, with {skip} to be left out, expected more")
    found: dict[int, list[_Measured]] = {}
    for report in reports[skip:]:
        for number, measured in report.items():
            found.setdefault(number, []).append(measured)
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing or not found:
        raise ValueError(f"{file}: layer {missing[0] if missing else 0} is missing; reports of all pipeline ranks?")
    for number, each in found.items():
        if len({measured.is_moe for measured in each}) > 1:
            raise ValueError(f"{each[-1].where}: layer {number} is dense in one report and MoE in another")
    return {i: _Summary(is_moe=found[i][0].is_moe, measured=tuple(found[i])) for i in sorted(found)}


def _report(report: Json) -> dict[int, _Measured]:
    for key, _ in report.items():
        if key not in REPORT:
            raise ValueError(f"{report.where}: key {key!r} is not among {', '.join(REPORT)}")
    source = report.at("source").text() if report.has("source") else "trace"
    if source not in ("trace", "timing-only"):
        raise report.at("source").wrong("trace or timing-only")
    return {number: _layer(entry) for number, entry in report.at("layers").by_count().items()}


def _layer(entry: Json) -> _Measured:
    times = []
    for phase in PHASES:
        for key, _ in entry.at(phase).items():
            if key not in ("time_ms", *MEMORY):
                raise ValueError(f"{entry.at(phase).where}: key {key!r} is not among time_ms, {', '.join(MEMORY)}")
        times.append(entry.at(phase).at("time_ms").at("mean").number())
    transient = [_largest(entry.at(phase), "transient") or 0.0 for phase in PHASES]
    return _Measured(
        is_moe=entry.at("is_moe").flag() if entry.has("is_moe") else False,
        forward_ms=times[0],
        backward_ms=times[1],
        kept_bytes=_largest(entry.at("fwd"), "retained"),
        transient_bytes=max(transient),
        where=entry.where,
    )


def _largest(phase: Json, key: str) -> float | None:
    return phase.at(key).at("max").number() if phase.has(key) else None


def _reports_of_log(file: Path) -> list[dict[int, _Measured]]:
    """The reports of the tables in a log."""
    reports: list[list[tuple[str, Line]]] = []
    part = ""
    for line in lines(file):
        text = line.text.strip()
        if text == TITLE:
            reports.append([])
            part = "head"
        elif part and text in (FORWARD, BACKWARD):
            part = text
        elif part in (FORWARD, BACKWARD) and TABLE_ROW.fullmatch(line.text):
            reports[-1].append((part, line))
        elif part in (FORWARD, BACKWARD) and not text.startswith("layer"):
            part = ""  # what follows the table
    if not reports:
        raise ValueError(f"{file}: holds no {TITLE}")
    return [_table(rows, file) for rows in reports]


def _table(rows: Sequence[tuple[str, Line]], file: Path) -> dict[int, _Measured]:
    halves: dict[str, dict[int, tuple[re.Match[str], Line]]] = {FORWARD: {}, BACKWARD: {}}
    for part, line in rows:
        match = TABLE_ROW.fullmatch(line.text)
        assert match is not None
        halves[part][int(match["layer"])] = match, line
    report = {}
    for number, (match, line) in halves[FORWARD].items():
        if number not in halves[BACKWARD]:
            raise ValueError(f"{line.where}: layer {number} has no row below {BACKWARD}")
        back = halves[BACKWARD][number][0]
        transient = [found for found in (TRANSIENT.fullmatch(m["rest"]) for m in (match, back)) if found]
        report[number] = _Measured(
            is_moe=match["kind"] == "MoE",
            forward_ms=line.part(match["time_mean"], "fwd_ms").value(),
            backward_ms=halves[BACKWARD][number][1].part(back["time_mean"], "bwd_ms").value(),
            kept_bytes=None if match["retained_max"] == "n/a" else float(match["retained_max"]) * MEGABYTE,
            transient_bytes=max(
                (float(f["transient_max"]) * MEGABYTE for f in transient if f["transient_max"] != "n/a"), default=0.0
            ),
            where=line.where,
        )
    if not report:
        raise ValueError(f"{file}: a {TITLE} without rows")
    return report
