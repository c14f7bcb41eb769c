"""``hpp simulate``, ``draw``, ``trace``, ``compare``, ``estimate``, ``export``, ``evaluate``: what a person types."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_plans import cluster, plan, profile

from planner import cli, frameworks, simulate
from planner.plans import Plan, seconds
from planner.profile import ModelProfile


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the plan of `test_plans` and its inputs, as the working directory."""
    profile().save(tmp_path / "profile.json")
    cluster().save(tmp_path / "cluster.yaml")
    plan().save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints."""
    assert cli.main(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_simulate_prints_both_times_and_a_row_per_stage(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulated time of the library call, beside the planned one; in flight and idle reasons of each stage."""
    played = simulate.simulate(plan(), cluster()).iteration_s
    out = printed(capsys, "simulate", "plan.json", "--cluster", "cluster.yaml")
    assert f"{1e3 * played:.1f} ms per iteration; the planning form says 690.2 ms" in out
    rows = [line.split() for line in out.splitlines() if "n0:" in line or "n1:" in line]
    assert [row[:5] for row in rows] == [
        ["A", "0", "0", "0-3", "fast"],
        ["A", "0", "1", "4-5", "slow"],
        ["B", "1", "0", "0-5", "fast"],
    ]
    assert "critical, as pipeline:action: " in out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zero-bubble"])
def test_simulate_plays_other_schedules(here: Path, capsys: pytest.CaptureFixture[str], schedule: str) -> None:
    """A named schedule is played in the place of the plan's."""
    out = printed(capsys, "simulate", "plan.json", "--schedule", schedule, "--json")
    data = json.loads(out)
    assert data["iteration_s"] == simulate.simulate(plan(), schedule=schedule).iteration_s


