"""``hpp import``, ``estimate``, ``export``, ``evaluate``: measurements and plans of others, and plans for others."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner import files
from planner.cluster import Cluster
from planner.job import Job
from planner.plans import WIDTH, Plan, wrapped
from planner.profile import ModelProfile

if TYPE_CHECKING:
    from planner import estimate


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands."""
    _add_import(commands)
    _add_estimate(commands)

    export = commands.add_parser("export", help="write a plan for our runtime or another system")
    export.set_defaults(run=_export)
    export.add_argument("plan", metavar="PLAN")
    export.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help="run (ours), hexiscale, hetu, torch; of pipelines all alike: megatron, torchtitan, deepspeed, colossalai,"
        " galvatron, flagscale; the launch alone: torchrun, accelerate; for a tracker: wandb",
    )
    export.add_argument("--profile", metavar="PROFILE", help="says which layers are embedding and head")
    export.add_argument("--cluster", metavar="CLUSTER", help="needed for --uniform")
    export.add_argument("--uniform", action="store_true", help="the nearest plan of equal pipelines where it needs one")
    export.add_argument("--names", metavar="FAMILY", help="module names: llama, gpt2, opt, gpt-neox, torchtitan")
    export.add_argument("--ends", type=_pair, metavar="E,H", help="layers of embedding and head, without a profile")
    export.add_argument("--master", metavar="HOST", help="address of the first node")
    export.add_argument("--port", type=int, default=29500, metavar="N")
    export.add_argument("--script", metavar="FILE", help="training script of the launch lines")
    export.add_argument("-o", "--output", metavar="PATH", help="directory, or file for the main file alone")

    evaluate = commands.add_parser("evaluate", help="predict a plan that somebody already runs, without a search")
    evaluate.set_defaults(run=_evaluate)
    evaluate.add_argument("profile", metavar="PROFILE")
    evaluate.add_argument("cluster", metavar="CLUSTER")
    evaluate.add_argument("source", metavar="FILE|TEXT")
    evaluate.add_argument(
        "--from",
        dest="format",
        required=True,
        metavar="FORMAT",
        help="megatron (layout string or flags), galvatron, hetu, hexiscale, or ours: run, plan, layout",
    )
    evaluate.add_argument("--job", metavar="FILE")
    evaluate.add_argument("--ends", type=_pair, metavar="E,H", help="layers of embedding and head of the profile")
    evaluate.add_argument("--ranks", metavar="FILE", help="CSV of rank,device, as ranks.csv of an export")
    evaluate.add_argument("--json", action="store_true", help="print the plan as JSON")
    evaluate.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")


