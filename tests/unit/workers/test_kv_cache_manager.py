"""What a sequence finds in the cache, gets from it and gives back. Blocks of four tokens."""

import pytest
from helpers.scheduling import make_request
from weft.block_hash import block_hash, block_hashes, root_hash

from workers.block_pool import BlockPool
from workers.kv_cache_manager import KVCacheManager
from workers.sequence import Sequence


def make_cache(num_blocks: int = 8, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching)
    return KVCacheManager(pool, block_size=4, hash_key=b"key")


def make_sequence(num_tokens: int, *, first: int = 0, cache_salt: str = "") -> Sequence:
    request = make_request("r", list(range(first, first + num_tokens)), cache_salt=cache_salt)
    return Sequence(
        request=request, order=(0, 0), stop_token_ids=frozenset(), max_num_tokens=num_tokens + 16, arrival_s=0.0
    )


def compute(cache: KVCacheManager, sequence: Sequence, num_tokens: int) -> None:
    assert cache.allocate(sequence, num_tokens)
    sequence.num_computed_tokens += num_tokens
    cache.commit(sequence)


def test_table_grows_only_when_the_last_block_is_full() -> None:
    cache = make_cache()
    sequence = make_sequence(10)

    sizes = []
    for num_tokens in (1, 3, 1, 5):
        compute(cache, sequence, num_tokens)
        sizes.append(len(sequence.block_table))

    assert sizes == [1, 1, 2, 3]
    cache.check_integrity([sequence])


def test_share_that_does_not_fit_takes_nothing() -> None:
    cache = make_cache(num_blocks=2)
    sequence = make_sequence(12)

    assert not cache.allocate(sequence, 9)
    assert sequence.block_table == []
    assert cache.num_free_blocks == 2


def test_prefix_of_an_earlier_sequence_is_found() -> None:
    cache = make_cache()
    earlier = make_sequence(10)
    compute(cache, earlier, 10)

    assert cache.match_prefix(make_sequence(20)) == earlier.block_table[:2]
    assert cache.match_prefix(make_sequence(20, first=1)) == []


def test_whole_prompt_is_never_taken_from_the_cache() -> None:
    cache = make_cache()
    earlier = make_sequence(9)
    compute(cache, earlier, 9)

    assert cache.match_prefix(make_sequence(8)) == earlier.block_table[:1]
    assert cache.match_prefix(make_sequence(9)) == earlier.block_table[:2]
    assert cache.match_prefix(make_sequence(1)) == []


def test_salts_do_not_share() -> None:
    cache = make_cache()
    compute(cache, make_sequence(8, cache_salt="tenant a"), 8)

    assert cache.match_prefix(make_sequence(12, cache_salt="tenant b")) == []
    assert len(cache.match_prefix(make_sequence(12, cache_salt="tenant a"))) == 2


def test_blocks_are_known_only_once_they_are_computed() -> None:
    cache = make_cache()
    sequence = make_sequence(12)

    assert cache.allocate(sequence, 12)
    cache.commit(sequence)
    assert cache.match_prefix(make_sequence(13)) == []
    sequence.num_computed_tokens = 7
    cache.commit(sequence)

    assert cache.match_prefix(make_sequence(13)) == sequence.block_table[:1]


def test_hashes_are_those_of_the_router() -> None:
    pool = BlockPool(8, enable_prefix_caching=True)
    cache = KVCacheManager(pool, block_size=4, hash_key=b"key")
    sequence = make_sequence(11, cache_salt="s")
    for _ in range(11):
        compute(cache, sequence, 1)

    assert pool.resident_hashes() == block_hashes(root_hash(b"key", "s"), sequence.token_ids, 4)


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    sequence = make_sequence(13)
    hashed = []

    def count_and_hash(parent: bytes, token_ids: list[int]) -> bytes:
        hashed.append(token_ids)
        return block_hash(parent, token_ids)

    monkeypatch.setattr("workers.kv_cache_manager.block_hash", count_and_hash)

    cache.match_prefix(sequence)
    cache.match_prefix(sequence)
    compute(cache, sequence, 13)
    cache.free(sequence)
    sequence.num_computed_tokens = 0
    cache.match_prefix(sequence)

    assert len(hashed) == 3


def test_equal_blocks_computed_at_the_same_time_stay_apart() -> None:
    cache = make_cache()
    one, two = make_sequence(8), make_sequence(8)
    assert cache.allocate(one, 8)
    assert cache.allocate(two, 8)
    for sequence in (one, two):
        sequence.num_computed_tokens = 8
        cache.commit(sequence)

    assert not set(one.block_table) & set(two.block_table)
    assert cache.match_prefix(make_sequence(9)) == one.block_table
    cache.check_integrity([one, two])
    cache.free(one)
    cache.free(two)
    cache.check_integrity([])


def test_shared_prefix_is_not_computed_again_and_freed_last() -> None:
    cache = make_cache(num_blocks=4)
    one, two = make_sequence(8), make_sequence(12)
    compute(cache, one, 8)
    prefix = cache.match_prefix(two)
    cache.share(two, prefix)
    two.num_computed_tokens = 8

    compute(cache, two, 4)

    assert two.block_table[:2] == one.block_table
    cache.check_integrity([one, two])
    cache.free(one)
    assert cache.num_free_blocks == 1
    cache.free(two)
    assert cache.num_free_blocks == 4


def test_tail_of_a_chain_is_evicted_before_its_head() -> None:
    cache = make_cache(num_blocks=3)
    chain = make_sequence(12)
    compute(cache, chain, 12)
    cache.free(chain)

    lengths = []
    other = make_sequence(12, first=100)
    for _ in range(3):
        compute(cache, other, 4)
        lengths.append(len(cache.match_prefix(make_sequence(13))))

    assert lengths == [2, 1, 0]


def test_fit_counts_cached_blocks_that_leave_the_free_list() -> None:
    cache = make_cache(num_blocks=4)
    earlier = make_sequence(8)
    compute(cache, earlier, 8)
    later = make_sequence(16)
    assert cache.fits(later, cache.match_prefix(later), reserve=0)  # two shared, two of the two free ones
    assert not cache.fits(later, cache.match_prefix(later), reserve=1)

    cache.free(earlier)  # the prefix is now among the four free ones

    assert cache.fits(later, cache.match_prefix(later), reserve=0)
    assert not cache.fits(later, cache.match_prefix(later), reserve=1)


def test_without_prefix_caching_nothing_is_found_and_nothing_hashed() -> None:
    cache = make_cache(enable_prefix_caching=False)
    sequence = make_sequence(8)
    compute(cache, sequence, 8)

    assert cache.match_prefix(make_sequence(12)) == []
    assert sequence.block_hashes == []


def test_usage_is_the_owned_fraction() -> None:
    cache = make_cache(num_blocks=8)
    sequence = make_sequence(8)
    compute(cache, sequence, 8)
    assert cache.usage == 0.25

    cache.free(sequence)

    assert cache.usage == 0.0
