"""One HTTP connection: clients that send too much, too slowly or never, and clients that would rather speak HTTP/2."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from helpers.fake_replica import FakeReplica
from helpers.router_harness import router_config, running_router
from uvicorn.server import ServerState

from router import http_protocol
from router.config import ClientConfig
from router.http_protocol import bounded_protocol

BODY = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)
CHUNKED_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

Address = tuple[str, int]


@asynccontextmanager
async def listening(replica: FakeReplica, **limits: float) -> AsyncIterator[Address]:
    config = router_config(replica.address, http_port=0, clients=ClientConfig(**limits))
    async with running_router(config) as router:
        await router.wait_ready(1)
        host, _, port = (router.addresses.http or "").rpartition(":")
        yield host, int(port)


@pytest.fixture
async def address() -> AsyncIterator[Address]:
    async with FakeReplica("a") as a, listening(a) as bound:
        yield bound


async def talk(address: Address, *parts: bytes) -> bytes:
    """Send the parts, each as the server has taken the one before, and return all that comes until the end."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "headers", [b"Content-Length: 99999999999", b"Content-Length: 9999999\r\nExpect: 100-continue"]
)
async def test_body_that_is_announced_as_too_long_is_not_waited_for(address: Address, headers: bytes) -> None:
    """A client that asks first has sent nothing, and one that sends so much could not send it to the end."""
    answer = await talk(address, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % headers)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"larger than" in answer


@pytest.mark.parametrize("first", ["nothing", "completions"])
async def test_connection_ends_where_a_body_was_announced_and_not_asked_for(address: Address, first: str) -> None:
    """Else the client's next request would be taken for that body."""
    head = HEAD.replace(b"completions", first.encode()).replace(b"Host: x", b"Host: x\r\nExpect: 100-continue")
    answer = await talk(address, head.replace(b"Host: x", b"Host: x\r\nX-Request-Timeout: soon"))
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))
    assert b"connection: close" in answer
    with_body = await talk(address, head + BODY + LAST)
    assert with_body.endswith(b'{"status":"ok"}'), "a body that has come is no matter"


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("cut", [0, 5])
async def test_request_that_offers_an_upgrade_is_served_as_it_is(address: Address, framing: str, cut: int) -> None:
    if framing == "length":
        header, body = b"Content-Length: %d\r\n" % len(BODY), BODY
    else:
        header, body = b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + UPGRADE + header + b"\r\n"

    answer = await talk(address, head + body[:cut], body[cut:] + LAST)

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"text_completion"' in answer
    assert answer.endswith(b'{"status":"ok"}'), "the connection goes on in HTTP/1.1"


async def test_request_without_body_that_offers_an_upgrade_is_served(address: Address) -> None:
    answer = await talk(address, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n" + LAST)

    assert answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_client_of_http_1_0_gets_no_chunks(address: Address, stream: bool) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 3, "stream": stream}).encode()
    answer = await talk(
        address,
        b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
    )

    head, _, text = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"chunked" not in head
    assert b"connection: close" in head
    if stream:
        assert text.startswith(b"data: {")
        assert text.endswith(b"data: [DONE]\n\n")
    else:
        assert b"content-length: %d" % len(text) in head


async def test_many_requests_at_once_that_offer_an_upgrade_are_served(address: Address) -> None:
    answer = await talk(address, (b"GET /health HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n") * 1000 + LAST)

    assert answer.count(b"HTTP/1.1 200 OK") == 1001


@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\nX: ",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
    ],
    ids=["headers", "header", "trailers"],
)
async def test_head_without_end_is_cut_off(address: Address, start: bytes) -> None:
    line = b"a" * 1000 if start.endswith(b"X: ") else b"X: " + b"a" * 1000 + b"\r\n"
    with pytest.raises(ConnectionError):
        await talk(address, start, *[line * 100] * 600)
    assert (await talk(address, LAST)).endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("start", [b"", b"GET /health HT", LAST.replace(b"close", b"keep-alive") + b"GET /hea"])
