"""What gradient aggregation costs, by what one call carries and when it starts."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
WHOLE = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to reduce the same gradients.

    Parameters
    ----------
    granularity, chunk_bytes, overlap
        As in `runtime.Trainer`.
    one_by_one
        Each call waits for the one before: what synchronous calls after the backward pass do.
    """

    name: str
    granularity: str
    chunk_bytes: int = CHUNK_BYTES
    overlap: bool = True
    one_by_one: bool = False


BASE = "chunked block"
VARIANTS = (
    Variant(name=BASE, granularity="block"),
    Variant(name="block", granularity="block", chunk_bytes=WHOLE),
    Variant(name="layer", granularity="layer"),
    Variant(name="tensor", granularity="tensor"),
    Variant(name="chunked block, after backward", granularity="block", overlap=False),
    Variant(name="layer, after backward, one by one", granularity="layer", overlap=False, one_by_one=True),
    Variant(name="tensor, after backward, one by one", granularity="tensor", overlap=False, one_by_one=True),
    Variant(name="model", granularity="model", overlap=False),
)
RATES = {"1 Gbit/s": 1e9 / 8, "400 Mbit/s": 400e6 / 8}  # bytes per second of every rank's port, each way
