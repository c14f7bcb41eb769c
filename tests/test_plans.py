"""Plans: what `check` accepts and refuses, the JSON form, the printed form.

One small case, worked out by hand, serves most tests. Six layers: embedding, four blocks, head tied to the embedding.
Node n0 has two `fast` devices, n1 four `slow` ones in two fast pairs. Pipeline 0 runs layers 0-3 on one fast device and
4-5 on a slow pair (tp 2), 3 micro-batches of 2. Pipeline 1 runs everything on the other fast device, 4 micro-batches of
1, recomputing layers 1 and 2. The other slow pair is idle.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.job import Job
from planner.plans import (
    Block,
    Infeasible,
    Pipeline,
    Plan,
    Predicted,
    Provenance,
    Stage,
    StageMemory,
    TiedBlock,
    grouped,
    memory_bar,
    places,
    seconds,
    size,
    spans,
)
from planner.profile import Cell, Conditions, LayerKind, ModelProfile

MB = 10**6


def profile(**changes: Any) -> ModelProfile:
    """In ms, micro-batch 1: embedding 1, block 10, head 5 on fast; slow at tp 2 twice that. Micro-batch 2: 1.8 x."""
    kinds = (
        LayerKind(name="embedding", parameters=10 * MB, output_bytes=MB),
        LayerKind(name="block", parameters=20 * MB, output_bytes=MB),
        LayerKind(
            name="head",
            parameters=10 * MB,
            output_bytes=0,
            logits_bytes=4 * MB,
            recomputable=False,
            tied_to="embedding",
            tied_parameters=10 * MB,
        ),
    )
    cells = []
    for kind, forward, update, kept in (("embedding", 1, 1, 2), ("block", 10, 2, 8), ("head", 5, 1, 6)):
        for device_type, tp, slowness in (("fast", 1, 1), ("slow", 2, 2)):
            for b, longer in ((1, 1.0), (2, 1.8)):
                cells.append(
                    Cell(
                        kind=kind,
                        device_type=device_type,
                        tp=tp,
                        micro_batch=b,
                        forward_s=1e-3 * forward * slowness * longer,
                        backward_s=2e-3 * forward * slowness * longer,
                        update_s=1e-3 * update,
                        activation_bytes=kept * MB * b // tp,
                        workspace_bytes=MB,
                    )
                )
    layers = ("embedding", "block", "block", "block", "block", "head")
    values: dict[str, Any] = {"conditions": Conditions(sequence_length=1000), "num_heads": 4, **changes}
    return ModelProfile(name="toy", layers=layers, kinds=kinds, cells=tuple(cells), **values)


def cluster(**changes: Any) -> Cluster:
    """1 GB/s and 1 ms between nodes, so 2 MB take 3 ms; inside a node 10 times that, in a slow pair 20 times."""
    inside, pair = Link(alpha_s=1e-4, bytes_per_s=1e10), Link(alpha_s=1e-4, bytes_per_s=2e10)
    values: dict[str, Any] = {
        "name": "two",
        "device_types": (
            DeviceType(name="fast", memory_bytes=2000 * MB),
            DeviceType(name="slow", memory_bytes=1000 * MB),
        ),
        "nodes": (
            Node(name="n0", devices=("fast",) * 2, link=inside),
            Node(name="n1", devices=("slow",) * 4, link=inside, groups=((0, 1), (2, 3)), group_link=pair),
        ),
        "links": (NetworkLink(between=("*", "*"), link=Link(alpha_s=1e-3, bytes_per_s=1e9)),),
        **changes,
    }
    return Cluster(**values)


JOB = Job(
    global_batch=10,
    precision="fp32",
    memory_margin=0.1,
    context_bytes=100 * MB,
    tp_context_bytes=50 * MB,
    sync_chunk_bytes=50 * MB,
)


def memory(capacity: int, **millions: int) -> StageMemory:
    """All categories in MB."""
    return StageMemory(**{name: value * MB for name, value in millions.items()}, capacity=capacity * MB)


def plan() -> Plan:
    """The plan above. Every number is worked out beside it; MB are 10^6 bytes."""
    first = Stage(
        device_type="fast",
        tp=1,
        layers=(0, 4),
        devices=("n0:0",),
        in_flight=2,  # min(3, 2 - 0)
        forward_s=0.0558,  # 1.8 (1 + 3 x 10)
        backward_s=0.1116,
        transfer_s=0.003,  # one way over the right cut: 1 ms + 2 MB / 1 GB/s
        send_s=0.003,
        send_bytes=2 * MB,
        sync_s=0.005,
        update_s=0.007,  # 1 + 3 x 2
        memory=memory(
            2000,
            weights=280,  # (10 + 3 x 20) M parameters x 4 bytes
            gradients=280,
            optimizer=560,
            activations=104,  # 2 in flight x 2 samples x (2 + 3 x 8)
            logits=0,
            workspace=1,
            sync_buffer=50,  # one chunk
            context=100,
        ),
    )
    second = Stage(
        device_type="slow",
        tp=2,
        layers=(4, 6),
        devices=("n1:0", "n1:1"),
        in_flight=1,  # min(3, 2 - 1)
        forward_s=0.054,  # 1.8 x 2 x (10 + 5)
        backward_s=0.108,
        transfer_s=0.003,
        sync_s=0.004,
        update_s=0.003,  # 2 + 1
        memory=memory(
            1000,
            weights=60,  # (20 + 10) / 2 M parameters on the rank
            gradients=60,
            optimizer=120,
            activations=16,  # 2 samples x (8 + 6) / 2, and 2 samples x 1 of input
            logits=4,  # 2 samples x 4 / 2
            workspace=1,
            sync_buffer=50,
            context=150,  # with the tp communicator
        ),
    )
    whole = Stage(
        device_type="fast",
        tp=1,
        layers=(0, 6),
        devices=("n0:1",),
        recompute=(1, 2),
        in_flight=1,
        forward_s=0.046,  # 1 + 4 x 10 + 5
        backward_s=0.092,
        recompute_s=0.020,
        sync_s=0.006,
        update_s=0.010,  # 1 + 4 x 2 + 1
        memory=memory(
            2000,
            weights=360,  # 10 + 4 x 20 + 10, less the 10 of the head that are the embedding's
            gradients=360,
            optimizer=720,
            activations=26,  # 2 + (1 + 1) inputs of layers 1 and 2 + 8 + 8 + 6
            logits=4,
            workspace=9,  # 1, and 8 to recompute the largest recomputable layer in
            sync_buffer=50,
            context=100,
        ),
    )
    pipelines = (
        Pipeline(micro_batch=2, num_micro_batches=3, stages=(first, second), time_s=0.6762),  # 170.4 + 165 + 2 x 170.4
        Pipeline(micro_batch=1, num_micro_batches=4, stages=(whole,), time_s=0.632),  # 4 x (46 + 92 + 20)
    )
    return Plan(
        profile_name="toy",
        cluster_name="two",
        pipelines=pipelines,
        blocks=(
            # (70 - 10 tied) M x 4 bytes inside n0: 4 x 2 (0.1 + 2.5 ms) + 2 (0.1 + 2 ms)
            Block(layers=(0, 4), owners=(0, 0), gradient_bytes=240 * MB, num_chunks=5, reduce_s=0.025),
            # (30 - 10 tied) M x 4 bytes between the nodes: 2 (1 + 25 ms) + 2 (1 + 15 ms)
            Block(layers=(4, 6), owners=(1, 0), gradient_bytes=80 * MB, num_chunks=2, reduce_s=0.084),
        ),
        tied_blocks=(
            # 10 M x 4 bytes over three owners: 4 (1 + 13.3 ms)
            TiedBlock(layers=(0, 5), owners=((0, 0), (0, 1), (1, 0)), gradient_bytes=40 * MB, reduce_s=0.0573),
        ),
        predicted=Predicted(
            iteration_s=0.6902,
            pipeline_s=0.6762,
            sync_s=0.004,
            update_s=0.010,
            bubble_fraction=0.25,
            samples_per_s=10 / 0.6902,
            floor_s=0.6534,  # 167.4 + 3 x 162
            one_f_one_b_s=0.6754,
            tokens_per_s=10_000 / 0.6902,
        ),
        lower_bound_s=0.68,
        gap=0.6902 / 0.68 - 1,
        idle_devices=("n1:2", "n1:3"),
        warnings=("2 of 6 devices are not used",),
        job=JOB,
        provenance=Provenance(
            profile=profile().digest, cluster=cluster().digest, job=JOB.digest, versions=(("planner", "0.1.0"),)
        ),
        stats=(("templates", 7.0),),
    )


def with_stage(p: int, s: int, **changes: Any) -> Plan:
    """The plan with one stage changed."""
    good = plan()
    pipelines, stages = list(good.pipelines), list(good.pipelines[p].stages)
    stages[s] = replace(stages[s], **changes)
    pipelines[p] = replace(pipelines[p], stages=tuple(stages))
    return replace(good, pipelines=tuple(pipelines))


def with_memory(p: int, s: int, **changes: int) -> Plan:
    """The plan with the stored memory of one stage changed."""
    return with_stage(p, s, memory=replace(plan().pipelines[p].stages[s].memory, **changes))


def with_pipeline(p: int, **changes: Any) -> Plan:
    """The plan with one pipeline changed."""
    pipelines = list(plan().pipelines)
    pipelines[p] = replace(pipelines[p], **changes)
    return replace(plan(), pipelines=tuple(pipelines))


def with_predicted(**changes: float) -> Plan:
    """The plan with other predictions."""
    return replace(plan(), predicted=replace(plan().predicted, **changes))


def stages(p: int) -> tuple[Stage, ...]:
    """Stages of a pipeline of the plan."""
    return plan().pipelines[p].stages


def test_accepts_the_plan_worked_out_by_hand() -> None:
    """A plan whose every figure was derived on paper passes."""
    assert plan().problems(profile(), cluster(), JOB) == ()
    plan().check(profile(), cluster())


DAMAGE: dict[str, tuple[Callable[[], Plan], str]] = {
    "layer dropped": (lambda: with_stage(0, 1, layers=(4, 5)), "layers 5 run on no stage; 5 of 6 layers are covered"),
    "layer run twice": (lambda: with_stage(0, 1, layers=(3, 6)), "layers 3 run more than once, on stages 0 and 1"),
    "layer that does not exist": (
        lambda: with_stage(0, 1, layers=(4, 7)),
        "layers up to 6 do not exist, the model has 6",
    ),
    "stages swapped": (
        lambda: with_pipeline(0, stages=stages(0)[::-1]),
        "starts at layer 0, before stage 0: out of order",
    ),
    "sample lost": (
        lambda: with_pipeline(1, num_micro_batches=3),
        "the pipelines take 9 samples, the global batch is 10",
    ),
    "device used twice": (
        lambda: with_stage(1, 0, devices=("n0:0",)),
        "device n0:0 is used 2 times, by pipeline 0 stage 0",
    ),
    "device of another type": (lambda: with_stage(1, 0, devices=("n1:2",)), "device n1:2 is a slow"),
    "unknown device": (
        lambda: with_stage(1, 0, devices=("n7:0",)),
        "device n7:0 of pipeline 1 stage 0 is not in the cluster",
    ),
    "device missing": (lambda: with_stage(0, 1, devices=("n1:0",)), "1 devices for tp 2"),
    "tp across pairs": (
        lambda: replace(with_stage(0, 1, devices=("n1:1", "n1:2")), idle_devices=("n1:0", "n1:3")),
        "its tp group is not inside one fast group of n1",
    ),
    "tp across nodes": (lambda: with_stage(0, 1, devices=("n0:1", "n1:0")), "its tp group spans 2 nodes"),
    "tp against the heads": (lambda: with_stage(0, 1, tp=3), "tp 3 does not divide 4 attention heads"),
    "idle device unsaid": (lambda: replace(plan(), idle_devices=("n1:2",)), "idle devices are not listed: n1:3"),
    "busy device idle": (
        lambda: replace(plan(), idle_devices=("n0:0", "n1:2", "n1:3")),
        "listed as idle are in use or not in the cluster: n0:0",
    ),
    "weights understated": (
        lambda: with_memory(0, 0, weights=270 * MB),
        "weights understated as 0.25 GiB, it takes 0.26 GiB",
    ),
    "tied weights twice": (
        lambda: with_memory(1, 0, weights=400 * MB),
        "weights overstated as 0.37 GiB, it takes 0.34 GiB",
    ),
    "gradients understated": (lambda: with_memory(1, 0, gradients=0), "gradients understated as 0 B"),
    "optimizer understated": (lambda: with_memory(0, 1, optimizer=60 * MB), "optimizer understated"),
    "activations of one in flight": (lambda: with_memory(0, 0, activations=52 * MB), "(2 in flight x (49.6 MiB kept"),
    "logits forgotten": (lambda: with_memory(0, 1, logits=0), "logits understated as 0 B, it takes 3.8 MiB"),
    "no room to recompute": (lambda: with_memory(1, 0, workspace=MB), "workspace understated"),
    "sync buffer forgotten": (lambda: with_memory(0, 0, sync_buffer=0), "sync_buffer understated"),
    "tp context forgotten": (lambda: with_memory(0, 1, context=100 * MB), "context understated"),
    "capacity inflated": (lambda: with_memory(0, 1, capacity=8000 * MB), "slow has 0.93 GiB"),
    "over capacity": (
        lambda: with_memory(0, 1, workspace=700 * MB),
        "does not fit, needs 1.08 GiB of 0.84 GiB (0.24 GiB short",
    ),
    "in-flight count": (lambda: with_stage(0, 0, in_flight=1), "in_flight is 1, 1F1B holds min(m, S - s) = 2"),
    "recompute elsewhere": (lambda: with_stage(0, 0, recompute=(4,)), "recomputes layers 4, which it does not run"),
    "recompute of the head": (lambda: with_stage(1, 0, recompute=(1, 5)), "whose kind head cannot be recomputed"),
    "recompute not charged": (lambda: with_stage(1, 0, recompute_s=0.0), "recompute_s is 0, the profile gives 0.02"),
    "forward too fast": (lambda: with_stage(0, 0, forward_s=0.05), "forward_s is 0.05, the profile gives 0.0558"),
    "backward too fast": (lambda: with_stage(0, 1, backward_s=0.1), "backward_s is 0.1, the profile gives 0.108"),
    "update forgotten": (lambda: with_stage(0, 1, update_s=0.0), "update_s is 0, the profile gives 0.003"),
    "transfer too fast": (
        lambda: with_stage(0, 0, transfer_s=0.001),
        "transfer_s is 0.001, the fastest links need 0.003",
    ),
    "send too fast": (
        lambda: with_stage(0, 0, send_s=0.001),
        "transfer_s is 0.003, its cuts take 0 and 0.001",
    ),
    "send off the links": (
        lambda: with_stage(0, 0, send_s=0.002, transfer_s=0.002),
        "send_s is 0.002, links need 0.003 to 0.003 for it",
    ),
    "fewer bytes sent": (lambda: with_stage(0, 0, send_bytes=MB), "send_bytes is 1000000, layer 4 takes 2000000"),
    "more in flight than micro-batches": (lambda: with_stage(0, 0, in_flight=4), "in_flight is 4, there are 3"),
    "later stage ahead": (lambda: with_stage(0, 1, in_flight=3), "in_flight is 3, the stage before holds 2"),
    "micro-batch never measured": (
        lambda: with_pipeline(0, micro_batch=3, num_micro_batches=2),
        "no time of kind embedding at micro-batch 3 (measured at 1, 2)",
    ),
    "class never measured": (
        lambda: with_stage(1, 0, device_type="slow", devices=("n1:2",)),
        "no time of kind block at micro-batch 1 (never measured there)",
    ),
    "pipeline time": (lambda: with_pipeline(0, time_s=0.6), "time_s is 0.6, its stages give 0.6762"),
    "block too long": (
        lambda: replace(plan(), blocks=plan().blocks[:1]),
        "are not the common refinement of the stages",
    ),
    "block owners": (
        lambda: replace(plan(), blocks=(plan().blocks[0], replace(plan().blocks[1], owners=(0, 0)))),
        "block [4, 6): its owners are stages [1, 0], not [0, 0]",
    ),
    "block bytes": (
        lambda: replace(plan(), blocks=(replace(plan().blocks[0], gradient_bytes=140 * MB), plan().blocks[1])),
        "block [0, 4): gradient_bytes is 140000000",
    ),
    "reduction too fast": (
        lambda: replace(plan(), blocks=(plan().blocks[0], replace(plan().blocks[1], reduce_s=0.02))),
        "block [4, 6): reduce_s is 0.02, rings of 2 take 0.084 to 0.084",
    ),
    "reduction without a call": (
        lambda: replace(plan(), blocks=(plan().blocks[0], replace(plan().blocks[1], num_chunks=0))),
        "block [4, 6): num_chunks is 0",
    ),
    "tied weights not reduced": (lambda: replace(plan(), tied_blocks=()), "layers 0 and 5 share weights held by"),
    "tied weights of other bytes": (
        lambda: replace(plan(), tied_blocks=(replace(plan().tied_blocks[0], gradient_bytes=20 * MB),)),
        "tied weights of layer 5: gradient_bytes is 20000000, not 40000000",
    ),
    "iteration beautified": (lambda: with_predicted(iteration_s=0.6762), "its terms add up to 0.6902"),
    "slowest pipeline hidden": (lambda: with_predicted(pipeline_s=0.632), "the slowest pipeline takes 0.6762"),
    "simulation beautified": (
        lambda: with_predicted(simulated_s=0.6),
        "simulated_s 0.6 is less than the stages compute, 0.6534",
    ),
    "samples per second": (lambda: with_predicted(samples_per_s=20.0), "batch over time is 14.4886"),
    "tokens per second": (
        lambda: with_predicted(tokens_per_s=20.0),
        "tokens_per_s is 20, samples times length are 14488.6",
    ),
    "sync forgotten": (lambda: with_stage(0, 0, sync_s=0.0), "sync_s is 0 with 2 pipelines"),
    "tail beautified": (
        lambda: with_predicted(update_s=0.0),
        "update_s are 0.004 together, the stages' own lie between 0.01 and 0.016",
    ),
    "bubble": (lambda: with_predicted(bubble_fraction=-0.1), "bubble_fraction -0.1 is not between 0 and 1"),
    "floor above": (lambda: with_predicted(floor_s=0.7), "floor_s 0.7 is more than the stages compute, 0.6534"),
    "bound above the value": (lambda: replace(plan(), lower_bound_s=0.7, gap=0.0), "lower_bound_s 0.7 is above"),
    "gap": (lambda: replace(plan(), gap=0.0), "gap is 0, value over bound gives 0.015"),
    "another profile": (lambda: replace(plan(), profile_name="play"), "is called 'toy', the plan was made for 'play'"),
    "profile digest": (
        lambda: replace(plan(), provenance=replace(plan().provenance, profile="0" * 16)),
        "the profile is not the one the plan was made for",
    ),
    "cluster digest": (
        lambda: replace(plan(), provenance=replace(plan().provenance, cluster="0" * 16)),
        "the cluster is not the one the plan was made for",
    ),
}


@pytest.mark.parametrize(("damaged", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_refuses_a_damaged_plan_and_says_what_is_wrong(damaged: Callable[[], Plan], words: str) -> None:
    """`check` refuses every kind of damage, in words that name it."""
    found = damaged().problems(profile(), cluster(), JOB)
    assert any(words in problem for problem in found), "\n".join(found)
    with pytest.raises(ValueError, match=r"^plan: "):
        damaged().check(profile(), cluster(), JOB)


def test_names_every_problem_at_once() -> None:
    """Two independent faults are both in the one message."""
    broken = replace(with_stage(0, 0, in_flight=1), gap=0.5)
    with pytest.raises(ValueError, match=r"in_flight is 1.*; gap is 0\.5"):
        broken.check(profile(), cluster(), JOB)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (replace(JOB, recompute=False), "recomputes layers 1-2, the job forbids recompute"),
        (replace(JOB, tp=(1,)), "tp 2 is not among the job's [1]"),
        (replace(JOB, micro_batches=(1,)), "micro-batch 2 is not among the job's [1]"),
        (replace(JOB, max_depth=1), "pipeline 0: 2 stages, the job allows 1"),
        (replace(JOB, max_classes=1), "pipeline 0: 2 device classes, the job allows 1"),
        (replace(JOB, global_batch=12), "the global batch is 12"),
        (replace(JOB, precision="mixed"), "optimizer understated"),
        (replace(JOB, memory_margin=0.2), "margin 20%"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_holds_the_plan_against_the_job(job: Job, words: str) -> None:
    """A plan is refused for a job whose choices or memory it does not respect, and the change of job is named."""
    found = plan().problems(profile(), cluster(), job)
    assert any(words in problem for problem in found), found
    assert any("the job is not the one the plan was made for" in problem for problem in found)


def test_key_value_heads_limit_tp() -> None:
    """tp must divide the kv heads or be a multiple of them."""
    found = plan().problems(profile(num_heads=6, num_kv_heads=3), cluster(), JOB)
    assert any("tp 2 and 3 kv heads do not divide one another" in problem for problem in found)


def test_interpolated_sizes_are_accepted_and_extrapolated_ones_need_a_warning() -> None:
    """Size 2 between measured 1 and 3 gives the line's value; beyond the last size the plan has to say so."""
    # Cells at 2 (1.8 x) replaced by cells at 3 (2.6 x): the line through 1 and 3 passes through 1.8 at 2.
    cells = tuple(
        cell
        if cell.micro_batch == 1
        else replace(
            cell,
            micro_batch=3,
            forward_s=cell.forward_s / 1.8 * 2.6,
            backward_s=cell.backward_s / 1.8 * 2.6,
            activation_bytes=cell.activation_bytes * 3 // 2,
        )
        for cell in profile().cells
    )
    between = replace(profile(), cells=cells)
    good = replace(plan(), provenance=replace(plan().provenance, profile=between.digest))
    assert good.problems(between, cluster(), JOB) == ()

    # The same cells at 2, but marked as extrapolated.
    marked = replace(profile(), cells=tuple(replace(c, extrapolated=c.micro_batch == 2) for c in profile().cells))
    bold = replace(JOB, extrapolate=True)
    origin = replace(plan().provenance, profile=marked.digest, job=bold.digest)
    silent = replace(plan(), job=bold, provenance=origin)
    assert any("no warning of the plan says" in problem for problem in silent.problems(marked, cluster()))
    said = replace(silent, warnings=("micro-batch 2 is extrapolated",))
    assert said.problems(marked, cluster()) == ()
    shy = replace(silent, job=JOB, provenance=replace(origin, job=JOB.digest))
    assert any("no time of kind block at micro-batch 2 (measured at 1)" in p for p in shy.problems(marked, cluster()))


