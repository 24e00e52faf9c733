"""The state of one request in flight: its tokens, what of them is computed, its blocks and its times.

The scheduler owns every field; others read. Blocks are managed by kv_cache_manager.py.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from workers.request import Finish, Request, RequestId, Usage

NO_SLOT = -1

Order = tuple[int, float, int]
"""(level, rank within it, arrival number): smaller is served first and preempted last."""


class SequenceStatus(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """In the queue: never scheduled, or preempted. Holds no slot, and blocks only while it is suspended."""
    RUNNING = "running"
    """Holds a slot and blocks."""
    FINISHED = "finished"
    """Ended for its client. Holds its slot and blocks while it is in a plan in flight, nothing after."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request in flight. Compared and hashed by identity."""

    request: Request
    arrival_number: int
    stop_token_ids: frozenset[int]
    """Ids that end the sequence: the model's end-of-sequence ids unless ignored, and the request's own."""
    max_num_tokens: int
    """The sequence ends when it has this many tokens: prompt plus max_tokens, or the context if that is less."""
    arrival_s: float

    order: Order = (0, 0.0, 0)
    """Its place among the others: set when it is queued, and before a step by policies that look at progress."""
    order_until: int = 0
    """The number of its tokens from which that place may be another."""
    is_promoted: bool = False
    """Whether it waited too long, and is served before all others until it ends."""
    waiting_since_s: float = 0.0
    waited_s: float = 0.0
    """Time in the queue, and in a slot without a share of any step, all earlier stays together."""

    status: SequenceStatus = SequenceStatus.WAITING
    num_in_flight: int = 0
    """Plans in flight that have a share of the sequence."""
    num_sampling: int = 0
    """Plans in flight that sample for it: the number of tokens beyond `token_ids`, not known yet."""
    token_ids: list[int] = field(init=False)
    """Prompt and generated tokens so far."""
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    """Leading tokens whose keys and values are in the block table."""
    num_scheduled_tokens: int = 0
    """Leading tokens that are computed, or that plans in flight compute."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache: when the sequence was first scheduled, and since, while others computed
    them."""
    num_host_tokens: int = 0
    """Tokens of the last cached prefix that were brought back from the host."""
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """Computed tokens that the last preemption threw away."""

    slot: int = NO_SLOT
    num_planned_tokens: int = 0
    """Leading tokens that the ranks know."""
    num_planned_blocks: int = 0
    """Leading numbers in `block_table` that the ranks know."""
    block_table: list[int] = field(default_factory=list)
    """Block ids; with several groups of layers an entry has one for each, side by side."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the full blocks, as far as it was needed; stays valid through preemption."""
    num_full_blocks: int = 0
    """Leading entries of the block table whose tokens are computed."""
    num_known_blocks: int = 0
    """Leading entries of the block table that were offered to the hash index: the full ones, and those that its step in
    flight fills."""

    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    """When this replica sampled its first token."""
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.generated_token_ids]
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def request_id(self) -> RequestId:
        """The id of the request."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that no plan computes yet: one at least of a running sequence that is in no plan in flight."""
        return len(self.token_ids) + self.num_sampling - self.num_scheduled_tokens

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens so far, those submitted with the request included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_resumed(self) -> bool:
        """Whether it has been served before, here (then preempted) or on another replica: it waits before new ones."""
        return self.num_preemptions > 0 or bool(self.request.generated_token_ids)

    def usage(self, now_s: float) -> Usage:
        """Return the cost up to now. The times add up to that since arrival; preempted time counts where it falls."""
        first_scheduled_s = now_s if self.first_scheduled_s is None else self.first_scheduled_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            completion_tokens=self.num_output_tokens,
            queue_s=first_scheduled_s - self.arrival_s,
            prefill_s=first_token_s - first_scheduled_s,
            decode_s=now_s - first_token_s,
        )
