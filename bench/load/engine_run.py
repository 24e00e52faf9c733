"""Runs sessions through an engine in this process, all at once, and records what came when."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.load.calls import Call, Session
from bench.load.records import CallError, CallRecord, Clock, ErrorKind, Usage
from workers.engine import Engine
from workers.request import Request, RequestId, RequestOutput, SamplingParams

_MAX_QUEUED = 512
"""Limit of the requests that wait in the engine at once; it refuses those beyond its own."""


def run_engine(
    engine: Engine,
    sessions: Sequence[Session],
    sampling: SamplingParams,
    *,
    cache_salt: str,
    clock: Clock = time.perf_counter,
) -> list[CallRecord]:
    """Run all sessions to their end; the calls of one follow each other without a pause.

    First calls count as sent at the start, later ones at the end of the one before, even while they wait to be let in.

    Args:
        engine: with nothing in it.
        sessions: prompts are token ids.
        sampling: of all requests but for the number of tokens.
        cache_salt: requests with another one share no cached prefixes with these.
        clock: of the records.

    Raises:
        InvalidRequestError: a prompt does not fit the model.
        GroupFailedError: the model failed.
    """
    return _Feed(engine, sessions, sampling, cache_salt, clock).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A call that waits to be let in."""

    session: Session
    index: int
    """Place of the call in its session."""
    since_s: float
    """When it could first be sent: at the start, or at the end of the call before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    ready: _Ready
    record: CallRecord


class _Feed:
    def __init__(
        self, engine: Engine, sessions: Sequence[Session], sampling: SamplingParams, cache_salt: str, clock: Clock
    ) -> None:
        self._engine = engine
        start_s = clock()
        self._waiting = deque(_Ready(session=session, index=0, since_s=start_s) for session in sessions)
        self._sampling = sampling
        self._cache_salt = cache_salt
        self._clock = clock
        self._open: dict[RequestId, _Open] = {}
        self._records: list[CallRecord] = []

    def run(self) -> list[CallRecord]:
        num_queued, most = 0, min(_MAX_QUEUED, self._engine.config.scheduler.max_waiting)
        while self._waiting or self._open:
            while self._waiting and num_queued < most:
                self._add(self._waiting.popleft())
                num_queued += 1
            self._engine.launch()
            result = self._engine.take_result()  # the step before, while this one runs
            num_queued = result.load.num_waiting
            now_s = self._clock()
            for output in result.outputs:
                self._take(output, now_s)
            self._engine.collect()
        return self._records

    def _add(self, ready: _Ready) -> None:
        call: Call = ready.session.calls[ready.index]
        assert isinstance(call.prompt, tuple), "prompts are token ids here"
        request_id = RequestId(f"{self._cache_salt} {len(self._records)}")
        record = CallRecord(num_asked=call.num_out, due_s=None, sent_s=ready.since_s)
        self._engine.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=call.prompt,
                sampling=replace(self._sampling, max_tokens=call.num_out),
                cache_salt=self._cache_salt,
            )
        )
        self._records.append(record)
        self._open[request_id] = _Open(ready=ready, record=record)

    def _take(self, output: RequestOutput, now_s: float) -> None:
        entry = self._open[output.request_id]
        if output.token_ids:
            entry.record.note(len(output.token_ids), now_s)
        if output.error is not None:
            entry.record.fail(CallError(ErrorKind.SERVER, str(output.error)), now_s)
            del self._open[output.request_id]
        elif output.finish is not None:
            usage = output.finish.usage
            told = Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
            )
            entry.record.finish(told, now_s)
            del self._open[output.request_id]
            session, index = entry.ready.session, entry.ready.index + 1
            if index < len(session.calls):
                self._waiting.append(_Ready(session=session, index=index, since_s=now_s))
