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
store that none of them hosts: that of torchrun's agent, a server of its own, a file on a disk that all share. State
comes from the checkpoint also where no process holds whole tensors: optimizer state sharded over the owners of a block,
or layers over a tp group.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
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
from runtime.groups import Disconnected, RankFailed, communication
from runtime.layout import Layout
from runtime.state import Snapshot
from runtime.trainer import TIMEOUT_S, Result, Trainer

logger = logging.getLogger(__name__)

ANSWER_S = 2.0  # a live process answers the roll-call in so long
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
        Longest wait for a live process.
    answer_s
        Wait for an answer to the roll-call; a process that does not give one counts as lost.

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
        self.me = self.members[dist.get_rank()]
        self.generation = 0
        self.recoveries: list[Recovery] = []
        self.trainer: Trainer | None = None
        self.meeting = self._meeting()
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
        self.meeting.close()
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
        except RuntimeError as error:
            if self.replan is None:
                raise
            if isinstance(error, Disconnected):
                error = RankFailed(f"{trainer.place} after step {trainer.step_index - 1}: {error}")
            return _let_go(error)
        except BaseException as error:  # of the model or the data: the others cannot do better
            self.meeting.stop(f"{trainer.place} stopped: {type(error).__name__}: {error}")
            raise
        return None

    def _step(self, trainer: Trainer, steps: int, on_step: Any) -> None:
        begun = time.perf_counter()
        inputs, targets = self.batch(trainer.step_index, trainer.samples)
        result = trainer.step(inputs if trainer.is_first else None, targets if trainer.is_last else None)
        taken = time.perf_counter() - begun
        due = trainer.step_index == steps or (self.every is not None and trainer.step_index % self.every == 0)
        if due and self.checkpoint is not None:
            state.save(trainer, self.checkpoint)
        if on_step is not None:
            on_step(trainer, result, taken)

    def _adopted(self, trainer: Trainer) -> Trainer:
        """The trainer, which looks for the alarm before every action."""
        hook = trainer.on_action

        def before(action: Action) -> None:
            if self.meeting.alarm.is_set():
                raise RankFailed(f"{trainer.place} at {action}: other processes have given up the step")
            if hook is not None:
                hook(action)

        trainer.on_action = before
        return trainer

    def _resume(self, trainer: Trainer) -> bool:
        """State from the checkpoint, if there is one; otherwise as built, which is that of step 0."""
        folder = self.checkpoint
        if folder is None or not _on_first(lambda: bool(state.steps(folder))):
            return False
        state.load(trainer, folder)
        return True

    def _all_names(self, trainer: Trainer) -> dict[str, tuple[int, ...]]:
        """All parameters and buffers of the model, and the layers that hold them."""
        if self.replan is None:
            return {}
        mine = {name: state.layers_of(name, trainer.model) for name in state.held(trainer)}
        return dict(sorted(pair for each in _gathered(mine) for pair in each.items()))

    # After a loss

    def _recover(self, failure: RuntimeError) -> None:
        begun, noticed = time.perf_counter(), failure
        for attempt in range(ATTEMPTS):
            try:
                self._go_on(failure, begun, first=attempt == 0)
                return
            except Disconnected as error:
                noticed = _let_go(error)
            except BaseException as error:  # nothing that another attempt would mend
                self.meeting.stop(f"{self.me} stopped: {error}")
                raise
        raise RankFailed(f"{failure}; gave up after {ATTEMPTS} attempts to go on, the last failed by: {noticed}")

    def _go_on(self, failure: RuntimeError, begun: float, *, first: bool) -> None:
        """Meet, and come to a state that all agree on. On `Disconnected` the old trainer is still what counts."""
        old, before = self.trainer, self.members
        assert old is not None
        self._drop()
        news = self.meeting.call_roll({"step": old.step_index, "commit": _row(old.committed)})
        if first and len(news) == len(before):
            raise failure  # nobody is missing: an error of this process, or of one that says so itself
        self._join(tuple(news))
        _roll_forward(old, news)
        met = time.perf_counter()
        plan = self._new_plan(failure)
        planned = time.perf_counter()
        found, received = self._fetch(old, plan, failure)
        if not self._narrow(Layout(plan).devices):
            self.trainer = None
            return
        new = self._rebuilt(plan, found, old.step_index)
        ended = time.perf_counter()
        self.trainer = self._adopted(new)
        self.recoveries.append(
            Recovery(
                failure=str(failure),
                lost=tuple(name for name in old.layout.devices if name not in news),
                step_index=new.step_index,
                source="checkpoint" if found is None else "replicas",
                meet_s=met - begun,
                plan_s=planned - met,
                move_s=ended - planned,
                received_bytes=received,
            )
        )
        logger.info("%s", self.recoveries[-1])

    def _meeting(self) -> Meeting:
        return Meeting(self.store, self.generation, self.members, self.me, self.answer_s, self.timeout_s)

    def _drop(self) -> None:
        """Close all connections, so that processes that wait for this one notice."""
        if self.trainer is not None:
            self.trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def _join(self, members: Devices) -> None:
        """Become the world of these devices."""
        self.meeting.close()
        self.generation, self.members = self.generation + 1, members
        self.meeting = self._meeting()
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
        self.meeting.decide(devices)
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
            return _on_first(choose)
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

    def _fetch(self, old: Trainer, plan: Plan, failure: RuntimeError) -> tuple[Snapshot | None, int]:
        """What this process needs under a plan, from its own layers and others', and the bytes that came; None where
        the checkpoint has to serve."""
        whole = not old.reducer.shard and all(stage.tp == 1 for stage in (*old.plan.stages, *plan.stages))
        mine = state.snapshot(old) if whole else Snapshot()
        cards = _gathered(({key: _Card.of(value) for key, value in mine.tensors.items()}, mine.options))
        held = {rank: card for rank, (card, _) in enumerate(cards)}
        every = {key: card for each in held.values() for key, card in each.items()}
        ranges = {self.members.index(n): stage.layers for stage in plan.stages for n in stage.devices}
        needed = {
            rank: [key for key in sorted(every) if self._belongs(key, layers)]
            for rank, layers in sorted(ranges.items())
        }
        lost = [name for name in self.names if state.MODEL + name not in every]
        if lost:
            self._has_checkpoint(lost, failure)
            return None, 0
        wire = old.device if self.backend == "nccl" else torch.device("cpu")
        got = _exchange(list(assign(needed, held, lambda key, *_: every[key].nbytes)), mine.tensors, every, wire)
        found = Snapshot(options={name: each for _, options in cards for name, each in options.items()})
        for key in needed.get(dist.get_rank(), ()):
            found.put(key, got[key] if key in got else mine.tensors[key])
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


