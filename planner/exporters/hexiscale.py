"""HexiScale (FlashFlex): whole plans, pipelines that differ in depth, split, tp and batch; both ways.

``hetero_configs`` are the devices of each stage, ``layer_partitions`` its decoder layers, ``chunks`` and
``global_bsz_size`` micro-batches and samples per pipeline (hexiscale/process_args.py). The embedding is on the first
and the head on the last stage of a pipeline. Ranks go pipeline by pipeline, stage by stage.
"""

from __future__ import annotations

import json

from planner import files
from planner.exporters.base import Export, Request, ahead_warning
from planner.exporters.layout import Flags, Layout, PipelineLayout, StageLayout


def export(request: Request) -> Export:
    """Flags, and the same as the JSON of ``--all_hetero_configs_path``."""
    plan = request.plan
    pipelines = plan.pipelines
    configs = [[stage.tp for stage in pipeline.stages] for pipeline in pipelines]
    partitions = [[request.blocks(stage) for stage in pipeline.stages] for pipeline in pipelines]
    chunks = [pipeline.num_micro_batches for pipeline in pipelines]
    samples = [pipeline.samples for pipeline in pipelines]
    again = any(stage.recompute for stage in plan.stages)
    common = [
        f"--total-layer-num {request.layers.blocks}",
        f"--chunks {' '.join(map(str, chunks))}",
        f"--global_bsz_size {' '.join(map(str, samples))}",
        "--pipeline-type 1F1B",
        f"--mixed_precision {'bf16' if plan.job.precision == 'mixed' else 'fp32'}",
        *(["--checkpoint-layers"] if again else []),
    ]
    flags = [f'--hetero_configs "{_compact(configs)}"', f'--layer_partitions "{_compact(partitions)}"', *common]
    launch = request.launch("pipeline", "llama_train.py", flags)
    data = {"hetero_configs": configs, "layer_partitions": partitions}
    warnings = [*ahead_warning(request, "HexiScale"), *launch.warnings]
    for p, stages in enumerate(partitions):
        if 0 in stages:
            warnings.append(f"pipeline {p} stage {stages.index(0)} has no decoder layer, which HexiScale may not allow")
    if again:
        warnings += _recomputes_all(request)
    if len(set(samples)) > 1:
        warnings.append(
            "HexiScale weighs pipelines equally whatever their share of the batch "
            f"({', '.join(map(str, samples))} samples here): the plan means every sample to weigh the same"
        )
    return Export(
        format="hexiscale",
        files=(
            ("hexiscale.args", "\n".join(flags) + "\n"),
            ("hexiscale.json", files.dumps(data)),
            ("ranks.csv", launch.table),
        ),
        commands=launch.commands,
        notes=("hexiscale.json replaces the first two flags: --all_hetero_configs_path hexiscale.json",),
        warnings=tuple(warnings),
        plan=plan,
    )


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _recomputes_all(request: Request) -> tuple[str, ...]:
    """It recomputes every decoder layer or none."""
    if all(request.recomputed(stage) == request.blocks(stage) for stage in request.plan.stages):
        return ()
    return ("recomputes all decoder layers, the plan only some: slower than planned",)


def parse(text: str, where: str = "hexiscale") -> Layout:
    """A configuration from the flags.

    Raises
    ------
    ValueError
        Naming the flag.
    """
    flags = Flags.parse(text, where)
    configs, partitions = (_rows(flags, name) for name in ("hetero_configs", "layer_partitions"))
    chunks, samples = (flags.counts(name) for name in ("chunks", "global_bsz_size"))
    if chunks is None or samples is None:
        raise flags.wrong("chunks" if chunks is None else "global_bsz_size", "missing")
    count = len(configs)
    if len(partitions) != count:
        raise flags.wrong("layer_partitions", f"{len(partitions)} pipelines, --hetero-configs has {count}")
    # Shorter lists are padded with their last entry, as HexiScale does.
    chunks, samples = ((*each, *[each[-1]] * (count - len(each)))[:count] for each in (chunks, samples))
    layouts = flags.tables("pp_layouts")
    if layouts is not None and [[len(each) for each in row] for row in layouts] != configs:
        raise flags.wrong("pp_layouts", "does not give every stage as many devices as --hetero-configs")
    again = "checkpoint_layers" in flags
    pipelines = []
    for p, (config, partition) in enumerate(zip(configs, partitions)):
        if len(config) != len(partition):
            raise flags.wrong(
                "layer_partitions", f"pipeline {p}: {len(partition)} stages, --hetero-configs {len(config)}"
            )
        if not chunks[p] or samples[p] % chunks[p]:
            raise flags.wrong("chunks", f"pipeline {p}: {samples[p]} samples in {chunks[p]} micro-batches")
        pipelines.append(
            PipelineLayout(
                stages=tuple(
                    StageLayout(
                        blocks=blocks,
                        embedding=s == 0,
                        head=s + 1 == len(config),
                        tp=tp,
                        devices=tuple(layouts[p][s]) if layouts else (),
                        recompute=tuple(range(blocks)) if again else (),
                        in_flight=None if flags.text("pipeline_type") == "1F1B" else chunks[p],
                    )
                    for s, (tp, blocks) in enumerate(zip(config, partition))
                ),
                micro_batch=samples[p] // chunks[p],
                num_micro_batches=chunks[p],
            )
        )
    return Layout(pipelines=tuple(pipelines), order="pipeline")


def _rows(flags: Flags, name: str) -> list[list[int]]:
    found = flags.rows(name)
    if not found or not all(found):
        raise flags.wrong(name, "missing" if found is None else "has no pipeline, or one without stages")
    return found
