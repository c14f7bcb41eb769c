"""Ranks that are forked for the tests of the runtime; plans without a search; a small model; a clock of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.job import Job
from planner.plans import Block, Pipeline, Plan, Predicted, Provenance, Stage, StageMemory, TiedBlock
from runtime import emulate
from runtime.emulate import connect as connect
from runtime.emulate import start as start
from runtime.model import Model

torch.set_num_threads(1)  # also for what ranks are compared with: sums depend on the number of threads

VOCABULARY, HIDDEN, LENGTH = 32, 16, 8


class Clock:
    """Seconds that pass only while somebody sleeps."""

    monotonic = staticmethod(time.monotonic)  # limits of processes stay what they are

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def emulated_time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Emulated devices compute, and sleep, without taking time: every rank's clock stands at what its layers should
    have taken since the last barrier. A step then lasts as long as the layers of its busiest rank, whatever else the
    machine does."""
    clock, barrier = Clock(), dist.barrier

    def together(*arguments: Any, **options: Any) -> None:
        barrier(*arguments, **options)
        clock.now = 0.0

    monkeypatch.setattr(emulate, "time", clock)
    monkeypatch.setattr(dist, "barrier", together)
    return clock


def make_plan(
    pipelines: Sequence[tuple[Sequence[int], int]],
    *,
    micro_batch: int | Sequence[int] = 2,
    tied: bool = False,
    recompute: Sequence[int] = (),
    order: Sequence[int] | None = None,
    ahead: bool = False,
    tp: int = 1,
    **job: Any,
) -> Plan:
    """A plan of (layers per stage, micro-batches) per pipeline, costs left at zero.

    Parameters
    ----------
    order
        Rank of each stage in turn; ascending if None.
    ahead
        2 (S - 1 - s) forwards in warm-up instead of S - 1 - s.
    """
    sizes = [micro_batch] * len(pipelines) if isinstance(micro_batch, int) else list(micro_batch)
    count = sum(len(split) for split, _ in pipelines)
    ranks = iter(order if order is not None else range(count))
    built = []
    for (split, m), b in zip(pipelines, sizes, strict=True):
        bounds = list(accumulate(split, initial=0))
        stages = []
        for s, (i, j) in enumerate(pairwise(bounds)):
            behind, rank = len(split) - 1 - s, next(ranks)
            stages.append(
                Stage(
                    device_type="cpu",
                    tp=tp,
                    layers=(i, j),
                    devices=tuple(f"host:{rank * tp + t}" for t in range(tp)),
                    recompute=tuple(l for l in recompute if i <= l < j),
                    in_flight=min(m, (2 * behind if ahead else behind) + 1),
                    forward_s=0.0,
                    backward_s=0.0,
                    memory=StageMemory(
                        weights=0,
                        gradients=0,
                        optimizer=0,
                        activations=0,
                        logits=0,
                        workspace=0,
                        sync_buffer=0,
                        context=0,
                        capacity=1 << 30,
                    ),
                )
            )
        built.append(Pipeline(micro_batch=b, num_micro_batches=m, stages=tuple(stages), time_s=0.0))
    return _with_blocks(built, tied, Job(global_batch=sum(p.samples for p in built), **job))


def _with_blocks(pipelines: Sequence[Pipeline], tied: bool, job: Job) -> Plan:
    last = pipelines[0].stages[-1].layers[1] - 1
    cuts = sorted({edge for p in pipelines for stage in p.stages for edge in stage.layers})
    blocks = [
        Block(layers=(i, j), owners=tuple(_owner(p, i) for p in pipelines), gradient_bytes=0) for i, j in pairwise(cuts)
    ]
    holders = dict.fromkeys((p, _owner(q, l)) for p, q in enumerate(pipelines) for l in (0, last))
    tied_blocks = ()
    if tied and len(holders) > len(pipelines):
        tied_blocks = (TiedBlock(layers=(0, last), owners=tuple(holders), gradient_bytes=0),)
    return Plan(
        profile_name="tiny",
        cluster_name="host",
        predicted=Predicted(
            iteration_s=1.0,
            pipeline_s=1.0,
            sync_s=0.0,
            update_s=0.0,
            bubble_fraction=0.0,
            samples_per_s=1.0,
            floor_s=0.0,
            one_f_one_b_s=0.0,
        ),
        lower_bound_s=0.0,
        gap=0.0,
        pipelines=tuple(pipelines),
        blocks=tuple(blocks),
        tied_blocks=tied_blocks,
        job=job,
        provenance=Provenance(profile="", cluster="", job=job.digest),
    )


def _owner(pipeline: Pipeline, l: int) -> int:
    return next(s for s, stage in enumerate(pipeline.stages) if stage.layers[0] <= l < stage.layers[1])


class Embedding(nn.Module):
    """Tokens to vectors; hands a mask on beside them, so that stages exchange two tensors."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.masked = masked

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Any:
        x = self.token(tokens)
        return (x, mask) if self.masked else x


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 3 * HIDDEN, bias=False),
            nn.Linear(HIDDEN, HIDDEN),
        )
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, HIDDEN // 2)).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(a.transpose(1, 2).flatten(-2))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return x if mask is None else (x, mask)


class Head(nn.Module):
    """Vectors to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.out(self.norm(x))


def make_model(num_layers: int, *, tied: bool = False, masked: bool = False) -> Model:
    """An embedding, blocks, and a head."""

    def layer(l: int) -> nn.Module:
        return Embedding(masked) if l == 0 else Head() if l == num_layers - 1 else Layer()

    weights = ((0, "token.weight"), (num_layers - 1, "out.weight")) if tied else None
    return Model(num_layers=num_layers, layer=layer, loss=cross_entropy, tied=weights)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed, in the precision of the logits, so that float64 runs stay float64."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def make_batch(samples: int, step: int, masked: bool = False) -> tuple[Any, Tensor]:
    """Inputs and targets of a whole global batch; with a mask, causal with a few more tokens hidden."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100  # so that pipelines count unequal tokens
    if not masked:
        return inputs, targets
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(samples, 1, LENGTH, LENGTH).clone()
    mask[::2, :, 4:, 1] = False
    return (inputs, mask), targets
