"""The importers, on small inputs written here in each format; the published files themselves where they are present."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.importers import FORMATS, NETWORKS, load, metis, network, options, sailor
from planner.importers.layers import vocabulary_bytes
from planner.profile import Cell, LayerKind, ModelProfile

DATA = Path(os.environ.get("HPP_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")) / "sailor"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no measurements in {DATA} (set HPP_DATA)")
Edit = Callable[[dict[str, Any]], object]

# Sailor -------------------------------------------------------------------------------------------------------------
# Four layers of hidden size 4 over 8 tokens: 32 floats per sample are handed on. Vocabulary 20: 160 logits + the loss.


def sizes(params: int, act_output: int, act_mem: int) -> dict[str, int]:
    return {"params_floats": params, "act_output_floats": act_output, "act_mem_floats": act_mem}


SAILOR: dict[str, Any] = {
    "profiles_tmp.json": {
        "Tiny": {
            # keys in any order, as published
            "Fast": {
                "2": {
                    "1": {
                        "3": [0.05, 0.06, 0.007],
                        "0": [0.002, 0.0, 0.007],
                        "2": [0.02, 0.05, 0.007],
                        "1": [0.02, 0.05, 0.007],
                    }
                },
                "1": {
                    "2": {
                        "1": [0.008, 0.02, 0.004],
                        "2": [0.008, 0.02, 0.004],
                        "3": [0.015, 0.02, 0.004],
                        "0": [0.001, 0.0, 0.004],
                    },
                    "1": {
                        "0": [0.001, 0.0, 0.007],
                        "1": [0.01, 0.025, 0.007],
                        "2": [0.01, 0.025, 0.007],
                        "3": [0.025, 0.03, 0.007],
                    },
                },
            },
        }
    },
    "llm_info.json": {
        "Tiny": {
            "2": {"3": sizes(42, 97, 250), "2": sizes(101, 32, 150), "1": sizes(101, 32, 150), "0": sizes(60, 32, 33)},
            "1": {
                "0": sizes(112, 32, 32),
                "1": sizes(200, 32, 280),
                "2": sizes(200, 32, 280),
                "3": sizes(82, 161, 400),
            },
        }
    },
    "configs/training_config_tiny.json": {"model": "Tiny", "sequence_length": 8, "num_all_layers": 4, "heads": 2},
    "configs/basic_cluster_config.json": {
        "zone": "here",
        "Fast": {"gpus_per_node": 4, "mem_per_gpu": 16_000_000_000},
        "Slow": {"gpus_per_node": 4, "mem_per_gpu": 8_000_000_000},
        "Lone": {"gpus_per_node": 4, "mem_per_gpu": 8_000_000_000},
    },
    "network/intra_node_bandwidths.json": {
        "Fast": {"2": [[0.0, 0.0, 50.0], 50e9], "4": [[0.0, 0.0, 6.0], 6e9]},  # pairs
        "Slow": {"4": [[0.0, 0.1, 9.0], 20e9], "2": [[0.0, 0.1, 10.0], 11e9]},
        "Lone": {"2": [[0.0, 0.1, 10.0], 11e9]},
    },
    "network/multizone_bandwidths_het.json": {
        "here": {
            "Fast": {
                "1": {
                    "here": {
                        "Fast": {"1": [[0.0, 0.0, 2.0], 2e9], "2": [[0.0, 0.0, 2.5], 2.5e9]},
                        "Slow": {"1": [[0.0, 0.0, 1.5], 1.5e9]},
                    }
                },
                "2": {"here": {"Fast": {"2": [[0.0, 0.0, 3.0], 3e9]}, "Slow": {"2": [[0.0, 0.0, 1.9], 1.9e9]}}},
                "4": {"here": {"Fast": {"4": [[0.0, 0.0, 4.0], 4e9]}}},
            },
            "Slow": {
                "1": {"here": {"Slow": {"1": [[0.0, 0.0, 1.0], 1e9]}, "Fast": {"1": [[0.0, 0.0, 1.2], 1.2e9]}}},
            },
            "Lone": {},
        }
    },
}


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def edited(files: dict[str, Any], file: str, edit: Edit) -> dict[str, Any]:
    changed = copy.deepcopy(files)
    edit(changed[file])
    return changed


def the_cell(profile: ModelProfile, kind: str, tp: int, micro_batch: int) -> Cell:
    return next(c for c in profile.cells if (c.kind, c.tp, c.micro_batch) == (kind, tp, micro_batch))


def test_formats_are_named() -> None:
    """Each format name leads to an importer of profiles, of a cluster, or of both."""
    assert sorted(FORMATS) == [
        "aceso", "dnn-partitioning", "galvatron", "megatron", "metis", "pipedream", "piper", "sailor"
    ]  # fmt: skip
    assert sorted(set(NETWORKS) - set(FORMATS)) == ["nnscaler", "vtrain"]
    assert sorted(set(FORMATS) - set(NETWORKS)) == ["megatron", "pipedream"]


def test_options_are_listed_with_what_they_mean() -> None:
    """The options of an importer carry type, default, choices and description."""
    taken = {option.name: option for option in options("metis")}
    assert taken["backward_factor"].type is float
    assert taken["backward_factor"].default == 2.0
    assert "only their sum" in taken["backward_factor"].help
    for name in FORMATS:
        assert all(option.help and option.type in (int, float, str) for option in options(name))
    for name in NETWORKS:
        assert all(option.help for option in options(name, of_network=True))
    links = {option.name: option for option in options("aceso", of_network=True)}
    assert links["link"].choices == ("p2p", "all_reduce")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda path: load("piiper", path), "format 'piiper' is not among those: aceso"),
        (lambda path: network("megatron", path), "is not among those with network measurements: aceso"),
        (lambda path: load("metis", path, device="A100"), "device: format metis takes no such option, but backward_f"),
        (lambda path: load("metis", path, backward_factor="two"), "backward_factor: 'two' is not a number"),
        (lambda path: load("pipedream", path, micro_batch="1.5"), "micro_batch: '1.5' is not a whole number"),
        (lambda path: load("piper", path, unit="min"), "unit: 'min' is not one of: s, ms, us"),
        (lambda path: network("sailor", path, devices="Fast"), "devices: 'Fast' is not TYPE=COUNT"),
    ],
)
def test_wrong_options_are_one_clear_error(tmp_path: Path, call: Callable[[Path], object], says: str) -> None:
    """An unknown format, or an option that it does not take or that has another type, is named with what there is."""
    with pytest.raises(ValueError) as error:
        call(tmp_path)
    assert says in str(error.value)


def test_options_may_be_text(tmp_path: Path) -> None:
    """Options given as text, as on a command line, mean the same as values."""
    write(tmp_path, METIS)
    assert load("metis", tmp_path, backward_factor="1.5") == metis.profiles(tmp_path, backward_factor=1.5)
    write(tmp_path, SAILOR)
    assert network("sailor", tmp_path, devices="Fast=6, Slow=3") == sailor.cluster(tmp_path, {"Fast": 6, "Slow": 3})


def test_sailor_profile(tmp_path: Path) -> None:
    """A Sailor directory becomes one profile in seconds and bytes, with equal layers under one kind."""
    (profile,) = sailor.profiles(write(tmp_path, SAILOR))
    assert profile.name == "Tiny"
    assert profile.layers == ("embedding", "block", "block", "head")
    assert profile.kinds == (
        LayerKind(name="embedding", parameters=112, shard_parameters=((2, 60),), output_bytes=128),
        LayerKind(name="block", parameters=200, shard_parameters=((2, 101),), output_bytes=128),
        # the last layer hands nothing over; 161 floats are 644 bytes, a multiple of both degrees
        LayerKind(name="head", parameters=82, shard_parameters=((2, 42),), output_bytes=0, logits_bytes=644),
    )
    assert (profile.num_heads, profile.num_kv_heads) == (2, None)
    assert profile.conditions.sequence_length == 8
    assert profile.conditions.dtype == "fp32"
    assert profile.conditions.tp_communication == "inside"
    assert profile.conditions.update_per == "stage"
    assert "profiles_tmp.json (sha256 " in profile.conditions.source
    assert profile.warnings == ()
    # 280 floats x 4 bytes x 2 samples
    assert the_cell(profile, "block", 1, 2) == Cell(
        kind="block", device_type="Fast", tp=1, micro_batch=2, forward_s=0.02, backward_s=0.05, update_s=0.007,
        activation_bytes=2240,
    )  # fmt: skip
    assert len(profile.cells) == 9
    assert profile.holes() == ("Fast, tp 2, micro-batch 2: every kind",)


def test_sailor_head_memory_adds_up(tmp_path: Path) -> None:
    """Activations plus this rank's logits are the measured memory of the head, at every tp degree and size."""
    (profile,) = sailor.profiles(write(tmp_path, SAILOR))
    logits = profile.kind_of(3).logits_bytes
    for tp, micro_batch, floats in ((1, 1, 400), (1, 2, 800), (2, 1, 250)):
        kept = the_cell(profile, "head", tp, micro_batch).activation_bytes
        assert kept + micro_batch * logits // tp == 4 * floats


