"""The router's front ends behind one interface: the same request in, the same answer or the same refusal out."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import httpx
from google.protobuf.message import Message
from weft.v1 import inference_pb2 as pb

from .router_harness import RunningRouter

FRONT_NAMES = ("grpc", "http", "http-stream")

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The gRPC status that each HTTP status stands for."""
_EVENT_CODES = {
    "server_error": grpc.StatusCode.INTERNAL,
    "timeout_error": grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""And each type of an error that comes in a stream."""
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}


class RefusedError(Exception):
    """The error that a front end answered with."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token's log-probability, by the token's text."""

    token: str
    logprob: float
    top: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost, in tokens."""

    prompt: int
    cached: int
    completion: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a front end has answered so far. Answers are equal that say the same, in however many pieces."""

    text: str = ""
    finish_reason: str | None = None
    stop: str | int | None = None
    """The stop string or the stop token of the request that ended it."""
    usage: Usage | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] | None = field(default=None, compare=False)
    """None over HTTP, which tells none."""
    request_id: str = field(default="", compare=False)
    num_texts: int = field(default=0, compare=False)
    """Pieces that held text."""

    def add(self, piece: "Answer") -> None:
        """Append what came next."""
        self.text += piece.text
        self.num_texts += bool(piece.text)
        self.logprobs += piece.logprobs
        if piece.token_ids is not None:
            self.token_ids = [*(self.token_ids or ()), *piece.token_ids]
        assert not (self.finish_reason and (piece.text or piece.finish_reason)), "nothing may follow the end"
        self.finish_reason = self.finish_reason or piece.finish_reason
        self.stop = piece.stop if self.stop is None else self.stop
        self.usage = self.usage or piece.usage
        self.request_id = piece.request_id


