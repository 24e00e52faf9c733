"""What a sequence finds in the cache, gets from it and gives back. Blocks of four tokens."""

from typing import Any

import pytest
from helpers.scheduling import make_request
from weft.block_hash import block_hashes, root_hash

from workers.block_pool import BlockPool
from workers.config import SchedulingPolicy
from workers.host_tier import HostTier
from workers.kv_cache_manager import KVCacheManager
from workers.queueing import ServingOrder
from workers.roster import Roster
from workers.sequence import Sequence


def make_cache(
    num_blocks: int = 8,
    *,
    enable_prefix_caching: bool = True,
    windows: tuple[int | None, ...] = (None,),
    max_tokens_in_flight: int = 1000,
) -> KVCacheManager:
    pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching, num_groups=len(windows))
    return KVCacheManager(
        pool, block_size=4, hash_key=b"key", windows=windows, max_tokens_in_flight=max_tokens_in_flight
    )


def make_sequence(num_tokens: int, *, first: int = 0, num_generated: int = 0, cache_salt: str = "") -> Sequence:
    """Of so many tokens, the last `num_generated` of which are its output so far."""
    tokens = list(range(first, first + num_tokens))
    num_prompt = num_tokens - num_generated
    request = make_request("r", tokens[:num_prompt], generated=tuple(tokens[num_prompt:]), cache_salt=cache_salt)
    return Sequence(
        request=request, arrival_number=0, stop_token_ids=frozenset(), max_num_tokens=num_tokens + 16, arrival_s=0.0
    )


def compute(cache: KVCacheManager, sequence: Sequence, num_tokens: int) -> None:
    assert cache.allocate(sequence, num_tokens)
    cache.commit(sequence, num_tokens)
    sequence.num_scheduled_tokens += num_tokens
    sequence.num_computed_tokens += num_tokens
    cache.settle(sequence)


def test_table_grows_only_when_the_last_block_is_full() -> None:
    cache = make_cache()
    sequence = make_sequence(10)

    sizes = []
    for num_tokens in (1, 3, 1, 5):
        compute(cache, sequence, num_tokens)
        sizes.append(len(sequence.block_table))

    assert sizes == [1, 1, 2, 3]
    cache.check_integrity([sequence])


def test_a_token_inside_a_block_needs_nothing() -> None:
    cache = make_cache()
    sequence = make_sequence(13)

    borders = []
    for start in range(13):
        is_at_border = cache.at_block_border([sequence]) == [sequence]
        held, num_known = len(sequence.block_table), sequence.num_known_blocks
        compute(cache, sequence, 1)
        assert is_at_border or (len(sequence.block_table), sequence.num_known_blocks) == (held, num_known)
        borders += [start] * is_at_border

    assert borders == [0, 3, 4, 7, 8, 11, 12]


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


def test_blocks_are_known_when_they_are_to_be_filled_and_forgotten_when_they_are_not() -> None:
    cache = make_cache()
    sequence = make_sequence(12)

    assert cache.allocate(sequence, 12)
    assert cache.match_prefix(make_sequence(13)) == []
    assert cache.commit(sequence, 7) == sequence.block_table[:1]
    assert cache.match_prefix(make_sequence(13)) == sequence.block_table[:1]
    sequence.num_scheduled_tokens = sequence.num_computed_tokens = 7
    cache.settle(sequence)
    assert cache.commit(sequence, 5) == sequence.block_table[1:]
    assert cache.match_prefix(make_sequence(13)) == sequence.block_table
    cache.retract(sequence)

    assert cache.match_prefix(make_sequence(13)) == sequence.block_table[:1]
    cache.check_integrity([sequence])
    compute(cache, sequence, 5)
    assert cache.match_prefix(make_sequence(13)) == sequence.block_table