def test_head_without_vocabulary_has_no_logits(tmp_path: Path) -> None:
    """A head that hands on a hidden state plus the loss has no logits; all its memory stays with the activations."""
    files = edited(SAILOR, "llm_info.json", lambda j: j["Tiny"]["1"]["3"].update(act_output_floats=33))
    (profile,) = sailor.profiles(write(tmp_path, files))
    assert profile.kind_of(3).logits_bytes == 0
    assert the_cell(profile, "head", 1, 1).activation_bytes == 1600
    assert any("logits" in note for note in profile.conditions.notes)
    assert vocabulary_bytes(1003, 100, (1, 2, 4)) == 1000
    assert vocabulary_bytes(501, 100, (2, 4), tp=2) == 1000


def test_sailor_layers_that_differ_are_kinds_of_their_own(tmp_path: Path) -> None:
    """One different figure in one cell sets a layer apart; the kind says where."""

    def slower(j: dict[str, Any]) -> None:
        j["Tiny"]["Fast"]["1"]["2"]["1"][1] = 0.021

    (profile,) = sailor.profiles(write(tmp_path, edited(SAILOR, "profiles_tmp.json", slower)))
    assert profile.layers == ("embedding", "block", "block-2", "head")
    assert the_cell(profile, "block", 2, 1).backward_s == 0.021


