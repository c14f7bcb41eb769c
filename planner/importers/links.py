"""Links and a cluster to start from, out of network measurements.

The formats with a network measure collectives, or messages between two devices. A link of ours is one message between
two devices, and a ring all-reduce of S bytes over n of them is 2 (n - 1) messages of S / n bytes, so that a measured
all-reduce of t seconds is

    message S / n bytes        bandwidth 2 (n - 1) S / (n t) bytes/s

which gives the measured time back. The cluster is a skeleton: one node of the measured size, or two, for the user to
copy. What the format does not hold (name and memory of the device) is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.importers.reading import naming, needed, positive

GIGABYTE = 1e9


def thinned(points: Sequence[tuple[float, float]], per_octave: int = 4) -> list[tuple[float, float]]:
    """So many of the (bytes, figure) points to each doubling of the size, the first and the last among them."""
    kept: list[tuple[float, float]] = []
    for nbytes, figure in sorted(points):
        if not kept or nbytes >= kept[-1][0] * 2 ** (1 / per_octave):
            kept.append((nbytes, figure))
    return [*kept, max(points)] if kept[-1] != max(points) else kept


def ring_link(where: object, points: Iterable[tuple[float, float]], num_ranks: int) -> Link:
    """The link on which a ring all-reduce takes the measured (bytes, seconds); errors start with `where`."""
    scale = 2 * (num_ranks - 1) / num_ranks
    return message_link(where, ((nbytes / num_ranks, scale * nbytes / seconds) for nbytes, seconds in points))


def message_link(where: object, points: Iterable[tuple[float, float]]) -> Link:
    """The link of the measured (message bytes, bytes/s); errors start with `where`."""
    with naming(where):
        return Link(table=tuple(sorted(points)))


def ring_speeds(what: str, links: dict[int, Link], nbytes: float = 256e6) -> str:
    """Note on all-reduces of different group sizes, for a reader to see whether one link does for all."""
    speeds = ", ".join(f"{n}: {links[n].bandwidth(nbytes / n) / GIGABYTE:.3g}" for n in sorted(links))
    return f"{what}, GB/s at {nbytes / 1e6:.0f} MB by number of devices: {speeds}"


def skeleton(
    *,
    name: str,
    device: str | None,
    memory_gb: float | None,
    sizes: Sequence[int],
    link: Link | None,
    network: Link | None = None,
    driven_by: int = 1,
    notes: Sequence[str],
) -> Cluster:
    """Nodes of these sizes, one device type, `link` inside a node and `network` between nodes.

    Parameters
    ----------
    device, memory_gb
        Name of the device type, and its memory in units of 2^30 bytes; refused where None.
    driven_by
        Devices at each end that drove `network` when it was measured.
    """
    needed("device", device, "the format does not name its devices", "V100-32")
    needed("memory_gb", memory_gb, "the format does not hold the memory of a device", "32")
    assert device is not None
    assert memory_gb is not None
    return Cluster(
        name=name,
        device_types=(DeviceType(name=device, memory_bytes=round(positive("memory_gb", memory_gb) * 2**30)),),
        nodes=tuple(
            Node(name=f"node-{i}", devices=(device,) * size, link=link if size > 1 else None)
            for i, size in enumerate(sizes)
        ),
        links=(NetworkLink(between=(device, device), link=network, devices=driven_by),) if network else (),
        notes=tuple(notes),
    )
