"""Galvatron: the JSON of a searched strategy, both ways. Lists are strings, an entry per decoder layer.

The ends go with the outermost decoder layers (galvatron/core/runtime/hybrid_parallel_config.py), ranks stage by stage.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from planner import files
from planner.exporters.base import Export, NotExpressible, Request, ahead_warning, shape_of
from planner.exporters.layout import Layout, PipelineLayout, StageLayout, object_of
from planner.importers.reading import Json

SHARDED = "model state is counted whole on every rank, although data parallelism shards it"


def export(request: Request) -> Export:
    """The JSON that ``--galvatron_config_path`` reads."""
    plan, shape, layers = request.plan, shape_of(request.plan, "Galvatron"), request.layers
    division = [layers.num_blocks(cut) for cut in shape.cuts]
    if 0 in division:
        raise NotExpressible(
            f"Galvatron puts the ends with the outermost decoder layers, but stage {division.index(0)} has none"
        )
    recomputed = {layers.block_range((l, l + 1))[0] for l in shape.recompute if layers.num_blocks((l, l + 1))}
    count = layers.blocks
    data = {
        "pp_deg": shape.num_stages,
        "tp_sizes_enc": _joined([shape.tp] * count),
        "tp_consecutive_flags": _joined([1] * count),
        "cp_sizes_enc": _joined([1] * count),
        "dp_types_enc": _joined([0] * count),
        "use_sp": _joined([0] * count),
        "checkpoint": _joined(int(l in recomputed) for l in range(count)),
        "global_bsz": shape.global_batch,
        "chunks": shape.num_micro_batches,
        "pp_division": _joined(division),
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "ddp",
        "vtp": shape.tp,
        "vsp": 0,
        "vcp": 1,
        "embed_sdp": 0,
    }
    precision = "bf16" if plan.job.precision == "mixed" else "fp32"
    launch = request.launch(
        "stage", "train_dist.py", [f"--galvatron_config_path galvatron.json --mixed_precision {precision}"]
    )
    return Export(
        format="galvatron",
        files=(("galvatron.json", files.dumps(data)), ("ranks.csv", launch.table)),
        commands=launch.commands,
        warnings=(*_differing(request), *ahead_warning(request, "Galvatron"), *launch.warnings),
        plan=plan,
    )


def _joined(values: object) -> str:
    return ",".join(map(str, values))  # type: ignore[call-overload]


def _differing(request: Request) -> tuple[str, ...]:
    sets = {tuple(l for stage in pipeline.stages for l in stage.recompute) for pipeline in request.plan.pipelines}
    return ("layers that one pipeline recomputes are recomputed by all",) if len(sets) > 1 else ()


def parse(text: str, where: str = "galvatron") -> Layout:
    """A configuration from the JSON.

    Raises
    ------
    ValueError
        Naming the key.
    """
    data = Json(object_of(text, where), Path(where))
    pp, degrees, chunks = data.at("pp_deg").count(1), _counts(data.at("tp_sizes_enc")), data.at("chunks").count(1)
    num_layers = len(degrees)
    division = _division(data, pp, num_layers)
    checkpoint = _counts(data.at("checkpoint")) if data.has("checkpoint") else [0] * num_layers
    if len(checkpoint) != num_layers:
        raise ValueError(f"{data.at('checkpoint').where}: {len(checkpoint)} entries for {num_layers} layers")
    for key, allowed in (("tp_sizes_enc", degrees[:1]), ("cp_sizes_enc", [1]), ("use_sp", [0])):
        if data.has(key) and set(_counts(data.at(key))) != set(allowed):
            raise ValueError(f"{data.at(key).where}: the planner prices {allowed[0]} for every layer alone")
    gpipe = data.has("pipeline_type") and data.at("pipeline_type").text() != "pipedream_flush"
    edges = list(itertools.accumulate(division, initial=0))
    stages = tuple(
        StageLayout(
            blocks=end - first,
            embedding=first == 0,
            head=end == num_layers,
            tp=degrees[0],
            recompute=tuple(n for n, again in enumerate(checkpoint[first:end]) if again),
            in_flight=chunks if gpipe else None,
        )
        for first, end in itertools.pairwise(edges)
    )
    sharded = data.has("dp_types_enc") and any(_counts(data.at("dp_types_enc")))
    sharded |= data.has("default_dp_type") and data.at("default_dp_type").text() != "ddp"
    return Layout(
        pipelines=(PipelineLayout(stages=stages, num_micro_batches=chunks),),
        copies=None,
        global_batch=data.at("global_bsz").count(1),
        order="stage",
        warnings=("model state is counted whole on every rank, although data parallelism shards it",)
        if sharded
        else (),
    )


def _counts(entry: Json) -> list[int]:
    """Whole numbers in a text such as ``1,1,2``."""
    words = entry.text().split(",")
    for word in words:
        if not word.strip().isdecimal():
            raise ValueError(f"{entry.where}: {word!r} is not a whole number, expected a text such as '1,1,2'")
    return [int(word) for word in words]


def _division(data: Json, pp: int, num_layers: int) -> list[int]:
    """Decoder layers per stage; left out, equal ones and the rest on the last."""
    if not data.has("pp_division"):
        even = num_layers // pp
        return [even] * (pp - 1) + [num_layers - even * (pp - 1)]
    division = _counts(data.at("pp_division"))
    if len(division) != pp or sum(division) != num_layers or 0 in division:
        raise ValueError(f"{data.at('pp_division').where}: {division} is not {pp} stages of {num_layers} layers in all")
    return division
