"""Plans in the words of other systems. `FORMATS` maps a name to its exporter; `export` is what users call.

Whole plans: run (our runtime), hexiscale, hetu, torch. One shape of pipeline: megatron, torchtitan, deepspeed,
colossalai, galvatron, and along one pipeline of unlike devices flagscale. Launch alone: torchrun, accelerate, wandb.
A format that cannot say what the plan does refuses with the first reason, or takes the nearest uniform plan if asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.exporters import (
    colossalai,
    deepspeed,
    flagscale,
    galvatron,
    hetu,
    hexiscale,
    launchers,
    megatron,
    parts,
    run,
)
from planner.exporters.base import Export, Exporter, NotExpressible, Request
from planner.files import did_you_mean

if TYPE_CHECKING:
    from planner.cluster import Cluster
    from planner.plans import Plan
    from planner.profile import ModelProfile

FORMATS: dict[str, Exporter] = {
    "run": run.export,
    "hexiscale": hexiscale.export,
    "hetu": hetu.export,
    "torch": parts.torch,
    "megatron": megatron.export,
    "torchtitan": parts.torchtitan,
    "deepspeed": deepspeed.export,
    "colossalai": colossalai.export,
    "galvatron": galvatron.export,
    "flagscale": flagscale.export,
    "torchrun": launchers.torchrun,
    "accelerate": launchers.accelerate,
    "wandb": launchers.wandb,
}

__all__ = ["FORMATS", "Export", "Exporter", "NotExpressible", "Request", "export"]


def export(
    plan: Plan,
    format: str,
    *,
    profile: ModelProfile | None = None,
    cluster: Cluster | None = None,
    uniform: bool = False,
    names: str | None = None,
    ends: tuple[int, int] | None = None,
    master: str | None = None,
    port: int = 29500,
    script: str | None = None,
) -> Export:
    """Write a plan in another format.

    Parameters
    ----------
    format
        A key of `FORMATS`.
    profile
        What the plan was made from: says which layers are embedding and head, heads and sequence length.
    cluster
        Needed for `uniform` only.
    uniform
        If the format cannot express the plan, take the fastest plan of equal pipelines that it can, and say what that
        costs.
    names
        Module names, a key of `planner.exporters.layers.NAMES`.
    ends
        Layers of the embedding and of the head, where there is no profile or it does not tell.
    master, port
        Rendezvous of torchrun; the first node in use and 29500 by default.
    script
        What is started, in place of the other system's usual script.

    Raises
    ------
    NotExpressible
        If the format cannot say what the plan does, naming the first reason.
    ValueError
        For an unknown format, or where something is missing.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not among {did_you_mean(format, FORMATS)}")
    request = Request(plan=plan, profile=profile, names=names, ends=ends, master=master, port=port, script=script)
    try:
        return FORMATS[format](request)
    except NotExpressible as error:
        if not uniform:
            raise NotExpressible(f"{error}; the nearest uniform plan can be exported instead (uniform)") from None
        if profile is None or cluster is None:
            missing = "profile" if profile is None else "cluster"
            raise ValueError(f"uniform: needs the {missing} that the plan was made for") from None
        from planner.exporters.nearest import nearest_uniform

        return nearest_uniform(request, cluster, FORMATS[format], str(error))
