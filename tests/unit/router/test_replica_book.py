"""What a router makes of the events of one replica; time is a number."""

import tracemalloc
from dataclasses import dataclass, field

import pytest
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


def test_a_probe_that_is_taken_back_leaves_its_place_to_the_next_and_no_other_request_does() -> None:
    replica = Replica()
    replica.book.note_submit("before", 10, 0.0)
    replica.book.note_output("before", None, 0.0)
    replica.call("x", BROKEN, 0.0)
    replica.book.note_submit("probe", 10, 1.0)
    replica.book.note_abort("before")
    assert not replica.book.takes_requests(1.1)
    replica.book.note_abort("probe")
    assert replica.book.takes_requests(1.1)


def test_a_request_that_was_answered_before_does_not_close_the_breaker() -> None:
    replica = Replica()
    replica.book.note_submit("before", 10, 0.0)
    replica.book.note_output("before", None, 0.0)
    replica.call("x", BROKEN, 0.0)
    replica.book.note_output("before", None, 0.1)
    assert not replica.book.takes_requests(0.1)


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


def test_it_tells_once_when_it_leaves_and_when_its_stream_ends() -> None:
    replica = Replica()
    for _ in range(2):
        replica.book.note_load(0, 0, is_draining=True)
        assert replica.num_changes == 2
    for _ in range(2):
        replica.book.note_dismissed(True)
        assert replica.num_changes == 3
    for _ in range(2):
        replica.book.note_disconnected()
        assert replica.num_changes == 4


def test_what_it_had_to_do_is_forgotten_with_its_stream() -> None:
    replica = Replica()
    replica.book.note_load(5, 700, is_draining=True)
    replica.book.note_submit("x", 10, 0.0)
    assert (replica.book.load.num_requests, replica.book.load.num_pending_tokens) == (6, 710)
    replica.book.note_disconnected()

    assert (replica.book.load.num_requests, replica.book.load.num_pending_tokens) == (0, 0)
    assert not replica.book.is_leaving
    assert replica.index.num_blocks(ReplicaId("a")) == 0


def test_a_prompt_is_no_work_from_its_first_token_on() -> None:
    replica = Replica()
    replica.book.note_submit("x", 10, 0.0)
    replica.book.note_output("x", None, 0.0)
    assert (replica.book.load.num_requests, replica.book.load.num_pending_tokens) == (1, 0)


@pytest.mark.parametrize("is_taken_back", [True, False])
def test_requests_that_are_gone_leave_nothing(is_taken_back: bool) -> None:
    replica = Replica()
    tracemalloc.start()
    try:
        for number in range(1000):
            replica.book.note_submit(str(number), 10, 0.0)
            if is_taken_back:
                replica.book.note_abort(str(number))
            else:
                replica.book.note_disconnected()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 20_000


def test_blocks_are_noted_as_they_come_and_go_and_not_those_that_are_hashed_otherwise() -> None:
    replica = Replica()
    replica.book.note_blocks([b"2"], [b"1"])
    assert replica.index.match([b"2"]) == {ReplicaId("a"): 1}
    assert replica.index.match([b"1"]) == {}
    replica.book.note_disconnected()
    replica.book.note_snapshot(None)
    replica.book.note_blocks([b"1"], [])
    assert not len(replica.index)


def test_a_replica_whose_place_was_given_away_does_not_touch_what_its_successor_holds() -> None:
    replica = Replica()
    replica.book.note_retired()
    assert not replica.book.takes_requests(0.0)
    successor = ReplicaBook(ReplicaId("a"), index=replica.index, breaker=replica.book.breaker, on_change=lambda: None)
    successor.note_snapshot([b"2"])
    replica.book.note_blocks([b"3"], [b"2"])
    replica.book.note_disconnected()

    assert replica.index.match([b"1"]) == replica.index.match([b"3"]) == {}
    assert replica.index.match([b"2"]) == {ReplicaId("a"): 1}


def test_a_snapshot_that_comes_after_its_place_was_given_away_is_not_taken() -> None:
    replica = Replica()
    replica.book.note_retired()
    successor = ReplicaBook(ReplicaId("a"), index=replica.index, breaker=replica.book.breaker, on_change=lambda: None)
    successor.note_snapshot([b"2"])
    replica.book.note_snapshot([b"3"])
    replica.book.note_disconnected()

    assert replica.index.num_blocks(ReplicaId("a")) == 1
    assert not replica.book.takes_requests(0.0)
