"""Hetu (Malleus, Ampelos): whole plans with one micro-batch size, both ways.

A stage takes `tp` rank slots, the same for all; slots of smaller stages are listed as unused.
``rank_to_device_mapping`` says which device, counted node by node over all processes, serves a slot. The generator of
Hetu turns the flags into the JSON that the trainer reads (examples/ampelos/ds_parallel_config); here both are written.
The ends go with the outermost decoder layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from planner import files
from planner.exporters.base import Export, NotExpressible, Request, ahead_warning
from planner.exporters.layout import Flags, Layout, PipelineLayout, StageLayout

MODELS = {"llama": ("llama", "rmsnorm"), "gpt2": ("gpt", "layernorm")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Rank slots of all stages and the devices behind them."""

    tp: int
    device_of: dict[int, int]
    unused: tuple[int, ...]

    def devices(self, stage: int) -> list[int]:
        """Devices of a stage, counted over all pipelines."""
        slots = range(stage * self.tp, (stage + 1) * self.tp)
        return [self.device_of[slot] for slot in slots if slot not in self.unused]


def export(request: Request) -> Export:
    """The flags of trainer and generator, and what the generator would write."""
    plan = request.plan
    sizes = sorted({pipeline.micro_batch for pipeline in plan.pipelines})
    if len(sizes) > 1:
        raise NotExpressible(f"Hetu takes one micro-batch size, the pipelines have {' and '.join(map(str, sizes))}")
    splits = [[request.blocks(stage) for stage in pipeline.stages] for pipeline in plan.pipelines]
    for p, split in enumerate(splits):
        if 0 in split:
            raise NotExpressible(
                "Hetu puts the ends with the outermost decoder layers, but pipeline "
                f"{p} stage {split.index(0)} has none"
            )
    launch = request.launch("node", "train_hetu.py")
    slots = _slots(request, launch.ranks)
    recompute = [
        sorted(
            request.layers.block_range((l, l + 1))[0]
            for stage in pipeline.stages
            for l in stage.recompute
            if request.layers.num_blocks((l, l + 1))
        )
        for pipeline in plan.pipelines
    ]
    count = len(plan.pipelines)
    mapping = "{" + ",".join(f"{slot}:{device}" for slot, device in slots.device_of.items()) + "}"
    shared = [
        f'--rank_to_device_mapping "{mapping}"',
        f'--unused_rank "{_compact(list(slots.unused))}"',
        f'--cp_list "{_compact([1] * count)}"',
    ]
    generator = [
        f"--num_layers {request.layers.blocks}",
        f"--num_gpus {len(launch.processes)}",
        f"--dp {count}",
        f"--tp {slots.tp}",
        f"--hetero_layers {','.join(str(blocks) for split in splits for blocks in split)}",
        f'--hetero_stages "{_compact([len(split) for split in splits])}"',
        *shared,
        f'--recompute_layers "{_compact(recompute)}"',
    ]
    trainer = [
        "--hetero",
        f"--hetero_stage_gpus {slots.tp}",
        f'--hetero_stages "{_compact([len(split) for split in splits])}"',
        f'--micro_batch_num_list "{_compact([pipeline.num_micro_batches for pipeline in plan.pipelines])}"',
        f"--micro_batch_size {sizes[0]}",
        f"--global_batch_size {plan.job.global_batch}",
        f"--num_hidden_layers {request.layers.blocks}",
        f"--ngpus {len(launch.processes)}",
        *shared,
        "--ds_parallel_config hetu.json",
        *(["--bf16"] if plan.job.precision == "mixed" else []),
    ]
    model, norm = MODELS.get(request.names or "llama", MODELS["llama"])
    data = _config(model, norm, splits, slots, recompute, len(launch.processes))
    return Export(
        format="hetu",
        files=(
            ("hetu.json", files.dumps(data)),
            ("trainer.args", "\n".join(trainer) + "\n"),
            ("generator.args", "\n".join(generator) + "\n"),
            ("ranks.csv", launch.table),
        ),
        notes=(
            f'newer generators take --hetero_layers as nested lists without --hetero_stages: "{_compact(splits)}"',
            "Hetu starts its processes itself, with trainer.args; ranks.csv lists its devices 0, 1, ...",
        ),
        warnings=(*_slot_warning(slots), *ahead_warning(request, "Hetu")),
        plan=plan,
    )


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _slots(request: Request, ranks: dict[str, int]) -> Slots:
    """As many slots per stage as the widest stage has devices; slots too many are unused and have no device."""
    stages = request.plan.stages
    tp = max(stage.tp for stage in stages)
    device_of, unused = {}, []
    spare = len(ranks)
    for n, stage in enumerate(stages):
        for t in range(tp):
            if t < stage.tp:
                device_of[n * tp + t] = ranks[stage.devices[t]]
            else:
                device_of[n * tp + t] = spare
                unused.append(n * tp + t)
                spare += 1
    return Slots(tp=tp, device_of=device_of, unused=tuple(unused))