def test_exposed_sync_hides_nothing() -> None:
    """Where sync follows the backward pass, the tail is the whole ring and the update of the slowest stage."""
    exposed = replace(JOB, sync="exposed")  # 10 + 6 ms on the stage of pipeline 1
    origin = replace(plan().provenance, job=exposed.digest)
    hidden = replace(plan(), job=exposed, provenance=origin)
    words = "update_s are 0.014 together, the stages' own lie between 0.016 and 0.016"
    assert [words in problem for problem in hidden.problems(profile(), cluster())] == [True]


def test_update_per_stage_counts_once() -> None:
    """Where a profile repeats the update of a whole stage on every layer, a stage takes the largest, not the sum."""
    found = plan().problems(profile(conditions=Conditions(update_per="stage")), cluster(), JOB)
    assert any("update_s is 0.007, the profile gives 0.002" in problem for problem in found)


def test_communication_outside_the_times_may_only_add() -> None:
    """With tp communication outside the profile, a tp stage may take longer than its cells, not shorter."""
    outside = profile(conditions=Conditions(sequence_length=1000, tp_communication="outside"))

    def told(forward_s: float) -> list[str]:
        found = with_stage(0, 1, forward_s=forward_s).problems(outside, cluster(), JOB)
        return [problem for problem in found if "forward_s" in problem]

    assert not told(0.060)
    assert told(0.050)


