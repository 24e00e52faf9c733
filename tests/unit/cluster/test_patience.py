"""A controller that fails for a while, as one between two lives, before somebody who watches it."""

from collections.abc import Callable

import pytest
from helpers.cluster import FakeClock

from cluster.errors import ControllerError, ServiceStoppedError
from cluster.patience import Patience


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def patience(clock: FakeClock, told: list[str]) -> Patience:
    return Patience(told.append, sleep=clock.advance, clock=clock)


def failing_until(clock: FakeClock, end_s: float) -> Callable[[], float]:
    def question() -> float:
        if clock() < end_s:
            raise ControllerError("no controller answers")
        return clock()

    return question


def test_controller_that_never_answered_is_not_waited_for(clock: FakeClock, patience: Patience) -> None:
    before_s = clock()
    with pytest.raises(ControllerError, match="no controller answers"):
        patience.ask(failing_until(clock, before_s + 1))
    assert clock() == before_s


def test_each_outage_is_told_once_and_has_the_whole_limit(
    clock: FakeClock, patience: Patience, told: list[str]
) -> None:
    patience.ask(failing_until(clock, clock()))
    for _ in range(2):
        back_s = clock() + 20
        assert patience.ask(failing_until(clock, back_s)) == back_s
    assert told == ["no controller answers (asked again for 30 s)"] * 2


def test_after_a_stop_nobody_is_waited_for(clock: FakeClock, patience: Patience, told: list[str]) -> None:
    patience.ask(failing_until(clock, clock()))
    patience.note_stopping(is_stopping=True)
    before_s = clock()
    with pytest.raises(ServiceStoppedError, match="the service has stopped"):
        patience.ask(failing_until(clock, before_s + 1))
    assert (clock(), told) == (before_s, [])


def test_a_successor_that_does_not_stop_is_waited_for_again(clock: FakeClock, patience: Patience) -> None:
    patience.ask(failing_until(clock, clock()))
    patience.note_stopping(is_stopping=True)
    patience.note_stopping(is_stopping=False)
    back_s = clock() + 1
    assert patience.ask(failing_until(clock, back_s)) == back_s


def test_controller_that_stays_away_is_given_up(clock: FakeClock, patience: Patience, told: list[str]) -> None:
    patience.ask(failing_until(clock, clock()))
    before_s = clock()
    with pytest.raises(ControllerError, match="no controller answers"):
        patience.ask(failing_until(clock, before_s + 60))
    assert clock() == before_s + 30
    assert len(told) == 1


def test_nobody_is_waited_for_beyond_the_time_to_give_up(clock: FakeClock, told: list[str]) -> None:
    before_s = clock()
    patience = Patience(told.append, has_answered=True, give_up_s=before_s + 40, sleep=clock.advance, clock=clock)
    assert patience.ask(failing_until(clock, before_s + 20)) == before_s + 20
    with pytest.raises(ControllerError, match="no controller answers"):
        patience.ask(failing_until(clock, before_s + 60))
    assert clock() == before_s + 40
    assert [line.partition("(")[2] for line in told] == ["asked again for 30 s)", "asked again for 20 s)"]
