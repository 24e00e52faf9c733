"""What a rank remembers of each slot: its tokens and its block table, in numpy, brought up to date by plans in order.

A step costs a few vectorized operations however many sequences it has. They are as few different ones as will do: since
the last step the model's weights have pushed everything else out of the caches, and a function of numpy or torch that a
step calls for the first time takes 20 to 100 us, not 1.

Array letters as in parallel/kernels/base.py: T packed tokens, S sequences of the step, M entries of the longest table;
G groups of layers, each of which has its own block in an entry.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from parallel.kernels.host_arrays import Int32Array, Int64Array
from workers.plan import NewSequence, ScheduledSequences, StepPlan

_FEW = 4
"""Up to so many rows it is faster to write one by one."""


class NewEntries(NamedTuple):
    """What a step changes in the block tables."""

    taken_slots: Int64Array
    """Slots whose tables are forgotten first."""
    places: Int64Array
    """Where blocks go, counted over the tables of all slots, one after the other."""
    blocks: Int32Array


class Slots:
    """The tokens and block tables of every slot. One thread."""

    def __init__(self, *, num_slots: int, max_context: int, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        max_entries = -(-max_context // block_size)
        # Untouched pages of zeros cost no memory.
        self.tokens = np.zeros((num_slots, max_context), np.int32)
        self.tables = np.zeros((num_slots, max_entries, num_groups), np.int32)
        self.num_tokens = np.zeros(num_slots, np.int64)
        """Tokens of each slot that are known here."""
        self._num_blocks = np.zeros(num_slots, np.int64)

    def take(self, new: NewSequence) -> None:
        """Give a slot to a sequence; what it held is forgotten."""
        num_tokens = len(new.token_ids)
        self.tokens[new.slot, :num_tokens] = new.token_ids
        self.num_tokens[new.slot] = num_tokens
        self.tables[new.slot].reshape(-1)[: self._num_blocks[new.slot]] = 0
        self._num_blocks[new.slot] = 0

    def new_entries(self, plan: StepPlan) -> NewEntries:
        """Return what `add_blocks` will write; new sequences have their slots by then."""
        new_blocks = plan.scheduled.new_blocks
        slots = np.array([plan.scheduled.slots[row] for row in new_blocks], np.int64)
        nums = np.array(list(map(len, new_blocks.values())), np.int64)
        blocks = np.array(list(chain.from_iterable(new_blocks.values())), np.int32)
        firsts = slots * self.tables[0].size + self._num_blocks[slots] - np.cumsum(nums) + nums
        return NewEntries(
            taken_slots=np.array([new.slot for new in plan.new], np.int64),
            places=np.repeat(firsts, nums) + np.arange(len(blocks)),
            blocks=blocks,
        )

    def add_blocks(self, shares: ScheduledSequences) -> None:
        """Continue the block tables by what is new in a step."""
        tables = self.tables.reshape(len(self.tables), -1)
        new_blocks = {shares.slots[row]: blocks for row, blocks in shares.new_blocks.items()}
        _append(tables, self._num_blocks, new_blocks)

    def add_tokens(self, shares: ScheduledSequences) -> None:
        """Continue the tokens by what the leader has learnt."""
        more = shares.more_learnt
        rows = [row for row in range(len(shares)) if row not in more] if more else slice(None)
        slots = np.array(shares.slots, np.int64)[rows]
        self.tokens[slots, self.num_tokens[slots]] = np.array(shares.learnt, np.int32)[rows]
        self.num_tokens[slots] += 1
        more = {shares.slots[row]: token_ids for row, token_ids in more.items() if token_ids}
        _append(self.tokens, self.num_tokens, more)

    def add_steps(self, slots_S: Int64Array, steps: Sequence[list[int]]) -> None:
        """Continue the tokens of these slots by those of several steps, in each of which every slot has one."""
        columns = self.num_tokens[slots_S] + np.arange(len(steps))[:, None]
        self.tokens[slots_S, columns] = steps
        self.num_tokens[slots_S] += len(steps)

    def slot_mappings(self, slots_T: Int64Array, positions_T: Int64Array) -> Int64Array:
        """Return [G, T]: where each token's key and value go, block id * block size + offset."""
        blocks_TG = self.tables[slots_T, positions_T // self.block_size]
        return blocks_TG.T * np.int64(self.block_size) + positions_T % self.block_size

    def block_tables(self, slots_S: Int64Array, max_context_len: int) -> Int32Array:
        """Return the block tables [G, S, M] of these slots, for contexts up to `max_context_len`."""
        return self.tables[slots_S, : self.num_entries(max_context_len)].transpose(2, 0, 1)

    def num_entries(self, context_len: int) -> int:
        """Return how many entries of a table a context has."""
        return -(-context_len // self.block_size)


def _append(rows: Int32Array, lengths: Int64Array, additions: dict[int, list[int]]) -> None:
    """Continue rows by their additions, all with one indexed write; `lengths` is how full each row is."""
    if len(additions) <= _FEW:
        for slot, addition in additions.items():
            start = int(lengths[slot])
            rows[slot, start : start + len(addition)] = addition
            lengths[slot] = start + len(addition)
        return
    values = list(chain.from_iterable(additions.values()))
    slots = np.array(list(additions), np.int64)
    if len(values) == len(slots):
        rows[slots, lengths[slots]] = values
        lengths[slots] += 1
        return
    nums = np.array([len(addition) for addition in additions.values()], np.int64)
    firsts = lengths[slots] - np.cumsum(nums) + nums  # where a row goes on, less what is in `values` before that
    rows[np.repeat(slots, nums), np.arange(len(values)) + np.repeat(firsts, nums)] = values
    lengths[slots] += nums