def test_frozen_layers_hold_weights_only() -> None:
    """A kind that is not trained needs no gradients, no optimizer state and no sync."""
    kinds = tuple(replace(kind, trainable=kind.name != "block") for kind in profile().kinds)
    found = plan().problems(replace(profile(), kinds=kinds), cluster(), JOB)
    assert any("pipeline 0 stage 0" in p and "gradients overstated as 0.26 GiB, it takes 38.1 MiB" in p for p in found)
    assert not any("weights" in problem for problem in found)


def test_survives_json() -> None:
    """A plan read back from its JSON is the same plan, the same text and the same digest."""
    good = plan()
    again = Plan.from_dict(good.to_dict())
    assert again == good
    assert again.digest == good.digest
    assert str(again) == str(good)


def test_file_keeps_the_keys_that_others_read(tmp_path: Path) -> None:
    """The judge's keys stand where they are promised; a saved plan loads equal."""
    plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan()
    data = plan().to_dict()
    assert data["schema"] == "hpp-plan/1"
    stage = data["pipelines"][0]["stages"][1]
    assert {key: stage[key] for key in ("device_type", "tp", "layers", "devices")} == {
        "device_type": "slow",
        "tp": 2,
        "layers": [4, 6],
        "devices": ["n1:0", "n1:1"],
    }
    assert data["pipelines"][0]["micro_batch"] == 2
    assert data["pipelines"][0]["num_micro_batches"] == 3
    assert data["predicted"]["iteration_s"] == 0.6902
    assert {"lower_bound_s", "gap"} <= set(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(schema="hpp-plan/9"), "schema: 'hpp-plan/9' is not 'hpp-plan/1'"),
        (lambda data: data.update(speed=1), "key 'speed' is not among"),
        (
            lambda data: data["pipelines"][0]["stages"][0].update(layers=[4, 4]),
            r"pipelines\[0\].stages\[0\].layers: \[4, 4\)",
        ),
        (
            lambda data: data["pipelines"][0]["stages"][0].update(tp=0),
            r"pipelines\[0\].stages\[0\].tp: 0 is less than 1",
        ),
        (lambda data: data["pipelines"][1].update(stages=[]), r"pipelines\[1\].stages: a pipeline needs"),
        (lambda data: data["predicted"].update(iteration_s=-1), "predicted.iteration_s: -1.0 is not a time"),
        (lambda data: data["pipelines"][0]["stages"][0]["memory"].update(weights=-5), "memory.weights: -5"),
        (lambda data: data.update(pipelines=[]), "pipelines: a plan needs at least one"),
        (lambda data: data["predicted"].update(iteration_s=0), "predicted.iteration_s: 0 is no time"),
        (lambda data: data["blocks"][0].update(layers=[4, 4]), r"blocks\[0\].layers: \[4, 4\) is not a range"),
        (lambda data: data["blocks"][0].update(owners=[0]), r"blocks\[0\].owners: 1 for 2 pipelines"),
        (lambda data: data["blocks"][0].update(owners=[0, 7]), r"blocks\[0\].owners: pipeline 1 stage 7 does not"),
        (lambda data: data["blocks"][0].update(gradient_bytes=-1), r"blocks\[0\].gradient_bytes: -1 bytes is neg"),
        (
            lambda data: data["tied_blocks"][0].update(owners=[[0, 0], [9, 0]]),
            r"tied_blocks\[0\].owners: pipeline 9 stage 0 does not exist",
        ),
        (lambda data: data["tied_blocks"][0].update(num_chunks=-3), r"tied_blocks\[0\].num_chunks: -3 calls is neg"),
    ],
)
def test_bad_json_is_named(change: Callable[[dict[str, Any]], object], words: str) -> None:
    """Reading a plan that is none names the key and the value."""
    data = plan().to_dict()
    change(data)
    with pytest.raises(ValueError, match=words):
        Plan.from_dict(data, where="plan.json")


