"""Traces in memory, and replicas whose engine makes a step when a test lets it."""

import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.replica_server import ReplicaInfo, ReplicaServer
from helpers.engines import FakeExecutor, fake_engine
from helpers.fake_model import VOCAB_SIZE
from router.spans import Tracer
from router.tls import InnerTls
from router.tracing import OtelTracer
from workers.async_engine import AsyncEngine

_MANY = 1_000_000


class Traces:
    """Collects the spans of all tracers that it makes."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()

    def tracer(self) -> OtelTracer:
        """Return a tracer as one process has it."""
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        return OtelTracer(provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """All that have ended."""
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the spans of a name, in the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time or 0)

    def tree(self) -> list[str]:
        """Return every span as the path of names from its root, sorted."""
        by_id = {span.context.span_id: span for span in self.spans}

        def path(span: ReadableSpan) -> str:
            parent = None if span.parent is None else by_id.get(span.parent.span_id)
            return f"{path(parent)}/{span.name}" if parent is not None else span.name

        return sorted(path(span).replace("weft.", "") for span in self.spans)


@dataclass(slots=True, kw_only=True)
class GatedReplica:
    """A real replica over a fake model."""

    server: ReplicaServer
    address: str
    gate: threading.Semaphore
    num_steps: int = 0

    def step(self, num_steps: int = _MANY) -> None:
        """Let the engine make so many steps more."""
        self.gate.release(num_steps)


@asynccontextmanager
async def gated_replica(replica_id: str, tracer: Tracer, *, tls: InnerTls | None = None) -> AsyncIterator[GatedReplica]:
    """Run a replica of the model `tiny` for the length of the block."""
    executor = FakeExecutor()
    engine = fake_engine(executor, clock=time.monotonic)
    running = AsyncEngine(engine, on_step=lambda result: replica.server.on_step(result))
    info = ReplicaInfo(
        replica_id=replica_id,
        model="tiny",
        block_size=4,
        hash_key=b"",
        max_context=engine.max_context,
        vocab_size=VOCAB_SIZE,
        num_blocks=engine.num_blocks,
        max_num_seqs=8,
    )
    server = ReplicaServer(info, running, tracer=tracer)
    address = f"127.0.0.1:{await server.start('127.0.0.1', tls)}"
    replica = GatedReplica(server=server, address=address, gate=threading.Semaphore(0))

    def on_collect() -> None:
        replica.num_steps += 1
        replica.gate.acquire()

    executor.on_collect = on_collect
    running.start()
    try:
        yield replica
    finally:
        replica.step()
        await server.stop()
        await running.stop()
