"""The gRPC face: weft.v1.Inference over the dispatcher, with health and reflection.

A thin transcoder: it turns wire messages into calls, deltas into wire messages, and errors into statuses.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from weft.addresses import join_host_port
from weft.v1 import inference_pb2 as pb
from weft.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

from router.call import Conversation, Dispatch, max_context_of
from router.convert import conversation, generate_call, generate_response
from router.errors import InvalidRequestError, OverloadedError, RouterConfigError, RouterError, SlowClientError
from router.keys import KeyRing, OneRequest, Tenant
from router.spans import read_context
from router.tls import TlsFiles, bind

logger = logging.getLogger(__name__)

T = TypeVar("T")

READINESS_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
"""The health service that says whether some replica takes requests; the empty name says that the router lives."""

KEEPALIVE_S = 30
"""After so long without a word from a client the router asks whether it is still there."""

_HANDSHAKE_S = 10.0
"""How long a connection may take until its client has begun to speak gRPC: for no longer a stop waits for one that says
nothing."""

_MAX_MS = 2**31 - 1  # what settings of gRPC and of sockets hold

_MAX_STREAMS = 4096
"""Streams of health and reflection that are open at once: no key is asked for them, and only their clients end them."""

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServer(InferenceServicer):
    """Serves weft.v1.Inference. A request that cannot be read comes as the error that says why."""

    def __init__(
        self, dispatch: Dispatch, keys: KeyRing | None, *, write_timeout_s: float, reads_trace_context: bool
    ) -> None:
        self._dispatch = dispatch
        self._keys = keys
        self._write_timeout_s = write_timeout_s
        self._reads_trace_context = reads_trace_context

    async def Generate(  # type: ignore[override] # noqa: N802 - the stubs know no handler that writes to its context
        self, request: pb.GenerateRequest | DecodeError, context: _Context
    ) -> None:
        """Stream the deltas of one call; a client that cancels, or its deadline, cancels this task and so the call."""
        await _answer(context, self._generate(request, context))

    async def _generate(self, request: pb.GenerateRequest | DecodeError, context: _Context) -> None:
        tenant = self._identify(context)
        try:
            asked = generate_call(_readable(request), timeout_s=context.time_remaining())
        except RouterError as error:
            request_id = "" if isinstance(request, DecodeError) else request.request_id
            self._dispatch.refuse(error, request_id=request_id, tenant=tenant)
            raise
        trace_context = read_context(context.invocation_metadata() or ()) if self._reads_trace_context else ()
        call = replace(asked, tenant=tenant, trace_context=trace_context)
        async with (
            _PatientWriter(context, self._write_timeout_s) as writer,
            aclosing(self._dispatch.generate(call)) as deltas,
        ):
            async for delta in deltas:
                await writer.write(generate_response(delta))

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: _Context
    ) -> pb.TokenizeResponse:
        """Return the token ids of a prompt."""
        return await _answer(context, self._tokenize(request, context))

    async def _tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        self._admit(context)
        request = _readable(request)
        prompt: str | Conversation
        match request.WhichOneof("prompt"):
            case "text":
                prompt = request.text
            case "chat":
                prompt = conversation(request.chat)
            case _:
                raise InvalidRequestError("the request has no prompt; allowed: text or chat", field="prompt")
        add = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await self._dispatch.tokenize(request.model, prompt, add_special_tokens=add)
        max_context = max_context_of(request.model, self._dispatch.list_models())
        return pb.TokenizeResponse(token_ids=token_ids, max_context=max_context)

    async def Detokenize(  # noqa: N802
        self,
        request: pb.DetokenizeRequest,
        context: _Context,
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        return await _answer(context, self._detokenize(request, context))

    async def _detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        self._admit(context)
        request = _readable(request)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._dispatch.detokenize(request.model, request.token_ids, skip_special_tokens=skip)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self,
        request: pb.ListModelsRequest,
        context: _Context,
    ) -> pb.ListModelsResponse:
        """Return the models served now."""
        return await _answer(context, self._list_models(context))

    async def _list_models(self, context: _Context) -> pb.ListModelsResponse:
        self._identify(context)
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    name=card.name,
                    max_context=card.max_context,
                    vocab_size=card.vocab_size,
                    ready_replicas=card.ready_replicas,
                )
                for card in self._dispatch.list_models()
            ]
        )

    def _admit(self, context: _Context) -> None:
        """Count a request that no replica sees. Raises UnauthenticatedError, RateLimitedError."""
        tenant = self._identify(context)
        if tenant is not None:
            tenant.admit(OneRequest())

    def _identify(self, context: _Context) -> Tenant | None:
        """Who asks. Raises UnauthenticatedError where keys are needed and this one is none."""
        if self._keys is None:
            return None
        metadata = dict(context.invocation_metadata() or ())
        authorization = metadata.get("authorization")
        return self._keys.identify(authorization if isinstance(authorization, str) else None)


def keepalive_timeout_ms(write_timeout_s: float) -> int:
    """A connection is dropped whose client has acknowledged nothing for so long, also one that has no room."""
    return min(math.ceil(max(10.0, write_timeout_s) * 1000), _MAX_MS)


class _PatientWriter:
    """Writes the answer of one call while its client takes it; leaving it raises SlowClientError where it did not.

    A write waits as long as the client's flow control wants. The one timer looks whether one does: a timer for each
    token costs a tenth of the router's work.
    """

    def __init__(self, context: _Context, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        """When the write under way began."""

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self._timer.cancel()
        try:
            await self._scope.__aexit__(*exception)
        except TimeoutError:
            raise SlowClientError(f"the client took nothing of the answer for {self._timeout_s:g} s") from None

    async def write(self, response: pb.GenerateResponse) -> None:
        """Return when the client's side has taken the message, or has room for it."""
        self._began_s = self._loop.time()
        await self._context.write(response)
        self._began_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._began_s is None else self._began_s) + self._timeout_s
        if due_s <= now_s:
            self._scope.reschedule(now_s)
        else:
            self._timer = self._loop.call_at(due_s, self._look)


