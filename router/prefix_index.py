"""Which replicas hold which KV blocks: how much of a prompt each replica could reuse.

Knows hashes and replica ids; replica.py feeds it from frames, directory.py asks. Holds exactly what replicas said they
hold, so its size is bounded by their caches. Owned by the event loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NewType

ReplicaId = NewType("ReplicaId", str)


class PrefixIndex:
    """The resident blocks of every replica of one model."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[ReplicaId]] = {}
        self._blocks: dict[ReplicaId, set[bytes]] = {}

    def __len__(self) -> int:
        """Return how many distinct blocks are known."""
        return len(self._holders)

    def num_blocks(self, replica_id: ReplicaId) -> int:
        """Return how many blocks a replica holds."""
        return len(self._blocks.get(replica_id, ()))

    def store(self, replica_id: ReplicaId, hashes: Iterable[bytes]) -> None:
        """Note that a replica now holds these blocks; those it held already change nothing."""
        blocks = self._blocks.setdefault(replica_id, set())
        for block in hashes:
            blocks.add(block)
            holders = self._holders.get(block)
            if holders is None:
                self._holders[block] = {replica_id}
            else:
                holders.add(replica_id)

    def evict(self, replica_id: ReplicaId, hashes: Iterable[bytes]) -> None:
        """Note that a replica no longer holds these blocks; those it did not hold change nothing."""
        blocks = self._blocks.get(replica_id, set())
        for block in hashes:
            if block in blocks:
                blocks.remove(block)
                self._remove_holder(block, replica_id)

    def drop(self, replica_id: ReplicaId) -> None:
        """Forget everything a replica holds."""
        for block in self._blocks.pop(replica_id, set()):
            self._remove_holder(block, replica_id)

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
        others = set(self._blocks)
        for length in range(len(hashes), 0, -1):
            holders = self._holders.get(hashes[length - 1])
            found = holders and holders & others  # looks at each of the fewer
            if found:
                lengths.update(dict.fromkeys(found, length))
                others -= found
                if not others:
                    break
        return lengths

    def _remove_holder(self, block: bytes, replica_id: ReplicaId) -> None:
        holders = self._holders[block]
        holders.remove(replica_id)
        if not holders:
            del self._holders[block]
