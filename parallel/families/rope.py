"""Reads the rotary embedding of a config: both the older layout and that of transformers 5.

older:           "rope_theta": 500000.0, "rope_scaling": null | {"rope_type" (or "type"): "llama3", "factor": 8.0, ...}
transformers 5:  "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.errors import ConfigError, UnsupportedModelError
from parallel.families.fields import Fields
from parallel.position_description import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryDescription,
    RotaryScaling,
    YarnScaling,
)

_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_NAMES: Mapping[str, str] = {**{kind: kind for kind in _KINDS}, "su": "longrope"}  # an early name

_ORIGINAL = "original_max_position_embeddings"

LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How the heads of a family are rotated, as far as its configs do not say it."""

    default_theta: float = 10_000.0
    default_partial: float | None = None
    """Part of a head that is rotated, when the config has no partial_rotary_factor; None: the whole, always."""
    is_interleaved: bool = False
    layer_kind: str | None = None
    """Read the set of this kind of layers, where the config has several."""
    kinds: Mapping[str, str] | None = None
    """What the configs of the family call their kinds of scaling -> one of _KINDS; None: all, as they are called."""


WHOLE_HEADS = Rope()
"""Rotation of whole heads, as in Llama."""


def read_rotary(fields: Fields, head_dim: int, rope: Rope = WHOLE_HEADS) -> tuple[RotaryDescription, int]:
    """The rotary embedding of a config, and the longest context that it serves.

    Args:
        fields: the config.
        head_dim: dims of a head.
        rope: what is particular to the family.

    Raises:
        ConfigError: a field is missing or wrong.
        UnsupportedModelError: the kind of scaling is not known, or heads are rotated in part or differently per layer.
    """
    values = rope_parameters(fields)
    if any(kind in values for kind in LAYER_KINDS):
        if rope.layer_kind is None:
            raise UnsupportedModelError("rope_parameters differ by kind of layer; allowed: one set for all layers")
        values = values.nested(rope.layer_kind)
    max_positions = fields.integer("max_position_embeddings")
    theta = values.number("rope_theta", fields.number("rope_theta", rope.default_theta))
    scaling = _read_scaling(fields, values, max_positions, rope.kinds or _NAMES)
    dim = int(head_dim * _read_partial(fields, values, rope.default_partial))
    description = RotaryDescription(dim=dim, theta=theta, scaling=scaling, is_interleaved=rope.is_interleaved)
    return description, _max_context(max_positions, scaling)


def rope_parameters(fields: Fields) -> Fields:
    """What a config says of the rotation in one object; the older one counts where it has entries."""
    older = fields.nested("rope_scaling")
    return fields.nested("rope_parameters") if older.is_empty else older


def _read_partial(fields: Fields, values: Fields, default: float | None) -> float:
    name = "partial_rotary_factor"
    partial = values.number(name, fields.number(name, 1.0 if default is None else default))
    if default is None and partial != 1.0:
        raise UnsupportedModelError(f"{name} is {partial}; allowed in this family: 1.0")
    if partial > 1:
        raise ConfigError(f"{name} is {partial}; allowed: at most 1")
    return partial


def _read_scaling(fields: Fields, rope: Fields, max_positions: int, kinds: Mapping[str, str]) -> RotaryScaling | None:
    name = rope.text("rope_type", rope.text("type", "default"))
    if name == "mrope" or "mrope_section" in rope:  # newer configs say "default", and the sections
        raise UnsupportedModelError(
            "the rotary embedding is mrope: it turns by the time, height and width of image patches, which a token of "
            f"text does not have; supported: text models with {', '.join(_KINDS)}"
        )
    match kinds.get(name):
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=rope.number("factor"))
        case "dynamic":
            return DynamicScaling(factor=rope.number("factor"), original_context=max_positions)
        case "yarn":
            return _read_yarn(rope, max_positions, _original_context(fields, rope, max_positions))
        case "longrope":
            return _read_longrope(rope, max_positions, _original_context(fields, rope, max_positions))
        case "llama3":
            return Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_context=_original_context(fields, rope, max_positions),
            )
        case _:
            raise UnsupportedModelError(f"rope_type is {name!r}; supported: {', '.join(kinds)}")


def _original_context(fields: Fields, rope: Fields, max_positions: int) -> int:
    """The context of the pretraining; beside the rope parameters it counts more than inside them."""
    return fields.integer(_ORIGINAL, rope.integer(_ORIGINAL, max_positions))


def _read_yarn(rope: Fields, max_positions: int, original_context: int) -> YarnScaling:
    factor = rope.number("factor", max_positions / original_context)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = rope.nonzero_number("mscale"), rope.nonzero_number("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = yarn_mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_context=original_context,
        attention_factor=attention_factor,
        beta_fast=rope.nonzero_number("beta_fast") or 32.0,
        beta_slow=rope.nonzero_number("beta_slow") or 1.0,
        truncate=rope.nullable_boolean("truncate", True),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much longer queries and keys become: arXiv:2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(rope: Fields, max_positions: int, original_context: int) -> LongRopeScaling:
    factor = rope.number("factor", max_positions / original_context)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = _longrope_mscale(factor, original_context)
    return LongRopeScaling(
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
        original_context=original_context,
        attention_factor=attention_factor,
    )


def _longrope_mscale(factor: float, original_context: int) -> float:
    if factor <= 1:
        return 1.0
    if original_context == 1:
        raise ConfigError(f"{_ORIGINAL} is 1; allowed: at least 2, or an attention_factor beside it")
    return math.sqrt(1 + math.log(factor) / math.log(original_context))


def _max_context(max_positions: int, scaling: RotaryScaling | None) -> int:
    """Configs may give the context before or after scaling; the longer one is served."""
    match scaling:
        case LinearScaling():
            return int(max_positions * scaling.factor)
        case DynamicScaling() | YarnScaling():
            return max(max_positions, int(scaling.original_context * scaling.factor))
        case _:
            return max_positions
