"""Importers of operator tables, differences and reports, and of network tables, on small inputs written here."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cost import ring_all_reduce_s
from planner.importers import aceso, galvatron, load, megatron, nnscaler, vtrain
from planner.importers.links import thinned
from planner.profile import Cell, LayerKind, ModelProfile

MIB = 2**20


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def the_cell(profile: ModelProfile, kind: str, tp: int, micro_batch: int) -> Cell:
    return next(c for c in profile.cells if (c.kind, c.tp, c.micro_batch) == (kind, tp, micro_batch))


# Aceso --------------------------------------------------------------------------------------------------------------
# A layer of four operators: 100 + 40 + 20 + 10 us forward. MB: 8 hidden (4 for one sample), 2 of weights.

HEADER = "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,fwd_reserved,bwd_reserved"
ROWS = [
    "encoder-embedding,50.0,60.0,0.0,8.0,10.0,3.0,1.0,2.0",
    "enc-1st-layernorm,100.0,200.0,8.0,8.0,0.0,1.0,0.0,4.0",
    "enc-attention-softmax,40.0,80.0,8.0,8.0,0.0,16.0,0.0,6.0",
    "enc-attention-dropout,20.0,40.0,8.0,8.0,0.0,24.0,9.0,5.0",
    "enc-post-MLP-dropout,10.0,20.0,8.0,8.0,2.0,4.0,0.0,1.0",
    "final-layernorm,5.0,5.0,8.0,8.0,0.0,1.0,0.0,0.0",
    "gpt-post-process,30.0,70.0,8.0,0.0,8.0,5.0,7.0,0.0",
]


def aceso_file(rows: list[str] = ROWS) -> str:
    return "\n".join([HEADER, *rows]) + "\n"


def halved(row: str) -> str:
    """As at tp 2: half the weights, the embedding with 1 MB that every rank holds."""
    entries = row.split(",")
    entries[5] = str(float(entries[5]) / 2 + (1.0 if "embedding" in row else 0.0))
    return ",".join(entries)


ACESO: dict[str, Any] = {
    "tiny_mbs2_tp1_algo0.csv": aceso_file(),
    "tiny_mbs2_tp2_algo0.csv": aceso_file([halved(row) for row in ROWS]),
    "tiny_mbs2_tp2_algo1.csv": aceso_file(),
    "p2p_intra_node.csv": "1,2,4\n10.0, 20.0, 30.0\n",
    "p2p_inter_node.csv": "1,2,4\n1.0, 2.0, 3.0\n",
    "prim_tiny_all_reduce_2gpus.csv": "data_size(MB),time(ms)\n8,0.5\n4,0.3\n4096,1000000000.000\n",
}


def test_aceso_profile(tmp_path: Path) -> None:
    """Operators add up to layers, microseconds and MB are converted, shared memory of the attention counts once."""
    (profile,) = aceso.profiles(write(tmp_path, ACESO), device="V100", num_layers=3)
    assert profile.name == "tiny"
    assert profile.layers == ("embedding", "block", "block", "block", "head")
    assert profile.kinds == (
        # 10 MB of fp16 are 5 Mi parameters; at tp 2 a rank holds 6 MB
        LayerKind(name="embedding", parameters=5 * MIB, shard_parameters=((2, 3 * MIB),), output_bytes=4 * MIB),
        LayerKind(name="block", parameters=MIB, output_bytes=4 * MIB),
        LayerKind(
            name="head", parameters=4 * MIB, output_bytes=0, tied_to="embedding", tied_parameters=4 * MIB
        ),
    )  # fmt: skip
    block = the_cell(profile, "block", 1, 2)
    assert block.forward_s == pytest.approx(170e-6)
    assert block.backward_s == pytest.approx(340e-6)
    assert block.activation_bytes == (1 + 0 + 36 + 4) * MIB  # softmax 0, dropout 1.5 x 24
    assert block.workspace_bytes == 9 * MIB
    assert the_cell(profile, "head", 1, 2).forward_s == pytest.approx(35e-6)
    assert profile.conditions.tp_communication == "inside"
    assert profile.conditions.dtype == "fp16"
    assert profile.warnings == ("the optimizer's update was not measured: it is taken as 0 s",)


def test_aceso_encoder_and_decoder(tmp_path: Path) -> None:
    """With decoder rows the model is embedding, encoder layers, middle, decoder layers, head."""
    rows = [
        *ROWS[:5],
        "enc-final-layernorm,5.0,5.0,8.0,8.0,0.0,1.0,0.0,0.0",
        "decoder-embedding,1.0,1.0,8.0,10.0,4.0,1.0,0,0",
    ]
    rows += ["dec-1st-layernorm,7.0,9.0,10.0,10.0,1.0,1.0,0,0", "dec-post-MLP-dropout,1.0,1.0,10.0,10.0,0.0,1.0,0,0"]
    rows += ["dec-final-layernorm,5.0,5.0,10.0,10.0,0.0,1.0,0,0", ROWS[-1].replace("gpt", "t5")]
    (profile,) = aceso.profiles(
        write(tmp_path, {"t5_small_mbs1_tp1_algo0.csv": aceso_file(rows)}), device="V100", num_layers=2
    )
    assert profile.layers == ("embedding", "encoder", "encoder", "middle", "decoder", "decoder", "head")
    assert the_cell(profile, "middle", 1, 1).forward_s == pytest.approx(6e-6)
    assert the_cell(profile, "head", 1, 1).forward_s == pytest.approx(35e-6)
    assert [kind.tied_to for kind in profile.kinds] == [None] * 5


def test_aceso_gaps_are_told(tmp_path: Path) -> None:
    """A failed file is left out, the other sharding is on request, both are warnings; the layer count is asked for."""
    failed = [ROWS[0].replace("50.0,60.0", "10000000.000,10000000.000"), *ROWS[1:]]
    write(tmp_path, {**ACESO, "tiny_mbs4_tp1_algo0.csv": aceso_file(failed)})
    (profile,) = aceso.profiles(tmp_path, device="V100", num_layers=3)
    assert profile.micro_batches("V100", 1) == (2,)
    assert "an operator failed in tiny_mbs4_tp1_algo0.csv" in profile.warnings
    (other,) = aceso.profiles(tmp_path, device="V100", num_layers=3, algo=1)
    assert other.degrees("V100") == (2,)
    assert any("gathers between operators are not in the times" in warning for warning in other.warnings)
    with pytest.raises(ValueError, match=r"num_layers: missing; tiny is not among gpt_350M.* num_layers=24"):
        aceso.profiles(tmp_path, device="V100")
    with pytest.raises(ValueError, match="device: missing"):
        aceso.profiles(tmp_path, num_layers=3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (aceso_file()[:200], "line 3: "),
        (aceso_file().replace("weights,", ""), "line 1: column 'weights' is missing; there are op_name"),
        (aceso_file().replace("40.0,80.0", "fast,80.0"), "line 4: forward-compute: 'fast' is not a number"),
        (aceso_file().replace("40.0,80.0", "40.0,-80.0"), "line 4: backward-compute: '-80.0' is not a finite number"),
        (aceso_file([ROWS[0], *ROWS[2:]]), "other operators than in"),
        (aceso_file(ROWS[:5]), "the rows are ends > enc, expected ends > enc > ends"),
        (aceso_file([]), "no rows below the header"),
    ],
)
def test_damaged_aceso_file_is_one_clear_error(tmp_path: Path, content: str, says: str) -> None:
    """A damaged table is a ValueError that names the file, the line and the column."""
    write(tmp_path, {**ACESO, "tiny_mbs2_tp2_algo0.csv": content})
    with pytest.raises(ValueError) as error:
        aceso.profiles(tmp_path, device="V100", num_layers=3)
    assert says in str(error.value)
    assert "tiny_mbs2_tp2_algo0.csv" in str(error.value)


def test_aceso_unit_slip(tmp_path: Path) -> None:
    """Microseconds that are seconds give a model that takes nothing at all."""
    tiny = [",".join([name, *(f"{float(x) / 1e6:.9f}" for x in times), *rest]) for name, *times, rest in (
        (*row.split(",")[:3], row.split(",")[3:]) for row in ROWS
    )]  # fmt: skip
    write(tmp_path, {"tiny_mbs2_tp1_algo0.csv": aceso_file(tiny)})
    with pytest.raises(ValueError, match="the times are in another unit than the format says"):
        aceso.profiles(tmp_path, device="V100", num_layers=3)


def test_aceso_layer_times(tmp_path: Path) -> None:
    """Tables of one layer's seconds become a chain of it; the sizes, which they lack, are asked for."""
    csv = "mbs,tp,algo,fwd,bwd,fwd+bwd\n1,1,0,0.01,0.02,0.03\n2,2,0,0.012,0.025,0.037\n1,1,1,0.5,0.5,1.0\n"
    write(tmp_path, {"Fast.csv": csv, "Slow.csv": csv.replace("0.01,", "0.03,")})
    with pytest.raises(ValueError, match="parameters: missing; the files hold the times of one layer"):
        aceso.profiles(tmp_path)
    (profile,) = aceso.profiles(tmp_path, num_layers=4, parameters=100, output_bytes=64, activation_bytes=1001)
    assert profile.layers == ("block",) * 4
    assert profile.device_types == ("Fast", "Slow")
    assert the_cell(profile, "block", 2, 2).activation_bytes == 1001
    assert the_cell(profile, "block", 1, 1).forward_s == 0.01


