"""The Python SDK's translation from and to the wire; client_values.py says what its values and errors mean."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from weft.limits import MAX_TIMEOUT_S
from weft.v1 import inference_pb2 as pb

from router.client_values import (
    BadRequestError,
    CallCancelledError,
    ChatOptions,
    ClientError,
    DeadlineError,
    Delta,
    Finish,
    Messages,
    ModelInfo,
    NotFoundError,
    Options,
    OverloadedError,
    Prompt,
    Sampling,
    ServerError,
    TokenLogprobs,
    UnauthenticatedError,
    UnavailableError,
    Usage,
)
from router.errors import InvalidRequestError
from router.finish_reason import finish_reason
from router.message_content import content_text

WAS_CLOSED = "the client was closed"

_M = TypeVar("_M", bound=Message)
_REQUEST_OPTIONS = ("model", "priority", "cache_salt", "request_id", "target_ttft_s", "target_tpot_s")

_RANGES: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_INT32: "integers from -2**31 to 2**31 - 1",
    FieldDescriptor.CPPTYPE_UINT32: "integers from 0 to 2**32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "integers from 0 to 2**64 - 1",
}
"""What a field of these types holds, which protobuf's errors do not say."""

_ERRORS: Mapping[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.UNKNOWN: ServerError,
}


def generate_request(prompt: Prompt | None, messages: Messages | None, options: Options) -> pb.GenerateRequest:
    """Return the wire form of a call.

    Raises:
        BadRequestError: not exactly one of `prompt` and `messages`, an unknown option, or a value that does not fit its
            field; the router checks the rest.
    """
    if (prompt is None) == (messages is None):
        raise _refused("prompt and messages are both given, or both missing; allowed: exactly one of them")
    unknown = sorted(options.keys() - Options.__optional_keys__)
    if unknown:
        raise _refused(f"unknown options {unknown}; allowed: {sorted(Options.__optional_keys__)}")
    chat: ChatOptions = {name: value for name, value in options.items() if name in ChatOptions.__optional_keys__}  # type: ignore[assignment]
    if prompt is not None:
        _refuse_chat_options(chat)
    if isinstance(prompt, bytes | bytearray):  # whose integers are no token ids
        raise _refused(f"prompt is of type {type(prompt).__name__}; allowed: text or token ids")
    request = _build(pb.GenerateRequest, {name: value for name, value in options.items() if name in _REQUEST_OPTIONS})
    request.sampling.CopyFrom(_to_sampling(options))
    if messages is not None:
        with _only_what_fits():
            request.chat.CopyFrom(_to_chat(messages, **chat))
        return request
    with _only_what_fits("prompt", "; allowed: a text or token ids; a conversation is messages"):
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return request


def tokenize_request(
    prompt: str | Messages, model: str, add_special_tokens: bool, chat: ChatOptions
) -> pb.TokenizeRequest:
    """Return the wire form of a text or a conversation to tokenize. Raises BadRequestError."""
    with _only_what_fits():
        if isinstance(prompt, str):
            _refuse_chat_options(chat)
            return pb.TokenizeRequest(model=model, text=prompt, add_special_tokens=add_special_tokens)
        return pb.TokenizeRequest(model=model, chat=_to_chat(prompt, **chat))


def detokenize_request(token_ids: Sequence[int], model: str, skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """Return the wire form of token ids to make text of. Raises BadRequestError."""
    with _only_what_fits():
        return pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)


def check_timeout(timeout_s: float | None) -> float | None:
    """Return it. Raises BadRequestError for infinity and such, which gRPC takes for a deadline that has passed."""
    with _only_what_fits("timeout_s"):
        if timeout_s is None or timeout_s <= MAX_TIMEOUT_S:
            return timeout_s
        message = f"timeout_s is {timeout_s}; allowed: at most {MAX_TIMEOUT_S:.0f}, or None for no deadline"
    raise _refused(message)


def to_delta(response: pb.GenerateResponse) -> Delta:
    """Return a delta as it came."""
    return Delta(
        request_id=response.request_id,
        model=response.model,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(_to_logprobs(position) for position in response.logprobs),
        finish=_to_finish(response.finished) if response.HasField("finished") else None,
    )


def to_models(response: pb.ListModelsResponse) -> list[ModelInfo]:
    """Return the models of a listing."""
    return [
        ModelInfo(
            name=model.name,
            max_context=model.max_context,
            vocab_size=model.vocab_size,
            ready_replicas=model.ready_replicas,
        )
        for model in response.models
    ]


