"""Stages as lists of module names: torchtitan, and torch.distributed.pipelining itself.

torchtitan takes one shape of pipeline. torch.distributed.pipelining takes a process group per pipeline, so pipelines
may differ; the sum of their gradients is then up to the caller.
"""

from __future__ import annotations

import json

from planner import files, schedule
from planner.exporters.base import Export, NotExpressible, Request, recompute_warning, shape_of
from planner.exporters.layers import Names
from planner.plans import Pipeline, Stage

STANDARD = "1F1B"


def actions_csv(pipeline: Pipeline) -> str:
    """The actions of a pipeline as torch reads them: a row per rank, cells like ``0F0``, no transfers."""
    depths = [stage.in_flight for stage in pipeline.stages]
    planned = schedule.depths(len(pipeline.stages), pipeline.num_micro_batches, depths)
    return "\n".join(",".join(map(str, actions)) for actions in planned.ranks) + "\n"


def is_standard(pipeline: Pipeline) -> bool:
    """Whether torch's own 1F1B runs the same actions; it refuses fewer micro-batches than stages."""
    num_stages, m = len(pipeline.stages), pipeline.num_micro_batches
    return m >= num_stages and all(stage.in_flight == num_stages - s for s, stage in enumerate(pipeline.stages))


def module_lists(request: Request, stages: tuple[Stage, ...], names: Names) -> list[list[str]]:
    """Module names of every stage.

    Raises
    ------
    NotExpressible
        If a stage has nothing that has a name.
    """
    lists = []
    for s, stage in enumerate(stages):
        try:
            modules = list(request.layers.modules(stage.layers, names))
        except ValueError as error:
            raise NotExpressible(str(error)) from None
        if not modules:
            raise NotExpressible(f"stage {s} has no module of its own, layers {stage.layers}")
        lists.append(modules)
    return lists


def torchtitan(request: Request) -> Export:
    """``module_fqns_per_model_part`` and what belongs to it, as TOML and as arguments of versions without TOML."""
    plan, shape = request.plan, shape_of(request.plan, "torchtitan")
    pipeline = plan.pipelines[0]
    parts = module_lists(request, pipeline.stages, request.module_names("torchtitan"))
    all_recompute = bool(shape.recompute)
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": shape.copies,
        "data_parallel_shard_degree": 1,
        "tensor_parallel_degree": shape.tp,
        "pipeline_parallel_degree": shape.num_stages,
    }
    if shape.num_stages > 1:
        parallelism |= {"module_fqns_per_model_part": parts, "pipeline_parallel_schedule": STANDARD}
        if not is_standard(pipeline):
            parallelism["pipeline_parallel_schedule_csv"] = "schedule.csv"
    training: dict[str, object] = {
        "local_batch_size": shape.micro_batch * shape.num_micro_batches,
        "global_batch_size": shape.global_batch,
    }
    if request.sequence_length is not None:
        training["seq_len"] = request.sequence_length
    toml: dict[str, dict[str, object]] = {
        "training": training,
        "parallelism": parallelism
        | ({"pipeline_parallel_microbatch_size": shape.micro_batch} if shape.num_stages > 1 else {}),
        "activation_checkpoint": {"mode": "full" if all_recompute else "none"},
    }
    blocks = {s: request.layers.num_blocks(cut) for s, cut in enumerate(shape.cuts)}
    launch = request.launch("stage", "-m torchtitan.train", ["--job.config_file torchtitan.toml"])
    texts = [("torchtitan.toml", _toml(toml))]
    if request.sequence_length is not None:
        texts.append(("torchtitan.args", _arguments(parallelism, shape.micro_batch * request.sequence_length, request)))
    return Export(
        format="torchtitan",
        files=(*texts, ("schedule.csv", actions_csv(pipeline)), ("ranks.csv", launch.table)),
        commands=launch.commands,
        notes=(
            "torchtitan.toml is for versions that read TOML, torchtitan.args for those configured in Python",
            *(
                ("the schedule file runs on a private class of torch",)
                if "pipeline_parallel_schedule_csv" in parallelism
                else ()
            ),
        ),
        warnings=(*recompute_warning(request, blocks if all_recompute else None), *launch.warnings),
        plan=plan,
    )


