"""A whole service started from this process: Ray, the controller, and through it groups and routers.

Used by `weft serve`, the demo and the end-to-end tests. After `start` everything is asked over gRPC; Ray only tells
whether the controller lives.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import (
    ActorAlreadyExistsError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from weft.v1 import control_pb2

from cluster.awaited import Awaited
from cluster.config import ClusterSpec
from cluster.control_client import ControlClient
from cluster.controller import CONTROLLER_NAME, NAMESPACE, Controller
from cluster.errors import ClusterConfigError, ControllerError, SavedStateError, StartError, StoppedAtStartError
from cluster.local_ray import has_local_ray_died, join_ray, leave_ray, logs_folder, start_local_ray
from cluster.patience import Patience
from cluster.preflight import check_spec
from cluster.readiness import first_failure, is_ready
from cluster.saved_state import RayStateStore, decode
from cluster.signals import deaf_to_signals, signals_wait
from cluster.spares import SpareKind, spare_options
from cluster.started_settings import decode_spec, encode_spec
from router.tls import InnerTls

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_STOPPED_TIMEOUT_S = 5.0
_LOOK_TIMEOUT_S = 1.0
_STARTED_TIMEOUT_S = 10.0  # for a controller to have begun what is stopped then
_ANSWER_TIMEOUT_S = 90.0  # a controller may be between two lives, and wait for its port
_GOES_ON = "this Ray cluster has a service already, which goes on as it is; `weft apply` changes it"

OnStatus = Callable[[control_pb2.GetStatusResponse], None]


class Service:
    """A running service. Made by `start`; `close` always, which ends what was started on a local Ray."""

    def __init__(
        self, *, control_address: str, spec: ClusterSpec, controller: Any, was_taken_over: bool = False
    ) -> None:
        self.control_address = control_address
        self.spec = spec
        """What it was started with; where it was taken over, that may be another file than the caller's."""
        self.was_taken_over = was_taken_over
        """Whether it ran before `start`: somebody may depend on it, whatever state it is in."""
        self.client = ControlClient(control_address, tls=spec.inner_tls)
        self._controller = controller  # an actor ends when its last handle is dropped
        # Lasts over the controller's lives. A future, for ray.wait counts its timeout by the wall clock: where that is
        # set back by an hour, `weft serve` would hear no signal for an hour.
        self._stopped: Awaited[None] = Awaited(controller.stopped.remote().future())

    @classmethod
    def start(cls, spec: ClusterSpec, *, log_level: str = "warning", takes_over: bool = False) -> "Service":
        """Start Ray if no cluster is named, and the controller. Returns before the groups are READY.

        Args:
            spec: what to serve.
            log_level: of every process.
            takes_over: on a cluster that has a service already, go on with that one as it is.

        Raises:
            ClusterError, ModelError, EngineConfigError: the message says what stopped it; nothing is left running.
        """
        spec = check_spec(spec)
        is_local = spec.ray_address is None
        log_to_driver = log_level in ("debug", "info")
        created = started = None
        try:
            if spec.ray_address is None:
                start_local_ray(log_to_driver=log_to_driver)
            else:
                join_ray(spec.ray_address, log_to_driver=log_to_driver)
                _wait_for_end_of_stopped()
            if ray.get_runtime_context().runtime_env:  # the job's actors are given it, and spares have another one
                spec = replace(spec, spare_s=0.0)
            running = _take_over(spec) if takes_over else None
            if running is not None:
                return running
            with signals_wait():  # a controller of which nobody knows would stay
                created = _create_controller(spec, is_local=is_local, log_level=log_level)
                started = created.start.remote(takes_over=takes_over)
            address, goes_on = ray.get(started)
        except BaseException as error:
            if not is_local:  # a local Ray ends with all that runs there
                if started is not None:
                    _stop_what_began(created, started, spec.inner_tls)
                if created is not None:
                    ray.kill(created)
            leave_ray()
            match error:
                case RayTaskError():
                    raise StartError(str(error.cause or error)) from error
                case ActorAlreadyExistsError():
                    message = (
                        "this Ray cluster has a Weft already; allowed: one, so `weft stop` it first, or --take-over"
                    )
                    raise StartError(message) from error
                case RayError():
                    raise StartError(f"the controller did not start: {error}") from error
            raise
        if goes_on:
            logger.warning(_GOES_ON)
        return cls(control_address=address, spec=spec, controller=created, was_taken_over=goes_on)

    def status(self) -> control_pb2.GetStatusResponse:
        """Return the present state. Raises ControllerError."""
        return self.client.status()

    def wait_ready(self, *, on_status: OnStatus | None = None, timeout_s: float | None = None) -> None:
        """Wait until every group is READY and every router listens; tells `on_status` how far it is.

        Raises:
            StartError: a group or a router gave up, the controller died, or the time is over.
            StoppedAtStartError: somebody has stopped the service.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                if self.wait_stopped(0):
                    raise StoppedAtStartError("the service was stopped before it was ready")
            except ControllerError as error:
                raise StartError(f"{error} before the service was ready") from error
            with suppress(ControllerError):  # it is busy, or between two lives
                status = self.status()
                if on_status is not None:
                    on_status(status)
                if failure := first_failure(status):
                    raise StartError(failure)
                if is_ready(status):
                    return
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise StartError(f"not ready within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def is_alive(self) -> bool:
        """Return whether the controller has neither died for good nor been shut down."""
        return not self._stopped.wait(0)

    def wait_stopped(self, timeout_s: float) -> bool:
        """Wait until the service was shut down by somebody, at most `timeout_s`; return whether it was.

        Raises:
            ControllerError: the controller died instead.
        """
        if not self._stopped.wait(timeout_s):
            return False
        try:
            self._stopped.result()
        except (RayActorError, RayTaskError) as error:
            raise ControllerError("the controller died") from error
        return True

    def shut_down(self, grace_s: float) -> None:
        """Finish the requests in flight, at most `grace_s`, and stop routers, groups and the controller.

        A controller that dies meanwhile, or is between two lives, is asked again. Where a signal has reached the
        processes of a local Ray as well, nobody is left to wait for.

        Raises:
            ControllerError: it died for good, or does not answer.
        """
        thread = ThreadPoolExecutor(1)
        patience = Patience(has_answered=True)
        stopping = Awaited(thread.submit(patience.ask, lambda: self.client.shut_down(grace_s)))
        thread.shutdown(wait=False)  # who is interrupted does not wait for the call, which `close` ends
        try:
            while not stopping.wait(_POLL_S):
                if has_local_ray_died():
                    self.client.close()
                    logger.warning("Ray has ended first; requests in flight are lost")
                    return
                if self.wait_stopped(0):  # by a successor, which had gone on with the stop and found all ended
                    return
        finally:
            patience.note_stopping(is_stopping=True)  # the call is over, or nobody waits for it
        stopping.result()
        self._stopped.wait(_STOPPED_TIMEOUT_S)  # Ray complains of a call that is open when it ends

    def close(self) -> None:
        """Disconnect. A local Ray ends, and with it everything; a cluster goes on, and so does the service on it."""
        self.client.close()
        leave_ray()

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _wait_for_end_of_stopped() -> None:
    """Wait until the controller of a service stopped a moment ago has left its name; not for one that serves."""
    give_up_s = time.monotonic() + _STOPPED_TIMEOUT_S
    while time.monotonic() < give_up_s:
        try:
            controller: Any = ray.get_actor(CONTROLLER_NAME)
        except ValueError:
            return
        if not ray.wait([controller.stopped.remote()], timeout=_LOOK_TIMEOUT_S)[0]:
            return
        time.sleep(_POLL_S)


def _stop_what_began(controller: Any, started: Any, tls: InnerTls | None) -> None:
    """Stop what a controller began for a start that failed or was interrupted: on a joined cluster it would go on."""
    with deaf_to_signals(), suppress(RayError, ControllerError):  # it has not begun
        address, goes_on = ray.get(started, timeout=_STARTED_TIMEOUT_S)
        if not goes_on:
            with ControlClient(address, tls=tls) as client:
                client.shut_down(0.0)
            ray.wait([controller.stopped.remote()], timeout=_STOPPED_TIMEOUT_S)


def _take_over(spec: ClusterSpec) -> Service | None:
    """Return the service that the cluster has, whose `weft serve` has gone; None where it has none.

    `spec` is what the caller would have started.

    Raises:
        StartError: its controller does not answer.
    """
    try:
        controller: Any = ray.get_actor(CONTROLLER_NAME)
        answer = ray.get(controller.start.remote(), timeout=_ANSWER_TIMEOUT_S)
        spec = _started_with() or spec
    except GetTimeoutError as error:
        raise StartError(
            f"the controller of this Ray cluster's service has not answered within {_ANSWER_TIMEOUT_S:g} s: "
            f"{_why_silent()}; on its node it logs to {logs_folder()}"
        ) from error
    except (ValueError, RayActorError, ActorUnschedulableError):  # there is none, or it went down with its node
        return None
    address = answer if isinstance(answer, str) else answer[0]  # a controller of earlier code tells the address alone
    logger.warning(_GOES_ON)
    return Service(control_address=address, spec=spec, controller=controller, was_taken_over=True)


def _started_with() -> ClusterSpec | None:
    """Return what the service was started with; None where other code has saved, which does not say so.

    The controller is not asked: an actor of other code that lacks the method never answers, and raises nothing either.
    """
    try:
        return decode_spec(decode(RayStateStore().load() or b"").settings)
    except (SavedStateError, ClusterConfigError):
        return None


def _why_silent() -> str:
    data = RayStateStore().load()
    try:
        if data is not None:
            decode(data)
    except SavedStateError as error:
        return str(error)
    return "it hangs, or ends again and again"


def _create_controller(spec: ClusterSpec, *, is_local: bool, log_level: str) -> Any:
    node = ray.get_runtime_context().get_node_id()  # this machine's: here `weft` and clients look for it
    actor = ray.remote(Controller).options(
        name=CONTROLLER_NAME,
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        lifetime=None if is_local else "detached",
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        **(spare_options(node, SpareKind.SERVICE) if spec.spare_s else {}),
    )
    return actor.remote(encode_spec(spec), log_level, time.time())