def test_sailor_gaps_are_told(tmp_path: Path) -> None:
    """Times without sizes are left out, and an update of zero, an unknown model and copied fits are said."""

    def change(j: dict[str, Any]) -> None:
        j["Tiny"]["Fast"]["1"]["4"] = j["Tiny"]["Fast"]["1"]["2"]
        for by_batch in j["Tiny"]["Fast"].values():
            for by_layer in by_batch.values():
                for row in by_layer.values():
                    row[2] = 0.0

    files = edited(SAILOR, "profiles_tmp.json", change)
    files["configs/training_config_tiny.json"]["model"] = "Other"
    (profile,) = sailor.profiles(write(tmp_path, files))
    assert profile.warnings == (
        "Fast: no memory figures for tp 4, times left out",
        "Fast: update_s is 0 everywhere, the update was not measured",
    )
    assert profile.degrees("Fast") == (1, 2)
    assert (profile.num_heads, profile.conditions.sequence_length) == (None, None)


def damaged(*keys: str, value: object) -> Edit:
    def edit(j: dict[str, Any]) -> None:
        for key in keys[:-1]:
            j = j[int(key) if isinstance(j, list) else key]
        j[keys[-1] if isinstance(j, dict) else int(keys[-1])] = value

    return edit


ROW = ("Tiny", "Fast", "2", "1", "0")


