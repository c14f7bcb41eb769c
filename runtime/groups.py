"""Process groups in one closable place.

Every group is created by every process, in one order, with a timeout of its own (a subgroup does not inherit one), and
none twice. With gloo, sockets stay open while any reference to a group lives, so there is one owner of all of them.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Ranks = tuple[int, ...]


class RankFailed(RuntimeError):
    """A process failed, or a peer does not answer: says who, where, and at which action."""


class Disconnected(RuntimeError):
    """A transfer or a collective failed underneath; turned into `RankFailed` where the action is known."""


@contextmanager
def communication() -> Iterator[None]:
    """Errors of the network as `Disconnected`, so that they are not mistaken for errors of the model."""
    try:
        yield
    except RuntimeError as error:
        text = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split()))  # without gloo's place in its source
        raise Disconnected(text.partition(" This is typically")[0][:300]) from None


class Groups:
    """One group per distinct set of ranks and purpose.

    Parameters
    ----------
    timeout_s
        After so long without an answer a peer counts as dead.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[str, Ranks], Any] = {}

    def create(self, sets: Iterable[Ranks], purpose: str = "reduce", *, single: bool = False) -> None:
        """Create the groups of these sets that do not exist; all processes call it with the same sets."""
        for ranks in sorted({tuple(ranks) for ranks in sets if single or len(ranks) > 1}):
            if (purpose, ranks) not in self._groups:
                self._groups[purpose, ranks] = dist.new_group(list(ranks), timeout=self.timeout)

    def of(self, ranks: Ranks, purpose: str = "reduce", *, single: bool = False) -> Any:
        """The group of these ranks; None for one rank unless there are groups of a `single` one."""
        return self._groups[purpose, ranks] if single or len(ranks) > 1 else None

    def close(self) -> None:
        """Drop all groups and the world, so that peers that wait for this process notice."""
        self._groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
