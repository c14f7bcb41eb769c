"""``python -m runtime.launch plan.json train.py:build``: starts a process per device; if one is lost, keeps the others.

It takes all that ``python -m runtime`` takes. Alone it starts every process here. On several machines it is started on
each, with the node of the plan that the machine is, and everywhere the address at which the first node can be reached:

    python -m runtime.launch plan.json train.py:build --node a100-1 --store 10.0.0.1:29500

The store in which processes find each other, at the start and after a loss, is in the launcher (of the plan's first
node): it trains nothing, so it outlives them. With ``--replan`` a run goes on, from its first step on, after the loss
of any process, of all those of a node, or of any machine but the one with the store. The loss of that one ends the run
with one clear error per process that is left, and bad input at one process ends it for all. Without ``--replan`` the
first process that fails ends the run; the others get time to say what they noticed. Ctrl-C and SIGTERM end all
processes of this machine. If the launcher itself is killed outright, they train on as long as none is lost; before the
first step they wait for their timeout.

Exit codes: 0 if the run was finished, by all or by those who were left; else that of the process that failed first,
which is 1 if a signal ended it; 128 + N if signal N ended the launcher. On several machines a launcher answers for its
own processes: if all of them are lost before the others finish, it ends with their code. That with the store waits for
the other launchers, and for those that say nothing any more no longer than half a minute.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist

from planner.files import did_you_mean
from planner.plans import Plan
from runtime.__main__ import BAD_INPUT, FINISHED, STARTED, STOPPED
from runtime.__main__ import parser as runtime_parser
from runtime.layout import Layout
from runtime.recover import report_loss

GRACE_S = 10.0  # for processes to end by themselves, after a failure and after SIGTERM
LEAVE_S = 60.0  # after the last step, to print and to write
BEAT_S, SILENT_S = 1.0, 30.0  # a launcher that says nothing for so long is gone
POLL_S = 0.1
Address = tuple[str, int]
Commands = Mapping[str, tuple[Sequence[str], Mapping[str, str]]]  # by device: arguments, environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the processes of this machine; returns the exit code."""
    options, passed = _parsed(arguments)
    try:
        nodes = _nodes(Plan.load(options.plan))
        address = _address(options, nodes)
        server = None
        if options.node in (None, next(iter(nodes))):
            server = _serve(address)
            address = address[0], server.port
    except ValueError as error:
        print(f"runtime.launch: {error}", file=sys.stderr)
        return BAD_INPUT
    reporter = _Reporter(address, options.node)
    reporter.start()
    commands = _commands(nodes, options.node, address, passed)
    code = supervise(commands, reporter, survive=options.replan is not None)
    reporter.close()
    if server is not None and options.node is not None and code < 128:
        _outlive(server, [node for node in nodes if node != options.node])
    finished = FINISHED in reporter.reached if server is None else server.check([FINISHED])
    return 0 if finished and code < 128 else code


