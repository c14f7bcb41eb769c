"""Profiles of Llama-2-like models and clusters of data-centre devices, computed, not measured.

Device figures are data-sheet facts; the efficiencies are assumptions, typical for large matrix products. A layer takes

    forward = FLOP / (peak x efficiency x tp efficiency x tp) + launch + all-reduces inside the tp group
    backward = twice the FLOP, the same all-reduces

with 2 % noise per cell, drawn from the seed: no two devices or degrees then stand in a simple ratio. Half precision,
FlashAttention, sequence parallelism inside a tp group, 4096 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.profile import Cell, Conditions, LayerKind, ModelProfile

GIB = 1 << 30
SEQUENCE = 4096
NOISE = 0.02
LAUNCH_S = 80e-6
ALL_REDUCE_S = 20e-6
NETWORK_S = 30e-6
LINK_EFFICIENCY = 0.7
TP_EFFICIENCY = {1: 1.0, 2: 0.93, 4: 0.85, 8: 0.75}
UPDATE_BYTES = 34  # read and written per parameter in a mixed-precision Adam step


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Data-sheet figures of a device in its usual node; `efficiency` is assumed. Rates are per direction and device."""

    peak_flops_per_s: float
    efficiency: float
    memory_bytes: int
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    network_bytes_per_s: float
    per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shape of a Llama-2-like model; fewer key-value heads than heads is grouped-query attention."""

    num_blocks: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int = 32000


DEVICES = {
    "H100": Device(
        peak_flops_per_s=989e12,
        efficiency=0.45,
        memory_bytes=80 * GIB,
        memory_bytes_per_s=3.35e12,
        inside_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        per_node=8,
    ),
    "A100": Device(
        peak_flops_per_s=312e12,
        efficiency=0.52,
        memory_bytes=80 * GIB,
        memory_bytes_per_s=2.04e12,
        inside_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
        per_node=8,
    ),
    "V100": Device(
        peak_flops_per_s=125e12,
        efficiency=0.50,
        memory_bytes=32 * GIB,
        memory_bytes_per_s=0.9e12,
        inside_bytes_per_s=150e9,
        network_bytes_per_s=12.5e9,
        per_node=8,
    ),
    "T4": Device(
        peak_flops_per_s=65e12,
        efficiency=0.35,
        memory_bytes=16 * GIB,
        memory_bytes_per_s=0.32e12,
        inside_bytes_per_s=12e9,
        network_bytes_per_s=1.5e9,
        per_node=4,
    ),
}
MODELS = {
    "7B": Model(num_blocks=32, hidden=4096, heads=32, kv_heads=32, feed_forward=11008),
    "13B": Model(num_blocks=40, hidden=5120, heads=40, kv_heads=40, feed_forward=13824),
    "70B": Model(num_blocks=80, hidden=8192, heads=64, kv_heads=8, feed_forward=28672),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Per sample: FLOP of a forward pass, bytes kept and temporary bytes, at tp 1; all-reduces of a forward pass."""

    kind: LayerKind
    flop: float
    kept_bytes: int
    workspace_bytes: int
    all_reduces: int


def profile(
    model: str, devices: Sequence[str], tps: Sequence[int], micro_batches: Sequence[int], seed: int = 0
) -> ModelProfile:
    """Every layer kind on every device type at every tp degree (as far as its node holds it) and micro-batch size."""
    shape = MODELS[model]
    layers = _layers(shape)
    draw = random.Random(f"{model} {seed}")
    cells = tuple(
        _cell(layer, name, tp, b, 2 * shape.hidden * SEQUENCE * b, draw)
        for name in devices
        for tp in tps
        if tp <= DEVICES[name].per_node
        for b in micro_batches
        for layer in layers
    )
    return ModelProfile(
        name=f"Llama-2-{model}-like",
        layers=("embedding", *["block"] * shape.num_blocks, "head"),
        kinds=tuple(layer.kind for layer in layers),
        cells=cells,
        conditions=Conditions(
            dtype="half",
            attention="flash",
            sequence_length=SEQUENCE,
            timer="none: computed from FLOP, data sheets and assumed efficiencies",
            source="benchmarks/search_time/generate.py",
        ),
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
    )


