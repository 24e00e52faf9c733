"""Configs of models with experts, as published and as `transformers` writes them, become descriptions."""

from typing import Any

import pytest

from parallel.description import DecoderDescription, MoeDescription
from parallel.errors import ConfigError
from parallel.families.registry import describe_config

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


def _describe(model_type: str, **values: Any) -> DecoderDescription:
    return describe_config({"model_type": model_type, **SIZES, **values}, source="test")


def _moe(model_type: str, **values: Any) -> MoeDescription:
    moe = _describe(model_type, **values).moe
    assert moe is not None
    return moe


def test_experts_of_mixtral_have_the_size_of_its_mlp() -> None:
    assert _moe("mixtral") == MoeDescription(num_experts=8, num_chosen=2, intermediate_size=96, is_normalized=True)
    assert _moe("mixtral", router_jitter_noise=0.1, output_router_logits=True) == _moe("mixtral")
    assert _moe("mixtral", num_local_experts=16, num_experts_per_tok=1).num_experts == 16


def test_first_mixtral_has_a_window() -> None:
    assert _describe("mixtral").sliding_windows == (None,) * 4
    assert _describe("mixtral", sliding_window=128).sliding_windows == (128,) * 4


def test_qwen2_moe_of_the_hub_is_read() -> None:
    moe = _moe("qwen2_moe", num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    assert (moe.num_experts, moe.num_chosen, moe.intermediate_size, moe.is_normalized) == (60, 4, 1408, False)
    assert (moe.shared_intermediate_size, moe.is_shared_gated) == (5632, True)
    assert moe.dense_layers == frozenset()
    assert _describe("qwen2_moe").qkv_bias
    assert not _describe("qwen2_moe", qkv_bias=False).qkv_bias
    assert _moe("qwen2_moe", norm_topk_prob=True).is_normalized


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"sliding_window": 16}, (None,) * 4),
        ({"sliding_window": 16, "use_sliding_window": True}, (16, None, 16, None)),
        ({"use_sliding_window": True, "num_hidden_layers": 30}, (4096, None) * 14 + (None, None)),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, (16, None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (None,) * 4),
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            (None, None, None, 16),
        ),
        ({"sliding_window": 0, "use_sliding_window": False, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_windows_of_qwen2_moe(values: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert _describe("qwen2_moe", **values).sliding_windows == windows


def test_windows_of_qwen2_moe_that_are_not_used_cannot_be_listed() -> None:
    kinds = ["full_attention"] * 3 + ["sliding_attention"]
    with pytest.raises(ConfigError, match="layer_types has 'sliding_attention' but there is no window"):
        _describe("qwen2_moe", sliding_window=16, use_sliding_window=False, layer_types=kinds)


def test_qwen3_moe_names_its_experts_in_two_ways() -> None:
    old = _describe("qwen3_moe", num_experts=16, norm_topk_prob=True)
    assert old == _describe("qwen3_moe", num_local_experts=16, norm_topk_prob=True)
    assert old.moe is not None
    assert (old.moe.num_experts, old.moe.num_chosen, old.moe.is_normalized) == (16, 8, True)
    assert old.qk_norm is not None


def test_window_of_qwen3_moe_is_in_all_layers() -> None:
    assert _describe("qwen3_moe", use_sliding_window=True, sliding_window=16).sliding_windows == (16,) * 4
    assert _describe("qwen3_moe", use_sliding_window=True).sliding_windows == (4096,) * 4
    assert _describe("qwen3_moe", sliding_window=16).sliding_windows == (None,) * 4


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("values", "dense_layers"),
    [
        ({"decoder_sparse_step": 2}, {0, 2}),
        ({"decoder_sparse_step": 3}, {0, 1, 3}),
        ({"mlp_only_layers": [1, 7]}, {1}),  # there is no layer 7
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {0, 2, 3}),
    ],
)
def test_layers_without_experts(model_type: str, values: dict[str, Any], dense_layers: set[int]) -> None:
    assert _moe(model_type, **values).dense_layers == dense_layers


def test_model_without_any_experts_left_is_dense() -> None:
    description = _describe("qwen3_moe", mlp_only_layers=[0, 1, 2, 3])
    assert description.moe is None
    assert description.has_dense_layers


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts_per_tok": 129}, "num_chosen is 129; allowed: 1 to 128"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers is .*; allowed: a list of integers of at least 0"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]; allowed: a list of integers of at least 0"),
        ({"mlp_only_layers": ["1"]}, r"mlp_only_layers is \['1'\]; allowed: a list of integers of at least 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3; allowed: a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; allowed: an integer of at least 1"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; allowed: true or false"),
    ],
)
def test_experts_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _describe("qwen3_moe", **values)
