"""The Ray actor that hosts one rank of a replica group; what it is told and tells is in rank_values.py.

The controller imports this file to create ranks, so whatever needs torch is imported when the rank runs, off the event
loop. A rank whose engine fails ends its process: nothing is left that looks alive and does not answer.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from weft.recording import RecordingError

from cluster.errors import ClusterError, GroupTerminatedError
from cluster.imports import import_for_good, leave_removed_folder
from cluster.logs import configure_logging, own_log
from cluster.rank_metrics import RankCollector, listen_for_metrics
from cluster.rank_values import Outcome, RankPlace, RankReport, RankSpec, ReplicaAddresses, ReplicaLoad
from cluster.revision_files import check_files, find_files
from cluster.signals import on_sigterm
from cluster.spares import engine_variables, take_spare
from parallel.errors import ModelError
from router.errors import RouterConfigError
from workers.config import EngineConfig
from workers.cores import compute_here, give_way, threads_per_rank
from workers.errors import EngineConfigError, GroupFailedError
from workers.stats import RankStats

if TYPE_CHECKING:
    from cluster.leader import Leader, LedReplica

logger = logging.getLogger(__name__)

_EXIT_DELAY_S = 0.5  # for the outcome to reach the controller
_SWITCH_INTERVAL_S = 0.0002
"""How long the engine's thread may keep the event loop waiting. A frame changes threads several times on its way out,
and each time Python's own 5 ms are longer than a step of a small model."""


def rank_name(replica_id: str, rank: int) -> str:
    """Return the name of the rank's actor, in the Ray namespace of this program."""
    return f"{replica_id}/{rank}"


