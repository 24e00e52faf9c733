"""weft.v1.Control over the controller's state: membership and demand of routers, status and changes for operators."""

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import grpc
from weft.addresses import join_host_port, split_host_port
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server

from cluster.config import ClusterFile, ModelSpec, build_spec
from cluster.demand import DemandLedger
from cluster.errors import ClusterConfigError, ClusterError, NotServedError, StartError
from cluster.log_reader import LogReader
from cluster.metrics_pages import fetch_pages
from cluster.models import read_text_files
from cluster.wanted import Change, ignored
from parallel.errors import ModelError
from router.errors import RouterConfigError
from router.tls import InnerTls, bind
from workers.errors import EngineConfigError

_Context = grpc.aio.ServicerContext[Any, Any]

_REPORT_TIMEOUT_S = 20.0
"""A router that reports nothing for so long has gone, though its connection has not."""

_SERVER_OPTIONS = (
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # routers ping a quiet stream
    ("grpc.so_reuseport", 0),  # a second controller on the port must fail, not share it
)
_MAX_FILE_READERS = 4
_PART_BYTES = 1 << 20  # a message is at most 4 MB
_FOLLOW_S = 1.0
"""Who follows logs asks again within this time."""
_STOP_GRACE_S = 0.2  # for the answer to Shutdown to be sent; streams are open for as long as they may


class ControlState(Protocol):
    """What the service shows and changes; wanted_state.WantedState, or a double in tests."""

    @property
    def is_stopping(self) -> bool:
        """The service is being stopped."""

    def models(self) -> list[control_pb2.ServedModel]:
        """The models that are served."""

    def replicas(self) -> list[control_pb2.ReplicaEndpoint]:
        """The replicas that take requests now, and those that finish what they have."""

    def model_statuses(self) -> list[control_pb2.ModelStatus]:
        """Every model and its groups."""

    def router_statuses(self) -> list[control_pb2.RouterStatus]:
        """Every router."""

    async def node_statuses(self) -> list[control_pb2.NodeStatus]:
        """Every node."""

    async def apply(self, specs: Sequence[ModelSpec], *, dry_run: bool = False) -> list[Change]:
        """Want exactly these models."""

    def scale(self, name: str, replicas: int) -> int:
        """Want so many replicas; return how many were wanted before."""

    async def roll(self, name: str, settings: Mapping[str, Any]) -> tuple[Change, int]:
        """Replace a model's groups; return what changes and the revision."""

    async def undo(self, name: str) -> tuple[Change, int]:
        """Go back to a model's revision before."""

    async def drain(self, target: str, grace_s: float | None) -> tuple[list[str], str]:
        """Let a replica or a node's replicas leave; return them and the node's id."""

    async def undrain(self, target: str) -> str:
        """Place groups on a node again; return its id."""

    async def shut_down(self, grace_s: float) -> None:
        """Stop routers and groups."""


def bind_control_port(host: str, port: int, tls: InnerTls | None = None) -> tuple[grpc.aio.Server, str]:
    """Return a server that is bound but does not serve yet, and its host:port.

    Raises:
        StartError: the port is taken, the host is not this node's, or the TLS files cannot be used on this node.
    """
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    address = join_host_port(host, port)
    try:
        bound = bind(server, address, tls)
    except RuntimeError as error:
        raise StartError(f"the controller cannot listen on {address}; allowed: a free port of this node") from error
    except RouterConfigError as error:
        raise StartError(f"the controller cannot speak TLS: {error}") from error
    return server, join_host_port(host, bound)


