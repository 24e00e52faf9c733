"""The bounded queue in front of the replicas: a place for each request, first come first served, or an early refusal.

A request enters before its prompt is tokenized and starts before a replica is chosen, so everything the router holds
for clients is bounded by max_in_flight + max_queued. Owned by the event loop. Who gets a place and who waits is decided
without it: `take`, `ask` and `give_back` are pure but for the clock.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from router.config import AdmissionConfig
from router.errors import DeadlineError, OverloadedError

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0


class Waiter(Protocol):
    """Who waits for a place in flight: a future, or the simulator's."""

    def done(self) -> bool:
        """Whether it has its place, or is no longer there."""

    def set_result(self, result: None, /) -> None:
        """Take the place."""


WaiterT = TypeVar("WaiterT", bound=Waiter)


class Admission:
    """Hands out places."""

    def __init__(self, config: AdmissionConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self._clock = clock
        self._num_entered = 0
        self._num_in_flight = 0
        self._waiters: deque[Waiter] = deque()
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

        Raises as `take`.
        """
        place = self.take()
        try:
            yield place
        finally:
            self.give_back(place)

    def take(self) -> "Place":
        """Return a place in the queue, to be given back.

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
        return Place(self)

    def ask(self, place: "Place", make_waiter: Callable[[], WaiterT]) -> WaiterT | None:
        """Start the request of a place now, if there is one in flight; else let a waiter stand in line, and return it.

        When the waiter has got its place, whoever waited says so by `has_started`.
        """
        if self._num_in_flight < self.config.max_in_flight and self._next_waiter() is None:
            self._num_in_flight += 1
            place.has_started = True
            return None
        waiter = make_waiter()
        self._waiters.append(waiter)
        return waiter

    def give_back(self, place: "Place") -> None:
        """End a place; the next that waits gets the one in flight."""
        self._num_entered -= 1
        if place.has_started:
            self._end()

    async def _start(self, place: "Place", deadline_s: float | None) -> None:
        make_waiter: Callable[[], asyncio.Future[None]] = asyncio.get_running_loop().create_future
        waiter = self.ask(place, make_waiter)
        if waiter is None:
            return
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

    def _next_waiter(self) -> Waiter | None:
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
