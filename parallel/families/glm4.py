"""GLM-4 (0414): Llama with norms before and after each block and neighbouring dims rotated, in part."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormPlace
from parallel.families.common import describe_common
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.layout import stacked_gate_up
from parallel.families.rope import Rope

_ROPE = Rope(default_partial=0.5, is_interleaved=True)


def describe(fields: Fields) -> DecoderDescription:
    """Read a GLM-4 config; `attention_bias` is of queries, keys and values."""
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=2, max_position_embeddings=131_072)
    return replace(
        describe_common(fields, rope=_ROPE, default_eps=1.5625e-7),
        norm_place=NormPlace.BOTH,
        qkv_bias=fields.boolean("attention_bias", True),
    )


GLM4 = Family(
    model_type="glm4",
    describe=describe,
    module_names={
        **LLAMA_MODULE_NAMES,
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
        **{f"mlp.{part}": "mlp.gate_up_proj" for part in ("gate", "up")},
    },
    fusions={"mlp.gate_up_proj": stacked_gate_up},
)
