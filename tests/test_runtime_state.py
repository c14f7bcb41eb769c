"""State on disk: what one plan wrote another reads, exactly; and what cannot be read says why."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it; once here rather than in every rank
import torch.distributed as dist
from ranks import connect, make_batch, make_model, make_plan, start
from test_runtime import reference, relative
from torch import Tensor, nn

from planner.plans import Plan
from runtime import Trainer, state
from runtime.model import Model

TOLERANCE = 1e-12
DEEP = make_plan([([4, 6], 3), ([3, 3, 4], 3)])
FLAT = make_plan([([5, 5], 4), ([10], 2)])
TIED_APART = make_plan([([4, 6], 3), ([3, 7], 3)], tied=True)
TIED_TOGETHER = make_plan([([10], 4), ([10], 2)], tied=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of the reference."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def trainer(plan: Plan, model: Model | None = None, **options: Any) -> Trainer:
    """A trainer of the small model."""
    gc.freeze()  # what the fork brought along: no collection goes through it
    options = {"optimizer": adamw, "dtype": torch.float64, "timeout_s": 20.0, **options}
    return Trainer(plan, model or make_model(10, tied=bool(plan.tied_blocks)), **options)


def train(run: Trainer, until: int) -> None:
    """Steps up to `until`, on the batches of the reference."""
    while run.step_index < until:
        inputs, targets = make_batch(run.plan.job.global_batch, run.step_index)
        part = slice(run.samples.start, run.samples.stop)
        run.step(inputs[part] if run.is_first else None, targets[part] if run.is_last else None)


def copied(run: Trainer) -> dict[str, Tensor]:
    """Everything a process holds."""
    return {name: value.clone() for name, value in state.snapshot(run).tensors.items()}


def write(rank: int, plan: Plan, folder: str, options: dict[str, Any], until: int = 2) -> dict[str, Tensor]:
    """Train, save, and return what was saved."""
    with trainer(plan, **options) as run:
        train(run, until)
        state.save(run, folder, extra={"seen": until})
        return copied(run)


def read(rank: int, plan: Plan, folder: str, options: dict[str, Any], until: int = 4) -> Any:
    """Load; what is held then, what came beside it, and weights after more steps."""
    with trainer(plan, **options) as run:
        extra = state.load(run, folder)
        loaded = copied(run)
        train(run, until)
        weights = {n: p.detach().clone() for n, p in run.stage.named_parameters(remove_duplicate=False)}
        return loaded, extra, weights


def goes_on(
    old: Plan, new: Plan, folder: Path, *, tied: bool = False, write_with: Any = None, read_with: Any = None
) -> None:
    """A run that stops under one plan and goes on under another equals one process that never stopped."""
    saved: dict[str, Tensor] = {}
    for each in start(len(old.devices), write, old, str(folder), {"model": _model(tied), **(write_with or {})}):
        for name, value in each.items():
            assert torch.equal(value, saved.setdefault(name, value)), f"replicas of {name} differ"
    expected = reference(10, 12, tied=tied, masked=False, steps=4)[-1][3]
    seen: dict[str, Tensor] = {}
    names = set()
    for loaded, extra, weights in start(
        len(new.devices), read, new, str(folder), {"model": _model(tied), **(read_with or {})}
    ):
        assert extra == {"seen": 2}
        names |= set(loaded)
        for name, value in loaded.items():
            assert torch.equal(value, saved[name]), name
        for name, weight in weights.items():
            assert relative(weight, expected[name]) <= TOLERANCE, name
            assert torch.equal(weight, seen.setdefault(name, weight)), f"replicas of {name} differ"
    assert names == set(saved)


def _model(tied: bool) -> Model:
    return make_model(10, tied=tied)


@pytest.mark.parametrize(
    ("old", "new"), [(DEEP, FLAT), (FLAT, make_plan([([2, 2, 3, 3], 6)]))], ids=["5 to 3 ranks", "2 pipelines to 1"]
)
def test_another_plan_reads_what_one_wrote(old: Plan, new: Plan, tmp_path: Path) -> None:
    """Bit for bit the same state, and after further steps the weights of a run that never stopped, within 1e-12."""
    goes_on(old, new, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [(TIED_APART, TIED_TOGETHER), (TIED_TOGETHER, TIED_APART)], ids=["apart to one", "one to apart"]
)
@pytest.mark.parametrize("shard", [False, True], ids=["", "sharded"])
def test_tied_weights_are_stored_once(old: Plan, new: Plan, shard: bool, tmp_path: Path) -> None:
    """Held by two stages under one plan and by one under the other; their moments go along."""
    goes_on(old, new, tmp_path, tied=True, write_with={"shard_optimizer": shard}, read_with={"shard_optimizer": shard})


@pytest.mark.parametrize(
    ("write_with", "read_with"),
    [
        ({"shard_optimizer": True}, {}),
        ({}, {"shard_optimizer": True}),
        (
            {"shard_optimizer": True, "chunk_bytes": 1000},
            {"shard_optimizer": True, "granularity": "tensor"},
        ),
    ],
    ids=["sharded to whole", "whole to sharded", "sharded to other shards"],
)
def test_sharding_does_not_show_in_what_is_stored(write_with: Any, read_with: Any, tmp_path: Path) -> None:
    """Optimizer state sharded over the owners of a block is stored whole, and cut anew when it is read."""
    goes_on(DEEP, FLAT, tmp_path, write_with=write_with, read_with=read_with)


@pytest.mark.parametrize("shard", [False, True], ids=["", "sharded"])
def test_weights_of_16_bits_are_stored_as_their_masters(shard: bool, tmp_path: Path) -> None:
    """bf16 weights come back as the rounded fp32 masters that were saved, whose every bit is kept."""
    options = {"dtype": torch.bfloat16, "shard_optimizer": shard, "model": make_model(10)}
    saved: dict[str, Tensor] = {}
    for each in start(5, write, DEEP, str(tmp_path), options):
        saved |= each
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    for loaded, _, weights in start(3, read, FLAT, str(tmp_path), {**options, "shard_optimizer": not shard}, 2):
        for name, value in loaded.items():
            assert torch.equal(value, saved[name]), name
        for name, weight in weights.items():
            assert torch.equal(weight, saved[f"model.{name}"].bfloat16()), name


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD in two groups: matrices, and the rest without decay."""
    every = list(parameters)
    return torch.optim.SGD(
        [
            {"params": [p for p in every if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        momentum=0.9,
    )


def test_settings_of_the_optimizer_come_back(tmp_path: Path) -> None:
    """A learning rate that a schedule changed, a decay of some parameters only, and state that is not Adam's."""

    def first(rank: int) -> Any:
        with trainer(FLAT, optimizer=momentum) as run:
            train(run, 1)
            for group in run.optimizer.param_groups:
                group["lr"] = 3e-3
            state.save(run, tmp_path)
            return copied(run)

    def second(rank: int) -> Any:
        with trainer(DEEP, optimizer=momentum) as run:
            state.load(run, tmp_path)
            decays = {
                (p.ndim > 1, group["weight_decay"]) for group in run.optimizer.param_groups for p in group["params"]
            }
            return copied(run), {group["lr"] for group in run.optimizer.param_groups}, decays

    saved: dict[str, Tensor] = {}
    for each in start(3, first):
        saved |= each
    assert any(name.endswith(".momentum_buffer") for name in saved)
    for loaded, rates, decays in start(5, second):
        assert rates == {3e-3}
        assert decays == {(True, 0.1), (False, 0.0)}
        assert all(torch.equal(value, saved[name]) for name, value in loaded.items())


def test_several_parameter_groups_do_not_become_shards(tmp_path: Path) -> None:
    """A block's flat parts have one setting: refused by all, and what they held stays."""

    def attempt(rank: int) -> tuple[str, bool]:
        with trainer(FLAT, optimizer=momentum) as run:
            train(run, 1)
            state.save(run, tmp_path)
        connect(tmp_path / "store", rank, 3)
        plain = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
        with trainer(FLAT, optimizer=plain, shard_optimizer=True) as run:
            before = copied(run)
            with pytest.raises(ValueError) as caught:
                state.load(run, tmp_path)
            after = copied(run)
            return str(caught.value), all(torch.equal(after[name], value) for name, value in before.items())

    for text, unchanged in start(3, attempt):
        assert text.startswith(
            "state: kept with several parameter groups, and sharded optimizer state knows flat parts"
        )
        assert unchanged


class Frozen(nn.Module):
    """A layer with a frozen weight and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.fixed = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.weight + self.fixed


def test_frozen_weights_and_buffers_are_part_of_the_state(tmp_path: Path) -> None:
    """Both come back, changed as they were, on a process that built them otherwise."""
    plan = make_plan([([1, 2], 2)])
    model = Model(num_layers=3, layer=lambda l: Frozen(), loss=lambda y, t: (y - t).square().sum(), count_tokens=len)

    def first(rank: int) -> Any:
        with trainer(plan, model) as run:
            x = torch.ones(4, 4, dtype=torch.float64)
            run.step(x if run.is_first else None, x if run.is_last else None)
            state.save(run, tmp_path)
            return copied(run)

    def second(rank: int) -> Any:
        with trainer(make_plan([([3], 2)]), model, seed=1) as run:
            state.load(run, tmp_path)
            return copied(run)

    one, two = start(2, first)
    (loaded,) = start(1, second)
    assert set(loaded) == set(one | two)
    assert loaded["model.layers.2.calls"] == 2
    assert all(torch.equal(value, (one | two)[name]) for name, value in loaded.items())


def test_tensor_parallel_shards_are_stored_as_one(tmp_path: Path) -> None:
    """Saved by two processes that hold half of a layer each, read by one that holds all of it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def layer(l: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def cut(module: nn.Module, l: int, mesh: Any) -> None:
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return (y - t).square().sum()

    model = Model(num_layers=2, layer=layer, loss=loss, count_tokens=len, parallelize=cut)

    def write_shards(rank: int) -> Any:
        with trainer(make_plan([([2], 2)], tp=2), model) as run:
            x = torch.arange(16, dtype=torch.float64).view(4, 4)
            run.step(x, -x)
            state.save(run, tmp_path)
            whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in copied(run).items()}
            return {name: value.detach() for name, value in whole.items()}

    def read_whole(rank: int) -> Any:
        with trainer(make_plan([([2], 2)]), model) as run:
            state.load(run, tmp_path)
            return copied(run)

    saved = start(2, write_shards)[0]
    (loaded,) = start(1, read_whole)
    assert set(loaded) == set(saved)
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())


# What goes wrong


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 1 by three processes."""
    folder = tmp_path_factory.mktemp("written")
    start(3, write, FLAT, str(folder), {"model": make_model(10)}, 1)
    return folder


def refusals(folder: Path, *attempts: tuple[Path, dict[str, Any]], plan: Plan = FLAT) -> list[str]:
    """Of each attempt to load with some options the one error that all processes raise."""

    def attempt(rank: int, number: int, where: Path, options: dict[str, Any]) -> str:
        if not dist.is_initialized():
            connect(folder / f"store-{number}", rank, len(plan.devices))
        with trainer(options.pop("plan", plan), **options) as run:
            before = copied(run)
            with pytest.raises(ValueError) as caught:
                state.load(run, where)
            assert all(torch.equal(value, before[name]) for name, value in copied(run).items()), "half loaded"
            return str(caught.value)

    def work(rank: int) -> list[str]:
        return [attempt(rank, n, where, dict(options)) for n, (where, options) in enumerate(attempts)]

    first, *others = start(len(plan.devices), work)
    assert all(each == first for each in others)
    assert not any("\n" in text for text in first)
    return first


def test_a_checkpoint_that_does_not_fit_is_refused(written: Path, tmp_path: Path) -> None:
    """No checkpoint, other layers, names, shapes, another optimizer: one error, the same on all, nothing changed."""
    step, base = written / "step-00000001", make_model(10)

    def changed(l: int) -> nn.Module:
        built = base.layer(l)
        if l == 4:
            built.up = nn.Linear(16, 48)  # type: ignore[assignment]
        return built

    renamed = Model(num_layers=10, layer=lambda l: nn.Linear(3, 3) if l == 7 else base.layer(l))
    found = refusals(
        tmp_path,
        (tmp_path / "none", {}),
        (written, {"plan": make_plan([([4, 5], 4), ([9], 2)]), "model": make_model(9)}),
        (written, {"model": renamed}),
        (written, {"model": Model(num_layers=10, layer=changed)}),
        (written, {"optimizer": momentum}),
    )
    assert found == [
        f"{tmp_path / 'none'}: no checkpoint there, expected a folder with a file state.json or folders step-*",
        f"{step}: of a model of 10 layers, this one has 9",
        f"{step}: of another model: it has no layers.7.weight",
        f"{step}: of another model: layers.4.up.weight is [32, 16] there, [48, 16] here",
        f"{step}: saved with AdamW, the optimizer is SGD",
    ]


def test_a_damaged_checkpoint_is_refused(written: Path, tmp_path: Path) -> None:
    """Cut short, changed, removed, or without a readable header: the file is named."""
    size = (written / "step-00000001" / "__2_0.distcp").stat().st_size

    def cut_short(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-7])

    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    damages: dict[str, tuple[Callable[[Path], None], str, str]] = {
        "short": (cut_short, "__2_0.distcp", f": damaged: __2_0.distcp is {size - 7} bytes instead of {size}"),
        "changed": (flip, "__2_0.distcp", ": damaged: __2_0.distcp is changed since written"),
        "missing": (Path.unlink, "__2_0.distcp", ": damaged: __2_0.distcp is missing"),
        "index": (Path.unlink, ".metadata", ": damaged: .metadata is missing"),
        "header": (lambda file: file.write_text("{"), "state.json", "/state.json: line 1 column 2: Expecting property"),
    }
    for name, (damage, file, _) in damages.items():
        shutil.copytree(written / "step-00000001", tmp_path / name)
        damage(tmp_path / name / file)
    found = refusals(tmp_path, *((tmp_path / name, {}) for name in damages))
    for text, (name, (_, _, expected)) in zip(found, damages.items(), strict=True):
        assert text.startswith(f"{tmp_path / name}{expected}")


def test_a_checkpoint_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """A process that dies while it writes leaves the last checkpoint and no new one; the next save clears up."""

    def dies(rank: int) -> None:
        with trainer(FLAT) as run:
            train(run, 1)
            state.save(run, tmp_path)
            train(run, 2)
            if rank == 2:
                state._sums = lambda folder: os._exit(7)
            with pytest.raises(RuntimeError):
                state.save(run, tmp_path)

    start(3, dies, lost={2})
    assert [each.name for each in state.steps(tmp_path)] == ["step-00000001"]
    assert (tmp_path / ".step-00000002.tmp").exists()

    def again(rank: int) -> int:
        with trainer(FLAT) as run:
            state.load(run, tmp_path)
            assert run.step_index == 1
            for _ in range(3):
                train(run, run.step_index + 1)
                state.save(run, tmp_path)
            state.save(run, tmp_path)  # the same step once more
            return run.step_index

    assert start(3, again) == [4, 4, 4]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    """All processes say so, and go on as they were."""
    (tmp_path / "file").write_text("")

    def attempt(rank: int) -> str:
        with trainer(FLAT) as run:
            with pytest.raises(ValueError) as caught:
                state.save(run, tmp_path / "file")
            train(run, 1)
            return str(caught.value)

    (text,) = set(start(3, attempt))
    assert str(tmp_path / "file") in text
