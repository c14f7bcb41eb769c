"""`python -m runtime`: what it prints and writes, that it goes on from a checkpoint, and what it refuses to start."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import factories
import pytest
import torch._dynamo  # noqa: F401  # an optimizer imports it; once here rather than in every rank
from ranks import make_plan, start
from test_runtime import reference

from planner import measured
from planner.job import Job
from planner.search import plan as search
from runtime import __main__ as launcher
from runtime import state

ROOT = Path(__file__).parent.parent
ALONE = make_plan([([10], 6)])
SPLIT = make_plan([([4, 6], 3), ([10], 3)])
TASK = """
import torch
from ranks import make_batch, make_model
from runtime.task import Task


def batch(step, samples):
    inputs, targets = make_batch(12, step)
    return inputs[samples.start : samples.stop], targets[samples.start : samples.stop]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def build():
    return Task(model=make_model(10), batch=batch, steps=3, optimizer=adamw, dtype=torch.float64)


def parts():
    return make_model(10), batch


def short():
    return Task(model=make_model(9), batch=batch, steps=3)


def number():
    return 3


def fails():
    raise KeyError("lost")


def narrow():
    return Task(model=make_model(10), batch=lambda step, samples: batch(step, range(1)), steps=1)
"""
STEP = re.compile(
    r"step (\d+)  loss ([\d.]+)  norm [\d.]+  [\d,]+ tokens/s  [\d.,]+ (?:s|ms|us) \(predicted 1\.000 s\)"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with plans and a task, as the working directory."""
    ALONE.save(tmp_path / "alone.json")
    SPLIT.save(tmp_path / "split.json")
    (tmp_path / "train.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(rank: int, world: int, arguments: list[str]) -> tuple[int, str, str]:
    """The launcher in a rank that is connected already: exit code, stdout and stderr."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = launcher.main([*arguments, "--on", "cpu"])
    return code, out.getvalue(), err.getvalue()


def losses(out: str) -> dict[int, float]:
    """By step, of the lines that report them."""
    found = [STEP.fullmatch(line) for line in out.splitlines() if line.startswith("step")]
    assert all(found)
    return {int(match[1]): float(match[2]) for match in found if match}


def command(*arguments: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    """The launcher as a user starts it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )


def test_one_process_needs_no_torchrun(here: Path) -> None:
    """A line per step with the loss of one process, memory beside the predicted; nothing on stderr."""
    done = command("-m", "runtime", "alone.json", "train.py:build")
    assert (done.returncode, done.stderr) == (0, "")
    expected = reference(10, 12, tied=False, masked=False, steps=3)
    assert losses(done.stdout) == {n + 1: float(f"{loss:.4f}") for n, (loss, *_) in enumerate(expected)}
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny on host: 1 pipeline, 1 stage, 1 device"
    assert lines[-2].split() == ["pipeline", "stage", "device", "peak", "memory", "predicted"]
    assert re.fullmatch(r" +0 +0  cpu +\d+\.\d+ [GM]iB +0 B", lines[-1])


def test_torchrun_starts_the_processes_of_a_plan(here: Path) -> None:
    """Two stages as two processes: the same losses, each line once."""
    make_plan([([4, 6], 6)]).save(here / "two.json")
    done = command(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "runtime",
        "two.json",
        "train.py:build",
        "--steps",
        "2",
    )
    assert done.returncode == 0, done.stderr
    expected = reference(10, 12, tied=False, masked=False, steps=2)
    assert losses(done.stdout) == {n + 1: float(f"{loss:.4f}") for n, (loss, *_) in enumerate(expected)}


def test_the_trace_is_a_measured_run(here: Path) -> None:
    """Every action of the last step, seconds of all steps but the first, a peak per device: `hpp compare` reads it."""
    arguments = ["split.json", "train.py:parts", "--steps", "3", "--trace", "run.csv"]
    first, *others = start(3, launch, 3, arguments)
    assert first[0] == 0
    assert first[2] == "wrote run.csv\n"
    assert others == [(0, "", "")] * 2
    run = measured.load("run.csv")
    assert len(run.iterations_s) == 2
    assert {(peak.pipeline, peak.stage) for peak in run.peaks} == {(0, 0), (0, 1), (1, 0)}
    played = {(ran.pipeline, str(ran.action)) for ran in run.actions}
    for p, s in ((0, 0), (0, 1), (1, 0)):
        assert {(p, f"{s}{kind}{k}") for kind in "FB" for k in range(3)} <= played
        assert (p, f"{s}UPDATE") in played
    # Layers 4 to 9 are reduced first, then 0 to 3; the first stage of pipeline 0 holds the latter only.
    assert {text for p, text in played if p == 0 and "REDUCE" in text} == {"1REDUCE_GRAD0", "0REDUCE_GRAD1"}
    table = measured.comparison_text(SPLIT, run)
    assert "forward, pipeline 0 stage 1" in table and "peak memory, pipeline 1 stage 0" in table


