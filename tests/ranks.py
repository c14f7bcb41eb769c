"""Starts ranks by fork for the tests of the runtime, under a hard limit, and leaves nothing behind; plans without a
search; a small model."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer does; once here, not in each rank
import torch.distributed as dist
from torch import Tensor, nn

from planner.job import Job
from planner.plans import Block, Pipeline, Plan, Predicted, Provenance, Stage, StageMemory, TiedBlock
from runtime.model import Model

torch.set_num_threads(1)  # also for what ranks are compared with: sums depend on the number of threads

VOCABULARY, HIDDEN, LENGTH = 32, 16, 8
LIMIT_S = 60.0


def start(world: int, work: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """What ``work(rank, *arguments)`` returns on each of `world` ranks, with torch.distributed up over gloo.

    An exception of a rank is raised here with its traceback; ranks that are not done by the limit are killed.
    """
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_rank, args=(rank, world, folder, pipe[1], work, arguments))
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, end) in zip(ranks, pipes, strict=True):
            process.start()
            end.close()
        try:
            return _collect([pipe[0] for pipe in pipes], limit_s)
        finally:
            for process in ranks:
                process.join(2.0)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


def _collect(pipes: Sequence[Any], limit_s: float) -> list[Any]:
    until, results, failures = time.monotonic() + limit_s, [], []
    for rank, pipe in enumerate(pipes):
        answered = pipe.poll(max(0.0, until - time.monotonic()))
        try:
            message = pipe.recv_bytes() if answered else _packed("failed", f"no answer within {limit_s:g} s")
            outcome, value = torch.load(io.BytesIO(message), weights_only=False)
        except EOFError:
            outcome, value = "gone", "ended without an answer"
        pipe.close()
        results.append(value if outcome == "done" else None)
        if outcome == "failed":
            failures.append(f"rank {rank}: {value}")
    assert not failures, "\n".join(failures)
    return results


def _rank(rank: int, world: int, folder: str, pipe: Any, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    gc.freeze()  # what came with the fork is not searched again and again
    torch.set_num_threads(1)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    try:
        connect(Path(folder) / "store", rank, world)
        dist.barrier()  # a rank that leaves at once must not break the connecting of another
        pipe.send_bytes(_packed("done", work(rank, *arguments)))
    except BaseException:
        pipe.send_bytes(_packed("failed", traceback.format_exc()))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    os._exit(0)  # no exit handlers of the parent


def _packed(outcome: str, value: Any) -> bytes:
    """Whole bytes: a pipe would send tensors as handles of memory that goes with the rank."""
    buffer = io.BytesIO()
    torch.save((outcome, value), buffer)
    return buffer.getvalue()


def connect(store: Path, rank: int, world: int, timeout_s: float = 20.0) -> None:
    """Join the ranks that meet at a file."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)


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
