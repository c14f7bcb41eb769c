"""The importers on what others published, where it is present: known sizes of models, and a plan for each format."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest

from planner import Infeasible, plan
from planner.cluster import Cluster, DeviceType, Link, NetworkLink, Node
from planner.importers import load, network
from planner.job import Job
from planner.profile import ModelProfile

DATA = Path(os.environ.get("HPP_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def needs(folder: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (DATA / folder).is_dir(), reason=f"no measurements in {DATA / folder} (set HPP_DATA)")


ACESO = DATA / "aceso" / "profiled-time-eurosys"
GALVATRON = DATA / "galvatron"
GRAPHS = DATA / "pipedream"
WORKLOADS = DATA / "dnn_partitioning" / "throughput-inputs"


def small(profile: ModelProfile) -> Cluster:
    """Two nodes of two devices of the first two types."""
    types = profile.device_types[:2]
    inside, between = Link(alpha_s=1e-5, bytes_per_s=40e9), Link(alpha_s=3e-5, bytes_per_s=10e9)
    return Cluster(
        name="small",
        device_types=tuple(DeviceType(name=name, memory_bytes=32 * 2**30) for name in types),
        nodes=tuple(Node(name=f"n{i}", devices=(types[i % len(types)],) * 2, link=inside) for i in range(2)),
        links=(NetworkLink(between=("*", "*"), link=between),),
    )


def planned(profile: ModelProfile) -> None:
    """The profile gives a checked plan with the profile's warnings on it, or a named infeasibility."""
    assert ModelProfile.from_dict(profile.to_dict()) == profile
    cluster, job = small(profile), Job(global_batch=8)
    try:
        made = plan(profile, cluster, job, effort=0.1, time_limit=10)
    except Infeasible as error:
        assert "stage" in str(error)
        return
    made.check(profile, cluster, job)
    for warning in profile.warnings:
        assert any(warning in each for each in made.warnings)


@needs("aceso")
def test_aceso_models_have_their_published_size() -> None:
    """The sums over operators give the parameters that the models are named after."""
    profiles = {each.name: each for each in load("aceso", ACESO, device="V100-32")}
    sizes = {name: round(each.parameters / 1e9, 2) for name, each in profiles.items()}
    assert sizes == {
        "gpt_350M": 0.36, "gpt_1_3B": 1.32, "gpt_2_6B": 2.65, "gpt_6_7B": 6.66, "gpt_13B": 12.86,
        "t5_770M": 0.8, "t5_3B": 2.92, "t5_6B": 5.74,
    }  # fmt: skip
    assert all(each.degrees("V100-32") == (1, 2, 4, 8) and not each.holes() for each in profiles.values())
    planned(profiles["gpt_350M"])


@needs("aceso")
def test_aceso_times_hold_the_all_reduce() -> None:
    """What the four operators with an all-reduce take beyond half of tp 1 is the all-reduce measured apart.

    gpt_6_7B, 4 samples, tp 2: 64 MB are all-reduced twice forward and twice backward, 1.787 ms each in the table.
    """
    rows = {
        tp: {row["op_name"]: row for row in csv.DictReader((ACESO / f"gpt_6_7B_mbs4_tp{tp}_algo0.csv").open())}
        for tp in (1, 2)
    }
    extra_us = 0.0
    for operator, column in (
        ("enc-attention-dense", "forward-compute"),
        ("enc-MLP-GEMM-2", "forward-compute"),
        ("enc-attention-qkv", "backward-compute"),
        ("enc-MLP-GEMM-1", "backward-compute"),
    ):
        extra_us += float(rows[2][operator][column]) - float(rows[1][operator][column]) / 2
    assert extra_us == pytest.approx(4 * 1787, rel=0.06)


@needs("sailor")
def test_aceso_layer_times_import() -> None:
    """Sailor's tables in Aceso's form import, with the sizes they lack by argument."""
    folder = DATA / "sailor" / "aceso_format" / "layer_time"
    sizes: dict[str, Any] = {"parameters": 12_596_224, "output_bytes": 8_388_608, "activation_bytes": 500_000_000}
    for algo in (0, 1):
        (profile,) = load("aceso", folder, num_layers=24, algo=algo, **sizes)
        assert len(profile.device_types) == 6


@needs("galvatron")
def test_galvatron_models_have_their_published_size() -> None:
    """Differences of model states give the parameters of Llama-7B and its like to 1 %; one file lacks a layer count."""
    given: dict[str, Any] = {"device": "A100-40", "backward_factor": 2}
    sizes = {}
    for folder, name, more in (
        ("models/gpt", "bf16_llama2-7b_all", {"hidden_size": 4096}),
        ("older/models/llama", "bf16_hidden4096_head32_seqlen2048", {}),
        ("older/models/baichuan", "bf16_hidden4096_head32_seqlen2048", {}),
        ("older/models/gpt", "bf16_hidden1600_head32_seqlen1024", {"num_layers": 48}),
        ("older/models/gpt", "bf16_hidden2560_head32_seqlen2048", {"num_layers": 32}),
        ("older/models/gpt", "bf16_hidden4096_head32_seqlen2048", {"num_layers": 32}),
    ):
        file = GALVATRON / folder / "configs" / f"computation_profiling_{name}.json"
        (profile,) = load("galvatron", file, **given, **more)
        sizes[f"{folder}/{name[5:]}"] = round(profile.parameters / 1e9, 2)
    planned(profile)
    assert list(sizes.values()) == [6.78, 6.78, 7.03, 1.67, 2.81, 6.89]
    single = GALVATRON / "models/gpt/configs/computation_profiling_bf16_llama2-7b_seqlen2048_all.json"
    given |= {"hidden_size": 4096, "other_ms": 6.3}
    with pytest.raises(ValueError, match=r"1_1_8_sp: layernum\[1\] alone, expected two layer counts"):
        load("galvatron", single, **given)
    (profile,) = load("galvatron", single, **given, layer_parameters=202_383_360)
    assert profile.parameters == pytest.approx(6.74e9, rel=0.03)
    planned(profile)


