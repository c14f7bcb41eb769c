"""``torchrun --nproc-per-node N -m runtime plan.json train.py:build``: trains under a plan, one process per device.

``build()`` in ``train.py`` returns a `runtime.task.Task`, or a model and a function of (step, samples) for its batches.
Processes are numbered like the plan's devices in natural order of their names, so nodes have to be started in that
order; on a node, ``--nproc-per-node`` is the number of its devices in the plan. A plan of one device needs no torchrun.
`runtime.launch` starts the same processes, and unlike torchrun it leaves them alone when one is lost: ``--replan``
needs it wherever a node runs more than one process.

Prints what runs where, a line per step, and at the end the peak memory of every stage beside the predicted one.
``--trace`` writes steps, peaks, and when each action of the last step ran as a run that `hpp compare PLAN --measured
FILE` reads. Exit codes: 0 done, 1 the run stopped, 2 bad input.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import resource
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from planner import files, measured
from planner.plans import Plan, Stage, seconds, size, table
from runtime import given
from runtime.clock import Played
from runtime.groups import Disconnected, RankFailed, communication, gathered
from runtime.layout import Layout
from runtime.recover import Elastic
from runtime.task import Task
from runtime.trainer import TIMEOUT_S, Result, Trainer

if TYPE_CHECKING:
    from planner.cluster import Cluster
    from planner.profile import ModelProfile

OK, STOPPED, BAD_INPUT = 0, 1, 2
STARTED, FINISHED = "started", "finished"  # keys in the store of --replan: before the first step, after the last one


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one process; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        plan, task = _inputs(options)
        device = _device(options, plan)
    except ValueError as error:
        if _environment("LOCAL_RANK", 0) == 0:  # the others of this node see the same
            print(f"runtime: {error}", file=sys.stderr)
        return BAD_INPUT
    try:
        _connect(options, device)
        _train(options, plan, task, device)
        return OK
    except RankFailed as error:
        print(f"runtime: {error}", file=sys.stderr, flush=True)
        return STOPPED
    except ValueError as error:
        print(f"runtime: rank {_environment('RANK', 0)}: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parser(*, add_help: bool = True) -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime",
        description="Train under a plan; started once per device, by runtime.launch or torchrun.",
        add_help=add_help,
    )
    parser.add_argument("plan", metavar="PLAN", help="plan file, as of `hpp plan -o`")
    parser.add_argument("task", metavar="FILE:FUNCTION", help="function that returns a runtime.task.Task")
    parser.add_argument("--steps", type=int, metavar="N", help="steps in all, in place of the task's")
    parser.add_argument("--checkpoint", metavar="DIR", help="folder to go on from, and to save to at the end")
    parser.add_argument("--every", type=int, metavar="K", help="save every K steps too")
    parser.add_argument("--engine", choices=("own", "torch"), default="own", help="what plays the schedule")
    parser.add_argument("--schedule", default="plan", metavar="NAME", help="schedule, if not the plan's own")
    parser.add_argument("--trace", metavar="FILE", help="write when each action of the last step ran (CSV)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help="a process that does not answer for S s is lost"
    )
    parser.add_argument("--on", choices=("cpu", "cuda"), help="cuda where there is one, if not given")
    parser.add_argument(
        "--replan",
        nargs=2,
        metavar=("PROFILE", "CLUSTER"),
        help="if processes are lost, go on with a new plan for the devices that are left",
    )
    return parser


def _environment(name: str, default: int) -> int:
    """A number that torchrun gives every process."""
    return int(os.environ.get(name, default))


# Before the start


def _inputs(options: argparse.Namespace) -> tuple[Plan, Task]:
    plan = Plan.load(options.plan)
    for name in ("steps", "every", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name}: {value}, expected more than 0")
    if options.every is not None and options.checkpoint is None:
        raise ValueError(f"--every: {options.every} without --checkpoint, expected a folder to save to")
    if options.trace is not None and not Path(options.trace).parent.is_dir():
        raise ValueError(f"--trace: there is no directory {Path(options.trace).parent}")
    if options.trace is not None and Path(options.trace).is_dir():
        raise ValueError(f"--trace: {options.trace} is a directory, expected a file")
    if options.checkpoint is not None and Path(options.checkpoint).exists() and not Path(options.checkpoint).is_dir():
        raise ValueError(f"--checkpoint: {options.checkpoint} is a file, expected a directory")
    world, devices = _environment("WORLD_SIZE", 1), Layout(plan).world_size
    if world != devices:
        started = f"{world} process{'es' if world > 1 else ''} started"
        raise ValueError(
            f"{options.plan}: {started}, the plan needs one for each of its {devices} devices"
            f" (python -m runtime.launch starts them)"
        )
    if options.replan is not None and dist.is_torchelastic_launched() and _environment("LOCAL_WORLD_SIZE", 1) > 1:
        raise ValueError(
            "--replan: torchrun ends all processes of a node with the first that is lost, expected to be started by"
            " `python -m runtime.launch`, or by torchrun with one process per node"
        )
    if options.replan is not None:
        from planner.replan import check

        check(plan, *_measured(options))
    task = load_task(options.task, options.steps)
    layers = plan.blocks[-1].layers[1]
    if task.model.num_layers != layers:
        raise ValueError(
            f"{options.task}: the model has {task.model.num_layers} layers, the plan {layers} ({plan.profile_name})"
        )
    return plan, task


def load_task(where: str, steps: int | None = None) -> Task:
    """The task that ``file.py:function`` returns.

    Parameters
    ----------
    steps
        In place of the task's own; needed where the function returns a model and its batches only.

    Raises
    ------
    ValueError
        If there is no such file or function, or it returns something else.
    """
    built = given.load(where)
    if isinstance(built[0], Task):
        return built[0] if steps is None else replace(built[0], steps=steps)
    if len(built) != 2 or not callable(built[1]):
        raise ValueError(
            f"{where}: returned {', '.join(type(each).__name__ for each in built)}, expected a runtime.task.Task, or a"
            " model and a function of (step, samples) that returns inputs and targets"
        )
    if steps is None:
        raise ValueError(f"{where}: returned a model and its batches only, expected --steps beside it")
    try:
        return Task(model=given.as_model(built[0]), batch=built[1], steps=steps)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _device(options: argparse.Namespace, plan: Plan) -> torch.device:
    """What this process computes on."""
    if options.on == "cpu" or (options.on is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    count, local = torch.cuda.device_count(), _environment("LOCAL_RANK", 0)
    names = Layout(plan).devices
    node, _, planned = names[_environment("RANK", 0)].rpartition(":")
    beside = [name.rpartition(":")[2] for name in names if name.rpartition(":")[0] == node]
    # The GPU that the plan names, if this machine runs that node and shows all its planned GPUs. Otherwise GPUs in
    # turn: where CUDA_VISIBLE_DEVICES hides some, or several nodes of the plan run here, two could get the same one.
    alone = _environment("LOCAL_WORLD_SIZE", len(beside)) == len(beside)
    index = int(planned) if alone and all(each.isdigit() and int(each) < count for each in beside) else local
    if index >= count:
        seen = f"{count} GPU{'s' * (count > 1)} here, too few for process {index}" if count else "no GPU here"
        raise ValueError(f"--on: cuda, but torch finds {seen}; expected cpu, or one GPU per process")
    return torch.device("cuda", index)


def _connect(options: argparse.Namespace, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Otherwise only a thread of torch notices that a peer is gone, and ends the process without a word; with it
        # calls raise, there is no such thread, and TORCH_NCCL_ASYNC_ERROR_HANDLING, which is about it, has no effect.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    if not dist.is_initialized():
        alone = {} if "MASTER_ADDR" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        with communication(f"rank {_environment('RANK', 0)}: no connection to the others"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=options.timeout), **alone
            )


# The run


def _train(options: argparse.Namespace, plan: Plan, task: Task, device: torch.device) -> None:
    memory = _Memory(device)
    trainer_options = {
        "device": device,
        "engine": options.engine,
        "schedule": options.schedule,
        "timeout_s": options.timeout,
    }
    elastic = Elastic(
        plan,
        lambda new: task.trainer(new, **trainer_options),
        task.batch,
        checkpoint=options.checkpoint,
        every=options.every,
        timeout_s=options.timeout,
        **_replanning(options, plan),
    )
    with elastic as run:
        assert run.trainer is not None
        progress = _Progress(run, task.steps, tracing=options.trace is not None)
        progress.before(run.trainer)
        _tell(run, STARTED)
        run.run(task.steps, progress.after)
        if run.trainer is None:
            print(f"runtime: {run.me} has no part in the new plan and is done", file=sys.stderr)
            return
        _tell(run, FINISHED)
        progress.at_end(memory, options.trace)


def _tell(run: Elastic, key: str) -> None:
    """Let the launcher know how far the run is."""
    if run.store is not None:
        with suppress(RuntimeError):  # its host may be gone
            run.store.set(key, "")


def _measured(options: argparse.Namespace) -> tuple[ModelProfile, Cluster]:
    """What a new plan is made from."""
    from planner.cluster import Cluster
    from planner.profile import ModelProfile

    return ModelProfile.load(options.replan[0]), Cluster.load(options.replan[1])


def _replanning(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """What `Elastic` needs to go on without lost processes."""
    if options.replan is None:
        return {}
    from planner.replan import replan

    profile, cluster = _measured(options)
    if "MASTER_ADDR" in os.environ:
        store: dist.Store = dist.TCPStore(os.environ["MASTER_ADDR"], _environment("MASTER_PORT", 0), is_master=False)
    else:
        store = dist.HashStore()

    def without_lost(left: Sequence[str]) -> Plan:
        gone = [device.name for device in cluster.devices if device.name not in left]
        return replan(plan, profile, cluster, without=gone).plan

    return {"replan": without_lost, "store": store}


class _Progress:
    """What the first process prints and writes."""

    def __init__(self, run: Elastic, steps: int, *, tracing: bool) -> None:
        self.run, self.steps, self.tracing = run, steps, tracing
        self.recoveries = 0
        self.iterations_s: list[float] = []

    @property
    def speaks(self) -> bool:
        return dist.get_rank() == 0

    def before(self, trainer: Trainer) -> None:
        """Before the first step."""
        self._trace_last(trainer)
        if self.speaks:
            begun = f", {trainer.step_index} steps are done" if trainer.step_index else ""
            plan = trainer.plan
            counts = (("pipeline", plan.pipelines), ("stage", plan.stages), ("device", plan.devices))
            shape = ", ".join(f"{len(each)} {noun}{'s' * (len(each) > 1)}" for noun, each in counts)
            print(f"{plan.profile_name} on {plan.cluster_name}: {shape}{begun}", flush=True)
        self._places(trainer)

    def _places(self, trainer: Trainer) -> None:
        """What runs where."""
        if dist.get_world_size() > 1:
            mine = (str(dist.get_rank()), self.run.me, socket.gethostname(), str(trainer.device))
            rows = gathered(None, mine)
            if self.speaks:
                print("\n".join(table([">rank", "planned device", "host", "runs on"], rows)), flush=True)

    def after(self, trainer: Trainer, result: Result, taken: float) -> None:
        """After every step."""
        self._trace_last(trainer)
        if not self.speaks:
            return
        for recovery in self.run.recoveries[self.recoveries :]:
            later = seconds(recovery.meet_s + recovery.plan_s + recovery.move_s)
            print(f"lost {', '.join(recovery.lost)}: {recovery.failure}", flush=True)
            print(
                f"on with step {recovery.step_index + 1}, {later} later, state from the {recovery.source}", flush=True
            )
            places = (f"rank {rank} is {name}" for rank, name in enumerate(trainer.layout.devices))
            print(f"now {', '.join(places)}", flush=True)
        self.recoveries = len(self.run.recoveries)
        self.iterations_s.append(taken)
        predicted = trainer.plan.predicted.simulated_s or trainer.plan.predicted.iteration_s
        print(
            f"step {trainer.step_index}  loss {result.loss:.4f}  norm {result.norm:.4g}"
            f"  {result.num_tokens / taken:,.0f} tokens/s  {seconds(taken)} (predicted {seconds(predicted)})",
            flush=True,
        )

    def _trace_last(self, trainer: Trainer) -> None:
        trainer.tracing = self.tracing and trainer.step_index == self.steps - 1

    def at_end(self, memory: _Memory, path: str | None) -> None:
        """After the last step."""
        trainer = self.run.trainer
        assert trainer is not None
        place, stage = trainer.place, trainer.layout.stage(trainer.place)
        mine = _Account(place.pipeline, place.stage, place.tp_rank, stage, memory.peak(), trainer.trace)
        first = self.speaks
        try:
            everyone = sorted(gathered(None, mine), key=lambda each: each[:3])
        except Disconnected:  # all steps are done, with or without it
            everyone = [mine]
            print(f"runtime: {place}: a process was lost after the last step, with its peak and trace", file=sys.stderr)
        if not first:
            return
        print("\n".join(_memory_table(everyone)), flush=True)
        if path is not None and not self.iterations_s:
            print(f"runtime: all {trainer.step_index} steps were done before, {path} is not written", file=sys.stderr)
        elif path is not None:
            files.write(path, "\n".join([",".join(measured.COLUMNS), *_rows(self.iterations_s, everyone), ""]))
            print(f"wrote {path}", file=sys.stderr)


class _Account(NamedTuple):
    """What a process has to say at the end."""

    pipeline: int
    stage: int
    tp_rank: int
    planned: Stage
    peak_bytes: int
    trace: tuple[Played, ...]


def _rows(iterations_s: Sequence[float], accounts: Sequence[_Account]) -> Iterator[str]:
    """A run as `planner.measured` reads it; the first iteration, which warms up, is left out if there are others."""
    for taken in iterations_s[1:] or iterations_s:
        yield f"iteration_s,{taken:.9f},,,,,"
    for each in accounts:
        yield f"peak_bytes,{each.peak_bytes},{each.pipeline},{each.stage},,,"
    for each in accounts:
        for played in each.trace if each.tp_rank == 0 else ():
            yield f"action,,{each.pipeline},,{played.action},{played.start_s:.9f},{played.end_s:.9f}"


def _memory_table(accounts: Sequence[_Account]) -> list[str]:
    """The fullest device of every stage."""
    peaks: dict[tuple[int, int], int] = defaultdict(int)
    planned = {(each.pipeline, each.stage): each.planned for each in accounts}
    for each in accounts:
        peaks[each.pipeline, each.stage] = max(peaks[each.pipeline, each.stage], each.peak_bytes)
    rows = [
        [str(p), str(s), stage.device_type, size(peaks[p, s]), size(stage.memory.total)]
        for (p, s), stage in planned.items()
    ]
    return table([">pipeline", ">stage", "device", ">peak memory", ">predicted"], rows)


class _Memory:
    """Most memory that this process has in use from now on, with all that driver and libraries take."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def peak(self) -> int:
        if self.device.type != "cuda":
            return _resident()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device) + torch.cuda.max_memory_allocated(self.device)


def _resident() -> int:
    with suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return 1024 * int(found[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
