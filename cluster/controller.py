"""The Ray actor that keeps a cluster as it is wanted: in each of its lives it goes on from what was saved.

Ray starts it again when its process dies. Groups and routers do not depend on it and go on meanwhile; the new one reads
what was saved, takes over whatever lives, and only then tells routers of the membership. What runs in it while it
serves is in reconciler.py.
"""

import asyncio
import logging
import os
import time
import warnings
from dataclasses import replace

import grpc
import ray
from ray.exceptions import RayError

from cluster.code_id import has_code_changed
from cluster.control_server import bind_control_port
from cluster.errors import ClusterConfigError, SavedStateError, StartError
from cluster.logs import configure_logging, own_log
from cluster.ray_errors import in_a_line
from cluster.reconciler import ControllerLife, Reconciler
from cluster.saved_state import RayStateStore, SavedState, decode, encode
from cluster.spares import SpareKind, leave_spares, take_spare
from cluster.started_settings import decode_spec
from workers.cores import give_way

logger = logging.getLogger(__name__)

CONTROLLER_NAME = "controller"
"""The actor's name in the Ray namespace of this program."""
NAMESPACE = "weft"

_EXIT_DELAY_S = 1.0  # for the answer to Shutdown, and the end of `stopped`, to reach whoever waits
_RETRY_S = 1.0
_BIND_TIMEOUT_S = 30.0  # a successor may come before the kernel has freed the port
_CANNOT_GO_ON = (
    "the controller ends, for it cannot go on with the code that is here now: %s; groups and routers go on; allowed: "
    "`weft serve --take-over`, which goes on with them; where that fails too, under the code before"
)


class Controller:
    """The actor of one cluster. `start` once; later lives start by themselves. Lasts until Shutdown is called."""

    def __init__(self, settings: bytes, log_level: str, started_s: float) -> None:
        """Be one life of the actor. Ray keeps the arguments: these are of the code that has started the service.

        Args:
            settings: what the service was started with, as started_settings.py tells it.
            log_level: of every process.
            started_s: when that was, by the wall clock.

        Raises:
            ClusterConfigError: the code that is here does not take the settings; Ray does not start the actor again.
        """
        configure_logging(log_level)
        take_spare()
        give_way()
        try:
            self._spec = decode_spec(settings)
        except ClusterConfigError as error:
            logger.error(_CANNOT_GO_ON, error)
            raise
        self._started_s = started_s
        self._log_level = log_level
        self._store = RayStateStore()
        actor_id, node_id = ray.get_runtime_context().get_actor_id(), ray.get_runtime_context().get_node_id()
        assert actor_id is not None
        self._id: str = actor_id
        """Ray id of the actor, the same in all lives."""
        self._life = ControllerLife(pid=os.getpid(), node_id=node_id, log_file=own_log())
        self._has_stopped = asyncio.Event()
        self._reconciler: Reconciler | None = None
        """What runs while the controller serves; None: it does not serve yet."""
        self._goes_on = False
        self._starting = asyncio.Lock()
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
        async with self._starting:  # a model may be fetched first, and another `weft serve` ask meanwhile
            return await self._start_once(takes_over=takes_over)

    async def stopped(self) -> None:
        """Wait until the service was shut down; the actor ends soon after."""
        await self._has_stopped.wait()

    async def _start_once(self, *, takes_over: bool) -> tuple[str, bool]:
        if self._has_stopped.is_set():
            raise StartError("the service was stopped, and its controller is about to end; start another one then")
        if self._reconciler is None:
            saved = self._load()
            port = saved.control_port or self._spec.control_port
            listener, address = bind_control_port(self._spec.host, port, self._spec.inner_tls)
            reconciler = self._make_reconciler(saved, address)
            self._goes_on = takes_over and saved.has_service
            if not self._goes_on and not reconciler.state.is_stopping:  # the one before was lost while it stopped
                await reconciler.state.apply(self._spec.models)
            self._reconciler = await self._begin(reconciler, listener)
        return self._reconciler.address, self._goes_on

    async def _resume(self) -> None:
        """Go on where the life before ended; when that cannot be, end, and Ray tries again, unless the code is why."""
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
            self._reconciler = await self._begin(self._make_reconciler(saved, address), listener)
        except BaseException as error:
            if self._is_by_code(error):
                logger.error(_CANNOT_GO_ON, in_a_line(error), exc_info=True)
                _end_this_actor()
                await asyncio.Event().wait()  # nobody is answered any more
            logger.exception("the controller cannot go on where it ended")
            await asyncio.sleep(_RETRY_S)
            os._exit(1)

    def _is_by_code(self, error: BaseException) -> bool:
        """Return whether the code that is here cannot go on, and the next life could not either."""
        may_pass = isinstance(error, (StartError, RayError))  # a port that is taken, a head that does not answer
        return isinstance(error, SavedStateError) or (not may_pass and has_code_changed(self._started_s))

    async def _bind_again(self, port: int) -> tuple[grpc.aio.Server, str]:
        give_up_s = time.monotonic() + _BIND_TIMEOUT_S
        while True:
            try:
                return bind_control_port(self._spec.host, port, self._spec.inner_tls)
            except StartError:
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(_RETRY_S / 4)

    def _make_reconciler(self, saved: SavedState, address: str) -> Reconciler:
        return Reconciler(
            self._spec, saved, address=address, life=self._life, store=self._store, log_level=self._log_level
        )

    async def _begin(self, reconciler: Reconciler, listener: grpc.aio.Server) -> Reconciler:
        await reconciler.start(listener)
        self._loop = asyncio.create_task(self._run(reconciler))
        return reconciler

    async def _run(self, reconciler: Reconciler) -> None:
        """Reconcile until shut down. A bug ends the process: its successor begins from what was saved."""
        try:
            await reconciler.run()
            await reconciler.close()
            await self._leave_nothing_to_do()
        except BaseException:
            logger.exception("the controller failed")
            os._exit(1)
        self._end()

    def _end(self) -> None:
        self._has_stopped.set()
        asyncio.get_running_loop().call_later(_EXIT_DELAY_S, _end_this_actor)

    async def _leave_nothing_to_do(self) -> None:
        if self._spec.spare_s:  # for a next controller and its routers
            count, lifetime_s = 1 + self._spec.num_routers, self._spec.spare_s
            await asyncio.to_thread(
                leave_spares, self._life.node_id, SpareKind.SERVICE, count=count, lifetime_s=lifetime_s
            )
        self._store.save(encode(SavedState(ended_controller=self._id)))  # last: a successor has nothing left to do

    def _load(self) -> SavedState:
        data = self._store.load()
        return SavedState() if data is None else decode(data)


def _is_successor() -> bool:
    """Return whether Ray has started this actor again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's property warns of another one that it uses itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _end_this_actor() -> None:
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
