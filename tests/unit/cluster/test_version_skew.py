"""Parts of different versions: what the last release said, sent to this program; what the next one may say as well.

Messages of a release are made from its descriptors in proto/released, so no stub of today helps them.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from helpers.fake_model import run_alone
from helpers.fake_replica import FakeReplica, expected_tokens
from helpers.fixed_control import fixed_control
from helpers.polling import until
from helpers.router_harness import prompt_ids, router_config, running_router, text_request
from helpers.traces import gated_replica
from weft import protocol
from weft.v1 import inference_pb2, replica_pb2
from weft.v1.replica_pb2_grpc import ReplicaStub

from router.client import AsyncClient
from router.spans import NO_TRACER
from workers.request import Request, RequestId, SamplingParams

RELEASES = sorted((Path(__file__).resolve().parents[3] / "proto/released").glob("*.binpb"))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
UNKNOWN_FIELD = b"\xfa\x3e\x03new"  # number 1007, three bytes


class Release:
    """The messages and methods of an earlier version of the program."""

    def __init__(self, path: Path) -> None:
        self._pool = DescriptorPool()
        for file in FileDescriptorSet.FromString(path.read_bytes()).file:
            self._pool.Add(file)

    def message(self, name: str) -> type[Message]:
        return GetMessageClass(self._pool.FindMessageTypeByName(f"weft.v1.{name}"))

    def make(self, name: str, **fields: Any) -> Any:
        return self.message(name)(**fields)

    def method(self, kind: Callable[..., Any], path: str, response: str) -> Any:
        """Return what calls a method; `kind` is one of a channel's."""
        return kind(
            path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.message(response).FromString,
        )


@pytest.fixture(params=RELEASES, ids=lambda path: path.stem)
def release(request: pytest.FixtureRequest) -> Release:
    return Release(request.param)


