"""A model without a replica: its requests are held, the controller hears of them, and each ends in one clear way."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from helpers.fake_control import FakeControl
from helpers.fake_replica import FakeReplica
from helpers.polling import poll, until
from helpers.ports import unlisted_port
from helpers.router_harness import SMALLEST_WINDOW, RunningRouter, router_config, running_router, text_request
from weft.v1 import control_pb2
from weft.v1 import inference_pb2 as pb
from weft.v1.inference_pb2_grpc import InferenceStub

from router.config import AdmissionConfig, FailoverConfig
from router.demand import Demand, growth

QUICK = FailoverConfig(new_request_wait_s=0.2, cold_start_wait_s=20.0)


@pytest.fixture
async def control() -> AsyncIterator[FakeControl]:
    control = FakeControl()
    await control.start(unlisted_port())
    yield control
    await control.stop()


def total(control: FakeControl, name: str) -> int:
    return sum(getattr(demand, name) for report in control.reports for demand in report.models)


async def outcome(router: RunningRouter, timeout_s: float | None = 20.0) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await router.generate(text_request("hello"), timeout_s)
    return error.value.code(), error.value.details() or ""


async def test_held_request_is_reported_at_once_and_served_by_the_replica_that_comes(control: FakeControl) -> None:
    control.set_replicas({}, starts_on_demand=True)
    async with FakeReplica("a") as a, running_router(router_config(control=control.address, failover=QUICK)) as router:
        await router.wait_ready(0)
        asking = [asyncio.create_task(router.generate(text_request("hello"))) for _ in range(3)]
        await until(lambda: control.num_held == 3)
        assert not any(task.done() for task in asking)
        control.set_replicas({"a": a.address}, starts_on_demand=True)
        for answer in await asyncio.gather(*asking):
            assert answer.finished is not None
            assert list(answer.finished.replica_ids) == ["a"]
        await until(lambda: control.num_held == 0)
        assert total(control, "num_finished") == 0, "that they waited says nothing about how many replicas are needed"
        await router.generate(text_request("hello"))
        await until(lambda: total(control, "num_finished") == 1)
        assert total(control, "num_on_time") == 1


async def test_held_request_that_goes_on_is_reported_at_once(
    control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.demand.REPORT_S", 600.0)
    control.set_replicas({}, starts_on_demand=True)
    late, port = FakeReplica("a"), unlisted_port()
    async with running_router(router_config(control=control.address, failover=QUICK)) as router:
        await router.wait_ready(0)
        asking = asyncio.create_task(router.generate(text_request("hello")))
        await until(lambda: control.num_held == 1)
        num_reports = len(control.reports)
        control.set_replicas({"a": f"127.0.0.1:{port}"}, starts_on_demand=True)
        await until(lambda: len(control.reports) > num_reports)
        await late.start(port)
        await asking
        await until(lambda: control.num_held == 0)
        await late.die()


async def test_request_that_the_last_replica_refuses_since_it_leaves_is_held(control: FakeControl) -> None:
    control.set_replicas({}, starts_on_demand=True)
    failover = FailoverConfig(new_request_wait_s=0.0, cold_start_wait_s=20.0)
    config = router_config(control=control.address, failover=failover)
    async with FakeReplica("a") as a, FakeReplica("b") as b, running_router(config) as router:
        control.set_replicas({"a": a.address}, starts_on_demand=True)
        await router.wait_ready(1)
        a.refusal = grpc.StatusCode.UNAVAILABLE
        a.is_draining = True
        asking = asyncio.create_task(router.generate(text_request("hello")))
        await until(lambda: control.num_held == 1)
        control.set_replicas({"b": b.address}, starts_on_demand=True)
        answer = await asking
        assert answer.finished is not None
        assert list(answer.finished.replica_ids) == ["b"]


async def test_model_without_replicas_leaves_the_others_their_places(control: FakeControl) -> None:
    failover = FailoverConfig(new_request_wait_s=20.0)
    admission = AdmissionConfig(max_in_flight=2, max_queued=2)
    async with FakeReplica("a") as a:
        control.set_replicas({"a": a.address}, models=("tiny", "gone"))
        config = router_config(control=control.address, failover=failover, admission=admission)
        async with running_router(config) as router:
            await router.wait_ready(1)
            request = text_request("hello")
            request.model = "gone"
            asking = [asyncio.create_task(router.generate(request)) for _ in range(2)]
            await until(lambda: _held_of(control, "gone") == 2)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await router.generate(request)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.value.details() == "2 requests wait for a replica of model 'gone'; allowed: 2"
            assert (await router.generate(text_request("hello"))).finished is not None
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def test_one_request_of_a_model_is_held_where_there_are_more_models_than_places(control: FakeControl) -> None:
    control.set_replicas({}, models=("tiny", "gone"))
    config = router_config(
        control=control.address, failover=QUICK, admission=AdmissionConfig(max_in_flight=1, max_queued=0)
    )
    async with running_router(config) as router:
        await router.wait_ready(0)
        request = text_request("hello")
        request.model = "gone"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.generate(request)
        assert error.value.details() == "no replica of model 'gone' was ready for 0.2 s"


async def test_router_is_ready_where_a_replica_would_be_started(control: FakeControl) -> None:
    control.set_replicas({}, starts_on_demand=True)
    async with running_router(router_config(control=control.address, http_port=0)) as router:
        await router.wait_ready(0)
        await poll(lambda: _ready_status(router), b"200")
        control.set_replicas({})
        await poll(lambda: _ready_status(router), b"503")


async def _ready_status(router: RunningRouter) -> bytes:
    assert router.addresses.http is not None
    host, port = router.addresses.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return line.split()[1]


async def test_request_that_waits_too_long_is_told_so(control: FakeControl) -> None:
    control.set_replicas({}, starts_on_demand=True)
    failover = FailoverConfig(new_request_wait_s=0.0, cold_start_wait_s=0.2)
    async with running_router(router_config(control=control.address, failover=failover)) as router:
        await router.wait_ready(0)
        assert await outcome(router) == (
            grpc.StatusCode.UNAVAILABLE,
            "no replica of model 'tiny' was ready for 0.2 s",
        )


async def test_deadline_ends_the_wait(control: FakeControl) -> None:
    control.set_replicas({}, starts_on_demand=True)
    async with running_router(router_config(control=control.address, failover=QUICK, metrics_port=0)) as router:
        await router.wait_ready(0)
        code, _ = await outcome(router, timeout_s=0.3)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await router.outcomes(1) == {"deadline_exceeded": 1}


@pytest.mark.parametrize("models", [("tiny",), ("other",)], ids=["cannot start", "no longer served"])
async def test_wait_ends_when_no_replica_will_come(control: FakeControl, models: tuple[str, ...]) -> None:
    control.set_replicas({}, starts_on_demand=True)
    async with running_router(router_config(control=control.address, failover=QUICK)) as router:
        await router.wait_ready(0)
        asking = asyncio.create_task(outcome(router))
        await until(lambda: control.num_held == 1)
        control.set_replicas({}, models=models)
        assert await asking == (grpc.StatusCode.UNAVAILABLE, "no replica of model 'tiny' was ready for 0.2 s")


async def test_held_requests_take_their_models_share_of_the_queue_and_no_place_in_flight(control: FakeControl) -> None:
    """Else the requests of one cold model would stop all other models."""
    async with FakeReplica("a", model="warm") as a:
        config = router_config(
            control=control.address, failover=QUICK, admission=AdmissionConfig(max_in_flight=1, max_queued=5)
        )
        control.set_membership(_cold_and_warm(a.address))
        async with running_router(config) as router:
            await router.wait_ready(1, model="warm")
            held = [asyncio.create_task(router.generate(text_request("hello"))) for _ in range(2)]
            await until(lambda: _held_of(control, "tiny") == 2)
            warm = pb.GenerateRequest(model="warm", text="hello", sampling=pb.SamplingParams(max_tokens=3, seed=1))
            assert (await router.generate(warm)).finished is not None
            third = asyncio.create_task(router.generate(text_request("hello")))
            await until(lambda: _held_of(control, "tiny") == 3)
            assert await outcome(router) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "3 requests wait for a replica of model 'tiny'; allowed: 3",
            )
            assert (await router.generate(warm)).finished is not None
            for task in (*held, third):
                task.cancel()
            await asyncio.gather(*held, third, return_exceptions=True)
            await until(lambda: _held_of(control, "tiny") == 0)


def _held_of(control: FakeControl, model: str) -> int:
    return next((each.num_held for report in control.reports[-1:] for each in report.models if each.model == model), 0)


def _cold_and_warm(address: str) -> control_pb2.WatchReplicasResponse:
    return control_pb2.WatchReplicasResponse(
        version=1,
        models=[
            control_pb2.ServedModel(name="tiny", path="/tiny", max_context=512, starts_on_demand=True),
            control_pb2.ServedModel(name="warm", path="/warm", max_context=512),
        ],
        replicas=[control_pb2.ReplicaEndpoint(replica_id="a", model="warm", address=address)],
    )


async def test_demand_is_reported_again_to_a_controller_that_came_back(control: FakeControl) -> None:
    control.set_replicas({}, starts_on_demand=True)
    port = int(control.address.rpartition(":")[2])
    async with running_router(router_config(control=control.address, failover=QUICK)) as router:
        await router.wait_ready(0)
        asking = asyncio.create_task(router.generate(text_request("hello"), 30.0))
        await until(lambda: control.num_held == 1)
        await control.stop()
        successor = FakeControl()
        await successor.start(port)
        successor.set_replicas({}, starts_on_demand=True)
        await until(lambda: successor.num_held == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await successor.stop()


async def test_reports_go_on_when_only_their_stream_breaks(
    control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.demand.REPORT_S", 0.05)
    control.set_replicas({})
    control.breaks_reports = True
    async with running_router(router_config(control=control.address)):
        await until(lambda: len(control.reports) >= 3)
    assert len(control.watchers) == 1, "membership is followed as before"


async def test_controller_of_an_older_version_is_followed_and_asked_only_once_to_hear(
    control: FakeControl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.demand.REPORT_S", 0.05)
    caplog.set_level(logging.INFO, "router.demand")
    control.takes_reports = False
    async with FakeReplica("a") as a, running_router(router_config(control=control.address)) as router:
        control.set_replicas({"a": a.address})
        await router.wait_ready(1)
        assert (await router.generate(text_request("hello"))).finished is not None
        await until(lambda: caplog.messages == ["the controller takes no reports of demand"])
        assert not control.reports


async def test_requests_that_have_waited_leave_their_places(control: FakeControl) -> None:
    control.set_replicas({})
    config = router_config(
        control=control.address, failover=QUICK, admission=AdmissionConfig(max_in_flight=1, max_queued=1)
    )
    async with running_router(config) as router:
        await router.wait_ready(0)
        codes = [(await outcome(router))[0] for _ in range(3)]
    assert codes == [grpc.StatusCode.UNAVAILABLE] * 3, "two may wait at once"


async def test_request_on_a_replica_is_not_held(control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.demand.REPORT_S", 0.05)
    async with FakeReplica("a", paused=True) as a, running_router(router_config(control=control.address)) as router:
        control.set_replicas({"a": a.address})
        await router.wait_ready(1)
        asking = asyncio.create_task(router.generate(text_request("hello")))
        await until(lambda: a.num_requests == 1)
        num_reports = len(control.reports)
        await until(lambda: len(control.reports) >= num_reports + 2)
        assert control.num_held == 0
        a.resume()
        await asking


async def test_answer_that_its_client_has_not_read_yet_is_not_held(
    control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.demand.REPORT_S", 0.05)
    async with (
        FakeReplica("a") as a,
        running_router(router_config(control=control.address)) as router,
        grpc.aio.insecure_channel(router.addresses.grpc, SMALLEST_WINDOW) as channel,
    ):
        control.set_replicas({"a": a.address})
        await router.wait_ready(1)
        slow = InferenceStub(channel).Generate(text_request("hello"))
        await a.wait_until(lambda: bool(a.submits) and not a.num_requests)
        num_reports = len(control.reports)
        await until(lambda: len(control.reports) >= num_reports + 2)
        assert total(control, "num_finished") == 0, "it has not ended"
        assert control.num_held == 0, "no further replica would help it"
        assert [each async for each in slow][-1].HasField("finished")


def test_a_model_that_comes_back_has_not_shrunk() -> None:
    before, now = Demand(num_held=0, num_finished=5, num_on_time=4), Demand(num_held=1, num_finished=2, num_on_time=1)
    told = growth("m", before, now)
    assert (told.num_held, told.num_finished, told.num_on_time) == (1, 0, 0)


async def test_what_ended_is_told_once(control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.demand.REPORT_S", 0.05)
    async with FakeReplica("a") as a, running_router(router_config(control=control.address)) as router:
        control.set_replicas({"a": a.address})
        await router.wait_ready(1)
        await router.generate(text_request("hello"))
        await until(lambda: total(control, "num_finished") > 0)
        num_reports = len(control.reports)
        await until(lambda: len(control.reports) >= num_reports + 2)
        assert total(control, "num_finished") == 1
