"""Training under a plan equals training in one process: loss, norm, every weight after every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import HIDDEN, Embedding, Head, cross_entropy, make_batch, make_model, make_plan, start
from torch import Tensor

from planner.plans import Plan
from planner.schedule import Kind, action_lists, gpipe, interleaved, launches
from runtime import Model, RankFailed, Trainer, execute
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
    """(loss, norm) and, if they are whole, gradients of each step; weights at the end."""
    num_layers = plan.blocks[-1].layers[1]
    model = make_model(num_layers, tied=tied, masked=masked)
    losses: list[tuple[float, float]] = []
    gradients: list[Weights] = []
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
            if not options.get("shard_optimizer"):
                named = trainer.stage.named_parameters(remove_duplicate=False)
                gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
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
        assert len(gradients) == (0 if options.get("shard_optimizer") else steps)
        for found_in_step, (_, _, one_process, _) in zip(gradients, expected, strict=False):
            for name, gradient in found_in_step.items():
                assert relative(gradient, one_process[name]) <= TOLERANCE, name
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
    agrees(SHAPES[name], engine="torch")


def test_split_backward_passes_on_the_torch_engine() -> None:
    """The zero-bubble lists have I and W; our own executor refuses them by name."""
    agrees(make_plan([([3, 3, 4], 4), ([5, 5], 3)]), engine="torch", schedule="zero-bubble", steps=2)
    with pytest.raises(RuntimeError, match=r"\dI\d+: this engine runs whole backward passes; use engine 'torch'"):
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


Given = tuple[Plan, Model, int, dict[str, Any]]  # plan, model, samples of the batch, options of the trainer


def refused(rank: int, make: Callable[[int], Given]) -> str:
    """What the trainer says to what a rank was given."""
    plan, model, samples, options = make(rank)
    try:
        with Trainer(plan, model, timeout_s=20.0, **options) as trainer:
            inputs, targets = make_batch(samples, 0)
            trainer.step(inputs, targets)
    except ValueError as error:
        return str(error)
    return "accepted"


ONE, TWO = make_plan([([10], 3)]), make_plan([([10], 3), ([10], 3)])
WIDE = make_plan([([6], 1)], tp=2)


def of_rank(rank: int) -> Model:
    """Layers whose first weights depend on more than the seed, from layer 3 on."""
    model = make_model(10)

    def layer(l: int) -> torch.nn.Module:
        made = model.layer(l)
        with torch.no_grad():
            next(made.parameters()).add_(rank if l >= 3 else 0)
        return made

    return replace(model, layer=layer)


def of_rank_size(rank: int) -> Model:
    """A layer that has a parameter more on rank 1."""
    model = make_model(10)

    def layer(l: int) -> torch.nn.Module:
        made = model.layer(l)
        if l == 4 and rank == 1:
            made.more = torch.nn.Parameter(torch.zeros(3))
        return made

    return replace(model, layer=layer)


def mixed() -> Model:
    """bf16 weights, and a norm in fp32."""
    model = make_model(10)
    return replace(model, layer=lambda l: model.layer(l).to(torch.bfloat16 if l % 2 else torch.float32))


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """Weight decay for matrices only."""
    named = list(parameters)
    groups = [{"params": [p for p in named if (p.ndim > 1) == deep]} for deep in (True, False)]
    return torch.optim.AdamW([*groups[:1], groups[1] | {"weight_decay": 0.0}])


REFUSED: dict[str, tuple[int, Callable[[int], Given], str]] = {
    "another model": (1, lambda _: (ONE, make_model(9), 6, {}), "the model has 9 layers, the plan 10"),
    "another world": (
        2,
        lambda _: (ONE, make_model(10), 6, {}),
        "2 processes run, the plan needs one for each of its 1 devices",
    ),
    "another batch": (
        1,
        lambda _: (ONE, make_model(10), 5, {}),
        "inputs: 5 samples given, rank 0 (pipeline 0 stage 0) takes 6",
    ),
    "no way to shard": (2, lambda _: (WIDE, sharded_model(shard=False), 2, {}), "the model says no way to shard its"),
    "another model on rank 1": (
        2,
        lambda rank: (TWO, make_model(10 - rank), 6, {}),
        "the model has 9 layers, the plan 10",
    ),
    "another plan on rank 1": (
        2,
        lambda rank: (make_plan([([10], 3 + rank), ([10], 3)]), make_model(10), 6, {}),
        "plan: ",
    ),
    "another granularity on rank 1": (
        2,
        lambda rank: (TWO, make_model(10), 6, {"granularity": ("block", "layer")[rank]}),
        "granularity: 'layer' on rank 1, 'block' on rank 0; expected the same on all",
    ),
    "another seed on rank 1": (2, lambda rank: (TWO, make_model(10), 6, {"seed": rank}), "seed: 1 on rank 1, 0 on"),
    "other weights on rank 1": (
        2,
        lambda rank: (TWO, of_rank(rank), 6, {}),
        "layer 3 has other weights or buffers on rank 1 (pipeline 1 stage 0) than on rank 0 (pipeline 0 stage 0)",
    ),
    "another layer on rank 1": (
        2,
        lambda rank: (TWO, of_rank_size(rank), 6, {}),
        "layers 0 to 9 differ: rank 1 (pipeline 1 stage 0) has 77 parameters of ",
    ),
    "parameter groups of shards": (
        2,
        lambda _: (TWO, make_model(10), 6, {"shard_optimizer": True, "optimizer": decayed}),
        "optimizer: 2 parameter groups, and sharded optimizer state knows flat parts of blocks, not parameters",
    ),
    "shards of two precisions": (
        2,
        lambda _: (TWO, mixed(), 6, {"shard_optimizer": True}),
        "rank 0 (pipeline 0 stage 0): layers 0 to 9: weights of bfloat16 and float32; sharded optimizer state needs",
    ),
    "shards of shards": (
        4,
        lambda _: (make_plan([([6], 1), ([6], 1)], tp=2), sharded_model(), 2, {"shard_optimizer": True}),
        "sharded optimizer state is not supported for layers that tensor parallelism shards",
    ),
    "nothing left to shard": (
        2,
        lambda _: (TWO, make_model(10), 6, {"shard_optimizer": True, "granularity": "model"}),
        "granularity: 'model' sums the whole model everywhere, which leaves nothing to shard",
    ),
    "fp16": (1, lambda _: (ONE, make_model(10), 6, {"dtype": torch.float16}), "dtype: fp16 needs its loss scaled"),
    "an engine": (1, lambda _: (ONE, make_model(10), 6, {"engine": "tensor"}), "engine: 'tensor' is not among own, to"),
    "a schedule of fewer micro-batches": (
        1,
        lambda _: (ONE, make_model(10), 6, {"schedule": [gpipe(1, 2)]}),
        "schedule of pipeline 0: 1 stages on 1 ranks, 2 micro-batches; the plan has 1 stages, each on a rank of its",
    ),
    "a schedule of more stages": (
        1,
        lambda _: (ONE, make_model(10), 6, {"schedule": [interleaved(1, 2, 3)]}),
        "schedule of pipeline 0: 2 stages on 1 ranks, 3 micro-batches",
    ),
    "too few schedules": (
        2,
        lambda _: (TWO, make_model(10), 6, {"schedule": [gpipe(1, 3)]}),
        "schedule: 1 lists, expected one for each of 2 pipelines",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    """One error on all ranks before anything runs, with both figures, also if it is one rank that was given it."""
    world, make, words = REFUSED[name]
    for text in start(world, refused, make):
        assert words in text


def test_unequal_tp_along_a_pipeline_needs_the_own_engine() -> None:
    """torch's stages hand over one to one."""
    plan = make_plan([([3, 3], 2)], tp=2)
    narrow = replace(plan.pipelines[0].stages[1], tp=1, devices=("host:2",))
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(plan.pipelines[0].stages[0], narrow)),))
    for text in start(3, refused, lambda _: (plan, sharded_model(), 4, {"engine": "torch"})):
        assert "engine: 'torch' hands over between stages of equal tp only, a pipeline has tp [1, 2]" in text