class ControlServer(ControlServicer):
    """Serves one controller. Methods are called on its event loop."""

    def __init__(
        self,
        state: ControlState,
        logs: LogReader,
        demand: DemandLedger,
        *,
        started: ClusterFile | None = None,
        address: str = "",
        metrics_address: str = "",
        num_restarts: int = 0,
    ) -> None:
        """Args: `started`: the settings that the service started with; None: the defaults."""
        self.address = address
        self._started = started or ClusterFile()
        self._state = state
        self._logs = logs
        self._demand = demand
        self._metrics_address = metrics_address
        self._num_restarts = num_restarts
        self._version = metadata.version("weft")  # reads files
        self._started_s = time.monotonic()
        self._changed = asyncio.Condition()
        self._file_readers = ThreadPoolExecutor(_MAX_FILE_READERS, "model files")  # a file system may hang
        self._membership = control_pb2.WatchReplicasResponse(version=0)
        self._server: grpc.aio.Server | None = None
        self._logs_read_s = -math.inf
        """When logs were read last, by somebody who was not told that the service stops."""
        self._ends_s: float | None = None
        """When all has stopped, and whoever follows logs was told so."""
        self._heard: dict[str, control_pb2.RouterStatus] = {}
        """What each router that reports now says of itself, by its connection."""

    async def start(self, server: grpc.aio.Server) -> None:
        """Serve on a bound server."""
        add_ControlServicer_to_server(self, server)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """End every stream and the service, a moment later where somebody follows logs, to whom that is told."""
        await self._wait_for_followers()
        if self._server is not None:
            await self._server.stop(grace=_STOP_GRACE_S)

    async def _wait_for_followers(self) -> None:
        now_s = time.monotonic()
        if self._ends_s is None:  # somebody who is not told would look for a next controller
            self._ends_s = now_s + _FOLLOW_S if now_s - self._logs_read_s < _FOLLOW_S else now_s
        await asyncio.sleep(self._ends_s - now_s)

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
        self, request: control_pb2.WatchReplicasRequest, context: _Context
    ) -> AsyncIterator[control_pb2.WatchReplicasResponse]:
        """Stream the whole membership, now and at every change."""
        seen = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._membership.version > seen)  # noqa: B023
                membership = self._membership
            seen = membership.version
            yield membership

    async def GetModelFiles(  # noqa: N802
        self, request: control_pb2.GetModelFilesRequest, context: _Context
    ) -> AsyncIterator[control_pb2.GetModelFilesResponse]:
        """Stream the small files of a folder, if a model is served from it; no other file is told."""
        async with _refusing(context):
            models, replicas = self._state.models(), self._state.replicas()
            paths = {model.path for model in models} | {each.text.path for each in replicas if each.HasField("text")}
            if request.path not in paths:
                raise NotServedError(f"no model is served from {request.path!r}")
            files = await asyncio.get_running_loop().run_in_executor(
                self._file_readers, lambda: list(read_text_files(Path(request.path)))
            )
        for name, data in files:
            for start in range(0, max(1, len(data)), _PART_BYTES):
                yield control_pb2.GetModelFilesResponse(name=name, data=data[start : start + _PART_BYTES])

    async def GetStatus(  # noqa: N802
        self, request: control_pb2.GetStatusRequest, context: _Context
    ) -> control_pb2.GetStatusResponse:
        """Tell everything that `weft status` shows."""
        return control_pb2.GetStatusResponse(
            models=self._state.model_statuses(),
            routers=self._routers(),
            version=self._version,
            uptime_s=time.monotonic() - self._started_s,
            nodes=await self._state.node_statuses(),
            controller=control_pb2.ControllerStatus(
                pid=os.getpid(), restarts=self._num_restarts, stopping=self._state.is_stopping
            ),
            metrics_address=self._metrics_address,
        )

    async def ReportDemand(  # noqa: N802
        self, request_iterator: AsyncIterator[control_pb2.ReportDemandRequest], context: _Context
    ) -> control_pb2.ReportDemandResponse:
        """Hear what clients ask of one router and where it is, until it goes or falls silent."""
        reports, peer = aiter(request_iterator), context.peer()
        with self._demand.router() as router:
            try:
                while True:
                    async with asyncio.timeout(_REPORT_TIMEOUT_S):
                        report = await anext(reports)
                    router.note(report.models)
                    if report.HasField("ports"):
                        self._heard[peer] = _reported_status(report, peer)
            except (StopAsyncIteration, TimeoutError):
                return control_pb2.ReportDemandResponse()
            finally:
                self._heard.pop(peer, None)

    async def Apply(  # noqa: N802
        self, request: control_pb2.ApplyRequest, context: _Context
    ) -> control_pb2.ApplyResponse:
        """Want exactly the models of a cluster file."""
        async with _refusing(context):
            settings = _settings(request.settings_json)
            spec = build_spec(settings)
            changes = await self._state.apply(spec.models, dry_run=request.dry_run)
        changes += ignored(self._started, spec.file)
        return control_pb2.ApplyResponse(changes=[_to_change(change) for change in changes])

    async def Scale(  # noqa: N802
        self, request: control_pb2.ScaleRequest, context: _Context
    ) -> control_pb2.ScaleResponse:
        """Want another number of replicas."""
        async with _refusing(context):
            before = self._state.scale(request.model, request.replicas)
        return control_pb2.ScaleResponse(previous_replicas=before)

    async def Rollout(  # noqa: N802
        self, request: control_pb2.RolloutRequest, context: _Context
    ) -> control_pb2.RolloutResponse:
        """Replace a model's groups one by one."""
        async with _refusing(context):
            settings = _settings(request.settings_json)
            if request.undo and settings:
                raise ClusterConfigError("undo goes back to the settings before; allowed: undo without settings")
            if request.undo:
                change, revision = await self._state.undo(request.model)
            else:
                change, revision = await self._state.roll(request.model, settings)
        return control_pb2.RolloutResponse(change=_to_change(change), revision=revision)

    async def Drain(  # noqa: N802
        self, request: control_pb2.DrainRequest, context: _Context
    ) -> control_pb2.DrainResponse:
        """Take a replica or a node out of service, or a node into it again."""
        async with _refusing(context):
            grace_s = _checked_grace_s(request.grace_s) if request.HasField("grace_s") else None
            if request.undo:
                return control_pb2.DrainResponse(node_id=await self._state.undrain(request.target))
            replica_ids, node_id = await self._state.drain(request.target, grace_s)
        return control_pb2.DrainResponse(replica_ids=replica_ids, node_id=node_id)

    async def ReadLogs(  # noqa: N802
        self, request: control_pb2.ReadLogsRequest, context: _Context
    ) -> control_pb2.ReadLogsResponse:
        """Return what the logs of some processes hold beyond the offsets that the caller knows."""
        async with _refusing(context):
            if request.target and request.target not in self._logs.names:
                raise NotServedError(f"no log is {request.target!r}; there are: {', '.join(self._logs.names)}")
        pieces = await self._logs.read(request.target, request.offsets, request.tail_bytes)
        chunks = [
            control_pb2.LogChunk(name=name, data=piece.data, next_offset=piece.next_offset, has_more=piece.has_more)
            for name, piece in pieces.items()
            if piece is not None
        ]
        unread = [name for name, piece in pieces.items() if piece is None]
        if not self._state.is_stopping:
            self._logs_read_s = time.monotonic()
        return control_pb2.ReadLogsResponse(chunks=chunks, stopping=self._state.is_stopping, unread=unread)

    async def ReadMetrics(  # noqa: N802
        self, request: control_pb2.ReadMetricsRequest, context: _Context
    ) -> AsyncIterator[control_pb2.ReadMetricsResponse]:
        """Stream the pages of this cluster's processes that answer; nothing else is fetched."""
        groups = [group for model in self._state.model_statuses() for group in model.groups]
        known = {rank.metrics_address for group in groups for rank in group.ranks}
        known |= {group.metrics_address for group in groups}
        known |= {router.metrics_address for router in self._routers()}
        known.discard("")
        for address, page in (await fetch_pages(sorted(known.intersection(request.addresses)))).items():
            yield control_pb2.ReadMetricsResponse(address=address, page=page)

    async def Shutdown(  # noqa: N802
        self, request: control_pb2.ShutdownRequest, context: _Context
    ) -> control_pb2.ShutdownResponse:
        """Stop routers and groups; the controller ends after the answer."""
        async with _refusing(context):
            grace_s = _checked_grace_s(request.grace_s)
        await self._state.shut_down(grace_s)
        await self._wait_for_followers()  # who is answered may start another service on this port
        return control_pb2.ShutdownResponse()

    def outside_routers(self) -> list[control_pb2.RouterStatus]:
        """Return the routers that report but are not kept by this controller, with the addresses they connect from."""
        kept_ids = {router.router_id for router in self._state.router_statuses()}
        outside = [router for router in self._heard.values() if router.router_id not in kept_ids]
        return sorted(outside, key=lambda router: router.router_id)

    def _routers(self) -> list[control_pb2.RouterStatus]:
        return self._state.router_statuses() + self.outside_routers()


