"""The spans of a replica: one for each traced request, with its parts from what the engine says it took.

The engine knows nothing of traces: it measures each request anyway, and the parts are added when it has ended.
"""

import time

from weft.v1 import replica_pb2

from router.spans import Span, TraceContext, Tracer
from workers.request import RequestId, RequestOutput, Usage


class ReplicaSpans:
    """Keeps the spans of requests that are traced now. Owned by the event loop."""

    def __init__(self, tracer: Tracer, replica_id: str) -> None:
        self._tracer = tracer
        self._replica_id = replica_id
        self._spans: dict[RequestId, tuple[Span, int]] = {}

    def begin(self, engine_id: RequestId, submit: replica_pb2.Submit) -> None:
        """Begin the span of a request, if its router traces it and so do we."""
        if submit.traceparent and self._tracer.is_on:
            context: TraceContext = (("traceparent", submit.traceparent),)
            if submit.tracestate:
                context = (*context, ("tracestate", submit.tracestate))
            span = self._tracer.accept("weft.replica", context)
            span.set(weft__replica=self._replica_id, weft__generated_before=len(submit.generated_token_ids))
            self._spans[engine_id] = span, time.time_ns()

    def end(self, output: RequestOutput) -> None:
        """End the span of a request with its last output."""
        entry = self._spans.pop(output.request_id, None)
        if entry is None:
            return
        span, arrived_ns = entry
        if output.finish is not None:
            span.set(weft__finish_reason=output.finish.reason.value)
            _add_parts(span, arrived_ns, output.finish.usage)
        elif output.error is not None:
            span.fail(str(output.error))
        span.end()

    def drop(self, engine_id: RequestId, reason: str) -> None:
        """End the span of a request that nobody waits for any more."""
        entry = self._spans.pop(engine_id, None)
        if entry is not None:
            entry[0].fail(reason)
            entry[0].end()


def _add_parts(span: Span, arrived_ns: int, usage: Usage) -> None:
    span.set(
        gen_ai__usage__input_tokens=usage.prompt_tokens,
        gen_ai__usage__output_tokens=usage.completion_tokens,
        weft__cached_tokens=usage.cached_tokens,
    )
    begin_ns = arrived_ns
    for name, duration_s in (
        ("weft.queue", usage.queue_s),
        ("weft.prefill", usage.prefill_s),
        ("weft.decode", usage.decode_s),
    ):
        end_ns = begin_ns + round(duration_s * 1e9)
        span.add(name, begin_ns, end_ns)
        begin_ns = end_ns
