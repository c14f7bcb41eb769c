"""A model's layers, which of them are alike, and a short stack of them to run.

Layers are of one *kind* if they are built of equal modules and parameters, take and return tensors of equal shapes, and
run the same operations. To tell, the model runs once, layer by layer, on fake tensors, which have shapes and no memory.
The *stack* is the model with all but a few layers of every kind left out; passes go through it layer by layer.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.files import did_you_mean
from runtime.given import Data, what
from runtime.model import Model, Tensors, as_tuple, build_layer, sum_of_cross_entropy
from runtime.reduce import is_sharded

CPU_FLASH = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
FLASH = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
# (what, position in the stack, tensors that enter) -> runs around it; what is forward, loss or backward
Probe = Callable[[str, int, Tensors], AbstractContextManager[None]]


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that operations allocate while it is active, as they come and go, and what the operations do.

    Sees the results of operations, not what a kernel allocates for itself.

    Attributes
    ----------
    live, peak
        Bytes of storages that exist, and the most of them since `reset`; what was there before does not count.
    flops, written
        FLOP of matrix products and attention, and bytes of results.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.flops = self.written = 0
        self.sizes: dict[int, int] = {}
        self.operations: list[str] = []

    def reset(self) -> None:
        """Let the peak start from what is live."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each not in (Tensor, nn.Parameter, FakeTensor) for each in types):
            return NotImplemented  # a tensor that wraps others: its operations on those come here
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._see(tensor, new=False)
        out = func(*args, **kwargs)
        results = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        for tensor in results:
            self._see(tensor, new=True)
        if func.namespace != "prim":
            self.operations.append(f"{func} {[list(tensor.shape) for tensor in results]}")
            self.flops += _flops(func, args, kwargs, out)
            self.written += sum(tensor.numel() * tensor.element_size() for tensor in results)
        return out

    def _see(self, tensor: Tensor, new: bool) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes() if new else 0
            self.live += self.sizes[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    name = func._overloadpacket.__name__
    packet = func._overloadpacket
    if name in CPU_FLASH:  # counted as on a GPU
        packet = getattr(torch.ops.aten, FLASH[CPU_FLASH.index(name)])
    count = flop_counter.flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


# The chain


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer as it was met in the chain.

    Parameters
    ----------
    title
        ``layer 3 (Block)``.
    parameters, trained, num_tensors
        Parameters, those with gradients, and the tensors these are in.
    tied
        Those of `parameters` that another layer shares.
    leaves
        Shapes of what it hands on, their precision, and whether gradients come back.
    """

    title: str
    kind: str
    parameters: int
    trained: int
    num_tensors: int
    tied: int
    dtype: torch.dtype | None
    leaves: Hashable


def scan(
    model: Model,
    data: Data,
    dtype: torch.dtype | None,
    fake: FakeTensorMode | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Layer, ...]:
    """Run every layer once, on fake tensors if there is a mode for them, else on a device.

    Raises
    ------
    ValueError
        If a layer cannot be built, does not take what the one before returns, or returns something else than tensors.
    """
    tied = {} if model.tied is None else dict(model.tied)
    data = data.each(fake.from_tensor if fake is not None else lambda tensor: tensor.to(device))
    value, found, signatures, classes = data.inputs, [], [], []
    with fake or nullcontext():
        for l in range(model.num_layers):
            layer = build(model, l, dtype=dtype, device=device, fake=fake is not None)
            title = f"layer {l} ({type(layer).__name__})"
            with Meter() as meter:
                out = as_tuple(run(layer, title, value))
            end = list(tied).index(l) if l in tied else None  # of the tied weight
            last = l == model.num_layers - 1  # runs with the loss
            signatures.append((_structure(layer), _shapes(value), _shapes(out), _digest(meter), end, last))
            classes.append(type(layer).__name__.lower())
            found.append(_facts(layer, title, out, tied.get(l)))
            value = hand_over(out)
            del out, layer
    names = _names(classes, signatures)
    return tuple(replace(layer, kind=name) for layer, name in zip(found, names, strict=True))


def build(
    model: Model, l: int, *, dtype: torch.dtype | None, device: torch.device | str = "cpu", fake: bool = False
) -> nn.Module:
    """Layer l, in the precision and on the device it runs in."""
    try:
        layer = build_layer(model, l, seed=0)
    except Exception as error:
        raise ValueError(f"layer {l}: cannot be built: {_line(error)}") from error
    if not isinstance(layer, nn.Module):
        raise ValueError(f"layer {l}: the model builds a layer {what(layer)}, expected an nn.Module")
    if not fake:
        return layer.to(device=device, dtype=dtype)
    if dtype is not None:
        _cast(layer, dtype)
    return layer


def _cast(layer: nn.Module, dtype: torch.dtype) -> None:
    """What ``layer.to(dtype)`` does, which fake tensors do not allow."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point():
                changed = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                module.register_parameter(name, changed)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def run(layer: nn.Module, title: str, value: Tensors) -> Any:
    """What a layer returns: a tensor, or a tuple of them."""
    try:
        out = layer(*value)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{title}: does not take {_words(value)}: {_line(error)}") from error
    if isinstance(out, Tensor) or (isinstance(out, tuple) and out and all(isinstance(each, Tensor) for each in out)):
        return out
    raise ValueError(f"{title}: returns a value {what(out)}, expected a tensor or a tuple of tensors")


def hand_over(out: Tensors) -> Tensors:
    """What the next layer takes: the same storages, no graph."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in out)


def _facts(layer: nn.Module, title: str, out: Tensors, tied: str | None) -> Layer:
    parameters = list(layer.parameters())
    trained = [each for each in parameters if each.requires_grad]
    floats = [each.dtype for each in (*parameters, *out) if each.is_floating_point()]
    return Layer(
        title=title,
        kind="",
        parameters=sum(each.numel() for each in parameters),
        trained=sum(each.numel() for each in trained),
        num_tensors=len(trained),
        tied=0 if tied is None else _tied(layer, title, tied),
        dtype=floats[0] if floats else None,
        leaves=_shapes(out),
    )


def _tied(layer: nn.Module, title: str, name: str) -> int:
    known = {key: parameter.numel() for key, parameter in layer.named_parameters()}
    if name not in known:
        raise ValueError(f"{title}: parameter {name!r} of Model.tied is not among {did_you_mean(name, known)}")
    return known[name]


def _structure(layer: nn.Module) -> Hashable:
    modules = tuple((name, type(module).__qualname__) for name, module in layer.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, parameters, tuple((name, tuple(b.shape), b.dtype) for name, b in layer.named_buffers())


def _shapes(value: Tensors) -> Hashable:
    return tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in value)


def _digest(meter: Meter) -> str:
    return hashlib.sha256("\n".join(meter.operations).encode()).hexdigest()


def _names(classes: Sequence[str], signatures: Sequence[Hashable]) -> list[str]:
    """Kind of every layer: its class in lower case, numbered from the second kind of a class on."""
    names: dict[Hashable, str] = {}
    alike: Counter[str] = Counter()
    for title, signature in zip(classes, signatures, strict=True):
        if signature not in names:
            alike[title] += 1
            names[signature] = f"{title}-{alike[title]}" if alike[title] > 1 else title
    return [names[signature] for signature in signatures]


# The stack


class Stack:
    """Some layers of a model, of every kind up to `copies`, with gradients to add to.

    Parameters
    ----------
    mesh
        Device mesh of the tp group that shards each layer.
    fake
        The mode to build and run it under, for fake tensors.
    """

    def __init__(
        self,
        model: Model,
        chain: Sequence[Layer],
        copies: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        mesh: Any = None,
        fake: FakeTensorMode | None = None,
    ) -> None:
        self.model, self.fake = model, fake
        self.indices = shorten(chain, copies)
        self.chain = [chain[l] for l in self.indices]
        with fake or nullcontext():
            self.layers = [build(model, l, dtype=dtype, device=device, fake=fake is not None) for l in self.indices]
            for l, layer in zip(self.indices, self.layers, strict=True):
                if mesh is not None:
                    assert model.parallelize is not None
                    model.parallelize(layer, l, mesh)
                for parameter in layer.parameters():
                    _add_gradient(parameter)

    def positions(self, kind: str) -> list[int]:
        """Where in the stack layers of a kind are."""
        return [n for n, layer in enumerate(self.chain) if layer.kind == kind]

    def static(self) -> list[Tensor]:
        """Tensors that exist before any pass."""
        parameters = [each for layer in self.layers for each in layer.parameters()]
        gradients = [each.grad for each in parameters if each.grad is not None]
        return [*parameters, *gradients, *(each for layer in self.layers for each in layer.buffers())]

    def play(self, data: Data, probe: Probe) -> None:
        """A micro-batch forward and backward; what is not probed is not part of any layer."""
        with self.fake or nullcontext():
            self.backward(self.forward(data, probe), probe)

    def forward(self, data: Data, probe: Probe) -> list[tuple[Tensors, Tensors]]:
        """What every layer took and returned; of the last, the loss it led to."""
        value, held = data.inputs, []
        for n, (layer, info) in enumerate(zip(self.layers, self.chain, strict=True)):
            with probe("forward", n, value):
                out = run(layer, info.title, value)
            held.append((value, as_tuple(out)))
            value = hand_over(as_tuple(out))
        with probe("loss", len(self.layers) - 1, as_tuple(out)):
            loss = self._loss(out, data.targets)
        held[-1] = held[-1][0], (loss,)
        return held

    def _loss(self, out: Any, targets: Any) -> Tensor:
        if targets is None and self.model.loss is sum_of_cross_entropy and isinstance(out, Tensor):
            targets = torch.zeros(out.shape[:-1], dtype=torch.int64, device=out.device)
        if targets is None:
            raise ValueError("targets: missing, the model's loss takes them")
        try:
            loss = self.model.loss(out, targets)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            took = f"{_words(as_tuple(out))} and targets of {_words(as_tuple(targets))}"
            raise ValueError(f"loss: does not take {took}: {_line(error)}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"loss: returns a value {what(loss)}, expected a tensor of one number")
        if not loss.requires_grad:
            raise ValueError("model: nothing is trained, no gradient reaches the loss")
        return loss

    def backward(self, held: list[tuple[Tensors, Tensors]], probe: Probe) -> None:
        """Empties what `forward` returned."""
        gradients: list[Tensor | None] = [None]  # of the loss: one
        for n in reversed(range(len(held))):
            x, y = held.pop()
            pairs = [(out, gradient) for out, gradient in zip(y, gradients, strict=True) if out.requires_grad]
            if pairs:
                with probe("backward", n, tuple(each for each in gradients if each is not None)):
                    torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
            gradients = [_gradient(tensor) for tensor in x]
            del x, y, pairs


def _gradient(tensor: Tensor) -> Tensor | None:
    if not tensor.requires_grad:
        return None
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _add_gradient(parameter: nn.Parameter) -> None:
    """What backward passes add to, in fp32 for 16-bit weights."""
    if not parameter.requires_grad or is_sharded(parameter):
        return
    summed = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
    if summed != parameter.dtype:
        parameter.grad_dtype = summed
    parameter.grad = torch.zeros_like(parameter, dtype=summed)


def shorten(chain: Sequence[Layer], copies: int) -> list[int]:
    """Layers that still form a chain, of every kind at least `copies` or all there are; few beyond that.

    Leaves out a run of layers if it returns what it takes and there are enough of all its kinds before it.
    """
    kept: list[int] = []
    for l in range(len(chain)):
        kept.append(l)
        for n in reversed(range(len(kept) - 1)):
            if chain[kept[n]].leaves == chain[l].leaves:
                counts = Counter(chain[k].kind for k in kept[: n + 1])
                if all(counts[chain[k].kind] >= copies for k in kept[n + 1 :]):
                    del kept[n + 1 :]
                    break
    return kept


# Words


def _words(value: Tensors) -> str:
    return ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in value)


def _line(error: Exception) -> str:
    """An exception of a user's code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
