"""Llama 1, 2, 3 and 3.x, and the many models published in their layout."""

from dataclasses import replace

from parallel.description import DecoderDescription
from parallel.families.common import describe_common
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Llama config; `attention_bias` puts biases on all four projections of the attention.

    The first ones give the context as `max_sequence_length`.
    """
    fields = fields.renamed(max_position_embeddings="max_sequence_length").with_defaults(max_position_embeddings=2048)
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        describe_common(fields),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


LLAMA = Family(model_type="llama", describe=describe, module_names=LLAMA_MODULE_NAMES)