def _slot_warning(slots: Slots) -> list[str]:
    if not slots.unused:
        return []
    return [
        f"rank slots {', '.join(map(str, slots.unused))} are unused and stand for devices that do not exist, which "
        "Hetu's examples do not show"
    ]


def _config(
    model: str, norm: str, splits: Sequence[Sequence[int]], slots: Slots, recompute: list[list[int]], num_devices: int
) -> dict[str, object]:
    """What Hetu's generator writes: for every weight how each pipeline splits and repeats it, and on which devices."""
    count = len(splits)
    all_pipelines = [count] * count
    num_layers = sum(splits[0])
    groups = []  # per decoder layer, the devices of its stage in each pipeline
    for l in range(num_layers):
        row, before = [], 0
        for split in splits:
            s = next(s for s in range(len(split)) if l < sum(split[: s + 1]))
            row.append(slots.devices(before + s))
            before += len(split)
        groups.append(row)

    def tensor(l: int, split: dict[str, list[int]], dup: list[int], kind: str = "variable") -> dict[str, object]:
        return {"split": split, "dup": dup, "device_group_union": groups[l], "type": kind}

    def cut(l: int, dimension: int) -> dict[str, object]:
        return tensor(l, {str(dimension): [len(devices) for devices in groups[l]]}, all_pipelines)

    def whole(l: int) -> dict[str, object]:
        return tensor(l, {}, [len(devices) * count for devices in groups[l]])

    def batch(l: int) -> dict[str, object]:
        return tensor(l, {"0": all_pipelines}, [len(devices) for devices in groups[l]], "placeholder")

    blocks = {
        f"blocks{l}": {
            "range": [l],
            "recompute": [l in layers for layers in recompute],
            f"{norm}1": whole(l),
            "attn": {"qkv": cut(l, 1), "dense": cut(l, 0)},
            f"{norm}2": whole(l),
            "mlp": {"dense_h_to_4h": cut(l, 1), "dense_4h_to_h": cut(l, 0)},
        }
        for l in range(num_layers)
    }
    return {
        "zero": False,
        "devices": list(range(num_devices)),
        "input": batch(0),
        model: {"wte": cut(0, 0), "wpe": whole(0), "blocks": blocks, f"{norm}_final": whole(-1)},
        "lm_head": cut(-1, 1),
        "label": batch(-1),
    }


# In.


def parse(text: str, where: str = "hetu") -> Layout:
    """A configuration from the flags of trainer and generator; the split also from the JSON that the trainer reads.

    Raises
    ------
    ValueError
        Naming the flag or the key.
    """
    if text.lstrip().startswith("{"):
        raise ValueError(
            f"{where}: the JSON has no micro-batches; give the trainer's flags: --micro_batch_num_list, "
            "--micro_batch_size, --ds_parallel_config FILE"
        )
    flags = Flags.parse(text, where)
    counts = flags.numbers("micro_batch_num_list")
    if not counts or 0 in counts:
        raise flags.wrong("micro_batch_num_list", "missing, expected a list such as [5,3]")
    size = flags.count("micro_batch_size", 2)  # as Hetu's trainer
    cp = flags.numbers("cp_list") or []
    if any(n != 1 for n in cp):
        raise flags.wrong("cp_list", f"{cp}: the planner does not model context parallelism")
    if "hetero_layers" in flags:
        stages = _by_flags(flags)
    elif "ds_parallel_config" in flags:
        stages = _by_json(Path(where).parent / (flags.text("ds_parallel_config") or ""))
    else:
        raise flags.wrong("hetero_layers", "missing, and there is no --ds_parallel_config")
    if len(stages) != len(counts):
        raise flags.wrong("micro_batch_num_list", f"{len(counts)} entries for {len(stages)} pipelines")
    return Layout(
        pipelines=tuple(
            PipelineLayout(stages=row, micro_batch=size, num_micro_batches=m) for row, m in zip(stages, counts)
        ),
        order="pipeline",
        warnings=("optimizer state is counted whole on every rank; --zero shards it",) if "zero" in flags else (),
    )


