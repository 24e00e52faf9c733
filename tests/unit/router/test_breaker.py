"""When a failing replica is left alone, probed and taken back; time is a number."""

from router.breaker import Breaker
from router.config import BreakerConfig


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker(BreakerConfig(max_failures=3, open_s=1.0, max_open_s=3.0))
    for _ in range(3):
        breaker.fail(at_s)
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(BreakerConfig(max_failures=3))
    breaker.fail(0)
    breaker.fail(0)
    assert breaker.allows(0)
    breaker.succeed()
    breaker.fail(0)
    breaker.fail(0)
    assert breaker.allows(0)
    breaker.fail(0)
    assert not breaker.allows(0)


def test_lets_one_probe_through_when_the_time_is_over() -> None:
    breaker = opened()
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    breaker.begin(1.0)
    assert not breaker.allows(1.1)
    breaker.succeed()
    assert breaker.is_closed


def test_stays_open_longer_after_each_failed_probe_up_to_a_limit() -> None:
    breaker, now_s = opened(), 1.0
    for open_s in (2.0, 3.0, 3.0):
        breaker.begin(now_s)
        breaker.fail(now_s)
        assert not breaker.allows(now_s + open_s - 0.1)
        now_s += open_s
        assert breaker.allows(now_s)


def test_probe_that_says_nothing_makes_room_for_another() -> None:
    breaker = opened()
    breaker.begin(1.0)
    breaker.release()
    assert breaker.allows(1.0)
    assert not breaker.is_closed


def test_stragglers_do_not_prolong_the_open_time() -> None:
    breaker = opened()
    breaker.fail(0.9)
    assert breaker.allows(1.0)


def test_an_answer_ends_the_longer_times() -> None:
    breaker = opened()
    breaker.begin(1.0)
    breaker.fail(1.0)  # two seconds now
    breaker.begin(3.0)
    breaker.succeed()
    for _ in range(3):
        breaker.fail(10.0)
    assert breaker.allows(11.0)
