"""Configs as published become descriptions, with what they leave out filled in; unsupported options are refused."""

import copy
from typing import Any

import pytest

from parallel.description import Activation, DecoderDescription, ResidualKind
from parallel.errors import ConfigError, UnsupportedModelError
from parallel.families.registry import FAMILIES, describe_config
from parallel.families.slopes import alibi_slopes, mpt_slopes

LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
_SLIDING_LAST = ["full_attention"] * 3 + ["sliding_attention"]
GPT_SIZES: dict[str, Any] = {"vocab_size": 320, "n_embd": 64, "n_layer": 4, "n_head": 8}
_REQUIRED: dict[str, dict[str, Any]] = {"gptj": {"rotary_dim": 8}, "deepseek_v2": {"num_experts_per_tok": 6}}


def _describe(model_type: str, **values: Any) -> DecoderDescription:
    sizes = GPT_SIZES if model_type in ("gpt2", "gptj") else LLAMA_SIZES
    return describe_config({"model_type": model_type, **sizes, **values}, source="test")


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"gemma3"}))
def test_sizes_alone_make_a_model(model_type: str) -> None:
    description = _describe(model_type, **_REQUIRED.get(model_type, {}))
    assert description.family == model_type
    assert (description.num_layers, description.num_heads, description.hidden_size) == (4, 8, 64)


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"internlm2", "baichuan"}))
def test_what_a_config_leaves_out_is_what_transformers_fills_in(model_type: str) -> None:
    """Null is left out, too."""
    import transformers

    sizes = GPT_SIZES if model_type in ("gpt2", "gptj") else {**LLAMA_SIZES, "num_key_value_heads": 4}
    given = {**sizes, **_REQUIRED.get(model_type, {})}
    given.pop("max_position_embeddings", None)
    null = {**given, "max_position_embeddings": None}
    if model_type == "gemma3":
        given, null = {"text_config": given}, {"text_config": null}
    filled_in = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(given)).to_dict()
    expected = describe_config(filled_in, source="test")
    for config in (given, null):
        assert describe_config({"model_type": model_type, **config}, source="test") == expected


