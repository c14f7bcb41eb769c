"""Process groups in one closable place.

Every group is created by every process, in one order, with a timeout of its own (a subgroup does not inherit one), and
none twice. With gloo, sockets stay open while any reference to a group lives, so there is one owner of all of them.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

Ranks = tuple[int, ...]
COLLECTIVE = "collective"
T = TypeVar("T")


class RankFailed(RuntimeError):
    """A process failed, or a peer does not answer: says who, where, and at which action."""


class Disconnected(RankFailed):
    """A transfer or a collective failed where no action is known."""


@contextmanager
def communication(doing: str = "", *, computing: bool = False) -> Iterator[None]:
    """Errors of the network as `Disconnected`, so that they are not mistaken for errors of the model.

    Parameters
    ----------
    doing
        Who does what with whom: if given the errors are `RankFailed`, beginning with it.
    computing
        Code of the model runs in it: what does not look like an error of the network is left as it is.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankFailed) and not isinstance(error, Disconnected):
            raise
        if computing and not (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise
        text = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split()))  # without gloo's place in its source
        text = text.partition(" This is typically")[0][:300].rstrip(".")
        raise (RankFailed(f"{doing}: {text}") if doing else Disconnected(text)) from None


def gathered(group: Any, value: T, doing: str = "") -> list[T]:
    """Everyone's value, by rank; a collective over a group, the world if it is None.

    Raises
    ------
    Disconnected
        Beginning with `doing`.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    try:
        with communication():
            dist.all_gather_object(found, value, group=group)
    except Disconnected as error:
        raise Disconnected(f"{doing}: {error}" if doing else str(error)) from None
    return found


def agree(group: Any, problem: str | None, doing: str = "") -> None:
    """One process's problem stops all, with the same words; as `gathered`.

    Raises
    ------
    ValueError
        With the first problem.
    """
    for each in gathered(group, problem, doing):
        if each is not None:
            raise ValueError(each)


def on_first(group: Any, action: Callable[[], T]) -> T:
    """What the first process finds or does; its error is everyone's."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = action()
        except (ValueError, OSError) as error:
            found[1] = str(error)
    with communication():
        dist.broadcast_object_list(found, src=0, group=group)
    if found[1] is not None:
        raise ValueError(found[1])
    result: T = found[0]
    return result


class Groups:
    """One group per distinct set of ranks; point-to-point transfers have groups apart from collectives.

    Parameters
    ----------
    timeout_s
        After so long without an answer a peer counts as dead.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[str, Ranks], Any] = {}

    def create(self, sets: Iterable[Ranks], purpose: str = COLLECTIVE, *, single: bool = False) -> None:
        """Create the groups of these sets that do not exist; all processes call it with the same sets."""
        for ranks in sorted({tuple(sorted(ranks)) for ranks in sets if single or len(ranks) > 1}):
            if (purpose, ranks) not in self._groups:
                self._groups[purpose, ranks] = dist.new_group(list(ranks), timeout=self.timeout)

    def of(self, ranks: Iterable[int], purpose: str = COLLECTIVE, *, single: bool = False) -> Any:
        """The group of these ranks; None for one rank unless there are groups of a `single` one."""
        ranks = tuple(sorted(ranks))
        return self._groups[purpose, ranks] if single or len(ranks) > 1 else None

    @property
    def world(self) -> Any:
        """That of all processes, for which a timeout holds that may be shorter than the world's own; None for one."""
        return self.of(range(dist.get_world_size()))

    def close(self) -> None:
        """Drop all groups and the world, so that peers that wait for this process notice."""
        self._groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
