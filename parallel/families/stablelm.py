"""StableLM: Llama with LayerNorm and heads rotated in part; the larger ones have a parallel residual and head norms."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind, QKNorm, QKNormScope, ResidualKind
from parallel.families.common import describe_common
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.rope import Rope

_ROPE = Rope(default_partial=0.25)
_QK_NORM = QKNorm(kind=NormKind.LAYER_WITHOUT_BIAS, scope=QKNormScope.OWN_HEAD)


def describe(fields: Fields) -> DecoderDescription:
    """Read a StableLM config."""
    fields = fields.renamed(partial_rotary_factor="rope_pct").with_defaults(max_position_embeddings=4096)
    is_parallel = fields.boolean("use_parallel_residual", False)
    return replace(
        describe_common(fields, rope=_ROPE, eps_name="layer_norm_eps", default_eps=1e-5),
        norm=NormKind.LAYER,
        residual=ResidualKind.PARALLEL_ONE_NORM if is_parallel else ResidualKind.SEQUENTIAL,
        qkv_bias=fields.boolean("use_qkv_bias", False),
        qk_norm=_QK_NORM if fields.boolean("qk_layernorm", False) else None,
    )


STABLELM = Family(
    model_type="stablelm",
    describe=describe,
    module_names={
        **LLAMA_MODULE_NAMES,
        "attention.q_norm": "self_attn.q_layernorm.norms.{row}",
        "attention.k_norm": "self_attn.k_layernorm.norms.{row}",
    },
)