def _reported_status(report: control_pb2.ReportDemandRequest, peer: str) -> control_pb2.RouterStatus:
    """Return a reporting router's status, with its own host only, so that nobody has pages of others fetched."""
    host, _ = split_host_port(unquote(peer.partition(":")[2]))

    def address(port: int) -> str:
        return join_host_port(host, port) if 0 < port <= 65535 else ""

    return control_pb2.RouterStatus(
        router_id=report.router_id,
        grpc_address=address(report.ports.grpc),
        http_address=address(report.ports.http),
        metrics_address=address(report.ports.metrics),
        alive=True,
    )


@asynccontextmanager
async def _refusing(context: _Context) -> AsyncIterator[None]:
    """End the call with the gRPC status of whatever the block refuses."""
    try:
        yield
    except NotServedError as error:
        await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    except ClusterConfigError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except (ClusterError, ModelError, EngineConfigError) as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


def _checked_grace_s(grace_s: float) -> float:
    if not 0 <= grace_s < math.inf:  # a successor could not read it
        raise ClusterConfigError(f"grace_s is {grace_s}; allowed: a finite number, at least 0")
    return grace_s


def _settings(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClusterConfigError(f"the settings are not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ClusterConfigError(f"the settings are a {type(settings).__name__}; allowed: a mapping")
    return settings


def _to_change(change: Change) -> control_pb2.Change:
    kind = control_pb2.ChangeKind.Value(f"CHANGE_KIND_{change.kind.name}")
    return control_pb2.Change(kind=kind, name=change.name, details=change.details)
