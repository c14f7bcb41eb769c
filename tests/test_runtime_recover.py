"""Processes are killed in mid-step: the others go on, as if nothing had happened, or stop with one clear error."""

from __future__ import annotations

import gc
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it; once here rather than in every rank
import torch.distributed as dist
from ranks import make_batch, make_model, make_plan, start
from test_runtime import reference, relative, sharded_model

from planner.plans import Infeasible, Plan
from runtime import RankFailed, Trainer, execute, recover, reduce, state
from runtime.groups import Disconnected
from runtime.recover import Elastic, Rendezvous, Replan, report_loss
from runtime.torch_engine import _Stage as TorchStage

TOLERANCE, STEPS, KILLED_AT = 1e-12, 4, 2
SILENT_S = 4.0  # wait for an answer where nobody reports a death, so that the wait is the test's time
SMALL = make_plan([([4, 6], 3), ([10], 3)])  # rank 1 runs layers 4 to 9 of pipeline 0; rank 2 has all layers too
SMALL_LEFT = make_plan([([7, 3], 6)], order=[0, 2])  # rank 0 needs layers 4 to 6, which rank 2 has
Kill = Callable[[Trainer], None]
LAST_WORDS: list[Callable[[], None]] = []  # of this process
RUN: list[Elastic] = []  # of this process


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of the reference."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def batch(plan: Plan) -> Callable[[int, range], Any]:
    """Any samples of the reference's batches."""

    def of(step: int, samples: range) -> Any:
        inputs, targets = make_batch(plan.job.global_batch, step)
        return inputs[samples.start : samples.stop], targets[samples.start : samples.stop]

    return of


def train(
    rank: int,
    folder: str,
    plan: Plan,
    left: Replan,
    kills: dict[int, Kill],
    tied: bool = False,
    trainer: dict[str, Any] | None = None,
    port: int | None = None,
    silent: bool = False,
    **options: Any,
) -> Any:
    """Train with deaths; what is left of the run on this rank, or the error it ended with."""
    gc.freeze()  # what the fork brought along: no collection goes through it
    made_before: list[weakref.ref[Trainer]] = []

    def make(new: Plan) -> Trainer:
        assert all(each() is None for each in made_before), "two stages in memory"
        model = make_model(10, tied=tied)
        made = Trainer(new, model, optimizer=adamw, dtype=torch.float64, timeout_s=20.0, **(trainer or {}))
        if not made_before and rank in kills:
            kills[rank](made)
        made_before.append(weakref.ref(made))
        return made

    store = dist.FileStore(f"{folder}/store", -1) if port is None else dist.TCPStore("127.0.0.1", port)
    LAST_WORDS[:] = [] if silent else [partial(report_loss, store, f"host:{rank}")]
    losses: dict[int, float] = {}
    try:
        with Elastic(
            plan,
            make,
            batch(plan),
            replan=left,
            store=store,
            **{"timeout_s": 20.0, "answer_s": SILENT_S if silent else 20.0, **options},
        ) as run:
            RUN[:] = [run]
            run.run(STEPS, lambda trainer, result, taken: losses.update({trainer.step_index: result.loss}))
            if run.trainer is None:
                return "idle"
            named = run.trainer.stage.named_parameters(remove_duplicate=False)
            return losses, {name: p.detach().clone() for name, p in named}, run.recoveries, run.trainer.step_index
    except RankFailed as error:
        return str(error)


def goes_on(found: list[Any], *, lost: set[int], samples: int, tied: bool = False) -> list[Any]:
    """Holds what the survivors have against one process; returns their recoveries."""
    expected = reference(10, samples, tied=tied, masked=False, steps=STEPS)
    seen: dict[str, torch.Tensor] = {}
    recoveries = []
    for rank, each in enumerate(found):
        if rank in lost:
            assert each is None
            continue
        assert not isinstance(each, str), each
        losses, weights, recovered, step = each
        assert step == STEPS
        for n, loss in losses.items():
            assert loss == pytest.approx(expected[n - 1][0], rel=TOLERANCE)
        for name, weight in weights.items():
            assert relative(weight, expected[-1][3][name]) <= TOLERANCE, name
            assert torch.equal(weight, seen.setdefault(name, weight)), f"replicas of {name} differ"
        recoveries.append(recovered)
    assert len(seen) == len(expected[-1][3])
    return recoveries


