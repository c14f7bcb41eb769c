"""Architectures from configs: the facts of a config give the published parameter count to the last digit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from planner.architecture import FAMILIES, Architecture, Images, read

SIGHT = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
LARGE_CLIP = SIGHT | {"num_attention_heads": 16, "image_size": 336, "patch_size": 14}


def llama(hidden: int, inner: int, depth: int, heads: int, kv: int, vocabulary: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": depth, "vocab_size": vocabulary}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv}
    return {"model_type": "llama", **sizes, **counts, **others}


def gpt2(hidden: int, depth: int, heads: int) -> dict[str, Any]:
    sizes = {"n_embd": hidden, "n_layer": depth, "n_head": heads}
    return {"model_type": "gpt2", **sizes, "n_positions": 1024, "vocab_size": 50257}


def neox(hidden: int, depth: int, heads: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": depth}
    return {"model_type": "gpt_neox", **sizes, "num_attention_heads": heads, "vocab_size": vocabulary}


def opt(hidden: int, depth: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": depth, "num_attention_heads": heads}
    ends = {"vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": hidden}
    return {"model_type": "opt", **sizes, **ends, "do_layer_norm_before": True, **others}


def bloom(hidden: int, depth: int, heads: int) -> dict[str, Any]:
    return {"model_type": "bloom", "hidden_size": hidden, "n_layer": depth, "n_head": heads, "vocab_size": 250880}


def neo(hidden: int, depth: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_layers": depth, "num_heads": heads, "vocab_size": 50257}
    kinds = [[["global", "local"], depth // 2]]
    return {"model_type": "gpt_neo", **sizes, "max_position_embeddings": 2048, "attention_types": kinds}


def deepseek(hidden: int, inner: int, expert: int, depth: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": expert}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    common = {"num_hidden_layers": depth, "num_attention_heads": heads, "moe_layer_freq": 1}
    return {"model_type": "deepseek_v2", **sizes, **latent, **common, **others}


def qwen_vl(hidden: int, inner: int, heads: int, kv: int, vocabulary: int, **others: Any) -> dict[str, Any]:
    vision = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": hidden, "patch_size": 14}
    see = {"vision_config": vision | {"spatial_merge_size": 2, "temporal_patch_size": 2}}
    return llama(hidden, inner, 28, heads, kv, vocabulary, model_type="qwen2_vl", **see, **others)


def qwen25_vl(hidden: int, inner: int, depth: int, heads: int, kv: int, words: int, **others: Any) -> dict[str, Any]:
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": hidden}
    patches = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
    see = {"vision_config": vision | patches | {"fullatt_block_indexes": [7, 15, 23, 31]}}
    return llama(hidden, inner, depth, heads, kv, words, model_type="qwen2_5_vl", **see, **others)


TIED = {"tie_word_embeddings": True}
QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
HF = "the hub's metadata or a count of the loaded model, as public repositories quote it"
SUM = "arithmetic on the config; no published count was found to hold it against"

# Model, parameters, where they are published, and the facts of its config.json.
PUBLISHED: list[tuple[str, int, str, dict[str, Any]]] = [
    # Llama and what is built like it
    ("Llama-2-7b", 6_738_415_616, HF, llama(4096, 11008, 32, 32, 32, 32000)),
    ("Llama-2-13b", 13_015_864_320, HF, llama(5120, 13824, 40, 40, 40, 32000)),
    ("Llama-2-70b", 68_976_648_192, HF, llama(8192, 28672, 80, 64, 8, 32000)),
    ("Meta-Llama-3-8B", 8_030_261_248, HF, llama(4096, 14336, 32, 32, 8, 128256)),
    ("Meta-Llama-3-70B", 70_553_706_496, HF, llama(8192, 28672, 80, 64, 8, 128256)),
    ("Llama-3.2-1B", 1_235_814_400, HF, llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, **TIED)),
    ("SmolLM-135M", 134_515_008, HF, llama(576, 1536, 30, 9, 3, 49152, **TIED)),
    ("SmolLM3-3B", 3_075_098_624, HF, llama(2048, 11008, 36, 16, 4, 128256, model_type="smollm3")),
    ("granite-3.1-2b", 2_533_531_648, HF, llama(2048, 8192, 40, 32, 8, 49155, model_type="granite", **TIED)),
    ("Mistral-7B-v0.1", 7_241_732_096, HF, llama(4096, 14336, 32, 32, 8, 32000, model_type="mistral")),
    ("Qwen2-0.5B", 494_032_768, HF, llama(896, 4864, 24, 14, 2, 151936, model_type="qwen2", **TIED)),
    ("Qwen2-7B", 7_615_616_512, HF, llama(3584, 18944, 28, 28, 4, 152064, model_type="qwen2")),
    ("Qwen2.5-72B", 72_706_203_648, HF, llama(8192, 29568, 80, 64, 8, 152064, model_type="qwen2")),
    ("Qwen3-0.6B", 596_049_920, HF, llama(1024, 3072, 28, 16, 8, 151936, model_type="qwen3", head_dim=128, **TIED)),
    ("Qwen3-8B", 8_190_735_360, HF, llama(4096, 12288, 36, 32, 8, 151936, model_type="qwen3", head_dim=128)),
    ("gemma-2b", 2_506_172_416, HF, llama(2048, 16384, 18, 8, 1, 256000, model_type="gemma", head_dim=256)),
    ("gemma-7b", 8_537_680_896, HF, llama(3072, 24576, 28, 16, 16, 256000, model_type="gemma", head_dim=256)),
    ("gemma-2-9b", 9_241_705_984, HF, llama(3584, 14336, 42, 16, 8, 256000, model_type="gemma2", head_dim=256)),
    ("gemma-3-1b", 999_885_952, HF, llama(1152, 6912, 26, 4, 1, 262144, model_type="gemma3_text", head_dim=256)),
    ("Phi-3-mini-4k", 3_821_079_552, HF, llama(3072, 8192, 32, 32, 32, 32064, model_type="phi3")),
    ("phi-4", 14_659_507_200, HF, llama(5120, 17920, 40, 40, 10, 100352, model_type="phi3")),
    ("OLMo-7B-hf", 6_888_095_744, HF, llama(4096, 11008, 32, 32, 32, 50304, model_type="olmo")),
    ("OLMo-2-1124-7B", 7_298_617_344, HF, llama(4096, 11008, 32, 32, 32, 100352, model_type="olmo2")),
    # experts
    (
        "Mixtral-8x7B",
        46_702_792_704,
        HF,
        llama(4096, 14336, 32, 32, 8, 32000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2),
    ),
    (
        "OLMoE-1B-7B",
        6_919_161_856,
        HF,
        llama(2048, 1024, 16, 16, 16, 50304, model_type="olmoe", num_experts=64, num_experts_per_tok=8),
    ),
    (
        "Qwen1.5-MoE-A2.7B",
        14_315_784_192,
        HF,
        llama(2048, 5632, 24, 16, 16, 151936, model_type="qwen2_moe", num_experts=60, num_experts_per_tok=4,
              moe_intermediate_size=1408, shared_expert_intermediate_size=5632, **QWEN_MOE),
    ),
    (
        "Qwen2-57B-A14B",
        57_408_658_944,
        HF,
        llama(3584, 18944, 28, 28, 4, 151936, model_type="qwen2_moe", num_experts=64, num_experts_per_tok=8,
              moe_intermediate_size=2560, shared_expert_intermediate_size=20480, **QWEN_MOE),
    ),
    (
        "Qwen3-30B-A3B",
        30_532_122_624,
        HF,
        llama(2048, 6144, 48, 32, 4, 151936, model_type="qwen3_moe", head_dim=128, num_experts=128,
              num_experts_per_tok=8, moe_intermediate_size=768, **QWEN_MOE),
    ),
    (
        "deepseek-moe-16b-base",
        16_375_728_128,
        HF,
        llama(2048, 10944, 28, 16, 16, 102400, model_type="deepseek", moe_intermediate_size=1408, n_shared_experts=2,
              n_routed_experts=64, num_experts_per_tok=6, first_k_dense_replace=1, moe_layer_freq=1),
    ),
    (
        "DeepSeek-V2-Lite",
        15_706_484_224,
        HF,
        deepseek(2048, 10944, 1408, 27, 16, q_lora_rank=None, n_shared_experts=2, n_routed_experts=64,
                 num_experts_per_tok=6, first_k_dense_replace=1, vocab_size=102400, topk_method="greedy"),
    ),
    (
        "DeepSeek-V2",
        235_741_434_880,
        HF,
        deepseek(5120, 12288, 1536, 60, 128, q_lora_rank=1536, n_shared_experts=2, n_routed_experts=160,
                 num_experts_per_tok=6, first_k_dense_replace=1, vocab_size=102400),
    ),
    (
        "DeepSeek-V3",
        671_026_419_200,
        HF + " (without the multi-token-prediction module)",
        deepseek(7168, 18432, 2048, 61, 128, model_type="deepseek_v3", q_lora_rank=1536, n_shared_experts=1,
                 n_routed_experts=256, num_experts_per_tok=8, first_k_dense_replace=3, vocab_size=129280),
    ),
    (
        "Kimi-K2",
        1_026_408_232_448,
        HF,
        deepseek(7168, 18432, 2048, 61, 64, model_type="kimi_k2", q_lora_rank=1536, n_shared_experts=1,
                 n_routed_experts=384, num_experts_per_tok=8, first_k_dense_replace=1, vocab_size=163840,
                 topk_method="noaux_tc"),
    ),
    (
        "GLM-4.5-Air",
        106_852_245_504,
        HF,
        llama(4096, 10944, 46, 96, 8, 151552, model_type="glm4_moe", head_dim=128, moe_intermediate_size=1408,
              n_shared_experts=1, n_routed_experts=128, num_experts_per_tok=8, first_k_dense_replace=1,
              attention_bias=True, use_qk_norm=False),
    ),
    (
        "gpt-oss-20b",
        20_914_757_184,
        HF,
        llama(2880, 2880, 24, 64, 8, 201088, model_type="gpt_oss", head_dim=64, num_local_experts=32,
              num_experts_per_tok=4, sliding_window=128),
    ),
    # layer norms, biases, learned positions
    ("gpt2", 124_439_808, HF, gpt2(768, 12, 12)),
    ("gpt2-xl", 1_557_611_200, HF, gpt2(1600, 48, 25)),
    ("gpt-neo-125m", 125_198_592, SUM, neo(768, 12, 12)),
    ("gpt-neo-2.7B", 2_651_307_520, HF, neo(2560, 32, 20)),
    ("gpt-j-6b", 6_050_882_784, HF,
     {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400}),
    ("gpt-neox-20b", 20_554_567_680, "its model card", neox(6144, 44, 64, 50432)),
    ("pythia-160m", 162_322_944, "its model card", neox(768, 12, 12, 50304)),
    ("pythia-1.4b", 1_414_647_808, "its model card", neox(2048, 24, 16, 50304)),
    ("pythia-12b", 11_846_072_320, "its model card", neox(5120, 36, 40, 50688)),
    ("opt-125m", 125_239_296, HF, opt(768, 12, 12)),
    ("opt-350m", 331_196_416, HF, opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False)),
    ("opt-6.7b", 6_658_473_984, SUM, opt(4096, 32, 32)),
    ("bloom-560m", 559_214_592, HF, bloom(1024, 24, 16)),
    ("bloom-7b1", 7_069_016_064, HF, bloom(4096, 30, 32)),
    ("bloom", 176_247_271_424, HF, bloom(14336, 70, 112)),
    (
        "falcon-7b",
        7_217_189_760,  # the file holds the embedding twice
        HF,
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
         "multi_query": True, "parallel_attn": True, "vocab_size": 65024, "tie_word_embeddings": False},
    ),
    ("phi-2", 2_779_683_840, HF,
     llama(2560, 10240, 32, 32, 32, 51200, model_type="phi")),
    ("starcoder", 15_517_456_384, HF,
     {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576, "n_positions": 8192,
      "vocab_size": 49152}),
    ("starcoder2-3b", 3_030_371_328, SUM,
     llama(3072, 12288, 30, 24, 2, 49152, model_type="starcoder2", use_bias=True)),
    ("stablelm-3b-4e1t", 2_795_443_200, HF, llama(2560, 6912, 32, 32, 32, 50304, model_type="stablelm")),
    ("c4ai-command-r-v01", 34_980_831_232, SUM, llama(8192, 22528, 40, 64, 64, 256000, model_type="cohere")),
    ("mpt-7b", 6_649_286_656, SUM,
     {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432}),
    # vision tower, projector, decoder
    (
        "llava-1.5-7b-hf",
        7_063_427_072,
        HF,
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064},
         "vision_config": LARGE_CLIP},
    ),
    (
        "llava-v1.6-mistral-7b-hf",
        7_566_747_648,
        SUM,
        {"model_type": "llava_next", "text_config": {"model_type": "mistral", "vocab_size": 32064},
         "vision_config": LARGE_CLIP},
    ),
    (
        "paligemma-3b-pt-224",
        2_923_466_480,
        HF,
        {
            "model_type": "paligemma",
            "text_config": llama(2048, 16384, 18, 8, 1, 257216, model_type="gemma"),
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                              "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
        },
    ),
    ("Qwen2-VL-2B", 2_208_985_600, HF, qwen_vl(1536, 8960, 12, 2, 151936, **TIED)),
    ("Qwen2-VL-7B", 8_291_375_616, HF, qwen_vl(3584, 18944, 28, 4, 152064)),
    ("Qwen2.5-VL-3B", 3_754_622_976, HF, qwen25_vl(2048, 11008, 36, 16, 2, 151936, **TIED)),
    ("Qwen2.5-VL-7B", 8_292_166_656, HF, qwen25_vl(3584, 18944, 28, 28, 4, 152064)),
]
CONFIGS = {name: config for name, _, _, config in PUBLISHED}


def known(name: str, images: Images | None = None) -> Architecture:
    return read(CONFIGS[name], images)


@pytest.mark.parametrize(("name", "parameters", "source", "config"), PUBLISHED, ids=CONFIGS)
def test_parameters_are_the_published_ones(name: str, parameters: int, source: str, config: dict[str, Any]) -> None:
    """The matrices and vectors of the layers add up to the published count exactly."""
    assert read(config).parameters == parameters


def test_every_family_has_a_count() -> None:
    """No reader of a config goes unchecked; all but four (a sum alone) against a published count."""
    assert set(FAMILIES) == {config["model_type"] for config in CONFIGS.values()}
    published = {config["model_type"] for _, _, source, config in PUBLISHED if source != SUM}
    assert set(FAMILIES) - published == {"starcoder2", "cohere", "mpt", "llava_next"}


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("Mixtral-8x7B", 12_879_925_248),  # 46,702,792,704 less 6 of 8 experts of 3 x 4096 x 14336 in 32 blocks
        ("Qwen3-30B-A3B", 3_353_032_704),  # published with the model: 3.3B
        ("DeepSeek-V3", 37_552_297_472),  # published with the model: 37B
    ],
)
def test_a_token_meets_some_of_the_experts(name: str, active: int) -> None:
    """Active parameters leave out the experts that a token is not sent to."""
    assert known(name).active_parameters == active


# Shape of the chain -------------------------------------------------------------------------------------------------


def test_first_blocks_of_a_mixture_are_dense() -> None:
    """GLM-4.5-Air: one dense block, then 45 with experts; two kinds, the frequent one called block."""
    kinds = [layer.kind for layer in known("GLM-4.5-Air").layers]
    assert kinds == ["embedding", "block-dense", *["block"] * 45, "head"]


def test_experts_in_every_second_block() -> None:
    """decoder_sparse_step 2 of 4 blocks: blocks 1 and 3; a listed one stays dense."""
    config = CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 4, "decoder_sparse_step": 2}
    sparse = [layer.mlp.experts > 0 for layer in read(config).layers if layer.mlp]
    assert sparse == [False, True, False, True]
    sparse = [layer.mlp.experts > 0 for layer in read(config | {"mlp_only_layers": [1]}).layers if layer.mlp]
    assert sparse == [False, False, False, True]


def test_windows_make_kinds() -> None:
    """Gemma 2 looks back 4096 tokens in every other block, Gemma 3 in five of six."""
    gemma2 = read(CONFIGS["gemma-2-9b"] | {"sliding_window": 4096})
    assert [layer.kind for layer in gemma2.layers[1:5]] == ["block", "block-global"] * 2
    gemma3 = read(CONFIGS["gemma-3-1b"] | {"sliding_window": 512})
    assert [layer.kind for layer in gemma3.layers].count("block-global") == 4


def test_a_model_that_sees_is_one_chain() -> None:
    """LLaVA: 24 tower blocks on 577 tokens (336 / 14 = 24 squared, and the class), 576 handed to the decoder."""
    layers = known("llava-1.5-7b-hf", Images(per_sample=2)).layers
    assert [layer.part for layer in layers] == ["vision"] * 25 + ["projector", "embedding"] + ["block"] * 32 + ["head"]
    assert {layer.tokens for layer in layers if layer.part == "vision"} == {2 * 577}
    assert [layer.tokens for layer in layers if layer.part == "projector"] == [2 * 576]
    assert {layer.tokens for layer in layers[26:]} == {None}


def test_images_of_any_size() -> None:
    """Qwen2-VL at 224 pixels: 16 x 16 patches in the tower, merged two by two into 64 tokens of the sequence."""
    layers = known("Qwen2-VL-7B", Images(size=224)).layers
    assert layers[0].tokens == 256
    assert next(layer.tokens for layer in layers if layer.part == "projector") == 64


def test_a_tied_head_counts_once() -> None:
    """GPT-2's head is its embedding: 50257 x 768 parameters, once in the count."""
    head = known("gpt2").layers[-1]
    assert head.tied == 50257 * 768
    assert read(CONFIGS["gpt2"] | {"tie_word_embeddings": False}).parameters == 124_439_808 + 50257 * 768