def trained(rank: int, plan: Plan, model: Model, batch: Callable[[int], Any], options: dict[str, Any]) -> Any:
    """(loss, norm) of three steps, weights and buffers at the end, whole where they are sharded."""
    options = {"optimizer": adamw, "dtype": torch.float64, **options}
    with Trainer(plan, model, timeout_s=20.0, **options) as trainer:
        results, part = [], slice(trainer.samples.start, trainer.samples.stop)
        for step in range(3):
            inputs, targets = ([each[part] for each in as_tuple(side)] for side in batch(step))
            result = trainer.step(tuple(inputs), tuple(targets))
            results.append((result.loss, result.norm))
        state = trainer.stage.state_dict()
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in state.items()}
        return results, {name: value.detach().clone() for name, value in whole.items()}


def samples_of(plan: Plan) -> Callable[[int], Any]:
    return lambda step: make_batch(plan.job.global_batch, step)


def equal_one_process(
    plan: Plan,
    model: Model,
    batch: Callable[[int], Any] | None = None,
    tolerance: float = TOLERANCE,
    alone: Model | None = None,
    **options: Any,
) -> list[Any]:
    """Holds a model on a plan's ranks against the same trainer with everything on one rank, whose own parity the tests
    above hold; returns what the ranks found."""
    batch = batch or samples_of(plan)
    layers, total = plan.blocks[-1].layers[1], plan.job.global_batch
    (expected, weights0), *_ = start(
        1,
        trained,
        make_plan([([layers], total // 2)]),
        alone or model,
        batch,
        {"dtype": options.get("dtype", torch.float64)},
    )
    found = start(len(plan.devices), trained, plan, model, batch, options)
    for results, weights in found:
        assert results == [pytest.approx(each, rel=tolerance) for each in expected]
        for name, weight in weights.items():
            assert relative(weight.double(), weights0[name].double()) <= tolerance, name
    return found


DEEP, SHALLOW = make_plan([([4, 6], 3), ([3, 3, 4], 2)]), make_plan([([4, 6], 3), ([10], 2)])
BOTH = pytest.mark.parametrize("engine", ["own", "torch"])


def weighted(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy with a weight per token."""
    tokens, weights = targets
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


@BOTH
def test_targets_may_be_several_tensors(engine: str) -> None:
    """Tokens and their weights."""

    def batch(step: int) -> Any:
        inputs, targets = make_batch(DEEP.job.global_batch, step)
        return inputs, (targets, torch.linspace(0.5, 2.0, targets.numel(), dtype=torch.float64).view_as(targets))

    model = replace(make_model(LAYERS), loss=weighted, count_tokens=lambda targets: int((targets[0] != -100).sum()))
    equal_one_process(DEEP, model, batch, engine=engine)


def frozen(model: Model, layers: Any) -> Model:
    """A model with layers that are not trained."""
    return replace(model, layer=lambda l: model.layer(l).requires_grad_(l not in layers))


@pytest.mark.parametrize(
    ("layers", "granularity", "engine"),
    [
        (range(4), "block", "own"),
        (range(4), "model", "torch"),
        (range(4, 10), "block", "torch"),
        (range(3, 6), "tensor", "own"),
        ((0,), "model", "own"),
    ],
    ids=str,
)
def test_layers_may_be_frozen(layers: Any, granularity: str, engine: str) -> None:
    """Whole stages at the start, at the end and between, which have nothing to reduce or to update."""
    model = frozen(make_model(LAYERS), layers)
    for _, weights in equal_one_process(DEEP, model, granularity=granularity, engine=engine):
        stage = {name: int(name.split(".")[1]) for name in weights}
        fresh = {l: model.layer(l) for l in set(stage.values())}
        assert stage.keys() == {f"layers.{l}.{n}" for l, layer in fresh.items() for n in layer.state_dict()}


def test_frozen_weights_may_be_tied() -> None:
    """Neither end is reduced."""
    model = make_model(LAYERS, tied=True)

    def layer(l: int) -> torch.nn.Module:
        made = model.layer(l)
        for name in ("token", "out"):
            if l in (0, LAYERS - 1) and hasattr(made, name):
                getattr(made, name).requires_grad_(False)
        return made

    plan = make_plan([([4, 6], 3), ([10], 2)], tied=True)
    equal_one_process(plan, replace(model, layer=layer))


def test_sharding_goes_with_frozen_stages() -> None:
    """An owner without anything to train keeps up with the others."""
    equal_one_process(DEEP, frozen(make_model(LAYERS), range(4)), shard_optimizer=True)


class Counting(torch.nn.Module):
    """Counts in a buffer how often it runs forward, and draws from the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Embedding(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(tokens) * (1 + 0 * torch.rand(()))


@BOTH
def test_shapes_are_found_without_a_trace(engine: str) -> None:
    """The run that finds out what stages exchange leaves buffers as they were: as many calls as micro-batches."""
    model = make_model(LAYERS)
    counting = replace(model, layer=lambda l: Counting() if l == 0 else model.layer(l))
    for rank, (_, weights) in enumerate(start(5, trained, DEEP, counting, samples_of(DEEP), {"engine": engine})):
        if "layers.0.calls" in weights:
            assert weights["layers.0.calls"] == 3 * DEEP.pipelines[Layout(DEEP).places[rank].pipeline].num_micro_batches


def test_bf16_replicas_stay_equal() -> None:
    """Gradients are summed in fp32 over the pipelines too; masters and weights of replicas are equal bit for bit."""
    seen: Weights = {}
    for shard in (False, True):
        options = {"dtype": torch.bfloat16, "shard_optimizer": shard}
        found = start(5, trained, DEEP, make_model(LAYERS), samples_of(DEEP), options)
        losses = [loss for loss, _ in found[0][0]]
        for results, weights in found:
            assert [loss for loss, _ in results] == losses
            for name, weight in weights.items():
                assert weight.dtype == torch.bfloat16
                assert torch.equal(weight, seen.setdefault(name, weight)), name
    (expected, _), *_ = start(1, trained, make_plan([([10], 5)]), make_model(LAYERS), samples_of(DEEP), {"dtype": None})
    assert losses == pytest.approx([loss for loss, _ in expected], rel=2e-2)


def test_bf16_goes_with_tensor_parallel_stages() -> None:
    """Shards have fp32 gradients and masters as whole weights have; all within bf16 of one process in fp32."""
    plan = make_plan([([3, 3], 3), ([6], 2)], tp=2)
    found = start(6, trained, plan, sharded_model(), samples_of(plan), {"dtype": torch.bfloat16})
    (expected, weights0), *_ = start(
        1, trained, make_plan([([6], 5)]), sharded_model(), samples_of(plan), {"dtype": torch.float32}
    )
    seen: Weights = {}
    for results, weights in found:
        assert [loss for loss, _ in results] == pytest.approx([loss for loss, _ in expected], rel=2e-2)
        for name, weight in weights.items():
            assert weight.dtype == torch.bfloat16 and torch.equal(weight, seen.setdefault(name, weight)), name
            assert relative(weight.float(), weights0[name]) < 0.1, name


@BOTH
def test_tensor_parallel_stages_on_both_engines(engine: str) -> None:
    """Shards on devices in turned order in one pipeline: tp ranks ascend whatever order a plan names devices in."""
    plan = make_plan([([3, 3], 3), ([6], 2)], tp=2)
    first, second = plan.pipelines
    turned = replace(first, stages=tuple(replace(stage, devices=stage.devices[::-1]) for stage in first.stages))
    equal_one_process(replace(plan, pipelines=(turned, second)), sharded_model(), engine=engine)


def traced(rank: int, plan: Plan, options: dict[str, Any]) -> Any:
    """The trace of the second step."""
    with Trainer(plan, make_model(LAYERS), timeout_s=20.0, **options) as trainer:
        for step in range(2):
            trainer.tracing = step == 1
            inputs, targets = make_batch(plan.job.global_batch, step)
            part = slice(trainer.samples.start, trainer.samples.stop)
            trainer.step(inputs[part], targets[part])
        return trainer.place, trainer.trace


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_a_trace_has_every_action_of_the_lists(shard: bool) -> None:
    """All of `planner.schedule.action_lists`: compute, transfers, reductions by their number, update; each within the
    step, a wait before its computing, a transfer after what it sends."""
    plan = replace(DEEP, blocks=tuple(replace(block, num_chunks=1) for block in DEEP.blocks))
    lists, _ = action_lists(plan)
    for place, trace in start(5, traced, plan, {"shard_optimizer": shard}):
        assert sorted(each.action for each in trace) == sorted(lists[place.pipeline].ranks[place.stage])
        times = {each.action: each for each in trace}
        assert [each.start_s for each in trace] == sorted(each.start_s for each in trace)
        last = max(each.end_s for each in trace)
        for action, ran in times.items():
            assert 0 <= ran.start_s <= ran.end_s <= last
            if action.kind == Kind.RECV_F:
                assert ran.end_s <= times[action._replace(kind=Kind.F)].start_s
            if action.kind == Kind.SEND_B:
                assert times[action._replace(kind=Kind.B)].end_s <= ran.start_s
            if action.kind == Kind.REDUCE_GRAD:
                assert times[action._replace(kind=Kind.UPDATE, index=None)].start_s >= ran.end_s


def test_a_trace_of_the_torch_engine_has_its_computing() -> None:
    """F and B, and what the trainer does itself; its transfers are not ours to see."""
    lists, _ = action_lists(DEEP)
    for place, trace in start(5, traced, DEEP, {"engine": "torch"}):
        kinds = (Kind.F, Kind.B, Kind.UPDATE)
        expected = [action for action in lists[place.pipeline].ranks[place.stage] if action.kind in kinds]
        assert sorted(each.action for each in trace if each.action.kind in kinds) == sorted(expected)


def vocabulary_sharded(tied: bool) -> Model:
    """Embedding, MLPs, head, all sharded by rows of the vocabulary or of the hidden size."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    inner = sharded_model()
    assert inner.parallelize is not None
    mlp = inner.parallelize

    def parallelize(layer: torch.nn.Module, l: int, mesh: Any) -> None:
        mlp(layer, l, mesh)
        if l == 0:
            parallelize_module(layer, mesh, {"token": RowwiseParallel(input_layouts=Replicate())})
        if l == 5:
            parallelize_module(layer, mesh, {"out": ColwiseParallel(output_layouts=Replicate())})

    weights = ((0, "token.weight"), (5, "out.weight")) if tied else None
    return replace(inner, parallelize=parallelize, tied=weights)


def test_ties_survive_sharding() -> None:
    """`parallelize_module` makes new parameters; both ends on one tp stage stay one weight."""
    plan = make_plan([([6], 3)], tp=2, tied=True)
    equal_one_process(plan, vocabulary_sharded(tied=True))


def test_a_frozen_end_freezes_the_other() -> None:
    """On two stages as on one, where both ends are one parameter."""
    model = frozen(make_model(LAYERS, tied=True), (0,))
    equal_one_process(make_plan([([4, 6], 3)], tied=True), model)


class Turning(torch.nn.Module):
    """Hands over complex activations, or ones that are not contiguous, and takes them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.scale = how, torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "to complex":
            return torch.complex(x * self.scale, x.flip(-1))
        if self.how == "to real":
            return x.real + x.imag * self.scale
        if self.how == "turned":
            return (x * self.scale).transpose(1, 2)
        return x.transpose(1, 2) * self.scale


@BOTH
@pytest.mark.parametrize(("last", "first"), [("to complex", "to real"), ("turned", "turned back")])
def test_what_is_handed_over_may_be_of_any_kind(last: str, first: str, engine: str) -> None:
    """Layers 3 and 4 are the last of a stage and the first of the next."""
    model, turning = make_model(LAYERS), {3: last, 4: first}
    turned = replace(model, layer=lambda l: Turning(turning[l]) if l in turning else model.layer(l))
    equal_one_process(make_plan([([4, 6], 3)]), turned, engine=engine)


class Averaging(torch.nn.Module):
    """Keeps a running mean, as batch norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return x + torch.nn.functional.gelu(self.inner(x))


def test_recompute_updates_buffers_once() -> None:
    """Running statistics are those of a run without recompute."""
    model = make_model(LAYERS)
    averaging = replace(model, layer=lambda l: Averaging() if l in (1, 2) else model.layer(l))
    equal_one_process(make_plan([([4, 6], 5)], recompute=(1, 2)), averaging)


def test_a_model_of_layers_keeps_its_ties() -> None:
    """Found where layers share a weight; more than one cannot be planned."""
    layers = [make_model(4).layer(l) for l in range(4)]
    layers[3].out.weight = layers[0].token.weight
    assert Model.of(layers).tied == ((0, "token.weight"), (3, "out.weight"))
    with pytest.raises(ValueError, match="layers share 10 parameters"):
        Model.of([layers[0], layers[1], layers[1], layers[3]])


class Reentrant(torch.nn.Module):
    """One weight in two reentrant checkpoints: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


def test_gradients_in_parts_are_not_reduced_early() -> None:
    """Refused by name while reductions overlap, right where they do not."""
    model = make_model(LAYERS)
    parts = replace(model, layer=lambda l: Reentrant() if l == 2 else model.layer(l))
    equal_one_process(TWO, parts, overlap=False)
    with pytest.raises(RuntimeError, match=r"gets its gradient in several parts .* expected overlap=False"):
        start(2, trained, TWO, parts, samples_of(TWO), {})


def eager(rank: int, plan: Plan, engine: str) -> Any:
    """Weights after steps with the habits of plain loops."""
    options: dict[str, Any] = {"engine": engine, "optimizer": adamw, "dtype": torch.float64}
    with Trainer(plan, make_model(LAYERS), timeout_s=20.0, **options) as trainer:
        for step in range(3):
            trainer.optimizer.zero_grad()
            inputs, targets = make_batch(plan.job.global_batch, step)
            part = slice(trainer.samples.start, trainer.samples.stop)
            trainer.step(inputs[part], targets[part])
        return {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}


@BOTH
def test_zero_grad_does_no_harm(engine: str) -> None:
    """It takes gradients away, which are views of the buckets again in the next step."""
    (_, expected), *_ = start(1, trained, make_plan([([10], 6)]), make_model(LAYERS), samples_of(TWO), {})
    for weights in start(2, eager, TWO, engine):
        assert all(relative(weight, expected[name]) <= TOLERANCE for name, weight in weights.items())


def longer(rank: int, plan: Plan, engine: str) -> str:
    """What a second step with longer sequences is answered."""
    try:
        with Trainer(plan, make_model(LAYERS), timeout_s=20.0, engine=engine) as trainer:
            for cut in (4, 0):
                inputs, targets = make_batch(plan.job.global_batch, 0)
                trainer.step(inputs[:, cut:].contiguous(), targets[:, cut:].contiguous())
    except (ValueError, RankFailed) as error:
        return str(error)
    return "accepted"


@BOTH
def test_shapes_may_not_change(engine: str) -> None:
    """A longer message would end the process: the sender says so instead."""
    first, second = start(2, longer, make_plan([([4, 6], 3)]), engine)
    assert first.startswith("rank 0 (pipeline 0 stage 0): hands over [2, 8, 16] float32, agreed at load was [2, 4, 16]")
    assert second.startswith("rank 1 (pipeline 0 stage 1) ")


def sends_alive(rank: int, plan: Plan) -> int:
    """Most hand-overs that were kept at once."""
    most = 0
    send = execute._Flow.send

    def counting(flow: Any, *arguments: Any) -> None:
        nonlocal most
        send(flow, *arguments)
        most = max(most, len(flow.sends))

    execute._Flow.send = counting  # type: ignore[method-assign]
    with Trainer(plan, make_model(LAYERS), timeout_s=20.0) as trainer:
        inputs, targets = make_batch(plan.job.global_batch, 0)
        trainer.step(inputs, targets)
    return most


def test_sent_tensors_are_let_go_of() -> None:
    """No more of them live at once than micro-batches are in flight, however many there are."""
    plan = make_plan([([3, 3, 4], 16)])
    for most, stage in zip(start(3, sends_alive, plan), plan.stages, strict=True):
        assert 1 <= most <= 2 * stage.in_flight + 1


def raising(rank: int) -> str:
    """What is raised where the builder of a layer fails on rank 1."""
    model = make_model(LAYERS)

    def layer(l: int) -> torch.nn.Module:
        if rank == 1 and l == 5:
            raise KeyError("no file of layer 5")
        return model.layer(l)

    try:
        Trainer(TWO, replace(model, layer=layer), timeout_s=20.0)
    except (KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_what_a_builder_raises_is_raised_on_all() -> None:
    """With its rank on the others, which do not wait for it."""
    assert start(2, raising) == [
        "ValueError: rank 1: KeyError: 'no file of layer 5'",
        "KeyError: 'no file of layer 5'",
    ]


class Drawing(torch.nn.Module):
    """Keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Embedding(False)
        self.register_buffer("drawn", torch.zeros(4))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.drawn[self.at] = torch.rand(())
        self.at += 1
        return self.inner(tokens)


def test_pipelines_and_steps_draw_differently() -> None:
    """Dropout masks differ between pipelines, micro-batches and steps, and are the same in a second run; the random
    state of the script is its own."""
    plan = make_plan([([10], 1), ([10], 1)])
    model = make_model(LAYERS)
    drawing = replace(model, layer=lambda l: Drawing() if l == 0 else model.layer(l))
    runs = [start(2, trained, plan, drawing, samples_of(plan), {}) for _ in range(2)]
    drawn = [[weights["layers.0.drawn"][:3].tolist() for _, weights in found] for found in runs]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0][0] + drawn[0][1])) == 6


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
    return plan, options


SEEDS = range(20)


@pytest.mark.parametrize("engine", ["own", "torch"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans_equal_one_process(seed: int, engine: str) -> None:
    """Whatever plan, forwards ahead, granularity and sharding are drawn, on both engines."""
    plan, options = random_plan(seed)
    agrees(plan, engine=engine, **options)


def test_random_plans_are_of_all_kinds() -> None:
    """The draws are not all alike: what the test above is to cover is in them."""
    plans = [random_plan(seed) for seed in SEEDS]
    shapes = [[(len(p.stages), p.num_micro_batches) for p in plan.pipelines] for plan, _ in plans]
    assert {len(shape) for shape in shapes} == {1, 2, 3, 4}
    assert {depth for shape in shapes for depth, _ in shape} == {1, 2, 3, 4}
    assert sum(any(m < depth for depth, m in shape) for shape in shapes) >= 3
    assert sum(len(set(shape)) > 1 for shape in shapes) >= 5
    assert sum(any(stage.recompute for stage in plan.stages) for plan, _ in plans) >= 5
    assert sum(list(Layout(plan).devices) != [n for s in plan.stages for n in s.devices] for plan, _ in plans) >= 5
    assert sum(bool(plan.tied_blocks) for plan, _ in plans) >= 3
    for key, value in (("masked", True), ("shard_optimizer", True), ("overlap", False)):
        assert sum(options.get(key) == value for _, options in plans) >= 3, key
    assert {options["granularity"] for _, options in plans} == {"tensor", "layer", "block", "model"}
