"""The prefix index against a model that keeps one plain set of blocks for each replica."""

import gc
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.prefix_index import PrefixIndex, ReplicaId

REPLICAS = st.sampled_from([ReplicaId(name) for name in ("a", "b", "c")])
BLOCKS = st.integers(0, 11).map(lambda i: bytes([i]) * 16)
MANY = st.lists(BLOCKS, max_size=8)


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[ReplicaId, set[bytes]] = {}

    @rule(replica=REPLICAS, blocks=MANY)
    def store(self, replica: ReplicaId, blocks: list[bytes]) -> None:
        self.index.store(replica, blocks)
        self.held.setdefault(replica, set()).update(blocks)

    @rule(replica=REPLICAS, blocks=MANY)
    def evict(self, replica: ReplicaId, blocks: list[bytes]) -> None:
        self.index.evict(replica, blocks)
        self.held.setdefault(replica, set()).difference_update(blocks)

    @rule(replica=REPLICAS)
    def drop(self, replica: ReplicaId) -> None:
        self.index.drop(replica)
        self.held.pop(replica, None)

    @rule(prompt=MANY)
    def match(self, prompt: list[bytes]) -> None:
        matched = self.index.match(prompt)
        for replica, blocks in self.held.items():
            length = max((i + 1 for i, block in enumerate(prompt) if block in blocks), default=0)
            assert matched.get(replica, 0) == self.index.num_cached(replica, prompt) == length
        assert matched.keys() <= self.held.keys()

    @invariant()
    def holds_exactly_what_replicas_hold(self) -> None:
        assert len(self.index) == len(set().union(*self.held.values()))
        for replica, blocks in self.held.items():
            assert self.index.num_blocks(replica) == len(blocks)


PrefixIndexMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPrefixIndex = PrefixIndexMachine.TestCase


@given(blocks=st.lists(BLOCKS, min_size=1, unique=True))
def test_nothing_is_left_when_all_replicas_are_gone(blocks: list[bytes]) -> None:
    index = PrefixIndex()
    for replica in (ReplicaId("a"), ReplicaId("b")):
        index.store(replica, blocks)
    index.drop(ReplicaId("a"))
    index.evict(ReplicaId("b"), blocks)
    assert len(index) == 0
    assert not index.match(blocks)


def test_replicas_that_came_and_went_leave_nothing() -> None:
    index = PrefixIndex()
    tracemalloc.start()
    try:
        for number in range(1000):
            index.store(ReplicaId(str(number)), [b"1"])
            index.drop(ReplicaId(str(number)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10_000


def test_blocks_are_nothing_to_the_garbage_collector() -> None:
    index = PrefixIndex()
    blocks = [i.to_bytes(16, "big") for i in range(10_000)]
    gc.collect()
    before = len(gc.get_objects())
    for replica in ("a", "b"):
        index.store(ReplicaId(replica), blocks)
    assert len(gc.get_objects()) - before < 100, "it looks through each of a million while nobody is served"
