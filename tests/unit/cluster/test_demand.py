"""What several routers report is added up, and a router that goes takes its part with it. Real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
from helpers.polling import until
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlStub

from cluster import control_server
from cluster.control_server import ControlServer, ControlState, bind_control_port
from cluster.demand import Demand, DemandLedger
from cluster.log_reader import LogReader


def demand(model: str, held: int, finished: int = 0, on_time: int = 0) -> control_pb2.ModelDemand:
    return control_pb2.ModelDemand(model=model, num_held=held, num_finished=finished, num_on_time=on_time)


def test_routers_add_up_and_what_ended_counts_once() -> None:
    ledger = DemandLedger()
    with ledger.router() as one, ledger.router() as other:
        one.note([demand("m", 3, 4, 2), demand("n", 1)])
        one.note([demand("m", 2, 1, 1), demand("n", 0)])
        other.note([demand("m", 5, 10, 10)])
        assert ledger.take() == {"m": Demand(num_held=7, num_finished=15, num_on_time=13), "n": Demand()}
        assert ledger.take() == {"m": Demand(num_held=7), "n": Demand()}
        one.note([demand("m", 1, 1)])
        assert ledger.take()["m"] == Demand(num_held=6, num_finished=1)
        one.note([])  # the model is no longer served
        assert ledger.take()["m"] == Demand(num_held=5)
    assert ledger.take() == {}


def test_only_the_beginning_of_a_wait_is_an_event() -> None:
    ledger = DemandLedger()
    with ledger.router() as router:
        for held, expected in ((0, False), (1, True), (2, False), (0, False), (1, True)):
            ledger.somebody_waits.clear()
            router.note([demand("m", held)])
            assert ledger.somebody_waits.is_set() == expected, held


@dataclass
class Running:
    ledger: DemandLedger
    address: str

    def held(self) -> int:
        return self.ledger.take().get("m", Demand()).num_held


@pytest.fixture
async def control() -> AsyncIterator[Running]:
    ledger = DemandLedger()
    server = ControlServer(cast(ControlState, None), LogReader("here"), ledger)
    listener, address = bind_control_port("127.0.0.1", 0)
    await server.start(listener)
    yield Running(ledger, address)
    await server.stop()


async def report(channel: grpc.aio.Channel, held: int) -> Any:
    call = ControlStub(channel).ReportDemand()
    await call.write(control_pb2.ReportDemandRequest(router_id="r", models=[demand("m", held)]))
    return call


async def test_router_that_goes_counts_no_more(control: Running) -> None:
    async with grpc.aio.insecure_channel(control.address) as staying:
        await report(staying, 2)
        async with grpc.aio.insecure_channel(control.address) as leaving:
            await report(leaving, 3)
            await until(lambda: control.held() == 5)
        await until(lambda: control.held() == 2)
        call = await report(staying, 4)
        await until(lambda: control.held() == 6)
        await call.done_writing()
        await call
        assert control.held() == 2


async def test_router_that_falls_silent_counts_no_more(control: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "_REPORT_TIMEOUT_S", 0.1)
    async with grpc.aio.insecure_channel(control.address) as channel:
        call = await report(channel, 3)
        await asyncio.wait_for(call, 120)
        assert control.held() == 0