def test_simulate_plays_a_list_that_a_user_wrote(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All forwards first, from a file; a list that waits in a circle is refused with the circle."""
    alone = replace(plan(), pipelines=plan().pipelines[:1], blocks=(), tied_blocks=())
    alone.save("alone.json")
    Path("mine.txt").write_text("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2\n")
    out = printed(capsys, "simulate", "alone.json", "--schedule", "mine.txt", "--json")
    assert json.loads(out)["iteration_s"] == simulate.simulate(alone, schedule="gpipe").iteration_s
    Path("mine.txt").write_text("0F0 0B0 0F1 0B1 0F2 0B2\n1F0 1F1 1F2 1B0 1B1 1B2\n")
    assert cli.main(["simulate", "alone.json", "--schedule", "mine.txt"]) == 2
    assert "waits" in capsys.readouterr().err


def test_zero_bubble_frees_a_micro_batch_after_its_w(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In flight as the timeline has it: m = 3 on two stages, at most min(m, S - s) = 2 and 1 as planned."""
    out = printed(capsys, "simulate", "plan.json", "--schedule", "zero-bubble")
    rows = [line.split() for line in out.splitlines() if "n0:" in line or "n1:" in line]
    assert "played as zero-bubble, W is half of a backward" in out
    timeline = simulate.simulate(plan(), schedule="zero-bubble")
    for row, (p, s) in zip(rows, ((0, 0), (0, 1), (1, 0)), strict=True):
        assert str(timeline.peak_in_flight(p, s)) in row[5:]


def test_another_cluster_is_said_and_no_time_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cluster of another name is played all the same; a plan whose stages take no time has nothing to show."""
    replace(cluster(), name="other").save("other.yaml")
    for arguments in (["simulate", "plan.json"], ["compare", "plan.json"]):
        assert cli.main([*arguments, "--cluster", "cluster.yaml"]) == 0
        assert not capsys.readouterr().err
        assert cli.main([*arguments, "--cluster", "other.yaml"]) == 0
        assert "other.yaml: not the cluster the plan was made for" in capsys.readouterr().err
    none = dict.fromkeys(("forward_s", "backward_s", "recompute_s", "transfer_s", "send_s", "update_s"), 0.0)
    idle = [replace(each, stages=tuple(replace(s, **none) for s in each.stages)) for each in plan().pipelines[:1]]
    replace(plan(), pipelines=tuple(idle), blocks=(), tied_blocks=()).save("idle.json")
    assert cli.main(["simulate", "idle.json"]) == 2
    assert "idle.json: no stage takes any time" in capsys.readouterr().err


def test_draw_and_trace_write_whole_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SVG parses, PNG is one, the page holds all pictures, the trace opens; a wrong suffix is refused."""
    for what in ("overview", "gantt", "memory", "memory_over_time", "devices"):
        printed(capsys, "draw", "plan.json", "-o", "a.svg", "--what", what)
        assert ElementTree.parse("a.svg").getroot().tag.endswith("svg")
    printed(capsys, "draw", "plan.json", "-o", "a.png", "--what", "memory")
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    printed(capsys, "draw", "plan.json", "-o", "a.html", "--cluster", "cluster.yaml")
    page = Path("a.html").read_text()
    assert page.count("<svg") >= 4 and "<script" not in page
    printed(capsys, "trace", "plan.json", "-o", "t.json.gz")
    events = json.loads(gzip.decompress(Path("t.json.gz").read_bytes()))["traceEvents"]
    assert {"M", "X", "s", "f", "C"} <= {event["ph"] for event in events}
    for command in (["draw", "plan.json", "-o", "a.bmp"], ["trace", "plan.json", "-o", "t.txt"]):
        assert cli.main(command) == 2
        assert "is not among" in capsys.readouterr().err
    assert cli.main(["draw", "plan.json", "-o", "a.html", "--what", "gantt"]) == 2
    assert "--what: a page holds all pictures" in capsys.readouterr().err


def test_compare_says_why_a_plan_loses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half the sync of the other plan, 2 ms: named as what it loses by."""
    better = replace(plan().predicted, sync_s=0.002, iteration_s=0.6882, samples_per_s=10 / 0.6882)
    replace(plan(), predicted=better).save("better.json")
    out = printed(capsys, "compare", "plan.json", "better.json")
    assert "exposed gradient sync" in out and "2.000 ms" in out


def test_compare_holds_a_run_against_its_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured 10 % above what was planned: -9.1 %."""
    Path("run.csv").write_text(f"metric,value\niteration_s,{1.1 * 0.6902}\n")
    assert "-9.1%" in printed(capsys, "compare", "plan.json", "--measured", "run.csv")
    assert cli.main(["compare", "plan.json", "plan.json", "--measured", "run.csv"]) == 2
    assert "--measured: a run of one plan" in capsys.readouterr().err
    Path("run.csv").write_text("metric,value\niteration_s,fast\n")
    assert cli.main(["compare", "plan.json", "--measured", "run.csv"]) == 2
    assert "run.csv" in (err := capsys.readouterr().err) and "fast" in err


def trace_of(schedule: str = "plan") -> str:
    """What a run would write that goes as simulated; everything starts 2 ms late."""
    timeline = simulate.simulate(plan(), cluster(), schedule=schedule)
    rows = [
        f"{lane.pipeline},{action},{start_s + 0.002:.9f},{end_s + 0.002:.9f}"
        for lane in timeline.lanes
        for action, start_s, end_s in (*lane.events, *lane.reductions)
    ]
    return "\n".join(["pipeline,action,start_s,end_s", *rows, ""])


def test_compare_lays_a_trace_over_the_simulation(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both tables, where time is lost, and the run in a picture, a page and a Perfetto trace."""
    Path("run.csv").write_text(trace_of())
    arguments = ["compare", "plan.json", "--measured", "run.csv", "--cluster", "cluster.yaml"]
    out = printed(capsys, *arguments)
    assert "late        the last backward ends 2.000 ms later than simulated" in out
    assert "pauses of pipeline" in out and "before forwards: 2.000 ms, most at 0F0 (2.000 ms)" in out
    files = ["a.svg", "a.png", "a.html", "a.json", "a.json.gz"]
    assert printed(capsys, *arguments, *(word for name in files for word in ("-o", name))) == out
    assert 'id="measured-p0-1B2"' in Path("a.svg").read_text()
    assert "measured-p0-1B2" in (page := Path("a.html").read_text())
    assert page.count("<svg") >= 4
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads(Path("a.json").read_text())
    assert json.loads(gzip.decompress(Path("a.json.gz").read_bytes())) == data
    names = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    assert {"pipeline 0 (A), simulated", "pipeline 0 (A), measured"} <= names


def test_compare_simulates_what_ran(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under another schedule or framework the run is held against that; under the plan's it is refused in one line."""
    Path("run.csv").write_text(trace_of("zero-bubble"))
    arguments = ["compare", "plan.json", "--measured", "run.csv", "--cluster", "cluster.yaml"]
    assert "2.000 ms later" in printed(capsys, *arguments, "--schedule", "zero-bubble")
    assert cli.main(arguments) == 2
    assert "run.csv: line " in (err := capsys.readouterr().err) and "if it ran another schedule" in err
    Path("run.csv").write_text("metric,value\niteration_s,0.7\n")
    played = frameworks.named("deepspeed").play(plan(), cluster()).iteration_s
    out = printed(capsys, *arguments, "--framework", "deepspeed")
    (row,) = [line for line in out.splitlines() if "iteration, played" in line]
    assert seconds(played) in row
    assert cli.main([*arguments[:-2], "--framework", "deepspeed"]) == 2
    assert "needs --cluster" in capsys.readouterr().err


def test_compare_refuses_what_it_cannot_show(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output without a run or without a trace, and a suffix nobody reads: one line each, nothing written."""
    Path("run.csv").write_text("metric,value\niteration_s,0.7\n")
    for arguments, words in (
        (["-o", "a.svg"], "--output: goes with --measured"),
        (["--framework", "deepspeed"], "--framework: goes with --measured"),
        (["--measured", "run.csv", "-o", "a.bmp"], "a.bmp: suffix '.bmp' is not among .png, .svg, .pdf, .html, .json"),
        (["--measured", "run.csv", "-o", "a.svg"], "run.csv: no trace to show beside the simulation: no actions"),
    ):
        assert cli.main(["compare", "plan.json", *arguments]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert not captured.out
    assert not list(here.glob("a.*"))


def test_a_framework_brings_its_own_order(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Played as DeepSpeed; without the cluster, or for an unknown name, one line says what is wrong."""
    out = printed(capsys, "simulate", "plan.json", "--framework", "deepspeed", "--cluster", "cluster.yaml")
    assert "played as deepspeed" in out
    assert cli.main(["simulate", "plan.json", "--framework", "deepspeed"]) == 2
    assert "needs --cluster" in capsys.readouterr().err
    assert cli.main(["simulate", "plan.json", "--framework", "deepsped", "--cluster", "cluster.yaml"]) == 2
    assert "did you mean 'deepspeed'" in capsys.readouterr().err


def test_export_writes_files_and_says_why_not(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our runtime's file whole; Megatron refuses two shapes of pipeline and names the difference."""
    printed(capsys, "export", "plan.json", "--to", "run", "-o", "out")
    assert json.loads(Path("out/run.json").read_text())["schema"] == "hpp-run/1"
    assert cli.main(["export", "plan.json", "--to", "megatron", "--profile", "profile.json"]) == 2
    assert "pipelines 0 and 1 differ" in capsys.readouterr().err
    assert cli.main(["export", "plan.json", "--to", "megatrn"]) == 2
    assert "did you mean 'megatron'" in capsys.readouterr().err


def test_evaluate_predicts_a_plan_as_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan file evaluates to its own figures."""
    printed(capsys, "evaluate", "profile.json", "cluster.yaml", "plan.json", "--from", "plan", "-o", "again.json")
    again = Plan.load("again.json")
    assert [p.time_s for p in again.pipelines] == pytest.approx([p.time_s for p in plan().pipelines])


def test_estimate_makes_a_profile(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a config and a device name; without a sequence length one line says so; devices can be listed."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 100}
    Path("config.json").write_text(json.dumps(config))
    arguments = ["estimate", "--config", "config.json", "--device", "V100-SXM2-32", "--dtype", "fp16", "-o"]
    arguments.append("estimated.json")
    printed(capsys, *arguments, "--sequence-length", "128")
    assert ModelProfile.load("estimated.json").num_layers == 4
    assert cli.main(arguments) == 2
    assert "--sequence-length: missing" in capsys.readouterr().err
    assert "H100-SXM" in printed(capsys, "estimate", "--list-devices")


def test_import_takes_what_the_files_do_not_say(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An option of another format is refused with those of this one."""
    assert cli.main(["import", "pipedream", "x.txt", "-o", "o.json", "--set", "memory=2"]) == 2
    assert "format pipedream takes no such option" in capsys.readouterr().err
    assert cli.main(["import", "pipedream", "x.txt", "-o", "o.json", "--set", "memory"]) == 2
    assert "is not OPTION=VALUE" in capsys.readouterr().err
