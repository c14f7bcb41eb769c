"""The runs of Sailor (SOSP 2025): a mixed cluster of RTX 3090, RTX 2080 and Titan RTX nodes, and GH200 nodes.

What the records say, and what we make of it:

- `real` is the iteration, `red_grads` the sync of one rank (with its wait for slower replicas), `max_mem` a whole
  number of MiB in every record: nvidia-smi's memory.used, so driver, communicators and cached blocks are inside.
- Each stage is one node of tp ranks; replicas of a stage are pipelines of their own here.
- A network port count per node follows from the published fits: nodes of GH200 move four times as much with four
  devices as with one, RTX nodes no more than with one.
- RTX-2080 to Titan-RTX: the fits for 1 and 8 devices repeat those of RTX-2080 to RTX-3090 to every digit; those for 2
  and 4 are its own. The repeated ones are left out.
- RTX-3090 nodes are linked in pairs by NVLink, but were run and profiled at tp 8 across the pairs, so the pairs are
  left out of the nodes.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.fidelity import Case, halves
from planner import ModelProfile
from planner.cluster import Cluster, NetworkLink
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.frameworks import DEEPSPEED, MIB
from planner.importers import sailor

MIXED = "mixed RTX, OPT-350M"
GROUPS = {"mit": MIXED, "clariden/OPT-350": "GH200, OPT-350M", "clariden/GPT-NEO": "GH200, GPT-Neo-2.7B"}
NODE_SIZES = {"GH-96": 4}
PORTS = {"GH-96": 4, "RTX-3090": 1, "RTX-2080": 1, "Titan-RTX": 1}
TWINS = (("RTX-2080", "Titan-RTX"), ("RTX-2080", "RTX-3090"))  # the first has fits copied from the second
STATE_BYTES = 16  # fp32 weights, gradients and two Adam moments: less is impossible

Replica = tuple[str, int]  # device type, tp
Stage = tuple[tuple[int, int], list[Replica]]  # layers, one entry per replica


def cases(root: Path) -> tuple[list[Case], dict[str, str]]:
    """The runs, and the records left out with the reason."""
    profiles = {profile.name: profile for profile in sailor.profiles(root)}
    found: list[Case] = []
    left_out: dict[str, str] = {}
    with (root / "validation_flat.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        name = row["record"].removesuffix(".json").replace("plan_config_", "")
        if row["caution"]:
            left_out[name] = row["caution"].removeprefix("suspect: ")
        else:
            record = json.loads((root / "validation" / row["record"]).read_text(encoding="utf-8"))
            group = next(group for prefix, group in GROUPS.items() if name.startswith(prefix))
            found.append(_case(root, group, name, profiles[row["model"]], record))
    return halves(found), left_out


def _case(root: Path, group: str, name: str, profile: ModelProfile, record: dict[str, object]) -> Case:
    stages = list(_stages(record))
    micro_batch, global_batch = int(str(record["mbs"])), int(str(record["gbs"]))
    replicas = len(stages[0][1])
    num_micro_batches = global_batch // micro_batch // replicas
    machines = cluster(root, (replica for _, row in stages for replica in row))
    measured_bytes = int(str(record["max_mem"]))
    floor = max(
        _floor_bytes(profile, layers, row[0][1], micro_batch, min(num_micro_batches, len(stages) - s))
        for s, (layers, row) in enumerate(stages)
    )
    impossible = ""
    if measured_bytes < floor:
        impossible = (
            f"{measured_bytes / MIB:,.0f} MiB published, but weights, gradients, Adam moments and the activations in"
            f" flight alone take {floor / MIB:,.0f} MiB by the published sizes"
        )
    return Case(
        group=group,
        name=name,
        profile=profile,
        cluster=machines,
        layout=_layout(stages, machines, micro_batch, num_micro_batches),
        framework=DEEPSPEED,
        measured_s=float(str(record["real"])),
        measured_bytes=None if impossible else measured_bytes,
        sync_s=float(str(record["red_grads"])),
        impossible=impossible,
    )


def _stages(record: dict[str, object]) -> Iterable[Stage]:
    pipeline = record["pipeline_list"][0]  # type: ignore[index]
    for layers, replicas in zip(pipeline["layers_per_stage"], pipeline["tmp_per_stage"], strict=True):
        yield (layers[0], layers[-1] + 1), [(devices[0][0], tp) for devices, tp in replicas]


def cluster(root: Path, replicas: Iterable[Replica]) -> Cluster:
    """A node for each replica of each stage."""
    count: dict[str, int] = defaultdict(int)
    for device_type, _ in replicas:
        count[device_type] += 1
    sizes = {name: (NODE_SIZES.get(name, 8),) * number for name, number in count.items()}
    out = sailor.cluster(root, sizes)
    nodes = (replace(node, nics=PORTS[node.devices[0]], groups=(), group_link=None) for node in out.nodes)
    return replace(out, nodes=tuple(nodes), links=tuple(_own(out.links)))


def with_copies(root: Path, case: Case) -> Case:
    """The case on a network whose copied fits are taken at their word."""
    sizes: dict[str, tuple[int, ...]] = {}
    for node in case.cluster.nodes:
        sizes[node.devices[0]] = (*sizes.get(node.devices[0], ()), len(node.devices))
    return replace(case, cluster=replace(case.cluster, links=sailor.cluster(root, sizes).links))


def _own(links: tuple[NetworkLink, ...]) -> Iterable[NetworkLink]:
    """Links that are no copies of another pair's."""
    mine, other = (set(pair) for pair in TWINS)
    originals = [link.link for link in links if set(link.between) == other]
    return [link for link in links if set(link.between) != mine or link.link not in originals]


def _layout(stages: list[Stage], machines: Cluster, micro_batch: int, num_micro_batches: int) -> Layout:
    free: dict[str, list[str]] = defaultdict(list)
    for node in machines.nodes:
        free[node.devices[0]].append(node.name)
    pipelines = []
    for p in range(len(stages[0][1])):
        placed = []
        for layers, row in stages:
            device_type, tp = row[p]
            node = free[device_type].pop(0)
            placed.append(StageLayout(layers=layers, tp=tp, devices=tuple(f"{node}:{i}" for i in range(tp))))
        pipelines.append(
            PipelineLayout(stages=tuple(placed), micro_batch=micro_batch, num_micro_batches=num_micro_batches)
        )
    return Layout(pipelines=tuple(pipelines))


def _floor_bytes(profile: ModelProfile, layers: tuple[int, int], tp: int, micro_batch: int, in_flight: int) -> int:
    """What a stage cannot do without: model state, and what its layers keep of the micro-batches in flight."""
    kinds = [profile.kind_of(l) for l in range(*layers)]
    cells = {(cell.kind, cell.tp, cell.micro_batch): cell.activation_bytes for cell in profile.cells}
    kept = sum(cells[kind.name, tp, micro_batch] + kind.logits_bytes * micro_batch // tp for kind in kinds)
    return math.ceil(STATE_BYTES * sum(kind.shard(tp) for kind in kinds) + in_flight * kept)
