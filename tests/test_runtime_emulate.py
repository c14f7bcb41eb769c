"""Emulated clusters: layers take their stated times, links their stated rates, and runs what the simulation says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import make_batch, make_model
from torch import Tensor, nn

from planner import Plan
from planner.evaluate import evaluate
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.profile import ModelProfile
from runtime import emulate
from runtime.emulate import Emulation, Group, Network, pace, start
from runtime.model import Model, Stage, as_tuple

FORWARD_S, BACKWARD_S = 0.010, 0.020
REPEATS = 5
needs_network = pytest.mark.skipif(Network.refusal() is not None, reason=str(Network.refusal()))


def stated(num_layers: int) -> tuple[dict[int, float], dict[int, float]]:
    return dict.fromkeys(range(num_layers), FORWARD_S), dict.fromkeys(range(num_layers), BACKWARD_S)


def loss_of(stage: Stage, masked: bool = False) -> Tensor:
    inputs, _ = make_batch(2, 0, masked)
    return as_tuple(stage(*as_tuple(inputs)))[0].square().mean()


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Slow devices


def test_layers_take_their_stated_times() -> None:
    """4 layers of 10 and 20 ms: 40 ms forward, 80 ms backward; never less, and once in five tries hardly more."""
    stage = Stage(make_model(4), (0, 4))
    pace(stage, *stated(4))
    forward, backward = [], []
    for _ in range(REPEATS):
        began = time.perf_counter()
        loss = loss_of(stage)
        forward.append(time.perf_counter() - began)
        backward.append(seconds(loss.backward))
    assert min(forward) >= 0.040
    assert min(forward) == pytest.approx(0.040, rel=0.2)
    # the estimate of the real work, which is about 1 ms a layer, may be above what it takes this time
    assert min(backward) == pytest.approx(0.080, rel=0.2)


def test_gradients_are_complete_when_their_layer_is_over() -> None:
    """The hooks of layer l of 4 fire 20, 40, 60, 80 ms into the backward pass, last layer first."""
    stage = Stage(make_model(4), (0, 4))
    pace(stage, *stated(4))
    fired: dict[int, float] = {}
    for l in range(4):
        for _, parameter in stage.parameters_of(l):
            parameter.register_post_accumulate_grad_hook(lambda _, l=l: fired.__setitem__(l, time.perf_counter()))
    best = [1.0] * 4
    for _ in range(REPEATS):
        loss = loss_of(stage)
        began = time.perf_counter()
        loss.backward()
        best = [min(b, fired[l] - began) for l, b in zip(reversed(range(4)), best, strict=True)]
    assert best == pytest.approx([0.020, 0.040, 0.060, 0.080], abs=0.010)


def test_a_pause_before_a_backward_pass_is_not_made_up_for() -> None:
    """Two backward passes in a row, 50 ms apart: each takes its 40 ms."""
    stage = Stage(make_model(2), (0, 2))
    pace(stage, *stated(2))
    losses = [loss_of(stage), loss_of(stage)]
    losses[0].backward()
    time.sleep(0.050)
    assert seconds(losses[1].backward) >= 0.035


def test_a_recomputed_layer_takes_its_forward_time_again() -> None:
    """3 layers, one recomputed: 3 x 20 + 10 ms backward."""
    stage = Stage(make_model(3), (0, 3), recompute=(1,))
    pace(stage, *stated(3))
    assert min(seconds(loss_of(stage).backward) for _ in range(REPEATS)) == pytest.approx(0.070, abs=0.010)


def test_the_loss_is_a_part_of_the_last_layer() -> None:
    """2 layers and a loss that takes 5 ms: 20 ms forward and 40 ms backward with it, once that is known."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.005)
        return output.square().mean()

    stage = Stage(make_model(2), (0, 2))
    around = pace(stage, *stated(2)).around(loss)
    inputs, targets = make_batch(2, 0)
    forward, backward = [], []
    for _ in range(15):
        began = time.perf_counter()
        value = around(stage(inputs), targets)
        forward.append(time.perf_counter() - began)
        backward.append(seconds(value.backward))
    assert min(forward[10:]) == pytest.approx(0.020, abs=0.002)  # without: 25 ms
    assert min(backward) == pytest.approx(0.040, abs=0.006)


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


