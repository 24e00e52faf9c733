"""The router's log of requests: goodput can be counted again from it, off line."""

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest
from helpers.fake_replica import FakeReplica
from helpers.router_harness import RunningRouter, router_config, running_router, text_request
from weft.v1 import inference_pb2 as pb

from router.config import MetricsConfig
from router.tenants import TenantNames

LAX: dict[str, float] = {"target_ttft_s": 1000.0, "target_tpot_s": 1000.0}
TIGHT_S = 1e-12
"""Nothing is as fast."""


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    messages = [record.getMessage() for record in caplog.records if record.name == "router.request_log"]
    return [json.loads(message.removeprefix("request ended: ")) for message in messages]


def recount(requests: list[dict[str, Any]]) -> int:
    """Tokens of finished requests that were in time, from what was measured and not from what the router made of it."""
    return sum(
        request["generation_tokens"]
        for request in requests
        if request["outcome"] in ("stop", "length")
        and (request["ttft_s"] is None or request["ttft_s"] <= request["target_ttft_s"])
        and (request["tpot_s"] is None or request["tpot_s"] <= request["target_tpot_s"])
    )


async def begin(router: RunningRouter, a: FakeReplica, **fields: Any) -> Any:
    """Send a request to a replica, pause that after the first token, and return the call."""
    a.pause()
    call = router.stub.Generate(text_request("x", **fields))
    reading = asyncio.ensure_future(call.read())
    await a.wait_until(lambda: a.num_requests == 1)
    await a.step()
    await reading
    return call


async def finish(call: Any) -> None:
    while not (await call.read()).HasField("finished"):
        pass
    assert await call.read() is grpc.aio.EOF


async def refused(router: RunningRouter, request: pb.GenerateRequest, timeout_s: float = 20.0) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await router.generate(request, timeout_s=timeout_s)
    return error.value.code()


async def ask_in_many_ways(router: RunningRouter, a: FakeReplica) -> None:
    """Each request has a number of tokens of its own, so that a sum says which are in it."""
    await router.generate(text_request("x", request_id="met", max_tokens=1 << 3, **LAX))
    await router.generate(text_request("x", request_id="settings", max_tokens=1 << 4))
    await router.generate(text_request("x", request_id="half", max_tokens=1 << 5, target_ttft_s=1000.0))
    await router.generate(text_request("x", request_id="ttft", max_tokens=1 << 6, target_ttft_s=TIGHT_S))
    bad = text_request("x", request_id="bad", target_ttft_s=-1.0)
    assert await refused(router, bad) is grpc.StatusCode.INVALID_ARGUMENT
    stranger = pb.GenerateRequest(model="strange", text="x", request_id="stranger", **LAX)
    assert await refused(router, stranger) is grpc.StatusCode.NOT_FOUND

    call = await begin(router, a, request_id="tpot", max_tokens=5, target_tpot_s=TIGHT_S)
    a.resume()
    await finish(call)
    call = await begin(router, a, request_id="moved", max_tokens=1 << 7, **LAX)
    a.break_streams()
    a.resume()
    await finish(call)
    call = await begin(router, a, request_id="cancelled", max_tokens=6, **LAX)
    call.cancel()
    await a.wait_until(lambda: a.num_requests == 0)
    call = await begin(router, a, request_id="failed", max_tokens=7, **LAX)
    a.fail_requests(grpc.StatusCode.INTERNAL, "the sampler saw a NaN")
    with pytest.raises(grpc.aio.AioRpcError, match="NaN"):
        await call.read()
    late = text_request("x", request_id="late", **LAX)
    assert await refused(router, late, timeout_s=2.0) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_goodput_equals_a_recount_from_the_log(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsConfig(slo_ttft_s=500.0, slo_tpot_s=500.0, log_requests=True)
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, metrics_port=0, metrics=metrics)) as router,
    ):
        await router.wait_ready(1)
        await ask_in_many_ways(router, a)
        await router.outcomes(11)
        goodput = await router.metric("weft_router_goodput_tokens_total", model="tiny")
        generated = await router.metric("weft_router_generation_tokens_total", model="tiny")
        prompts = await router.metric("weft_router_prompt_tokens_total", model="tiny")
        results = {
            labels["result"]: value
            for labels, value in await router.series("weft_router_slo_requests_total")
            if labels["model"] == "tiny"
        }

    requests = lines(caplog)
    assert generated == sum(request["generation_tokens"] for request in requests)
    assert prompts == sum(request["prompt_tokens"] for request in requests)
    assert goodput == recount(requests) == (1 << 3) + (1 << 4) + (1 << 5) + (1 << 7)
    assert {request["request_id"]: (request["outcome"], request["result"]) for request in requests} == {
        "met": ("length", "met"),
        "settings": ("length", "met"),
        "half": ("length", "met"),
        "ttft": ("length", "ttft_missed"),
        "bad": ("invalid_argument", None),
        "stranger": ("not_found", None),
        "tpot": ("length", "tpot_missed"),
        "moved": ("length", "met"),
        "cancelled": ("cancelled", None),
        "failed": ("internal", "failed"),
        "late": ("deadline_exceeded", "ttft_missed"),
    }
    assert results == {"met": 4, "ttft_missed": 2, "tpot_missed": 1, "failed": 1}
    targets = {request["request_id"]: (request["target_ttft_s"], request["target_tpot_s"]) for request in requests}
    assert (targets["met"], targets["settings"], targets["half"]) == ((1000, 1000), (500, 500), (1000, 500))


