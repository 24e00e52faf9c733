"""Loads as they are sent, in virtual time: open loops never wait, closed loops do; late requests show."""

import asyncio
import heapq
import math
import random
import statistics
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

import pytest

from bench.errors import BenchConfigError
from bench.load.arrivals import ClosedLoop, OpenLoop, Replay, draw_offsets
from bench.load.calls import Call, Session
from bench.load.driver import Driver
from bench.load.records import CallError, CallRecord, ErrorKind, Usage
from bench.load.sender import Received, ServedModel


class VirtualTime:
    """A clock that jumps to the next one who waits when nobody else has anything to do."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waiting: list[tuple[float, int, asyncio.Event]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now_s

    async def pause(self, seconds: float) -> None:
        event = asyncio.Event()
        self._count += 1
        heapq.heappush(self._waiting, (self.now_s + seconds, self._count, event))
        await event.wait()

    async def run(self, work: asyncio.Task[object]) -> None:
        while not work.done():
            for _ in range(100):  # everybody who can does what they have to do
                await asyncio.sleep(0)
            if self._waiting and not work.done():
                self.now_s, _, event = heapq.heappop(self._waiting)
                event.set()


class FakeService:
    """Answers after `answer_s` with a token, and `token_s` for each further one."""

    def __init__(self, time: VirtualTime, *, answer_s: float = 1.0, token_s: float = 0.0) -> None:
        self._time = time
        self._answer_s = answer_s
        self._token_s = token_s
        self.sent: list[tuple[float, Call]] = []
        self.salts: set[str] = set()
        self.num_open = self.max_open = 0
        self.fail = lambda call: False
        self.failure = ErrorKind.OVERLOADED

    async def find_model(self) -> ServedModel:
        return ServedModel(name="fake", vocab_size=10)

    async def send(self, call: Call, cache_salt: str, received: Received) -> Usage:
        self.sent.append((self._time.now_s, call))
        self.salts.add(cache_salt)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await self._time.pause(self._answer_s)
            if self.fail(call):
                raise CallError(self.failure, "full")
            for index in range(call.num_out):
                if index:
                    await self._time.pause(self._token_s)
                received(1)
        finally:
            self.num_open -= 1
        return Usage(prompt_tokens=len(call.prompt), cached_tokens=0, completion_tokens=call.num_out)  # type: ignore[arg-type]


def single(number: int, *, num_out: int = 1) -> Iterator[Session]:
    return (Session(calls=(Call(prompt=(index,), num_out=num_out),)) for index in range(number))


def timed(times_s: Iterable[float | None]) -> Iterator[Session]:
    return (Session(calls=(Call(prompt=(1,), num_out=1),), at_s=at_s) for at_s in times_s)


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


async def drive(time: VirtualTime, service: FakeService, load, sessions, **options):  # type: ignore[no-untyped-def]
    driver = Driver(service, cache_salt="salt", clock=time.clock, pause=time.pause)
    task = asyncio.create_task(driver.run(load, sessions, seed=0, **options))
    await time.run(task)
    return task.result()


async def test_open_loop_never_waits_for_an_answer(time: VirtualTime) -> None:
    service = FakeService(time, answer_s=1000.0)
    run = await drive(time, service, OpenLoop(rate=10, burstiness=math.inf), single(50))
    assert [at_s for at_s, _ in service.sent] == pytest.approx([index / 10 for index in range(50)])
    assert service.max_open == 50
    assert [record.lag_s for record in run.records] == pytest.approx([0.0] * 50)
    assert [record.ttft_s for record in run.records] == pytest.approx([1000.0] * 50)


async def test_infinite_rate_sends_all_at_once(time: VirtualTime) -> None:
    service = FakeService(time)
    await drive(time, service, OpenLoop(rate=float("inf")), single(20))
    assert {at_s for at_s, _ in service.sent} == {0.0}


async def test_infinite_rate_sends_until_the_duration_is_over(time: VirtualTime) -> None:
    def slow() -> Iterator[Session]:
        """Each session takes a second to make."""
        for session in single(100):
            time.now_s += 1.0
            yield session

    service = FakeService(time, answer_s=50.0)
    run = await drive(time, service, OpenLoop(rate=math.inf), slow(), duration_s=4.5)
    assert [record.sent_s for record in run.records] == [1.0, 2.0, 3.0, 4.0]
    assert all(record.is_answered for record in run.records)
    assert run.is_over


async def test_finite_rate_sends_late_what_was_due_before_the_duration_was_over(time: VirtualTime) -> None:
    def slow() -> Iterator[Session]:
        """Each session takes two seconds to make."""
        for session in single(100):
            time.now_s += 2.0
            yield session

    run = await drive(time, FakeService(time), OpenLoop(rate=1, burstiness=math.inf), slow(), duration_s=3.0)
    assert [record.sent_s for record in run.records] == [2.0, 4.0, 6.0]


async def test_late_requests_show_their_lag_and_stay_due_when_they_were(time: VirtualTime) -> None:
    def slow() -> Iterator[Session]:
        """The third session takes five seconds to make."""
        for index, session in enumerate(single(6)):
            if index == 2:
                time.now_s += 5.0
            yield session

    service = FakeService(time)
    run = await drive(time, service, OpenLoop(rate=1, burstiness=math.inf), slow())
    assert [record.due_s for record in run.records] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [record.lag_s for record in run.records] == [0.0, 0.0, 4.0, 3.0, 2.0, 1.0]


async def test_closed_loop_keeps_so_many_running(time: VirtualTime) -> None:
    service = FakeService(time, answer_s=1.0, token_s=0.5)
    run = await drive(time, service, ClosedLoop(concurrency=3), single(9, num_out=3))
    assert service.max_open == 3
    assert [at_s for at_s, _ in service.sent] == [0.0] * 3 + [2.0] * 3 + [4.0] * 3
    assert all(record.lag_s is None for record in run.records)
    assert {(record.ttft_s, record.tpot_s, record.e2e_s) for record in run.records} == {(1.0, 0.5, 2.0)}
    assert service.salts == {"salt"}


async def test_replay_keeps_the_times_of_the_trace(time: VirtualTime) -> None:
    service = FakeService(time)
    await drive(time, service, Replay(speed=2.0), timed([3.0, 3.5, 7.0]))
    assert [at_s for at_s, _ in service.sent] == [0.0, 0.25, 2.0]
    for times_s in ([None], []):
        with pytest.raises(BenchConfigError, match="the sessions have no times"):
            await drive(time, service, Replay(), timed(times_s))


async def test_turns_of_a_session_follow_answers_and_pauses(time: VirtualTime) -> None:
    calls = tuple(Call(prompt=(index,), num_out=1) for index in range(3))
    service = FakeService(time, answer_s=1.0)
    run = await drive(
        time, service, OpenLoop(rate=1, burstiness=math.inf), iter([Session(calls=calls, think_s=10.0), *single(1)])
    )
    assert [(at_s, call.prompt) for at_s, call in service.sent] == [(0, (0,)), (1, (0,)), (11, (1,)), (22, (2,))]
    assert [record.due_s for record in run.records] == [0.0, 1.0, None, None]


async def test_failed_call_ends_its_session_and_nothing_else(time: VirtualTime) -> None:
    service = FakeService(time)
    service.fail = lambda call: call.prompt == (1,)
    calls = tuple(Call(prompt=(index,), num_out=1) for index in range(4))
    run = await drive(time, service, ClosedLoop(concurrency=1), iter([Session(calls=calls)] * 2))
    assert [record.error and record.error.kind for record in run.records] == [None, ErrorKind.OVERLOADED] * 2
    assert len(service.sent) == 4
    assert (run.num_unsent, run.num_calls) == (4, 8)


async def test_closed_loop_does_not_hammer_a_service_that_turns_it_away(time: VirtualTime) -> None:
    service = FakeService(time, answer_s=0.0)
    service.fail = lambda call: True
    run = await drive(time, service, ClosedLoop(concurrency=2), single(1000), duration_s=4.5)
    assert [record.sent_s for record in run.records] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


async def test_closed_loop_goes_on_at_once_after_a_request_that_was_wrong(time: VirtualTime) -> None:
    service = FakeService(time, answer_s=0.25)
    service.fail = lambda call: True
    service.failure = ErrorKind.BAD_REQUEST
    run = await drive(time, service, ClosedLoop(concurrency=1), single(4))
    assert [record.sent_s for record in run.records] == [0, 0.25, 0.5, 0.75]


async def test_each_end_is_told_and_the_share_of_a_core_is_that_of_the_load(
    time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.process_time", lambda: 100.0 + time.now_s / 4)
    ended: list[CallRecord] = []
    driver = Driver(FakeService(time), cache_salt="", on_answer=ended.append, clock=time.clock, pause=time.pause)
    monkeypatch.setattr("time.process_time", lambda: 200.0 + time.now_s / 4)
    time.now_s = 10.0
    task = asyncio.create_task(driver.run(ClosedLoop(concurrency=1), single(4), seed=0))
    await time.run(task)
    assert ended == task.result().records
    assert task.result().cpu_share == 0.25


async def test_what_an_interrupted_load_gave_is_kept(time: VirtualTime) -> None:
    service = FakeService(time, answer_s=1.0)
    driver = Driver(service, cache_salt="salt", clock=time.clock, pause=time.pause)
    load = asyncio.create_task(driver.run(ClosedLoop(concurrency=1), single(5), seed=0))
    while len(service.sent) < 3:
        await time.run(asyncio.create_task(time.pause(1.0)))
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    records = driver.so_far().records
    assert [record.error and record.error.kind for record in records] == [None, None, ErrorKind.CANCELLED]
    assert all(record.is_answered for record in records[:2])


@pytest.mark.parametrize(
    ("load", "number"), [(OpenLoop(rate=2, burstiness=math.inf), 10), (ClosedLoop(concurrency=2), 10), (Replay(), 5)]
)
async def test_nothing_begins_after_the_duration(
    time: VirtualTime, load: OpenLoop | ClosedLoop | Replay, number: int
) -> None:
    service = FakeService(time, answer_s=1.0)
    run = await drive(time, service, load, timed(map(float, range(100))), duration_s=5.0)
    assert len(run.records) == number
    assert all(record.is_answered for record in run.records)
    assert run.is_over


@pytest.mark.parametrize("load", [OpenLoop(rate=2), OpenLoop(rate=math.inf), ClosedLoop(concurrency=2), Replay()])
async def test_a_duration_that_is_longer_than_the_load_does_not_end_it(
    time: VirtualTime, load: OpenLoop | ClosedLoop | Replay
) -> None:
    service = FakeService(time, answer_s=1.0)
    run = await drive(time, service, load, timed(map(float, range(3))), duration_s=100.0)
    assert (len(run.records), run.is_over) == (3, False)


@pytest.mark.parametrize(("think_s", "number"), [(0.0, 5), (1.0, 3), (10.0, 1)])
async def test_a_session_ends_with_the_duration(time: VirtualTime, think_s: float, number: int) -> None:
    service = FakeService(time, answer_s=1.0)
    session = Session(calls=(Call(prompt=(0,), num_out=1),) * 100, think_s=think_s)
    run = await drive(time, service, ClosedLoop(concurrency=1), iter([session]), duration_s=5.0)
    assert (len(run.records), run.is_over) == (number, True)
    assert (run.num_unsent, time.now_s) == (0, run.records[-1].end_s)


@pytest.mark.parametrize(("burstiness", "rate"), [(math.inf, 4.0), (4.0, 4.0), (1.0, 20.0), (0.1, 4.0)])
def test_gaps_have_the_rate_and_the_spread_that_are_asked_for(burstiness: float, rate: float) -> None:
    """Burstiness is a gamma shape, as `vllm bench serve` has it: less of it makes bursts."""
    offsets = list(islice(draw_offsets(OpenLoop(rate=rate, burstiness=burstiness), random.Random(1)), 20_000))
    gaps = [later - earlier for earlier, later in pairwise(offsets)]
    assert offsets[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert statistics.pstdev(gaps) * rate == pytest.approx(burstiness**-0.5, rel=0.1, abs=1e-9)


def test_poisson_gaps_are_exponential() -> None:
    offsets = list(islice(draw_offsets(OpenLoop(rate=1), random.Random(2)), 20_000))
    longer = sum(later - earlier > 1 for earlier, later in pairwise(offsets)) / 20_000
    assert longer == pytest.approx(0.3679, abs=0.01)  # 1 / e


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    first, again, other = (
        list(islice(draw_offsets(OpenLoop(rate=1, burstiness=0.5), random.Random(seed)), 50)) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OpenLoop(rate=0), r"--rate is 0; allowed: more than 0"),
        (lambda: OpenLoop(rate=float("nan")), r"--rate is nan"),
        (lambda: OpenLoop(rate=1, burstiness=0), r"--burstiness is 0; allowed: at least 0.001"),
        (lambda: OpenLoop(rate=1, burstiness=float("nan")), r"--burstiness is nan"),
        (lambda: Replay(speed=0), r"--speed is 0"),
        (lambda: ClosedLoop(concurrency=0), r"--concurrency is 0; allowed: 1 or more"),
    ],
)
def test_loads_that_make_no_sense_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BenchConfigError, match=message):
        make()
