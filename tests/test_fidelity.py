"""Frameworks as values, and the benchmark that holds predictions against published runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import factories
import pytest

from benchmarks import common, fidelity
from benchmarks.fidelity import CALIBRATED, HELD_OUT, LOW, Case, Outcome, others, outcome, sailor
from benchmarks.fidelity import __main__ as run_fidelity
from benchmarks.fidelity.fit import fit_memory
from benchmarks.fidelity.remarks import REMARKS
from planner import frameworks, schedule
from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.evaluate import evaluate
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.frameworks import DEEPSPEED, GIB, MIB, Framework
from planner.job import BytesPerParameter
from planner.schedule import Kind
from planner.simulate import StageWork, Workload, play

DATA = common.data_folder()
needs_data = pytest.mark.skipif(not (DATA / "sailor").is_dir(), reason=f"no measurements in {DATA} (set HPP_DATA)")


# The order of DeepSpeed.


def test_deepspeed_sends_an_activation_after_the_gradient_came() -> None:
    """Between two stages, 1F1B with each send that precedes a backward moved behind the receive of its gradient."""
    assert str(frameworks.deepspeed(2, 3)).splitlines() == [
        "0F0 0SEND_F0 0F1 0RECV_B0 0I0 0SEND_F1 0W0 0F2 0RECV_B1 0I1 0SEND_F2 0W1 0RECV_B2 0I2 0W2",
        "1RECV_F0 1F0 1I0 1W0 1SEND_B0 1RECV_F1 1F1 1I1 1W1 1SEND_B1 1RECV_F2 1F2 1I2 1W2 1SEND_B2",
    ]


def train_schedule(num_stages: int, s: int, m: int) -> list[str]:
    """What DeepSpeed's TrainSchedule yields: even and odd steps alternate, transfers precede the compute of a step."""

    def at(step: int) -> tuple[int, bool]:
        if step % 2 == s % 2:
            return step // 2 - s // 2, True
        half = step // 2 if step % 2 == 0 else (step - 1) // 2
        return half - num_stages + 1 + (s // 2 if step % 2 else (s - 1) // 2), False

    out, before = [], -1
    for step in range(2 * (m + num_stages - 1)):
        k, forward = at(step)
        if forward:
            out += [f"{s}SEND_B{before}"] if 0 <= before < m and s > 0 else []
            out += [f"{s}RECV_F{k}"] if 0 <= k < m and s > 0 else []
        else:
            out += [f"{s}RECV_B{k}"] if 0 <= k < m and s + 1 < num_stages else []
            out += [f"{s}SEND_F{before}"] if 0 <= before < m and s + 1 < num_stages else []
        if 0 <= k < m:
            out.append(f"{s}{'F' if forward else 'B'}{k}")
        before = k
    return out


@pytest.mark.parametrize(("num_stages", "m"), [(1, 3), (2, 1), (2, 5), (3, 2), (3, 7), (4, 4), (4, 9)])
def test_deepspeed_order_is_that_of_its_engine(num_stages: int, m: int) -> None:
    """Every stage lists what the engine's own step arithmetic yields, for deep and short pipelines."""
    lists = frameworks.deepspeed(num_stages, m)
    for s, actions in enumerate(lists.ranks):
        # I and W are one backward; the send between them stands before it in the engine's list. The engine's last
        # SEND_B comes in a step after the last backward, which it does not have for odd stages: add it at the end.
        mine = [str(action).replace("W", "B") for action in actions if action.kind is not Kind.I]
        engine = train_schedule(num_stages, s, m)
        missing = [f"{s}SEND_B{m - 1}"] if s > 0 and f"{s}SEND_B{m - 1}" not in engine else []
        assert mine == engine + missing


@pytest.mark.parametrize(("num_stages", "m"), [(1, 1), (2, 1), (3, 2), (4, 6)])
def test_deepspeed_order_is_sound(num_stages: int, m: int) -> None:
    """It is a valid list, holds what 1F1B holds, and does not deadlock even where every send waits."""
    lists = frameworks.deepspeed(num_stages, m)
    schedule.validate(lists, [min(m, num_stages - s) for s in range(num_stages)])
    schedule.check_deadlock([lists])


def test_a_late_send_costs_what_it_delays() -> None:
    """Two stages of F = B = 1 s, transfers of 0.5 s, two micro-batches: 8 s, where 1F1B takes 7."""
    # Stage 0: F0 0-1, F1 1-2. Stage 1 has activation 0 at 1.5: F0 1.5-2.5, B0 2.5-3.5; gradient 0 at 4.
    # DeepSpeed sends activation 1 at 4: F1 4.5-5.5, B1 5.5-6.5, gradient 1 at 7, B1 7-8.
    # 1F1B sends it at 2, so F1 3.5-4.5, B1 4.5-5.5, gradient 1 at 6, B1 6-7.
    works = (
        StageWork(forward_s=1, backward_s=1, weight_s=1, send_s=0.5),
        StageWork(forward_s=1, backward_s=1, weight_s=1),
    )
    late = play(Workload(pipelines=((frameworks.deepspeed(2, 2), works),)))
    plain = play(Workload(pipelines=((schedule.one_f_one_b(2, 2), works),)))
    assert (late.iteration_s, plain.iteration_s) == (8.0, 7.0)


# Frameworks.


def test_a_framework_makes_the_job() -> None:
    """State, context and sync are the framework's; a field that is given wins."""
    job = DEEPSPEED.job(global_batch=64, sync="overlapped")
    assert (job.global_batch, job.sync, job.state.total, job.tp_context_bytes) == (64, "overlapped", 24, 0)
    assert job.context_bytes == DEEPSPEED.context_bytes


def test_workspace_follows_activations_and_logits() -> None:
    """2.5 x 100 MB for a block; for the head at micro-batch 2, tp 2 its logits once: 8 MB x 2 / 2."""
    profile = factories.profile(ends=True, distinct=False, tps=(1, 2), micro_batches=(1, 2), logits_bytes=8_000_000)
    found = replace(DEEPSPEED, launch_share=1.0).profile(profile)
    cells = {(cell.kind, cell.device_type, cell.tp, cell.micro_batch): cell for cell in found.cells}
    assert cells["block", "fast", 1, 1].workspace_bytes == 250_000_000
    assert cells["head", "fast", 2, 2].workspace_bytes == 8_000_000
    assert found.kinds == profile.kinds
    assert "workspace: 2.5 x" in found.conditions.notes[-1]


def test_measured_workspace_stays() -> None:
    """A profile that knows its workspace keeps it."""
    profile = factories.profile(workspace_bytes=7)
    assert {cell.workspace_bytes for cell in DEEPSPEED.profile(profile).cells} == {7}


def test_only_layers_that_launches_decide_get_the_launch_share() -> None:
    """Times that grow by less than a quarter of the micro-batch's growth are scaled; the largest size never is."""
    profile = factories.profile(num_layers=1, distinct=False, speeds={"fast": 1.0}, micro_batches=(1, 2, 4))
    times = {1: (0.010, 0.010), 2: (0.012, 0.020), 4: (0.024, 0.040)}  # forward grows by 0.2, 1; backward by 1, 1
    cells = tuple(
        replace(cell, forward_s=times[cell.micro_batch][0], backward_s=times[cell.micro_batch][1])
        for cell in profile.cells
    )
    found = replace(DEEPSPEED, launch_share=0.5).profile(replace(profile, cells=cells))
    assert [(cell.forward_s, cell.backward_s) for cell in found.cells] == [(0.005, 0.010), times[2], times[4]]


def two_nodes(nics: int | None) -> Cluster:
    return Cluster(
        name="two nodes",
        device_types=(DeviceType(name="fast", memory_bytes=64 * GIB),),
        nodes=tuple(
            Node(name=f"n{i}", devices=("fast",) * 2, link=Link(bytes_per_s=1e12), nics=nics) for i in range(2)
        ),
        links=(NetworkLink(between=("fast", "fast"), link=Link(bytes_per_s=1e9)),),
    )


def on_two_nodes(*pipelines: list[str], tp: int, num_micro_batches: int = 1) -> Layout:
    """One stage per node named; four layers in all."""
    cut = {1: [(0, 4)], 2: [(0, 2), (2, 4)]}
    return Layout(
        pipelines=tuple(
            PipelineLayout(
                stages=tuple(
                    StageLayout(layers=layers, tp=tp, devices=tuple(f"{node}:{i}" for i in range(tp)))
                    for layers, node in zip(cut[len(nodes)], nodes, strict=True)
                ),
                micro_batch=1,
                num_micro_batches=num_micro_batches,
            )
            for nodes in pipelines
        )
    )


FOUR_LAYERS = factories.profile(num_layers=4, distinct=False, speeds={"fast": 1.0}, tps=(1, 2), parameters=10_000_000)


@pytest.mark.parametrize(("nics", "seconds"), [(1, 0.16), (2, 0.08), (None, 0.08)])
def test_rings_of_tp_ranks_share_a_port(nics: int | None, seconds: float) -> None:
    """Two replicas at tp 2, 40 M parameters: each rank reduces 80 MB at 1 GB/s, twice as long through one port."""
    # 2 (n - 1) steps of 40 MB: 0.08 s; two rings side by side on one port: 0.16 s.
    cluster = two_nodes(nics)
    plan = evaluate(FOUR_LAYERS, cluster, on_two_nodes(["n0"], ["n1"], tp=2), DEEPSPEED.job())
    assert math.isclose(DEEPSPEED.play(plan, cluster).exposed_sync_s, seconds, rel_tol=1e-9)


def test_hand_overs_take_their_share_of_the_network() -> None:
    """4 MB at 1 GB/s and a share of a half: 8 ms each way, so 16 ms more than over a free network."""
    cluster = two_nodes(None)
    layout = on_two_nodes(["n0", "n1"], tp=1)
    framework = replace(DEEPSPEED, hand_over_share=0.5, launch_share=1.0)
    plan = evaluate(FOUR_LAYERS, cluster, layout, framework.job())
    compute_s = sum(stage.forward_s + stage.backward_s for stage in plan.stages)
    assert math.isclose(framework.play(plan, cluster).iteration_s, compute_s + 0.016, rel_tol=1e-9)


def test_every_figure_of_a_framework_has_a_source() -> None:
    """Nothing that differs from the default goes without a word on where it comes from."""
    told = {"name", "precision", "sources"}
    for framework in frameworks.FRAMEWORKS.values():
        bare = Framework(
            name="", precision="mixed", state=BytesPerParameter(weights=0, gradients=0, optimizer=0), context_bytes=0
        )
        said = told | {name for name, _ in framework.sources}
        said |= {"sync_granularity", "sync_chunk_bytes", "sync_buffer_bytes"} if "sync" in said else set()
        own = {name for name in Framework.__slots__ if getattr(framework, name) != getattr(bare, name)}
        assert own <= said, framework.name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hand_over_share": 0.0}, "hand_over_share: 0.0 is not in (0, 1]"),
        ({"launch_share": 1.5}, "launch_share: 1.5 is not in (0, 1]"),
        ({"workspace_layers": -1.0}, "workspace_layers: -1.0 is negative"),
        ({"hand_over_devices": 0}, "hand_over_devices: 0 is less than 1"),
    ],
)
def test_impossible_figures_are_refused(fields: dict[str, float], words: str) -> None:
    """A share is above 0 and at most 1; bytes are not negative."""
    with pytest.raises(ValueError) as error:
        replace(DEEPSPEED, **fields)
    assert words in str(error.value)


