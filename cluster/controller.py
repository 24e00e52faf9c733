"""The Ray actor that keeps a cluster as it is wanted: wanted_state.py, its gRPC service, and the loop that drives both.

How a group is formed is said in formation.py, when in lifecycle.py, what is told in control_server.py.
"""

import asyncio
import time
from dataclasses import replace

import ray

from cluster.config import ClusterSpec, ModelSpec
from cluster.control_server import ControlServer, bind_control_port
from cluster.controller_metrics import ControllerListener
from cluster.formation import Formation, FormationListener, FormationSpec
from cluster.lifecycle import RestartPolicy
from cluster.logs import configure_logging
from cluster.router_process import RouterProcess
from cluster.wanted_state import WantedState

CONTROLLER_NAME = "controller"
"""Of the actor, in the Ray namespace of this program."""
NAMESPACE = "weft"

_TICK_S = 0.5  # changes wake the loop at once; the tick is for backoffs that have passed
_EXIT_DELAY_S = 1.0  # for the answer to Shutdown, and the end of `run`, to reach whoever waits


class Controller:
    """One for each cluster. `start` once, then `run` lasts until Shutdown is called on the gRPC service."""

    def __init__(self, spec: ClusterSpec, log_level: str) -> None:
        configure_logging(log_level)
        self._spec = spec
        self._log_level = log_level
        self._changed = asyncio.Event()
        self._state: WantedState | None = None
        self._service: ControlServer | None = None
        self._metrics: ControllerListener | None = None

    async def start(self) -> str:
        """Begin to serve, and return the control address. Raises ClusterError or ModelError."""
        listener, address = bind_control_port(self._spec.host, self._spec.control_port)
        router = RouterProcess(
            replace(self._spec.router, control=address),
            log_level=self._log_level,
            policy=RestartPolicy(),
            clock=time.monotonic,
            on_change=self._changed.set,
        )
        self._state = WantedState(
            self._spec, routers=[router], form=self._form, changed=self._changed, policy=RestartPolicy()
        )
        self._metrics = ControllerListener(self._state, host=self._spec.host, port=self._spec.control_metrics_port)
        self._service = ControlServer(self._state, metrics_address=self._metrics.address)
        await self._service.start(listener)
        return address

    async def run(self) -> None:
        """Reconcile until shut down; the actor ends soon after."""
        assert self._state is not None
        assert self._service is not None
        assert self._metrics is not None
        while not self._state.is_stopped:
            self._changed.clear()
            self._state.reconcile()
            await self._service.publish()
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
        await self._service.stop()
        await self._metrics.close()
        asyncio.get_running_loop().call_later(_EXIT_DELAY_S, _end_this_actor)

    def _form(self, replica_id: str, model: ModelSpec, listener: FormationListener) -> Formation:
        spec = FormationSpec(
            replica_id=replica_id,
            model=model,
            num_cluster_ranks=self._spec.num_ranks,
            may_grow=self._spec.ray_address is not None,
            log_level=self._log_level,
            tracing=self._spec.router.tracing,
        )
        return Formation(spec, listener)


def _end_this_actor() -> None:
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
