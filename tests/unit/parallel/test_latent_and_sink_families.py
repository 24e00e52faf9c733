"""DeepSeek and gpt-oss configs as they are published become descriptions; what is not supported is refused."""

from typing import Any

import pytest

from parallel.description import ClampedGate, DecoderDescription, LatentKV, MoeDescription, RouterScore
from parallel.errors import ConfigError, UnsupportedModelError
from parallel.families.registry import describe_config
from parallel.position_description import RotaryDescription, YarnScaling

# https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def _describe(config: dict[str, Any], **changes: Any) -> DecoderDescription:
    return describe_config(config | changes, source="test")


def test_published_deepseek_v3_is_read() -> None:
    description = _describe(DEEPSEEK_V3)
    latent = LatentKV(query_rank=1536, rank=512, plain_dim=128, rotary_dim=64, value_dim=128, norm_eps=1e-6)
    assert description.latent_kv == latent
    assert (description.num_kv_heads, description.head_dim, description.max_context) == (1, 192, 163840)
    scaling = YarnScaling(factor=40.0, original_context=4096, attention_factor=1.0)
    rotary = RotaryDescription(dim=64, theta=10000.0, scaling=scaling, is_interleaved=True)
    assert description.rotaries == (rotary,) * 61
    assert description.attention_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    assert description.moe == MoeDescription(
        num_experts=256,
        num_chosen=8,
        intermediate_size=2048,
        score=RouterScore.SIGMOID,
        is_normalized=True,
        weight_multiplier=2.5,
        num_groups=8,
        num_chosen_groups=4,
        choice_bias=True,
        shared_intermediate_size=2048,
        dense_layers=frozenset({0, 1, 2}),
    )


def test_experts_of_deepseek_v2_lite_are_read() -> None:
    experts = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
    routing = {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "n_group": 1}
    changes = {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "quantization_config": None}
    description = _describe(DEEPSEEK_V3, **changes, **experts, **routing, routed_scaling_factor=1.0)
    assert description.latent_kv == _describe(DEEPSEEK_V3).latent_kv
    assert description.moe == MoeDescription(
        num_experts=64,
        num_chosen=6,
        intermediate_size=1408,
        shared_intermediate_size=2816,
        dense_layers=frozenset({0}),
    )


def test_published_gpt_oss_is_read() -> None:
    description = _describe(GPT_OSS)
    assert description.has_attention_sinks
    assert description.qkv_bias
    assert description.output_bias
    assert description.sliding_windows == (128, None) * 12
    assert description.max_context == 131072
    rotary = description.rotaries[0]
    assert rotary is not None
    assert isinstance(rotary.scaling, YarnScaling)
    assert (rotary.dim, rotary.theta, rotary.scaling.truncate) == (64, 150000.0, False)
    assert description.moe == MoeDescription(
        num_experts=32,
        num_chosen=4,
        intermediate_size=2880,
        score=RouterScore.SOFTMAX_OF_CHOSEN,
        router_bias=True,
        expert_bias=True,
        clamped_gate=ClampedGate(alpha=1.702, limit=7.0),
    )


def test_gpt_oss_fills_in_what_its_config_leaves_out() -> None:
    kept = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    description = _describe({name: GPT_OSS[name] for name in kept}, num_local_experts=32)
    assert description == _describe(GPT_OSS)


def test_layers_of_gpt_oss_that_slide_may_be_listed() -> None:
    kinds = ["full_attention"] * 23 + ["sliding_attention"]
    assert _describe(GPT_OSS, layer_types=kinds).sliding_windows == (None,) * 23 + (128,)


def test_the_scale_grows_with_scaled_positions_only() -> None:
    plain = _describe(DEEPSEEK_V3, rope_scaling=None)
    assert plain.attention_scale == 192**-0.5
    unscaled = _describe(DEEPSEEK_V3, rope_scaling=None, rope_parameters={"mscale_all_dim": 1.0, "factor": 40.0})
    assert unscaled.attention_scale == 192**-0.5


