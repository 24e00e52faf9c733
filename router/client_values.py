"""What the Python SDK gives and raises, and its translation from and to the wire; client.py makes the calls.

ClientError                    any other status; `code` has it
├── BadRequestError            INVALID_ARGUMENT     the message says what was seen and what is allowed; also
│                                                   RESOURCE_EXHAUSTED for a message that is too large
├── UnauthenticatedError       UNAUTHENTICATED      no API key, or one that the router does not know
├── NotFoundError              NOT_FOUND            unknown model
├── OverloadedError            RESOURCE_EXHAUSTED   the router is full, or a key's rate used up; see `retry_after_s`
├── UnavailableError           UNAVAILABLE          no router there, or no replica is ready
├── DeadlineError              DEADLINE_EXCEEDED    `timeout_s` passed
├── CallCancelledError         CANCELLED            the router, or closing the client, ended the call
└── ServerError                INTERNAL, UNKNOWN    the request failed inside
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import grpc
from weft.v1 import inference_pb2 as pb

Prompt = str | Sequence[int]
"""Text, or token ids."""
Messages = Sequence[Mapping[str, str]]
"""A conversation: each message has `role`, `content` and, where wanted, `name`."""


_MAX_TIMEOUT_S = 1e9  # as over HTTP


class ClientError(Exception):
    """A call failed; subclasses tell apart what a caller may want to handle."""

    def __init__(self, message: str, *, code: grpc.StatusCode, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        """When to try again, where the router said it."""


class BadRequestError(ClientError):
    """The request cannot be served as it is; the message says what was seen and what is allowed."""


class UnauthenticatedError(ClientError):
    """The router wants an API key, and this call had none that it knows."""


class NotFoundError(ClientError):
    """No such model."""


class OverloadedError(ClientError):
    """The router is full, or the API key has used its rate; try again after `retry_after_s`."""


class UnavailableError(ClientError):
    """There is no router at this address, or no replica is ready."""


class DeadlineError(ClientError):
    """The timeout passed."""


class CallCancelledError(ClientError):
    """The router, or closing the client, ended the call."""


class ServerError(ClientError):
    """The request failed inside the cluster."""


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

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


class Sampling(TypedDict, total=False):
    """Sampling parameters by keyword; weft.v1.SamplingParams says what each means, and the model has the defaults."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    skip_special_tokens: bool
    include_stop_str_in_output: bool


class ChatOptions(TypedDict, total=False):
    """How messages become a prompt."""

    chat_template_kwargs: Mapping[str, object]
    """Variables for the model's chat template, such as {"enable_thinking": False}; values as in JSON."""
    add_generation_prompt: bool
    """End the prompt with what opens the assistant's turn; by default, unless the final message is continued."""
    continue_final_message: bool
    """End the prompt within the last message: the answer continues it."""