def test_an_unknown_framework_is_told_from_a_known_one() -> None:
    """The message names the nearest."""
    assert frameworks.named("megatron") is frameworks.MEGATRON
    with pytest.raises(ValueError, match=r"'deepsped' is not among .*deepspeed"):
        frameworks.named("deepsped")


# The benchmark.


@pytest.fixture(scope="module")
def sailor_cases() -> list[Case]:
    return sailor.cases(DATA / "sailor")[0]


@pytest.fixture(scope="module")
def outcomes(sailor_cases: list[Case]) -> list[Outcome]:
    return [outcome(case) for case in sailor_cases]


@needs_data
def test_suspect_records_are_left_out_by_name() -> None:
    """Those that carry copied or impossible values, and no others."""
    left_out = sailor.cases(DATA / "sailor")[1]
    assert sorted(left_out) == ["clariden/GPT-NEO/N4/N4_D4", "clariden/OPT-350/N4/N4_D4", "mit/N3/N3_D1"]


@needs_data
def test_halves_are_disjoint_and_alike(sailor_cases: list[Case]) -> None:
    """Every run is in one half; each set of each half has single stages and pipelines, or as deep ones."""
    assert {case.half for case in sailor_cases} == {CALIBRATED, HELD_OUT}
    for group in {case.group for case in sailor_cases}:
        own = [case for case in sailor_cases if case.group == group]
        number = sum(case.half == CALIBRATED for case in own)
        assert number - sum(case.half == HELD_OUT for case in own) in (0, 1)
        depths = {
            half: max(len(case.layout.pipelines[0].stages) for case in own if case.half == half)
            for half in (CALIBRATED, HELD_OUT)
        }
        assert min(depths.values()) > 1


