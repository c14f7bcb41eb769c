"""Time and memory of a configuration that someone already runs: the planner's own figures, without a search.

    layout = parse("Et*3|t*5L", "megatron")            pipelines, counts of decoder layers, tp, micro-batches
    plan = evaluate(profile, cluster, layout, job)     the same as a `Plan`, to print, draw, simulate and compare

A configuration that does not fit is priced all the same; its plan says where and by how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from planner import assemble, bound, files, simulate
from planner.assemble import Candidate, Chain
from planner.cluster import Cluster
from planner.cost import DeviceClass
from planner.exporters import galvatron, hetu, hexiscale, megatron
from planner.exporters import run as run_format
from planner.exporters.layers import ModelLayers, model_layers
from planner.exporters.layout import Layout, PipelineLayout, StageLayout, object_of, text_of
from planner.job import Job
from planner.placement import Unit
from planner.plans import Pipeline, Plan, places, size
from planner.profile import ModelProfile
from planner.question import Clock, Question, ask
from planner.stage_split import Stage

MOST_PLAYED = 200_000  # micro-batches on stages up to which the plan is simulated: seconds

Parser = Callable[[str, str], Layout]


FORMATS: dict[str, Parser] = {
    "megatron": megatron.parse,
    "galvatron": galvatron.parse,
    "hetu": hetu.parse,
    "hexiscale": hexiscale.parse,
    "run": lambda text, where: run_format.layout_of(run_format.Run.from_dict(object_of(text, where), where)),
    "plan": lambda text, where: Layout.of_plan(Plan.from_dict(object_of(text, where), where)),
    "layout": lambda text, where: Layout.from_dict(object_of(text, where), where),
}


def parse(source: str | Path, format: str) -> Layout:
    """A configuration in another format.

    Parameters
    ----------
    source
        A file, or the text itself: a Megatron layout string or command line, Galvatron JSON, Hetu or HexiScale flags, a
        plan, a run or a layout of ours.
    format
        A key of `FORMATS`.

    Raises
    ------
    ValueError
        Naming the file, the key or flag, and what would be right.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not among {files.did_you_mean(format, FORMATS)}")
    text, where = text_of(source)
    if not text.strip():
        raise ValueError(f"{where or format}: the text is empty")
    return FORMATS[format](text, where or format)


def evaluate(
    profile: ModelProfile,
    cluster: Cluster,
    layout: Layout,
    job: Job | None = None,
    *,
    ends: tuple[int, int] | None = None,
    ranks: Sequence[str] | None = None,
) -> Plan:
    """Price a configuration as it is.

    Parameters
    ----------
    layout
        Stages, sizes and, where it names them, devices; else they are the cluster's in order.
    job
        What is trained. Batch, tp degrees and micro-batch sizes are those of the layout; only a layout that leaves the
        batch open takes the job's.
    ends
        Layers of the embedding and of the head, where the profile does not tell.
    ranks
        Device of every rank (`planner.exporters.launch.read_ranks`), where the layout names none.

    Returns
    -------
    A plan whose warnings name every stage that does not fit and the bytes it is short.

    Raises
    ------
    ValueError
        If layers or devices do not add up, or a stage was not measured.
    """
    job = job or Job()
    pipelines = layout.placed(cluster, job.global_batch, ranks)
    ranges = _ranges(pipelines, profile, ends)
    job = _job(job, pipelines)
    for p, pipeline in enumerate(pipelines):
        _check_measured(profile, cluster, job, pipeline, p)
    question = ask(profile, cluster, job)
    chains, placed, recompute = [], [], []
    for p, (pipeline, cuts) in enumerate(zip(pipelines, ranges, strict=True)):
        assert pipeline.micro_batch is not None and pipeline.num_micro_batches is not None
        stages, units = [], []
        for s, (stage, (i, j)) in enumerate(zip(pipeline.stages, cuts, strict=True)):
            unit = Unit(tuple(cluster.device(str(name)) for name in stage.devices))
            stages.append(Stage(_class_of(question, unit, f"pipeline {p} stage {s}"), i, j))
            units.append(unit)
        chains.append(Chain(1, pipeline.micro_batch, pipeline.num_micro_batches, tuple(stages)))
        placed.append(tuple(units))
        recompute.append([_recomputed(stage, cut, profile, ends) for stage, cut in zip(pipeline.stages, cuts)])
    _check_devices(placed)
    found = assemble.price(question, Candidate(tuple(chains), 0.0), chains, placed, recompute)
    found = replace(found, pipelines=tuple(_held(made, asked) for made, asked in zip(found.pipelines, pipelines)))
    plan = assemble.to_plan(
        question, found, bound.work_bound(question), Clock(), ("priced as given: nothing was searched",)
    )
    actions = sum(pipeline.num_micro_batches * len(pipeline.stages) for pipeline in plan.pipelines)
    simulated_s = simulate.simulate(plan, cluster).iteration_s if actions <= MOST_PLAYED else None
    return replace(
        plan,
        predicted=replace(plan.predicted, simulated_s=simulated_s),
        warnings=(*plan.warnings, *layout.warnings, *_unranked(layout, cluster, ranks), *_misfits(plan)),
    )