def test_aceso_cluster(tmp_path: Path) -> None:
    """Two nodes with the measured links; or, inside, the link on which the measured all-reduce takes its time."""
    write(tmp_path, ACESO)
    cluster = aceso.cluster(tmp_path, device="V100", memory_gb=32, group=2)
    assert [node.devices for node in cluster.nodes] == [("V100", "V100")] * 2
    assert cluster.link(*cluster.devices[:2]).bandwidth(2.0 * MIB) == pytest.approx(20e9)
    assert cluster.link(cluster.devices[0], cluster.devices[2]).bandwidth(4.0 * MIB) == pytest.approx(3e9)
    ring = aceso.cluster(tmp_path, device="V100", memory_gb=32, group=2, link="all_reduce").nodes[0].link
    assert ring
    assert ring_all_reduce_s(np.array([4.0 * MIB, 8.0 * MIB]), 2, [ring]) == pytest.approx([0.3e-3, 0.5e-3])
    assert len(ring.table or ()) == 2  # 4096 MB failed
    with pytest.raises(ValueError, match="memory_gb: missing; the format does not hold the memory of a device"):
        aceso.cluster(tmp_path, device="V100", group=2)
    with pytest.raises(ValueError, match="group: an all-reduce of 8 devices was not measured, but 2"):
        aceso.cluster(tmp_path, device="V100", memory_gb=32, link="all_reduce")
    write(tmp_path, {"p2p_inter_node.csv": "1,2,4\n1.0, 2.0\n"})
    with pytest.raises(ValueError, match=r"p2p_inter_node\.csv: line 2: 2 values, expected 3"):
        aceso.cluster(tmp_path, device="V100", memory_gb=32, group=2)


