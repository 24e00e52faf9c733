"""A collector of spans: OTLP over gRPC, kept in memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A span that came, and the process that sent it."""

    span: Any
    service: str
    instance: str

    @property
    def name(self) -> str:
        return str(self.span.name)


@dataclass(slots=True, kw_only=True)
class Collector:
    """Everything that came."""

    endpoint: str
    spans: list[Exported] = field(default_factory=list)

    def named(self, name: str) -> Exported:
        """Return the only span of a name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found


def spans_of(request: ExportTraceServiceRequest) -> list[Exported]:
    """Return the spans of a message."""
    found = []
    for part in request.resource_spans:
        resource = {pair.key: pair.value.string_value for pair in part.resource.attributes}
        service, instance = resource["service.name"], resource["service.instance.id"]
        spans = (span for scope in part.scope_spans for span in scope.spans)
        found += [Exported(span=span, service=service, instance=instance) for span in spans]
    return found


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Run a collector for the length of the block."""
    server = grpc.server(ThreadPoolExecutor(1))
    collector = Collector(endpoint=f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")

    class Service(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            collector.spans += spans_of(request)
            return ExportTraceServiceResponse()

    add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
