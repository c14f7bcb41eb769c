"""Estimated profiles: hand-derived kernels and bytes, what is trained, calibration, and beside measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks import estimate as benchmark
from planner import catalogue, estimate
from planner.architecture import Architecture, Attention, Images, Layer, Matrix, Mlp, read
from planner.catalogue import Device, Source
from planner.cluster import Cluster, Link, NetworkLink, Node
from planner.estimate import Efficiency, Kernel, Lora, Run, Setting, calibrated, profile, tokens_per_s
from planner.job import Job
from planner.profile import Cell, ModelProfile, sanity
from planner.search import plan

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
LLAVA = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "vocab_size": 32064},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
}
# Round figures: 100 TFLOP/s in 16 bit and 10 in fp32, 1 TB/s, half of each is reached, nothing to start a kernel.
ROUND = Device(
    name="Round",
    vendor="None",
    year=2020,
    memory_bytes=80 * 2**30,
    bytes_per_s=1e12,
    peaks=(("fp32", 10e12), ("tf32", 50e12), ("fp16", 100e12), ("bf16", 100e12), ("fp8", 200e12)),
    watts=None,
    links=(("PCIe", 16e9),),
    sheet=Source(title="a test", year=2020, url="https://example.org"),
)
HALF = Efficiency(
    tensor=0.5, vector=0.5, bandwidth=0.5, launch_s=0.0, flash_forward=0.5, flash_backward=0.25,
    score_passes_forward=4.0, score_passes_backward=8.0,
)


def setting(**changes: Any) -> Setting:
    default = Setting(dtype="bf16", attention="flash", tp=1, micro_batch=1, sequence_length=1024)
    return replace(default, **changes)


def layer(config: dict[str, Any], kind: str) -> Layer:
    return next(each for each in read(config).layers if each.kind == kind)


def cell(found: ModelProfile, kind: str, tp: int = 1, micro_batch: int = 1) -> Cell:
    return next(c for c in found.cells if (c.kind, c.tp, c.micro_batch) == (kind, tp, micro_batch))


def small(config: dict[str, Any] = LLAMA, devices: Any = ("A100-80-SXM",), **others: Any) -> ModelProfile:
    return profile(config, devices, **{"sequence_length": 2048, "micro_batches": (1, 2), "tp": (1, 2)} | others)


# Kernels ------------------------------------------------------------------------------------------------------------


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic() -> None:
    """1 TFLOP at half of 100 TFLOP/s: 20 ms; 1 GB at half of 1 TB/s: 2 ms; each launch adds to its own kernel."""
    product, copy = Kernel(1e6, 1e12), Kernel(1e9)
    assert estimate.seconds([product], ROUND, "bf16", HALF) == pytest.approx(0.020)
    assert estimate.seconds([copy], ROUND, "bf16", HALF) == pytest.approx(0.002)
    assert estimate.seconds([product, copy], ROUND, "bf16", replace(HALF, launch_s=0.001)) == pytest.approx(0.024)


def test_small_products_are_inefficient_because_of_the_launch() -> None:
    """Half of the top rate at launch x share x peak FLOP: 1 ms x 0.5 x 100 TFLOP/s = 50 GFLOP take 2 ms, not 1."""
    assert estimate.seconds([Kernel(0, 50e9)], ROUND, "bf16", replace(HALF, launch_s=0.001)) == pytest.approx(0.002)


@pytest.mark.parametrize(("dtype", "seconds"), [("fp32", 0.2), ("tf32", 0.04), ("fp16", 0.02), ("fp8", 0.01)])
def test_each_precision_has_its_rate(dtype: str, seconds: float) -> None:
    """1 TFLOP at half of 10, 50, 100 and 200 TFLOP/s."""
    assert estimate.seconds([Kernel(0, 1e12)], ROUND, dtype, HALF) == pytest.approx(seconds)


def test_flash_attention_in_fp8_runs_at_the_rate_of_bf16() -> None:
    """1 TFLOP at half of 100 TFLOP/s, whatever the matrices are in."""
    assert estimate.seconds([Kernel(0, 1e12, "flash_forward")], ROUND, "fp8", HALF) == pytest.approx(0.02)


def one(matrix: Matrix, **others: Any) -> Layer:
    return Layer(kind="one", part="block", width=matrix.outputs, matrices=(matrix,), **others)


def test_a_matrix_costs_two_flop_per_parameter_and_token() -> None:
    """1000 tokens x 2 x 100 x 300 = 60 MFLOP; reads 1000 x 100 and 100 x 300, writes 1000 x 300 values of 2 bytes."""
    found = estimate.forward(one(Matrix(name="m", inputs=100, outputs=300)), setting(sequence_length=1000))
    assert found == [Kernel(2 * (100_000 + 30_000 + 300_000), 60e6)]


def test_backward_repeats_it_twice_or_once_if_frozen() -> None:
    """For the inputs always, for the weights only if they are trained."""
    single = one(Matrix(name="m", inputs=100, outputs=300))
    forward = estimate.forward(single, setting())
    assert estimate.backward(single, setting()) == 2 * forward
    assert estimate.backward(single, setting(), trained=False) == forward


def test_experts_do_the_work_of_those_a_token_is_sent_to() -> None:
    """8 experts, 2 of them per token: FLOP of 2, but all 8 matrices are read once there are 8 tokens to be sent."""
    expert = Matrix(name="m", inputs=100, outputs=300, copies=8, used=2)
    (found,) = estimate.forward(one(expert), setting(sequence_length=1000))
    assert found.flops == 2 * 60e6
    assert found.nbytes == 2 * (2000 * 400 + 8 * 30_000)


def test_tp_divides_the_product() -> None:
    """Half of the outputs, all of the inputs."""
    (found,) = estimate.forward(one(Matrix(name="m", inputs=100, outputs=300)), setting(tp=2, sequence_length=1000))
    assert found == Kernel(2 * (100_000 + 15_000 + 150_000), 30e6)


ATTENTION = Attention(heads=4, kv_heads=4, key_width=8, value_width=8, rotary=False)


def attend(**changes: Any) -> list[Kernel]:
    only = Layer(kind="one", part="block", width=32, attention=replace(ATTENTION, **changes.pop("attention_of", {})))
    step = estimate.backward if changes.pop("back", False) else estimate.forward
    return step(only, setting(sequence_length=100, **changes), HALF)


def test_flash_attention_sees_half_of_a_causal_sequence() -> None:
    """100 tokens x 4 heads x 50 seen x (8 + 8) x 2 FLOP = 640,000; backward five products instead of two."""
    assert [each.flops for each in attend()] == [640_000]
    assert [each.flops for each in attend(back=True)] == [1_600_000]
    assert [each.flops for each in attend(attention_of={"causal": False})] == [1_280_000]


def test_a_window_bounds_what_a_token_sees() -> None:
    """Window 20 of 100: 20 - 20 x 20 / 200 = 18 tokens on average; longer than the sequence, no window."""
    assert [each.flops for each in attend(attention_of={"window": 20})] == [100 * 4 * 18 * 16 * 2]
    assert attend(attention_of={"window": 1000}) == attend()


def test_eager_attention_moves_the_scores() -> None:
    """4 heads x 100 x 100 scores of 2 bytes, 80,000: written and read by two products, 4 passes forward, 8 backward.

    Products: 2 x 40,000 x 8 FLOP each; beside the scores they read or write 2 x 100 x 4 x (8 + 8) bytes. Four of
    them backward. Fused with its mask, softmax takes 2 passes and 3; a dropout reads, writes and keeps a byte.
    """
    product = Kernel(80_000 + 12_800, 640_000)
    assert attend(attention="eager") == [product, product, Kernel(4 * 80_000)]
    assert attend(attention="eager", back=True) == [product] * 4 + [Kernel(8 * 80_000)]
    assert attend(attention="fused-softmax")[2:] == [Kernel(2 * 80_000)]
    assert attend(attention="fused-softmax", back=True)[4:] == [Kernel(3 * 80_000)]
    dropped = attend(attention="fused-softmax", attention_of={"dropout": True})
    assert dropped[3:] == [Kernel(5 * 40_000)]


def test_update_is_the_traffic_of_adam() -> None:
    """1e9 parameters at half of 1 TB/s: 28 bytes each in fp32, 56 ms; 30 with 16-bit weights, 60 ms."""
    assert estimate.update_s(10**9, setting(dtype="fp32"), ROUND, HALF) == pytest.approx(0.056)
    assert estimate.update_s(10**9, setting(), ROUND, HALF) == pytest.approx(0.060)


# Bytes --------------------------------------------------------------------------------------------------------------


def test_bytes_kept_by_gpt_are_those_of_korthikanti() -> None:
    """s h (34 + 5 a s / h) with s = 1024, h = 768, a = 12: every dropout, softmax, GELU and norm of GPT in 16 bit."""
    kept = estimate.activation_bytes(layer(GPT2, "block"), setting(attention="eager"))
    assert kept == 1024 * (34 * 768 + 5 * 12 * 1024)


def test_flash_keeps_no_scores() -> None:
    """4 bytes per head and token instead of 5 per score: s (34 h + 4 a)."""
    assert estimate.activation_bytes(layer(GPT2, "block"), setting()) == 1024 * (34 * 768 + 4 * 12)


def test_bytes_kept_by_a_llama_block() -> None:
    """Two norms 4 x 4096, queries and output 2 x 4096, keys and values 2 x 1024, gate, up and product 3 x 14336,
    2 bytes each, and 4 x 32: 139,392 bytes a token; eager: one more for each norm and the MLP, and 32 x 1024 scores."""
    block = layer(LLAMA, "block")
    flash = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 32
    assert flash == 139_392
    assert estimate.activation_bytes(block, setting()) == 1024 * flash
    eager = flash - 4 * 32 + 2 * (2 * 4096 + 14336 + 32 * 1024)
    assert estimate.activation_bytes(block, setting(attention="eager")) == 1024 * eager


def test_tp_divides_all_but_the_hidden_states() -> None:
    """Norms (4 x 4096 x 2 bytes a token) stay whole, the rest is divided by 4."""
    block, hidden = layer(LLAMA, "block"), 1024 * 2 * 4 * 4096
    whole = estimate.activation_bytes(block, setting())
    assert estimate.activation_bytes(block, setting(tp=4)) == hidden + (whole - hidden) // 4


def test_activations_of_experts_are_those_of_the_experts_met() -> None:
    """Mixtral's block beside a dense one of the same width: 2 experts of the MLP instead of 1, and 2 x 2 hidden states
    sent to them and back; not 8."""
    dense, sparse = layer(LLAMA, "block"), layer(MIXTRAL, "block")
    extra = estimate.activation_bytes(sparse, setting()) - estimate.activation_bytes(dense, setting())
    assert extra == 1024 * 2 * (3 * 14336 + 2 * 2 * 4096)


def test_relu_keeps_its_output_alone() -> None:
    """One inner width instead of two."""
    gelu, relu = (Layer(kind="x", part="block", width=1, mlp=Mlp(width=64, gated=False, activation=name))
                  for name in ("gelu", "relu"))
    assert estimate.activation_bytes(gelu, setting()) == 2 * estimate.activation_bytes(relu, setting())


def test_logits_are_apart_and_in_fp32() -> None:
    """8192 tokens, vocabulary 151,936: 4.64 GiB a copy, whatever the precision."""
    found = small(LLAMA | {"vocab_size": 151936}, sequence_length=8192)
    head = found.kind_of(33)
    assert head.logits_bytes == 8192 * 151936 * 4
    assert head.logits_bytes / 2**30 == pytest.approx(4.64, abs=0.005)
    assert cell(found, "head").activation_bytes == 8192 * 2 * 2 * 4096  # its norm


def test_workspace_is_the_widest_gradient() -> None:
    """Eager: scores twice, 2 x 32 heads x 1024 x 1024 x 2 bytes; and the largest gradient, 4096 x 14336 x 2."""
    found = estimate.workspace_bytes(layer(LLAMA, "block"), setting(attention="eager"), trained=True)
    assert found == 2 * 32 * 1024 * 1024 * 2 + 4096 * 14336 * 2


# Profiles -----------------------------------------------------------------------------------------------------------


def test_a_profile_is_complete_and_says_that_it_is_estimated() -> None:
    """Every kind has a cell for every device, tp degree and size; the first warning and the conditions say how."""
    found = small(devices=("A100-80-SXM", "V100=V100-32-SXM"), dtype="fp16")
    assert found.device_types == ("A100-80-SXM", "V100")
    assert found.holes() == ()
    assert all(found.degrees(name) == (1, 2) and found.micro_batches(name, 2) == (1, 2) for name in found.device_types)
    assert found.parameters == 8_030_261_248
    assert (found.num_heads, found.num_kv_heads) == (32, 8)
    assert found.warnings[0] == estimate.WARNING
    assert found.conditions.tp_communication == "outside"
    assert found.conditions.timer == "none: estimated"
    assert found.conditions.source.startswith("estimated from a config (digest ")
    assert any("V100 = V100-32-SXM: 125 TFLOP/s fp16 [V100 data sheet" in note for note in found.conditions.notes)


def test_the_same_question_gives_the_same_bytes(tmp_path: Path) -> None:
    """Twice the same file, and it reads back as the same profile."""
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path in paths:
        small(MIXTRAL).save(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert ModelProfile.load(paths[0]) == small(MIXTRAL)


def test_a_config_file_gives_what_its_content_gives(tmp_path: Path) -> None:
    """The same cells; name and source tell them apart."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"_name_or_path": "meta-llama/Meta-Llama-3-8B"}), encoding="utf-8")
    found = small(path)
    assert found.cells == small().cells
    assert found.name == "meta-llama/Meta-Llama-3-8B"
    assert found.conditions.source.startswith("estimated from config.json (sha256 ")
    assert small().name == "llama 8.03B"


