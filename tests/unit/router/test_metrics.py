"""How a request is counted: by the targets, by tenant, and from zero on."""

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import grpc
import httpx
import pytest
from helpers.fake_replica import FakeReplica
from helpers.polling import poll
from helpers.router_harness import router_config, running_router, text_request
from weft.v1 import inference_pb2 as pb

from router.breaker import Breaker
from router.call import GenerateCall
from router.call_account import CallAccount
from router.config import AdmissionConfig, BreakerConfig, MetricsConfig
from router.directory import ModelRoute
from router.keys import KeyEntry, Tenant
from router.load import LoadEstimate
from router.metrics import RequestMeter, RouterMetrics
from router.policy import RoundRobin
from router.replica import ReplicaLink
from router.route import ServedModel
from router.spans import NO_TRACER
from router.tenants import NO_TENANT, OTHER_TENANTS, TenantNames


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CONFIG = MetricsConfig(slo_ttft_s=1.0, slo_tpot_s=0.1, max_tenants=2)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> RouterMetrics:
    return RouterMetrics(CONFIG, clock)


def arrive(metrics: RouterMetrics) -> RequestMeter:
    meter = metrics.request(GenerateCall(sampling=pb.SamplingParams()))
    meter.model = "m"
    return meter


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"weft_router_{name}", {"model": "m", **labels}) or 0.0


@pytest.mark.parametrize(
    ("first_s", "gap_s", "outcome", "result", "goodput_tokens"),
    [
        (1.0, 0.1, "stop", "met", 5),
        (1.01, 0.1, "stop", "ttft_missed", 0),
        (1.0, 0.11, "length", "tpot_missed", 0),
        (0.5, 0.01, "internal", "failed", 0),
        (1.01, 0.01, "cancelled", "ttft_missed", 0),
        (0.5, 0.01, "cancelled", None, 0),
        (None, 0, "deadline_exceeded", "ttft_missed", 0),
        (None, 0, "resource_exhausted", "failed", 0),
        (None, 0, "cancelled", None, 0),
        (None, 0, "invalid_argument", None, 0),
        (None, 0, "rate_limited", None, 0),
    ],
)
def test_targets_decide_what_a_request_counts_as(
    metrics: RouterMetrics,
    clock: Clock,
    first_s: float | None,
    gap_s: float,
    outcome: str,
    result: str | None,
    goodput_tokens: int,
) -> None:
    meter = arrive(metrics)
    if first_s is not None:
        clock.now_s = first_s
        meter.receive(1)
        clock.now_s += 4 * gap_s
        meter.receive(4)
    meter.end(outcome, is_finished=outcome in ("stop", "length"))
    results = {
        r: value(metrics, "slo_requests_total", result=r) for r in ("met", "ttft_missed", "tpot_missed", "failed")
    }
    assert {r for r, number in results.items() if number} == ({result} if result else set())
    assert value(metrics, "goodput_tokens_total") == goodput_tokens
    assert value(metrics, "requests_total", outcome=outcome) == 1


@pytest.mark.parametrize(
    ("told_s", "early_s", "outcome"),
    [
        (1.24, 1.24 - 1.234, "deadline_exceeded"),
        (10.6, 10.6 - 10.51, "deadline_exceeded"),
        (101.0, 101.0 - 100.1, "deadline_exceeded"),
        (3610.0, 3610.0 - 3601.0, "deadline_exceeded"),
        (1.24, 0.5, "cancelled"),
        (101.0, 2.0, "cancelled"),
        (None, 0.0, "cancelled"),
    ],
)
async def test_call_whose_client_sees_its_deadline_before_the_rounded_one_that_it_told_has_missed_it(
    metrics: RouterMetrics, told_s: float | None, early_s: float, outcome: str
) -> None:
    deadline_s = None if told_s is None else asyncio.get_running_loop().time() + early_s
    call = GenerateCall(sampling=pb.SamplingParams(), timeout_s=told_s)
    with pytest.raises(asyncio.CancelledError), CallAccount(call, metrics, NO_TRACER, deadline_s=deadline_s):
        raise asyncio.CancelledError
    assert value(metrics, "requests_total", model="", outcome=outcome) == 1


def test_generated_tokens_are_counted_as_they_come(metrics: RouterMetrics) -> None:
    meter = arrive(metrics)
    meter.receive(1)
    meter.receive(3)
    assert value(metrics, "generation_tokens_total") == 4


def test_a_stall_between_tokens_is_seen_there_and_not_before_the_first(metrics: RouterMetrics, clock: Clock) -> None:
    meter = arrive(metrics)
    for number in range(20):
        clock.now_s += 0.2 if number == 10 else 0.001
        meter.receive(1)
    meter.end("stop", is_finished=True)
    assert value(metrics, "ttft_seconds_sum") == pytest.approx(0.001)
    assert value(metrics, "itl_seconds_count") == 20 - 1
    assert value(metrics, "itl_seconds_sum") == pytest.approx(18 * 0.001 + 0.2)
    assert value(metrics, "itl_seconds_bucket", le="0.1") == 18


