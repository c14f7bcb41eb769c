"""The command line: what it prints, where, and its exit codes. Plans come from `test_plans`, not from a search."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_plans import JOB, cluster, plan, profile

import planner
from planner import cli
from planner.cli import planning, show
from planner.cluster import Cluster
from planner.job import Job
from planner.plans import Infeasible, Plan
from planner.profile import ModelProfile


class Search(types.ModuleType):
    """Stands in for `planner.search`: answers what it is told to and remembers what it was asked."""

    def __init__(self, answer: Sequence[Plan] | Exception) -> None:
        super().__init__("planner.search")
        self.answer = answer
        self.asked: dict[str, Any] = {}

    def plans(self, profile: ModelProfile, cluster: Cluster, job: Job, *, progress: Any, **options: Any) -> list[Plan]:
        """As `planner.search.plans`."""
        self.asked = {"job": job, **options}
        progress(0.5, "half way")
        if isinstance(self.answer, Exception):
            raise self.answer
        return [remade(each, job) for each in self.answer][: options["top"]]


def remade(each: Plan, job: Job) -> Plan:
    """The plan as if made for this job."""
    return replace(each, job=job, provenance=replace(each.provenance, job=job.digest))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the inputs of `test_plans`, as the working directory."""
    profile().save(tmp_path / "profile.json")
    cluster().save(tmp_path / "cluster.yaml")
    JOB.save(tmp_path / "job.yaml")
    plan().save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def search(monkeypatch: pytest.MonkeyPatch, answer: Sequence[Plan] | Exception) -> Search:
    """Put a stand-in in the place of the search."""
    fake = Search(answer)
    monkeypatch.setitem(sys.modules, "planner.search", fake)
    monkeypatch.setattr(planner, "search", fake, raising=False)
    return fake


PLAN = ["plan", "profile.json", "cluster.yaml", "--job", "job.yaml"]


