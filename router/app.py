"""One router: its parts, made from the configuration; gRPC, HTTP and metrics on one event loop, stopped in order."""

import asyncio
import logging
import math
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from weft.addresses import family_of, join_host_port, split_host_port
from weft.recording import Recorder, RecordingError
from weft.v1 import control_pb2

from router.admission import Admission
from router.config import RouterConfig
from router.directory import Directory
from router.dispatch import Dispatcher
from router.errors import RouterConfigError
from router.http_protocol import bounded_protocol
from router.keys import KeyRing
from router.metrics import RouterMetrics
from router.metrics_listener import MetricsListener
from router.model_files import TokenizerLoader
from router.model_text import ModelText
from router.open_files import allow_connections
from router.openai import create_app
from router.places import Places
from router.recording import record_router
from router.server import KEEPALIVE_S, GrpcListener, keepalive_timeout_ms
from router.spans import Tracer, make_tracer
from router.tokenizer_pool import Tokenizer, TokenizerPool

logger = logging.getLogger(__name__)

_DATE_S = 1.0
"""How old the Date of an HTTP answer may be."""

_MOST_WAIT_S = 10.0
"""How long a router that shares its ports may wait for a replica before it serves: the other routers may have none
either, and after a minute whoever started this one takes it for one that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundAddresses:
    """Where a router listens, host:port each."""

    grpc: str
    http: str | None
    metrics: str | None

    @property
    def ports(self) -> control_pb2.RouterPorts:
        """As the controller is told; 0 for what is None."""
        grpc, http, metrics = (split_host_port(each)[1] if each else 0 for each in (self.grpc, self.http, self.metrics))
        return control_pb2.RouterPorts(grpc=grpc, http=http, metrics=metrics)


async def run_router(
    config: RouterConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[BoundAddresses], None],
    grace_s: Callable[[], float] | None = None,
    load_tokenizer: Callable[[ModelText], Tokenizer] | None = None,
    tracer: Tracer | None = None,
) -> None:
    """Serve until `stop` is set; then refuse new requests, let those in flight end within the grace, and return.

    The process may have as many files open, and so connections, as the system allows it.

    Args:
        config: what to serve and where to listen.
        stop: set by the caller.
        on_ready: called once, when all listeners are bound and serve. Whether a replica is ready, health says.
        grace_s: asked when `stop` has been set for `unready_s`; None: what the configuration says.
        load_tokenizer: reads a revision's tokenizer from its folder, in a thread; None: as model_files.py does.
        tracer: makes the spans of requests; None: what the configuration says.

    Raises:
        RouterConfigError: a port is taken, TLS files or the folder for recordings cannot be used, or tracing is on and
            not installed.
    """
    allow_connections()  # beyond 1,024 clients would be cut off, and no replica reached
    with ExitStack() as stack:
        parts = _build(config, stop, stack, load_tokenizer=load_tokenizer, tracer=tracer)
        page = _listen_metrics(config, parts, stack)
        http = _listen_http(config, parts, stack)
        grpc = _listen_grpc(config, parts, stack)
        addresses = BoundAddresses(
            grpc=grpc.address, http=http.address if http else None, metrics=page.address if page else None
        )
        parts.directory.say_ports(addresses.ports)
        async with _serving(config, parts, grpc, http, grace_s=grace_s or (lambda: config.grace_s)):
            logger.info("router %s serves %s", config.router_id, addresses)
            on_ready(addresses)
            await stop.wait()  # readiness goes first
            logger.info("router %s stops", config.router_id)
            await asyncio.sleep(config.unready_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What serves calls, before anything listens."""

    dispatcher: Dispatcher
    directory: Directory
    metrics: RouterMetrics
    keys: KeyRing | None
    reads_trace_context: bool
    stop: asyncio.Event
    is_ready: Callable[[], bool]
    changed: asyncio.Event
    """Set when `is_ready` may say something else than before, and when `stop` is."""