# Galvatron ----------------------------------------------------------------------------------------------------------
# A layer takes 4 ms for 2 samples and holds 1 Mi parameters; embedding and head 3 ms, 2 Mi and 4 Mi parameters.
# States: 16 bytes per parameter, shared by all ranks: with 8 ranks, 2 MB per Mi parameters.


def memory(layers: int, ranks: dict[int, tuple[float, float, float]], batch: int = 8) -> dict[str, float]:
    return {
        f"layernum[{layers}]_bsz{batch}_seq128_rank{rank}_{what}": value
        for rank, figures in ranks.items()
        for what, value in zip(("ms", "act", "act_peak"), figures)
    }


def both(figures: tuple[float, float, float]) -> dict[int, tuple[float, float, float]]:
    return {0: figures, 7: figures}


GALVATRON: dict[str, Any] = {
    "computation_profiling_bf16_hidden64_head4_seqlen128.json": {
        "layernum[6]_bsz2": 27.0, "layernum[12]_bsz2": 51.0, "layertype_0": 2.0
    },
    "memory_profiling_bf16_hidden64_head4_seqlen128.json": {
        # 8 samples over 8 ranks, 5 MB per layer and sample; at tp 2 2 samples to a group, 3 MB per layer and sample
        "1_1_8": {**memory(1, both((14.0, 12.0, 20.0))), **memory(2, both((16.0, 17.0, 26.0)))},
        "1_2_4": {**memory(1, both((14.0, 14.0, 20.0))), **memory(2, both((16.0, 20.0, 26.0)))},
        "1_8_1": {**memory(1, both((14.0, 20.0, 26.0))), **memory(2, both((16.0, 36.0, 40.0)))},
        "1_1_8_c": {**memory(1, both((14.0, 2.0, 20.0))), **memory(2, both((16.0, 3.0, 26.0)))},
        # two stages of a layer, 4 ranks to a stage, 2 samples to a rank: 4 MB per Mi parameters
        "2_1_4": memory(2, {0: (12.0, 11.0, 17.0), 7: (20.0, 14.0, 30.0)}),
        "2_2_2": memory(2, {0: (12.0, 14.0, 18.0), 7: (20.0, 16.0, 28.0)}),
        "layertype_0": {"parameter_size": 4.0},
        "other_memory_pp_off": {"model_states": 1.0},
    },
    "galvatron_config_tiny_1nodes.json": {"pp_deg": 2, "pp_division": "3,2"},
}  # fmt: skip
COMPUTATION, MEMORY, PLAN = GALVATRON


