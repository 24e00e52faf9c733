"""Tracing on and off: what is exported, what is sampled, and what is not even imported."""

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from router.config import TraceProtocol, TracingConfig
from router.errors import RouterConfigError
from router.spans import NO_SPAN, NO_TRACER, check_tracing, make_tracer, read_context

Spans = dict[str, Any]


def spans_of(request: ExportTraceServiceRequest) -> Spans:
    """Return the spans by name, and the resource's attributes under the empty name."""
    (resource_spans,) = request.resource_spans
    spans: Spans = {span.name: span for scope in resource_spans.scope_spans for span in scope.spans}
    spans[""] = {pair.key: pair.value.string_value for pair in resource_spans.resource.attributes}
    return spans


@pytest.fixture
def grpc_collector() -> Iterator[tuple[TracingConfig, list[Spans]]]:
    received: list[Spans] = []

    class Collector(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            received.append(spans_of(request))
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield TracingConfig(endpoint=f"http://127.0.0.1:{port}"), received
    server.stop(None)


@pytest.fixture
def http_collector() -> Iterator[tuple[TracingConfig, list[Spans]]]:
    received: list[Spans] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(spans_of(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    yield TracingConfig(endpoint=url, protocol=TraceProtocol.HTTP), received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("collector", ["grpc_collector", "http_collector"])
def test_spans_reach_a_collector(request: pytest.FixtureRequest, collector: str) -> None:
    config, received = request.getfixturevalue(collector)
    tracer = make_tracer(config, service="weft-router", instance="router-7")
    with tracer.begin("outer") as outer, outer.child("inner", is_call=True) as inner:
        inner.set(weft__replica="a", tokens=3)
    tracer.close()
    (spans,) = received
    assert (spans[""]["service.name"], spans[""]["service.instance.id"]) == ("weft-router", "router-7")
    assert spans["inner"].parent_span_id == spans["outer"].span_id
    assert {pair.key for pair in spans["inner"].attributes} == {"weft.replica", "tokens"}


@pytest.mark.parametrize(("flag", "exported"), [("00", []), ("01", ["kept"])])
def test_callers_decision_stands_whatever_the_ratio(
    grpc_collector: tuple[TracingConfig, list[Spans]], flag: str, exported: list[str]
) -> None:
    config, received = grpc_collector
    ratio = 1.0 if flag == "00" else 0.0
    tracer = make_tracer(
        TracingConfig(endpoint=config.endpoint, sample_ratio=ratio), service="weft-router", instance="r"
    )
    context = (("traceparent", f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flag}"),)
    with tracer.accept("kept", context) as span:
        assert span.context[0][1].endswith(f"-{flag}")
    tracer.close()
    assert [name for spans in received for name in spans if name] == exported


def test_ratio_of_zero_traces_no_request_without_a_context(grpc_collector: tuple[TracingConfig, list[Spans]]) -> None:
    config, received = grpc_collector
    tracer = make_tracer(TracingConfig(endpoint=config.endpoint, sample_ratio=0.0), service="weft-router", instance="r")
    tracer.accept("lost", ()).end()
    tracer.close()
    assert received == []


def test_no_endpoint_means_nothing_at_all() -> None:
    assert make_tracer(TracingConfig(), service="weft-router", instance="r") is NO_TRACER
    assert NO_TRACER.accept("a", ()) is NO_TRACER.begin("b") is NO_SPAN.child("c") is NO_SPAN
    assert NO_SPAN.context == ()


def test_router_without_tracing_imports_no_opentelemetry() -> None:
    code = (
        "import sys, router.app, router.__main__, router.client, cluster.replica_server\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_tracing_without_the_packages_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = TracingConfig(endpoint="http://127.0.0.1:4317")
    with pytest.raises(RouterConfigError, match=r"not installed; allowed: with weft\[tracing\]"):
        check_tracing(config)
    check_tracing(TracingConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoint": "127.0.0.1:4317"}, "tracing.endpoint is '127.0.0.1:4317'; allowed: a URL, http:// or https://"),
        ({"sample_ratio": 1.5}, "tracing.sample_ratio is 1.5; allowed: 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RouterConfigError, match=message):
        TracingConfig(**settings)


def test_context_is_read_from_headers_and_metadata() -> None:
    pairs = [("traceparent", "00-a-b-01"), ("x", "y"), ("tracestate", "v=1"), ("traceparent", b"bytes")]
    assert read_context(pairs) == (("traceparent", "00-a-b-01"), ("tracestate", "v=1"))
