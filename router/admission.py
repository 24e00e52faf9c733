"""The bounded queue in front of the replicas: a place for each request, first come first served, or an early refusal.

A request enters before its prompt is tokenized and starts before a replica is chosen, so everything the router holds
for clients is bounded by max_in_flight + max_queued. Owned by the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.config import AdmissionConfig
from router.errors import DeadlineError, OverloadedError

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0


class Admission:
    """Hands out places."""

    def __init__(self, config: AdmissionConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self._clock = clock
        self._num_entered = 0
        self._num_in_flight = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._gap_s = 0.05  # mean time between two requests that end, while some wait
        self._last_end_s: float | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests that have started."""
        return self._num_in_flight

    @property
    def num_queued(self) -> int:
        """Requests that have entered and not started."""
        return self._num_entered - self._num_in_flight

    @property
    def retry_after_s(self) -> float:
        """When to try again: about the time in which those that wait now get their places."""
        return min(max(self._gap_s * (self.num_queued + 1), _MIN_RETRY_S), _MAX_RETRY_S)

    @contextmanager
    def enter(self) -> Iterator["Place"]:
        """Hold a place in the queue, and in flight once it was started, for the length of the block.

        Raises:
            OverloadedError: as many requests are in flight and wait as may.
        """
        if self._num_entered >= self.config.max_in_flight + self.config.max_queued:
            raise OverloadedError(
                f"{self._num_in_flight} requests are in flight and {self.num_queued} wait; allowed: "
                f"{self.config.max_in_flight} in flight and {self.config.max_queued} waiting",
                retry_after_s=self.retry_after_s,
            )
        self._num_entered += 1
        place = Place(self)
        try:
            yield place
        finally:
            self._num_entered -= 1
            if place.has_started:
                self._end()

    async def _start(self, place: "Place", deadline_s: float | None) -> None:
        if self._num_in_flight < self.config.max_in_flight and self._next_waiter() is None:
            self._num_in_flight += 1
            place.has_started = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter
        except TimeoutError:
            raise DeadlineError("the deadline passed while the request waited for a place in flight") from None
        finally:
            # The place may have been given in the same moment in which the wait ended.
            place.has_started = waiter.done() and not waiter.cancelled()
            if not place.has_started:
                self._waiters.remove(waiter)

    def _end(self) -> None:
        self._num_in_flight -= 1
        self._note_end()
        waiter = self._next_waiter()
        if waiter is not None:
            self._waiters.remove(waiter)
            self._num_in_flight += 1
            waiter.set_result(None)

    def _next_waiter(self) -> asyncio.Future[None] | None:
        # One that was cancelled stays in the queue until its task runs again.
        return next((waiter for waiter in self._waiters if not waiter.done()), None)

    def _note_end(self) -> None:
        now_s = self._clock()
        if self._waiters and self._last_end_s is not None:
            self._gap_s += 0.1 * (now_s - self._last_end_s - self._gap_s)
        self._last_end_s = now_s


class Place:
    """One request's place; from Admission.enter."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.has_started = False

    async def start(self, deadline_s: float | None) -> None:
        """Wait until the request may go to a replica.

        Raises:
            DeadlineError: the event loop's time passed `deadline_s`.
        """
        await self._admission._start(self, deadline_s)
