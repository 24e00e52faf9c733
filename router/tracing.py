"""Spans by OpenTelemetry: made, sampled, exported. Imported only when tracing is on; spans.py says which there are."""

import threading
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.config import TraceProtocol, TracingConfig
from router.spans import TraceContext

_EXPORT_TIMEOUT_S = 5.0
"""How long a collector may take for a batch, and at the end for all that is left."""
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelSpan:
    """A span of OpenTelemetry as spans.Span."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def context(self) -> TraceContext:
        """What the next process needs to make children of this span."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._in_context())
        return tuple(carrier.items())

    def child(self, name: str, *, is_call: bool = False) -> "OtelSpan":
        """Begin a part of this span."""
        kind = SpanKind.CLIENT if is_call else SpanKind.INTERNAL
        return OtelSpan(self._tracer, self._tracer.start_span(name, self._in_context(), kind))

    def add(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Add a part that has ended already, in Unix time."""
        self._tracer.start_span(name, self._in_context(), start_time=begin_ns).end(end_ns)

    def set(self, **attributes: str | int | float) -> None:
        """Note values; a name's double underscores become dots."""
        for name, value in attributes.items():
            self._span.set_attribute(name.replace("__", "."), value)

    def event(self, name: str) -> None:
        """Note that something happened now."""
        self._span.add_event(name)

    def fail(self, message: str) -> None:
        """Note that the work did not succeed."""
        self._span.set_status(Status(StatusCode.ERROR, message))

    def end(self) -> None:
        """The work has ended."""
        self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception):  # leaving early is no failure
            self.fail(str(error) or type(error).__name__)
        self.end()

    def _in_context(self) -> Context:
        return trace.set_span_in_context(self._span, Context())


class OtelTracer:
    """Makes spans with a provider: one that exports, the application's own, or a test's."""

    is_on = True

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("weft")

    @classmethod
    def exporting(cls, config: TracingConfig, *, service: str, instance: str) -> "OtelTracer":
        """Make a tracer that sends spans in batches, from a thread of its own, and drops what it cannot."""
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        sampler = ParentBased(TraceIdRatioBased(config.sample_ratio))
        provider = TracerProvider(sampler=sampler, resource=resource)
        provider.add_span_processor(BatchSpanProcessor(_exporter(config)))
        return cls(provider)

    def accept(self, name: str, context: TraceContext) -> OtelSpan:
        """Begin a span for a call that came from elsewhere, with the context that came with it."""
        parent = _PROPAGATOR.extract(dict(context), Context())
        return OtelSpan(self._tracer, self._tracer.start_span(name, parent, SpanKind.SERVER))

    def begin(self, name: str) -> OtelSpan:
        """Begin a span under the one that is current in this task or thread, if any."""
        return OtelSpan(self._tracer, self._tracer.start_span(name, kind=SpanKind.CLIENT))

    def close(self) -> None:
        """Export what is left. Blocks for a while when nobody takes it, and then leaves it to the end of the process.

        The provider's own patience is for each of its batches, which are several under load.
        """
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_EXPORT_TIMEOUT_S)


def _exporter(config: TracingConfig) -> SpanExporter:
    assert config.endpoint is not None
    match config.protocol:
        case TraceProtocol.GRPC:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            is_plain = config.endpoint.startswith("http://")
            return GrpcExporter(endpoint=config.endpoint, insecure=is_plain, timeout=_EXPORT_TIMEOUT_S)
        case TraceProtocol.HTTP:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            return HttpExporter(endpoint=config.endpoint, timeout=_EXPORT_TIMEOUT_S)
