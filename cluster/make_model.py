"""`weft make-model`: a folder with random weights, from a preset and single sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.load import load_tokenizer

from cluster.errors import ClusterConfigError, ModelNotFoundError
from cluster.models import DEFAULT_MODEL, resolve_model
from parallel.description import DecoderDescription, MoeDescription
from parallel.dtypes import DTYPES
from parallel.errors import ModelError
from parallel.families.registry import describe_config
from parallel.random_model import write_random_model

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 176,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
    },
    "110m": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 2048,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-moe-0.5b": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 192,
        "norm_topk_prob": True,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
    },
}
"""Geometries by name, as in a Hugging Face config."""

_BASE = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu"}


def make_model(
    folder: Path,
    *,
    preset: str | None,
    sizes: Mapping[str, Any],
    dtype: str,
    seed: int,
    tokenizer: Path | None,
) -> None:
    """Write the model and say what it is.

    Args:
        folder: new or empty.
        preset: a name in PRESETS; None: "tiny".
        sizes: config fields that change the preset; None: as it has them.
        dtype, seed: of the weights.
        tokenizer: folder to copy the tokenizer from; None: that of the packaged model.

    Raises:
        ClusterConfigError, ModelError: a flag is wrong, the sizes contradict each other, or the folder cannot be
            written.
    """
    name = preset or "tiny"
    if name not in PRESETS:
        raise ClusterConfigError(f"--preset is {name!r}; allowed: {', '.join(PRESETS)}")
    if dtype not in DTYPES:
        raise ClusterConfigError(f"--dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    wanted = {field: value for field, value in sizes.items() if value is not None}
    config = {**_BASE, **PRESETS[name], **wanted}
    try:
        description = describe_config(config, source="flags")
        _check_experts(description.moe, wanted)
        _check_sizes(description, wanted)
        tokenizer = tokenizer or _packaged_tokenizer()
        if tokenizer is not None:
            _check_vocab(description, tokenizer)
        write_random_model(folder, config, seed, DTYPES[dtype], tokenizer)
    except ModelError as error:
        raise ClusterConfigError(str(error)) from error
    except OSError as error:
        raise ClusterConfigError(f"{folder} cannot be written: {error.strerror}") from error
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"{folder}: {config['model_type']}, {size // DTYPES[dtype].itemsize / 1e6:.1f} M parameters in {dtype}")


def _check_experts(moe: MoeDescription | None, wanted: Mapping[str, Any]) -> None:
    """Refuse a size of experts that the family does not have, or calls otherwise."""
    seen = {
        "num_experts": moe and moe.num_experts,
        "num_experts_per_tok": moe and moe.num_chosen,
        "moe_intermediate_size": moe and moe.intermediate_size,
    }
    for field, value in seen.items():
        if field in wanted and wanted[field] != value:
            raise ClusterConfigError(
                f"{field} is {wanted[field]}, which this family does not have; with experts of their own size: "
                "qwen2_moe, qwen3_moe; of that of --inner: mixtral"
            )


def _check_sizes(description: DecoderDescription, wanted: Mapping[str, Any]) -> None:
    """Refuse a size that the family has otherwise, whatever its config says."""
    seen = {
        "num_key_value_heads": description.num_kv_heads,
        "head_dim": description.head_dim,
        "max_position_embeddings": description.max_context,
    }
    for field, value in seen.items():
        if field in wanted and wanted[field] != value:
            raise ClusterConfigError(f"{field} is {wanted[field]}; allowed of {description.family}: {value}")


def _check_vocab(description: DecoderDescription, tokenizer: Path) -> None:
    """Refuse a vocabulary in which not every text has its tokens."""
    try:
        least = load_tokenizer(tokenizer).tokenizer.get_vocab_size(with_added_tokens=True)
    except TokenizerError as error:
        raise ClusterConfigError(f"--tokenizer: {error}") from error
    if description.vocab_size < least:
        raise ClusterConfigError(
            f"vocab_size is {description.vocab_size}; allowed: at least {least}, the tokens of {tokenizer}"
        )


def _packaged_tokenizer() -> Path | None:
    try:
        return resolve_model(DEFAULT_MODEL)
    except ModelNotFoundError:
        return None
