"""Falcon: attention and MLP side by side, plain GELU, few or one key-value head; rotation, or ALiBi in the first ones.

new layout (40B, 180B, Falcon 2)   groups of query heads with their key and value, one or two norms
old, multi-query (7B)              one key-value head, one norm
old (RW)                           every head its own key and value; one block after the other
"""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind, ResidualKind
from parallel.families.common import describe_common
from parallel.families.family import Family
from parallel.families.fields import Fields
from parallel.families.layout import grouped_qkv
from parallel.families.rope import WHOLE_HEADS
from parallel.families.slopes import alibi_slopes
from parallel.position_description import Alibi


def describe(fields: Fields) -> DecoderDescription:
    """Read a Falcon config, also one with the names of its first release."""
    fields = fields.without("hidden_act").renamed(
        hidden_size="n_embed",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        num_kv_heads="n_head_kv",
        intermediate_size="ffn_hidden_size",
        hidden_act="activation",
    )
    fields = fields.without("num_key_value_heads").with_defaults(
        num_key_value_heads=_num_kv_heads(fields),
        intermediate_size=4 * fields.integer("hidden_size"),
        max_position_embeddings=2048,
        hidden_act="gelu",
        tie_word_embeddings=True,
    )
    has_alibi, has_bias = fields.boolean("alibi", False), fields.boolean("bias", False)
    description = describe_common(
        fields, rope=None if has_alibi else WHOLE_HEADS, eps_name="layer_norm_epsilon", default_eps=1e-5
    )
    alibi = Alibi(slopes=alibi_slopes(description.num_heads), scale=description.head_dim**-0.5, is_rounded=True)
    return replace(
        description,
        norm=NormKind.LAYER,
        residual=_residual(fields),
        alibi=alibi if has_alibi else None,
        is_mlp_gated=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
    )


def _num_kv_heads(fields: Fields) -> int:
    num_heads = fields.integer("num_attention_heads")
    if fields.boolean("new_decoder_architecture", False):
        return fields.integer("num_kv_heads", num_heads)
    return 1 if fields.nullable_boolean("multi_query", True) else num_heads


def _residual(fields: Fields) -> ResidualKind:
    is_new = fields.boolean("new_decoder_architecture", False)
    if is_new and fields.integer("num_ln_in_parallel_attn", 2) == 2:
        return ResidualKind.PARALLEL
    if is_new or fields.nullable_boolean("parallel_attn", True):
        return ResidualKind.PARALLEL_ONE_NORM
    return ResidualKind.SEQUENTIAL


def _own_names(description: DecoderDescription) -> dict[str, str]:
    if description.residual is not ResidualKind.PARALLEL:
        return {}
    return {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


FALCON = Family(
    model_type="falcon",
    describe=describe,
    module_names={
        "embedding": "transformer.word_embeddings",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "layers": "transformer.h",
        "attention_norm": "input_layernorm",
        **{f"attention.{part}": "self_attention.query_key_value" for part in "qkv"},
        "attention.output": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    fusions={"self_attention.query_key_value": grouped_qkv},
    own_names=_own_names,
)
