"""The bounded queue in front of the replicas: a place for each request, first come first served, or an early refusal.

A request enters before its prompt is tokenized, and starts when its model has a replica, before one is chosen for it.
So everything the router holds for clients is bounded by max_in_flight + max_queued. Who gets a place when is decided in
places.py. Owned by the event loop.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.errors import DeadlineError
from router.places import Places


class Admission:
    """Hands out places, by tickets."""

    def __init__(self, places: Places, clock: Callable[[], float]) -> None:
        self.places = places
        self._clock = clock
        self._waiters: dict[int, asyncio.Future[None]] = {}

    @contextmanager
    def enter(self) -> Iterator[int]:
        """Hold a place in the queue, and in flight once it was started, for the length of the block; yields its ticket.

        Raises:
            OverloadedError: as many requests are in flight and wait as may.
        """
        ticket = self.places.enter()
        try:
            yield ticket
        finally:
            following = self.places.leave(ticket, self._clock())
            waiter = None if following is None else self._waiters.get(following)
            # One that was cancelled has its place all the same, until its task runs and leaves.
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def start(self, ticket: int, deadline_s: float | None) -> None:
        """Wait until the request may go to a replica.

        Raises:
            DeadlineError: the event loop's time passed `deadline_s`.
        """
        if self.places.start(ticket):
            return
        waiter = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter
        except TimeoutError:
            raise DeadlineError("the deadline passed while the request waited for a place in flight") from None
        finally:
            del self._waiters[ticket]
