"""The hash chain that names KV blocks by the tokens before and in them: one function for router and engine.

    h_i = H(h_{i-1}, tokens of block i), 128 bits, keyed; the chain starts from the request's cache salt

Equal hashes mean equal tokens from the start of the prompt on, under the same salt. Part of the protocol of
replica.proto.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
"""Length of one block hash."""

_TOKEN_BYTES = 4


def root_hash(key: bytes, cache_salt: str = "") -> bytes:
    """Return the value before the first block: one for each (key, salt). The key has at most 64 bytes."""
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES, key=key).digest()


def block_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hash of each full block of `token_ids`; a last partial block has none.

    Args:
        parent: the hash of what comes before, or the root where nothing does.
        token_ids, block_size: as said.
    """
    packed = _pack(token_ids[: len(token_ids) // block_size * block_size])
    hashes, num_bytes = [], _TOKEN_BYTES * block_size
    for start in range(0, len(packed), num_bytes):
        parent = blake2b(parent + packed[start : start + num_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def split_hashes(packed: bytes) -> list[bytes]:
    """Split hashes that lie one after the other, as replica.proto sends them; ValueError when the length is wrong."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes of block hashes; allowed: a multiple of {HASH_BYTES}")
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def _pack(token_ids: Sequence[int]) -> bytes:
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
