"""Qwen 2 and 2.5: Llama with biases on queries, keys and values; upper layers may have a sliding window."""

from parallel.description import DecoderDescription
from parallel.families.family import LLAMA_MODULE_NAMES, Family, describe_llama_like, read_alternating_windows
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Qwen2 config."""
    return describe_llama_like(fields, sliding_windows=read_alternating_windows(fields), qkv_bias=True)


QWEN2 = Family(model_type="qwen2", describe=describe, module_names=LLAMA_MODULE_NAMES)
