"""One router's stream as the replica sees it: the requests that came over it and the frames that wait to be written.

What steps give goes into one frame until an interval has passed, or until something is the first or the last of its
request: each message on its way to a client takes CPU time of three processes, which may be where the model computes.
While a router is behind, and a frame waits for it, so does what the next steps give: it reads fewer and larger ones.
The outbox is bounded in bytes and in age, so a router that stops reading is cut off instead of filling the memory.
Knows nothing of gRPC or the engine; replica_server.py moves messages in and out.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from weft.v1 import replica_pb2

from workers.request import RequestId

_LONGEST_WAIT_S = 1.0
"""After so long what waits for a router that is behind is put into a frame, and counts against the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxLimits:
    """How far a router may fall behind."""

    max_bytes: int = 64 << 20
    max_age_s: float = 20.0
    """Limit of the age of the oldest frame that is not written."""


class RouterConnection:
    """One router's requests and unwritten frames. Every method is called on the event loop."""

    def __init__(
        self,
        number: int,
        router_id: str,
        *,
        limits: OutboxLimits,
        clock: Callable[[], float],
        stream_interval_s: float = 0.0,
    ) -> None:
        """`stream_interval_s`: time from one frame of steps to the next; 0: each step has a frame."""
        self.number = number
        """Number of the stream, over the replica's life."""
        self.router_id = router_id
        self.cut_off = asyncio.Event()
        """The router fell too far behind; nothing more is queued."""
        self._limits = limits
        self._clock = clock
        self._interval_s = stream_interval_s
        self._names: dict[RequestId, str] = {}  # requests in flight
        self._engine_ids: dict[str, RequestId] = {}  # by name
        self._num_requests = 0
        self._silent: set[RequestId] = set()  # requests of which nothing has come
        self._outbox: deque[tuple[float, int, replica_pb2.ConnectResponse]] = deque()
        self._outbox_bytes = 0
        self._wake = asyncio.Event()
        self._is_written = asyncio.Event()
        self._is_written.set()
        self._num_frames = 0
        self._steps = _Steps()
        self._flushed_s = clock()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def engine_ids(self) -> list[RequestId]:
        """The requests in flight, as the engine calls them."""
        return list(self._names)

    def engine_id(self, request_id: str) -> RequestId | None:
        """Return the engine's name for a request; None when none of that id is in flight."""
        return self._engine_ids.get(request_id)

    def open_request(self, request_id: str) -> RequestId | None:
        """Note a request and return its engine id; None when this stream has one of that id in flight.

        The engine id is unique over all routers, over all streams of a router and over time: the engine still tells
        the end of a request that was aborted.
        """
        if request_id in self._engine_ids:
            return None
        self._num_requests += 1
        engine_id = RequestId(f"{self.number}/{self._num_requests}/{request_id}")
        self._names[engine_id] = request_id
        self._engine_ids[request_id] = engine_id
        self._silent.add(engine_id)
        return engine_id

    def close_request(self, engine_id: RequestId) -> None:
        """Forget a request that has ended, and is in flight here until now."""
        self._silent.discard(engine_id)
        del self._engine_ids[self._names.pop(engine_id)]

    def output_of(self, engine_id: RequestId) -> replica_pb2.RequestOutput | None:
        """Return what is kept of a request, to write behind it what the step under way gave.

        None when it is not of this stream, or has ended.
        """
        name, steps = self._names.get(engine_id), self._steps
        if name is None:
            return None
        output = steps.outputs.get(engine_id)
        if output is None:
            output = steps.outputs[engine_id] = steps.frame.outputs.add()
            output.request_id = name
            if engine_id in self._silent:
                self._silent.discard(engine_id)
                steps.is_due = True
        return output

    def end_request(self, engine_id: RequestId) -> None:
        """Send what is kept of a request with the step under way, for it is the last, and forget the request."""
        self._steps.is_due = True
        self.close_request(engine_id)

    def end_step(self, stored: Iterable[bytes], evicted: Iterable[bytes], load: replica_pb2.Load) -> None:
        """Take what else the step gave, and send it, or keep it for a frame with the next.

        Where the router reads, nothing waits longer than the interval, however long a step takes.
        """
        steps = self._steps
        steps.events.update(dict.fromkeys(stored, True))
        steps.events.update(dict.fromkeys(evicted, False))
        steps.load = load
        if steps.is_due or self._clock() - self._flushed_s >= self._interval_s:
            self._flush_if_read()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._flush_if_read)

    def send(
        self,
        *,
        outputs: Iterable[replica_pb2.RequestOutput] = (),
        load: replica_pb2.Load | None = None,
        snapshot: replica_pb2.Snapshot | None = None,
    ) -> None:
        """Queue a frame, after one of the steps before it; cuts the router off when it is too far behind."""
        if self._steps.load is not None:
            self._flush()
        self._queue(replica_pb2.ConnectResponse(snapshot=snapshot, outputs=outputs, load=load))

    def close(self) -> None:
        """Keep nothing for later: the stream has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_written.set()

    async def written(self) -> None:
        """Wait until every frame is written, and with it the last output of each request that has ended.

        Returns also when the stream has ended.
        """
        await self._is_written.wait()

    def _flush_if_read(self) -> None:
        """Send what is kept, once no frame before it waits any more."""
        if self._outbox and self._clock() - self._flushed_s < _LONGEST_WAIT_S:
            self._steps.is_due = True
        else:
            self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        steps, self._steps = self._steps, _Steps()
        self._flushed_s = self._clock()
        frame = steps.frame
        frame.stored_block_hashes = b"".join(block for block, is_stored in steps.events.items() if is_stored)
        frame.evicted_block_hashes = b"".join(block for block, is_stored in steps.events.items() if not is_stored)
        if steps.load is not None:
            frame.load.CopyFrom(steps.load)
        self._queue(frame)

    def _queue(self, frame: replica_pb2.ConnectResponse) -> None:
        if self.cut_off.is_set():
            return
        frame.frame = self._num_frames
        now_s, num_bytes = self._clock(), frame.ByteSize()
        self._num_frames += 1
        self._outbox.append((now_s, num_bytes, frame))
        self._outbox_bytes += num_bytes
        self._wake.set()
        self._is_written.clear()
        self.check_lag()

    def check_lag(self) -> None:
        """Cut the router off when it is too far behind."""
        if not self._outbox:
            return
        waits_s = self._clock() - self._outbox[0][0]
        if waits_s > self._limits.max_age_s or self._outbox_bytes > self._limits.max_bytes:
            self.cut_off.set()

    async def frames(self) -> AsyncIterator[replica_pb2.ConnectResponse]:
        """Yield the frames in order, for ever. A frame counts against the limits until the next one is asked for."""
        while True:
            while self._outbox:
                yield self._outbox[0][2]
                _, num_bytes, _ = self._outbox.popleft()
                self._outbox_bytes -= num_bytes
                if self._steps.is_due and not self._outbox:
                    self._flush()
            self._wake.clear()
            self._is_written.set()
            await self._wake.wait()


@dataclass(slots=True)
class _Steps:
    """What the steps since the last frame gave."""

    frame: replica_pb2.ConnectResponse = field(default_factory=replica_pb2.ConnectResponse)
    """Has the outputs already; the rest is written when it is sent."""
    outputs: dict[RequestId, replica_pb2.RequestOutput] = field(default_factory=dict)
    """Those in the frame."""
    events: dict[bytes, bool] = field(default_factory=dict)
    """Whether each block was stored or evicted: its last event counts, and one told twice changes nothing."""
    load: replica_pb2.Load | None = None
    """Load after the last of the steps; None: there was no step."""
    is_due: bool = False
    """They wait for the interval no longer."""
