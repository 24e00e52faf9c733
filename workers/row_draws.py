"""How the rows of a step choose tokens; steps that decode the same sequences share all of it but the positions."""

from functools import cached_property

import numpy as np

from parallel.kernels.host_arrays import Float64Array, Int32Array, Int64Array, UInt32Array, UInt64Array
from parallel.kernels.linears import Search, Sift
from parallel.kernels.sampling import NOISE, Draws, Edits, NoiseArray

RANDOM, EDITED, LOGPROBS, LIMITED = 1, 2, 4, 8
"""What a row wants more than the largest logit: noise; other logits; log-probabilities; top-k, top-p or min-p."""
_MOST = np.iinfo(np.int32).max


class RowDraws:
    """How each row of a step chooses its token.

    Args:
        flags: [S] int64, each a sum of RANDOM, EDITED, LOGPROBS and LIMITED.
        columns: [4, S] float64, temperature, top_k, top_p, min_p; temperature is 0 where the largest logit is taken.
        seeds: [S] uint64.
    """

    def __init__(self, flags: Int64Array, columns: Float64Array, seeds: UInt64Array) -> None:
        self.flags = flags
        self.any_flag = int(np.bitwise_or.reduce(flags))
        self._temperature, self._top_k, self._top_p, self._min_p = columns
        self._seeds = seeds

    def search(self, positions: Int64Array, edits: Edits | None) -> Search | None:
        """Return how the head finds the tokens at these positions [S] without logits; None: some rows want logits."""
        if self.any_flag & (LOGPROBS | LIMITED):
            return None
        noise = _with_keys(self._noise, self._keys(positions)) if self.any_flag & RANDOM else None
        return Search(noise, edits)

    def sift(self, positions: Int64Array, edits: Edits | None) -> Sift | None:
        """Return which logits the head has to give for these positions [S]; None: all, or none at all (`search`)."""
        if self._sifted is None:
            return None
        noise, numbers = self._sifted
        keys = self._keys(positions)
        return Sift(_with_keys(noise, keys), numbers, edits, self._draws(keys))

    def draws(self, positions: Int64Array) -> Draws:
        """Return how the tokens at these positions [S] are drawn."""
        return self._draws(self._keys(positions))

    def _draws(self, keys: UInt32Array) -> Draws:
        return Draws(noise=_with_keys(self._noise, keys), top_k=self._top_k, top_p=self._top_p, min_p=self._min_p)

    def _keys(self, positions: Int64Array) -> UInt32Array:
        """Return the key [S, 2] of each row's (seed, position): the same everywhere, independent over both.

        A counter-based generator in the sense of Salmon et al. (SC 2011), with the 64-bit mixer of SplitMix64 (Steele,
        Lea and Flood, OOPSLA 2014) as its block function.
        """
        bits = _mix(self._mixed_seeds ^ _mix(positions.astype(np.uint64) * _GAMMA + _OFFSET))
        return bits.astype("<u8", copy=False).view("<u4").reshape(-1, 2)

    @cached_property
    def _mixed_seeds(self) -> UInt64Array:
        return _mix(self._seeds + _GAMMA)

    @cached_property
    def _noise(self) -> NoiseArray:
        """Each row's noise, its key not filled in."""
        noise = np.zeros(len(self.flags), NOISE)
        noise["temperature"] = self._temperature
        return noise

    @cached_property
    def _sifted(self) -> tuple[NoiseArray, Int32Array] | None:
        """The noise, its keys not filled in, and the numbers of a `Sift`; None where `sift` has none."""
        is_limited = self.flags & LIMITED > 0
        if self.any_flag & LOGPROBS or not is_limited.any() or not self._top_k[is_limited].all():
            return None
        noise = self._noise.copy()
        noise["temperature"][is_limited] = 0
        return noise, np.where(is_limited, np.minimum(self._top_k, _MOST), 1).astype(np.int32)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_OFFSET = np.uint64(0xD1B54A32D192ED03)


def _mix(x: UInt64Array) -> UInt64Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _with_keys(noise: NoiseArray, keys: UInt32Array) -> NoiseArray:
    noise = noise.copy()
    noise["key"] = keys
    return noise
