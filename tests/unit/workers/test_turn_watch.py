"""A turn hangs when it is seen at every look, and in no other case."""

import pytest

from workers.turn_watch import NUM_LOOKS, TurnWatch


def test_a_turn_hangs_when_each_look_sees_it() -> None:
    watch = TurnWatch(None)
    with watch:
        assert [watch.look() for _ in range(NUM_LOOKS + 1)] == [False] * NUM_LOOKS + [True]


def test_turns_that_end_do_not_hang_however_long_they_go_on() -> None:
    watch = TurnWatch(None)
    for _ in range(10):
        with watch:
            assert not any(watch.look() for _ in range(NUM_LOOKS))
    assert not any(watch.look() for _ in range(3 * NUM_LOOKS))


def test_a_turn_that_raises_has_ended() -> None:
    watch = TurnWatch(None)
    with pytest.raises(ZeroDivisionError), watch:
        raise ZeroDivisionError
    assert not any(watch.look() for _ in range(3 * NUM_LOOKS))
