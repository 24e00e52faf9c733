"""Mistral: Llama without biases, with a sliding window over all layers in its first release, over some in Ministral."""

from dataclasses import replace

from parallel.description import DecoderDescription
from parallel.families.common import describe_common, read_layer_types, windows_of, with_window
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Mistral config; a list of layer types makes it a Ministral, whatever its `model_type`.

    `sliding_window` null means that every token sees all before it.
    """
    window, kinds = fields.limit("sliding_window", 4096), read_layer_types(fields)
    description = describe_common(fields.with_defaults(max_position_embeddings=131_072))
    if kinds is None:
        return with_window(description, window)
    return replace(description, sliding_windows=windows_of(kinds, window))


MISTRAL = Family(model_type="mistral", describe=describe, module_names=LLAMA_MODULE_NAMES)
MINISTRAL = Family(model_type="ministral", describe=describe, module_names=LLAMA_MODULE_NAMES)