@pytest.mark.parametrize("activation", [{"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}, {}])
def test_first_gemma_means_tanh_whatever_it_says(activation: dict[str, str]) -> None:
    assert _describe("gemma", **activation).activation is Activation.GELU_TANH


def test_gemma2_fills_in_what_its_config_leaves_out() -> None:
    description = _describe("gemma2")
    assert (description.attention_soft_cap, description.logit_soft_cap) == (50.0, 30.0)
    assert description.sliding_windows == (4096, None, 4096, None)
    assert description.attention_scale == 256**-0.5
    assert description.tie_embeddings
    uncapped = _describe("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_soft_cap, uncapped.logit_soft_cap) == (None, None)


def test_newer_of_two_activation_fields_counts() -> None:
    description = _describe("gemma2", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh")
    assert description.activation is Activation.GELU_TANH


@pytest.mark.parametrize(
    ("model_type", "name", "default"),
    [
        ("opt", "activation_function", Activation.RELU),
        ("gpt2", "activation_function", Activation.GELU_TANH),
        ("gptj", "activation_function", Activation.GELU_TANH),
        ("falcon", "activation", Activation.GELU),
    ],
)
def test_activation_is_what_the_field_of_the_family_says(model_type: str, name: str, default: Activation) -> None:
    required = _REQUIRED.get(model_type, {})
    assert _describe(model_type, **required, hidden_act="silu").activation is default
    assert _describe(model_type, **required, hidden_act="relu", **{name: "silu"}).activation is Activation.SILU


def test_context_of_command_r_is_the_one_that_is_served() -> None:
    assert _describe("cohere", model_max_length=131072).max_context == 131072
    assert _describe("cohere").max_context == 256


def test_gemma3_of_the_hub_has_its_text_model_nested() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 8,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "model_type": "gemma3_text",
    }
    description = describe_config({"model_type": "gemma3", "text_config": text}, source="test")
    assert description.family == "gemma3"
    assert (description.num_heads, description.num_kv_heads, description.head_dim) == (8, 4, 256)
    assert (description.vocab_size, description.max_context) == (262208, 131072)
    assert description.sliding_windows == (1024,) * 5 + (None,) + (1024,) * 2
    sliding, full = description.rotaries[0], description.rotaries[5]
    assert sliding is not None
    assert full is not None
    assert (sliding.theta, sliding.scaling) == (10_000.0, None)
    assert full.theta == 1_000_000.0
    assert full.scaling is not None


def test_quantized_gemma3_of_the_hub_is_refused_as_its_text_model_is() -> None:
    packing = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    for config in ({"text_config": text, **packing}, {"text_config": {**text, **packing}}):
        with pytest.raises(UnsupportedModelError, match="test: quantization_config has method 'gptq'"):
            describe_config({"model_type": "gemma3", **config}, source="test")


def test_old_and_new_rotary_fields_of_gemma3_agree() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = _describe("gemma3_text", rope_theta=5000.0, rope_local_base_freq=200.0, rope_scaling=scaling)
    kinds = {
        "full_attention": {**scaling, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
    }
    assert old == _describe("gemma3_text", rope_parameters=kinds)


@pytest.mark.parametrize("values", [{}, {"rope_theta": 5000.0}])
@pytest.mark.parametrize("sliding", [{}, {"sliding_attention": {"rope_type": "default"}}])
def test_layers_of_gemma3_that_slide_have_the_base_that_is_theirs(
    sliding: dict[str, Any], values: dict[str, Any]
) -> None:
    kinds = {**sliding, "full_attention": {"rope_theta": 7000.0}}
    description = _describe(
        "gemma3_text", rope_parameters=kinds, rope_local_base_freq=200.0, layer_types=_SLIDING_LAST, **values
    )
    assert [rotary.theta for rotary in description.rotaries if rotary is not None] == [7000.0] * 3 + [200.0]


@pytest.mark.parametrize(
    ("values", "theta"),
    [
        ({}, 10_000.0),
        ({"rope_theta": 500.0}, 10_000.0),
        ({"rotary_emb_base": 20_000, "rope_theta": 500.0}, 20_000.0),
        ({"rotary_emb_base": 20_000, "rope_parameters": {"rope_theta": 300.0}}, 300.0),
    ],
)
def test_base_of_gpt_neox_is_read_as_transformers_does(values: dict[str, Any], theta: float) -> None:
    import transformers

    sizes = {"num_attention_heads": 8, "hidden_size": 64}
    # a copy, for transformers fills it in
    original = transformers.AutoConfig.for_model("gpt_neox", **sizes, **copy.deepcopy(values))
    for config in (values, original.to_dict()):
        rotary = _describe("gpt_neox", **{name: config[name] for name in config if "ro" in name}).rotaries[0]
        assert rotary is not None
        assert (rotary.theta, rotary.dim) == (theta, 2)
    assert original.rope_parameters["rope_theta"] == theta


@pytest.mark.parametrize(
    ("model_type", "values", "dim"),
    [
        ("phi", {}, 4),
        ("phi", {"partial_rotary_factor": 0.25}, 2),
        ("phi3", {}, 8),
        ("phi3", {"partial_rotary_factor": 0.75}, 6),
        ("gpt_neox", {}, 2),
        ("gpt_neox", {"rotary_pct": 1.0}, 8),
        ("gpt_neox", {"rotary_pct": 1.0, "partial_rotary_factor": 0.5}, 8),
        ("gpt_neox", {"rotary_pct": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}}, 4),
        ("stablelm", {}, 2),
        ("stablelm", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}, 4),
        ("glm4", {"head_dim": 8}, 4),
        ("gptj", {"rotary_dim": 6}, 6),
        ("gptj", {"n_embd": 1024}, 64),
    ],
)
def test_heads_are_rotated_in_part(model_type: str, values: dict[str, Any], dim: int) -> None:
    rotary = _describe(model_type, **values).rotaries[0]
    assert rotary is not None
    assert rotary.dim == dim


def test_long_phi3_of_the_hub_is_read() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for kind in ("su", "longrope"):
        description = _describe(
            "phi3",
            rope_scaling={"type": kind, **factors},
            original_max_position_embeddings=64,
            rope_theta=10000.0,
        )
        assert description.max_context == 256


@pytest.mark.parametrize(
    ("values", "num_kv_heads", "residual"),
    [
        ({}, 1, ResidualKind.PARALLEL_ONE_NORM),
        ({"new_decoder_architecture": True, "num_kv_heads": 4}, 4, ResidualKind.PARALLEL),
        ({"new_decoder_architecture": True, "n_head_kv": 2}, 2, ResidualKind.PARALLEL),
        (
            {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
            4,
            ResidualKind.PARALLEL_ONE_NORM,
        ),
        ({"multi_query": False, "parallel_attn": False, "alibi": True}, 8, ResidualKind.SEQUENTIAL),
        ({"parallel_attn": None}, 1, ResidualKind.SEQUENTIAL),
        ({"multi_query": None}, 8, ResidualKind.PARALLEL_ONE_NORM),
        ({"num_kv_heads": 8}, 1, ResidualKind.PARALLEL_ONE_NORM),  # as the 7B model has it
    ],
)
def test_falcon_layouts(values: dict[str, Any], num_kv_heads: int, residual: ResidualKind) -> None:
    description = _describe("falcon", **values)
    assert (description.num_kv_heads, description.residual) == (num_kv_heads, residual)
    assert (description.alibi is None) is (description.rotaries[0] is not None)


def test_bloom_of_the_hub_names_its_sizes_in_its_own_way() -> None:
    config = {"model_type": "bloom", "vocab_size": 320, "n_embed": 64, "n_layer": 3, "num_attention_heads": 8}
    description = describe_config({**config, "seq_length": 512}, source="test")
    assert (description.hidden_size, description.num_layers, description.num_heads) == (64, 3, 8)
    assert (description.intermediate_size, description.max_context) == (256, 512)


@pytest.mark.parametrize(
    ("model_type", "values", "size"),
    [
        ("bloom", {}, 256),
        ("falcon", {}, 256),
        ("falcon", {"ffn_hidden_size": 100}, 100),
        ("gpt2", {}, 256),
        ("gpt2", {"n_inner": 100}, 100),
        ("gptj", {"rotary_dim": 8}, 256),
        ("gptj", {"rotary_dim": 8, "n_inner": 100}, 100),
        ("mpt", {}, 256),
        ("mpt", {"expansion_ratio": 3}, 192),
    ],
)
def test_mlp_is_four_times_as_wide_unless_it_is_said(model_type: str, values: dict[str, Any], size: int) -> None:
    assert _describe(model_type, intermediate_size=None, **values).intermediate_size == size


@pytest.mark.parametrize(("model_type", "max_context"), [("bloom", 2048), ("mpt", 2048), ("internlm2", 2048)])
def test_context_is_that_of_the_first_models_unless_it_is_said(model_type: str, max_context: int) -> None:
    assert _describe(model_type, max_position_embeddings=None).max_context == max_context


def test_internlm2_has_biases_unless_it_is_said() -> None:
    for values, has_bias in (({}, True), ({"bias": False}, False)):
        description = _describe("internlm2", **values)
        assert (description.qkv_bias, description.output_bias, description.mlp_bias) == (has_bias, has_bias, False)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "cohere2"])
def test_layers_that_slide_may_be_listed(model_type: str) -> None:
    description = _describe(model_type, sliding_window=32, layer_types=_SLIDING_LAST)
    assert description.sliding_windows == (None, None, None, 32)


def test_layers_of_cohere2_that_see_everything_do_not_rotate() -> None:
    description = _describe("cohere2", sliding_window=32)
    assert description.sliding_windows == (32, 32, 32, None)
    assert [rotary is None for rotary in description.rotaries] == [False, False, False, True]


def test_baichuan_is_told_apart_by_its_fields() -> None:
    rotated = _describe("baichuan")
    assert rotated.alibi is None
    assert not rotated.is_head_normalized
    sizes = {key: value for key, value in LLAMA_SIZES.items() if key != "max_position_embeddings"}
    config = {"model_type": "baichuan", **sizes, "model_max_length": 128, "vocab_size": 125696}
    description = describe_config(config, source="test")
    assert description.alibi is not None
    assert (description.max_context, description.rotaries[0]) == (128, None)
    assert description.is_head_normalized


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 40, 71])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    original = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), original, rtol=1e-5, atol=0)
    for bias_max in (8, 4):
        original = -build_mpt_alibi_tensor(num_heads, 2, bias_max)[:, 0, 0]
        torch.testing.assert_close(torch.tensor(mpt_slopes(num_heads, bias_max)), original, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; supported .*: False"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("qwen3", {"is_causal": False}, "is_causal is False; supported in this family: True"),  # an encoder's
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True; supported in this family: False"),
        ("gpt2", {"activation_function": "tanh"}, "hidden_act is 'tanh'; supported: silu"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False; supported in this family: True"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32; supported in this family: 64"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi is False; supported in this family: True"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln is True"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type is 'multiquery_attention'"),
        ("mpt", {"no_bias": False}, "no_bias is False"),
        ("mpt", {"logit_scale": 2.0}, "logit_scale is 2.0"),
        ("mpt", {"norm_type": "RMSNorm"}, "norm_type is 'RMSNorm'; supported in this family: layernorm"),
        ("mpt", {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_type is 'mptglu'"),
        ("mpt", {"attn_config": {"rope": True}}, "rope is True"),
        ("mpt", {"attn_config": {"sliding_window_size": 512}}, "sliding_window_size is 512"),
        ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed in this family: 1.0"),
        ("internlm2", {"rope_scaling": {"type": "mystery"}}, "rope_type is 'mystery'; supported: default"),
    ],
)
def test_unsupported_options_are_refused_by_name(model_type: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"test: {message}"):
        _describe(model_type, **values)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("gemma2", {"sliding_window": None}, "layer_types has 'sliding_attention' but there is no window"),
        ("gemma3", {"text_config": {"hidden_size": 64}}, "text_config.num_hidden_layers is missing"),
        ("gptj", {"rotary_dim": 100}, "rotary dim is 100; allowed: at most head_dim, 8"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0; allowed: a finite number more than 0"),
        ("phi", {"partial_rotary_factor": 3e38}, r"partial_rotary_factor is 3e\+38; allowed: at most 1"),
        (
            "gemma3_text",
            {"rope_scaling": {"factor": 8.0}, "rope_parameters": {"full_attention": {}}},
            "there are rope_scaling and rope_parameters; allowed: one of them",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            "rope_parameters is not by kind of layer; allowed: an object with full_attention and sliding_attention",
        ),
        ("cohere2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries; allowed: num_hidden_layers, 4"),
    ],
)
def test_wrong_fields_are_refused_by_name(model_type: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"test: {message}"):
        _describe(model_type, **values)
