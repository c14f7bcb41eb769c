"""Emulated clusters: layers take their stated times, links their stated rates, and runs what the simulation says."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Clock, emulated_time, make_batch, make_model
from torch import Tensor, nn

from planner import Plan
from planner.evaluate import evaluate
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.profile import ModelProfile
from planner.schedule import Kind
from runtime import emulate
from runtime.emulate import Emulation, Group, Network, pace, start
from runtime.layout import Layout as Ranks
from runtime.model import Model, Stage, as_tuple
from runtime.trainer import adamw

FORWARD_S, BACKWARD_S = 0.010, 0.020
needs_network = pytest.mark.skipif(Network.refusal() is not None, reason=str(Network.refusal()))


def stated(num_layers: int) -> tuple[dict[int, float], dict[int, float]]:
    return dict.fromkeys(range(num_layers), FORWARD_S), dict.fromkeys(range(num_layers), BACKWARD_S)


def loss_of(stage: Stage, masked: bool = False) -> Tensor:
    inputs, _ = make_batch(2, 0, masked)
    return as_tuple(stage(*as_tuple(inputs)))[0].square().mean()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time passes while layers sleep and while they work by `works`, and at no other time."""
    return emulated_time(monkeypatch)


def works(stage: Stage, clock: Clock, forward_s: float, backward_s: float) -> None:
    """Let the real work of every layer take some time, backward before its gradients are complete."""
    for layer in stage.layers.values():
        layer.register_forward_pre_hook(lambda *_: clock.sleep(forward_s))
        next(layer.parameters()).register_hook(lambda _: clock.sleep(backward_s))


def passes(stage: Stage, clock: Clock) -> tuple[float, float]:
    """Seconds of a forward pass, and of the backward pass after it."""
    began = clock.now
    loss = loss_of(stage)
    between = clock.now
    loss.backward()
    return between - began, clock.now - between


# Slow devices


def test_layers_take_their_stated_times(clock: Clock) -> None:
    """4 layers of 10 and 20 ms that work for 3 and 5 of them: 40 ms forward, 80 ms backward, once the work is known."""
    stage = Stage(make_model(4), (0, 4))
    pace(stage, *stated(4))
    assert passes(stage, clock) == pytest.approx((0.040, 0.080))
    works(stage, clock, 0.003, 0.005)
    # The next pass knows 0 ms of work backward: layer 0 sleeps until 80 ms and works then. Then 30 % of what is new
    # counts, at each pass again: 0.3 x 5 = 1.5 ms of work are known, 0.7 x 1.5 + 1.5 = 2.55 ms, ...
    known = [0.0, 0.0015, 0.00255]
    assert [passes(stage, clock) for _ in known] == [pytest.approx((0.040, 0.085 - each)) for each in known]
    for _ in range(40):
        last = passes(stage, clock)
    assert last == pytest.approx((0.040, 0.080))


def test_gradients_are_complete_when_their_layer_is_over(clock: Clock) -> None:
    """The hooks of layer l of 4 fire 20, 40, 60, 80 ms into the backward pass, last layer first."""
    stage = Stage(make_model(4), (0, 4))
    works(stage, clock, 0.003, 0.005)
    pace(stage, *stated(4))
    fired: dict[int, float] = {}
    for l in range(4):
        for _, parameter in stage.parameters_of(l):
            parameter.register_post_accumulate_grad_hook(lambda _, l=l: fired.__setitem__(l, clock.now))
    for late_s in (0.005, 0.0):  # in the first pass the work is not known, and comes on top
        loss = loss_of(stage)
        began = clock.now
        loss.backward()
        expected = [0.020 + late_s, 0.040 + late_s, 0.060 + late_s, 0.080 + late_s]
        assert [fired[l] - began for l in (3, 2, 1, 0)] == pytest.approx(expected)


