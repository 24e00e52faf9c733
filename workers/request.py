"""A request as the engine sees it, and what comes back for it: plain values.

sequence.py holds the state of one in flight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

import msgspec
from weft.limits import MAX_LOGPROBS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_TEMPERATURE

from workers.errors import InvalidRequestError

RequestId = NewType("RequestId", str)

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature only the largest logit has a chance."""


class FinishReason(StrEnum):
    """Why a request ended without an error."""

    STOP = "stop"
    """At a stop token or a stop string."""
    LENGTH = "length"
    """At max_tokens, or where the context is full."""
    ABORT = "abort"
    """Its client went away, or its deadline passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a request ends. Raises InvalidRequestError when a value is out of range."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    seed: int = 0
    """Seed of the counter-based noise, 64 bits unsigned; the router draws one when the client gives none."""
    repetition_penalty: float = 1.0
    """Factor on the logits of tokens in prompt and output (CTRL, arXiv:1909.05858, section 4.1); 1: off."""
    presence_penalty: float = 0.0
    """What the logits of tokens in the output lose."""
    frequency_penalty: float = 0.0
    """What the logits of tokens in the output lose, for each time that they are there."""
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report with each token; None: no log-probabilities at all."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens the sequence has already."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, MAX_TEMPERATURE, f"0 to {MAX_TEMPERATURE:g}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p is {self.top_p}; allowed: more than 0, at most 1")
        _check("top_k", self.top_k, 0, 2**31, "at least 0 (0: off)")
        _check("min_p", self.min_p, 0.0, 1.0, "0 to 1")
        _check("seed", self.seed, 0, 2**64 - 1, "0 to 2**64 - 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise InvalidRequestError(
                f"repetition_penalty is {self.repetition_penalty}; allowed: a finite number, more than 0"
            )
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0, "-2 to 2")
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "-2 to 2")
        _check("max_tokens", self.max_tokens, 1, 2**31, "at least 1")
        _check("min_tokens", self.min_tokens, 0, self.max_tokens, f"0 to max_tokens ({self.max_tokens})")
        _check_length("stop", self.stop, MAX_STOP_STRINGS)
        for text in self.stop:
            _check("length of a stop string", len(text), 1, MAX_STOP_STRING_CHARS, f"1 to {MAX_STOP_STRING_CHARS}")
        _check_length("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if min(self.stop_token_ids, default=0) < 0:
            raise InvalidRequestError(f"stop_token_ids contain {min(self.stop_token_ids)}; allowed: at least 0")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")


def _check(name: str, value: float, low: float, high: float, allowed: str) -> None:
    if not low <= value <= high or math.isinf(value):  # a NaN fails the comparison
        raise InvalidRequestError(f"{name} is {value}; allowed: {allowed}")


def _check_length(name: str, values: Sequence[object], most: int) -> None:
    if len(values) > most:
        raise InvalidRequestError(f"{name} has {len(values)} entries; allowed: at most {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, or the rest of one that began elsewhere: a pure function of these fields gives every later token."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...] = ()
    """Tokens accepted before, here or on another replica."""
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first under the "priority" policy."""
    cache_salt: str = ""
    deadline_s: float | None = None
    """On the engine's clock (time.monotonic); the request is aborted then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the model's own distribution: before penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most probable first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost on this replica."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache, when the request was first scheduled or later."""
    completion_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a request ended without an error."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token_id: int | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave one request. The last output of a request has `finish` or `error`, never both."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text that became certain; the texts of all outputs, joined, are the request's text."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    error: Exception | None = None
    """InvalidRequestError, RequestFailedError, QueueFullError, EngineStoppedError or GroupFailedError."""