@needs("pipedream")
def test_pipedream_models_have_their_published_size() -> None:
    """The graphs give the parameters of the models: AlexNet 61.1, VGG-16 138.4, ResNet-50 25.6, ResNeXt-50 25.0 M."""
    sizes = {}
    for file in sorted(GRAPHS.glob("*/profiles/*/graph.txt")):
        (profile,) = load("pipedream", file, device="V100-16")
        sizes[profile.name] = round(profile.parameters / 1e6, 1)
        if profile.name in ("gnmt", "vgg16"):
            planned(profile)
    assert sizes == {
        "alexnet": 61.1, "gnmt": 193.8, "gnmt_large": 277.7, "resnet50": 25.6, "resnext50": 25.0, "vgg16": 138.4
    }  # fmt: skip


@needs("piper")
def test_piper_workloads_import() -> None:
    """BERT-32 is 12 x 1920^2 parameters per layer, in seconds; the older two are in milliseconds and say so."""
    (bert,) = load("piper", DATA / "piper" / "inputs" / "bert32a100.json", device="A100-80")
    assert bert.degrees("A100-80") == (1, 2, 4, 8)
    assert bert.num_layers == 35  # input, embedding, 32 layers, pooler
    assert bert.kind_of(5).parameters == pytest.approx(12 * 1920**2, rel=1e-3)
    planned(bert)
    for name, nodes in (("gnmt", 78), ("resnet", 177)):
        file = DATA / "piper" / "inputs" / f"{name}.json"
        with pytest.raises(ValueError, match="looks like another unit"):
            load("piper", file, device="V100-16")
        (profile,) = load("piper", file, device="V100-16", unit="ms")
        assert sum(map(len, profile.members)) == nodes


@needs("dnn_partitioning")
@needs("pipedream")
def test_three_formats_of_one_measurement_agree() -> None:
    """GNMT and ResNet-50 are in PipeDream's, Piper's and dnn-partitioning's format: equal parameters and times.

    The other two have kept the loading of data, which ResNet-50's Input node was measured to take: 18.962 ms.
    """

    def sums(profile: ModelProfile, device: str) -> tuple[float, float, int]:
        cells = {c.kind: c for c in profile.cells if c.device_type == device}
        return (
            sum(cells[kind].forward_s for kind in profile.layers),
            sum(cells[kind].backward_s for kind in profile.layers),
            profile.parameters,
        )

    for text, workload, dag, loading_s in (
        ("translation/profiles/gnmt_large", "gnmt", "gnmt", 0.0),
        ("image_classification/profiles/resnet50", "resnet50", "resnet", 0.018962),
    ):
        (first,) = load("pipedream", GRAPHS / text, device="V")
        (second,) = load("dnn-partitioning", WORKLOADS / "LayerGraphs" / f"{workload}_training.json")
        (third,) = load("piper", DATA / "piper" / "inputs" / f"{dag}.json", device="V", unit="ms")
        forward_s, backward_s, parameters = sums(first, "V")
        expected = pytest.approx((forward_s + loading_s, backward_s, parameters), rel=1e-9)
        assert sums(second, "accelerator") == expected
        assert sums(third, "V") == expected


@needs("dnn_partitioning")
def test_workloads_import() -> None:
    """All published workloads become chains that hold every forward node once; a graph of operators gives a plan."""
    for file in sorted(WORKLOADS.glob("*/*.json")):
        given = {} if "training" in file.name else {"backward_factor": 0}
        (profile,) = load("dnn-partitioning", file, **given)
        members = [name for layer in profile.members for name in layer]
        assert len(set(members)) == len(members)
        assert profile.num_layers > 28
        if file.name == "bert_l-3_training.json":
            planned(profile)


@needs("aceso")
@needs("nnscaler_mi200")
@needs("vtrain")
def test_network_tables_import() -> None:
    """Every format with network measurements makes a cluster; bandwidths are what the sources say."""
    given: dict[str, Any] = {"device": "X", "memory_gb": 32}
    bandwidth = {}
    for name, folder in (
        ("aceso", ACESO),
        ("galvatron", GALVATRON / "profile_hardware" / "hardware_configs"),
        ("nnscaler", DATA / "nnscaler_mi200"),
        ("vtrain", DATA / "vtrain" / "trace" / "a100"),
    ):
        cluster = network(name, folder, **given)
        assert Cluster.from_dict(cluster.to_dict()) == cluster
        links = [cluster.nodes[0].link, *(each.link for each in cluster.links)]
        bandwidth[name] = [round(link.bandwidth(32e6) / 1e9, 1) for link in links if link]
    assert bandwidth == {"aceso": [40.6, 5.3], "galvatron": [163.7, 7.7], "nnscaler": [183.7], "vtrain": [219.6]}
    assert network("piper", DATA / "piper" / "inputs" / "gnmt.json", device="X").num_devices("X") == 10
    assert network("dnn-partitioning", WORKLOADS / "LayerGraphs" / "gnmt_training.json").num_devices("accelerator") == 6
