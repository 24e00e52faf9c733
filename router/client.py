"""The Python SDK: Weft over gRPC, sync and async; it imports neither torch nor Ray.

    from router.client import Client

    with Client("127.0.0.1:50051") as client:
        client.wait_ready(timeout_s=60)
        for delta in client.generate("Once upon a time", max_tokens=64, temperature=0.8):
            print(delta.text, end="", flush=True)
        answer = client.complete(messages=[{"role": "user", "content": "Who are you?"}])
        print(answer.text, answer.usage.completion_tokens, answer.ttft_s, answer.replica_ids)

`AsyncClient` has the same methods for asyncio. What they return and raise is in client_values.py. Nothing is retried
here: an OverloadedError says when to try again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from types import TracebackType
from typing import Self, Unpack

import grpc
from weft.addresses import is_loopback
from weft.limits import MAX_TIMEOUT_S
from weft.v1 import inference_pb2 as pb
from weft.v1.inference_pb2_grpc import InferenceStub

from router.client_values import (
    BadRequestError,
    CallCancelledError,
    ChatOptions,
    ClientError,
    Collector,
    Completion,
    DeadlineError,
    Delta,
    Finish,
    Messages,
    ModelInfo,
    NotFoundError,
    Options,
    OverloadedError,
    Prompt,
    ServerError,
    TokenLogprobs,
    UnauthenticatedError,
    UnavailableError,
    Usage,
)
from router.client_wire import (
    WAS_CLOSED,
    check_timeout,
    detokenize_request,
    generate_request,
    to_delta,
    to_error,
    to_models,
    tokenize_request,
)
from router.spans import NO_TRACER, TraceContext, Tracer
from router.tls import NO_PROXY

__all__ = [
    "AsyncClient",
    "BadRequestError",
    "CallCancelledError",
    "Client",
    "ClientError",
    "Completion",
    "DeadlineError",
    "Delta",
    "Finish",
    "ModelInfo",
    "NotFoundError",
    "Options",
    "OverloadedError",
    "ServerError",
    "TokenLogprobs",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]

DEFAULT_TARGET = "127.0.0.1:50051"

_MAX_RESPONSE_BYTES = 64 << 20
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_RESPONSE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # each client has a connection of its own
    ("grpc.initial_reconnect_backoff_ms", 100),  # a router that comes up late is found soon: the default grows to 2 min
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A call ends a minute after a ping that a router did not answer, whose machine has gone without a word. Servers let
    # clients ping every five minutes.
    ("grpc.keepalive_time_ms", 330_000),
)
_READY_POLL_S = 0.1


class _TypedErrors:
    """Makes errors of a client's calls those of client_values.py."""

    _is_closed = False

    @contextmanager
    def _typed_errors(self, timeout_s: float | None) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise to_error(error, timeout_s=timeout_s, is_closed=self._is_closed) from error
        except (ValueError, grpc.aio.UsageError, asyncio.CancelledError) as error:  # what gRPC has for a closed channel
            if not self._is_closed or _is_cancelled_task(error):
                raise
            raise CallCancelledError(WAS_CLOSED, code=grpc.StatusCode.CANCELLED) from error


def _is_cancelled_task(error: BaseException) -> bool:
    """Whether somebody cancelled the task, not only the call that it waits for."""
    task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
    return task is not None and task.cancelling() > 0


