"""Tells the controller what clients ask of each model, for its autoscaler: one stream for each router."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from weft.v1 import control_pb2

if TYPE_CHECKING:
    from weft.v1.control_pb2_grpc import ControlAsyncStub

logger = logging.getLogger(__name__)

_Call = grpc.aio.StreamUnaryCall[control_pb2.ReportDemandRequest, control_pb2.ReportDemandResponse]

REPORT_S = 2.0
"""Time between two reports."""
_MIN_GAP_S = 0.1  # however many begin to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What clients ask of one model."""

    num_held: int
    """Requests that are on no replica now."""
    num_finished: int
    """Requests that were served, since this router began."""
    num_on_time: int
    """Requests that were served within both targets (TTFT, TPOT), since this router began."""


_NONE = Demand(num_held=0, num_finished=0, num_on_time=0)


class DemandReporter:
    """Reports every few seconds what `read` returns by model. On the router's event loop."""

    def __init__(self, router_id: str, read: Callable[[], Mapping[str, Demand]]) -> None:
        self._router_id = router_id
        self._read = read
        self._is_urgent = asyncio.Event()
        self._ports: control_pb2.RouterPorts | None = None

    def report_soon(self) -> None:
        """Somebody waits for a first replica."""
        self._is_urgent.set()

    def say_ports(self, ports: control_pb2.RouterPorts) -> None:
        """Tell the controller where the router listens. Before `run`."""
        self._ports = ports

    async def run(self, stub: "ControlAsyncStub") -> None:
        """Report until cancelled, or until the controller turns out to be of a version that does not ask."""
        while True:
            call = stub.ReportDemand()
            try:
                await self._report(call)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream has ended; the second in most cases
                if await call.code() is grpc.StatusCode.UNIMPLEMENTED:
                    logger.info("the controller takes no reports of demand")
                    return
                logger.debug("demand is not reported: %s", await call.details())
            finally:
                call.cancel()
            await asyncio.sleep(REPORT_S)

    async def _report(self, call: _Call) -> None:
        told = self._read()
        while True:
            now = self._read()
            models = [growth(model, told.get(model, _NONE), demand) for model, demand in now.items()]
            report = control_pb2.ReportDemandRequest(router_id=self._router_id, models=models, ports=self._ports)
            await call.write(report)
            told = now
            await self._pause()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await self._is_urgent.wait()
        self._is_urgent.clear()
        await asyncio.sleep(_MIN_GAP_S)


def growth(model: str, before: Demand, now: Demand) -> control_pb2.ModelDemand:
    """Return what to report of a model: what is held now, and what ended since the report before."""
    return control_pb2.ModelDemand(
        model=model,
        num_held=now.num_held,
        num_finished=max(0, now.num_finished - before.num_finished),  # a model may be removed and come back
        num_on_time=max(0, now.num_on_time - before.num_on_time),
    )
