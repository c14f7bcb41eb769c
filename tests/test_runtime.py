"""Training under a plan equals training in one process: loss, norm, every weight after every step."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import cross_entropy, make_batch, make_model, make_plan, start
from torch import Tensor

from planner.plans import Plan
from runtime import Trainer
from runtime.model import Stage, as_tuple

STEPS, LAYERS, TOLERANCE = 5, 10, 1e-12
Weights = dict[str, Tensor]


def reference(
    num_layers: int, samples: int, *, tied: bool, masked: bool, steps: int = STEPS
) -> list[tuple[float, float, Weights, Weights]]:
    """(loss, norm, gradients, weights) of each step in one process, clipped at 1."""
    model = make_model(num_layers, tied=tied, masked=masked)
    stage = Stage(model, (0, num_layers), dtype=torch.float64)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2, weight_decay=0.1)
    out = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = make_batch(samples, step, masked)
        loss = cross_entropy(stage(*as_tuple(inputs)), targets) / (targets != -100).sum()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in stage.named_parameters(remove_duplicate=False)}
        norm = torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        weights = {n: p.detach().clone() for n, p in stage.named_parameters(remove_duplicate=False)}
        out.append((float(loss.detach()), float(norm), gradients, weights))
    return out


def train(rank: int, plan: Plan, tied: bool, masked: bool, steps: int, options: dict[str, Any]) -> Any:
    """(loss, norm) of each step, gradients of the first, weights at the end."""
    num_layers = plan.blocks[-1].layers[1]
    model = make_model(num_layers, tied=tied, masked=masked)
    losses, gradients = [], {}
    with Trainer(
        plan,
        model,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        dtype=torch.float64,
        timeout_s=20.0,
        **options,
    ) as trainer:
        for step in range(steps):
            inputs, targets = make_batch(plan.job.global_batch, step, masked)
            part = slice(trainer.samples.start, trainer.samples.stop)
            x = tuple(each[part] for each in as_tuple(inputs)) if trainer.is_first else None
            result = trainer.gradients(x, targets[part] if trainer.is_last else None)
            if step == 0 and not options.get("shard_optimizer"):
                gradients = {n: p.grad.clone() for n, p in trainer.stage.named_parameters(remove_duplicate=False)}
            trainer.apply(result)
            losses.append((result.loss, result.norm))
        weights = {n: p.detach().clone() for n, p in trainer.stage.named_parameters(remove_duplicate=False)}
    return losses, gradients, weights


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / (b.norm() + 1e-30))


def agrees(plan: Plan, *, tied: bool = False, masked: bool = False, steps: int = STEPS, **options: Any) -> None:
    """Holds a run on the plan's ranks against one process, and replicas against each other bit for bit."""
    expected = reference(plan.blocks[-1].layers[1], plan.job.global_batch, tied=tied, masked=masked, steps=steps)
    found = start(len(plan.devices), train, plan, tied, masked, steps, options)
    seen: Weights = {}
    for losses, gradients, weights in found:
        for (loss, norm), (loss0, norm0, _, _) in zip(losses, expected, strict=True):
            assert loss == pytest.approx(loss0, rel=TOLERANCE)
            assert norm == pytest.approx(norm0, rel=TOLERANCE)
        for name, gradient in gradients.items():
            assert relative(gradient, expected[0][2][name]) <= TOLERANCE, name
        for name, weight in weights.items():
            assert relative(weight, expected[-1][3][name]) <= TOLERANCE, name
            assert torch.equal(weight, seen.setdefault(name, weight)), f"replicas of {name} differ"


SHAPES = {
    "one process": make_plan([([10], 3)]),
    "single-stage pipelines of unequal batch": make_plan([([10], 3), ([10], 5)]),
    "depths 2 and 3": make_plan([([4, 6], 5), ([3, 3, 4], 3)]),
    "fewer micro-batches than stages": make_plan([([3, 2, 2, 3], 2), ([10], 1)]),
    "forwards ahead": make_plan([([3, 3, 4], 6), ([5, 5], 4)], ahead=True),
    "micro-batch sizes 1 and 3": make_plan([([4, 6], 5), ([10], 2)], micro_batch=[1, 3]),
    "recompute": make_plan([([4, 6], 3), ([3, 3, 4], 3)], recompute=(1, 2, 5, 6)),
    "permuted ranks": make_plan([([4, 6], 3), ([3, 3, 4], 3)], order=[3, 0, 4, 2, 1]),
}


