"""Requests over gRPC, by the SDK. Each message says which tokens it holds."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager

from bench.errors import BenchError
from bench.load.calls import Call, Chat
from bench.load.records import CallError, ErrorKind, Usage
from bench.load.sender import Received, ServedModel, Target, choose_model
from router.client import (
    AsyncClient,
    BadRequestError,
    CallCancelledError,
    ClientError,
    DeadlineError,
    Delta,
    NotFoundError,
    OverloadedError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
)
from router.client_values import Options

_KINDS: Mapping[type[ClientError], ErrorKind] = {
    BadRequestError: ErrorKind.BAD_REQUEST,
    UnauthenticatedError: ErrorKind.UNAUTHENTICATED,
    NotFoundError: ErrorKind.NOT_FOUND,
    OverloadedError: ErrorKind.OVERLOADED,
    UnavailableError: ErrorKind.UNAVAILABLE,
    DeadlineError: ErrorKind.TIMEOUT,
    CallCancelledError: ErrorKind.CANCELLED,
    ServerError: ErrorKind.SERVER,
}


@asynccontextmanager
async def connect_grpc(target: Target) -> AsyncIterator["GrpcSender"]:
    """Connect for the length of the block. Raises RouterConfigError when a TLS file cannot be read."""
    tls = target.tls
    async with AsyncClient(
        target.address,
        timeout_s=target.timeout_s,
        api_key=target.api_key,
        credentials=None if tls is None else tls.credentials,
        tls_name=None if tls is None else tls.server_name,
    ) as client:
        yield GrpcSender(client, target)


class GrpcSender:
    """Implements `Sender`; see there."""

    def __init__(self, client: AsyncClient, target: Target) -> None:
        self._client = client
        self._target = target
        self._model = target.model

    async def find_model(self) -> ServedModel:
        """See `Sender`."""
        try:
            models = await self._client.models()
        except ClientError as error:
            raise BenchError(f"{self._target.address}: {error.code.name.lower().replace('_', ' ')}: {error}") from error
        vocab_sizes = {model.name: model.vocab_size for model in models}
        self._model = choose_model(self._target, list(vocab_sizes))
        return ServedModel(name=self._model, vocab_size=vocab_sizes[self._model] or None)

    async def send(self, call: Call, cache_salt: str, received: Received) -> Usage:
        """See `Sender`."""
        options: Options = {
            "model": self._model,
            "max_tokens": call.num_out,
            **self._target.sampling,  # type: ignore[typeddict-item]
            "ignore_eos": self._target.ignore_eos,
            "cache_salt": cache_salt,
            **self._target.targets_s,
        }
        finish = None
        try:
            async with aclosing(self._generate(call, options)) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        received(len(delta.token_ids))
                    finish = delta.finish
        except ClientError as error:
            raise CallError(_KINDS.get(type(error), ErrorKind.OTHER), str(error)) from error
        if finish is None:
            raise CallError(ErrorKind.OTHER, "the answer has no end")
        return Usage(
            prompt_tokens=finish.usage.prompt_tokens,
            cached_tokens=finish.usage.cached_tokens,
            completion_tokens=finish.usage.completion_tokens,
        )

    def _generate(self, call: Call, options: Options) -> AsyncGenerator[Delta, None]:
        if isinstance(call.prompt, Chat):
            return self._client.generate(messages=call.prompt.messages, **options)
        return self._client.generate(call.prompt, **options)
