"""Small seeded profiles and clusters of unequal devices: ``from factories import cluster, profile``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.profile import Cell, Conditions, LayerKind, ModelProfile

GB = 10**9
UNEQUAL = {"fast": 1.0, "slow": 2.5}


def profile(
    *,
    seed: int = 0,
    num_layers: int = 6,
    speeds: Mapping[str, float] = UNEQUAL,
    tps: Sequence[int] = (1,),
    micro_batches: Sequence[int] = (1,),
    distinct: bool = True,
    ends: bool = False,
    tied: bool = False,
    forward_s: float = 0.010,
    backward_ratio: float = 2.0,
    update_s: float = 0.0,
    parameters: int = 50_000_000,
    output_bytes: int = 4_000_000,
    activation_bytes: int = 100_000_000,
    workspace_bytes: int = 0,
    logits_bytes: int = 0,
    spread: float = 0.25,
    conditions: Conditions | None = None,
    **others: Any,
) -> ModelProfile:
    """Profile whose layers take about `forward_s` on a device of speed 1, and so many times that on the others.

    Parameters
    ----------
    speeds
        Device type -> slowness; 2.5 takes 2.5 times as long as 1.0.
    tps, micro_batches
        Complete grid: tp takes 1 / tp^0.8 of the time, b samples 0.2 + 0.8 b times that of one; bytes scale exactly.
    distinct
        True: every layer is a kind of its own, times and sizes drawn within `spread`, per device type too, so that no
        device type is simply a multiple of another. False: one kind ``block``, every figure exactly as given.
    ends
        First layer ``embedding`` (time 0.1, no activations), last ``head`` (time 1.5, the only one with logits, by
        default its output), each with 3 x `parameters`; `num_layers` counts them.
    tied
        The head's weights are the embedding's; needs `ends`.
    others
        Further fields of `ModelProfile`, such as num_heads.
    """
    draw = random.Random(seed)

    def about(value: float) -> float:
        return value * draw.uniform(1 - spread, 1 + spread) if distinct else value

    num_blocks = num_layers - 2 * ends
    blocks = [f"block{i}" for i in range(num_blocks)] if distinct else ["block"] * num_blocks
    layers = ["embedding", *blocks, "head"] if ends else blocks
    kinds, cells = [], []
    for name in dict.fromkeys(layers):
        end = ends and name in ("embedding", "head")
        size = 3 * parameters if end else round(about(parameters))
        logits = (logits_bytes or output_bytes) if end and name == "head" else (0 if ends else logits_bytes)
        tie: dict[str, Any] = {"tied_to": "embedding", "tied_parameters": size} if tied and name == "head" else {}
        kind = LayerKind(name=name, parameters=size, output_bytes=output_bytes, logits_bytes=logits, **tie)
        kinds.append(kind)
        weight = {"embedding": 0.1, "head": 1.5}[name] if end else about(1.0)
        kept = 0 if end else round(about(activation_bytes))
        for device_type, slowness in speeds.items():
            forward = about(forward_s * weight * slowness)
            ratio = about(backward_ratio)
            for tp in tps:
                for b in micro_batches:
                    time = forward / tp**0.8 * (0.2 + 0.8 * b)
                    cells.append(
                        Cell(
                            kind=name,
                            device_type=device_type,
                            tp=tp,
                            micro_batch=b,
                            forward_s=time,
                            backward_s=time * ratio,
                            update_s=update_s * slowness / tp,
                            activation_bytes=kept * b // tp,
                            workspace_bytes=workspace_bytes * b // tp,
                        )
                    )
    return ModelProfile(
        name=f"model-{seed}",
        layers=tuple(layers),
        kinds=tuple(kinds),
        cells=tuple(cells),
        conditions=conditions or Conditions(sequence_length=1024),
        **others,
    )


def cluster(
    devices: Mapping[str, int] | None = None,
    *,
    per_node: int = 1,
    memory_bytes: int | Mapping[str, int] = 16 * GB,
    inside: float = 50.0 * GB,
    across: float | Mapping[tuple[str, str], float] = 2.0 * GB,
    alpha_s: float = 1e-5,
    peak_flops_per_s: float | None = None,
) -> Cluster:
    """Cluster of nodes with `per_node` equal devices each (the last node of a type may have fewer).

    Parameters
    ----------
    devices
        Device type -> number of devices; by default four of each of the two unequal types.
    memory_bytes
        Of every device, or per device type.
    inside
        Bytes per second between two devices of a node.
    across
        Bytes per second between nodes, or one figure per pair of device types (either order; 2 GB/s for the rest).
    alpha_s
        Seconds before the first byte, on every link.
    """
    devices = devices or dict.fromkeys(UNEQUAL, 4)

    def memory(name: str) -> int:
        return memory_bytes if isinstance(memory_bytes, int) else memory_bytes[name]

    def speed(a: str, b: str) -> float:
        if not isinstance(across, Mapping):
            return across
        return across.get((a, b), across.get((b, a), 2.0 * GB))

    types = tuple(
        DeviceType(name=name, memory_bytes=memory(name), peak_flops_per_s=peak_flops_per_s) for name in devices
    )
    link = Link(alpha_s=alpha_s, bytes_per_s=inside)
    nodes = [
        Node(name=f"{name}-{i}", devices=(name,) * min(per_node, count - i * per_node), link=link)
        for name, count in devices.items()
        for i in range(-(-count // per_node))
    ]
    links = [
        NetworkLink(between=(a, b), link=Link(alpha_s=alpha_s, bytes_per_s=speed(a, b)))
        for a, b in combinations_with_replacement(devices, 2)
    ]
    return Cluster(name="cluster", device_types=types, nodes=tuple(nodes), links=tuple(links))
