"""What a process holds, under names that no plan changes: written to disk, and read back under any plan, exactly.

    model.layers.<l>.<name>              a parameter or buffer of layer l, in the precision the optimizer updates it in
    optimizer.layers.<l>.<name>.<key>    what the optimizer keeps about it
    rest                                 settings of the optimizer by parameter, and whatever the caller adds

Weights that two layers share go by the name in the earlier one. Weights of 16 bits are stored as their fp32 masters,
optimizer state that is sharded over the owners of a block as whole tensors; so neither precision nor sharding nor the
cut into stages shows in what is stored.

A checkpoint folder holds steps, each a folder that `torch.distributed.checkpoint` wrote and that got its name once it
was complete, with sizes and checksums of its files. All processes have to see the same folder.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from planner.files import MAPPING, Document
from runtime.groups import agree, communication, gathered, on_first
from runtime.reduce import Bucket, local

if TYPE_CHECKING:
    from runtime.model import Model
    from runtime.trainer import Trainer

Options = dict[str, Any]
T = TypeVar("T")
HEADER = "state.json"
MODEL, OPTIMIZER = "model.", "optimizer."
KEEP = 2  # checkpoints of one folder


@dataclass(slots=True)
class Snapshot:
    """State of some layers, by the name of the parameter or buffer (``layers.<l>.<name>``).

    Parameters
    ----------
    weights
        Those of a running trainer are its own, not copies.
    kept
        Tensors of the optimizer.
    options
        Its settings.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    options: dict[str, Options] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that is a tensor, by the names above."""
        kept = {f"{OPTIMIZER}{name}.{key}": value for name, row in self.kept.items() for key, value in row.items()}
        return {**{MODEL + name: value for name, value in self.weights.items()}, **kept}

    def put(self, key: str, value: Tensor) -> None:
        """Add a tensor under such a name."""
        if key.startswith(MODEL):
            self.weights[key.removeprefix(MODEL)] = value
        else:
            name, what = split(key)
            self.kept.setdefault(name, {})[what] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Document):
    """What is in a checkpoint.

    Parameters
    ----------
    step
        Steps that the model has taken.
    num_layers
        Of the model.
    optimizer
        Its class.
    plan
        Digest of the plan it was saved under.
    files
        Bytes and CRC-32 of every file.
    """

    SCHEMA: ClassVar[str] = "hpp-state/1"

    step: int
    num_layers: int
    optimizer: str
    plan: str
    files: tuple[tuple[str, tuple[int, int]], ...] = field(default=(), metadata=MAPPING)


# Names


def canonical(name: str, model: Model) -> str:
    """The name of a parameter in the state: tied weights go by that of the earlier layer."""
    if model.tied is not None:
        (a, name_a), (b, name_b) = model.tied
        if name == f"layers.{b}.{name_b}":
            return f"layers.{a}.{name_a}"
    return name


def layers_of(name: str, model: Model) -> tuple[int, ...]:
    """The layers whose stages hold a parameter."""
    l = int(name.split(".")[1])
    if model.tied is not None:
        (a, name_a), (b, _) = model.tied
        if name == f"layers.{a}.{name_a}":
            return a, b
    return (l,)


def split(key: str) -> tuple[str, str]:
    """Name of the parameter, and what the optimizer keeps about it."""
    name, _, what = key.removeprefix(OPTIMIZER).rpartition(".")
    return name, what


def held(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and buffers of this process's layers, by name."""
    found: dict[str, Tensor] = {}
    for name, value in trainer.stage.state_dict().items():
        found.setdefault(canonical(name, trainer.model), value)
    return found


# From a trainer and back


def snapshot(trainer: Trainer) -> Snapshot:
    """State of a trainer's layers; where optimizer state is sharded a collective over the owners of each block."""
    found = Snapshot(held(trainer))
    options = _options_of(trainer.optimizer)
    for bucket in trainer.reducer.buckets:
        for name, weight, kept, key in _whole(trainer, bucket) if trainer.reducer.shard else _plain(trainer, bucket):
            name = canonical(name, trainer.model)
            found.weights[name], found.kept[name], found.options[name] = weight, kept, options[key]
    return found


