"""Which replicas hold which KV blocks: how much of a prompt each replica could reuse.

Knows hashes and replica ids; replica_book.py feeds it from frames, route.py asks. Holds exactly what replicas said they
hold, so its size is bounded by their caches. Owned by the event loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NewType

ReplicaId = NewType("ReplicaId", str)


class PrefixIndex:
    """The resident blocks of every replica of one model.

    Who holds a block is a number with a bit for each replica: a set for each of a million blocks takes 220 MB, and the
    garbage collector 0.4 s to look through, in which nobody is served.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._blocks: dict[ReplicaId, set[bytes]] = {}
        self._bits: dict[ReplicaId, int] = {}
        self._replicas: dict[int, ReplicaId] = {}
        """The replica that each bit stands for."""

    def __len__(self) -> int:
        """Return how many distinct blocks are known."""
        return len(self._holders)

    def num_blocks(self, replica_id: ReplicaId) -> int:
        """Return how many blocks a replica holds."""
        return len(self._blocks.get(replica_id, ()))

    def store(self, replica_id: ReplicaId, hashes: Iterable[bytes]) -> None:
        """Note that a replica now holds these blocks; those it held already change nothing."""
        blocks = self._blocks.setdefault(replica_id, set())
        bit = self._bits.get(replica_id) or self._take_bit(replica_id)
        holders = self._holders
        for block in hashes:
            blocks.add(block)
            holders[block] = holders.get(block, 0) | bit

    def evict(self, replica_id: ReplicaId, hashes: Iterable[bytes]) -> None:
        """Note that a replica no longer holds these blocks; those it did not hold change nothing."""
        blocks = self._blocks.get(replica_id, set())
        for block in hashes:
            if block in blocks:
                blocks.remove(block)
                self._remove_holder(block, self._bits[replica_id])

    def drop(self, replica_id: ReplicaId) -> None:
        """Forget everything a replica holds."""
        bit = self._bits.pop(replica_id, 0)
        self._replicas.pop(bit, None)
        for block in self._blocks.pop(replica_id, set()):
            self._remove_holder(block, bit)

    def num_cached(self, replica_id: ReplicaId, hashes: Sequence[bytes]) -> int:
        """Return how many of these blocks there are up to the last one that the replica holds, as `match` does."""
        blocks = self._blocks.get(replica_id, set())
        length = len(hashes)
        while length and hashes[length - 1] not in blocks:
            length -= 1
        return length

    def match(self, hashes: Sequence[bytes]) -> Mapping[ReplicaId, int]:
        """Return, for each replica that holds any of these blocks, how many there are up to the last one that it holds.

        Blocks may be missing before that: where all layers have a sliding window, a replica does without them.
        """
        lengths: dict[ReplicaId, int] = {}
        others = sum(self._replicas)
        for length in range(len(hashes), 0, -1):
            found = self._holders.get(hashes[length - 1], 0) & others
            if found:
                others ^= found
                while found:
                    bit = found & -found
                    lengths[self._replicas[bit]] = length
                    found ^= bit
                if not others:
                    break
        return lengths

    def _take_bit(self, replica_id: ReplicaId) -> int:
        """Return the lowest bit that no other replica has."""
        taken = sum(self._replicas)
        bit = ~taken & (taken + 1)
        self._bits[replica_id], self._replicas[bit] = bit, replica_id
        return bit

    def _remove_holder(self, block: bytes, bit: int) -> None:
        left = self._holders[block] ^ bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
