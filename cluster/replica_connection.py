"""One router's stream as the replica sees it: the requests that came over it and the frames that wait to be written.

The outbox is bounded in bytes and in age, so a router that stops reading is cut off instead of filling the memory.
Knows nothing of gRPC or the engine; replica_server.py moves messages in and out.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from weft.v1 import replica_pb2

from workers.request import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxLimits:
    """How far a router may fall behind."""

    max_bytes: int = 64 << 20
    max_age_s: float = 20.0
    """Of the oldest frame that is not written."""


class RouterConnection:
    """One router's requests and unwritten frames. Every method is called on the event loop."""

    def __init__(self, number: int, router_id: str, *, limits: OutboxLimits, clock: Callable[[], float]) -> None:
        self.number = number
        """Of the stream, over the replica's life."""
        self.router_id = router_id
        self.cut_off = asyncio.Event()
        """The router fell too far behind; nothing more is queued."""
        self._limits = limits
        self._clock = clock
        self._names: dict[RequestId, str] = {}
        self._outbox: deque[tuple[float, int, replica_pb2.ConnectResponse]] = deque()
        self._outbox_bytes = 0
        self._wake = asyncio.Event()
        self._num_frames = 0

    @property
    def engine_ids(self) -> list[RequestId]:
        """The requests in flight, as the engine calls them."""
        return list(self._names)

    def engine_id(self, request_id: str) -> RequestId:
        """Return the engine's name for a request: two routers, or two streams of one, may use the same id."""
        return RequestId(f"{self.number}/{request_id}")

    def open_request(self, request_id: str) -> RequestId | None:
        """Note a request and return its engine id; None when this stream has one of that id in flight."""
        engine_id = self.engine_id(request_id)
        if engine_id in self._names:
            return None
        self._names[engine_id] = request_id
        return engine_id

    def close_request(self, engine_id: RequestId) -> bool:
        """Forget a request that has ended; whether it was there."""
        return self._names.pop(engine_id, None) is not None

    def name_of(self, engine_id: RequestId) -> str | None:
        """Return the router's name for a request; None when it is not of this stream, or has ended."""
        return self._names.get(engine_id)

    def send(
        self,
        *,
        outputs: Iterable[replica_pb2.RequestOutput] = (),
        stored: bytes = b"",
        evicted: bytes = b"",
        load: replica_pb2.Load | None = None,
        snapshot: replica_pb2.Snapshot | None = None,
    ) -> None:
        """Number a frame and queue it; cuts the router off when it is too far behind."""
        if self.cut_off.is_set():
            return
        frame = replica_pb2.ConnectResponse(
            frame=self._num_frames,
            snapshot=snapshot,
            outputs=outputs,
            stored_block_hashes=stored,
            evicted_block_hashes=evicted,
            load=load,
        )
        now_s, num_bytes = self._clock(), frame.ByteSize()
        self._num_frames += 1
        self._outbox.append((now_s, num_bytes, frame))
        self._outbox_bytes += num_bytes
        self._wake.set()
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
            self._wake.clear()
            await self._wake.wait()
