"""The Ray actor that keeps a cluster as it is wanted: wanted_state.py, its gRPC service, and the loops that drive them.

Ray starts it again when its process dies. Groups and routers do not depend on it and go on meanwhile; the new one reads
what was saved, takes over whatever lives, and only then tells routers of the membership. How a group is formed is said
in formation.py, when in lifecycle.py, what is told in control_server.py.
"""

import asyncio
import logging
import os
import time
import warnings
from dataclasses import replace

import grpc
import ray
from weft.addresses import split_host_port
from weft.recording import Recorder, RecordingConfig, RecordingError

from cluster.config import ClusterSpec, ModelSpec
from cluster.control_server import ControlServer, bind_control_port
from cluster.controller_metrics import ControllerListener
from cluster.demand import DemandLedger
from cluster.errors import StartError
from cluster.formation import Formation, FormationListener, FormationSpec, cluster_nodes
from cluster.lifecycle import RestartPolicy
from cluster.log_reader import LogReader, LogSource
from cluster.logs import configure_logging, own_log
from cluster.node_request import NodeRequest, ask_ray
from cluster.recording import ScalingRecording
from cluster.revision_files import RevisionText
from cluster.router_process import RouterProcess
from cluster.saved_state import ControllerLife, RayStateStore, RouterRecord, SavedState, decode, encode
from cluster.scaling import Scaling
from cluster.shared_ports import SharedPort
from cluster.spares import SpareKind, leave_spares, take_spare
from cluster.wanted_state import WantedState
from workers.cores import give_way

logger = logging.getLogger(__name__)

CONTROLLER_NAME = "controller"
"""Of the actor, in the Ray namespace of this program."""
NAMESPACE = "weft"

_TICK_S = 0.5  # changes wake the loop at once; the tick is for backoffs that have passed
_EXIT_DELAY_S = 1.0  # for the answer to Shutdown, and the end of `stopped`, to reach whoever waits
_RETRY_S = 1.0
_BIND_TIMEOUT_S = 30.0  # a successor may come before the kernel has freed the port


