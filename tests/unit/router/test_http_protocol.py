"""One HTTP connection: heads without end, heads that never come, and clients that would rather speak HTTP/2."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import uvicorn
from helpers.fake_replica import FakeReplica
from helpers.router_harness import router_config, running_router
from uvicorn.server import ServerState

import router.http_protocol
from router.http_protocol import BoundedHttpProtocol

BODY = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    async with FakeReplica("a") as a, running_router(router_config(a.address, http_port=0)) as router:
        await router.wait_ready(1)
        host, _, port = (router.addresses.http or "").rpartition(":")
        yield host, int(port)


async def talk(address: tuple[str, int], *parts: bytes) -> bytes:
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


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("cut", [0, 5])
async def test_request_that_offers_an_upgrade_is_served_as_it_is(
    address: tuple[str, int], framing: str, cut: int
) -> None:
    if framing == "length":
        header, body = b"Content-Length: %d\r\n" % len(BODY), BODY
    else:
        header, body = b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + UPGRADE + header + b"\r\n"

    answer = await talk(address, head + body[:cut], body[cut:] + LAST)

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"text_completion"' in answer
    assert answer.endswith(b'{"status":"ok"}'), "the connection goes on in HTTP/1.1"


async def test_request_without_body_that_offers_an_upgrade_is_served(address: tuple[str, int]) -> None:
    answer = await talk(address, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n" + LAST)

    assert answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\nX: ",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
    ],
    ids=["headers", "header", "trailers"],
)
async def test_head_without_end_is_cut_off(address: tuple[str, int], start: bytes) -> None:
    line = b"a" * 1000 if start.endswith(b"X: ") else b"X: " + b"a" * 1000 + b"\r\n"
    with pytest.raises(ConnectionError):
        await talk(address, start, *[line * 100] * 600)
    assert (await talk(address, LAST)).endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("start", [b"", b"GET /health HT", LAST.replace(b"close", b"keep-alive") + b"GET /hea"])
async def test_head_that_never_comes_ends_the_connection(
    address: tuple[str, int], start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.http_protocol, "HEAD_TIMEOUT_S", 0.05)

    assert (await talk(address, start)).count(b"HTTP/1.1 200 OK") == (1 if len(start) > 20 else 0)


def _no_app(*_: object) -> None: ...


class _Transport(asyncio.Transport):
    """Of a client that takes nothing, until it is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = asyncio.Event()

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        raise AssertionError("what waits to be written would keep it open")


async def test_client_that_takes_no_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.http_protocol, "WRITE_TIMEOUT_S", 0.01)
    protocol = BoundedHttpProtocol(uvicorn.Config(_no_app), ServerState(), {})
    reading, stuck = _Transport(), _Transport()

    protocol.connection_made(reading)
    protocol.pause_writing()
    protocol.resume_writing()
    protocol.connection_lost(OSError())
    protocol.connection_made(stuck)
    protocol.pause_writing()

    await asyncio.wait_for(stuck.aborted.wait(), 10)
    assert not reading.aborted.is_set()
    protocol.connection_lost(OSError())