class Client(_TypedErrors):
    """A connection to a router. Safe to use from several threads at once."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        tls_name: str | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """Connect lazily: an address where nobody listens shows at the first call.

        Args:
            target: host:port of the router's gRPC listener. BadRequestError where it is no text.
            timeout_s: deadline of each call that names none; None: none.
            api_key: sent with every call; None: none. UnauthenticatedError where it cannot be one.
            credentials: for TLS, from `grpc.ssl_channel_credentials`; None: plain text.
            tls_name: name that the certificate must have, with credentials; None: that in `target`.
            tracer: makes a span of each generation, from `router.spans.make_tracer` or `router.tracing.OtelTracer`.
        """
        self._timeout_s = check_timeout(timeout_s)
        self._metadata = _metadata(api_key)
        self._tracer = tracer
        options = _channel_options(target, credentials, tls_name)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._stub = InferenceStub(self._channel)

    def close(self) -> None:
        """End the connection and every call on it; they raise CallCancelledError, and so do later ones."""
        self._is_closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[Options],
    ) -> Generator[Delta, None, None]:
        """Stream a generation. The call begins with the first step of the loop, and leaving the loop cancels it.

        An iterator that has a name is not gone with its loop: `close()` cancels its call.

        Args:
            prompt: text or token ids; or give `messages`.
            messages: a conversation, for the model's chat template.
            options: model, timeout_s, priority, cache_salt, request_id, target_ttft_s, target_tpot_s, the
                fields of weft.v1.SamplingParams, and with messages chat_template_kwargs, add_generation_prompt and
                continue_final_message.

        Raises:
            ClientError: one of its subclasses.
        """
        request = generate_request(prompt, messages, options)
        with self._tracer.begin("weft.client") as span:
            metadata = _with_context(self._metadata, span.context)
            timeout_s = check_timeout(options.get("timeout_s", self._timeout_s))
            with self._typed_errors(timeout_s):
                call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
                try:
                    for response in call:
                        yield to_delta(response)
                finally:
                    call.cancel()

    def complete(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Return a whole generation, with its times as seen from here; arguments as for `generate`."""
        collector = Collector()
        deltas = self.generate(prompt, messages=messages, **options)
        with closing(deltas):
            for delta in deltas:
                collector.add(delta)
        return collector.completion()

    def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        **chat: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Return the token ids of a text or of a conversation, as `generate` would use them."""
        request = tokenize_request(prompt, model, add_special_tokens, chat)
        with self._typed_errors(self._timeout_s):
            return tuple(self._stub.Tokenize(request, timeout=self._timeout_s, metadata=self._metadata).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        request = detokenize_request(token_ids, model, skip_special_tokens)
        with self._typed_errors(self._timeout_s):
            return self._stub.Detokenize(request, timeout=self._timeout_s, metadata=self._metadata).text

    def models(self) -> list[ModelInfo]:
        """Return the models that the cluster serves."""
        with self._typed_errors(self._timeout_s):
            return to_models(
                self._stub.ListModels(pb.ListModelsRequest(), timeout=self._timeout_s, metadata=self._metadata)
            )

    def wait_ready(self, timeout_s: float, *, model: str = "", replicas: int = 1) -> None:
        """Wait until so many replicas of the model take requests; of any model, where none is named.

        Raises:
            DeadlineError: that took longer than `timeout_s`; says why the router could not be reached, if it could not.
        """
        deadline = time.monotonic() + timeout_s
        failure: UnavailableError | None = None
        while (left_s := min(deadline - time.monotonic(), MAX_TIMEOUT_S)) > 0:
            # A router that is not there yet is waited for, and one that goes away again is too.
            try:
                with self._typed_errors(left_s):
                    response = self._stub.ListModels(pb.ListModelsRequest(), timeout=left_s, metadata=self._metadata)
                if _is_ready(to_models(response), model, replicas):
                    return
                failure = None
            except UnavailableError as error:
                failure = error
            except DeadlineError:
                pass  # says nothing new of why
            time.sleep(min(_READY_POLL_S, max(deadline - time.monotonic(), 0)))
        raise _not_ready(timeout_s, model, replicas, failure) from failure


class AsyncClient(_TypedErrors):
    """A connection to a router for asyncio; create and use it on one event loop."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        tls_name: str | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """Connect lazily; see Client."""
        self._timeout_s = check_timeout(timeout_s)
        self._metadata = _metadata(api_key)
        self._tracer = tracer
        options = _channel_options(target, credentials, tls_name)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._stub = InferenceStub(self._channel)

    async def close(self) -> None:
        """End the connection and every call on it; they raise CallCancelledError, and so do later ones."""
        self._is_closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Delta, None]:
        """Stream a generation; see Client.generate, with `aclose()`. Cancelling the loop's task cancels the call."""
        request = generate_request(prompt, messages, options)
        with self._tracer.begin("weft.client") as span:
            metadata = _with_context(self._metadata, span.context)
            timeout_s = check_timeout(options.get("timeout_s", self._timeout_s))
            with self._typed_errors(timeout_s):
                call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
                try:
                    async for response in call:
                        yield to_delta(response)
                finally:
                    call.cancel()

    async def complete(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Return a whole generation; see Client.complete."""
        collector = Collector()
        deltas = self.generate(prompt, messages=messages, **options)
        async with aclosing(deltas):
            async for delta in deltas:
                collector.add(delta)
        return collector.completion()

    async def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        **chat: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Return the token ids of a text or of a conversation, as `generate` would use them."""
        request = tokenize_request(prompt, model, add_special_tokens, chat)
        with self._typed_errors(self._timeout_s):
            return tuple(
                (await self._stub.Tokenize(request, timeout=self._timeout_s, metadata=self._metadata)).token_ids
            )

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        request = detokenize_request(token_ids, model, skip_special_tokens)
        with self._typed_errors(self._timeout_s):
            return (await self._stub.Detokenize(request, timeout=self._timeout_s, metadata=self._metadata)).text

    async def models(self) -> list[ModelInfo]:
        """Return the models that the cluster serves."""
        with self._typed_errors(self._timeout_s):
            return to_models(
                await self._stub.ListModels(pb.ListModelsRequest(), timeout=self._timeout_s, metadata=self._metadata)
            )

    async def wait_ready(self, timeout_s: float, *, model: str = "", replicas: int = 1) -> None:
        """Wait until so many replicas of the model take requests; see Client.wait_ready."""
        deadline = time.monotonic() + timeout_s
        failure: UnavailableError | None = None
        while (left_s := min(deadline - time.monotonic(), MAX_TIMEOUT_S)) > 0:
            # A router that is not there yet is waited for, and one that goes away again is too.
            try:
                with self._typed_errors(left_s):
                    response = await self._stub.ListModels(
                        pb.ListModelsRequest(), timeout=left_s, metadata=self._metadata
                    )
                if _is_ready(to_models(response), model, replicas):
                    return
                failure = None
            except UnavailableError as error:
                failure = error
            except DeadlineError:
                pass  # says nothing new of why
            await asyncio.sleep(min(_READY_POLL_S, max(deadline - time.monotonic(), 0)))
        raise _not_ready(timeout_s, model, replicas, failure) from failure


def _channel_options(
    target: str, credentials: grpc.ChannelCredentials | None, tls_name: str | None
) -> list[tuple[str, str | int]]:
    """Return how `target` is dialled: a router of this machine by no proxy, whatever the environment says."""
    if not isinstance(target, str):
        raise BadRequestError(
            f"target is of type {type(target).__name__}; allowed: text, host:port",
            code=grpc.StatusCode.INVALID_ARGUMENT,
        )
    if credentials is None and tls_name is not None:
        raise BadRequestError(
            f"tls_name is {tls_name!r} where no certificate is shown; allowed: with credentials",
            code=grpc.StatusCode.INVALID_ARGUMENT,
        )
    options: list[tuple[str, str | int]] = [*_CHANNEL_OPTIONS]
    if is_loopback(target):
        options.append(NO_PROXY)
    if tls_name is not None:
        options.append(("grpc.ssl_target_name_override", tls_name))
    return options


def _with_context(metadata: TraceContext | None, context: TraceContext) -> TraceContext | None:
    return (*(metadata or ()), *context) if context else metadata


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...] | None:
    if api_key is None:
        return None
    if not isinstance(api_key, str):
        raise UnauthenticatedError(
            f"the API key is of type {type(api_key).__name__}; allowed: text", code=grpc.StatusCode.UNAUTHENTICATED
        )
    if not (api_key.isascii() and api_key.isprintable()):
        raise UnauthenticatedError(
            "the API key holds a line break, or another character that is not printable ASCII",
            code=grpc.StatusCode.UNAUTHENTICATED,
        )
    return (("authorization", f"Bearer {api_key}"),)


def _is_ready(models: list[ModelInfo], model: str, replicas: int) -> bool:
    return any(each.ready_replicas >= replicas for each in models if model in ("", each.name))


def _not_ready(timeout_s: float, model: str, replicas: int, failure: UnavailableError | None) -> DeadlineError:
    who = f"{model} had no" if model else "no model had"
    why = "" if failure is None else f": {failure}"
    return DeadlineError(
        f"{who} {replicas} ready replicas within {timeout_s} s{why}",
        code=grpc.StatusCode.DEADLINE_EXCEEDED,
    )
