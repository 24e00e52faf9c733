import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from helpers.cluster import FakeClock, FakeEngine
from weft.v1 import inference_pb2, replica_pb2
from weft.v1.replica_pb2_grpc import ReplicaStub

from cluster.replica_connection import OutboxLimits
from cluster.replica_server import ReplicaInfo, ReplicaServer
from workers.engine import EngineLoad
from workers.errors import EngineStoppedError, GroupFailedError, QueueFullError, RequestFailedError
from workers.request import Finish, FinishReason, RequestId, RequestOutput, TokenLogprobs, Usage

INFO = ReplicaInfo(
    replica_id="m-0.1",
    model="m",
    block_size=4,
    hash_key=b"key",
    max_context=64,
    vocab_size=100,
    num_blocks=64,
    max_num_seqs=8,
)
USAGE = Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=2, queue_s=0.1, prefill_s=0.2, decode_s=0.3)
DONE = Finish(reason=FinishReason.LENGTH, usage=USAGE)
BLOCK_A, BLOCK_B = b"a" * 16, b"b" * 16
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0))


class Router:
    """The other end: one stream."""

    def __init__(self, address: str, options: Sequence[tuple[str, int]] = ()) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self.call = ReplicaStub(self._channel).Connect()

    async def hello(self, *, version: int = 1) -> replica_pb2.ConnectResponse:
        await self.send(hello=replica_pb2.Hello(router_id="r", protocol_version=version))
        return await self.frame()

    async def send(
        self,
        *,
        hello: replica_pb2.Hello | None = None,
        submit: replica_pb2.Submit | None = None,
        abort: replica_pb2.Abort | None = None,
    ) -> None:
        await self.call.write(replica_pb2.ConnectRequest(hello=hello, submit=submit, abort=abort))

    async def frame(self) -> replica_pb2.ConnectResponse:
        frame = await asyncio.wait_for(self.call.read(), 120)
        assert isinstance(frame, replica_pb2.ConnectResponse), (await self.call.code(), await self.call.details())
        return frame

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


class Bench:
    """A server on a fake engine, and routers that are closed at the end."""

    def __init__(self, engine: FakeEngine, server: ReplicaServer, address: str) -> None:
        self.engine = engine
        self.server = server
        self.address = address
        self.routers: list[Router] = []

    def connect(self) -> Router:
        self.routers.append(Router(self.address))
        return self.routers[-1]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    engine = FakeEngine()
    server = ReplicaServer(INFO, engine, clock=FakeClock(1000.0))
    port = await server.start("127.0.0.1")
    bench = Bench(engine, server, f"127.0.0.1:{port}")
    yield bench
    for router in bench.routers:
        await router.close()
    await server.stop()


def submit(request_id: str = "x", **fields: object) -> replica_pb2.Submit:
    sampling = inference_pb2.SamplingParams(temperature=0.0, max_tokens=5, seed=7)
    return replica_pb2.Submit(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=sampling, **fields)  # type: ignore[arg-type]


async def start_request(bench: Bench, router: Router, request_id: str = "x") -> RequestId:
    """Submit, and return the engine's name for it."""
    number = len(bench.engine.submitted)
    await router.send(submit=submit(request_id))
    await bench.engine.wait_for(lambda: len(bench.engine.submitted) > number)
    return bench.engine.submitted[-1].request_id


async def test_stream_that_does_not_begin_with_a_hello_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    other = bench.connect()
    await other.send(abort=replica_pb2.Abort(request_id="x"))
    async with asyncio.timeout(30):
        assert await other.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        monkeypatch.setattr("cluster.replica_server._HELLO_TIMEOUT_S", 0.05)
        assert await bench.connect().call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_stream_begins_with_the_snapshot(bench: Bench) -> None:
    bench.engine.resident = [BLOCK_A, BLOCK_B]
    frame = await bench.connect().hello()
    assert frame.frame == 0
    assert frame.snapshot.block_hashes == BLOCK_A + BLOCK_B
    assert (frame.snapshot.replica_id, frame.snapshot.model, frame.snapshot.hash_key) == ("m-0.1", "m", b"key")
    assert (frame.snapshot.block_size, frame.snapshot.max_context, frame.snapshot.vocab_size) == (4, 64, 100)
    assert frame.load.num_free_blocks == 64


