"""What one router carries: the parts that can be wrong without anybody's seeing it."""

import argparse
import re
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import chain

import pytest

from bench.errors import BenchError
from bench.router_load.__main__ import _PORTS, _measure, _router
from bench.router_load.replicas import StandIn
from bench.router_load.streams import GrpcStreams, HttpStreams, Streams
from workers.request import Request, RequestId, SamplingParams


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, tuple[str, int]]]:
    with _router(1, step_ms=5.0, running=8) as (_, said):
        found = {front: re.search(pattern, said, re.MULTILINE) for front, pattern in _PORTS.items()}
        yield {front: (match[1], int(match[2])) for front, match in found.items() if match is not None}


def connect(front: str, addresses: dict[str, tuple[str, int]]) -> Streams:
    return GrpcStreams(*addresses[front]) if front == "grpc" else HttpStreams(*addresses[front])


@pytest.mark.parametrize("front", _PORTS)
def test_each_stream_gets_its_tokens_and_the_moment_of_each(front: str, addresses: dict[str, tuple[str, int]]) -> None:
    begin_s = time.monotonic()
    with closing(connect(front, addresses)) as streams:
        wanted = {streams.start(max_tokens): max_tokens for max_tokens in (1, 3, 40)}
        stamps: dict[int, list[float]] = {stream: [] for stream in wanted}
        while any(len(stamps[stream]) < number for stream, number in wanted.items()):
            assert time.monotonic() < begin_s + 120
            for message in streams.receive(0.1):
                stamps[message.stream] += [float(stamp) for stamp in message.text.split()]
    for stream, number in wanted.items():
        assert len(stamps[stream]) == number
        assert stamps[stream] == sorted(set(stamps[stream]))
        assert begin_s < stamps[stream][0]
        assert stamps[stream][-1] < time.monotonic()


@pytest.mark.parametrize("front", _PORTS)
def test_a_request_that_is_refused_ends_the_measurement(front: str, addresses: dict[str, tuple[str, int]]) -> None:
    with closing(connect(front, addresses)) as streams:
        streams.start(1 << 21)  # more than the context
        with pytest.raises(BenchError, match="has refused a request"):
            list(chain.from_iterable(streams.receive(1.0) for _ in range(120)))


def test_a_stand_in_gives_each_request_one_token_a_step_until_it_has_all() -> None:
    engine = StandIn()
    assert engine.step() is None
    for name, max_tokens in (("x", 2), ("y", 9)):
        sampling = SamplingParams(max_tokens=max_tokens)
        engine.submit(Request(request_id=RequestId(name), prompt_token_ids=(1, 2), sampling=sampling))
    first, second = engine.step(), engine.step()
    assert first is not None
    assert second is not None
    assert [(output.request_id, output.finish) for output in first.outputs] == [("x", None), ("y", None)]
    finish = second.outputs[0].finish
    assert finish is not None
    assert finish.usage.completion_tokens == 2
    assert engine.snapshot().load.num_running == 1
    engine.abort(RequestId("y"))
    assert engine.step() is None


def test_a_row_tells_what_the_router_gave() -> None:
    row = _measure(3, argparse.Namespace(front="grpc", step=5.0, seconds=1))
    assert (row.running, row.replicas) == (3, 1)
    assert 0 < row.messages_per_s <= row.tokens_per_s <= 3 * 200 * 1.1 + 10  # and a request ten times a second
    assert 0 < row.cores < 2
    for p50, p99 in (row.ttft_ms, row.late_ms):
        assert 0 < p50 <= p99
