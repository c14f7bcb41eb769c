"""The demo, and the benchmarks that run plans on emulated clusters, on their smallest cases."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from ranks import emulated_time

from benchmarks import aggregation, common, overhead, speedup
from benchmarks.aggregation import __main__ as run_aggregation
from benchmarks.overhead import __main__ as run_overhead
from benchmarks.speedup import __main__ as run_speedup
from benchmarks.speedup import baselines
from planner import Job, ModelProfile, plan
from planner.cli import demo as command
from runtime import demo
from runtime.emulate import Emulation, Group, Network, Run

NAMES = ("speedup", "aggregation", "overhead")
FAST = Group(device_type="fast", count=2, forward_s=0.002, backward_s=0.004)
SLOW = Group(device_type="slow", count=2, forward_s=0.006, backward_s=0.012)


def question(told: Emulation, samples: int, num_layers: int = 4) -> tuple[ModelProfile, Job]:
    batch = demo.counting(samples)
    return told.profile(demo.gpt(num_layers), batch(0)[0][:1]), told.job(samples, micro_batches=(1,))


# The model and the even plan


def test_gpt_learns_to_count() -> None:
    """A few steps halve the loss of the untrained model, ln 64 = 4.2 and more."""
    torch.manual_seed(0)
    model = demo.gpt(3, hidden=32, vocabulary=64)
    layers = torch.nn.Sequential(*(model.layer(l) for l in range(3)))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    batch, losses = demo.counting(16, vocabulary=64), []
    for step in range(30):
        inputs, targets = batch(step)
        loss = model.loss(layers(inputs), targets) / model.count_tokens(targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_batches_are_the_same_every_time() -> None:
    """By step, so that every rank can cut its part from its own copy; targets are the inputs one on."""
    inputs, targets = demo.counting(4, vocabulary=16)(3)
    again, _ = demo.counting(4, vocabulary=16)(3)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.max() < 16


def test_equal_cuts_differ_by_one_layer_at_most() -> None:
    """10 layers in 4: 3, 3, 2, 2."""
    assert demo.equal_cuts(10, 4) == [0, 3, 6, 8, 10]


def test_the_even_plan_is_even() -> None:
    """4 devices, room for 2 of 4 layers each: equal layers and micro-batches, the faster of 2 pipelines and 1.

    2 of fast | slow, 2 + 2 layers: 4 micro-batches at 36 ms on the slow stage. 1 of 1 + 1 + 1 + 1: 8 at 18 ms and a
    longer fill.
    """
    told = Emulation(
        groups=tuple(
            Group(
                device_type=group.device_type,
                count=2,
                forward_s=group.forward_s,
                backward_s=group.backward_s,
                memory_bytes=round(2.5 * demo.LAYER_BYTES),
            )
            for group in (FAST, SLOW)
        )
    )
    profile, job = question(told, 8)
    assert demo.shape(demo.even(profile, told.cluster, job)) == "2 x [fast 2 | slow 2] 4"


def test_no_even_plan_is_an_error() -> None:
    """Nothing fits; 7 samples cannot be shared equally, but one pipeline takes them."""
    profile, job = question(Emulation(groups=(FAST, SLOW)), 7)
    cluster = Emulation(groups=(FAST, SLOW)).cluster
    assert demo.shape(demo.even(profile, cluster, job)).count("[") == 1
    small = Emulation(groups=(Group(device_type="fast", count=2, forward_s=0.1, backward_s=0.2, memory_bytes=1000),))
    profile, job = question(small, 8)
    with pytest.raises(ValueError, match="no even plan of '4 layers' fits 'emulated' with 8 samples per step"):
        demo.even(profile, small.cluster, job)


# The demo


def test_demo_prints_both_plans_beside_their_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained for real, small: formula, simulation and measurement of both, the gain, and equal losses."""
    emulated_time(monkeypatch)
    said: list[str] = []
    told = Emulation(groups=(FAST, SLOW), name="small")
    evenly, planned = demo.train(told, num_layers=4, samples=8, steps=2, say=said.append)
    text = demo.report(evenly, planned)
    # 8 samples of 4 layers: even 2 each, 2 x 72 = 144 ms and some sums; planned 3 + 3 + 1 + 1, 72 ms
    assert said[0].startswith("even: 3 steps of about 0.2 s under 2 x [fast 4] 2, 2 x [slow 4] 2")
    assert evenly.run.step_s == pytest.approx(0.144) and planned.run.step_s == pytest.approx(0.072)
    assert planned.run.losses == pytest.approx(evenly.run.losses, rel=1e-5)
    assert "formula s" in text and "measured s" in text and f"{evenly.run.losses[-1]:.6f}" in text
    assert "As planned a step is 2.00 times as fast; " in text


def test_report_tells_equal_losses_from_near_ones() -> None:
    """Bit-equal losses are called equal; others say how far they are apart."""
    told = Emulation(groups=(FAST, SLOW))
    profile, job = question(told, 8)
    even = demo.even(profile, told.cluster, job)

    def trained(loss: float) -> demo.Trained:
        run = Run(steps_s=(0.3, 0.2, 0.25), losses=(loss,), traces=(), late_s=(0.0,) * 3)
        return demo.Trained(name="x", plan=even, run=run)

    assert "The losses are equal." in demo.report(trained(4.0), trained(4.0))
    assert "The losses agree within 3e-06" in demo.report(trained(4.0), trained(4.0 + 1.2e-5))
    assert " 0.250 " in demo.report(trained(4.0), trained(4.0))  # the median step