@needs_data
def test_held_out_runs_are_predicted(outcomes: list[Outcome]) -> None:
    """Time within 8 % (mixed) and 5 % (GH200) on average, memory within 15 %, and none of it more than 5 % low."""
    held_out = [each for each in outcomes if each.case.half == HELD_OUT]
    mixed = [abs(each.error) for each in held_out if each.case.group == sailor.MIXED]
    others_ = [abs(each.error) for each in held_out if each.case.group != sailor.MIXED]
    memory = [each.memory_error for each in held_out if each.memory_error is not None]
    assert sum(mixed) / len(mixed) <= 0.08
    assert sum(others_) / len(others_) <= 0.05
    assert sum(map(abs, memory)) / len(memory) <= 0.15
    assert sum(error < -LOW for error in memory) <= len(memory) / 20


@needs_data
def test_frameworks_bring_the_planning_form_nearer(outcomes: list[Outcome]) -> None:
    """In every set the played time is at least twice as near as the planning form of the same plan, or within 4 %."""
    for group in {each.case.group for each in outcomes}:
        own = [each for each in outcomes if each.case.group == group]
        played, planned = (
            sum(map(abs, e)) / len(own) for e in ([x.error for x in own], [x.planned_error for x in own])
        )
        assert played <= max(planned / 2, 0.04)


