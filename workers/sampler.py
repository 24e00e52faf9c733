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

From temperature on it is the business of the device's kernels (kernels/sampling.py); this file knows the requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel.device.base import Device
from parallel.kernels.host_arrays import to_device
from parallel.kernels.sampling import ChooseTokens, choose_in_torch
from workers.plan import NewSequence, SampledToken, StepPlan
from workers.request import SamplingParams, TokenLogprobs
from workers.slot_draws import EDITED, LOGPROBS, RANDOM, SlotDraws

Int64Array = npt.NDArray[np.int64]

_LEAST_FACTOR, _LARGEST_FACTOR = 1e-9, 1e9
"""Of the repetition penalty: logits that are divided by less, or multiplied by more, may become infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was chosen for each row of a step, on its way to the host."""

    token_ids: Tensor
    """[S] int64, on the device; -1 where the logits are not finite."""
    slots: list[int]
    reported: list[tuple[int, int]]
    """(row, number of alternatives) of the rows that asked for log-probabilities."""
    wait: Callable[[], list[Tensor]]
    """For the tokens and, of the rows reported, [R] log-probabilities, [R, k] of the most likely, and [R, k] these."""

    def result(self) -> list[SampledToken]:
        """Wait for the device and return the tokens in the order of the rows."""
        chosen, *logprobs = (tensor.tolist() for tensor in self.wait())
        if not self.reported and min(chosen, default=0) >= 0:
            return list(map(SampledToken, self.slots, chosen))
        reports = self._reports(chosen, *logprobs) if self.reported else {}
        return [
            SampledToken(slot, token_id, reports.get(row)) if token_id >= 0 else _not_finite(slot)
            for row, (slot, token_id) in enumerate(zip(self.slots, chosen, strict=True))
        ]

    def _reports(
        self, chosen: list[int], values: list[float], top_values: list[list[float]], top_ids: list[list[int]]
    ) -> dict[int, TokenLogprobs]:
        return {
            row: TokenLogprobs(token_id=chosen[row], logprob=value, top=tuple(zip(ids[:num], lps[:num], strict=True)))
            for (row, num), value, ids, lps in zip(self.reported, values, top_ids, top_values, strict=True)
        }


def nothing_sampled() -> Sampled:
    """Of a step in which no sequence comes to its last token."""
    return Sampled(token_ids=torch.empty(0, dtype=torch.int64), slots=[], reported=[], wait=lambda: [torch.empty(0)])


class Sampler:
    """Samples for the sequences in their slots. Lives on the first tensor rank of the last stage; one thread."""

    def __init__(self, *, device: Device, num_slots: int, choose: ChooseTokens = choose_in_torch) -> None:
        self._device = device
        self._choose = choose
        self._rows: dict[int, _Row] = {}
        self._penalized: set[int] = set()
        self.draws = SlotDraws(num_slots)

    def apply(self, plan: StepPlan) -> None:
        """Follow a plan: slots given back and taken, tokens accepted. Comes before the plan's `sample`."""
        for slot in plan.removed:
            self.remove(slot)
        for new in plan.new:
            self.add(new)
        if self._penalized:
            for share in plan.scheduled:
                if share.slot in self._penalized:
                    self.append(share.slot, share.new_token_ids)

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count accepted tokens of a slot with penalties."""
        penalties = self._rows[slot].penalties
        if penalties is not None:
            penalties.add_output(token_ids)

    def add(self, new: NewSequence) -> None:
        """Put a sequence into its slot, in place of whatever was there."""
        self.remove(new.slot)
        self.draws.add(new)
        row = self._rows[new.slot] = _Row(new)
        if row.penalties is not None:
            self._penalized.add(new.slot)

    def remove(self, slot: int) -> None:
        """Give the slot back."""
        self._rows.pop(slot, None)
        self._penalized.discard(slot)
        self.draws.remove(slot)

    def sample(self, logits_SV: Tensor, slots: Int64Array, positions: Int64Array) -> Sampled:
        """Choose one token for each row, without waiting for the device.

        Args:
            logits_SV: [S, V], unchanged on return.
            slots: [S], the slot of each row.
            positions: [S], the absolute position of the token to be chosen.
        """
        flags = self.draws.flags(slots)
        any_flag = int(np.bitwise_or.reduce(flags))
        if any_flag:  # the largest needs no float32
            logits_SV = logits_SV.float()
        logits = self._edit(logits_SV, slots, positions, flags) if any_flag & EDITED else logits_SV
        token_ids = self._choose(logits, self.draws.draws(slots, positions) if any_flag & RANDOM else None)
        rows = np.flatnonzero(flags & LOGPROBS).tolist() if any_flag & LOGPROBS else []
        reported = [(row, self._rows[int(slots[row])].params.logprobs or 0) for row in rows]
        logprobs = self._logprobs(logits_SV, token_ids, reported) if reported else []
        wait = self._device.start_copy([token_ids, *logprobs])
        return Sampled(token_ids=token_ids, slots=slots.tolist(), reported=reported, wait=wait)

    def take(self, token_ids_S: Tensor, slots: Int64Array) -> Sampled:
        """The same for rows whose tokens [S] int64, -1 where logits are not finite, were chosen by the model's head."""
        wait = self._device.start_copy([token_ids_S])
        return Sampled(token_ids=token_ids_S, slots=slots.tolist(), reported=[], wait=wait)

    def _edit(self, logits_SV: Tensor, slots: Int64Array, positions: Int64Array, flags: Int64Array) -> Tensor:
        """Return a copy with penalties and forbidden stop ids applied, those of all rows at once."""
        logits = logits_SV.clone()
        vocab_size = logits.shape[1]
        edit = _PenaltyEdit()
        forbidden: list[int] = []
        for row in np.flatnonzero(flags & EDITED).tolist():
            state = self._rows[int(slots[row])]
            if state.penalties is not None:
                edit.add(state.penalties, row * vocab_size)
            if state.forbids_stop and int(positions[row]) - state.num_prompt_tokens < state.params.min_tokens:
                forbidden += [row * vocab_size + token_id for token_id in state.stop_token_ids if token_id < vocab_size]
        flat = logits.view(-1)
        edit.apply(flat)
        if forbidden:
            # not by an assignment, for which a number becomes a tensor of the host, and is waited for
            flat.index_fill_(0, to_device(np.array(forbidden), flat.device), -torch.inf)
        return logits

    def _logprobs(self, logits_SV: Tensor, token_ids: Tensor, reported: list[tuple[int, int]]) -> list[Tensor]:
        """Log-probabilities of the model's own distribution: of the tokens chosen, and the largest with their ids."""
        index = to_device(np.array([row for row, _ in reported]), logits_SV.device)
        logits = logits_SV[index]
        total = logits.logsumexp(-1, keepdim=True)
        values = (logits.gather(-1, token_ids[index].clamp(min=0)[:, None]) - total)[:, 0]
        most = max(num for _, num in reported)
        top_values, top_ids = logits.topk(min(most, logits.shape[1]), dim=-1)
        return [values, top_values - total, top_ids]


