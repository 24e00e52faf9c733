"""GPT-2: learned positions, LayerNorm, plain GELU, biases everywhere; matrices stored [in, out]."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind
from parallel.families.common import describe_common, refuse_other
from parallel.families.family import Family
from parallel.families.fields import Fields
from parallel.families.layout import stacked_qkv
from parallel.position_description import LearnedPositions

_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}


def describe(fields: Fields) -> DecoderDescription:
    """Read a GPT-2 config."""
    refuse_other(fields, add_cross_attention=False, scale_attn_by_inverse_layer_idx=False)
    fields = fields.without("hidden_act").renamed(**_NAMES)
    fields = fields.with_defaults(max_position_embeddings=1024, hidden_act="gelu_new", tie_word_embeddings=True)
    fields = fields.with_defaults(intermediate_size=4 * fields.integer("hidden_size"))
    description = describe_common(fields, rope=None, eps_name="layer_norm_epsilon", default_eps=1e-5)
    return replace(
        description,
        norm=NormKind.LAYER,
        learned_positions=LearnedPositions(num_rows=description.max_context),
        attention_scale=None if fields.boolean("scale_attn_weights", True) else 1.0,
        is_mlp_gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


GPT2 = Family(
    model_type="gpt2",
    describe=describe,
    module_names={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "layers": "transformer.h",
        "attention_norm": "ln_1",
        **{f"attention.{part}": "attn.c_attn" for part in "qkv"},
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    fusions={"attn.c_attn": stacked_qkv},
    transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    aliases={"transformer.": ""},
)