@needs_data
def test_published_memory_below_the_least_possible_is_named(sailor_cases: list[Case]) -> None:
    """Two figures are less than 16 bytes per parameter and the activations in flight; they count for time alone."""
    impossible = {case.name: case.impossible for case in sailor_cases if case.impossible}
    assert sorted(impossible) == ["clariden/GPT-NEO/N8/N8_D2", "mit/N2/N2_D2"]
    # Stage 1 of GPT-Neo: 4 x 676 MiB of weights, 3 x 8,389 MiB of activations.
    assert "27,870 MiB" in impossible["clariden/GPT-NEO/N8/N8_D2"]


@needs_data
def test_copied_links_are_left_out(sailor_cases: list[Case]) -> None:
    """RTX 2080 and Titan RTX nodes see each other at 2.8 GB/s, RTX 3090 nodes everyone at 0.11."""
    cluster = next(case.cluster for case in sailor_cases if case.name == "mit/N4/N4_D1")
    speeds = {
        pair: cluster.links_across(*pair, 1)[0].bandwidth(16e6) / 1e9
        for pair in (("RTX-2080", "Titan-RTX"), ("RTX-2080", "RTX-3090"))
    }
    assert speeds["RTX-2080", "Titan-RTX"] > 2
    assert speeds["RTX-2080", "RTX-3090"] < 0.12