class _Row:
    """What the sampler knows of one slot beyond the columns."""

    def __init__(self, new: NewSequence) -> None:
        self.params = new.sampling
        self.num_prompt_tokens = new.num_prompt_tokens
        self.stop_token_ids = new.stop_token_ids
        self.forbids_stop = bool(new.stop_token_ids) and new.sampling.min_tokens > 0
        self.penalties: _Penalties | None = None
        if new.sampling.has_penalties:
            self.penalties = _Penalties(new.sampling, new.token_ids, new.num_prompt_tokens)


class _Penalties:
    """The ids that one sequence has seen and how often each is in its output, kept as tokens come."""

    def __init__(self, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.params = params
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        if params.repetition_penalty != 1:
            for token_id in token_ids[:num_prompt_tokens]:
                self._place(token_id)
        self.add_output(token_ids[num_prompt_tokens:])

    def add_output(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = self._place(token_id)  # before the array is read: it may grow
            self._counts[place] += 1

    @property
    def seen(self) -> tuple[Int64Array, npt.NDArray[np.float32]]:
        """The ids seen and their counts in the output; good until the next token."""
        num = len(self._places)
        return self._ids[:num], self._counts[:num]

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        return place


class _PenaltyEdit:
    """The penalties of a batch, gathered into one edit of its logits."""

    def __init__(self) -> None:
        self._places: list[Int64Array] = []
        self._offsets: list[npt.NDArray[np.float32]] = []
        self._factors: list[float] = []

    def add(self, penalties: _Penalties, first_place: int) -> None:
        """Gather those of one row, whose logits begin at `first_place`."""
        ids, counts = penalties.seen
        params = penalties.params
        self._places.append(ids + first_place)
        self._offsets.append(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
        self._factors.append(min(max(params.repetition_penalty, _LEAST_FACTOR), _LARGEST_FACTOR))

    def apply(self, logits: Tensor) -> None:
        """Divide positive logits by the repetition penalty, multiply the others, then subtract the other two."""
        if not self._places:
            return
        factors = np.repeat(np.array(self._factors, np.float32), [len(places) for places in self._places])
        places, factor, offset = (
            to_device(array, logits.device)
            for array in (np.concatenate(self._places), factors, np.concatenate(self._offsets, dtype=np.float32))
        )
        seen = logits[places]
        logits[places] = torch.where(seen > 0, seen / factor, seen * factor) - offset


def _not_finite(slot: int) -> SampledToken:
    return SampledToken(slot, -1, error="the model's logits are not finite (NaN, infinite, or no token is allowed)")
