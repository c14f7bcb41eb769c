"""Accelerators as their makers describe them: memory, peak rates, bandwidths, power, each figure with its source.

Rates are dense (no sparsity), with fp32 accumulation where the maker tells the two apart; `fp32` is the best unit that
rounds to fp32 (AMD: its matrix cores). The GB of a memory are 2^30 bytes, of which a driver keeps up to 3 %; those of a
bandwidth 10^9. A link is all links of one device together, in one direction. What a maker does not publish is missing.

A device that is not here: make a `Device` of its figures and hand that to `estimate.profile` in place of a name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from planner.cluster import DeviceType, Link

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
DTYPES: tuple[Dtype, ...] = ("fp32", "tf32", "fp16", "bf16", "fp8")
Figure = Literal["memory", "bandwidth", "peak", "watts", "link"]
FIGURES: tuple[Figure, ...] = ("memory", "bandwidth", "peak", "watts", "link")

GB, TERA = 10**9, 10**12
# Of a link's peak, what large messages reach, and seconds before the first byte: usual figures of NCCL, not measured.
LINK_SHARE, LINK_ALPHA_S = 0.8, 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a figure stands.

    Parameters
    ----------
    title, year
        Document and its year.
    url
        Its address, or that of the page that links to it.
    """

    title: str
    year: int
    url: str

    def __str__(self) -> str:
        return f"{self.title} ({self.year}), {self.url}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Parameters
    ----------
    name
        Unique name.
    vendor, year
        Maker, and the year it was introduced.
    memory_bytes
        Memory.
    bytes_per_s
        Peak bandwidth of the memory.
    peaks
        Pairs (dtype, peak FLOP/s).
    watts
        Board power; None if not published.
    links
        Pairs (kind of link, bytes per second in one direction), the usual one first.
    aliases
        Other names it is known by.
    sheet, others
        Source of every figure, and of those that stand elsewhere.
    """

    name: str
    vendor: str
    year: int
    memory_bytes: int
    bytes_per_s: float
    peaks: tuple[tuple[Dtype, float], ...]
    watts: float | None
    links: tuple[tuple[str, float], ...]
    aliases: tuple[str, ...] = ()
    sheet: Source
    others: tuple[tuple[Figure, Source], ...] = ()

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s; without tf32 units, tf32 runs at the rate of fp32."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype: {dtype!r} is not among {', '.join(DTYPES)}")
        peaks: dict[str, float] = dict(self.peaks)
        if dtype == "tf32" and dtype not in peaks:
            dtype = "fp32"
        if dtype not in peaks:
            raise ValueError(f"dtype: {self.name} has no published {dtype} rate, it has {', '.join(peaks)}")
        return peaks[dtype]

    def source(self, figure: Figure) -> Source:
        """Where a figure stands."""
        return dict(self.others).get(figure, self.sheet)


def names() -> tuple[str, ...]:
    """Names of all devices, by maker and year."""
    return tuple(device.name for device in DEVICES)


def device(name: str) -> Device:
    """The device of a name or an alias; case, blanks, dashes and the maker's name do not matter.

    Raises
    ------
    ValueError
        If there is none; names those that come near.
    """
    found = _by_key().get(_key(name))
    if found is not None:
        return found
    key = _key(name)
    near = [each.name for each in DEVICES if key and key in _key(each.name)]
    near = near or [_by_key()[each].name for each in difflib.get_close_matches(key, _by_key(), n=3)]
    hint = f"; did you mean {' or '.join(map(repr, dict.fromkeys(near)))}?" if near else ": " + ", ".join(names())
    raise ValueError(f"device: {name!r} is not among the {len(DEVICES)} of the catalogue{hint}")


def device_type(name: str, dtype: str) -> DeviceType:
    """The device as a device type of a cluster, called `name`, with its peak at a precision."""
    found = device(name)
    return DeviceType(
        name=name, memory_bytes=found.memory_bytes, peak_flops_per_s=found.peak(dtype), watts=found.watts
    )


def link(name: str, kind: str | None = None) -> Link:
    """A default link between two such devices in one node: `LINK_SHARE` of the peak, `LINK_ALPHA_S` ahead.

    Parameters
    ----------
    kind
        One of the device's kinds of link; None for the first.
    """
    found = device(name)
    links = dict(found.links)
    if kind is not None and kind not in links:
        raise ValueError(f"link: {kind!r} is not among {', '.join(links)} of {found.name}")
    return Link(alpha_s=LINK_ALPHA_S, bytes_per_s=LINK_SHARE * (links[kind] if kind else found.links[0][1]))


def listing() -> str:
    """All devices as a table for a terminal: memory, bandwidth, rates, power, link, and the source of the rates."""
    head = ("device", "GiB", "GB/s", *(f"{dtype} TFLOP/s" for dtype in DTYPES), "W", "link GB/s", "source")
    rows = [head, *map(_row, DEVICES)]
    width = [max(map(len, column)) for column in zip(*rows)]
    left = (0, len(head) - 1)  # names and sources; numbers stand to the right
    lines = [
        [text.ljust(w) if i in left else text.rjust(w) for i, (text, w) in enumerate(zip(row, width))] for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _row(device: Device) -> tuple[str, ...]:
    peaks: dict[str, float] = dict(device.peaks)
    source = device.source("peak")
    return (
        device.name,
        f"{device.memory_bytes / 2**30:g}",
        f"{device.bytes_per_s / GB:g}",
        *(f"{peaks[dtype] / TERA:g}" if dtype in peaks else "-" for dtype in DTYPES),
        "-" if device.watts is None else f"{device.watts:g}",
        f"{device.links[0][1] / GB:g}",
        f"{source.title}, {source.year}",
    )


@lru_cache
def _by_key() -> Mapping[str, Device]:
    return {_key(alias): each for each in DEVICES for alias in (each.name, *each.aliases)}


def _key(name: str) -> str:
    text = re.sub(r"nvidia|geforce|tesla|quadro|amd|instinct|intel|huawei|google|cloud|aws", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(\d)\s*gi?b\b", r"\1", text))


# The table ----------------------------------------------------------------------------------------------------------

PCIE3, PCIE4, PCIE5 = ("PCIe 3.0 x16", 15.75), ("PCIe 4.0 x16", 31.5), ("PCIe 5.0 x16", 63.0)


def _sheet(title: str, year: int, url: str) -> Source:
    return Source(title=title, year=year, url=f"https://{url}")


def _device(
    name: str,
    vendor: str,
    year: int,
    sheet: Source,
    *,
    gb: float,
    gb_per_s: float,
    watts: float | None,
    links: tuple[tuple[str, float], ...],
    aliases: tuple[str, ...] = (),
    others: Mapping[Figure, Source] | None = None,
    **teraflops: float,
) -> Device:
    """A row of the table, in the units of data sheets: GB, GB/s, W, TFLOP/s."""
    return Device(
        name=name,
        vendor=vendor,
        year=year,
        memory_bytes=round(gb * 2**30),
        bytes_per_s=float(gb_per_s * GB),
        peaks=tuple((dtype, float(teraflops[dtype] * TERA)) for dtype in DTYPES if dtype in teraflops),
        watts=watts,
        links=tuple((kind, float(rate * GB)) for kind, rate in links),
        aliases=aliases,
        sheet=sheet,
        others=tuple((others or {}).items()),
    )


_NVIDIA, _AMD = "www.nvidia.com/en-us", "www.amd.com/en/products/accelerators/instinct"
_PASCAL = _sheet("Tesla P100 data sheet; Pascal architecture white paper", 2016, f"{_NVIDIA}/data-center/tesla-p100/")
_P40 = _sheet("Tesla P40 data sheet", 2016, f"{_NVIDIA}/data-center/tesla-p40/")
_GTX9 = _sheet("GeForce GTX 960 specifications", 2015, f"{_NVIDIA}/geforce/900-series/")
_GTX = _sheet("GeForce GTX 1080 white paper and specifications", 2017, f"{_NVIDIA}/geforce/10-series/")
_V100 = _sheet("V100 data sheet; Volta architecture white paper", 2017, f"{_NVIDIA}/data-center/v100/")
_V100S = _sheet("V100 data sheet", 2020, f"{_NVIDIA}/data-center/v100/")
_T4 = _sheet("T4 data sheet", 2018, f"{_NVIDIA}/data-center/tesla-t4/")
_TURING = _sheet("Turing architecture white paper", 2018, f"{_NVIDIA}/geforce/turing/")
_TITAN = _sheet("Titan RTX specifications", 2018, f"{_NVIDIA}/deep-learning-ai/products/titan-rtx/")
_A100 = _sheet("A100 data sheet; A100 architecture white paper", 2021, f"{_NVIDIA}/data-center/a100/")
_A800 = _sheet("Lenovo product guide LP1813: A800 PCIe", 2023, "lenovopress.lenovo.com/lp1813")
_H800 = _sheet("Lenovo product guide LP1814: H800 PCIe", 2023, "lenovopress.lenovo.com/lp1814")
_A30 = _sheet("A30 data sheet", 2021, f"{_NVIDIA}/data-center/products/a30-gpu/")
_A10 = _sheet("A10 data sheet", 2021, f"{_NVIDIA}/data-center/products/a10-gpu/")
_A40 = _sheet("A40 data sheet", 2020, f"{_NVIDIA}/data-center/a40/")
_GA102 = _sheet("Ampere GA102 architecture white paper", 2021, f"{_NVIDIA}/geforce/ampere/")
_A6000 = _sheet("RTX A6000 data sheet", 2020, f"{_NVIDIA}/design-visualization/rtx-a6000/")
_A5000 = _sheet("RTX A5000 data sheet", 2021, f"{_NVIDIA}/design-visualization/rtx-a5000/")
_3060 = _sheet("GeForce RTX 3060 specifications", 2021, f"{_NVIDIA}/geforce/graphics-cards/30-series/")
_ADA = _sheet("Ada architecture white paper", 2022, f"{_NVIDIA}/geforce/ada-lovelace-architecture/")
_4060 = _sheet("GeForce RTX 4060 specifications", 2023, f"{_NVIDIA}/geforce/graphics-cards/40-series/")
_RTX_ADA = _sheet("RTX 6000 Ada data sheet; Ada white paper", 2022, f"{_NVIDIA}/design-visualization/rtx-6000/")
_L4 = _sheet("L4 data sheet", 2023, f"{_NVIDIA}/data-center/l4/")
_L40 = _sheet("L40 data sheet", 2022, f"{_NVIDIA}/data-center/l40/")
_L40S = _sheet("L40S data sheet", 2023, f"{_NVIDIA}/data-center/l40s/")
_H100 = _sheet("H100 data sheet; Hopper architecture white paper", 2022, f"{_NVIDIA}/data-center/h100/")
_H200 = _sheet("H200 data sheet", 2023, f"{_NVIDIA}/data-center/h200/")
_GH200 = _sheet("GH200 superchip data sheet", 2023, f"{_NVIDIA}/data-center/grace-hopper-superchip/")
_BLACKWELL = _sheet("Blackwell data sheet (GB200 NVL72, HGX B200)", 2025, f"{_NVIDIA}/data-center/hgx/")
_RTX_BLACKWELL = _sheet("RTX Blackwell white paper", 2025, f"{_NVIDIA}/geforce/graphics-cards/50-series/rtx-5090/")
_MI100 = _sheet("Instinct MI100 data sheet", 2020, f"{_AMD}/mi100.html")
_MI200 = _sheet("Instinct MI200 series data sheet", 2022, f"{_AMD}/mi200.html")
_MI300A = _sheet("Instinct MI300A data sheet", 2023, f"{_AMD}/mi300/mi300a.html")
_MI300X = _sheet("Instinct MI300X data sheet", 2023, f"{_AMD}/mi300/mi300x.html")
_MI325X = _sheet("Instinct MI325X data sheet", 2024, f"{_AMD}/mi300/mi325x.html")
_MI355X = _sheet("Instinct MI355X data sheet", 2025, f"{_AMD}/mi350/mi355x.html")
_GAUDI2 = _sheet("Gaudi 2 white paper; R. Kaplan, Gaudi 3, Hot Chips", 2024, "habana.ai/products/gaudi2/")
_GAUDI3 = _sheet("Gaudi 3 white paper; R. Kaplan, Gaudi 3, Hot Chips", 2024, "habana.ai/products/gaudi3/")
_TRN1 = _sheet("AWS Neuron: Trainium architecture", 2024, "awsdocs-neuron.readthedocs-hosted.com")
_TRN2 = _sheet("AWS Neuron: Trainium2 architecture", 2024, "awsdocs-neuron.readthedocs-hosted.com")
_ASCEND = _sheet("DaVinci: a scalable architecture for neural network computing, Hot Chips 31", 2019, "hotchips.org")


def _tpu(version: str) -> Source:
    return _sheet(f"Cloud TPU documentation: TPU {version}", 2025, f"cloud.google.com/tpu/docs/{version}")


_NV = "NVIDIA"
_BRIDGE3, _BRIDGE3_SMALL, _BRIDGE2 = ("NVLink bridge", 300.0), ("NVLink bridge", 56.25), ("NVLink bridge", 50.0)

DEVICES: tuple[Device, ...] = (
    # Pascal and older: no tensor cores
    _device("GTX-960", _NV, 2015, _GTX9, gb=2, gb_per_s=112, watts=120, links=(PCIE3,), fp32=2.3),
    _device("GTX-1080", _NV, 2016, _GTX, gb=8, gb_per_s=320, watts=180, links=(PCIE3,), fp32=8.9),
    _device("GTX-1080-Ti", _NV, 2017, _GTX, gb=11, gb_per_s=484, watts=250, links=(PCIE3,), fp32=11.3),
    _device("P40", _NV, 2016, _P40, gb=24, gb_per_s=346, watts=250, links=(PCIE3,), fp32=12),
    _device("P100-16-PCIe", _NV, 2016, _PASCAL, gb=16, gb_per_s=732, watts=250, links=(PCIE3,), fp32=9.3, fp16=18.7),
    _device(
        "P100-16-SXM", _NV, 2016, _PASCAL, gb=16, gb_per_s=732, watts=300, links=(("NVLink 1", 80), PCIE3),
        aliases=("P100", "P100-16"), fp32=10.6, fp16=21.2,
    ),
    # Volta
    _device("V100-16-PCIe", _NV, 2017, _V100, gb=16, gb_per_s=900, watts=250, links=(PCIE3,), fp32=14, fp16=112),
    _device("V100-32-PCIe", _NV, 2018, _V100, gb=32, gb_per_s=900, watts=250, links=(PCIE3,), fp32=14, fp16=112),
    _device(
        "V100-16-SXM", _NV, 2017, _V100, gb=16, gb_per_s=900, watts=300, links=(("NVLink 2", 150), PCIE3),
        aliases=("V100-16", "V100-SXM2-16GB"), fp32=15.7, fp16=125,
    ),
    _device(
        "V100-32-SXM", _NV, 2018, _V100, gb=32, gb_per_s=900, watts=300, links=(("NVLink 2", 150), PCIE3),
        aliases=("V100-32", "V100-SXM2-32GB", "V100-SXM3-32GB"), fp32=15.7, fp16=125,
    ),
    _device("V100S-32-PCIe", _NV, 2019, _V100S, gb=32, gb_per_s=1134, watts=250, links=(PCIE3,), aliases=("V100S",),
            fp32=16.4, fp16=130),
    # Turing; GeForce halves its rate when it accumulates in fp32
    _device("T4", _NV, 2018, _T4, gb=16, gb_per_s=300, watts=70, links=(PCIE3,), fp32=8.1, fp16=65),
    _device("RTX-2080-Ti", _NV, 2018, _TURING, gb=11, gb_per_s=616, watts=250, links=(PCIE3, _BRIDGE2),
            fp32=13.4, fp16=53.8),
    _device("Titan-RTX", _NV, 2018, _TITAN, gb=24, gb_per_s=672, watts=280, links=(PCIE3, _BRIDGE2),
            fp32=16.3, fp16=130, others={"peak": _TURING}),
    # Ampere
    _device("A100-40-PCIe", _NV, 2020, _A100, gb=40, gb_per_s=1555, watts=250, links=(PCIE4, _BRIDGE3),
            aliases=("A100-PCIE-40GB",), fp32=19.5, tf32=156, fp16=312, bf16=312),
    _device("A100-80-PCIe", _NV, 2021, _A100, gb=80, gb_per_s=1935, watts=300, links=(PCIE4, _BRIDGE3),
            aliases=("A100-80GB-PCIe", "A100 80GB PCIe"), fp32=19.5, tf32=156, fp16=312, bf16=312),
    _device("A100-40-SXM", _NV, 2020, _A100, gb=40, gb_per_s=1555, watts=400, links=(("NVLink 3", 300), PCIE4),
            aliases=("A100-40", "A100-SXM4-40GB"), fp32=19.5, tf32=156, fp16=312, bf16=312),
    _device("A100-80-SXM", _NV, 2020, _A100, gb=80, gb_per_s=2039, watts=400, links=(("NVLink 3", 300), PCIE4),
            aliases=("A100-80", "A100-SXM4-80GB"), fp32=19.5, tf32=156, fp16=312, bf16=312),
    _device("A800-80-PCIe", _NV, 2022, _A800, gb=80, gb_per_s=1935, watts=300,
            links=(PCIE4, ("NVLink bridge", 200)), aliases=("A800",), fp32=19.5, tf32=156, fp16=312, bf16=312),
    _device("A30", _NV, 2021, _A30, gb=24, gb_per_s=933, watts=165, links=(PCIE4, ("NVLink bridge", 100)),
            fp32=10.3, tf32=82, fp16=165, bf16=165),
    _device("A10", _NV, 2021, _A10, gb=24, gb_per_s=600, watts=150, links=(PCIE4,),
            fp32=31.2, tf32=62.5, fp16=125, bf16=125),
    _device("A40", _NV, 2020, _A40, gb=48, gb_per_s=696, watts=300, links=(PCIE4, _BRIDGE3_SMALL),
            fp32=37.4, tf32=74.8, fp16=149.7, bf16=149.7),
    _device("RTX-A5000", _NV, 2021, _A5000, gb=24, gb_per_s=768, watts=230, links=(PCIE4, _BRIDGE3_SMALL),
            aliases=("A5000",), fp32=27.8, tf32=55.6, fp16=111.1, bf16=111.1),
    _device("RTX-A6000", _NV, 2020, _A6000, gb=48, gb_per_s=768, watts=300, links=(PCIE4, _BRIDGE3_SMALL),
            aliases=("A6000",), fp32=38.7, tf32=77.4, fp16=154.8, bf16=154.8),
    _device("RTX-3060", _NV, 2021, _3060, gb=12, gb_per_s=360, watts=170, links=(PCIE4,),
            fp32=12.7, tf32=12.7, fp16=25.4, bf16=25.4, others={"peak": _GA102}),
    _device("RTX-3080", _NV, 2020, _GA102, gb=10, gb_per_s=760, watts=320, links=(PCIE4,),
            fp32=29.8, tf32=29.8, fp16=59.5, bf16=59.5),
    _device("RTX-3090", _NV, 2020, _GA102, gb=24, gb_per_s=936, watts=350, links=(PCIE4, _BRIDGE3_SMALL),
            fp32=35.6, tf32=35.6, fp16=71, bf16=71),
    # Ada
    _device("RTX-4060", _NV, 2023, _4060, gb=8, gb_per_s=272, watts=115, links=(("PCIe 4.0 x8", 15.75),),
            fp32=15.1, tf32=15.1, fp16=30.2, bf16=30.2, fp8=60.5, others={"peak": _ADA}),
    _device("RTX-4080", _NV, 2022, _ADA, gb=16, gb_per_s=716.8, watts=320, links=(PCIE4,),
            fp32=48.7, tf32=48.7, fp16=97.5, bf16=97.5, fp8=194.9),
    _device("RTX-4090", _NV, 2022, _ADA, gb=24, gb_per_s=1008, watts=450, links=(PCIE4,),
            fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3),
    _device("RTX-6000-Ada", _NV, 2022, _RTX_ADA, gb=48, gb_per_s=960, watts=300, links=(PCIE4,),
            aliases=("6000 Ada", "RTX 6000 Ada Generation"), fp32=91.1, tf32=182.1, fp16=364.2, bf16=364.2, fp8=728.5),
    _device("L4", _NV, 2023, _L4, gb=24, gb_per_s=300, watts=72, links=(PCIE4,),
            fp32=30.3, tf32=60, fp16=121, bf16=121, fp8=242.5),
    _device("L40", _NV, 2022, _L40, gb=48, gb_per_s=864, watts=300, links=(PCIE4,),
            fp32=90.5, tf32=90.5, fp16=181, bf16=181, fp8=362),
    _device("L40S", _NV, 2023, _L40S, gb=48, gb_per_s=864, watts=350, links=(PCIE4,),
            fp32=91.6, tf32=183, fp16=362, bf16=362, fp8=733),
    # Hopper
    _device("H100-PCIe", _NV, 2022, _H100, gb=80, gb_per_s=2000, watts=350, links=(PCIE5, _BRIDGE3),
            aliases=("H100-80-PCIe", "H100 80GB PCIe"), fp32=51, tf32=378, fp16=756, bf16=756, fp8=1513),
    _device("H100-NVL", _NV, 2023, _H100, gb=94, gb_per_s=3900, watts=400, links=(PCIE5, _BRIDGE3),
            aliases=("H100-94-NVL",), fp32=60, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5),
    _device("H100-SXM", _NV, 2022, _H100, gb=80, gb_per_s=3350, watts=700, links=(("NVLink 4", 450), PCIE5),
            aliases=("H100", "H100-80", "H100-80GB-HBM3", "H100-SXM5-80GB"),
            fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979),
    _device("H800-PCIe", _NV, 2023, _H800, gb=80, gb_per_s=2000, watts=350, links=(PCIE5, ("NVLink bridge", 200)),
            aliases=("H800",), fp32=51, tf32=378, fp16=756, bf16=756, fp8=1513),
    _device("H200-SXM", _NV, 2023, _H200, gb=141, gb_per_s=4800, watts=700, links=(("NVLink 4", 450), PCIE5),
            aliases=("H200", "H200-141"), fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979),
    _device("H200-NVL", _NV, 2024, _H200, gb=141, gb_per_s=4800, watts=600, links=(("NVLink bridge", 450), PCIE5),
            fp32=60, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5),
    _device("GH200-96", _NV, 2023, _GH200, gb=96, gb_per_s=4000, watts=None, links=(("NVLink 4", 450), PCIE5),
            aliases=("GH200", "GH-96", "GH200-480GB"), fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979),
    _device("GH200-144", _NV, 2023, _GH200, gb=144, gb_per_s=4900, watts=None, links=(("NVLink 4", 450), PCIE5),
            aliases=("GH-144",), fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979),
    # Blackwell
    _device("B200", _NV, 2024, _BLACKWELL, gb=180, gb_per_s=7700, watts=1000, links=(("NVLink 5", 900), PCIE5),
            aliases=("HGX B200", "B200-180"), fp32=75, tf32=1100, fp16=2250, bf16=2250, fp8=4500),
    _device("GB200", _NV, 2024, _BLACKWELL, gb=186, gb_per_s=8000, watts=1200, links=(("NVLink 5", 900), PCIE5),
            aliases=("GB200-186",), fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000),
    _device("RTX-5090", _NV, 2025, _RTX_BLACKWELL, gb=32, gb_per_s=1792, watts=575, links=(PCIE5,),
            fp32=104.8, tf32=104.8, fp16=209.5, bf16=209.5, fp8=419),
    # AMD: a device is what the driver shows as one, so half a card for MI250 and MI250X
    _device("MI100", "AMD", 2020, _MI100, gb=32, gb_per_s=1228.8, watts=300, links=(("Infinity Fabric", 138), PCIE4),
            fp32=46.1, fp16=184.6, bf16=92.3),
    _device("MI210", "AMD", 2022, _MI200, gb=64, gb_per_s=1638.4, watts=300, links=(PCIE4, ("Infinity Fabric", 150)),
            fp32=45.3, fp16=181, bf16=181),
    _device("MI250-GCD", "AMD", 2021, _MI200, gb=64, gb_per_s=1638.4, watts=280, links=(("Infinity Fabric", 200),),
            aliases=("MI250",), fp32=45.3, fp16=181.05, bf16=181.05),
    _device("MI250X-GCD", "AMD", 2021, _MI200, gb=64, gb_per_s=1638.4, watts=280, links=(("Infinity Fabric", 200),),
            aliases=("MI250X",), fp32=47.85, fp16=191.5, bf16=191.5),
    _device("MI300A", "AMD", 2023, _MI300A, gb=128, gb_per_s=5300, watts=550, links=(("Infinity Fabric", 384),),
            fp32=122.6, tf32=490.3, fp16=980.6, bf16=980.6, fp8=1961.2),
    _device("MI300X", "AMD", 2023, _MI300X, gb=192, gb_per_s=5300, watts=750, links=(("Infinity Fabric", 448), PCIE5),
            fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9),
    _device("MI325X", "AMD", 2024, _MI325X, gb=256, gb_per_s=6000, watts=1000, links=(("Infinity Fabric", 448), PCIE5),
            fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9),
    _device("MI355X", "AMD", 2025, _MI355X, gb=288, gb_per_s=8000, watts=1400,
            links=(("Infinity Fabric", 537.6), PCIE5), fp32=157.3, fp16=2516.6, bf16=2516.6, fp8=5033.2),
    # Others; links of Gaudi are the ports that stay in the node
    _device("Gaudi2", "Intel", 2022, _GAUDI2, gb=96, gb_per_s=2450, watts=600, links=(("21 x 100 GbE", 262.5), PCIE4),
            bf16=432, fp8=865),
    _device("Gaudi3", "Intel", 2024, _GAUDI3, gb=128, gb_per_s=3700, watts=900, links=(("21 x 200 GbE", 525), PCIE5),
            bf16=1835, fp8=1835),
    _device("TPU-v4", "Google", 2021, _tpu("v4"), gb=32, gb_per_s=1200, watts=192, links=(("ICI", 300),), bf16=275),
    _device("TPU-v5e", "Google", 2023, _tpu("v5e"), gb=16, gb_per_s=819, watts=None, links=(("ICI", 200),), bf16=197),
    _device("TPU-v5p", "Google", 2023, _tpu("v5p"), gb=95, gb_per_s=2765, watts=None, links=(("ICI", 600),), bf16=459),
    _device("TPU-v6e", "Google", 2024, _tpu("v6e"), gb=32, gb_per_s=1638, watts=None, links=(("ICI", 400),),
            aliases=("Trillium",), bf16=918),
    _device("Trainium1", "AWS", 2022, _TRN1, gb=32, gb_per_s=820, watts=None, links=(("NeuronLink 2", 192),),
            aliases=("Trainium", "Trn1"), fp32=47.5, tf32=190, fp16=190, bf16=190, fp8=190),
    _device("Trainium2", "AWS", 2024, _TRN2, gb=96, gb_per_s=2900, watts=None, links=(("NeuronLink 3", 640),),
            aliases=("Trn2",), fp32=181, tf32=667, fp16=667, bf16=667, fp8=1299),
    _device("Ascend-910", "Huawei", 2019, _ASCEND, gb=32, gb_per_s=1200, watts=310, links=(("HCCS", 90),), fp16=256),
)
