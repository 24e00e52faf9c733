"""The block pool against a simple model: every block by name, the free list as a plain list.

What blocks and slots of the host really hold changes when a plan is made: then its copies are carried out.
"""

from collections import Counter
from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.block_pool import BlockPool
from workers.host_tier import Content, HostTier

Chain = tuple[int, ...]
"""What a block holds, as the choices that led to it: its parent's is all but the last."""


def name(chain: Chain) -> bytes:
    return bytes(chain).rjust(16, b"\0")


class Owner:
    """A sequence as the pool sees one: a table of blocks of which the first are committed."""

    def __init__(self, chain: Chain, blocks: list[int]) -> None:
        self.chain = chain
        self.blocks = blocks
        self.num_committed = len(blocks)


class BlockPoolMachine(RuleBasedStateMachine):
    """Owners take, find, share, make known and give back blocks in any order."""

    @initialize(
        num_blocks=st.integers(2, 8),
        num_slots=st.sampled_from([0, 1, 2, 5, 20]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
    )
    def build(self, num_blocks: int, num_slots: int, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.host = HostTier(num_slots)
        self.pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching, host=self.host)
        self.in_blocks: dict[int, Chain | None] = {}  # what is there, known or not
        self.in_slots: dict[int, Chain | None] = {}
        self.owners: list[Owner] = []
        self.content: dict[int, Chain] = {}  # of indexed blocks
        self.free_list = list(range(num_blocks))
        self.replayed: set[bytes] = set()
        self.has_copies = False

    def count_owners(self) -> Counter[int]:
        return Counter(block for owner in self.owners for block in owner.blocks)

    @rule(chain=st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple))
    def begin(self, chain: Chain) -> None:
        """Start an owner from the longest prefix of its chain that the pool finds."""
        blocks: list[int] = []
        for length in range(1, len(chain) + 1):
            block = self.pool.lookup(name(chain[:length]))
            if block is None:
                break
            assert self.content[block] == chain[:length], "the index leads to other content"
            blocks.append(block)
        unowned = [block for block in blocks if block in self.free_list]
        assert self.pool.count_free(blocks) == len(unowned)
        self.pool.share(blocks)
        self.free_list = [block for block in self.free_list if block not in unowned]
        self.owners.append(Owner(chain, blocks))
        self.restore(self.owners[-1])

    def restore(self, owner: Owner) -> None:
        """Bring back what of the rest of its chain the host has, as far as there are free blocks."""
        rest = [owner.chain[:length] for length in range(len(owner.blocks) + 1, len(owner.chain) + 1)]
        known = self.content.values()
        chains = list(takewhile(lambda chain: self.pool.is_on_host(name(chain)) and chain not in known, rest))
        del chains[self.pool.num_free :]
        blocks = self.pool.restore([Content(name(chain), 0) for chain in chains])
        self.take(owner, blocks)
        self.content.update(zip(blocks, chains, strict=True))
        owner.num_committed = len(owner.blocks)

    def take(self, owner: Owner, blocks: list[int]) -> None:
        assert blocks == self.free_list[: len(blocks)], "not in eviction order"
        del self.free_list[: len(blocks)]
        for block in blocks:
            self.content.pop(block, None)
        owner.blocks.extend(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        most = min(self.pool.num_free, len(owner.chain) - len(owner.blocks))
        num_blocks = data.draw(st.integers(min(1, most), most))

        self.take(owner, self.pool.allocate(num_blocks))

    def plan(self) -> None:
        """A plan is made and executed, as far as copies go."""
        copies = self.pool.take_copies()
        for block, slot in copies.saves:
            self.in_slots[slot] = self.in_blocks[block]
        for slot, block in copies.loads:
            self.in_blocks[block] = self.in_slots[slot]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.fill(data.draw(st.sampled_from(self.owners)))

    @rule(
        chain=st.lists(st.integers(1, 2), min_size=2, max_size=6).map(tuple),
        is_dropped=st.sampled_from([False, False, True]),
    )
    def serve(self, chain: Chain, is_dropped: bool) -> None:
        """Begin, compute all that there is room for, end; or have the blocks taken before the plan is made."""
        self.begin(chain)
        owner = self.owners[-1]
        self.take(owner, self.pool.allocate(min(self.pool.num_free, len(chain) - len(owner.blocks))))
        if not is_dropped:
            self.fill(owner)
        self.end(len(self.owners) - 1)

    def fill(self, owner: Owner) -> None:
        """A plan is made that fills an owner's blocks."""
        self.plan()
        for i in range(owner.num_committed, len(owner.blocks)):
            block, chain = owner.blocks[i], owner.chain[: i + 1]
            self.pool.commit(block, name(chain))
            self.in_blocks[block] = chain
            if chain in self.content.values():
                self.has_copies = True
            elif self.pool.enable_prefix_caching:
                self.content[block] = chain
        owner.num_committed = len(owner.blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.end(data.draw(st.integers(0, len(self.owners) - 1)))

    def end(self, index: int) -> None:
        owner = self.owners.pop(index)
        self.pool.free(reversed(owner.blocks))
        counts = self.count_owners()
        for block in reversed(owner.blocks):
            if not counts[block]:
                self.free_list.insert(len(self.free_list) if block in self.content else 0, block)

    @precondition(lambda self: self.pool.resident_hashes())
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """Something known turns out to be spoilt."""
        block_hash = data.draw(st.sampled_from(sorted(self.pool.resident_hashes())))
        block = self.pool.lookup(block_hash)
        is_held = Content(block_hash, 0) in self.host._held
        self.pool.discard(Content(block_hash, 0))
        assert self.pool.lookup(block_hash) is None
        assert self.pool.is_on_host(block_hash) == is_held, "only what the next plan loads stays"
        if block is not None:
            del self.content[block]
            if block in self.free_list:
                self.free_list.remove(block)
                self.free_list.insert(0, block)
        self.has_copies = True  # what followed it stays, and may go later

    @rule()
    def take_events(self) -> None:
        stored, evicted = self.pool.take_events()
        assert not set(stored) & self.replayed, "stored twice"
        assert set(evicted) <= self.replayed, "evicted but not there"
        self.replayed = (self.replayed | set(stored)) - set(evicted)
        assert self.replayed == set(self.pool.resident_hashes())

    @invariant()
    def blocks_are_free_or_owned(self) -> None:
        counts = self.count_owners()
        self.pool.check_integrity(counts)
        assert sorted([*counts, *self.free_list]) == list(range(self.num_blocks))
        assert self.pool.num_free == len(self.free_list)

    @invariant()
    def known_is_what_was_committed_and_not_evicted(self) -> None:
        assert {block: name(chain) for block, chain in self.content.items()} == {
            block: block_hash for block_hash, block in self.pool._indexes[0].items()
        }
        on_host = self.host.hashes(0)
        assert set(self.pool.resident_hashes()) == {*self.pool._indexes[0], *on_host}
        assert len(on_host) == self.host.num_used <= self.host.num_slots

    @invariant()
    def after_the_next_plan_all_that_is_known_is_there(self) -> None:
        in_blocks, in_slots = self.in_blocks.copy(), self.in_slots.copy()
        for slot, block in self.host._saves.items():
            in_slots[slot] = in_blocks[block]
        for block, slot in self.host._loads.items():
            in_blocks[block] = in_slots[slot]
        for block, chain in self.content.items():
            assert in_blocks[block] == chain, "a block holds something else"
        for content, slot in self.host._slots.items():
            chain = in_slots[slot]
            assert chain is not None
            assert name(chain) == content.block_hash, "a slot holds something else"

    @invariant()
    def leaves_are_evicted_before_what_leads_to_them(self) -> None:
        """True unless two owners computed the same block: then the indexed one may go before the other's leaves.

        Nor where the host has the blocks before: an owner may have begun while there were too few blocks for them.
        """
        chains = set(self.content.values())
        assert self.has_copies or all(
            len(chain) == 1 or chain[:-1] in chains or self.host.num_slots for chain in chains
        )

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            while self.owners:
                self.pool.free(reversed(self.owners.pop().blocks))
            self.pool.check_integrity({})
            self.take_events()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=40, derandomize=True, deadline=None)