def restore(trainer: Trainer, state: Snapshot) -> None:
    """Give a trainer the state of all its layers; tensors of the optimizer are taken over, not copied.

    On a failure the trainer may hold part of it.

    Raises
    ------
    ValueError
        If optimizer state is sharded here, and was kept with several parameter groups; then nothing was changed.
    """
    options = list(state.options.values())
    if trainer.reducer.shard and any(each != options[0] for each in options):
        raise ValueError(
            "state: kept with several parameter groups, and sharded optimizer state knows flat parts of blocks, not"
            " parameters; expected one group, or shard_optimizer=False"
        )
    with torch.no_grad():
        for name, value in held(trainer).items():
            value.copy_(state.weights[name])
        optimizer = _Loading(trainer.optimizer)
        for bucket in trainer.reducer.buckets:
            names = [canonical(name, trainer.model) for name, _ in bucket.parameters]
            if trainer.reducer.shard:
                _restore_shards(trainer, bucket, names, state, optimizer)
                continue
            for name, (own, parameter) in zip(names, bucket.parameters, strict=True):
                optimized = trainer.reducer.masters.get(own, parameter)
                optimized.copy_(state.weights[name])
                optimizer.take(optimized, state.kept.get(name, {}), state.options.get(name))
        optimizer.finish()


Row = tuple[str, Tensor, dict[str, Tensor], int]  # name, weight, optimizer state, id of what the optimizer works on


def _plain(trainer: Trainer, bucket: Bucket) -> Iterator[Row]:
    for name, parameter in bucket.parameters:
        optimized = trainer.reducer.masters.get(name, parameter)
        kept = trainer.optimizer.state.get(optimized, {})
        yield name, optimized.detach(), {k: v for k, v in kept.items() if isinstance(v, Tensor)}, id(optimized)


def _whole(trainer: Trainer, bucket: Bucket) -> Iterator[Row]:
    """Tensors of a bucket from the shards of all its owners; what is no tensor of a shard's size is equal on all."""
    shards = bucket.shards
    states = [trainer.optimizer.state.get(shard, {}) for shard in shards]
    gathered = {"": trainer.reducer.whole_of(bucket, [shard.detach() for shard in shards])}
    alike = {}
    for key in (key for key, value in states[0].items() if isinstance(value, Tensor)):
        if states[0][key].shape == shards[0].shape:
            gathered[key] = trainer.reducer.whole_of(bucket, [state[key] for state in states])
        else:
            alike[key] = states[0][key]
    for offset, (name, parameter) in zip(bucket.offsets, bucket.parameters, strict=True):
        views = {key: _view(flat, offset, parameter) for key, flat in gathered.items()}
        yield name, views.pop(""), {**views, **alike}, id(shards[0])


def _restore_shards(trainer: Trainer, bucket: Bucket, names: list[str], state: Snapshot, optimizer: _Loading) -> None:
    owner = bucket.shared.ranks.index(trainer.place.rank)
    kept = [state.kept.get(name, {}) for name in names]
    like = bucket.gradients

    def parts(values: Iterable[Tensor]) -> list[Tensor]:
        flat = torch.zeros_like(like)
        for offset, (_, parameter), value in zip(bucket.offsets, bucket.parameters, values, strict=True):
            _view(flat, offset, parameter).copy_(value)
        return [bucket.part(chunk, flat, owner).clone() for chunk in bucket.chunks]

    weights = parts(state.weights[name] for name in names)
    by_key = {}
    for key in kept[0]:
        values = [each[key] for each in kept]
        elementwise = all(v.shape == p.shape for v, (_, p) in zip(values, bucket.parameters, strict=True))
        by_key[key] = parts(values) if elementwise else [values[0].clone() for _ in bucket.chunks]
    for c, shard in enumerate(bucket.shards):
        shard.copy_(weights[c])
        optimizer.take(shard, {key: values[c] for key, values in by_key.items()}, state.options.get(names[0]))


