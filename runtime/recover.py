"""Goes on when processes fall away: the others meet again, agree on a step, and train on under another plan.

    a step fails    on those that talk to a lost process. They drop their groups, which closes the connections of those
                    that wait for them in turn; who computes looks for an alarm at every action.
    roll-call       A thread of every live process answers. Those that have answered and dropped their groups are the
                    members of the next world; whoever says so first says it for all.
    whole step      A process that has the result of a step's commit knows that everyone's gradients are complete. If
                    any member has it, those that did not apply the step yet now do; if none has, none began to, and the
                    step is repeated. So no step is applied by some only.
    new plan        By the first member, for the devices that are left.
    state           Layers that a process does not hold come from one that does, each from the least loaded. If no
                    member holds some, all go back to the checkpoint.

Every process names a device of the plan, and keeps that name through all worlds. They leave word for each other in a
store that none of them hosts: that of `runtime.launch`, a server of its own, a file on a disk that all share. Whoever
sees a process end says so there too (`report_loss`, which the launcher calls): then the others give up the step at
once, and the roll-call does not wait for an answer. State comes from the checkpoint also where no process holds whole
tensors: optimizer state sharded over the owners of a block, or layers over a tp group.

Memory: while layers move a process holds its old stage and what it is sent. Before the new stage is built, weights and
optimizer state of the old one go to host memory and the rest of it is let go. There they stay until the new stage is
complete on all processes, since another attempt may need them; so a GPU never holds two stages.

All of this was run on gloo only. For NCCL the thread that hears the alarm aborts the groups of its process, since calls
that wait for a dead process would not return before their timeout; what such a call leaves behind is not used.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.plans import Plan
from planner.replan import assign
from planner.schedule import Action
from runtime import state
from runtime.groups import Disconnected, RankFailed, communication, gathered, on_first
from runtime.layout import Layout
from runtime.state import Snapshot
from runtime.trainer import TIMEOUT_S, Result, Trainer

logger = logging.getLogger(__name__)

ANSWER_S = 5.0  # a live process answers the roll-call in so long
PLAN_S = 3600.0  # a new plan is found in so long
POLL_S = 0.1
ATTEMPTS = 4  # to meet again, if more processes are lost meanwhile
Devices = tuple[str, ...]
Batch = Callable[[int, range], tuple[Any, Any]]
Replan = Callable[[Devices], Plan] | Mapping[frozenset[str], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a run went on.

    Parameters
    ----------
    failure
        What this process noticed.
    lost
        Devices that fell away.
    step_index
        The step it went on with.
    source
        ``replicas`` or ``checkpoint``.
    meet_s, plan_s, move_s
        Seconds from the failure to the new world, for the new plan, and from then to the next step.
    received_bytes
        State that this process got from others.
    """

    failure: str
    lost: Devices
    step_index: int
    source: str
    meet_s: float
    plan_s: float
    move_s: float
    received_bytes: int


