"""By what the sequences in their slots choose tokens: a function of the plans, which each rank of a stage follows."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from parallel.kernels.base import Search, Sift
from parallel.kernels.sampling import NOISE, Draws, Edits, LastTokens, NoiseArray
from workers.logit_edits import EditedTokens, SequenceEdits
from workers.plan import NewSequence, StepPlan
from workers.request import GREEDY_TEMPERATURE

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

RANDOM, EDITED, LOGPROBS, LIMITED = 1, 2, 4, 8
"""What a slot wants more than the largest logit: noise; other logits; log-probabilities; top-k, top-p or min-p."""
_MOST = np.iinfo(np.int32).max
_NO_FLAGS = np.empty(0, np.int64)


class SlotDraws:
    """Flags, temperature, truncation, seed and edits of each slot. One thread."""

    def __init__(self, num_slots: int) -> None:
        self._flagged: set[int] = set()
        self._edits: dict[int, SequenceEdits] = {}
        self._num_logprobs = np.zeros(num_slots, np.int64)
        self._flags = np.zeros(num_slots, np.int64)
        self._columns = np.zeros((4, num_slots), np.float64)
        """temperature, top_k, top_p, min_p; temperature is 0 where the largest logit is taken."""
        self._seeds = np.zeros(num_slots, np.uint64)

    def apply(self, plan: StepPlan) -> None:
        """Follow a plan: slots given back and taken, tokens accepted."""
        for slot in plan.removed:
            self.remove(slot)
        for new in plan.new:
            self.add(new)
        if self._edits:
            for share in plan.scheduled:
                self.add_output(share.slot, share.new_token_ids)

    def add(self, new: NewSequence) -> None:
        """Put a sequence into its slot, in place of whatever was there."""
        params = new.sampling
        is_random = params.temperature >= GREEDY_TEMPERATURE
        forbids_stop = bool(new.stop_token_ids) and params.min_tokens > 0
        self.remove(new.slot)
        self._flags[new.slot] = (
            RANDOM * is_random
            + EDITED * (params.has_penalties or forbids_stop)
            + LOGPROBS * (params.logprobs is not None)
            + LIMITED * (is_random and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0))
        )
        if self._flags[new.slot]:
            self._flagged.add(new.slot)
        if self._flags[new.slot] & EDITED:
            self._edits[new.slot] = SequenceEdits(new)
        self._num_logprobs[new.slot] = params.logprobs or 0
        temperature = params.temperature if is_random else 0.0
        self._columns[:, new.slot] = temperature, params.top_k, params.top_p, params.min_p
        self._seeds[new.slot] = params.seed

    def remove(self, slot: int) -> None:
        """Give the slot back."""
        self._flagged.discard(slot)
        self._edits.pop(slot, None)

    def add_output(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count accepted tokens of a sequence."""
        if (edits := self._edits.get(slot)) is not None:
            edits.add_output(token_ids)

    def add_early(self, slots: Int64Array, positions: Int64Array, token_ids: Sequence[int]) -> None:
        """Count the tokens before these positions, of which no plan has told yet."""
        for slot, position, token_id in zip(slots.tolist(), positions.tolist(), token_ids, strict=True):
            if (edits := self._edits.get(slot)) is not None and edits.lacks_last(position):
                edits.add_early(token_id)

    def flags(self, slots: Int64Array) -> Int64Array:
        """Of each of these slots; empty where none has any."""
        return self._flags[slots] if self._flagged else _NO_FLAGS

    def search(self, slots: Int64Array, positions: Int64Array, edits: Edits | None) -> Search | None:
        """What tells the tokens of these slots without logits; None: some want more of these."""
        flags = int(np.bitwise_or.reduce(self.flags(slots)))
        if flags & (LOGPROBS | LIMITED):
            return None
        return Search(self._noise(slots, positions) if flags & RANDOM else None, edits)

    def sift(self, slots: Int64Array, positions: Int64Array, edits: Edits | None) -> Sift | None:
        """What tells which logits of these slots matter; None: all, or none but the largest and what is drawn."""
        flags = self.flags(slots)
        any_flag, is_limited = int(np.bitwise_or.reduce(flags)), flags & LIMITED > 0
        top_k = self._columns[1, slots]
        if any_flag & LOGPROBS or not any_flag & LIMITED or not top_k[is_limited].all():
            return None
        draws = self.draws(slots, positions)
        noise = draws.noise.copy()
        noise["temperature"][is_limited] = 0
        numbers = np.where(is_limited, np.minimum(top_k, _MOST), 1).astype(np.int32)
        return Sift(noise, numbers, edits, draws)

    @property
    def has_edits(self) -> bool:
        """Whether a slot changes its logits."""
        return bool(self._edits)

    def edits(self, slots: Int64Array, positions: Int64Array, last_S: Tensor | None = None) -> Edits | None:
        """What is done to the logits of these slots for the tokens at these positions; None: nothing.

        Args:
            slots: [S], as are the next.
            positions: the absolute position of the token to be chosen.
            last_S: int64, on the device: the tokens before those, where some are not counted yet.
        """
        if not self._edits:
            return None
        num_rows = len(slots)
        sizes, factors = np.zeros(num_rows, np.int64), np.ones(num_rows, np.float32)
        last_offsets = np.full(num_rows, np.nan, np.float32)
        tokens: list[EditedTokens] = []
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            if (edits := self._edits.get(slot)) is not None:
                tokens.append(edits.at(position))
                sizes[row], factors[row] = len(tokens[-1].ids), edits.factor
                if edits.lacks_last(position):
                    last_offsets[row] = edits.first_offset
        last = None
        if not np.isnan(last_offsets).all():
            assert last_S is not None, "each token has been told"
            last = LastTokens(last_S, last_offsets, np.concatenate([each.offsets_again for each in tokens]))
        elif not sizes.any():
            return None
        ids, offsets = np.concatenate([each.ids for each in tokens]), np.concatenate([each.offsets for each in tokens])
        return Edits(np.concatenate([[0], sizes.cumsum()]), ids, factors, offsets, last)

    def num_logprobs(self, slots: Int64Array) -> Int64Array:
        """Alternatives that are reported with the tokens of these slots, where any are."""
        return self._num_logprobs[slots]

    def draws(self, slots: Int64Array, positions: Int64Array) -> Draws:
        """[S]: how these slots draw the tokens at these positions."""
        _, top_k, top_p, min_p = self._columns[:, slots]
        return Draws(noise=self._noise(slots, positions), top_k=top_k, top_p=top_p, min_p=min_p)

    def _noise(self, slots: Int64Array, positions: Int64Array) -> NoiseArray:
        noise = np.empty(len(slots), NOISE)
        noise["temperature"] = self._columns[0, slots]
        noise["key"] = noise_keys(self._seeds[slots], positions.astype(np.uint64))
        return noise


def noise_keys(seeds: UInt64Array, positions: UInt64Array) -> npt.NDArray[np.uint32]:
    """Return the key [S, 2] of each (seed, position): the same everywhere, independent over both.

    A counter-based generator in the sense of Salmon et al. (SC 2011), with the 64-bit mixer of SplitMix64 (Steele, Lea
    and Flood, OOPSLA 2014) as its block function.
    """
    bits = _mix(_mix(seeds + _GAMMA) ^ _mix(positions * _GAMMA + _OFFSET))
    return bits.astype("<u8").view("<u4").reshape(-1, 2)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_OFFSET = np.uint64(0xD1B54A32D192ED03)


def _mix(x: UInt64Array) -> UInt64Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