class _Streams:
    """The streams that only their clients would end, so that a stop would wait for them as long as it may."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._is_over = False

    @asynccontextmanager
    async def open(self, context: _Context) -> AsyncIterator[None]:
        """Run the block until `end`, and then tell the client to come again elsewhere; refuse one too many."""
        if len(self._scopes) >= _MAX_STREAMS:
            message = f"{_MAX_STREAMS} streams of health and reflection are open, as many as are allowed"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        scope = asyncio.timeout(0 if self._is_over else None)
        self._scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the router stops")
        finally:
            self._scopes.discard(scope)

    def end(self) -> None:
        """End those that are open, and those to come."""
        self._is_over = True
        while self._scopes:  # none is ended twice
            self._scopes.pop().reschedule(0)


class _Health(health_pb2_grpc.HealthServicer):
    """Tells how the services are. Watches end with the service.

    That of grpc_health writes under the lock that a change needs: one watcher that does not read would keep all others
    from hearing of it, and the router from stopping.
    """

    def __init__(self, streams: _Streams) -> None:
        self._streams = streams
        self._statuses = {"": health_pb2.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()

    def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Set the status of a service, and tell who watches it."""
        self._statuses[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> Any:  # noqa: N802
        """See health.proto."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service is {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:  # noqa: N802
        """See health.proto."""
        told = None
        async with self._streams.open(context):
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != told:
                    told = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                await changed.wait()


class _Reflection(reflection.aio.ReflectionServicer):
    """Conversations end with the service."""

    def __init__(self, names: Sequence[str], streams: _Streams) -> None:
        super().__init__(names)  # type: ignore[no-untyped-call]
        self._streams = streams

    async def ServerReflectionInfo(self, request_iterator: Any, context: _Context) -> AsyncIterator[Any]:  # noqa: N802
        """See grpc_reflection."""
        async with self._streams.open(context):
            async for response in super().ServerReflectionInfo(request_iterator, context):
                yield response


class GrpcListener:
    """A gRPC server with the Inference service, health and reflection."""

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        host: str,
        port: int,
        max_message_bytes: int,
        shares_port: bool = False,
        tls: TlsFiles | None = None,
        keys: KeyRing | None = None,
        write_timeout_s: float = 60.0,
        reads_trace_context: bool = False,
    ) -> None:
        """Listen, but on a shared port. Raises RouterConfigError when it is taken or TLS files cannot be used.

        Args:
            dispatch: serves the calls.
            host: address to bind.
            port: 0 for a free one, unless it is shared.
            max_message_bytes: a larger message is refused with RESOURCE_EXHAUSTED.
            shares_port: others that say so too may listen on the port; the kernel divides connections among them, so
                that this one listens only from `start` on.
            tls: None for plain text.
            keys: who may ask; health and reflection need no key. None: everybody.
            write_timeout_s: a call whose client takes nothing of the answer for so long is ended.
            reads_trace_context: calls get the W3C trace context of their metadata.
        """
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.so_reuseport", int(shares_port)),  # by default a taken port is shared without a word
                ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_S * 1000)),
                ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),  # finds clients that went away without closing
                ("grpc.keepalive_timeout_ms", keepalive_timeout_ms(write_timeout_s)),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            )
        )
        servicer = InferenceServer(
            dispatch, keys, write_timeout_s=write_timeout_s, reads_trace_context=reads_trace_context
        )
        add_InferenceServicer_to_server(servicer, _Methods(self._server))  # type: ignore[arg-type] # all that it needs
        self._streams = _Streams()
        self._health = _Health(self._streams)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)  # type: ignore[no-untyped-call]
        names = (READINESS_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_Reflection(names, self._streams), self._server)  # type: ignore[no-untyped-call]
        self.address = join_host_port(host, port)
        self._tls, self._shares_port = tls, shares_port
        if not shares_port:
            self.address = join_host_port(host, self._listen())
        elif tls is not None:
            tls.check()

    def _listen(self) -> int:
        try:
            return bind(self._server, self.address, self._tls)
        except RuntimeError as error:
            raise RouterConfigError(f"gRPC cannot listen on {self.address}: it is taken or not ours") from error

    async def start(self) -> None:
        """Begin to serve; not ready yet."""
        self.set_ready(False)
        if self._shares_port:
            self._listen()
        await self._server.start()

    def set_ready(self, is_ready: bool) -> None:
        """Set what the readiness service answers."""
        status = health_pb2.HealthCheckResponse
        self._health.set(READINESS_SERVICE, status.SERVING if is_ready else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those in flight `grace_s` to end, then cancel them.

        Watches of health and streams of reflection, which end with their clients only, are not waited for.
        """
        self._streams.end()
        await self._server.stop(grace_s)


class _Methods:
    """Registers methods so that they are given a message that cannot be read, and refuse it: one with a string that is
    cut within a character, say. gRPC itself would answer UNKNOWN, and log a traceback each time."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """See grpc.aio.Server. Drops them: gRPC looks there only for methods that are not registered, and all are."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See grpc.aio.Server."""
        lenient = {
            name: handler._replace(request_deserializer=partial(_read, handler.request_deserializer))
            for name, handler in handlers.items()
        }
        self._server.add_registered_method_handlers(service, lenient)


def _read(decode: Callable[[bytes], T], data: bytes) -> T | DecodeError:
    try:
        return decode(data)
    except DecodeError as error:
        return error


def _readable(request: T | DecodeError) -> T:
    if isinstance(request, DecodeError):
        raise InvalidRequestError(f"the message cannot be read: {request}; allowed: protobuf, with strings of UTF-8")
    return request


async def _answer(context: _Context, work: Awaitable[T]) -> T:
    try:
        return await work
    except RouterError as error:
        await _abort(context, error)
    except Exception as error:
        await _abort_unexpected(context, error)


async def _abort(context: _Context, error: RouterError) -> NoReturn:
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, OverloadedError):
        metadata = (("retry-after-ms", str(error.retry_after_ms)),)
    try:
        await context.abort(error.code, str(error), metadata)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone


async def _abort_unexpected(context: _Context, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from error  # the client has gone; anything else is a traceback in the log
    if isinstance(error, grpc.aio.BaseError):
        raise error  # the call is over already
    logger.error("a call failed unexpectedly", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the router's log says more")
