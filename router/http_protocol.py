"""HTTP/1.1 on one connection: uvicorn's, with bounds on what a client may send around bodies, and on how long it takes.

What a request is and how it is answered is the application's business (openai.py), and so is the length of a body.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.config import ClientConfig
from router.openai_render import error_body

_MAX_HEAD_BYTES = 64 << 10
"""Most bytes of a request's line and headers that come in several reads; one read of the event loop may hold 256 KiB.
Trailers and what else is neither head nor body count too."""

_MAX_BEHIND = 16
"""Requests that are read behind the one that is answered: only a connection that is read tells that its client left."""

_LAST_BODY_S = 2.0
"""How long a server that stops waits for the rest of a body."""

_FAREWELL_S = 1.0
"""How often a server that stops looks whether a connection is closed but for the client's part of TLS."""

_TOO_LARGE = "The request's head is too large."
_STOPS = "The router stops, and the request took longer than it waits."
_TOO_SLOW = "The request's body did not come within {:g} s."


class BoundedHttpProtocol(HttpToolsProtocol):
    """Cuts off clients that send a head without end, or none, or too slow a body, or take no answer.

    Ignores HTTP upgrades.
    """

    limits = ClientConfig()
    stops: asyncio.Event
    """Set when the server stops."""
    _answered: RequestResponseCycle | None = None
    """The request that is answered now, while those behind it wait."""
    _is_in_head = True
    _is_in_body = False
    _is_continuing = False
    _num_head_bytes = 0
    _num_unsent = 0
    _waits_for_farewell = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._head_limit = _TimeLimit(self.loop, self.limits.head_timeout_s, transport.close)
        self._body_limit = _TimeLimit(self.loop, self.limits.body_timeout_s, self._end_body)
        self._write_limit = _TimeLimit(self.loop, self.limits.write_timeout_s, self._end_unless_taken)
        self._farewell_limit = _TimeLimit(self.loop, _FAREWELL_S, self._end_without_farewell)
        self._head_limit.start()
        if self.stops.is_set():  # its TLS has begun after the others were told
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        for limit in (self._head_limit, self._body_limit, self._write_limit, self._farewell_limit):
            limit.stop()
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """See uvicorn, which tells only the newest request that its client left."""
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            app = partial(_answer_unchunked, cycle, app)
        elif cycle.waiting_for_100_continue:
            app = partial(_answer_unasked, cycle, app)
        super()._start_asgi_task(cycle, partial(self._answer_until_cut_off, cycle, app))

    async def _answer_until_cut_off(
        self, cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any
    ) -> None:
        """Answer a request; uvicorn cancels one that outlasts the grace of a stop, and then logs it as a fault."""
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if not cycle.response_started and not cycle.disconnected:
                self._answer_error(HTTPStatus.SERVICE_UNAVAILABLE, _STOPS)
            self.transport.close()
            cycle.disconnected = True

    def shutdown(self) -> None:
        """See uvicorn: the server stops. A request whose body is not there yet has not begun, and waits no longer."""
        super().shutdown()
        if self.scheme == "https":
            self._farewell_limit.start()
        if self._is_in_body and not self.pipeline:
            self._body_limit.limit_s = min(_LAST_BODY_S, self.limits.body_timeout_s)
            self._body_limit.start()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        self._watch_rest()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._write_limit.stop()
        if self._answered is None or self._answered.response_complete:
            self._watch_rest()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._watch_rest()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn, which answers in plain text."""
        self._answer_error(HTTPStatus.BAD_REQUEST, msg)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._num_head_bytes += len(data)  # 0 again as soon as a head ends, or a part of a body
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError:
            self.logger.info("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
        else:
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self.send_400_response(_TOO_LARGE)
            elif self._is_in_head and not self._head_limit.is_running:
                self._head_limit.start()
            elif self._is_in_body and not self._body_limit.is_running:
                self._body_limit.start()

    def _feed(self, data: memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._continue_without_upgrade()
                self._num_head_bytes += len(data)

    def _continue_without_upgrade(self) -> None:
        """Read on after a head that offers to speak HTTP/2, as Java's client does before it knows the server.

        The parser takes what is behind the head for the other protocol. A new one gets a head that asks for none.
        """
        framing = (b"content-length", b"transfer-encoding", b"connection")
        lines = [name + b": " + value for name, value in self.headers if name in framing]
        self.parser = httptools.HttpRequestParser(self)
        self._is_continuing = True
        self.parser.feed_data(b"\r\n".join((b"POST / HTTP/1.1", *lines, b"", b"")))
        self._is_continuing = False

    def on_message_begin(self) -> None:
        """See httptools."""
        self._is_in_head = True
        self._unset_keepalive_if_required()  # not for an empty line, which is no request
        if not self._is_continuing:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        if not self._is_continuing:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if not self._is_continuing:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._is_in_head, self._is_in_body = False, True
        self._num_head_bytes = 0
        self._head_limit.stop()
        if not self._is_continuing:
            super().on_headers_complete()
        if 0 < len(self.pipeline) <= _MAX_BEHIND:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if not self.parser.should_upgrade():  # else the body is still to come
            self._is_in_body = False
            self._body_limit.stop()
            super().on_message_complete()

    def _watch_rest(self) -> None:
        """Cut off a client that does not take what is written, also the end of an answer, for which none is paused."""
        self._num_unsent = self.transport.get_write_buffer_size()
        if self._num_unsent:
            self._write_limit.start()

    def _end_unless_taken(self) -> None:
        """Cut off a client that has taken nothing since the last look; of a large answer it takes part after part."""
        before = self._num_unsent
        self._watch_rest()
        if self._num_unsent >= before:
            self.transport.abort()

    def _end_without_farewell(self) -> None:
        """Cut off a client that has its answers and does not read that TLS ends, as clients of idle connections do not:
        asyncio waits half a minute for its part of the end, and so would a stop. It has from one look to the next."""
        waited = self._waits_for_farewell
        self._waits_for_farewell = self.transport.is_closing() and not self.transport.get_write_buffer_size()
        if waited and self._waits_for_farewell:
            self.transport.abort()
        else:
            self._farewell_limit.start()

    def _end_body(self) -> None:
        """Answer 408, where nothing is answered yet, and close."""
        if self.pipeline:  # it is the router that does not read on: an answer before this one is not finished
            self._body_limit.start()
            return
        if not self.cycle.response_started:
            self._answer_error(HTTPStatus.REQUEST_TIMEOUT, _TOO_SLOW.format(self._body_limit.limit_s))
        else:
            self._watch_rest()
            self.transport.close()

    def _answer_error(self, status: HTTPStatus, message: str) -> None:
        """Answer as the application answers errors, and close."""
        body = msgspec.json.encode(error_body(message, status))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self._watch_rest()
        self.transport.close()


class _TimeLimit:
    """Calls `end` when something was not stopped within a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, end: Callable[[], None]) -> None:
        self._loop = loop
        self.limit_s = limit_s
        self._end = end
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self) -> None:
        self.stop()
        self._timer = self._loop.call_later(self.limit_s, self._end)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _answer_unchunked(cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Answer a client of HTTP/1.0, which knows no chunks: a stream ends with its connection, which uvicorn closes."""

    async def send_as_it_is(message: Any) -> None:
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))  # of each part anew, so that uvicorn takes all
        await send(message)

    await app(scope, receive, send_as_it_is)


async def _answer_unasked(cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Answer a client that waits for a 100 Continue: who gets another answer in its place may send no body, and what
    follows on the connection would be taken for it."""

    async def send_and_close(message: Any) -> None:
        if cycle.waiting_for_100_continue and cycle.more_body:
            cycle.keep_alive = False
        await send(message)

    await app(scope, receive, send_and_close)


def bounded_protocol(limits: ClientConfig, stops: asyncio.Event | None = None) -> type[BoundedHttpProtocol]:
    """Return the class whose connections have these limits; those that come when `stops` is set take no request."""
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"limits": limits, "stops": stops or asyncio.Event()})
