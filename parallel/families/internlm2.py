"""InternLM 2 and 2.5: Llama under other names, each key-value head fused with its query heads."""

from dataclasses import replace

from parallel.description import DecoderDescription
from parallel.families.common import describe_common
from parallel.families.family import Family
from parallel.families.fields import Fields
from parallel.families.layout import grouped_qkv


def describe(fields: Fields) -> DecoderDescription:
    """Read an InternLM 2 config; `bias` is of the attention."""
    has_bias = fields.boolean("bias", True)
    description = describe_common(fields.with_defaults(max_position_embeddings=2048))
    return replace(description, qkv_bias=has_bias, output_bias=has_bias)


INTERNLM2 = Family(
    model_type="internlm2",
    describe=describe,
    module_names={
        "embedding": "model.tok_embeddings",
        "final_norm": "model.norm",
        "head": "output",
        "layers": "model.layers",
        "attention_norm": "attention_norm",
        **{f"attention.{part}": "attention.wqkv" for part in "qkv"},
        "attention.output": "attention.wo",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "feed_forward.w1",
        "mlp.up": "feed_forward.w3",
        "mlp.down": "feed_forward.w2",
    },
    fusions={"attention.wqkv": grouped_qkv},
)
