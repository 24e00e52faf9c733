"""Reads the rotary embedding of a config: both the older layout and that of transformers 5.

older:           "rope_theta": 500000.0, "rope_scaling": null | {"rope_type" (or "type"): "llama3", "factor": 8.0, ...}
transformers 5:  "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}
"""

import math

from parallel.description import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryDescription,
    RotaryScaling,
    YarnScaling,
)
from parallel.errors import UnsupportedModelError
from parallel.families.fields import Fields

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_DEFAULT_THETA = 10_000.0
_LAYER_KINDS = ("full_attention", "sliding_attention")


def read_rotary(fields: Fields, head_dim: int) -> tuple[RotaryDescription, int]:
    """The rotary embedding of a config, and the longest context that it serves.

    Raises:
        ConfigError: a field is missing or wrong.
        UnsupportedModelError: the kind of scaling is not known, or heads are rotated in part or differently per layer.
    """
    rope = fields.nested("rope_scaling" if _has_entries(fields, "rope_scaling") else "rope_parameters")
    if any(kind in rope for kind in _LAYER_KINDS):
        raise UnsupportedModelError("rope_parameters differ by kind of layer; allowed: one set for all layers")
    for holder in (fields, rope):
        partial = holder.number("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise UnsupportedModelError(f"partial_rotary_factor is {partial}; allowed in this family: 1.0")
    theta = rope.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    scaling = _read_scaling(fields, rope)
    description = RotaryDescription(dim=head_dim, theta=theta, scaling=scaling)
    return description, _max_context(fields.integer("max_position_embeddings"), scaling)


def _has_entries(fields: Fields, name: str) -> bool:
    return name in fields and not fields.nested(name).is_empty


def _read_scaling(fields: Fields, rope: Fields) -> RotaryScaling | None:
    max_positions = fields.integer("max_position_embeddings")
    kind = rope.text("rope_type", rope.text("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=rope.number("factor"))
        case "dynamic":
            return DynamicScaling(factor=rope.number("factor"), original_context=max_positions)
        case "yarn":
            return _read_yarn(rope, max_positions, _original_context(fields, rope))
        case "longrope":
            return _read_longrope(rope, max_positions, _original_context(fields, rope))
        case "llama3":
            return Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_context=_original_context(fields, rope),
            )
        case _:
            raise UnsupportedModelError(f"rope_type is {kind!r}; supported: {', '.join(KINDS)}")


def _original_context(fields: Fields, rope: Fields) -> int:
    """The context of the pretraining; beside the rope parameters it counts more than inside them."""
    name = "original_max_position_embeddings"
    return fields.integer(name, rope.integer(name, fields.integer("max_position_embeddings")))


def _read_yarn(rope: Fields, max_positions: int, original_context: int) -> YarnScaling:
    factor = rope.number("factor", max_positions / original_context)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_context=original_context,
        attention_factor=attention_factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """How much longer queries and keys become: arXiv:2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(rope: Fields, max_positions: int, original_context: int) -> LongRopeScaling:
    factor = rope.number("factor", max_positions / original_context)
    inferred = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))
    return LongRopeScaling(
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
        original_context=original_context,
        attention_factor=rope.number("attention_factor", inferred),
    )


def _max_context(max_positions: int, scaling: RotaryScaling | None) -> int:
    """Configs may give the context before or after scaling; the longer one is served."""
    match scaling:
        case LinearScaling():
            return int(max_positions * scaling.factor)
        case DynamicScaling() | YarnScaling():
            return max(max_positions, int(scaling.original_context * scaling.factor))
        case _:
            return max_positions