def test_galvatron_profile(tmp_path: Path) -> None:
    """A layer is the difference of two layer counts; the ends come from the first and last rank of two stages."""
    (profile,) = galvatron.profiles(write(tmp_path, GALVATRON), device="A100", backward_factor=2.0)
    assert profile.layers == ("embedding", *["block"] * 5, "head")  # 3 + 2 in the plan beside it
    hidden = 64 * 128 * 2
    assert profile.kinds == (
        LayerKind(name="embedding", parameters=2 * MIB, output_bytes=hidden),  # 12 MB: 3 Mi parameters, less a layer
        LayerKind(name="block", parameters=MIB, output_bytes=hidden),
        LayerKind(name="head", parameters=4 * MIB, output_bytes=0),
    )
    block, head = the_cell(profile, "block", 1, 2), the_cell(profile, "head", 1, 2)
    assert block.forward_s == pytest.approx(0.004)
    assert block.backward_s == pytest.approx(0.008)
    assert block.activation_bytes == 2 * 5 * MIB
    assert block.workspace_bytes == 6 * MIB  # 17 - 11 of the first rank, for its 2 samples
    assert head.forward_s == pytest.approx(0.003)
    assert head.activation_bytes == 4 * MIB  # 14 MB for 2 samples, of which 10 are the layer's
    assert head.workspace_bytes == 16 * MIB
    assert the_cell(profile, "embedding", 1, 2).activation_bytes == MIB
    assert (profile.num_heads, profile.conditions.sequence_length, profile.conditions.dtype) == (4, 128, "bf16")
    assert profile.degrees("A100") == (1,)
    assert profile.warnings[:2] == (
        "only forward was timed: backward taken as 2 x forward",
        "embedding and head were timed together: all of their time is with the head",
    )


def test_galvatron_other_degrees(tmp_path: Path) -> None:
    """Degrees with memory get the time of tp 1 by an efficiency, where the ends were measured apart."""
    (profile,) = galvatron.profiles(write(tmp_path, GALVATRON), device="A100", backward_factor=1.5, tp_efficiency=0.8)
    assert profile.degrees("A100") == (1, 2)  # none of two stages at tp 8
    assert the_cell(profile, "block", 2, 2).forward_s == pytest.approx(0.004 / 1.6)
    assert the_cell(profile, "block", 2, 2).activation_bytes == 2 * 3 * MIB
    assert profile.conditions.tp_communication == "outside"
    assert any("tp 1 / (tp x 0.8)" in warning for warning in profile.warnings)


def test_galvatron_single_layer_count(tmp_path: Path) -> None:
    """One layer count alone needs the time of the ends by argument; with it 27 ms - 2 x 1.5 ms are 6 layers."""
    files = copy.deepcopy(GALVATRON)
    del files[COMPUTATION]["layernum[12]_bsz2"]
    write(tmp_path, files)
    with pytest.raises(ValueError, match=r"layernum\[6\] alone for bsz2, expected two layer counts; give other_ms"):
        galvatron.profiles(tmp_path, device="A100", backward_factor=2.0)
    (profile,) = galvatron.profiles(tmp_path / COMPUTATION, device="A100", backward_factor=2.0, other_ms=1.5)
    assert the_cell(profile, "block", 1, 2).forward_s == pytest.approx(0.004)
    assert the_cell(profile, "head", 1, 2).forward_s == pytest.approx(0.003)


def test_galvatron_memory_of_a_single_layer_count(tmp_path: Path) -> None:
    """Memory of one layer count needs a layer's parameters: 14 MB x 8 / 16 are 7 Mi, of which 1 Mi is the layer's."""
    files = copy.deepcopy(GALVATRON)
    files[MEMORY] = {"1_1_8": memory(1, both((14.0, 12.0, 20.0)))}
    write(tmp_path, files)
    with pytest.raises(ValueError, match=r"layernum\[1\] alone, expected two layer counts; give layer_parameters"):
        galvatron.profiles(tmp_path, device="A100", backward_factor=2.0)
    with pytest.raises(ValueError, match=r"layer_parameters: 1 x 7340033 are more than the 7340032 of .*: 1_1_8"):
        galvatron.profiles(tmp_path, device="A100", backward_factor=2.0, layer_parameters=7 * MIB + 1)
    (profile,) = galvatron.profiles(tmp_path, device="A100", backward_factor=2.0, layer_parameters=MIB)
    assert [kind.parameters for kind in profile.kinds] == [0, MIB, 6 * MIB]
    assert the_cell(profile, "block", 1, 2).activation_bytes == 2 * 12 * MIB  # all that was kept, 12 MB per sample
    assert the_cell(profile, "head", 1, 2).activation_bytes == 0
    assert any("a layer taken to have 1048576 parameters and to keep all" in each for each in profile.warnings)


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("aceso", "num_layers", "0", "num_layers: 0 is not between 1 and 10000"),
        ("aceso", "num_layers", "1000000000000", "num_layers: 1000000000000 is not between 1 and 10000"),
        ("aceso", "parameters", "5", "parameters: 5 given, but the files of"),
        ("galvatron", "num_layers", "-1", "num_layers: -1 is not between 1 and 10000"),
        ("galvatron", "hidden_size", "0", "hidden_size: 0 is not between 1 and"),
        ("galvatron", "other_ms", "nan", "other_ms: nan is not a finite number above 0"),
        ("galvatron", "device", "", "device: nothing is given"),
    ],
)
def test_options_out_of_range_are_one_clear_error(tmp_path: Path, name: str, key: str, value: str, says: str) -> None:
    """A count of nothing, or of more layers than a model has, is named with its option."""
    given = {"device": "V100", "num_layers": "3", **({"backward_factor": "2"} if name == "galvatron" else {})}
    write(tmp_path, GALVATRON if name == "galvatron" else ACESO)
    with pytest.raises(ValueError) as error:
        load(name, tmp_path, **{**given, key: value})
    assert str(error.value).startswith(says)


