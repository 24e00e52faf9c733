"""One trace for a request from its client over the router to its replica, also when it moves to another replica."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from urllib.request import Request, urlopen

import pytest
from helpers.fake_replica import FakeReplica
from helpers.polling import until
from helpers.router_harness import router_config, running_router, text_request
from helpers.traces import Traces, gated_replica
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from router.client import AsyncClient, BadRequestError, Client, Delta

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SERVED = [
    "request",
    "request/admission",
    "request/prepare",
    "request/replica_call",
    "request/replica_call/replica",
    "request/replica_call/replica/decode",
    "request/replica_call/replica/prefill",
    "request/replica_call/replica/queue",
]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traces() -> Traces:
    return Traces()


async def settled(traces: Traces, num_spans: int) -> None:
    """Wait until so many spans have ended."""
    await until(lambda: len(traces.spans) >= num_spans)


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}"


def context_of(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}-{span.context.span_id:016x}"


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_request_over_grpc_is_one_trace_from_client_to_replica(traces: Traces) -> None:
    async with (
        gated_replica("a", traces.tracer()) as a,
        running_router(router_config(a.address), tracer=traces.tracer()) as router,
        AsyncClient(router.addresses.grpc, tracer=traces.tracer()) as client,
    ):
        a.step()
        await router.wait_ready(1)
        before_ns = time.time_ns()
        completion = await client.complete(PROMPT, max_tokens=5, request_id="mine")
        await settled(traces, 9)
    assert traces.tree() == ["client", *(f"client/{path}" for path in SERVED)]
    assert len({span.context.trace_id for span in traces.spans}) == 1
    (request,), (replica,), (call,) = map(traces.named, ("weft.request", "weft.replica", "weft.replica_call"))
    usage = {"gen_ai.usage.input_tokens": 8, "gen_ai.usage.output_tokens": 5, "weft.cached_tokens": 0}
    assert attributes(request) == usage | {
        "gen_ai.request.model": "tiny",
        "weft.request_id": "mine",
        "weft.outcome": "length",
    }
    assert attributes(replica) == usage | {
        "weft.replica": "a",
        "weft.generated_before": 0,
        "weft.finish_reason": "length",
    }
    assert attributes(call) == {
        "weft.replica": a.address,
        "weft.choice": "home",
        "weft.predicted_cached_tokens": 0,
    }
    assert [event.name for event in call.events] == ["first token"]
    # The parts follow each other, as long as the usage says.
    parts = [traces.named(f"weft.{name}")[0] for name in ("queue", "prefill", "decode")]
    durations_s = [(part.end_time - part.start_time) / 1e9 for part in parts]  # type: ignore[operator]
    told = completion.usage
    assert durations_s == pytest.approx([told.queue_s, told.prefill_s, told.decode_s], abs=1e-6)
    assert [part.end_time for part in parts[:-1]] == [part.start_time for part in parts[1:]]
    assert before_ns <= (parts[0].start_time or 0) <= (parts[-1].end_time or 0) <= time.time_ns()


async def test_request_over_http_continues_the_trace_of_its_header(traces: Traces) -> None:
    async with (
        gated_replica("a", traces.tracer()) as a,
        running_router(router_config(a.address, http_port=0), tracer=traces.tracer()) as router,
    ):
        a.step()
        await router.wait_ready(1)
        body = json.dumps({"model": "tiny", "prompt": list(PROMPT), "max_tokens": 3}).encode()
        headers = {"content-type": "application/json", "traceparent": PARENT, "tracestate": "vendor=1"}
        asked = Request(f"http://{router.addresses.http}/v1/completions", body, headers)
        await asyncio.to_thread(lambda: urlopen(asked, timeout=10).read())
        await settled(traces, 8)
    assert traces.tree() == SERVED
    (request,) = traces.named("weft.request")
    assert f"00-{parent_of(request)}-01" == PARENT
    assert {context_of(span).split("-")[0] for span in traces.spans} == {PARENT.split("-")[1]}
    assert traces.named("weft.replica")[0].context.trace_state.get("vendor") == "1"


async def test_request_without_a_context_begins_a_trace(traces: Traces) -> None:
    async with (
        gated_replica("a", traces.tracer()) as a,
        running_router(router_config(a.address), tracer=traces.tracer()) as router,
    ):
        a.step()
        await router.wait_ready(1)
        with Client(router.addresses.grpc) as client:
            await asyncio.to_thread(lambda: client.complete(PROMPT, max_tokens=2))
        await settled(traces, 8)
    assert traces.tree() == SERVED
    assert traces.named("weft.request")[0].parent is None


async def first_token(deltas: AsyncGenerator[Delta, None]) -> None:
    async for delta in deltas:
        if delta.token_ids:
            return


async def test_request_that_moves_has_a_call_for_each_replica(traces: Traces) -> None:
    async with (
        gated_replica("a", traces.tracer()) as a,
        gated_replica("b", traces.tracer()) as b,
        running_router(router_config(a.address, b.address), tracer=traces.tracer()) as router,
        AsyncClient(router.addresses.grpc, tracer=traces.tracer()) as client,
    ):
        await router.wait_ready(2)
        deltas = client.generate(PROMPT, max_tokens=9)
        waiting = asyncio.create_task(first_token(deltas))
        await until(lambda: bool(a.num_steps or b.num_steps))
        first, second = (a, b) if a.num_steps else (b, a)
        first.step(3)
        await waiting
        second.step()
        await first.server.stop()
        tokens = [token async for delta in deltas for token in delta.token_ids]
        await settled(traces, 11)
    assert len(tokens) >= 6
    moved = ["request/replica_call", "request/replica_call/replica"]
    assert traces.tree() == sorted(["client", *(f"client/{path}" for path in (*SERVED, *moved))])
    broken, good = traces.named("weft.replica_call")
    assert (broken.status.status_code, good.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    lost, served = traces.named("weft.replica")
    assert [parent_of(span) for span in (lost, served)] == [context_of(span) for span in (broken, good)]
    assert lost.status.description == "the router's stream ended"
    before = attributes(served)["weft.generated_before"]
    assert isinstance(before, int)
    assert before >= 1
    assert traces.named("weft.request")[0].status.status_code is StatusCode.UNSET


async def test_refused_request_says_why(traces: Traces) -> None:
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address), tracer=traces.tracer()) as router,
        AsyncClient(router.addresses.grpc, tracer=traces.tracer()) as client,
    ):
        await router.wait_ready(1)
        with pytest.raises(BadRequestError):
            await client.complete((), max_tokens=2)
        await settled(traces, 3)
    for name in ("weft.client", "weft.request", "weft.prepare"):
        (span,) = traces.named(name)
        assert span.status.status_code is StatusCode.ERROR
        assert "empty" in (span.status.description or "")


async def test_request_that_is_left_ends_its_spans(traces: Traces) -> None:
    async with (
        gated_replica("a", traces.tracer()) as a,
        running_router(router_config(a.address), tracer=traces.tracer()) as router,
        AsyncClient(router.addresses.grpc, tracer=traces.tracer()) as client,
    ):
        await router.wait_ready(1)
        deltas = client.generate(PROMPT, max_tokens=50)
        waiting = asyncio.create_task(first_token(deltas))
        await until(lambda: a.num_steps > 0)
        a.step(2)
        await waiting
        await deltas.aclose()
        await settled(traces, 6)
    assert attributes(traces.named("weft.request")[0])["weft.outcome"] == "cancelled"
    assert traces.named("weft.replica")[0].status.description == "aborted"
    assert traces.named("weft.client")[0].status.status_code is StatusCode.UNSET


async def test_router_that_does_not_trace_passes_nothing_on(traces: Traces) -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        async with AsyncClient(router.addresses.grpc, tracer=traces.tracer()) as client:
            await client.complete("hello", max_tokens=2)
        (submit,) = a.submits
    assert (submit.traceparent, submit.tracestate) == ("", "")


async def test_replica_that_does_not_trace_serves_all_the_same(traces: Traces) -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address), tracer=traces.tracer()) as router:
        await router.wait_ready(1)
        await router.generate(text_request("hello", max_tokens=2))
        await settled(traces, 4)
        (submit,) = a.submits
    (call,) = traces.named("weft.replica_call")
    assert submit.traceparent.startswith(f"00-{context_of(call)}-")
