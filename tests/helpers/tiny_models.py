"""Tiny random checkpoints that `transformers` itself makes: the originals that Weft's models are compared with.

`transformers` is imported when it is first needed: it takes seconds, and the workers of the gloo pool do without.
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from helpers import converted_models, packed_models

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": 319, "num_key_value_heads": 2},
    "llama-multi-query": {"model_type": "llama", "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 24, "num_key_value_heads": 2},
    "mistral-layer-types": {  # transformers makes a Ministral of it
        "model_type": "mistral",
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 2},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2},
    "qwen3-bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "llama-linear": {"model_type": "llama", **_rope("linear", factor=4.0)},
    "llama-dynamic": {"model_type": "llama", **_rope("dynamic", factor=2.0), "max_position_embeddings": 64},
    "llama-yarn": {
        "model_type": "llama",
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0),
    },
    "llama-longrope": {
        "model_type": "llama",
        **_rope(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=256,
            short_factor=[1.0, 1.1, 1.2, 1.5],
            long_factor=[1.0, 2.0, 3.0, 4.0],
        ),
        "max_position_embeddings": 256,
    },
    "llama-llama3": {
        "model_type": "llama",
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    },
}

_SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING_TWICE = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}

_DENSE_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", "head_dim": 12, "num_key_value_heads": 1},
    "gemma2": {"model_type": "gemma2", "head_dim": 12, "sliding_window": 16, "query_pre_attn_scalar": 20},
    "gemma2-caps": {
        "model_type": "gemma2",
        "head_dim": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attention_bias": True,
        "sliding_window": 10,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 12,
        "sliding_window": 16,
        **_SLIDING_TWICE,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "ministral": {"model_type": "ministral", "head_dim": 12, "sliding_window": 16, **_SLIDING_TWICE},
    "phi": {"model_type": "phi", "num_key_value_heads": 4},
    "phi-norm": {"model_type": "phi", "qk_layernorm": True},
    "phi3": {"model_type": "phi3", "sliding_window": None},
    "phi3-partial": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "num_key_value_heads": 1,
        "sliding_window": 12,
    },
    "gpt2": {"model_type": "gpt2"},
    "gpt2-inner": {"model_type": "gpt2", "n_inner": 40, "scale_attn_weights": False, "vocab_size": 161},
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "gpt_neox-sequential": {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False},
    "gptj": {"model_type": "gptj", "rotary_dim": 4},
    "opt": {"model_type": "opt", "ffn_dim": 48},
    "opt-no-bias": {"model_type": "opt", "ffn_dim": 48, "enable_bias": False, "activation_function": "gelu"},
    "bloom": {"model_type": "bloom"},
    "bloom-6-heads": {"model_type": "bloom", "num_attention_heads": 6, "hidden_size": 48},
    "mpt": {"model_type": "mpt"},
    "mpt-6-heads-clipped": {
        "model_type": "mpt",
        "num_attention_heads": 6,
        "hidden_size": 48,
        "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3},
    },
    "falcon": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-one-norm": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "ffn_hidden_size": 40,
    },
    "falcon-old": {"model_type": "falcon"},
    "falcon-old-alibi": {
        "model_type": "falcon",
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "num_attention_heads": 6,
        "hidden_size": 48,
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 16},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm-12b": {"model_type": "stablelm", "use_parallel_residual": True, "qk_layernorm": True},
    "cohere": {"model_type": "cohere", "logit_scale": 0.5},
    "cohere-plus": {"model_type": "cohere", "logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.5, "sliding_window": 16, **_SLIDING_TWICE},
    "olmo2": {"model_type": "olmo2"},
    "olmo2-multi-query": {"model_type": "olmo2", "num_key_value_heads": 1, "attention_bias": True},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "granite-bias": {"model_type": "granite", "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3},
    "glm4": {"model_type": "glm4", "head_dim": 12},
}
"""Of these, smaller models are enough."""

_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

_LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
}

_MOE_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral"},
    "mixtral-window": {"model_type": "mixtral", "sliding_window": 12, "num_experts_per_tok": 1},
    "qwen2_moe": {"model_type": "qwen2_moe"},
    "qwen2_moe-dense-layers": {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
        "qkv_bias": False,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 12, "norm_topk_prob": True},
    "qwen3_moe-dense-layers": {
        "model_type": "qwen3_moe",
        "head_dim": 12,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 12,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENTS, "first_k_dense_replace": 1},
    "deepseek_v3-plain-queries": {
        "model_type": "deepseek_v3",
        **_LATENTS,
        "q_lora_rank": None,
        "attention_bias": True,
        "rope_interleave": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7),
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_LATENTS,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7),
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 12,
        "sliding_window": 12,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, truncate=False),
    },
    "gpt_oss-no-bias": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "attention_bias": False,
        "swiglu_limit": 1.0,
        **_SLIDING_TWICE,
        "sliding_window": 10,
        **_rope("default"),
    },
}
"""Their experts have other sizes than their MLPs."""

_ORIGINALS: dict[str, dict[str, Any]] = {
    "llama-grouped": {"model_type": "llama"},
    "llama-grouped-bias": {"model_type": "llama", "attention_bias": True},
    "llama-multi-head": {"model_type": "llama", "num_key_value_heads": 4},
    "gpt_oss-blocks": {
        "model_type": "gpt_oss",
        "intermediate_size": 96,
        "head_dim": 8,
        "sliding_window": 12,
        **_rope("default"),
    },
    "deepseek_v3-tiles": {
        "model_type": "deepseek_v3",
        **_LATENTS,
        "kv_lora_rank": 24,
        "hidden_size": 144,
        "intermediate_size": 272,
        "first_k_dense_replace": 1,
    },
}
"""What helpers/converted_models.py and helpers/packed_models.py make other models from."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""One plain model of each family."""