@pytest.mark.parametrize("plan", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_of_plan_equals_one_process(plan: Plan) -> None:
    """float64: loss, gradients, norm and weights after 5 clipped AdamW steps within 1e-12; replicas bit-identical."""
    agrees(plan)


@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b"])
def test_schedules_change_nothing(schedule: str) -> None:
    """The same gradients under GPipe and under forwards ahead."""
    agrees(SHAPES["depths 2 and 3"], schedule=schedule, steps=2)


@pytest.mark.parametrize("granularity", ["tensor", "layer", "block", "model"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_granularities_change_nothing(granularity: str, tied: bool) -> None:
    """The same sums whatever one call carries; chunks of 1 kB cut layers and tensors apart."""
    plan = make_plan([([4, 6], 3), ([3, 3, 4], 2)], tied=tied)
    agrees(plan, tied=tied, steps=2, granularity=granularity, chunk_bytes=1000)


@pytest.mark.parametrize("pipelines", [[([4, 6], 3), ([10], 2)], [([10], 2)], [([4, 3, 3], 3)], [([10], 1), ([10], 2)]])
def test_tied_weights_get_the_gradients_of_both_ends(pipelines: Any) -> None:
    """On one stage they are one parameter; on two they are summed over all holders and counted once in the norm."""
    agrees(make_plan(pipelines, tied=True), tied=True)


def test_several_tensors_between_stages() -> None:
    """A mask of truth values travels beside the activations."""
    agrees(SHAPES["depths 2 and 3"], masked=True, steps=2)


@pytest.mark.parametrize("granularity", ["tensor", "layer", "block"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_sharded_optimizer_state_changes_nothing(granularity: str, tied: bool) -> None:
    """Each owner updates its part of each block; the weights are those of the unsharded run."""
    plan = make_plan([([4, 6], 3), ([3, 3, 4], 2), ([10], 2)], tied=tied)
    agrees(plan, tied=tied, shard_optimizer=True, granularity=granularity, chunk_bytes=1000)


def test_gradient_sync_after_the_backward_pass() -> None:
    """Without overlap the sums are the same."""
    agrees(SHAPES["depths 2 and 3"], overlap=False, steps=2)


@pytest.mark.parametrize("name", SHAPES)
def test_the_torch_engine_plays_the_same_plans(name: str) -> None:
    """`torch.distributed.pipelining` behind the same reducer: again one process, on every shape."""
    agrees(SHAPES[name], engine="torch", steps=2)


def test_split_backward_passes_on_the_torch_engine() -> None:
    """The zero-bubble lists have I and W; our own executor refuses them by name."""
    agrees(make_plan([([3, 3, 4], 4), ([5, 5], 3)]), engine="torch", schedule="zero-bubble", steps=2)
    with pytest.raises(AssertionError, match=r"0I\d+: this engine runs whole backward passes; use engine 'torch'"):
        agrees(make_plan([([3, 3, 4], 4)]), schedule="zero-bubble", steps=1)


def random_plan(seed: int) -> tuple[Plan, dict[str, Any]]:
    """1 to 4 pipelines of 1 to 4 stages on at most 8 ranks, on permuted ranks, with or without everything."""
    draw = random.Random(seed)
    pipelines: list[tuple[list[int], int]] = []
    while not pipelines or (len(pipelines) < 4 and draw.random() < 0.6):
        used = sum(len(split) for split, _ in pipelines)
        if used >= 8:
            break
        depth = draw.randint(1, min(4, 8 - used))
        cuts = [0, *sorted(draw.sample(range(1, LAYERS), depth - 1)), LAYERS]
        pipelines.append(([b - a for a, b in pairwise(cuts)], draw.randint(1, 5)))
    count = sum(len(split) for split, _ in pipelines)
    order = draw.sample(range(count), count)
    tied = draw.random() < 0.4
    recompute = [l for l in range(1, LAYERS - 1) if draw.random() < 0.3]
    plan = make_plan(pipelines, tied=tied, recompute=recompute, order=order, ahead=draw.random() < 0.3)
    options = {
        "tied": tied,
        "masked": draw.random() < 0.2,
        "granularity": draw.choice(["tensor", "layer", "block", "model"]),
        "chunk_bytes": draw.choice([500, 4000, 1 << 20]),
        "overlap": draw.random() < 0.8,
    }
    if options["granularity"] != "model":
        options["shard_optimizer"] = draw.random() < 0.4
    if not options["masked"]:
        options["engine"] = draw.choice(["own", "own", "torch"])
    return plan, options


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_equal_one_process(seed: int) -> None:
    """Whatever plan, schedule, granularity and sharding are drawn."""
    plan, options = random_plan(seed)
    agrees(plan, steps=2, **options)
