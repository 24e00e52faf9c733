"""Physical KV blocks: who owns them, which hold known content, and which is evicted next."""


class BlockPool:
    """Blocks with reference counts and a hash index. Block 0 is a block like any other."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool) -> None: ...

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes stored and evicted since the last call."""
        raise NotImplementedError

    def resident_hashes(self) -> list[bytes]:
        """Return every hash in the index, for a snapshot."""
        raise NotImplementedError