def _pair(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+),(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not two counts such as 1,1")
    return int(match[1]), int(match[2])


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts such as 1,2,4")
    return tuple(map(int, text.split(",")))


# hpp import


class _ImportHelp(argparse.Action):
    """Help with the options of the format that stands before it, or of all."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from planner import importers

        names = sorted({*importers.FORMATS, *importers.NETWORKS})
        chosen = [name for name in names if name == getattr(namespace, "format", None)]
        print(parser.format_help())
        for name in chosen or names:
            print("\n".join(_described(name)))
        parser.exit()


def _described(name: str) -> Iterator[str]:
    """What a format takes, in lines."""
    from planner import importers

    for of_network in (False, True):
        if name not in (importers.NETWORKS if of_network else importers.FORMATS):
            continue
        yield f"{name}{' --network' if of_network and name in importers.FORMATS else ''}:"
        taken = importers.options(name, of_network=of_network)
        if not taken:
            yield "  no options"
        for option in taken:
            lead = f"  {option.name}={'|'.join(option.choices) or option.type.__name__.upper()}"
            default = "" if option.default is None else f" (default {option.default})"
            lead = f"{lead:<27}  "
            yield from textwrap.wrap(lead + option.help + default, WIDTH, subsequent_indent=" " * len(lead))
        yield ""


def _add_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    importer = commands.add_parser(
        "import",
        help="convert another planner's measurements",
        description="What the files do not say is given by --set; hpp import FORMAT --help lists it.",
        add_help=False,
    )
    importer.set_defaults(run=_import)
    importer.add_argument("-h", "--help", action=_ImportHelp, help="show this, and what FORMAT takes")
    importer.add_argument(
        "format",
        metavar="FORMAT",
        help="sailor, metis, aceso, galvatron, piper, dnn-partitioning, pipedream, megatron; nnscaler, vtrain",
    )
    importer.add_argument("path", metavar="PATH", help="file or directory of the measurements")
    importer.add_argument("-o", "--output", required=True, metavar="OUT", help="file, or directory for several models")
    importer.add_argument("--network", action="store_true", help="the links as a cluster, not the layers as a profile")
    importer.add_argument(
        "--set",
        dest="given",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="what the files do not say, as backward_factor=2; may be given repeatedly",
    )
    importer.add_argument("--model", metavar="NAME", help="only this model")


def _import(options: argparse.Namespace) -> int:
    from planner import importers

    given = dict(_setting(text) for text in options.given)
    if options.network or (options.format in importers.NETWORKS and options.format not in importers.FORMATS):
        cluster = importers.network(options.format, options.path, **given)
        cluster.save(options.output)
        print(f"{options.output}: {cluster.name}, {len(cluster.devices)} devices on {len(cluster.nodes)} nodes")
        return 0
    profiles = importers.load(options.format, options.path, **given)
    if options.model is not None:
        names = [profile.name for profile in profiles]
        if options.model not in names:
            raise ValueError(f"--model: {options.model!r} is not among {files.did_you_mean(options.model, names)}")
        profiles = tuple(profile for profile in profiles if profile.name == options.model)
    for path, profile in zip(_paths(Path(options.output), profiles), profiles, strict=True):
        profile.save(path)
        devices = ", ".join(profile.device_types)
        print(f"{path}: {profile.name}, {profile.num_layers} layers of {len(profile.kinds)} kinds on {devices}")
        for warning in profile.warnings:
            print("\n".join(wrapped("  warning", warning)))
    return 0


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--set: {text!r} is not OPTION=VALUE")
    return name.replace("-", "_"), value


def _paths(output: Path, profiles: tuple[ModelProfile, ...]) -> list[Path]:
    if not output.suffix:
        output.mkdir(parents=True, exist_ok=True)
        return [output / f"{_file_name(profile.name)}.json" for profile in profiles]
    if len(profiles) > 1:
        models = ", ".join(profile.name for profile in profiles)
        raise ValueError(f"{output}: one file cannot hold {models}; name one of them with --model, or a directory")
    return [output]


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "profile"


# hpp estimate


def _add_estimate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    estimate = commands.add_parser("estimate", help="make a profile from a config.json and data sheets")
    estimate.set_defaults(run=_estimate)
    estimate.add_argument("--list-devices", action="store_true", help="print the device catalogue")
    estimate.add_argument("--config", metavar="FILE", help="config.json of a Hugging Face model")
    estimate.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="[LABEL=]NAME",
        help="of the catalogue; may be given repeatedly",
    )
    estimate.add_argument("--sequence-length", type=int, metavar="N", help="tokens per sample")
    estimate.add_argument("--dtype", default="bf16", choices=("fp32", "tf32", "fp16", "bf16", "fp8"))
    estimate.add_argument("--attention", default="flash", choices=("flash", "eager", "fused-softmax"))
    estimate.add_argument("--micro-batch", type=_counts, default=(1, 2, 4, 8), metavar="B,..")
    estimate.add_argument("--tp", type=_counts, metavar="D,..", help="those that the model allows, if not given")
    estimate.add_argument(
        "--frozen", action="append", default=[], metavar="PART", help="vision, block, head, ... or all"
    )
    estimate.add_argument("--lora", type=int, metavar="RANK", help="adapters on frozen blocks")
    estimate.add_argument(
        "--lora-targets", type=_words, metavar="NAME,..", help="q and v, if not given; also k, o, gate, up, down"
    )
    estimate.add_argument("--images", type=int, metavar="N", help="per sample, for models that see")
    estimate.add_argument("--image-size", type=int, metavar="PIXELS")
    estimate.add_argument("--measured", type=float, metavar="TOKENS_PER_S", help="scales all times to a run you had")
    estimate.add_argument("--measured-device", metavar="LABEL", help="of that run; the first, if not given")
    for name, what in (
        ("tp", "devices per stage"),
        ("stages", "stages per pipeline"),
        ("pipelines", "pipelines"),
        ("micro-batch", "samples per micro-batch"),
        ("num-micro-batches", "micro-batches per pipeline"),
    ):
        estimate.add_argument(f"--measured-{name}", type=int, metavar="N", help=f"{what} of that run")
    estimate.add_argument("--measured-recompute", action="store_true", default=None)
    estimate.add_argument("--name", metavar="NAME", help="of the model, if not the one in the config")
    estimate.add_argument("-o", "--output", metavar="OUT", help="profile")


def _estimate(options: argparse.Namespace) -> int:
    from planner import catalogue, estimate
    from planner.architecture import Images

    if options.list_devices:
        print(catalogue.listing())
        return 0
    for name in ("config", "device", "sequence_length", "output"):
        if getattr(options, name) in (None, []):
            raise ValueError(
                f"--{name.replace('_', '-')}: missing; hpp estimate needs a config, devices, a sequence length"
                " and an output"
            )
    images = None
    if options.images is not None or options.image_size is not None:
        images = Images(per_sample=1 if options.images is None else options.images, size=options.image_size)
    lora = options.lora
    if options.lora_targets is not None:
        if lora is None:
            raise ValueError("--lora-targets: no effect without --lora")
        lora = estimate.Lora(rank=lora, targets=options.lora_targets)
    profile = estimate.profile(
        options.config,
        options.device,
        sequence_length=options.sequence_length,
        dtype=options.dtype,
        attention=options.attention,
        micro_batches=options.micro_batch,
        tp=options.tp,
        frozen=options.frozen,
        lora=lora,
        images=images,
        measured_tokens_per_s=options.measured,
        measured_on=_measured_on(options),
        name=options.name,
    )
    profile.save(options.output)
    print(f"{options.output}: {profile.name}, {profile.parameters:,} parameters in {profile.num_layers} layers")
    for warning in profile.warnings:
        print("\n".join(wrapped("  warning", warning)))
    return 0


def _measured_on(options: argparse.Namespace) -> estimate.Run:
    from planner import estimate

    names = ("device", "tp", "stages", "pipelines", "micro_batch", "num_micro_batches", "recompute")
    given = {name: value for name in names if (value := getattr(options, f"measured_{name}")) is not None}
    if given and options.measured is None:
        raise ValueError(f"--measured-{next(iter(given)).replace('_', '-')}: no effect without --measured")
    return estimate.Run(**given)


# hpp export, hpp evaluate


def _export(options: argparse.Namespace) -> int:
    from planner import exporters

    done = exporters.export(
        Plan.load(options.plan),
        options.to,
        profile=ModelProfile.load(options.profile) if options.profile is not None else None,
        cluster=Cluster.load(options.cluster) if options.cluster is not None else None,
        uniform=options.uniform,
        names=options.names,
        ends=options.ends,
        master=options.master,
        port=options.port,
        script=options.script,
    )
    for label, texts in (("note", done.notes), ("warning", done.warnings)):
        for text in texts:
            print("\n".join(wrapped(label, text)), file=sys.stderr)
    if options.output is None:
        print(done)
    else:
        for path in done.save(options.output):
            print(f"wrote {path}", file=sys.stderr)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from planner import evaluate
    from planner.exporters.launch import read_ranks

    profile, cluster = ModelProfile.load(options.profile), Cluster.load(options.cluster)
    job = Job.load(options.job) if options.job is not None else None
    layout = evaluate.parse(options.source, options.format)
    ranks = read_ranks(options.ranks) if options.ranks is not None else None
    plan = evaluate.evaluate(profile, cluster, layout, job, ends=options.ends, ranks=ranks)
    if options.output is not None:
        plan.save(options.output)
        print(f"wrote {options.output}", file=sys.stderr)
    print(files.dumps(plan.to_dict()) if options.json else plan, end="" if options.json else "\n")
    return 0
