"""``hpp measure``: what layers cost on this device, what links there are between processes."""

from __future__ import annotations

import argparse
import math
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from planner import files
from planner.cli.arguments import count, counts
from planner.plans import seconds, size, table, wrapped
from planner.profile import ModelProfile

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    measure = commands.add_parser(
        "measure",
        help="measure a model's layers on this device, or the links between processes",
        description="Measure a model's layers on this device. With --links, under torchrun, the links between its"
        " processes instead; with --merge put profiles of several devices together.",
    )
    measure.set_defaults(run=_measure)
    measure.add_argument("task", metavar="FILE:FUNCTION", nargs="?", help="returns a model and its batches or inputs")
    measure.add_argument("-o", "--output", required=True, metavar="FILE", help="profile or cluster to write")
    measure.add_argument("--device", metavar="NAME", help="device type of this machine; by default the device's name")
    measure.add_argument("--on", choices=("cpu", "cuda"), help="cuda where there is one, if not given")
    measure.add_argument("--threads", type=count, default=1, metavar="N", help="of a CPU (default 1)")
    layers = measure.add_argument_group("layers")
    layers.add_argument("--micro-batch", type=counts, default=(1,), metavar="B,..", help="sizes, as 1,2,4 (default 1)")
    layers.add_argument("--dtype", choices=tuple(DTYPES), help="of weights and activations, if not the model's own")
    layers.add_argument("--name", metavar="NAME", help="of the model; by default the function's")
    layers.add_argument("--attention", default="unknown", metavar="NAME", help="for the profile's conditions")
    layers.add_argument("--runs", type=count, metavar="N", help="timed passes per micro-batch size")
    layers.add_argument("--copies", type=count, metavar="N", help="layers of a kind that are run together")
    layers.add_argument("--tp", type=count, default=1, metavar="N", help="as one of N processes under torchrun")
    layers.add_argument("--memory-only", action="store_true", help="count bytes without running anything")
    layers.add_argument("--merge", nargs="+", metavar="PROFILE", help="put profiles of one model together")
    links = measure.add_argument_group("links")
    links.add_argument("--links", action="store_true", help="measure links between the processes torchrun started")
    links.add_argument("--ranks", type=count, metavar="N", help="start N processes on this machine, no torchrun")
    links.add_argument("--memory", type=float, metavar="GIB", help="of the device, if not all of it may be used")
    links.add_argument("--burst", type=int, default=0, metavar="BYTES", help="messages below pass a shaper; left out")


def _measure(options: argparse.Namespace) -> int:
    asked = {"FILE:FUNCTION": options.task, "--links": options.links, "--merge": options.merge}
    given = [name for name, value in asked.items() if value]
    if len(given) != 1:
        got = " and ".join(given) or "nothing"
        raise ValueError(f"measure: {got} given, expected exactly one of {', '.join(asked)}")
    idle = [name for name in ("ranks", "memory", "burst") if getattr(options, name) and not options.links]
    if idle:
        raise ValueError(f"--{idle[0]}: has no effect without --links")
    output = Path(options.output)
    if output.suffix.lower() not in files.SUFFIXES:
        raise ValueError(f"--output: {output} ends in none of {', '.join(files.SUFFIXES)}")
    if not output.parent.is_dir():
        raise ValueError(f"--output: there is no directory {output.parent}")
    if options.merge:
        return _merge(options)
    try:
        torch = import_module("torch")
    except ModuleNotFoundError:
        raise ValueError("measure: torch is not installed; pip install 'hpp-planner[runtime]'") from None
    if options.on == "cuda" and not torch.cuda.is_available():
        raise ValueError("--on: cuda, and torch sees no GPU here")
    torch.set_num_threads(options.threads)
    return _links(options) if options.links else _layers(options, torch)


def _device(options: argparse.Namespace, torch: Any) -> Any:
    """This process's device."""
    if options.on == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


# Layers


def _merge(options: argparse.Namespace) -> int:
    merge = import_module("planner.merge")
    merged = merge.profiles([ModelProfile.load(path) for path in options.merge], options.merge)
    _write(merged, options.output)
    return 0


def _layers(options: argparse.Namespace, torch: Any) -> int:
    given, measure = import_module("runtime.given"), import_module("runtime.measure")
    model, inputs, targets = given.parts(options.task)
    common: dict[str, Any] = {
        "micro_batches": options.micro_batch,
        "dtype": getattr(torch, DTYPES[options.dtype]) if options.dtype else None,
        "name": options.name or _name(options.task),
        "attention": options.attention,
    }
    if options.copies:
        common["copies"] = options.copies
    if options.memory_only:
        counted = measure.memory(model, inputs, targets, device_type=options.device or "cpu", **common)
        _write(counted, options.output)
        return 0
    device = _device(options, torch)
    with _Group(options.tp, device) as group:
        measured = measure.profile(
            model,
            inputs,
            targets,
            device=device,
            device_type=options.device,
            mesh=group.mesh,
            **({"runs": options.runs} if options.runs else {}),
            **common,
        )
        if group.first:
            _write(measured, options.output)
    return 0


