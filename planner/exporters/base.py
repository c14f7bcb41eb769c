"""What the exporters share: the question they are asked, the value they answer with, and pipelines that are alike."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from planner import files
from planner.exporters.launch import Launch
from planner.exporters.layers import NAMES, ModelLayers, Names, model_layers
from planner.plans import Pipeline, Plan, Stage
from planner.profile import ModelProfile


class NotExpressible(ValueError):
    """The other system has no way to say what this plan does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan in the words of another system.

    Parameters
    ----------
    files
        Pairs (name, text).
    commands
        What to run, one shell line each.
    notes
        What the plan has that the other system decides itself, or how to read the files.
    warnings
        Where the other system will do something else than the plan.
    plan
        The plan that was exported: the one given, or the uniform one in its place.
    """

    format: str
    files: tuple[tuple[str, str], ...]
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    plan: Plan

    @property
    def texts(self) -> tuple[tuple[str, str], ...]:
        """All files, the commands among them as ``launch.sh``."""
        lines = [*(f"# {line}" for line in (*self.notes, *(f"warning: {text}" for text in self.warnings)))]
        launch = "\n".join(("#!/bin/sh", *lines, *self.commands)) + "\n"
        return (*self.files, ("launch.sh", launch)) if self.commands else self.files

    def text(self, name: str) -> str:
        """One of the files."""
        found = dict(self.texts)
        if name not in found:
            raise ValueError(f"file {name!r} is not among {files.did_you_mean(name, found)}")
        return found[name]

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Write everything whole: a new directory appears at once with all its files; files of an old one are replaced
        one by one. A path with a suffix gets the main file alone.

        Returns
        -------
        Paths of what was written.
        """
        path = Path(path)
        if path.suffix and not path.is_dir():
            files.write(path, self.files[0][1])
            return (path,)
        if path.is_dir():
            for name, text in self.texts:
                files.write(path / name, text)
        else:
            _write_directory(path, self.texts)
        return tuple(path / name for name, _ in self.texts)

    def __str__(self) -> str:
        parts = [f"# {name}\n{text.rstrip()}" for name, text in self.texts if name != "launch.sh"]
        return "\n\n".join([*parts, "\n".join(self.commands)]).rstrip()