# Deaths. Each makes its process end in step KILLED_AT.


def die() -> None:
    """Without a word to the others. The launcher of a run would see it; here it is the process itself that reports it,
    unless the test is about a death that nobody sees, such as the loss of a machine."""
    for say in LAST_WORDS:
        say()
    os._exit(7)


def at_action(text: str, step: int = KILLED_AT) -> Kill:
    """Before an action."""

    def arm(trainer: Trainer) -> None:
        trainer.on_action = lambda action: die() if str(action) == text and trainer.step_index == step else None

    return arm


def around(owner: Any, name: str, *, after: bool, step: int = KILLED_AT) -> Kill:
    """Before or after a call."""

    def arm(trainer: Trainer) -> None:
        call = getattr(owner, name)

        def dying(*arguments: Any, **options: Any) -> Any:
            mine = trainer.step_index == step
            if mine and not after:
                die()
            result = call(*arguments, **options)
            if mine:
                die()
            return result

        setattr(owner, name, dying)

    return arm


def in_update(trainer: Trainer) -> None:
    """When some weights are updated and others are not."""
    step = trainer.optimizer.step

    def half() -> None:
        if trainer.step_index == KILLED_AT:
            trainer.optimizer.param_groups[0]["params"] = trainer.optimizer.param_groups[0]["params"][::2]
            step()
            die()
        step()

    trainer.optimizer.step = half  # type: ignore[method-assign]


DEATHS: dict[str, Kill] = {
    "F": at_action("1F1"),
    "B": at_action("1B2"),
    "a receive pending": around(execute.Channel, "receive", after=True),
    "a send pending": around(execute.Channel, "send", after=True),
    "a reduction not begun": around(reduce.Reducer, "_launch", after=False),
    "a reduction pending": around(reduce.Reducer, "_launch", after=True),
    "commit not begun": around(Trainer, "_commit", after=False),
    "commit done": around(Trainer, "_commit", after=True),
    "update": in_update,
    "the first step": at_action("1F0", step=0),
}


def prepared(*plans: Plan) -> dict[frozenset[str], Plan]:
    """Plans by the devices they are for."""
    return {frozenset(plan.devices): plan for plan in plans}


@pytest.mark.parametrize("death", DEATHS)
def test_a_run_goes_on_after_a_death(death: str, tmp_path: Path) -> None:
    """Killed at each kind of action: loss and weights of the others stay those of one process, within 1e-12."""
    found = start(3, train, str(tmp_path), SMALL, prepared(SMALL_LEFT), {1: DEATHS[death]}, lost={1})
    (first,), (second,) = goes_on(found, lost={1}, samples=12)
    for recovery in (first, second):
        assert recovery.lost == ("host:1",)
        assert recovery.source == "replicas"
        step = 0 if death == "the first step" else KILLED_AT
        assert recovery.step_index == step + (death in ("commit done", "update"))
    # Three layers of 16 x 16 x (3 + 1) + 2 x 16 x 32 + 7 x 16 + 16 numbers (bias of `down`, `out`, `up`, norm), of 8
    # bytes each, as weight and two moments; and 4-byte step counts, one for each of 9 tensors.
    numbers = 16 * 48 + (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16) + 2 * 16
    moments = 3 if recovery.step_index else 1  # no step, no optimizer state yet
    assert first.received_bytes == 3 * (numbers * 8 * moments + (9 * 4 if moments == 3 else 0))
    assert second.received_bytes == 0


def deaf(trainer: Trainer) -> None:
    """The connection goes just as the result of the commit should arrive."""
    commit = trainer._commit

    def unheard(*arguments: Any) -> Any:
        result = commit(*arguments)
        if trainer.step_index == KILLED_AT:
            raise Disconnected("connection lost")
        return result

    trainer._commit = unheard  # type: ignore[method-assign]


def test_a_step_that_one_process_knows_committed_is_applied_by_all(tmp_path: Path) -> None:
    """Rank 2 has the result and applies it, rank 0 has not: it takes it from rank 2 and applies its own gradients."""
    kills = {0: deaf, 1: around(Trainer, "_commit", after=True)}
    found = start(3, train, str(tmp_path), SMALL, prepared(SMALL_LEFT), kills, lost={1})
    for (recovery,) in goes_on(found, lost={1}, samples=12):
        assert recovery.step_index == KILLED_AT + 1


