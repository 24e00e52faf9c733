"""BLOOM: ALiBi, LayerNorm (after the embedding too), plain GELU, biases everywhere, matrices fused per head."""

from dataclasses import replace

from parallel.description import Activation, DecoderDescription, NormKind
from parallel.families.common import describe_common, refuse_other
from parallel.families.family import Family
from parallel.families.fields import Fields
from parallel.families.layout import grouped_qkv
from parallel.families.slopes import alibi_slopes
from parallel.position_description import Alibi


def describe(fields: Fields) -> DecoderDescription:
    """Read a BLOOM config; it may call the same number by several names."""
    refuse_other(fields, apply_residual_connection_post_layernorm=False)
    fields = fields.renamed(
        hidden_size="n_embed",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="seq_length",
    )
    fields = fields.with_defaults(
        intermediate_size=4 * fields.integer("hidden_size"), max_position_embeddings=2048, tie_word_embeddings=True
    )
    description = describe_common(fields, rope=None, eps_name="layer_norm_epsilon", default_eps=1e-5)
    return replace(
        description,
        norm=NormKind.LAYER,
        alibi=Alibi(slopes=alibi_slopes(description.num_heads)),
        embedding_norm=True,
        activation=Activation.GELU_TANH,
        is_mlp_gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


BLOOM = Family(
    model_type="bloom",
    describe=describe,
    module_names={
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
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
    aliases={"transformer.": ""},
)