def _layers(shape: Model) -> tuple[_Layer, ...]:
    h, ffn, s = shape.hidden, shape.feed_forward, SEQUENCE
    grouped = shape.kv_heads / shape.heads
    attention, mlp, table = round(h * h * (2 + 2 * grouped)), 3 * h * ffn, h * shape.vocabulary
    # Half-precision values kept: two norms' inputs and outputs, q, k, v, attention output; gate, up, their product.
    kept = 2 * s * round(h * (6 + 2 * grouped) + 3 * ffn)
    output = 2 * s * h
    return (
        _Layer(
            kind=LayerKind(name="embedding", parameters=table, output_bytes=output, recomputable=False),
            flop=0.0,
            kept_bytes=8 * s,
            workspace_bytes=0,
            all_reduces=1,
        ),
        _Layer(
            kind=LayerKind(name="block", parameters=attention + mlp + 2 * h, output_bytes=output, num_tensors=9),
            flop=2.0 * s * (attention + mlp) + 2.0 * s * s * h,
            kept_bytes=kept,
            workspace_bytes=2 * s * ffn,
            all_reduces=2,
        ),
        _Layer(
            kind=LayerKind(
                name="head",
                parameters=table + h,
                output_bytes=0,
                logits_bytes=4 * s * shape.vocabulary,
                num_tensors=2,
                recomputable=False,
            ),
            flop=2.0 * s * table,
            kept_bytes=2 * output,
            workspace_bytes=0,
            all_reduces=1,
        ),
    )


def _cell(layer: _Layer, name: str, tp: int, b: int, message: int, draw: random.Random) -> Cell:
    device = DEVICES[name]
    rate = device.peak_flops_per_s * device.efficiency * TP_EFFICIENCY[tp] * tp
    steps = 2 * (tp - 1) / tp * message / (device.inside_bytes_per_s * LINK_EFFICIENCY)
    shared = layer.all_reduces * (steps + ALL_REDUCE_S) if tp > 1 else 0.0
    forward = layer.flop * b / rate + LAUNCH_S + shared
    backward = 2 * layer.flop * b / rate + LAUNCH_S + shared

    def about(seconds: float) -> float:
        return round(seconds * (1 + NOISE * draw.gauss(0, 1)), 7)

    return Cell(
        kind=layer.kind.name,
        device_type=name,
        tp=tp,
        micro_batch=b,
        forward_s=about(forward),
        backward_s=about(backward),
        activation_bytes=layer.kept_bytes * b // tp,
        update_s=about(UPDATE_BYTES * layer.kind.parameters / tp / device.memory_bytes_per_s),
        workspace_bytes=layer.workspace_bytes * b // tp,
    )


def cluster(counts: Mapping[str, int]) -> Cluster:
    """Full nodes of each device type; devices that send together each have a network adapter of their own."""
    return Cluster(
        name=" + ".join(f"{count} {name}" for name, count in counts.items()),
        device_types=tuple(
            DeviceType(
                name=name, memory_bytes=DEVICES[name].memory_bytes, peak_flops_per_s=DEVICES[name].peak_flops_per_s
            )
            for name in counts
        ),
        nodes=tuple(node for name, count in counts.items() for node in _nodes(name, count)),
        links=tuple(
            NetworkLink(between=(a, b), devices=devices, link=_network(a, b, devices))
            for a, b in combinations_with_replacement(counts, 2)
            for devices in (1, 2, 4, 8)
            if devices <= min(DEVICES[a].per_node, DEVICES[b].per_node)
        ),
    )


def _nodes(name: str, count: int) -> Iterator[Node]:
    device = DEVICES[name]
    link = Link(alpha_s=ALL_REDUCE_S, bytes_per_s=device.inside_bytes_per_s * LINK_EFFICIENCY)
    for index in range(-(-count // device.per_node)):
        size = min(device.per_node, count - index * device.per_node)
        yield Node(name=f"{name.lower()}-{index}", devices=(name,) * size, link=link)


def _network(a: str, b: str, devices: int) -> Link:
    slower = min(DEVICES[a].network_bytes_per_s, DEVICES[b].network_bytes_per_s)
    return Link(alpha_s=NETWORK_S, bytes_per_s=devices * slower * LINK_EFFICIENCY)
