"""A decoder as Hugging Face's LLaMA is built, as a chain of layers: measured, planned and trained.

    hpp measure examples/decoder.py:build --device cpu --micro-batch 1,2,4 -o profile.json
    hpp measure examples/decoder.py:llama_8b --memory-only -o memory.json   # 8 billion parameters, on any machine
    python -m runtime.launch plan.json examples/decoder.py:build --steps 100

RMS norms, rotary positions, grouped queries, a gated MLP, causal attention. Where samples are of unequal length, which
tokens are there travels beside the hidden states from layer to layer, and the padding has no targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.model import Model

IGNORED = -100  # target of a token that does not count
Batch = Callable[..., tuple[Any, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes, as in a ``config.json``; `tied` if the head's matrix is the embedding's, `padded` for unequal samples."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    length: int = 64
    tied: bool = False
    padded: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32 whatever the precision of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over rotated queries and keys."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        self.size = size
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden, bias=False)
        angles = torch.outer(
            torch.arange(config.length).float(), config.rope_theta ** -(torch.arange(0, size, 2).float() / size)
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, there: Tensor | None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, attn_mask=_mask(there), is_causal=there is None, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def _rotated(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        a, b = x.chunk(2, dim=-1)
        return x * self.cos[:length] + torch.cat((-b, a), dim=-1) * self.sin[:length]


def _mask(there: Tensor | None) -> Tensor | None:
    """True where a token may look: at itself, and at tokens before it that are there."""
    if there is None:
        return None
    length = there.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=there.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=there.device)
    return (causal & there[:, None, None, :]) | itself


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Embedding(nn.Module):
    """Tokens to vectors."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, there: Tensor | None = None) -> Any:
        return _with(self.embed_tokens(tokens), there)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, there: Tensor | None = None) -> Any:
        x = x + self.self_attn(self.input_layernorm(x), there)
        return _with(x + self.mlp(self.post_attention_layernorm(x)), there)


class Head(nn.Module):
    """Norm, and vectors to logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        return self.lm_head(self.norm(x))


def _with(x: Tensor, there: Tensor | None) -> Any:
    return x if there is None else (x, there)


def parallelize(layer: nn.Module, l: int, mesh: Any) -> None:
    """Divide the heads and the MLP of a block over a tp group; embedding and head stay whole."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if isinstance(layer, Block):
        across = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel)
        parallelize_module(layer.self_attn, mesh, {name: style() for name, style in across.items()})
        parallelize_module(layer.self_attn, mesh, {"o_proj": RowwiseParallel()})
        parallelize_module(layer.mlp, mesh, {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel()})
        parallelize_module(layer.mlp, mesh, {"down_proj": RowwiseParallel()})


def decoder(config: Config) -> Model:
    """The chain: embedding, blocks, head."""
    last = config.num_hidden_layers + 1

    def layer(l: int) -> nn.Module:
        return Embedding(config) if l == 0 else Head(config) if l == last else Block(config)

    tied = ((0, "embed_tokens.weight"), (last, "lm_head.weight")) if config.tied else None
    return Model(num_layers=last + 1, layer=layer, tied=tied, parallelize=parallelize)


def counting(config: Config) -> Batch:
    """(step, samples of the global batch) -> sequences that count in steps of 1 to 4 from anywhere, and their targets.

    Sample i of a step is the same whoever asks for it, so every process makes only what it needs.
    """

    def batch(step: int, samples: range = range(8)) -> tuple[Any, Tensor]:
        rows = [_sequence(config, step, i) for i in samples]
        tokens, counts = torch.stack([row for row, _ in rows]), torch.tensor([count for _, count in rows])
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
        there = torch.arange(config.length) < counts[:, None]
        targets[~there] = IGNORED
        return ((inputs, there) if config.padded else inputs), targets

    return batch


def _sequence(config: Config, step: int, sample: int) -> tuple[Tensor, int]:
    """Tokens, one more than the length, and how many of them count."""
    generator = torch.Generator().manual_seed(1_000_003 * step + sample)
    first, stride, short = torch.randint(1 << 30, (3,), generator=generator).tolist()
    tokens = (first + (1 + stride % 4) * torch.arange(config.length + 1)) % config.vocab_size
    return tokens, config.length - (short % (config.length // 2) if config.padded else 0)


def build() -> tuple[Model, Batch]:
    """A model of a million parameters, for a CPU."""
    config = Config()
    return decoder(config), counting(config)


def build_padded() -> tuple[Model, Batch]:
    """The same with samples of unequal length."""
    config = Config(padded=True)
    return decoder(config), counting(config)


def llama_8b() -> tuple[Model, Batch]:
    """Llama 3 8B at 2,048 tokens."""
    config = Config(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=500_000.0,
        length=2048,
    )
    return decoder(config), counting(config)