def test_counts_of_a_megatron_run_are_checked(tmp_path: Path) -> None:
    """No tp degree and no micro-batch of 0."""
    path = write(tmp_path, {"run.jsonl": jsonl(report(0, [4.0]))}) / "run.jsonl"
    for key in ("tp", "micro_batch"):
        with pytest.raises(ValueError, match=f"{key}: 0 is not between 1 and"):
            megatron.profiles(path, device="H100", **{"tp": 1, "micro_batch": 1, **SIZES, key: 0})
    with pytest.raises(ValueError, match="skip: -1 is negative"):
        megatron.profiles(path, device="H100", tp=1, micro_batch=1, skip=-1, **SIZES)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        (COMPUTATION, lambda c: c.update({"layer[6]": 1.0}), "key 'layer[6]' is not layernum[N]_bszB_seqS"),
        (COMPUTATION, lambda c: c.update({"layernum[12]_bsz2": "51"}), "layernum[12]_bsz2: '51' is not a number"),
        (COMPUTATION, lambda c: c.update({"layernum[12]_bsz2": 20.0}), "leave no time for a layer or the rest"),
        (
            COMPUTATION,
            lambda c: c.update({"layernum[6]_bsz2": 2.7e7, "layernum[12]_bsz2": 5.1e7}),
            "another unit than the format says",
        ),
        (MEMORY, lambda c: c.update({"1-1-8": {}}), "key '1-1-8' is not PP_TP_DP"),
        (
            MEMORY,
            lambda c: c["1_1_8"].update({"rank0_ms": 1}),
            "1_1_8: key 'rank0_ms' is not layernum[N]_bszB_rankR_ms",
        ),
        (MEMORY, lambda c: c["1_1_8"].pop("layernum[2]_bsz8_seq128_rank0_act"), "layernum[2] of rank 0 has no act"),
        (MEMORY, lambda c: c.pop("1_1_8"), "no strategy 1_1_N"),
        (PLAN, lambda c: c.update({"pp_division": "3;2"}), "pp_division: '3;2' is not counts of layers"),
        (PLAN, lambda c: c.clear(), "key 'pp_division' is missing"),
    ],
)
def test_damaged_galvatron_file_is_one_clear_error(tmp_path: Path, file: str, change: Change, says: str) -> None:
    """A damaged file is a ValueError that names the file, the key and the value."""
    files = copy.deepcopy(GALVATRON)
    change(files[file])
    with pytest.raises(ValueError) as error:
        galvatron.profiles(write(tmp_path, files), device="A100", backward_factor=2.0)
    assert says in str(error.value)
    assert file in str(error.value) or "unit" in says


def test_galvatron_arguments(tmp_path: Path) -> None:
    """What the files do not hold is asked for: device, backward factor, number of layers, hidden size."""
    files = {name.replace("hidden64_head4", "tiny"): content for name, content in GALVATRON.items() if name != PLAN}
    write(tmp_path, files)
    for given, says in (
        ({}, "device: missing"),
        ({"device": "A100"}, "backward_factor: missing; the files hold forward times only"),
        ({"device": "A100", "backward_factor": 2.0}, "hidden_size: missing; computation_profiling_bf16_tiny"),
        ({"device": "A100", "backward_factor": 2.0, "hidden_size": 64}, "num_layers: missing"),
    ):
        with pytest.raises(ValueError, match=says):
            galvatron.profiles(tmp_path, **given)  # type: ignore[arg-type]
    (profile,) = galvatron.profiles(tmp_path, device="A100", backward_factor=2.0, hidden_size=64, num_layers=7)
    assert profile.num_layers == 9
    with pytest.raises(ValueError, match=r"backward_factor: -1\.0 is not a finite number above 0"):
        galvatron.profiles(tmp_path, device="A100", backward_factor=-1.0)


