"""Qwen 2 and 2.5: Llama with biases on queries, keys and values; upper layers may have a sliding window."""

from dataclasses import replace

from parallel.description import DecoderDescription
from parallel.families.common import describe_common, read_upper_windows
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Qwen2 config."""
    fields = fields.with_defaults(max_position_embeddings=32_768)
    return replace(describe_common(fields), sliding_windows=read_upper_windows(fields), qkv_bias=True)


QWEN2 = Family(model_type="qwen2", describe=describe, module_names=LLAMA_MODULE_NAMES)