def _toml(tables: dict[str, dict[str, object]]) -> str:
    """Tables of numbers, strings and lists of lists: for those JSON values are TOML values."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        for key, value in table.items():
            if isinstance(value, list):
                rows = ",\n".join("    " + json.dumps(row) for row in value)
                lines.append(f"{key} = [\n{rows},\n]")
            else:
                lines.append(f"{key} = {json.dumps(value)}")
        lines.append("")
    return "\n".join(lines)


def _arguments(parallelism: dict[str, object], tokens: int, request: Request) -> str:
    """The same for versions that count tokens per micro-batch."""
    plan, length = request.plan, request.sequence_length
    assert length is not None
    values = parallelism | {"num_pp_microbatches": plan.pipelines[0].num_micro_batches}
    lines = [f"--parallelism.{key} '{_compact(value)}'" for key, value in values.items()]
    lines += [
        f"--training.num_tokens_per_microbatch_per_dp_rank {tokens}",
        f"--training.num_tokens_per_train_step {plan.job.global_batch * length}",
        f"--training.max_context_length {length}",
    ]
    return "\n".join(lines) + "\n"


def _compact(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _groups(p: int, pipeline: Pipeline, ranks: dict[str, int]) -> list[list[int]]:
    """The ranks that pass activations on, stage by stage: a group per tp rank."""
    degrees = [stage.tp for stage in pipeline.stages]
    for s, degree in enumerate(degrees):
        if degree != degrees[0]:
            raise NotExpressible(
                f"torch.distributed.pipelining sends from one rank to one, but stages 0 and {s} of pipeline {p} are of "
                f"tp {degrees[0]} and {degree}"
            )
    return [[ranks[stage.devices[t]] for stage in pipeline.stages] for t in range(degrees[0])]


def torch(request: Request) -> Export:
    """Stage lists, rank groups and action files for torch.distributed.pipelining, every pipeline by itself."""
    plan, names = request.plan, request.module_names("llama")
    launch = request.launch("node", "train.py")
    ranks = launch.ranks
    pipelines, texts = [], []
    for p, pipeline in enumerate(plan.pipelines):
        name = f"schedule_{p}.csv"
        texts.append((name, actions_csv(pipeline)))
        pipelines.append(
            {
                "groups": _groups(p, pipeline, ranks),
                "num_micro_batches": pipeline.num_micro_batches,
                "micro_batch": pipeline.micro_batch,
                "schedule": STANDARD if is_standard(pipeline) else name,
                "stages": [
                    {
                        "stage_index": s,
                        "ranks": [ranks[device] for device in stage.devices],
                        "modules": modules,
                        "recompute": [
                            names.block.format(request.layers.block_range((l, l + 1))[0])
                            for l in stage.recompute
                            if request.layers.num_blocks((l, l + 1))
                        ],
                    }
                    for s, (stage, modules) in enumerate(
                        zip(pipeline.stages, module_lists(request, pipeline.stages, names), strict=True)
                    )
                ],
            }
        )
    data = {
        "num_stages": [len(pipeline.stages) for pipeline in plan.pipelines],
        "modules_on_every_stage": list(names.everywhere),
        "pipelines": pipelines,
        "gradient_sync": [
            {
                "layers": list(block.layers),
                "stages": list(block.owners),
                "ranks": [
                    [ranks[device] for device in pipeline.stages[s].devices]
                    for pipeline, s in zip(plan.pipelines, block.owners, strict=True)
                ],
            }
            for block in reversed(plan.blocks)
            if len(plan.pipelines) > 1
        ],
    }
    notes = [
        "a process group per entry of groups: PipelineStage(..., group=); a loss summed over tokens, scale_grads=False"
    ]
    if len(plan.pipelines) > 1:
        notes.append("gradients are summed over the ranks of gradient_sync, in that order on every rank")
    return Export(
        format="torch",
        files=(("stages.json", files.dumps(data)), *texts, ("ranks.csv", launch.table)),
        commands=launch.commands,
        notes=tuple(notes),
        plan=plan,
    )
