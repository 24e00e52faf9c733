"""Qwen 3 (dense): Llama with a norm over each query and key head, and heads of 128 dims whatever the hidden size."""

from dataclasses import replace

from parallel.description import DecoderDescription
from parallel.families.common import QK_RMS_NORM, describe_common, read_upper_windows
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Qwen3 config; `attention_bias` puts biases on all four projections of the attention."""
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        describe_common(fields.with_defaults(head_dim=128, max_position_embeddings=32_768)),
        sliding_windows=read_upper_windows(fields),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=QK_RMS_NORM,
    )


QWEN3 = Family(model_type="qwen3", describe=describe, module_names=LLAMA_MODULE_NAMES)
