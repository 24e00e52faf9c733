"""One multiplexed stream to one replica: requests go down, frames come up and are handed to the requests they concern.

A frame is handled once: cache events, load and outcomes go to the book (replica_book.py), outputs to their inboxes.
The first frame is a snapshot. When the stream breaks, the index of this replica and its load are dropped, every request
on it is handed back (its inbox says so; flight.py continues it), and the link dials again while membership names it.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc
from weft import protocol
from weft.block_hash import split_hashes
from weft.v1 import replica_pb2
from weft.v1.replica_pb2_grpc import ReplicaStub

from router.breaker import Breaker
from router.config import LinkConfig
from router.errors import ProtocolError, RouterConfigError
from router.inbox import Inbox
from router.model_text import ModelText
from router.prefix_index import PrefixIndex, ReplicaId
from router.replica_book import LinkState, ReplicaBook
from router.tls import connect
from router.turns import Turns

logger = logging.getLogger(__name__)

_Call = grpc.aio.StreamStreamCall[replica_pb2.ConnectRequest, replica_pb2.ConnectResponse]
_Frames = AsyncIterator[replica_pb2.ConnectResponse]

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # what is not read yet waits at the replica, which merges it, not in megabytes here
    ("grpc.max_receive_message_length", 64 << 20),  # the snapshot of 4 million blocks
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the backoff of the last
)
"""Options of the channel to a replica, whose server must allow a ping every 20 s on a quiet stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a replica is, as membership says."""

    replica_id: ReplicaId
    """The replica's address where no controller names it."""
    model: str
    address: str
    text: ModelText | None = None
    """Tokenizer and template revision that the replica runs; None: the model's current one."""


