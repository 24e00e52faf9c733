"""The scheduler's only view of memory: which blocks a sequence has, finds and gives back."""

from workers.block_pool import BlockPool


class KVCacheManager:
    """The paged cache of one replica, in blocks; the tensors are in kv_cache.py."""

    def __init__(self, pool: BlockPool, *, block_size: int, hash_key: bytes) -> None: ...
