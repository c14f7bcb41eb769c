"""Megatron-LM: ``--pipeline-model-parallel-layout`` and the flags around it, both ways.

A layout string lists the stages, PP x VPP of them, separated by bars; stage i is the (i // PP)-th virtual stage of
pipeline rank i % PP. In a stage: ``E`` embedding, ``t`` decoder layer, ``m`` multi-token prediction layer, ``L`` loss
(with head and final norm). ``x*n`` repeats a letter or bar, ``(..)*n`` a group, commas mean nothing, a stage may be
empty.

    Et*3|(tt|)*29,m|L        E ttt | tt | ... 29 times | m | L

Syntax and rules as in megatron/core/transformer/pipeline_parallel_layer_layout.py and megatron/training/arguments.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from planner.exporters.base import Export, NotExpressible, Request, Shape, ahead_warning, recompute_warning, shape_of
from planner.exporters.layout import Flags, Layout, PipelineLayout, StageLayout

LONGEST = 10**6  # letters and bars; more is a slip
_TOKEN = re.compile(r"[EtmL|()]|\*\d+")


# The layout string.


def layout_string(stages: Sequence[str]) -> str:
    """The shortest usual way to write stages such as ``["Ettt", "tttttL"]``: ``Et*3|t*5L``."""
    words = ["".join(_times(letter, len(list(run))) for letter, run in groupby(stage)) for stage in stages]
    parts, n = [], 0
    while n < len(words):
        alike = 1
        while n + alike < len(words) - 1 and words[n + alike] == words[n]:
            alike += 1
        if alike > 2 and n + alike < len(words):
            parts.append(f"({words[n]}|)*{alike}")
        else:
            alike = 1
            parts.append(words[n] + ("|" if n + 1 < len(words) else ""))
        n += alike
    return "".join(parts)


def _times(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}"


def parse_layout(text: str) -> tuple[str, ...]:
    """The stages of a layout string, each as its letters: ``Et*3|t*5L`` as ``("Ettt", "tttttL")``.

    Raises
    ------
    ValueError
        Naming the position of what is no layout.
    """
    return tuple(_unrolled(_tokens(text), text).split("|"))


def _tokens(text: str) -> list[tuple[int, str]]:
    """Tokens with their positions, commas left out wherever they stand."""
    where = [at for at, letter in enumerate(text) if letter != ","]
    compact = text.replace(",", "")
    tokens, at = [], 0
    while at < len(compact):
        match = _TOKEN.match(compact, at)
        if match is None:
            problem = f"{compact[at]!r} is none of E, t, m, L, |, (, ), *n and ,"
            raise ValueError(f"layout {text!r}, position {where[at]}: {problem}")
        tokens.append((where[at], match.group()))
        at = match.end()
    return tokens


def _unrolled(tokens: list[tuple[int, str]], text: str) -> str:
    """Letters and bars after all repetitions."""

    def wrong(at: int, problem: str) -> ValueError:
        return ValueError(f"layout {text!r}, position {at}: {problem}")

    done: list[str] = []  # what is outside a group, each entry repeatable
    group: list[str] | None = None
    opened = 0
    for n, (at, token) in enumerate(tokens):
        if token == "(":
            if group is not None:
                raise wrong(at, "a group inside a group is not allowed")
            group, opened = [], at
        elif token == ")":
            if group is None:
                raise wrong(at, "')' without '('")
            if n + 1 == len(tokens) or not tokens[n + 1][1].startswith("*"):
                raise wrong(at, "a group needs *n behind it")
            if not group:
                raise wrong(at, "an empty group")
            done.append("".join(group))
            group = None
        elif token.startswith("*"):
            target = done if group is None else group
            if not target or tokens[n - 1][1] == "(" or tokens[n - 1][1].startswith("*"):
                raise wrong(at, f"{token} has nothing to repeat")
            if len(target[-1]) * int(token[1:]) > LONGEST:
                raise wrong(at, f"{token} makes it longer than {LONGEST}")
            target[-1] *= int(token[1:])
        else:
            (done if group is None else group).append(token)
    if group is not None:
        raise wrong(opened, "'(' is never closed")
    return "".join(done)


def check_layout(stages: Sequence[str], pp: int, num_layers: int | None = None) -> None:
    """Refuse what Megatron refuses.

    Raises
    ------
    ValueError
        Naming the rule.
    """
    vpp, rest = divmod(len(stages), pp)
    if rest:
        raise ValueError(f"layout: {len(stages)} stages are no multiple of pipeline-model-parallel-size {pp}")
    flat = "".join(stages)
    for letter, name in (("E", "embedding"), ("L", "loss")):
        if flat.count(letter) != 1:
            raise ValueError(f"layout: {flat.count(letter)} times {letter} ({name}), expected once")
    if flat[0] != "E" or flat[-1] != "L":
        raise ValueError(f"layout: starts with {flat[0]} and ends with {flat[-1]}, expected E and L")
    if num_layers is not None and flat.count("t") != num_layers:
        raise ValueError(f"layout: {flat.count('t')} decoder layers (t), the model has {num_layers}")
    with_mtp = [n for n, stage in enumerate(stages) if "m" in stage]
    if with_mtp and flat.rfind("t") > flat.index("m"):
        raise ValueError("layout: a decoder layer (t) after a multi-token prediction layer (m)")
    if len(with_mtp) > 1:
        raise ValueError(f"layout: multi-token prediction layers (m) on {len(with_mtp)} stages, expected on one")
    if with_mtp and with_mtp[0] // pp != vpp - 1:
        raise ValueError(f"layout: m on stage {with_mtp[0]}, which is not the last virtual stage of its rank")


# Out.


def export(request: Request) -> Export:
    """The flags of one rectangular run; ranks in the order that takes fewer lines per node."""
    shape = shape_of(request.plan, "Megatron-LM")
    stages = letters(request, shape)
    check_layout(stages, shape.num_stages, request.layers.blocks)
    recompute, warnings = _recompute(request, shape)
    flags = [
        f"--num-layers {request.layers.blocks}",
        *_model_flags(request),
        f"--tensor-model-parallel-size {shape.tp}",
        f"--pipeline-model-parallel-size {shape.num_stages}",
        *([f'--pipeline-model-parallel-layout "{layout_string(stages)}"'] if shape.num_stages > 1 else []),
        f"--micro-batch-size {shape.micro_batch}",
        f"--global-batch-size {shape.global_batch}",
        *recompute,
        *_job_flags(request, shape),
    ]
    by_stage = request.launch("stage", "pretrain_gpt.py", flags)
    by_pipeline = request.launch("pipeline", "pretrain_gpt.py", [*flags, "--use-tp-pp-dp-mapping"])
    launch = by_pipeline if len(by_pipeline.runs) < len(by_stage.runs) else by_stage
    flags += ["--use-tp-pp-dp-mapping"] if launch is by_pipeline else []
    return Export(
        format="megatron",
        files=(("megatron.args", "\n".join(flags) + "\n"), ("ranks.csv", launch.table)),
        commands=launch.commands,
        notes=("add the flags of the model and the data, which the plan does not know", *_older(request, shape)),
        warnings=(*warnings, *ahead_warning(request, "Megatron-LM"), *launch.warnings),
        plan=request.plan,
    )


def letters(request: Request, shape: Shape) -> list[str]:
    """Stages as layout letters; an end that was not measured goes with the outermost decoder layer."""
    layers, stages = request.layers, []
    for s, (i, j) in enumerate(shape.cuts):
        if 0 < i < layers.embedding:
            raise NotExpressible(
                f"Megatron-LM keeps the embedding in one piece, but stages {s - 1} and {s} share its "
                f"{layers.embedding} layers"
            )
        last = s + 1 == shape.num_stages
        stages.append(
            ("E" if s == 0 else "")
            + "t" * layers.num_blocks((i, j))
            + "m" * layers.num_mtp((i, j))
            + ("L" if last else "")
        )
    return stages


def _model_flags(request: Request) -> list[str]:
    """What the profile knows of the model."""
    profile = request.profile
    flags: list[str] = []
    if profile is None:
        return flags
    if profile.num_heads:
        flags.append(f"--num-attention-heads {profile.num_heads}")
    if profile.num_kv_heads and profile.num_kv_heads != profile.num_heads:
        flags.append(f"--group-query-attention --num-query-groups {profile.num_kv_heads}")
    if request.sequence_length:
        flags.append(f"--seq-length {request.sequence_length}")
    if not any(kind.tied_to for kind in profile.kinds):
        flags.append("--untie-embeddings-and-output-weights")
    if request.layers.mtp:
        flags.append(f"--mtp-num-layers {request.layers.mtp}")
    return flags


def _job_flags(request: Request, shape: Shape) -> list[str]:
    job = request.plan.job
    flags = ["--bf16"] if job.precision == "mixed" else []
    flags.append(f"--optimizer {'adam' if job.optimizer == 'adam' else 'sgd'}")
    if job.optimizer != "adam":
        flags.append(f"--sgd-momentum {0.9 if job.optimizer == 'momentum' else 0}")
    if job.sync == "overlapped" and shape.copies > 1:
        flags.append("--overlap-grad-reduce")
    return flags


def _recompute(request: Request, shape: Shape) -> tuple[list[str], tuple[str, ...]]:
    """One number for all stages, the largest any needs: the first n decoder layers of each."""
    blocks = [request.layers.num_blocks(cut) for cut in shape.cuts]
    most = max(request.recomputed(stage) for stage in request.plan.stages)
    if not most:
        return [], ()
    warnings = recompute_warning(request, {s: min(most, count) for s, count in enumerate(blocks)})
    method = "--recompute-method uniform --recompute-num-layers 1"
    if most < max(blocks):
        method = f"--recompute-method block --recompute-num-layers {most}"
    return [f"--recompute-granularity full {method}"], warnings


def _older(request: Request, shape: Shape) -> list[str]:
    """How versions without layouts say the same, where they can."""
    blocks = [request.layers.num_blocks(cut) for cut in shape.cuts]
    if len(blocks) < 2 or len(set(blocks)) == 1 or request.layers.mtp or 0 in blocks:
        return []
    middle = set(blocks[1:-1]) or {blocks[-1]}
    if len(middle) > 1:
        return []
    flags = f"--decoder-first-pipeline-num-layers {blocks[0]}"
    if blocks[-1] not in middle:
        flags += f" --decoder-last-pipeline-num-layers {blocks[-1]}"
    return [f"without layouts, the same split: {flags}"]


# In.


def parse(text: str, where: str = "megatron") -> Layout:
    """A configuration from a layout string alone, or from the command line of a run.

    Raises
    ------
    ValueError
        Naming the flag.
    """
    flags = Flags.parse(text, where)
    if not flags.values:
        stages = parse_layout(text.strip().strip("'\""))
        check_layout(stages, len(stages))
        return _layout(stages, _Sizes(pp=len(stages)))
    _refuse(flags)
    tp, pp = flags.count("tensor_model_parallel_size", 1), flags.count("pipeline_model_parallel_size", 1)
    assert tp is not None and pp is not None
    stages = _stages(flags, pp)
    world = flags.count("nproc_per_node")
    return _layout(
        stages,
        _Sizes(
            tp=tp,
            pp=pp,
            micro_batch=flags.count("micro_batch_size", 1),
            global_batch=flags.count("global_batch_size"),
            world=None if world is None else world * (flags.count("nnodes", 1) or 1),
            order="pipeline" if "use_tp_pp_dp_mapping" in flags else "stage",
            recompute=_recomputed(flags),
        ),
        tuple(_warnings(flags)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What stands around the layout."""

    tp: int = 1
    pp: int
    micro_batch: int | None = 1
    global_batch: int | None = None
    world: int | None = None
    order: Literal["stage", "pipeline"] = "stage"
    recompute: int = 0