class ReplicaLink(ReplicaBook):
    """The router's end of one replica. `run` owns the connection; the other methods share its event loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        router_id: str,
        index: PrefixIndex,
        config: LinkConfig,
        breaker: Breaker,
        turns: Turns,
        accept: Callable[[replica_pb2.Snapshot], bool],
        on_change: Callable[[], None],
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a link that is not connected.

        Args:
            turns: of all requests of the router.
            accept: called with each snapshot; whether this replica's blocks belong into `index`. Raises ProtocolError.
            on_change: called when the link becomes ready or stops being ready, and when its breaker opens or closes.
        """
        super().__init__(endpoint.replica_id, index=index, breaker=breaker, on_change=on_change)
        self.endpoint = endpoint
        self.text = endpoint.text
        self._router_id = router_id
        self._config = config
        self._turns = turns
        self._accept = accept
        self._rng = rng
        self._clock = clock
        self._inboxes: dict[str, Inbox] = {}
        self._outgoing: deque[replica_pb2.ConnectRequest] = deque()
        self._has_outgoing = asyncio.Event()
        self._may_leave = asyncio.Event()
        self._next_frame = 0
        self._silent_s = 0.0
        self._waiting_since_s: float | None = None

    def submit(self, submit: replica_pb2.Submit, *, num_pending_tokens: int) -> Inbox:
        """Send a request, and return where its outputs will arrive. Only while `takes_requests`; never blocks."""
        assert self.state is LinkState.READY
        assert submit.request_id not in self._inboxes
        inbox = Inbox(self._turns)
        if not self._inboxes:
            self._waiting_since_s = self._clock()
        self._inboxes[submit.request_id] = inbox
        self.note_submit(submit.request_id, num_pending_tokens, self._clock())
        self._send(replica_pb2.ConnectRequest(submit=submit))
        return inbox

    def abort(self, request_id: str) -> None:
        """End a request here; one that has ended already is left alone. Never blocks."""
        if request_id in self._inboxes:
            self.note_abort(request_id)
            self._forget(request_id)
            if not self._unsend(request_id):
                self._send(replica_pb2.ConnectRequest(abort=replica_pb2.Abort(request_id=request_id)))

    def retire(self) -> None:
        """Take no more requests, do not dial again, and end `run` when the last request here has ended."""
        self.note_retired()
        if not self._inboxes:
            self._may_leave.set()

    async def run(self) -> None:
        """Connect, and connect again when the stream breaks, until retired or cancelled."""
        num_failures, told, has_left = 0, "", False
        task = asyncio.current_task()
        assert task is not None
        try:
            while not self._may_leave.is_set():
                began_s = self._clock()
                reason = await self._run_connection()
                if task.cancelling():  # a TaskGroup that fails in the same moment keeps the cancellation to itself
                    raise asyncio.CancelledError
                was_ready = self.state is LinkState.READY
                has_left = not self.is_ready if was_ready else has_left or self.is_leaving
                usual = logging.INFO if has_left else logging.WARNING
                if was_ready and not self._may_leave.is_set():
                    logger.log(usual, "replica %s: stream broke: %s", self.replica_id, reason)
                    self.breaker.fail(self._clock())
                elif not self._may_leave.is_set():
                    level = logging.DEBUG if reason == told else usual
                    logger.log(level, "replica %s: not connected: %s", self.replica_id, reason)
                told = reason
                self._drop(reason)
                if self._is_retired:
                    return
                is_stable = self._clock() - began_s > self._config.max_backoff_s
                num_failures = 0 if is_stable else num_failures + 1
                await self._back_off(num_failures)
        finally:
            self._drop("the router closed the stream")
            self.state = LinkState.CLOSED

    async def _back_off(self, num_failures: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.next_wait_s(num_failures, self._rng)):
                await self._may_leave.wait()

    async def _run_connection(self) -> str:
        """Serve one connection to its end; return why it ended."""
        try:
            async with (
                connect(self.endpoint.address, self._config.tls, _CHANNEL_OPTIONS) as channel,
                asyncio.TaskGroup() as tasks,
            ):
                call: _Call = ReplicaStub(channel).Connect()
                frames = aiter(call)
                tasks.create_task(self._leave_when_retired())
                await self._greet(call, frames)
                tasks.create_task(self._write(call))
                tasks.create_task(self._watch_for_stall())
                await self._read(frames)
        except ExceptionGroup as group:
            _, unexpected = group.split(_CONNECTION_ERRORS)
            if unexpected is not None:  # our bug, or bytes that are no message: the others go on
                logger.error("replica %s: the stream failed unexpectedly", self.replica_id, exc_info=unexpected)
            return _describe(group.exceptions[0], was_ready=self.state is LinkState.READY)
        except RouterConfigError as error:  # a TLS file that went away
            return str(error)
        raise AssertionError("a connection ends with an exception")

    async def _greet(self, call: _Call, frames: _Frames) -> None:
        hello = replica_pb2.Hello(router_id=self._router_id, protocol_version=protocol.VERSION)
        limit_s = self._config.connect_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await _write_message(call, replica_pb2.ConnectRequest(hello=hello))
                frame = await _read_frame(frames)
        except TimeoutError:
            raise ProtocolError(f"it did not answer within {limit_s:g} s") from None
        if not frame.HasField("snapshot"):
            raise ProtocolError("the first frame holds no snapshot")
        self._check_snapshot(frame.snapshot)
        self.max_context, self.vocab_size = frame.snapshot.max_context, frame.snapshot.vocab_size
        is_alike = self._accept(frame.snapshot)
        self._next_frame = 0
        self.note_snapshot(_split(frame.snapshot.block_hashes) if is_alike else None)
        self._handle(frame)
        logger.info("replica %s at %s: connected", self.replica_id, self.endpoint.address)
        self.note_ready()

    def _check_snapshot(self, snapshot: replica_pb2.Snapshot) -> None:
        version = snapshot.protocol_version
        if not protocol.OLDEST <= version <= protocol.VERSION:
            raise ProtocolError(
                f"the replica speaks protocol version {version}; allowed: {protocol.OLDEST} to {protocol.VERSION}"
            )
        if self.replica_id not in (snapshot.replica_id, self.endpoint.address):
            raise ProtocolError(f"{self.endpoint.address} is replica {snapshot.replica_id}; wanted: {self.replica_id}")
        if snapshot.model != self.endpoint.model:
            raise ProtocolError(f"the replica serves model {snapshot.model!r}; wanted: {self.endpoint.model!r}")
        if snapshot.block_size < 1:
            raise ProtocolError(f"block size {snapshot.block_size}; allowed: at least 1")

    async def _read(self, frames: _Frames) -> None:
        while True:
            self._handle(await _read_frame(frames))

    def _handle(self, frame: replica_pb2.ConnectResponse) -> None:
        if frame.frame != self._next_frame:
            raise ProtocolError(f"frame {frame.frame} came; wanted: {self._next_frame}")
        self._next_frame += 1
        self._break_silence()
        if frame.stored_block_hashes or frame.evicted_block_hashes:
            self.note_blocks(_split(frame.stored_block_hashes), _split(frame.evicted_block_hashes))
        for output in frame.outputs:
            self._deliver(output)
        if frame.HasField("load"):
            load = frame.load
            num_requests = load.num_running + load.num_waiting
            self.note_load(num_requests, load.num_pending_tokens, is_draining=load.draining)

    def _deliver(self, output: replica_pb2.RequestOutput) -> None:
        request_id = output.request_id
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return  # aborted in the meantime
        self.note_output(request_id, output.failed.code if output.HasField("failed") else None, self._clock())
        if inbox.add(output):
            self.note_end(request_id)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._inboxes[request_id]
        if not self._inboxes:
            self._silent_s, self._waiting_since_s = self._waited_in_silence_s, None
        if self._is_retired and not self._inboxes:
            self._may_leave.set()

    def _drop(self, reason: str) -> None:
        """Leave the ready state, and hand the replica's requests back."""
        self._outgoing.clear()
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.lose(reason, was_leaving=self.is_leaving)
        self.note_disconnected()

    def _send(self, message: replica_pb2.ConnectRequest) -> None:
        self._outgoing.append(message)  # bounded by the requests that admission lets in
        self._has_outgoing.set()

    def _unsend(self, request_id: str) -> bool:
        """Take back a request that still waits to be sent; return whether there was one."""
        for index, message in enumerate(self._outgoing):
            if message.submit.request_id == request_id:
                del self._outgoing[index]
                return True
        return False

    async def _write(self, call: _Call) -> None:
        while True:
            while self._outgoing:
                await _write_message(call, self._outgoing.popleft())
            self._has_outgoing.clear()
            await self._has_outgoing.wait()

    async def _watch_for_stall(self) -> None:
        limit_s = self._config.stall_timeout_s
        while True:
            await asyncio.sleep(limit_s / 4)
            if self._waited_in_silence_s > limit_s:
                raise ProtocolError(f"nothing came for {limit_s:g} s while requests waited")

    @property
    def _waited_in_silence_s(self) -> float:
        """For how long there have been requests here since the last frame, those included that were taken back."""
        since_s = self._waiting_since_s
        return self._silent_s + (0.0 if since_s is None else self._clock() - since_s)

    def _break_silence(self) -> None:
        self._silent_s, self._waiting_since_s = 0.0, self._clock() if self._inboxes else None

    async def _leave_when_retired(self) -> None:
        await self._may_leave.wait()
        raise _RetiredError("membership no longer names the replica")


class _RetiredError(Exception):
    """Ends the connection of a link that was retired and has no more requests."""


_CONNECTION_ERRORS = (
    grpc.aio.AioRpcError,
    ProtocolError,
    _RetiredError,
)


async def _write_message(call: _Call, message: replica_pb2.ConnectRequest) -> None:
    """Send a message. To a stream that has ended it goes nowhere: what came before the end, and why, is to be read."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(message)


async def _read_frame(frames: _Frames) -> replica_pb2.ConnectResponse:
    frame = await anext(frames, None)
    if frame is None:
        raise ProtocolError("the replica ended the stream without an error")
    return frame


_LOST = frozenset((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED))
"""What gRPC makes of a connection that breaks, INTERNAL where it is writing; no replica ends a stream with these."""


def _describe(error: Exception, *, was_ready: bool) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        told = f"{error.code().name}: {error.details()}"
        return f"the connection to the replica was lost ({told})" if was_ready and error.code() in _LOST else told
    return str(error) or type(error).__name__


def _split(packed: bytes) -> list[bytes]:
    try:
        return split_hashes(packed)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