def aborted(trainer: Trainer) -> None:
    """The commit is aborted while it waits: as with NCCL it may return like one that is done, with anything."""
    commit = trainer._commit

    def rubbish(*arguments: Any) -> Any:
        result = commit(*arguments)
        if trainer.step_index != KILLED_AT:
            return result
        RUN[0].rendezvous.aborted.set()
        return replace(result, loss=1e9, norm=1e9)

    trainer._commit = rubbish  # type: ignore[method-assign]


def test_what_an_aborted_call_returns_does_not_count(tmp_path: Path) -> None:
    """Rank 0 applies the step with what rank 2 says of it, not with what its own call left."""
    kills = {0: aborted, 1: around(Trainer, "_commit", after=True)}
    found = start(3, train, str(tmp_path), SMALL, prepared(SMALL_LEFT), kills, lost={1})
    (first,), _ = goes_on(found, lost={1}, samples=12)
    assert first.step_index == KILLED_AT + 1
    assert first.failure.startswith("rank 0 (pipeline 0 stage 0) in step 3: ")


def test_a_process_far_from_the_loss_goes_along(tmp_path: Path) -> None:
    """Five ranks of two pipelines, the middle one of the second dies; layers move between four, tied ones too."""
    plan = make_plan([([4, 6], 3), ([3, 3, 4], 3)], tied=True)
    left = make_plan([([6, 4], 4), ([4, 6], 2)], order=[1, 4, 2, 0], tied=True)
    found = start(5, train, str(tmp_path), plan, prepared(left), {3: at_action("1B0")}, True, lost={3})
    recoveries = goes_on(found, lost={3}, samples=12, tied=True)
    assert all(recovery.received_bytes > 0 for (recovery,) in recoveries[1:3])


def slow(trainer: Trainer) -> None:
    """Computes for 0.3 s per action."""
    trainer.on_action = lambda action: time.sleep(0.3 if trainer.step_index == KILLED_AT else 0)


def test_a_process_that_computes_is_told(tmp_path: Path) -> None:
    """Rank 2 talks to nobody before its last backward pass; the alarm stops it at its next action."""
    kills = {1: at_action("1F0"), 2: slow}
    for silent, reason in (
        (True, "other processes have given up the step"),
        (False, "the process of host:1 has ended"),
    ):
        (tmp_path / str(silent)).mkdir()
        work = partial(train, silent=silent)
        found = start(3, work, str(tmp_path / str(silent)), SMALL, prepared(SMALL_LEFT), kills, lost={1})
        _, (second,) = goes_on(found, lost={1}, samples=12)
        assert re.fullmatch(rf"rank 2 \(pipeline 1 stage 0\) at 0[FB]\d: {reason}", second.failure)


def test_several_losses(tmp_path: Path) -> None:
    """Two ranks of five at once, then a third while the rest of them makes its trainer under the new plan."""
    plan = make_plan([([4, 6], 2), ([3, 7], 2), ([10], 2)])
    two = make_plan([([4, 6], 4), ([10], 2)], order=[0, 3, 4])
    three = make_plan([([2, 8], 6)], order=[3, 4])
    begins = around(Trainer, "gradients", after=False)  # where neither hears of the other's end
    kills = {1: begins, 2: begins, 0: second_trainer}
    found = start(5, train, str(tmp_path), plan, prepared(two, three), kills, lost={0, 1, 2})
    for recoveries in goes_on(found, lost={0, 1, 2}, samples=12):
        assert [recovery.lost for recovery in recoveries] == [("host:0", "host:1", "host:2")]
        assert recoveries[0].step_index == KILLED_AT


def second_trainer(trainer: Trainer) -> None:
    """Dies when it makes another trainer, after it gave others its layers."""
    build = Trainer.__init__
    Trainer.__init__ = lambda self, *a, **k: (build(self, *a, **k), die())[0]  # type: ignore[method-assign]