class Elastic:
    """One process of a training run that outlives others. `torch.distributed` has to be initialised, as for `Trainer`.

    Parameters
    ----------
    make
        Plan -> trainer; called again for every new plan.
    batch
        (step, samples of the global batch) -> inputs and targets of those samples; the same ones whenever asked.
    replan
        Devices that are left -> plan on some or all of them; called by one process. Or plans made in advance, by the
        set of devices that are left. None if the run is to end with the first process that is lost.
    store
        Where processes meet; must not live in one of them. Not needed without `replan`.
    checkpoint
        Folder to begin from if it holds a checkpoint, to save to, and to go back to.
    every
        Steps from one checkpoint to the next; None for one at the end.
    timeout_s
        Longest wait for a live process; a search for a new plan may take longer, up to `PLAN_S`.
    answer_s
        Wait for an answer to the roll-call; a process that does not give one counts as lost. Nobody waits for those
        whose end was reported.

    Attributes
    ----------
    trainer
        The present one; None once the plan has no work for this device.
    recoveries
        What happened.
    """

    def __init__(
        self,
        plan: Plan,
        make: Callable[[Plan], Trainer],
        batch: Batch,
        *,
        replan: Replan | None = None,
        store: dist.Store | None = None,
        checkpoint: str | Path | None = None,
        every: int | None = None,
        timeout_s: float = TIMEOUT_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        if replan is not None and store is None:
            raise ValueError("store: none given; to go on without lost processes the others need a place to meet")
        if every is not None and (every < 1 or checkpoint is None):
            raise ValueError(f"every: {every}, expected a number of steps of at least 1, and a checkpoint folder")
        self.make, self.batch, self.replan, self.every = make, batch, replan, every
        self.store, self.timeout_s, self.answer_s = store, timeout_s, answer_s
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.backend = dist.get_backend()
        self.members = Layout(plan).devices
        if dist.get_world_size() != len(self.members):
            raise ValueError(
                f"{dist.get_world_size()} processes run, the plan needs one for each of its {len(self.members)} devices"
            )
        self.me = self.members[dist.get_rank()]
        self.generation = 0
        self.recoveries: list[Recovery] = []
        self.trainer: Trainer | None = None
        self.rendezvous = self._rendezvous()
        try:
            self.trainer = self._adopted(make(plan))
            self._resume(self.trainer)
            self.names = self._all_names(self.trainer)
        except BaseException:
            self.close()
            raise

    def run(self, steps: int, on_step: Callable[[Trainer, Result, float], None] | None = None) -> None:
        """Train until so many steps are done.

        Parameters
        ----------
        on_step
            Called after each with (trainer, result, seconds).

        Raises
        ------
        RankFailed
            If a process is lost and the run cannot go on: says who noticed, where, at which action, and why not.
        """
        while self.trainer is not None:
            failure = self._attempt(self.trainer, steps, on_step)
            if failure is not None:
                self._recover(failure)
            elif self.trainer.step_index >= steps:
                return

    def close(self) -> None:
        """Drop groups and thread."""
        self.rendezvous.close()
        self._drop()

    def __enter__(self) -> Elastic:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A step

    def _attempt(self, trainer: Trainer, steps: int, on_step: Any) -> RuntimeError | None:
        """One step, or at the end a wait for the others; returns what may be the sign of a lost process."""
        try:
            if trainer.step_index < steps:
                self._step(trainer, steps, on_step)
            if trainer.step_index >= steps:
                with communication():
                    dist.barrier()
                self._check_not_aborted(trainer)
        except Exception as error:
            if self.replan is None:
                raise
            if isinstance(error, Disconnected):
                return RankFailed(f"{trainer.place} after step {trainer.step_index}: {error}")
            if isinstance(error, RuntimeError):
                return _let_go(error)
            if self.rendezvous.aborted.is_set():  # whatever an aborted call left behind led to this
                return RankFailed(f"{trainer.place} in step {trainer.step_index + 1}: {self.rendezvous.reason}")
            # An error of the model or the data: the others cannot do better.
            self.rendezvous.stop(f"{trainer.place} stopped: {type(error).__name__}: {error}")
            raise
        except BaseException as error:
            self.rendezvous.stop(f"{trainer.place} stopped: {type(error).__name__}: {error}")
            raise
        return None

    def _step(self, trainer: Trainer, steps: int, on_step: Any) -> None:
        begun, committed = time.perf_counter(), trainer.committed
        inputs, targets = self.batch(trainer.step_index, trainer.samples)
        result = trainer.gradients(inputs if trainer.is_first else None, targets if trainer.is_last else None)
        try:
            self._check_not_aborted(trainer)
        except RankFailed:
            trainer.committed = committed
            raise
        trainer.apply(result)
        taken = time.perf_counter() - begun
        due = trainer.step_index == steps or (self.every is not None and trainer.step_index % self.every == 0)
        if due and self.checkpoint is not None:
            state.save(trainer, self.checkpoint)
        if on_step is not None:
            on_step(trainer, result, taken)

    def _check_not_aborted(self, trainer: Trainer) -> None:
        """A call that was aborted may return as if it were done: nothing since then counts."""
        if self.rendezvous.aborted.is_set():
            raise RankFailed(f"{trainer.place} in step {trainer.step_index + 1}: {self.rendezvous.reason}")

    def _adopted(self, trainer: Trainer) -> Trainer:
        """The trainer, which looks for the alarm before every action."""
        hook = trainer.on_action

        def before(action: Action) -> None:
            if self.rendezvous.alarm.is_set():
                raise RankFailed(f"{trainer.place} at {action}: {self.rendezvous.reason}")
            if hook is not None:
                hook(action)

        trainer.on_action = before
        return trainer

    def _resume(self, trainer: Trainer) -> bool:
        """State from the checkpoint, if there is one; otherwise as built, which is that of step 0."""
        folder = self.checkpoint
        if folder is None or not on_first(None, lambda: bool(state.steps(folder))):
            return False
        state.load(trainer, folder)
        return True

    def _all_names(self, trainer: Trainer) -> dict[str, tuple[int, ...]]:
        """All parameters and buffers of the model, and the layers that hold them."""
        if self.replan is None:
            return {}
        mine = {name: state.layers_of(name, trainer.model) for name in state.held(trainer)}
        return dict(sorted(pair for each in gathered(None, mine) for pair in each.items()))

    # After a loss

    def _recover(self, failure: RuntimeError) -> None:
        begun, noticed = time.perf_counter(), failure
        assert self.trainer is not None
        held, self.trainer = _Held(self.trainer), None
        for attempt in range(ATTEMPTS):
            try:
                self._go_on(held, failure, begun, first=attempt == 0)
                return
            except Disconnected as error:
                noticed = _let_go(error)
            except BaseException as error:  # nothing that another attempt would mend
                self.rendezvous.stop(f"{self.me} stopped: {error}")
                raise
        raise RankFailed(f"{failure}; gave up after {ATTEMPTS} attempts to go on, the last failed by: {noticed}")

    def _go_on(self, held: _Held, failure: RuntimeError, begun: float, *, first: bool) -> None:
        """Meet, and come to a state that all agree on. On `Disconnected` what is held is still what counts."""
        before = self.members
        held.close()
        self._drop()
        news = self.rendezvous.call_roll({"step": held.step_index, "commit": _row(held.committed)}, str(failure))
        if first and len(news) == len(before):
            raise failure  # nobody is missing: an error of this process, or of one that says so itself
        self._join(tuple(news))
        held.roll_forward(news)
        met = time.perf_counter()
        plan = self._new_plan(failure)
        planned = time.perf_counter()
        found, received = self._fetch(held, plan, failure)
        if not self._narrow(Layout(plan).devices):
            return
        new = self._rebuilt(plan, found, held.step_index)
        ended = time.perf_counter()
        self.trainer = self._adopted(new)
        self.recoveries.append(
            Recovery(
                failure=str(failure),
                lost=tuple(name for name in held.devices if name not in news),
                step_index=new.step_index,
                source="checkpoint" if found is None else "replicas",
                meet_s=met - begun,
                plan_s=planned - met,
                move_s=ended - planned,
                received_bytes=received,
            )
        )
        logger.info("%s", self.recoveries[-1])

    def _rendezvous(self) -> Rendezvous:
        abort = _abort_nccl if self.backend == "nccl" else None
        return Rendezvous(self.store, self.generation, self.members, self.me, self.answer_s, self.timeout_s, abort)

    def _drop(self) -> None:
        """Close all connections, so that processes that wait for this one notice."""
        if self.trainer is not None:
            self.trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def _join(self, members: Devices) -> None:
        """Become the world of these devices."""
        self.rendezvous.close()
        self.generation, self.members = self.generation + 1, members
        self.rendezvous = self._rendezvous()
        assert self.store is not None
        with communication():
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore(f"world {self.generation}", self.store.clone()),
                rank=members.index(self.me),
                world_size=len(members),
                timeout=timedelta(seconds=self.timeout_s),
            )

    def _narrow(self, devices: Devices) -> bool:
        """The world of the plan's devices, when all have fetched what they need; whether this is one of them."""
        with communication():
            dist.barrier()
        if devices == self.members:
            return True
        self.rendezvous.decide(devices)
        self._drop()
        if self.me not in devices:
            return False
        self._join(devices)
        return True

    def _new_plan(self, failure: RuntimeError) -> Plan:
        members = self.members

        def choose() -> Plan:
            plan = self._plan_for(members)
            missing = set(plan.devices) - set(members)
            if missing:
                raise ValueError(f"the new plan uses {', '.join(sorted(missing))}, where no process is left")
            return plan

        try:
            return _searched(choose, self.timeout_s)
        except ValueError as error:
            raise RankFailed(f"{failure}; no plan for the devices that are left: {error}") from None

    def _plan_for(self, members: Devices) -> Plan:
        assert self.replan is not None
        if callable(self.replan):
            try:
                return self.replan(members)
            except Exception as error:  # this process calls it, all have to know
                raise ValueError(str(error)) from error
        if frozenset(members) not in self.replan:
            raise ValueError(f"no plan was prepared for {', '.join(members)}")
        return self.replan[frozenset(members)]

    def _fetch(self, held: _Held, plan: Plan, failure: RuntimeError) -> tuple[Snapshot | None, int]:
        """What this process needs under a plan, from its own layers and others', and the bytes that came; None where
        the checkpoint has to serve."""
        whole = held.whole and all(stage.tp == 1 for stage in plan.stages)
        mine = held.snapshot() if whole else Snapshot()
        metas = gathered(None, ({key: _TensorMeta.of(value) for key, value in mine.tensors.items()}, mine.options))
        holders = {rank: meta for rank, (meta, _) in enumerate(metas)}
        every = {key: meta for each in holders.values() for key, meta in each.items()}
        ranges = {self.members.index(n): stage.layers for stage in plan.stages for n in stage.devices}
        needed = {
            rank: [key for key in sorted(every) if self._belongs(key, layers)]
            for rank, layers in sorted(ranges.items())
        }
        lost = [name for name in self.names if state.MODEL + name not in every]
        if lost:
            self._has_checkpoint(lost, failure)
            del mine
            held.to_host()
            return None, 0
        wire = held.device if self.backend == "nccl" else torch.device("cpu")
        got = _exchange(list(assign(needed, holders, lambda key, *_: every[key].nbytes)), mine.tensors, every, wire)
        del mine
        tensors = held.to_host().tensors
        found = Snapshot(options={name: each for _, options in metas for name, each in options.items()})
        for key in needed.get(dist.get_rank(), ()):
            found.put(key, got[key] if key in got else tensors[key])
        return found, sum(every[key].nbytes for key in got)

    def _belongs(self, key: str, layers: tuple[int, int]) -> bool:
        """Whether a tensor is part of the state of some layers."""
        name = key.removeprefix(state.MODEL) if key.startswith(state.MODEL) else state.split(key)[0]
        return any(layers[0] <= l < layers[1] for l in self.names[name])

    def _has_checkpoint(self, lost: list[str], failure: RuntimeError) -> None:
        if self.checkpoint is None:
            layers = ", ".join(map(str, sorted({l for name in lost for l in self.names[name]})))
            raise RankFailed(
                f"{failure}; the state of layers {layers} is held by no process that is left, and there is no"
                " checkpoint folder to go back to"
            )

    def _rebuilt(self, plan: Plan, found: Snapshot | None, step: int) -> Trainer:
        """A trainer under a plan, with its state, when all have theirs."""
        with communication():
            new = self.make(plan)
        try:
            if found is None:
                self._resume(new)
            else:
                state.restore(new, found)
                new.step_index = step
            with communication():
                dist.barrier()
        except BaseException:
            new.close()
            raise
        return new