def _name(task: str) -> str:
    """The same wherever the file is: profiles of one model are merged."""
    path, _, function = task.partition(":")
    return f"{Path(path).stem}:{function or 'build'}"


def _write(profile: ModelProfile, path: str) -> None:
    """Writes a profile and prints what is in it."""
    profile.save(path)
    devices = ", ".join(profile.device_types)
    print(f"{path}: {profile.name}, {profile.num_layers} layers of {len(profile.kinds)} kinds on {devices}")
    header = ["", ">micro-batch", ">forward", ">backward", ">update", ">kept", ">logits", ">workspace"]
    logits = {kind.name: kind.logits_bytes for kind in profile.kinds}
    rows = [
        [
            cell.kind + (f" on {cell.device_type}" if len(profile.device_types) > 1 else ""),
            f"{cell.micro_batch}" + (f" (tp {cell.tp})" if cell.tp > 1 else ""),
            *(seconds(each) for each in (cell.forward_s, cell.backward_s, cell.update_s)),
            size(cell.activation_bytes),
            size(logits[cell.kind] * cell.micro_batch),
            size(cell.workspace_bytes),
        ]
        for cell in profile.cells
    ]
    print("\n".join(table(header, rows)))
    for title, lines in (("note", profile.conditions.notes), ("warning", profile.warnings)):
        for line in lines:
            print("\n".join(wrapped(f"  {title}", line)))


# Links


def _links(options: argparse.Namespace) -> int:
    links, torch = import_module("runtime.links"), import_module("torch")
    if options.memory is not None and not 0 < options.memory < math.inf:
        raise ValueError(f"--memory: {options.memory:g}, expected GiB above 0")
    common = {
        "device_type": options.device,
        "memory_bytes": None if options.memory is None else round(options.memory * 2**30),
        "name": Path(options.output).stem,
        "burst_bytes": options.burst,
    }
    if options.ranks is not None:
        links.check(options.ranks, burst_bytes=options.burst)
        found = import_module("runtime.emulate").start(options.ranks, _cluster, common, limit_s=600.0)[0]
        _write_cluster(found, options.output)
        return 0
    device = _device(options, torch)
    with _Group(0, device) as group:
        found = links.cluster(device=device, **common)
        if group.first:
            _write_cluster(found, options.output)
    return 0


def _cluster(_: int, options: dict[str, Any]) -> Any:
    return import_module("runtime.links").cluster(**options)


def _write_cluster(cluster: Any, path: str) -> None:
    cluster.save(path)
    print(f"{path}: {len(cluster.nodes)} nodes, {len(cluster.devices)} devices, {', '.join(cluster.types)}")
    rows = [[f"inside {node.name}", *_figures(node.link)] for node in cluster.nodes if node.link is not None]
    rows += [[f"groups of {node.name}", *_figures(node.group_link)] for node in cluster.nodes if node.group_link]
    rows += [
        [" - ".join(each.between) + (f", {each.devices} at once" if each.devices > 1 else ""), *_figures(each.link)]
        for each in cluster.links
    ]
    print("\n".join(table(["", ">alpha", ">MB/s at 1 MB", ">at 16 MB"], rows)))
    for note in cluster.notes:
        print("\n".join(wrapped("  note", note)))


def _figures(link: Any) -> list[str]:
    return [seconds(link.alpha_s), *(f"{link.bandwidth(nbytes) / 1e6:,.0f}" for nbytes in (1e6, 16e6))]


class _Group:
    """The processes that torchrun started, connected while they measure together.

    Parameters
    ----------
    tp
        How many there have to be, as a tp group; 1 for none, 0 for any number, to measure links.
    """

    def __init__(self, tp: int, device: Any) -> None:
        self.tp, self.device, self.mesh = tp, device, None
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if tp != 1 and "RANK" not in os.environ:
            what = "--links" if tp == 0 else f"--tp: {tp}"
            also = " or --ranks N" if tp == 0 else ""
            raise ValueError(
                f"{what}: expected torchrun --nproc-per-node N --no-python hpp measure ..., one per device{also}"
            )
        if tp > 1 and world != tp:
            raise ValueError(f"--tp: {tp}, and torchrun started {world} processes, expected {tp}")
        self.first = int(os.environ.get("RANK", "0")) == 0

    def __enter__(self) -> _Group:
        if self.tp != 1:
            dist = import_module("torch.distributed")
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            if self.tp > 1:
                mesh = import_module("torch.distributed.device_mesh")
                self.mesh = mesh.DeviceMesh(self.device.type, list(range(self.tp)))
        return self

    def __exit__(self, *_: object) -> None:
        if self.tp != 1:
            import_module("torch.distributed").destroy_process_group()