# Tensor parallelism -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_hold_the_whole_layer(name: str, tp: int) -> None:
    """tp ranks together hold at least every parameter, one rank no more than the layer."""
    for layer in {layer.kind: layer for layer in known(name).layers}.values():
        assert layer.parameters <= tp * layer.shard(tp)
        assert layer.shard(tp) <= layer.parameters


def test_shares_of_a_block() -> None:
    """GPT-2 at tp 2: half of every matrix and of column biases; row biases and norms are on both ranks.

    12 h^2 / 2 + (3 h + 4 h) / 2 + 2 h + 4 h with h = 768: 3,538,944 + 2,688 + 4,608.
    """
    assert known("gpt2").layers[1].shard(2) == 3_538_944 + 2_688 + 4_608


def test_ranks_beyond_the_key_value_heads_share_one() -> None:
    """Qwen2-0.5B has 2 key-value heads of width 64: at tp 4 each rank holds one, not half of one."""
    keys = next(each for each in known("Qwen2-0.5B").layers[1].matrices if each.name == "attention.k")
    assert [keys.shape(tp) for tp in (1, 2, 4)] == [(896, 128), (896, 64), (896, 64)]


@pytest.mark.parametrize(
    ("name", "tp", "reason"),
    [
        ("gpt2", 8, "12 attention heads of block"),
        ("falcon-7b", 2, "71 attention heads of block"),
        ("Meta-Llama-3-8B", 8, None),
        ("Qwen2-7B", 4, None),
    ],
)
def test_heads_decide_which_degrees_divide(name: str, tp: int, reason: str | None) -> None:
    """The layer says what does not divide."""
    assert known(name).layers[1].undivided(tp) == reason