def test_prints_one_line() -> None:
    """`repr` is one line: time, rate, shape, devices used of given, fullest device (1629 of 2000 MB: 81 %)."""
    shape = "2 pipelines, 3 stages, 4/6 devices, fullest 81%"
    assert repr(plan()) == f"<Plan 690.2 ms per iteration, 14,489 tokens/s, {shape}>"


PRINTED = """\
toy on two
690.2 ms per iteration, 14.49 samples/s (14,489 tokens/s), 1.50% above the lower bound

time        slowest pipeline 676.2 ms + exposed gradient sync 4.000 ms + update 10.00 ms
use         4 of 6 devices, bubble 25.0%
bounds      any plan 680.0 ms or more by planning form, this one 653.4 ms with whole backwards, as 1F1B 675.4 ms
batch       10 samples = 6 (A) + 4 (B)

  stage  layers  n  device  tp  where   compute ms  transfer    load    recompute  memory

pipeline A: 3 micro-batches of 2 = 6 samples (60.0% of the batch) in 676.2 ms
      0     0-3  4  fast     1  n0:0        167.40      3.00  170.40 *             [#######---]   1.3/1.9 GiB
      1     4-5  2  slow     2  n1:0-1      162.00      3.00  165.00               [#####-----]   0.4/0.9 GiB

pipeline B: 4 micro-batches of 1 = 4 samples (40.0% of the batch) in 632.0 ms
      0     0-5  6  fast     1  n0:1        158.00      0.00  158.00 *     2 of 6  [########--]   1.5/1.9 GiB

* bottleneck; load: compute + transfer of one micro-batch; memory: fullest device, against its capacity

idle        2 devices: n1:2-3
warning     2 of 6 devices are not used
"""


