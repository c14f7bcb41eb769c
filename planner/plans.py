"""Plans: pipelines of stages with predicted times, memory and bound; their JSON, their printed form, their audit.

`Plan.check` is the second opinion on the search. It recomputes a plan from profile, cluster and job in plain loops
over layers and devices and shares no formula with `planner.cost` or the solvers, so a slip there shows here.

    p, s, l pipeline, stage, layer; b samples per micro-batch; m micro-batches; S stages; W in flight; tau least tp
"""

from __future__ import annotations

import math
import re
import string
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from planner.files import MAPPING, Document
from planner.job import Job

if TYPE_CHECKING:
    import pandas

    from planner.cluster import Cluster, Link
    from planner.profile import Cell, LayerKind, ModelProfile

GIB = float(1 << 30)
WIDTH = 112  # columns of the printed plan
MOST_ACTIONS = 20_000  # that a notebook plays to show a plan

# What may differ between a stored and a recomputed figure: rounding to whole bytes, order of summation.
BYTES_SLACK = 4096
RELATIVE_SLACK = 1e-6


class Infeasible(Exception):
    """No plan answers the question; says what came nearest and what would help.

    Parameters
    ----------
    message
        What is impossible, without the details below, which the printed form adds.
    stage, layer
        Position in the nearest miss.
    device_type
        Where it does not fit.
    short_bytes
        Bytes missing there.
    remedy
        The cheapest change that would fit, as a phrase: "allow recompute".
    """

    def __init__(
        self,
        message: str,
        *,
        stage: int | None = None,
        layer: int | None = None,
        device_type: str | None = None,
        short_bytes: float | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.layer = layer
        self.device_type = device_type
        self.short_bytes = short_bytes
        self.remedy = remedy

    @property
    def nearest_miss(self) -> str:
        """The place and the missing GiB in words; empty if unknown."""
        words = [f"stage {self.stage}"] if self.stage is not None else []
        words += [f"layer {self.layer}"] if self.layer is not None else []
        words += [f"on {self.device_type}"] if self.device_type is not None else []
        words += [f"{size(self.short_bytes)} short"] if self.short_bytes is not None else []
        return " ".join(words)

    def __str__(self) -> str:
        parts = [self.message]
        if self.nearest_miss:
            parts.append(f"nearest miss: {self.nearest_miss}")
        if self.remedy:
            parts.append(f"cheapest change: {self.remedy}")
        return "; ".join(parts)


# Values.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes per device of one stage, by category.

    Parameters
    ----------
    weights, gradients, optimizer
        Model state; weights tied inside the stage once.
    activations, logits
        Kept for the backward pass, of all micro-batches in flight.
    workspace
        Largest temporary need of a layer, plus the working set of recomputation.
    sync_buffer
        For gradient sync with other pipelines.
    context
        Driver, libraries, communicators.
    capacity
        Memory of the device; a plan uses at most 1 - margin of it.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int
    sync_buffer: int
    context: int
    capacity: int

    def __post_init__(self) -> None:
        for name in CATEGORIES:
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} bytes is negative")
        if self.capacity < 1:
            raise ValueError(f"capacity: {self.capacity} bytes is no memory")

    @property
    def total(self) -> int:
        """Bytes in use."""
        return sum(getattr(self, name) for name in CATEGORIES)

    @property
    def fraction(self) -> float:
        """Share of the capacity in use."""
        return self.total / self.capacity


CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "workspace", "sync_buffer", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Contiguous layers on the tp devices of one type.

    Parameters
    ----------
    layers
        Half-open range.
    devices
        ``node:index``, one per tp rank.
    recompute
        Layers whose activations are recomputed in the backward pass.
    in_flight
        Micro-batches held at once: min(m, S - s) under 1F1B, more where forwards run ahead to hide transfers. The stage
        runs one forward fewer before its first forward-backward pair (warm-up).
    forward_s, backward_s, recompute_s, transfer_s
        Seconds per micro-batch; transfers are one way over each of the two cuts.
    send_s, send_bytes
        One micro-batch to the next stage, one way; the gradient takes as long back. 0 on the last stage.
    sync_s, update_s
        Gradient ring and optimizer step, seconds per iteration, nothing hidden.
    """

    device_type: str
    tp: int
    layers: tuple[int, int]
    devices: tuple[str, ...]
    recompute: tuple[int, ...] = ()
    in_flight: int
    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    transfer_s: float = 0.0
    send_s: float = 0.0
    send_bytes: int = 0
    sync_s: float = 0.0
    update_s: float = 0.0
    memory: StageMemory

    def __post_init__(self) -> None:
        i, j = self.layers
        if not 0 <= i < j:
            raise ValueError(f"layers: [{i}, {j}) is not a range of at least one layer")
        if not self.devices:
            raise ValueError("devices: a stage needs at least one device")
        for name in ("tp", "in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        if self.send_bytes < 0:
            raise ValueError(f"send_bytes: {self.send_bytes} bytes is negative")
        _require_seconds(self, "forward_s", "backward_s", "recompute_s", "transfer_s", "send_s", "sync_s", "update_s")

    @property
    def num_layers(self) -> int:
        """Layers it runs."""
        return self.layers[1] - self.layers[0]

    @property
    def compute_s(self) -> float:
        """Seconds of arithmetic per micro-batch."""
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def load_s(self) -> float:
        """Seconds per micro-batch, transfers included."""
        return self.compute_s + self.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages that hold the whole model, and their share of the global batch.

    Parameters
    ----------
    micro_batch
        Samples per micro-batch.
    time_s
        Planning form, sum of loads + (m - 1) x largest load, without sync and update.
    """

    micro_batch: int
    num_micro_batches: int
    stages: tuple[Stage, ...]
    time_s: float

    def __post_init__(self) -> None:
        for name in ("micro_batch", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        if not self.stages:
            raise ValueError("stages: a pipeline needs at least one stage")
        _require_seconds(self, "time_s")

    @property
    def samples(self) -> int:
        """Samples of the global batch it takes."""
        return self.micro_batch * self.num_micro_batches

    @property
    def bottleneck(self) -> int:
        """Index of the stage with the largest load."""
        return max(range(len(self.stages)), key=lambda s: (self.stages[s].load_s, -s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A maximal run of layers with the same owners: the unit of gradient sync.

    Parameters
    ----------
    owners
        Stage index in each pipeline.
    gradient_bytes
        Bytes each rank reduces: those of the layers divided by the smallest tp degree, without tied weights that are
        reduced on their own.
    num_chunks, reduce_s
        All-reduce calls it takes, and their seconds on the slowest link between its owners when nothing else runs
    """

    layers: tuple[int, int]
    owners: tuple[int, ...]
    gradient_bytes: int
    num_chunks: int = 0
    reduce_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.layers[0] < self.layers[1]:
            raise ValueError(f"layers: [{self.layers[0]}, {self.layers[1]}) is not a range of at least one layer")
        _require_reduction(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedBlock:
    """Weights that two layers share, held by more than one stage of a pipeline: reduced last, over all their owners.

    Parameters
    ----------
    layers
        The two layers.
    owners
        (pipeline, stage) of every holder.
    gradient_bytes, num_chunks, reduce_s
        As in `Block`.
    """

    layers: tuple[int, int]
    owners: tuple[tuple[int, int], ...]
    gradient_bytes: int
    num_chunks: int = 1
    reduce_s: float = 0.0

    def __post_init__(self) -> None:
        if len(set(self.owners)) < 2:
            raise ValueError(f"owners: {list(self.owners)} are not at least two stages")
        _require_reduction(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predicted figures of one iteration.

    Parameters
    ----------
    iteration_s
        pipeline_s + sync_s + update_s.
    pipeline_s
        Time of the slowest pipeline.
    sync_s
        Gradient sync that is not hidden behind the backward pass.
    bubble_fraction
        Idle share of the devices' time.
    floor_s
        No schedule of these stages is faster that leaves backward passes whole.
    one_f_one_b_s
        Slowest pipeline under the 1F1B form with warm-up and cool-down idle.
    simulated_s
        Iteration time of `planner.simulate`, which plays every action; None if it was not played.
    model_flops_utilization
        FLOP of the model without recompute over peak FLOP of the devices, if peaks are known.
    tokens_per_s
        If the profile knows its sequence length.
    """

    iteration_s: float
    pipeline_s: float
    sync_s: float
    update_s: float
    bubble_fraction: float
    samples_per_s: float
    floor_s: float
    one_f_one_b_s: float
    model_flops_utilization: float | None = None
    tokens_per_s: float | None = None
    simulated_s: float | None = None

    def __post_init__(self) -> None:
        _require_seconds(self, "iteration_s", "pipeline_s", "sync_s", "update_s", "floor_s", "one_f_one_b_s")
        if not self.iteration_s:
            raise ValueError("iteration_s: 0 is no time for an iteration")
        if self.simulated_s is not None:
            _require_seconds(self, "simulated_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Digests of the inputs, and (name, version) of what computed the plan."""

    profile: str
    cluster: str
    job: str
    versions: tuple[tuple[str, str], ...] = field(default=(), metadata=MAPPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """A training configuration, what it costs, and how far from optimal it can be.

    Parameters
    ----------
    lower_bound_s
        By the planning form no plan under the same restrictions is faster.
    gap
        iteration_s / lower_bound_s - 1.
    proved
        The search finished; False for the best found within a time limit.
    restrictions
        What the search left out, in words.
    stats
        Counters of the search.
    """

    SCHEMA: ClassVar[str] = "hpp-plan/1"

    profile_name: str
    cluster_name: str
    predicted: Predicted
    lower_bound_s: float
    gap: float
    proved: bool = True
    pipelines: tuple[Pipeline, ...]
    blocks: tuple[Block, ...]
    tied_blocks: tuple[TiedBlock, ...] = ()
    idle_devices: tuple[str, ...] = ()
    restrictions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    job: Job = field(default_factory=Job)
    provenance: Provenance
    stats: tuple[tuple[str, float], ...] = field(default=(), metadata=MAPPING)

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise ValueError("pipelines: a plan needs at least one pipeline")
        _require_seconds(self, "lower_bound_s")
        for b, block in enumerate(self.blocks):
            if len(block.owners) != len(self.pipelines):
                raise ValueError(f"blocks[{b}].owners: {len(block.owners)} for {len(self.pipelines)} pipelines")
            self._require_stages(f"blocks[{b}]", enumerate(block.owners))
        for b, tied in enumerate(self.tied_blocks):
            self._require_stages(f"tied_blocks[{b}]", tied.owners)

    def _require_stages(self, where: str, owners: Iterable[tuple[int, int]]) -> None:
        for p, s in owners:
            if not (0 <= p < len(self.pipelines) and 0 <= s < len(self.pipelines[p].stages)):
                raise ValueError(f"{where}.owners: pipeline {p} stage {s} does not exist")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of all pipelines."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices in use."""
        return tuple(device for stage in self.stages for device in stage.devices)

    @property
    def min_tp(self) -> int:
        """Tau: gradients are exchanged in this many shards."""
        return min(stage.tp for stage in self.stages)

    def problems(self, profile: ModelProfile, cluster: Cluster, job: Job | None = None) -> tuple[str, ...]:
        """Everything that is wrong with this plan for these inputs, in words; empty for a sound plan.

        Parameters
        ----------
        job
            The plan's own if None; else it must be the one the plan was made for.
        """
        return Audit(self, profile, cluster, job).problems()

    def check(self, profile: ModelProfile, cluster: Cluster, job: Job | None = None) -> None:
        """Recompute coverage, order, memory, times, counts and device use without the formulas of the search.

        Raises
        ------
        ValueError
            Listing every problem.
        """
        wrong = self.problems(profile, cluster, job)
        if wrong:
            raise ValueError("plan: " + "; ".join(wrong))

    def __repr__(self) -> str:
        given = len(self.devices) + len(self.idle_devices)
        fullest = max(stage.memory.fraction for stage in self.stages)
        return (
            f"<Plan {seconds(self.predicted.iteration_s)} per iteration, {_rate(self.predicted)}, "
            f"{number(len(self.pipelines), 'pipeline')}, {number(len(self.stages), 'stage')}, "
            f"{len(self.devices)}/{given} devices, fullest {fullest:.0%}>"
        )

    def __str__(self) -> str:
        return "\n".join(_printed(self))

    def _repr_html_(self) -> str:
        """The plan as a notebook shows it, with a small Gantt chart where it is played quickly."""
        from planner import page, simulate

        actions = sum(2 * pipeline.num_micro_batches * len(pipeline.stages) for pipeline in self.pipelines)
        return page.plan_html(self, simulate.simulate(self) if actions <= MOST_ACTIONS else None)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per stage; columns name their units.

        Raises
        ------
        ImportError
            Without pandas.
        """
        from planner import page

        return page.to_pandas(self)


class PlanSet(tuple[Plan, ...]):
    """Plans for one question, the best first; prints as a ranked table."""

    def __str__(self) -> str:
        return "\n".join(_ranking(self))

    def _repr_html_(self) -> str:
        from planner import page

        return page.plans_html(self)


def _require_seconds(value: object, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{name}: {number!r} is not a time in seconds")


def _require_reduction(block: Block | TiedBlock) -> None:
    for name, unit in (("gradient_bytes", "bytes"), ("num_chunks", "calls")):
        if getattr(block, name) < 0:
            raise ValueError(f"{name}: {getattr(block, name)} {unit} is negative")
    _require_seconds(block, "reduce_s")


# The audit. Nothing below imports planner.cost.


class Term(NamedTuple):
    """One figure of a stage, recomputed: seconds or bytes, and in words where it comes from."""

    name: str
    value: float
    source: str


class Reading(NamedTuple):
    """What one layer costs on a device type at a tp degree and micro-batch size, and how that is known."""

    origin: str
    extrapolated: bool
    forward_s: float
    backward_s: float
    update_s: float
    activation_bytes: float
    workspace_bytes: float


class HandOver(NamedTuple):
    """One cut of a pipeline: what is sent, and the fastest and slowest pair of devices it may cross."""

    stages: tuple[int, int]
    nbytes: float
    fastest_s: float
    slowest_s: float
    slowest: tuple[str, str]
    link: Link


class Audit:
    """Recomputes the figures of a plan from its inputs; used by `Plan.check` and `hpp explain`.

    Parameters
    ----------
    job
        The plan's own if None.
    """

    def __init__(self, plan: Plan, profile: ModelProfile, cluster: Cluster, job: Job | None = None) -> None:
        self.plan, self.profile, self.cluster, self.job = plan, profile, cluster, job or plan.job
        self.layers = profile.layers
        self.kinds = {kind.name: kind for kind in profile.kinds}
        self.capacity = {device_type.name: device_type.memory_bytes for device_type in cluster.device_types}
        self.devices = {device.name: device for device in cluster.devices}
        self.cells: dict[tuple[str, str, int], list[Cell]] = defaultdict(list)
        for cell in sorted(profile.cells, key=lambda cell: cell.micro_batch):
            self.cells[cell.kind, cell.device_type, cell.tp].append(cell)

    # Recomputed figures.

    def reading(self, kind: str, device_type: str, tp: int, micro_batch: int) -> Reading | None:
        """The measured cell, else the straight line between its neighbours; None where nothing was measured around.

        A job that allows extrapolation also gets cells marked as extrapolated and the line beyond the outermost cells,
        which never gains from size: at least the last figure above, between the share and the whole of the first below.
        """
        cells = self.cells.get((kind, device_type, tp), [])
        known = _between([cell for cell in cells if not cell.extrapolated], micro_batch)
        if known is not None or not self.job.extrapolate:
            return known
        known = _between(cells, micro_batch) or _beyond(cells, micro_batch)
        return known._replace(origin=f"extrapolated, {known.origin}", extrapolated=True) if known is not None else None

    def readings(self, p: int, s: int) -> list[Reading] | None:
        """One per layer of the stage; None if a layer does not exist or was never measured there."""
        stage, b = self.plan.pipelines[p].stages[s], self.plan.pipelines[p].micro_batch
        if stage.layers[1] > len(self.layers):
            return None
        found = []
        for kind in self.layers[slice(*stage.layers)]:
            reading = self.reading(kind, stage.device_type, stage.tp, b)
            if reading is None:
                return None
            found.append(reading)
        return found

    def times(self, p: int, s: int) -> tuple[Term, ...]:
        """Seconds of the stage that the profile alone decides: forward, backward, recompute, update."""
        stage = self.plan.pipelines[p].stages[s]
        found = self.readings(p, s)
        if found is None:
            return ()
        names = [self.layers[l] for l in range(*stage.layers)]
        again = [(self.layers[l], r) for l, r in zip(range(*stage.layers), found) if l in stage.recompute]
        updates = [reading.update_s for reading in found]
        once = self.profile.conditions.update_per == "stage"
        update_source = _spelled([(n, r.update_s, r.origin) for n, r in zip(names, found)])
        return (
            Term(
                "forward_s",
                sum(reading.forward_s for reading in found),
                _spelled([(n, r.forward_s, r.origin) for n, r in zip(names, found)]),
            ),
            Term(
                "backward_s",
                sum(reading.backward_s for reading in found),
                _spelled([(n, r.backward_s, r.origin) for n, r in zip(names, found)]),
            ),
            Term(
                "recompute_s",
                sum(reading.forward_s for _, reading in again),
                _spelled([(n, r.forward_s, r.origin) for n, r in again]) or "nothing recomputed",
            ),
            Term(
                "update_s",
                max(updates) if once else sum(updates),
                "largest of its layers, one figure per stage" if once else update_source,
            ),
        )

    def input_bytes(self, l: int, micro_batch: int) -> float:
        """Bytes of one micro-batch that arrive at layer l."""
        return 0.0 if l == 0 else float(self.kinds[self.layers[l - 1]].output_bytes * micro_batch)

    def memory(self, p: int, s: int) -> tuple[Term, ...]:
        """Bytes of the stage by category; empty if a layer does not exist or was never measured there."""
        pipeline = self.plan.pipelines[p]
        stage, b = pipeline.stages[s], pipeline.micro_batch
        found = self.readings(p, s)
        if found is None:
            return ()
        i, j = stage.layers
        tp, state = stage.tp, self.job.state
        in_flight = max(stage.in_flight, self._least_in_flight(p, s))
        kinds = [self.kinds[self.layers[l]] for l in range(i, j)]

        held, trained, tied = 0, 0, 0
        present = {kind.name for kind in kinds}
        for kind in kinds:
            here, learning = _on_rank(kind, tp), _trained_on_rank(kind, tp)
            if kind.tied_to in present:
                share = math.ceil(kind.tied_parameters / tp)
                here, learning, tied = here - share, max(learning - share, 0), tied + share
            held += here
            trained += learning

        kept, inputs = 0.0, self.input_bytes(i, b)
        logits = 0.0
        for l, kind, reading in zip(range(i, j), kinds, found):
            kept += self.input_bytes(l, b) if l in stage.recompute else reading.activation_bytes
            logits += kind.logits_bytes * b / tp

        workspace = max(reading.workspace_bytes for reading in found)
        rework = 0.0
        if stage.recompute:
            for name in set(self.layers):
                reading_here = self.reading(name, stage.device_type, tp, b)
                if self.kinds[name].recomputable and reading_here is not None:
                    rework = max(rework, reading_here.activation_bytes)

        sync_buffer, sync_source = self._sync_buffer(kinds, tp)
        context = self.job.context_bytes + (self.job.tp_context_bytes if tp > 1 else 0)
        owners = len(self.plan.pipelines) if self.job.shard_optimizer else 1
        divided = f" over {owners} owners" if owners > 1 else ""
        of_them = f"{trained / 1e6:,.1f} M trained parameters on the rank" + (
            f" ({tied / 1e6:,.1f} M tied ones counted once)" if tied else ""
        )
        return (
            Term(
                "weights", held * state.weights, f"{held / 1e6:,.1f} M parameters on the rank x {state.weights:g} bytes"
            ),
            Term("gradients", trained * state.gradients, f"{of_them} x {state.gradients:g} bytes"),
            Term("optimizer", trained * state.optimizer / owners, f"{of_them} x {state.optimizer:g} bytes{divided}"),
            Term(
                "activations",
                in_flight * (kept + inputs),
                f"{in_flight} in flight x ({size(kept)} kept by {j - i} layers + {size(inputs)} input)"
                + (f", {len(stage.recompute)} recomputed" if stage.recompute else ""),
            ),
            Term("logits", in_flight * logits, f"{in_flight} in flight x {size(logits)}" if logits else "none"),
            Term(
                "workspace",
                workspace + rework,
                f"{size(workspace)} largest layer" + (f" + {size(rework)} to recompute in" if rework else ""),
            ),
            Term("sync_buffer", sync_buffer, sync_source),
            Term("context", context, "driver and libraries" + (", with a tp communicator" if tp > 1 else "")),
        )

    def _least_in_flight(self, p: int, s: int) -> int:
        pipeline = self.plan.pipelines[p]
        return min(pipeline.num_micro_batches, len(pipeline.stages) - s)

    def _sync_buffer(self, kinds: Sequence[LayerKind], tp: int) -> tuple[float, str]:
        """The least the stage needs; a plan may set aside more."""
        if len(self.plan.pipelines) == 1:
            return 0.0, "a single pipeline has no one to sync with"
        if self.job.sync_buffer_bytes is not None:
            return float(self.job.sync_buffer_bytes), "sync_buffer_bytes of the job"
        per_layer = [_trained_on_rank(kind, tp) * self.job.state.gradients for kind in kinds if kind.trainable]
        granularity = self.job.sync_granularity
        if granularity == "block":
            return min(float(self.job.sync_chunk_bytes), sum(per_layer)), "one chunk, or all gradients if they are less"
        if granularity == "model":
            return sum(per_layer), "all gradients in one call"
        return max(per_layer, default=0.0), f"largest layer, at granularity {granularity}"

    def hand_over(self, p: int, s: int) -> HandOver | None:
        """The cut between stages s and s + 1; None if a device or a link is missing."""
        pipeline = self.plan.pipelines[p]
        sender, receiver = pipeline.stages[s], pipeline.stages[s + 1]
        if receiver.layers[0] > len(self.layers):
            return None
        nbytes = self.input_bytes(receiver.layers[0], pipeline.micro_batch)
        pairs: list[tuple[float, str, str, Link]] = []
        if not {*sender.devices, *receiver.devices} <= set(self.devices) or set(sender.devices) & set(receiver.devices):
            return None
        for a in sender.devices:
            for b in receiver.devices:
                link = self.cluster.link(self.devices[a], self.devices[b], min(sender.tp, receiver.tp))
                pairs.append((float(link.seconds(nbytes)), a, b, link))
        if not pairs:
            return None
        slowest = max(pairs, key=lambda pair: pair[0])
        fastest_s = min(pair[0] for pair in pairs)
        return HandOver((s, s + 1), nbytes, fastest_s, slowest[0], slowest[1:3], slowest[3])

    # Problems.

    def problems(self) -> tuple[str, ...]:
        """Everything that is wrong, in words."""
        found: list[str] = []
        found += self._changed_inputs()
        found += self._batch()
        found += self._device_use()
        for p, pipeline in enumerate(self.plan.pipelines):
            found += self._coverage(p)
            for s in range(len(pipeline.stages)):
                found += self._placed(p, s)
                found += self._allowed(p, s)
                found += self._timed(p, s)
                found += self._fits(p, s)
            found += self._pipeline(p)
        found += self._blocks()
        found += self._tied()
        found += self._headline()
        return tuple(found)

    def _at(self, p: int, s: int) -> str:
        stage = self.plan.pipelines[p].stages[s]
        return f"pipeline {p} stage {s} ({stage.device_type} tp {stage.tp} on {places(stage.devices)})"

    def _changed_inputs(self) -> Iterator[str]:
        made_for = self.plan.provenance
        for what, stored, now in (
            ("profile", made_for.profile, self.profile.digest),
            ("cluster", made_for.cluster, self.cluster.digest),
            ("job", made_for.job, self.job.digest),
        ):
            if stored != now:
                yield f"the {what} is not the one the plan was made for (digest {now}, the plan has {stored})"
        for what, name, now in (
            ("profile", self.plan.profile_name, self.profile.name),
            ("cluster", self.plan.cluster_name, self.cluster.name),
        ):
            if name != now:
                yield f"the {what} is called {now!r}, the plan was made for {name!r}"
        if self.job is not self.plan.job and self.job != self.plan.job:
            yield "the job stored in the plan differs from the one it is checked against"

    def _batch(self) -> Iterator[str]:
        samples = sum(pipeline.micro_batch * pipeline.num_micro_batches for pipeline in self.plan.pipelines)
        if samples != self.job.global_batch:
            yield f"the pipelines take {samples} samples, the global batch is {self.job.global_batch}"

    def _device_use(self) -> Iterator[str]:
        users: dict[str, list[str]] = defaultdict(list)
        for p, pipeline in enumerate(self.plan.pipelines):
            for s, stage in enumerate(pipeline.stages):
                for device in stage.devices:
                    users[device].append(f"pipeline {p} stage {s}")
        for device, where in users.items():
            if device not in self.devices:
                yield f"device {device} of {where[0]} is not in the cluster"
            if len(where) > 1:
                yield f"device {device} is used {len(where)} times, by {' and '.join(where)}"
        idle = set(self.devices) - set(users)
        if unsaid := idle - set(self.plan.idle_devices):
            yield f"idle devices are not listed: {places(unsaid)}"
        if busy := set(self.plan.idle_devices) - idle:
            yield f"devices listed as idle are in use or not in the cluster: {places(busy)}"

    def _coverage(self, p: int) -> Iterator[str]:
        stages, num_layers = self.plan.pipelines[p].stages, len(self.layers)
        owners: dict[int, list[int]] = defaultdict(list)
        for s, stage in enumerate(stages):
            for l in range(stage.layers[0], min(stage.layers[1], num_layers)):
                owners[l].append(s)
            if stage.layers[1] > num_layers:
                yield f"pipeline {p}: layers up to {stage.layers[1] - 1} do not exist, the model has {num_layers}"
        if missing := [l for l in range(num_layers) if l not in owners]:
            ran = num_layers - len(missing)
            yield f"pipeline {p}: layers {spans(missing)} run on no stage; {ran} of {num_layers} layers are covered"
        if twice := [l for l in sorted(owners) if len(owners[l]) > 1]:
            on = " and ".join(str(s) for s in sorted({s for l in twice for s in owners[l]}))
            yield f"pipeline {p}: layers {spans(twice)} run more than once, on stages {on}"
        for s in range(1, len(stages)):
            if stages[s].layers[0] < stages[s - 1].layers[0]:
                start = stages[s].layers[0]
                yield f"pipeline {p}: stage {s} starts at layer {start}, before stage {s - 1}: out of order"

    def _placed(self, p: int, s: int) -> Iterator[str]:
        stage, at = self.plan.pipelines[p].stages[s], self._at(p, s)
        if len(stage.devices) != stage.tp:
            yield f"{at}: {len(stage.devices)} devices for tp {stage.tp}"
        known = [self.devices[name] for name in stage.devices if name in self.devices]
        for device in known:
            if device.type != stage.device_type:
                yield f"{at}: device {device.name} is a {device.type}"
        nodes = {device.node: self.cluster.nodes[device.node] for device in known}
        if len(nodes) > 1:
            yield f"{at}: its tp group spans {len(nodes)} nodes"
        elif len(known) > 1:
            node = nodes[known[0].node]
            indices = {device.index for device in known}
            if node.groups and not any(indices <= set(group) for group in node.groups):
                yield f"{at}: its tp group is not inside one fast group of {node.name}"

    def _allowed(self, p: int, s: int) -> Iterator[str]:
        pipeline = self.plan.pipelines[p]
        stage, at, job = pipeline.stages[s], self._at(p, s), self.job
        heads, kv_heads = self.profile.num_heads, self.profile.num_kv_heads
        if heads is not None and heads % stage.tp:
            yield f"{at}: tp {stage.tp} does not divide {heads} attention heads"
        if kv_heads is not None and kv_heads % stage.tp and stage.tp % kv_heads:
            yield f"{at}: tp {stage.tp} and {kv_heads} kv heads do not divide one another"
        if job.tp is not None and stage.tp not in job.tp:
            yield f"{at}: tp {stage.tp} is not among the job's {list(job.tp)}"
        if stage.recompute and not job.recompute:
            yield f"{at}: recomputes layers {spans(stage.recompute)}, the job forbids recompute"
        if stray := [l for l in stage.recompute if not stage.layers[0] <= l < stage.layers[1]]:
            yield f"{at}: recomputes layers {spans(stray)}, which it does not run"
        if len(set(stage.recompute)) != len(stage.recompute):
            yield f"{at}: lists a recomputed layer twice"
        fixed = [l for l in stage.recompute if l < len(self.layers) and not self.kinds[self.layers[l]].recomputable]
        if fixed:
            yield f"{at}: recomputes layers {spans(fixed)}, whose kind {self.layers[fixed[0]]} cannot be recomputed"
        least, most = self._least_in_flight(p, s), pipeline.num_micro_batches
        if stage.in_flight < least:
            yield f"{at}: in_flight is {stage.in_flight}, 1F1B holds min(m, S - s) = {least}"
        if stage.in_flight > max(most, least):
            yield f"{at}: in_flight is {stage.in_flight}, there are {most} micro-batches"
        if s and stage.in_flight > pipeline.stages[s - 1].in_flight:
            yield f"{at}: in_flight is {stage.in_flight}, the stage before holds {pipeline.stages[s - 1].in_flight}"
        yield from self._measured(p, s)

    def _measured(self, p: int, s: int) -> Iterator[str]:
        stage, b = self.plan.pipelines[p].stages[s], self.plan.pipelines[p].micro_batch
        beyond = False
        for kind in dict.fromkeys(self.layers[slice(*stage.layers)]):
            reading = self.reading(kind, stage.device_type, stage.tp, b)
            if reading is None:
                cells = self.cells.get((kind, stage.device_type, stage.tp), [])
                sizes = [str(cell.micro_batch) for cell in cells if not cell.extrapolated]
                known = f"measured at {', '.join(sizes)}" if sizes else "never measured there"
                yield f"{self._at(p, s)}: no time of kind {kind} at micro-batch {b} ({known})"
            else:
                beyond |= reading.extrapolated
        said = " ".join((*self.plan.warnings, *self.plan.restrictions))
        if beyond and "extrapolat" not in said:
            yield f"{self._at(p, s)}: uses extrapolated times, which no warning of the plan says"

    def _timed(self, p: int, s: int) -> Iterator[str]:
        pipeline = self.plan.pipelines[p]
        stage, at = pipeline.stages[s], self._at(p, s)
        inside = self.profile.conditions.tp_communication == "inside" or stage.tp == 1
        for term in self.times(p, s):
            stored = getattr(stage, term.name)
            gathers = self.job.shard_optimizer and len(self.plan.pipelines) > 1  # weights, after the update
            exact = not gathers if term.name == "update_s" else inside
            if not _close(stored, term.value) and (exact or stored < term.value):
                yield f"{at}: {term.name} is {stored:.6g}, the profile gives {term.value:.6g}"
        cuts = [self.hand_over(p, cut) for cut in (s - 1, s) if 0 <= cut < len(pipeline.stages) - 1]
        least = sum(cut.fastest_s for cut in cuts if cut is not None)
        if stage.transfer_s < least * (1 - RELATIVE_SLACK):
            yield f"{at}: transfer_s is {stage.transfer_s:.6g}, the fastest links need {least:.6g}"
        yield from self._sends(p, s)
        alone = len(self.plan.pipelines) == 1
        if alone and stage.sync_s > 0 and not any(kind.tied_to for kind in self.kinds.values()):
            yield f"{at}: sync_s is {stage.sync_s:.6g} with a single pipeline"
        trained = [kind for kind in map(self.kinds.get, self.layers[slice(*stage.layers)]) if kind and kind.trainable]
        if not alone and not stage.sync_s and self.job.state.gradients and any(kind.parameters for kind in trained):
            yield f"{at}: sync_s is 0 with {len(self.plan.pipelines)} pipelines"

    def _sends(self, p: int, s: int) -> Iterator[str]:
        stages, at = self.plan.pipelines[p].stages, self._at(p, s)
        stage, received_s = stages[s], stages[s - 1].send_s if s else 0.0
        if not _close(stage.transfer_s, received_s + stage.send_s):
            yield f"{at}: transfer_s is {stage.transfer_s:.6g}, its cuts take {received_s:.6g} and {stage.send_s:.6g}"
        cut = self.hand_over(p, s) if s + 1 < len(stages) else None
        if cut is not None and abs(stage.send_bytes - cut.nbytes) > 1:
            yield f"{at}: send_bytes is {stage.send_bytes}, layer {stage.layers[1]} takes {cut.nbytes:.0f}"
        if cut is not None and not _within(stage.send_s, cut.fastest_s, cut.slowest_s):
            yield (f"{at}: send_s is {stage.send_s:.6g}, links need {cut.fastest_s:.6g} to {cut.slowest_s:.6g} for it")

    def _fits(self, p: int, s: int) -> Iterator[str]:
        stage, at = self.plan.pipelines[p].stages[s], self._at(p, s)
        memory, capacity = stage.memory, self.capacity.get(stage.device_type)
        if capacity is None:
            yield f"{at}: the cluster has no device type {stage.device_type}"
        elif memory.capacity != capacity:
            yield f"{at}: capacity is stored as {size(memory.capacity)}, {stage.device_type} has {size(capacity)}"
        terms = self.memory(p, s)
        for term in terms:
            stored = getattr(memory, term.name)
            slack = BYTES_SLACK + RELATIVE_SLACK * term.value
            more = stored > term.value + slack and term.name not in ("sync_buffer", "workspace")
            if more or stored < term.value - slack:
                wrong = "overstated" if more else "understated"
                yield f"{at}: {term.name} {wrong} as {size(stored)}, it takes {size(term.value)} ({term.source})"
        need = max(float(memory.total), sum(term.value for term in terms))
        limit = (1 - self.job.memory_margin) * (capacity if capacity is not None else memory.capacity)
        if need > limit * (1 + 1e-9) + 1:
            yield (
                f"{at}: does not fit, needs {size(need)} of {size(limit)} "
                f"({size(need - limit)} short, margin {self.job.memory_margin:.0%})"
            )

    def _pipeline(self, p: int) -> Iterator[str]:
        pipeline, job = self.plan.pipelines[p], self.job
        loads = [s.forward_s + s.backward_s + s.recompute_s + s.transfer_s for s in pipeline.stages]
        time = sum(loads) + (pipeline.num_micro_batches - 1) * max(loads)
        if not _close(pipeline.time_s, time):
            yield f"pipeline {p}: time_s is {pipeline.time_s:.6g}, its stages give {time:.6g}"
        if job.micro_batches is not None and pipeline.micro_batch not in job.micro_batches:
            yield f"pipeline {p}: micro-batch {pipeline.micro_batch} is not among the job's {list(job.micro_batches)}"
        if job.max_depth is not None and len(pipeline.stages) > job.max_depth:
            yield f"pipeline {p}: {len(pipeline.stages)} stages, the job allows {job.max_depth}"
        classes = {(stage.device_type, stage.tp) for stage in pipeline.stages}
        if job.max_classes is not None and len(classes) > job.max_classes:
            yield f"pipeline {p}: {len(classes)} device classes, the job allows {job.max_classes}"

    def _blocks(self) -> Iterator[str]:
        cuts = {0, len(self.layers)}
        for pipeline in self.plan.pipelines:
            for stage in pipeline.stages:
                cuts.update(cut for cut in stage.layers if cut <= len(self.layers))
        edges = sorted(cuts)
        expected = list(pairwise(edges))
        if [block.layers for block in self.plan.blocks] != expected:
            yield (
                f"blocks {_ranges(b.layers for b in self.plan.blocks)} are not the common refinement of the stages, "
                f"{_ranges(expected)}"
            )
            return
        for block in self.plan.blocks:
            yield from self._block(block)

    def _block(self, block: Block) -> Iterator[str]:
        i, j = block.layers
        owners = []
        for pipeline in self.plan.pipelines:
            at = [s for s, stage in enumerate(pipeline.stages) if stage.layers[0] <= i and j <= stage.layers[1]]
            owners.append(at[0] if at else -1)
        if list(block.owners) != owners:
            yield f"block [{i}, {j}): its owners are stages {owners}, not {list(block.owners)}"
        per_parameter, tau = self.job.state.gradients, self.plan.min_tp
        elsewhere = self._tied_elsewhere()
        trained = [(l, self.kinds[self.layers[l]]) for l in range(i, j) if self.kinds[self.layers[l]].trainable]
        total = sum(kind.trained - elsewhere.get(l, 0) for l, kind in trained) * per_parameter / tau
        if abs(block.gradient_bytes - total) > BYTES_SLACK + RELATIVE_SLACK * total:
            yield (
                f"block [{i}, {j}): gradient_bytes is {block.gradient_bytes}, its parameters over {tau} "
                f"{'shard' if tau == 1 else 'shards'} are {total:.0f}"
            )
        holders = [(p, s) for p, s in enumerate(owners) if s >= 0]
        yield from self._reduced(f"block [{i}, {j})", holders, block.gradient_bytes, block.num_chunks, block.reduce_s)

    def _tied_pairs(self) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]], LayerKind]]:
        """The two layers of each tied weight, the (pipeline, stage) of all who hold it, and the later layer's kind."""
        for l, name in enumerate(self.layers):
            kind = self.kinds[name]
            if kind.tied_to is None or not kind.trainable or not self.job.state.gradients:
                continue
            pair = (self.layers.index(kind.tied_to), l)
            holders = [
                (p, s)
                for p, pipeline in enumerate(self.plan.pipelines)
                for s, stage in enumerate(pipeline.stages)
                if any(stage.layers[0] <= end < stage.layers[1] for end in pair)
            ]
            yield pair, holders, kind

    def _tied_elsewhere(self) -> dict[int, int]:
        """Parameters of a layer that its own block does not reduce: another layer's block, or a tied one, does."""
        out = {}
        for pair, holders, kind in self._tied_pairs():
            alone = len(holders) > len(self.plan.pipelines)
            out.update(dict.fromkeys(pair if alone else pair[1:], kind.tied_parameters))
        return out

    def _tied(self) -> Iterator[str]:
        """Weights of two layers: reduced on their own where a pipeline has the two on different stages."""
        for pair, holders, kind in self._tied_pairs():
            l = pair[1]
            found = [block for block in self.plan.tied_blocks if block.layers == pair]
            if len(holders) == len(self.plan.pipelines):
                continue
            if len(found) != 1 or sorted(found[0].owners) != sorted(holders):
                yield f"layers {pair[0]} and {pair[1]} share weights held by {holders}, tied_blocks does not say so"
                continue
            tau, nbytes = self.plan.min_tp, kind.tied_parameters * self.job.state.gradients
            if abs(found[0].gradient_bytes - nbytes / tau) > BYTES_SLACK:
                yield f"tied weights of layer {l}: gradient_bytes is {found[0].gradient_bytes}, not {nbytes / tau:.0f}"
            what = f"tied weights of layers {pair[0]} and {pair[1]}"
            yield from self._reduced(what, holders, found[0].gradient_bytes, found[0].num_chunks, found[0].reduce_s)

    def _reduced(
        self, what: str, holders: Sequence[tuple[int, int]], nbytes: int, calls: int, stored_s: float
    ) -> Iterator[str]:
        """An all-reduce takes what a ring takes on some link between its owners."""
        names = [self.plan.pipelines[p].stages[s].devices[0] for p, s in holders]
        if not set(names) <= set(self.devices) or len(set(names)) < len(names):
            return
        n = len(names)
        if n < 2 or not nbytes:
            if stored_s:
                yield f"{what}: reduce_s is {stored_s:.6g} with nothing to reduce"
            return
        if calls < 1:
            yield f"{what}: num_chunks is {calls}, {nbytes} bytes between {n} owners take at least one call"
            return
        per_step = nbytes / calls / n
        links = {self.cluster.link(self.devices[a], self.devices[b]) for a in names for b in names if a != b}
        steps = [calls * 2 * (n - 1) * float(link.seconds(per_step)) for link in links]
        # Calls of unequal size are within twice what equal ones take; tp ranks may share a port between them.
        shared = max(self.cluster.sharing(self.plan.pipelines[p].stages[s].devices) for p, s in holders)
        halves = 2 if self.job.shard_optimizer else 1  # reduces and scatters; the update gathers
        if not min(steps) / 2 / halves <= stored_s <= max(steps) * 2 * shared:
            yield f"{what}: reduce_s is {stored_s:.6g}, rings of {n} take {min(steps):.6g} to {max(steps):.6g}"

    def _headline(self) -> Iterator[str]:
        plan, predicted = self.plan, self.plan.predicted
        slowest = max(pipeline.time_s for pipeline in plan.pipelines)
        whole = predicted.pipeline_s + predicted.sync_s + predicted.update_s
        if not _close(predicted.pipeline_s, slowest):
            yield f"predicted.pipeline_s is {predicted.pipeline_s:.6g}, the slowest pipeline takes {slowest:.6g}"
        if not _close(predicted.iteration_s, whole):
            yield f"predicted.iteration_s is {predicted.iteration_s:.6g}, its terms add up to {whole:.6g}"
        floor_s = self._floor_s()
        if predicted.floor_s > floor_s * (1 + RELATIVE_SLACK):
            yield f"predicted.floor_s {predicted.floor_s:.6g} is more than the stages compute, {floor_s:.6g}"
        if predicted.simulated_s is not None and predicted.simulated_s < floor_s * (1 - RELATIVE_SLACK):
            yield f"predicted.simulated_s {predicted.simulated_s:.6g} is less than the stages compute, {floor_s:.6g}"
        yield from self._tail()
        rate = self.job.global_batch / predicted.iteration_s if predicted.iteration_s else math.inf
        if not _close(predicted.samples_per_s, rate):
            yield f"predicted.samples_per_s is {predicted.samples_per_s:.6g}, batch over time is {rate:.6g}"
        length, tokens = self.profile.conditions.sequence_length, predicted.tokens_per_s
        if length is not None and tokens is not None and not _close(tokens, rate * length):
            yield f"predicted.tokens_per_s is {tokens:.6g}, samples times length are {rate * length:.6g}"
        if not -RELATIVE_SLACK <= predicted.bubble_fraction <= 1:
            yield f"predicted.bubble_fraction {predicted.bubble_fraction:.6g} is not between 0 and 1"
        if plan.lower_bound_s > predicted.iteration_s * (1 + RELATIVE_SLACK):
            yield f"lower_bound_s {plan.lower_bound_s:.6g} is above the plan's own {predicted.iteration_s:.6g}"
        gap = predicted.iteration_s / plan.lower_bound_s - 1 if plan.lower_bound_s else math.inf
        if plan.lower_bound_s and abs(plan.gap - gap) > RELATIVE_SLACK:
            yield f"gap is {plan.gap:.6g}, value over bound gives {gap:.6g}"

    def _floor_s(self) -> float:
        """Arithmetic alone of the slowest pipeline: fill up to a stage, then all micro-batches there."""
        longest = 0.0
        for pipeline in self.plan.pipelines:
            before = 0.0
            for stage in pipeline.stages:
                compute = stage.forward_s + stage.backward_s + stage.recompute_s
                longest = max(longest, before + pipeline.num_micro_batches * compute)
                before += compute
        return longest

    def _tail(self) -> Iterator[str]:
        """What comes after the last micro-batch lies between everything hidden that may be and nothing hidden."""
        stages, predicted = self.plan.stages, self.plan.predicted
        hides = self.job.sync == "overlapped" and self.job.sync_granularity != "model"
        least = max(s.update_s + max(s.sync_s - (s.backward_s if hides else 0.0), 0.0) for s in stages)
        most = max(s.update_s + s.sync_s for s in stages)
        tail = predicted.sync_s + predicted.update_s
        if tail < least * (1 - RELATIVE_SLACK) or tail > most * (1 + RELATIVE_SLACK):
            yield (
                f"predicted.sync_s and update_s are {tail:.6g} together, "
                f"the stages' own lie between {least:.6g} and {most:.6g}"
            )


def _within(value: float, least: float, most: float) -> bool:
    return least * (1 - RELATIVE_SLACK) <= value <= most * (1 + RELATIVE_SLACK)


def _figures(cell: Cell) -> tuple[float, ...]:
    return cell.forward_s, cell.backward_s, cell.update_s, cell.activation_bytes, cell.workspace_bytes


def _between(cells: Sequence[Cell], b: int) -> Reading | None:
    """The cell of this size, or the line between its two neighbours."""
    for low, high in pairwise(cells):
        if low.micro_batch < b < high.micro_batch:
            share = (b - low.micro_batch) / (high.micro_batch - low.micro_batch)
            line = [x + share * (y - x) for x, y in zip(_figures(low), _figures(high))]
            return Reading(f"between micro-batch {low.micro_batch} and {high.micro_batch}", False, *line)
    for cell in cells:
        if cell.micro_batch == b:
            return Reading("measured", False, *_figures(cell))
    return None


def _beyond(cells: Sequence[Cell], b: int) -> Reading | None:
    """The line through the two cells nearest to a size outside the measured ones, kept within reason."""
    if len(cells) < 2:
        return None
    above = b > cells[-1].micro_batch
    low, high = cells[-2:] if above else cells[:2]
    share = (b - low.micro_batch) / (high.micro_batch - low.micro_batch)
    line = []
    for x, y in zip(_figures(low), _figures(high)):
        value = x + share * (y - x)
        line.append(max(value, y) if above else min(max(value, x * b / low.micro_batch), x))
    return Reading(f"from micro-batch {low.micro_batch} and {high.micro_batch}", True, *line)


def _on_rank(kind: LayerKind, tp: int) -> int:
    for degree, parameters in kind.shard_parameters:
        if degree == tp:
            return parameters
    return math.ceil(kind.parameters / tp)


def _trained_on_rank(kind: LayerKind, tp: int) -> int:
    """Parameters with gradients that one of tp ranks holds."""
    if not kind.trainable or kind.trainable_parameters in (None, kind.parameters):
        return _on_rank(kind, tp) if kind.trainable else 0
    return math.ceil((kind.trainable_parameters or 0) / tp)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=RELATIVE_SLACK, abs_tol=1e-9)


def _spelled(rows: Iterable[tuple[str, float, str]]) -> str:
    """Sum of per-layer seconds in words: equal neighbours together, how they are known unless measured."""
    runs: list[tuple[str, float, str, int]] = []
    for name, value, origin in rows:
        if runs and runs[-1][:3] == (name, value, origin):
            runs[-1] = (name, value, origin, runs[-1][3] + 1)
        else:
            runs.append((name, value, origin, 1))
    return " + ".join(
        (f"{count} x " if count > 1 else "") + f"{name} {1e3 * value:.3f} ms" + f" ({origin})" * (origin != "measured")
        for name, value, origin, count in runs
    )


# The printed form.


def seconds(value: float) -> str:
    """Four significant digits and a unit a person would pick."""
    if value == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{_significant(value / scale)} {unit}"
    return f"{_significant(value / 1e-6)} us"


def size(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least a tenth."""
    for unit, digits in (("GiB", 2), ("MiB", 1), ("KiB", 1)):
        scale = 1 << {"GiB": 30, "MiB": 20, "KiB": 10}[unit]
        if abs(nbytes) >= scale / 10:
            return f"{nbytes / scale:,.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def _significant(value: float, digits: int = 4) -> str:
    before = len(str(int(float(f"{value:.{digits}g}"))))
    return f"{value:,.{max(digits - before, 0)}f}"


def _rate(predicted: Predicted) -> str:
    if predicted.tokens_per_s is not None:
        return f"{predicted.tokens_per_s:,.0f} tokens/s"
    return f"{_significant(predicted.samples_per_s)} samples/s"


def number(count: int, noun: str) -> str:
    """``1 stage``, ``2 stages``, ``3 micro-batches``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def _ranges(layers: Iterable[tuple[int, int]]) -> str:
    return " ".join(f"[{i}, {j})" for i, j in layers)


def spans(numbers: Iterable[int]) -> str:
    """{3, 4, 5, 9} as ``3-5,9``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def places(devices: Iterable[str]) -> str:
    """Device names in the host lists of cluster tools: ``a100-[0-3]:0-3, v100-7:2``."""
    indices: dict[str, set[int]] = defaultdict(set)
    for name in devices:
        node, _, index = name.rpartition(":")
        if not index.isdigit():
            node, index = name, "-1"
        indices[node].add(int(index))
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in sorted(indices, key=_natural):
        slots = "" if indices[node] == {-1} else ":" + spans(indices[node])
        alike[re.sub(r"\d+$", "", node), slots].append(node)
    words = []
    for (stem, slots), nodes in alike.items():
        numbers = [node[len(stem) :] for node in nodes]
        if len(nodes) > 1 and all(number == "0" or number[:1] not in ("", "0") for number in numbers):
            words.append(f"{stem}[{spans(map(int, numbers))}]{slots}")
        else:
            words += [f"{node}{slots}" for node in nodes]
    return ", ".join(words)


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    return tuple((text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], fold: int | None = None) -> list[str]:
    """Fixed-width table, one text per row, the header first.

    Parameters
    ----------
    header
        Column names; one that starts with ``>`` is right-aligned.
    fold
        Column that is folded onto further lines where a row would be wider than `WIDTH`.
    """
    names = [name.removeprefix(">") for name in header]
    widths = [max(len(row[c]) for row in (names, *rows)) for c in range(len(header))]
    if fold is not None:
        others = sum(widths) - widths[fold] + 2 * len(widths)
        widths[fold] = min(widths[fold], max(WIDTH - others, len(names[fold]), 12))
    texts = []
    for row in (names, *rows):
        cells = [[text] if c != fold else _folded(text, widths[c]) for c, text in enumerate(row)]
        lines = []
        for n in range(max(map(len, cells))):
            line = [cell[n] if n < len(cell) else "" for cell in cells]
            aligned = [x.rjust(w) if h[:1] == ">" else x.ljust(w) for x, w, h in zip(line, widths, header)]
            lines.append(("  " + "  ".join(aligned)).rstrip())
        texts.append("\n".join(lines))
    return texts


def _folded(text: str, width: int, most: int = 4) -> list[str]:
    lines = textwrap.wrap(text, width, break_on_hyphens=False, max_lines=most, placeholder=" ...")
    return lines or [""]


def wrapped(label: str, text: str, width: int = WIDTH) -> list[str]:
    """A label and its text, folded with a hanging indent."""
    lead = f"{label:<12}"
    return textwrap.wrap(lead + text, width, subsequent_indent=" " * len(lead), break_on_hyphens=False)


def grouped(plan: Plan) -> list[tuple[str, list[int]]]:
    """Pipelines that differ in nothing but their devices, as (letter, indices), in the plan's order."""
    alike: dict[object, list[int]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        shape = tuple((stage.device_type, stage.tp, stage.layers, stage.recompute) for stage in pipeline.stages)
        alike[pipeline.micro_batch, pipeline.num_micro_batches, shape].append(p)
    return [(_letters(n), members) for n, members in enumerate(alike.values())]


def _letters(n: int) -> str:
    letters = string.ascii_uppercase
    return letters[n] if n < 26 else _letters(n // 26 - 1) + letters[n % 26]


def _printed(plan: Plan) -> Iterator[str]:
    predicted, batch = plan.predicted, plan.job.global_batch
    given = len(plan.devices) + len(plan.idle_devices)
    rate = f"{_significant(predicted.samples_per_s)} samples/s"
    if predicted.tokens_per_s is not None:
        rate += f" ({predicted.tokens_per_s:,.0f} tokens/s)"
    gap = f"{plan.gap:.2%} above the lower bound" if plan.lower_bound_s else "no lower bound"
    cut_short = "" if plan.proved else " (search cut short)"
    yield f"{plan.profile_name} on {plan.cluster_name}"
    yield f"{seconds(predicted.iteration_s)} per iteration, {rate}, {gap}{cut_short}"
    yield ""
    terms = [f"slowest pipeline {seconds(predicted.pipeline_s)}"]
    if len(plan.pipelines) > 1 or predicted.sync_s:
        terms.append(f"exposed gradient sync {seconds(predicted.sync_s)}")
    terms.append(f"update {seconds(predicted.update_s)}")
    yield from wrapped("time", " + ".join(terms))
    use = [f"{len(plan.devices)} of {number(given, 'device')}", f"bubble {predicted.bubble_fraction:.1%}"]
    if predicted.model_flops_utilization is not None:
        use.append(f"MFU {predicted.model_flops_utilization:.1%}")
    yield from wrapped("use", ", ".join(use))
    bounds = [
        f"any plan {seconds(plan.lower_bound_s)} or more by planning form",
        f"this one {seconds(predicted.floor_s)} with whole backwards",
        f"as 1F1B {seconds(predicted.one_f_one_b_s)}",
    ]
    yield from wrapped("bounds", ", ".join(bounds))
    if predicted.simulated_s is not None:
        yield from wrapped("simulated", _simulated(plan))
    groups = grouped(plan)
    yield from wrapped("batch", f"{number(batch, 'sample')} = " + " + ".join(_share(plan, *group) for group in groups))
    yield ""
    yield from _stage_table(plan, groups)
    yield ""
    yield "* bottleneck; load: compute + transfer of one micro-batch; memory: fullest device, against its capacity"
    notes = []
    if plan.idle_devices:
        notes.append(("idle", f"{number(len(plan.idle_devices), 'device')}: {places(plan.idle_devices)}"))
    notes += [("restricted", text) for text in plan.restrictions]
    notes += [("warning", text) for text in plan.warnings]
    if notes:
        yield ""
    for label, text in notes:
        yield from wrapped(label, text)


def _simulated(plan: Plan) -> str:
    predicted = plan.predicted
    assert predicted.simulated_s is not None
    words = f"{seconds(predicted.simulated_s)} per iteration ({predicted.simulated_s / predicted.iteration_s - 1:+.1%})"
    ahead = sum(
        stage.in_flight > min(pipeline.num_micro_batches, len(pipeline.stages) - s)
        for pipeline in plan.pipelines
        for s, stage in enumerate(pipeline.stages)
    )
    return words + (f"; forwards run ahead on {number(ahead, 'stage')} to hide transfers" if ahead else "")


def _ranking(plans: Sequence[Plan]) -> Iterator[str]:
    from planner.page import shape

    played = all(plan.predicted.simulated_s is not None for plan in plans)
    times = [plan.predicted.simulated_s if played else plan.predicted.iteration_s for plan in plans]
    rows = []
    for rank, (plan, time_s) in enumerate(zip(plans, times, strict=True), 1):
        predicted = plan.predicted
        rows.append(
            [
                str(rank),
                seconds(predicted.iteration_s),
                "-" if predicted.simulated_s is None else seconds(predicted.simulated_s),
                "" if rank == 1 else f"{(time_s or 0.0) / (times[0] or 1.0) - 1:+.2%}",
                f"{predicted.samples_per_s:,.1f}",
                f"{len(plan.devices)}/{len(plan.devices) + len(plan.idle_devices)}",
                f"{max(stage.memory.fraction for stage in plan.stages):.0%}",
                shape(plan),
            ]
        )
    header = [">rank", ">iteration", ">simulated", ">to best", ">samples/s", ">devices", ">fullest", "pipelines"]
    yield from table(header, rows, fold=7)


def _share(plan: Plan, letter: str, members: Sequence[int]) -> str:
    copies = f"{len(members)} x " if len(members) > 1 else ""
    return f"{copies}{plan.pipelines[members[0]].samples:,} ({letter})"


def _stage_table(plan: Plan, groups: Sequence[tuple[str, list[int]]]) -> Iterator[str]:
    """A row per stage; the pipelines of a group, which differ in their devices only, share their rows."""
    titles: dict[int, str] = {}
    rows: list[list[str]] = []
    for letter, members in groups:
        alike = [plan.pipelines[p] for p in members]
        slowest = max(alike, key=lambda pipeline: pipeline.time_s)
        titles[len(rows)] = _title(letter, slowest, len(members), plan.job.global_batch)
        for s in range(len(slowest.stages)):
            rows.append(_stage_row(slowest, s, [pipeline.stages[s] for pipeline in alike]))
    header = [">stage", ">layers", ">n", "device", ">tp", "where", ">compute ms", ">transfer", ">load  "]
    if any(row[-2] for row in rows):
        header.append(">recompute")
    else:
        rows = [[*row[:-2], row[-1]] for row in rows]
    head, *lines = table([*header, "memory"], rows, fold=5)
    yield head
    for n, line in enumerate(lines):
        if n in titles:
            yield from ("", titles[n])
        yield line


def _title(letter: str, pipeline: Pipeline, copies: int, batch: int) -> str:
    m, samples = pipeline.num_micro_batches, pipeline.samples
    who = f"pipeline {letter}" if copies == 1 else f"{copies} x pipeline {letter}, each"
    count = f"{number(m, 'micro-batch')} of {pipeline.micro_batch}"
    return f"{who}: {count} = {samples:,} samples ({samples / batch:.1%} of the batch) in {seconds(pipeline.time_s)}"


def _stage_row(slowest: Pipeline, s: int, alike: Sequence[Stage]) -> list[str]:
    stage = slowest.stages[s]
    return [
        str(s),
        inclusive(stage.layers),
        str(stage.num_layers),
        stage.device_type,
        str(stage.tp),
        places(device for other in alike for device in other.devices),
        f"{1e3 * stage.compute_s:,.2f}",
        f"{1e3 * stage.transfer_s:,.2f}",
        f"{1e3 * stage.load_s:,.2f} {'*' if s == slowest.bottleneck else ' '}",
        f"{len(stage.recompute)} of {stage.num_layers}" if stage.recompute else "",
        memory_bar(max((other.memory for other in alike), key=lambda memory: memory.fraction)),
    ]


def inclusive(layers: tuple[int, int]) -> str:
    """Half-open [3, 6) as ``3-5``."""
    i, j = layers
    return str(i) if j == i + 1 else f"{i}-{j - 1}"


def memory_bar(memory: StageMemory, length: int = 10) -> str:
    """``[######----] 23.1/40.0 GiB``; ``!`` where it does not fit."""
    filled = min(round(length * memory.fraction), length)
    bar = "!" * length if memory.fraction > 1 else "#" * filled + "-" * (length - filled)
    used, capacity = f"{memory.total / GIB:.1f}", f"{memory.capacity / GIB:.1f}"
    return f"[{bar}] {used:>5}/{capacity} GiB"