@pytest.mark.parametrize("config", [LLAMA, GPT2, MIXTRAL, LLAVA], ids=["llama", "gpt2", "mixtral", "llava"])
def test_no_estimate_beats_the_peak(config: dict[str, Any]) -> None:
    """Two FLOP per parameter met and token forward, four backward, never above the device's peak; nor below 5 % of it
    where a layer is large."""
    found = profile(config, ["H100-SXM"], sequence_length=1024, micro_batches=(4,), tp=(1,))
    for each in {each.kind: each for each in read(config).layers}.values():
        tokens, now = 4 * (each.tokens or 1024), cell(found, each.kind, micro_batch=4)
        met = sum(matrix.used * matrix.inputs * matrix.outputs for matrix in each.matrices)
        share = 6 * met * tokens / (now.forward_s + now.backward_s) / 989.5e12
        assert share <= 1
        assert share > 0.05 or met < 2e6 * 4


def test_more_work_takes_longer_and_a_faster_device_less() -> None:
    """Time grows with the micro-batch but not faster than in proportion; tp and a better board shorten it."""
    old, new = small(), small(devices=("H100-SXM",))
    for kind in ("embedding", "block", "head"):
        first, second = cell(old, kind), cell(old, kind, micro_batch=2)
        assert first.forward_s < second.forward_s <= 2 * first.forward_s
        assert first.backward_s < second.backward_s <= 2 * first.backward_s
        assert cell(old, kind, tp=2).forward_s <= first.forward_s
        assert cell(new, kind).forward_s < first.forward_s


