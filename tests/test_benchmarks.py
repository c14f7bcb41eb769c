"""The benchmarks on their smallest cases: they run, and write what they print under the names they promise."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import factories
import numpy as np
import pytest

from benchmarks import common, peers, plan_quality, search_time
from benchmarks.peers import __main__ as run_peers
from benchmarks.plan_quality import __main__ as run_plan_quality
from benchmarks.plan_quality import baselines
from benchmarks.search_time import __main__ as run_search_time
from benchmarks.search_time import generate
from planner import Job, Plan, plan
from planner.profile import sanity
from planner.question import ask

NAMES = ("peers", "search_time", "plan_quality", "fidelity", "fidelity_formula", "estimate")
needs_data = pytest.mark.skipif(
    not (common.data_folder() / "sailor").is_dir(), reason=f"no measurements in {common.data_folder()} (set HPP_DATA)"
)


def results(folder: Path) -> dict[str, object]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


# What they share.


def test_table_is_markdown_with_numbers_to_the_right() -> None:
    """A table has a header, a rule and a row per entry, padded to equal width."""
    lines = common.table([{"case": "a", "s": "1.5"}, {"case": "longer", "s": "12.25"}]).splitlines()
    assert lines[1] == "| ------ | ----: |"
    assert lines[2] == "| a      |   1.5 |"
    assert len({len(line) for line in lines}) == 1


def test_figures_keep_their_significant_digits() -> None:
    """Three digits are three digits, whatever the size; no exponent, and no value is a dash."""
    assert [common.figure(x) for x in (0.1234, 1.234, 12.34, 1234.0, None)] == ["0.123", "1.23", "12.3", "1234", "-"]


def test_timed_takes_the_median() -> None:
    """The value is the last one, the seconds are those of the middle run."""
    calls = iter(range(3))
    measured = common.timed(lambda: next(calls), runs=3)
    assert measured.value == 2
    assert 0 <= measured.wall_s < 1


@pytest.mark.parametrize("name", NAMES)
def test_readme_has_five_parts_and_room_for_the_result(name: str) -> None:
    """Question, Result, Environment, To Reproduce, Caveats; the printed tables have their place."""
    text = (common.ROOT / "benchmarks" / name / "README.md").read_text(encoding="utf-8")
    parts = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert parts == ["Question", "Result", "Environment", "To Reproduce", "Caveats"]
    assert text.index("## Result") < text.index(common.START) < text.index(common.END) < text.index("## Environment")
    assert f"python -m benchmarks.{name}" in text


def test_unknown_cases_are_refused() -> None:
    """A misspelt case ends the run and names those there are."""
    with pytest.raises(SystemExit, match="no case opt-350m_9x9; there are opt-350m_8x8"):
        run_peers.main(["--cases", "opt-350m_9x9"])


# Peers.


def test_the_seven_cases_are_named_by_model_and_counts() -> None:
    """Plans are named MODEL_AxV.json by device counts."""
    opt, neo = ["8x8", "16x16", "32x32", "32x96"], ["16x16", "32x32", "32x96"]
    assert list(peers.CASES) == [f"opt-350m_{x}" for x in opt] + [f"gpt-neo-2.7b_{x}" for x in neo]


def test_peers_needs_measurements(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the published files the run ends with status 2 and names the folder it looked in."""
    monkeypatch.setenv("HPP_DATA", "/nowhere")
    assert run_peers.main([]) == 2
    assert "no measurements in /nowhere/sailor; set HPP_DATA" in capsys.readouterr().err


