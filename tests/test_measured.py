"""A measured run is read with its place, and held against the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import factories
import pytest

from planner import Plan, measured
from planner.cluster import Cluster, DeviceType, Link, Node
from planner.evaluate import evaluate
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.frameworks import DEEPSPEED
from planner.job import Job
from planner.measured import Peak, Run

HEADER = "metric,value,pipeline,stage,action,start_s,end_s"


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster(
        name="one node",
        device_types=(DeviceType(name="fast", memory_bytes=64 * 2**30),),
        nodes=(Node(name="n", devices=("fast", "fast"), link=Link(bytes_per_s=1e12)),),
    )


@pytest.fixture(scope="module")
def plan(cluster: Cluster) -> Plan:
    """Two stages of two equal layers, F = 20 ms and B = 40 ms each; two micro-batches."""
    profile = factories.profile(num_layers=4, distinct=False, speeds={"fast": 1.0})
    stages = tuple(StageLayout(layers=(2 * s, 2 * s + 2), devices=(f"n:{s}",)) for s in range(2))
    layout = Layout(pipelines=(PipelineLayout(stages=stages, micro_batch=1, num_micro_batches=2),))
    return evaluate(profile, cluster, layout, Job())


def written(folder: Path, *lines: str) -> Path:
    path = folder / "run.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_run_is_read(tmp_path: Path) -> None:
    """Iterations, peaks with and without a place, actions; blank lines and the order of columns do not matter."""
    run = measured.load(
        written(
            tmp_path,
            "stage,metric,value,pipeline,action,start_s,end_s",
            ",iteration_s,0.5,,,,",
            "",
            "1,peak_bytes,1e9,0,,,",
            ",peak_bytes,2e9,,,,",
            ",action,,,1B0,0.1,0.2",
        )
    )
    assert run.iterations_s == (0.5,)
    assert run.peaks == (Peak(nbytes=1e9, pipeline=0, stage=1), Peak(nbytes=2e9))
    assert [(str(ran.action), ran.pipeline, ran.start_s, ran.end_s) for ran in run.actions] == [("1B0", 0, 0.1, 0.2)]


def test_columns_that_no_row_needs_may_be_missing(tmp_path: Path) -> None:
    """Two columns do for times; a trace alone needs no metric, and its end is the iteration."""
    assert measured.load(written(tmp_path, "metric,value", "iteration_s,0.25")).iteration_s == 0.25
    trace = measured.load(written(tmp_path, "pipeline,action,start_s,end_s", "1,0F0,0,0.5", "0,1B3,0.5,0.75"))
    assert (trace.iteration_s, trace.actions[0].pipeline, trace.iterations_s) == (0.75, 1, ())


def test_the_median_iteration_counts() -> None:
    """One slow iteration of three does not move it."""
    assert Run(iterations_s=(0.5, 9.0, 0.6)).iteration_s == 0.6
    assert Run().iteration_s is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["metric,valeu", "iteration_s,1"], "line 1: column 'valeu' is not among metric, value, "),
        (["value", "1"], "line 1: column 'metric' is missing; there are value"),
        (["metric,value", "iteration,1"], "line 2: metric: 'iteration' is not among iteration_s"),
        (["metric,value", "iteration_s,fast"], "line 2: value: 'fast' is not a number"),
        (["metric,value", "iteration_s,-1"], "line 2: value: '-1' is not a finite number >= 0"),
        (["metric,value", "iteration_s,0"], "line 2: value: '0' is not a number above 0"),
        (["metric,value", "iteration_s,"], "line 2: value: missing, a row of metric iteration_s needs it"),
        (["metric,pipeline", "peak_bytes,0"], "line 2: value: missing, a row of metric peak_bytes needs it"),
        (["metric,value", "iteration_s,1,2"], "line 2: 3 values, expected 2"),
        ([HEADER, "peak_bytes,5,first,0,,,"], "line 2: pipeline: 'first' is not an index from 0"),
        ([HEADER, "action,,0,0,0G1,0,1"], "line 2: action: '0G1' is no action"),
        ([HEADER, "action,,0,1,0F1,0,1"], "line 2: stage: 1 is not the stage of 0F1"),
        ([HEADER, "action,,0,0,0F1,2,1"], "line 2: end_s: 1 is before the start, 2"),
        ([HEADER, "action,,0,0,0F1,2,"], "line 2: end_s: missing, a row of metric action needs it"),
        ([HEADER], "no rows below the header"),
    ],
)
def test_damage_is_named_with_its_place(tmp_path: Path, lines: list[str], words: str) -> None:
    """One message: file, line, column, value, and what would be right."""
    path = written(tmp_path, *lines)
    with pytest.raises(ValueError) as error:
        measured.load(path)
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(ValueError, match=r"nowhere\.csv: no such file"):
        measured.load(tmp_path / "nowhere.csv")
    with pytest.raises(ValueError, match="the file is empty"):
        measured.load(written(tmp_path, ""))


def test_every_figure_has_a_signed_error(tmp_path: Path, plan: Plan, cluster: Cluster) -> None:
    """Iteration planned and played, peaks by place, mean forward and backward per stage."""
    total = [stage.memory.total for stage in plan.stages]
    text = [
        HEADER,
        f"iteration_s,{2 * plan.predicted.iteration_s},,,,,",
        f"peak_bytes,{2 * total[0]},0,0,,,",
        f"peak_bytes,{total[0]},0,0,,,",
        f"peak_bytes,{max(total)},,,,,",
        "action,,0,,1F0,0.1,0.13",
        "action,,0,,1F1,0.2,0.21",  # mean of 30 and 10 ms: 20 ms, as predicted
        "action,,0,,0I0,0.3,0.31",
        "action,,0,,0W0,0.4,0.43",  # halves of one backward: 40 ms
        "action,,0,,0SEND_F0,0,1",  # transfers are not compared
    ]
    run = measured.load(written(tmp_path, *text))
    found = {each.what: each for each in measured.compare(plan, run, cluster)}
    assert list(found) == [
        "iteration, planned",
        "iteration, played",
        "peak memory, fullest device",
        "peak memory, pipeline 0 stage 0",
        "backward, pipeline 0 stage 0",
        "forward, pipeline 0 stage 1",
    ]
    assert found["iteration, planned"].error == -0.5
    assert found["peak memory, pipeline 0 stage 0"].error == -0.5  # the larger of two peaks
    assert found["peak memory, fullest device"].error == 0
    assert abs(found["backward, pipeline 0 stage 0"].error) < 1e-9
    assert abs(found["forward, pipeline 0 stage 1"].error) < 1e-9


def test_a_framework_plays_its_own_way(plan: Plan, cluster: Cluster) -> None:
    """The planned time stays, the played one is that framework's; without links it cannot be."""
    run = Run(iterations_s=(0.36,))
    slow = replace(DEEPSPEED, order="1f1b")
    found = measured.compare(plan, run, cluster, slow)
    assert found[0] == measured.compare(plan, run, cluster)[0]
    assert found[1].predicted == slow.play(plan, cluster).iteration_s
    with pytest.raises(ValueError, match="framework: 'deepspeed' needs the cluster"):
        measured.compare(plan, run, None, slow)


def test_the_text_is_a_table(plan: Plan) -> None:
    """A title, a header and a row per figure, with units."""
    # One iteration of 0.36 s: 2 stages x 60 ms + 1 x 60 ms = 0.18 s planned, half of it.
    lines = measured.comparison_text(plan, Run(iterations_s=(0.36,), peaks=(Peak(nbytes=2.0**30),))).splitlines()
    assert lines[0].endswith("on one node: 1 iteration, 0 actions")
    assert lines[1].split() == ["predicted", "measured", "error"]
    assert lines[2].split("  ")[1:2] == ["iteration, planned"]
    assert "180.0 ms" in lines[2]
    assert lines[2].endswith("-50.0%")
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(), "run: nothing to compare"),
        (Run(peaks=(Peak(nbytes=1, pipeline=3, stage=0),)), "a peak is of pipeline 3, the plan has 1"),
        (Run(peaks=(Peak(nbytes=1, pipeline=0, stage=2),)), "a peak is of stage 2 of pipeline 0, which has 2"),
    ],
)
def test_a_run_of_another_plan_is_refused(plan: Plan, run: Run, words: str) -> None:
    """What the plan has not is named."""
    with pytest.raises(ValueError) as error:
        measured.compare(plan, run)
    assert words in str(error.value)