NAMES = tuple(_CONFIGS)
"""All of them: families, their options, and rotary scalings."""

DENSE_NAMES = (*_DENSE_CONFIGS, *converted_models.NAMES)
"""Models of the other dense families: named by the family, then what is special."""

MOE_NAMES = (*_MOE_CONFIGS, *packed_models.NAMES)
"""Models with experts, named likewise."""


@functools.cache
def tiny_model(name: str) -> Path:
    """The folder of a tiny float32 model; made at the first call, removed when the process ends."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = _root() / name
    if name in converted_models.NAMES:
        converted_models.write(name, tiny_model(converted_models.original_of(name)), folder)
        return folder
    if name in packed_models.NAMES:
        packed_models.write(name, tiny_model(packed_models.original_of(name)), folder)
        return folder
    config = transformers.AutoConfig.for_model(**_values(name))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model)
    model.save_pretrained(folder)
    return folder


def _values(name: str) -> dict[str, Any]:
    if name in _CONFIGS:
        return {**_SIZES, **_CONFIGS[name]}
    import transformers

    values = (_ORIGINALS | _DENSE_CONFIGS | _MOE_CONFIGS)[name]
    defaults = transformers.AutoConfig.for_model(values["model_type"])
    return {key: value for key, value in (_SMALL | _MOE).items() if hasattr(defaults, key)} | values


@functools.cache
def load_original(folder: Path) -> Any:
    """The model in a folder as `transformers` runs it: float32, on the CPU, eager attention."""
    import transformers

    if folder.name in converted_models.NAMES:
        original = tiny_model(converted_models.original_of(folder.name))
        return converted_models.load_original(folder.name, load_original.__wrapped__(original))
    if folder.name in packed_models.NAMES:
        folder = packed_models.plain_folder(folder)
    transformers.utils.logging.disable_progress_bar()
    # eager attention adds Falcon's ALiBi twice: in the scores and in the mask
    attention = "sdpa" if folder.name == "falcon-old-alibi" else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
    )
    return model.eval()


@functools.cache
def _root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="weft-tiny-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    """Draw weights so that logits differ by far more than rounding, no norm or bias is neutral, and the layers outweigh
    the embedding (else a model with tied embeddings only repeats its last token)."""
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2]
        if parameter.dim() == 1 or "norm" in name:
            parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            continue
        if parameter.dim() == 3:  # all experts
            gain = 6.0 if name.endswith("down_proj") else 1.5
            parameter.normal_(0.0, gain / parameter.shape[2] ** 0.5)
            continue
        is_table = "embed" in name or module in ("lm_head", "wte", "wpe")
        gain = 2.0 if is_table else 6.0 if module in _OUTPUTS else 1.5
        is_transposed = type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
        parameter.normal_(0.0, gain / parameter.shape[0 if is_transposed else 1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2)


_OUTPUTS = ("o_proj", "down_proj", "out_proj", "c_proj", "dense", "dense_4h_to_h", "fc2", "fc_out")
"""What the modules are called whose results are added to the residual stream."""