def test_scaled_positions_need_not_change_the_scale() -> None:
    scaling = {name: value for name, value in DEEPSEEK_V3["rope_scaling"].items() if "mscale" not in name}
    assert _describe(DEEPSEEK_V3, rope_scaling=scaling).attention_scale == 192**-0.5
    zero = {**scaling, "mscale": 1.0, "mscale_all_dim": 0}
    assert _describe(DEEPSEEK_V3, rope_scaling=zero).attention_scale == 192**-0.5


def test_any_scaling_makes_queries_and_keys_of_deepseek_longer() -> None:
    linear = {"type": "linear", "factor": 40.0, "mscale_all_dim": 1.0}
    llama3 = {**linear, "type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for scaling in (linear, llama3):
        description = _describe(DEEPSEEK_V3, rope_scaling=scaling)
        assert description.attention_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)


def test_an_empty_older_rotation_says_nothing() -> None:
    assert _describe(GPT_OSS, rope_scaling={}) == _describe(GPT_OSS, rope_scaling=None) == _describe(GPT_OSS)
    newer = {**DEEPSEEK_V3["rope_scaling"], "rope_theta": 10000}
    assert _describe(DEEPSEEK_V3, rope_scaling={}, rope_parameters=newer) == _describe(DEEPSEEK_V3)


def test_deepseek_v2_rotates_neighbours_whatever_it_says() -> None:
    plain = {**DEEPSEEK_V3, "quantization_config": None, "rope_interleave": False}
    routing = {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}
    for config, is_interleaved in ((plain, False), (plain | routing | {"model_type": "deepseek_v2"}, True)):
        rotary = _describe(config).rotaries[0]
        assert rotary is not None
        assert rotary.is_interleaved is is_interleaved


def test_null_says_no() -> None:
    description = _describe(DEEPSEEK_V3, norm_topk_prob=None, rope_interleave=None)
    moe, rotary = description.moe, description.rotaries[0]
    assert moe is not None
    assert rotary is not None
    assert (moe.is_normalized, rotary.is_interleaved) == (False, False)


def test_all_layers_may_have_experts_and_several_shared_ones() -> None:
    moe = _describe(DEEPSEEK_V3, first_k_dense_replace=0, n_shared_experts=2).moe
    assert moe is not None
    assert (moe.dense_layers, moe.shared_intermediate_size) == (frozenset(), 4096)


def test_queries_need_no_latent() -> None:
    latent = _describe(DEEPSEEK_V3, q_lora_rank=None).latent_kv
    assert latent is not None
    assert latent.query_rank is None


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported in this family: 'sigmoid'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method is 'greedy'; supported in this family: 'noaux_tc'"),
        (
            DEEPSEEK_V3 | {"model_type": "deepseek_v2"},
            {"topk_method": "group_limited_greedy"},
            "topk_method is 'group_limited_greedy'; supported in this family: 'greedy'",
        ),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2; supported in this family: 1"),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"weight_block_size is \[64, 64\]; supported in this family: \[128, 128\]",
        ),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config has method 'awq'; supported: weights not quantized, or 'fp8' in deepseek_v3, ",
        ),
        (
            GPT_OSS,
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config has method 'fp8'; supported: .*, or 'fp8' in deepseek_v3, 'mxfp4' in gpt_oss",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], changes: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"test: {message}"):
        _describe(config, **changes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DEEPSEEK_V3, {"kv_lora_rank": 0}, "kv_lora_rank is 0; allowed: an integer of at least 1"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 7}, "rotary dim is 7; allowed: an even number"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 2**15}, "first_k_dense_replace is 32768; allowed: .* at most 16384"),
        (GPT_OSS, {"sliding_window": None}, "layer_types has 'sliding_attention' but there is no window"),
    ],
)
def test_wrong_fields_are_refused_by_name(config: dict[str, Any], changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"test: {message}"):
        _describe(config, **changes)
