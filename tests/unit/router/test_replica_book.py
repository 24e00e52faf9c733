"""What a router makes of the events of one replica; time is a number."""

from dataclasses import dataclass, field

from grpc import StatusCode

from router.breaker import Breaker
from router.config import BreakerConfig
from router.prefix_index import PrefixIndex, ReplicaId
from router.replica_book import ReplicaBook

REFUSED, BROKEN = (code.value[0] for code in (StatusCode.RESOURCE_EXHAUSTED, StatusCode.INTERNAL))


@dataclass
class Replica:
    """A ready one whose breaker opens at the first failure for a second, and how often it told of a change."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    num_changes: int = 0

    def __post_init__(self) -> None:
        breaker = Breaker(BreakerConfig(max_failures=1, open_s=1.0))
        self.book = ReplicaBook(ReplicaId("a"), index=self.index, breaker=breaker, on_change=self._note)
        self.book.note_snapshot([b"1"])
        self.book.note_ready()

    def _note(self) -> None:
        self.num_changes += 1

    def call(self, request_id: str, failed_code: int | None, now_s: float) -> None:
        """Send a request whose first output this is."""
        self.book.note_submit(request_id, 10, now_s)
        self.book.note_output(request_id, failed_code, now_s)
        self.book.note_end(request_id)


def test_a_probe_that_is_refused_leaves_its_place_to_the_next() -> None:
    replica = Replica()
    replica.call("x", BROKEN, 0.0)
    assert not replica.book.takes_requests(0.5)
    replica.book.note_submit("probe", 10, 1.0)
    assert not replica.book.takes_requests(1.1), "one probe at a time"
    replica.book.note_output("probe", REFUSED, 1.1)
    assert replica.book.takes_requests(1.1)


def test_it_tells_when_its_breaker_opens_and_closes() -> None:
    replica = Replica()
    assert replica.num_changes == 1, "ready"
    replica.call("x", None, 0.0)
    replica.call("x", REFUSED, 0.0)
    assert replica.num_changes == 1
    replica.call("x", BROKEN, 0.0)
    assert replica.num_changes == 2
    replica.call("x", None, 1.0)
    assert replica.num_changes == 3


def test_what_it_had_to_do_is_forgotten_with_its_stream() -> None:
    replica = Replica()
    replica.book.note_load(5, 700, is_draining=True)
    replica.book.note_submit("x", 10, 0.0)
    replica.book.note_disconnected()

    assert (replica.book.load.num_requests, replica.book.load.num_pending_tokens) == (0, 0)
    assert not replica.book.is_leaving
    assert replica.index.num_blocks(ReplicaId("a")) == 0


def test_a_snapshot_that_comes_after_its_place_was_given_away_is_not_taken() -> None:
    replica = Replica()
    replica.book.note_retired()
    successor = ReplicaBook(ReplicaId("a"), index=replica.index, breaker=replica.book.breaker, on_change=lambda: None)
    successor.note_snapshot([b"2"])
    replica.book.note_snapshot([b"3"])
    replica.book.note_disconnected()

    assert replica.index.num_blocks(ReplicaId("a")) == 1
    assert not replica.book.takes_requests(0.0)