class Options(Sampling, ChatOptions, total=False):
    """Everything that may be said about a generation besides its prompt."""

    model: str
    """May be left out where one model is served."""
    timeout_s: float | None
    """Deadline of the call, as the scheduler sees it too; None: none."""
    priority: int
    """Lower is served first where the scheduling policy looks at it."""
    cache_salt: str
    """Requests with different salts never share cached prefixes."""
    request_id: str
    """For logs; the router makes one when there is none."""
    target_ttft_s: float
    """The time to the first token within which the router counts the request as goodput; else the service's own."""
    target_tpot_s: float
    """The same for the mean time of each further token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most probable first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost; times are the engine's."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    completion_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a request ended."""

    reason: str
    """"stop", "length" or "abort"."""
    stopped_by: str | int | None
    """The stop string or the token id that ended it."""
    usage: Usage
    replica_ids: tuple[str, ...]
    """The replicas that served it, in order; more than one after a failover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What came at once of a generation. The last one has `finish`."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole generation."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    stopped_by: str | int | None
    usage: Usage
    replica_ids: tuple[str, ...]
    ttft_s: float | None
    """From the call to its first token, seen from here; None where there was no token."""
    tpot_s: float | None
    """Mean time of each further token, seen from here; None with fewer than two tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that the cluster serves."""

    name: str
    max_context: int
    vocab_size: int
    ready_replicas: int


class Collector:
    """Puts deltas together to a Completion, and takes the time at each."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start the clock: the call is made now."""
        self._clock = clock
        self._started_at = clock()
        self._first_at = self._last_at = 0.0
        self._deltas: list[Delta] = []
        self._num_tokens = 0

    def add(self, delta: Delta) -> None:
        """Take in a delta that came now."""
        if delta.token_ids:
            self._last_at = self._clock()
            if not self._num_tokens:
                self._first_at = self._last_at
            self._num_tokens += len(delta.token_ids)
        self._deltas.append(delta)

    def completion(self) -> Completion:
        """Return what came."""
        last = self._deltas[-1]
        assert last.finish is not None, "a stream that ends well ends with `finished`"
        return Completion(
            request_id=last.request_id,
            model=last.model,
            text="".join(delta.text for delta in self._deltas),
            token_ids=tuple(token_id for delta in self._deltas for token_id in delta.token_ids),
            logprobs=tuple(each for delta in self._deltas for each in delta.logprobs),
            finish_reason=last.finish.reason,
            stopped_by=last.finish.stopped_by,
            usage=last.finish.usage,
            replica_ids=last.finish.replica_ids,
            ttft_s=self._first_at - self._started_at if self._num_tokens else None,
            tpot_s=(self._last_at - self._first_at) / (self._num_tokens - 1) if self._num_tokens > 1 else None,
        )


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
    with _only_what_fits():
        request = pb.GenerateRequest(
            model=options.get("model", ""),
            priority=options.get("priority", 0),
            cache_salt=options.get("cache_salt", ""),
            request_id=options.get("request_id", ""),
            target_ttft_s=options.get("target_ttft_s"),
            target_tpot_s=options.get("target_tpot_s"),
            sampling=_to_sampling(options),
        )
        if messages is not None:
            request.chat.CopyFrom(_to_chat(messages, **chat))
        elif isinstance(prompt, str):
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
    if timeout_s is None or timeout_s <= _MAX_TIMEOUT_S:
        return timeout_s
    raise _refused(f"timeout_s is {timeout_s}; allowed: at most {_MAX_TIMEOUT_S:.0f}, or None for no deadline")


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


def to_error(error: grpc.RpcError) -> ClientError:
    """Return the typed error of a failed call."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError), "the errors of calls say their status"
    code = error.code()
    retry_after_ms = dict(error.trailing_metadata() or ()).get("retry-after-ms")
    kind = _ERRORS.get(code, ClientError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_after_ms is None:
        kind = BadRequestError
    retry_after_s = None if retry_after_ms is None else float(retry_after_ms) / 1000
    return kind(error.details() or code.name, code=code, retry_after_s=retry_after_s)


@contextmanager
def _only_what_fits(what: str = "a value") -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:  # protobuf's, for a value of the wrong type or range
        raise _refused(f"{what} does not fit its field: {error}") from error


def _refused(message: str) -> BadRequestError:
    return BadRequestError(message, code=grpc.StatusCode.INVALID_ARGUMENT)


def _to_sampling(options: Options) -> pb.SamplingParams:
    """Return the wire form of what is said about sampling."""
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name in Sampling.__optional_keys__}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    try:
        return pb.SamplingParams(**sampling)
    except (TypeError, ValueError):  # which do not say of what
        for name, value in sampling.items():
            with _only_what_fits(name):
                pb.SamplingParams(**{name: value})
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
    allowed = {"role", "content", "name"}
    for index, message in enumerate(messages):
        if not {"role", "content"} <= message.keys() <= allowed:
            raise _refused(f"messages[{index}] has the keys {sorted(message)}; allowed: role, content and maybe name")
    return pb.ChatPrompt(
        messages=[pb.ChatMessage(**message) for message in messages],
        chat_template_kwargs_json=json.dumps(chat_template_kwargs, allow_nan=False) if chat_template_kwargs else "",
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )


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
        reason=_FINISH_REASONS.get(finished.reason, "stop"),  # one that only a newer router knows
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