@pytest.mark.parametrize(
    ("file", "edit", "says"),
    [
        ("profiles_tmp.json", damaged(*ROW, value=[0.1, 0.2]), "Tiny > Fast > 2 > 1 > 0: 2 values, expected 3"),
        ("profiles_tmp.json", damaged(*ROW, "1", value=-0.1), "> 0 > 1: -0.1 is not a finite number >= 0"),
        ("profiles_tmp.json", damaged(*ROW, "0", value="fast"), "> 0 > 0: 'fast' is not a number"),
        ("profiles_tmp.json", damaged(*ROW, "0", value=True), "> 0 > 0: True is not a number"),
        ("profiles_tmp.json", damaged(*ROW, "0", value=float("nan")), "> 0 > 0: nan is not a finite number"),
        ("profiles_tmp.json", damaged("Tiny", "Fast", "large", value={}), "key 'large' is not a whole number"),
        ("profiles_tmp.json", damaged("Tiny", "Fast", value=[]), "Tiny > Fast: [] is not an object"),
        ("profiles_tmp.json", lambda j: j["Tiny"]["Fast"]["2"]["1"].pop("2"), "Fast > 2 > 1: layer 2 is missing"),
        ("profiles_tmp.json", lambda j: j["Tiny"]["Fast"]["2"]["1"].pop("3"), "Tiny > Fast > 2 > 1: 3 layers, but 4"),
        ("llm_info.json", lambda j: j.pop("Tiny"), "llm_info.json: key 'Tiny' is missing"),
        ("llm_info.json", lambda j: j["Tiny"].pop("1"), "llm_info.json: Tiny: key '1' (sizes without tp) is missing"),
        ("llm_info.json", lambda j: j["Tiny"]["2"].pop("3"), "Tiny > 2: 3 layers, but 4 at tp 1"),
        ("llm_info.json", damaged("Tiny", "1", "2", "params_floats", value=1.5), "1.5 is not a whole number"),
        ("llm_info.json", lambda j: j["Tiny"]["1"]["2"].pop("act_mem_floats"), "> 2: key 'act_mem_floats' is missing"),
        ("configs/training_config_tiny.json", damaged("num_all_layers", value=5), "num_all_layers: 5, but 4 layers in"),
    ],
)
def test_damaged_sailor_file_is_one_clear_error(tmp_path: Path, file: str, edit: Edit, says: str) -> None:
    """A damaged file is a ValueError that names the file, the keys and the value."""
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        sailor.profiles(write(tmp_path, edited(SAILOR, file, edit)))
    assert file in str(error.value)


def test_missing_sailor_files(tmp_path: Path) -> None:
    """A directory without the files is refused by the name of the file; so is a file that is no JSON."""
    with pytest.raises(ValueError, match=r"profiles_tmp\.json: no such file"):
        sailor.profiles(tmp_path)
    with pytest.raises(ValueError, match=r"llm_info\.json: line 1 column 6"):
        sailor.profiles(write(tmp_path, SAILOR | {"llm_info.json": '{"a" 1}'}))


def test_sailor_cluster(tmp_path: Path) -> None:
    """Nodes come in the configured size, links by number of devices at each end, the slower direction counts."""
    cluster = sailor.cluster(write(tmp_path, SAILOR), {"Fast": 6, "Slow": (3,)})
    assert [(node.name, node.devices) for node in cluster.nodes] == [
        ("fast-0", ("Fast",) * 4),
        ("fast-1", ("Fast",) * 2),
        ("slow-0", ("Slow",) * 3),
    ]
    assert [each.memory_bytes for each in cluster.device_types] == [16_000_000_000, 8_000_000_000]
    fast, pair, slow = cluster.nodes
    assert fast.groups == ((0, 1), (2, 3))  # 50 GB/s for two, 6 for four
    assert fast.group_link and fast.group_link.cap_bytes_per_s == 50e9
    assert fast.link and fast.link.cap_bytes_per_s == 6e9
    assert pair.groups == ()
    assert pair.link and pair.link.cap_bytes_per_s == 50e9
    assert slow.groups == ()
    assert slow.link and slow.link.fit == (0.0, 0.1, 10.0)  # two devices, not all four, are the slower here
    caps = [(each.between, each.devices, each.link.cap_bytes_per_s) for each in cluster.links]
    assert caps == [
        (("Fast", "Fast"), 1, 2e9),
        (("Fast", "Fast"), 2, 3e9),
        (("Fast", "Fast"), 4, 4e9),
        (("Fast", "Slow"), 1, 1.2e9),  # 1.5 the other way
        (("Fast", "Slow"), 2, 1.9e9),  # measured one way only
    ]
    # 1.2 GB/s: 12 MB take 10 ms
    assert cluster.link(cluster.device("fast-0:0"), cluster.device("slow-0:0")).seconds(12e6) == pytest.approx(0.01)


def test_sailor_cluster_of_a_type_that_the_zone_lacks(tmp_path: Path) -> None:
    """A type without fits in the zone has those of nodes of its own type; another type's nodes it does not reach."""

    def lose(j: dict[str, Any]) -> None:
        del j["here"]["Lone"]

    files = edited(SAILOR, "network/multizone_bandwidths_het.json", lose)
    alone = {"1": [[0.0, 0.0, 3.0], 3e9], "2": [[0.0, 0.0, 4.0], 4e9], "8": [[0.0, 0.0, 9.0], 9e9]}
    files["network/network_coeffs_all_homo.json"] = {"inter": {"Lone": alone}}
    cluster = sailor.cluster(write(tmp_path, files), {"Lone": (2, 2)})
    assert [(each.devices, each.link.cap_bytes_per_s) for each in cluster.links] == [(1, 3e9), (2, 4e9)]
    with pytest.raises(ValueError, match="here: key 'Lone' is missing; there are Fast, Slow"):
        sailor.cluster(tmp_path, {"Fast": 4, "Lone": 2})


