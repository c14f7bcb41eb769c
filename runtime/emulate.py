"""Mixed clusters on one machine: slow devices by sleeping, slow links by network namespaces.

    mixed = Emulation(groups=(Group(device_type="fast", count=2, forward_s=0.005, backward_s=0.010),
                              Group(device_type="slow", count=2, forward_s=0.015, backward_s=0.030)))
    plan = planner.plan(mixed.profile(model, sample), mixed.cluster, job)
    run = mixed.run(plan, profile, model, batch, steps=5)
    run.step_s                                     beside plan.predicted.simulated_s

Every rank runs the real model, which has to be small, and sleeps after each layer until the layer's stated time is
over. Sleeping takes no processor time, so a few ranks per core run beside each other undisturbed; an action should last
15 ms or more. `Network` gives each rank a network namespace of its own on a bridge, shaped in both directions by tbf;
it needs root. Without it the ranks talk over loopback, whose rate is not stated but what the machine gives.
"""

from __future__ import annotations

import ctypes
import gc
import io
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.job import BytesPerParameter, Job
from planner.plans import Plan
from planner.profile import Cell, Conditions, LayerKind, ModelProfile
from runtime.clock import Played
from runtime.layout import Layout, Place
from runtime.model import Model, Stage, as_tuple, build_layer
from runtime.trainer import Trainer

GIB = 1 << 30
ALPHA_S = 1e-3  # from one Python process to another, which has to be woken: about that in a trace
LOOPBACK = Link(alpha_s=ALPHA_S, bytes_per_s=1e9)  # small beside padded layers, whatever it is
PAYLOAD = 1448 / 1514  # bytes of data in a full Ethernet frame, which tbf counts whole
BURST_BYTES, BURST_S = 16 << 10, 1e-3  # larger bursts let whole activations pass unshaped, smaller ones lose rate
QUEUE_MS = 400
LEAVE_S = 2.0  # that a rank has to end once it answered
NEWEST = 0.3  # weight of the last backward pass in the estimate of a layer's real work
Batch = Callable[[int], tuple[Any, Any]]


# Slow devices


