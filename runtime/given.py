"""What a user gives: a function in a file, a model in one of several forms, its data."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.files import did_you_mean
from runtime.model import Model, Tensors, as_tuple

Source = Tensor | Sequence[Tensor] | Callable[..., Any]


class Data(NamedTuple):
    """One micro-batch: tensors for the first layer, and whatever the loss takes beside the last layer's output."""

    inputs: Tensors
    targets: Any

    def each(self, change: Callable[[Tensor], Tensor]) -> Data:
        """The same with every tensor changed."""
        changed = tuple(change(tensor) for tensor in as_tuple(self.targets) if tensor is not None)
        return Data(tuple(map(change, self.inputs)), _one(changed) if changed else None)


def load(target: str) -> tuple[Any, ...]:
    """What a function in a file returns, as a tuple: a model, then its inputs and targets or what makes them.

    Parameters
    ----------
    target
        ``train.py:build``; ``build`` if it names no function.

    Raises
    ------
    ValueError
        If there is no such file or function, or running it fails.
    """
    path, _, name = target.partition(":")
    name = name or "build"
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: no such file; expected FILE.py:FUNCTION such as train.py:build")
    try:
        build = _function(file, name)
        built = build()
    except _Missing as error:
        raise ValueError(f"{path}: {error}") from None
    except Exception as error:
        raise ValueError(f"{target}: {type(error).__name__}: {error}") from error
    return built if isinstance(built, tuple) else (built,)


class _Missing(ValueError):
    """The file has no such function."""


def _function(file: Path, name: str) -> Callable[[], Any]:
    """Run a file as a module that finds its neighbours, as a script does."""
    module_name = f"_given_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise _Missing("no Python file; expected FILE.py:FUNCTION such as train.py:build")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        functions = {key: each for key, each in vars(module).items() if inspect.isfunction(each)}
        own = [key for key, each in functions.items() if each.__module__ == module_name]
        known = [key for key in own if not key.startswith("_")]
        raise _Missing(f"function {name!r} is not among {did_you_mean(name, known)}")
    return found  # type: ignore[no-any-return]


def parts(target: str) -> tuple[Any, Any, Any]:
    """Model, inputs and targets that a function in a file returns; of a task its model and its batches.

    Raises
    ------
    ValueError
        As `load`, and if it returns something else.
    """
    built = load(target)
    if len(built) == 1 and hasattr(built[0], "model") and hasattr(built[0], "batch"):
        built = (built[0].model, built[0].batch)
    if not 2 <= len(built) <= 3:
        expected = "a model and a function of (step, samples) for its batches, or a model, its inputs and its targets"
        raise ValueError(f"{target}: returned {what(built)}, expected {expected}")
    return built[0], built[1], built[2] if len(built) == 3 else None


def as_model(value: Any) -> Model:
    """A model as the runtime knows it, of any form a user may have it in.

    Parameters
    ----------
    value
        A `Model`; an ``nn.Sequential`` or a list of layers, of which two may share a weight; or a pair of a function
        that builds layer l, and how many layers there are.

    Raises
    ------
    ValueError
        If it is something else, or has no layers.
    """
    if isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], nn.Module) and callable(value[0]):
        value = _built_by(*value)
    if isinstance(value, Model):
        if value.num_layers < 1:
            raise ValueError("model: it has no layers")
        return value
    if not isinstance(value, (nn.Sequential, nn.ModuleList, list, tuple)):
        raise ValueError(f"model: {what(value)} is no sequence of layers; {_expected(value)}")
    layers = list(value)
    if not layers:
        raise ValueError("model: it has no layers")
    for l, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise ValueError(f"model: layer {l} is {what(layer)}, expected an nn.Module")
    return Model.of(layers)


def _built_by(layer: Callable[[int], nn.Module], num_layers: Any) -> Model:
    if not isinstance(num_layers, int) or isinstance(num_layers, bool):
        raise ValueError(
            f"model: a pair of a function and a value {what(num_layers)}; expected the function that builds layer l,"
            " and the number of layers"
        )
    return Model(num_layers=num_layers, layer=layer)


def _expected(value: Any) -> str:
    if callable(value) and not isinstance(value, nn.Module):
        return (
            "if it is a function that builds layer l, say how many layers there are: give the pair (function, number),"
            " or runtime.Model(num_layers=number, layer=function)"
        )
    return (
        "expected an nn.Sequential, a list of modules, a pair of a function that builds layer l and the number of"
        " layers, or a runtime.Model"
    )


def batches(inputs: Source, targets: Any = None) -> Callable[[int], Data]:
    """Micro-batches of any size, each with storages of its own.

    Parameters
    ----------
    inputs, targets
        Tensors, samples along the first dimension, taken from the start again where they are too few. Or, as `inputs`,
        a function that returns both: of a step, or of a step and a range of samples.
    """

    def micro_batch(b: int) -> Data:
        x, y = _called(inputs, b) if callable(inputs) else (inputs, targets)
        return Data(_rows(x, b, "inputs"), None if y is None else _one(_rows(y, b, "targets")))

    return micro_batch


def _called(batch: Callable[..., Any], b: int) -> tuple[Any, Any]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes = sum(each.kind in kinds for each in inspect.signature(batch).parameters.values())
    made = batch(0, range(b)) if takes > 1 else batch(0)
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ValueError(f"inputs: the function returns {what(made)}, expected a pair of inputs and targets")
    return made


def _rows(value: Any, b: int, key: str) -> Tensors:
    tensors = tuple(value) if isinstance(value, list) else as_tuple(value)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{key}: {what(tensor)}, expected a tensor or several")
        if tensor.dim() == 0 or len(tensor) == 0:
            raise ValueError(
                f"{key}: a tensor of shape {list(tensor.shape)}, expected samples along the first dimension"
            )
    return tuple(tensor[torch.arange(b, device=tensor.device) % len(tensor)] for tensor in tensors)


def _one(tensors: Tensors) -> Any:
    return tensors if len(tensors) > 1 else tensors[0]


def what(value: Any) -> str:
    """A value by its type, for an error message."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(map(_type, value)) or 'nothing'}"
    return "None" if value is None else f"of type {_type(value)}"


def _type(value: Any) -> str:
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__  # also of fake ones
