"""Slots of the host tier: what is kept, what is lost for it, and what the next plan copies."""

from workers.host_tier import Content, Copies, HostTier

A, B, C = (Content(name, 0) for name in (b"a", b"b", b"c"))


def filled(*contents: Content) -> HostTier:
    """A tier with these in slots 0, 1, ..., copied by an earlier plan from blocks 10, 11, ..."""
    tier = HostTier(len(contents))
    for block, content in enumerate(contents, 10):
        assert tier.save(block, content) is None
    tier.take_copies()
    return tier


def test_an_evicted_block_is_saved_once() -> None:
    tier = HostTier(2)
    assert tier.save(7, A) is None
    assert tier.take_copies() == Copies([(7, 0)], [])

    assert tier.save(9, A) is None  # it was brought back, and is evicted again
    assert tier.take_copies() == Copies([], [])
    assert A in tier
    assert (tier.num_used, tier.num_saved_blocks) == (1, 1)


def test_what_was_used_longest_ago_gives_way() -> None:
    tier = filled(A, B)
    tier.save(3, A)  # used again
    assert tier.save(4, C) == B
    assert tier.take_copies() == Copies([(4, 1)], [])
    assert B not in tier


def test_the_tail_of_a_chain_gives_way_before_its_head() -> None:
    tier = filled(A, B)
    tier.hold([A, B])
    tier.take_copies()
    assert tier.save(4, C) == B


def test_what_is_saved_can_be_loaded_by_the_same_plan() -> None:
    tier = HostTier(1)
    tier.save(7, A)
    tier.hold([A])
    tier.load(7, A)
    assert tier.take_copies() == Copies([(7, 0)], [(0, 7)])
    assert (tier.num_saved_blocks, tier.num_loaded_blocks) == (1, 1)
    assert tier.take_copies() == Copies([], []), "the next plan copies nothing again"


def test_nothing_is_saved_into_a_slot_that_is_to_be_loaded() -> None:
    tier = filled(A)
    tier.hold([A])
    tier.load(5, A)
    assert tier.save(6, B) is None
    assert B not in tier
    assert tier.take_copies() == Copies([], [(0, 5)])
    assert tier.save(6, B) == A  # plans are executed in order


def test_a_block_that_is_evicted_before_its_load_is_not_loaded() -> None:
    tier = filled(A)
    tier.hold([A])
    tier.load(5, A)
    tier.save(5, A)
    assert tier.take_copies() == Copies([], [])
    assert A in tier


def test_a_slot_that_changes_hands_within_a_plan_is_saved_to_once() -> None:
    tier = HostTier(1)
    tier.save(1, A)
    assert tier.save(2, B) == A
    assert tier.take_copies() == Copies([(2, 0)], [])


def test_without_slots_nothing_is_kept() -> None:
    tier = HostTier()
    assert tier.save(1, A) is None
    assert A not in tier
    assert tier.take_copies() == Copies([], [])
