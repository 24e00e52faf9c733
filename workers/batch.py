"""A step that the scheduler puts together, until it is a plan in flight."""

from dataclasses import dataclass, field
from typing import NamedTuple

from workers.errors import GroupFailedError
from workers.host_tier import Copies
from workers.plan import ModelOutput, NewSequence, ScheduledSequences, StepPlan
from workers.sequence import Sequence


class InFlightPlan(NamedTuple):
    """A plan whose output has not come back, with the sequences of its shares in their order."""

    plan: StepPlan
    sequences: list[Sequence]

    def check_answers(self, output: ModelOutput) -> None:
        """Raise GroupFailedError unless the output is for this plan and for exactly its sampling slots."""
        if output.number != self.plan.number:
            raise GroupFailedError(f"output of step {output.number} came; expected: step {self.plan.number}")
        expected = self.plan.scheduled.sampling_slots
        if output.slots != expected:
            raise GroupFailedError(f"step {self.plan.number} answered for slots {output.slots}; expected: {expected}")
        if len(output.token_ids) != len(expected):
            raise GroupFailedError(
                f"step {self.plan.number} has {len(output.token_ids)} tokens; expected: {len(expected)}"
            )


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
        """Let a sequence take its slot, be it anew, with the blocks in its table as a start."""
        self.new.append(sequence)
        self.needed.update(self._filled[block] for block in sequence.block_table if block in self._filled)

    def drop(self, sequence: Sequence) -> None:
        """Take back the share of a sequence that nobody needs, if it has one."""
        self.budget += self.shares.pop(sequence, 0)
        if sequence in self.new:
            self.new.remove(sequence)

    def launch(self, number: int, removed_slots: list[int], copies: Copies, *, follows: bool) -> InFlightPlan:
        """Turn the step into a plan; note on its sequences that they are in flight and what the ranks know of them."""
        new = [_introduce(sequence) for sequence in self.new]
        sequences, nums_tokens = list(self.shares), list(self.shares.values())
        if max(nums_tokens) > 1:
            sequences.sort(key=lambda sequence: self.shares[sequence] > 1)
            nums_tokens = [self.shares[sequence] for sequence in sequences]
        scheduled = _plan_shares(sequences, nums_tokens)
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


def _plan_shares(sequences: list[Sequence], nums_tokens: list[int]) -> ScheduledSequences:
    """Return these shares, and note on their sequences what is planned of them."""
    starts: list[int] = []
    samples: list[bool] = []
    learnt: list[int] = []
    more_learnt: dict[int, list[int]] = {}
    new_blocks: dict[int, list[int]] = {}
    for sequence, num_tokens in zip(sequences, nums_tokens, strict=True):
        token_ids, block_table, start = sequence.token_ids, sequence.block_table, sequence.num_scheduled_tokens
        num_known, end = len(token_ids), start + num_tokens
        is_last = end == num_known + sequence.num_sampling
        if sequence.num_planned_tokens != num_known - 1:
            more_learnt[len(starts)] = token_ids[sequence.num_planned_tokens :]
        if sequence.num_planned_blocks != len(block_table):
            new_blocks[len(starts)] = block_table[sequence.num_planned_blocks :]
            sequence.num_planned_blocks = len(block_table)
        starts.append(start)
        samples.append(is_last)
        learnt.append(token_ids[-1])
        sequence.num_planned_tokens = num_known
        sequence.num_scheduled_tokens = end
        sequence.num_in_flight += 1
        sequence.num_sampling += is_last
    slots = [sequence.slot for sequence in sequences]
    return ScheduledSequences(slots, starts, nums_tokens, samples, learnt, more_learnt, new_blocks)