def test_sailor_cluster_on_the_network_alone(tmp_path: Path) -> None:
    """With intra="network" two devices of one node see the fit between nodes, and there are no pairs."""
    cluster = sailor.cluster(write(tmp_path, SAILOR), {"Fast": 4}, intra="network", name="flat")
    assert cluster.name == "flat"
    (node,) = cluster.nodes
    assert node.groups == ()
    assert node.link is None
    assert cluster.link(*cluster.devices[:2], devices=4).cap_bytes_per_s == 4e9


def test_sailor_cluster_notes_doubtful_fits(tmp_path: Path) -> None:
    """Equal tables of two types, and fits that contradict each other tenfold, are noted on the cluster."""

    def change(j: dict[str, Any]) -> None:
        j["here"]["Slow"]["2"] = {"here": {"Slow": {"2": [[0.0, 0.0, 20.0], 20e9]}}}

    files = edited(SAILOR, "network/multizone_bandwidths_het.json", change)
    files["network/intra_node_bandwidths.json"]["Lone"] = files["network/intra_node_bandwidths.json"]["Slow"]
    notes = sailor.cluster(write(tmp_path, files), {"Slow": 8}).notes
    assert any("Slow and of Lone are equal to the last digit" in note for note in notes)
    assert any("Slow - Slow" in note and "1: 1.00, 2: 20.00" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"devices": {"Quick": 4}}, "basic_cluster_config.json: key 'Quick' is missing"),
        ({"devices": {"Fast": 4, "Lone": 4}}, "no fit between Fast and Lone"),
        ({"devices": {"Fast": 4}, "zone": "there"}, "multizone_bandwidths_het.json: key 'there' is missing"),
        ({"devices": {"Fast": 0}}, "devices['Fast']: 0 is not"),
        ({"devices": {"Fast": (5,)}}, "devices['Fast']: (5,) is not a count, or node sizes of 1 to 4"),
        ({"devices": {"Fast": 4}, "intra": "none"}, "intra: 'none' is not one of: measured, network"),
    ],
)
def test_sailor_cluster_errors(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    """A type, pair, zone or count that the files do not hold is named."""
    with pytest.raises(ValueError) as error:
        sailor.cluster(write(tmp_path, SAILOR), **arguments)
    assert says in str(error.value)


# Metis --------------------------------------------------------------------------------------------------------------
# Three layers of 1000, 2000 and 500 parameters (4 bytes each); memory = 5 x parameter bytes + activations.


def metis_file(micro_batch: int, *, ms: list[float], activations: list[int], shares: list[int]) -> dict[str, Any]:
    return {
        "model": {
            "model_name": "Tiny",
            "num_layers": 3,
            "parameters": {
                "parameters_per_layer_bytes": [4 * share for share in shares],
                "activation_parameters_bytes": [128 * micro_batch, 128 * micro_batch, 132 * micro_batch],
            },
        },
        "execution_time": {"optimizer_time_ms": 6.0, "layer_compute_total_ms": ms},
        "execution_memory": {
            "layer_memory_total_mb": [(a + 20 * share) / 2**20 for a, share in zip(activations, shares)]
        },
    }


METIS: dict[str, Any] = {
    "V100/mbs1_tmp1.json": metis_file(1, ms=[0.3, 9.0, 0.6], activations=[128, 900, 400], shares=[1000, 2000, 500]),
    "V100/mbs2_tmp1.json": metis_file(2, ms=[0.3, 15.0, 1.2], activations=[256, 1800, 800], shares=[1000, 2000, 500]),
    "V100/mbs1_tmp2.json": metis_file(1, ms=[0.3, 6.0, 0.6], activations=[128, 500, 100], shares=[520, 1001, 500]),
}


def test_metis_profile(tmp_path: Path) -> None:
    """A Metis directory becomes a profile: ms to s once, sums split by a stated factor, memory without model state."""
    (profile,) = metis.profiles(write(tmp_path, METIS))
    assert profile.name == "Tiny"
    assert profile.layers == ("embedding", "block", "head")
    assert profile.kinds == (
        LayerKind(name="embedding", parameters=1000, shard_parameters=((2, 520),), output_bytes=128),
        LayerKind(name="block", parameters=2000, shard_parameters=((2, 1001),), output_bytes=128),
        LayerKind(name="head", parameters=500, shard_parameters=((2, 500),), output_bytes=0),
    )
    block = the_cell(profile, "block", 1, 1)  # 9 ms = 3 forward + 6 backward; 6 ms of update over 3 layers
    assert block.forward_s == pytest.approx(0.003)
    assert block.backward_s == pytest.approx(0.006)
    assert block.update_s == pytest.approx(0.002)
    assert block.activation_bytes == 900
    assert profile.conditions.tp_communication == "inside"
    assert profile.conditions.update_per == "stage"
    assert "backward taken as 2 x forward" in profile.warnings[0]
    assert any("5 x its parameter bytes" in note for note in profile.conditions.notes)
    # at tp 2 the head's memory (100) is below its output (132)
    assert the_cell(profile, "head", 2, 1).activation_bytes == 132
    assert "V100 tp 2 micro-batch 1" in profile.warnings[1]


def test_metis_factors(tmp_path: Path) -> None:
    """The backward factor changes the split, never the sum; the state factor moves memory to the activations."""
    (profile,) = metis.profiles(write(tmp_path, METIS), backward_factor=1.5, state_factor=4.0)
    block = the_cell(profile, "block", 1, 1)
    assert block.backward_s == pytest.approx(1.5 * block.forward_s)
    assert block.forward_s + block.backward_s == pytest.approx(0.009)
    assert block.activation_bytes == 900 + 4 * 2000
    assert "1.5 x forward" in profile.warnings[0]


def test_metis_without_tp_1(tmp_path: Path) -> None:
    """Where tp 1 was not measured, whole layers are taken from the shares, and the profile says so."""
    (profile,) = metis.profiles(write(tmp_path, {"V100/mbs1_tmp2.json": METIS["V100/mbs1_tmp2.json"]}))
    assert [kind.parameters for kind in profile.kinds] == [1040, 2002, 1000]
    assert any("tp 1 was not measured" in warning for warning in profile.warnings)


def test_metis_without_the_time_of_the_head(tmp_path: Path) -> None:
    """A head that was not timed is refused, or taken as so many blocks, which the profile says."""
    files = copy.deepcopy({"V100/mbs1_tmp1.json": METIS["V100/mbs1_tmp1.json"]})
    files["V100/mbs1_tmp1.json"]["model"]["num_layers"] = 2
    files["V100/mbs1_tmp1.json"]["execution_time"]["layer_compute_total_ms"] = [0.3, 9.0]
    write(tmp_path, files)
    with pytest.raises(ValueError, match="parameters_per_layer_bytes: 3 values, expected 2"):
        metis.profiles(tmp_path)
    (profile,) = metis.profiles(tmp_path, head_blocks=0.5)  # 4.5 ms = 1.5 + 3
    assert the_cell(profile, "head", 1, 1).backward_s == pytest.approx(0.003)
    assert "the head was not timed: taken as 0.5 x the second layer" in profile.warnings


CLUSTER = {
    "clusterfile.json": {
        "10.0.0.1": {"instance_type": "V100", "inter_bandwidth": 10, "intra_bandwidth": 50, "memory": 16},
        "10.0.0.2": {"instance_type": "T4", "inter_bandwidth": 1.25e9, "intra_bandwidth": 4e9, "memory": 15},
    },
    "hostfile": "10.0.0.1 slots=4\n10.0.0.2 slots=2\n10.0.0.1 slots=4\n",
}


def test_metis_cluster(tmp_path: Path) -> None:
    """A Metis cluster has a node per line, GB/s or bytes/s by size, and between nodes the slower of the two."""
    cluster = metis.cluster(write(tmp_path, CLUSTER))
    assert [(node.name, node.devices) for node in cluster.nodes] == [
        ("10.0.0.1-0", ("V100",) * 4), ("10.0.0.2-1", ("T4",) * 2), ("10.0.0.1-2", ("V100",) * 4)
    ]  # fmt: skip
    assert [node.link.bytes_per_s for node in cluster.nodes if node.link] == [50e9, 4e9, 50e9]
    assert {each.between: each.link.bytes_per_s for each in cluster.links} == {
        ("V100", "V100"): 10e9, ("V100", "T4"): 1.25e9, ("T4", "T4"): 1.25e9
    }  # fmt: skip
    assert cluster.device_type("T4").memory_bytes == 15 * 2**30


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("hostfile", "10.0.0.1 slots=4\n10.0.0.3 slots=2\n", "hostfile: line 2: '10.0.0.3' is not in"),
        ("hostfile", "10.0.0.1 4\n", "hostfile: line 1: '10.0.0.1 4' is not a host and its slots"),
        ("clusterfile.json", '{"10.0.0.1": {', "clusterfile.json: line 1 column 15"),
        (
            "clusterfile.json",
            {
                **CLUSTER["clusterfile.json"],
                "10.0.0.1": {"instance_type": "V100", "inter_bandwidth": 1e-6, "memory": 1},
            },
            "10.0.0.1 > inter_bandwidth: 1e-06 is not a bandwidth",
        ),
    ],
)
def test_damaged_metis_cluster_is_one_clear_error(tmp_path: Path, file: str, content: object, says: str) -> None:
    """A host without a machine, a bad line, a truncated file or a bandwidth of another unit is named with its place."""
    with pytest.raises(ValueError) as error:
        metis.cluster(write(tmp_path, {**CLUSTER, file: content}))
    assert says in str(error.value)


