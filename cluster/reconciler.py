"""Everything that runs while a controller serves: wanted_state.py, its gRPC service, and the loops that drive them.

Which controller this is, and what it goes on from, is decided in controller.py; how a group is formed is said in
formation.py, when in lifecycle.py, what is told in control_server.py.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import grpc
from weft.addresses import split_host_port
from weft.recording import Recorder, RecordingConfig, RecordingError

from cluster.config import ClusterSpec, ModelSpec
from cluster.control_server import ControlServer
from cluster.controller_metrics import ControllerListener
from cluster.demand import DemandLedger
from cluster.formation import Formation, FormationListener, FormationSpec
from cluster.lifecycle import Failure, RestartPolicy
from cluster.log_reader import LogReader, LogSource
from cluster.node_request import NodeRequest, ask_ray
from cluster.ray_nodes import cluster_nodes
from cluster.recording import ScalingRecording
from cluster.revision_files import RevisionText
from cluster.router_process import RouterProcess
from cluster.saved_state import RayStateStore, RouterRecord, SavedState, encode
from cluster.scaling import Scaling
from cluster.shared_ports import SharedPort
from cluster.started_settings import encode_spec
from cluster.wanted_state import WantedState

logger = logging.getLogger(__name__)

_NAME = "controller"  # in the list of logs, and of recordings
_TICK_S = 0.5  # changes wake the loop at once; the tick is for backoffs that have passed


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLife:
    """A process that is the controller, whose log says why it ended."""

    pid: int
    node_id: str
    """Ray id of its node."""
    log_file: str
    """Path on that node; empty: it logs to no file."""


class Reconciler:
    """Keeps a cluster as it is wanted, from `start` until it is stopped. Made and used on the event loop."""

    def __init__(
        self,
        spec: ClusterSpec,
        saved: SavedState,
        *,
        address: str,
        life: ControllerLife,
        store: RayStateStore,
        log_level: str,
    ) -> None:
        """Go on from what was saved, or begin with nothing.

        Args:
            spec: what the service was started with; its models are not applied here.
            saved: its groups and routers may live, and are adopted.
            address: the control service's host:port, which is bound already.
            life: the process that this is.
            store: keeps what a successor must know.
            log_level: of the processes that are started.

        Raises:
            StartError: a port is taken.
        """
        self._spec = spec
        self._life = life
        self._store = store
        self._log_level = log_level
        self._changed = asyncio.Event()
        self._shared_ports: list[SharedPort] = []
        self._logs = LogReader(life.node_id)
        self._logs.note(saved.logs)
        is_successor = saved.has_service
        saved = replace(saved, control_port=split_host_port(address)[1])
        self._settings = encode_spec(spec)
        self.state = WantedState(
            saved,
            routers=self._make_routers(saved, address),
            form=self._form,
            save=self._save,
            nodes=cluster_nodes,
            changed=self._changed,
            policy=RestartPolicy(),
        )
        self._metrics = ControllerListener(
            self.state,
            lambda: self._service.outside_routers(),
            host=spec.host,
            port=saved.metrics_port or spec.control_metrics_port,
        )
        demand = DemandLedger()
        self._recorder = _open_recorder(spec.router.recording)
        recording = None if self._recorder is None else ScalingRecording(self._recorder)
        self._scaling = Scaling(self.state, demand, recording=recording)
        self._nodes = None if spec.ray_address is None else NodeRequest(ask_ray, is_successor=is_successor)
        """What asks Ray for nodes; None: the Ray cluster is this machine."""
        self._service = ControlServer(
            self.state,
            self._logs,
            demand,
            started=spec.file,
            address=address,
            metrics_address=self._metrics.address,
            num_restarts=saved.num_restarts,
        )

    @property
    def address(self) -> str:
        """The host:port of the control service."""
        return self._service.address

    async def start(self, listener: grpc.aio.Server) -> None:
        """Begin to answer routers and operators, on a server that is bound to `address`."""
        await self._service.start(listener)

    async def run(self) -> None:
        """Reconcile until the service was shut down."""
        async with asyncio.TaskGroup() as tasks:
            scaling = tasks.create_task(self._scaling.run())
            if self.state.is_stopping:  # under the life before
                tasks.create_task(self.state.finish_stop())
            await self._reconcile_until_stopped()
            scaling.cancel()

    async def close(self) -> None:
        """Take back what was asked of Ray, and answer nobody any more."""
        if self._nodes is not None:
            await self._nodes.close()
        await self._service.stop()
        await self._metrics.close()
        if self._recorder is not None:
            self._recorder.close()

    async def _reconcile_until_stopped(self) -> None:
        while not self.state.is_stopped:
            self._changed.clear()
            self.state.reconcile()
            self._note_logs()
            if not self.state.is_adopting:  # a membership without those not yet found would send clients away
                await self._service.publish()
            if self._nodes is not None:
                await self._nodes.want(self.state.missing_bundles())
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._changed.wait()

    def _note_logs(self) -> None:
        self._logs.note([*self.state.log_sources(), _log_of(self._life)])

    def _save(self, state: SavedState) -> None:
        self._note_logs()
        _, port = split_host_port(self._metrics.address)
        saved = replace(state, metrics_port=port, settings=self._settings, logs=self._logs.latest)
        self._store.save(encode(saved))

    def _make_routers(self, saved: SavedState, address: str) -> list[RouterProcess]:
        """Want routers on the ports of those of the controller before, or else on the ones that they are to have."""
        ports = saved.routers
        if not ports:
            first = self._hold_ports() if self._spec.num_routers > 1 else self._wanted_ports()
            others = first if first.metrics is None else replace(first, metrics=0)
            ports = {f"router-{number}": others if number else first for number in range(self._spec.num_routers)}
        saved_s = time.monotonic() - saved.passed_s(time.time())
        return [
            RouterProcess(
                replace(
                    self._spec.router,
                    router_id=router_id,
                    control=address,
                    grpc_port=each.grpc,
                    http_port=each.http,
                    metrics_port=each.metrics,
                ),
                log_level=self._log_level,
                policy=RestartPolicy(),
                clock=time.monotonic,
                on_change=self._changed.set,
                restarts=each.restarts,
                last_failure=Failure(each.last_failure, saved_s - each.failed_ago_s) if each.last_failure else None,
                adopts=router_id in saved.routers,
            )
            for router_id, each in ports.items()
        ]

    def _wanted_ports(self) -> RouterRecord:
        config = self._spec.router
        return RouterRecord(grpc=config.grpc_port, http=config.http_port, metrics=config.metrics_port)

    def _hold_ports(self) -> RouterRecord:
        """Take the ports that routers share as long as this controller lives; its successors leave them to the routers.

        Raises:
            StartError: one is taken.
        """
        ports, host = self._wanted_ports(), self._spec.host
        self._shared_ports = [SharedPort("router.port", host, ports.grpc)]
        if ports.http is not None:
            self._shared_ports.append(SharedPort("router.http_port", host, ports.http))
        grpc_port, *others = [each.port for each in self._shared_ports]
        return replace(ports, grpc=grpc_port, http=others[0] if others else None)

    def _form(
        self,
        replica_id: str,
        model: ModelSpec,
        listener: FormationListener,
        *,
        text: RevisionText | None,
        adopts: bool,
    ) -> Formation:
        spec = FormationSpec(
            replica_id=replica_id,
            model=model,
            text=text,
            num_cluster_ranks=self.state.num_ranks,
            spare_s=self._spec.spare_s,
            may_grow=self._spec.ray_address is not None,
            adopts=adopts,
            log_level=self._log_level,
            tracing=self._spec.router.tracing,
            recording=self._spec.router.recording,
            inner_tls=self._spec.inner_tls,
        )
        return Formation(
            spec,
            listener,
            drained_nodes=lambda: self.state.drained_nodes,
            num_placed_ranks=lambda: self.state.num_placed_ranks,
        )


def _log_of(life: ControllerLife) -> LogSource:
    return LogSource(
        name=f"{_NAME}/{life.pid}",
        belongs_to=frozenset({_NAME}),
        node_id=life.node_id,
        path=life.log_file,
    )


def _open_recorder(config: RecordingConfig) -> Recorder | None:
    try:
        return config.open(_NAME)
    except RecordingError as error:  # the others, who cannot either, say so and do not begin
        logger.error("decisions of the autoscaler are not recorded: %s", error)
        return None