async def test_head_that_never_comes_ends_the_connection(start: bytes) -> None:
    async with FakeReplica("a") as a, listening(a, head_timeout_s=0.05) as address:
        answer = await talk(address, start)

    assert answer.count(b"HTTP/1.1 200 OK") == (1 if len(start) > 20 else 0)


@pytest.mark.parametrize("more", [b"", b"\r\n"], ids=["nothing", "an empty line"])
async def test_connection_on_which_nothing_follows_is_closed(more: bytes) -> None:
    async with FakeReplica("a") as a, listening(a, keep_alive_s=0.05) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(LAST.replace(b"Connection: close\r\n", b""))
        assert (await reader.readuntil(b'ok"}')).startswith(b"HTTP/1.1 200 ")
        writer.write(more)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


def test_connection_outlives_those_who_keep_it_for_later() -> None:
    assert ClientConfig().keep_alive_s > 60, "of many load balancers; `openai` and httpx keep one for 5 s"


@pytest.mark.parametrize(
    "parts",
    [(HEAD + BODY[:5],), (HEAD, BODY[:5]), (CHUNKED_HEAD, b"5\r\n" + BODY[:5] + b"\r\n")],
    ids=["with the head", "length", "chunked"],
)
async def test_body_that_never_ends_is_refused_and_its_connection_closed(parts: tuple[bytes, ...]) -> None:
    async with FakeReplica("a") as a, listening(a, body_timeout_s=0.05) as address:
        answer = await talk(address, *parts)

    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"] == "The request's body did not come within 0.05 s."
    assert error["type"] == "invalid_request_error"


async def test_bytes_that_are_no_http_are_refused_in_the_form_of_all_errors(address: Address) -> None:
    head, _, body = (await talk(address, b"GET / HTTP/3.0\r\n\r\n")).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/json" in head
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["error"]["message"] == "Invalid HTTP request received."


async def test_body_that_nobody_reads_keeps_no_connection_open() -> None:
    async with FakeReplica("a") as a, listening(a, body_timeout_s=0.05) as address:
        answer = await talk(address, HEAD.replace(b"completions", b"nothing") + BODY[:5])

    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"408" not in answer


@pytest.mark.parametrize("behind", [b"", LAST, HEAD + BODY], ids=["alone", "with one behind it", "with a body"])
async def test_request_is_aborted_when_its_client_leaves(behind: bytes) -> None:
    async with FakeReplica("a", paused=True) as a, listening(a) as address:
        for parts in ((HEAD + BODY + behind,), (HEAD + BODY, behind)):
            _, writer = await asyncio.open_connection(*address)
            for part in parts:
                writer.write(part)
                await a.wait_until(lambda: a.num_requests == 1, 10)
            writer.close()
            await a.wait_until(lambda: a.num_requests == 0, 10)
    assert len(a.submits) == len(a.aborts) == 2


