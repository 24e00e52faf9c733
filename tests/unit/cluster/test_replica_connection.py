"""When what steps give is put into a frame."""

import asyncio

import pytest
from weft.v1 import replica_pb2

from cluster.replica_connection import OutboxLimits, RouterConnection
from cluster.replica_wire import write_output
from tests.helpers.cluster import FakeClock
from workers.request import Finish, FinishReason, RequestId, RequestOutput, TokenLogprobs, Usage

INTERVAL_S = 0.02
BLOCK_A, BLOCK_B = b"a" * 16, b"b" * 16


class Stream:
    """A connection, and all frames that it has given."""

    def __init__(self, interval_s: float = INTERVAL_S, limits: OutboxLimits | None = None) -> None:
        self.clock = FakeClock()
        self.connection = RouterConnection(
            1, "r", limits=limits or OutboxLimits(), clock=self.clock, stream_interval_s=interval_s
        )
        self._frames = self.connection.frames()

    def open(self, name: str) -> RequestId:
        engine_id = self.connection.open_request(name)
        assert engine_id is not None
        return engine_id

    def step(
        self,
        *tokens: tuple[RequestId, int],
        last: frozenset[RequestId] = frozenset(),
        stored: tuple[bytes, ...] = (),
        evicted: tuple[bytes, ...] = (),
        num_running: int = 1,
    ) -> None:
        for engine_id, token_id in tokens:
            output = self.connection.output_of(engine_id)
            assert output is not None
            output.token_ids.append(token_id)
            if engine_id in last:
                self.connection.end_request(engine_id)
        self.connection.end_step(stored, evicted, replica_pb2.Load(num_running=num_running))

    async def frame(self) -> replica_pb2.ConnectResponse:
        return await asyncio.wait_for(anext(self._frames), 120)

    async def tokens(self) -> list[tuple[str, list[int]]]:
        return [(output.request_id, list(output.token_ids)) for output in (await self.frame()).outputs]

    async def is_silent(self) -> bool:
        task = asyncio.ensure_future(anext(self._frames))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        is_silent = not task.done()
        task.cancel()
        self._frames = self.connection.frames()  # cancelled, the other one has ended
        return is_silent


async def test_without_an_interval_each_step_has_a_frame() -> None:
    stream = Stream(interval_s=0.0)
    x = stream.open("x")
    for token_id in (5, 6, 7):
        stream.step((x, token_id))
        assert await stream.tokens() == [("x", [token_id])]


async def test_while_a_frame_waits_to_be_read_the_next_steps_become_one() -> None:
    stream = Stream(interval_s=0.0)
    x, y = stream.open("x"), stream.open("y")
    stream.step((x, 1), num_running=1)
    stream.step((x, 2), (y, 1), stored=(BLOCK_A,), num_running=2)
    stream.step((y, 2), (x, 3), stored=(BLOCK_B,), evicted=(BLOCK_A,), last=frozenset({y}), num_running=3)
    assert await stream.tokens() == [("x", [1])]
    frame = await stream.frame()
    assert [(output.request_id, list(output.token_ids)) for output in frame.outputs] == [("x", [2, 3]), ("y", [1, 2])]
    assert (frame.frame, frame.load.num_running) == (1, 3)
    assert (frame.stored_block_hashes, frame.evicted_block_hashes) == (BLOCK_B, BLOCK_A)
    assert await stream.is_silent()


async def test_merged_outputs_say_all_that_each_said() -> None:
    stream = Stream(interval_s=0.0)
    x = stream.open("x")
    stream.step((x, 1))
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=4, queue_s=0.0, prefill_s=0.0, decode_s=0.0)
    for token_id, text in ((2, "Hé"), (3, ""), (4, "llo")):
        logprobs = (TokenLogprobs(token_id=token_id, logprob=-1.0),)
        finish = Finish(reason=FinishReason.LENGTH, usage=usage) if token_id == 4 else None
        message = stream.connection.output_of(x)
        assert message is not None
        write_output(
            RequestOutput(request_id=x, token_ids=(token_id,), text=text, logprobs=logprobs, finish=finish), message
        )
        stream.connection.end_step((), (), replica_pb2.Load())
    await stream.frame()
    (merged,) = (await stream.frame()).outputs
    assert (merged.request_id, list(merged.token_ids), merged.text) == ("x", [2, 3, 4], "Héllo")
    assert [logprobs.chosen.token_id for logprobs in merged.logprobs] == [2, 3, 4]
    assert merged.finished.usage.completion_tokens == 4