class Meeting:
    """What the processes of one world leave for each other in the store, and a thread that answers the roll-call.

    Attributes
    ----------
    alarm
        Set once a process has given up its step.
    """

    def __init__(
        self, store: dist.Store | None, number: int, members: Devices, me: str, answer_s: float, timeout_s: float
    ) -> None:
        self.members, self.me, self.answer_s, self.timeout_s = members, me, answer_s, timeout_s
        self.alarm, self.closed = threading.Event(), threading.Event()
        self.store: Any = None
        if store is not None:
            # Two connections: a call that waits for an answer holds up all others on the same one.
            self.store, watched = (dist.PrefixStore(f"meeting {number}", store.clone()) for _ in range(2))
            self.thread = threading.Thread(target=self._watch, args=(watched,), daemon=True)
            self.thread.start()

    def _watch(self, store: dist.Store) -> None:
        try:
            while not self.closed.wait(POLL_S):
                if store.check(["alarm"]):
                    store.set(f"alive {self.me}", "")
                    self.alarm.set()
                    return
        except RuntimeError as error:
            logger.warning("the store does not answer, so lost processes would not be replaced: %s", error)

    def call_roll(self, news: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Members that are left and have dropped their groups, each with its news (none if they went on before).

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
            raise RankFailed(f"{self.me}: the store where processes meet does not answer: {error}") from None
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
            alive = [name for name in self.members if self._has(f"alive {name}")]
            ready = [name for name in alive if self._has(f"ready {name}")]
            waited = time.monotonic() - begun
            everyone = len(ready) == len(self.members)
            if everyone or (waited > self.answer_s and ready == alive) or waited > self.timeout_s:
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


# Steps


def _row(committed: tuple[int, Result] | None) -> list[Any] | None:
    return None if committed is None else [committed[0], committed[1].loss, committed[1].norm, committed[1].num_tokens]


def _roll_forward(trainer: Trainer, news: Mapping[str, dict[str, Any]]) -> None:
    """Apply the step that any member knows to be committed, if this process has not."""
    if not all(news.values()):
        raise Disconnected("some members have gone on already")
    if trainer.reducer.shard:
        return  # its parts of the update are with all owners; such a run goes back to the checkpoint
    commits = {each["commit"][0]: Result(*each["commit"][1:]) for each in news.values() if each["commit"] is not None}
    whole = max([*(each["step"] for each in news.values()), *(index + 1 for index in commits)])
    if trainer.step_index < whole:
        assert trainer.step_index == whole - 1
        trainer.apply(commits[trainer.step_index])


def _let_go(error: RuntimeError) -> RuntimeError:
    """The error without what it holds on to: frames keep messages alive, those their groups, and those connections."""
    if not isinstance(error, (RankFailed, Disconnected)):
        error.add_note("".join(traceback.format_exception(error)))
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


# State


@dataclass(frozen=True, slots=True)
class _Card:
    """A tensor that a process holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Card:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.numel() * tensor.element_size())


def _exchange(
    moves: list[tuple[int, int | None, str]], mine: Mapping[str, Tensor], cards: Mapping[str, _Card], wire: torch.device
) -> dict[str, Tensor]:
    """All transfers at once; returns the tensors that came to this process."""
    rank, works, got = dist.get_rank(), [], {}
    with communication():
        for tag, (who, giver, key) in enumerate(moves):
            card = cards[key]
            if not card.nbytes or rank not in (who, giver):
                got |= {key: torch.empty(card.shape, dtype=card.dtype)} if rank == who else {}
            elif rank == giver:
                works.append((dist.isend(sent := _bytes(mine[key].to(wire)), who, tag=tag), sent))
            else:
                got[key] = torch.empty(card.shape, dtype=card.dtype, device=wire)
                works.append((dist.irecv(into := _bytes(got[key]), giver, tag=tag), into))
        for work, _ in works:
            work.wait()
    return {key: value.to(cards[key].device) for key, value in got.items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _gathered(value: Any) -> list[Any]:
    return state._gathered(None, value)


def _on_first(action: Callable[[], Any]) -> Any:
    return state._on_first(None, action)