def alone(max_tokens: int) -> list[int]:
    """What the fake model generates for the prompt."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return run_alone(Request(request_id=RequestId("x"), prompt_token_ids=tuple(PROMPT), sampling=sampling))


async def frames(call: Any) -> AsyncIterator[Any]:
    """Yield what comes, each within a time, and check that no frame is missing."""
    number = 0
    while True:
        frame = await asyncio.wait_for(call.read(), 10)
        assert frame is not grpc.aio.EOF, (await call.code(), await call.details())
        assert frame.frame == number
        yield frame
        number += 1


async def outputs(stream: AsyncIterator[Any], request_id: str) -> tuple[list[int], Any, Any]:
    """Return the tokens of a request, its last output, and the load of then."""
    token_ids: list[int] = []
    async for frame in stream:
        for output in frame.outputs:
            assert output.request_id == request_id
            token_ids += output.token_ids
            if output.HasField("finished") or output.HasField("failed"):
                return token_ids, output, frame.load
    raise AssertionError("unreachable")


async def test_replica_serves_a_router_of_an_earlier_release(release: Release) -> None:
    async with gated_replica("a", NO_TRACER) as a, grpc.aio.insecure_channel(a.address) as channel:
        call = release.method(channel.stream_stream, "/weft.v1.Replica/Connect", "ConnectResponse")()

        async def send(**message: Any) -> None:
            await call.write(release.make("ConnectRequest", **message))

        await send(hello=release.make("Hello", router_id="old", protocol_version=1))
        stream = frames(call)
        first = await anext(stream)
        snapshot = first.snapshot
        assert (snapshot.replica_id, snapshot.model, snapshot.protocol_version) == ("a", "tiny", 1)
        assert (snapshot.block_size, snapshot.block_hashes, first.load.num_running) == (4, b"", 0)

        def submit(request_id: str, max_tokens: int) -> Any:
            sampling = release.make("SamplingParams", temperature=0.0, max_tokens=max_tokens, seed=7)
            return release.make("Submit", request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling)

        await send(submit=submit("given up", 150))
        a.step(1)
        running = await anext(stream)
        assert list(running.outputs[0].token_ids) == alone(1)
        assert running.load.num_running == 1
        await send(abort=release.make("Abort", request_id="given up"))
        a.step()

        await send(submit=submit("served", 6))
        kept = (frame async for frame in stream if not any(each.request_id == "given up" for each in frame.outputs))
        token_ids, last, load = await outputs(kept, "served")
        assert token_ids == alone(6)
        assert last.finished.reason == inference_pb2.FINISH_REASON_LENGTH
        assert load.num_running == 0, "what was given up goes on"
        assert (last.finished.usage.prompt_tokens, last.finished.usage.completion_tokens) == (len(PROMPT), 6)
        call.cancel()


async def test_controller_tells_a_router_of_an_earlier_release(release: Release) -> None:
    async with fixed_control({"a": "127.0.0.1:1"}) as control, grpc.aio.insecure_channel(control) as channel:
        watch = release.method(channel.unary_stream, "/weft.v1.Control/WatchReplicas", "WatchReplicasResponse")
        call = watch(release.make("WatchReplicasRequest", router_id="old"))
        membership = await asyncio.wait_for(call.read(), 10)
        assert [(model.name, model.path, model.max_context) for model in membership.models] == [("tiny", "/tiny", 200)]
        (replica,) = membership.replicas
        assert (replica.replica_id, replica.model, replica.address) == ("a", "tiny", "127.0.0.1:1")
        status = release.method(channel.unary_unary, "/weft.v1.Control/GetStatus", "GetStatusResponse")
        told = await status(release.make("GetStatusRequest"), timeout=10)
        assert [group.group_id for group in told.models[0].groups] == ["a"]


def with_news(message: Message) -> Any:
    """Return a message with a field that this version does not know."""
    message.MergeFromString(UNKNOWN_FIELD)
    return message


async def test_replica_serves_a_router_of_a_later_release() -> None:
    async with gated_replica("a", NO_TRACER) as a, grpc.aio.insecure_channel(a.address) as channel:
        a.step()
        call = ReplicaStub(channel).Connect()
        hello = with_news(replica_pb2.Hello(router_id="new", protocol_version=protocol.VERSION + 1))
        await call.write(with_news(replica_pb2.ConnectRequest(hello=hello)))
        stream = frames(call)
        assert (await anext(stream)).snapshot.protocol_version == protocol.VERSION
        await call.write(with_news(replica_pb2.ConnectRequest()))  # a kind of message that does not exist yet
        sampling = with_news(inference_pb2.SamplingParams(temperature=0.0, max_tokens=6))
        submit = with_news(replica_pb2.Submit(request_id="x", prompt_token_ids=PROMPT, sampling=sampling))
        await call.write(replica_pb2.ConnectRequest(submit=submit))
        token_ids, last, _ = await outputs(stream, "x")
        assert (token_ids, last.HasField("finished")) == (alone(6), True)
        call.cancel()


async def test_router_is_served_by_a_replica_of_a_later_release() -> None:
    async with FakeReplica("a", paused=True) as a, running_router(router_config(a.address, http_port=0)) as router:
        a.finish_reason = 99  # type: ignore[assignment]
        await router.wait_ready(1)
        a.streams[0].send(with_news(replica_pb2.ConnectResponse(load=with_news(a.load()))))
        a.resume()
        answer = await router.generate(text_request("hi", max_tokens=4))
        assert answer.token_ids == expected_tokens(prompt_ids("hi"), 1, 4)
        async with AsyncClient(router.addresses.grpc) as client:
            assert (await client.complete("hi", max_tokens=2)).finish_reason == "stop"
        body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}).encode()
        asked = HttpRequest(
            f"http://{router.addresses.http}/v1/completions", body, {"content-type": "application/json"}
        )
        told = json.loads(await asyncio.to_thread(lambda: urlopen(asked, timeout=10).read()))
        assert told["choices"][0]["finish_reason"] == "stop"


async def test_router_says_why_it_takes_no_replica_of_another_protocol(caplog: pytest.LogCaptureFixture) -> None:
    a = FakeReplica("a")
    a.protocol_version = protocol.VERSION + 1
    with caplog.at_level(logging.WARNING, "router.replica"):
        async with a, running_router(router_config(a.address)):
            await until(lambda: a.num_connections > 2)
    told = [record.getMessage() for record in caplog.records if "not connected" in record.getMessage()]
    seen, allowed = protocol.VERSION + 1, f"{protocol.OLDEST} to {protocol.VERSION}"
    assert told == [
        f"replica {a.address}: not connected: the replica speaks protocol version {seen}; allowed: {allowed}"
    ]


def test_stream_has_the_newest_version_that_both_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "VERSION", 5)
    monkeypatch.setattr(protocol, "OLDEST", 4)
    assert [protocol.agree(version) for version in (3, 4, 5, 6)] == [None, 4, 5, 5]