# Errors -------------------------------------------------------------------------------------------------------------


def test_an_unknown_architecture_names_file_key_and_the_known_ones(tmp_path: Path) -> None:
    """One error: the file, model_type, what it is, what is known, and the nearest."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "lama"}), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read(path)
    text = str(error.value)
    assert text.startswith(f"{path}: model_type: 'lama' is not among the known architectures: llama, mistral")
    assert text.endswith("did you mean 'llama'?")
    assert all(family in text for family in FAMILIES)


def test_a_missing_model_type() -> None:
    """A config without model_type says so."""
    with pytest.raises(ValueError, match="config: model_type: missing, expected one of the known architectures: llama"):
        read({"hidden_size": 8})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Llama-2-7b", "hidden_size"),
        ("Llama-2-7b", "num_attention_heads"),
        ("gpt2", "n_embd"),
        ("Mixtral-8x7B", "num_local_experts"),
        ("DeepSeek-V2", "kv_lora_rank"),
        ("Qwen3-30B-A3B", "moe_intermediate_size"),
    ],
)
def test_a_missing_key_is_named(name: str, key: str, tmp_path: Path) -> None:
    """One error: file, key (and what others call it), what is expected, the family and the known architectures."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in CONFIGS[name].items() if k != key}), encoding="utf-8")
    with pytest.raises(ValueError, match="missing, expected a whole number of at least 1") as error:
        read(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert key in text
    assert f"(model_type {CONFIGS[name]['model_type']!r}; known architectures: llama, " in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "4096"}, "config: hidden_size: '4096', expected a whole number of at least 1"),
        ({"num_hidden_layers": 0}, "config: num_hidden_layers: 0, expected a whole number of at least 1"),
        ({"vocab_size": True}, "config: vocab_size: True, expected a whole number of at least 1"),
        ({"num_key_value_heads": 5}, "config: num_key_value_heads: 5 does not divide num_attention_heads 32"),
        ({"tie_word_embeddings": "no"}, "config: tie_word_embeddings: 'no', expected true or false"),
        ({"hidden_act": 3}, "config: hidden_act: 3, expected text"),
        ({"attention_dropout": -1}, "config: attention_dropout: -1, expected a number of at least 0"),
        ({"hidden_size": math.nan}, "config: hidden_size: nan, expected a whole number of at least 1"),
        ({"intermediate_size": math.inf}, "config: intermediate_size: inf, expected a whole number of at least 1"),
        ({"num_hidden_layers": 10**9}, "config: num_hidden_layers: 1000000000, expected at most 10000"),
        ({"num_attention_heads": 8192}, "config: num_attention_heads: 8192, expected at most hidden_size, 4096"),
        ({"max_position_embeddings": "x"}, "config: max_position_embeddings: 'x', expected a whole number of at l"),
        ({"model_type": ["llama"]}, "config: model_type: ['llama'], expected text"),
        ({"model_type": "mistral", "sliding_window": "x"}, "config: sliding_window: 'x', expected a whole number"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": "x"}, "config: layer_types: 'x', expected a li"),
        ({"model_type": "gpt_neo", "attention_types": [["x", 1]]}, "config: attention_types: [['x', 1]], expected pa"),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], message: str) -> None:
    """Key, value, and what would be right."""
    with pytest.raises(ValueError) as error:
        read(CONFIGS["Llama-2-7b"] | change)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "config: text_config: missing, expected an object"),
        ({"vision_config": 3}, "config: vision_config: 3, expected an object"),
        ({"text_config": {"model_type": "bert"}}, "config: text_config.model_type: 'bert' is no decoder we know"),
        ({"vision_config": {"model_type": "vit"}}, "config: vision_config.model_type: 'vit', expected clip_vision"),
        ({"text_config": {"model_type": {}}}, "config: text_config.model_type: {}, expected text"),
        (
            {"vision_config": {"model_type": "clip_vision_model", "num_attention_heads": 1024}},
            "config: vision_config: 1024 heads, expected at most its hidden width, 768",
        ),
    ],
)
def test_errors_inside_a_part(change: dict[str, Any], message: str) -> None:
    """The key of a config inside another is written in full."""
    with pytest.raises(ValueError) as error:
        read(CONFIGS["llava-1.5-7b-hf"] | change)
    assert str(error.value).startswith(message)