def _build(
    config: RouterConfig,
    stop: asyncio.Event,
    stack: ExitStack,
    *,
    load_tokenizer: Callable[[ModelText], Tokenizer] | None,
    tracer: Tracer | None,
) -> _Parts:
    """What has to be closed is closed with the stack."""
    if config.link.tls is not None:
        config.link.tls.check(serves=False)
    tracer = tracer or make_tracer(config.tracing, service="weft-router", instance=config.router_id)
    stack.callback(tracer.close)
    metrics = RouterMetrics(config.metrics)
    rng = random.Random()
    changed = asyncio.Event()
    recorder = _open_recorder(config, stack)
    recording = None if recorder is None else record_router(config, recorder)
    loader = TokenizerLoader(config)
    stack.callback(loader.close)
    pool = TokenizerPool(load_tokenizer or loader, num_threads=config.tokenizer_threads, on_change=changed.set)
    stack.callback(pool.close)

    def note_change() -> None:
        changed.set()
        pool.keep(text for route in directory.routes for text in route.texts)

    directory = Directory(config, rng, note_change, recording)
    admission = Admission(Places(config.admission) if recording is None else recording.places(), time.monotonic)
    metrics.watch(admission.places, directory)
    return _Parts(
        dispatcher=Dispatcher(
            config, directory=directory, admission=admission, pool=pool, metrics=metrics, rng=rng, tracer=tracer
        ),
        directory=directory,
        metrics=metrics,
        keys=None if config.api_keys is None else KeyRing(Path(config.api_keys), time.monotonic),
        reads_trace_context=tracer.is_on,
        stop=stop,
        is_ready=lambda: directory.is_ready and pool.is_ready and not stop.is_set(),
        changed=changed,
    )


def _open_recorder(config: RouterConfig, stack: ExitStack) -> Recorder | None:
    try:
        recorder = config.recording.open(config.router_id)
    except RecordingError as error:
        raise RouterConfigError(f"recording: {error}") from error
    if recorder is not None:
        stack.callback(recorder.close)
    return recorder


def _listen_metrics(config: RouterConfig, parts: _Parts, stack: ExitStack) -> MetricsListener | None:
    """What listens is closed with the stack."""
    if config.metrics_port is None:
        return None
    listener = MetricsListener(config.host, config.metrics_port, parts.metrics.registry)
    stack.callback(listener.close)
    return listener


def _listen_http(config: RouterConfig, parts: _Parts, stack: ExitStack) -> "_HttpListener | None":
    """What listens is closed with the stack."""
    if config.http_port is None:
        return None
    app = create_app(
        parts.dispatcher,
        max_body_bytes=config.max_message_bytes,
        ready=parts.is_ready,
        keys=parts.keys,
        reads_trace_context=parts.reads_trace_context,
        allowed_origins=config.clients.allowed_origins,
    )
    listener = _HttpListener(app, config, port=config.http_port)
    stack.callback(listener.close)
    return listener


def _listen_grpc(config: RouterConfig, parts: _Parts, stack: ExitStack) -> GrpcListener:
    """A port that is shared is held, and listened on when the router serves."""
    port = config.grpc_port
    if config.shares_ports:
        held = _bind("gRPC", config.host, port, shares_port=True)
        stack.callback(held.close)
        port = held.getsockname()[1]
    return GrpcListener(
        parts.dispatcher,
        host=config.host,
        port=port,
        max_message_bytes=config.max_message_bytes,
        shares_port=config.shares_ports,
        tls=config.tls,
        keys=parts.keys,
        write_timeout_s=config.clients.write_timeout_s,
        reads_trace_context=parts.reads_trace_context,
    )


