"""A step that the scheduler puts together, until it is a plan in flight."""

from dataclasses import dataclass, field
from typing import NamedTuple

from workers.errors import GroupFailedError
from workers.host_tier import Copies
from workers.plan import ModelOutput, NewSequence, ScheduledSequence, StepPlan
from workers.sequence import Sequence

_NOTHING: list[int] = []
"""A list that stays empty: one for each share would be one more for the garbage collector to count."""


class InFlightPlan(NamedTuple):
    """A plan whose output has not come back, with the sequences of its shares in their order."""

    plan: StepPlan
    sequences: list[Sequence]

    def check_answers(self, output: ModelOutput) -> None:
        """Raise GroupFailedError unless the output is for this plan and for exactly its sampling slots."""
        if output.number != self.plan.number:
            raise GroupFailedError(f"output of step {output.number} came; expected: step {self.plan.number}")
        expected = [share.slot for share in self.plan.scheduled if share.samples]
        seen = [token.slot for token in output.sampled]
        if seen != expected:
            raise GroupFailedError(f"step {self.plan.number} answered for slots {seen}; expected: {expected}")


@dataclass(slots=True, kw_only=True)
class Batch:
    """The shares of one step. A sequence in it has its blocks already."""

    budget: int
    """Tokens that the step can still compute."""
    now_s: float
    shares: dict[Sequence, int] = field(default_factory=dict)
    """Tokens to compute of each sequence."""
    new: list[Sequence] = field(default_factory=list)
    """Sequences that take their slot in this step."""
    needed: set[Sequence] = field(default_factory=set)
    """Sequences that fill blocks in this step which another one starts from: they stay in the step."""
    _filled: dict[int, Sequence] = field(default_factory=dict)
    """Blocks that others can find already, and who fills them in this step."""

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence its share."""
        self.shares[sequence] = num_tokens
        self.budget -= num_tokens

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Give sequences one token each."""
        self.shares.update(dict.fromkeys(sequences, 1))
        self.budget -= len(sequences)

    def note_filled(self, sequence: Sequence, blocks: list[int]) -> None:
        """Note the blocks that a sequence fills, and has made known."""
        for block in blocks:
            self._filled[block] = sequence

    def start(self, sequence: Sequence) -> None:
        """Let a sequence take its slot, with the blocks in its table as a start."""
        self.new.append(sequence)
        self.needed.update(self._filled[block] for block in sequence.block_table if block in self._filled)

    def drop(self, sequence: Sequence) -> None:
        """Take back the share of a sequence that nobody needs, if it has one."""
        self.budget += self.shares.pop(sequence, 0)

    def launch(self, number: int, removed_slots: list[int], copies: Copies, *, follows: bool) -> InFlightPlan:
        """Turn the step into a plan; note on its sequences that they are in flight and what the ranks know of them."""
        new = [_introduce(sequence) for sequence in self.new]
        ones = [sequence for sequence, num_tokens in self.shares.items() if num_tokens == 1]
        more = [sequence for sequence, num_tokens in self.shares.items() if num_tokens > 1]
        sequences = ones + more
        scheduled = [_plan_share(sequence, self.shares[sequence]) for sequence in sequences]
        plan = StepPlan(number, removed_slots, new, scheduled, copies.saves, copies.loads, follows)
        return InFlightPlan(plan, sequences)


def _introduce(sequence: Sequence) -> NewSequence:
    sequence.num_planned_tokens = sequence.num_tokens
    return NewSequence(
        sequence.slot,
        sequence.token_ids.copy(),
        sequence.num_prompt_tokens,
        sequence.request.sampling,
        sorted(sequence.stop_token_ids),
    )


def _plan_share(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    start = sequence.num_scheduled_tokens
    token_ids, block_table = sequence.token_ids, sequence.block_table
    num_known_tokens, num_known_blocks = sequence.num_planned_tokens, sequence.num_planned_blocks
    samples = start + num_tokens == len(token_ids) + sequence.num_sampling
    num_learnt = len(token_ids) - num_known_tokens
    share = ScheduledSequence(
        sequence.slot,
        start,
        num_tokens,
        token_ids[-1] if num_learnt == 1 else token_ids[num_known_tokens:] if num_learnt else _NOTHING,
        block_table[num_known_blocks:] if num_known_blocks < len(block_table) else _NOTHING,
        samples,
    )
    sequence.num_planned_tokens = len(token_ids)
    sequence.num_planned_blocks = len(block_table)
    sequence.num_scheduled_tokens += num_tokens
    sequence.num_sampling += samples
    sequence.num_in_flight += 1
    return share
