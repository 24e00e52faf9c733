"""What was seen of each request: when it was due, sent and answered, token by token. A driver fills it.

statistics.py makes numbers of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class ErrorKind(StrEnum):
    """How a request failed, in the same words for gRPC and HTTP."""

    BAD_REQUEST = "bad request"
    UNAUTHENTICATED = "unauthenticated"
    NOT_FOUND = "not found"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    SERVER = "server error"
    OTHER = "other"


class CallError(Exception):
    """A request failed."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the service says a request took."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """One request. Times are those of one clock, in seconds."""

    num_asked: int
    """Tokens to generate."""
    due_s: float | None
    """When an open loop wanted to send it; None: nobody said when."""
    sent_s: float
    first_s: float | None = None
    """When the first token came."""
    last_s: float | None = None
    """When the last token so far came."""
    gaps_s: list[float] = field(default_factory=list)
    """Times between one token and the next; 0 between those that came together."""
    num_seen: int = 0
    """How many tokens were seen; over HTTP pieces of text, which may be fewer."""
    usage: Usage | None = None
    error: CallError | None = None
    ended_s: float | None = None
    """When its answer was complete, or when it failed."""

    def note(self, num_tokens: int, now_s: float) -> None:
        """Note that tokens came now. With 0 only the time counts: of a token that has no text, over HTTP."""
        if num_tokens and self.num_seen and self.last_s is not None:
            self.gaps_s.append(now_s - self.last_s)
        self.gaps_s += [0.0] * (num_tokens - 1)
        self.num_seen += num_tokens
        self.last_s = now_s
        if self.first_s is None:
            self.first_s = now_s

    def finish(self, usage: Usage, now_s: float) -> None:
        """Note that its answer is complete now."""
        self.usage, self.ended_s = usage, now_s

    def fail(self, error: CallError, now_s: float) -> None:
        """Note that the request failed now."""
        self.error, self.ended_s = error, now_s

    @property
    def end_s(self) -> float:
        """When something was last seen of the request."""
        return max(time_s for time_s in (self.sent_s, self.last_s, self.ended_s) if time_s is not None)

    @property
    def is_answered(self) -> bool:
        """Whether the request ended well."""
        return self.usage is not None

    @property
    def num_in(self) -> int:
        """How many tokens the prompt has."""
        return 0 if self.usage is None else self.usage.prompt_tokens

    @property
    def num_out(self) -> int:
        """How many tokens were generated."""
        return 0 if self.usage is None else self.usage.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time from sending to the first token."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each further token; None with fewer than two."""
        if self.first_s is None or self.last_s is None or self.num_out < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_out - 1)

    @property
    def e2e_s(self) -> float | None:
        """Time from sending to the last token."""
        return None if self.last_s is None else self.last_s - self.sent_s

    @property
    def lag_s(self) -> float | None:
        """How much later than due the request was sent."""
        return None if self.due_s is None else self.sent_s - self.due_s


Clock = Callable[[], float]