def _by_flags(flags: Flags) -> list[tuple[StageLayout, ...]]:
    splits = _splits(flags)
    tp = flags.count("tp") or flags.count("hetero_stage_gpus", 2) or 1
    unused = flags.numbers("unused_rank") or []
    device_of = flags.mapping("rank_to_device_mapping") or {}
    recompute = flags.rows("recompute_layers") or [[] for _ in splits]
    if len(recompute) != len(splits):
        raise flags.wrong("recompute_layers", f"{len(recompute)} lists for {len(splits)} pipelines")
    out: list[tuple[StageLayout, ...]] = []
    slot = 0
    for split, again in zip(splits, recompute):
        row, first = [], 0
        for s, blocks in enumerate(split):
            slots = [n for n in range(slot, slot + tp) if n not in unused]
            if not slots:
                raise flags.wrong("unused_rank", f"leaves stage {s} of pipeline {len(out)} without a device")
            missing = [n for n in slots if device_of and n not in device_of]
            if missing:
                raise flags.wrong("rank_to_device_mapping", f"rank {missing[0]} is missing")
            row.append(
                StageLayout(
                    blocks=blocks,
                    embedding=s == 0,
                    head=s + 1 == len(split),
                    tp=len(slots),
                    devices=tuple(device_of.get(n, n) for n in slots),
                    recompute=tuple(l - first for l in again if first <= l < first + blocks),
                )
            )
            slot += tp
            first += blocks
        out.append(tuple(row))
    return out


def _splits(flags: Flags) -> list[list[int]]:
    """Nested lists, or one list and the number of stages of each pipeline."""
    if (flags.text("hetero_layers") or "").lstrip().startswith("["):
        found = flags.rows("hetero_layers") or []
        if not all(found):
            raise flags.wrong("hetero_layers", "has a pipeline without stages")
        return found
    layers, stages = flags.counts("hetero_layers") or (), flags.numbers("hetero_stages")
    if not stages:
        raise flags.wrong("hetero_stages", "missing, expected the stages of each pipeline such as [2,3]")
    if sum(stages) != len(layers):
        raise flags.wrong("hetero_layers", f"{len(layers)} entries for {sum(stages)} stages")
    out: list[list[int]] = []
    first = 0
    for count in stages:
        out.append(list(layers[first : first + count]))
        first += count
    return out


def _by_json(path: Path) -> list[tuple[StageLayout, ...]]:
    """Stages from runs of decoder layers on the same devices."""
    data = files.read(path)
    model = next((key for key in ("llama", "gpt") if isinstance(data.get(key), dict)), None)
    blocks = data[model].get("blocks") if model is not None else None
    if not isinstance(blocks, dict) or not blocks:
        raise ValueError(f"{path}: key 'blocks' is missing under 'llama' or 'gpt'")
    rows: list[tuple[list[list[int]], list[bool]]] = []
    for name, block in blocks.items():
        try:
            l, groups, again = block["range"][0], block["attn"]["qkv"]["device_group_union"], block["recompute"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{path}: {name}: expected range, recompute and attn > qkv > device_group_union") from None
        if l != len(rows):
            raise ValueError(f"{path}: {name}: layer {l} comes after {len(rows)} others")
        rows.append((groups, again))
    out = []
    for p in range(len(rows[0][0])):
        stages: list[StageLayout] = []
        runs = [list(run) for _, run in groupby(range(len(rows)), key=lambda l: rows[l][0][p])]
        for s, run in enumerate(runs):
            devices = rows[run[0]][0][p]
            stages.append(
                StageLayout(
                    blocks=len(run),
                    embedding=s == 0,
                    head=s + 1 == len(runs),
                    tp=len(devices),
                    devices=tuple(devices),
                    recompute=tuple(l - run[0] for l in run if rows[l][1][p]),
                )
            )
        out.append(tuple(stages))
    return out
