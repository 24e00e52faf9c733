"""One wanted router over all of its lives: starts it, and starts it again on the same ports when it dies."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from weft.addresses import split_host_port
from weft.v1 import control_pb2

from cluster.lifecycle import Failure, GroupState, Lifecycle, RestartPolicy
from cluster.log_reader import LogSource
from cluster.ray_errors import in_a_line
from cluster.router_actor import RouterActor, RouterPlace
from cluster.saved_state import RouterRecord
from cluster.see_through import ask_actor, ask_until_told, end_actor, see_through
from router.config import RouterConfig

logger = logging.getLogger(__name__)

_ROUTER_ACTOR = ray.remote(RouterActor)
_START_TIMEOUT_S = 60.0  # also for one that is adopted to answer


class RouterProcess:
    """One wanted router, on the node of the controller."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        log_level: str,
        policy: RestartPolicy,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        restarts: int = 0,
        last_failure: Failure | None = None,
        adopts: bool = False,
    ) -> None:
        """Want a router that does not live yet; with `adopts`, one that may have outlived a former controller."""
        self.is_adopting = adopts
        """Whether it is unknown yet if the router's last life goes on."""
        self.lifecycle = Lifecycle(policy, clock(), restarts=restarts, was_ready=adopts, last_failure=last_failure)
        self.router_id = config.router_id
        self._config = config
        self._log_level = log_level
        self._clock = clock
        self._on_change = on_change
        self._actor: Any = None
        self._place: RouterPlace | None = None
        self._task: asyncio.Task[str] | None = None
        self._is_known = asyncio.Event()  # set when it is not, or no longer, adopting
        if not adopts:
            self._is_known.set()

    def reconcile(self) -> None:
        """Take note of an end, and start the router when it should be. Never blocks; idempotent."""
        now_s = self._clock()
        if self._task is not None and self._task.done():
            reason = self._task.result()
            logger.warning("router %s ended: %s", self.router_id, reason)
            self._task = self._place = None
            self._end_adoption()
            self.lifecycle.failed(reason, now_s)
        if self._task is None and self.lifecycle.may_form(now_s):
            self._begin_life(now_s)

    async def stop(self, grace_s: float) -> None:
        """Let the router finish its requests, at most `grace_s`, and end it."""
        end_by_s = self._clock() + grace_s
        if self.is_adopting:
            await self._find_out(grace_s)
        self.lifecycle.drain(self._clock())
        self._on_change()
        task = self._task  # another `stop` may end it meanwhile
        if task is not None:
            if self._place is not None:
                left_s = max(0.0, end_by_s - self._clock())
                asked = asyncio.ensure_future(self._actor.stop.remote(left_s))
                # Whether it answers does not matter: it may die or hang now too.
                asked.add_done_callback(lambda done: done.cancelled() or done.exception())
                await asyncio.wait([task], timeout=left_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._task = self._place = None
        self._end_adoption()
        self.lifecycle.stopped(self._clock())

    @property
    def record(self) -> RouterRecord:
        """What a successor of the controller must know: where it listens in every life, and its restarts."""
        config, failure = self._config, self.lifecycle.last_failure
        return RouterRecord(
            grpc=config.grpc_port,
            http=config.http_port,
            metrics=config.metrics_port,
            restarts=self.lifecycle.restarts,
            last_failure=failure.reason if failure else "",
            failed_ago_s=self._clock() - failure.at_s if failure else 0.0,
        )

    def log_sources(self) -> list[LogSource]:
        """Return the log of the router's process, while it runs."""
        if self._place is None:
            return []
        place = self._place
        return [
            LogSource(
                name=f"{self.router_id}/{place.pid}",
                belongs_to=frozenset({"router", self.router_id}),
                node_id=place.node_id,
                path=place.log_file,
            )
        ]

    def status(self) -> control_pb2.RouterStatus:
        """Tell where the router is and whether it lives."""
        is_draining = self.lifecycle.state is GroupState.DRAINING
        failure = self.lifecycle.last_failure
        status = control_pb2.RouterStatus(
            router_id=self.router_id,
            alive=is_draining or self.lifecycle.state is GroupState.READY,
            detail=self.lifecycle.detail,
            restarts=self.lifecycle.restarts,
            failed=self.lifecycle.state is GroupState.FAILED,
            draining=is_draining,
            last_failure=failure
            and control_pb2.Failure(reason=failure.reason, seconds_ago=self._clock() - failure.at_s),
        )
        if self._place is not None:
            status.pid = self._place.pid
            status.grpc_address = self._place.grpc_address
            status.http_address = self._place.http_address or ""
            status.metrics_address = self._place.metrics_address or ""
        return status

    def _begin_life(self, now_s: float) -> None:
        self.lifecycle.placed(now_s)
        if self.is_adopting:
            self.lifecycle.starting("a new controller looks for its process")
        self._task = asyncio.create_task(self._run(adopts=self.is_adopting))
        self._task.add_done_callback(lambda _: self._on_change())

    async def _find_out(self, timeout_s: float) -> None:
        """Look whether the last life goes on, and wait for a while: what is not looked for is not ended."""
        if self._task is None:
            self._begin_life(self._clock())
        assert self._task is not None
        known = asyncio.create_task(self._is_known.wait())
        await asyncio.wait([known, self._task], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        known.cancel()

    def _end_adoption(self) -> None:
        self.is_adopting = False
        self._is_known.set()

    async def _run(self, *, adopts: bool) -> str:
        """Run one life of the router; return why it ended."""
        self._actor = None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                if not (await self._find() if adopts else await self._create()):
                    return "was lost while no controller watched it"
                await self._note_ready()
            outcome = await ask_actor(self._actor.ended.remote)
            return str(outcome.message)
        except (RayError, ValueError) as error:  # a ValueError where the name is not free again yet
            return in_a_line(error)
        except TimeoutError:
            return f"not ready within {_START_TIMEOUT_S:g} s"
        finally:
            if self._actor is not None:
                await see_through(ask_until_told(end_actor, self._actor))

    async def _create(self) -> bool:
        node = ray.get_runtime_context().get_node_id()
        actor = _ROUTER_ACTOR.options(
            num_cpus=0,
            max_restarts=0,
            name=self.router_id,
            lifetime="detached",  # else it would end with the controller
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        self._actor = actor.remote(self._config, self._log_level)
        await self._actor.begin.remote()
        return True

    async def _find(self) -> bool:
        """Take over the router that a former controller started; return whether it is there and had begun."""
        await see_through(self._look())  # what is not found is not ended
        return self._actor is not None and bool(await ask_actor(self._actor.has_begun.remote))

    async def _look(self) -> None:
        with suppress(ValueError):  # there is none of this name
            self._actor = await ask_until_told(ray.get_actor, self.router_id)

    async def _note_ready(self) -> None:
        ready = asyncio.ensure_future(ask_actor(self._actor.ready.remote))
        ended = asyncio.ensure_future(ask_actor(self._actor.ended.remote))
        try:
            await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
                return
            place: RouterPlace = ready.result()
            self._place = place
            self._end_adoption()
            # A restart takes the same ports, so that clients find it again.
            self._config = replace(
                self._config,
                grpc_port=_port(place.grpc_address),
                http_port=_port(place.http_address) if place.http_address else None,
                metrics_port=_port(place.metrics_address) if place.metrics_address else None,
            )
            self.lifecycle.ready(self._clock())
            self._on_change()
        finally:
            ready.cancel()
            ended.cancel()


def _port(address: str) -> int:
    return split_host_port(address)[1]
