"""What a sequence does to its logits before one is chosen: penalties on its tokens, and forbidden stop ids."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from workers.plan import NewSequence

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_LEAST_FACTOR, _LARGEST_FACTOR = 1e-9, 1e9
"""Of the repetition penalty: logits that are divided by less, or multiplied by more, may become infinite."""


class SequenceEdits:
    """The ids that a sequence has seen and what each loses, kept as tokens come, and the stop ids it must not give."""

    def __init__(self, new: NewSequence) -> None:
        params = new.sampling
        self.factor = min(max(params.repetition_penalty, _LEAST_FACTOR), _LARGEST_FACTOR)
        """Of `Edits`."""
        self._has_penalties = params.has_penalties
        self._presence_penalty, self._frequency_penalty = params.presence_penalty, params.frequency_penalty
        self._stop_ids = np.array(sorted(set(new.stop_token_ids)), np.int64)
        self._is_stop = frozenset(new.stop_token_ids)
        self._stops_from = new.num_prompt_tokens + params.min_tokens
        """The first position at which a stop id may be."""
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.int64)
        self._offsets = np.zeros(64, np.float32)
        if params.repetition_penalty != 1:
            for token_id in new.token_ids[: new.num_prompt_tokens]:
                self._place(token_id)
        self.add_output(new.token_ids[new.num_prompt_tokens :])

    def add_output(self, token_ids: Iterable[int]) -> None:
        """Count accepted tokens."""
        if not self._has_penalties:
            return
        for token_id in token_ids:
            place = self._place(token_id)  # before the arrays are read: they may grow
            self._counts[place] += 1
            self._offsets[place] = self._frequency_penalty * self._counts[place] + self._presence_penalty

    def at(self, position: int) -> tuple[Int64Array, Float32Array]:
        """The ids to be edited, each once, and their offsets, where the token at this position is chosen; good until
        the next token is counted.
        """
        num = len(self._places)
        ids, offsets = self._ids[:num], self._offsets[:num]
        if position >= self._stops_from or not len(self._stop_ids):
            return ids, offsets
        is_other = np.array([token_id not in self._is_stop for token_id in self._places], bool)
        forbidden = np.full(len(self._stop_ids), np.inf, np.float32)
        return np.concatenate([ids[is_other], self._stop_ids]), np.concatenate([offsets[is_other], forbidden])

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids, self._counts, self._offsets = (
                np.concatenate([array, np.zeros_like(array)]) for array in (self._ids, self._counts, self._offsets)
            )
        self._ids[place] = token_id
        return place
