"""Import communication tables of nnScaler (github.com/microsoft/nnscaler, OSDI 2024) as a cluster.

A directory holds one file per number of devices in a node, `intra_8.json`: for each collective (`all gather`, `all
reduce`, `reduce scatter`, `all to all`) a list of sizes in MB (2^20 bytes) and a list of seconds. The all-reduce makes
the link; the other collectives follow from it in a ring and are only checked.
"""

from __future__ import annotations

import re
from pathlib import Path

from planner.cluster import Cluster, Link
from planner.importers.layers import MEGABYTE
from planner.importers.links import ring_link, ring_speeds, skeleton
from planner.importers.reading import Json, fingerprints

COLLECTIVE = "all reduce"
FILES = re.compile(r"intra_(?P<devices>[1-9]\d*)\.json")


def cluster(
    path: str | Path, *, device: str | None = None, memory_gb: float | None = None, group: int | None = None
) -> Cluster:
    """One node of the largest measured size.

    Parameters
    ----------
    device
        Name of the device type.
    memory_gb
        Memory of one device, in units of 2^30 bytes.
    group
        Number of devices whose all-reduce makes the link of the node; by default all of it.

    Raises
    ------
    ValueError
        If no table is found, or one is damaged; names the file, the key and the value.
    """
    root = Path(path)
    folder = root / "comm" if (root / "comm").is_dir() else root
    found = {int(m["devices"]): file for file in folder.glob("intra_*.json") if (m := FILES.fullmatch(file.name))}
    if not found:
        raise ValueError(f"{root}: holds no intra_N.json, nor does a folder comm in it")
    links = {devices: _link(Json.read(file), devices) for devices, file in sorted(found.items())}
    chosen = max(links) if group is None else group
    if chosen not in links:
        raise ValueError(f"group: {chosen} devices were not measured, but {', '.join(map(str, links))}")
    files = [found[devices] for devices in links]
    return skeleton(
        name=f"{max(links)} {device}",
        device=device,
        memory_gb=memory_gb,
        sizes=(max(links),),
        link=links[chosen],
        notes=(
            f"nnScaler communication tables: {fingerprints(files)}",
            f"link inside the node from the all-reduce of {chosen} devices; MB taken as 2^20 bytes",
            ring_speeds("all-reduce", links),
        ),
    )


def _link(content: Json, devices: int) -> Link:
    points: list[tuple[float, float]] = []
    for collective, entry in content.items():
        sizes, seconds = entry.list(2)
        rows = list(zip(sizes.list(), seconds.list(len(sizes.list()))))
        measured = [(size.number() * MEGABYTE, time.number()) for size, time in rows]
        for (size, time), (nbytes, took) in zip(rows, measured):
            if not nbytes > 0:
                raise size.wrong("a size in MB above 0")
            if not 0 < took < 100:
                raise time.wrong("seconds above 0 and below 100")
        points = measured if collective == COLLECTIVE else points
    if devices < 2 or not points:
        raise ValueError(f"{content.where}: key {COLLECTIVE!r} is missing, or fewer than 2 devices")
    return ring_link(f"{content.where}: {COLLECTIVE}", points, devices)
