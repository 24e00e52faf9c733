"""The manager against a model that knows what each block holds: any windows, any sequences, any order of operations.

What blocks and slots of the host hold is as the next plan will have it once its copies are done.
"""

from collections import Counter

from helpers.scheduling import make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.block_pool import BlockPool
from workers.config import SchedulingPolicy
from workers.host_tier import HostTier
from workers.kv_cache_manager import KVCacheManager
from workers.queueing import ServingOrder
from workers.roster import Roster
from workers.sequence import Order, Sequence

Content = tuple[int, tuple[int, ...]]
"""What is computed into a block: the group of layers, and all tokens up to the block's last."""


class KVCacheManagerMachine(RuleBasedStateMachine):
    """Sequences start from what is cached, compute in chunks, and end at any time."""

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.integers(1, 4),
        windows=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3).map(tuple),
        max_tokens_in_flight=st.integers(1, 16),
        num_host_blocks=st.sampled_from([0, 0, 2, 10, 60]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...],
        max_tokens_in_flight: int,
        num_host_blocks: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.windows = windows
        self.host = HostTier(num_host_blocks)
        self.pool = BlockPool(
            num_blocks, enable_prefix_caching=enable_prefix_caching, num_groups=len(windows), host=self.host
        )
        self.cache = KVCacheManager(
            self.pool, block_size=block_size, hash_key=b"k", windows=windows, max_tokens_in_flight=max_tokens_in_flight
        )
        self.roster = Roster(self.cache, ServingOrder(SchedulingPolicy.FCFS, promote_after_s=None), num_slots=1)
        self.sequences: list[Sequence] = []
        self.num_begun = 0
        self.content: dict[int, Content] = {}  # of every block, whether it is known or not
        self.on_host: dict[int, Content] = {}  # by slot
        self.replayed: set[bytes] = set()

    def block(self, sequence: Sequence, entry: int, group: int) -> int:
        return sequence.block_table[entry * len(self.windows) + group]

    def first_seen(self, num_computed_tokens: int, group: int) -> int:
        """The first position that the next token sees in a group."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_computed_tokens - window + 1)

    def expected(self, tokens: list[int], end: int, group: int) -> Content:
        return group, tuple(tokens[: end * self.cache.block_size])

    def plan(self) -> None:
        self.content, self.on_host = self.after_copies()
        self.cache.take_copies()

    def after_copies(self) -> tuple[dict[int, Content], dict[int, Content]]:
        if not self.host._saves and not self.host._loads:
            return self.content, self.on_host
        on_host = {**self.on_host, **{slot: self.content[block] for slot, block in self.host._saves.items()}}
        return {**self.content, **{block: on_host[slot] for block, slot in self.host._loads.items()}}, on_host

    def can_start_after(self, tokens: list[int], num_blocks: int) -> bool:
        """Whether each group knows a block for all that the token after these blocks sees."""
        known = set()
        content, on_host = self.after_copies()
        for sequence_hash, block in ((h, b) for index in self.pool._indexes for h, b in index.items()):
            assert self.pool._hash_of[block] == sequence_hash
            known.add(content[block])
        known.update(on_host[slot] for slot in self.host._slots.values())
        size = self.cache.block_size
        return all(
            self.expected(tokens, entry + 1, group) in known
            for group in range(len(self.windows))
            for entry in range(self.first_seen(num_blocks * size, group) // size, num_blocks)
            if self.first_seen(num_blocks * size, group) < num_blocks * size
        )

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40), shared=st.integers(0, 40), data=st.data())
    def begin(self, tokens: list[int], shared: int, data: st.DataObject) -> None:
        """Start from the longest cached prefix, if all of the sequence fits."""
        tokens = [0] * shared + tokens
        sequence = Sequence(
            request=make_request("r", tokens),
            arrival_number=0,
            stop_token_ids=frozenset(),
            max_num_tokens=100,
            arrival_s=0.0,
            order=(data.draw(st.integers(0, 1)), 0.0, self.num_begun),
        )
        self.num_begun += 1
        size = self.cache.block_size
        prefix = self.cache.match_prefix(sequence)
        num_blocks = len(prefix) // len(self.windows)
        if self.pool.enable_prefix_caching:
            longest = max(n for n in range((len(tokens) - 1) // size + 1) if self.can_start_after(tokens, n))
            assert num_blocks == longest, "not the longest prefix that can be used"
        else:
            assert num_blocks == 0
        if self.cache.fits(sequence, prefix, reserve=data.draw(st.integers(0, 2))):
            self.cache.share(sequence, prefix)
            sequence.num_scheduled_tokens = sequence.num_computed_tokens = num_blocks * size
            self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        self.advance(data.draw(st.sampled_from(self.sequences)), data)

    def advance(self, sequence: Sequence, data: st.DataObject) -> None:
        """Compute a chunk, or a token more."""
        num_left = sequence.num_tokens - sequence.num_computed_tokens
        if not num_left:
            sequence.token_ids.append(data.draw(st.integers(0, 1)))
            num_left = 1
        num_tokens = data.draw(st.integers(1, min(num_left, self.cache.layout.max_tokens_in_flight)))
        start, size = sequence.num_computed_tokens, self.cache.block_size
        num_entries = len(sequence.block_table) // len(self.windows)
        if not self.cache.allocate(sequence, num_tokens):
            return
        end = start + num_tokens
        assert len(sequence.block_table) == -(-end // size) * len(self.windows)
        for entry in range(num_entries, -(-end // size)):
            for group in range(len(self.windows)):
                assert self.pool._hash_of[self.block(sequence, entry, group)] is None
        self.plan()
        self.check_visible(sequence, start)
        for position in range(start, end):
            for group in range(len(self.windows)):
                block = self.block(sequence, position // size, group)
                assert self.pool._num_references[block] == 1, "a token is written into a shared block"
                self.content[block] = (group, tuple(sequence.token_ids[: position + 1]))
        known = self.pool.resident_hashes()
        if data.draw(st.sampled_from([True, True, False])):  # a step that is not run after all
            self.cache.commit(sequence, num_tokens)
            self.cache.retract(sequence)
            assert self.pool.resident_hashes() == known
        self.cache.commit(sequence, num_tokens)
        sequence.num_scheduled_tokens = sequence.num_computed_tokens = end
        self.cache.settle(sequence)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), shared=st.integers(0, 12), data=st.data())
    def serve(self, tokens: list[int], shared: int, data: st.DataObject) -> None:
        """Start, compute what there is room for, end."""
        num_sequences = len(self.sequences)
        self.begin(tokens=tokens, shared=shared, data=data)
        for sequence in self.sequences[num_sequences:]:
            for _ in range(3):
                self.advance(sequence, data)
            self.cache.free(self.sequences.pop())

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.cache.free(self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1))))

    @rule()
    def take_events(self) -> None:
        """A hash is resident while every group knows a block of it, or the host has one."""
        stored, evicted = self.pool.take_events()
        assert not set(stored) & self.replayed
        assert set(evicted) <= self.replayed
        self.replayed = (self.replayed | set(stored)) - set(evicted)
        assert self.replayed == set(self.pool.resident_hashes())
        known = [{*index, *self.host.hashes(group)} for group, index in enumerate(self.pool._indexes)]
        assert self.replayed == set.intersection(*known)

    def check_visible(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Everything that the next token sees is in blocks that hold this sequence's own tokens."""
        size = self.cache.block_size
        content, _ = self.after_copies()
        for group in range(len(self.windows)):
            for position in range(self.first_seen(num_computed_tokens, group), num_computed_tokens):
                block = self.block(sequence, position // size, group)
                assert self.pool._num_references[block], "a visible block is free"
                in_group, tokens = content[block]
                assert in_group == group
                assert tokens == tuple(sequence.token_ids[: len(tokens)]), "other tokens are visible"
                assert len(tokens) > position, "a visible token is not computed"

    @invariant()
    def visible_blocks_are_held(self) -> None:
        for sequence in self.sequences:
            self.check_visible(sequence, sequence.num_computed_tokens)

    @invariant()
    def nothing_is_held_for_long(self) -> None:
        """A group with a window holds the blocks that the next token sees, at most two more, and nothing else."""
        self.cache.check_integrity(self.sequences)
        size, counts = self.cache.block_size, Counter[int]()
        for sequence in self.sequences:
            num_entries = len(sequence.block_table) // len(self.windows)
            for group, window in enumerate(self.windows):
                num_held = num_entries
                if window is not None:
                    first = max(0, sequence.num_computed_tokens // size * size - window + 1) // size
                    num_held = num_entries - min(first, num_entries)
                    assert num_held <= -(-window // size) + 1
                counts.update(self.block(sequence, num_entries - 1 - i, group) for i in range(num_held))
        assert len(counts) == self.cache.num_blocks - self.cache.num_free_blocks

    def num_at_risk(self, sequence: Sequence) -> int:
        """The computed tokens from the first block on that nobody else holds, in a group that gives none back."""
        full = [group for group, window in enumerate(self.windows) if window is None]
        num_kept = 0
        while full and num_kept < sequence.num_full_blocks:
            blocks = [self.block(sequence, num_kept, group) for group in full]
            if any(self.pool._num_references[block] == 1 for block in blocks):
                break
            num_kept += 1
        return sequence.num_computed_tokens - num_kept * self.cache.block_size

    @invariant()
    def the_one_with_the_least_to_compute_again_gives_way_first(self) -> None:
        def key(sequence: Sequence) -> tuple[int, int, Order]:
            return (sequence.order[0], -self.num_at_risk(sequence), sequence.order)

        for sequence in self.sequences:
            assert self.cache.num_tokens_at_risk(sequence) == self.num_at_risk(sequence)
        expected = sorted(self.sequences, key=key, reverse=True)
        assert list(self.roster.in_yield_order(self.sequences)) == expected

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            while self.sequences:
                self.cache.free(self.sequences.pop())
            self.cache.check_integrity([])
            self.take_events()
            assert self.cache.num_free_blocks == self.cache.num_blocks


TestKVCacheManager = KVCacheManagerMachine.TestCase
TestKVCacheManager.settings = settings(max_examples=150, stateful_step_count=40, derandomize=True, deadline=None)
