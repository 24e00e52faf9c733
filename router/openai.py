"""The OpenAI-compatible HTTP front: a thin transcoder over the dispatcher that the gRPC front uses too.

    POST /v1/completions          openai_types.py: what may be asked   GET /health, /ping   the process lives
    POST /v1/chat/completions     openai_render.py: what is answered   GET /ready           a model has a ready replica
    GET  /v1/models[/{id}]                                             GET /version
    POST /tokenize, /detokenize   openai_exchange.py: how it is sent

A request's errors keep their HTTP status in streams too: nothing is sent before the first delta. An error after it
comes as an `error` event, and the stream then ends without `[DONE]`. When a client goes away, its calls are aborted at
once, whether it streams or waits; so they are at its deadline, which the header X-Request-Timeout gives in seconds.
"""

import asyncio
import codecs
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from weft.limits import MAX_TIMEOUT_S

from router.call import Dispatch, max_context_of
from router.convert import MAX_REQUEST_ID_CHARS, check_request_id
from router.errors import DeadlineError, InvalidRequestError, ModelNotFoundError, RouterError, without_its_middle
from router.keys import KeyRing, OneRequest, Tenant
from router.openai_exchange import Exchange, json_response, until_disconnect
from router.openai_render import (
    RETRY_HEADERS,
    ChatRenderer,
    CompletionRenderer,
    Json,
    Renderer,
    error_body,
    error_headers,
    render_error,
    render_model,
)
from router.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    parse_detokenize_request,
    parse_request,
    parse_tokenize_request,
)
from router.spans import TraceContext, read_context

T = TypeVar("T")
_AskedToGenerate = CompletionRequest | ChatCompletionRequest

_CLIENT_CLOSED_REQUEST = 499
_TIMEOUT_HEADER = "X-Request-Timeout"
_ID_HEADER = "X-Request-Id"
_DRAIN_FACTOR = 16
"""A body too long is read on to this many times the limit, and dropped: clients that are cut off while they still send
see a broken connection, not the answer."""
_MAX_REQUEST_ID_CHARS = MAX_REQUEST_ID_CHARS - 16
"""Longest id of a client: what is put around it, as in `chatcmpl-...-127`, has 13 characters."""


def create_app(
    dispatch: Dispatch,
    *,
    max_body_bytes: int = 4 << 20,
    ready: Callable[[], bool],
    keys: KeyRing | None = None,
    reads_trace_context: bool = False,
    allowed_origins: Sequence[str] = (),
) -> Starlette:
    """Build the HTTP front.

    Args:
        dispatch: serves the calls.
        max_body_bytes: a longer request body is refused.
        ready: whether /ready says yes.
        keys: who may ask for what is of a model; None: everybody.
        reads_trace_context: calls get the W3C trace context of their headers.
        allowed_origins: of whose pages browsers may show the answers; "*": of all.
    """
    front = _Front(
        dispatch, max_body_bytes=max_body_bytes, ready=ready, keys=keys, reads_trace_context=reads_trace_context
    )
    cors = Middleware(
        CORSMiddleware,
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=(_ID_HEADER, *RETRY_HEADERS),
    )
    app = Starlette(
        middleware=[cors] if allowed_origins else [],
        routes=[
            Route("/v1/models", front.list_models),
            Route("/v1/models/{model:path}", front.get_model),
            Route("/v1/completions", front.complete, methods=["POST"]),
            Route("/v1/chat/completions", front.chat, methods=["POST"]),
            Route("/tokenize", front.tokenize, methods=["POST"]),
            Route("/detokenize", front.detokenize, methods=["POST"]),
            Route("/health", front.health),
            Route("/ping", front.health),
            Route("/ready", front.tell_ready),
            Route("/version", front.tell_version),
        ],
        exception_handlers={
            RouterError: _answer_router_error,
            HTTPException: _answer_http_exception,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_unexpected,
        },
    )
    app.router.redirect_slashes = False  # behind a proxy that ends TLS it would send keys and prompts over plain http
    return app