def to_error(error: grpc.RpcError, *, timeout_s: float | None, is_closed: bool) -> ClientError:
    """Return the typed error of a failed call, which had so long, by a client that may be closed."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError), "the errors of calls say their status"
    code = error.code()
    retry_after_ms = dict(error.trailing_metadata() or ()).get("retry-after-ms")
    kind = _ERRORS.get(code, ClientError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_after_ms is None:
        kind = BadRequestError
    retry_after_s = None if retry_after_ms is None else float(retry_after_ms) / 1000
    message = error.details() or code.name
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and "deadline exceeded" in message.lower():  # gRPC's words, here
        message = f"the call did not end within {timeout_s} s"
    elif code is grpc.StatusCode.CANCELLED and is_closed:
        message = WAS_CLOSED
    return kind(message, code=code, retry_after_s=retry_after_s)


@contextmanager
def _only_what_fits(what: str = "a value", advice: str = "") -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # of the wrong type or range, or too deep
        raise _refused(f"{what} does not fit its field: {error}{advice}") from error


def _refused(message: str) -> BadRequestError:
    return BadRequestError(message, code=grpc.StatusCode.INVALID_ARGUMENT)


def _to_sampling(options: Options) -> pb.SamplingParams:
    """Return the wire form of what is said about sampling."""
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name in Sampling.__optional_keys__}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    return _build(pb.SamplingParams, sampling)


def _build(kind: type[_M], fields: Mapping[str, Any]) -> _M:
    """Return the message of these fields. Raises BadRequestError, which names the one whose value does not fit."""
    try:
        return kind(**fields)
    except (TypeError, ValueError, OverflowError):  # which do not say of what
        for name, value in fields.items():
            allowed = _RANGES.get(kind.DESCRIPTOR.fields_by_name[name].cpp_type)
            with _only_what_fits(name, f"; allowed: {allowed}" if allowed else ""):
                kind(**{name: value})
        raise


def _refuse_chat_options(chat: Mapping[str, object]) -> None:
    if asked := sorted(name for name, value in chat.items() if value):
        raise _refused(f"{', '.join(asked)} with a prompt that is no conversation; allowed: with messages")


def _to_chat(
    messages: Messages,
    *,
    chat_template_kwargs: Mapping[str, object] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
) -> pb.ChatPrompt:
    """Return the wire form of a conversation."""
    with _only_what_fits("chat_template_kwargs"):
        kwargs_json = json.dumps(chat_template_kwargs, allow_nan=False) if chat_template_kwargs else ""
    return pb.ChatPrompt(
        messages=[_to_message(index, message) for index, message in enumerate(messages)],
        chat_template_kwargs_json=kwargs_json,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )


_MAYBE = ("name", "reasoning_content", "tool_call_id")
"""What a message need not say."""


def _to_message(index: int, message: Mapping[str, Any]) -> pb.ChatMessage:
    if not isinstance(message, Mapping):
        raise _refused(
            f"messages[{index}] is of type {type(message).__name__}; allowed: a mapping with role and content"
        )
    if not {"role"} <= message.keys() <= {"role", "content", *_MAYBE}:
        allowed = f"role, content and maybe {', '.join(_MAYBE)}"
        raise _refused(f"messages[{index}] has the keys {sorted(message)}; allowed: {allowed}")
    try:
        text = content_text(message.get("content"), role=message["role"], place=f"messages[{index}].content")
    except InvalidRequestError as error:
        raise _refused(str(error)) from error
    return pb.ChatMessage(role=message["role"], content=text, **{key: message.get(key) or "" for key in _MAYBE})


def _to_logprobs(position: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=position.chosen.token_id,
        logprob=position.chosen.logprob,
        top=tuple((each.token_id, each.logprob) for each in position.top),
    )


def _to_finish(finished: pb.Finished) -> Finish:
    stopped_by: str | int | None = None
    match finished.WhichOneof("stopped_by"):
        case "stop_string":
            stopped_by = finished.stop_string
        case "stop_token_id":
            stopped_by = finished.stop_token_id
    usage = finished.usage
    return Finish(
        reason=finish_reason(finished.reason),
        stopped_by=stopped_by,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            queue_s=usage.queue_s,
            prefill_s=usage.prefill_s,
            decode_s=usage.decode_s,
        ),
        replica_ids=tuple(finished.replica_ids),
    )
