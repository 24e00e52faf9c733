"""What the scheduler tells the ranks and what they answer: numbered plain data, msgpack on the wire.

Ranks keep each running sequence in a slot, and a plan says only what changed: sequences that take a slot, slots that
are given back, tokens and blocks that were added. Nothing here knows torch.
"""

from collections.abc import Iterable, Iterator
from itertools import compress
from typing import NamedTuple

import msgspec

from workers.request import SamplingParams, TokenLogprobs


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a slot: a new one, or a preempted one that comes back."""

    slot: int
    token_ids: list[int]
    """Prompt and generated tokens so far."""
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: list[int]
    """Ids that min_tokens forbids: the model's end-of-sequence ids unless ignored, and the request's own."""


class ScheduledSequence(NamedTuple):
    """A sequence's share of a step: compute tokens `start : start + num_tokens`.

    The last one may be a token that the leader does not know yet: that which the slot sampled in the plan before.
    """

    slot: int
    start: int
    num_tokens: int
    learnt: list[int]
    """The tokens that the leader has learnt of since this slot was last planned, to append to what the rank knows."""
    new_blocks: list[int]
    """Block ids to append to the slot's block table; with several groups of layers, one for each side by side."""
    samples: bool
    """The share ends at the sequence's last token: sample the next one."""


class ScheduledSequences(msgspec.Struct, frozen=True, array_like=True):
    """The shares of a step, by columns: no object for each of thousands to make, to send and to take apart.

    A row is a ScheduledSequence; as a collection it is one of those.
    """

    slots: list[int]
    starts: list[int]
    nums_tokens: list[int]
    samples: list[bool]
    learnt: list[int]
    """The one token of each row that the leader has learnt of; anything in rows of `more_learnt`."""
    more_learnt: dict[int, list[int]]
    """By row, the tokens of those where it is not one: mostly of none."""
    new_blocks: dict[int, list[int]]
    """By row, those that there are."""

    @classmethod
    def of(cls, shares: Iterable[ScheduledSequence]) -> "ScheduledSequences":
        """Return these shares by columns."""
        shares = list(shares)
        return cls(
            [share.slot for share in shares],
            [share.start for share in shares],
            [share.num_tokens for share in shares],
            [share.samples for share in shares],
            [share.learnt[-1] if share.learnt else 0 for share in shares],
            {row: share.learnt for row, share in enumerate(shares) if len(share.learnt) != 1},
            {row: share.new_blocks for row, share in enumerate(shares) if share.new_blocks},
        )

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, row: int) -> ScheduledSequence:
        return ScheduledSequence(
            self.slots[row],
            self.starts[row],
            self.nums_tokens[row],
            self.learnt_in(row),
            self.new_blocks.get(row, []),
            self.samples[row],
        )

    @property
    def sampling_slots(self) -> list[int]:
        """Slots that sample."""
        return list(compress(self.slots, self.samples))

    def learnt_in(self, row: int) -> list[int]:
        """Return the tokens of a row that the leader has learnt of."""
        return self.more_learnt[row] if row in self.more_learnt else [self.learnt[row]]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Slots in `removed` are free before `new` is applied; `scheduled` has the one-token shares first.

    Before anything is computed, `saves` are copied, then `loads`, each rank its own part of the blocks.
    """

    number: int
    removed: list[int]
    new: list[NewSequence]
    scheduled: ScheduledSequences
    saves: list[tuple[int, int]] = []
    """(block, slot of the host tier); no slot twice."""
    loads: list[tuple[int, int]] = []
    """(slot of the host tier, block); no block twice."""
    follows: bool = False
    """Whether the scheduler has had work ever since the plan before."""


class ModelOutput(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the plan with the same number: what its sampling slots have sampled, in its order."""

    number: int
    slots: list[int]
    token_ids: list[int]
    """Negative where nothing could be sampled."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By slot, of those that were asked for them."""
    errors: dict[int, str] = {}
    """By slot, why nothing could be sampled (NaN logits, say): the request fails alone."""