def test_prints_a_table_for_logs() -> None:
    """The printed plan: headline, terms, a row per stage, bottleneck marked, memory, what is idle, what is odd."""
    assert str(plan()) == PRINTED.rstrip("\n")


def test_equal_pipelines_share_their_rows() -> None:
    """128 devices in 64 equal pipelines print in a few lines of a log's width, which say how many copies there are."""
    one = plan().pipelines[0]

    def copy(n: int) -> Pipeline:
        first, second = one.stages
        fast = replace(first, devices=(f"f-{n // 8}:{n % 8}",))
        slow = replace(second, tp=1, devices=(f"s-{n // 4}:{n % 4}",))
        return replace(one, stages=(fast, slow))

    alone = replace(plan(), blocks=(), tied_blocks=(), idle_devices=(), warnings=())
    many = replace(alone, pipelines=tuple(map(copy, range(64))))
    assert [(letter, len(members)) for letter, members in grouped(many)] == [("A", 64)]
    lines = str(many).splitlines()
    assert len(lines) < 16
    assert max(map(len, lines)) <= 112
    assert any("64 x pipeline A" in line for line in lines)
    assert any("f-[0-7]:0-7" in line for line in lines)
    assert any("s-[0-15]:0-3" in line for line in lines)


def test_unequal_pipelines_stay_apart() -> None:
    """Pipelines that differ in their micro-batches only are told apart; the letters follow the plan's order."""
    one = plan().pipelines[0]
    pipelines = (one, replace(one, num_micro_batches=4), one)
    mixed = replace(plan(), pipelines=pipelines, blocks=(), tied_blocks=())
    assert grouped(mixed) == [("A", [0, 2]), ("B", [1])]


