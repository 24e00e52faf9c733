"""Rotary position embedding: the cosines and sines of every position, computed once and looked up.

How a head is turned with them is `Kernels.rotary`; which scaling a model uses is said in position_description.py.

A key stays in the paged cache, under the hash of its tokens, after the request that wrote it: so its rotation may
depend on its own position and on nothing else. Two scalings are defined by the length of the sequence, and are made a
function of the position here:

- dynamic: position p turns as in a sequence of p + 1 tokens. Up to the original context that is plain rotation; past
  it, it is what `transformers` computes when it generates token by token with a cache. (A prompt longer than the
  original context is turned there all at once, with the frequencies of its last token.)
- longrope: the long factors are used when `max_context` is longer than the original context, the short ones when
  it is not. Mixing both in one sequence would spoil the distances between its halves, so a server that wants the short
  factors sets its `max_context` to the original context.
"""

import math
from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from parallel.position_description import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryDescription,
    YarnScaling,
)

# Everything is computed in float32, in the order in which the models were trained: at position 32,768 one rounding of
# a frequency moves an angle by 0.002.

_BLOCK_ROWS = 1 << 14
"""Positions computed at once: what stands beside the tables of a long context is small."""


class RotaryTable:
    """Cosines and sines of the positions 0 .. max_context - 1; 8 bytes per position and pair of dims."""

    def __init__(self, description: RotaryDescription, max_context: int, *, device: torch.device) -> None:
        # on the CPU whatever the device, so that all ranks and machines turn alike
        cos_PR = torch.empty(max_context, description.dim // 2, dtype=torch.float32, device=device)
        self.angles = cos_PR, torch.empty_like(cos_PR)
        """Cosines and sines, float32 [max_context, R] each."""
        factor = _attention_factor(description)
        for first in range(0, max_context, _BLOCK_ROWS):
            positions_B = torch.arange(first, min(first + _BLOCK_ROWS, max_context))
            angles_BR = positions_B.float()[:, None] * inverse_frequencies(description, max_context, positions_B)
            for table, values in zip(self.angles, (angles_BR.cos(), angles_BR.sin()), strict=True):
                table[first : first + _BLOCK_ROWS] = values if factor == 1.0 else values.mul_(factor)

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32 [T, R] each, R = dim / 2; positions are int64 on the table's device."""
        cos_PR, sin_PR = self.angles
        return cos_PR.index_select(0, positions_T), sin_PR.index_select(0, positions_T)


class LayerRotations:
    """The tables of some layers: one for each kind of rotation among them. A layer may have none."""

    def __init__(self, rotaries: Sequence[RotaryDescription | None], max_context: int, *, device: torch.device) -> None:
        kinds = list(dict.fromkeys(rotaries))
        self.kind_of_layer = [kinds.index(rotary) for rotary in rotaries]
        """Index of each layer's kind of rotation."""
        self._tables = [None if kind is None else RotaryTable(kind, max_context, device=device) for kind in kinds]
        self.angles: list[tuple[Tensor, ...]] = [() if table is None else table.angles for table in self._tables]
        """Cosines and sines of all positions for each kind, as in `RotaryTable`; empty where layers do not rotate."""

    def __call__(self, positions_T: Tensor) -> list[tuple[Tensor, ...]]:
        """Return those of these positions, of each kind."""
        return [() if table is None else table(positions_T) for table in self._tables]


def inverse_frequencies(description: RotaryDescription, max_context: int, positions_B: Tensor) -> Tensor:
    """Angle per position of each pair of dims: float32 [R], or [B, R] where it depends on the position.

    Args:
        max_context: of all positions.
        positions_B: int64, ascending.
    """
    scaling = description.scaling
    plain = _plain(description)
    match scaling:
        case None:
            return plain
        case LinearScaling():
            return plain / scaling.factor
        case DynamicScaling():
            return _dynamic(description, scaling, positions_B)
        case YarnScaling():
            return _yarn(description, scaling)
        case LongRopeScaling():
            is_long = max_context > scaling.original_context
            factors = torch.tensor(scaling.long_factors if is_long else scaling.short_factors, dtype=torch.float32)
            return 1.0 / (factors * description.theta ** _exponents(description))
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case _:
            assert_never(scaling)


def _attention_factor(description: RotaryDescription) -> float:
    match description.scaling:
        case YarnScaling(attention_factor=factor) | LongRopeScaling(attention_factor=factor):
            return factor
        case _:
            return 1.0


def _exponents(description: RotaryDescription) -> Tensor:
    return torch.arange(0, description.dim, 2, dtype=torch.float32) / description.dim


def _plain(description: RotaryDescription) -> Tensor:
    frequencies: Tensor = 1.0 / (description.theta ** _exponents(description))
    return frequencies


def _dynamic(description: RotaryDescription, scaling: DynamicScaling, positions_B: Tensor) -> Tensor:
    """[B, R]: one row per position, that of a sequence which ends there."""
    original, factor = scaling.original_context, scaling.factor
    lengths_P = positions_B[positions_B >= original] + 1
    stretch_P = factor * lengths_P / original - (factor - 1)
    # raised in float64: torch rounds a single number, which the models saw, and a vector of them differently
    growth_P = stretch_P.double() ** (description.dim / (description.dim - 2))
    bases_P = description.theta * growth_P.float()
    stretched_PR = 1.0 / (bases_P[:, None] ** _exponents(description))
    num_plain = len(positions_B) - len(lengths_P)
    return torch.cat([_plain(description).expand(num_plain, -1), stretched_PR])


def _yarn(description: RotaryDescription, scaling: YarnScaling) -> Tensor:
    wavelengths = description.theta ** _exponents(description)
    kept = 1.0 / wavelengths
    interpolated = 1.0 / (scaling.factor * wavelengths)
    # the ramp runs from the dim that turns beta_fast times over the original context to that of beta_slow times
    low = _dim_of_rotations(description, scaling.beta_fast, scaling.original_context)
    high = _dim_of_rotations(description, scaling.beta_slow, scaling.original_context)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, description.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(description.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + kept * keep


def _dim_of_rotations(description: RotaryDescription, num_rotations: float, context: int) -> float:
    """The (fractional) pair of dims that turns `num_rotations` times in `context` positions."""
    wavelength = context / (num_rotations * 2 * math.pi)
    return description.dim * math.log(wavelength) / (2 * math.log(description.theta))


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / plain
    longest_kept = scaling.original_context / scaling.high_freq_factor
    shortest_divided = scaling.original_context / scaling.low_freq_factor
    keep = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - keep) * plain / scaling.factor + keep * plain
    scaled = torch.where(wavelengths > shortest_divided, plain / scaling.factor, between)
    return torch.where(wavelengths < longest_kept, plain, scaled)