ALL = 1 << 30  # more layers than any stage has


def _layout(stages: Sequence[str], sizes: _Sizes, warnings: tuple[str, ...] = ()) -> Layout:
    if len(stages) > sizes.pp:
        raise ValueError(
            f"layout: {len(stages)} stages on {sizes.pp} ranks: the planner prices one stage per rank, no interleaving"
        )
    shape = PipelineLayout(
        stages=tuple(
            StageLayout(
                blocks=stage.count("t"),
                embedding="E" in stage,
                head="L" in stage,
                mtp=stage.count("m"),
                tp=sizes.tp,
                recompute=tuple(range(min(sizes.recompute, stage.count("t")))),
            )
            for stage in stages
        ),
        micro_batch=sizes.micro_batch,
    )
    return Layout(
        pipelines=(shape,),
        copies=None,
        global_batch=sizes.global_batch,
        world_size=sizes.world,
        order=sizes.order,
        warnings=warnings,
    )


def _stages(flags: Flags, pp: int) -> tuple[str, ...]:
    """The stages: a layout, or the counts that Megatron works out."""
    num_layers = flags.count("num_layers")
    text = flags.text("pipeline_model_parallel_layout")
    if text is not None:
        stages = parse_layout(text)
        check_layout(stages, pp, num_layers)
        return stages
    if num_layers is None:
        raise flags.wrong("num_layers", "missing, and there is no --pipeline-model-parallel-layout")
    first, last = flags.count("decoder_first_pipeline_num_layers"), flags.count("decoder_last_pipeline_num_layers")
    ends = [name for name in ("embedding", "loss") if f"account_for_{name}_in_pipeline_split" in flags]
    if ends and (first or last):
        raise flags.wrong("decoder_first_pipeline_num_layers", "not together with --account-for-..-in-pipeline-split")
    counts = [0] * pp
    left, open_stages = num_layers + len(ends), list(range(pp))
    for s, count in ((0, first), (pp - 1, last)):
        if count is not None and s in open_stages:
            counts[s] = count
            left -= count
            open_stages.remove(s)
    each, rest = divmod(left, len(open_stages)) if open_stages else (0, left)
    if rest or left < 0:
        raise flags.wrong(
            "num_layers", f"{num_layers} layers do not split into {pp} stages: {left} are left for {len(open_stages)}"
        )
    for s in open_stages:
        counts[s] = each
    counts[0] -= "embedding" in ends
    counts[-1] -= "loss" in ends
    if min(counts) < 0:
        raise flags.wrong("num_layers", f"a stage is left with {min(counts)} layers")
    return tuple(("E" if s == 0 else "") + "t" * count + ("L" if s + 1 == pp else "") for s, count in enumerate(counts))


