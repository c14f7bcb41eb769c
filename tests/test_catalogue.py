"""The device catalogue: facts that can be checked against one another, names, and what becomes of them."""

from __future__ import annotations

import pytest

from planner import catalogue
from planner.catalogue import DEVICES, DTYPES, FIGURES

GIB = 2**30


def test_there_are_devices_of_every_kind_that_trains() -> None:
    """More than thirty devices of at least five makers, each under one name."""
    assert len(DEVICES) >= 30
    assert len({device.vendor for device in DEVICES}) >= 5
    assert len(set(catalogue.names())) == len(DEVICES)


@pytest.mark.parametrize("device", DEVICES, ids=catalogue.names())
def test_figures_are_of_the_right_size_and_have_a_source(device: catalogue.Device) -> None:
    """Memory, bandwidth, power and rates are within what was ever built; every figure says where it stands."""
    assert 2 * GIB <= device.memory_bytes <= 300 * GIB
    assert 100e9 <= device.bytes_per_s <= 10e12
    assert device.watts is None or 50 <= device.watts <= 1500
    assert device.links
    assert all(10e9 <= rate <= 1e12 for _, rate in device.links)
    assert all(2e12 <= rate <= 6e15 for _, rate in device.peaks)
    for figure in FIGURES:
        source = device.source(figure)
        assert 2014 <= source.year <= 2026
        assert source.title
        assert source.url.startswith("https://")


@pytest.mark.parametrize("device", DEVICES, ids=catalogue.names())
def test_narrower_numbers_are_never_slower(device: catalogue.Device) -> None:
    """fp32 <= tf32 <= fp16 <= fp8 where published, and no unit is 2:4 sparse: fp8 is at most twice fp16."""
    peaks = dict(device.peaks)
    order = [peaks[dtype] for dtype in ("fp32", "tf32", "fp16", "fp8") if dtype in peaks]
    assert order == sorted(order)
    if "fp8" in peaks and "bf16" in peaks:
        assert peaks["fp8"] <= 2.05 * peaks["bf16"]
    assert [dtype for dtype, _ in device.peaks] == [dtype for dtype in DTYPES if dtype in peaks]


@pytest.mark.parametrize(
    ("name", "gib", "gb_per_s", "watts", "fp16"),
    [
        ("V100-16-SXM", 16, 900, 300, 125),
        ("A100-40-PCIe", 40, 1555, 250, 312),
        ("A100-80-SXM", 80, 2039, 400, 312),
        ("H100-SXM", 80, 3350, 700, 989.5),
        ("H200-SXM", 141, 4800, 700, 989.5),
        ("T4", 16, 300, 70, 65),
        ("L4", 24, 300, 72, 121),
        ("L40S", 48, 864, 350, 362),
        ("RTX-3090", 24, 936, 350, 71),
        ("RTX-4090", 24, 1008, 450, 165.2),
        ("MI300X", 192, 5300, 750, 1307.4),
    ],
)
def test_well_known_figures(name: str, gib: int, gb_per_s: float, watts: float, fp16: float) -> None:
    """The figures of the data sheets, dense: half of what a sheet prints with sparsity."""
    device = catalogue.device(name)
    assert device.memory_bytes == gib * GIB
    assert device.bytes_per_s == gb_per_s * 1e9
    assert device.watts == watts
    assert device.peak("fp16") == pytest.approx(fp16 * 1e12)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100-40", "A100-40-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40-SXM"),
        ("nvidia a100 80gb pcie", "A100-80-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16-SXM"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("h100", "H100-SXM"),
        ("GH-96", "GH200-96"),
        ("6000 Ada", "RTX-6000-Ada"),
        ("AMD Instinct MI300X", "MI300X"),
        ("TITAN RTX", "Titan-RTX"),
    ],
)
def test_names_as_tools_print_them(written: str, name: str) -> None:
    """Case, blanks, the maker's name and GB do not matter; a usual short name means the usual board."""
    assert catalogue.device(written).name == name


def test_every_name_and_alias_means_one_device() -> None:
    """No alias hides another device."""
    for device in DEVICES:
        assert catalogue.device(device.name) is device
        assert all(catalogue.device(alias) is device for alias in device.aliases)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("A100", "'A100-40-PCIe' or 'A100-80-PCIe' or 'A100-40-SXM' or 'A100-80-SXM'"),
        ("RTX 2080", "'RTX-2080-Ti'"),
        ("MI300XX", "'MI300X'"),
        ("abacus", "GTX-960, GTX-1080"),
    ],
)
def test_unknown_names_get_the_near_ones(name: str, hint: str) -> None:
    """One error with the name and those that come near, or all."""
    with pytest.raises(ValueError, match=r"device: .* is not among") as error:
        catalogue.device(name)
    assert hint in str(error.value)


def test_a_device_type_keeps_the_name_it_was_asked_by() -> None:
    """A cluster file may say A100-80: memory, peak at the precision, and watts are the board's."""
    found = catalogue.device_type("A100-80", "tf32")
    assert (found.name, found.memory_bytes, found.peak_flops_per_s, found.watts) == ("A100-80", 80 * GIB, 156e12, 400)


def test_tf32_without_its_units_runs_in_fp32() -> None:
    """V100 has no tf32: setting it changes nothing."""
    v100 = catalogue.device("V100-16-SXM")
    assert v100.peak("tf32") == v100.peak("fp32") == 15.7e12


@pytest.mark.parametrize(("name", "dtype"), [("V100-32-SXM", "bf16"), ("A100-80-SXM", "fp8"), ("TPU-v5p", "fp32")])
def test_a_precision_without_units_is_an_error(name: str, dtype: str) -> None:
    """V100 has no bf16, A100 no fp8, and Google publishes bf16 only: one error that says what there is."""
    with pytest.raises(ValueError, match=f"dtype: {name} has no published {dtype} rate, it has"):
        catalogue.device_type(name, dtype)


def test_unknown_precisions_are_an_error() -> None:
    """The five precisions are named."""
    with pytest.raises(ValueError, match="dtype: 'int8' is not among fp32, tf32, fp16, bf16, fp8"):
        catalogue.device("T4").peak("int8")


def test_links_are_a_share_of_the_peak() -> None:
    """NVLink 4: 900 GB/s both ways, 450 one way, 0.8 of it 360; another kind of link by name, else an error."""
    assert catalogue.link("H100-SXM").bytes_per_s == pytest.approx(360e9)
    assert catalogue.link("H100-SXM", "PCIe 5.0 x16").bytes_per_s == pytest.approx(0.8 * 63e9)
    with pytest.raises(ValueError, match=r"link: 'NVLink' is not among PCIe 3\.0 x16 of T4"):
        catalogue.link("T4", "NVLink")


def test_the_listing_has_a_line_per_device() -> None:
    """Name first, source last, a dash for what is not published."""
    head, *lines = catalogue.listing().splitlines()
    assert head.split()[:3] == ["device", "GiB", "GB/s"]
    assert [line.split()[0] for line in lines] == list(catalogue.names())
    t4 = next(line for line in lines if line.startswith("T4 "))
    assert t4.split()[1:9] == ["16", "300", "8.1", "-", "65", "-", "-", "70"]
    assert t4.endswith("T4 data sheet, 2018")
