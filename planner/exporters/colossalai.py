"""Colossal-AI: the arguments of ``HybridParallelPlugin``."""

from __future__ import annotations

from planner.exporters.base import Export, Request, ahead_warning, shape_of


def export(request: Request) -> Export:
    """A module that builds the plugin; its mesh counts data parallelism outermost, so ranks go pipeline by pipeline."""
    plan, shape = request.plan, shape_of(request.plan, "Colossal-AI")
    blocks = [request.layers.num_blocks(cut) for cut in shape.cuts]
    arguments = {"tp_size": shape.tp, "pp_size": shape.num_stages, "zero_stage": 0}
    lines = [f"{key}={value}," for key, value in arguments.items()]
    lines.append(f'precision="{"bf16" if plan.job.precision == "mixed" else "fp32"}",')
    if shape.num_stages > 1:
        lines += [
            f"num_layers_per_stage={blocks},",
            f"num_microbatches={shape.num_micro_batches},",
            f"microbatch_size={shape.micro_batch},",
            'pp_style="1f1b",',
        ]
    imports = ["from colossalai.booster.plugin import HybridParallelPlugin"]
    warnings: list[str] = []
    if shape.recompute:
        # One figure per stage for all pipelines: the most that one of them recomputes.
        most = [
            max(request.recomputed(pipeline.stages[s]) for pipeline in plan.pipelines) for s in range(shape.num_stages)
        ]
        imports.append("from colossalai.shardformer import PipelineGradientCheckpointConfig")
        lines.append(f"gradient_checkpoint_config=PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage={most}),")
    if 0 in blocks:
        warnings.append(f"stage {blocks.index(0)} has no decoder layer, which Colossal-AI may not allow")
    body = "\n".join(f"    {line}" for line in lines)
    launch = request.launch("pipeline", "train.py")
    return Export(
        format="colossalai",
        files=(
            ("plugin.py", "\n".join(imports) + f"\n\nplugin = HybridParallelPlugin(\n{body}\n)\n"),
            ("ranks.csv", launch.table),
        ),
        commands=launch.commands,
        notes=(
            f"{shape.micro_batch * shape.num_micro_batches} samples per data-parallel rank and step: "
            f"plugin.prepare_dataloader(dataset, batch_size={shape.micro_batch * shape.num_micro_batches})",
        ),
        warnings=(*warnings, *ahead_warning(request, "Colossal-AI"), *launch.warnings),
        plan=plan,
    )
