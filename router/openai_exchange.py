"""The answer to one generation request over HTTP, whole or in a stream: its calls side by side, until its client goes.

What its pieces look like, openai_render.py says; who may ask for what, openai.py.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.call import GenerateDelta
from router.errors import InvalidRequestError, RouterError
from router.openai_render import Json, Renderer, error_body, render_error

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Deltas = AsyncGenerator[tuple[int, GenerateDelta], None]

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Exchange:
    """The answer to one generation request, as an ASGI application: it serves its calls until the client has gone."""

    def __init__(
        self,
        sources: Sequence[AsyncGenerator[GenerateDelta, None]],
        renderer: Renderer,
        *,
        is_stream: bool,
        max_tokens_name: str,
        headers: dict[str, str],
    ) -> None:
        """Take the calls under way, in the order of their choices; `headers` are those of the answer."""
        self._sources = sources
        self._renderer = renderer
        self._is_stream = is_stream
        self._max_tokens_name = max_tokens_name
        """What the client calls the field `max_tokens`, for errors."""
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, as ASGI wants it. Raises RouterError where nothing was sent yet."""
        try:
            await until_disconnect(receive, self._serve(scope, receive, send))
        except InvalidRequestError as error:
            raise error.renamed("max_tokens", self._max_tokens_name) from error

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(_merge(self._sources)) as deltas:
            if self._is_stream:
                await self._stream(deltas, send)
                return
            async for index, delta in deltas:
                await self._renderer.add(index, delta)
        await json_response(self._renderer.whole(), headers=self._headers)(scope, receive, send)

    async def _stream(self, deltas: _Deltas, send: Send) -> None:
        first = await anext(deltas)  # an error until here has its own status
        head = Response(headers=_STREAM_HEADERS | self._headers, media_type="text/event-stream")
        del head.headers["content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
        try:
            await self._send_chunks(*first, send)
            async for index, delta in deltas:
                await self._send_chunks(index, delta, send)
            usage = self._renderer.usage_chunk()
            last = (b"" if usage is None else _event(usage)) + _DONE
        except RouterError as error:
            last = _event(render_error(error))
        except Exception:
            logger.exception("an answer broke off")
            last = _event(error_body("internal error", 500))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_chunks(self, index: int, delta: GenerateDelta, send: Send) -> None:
        events = [_event(chunk) for chunk in await self._renderer.chunks(index, delta)]
        if events:
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        if delta.logprobs:  # many cost milliseconds each, and who reads late has many that wait
            await asyncio.sleep(0)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Do `work`; cancel it when the client goes away, and come back, with None, only when it has ended."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        logger.debug("a client went away; what it asked for is aborted")
        return None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield what the sources yield, as it comes, with the number of its source. Closing it closes them all.

    The first error of a source is raised here, and closes the others.
    """
    if len(sources) == 1:  # the common case needs no task of its own
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(sources))
    pumps = [asyncio.create_task(_pump(index, source, queue)) for index, source in enumerate(sources)]
    try:
        num_running = len(pumps)
        while num_running:
            match await queue.get():
                case None:
                    num_running -= 1
                case Exception() as error:
                    raise error
                case pair:
                    yield pair
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, source: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | Exception | None]
) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


def json_response(value: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a whole answer."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