async def test_request_that_was_aborted_keeps_what_came_and_is_given_nothing_more() -> None:
    stream = Stream(interval_s=0.0)
    x = stream.open("x")
    stream.step((x, 1))
    stream.step((x, 2))  # waits for the frame before it
    stream.connection.close_request(x)
    assert stream.connection.output_of(x) is None
    again = stream.open("x")
    stream.step((again, 7))
    assert await stream.tokens() == [("x", [1])]
    assert await stream.tokens() == [("x", [2]), ("x", [7])]


async def test_nothing_is_kept_of_a_request_that_was_aborted_before_its_first_token() -> None:
    stream = Stream()
    stream.connection.close_request(stream.open("x"))
    assert not stream.connection._silent
    assert not stream.connection.engine_ids


async def test_what_waits_for_a_router_that_does_not_read_counts_against_its_limits() -> None:
    stream = Stream(interval_s=0.0, limits=OutboxLimits(max_bytes=2_000))
    x = stream.open("x")
    for token_id in range(200_000, 200_600):  # of 3 bytes each, a frame each second
        assert not stream.connection.cut_off.is_set()
        stream.step((x, token_id))
        stream.clock.advance(0.01)
    for token_id in range(200_600, 200_800):
        stream.step((x, token_id))
        stream.clock.advance(0.01)
    assert stream.connection.cut_off.is_set()


async def test_steps_within_the_interval_go_into_one_frame_with_the_step_after_it() -> None:
    stream = Stream()
    x, y = stream.open("x"), stream.open("y")
    stream.step((x, 1), (y, 1))
    assert await stream.tokens() == [("x", [1]), ("y", [1])]
    for token_id, passed_s in ((2, 0.008), (3, 0.008), (4, 0.008)):
        stream.clock.advance(passed_s)
        stream.step((x, token_id), (y, token_id), num_running=token_id)
    frame = await stream.frame()
    outputs = [(output.request_id, list(output.token_ids)) for output in frame.outputs]
    assert outputs == [("x", [2, 3, 4]), ("y", [2, 3, 4])]
    assert (frame.frame, frame.load.num_running) == (1, 4)


async def test_first_and_last_output_of_a_request_wait_for_nothing() -> None:
    stream = Stream()
    x = stream.open("x")
    stream.step((x, 1))
    assert await stream.tokens() == [("x", [1])]
    stream.step((x, 2))
    assert await stream.is_silent()
    y = stream.open("y")
    stream.step((x, 3), (y, 1))  # the first of y
    assert await stream.tokens() == [("x", [2, 3]), ("y", [1])]
    stream.step((x, 4), (y, 2))
    assert await stream.is_silent()
    stream.step((x, 5), last=frozenset({x}))
    assert await stream.tokens() == [("x", [4, 5]), ("y", [2])]


async def test_a_slow_step_holds_nothing_up() -> None:
    stream = Stream()
    x = stream.open("x")
    stream.step((x, 1))
    await stream.frame()
    stream.step((x, 2))
    assert await stream.tokens() == [("x", [2])]  # by the timer: the clock stands still


@pytest.mark.parametrize(
    ("events", "stored", "evicted"),
    [
        ([((BLOCK_A,), ()), ((BLOCK_B,), ())], BLOCK_A + BLOCK_B, b""),
        ([((BLOCK_A,), ()), ((), (BLOCK_A,))], b"", BLOCK_A),
        ([((), (BLOCK_A,)), ((BLOCK_A,), ())], BLOCK_A, b""),  # read stored first, evicted then, it would be gone
        ([((BLOCK_A,), (BLOCK_A,))], b"", BLOCK_A),
    ],
)
async def test_of_a_block_what_happened_last_counts(
    events: list[tuple[tuple[bytes, ...], tuple[bytes, ...]]], stored: bytes, evicted: bytes
) -> None:
    stream = Stream()
    for was_stored, was_evicted in events:
        stream.step(stored=was_stored, evicted=was_evicted)
    frame = await stream.frame()
    assert (frame.stored_block_hashes, frame.evicted_block_hashes) == (stored, evicted)


async def test_what_is_sent_at_once_comes_after_the_steps_before_it() -> None:
    stream = Stream()
    x = stream.open("x")
    stream.step((x, 1))
    stream.step((x, 2), num_running=3)
    stream.connection.send(load=replica_pb2.Load(draining=True))
    frames = [await stream.frame() for _ in range(3)]
    assert [frame.frame for frame in frames] == [0, 1, 2]
    assert [frame.load.draining for frame in frames] == [False, False, True]


async def test_a_stream_that_has_ended_sends_nothing_more() -> None:
    stream = Stream(interval_s=0.001)
    x = stream.open("x")
    stream.step((x, 1))
    await stream.frame()
    stream.step((x, 2))
    stream.connection.close()
    await asyncio.sleep(0.01)
    assert await stream.is_silent()