def _unranked(layout: Layout, cluster: Cluster, ranks: Sequence[str] | None) -> Iterator[str]:
    """What was assumed of the devices where nothing names them and they are unlike."""
    if ranks is None and not layout.named and len(cluster.types) > 1:
        yield "no rank map was given: ranks taken to be the devices of the cluster in order"


def _job(job: Job, pipelines: Sequence[PipelineLayout]) -> Job:
    """The job that allows what the configuration does."""
    return replace(
        job,
        global_batch=sum((p.micro_batch or 0) * (p.num_micro_batches or 0) for p in pipelines),
        micro_batches=tuple(sorted({p.micro_batch or 0 for p in pipelines})),
        tp=tuple(sorted({stage.tp for p in pipelines for stage in p.stages})),
        recompute=job.recompute or any(stage.recompute for p in pipelines for stage in p.stages),
        max_depth=None,
        max_classes=None,
    )


def _ranges(
    pipelines: Sequence[PipelineLayout], profile: ModelProfile, ends: tuple[int, int] | None
) -> list[list[tuple[int, int]]]:
    """Layers of the profile that every stage runs."""
    out = []
    for p, pipeline in enumerate(pipelines):
        empty = [s for s, stage in enumerate(pipeline.stages) if stage.empty]
        if empty:
            raise ValueError(f"pipeline {p} stage {empty[0]} is empty: the planner prices stages of at least one layer")
        known = [stage.layers for stage in pipeline.stages if stage.layers is not None]
        if known and len(known) < len(pipeline.stages):
            raise ValueError(f"pipeline {p}: some stages name layers, others count them")
        if known:
            edges = [0, *(end for _, end in known)]
            if [first for first, _ in known] != edges[:-1] or edges[-1] != profile.num_layers:
                raise ValueError(
                    f"pipeline {p}: stages of layers {', '.join(f'[{i}, {j})' for i, j in known)} are not all "
                    f"{profile.num_layers} layers of {profile.name!r} in order"
                )
            out.append(known)
        else:
            out.append(_counted(p, pipeline, model_layers(profile, ends)))
    return out


def _counted(p: int, pipeline: PipelineLayout, layers: ModelLayers) -> list[tuple[int, int]]:
    """Layer ranges from counts of decoder layers."""
    for what, held, there in (
        ("decoder layers", sum(stage.blocks for stage in pipeline.stages), layers.blocks),
        ("multi-token prediction layers", sum(stage.mtp for stage in pipeline.stages), layers.mtp),
    ):
        if held != there:
            raise ValueError(f"pipeline {p}: its stages hold {held} {what}, the profile has {there}")
    cuts, first = [], 0
    for s, stage in enumerate(pipeline.stages):
        end = first + stage.blocks + stage.mtp
        end += layers.embedding * stage.embedding + layers.head * stage.head
        if end == first:
            end_name = "embedding" if stage.embedding else "head"
            raise ValueError(f"pipeline {p} stage {s} runs the {end_name} alone, which is no layer of the profile")
        cuts.append((first, end))
        first = end
    return cuts


