"""Which replicas may get a request, and which one does, as when each replica was looked at for each request."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from weft.v1 import replica_pb2

from router.breaker import Breaker
from router.config import BreakerConfig, PolicyName, PrefixPolicyConfig
from router.policy import Choice, ReplicaView, RouteRequest
from router.prefix_index import ReplicaId
from router.prefix_policy import make_policy
from router.replica_book import LinkState, ReplicaBook
from router.route import Route, ServedModel

NAMES = [ReplicaId(f"m-{number}") for number in (3, 10, 1, 2, 20)]
CODES = st.sampled_from([None, None, 13, 8])  # served, INTERNAL, RESOURCE_EXHAUSTED
BLOCKS = [bytes([number]) * 16 for number in range(8)]


class NotingPolicy:
    """Notes what it is given, and what each candidate looks like on its own."""

    def __init__(self) -> None:
        self.policy = make_policy(PolicyName.ROUND_ROBIN, PrefixPolicyConfig(), random.Random(0))
        self.all: list[ReplicaView] = []
        self.single: list[ReplicaView] = []

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView]) -> Choice:
        self.all, self.single = list(replicas), [replicas[i] for i in range(len(replicas))]
        return self.policy.choose(request, replicas)


class RouteMachine(RuleBasedStateMachine):
    """Whatever happens to replicas, the candidates are those that say so themselves when each is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = NotingPolicy()
        self.route: Route[ReplicaBook] = Route(ServedModel(name="m", path="", max_context=0), self.policy)
        self.route.accept(replica_pb2.Snapshot(block_size=4))
        self.now_s = 0.0
        self.num_requests = 0
        self.last: ReplicaId | None = None

    def book(self, choice: int) -> ReplicaBook:
        return list(self.route.links.values())[choice % len(self.route.links)]

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: ReplicaId) -> None:
        if name not in self.route.links:
            breaker = Breaker(BreakerConfig(max_failures=2, open_s=1.0))
            change = self.route.note_change
            self.route.add(ReplicaBook(name, index=self.route.index, breaker=breaker, on_change=change))

    @precondition(lambda self: self.route.links)
    @rule(choice=st.integers(0, 4), blocks=st.lists(st.sampled_from(BLOCKS), max_size=4))
    def connect(self, choice: int, blocks: list[bytes]) -> None:
        book = self.book(choice)
        if book.state is LinkState.CONNECTING:
            book.note_snapshot(blocks)
            book.note_ready()

    @precondition(lambda self: self.route.links)
    @rule(choice=st.integers(0, 4), what=st.sampled_from(["leave", "break", "drain", "dismiss", "keep"]))
    def change(self, choice: int, what: str) -> None:
        book = self.book(choice)
        match what:
            case "leave":
                self.route.remove(book.replica_id).note_retired()
            case "break":
                book.breaker.fail(self.now_s)
                book.note_disconnected()
            case "dismiss" | "keep":
                book.note_dismissed(what == "dismiss")
            case "drain":
                book.note_load(0, 0, is_draining=not book.is_draining)

    @rule(seconds=st.sampled_from([0.1, 1.5]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.route.links)
    @rule(choice=st.integers(0, 4), code=CODES, ends=st.booleans())
    def serve(self, choice: int, code: int | None, ends: bool) -> None:
        book = self.book(choice)
        if not book.takes_requests(self.now_s):
            return
        self.num_requests += 1
        request_id = str(self.num_requests)
        book.note_submit(request_id, 10, self.now_s)
        if ends:
            book.note_output(request_id, code, self.now_s)
            book.note_end(request_id)

    @rule(avoided=st.sets(st.sampled_from(NAMES), max_size=2), prompt=st.lists(st.sampled_from(BLOCKS), max_size=6))
    def place(self, avoided: set[ReplicaId], prompt: list[bytes]) -> None:
        found = self.route.find(avoided, self.now_s)
        books = self.route.links.values()
        assert list(found) == [b for b in books if b.replica_id not in avoided and b.takes_requests(self.now_s)]
        if not found:
            return
        chosen = self.route.choose(found, prompt, 4 * len(prompt) + 3)
        assert [view.replica_id for view in self.policy.all] == [book.replica_id for book in found]
        assert self.policy.all == self.policy.single
        ids = sorted(book.replica_id for book in found)
        self.last = next((each for each in ids if self.last is None or each > self.last), ids[0])
        assert chosen.link.replica_id == self.last
        view = next(view for view in self.policy.all if view.replica_id == self.last)
        assert view.block_size == 4
        assert chosen.num_cached_tokens == 4 * view.num_cached_blocks

    @invariant()
    def counts_those_that_are_ready(self) -> None:
        assert self.route.num_ready == sum(book.is_ready for book in self.route.links.values())


RouteMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRoute = RouteMachine.TestCase


@pytest.mark.parametrize("num_replicas", [1, 2, 21, 22, 100])
def test_power_of_two_draws_as_from_a_list(num_replicas: int) -> None:
    """Above 21 candidates the generator draws otherwise than below."""
    rng, drawn_from = random.Random(num_replicas), random.Random(num_replicas)
    policy = make_policy(PolicyName.POWER_OF_TWO, PrefixPolicyConfig(), rng)
    for number in range(50):
        views = [
            ReplicaView(replica_id=ReplicaId(str(i)), num_requests=hash((number, i)) % 5) for i in range(num_replicas)
        ]
        first, *others = drawn_from.sample(views, min(2, num_replicas))
        wanted = min((first, *others), key=lambda view: view.num_requests)
        assert policy.choose(RouteRequest(num_tokens=1), views).replica_id == wanted.replica_id