class Rendezvous:
    """What the processes of one world leave for each other in the store, and a thread that answers the roll-call.

    Attributes
    ----------
    alarm
        Set once a process has given up its step, or is known to have ended.
    reason
        Why.
    aborted
        Set before calls that wait are aborted: what they return is then worth nothing.
    """

    def __init__(
        self,
        store: dist.Store | None,
        number: int,
        members: Devices,
        me: str,
        answer_s: float,
        timeout_s: float,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self.members, self.me, self.answer_s, self.timeout_s, self.abort = members, me, answer_s, timeout_s, abort
        self.alarm, self.aborted, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.reason = "other processes have given up the step"
        self.store: Any = None
        if store is not None:
            # Two connections: a call that waits for an answer holds up all others on the same one.
            mine, watched = store.clone(), store.clone()
            self.losses = _Losses(mine)
            self.store, other = (dist.PrefixStore(f"rendezvous {number}", each) for each in (mine, watched))
            self.thread = threading.Thread(target=self._watch, args=(other, _Losses(watched)), daemon=True)
            self.thread.start()

    def _watch(self, store: dist.Store, losses: _Losses) -> None:
        try:
            while not self.closed.wait(POLL_S):
                lost = losses.among(self.members)
                if lost:
                    self.reason = f"the process of {', '.join(lost)} has ended"
                if lost or store.check(["alarm"]):
                    store.set(f"alive {self.me}", "")
                    self.alarm.set()
                    if self.abort is not None:
                        self.aborted.set()
                        self.abort()
                    return
        except RuntimeError as error:
            logger.warning("the store does not answer, so lost processes would not be replaced: %s", error)

    def call_roll(self, news: dict[str, Any], noticed: str = "") -> dict[str, dict[str, Any]]:
        """Members that are left and have dropped their groups, each with its news (none if they went on before).

        Parameters
        ----------
        noticed
            What led to it.

        Raises
        ------
        RankFailed
            If this process came too late, one stopped by an error of its own, or the store is gone.
        """
        try:
            self.store.set("alarm", "")
            self.store.set(f"alive {self.me}", "")
            self.store.set(f"ready {self.me}", json.dumps(news))
            left = self._left()
            found = {
                name: json.loads(self.store.get(f"ready {name}")) if self._has(f"ready {name}") else {} for name in left
            }
        except RuntimeError as error:
            if isinstance(error, RankFailed):
                raise
            before = f"{noticed}; " if noticed else ""
            raise RankFailed(f"{before}{self.me}: the store where processes meet does not answer: {error}") from None
        if self.me not in left:
            raise RankFailed(f"{self.me}: the others went on without this process, which came too late")
        return found

    def _left(self) -> list[str]:
        begun = time.monotonic()
        while True:
            stopped = self._has("stopped")  # asked for first: who goes on after a decision may stop then
            if self._has("members"):
                break
            if stopped:
                raise RankFailed(self.store.get("stopped").decode())
            lost = self.losses.among(self.members)
            expected = [name for name in self.members if name not in lost]
            alive = [name for name in expected if self._has(f"alive {name}")]
            ready = [name for name in alive if self._has(f"ready {name}")]
            waited = time.monotonic() - begun
            if ready == expected or (waited > self.answer_s and ready == alive) or waited > self.timeout_s:
                self.decide(tuple(ready))
            time.sleep(POLL_S / 5)
        found: list[str] = json.loads(self.store.get("members"))
        return found

    def decide(self, members: Devices) -> None:
        """Say who the next world is, unless another said so before."""
        self.store.compare_set("members", "", json.dumps(members))

    def stop(self, reason: str) -> None:
        """Tell the others that they cannot go on."""
        if self.store is not None:
            try:
                self.store.compare_set("stopped", "", " ".join(reason.split())[:500])  # the first reason stays
                self.store.set("alarm", "")
            except RuntimeError:
                logger.warning("the store does not answer: %s", reason)

    def _has(self, key: str) -> bool:
        found: bool = self.store.check([key])
        return found

    def close(self) -> None:
        """End the thread."""
        self.closed.set()
        if self.store is not None:
            self.thread.join()


def report_loss(store: dist.Store, name: str) -> None:
    """Say that the process of a device has ended, in the store that is given to `Elastic`."""
    store.set(f"loss {store.add('losses', 1)}", name)


class _Losses:
    """Devices whose process was seen to end, read as they are reported."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.names = store, [""]

    def among(self, members: Devices) -> list[str]:
        """Those that are members."""
        while self.store.check([f"loss {len(self.names)}"]):
            self.names.append(self.store.get(f"loss {len(self.names)}").decode())
        return [name for name in members if name in self.names]


def _abort_nccl() -> None:
    """Make calls of this process that wait in NCCL return.

    Not by `_abort_process_group`: it takes the groups out of torch's books too, and the next call of the thread that
    uses them would look like an error of the program.
    """
    try:
        groups = list(dist.distributed_c10d._world.pg_names)
        backend: Any = groups[0]._get_backend(torch.device("cuda"))
        backend._group_start()  # all at once: one after the other they can wait for each other
        for group in groups:
            group.abort()
        backend._group_end()
    except (IndexError, RuntimeError, ValueError) as error:  # that thread may have begun to close them
        logger.warning("groups could not be aborted: %s", error)


# Steps


class _Held:
    """What a process has between two plans: its old trainer, and from `to_host` on only the state."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Trainer | None = trainer
        self.devices, self.device = trainer.layout.devices, trainer.device
        self.whole = not trainer.reducer.shard and all(stage.tp == 1 for stage in trainer.plan.stages)
        self.step_index, self.committed = trainer.step_index, trainer.committed
        self.kept = Snapshot()

    def close(self) -> None:
        """Close the groups of the trainer."""
        if self.trainer is not None:
            self.trainer.close()

    def roll_forward(self, news: Mapping[str, dict[str, Any]]) -> None:
        """Apply the step that any member knows to be committed, if this process has not."""
        if not all(news.values()):
            raise Disconnected("some members have gone on already")
        if self.trainer is None or self.trainer.reducer.shard:
            return  # done before; or parts of the update are with all owners: such a run goes back to the checkpoint
        known = [each["commit"] for each in news.values() if each["commit"] is not None]
        commits = {row[0]: Result(*row[1:]) for row in known}
        whole = max([*(each["step"] for each in news.values()), *(index + 1 for index in commits)])
        if self.step_index < whole:
            assert self.step_index == whole - 1
            self.trainer.apply(commits[self.step_index])
            self.step_index, self.committed = self.trainer.step_index, self.trainer.committed

    def snapshot(self) -> Snapshot:
        """The state, where it is."""
        return self.kept if self.trainer is None else state.snapshot(self.trainer)

    def to_host(self) -> Snapshot:
        """Keep the state in host memory, and nothing else: no gradients, and on a GPU nothing at all."""
        if self.trainer is not None and self.whole:
            found = state.snapshot(self.trainer)
            self.kept = Snapshot(options=found.options)
            for key, value in found.tensors.items():
                self.kept.put(key, value.cpu())
        self.trainer = None
        gc.collect()  # hooks and what they belong to hold each other
        return self.kept


def _row(committed: tuple[int, Result] | None) -> list[Any] | None:
    return None if committed is None else [committed[0], committed[1].loss, committed[1].norm, committed[1].num_tokens]


def _let_go(error: RuntimeError) -> RuntimeError:
    """The error without what it holds on to: frames keep messages alive, those their groups, and those connections."""
    if not isinstance(error, RankFailed):
        error.add_note("".join(traceback.format_exception(error)))
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


# State


@dataclass(frozen=True, slots=True)
class _TensorMeta:
    """A tensor that a process holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.numel() * tensor.element_size())


def _exchange(
    moves: list[tuple[int, int | None, str]],
    mine: Mapping[str, Tensor],
    metas: Mapping[str, _TensorMeta],
    wire: torch.device,
) -> dict[str, Tensor]:
    """All transfers at once; returns the tensors that came to this process."""
    rank, works, got = dist.get_rank(), [], {}
    with communication():
        for tag, (who, giver, key) in enumerate(moves):
            meta = metas[key]
            if not meta.nbytes or rank not in (who, giver):
                got |= {key: torch.empty(meta.shape, dtype=meta.dtype)} if rank == who else {}
            elif rank == giver:
                works.append((dist.isend(sent := _bytes(mine[key].to(wire)), who, tag=tag), sent))
            else:
                got[key] = torch.empty(meta.shape, dtype=meta.dtype, device=wire)
                works.append((dist.irecv(into := _bytes(got[key]), giver, tag=tag), into))
        for work, _ in works:
            work.wait()
    return {key: value.to(metas[key].device) for key, value in got.items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _searched(find: Callable[[], Any], timeout_s: float) -> Any:
    """What the first process finds, on all. Meanwhile it tells the others again and again that it has not found it yet:
    so their wait is not cut off by the timeout of one call, and they notice at once if it is lost."""
    found: Future[Any] = Future()
    begun = time.monotonic()

    def search() -> None:
        try:
            found.set_result(find())
        except BaseException as error:
            found.set_exception(error)

    def look() -> tuple[Any] | None:
        try:
            return (found.result(min(timeout_s / 4, 1.0)),)
        except TimeoutError:
            if time.monotonic() - begun > PLAN_S:
                raise ValueError(f"none was found within {PLAN_S:g} s") from None
            return None

    if dist.get_rank() == 0:
        threading.Thread(target=search, daemon=True).start()
    while (answer := on_first(None, look)) is None:
        pass
    return answer[0]
