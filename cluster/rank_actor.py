"""The Ray actor that hosts one rank of a replica group, and what it tells the controller.

The controller imports this file to create ranks, so whatever needs torch is imported when the rank runs, off the event
loop. A rank whose engine fails ends its process: nothing is left that looks alive and does not answer.
"""

import asyncio
import importlib
import logging
import os
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import ray

from cluster.errors import ClusterError
from cluster.logs import configure_logging
from cluster.models import resolve_model
from cluster.rank_metrics import MetricsListener, RankCollector
from parallel.errors import ModelError
from router.config import TracingConfig
from workers.config import EngineConfig
from workers.errors import EngineConfigError
from workers.stats import RankStats

if TYPE_CHECKING:
    from cluster.leader import Leader

logger = logging.getLogger(__name__)

_EXIT_DELAY_S = 0.5  # for the outcome to reach the controller
_SWITCH_INTERVAL_S = 0.0002
"""How long the engine's thread may keep the event loop waiting. A frame changes threads several times on its way out,
and each time Python's own 5 ms are longer than a step of a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Which rank of which replica, and what it runs."""

    replica_id: str
    model: str
    """What clients call it."""
    rank: int
    engine: EngineConfig
    num_threads: int
    log_level: str = "warning"
    tracing: TracingConfig = field(default_factory=TracingConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs."""

    node: str
    pid: int
    metrics_address: str = ""
    """Where Prometheus reads what it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddresses:
    """Where a READY replica listens."""

    address: str
    metrics_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why a process, or a whole formation, ended by itself."""

    message: str
    is_refusal: bool = False
    """The model or the settings cannot work; another attempt would end the same way."""


class RankActor:
    """One rank. `run` lasts as long as the rank does; the other methods are answered meanwhile."""

    def __init__(self, spec: RankSpec) -> None:
        configure_logging(spec.log_level)
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(spec.num_threads)  # read once, when torch and numpy are imported
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # Every rank begins at once; those who need it wait for the import to end.
        threading.Thread(target=_import_engine, args=(spec.rank,), daemon=True).start()
        self._spec = spec
        self._host = ray.util.get_node_ip_address()
        self._progress = 0.0
        self._stats = RankStats()
        self._metrics = MetricsListener(self._host)
        labels = {"model": spec.model, "replica": spec.replica_id, "rank": str(spec.rank)}
        self._metrics.add(RankCollector(self._stats, loaded_ratio=lambda: self._progress, labels=labels))
        self._leader: Leader | None = None
        self._addresses: ReplicaAddresses | None = None
        self._is_ready = asyncio.Event()

    async def place(self) -> RankPlace:
        """Say where this rank runs."""
        return RankPlace(node=self._host, pid=os.getpid(), metrics_address=self._metrics.address)

    async def progress(self) -> float:
        """Say how much of this rank's weights is loaded, 0 to 1."""
        return self._progress

    async def open_rendezvous(self) -> tuple[str, int]:
        """On the leader of several ranks: open the store where they meet, and return its host and port."""
        return await asyncio.to_thread(self._open_rendezvous)

    async def ready(self) -> ReplicaAddresses:
        """On the leader: wait until the replica serves."""
        await self._is_ready.wait()
        assert self._addresses is not None
        return self._addresses

    async def run(self, host: str, port: int) -> Outcome:
        """Load the model and work until this rank, or another one of the group, fails."""
        try:
            config = await asyncio.to_thread(self._resolve)
            if self._spec.rank == 0:
                await self._lead(config)
            else:
                await asyncio.to_thread(self._follow, config, host, port)
        except (ModelError, EngineConfigError, ClusterError) as error:
            logger.error("rank %d of %s refused: %s", self._spec.rank, self._spec.replica_id, error)
            return self._end(Outcome(message=str(error), is_refusal=True))
        except Exception as error:
            logger.exception("rank %d of %s failed", self._spec.rank, self._spec.replica_id)
            return self._end(Outcome(message=f"rank {self._spec.rank}: {str(error) or type(error).__name__}"))
        return self._end(Outcome(message=f"rank {self._spec.rank}: its leader closed the group"))

    async def drain(self) -> None:
        """On the leader: take no new requests, and wait until those in flight have ended."""
        if self._leader is not None:
            await self._leader.drain()

    async def _lead(self, config: EngineConfig) -> None:
        leader = await asyncio.to_thread(self._import_leader)
        self._leader = leader
        try:
            address = await leader.start(config, self._set_progress, self._stats)
            self._addresses = ReplicaAddresses(address=address, metrics_address=self._metrics.address)
            self._is_ready.set()
            await leader.wait_failed()
        finally:
            await leader.close()

    def _import_leader(self) -> "Leader":
        from cluster.leader import Leader  # torch: a second or two, off the event loop

        if self._leader is None:
            self._leader = Leader(self._spec, self._host, self._metrics)
        return self._leader

    def _open_rendezvous(self) -> tuple[str, int]:
        return self._import_leader().open_rendezvous()

    def _follow(self, config: EngineConfig, host: str, port: int) -> None:
        from workers.rank import follow_group  # torch, off the event loop

        follow_group(config, rank=self._spec.rank, host=host, port=port, progress=self._set_progress, stats=self._stats)

    def _resolve(self) -> EngineConfig:
        """The model's folder on this node; the threads of this rank."""
        config = self._spec.engine
        return replace(config, model=str(resolve_model(config.model)), num_threads=self._spec.num_threads)

    def _set_progress(self, fraction: float) -> None:
        self._progress = fraction

    @staticmethod
    def _end(outcome: Outcome) -> Outcome:
        asyncio.get_running_loop().call_later(_EXIT_DELAY_S, os._exit, 1)
        return outcome


def _import_engine(rank: int) -> None:
    importlib.import_module("cluster.leader" if rank == 0 else "workers.rank")
