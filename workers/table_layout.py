"""Which entries of a block table stand for blocks, and how many blocks a sequence takes: arithmetic, no pool.

A table has an entry for each `block_size` tokens; at most the last is not full. Where the layers form several groups
(parallel/layer_groups.py), an entry holds a block for each group, side by side.

A group with a sliding window holds the last blocks only. `num_reached` is how many full blocks before a block border
the token at that border sees; as soon as a block is full, those further back are given back:

    window 10, blocks of 4 tokens: num_reached = 3          tokens |0123|4567|89ab|cdef|...
    16 tokens computed: the next sees 7 to 15, and          blocks | -  | B1 | B2 | B3 |
    the first block is free

Both which blocks a sequence holds and which it needs to start from a cached prefix thus follow from one number, that of
its full blocks. What a table says in front of them means nothing.
"""

from bisect import bisect_right
from typing import NamedTuple

from workers.sequence import Sequence


class SlidingGroup(NamedTuple):
    """A group of layers with a sliding window."""

    group: int
    num_reached: int


class TableLayout:
    """How the block tables of one replica lie."""

    def __init__(
        self, *, block_size: int, windows: tuple[int | None, ...], max_tokens_in_flight: int, num_blocks: int
    ) -> None:
        """`windows` as in LayerGroups; `max_tokens_in_flight`: the most of one sequence that are computed at once, in
        one plan or several; `num_blocks` of the pool.
        """
        self.block_size = block_size
        self.windows = windows
        self.num_groups = len(windows)
        self.num_blocks = num_blocks
        self.full = [group for group, window in enumerate(windows) if window is None]
        """The groups that hold all of a sequence."""
        self.sliding = [
            SlidingGroup(group, self.num_entries(window - 1))
            for group, window in enumerate(windows)
            if window is not None
        ]
        if self.sliding:  # what they take for a step and give back is to be a small part of the pool
            most = max(1, num_blocks // 4 // len(self.sliding)) * block_size
            max_tokens_in_flight = min(max_tokens_in_flight, most)
        self.max_tokens_in_flight = max_tokens_in_flight
        """The most tokens of one sequence to compute at once."""

    def num_entries(self, num_tokens: int) -> int:
        """Return how many entries this many tokens have."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds at once while so many tokens of it are computed."""
        return self.num_missing(self.num_entries(num_tokens), 0, num_tokens, num_full=0)

    def max_sequence_tokens(self, limit: int) -> int:
        """Return how many tokens of one sequence the whole pool can hold, or `limit` if that is less."""
        lengths = range(self.block_size, limit + self.block_size, self.block_size)
        return min(limit, bisect_right(lengths, self.num_blocks, key=self.num_blocks_of) * self.block_size)

    def held_by(self, sequence: Sequence) -> list[int]:
        """Return the blocks that a sequence holds, alone or with others, as `held` does."""
        return self.held(sequence.block_table, sequence.num_full_blocks)

    def held(self, table: list[int], num_full: int) -> list[int]:
        """Return the blocks that a table with this many full entries stands for, those to be evicted last first."""
        if not self.sliding:
            return table
        held = [table[i + group] for i in range(0, len(table), self.num_groups) for group in self.full]
        for group, num_reached in self.sliding:
            held += table[max(0, num_full - num_reached) * self.num_groups + group :: self.num_groups]
        return held

    def full_columns(self, sequence: Sequence) -> list[list[int]]:
        """Return, for each group that holds all of a sequence, its blocks in the entries that are full."""
        end = sequence.num_full_blocks * self.num_groups
        return [sequence.block_table[group : end : self.num_groups] for group in self.full]

    def num_more(self, sequence: Sequence, num_entries: int) -> int:
        """Return how many blocks more than it has a sequence holds at once on the way to so many entries."""
        if not self.sliding:  # asked of all who run, when one may start
            return num_entries * self.num_groups - len(sequence.block_table)
        num_begun = len(sequence.block_table) // self.num_groups
        num_left = len(sequence.token_ids) - sequence.num_computed_tokens
        return self.num_missing(num_entries, num_begun, num_left, num_full=sequence.num_full_blocks)

    def num_missing(self, num_entries: int, num_begun: int, num_left: int, *, num_full: int) -> int:
        """Return how many blocks more than in `num_begun` entries, `num_full` of them full, are held at once on the way
        to `num_entries`, with `num_left` tokens to compute.

        What is in flight, n tokens, begins in the block after the full ones and ends at most 1 + (n - 1) / block_size
        further:

            blocks  | free | free | num_reached ...... | begun | of what is in flight |
                                                   num_full
        """
        num_missing = (num_entries - num_begun) * len(self.full)
        if self.sliding:
            num_in_flight = 1 + self.num_entries(min(num_left, self.max_tokens_in_flight) - 1)
            for _, num_reached in self.sliding:
                num_free = max(0, num_full - num_reached)
                most = min(num_entries - num_free, num_reached + num_in_flight)
                num_missing += max(0, most - (num_begun - num_free))
        return num_missing
