"""Tracing on and off: what is exported, what is sampled, and what is not even imported."""

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from helpers.otlp import Collector, running_collector, spans_of
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from router.config import TraceProtocol, TracingConfig
from router.errors import RouterConfigError
from router.spans import NO_SPAN, NO_TRACER, Tracer, check_tracing, make_tracer, read_context
from router.tracing import OtelTracer


@pytest.fixture
def grpc_collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture
def http_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.spans += spans_of(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield collector
    server.shutdown()
    thread.join()
    server.server_close()


def tracer_to(collector: Collector, *, ratio: float = 1.0, protocol: TraceProtocol = TraceProtocol.GRPC) -> Tracer:
    config = TracingConfig(endpoint=collector.endpoint, protocol=protocol, sample_ratio=ratio)
    return make_tracer(config, service="weft-router", instance="router-7")


@pytest.mark.parametrize("protocol", TraceProtocol)
def test_spans_reach_a_collector(request: pytest.FixtureRequest, protocol: TraceProtocol) -> None:
    collector: Collector = request.getfixturevalue(f"{protocol}_collector")
    tracer = tracer_to(collector, protocol=protocol)
    with tracer.begin("outer") as outer, outer.child("inner", is_call=True) as inner:
        inner.set(weft__replica="a", tokens=3)
    tracer.close()
    sent = collector.named("inner")
    assert (sent.service, sent.instance) == ("weft-router", "router-7")
    assert sent.span.parent_span_id == collector.named("outer").span.span_id
    assert {pair.key for pair in sent.span.attributes} == {"weft.replica", "tokens"}


@pytest.mark.parametrize(("flag", "ratio", "num_exported"), [("00", 1.0, 0), ("01", 0.0, 1)])
def test_callers_decision_stands_whatever_the_ratio(
    grpc_collector: Collector, flag: str, ratio: float, num_exported: int
) -> None:
    tracer = tracer_to(grpc_collector, ratio=ratio)
    context = (("traceparent", f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flag}"),)
    with tracer.accept("kept", context) as span:
        assert span.context[0][1].endswith(f"-{flag}")
    tracer.close()
    assert len(grpc_collector.spans) == num_exported


def test_ratio_of_zero_traces_no_request_without_a_context(grpc_collector: Collector) -> None:
    tracer = tracer_to(grpc_collector, ratio=0.0)
    tracer.accept("lost", ()).end()
    tracer.close()
    assert grpc_collector.spans == []


def test_a_collector_that_takes_nothing_delays_the_end_by_one_timeout_however_much_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    class Waits(SpanProcessor):
        def shutdown(self) -> None:
            may_end.wait(30)
            has_ended.set()

    monkeypatch.setattr("router.tracing._EXPORT_TIMEOUT_S", 0.01)
    provider = TracerProvider()
    provider.add_span_processor(Waits())
    OtelTracer(provider).close()
    assert not has_ended.is_set()
    may_end.set()


def test_no_endpoint_means_nothing_at_all() -> None:
    assert make_tracer(TracingConfig(), service="weft-router", instance="r") is NO_TRACER
    assert NO_TRACER.accept("a", ()) is NO_TRACER.begin("b") is NO_SPAN.child("c") is NO_SPAN
    assert NO_SPAN.context == ()


def test_router_without_tracing_imports_no_opentelemetry() -> None:
    code = (
        "import sys, router.app, router.__main__, router.client, cluster.replica_server\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
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
        ({"endpoint": "127.0.0.1:4317"}, "endpoint is '127.0.0.1:4317'; allowed: a URL, http:// or https://"),
        ({"sample_ratio": 1.5}, "sample_ratio is 1.5; allowed: 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RouterConfigError, match=message):
        TracingConfig(**settings)


def test_context_is_read_from_headers_and_metadata() -> None:
    pairs = [("traceparent", "00-a-b-01"), ("x", "y"), ("tracestate", "v=1"), ("traceparent", b"bytes")]
    assert read_context(pairs) == (("traceparent", "00-a-b-01"), ("tracestate", "v=1"))
