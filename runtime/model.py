"""What is trained: a chain of layers, a loss over tokens, weights that two layers share; and one stage of it.

A layer takes the tensors that the layer before it returns, one or a tuple, and returns the like. Every layer is built
under a seed of its own, so any process can build any layers and all replicas start equal.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
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

    A layer must not change its input in place: torch refuses that where the layer is the first of a stage.
    Buffers that change as layers run (running statistics) follow the samples of their own pipeline; a checkpoint keeps
    those of one.

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
        """A model whose layers exist already (an ``nn.Sequential``, a list); every process has to hold equal ones.

        Raises
        ------
        ValueError
            If layers share more than one weight that two of them hold.
        """
        fields = {"tied": _shared_weight(layers), **fields}
        return cls(num_layers=len(layers), layer=lambda l: copy.deepcopy(layers[l]), **fields)


def _shared_weight(layers: Sequence[nn.Module]) -> tuple[Weight, Weight] | None:
    """The parameter that two layers share, if there is one."""
    holders: dict[int, dict[int, str]] = defaultdict(dict)
    for l, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            holders[id(parameter)].setdefault(l, name)
    shared = [held for held in holders.values() if len(held) > 1]
    if not shared:
        return None
    if len(shared) > 1 or len(shared[0]) > 2:
        some = ", ".join(f"{name!r} of layer {l}" for l, name in shared[0].items())
        raise ValueError(
            f"model: layers share {len(shared)} parameters ({some}); a plan can hold one that two layers share"
        )
    first, second = shared[0].items()
    return first, second


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
    with torch.no_grad(), same_random_state(), same_buffers(stage):
        return as_tuple(stage(*inputs))


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Leaves buffers (running statistics, counters) as they were."""
    kept = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            if name in kept:
                buffer.data.copy_(kept[name])  # not a change that a backward pass to come should mind


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
            if model.tied is not None:
                self._tie_shards(model.tied)

    def _tie(self, model: Model, tied: tuple[Weight, Weight], seed: int) -> None:
        """One parameter where both ends are here; else the later end starts as a copy of the earlier one's."""
        (a, name_a), (b, name_b) = tied
        if not self.first <= b < self.end:
            return
        if self.first <= a:
            self._share(tied)
            return
        with torch.no_grad():
            twin = build_layer(model, a, seed).get_parameter(name_a)
            self.layers[str(b)].get_parameter(name_b).requires_grad_(twin.requires_grad).copy_(twin)

    def _tie_shards(self, tied: tuple[Weight, Weight]) -> None:
        """Both ends again as one parameter: sharding a layer gives it new ones."""
        (a, _), (b, _) = tied
        if not self.first <= a < b < self.end:
            return
        one, other = (self.layers[str(l)].get_parameter(name) for l, name in tied)
        if getattr(one, "placements", None) != getattr(other, "placements", None):
            raise ValueError(f"layers {a} and {b} share a weight, and are to shard it differently over a tp group")
        self._share(tied)

    def _share(self, tied: tuple[Weight, Weight]) -> None:
        """The later end becomes the parameter of the earlier one."""
        (a, name_a), (b, name_b) = tied
        owner, _, leaf = name_b.rpartition(".")
        setattr(self.layers[str(b)].get_submodule(owner), leaf, self.layers[str(a)].get_parameter(name_a))

    def parameters_of(self, l: int) -> list[tuple[str, nn.Parameter]]:
        """Named parameters of one layer, those it shares with an earlier layer of the stage left out."""
        return self._named[l]

    @cached_property
    def _named(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        seen: set[int] = set()
        found: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for l in range(self.first, self.end):
            named = [(f"layers.{l}.{name}", p) for name, p in self.layers[str(l)].named_parameters()]
            found[l] = [(name, p) for name, p in named if id(p) not in seen]
            seen |= {id(p) for _, p in named}
        return found

    def forward(self, *tensors: Tensor) -> Any:
        out: Any = tensors
        for l in range(self.first, self.end):
            layer = self.layers[str(l)]
            if l in self.recompute and torch.is_grad_enabled():
                out = checkpoint(
                    layer, *as_tuple(out), use_reentrant=False, context_fn=partial(_first_and_again, layer)
                )
            else:
                out = layer(*as_tuple(out))
        return out


def _first_and_again(layer: nn.Module) -> tuple[Any, Any]:
    """What surrounds a layer when it runs, and when it runs again: its buffers have had their update by then."""
    return nullcontext(), same_buffers(layer)


def as_tuple(value: Any) -> Tensors:
    """One tensor, or several, as several."""
    return value if isinstance(value, tuple) else (value,)