@needs_data
def test_peers_plans_without_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the judge the plan is made and written, the table says why it is not judged, and no verdict is given."""
    monkeypatch.setenv("HPP_JUDGE", "/nowhere/judge.py")
    assert run_peers.main(["--cases", "opt-350m_8x8", "--runs", "1", "--no-process", "--out", str(tmp_path)]) == 0
    assert "Not judged: there is no judge at /nowhere/judge.py" in capsys.readouterr().out
    (row,) = results(tmp_path)["results"]
    assert row["judged"] is None and row["faster"] is None
    written = Plan.load(tmp_path / "opt-350m_8x8.json")
    assert sum(pipeline.samples for pipeline in written.pipelines) == 1024
    assert row["predicted_s"] == written.predicted.iteration_s


@needs_data
def test_the_judge_agrees_with_the_prediction(tmp_path: Path) -> None:
    """Under the judge's assumptions our prediction is the judge's within 0.1 %, on all samples, within memory."""
    judge, why_not = run_peers._judge()
    if judge is None:
        pytest.skip(str(why_not))
    case, folder = peers.CASES["opt-350m_8x8"], common.data_folder() / "sailor"
    found = plan(peers.profile(case, folder), peers.cluster(case, folder), peers.job(case), judge="formula")
    found.save(tmp_path / "plan.json")
    judged = run_peers._judged(judge, case, tmp_path / "plan.json")
    assert judged.step_s == pytest.approx(found.predicted.iteration_s, rel=1e-3)
    assert (judged.samples, judged.memory_violations) == (1024, 0)
    assert judged.step_s < min(judged.best_peer_s, judged.simple_split_s)


# Search time.


def test_generated_models_have_the_size_of_their_name() -> None:
    """Llama-2 has 6.74, 13.02 and 68.98 billion parameters; the generated shapes are within 0.1 %."""
    for name, parameters in (("7B", 6.74e9), ("13B", 13.02e9), ("70B", 68.98e9)):
        assert generate.profile(name, ["A100"], (1,), (1,)).parameters == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize("name", search_time.CASES)
def test_generated_cases_are_sane_and_repeatable(name: str) -> None:
    """No time implies more than a device's peak, the seed fixes every figure, and devices come to 16, 64 or 256."""
    case = search_time.CASES[name]
    profile, cluster, job = search_time.question(case, synced=True)
    assert not sanity(profile, cluster)
    assert search_time.question(case, synced=True)[0].digest == profile.digest
    assert len(cluster.devices) == case.num_devices == int(name.partition("-")[0])
    assert job.global_batch == case.global_batch


def test_without_sync_memory_is_the_same() -> None:
    """Frozen layers whose weights take all 18 bytes need what trained ones do, and have nothing to reduce."""
    case = search_time.CASES["16"]
    with_sync, without = (ask(*search_time.question(case, synced)).costs[0] for synced in (True, False))
    assert np.array_equal(with_sync.state, without.state)
    assert with_sync.sync_buffer == without.sync_buffer
    assert with_sync.gradients.all() and not without.gradients.any()
    assert not without.update.any()