class _Front:
    """The endpoints."""

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        max_body_bytes: int,
        ready: Callable[[], bool],
        keys: KeyRing | None,
        reads_trace_context: bool,
    ) -> None:
        self._dispatch = dispatch
        self._keys = keys
        self._reads_trace_context = reads_trace_context
        self._max_body_bytes = max_body_bytes
        self._ready = ready
        self._started_at = int(time.time())

    async def complete(self, request: Request) -> Exchange:
        return await self._generate(request, partial(parse_request, kind=CompletionRequest), CompletionRenderer)

    async def chat(self, request: Request) -> Exchange:
        return await self._generate(request, partial(parse_request, kind=ChatCompletionRequest), ChatRenderer)

    async def tokenize(self, request: Request) -> Response:
        timeout_s = self._admit(request).timeout_s
        asked = parse_tokenize_request(await _read_body(request, self._max_body_bytes))
        adds = asked.add_special_tokens is not False
        model = asked.model or ""
        work = self._dispatch.tokenize(model, asked.content, add_special_tokens=adds)
        token_ids = await _while_asked(request, timeout_s, work)
        max_context = max_context_of(model, self._dispatch.list_models())
        return json_response(
            {"count": len(token_ids), "max_model_len": max_context, "tokens": token_ids, "token_strs": None}
        )

    async def detokenize(self, request: Request) -> Response:
        timeout_s = self._admit(request).timeout_s
        asked = parse_detokenize_request(await _read_body(request, self._max_body_bytes))
        work = self._dispatch.detokenize(asked.model or "", asked.tokens, skip_special_tokens=False)
        try:
            return json_response({"prompt": await _while_asked(request, timeout_s, work)})
        except InvalidRequestError as error:
            raise error.renamed("token_ids", "tokens") from error

    async def list_models(self, request: Request) -> Response:
        self._identify(request)
        cards = [render_model(card, self._started_at) for card in self._dispatch.list_models()]
        return json_response({"object": "list", "data": cards})

    async def get_model(self, request: Request) -> Response:
        self._identify(request)
        name = request.path_params["model"]
        cards = {card.name: card for card in self._dispatch.list_models()}
        if name not in cards:
            raise ModelNotFoundError(f"model {name!r} does not exist; served: {', '.join(sorted(cards)) or 'none'}")
        return json_response(render_model(cards[name], self._started_at))

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def tell_ready(self, request: Request) -> Response:
        is_ready = self._ready()
        return json_response({"ready": is_ready}, status=200 if is_ready else 503)

    async def tell_version(self, request: Request) -> Response:
        try:
            return json_response({"version": version("weft")})
        except PackageNotFoundError:  # run from a source tree
            return json_response({"version": "unknown"})

    def _admit(self, request: Request) -> "_Caller":
        """Count a request that no replica sees. Raises as `_caller`, and RateLimitedError."""
        caller = self._caller(request)
        if caller.tenant is not None:
            caller.tenant.admit(OneRequest())
        return caller

    def _identify(self, request: Request) -> Tenant | None:
        """Who asks. Raises UnauthenticatedError where keys are needed and this one is none."""
        return None if self._keys is None else self._keys.identify(request.headers.get("authorization"))

    def _caller(self, request: Request) -> "_Caller":
        """Who asks, and what the headers say besides. Raises UnauthenticatedError, InvalidRequestError."""
        trace_context = read_context(request.headers.items()) if self._reads_trace_context else ()
        request_id = request.state.request_id = uuid.uuid4().hex
        if given := request.headers.get(_ID_HEADER):
            check_request_id(_ID_HEADER, given, _MAX_REQUEST_ID_CHARS)
            request_id = request.state.request_id = given
        tenant = self._identify(request)
        return _Caller(
            tenant=tenant,
            trace_context=trace_context,
            request_id=request_id,
            timeout_s=_read_timeout(request.headers.get(_TIMEOUT_HEADER)),
        )

    async def _generate(
        self,
        request: Request,
        parse: Callable[[bytes], _AskedToGenerate],
        kind: type[Renderer],
    ) -> Exchange:
        try:
            caller = self._caller(request)
            asked = parse(await _read_body(request, self._max_body_bytes))
            return self._exchange(asked, kind, _named(caller, asked, request))
        except (RouterError, HTTPException) as error:
            tenant = self._identify(request)  # who has no key is refused here too, and not counted
            refusal = error if isinstance(error, RouterError) else InvalidRequestError(error.detail)
            self._dispatch.refuse(refusal, request_id=kind.id_prefix + request.state.request_id, tenant=tenant)
            raise

    def _exchange(self, asked: _AskedToGenerate, kind: type[Renderer], caller: "_Caller") -> Exchange:
        response_id = kind.id_prefix + caller.request_id
        of_caller: dict[str, Any] = {
            "tenant": caller.tenant,
            "request": OneRequest(),
            "trace_context": caller.trace_context,
            "timeout_s": caller.timeout_s,
        }
        calls = tuple(replace(call, **of_caller) for call in asked.calls(response_id))
        renderer = kind(
            calls,
            response_id=response_id,
            created=int(time.time()),
            choices_per_prompt=asked.num_choices,
            echoes=asked.echoes,
            include_usage=asked.include_usage,
            include_usage_so_far=asked.include_usage_so_far,
            dispatch=self._dispatch,
        )
        sources = [self._dispatch.generate(call) for call in calls]
        return Exchange(
            sources,
            renderer,
            is_stream=bool(asked.stream),
            max_tokens_name=asked.max_tokens_name,
            headers={_ID_HEADER: caller.request_id},
        )


