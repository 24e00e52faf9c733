"""The scheduler's only view of memory: which blocks a sequence finds, gets, makes known and gives back.

A sequence's blocks lie in its `block_table`, as table_layout.py says. The tensors are in kv_cache.py.

What was evicted to the host (host_tier.py) is found like a block, and becomes one when a sequence starts from it.
"""

from collections import Counter
from collections.abc import Iterable

from weft.block_hash import block_hashes, root_hash

from workers.block_pool import BlockPool
from workers.host_tier import Content, Copies, HostTier
from workers.sequence import Sequence
from workers.table_layout import TableLayout

_UNLIMITED = 1 << 62
_NO_BLOCK = 0
"""Entry of a table where a group has no block: whatever a rank may use as an index."""
_ON_HOST = -1
"""Stands for a block in what `match_prefix` found: the host has the content."""


class KVCacheManager:
    """The paged cache of one replica, counted in blocks."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        hash_key: bytes,
        windows: tuple[int | None, ...] = (None,),
        max_tokens_in_flight: int = _UNLIMITED,
    ) -> None:
        """`windows` as in LayerGroups; `max_tokens_in_flight` as in TableLayout."""
        self.block_size = block_size
        self.pool = pool
        """Blocks of the replica: to read, and for `take_events`; all else is the manager's."""
        self.layout = TableLayout(
            block_size=block_size,
            windows=windows,
            max_tokens_in_flight=max_tokens_in_flight,
            num_blocks=pool.num_blocks,
        )
        self._hash_key = hash_key
        self._num_groups = self.layout.num_groups

    @classmethod
    def with_pool(
        cls,
        num_blocks: int,
        *,
        block_size: int,
        hash_key: bytes,
        windows: tuple[int | None, ...] = (None,),
        max_tokens_in_flight: int = _UNLIMITED,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
    ) -> "KVCacheManager":
        """Return one over a new pool of so many blocks, with a host tier of `num_host_blocks`."""
        pool = BlockPool(
            num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            num_groups=len(windows),
            host=HostTier(num_host_blocks),
        )
        return cls(
            pool, block_size=block_size, hash_key=hash_key, windows=windows, max_tokens_in_flight=max_tokens_in_flight
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; they may still hold content for reuse."""
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Fraction of the blocks that sequences hold, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def num_held_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks a sequence holds, alone or with others."""
        return len(self.layout.held_by(sequence))

    def num_reserved_blocks(self, sequence: Sequence) -> int:
        """Return how many more blocks a running sequence may hold with its tokens and one more block of them."""
        return self.layout.num_more(sequence, self.layout.num_entries(len(sequence.token_ids)) + 1)

    def num_tokens_at_risk(self, sequence: Sequence) -> int:
        """Return how many computed tokens go with the blocks that no other sequence holds, should those be evicted.

        What others hold can be found again, up to the first block that is this sequence's alone.
        """
        num_kept = min(map(self.pool.count_leading_shared, self.layout.full_columns(sequence)), default=0)
        return sequence.num_computed_tokens - num_kept * self.block_size

    def least_tokens_at_risk(self, sequence: Sequence) -> int:
        """Return a number that `num_tokens_at_risk` is not below, and mostly the same: for much less.

        Whoever holds a block mostly holds those before it too, so that bisection finds the first that nobody else does.
        It finds a later one where a sequence computed a copy of a block that was known already.
        """
        num_kept = min(map(self.pool.bisect_shared, self.layout.full_columns(sequence)), default=0)
        return sequence.num_computed_tokens - num_kept * self.block_size

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Return a table of what the sequence could start from, for `share`; good until the next call that allocates.

        Never the whole sequence: at least one token is left to compute, since the next one needs its logits.
        """
        if not self.pool.enable_prefix_caching:
            return []
        max_blocks = (len(sequence.token_ids) - 1) // self.block_size
        self._extend_hashes(sequence, max_blocks)
        hashes = sequence.block_hashes[:max_blocks]
        columns = {group: self._leading_blocks(hashes, group) for group in self.layout.full}
        num_blocks = min(map(len, columns.values()), default=max_blocks)
        if self._num_groups == 1 and not self.layout.sliding:
            return columns[0]
        num_blocks = self._fit_windows(hashes, num_blocks)
        for group, num_reached in self.layout.sliding:
            first = max(0, num_blocks - num_reached)
            columns[group] = [_NO_BLOCK] * first + self._leading_blocks(hashes[first:num_blocks], group)
        return [columns[group][i] for i in range(num_blocks) for group in range(self._num_groups)]

    def knows_next(self, sequence: Sequence) -> bool:
        """Whether somebody made known the block that a running sequence computes next, so that `match_prefix` may find
        more than the sequence has.
        """
        num_blocks = sequence.num_scheduled_tokens // self.block_size + 1
        if not self.pool.enable_prefix_caching or num_blocks * self.block_size >= len(sequence.token_ids):
            return False
        self._extend_hashes(sequence, num_blocks)
        return self.pool.lookup(sequence.block_hashes[num_blocks - 1]) is not None

    def fits(self, sequence: Sequence, prefix: list[int], *, reserve: int) -> bool:
        """Return whether all tokens of a sequence without blocks would fit now, with `reserve` blocks left free."""
        num_prefix = len(prefix) // self._num_groups
        num_blocks = self.layout.num_entries(len(sequence.token_ids))
        num_left = len(sequence.token_ids) - num_prefix * self.block_size
        num_taken = self.layout.num_missing(num_blocks, num_prefix, num_left, num_full=num_prefix)
        held = self.layout.held(prefix, num_prefix)
        num_on_host = held.count(_ON_HOST)
        if num_on_host:
            held = [block for block in held if block != _ON_HOST]
        num_taken += num_on_host + self.pool.count_free(held)
        return num_taken + reserve <= self.pool.num_free

    def fits_rest(self, sequence: Sequence, *, reserve: int) -> bool:
        """Return whether all tokens of a sequence that kept its blocks would fit now, `reserve` blocks left free."""
        num_more = self.layout.num_more(sequence, self.layout.num_entries(len(sequence.token_ids)))
        return num_more + reserve <= self.pool.num_free

    def share(self, sequence: Sequence, prefix: list[int]) -> None:
        """Let a sequence without blocks start with what `match_prefix` found for it."""
        num_prefix = len(prefix) // self._num_groups
        self.pool.share([block for block in self.layout.held(prefix, num_prefix) if block != _ON_HOST])
        if _ON_HOST in prefix:
            prefix = self._restore(sequence, prefix)
        sequence.block_table.extend(prefix)
        sequence.num_full_blocks = sequence.num_known_blocks = num_prefix

    def take_copies(self) -> Copies:
        """Return what the plan that is made now copies from and to the host before it computes."""
        return self.pool.take_copies()

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the block table for the next `num_tokens` to compute: all blocks this takes, or none and False."""
        num_tokens += sequence.num_scheduled_tokens
        if num_tokens * self._num_groups <= len(sequence.block_table) * self.block_size:
            return True
        num_new = self.layout.num_entries(num_tokens) * self._num_groups - len(sequence.block_table)
        if num_new > self.pool.num_free:
            return False
        sequence.block_table.extend(self.pool.allocate(num_new))
        return True

    def commit(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Make known the blocks that the next `num_tokens` fill, so that others can share them, and return these.

        Those with a token that is not known yet are left for later. They are not computed yet: whoever finds them reads
        them in the same step or a later one, and in each layer the keys and values of a step are written before any are
        read. A block that another sequence made known first stays this sequence's own copy.
        """
        num_full = (sequence.num_scheduled_tokens + num_tokens) // self.block_size
        if num_full <= sequence.num_known_blocks:  # in most steps
            return []
        return self._make_known(sequence, min(num_full, len(sequence.token_ids) // self.block_size))

    def at_block_border(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return those whose next token is the first or the last of a block: `allocate` and `commit` of that one token
        have nothing to do for the others.
        """
        size = self.block_size
        return [sequence for sequence in sequences if (sequence.num_scheduled_tokens + 1) % size <= 1]

    def retract(self, sequence: Sequence) -> None:
        """Take back what `commit` made known and nobody computed."""
        start, stop = (num * self._num_groups for num in (sequence.num_full_blocks, sequence.num_known_blocks))
        for block in sequence.block_table[start:stop]:
            self.pool.forget(block)
        sequence.num_known_blocks = min(sequence.num_known_blocks, sequence.num_full_blocks)

    def disown(self, sequence: Sequence) -> None:
        """Let nobody find any more what a sequence was computed from, so that it is computed anew."""
        for name in sequence.block_hashes:
            for group in range(self._num_groups):
                self.pool.discard(Content(name, group))

    def settle(self, sequence: Sequence) -> None:
        """Note which blocks have been filled; make known those left for later, give back what is out of sight.

        A sequence that ended has one more token computed than it knows, if it ended with that token in flight.
        """
        num_full, first = sequence.num_computed_tokens // self.block_size, sequence.num_full_blocks
        if num_full != first:
            num_full = min(num_full, len(sequence.token_ids) // self.block_size)
        if num_full == first:
            return
        self._make_known(sequence, num_full)
        sequence.num_full_blocks = num_full
        for group, num_reached in self.layout.sliding:
            start, stop = (max(0, num - num_reached) * self._num_groups + group for num in (first, num_full))
            self.pool.free(sequence.block_table[start : stop : self._num_groups])

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence."""
        held = self.layout.held_by(sequence)
        self.pool.free(reversed(held))  # reversed: the tail of a chain is evicted first
        sequence.block_table.clear()
        sequence.num_full_blocks = sequence.num_known_blocks = 0

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly these sequences own blocks, each no more than one block too many."""
        owners: Counter[int] = Counter()
        for sequence in holders:
            held = self.layout.held_by(sequence)
            owners.update(held)
            assert len(set(held)) == len(held), "a block is twice in one table"
            num_entries, remainder = divmod(len(sequence.block_table), self._num_groups)
            assert not remainder, f"{sequence.request_id} has a part of an entry"
            assert num_entries <= self.layout.num_entries(len(sequence.token_ids) + sequence.num_sampling), (
                f"{sequence.request_id} has more blocks than tokens need"
            )
            num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_size
            assert sequence.num_full_blocks == num_full, "a block is full and not noted, or noted before it is computed"
            assert not self.pool.enable_prefix_caching or sequence.num_known_blocks >= sequence.num_full_blocks
        self.pool.check_integrity(owners)

    # The hash chain

    def _make_known(self, sequence: Sequence, num_full: int) -> list[int]:
        """Offer the full blocks to the index, as far as they have not been, and return these."""
        if num_full <= sequence.num_known_blocks or not self.pool.enable_prefix_caching:
            return []
        self._extend_hashes(sequence, num_full)
        start, stop = sequence.num_known_blocks * self._num_groups, num_full * self._num_groups
        blocks = sequence.block_table[start:stop]
        for i, block in enumerate(blocks, start):
            self.pool.commit(block, sequence.block_hashes[i // self._num_groups], i % self._num_groups)
        sequence.num_known_blocks = num_full
        return blocks

    def _find(self, name: bytes, group: int) -> int | None:
        block = self.pool.lookup(name, group)
        return _ON_HOST if block is None and self.pool.is_on_host(name, group) else block

    def _leading_blocks(self, hashes: list[bytes], group: int) -> list[int]:
        blocks = self.pool.lookup_leading(hashes, group)
        if self.pool.host.num_slots:
            rest = (self._find(name, group) for name in hashes[len(blocks) :])
            blocks += iter(rest.__next__, None)
        return blocks

    def _restore(self, sequence: Sequence, prefix: list[int]) -> list[int]:
        """The prefix with a block for each content that the host has."""
        places = [i for i, block in enumerate(prefix) if block == _ON_HOST]
        entries = {i // self._num_groups for i in places}
        sequence.num_host_tokens = sum(
            min(max(0, sequence.num_prompt_tokens - entry * self.block_size), self.block_size) for entry in entries
        )
        contents = [Content(sequence.block_hashes[i // self._num_groups], i % self._num_groups) for i in places]
        table = prefix.copy()
        for i, block in zip(places, self.pool.restore(contents), strict=True):
            table[i] = block
        return table

    def _fit_windows(self, hashes: list[bytes], num_blocks: int) -> int:
        """The most leading blocks, at most `num_blocks`, at whose end each group with a window has what it sees."""
        num_agreed = 0
        while num_agreed < len(self.layout.sliding):
            num_agreed = 0
            for group, num_reached in self.layout.sliding:
                num_fitting = self._fit_window(hashes, num_blocks, group, num_reached)
                num_agreed += num_fitting == num_blocks
                num_blocks = num_fitting
        return num_blocks

    def _fit_window(self, hashes: list[bytes], num_blocks: int, group: int, num_reached: int) -> int:
        i = num_blocks
        while i > max(0, num_blocks - num_reached):
            i -= 1
            if self._find(hashes[i], group) is None:
                num_blocks = i
        return num_blocks

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Continue the cached hash chain; earlier tokens never change, so that what is there stays true."""
        hashes = sequence.block_hashes
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(self._hash_key, sequence.request.cache_salt)
        token_ids = sequence.token_ids[len(hashes) * self.block_size : num_blocks * self.block_size]
        hashes += block_hashes(parent, token_ids, self.block_size)