def test_a_decoder_inside_an_unknown_architecture_is_pointed_to() -> None:
    """A model that is not known may hold a text_config that is."""
    unknown = {"model_type": "gemma3", "text_config": CONFIGS["gemma-3-1b"]}
    with pytest.raises(ValueError, match="its text_config is, and can be estimated as a config of its own"):
        read(unknown)


def test_images_have_at_least_one_patch() -> None:
    """13 pixels are less than one patch of 14."""
    with pytest.raises(ValueError, match="config: images: size 13 is less than one patch of 14 pixels"):
        read(CONFIGS["llava-1.5-7b-hf"], Images(size=13))


def test_defaults_of_a_class_are_told() -> None:
    """A text_config leaves out what equals its class; what was taken from there is noted."""
    notes = known("llava-1.5-7b-hf").notes
    assert "text_config.hidden_size is not in the config, 4096 taken, the default of its class" in notes


def test_too_many_experts_per_token() -> None:
    """A token cannot be sent to more experts than there are."""
    with pytest.raises(ValueError, match="num_experts_per_tok: 9, expected at most num_local_experts, 8"):
        read(CONFIGS["Mixtral-8x7B"] | {"num_experts_per_tok": 9})


@pytest.mark.parametrize(("key", "value"), [("per_sample", 0), ("size", -1)])
def test_images_are_positive(key: str, value: int) -> None:
    """No image of no size."""
    with pytest.raises(ValueError, match=f"images: {key} is {value}, expected at least 1"):
        Images(**{key: value})
