"""The Ray actor that hosts the router; the router itself knows nothing of Ray."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray

from cluster.logs import configure_logging, own_log
from cluster.rank_values import Outcome
from cluster.signals import on_sigterm
from cluster.spares import take_spare
from router.config import RouterConfig
from router.errors import RouterConfigError
from workers.cores import give_way

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlace:
    """Where a router runs and listens."""

    pid: int
    grpc_address: str
    http_address: str | None
    metrics_address: str | None
    node_id: str = ""
    """Ray id of the node."""
    log_file: str = ""
    """Path on that node; empty: the router logs to no file."""


class RouterActor:
    """One router. `begin` once, then `ended` lasts as long as it does. SIGTERM is a `stop` within its own grace.

    Nothing in it depends on whoever created it: when the controller is gone, the router goes on.
    """

    def __init__(self, config: RouterConfig, log_level: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        configure_logging(log_level)
        take_spare()
        give_way()
        self._config = config
        self._stop = asyncio.Event()
        self._end = Outcome(message="stopped")
        self._clock = clock
        self._end_by_s = math.inf  # time of the clock; infinity: nobody has said it
        self._is_ready = asyncio.Event()
        self._place: RouterPlace | None = None
        self._run: asyncio.Task[Outcome] | None = None

    async def begin(self) -> None:
        """Begin to serve."""
        on_sigterm(self._on_sigterm)
        self._run = asyncio.create_task(self._serve())

    async def ended(self) -> Outcome:
        """Wait until the router has ended, and say why."""
        assert self._run is not None
        return await asyncio.shield(self._run)

    async def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._run is not None

    async def _serve(self) -> Outcome:
        from router.app import BoundAddresses, run_router  # the controller, which creates this class, need not carry it

        def on_ready(bound: BoundAddresses) -> None:
            self._place = RouterPlace(
                pid=os.getpid(),
                grpc_address=bound.grpc,
                http_address=bound.http,
                metrics_address=bound.metrics,
                node_id=ray.get_runtime_context().get_node_id(),
                log_file=own_log(),
            )
            self._is_ready.set()

        try:
            await run_router(self._config, stop=self._stop, on_ready=on_ready, grace_s=self._left_s)
        except RouterConfigError as error:
            return Outcome(message=str(error))
        return self._end

    def _left_s(self) -> float:
        """Return how long requests in flight may take, when it was not ready for its time."""
        return self._config.grace_s if self._end_by_s == math.inf else max(0.0, self._end_by_s - self._clock())

    def _on_sigterm(self) -> None:
        if not self._stop.is_set():  # else Ray ends what was asked to end
            logger.warning("router %s was sent SIGTERM", self._config.router_id)
            self._end = Outcome(message="was told to end by SIGTERM")
            self._stop.set()

    async def ready(self) -> RouterPlace:
        """Wait until the router listens."""
        await self._is_ready.wait()
        assert self._place is not None
        return self._place

    async def stop(self, grace_s: float) -> None:
        """Say that it is not ready, finish the requests in flight and end, all within `grace_s`.

        When it is told again, it has ended by the earlier of the two times.
        """
        self._end_by_s = min(self._end_by_s, self._clock() + grace_s)
        self._stop.set()
