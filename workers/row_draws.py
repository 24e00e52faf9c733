"""By what the rows of a step choose tokens; steps that decode the same sequences share all of it but the positions."""

from functools import cached_property

import numpy as np

from parallel.kernels.base import Search, Sift
from parallel.kernels.host_arrays import Float64Array, Int32Array, Int64Array, UInt32Array, UInt64Array
from parallel.kernels.sampling import NOISE, Draws, Edits, NoiseArray

RANDOM, EDITED, LOGPROBS, LIMITED = 1, 2, 4, 8
"""What a row wants more than the largest logit: noise; other logits; log-probabilities; top-k, top-p or min-p."""
_MOST = np.iinfo(np.int32).max


class RowDraws:
    """Of these rows.

    Args:
        flags: [S], each the sum of those above.
        columns: [4, S], temperature, top_k, top_p, min_p; temperature is 0 where the largest logit is taken.
        seeds: [S].
    """

    def __init__(self, flags: Int64Array, columns: Float64Array, seeds: UInt64Array) -> None:
        self.flags = flags
        self.any_flag = int(np.bitwise_or.reduce(flags))
        self._temperature, self._top_k, self._top_p, self._min_p = columns
        self._seeds = seeds

    def search(self, positions: Int64Array, edits: Edits | None) -> Search | None:
        """What tells the tokens at these positions without logits; None: some rows want more of these."""
        if self.any_flag & (LOGPROBS | LIMITED):
            return None
        noise = _with_keys(self._noise, self._keys(positions)) if self.any_flag & RANDOM else None
        return Search(noise, edits)

    def sift(self, positions: Int64Array, edits: Edits | None) -> Sift | None:
        """What tells which logits matter; None: all, or none but the largest and what is drawn."""
        if self._sifted is None:
            return None
        noise, numbers = self._sifted
        keys = self._keys(positions)
        return Sift(_with_keys(noise, keys), numbers, edits, self._draws(keys))

    def draws(self, positions: Int64Array) -> Draws:
        """[S]: how the tokens at these positions are drawn."""
        return self._draws(self._keys(positions))

    def _draws(self, keys: UInt32Array) -> Draws:
        return Draws(noise=_with_keys(self._noise, keys), top_k=self._top_k, top_p=self._top_p, min_p=self._min_p)

    def _keys(self, positions: Int64Array) -> UInt32Array:
        """The key [S, 2] of each row's (seed, position): the same everywhere, independent over both.

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
        """Without the keys."""
        noise = np.zeros(len(self.flags), NOISE)
        noise["temperature"] = self._temperature
        return noise

    @cached_property
    def _sifted(self) -> tuple[NoiseArray, Int32Array] | None:
        """Noise without the keys, and numbers, of a `Sift`."""
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
