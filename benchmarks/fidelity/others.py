"""Runs of other systems on V100: what can be compared of them without fitting anything.

DLPerf: GPT layouts of OneFlow on 4 nodes of 8 V100-SXM2-16GB with one 100 Gb/s card each. No profile was published, so
times and bytes are those of `planner.estimate`; its published FLOP/s count a recomputed forward (96 instead of 72 FLOP
per parameter and token), so every layer is recomputed. State: fp16 weights and gradients, fp32 weights, two moments.

Aceso: one plan is known, the 350M model on one V100-32GB, micro-batch 8, blocks recomputed; its profile is measured.
The plans of the larger models are not published, so only their own prediction can be set beside what they measured.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.fidelity import Case
from planner import ModelProfile, catalogue, estimate
from planner.cluster import Cluster, Link, NetworkLink, Node
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.frameworks import GIB, MIB, Framework
from planner.importers import aceso
from planner.job import BytesPerParameter

DLPERF, ACESO = "V100, OneFlow GPT (estimated profile)", "V100, Aceso GPT-350M"
SMALL, LARGE = "V100-16-SXM", "V100-32-SXM"
NETWORK_BYTES_PER_S = 12.5e9  # 100 Gb/s
SEQUENCE, VOCABULARY = 2048, 51200

ONEFLOW = Framework(
    name="oneflow",
    precision="mixed",
    state=BytesPerParameter(weights=2, gradients=2, optimizer=12),
    context_bytes=GIB,
    sync="overlapped",
)


def dlperf(file: Path) -> tuple[list[Case], dict[str, str]]:
    """The runs whose tp groups stay inside a node, and those that do not."""
    with file.open(encoding="utf-8", newline="") as rows:
        found = list(csv.DictReader(rows))
    left_out = {
        row["case"]: f"tp {row['tp']} across nodes, which a plan cannot say"
        for row in found
        if int(row["tp"]) > int(row["gpus_per_node"])
    }
    return [_dlperf(row) for row in found if row["case"] not in left_out], left_out


def _dlperf(row: dict[str, str]) -> Case:
    get = {
        key: int(row[key]) for key in ("nodes", "gpus_per_node", "dp", "tp", "pp", "micro_batch", "num_acc", "layers")
    }
    profile = _gpt(int(row["hidden"]), int(row["heads"]), get["layers"], get["micro_batch"], get["tp"])
    cluster = _v100(get["nodes"], get["gpus_per_node"])
    names = [device.name for device in cluster.devices]
    cuts = _even(get["layers"], get["pp"])
    pipelines = []
    for p in range(get["dp"]):
        stages = []
        for s, cut in enumerate(cuts):  # Megatron-LM's order of ranks: tp, then dp, then pp
            first = (s * get["dp"] + p) * get["tp"]
            devices = tuple(names[first : first + get["tp"]])
            stages.append(StageLayout(layers=cut, tp=get["tp"], devices=devices, recompute=tuple(range(*cut))))
        pipelines.append(
            PipelineLayout(stages=tuple(stages), micro_batch=get["micro_batch"], num_micro_batches=get["num_acc"])
        )
    return Case(
        group=DLPERF,
        name=row["case"],
        profile=profile,
        cluster=cluster,
        layout=Layout(pipelines=tuple(pipelines)),
        framework=ONEFLOW,
        measured_s=float(row["latency_ms"]) / 1e3,
        measured_bytes=int(row["memory_MiB"]) * MIB,
    )


def _gpt(hidden: int, heads: int, layers: int, micro_batch: int, tp: int) -> ModelProfile:
    config = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "vocab_size": VOCABULARY,
        "n_positions": SEQUENCE,
    }
    return estimate.profile(
        config,
        [SMALL],
        sequence_length=SEQUENCE,
        dtype="fp16",
        attention="fused-softmax",
        micro_batches=(micro_batch,),
        tp=(tp,),
    )


def _v100(nodes: int, devices: int) -> Cluster:
    inside = catalogue.link(SMALL) if devices > 1 else None
    network = Link(alpha_s=catalogue.LINK_ALPHA_S, bytes_per_s=catalogue.LINK_SHARE * NETWORK_BYTES_PER_S)
    return Cluster(
        name=f"{nodes} x {devices} V100",
        device_types=(catalogue.device_type(SMALL, "fp16"),),
        nodes=tuple(Node(name=f"node-{i}", devices=(SMALL,) * devices, link=inside, nics=1) for i in range(nodes)),
        links=(NetworkLink(between=(SMALL, SMALL), link=network),) if nodes > 1 else (),
    )


def _even(num_blocks: int, num_stages: int) -> list[tuple[int, int]]:
    """Equal blocks per stage; the embedding comes before them, the head after."""
    each = num_blocks // num_stages
    starts = [0, *(1 + each * s for s in range(1, num_stages)), num_blocks + 2]
    return list(pairwise(starts))


def aceso_350m(root: Path) -> Case:
    """The one run of Aceso whose plan is known."""
    profile = next(
        each for each in aceso.profiles(root / "profiled-time-eurosys", device=LARGE) if each.name == "gpt_350M"
    )
    last = profile.num_layers
    stage = StageLayout(layers=(0, last), tp=1, devices=("node:0",), recompute=tuple(range(1, last - 1)))
    own = next(each for each in published(root) if each.model == "350M")
    return Case(
        group=ACESO,
        name="gpt_350M_mbs8_recomp",
        profile=profile,
        cluster=Cluster(
            name="V100",
            device_types=(catalogue.device_type(LARGE, "fp16"),),
            nodes=(Node(name="node", devices=(LARGE,)),),
        ),
        layout=Layout(pipelines=(PipelineLayout(stages=(stage,), micro_batch=8, num_micro_batches=128),)),
        framework=Framework(
            name="aceso",
            precision="mixed",
            state=BytesPerParameter(weights=2, gradients=4, optimizer=12),
            context_bytes=0,  # their memory is the allocator's
        ),
        measured_s=own.measured_s,
        measured_bytes=own.measured_mib * MIB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What Aceso measured for a model, and what it predicted."""

    model: str
    measured_s: float
    predicted_s: float
    measured_mib: int
    predicted_mib: int


def published(root: Path) -> list[Published]:
    """Their own figures, per model."""
    times = _rows(root / "results" / "ref" / "perf_model_time_large_gpt.csv")
    memory = _rows(root / "results" / "ref" / "perf_model_mem_large_gpt.csv")
    return [
        Published(
            model=model,
            measured_s=float(times["actual"][i]),
            predicted_s=float(times["predict"][i]),
            measured_mib=int(memory["actual"][i]),
            predicted_mib=int(memory["predict (norm)"][i]) + int(memory["predict (extra)"][i]),
        )
        for i, model in enumerate(times["size"])
    ]


def _rows(file: Path) -> dict[str, list[str]]:
    lines = [line.split(",") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {line[0].strip(): [entry.strip() for entry in line[1:]] for line in lines}