def test_plan_prints_the_plan(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`hpp plan` prints the plan to stdout and nothing else, and exits with 0."""
    search(monkeypatch, [plan()])
    assert cli.main(PLAN) == 0
    assert capsys.readouterr() == (f"{plan()}\n", "")


def test_plan_as_json(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints what `-o` writes, and both read back as the plan."""
    search(monkeypatch, [plan()])
    assert cli.main([*PLAN, "--json", "-o", "out.json"]) == 0
    out, err = capsys.readouterr()
    assert out == Path("out.json").read_text()
    assert err == "wrote out.json\n"
    assert Plan.from_dict(json.loads(out)) == Plan.load("out.json") == plan()


def test_top_prints_a_ranking(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--top` ranks the plans, prints the best whole, and writes every one."""
    slower = replace(plan(), lower_bound_s=0.6, gap=0.6902 / 0.6 - 1)
    fake = search(monkeypatch, [plan(), slower])
    assert cli.main([*PLAN, "--top", "3", "-o", "out.json"]) == 0
    out = capsys.readouterr().out
    assert fake.asked["top"] == 3
    ranking, best = out.split("\n\n", 1)
    assert [line.split()[0] for line in ranking.splitlines()] == ["rank", "1", "2"]
    assert "(fast 4 > slow tp 2 2) of 2 + (fast 6) of 1" in ranking
    assert best == f"{plan()}\n"
    assert (Plan.load("out.json"), Plan.load("out-2.json")) == (plan(), slower)
    assert cli.main([*PLAN, "--top", "2", "--json"]) == 0
    assert [Plan.from_dict(each) for each in json.loads(capsys.readouterr().out)] == [plan(), slower]


def test_options_override_the_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option lands in its field; what is not given stays as in the file."""
    fake = search(monkeypatch, Infeasible("enough"))
    options = "--global-batch 12 --micro-batch 1,2 --tp 1,2 --precision mixed --optimizer sgd --memory-margin 0.2"
    cli.main([*PLAN, *options.split(), "--sync", "exposed", "--no-recompute", "--time-limit", "1.5", "--effort", "3"])
    assert fake.asked == {
        "job": replace(
            JOB,
            global_batch=12,
            micro_batches=(1, 2),
            tp=(1, 2),
            precision="mixed",
            optimizer="sgd",
            memory_margin=0.2,
            sync="exposed",
            recompute=False,
        ),
        "top": 1,
        "effort": 3.0,
        "judge": "simulation",
        "time_limit": 1.5,
    }
    cli.main(["plan", "profile.json", "cluster.yaml"])
    assert fake.asked == {"job": Job(), "top": 1, "time_limit": None, "effort": 1.0, "judge": "simulation"}


def test_infeasible_exits_with_3(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No plan: exit code 3, the nearest miss and the cheapest change on stderr, the fields as JSON if asked."""
    error = Infeasible("nothing fits", stage=1, device_type="slow", short_bytes=1 << 30, remedy="allow recompute")
    search(monkeypatch, error)
    assert cli.main([*PLAN, "--json"]) == 3
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "hpp: no plan: nothing fits",
        "  nearest miss     stage 1 on slow 1.00 GiB short",
        "  cheapest change  allow recompute",
    ]
    assert json.loads(out)["infeasible"] == {
        "message": "nothing fits",
        "stage": 1,
        "layer": None,
        "device_type": "slow",
        "short_bytes": 1 << 30,
        "remedy": "allow recompute",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "profil.json", "cluster.yaml"], "hpp: profil.json: no such file; did you mean 'profile.json'?"),
        (["plan", "cluster.yaml", "cluster.yaml"], "hpp: cluster.yaml: schema: 'hpp-cluster/1' is not 'hpp-profile/1'"),
        ([*PLAN, "--global-batch", "0"], "hpp: global_batch: 0 is less than 1"),
        ([*PLAN, "--time-limit", "-1"], "hpp: --time-limit: -1.0 is not a time in seconds"),
        ([*PLAN, "-o", "plan.txt"], "hpp: plan.txt: suffix '.txt' is not among"),
        ([*PLAN, "-o", "nowhere/plan.json"], "hpp: nowhere/plan.json: there is no directory nowhere"),
        (["inspect", "broken.json"], "hpp: broken.json: line 1 column 2: "),
        (["inspect", "other.json"], "hpp: other.json: schema 'mine' is not among hpp-profile/1"),
        (
            ["import", "salor", ".", "-o", "x.json"],
            "hpp: format 'salor' is not among those: aceso, dnn-partitioning, ",
        ),
        (["import", "sailor", ".", "-o", "x.json"], "hpp: profiles_tmp.json: no such file"),
        (["explain", "plan.json", "--profile", "plan.json", "--cluster", "cluster.yaml"], "hpp: plan.json: schema: "),
    ],
)
def test_bad_input_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """Bad input: exit code 2 and one line on stderr that names the file, the key and the value."""
    Path("broken.json").write_text("{")
    Path("other.json").write_text('{"schema": "mine"}')
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(words)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "hpp plan: the following arguments are required: PROFILE, CLUSTER"),
        ([*PLAN, "--tp", "1,x"], "hpp plan: argument --tp: '1,x' is not a list of counts such as 1,2,4"),
        ([*PLAN, "--micro-batch", "0"], "hpp plan: argument --micro-batch: "),
        ([*PLAN, "--top", "0"], "hpp plan: argument --top: "),
        ([*PLAN, "--precision", "fp8"], "hpp plan: argument --precision: invalid choice: 'fp8'"),
        (["dance"], "hpp: argument COMMAND: invalid choice: 'dance'"),
    ],
)
def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """Bad arguments: exit code 2 and one line that names the option."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(words)
    assert err.count("\n") == 1


def test_a_plan_that_fails_its_check_is_never_printed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong plan is a fault of ours, not of the input: it raises instead of looking like an answer."""
    search(monkeypatch, [replace(plan(), gap=0.5)])
    with pytest.raises(RuntimeError, match=r"gap is 0\.5"):
        cli.main(PLAN)


def test_progress_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar needs a terminal and a second of waiting; until then rich is not even imported."""
    monkeypatch.delitem(sys.modules, "rich.progress", raising=False)
    with planning._Progress() as progress:
        progress(0.1, "planning")
    assert progress.bar is None
    assert "rich.progress" not in sys.modules

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with planning._Progress() as progress:
        progress(0.1, "planning")
        assert progress.bar is None
        progress.started -= planning.PROGRESS_AFTER_S
        progress(0.5, "planning")
        bar: Any = progress.bar
        assert bar.tasks[0].completed == 0.5


def test_inspect_says_what_is_in_a_profile(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers by kind, sizes measured per device and tp, holes, and the FLOP/s implied.

    Fast at micro-batch 2: a block of 20 M parameters on 2 x 1000 tokens forward is 2 x 20e6 x 2000 = 80 GFLOP in 18 ms,
    4.4 TFLOP/s; slow at tp 2 half of that in twice the time, 1.1. Peaks of 10 and 5 TFLOP/s make 44 % and 22 %.
    """
    assert cli.main(["inspect", "profile.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy: 6 layers, 90.0 M parameters, 4 heads"
    assert "  block      1-4     4     20.00 M        1.0 MiB              -" in lines
    assert "  slow     2  1 2" in lines
    assert any(line.split() == ["fast", "1", "2", "41.40", "82.80", "4.4", "4.4"] for line in lines)
    assert any(line.split() == ["slow", "2", "2", "82.80", "165.60", "1.1", "1.1"] for line in lines)
    assert not any(line.startswith("Holes") for line in lines)

    cells = tuple(c for c in profile().cells if (c.kind, c.device_type, c.micro_batch) != ("head", "slow", 2))
    replace(profile(), cells=cells, warnings=("measured in a hurry",)).save("holes.json")
    types = tuple(replace(d, peak_flops_per_s=peak) for d, peak in zip(cluster().device_types, (1e13, 5e12)))
    cluster(device_types=types).save("peaks.yaml")
    assert cli.main(["inspect", "holes.json", "--cluster", "peaks.yaml"]) == 0
    out = capsys.readouterr().out
    assert "missing: head at 2" in out
    assert "Holes: 1\n  slow, tp 2, micro-batch 2: head\n" in out
    assert "44%, 44% of peak" in out
    assert "warning     measured in a hurry" in out


def test_inspect_says_what_is_in_a_cluster(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes, memory, and a link matrix in GB/s and us."""
    assert cli.main(["inspect", "cluster.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "two: 2 nodes, 6 devices"
    assert "  slow        4  0.93 GiB" in lines
    assert "  b  n1     4 x slow  10 (100)  0-1 2-3 at 20 (100)" in lines
    assert lines[-2:] == ["  a  n0          -  1 (1,000)", "  b  n1  1 (1,000)          -"]


def test_inspect_groups_equal_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fifty equal nodes are one row; nodes that nothing joins say so."""
    nodes = tuple(replace(cluster().nodes[0], name=f"a-{i}") for i in range(50))
    big = cluster(nodes=(*nodes, replace(cluster().nodes[1], name="far")), links=())
    big.save(tmp_path / "big.yaml")
    assert cli.main(["inspect", str(tmp_path / "big.yaml")]) == 0
    out = capsys.readouterr().out
    assert "a  a-[0-49]  2 x fast" in out
    assert "no link" in out


def test_inspect_shows_plans_and_jobs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan prints as it did when it was made; a job prints as its file."""
    assert cli.main(["inspect", "plan.json"]) == 0
    assert capsys.readouterr().out == f"{plan()}\n"
    assert cli.main(["inspect", "job.yaml", "--json"]) == 0
    assert Job.from_dict(json.loads(capsys.readouterr().out)) == JOB


def test_explain_shows_every_term(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each term of time and memory stands beside the cells, the link or the setting it came from."""
    assert cli.main(["explain", "plan.json", "--profile", "profile.json", "--cluster", "cluster.yaml"]) == 0
    out = capsys.readouterr().out
    assert "problem" not in out
    assert max(map(len, out.splitlines())) <= 112
    flat = " ".join(out.split())
    for words in (
        "676.2 ms = 335.4 ms through all stages + 2 x 170.4 ms of stage 0",
        "cells of slow, tp 2, micro-batch 2",
        "55.80 ms embedding 1.800 ms + 3 x block 18.000 ms",
        "n0:0 to n1:0 (link * - *): 1,000 us + 1.9 MiB at 1 GB/s = 3.000 ms",
        "slowest link n0:0 to n0:1 (inside n0) 10 GB/s, alpha 100 us",
        "2 in flight x (49.6 MiB kept by 4 layers + 0 B input)",
        "90.0 M trained parameters on the rank (10.0 M tied ones counted once)",
        "1.28 GiB of 1.86 GiB; 0.40 GiB spare at margin 10%",
    ):
        assert words in flat


def test_explain_says_when_the_inputs_changed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With another profile the figures of the plan stay, and the mismatch is named first."""
    cells = tuple(replace(cell, device_type="other", tp=cell.tp) for cell in profile().cells if cell.tp == 1)
    replace(profile(), cells=cells).save("other.json")
    assert cli.main(["explain", "plan.json", "--profile", "other.json", "--cluster", "cluster.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("problem     the profile is not the one the plan was made for")
    assert "55.80 ms   not in this profile" in out


def test_explain_names_fast_groups_and_paths(here: Path) -> None:
    """A link is named by its entry in the cluster file: fast group, node, network link, or the path of switches."""
    two = cluster()
    devices = {device.name: device for device in two.devices}

    def name(where: Cluster, a: str, b: str) -> str:
        return show.link_name(where, a, b, where.link(devices[a], devices[b]))

    assert name(two, "n1:0", "n1:1") == "fast group of n1"
    assert name(two, "n1:1", "n1:2") == "inside n1"
    assert name(two, "n0:1", "n1:2") == "link * - *"
    switched = tuple(replace(two.links[0], between=(node, "switch")) for node in ("n0", "n1"))
    assert name(cluster(links=switched), "n0:1", "n1:2") == "path through the network"


def test_import_writes_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model goes into a file, several into a directory; `--model` picks one, or says which there are."""
    models = tuple(replace(profile(), name=name, warnings=(f"{name} is old",)) for name in ("OPT 350M", "GPT"))
    monkeypatch.setattr("planner.importers.FORMATS", {"sailor": lambda path: models})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", "sailor", "data", "-o", "all"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "all/opt-350m.json: OPT 350M, 6 layers of 3 kinds on fast, slow",
        "  warning   OPT 350M is old",
    ]
    assert ModelProfile.load("all/gpt.json") == models[1]
    assert cli.main(["import", "sailor", "data", "-o", "one.json", "--model", "GPT"]) == 0
    assert ModelProfile.load("one.json") == models[1]
    assert cli.main(["import", "sailor", "data", "-o", "one.json"]) == 2
    assert cli.main(["import", "sailor", "data", "-o", "one.json", "--model", "GPT2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "hpp: one.json: one file cannot hold OPT 350M, GPT; name one of them with --model, or a directory",
        "hpp: --model: 'GPT2' is not among OPT 350M, GPT; did you mean 'GPT'?",
    ]


def test_runs_as_a_process(here: Path) -> None:
    """As a process it needs no solver to look at files, keeps its exit codes, and takes a closed pipe quietly."""
    repository = str(Path(cli.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": repository}

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )

    looked = run(
        "import sys; from planner.cli import main; main(['inspect', 'plan.json']);"
        "print([m for m in ('ortools', 'pulp', 'rich', 'planner.cost', 'planner.solver') if m in sys.modules])"
    )
    assert looked.stdout == f"{plan()}\n[]\n"
    refused = run("import sys; from planner.cli import main; sys.exit(main(['inspect', 'nothing.json']))")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Traceback" not in refused.stderr
    piped = f"{sys.executable} -m planner.cli inspect plan.json | true"
    closed = subprocess.run(piped, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert closed.stderr == ""
