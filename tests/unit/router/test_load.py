"""What the router believes about a replica's load between two frames."""

import pytest

from router.load import LoadEstimate


def test_request_counts_from_the_moment_it_is_sent() -> None:
    load = LoadEstimate()
    load.report(5, 1000)
    load.submit("x", 300)
    assert (load.num_requests, load.num_pending_tokens) == (6, 1300)


def test_frame_that_may_have_crossed_the_request_does_not_count_as_seeing_it() -> None:
    load = LoadEstimate()
    load.report(0, 0)
    load.submit("x", 300)
    load.report(0, 0)
    assert (load.num_requests, load.num_pending_tokens) == (1, 300)
    load.report(1, 300)
    assert (load.num_requests, load.num_pending_tokens) == (1, 300), "seen now, and not counted twice"


def test_answer_shows_that_the_replica_knows_the_request() -> None:
    load = LoadEstimate()
    load.submit("x", 300)
    load.answer("x")
    load.report(1, 0)
    assert (load.num_requests, load.num_pending_tokens) == (1, 0)


@pytest.mark.parametrize("others", [0, 2])
def test_aborted_requests_are_gone_at_once_though_no_frame_follows(others: int) -> None:
    load = LoadEstimate()
    for i in range(10):
        load.submit(str(i), 100)
    load.report(0, 0)
    load.report(10 + others, 1000 + others)
    for i in range(10):
        load.end(str(i))
    assert (load.num_requests, load.num_pending_tokens) == (others, others)


def test_unsent_and_aborted_leaves_no_trace() -> None:
    load = LoadEstimate()
    load.submit("x", 100)
    load.end("x")
    assert (load.num_requests, load.num_pending_tokens) == (0, 0)


def test_own_requests_are_a_floor() -> None:
    load = LoadEstimate()
    load.submit("x", 100)
    load.answer("x")
    load.report(0, 0)
    assert load.num_requests == 1


def test_it_can_be_read_while_requests_are_sent() -> None:
    """As by the thread of the metrics: the loop may send another request between any two steps of a read."""
    load = LoadEstimate()
    is_reading = False

    class Number(int):
        def __radd__(self, other: int) -> int:
            if is_reading:
                load.submit(f"request {load.num_requests}", 0)
            return other + int(self)

    load.submit("x", Number(300))
    load.submit("y", Number(20))
    is_reading = True
    assert load.num_pending_tokens == 320


def test_end_of_an_answered_request_leaves_the_prompts_of_others() -> None:
    load = LoadEstimate()
    load.submit("x", 300)
    load.answer("x")
    load.report(2, 200)  # of another router's request
    load.end("x")
    assert (load.num_requests, load.num_pending_tokens) == (1, 200)