def test_a_plan_may_leave_devices_out(tmp_path: Path) -> None:
    """Rank 2 gives rank 1 the layers that it lacks, and is done."""
    left = {frozenset({"host:1", "host:2"}): make_plan([([10], 6)], order=[1])}
    found = start(3, train, str(tmp_path), SMALL, left, {0: at_action("0F1")}, lost={0})
    assert found[2] == "idle"
    ((recovery,),) = goes_on([None, found[1], None], lost={0, 2}, samples=12)
    assert recovery.lost == ("host:0",)
    assert recovery.received_bytes > 0


def test_the_torch_engine_recovers_too(tmp_path: Path) -> None:
    """Killed in the middle of a schedule that `torch.distributed.pipelining` plays."""
    kills = {1: around(TorchStage, "backward_one_chunk", after=False)}
    work = partial(train, trainer={"engine": "torch"})
    found = start(3, work, str(tmp_path), SMALL, prepared(SMALL_LEFT), kills, lost={1})
    goes_on(found, lost={1}, samples=12)


@pytest.mark.parametrize("action", ["0F1", "0B1"])
def test_shards_of_a_tp_group_come_from_the_checkpoint(action: str, tmp_path: Path) -> None:
    """One of two tp groups of two loses a rank; its partner, which waits for it inside a layer, notices, and is left
    without work. The other group goes back to the checkpoint, as no process holds whole weights."""
    plan = make_plan([([6], 3), ([6], 3)], tp=2)
    left = {frozenset({"host:0", "host:1", "host:2"}): make_plan([([6], 6)], tp=2)}
    model = sharded_model()

    def work(rank: int, folder: str, kills: dict[int, Kill]) -> Any:
        losses: dict[int, float] = {}

        def make(new: Plan) -> Trainer:
            made = Trainer(new, model, optimizer=adamw, dtype=torch.float64, timeout_s=20.0)
            if new is plan and rank in kills:
                kills[rank](made)
            return made

        store = dist.FileStore(f"{folder}/store", -1)
        with Elastic(plan, make, batch(plan), replan=left, store=store, checkpoint=f"{folder}/saved", every=1) as run:
            run.run(STEPS, lambda trainer, result, taken: losses.update({trainer.step_index: result.loss}))
            return losses, [(each.source, each.step_index, each.failure) for each in run.recoveries]

    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    (expected, none), *_ = start(4, work, str(tmp_path / "whole"), {})
    assert none == [] and len(expected) == STEPS
    found = start(4, work, str(tmp_path / "killed"), {3: at_action(action)}, lost={3})
    for losses, recoveries in found[:2]:
        assert losses == pytest.approx(expected, rel=1e-10)
        ((source, step, failure),) = recoveries
        assert (source, step) == ("checkpoint", KILLED_AT)
        assert re.match(r"rank [01] \(pipeline 0 stage 0( tp rank 1)?\) ", failure)
    assert len(found[2][0]) == KILLED_AT and found[2][1] == []


def test_a_death_while_the_others_save(tmp_path: Path) -> None:
    """What was begun is cleared up by the next save; the run goes on with the state in memory."""
    work = partial(train, checkpoint=tmp_path / "saved", every=1)
    kills = {1: around(state, "_sums", after=False)}
    found = start(3, work, str(tmp_path), SMALL, prepared(SMALL_LEFT), kills, lost={1})
    for (recovery,) in goes_on(found, lost={1}, samples=12):
        assert (recovery.source, recovery.step_index) == ("replicas", KILLED_AT)
    assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == ["step-00000003", "step-00000004"]


# From the checkpoint


LINE = make_plan([([3, 3, 4], 6)])
LINE_LEFT = make_plan([([6, 4], 6)], order=[0, 2])


@pytest.mark.parametrize(
    ("every", "begins_at"), [(1, KILLED_AT), (STEPS, 0)], ids=["saved every step", "nothing saved yet"]
)
def test_layers_that_nobody_holds_come_from_the_checkpoint(every: int, begins_at: int, tmp_path: Path) -> None:
    """A single pipeline: all go back to the last checkpoint, or to the start, and repeat the steps since."""
    found = start(
        3,
        partial(train, checkpoint=tmp_path / "saved", every=every),
        str(tmp_path),
        LINE,
        prepared(LINE_LEFT),
        {1: at_action("1B0")},
        lost={1},
    )
    for (recovery,) in goes_on(found, lost={1}, samples=12):
        assert (recovery.source, recovery.step_index) == ("checkpoint", begins_at)
    steps = range(STEPS - 1, STEPS + 1) if every == 1 else [STEPS]
    assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == [f"step-{n:08d}" for n in steps]