def _recomputed(flags: Flags) -> int:
    """Decoder layers of each stage, from its first, that run again in the backward pass."""
    if flags.text("recompute_granularity") != "full":
        return 0
    method = flags.text("recompute_method")
    if method == "block":
        return flags.count("recompute_num_layers", 1) or 1
    if method == "uniform":
        return ALL
    raise flags.wrong("recompute_method", f"{method!r} is not among uniform, block")


def _refuse(flags: Flags) -> None:
    """What the planner does not model at all."""
    for name in ("context_parallel_size", "expert_model_parallel_size"):
        if (flags.count(name, 1) or 1) > 1:
            raise flags.wrong(name, f"{flags.count(name)}: the planner does not model it")
    for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        if name in flags:
            raise flags.wrong(name, "the planner prices one stage per rank, no interleaving")


def _warnings(flags: Flags) -> list[str]:
    found = []
    if "use_distributed_optimizer" in flags:
        found.append("the optimizer state is counted whole on every rank; --use-distributed-optimizer shards it")
    if flags.values.get("recompute_granularity") == ("selective",) or "recompute_activations" in flags:
        found.append("selective recompute is not modelled: activations are as measured")
    if _recomputed(flags) == ALL and (flags.count("recompute_num_layers", 1) or 1) > 1:
        found.append("uniform recompute of several layers at once is counted as of each layer alone")
    return found