class Pace:
    """Holds the layers of a stage to stated times; made by `pace`.

    Within an action every layer has a time at which it is due, counted from the action's start, so that what one layer
    oversleeps the next makes up for. Backward, gradients reach a layer's output first: it sleeps there, for its time
    less what its real work took lately, so that its parameters' hooks fire at the end, as on a slow device. A
    recomputed layer takes its forward time again.

    Attributes
    ----------
    late_s
        Most by which a layer missed its due time since this was last set to 0: real work takes longer than stated, or
        other work on the machine held the process up.
    """

    def __init__(self, stage: Stage, forward_s: Mapping[int, float], backward_s: Mapping[int, float]) -> None:
        self.late_s = 0.0
        self.last = stage.end - 1
        self.forward_s, self.backward_s = forward_s, backward_s
        self.due = 0.0
        self.in_backward = False
        self.started = False  # a backward pass at the loss, before it comes to the last layer
        self.loss_s = 0.0  # what the loss takes after the last layer
        self.begun = dict.fromkeys(forward_s, 0.0)
        self.spent: dict[int, float] = {}  # in the last backward pass
        self.real: dict[int, float] = {}  # estimate over the backward passes so far
        self.handles = [stage.register_forward_pre_hook(self._start)]
        for l in range(stage.first, stage.end):
            self.handles.append(stage.layers[str(l)].register_forward_pre_hook(self._recompute(l)))
            self.handles.append(stage.layers[str(l)].register_forward_hook(self._forward(l)))
            self.handles += [p.register_post_accumulate_grad_hook(self._measure(l)) for _, p in stage.parameters_of(l)]

    def around(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """The loss as a part of the last layer, whose time it then takes from."""

        def inside(output: Any, targets: Any) -> Tensor:
            began = time.perf_counter()
            value: Tensor = _with_mark(loss(output, targets), self._start_backward)
            self.loss_s += NEWEST * (time.perf_counter() - began - self.loss_s)
            return value

        return inside

    def close(self) -> None:
        """Let the layers run as fast as they can."""
        for handle in self.handles:
            handle.remove()

    def _start(self, *_: Any) -> None:
        self.due, self.in_backward = time.perf_counter(), False

    def _recompute(self, l: int) -> Callable[[nn.Module, Any], None]:
        """Before a layer that runs in the backward pass: it may stop early, once it has what was dropped."""

        def before(*_: Any) -> None:
            if self.in_backward:
                self.due += self.forward_s[l]
                self._sleep(l)

        return before

    def _forward(self, l: int) -> Callable[[nn.Module, Any, Any], Any]:
        def after(_: nn.Module, arguments: Any, output: Any) -> Any:
            if not self.in_backward:
                self.due += self.forward_s[l]
                self._sleep(l)
            return _with_mark(output, lambda: self._backward(l))

        return after

    def _start_backward(self) -> None:
        self.due, self.in_backward, self.started = time.perf_counter(), True, True

    def _backward(self, l: int) -> None:
        if l == self.last and not self.started:
            self._start_backward()
        self.started = False
        if l in self.spent:
            spent = self.spent.pop(l)
            self.real[l] = self.real.get(l, spent) * (1 - NEWEST) + spent * NEWEST
        self.due += self.backward_s[l]
        self._sleep(l)

    def _sleep(self, l: int) -> None:
        """Until the layer is due; backward, until its real work has to begin."""
        ahead = self.real.get(l, 0.0) if self.in_backward else self.loss_s if l == self.last else 0.0
        until = self.due - ahead
        left = until - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self.begun[l] = time.perf_counter()
        self.late_s = max(self.late_s, self.begun[l] - until)

    def _measure(self, l: int) -> Callable[[Tensor], None]:
        def after(_: Tensor) -> None:
            if self.in_backward:
                self.spent[l] = time.perf_counter() - self.begun[l]

        return after


def pace(stage: Stage, forward_s: Mapping[int, float], backward_s: Mapping[int, float]) -> Pace:
    """Make every layer of a stage take its stated time, if its real work takes less.

    Parameters
    ----------
    forward_s, backward_s
        Seconds by layer of the model.
    """
    return Pace(stage, forward_s, backward_s)


class _Mark(torch.autograd.Function):
    """Identity over tensors; calls when their gradients arrive."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return (None, *gradients)


def _with_mark(output: Any, call: Callable[[], None]) -> Any:
    """A layer's output, of which gradients are announced."""
    tensors = as_tuple(output)
    which = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
    if not which:
        return output
    marked = dict(zip(which, _Mark.apply(call, *(tensors[n] for n in which)), strict=True))
    out = tuple(marked.get(n, tensor) for n, tensor in enumerate(tensors))
    return out if isinstance(output, tuple) else out[0]


# Slow links


class Network:
    """A network namespace for every rank, all on one bridge; what a rank sends and receives is shaped. A context.

    Parameters
    ----------
    bytes_per_s
        Rate of every rank's port in either direction, in bytes of data; None leaves it unshaped.
    """

    def __init__(self, bytes_per_s: Sequence[float | None]) -> None:
        refusal = Network.refusal()
        if refusal is not None:
            raise ValueError(f"links cannot be shaped here: {refusal}")
        self.rates = tuple(bytes_per_s)
        self.name = f"hpp{os.getpid()}"

    @staticmethod
    @cache
    def refusal() -> str | None:
        """Why this process cannot shape links; None if it can."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            return f"no {' and no '.join(missing)} on the path (iproute2)"
        name = f"hpp{os.getpid()}try"
        try:
            _ip(f"netns add {name}")
            _run(f"tc -n {name} qdisc replace dev lo root tbf rate 1mbit burst {BURST_BYTES} latency {QUEUE_MS}ms")
        except OSError as error:
            return str(error)
        finally:
            _ip(f"netns del {name}", check=False)
        return None

    def __enter__(self) -> Network:
        _sweep()
        try:
            _ip(f"link add {self.name}b type bridge", f"link set {self.name}b up")
            for rank, rate in enumerate(self.rates):
                self._add(rank, rate)
        except OSError:
            self.close()
            raise
        return self

    def _add(self, rank: int, rate: float | None) -> None:
        space, port = self._space(rank), self._port(rank)
        _ip(
            f"netns add {space}",
            f"link add {port} type veth peer name e0 netns {space}",
            f"link set {port} master {self.name}b up",
            f"-n {space} addr add 10.77.{rank // 250}.{rank % 250 + 1}/16 dev e0",
            f"-n {space} link set e0 up",
            f"-n {space} link set lo up",
        )
        if rate is not None:
            burst = max(BURST_BYTES, round(rate * BURST_S))
            shape = f"root tbf rate {round(8 * rate / PAYLOAD)}bit burst {burst} latency {QUEUE_MS}ms"
            _run(f"tc -n {space} qdisc replace dev e0 {shape}")
            _run(f"tc qdisc replace dev {port} {shape}")
            _ip(f"-n {space} link set e0 gso_max_size {burst // 4}")  # else split again

    def enter(self, rank: int) -> None:
        """Move this process into a rank's namespace; before it opens any socket."""
        libc = ctypes.CDLL(None, use_errno=True)
        space = os.open(f"/var/run/netns/{self._space(rank)}", os.O_RDONLY)
        try:
            if libc.setns(space, 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(space)
        os.environ["GLOO_SOCKET_IFNAME"] = "e0"

    def close(self) -> None:
        """Remove namespaces, ports and bridge."""
        for rank in range(len(self.rates)):
            _ip(f"link del {self._port(rank)}", f"netns del {self._space(rank)}", check=False)
        _ip(f"link del {self.name}b", check=False)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _space(self, rank: int) -> str:
        return f"{self.name}n{rank}"

    def _port(self, rank: int) -> str:
        return f"{self.name}p{rank}"


def _sweep() -> None:
    """Remove what processes that were killed have left."""
    folder = Path("/var/run/netns")
    for path in folder.iterdir() if folder.is_dir() else ():
        found = re.fullmatch(r"hpp(\d+)n(\d+)", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _ip(f"link del hpp{found[1]}p{found[2]}", f"netns del {path.name}", check=False)
            _ip(f"link del hpp{found[1]}b", check=False)


def _ip(*commands: str, check: bool = True) -> None:
    for command in commands:
        _run(f"ip {command}", check)


def _run(command: str, check: bool = True) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"{command}: {' '.join(done.stderr.split())}")


# Ranks


def start(
    world: int,
    work: Callable[..., Any],
    *arguments: Any,
    network: Network | None = None,
    punctual: bool = False,
    lost: Collection[int] = (),
    limit_s: float = 60.0,
) -> list[Any]:
    """What ``work(rank, *arguments)`` returns on each of `world` forked ranks, with torch.distributed up over gloo.

    Parameters
    ----------
    punctual
        Give ranks precedence over other processes, where allowed (root). For ranks that mostly sleep, and should wake
        when they mean to on a busy machine as well.
    lost
        Ranks that have to end without an answer, None in its place. Any other rank has to answer.

    Raises
    ------
    RuntimeError
        Of every rank that failed: its traceback, or how it ended. Ranks that are not done after `limit_s` seconds are
        killed.
    """
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # loads, once for all ranks, what takes an optimizer seconds to load
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world):
                ranks.append(_Rank(limit_s, _run_rank, rank, world, folder, network, punctual, work, arguments))
            answers = [each.answer(lost=rank in lost) for rank, each in enumerate(ranks)]
        finally:
            for each in ranks:
                each.end()
    failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(answers) if failure is not None]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [value for _, value in answers]