def _recomputed(
    stage: StageLayout, cut: tuple[int, int], profile: ModelProfile, ends: tuple[int, int] | None
) -> tuple[int, ...]:
    """Recomputed layers of the profile: those that can be."""
    if stage.layers is None and stage.recompute:
        layers = model_layers(profile, ends)
        first = layers.embedding + layers.block_range(cut)[0]
        chosen = [first + n for n in stage.recompute]
    else:
        chosen = list(stage.recompute)
    return tuple(l for l in sorted(set(chosen)) if cut[0] <= l < cut[1] and profile.kind_of(l).recomputable)


def _check_measured(profile: ModelProfile, cluster: Cluster, job: Job, pipeline: PipelineLayout, p: int) -> None:
    """Every stage has times."""
    b = pipeline.micro_batch or 1
    for s, stage in enumerate(pipeline.stages):
        name = cluster.device(str(stage.devices[0])).type
        if not profile.tp_allowed(stage.tp):
            raise ValueError(
                f"pipeline {p} stage {s}: tp {stage.tp} does not divide the model's {profile.num_heads} heads"
                + (f" and {profile.num_kv_heads} key-value heads" if profile.num_kv_heads else "")
            )
        if profile.layer_costs(name, stage.tp, b, job.extrapolate) is None:
            degrees = ", ".join(map(str, profile.degrees(name))) or "none"
            sizes = ", ".join(map(str, profile.micro_batches(name, stage.tp))) or "none"
            raise ValueError(
                f"pipeline {p} stage {s}: no times of {name} at tp {stage.tp} and micro-batch {b}; measured are tp "
                f"{degrees}, and at tp {stage.tp} micro-batches {sizes}"
            )


def _class_of(question: Question, unit: Unit, where: str) -> int:
    """Index of the class of a unit."""
    wanted = DeviceClass(device_type=unit.devices[0].type, tp=len(unit.devices))
    if wanted not in question.classes:
        raise ValueError(f"{where}: no node has room for {wanted} inside one fast group")
    return question.classes.index(wanted)


def _held(pipeline: Pipeline, asked: PipelineLayout) -> Pipeline:
    """With as many micro-batches in flight as asked for, where that is more than 1F1B holds."""
    stages = []
    for made, stage in zip(pipeline.stages, asked.stages, strict=True):
        most = min(max(stage.in_flight or 0, made.in_flight), pipeline.num_micro_batches)
        memory, share = made.memory, most / made.in_flight
        memory = replace(
            memory, activations=math.ceil(memory.activations * share), logits=math.ceil(memory.logits * share)
        )
        stages.append(replace(made, in_flight=most, memory=memory))
    return replace(pipeline, stages=tuple(stages))


def _check_devices(placed: Sequence[Sequence[Unit]]) -> None:
    names = [device.name for units in placed for unit in units for device in unit.devices]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise ValueError(f"devices: {places(twice)} is used by more than one stage")


def _misfits(plan: Plan) -> list[str]:
    """Stages that need more than they may use."""
    found = []
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            limit = (1 - plan.job.memory_margin) * stage.memory.capacity
            if stage.memory.total > limit + 1:
                found.append(
                    f"pipeline {p} stage {s} ({stage.device_type} tp {stage.tp} on {places(stage.devices)}) does not "
                    f"fit: {size(stage.memory.total)} of {size(limit)}, {size(stage.memory.total - limit)} short"
                )
    return found
