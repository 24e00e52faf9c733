"""Rank 0 of a group: the engine and its gRPC service, started and ended as one. Imports torch."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from weft.addresses import join_host_port

from cluster.errors import GroupTerminatedError
from cluster.metrics import EngineCollector
from cluster.rank_values import RankSpec, ReplicaLoad
from cluster.replica_server import ReplicaInfo, ReplicaServer
from router.metrics_listener import MetricsListener
from router.spans import Tracer, make_tracer
from router.tls import InnerTls
from workers.async_engine import AsyncEngine
from workers.config import EngineConfig
from workers.engine import Engine, StepResult
from workers.engine_builder import build_engine
from workers.rank import Rendezvous
from workers.stats import RankStats

_TAKE_OBSERVATIONS_S = 1.0  # the engine keeps a bounded number of them


class Leader:
    """The leading rank of one replica. `open_rendezvous`, if at all, then `start`, once each; `close` always."""

    def __init__(self, spec: RankSpec, host: str, metrics: MetricsListener) -> None:
        """Args: `metrics` is the process's listener, which tells what the engine counts too."""
        self._spec = spec
        self._host = host
        self._metrics = metrics
        self._tracer = make_tracer(spec.tracing, service="weft-replica", instance=spec.replica_id)
        self._rendezvous: Rendezvous | None = None
        self._replica: LedReplica | None = None

    def open_rendezvous(self) -> tuple[str, int]:
        """Open the store where the ranks meet, and return its host and port. May be called off the event loop."""
        self._rendezvous = Rendezvous.open(self._host)
        return self._rendezvous.host, self._rendezvous.port

    async def start(
        self, config: EngineConfig, progress: Callable[[float], None], stats: RankStats
    ) -> tuple["LedReplica", str]:
        """Load the model together with the other ranks, serve, and return the replica and its host:port.

        Raises RouterConfigError when the TLS files cannot be used, RecordingError when decisions cannot be recorded.
        """
        tls = self._spec.inner_tls
        if tls is not None:
            tls.check(serves=True)  # before the weights are read
        recorder = self._spec.recording.open(self._spec.replica_id)
        engine = await asyncio.to_thread(
            build_engine,
            config,
            rendezvous=self._rendezvous,
            progress=progress,
            rank_stats=stats,
            recorder=recorder,
        )
        self._replica = LedReplica(self._spec, config, engine, self._tracer)
        port = await self._replica.start(self._host, tls)
        self._metrics.add(self._replica.collector)
        return self._replica, join_host_port(self._host, port)

    async def close(self) -> None:
        """End the streams of routers at once, then the rest."""
        if self._replica is not None:
            await self._replica.close()
        await asyncio.to_thread(self._tracer.close)


class LedReplica:
    """The engine of a replica and its gRPC service, until the first of them ends. Made and used on the event loop."""

    def __init__(self, spec: RankSpec, config: EngineConfig, engine: Engine, tracer: Tracer) -> None:
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None
        self._load = engine.load
        self._engine = AsyncEngine(
            engine,
            on_step=self._on_step,
            on_failure=self._on_failure,
            longest_turn_s=2 * config.step_timeout_s,  # the other ranks come before, who know more
        )
        self._server = ReplicaServer(
            _info(spec, config, engine),
            self._engine,
            tracer=tracer,
            stream_interval_s=spec.stream_interval_s,
        )
        self.collector = EngineCollector(
            engine.stats,
            load=lambda: self._load,
            num_cached_blocks=lambda: self._engine.num_resident_blocks,
            block_size=engine.config.cache.block_size,
            labels={"model": spec.model, "replica": spec.replica_id},
        )

    async def start(self, host: str, tls: InnerTls | None) -> int:
        """Begin to compute and to serve; return the port. Raises RouterConfigError when TLS files cannot be used."""
        self._engine.start()
        return await self._server.start(host, tls)

    async def wait_failed(self) -> None:
        """Wait for the engine to fail, and raise what it failed with."""
        while self._failure is None:
            self.collector.take_observations()
            with suppress(TimeoutError):
                async with asyncio.timeout(_TAKE_OBSERVATIONS_S):
                    await self._failed.wait()
        raise self._failure

    async def drain(self) -> None:
        """Take no new requests, and wait until those in flight have ended."""
        await self._server.drain()

    async def terminate(self, grace_s: float) -> None:
        """Drain for at most `grace_s`, then make `wait_failed` say that it was told to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.drain()
        if self._failure is None:
            self._on_failure(GroupTerminatedError("was told to end by SIGTERM"))

    async def close(self) -> None:
        """End the streams of routers at once, then the engine."""
        await self._server.stop()
        await self._engine.stop()

    @property
    def load(self) -> ReplicaLoad:
        """How busy the replica is, after its last step."""
        load = self._load
        return ReplicaLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_usage=1 - load.num_free_blocks / load.num_blocks,
        )

    def _on_step(self, result: StepResult) -> None:
        self._load = result.load
        self._server.on_step(result)

    def _on_failure(self, error: BaseException) -> None:
        self._failure = error
        self._failed.set()


def _info(spec: RankSpec, config: EngineConfig, engine: Engine) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=spec.replica_id,
        model=spec.model,
        block_size=config.cache.block_size,
        hash_key=config.hash_key,
        max_context=engine.max_context,
        vocab_size=engine.vocab_size,
        num_blocks=engine.num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
    )