@needs_data
def test_memory_constants_are_the_fit_to_the_calibrated_half(sailor_cases: list[Case]) -> None:
    """The framework's memory figures are what the grid finds, nothing else."""
    found = fit_memory([case for case in sailor_cases if case.half == CALIBRATED], DEEPSPEED).framework
    names = ("state", "context_bytes", "workspace_layers", "workspace_logits")
    assert [getattr(found, name) for name in names] == [getattr(DEEPSPEED, name) for name in names]


@needs_data
def test_time_constants_are_the_best_of_their_neighbours(sailor_cases: list[Case]) -> None:
    """A step of the grid either way is no better on the calibrated half."""
    cases = [case for case in sailor_cases if case.half == CALIBRATED]

    def error(moved: list[Case], **fields: float) -> float:
        framework = replace(DEEPSPEED, **fields)
        return sum(abs(outcome(case, framework=framework).error) for case in moved)

    deep = [case for case in cases if len(case.layout.pipelines[0].stages) > 1]
    small = [case for case in cases if case.layout.pipelines[0].micro_batch == 1]
    assert min(error(deep, hand_over_share=share) for share in (0.7, 0.8)) >= error(deep)
    assert min(error(small, launch_share=share) for share in (0.85, 0.95)) >= error(small)


@needs_data
def test_remarks_are_of_runs_that_exist(sailor_cases: list[Case]) -> None:
    """Every run of Sailor has one, and none is left over."""
    known = {case.name for case in sailor_cases}
    more, left_out = others.dlperf(DATA / "dlperf_gpt" / "gpt_v100_flat.csv")
    assert known <= set(REMARKS)
    assert set(REMARKS) <= known | {case.name for case in more} | {"gpt_350M_mbs8_recomp"}
    assert all("across nodes" in why for why in left_out.values())
    assert len(left_out) == 2


@needs_data
def test_aceso_is_read_as_its_authors_read_it() -> None:
    """Our time of the plan that is known is their own prediction, to 0.1 %."""
    own = next(each for each in others.published(DATA / "aceso") if each.model == "350M")
    found = outcome(others.aceso_350m(DATA / "aceso"))
    assert math.isclose(found.played_s, own.predicted_s, rel_tol=1e-3)
    assert found.memory_error is not None
    assert found.memory_error > 0


@needs_data
def test_it_runs_and_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs: a table, a picture in two formats, and results with the error to be recomputed from."""
    names = ["mit/N6/N6_D2", "DP_PP_8x1x4_512_1536x16"]
    assert run_fidelity.main(["--out", str(tmp_path), "--cases", *names]) == 0
    printed = capsys.readouterr().out
    assert "| mit/N6/N6_D2 " in printed
    assert "suspect" not in printed.split("Left out")[0]
    written = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [each["run"] for each in written["results"]] == names
    assert written["results"][0]["measured_s"] == 59.45533
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "fidelity.png", "fidelity.svg"}


def test_missing_data_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the published runs it ends with where they were expected, not with a traceback."""
    monkeypatch.setenv("HPP_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"no published runs in .*HPP_DATA"):
        run_fidelity.main(["--out", str(tmp_path)])


def test_halves_alternate_by_depth_and_name() -> None:
    """Single stages first; a, c calibrated, b held out; then the pipeline of two."""
    cluster = two_nodes(None)

    def case(name: str, nodes: list[str]) -> Case:
        return Case(
            group="g",
            name=name,
            profile=FOUR_LAYERS,
            cluster=cluster,
            layout=on_two_nodes(nodes, tp=1),
            framework=DEEPSPEED,
            measured_s=1.0,
            measured_bytes=3 * MIB,
        )

    found = fidelity.halves([case("deep", ["n0", "n1"]), case("b", ["n0"]), case("a", ["n0"])])
    assert [(each.name, each.half) for each in found] == [("a", CALIBRATED), ("b", HELD_OUT), ("deep", CALIBRATED)]
    short = outcome(found[0])
    assert short.memory_error == short.peak_bytes / (3 * MIB) - 1
    assert short.stages_bytes == (short.peak_bytes,)
