"""What the router refuses or reports, and the one table from errors to gRPC and HTTP statuses.

RouterError
├── InvalidRequestError      INVALID_ARGUMENT     400   says what was seen and what is allowed
│   └── ContextLengthError                              prompt and answer do not fit into the model's context
├── UnauthenticatedError     UNAUTHENTICATED      401   no API key, or one that is not known
├── ModelNotFoundError       NOT_FOUND            404   lists the models served
├── OverloadedError          RESOURCE_EXHAUSTED   429   the admission queue is full; has a retry hint
│   └── RateLimitedError                                an API key has used its rate
├── NoReplicaError           UNAVAILABLE          503   no replica is ready for the model
├── DeadlineError            DEADLINE_EXCEEDED    504   the client's deadline passed
├── SlowClientError          CANCELLED            -     the client takes nothing of its answer; over HTTP it is cut off
├── ReplicaFailedError       INTERNAL             500   replicas failed, and so did the retries elsewhere
├── RequestFailedError       INTERNAL             500   this request failed in the engine
├── ProtocolError            (stays inside)             a replica broke the rules of replica.proto
├── ModelFilesError          INTERNAL             500   a model's folder lacks a file, or one is broken
└── RouterConfigError        (at start)                 a setting is out of range, or a port is taken
"""

import math
import re

from grpc import StatusCode

_MAX_END_CHARS = 300


def without_its_middle(message: str) -> str:
    """Return a message that quotes something long with only its two ends."""
    num_left_out = len(message) - 2 * _MAX_END_CHARS
    if num_left_out <= 0:
        return message
    return f"{message[:_MAX_END_CHARS]}... ({num_left_out} characters) ...{message[-_MAX_END_CHARS:]}"


class RouterError(Exception):
    """Base of everything the router raises on purpose; `code` and `http_status` are what its client sees.

    A message that quotes something long keeps its two ends. gRPC clients take at most 8 KiB of it, in which a character
    may need twelve bytes; for a longer one they see RESOURCE_EXHAUSTED in place of `code`.
    """

    code = StatusCode.INTERNAL
    http_status = 500

    def __init__(self, message: str) -> None:
        super().__init__(without_its_middle(message))


class InvalidRequestError(RouterError):
    """The request cannot be served as it is; the message says what was seen and what is allowed."""

    code = StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        """The request field at fault, where there is one; the OpenAI front names it `param`."""

    def renamed(self, name: str, new_name: str) -> "InvalidRequestError":
        """Return the same error for a client that calls a field otherwise."""
        message = re.sub(rf"\b{name}\b", new_name, str(self))
        return type(self)(message, field=new_name if self.field == name else self.field)


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit into the model's context. Some clients then leave out the beginning, and repeat."""


class UnauthenticatedError(RouterError):
    """The request has no API key, or one that is not known."""

    code = StatusCode.UNAUTHENTICATED
    http_status = 401


class ModelNotFoundError(RouterError):
    """No such model; the message lists those served."""

    code = StatusCode.NOT_FOUND
    http_status = 404


class OverloadedError(RouterError):
    """The admission queue is full."""

    code = StatusCode.RESOURCE_EXHAUSTED
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def retry_after_ms(self) -> int:
        """The same in whole milliseconds, rounded up: who comes too early is refused again."""
        return max(1, math.ceil(self.retry_after_s * 1000))


class RateLimitedError(OverloadedError):
    """An API key has used its rate of requests or tokens."""


class NoReplicaError(RouterError):
    """No replica is ready for the model."""

    code = StatusCode.UNAVAILABLE
    http_status = 503


class DeadlineError(RouterError):
    """The client's deadline passed."""

    code = StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class SlowClientError(RouterError):
    """The client takes nothing of its answer."""

    code = StatusCode.CANCELLED


class ReplicaFailedError(RouterError):
    """Replicas failed under the request, and so did the attempts to continue it elsewhere."""


class RequestFailedError(RouterError):
    """This request failed in the engine; others go on."""


class ProtocolError(RouterError):
    """A replica broke the rules of replica.proto; its stream is closed and dialled anew."""


class RouterConfigError(RouterError, ValueError):
    """A setting is out of range, or a listener's port is taken."""


class ModelFilesError(RouterError):
    """A model's folder lacks a file that the router reads, or one is broken; the message names it."""