def test_tokens_that_come_together_share_a_gap(metrics: RouterMetrics, clock: Clock) -> None:
    meter = arrive(metrics)
    clock.now_s += 1.0
    meter.receive(3)  # the first has no gap before it, the others none between them
    clock.now_s += 0.24
    meter.receive(3)
    gaps = {le: value(metrics, "itl_seconds_bucket", le=le) for le in ("0.001", "0.075", "0.1", "0.15", "+Inf")}
    assert gaps == {"0.001": 2, "0.075": 2, "0.1": 5, "0.15": 5, "+Inf": 5}
    assert value(metrics, "itl_seconds_count") == 5
    assert value(metrics, "itl_seconds_sum") == pytest.approx(0.24)


def test_wait_for_a_place_is_measured(metrics: RouterMetrics, clock: Clock) -> None:
    meter = arrive(metrics)
    clock.now_s = 0.25
    meter.start()
    assert value(metrics, "queue_seconds_sum") == 0.25


def test_tenants_are_counted_apart(metrics: RouterMetrics, clock: Clock) -> None:
    for salt, num_prompt_tokens in (("red", 10), ("blue", 20), ("red", 5)):
        meter = arrive(metrics)
        meter.tenant = metrics.tenants.name(None, salt)
        meter.num_prompt_tokens, meter.num_cached_tokens = num_prompt_tokens, 4
        clock.now_s += 0.5
        meter.receive(2)
        meter.end("stop", is_finished=True)
    red = metrics.tenants.name(None, "red")
    assert value(metrics, "tenant_requests_total", tenant=red, outcome="stop") == 2
    assert value(metrics, "tenant_prompt_tokens_total", tenant=red) == 15
    assert value(metrics, "tenant_cached_tokens_total", tenant=red) == 8
    assert value(metrics, "tenant_generation_tokens_total", tenant=red) == 4
    assert value(metrics, "tenant_ttft_seconds_sum", tenant=red) == 1.0


def test_tenants_have_few_names_that_do_not_tell_their_salts() -> None:
    names = TenantNames(2)
    red, blue = names.name(None, "red"), names.name(None, "blue")
    assert len({red, blue, NO_TENANT, OTHER_TENANTS}) == 4
    assert "red" not in red
    assert names.name(None, "") == NO_TENANT
    assert names.name(None, "green") == OTHER_TENANTS
    assert (names.name(None, "red"), names.name(None, "blue")) == (red, blue)


def test_api_key_names_the_tenant_whatever_the_salt() -> None:
    alice = Tenant(KeyEntry(name="alice", sha256="0" * 64), clock=lambda: 0.0)
    assert TenantNames(0).name(alice, "red") == "alice"


async def test_series_of_a_served_model_begin_at_zero() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics_port=0)) as router:
        await router.wait_ready(1)
        await poll(lambda: router.metric("weft_router_ready_replicas", model="tiny"), 1)
        assert await router.series("weft_router_failovers_total") == [({"model": "tiny"}, 0)]
        outcomes = {labels["outcome"] for labels, _ in await router.series("weft_router_requests_total")}
        assert {"stop", "length", "internal", "unavailable", "resource_exhausted"} <= outcomes


async def test_request_is_counted_for_its_tenant_with_its_usage() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics_port=0)) as router:
        await router.wait_ready(1)
        for _ in range(2):
            await router.generate(text_request("x" * 12, max_tokens=3, cache_salt="red"))
        await router.outcomes(2)
        tenant = TenantNames(1).name(None, "red")
        for name, number in (("prompt", 26), ("cached", 12), ("generation", 6)):
            counted = await router.metric(f"weft_router_tenant_{name}_tokens_total", model="tiny", tenant=tenant)
            assert counted == number, name
        labels = {"model": "tiny", "tenant": tenant, "outcome": "length"}
        assert await router.metric("weft_router_tenant_requests_total", **labels) == 2


async def test_refused_request_gives_its_salt_no_name() -> None:
    settings = MetricsConfig(max_tenants=1)
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, metrics_port=0, metrics=settings)) as router,
    ):
        await router.wait_ready(1)
        for salt, temperature in (("s" * 1025, 1), ("blue", -1)):
            request = text_request("x", cache_salt=salt)
            request.sampling.temperature = temperature
            with pytest.raises(grpc.aio.AioRpcError, match="allowed: "):
                await router.generate(request)
        await router.generate(text_request("x", cache_salt="red"))
        await router.outcomes(3)
        series = await router.series("weft_router_tenant_requests_total")
    counted = {(labels["tenant"], labels["outcome"]): number for labels, number in series if number}
    assert counted == {(NO_TENANT, "invalid_argument"): 2, (TenantNames(1).name(None, "red"), "length"): 1}


async def test_model_without_a_replica_is_told_as_such() -> None:
    async with running_router(router_config("127.0.0.1:1", metrics_port=0)) as router:
        assert await router.series("weft_router_ready_replicas") == [({"model": "tiny"}, 0)]
        limits = ("weft_router_max_requests_in_flight", "weft_router_max_requests_queued")
        assert [await router.metric(name) for name in limits] == [1024, 1024]
        targets = ("weft_router_slo_ttft_seconds", "weft_router_slo_tpot_seconds")
        assert [await router.metric(name, model="tiny") for name in targets] == [1.0, 0.1]