def test_galvatron_cluster(tmp_path: Path) -> None:
    """Bandwidths of one node and of two make a cluster of two, each link of the devices that drove it."""
    files = {
        "p2p_bandwidth_1nodes_4gpus_per_node.json": {"pp_size_2": 160.0, "pp_size_4": 140.0},
        "p2p_bandwidth_2nodes_4gpus_per_node.json": {"pp_size_2": 8.0},
        "allreduce_bandwidth_1nodes_4gpus_per_node.json": {"allreduce_size_4_consec_1": 150.0},
        "overlap_coefficient.json": {"overlap_coe": 1.25},
    }
    cluster = galvatron.cluster(write(tmp_path, files), device="A100", memory_gb=40)
    assert [len(node.devices) for node in cluster.nodes] == [4, 4]
    assert cluster.link(*cluster.devices[:2]).bytes_per_s == 160e9
    assert [(each.devices, each.link.bytes_per_s) for each in cluster.links] == [(4, 8e9)]
    assert any("1.25 x as long" in note for note in cluster.notes)
    ring = galvatron.cluster(tmp_path, device="A100", memory_gb=40, link="all_reduce")
    assert ring.link(*ring.devices[:2]).bytes_per_s == 150e9
    write(tmp_path, {"p2p_bandwidth_2nodes_4gpus_per_node.json": {"pp_size_2": 8e9}})
    with pytest.raises(
        ValueError, match=r"2nodes_4gpus_per_node\.json: pp_size_2: 8000000000.0 is not a bandwidth in G"
    ):
        galvatron.cluster(tmp_path, device="A100", memory_gb=40)


# Megatron-LM --------------------------------------------------------------------------------------------------------


def phase(milliseconds: float, retained: float | None, transient: float | None) -> dict[str, Any]:
    def cell(value: float | None) -> dict[str, float] | None:
        return None if value is None else {"mean": value / 2, "max": value}

    return {
        "time_ms": {"mean": milliseconds, "max": 2 * milliseconds}, "peak": cell(retained and 9 * retained),
        "retained": cell(retained), "transient": cell(transient), "largest": cell(transient), "comm": cell(0.0),
    }  # fmt: skip


def report(first: int, times: list[float], *, memory: bool = True, moe: bool = False) -> dict[str, Any]:
    kept, temporary = (1000.0, 50.0) if memory else (None, None)
    return {
        "source": "trace" if memory else "timing-only",
        "layers": {
            str(first + i): {"is_moe": moe, "fwd": phase(t, kept, temporary), "bwd": phase(2 * t, 0.0, 3.0)}
            for i, t in enumerate(times)
        },
        "global_peak_bytes": {"mean": 1e9, "max": 2e9},
    }


