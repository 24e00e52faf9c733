"""GPT-NeoX and Pythia: attention and MLP side by side with a norm each, heads rotated in part, fused per head."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind, ResidualKind
from parallel.families.common import describe_common
from parallel.families.family import Family
from parallel.families.fields import Fields
from parallel.families.layout import grouped_qkv
from parallel.families.rope import Rope

_ROPE = Rope(default_partial=0.25)


def describe(fields: Fields) -> DecoderDescription:
    """Read a GPT-NeoX config; beside the rope parameters its own names for two of them count alone."""
    fields = fields.without("rope_theta", "partial_rotary_factor")
    fields = fields.renamed(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    fields = fields.with_defaults(hidden_act="gelu", max_position_embeddings=2048)
    is_parallel = fields.boolean("use_parallel_residual", True)
    attention_bias = fields.boolean("attention_bias", True)
    return replace(
        describe_common(fields, rope=_ROPE, eps_name="layer_norm_eps", default_eps=1e-5),
        norm=NormKind.LAYER,
        residual=ResidualKind.PARALLEL if is_parallel else ResidualKind.SEQUENTIAL,
        is_mlp_gated=False,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=True,
    )


GPT_NEOX = Family(
    model_type="gpt_neox",
    describe=describe,
    module_names={
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "layers": "gpt_neox.layers",
        "attention_norm": "input_layernorm",
        **{f"attention.{part}": "attention.query_key_value" for part in "qkv"},
        "attention.output": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    fusions={"attention.query_key_value": grouped_qkv},
)