def test_words_for_numbers() -> None:
    """Times, sizes, ranges and hosts read as a person would write them."""
    times = {0.0: "0 s", 2.5e-6: "2.500 us", 0.01234: "12.34 ms", 1.5: "1.500 s", 12345.6: "12,346 s"}
    assert {time: seconds(time) for time in times} == times
    assert [size(n) for n in (0, 4096, 5 * 2**20, 3 * 2**29)] == ["0 B", "4.0 KiB", "5.0 MiB", "1.50 GiB"]
    assert spans([5, 3, 4, 9]) == "3-5,9"
    assert places(["a-1:0", "a-0:0", "a-0:1", "a-1:1", "b:3", "b:1"]) == "a-[0-1]:0-1, b:1,3"
    assert places(["node10:0", "node2:0", "node9:0", "odd"]) == "node[2,9-10]:0, odd"
    full = replace(plan().pipelines[0].stages[0].memory, capacity=2200 * MB)  # 1375 of 2200: 62 %
    assert memory_bar(full) == "[######----]   1.3/2.0 GiB"
    assert memory_bar(replace(full, capacity=1000 * MB)) == "[!!!!!!!!!!]   1.3/0.9 GiB"


def test_infeasible_says_where_and_what_would_help() -> None:
    """The text holds message, place, missing GiB and remedy; the fields survive pickling (worker processes)."""
    error = Infeasible("no plan fits", stage=2, device_type="V100-16", short_bytes=3 * 2**29, remedy="allow recompute")
    text = "no plan fits; nearest miss: stage 2 on V100-16 1.50 GiB short; cheapest change: allow recompute"
    assert str(error) == text
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.short_bytes, again.remedy) == (text, 3 * 2**29, "allow recompute")
    assert str(Infeasible("no device")) == "no device"


def test_plans_are_values() -> None:
    """Plans are frozen and vary by replacement."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().gap = 0.0  # type: ignore[misc]
