"""Phi 1, 1.5 and 2: attention and MLP side by side, LayerNorm, biases everywhere, heads rotated in part."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind, QKNorm, QKNormScope, ResidualKind
from parallel.families.common import describe_common
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.rope import Rope

_ROPE = Rope(default_partial=0.5)
_QK_NORM = QKNorm(kind=NormKind.LAYER, scope=QKNormScope.HEAD)


def describe(fields: Fields) -> DecoderDescription:
    """Read a Phi config."""
    fields = fields.with_defaults(hidden_act="gelu_new", max_position_embeddings=2048)
    return replace(
        describe_common(fields, rope=_ROPE, eps_name="layer_norm_eps", default_eps=1e-5),
        norm=NormKind.LAYER,
        residual=ResidualKind.PARALLEL_ONE_NORM,
        is_mlp_gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm=_QK_NORM if fields.boolean("qk_layernorm", False) else None,
    )


PHI = Family(
    model_type="phi",
    describe=describe,
    module_names={
        **LLAMA_MODULE_NAMES,
        "final_norm": "model.final_layernorm",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "attention.output": "self_attn.dense",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
)
