"""The block pool against a simple model: every block by name, the free list as a plain list."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.block_pool import BlockPool

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

    @initialize(num_blocks=st.integers(2, 12), enable_prefix_caching=st.sampled_from([True, True, False]))
    def build(self, num_blocks: int, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching)
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

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        most = min(self.pool.num_free, len(owner.chain) - len(owner.blocks))
        num_blocks = data.draw(st.integers(min(1, most), most))

        blocks = self.pool.allocate(num_blocks)

        assert blocks == self.free_list[:num_blocks], "not in eviction order"
        del self.free_list[:num_blocks]
        for block in blocks:
            self.content.pop(block, None)
        owner.blocks.extend(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        for i in range(owner.num_committed, len(owner.blocks)):
            block, chain = owner.blocks[i], owner.chain[: i + 1]
            self.pool.commit(block, name(chain))
            if chain in self.content.values():
                self.has_copies = True
            elif self.pool.enable_prefix_caching:
                self.content[block] = chain
        owner.num_committed = len(owner.blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.free(reversed(owner.blocks))
        counts = self.count_owners()
        for block in reversed(owner.blocks):
            if not counts[block]:
                self.free_list.insert(len(self.free_list) if block in self.content else 0, block)

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
    def index_holds_what_was_committed_and_not_evicted(self) -> None:
        assert set(self.pool.resident_hashes()) == {name(chain) for chain in self.content.values()}

    @invariant()
    def leaves_are_evicted_before_what_leads_to_them(self) -> None:
        """True unless two owners computed the same block: then the indexed one may go before the other's leaves."""
        chains = set(self.content.values())
        assert self.has_copies or all(len(chain) == 1 or chain[:-1] in chains for chain in chains)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            while self.owners:
                self.pool.free(reversed(self.owners.pop().blocks))
            self.pool.check_integrity({})
            self.take_events()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=40, derandomize=True, deadline=None)
