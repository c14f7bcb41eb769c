"""FlagScale: meshes of unlike devices along one pipeline, checked before launch rather than hours into it.

A mesh is (tp, cp, ep, dp, pp); meshes follow each other along the pipeline. Ranks are numbered by device type, in the
order of ``hetero_device_types``, then mesh by mesh, stage by stage (flagscale/train/hetero/parallel_context.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from planner import files
from planner.exporters.base import Export, NotExpressible, Request, ahead_warning, difference
from planner.exporters.launch import Launch
from planner.plans import Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Neighbouring stages of one device type and one tp degree, of all pipelines."""

    device_type: str
    tp: int
    dp: int
    pp: int

    @property
    def sizes(self) -> list[int]:
        """tp, cp, ep, dp, pp."""
        return [self.tp, 1, 1, self.dp, self.pp]


def export(request: Request) -> Export:
    """The configuration, the hosts and the launch."""
    plan = request.plan
    meshes = meshes_of(plan)
    first = plan.pipelines[0]
    split = [request.blocks(stage) for stage in first.stages]
    recompute = [
        max(request.recomputed(pipeline.stages[s]) for pipeline in plan.pipelines) for s in range(len(first.stages))
    ]
    types = [mesh.device_type for mesh in meshes]
    system: dict[str, object] = {
        "tensor_model_parallel_size": meshes[0].tp,
        "pipeline_model_parallel_size": len(first.stages),
        "hetero": {
            "enable_hetero": True,
            "hetero_pipeline_layer_split": split,
            "hetero_process_meshes": [size for mesh in meshes for size in mesh.sizes],
            "hetero_device_types": types,
            "hetero_current_device_type": types[0],
            "standalone_embedding_stage": False,
        },
        "checkpoint": {"ckpt_format": "torch"},
    }
    if plan.job.precision == "mixed":
        system["precision"] = {"bf16": True}
    if any(recompute):
        system["recompute"] = _recompute(recompute, first.num_micro_batches)
    model: dict[str, object] = {
        "num_layers": request.layers.blocks,
        "micro_batch_size": first.micro_batch,
        "global_batch_size": plan.job.global_batch,
    }
    if request.sequence_length is not None:
        model["seq_length"] = request.sequence_length
    flags = [
        "--enable-hetero",
        f"--tensor-model-parallel-size {meshes[0].tp}",
        f"--pipeline-model-parallel-size {len(first.stages)}",
        f"--hetero-pipeline-layer-split {_spaced(split)}",
        f"--hetero-process-meshes {_spaced(size for mesh in meshes for size in mesh.sizes)}",
        f"--hetero-device-types {_spaced(types)}",
        f"--num-layers {request.layers.blocks}",
        f"--micro-batch-size {first.micro_batch}",
        f"--global-batch-size {plan.job.global_batch}",
        *(_recompute_flags(recompute, first.num_micro_batches) if any(recompute) else []),
        "--ckpt-format torch",
        *(["--bf16"] if plan.job.precision == "mixed" else []),
    ]
    launch = request.launch(
        "stage", "flagscale/train/megatron/train_gpt.py", [*flags, "--hetero-current-device-type {device_type}"]
    )
    launch = replace(launch, by_type=True)
    warnings = [*ahead_warning(request, "FlagScale"), *launch.warnings]
    if 0 in split:
        warnings.append(f"stage {split.index(0)} has no decoder layer, which FlagScale may not allow")
    return Export(
        format="flagscale",
        files=(
            ("flagscale.yaml", files.dumps_yaml({"system": system, "model": model})),
            ("flagscale.args", "\n".join(flags) + "\n"),
            ("hostfile", _hosts(launch)),
            ("ranks.csv", launch.table),
        ),
        commands=launch.commands,
        notes=(
            "checkpoints: meshes of different sizes need ckpt_format torch, distributed checkpoints do not know them",
            "flagscale.yaml and hostfile are for FlagScale's own launcher, where every node has one device type",
        ),
        warnings=tuple(warnings),
        plan=plan,
    )


def meshes_of(plan: Plan) -> list[Mesh]:
    """The meshes of a plan.

    Raises
    ------
    NotExpressible
        Where FlagScale would stop, or number the ranks otherwise than planned.
    """
    first = plan.pipelines[0]
    for p, pipeline in enumerate(plan.pipelines[1:], start=1):
        differs = difference(first, pipeline)
        if differs:
            raise NotExpressible(f"FlagScale takes one pipeline, data parallel, but 0 and {p} differ: {differs}")
        for s, (a, b) in enumerate(zip(first.stages, pipeline.stages, strict=True)):
            if a.device_type != b.device_type:
                raise NotExpressible(
                    f"FlagScale takes one device type per stage, but stage {s} is on {a.device_type} in pipeline 0 and "
                    f"on {b.device_type} in pipeline {p}"
                )
    meshes = []
    for (device_type, tp), members in groupby(first.stages, key=_kind):
        meshes.append(Mesh(device_type=device_type, tp=tp, dp=len(plan.pipelines), pp=len(list(members))))
    types = [name for name, _ in groupby(mesh.device_type for mesh in meshes)]
    if len(set(types)) < len(types):
        raise NotExpressible(
            f"FlagScale numbers ranks by device type, but the stages go {', '.join(types)}: those of a type have to "
            "be neighbours"
        )
    _check_counts(plan, meshes)
    return meshes


def _kind(stage: Stage) -> tuple[str, int]:
    return stage.device_type, stage.tp


def _check_counts(plan: Plan, meshes: list[Mesh]) -> None:
    """What FlagScale asserts after all processes are up."""
    first = plan.pipelines[0]
    assert sum(mesh.pp for mesh in meshes) == len(first.stages)
    assert sum(mesh.tp * mesh.dp * mesh.pp for mesh in meshes) == len(plan.devices)
    per_step = meshes[0].dp * first.micro_batch
    for n, mesh in enumerate(meshes):
        if per_step % mesh.dp:
            raise NotExpressible(f"FlagScale: mesh {n} has dp {mesh.dp}, which does not divide {per_step} samples")
    total = per_step * first.num_micro_batches
    if total != plan.job.global_batch:
        raise NotExpressible(f"FlagScale: {total} samples per step, the global batch is {plan.job.global_batch}")


def _hosts(launch: Launch) -> str:
    """One line per node and device type: ``host slots=4 type=A100``."""
    slots: dict[tuple[str, str], int] = {}
    for process in launch.processes:
        slots[process.node, process.device_type] = slots.get((process.node, process.device_type), 0) + 1
    return "".join(f"{node} slots={count} type={kind}\n" for (node, kind), count in slots.items())


def _spaced(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


def _recompute_flags(layers: list[int], num_micro_batches: int) -> list[str]:
    flags = []
    for key, value in _recompute(layers, num_micro_batches).items():
        rows = _spaced(json.dumps(json.dumps(row)) for row in value) if isinstance(value, list) else str(value)
        flags.append(f"--{key.replace('_', '-')} {rows}")
    return flags


def _recompute(layers: list[int], num_micro_batches: int) -> dict[str, object]:
    """Layers from the first of each stage, per stage: rows of stages, then (micro-batches, value)."""

    def rows(values: list[int]) -> list[list[int]]:
        return [[1, num_micro_batches, value] for value in values]

    return {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": max(layers),
        "recompute_granularity_per_stage_micro_batch": rows([int(count > 0) for count in layers]),
        "recompute_method_per_stage_micro_batch": rows([1 for _ in layers]),
        "recompute_num_layers_per_stage_micro_batch": rows(layers),
    }