def test_work_that_takes_longer_than_stated_is_told() -> None:
    """No time for a layer: it is late by its real work; closed, it is not looked at any more."""
    stage = Stage(make_model(3), (0, 3))
    held = pace(stage, *(dict.fromkeys(range(3), 0.0) for _ in range(2)))
    loss_of(stage)
    assert held.late_s > 0
    held.late_s = 0.0
    slow = stage.layers["1"].register_forward_pre_hook(lambda *_: time.sleep(0.010))
    loss = loss_of(stage)
    assert held.late_s >= 0.010
    slow.remove()
    held.late_s = 0.0
    stage.layers["1"].up.weight.register_hook(lambda _: time.sleep(0.010))
    loss.backward()  # layer 0 comes after it
    assert held.late_s >= 0.010
    held.close()
    held.late_s = 0.0
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


def test_runs_take_what_the_simulation_says() -> None:
    """fast | slow at 3:1, 4 layers: cut 3 | 1 beats 2 | 2 as simulated; both near their prediction; losses agree."""
    told, model = emulation(), make_model(4)
    profile = told.profile(model, make_batch(1, 0)[0])
    runs = {}
    for split in (2, 3):
        plan = plan_of(told, profile, split, 4)
        runs[split] = told.run(plan, profile, model, lambda step: make_batch(4, step), steps=2)
        assert plan.predicted.simulated_s is not None
        # 2 | 2: F 30 + 30 of the first, then 4 x 90 on the slow stage, then B 20: about 0.39 s
        assert 0.97 <= min(runs[split].steps_s) / plan.predicted.simulated_s <= 1.3
    assert runs[3].step_s < runs[2].step_s
    assert runs[3].losses == pytest.approx(runs[2].losses, rel=1e-5)
    assert len(runs[3].losses) == 3 and len(runs[3].steps_s) == 2
    assert {place.stage for place, _ in runs[3].traces} == {0, 1}
    assert all(len(trace) >= 8 for _, trace in runs[3].traces)  # 4 F and 4 B, and what is traced beside them


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


def test_ranks_answer_or_say_why_not() -> None:
    """Values in order of rank; the traceback of a rank that fails; ranks that hang are killed at the limit."""
    assert start(3, add_up, 1) == [6.0, 6.0, 6.0]
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*ValueError: no such thing") as error:
        start(2, fail)
    assert "rank 0" not in str(error.value)
    with pytest.raises(RuntimeError, match="rank 0: no answer within 1 s"):
        start(1, hang, limit_s=1.0)


# Slow links


def send(rank: int, nbytes: int) -> float:
    """Seconds of a message from rank 0 to rank 1 and back, the least of three, halved."""
    value, best = torch.zeros(nbytes // 4), 1e9
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        (dist.send if rank == 0 else dist.recv)(value, 1 - rank)
        (dist.recv if rank == 0 else dist.send)(value, 1 - rank)
        best = min(best, (time.perf_counter() - began) / 2)
    return best


def left_behind() -> list[str]:
    spaces = Path("/var/run/netns")
    paths = [*(spaces.iterdir() if spaces.is_dir() else ()), *Path("/sys/class/net").iterdir()]
    return [path.name for path in paths if path.name.startswith(f"hpp{os.getpid()}")]


@needs_network
def test_links_are_as_fast_as_stated() -> None:
    """1 MB at 10 MB/s out of one port and 5 MB/s into the other: 200 ms; nothing is left behind."""
    with Network([10e6, 5e6]) as network:
        assert left_behind()
        found = start(2, send, 1_000_000, network=network, punctual=True)
    assert found[0] == pytest.approx(0.200, rel=0.15)  # rank 1 sends last, and only into its buffers
    assert not left_behind()


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
