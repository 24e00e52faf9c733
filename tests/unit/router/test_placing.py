"""Where a request may go next, and when it has looked for long enough. In virtual time."""

import pytest

from router.breaker import Breaker
from router.config import BreakerConfig, FailoverConfig
from router.errors import NoReplicaError, OverloadedError, ReplicaFailedError
from router.placing import Placing
from router.policy import RoundRobin
from router.prefix_index import PrefixIndex, ReplicaId
from router.replica_book import ReplicaBook
from router.route import Route, ServedModel

CONFIG = FailoverConfig(max_attempts=3, new_request_wait_s=10, failover_wait_s=60)
A, B = ReplicaId("a"), ReplicaId("b")


def ready(replica_id: ReplicaId) -> ReplicaBook:
    breaker = Breaker(BreakerConfig(max_failures=1))
    book = ReplicaBook(replica_id, index=PrefixIndex(), breaker=breaker, on_change=lambda: None)
    book.note_snapshot([])
    book.note_ready()
    return book


def route_to(*books: ReplicaBook) -> Route[ReplicaBook]:
    route: Route[ReplicaBook] = Route(ServedModel(name="m", path="", max_context=0), RoundRobin())
    for book in books:
        route.add(book)
    return route


def seeking(now_s: float = 0.0, config: FailoverConfig = CONFIG) -> Placing:
    placing = Placing(config, "m", lambda: 1.5)
    placing.seek(now_s)
    return placing


def test_replicas_that_refused_are_passed_over_once_and_asked_again_after_a_wait() -> None:
    placing, books = seeking(), [ready(A), ready(B)]
    route = route_to(*books)
    placing.note_tokens()
    placing.seek(5.0)
    placing.note_full(A)
    assert placing.find(route, 5.0) == books[1:]
    placing.note_leaving(B)
    placing.seek(5.0)
    assert not placing.find(route, 5.0)
    assert 0 < placing.wait_s(5.0) < 1
    assert list(placing.find(route, 5.2)) == books


def test_replicas_with_an_open_breaker_are_no_candidates() -> None:
    placing, books = seeking(), [ready(A), ready(B)]
    route = route_to(*books)
    books[0].breaker.fail(0.0)
    assert placing.find(route, 0.1) == books[1:]
    assert list(placing.find(route, 2.0)) == books


def test_a_new_request_is_refused_when_all_are_full_and_gives_up_soon_when_none_is_there() -> None:
    placing = seeking()
    placing.note_full(A)
    with pytest.raises(OverloadedError, match="all replicas of model 'm' are full") as error:
        placing.find(route_to(ready(A)), 0.0)
    assert error.value.retry_after_s == 1.5
    placing = seeking(now_s=100.0)
    assert not placing.find(route_to(), 109.0)
    assert placing.wait_s(109.9) == pytest.approx(0.1)
    route = route_to()
    with pytest.raises(NoReplicaError, match="no replica of model 'm' was ready for 10 s"):
        placing.find(route, 110.0, route.text)


def test_a_request_that_has_begun_waits_longer_and_says_what_broke() -> None:
    placing = seeking()
    placing.note_tokens()
    placing.note_loss(A, "gone", was_leaving=False)
    placing.seek(20.0)
    assert not placing.find(route_to(), 79.0)
    with pytest.raises(ReplicaFailedError, match=r"ready for 60 s, after the request's replicas broke: a \(gone\)"):
        placing.find(route_to(), 80.0)


