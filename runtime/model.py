"""What is trained: a chain of layers, a loss over tokens, weights that two layers share; and one stage of it.

A layer takes the tensors that the layer before it returns, one or a tuple, and returns the like. Every layer is built
under a seed of its own, so any process can build any layers and all replicas start equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Tensors = tuple[Tensor, ...]
Weight = tuple[int, str]  # layer, name of the parameter in it


def sum_of_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over the tokens whose target is not -100."""
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")


def count_of_targets(targets: Tensor) -> int:
    """Tokens whose target is not -100."""
    return int((targets != -100).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as a chain of layers.

    Parameters
    ----------
    num_layers
        L, as in the profile that the plan was made from.
    layer
        Builds layer l. Called under that layer's seed.
    loss
        (output of the last layer, targets of the micro-batch) -> loss summed over its tokens.
    count_tokens
        Targets -> how many tokens the loss sums over.
    tied
        Two parameters that are one: of an early layer, and of a later one.
    parallelize
        (layer, its index, device mesh) -> shards the layer over a tp group, by `parallelize_module`, say. Needed for
        plans with tp > 1.
    """

    num_layers: int
    layer: Callable[[int], nn.Module]
    loss: Callable[[Any, Any], Tensor] = sum_of_cross_entropy
    count_tokens: Callable[[Any], int] = count_of_targets
    tied: tuple[Weight, Weight] | None = None
    parallelize: Callable[[nn.Module, int, Any], None] | None = None

    @classmethod
    def of(cls, layers: Sequence[nn.Module], **fields: Any) -> Model:
        """A model whose layers exist already (an ``nn.Sequential``, a list); every process has to hold equal ones."""
        import copy

        return cls(num_layers=len(layers), layer=lambda l: copy.deepcopy(layers[l]), **fields)


def build_layer(model: Model, l: int, seed: int) -> nn.Module:
    """Layer l as every process builds it; leaves the random state as it was."""
    with same_random_state():
        torch.manual_seed(seed * 1_000_003 + l)
        return model.layer(l)


@contextmanager
def same_random_state() -> Iterator[None]:
    """Leaves the random state of the host, and of the GPU in use, as it was."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if used else []):
        yield


def outputs(stage: nn.Module, inputs: Tensors) -> Tensors:
    """What a stage returns for some inputs; random state and buffers stay as they were."""
    kept = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    with torch.no_grad(), same_random_state():
        found = as_tuple(stage(*inputs))
        for name, buffer in stage.named_buffers():
            buffer.copy_(kept[name])
    return found


class Stage(nn.Module):
    """Contiguous layers. Parameters are called ``layers.<l>.<name>`` with the layer's index in the model, whatever the
    plan.

    Parameters
    ----------
    layers
        Half-open range.
    recompute
        Layers that drop their activations and run forward again in the backward pass.
    """

    def __init__(
        self,
        model: Model,
        layers: tuple[int, int],
        *,
        recompute: Collection[int] = (),
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        mesh: Any = None,
    ) -> None:
        super().__init__()
        self.first, self.end = layers
        self.device = torch.device(device)
        self.tied = model.tied
        self.recompute = frozenset(recompute)
        self.layers = nn.ModuleDict({str(l): build_layer(model, l, seed) for l in range(*layers)})
        self.to(device=device, dtype=dtype)
        if model.tied is not None:
            self._tie(model, model.tied, seed)
        if mesh is not None:
            assert model.parallelize is not None
            for l in range(*layers):
                model.parallelize(self.layers[str(l)], l, mesh)

    def _tie(self, model: Model, tied: tuple[Weight, Weight], seed: int) -> None:
        """One parameter where both ends are here; else the later end starts as a copy of the earlier one's."""
        (a, name_a), (b, name_b) = tied
        if not self.first <= b < self.end:
            return
        if self.first <= a:
            owner, _, leaf = name_b.rpartition(".")
            setattr(self.layers[str(b)].get_submodule(owner), leaf, self.layers[str(a)].get_parameter(name_a))
            return
        with torch.no_grad():
            twin = build_layer(model, a, seed).get_parameter(name_a)
            self.layers[str(b)].get_parameter(name_b).copy_(twin)

    def parameters_of(self, l: int) -> list[tuple[str, nn.Parameter]]:
        """Named parameters of one layer, those it shares with an earlier layer of the stage left out."""
        earlier = {id(p) for k in range(self.first, l) for p in self.layers[str(k)].parameters()}
        named = self.layers[str(l)].named_parameters()
        return [(f"layers.{l}.{name}", p) for name, p in named if id(p) not in earlier]

    def forward(self, *tensors: Tensor) -> Any:
        out: Any = tensors
        for l in range(self.first, self.end):
            layer = self.layers[str(l)]
            if l in self.recompute and torch.is_grad_enabled():
                out = checkpoint(layer, *as_tuple(out), use_reentrant=False)
            else:
                out = layer(*as_tuple(out))
        return out


def as_tuple(value: Any) -> Tensors:
    """One tensor, or several, as several."""
    return value if isinstance(value, tuple) else (value,)
