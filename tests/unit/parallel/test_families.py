"""Configs of the Llama-like families, old and new, become descriptions; wrong ones are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from parallel.description import DecoderDescription
from parallel.errors import ConfigError, UnsupportedModelError
from parallel.families.registry import describe_config, describe_model, family_of
from parallel.position_description import RotaryDescription, YarnScaling

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


YARN = {"rope_type": "yarn", "factor": 2.0}


def _describe(model_type: str = "llama", **values: Any) -> DecoderDescription:
    return describe_config({"model_type": model_type, **SIZES, **values}, source="test")


def test_sizes_are_read() -> None:
    description = _describe()

    assert description.family == "llama"
    assert (description.vocab_size, description.hidden_size, description.intermediate_size) == (320, 64, 96)
    assert (description.num_layers, description.num_heads, description.num_kv_heads) == (4, 8, 2)
    assert (description.head_dim, description.max_context, description.norm_eps) == (8, 256, 1e-5)
    assert description.rotaries == (RotaryDescription(dim=8, theta=10000.0),) * 4


def test_the_largest_size_is_one_that_messages_have_room_for() -> None:
    assert _describe(vocab_size=2**31 - 1).vocab_size == 2**31 - 1


def test_old_llama_without_kv_heads_is_multi_head() -> None:
    assert _describe(num_key_value_heads=None).num_kv_heads == 8


@pytest.mark.parametrize(("model_type", "head_dim"), [("llama", 8), ("mistral", 8), ("qwen2", 8), ("qwen3", 128)])
def test_head_dim_is_derived_when_absent(model_type: str, head_dim: int) -> None:
    assert _describe(model_type).head_dim == head_dim
    assert _describe(model_type, head_dim=24).head_dim == 24


@pytest.mark.parametrize(
    ("model_type", "values", "qkv", "output", "mlp"),
    [
        ("llama", {}, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False),
        ("llama", {"mlp_bias": True}, False, False, True),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, False, False, False),
        ("qwen2", {}, True, False, False),
        ("qwen3", {}, False, False, False),
        ("qwen3", {"attention_bias": True}, True, True, False),
    ],
)
def test_biases_follow_the_family(model_type: str, values: dict[str, Any], qkv: bool, output: bool, mlp: bool) -> None:
    description = _describe(model_type, **values)
    assert (description.qkv_bias, description.output_bias, description.mlp_bias) == (qkv, output, mlp)


@pytest.mark.parametrize(("model_type", "has_norm"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_only_qwen3_norms_queries_and_keys(model_type: str, has_norm: bool) -> None:
    assert (_describe(model_type).qk_norm is not None) is has_norm


@pytest.mark.parametrize(
    ("model_type", "values", "windows"),
    [
        ("llama", {"sliding_window": 32}, [None] * 4),
        ("mistral", {"sliding_window": 32}, [32] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mistral", {}, [4096] * 4),  # what the class of transformers fills in
        ("ministral", {}, [4096] * 4),
        ("mistral", {"sliding_window": 10**12}, [2**31 - 1] * 4),  # as good as none
        *(
            (name, {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"] * 2}, [None, 32] * 2)
            for name in ("mistral", "ministral")  # which are the same, so given
        ),
        ("qwen2", {"sliding_window": 32, "max_window_layers": 1}, [None] * 4),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}, [None] * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, [None, 32, 32, 32]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, [32] * 4),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 9}, [None] * 4),
        ("qwen3", {"use_sliding_window": True, "num_hidden_layers": 30}, [None] * 28 + [4096] * 2),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 32,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [32, None, 32, None],
        ),
        ("qwen2", {"layer_types": ["full_attention"] * 4, "max_window_layers": 0}, [None] * 4),
    ],
)
def test_sliding_windows_are_per_layer(model_type: str, values: dict[str, Any], windows: list[int | None]) -> None:
    assert list(_describe(model_type, **values).sliding_windows) == windows


def test_first_llamas_name_the_context_in_their_own_way() -> None:
    assert _describe(max_position_embeddings=None, max_sequence_length=512).max_context == 512
    assert _describe(max_sequence_length=512).max_context == 256


@pytest.mark.parametrize(("value", "is_tied"), [(True, True), (False, False), (None, False)])
def test_tied_embeddings(value: bool | None, is_tied: bool) -> None:
    assert _describe(tie_word_embeddings=value).tie_embeddings is is_tied


def test_decoder_names_become_names_of_the_checkpoint() -> None:
    family = family_of(_describe("qwen3"))

    assert family.tensor_name("embedding.weight") == "model.embed_tokens.weight"
    assert family.tensor_name("head.weight") == "lm_head.weight"
    assert family.tensor_name("layers.11.attention.q_norm.weight") == "model.layers.11.self_attn.q_norm.weight"
    assert family.tensor_name("layers.0.attention.output.bias") == "model.layers.0.self_attn.o_proj.bias"
    assert family.tensor_name("layers.3.mlp_norm.weight") == "model.layers.3.post_attention_layernorm.weight"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": None}, "test: vocab_size is missing; allowed: an integer"),
        ({"hidden_size": "64"}, "test: hidden_size is '64'; allowed: an integer of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; allowed: an integer of at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; allowed: an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: divisors of num_attention_heads, 8"),
        ({"hidden_size": 60}, "hidden_size is 60 without head_dim; allowed: multiples of num_attention_heads, 8"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; allowed: a finite number more than 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; allowed: a finite number more than 0"),
        ({"rope_theta": True}, "rope_theta is True; allowed: a finite number more than 0"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]; allowed: a string"),
        (
            {"model_type": "mistral", "sliding_window": "32"},
            "sliding_window is '32'; allowed: an integer of at least 1",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": 2.0, "long_factor": [2.0]}},
            "rope_scaling.short_factor is 2.0; allowed: a list of numbers",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; allowed: true or false"),
        ({"head_dim": 7}, "rotary dim is 7; allowed: an even number"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; allowed: an object"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"model_type": None}, "model_type is missing"),
        ({"rope_theta": 10**400}, r"rope_theta is 10{79}\.\.\.; allowed: a finite number more than 0"),
        ({"num_hidden_layers": 10**21}, "num_hidden_layers is 1000.*; allowed: an integer of at most 16384"),
        ({"num_hidden_layers": 16_385}, "num_hidden_layers is 16385; allowed: an integer of at most 16384"),
        ({"num_attention_heads": 2**14 + 8}, "num_attention_heads is 16392; allowed: an integer of at most 16384"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648; allowed: an integer of at most 2147483647"),
        ({"max_position_embeddings": 5_000_000_000}, "max_position_embeddings is 5000000000; allowed: .* at most 21"),
        (
            {"rope_scaling": {"type": "linear", "factor": 1e9}},
            "max_context is 256000000000; allowed: at most 2147483647",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 1e38}}, r"rotary factor is 1e\+38; allowed: at most 2147483647"),
        ({"rope_theta": 1e300}, r"rope_theta is 1e\+300; allowed: a number of at most 3\.4e\+38"),
    ],
)
def test_wrong_fields_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _describe(**values)


@pytest.mark.parametrize(
    ("values", "is_rounded"), [({}, True), ({"truncate": None}, False), ({"truncate": True}, True)]
)
def test_ends_of_the_ramp_of_yarn_are_not_rounded_where_null_says_so(values: dict[str, Any], is_rounded: bool) -> None:
    rotary = _describe(rope_scaling={**YARN, **values}).rotaries[0]
    assert rotary is not None
    assert isinstance(rotary.scaling, YarnScaling)
    assert rotary.scaling.truncate is is_rounded


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention' but there is no window"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries; allowed: num_hidden_layers, 4"),
        (
            {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
            "layer_types is .*; allowed: a list of 'full_attention'",
        ),
        ({"layer_types": 4}, "layer_types is 4; allowed: a list of 'full_attention'"),
    ],
)
def test_contradictory_layer_types_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _describe("qwen2", **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "bert"},
            "test: model_type is 'bert'; supported: .*llama, ministral, mistral, .*qwen2, .*qwen3",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters differ by kind of layer; allowed",
        ),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; supported: silu, swish, gelu, "),
        ({"quantization_config": {"quant_method": "gptq"}}, "method 'gptq'; supported: weights not quantized"),
        ({"quantization_config": {"quant_method": "fp8"}}, "method 'fp8'; .* not quantized, or 'fp8' in deepseek_v3, "),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _describe(**values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[]", "holds list; allowed: a JSON object"),
        (b"[" * 100_000, "is not valid JSON"),
        (json.dumps({"model_type": "llama"}).encode(), "num_hidden_layers is missing"),
    ],
)
def test_unreadable_config_is_refused_with_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=f"{file}.*{message}"):
        describe_model(tmp_path)


def test_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        describe_model(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Is a directory"):
        describe_model(tmp_path)
