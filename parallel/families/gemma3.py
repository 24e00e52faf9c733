"""Gemma 3, its text model: Gemma 2 with query and key norms, and rotations of their own for layers that slide.

The published models with vision have the text model's config under `text_config`; their other weights are not read.
"""

from dataclasses import replace

from parallel.description import DecoderDescription, NormKind, QKNorm, QKNormScope
from parallel.errors import ConfigError
from parallel.families.common import periodic_layer_types, read_layer_types, windows_of
from parallel.families.family import Family
from parallel.families.fields import Fields
from parallel.families.gemma2 import SANDWICH_NAMES, describe_sandwich
from parallel.families.rope import LAYER_KINDS, Rope, read_rotary
from parallel.position_description import RotaryDescription

_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
}
_FULL = Rope(default_theta=1e6, layer_kind="full_attention")


def describe(fields: Fields) -> DecoderDescription:
    """Read the config of a Gemma 3 text model."""
    fields = fields.with_defaults(**_DEFAULTS)
    num_layers = fields.integer("num_hidden_layers")
    kinds = read_layer_types(fields) or periodic_layer_types(num_layers, fields.integer("sliding_window_pattern", 6))
    head_dim = fields.integer("head_dim")
    _check_rope(fields)
    full, _ = read_rotary(fields, head_dim, _FULL)
    sliding = _read_sliding(fields, head_dim)
    plain = fields.without("rope_scaling", "rope_parameters")
    return replace(
        describe_sandwich(plain),
        max_context=fields.integer("max_position_embeddings"),  # longer positions are scaled back into it
        rotaries=tuple(full if kind == "full_attention" else sliding for kind in kinds),
        sliding_windows=windows_of(kinds, fields.limit("sliding_window", 4096)),
        qk_norm=QKNorm(kind=NormKind.RMS_PLUS_ONE, scope=QKNormScope.HEAD),
        attention_soft_cap=fields.optional_number("attn_logit_softcapping"),
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def describe_nested(fields: Fields) -> DecoderDescription:
    """Read the config of a Gemma 3 model with vision: its text model."""
    text = fields.nested("text_config").with_defaults(
        model_type="gemma3_text", quantization_config=fields.value("quantization_config")
    )
    return replace(describe(text), family="gemma3")


def _read_sliding(fields: Fields, head_dim: int) -> RotaryDescription:
    """The older fields have scaling and rope_theta for the layers that see everything."""
    theta = fields.number("rope_local_base_freq", 10_000.0)
    if "sliding_attention" in fields.nested("rope_parameters"):
        rope = Rope(default_theta=theta, layer_kind="sliding_attention")
        return read_rotary(fields.without("rope_theta"), head_dim, rope)[0]
    return RotaryDescription(dim=head_dim, theta=theta)


def _check_rope(fields: Fields) -> None:
    """Raise ConfigError where the config does not say which layers its rotation is of."""
    older, newer = fields.nested("rope_scaling"), fields.nested("rope_parameters")
    if not older.is_empty and not newer.is_empty:
        raise ConfigError("there are rope_scaling and rope_parameters; allowed: one of them")
    if not newer.is_empty and not any(kind in newer for kind in LAYER_KINDS):
        raise ConfigError(
            f"rope_parameters is not by kind of layer; allowed: an object with {' and '.join(LAYER_KINDS)}"
        )


GEMMA3_TEXT = Family(model_type="gemma3_text", describe=describe, module_names=SANDWICH_NAMES)
GEMMA3 = Family(
    model_type="gemma3",
    describe=describe_nested,
    module_names={name: part.replace("model.", "model.language_model.", 1) for name, part in SANDWICH_NAMES.items()},
    aliases={"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)
