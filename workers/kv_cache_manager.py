"""The scheduler's only view of memory: which blocks a sequence finds, gets, makes known and gives back.

A sequence's blocks lie in its `block_table`; at most the last of them is not full. The tensors are in kv_cache.py.
"""

from collections import Counter
from collections.abc import Iterable

from weft.block_hash import block_hash, root_hash

from workers.block_pool import BlockPool
from workers.sequence import Sequence


class KVCacheManager:
    """The paged cache of one replica, counted in blocks."""

    def __init__(self, pool: BlockPool, *, block_size: int, hash_key: bytes) -> None:
        self.block_size = block_size
        self._pool = pool
        self._hash_key = hash_key

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; they may still hold content for reuse."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Fraction of the blocks that sequences hold, 0 to 1."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks this many tokens take."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Return how many more blocks the sequence needs to hold all tokens that it has now."""
        return self.num_blocks_for(len(sequence.token_ids)) - len(sequence.block_table)

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks that the sequence could start from; good until the next call that allocates.

        Never the whole sequence: at least one token is left to compute, since the next one needs its logits.
        """
        if not self._pool.enable_prefix_caching:
            return []
        max_blocks = (len(sequence.token_ids) - 1) // self.block_size
        self._extend_hashes(sequence, max_blocks)
        blocks: list[int] = []
        for name in sequence.block_hashes[:max_blocks]:
            block = self._pool.lookup(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def fits(self, sequence: Sequence, prefix: list[int], *, reserve: int) -> bool:
        """Return whether all tokens of a sequence without blocks would fit now, with `reserve` blocks left free."""
        num_taken = self.num_missing_blocks(sequence) - len(prefix) + self._pool.count_free(prefix)
        return num_taken + reserve <= self._pool.num_free

    def share(self, sequence: Sequence, prefix: list[int]) -> None:
        """Let a sequence without blocks start with what `match_prefix` found for it."""
        self._pool.share(prefix)
        sequence.block_table.extend(prefix)
        sequence.num_committed_blocks = len(prefix)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the block table for the next `num_tokens` to compute: all blocks this takes, or none and False."""
        num_slots = len(sequence.block_table) * self.block_size
        num_excess = sequence.num_computed_tokens + num_tokens - num_slots
        if num_excess <= 0:
            return True
        num_new = self.num_blocks_for(num_excess)
        if num_new > self._pool.num_free:
            return False
        sequence.block_table.extend(self._pool.allocate(num_new))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Make known every full block of computed tokens that is not yet, so that others can share it.

        A block that another sequence made known first stays this sequence's own copy.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full == sequence.num_committed_blocks or not self._pool.enable_prefix_caching:
            return
        self._extend_hashes(sequence, num_full)
        for i in range(sequence.num_committed_blocks, num_full):
            self._pool.commit(sequence.block_table[i], sequence.block_hashes[i])
        sequence.num_committed_blocks = num_full

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence."""
        self._pool.free(reversed(sequence.block_table))  # reversed: the tail of a chain is evicted first
        sequence.block_table.clear()
        sequence.num_committed_blocks = 0

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly these sequences own blocks, each no more than one block too many."""
        owners: Counter[int] = Counter()
        for sequence in holders:
            owners.update(sequence.block_table)
            assert len(set(sequence.block_table)) == len(sequence.block_table), "a block is twice in one table"
            assert self.num_missing_blocks(sequence) >= 0, f"{sequence.request_id} has more blocks than tokens need"
        self._pool.check_integrity(owners)

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Continue the cached hash chain; earlier tokens never change, so that what is there stays true."""
        hashes = sequence.block_hashes
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(self._hash_key, sequence.request.cache_salt)
        for i in range(len(hashes), num_blocks):
            parent = block_hash(parent, sequence.token_ids[i * self.block_size : (i + 1) * self.block_size])
            hashes.append(parent)
