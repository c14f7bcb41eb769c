"""Import the all-reduce tables of vTrain (github.com/VIA-Research/vTrain, MICRO 2024) as a cluster.

A directory holds one file per number of devices in a node, `AR_GPU8_1M_1024M_LUT`: CSV with the bytes of a message,
its count and type, and twice (out of place, in place) the nanoseconds of an all-reduce and its bus bandwidth in GB/s.
The out-of-place time makes the link; a bus bandwidth that does not go with it is an error of units.
"""

from __future__ import annotations

import re
from pathlib import Path

from planner.cluster import Cluster, Link
from planner.importers.links import GIGABYTE, ring_link, ring_speeds, skeleton, thinned
from planner.importers.reading import Line, fingerprints, lines

HEADER = "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)"
FILES = re.compile(r"AR_GPU(?P<devices>[1-9]\d*)_.*")
CHECKED_BYTES = 2**22  # up from here the bus bandwidth has enough digits to be compared


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
        If no table is found, or one is damaged; names the file, the line and the value.
    """
    root = Path(path)
    found = {int(m["devices"]): file for file in root.glob("AR_GPU*") if (m := FILES.fullmatch(file.name))}
    if not found:
        raise ValueError(f"{root}: holds no AR_GPUn_... table")
    links = {devices: _link(file, devices) for devices, file in sorted(found.items())}
    chosen = max(links) if group is None else group
    if chosen not in links:
        raise ValueError(f"group: {chosen} devices were not measured, but {', '.join(map(str, links))}")
    return skeleton(
        name=f"{max(links)} {device}",
        device=device,
        memory_gb=memory_gb,
        sizes=(max(links),),
        link=links[chosen],
        notes=(
            f"vTrain all-reduce tables, {root.resolve().name}: {fingerprints([found[n] for n in links])}",
            f"link inside the node from the out-of-place all-reduce of {chosen} devices, four sizes to each doubling",
            ring_speeds("all-reduce", links),
        ),
    )


def _link(file: Path, devices: int) -> Link:
    head, *rest = lines(file)
    if head.text.strip() != HEADER:
        raise head.wrong(f"the header {HEADER}")
    if devices < 2:
        raise ValueError(f"{file}: an all-reduce needs 2 devices or more")
    return ring_link(file, thinned([_point(line, devices) for line in rest]), devices)


def _point(line: Line, devices: int) -> tuple[float, float]:
    entries = line.text.split(",")
    if len(entries) != 7:
        raise ValueError(f"{line.where}: {len(entries)} values, expected 7: {HEADER}")
    nbytes, nanoseconds = line.part(entries[0], "size(B)").value(1), line.part(entries[3], "time(ns)").value(1)
    bus = line.part(entries[4], "busbw(GB/s)")
    expected = 2 * (devices - 1) / devices * nbytes / nanoseconds * 1e9 / GIGABYTE
    if nbytes >= CHECKED_BYTES and not 0.9 < bus.value() / expected < 1.1:
        raise bus.wrong(f"the {expected:.4g} GB/s that {nanoseconds:g} ns give; is the time in nanoseconds?")
    return nbytes, nanoseconds / 1e9