def test_what_one_layer_oversleeps_the_next_makes_up_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sleep lasts 1 ms longer: a pass is 1 ms late at its end, not 1 ms per layer; and says so."""
    stage = Stage(make_model(4), (0, 4))
    held = pace(stage, *stated(4))
    sleep = clock.sleep
    monkeypatch.setattr(clock, "sleep", lambda seconds: sleep(seconds + 0.001))
    assert passes(stage, clock) == pytest.approx((0.041, 0.081))
    assert held.late_s == pytest.approx(0.001)


def test_a_pause_before_a_backward_pass_is_not_made_up_for(clock: Clock) -> None:
    """Two backward passes in a row, 50 ms apart: each takes its 40 ms, whether it begins at the loss or not."""
    for with_loss in (False, True):
        stage = Stage(make_model(2), (0, 2))
        held = pace(stage, *stated(2))
        losses = [loss_of(stage), loss_of(stage)]
        if with_loss:
            around = held.around(lambda output, _: output.square().mean())
            losses = [around(stage(make_batch(2, 0)[0]), None) for _ in range(2)]
        losses[0].backward()
        clock.sleep(0.050)
        began = clock.now
        losses[1].backward()
        assert clock.now - began == pytest.approx(0.040)


def test_a_recomputed_layer_takes_its_forward_time_again(clock: Clock) -> None:
    """3 layers, one recomputed: 3 x 20 + 10 ms backward; its gradients are complete 20 + 10 + 20 ms into it."""
    stage = Stage(make_model(3), (0, 3), recompute=(1,))
    pace(stage, *stated(3))
    works(stage, clock, 0.003, 0.005)
    done: list[float] = []
    for _, parameter in stage.parameters_of(1):
        parameter.register_post_accumulate_grad_hook(lambda _: done.append(clock.now))
    for late_s in (0.005, 0.0):  # in the first pass the work is not known, and comes on top
        loss = loss_of(stage)
        began = clock.now
        loss.backward()
        assert clock.now - began == pytest.approx(0.070 + late_s)
        assert done[-1] - began == pytest.approx(0.050 + late_s + (0.003 if late_s else 0.0))


def test_the_loss_is_a_part_of_the_last_layer(clock: Clock) -> None:
    """2 layers and a loss that takes 5 ms: 20 ms forward and 40 ms backward with it, once that is known."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        clock.sleep(0.005)
        return output.square().mean()

    stage = Stage(make_model(2), (0, 2))
    around = pace(stage, *stated(2)).around(loss)
    inputs, targets = make_batch(2, 0)
    found, entered = [], []
    stage.layers["1"].register_forward_pre_hook(lambda *_: entered.append(clock.now))
    for _ in range(40):
        began = clock.now
        value = around(stage(inputs), targets)
        between = clock.now
        value.backward()
        found.append((between - began, clock.now - between))
    # the first pass knows nothing of the loss, the second 0.3 x 5 = 1.5 ms of it
    assert found[:2] == [pytest.approx((0.025, 0.040)), pytest.approx((0.0235, 0.040))]
    assert found[-1] == pytest.approx((0.020, 0.040), abs=1e-5)
    assert entered[-1] - began == pytest.approx(0.010)  # nothing is taken from the layer before


def test_layers_really_sleep() -> None:
    """4 layers of 25 ms: no less goes by on the clock of the machine, and little of it is processor time."""
    stage = Stage(make_model(4), (0, 4))
    pace(stage, dict.fromkeys(range(4), 0.025), dict.fromkeys(range(4), 0.0))
    began, began_cpu = time.perf_counter(), time.thread_time()
    loss_of(stage)
    assert time.perf_counter() - began >= 0.100
    assert time.thread_time() - began_cpu < 0.050


