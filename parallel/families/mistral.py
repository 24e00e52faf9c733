"""Mistral: Llama without biases, with a sliding window over all layers in its first release."""

from parallel.description import DecoderDescription
from parallel.families.common import describe_common, with_window
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Mistral config; `sliding_window` null means that every token sees all before it."""
    return with_window(describe_common(fields), fields.nullable_integer("sliding_window", 4096))


MISTRAL = Family(model_type="mistral", describe=describe, module_names=LLAMA_MODULE_NAMES)
