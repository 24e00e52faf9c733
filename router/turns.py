"""Whose turn it is to write: few requests at once pass on what came for them, the others wait in a line.

A router reads what replicas send and writes it to clients on one event loop, and gRPC gives that loop about one event
a pass: that a write is done, or that a frame is there. If hundreds wrote at once, the next frame would wait behind all
of them, so that a router with too much to do would write each token by itself and fall behind for good. With few at
once it reads as fast as replicas send. What comes for a request that stands in the line is merged in its inbox: what is
too much for a message a token becomes longer messages.
"""

import asyncio
from collections import deque

_AT_ONCE = 32
"""A write takes 0.03 to 0.06 ms of CPU, so a frame waits for 1 to 2 ms."""

_LONGEST_S = 0.02
"""Ten times what a write takes when all are busy: one that lasts longer waits for its client, which others need not."""


class Turns:
    """Gives turns in the order in which they were asked for. A turn ends when its holder says so, or by itself."""

    def __init__(self, at_once: int = _AT_ONCE, longest_s: float = _LONGEST_S) -> None:
        self._at_once = at_once
        self._longest_s = longest_s
        self._first_line: deque[asyncio.Future[None]] = deque()  # both bounded by the requests in flight
        self._line: deque[asyncio.Future[None]] = deque()
        self._held: dict[asyncio.Future[None], float] = {}  # and since when, oldest first
        self._timer: asyncio.TimerHandle | None = None  # while somebody stands in the line

    def ask(self, turn: asyncio.Future[None], *, goes_first: bool = False) -> None:
        """Set the result of `turn` when it begins, which may be now; one that is cancelled meanwhile never begins.

        `goes_first`: before all that did not ask so.
        """
        (self._first_line if goes_first else self._line).append(turn)
        self._call_next(turn.get_loop())

    def end(self, turn: asyncio.Future[None]) -> None:
        """End a turn, if it has begun and not ended."""
        if self._held.pop(turn, None) is not None:
            self._call_next(turn.get_loop())

    def _call_next(self, loop: asyncio.AbstractEventLoop) -> None:
        while (line := self._first_line or self._line) and len(self._held) < self._at_once:
            turn = line.popleft()
            if not turn.done():
                self._held[turn] = loop.time()
                turn.set_result(None)
        if line and self._timer is None:
            self._timer = loop.call_at(next(iter(self._held.values())) + self._longest_s, self._end_old, loop)

    def _end_old(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        begun_s = loop.time() - self._longest_s
        for turn in [turn for turn, since_s in self._held.items() if since_s <= begun_s]:
            del self._held[turn]
        self._call_next(loop)
