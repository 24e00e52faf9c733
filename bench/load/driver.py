"""Sends a load and records what comes back. One event loop; the clock and the pauses are arguments.

An open loop never waits for an answer before it sends the next session: a request that is sent late shows in its
record, as does everything that a slow service would otherwise hide. Within a session each call follows an answer.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile

from bench.errors import BenchConfigError
from bench.load.arrivals import ClosedLoop, Load, OpenLoop, Replay, draw_offsets
from bench.load.calls import Call, Session
from bench.load.records import CallError, CallRecord, Clock, ErrorKind
from bench.load.sender import Sender

Pause = Callable[[float], Awaitable[None]]

_TURNED_AWAY = (ErrorKind.UNAVAILABLE, ErrorKind.OVERLOADED)
_TURNED_AWAY_PAUSE_S = 1.0
"""Pause after a refusal: a closed loop would ask a service that is gone or full thousands of times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a load gave."""

    records: list[CallRecord]
    cpu_share: float
    """Share of one core that this process took meanwhile: near 1, the generator is what is measured."""
    num_unsent: int
    """Later calls of sessions that ended with a failure."""
    is_over: bool
    """Whether the duration ended it, and calls were left."""

    @property
    def num_calls(self) -> int:
        """How many calls the sessions had that were begun."""
        return len(self.records) + self.num_unsent


class Driver:
    """Sends sessions to a service."""

    def __init__(
        self,
        sender: Sender,
        *,
        cache_salt: str,
        on_answer: Callable[[CallRecord], None] = lambda record: None,
        clock: Clock = time.perf_counter,
        pause: Pause = asyncio.sleep,
    ) -> None:
        """`cache_salt`: requests of other drivers share no cached prefixes with these; `on_answer`: at each end."""
        self._sender = sender
        self._cache_salt = cache_salt
        self._on_answer = on_answer
        self._clock = clock
        self._pause = pause
        self._records: list[CallRecord] = []
        self._num_unsent = 0
        self._is_over = False
        self._start_s, self._start_cpu_s = clock(), time.process_time()

    async def run(self, load: Load, sessions: Iterator[Session], *, seed: int, duration_s: float | None = None) -> Run:
        """Send the calls that are due within `duration_s`, and wait for their answers.

        When it is cancelled, what is not answered counts as failed, and `so_far` tells what there is.
        Raises BenchConfigError when a trace without times is to be replayed.
        """
        arrivals = find_arrivals(load, sessions, seed)
        start_s = self._start_s = self._clock()
        self._start_cpu_s = time.process_time()
        end_s = None if duration_s is None else start_s + duration_s
        async with asyncio.TaskGroup() as tasks:
            if isinstance(load, ClosedLoop):
                for _ in range(load.concurrency):
                    tasks.create_task(self._work(sessions, end_s))
            if isinstance(load, OpenLoop) and load.is_at_once and end_s is not None:
                arrivals = takewhile(lambda _: not self._ends(self._clock(), end_s), arrivals)  # all are due now
            await self._send_all(arrivals, start_s, end_s, tasks)
        return self.so_far()

    def so_far(self) -> Run:
        """What the load has given until now."""
        wall_s = max(self._clock() - self._start_s, 1e-9)
        cpu_share = (time.process_time() - self._start_cpu_s) / wall_s
        return Run(records=self._records, cpu_share=cpu_share, num_unsent=self._num_unsent, is_over=self._is_over)

    async def _send_all(
        self, arrivals: Iterable[tuple[float, Session]], start_s: float, end_s: float | None, tasks: asyncio.TaskGroup
    ) -> None:
        for offset_s, session in arrivals:
            due_s = start_s + offset_s
            if self._ends(due_s, end_s):
                return
            wait_s = due_s - self._clock()
            if wait_s > 0:
                await self._pause(wait_s)
            tasks.create_task(self._run_session(session, due_s, end_s))
            await asyncio.sleep(0)  # it is sent before the next session is made, which takes time

    async def _work(self, sessions: Iterator[Session], end_s: float | None) -> None:
        for session in sessions:  # all workers share them: each takes the next
            if self._ends(self._clock(), end_s):
                return
            error = await self._run_session(session, None, end_s)
            if error is not None and error.kind in _TURNED_AWAY:
                await self._pause(_TURNED_AWAY_PAUSE_S)

    def _ends(self, at_s: float, end_s: float | None) -> bool:
        """Whether a call that could be sent then is left."""
        ends = end_s is not None and at_s >= end_s
        self._is_over |= ends
        return ends

    async def _run_session(self, session: Session, due_s: float | None, end_s: float | None) -> CallError | None:
        for index, call in enumerate(session.calls):
            if index:
                if self._ends(self._clock() + session.think_s, end_s):
                    return None
                await self._pause(session.think_s)
            record = await self._call(call, due_s if index == 0 else None)
            if record.error is not None:
                self._num_unsent += len(session.calls) - index - 1
                return record.error
        return None

    async def _call(self, call: Call, due_s: float | None) -> CallRecord:
        record = CallRecord(num_asked=call.num_out, due_s=due_s, sent_s=self._clock())
        self._records.append(record)
        try:
            usage = await self._sender.send(
                call, self._cache_salt, lambda num_tokens: record.note(num_tokens, self._clock())
            )
            record.finish(usage, self._clock())
        except CallError as error:
            record.fail(error, self._clock())
        except asyncio.CancelledError:
            record.fail(CallError(ErrorKind.CANCELLED, "interrupted"), self._clock())
            raise
        self._on_answer(record)
        return record


def find_arrivals(load: Load, sessions: Iterator[Session], seed: int) -> Iterator[tuple[float, Session]]:
    """Return when each session is due; nothing in a closed loop.

    Raises BenchConfigError when a trace without times is to be replayed.
    """
    match load:
        case OpenLoop():
            return zip(draw_offsets(load, random.Random(f"arrivals {seed}")), sessions, strict=False)
        case Replay():
            return _recorded(sessions, load.speed)
        case ClosedLoop():
            return iter(())


def _recorded(sessions: Iterator[Session], speed: float) -> Iterator[tuple[float, Session]]:
    """Checked before the first is sent. A trace has times for all of its requests or for none."""
    first = next(sessions, None)
    if first is None or first.at_s is None:
        raise BenchConfigError("--replay is given, and the sessions have no times; allowed: a trace with timestamps")
    first_s = first.at_s
    return ((((session.at_s or first_s) - first_s) / speed, session) for session in chain([first], sessions))