def test_retracting_leaves_what_another_sequence_made_known() -> None:
    cache = make_cache()
    one, two = make_sequence(8), make_sequence(8)
    for sequence in (one, two):
        assert cache.allocate(sequence, 8)
        cache.commit(sequence, 8)

    cache.retract(two)

    assert cache.match_prefix(make_sequence(9)) == one.block_table


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
    hashed: list[bytes] = []

    def note_and_hash(parent: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
        hashed.extend(block_hashes(parent, token_ids, block_size))
        return block_hashes(parent, token_ids, block_size)

    monkeypatch.setattr("workers.kv_cache_manager.block_hashes", note_and_hash)

    cache.match_prefix(sequence)
    cache.match_prefix(sequence)
    compute(cache, sequence, 13)
    cache.free(sequence)
    sequence.num_scheduled_tokens = sequence.num_computed_tokens = 0
    cache.match_prefix(sequence)

    assert len(hashed) == 3


def test_equal_blocks_computed_at_the_same_time_stay_apart() -> None:
    cache = make_cache()
    one, two = make_sequence(8), make_sequence(8)
    assert cache.allocate(one, 8)
    assert cache.allocate(two, 8)
    for sequence in (one, two):
        cache.commit(sequence, 8)

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
    two.num_scheduled_tokens = two.num_computed_tokens = 8

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
    sequence, later = make_sequence(8), make_sequence(12)
    compute(cache, sequence, 8)

    assert cache.match_prefix(later) == []
    assert sequence.block_hashes == later.block_hashes == []


def test_usage_is_the_owned_fraction() -> None:
    cache = make_cache(num_blocks=8)
    sequence = make_sequence(8)
    compute(cache, sequence, 8)
    assert cache.usage == 0.25

    cache.free(sequence)

    assert cache.usage == 0.0


# Groups of layers, and sliding windows


def num_owned(cache: KVCacheManager) -> int:
    return cache.num_blocks - cache.num_free_blocks


def test_blocks_out_of_sight_are_given_back_when_a_block_is_full() -> None:
    cache = make_cache(windows=(10,))
    sequence = make_sequence(24)

    owned = []
    for num_tokens in (4, 4, 4, 3, 1, 4, 1):
        compute(cache, sequence, num_tokens)
        owned.append(num_owned(cache))

    # with 16 tokens computed the next one sees 7 to 15: three blocks; the fifth block is the one it begins
    assert owned == [1, 2, 3, 4, 3, 3, 4]
    cache.check_integrity([sequence])
    cache.free(sequence)
    cache.check_integrity([])


@pytest.mark.parametrize(("window", "num_held"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_block_is_given_back_by_the_token_that_no_longer_sees_it(window: int, num_held: int) -> None:
    """At a border of blocks of four tokens, the next token sees window - 1 before it."""
    cache = make_cache(num_blocks=20, windows=(window,))
    compute(cache, make_sequence(60), 40)
    assert num_owned(cache) == num_held


def test_a_group_that_sees_everything_keeps_everything() -> None:
    cache = make_cache(num_blocks=20, windows=(None, 6))
    sequence = make_sequence(32)
    for _ in range(32):
        compute(cache, sequence, 1)

    assert num_owned(cache) == 8 + 2
    cache.check_integrity([sequence])


def test_prefix_needs_only_what_is_in_sight_of_its_end() -> None:
    cache = make_cache(num_blocks=5, windows=(6,))
    chain = make_sequence(20)
    for _ in range(20):
        compute(cache, chain, 1)
    held = chain.block_table[3:]
    other = make_sequence(9, first=100)
    compute(cache, other, 9)  # evicts what the chain has given back

    prefix = cache.match_prefix(make_sequence(24))

    assert prefix == [0, 0, 0, *held]
    assert cache.match_prefix(make_sequence(20)) == []  # after four blocks the third would be in sight
    cache.free(other)
    later = make_sequence(24)
    assert cache.fits(later, prefix, reserve=2)
    assert not cache.fits(later, prefix, reserve=3)
    cache.share(later, prefix)
    later.num_scheduled_tokens = later.num_computed_tokens = 20
    cache.check_integrity([chain, later])
    cache.free(chain)
    assert num_owned(cache) == 2
    compute(cache, later, 4)
    assert num_owned(cache) == 2
    cache.free(later)
    cache.check_integrity([])


def test_prefix_ends_where_all_groups_can_go_on() -> None:
    """Lowering the end for one group takes from another one what it had in sight, so that it is looked at again."""
    pool = BlockPool(20, enable_prefix_caching=True, num_groups=2)
    cache = KVCacheManager(pool, block_size=4, hash_key=b"key", windows=(5, 9))
    hashes = block_hashes(root_hash(b"key"), list(range(21)), 4)
    for group, known in enumerate(((0, 2, 4), (0, 2, 3))):  # the one sees one block back, the other two
        blocks = pool.allocate(len(known))
        for block, i in zip(blocks, known, strict=True):
            pool.commit(block, hashes[i], group)
    # five blocks: the second group has no 4; four blocks: the first has no 3; three: the second has no 1; one: both do

    assert len(cache.match_prefix(make_sequence(21))) == 1 * 2


def test_prefix_is_as_long_as_that_of_the_group_with_the_shortest() -> None:
    pool = BlockPool(20, enable_prefix_caching=True, num_groups=2)
    cache = KVCacheManager(pool, block_size=4, hash_key=b"key", windows=(None, None))
    hashes = block_hashes(root_hash(b"key"), list(range(21)), 4)
    known = [pool.allocate(3), pool.allocate(2)]
    for group, blocks in enumerate(known):
        for block, block_name in zip(blocks, hashes, strict=False):
            pool.commit(block, block_name, group)

    assert cache.match_prefix(make_sequence(21)) == [known[0][0], known[1][0], known[0][1], known[1][1]]


def test_hash_is_resident_while_every_group_has_it() -> None:
    pool = BlockPool(4, enable_prefix_caching=True, num_groups=2)
    blocks = pool.allocate(4)
    for group in (0, 1):
        pool.commit(blocks[group], b"both", group)
    pool.commit(blocks[2], b"one", 0)

    assert pool.resident_hashes() == [b"both"]
    assert pool.take_events() == ([b"both"], [])
    pool.free([blocks[1]])
    pool.allocate(1)
    assert pool.resident_hashes() == []
    assert pool.take_events() == ([], [b"both"])
    pool.free([blocks[0], blocks[2]])
    pool.allocate(2)
    assert pool.take_events() == ([], [])


def test_what_a_sequence_can_have_of_the_pool() -> None:
    assert make_cache(10).layout.max_sequence_tokens(1000) == 40
    assert make_cache(10, windows=(None, None)).layout.max_sequence_tokens(1000) == 20
    # a window of three blocks, the begun one, and of a chunk at most a quarter of the pool
    assert make_cache(10, windows=(10,)).layout.max_sequence_tokens(1000) == 1000
    assert make_cache(5, windows=(10,)).layout.max_sequence_tokens(1000) == 1000
    assert make_cache(4, windows=(10,)).layout.max_sequence_tokens(1000) == 16
    assert make_cache(4, windows=(10,), max_tokens_in_flight=1).layout.max_sequence_tokens(1000) == 1000
    # 4 + 2 blocks (8 tokens) for the window, the other 34 for the group that sees everything
    assert make_cache(40, windows=(None, 10), max_tokens_in_flight=8).layout.max_sequence_tokens(1000) == 34 * 4


def test_a_chunk_takes_a_small_part_of_the_pool() -> None:
    assert make_cache(40).layout.max_tokens_in_flight == 1000
    assert make_cache(40, windows=(10,)).layout.max_tokens_in_flight == 40
    assert make_cache(40, windows=(None, 10, 10)).layout.max_tokens_in_flight == 20
    assert make_cache(40, windows=(10,), max_tokens_in_flight=7).layout.max_tokens_in_flight == 7


def test_room_is_kept_for_the_window_and_not_for_the_whole_sequence() -> None:
    cache = make_cache(num_blocks=12, windows=(10,), max_tokens_in_flight=4)
    long = make_sequence(400)
    assert cache.fits(long, [], reserve=12 - (3 + 1 + 1))
    assert not cache.fits(long, [], reserve=12 - (3 + 1 + 1) + 1)
    short = make_sequence(6)
    assert cache.fits(short, [], reserve=10)
    assert not cache.fits(short, [], reserve=11)

    for _ in range(399 // 4):
        assert num_owned(cache) + cache.num_reserved_blocks(long) <= 5
        compute(cache, long, 4)
    compute(cache, long, 3)

    assert (num_owned(cache), cache.num_reserved_blocks(long)) == (4, 0)
    compute(cache, long, 1)
    long.token_ids.append(1)
    assert (num_owned(cache), cache.num_reserved_blocks(long)) == (3, 1)


def test_room_is_kept_for_a_chunk_of_two_tokens_in_two_blocks() -> None:
    cache = make_cache(num_blocks=12, windows=(10,), max_tokens_in_flight=4)
    sequence = make_sequence(41)
    for _ in range(39 // 3):
        compute(cache, sequence, 3)

    assert (num_owned(cache), cache.num_reserved_blocks(sequence)) == (4, 1)


def test_room_is_kept_in_every_group() -> None:
    cache = make_cache(20, windows=(None, None))
    sequence = make_sequence(8)
    compute(cache, sequence, 4)

    assert cache.num_reserved_blocks(sequence) == 2 * 2  # its second block, and one to grow
    assert cache.fits_rest(sequence, reserve=20 - 2 - 2)
    assert not cache.fits_rest(sequence, reserve=20 - 2 - 2 + 1)
    compute(cache, sequence, 4)
    later = make_sequence(16)
    prefix = cache.match_prefix(later)
    assert prefix == sequence.block_table
    assert cache.fits(later, prefix, reserve=20 - 4 - 4)  # two more blocks in each
    assert not cache.fits(later, prefix, reserve=20 - 4 - 4 + 1)


def test_room_is_kept_for_a_window_beside_a_group_that_sees_everything() -> None:
    cache = make_cache(40, windows=(None, 10), max_tokens_in_flight=4)
    sequence = make_sequence(40)
    for _ in range(5):
        compute(cache, sequence, 4)

    # one group gets the other five blocks and one to grow; the other, which holds three, two of what is in flight
    assert (num_owned(cache), cache.num_reserved_blocks(sequence)) == (5 + 3, 6 + 2)
    assert cache.fits_rest(sequence, reserve=40 - 8 - (5 + 2))
    assert not cache.fits_rest(sequence, reserve=40 - 8 - (5 + 2) + 1)


def with_host(num_blocks: int, num_host_blocks: int) -> tuple[KVCacheManager, BlockPool]:
    pool = BlockPool(num_blocks, enable_prefix_caching=True, host=HostTier(num_host_blocks))
    return KVCacheManager(pool, block_size=4, hash_key=b"key"), pool


def serve(cache: KVCacheManager, sequence: Sequence) -> None:
    compute(cache, sequence, sequence.num_tokens - sequence.num_computed_tokens)
    cache.free(sequence)


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    cache, pool = with_host(4, 8)
    serve(cache, make_sequence(13))
    serve(cache, make_sequence(16, first=100))  # evicts all of it
    cache.take_copies()

    sequence = make_sequence(13)
    prefix = cache.match_prefix(sequence)
    assert cache.fits(sequence, prefix, reserve=0)
    cache.share(sequence, prefix)
    sequence.num_computed_tokens = 12

    copies = cache.take_copies()
    assert [block for _, block in copies.loads] == sequence.block_table
    assert {block for block, _ in copies.saves} == set(sequence.block_table), "what it evicts is saved"
    assert (sequence.num_full_blocks, sequence.num_host_tokens) == (3, 12)
    assert pool.lookup(sequence.block_hashes[0]) == sequence.block_table[0]
    cache.check_integrity([sequence])


def test_blocks_for_what_the_host_has_must_fit() -> None:
    cache, _ = with_host(4, 8)
    serve(cache, make_sequence(13))
    other = make_sequence(8, first=100)
    compute(cache, other, 8)
    again = make_sequence(13)
    prefix = cache.match_prefix(again)
    assert len(prefix) == 3
    assert not cache.fits(again, prefix, reserve=0), "four blocks are needed, two are free"


def test_a_hash_is_reported_evicted_when_it_left_both_tiers() -> None:
    cache, pool = with_host(2, 2)
    serve(cache, make_sequence(8))
    first, _ = pool.take_events()
    serve(cache, make_sequence(8, first=100))
    assert pool.take_events()[1] == [], "the host has them"
    assert set(first) < set(pool.resident_hashes())

    serve(cache, make_sequence(8, first=200))
    assert set(pool.take_events()[1]) == set(first)
    assert not set(first) & set(pool.resident_hashes())


class CountedReads(list[int]):
    """Reference counts, and how often one was read."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def test_who_gives_way_is_found_without_a_look_at_every_shared_block() -> None:
    """A candidate costs a bisection, and only the one that is chosen a walk along its prefix."""
    num_shared, num_candidates = 256, 20
    cache = make_cache(num_shared + 2 * num_candidates)
    roster = Roster(cache, ServingOrder(SchedulingPolicy.FCFS, promote_after_s=None), num_slots=1)
    sequences = [make_sequence(4 * num_shared + 4) for _ in range(num_candidates)]
    for i, sequence in enumerate(sequences):
        sequence.order = (0, 0.0, i)
        sequence.token_ids += [i] * (1 + i % 3)
        prefix = cache.match_prefix(sequence)[:num_shared]
        cache.share(sequence, prefix)
        sequence.num_scheduled_tokens = sequence.num_computed_tokens = 4 * len(prefix)
        compute(cache, sequence, sequence.num_tokens - sequence.num_computed_tokens)
    references = cache.pool._num_references = CountedReads(cache.pool._num_references)

    first = next(roster.in_yield_order(sequences))

    assert first is sequences[18], "the last of those with the fewest tokens of their own"
    assert references.num_reads < num_shared + num_candidates * 12


def test_a_shared_block_behind_an_own_copy_goes_with_it() -> None:
    """Of two that computed the same at once, another shares the first block of one and the second of the other."""
    cache = make_cache(16)
    roster = Roster(cache, ServingOrder(SchedulingPolicy.FCFS, promote_after_s=None), num_slots=1)
    first, copy, short, third = make_sequence(8), make_sequence(8), make_sequence(3, first=50), make_sequence(9)
    copy.order, short.order = (0, 0.0, 1), (0, 0.0, 2)
    compute(cache, first, 4)
    compute(cache, copy, 8)
    compute(cache, short, 3)
    prefix = cache.match_prefix(third)
    assert prefix == [first.block_table[0], copy.block_table[1]]
    cache.share(third, prefix)

    assert cache.num_tokens_at_risk(copy) == 8
    assert list(roster.in_yield_order([copy, short])) == [short, copy]


def test_what_the_host_has_takes_free_blocks() -> None:
    cache, _ = with_host(4, 8)
    serve(cache, make_sequence(12))
    serve(cache, make_sequence(4, first=200))
    compute(cache, make_sequence(4, first=100), 4)  # evicts the tail of the first
    again = make_sequence(13)
    prefix = cache.match_prefix(again)
    assert len(prefix) == 3
    assert prefix.count(-1) == 1
    assert not cache.fits(again, prefix, reserve=0), "four blocks are needed, three are free"


def test_tokens_from_the_host_are_counted_once_for_all_groups() -> None:
    pool = BlockPool(8, enable_prefix_caching=True, num_groups=2, host=HostTier(8))
    cache = KVCacheManager(pool, block_size=4, hash_key=b"key", windows=(None, 9))
    serve(cache, make_sequence(9))
    serve(cache, make_sequence(16, first=100))
    cache.take_copies()
    sequence = make_sequence(9)
    prefix = cache.match_prefix(sequence)
    assert prefix == [-1] * 4
    cache.share(sequence, prefix)
    assert sequence.num_host_tokens == 8


@pytest.mark.parametrize(("num_generated", "num_host_tokens"), [(3, 10), (7, 6)])
def test_output_from_the_host_counts_as_no_cached_prompt(num_generated: int, num_host_tokens: int) -> None:
    """A request that began elsewhere: its output so far may lie in the last block of its prompt, and after it."""
    cache, _ = with_host(4, 8)
    serve(cache, make_sequence(13))
    serve(cache, make_sequence(16, first=100))
    cache.take_copies()
    sequence = make_sequence(13, num_generated=num_generated)
    cache.share(sequence, cache.match_prefix(sequence))
    assert (sequence.num_full_blocks, sequence.num_host_tokens) == (3, num_host_tokens)
