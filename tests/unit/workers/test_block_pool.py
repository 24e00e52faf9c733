"""Blocks: ownership, eviction order, hash index and events."""

import pytest

from workers.block_pool import BlockPool
from workers.host_tier import Content, HostTier


def name(i: int) -> bytes:
    return bytes([i]) * 16


def test_allocated_blocks_are_owned_until_freed() -> None:
    pool = BlockPool(4, enable_prefix_caching=True)

    blocks = pool.allocate(3)

    assert sorted(blocks) == [0, 1, 2]
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 4
    pool.check_integrity({})


def test_more_blocks_than_free_are_never_given() -> None:
    pool = BlockPool(2, enable_prefix_caching=True)
    pool.allocate(1)

    with pytest.raises(AssertionError, match="2 blocks asked, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_block_freed_twice_is_noticed() -> None:
    pool = BlockPool(2, enable_prefix_caching=True)
    blocks = pool.allocate(1)
    pool.free(blocks)

    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_shared_block_is_free_when_its_last_owner_frees_it() -> None:
    pool = BlockPool(2, enable_prefix_caching=True)
    (block,) = pool.allocate(1)
    pool.commit(block, name(1))
    pool.share([block])

    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2


def test_free_block_keeps_its_content_until_it_is_needed() -> None:
    pool = BlockPool(2, enable_prefix_caching=True)
    (block,) = pool.allocate(1)
    pool.commit(block, name(1))
    pool.free([block])

    assert pool.lookup(name(1)) == block
    assert pool.count_free([block]) == 1
    pool.share([block])
    assert pool.num_free == 1
    assert pool.count_free([block]) == 0


def test_blocks_without_known_content_are_evicted_first() -> None:
    pool = BlockPool(2, enable_prefix_caching=True)
    known, unknown = pool.allocate(2)
    pool.commit(known, name(1))
    pool.free([known])
    pool.free([unknown])

    assert pool.allocate(1) == [unknown]
    assert pool.lookup(name(1)) == known


def test_least_recently_freed_block_is_evicted_first() -> None:
    pool = BlockPool(3, enable_prefix_caching=True)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.commit(block, name(block))
    pool.free([blocks[1], blocks[2], blocks[0]])
    pool.share([blocks[1]])
    pool.free([blocks[1]])  # used again: now the most recent

    assert pool.allocate(3) == [blocks[2], blocks[0], blocks[1]]


def test_second_block_of_equal_content_is_not_indexed() -> None:
    pool = BlockPool(3, enable_prefix_caching=True)
    first, second = pool.allocate(2)
    pool.commit(first, name(1))
    pool.commit(second, name(1))

    assert pool.lookup(name(1)) == first
    pool.free([first, second])
    assert pool.allocate(1) == [second]  # holds nothing that the first does not
    pool.check_integrity({second: 1})


def test_events_say_what_was_stored_and_evicted() -> None:
    pool = BlockPool(2, enable_prefix_caching=True)
    blocks = pool.allocate(2)
    pool.commit(blocks[0], name(1))
    pool.commit(blocks[1], name(2))
    assert pool.take_events() == ([name(1), name(2)], [])

    pool.free([blocks[1], blocks[0]])
    pool.allocate(1)

    assert pool.take_events() == ([], [name(2)])
    assert pool.take_events() == ([], [])
    assert pool.resident_hashes() == [name(1)]


def test_events_of_one_period_are_a_net_difference() -> None:
    pool = BlockPool(1, enable_prefix_caching=True)
    (block,) = pool.allocate(1)
    pool.commit(block, name(1))
    pool.take_events()

    for other in (2, 1):  # 1 evicted, 2 stored and evicted, 1 stored again
        pool.free([block])
        pool.allocate(1)
        pool.commit(block, name(other))

    assert pool.take_events() == ([], [])
    assert pool.resident_hashes() == [name(1)]


def test_without_prefix_caching_nothing_is_indexed() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    (block,) = pool.allocate(1)

    pool.commit(block, name(1))

    assert pool.lookup(name(1)) is None
    assert pool.take_events() == ([], [])
    pool.check_integrity({block: 1})


def test_integrity_check_names_the_block_whose_references_are_wrong() -> None:
    pool = BlockPool(2, enable_prefix_caching=True)
    (block,) = pool.allocate(1)

    with pytest.raises(AssertionError, match=f"block {block} has 1 references and 2 owners"):
        pool.check_integrity({block: 2})


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0; allowed: at least 1"):
        BlockPool(0, enable_prefix_caching=True)


def test_content_that_the_host_has_is_not_stored_anew() -> None:
    pool = BlockPool(1, enable_prefix_caching=True, host=HostTier(1))
    (block,) = pool.allocate(1)
    pool.commit(block, name(1))
    pool.free([block])
    (block,) = pool.allocate(1)  # the host has it now
    assert pool.take_events() == ([name(1)], [])
    pool.commit(block, name(1))  # another sequence has computed it too
    assert pool.take_events() == ([], [])


def test_block_whose_content_is_discarded_is_evicted_first() -> None:
    pool = BlockPool(3, enable_prefix_caching=True)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.commit(block, name(i))
        pool.free([block])
    pool.take_events()

    pool.discard(Content(name(1), 0))
    pool.discard(Content(name(7), 0))  # not there

    assert pool.take_events() == ([], [name(1)])
    assert pool.allocate(1) == [blocks[1]]
    assert pool.take_events() == ([], [])