def jsonl(*reports: dict[str, Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in reports)


SIZES: dict[str, Any] = {"parameters": 500, "output_bytes": 64}


def test_megatron_reports(tmp_path: Path) -> None:
    """Reports of two ranks and two intervals: mean of the mean times, largest memory, layers of all ranks."""
    text = jsonl(report(0, [99.0]), report(0, [10.0, 20.0]), report(2, [30.0], moe=True), report(0, [14.0, 20.0]))
    path = write(tmp_path, {"run.jsonl": text}) / "run.jsonl"
    (profile,) = megatron.profiles(
        path, device="H100", tp=2, micro_batch=4, skip=1, moe_parameters=4000, sequence_length=4096, **SIZES
    )
    assert profile.layers == ("block", "block-1", "moe")
    assert [kind.parameters for kind in profile.kinds] == [500, 500, 4000]
    assert the_cell(profile, "block", 2, 4) == Cell(
        kind="block", device_type="H100", tp=2, micro_batch=4, forward_s=0.012, backward_s=0.024,
        activation_bytes=1000, workspace_bytes=50,
    )  # fmt: skip
    assert profile.conditions.tp_communication == "inside"
    assert any("embedding and head were not profiled" in warning for warning in profile.warnings)


def test_megatron_directory(tmp_path: Path) -> None:
    """A directory of runs, device, tp and micro-batch in their names, makes one profile of them all."""
    files = {"H100_tp1_mbs1.jsonl": jsonl(report(0, [4.0, 4.0])), "A100_tp2_mbs2.jsonl": jsonl(report(0, [6.0, 6.0]))}
    (profile,) = megatron.profiles(write(tmp_path, files), **SIZES)
    assert profile.layers == ("block", "block")
    assert (profile.degrees("H100"), profile.degrees("A100")) == ((1,), (2,))


TABLE = """\
 iteration 20 | elapsed
[per-layer report]
memory source = PRECISE trace  (peak=window high-water)
cell = mean/max   (time in ms, memory in MiB)
-- forward --
 layer  type              fwd_ms                peak            retained           transient
     0 dense      10.0/     28.4    3870.2/   3870.2     500.1/    512.0      32.0/     64.0
     1   MoE      20.0/     34.2    4398.3/   4398.3     528.1/    256.0     608.0/      8.0
-- backward --
 layer  type              bwd_ms                peak            retained           transient
     0 dense      25.0/     28.4    3870.2/   3870.2       0.0/      0.0       1.0/    128.0
     1   MoE      45.0/     34.2    4398.3/   4398.3       0.0/      0.0       1.0/      2.0
[reserved fragmentation overhead] mean=1.0/max=1.0 MiB (reserved - allocated)
"""


def test_megatron_log(tmp_path: Path) -> None:
    """The tables printed into a training log are read as well, in ms and MiB."""
    path = write(tmp_path, {"run.log": TABLE}) / "run.log"
    (profile,) = megatron.profiles(path, device="H100", tp=1, micro_batch=1, **SIZES)
    assert profile.layers == ("block", "moe")
    assert the_cell(profile, "block", 1, 1) == Cell(
        kind="block", device_type="H100", tp=1, micro_batch=1, forward_s=0.01, backward_s=0.025,
        activation_bytes=512 * MIB, workspace_bytes=128 * MIB,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"run\.log: line 7: layer 0 has no row below -- backward --"):
        path.write_text(TABLE.split("-- backward")[0])
        megatron.profiles(path, device="H100", tp=1, micro_batch=1, **SIZES)


def test_megatron_without_memory(tmp_path: Path) -> None:
    """A report of times only needs the activations by argument, which the profile says."""
    path = write(tmp_path, {"run.jsonl": jsonl(report(0, [4.0], memory=False))}) / "run.jsonl"
    with pytest.raises(ValueError, match=r"run\.jsonl: line 1: layers > 0: no memory .*; give activation_bytes"):
        megatron.profiles(path, device="H100", tp=1, micro_batch=2, **SIZES)
    (profile,) = megatron.profiles(path, device="H100", tp=1, micro_batch=2, activation_bytes=70, **SIZES)
    assert profile.cells[0].activation_bytes == 140
    assert any("taken as 70 bytes per sample" in warning for warning in profile.warnings)


def test_damaged_megatron_report_is_one_clear_error(tmp_path: Path) -> None:
    """A truncated line, an unknown key, a missing layer or a missing argument is named with the file and the line."""
    good = report(0, [4.0, 5.0])
    for text, says in (
        (jsonl(good) + json.dumps(good)[:80], "run.jsonl: line 2 column"),
        (jsonl(good, {**good, "stage": 1}), "run.jsonl: line 2: key 'stage' is not among source, layers"),
        (jsonl({**good, "source": "guess"}), "line 1: source: 'guess' is not trace or timing-only"),
        (jsonl(report(1, [4.0])), "run.jsonl: layer 0 is missing"),
        (jsonl(good, report(0, [4.0], moe=True)), "layer 0 is dense in one report and MoE in another"),
        (
            jsonl({"layers": {"0": {"fwd": {"time_ms": {"mean": "4"}}, "bwd": {}}}}),
            "time_ms > mean: '4' is not a number",
        ),
        (jsonl({"layers": {"0": {"fwd": {"time": 4}, "bwd": {}}}}), "fwd: key 'time' is not among time_ms, peak"),
        ("\n", "run.jsonl: the file is empty"),
    ):
        path = write(tmp_path, {"run.jsonl": text}) / "run.jsonl"
        with pytest.raises(ValueError) as error:
            megatron.profiles(path, device="H100", tp=1, micro_batch=1, **SIZES)
        assert says in str(error.value)
    for missing in ("device", "tp", "micro_batch", "parameters", "output_bytes"):
        given = {"device": "H100", "tp": 1, "micro_batch": 1, **SIZES}
        del given[missing]
        with pytest.raises(ValueError, match=f"{missing}: missing"):
            megatron.profiles(path, **given)


# Network tables -----------------------------------------------------------------------------------------------------

SECONDS = {2: [0.001, 0.002], 4: [0.004, 0.006]}
NNSCALER: dict[str, Any] = {
    f"comm/intra_{n}.json": {
        name: [[1.0, 4.0], [each * factor for each in seconds]]
        for name, factor in (("all gather", 0.5), ("all reduce", 1.0), ("reduce scatter", 0.5), ("all to all", 0.25))
    }
    for n, seconds in SECONDS.items()
}


def test_nnscaler_cluster(tmp_path: Path) -> None:
    """One node of the largest group; a ring of our cost model takes the measured time at the measured sizes."""
    cluster = nnscaler.cluster(write(tmp_path, NNSCALER), device="MI200", memory_gb=64)
    assert cluster.nodes[0].devices == ("MI200",) * 4
    link = cluster.nodes[0].link
    assert link
    assert ring_all_reduce_s(np.array([1.0, 4.0]) * MIB, 4, [link]) == pytest.approx(SECONDS[4])
    pair = nnscaler.cluster(tmp_path, device="MI200", memory_gb=64, group=2).nodes[0].link
    assert pair
    assert ring_all_reduce_s(np.array([1.0, 4.0]) * MIB, 2, [pair]) == pytest.approx(SECONDS[2])
    assert "by number of devices: 2: " in cluster.notes[2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("all reduce"), "intra_4.json: key 'all reduce' is missing"),
        (lambda c: c.update({"all reduce": [[1.0, 4.0], [0.1]]}), "all reduce > 1: 1 values, expected 2"),
        (lambda c: c.update({"all reduce": [[1.0, 4.0], [0.1, 2000]]}), "> 1 > 1: 2000 is not seconds above 0 and bel"),
        (lambda c: c.update({"all reduce": [[0, 4.0], [0.1, 0.2]]}), "all reduce > 0 > 0: 0 is not a size in MB"),
        (lambda c: c.update({"all reduce": [[1, 4], [0.1, 0.2], []]}), "all reduce: 3 values, expected 2"),
        (lambda c: c.update({"all reduce": [[4, 4], [0.1, 0.2]]}), "all reduce: table[1]: message of"),
    ],
)
def test_damaged_nnscaler_table_is_one_clear_error(tmp_path: Path, change: Change, says: str) -> None:
    """A damaged table is a ValueError that names the file, the keys and the value."""
    files = copy.deepcopy(NNSCALER)
    change(files["comm/intra_4.json"])
    with pytest.raises(ValueError) as error:
        nnscaler.cluster(write(tmp_path, files), device="MI200", memory_gb=64)
    assert says in str(error.value)
    assert "intra_4.json" in str(error.value)