@pytest.mark.parametrize("masked", [False, True], ids=["", "several tensors"])
def test_pacing_changes_no_gradient(masked: bool) -> None:
    """The same bits with and without."""
    found = []
    for paced in (False, True):
        stage = Stage(make_model(4, masked=masked), (0, 4), recompute=(1,), dtype=torch.float64)
        if paced:
            pace(stage, *(dict.fromkeys(range(4), 0.001) for _ in range(2)))
        loss_of(stage, masked).backward()
        found.append([parameter.grad for parameter in stage.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_work_that_takes_longer_than_stated_is_told(clock: Clock) -> None:
    """No time for a layer: it is late by its real work; closed, it is not looked at any more."""
    stage = Stage(make_model(3), (0, 3))
    held = pace(stage, *(dict.fromkeys(range(3), 0.0) for _ in range(2)))
    loss_of(stage)
    assert held.late_s == 0
    slow = stage.layers["1"].register_forward_pre_hook(lambda *_: clock.sleep(0.010))
    loss = loss_of(stage)
    assert held.late_s == pytest.approx(0.010)
    slow.remove()
    held.late_s = 0.0
    stage.layers["1"].up.weight.register_hook(lambda _: clock.sleep(0.020))
    loss.backward()  # layer 0 comes after it
    assert held.late_s == pytest.approx(0.020)
    held.close()
    held.late_s = 0.0
    stage.layers["2"].register_forward_pre_hook(lambda *_: clock.sleep(0.010))
    loss_of(stage)
    assert held.late_s == 0


# What the planner is told


def emulation(**groups: Any) -> Emulation:
    return Emulation(
        groups=(
            Group(device_type="fast", count=1, forward_s=0.005, backward_s=0.010, **groups),
            Group(device_type="slow", count=1, forward_s=0.015, backward_s=0.030, **groups),
        )
    )


def test_profile_states_times_and_measures_sizes() -> None:
    """Costs scale a group's times; parameters and outputs are those of the layers that are built."""
    model = make_model(4)
    told = Emulation(groups=emulation().groups, costs=(("head", 0.5),))
    profile = told.profile(model, make_batch(1, 0)[0], micro_batches=(1, 2))
    assert profile.layers == ("embedding", "layer", "layer", "head")
    slow = profile.layer_costs("slow", 1, 2)
    assert slow is not None
    assert list(slow.forward_s) == [0.030, 0.030, 0.030, 0.015]
    assert list(slow.backward_s) == [0.060, 0.060, 0.060, 0.030]
    kind = profile.kind_of(1)
    assert kind.parameters == sum(p.numel() for p in model.layer(1).parameters())
    assert kind.output_bytes == 8 * 16 * 4  # tokens x hidden x bytes


def test_a_cost_of_no_layer_is_refused() -> None:
    """The kinds there are get named."""
    told = Emulation(groups=emulation().groups, costs=(("block", 0.5),))
    with pytest.raises(ValueError, match="costs: 'block' is not among the model's kinds of layers: embedding, head"):
        told.profile(make_model(4), make_batch(1, 0)[0])


def test_layers_of_one_class_and_two_sizes_are_two_kinds() -> None:
    """A wide layer among narrow ones is told apart."""
    model = Model(num_layers=3, layer=lambda l: nn.Linear(4, 4) if l != 1 else nn.Linear(4, 4, bias=False))
    profile = emulation().profile(model, torch.zeros(1, 4))
    assert profile.layers == ("linear", "linear-1", "linear")


def test_links_are_as_fast_as_the_slower_port() -> None:
    """100 and 20 MB/s: 20 MB/s between them, their own within."""
    told = Emulation(
        groups=(
            Group(device_type="fast", count=2, forward_s=0.1, backward_s=0.1, bytes_per_s=1e8),
            Group(device_type="slow", count=1, forward_s=0.1, backward_s=0.1, bytes_per_s=2e7),
        )
    )
    a, b, c = told.cluster.devices
    assert told.cluster.link(a, b).bytes_per_s == 1e8
    assert told.cluster.link(a, c).bytes_per_s == 2e7
    assert told.shaped and not emulation().shaped


# Runs


def plan_of(told: Emulation, profile: ModelProfile, split: int, m: int) -> Plan:
    """One pipeline, fast | slow, cut at layer `split`."""
    stages = (StageLayout(layers=(0, split)), StageLayout(layers=(split, profile.num_layers)))
    shape = PipelineLayout(stages=stages, micro_batch=1, num_micro_batches=m)
    return evaluate(profile, told.cluster, Layout(pipelines=(shape,)), told.job(m))


@pytest.mark.parametrize(("split", "slow_s"), [(2, 4 * 0.090), (3, 4 * 0.045)], ids=["2 | 2", "3 | 1"])
def test_a_step_takes_the_stated_times_of_its_actions(clock: Clock, split: int, slow_s: float) -> None:
    """fast | slow at 3:1, 4 layers, 4 micro-batches: a step lasts as long as the slow stage computes in it.

    With no time in between, that is: a rank's clock stands still while it waits. 2 layers of 15 + 30 ms take 90 ms per
    micro-batch, one takes 45 ms, as three of 5 + 10 ms do on the fast device.
    """
    told, model = emulation(), make_model(4)
    profile = told.profile(model, make_batch(1, 0)[0])
    plan = plan_of(told, profile, split, 4)
    run = told.run(plan, profile, model, lambda step: make_batch(4, step), steps=2)
    assert run.steps_s == pytest.approx((slow_s, slow_s)) and run.step_s == pytest.approx(slow_s)
    assert run.late_s == pytest.approx((0.0, 0.0), abs=1e-9)
    assert plan.predicted.simulated_s is not None
    # beside the slow stage's work the simulation has fill and drain, and hand-overs: F and B of the first stage
    first_s = split * 0.015
    assert slow_s + first_s < plan.predicted.simulated_s < slow_s + first_s + 0.010
    assert {place.stage for place, _ in run.traces} == {0, 1}
    for _, trace in run.traces:
        assert sorted(str(each.action.kind) for each in trace if each.action.kind in (Kind.F, Kind.B)) == [
            *["B"] * 4,
            *["F"] * 4,
        ]
    expected = reference_losses(model, 4, steps=3)
    assert run.losses == pytest.approx(expected, rel=1e-5)


def reference_losses(model: Model, samples: int, steps: int) -> list[float]:
    """Mean losses of the whole model on one process, trained as a `Trainer` does by default."""
    stage = Stage(model, (0, model.num_layers))
    optimizer, found = adamw(list(stage.parameters())), []
    for step in range(steps):
        inputs, targets = make_batch(samples, step)
        loss = model.loss(stage(inputs), targets) / model.count_tokens(targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_step_lasts_from_the_first_start_to_the_last_end() -> None:
    """Of all ranks, on one clock; the first step is not counted; lateness is that of the latest rank."""
    told, model = emulation(), make_model(4)
    plan = plan_of(told, told.profile(model, make_batch(1, 0)[0]), 2, 4)
    first = [emulate._Row(0.0, 9.0, 4.0, 9.0), emulate._Row(10.0, 11.0, 3.0, 0.1), emulate._Row(20.0, 20.5, 2.0, 0.0)]
    second = [emulate._Row(0.0, 8.0, 4.0, 8.0), emulate._Row(10.2, 11.5, 3.0, 0.0), emulate._Row(19.9, 20.4, 2.0, 0.2)]
    run = emulate._as_run(Ranks(plan), [(first, ()), (second, ())])
    assert run.steps_s == pytest.approx((1.5, 0.6)) and run.late_s == (0.1, 0.2)
    assert run.step_s == pytest.approx(1.05) and run.losses == (4.0, 3.0, 2.0)


def test_times_that_are_not_stated_are_refused() -> None:
    """A profile for micro-batches of 2 says nothing of micro-batches of 1."""
    told, model = emulation(), make_model(4)
    profile = told.profile(model, make_batch(1, 0)[0])
    other = told.profile(model, make_batch(1, 0)[0], micro_batches=(2,))
    with pytest.raises(RuntimeError, match=r"states no times of (fast|slow) for micro-batches of 1"):
        told.run(plan_of(told, profile, 2, 2), other, model, lambda step: make_batch(2, step), steps=1)


# Ranks


def add_up(rank: int, offset: int) -> float:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return float(value)


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("no such thing")


def hang(rank: int) -> None:
    time.sleep(60.0)


def vanish(rank: int) -> Tensor:
    """Rank 1 and 2 end without a word, by an exit and by a signal."""
    if rank == 1:
        os._exit(7)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.full((1 << 18,), float(rank))  # more than a pipe holds at once


def test_ranks_answer_or_say_why_not() -> None:
    """Values in order of rank; the traceback of a rank that fails; ranks that hang are killed at the limit."""
    assert start(3, add_up, 1) == [6.0, 6.0, 6.0]
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*ValueError: no such thing") as error:
        start(2, fail)
    assert "rank 0" not in str(error.value)
    with pytest.raises(RuntimeError, match="rank 0: no answer within 1 s"):
        start(1, hang, limit_s=1.0)
    assert not multiprocessing.active_children()


def test_a_rank_that_ends_without_an_answer_has_failed() -> None:
    """Unless it is to be lost: then an answer, or an error, is a failure."""
    with pytest.raises(RuntimeError) as error:
        start(3, vanish)
    assert str(error.value) == (
        "rank 1: ended without an answer, exit code 7\nrank 2: ended without an answer, killed by SIGKILL"
    )
    with pytest.raises(RuntimeError, match=r"^rank 2: ended without an answer, killed by SIGKILL$"):
        start(3, vanish, lost={1})
    first, *others = start(3, vanish, lost={1, 2})
    assert torch.equal(first, torch.zeros(1 << 18)) and others == [None, None]
    with pytest.raises(RuntimeError, match=r"^rank 0: answered, but was to be lost$"):
        start(3, vanish, lost={0, 1, 2})
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1: Traceback.*ValueError: no such thing"):
        start(2, fail, lost={1})


# Slow links


def send(rank: int, nbytes: int) -> float:
    """Seconds until a message from rank 0 has arrived at rank 1, and its answer at rank 0."""
    value, answer = torch.zeros(nbytes // 4), torch.zeros(1)
    dist.barrier()
    began = time.perf_counter()
    (dist.send if rank == 0 else dist.recv)(value, 1 - rank)
    (dist.recv if rank == 0 else dist.send)(answer, 1 - rank)
    return time.perf_counter() - began


def shapers(network: Network, rank: int) -> list[dict[str, Any]]:
    """What shapes a rank's port: as it sends, in its namespace, and as it receives."""
    found = []
    for where, port in ((("-n", network._space(rank)), "e0"), ((), network._port(rank))):
        done = subprocess.run(["tc", "-s", "-j", *where, "qdisc", "show", "dev", port], capture_output=True, check=True)
        (shaper,) = json.loads(done.stdout)
        found.append(shaper)
    return found


def left_behind() -> list[str]:
    spaces = Path("/var/run/netns")
    paths = [*(spaces.iterdir() if spaces.is_dir() else ()), *Path("/sys/class/net").iterdir()]
    return [path.name for path in paths if path.name.startswith(f"hpp{os.getpid()}")]


@needs_network
def test_links_are_shaped_as_stated() -> None:
    """1 MB through ports of 10 and 5 MB/s: no faster than the slower, through the shapers of both; nothing is left."""
    nbytes, rates = 1_000_000, [10e6, 5e6, None]
    with Network(rates) as network:
        assert left_behind()
        took = start(3, send_first, nbytes, network=network, punctual=True)
        for rank, rate in enumerate(rates[:2]):
            for shaper in shapers(network, rank):
                assert shaper["kind"] == "tbf"
                # bytes of whole frames, of which 1448 of 1514 are data; tc rounds
                assert shaper["options"]["rate"] == pytest.approx(rate * 1514 / 1448, rel=1e-3)
                assert shaper["options"]["burst"] == pytest.approx(16 << 10, rel=1e-3)
        out, into = shapers(network, 0)[0], shapers(network, 1)[1]
        assert out["bytes"] >= nbytes and into["bytes"] >= nbytes
        assert all(shaper["kind"] != "tbf" for shaper in shapers(network, 2))
    assert took[0] >= 0.9 * nbytes / 5e6  # a burst of 16 KiB passes either port at once
    assert not left_behind()


def send_first(rank: int, nbytes: int) -> float:
    if rank == 2:
        dist.barrier()
        return 0.0
    return send(rank, nbytes)


@needs_network
def test_an_error_leaves_no_namespace() -> None:
    """Neither one in the body nor a rate that tc refuses: less than a bit a second."""
    with pytest.raises(KeyError), Network([None, None]):
        raise KeyError
    with pytest.raises(OSError, match="tc"), Network([0.01]):
        pass
    assert not left_behind()


@needs_network
def test_what_a_killed_process_left_is_swept_up() -> None:
    """Namespaces named after a process that is gone go with the next network."""
    gone = os.fork()
    if gone == 0:
        Network([None]).__enter__()
        os._exit(1)
    os.waitpid(gone, 0)
    space = Path(f"/var/run/netns/hpp{gone}n0")
    assert space.exists()
    with Network([None]):
        assert not space.exists()


def test_without_root_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by `refusal`, and by the error of who tries all the same."""
    Network.refusal.cache_clear()
    monkeypatch.setattr(emulate.os, "geteuid", lambda: 1000)
    try:
        assert Network.refusal() == "network namespaces need root"
        with pytest.raises(ValueError, match="links cannot be shaped here: network namespaces need root"):
            Network([None])
    finally:
        Network.refusal.cache_clear()
