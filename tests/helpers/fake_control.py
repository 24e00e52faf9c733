"""A controller that says what a test tells it: a real gRPC server of weft.v1.Control for what routers ask of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import grpc
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server

from cluster.models import read_text_files


class FakeControl(ControlServicer):
    """Streams the membership that was set last, and each one set later; from start to stop, or in an `async with`."""

    def __init__(self, *, files: Mapping[str, Path] = MappingProxyType({})) -> None:
        """Make one; `files` says where the folders really are that it names."""
        self.files_asked: list[str] = []
        self.gives_files = True
        """False: who asks for files waits in vain."""
        self._files = files
        self.watchers: list[str] = []
        self.reports: list[control_pb2.ReportDemandRequest] = []
        self.takes_reports = True
        self.breaks_reports = False
        """Whether each stream of reports breaks after its first."""
        self._membership: control_pb2.WatchReplicasResponse | None = None
        self._version = 0
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.address = ""

    @property
    def num_held(self) -> int:
        """Requests without a replica that wait at the router, as it said last."""
        return next((demand.num_held for report in self.reports[-1:] for demand in report.models), 0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_ControlServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.address = f"127.0.0.1:{bound}"
        return self.address

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    def set_replicas(
        self,
        replicas: dict[str, str],
        *,
        models: Sequence[str] = ("tiny",),
        draining: Sequence[str] = (),
        starts_on_demand: bool = False,
    ) -> None:
        """Say that these replicas (id -> address) take requests for the first of these models, but for some."""
        self._version += 1
        membership = control_pb2.WatchReplicasResponse(
            version=self._version,
            models=[
                control_pb2.ServedModel(name=name, path=f"/{name}", max_context=512, starts_on_demand=starts_on_demand)
                for name in models
            ],
            replicas=[
                control_pb2.ReplicaEndpoint(
                    replica_id=replica_id, model=models[0], address=address, draining=replica_id in draining
                )
                for replica_id, address in replicas.items()
            ],
        )
        self.set_membership(membership)

    def set_membership(self, membership: control_pb2.WatchReplicasResponse) -> None:
        """Say this."""
        self._membership = membership
        self._changed.set()
        self._changed = asyncio.Event()

    async def WatchReplicas(  # noqa: N802
        self, request: control_pb2.WatchReplicasRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[control_pb2.WatchReplicasResponse]:
        self.watchers.append(request.router_id)
        while True:
            changed = self._changed
            if self._membership is not None:
                yield self._membership
            await changed.wait()

    async def GetModelFiles(  # noqa: N802
        self, request: control_pb2.GetModelFilesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[control_pb2.GetModelFilesResponse]:
        self.files_asked.append(request.path)
        if not self.gives_files:
            await asyncio.Event().wait()
        if request.path not in self._files:
            await context.abort(grpc.StatusCode.NOT_FOUND, "a fake")
        for name, data in read_text_files(self._files[request.path]):
            yield control_pb2.GetModelFilesResponse(name=name, data=data)

    async def GetStatus(self, request: control_pb2.GetStatusRequest, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a fake")

    async def ReportDemand(  # noqa: N802
        self, request_iterator: AsyncIterator[control_pb2.ReportDemandRequest], context: Any
    ) -> control_pb2.ReportDemandResponse:
        if not self.takes_reports:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "of an older version")
        async for report in request_iterator:
            self.reports.append(report)
            if self.breaks_reports:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "a fake")
        return control_pb2.ReportDemandResponse()

    async def Shutdown(self, request: control_pb2.ShutdownRequest, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a fake")
