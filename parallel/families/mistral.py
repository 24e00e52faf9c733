"""Mistral: Llama without biases, with a sliding window over all layers in its first release."""

from parallel.description import DecoderDescription
from parallel.families.family import LLAMA_MODULE_NAMES, Family, describe_llama_like
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Mistral config; `sliding_window` null means that every token sees all before it."""
    window = fields.nullable_integer("sliding_window", 4096)
    return describe_llama_like(fields, sliding_windows=(window,) * fields.integer("num_hidden_layers"))


MISTRAL = Family(model_type="mistral", describe=describe, module_names=LLAMA_MODULE_NAMES)
