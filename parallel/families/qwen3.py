"""Qwen 3 (dense): Llama with a norm over each query and key head, and heads of 128 dims whatever the hidden size."""

from parallel.description import DecoderDescription
from parallel.families.family import LLAMA_MODULE_NAMES, Family, describe_llama_like, read_alternating_windows
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Qwen3 config; `attention_bias` puts biases on all four projections of the attention."""
    attention_bias = fields.boolean("attention_bias", False)
    return describe_llama_like(
        fields,
        default_head_dim=128,
        sliding_windows=read_alternating_windows(fields),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )


QWEN3 = Family(model_type="qwen3", describe=describe, module_names=LLAMA_MODULE_NAMES)