def _parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """All options, and the arguments that are for the processes."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--node", metavar="NAME", help="start the devices of this node of the plan only")
    own.add_argument("--store", metavar="HOST:PORT", help="where the launcher of the plan's first node hosts the store")
    whole = argparse.ArgumentParser(
        prog="python -m runtime.launch",
        description="Train under a plan, with a process per device of it.",
        parents=[runtime_parser(add_help=False), own],
        allow_abbrev=False,
    )
    return whole.parse_args(arguments), own.parse_known_args(arguments)[1]


def _nodes(plan: Plan) -> dict[str, dict[int, str]]:
    """Devices of every node, by rank."""
    found: dict[str, dict[int, str]] = {}
    for rank, device in enumerate(Layout(plan).devices):
        found.setdefault(device.rpartition(":")[0], {})[rank] = device
    return found


def _address(options: argparse.Namespace, nodes: Mapping[str, object]) -> Address:
    if options.node is not None and options.node not in nodes:
        raise ValueError(f"--node: {options.node!r} is not among {did_you_mean(options.node, list(nodes))}")
    if options.store is None:
        if options.node is not None and len(nodes) > 1:
            raise ValueError(f"--node: without --store, expected HOST:PORT of the machine that is {next(iter(nodes))}")
        return "127.0.0.1", 0
    host, _, port = options.store.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--store: {options.store!r}, expected HOST:PORT such as 10.0.0.1:29500")
    return host, int(port)


def _serve(address: Address) -> dist.TCPStore:
    try:
        return dist.TCPStore("127.0.0.1", address[1], is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ValueError(f"--store: no store at port {address[1]}: {' '.join(str(error).split())[:200]}") from None


def _commands(
    nodes: Mapping[str, Mapping[int, str]], node: str | None, address: Address, passed: Sequence[str]
) -> Commands:
    """What to start here."""
    here = {rank: device for name, ranks in nodes.items() for rank, device in ranks.items() if node in (None, name)}
    common = {
        "WORLD_SIZE": str(sum(map(len, nodes.values()))),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no process is to host the store
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as measured, and as torchrun does
    }
    command = [sys.executable, "-m", "runtime", *passed]
    return {
        device: (command, {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(local)})
        for local, (rank, device) in enumerate(here.items())
    }


def supervise(commands: Commands, run: Run, *, survive: bool) -> int:
    """Run processes until all have ended, each in a session of its own, so that what it starts ends with it.

    Parameters
    ----------
    run
        Is told the device of every process that failed, and knows how far the run is.
    survive
        Whether the others go on when one is lost: from the first step on. After the last one, none is waited for long.

    Returns
    -------
    int
        0, or the exit code of the first that failed; 128 + N after signal N.
    """
    failure, until, doubt, caught = 0, math.inf, math.inf, []
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Only noted: an exception from a handler could come while processes are started or ended.
    before = {each: signal.signal(each, lambda number, _: caught.append(number)) for each in signals}
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for device, (command, environment) in commands.items():
            running[device] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        while running and not caught and time.monotonic() < until:
            time.sleep(POLL_S)
            for device in [device for device, process in running.items() if process.poll() is not None]:
                code = _ended(running.pop(device))
                if code == 0:
                    continue
                run.lost.put(device)
                if code < 0:
                    by = signal.Signals(-code).name
                    print(f"runtime.launch: the process of {device} was ended by {by}", file=sys.stderr, flush=True)
                failure = failure or (STOPPED if code < 0 else code)
                if not survive or code == BAD_INPUT:
                    until = min(until, time.monotonic() + GRACE_S)
                elif STARTED not in run.reached:
                    doubt = min(doubt, time.monotonic() + 3 * BEAT_S)  # or it is about to be known
            if STARTED in run.reached:
                doubt = math.inf
            if FINISHED in run.reached:
                until = min(until, time.monotonic() + LEAVE_S)
            until = min(until, doubt)
    finally:
        _end(list(running.values()))
        for each, handler in before.items():
            signal.signal(each, handler)
    if caught:
        print(f"runtime.launch: ended by {signal.Signals(caught[0]).name}", file=sys.stderr, flush=True)
    return 128 + caught[0] if caught else failure


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Exit code of a process that has ended, of which nothing is left then."""
    code = process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return code


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + GRACE_S
    for process in processes:
        process.terminate()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        process.kill()
        _ended(process)


class Run(Protocol):
    """What `supervise` has to do with the run."""

    lost: queue.SimpleQueue[str | None]
    reached: set[str]


class _Reporter(threading.Thread):
    """Tells the others in the store: which processes here are lost, that this launcher is there, that it is done.

    In a thread, since a store whose machine is gone holds up who asks it.
    """

    def __init__(self, address: Address, node: str | None) -> None:
        super().__init__(daemon=True)
        self.address, self.node = address, node
        self.reached: set[str] = set()  # of STARTED and FINISHED
        self.lost: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def run(self) -> None:
        with suppress(RuntimeError):  # without the store the processes say what is wrong
            store = dist.TCPStore(*self.address, is_master=False, wait_for_workers=False)
            while (device := self._next(store)) is not None:
                report_loss(store, device)
            self._look(store)
            store.set(f"launcher {self.node} done", "")

    def _next(self, store: dist.Store) -> str | None:
        while True:
            with suppress(queue.Empty):
                return self.lost.get(timeout=BEAT_S)
            store.add(f"launcher {self.node}", 1)
            self._look(store)

    def _look(self, store: dist.Store) -> None:
        self.reached |= {key for key in (STARTED, FINISHED) if store.check([key])}

    def close(self) -> None:
        """Say that all processes here have ended."""
        self.lost.put(None)
        self.join(GRACE_S)


def _outlive(server: dist.Store, nodes: Sequence[str]) -> None:
    """Wait until the launchers of other nodes are done or gone."""
    counts, heard = dict.fromkeys(nodes, -1), dict.fromkeys(nodes, 0.0)
    while True:
        now = time.monotonic()
        for node, count in counts.items():
            if (new := server.add(f"launcher {node}", 0)) != count:
                counts[node], heard[node] = new, now
        if all(server.check([f"launcher {node} done"]) or now - heard[node] > SILENT_S for node in nodes):
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
