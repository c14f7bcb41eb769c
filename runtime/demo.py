"""`hpp demo`: a small GPT on an emulated mixed cluster, trained with the even plan and with the planner's.

The even plan is what frameworks run: identical pipelines, equal layers per stage, equal micro-batches per pipeline,
the best number of pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from planner.cluster import Cluster
from planner.evaluate import evaluate
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.job import Job
from planner.plans import Plan, table
from planner.profile import ModelProfile
from planner.search import plan as search
from runtime.emulate import Emulation, Group, Network, Run
from runtime.model import Model

VOCABULARY, LENGTH, HIDDEN, HEADS = 748, 32, 64, 4  # embedding and head weigh as much as a block
COUNTED = 64  # the tokens that occur: fewer are learnt sooner
LEAST_MBIT_PER_S = 1.0  # 8 KiB of activations then take as long as some layers
LAYER_BYTES = 50_000 * 16  # model state of a layer at this size


# The model


class Embedding(nn.Module):
    """Tokens and positions to vectors."""

    def __init__(self, hidden: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.token(tokens) + self.position.weight[: tokens.shape[-1]]
        return out


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class Head(nn.Module):
    """Vectors to logits."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(x))
        return out


def gpt(
    num_layers: int,
    *,
    hidden: int = HIDDEN,
    heads: int = HEADS,
    vocabulary: int = VOCABULARY,
    length: int = LENGTH,
) -> Model:
    """A GPT of an embedding, `num_layers` - 2 blocks and a head."""

    def layer(l: int) -> nn.Module:
        if l == 0:
            return Embedding(hidden, vocabulary, length)
        return Head(hidden, vocabulary) if l == num_layers - 1 else Block(hidden, heads)

    return Model(num_layers=num_layers, layer=layer)