def test_sharded_optimizer_state_comes_from_the_checkpoint(tmp_path: Path) -> None:
    """A part of it was on the lost process only."""
    found = start(
        3,
        partial(train, trainer={"shard_optimizer": True}, checkpoint=tmp_path / "saved", every=1),
        str(tmp_path),
        SMALL,
        prepared(SMALL_LEFT),
        {1: around(Trainer, "_commit", after=True)},
        lost={1},
    )
    for (recovery,) in goes_on(found, lost={1}, samples=12):
        assert (recovery.source, recovery.step_index) == ("checkpoint", KILLED_AT)


# What stops a run


def test_a_run_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    """Who noticed what, and what is missing: a plan, or a checkpoint."""
    for name, left, reason in (
        ("plan", {}, "no plan for the devices that are left: no plan was prepared for host:0, host:2"),
        (
            "device",
            {frozenset(LINE_LEFT.devices): make_plan([([6, 4], 6)])},
            "no plan for the devices that are left: the new plan uses host:1, where no process is left",
        ),
        (
            "state",
            prepared(LINE_LEFT),
            "the state of layers 3, 4, 5 is held by no process that is left, and there is no checkpoint folder to go"
            " back to",
        ),
    ):
        (tmp_path / name).mkdir()
        kills = {1: at_action("1B0")}
        first, _, third = start(3, train, str(tmp_path / name), LINE, left, kills, lost={1})
        noticed = r"(no answer from rank 1 \(pipeline 0 stage 1\): .*|the process of host:1 has ended)"
        assert re.fullmatch(rf"rank 0 \(pipeline 0 stage 0\) at 0[FB]\d: {noticed}; {re.escape(reason)}", first)
        assert re.match(r"rank 2 \(pipeline 0 stage 2\) at 2[FB]\d: ", third)
        assert third.endswith(reason)


def test_a_planner_that_finds_no_plan_ends_the_run(tmp_path: Path) -> None:
    """One process asks it, all say what it said."""

    def none(left: tuple[str, ...]) -> Plan:
        raise Infeasible(f"{len(left)} devices are too few", remedy="more devices")

    first, _, third = start(3, train, str(tmp_path), SMALL, none, {1: at_action("1F1")}, lost={1})
    reason = "; no plan for the devices that are left: 2 devices are too few; cheapest change: more devices"
    assert first.endswith(reason) and third.endswith(reason)


def test_who_comes_too_late_is_told() -> None:
    """Two of three answer the roll-call, and go on; the third learns that they did."""
    store, members = dist.HashStore(), ("a", "b", "c")
    here = [Rendezvous(store, 0, members, name, 0.0, 20.0) for name in "ab"]
    for each in here:  # both are there before either looks around
        each.store.set(f"alive {each.me}", "")
        each.store.set(f"ready {each.me}", json.dumps({"step": 3}))
    with ThreadPoolExecutor() as pool:
        news = list(pool.map(lambda each: each.call_roll({"step": 3}), here))
    assert news == [{"a": {"step": 3}, "b": {"step": 3}}] * 2
    late = Rendezvous(store, 0, members, "c", 0.0, 20.0)
    with pytest.raises(RankFailed, match="c: the others went on without this process, which came too late"):
        late.call_roll({"step": 3})
    for each in (*here, late):
        assert each.alarm.wait(5.0)
        each.close()


def test_without_a_way_to_plan_the_run_stops(tmp_path: Path) -> None:
    """One error on each process that names rank, stage and action."""

    def alone(rank: int) -> str:
        with (
            pytest.raises(RankFailed) as caught,
            Trainer(LINE, make_model(10), dtype=torch.float64, timeout_s=20.0) as trainer,
        ):
            if rank == 1:
                trainer.on_action = lambda action: os._exit(7) if str(action) == "1B1" else None
            inputs, targets = make_batch(12, 0)
            trainer.step(inputs, targets)
        return str(caught.value)

    first, _, third = start(3, alone, lost={1})
    assert re.match(r"rank 0 \(pipeline 0 stage 0\) at 0B1: no answer from rank 1 \(pipeline 0 stage 1\): ", first)
    assert re.match(r"rank 2 \(pipeline 0 stage 2\) at 2[FB]\d: no answer from rank 1 \(pipeline 0 stage 1\): ", third)