def test_links_of_no_rate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate below zero, or that is none; any rate without root."""
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    with pytest.raises(ValueError, match=r"--link: -5.0 is not a rate in Mbit/s"):
        options = parser.parse_args(["demo", "--link", "-5"])
        options.run(options)
    for rate in ("inf", "1e-9"):
        with pytest.raises(ValueError, match=rf"--link: {rate.replace('e-9', 'e-09')}, expected Mbit/s from 1 on"):
            options = parser.parse_args(["demo", "--link", rate])
            options.run(options)
    monkeypatch.setattr(Network, "refusal", staticmethod(lambda: "network namespaces need root"))
    with pytest.raises(ValueError, match="--link: links cannot be shaped here: network namespaces need root"):
        options = parser.parse_args(["demo", "--link", "5"])
        options.run(options)


# Benchmarks


@pytest.mark.parametrize("name", NAMES)
def test_readme_has_five_parts_and_room_for_the_result(name: str) -> None:
    """Question, Result, Environment, To Reproduce, Caveats; the printed tables have their place."""
    text = (common.ROOT / "benchmarks" / name / "README.md").read_text(encoding="utf-8")
    parts = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert parts == ["Question", "Result", "Environment", "To Reproduce", "Caveats"]
    assert text.index("## Result") < text.index(common.START) < text.index(common.END) < text.index("## Environment")
    assert f"python -m benchmarks.{name}" in text


def test_limits_are_shares_of_speed() -> None:
    """2 fast and 2 slow devices at 3:1 do 8 where the even plan does 4 x 1; 4:1 makes 2.5; equal ones gain nothing."""
    limits = {name: case.limit for name, case in speedup.CASES.items()}
    assert (limits["3to1"], limits["4to1_half"], limits["control"]) == (2.0, 2.5, 1.0)
    assert limits["three_kinds"] == pytest.approx(2.0)


@pytest.mark.parametrize("name", speedup.CASES)
def test_simulated_gains_are_in_order(name: str) -> None:
    """even >= layers only, data only >= planned; at 3:1 the plan comes near the limit, and nothing exceeds it."""
    case = speedup.CASES[name]
    told = case.emulation
    profile = told.profile(
        demo.gpt(case.num_layers, length=case.length), demo.counting(1, length=case.length)(0)[0], name=case.name
    )
    job = told.job(case.samples, micro_batches=(1,))
    even, *simpler, ours = (
        make(profile, told.cluster, job).predicted.simulated_s or 0.0
        for make in (baselines.even, baselines.layers, baselines.data, plan)
    )
    assert ours <= min(simpler) * (1 + 1e-9) and max(simpler) <= even * (1 + 1e-9)
    # a slow link costs the even plan more than its slow devices do
    assert even / ours <= case.limit * (1.0 if not told.shaped else 1.2) + 1e-9
    if name.startswith("3to1"):
        assert even / ours >= 0.95 * case.limit


def test_speedup_runs_and_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster of one fast and one slow device, 4:1: every plan run, the planned one fastest, all in results.json.

    5 samples of 4 layers, of 6 and 24 ms each: a step is the slow device's work, as nothing else takes time. Evenly
    5 x 2 layers of 24 ms; of 3 + 1 layers 5 of 24 ms; of 4 and 1 samples 4 of 24 ms.
    """
    emulated_time(monkeypatch)
    case = speedup.Case(name="tiny", speeds=(("fast", 1, 4.0), ("slow", 1, 1.0)), slow_s=0.008, num_layers=4, samples=5)
    monkeypatch.setitem(speedup.CASES, "tiny", case)
    assert run_speedup.main(["--cases", "tiny", "--runs", "1", "--out", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())["results"]}
    measured = {name: row["measured_s"] for name, row in rows.items()}
    assert measured == pytest.approx({"even": 0.240, "layers only": 0.120, "data only": 0.096, "planned": 0.096})
    assert f" {common.figure(rows['planned']['measured_s'], 4)} " in capsys.readouterr().out


def test_aggregation_variants_differ_in_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over loopback, one round: 4 blocks of 26 MiB, in chunks of 4 MiB, layers, tensors, one model."""
    emulated_time(monkeypatch)
    chosen = [each for each in aggregation.VARIANTS if each.overlap or each.granularity == "model" or each.one_by_one]
    rows = {row.variant: row for row in run_aggregation.measure("loopback", None, chosen, rounds=1)}
    calls = {name: row.num_calls for name, row in rows.items()}
    assert calls["block"] == 4 and calls["model"] == 1 and calls["layer"] == run_aggregation.NUM_LAYERS
    assert calls["block"] < calls["chunked block"] <= calls["layer"] < calls["tensor"]
    assert calls["tensor"] == calls["tensor, after backward, one by one"] == 8 * 12 + 2 + 3
    assert all(0 <= row.exposed_s < row.step_s for row in rows.values())


def test_overhead_compares_the_same_training() -> None:
    """Both loops reach the same loss after some steps."""
    case = overhead.Case(name="tiny", num_layers=3, hidden=16, length=8, micro_batch=2, num_micro_batches=2)
    row = run_overhead.measure(case, turns=2)
    assert row.apart < 1e-5
    assert len(row.plain_s) == len(row.runtime_s) == 2