async def test_router_tells_its_cpu_time() -> None:
    async with running_router(router_config("127.0.0.1:1", metrics_port=0)) as router:
        before_s = await router.metric("weft_router_cpu_seconds_total")
        assert 0 < before_s <= await router.metric("weft_router_cpu_seconds_total") <= time.process_time()


async def test_index_of_a_replica_is_told_while_the_router_is_connected_to_it() -> None:
    blocks = "weft_router_replica_indexed_blocks"
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics_port=0)) as router:
        await router.wait_ready(1)
        await router.generate(text_request("x" * 12))
        ((_, num_indexed),) = await router.series(blocks)
        assert num_indexed == len(a.resident) > 0
        a.drain()
        await poll(lambda: router.metric("weft_router_ready_replicas", model="tiny"), 0)
        assert [number for _, number in await router.series(blocks)] == [num_indexed]
        await a.die()
        await poll(lambda: router.series(blocks), [])


def route(num_ready: int, **targets: float) -> ModelRoute:
    served = ServedModel(name="m", path="/m", max_context=0, **targets)
    route = ModelRoute(served, RoundRobin())
    for index in range(num_ready):
        says = {"text": None, "max_context": 0, "vocab_size": 0}
        breaker = Breaker(BreakerConfig())
        ready = SimpleNamespace(replica_id=str(index), is_ready=True, load=LoadEstimate(), breaker=breaker, **says)
        route.add(cast(ReplicaLink, ready))
    return route


def serve(
    metrics: RouterMetrics, clock: Clock, asked: ModelRoute, *, ttft_s: float, outcome: str = "stop", **targets: float
) -> bool | None:
    meter = metrics.request(GenerateCall(sampling=pb.SamplingParams(), **targets))
    meter.begin(asked)
    clock.now_s += ttft_s
    meter.receive(1)
    return meter.end(outcome, is_finished=outcome == "stop")


def test_model_may_have_targets_of_its_own(metrics: RouterMetrics, clock: Clock) -> None:
    """The same for goodput on the dashboards and for the autoscaler."""
    slow, other = route(1, target_ttft_s=5.0), route(1)
    assert (metrics.targets_s(slow), metrics.targets_s(other)) == ((5.0, 0.1), (1.0, 0.1))
    assert serve(metrics, clock, slow, ttft_s=4.0) is True
    assert value(metrics, "slo_requests_total", result="met") == 1
    assert serve(metrics, clock, other, ttft_s=4.0) is False
    assert value(metrics, "slo_requests_total", result="ttft_missed") == 1


def test_request_may_have_targets_of_its_own(metrics: RouterMetrics, clock: Clock) -> None:
    """They go before the model's; one that it leaves out stays what it was."""
    asked = route(1, target_ttft_s=5.0)
    assert serve(metrics, clock, asked, ttft_s=4.0, target_ttft_s=3.0) is False
    assert serve(metrics, clock, asked, ttft_s=6.0, target_ttft_s=7.0) is True
    assert serve(metrics, clock, asked, ttft_s=4.0, target_tpot_s=0.01) is True
    assert value(metrics, "goodput_tokens_total") == 2


def test_only_what_was_served_counts_for_the_autoscaler(metrics: RouterMetrics, clock: Clock) -> None:
    cold, warm = route(0), route(1)
    assert serve(metrics, clock, cold, ttft_s=60.0) is None, "it came while there was no replica"
    assert serve(metrics, clock, warm, ttft_s=0.1, outcome="internal") is None
    assert serve(metrics, clock, warm, ttft_s=0.1, outcome="cancelled") is None


@pytest.mark.parametrize(
    ("body", "outcome", "num_failed"),
    [
        ({"prompt": "hi", "n": 3}, "resource_exhausted", 3),
        ({"prompt": "hi", "n": 3, "stream": True}, "resource_exhausted", 3),
        ({"prompt": [[1], [300]]}, "invalid_argument", 0),
    ],
)
async def test_choices_that_end_because_another_one_failed_count_as_that_one(
    body: dict[str, object], outcome: str, num_failed: int
) -> None:
    admission = AdmissionConfig(max_in_flight=1, max_queued=1)
    async with FakeReplica("a", paused=True) as a:
        config = router_config(a.address, http_port=0, metrics_port=0, admission=admission)
        async with running_router(config) as router, httpx.AsyncClient(verify=False) as http:
            await router.wait_ready(1)
            answer = await http.post(f"http://{router.addresses.http}/v1/completions", json=body)
            assert answer.status_code in (400, 429)
            num_choices = num_failed or 2
            assert await router.outcomes(num_choices) == {outcome: num_choices}
            tenants = await router.series("weft_router_tenant_requests_total")
            assert {labels["outcome"] for labels, _ in tenants} == {outcome}
            assert await router.metric("weft_router_slo_requests_total", model="tiny", result="failed") == num_failed
