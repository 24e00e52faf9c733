"""Physical KV blocks: who owns them, which hold known content, and which is evicted next.

Knows block ids and hashes; sequences are kv_cache_manager.py's. Every operation is O(1) for each block it touches.
Each group of layers has an index of its own, for it computes other keys and values from the same tokens.

    owned    at least one reference; maybe in the hash index
    free     no reference; maybe still in the index, so that a later sequence can share its content before it is evicted

What is evicted goes to the host tier (host_tier.py), from which `restore` brings it back into other blocks. A content
is resident while either has it. Nobody gives back a block that is in the index before the plan that fills it is made
(see KVCacheManager.retract), so what is evicted was computed by a plan before the next.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from workers.host_tier import Content, Copies, HostTier


class BlockPool:
    """Blocks with reference counts, a hash index and a free list in eviction order. Block 0 is a block like any other.

    Eviction takes blocks without known content first, then the least recently freed. Whoever frees the tail of a chain
    before its head, as `free` asks, thereby has leaves evicted before the blocks that lead to them.
    """

    def __init__(
        self, num_blocks: int, *, enable_prefix_caching: bool, num_groups: int = 1, host: HostTier | None = None
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; allowed: at least 1")
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.host = host or HostTier()
        """What was evicted; to read."""
        self._num_references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._group_of = [0] * num_blocks  # of blocks that have a hash
        self._indexes: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # Next to be evicted first. Not a plain dict: finding its first key is slow after many deletions in front.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._events: dict[bytes, bool] = {}  # hash -> whether it was stored, else evicted

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks with one reference each, evicting what they held. Not more than `num_free`."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks asked, {len(self._free)} free"
        blocks = []
        for _ in range(num_blocks):
            block, _ = self._free.popitem(last=False)
            if self._hash_of[block] is not None:
                self._evict(block)
            self._num_references[block] = 1
            blocks.append(block)
        return blocks

    def lookup(self, block_hash: bytes, group: int = 0) -> int | None:
        """Return the group's block of this content; the next `allocate` may evict it unless it is shared before."""
        return self._indexes[group].get(block_hash)

    def lookup_leading(self, block_hashes: list[bytes], group: int = 0) -> list[int]:
        """Return what `lookup` finds of each until it first finds none, for much less."""
        return list(iter(map(self._indexes[group].get, block_hashes).__next__, None))

    def is_on_host(self, block_hash: bytes, group: int = 0) -> bool:
        """Whether `restore` can bring back the group's content; the next `allocate` may take it from the host too."""
        return Content(block_hash, group) in self.host

    def restore(self, contents: list[Content]) -> list[int]:
        """Take blocks with one reference each, into which the next plan loads these contents of the host.

        Not more than `num_free`; no block of the pool may hold any of them.
        """
        self.host.hold(contents)  # before others are saved
        blocks = self.allocate(len(contents))
        for block, content in zip(blocks, contents, strict=True):
            self.host.load(block, content)
            self._add(block, content.block_hash, content.group)
        return blocks

    def take_copies(self) -> Copies:
        """Return what the plan that is made now copies from and to the host."""
        return self.host.take_copies()

    def count_free(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks would leave the free list if they were shared."""
        references = self._num_references
        return [references[block] for block in blocks].count(0)

    def count_leading_shared(self, blocks: list[int]) -> int:
        """Return how many of these owned blocks come before the first that has one reference only."""
        references = self._num_references
        return next((i for i, block in enumerate(blocks) if references[block] == 1), len(blocks))

    def bisect_shared(self, blocks: list[int]) -> int:
        """Return the same where no block after that first one has more references; else it may be more, never less."""
        references = self._num_references
        return bisect_left(blocks, True, key=lambda block: references[block] == 1)

    def share(self, blocks: list[int]) -> None:
        """Add one reference to each of these indexed blocks."""
        for block in blocks:
            if not self._num_references[block]:
                del self._free[block]
            self._num_references[block] += 1

    def commit(self, block: int, block_hash: bytes, group: int = 0) -> None:
        """Index an owned block's content. Where another block holds the same, that one stays in the index."""
        index = self._indexes[group]
        if not self.enable_prefix_caching or block_hash in index:
            return
        assert self._num_references[block], f"block {block} is free"
        assert self._hash_of[block] is None, f"block {block} holds other content"
        self._add(block, block_hash, group)
        if self.host.num_slots and self.is_on_host(block_hash, group):
            return
        if len(self._indexes) > 1 and not self._is_resident(block_hash):
            return
        self._note_event(block_hash, is_stored=True)

    def forget(self, block: int) -> None:
        """Take an owned block's content from the index, if it is there: it is not what its hash says."""
        if self._hash_of[block] is not None:
            self._note_loss(self._remove(block))

    def discard(self, content: Content) -> None:
        """Take a content from the index, and from the host unless the next plan loads it from there."""
        block_hash, group = content
        if not self._has(block_hash, group):
            return
        block = self._indexes[group].get(block_hash)
        if block is not None:
            self._remove(block)
            if not self._num_references[block]:
                self._free.move_to_end(block, last=False)
        self.host.discard(content)
        self._note_loss(content)

    def free(self, blocks: Iterable[int]) -> None:
        """Give back one reference to each block, in eviction order: the tail of a chain before its head."""
        for block in blocks:
            self._num_references[block] -= 1
            assert self._num_references[block] >= 0, f"block {block} was freed twice"
            if not self._num_references[block]:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes (stored, evicted) since the last call: a net difference, no hash is in both.

        A hash is stored when the last group gets its content, and evicted when the first one loses it, on the host too.
        """
        events, self._events = self._events, {}
        stored = [block_hash for block_hash, is_stored in events.items() if is_stored]
        return stored, [block_hash for block_hash, is_stored in events.items() if not is_stored]

    def resident_hashes(self) -> list[bytes]:
        """Return every hash that all groups have, for a snapshot; events not yet taken are contained in it."""
        hashes = dict.fromkeys([*self._indexes[0], *self.host.hashes(0)])
        return [block_hash for block_hash in hashes if self._is_resident(block_hash)]

    def check_integrity(self, owners: Mapping[int, int]) -> None:
        """Raise AssertionError unless block b has exactly `owners[b]` references, and free list and index agree."""
        for block, num_references in enumerate(self._num_references):
            assert num_references == owners.get(block, 0), (
                f"block {block} has {num_references} references and {owners.get(block, 0)} owners"
            )
            assert (block in self._free) == (num_references == 0), f"block {block} is both free and owned, or neither"
        indexed: list[dict[bytes, int]] = [{} for _ in self._indexes]
        for block, block_hash in enumerate(self._hash_of):
            if block_hash is not None:
                assert block_hash not in indexed[self._group_of[block]], "two blocks are indexed under one hash"
                indexed[self._group_of[block]][block_hash] = block
        assert indexed == self._indexes, "index and blocks disagree"
        self.host.check_integrity()

    def _evict(self, block: int) -> None:
        """Move what a free block holds to the host, if there is one."""
        content = self._remove(block)
        lost = self.host.save(block, content)
        self._note_loss(content)
        if lost is not None:
            self._note_loss(lost)

    def _add(self, block: int, block_hash: bytes, group: int) -> None:
        self._indexes[group][block_hash] = block
        self._hash_of[block] = block_hash
        self._group_of[block] = group

    def _remove(self, block: int) -> Content:
        block_hash, group = self._hash_of[block], self._group_of[block]
        assert block_hash is not None, f"block {block} holds nothing known"
        del self._indexes[group][block_hash]
        self._hash_of[block] = None
        return Content(block_hash, group)

    def _note_loss(self, content: Content) -> None:
        """Report a content that was in the pool or on the host, if it is in neither now and was all that is missing."""
        block_hash, group = content
        if self._has(block_hash, group) or not all(
            self._has(block_hash, other) for other in range(len(self._indexes)) if other != group
        ):
            return
        self._note_event(block_hash, is_stored=False)

    def _note_event(self, block_hash: bytes, *, is_stored: bool) -> None:
        """Note that a hash came or went. If it went or came in the same period, there is nothing to report."""
        if self._events.pop(block_hash, is_stored) is is_stored:
            self._events[block_hash] = is_stored

    def _has(self, block_hash: bytes, group: int) -> bool:
        return block_hash in self._indexes[group] or (self.host.num_slots > 0 and self.is_on_host(block_hash, group))

    def _is_resident(self, block_hash: bytes) -> bool:
        return all(self._has(block_hash, group) for group in range(len(self._indexes)))
