"""What a sequence does to its logits before one is chosen: penalties on its tokens, and forbidden stop ids."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from parallel.kernels.host_arrays import Float32Array, Int64Array
from workers.plan import NewSequence

_LEAST_FACTOR, _LARGEST_FACTOR = 1e-9, 1e9
"""Range of the repetition penalty: logits that are divided by less, or multiplied by more, may become infinite."""


class RowEdits(NamedTuple):
    """What is done to the logits of K ids: a row of `Edits`. Good until the sequence's next token is counted."""

    ids: Int64Array
    """[K] int64, each once: the tokens that the sequence has seen, and the stop ids that are forbidden."""
    offsets: Float32Array
    """[K] float32: what each logit loses, after the factor; infinite where the token is forbidden."""
    offsets_again: Float32Array
    """[K] float32: what each loses instead if it is the last token, where that is not counted yet."""
    factor: float
    """Repetition penalty of all K ids: positive logits are divided by it, negative ones multiplied."""
    last_offset: float | None
    """What the last token loses if it is none of the ids; None: it is counted, or does not matter."""


_NO_IDS, _NO_OFFSETS = np.empty(0, np.int64), np.empty(0, np.float32)
NO_EDITS = RowEdits(_NO_IDS, _NO_OFFSETS, _NO_OFFSETS, 1.0, None)


class SequenceEdits:
    """The ids that a sequence has seen and what each loses, kept as tokens come, and the stop ids it must not give."""

    def __init__(self, new: NewSequence) -> None:
        params = new.sampling
        self._factor = min(max(params.repetition_penalty, _LEAST_FACTOR), _LARGEST_FACTOR)
        self._has_penalties = params.has_penalties
        self._presence_penalty, self._frequency_penalty = params.presence_penalty, params.frequency_penalty
        self._first_offset = self._offset(1)
        """What the logit of a token loses that is once in the output."""
        self._stop_ids = np.array(new.stop_token_ids, np.int64)
        self._is_stop_id = frozenset(new.stop_token_ids)
        self._stops_from = new.num_prompt_tokens + params.min_tokens
        """The first position at which a stop id may be."""
        self._num_tokens = new.num_prompt_tokens
        """Tokens of the prompt, and those of the output that are counted."""
        self._num_early = 0
        """Counted tokens that no plan has told yet."""
        self._places: dict[int, int] = {}
        self._counts: list[int] = []
        """How often the token of each place is in the output."""
        self._ids = np.empty(64, np.int64)
        self._is_stop = np.empty(64, np.bool_)
        self._offsets = np.empty((2, 64), np.float32)
        """What the logit of each place's token loses now, and after it comes once more."""
        if params.repetition_penalty != 1:
            for token_id in new.token_ids[: new.num_prompt_tokens]:
                self._place(token_id)
        self.add_output(new.token_ids[new.num_prompt_tokens :])

    def add_output(self, token_ids: Sequence[int]) -> None:
        """Count accepted tokens."""
        num_known = min(self._num_early, len(token_ids))
        self._num_early -= num_known
        self._num_tokens += len(token_ids) - num_known
        if not self._has_penalties:
            return
        for token_id in token_ids[num_known:]:
            place = self._place(token_id)
            self._counts[place] += 1
            self._offsets[0, place] = self._offsets[1, place]
            self._offsets[1, place] = self._offset(self._counts[place] + 1)

    def add_early(self, token_id: int) -> None:
        """Count a token of which no plan has told; one will."""
        self.add_output([token_id])
        self._num_early += 1

    def lacks_last(self, position: int) -> bool:
        """Whether the token before this position is not counted yet, and matters."""
        return self._has_penalties and self._num_tokens < position

    def at(self, position: int) -> RowEdits:
        """Return what is done to the logits of the token at this position."""
        num = len(self._places)
        ids, offsets = self._ids[:num], self._offsets[0, :num]
        again, last_offset = offsets, None
        if self.lacks_last(position):
            again, last_offset = self._offsets[1, :num], self._first_offset
        if position >= self._stops_from or not len(self._stop_ids):
            return RowEdits(ids, offsets, again, self._factor, last_offset)
        is_other, forbidden = ~self._is_stop[:num], np.full(len(self._stop_ids), np.inf, np.float32)
        return RowEdits(
            np.concatenate([ids[is_other], self._stop_ids]),
            np.concatenate([offsets[is_other], forbidden]),
            np.concatenate([again[is_other], forbidden]),
            self._factor,
            last_offset,
        )

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._counts)
            if place == len(self._ids):
                self._ids, self._is_stop, self._offsets = (
                    np.concatenate([array, array], axis=-1) for array in (self._ids, self._is_stop, self._offsets)
                )
            self._counts.append(0)
            self._ids[place], self._is_stop[place] = token_id, token_id in self._is_stop_id
            self._offsets[:, place] = 0, self._first_offset
        return place

    def _offset(self, count: int) -> float:
        return self._frequency_penalty * count + self._presence_penalty
