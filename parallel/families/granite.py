"""Granite: Llama with multipliers on embeddings, attention scores, residual additions and logits."""

from dataclasses import replace

from parallel.description import DecoderDescription
from parallel.families.common import describe_common
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Granite config."""
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        describe_common(fields.with_defaults(max_position_embeddings=2048)),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )


GRANITE = Family(model_type="granite", describe=describe, module_names=LLAMA_MODULE_NAMES)
