"""A future that is waited for while signals interrupt."""

import itertools
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Event, Thread
from types import FrameType
from typing import Any

import pytest

from cluster.awaited import Awaited


def interrupt(wait: Callable[[], object], place: int) -> bool:
    """Interrupt `wait` at one of the places where Python may hear a signal; return False where it ended before.

    In a thread of its own: what a trace raises may stay the exception that its thread seems to handle.
    """
    places = itertools.count()
    was_interrupted = Event()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if next(places) == place:
            raise KeyboardInterrupt
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            wait()
        except KeyboardInterrupt:
            sys.settrace(None)
            was_interrupted.set()
        finally:
            sys.settrace(None)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive(), place
    return was_interrupted.is_set()


def test_who_ends_a_future_waits_for_nobody_that_was_interrupted() -> None:
    for place in itertools.count():
        future: Future[int] = Future()
        awaited = Awaited(future)
        was_interrupted = interrupt(partial(awaited.wait, 0.0), place)
        ending = Thread(target=future.set_result, args=(7,), daemon=True)
        ending.start()
        assert awaited.wait(10.0), place
        assert awaited.result() == 7
        ending.join(10.0)
        assert not ending.is_alive(), place
        if not was_interrupted:
            break
    assert place > 3, "nothing was interrupted"


def test_a_future_that_has_ended_is_known_to_have_however_often_one_was_interrupted() -> None:
    for place in itertools.count():
        future: Future[int] = Future()
        awaited = Awaited(future)
        future.set_exception(ValueError("as it ended"))
        was_interrupted = interrupt(partial(awaited.wait, 10.0), place)
        assert awaited.wait(0.0)
        with pytest.raises(ValueError, match="as it ended"):
            awaited.result()
        if not was_interrupted:
            break


def test_a_wait_ends_by_its_time() -> None:
    assert not Awaited(Future[None]()).wait(0.01)
