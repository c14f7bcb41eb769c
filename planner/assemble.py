"""From chosen pipelines to a `Plan`: devices, true links, memory by category, blocks, warnings; or the reason there is
none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner import cost, data_split
from planner.cluster import Cluster, Device, Link
from planner.cost import Costs, SyncTable
from planner.placement import DoesNotPack, Unit, place, unit_link
from planner.plans import Block, Pipeline, Plan, Predicted, Provenance, Stage, StageMemory, TiedBlock
from planner.question import Clock, Question
from planner.stage_split import Stage as Part


class Chain(NamedTuple):
    """`number` equal pipelines: samples per micro-batch, micro-batches, stages."""

    number: int
    micro_batch: int
    num_micro_batches: int
    stages: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Chosen pipelines, and their slowest time under the links they were chosen with."""

    chains: tuple[Chain, ...]
    time_s: float

    @property
    def num_pipelines(self) -> int:
        """P."""
        return sum(chain.number for chain in self.chains)


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate on its devices: the stages of each pipeline and the iteration time with the true links."""

    question: Question
    candidate: Candidate
    pipelines: tuple[Pipeline, ...]
    predicted: Predicted

    @property
    def time_s(self) -> float:
        """Iteration time."""
        return self.predicted.iteration_s

    @property
    def num_pipelines(self) -> int:
        """P."""
        return len(self.pipelines)

    @property
    def shape(self) -> tuple[tuple[int, int, tuple[tuple[str, int, tuple[int, int]], ...]], ...]:
        """What is chosen, whatever the devices: plans that agree in this are one."""
        return tuple(
            sorted(
                (p.micro_batch, p.num_micro_batches, tuple((s.device_type, s.tp, s.layers) for s in p.stages))
                for p in self.pipelines
            )
        )

    @property
    def key(self) -> tuple[tuple[int, int, tuple[Part, ...]], ...]:
        """Order among plans of equal time and size."""
        return tuple((c.micro_batch, c.num_micro_batches, c.stages) for c in self.candidate.chains)


def evaluate(question: Question, candidate: Candidate, *, reshare: bool = True) -> Found | None:
    """Put a candidate on the nodes, near along the pipelines or near along the rings, whichever is faster; None if it
    does not pack.

    Parameters
    ----------
    reshare
        Whether micro-batches may move between pipelines once the true links are known.
    """
    ways = (False,) if question.uniform else (False, True)
    found = [_evaluate(question, candidate, by_stage, reshare) for by_stage in ways]
    return min((each for each in found if each is not None), key=lambda each: each.time_s, default=None)


def _evaluate(question: Question, candidate: Candidate, by_stage: bool, reshare: bool) -> Found | None:
    """Place, re-share the batch under the true links and price every term."""
    num_pipelines = candidate.num_pipelines
    costs_of = {each.micro_batch: each.with_owners(num_pipelines) for each in question.costs}
    chains = [chain for chain in candidate.chains for _ in range(chain.number)]
    chains.sort(key=lambda chain: (-len(chain.stages), chain))
    message = max(float(costs_of[chain.micro_batch].inputs.max()) for chain in chains)
    classes = [[question.classes[stage.class_index] for stage in chain.stages] for chain in chains]
    try:
        placed = place(question.cluster, classes, message, by_stage=by_stage, improve=not question.uniform)
    except DoesNotPack:
        return None
    if not question.cluster.complete and not _rings_close(question.cluster, chains, placed):
        return None
    if reshare and not question.uniform:
        chains = _reshare(question, chains, _hand_overs(question, chains, placed), costs_of)
    return price(question, candidate, chains, placed)


def price(
    question: Question,
    candidate: Candidate,
    chains: Sequence[Chain],
    placed: Sequence[Sequence[Unit]],
    recompute: Sequence[Sequence[tuple[int, ...]]] | None = None,
) -> Found:
    """Every term of these stages on these devices, whether they fit or not.

    Parameters
    ----------
    recompute
        Recomputed layers of each stage; None for the least that makes it fit, which must exist.
    """
    costs_of = {each.micro_batch: each.with_owners(len(chains)) for each in question.costs}
    hand_overs = _hand_overs(question, chains, placed)
    synced = len(chains) > 1
    sync = _sync_terms(question, chains, placed, costs_of)
    pipelines = []
    for p, (chain, units) in enumerate(zip(chains, placed, strict=True)):
        costs, num_stages = costs_of[chain.micro_batch], len(chain.stages)
        stages = []
        for s, (stage, unit) in enumerate(zip(chain.stages, units, strict=True)):
            k, i, j = stage
            in_flight = min(chain.num_micro_batches, num_stages - s)
            recomputed = (
                cost.recomputed_layers(costs, k, i, j, in_flight, synced) if recompute is None else recompute[p][s]
            )
            sends = s + 1 < num_stages
            send_s = hand_overs[p][s] if sends else 0.0
            stages.append(
                Stage(
                    device_type=question.classes[k].device_type,
                    tp=question.classes[k].tp,
                    layers=(i, j),
                    devices=tuple(device.name for device in unit.devices),
                    recompute=recomputed,
                    in_flight=in_flight,
                    forward_s=float(costs.forward[k, i:j].sum()),
                    backward_s=float(costs.backward[k, i:j].sum()),
                    recompute_s=float(sum(costs.forward[k, l] for l in recomputed)),
                    transfer_s=(hand_overs[p][s - 1] if s else 0.0) + send_s,
                    send_s=send_s,
                    send_bytes=math.ceil(float(costs.inputs[j])) if sends else 0,
                    sync_s=sync[p][s].ring_s,
                    update_s=sync[p][s].update_s,
                    memory=_memory(question, costs, k, i, j, in_flight, recomputed, len(chains)),
                )
            )
        time_s = cost.pipeline_s([stage.load_s for stage in stages], chain.num_micro_batches)
        pipelines.append(
            Pipeline(
                micro_batch=chain.micro_batch,
                num_micro_batches=chain.num_micro_batches,
                stages=tuple(stages),
                time_s=time_s,
            )
        )
    return Found(question, candidate, tuple(pipelines), _predict(question, pipelines, hand_overs, sync))


def ahead(found: Found) -> Found | None:
    """The same with 2 (S - 1 - s) forwards in warm-up instead of S - 1 - s, as far as memory allows; None if nowhere.

    A stage then waits less for the round trip to its neighbour and holds more micro-batches. What it recomputes stays.
    """
    margin = found.question.job.memory_margin
    pipelines = tuple(_ahead(pipeline, margin) for pipeline in found.pipelines)
    return None if pipelines == found.pipelines else replace(found, pipelines=pipelines)


def _ahead(pipeline: Pipeline, margin: float) -> Pipeline:
    stages: list[Stage] = []
    most = pipeline.num_micro_batches  # no stage holds more than the one before
    for s, stage in enumerate(pipeline.stages):
        memory, behind = stage.memory, len(pipeline.stages) - 1 - s
        held = memory.activations + memory.logits
        spare = (1 - margin) * memory.capacity - memory.total
        more = math.floor(spare * stage.in_flight / held) if held else most
        most = max(min(most, 2 * behind + 1, stage.in_flight + max(more, 0)), stage.in_flight)
        share = most / stage.in_flight
        memory = replace(
            memory, activations=math.ceil(memory.activations * share), logits=math.ceil(memory.logits * share)
        )
        stages.append(replace(stage, in_flight=most, memory=memory))
    return replace(pipeline, stages=tuple(stages))


def _hand_overs(question: Question, chains: Sequence[Chain], placed: Sequence[Sequence[Unit]]) -> list[list[float]]:
    """Seconds of every cut of every pipeline, one way."""
    inputs = {each.micro_batch: each.inputs for each in question.costs}
    return [
        [
            float(unit_link(question.cluster, a, b).seconds(float(inputs[chain.micro_batch][stage.first])))
            for a, b, stage in zip(units[:-1], units[1:], chain.stages[1:], strict=True)
        ]
        for chain, units in zip(chains, placed, strict=True)
    ]


class _Sync(NamedTuple):
    ring_s: float
    update_s: float
    exposed_s: float


def _rings_close(cluster: Cluster, chains: Sequence[Chain], placed: Sequence[Sequence[Unit]]) -> bool:
    """Whether the owners of every layer are joined in a ring, node by node."""
    owners: dict[int, list[Device]] = {}
    for chain, units in zip(chains, placed, strict=True):
        for stage, unit in zip(chain.stages, units, strict=True):
            for l in range(stage.first, stage.end):
                owners.setdefault(l, []).append(unit.devices[0])
    return all(
        cluster.joined(a, b)
        for ring in {tuple(sorted(each, key=lambda device: (device.node, device.index))) for each in owners.values()}
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
        if a != b
    )


def _reshare(
    question: Question, chains: list[Chain], hand_overs: Sequence[Sequence[float]], costs_of: dict[int, Costs]
) -> list[Chain]:
    """Micro-batches under the true links; kept as they are where memory was counted for few micro-batches."""
    groups = []
    for chain, around in zip(chains, hand_overs, strict=True):
        if chain.num_micro_batches < len(chain.stages):
            return chains
        costs, num_stages = costs_of[chain.micro_batch], len(chain.stages)
        loads = []
        for s, (k, i, j) in enumerate(chain.stages):
            again = cost.recomputed_layers(costs, k, i, j, num_stages - s, len(chains) > 1)
            load = float(
                (costs.forward[k, i:j] + costs.backward[k, i:j]).sum() + sum(costs.forward[k, l] for l in again)
            )
            loads.append(load + (around[s - 1] if s else 0.0) + (around[s] if s + 1 < num_stages else 0.0))
        groups.append(
            data_split.Group(count=1, size=chain.micro_batch, points=((sum(loads), max(loads)),), most=question.need)
        )
    shared = data_split.share(groups, question.need)
    if shared is None:
        return chains
    return [chain._replace(num_micro_batches=m) for chain, m in zip(chains, shared[1], strict=True)]


def _sync_terms(
    question: Question, chains: Sequence[Chain], placed: Sequence[Sequence[Unit]], costs_of: dict[int, Costs]
) -> list[list[_Sync]]:
    """Ring, update and exposed tail of every stage, over the links between the devices that really share its layers."""
    classes, cluster = question.classes, question.cluster
    min_tp = min(classes[stage.class_index].tp for chain in chains for stage in chain.stages)
    types = sorted({classes[stage.class_index].device_type for chain in chains for stage in chain.stages})
    owners: dict[int, dict[Device, None]] = {}  # layer -> first device of each owner
    for chain, units in zip(chains, placed, strict=True):
        for stage, unit in zip(chain.stages, units, strict=True):
            for l in range(stage.first, stage.end):
                owners.setdefault(l, {})[unit.devices[0]] = None
    tied = next((costs.tied for costs in costs_of.values()), None)
    if tied is not None:
        owners[tied[0]] = owners[tied[1]] = owners[tied[0]] | owners[tied[1]]
    by_type = {name: cost.ring_links(cluster, name, types) for name in types}
    tables: dict[tuple[int, tuple[Link, ...]], SyncTable] = {}
    out = []
    for chain, units in zip(chains, placed, strict=True):
        row = []
        for (k, i, j), unit in zip(chain.stages, units, strict=True):
            mine, links = unit.devices[0], by_type[classes[k].device_type]
            if not question.uniform:
                peers = [device for l in range(i, j) for device in owners[l] if device != mine]
                if peers and all(device.node == mine.node for device in peers):
                    links = tuple(dict.fromkeys(cluster.link(mine, device) for device in peers))
            key = (chain.micro_batch, links)
            if key not in tables:
                rings = [links] * len(classes)
                tables[key] = cost.sync_table(costs_of[chain.micro_batch], question.job, rings, len(chains), min_tp)
            ring, update, tail = (
                float(part[k, i, j]) for part in (tables[key].ring, tables[key].update, tables[key].tail)
            )
            row.append(_Sync(ring, update, tail - update))
        out.append(row)
    return out


def _memory(
    question: Question,
    costs: Costs,
    k: int,
    i: int,
    j: int,
    in_flight: int,
    recomputed: Sequence[int],
    num_pipelines: int,
) -> StageMemory:
    job, unit = question.job, question.classes[k]
    weights = gradients = optimizer = 0
    for l in range(i, j):
        kind = question.profile.kind_of(l)
        held = cost.rank_parameters(kind.parameters, kind.shard_parameters, unit.tp)
        trained = kind.trained_shard(unit.tp)
        if costs.tied is not None and l == costs.tied[1] and i <= costs.tied[0]:
            shared = cost.tied_share(question.profile, unit.tp)
            held, trained = held - shared, trained - shared if kind.trainable else 0
        weights += held * job.state.weights
        gradients += trained * job.state.gradients
        optimizer += trained * job.state.optimizer
    kept = float(costs.kept[k, i:j].sum() - sum(costs.saved[k, l] for l in recomputed)) + float(costs.inputs[i])
    workspace = float(costs.workspace[k, i:j].max()) + (float(costs.rework[k]) if recomputed else 0.0)
    return StageMemory(
        weights=weights,
        gradients=gradients,
        optimizer=-(-optimizer // num_pipelines) if job.shard_optimizer else optimizer,
        activations=math.ceil(in_flight * kept),
        logits=math.ceil(in_flight * float(costs.logits[k, i:j].sum())),
        workspace=math.ceil(workspace),
        sync_buffer=math.ceil(costs.sync_buffer) if num_pipelines > 1 else 0,
        context=job.context_bytes + (job.tp_context_bytes if unit.tp > 1 else 0),
        capacity=question.cluster.device_type(unit.device_type).memory_bytes,
    )


def _predict(
    question: Question,
    pipelines: Sequence[Pipeline],
    hand_overs: Sequence[Sequence[float]],
    sync: Sequence[Sequence[_Sync]],
) -> Predicted:
    slowest = max(pipeline.time_s for pipeline in pipelines)
    tail = max((term for row in sync for term in row), key=lambda term: term.update_s + term.exposed_s)
    iteration = slowest + tail.update_s + tail.exposed_s
    busy = sum(p.num_micro_batches * s.load_s * s.tp for p in pipelines for s in p.stages)
    held = iteration * sum(s.tp for p in pipelines for s in p.stages)
    one_f_one_b = max(
        cost.one_f_one_b_s(
            [s.forward_s for s in p.stages], [s.backward_s + s.recompute_s for s in p.stages], cuts, p.num_micro_batches
        )
        for p, cuts in zip(pipelines, hand_overs, strict=True)
    )
    floor = max(cost.floor_s([s.compute_s for s in p.stages], p.num_micro_batches) for p in pipelines)
    tokens = question.profile.conditions.sequence_length
    return Predicted(
        iteration_s=iteration,
        pipeline_s=slowest,
        sync_s=tail.exposed_s,
        update_s=tail.update_s,
        bubble_fraction=1 - busy / held,
        samples_per_s=question.need / iteration,
        floor_s=floor,
        one_f_one_b_s=one_f_one_b,
        model_flops_utilization=_utilization(question, pipelines, iteration),
        tokens_per_s=None if tokens is None else question.need * tokens / iteration,
    )


def _utilization(question: Question, pipelines: Sequence[Pipeline], iteration_s: float) -> float | None:
    """6 FLOP per parameter and token, without attention and recompute, over the peak of the devices in use."""
    tokens = question.profile.conditions.sequence_length
    peaks = [
        question.cluster.device_type(s.device_type).peak_flops_per_s
        for p in pipelines
        for s in p.stages
        for _ in s.devices
    ]
    if tokens is None or any(peak is None for peak in peaks):
        return None
    flops = 6.0 * question.profile.active_parameters * tokens * question.need
    return flops / (iteration_s * sum(peak for peak in peaks if peak is not None))


def to_plan(question: Question, found: Found, lower_bound_s: float, clock: Clock, restrictions: Sequence[str]) -> Plan:
    """The plan as users get it. `question` is the one asked; the plan may use a part of its cluster."""
    lower = min(lower_bound_s, found.time_s)
    blocks, tied_blocks = _blocks(question, found.pipelines)
    used = {device for pipeline in found.pipelines for stage in pipeline.stages for device in stage.devices}
    idle = tuple(device.name for device in question.cluster.devices if device.name not in used)
    return Plan(
        profile_name=question.profile.name,
        cluster_name=question.cluster.name,
        predicted=found.predicted,
        lower_bound_s=lower,
        gap=found.time_s / lower - 1 if lower > 0 else math.inf,
        proved=not clock.ran_out and not clock.calls.unproved,
        pipelines=found.pipelines,
        blocks=blocks,
        tied_blocks=tied_blocks,
        idle_devices=idle,
        restrictions=tuple(restrictions),
        warnings=(*question.warnings, *_warnings(question, found)),
        job=question.job,
        provenance=Provenance(
            profile=question.profile.digest,
            cluster=question.cluster.digest,
            job=question.job.digest,
            versions=_versions(),
        ),
        stats=(
            ("templates", clock.templates),
            ("linear_programs", clock.calls.linear_programs),
            ("integer_programs", clock.calls.integer_programs),
        ),
    )


def _blocks(question: Question, pipelines: Sequence[Pipeline]) -> tuple[tuple[Block, ...], tuple[TiedBlock, ...]]:
    """Maximal runs of layers with the same owners, the common refinement of all stage cuts; and the weights that two
    layers on different stages share, which are a block of their own."""
    cuts = sorted({edge for pipeline in pipelines for stage in pipeline.stages for edge in stage.layers})
    min_tp = min(stage.tp for pipeline in pipelines for stage in pipeline.stages)
    gradient = question.job.state.gradients
    tied = next((costs.tied for costs in question.costs), None)
    holders: dict[int, int] = {}  # layer -> parameters that are not in its own block
    tied_blocks: tuple[TiedBlock, ...] = ()
    if tied is not None and question.profile.kind_of(tied[1]).trainable:
        once = question.profile.kind_of(tied[1]).tied_parameters
        homes = [_owner(pipeline, l) for pipeline in pipelines for l in tied[:2]]
        owners = tuple(dict.fromkeys(zip((p for p in range(len(pipelines)) for _ in (0, 1)), homes, strict=True)))
        alone = len(owners) > len(pipelines)
        holders = dict.fromkeys(tied[:2] if alone else tied[1:2], once)
        if alone:
            nbytes = -(-once * gradient // min_tp)
            peers = [pipelines[p].stages[s] for p, s in owners]
            calls, seconds = _all_reduce(question, nbytes, 1, 1, peers)
            tied_blocks = (
                TiedBlock(
                    layers=(tied[0], tied[1]), owners=owners, gradient_bytes=nbytes, num_chunks=calls, reduce_s=seconds
                ),
            )
    blocks = []
    for i, j in itertools.pairwise(cuts):
        owners_of = tuple(_owner(pipeline, i) for pipeline in pipelines)
        kinds = [question.profile.kind_of(l) for l in range(i, j)]
        parameters = [kind.trained - holders.get(l, 0) for l, kind in zip(range(i, j), kinds) if kind.trainable]
        nbytes = -(-sum(parameters) * gradient // min_tp)
        peers = [pipeline.stages[s] for pipeline, s in zip(pipelines, owners_of, strict=True)]
        tensors = sum(kind.num_tensors for kind in kinds if kind.trainable)
        calls, seconds = _all_reduce(question, nbytes, len(parameters), tensors, peers)
        blocks.append(Block(layers=(i, j), owners=owners_of, gradient_bytes=nbytes, num_chunks=calls, reduce_s=seconds))
    return tuple(blocks), tied_blocks


def _owner(pipeline: Pipeline, l: int) -> int:
    return next(s for s, stage in enumerate(pipeline.stages) if stage.layers[0] <= l < stage.layers[1])


def _all_reduce(
    question: Question, nbytes: int, layers: int, tensors: int, owners: Sequence[Stage]
) -> tuple[int, float]:
    """Calls and seconds of a ring over the owners, node by node, on the slowest of its links; the half of them that
    reduces and scatters where the optimizer is sharded.

    The tp ranks of a stage reduce their shards side by side: where they share a network port, each gets its part.
    """
    if len(owners) < 2 or not nbytes:
        return 0, 0.0
    job, cluster = question.job, question.cluster
    ring = sorted(((cluster.device(s.devices[0]), s) for s in owners), key=lambda each: (each[0].node, each[0].index))
    links: dict[tuple[Link, int], None] = {}
    for (a, stage_a), (b, stage_b) in zip(ring, (*ring[1:], ring[0]), strict=True):
        side_by_side = max(cluster.sharing(s.devices) for s in (stage_a, stage_b)) if a.node != b.node else 1
        links[cluster.link(a, b), side_by_side] = None

    def seconds(size: float) -> float:
        whole = max(n * float(cost.ring_all_reduce_s(size, len(ring), [link])) for link, n in links)
        return whole / 2 if job.shard_optimizer else whole

    calls = {"model": 1, "layer": layers, "tensor": tensors}.get(job.sync_granularity)
    if calls is not None:
        return calls, calls * seconds(nbytes / calls)
    full, rest = divmod(nbytes, job.sync_chunk_bytes)
    return full + (rest > 0), (full * seconds(job.sync_chunk_bytes) if full else 0.0) + seconds(rest)


def _warnings(question: Question, found: Found) -> list[str]:
    warnings = []
    for p, pipeline in enumerate(found.pipelines):
        if pipeline.num_micro_batches < len(pipeline.stages):
            warnings.append(
                f"pipeline {p}: {pipeline.num_micro_batches} micro-batches for {len(pipeline.stages)} stages, "
                "most of it idles"
            )
    costs_of = {each.micro_batch: each for each in question.costs}
    beyond = {
        f"{question.classes[stage.class_index]}, micro-batch {chain.micro_batch}: "
        "times extrapolated beyond the measured sizes"
        for chain in found.candidate.chains
        for stage in chain.stages
        if costs_of[chain.micro_batch].extrapolated[stage.class_index]
    }
    return warnings + sorted(beyond)


def _versions() -> tuple[tuple[str, str], ...]:
    from importlib.metadata import PackageNotFoundError, version

    out = []
    for name in ("hpp-planner", "numpy", "ortools", "pulp"):
        try:
            out.append((name, version(name)))
        except PackageNotFoundError:
            out.append((name, "not installed"))
    return tuple(out)
