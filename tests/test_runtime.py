"""Training under a plan equals training in one process: loss, norm, every weight after every step."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import HIDDEN, Embedding, Head, cross_entropy, make_batch, make_model, make_plan, start
from torch import Tensor

from planner.plans import Plan
from planner.schedule import launches
from runtime import Model, Trainer
from runtime.layout import Layout
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


def low_precision(rank: int, plan: Plan) -> Any:
    """Gradients before the update, and weights after it, in bf16."""
    with Trainer(plan, make_model(LAYERS), optimizer=sgd, clip=None, dtype=torch.bfloat16) as trainer:
        inputs, targets = make_batch(plan.job.global_batch, 0)
        result = trainer.gradients(inputs, targets)
        named = [(name, p) for bucket in trainer.reducer.buckets for name, p in bucket.parameters]
        gradients = {name: p.grad.clone() for name, p in named}
        trainer.apply(result)
        return gradients, {name: p.detach().clone() for name, p in named}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_bf16_weights_have_fp32_gradients_and_masters() -> None:
    """Bit for bit what one process gets that sums the bf16 gradients of micro-batches in fp32 and updates in fp32."""
    plan = make_plan([([4, 6], 3)])
    stage = Stage(make_model(LAYERS), (0, LAYERS), dtype=torch.bfloat16)
    inputs, targets = make_batch(plan.job.global_batch, 0)
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in stage.named_parameters()}
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):
        stage.zero_grad()
        (cross_entropy(stage(x), y) * (1.0 / int((targets != -100).sum()))).backward()
        for name, p in stage.named_parameters():
            sums[name] += p.grad.float()
    for gradients, weights in start(2, low_precision, plan):
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32 and torch.equal(gradient, sums[name]), name
            before = dict(stage.named_parameters())[name].detach()
            assert torch.equal(weights[name], (before.float() - 0.1 * sums[name]).to(torch.bfloat16)), name


class Mlp(torch.nn.Module):
    """A layer that tensor parallelism can shard: columns, then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(HIDDEN),
            torch.nn.Linear(HIDDEN, 2 * HIDDEN),
            torch.nn.Linear(2 * HIDDEN, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def sharded_model(shard: bool = True) -> Model:
    """Embedding, MLPs, head; the MLPs sharded by DTensor."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def parallelize(layer: torch.nn.Module, l: int, mesh: Any) -> None:
        if isinstance(layer, Mlp):
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def layer(l: int) -> torch.nn.Module:
        return Embedding(False) if l == 0 else Head() if l == 5 else Mlp()

    return Model(num_layers=6, layer=layer, loss=cross_entropy, parallelize=parallelize if shard else None)


def train_sharded(rank: int, plan: Plan) -> Any:
    """(loss, norm) of two steps, and whole weights."""
    with Trainer(plan, sharded_model(), optimizer=adamw, dtype=torch.float64, timeout_s=20.0) as trainer:
        results = []
        for step in range(2):
            inputs, targets = make_batch(plan.job.global_batch, step)
            part = slice(trainer.samples.start, trainer.samples.stop)
            result = trainer.step(inputs[part], targets[part])
            results.append((result.loss, result.norm))
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in trainer.stage.named_parameters()}
        return results, {name: p.detach().clone() for name, p in whole.items()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def test_tensor_parallel_stages_equal_one_process() -> None:
    """Two pipelines of tp 2, one of two stages: every shard reduced between equal tp ranks, the norm counted once."""
    plan = make_plan([([3, 3], 3), ([6], 2)], tp=2)
    stage = Stage(sharded_model(), (0, 6), dtype=torch.float64)
    optimizer, expected = adamw(stage.parameters()), []
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = make_batch(plan.job.global_batch, step)
        loss = cross_entropy(stage(inputs), targets) / (targets != -100).sum()
        loss.backward()
        expected.append((float(loss.detach()), float(torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0))))
        optimizer.step()
    reference_weights = dict(stage.named_parameters())
    for results, weights in start(6, train_sharded, plan):
        assert results == [pytest.approx(each, rel=TOLERANCE) for each in expected]
        for name, weight in weights.items():
            assert relative(weight, reference_weights[name].detach()) <= TOLERANCE, name


def refused(rank: int, plan: Plan, num_layers: int, part: int, sharded: bool) -> str:
    """What the trainer says to a model or a batch that is not the plan's."""
    model = sharded_model(shard=False) if sharded else make_model(num_layers)
    try:
        with Trainer(plan, model, timeout_s=20.0) as trainer:
            inputs, targets = make_batch(part, 0)
            trainer.step(inputs, targets)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("plan", "world", "num_layers", "part", "sharded", "words"),
    [
        (make_plan([([10], 3)]), 1, 9, 6, False, "the model has 9 layers, the plan 10"),
        (make_plan([([10], 3)]), 2, 10, 6, False, "2 processes run, the plan needs one for each of its 1 devices"),
        (make_plan([([10], 3)]), 1, 10, 5, False, "5 samples given, rank 0 (pipeline 0 stage 0) takes 6"),
        (make_plan([([6], 1)], tp=2), 2, 6, 2, True, "the model says no way to shard its layers"),
    ],
)
def test_what_does_not_fit_is_refused(
    plan: Plan, world: int, num_layers: int, part: int, sharded: bool, words: str
) -> None:
    """One error before anything runs, with both numbers."""
    assert all(words in text for text in start(world, refused, plan, num_layers, part, sharded))


def test_unequal_tp_of_one_block_is_refused() -> None:
    """Shards of different size have no partner; the layers and the degrees are named."""
    plan = make_plan([([6], 1), ([6], 1)], tp=2)
    wide = replace(plan.pipelines[1].stages[0], tp=1, devices=("host:9",))
    uneven = replace(plan, pipelines=(plan.pipelines[0], replace(plan.pipelines[1], stages=(wide,))))
    with pytest.raises(ValueError, match=r"layers 0 to 5 run at tp \[1, 2\] in different pipelines"):
        Layout(uneven)


def test_all_processes_reduce_in_the_order_of_the_schedule() -> None:
    """The runtime's order of blocks is that of `planner.schedule.launches`, which is checked for deadlock."""
    plan = make_plan([([4, 6], 3), ([3, 3, 4], 2), ([10], 1)], tied=True)
    plan = replace(plan, blocks=tuple(replace(block, num_chunks=1) for block in plan.blocks))
    assert [shared.owners for shared in Layout(plan).shared(0)] == [each.members for each in launches(plan)]


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