class RankActor:
    """One rank. `begin` once, then `ended` lasts as long as the rank does; the other methods are answered meanwhile.

    Nothing in it depends on whoever created it: when the controller is gone, the rank goes on.
    """

    def __init__(self, spec: RankSpec) -> None:
        configure_logging(spec.log_level)
        take_spare()
        share = spec.node_share
        self._num_threads = spec.engine.num_threads or threads_per_rank(share.num_ranks, share.num_cpus)
        os.environ.update(engine_variables(self._num_threads))
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        give_way()
        leave_removed_folder()
        # Every rank begins at once; those who need it wait for the import to end.
        engine = "cluster.leader" if spec.rank == 0 else "workers.rank"
        threading.Thread(target=import_for_good, args=(engine,), daemon=True).start()
        self._spec = spec
        self._host = ray.util.get_node_ip_address()
        self._progress = 0.0
        self._stats = RankStats()
        self._metrics = listen_for_metrics(self._host)
        labels = {"model": spec.model, "replica": spec.replica_id, "rank": str(spec.rank)}
        self._metrics.add(RankCollector(self._stats, loaded_ratio=lambda: self._progress, labels=labels))
        self._leader: Leader | None = None
        self._replica: LedReplica | None = None
        self._addresses: ReplicaAddresses | None = None
        self._is_ready = asyncio.Event()
        self._run: asyncio.Task[Outcome] | None = None
        self._termination: asyncio.Task[None] | None = None
        self._end_level = logging.WARNING  # level of logging a SIGTERM and what follows from it

    async def begin(self, host: str, port: int) -> RankPlace:
        """Begin to load the model and to work; say where this rank runs."""
        on_sigterm(self._on_sigterm)
        self._run = asyncio.create_task(self.run(host, port))
        return self._place()

    async def ended(self) -> Outcome:
        """Wait until the rank has ended, and say why. The process ends soon after."""
        assert self._run is not None
        return await asyncio.shield(self._run)

    async def report(self) -> RankReport:
        """Say how this rank is."""
        return RankReport(
            place=self._place(),
            has_begun=self._run is not None,
            addresses=self._addresses,
            slowness=self._stats.slowness,
        )

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

    async def load(self) -> ReplicaLoad | None:
        """On the leader: say how busy the replica is; None before it serves."""
        return None if self._replica is None else self._replica.load

    async def run(self, host: str, port: int) -> Outcome:
        """Load the model and work until this rank, or another one of the group, fails."""
        try:
            config = await asyncio.to_thread(self._resolve)
            if self._spec.rank == 0:
                await self._lead(config)
            else:
                await self._follow(config, host, port)
        except (GroupTerminatedError, RouterConfigError) as error:  # files may be missing for a moment only
            logger.log(self._end_level, "rank %d of %s ends: %s", self._spec.rank, self._spec.replica_id, error)
            return self._end(Outcome(message=f"rank {self._spec.rank}: {error}"))
        except (ModelError, EngineConfigError, ClusterError, RecordingError) as error:
            logger.error("rank %d of %s refused: %s", self._spec.rank, self._spec.replica_id, error)
            return self._end(Outcome(message=str(error), is_refusal=True))
        except Exception as error:
            logger.exception("rank %d of %s failed", self._spec.rank, self._spec.replica_id)
            return self._end(Outcome(message=f"rank {self._spec.rank}: {str(error) or type(error).__name__}"))
        return self._end(Outcome(message=f"rank {self._spec.rank}: its leader closed the group"))

    async def drain(self) -> None:
        """On the leader: take no new requests, and wait until those in flight have ended."""
        if self._replica is not None:
            await self._replica.drain()

    async def terminate(self) -> None:
        """On the leader: drain, then end the whole group; requests that take too long go on elsewhere."""
        if self._replica is None:
            os._exit(1)  # it has no requests yet
        await self._replica.terminate(self._spec.drain_timeout_s)

    async def expect_end(self) -> None:
        """Know that the end of this rank is wanted: Ray ends its process next, by SIGTERM."""
        self._end_level = logging.INFO

    def _on_sigterm(self) -> None:
        logger.log(self._end_level, "rank %d of %s was sent SIGTERM", self._spec.rank, self._spec.replica_id)
        self._termination = asyncio.create_task(self._terminate_group())

    async def _terminate_group(self) -> None:
        """Let the leader drain, whichever rank was told to end: a group lives and dies as one."""
        if self._spec.rank == 0:
            await self.terminate()
        else:
            leader = await asyncio.to_thread(ray.get_actor, rank_name(self._spec.replica_id, 0))
            await leader.terminate.remote()

    def _place(self) -> RankPlace:
        node_id = ray.get_runtime_context().get_node_id()
        return RankPlace(
            node=self._host,
            pid=os.getpid(),
            metrics_address=self._metrics.address,
            node_id=node_id,
            log_file=own_log(),
        )

    async def _lead(self, config: EngineConfig) -> None:
        leader = await asyncio.to_thread(self._import_leader)
        self._leader = leader
        try:
            self._replica, address = await leader.start(config, self._set_progress, self._stats)
            self._addresses = ReplicaAddresses(address=address, metrics_address=self._metrics.address)
            self._is_ready.set()
            await self._replica.wait_failed()
        finally:
            await leader.close()

    def _import_leader(self) -> "Leader":
        from cluster.leader import Leader  # torch: a second or two, off the event loop

        if self._leader is None:
            self._leader = Leader(self._spec, self._host, self._metrics)
        return self._leader

    def _open_rendezvous(self) -> tuple[str, int]:
        return self._import_leader().open_rendezvous()

    async def _follow(self, config: EngineConfig, host: str, port: int) -> None:
        """Follow the leader until it closes the group or is lost, which is told even while the thread waits for it."""
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[None] = loop.create_future()

        def on_lost(error: GroupFailedError) -> None:
            loop.call_soon_threadsafe(lost.set_exception, error)

        following = asyncio.ensure_future(asyncio.to_thread(self._follow_group, config, host, port, on_lost))
        done, _ = await asyncio.wait((following, lost), return_when=asyncio.FIRST_COMPLETED)
        await done.pop()

    def _follow_group(
        self, config: EngineConfig, host: str, port: int, on_lost: Callable[[GroupFailedError], object]
    ) -> None:
        from workers.rank import follow_group  # torch, off the event loop

        compute_here()
        follow_group(
            config,
            rank=self._spec.rank,
            host=host,
            port=port,
            progress=self._set_progress,
            stats=self._stats,
            on_lost=on_lost,
        )

    def _resolve(self) -> EngineConfig:
        """Return the settings with this node's folder, which must be as its revision says, and this rank's threads."""
        config, text = self._spec.engine, self._spec.text
        folder = find_files(config.model, text)
        if text is not None:
            check_files(folder, text, node=self._host)
        return replace(config, model=str(folder), num_threads=self._num_threads)

    def _set_progress(self, fraction: float) -> None:
        self._progress = fraction

    @staticmethod
    def _end(outcome: Outcome) -> Outcome:
        asyncio.get_running_loop().call_later(_EXIT_DELAY_S, os._exit, 1)
        return outcome
