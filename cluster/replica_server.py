"""The data plane of one replica: weft.v1.Replica over an engine, one bidirectional stream for each router.

Down the stream come submit and abort; up go a snapshot and then one frame for each engine step. The engine calls
`on_step` on this event loop in step order, and a stream is entered into the list in the same turn in which its snapshot
is taken, so a router sees every event after its snapshot exactly once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from weft import protocol
from weft.addresses import join_host_port
from weft.v1 import replica_pb2
from weft.v1.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server

from cluster.replica_connection import OutboxLimits, RouterConnection
from cluster.replica_spans import ReplicaSpans
from cluster.replica_wire import to_failed, to_request, write_output
from router.spans import NO_TRACER, Tracer
from router.tls import InnerTls, bind
from workers.async_engine import Snapshot
from workers.engine import EngineLoad, StepResult
from workers.errors import InvalidRequestError
from workers.request import Request, RequestId, RequestOutput

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),  # the snapshot of 4 million blocks
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # routers ping a quiet stream every 20 s
    ("grpc.so_reuseport", 0),
)

_Context = grpc.aio.ServicerContext[replica_pb2.ConnectRequest, replica_pb2.ConnectResponse]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a router is told about a replica in the snapshot."""

    replica_id: str
    model: str
    block_size: int
    hash_key: bytes
    max_context: int
    vocab_size: int
    num_blocks: int
    max_num_seqs: int


class ReplicaEngine(Protocol):
    """What the server needs of workers.async_engine.AsyncEngine; tests have a double."""

    def submit(self, request: Request) -> None:
        """Start a request; never blocks. A refusal comes back as an output with an error."""

    def abort(self, request_id: RequestId) -> None:
        """End a request and free what it holds; never blocks."""

    def snapshot(self) -> Snapshot:
        """Return resident block hashes and load as of the last `on_step` call."""


