"""Command R: attention and MLP side by side under one norm, neighbouring dims rotated, logits scaled."""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind, QKNorm, QKNormScope, ResidualKind
from parallel.families.common import describe_common
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.rope import Rope

_QK_NORM = QKNorm(kind=NormKind.LAYER_WITHOUT_BIAS, scope=QKNormScope.OWN_HEAD)
_DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "logit_scale": 0.0625}


def describe(fields: Fields) -> DecoderDescription:
    """Read a Command R config; Command R+ norms queries and keys."""
    description = describe_side_by_side(fields, Rope(default_theta=500_000.0, is_interleaved=True))
    return replace(description, qk_norm=_QK_NORM if fields.boolean("use_qk_norm", False) else None)


def describe_side_by_side(fields: Fields, rope: Rope) -> DecoderDescription:
    """Read what the Command models share."""
    fields = fields.with_defaults(**_DEFAULTS)
    attention_bias = fields.boolean("attention_bias", False)
    description = describe_common(fields, rope=rope, eps_name="layer_norm_eps", default_eps=1e-5)
    return replace(
        description,
        max_context=max(description.max_context, fields.integer("model_max_length", 1)),  # the longer is served
        norm=NormKind.LAYER_WITHOUT_BIAS,
        residual=ResidualKind.PARALLEL_ONE_NORM,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        logit_multiplier=fields.number("logit_scale"),
    )


COHERE = Family(model_type="cohere", describe=describe, module_names=LLAMA_MODULE_NAMES)
