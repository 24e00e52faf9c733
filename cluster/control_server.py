"""weft.v1.Control over the controller's state: membership for routers, status and shutdown for operators."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from typing import Any, Protocol

import grpc
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server

from cluster.errors import StartError

SERVER_OPTIONS = (
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # routers ping a quiet stream
    ("grpc.so_reuseport", 0),  # a second controller on the port must fail, not share it
)


class ControlState(Protocol):
    """What the service shows; the controller, or a double in tests."""

    def models(self) -> list[control_pb2.ServedModel]:
        """The models that are served."""

    def replicas(self) -> list[control_pb2.ReplicaEndpoint]:
        """The replicas that take requests now."""

    def model_statuses(self) -> list[control_pb2.ModelStatus]:
        """Every model and its groups."""

    def router_statuses(self) -> list[control_pb2.RouterStatus]:
        """Every router."""

    async def shut_down(self, grace_s: float) -> None:
        """Stop routers and groups."""


def bind_control_port(host: str, port: int) -> tuple[grpc.aio.Server, str]:
    """Return a server that is bound but does not serve yet, and its host:port. Raises StartError: the port is taken."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise StartError(f"the controller cannot listen on {host}:{port}; allowed: a free port") from error
    return server, f"{host}:{bound}"


class ControlServer(ControlServicer):
    """Serves one controller. Methods are called on its event loop."""

    def __init__(
        self, state: ControlState, *, metrics_address: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._state = state
        self._metrics_address = metrics_address
        self._clock = clock
        self._started_s = clock()
        self._changed = asyncio.Condition()
        self._membership = control_pb2.WatchReplicasResponse(version=0)
        self._server: grpc.aio.Server | None = None

    async def start(self, server: grpc.aio.Server) -> None:
        """Serve on a bound server."""
        add_ControlServicer_to_server(self, server)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """End every stream and the service."""
        if self._server is not None:
            await self._server.stop(grace=0.2)

    async def publish(self) -> None:
        """Tell the watchers when models or replicas have changed since the last call."""
        membership = control_pb2.WatchReplicasResponse(
            version=self._membership.version, models=self._state.models(), replicas=self._state.replicas()
        )
        if membership == self._membership and membership.version:
            return
        membership.version += 1
        self._membership = membership
        async with self._changed:
            self._changed.notify_all()

    async def WatchReplicas(  # noqa: N802 - the name in control.proto
        self, request: control_pb2.WatchReplicasRequest, context: Any
    ) -> AsyncIterator[control_pb2.WatchReplicasResponse]:
        """Stream the whole membership, now and at every change."""
        seen = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._membership.version > seen)  # noqa: B023
                membership = self._membership
            seen = membership.version
            yield membership

    async def GetStatus(  # noqa: N802
        self, request: control_pb2.GetStatusRequest, context: Any
    ) -> control_pb2.GetStatusResponse:
        """Tell everything that `weft status` shows."""
        return control_pb2.GetStatusResponse(
            models=self._state.model_statuses(),
            routers=self._state.router_statuses(),
            version=metadata.version("weft"),
            uptime_s=self._clock() - self._started_s,
            metrics_address=self._metrics_address,
        )

    async def Shutdown(  # noqa: N802
        self, request: control_pb2.ShutdownRequest, context: Any
    ) -> control_pb2.ShutdownResponse:
        """Stop routers and groups; the controller ends after the answer."""
        await self._state.shut_down(request.grace_s)
        return control_pb2.ShutdownResponse()