class Controller:
    """One for each cluster. `start` once; a life after the first starts by itself. Lasts until Shutdown is called."""

    def __init__(self, spec: ClusterSpec, log_level: str) -> None:
        configure_logging(log_level)
        take_spare()
        give_way()
        self._spec = spec
        self._log_level = log_level
        self._store = RayStateStore()
        actor_id, node_id = ray.get_runtime_context().get_actor_id(), ray.get_runtime_context().get_node_id()
        assert actor_id is not None
        self._id: str = actor_id
        """The same in all lives."""
        self._life = ControllerLife(pid=os.getpid(), node_id=node_id, log_file=own_log())
        self._logs = LogReader(node_id)
        self._changed = asyncio.Event()
        self._has_stopped = asyncio.Event()
        self._state: WantedState | None = None
        self._service: ControlServer | None = None
        self._metrics: ControllerListener | None = None
        self._scaling: Scaling | None = None
        self._recorder: Recorder | None = None
        self._shared_ports: list[SharedPort] = []
        self._nodes: NodeRequest | None = None
        """None: the Ray cluster is this machine."""
        self._goes_on = False
        self._loop: asyncio.Task[None] | None = None
        self._resuming: asyncio.Task[None] | None = None
        if _is_successor():
            self._resuming = asyncio.get_running_loop().create_task(self._resume())

    async def start(self, *, takes_over: bool = False) -> tuple[str, bool]:
        """Begin to serve what the spec says.

        Args:
            takes_over: where a controller before was lost with its machine, go on with what was wanted of it instead.

        Returns:
            The control address, and whether a service goes on as it was.

        Raises:
            ClusterError, ModelError: the message says what stopped it.
        """
        if self._resuming is not None:  # Ray repeats the call where the first life ended before it had answered
            await self._resuming
        if self._has_stopped.is_set():
            raise StartError("the service was stopped, and its controller is about to end; start another one then")
        if self._loop is None:
            saved = self._load()
            port = saved.control_port or self._spec.control_port
            listener, address = bind_control_port(self._spec.host, port, self._spec.inner_tls)
            self._create(saved, address)
            assert self._state is not None
            self._goes_on = takes_over and saved.has_service
            if not self._goes_on and not self._state.is_stopping:  # the one before was lost while it stopped
                await self._state.apply(self._spec.models)
            await self._begin(listener)
        assert self._service is not None
        return self._service.address, self._goes_on

    async def stopped(self) -> None:
        """Wait until the service was shut down; the actor ends soon after."""
        await self._has_stopped.wait()

    async def _resume(self) -> None:
        """Go on where the life before ended; when that cannot be, end, and Ray tries again."""
        try:
            saved = self._load()
            port = saved.control_port
            if saved.ended_controller == self._id:
                self._end()
                return
            if port is None:
                return  # `start` had not got so far, and is called again
            saved = replace(saved, num_restarts=saved.num_restarts + 1)
            logger.warning("controller restarted (%d): adopting %d groups", saved.num_restarts, len(saved.groups))
            listener, address = await self._bind_again(port)
            self._create(saved, address)
            await self._begin(listener)
        except BaseException:
            logger.exception("the controller cannot go on where it ended")
            await asyncio.sleep(_RETRY_S)
            os._exit(1)

    async def _bind_again(self, port: int) -> tuple[grpc.aio.Server, str]:
        give_up_s = time.monotonic() + _BIND_TIMEOUT_S
        while True:
            try:
                return bind_control_port(self._spec.host, port, self._spec.inner_tls)
            except StartError:
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(_RETRY_S / 4)

    def _create(self, saved: SavedState, address: str) -> None:
        is_successor = saved.has_service
        saved = replace(saved, control_port=split_host_port(address)[1])
        if saved.controller is not None:  # of the life before
            self._logs.note([_log_of(saved.controller)])
        self._state = WantedState(
            saved,
            routers=self._make_routers(saved, address),
            form=self._form,
            save=self._save,
            nodes=cluster_nodes,
            changed=self._changed,
            policy=RestartPolicy(),
        )
        self._metrics = ControllerListener(
            self._state,
            lambda: [] if self._service is None else self._service.outside_routers(),
            host=self._spec.host,
            port=saved.metrics_port or self._spec.control_metrics_port,
        )
        demand = DemandLedger()
        self._recorder = _open_recorder(self._spec.router.recording)
        recording = None if self._recorder is None else ScalingRecording(self._recorder)
        self._scaling = Scaling(self._state, demand, recording=recording)
        if self._spec.ray_address is not None:
            self._nodes = NodeRequest(ask_ray, is_successor=is_successor)
        self._service = ControlServer(
            self._state,
            self._logs,
            demand,
            address=address,
            metrics_address=self._metrics.address,
            num_restarts=saved.num_restarts,
        )

    def _make_routers(self, saved: SavedState, address: str) -> list[RouterProcess]:
        """Want routers on the ports of those of the controller before, or else on the ones that they are to have."""
        ports = saved.routers
        if not ports:
            first = self._hold_ports() if self._spec.num_routers > 1 else self._wanted_ports()
            others = first if first.metrics is None else replace(first, metrics=0)
            ports = {f"router-{number}": others if number else first for number in range(self._spec.num_routers)}
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

    async def _begin(self, listener: grpc.aio.Server) -> None:
        assert self._service is not None
        await self._service.start(listener)
        self._loop = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Reconcile until shut down. A bug ends the process: its successor begins from what was saved."""
        assert self._scaling is not None
        assert self._state is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                scaling = tasks.create_task(self._scaling.run())
                if self._state.is_stopping:  # under the life before
                    tasks.create_task(self._state.finish_stop())
                await self._reconcile_until_stopped()
                scaling.cancel()
            await self._close()
        except BaseException:
            logger.exception("the controller failed")
            os._exit(1)
        self._end()

    def _end(self) -> None:
        self._has_stopped.set()
        asyncio.get_running_loop().call_later(_EXIT_DELAY_S, _end_this_actor)

    async def _reconcile_until_stopped(self) -> None:
        assert self._state is not None
        assert self._service is not None
        while not self._state.is_stopped:
            self._changed.clear()
            self._state.reconcile()
            self._logs.note([*self._state.log_sources(), _log_of(self._life)])
            if not self._state.is_adopting:  # a membership without those not yet found would send clients away
                await self._service.publish()
            if self._nodes is not None:
                await self._nodes.want(self._state.missing_bundles())
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _close(self) -> None:
        assert self._service is not None
        assert self._metrics is not None
        if self._nodes is not None:
            await self._nodes.close()
        await self._service.stop()
        await self._metrics.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._spec.spare_s:  # for a next controller and its routers
            count, lifetime_s = 1 + self._spec.num_routers, self._spec.spare_s
            await asyncio.to_thread(
                leave_spares, self._life.node_id, SpareKind.SERVICE, count=count, lifetime_s=lifetime_s
            )
        self._store.save(encode(SavedState(ended_controller=self._id)))  # last: a successor has nothing left to do

    def _save(self, state: SavedState) -> None:
        assert self._metrics is not None
        _, port = split_host_port(self._metrics.address)
        self._store.save(encode(replace(state, metrics_port=port, controller=self._life)))

    def _load(self) -> SavedState:
        data = self._store.load()
        return SavedState() if data is None else decode(data)

    def _form(
        self,
        replica_id: str,
        model: ModelSpec,
        listener: FormationListener,
        *,
        text: RevisionText | None,
        adopts: bool,
    ) -> Formation:
        assert self._state is not None
        state = self._state
        spec = FormationSpec(
            replica_id=replica_id,
            model=model,
            text=text,
            num_cluster_ranks=state.num_ranks,
            spare_s=self._spec.spare_s,
            may_grow=self._spec.ray_address is not None,
            adopts=adopts,
            log_level=self._log_level,
            tracing=self._spec.router.tracing,
            recording=self._spec.router.recording,
            inner_tls=self._spec.inner_tls,
        )
        return Formation(spec, listener, lambda: state.drained_nodes)


def _log_of(life: ControllerLife) -> LogSource:
    return LogSource(
        name=f"{CONTROLLER_NAME}/{life.pid}",
        belongs_to=frozenset({CONTROLLER_NAME}),
        node_id=life.node_id,
        path=life.log_file,
    )


def _open_recorder(config: RecordingConfig) -> Recorder | None:
    try:
        return config.open(CONTROLLER_NAME)
    except RecordingError as error:  # the others, who cannot either, say so and do not begin
        logger.error("decisions of the autoscaler are not recorded: %s", error)
        return None


def _is_successor() -> bool:
    """Whether Ray has started this actor again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's property warns of another one that it uses itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _end_this_actor() -> None:
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