def test_search_time_writes_a_row_and_a_plan_per_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The case of 16 devices: with and without sync, seconds beside the reachable figures."""
    assert run_search_time.main(["--cases", "16", "--runs", "1", "--no-process", "--out", str(tmp_path)]) == 0
    first, second = results(tmp_path)["results"]
    assert (first["synced"], first["reachable_s"]) == (True, 3.0)
    assert (second["synced"], second["reachable_s"]) == (False, 0.15)
    assert Plan.load(tmp_path / "16.json").predicted.sync_s > 0
    assert Plan.load(tmp_path / "16_no-sync.json").predicted.sync_s == 0
    assert "| case 16 |" in capsys.readouterr().out


# Plan quality.


def test_best_cuts_are_those_of_enumeration() -> None:
    """sum + (m - 1) max of the cuts is the least over all cuts, on random stage times that no split dominates."""
    draw = random.Random(1)
    for _ in range(20):
        num_layers, depth, m = 7, draw.choice((2, 3, 4)), draw.choice((1, 2, 8))
        times = [[draw.uniform(1, 3) for _ in range(num_layers)] for _ in range(depth)]
        loads = [
            np.array([[sum(t[i:j]) if i < j else np.inf for j in range(num_layers + 1)] for i in range(num_layers + 1)])
            for t in times
        ]

        def value(cuts: list[int], loads: list[np.ndarray] = loads, m: int = m) -> float:
            seconds = [v[i, j] for v, i, j in zip(loads, cuts, cuts[1:])]
            return sum(seconds) + (m - 1) * max(seconds)

        every = [[0, *inner, num_layers] for inner in itertools.combinations(range(1, num_layers), depth - 1)]
        found = baselines._best_cuts(loads, m)
        assert found is not None
        assert value(found) == pytest.approx(min(map(value, every)))


def test_even_split_of_equal_devices_is_the_textbook_figure() -> None:
    """Two equal devices, four equal layers, batch 8, no links to speak of: (m + S - 1)(F + B) or a pipeline each."""
    profile = factories.profile(distinct=False, num_layers=4, speeds={"fast": 1.0})
    cluster = factories.cluster({"fast": 2}, across=1e13, inside=1e13, alpha_s=0)
    found = baselines.even(ask(profile, cluster, Job(global_batch=8)))
    # A stage of two layers takes 2 (0.01 + 0.02) = 0.06 s: (8 + 1) 0.06 = 0.54. Two pipelines: 4 x 0.12 = 0.48 + sync.
    assert found is not None
    assert found.iteration_s == pytest.approx(0.48, rel=1e-2)
    assert found.layout == "2 x [fast tp1 4] 4 micro-batches of 1"


@pytest.mark.parametrize("seed", range(3))
def test_no_baseline_beats_an_exhaustive_search(seed: int) -> None:
    """On six unequal devices: bound <= plan <= layers balanced <= even, and plan <= data balanced."""
    profile, cluster = factories.profile(seed=seed), factories.cluster({"fast": 3, "slow": 3})
    job = Job(global_batch=12)
    found, question = plan(profile, cluster, job), ask(profile, cluster, job)
    value = found.predicted.iteration_s
    even, layers, data = (f(question) for f in (baselines.even, baselines.layers_balanced, baselines.data_balanced))
    assert even is not None and layers is not None and data is not None
    assert found.lower_bound_s <= value * (1 + 1e-9)
    assert value <= layers.iteration_s * (1 + 1e-9) <= even.iteration_s * (1 + 2e-9)
    assert value <= data.iteration_s * (1 + 1e-9)


def test_a_baseline_that_does_not_fit_is_none() -> None:
    """Layers of 50 million parameters and more do not fit in 2 GB beside 1 GiB of context: no split helps."""
    profile, cluster = factories.profile(), factories.cluster(memory_bytes=1_500_000_000)
    question = ask(profile, cluster, Job(global_batch=12))
    assert baselines.even(question) is None
    assert baselines.layers_balanced(question) is None
    assert baselines.data_balanced(question) is None


def test_plan_quality_covers_the_examples_and_three_generated_clusters() -> None:
    """Four example clusters, each with OPT-350M, and three generated ones."""
    names = list(plan_quality.CASES)
    clusters = {path.stem for path in (common.ROOT / "examples").glob("*.yaml")}
    assert {name.partition("_")[2] for name in names if name.startswith("opt-350m")} == clusters
    assert len([name for name in names if name.startswith("llama")]) == 3


@pytest.mark.slow
def test_plan_quality_writes_plans_and_baselines(tmp_path: Path) -> None:
    """The homogeneous control: a row with all baselines, its plan and the plan of homogeneous pipelines."""
    name = "opt-350m_homogeneous"
    assert run_plan_quality.main(["--cases", name, "--out", str(tmp_path)]) == 0
    (row,) = results(tmp_path)["results"]
    assert row["iteration_s"] == Plan.load(tmp_path / f"{name}.json").predicted.iteration_s
    assert row["homogeneous"]["iteration_s"] == Plan.load(tmp_path / f"{name}_homogeneous.json").predicted.iteration_s
    assert row["even"]["layout"]
    assert row["lower_bound_s"] <= row["iteration_s"]