class ReplicaServer(ReplicaServicer):
    """Serves one engine to any number of routers."""

    def __init__(
        self,
        info: ReplicaInfo,
        engine: ReplicaEngine,
        *,
        tracer: Tracer = NO_TRACER,
        limits: OutboxLimits | None = None,
        stream_interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._engine = engine
        self._spans = ReplicaSpans(tracer, info.replica_id)
        self._limits = limits or OutboxLimits()
        self._stream_interval_s = stream_interval_s
        self._clock = clock
        self._connections: dict[int, RouterConnection] = {}
        self._num_connections = 0
        self._draining = False
        self._is_idle = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, tls: InnerTls | None = None) -> int:
        """Listen on a free port of `host` and return it. Raises RouterConfigError when TLS files cannot be used."""
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        add_ReplicaServicer_to_server(self, server)
        port = bind(server, join_host_port(host, 0), tls)
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        """End every stream now; routers continue their requests elsewhere."""
        if self._server is not None:
            await self._server.stop(grace=None)

    async def drain(self) -> None:
        """Take no new requests, say so, and wait until those in flight have ended and their routers were told."""
        self._draining = True
        load = self._to_load(self._engine.snapshot().load)
        for connection in self._connections.values():
            connection.send(load=load)
        self._note_idle()
        await self._is_idle.wait()
        await asyncio.gather(*(connection.written() for connection in self._connections.values()))

    def on_step(self, result: StepResult) -> None:
        """Send what one engine step gave: to each router its outputs, all cache events and the load."""
        for output in result.outputs:
            self._add_output(output)
        load = self._to_load(result.load)
        for connection in self._connections.values():
            connection.end_step(result.stored_block_hashes, result.evicted_block_hashes, load)
        self._note_idle()

    async def Connect(  # type: ignore[override]  # noqa: N802 - writes to its context, where the stub expects a generator
        self, request_iterator: AsyncIterator[replica_pb2.ConnectRequest], context: _Context
    ) -> None:
        """Serve one router's stream to its end."""
        await context.send_initial_metadata(())  # while a write that carries it pends, nothing can end the stream
        connection = await self._greet(request_iterator, context)
        reader = asyncio.create_task(self._read(request_iterator, connection))
        writer = asyncio.create_task(_write(connection, context))
        cut = asyncio.create_task(connection.cut_off.wait())
        try:
            await asyncio.wait((reader, writer, cut), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close(connection)
            for task in (reader, writer, cut):
                task.cancel()
            await asyncio.gather(reader, writer, cut, return_exceptions=True)
        if connection.cut_off.is_set():
            logger.warning("router %s was cut off: it did not read for too long", connection.router_id)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router did not read its frames for too long")

    async def _greet(self, requests: AsyncIterator[replica_pb2.ConnectRequest], context: _Context) -> RouterConnection:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {_HELLO_TIMEOUT_S:g} s")
        if first is None or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is no hello")
        version = protocol.agree(first.hello.protocol_version)
        if version is None:
            seen = first.hello.protocol_version
            message = f"the router's protocol_version is {seen}; allowed: {protocol.OLDEST} or newer"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        return self._open(first.hello.router_id, version)

    def _open(self, router_id: str, version: int) -> RouterConnection:
        """Enter a stream and queue its snapshot, in one turn of the event loop."""
        self._num_connections += 1
        number = self._num_connections
        connection = RouterConnection(
            number,
            router_id,
            limits=self._limits,
            clock=self._clock,
            stream_interval_s=self._stream_interval_s,
        )
        state = self._engine.snapshot()
        connection.send(snapshot=self._to_snapshot(state, version), load=self._to_load(state.load))
        self._connections[number] = connection
        logger.info("router %s connected", router_id)
        return connection

    def _close(self, connection: RouterConnection) -> None:
        self._connections.pop(connection.number, None)
        connection.close()
        for engine_id in connection.engine_ids:
            self._spans.drop(engine_id, "the router's stream ended")
            self._engine.abort(engine_id)
        self._note_idle()
        logger.info("router %s disconnected", connection.router_id)

    async def _read(self, requests: AsyncIterator[replica_pb2.ConnectRequest], connection: RouterConnection) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(message.submit, connection)
                case "abort":
                    engine_id = connection.engine_id(message.abort.request_id)
                    if engine_id is not None:
                        connection.close_request(engine_id)
                        self._spans.drop(engine_id, "aborted")
                        self._engine.abort(engine_id)
                case other:
                    logger.warning("router %s sent %s, which has no meaning here", connection.router_id, other)

    def _submit(self, submit: replica_pb2.Submit, connection: RouterConnection) -> None:
        request_id = submit.request_id
        if self._draining:
            code = grpc.StatusCode.UNAVAILABLE.value[0]
            _refuse(connection, request_id, replica_pb2.RequestFailed(code=code, message="the replica is draining"))
            return
        engine_id = connection.open_request(request_id)
        if engine_id is None:
            error = InvalidRequestError(f"request_id is {request_id!r}, which is in flight; allowed: one of its own")
            _refuse(connection, request_id, to_failed(error))
            return
        try:
            request = to_request(submit, engine_id, self._clock())
        except InvalidRequestError as error:
            connection.close_request(engine_id)
            _refuse(connection, request_id, to_failed(error))
            return
        self._spans.begin(engine_id, submit)
        self._engine.submit(request)

    def _note_idle(self) -> None:
        if any(connection.engine_ids for connection in self._connections.values()):
            self._is_idle.clear()
        else:
            self._is_idle.set()

    def _add_output(self, output: RequestOutput) -> None:
        connection = self._connections.get(int(output.request_id.partition("/")[0]))
        message = connection.output_of(output.request_id) if connection else None
        if connection is None or message is None:
            return  # aborted, or its router is gone
        write_output(output, message)
        if output.finish is not None or output.error is not None:
            connection.end_request(output.request_id)
            self._spans.end(output)

    def _to_snapshot(self, state: Snapshot, version: int) -> replica_pb2.Snapshot:
        info = self._info
        return replica_pb2.Snapshot(
            replica_id=info.replica_id,
            model=info.model,
            protocol_version=version,
            block_size=info.block_size,
            hash_key=info.hash_key,
            block_hashes=b"".join(state.block_hashes),
            max_context=info.max_context,
            vocab_size=info.vocab_size,
            num_blocks=info.num_blocks,
            max_num_seqs=info.max_num_seqs,
        )

    def _to_load(self, load: EngineLoad) -> replica_pb2.Load:
        return replica_pb2.Load(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_blocks=load.num_free_blocks,
            num_blocks=load.num_blocks,
            num_pending_tokens=load.num_pending_tokens,
            draining=self._draining,
        )


def _refuse(connection: RouterConnection, request_id: str, failed: replica_pb2.RequestFailed) -> None:
    connection.send(outputs=[replica_pb2.RequestOutput(request_id=request_id, failed=failed)])


async def _write(connection: RouterConnection, context: Any) -> None:
    async for frame in connection.frames():
        await context.write(frame)
