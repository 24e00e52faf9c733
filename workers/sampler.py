"""Logits to tokens: penalties, temperature, truncation, counter-based draws. A row never depends on its batch.

The steps of a row, in this order; V is the vocabulary:

    log-probabilities   of the model's own distribution, if asked for
    penalties           repetition over prompt and output, then frequency and presence over the output
    min_tokens          stop ids get -inf while the output is shorter
    temperature         below 1e-5: the largest logit, and none of what follows
    top-k               the k largest stay
    top-p               the smallest set of the largest that has probability p of what top-k left
    min-p               those with at least min_p times the largest probability
    draw                the largest of what is left, each with noise(seed, position, token)

Which logits are edited how, logit_edits.py knows; from temperature on it is the business of the device's kernels
(kernels/sampling.py); this file knows the requests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallel.device.base import Device
from parallel.kernels.host_arrays import Int64Array, to_device
from parallel.kernels.sampling import IN_TORCH, Edits, TokenChoice
from workers.plan import ModelOutput
from workers.request import TokenLogprobs
from workers.row_draws import LOGPROBS, RANDOM
from workers.slot_draws import SlotDraws

_NOT_FINITE = "the model's logits are not finite (NaN, infinite, or no token is allowed)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was chosen for each row of a step, on its way to the host."""

    token_ids: Tensor
    """[S] int64, on the device; -1 where the logits are not finite."""
    slots: list[int]
    reported: list[tuple[int, int]]
    """(row, number of alternatives) of the rows that asked for log-probabilities."""
    wait: Callable[[], list[Tensor]]
    """Waits for the device and returns the tokens [S] and, of the R rows reported, the log-probabilities of the tokens
    [R], those of the k most likely ones [R, k], and the ids of these [R, k]."""

    def result(self, number: int) -> ModelOutput:
        """Wait for the device and return the answer to the plan of this number."""
        chosen, *logprobs = (tensor.tolist() for tensor in self.wait())
        if not self.reported and min(chosen, default=0) >= 0:
            return ModelOutput(number, self.slots, chosen)
        errors = {slot: _NOT_FINITE for slot, token_id in zip(self.slots, chosen, strict=True) if token_id < 0}
        reports = self._reports(chosen, *logprobs) if self.reported else {}
        return ModelOutput(number, self.slots, chosen, reports, errors)

    def _reports(
        self, chosen: list[int], values: list[float], top_values: list[list[float]], top_ids: list[list[int]]
    ) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities by slot, of rows that have a token."""
        return {
            self.slots[row]: TokenLogprobs(
                token_id=chosen[row], logprob=value, top=tuple(zip(ids[:num], lps[:num], strict=True))
            )
            for (row, num), value, ids, lps in zip(self.reported, values, top_ids, top_values, strict=True)
            if chosen[row] >= 0
        }


def nothing_sampled() -> Sampled:
    """Return the result of a step in which no sequence comes to its last token."""
    return Sampled(token_ids=torch.empty(0, dtype=torch.int64), slots=[], reported=[], wait=lambda: [torch.empty(0)])


class Sampler:
    """Samples for the sequences in their slots. Lives on the first tensor rank of the last stage; one thread."""

    def __init__(self, *, device: Device, draws: SlotDraws, choice: TokenChoice = IN_TORCH) -> None:
        self._device = device
        self._draws = draws
        self._choice = choice

    def sample(self, logits_SV: Tensor, slots: Int64Array, positions: Int64Array, edits: Edits | None) -> Sampled:
        """Choose one token for each row, without waiting for the device.

        Args:
            logits_SV: [S, V], float32 or the dtype of the model, on the device; may be overwritten.
            slots: [S] int64, on the host: the slot of each row.
            positions: [S] int64, on the host: the absolute position of the token to be chosen.
            edits: what is done to the logits first; None: nothing.
        """
        draws = self._draws.rows(slots)
        any_flag = draws.any_flag
        if any_flag:  # the largest needs no float32
            logits_SV = logits_SV.float()
        logits = logits_SV
        if edits is not None:
            logits = logits_SV.clone() if any_flag & LOGPROBS else logits_SV
            self._choice.edit(logits, edits, 0)
        token_ids = self._choice.choose(logits, draws.draws(positions) if any_flag & RANDOM else None)
        reported, logprobs = [], []
        if any_flag & LOGPROBS:
            rows = np.flatnonzero(draws.flags & LOGPROBS)
            numbers = self._draws.num_logprobs(slots[rows])
            reported = list(zip(rows.tolist(), numbers.tolist(), strict=True))
            logprobs = self._logprobs(logits_SV, token_ids, rows, int(numbers.max()))
        wait = self._device.start_copy([token_ids, *logprobs])
        return Sampled(token_ids=token_ids, slots=slots.tolist(), reported=reported, wait=wait)

    def take(self, token_ids_S: Tensor, slots: Int64Array) -> Sampled:
        """Take tokens that the model's head chose, [S] int64 on the device, -1 where logits are not finite."""
        wait = self._device.start_copy([token_ids_S])
        return Sampled(token_ids=token_ids_S, slots=slots.tolist(), reported=[], wait=wait)

    def _logprobs(self, logits_SV: Tensor, token_ids: Tensor, rows: Int64Array, number: int) -> list[Tensor]:
        """Return log-probabilities of the model itself: of the tokens chosen, of the largest, and the ids of these."""
        totals_R, top_values_RN, top_ids_RN = self._choice.rank(logits_SV, rows, min(number, logits_SV.shape[1]))
        index = to_device(rows, logits_SV.device)
        chosen_R = logits_SV[index, token_ids[index].clamp(min=0)]
        return [chosen_R - totals_R, top_values_RN - totals_R[:, None], top_ids_RN]