@asynccontextmanager
async def _serving(
    config: RouterConfig,
    parts: _Parts,
    grpc: GrpcListener,
    http: "_HttpListener | None",
    *,
    grace_s: Callable[[], float],
) -> AsyncIterator[None]:
    """Follow the replicas and serve for the length of the block; then stop in the order in which nobody is cut off."""
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(parts.directory.run(), name="directory")
        reloading = tasks.create_task(parts.keys.follow(), name="keys") if parts.keys else None
        stopping = tasks.create_task(_note_stop(parts), name="stop")
        if config.shares_ports:  # else it would refuse what the others could serve
            await _wait_ready(parts, min(config.failover.new_request_wait_s, _MOST_WAIT_S))
        await grpc.start()
        showing = tasks.create_task(_show_readiness(parts, grpc), name="readiness")
        serving = tasks.create_task(http.serve(), name="http") if http else None
        try:
            if http is not None:
                await http.has_started.wait()
            yield
        finally:  # also when a task failed
            showing.cancel()
            stopping.cancel()
            grpc.set_ready(False)
            left_s = grace_s()
            if http is not None:
                http.stop(left_s)
            await grpc.stop(left_s)
            if serving is not None:
                await asyncio.wait((serving,))
            following.cancel()
            if reloading is not None:
                reloading.cancel()


async def _wait_ready(parts: _Parts, limit_s: float) -> None:
    """Return when the router could serve or is to stop, or after a while."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not (parts.is_ready() or parts.stop.is_set()):
                parts.changed.clear()
                await parts.changed.wait()


async def _note_stop(parts: _Parts) -> None:
    await parts.stop.wait()
    parts.changed.set()


async def _show_readiness(parts: _Parts, grpc: GrpcListener) -> None:
    while True:
        parts.changed.clear()
        grpc.set_ready(parts.is_ready())
        await parts.changed.wait()


class _HttpListener:
    """uvicorn in our event loop, on a socket that is bound before anything starts."""

    def __init__(self, app: Starlette, router: RouterConfig, *, port: int) -> None:
        """Bind. Raises RouterConfigError when the port is taken, or TLS files cannot be used."""
        tls = None if router.tls is None else router.tls.context
        self._socket = _bind("HTTP", router.host, port, shares_port=router.shares_ports)
        _watch_clients(self._socket, keepalive_timeout_ms(router.clients.write_timeout_s))
        self.address = join_host_port(router.host, self._socket.getsockname()[1])
        self.has_started, self._stops = asyncio.Event(), asyncio.Event()
        settings = uvicorn.Config(
            app,
            loop="none",
            http=bounded_protocol(router.clients, self._stops),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=router.clients.keep_alive_s,  # type: ignore[arg-type] # any number will do
        )
        settings.load()
        settings.ssl = tls
        self._server = _QuietServer(settings, self.has_started, self._stops)

    async def serve(self) -> None:
        """Serve until `stop`, and then until the requests in flight have ended."""
        await self._server.serve(sockets=[self._socket])

    def stop(self, grace_s: float) -> None:
        """Take no more requests, and cut off those that outlast the grace."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        self._stops.set()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


class _QuietServer(uvicorn.Server):
    """Leaves signals to the process, and says when it serves."""

    def __init__(self, config: uvicorn.Config, has_started: asyncio.Event, stops: asyncio.Event) -> None:
        super().__init__(config)
        self._has_started = has_started
        self._stops = stops

    async def main_loop(self) -> None:
        """Renew the Date header until the server stops. What uvicorn has for it wakes ten times a second."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._stops.wait()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self._has_started.set()


def _bind(what: str, host: str, port: int, *, shares_port: bool) -> socket.socket:
    # With this protocol asyncio sets TCP_NODELAY, as uvloop always does; without that, the body of an answer waits for
    # the client's delayed acknowledgement of its head: 40 ms.
    bound = socket.socket(family_of(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares_port))
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise RouterConfigError(f"{what} cannot listen on {join_host_port(host, port)}: {error.strerror}") from error
    return bound


def _watch_clients(listener: socket.socket, limit_ms: int) -> None:
    """Have the system end connections, which inherit this, whose client takes nothing or has gone without a word.

    The protocol sees neither while all that is written goes into the system's buffer, some minutes of a slow stream, or
    while nothing is written yet.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