def counting(
    samples: int, *, vocabulary: int = VOCABULARY, length: int = LENGTH
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Step -> a global batch of sequences that count in steps of 1 to 4 from anywhere: easy to learn."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        begin = torch.randint(vocabulary, (samples, 1), generator=generator)
        stride = torch.randint(1, 5, (samples, 1), generator=generator)
        tokens = (begin + stride * torch.arange(length + 1)) % vocabulary
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


# The even plan


def even(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan:
    """The best plan of identical pipelines with equal layers and equal micro-batches, over all devices.

    Raises
    ------
    ValueError
        If none fits.
    """
    found = [each for each in _even(profile, cluster, job) if fits(each)]
    if not found:
        raise ValueError(
            f"no even plan of {profile.name!r} fits {cluster.name!r} with {job.global_batch} samples per step"
        )
    return min(found, key=lambda each: each.predicted.simulated_s or 0.0)


def _even(profile: ModelProfile, cluster: Cluster, job: Job) -> Iterator[Plan]:
    world = len(cluster.devices)
    b = min(job.micro_batches or (1,))
    for copies in range(1, world + 1):
        depth = world // copies
        if world % copies or depth > profile.num_layers or job.global_batch % (copies * b):
            continue
        cuts = equal_cuts(profile.num_layers, depth)
        stages = tuple(StageLayout(layers=pair) for pair in pairwise(cuts))
        shape = PipelineLayout(stages=stages, micro_batch=b, num_micro_batches=job.global_batch // (copies * b))
        for order in ("stage", "pipeline"):  # which ranks follow each other along a pipeline
            yield evaluate(profile, cluster, Layout(pipelines=(shape,), copies=copies, order=order), job)


def equal_cuts(num_layers: int, depth: int) -> list[int]:
    """First layers of the stages, and the end; sizes at most one apart, the larger ones first."""
    size, more = divmod(num_layers, depth)
    return [s * size + min(s, more) for s in range(depth + 1)]


def fits(plan: Plan) -> bool:
    """Whether every stage fits its device."""
    return all(stage.memory.total <= (1 - plan.job.memory_margin) * stage.memory.capacity + 1 for stage in plan.stages)


# The demo


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A plan and how it ran."""

    name: str
    plan: Plan
    run: Run


def mixed_cluster(bytes_per_s: float | None = None) -> Emulation:
    """Two fast devices and two that take three times as long, each with memory for six of eight layers."""
    memory = round(6.5 * LAYER_BYTES)
    return Emulation(
        name="two fast, two slow",
        groups=(
            Group(
                device_type="fast",
                count=2,
                forward_s=0.005,
                backward_s=0.010,
                memory_bytes=memory,
                bytes_per_s=bytes_per_s,
            ),
            Group(
                device_type="slow",
                count=2,
                forward_s=0.015,
                backward_s=0.030,
                memory_bytes=memory,
                bytes_per_s=bytes_per_s,
            ),
        ),
    )


def run(steps: int, mbit_per_s: float | None, *, say: Callable[[str], None], show: Callable[[str], None]) -> None:
    """The whole demo: says what it does, shows what came out.

    Parameters
    ----------
    steps
        Steps of each plan; one to warm up is not counted.
    mbit_per_s
        Rate of every device's network port; None for loopback.
    """
    if mbit_per_s is not None and not LEAST_MBIT_PER_S <= mbit_per_s < math.inf:
        raise ValueError(f"--link: {mbit_per_s:g}, expected Mbit/s from {LEAST_MBIT_PER_S:g} on")
    emulation = mixed_cluster(None if mbit_per_s is None else mbit_per_s * 1e6 / 8)
    if mbit_per_s is not None and (refusal := Network.refusal()) is not None:
        raise ValueError(f"--link: links cannot be shaped here: {refusal}")
    show("two fast devices and two that take three times as long, memory for 6 of 8 layers each; 32 samples a step")
    evenly, planned = train(emulation, steps=steps, say=say)
    show(report(evenly, planned))


def train(
    emulation: Emulation, *, num_layers: int = 8, samples: int = 32, steps: int = 4, say: Callable[[str], None]
) -> tuple[Trained, Trained]:
    """The even plan and the planner's, each made and run."""
    model, batch = gpt(num_layers), counting(samples, vocabulary=COUNTED)
    profile = emulation.profile(model, batch(0)[0][:1], name=f"GPT of {num_layers - 2} blocks")
    job = emulation.job(samples)
    plans = (("even", even(profile, emulation.cluster, job)), ("planned", search(profile, emulation.cluster, job)))
    trained = []
    for name, plan in plans:
        seconds = plan.predicted.simulated_s or plan.predicted.iteration_s
        say(f"{name}: {steps + 1} steps of about {seconds:.1f} s under {shape(plan)} ...")
        ran = emulation.run(plan, profile, model, batch, steps=steps, optimizer=adamw)
        trained.append(Trained(name=name, plan=plan, run=ran))
    return trained[0], trained[1]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, fast enough for a model this small to learn within a few steps."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def shape(plan: Plan) -> str:
    """``2 pipelines of fast 7 | slow 3, 16 micro-batches``: layers per stage."""
    words = []
    shapes = [
        (" | ".join(f"{s.device_type} {s.num_layers}" for s in p.stages), p.num_micro_batches) for p in plan.pipelines
    ]
    for chain, m in dict.fromkeys(shapes):
        count = shapes.count((chain, m))
        words.append(f"{count} x [{chain}] {m}" if count > 1 else f"[{chain}] {m}")
    return ", ".join(words)


def report(evenly: Trained, planned: Trained) -> str:
    """Both runs beside their predictions, and their losses."""
    rows = []
    for each in (evenly, planned):
        simulated_s = _simulated_s(each)
        error = each.run.step_s / simulated_s - 1
        seconds = (each.plan.predicted.iteration_s, simulated_s, each.run.step_s)
        rows.append([each.name, *(f"{value:.3f}" for value in seconds), f"{error:+.1%}", shape(each.plan)])
    gain = evenly.run.step_s / planned.run.step_s
    pairs = list(zip(evenly.run.losses, planned.run.losses, strict=True))
    apart = max(abs(a - b) / a for a, b in pairs)
    return "\n".join(
        [
            *table(
                ["plan", ">formula s", ">simulated s", ">measured s", ">to simulated", "layers, micro-batches"], rows
            ),
            "",
            f"As planned a step is {gain:.2f} times as fast; {_simulated_s(evenly) / _simulated_s(planned):.2f} was"
            " predicted.",
            "",
            *table(
                [">step", ">loss, even", ">loss, planned"],
                [[str(n), *map(_loss, each)] for n, each in enumerate(pairs, 1)],
            ),
            "",
            "The losses are equal." if not apart else f"The losses agree within {apart:.0e}: sums in another order.",
        ]
    )


def _loss(value: float) -> str:
    return f"{value:.6f}"


def _simulated_s(trained: Trained) -> float:
    assert trained.plan.predicted.simulated_s is not None
    return trained.plan.predicted.simulated_s
