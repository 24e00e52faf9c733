"""OPT: learned positions whose table begins with two rows for padding, LayerNorm, ReLU, biases everywhere."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind
from parallel.families.common import describe_common, refuse_other
from parallel.families.family import Family
from parallel.families.fields import Fields
from parallel.position_description import LearnedPositions

_NAMES = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
_POSITION_OFFSET = 2


def describe(fields: Fields) -> DecoderDescription:
    """Read an OPT config; the 350m model, which norms after its blocks and projects its embedding, is refused."""
    refuse_other(
        fields,
        do_layer_norm_before=True,
        word_embed_proj_dim=fields.integer("hidden_size"),
        layer_norm_elementwise_affine=True,
        _remove_final_layer_norm=False,
    )
    fields = fields.without("hidden_act").renamed(**_NAMES)
    fields = fields.with_defaults(max_position_embeddings=2048, hidden_act="relu", tie_word_embeddings=True)
    description = describe_common(fields, rope=None, eps_name="layer_norm_eps", default_eps=1e-5)
    has_bias = fields.boolean("enable_bias", True)
    return replace(
        description,
        norm=NormKind.LAYER,
        learned_positions=LearnedPositions(
            num_rows=description.max_context + _POSITION_OFFSET, offset=_POSITION_OFFSET
        ),
        is_mlp_gated=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
    )


OPT = Family(
    model_type="opt",
    describe=describe,
    module_names={
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
        "layers": "model.decoder.layers",
        "attention_norm": "self_attn_layer_norm",
        **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"},
        "attention.output": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
    aliases={"model.decoder.": "decoder."},
)
