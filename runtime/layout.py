"""Which process runs what: the ranks of a plan's devices, their stages, micro-batches and gradient blocks. No torch.

One process per device. Devices get ranks node by node, in natural order of the names, which is the order in which
`torchrun` numbers processes if the nodes are started in that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from planner.plans import Pipeline, Plan, Stage


@dataclass(frozen=True, slots=True)
class Place:
    """What one process is: a rank of the tp group that runs one stage of one pipeline."""

    rank: int
    pipeline: int
    stage: int
    tp_rank: int

    def __str__(self) -> str:
        shard = f" tp rank {self.tp_rank}" if self.tp_rank else ""
        return f"rank {self.rank} (pipeline {self.pipeline} stage {self.stage}{shard})"


@dataclass(frozen=True, slots=True)
class Shared:
    """Layers whose gradients are reduced together: a block of the plan, or weights that two layers share.

    Parameters
    ----------
    index
        Position in the one order in which all processes reduce: blocks from the last layer to the first, then tied
        weights.
    layers
        Half-open range of a block; of tied weights the two layers that hold them.
    owners
        (pipeline, stage) of each holder.
    ranks
        Their processes at one tp rank, ascending.
    """

    index: int
    layers: tuple[int, int]
    owners: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    tied: bool = False


@dataclass(frozen=True)
class Layout:
    """A plan laid out over processes."""

    plan: Plan

    def __post_init__(self) -> None:
        for block in self.plan.blocks:
            degrees = {self.plan.pipelines[p].stages[s].tp for p, s in enumerate(block.owners)}
            if len(degrees) > 1:
                raise ValueError(
                    f"layers {block.layers[0]} to {block.layers[1] - 1} run at tp {sorted(degrees)} in different"
                    " pipelines; the runtime reduces gradients between equal shards only (give the job one tp degree)"
                )

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Device of every rank."""
        return tuple(sorted(self.plan.devices, key=_natural))

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return len(self.devices)

    @cached_property
    def _rank_of(self) -> dict[str, int]:
        return {name: rank for rank, name in enumerate(self.devices)}

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """What every rank is."""
        found = [
            Place(rank, p, s, t)
            for p, pipeline in enumerate(self.plan.pipelines)
            for s in range(len(pipeline.stages))
            for t, rank in enumerate(self.unit(p, s))
        ]
        return tuple(sorted(found, key=lambda place: place.rank))

    def unit(self, p: int, s: int) -> tuple[int, ...]:
        """Ranks of a stage's tp group, by tp rank: ascending, as groups of torch number their members."""
        return tuple(sorted(self._rank_of[name] for name in self.plan.pipelines[p].stages[s].devices))

    def pipeline(self, place: Place) -> Pipeline:
        """The pipeline a process belongs to."""
        return self.plan.pipelines[place.pipeline]

    def stage(self, place: Place) -> Stage:
        """The stage a process runs."""
        return self.pipeline(place).stages[place.stage]

    def samples(self, p: int) -> range:
        """Samples of the global batch that a pipeline takes."""
        before = sum(pipeline.samples for pipeline in self.plan.pipelines[:p])
        return range(before, before + self.plan.pipelines[p].samples)

    def shared(self, tp_rank: int) -> tuple[Shared, ...]:
        """Everything that is reduced, in the order in which all processes reduce it."""
        return tuple(self._shared(tp_rank))

    def _shared(self, tp_rank: int) -> Iterator[Shared]:
        index = 0
        for block in reversed(self.plan.blocks):
            owners = tuple(enumerate(block.owners))
            yield Shared(index, block.layers, owners, self._ranks(owners, tp_rank))
            index += 1
        for tied in self.plan.tied_blocks:
            yield Shared(index, tied.layers, tied.owners, self._ranks(tied.owners, tp_rank), tied=True)
            index += 1

    def _ranks(self, owners: tuple[tuple[int, int], ...], tp_rank: int) -> tuple[int, ...]:
        units = [self.unit(p, s) for p, s in owners]
        return tuple(sorted(unit[tp_rank] for unit in units if tp_rank < len(unit)))


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    return tuple((text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name))