async def test_time_of_a_body_ends_with_the_body() -> None:
    async with FakeReplica("a", paused=True) as a, listening(a, body_timeout_s=0.5) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD.replace(b"Host: x", b"Host: x\r\nConnection: close\r\nExpect: 100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        await a.wait_until(lambda: a.num_requests == 1)
        assert b" 408 " in await talk(address, HEAD), "so long the first one waits for its answer"
        a.resume()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200 OK")


async def test_body_behind_a_request_that_is_being_answered_has_time() -> None:
    async with FakeReplica("a", paused=True) as a, listening(a, body_timeout_s=0.05) as address:
        waiting = asyncio.create_task(talk(address, HEAD + BODY + HEAD))
        await a.wait_until(lambda: a.num_requests == 1)
        assert b" 408 " in await talk(address, HEAD)
        a.resume()
        answer = await waiting

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 408 Request Timeout" in answer, "then the second one is to send its body"


def _no_app(*_: object) -> None: ...


class _Transport(asyncio.Transport):
    """Of a client that takes nothing, or so much from one look to the next up to the last byte, until it is cut off."""

    def __init__(self, num_unsent: int = 1 << 20, taken: int = 0) -> None:
        super().__init__()
        self.aborted = asyncio.Event()
        self.num_unsent, self.taken = num_unsent, taken

    def get_write_buffer_size(self) -> int:
        self.num_unsent = max(1, self.num_unsent - self.taken)
        return self.num_unsent

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        raise AssertionError("what waits to be written would keep it open")


async def test_client_that_takes_no_answer_is_cut_off_and_one_that_goes_on_to_take_it_is_not() -> None:
    kind = bounded_protocol(ClientConfig(write_timeout_s=0.01))
    protocols = [kind(uvicorn.Config(_no_app), ServerState(), {}) for _ in range(3)]
    gone, reading, stuck = (_Transport() for _ in protocols)
    for protocol, transport in zip(protocols, (gone, reading, stuck), strict=True):
        protocol.connection_made(transport)
        protocol._answered = SimpleNamespace(response_complete=False, message_event=asyncio.Event())
        protocol.pause_writing()
    protocols[0].connection_lost(OSError())
    protocols[1].resume_writing()

    await asyncio.wait_for(stuck.aborted.wait(), 10)
    assert not gone.aborted.is_set()
    assert not reading.aborted.is_set()
    for protocol in protocols[1:]:
        protocol.connection_lost(OSError())


async def test_client_that_takes_a_large_answer_slowly_is_not_cut_off() -> None:
    protocol = bounded_protocol(ClientConfig(write_timeout_s=0.01))(uvicorn.Config(_no_app), ServerState(), {})
    slow = _Transport(num_unsent=100, taken=10)
    protocol.connection_made(slow)
    protocol.pause_writing()

    await asyncio.wait_for(slow.aborted.wait(), 10)  # when it stops
    assert slow.num_unsent == 1
    protocol.connection_lost(OSError())


async def test_client_that_leaves_the_end_of_an_answer_is_cut_off() -> None:
    """What is left is less than the writer would wait for, and would keep the connection open for ever."""

    async def until_some_is_left(_scope: object, _receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        (connection,) = server.server_state.connections
        while not connection.transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})
        await send({"type": "http.response.body"})
        answered.set()

    class Watched(bounded_protocol(ClientConfig(write_timeout_s=0.05))):  # type: ignore[misc]
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    answered, lost = asyncio.Event(), asyncio.Event()
    server = uvicorn.Server(uvicorn.Config(until_some_is_left, http=Watched, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        serving = asyncio.create_task(server._serve(sockets=[listener]))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(listener.getsockname())
        client.sendall(LAST)
        async with asyncio.timeout(10):
            await answered.wait()
            await lost.wait()
            server.should_exit = True
            await serving


async def test_server_that_stops_lets_tls_clients_take_the_end_of_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Leaving(_Transport):
        def get_write_buffer_size(self) -> int:
            return super().get_write_buffer_size() - 1

        def is_closing(self) -> bool:
            return True

        def close(self) -> None: ...

    monkeypatch.setattr(http_protocol, "_FAREWELL_S", 0.01)
    protocol = bounded_protocol(ClientConfig())(uvicorn.Config(_no_app), ServerState(), {})
    slow = Leaving(num_unsent=100, taken=10)
    slow._extra = {"sslcontext": True}
    protocol.connection_made(slow)
    protocol.shutdown()

    await asyncio.wait_for(slow.aborted.wait(), 10)
    assert slow.num_unsent == 1
    protocol.connection_lost(OSError())


async def test_half_a_body_does_not_keep_a_server_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_LAST_BODY_S", 0.05)
    async with FakeReplica("a", paused=True) as a:
        async with asyncio.timeout(10), listening(a) as address:
            whole, half = [await asyncio.open_connection(*address) for _ in range(2)]
            whole[1].write(HEAD + BODY)
            half[1].write(HEAD + BODY[:5])
            await a.wait_until(lambda: a.num_requests == 1)
            asyncio.get_running_loop().call_later(0.2, a.resume)
        assert (await whole[0].read()).startswith(b"HTTP/1.1 200 OK"), "it was in flight"
        assert (await half[0].read()).startswith(b"HTTP/1.1 408 Request Timeout")
        for _, writer in (whole, half):
            writer.close()