def test_times_of_another_unit_are_refused(tmp_path: Path) -> None:
    """Milliseconds that are taken for seconds make a layer of hours; nanoseconds one of nothing."""

    def slow(j: dict[str, Any]) -> None:
        for by_layer in (j["Tiny"]["Fast"]["2"]["1"], j["Tiny"]["Fast"]["1"]["1"], j["Tiny"]["Fast"]["1"]["2"]):
            for row in by_layer.values():
                row[:2] = [row[0] * 1e5, row[1] * 1e5]

    says = r"Tiny > Fast > 1 > 1: the longest layer on 'Fast' at tp 1, micro-batch 1 takes 5.5e\+03 s.*another unit"
    with pytest.raises(ValueError, match=r"profiles_tmp\.json: " + says):
        sailor.profiles(write(tmp_path, edited(SAILOR, "profiles_tmp.json", slow)))


def test_the_one_file_in_another_unit_is_named(tmp_path: Path) -> None:
    """Of the files of a model, one with nanoseconds in place of milliseconds is the one to look at."""

    def slow(j: dict[str, Any]) -> None:
        times = j["execution_time"]
        times["layer_compute_total_ms"] = [1e6 * ms for ms in times["layer_compute_total_ms"]]

    file = sorted(METIS)[-1]
    with pytest.raises(ValueError, match=re.escape(f"{file}: the longest layer on 'V100' at tp 1, micro-batch 2")):
        metis.profiles(write(tmp_path, edited(METIS, file, slow)))


