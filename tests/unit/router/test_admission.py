"""The bounded queue: order, bounds, deadlines, and places that nobody can lose."""

import asyncio
import gc
from contextlib import ExitStack

import pytest

from router.admission import Admission
from router.config import AdmissionConfig
from router.errors import DeadlineError, OverloadedError
from router.places import Places


def admission(max_in_flight: int, max_queued: int) -> Admission:
    return Admission(Places(AdmissionConfig(max_in_flight=max_in_flight, max_queued=max_queued)), lambda: 0.0)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Client:
    """A request that holds its place until told to leave."""

    def __init__(self, queue: Admission, *, deadline_s: float | None = None) -> None:
        self.has_started = False
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(queue, deadline_s))

    async def _run(self, queue: Admission, deadline_s: float | None) -> None:
        with queue.enter() as ticket:
            await queue.start(ticket, deadline_s)
            self.has_started = True
            await self._leave.wait()

    async def leave(self) -> None:
        self._leave.set()
        await self.task


async def test_first_come_first_served() -> None:
    queue = admission(2, 10)
    clients = [Client(queue) for _ in range(5)]
    await settle()
    assert [c.has_started for c in clients] == [True, True, False, False, False]
    assert (queue.places.num_in_flight, queue.places.num_queued) == (2, 3)
    await clients[1].leave()
    await settle()
    assert [c.has_started for c in clients] == [True, True, True, False, False]
    for client in clients:
        await client.leave()
    assert (queue.places.num_in_flight, queue.places.num_queued) == (0, 0)


async def test_one_more_than_fits_is_refused_with_a_hint() -> None:
    queue = admission(1, 2)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(queue.enter())
        with pytest.raises(OverloadedError, match="allowed: 1 in flight and 2 waiting") as error, queue.enter():
            pass
        assert error.value.retry_after_s > 0
    with queue.enter():
        assert queue.places.num_queued == 1


def test_hint_is_the_time_in_which_those_that_wait_get_their_places() -> None:
    places = Places(AdmissionConfig(max_in_flight=1, max_queued=3))
    tickets = [places.enter() for _ in range(4)]
    assert [places.start(ticket) for ticket in tickets] == [True, False, False, False]
    now_s = 0.0
    for _ in range(100):
        now_s += 2.0
        assert places.leave(tickets.pop(0), now_s) == tickets[0]
        tickets.append(places.enter())
        places.start(tickets[-1])
    assert places.retry_after_s == pytest.approx(2.0 * 4, rel=0.01)
    while tickets:
        now_s += 2.0
        places.leave(tickets.pop(0), now_s)
    places.start(ticket := places.enter())
    places.leave(ticket, now_s + 3600.0)
    assert places.retry_after_s == pytest.approx(2.0, rel=0.01), "an hour in which nobody waited says nothing"


async def test_deadline_ends_the_wait() -> None:
    queue = admission(1, 5)
    first = Client(queue)
    await settle()
    second = Client(queue, deadline_s=asyncio.get_running_loop().time() + 0.02)
    with pytest.raises(DeadlineError):
        await second.task
    await first.leave()
    assert (queue.places.num_in_flight, queue.places.num_queued) == (0, 0)


async def test_cancelled_waiter_is_passed_over() -> None:
    queue = admission(1, 5)
    first, second, third = (Client(queue) for _ in range(3))
    await settle()
    second.task.cancel()
    await first.leave()
    await settle()
    assert third.has_started
    assert queue.places.num_queued == 0
    await third.leave()
    assert queue.places.num_in_flight == 0


async def test_a_request_that_has_waited_leaves_nothing() -> None:
    queue = admission(1, 5)
    first = Client(queue)
    await settle()
    second = Client(queue)
    await settle()
    await first.leave()
    await second.leave()
    loop = asyncio.get_running_loop()
    assert not [it for it in gc.get_objects() if type(it) is asyncio.Future and it.get_loop() is loop]


async def test_newcomer_does_not_wait_behind_waiters_that_were_just_cancelled() -> None:
    queue = admission(1, 5)
    with queue.enter() as holder:
        await queue.start(holder, None)
        waiting = Client(queue)
        await settle()
        waiting.task.cancel()
    with queue.enter() as newcomer:
        async with asyncio.timeout(5):
            await queue.start(newcomer, None)
    assert queue.places.num_in_flight == 0


async def test_place_given_to_a_cancelled_waiter_goes_to_the_next() -> None:
    queue = admission(1, 5)
    with queue.enter() as ticket:
        await queue.start(ticket, None)
        second, third = Client(queue), Client(queue)
        await settle()
    second.task.cancel()  # it has its place already, and its task has not run since
    await settle()
    assert third.has_started
    await third.leave()
    assert queue.places.num_in_flight == 0