def test_tp_ranks_hand_on_two_hidden_states_per_block() -> None:
    """Twice s x h x 2 bytes in a block, half of one at each end: 2048 x 4096 x 2 = 16 MiB."""
    state = 2048 * 4096 * 2
    assert [kind.tp_bytes for kind in small().kinds] == [state // 2, 2 * state, state // 2]


def test_degrees_that_do_not_divide_are_left_out() -> None:
    """GPT-2 has 12 heads: 8 ranks are silently none of the defaults, and a warning if asked for; alone, an error."""
    assert profile(GPT2, ["T4"], sequence_length=512, dtype="fp16").degrees("T4") == (1, 2, 4)
    asked = profile(GPT2, ["T4"], sequence_length=512, dtype="fp16", tp=(2, 8))
    assert asked.degrees("T4") == (2,)
    assert asked.warnings[1] == "tp 8 is left out: it does not divide the 12 attention heads of block"
    with pytest.raises(ValueError, match=r"tp: \[8\]: tp 8 is left out: it does not divide the 12 attention heads"):
        profile(GPT2, ["T4"], sequence_length=512, dtype="fp16", tp=(8,))


def test_sequences_beyond_the_config_are_warned_of() -> None:
    """GPT-2 has 1024 positions."""
    found = profile(GPT2, ["T4"], sequence_length=2048, dtype="fp16", tp=(1,))
    assert found.warnings[1] == "sequence_length 2048 is more than the 1024 tokens the config allows for"


def test_what_has_no_effect_is_warned_of() -> None:
    """GPT-2 does not see, and has no tower that could be frozen."""
    given: dict[str, Any] = {"sequence_length": 512, "dtype": "fp16", "tp": (1,)}
    found = profile(GPT2, ["T4"], images=Images(), frozen=("vision",), **given)
    assert found.warnings[1:] == (
        "images have no effect: gpt2 does not see",
        "frozen has no effect on vision: gpt2 has none",
    )
    assert len(profile(LLAVA, ["T4"], images=Images(), frozen=("vision",), **given).warnings) == 2  # 576 > 512 tokens


def test_plans_carry_the_warning() -> None:
    """A plan on an estimated profile says so; the estimate raises no other suspicion."""
    cluster = Cluster(
        name="two",
        device_types=tuple(catalogue.device_type(name, "bf16") for name in ("A100-80", "H100")),
        nodes=tuple(Node(name=name.lower(), devices=(name,)) for name in ("A100-80", "H100")),
        links=(NetworkLink(between=("*", "*"), link=Link(bytes_per_s=12.5e9)),),
    )
    config = LLAMA | {"num_hidden_layers": 4, "vocab_size": 32000}
    found = profile(config, ["A100-80", "H100"], sequence_length=1024, micro_batches=(1,), tp=(1,))
    assert sanity(found, cluster) == ()
    assert estimate.WARNING in plan(found, cluster, Job(global_batch=8)).warnings


# What is trained ----------------------------------------------------------------------------------------------------


def test_a_frozen_block_runs_backward_in_about_the_time_of_forward() -> None:
    """No product for weights: 0.9 to 1.3 of forward, where training takes about 2."""
    frozen, trained = small(frozen=("block",)), small()
    ratio = cell(frozen, "block").backward_s / cell(frozen, "block").forward_s
    assert 0.9 < ratio < 1.3
    assert 1.8 < cell(trained, "block").backward_s / cell(trained, "block").forward_s < 2.3
    assert not frozen.kind_of(1).trainable
    assert cell(frozen, "block").update_s == 0 < cell(trained, "block").update_s


def test_nothing_flows_back_into_a_frozen_beginning() -> None:
    """LLaVA's tower frozen: no backward pass and nothing kept before the projector, all of it from there on."""
    found = small(LLAVA, frozen=("vision",), images=Images())
    for kind in ("vision-embedding", "vision-block", "vision-last"):
        assert cell(found, kind).forward_s > 0
        assert (cell(found, kind).backward_s, cell(found, kind).activation_bytes) == (0, 0)
    assert min(cell(found, kind).backward_s for kind in ("projector", "embedding", "block", "head")) > 0
    note = "no gradients reach vision-embedding, vision-block, vision-last: no backward pass, nothing kept for it"
    assert note in found.conditions.notes


def test_a_frozen_end_still_hands_gradients_back() -> None:
    """Only the projector trained: everything behind it runs backward once, without weights."""
    found = small(LLAVA, frozen=("vision", "embedding", "block", "head"))
    trainable = [kind.name for kind in found.kinds if kind.trainable]
    assert trainable == ["projector"]
    assert cell(found, "block").backward_s > 0.9 * cell(found, "block").forward_s


def test_adapters_are_counted() -> None:
    """Rank 16 beside queries and values of Llama-3-8B: 32 x 16 x (4096 + 4096 + 4096 + 1024) = 6,815,744."""
    found = small(lora=16)
    assert found.parameters == 8_030_261_248 + 6_815_744
    assert "LoRA of rank 16 on q, v: 6815744 trained parameters" in found.conditions.notes
    assert [kind.trained for kind in found.kinds] == [0, 6_815_744 // 32, 0]
    assert cell(found, "embedding").backward_s == 0
    assert cell(found, "block").backward_s < 0.7 * cell(small(), "block").backward_s
    assert 0 < cell(found, "block").update_s < 0.02 * cell(small(), "block").update_s + 30e-6


def test_adapters_with_a_part_that_is_trained() -> None:
    """Naming what is frozen leaves the rest trained; the blocks are frozen beside their adapters all the same."""
    found = small(LLAVA, lora=Lora(rank=8, targets=("q", "k", "v", "o")), frozen=("vision", "embedding", "head"))
    trained = {kind.name: kind.trained for kind in found.kinds if kind.trained}
    assert trained == {"projector": found.kind_of(25).parameters, "block": 8 * 4 * (4096 + 4096)}


def test_flop_counts_leave_out_what_a_token_does_not_meet() -> None:
    """Mixtral meets 12,879,925,248 of its parameters; a tower of 577 tokens beside 2048 counts for its share."""
    assert small(MIXTRAL).active_parameters == 12_879_925_248
    block = small(LLAVA).kind_of(1)
    assert block.active == block.parameters * 577 // 2048


def test_ranks_divide_adapters_with_their_matrix() -> None:
    """At tp 2, 16 x (4096 + 2048) for queries and 16 x (4096 + 512) for values: the narrow side is on every rank."""
    whole, half = small(lora=16).kind_of(1), small().kind_of(1)
    assert whole.shard(2) - half.shard(2) == 16 * (4096 + 2048) + 16 * (4096 + 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frozen": ("tower",)}, "frozen: 'tower' is not among vision, projector, embedding, block, head, all"),
        ({"frozen": ("all",)}, "frozen: all leaves nothing to train"),
        ({"config": GPT2, "frozen": ("embedding",)}, "frozen: embedding and head share a matrix"),
        ({"lora": 0}, "lora: rank is 0, expected at least 1"),
        ({"dtype": "float16"}, "dtype: 'float16' is not among fp32, tf32, fp16, bf16, fp8"),
        ({"devices": ["V100-32-SXM"]}, "dtype: V100-32-SXM has no published bf16 rate, it has fp32, fp16"),
        ({"devices": ["A100"]}, "device: 'A100' is not among the"),
        ({"devices": []}, "devices: [], expected a list of names such as"),
        ({"devices": "T4"}, "devices: 'T4', expected a list of names such as"),
        ({"devices": ["T4", "T4"], "dtype": "fp16"}, "devices: 'T4' is given twice"),
        ({"devices": ["=T4"], "dtype": "fp16"}, "devices: '=T4' is not NAME or LABEL=NAME"),
        ({"devices": ["T4="], "dtype": "fp16"}, "devices: 'T4=' is not NAME or LABEL=NAME"),
        ({"attention": "sdpa"}, "attention: 'sdpa' is not among flash, eager, fused-softmax"),
        ({"sequence_length": 0}, "sequence_length: [0], expected whole numbers of at least 1"),
        ({"micro_batches": ()}, "micro_batches: (), expected whole numbers of at least 1"),
        ({"tp": (0,)}, "tp: (0,), expected whole numbers of at least 1"),
    ],
)
def test_bad_arguments_are_one_error(changes: dict[str, Any], message: str) -> None:
    """What is wrong and what would be right."""
    config, devices = changes.pop("config", LLAMA), changes.pop("devices", ["A100-80-SXM"])
    with pytest.raises(ValueError) as error:
        small(config, devices, **changes)
    assert str(error.value).startswith(message)


def test_adapters_need_a_matrix_to_stand_beside() -> None:
    """GPT-2 has no gate; a misspelt matrix is named."""
    with pytest.raises(ValueError, match="lora: no matrix of a gpt2 block is among gate"):
        profile(GPT2, ["T4"], sequence_length=512, dtype="fp16", lora=Lora(targets=("gate",)))
    with pytest.raises(ValueError, match="lora: target 'query' is not among q, k, v, o, gate, up, down"):
        Lora(targets=("query",))


# Calibration --------------------------------------------------------------------------------------------------------


def test_a_calibrated_profile_predicts_what_was_measured() -> None:
    """All times x one factor, bytes untouched; the warning and the conditions say so."""
    rough = small(devices=("A100-80-SXM", "H100-SXM"))
    run = Run(device="A100-80-SXM", micro_batch=2)
    found = small(devices=("A100-80-SXM", "H100-SXM"), measured_tokens_per_s=3000, measured_on=run)
    assert tokens_per_s(found, run) == pytest.approx(3000)
    factor = tokens_per_s(rough, run) / 3000
    for before, after in zip(rough.cells, found.cells, strict=True):
        assert after.forward_s == pytest.approx(factor * before.forward_s)
        assert after.update_s == pytest.approx(factor * before.update_s)
        assert after.activation_bytes == before.activation_bytes
    where = "3000 tokens/s measured on 1 x A100-80-SXM, micro-batch 2"
    assert found.warnings[0] == f"{estimate.WARNING}; scaled to {where}"
    assert found.conditions.notes[-1].endswith(f"so that the estimate meets {where}")


def test_several_measurements_scale_each_their_device() -> None:
    """Everywhere, ratios between devices stay; not everywhere, each device meets its own number."""
    rough = small(devices=("A100-80-SXM", "H100-SXM"))
    runs = Run(device="A100-80-SXM"), Run(device="H100-SXM")
    ratio = tokens_per_s(rough, runs[1]) / tokens_per_s(rough, runs[0])
    both = calibrated(rough, 3000, runs[0])
    assert tokens_per_s(both, runs[1]) == pytest.approx(3000 * ratio)
    each = calibrated(calibrated(rough, 3000, runs[0], everywhere=False), 8000, runs[1], everywhere=False)
    assert [tokens_per_s(each, run) for run in runs] == pytest.approx([3000, 8000])
    assert "3000 tokens/s" in each.warnings[0]
    assert "8000 tokens/s" in each.warnings[0]


def test_throughput_of_a_run() -> None:
    """One device: m b samples in m (F + B) + update. Two stages: (m + 1) (F + B) / 2 + update / 2."""
    found = small()
    costs = found.layer_costs("A100-80-SXM", 1, 2)
    assert costs is not None
    once, update = float(costs.forward_s.sum() + costs.backward_s.sum()), float(costs.update_s.sum())
    assert tokens_per_s(found, Run(num_micro_batches=4)) == pytest.approx(4 * 2 * 2048 / (4 * once + update))
    pair = Run(num_micro_batches=4, stages=2, pipelines=3)
    assert tokens_per_s(found, pair) == pytest.approx(3 * 4 * 2 * 2048 / (5 * once / 2 + update / 2))
    again = Run(num_micro_batches=4, recompute=True)
    more = once + float(costs.forward_s.sum())
    assert tokens_per_s(found, again) == pytest.approx(4 * 2 * 2048 / (4 * more + update))


@pytest.mark.parametrize(
    ("tokens", "run", "message"),
    [
        (0, Run(), "measured_tokens_per_s: 0, expected a number above 0"),
        (3e6, Run(), "measured_tokens_per_s: 3e\\+06 is .* times the estimate of"),
        (10, Run(), "measured_tokens_per_s: 10 is .* times the estimate of"),
        (3000, Run(device="T4"), "measured_on: tp 1 on 'T4' is not in the profile"),
        (3000, Run(micro_batch=16), "measured_on: micro_batch 16 is not between 1 and 2, those of the profile"),
    ],
)
def test_a_measurement_that_cannot_be_is_an_error(tokens: float, run: Run, message: str) -> None:
    """Not positive, ten times off (a unit, or a whole cluster), or of a run that the profile does not hold."""
    with pytest.raises(ValueError, match=message):
        calibrated(small(), tokens, run)


def test_runs_are_positive() -> None:
    """No run on no devices."""
    with pytest.raises(ValueError, match="measured_on: stages is 0, expected at least 1"):
        Run(stages=0)


# Beside measurements ------------------------------------------------------------------------------------------------

needs_data = pytest.mark.skipif(
    not all((common.data_folder() / name).is_dir() for name in ("sailor", "aceso")),
    reason=f"no measurements in {common.data_folder()} (set HPP_DATA)",
)


def test_configs_of_the_measured_models_have_their_parameters() -> None:
    """Sailor's block sizes: OPT-350 12,596,224, GPT-Neo 78,676,480, its Llama 268,496,896, OPT-30 616,655,872."""
    sizes = {"OPT-350": 12_596_224, "GPT-Neo-2.7": 78_676_480, "LLAMA-3-8": 268_496_896, "OPT-30": 616_655_872}
    for name, parameters in sizes.items():
        found: Architecture = read(benchmark.MODELS[name].config)
        assert found.layers[1].parameters == parameters


@needs_data
def test_times_are_near_those_measured() -> None:
    """Layers that nothing was fitted to are 8 % off on average at most, those fitted to 12 %, a step 30 % at worst."""
    rows = [row for row in benchmark.comparable(benchmark.measurements()) if row.kind != "embedding"]
    halves = benchmark.halves(rows)
    errors = {half: benchmark.errors([row for row in rows if halves[row.pair] == half]) for half in halves.values()}
    assert (benchmark.mean(errors["held out"], abs) or 1) < 0.08
    assert (benchmark.mean(errors["fitted"], abs) or 1) < 0.12
    assert max(abs(guess / truth - 1) for guess, truth in benchmark.steps(rows).values()) < 0.30


@needs_data
def test_bytes_kept_are_near_those_measured() -> None:
    """Sailor's blocks within 6 %. Aceso counts the scores once more, before the softmax: within 4 % without them."""
    for row in benchmark.comparable(benchmark.measurements()):
        if row.kind == "block":
            _, _, guess = row.estimated()
            found = next(each for each in benchmark.layers(row.model) if each.kind == "block")
            assert found.attention is not None
            twice = 2 * row.micro_batch * found.attention.heads * 2048**2 if row.source == "Aceso" else 0
            assert guess / (row.activation_bytes - twice) == pytest.approx(1, abs=0.04 if twice else 0.06)
