"""What the scheduler tells the ranks and what they answer: numbered plain data, msgpack on the wire.

Ranks keep each running sequence in a slot, and a plan says only what changed: sequences that take a slot, slots that
are given back, tokens and blocks that were added. Nothing here knows torch.

What a step has one of for each sequence is out of sight of Python's collector of cyclic garbage (`gc=False`): it is in
no cycle, and counting it the collector would run in most steps of 256 sequences.
"""

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


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence's share of a step: compute tokens `start : start + num_tokens`.

    The last one may be a token that the leader does not know yet: that which the slot sampled in the plan before.
    """

    slot: int
    start: int
    num_tokens: int
    learnt: int | list[int]
    """The token that the leader has learnt of since this slot was last planned, to append to what the rank knows; a
    list where there is none, or more than one. It nearly always is one: thousands of lists would set off the collector.
    """
    new_blocks: list[int]
    """Block ids to append to the slot's block table; with several groups of layers, one for each side by side."""
    samples: bool
    """The share ends at the sequence's last token: sample the next one."""

    @property
    def new_token_ids(self) -> list[int]:
        """The tokens that the leader has learnt of, as a list."""
        return [self.learnt] if isinstance(self.learnt, int) else self.learnt


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Slots in `removed` are free before `new` is applied; `scheduled` has the one-token shares first.

    Before anything is computed, `saves` are copied, then `loads`, each rank its own part of the blocks.
    """

    number: int
    removed: list[int]
    new: list[NewSequence]
    scheduled: list[ScheduledSequence]
    saves: list[tuple[int, int]] = []
    """(block, slot of the host tier); no slot twice."""
    loads: list[tuple[int, int]] = []
    """(slot of the host tier, block); no block twice."""
    follows: bool = False
    """Whether the scheduler has had work ever since the plan before."""


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The answer for one slot that samples."""

    slot: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Why nothing could be sampled (NaN logits, say); token_id is then -1 and the request fails alone."""


class ModelOutput(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the plan with the same number, in the order of its sampling slots."""

    number: int
    sampled: list[SampledToken]