class _Rank:
    """A forked process, and the pipe that its answer comes through."""

    def __init__(self, limit_s: float, target: Callable[..., None], *arguments: Any) -> None:
        self.limit_s, self.until = limit_s, time.monotonic() + limit_s
        context = multiprocessing.get_context("fork")
        # The far end is closed here before the next fork, so that no other rank holds it open and its end is seen.
        self.pipe, far = context.Pipe(duplex=False)
        self.process = context.Process(target=target, args=(far, *arguments))
        self.process.start()
        far.close()

    def answer(self, *, lost: bool) -> tuple[str | None, Any]:
        """What went wrong, if anything did, and what the rank returned."""
        if not self.pipe.poll(max(0.0, self.until - time.monotonic())):
            self.process.kill()
            return f"no answer within {self.limit_s:g} s", None
        try:
            failure, value = torch.load(io.BytesIO(self.pipe.recv_bytes()), weights_only=False)
        except (EOFError, OSError):  # it ended before or within its answer
            self.process.join(LEAVE_S)
            return None if lost else f"ended without an answer, {_ending(self.process.exitcode)}", None
        if lost and failure is None:
            failure = "answered, but was to be lost"
        return failure, value

    def end(self) -> None:
        """Leave no process and no pipe."""
        self.process.join(LEAVE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self.pipe.close()


def _ending(code: int | None) -> str:
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _run_rank(
    pipe: Any,
    rank: int,
    world: int,
    folder: str,
    network: Network | None,
    punctual: bool,
    work: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    gc.freeze()  # what came with the fork is not searched again and again
    torch.set_num_threads(1)
    if punctual:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        if network is not None:
            network.enter(rank)
        connect(Path(folder) / "store", rank, world)
        dist.barrier()  # a rank that leaves at once must not break the connecting of another
        pipe.send_bytes(_packed(None, work(rank, *arguments)))
    except BaseException:
        pipe.send_bytes(_packed(traceback.format_exc(), None))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    os._exit(0)  # no exit handlers of the parent


def _packed(failure: str | None, value: Any) -> bytes:
    """Whole bytes: a pipe would send tensors as handles of memory that goes with the rank."""
    buffer = io.BytesIO()
    torch.save((failure, value), buffer)
    return buffer.getvalue()


def connect(store: Path, rank: int, world: int, timeout_s: float = 30.0) -> None:
    """Join the ranks that meet at a file."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)


# Clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal devices, each a node of its own.

    Parameters
    ----------
    forward_s, backward_s
        Seconds of a layer of relative cost 1 for one sample.
    memory_bytes
        Of each device: what the planner may fill. Nothing enforces it in a run.
    bytes_per_s
        Rate of each device's network port; None for loopback, unshaped.
    """

    device_type: str
    count: int
    forward_s: float
    backward_s: float
    memory_bytes: int = GIB
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan as it ran.

    Parameters
    ----------
    steps_s
        Seconds of every step after the first, from the common start to the last rank's update.
    losses
        Of every step, the first as well.
    traces
        Actions of the last step by place.
    late_s
        Most by which a layer of any rank missed its stated time, see `Pace`; of the steps of `steps_s`.
    """

    steps_s: tuple[float, ...]
    losses: tuple[float, ...]
    traces: tuple[tuple[Place, tuple[Played, ...]], ...]
    late_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Median step."""
        return statistics.median(self.steps_s)


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """An emulated cluster: what the planner is told of it, and plans run on it.

    Parameters
    ----------
    groups
        The devices, by type.
    costs
        Time of a layer by its kind (class name in lower case), relative to the groups' times; 1 for those left out.
    """

    groups: tuple[Group, ...]
    costs: tuple[tuple[str, float], ...] = ()
    name: str = "emulated"

    @property
    def shaped(self) -> bool:
        """Whether running it needs a `Network`."""
        return any(group.bytes_per_s is not None for group in self.groups)

    @cached_property
    def cluster(self) -> Cluster:
        """For the planner."""
        links = []
        for i, a in enumerate(self.groups):
            for b in self.groups[i:]:
                rates = [rate for rate in (a.bytes_per_s, b.bytes_per_s) if rate is not None]
                link = Link(alpha_s=ALPHA_S, bytes_per_s=min(rates)) if rates else LOOPBACK
                links.append(NetworkLink(between=(a.device_type, b.device_type), link=link))
        return Cluster(
            name=self.name,
            device_types=tuple(DeviceType(name=g.device_type, memory_bytes=g.memory_bytes) for g in self.groups),
            nodes=tuple(
                Node(name=f"{group.device_type}-{n}", devices=(group.device_type,))
                for group in self.groups
                for n in range(group.count)
            ),
            links=tuple(links),
        )

    def profile(
        self, model: Model, sample: Tensor, micro_batches: Sequence[int] = (1,), name: str = ""
    ) -> ModelProfile:
        """Stated times and real sizes of a model's layers.

        Parameters
        ----------
        sample
            Input of one sample, with its batch dimension.
        micro_batches
            Sizes that are stated; times grow in proportion.
        """
        found: list[LayerKind] = []
        kinds: dict[LayerKind, LayerKind] = {}
        for layer, output in _layers(model, as_tuple(sample)):
            kind = _kind(layer, output)
            kinds[kind] = _named(kind, found, kinds)
            found.append(kinds[kind])
        costs, known = dict(self.costs), {kind.name for kind in found}
        unknown = sorted(set(costs) - known)
        if unknown:
            kinds_known = ", ".join(sorted(known))
            raise ValueError(f"costs: {unknown[0]!r} is not among the model's kinds of layers: {kinds_known}")
        cells = [
            Cell(
                kind=kind.name,
                device_type=group.device_type,
                tp=1,
                micro_batch=b,
                forward_s=group.forward_s * costs.get(kind.name, 1.0) * b,
                backward_s=group.backward_s * costs.get(kind.name, 1.0) * b,
                activation_bytes=0,
            )
            for kind in dict.fromkeys(found)
            for group in self.groups
            for b in micro_batches
        ]
        return ModelProfile(
            name=name or f"{model.num_layers} layers",
            layers=tuple(kind.name for kind in found),
            kinds=tuple(dict.fromkeys(found)),
            cells=tuple(cells),
            conditions=Conditions(dtype="fp32", timer="stated", source="runtime.emulate"),
        )

    def job(self, global_batch: int, **fields: Any) -> Job:
        """fp32 and Adam on devices that hold nothing but the model's state."""
        defaults = {
            "bytes_per_parameter": BytesPerParameter(weights=4, gradients=4, optimizer=8),
            "recompute": False,
            "memory_margin": 0.0,
            "context_bytes": 0,
            "sync_buffer_bytes": 0,
        }
        return Job(global_batch=global_batch, **{**defaults, **fields})

    def run(
        self, plan: Plan, profile: ModelProfile, model: Model, batch: Batch, *, steps: int = 3, **options: Any
    ) -> Run:
        """Train under a plan on ranks of this machine: one step to warm up, then `steps` that count.

        Parameters
        ----------
        batch
            Step -> inputs and targets of the whole global batch.
        options
            For the `Trainer`.
        """
        layout = Layout(plan)
        limit_s = 60.0 + 5.0 * (steps + 1) * (plan.predicted.simulated_s or plan.predicted.iteration_s)
        work = (_train, layout, profile, model, batch, steps, options)
        with self.network(layout) as network:
            ranks = start(layout.world_size, *work, network=network, punctual=True, limit_s=limit_s)
        return _as_run(layout, ranks)

    def network(self, layout: Layout) -> AbstractContextManager[Network | None]:
        """The links of a plan's ranks; None, over loopback, where no port's rate is stated."""
        if not self.shaped:
            return nullcontext()
        rates = {group.device_type: group.bytes_per_s for group in self.groups}
        return Network([rates[layout.stage(place).device_type] for place in layout.places])


@dataclass(frozen=True, slots=True)
class _Row:
    begun_s: float
    ended_s: float
    loss: float
    late_s: float


def _train(
    rank: int,
    layout: Layout,
    profile: ModelProfile,
    model: Model,
    batch: Batch,
    steps: int,
    options: Mapping[str, Any],
) -> tuple[list[_Row], tuple[Played, ...]]:
    with Trainer(layout.plan, model, **options) as trainer:
        held = pace_as_stated(trainer, profile)
        rows = []
        for step in range(steps + 1):
            trainer.tracing = step == steps
            inputs, targets = batch(step)
            part = slice(trainer.samples.start, trainer.samples.stop)
            x = tuple(each[part] for each in as_tuple(inputs)) if trainer.is_first else None
            y = tuple(each[part] for each in as_tuple(targets)) if trainer.is_last else None
            dist.barrier()
            held.late_s, begun = 0.0, time.perf_counter()
            result = trainer.step(x, y)
            rows.append(_Row(begun, time.perf_counter(), result.loss, held.late_s))
        return rows, trainer.trace


def pace_as_stated(trainer: Trainer, profile: ModelProfile) -> Pace:
    """Hold a trainer's stage to the times that a profile states for its device."""
    stage = trainer.layout.stage(trainer.place)
    costs = profile.layer_costs(stage.device_type, stage.tp, trainer.pipeline.micro_batch)
    if costs is None:
        raise ValueError(
            f"{trainer.place}: {profile.name!r} states no times of {stage.device_type} for micro-batches of"
            f" {trainer.pipeline.micro_batch}"
        )
    layers = range(*stage.layers)
    held = pace(
        trainer.stage,
        {l: float(costs.forward_s[l]) for l in layers},
        {l: float(costs.backward_s[l]) for l in layers},
    )
    trainer.model = replace(trainer.model, loss=held.around(trainer.model.loss))
    return held


def _as_run(layout: Layout, ranks: Sequence[tuple[list[_Row], tuple[Played, ...]]]) -> Run:
    """One clock on one machine: a step lasts from the first rank's start to the last one's end."""
    steps = list(zip(*(rows for rows, _ in ranks), strict=True))
    return Run(
        steps_s=tuple(max(row.ended_s for row in rows) - min(row.begun_s for row in rows) for rows in steps[1:]),
        losses=tuple(rows[0].loss for rows in steps),
        traces=tuple((place, trace) for place, (_, trace) in zip(layout.places, ranks, strict=True)),
        late_s=tuple(max(row.late_s for row in rows) for rows in steps[1:]),
    )


def _layers(model: Model, sample: tuple[Tensor, ...]) -> Iterator[tuple[nn.Module, Any]]:
    """Every layer, built and run on a sample."""
    value: Any = sample
    for l in range(model.num_layers):
        layer = build_layer(model, l, seed=0)
        with torch.no_grad():
            value = layer(*as_tuple(value))
        yield layer, value


def _kind(layer: nn.Module, output: Any) -> LayerKind:
    parameters = list(layer.parameters())
    return LayerKind(
        name=type(layer).__name__.lower(),
        parameters=sum(p.numel() for p in parameters),
        output_bytes=sum(tensor.numel() * tensor.element_size() for tensor in as_tuple(output)),
        num_tensors=len(parameters),
    )


def _named(kind: LayerKind, found: Sequence[LayerKind], kinds: Mapping[LayerKind, LayerKind]) -> LayerKind:
    """A kind under a name of its own: classes of one name may differ in size."""
    if kind in kinds:
        return kinds[kind]
    alike = Counter(each.name.partition("-")[0] for each in dict.fromkeys(found))[kind.name]
    return replace(kind, name=f"{kind.name}-{alike}") if alike else kind
