"""`planner.bound` never exceeds what an exhaustive search, or any plan, attains; asked directly, with room above it.

The bound is capped by the value at hand, so it is asked with half as much again: one that is too high would show.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations_with_replacement

import factories
import numpy as np
import oracle
import pytest

from planner import bound, search
from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.data_split import Columns
from planner.job import BytesPerParameter, Job
from planner.profile import Cell, LayerKind, ModelProfile
from planner.question import Clock, ask

GB = 10**9
ROOM = 1.5


def bound_of(profile, cluster, job, value, hints=None):
    """The lower bound, as if `value` x 1.5 were the best plan so far."""
    return bound.lower_bound(ask(profile, cluster, job), value * ROOM, Clock(), hints)


def tiny(seed, **job):
    """An oracle case of 3 to 5 devices and 2 to 5 layers, and its optimum; None if nothing fits."""
    profile, cluster, question = oracle.draw(seed, num_devices=3 + seed % 3, num_layers=2 + seed % 4)
    question = replace(question, **job)
    found = oracle.optimum(profile, cluster, question)
    return None if found is None else (profile, cluster, question, found)


# By hand.


def model(kinds, times, activation_bytes=0, update_s=0.0):
    """One layer of each kind; seconds per layer and device type, a quarter of them forward."""
    cells = [
        Cell(
            kind=kind.name,
            device_type=name,
            tp=1,
            micro_batch=1,
            forward_s=t / 4,
            backward_s=3 * t / 4,
            update_s=update_s,
            activation_bytes=activation_bytes,
        )
        for name, row in times.items()
        for kind, t in zip(kinds, row, strict=True)
    ]
    return ModelProfile(name="by hand", layers=tuple(k.name for k in kinds), kinds=tuple(kinds), cells=tuple(cells))


def blocks(count, parameters=0, **others):
    return [LayerKind(name=f"k{i}", parameters=parameters, output_bytes=0, **others) for i in range(count)]


def devices(counts, memory=1000 * GB, beta=1e9):
    """Single devices, every link of `beta` bytes per second."""
    link = Link(bytes_per_s=beta)
    return Cluster(
        name="by hand",
        device_types=tuple(DeviceType(name=name, memory_bytes=memory) for name in counts),
        nodes=tuple(
            Node(name=f"{name}{i}", devices=(name,), link=link) for name, count in counts.items() for i in range(count)
        ),
        links=tuple(NetworkLink(between=pair, link=link) for pair in combinations_with_replacement(counts, 2)),
    )


def plain(global_batch, **others):
    """One byte of gradient per parameter, reduced in one message after the backward pass; no other memory."""
    fields = {
        "recompute": False,
        "memory_margin": 0.0,
        "context_bytes": 0,
        "sync": "exposed",
        "sync_granularity": "model",
        "sync_buffer_bytes": 0,
        "bytes_per_parameter": BytesPerParameter(weights=0, gradients=1, optimizer=0),
    }
    return Job(global_batch=global_batch, **(fields | others))


def test_work_bound_by_hand():
    """A takes 1 s per layer, B 3 s, four layers, eight samples: 8 x 4 / (1 + 1/3) = 24 s with both always at work."""
    question = ask(model(blocks(4), {"A": [1.0] * 4, "B": [3.0] * 4}), devices({"A": 1, "B": 1}), plain(8))
    assert bound.work_bound(question) == pytest.approx(24.0)


def test_work_bound_lets_each_device_do_what_it_is_best_at():
    """A: 1 and 4 s, B: 4 and 1 s. Layers of 1 device-second each: 6 samples x 2 / 2 devices = 6 s."""
    profile = model(blocks(2), {"A": [1.0, 4.0], "B": [4.0, 1.0]})
    cluster = devices({"A": 1, "B": 1})
    assert bound.work_bound(ask(profile, cluster, plain(6))) == pytest.approx(6.0)
    # Two stages: 1 + 1 + 5 x 1 = 7, the optimum; what is at work all the time cannot see the fill.
    assert oracle.optimum(profile, cluster, plain(6)).value == pytest.approx(7.0)


def test_a_bound_is_attained_by_unequal_replicas():
    """A runs the model in 4 s, B in 12 s: of 8 samples A takes 6 and B 2, 24 s; the bound reaches that."""
    profile, cluster = model(blocks(4), {"A": [1.0] * 4, "B": [3.0] * 4}), devices({"A": 1, "B": 1})
    lower = bound_of(profile, cluster, plain(8), 24.0)
    assert 24 * 0.995 <= lower <= 24 * (1 + 1e-9)


def test_a_bound_counts_the_tail_that_no_plan_avoids():
    """One device: 5 samples x 2 s + updates of two layers of 0.5 s = 11 s."""
    profile, cluster = model(blocks(2), {"A": [1.0, 1.0]}, update_s=0.5), devices({"A": 1})
    assert 10.5 <= bound_of(profile, cluster, plain(5), 11.0) <= 11 * (1 + 1e-9)


def test_a_stage_of_both_tied_ends_has_no_ring():
    """Two ends of 8 GB, one tensor, on links of 1 GB/s: apart they reduce 8 s; one device alone takes 4 x 3 = 12 s."""
    kinds = [
        LayerKind(name="embed", parameters=8 * GB, output_bytes=0),
        LayerKind(name="head", parameters=8 * GB, output_bytes=0, tied_to="embed", tied_parameters=8 * GB),
    ]
    # Two stages: 1 + 2 + 3 x 2 = 9, and 8 s of ring: 17. Two pipelines: 2 x 3 = 6, and 8 s: 14.
    profile, cluster = model(kinds, {"A": [1.0, 2.0]}), devices({"A": 2})
    assert oracle.optimum(profile, cluster, plain(4)).value == pytest.approx(12.0)
    assert bound_of(profile, cluster, plain(4), 12.0) <= 12 * (1 + 1e-9)


def test_a_longer_stage_may_hide_the_ring_of_a_layer():
    """3 GB in a layer of 0.4 s beside one of 3.6 s with nothing: both in one stage hide the ring, apart it is bare."""
    # Two pipelines with 2 of 4 samples each: 2 x 4 = 8 s. Ring 2 (P - 1) / P x 3 GB = 3 s = B of the stage: hidden but
    # for the last chunk, 0.01 s. The first layer alone on a stage: 3 - 0.3 = 2.7 s.
    kinds = [
        LayerKind(name="embed", parameters=3 * GB, output_bytes=0),
        LayerKind(name="block", parameters=0, output_bytes=0),
    ]
    profile, cluster = model(kinds, {"A": [0.4, 3.6]}), devices({"A": 2})
    job = plain(4, sync="overlapped", sync_granularity="block", sync_chunk_bytes=10**7)
    assert oracle.optimum(profile, cluster, job).value == pytest.approx(8.01)
    assert bound_of(profile, cluster, job, 8.01) <= 8.01 * (1 + 1e-9)


def test_a_layer_may_fit_only_beside_the_one_before_it():
    """The first layer hands over 3 GB and devices hold 2: no stage starts at the second layer, one holds both."""
    kinds = [
        LayerKind(name="wide", parameters=0, output_bytes=3 * GB),
        LayerKind(name="narrow", parameters=0, output_bytes=0),
    ]
    profile, cluster = model(kinds, {"A": [1.0, 2.0], "B": [3.0, 6.0]}), devices({"A": 1, "B": 1}, memory=2 * GB)
    # With B as a second pipeline: 3 x 3 = 9 s on both.
    assert oracle.optimum(profile, cluster, plain(4)).value == pytest.approx(9.0)
    assert bound_of(profile, cluster, plain(4), 9.0) <= 9 * (1 + 1e-9)


def test_fewer_micro_batches_than_stages_need_less_memory():
    """Layers keep 4 GB each on devices of 5 GB: two stages hold one micro-batch (2 s), but two never fit."""
    profile, cluster = model(blocks(2), {"A": [1.0, 1.0]}, activation_bytes=4 * GB), devices({"A": 2}, memory=5 * GB)
    assert oracle.optimum(profile, cluster, plain(1)).value == pytest.approx(2.0)
    assert bound_of(profile, cluster, plain(1), 2.0) <= 2 * (1 + 1e-9)
    # With four devices each of two pipelines takes one of two samples: still 2 s, each with m = 1 < S = 2.
    cluster = devices({"A": 4}, memory=5 * GB)
    assert oracle.optimum(profile, cluster, plain(2)).value == pytest.approx(2.0)
    assert bound_of(profile, cluster, plain(2), 2.0) <= 2 * (1 + 1e-9)


# Against exhaustive search.


@pytest.mark.parametrize("start", range(0, 96, 24))
def test_bound_is_never_above_the_optimum(start):
    """On at least 60 of 96 random tiny cases with memory limits, sync and tp: work bound <= lower bound <= optimum."""
    feasible, ratios = 0, []
    for seed in range(start, start + 24):
        case = tiny(seed)
        if case is None:
            continue
        profile, cluster, job, best = case
        work, lower = bound.work_bound(ask(profile, cluster, job)), bound_of(profile, cluster, job, best.value)
        assert work <= lower * (1 + 1e-9), seed
        assert lower <= best.value * (1 + 1e-9), (seed, lower / best.value)
        feasible += 1
        ratios.append(lower / best.value)
    assert feasible >= 15
    assert np.median(ratios) >= 0.6  # not vacuous, even where a few devices make whole numbers weigh most


def test_bound_is_valid_with_fewer_micro_batches_than_stages():
    """On random cases of one to three samples, where memory counts for few micro-batches; some optima have m < S."""
    short = 0
    for seed in range(1000, 1060):
        case = tiny(seed, global_batch=1 + seed % 3)
        if case is None:
            continue
        profile, cluster, job, best = case
        assert bound_of(profile, cluster, job, best.value) <= best.value * (1 + 1e-9), seed
        short += any(x.num_micro_batches < len(x.stages) for x in best.pipelines)
    assert short >= 8


def hints_of(draw, question, deadline):
    """Columns that have nothing to do with the question: any times, any units."""
    num_columns, num_resources = 4, len(question.available)
    largest = 10 ** draw.uniform(-3, 3, num_columns)
    columns = Columns(
        use=draw.integers(0, 3, (num_columns, num_resources)) + np.eye(num_columns, num_resources, dtype=np.int64),
        size=draw.choice([1, 2, 7], num_columns),
        sum_s=(largest * draw.uniform(1, 5, num_columns))[:, None],
        max_s=largest[:, None],
        most=np.full(num_columns, 99),
        label=np.zeros((num_columns, 2), dtype=np.int64),
    )
    return bound.Hint(deadline, columns)


def test_any_hints_give_a_valid_bound():
    """Columns at random, under deadlines that no tail meets and that all do."""
    for seed in range(40, 60):
        case = tiny(seed)
        if case is None:
            continue
        profile, cluster, job, best = case
        question, draw = ask(profile, cluster, job), np.random.default_rng(seed)
        for deadlines in ((math.inf,), (1e-9, math.inf), (1e-9, 0.01, 1.0, 100.0)):
            hints = {degree: [hints_of(draw, question, d) for d in deadlines] for degree in question.degrees}
            lower = bound_of(profile, cluster, job, best.value, hints)
            assert lower <= best.value * (1 + 1e-9), (seed, deadlines, lower / best.value)


# Against plans.


@pytest.mark.parametrize("per_node", [2, 3])
def test_bound_holds_for_true_placements(per_node):
    """Nodes of several devices, fast inside and slow between: where units sit matters, and no plan beats the bound."""
    for seed in range(8):
        profile = factories.profile(
            seed=seed, num_layers=4 + seed % 3, micro_batches=(1, 2), parameters=10**6 * (1 + 20 * (seed % 2))
        )
        counts = {"fast": 3, "slow": 2 + seed % 3}
        cluster = factories.cluster(counts, per_node=per_node, inside=100 * GB, across=0.5 * GB)
        job = Job(global_batch=6 + seed, sync=("exposed", "overlapped")[seed % 2])
        value = search.plan(profile, cluster, job).predicted.iteration_s
        lower = bound_of(profile, cluster, job, value)
        assert bound.work_bound(ask(profile, cluster, job)) <= lower * (1 + 1e-9)
        assert lower <= value * (1 + 1e-9), seed
        # The same plan counts on a cluster whose links are all as fast as the fastest: the bound is for that, too.
        quick = factories.cluster(counts, inside=100 * GB, across=100 * GB)
        best = search.plan(profile, quick, job).predicted.iteration_s
        assert lower <= best * (1 + 1e-6), seed


@pytest.mark.parametrize("num_devices", [16, 28])
def test_bound_of_larger_clusters_is_below_their_plans(num_devices):
    """Beyond the exhaustive search, with and without tp: the plan found is no better than a bound asked with room."""
    fast, memory = num_devices // 4, {"fast": 40 * GB, "slow": 12 * GB}
    for seed, tps in ((0, (1,)), (1, (1, 2))):
        profile = factories.profile(
            seed=seed,
            num_layers=10,
            tps=tps,
            ends=True,
            parameters=200 * 10**6,
            activation_bytes=GB // 2,
            forward_s=0.1,
        )
        cluster = factories.cluster(
            {"fast": fast, "slow": num_devices - fast}, per_node=4, memory_bytes=memory, across=10 * GB
        )
        job = Job(global_batch=96)
        plan = search.plan(profile, cluster, job)
        lower = bound_of(profile, cluster, job, plan.predicted.iteration_s)
        assert bound.work_bound(ask(profile, cluster, job)) <= lower <= plan.predicted.iteration_s * (1 + 1e-9)


def test_bound_never_exceeds_the_value_at_hand():
    """With a value below the optimum, which no plan has, the bound is that value."""
    profile, cluster = model(blocks(4), {"A": [1.0] * 4, "B": [3.0] * 4}), devices({"A": 1, "B": 1})
    assert bound.lower_bound(ask(profile, cluster, plain(8)), 24.1, Clock()) <= 24.1
    assert bound.lower_bound(ask(profile, cluster, plain(8)), 24.0, Clock()) <= 24.0 * (1 + 1e-9)


def test_bound_is_valid_when_time_runs_out():
    """A clock that is over leaves less work done, and a bound that still holds: never below the work bound."""
    for seed in range(0, 60, 5):
        case = tiny(seed)
        if case is not None:
            profile, cluster, job, best = case
            question = ask(profile, cluster, job)
            lower = bound.lower_bound(question, best.value * ROOM, Clock(time_limit=0.0))
            assert bound.work_bound(question) * (1 - 1e-9) <= lower <= best.value * (1 + 1e-9), seed
