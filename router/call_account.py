"""What one call is counted as: its meter, its span, its tenant's budget, and the one outcome in which it ends.

dispatch.py says what happens to the call; nothing here changes what its client gets.
"""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

from router.call import GenerateCall, GenerateDelta
from router.directory import ModelRoute
from router.errors import RateLimitedError, RouterError
from router.finish_reason import finish_reason
from router.flight import PreparedRequest
from router.metrics import RouterMetrics
from router.spans import Tracer

_FINISHED = ("stop", "length")

_CANCEL_TOLERANCE_S = 0.05
"""gRPC cancels a call at its deadline too, a little before or after the event loop's clock says so."""
_ROUNDED_UP = 0.01
"""Part of a call's timeout by which its client may cancel it earlier still: gRPC tells a server the timeout in two or
three digits, rounded up."""


class CallAccount:
    """Counts one call from its arrival to its outcome: a context manager around all that is done for it."""

    def __init__(self, call: GenerateCall, metrics: RouterMetrics, tracer: Tracer, *, deadline_s: float | None) -> None:
        """The call arrives now; `deadline_s` is on the event loop's clock."""
        self._call = call
        self._deadline_s = deadline_s
        self._meter = metrics.request(call)
        self._outcome = ""
        self._route: ModelRoute | None = None
        """None until the model is known to be served."""
        self.span = tracer.accept("weft.request", call.trace_context)
        """The parts of the call are its children."""

    @property
    def has_ended(self) -> bool:
        """The last delta has come."""
        return bool(self._outcome)

    def begin(self, route: ModelRoute) -> None:
        """Note which model it asks for. Raises RateLimitedError when its API key may not ask now."""
        self._route = route
        self._meter.begin(route)
        self.span.set(gen_ai__request__model=route.name)
        self._admit()

    def accept(self, request: PreparedRequest) -> None:
        """Note that its values are allowed, and what they become."""
        num_prompt_tokens = len(request.prompt_token_ids) if request.counts_prompt else 0
        self._meter.accept(request.request_id, num_prompt_tokens)
        self.span.set(weft__request_id=request.request_id)
        self._spend(num_prompt_tokens)

    def start(self) -> None:
        """Note that it got its place in flight."""
        self._meter.start()

    def receive(self, delta: GenerateDelta) -> None:
        """Note what the replica gave it."""
        num_tokens = len(delta.token_ids)
        self._meter.receive(num_tokens)
        self._spend(num_tokens)
        if delta.finished is not None:
            self._outcome = finish_reason(delta.finished.reason)
            if self._call.counts_prompt:
                self._meter.num_cached_tokens = delta.finished.usage.cached_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        request = self._call.request
        match error:
            case Exception():
                self._outcome = _outcome_of(error)
                request.failure = request.failure or self._outcome
                self.span.fail(str(error))
                if self._route is None:  # no call as yet: it counts against its key's rate all the same
                    with suppress(RateLimitedError):
                        self._admit()
            case asyncio.CancelledError() | GeneratorExit():
                left = "deadline_exceeded" if self._is_near_deadline() else "cancelled"
                self._outcome = self._outcome or request.failure or left
        self._end(self._outcome or "internal")

    def _is_near_deadline(self) -> bool:
        if self._deadline_s is None or self._call.timeout_s is None:
            return False
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        return left_s < _CANCEL_TOLERANCE_S + _ROUNDED_UP * self._call.timeout_s

    def _admit(self) -> None:
        if self._call.tenant is not None:
            self._call.tenant.admit(self._call.request)

    def _spend(self, num_tokens: int) -> None:
        if self._call.tenant is not None:
            self._call.tenant.spend(num_tokens)

    def _end(self, outcome: str) -> None:
        meter = self._meter
        is_on_time = meter.end(outcome, is_finished=outcome in _FINISHED)
        if self._route is not None and is_on_time is not None:
            self._route.note_served(is_on_time=is_on_time)
        self.span.set(
            weft__outcome=outcome,
            gen_ai__usage__input_tokens=meter.num_prompt_tokens,
            gen_ai__usage__output_tokens=meter.num_tokens,
            weft__cached_tokens=meter.num_cached_tokens,
        )
        self.span.end()


def _outcome_of(error: Exception) -> str:
    if isinstance(error, RateLimitedError):
        return "rate_limited"
    return error.code.name.lower() if isinstance(error, RouterError) else "internal"
