"""One wanted router over all of its lives: starts it, and starts it again on the same ports when it dies."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from weft.v1 import control_pb2

from cluster.lifecycle import GroupState, Lifecycle, RestartPolicy
from cluster.router_actor import RouterActor, RouterPlace
from router.config import RouterConfig

logger = logging.getLogger(__name__)

_ROUTER_ACTOR = ray.remote(RouterActor)
_START_TIMEOUT_S = 60.0


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
    ) -> None:
        self.lifecycle = Lifecycle(policy, clock())
        self._config = config
        self._log_level = log_level
        self._clock = clock
        self._on_change = on_change
        self._actor: Any = None
        self._place: RouterPlace | None = None
        self._task: asyncio.Task[str] | None = None

    def reconcile(self) -> None:
        """Take note of an end, and start the router when it should be. Never blocks; idempotent."""
        now_s = self._clock()
        if self._task is not None and self._task.done():
            reason = self._task.result()
            logger.warning("router %s ended: %s", self._config.router_id, reason)
            self._task = self._place = None
            self.lifecycle.failed(reason, now_s)
        if self._task is None and self.lifecycle.may_form(now_s):
            self.lifecycle.placed(now_s)
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(lambda _: self._on_change())

    async def stop(self, grace_s: float) -> None:
        """Let the router finish its requests, at most `grace_s`, and end it."""
        self.lifecycle.drain(self._clock())
        self._on_change()
        if self._task is not None:
            if self._place is not None:
                await self._actor.stop.remote()
                await asyncio.wait([self._task], timeout=grace_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = self._place = None
        self.lifecycle.stopped(self._clock())

    def status(self) -> control_pb2.RouterStatus:
        """Tell where the router is and whether it lives."""
        status = control_pb2.RouterStatus(
            router_id=self._config.router_id,
            alive=self.lifecycle.state is GroupState.READY,
            detail=self.lifecycle.detail,
            restarts=self.lifecycle.restarts,
            failed=self.lifecycle.state is GroupState.FAILED,
        )
        if self._place is not None:
            status.pid = self._place.pid
            status.grpc_address = self._place.grpc_address
            status.http_address = self._place.http_address or ""
            status.metrics_address = self._place.metrics_address or ""
        return status

    async def _run(self) -> str:
        """One life of the router; returns why it ended."""
        node = ray.get_runtime_context().get_node_id()
        affinity = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = _ROUTER_ACTOR.options(num_cpus=0, max_restarts=0, scheduling_strategy=affinity)
        self._actor = actor.remote(self._config, self._log_level)
        run = self._actor.run.remote()
        try:
            await self._note_ready(run)
            outcome = await run
            return str(outcome.message)
        except RayError as error:
            return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "died")
        finally:
            ray.kill(self._actor, no_restart=True)

    async def _note_ready(self, run: Any) -> None:
        ready = asyncio.ensure_future(_await(self._actor.ready.remote()))
        ended = asyncio.ensure_future(_await(run))
        try:
            await asyncio.wait([ready, ended], timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done() or ended.done():
                return
            place: RouterPlace = ready.result()
            self._place = place
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
    return int(address.rpartition(":")[2])


async def _await(ref: Any) -> Any:
    return await ref