def test_metis_own_layout(tmp_path: Path) -> None:
    """Metis' own file names are read too: parameter bytes are then whole layers, the output an argument."""
    files = {}
    for name in ("DeviceType.A100_tp1_bs2.json", "DeviceType.A100_tp2_bs2.json"):
        content = metis_file(2, ms=[0.3, 9.0, 0.6], activations=[256, 900, 400], shares=[1000, 2000, 500])
        del content["model"]["parameters"]["activation_parameters_bytes"]
        files[name] = content
    write(tmp_path, files)
    with pytest.raises(ValueError, match="'activation_parameters_bytes' is missing; give output_bytes"):
        metis.profiles(tmp_path)
    (profile,) = metis.profiles(tmp_path, output_bytes=100)
    assert profile.kinds[1] == LayerKind(name="block", parameters=2000, output_bytes=100)
    assert profile.conditions.update_per == "layer"
    # tp 2 holds half of the 8000 parameter bytes: 900 + 5 x 8000 - 5 x 4000
    assert the_cell(profile, "block", 2, 2).activation_bytes == 20_900
    assert profile.device_types == ("A100",)


TIMES = ("execution_time", "layer_compute_total_ms")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (damaged(*TIMES, value=[1.0, 2.0]), "execution_time > layer_compute_total_ms: 2 values, expected 3"),
        (damaged(*TIMES, "1", value=-1), "layer_compute_total_ms > 1: -1 is not a finite number >= 0"),
        (damaged(*TIMES, "0", value=None), "layer_compute_total_ms > 0: None is not a number"),
        (damaged("execution_memory", value={}), "execution_memory: key 'layer_memory_total_mb' is missing"),
        (damaged("model", "num_layers", value=0), "model > num_layers: 0 is not a finite number >= 1"),
        (damaged("model", "model_name", value="Other"), "model_name is 'Other', but 'Tiny' in"),
        (
            damaged("model", "parameters", "parameters_per_layer_bytes", value=[4000, 8000, 2004]),
            "parameters_per_layer_bytes is (4000, 8000, 2004), but (4000, 8000, 2000) in",
        ),
    ],
)
def test_damaged_metis_file_is_one_clear_error(tmp_path: Path, edit: Edit, says: str) -> None:
    """A damaged file is a ValueError that names the file, the keys and the value."""
    with pytest.raises(ValueError, match=r"V100/mbs2_tmp1\.json") as error:
        metis.profiles(write(tmp_path, edited(METIS, "V100/mbs2_tmp1.json", edit)))
    assert says in str(error.value)