class Front(Protocol):
    """One way to ask the router."""

    def pieces(
        self, request: pb.GenerateRequest, key: str | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[Answer, None]:
        """Yield the answer as it comes, until the deadline. Raises RefusedError."""


async def ask(
    front: Front,
    request: pb.GenerateRequest,
    key: str | None = None,
    *,
    timeout_s: float | None = None,
    into: Answer | None = None,
) -> Answer:
    """Return the whole answer, which grows in `into`. Raises RefusedError."""
    answer = into or Answer()
    async with aclosing(front.pieces(request, key, timeout_s)) as pieces:
        async for piece in pieces:
            answer.add(piece)
    return answer


@asynccontextmanager
async def open_fronts(router: RunningRouter) -> AsyncIterator[dict[str, Front]]:
    """Yield every front end of a router that serves HTTP, in the order of FRONT_NAMES."""
    address = f"http://{router.addresses.http}"
    async with httpx.AsyncClient(base_url=address, timeout=20, verify=False) as http:  # its certificates take 50 ms
        fronts = (GrpcFront(router), HttpFront(http, is_stream=False), HttpFront(http, is_stream=True))
        yield dict(zip(FRONT_NAMES, fronts, strict=True))


class GrpcFront:
    """weft.v1.Inference. Tokens read as the bytes that they are."""

    def __init__(self, router: RunningRouter) -> None:
        self._stub = router.stub

    async def pieces(
        self, request: pb.GenerateRequest, key: str | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[Answer, None]:
        """See Front."""
        call = self._stub.Generate(request, metadata=tuple(_headers(key).items()), timeout=timeout_s)
        try:
            async for response in call:
                yield self._piece(request, response)
        except grpc.aio.AioRpcError as error:
            retry_after_ms = dict(error.trailing_metadata() or ()).get("retry-after-ms")
            raise RefusedError(
                error.code(), error.details() or "", None if retry_after_ms is None else int(retry_after_ms)
            ) from error
        finally:
            call.cancel()

    def _piece(self, request: pb.GenerateRequest, response: pb.GenerateResponse) -> Answer:
        piece = Answer(
            text=response.text,
            logprobs=[
                TokenLogprob(
                    token=chr(each.chosen.token_id),
                    logprob=each.chosen.logprob,
                    top={chr(top.token_id): top.logprob for top in each.top},
                )
                for each in response.logprobs
            ],
            token_ids=list(response.token_ids),
            request_id=response.request_id,
        )
        if response.HasField("finished"):
            finished = response.finished
            piece.finish_reason = _REASONS[finished.reason]
            if finished.HasField("stop_string"):
                piece.stop = finished.stop_string
            elif finished.stop_token_id in request.sampling.stop_token_ids:
                piece.stop = finished.stop_token_id
            usage = finished.usage
            piece.usage = Usage(
                prompt=usage.prompt_tokens, cached=usage.cached_tokens, completion=usage.completion_tokens
            )
        return piece


class HttpFront:
    """The OpenAI-compatible endpoints, with or without a stream."""

    def __init__(self, http: httpx.AsyncClient, *, is_stream: bool) -> None:
        self._http = http
        self._is_stream = is_stream

    async def pieces(
        self, request: pb.GenerateRequest, key: str | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[Answer, None]:
        """See Front."""
        path, body = _to_json(request)
        if self._is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = _headers(key) | ({"x-request-id": request.request_id} if request.request_id else {})
        headers |= {} if timeout_s is None else {"x-request-timeout": str(timeout_s)}
        async with self._http.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != 200:
                raise _refusal(response, await response.aread())
            if not self._is_stream:
                yield _http_piece(json.loads(await response.aread()))
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line:
                    yield _http_piece(json.loads(line.removeprefix("data: ")))
        raise AssertionError("the stream ended without [DONE]")


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _refusal(response: httpx.Response, body: bytes) -> RefusedError:
    retry_after_ms = response.headers.get("retry-after-ms")
    return RefusedError(
        _CODES[response.status_code],
        json.loads(body)["error"]["message"],
        None if retry_after_ms is None else int(retry_after_ms),
    )


def _to_json(request: pb.GenerateRequest) -> tuple[str, dict[str, Any]]:
    """Return the endpoint and the body that ask for the same."""
    sampling = _fields(request.sampling)
    body = {"max_tokens": None} | sampling  # null: what is left of the context, as over gRPC
    body |= {name: value for name, value in _fields(request).items() if name in _PLAIN_FIELDS}
    match request.WhichOneof("prompt"):
        case "chat":
            body["messages"] = [
                {"role": message.role, "content": message.content, "name": message.name}
                for message in request.chat.messages
            ]
            if request.chat.chat_template_kwargs_json:
                body["chat_template_kwargs"] = json.loads(request.chat.chat_template_kwargs_json)
            body |= {name: value for name, value in _fields(request.chat).items() if name in _ENDS}
            if "logprobs" in sampling:
                body |= {"logprobs": True, "top_logprobs": sampling["logprobs"]}
            return "/v1/chat/completions", body
        case "text":
            body["prompt"] = request.text
        case _:
            body["prompt"] = list(request.token_ids.ids) or [[]]
    return "/v1/completions", body


_ENDS = ("add_generation_prompt", "continue_final_message")
"""What both fronts call alike in a conversation."""
_PLAIN_FIELDS = ("model", "priority", "cache_salt", "target_ttft_s", "target_tpot_s")
"""What both fronts call alike. `request_id` is not among them: over HTTP it is a header."""


def _fields(message: Message) -> dict[str, Any]:
    """Return the scalar fields that are set."""
    return {
        field.name: list(value) if field.is_repeated else value
        for field, value in message.ListFields()
        if field.message_type is None
    }


def _http_piece(body: dict[str, Any]) -> Answer:
    """Return what a whole body or one chunk says."""
    if "error" in body:
        raise RefusedError(_EVENT_CODES[body["error"]["type"]], body["error"]["message"])
    piece = Answer(request_id=body["id"])
    if body.get("usage"):
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        piece.usage = Usage(
            prompt=usage["prompt_tokens"],
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            completion=usage["completion_tokens"],
        )
    for choice in body["choices"]:
        is_completion = "text" in choice
        piece.text = (
            choice["text"] if is_completion else choice.get("message", choice.get("delta", {})).get("content", "")
        )
        piece.finish_reason, piece.stop = choice["finish_reason"], choice.get("stop_reason")
        if choice["logprobs"]:
            piece.logprobs = (_completion_logprobs if is_completion else _chat_logprobs)(choice["logprobs"])
    return piece


def _completion_logprobs(logprobs: dict[str, Any]) -> list[TokenLogprob]:
    names = ("tokens", "token_logprobs", "top_logprobs")
    return [
        TokenLogprob(token=token, logprob=logprob, top=top)
        for token, logprob, top in zip(*(logprobs[name] for name in names), strict=True)
    ]


def _chat_logprobs(logprobs: dict[str, Any]) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            token=each["token"],
            logprob=each["logprob"],
            top={top["token"]: top["logprob"] for top in each["top_logprobs"]},
        )
        for each in logprobs["content"]
    ]
