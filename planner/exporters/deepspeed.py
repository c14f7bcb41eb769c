"""DeepSpeed pipelines: ``PipelineModule`` takes no list of stages, so a subclass sets the bounds."""

from __future__ import annotations

from planner import files
from planner.exporters.base import Export, Request, Shape, ahead_warning, recompute_warning, shape_of

MODULE = '''"""Stages as planned: pass the layers of the profile, {count} of them, one spec each."""

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import {topology}

PARTS = {parts}


class PlannedPipelineModule(PipelineModule):
    """A pipeline cut at PARTS, bounds over the layer specs."""

    def _partition_layers(self, method="planned"):
        if len(self._layer_specs) != PARTS[-1]:
            raise ValueError(f"{{len(self._layer_specs)}} layer specs, the plan cuts {{PARTS[-1]}}")
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def build(layers, loss_fn):
    return PlannedPipelineModule(
        layers=layers,
        loss_fn=loss_fn,
        topology={topology}({sizes}),
        activation_checkpoint_interval={interval},
    )
'''


def export(request: Request) -> Export:
    """The module, the configuration and the launch."""
    plan, shape = request.plan, shape_of(request.plan, "DeepSpeed")
    parts = [0, *(end for _, end in shape.cuts)]
    topology, sizes = "PipeDataParallelTopology", f"num_pp={shape.num_stages}, num_dp={shape.copies}"
    if shape.tp > 1:
        topology = "PipeModelDataParallelTopology"
        sizes = f"num_pp={shape.num_stages}, num_mp={shape.tp}, num_dp={shape.copies}"
    text = MODULE.format(
        count=parts[-1], topology=topology, parts=parts, sizes=sizes, interval=1 if shape.recompute else 0
    )
    launch = request.launch("stage", "train.py", ["--deepspeed --deepspeed_config ds_config.json"])
    return Export(
        format="deepspeed",
        files=(
            ("pipeline.py", text),
            ("ds_config.json", files.dumps(_config(request, shape))),
            ("ranks.csv", launch.table),
        ),
        commands=launch.commands,
        notes=("one layer spec per layer of the profile, the ends among them",)
        + (("tp needs layers that are parallel themselves: DeepSpeed only places them",) if shape.tp > 1 else ()),
        warnings=(*_recompute(request, shape), *ahead_warning(request, "DeepSpeed"), *launch.warnings),
        plan=plan,
    )


def _config(request: Request, shape: Shape) -> dict[str, object]:
    config: dict[str, object] = {
        "train_batch_size": shape.global_batch,
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.num_micro_batches,
    }
    if request.plan.job.precision == "mixed":
        config["bf16"] = {"enabled": True}
    return config


def _recompute(request: Request, shape: Shape) -> tuple[str, ...]:
    if not shape.recompute:
        return ()
    return recompute_warning(request, {s: request.layers.num_blocks(cut) for s, cut in enumerate(shape.cuts)})
