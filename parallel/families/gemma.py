"""Gemma: Llama with norms by 1 + weight, a gated GELU, and embeddings scaled by the root of the hidden size."""

from dataclasses import replace

from parallel.description import Activation, DecoderDescription, NormKind
from parallel.families.common import describe_common, refuse_other
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields

_DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}


def describe(fields: Fields) -> DecoderDescription:
    """Read a Gemma config."""
    refuse_other(fields, use_bidirectional_attention=False, hidden_activation="gelu_pytorch_tanh")
    attention_bias = fields.boolean("attention_bias", False)
    description = describe_common(fields.with_defaults(hidden_act="gelu", **_DEFAULTS))
    if description.activation is Activation.GELU:  # what the first releases say; they were trained with tanh
        description = replace(description, activation=Activation.GELU_TANH)
    return replace(
        description,
        norm=NormKind.RMS_PLUS_ONE,
        embedding_multiplier=description.hidden_size**0.5,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )


GEMMA = Family(model_type="gemma", describe=describe, module_names=LLAMA_MODULE_NAMES)