def test_an_error_of_the_model_stops_all(tmp_path: Path) -> None:
    """Nobody is lost, so nobody plans anew: the process raises its error, the others say who stopped."""

    def broken(kind: type[Exception]) -> Kill:
        def arm(trainer: Trainer) -> None:
            def fail(action: Any) -> None:
                if trainer.step_index == KILLED_AT:
                    raise kind("the data is bad")

            trainer.on_action = fail

        return arm

    def work(rank: int, kind: type[Exception], folder: str) -> Any:
        try:
            return train(rank, folder, SMALL, prepared(SMALL_LEFT), {1: broken(kind)})
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    for kind in (ValueError, RuntimeError):
        folder = tmp_path / kind.__name__
        folder.mkdir()
        first, second, third = start(3, work, kind, str(folder))
        assert second == f"{kind.__name__}: the data is bad"
        if kind is ValueError:
            assert first == third == "rank 1 (pipeline 0 stage 1) stopped: ValueError: the data is bad"
        else:
            assert "rank 0 (pipeline 0 stage 0) at 0B0" in first
            assert "rank 2 (pipeline 1 stage 0)" in third


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """After a recovery at a server: no thread and no group in the processes, no file."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def work(rank: int) -> Any:
        kills = {1: at_action("1F0")}
        out = train(rank, str(tmp_path), SMALL, prepared(SMALL_LEFT), kills, port=server.port)
        return dist.is_initialized(), threading.active_count(), isinstance(out, str)

    assert start(3, work, lost={1}) == [(False, 1, False), None, (False, 1, False)]
    assert list(tmp_path.iterdir()) == []


def test_who_is_known_to_be_lost_is_not_waited_for() -> None:
    """Two of three answer, the end of the third was reported: they go on at once, however long others may take."""
    store, members = dist.HashStore(), ("a", "b", "c")
    here = [Rendezvous(store, 7, members, name, 1000.0, 1000.0) for name in "ab"]
    report_loss(store, "of an earlier world")
    report_loss(store, "c")
    for each in here:
        assert each.alarm.wait(30.0)
        assert each.reason == "the process of c has ended"
    with ThreadPoolExecutor() as pool:
        news = list(pool.map(lambda each: each.call_roll({}), here))
    assert [sorted(each) for each in news] == [["a", "b"]] * 2
    for each in here:
        each.close()


def test_a_new_plan_may_take_longer_than_a_call(tmp_path: Path) -> None:
    """The search takes 6 s; a process that does not answer for 4 s counts as lost, but the planner says it is at it."""

    def slowly(left: tuple[str, ...]) -> Plan:
        time.sleep(6.0)
        return SMALL_LEFT

    work = partial(train, timeout_s=4.0)
    found = start(3, work, str(tmp_path), SMALL, slowly, {1: at_action("1F1")}, lost={1})
    for (recovery,) in goes_on(found, lost={1}, samples=12):
        assert recovery.plan_s > 4.0  # whole seconds longer than any one wait


def test_a_planner_that_takes_too_long_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error on all, and nobody waits for ever."""
    monkeypatch.setattr(recover, "PLAN_S", 0.5)
    release = threading.Event()

    def never(left: tuple[str, ...]) -> Plan:
        release.wait(50.0)
        raise ValueError("too late")

    first, _, third = start(3, train, str(tmp_path), SMALL, never, {1: at_action("1F1")}, lost={1})
    reason = "; no plan for the devices that are left: none was found within 0.5 s"
    assert first.endswith(reason) and third.endswith(reason)


def test_a_world_that_is_not_the_plans_is_refused(tmp_path: Path) -> None:
    """More processes than devices: the error of the trainer, on all of them."""

    def work(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            train(rank, str(tmp_path), SMALL_LEFT, prepared(), {})
        return str(caught.value)

    assert start(3, work) == ["3 processes run, the plan needs one for each of its 2 devices"] * 3
