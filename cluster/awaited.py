"""A future for which a thread waits that signals interrupt."""

from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Awaited(Generic[T]):
    """Waits for a future in the main thread, where a signal raises KeyboardInterrupt at any place.

    `concurrent.futures.wait` leaves what it waits with in the future when it is interrupted, at some places with its
    lock taken: who gives the future its result then waits for that lock for ever, and with it all that waits for this
    thread, as the end of Ray does. A `SimpleQueue` has no lock that could be left so.
    """

    def __init__(self, future: Future[T]) -> None:
        self._outcome: Future[T] | None = None
        self._ended: SimpleQueue[None] = SimpleQueue()
        future.add_done_callback(self._end)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the future has ended, at most so long; return whether it has."""
        if self._outcome is None:
            with suppress(Empty):
                self._ended.get(timeout=timeout_s)
        return self._outcome is not None

    def result(self) -> T:
        """Return the result of the future, or raise its error, once `wait` has said that it has ended."""
        assert self._outcome is not None, "it has not ended"
        return self._outcome.result()

    def _end(self, future: Future[T]) -> None:
        self._outcome = future
        self._ended.put(None)
