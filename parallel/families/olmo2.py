"""OLMo 2: Llama with norms after each block instead of before it, and queries and keys normed over all heads."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind, NormPlace, QKNorm, QKNormScope
from parallel.families.common import describe_common
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read an OLMo 2 config."""
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        describe_common(fields.with_defaults(max_position_embeddings=2048), default_eps=1e-5),
        norm_place=NormPlace.AFTER,
        qk_norm=QKNorm(kind=NormKind.RMS, scope=QKNormScope.ALL_HEADS),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )


OLMO2 = Family(
    model_type="olmo2",
    describe=describe,
    module_names={
        **LLAMA_MODULE_NAMES,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)