def _view(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    return flat[offset : offset + local(parameter).numel()].view(local(parameter).shape)


class _Loading:
    """State for an optimizer, by the tensor it works on, handed over at the end through its own `load_state_dict`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.saved = optimizer, optimizer.state_dict()
        works_on = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.index = {id(parameter): n for n, parameter in enumerate(works_on)}
        self.state: dict[int, dict[str, Tensor]] = {}
        self.options: dict[int, Options] = {}

    def take(self, parameter: Tensor, kept: dict[str, Tensor], options: Options | None) -> None:
        n = self.index[id(parameter)]
        if kept:
            self.state[n] = kept
        if options is not None:
            self.options[n] = options

    def finish(self) -> None:
        """Groups take the settings of their first parameter."""
        groups = [{**group, **self.options.get(min(group["params"], default=-1), {})} for group in self._groups()]
        self.optimizer.load_state_dict({"state": self.state, "param_groups": groups})

    def _groups(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.saved["param_groups"]
        return found


def _options_of(optimizer: torch.optim.Optimizer) -> dict[int, Options]:
    return {
        id(parameter): {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


# On disk


def save(trainer: Trainer, folder: str | Path, *, extra: Any = None, keep: int = KEEP) -> Path:
    """Write the state as a new step of a folder, whole or not at all; a collective over all processes.

    Parameters
    ----------
    extra
        Anything that pickles, the same on all processes or only the first one's.
    keep
        Newest steps of the folder that stay.

    Returns
    -------
    Path
        The folder of the step.

    Raises
    ------
    ValueError
        If it cannot be written; what was there before stays.
    """
    path = Path(folder) / f"step-{trainer.step_index:08d}"
    temporary = path.with_name(f".{path.name}.tmp")
    group = trainer.groups.world
    on_first(group, lambda: _make_empty(temporary))
    state = snapshot(trainer)
    options = gathered(group, state.options)
    entries: dict[str, Any] = dict(state.tensors)
    if dist.get_rank() == 0:
        entries["rest"] = {name: each for part in options for name, each in part.items()}, extra
    with _disk(path, "cannot be written"), communication():
        dcp.save(
            entries,
            storage_writer=dcp.FileSystemWriter(temporary),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
    files = [each for part in gathered(group, _sums(temporary)) for each in part]
    header = Header(
        step=trainer.step_index,
        num_layers=trainer.model.num_layers,
        optimizer=type(trainer.optimizer).__name__,
        plan=trainer.plan.digest,
        files=tuple(sorted(files)),
    )

    def publish() -> None:
        header.save(temporary / HEADER)
        if path.exists():  # of a run that went back to an earlier step
            shutil.rmtree(path)
        temporary.rename(path)
        _sync(path.parent)
        for old in steps(folder)[: -max(keep, 1)]:
            shutil.rmtree(old)

    on_first(group, publish)
    return path


def load(trainer: Trainer, path: str | Path) -> Any:
    """Read the state of a trainer's layers from a checkpoint of any plan; a collective over all processes.

    Parameters
    ----------
    path
        A step, or a folder of steps, of which the newest is taken.

    Returns
    -------
    Any
        What `save` got as `extra`.

    Raises
    ------
    ValueError
        If there is none, it is damaged, or of another model or optimizer; then nothing was changed.
    """
    group = trainer.groups.world
    path, header = on_first(group, lambda: _opened(Path(path), trainer))
    agree(group, _damage(path, header))
    with _disk(path, "damaged"):
        metadata = dcp.FileSystemReader(path).read_metadata()
    state = Snapshot()
    agree(group, _blank(trainer, metadata, state, path))
    entries: dict[str, Any] = {**state.tensors, "rest": None}
    with _disk(path, "damaged"), communication():
        dcp.load(
            entries,
            storage_reader=dcp.FileSystemReader(path),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
    state.options, extra = entries["rest"]
    restore(trainer, state)
    trainer.step_index, trainer.committed = header.step, None
    return extra


def steps(folder: str | Path) -> list[Path]:
    """Checkpoints of a folder, oldest first."""
    found = Path(folder).glob("step-*") if Path(folder).is_dir() else ()
    return sorted(each for each in found if re.fullmatch(r"step-\d+", each.name) and each.is_dir())


def _make_empty(temporary: Path) -> None:
    for left in temporary.parent.glob(".step-*.tmp"):  # of a run that ended in mid-write
        shutil.rmtree(left)
    temporary.mkdir(parents=True)


def _sums(folder: Path) -> list[tuple[str, tuple[int, int]]]:
    """Bytes and CRC-32 of this process's share of the files."""
    names = sorted(each.name for each in folder.iterdir() if each.name != HEADER)
    return [(name, _sum(folder / name)) for name in names[dist.get_rank() :: dist.get_world_size()]]


def _sum(file: Path) -> tuple[int, int]:
    size, crc = 0, 0
    with file.open("rb") as stream:
        while part := stream.read(1 << 24):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return size, crc


def _opened(path: Path, trainer: Trainer) -> tuple[Path, Header]:
    if not (path / HEADER).exists():
        found = steps(path)
        if not found:
            raise ValueError(f"{path}: no checkpoint there, expected a folder with a file {HEADER} or folders step-*")
        path = found[-1]
    header = Header.load(path / HEADER)
    if header.num_layers != trainer.model.num_layers:
        raise ValueError(f"{path}: of a model of {header.num_layers} layers, this one has {trainer.model.num_layers}")
    if header.optimizer != type(trainer.optimizer).__name__:
        raise ValueError(f"{path}: saved with {header.optimizer}, the optimizer is {type(trainer.optimizer).__name__}")
    return path, header


def _damage(path: Path, header: Header) -> str | None:
    """What is wrong with this process's share of the files."""
    for name, expected in header.files[dist.get_rank() :: dist.get_world_size()]:
        if not (path / name).exists():
            return f"{path}: damaged: {name} is missing"
        if (found := _sum(path / name)) != expected:
            what = f"{found[0]} bytes instead of {expected[0]}" if found[0] != expected[0] else "changed since written"
            return f"{path}: damaged: {name} is {what}"
    return None


def _blank(trainer: Trainer, metadata: Metadata, state: Snapshot, path: Path) -> str | None:
    """Fill a snapshot with empty tensors for what the checkpoint has of this process's layers; says what does not
    fit."""
    stored = metadata.state_dict_metadata
    summed = {canonical(name, trainer.model): b.gradients for b in trainer.reducer.buckets for name, _ in b.parameters}
    about: dict[str, list[str]] = {}
    for key in stored:
        if key.startswith(OPTIMIZER):
            about.setdefault(split(key)[0], []).append(key)
    for name, value in held(trainer).items():
        entry = stored.get(MODEL + name)
        if not isinstance(entry, TensorStorageMetadata):
            return f"{path}: of another model: it has no {name}"
        if entry.size != value.shape:
            return f"{path}: of another model: {name} is {list(entry.size)} there, {list(value.shape)} here"
        dtype = summed[name].dtype if name in summed else value.dtype
        state.weights[name] = _empty_like(value, dtype)
        for key in about.get(name, ()):
            kept = stored[key]
            assert isinstance(kept, TensorStorageMetadata)
            dtype = kept.properties.dtype
            alike = kept.size == value.shape
            state.put(key, _empty_like(value, dtype) if alike else torch.empty(kept.size, dtype=dtype))
    return None


def _empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In host memory, unless it is one shard of a tensor."""
    if hasattr(tensor, "placements"):
        return torch.empty_like(tensor, dtype=dtype)
    return torch.empty(tensor.shape, dtype=dtype)


def _sync(folder: Path) -> None:
    """Make a rename last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk(path: Path, what: str) -> Iterator[None]:
    """Errors of reading and writing as one line."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise ValueError(f"{path}: {what}: {' '.join(str(first).split())[:200]}") from None
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: {what}: {' '.join(str(error).split())[:200]}") from None
