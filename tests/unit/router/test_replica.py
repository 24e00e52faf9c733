"""The link to one replica, beyond what failover and directory tests see of it."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from helpers.cluster import FakeClock
from helpers.fake_replica import FakeReplica
from helpers.polling import until
from weft import protocol
from weft.v1 import inference_pb2, replica_pb2
from weft.v1.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server

from router.breaker import Breaker
from router.config import BreakerConfig, LinkConfig
from router.errors import ProtocolError
from router.inbox import Inbox, ReplicaLost
from router.prefix_index import PrefixIndex, ReplicaId
from router.replica import Endpoint, ReplicaLink
from router.replica_book import LinkState
from router.turns import Turns


def link_to(
    replica: FakeReplica,
    accept: Callable[[replica_pb2.Snapshot], bool] = lambda _: True,
    *,
    address: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    **changes: float,
) -> ReplicaLink:
    return ReplicaLink(
        Endpoint(replica_id=ReplicaId(replica.replica_id), model=replica.model, address=address or replica.address),
        router_id="router-0",
        index=PrefixIndex(),
        config=LinkConfig(backoff_s=0.01, max_backoff_s=0.05, **changes),
        breaker=Breaker(BreakerConfig()),
        turns=Turns(),
        accept=accept,
        on_change=lambda: None,
        rng=random.Random(0),
        clock=clock,
    )


async def test_cancellation_is_not_lost_when_the_stream_fails_in_the_same_moment() -> None:
    def accept(_: replica_pb2.Snapshot) -> bool:
        running.cancel()
        raise ProtocolError("and the stream fails as well")

    async with FakeReplica("a") as replica:
        link = link_to(replica, accept)
        running = asyncio.create_task(link.run())
        await asyncio.wait((running,), timeout=5)
        assert running.cancelled()
        assert link.state is LinkState.CLOSED


async def test_aborted_request_reaches_the_replica_once_and_its_late_outputs_go_nowhere() -> None:
    async with FakeReplica("a", paused=True) as replica:
        link = link_to(replica)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        submit = replica_pb2.Submit(
            request_id="x", prompt_token_ids=[1, 2], sampling=inference_pb2.SamplingParams(max_tokens=3)
        )
        link.submit(submit, num_pending_tokens=2)
        assert link.load.num_requests == 1
        await until(lambda: replica.num_requests == 1)
        link.abort("x")
        link.abort("x")
        assert link.load.num_requests == 0
        await until(lambda: replica.aborts == ["x"])
        replica.streams[0].send(
            replica_pb2.ConnectResponse(outputs=[replica_pb2.RequestOutput(request_id="x", token_ids=[7])])
        )
        link.submit(replica_pb2.Submit(request_id="y", prompt_token_ids=[1]), num_pending_tokens=1)
        await until(lambda: replica.num_requests == 1)
        assert link.is_ready
        running.cancel()
        await asyncio.wait((running,))


async def test_request_that_is_aborted_before_it_was_sent_is_not_sent() -> None:
    async with FakeReplica("a", paused=True) as replica:
        link = link_to(replica)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        for request_id in ("x", "y", "z"):
            link.submit(replica_pb2.Submit(request_id=request_id, prompt_token_ids=[1]), num_pending_tokens=1)
        link.abort("x")
        link.abort("y")
        await until(lambda: replica.num_requests == 1)
        assert [submit.request_id for submit in replica.submits] == ["z"]
        assert not replica.aborts
        running.cancel()
        await asyncio.wait((running,))


async def test_request_that_was_not_sent_before_its_stream_broke_is_not_sent_over_the_next() -> None:
    async with FakeReplica("a", paused=True) as replica:
        link = link_to(replica)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        replica.break_streams()
        num_lost = 0
        while link.is_ready:  # the last of them after the writer has ended
            link.submit(replica_pb2.Submit(request_id=f"lost {num_lost}"), num_pending_tokens=1)
            num_lost += 1
            await asyncio.sleep(0)
        await until(lambda: link.is_ready)
        link.submit(replica_pb2.Submit(request_id="new"), num_pending_tokens=1)
        await until(lambda: any(submit.request_id == "new" for submit in replica.submits))
        assert [*replica.streams[0].sequences] == ["new"]
        running.cancel()
        await asyncio.wait((running,))


@pytest.mark.parametrize(("is_draining", "level"), [(True, logging.INFO), (False, logging.WARNING)])
async def test_stream_of_a_replica_that_was_about_to_leave_breaks_without_a_warning(
    caplog: pytest.LogCaptureFixture, is_draining: bool, level: int
) -> None:
    caplog.set_level(logging.INFO, "router.replica")
    async with FakeReplica("a") as replica:
        link = link_to(replica)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        if is_draining:
            replica.drain()
            await until(lambda: not link.is_ready)
        replica.break_streams()
        await until(lambda: replica.num_connections == 2)
        running.cancel()
        await asyncio.wait((running,))
    broke = [record.levelno for record in caplog.records if "stream broke" in record.getMessage()]
    assert broke == [level]


@pytest.mark.parametrize(("is_draining", "level"), [(True, logging.INFO), (False, logging.WARNING)])
async def test_replica_that_has_left_is_missed_without_a_warning_until_it_is_back(
    caplog: pytest.LogCaptureFixture, is_draining: bool, level: int
) -> None:
    def levels() -> list[int]:
        return [record.levelno for record in caplog.records if "not connected" in record.getMessage()]

    caplog.set_level(logging.INFO, "router.replica")
    replica = FakeReplica("a")
    address = await replica.start()
    link = link_to(replica)
    running = asyncio.create_task(link.run())
    await until(lambda: link.is_ready)
    if is_draining:
        replica.drain()
        await until(lambda: not link.is_ready)
    await replica.die()
    await until(lambda: bool(levels()))
    assert levels() == [level]
    caplog.clear()
    await replica.start(int(address.rpartition(":")[2]))
    replica.is_draining = False
    await until(lambda: link.is_ready)
    await replica.die()
    await until(lambda: bool(levels()))
    assert levels() == [logging.WARNING]
    running.cancel()
    await asyncio.wait((running,))


class _LastWords(ReplicaServicer):
    """A replica in threads of its own: it answers the first request with many frames, and ends the stream."""

    num_frames = 200

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code = code
        self._details = details
        self.has_ended = threading.Event()

    def Connect(  # noqa: N802
        self, request_iterator: Iterator[replica_pb2.ConnectRequest], context: grpc.ServicerContext
    ) -> Iterator[replica_pb2.ConnectResponse]:
        context.add_callback(self.has_ended.set)
        next(request_iterator)
        snapshot = replica_pb2.Snapshot(replica_id="a", model="tiny", protocol_version=protocol.VERSION, block_size=4)
        yield replica_pb2.ConnectResponse(snapshot=snapshot)
        request_id = next(request_iterator).submit.request_id
        for i in range(self.num_frames):
            output = replica_pb2.RequestOutput(request_id=request_id, token_ids=[i])
            yield replica_pb2.ConnectResponse(frame=1 + i, outputs=[output])
        context.abort(self._code, self._details)


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "its last words", "RESOURCE_EXHAUSTED: its last words"),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Socket closed",
            "the connection to the replica was lost (UNAVAILABLE: Socket closed)",
        ),
        (  # what gRPC makes of a write to a process that is gone
            grpc.StatusCode.INTERNAL,
            "Internal error from Core",
            "the connection to the replica was lost (INTERNAL: Internal error from Core)",
        ),
    ],
)
async def test_what_came_before_the_end_of_a_stream_is_read_though_nothing_can_be_written_any_more(
    code: grpc.StatusCode, details: str, reason: str
) -> None:
    replica = _LastWords(code, details)
    server = grpc.server(ThreadPoolExecutor(2))
    add_ReplicaServicer_to_server(replica, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    link = link_to(FakeReplica("a"), address=f"127.0.0.1:{port}")
    tasks_before = asyncio.all_tasks()
    running = asyncio.create_task(link.run())
    await until(lambda: link.is_ready)
    inbox = link.submit(replica_pb2.Submit(request_id="x", prompt_token_ids=[1]), num_pending_tokens=1)
    received = await inbox.take()
    tokens = [*received.token_ids]
    assert replica.has_ended.wait(120), "while nobody reads here"
    link.submit(replica_pb2.Submit(request_id="y", prompt_token_ids=[1]), num_pending_tokens=1)
    while received.ending is None:
        received = await inbox.take()
        tokens += received.token_ids
    assert tokens == list(range(replica.num_frames))
    assert received.ending == ReplicaLost(reason=reason)
    running.cancel()
    await until(lambda: asyncio.all_tasks() == tasks_before)
    await asyncio.to_thread(server.stop(None).wait)


async def test_requests_that_end_without_a_word_are_no_silence_of_an_idle_replica() -> None:
    clock = FakeClock()
    async with FakeReplica("a", paused=True) as replica:
        link = link_to(replica, clock=clock, stall_timeout_s=0.04)  # a look every 10 ms, at this clock
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        link.submit(replica_pb2.Submit(request_id="x", prompt_token_ids=[1]), num_pending_tokens=1)
        clock.advance(0.03)
        link.abort("x")
        clock.advance(100.0)
        assert link._waited_in_silence_s == pytest.approx(0.03)
        link.submit(replica_pb2.Submit(request_id="y", prompt_token_ids=[1]), num_pending_tokens=1)
        clock.advance(0.005)
        assert link._waited_in_silence_s == pytest.approx(0.035)
        clock.advance(0.01)
        await until(lambda: replica.num_connections == 2)
        running.cancel()
        await asyncio.wait((running,))


async def test_slow_reader_gets_everything_at_once() -> None:
    inbox = Inbox(Turns())
    for i in range(5):
        output = replica_pb2.RequestOutput(request_id="x", token_ids=[i], text=str(i))
        output.logprobs.add(chosen=inference_pb2.Logprob(token_id=i))
        assert not inbox.add(output)
    inbox.lose("gone")
    received = await inbox.take()
    assert (received.token_ids, received.text) == ((0, 1, 2, 3, 4), "01234")
    assert [logprobs.chosen.token_id for logprobs in received.logprobs] == [0, 1, 2, 3, 4]
    assert received.ending == ReplicaLost(reason="gone")


@pytest.mark.parametrize("has_logprobs", [False, True])
async def test_reader_far_behind_gets_parts_that_a_client_takes(has_logprobs: bool) -> None:
    inbox = Inbox(Turns())
    for i in range(1000):
        output = replica_pb2.RequestOutput(token_ids=range(10 * i, 10 * i + 10), text=f"{i},")
        for token_id in output.token_ids if has_logprobs else ():
            output.logprobs.add(chosen=inference_pb2.Logprob(token_id=token_id))
        inbox.add(output)
    inbox.add(replica_pb2.RequestOutput(finished=replica_pb2.RequestFinished()))
    parts = [await inbox.take() for _ in range(40 if has_logprobs else 3)]
    assert [len(part.token_ids) for part in parts] == ([250] * 40 if has_logprobs else [4090, 4090, 1820])
    assert [token_id for part in parts for token_id in part.token_ids] == list(range(10_000))
    for part in parts:
        assert [each.chosen.token_id for each in part.logprobs] == list(part.token_ids if has_logprobs else ())
        first, last = part.token_ids[0] // 10, part.token_ids[-1] // 10
        assert part.text == "".join(f"{i}," for i in range(first, last + 1)), "the text of these tokens"
    assert [part.ending is not None for part in parts] == [False] * (len(parts) - 1) + [True]


async def test_what_waits_for_a_reader_is_no_part_of_the_frame_that_brought_it() -> None:
    frame = replica_pb2.ConnectResponse()
    output = frame.outputs.add(token_ids=[7], text="a")
    output.logprobs.add(chosen=inference_pb2.Logprob(token_id=7))
    inbox = Inbox(Turns())
    inbox.add(output)
    output.logprobs[0].chosen.token_id = 8
    (logprobs,) = (await inbox.take()).logprobs
    assert logprobs.chosen.token_id == 7, "else the frame, with what came for others, stays in memory as long"


async def test_output_that_is_large_alone_is_taken_whole() -> None:
    inbox = Inbox(Turns())
    inbox.add(replica_pb2.RequestOutput(token_ids=range(5000), text="a"))
    inbox.add(replica_pb2.RequestOutput(text="b"))
    assert len((await inbox.take()).token_ids) == 5000
    assert (await inbox.take()).text == "b"


async def test_what_came_before_the_deadline_is_given_and_then_the_wait_ends() -> None:
    inbox = Inbox(Turns())
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.expire()
    with pytest.raises(TimeoutError):
        await waiting
    inbox.add(replica_pb2.RequestOutput(token_ids=[7]))
    assert (await inbox.take()).token_ids == (7,)
    with pytest.raises(TimeoutError):
        await inbox.take()


async def test_reader_that_waits_is_woken_and_one_that_left_does_no_harm() -> None:
    inbox = Inbox(Turns())
    leaving = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    staying = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert inbox.add(replica_pb2.RequestOutput(finished=replica_pb2.RequestFinished()))
    received = await staying
    assert isinstance(received.ending, replica_pb2.RequestFinished)


async def test_streams_that_break_in_a_row_open_the_breaker() -> None:
    async with FakeReplica("a") as replica:
        link = link_to(replica)
        running = asyncio.create_task(link.run())
        for number in range(1, 4):
            await until(lambda number=number: link.state is LinkState.READY and replica.num_connections == number)
            replica.break_streams()
            await until(lambda: link.state is not LinkState.READY)
        assert not link.breaker.is_closed
        running.cancel()
        await asyncio.wait((running,))


async def test_requests_that_fail_in_a_row_open_the_breaker_and_those_that_are_refused_do_not() -> None:
    async with FakeReplica("a") as replica:
        link = link_to(replica)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        bad, full = grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED
        for number, refusal in enumerate((bad, bad, None, bad, full, bad, bad)):
            assert link.takes_requests(0.0), "one that was served begins the row anew"
            replica.refusal = refusal
            submit = replica_pb2.Submit(
                request_id=str(number), prompt_token_ids=[1], sampling=inference_pb2.SamplingParams(max_tokens=1)
            )
            inbox = link.submit(submit, num_pending_tokens=1)
            while (await inbox.take()).ending is None:
                pass
            inbox.close()
        assert not link.takes_requests(0.0)
        running.cancel()
        await asyncio.wait((running,))


async def test_requests_that_wait_at_a_replica_are_load_as_those_that_run() -> None:
    async with FakeReplica("a") as replica:
        link = link_to(replica)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        load = replica_pb2.Load(num_running=2, num_waiting=3, num_pending_tokens=70)
        replica.streams[0].send(replica_pb2.ConnectResponse(load=load))
        await until(lambda: link.load.num_pending_tokens == 70)
        assert link.load.num_requests == 5
        running.cancel()
        await asyncio.wait((running,))


async def test_replica_that_says_nothing_to_the_greeting_is_dialled_again(caplog: pytest.LogCaptureFixture) -> None:
    class Mute(FakeReplica):
        async def Connect(  # noqa: N802
            self, request_iterator: AsyncIterator[replica_pb2.ConnectRequest], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[replica_pb2.ConnectResponse]:
            self.num_connections += 1
            await asyncio.Event().wait()
            yield replica_pb2.ConnectResponse()

    async with Mute("a") as replica:
        link = link_to(replica, connect_timeout_s=0.1)
        running = asyncio.create_task(link.run())
        await until(lambda: replica.num_connections == 2, 10)
        assert link.state is LinkState.CONNECTING
        assert "not connected: it did not answer within 0.1 s" in caplog.text
        running.cancel()
        await asyncio.wait((running,))


async def test_wait_before_a_dial_grows_with_each_failure_in_a_row_and_not_after_a_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[int] = []

    def next_wait_s(config: LinkConfig, num_failures: int, rng: random.Random) -> float:
        failures.append(num_failures)
        return 0.0

    monkeypatch.setattr(LinkConfig, "next_wait_s", next_wait_s)
    clock = FakeClock()
    async with FakeReplica("a") as replica:
        link = link_to(replica, clock=clock)
        running = asyncio.create_task(link.run())
        for stay_s in (0.0, 0.0, 1.0, 0.0):
            num_before = len(failures)
            await until(lambda: link.is_ready)
            clock.advance(stay_s)
            replica.break_streams()
            await until(lambda: len(failures) > num_before)  # noqa: B023 - awaited in this turn of the loop
        assert failures == [1, 2, 0, 1]
        running.cancel()
        await asyncio.wait((running,))


async def test_link_that_is_retired_between_two_dials_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []

    def next_wait_s(config: LinkConfig, num_failures: int, rng: random.Random) -> float:
        failures.append(num_failures)
        return 600.0

    monkeypatch.setattr(LinkConfig, "next_wait_s", next_wait_s)
    link = link_to(FakeReplica("a"), address="127.0.0.1:1")
    running = asyncio.create_task(link.run())
    await until(lambda: bool(failures))
    link.retire()
    async with asyncio.timeout(10):
        await running
    assert link.state is LinkState.CLOSED


async def test_retired_link_whose_stream_breaks_hands_its_requests_back_and_does_not_dial_again() -> None:
    async with FakeReplica("a", paused=True) as replica:
        link = link_to(replica)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        inbox = link.submit(replica_pb2.Submit(request_id="x", prompt_token_ids=[1]), num_pending_tokens=1)
        await until(lambda: replica.num_requests == 1)
        link.retire()
        replica.break_streams()
        async with asyncio.timeout(10):
            await running
            assert isinstance((await inbox.take()).ending, ReplicaLost)
        assert replica.num_connections == 1


async def test_requests_of_a_link_that_is_cancelled_are_handed_back() -> None:
    async with FakeReplica("a", paused=True) as replica:
        link = link_to(replica)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        inbox = link.submit(replica_pb2.Submit(request_id="x", prompt_token_ids=[1]), num_pending_tokens=1)
        running.cancel()
        async with asyncio.timeout(10):
            received = await inbox.take()
        assert received.ending == ReplicaLost(reason="the router closed the stream")
        assert link.load.num_requests == 0


async def test_each_frame_ends_the_silence_of_a_replica_that_works() -> None:
    clock = FakeClock()
    async with FakeReplica("a", paused=True) as replica:
        link = link_to(replica, clock=clock)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        sampling = inference_pb2.SamplingParams(max_tokens=3)
        submit = replica_pb2.Submit(request_id="x", prompt_token_ids=[1], sampling=sampling)
        inbox = link.submit(submit, num_pending_tokens=1)
        await until(lambda: replica.num_requests == 1)
        clock.advance(60.0)
        assert link._waited_in_silence_s == 60.0
        await replica.step()
        await inbox.take()
        assert link._waited_in_silence_s == 0.0
        running.cancel()
        await asyncio.wait((running,))


async def test_probe_that_is_aborted_leaves_its_place_to_the_next() -> None:
    clock = FakeClock()
    async with FakeReplica("a", paused=True) as replica:
        link = link_to(replica, clock=clock)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_ready)
        for _ in range(BreakerConfig().max_failures):
            link.breaker.fail(clock())
        clock.advance(BreakerConfig().open_s)
        link.submit(replica_pb2.Submit(request_id="x", prompt_token_ids=[1]), num_pending_tokens=1)
        assert not link.takes_requests(clock())
        link.abort("x")
        assert link.takes_requests(clock())
        running.cancel()
        await asyncio.wait((running,))
