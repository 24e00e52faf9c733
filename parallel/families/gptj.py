"""GPT-J: attention and MLP side by side under one norm, neighbouring dims of a head rotated, in part."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind, ResidualKind
from parallel.families.common import describe_common
from parallel.families.family import Family
from parallel.families.fields import Fields
from parallel.position_description import RotaryDescription

_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}


def describe(fields: Fields) -> DecoderDescription:
    """Read a GPT-J config."""
    fields = fields.without("hidden_act").renamed(**_NAMES)
    fields = fields.with_defaults(max_position_embeddings=2048, hidden_act="gelu_new")
    fields = fields.with_defaults(intermediate_size=4 * fields.integer("hidden_size"))
    description = describe_common(fields, rope=None, eps_name="layer_norm_epsilon", default_eps=1e-5)
    rotary = RotaryDescription(dim=fields.integer("rotary_dim", 64), theta=10_000.0, is_interleaved=True)
    return replace(
        description,
        norm=NormKind.LAYER,
        residual=ResidualKind.PARALLEL_ONE_NORM,
        rotaries=(rotary,) * description.num_layers,
        is_mlp_gated=False,
        mlp_bias=True,
        head_bias=True,
    )


GPTJ = Family(
    model_type="gptj",
    describe=describe,
    module_names={
        "embedding": "transformer.wte",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "layers": "transformer.h",
        "attention_norm": "ln_1",
        **{f"attention.{part}": f"attn.{part}_proj" for part in "qkv"},
        "attention.output": "attn.out_proj",
        "mlp.up": "mlp.fc_in",
        "mlp.down": "mlp.fc_out",
    },
)
