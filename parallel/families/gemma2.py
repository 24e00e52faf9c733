"""Gemma 2: Gemma with norms before and after each block, soft caps, and a sliding window in every other layer."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind, NormPlace
from parallel.families.common import (
    describe_common,
    periodic_layer_types,
    read_layer_types,
    refuse_other,
    windows_of,
)
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields

SANDWICH_NAMES = {
    **LLAMA_MODULE_NAMES,
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Module names of Gemma 2 and Gemma 3, which norm before and after each block."""

_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
}


def describe(fields: Fields) -> DecoderDescription:
    """Read a Gemma 2 config."""
    kinds = read_layer_types(fields) or periodic_layer_types(fields.integer("num_hidden_layers"), 2)
    return replace(
        describe_sandwich(fields.with_defaults(**_DEFAULTS)),
        sliding_windows=windows_of(kinds, fields.limit("sliding_window", 4096)),
        attention_soft_cap=fields.nullable_number("attn_logit_softcapping", 50.0),
        logit_soft_cap=fields.nullable_number("final_logit_softcapping", 30.0),
    )


def describe_sandwich(fields: Fields) -> DecoderDescription:
    """Read what Gemma 2 and 3 share."""
    refuse_other(fields, use_bidirectional_attention=False)
    attention_bias = fields.boolean("attention_bias", False)
    description = describe_common(fields.without("hidden_act").renamed(hidden_act="hidden_activation"))
    return replace(
        description,
        norm=NormKind.RMS_PLUS_ONE,
        norm_place=NormPlace.BOTH,
        embedding_multiplier=description.hidden_size**0.5,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )


GEMMA2 = Family(model_type="gemma2", describe=describe, module_names=SANDWICH_NAMES)
