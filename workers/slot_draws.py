"""How the sequences in their slots choose tokens: a function of the plans, which each rank of a stage follows."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from parallel.kernels.host_arrays import Int64Array
from parallel.kernels.sampling import Edits, LastTokens
from workers.logit_edits import NO_EDITS, SequenceEdits
from workers.plan import NewSequence, StepPlan
from workers.request import GREEDY_TEMPERATURE
from workers.row_draws import EDITED, LIMITED, LOGPROBS, RANDOM, RowDraws


class SlotDraws:
    """Flags, temperature, truncation, seed and edits of each slot. One thread."""

    def __init__(self, num_slots: int) -> None:
        self._edits: dict[int, SequenceEdits] = {}
        self._num_logprobs = np.zeros(num_slots, np.int64)
        self._flags = np.zeros(num_slots, np.int64)
        self._columns = np.zeros((4, num_slots), np.float64)
        """The `columns` of RowDraws, for every slot."""
        self._seeds = np.zeros(num_slots, np.uint64)
        self._rows: tuple[Int64Array, RowDraws] | None = None
        """The slots that `rows` was asked for last, and its answer; until a slot changes."""

    def apply(self, plan: StepPlan) -> None:
        """Follow a plan: slots given back and taken, tokens accepted."""
        for slot in plan.removed:
            self.remove(slot)
        for new in plan.new:
            self.add(new)
        if self._edits:
            for row, slot in enumerate(plan.scheduled.slots):
                self.add_output(slot, plan.scheduled.learnt_in(row))

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
        if self._flags[new.slot] & EDITED:
            self._edits[new.slot] = SequenceEdits(new)
        self._num_logprobs[new.slot] = params.logprobs or 0
        temperature = params.temperature if is_random else 0.0
        self._columns[:, new.slot] = temperature, params.top_k, params.top_p, params.min_p
        self._seeds[new.slot] = params.seed

    def remove(self, slot: int) -> None:
        """Give the slot back."""
        self._rows = None
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

    def rows(self, slots: Int64Array) -> RowDraws:
        """Return how the sequences in these slots [S] choose; most steps bring the array of the step before."""
        if self._rows is None or self._rows[0] is not slots:
            self._rows = slots, RowDraws(self._flags[slots], self._columns[:, slots], self._seeds[slots])
        return self._rows[1]

    @property
    def has_edits(self) -> bool:
        """Whether a slot changes its logits."""
        return bool(self._edits)

    def edits(self, slots: Int64Array, positions: Int64Array, last_S: Tensor | None = None) -> Edits | None:
        """Return what is done to the logits for the tokens at these positions; None: nothing.

        Args:
            slots: [S] int64, on the host: the slot of each row.
            positions: [S] int64, on the host: the absolute position of the token to be chosen.
            last_S: [S] int64, on the device: the token before that, needed where some are not counted yet.
        """
        if not self._edits or not len(slots):
            return None
        of_rows = [
            NO_EDITS if (edits := self._edits.get(slot)) is None else edits.at(position)
            for slot, position in zip(slots.tolist(), positions.tolist(), strict=True)
        ]
        ids, offsets, offsets_again, factors, last_offsets = zip(*of_rows, strict=True)
        starts = [*accumulate(map(len, ids), initial=0)]
        last = None
        if any(last_offset is not None for last_offset in last_offsets):
            assert last_S is not None, "each token has been told"
            last = LastTokens(last_S, np.array(last_offsets, np.float32), np.concatenate(offsets_again))
        elif not starts[-1]:
            return None
        return Edits(
            np.array(starts, np.int64),
            np.concatenate(ids),
            np.array(factors, np.float32),
            np.concatenate(offsets),
            last,
        )

    def num_logprobs(self, slots: Int64Array) -> Int64Array:
        """Return how many alternatives are reported with the tokens of these slots, where any are."""
        return self._num_logprobs[slots]
