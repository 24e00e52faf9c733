"""What the Python SDK takes, gives and raises; client_wire.py has the same on the wire, client.py makes the calls.

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

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import grpc

Prompt = str | Sequence[int]
"""Text, or token ids."""
Messages = Sequence[Mapping[str, str | Sequence[str | Mapping[str, str]] | None]]
"""A conversation: each message has `role`, `content` and, where wanted, `name`. A content is a string, or a list of
strings and `{"type": "text", "text": ...}`, which are joined by line ends; an assistant's may be None."""


class ClientError(Exception):
    """A call failed; subclasses tell apart what a caller may want to handle."""

    def __init__(self, message: str, *, code: grpc.StatusCode, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        """When to try again, where the router said it."""

    def __reduce__(self) -> tuple[Callable[..., "ClientError"], tuple[object, ...]]:
        """Say how it is made again, in another process too."""
        return partial(type(self), code=self.code, retry_after_s=self.retry_after_s), self.args


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
    """The mean time of each further token within which it does so; else the service's own."""


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
