"""Spans of requests, as those who make them see them: nothing happens unless a tracer is configured.

tracing.py has the tracer that exports; it alone imports OpenTelemetry, and it is imported only when tracing is on. A
trace of a request that moved from one replica to another:

    weft.client                                         the Python SDK, where it was given a tracer
    └── weft.request                                    router: arrival to end
        ├── weft.prepare                                chat template, tokenizer, checks
        ├── weft.admission                              wait for a place in flight
        ├── weft.replica_call                           the stay on one replica, which broke
        └── weft.replica_call                           the stay on the next
            └── weft.replica                            that replica: arrival to end
                ├── weft.queue                          until its first step
                ├── weft.prefill                        until its first token
                └── weft.decode                         until its end
"""

import importlib.util
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from router.config import TracingConfig
from router.errors import RouterConfigError

TraceContext = tuple[tuple[str, str], ...]
"""W3C trace context: `traceparent` and `tracestate` as HTTP headers, gRPC metadata or fields of Submit. Empty: none."""

_KEYS = ("traceparent", "tracestate")


class Span(Protocol):
    """A part of a request. Ended once; as a context manager, at the end of the block."""

    @property
    def context(self) -> TraceContext:
        """What the next process needs to make children of this span."""

    def child(self, name: str, *, is_call: bool = False) -> "Span":
        """Begin a part of this span; `is_call`: another process does it."""

    def add(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Add a part that has ended already, in Unix time."""

    def set(self, **attributes: str | int | float) -> None:
        """Note values; a name's double underscores become dots."""

    def event(self, name: str) -> None:
        """Note that something happened now."""

    def fail(self, message: str) -> None:
        """Note that the work did not succeed."""

    def end(self) -> None:
        """The work has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    """Begins the spans of one process."""

    is_on: bool
    """False: nobody needs to read a trace context."""

    def accept(self, name: str, context: TraceContext) -> Span:
        """Begin a span for a call that came from elsewhere, with the context that came with it."""

    def begin(self, name: str) -> Span:
        """Begin a span under the one that is current in this task or thread, if any."""

    def close(self) -> None:
        """Export what is left. Blocks for a while when nobody takes it."""


class _NoSpan:
    context: TraceContext = ()

    def child(self, name: str, *, is_call: bool = False) -> "_NoSpan":
        return self

    def add(self, name: str, begin_ns: int, end_ns: int) -> None:
        pass

    def set(self, **attributes: str | int | float) -> None:
        pass

    def event(self, name: str) -> None:
        pass

    def fail(self, message: str) -> None:
        pass

    def end(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _NoTracer:
    is_on = False

    def accept(self, name: str, context: TraceContext) -> Span:
        return NO_SPAN

    def begin(self, name: str) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass


NO_SPAN: Span = _NoSpan()
NO_TRACER: Tracer = _NoTracer()


def read_context(pairs: Iterable[tuple[str, str | bytes]]) -> TraceContext:
    """Return the trace context among HTTP headers or gRPC metadata."""
    return tuple((key, value) for key, value in pairs if key in _KEYS and isinstance(value, str))


def check_tracing(config: TracingConfig) -> None:
    """Raise RouterConfigError when tracing is on and OpenTelemetry is not installed."""
    package = f"opentelemetry.exporter.otlp.proto.{config.protocol}"
    if config.endpoint is not None and not _is_installed(package):
        raise RouterConfigError(
            f"tracing.endpoint is {config.endpoint}, but {package} is not installed; allowed: with weft[tracing]"
        )


def make_tracer(config: TracingConfig, *, service: str, instance: str) -> Tracer:
    """Return the tracer of this process, which does nothing when tracing is off.

    Args:
        config: where spans go.
        service: kind of process, such as "weft-router".
        instance: which of them.

    Raises:
        RouterConfigError: OpenTelemetry is not installed.
    """
    if config.endpoint is None:
        return NO_TRACER
    check_tracing(config)
    from router.tracing import OtelTracer  # only those who trace pay for its import

    return OtelTracer.exporting(config, service=service, instance=instance)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
