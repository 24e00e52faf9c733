"""The Ray actor that hosts the router; the router itself knows nothing of Ray."""

import asyncio
import os
from dataclasses import dataclass

from cluster.logs import configure_logging
from cluster.rank_actor import Outcome
from router.config import RouterConfig
from router.errors import RouterConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlace:
    """Where a router runs and listens."""

    pid: int
    grpc_address: str
    http_address: str | None
    metrics_address: str | None


class RouterActor:
    """One router. `run` lasts as long as it does."""

    def __init__(self, config: RouterConfig, log_level: str) -> None:
        configure_logging(log_level)
        self._config = config
        self._stop = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._place: RouterPlace | None = None

    async def run(self) -> Outcome:
        """Serve until `stop`."""
        from router.app import BoundAddresses, run_router  # the controller, which creates this class, need not carry it

        def on_ready(bound: BoundAddresses) -> None:
            self._place = RouterPlace(
                pid=os.getpid(), grpc_address=bound.grpc, http_address=bound.http, metrics_address=bound.metrics
            )
            self._is_ready.set()

        try:
            await run_router(self._config, stop=self._stop, on_ready=on_ready)
        except RouterConfigError as error:
            return Outcome(message=str(error))
        return Outcome(message="stopped")

    async def ready(self) -> RouterPlace:
        """Wait until the router listens."""
        await self._is_ready.wait()
        assert self._place is not None
        return self._place

    async def stop(self) -> None:
        """Finish the requests in flight, within the router's grace, and end."""
        self._stop.set()
