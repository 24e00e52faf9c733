"""MPT: ALiBi, LayerNorm without bias, plain GELU, no biases at all; queries, keys and values may be clipped."""

from dataclasses import replace

from parallel.description import Activation, DecoderDescription, NormKind
from parallel.errors import UnsupportedModelError
from parallel.families.common import describe_common, refuse_other
from parallel.families.family import Family
from parallel.families.fields import Fields
from parallel.families.layout import stacked_qkv
from parallel.families.slopes import mpt_slopes
from parallel.position_description import Alibi

_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}


def describe(fields: Fields) -> DecoderDescription:
    """Read an MPT config."""
    attention = fields.nested("attn_config")
    refuse_other(fields, no_bias=True, logit_scale=False)
    refuse_other(attention, alibi=True, attn_type="multihead_attention", qk_ln=False, prefix_lm=False, rope=False)
    refuse_other(attention, sliding_window_size=-1)
    refuse_other(fields.nested("ffn_config"), ffn_type="mptmlp")
    norm = fields.text("norm_type", "layernorm")
    if "rmsnorm" in norm.lower():
        raise UnsupportedModelError(f"norm_type is {norm!r}; supported in this family: layernorm")
    fields = fields.renamed(**_NAMES)
    fields = fields.with_defaults(
        intermediate_size=fields.integer("expansion_ratio", 4) * fields.integer("hidden_size"),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    description = describe_common(fields, rope=None, eps_name="layer_norm_epsilon", default_eps=1e-5)
    return replace(
        description,
        norm=NormKind.LAYER_WITHOUT_BIAS,
        alibi=Alibi(slopes=mpt_slopes(description.num_heads, attention.number("alibi_bias_max", 8))),
        attention_scale=attention.optional_number("softmax_scale"),
        qkv_clip=attention.optional_number("clip_qkv"),
        activation=Activation.GELU,
        is_mlp_gated=False,
    )


MPT = Family(
    model_type="mpt",
    describe=describe,
    module_names={
        "embedding": "transformer.wte",
        "final_norm": "transformer.norm_f",
        "head": "lm_head",
        "layers": "transformer.blocks",
        "attention_norm": "norm_1",
        **{f"attention.{part}": "attn.Wqkv" for part in "qkv"},
        "attention.output": "attn.out_proj",
        "mlp_norm": "norm_2",
        "mlp.up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
    },
    fusions={"attn.Wqkv": stacked_qkv},
)