def _write_directory(path: Path, texts: Sequence[tuple[str, str]]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, text in texts:
            files.write(temporary / name, text)
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A plan to export, and what is known about its model.

    Parameters
    ----------
    profile
        What the plan was made from; None if not at hand.
    names
        Module names, a key of `NAMES`; None for what the other system is used with most.
    ends
        Layers of the embedding and of the head, where the profile does not tell.
    master, port
        Rendezvous of torchrun; the first node and 29500 by default.
    script
        What torchrun starts; None for what is usual in the other system.
    """

    plan: Plan
    profile: ModelProfile | None = None
    names: str | None = None
    ends: tuple[int, int] | None = None
    master: str | None = None
    port: int = 29500
    script: str | None = None

    def __post_init__(self) -> None:
        if self.profile is not None and self.profile.num_layers != self.plan_layers:
            raise ValueError(
                f"profile: {self.profile.name!r} has {self.profile.num_layers} layers, the plan {self.plan_layers}"
            )

    @property
    def plan_layers(self) -> int:
        """L."""
        return self.plan.pipelines[0].stages[-1].layers[1]

    @cached_property
    def layers(self) -> ModelLayers:
        """Embedding, decoder layers and head."""
        return model_layers(self.profile, self.ends, self.plan_layers)

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sample, if the profile knows."""
        return None if self.profile is None else self.profile.conditions.sequence_length

    def module_names(self, usual: str) -> Names:
        """The names asked for, or those `usual` in the other system."""
        key = self.names or usual
        if key not in NAMES:
            raise ValueError(f"names: {key!r} is not among {files.did_you_mean(key, NAMES)}")
        return NAMES[key]

    def blocks(self, stage: Stage) -> int:
        """Decoder layers of a stage."""
        return self.layers.num_blocks(stage.layers)

    def recomputed(self, stage: Stage) -> int:
        """Decoder layers of a stage that are recomputed."""
        return sum(self.layers.num_blocks((l, l + 1)) for l in stage.recompute)

    def launch(self, order: str, script: str, arguments: Sequence[str] = ()) -> Launch:
        """The processes, ranks in an order of `Launch.of_plan`; `script` is the usual one of the other system."""
        line = " ".join((self.script or script, *arguments))
        return Launch.of_plan(self.plan, order, line, self.master, self.port)

    def with_plan(self, plan: Plan) -> Request:
        """The same question about another plan of the same model."""
        return replace(self, plan=plan)


Exporter = Callable[[Request], Export]


# Pipelines that are alike.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What all pipelines of a plan have in common: the only thing that systems of one rectangular topology can say.

    Parameters
    ----------
    cuts
        Layer ranges of the stages.
    recompute
        Layers that some pipeline recomputes.
    """

    copies: int
    micro_batch: int
    num_micro_batches: int
    tp: int
    cuts: tuple[tuple[int, int], ...]
    recompute: frozenset[int] = field(default_factory=frozenset)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.cuts)

    @property
    def global_batch(self) -> int:
        """Samples of all pipelines."""
        return self.copies * self.micro_batch * self.num_micro_batches


def shape_of(plan: Plan, system: str) -> Shape:
    """The one shape of a plan's pipelines.

    Raises
    ------
    NotExpressible
        Naming the first difference between two pipelines, or between two stages where there is one tp degree.
    """
    first = plan.pipelines[0]
    for p, pipeline in enumerate(plan.pipelines[1:], start=1):
        differs = difference(first, pipeline)
        if differs:
            raise NotExpressible(f"{system} takes one shape of pipeline, but pipelines 0 and {p} differ: {differs}")
    degrees = [stage.tp for stage in first.stages]
    for s, degree in enumerate(degrees):
        if degree != degrees[0]:
            raise NotExpressible(
                f"{system} takes one tp degree, but stages 0 and {s} differ: tp {degrees[0]} against {degree}"
            )
    return Shape(
        copies=len(plan.pipelines),
        micro_batch=first.micro_batch,
        num_micro_batches=first.num_micro_batches,
        tp=degrees[0],
        cuts=tuple(stage.layers for stage in first.stages),
        recompute=frozenset(l for stage in plan.stages for l in stage.recompute),
    )


def difference(a: Pipeline, b: Pipeline) -> str:
    """The first difference between two pipelines that matters to a system with one shape, in words; empty if none."""
    splits = [" + ".join(str(stage.num_layers) for stage in each.stages) for each in (a, b)]
    for what, x, y in (
        ("stages", len(a.stages), len(b.stages)),
        ("layers", *splits),
        ("tp degrees", *(", ".join(str(stage.tp) for stage in each.stages) for each in (a, b))),
        ("samples per micro-batch", a.micro_batch, b.micro_batch),
        ("micro-batches", a.num_micro_batches, b.num_micro_batches),
    ):
        if x != y:
            more = f" ({splits[0]} against {splits[1]} layers)" if what == "stages" else ""
            return f"{x} {what} against {y}{more}" if what != "layers" else f"{x} layers against {y}"
    return ""


def ahead_warning(request: Request, system: str) -> tuple[str, ...]:
    """A warning where the plan lets forwards run ahead, for systems that run plain 1F1B."""
    ahead = sum(
        stage.in_flight > min(pipeline.num_micro_batches, len(pipeline.stages) - s)
        for pipeline in request.plan.pipelines
        for s, stage in enumerate(pipeline.stages)
    )
    if not ahead:
        return ()
    return (f"the plan lets forwards run ahead on {ahead} stages to hide transfers; {system} runs plain 1F1B",)


def recompute_warning(request: Request, said: Mapping[int, int] | None = None) -> tuple[str, ...]:
    """A warning where the other system recomputes more decoder layers than the plan.

    Parameters
    ----------
    said
        Decoder layers it recomputes on each stage of every pipeline.
    """
    more = [
        f"pipeline {p} stage {s}: {said[s]} instead of {request.recomputed(stage)}"
        for p, pipeline in enumerate(request.plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if said is not None and said.get(s, 0) > request.recomputed(stage)
    ]
    if not more:
        return ()
    shown = "; ".join(more[:4]) + (f" and {len(more) - 4} more" if len(more) > 4 else "")
    return (f"recomputes more decoder layers than planned, and is slower by that: {shown}",)