def test_network_tables_need_a_device(tmp_path: Path) -> None:
    """What the tables do not hold is asked for; a group that was not measured is refused."""
    write(tmp_path, NNSCALER)
    for given, says in (
        ({}, "device: missing; the format does not name its devices"),
        ({"device": "MI200"}, "memory_gb: missing"),
        ({"device": "MI200", "memory_gb": 64, "group": 3}, "group: 3 devices were not measured, but 2, 4"),
    ):
        with pytest.raises(ValueError, match=says):
            nnscaler.cluster(tmp_path, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"holds no intra_N\.json"):
        nnscaler.cluster(tmp_path.parent, device="MI200", memory_gb=64)


LINES = [
    "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)",
    "1048576,262144,float,50000,31.46,52000,30.0",  # 1.5 x 1048576 / 50000
    "8388608,2097152,float,100000,125.83,99000,127.1",
]


def test_vtrain_cluster(tmp_path: Path) -> None:
    """An all-reduce table of 4 devices makes a node of 4 on which the ring takes the measured nanoseconds."""
    cluster = vtrain.cluster(write(tmp_path, {"AR_GPU4_1M_8M_LUT": "\n".join(LINES)}), device="A100", memory_gb=80)
    link = cluster.nodes[0].link
    assert link
    assert ring_all_reduce_s(np.array([1.0, 8.0]) * MIB, 4, [link]) == pytest.approx([50e-6, 100e-6])


@pytest.mark.parametrize(
    ("number", "line", "says"),
    [
        (0, "size,time", "line 1: 'size,time' is not the header size(B)"),
        (2, "8388608,2097152,float,100000", "line 3: 4 values, expected 7"),
        (2, "8388608,2097152,float,100,125.83,99,127.1", "line 3: busbw(GB/s): '125.83' is not the 1.258e+05 GB/s"),
        (1, "1048576,262144,float,-5,31.46,52000,30.0", "line 2: time(ns): '-5' is not a finite number >= 1"),
    ],
)
def test_damaged_vtrain_table_is_one_clear_error(tmp_path: Path, number: int, line: str, says: str) -> None:
    """A wrong header, a short line or a time of another unit than the bus bandwidth is named with its line."""
    text = "\n".join([*LINES[:number], line, *LINES[number + 1 :]])
    with pytest.raises(ValueError) as error:
        vtrain.cluster(write(tmp_path, {"AR_GPU4_1M_8M_LUT": text}), device="A100", memory_gb=80)
    assert says in str(error.value)


def test_long_tables_are_thinned() -> None:
    """Four sizes to each doubling are kept of 1,024, the first and the last among them."""
    kept = thinned([(float(i), 1.0) for i in range(1, 1025)])
    assert len(kept) <= 42
    assert (kept[0][0], kept[-1][0]) == (1.0, 1024.0)
    assert thinned([(1.0, 5.0), (8.0, 6.0)]) == [(1.0, 5.0), (8.0, 6.0)]
