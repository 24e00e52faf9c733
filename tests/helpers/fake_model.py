"""A model without tensors: follows plans as a rank does, tokens in place of keys and values, and samples by a hash.

Each cache cell holds the group of layers, the position and a checksum of the tokens up to it, for which it was
computed. The fake reads what a step's tokens see of every sequence back through its block table: a block that was
shared wrongly, reused too early, not brought back from the host or never computed raises an AssertionError.
"""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.plan import ModelOutput, NewSequence, ScheduledSequence, StepPlan
from workers.request import Request

VOCAB_SIZE = 97


def next_token(token_ids: Sequence[int]) -> int:
    """Return the token that follows: a pure function of all tokens so far."""
    return zlib.crc32(array("I", token_ids).tobytes()) % VOCAB_SIZE


def run_alone(
    request: Request, *, eos_token_ids: frozenset[int] = frozenset(), max_context: int = 1 << 30
) -> list[int]:
    """Return the generated tokens of a request, those submitted with it included, without any scheduler."""
    sampling = request.sampling
    stop_token_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    prompt, generated = list(request.prompt_token_ids), list(request.generated_token_ids)
    while len(generated) < sampling.max_tokens and len(prompt) + len(generated) < max_context:
        generated.append(next_token(prompt + generated))
        if generated[-1] in stop_token_ids and len(generated) > sampling.min_tokens:
            break
    return generated


@dataclass
class _Slot:
    token_ids: list[int]
    is_failing: bool
    checksums: list[int] = field(default_factory=list)
    """Of the tokens up to each one."""
    block_table: list[int] = field(default_factory=list)
    num_told: int = 0
    """Of the tokens, those that the leader told; one more may have been sampled here."""
    sampled: int = 0
    """The last token."""


@dataclass
class FakeModel:
    """One rank's view of the plans. `failing_prompts`: prompts for which sampling fails with an error."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    """Of each group of layers."""
    failing_prompts: set[tuple[int, ...]] = field(default_factory=set)
    num_computed_tokens: int = 0
    """Tokens computed since the start."""
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _cells: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    _host: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """The cells of each slot of the host tier."""
    _next_number: int = 0

    def run(self, plan: StepPlan) -> ModelOutput:
        """Follow a plan and return what it samples."""
        assert plan.number == self._next_number, f"plan {plan.number} came; expected: {self._next_number}"
        self._next_number += 1
        for slot in plan.removed:
            del self._slots[slot]
        for new in plan.new:
            self._introduce(new)
        self._copy(plan)
        lengths = plan.scheduled.nums_tokens
        num_ones = lengths.count(1)
        assert lengths[:num_ones] == [1] * num_ones, "the one-token shares are not first"
        assert len(set(plan.scheduled.slots)) == len(plan.scheduled), "a slot is twice in a plan"
        for share in plan.scheduled:  # every token is written before any is read, as in a layer
            self._compute(share)
        sampled = {share.slot: token_id for share in plan.scheduled if (token_id := self._sample(share)) is not None}
        errors = {slot: "logits are not finite" for slot, token_id in sampled.items() if token_id < 0}
        return ModelOutput(plan.number, list(sampled), list(sampled.values()), errors=errors)

    def _copy(self, plan: StepPlan) -> None:
        assert len({slot for _, slot in plan.saves}) == len(plan.saves), "a slot is saved to twice"
        assert len({block for _, block in plan.loads}) == len(plan.loads), "a block is loaded to twice"
        for block, slot in plan.saves:
            self._host[slot] = [self._cells[block * self.block_size + i] for i in range(self.block_size)]
        for slot, block in plan.loads:
            self._cells.update(enumerate(self._host[slot], block * self.block_size))

    def _introduce(self, new: NewSequence) -> None:
        assert new.slot not in self._slots, f"slot {new.slot} is taken"
        prompt = tuple(new.token_ids[: new.num_prompt_tokens])
        self._slots[new.slot] = _Slot(
            token_ids=list(new.token_ids), is_failing=prompt in self.failing_prompts, num_told=len(new.token_ids)
        )

    def _compute(self, share: ScheduledSequence) -> None:
        slot = self._slots[share.slot]
        for token_id in share.learnt:
            if slot.num_told == len(slot.token_ids):
                slot.token_ids.append(token_id)
            assert slot.token_ids[slot.num_told] == token_id, "the leader knows another token"
            slot.num_told += 1
        slot.block_table.extend(share.new_blocks)
        end = share.start + share.num_tokens
        assert share.num_tokens > 0
        if end == len(slot.token_ids) + 1:  # goes ahead of what the leader knows
            slot.token_ids.append(slot.sampled)
        assert end <= len(slot.token_ids)
        assert end <= slot.num_told + 1
        assert share.samples == (end == len(slot.token_ids))
        num_entries, remainder = divmod(len(slot.block_table), len(self.windows))
        assert (num_entries, remainder) == (-(-end // self.block_size), 0), "more blocks than tokens need, or too few"
        for token in slot.token_ids[len(slot.checksums) : end]:
            slot.checksums.append(zlib.crc32(token.to_bytes(4, "little"), slot.checksums[-1] if slot.checksums else 0))
        for group in range(len(self.windows)):
            self._write(slot, group, share.start, end)
        self.num_computed_tokens += share.num_tokens

    def _sample(self, share: ScheduledSequence) -> int | None:
        """Return the token that the share samples, if it does; -1 where the logits of its sequence are not finite."""
        slot = self._slots[share.slot]
        for group, window in enumerate(self.windows):
            self._read(
                slot, group, 0 if window is None else max(0, share.start - window + 1), share.start + share.num_tokens
            )
        if not share.samples:
            return None
        slot.sampled = 0 if slot.is_failing else next_token(slot.token_ids)
        return -1 if slot.is_failing else slot.sampled

    def _write(self, slot: _Slot, group: int, start: int, stop: int) -> None:
        for position in range(start, stop):
            self._cells[self._cell(slot, group, position)] = (group, position, slot.checksums[position])

    def _read(self, slot: _Slot, group: int, start: int, stop: int) -> None:
        for position in range(start, stop):
            seen = self._cells.get(self._cell(slot, group, position))
            assert seen == (group, position, slot.checksums[position]), "the cache holds something else"

    def _cell(self, slot: _Slot, group: int, position: int) -> int:
        entry, offset = divmod(position, self.block_size)
        return slot.block_table[entry * len(self.windows) + group] * self.block_size + offset