class _Caller(NamedTuple):
    """Who asks, and how: mostly what the headers say."""

    tenant: Tenant | None
    trace_context: TraceContext
    request_id: str
    """The client's id, or a new one."""
    timeout_s: float | None
    """Time left to the client's deadline; None: none."""


def _named(caller: _Caller, asked: _AskedToGenerate, request: Request) -> _Caller:
    """Return the caller with the id of the body, where the headers have none. Raises InvalidRequestError."""
    if not asked.request_id or request.headers.get(_ID_HEADER):
        return caller
    check_request_id("request_id", asked.request_id, _MAX_REQUEST_ID_CHARS)
    if not asked.request_id.isascii():
        message = f"request_id is {asked.request_id!r}; allowed: ASCII, since a header of the answer holds it"
        raise InvalidRequestError(message, field="request_id")
    request.state.request_id = asked.request_id
    return caller._replace(request_id=asked.request_id)


async def _while_asked(request: Request, timeout_s: float | None, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`. Raises DeadlineError after the time, ClientDisconnect when nobody waits any more."""
    try:
        async with asyncio.timeout(timeout_s):
            done = await until_disconnect(request.receive, work)
    except TimeoutError:
        raise DeadlineError("the deadline passed before the answer was there") from None
    if done is None:
        raise ClientDisconnect
    return done


def _read_timeout(text: str | None) -> float | None:
    """Return the seconds of the header. Raises InvalidRequestError."""
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequestError(
            f"{_TIMEOUT_HEADER} is {text!r}; allowed: seconds, more than 0 and at most {MAX_TIMEOUT_S:.0f}",
            field=_TIMEOUT_HEADER,
        )
    return timeout_s


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Return the request's body, without a byte order mark; refuse one that is too long or packed."""
    encoding = request.headers.get("content-encoding") or "identity"
    if encoding.lower() != "identity":
        raise HTTPException(
            415, f"Content-Encoding is {encoding!r}; allowed: none, plain JSON", {"accept-encoding": "identity"}
        )
    message = f"the body is larger than {max_bytes} bytes, which is the most that is allowed"
    announced = request.headers.get("content-length", "0")  # the server has checked that it is a number
    most = max_bytes if request.headers.get("expect", "").lower() == "100-continue" else _DRAIN_FACTOR * max_bytes
    if int(announced) > most:
        raise HTTPException(413, message, {"connection": "close"})
    body = bytearray()
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            body += part
        elif num_bytes > _DRAIN_FACTOR * max_bytes:
            break
    if num_bytes > max_bytes:
        raise HTTPException(413, message)
    return bytes(body).removeprefix(codecs.BOM_UTF8)


def _json_error(request: Request, body: Json, status: int, headers: dict[str, str]) -> Response:
    """Return an error answer, with the id by which the log knows the request where it has one."""
    request_id = getattr(request.state, "request_id", None)
    return json_response(
        body, status=status, headers=headers if request_id is None else headers | {_ID_HEADER: request_id}
    )


async def _answer_router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return _json_error(request, render_error(error), error.http_status, error_headers(error))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            served = ", ".join(route.path_format for route in request.app.routes)
            message = f"{asked} is not served; allowed: {served}"
        case HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{asked} is not served; allowed: {(error.headers or {}).get('Allow', '')} {request.url.path}"
        case _:
            message = error.detail
    body = error_body(without_its_middle(message), error.status_code)
    return _json_error(request, body, error.status_code, dict(error.headers or {}))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    # starlette raises it once more, for the server's log
    return _json_error(request, error_body("internal error", 500), 500, {})
