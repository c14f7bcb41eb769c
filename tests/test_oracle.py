"""The oracle itself: plans worked out by hand, plans listed one by one, and published cuts of measured models."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
from oracle import Numbers, Pipeline, Stage, by_brute_force, draw, optimum, value_of

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.job import BytesPerParameter, Job
from planner.profile import Cell, ModelProfile
from planner.profile import LayerKind as Kind

DATA = Path(os.environ.get("HPP_DATA", Path(__file__).parents[2] / "shared" / "data"))
GB = 10**9
ROOMY = 1000 * GB


def model(kinds: list[Kind], times: dict[str, list[float]], kept: int = 0, **cell: Any) -> ModelProfile:
    """One layer of each kind; seconds per layer and device type, a quarter of them forward."""
    cells = [
        Cell(
            kind=kind.name,
            device_type=name,
            tp=tp,
            micro_batch=b,
            forward_s=t * b / tp / 4,
            backward_s=3 * t * b / tp / 4,
            activation_bytes=kept * b,
            **{key: value for key, value in cell.items() if key not in ("tps", "sizes")},
        )
        for name, row in times.items()
        for kind, t in zip(kinds, row, strict=True)
        for tp in cell.get("tps", (1,))
        for b in cell.get("sizes", (1,))
    ]
    return ModelProfile(name="by hand", layers=tuple(k.name for k in kinds), kinds=tuple(kinds), cells=tuple(cells))


def blocks(count: int, parameters: int = 0, output_bytes: int = 0, **kind: Any) -> list[Kind]:
    return [Kind(name=f"k{i}", parameters=parameters, output_bytes=output_bytes, **kind) for i in range(count)]


def devices(
    counts: dict[str, int], memory: int = ROOMY, beta: float = 1e9, per_node: int = 1, **pairs: float
) -> Cluster:
    """Every link with bandwidth `beta`, or another for a pair of types: ``A_B=1e8``."""
    link = Link(bytes_per_s=beta)
    return Cluster(
        name="by hand",
        device_types=tuple(DeviceType(name=name, memory_bytes=memory) for name in counts),
        nodes=tuple(
            Node(name=f"{name}{i}", devices=(name,) * per_node, link=link)
            for name, count in counts.items()
            for i in range(count // per_node)
        ),
        links=tuple(
            NetworkLink(between=(a, b), link=Link(bytes_per_s=pairs.get(f"{a}_{b}", beta)))
            for a, b in itertools.combinations_with_replacement(counts, 2)
        ),
    )


def job(global_batch: int, **fields: Any) -> Job:
    """One byte of gradient per parameter and nothing else in memory, so that bytes are easy to count."""
    plain = {
        "recompute": False,
        "memory_margin": 0.0,
        "context_bytes": 0,
        "tp_context_bytes": 0,
        "sync": "exposed",
        "sync_granularity": "model",
        "sync_buffer_bytes": 0,
        "bytes_per_parameter": BytesPerParameter(weights=0, gradients=1, optimizer=0),
    }
    return Job(global_batch=global_batch, **(plain | fields))


def best(profile: ModelProfile, cluster: Cluster, question: Job) -> float:
    found = optimum(profile, cluster, question)
    return math.inf if found is None else found.value


FAST_AND_SLOW = {"A": [1.0] * 4, "B": [3.0] * 4}


def test_unequal_replicas_share_the_batch_unequally() -> None:
    # A runs the model in 4 s, B in 12 s. A does 3 micro-batches, B 1: both take 12. One pipeline of 3 + 1 layers has
    # loads 3 and 3: 3 + 3 + 3*3 = 15. A alone: 16.
    found = optimum(model(blocks(4), FAST_AND_SLOW), devices({"A": 1, "B": 1}), job(4))
    assert found is not None
    assert found.value == pytest.approx(12)
    assert sorted((p.stages[0].device_type, p.num_micro_batches) for p in found.pipelines) == [("A", 3), ("B", 1)]


@pytest.mark.parametrize(("ring_s", "value"), [(2.0, 14.0), (2.9, 14.9), (4.0, 15.0)])
def test_gradient_sync_decides_for_one_pipeline(ring_s: float, value: float) -> None:
    # P = 2: 2 (P - 1) V / P / beta = V / beta on top of 12; one pipeline has no ring and takes 15.
    parameters = round(ring_s * 1e9 / 4)
    assert best(model(blocks(4, parameters), FAST_AND_SLOW), devices({"A": 1, "B": 1}), job(4)) == pytest.approx(value)


def test_a_last_backward_hides_the_ring_but_for_its_last_message() -> None:
    # Ring 2 s in 8 chunks of 0.25 s. B of A's stage is 3 s, of B's 9 s: all hidden but one chunk. 12 + 0.25.
    question = job(4, sync="overlapped", sync_granularity="block", sync_chunk_bytes=250_000_000)
    profile = model(blocks(4, 500_000_000), FAST_AND_SLOW)
    assert best(profile, devices({"A": 1, "B": 1}), question) == pytest.approx(12.25)
    # Ring 5 s: A's stage leaves 5 - 3 = 2, B's its last chunk: 14.
    profile = model(blocks(4, 1_250_000_000), FAST_AND_SLOW)
    assert best(profile, devices({"A": 1, "B": 1}), question) == pytest.approx(14)


def test_alpha_is_paid_per_step_and_message() -> None:
    # P = 3, V = 0.25 GB in chunks of 0.1: two whole ones and 0.05. 2 (P - 1) = 4 steps each, alpha 0.01:
    # 3 messages * 4 * 0.01 + 4 * 0.25 / 3 = 0.12 + 1/3.
    question = job(3, sync_granularity="block", sync_chunk_bytes=100_000_000)
    profile = model(blocks(1, 250_000_000), {"A": [10.0]})
    cluster = devices({"A": 3})
    link = Link(alpha_s=0.01, bytes_per_s=1e9)
    cluster = replace(cluster, links=(NetworkLink(between=("A", "A"), link=link),))
    assert best(profile, cluster, question) == pytest.approx(10 + 0.12 + 1 / 3)


def test_a_hand_over_loads_both_ends() -> None:
    # Layers of 1 s, memory for one layer per device, hand-over 0.5 s: loads 1.5 and 1.5, m = 3: 3 + 2*1.5 = 6.
    profile = model(blocks(2, GB, 500_000_000), {"A": [1.0, 1.0]})
    assert best(profile, devices({"A": 2}, memory=2 * GB - 1), job(3)) == pytest.approx(6)
    # The second stage holds its layer and one input: 1.5 GB.
    assert best(profile, devices({"A": 2}, memory=1_500_000_000), job(3)) == pytest.approx(6)
    assert best(profile, devices({"A": 2}, memory=1_499_999_999), job(3)) == math.inf


def test_fewer_micro_batches_than_stages_need_less_memory() -> None:
    # Each layer keeps 4 GB. Stage 0 of 2 holds min(m, 2) micro-batches: one fits in 5 GB, two do not.
    profile, cluster = model(blocks(2), {"A": [1.0, 1.0]}, kept=4 * GB), devices({"A": 2}, memory=5 * GB)
    assert best(profile, cluster, job(1)) == pytest.approx(2)
    assert best(profile, cluster, job(2)) == math.inf


def test_recomputation_pays_with_the_cheapest_forwards() -> None:
    # One device, m = 1. Kept 3, 2, 2 GB (inputs are empty), forwards 5, 2, 2 s, backwards 15, 6, 6: 36 s in all.
    # The working set of 3 GB counts once something is recomputed: 7 - r + 3 <= memory.
    kinds = blocks(3)
    profile = model(kinds, {"A": [20.0, 8.0, 8.0]})
    cells = [replace(c, activation_bytes=n * GB) for c, n in zip(profile.cells, (3, 2, 2), strict=True)]
    profile = replace(profile, cells=tuple(cells))

    def value(memory: float) -> float:
        return best(profile, devices({"A": 1}, memory=round(memory * GB)), job(1, recompute=True))

    assert value(7) == pytest.approx(36)
    assert value(6.9) == pytest.approx(36 + 4)  # frees 3.1: both small ones, not large and small (7 s)
    assert value(5.5) == pytest.approx(36 + 7)  # frees 4.5
    assert value(3) == pytest.approx(36 + 9)  # frees all 7
    assert value(2.9) == math.inf
    assert best(profile, devices({"A": 1}, memory=6 * GB), job(1)) == math.inf  # recompute off


def test_recomputed_layers_keep_their_input() -> None:
    # Two layers keep 4 GB, the second layer's input is 1 GB: recomputed it frees 3. m = 1 on one device of 9 GB:
    # all kept 8 fits. With 7.9: working set 4, 8 + 4 - 7.9 = 4.1 to free: both layers, 4 + 3. With 4.9: 7.1, too much.
    profile = model(blocks(2, 0, GB), {"A": [4.0, 4.0]}, kept=4 * GB)
    for memory, value in ((9, 8), (7.9, 10), (5, 10), (4.9, math.inf)):
        cluster = devices({"A": 1}, memory=round(memory * GB))
        assert best(profile, cluster, job(1, recompute=True)) == pytest.approx(value)


def test_tied_ends_are_stored_once_in_one_stage_and_synced_across_two() -> None:
    # Ends of 2 GB each, the same tensor. One device of 2 GB holds both: 3 s a micro-batch.
    kinds = [
        Kind(name="embed", parameters=2 * GB, output_bytes=0),
        Kind(name="head", parameters=2 * GB, output_bytes=0, tied_to="embed", tied_parameters=2 * GB),
    ]
    profile = model(kinds, {"A": [1.0, 2.0]})
    assert best(profile, devices({"A": 1}, memory=2 * GB), job(4)) == pytest.approx(12)
    # Two devices: a cut takes 1 + 2 + 3*2 = 9, and a ring of 2 GB over 2 owners 2 s: 11. Two pipelines: 6, and 2 s for
    # the ring of 2 GB (once: both ends in one stage): 8. A sync buffer rules the second out.
    assert best(profile, devices({"A": 2}, memory=2 * GB), job(4)) == pytest.approx(8)
    assert best(profile, devices({"A": 2}, memory=2 * GB), job(4, sync_buffer_bytes=1)) == pytest.approx(11)
    # Two pipelines of two stages: 1 + 2 + 2 = 5, and a ring of 2 GB over 4 owners 2*3/4*2 = 3: 8.
    numbers = Numbers(profile, devices({"A": 4}), job(4))
    stages = (Stage("A", 1, 0, 1), Stage("A", 1, 1, 2))
    assert value_of(numbers, [Pipeline(1, 2, stages)] * 2) == pytest.approx(8)


def test_frozen_layers_are_not_synced() -> None:
    # As in the first test, with a ring of V / beta = 1 for the one layer that is trained; memory holds weights only.
    kinds = [*blocks(3, 10 * GB, trainable=False), Kind(name="k3", parameters=GB, output_bytes=0)]
    assert best(model(kinds, FAST_AND_SLOW), devices({"A": 1, "B": 1}, memory=GB), job(4)) == pytest.approx(13)


def test_sync_is_bound_by_the_own_link_and_by_paths_slower_than_both_ends() -> None:
    # Two A and two B with own links of 1 GB/s; 1 GB of gradients, layers alone on a device, P = 2: 1 s on the own link,
    # 10 s over a path between A and B of 0.1 GB/s, if both are in the plan.
    profile, question = model(blocks(1, GB), {"A": [100.0], "B": [100.0]}), job(2)
    cluster = devices({"A": 2, "B": 2}, A_B=1e8)
    assert best(profile, cluster, question) == pytest.approx(101)
    numbers = Numbers(profile, cluster, question)
    a, b = (Pipeline(1, 1, (Stage(name, 1, 0, 1),)) for name in "AB")
    assert value_of(numbers, [a, a]) == pytest.approx(101)
    assert value_of(numbers, [a, b]) == pytest.approx(110)
    # A lone device of its type has the best link that leaves it.
    numbers = Numbers(profile, devices({"A": 2, "B": 1}, A_B=1e8), question)
    assert value_of(numbers, [a, a]) == pytest.approx(101)
    assert value_of(numbers, [a, b]) == pytest.approx(110)
    numbers = Numbers(profile, devices({"A": 1, "B": 1}, A_B=1e8), question)
    assert value_of(numbers, [a, b]) == pytest.approx(110)


def test_micro_batch_sizes_add_up_exactly() -> None:
    # A has times for b = 2 only: an odd batch is out of its reach. B (b = 1) takes the odd one.
    profile = model(blocks(1), {"A": [1.0], "B": [3.0]}, sizes=(1, 2))
    keep = [c for c in profile.cells if c.micro_batch == {"A": 2, "B": 1}[c.device_type]]
    profile = replace(profile, cells=tuple(keep))
    assert best(profile, devices({"A": 1}), job(3)) == math.inf
    assert best(profile, devices({"A": 1}), job(4)) == pytest.approx(4)
    assert best(profile, devices({"A": 1, "B": 1}), job(3)) == pytest.approx(3)  # 2 on A, 1 on B
    assert best(profile, devices({"A": 1, "B": 1}), job(6)) == pytest.approx(6)  # 6 on A; or 4 and 2, as long


def test_tp_groups_stay_inside_nodes() -> None:
    # A layer of 8 s, 4 s at tp 2. One node of 3 devices: a pair and a single: 2 micro-batches of 4 s beside one of 8 s.
    profile = model(blocks(1), {"A": [8.0]}, tps=(1, 2))
    assert best(profile, devices({"A": 3}, per_node=3), job(3)) == pytest.approx(8)
    # Three nodes of one device have no pair: one micro-batch each.
    assert best(profile, devices({"A": 3}), job(3)) == pytest.approx(8)
    assert best(profile, devices({"A": 3}), job(6)) == pytest.approx(16)
    assert best(profile, devices({"A": 3}, per_node=3), job(1)) == pytest.approx(4)
    # Gradients travel in as many shards as the smallest tp of the plan. Two pairs, 4 GB: 2 GB per rank, 2 s, after one
    # micro-batch of 4 s. Four singles would take 8 s and 2*3/4*4 = 6 s.
    profile = model(blocks(1, 4 * GB), {"A": [8.0]}, tps=(1, 2))
    assert best(profile, devices({"A": 4}, per_node=2), job(2)) == pytest.approx(6)


def test_update_adds_up_over_layers_or_counts_once_per_stage() -> None:
    profile = model(blocks(3), {"A": [1.0] * 3}, update_s=0.5)
    assert best(profile, devices({"A": 1}), job(2)) == pytest.approx(6 + 1.5)
    profile = replace(profile, conditions=replace(profile.conditions, update_per="stage"))
    assert best(profile, devices({"A": 1}), job(2)) == pytest.approx(6 + 0.5)


def test_the_longest_pipeline_and_the_largest_tail_may_be_in_different_pipelines() -> None:
    # A (1 s) and B (3 s) with three micro-batches: 2 + 1 take 3 s, on B, and then B's update of 5 s. A alone takes 3 s
    # and 0.5 s for its update.
    profile = model(blocks(1), {"A": [1.0], "B": [3.0]})
    cells = [replace(c, update_s={"A": 0.5, "B": 5.0}[c.device_type]) for c in profile.cells]
    assert best(replace(profile, cells=tuple(cells)), devices({"A": 1, "B": 1}), job(3)) == pytest.approx(3.5)
    numbers = Numbers(replace(profile, cells=tuple(cells)), devices({"A": 1, "B": 1}), job(5))
    a, b = Pipeline(1, 4, (Stage("A", 1, 0, 1),)), Pipeline(1, 1, (Stage("B", 1, 0, 1),))
    assert value_of(numbers, [a, b]) == pytest.approx(4 + 5)  # 4 s on A, 5 s of update on B


def test_sets_of_recomputed_layers_equal_a_literal_list() -> None:
    for seed in range(20):
        numbers = Numbers(*draw(seed, num_layers=6))
        for k, (name, tp) in enumerate(numbers.units):
            layers = range(6)
            if numbers.measured(name, tp, 1):
                saved = [numbers.saved_bytes(k, 1, l) for l in layers]
                forward = [numbers.cell(k, 1, l).forward_s for l in layers]
                subsets = [s for n in range(7) for s in itertools.combinations(layers, n)]
                for need in (0.3 * sum(saved), 0.7 * sum(saved), sum(saved) - 1):
                    literal = min(sum(forward[l] for l in s) for s in subsets if sum(saved[l] for l in s) >= need)
                    found = min(f for s, f in numbers.savings(k, 1, 0, 6) if s >= need)
                    assert found == pytest.approx(literal), seed


@pytest.mark.parametrize("start", range(0, 40, 10))
def test_the_optimum_equals_a_literal_list_of_all_plans(start: int) -> None:
    for seed in range(start, start + 10):
        num_devices, num_layers = ((4, 3), (3, 4), (4, 2), (3, 3))[seed % 4]
        profile, cluster, question = draw(seed, num_devices, num_layers)
        question = replace(question, global_batch=min(question.global_batch, 4 + seed % 3))
        assert best(profile, cluster, question) == pytest.approx(by_brute_force(profile, cluster, question)), seed


def test_tiny_cases_meet_what_matters_often() -> None:
    cases = [draw(seed, num_devices=4, num_layers=4) for seed in range(60)]
    found = [optimum(*case) for case in cases]

    def roomy(case: tuple[ModelProfile, Cluster, Job]) -> tuple[ModelProfile, Cluster, Job]:
        types = tuple(replace(d, memory_bytes=1000 * d.memory_bytes) for d in case[1].device_types)
        return case[0], replace(case[1], device_types=types), case[2]

    bound_by_memory = [f is None or f.value > best(*roomy(case)) * 1.001 for f, case in zip(found, cases, strict=True)]
    assert 20 <= sum(bound_by_memory) <= 45
    assert 2 <= sum(f is None for f in found) <= 12
    plans = [f.pipelines for f in found if f is not None]
    assert sum(len(p) > 1 for p in plans) >= 20
    assert sum(len({tuple(sorted(s.device_type for s in x.stages)) for x in p}) > 1 for p in plans) >= 10
    assert sum(any(len({s.device_type for s in x.stages}) > 1 for x in p) for p in plans) >= 10
    assert sum(any(x.num_micro_batches < len(x.stages) for x in p) for p in plans) >= 3


def sailor(model_name: str, micro_batch: int, chain: list[tuple[str, int]]) -> list[list[float]]:
    path = DATA / "sailor" / "profiles_tmp.json"
    if not path.exists():
        pytest.skip(f"no measured profiles at {path}; set HPP_DATA to the folder that holds sailor/")
    rows = json.loads(path.read_text())[model_name]
    cells = [rows[name][str(micro_batch)][str(tp)] for name, tp in chain]
    return [[sum(layers[str(l)][:2]) for l in range(len(layers))] for layers in cells]


GPU = {
    "3090": "RTX-3090",
    "2080": "RTX-2080",
    "Titan": "Titan-RTX",
    "A100": "A100-40",
    "V100": "V100-16",
    "GH200": "GH-96",
}


@pytest.mark.parametrize(
    ("chain", "model_name", "micro_batch", "cut", "stage_s", "even_costs"),
    [
        ("3090/2 Titan/2", "OPT-350", 2, (19, 7), (0.3368, 0.3280), 1.79),
        ("Titan/2 3090/2", "OPT-350", 2, (8, 18), (0.3256, 0.3417), 1.63),
        ("3090/8 2080/8 Titan/8", "OPT-350", 2, (5, 9, 12), (0.3275, 0.3306, 0.3630), 1.75),
        ("A100/4 V100/4", "GPT-Neo-2.7", 4, (28, 6), (0.5756, 0.4994), 2.77),
        ("V100/4 A100/4", "GPT-Neo-2.7", 4, (6, 28), (0.5059, 0.5711), 2.80),
        ("A100/1 A100/1 V100/1 V100/1", "GPT-Neo-2.7", 1, (15, 14, 2, 3), (0.2356, 0.2323, 0.1737, 0.1747), 2.95),
        ("GH200/4 A100/4 V100/4", "LLAMA-3-8", 1, (27, 4, 4), (1.103, 1.073, 0.964), 3.34),
    ],
)
def test_published_cuts_of_measured_models(
    chain: str, model_name: str, micro_batch: int, cut: tuple[int, ...], stage_s: tuple[float, ...], even_costs: float
) -> None:
    # cases.md, "Oracles": forward + backward only, all contiguous cuts, the bottleneck decides.
    stages = [(GPU[name], int(tp)) for name, tp in (s.split("/") for s in chain.split())]
    times = sailor(model_name, micro_batch, stages)
    found, bottleneck = oracle.best_cut(times)
    digits = 3 if model_name == "LLAMA-3-8" else 4
    assert bottleneck == pytest.approx(max(stage_s), abs=0.6 * 10**-digits)

    def loads(counts: tuple[int, ...]) -> list[float]:
        ends = [0, *itertools.accumulate(counts)]
        return [sum(t[i:j]) for t, (i, j) in zip(times, itertools.pairwise(ends), strict=True)]

    # Other cuts may share the bottleneck, so the published one is checked by its times.
    assert loads(cut) == pytest.approx(stage_s, abs=0.6 * 10**-digits)
    assert max(loads(cut)) == pytest.approx(bottleneck)
    assert sum(found) == sum(cut)
    num_layers, num_stages = len(times[0]), len(times)
    even = tuple(num_layers // num_stages + (s < num_layers % num_stages) for s in range(num_stages))
    assert max(loads(even)) / bottleneck == pytest.approx(even_costs, abs=0.006)