@pytest.mark.parametrize("engine", ["own", "torch"])
def test_a_run_goes_on_from_its_checkpoint(engine: str, here: Path) -> None:
    """Two steps by three processes, two more by one; another `--steps` in the same folder."""
    first = [
        "split.json",
        "train.py:build",
        "--steps",
        "2",
        "--checkpoint",
        "saved",
        "--every",
        "1",
        "--engine",
        engine,
    ]
    out = start(3, launch, 3, first)[0][1]
    assert [each.name for each in state.steps("saved")] == ["step-00000001", "step-00000002"]
    second = ["alone.json", "train.py:build", "--steps", "4", "--checkpoint", "saved", "--engine", engine]
    ((code, more, _),) = start(1, launch, 1, second)
    assert code == 0
    assert more.splitlines()[0] == "tiny on host: 1 pipeline, 1 stage, 1 device, from step 2 on"
    expected = reference(10, 12, tied=False, masked=False, steps=4)
    assert losses(out) | losses(more) == {n + 1: float(f"{loss:.4f}") for n, (loss, *_) in enumerate(expected)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["split.json", "train.py:build"],
            "split.json: 1 process started, the plan needs one for each of its 3 devices"
            " (torchrun --nproc-per-node 3 on a single node)",
        ),
        (["plan.json", "train.py:build"], "plan.json: no such file"),
        (["alone.json", "tain.py:build"], "tain.py: no such file; expected FILE.py:FUNCTION such as train.py:build"),
        (["alone.json", "train.py:biuld"], "train.py: function 'biuld' is not among"),
        (["alone.json", "train.py:fails"], "train.py:fails: KeyError: 'lost'"),
        (["alone.json", "train.py:number"], "train.py:number: returned int, expected a runtime.task.Task, or"),
        (["alone.json", "train.py:parts"], "train.py:parts: returned a model and its batches only, expected --steps"),
        (["alone.json", "train.py:short"], "train.py:short: the model has 9 layers, the plan 10 (tiny)"),
        (["alone.json", "train.py:build", "--steps", "0"], "--steps: 0, expected more than 0"),
        (["alone.json", "train.py:build", "--every", "2"], "--every: 2 without --checkpoint, expected a folder"),
        (["alone.json", "train.py:build", "--trace", "no/run.csv"], "--trace: there is no directory no"),
    ],
)
def test_what_cannot_run_is_not_started(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on stderr and exit code 2, before anything is built; only the first process of a node speaks."""
    assert launcher.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"runtime: {message}")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launcher.main(arguments) == 2
    assert capsys.readouterr() == ("", "")


def test_bad_data_and_bad_checkpoints_stop_the_run(here: Path) -> None:
    """One line each, exit code 2."""
    ((code, _, err),) = start(1, launch, 1, ["alone.json", "train.py:narrow"])
    assert (code, err) == (
        2,
        "runtime: rank 0: 1 samples given, rank 0 (pipeline 0 stage 0) takes 12 (Trainer.samples)\n",
    )
    (here / "saved" / "step-00000001").mkdir(parents=True)
    ((code, _, err),) = start(1, launch, 1, ["alone.json", "train.py:build", "--checkpoint", "saved"])
    assert code == 2
    assert err.startswith("runtime: rank 0: saved/step-00000001")


def die(rank: int, world: int, arguments: list[str]) -> Any:
    """The launcher, of which rank 1 ends without a word in its second step."""
    if rank == 1:
        from runtime import Trainer

        commit = Trainer._commit
        Trainer._commit = lambda self, *a: os._exit(7) if self.step_index else commit(self, *a)  # type: ignore
    return launch(rank, world, arguments)


def test_a_lost_process_ends_the_run_with_one_line(here: Path) -> None:
    """Exit code 1; the line names rank, stage and step."""
    found = start(3, die, 3, ["split.json", "train.py:build", "--timeout", "20"])
    for rank, place in ((0, "pipeline 0 stage 0"), (2, "pipeline 1 stage 0")):
        code, _, err = found[rank]
        assert code == 1
        assert err.startswith(f"runtime: rank {rank} ({place}) in the gradient sync of step 1: ")
        assert err.count("\n") == 1
    assert list(losses(found[0][1])) == [1]


def test_lost_devices_are_planned_around(tmp_path: Path) -> None:
    """`--replan PROFILE CLUSTER`: the new plan is on the devices that are left, under the names they have."""
    profile, cluster = factories.profile(num_layers=4), factories.cluster({"fast": 4}, per_node=2)
    profile.save(tmp_path / "profile.json")
    cluster.save(tmp_path / "cluster.yaml")
    plan = search(profile, cluster, Job(global_batch=8))
    options = launcher._parser().parse_args(
        ["plan.json", "train.py:build", "--replan", str(tmp_path / "profile.json"), str(tmp_path / "cluster.yaml")]
    )
    found = launcher._replanning(options, plan)["replan"](("fast-0:1", "fast-1:0", "fast-1:1"))
    assert set(found.devices) <= {"fast-0:1", "fast-1:0", "fast-1:1"}
