"""`python -m runtime`: what it prints and writes, that it goes on from a checkpoint, and what it refuses to start.
`python -m runtime.launch`: that the run outlives a killed process, or ends with it, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import factories
import pytest
import torch
import torch._dynamo  # an optimizer imports it; once here rather than in every rank
import torch.distributed as dist
from ranks import make_plan, start
from test_runtime import reference

from planner import measured
from planner.cluster import Cluster, DeviceType, Link, Node
from planner.job import Job
from planner.plans import Plan
from planner.search import plan as search
from planner.simulate import simulate
from runtime import __main__ as program
from runtime import launch, state

ROOT = Path(__file__).parent.parent
ALONE = make_plan([([10], 6)])
SPLIT = make_plan([([4, 6], 3), ([10], 3)])
TASK = """
import os
import signal

import torch
from ranks import make_batch, make_model
from runtime.task import Task


def batch(step, samples):
    if os.environ.get("RANK", "0") == os.environ.get("VICTIM") and step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
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


def process(rank: int, world: int, arguments: list[str]) -> tuple[int, str, str]:
    """One process that is connected already: exit code, stdout and stderr."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = program.main([*arguments, "--on", "cpu"])
    return code, out.getvalue(), err.getvalue()


def losses(out: str) -> dict[int, float]:
    """By step, of the lines that report them."""
    found = [STEP.fullmatch(line) for line in out.splitlines() if line.startswith("step")]
    assert all(found)
    return {int(match[1]): float(match[2]) for match in found if match}


def command(*arguments: str, timeout_s: float = 100.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command as a user gives it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
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
    first, *others = start(3, process, 3, arguments)
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
    transfers = {text for p, text in played if p == 0 and ("SEND" in text or "RECV" in text)}
    assert transfers == {f"{name}{k}" for name in ("0SEND_F", "1RECV_F", "1SEND_B", "0RECV_B") for k in range(3)}
    comparison = measured.compare(SPLIT, run, simulate(SPLIT))
    assert comparison.measured is not None, comparison.incomplete
    assert {figure.what for figure in comparison.figures} >= {"forward", "peak memory", "last backward"}


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
    out = start(3, process, 3, first)[0][1]
    assert [each.name for each in state.steps("saved")] == ["step-00000001", "step-00000002"]
    second = ["alone.json", "train.py:build", "--steps", "4", "--checkpoint", "saved", "--engine", engine]
    ((code, more, _),) = start(1, process, 1, second)
    assert code == 0
    assert more.splitlines()[0] == "tiny on host: 1 pipeline, 1 stage, 1 device, 2 steps are done"
    expected = reference(10, 12, tied=False, masked=False, steps=4)
    assert losses(out) | losses(more) == {n + 1: float(f"{loss:.4f}") for n, (loss, *_) in enumerate(expected)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["split.json", "train.py:build"],
            "split.json: 1 process started, the plan needs one for each of its 3 devices"
            " (python -m runtime.launch starts them)",
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
        (["alone.json", "train.py:build", "--trace", "."], "--trace: . is a directory, expected a file"),
        (["alone.json", "train.py:build", "--checkpoint", "alone.json"], "--checkpoint: alone.json is a file"),
        (["alone.json", "train.py:build", "--timeout", "inf"], "--timeout: inf, expected more than 0"),
        (["alone.json", "train.py:build", "--replan", "profile.json", "no.yaml"], "no.yaml: no such file"),
        (
            ["alone.json", "train.py:build", "--replan", "profile.json", "nodes.yaml"],
            "device 'host:0' of the plan is not in cluster host",
        ),
        (["alone.json", "train.py:build", "--on", "cuda"], "--on: cuda, but torch finds no GPU here; expected cpu"),
    ],
)
def test_what_cannot_run_is_not_started(
    arguments: list[str],
    message: str,
    replannable: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line on stderr and exit code 2, before anything is built; only the first process of a node speaks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert program.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"runtime: {message}")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert program.main(arguments) == 2
    assert capsys.readouterr() == ("", "")


def test_bad_data_and_bad_checkpoints_stop_the_run(here: Path) -> None:
    """One line each, exit code 2."""
    ((code, _, err),) = start(1, process, 1, ["alone.json", "train.py:narrow"])
    assert (code, err) == (
        2,
        "runtime: rank 0: inputs: 1 samples given, rank 0 (pipeline 0 stage 0) takes 12 (Trainer.samples)\n",
    )
    (here / "saved" / "step-00000001").mkdir(parents=True)
    ((code, _, err),) = start(1, process, 1, ["alone.json", "train.py:build", "--checkpoint", "saved"])
    assert code == 2
    assert err.startswith("runtime: rank 0: saved/step-00000001")


def die(rank: int, world: int, arguments: list[str]) -> Any:
    """One process; rank 1 ends without a word in its second step."""
    if rank == 1:
        from runtime import Trainer

        commit = Trainer._commit
        Trainer._commit = lambda self, *a: os._exit(7) if self.step_index else commit(self, *a)  # type: ignore
    return process(rank, world, arguments)


def test_a_lost_process_ends_the_run_with_one_line(here: Path) -> None:
    """Exit code 1; the line names rank, stage, what it was about to do, and the step."""
    found = start(3, die, 3, ["split.json", "train.py:build", "--timeout", "20"], lost={1})
    for rank, place in ((0, "pipeline 0 stage 0"), (2, "pipeline 1 stage 0")):
        code, _, err = found[rank]
        assert code == 1
        assert err.startswith(
            f"runtime: rank {rank} ({place}) in the commit, the exchange of loss and norm of step 2: "
        )
        assert err.count("\n") == 1
    assert list(losses(found[0][1])) == [1]


def test_lost_devices_are_planned_around(tmp_path: Path) -> None:
    """`--replan PROFILE CLUSTER`: the new plan is on the devices that are left, under the names they have."""
    profile, cluster = factories.profile(num_layers=4), factories.cluster({"fast": 4}, per_node=2)
    profile.save(tmp_path / "profile.json")
    cluster.save(tmp_path / "cluster.yaml")
    plan = search(profile, cluster, Job(global_batch=8))
    options = program.parser().parse_args(
        ["plan.json", "train.py:build", "--replan", str(tmp_path / "profile.json"), str(tmp_path / "cluster.yaml")]
    )
    found = program._replanning(options, plan)["replan"](("fast-0:1", "fast-1:0", "fast-1:1"))
    assert set(found.devices) <= {"fast-0:1", "fast-1:0", "fast-1:1"}


# The launcher


def on_nodes(plan: Plan, **nodes: int) -> tuple[Plan, Cluster]:
    """A plan of ``host:0``, ``host:1`` ... moved to the devices of some nodes, and the cluster that they make."""
    link = Link(alpha_s=1e-5, bytes_per_s=1e10)
    cluster = Cluster(
        name="host",
        device_types=(DeviceType(name="cpu", memory_bytes=1 << 36),),
        nodes=tuple(Node(name=name, devices=("cpu",) * count, link=link) for name, count in nodes.items()),
    )
    names = {f"host:{rank}": device.name for rank, device in enumerate(cluster.devices)}
    pipelines = tuple(
        replace(
            each,
            stages=tuple(replace(stage, devices=tuple(names[n] for n in stage.devices)) for stage in each.stages),
        )
        for each in plan.pipelines
    )
    return replace(plan, pipelines=pipelines), cluster


@pytest.fixture
def replannable(here: Path) -> Path:
    """The directory, with what a new plan is made from beside the plans."""
    factories.profile(num_layers=10, speeds={"cpu": 1.0}, micro_batches=(1, 2)).save(here / "profile.json")
    on_nodes(SPLIT, host=3)[1].save(here / "cluster.yaml")
    plan, cluster = on_nodes(make_plan([([10], 3), ([10], 3)]), a=1, b=1)
    plan.save(here / "nodes.json")
    cluster.save(here / "nodes.yaml")
    return here


def left_of(mark: str) -> list[int]:
    """Processes that were started with a mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def test_a_run_outlives_a_killed_process(replannable: Path) -> None:
    """Rank 1 of three is killed in the second step: the others say so, find a new plan, and finish with the losses of
    an undisturbed run."""
    mark = f"LAUNCHED={replannable}"
    done = command(
        *("-m", "runtime.launch", "split.json", "train.py:build", "--replan", "profile.json", "cluster.yaml"),
        VICTIM="1",
        LAUNCHED=str(replannable),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "runtime.launch: the process of host:1 was ended by SIGKILL\n"
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny on host: 2 pipelines, 3 stages, 3 devices"
    assert lines[1].split() == ["rank", "planned", "device", "host", "runs", "on"]
    assert [line.split() for line in lines[2:5]] == [
        [str(n), f"host:{n}", socket.gethostname(), "cpu"] for n in range(3)
    ]
    assert lines[6].startswith("lost host:1: rank 0 (pipeline 0 stage 0) at 0")
    assert re.fullmatch(r"on with step 2, .* later, state from the replicas", lines[7])
    assert lines[8] == "now rank 0 is host:0, rank 1 is host:2"
    expected = reference(10, 12, tied=False, masked=False, steps=3)
    found = {int(match[1]): match[2] for match in re.finditer(r"^step (\d+)  loss ([\d.]+) ", done.stdout, re.M)}
    assert found == {n + 1: f"{loss:.4f}" for n, (loss, *_) in enumerate(expected)}
    assert left_of(mark) == []


def ends_late(rank: int, world: int, arguments: list[str]) -> Any:
    """One process; rank 1 ends when all steps are done, before it says what its peak is."""
    if rank == 1:
        program._Memory.peak = lambda self: os._exit(7)  # type: ignore
    return process(rank, world, arguments)


def test_a_loss_after_the_last_step_leaves_the_run_done(here: Path) -> None:
    """Exit code 0, what the first process knows is printed and written, and one line says what is lost."""
    arguments = ["split.json", "train.py:build", "--timeout", "20", "--trace", "run.csv"]
    found = start(3, ends_late, 3, arguments, lost={1})
    for code, _, err in (found[0], found[2]):
        assert code == 0
        assert "a process was lost after the last step, with its peak and trace" in err
    assert list(losses(found[0][1])) == [1, 2, 3]
    assert {ran.action.stage for ran in measured.load("run.csv").actions} == {0}


def test_no_step_leaves_no_trace(here: Path) -> None:
    """A run that was done before does not replace the trace of its steps by an empty one."""
    arguments = ["alone.json", "train.py:build", "--checkpoint", "saved", "--trace", "run.csv"]
    assert start(1, process, 1, arguments)[0][0] == 0
    written = Path("run.csv").read_text()
    ((code, out, err),) = start(1, process, 1, arguments)
    assert (code, err) == (0, "runtime: all 3 steps were done before, run.csv is not written\n")
    assert "3 steps are done" in out
    assert Path("run.csv").read_text() == written


def launched(rank: int, *machines: tuple[list[str], dict[str, str]]) -> tuple[int, str, str]:
    """The launcher of one machine: exit code, and what it and its processes wrote."""
    arguments, variables = machines[rank]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    os.environ |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    texts = []
    for descriptor, name in ((1, f"out{rank}"), (2, f"err{rank}")):
        with Path(name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
        texts.append(Path(name))
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    code = launch.main(arguments)
    return code, *(text.read_text() for text in texts)


def test_without_a_way_to_plan_a_killed_process_ends_the_run(here: Path) -> None:
    """Exit code 1; the launcher says who was killed, the other process where it noticed; nothing is left."""
    make_plan([([4, 6], 6)]).save(here / "two.json")
    ((code, out, err),) = start(
        1, launched, (["two.json", "train.py:build"], {"VICTIM": "1", "LAUNCHED": str(here)}), limit_s=100.0
    )
    assert code == 1
    assert list(losses(out)) == [1]
    killed, noticed = sorted(err.splitlines(), key=lambda line: not line.startswith("runtime.launch"))
    assert killed == "runtime.launch: the process of host:1 was ended by SIGKILL"
    assert noticed.startswith("runtime: rank 0 (pipeline 0 stage 0) at 0")
    assert left_of(f"LAUNCHED={here}") == []


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_every_machine_has_its_launcher(replannable: Path) -> None:
    """Two nodes; the process of the second is killed. The first, which hosts the store, finishes alone."""
    common = ["nodes.json", "train.py:build", "--replan", "profile.json", "nodes.yaml", "--store"]
    common.append(f"127.0.0.1:{free_port()}")
    machines = [([*common, "--node", node], {"VICTIM": "1", "LAUNCHED": str(replannable)}) for node in "ba"]
    second, first = start(2, launched, *machines, limit_s=100.0)
    assert first[0] == 0, first[2]
    assert "lost b:0: " in first[1]
    expected = reference(10, 12, tied=False, masked=False, steps=3)
    found = {int(match[1]): match[2] for match in re.finditer(r"^step (\d+)  loss ([\d.]+) ", first[1], re.M)}
    assert found == {n + 1: f"{loss:.4f}" for n, (loss, *_) in enumerate(expected)}
    assert second[0] == 1
    assert second[2].endswith("runtime.launch: the process of b:0 was ended by SIGKILL\n")
    assert left_of(f"LAUNCHED={replannable}") == []


def test_the_store_outlives_the_other_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is done at once, one is silent from the start, one beats for 3 s and is done: the wait is for that one."""
    monkeypatch.setattr(launch, "SILENT_S", 2.5)
    store = dist.HashStore()
    store.set("launcher done done", "")

    def beats() -> None:
        for _ in range(30):
            store.add("launcher busy", 1)
            time.sleep(0.1)
        store.set("launcher busy done", "")

    thread = threading.Thread(target=beats)
    thread.start()
    launch._outlive(store, ["done", "silent", "busy"])
    assert store.check(["launcher busy done"])
    thread.join()


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen(["sleep", "1000"])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {helper.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(float(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def stubborn(folder: Path, **lives_s: float) -> launch.Commands:
    """Processes that do not end when told, and have started others."""
    arguments = [sys.executable, "-S", "-c", STUBBORN]
    return {name: ([*arguments, str(folder / name), str(s)], dict(os.environ)) for name, s in lives_s.items()}


def pids(folder: Path, *names: str) -> Iterator[int]:
    """Of these processes and what they started, once all are there."""
    while not all((folder / name).exists() for name in names):
        time.sleep(0.05)
    for name in names:
        yield from map(int, (folder / name).read_text().split())


def gone(pid: int) -> bool:
    """Whether a process has ended, for which one that was just killed may need a moment."""
    for _ in range(100):
        try:
            ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            ended = True
        if ended:
            return True
        time.sleep(0.1)
    return False


class Told:
    """A run that is as far as it was told, and keeps who was lost."""

    def __init__(self, *reached: str) -> None:
        self.lost: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.reached = set(reached)

    def names(self) -> list[str | None]:
        return [self.lost.get() for _ in range(self.lost.qsize())]


def test_outside_the_steps_nobody_waits_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first there is nothing to go on with, and the others would wait for their timeout; after the last one
    a process that hangs is ended."""
    for name, value in (("GRACE_S", 0.5), ("BEAT_S", 0.1), ("LEAVE_S", 0.5)):
        monkeypatch.setattr(launch, name, value)

    def work(rank: int, folder: str, first_s: float, *reached: str) -> Any:
        (tmp_path / folder).mkdir()
        code = launch.supervise(stubborn(tmp_path / folder, a=first_s, b=1000.0), Told(*reached), survive=True)
        return code, [gone(pid) for pid in pids(tmp_path / folder, "a", "b")]

    assert start(1, work, "before", 1.0) == [(1, [True] * 4)]
    assert start(1, work, "after", 1000.0, launch.STARTED, launch.FINISHED) == [(0, [True] * 4)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also processes that ignore it, and what they started."""
    monkeypatch.setattr(launch, "GRACE_S", 0.5)

    def work(rank: int) -> Any:
        seen: list[int] = []

        def press() -> None:
            seen.extend(pids(tmp_path, "a", "b"))
            os.kill(os.getpid(), number)

        threading.Thread(target=press).start()
        code = launch.supervise(stubborn(tmp_path, a=1000.0, b=1000.0), Told(), survive=True)
        return code, [gone(pid) for pid in seen]

    assert start(1, work) == [(128 + number, [True] * 4)]


def test_the_first_failure_ends_the_others_unless_they_may_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends by a signal: the other is ended after a grace, or left to finish; both are reported once lost."""
    monkeypatch.setattr(launch, "GRACE_S", 0.5)

    def work(rank: int, survive: bool, long_s: float) -> Any:
        folder = tmp_path / str(survive)
        folder.mkdir()
        told = Told(launch.STARTED)
        code = launch.supervise(stubborn(folder, a=0.0, b=long_s), told, survive=survive)
        return code, told.names(), [gone(pid) for pid in pids(folder, "a", "b")]

    assert start(1, work, False, 1000.0) == [(1, ["a"], [True] * 4)]
    assert start(1, work, True, 2.0) == [(1, ["a", "b"], [True] * 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan.json"], "plan.json: no such file"),
        (["nodes.json", "--node", "c"], "--node: 'c' is not among"),
        (["nodes.json", "--node", "b"], "--node: without --store, expected HOST:PORT of the machine that is a"),
        (["nodes.json", "--node", "b", "--store", "a"], "--store: 'a', expected HOST:PORT such as 10.0.0.1:29500"),
        (["nodes.json", "--node", "a", "--store", "127.0.0.1:{port}"], "--store: no store at port {port}: "),
    ],
)
def test_what_cannot_be_launched_is_not(
    arguments: list[str], message: str, replannable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr and exit code 2; the last port is in use."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        plan, *others = (each.format(port=port) for each in arguments)
        assert launch.main([plan, "train.py:build", *others]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"runtime.launch: {message.format(port=port)}")


def test_torchrun_with_several_processes_cannot_replan(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent would end the survivors: one line that names what to use, before anything is built."""
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert program.main(["split.json", "train.py:build", "--replan", "profile.json", "cluster.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("runtime: --replan: torchrun ends all processes of a node with the first that is lost")
    assert "`python -m runtime.launch`" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("count", "rank", "local", "beside", "expected"),
    [
        (4, 3, 1, 2, 3),  # b:3 is the second process of node b, which has GPUs 0 to 3
        (2, 3, 1, 2, 1),  # of which CUDA_VISIBLE_DEVICES shows two: b:2 and b:3 take them in turn
        (3, 2, 0, 2, 0),  # of which it shows three: b:2 would be there, b:3 not
        (4, 2, 2, 4, 2),  # all four processes are on one machine: a:0 and b:2 are not told apart by their numbers
        (1, 3, 1, 2, None),  # two processes, one GPU
    ],
)
def test_a_process_computes_on_its_planned_gpu(
    count: int, rank: int, local: int, beside: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is there; GPUs in turn otherwise."""
    plan, _ = on_nodes(make_plan([([10], 3)] * 4), a=2, b=4)
    moved = {"a:0": "a:0", "a:1": "a:1", "b:0": "b:2", "b:1": "b:3"}
    stages = [replace(stage, devices=tuple(moved[name] for name in stage.devices)) for stage in plan.stages]
    plan = replace(
        plan,
        pipelines=tuple(replace(each, stages=(stage,)) for each, stage in zip(plan.pipelines, stages, strict=True)),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name, value in (("RANK", rank), ("LOCAL_RANK", local), ("LOCAL_WORLD_SIZE", beside)):
        monkeypatch.setenv(name, str(value))
    options = program.parser().parse_args(["plan.json", "train.py:build"])
    if expected is None:
        with pytest.raises(ValueError, match="torch finds 1 GPU here, too few for process 1"):
            program._device(options, plan)
    else:
        assert program._device(options, plan) == torch.device("cuda", expected)