async def test_submit_reaches_the_engine_as_it_was_sent(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    await router.send(submit=submit(generated_token_ids=[9], priority=-2, cache_salt="s", timeout_s=5.0))
    await bench.engine.wait_for(lambda: bool(bench.engine.submitted))
    (request,) = bench.engine.submitted
    assert (request.prompt_token_ids, request.generated_token_ids) == ((1, 2, 3), (9,))
    assert (request.priority, request.cache_salt, request.deadline_s) == (-2, "s", 1005.0)
    assert (request.sampling.temperature, request.sampling.max_tokens, request.sampling.seed) == (0.0, 5, 7)


async def test_what_a_submit_leaves_open_is_open(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    await start_request(bench, router)
    no_limit = submit("y")
    no_limit.sampling.top_k = -1
    await router.send(submit=no_limit)
    await bench.engine.wait_for(lambda: len(bench.engine.submitted) == 2)
    assert [(request.deadline_s, request.sampling.top_k) for request in bench.engine.submitted] == [(None, 0)] * 2


async def test_step_gives_each_router_its_own_outputs_and_all_cache_events(bench: Bench) -> None:
    first, second = bench.connect(), bench.connect()
    await first.hello()
    await second.hello()
    id_1 = await start_request(bench, first)
    id_2 = await start_request(bench, second)  # the same id, from another router
    assert id_1 != id_2
    step = bench.engine.step(
        RequestOutput(request_id=id_1, token_ids=(5,), text="a"),
        RequestOutput(request_id=id_2, token_ids=(6,), text="b"),
        stored=[BLOCK_A, BLOCK_B],
        evicted=[BLOCK_A],
    )
    bench.server.on_step(step)
    for router, token_id in ((first, 5), (second, 6)):
        frame = await router.frame()
        assert frame.frame == 1
        assert [(output.request_id, list(output.token_ids)) for output in frame.outputs] == [("x", [token_id])]
        assert (frame.stored_block_hashes, frame.evicted_block_hashes) == (BLOCK_B, BLOCK_A)


async def test_late_router_sees_earlier_events_in_its_snapshot_only(bench: Bench) -> None:
    early, late = bench.connect(), bench.connect()
    await early.hello()
    bench.server.on_step(bench.engine.step(stored=[BLOCK_A]))
    snapshot = await late.hello()
    bench.server.on_step(bench.engine.step(stored=[BLOCK_B]))
    assert snapshot.snapshot.block_hashes == BLOCK_A
    assert (await late.frame()).stored_block_hashes == BLOCK_B
    assert [(await early.frame()).stored_block_hashes for _ in range(2)] == [BLOCK_A, BLOCK_B]


async def test_frames_are_numbered_without_a_gap(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    for number in range(1, 6):
        bench.server.on_step(bench.engine.step())
        assert (await router.frame()).frame == number


async def test_every_frame_has_what_came_since_the_one_before_and_says_how_busy_the_replica_is(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    engine_id = await start_request(bench, router)
    busy = {"num_running": 1, "num_waiting": 2, "num_free_blocks": 3, "num_blocks": 64, "num_pending_tokens": 5}
    bench.engine.load = EngineLoad(**busy)
    for token_id in (5, 6):
        bench.server.on_step(bench.engine.step(RequestOutput(request_id=engine_id, token_ids=(token_id,))))
        frame = await router.frame()
        assert [list(output.token_ids) for output in frame.outputs] == [[token_id]]
        assert frame.load == replica_pb2.Load(**busy)


async def test_last_output_tells_how_it_ended(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    engine_id = await start_request(bench, router)
    finish = Finish(reason=FinishReason.STOP, usage=USAGE, stop_string="END")
    logprobs = (TokenLogprobs(token_id=5, logprob=-0.5, top=((5, -0.5), (6, -1.5))),)
    output = RequestOutput(request_id=engine_id, token_ids=(5,), text="t", logprobs=logprobs, finish=finish)
    bench.server.on_step(bench.engine.step(output))
    (told,) = (await router.frame()).outputs
    assert told.finished.reason == inference_pb2.FINISH_REASON_STOP
    assert told.finished.stop_string == "END"
    assert (told.finished.usage.prompt_tokens, told.finished.usage.decode_s) == (3, 0.3)
    assert [(top.token_id, top.logprob) for top in told.logprobs[0].top] == [(5, -0.5), (6, -1.5)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFullError("9 wait; allowed: 8"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (EngineStoppedError("it takes no more"), grpc.StatusCode.UNAVAILABLE),
        (GroupFailedError("rank 1 died"), grpc.StatusCode.UNAVAILABLE),
        (RequestFailedError("NaN logits"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_failure_carries_its_code_and_message(bench: Bench, error: Exception, code: grpc.StatusCode) -> None:
    router = bench.connect()
    await router.hello()
    engine_id = await start_request(bench, router)
    bench.server.on_step(bench.engine.step(RequestOutput(request_id=engine_id, error=error)))
    (told,) = (await router.frame()).outputs
    assert (told.failed.code, told.failed.message) == (code.value[0], str(error))
    await start_request(bench, router)  # nothing of that id is in flight


async def test_bad_sampling_is_refused_and_others_go_on(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    bad = submit("bad")
    bad.sampling.temperature = -1.0
    await router.send(submit=bad)
    (told,) = (await router.frame()).outputs
    assert (told.request_id, told.failed.code) == ("bad", grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert told.failed.message.startswith("temperature is -1.0; allowed:")
    assert await start_request(bench, router, "good")
    assert await start_request(bench, router, "bad"), "of which nothing is in flight"


async def test_id_in_flight_is_refused_and_free_again_at_the_end(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    engine_id = await start_request(bench, router)
    await router.send(submit=submit())
    (told,) = (await router.frame()).outputs
    assert "request_id is 'x', which is in flight" in told.failed.message
    bench.server.on_step(bench.engine.step(RequestOutput(request_id=engine_id, finish=DONE)))
    assert (await router.frame()).outputs[0].HasField("finished")
    await start_request(bench, router)


async def test_abort_reaches_the_engine_and_nothing_more_is_sent(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    engine_id = await start_request(bench, router)
    await router.send(abort=replica_pb2.Abort(request_id="x"))
    await bench.engine.wait_for(lambda: bool(bench.engine.aborted))
    assert bench.engine.aborted == [engine_id]
    bench.server.on_step(bench.engine.step(RequestOutput(request_id=engine_id, token_ids=(5,))))
    assert not (await router.frame()).outputs


async def test_abort_of_a_request_that_has_ended_meanwhile_does_no_harm(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    engine_id = await start_request(bench, router)
    bench.server.on_step(bench.engine.step(RequestOutput(request_id=engine_id, finish=DONE)))
    await router.send(abort=replica_pb2.Abort(request_id="x"))
    await start_request(bench, router, "y")
    assert not bench.engine.aborted


async def test_late_end_of_an_aborted_request_is_not_that_of_the_next_one_with_its_id(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    aborted = await start_request(bench, router)
    await router.send(abort=replica_pb2.Abort(request_id="x"))
    again = await start_request(bench, router)
    abort = Finish(reason=FinishReason.ABORT, usage=USAGE)
    bench.server.on_step(bench.engine.step(RequestOutput(request_id=aborted, finish=abort)))
    bench.server.on_step(bench.engine.step(RequestOutput(request_id=again, token_ids=(5,))))
    assert not (await router.frame()).outputs
    (output,) = (await router.frame()).outputs
    assert (output.request_id, list(output.token_ids)) == ("x", [5])


async def test_broken_stream_aborts_all_of_its_requests(bench: Bench) -> None:
    router, other = bench.connect(), bench.connect()
    await router.hello()
    await other.hello()
    ids = [await start_request(bench, router, name) for name in ("x", "y")]
    kept = await start_request(bench, other)
    await router.close()
    await bench.engine.wait_for(lambda: len(bench.engine.aborted) == 2)
    assert sorted(bench.engine.aborted) == sorted(ids)
    bench.server.on_step(bench.engine.step(RequestOutput(request_id=kept, token_ids=(5,))))
    assert len((await other.frame()).outputs) == 1


async def test_stop_ends_streams_though_they_have_requests(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    request_id = await start_request(bench, router)
    await bench.server.stop()
    async with asyncio.timeout(30):
        assert await router.call.code() is grpc.StatusCode.UNAVAILABLE
        await bench.engine.wait_for(lambda: request_id in bench.engine.aborted)


async def test_replica_that_never_listened_is_stopped() -> None:
    await ReplicaServer(INFO, FakeEngine()).stop()


async def test_drain_refuses_new_requests_says_so_and_waits_for_the_old(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    engine_id = await start_request(bench, router)
    drained = asyncio.create_task(bench.server.drain())
    assert (await router.frame()).load.draining
    await router.send(submit=submit("late"))
    (told,) = (await router.frame()).outputs
    assert (told.request_id, told.failed.code) == ("late", grpc.StatusCode.UNAVAILABLE.value[0])
    assert not drained.done()
    bench.server.on_step(bench.engine.step(RequestOutput(request_id=engine_id, finish=DONE)))
    await asyncio.wait_for(drained, 120)


async def test_replica_without_requests_is_drained_at_once(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    async with asyncio.timeout(120):
        await bench.server.drain()


async def test_drain_waits_for_a_request_that_no_step_has_met_yet(bench: Bench) -> None:
    router = bench.connect()
    await router.hello()
    bench.server.on_step(bench.engine.step())  # nothing was to be done
    await start_request(bench, router)
    drained = asyncio.create_task(bench.server.drain())
    assert [(await router.frame()).load.draining for _ in range(2)] == [False, True]
    assert not drained.done()
    await router.close()
    await asyncio.wait_for(drained, 120)


async def test_drain_waits_until_a_router_that_is_behind_has_the_last_answer(bench: Bench) -> None:
    router = Router(bench.address, SMALL_WINDOW)
    bench.routers.append(router)
    await router.hello()
    engine_id = await start_request(bench, router)
    drained = asyncio.create_task(bench.server.drain())
    assert (await router.frame()).load.draining
    bench.server.on_step(bench.engine.step(stored=[number.to_bytes(16) for number in range(100_000)]))
    bench.server.on_step(bench.engine.step(RequestOutput(request_id=engine_id, finish=DONE)))
    await asyncio.wait([drained], timeout=0.05)
    assert not drained.done()
    told = [await router.frame()]
    while not told[-1].outputs:  # one frame or two, by whether the one before had been written
        told.append(await router.frame())
    assert sum(len(frame.stored_block_hashes) for frame in told) == 16 * 100_000
    assert told[-1].outputs[0].HasField("finished")
    await asyncio.wait_for(drained, 120)


async def test_drain_waits_for_no_router_that_has_gone(bench: Bench) -> None:
    router = Router(bench.address, SMALL_WINDOW)
    await router.hello()
    bench.server.on_step(bench.engine.step(stored=[number.to_bytes(16) for number in range(100_000)]))
    drained = asyncio.create_task(bench.server.drain())
    await asyncio.wait([drained], timeout=0.05)
    assert not drained.done()
    await router.close()
    await asyncio.wait_for(drained, 120)


@pytest.mark.parametrize(
    ("limits", "step_s"),
    [(OutboxLimits(max_bytes=1 << 20, max_age_s=1000.0), 1.0), (OutboxLimits(max_age_s=5.0), 0.1)],
)
async def test_router_that_does_not_read_is_cut_off(limits: OutboxLimits, step_s: float) -> None:
    engine, clock = FakeEngine(), FakeClock()
    server = ReplicaServer(INFO, engine, limits=limits, clock=clock)
    port = await server.start("127.0.0.1")
    router = Router(f"127.0.0.1:{port}")
    await router.hello()
    await router.send(submit=submit())
    await engine.wait_for(lambda: bool(engine.submitted))
    big = [number.to_bytes(16) for number in range(20_000)]
    for _ in range(150):  # more than the connection's own buffers hold, less than the other limit
        server.on_step(engine.step(stored=big))
        engine.resident.clear()
        clock.advance(step_s)
        await asyncio.sleep(0)
        if engine.aborted:
            break
    await engine.wait_for(lambda: bool(engine.aborted))
    assert engine.aborted == [engine.submitted[0].request_id]
    await router.close()
    await server.stop()


async def test_router_that_is_cut_off_while_its_snapshot_is_written_is_told_behind_it() -> None:
    engine, clock = FakeEngine(), FakeClock()
    engine.resident = [number.to_bytes(16) for number in range(100_000)]  # more than the window below
    server = ReplicaServer(INFO, engine, limits=OutboxLimits(max_age_s=5.0), clock=clock)
    port = await server.start("127.0.0.1")
    router = Router(f"127.0.0.1:{port}", SMALL_WINDOW)
    await router.send(hello=replica_pb2.Hello(router_id="r", protocol_version=1))
    await router.send(submit=submit())
    await engine.wait_for(lambda: bool(engine.submitted))
    clock.advance(6.0)
    server.on_step(engine.step())
    await engine.wait_for(lambda: bool(engine.aborted))
    assert len((await router.frame()).snapshot.block_hashes) == 16 * 100_000
    assert await asyncio.wait_for(router.call.code(), 120) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await router.call.details() == "the router did not read its frames for too long"
    await router.close()
    await server.stop()


@pytest.mark.parametrize(("version", "code"), [(1, None), (0, grpc.StatusCode.FAILED_PRECONDITION)])
async def test_router_of_a_protocol_too_old_is_refused(
    bench: Bench, version: int, code: grpc.StatusCode | None
) -> None:
    router = bench.connect()
    await router.send(hello=replica_pb2.Hello(router_id="r", protocol_version=version))
    if code is None:
        assert (await router.frame()).HasField("snapshot")
    else:
        assert await asyncio.wait_for(router.call.code(), 120) is code
        assert await router.call.details() == "the router's protocol_version is 0; allowed: 1 or newer"


async def test_stream_without_a_hello_is_refused(bench: Bench) -> None:
    router = bench.connect()
    await router.send(submit=submit())
    assert await asyncio.wait_for(router.call.code(), 120) is grpc.StatusCode.INVALID_ARGUMENT
    assert not bench.engine.submitted
