"""Processes of a plan: which device gets which global rank, and one torchrun line per node that makes it so.

torchrun gives consecutive ranks to the processes of one line, so a node whose ranks are not consecutive takes several.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from planner.importers import reading
from planner.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One rank: where it runs and what for."""

    device: str
    device_type: str
    pipeline: int
    stage: int
    tp_rank: int
    layers: tuple[int, int]

    @property
    def node(self) -> str:
        """Name of its node."""
        return self.device.rpartition(":")[0]

    @property
    def index(self) -> str:
        """Index of its device in the node."""
        return self.device.rpartition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Processes in the order of their global ranks, and how to start them.

    Parameters
    ----------
    script
        What to run on every rank, with its arguments; ``{device_type}`` in it is filled in.
    by_type
        Whether one line starts devices of one type only.
    """

    processes: tuple[Process, ...]
    script: str
    master: str
    port: int
    by_type: bool = False

    @classmethod
    def of_plan(cls, plan: Plan, order: str, script: str, master: str | None = None, port: int = 29500) -> Launch:
        """Number the devices in use.

        Parameters
        ----------
        order
            ``node``: node by node, each node's devices by index. ``pipeline``: pipeline by pipeline, stage by stage.
            ``stage``: stage by stage, pipeline by pipeline. The ranks of a tp group are always neighbours in the last
            two.
        """
        processes = processes_of(plan)
        if order == "node":
            nodes = list(dict.fromkeys(process.node for process in processes))
            processes.sort(key=lambda process: (nodes.index(process.node), int(process.index)))
        elif order == "stage":
            processes.sort(key=lambda process: (process.stage, process.pipeline, process.tp_rank))
        else:
            assert order == "pipeline", order
        return cls(processes=tuple(processes), script=script, master=master or processes[0].node, port=port)

    @property
    def ranks(self) -> dict[str, int]:
        """Device -> global rank."""
        return {process.device: rank for rank, process in enumerate(self.processes)}

    @property
    def runs(self) -> tuple[tuple[int, tuple[Process, ...]], ...]:
        """Consecutive ranks on one node, with the first of them."""
        out, first = [], 0
        for _, members in groupby(self.processes, key=lambda p: (p.node, p.device_type if self.by_type else "")):
            run = tuple(members)
            out.append((first, run))
            first += len(run)
        return tuple(out)

    @property
    def commands(self) -> tuple[str, ...]:
        """One torchrun line per run of ranks on a node."""
        runs = self.runs
        lines = []
        for n, (first, run) in enumerate(runs):
            where = f"on {run[0].node}: " + (
                f"ranks {first}-{first + len(run) - 1}" if len(run) > 1 else f"rank {first}"
            )
            lines.append(
                f"CUDA_VISIBLE_DEVICES={','.join(process.index for process in run)} torchrun --nnodes={len(runs)} "
                f"--node-rank={n} --nproc-per-node={len(run)} --master-addr={self.master} --master-port={self.port} "
                f"{self.script.replace('{device_type}', run[0].device_type)}  # {where}"
            )
        return tuple(lines)

    @property
    def table(self) -> str:
        """The rank map as CSV."""
        rows = ["rank,device,device_type,pipeline,stage,tp_rank,first_layer,last_layer"]
        for rank, p in enumerate(self.processes):
            rows.append(
                f"{rank},{p.device},{p.device_type},{p.pipeline},{p.stage},{p.tp_rank},{p.layers[0]},{p.layers[1] - 1}"
            )
        return "\n".join(rows) + "\n"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Nodes that take several lines."""
        times: dict[str, int] = {}
        for _, run in self.runs:
            times[run[0].node] = times.get(run[0].node, 0) + 1
        several = [f"{node} ({count})" for node, count in times.items() if count > 1]
        if not several:
            return ()
        return (
            "ranks of a node are not consecutive in this order, so it takes more than one torchrun line: "
            + ", ".join(several),
        )


def read_ranks(path: str | Path) -> tuple[str, ...]:
    """The device of every rank from a rank map as `Launch.table` writes it: of its columns, rank and device.

    Raises
    ------
    ValueError
        Naming the file, the line and the column.
    """
    devices: dict[int, str] = {}
    rows = reading.table(Path(path), ("rank", "device"))
    for row in rows:
        rank = row["rank"]
        if not rank.text.isdecimal() or not int(rank.text) < len(rows):
            raise rank.wrong(f"one of the ranks 0-{len(rows) - 1}, each on a line of its own")
        if int(rank.text) in devices:
            raise rank.wrong("a rank of its own")
        devices[int(rank.text)] = row["device"].text
    return tuple(devices[rank] for rank in range(len(rows)))


def processes_of(plan: Plan) -> list[Process]:
    """Every device in use, pipeline by pipeline, stage by stage."""
    return [
        Process(device=device, device_type=stage.device_type, pipeline=p, stage=s, tp_rank=t, layers=stage.layers)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        for t, device in enumerate(stage.devices)
    ]
