"""StarCoder 2: Llama's attention with biases and a sliding window, LayerNorm, a plain GELU."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind
from parallel.families.common import describe_common, with_window
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a StarCoder 2 config."""
    fields = fields.with_defaults(
        num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, tie_word_embeddings=True
    )
    has_bias = fields.boolean("use_bias", True)
    description = describe_common(fields, eps_name="norm_epsilon", default_eps=1e-5)
    return replace(
        with_window(description, fields.limit("sliding_window", None)),
        norm=NormKind.LAYER,
        is_mlp_gated=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
    )


STARCODER2 = Family(
    model_type="starcoder2",
    describe=describe,
    module_names={**LLAMA_MODULE_NAMES, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
)