def test_refusals_do_not_begin_the_wait_anew_for_ever() -> None:
    placing = seeking()
    placing.note_leaving(A)
    for now_s in (9.0, 18.0):
        placing.seek(now_s)
        placing.note_leaving(A)
    with pytest.raises(NoReplicaError):
        placing.find(route_to(ready(A)), 19.0)
    placing = seeking()
    placing.note_tokens()
    placing.seek(0.0)
    placing.note_full(A)
    placing.seek(9.0)
    with pytest.raises(NoReplicaError):
        placing.find(route_to(), 60.0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_each_replica_that_leaves_begins_the_wait_anew_however_long_its_queue_was(has_begun: bool) -> None:
    placing, route = seeking(), route_to()
    for replica_id, left_s in ((A, 120.0), (B, 240.0)):
        if has_begun:
            placing.note_loss(replica_id, "drained", was_leaving=True)
        else:
            placing.note_leaving(replica_id)
        placing.seek(left_s)
        assert not placing.find(route, left_s + 9.0)
    with pytest.raises(NoReplicaError, match="ready for 60 s" if has_begun else "ready for 10 s"):
        placing.find(route, 300.0)


def test_a_wait_that_begins_anew_has_its_whole_time() -> None:
    placing = seeking()
    placing.seek_anew(9.0)
    assert not placing.find(route_to(), 18.9)
    with pytest.raises(NoReplicaError):
        placing.find(route_to(), 19.0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_request_that_waits_for_nothing_takes_what_is_there(has_begun: bool) -> None:
    placing = seeking(config=FailoverConfig(new_request_wait_s=0, failover_wait_s=0))
    if has_begun:
        placing.note_loss(A, "gone", was_leaving=False)
        placing.seek(0.0)
    books = [ready(A), ready(B)]
    assert list(placing.find(route_to(*books), 0.1)) == books
    for book in books:
        placing.note_leaving(book.replica_id)
    placing.seek(0.2)
    with pytest.raises(ReplicaFailedError if has_begun else NoReplicaError, match="ready for 0 s"):
        placing.find(route_to(*books), 0.2)


def test_wait_after_a_replica_that_gave_tokens_is_whole_though_it_has_left_before() -> None:
    placing = seeking()
    placing.note_loss(A, "drained", was_leaving=True)
    placing.seek(1.0)
    placing.note_tokens()
    placing.note_loss(A, "drained", was_leaving=True)
    placing.seek(100.0)
    assert not placing.find(route_to(), 159.0)
    with pytest.raises(NoReplicaError, match="ready for 60 s"):
        placing.find(route_to(), 160.0)


def test_any_number_of_replicas_may_leave_as_they_had_said() -> None:
    placing = seeking()
    for number in range(10):
        placing.note_loss(ReplicaId(f"old-{number}"), "drained", was_leaving=True)
    books = [ready(A), ready(B)]
    assert list(placing.find(route_to(*books), 1.0)) == books
    placing.note_loss(A, "drained", was_leaving=True)
    assert list(placing.find(route_to(*books), 1.0)) == books[1:]


def test_request_that_is_handed_back_again_and_again_without_tokens_gives_up() -> None:
    placing, route = seeking(), route_to(ready(A))
    for now_s in range(61):
        placing.seek(now_s)
        if placing.find(route, now_s):
            placing.note_loss(A, "drained", was_leaving=True)
    with pytest.raises(NoReplicaError, match="ready for 60 s"):
        placing.find(route, 61.0)


def test_so_many_replicas_may_break_under_a_request() -> None:
    placing = seeking()
    placing.note_loss(A, "gone", was_leaving=False)
    placing.note_loss(B, "gone", was_leaving=False)
    with pytest.raises(ReplicaFailedError, match="3 replicas broke under the request; allowed: fewer than 3"):
        placing.note_loss(A, "gone again", was_leaving=False)


def test_a_request_under_which_a_replica_broke_before_a_token_has_begun() -> None:
    placing = Placing(FailoverConfig(), "m", lambda: 1.0)
    placing.note_loss(ReplicaId("a"), "died", was_leaving=False)
    assert placing.has_begun


def test_the_wait_after_a_break_is_whole_however_long_the_request_stood_in_the_queue_of_the_replica() -> None:
    placing = seeking()
    placing.note_loss(A, "hangs", was_leaving=False)
    placing.seek(120.0)
    assert not placing.find(route_to(), 179.0)
    with pytest.raises(ReplicaFailedError, match="ready for 60 s"):
        placing.find(route_to(), 180.0)


def test_a_breaker_that_opens_is_known_to_the_route_at_once() -> None:
    route: Route[ReplicaBook] = Route(ServedModel(name="m", path="", max_context=0), RoundRobin())
    breaker = Breaker(BreakerConfig(max_failures=1, open_s=5.0))
    book = ReplicaBook(A, index=PrefixIndex(), breaker=breaker, on_change=route.note_change)
    route.add(book)
    book.note_ready()
    assert list(route.find(set(), 0.0)) == [book]
    book.note_submit("x", 1, 0.0)
    book.note_output("x", 13, 0.0)  # INTERNAL
    assert list(route.find(set(), 0.0)) == []