async def test_line_tells_whose_request_it_was_and_what_it_cost(caplog: pytest.LogCaptureFixture) -> None:
    config = MetricsConfig(log_requests=True)
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics=config)) as router:
        await router.wait_ready(1)
        for _ in range(2):
            await router.generate(text_request("x" * 12, max_tokens=3, cache_salt="red"))
    first, second = lines(caplog)
    assert first["request_id"].startswith("req-")
    assert (second["model"], second["tenant"]) == ("tiny", TenantNames(1).name(None, "red"))
    assert (second["prompt_tokens"], second["cached_tokens"], second["generation_tokens"]) == (13, 12, 3)
    assert 0 < second["ttft_s"] <= second["ttft_s"] + 2 * second["tpot_s"] <= second["e2e_s"] + 1e-9


async def test_usage_counters_and_lines_agree_where_a_prompt_has_several_choices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"http_port": 0, "metrics_port": 0, "metrics": MetricsConfig(log_requests=True)}
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, **settings)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}", verify=False) as http,
    ):
        await router.wait_ready(1)
        for num_choices in (1, 3):  # the latter find cached blocks
            body = {"prompt": ["x" * 12, "y" * 9], "n": num_choices, "max_tokens": 2}
            usage = (await http.post("/v1/completions", json=body)).json()["usage"]
        await router.outcomes(8)
        counted = [
            int(await router.metric(f"weft_router_{name}_tokens_total", model="tiny") or 0)
            for name in ("prompt", "cached", "generation")
        ]
        predicted = await router.metric("weft_router_predicted_cached_tokens_total", model="tiny")
    names = ("prompt_tokens", "cached_tokens", "generation_tokens")
    logged = [sum(line[name] for line in lines(caplog)) for name in names]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (13 + 10, 12)
    assert counted == logged == [2 * 23, 12 + 8, 4 + 12]
    assert predicted == usage["prompt_tokens_details"]["cached_tokens"] == 12 + 8


async def test_requests_are_not_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        await router.generate(text_request("x"))
    assert lines(caplog) == []


async def test_requests_that_cannot_be_read_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica("a") as a:
        config = router_config(
            a.address, http_port=0, metrics_port=0, max_message_bytes=1024, metrics=MetricsConfig(log_requests=True)
        )
        async with (
            running_router(config) as router,
            httpx.AsyncClient(base_url=f"http://{router.addresses.http}") as http,
        ):
            await router.wait_ready(1)
            for path, body, header, status in (
                ("completions", "{", ("x-request-id", "mine"), 400),
                ("completions", '{"n": 0}', ("x-request-id", "mine"), 400),
                ("chat/completions", '{"messages": 1}', ("x-request-id", "mine"), 400),
                ("completions", "x" * 1025, ("x-request-id", "long"), 413),
                ("completions", '{"prompt": "x"}', ("content-encoding", "gzip"), 415),
                ("completions", '{"prompt": "x"}', ("x-request-timeout", "soon"), 400),
                ("completions", '{"prompt": "x"}', ("x-request-id", "x" * 200), 400),
            ):
                answer = await http.post(f"/v1/{path}", content=body, headers=(header,))
                assert answer.status_code == status
            with pytest.raises(grpc.aio.AioRpcError, match="no prompt"):
                await router.generate(pb.GenerateRequest(request_id="of gRPC"))
            assert await router.outcomes(8) == {"invalid_argument": 8}
    ids = [request["request_id"] for request in lines(caplog)]
    assert [*ids[:4], ids[7]] == ["cmpl-mine", "cmpl-mine", "chatcmpl-mine", "cmpl-long", "of gRPC"]