def test_metis_directory_and_arguments_are_checked(tmp_path: Path) -> None:
    """No file, two files of one case, or a factor that is no positive number are refused."""
    with pytest.raises(ValueError, match="holds neither GPU/mbsX_tmpY"):
        metis.profiles(tmp_path)
    write(tmp_path, METIS)
    for argument in ("backward_factor", "bytes_per_parameter"):
        with pytest.raises(ValueError, match=f"{argument}: 0 is not a finite number above 0"):
            metis.profiles(tmp_path, **{argument: 0})
    write(tmp_path, {"DeviceType.V100_tp1_bs1.json": METIS["V100/mbs1_tmp1.json"]})
    with pytest.raises(ValueError, match="V100 tp 1 micro-batch 1 is already in"):
        metis.profiles(tmp_path)


# Published files ----------------------------------------------------------------------------------------------------


@functools.cache
def published() -> dict[str, ModelProfile]:
    return {each.name: each for each in sailor.profiles(DATA)}


@needs_data
@pytest.mark.parametrize("model", ["OPT-350", "GPT-Neo-2.7"])
def test_both_formats_of_one_measurement_agree(model: str) -> None:
    """Sailor's measurements and its own rewriting of them in Metis' format give the same figures, up to the split."""
    (rewritten,) = metis.profiles(DATA / "metis_format" / "profiles" / model)
    original = published()[model]
    assert (rewritten.layers, rewritten.kinds) == (original.layers, original.kinds)
    cells = {(c.kind, c.device_type, c.tp, c.micro_batch): c for c in original.cells}
    for cell in rewritten.cells:
        same = cells[cell.kind, cell.device_type, cell.tp, cell.micro_batch]
        assert cell.forward_s + cell.backward_s == pytest.approx(same.forward_s + same.backward_s, abs=1e-12)
        assert cell.update_s == pytest.approx(same.update_s, abs=1e-12)
        assert cell.activation_bytes == same.activation_bytes


@needs_data
def test_metis_files_without_a_head_are_refused() -> None:
    """The published Metis files of Llama-3-8B list 34 times but 35 layers; they need to be told what the head takes."""
    with pytest.raises(ValueError, match="35 values, expected 34"):
        metis.profiles(DATA / "metis_format" / "profiles" / "LLAMA-3-8")
    (profile,) = metis.profiles(DATA / "metis_format" / "profiles" / "LLAMA-3-8", head_blocks=0.37)
    assert profile.num_layers == 35
    assert profile.parameters == published()["LLAMA-3-8"].parameters


@needs_data
def test_every_published_device_type_makes_a_cluster() -> None:
    """Nodes of all seven measured device types can be linked, also of the one that the zone's fits leave out."""
    for name in ("A100-40", "A100-80", "V100-16", "GH-96", "RTX-2080", "RTX-3090", "Titan-RTX"):
        cluster = sailor.cluster(DATA, {name: (4, 4)})
        assert cluster.num_devices(name) == 8
        assert cluster.links


@needs_data
def test_all_published_models_import() -> None:
    """All four published models import; those measured without sizes lose the tp degrees concerned, and say so."""
    profiles = published()
    assert {name: each.num_layers for name, each in profiles.items()} == {
        "OPT-350": 26, "GPT-Neo-2.7": 34, "LLAMA-3-8": 35, "OPT-30": 50
    }  # fmt: skip
    assert profiles["OPT-30"].degrees("V100-16") == (4,)
    assert len(profiles["OPT-30"].warnings) == 2
