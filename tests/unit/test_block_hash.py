"""The hash chain of blocks: part of the protocol, so that its values must never change."""

import pytest
from weft.block_hash import HASH_BYTES, block_hashes, root_hash, split_hashes

ROOT = root_hash(b"key", "salt")


def test_values_are_those_of_the_protocol() -> None:
    # Computed once with Python's hashlib.blake2b; another value would split a cluster of two versions.
    assert root_hash(b"").hex() == "cae66941d9efbd404e4d88758ea67670"
    assert ROOT.hex() == "52c2849174e9abba4d029361bc90d2a3"
    assert [name.hex() for name in block_hashes(ROOT, [1, 2, 3, 70000], 2)] == [
        "e2ecc99e2ce0a58e41ba78ddfee45552",
        "7e4ea10ce7e355e815b343346dd9764f",
    ]


def test_each_full_block_has_a_hash_and_a_partial_one_none() -> None:
    assert [len(name) for name in block_hashes(ROOT, range(11), 4)] == [HASH_BYTES, HASH_BYTES]
    assert block_hashes(ROOT, range(3), 4) == []
    assert len(block_hashes(ROOT, range(8), 4)) == 2


def test_chain_continues_from_any_of_its_hashes() -> None:
    hashes = block_hashes(ROOT, range(12), 4)

    assert hashes[:1] == block_hashes(ROOT, range(4), 4)
    assert hashes[1:] == block_hashes(hashes[0], range(4, 12), 4)


def test_hash_depends_on_every_token_before_it() -> None:
    assert block_hashes(ROOT, [9, 1, 2, 3], 2)[1] != block_hashes(ROOT, [0, 1, 2, 3], 2)[1]
    assert block_hashes(ROOT, [1, 2], 2) != block_hashes(ROOT, [2, 1], 2)


def test_token_borders_count() -> None:
    assert block_hashes(ROOT, [1, 0], 2) != block_hashes(ROOT, [1], 1)
    assert block_hashes(ROOT, [256], 1) != block_hashes(ROOT, [1], 1)


def test_salt_and_key_separate_chains() -> None:
    roots = {root_hash(b"key", "salt"), root_hash(b"key", "other"), root_hash(b"key"), root_hash(b"other", "salt")}

    assert len(roots) == 4


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_token_that_is_no_32_bit_id_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes(ROOT, [token_id], 1)


def test_packed_hashes_are_split_again() -> None:
    hashes = block_hashes(ROOT, range(12), 4)

    assert split_hashes(b"".join(hashes)) == hashes
    assert split_hashes(b"") == []


def test_packed_hashes_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes of block hashes; allowed: a multiple of 16"):
        split_hashes(bytes(17))
