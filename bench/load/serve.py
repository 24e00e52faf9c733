"""`weft bench serve`: one load after the other on a running service, and what each gave."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from bench.errors import BenchError
from bench.load.arrivals import ClosedLoop, Load
from bench.load.calls import Session, begin_otherwise
from bench.load.datasets import make_sessions, take_calls
from bench.load.driver import Driver, Run, find_arrivals
from bench.load.grpc_sender import connect_grpc
from bench.load.http_sender import connect_http
from bench.load.rank_observer import MeasurePeak, RankObserver, measure_peak_here
from bench.load.sender import Protocol, Sender, Target
from bench.load.serve_values import Outcome, Point, ServeOptions
from bench.load.service_ranks import RankSource
from bench.load.statistics import describe_errors, summarize
from bench.load.watcher import ServeWatcher

SMALL_VOCAB_SIZE = 500
"""Token ids below this are known to about every model."""

FIND_TIMEOUT_S = 10.0
"""Limit of the time in which the service says what it serves; a host that is not there may say nothing."""

_WARMUP_CONCURRENCY = 8


async def measure(
    options: ServeOptions,
    watcher: ServeWatcher | None = None,
    outcome: Outcome | None = None,
    *,
    ranks: RankSource | None = None,
    measure_peak: MeasurePeak = measure_peak_here,
) -> Outcome:
    """Run all loads and return the outcome; `outcome` is one to fill, `ranks` tells what the service's ranks do.

    Raises BenchError when the service cannot be reached, serves no such model, or answers no request of the warm-up;
    BenchConfigError when the dataset cannot be used. Requests that fail later are counted.
    """
    outcome = outcome or Outcome()
    async with _connect(options.target) as sender:
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                outcome.model = await sender.find_model()
        except TimeoutError:
            message = f"{options.target.address} does not say within {FIND_TIMEOUT_S:g} s which models it serves"
            raise BenchError(message) from None
        observer = RankObserver(ranks, outcome.model.name, peak=options.peak, measure_peak=measure_peak)
        await _Measuring(options, sender, observer, watcher or ServeWatcher(), outcome).run()
    outcome.is_complete = True
    return outcome


class _Measuring:
    def __init__(
        self,
        options: ServeOptions,
        sender: Sender,
        observer: RankObserver,
        watcher: ServeWatcher,
        outcome: Outcome,
    ) -> None:
        assert outcome.model is not None, "found"
        self._options = options
        self._sender = sender
        self._observer = observer
        self._vocab_size = options.vocab_size or outcome.model.vocab_size or SMALL_VOCAB_SIZE
        self._watcher = watcher
        self._outcome = outcome

    async def run(self) -> None:
        self._check_dataset()
        self._watcher.prepare("measure the machine")
        await self._observer.find_peak()
        self._outcome.peak = self._observer.peak
        if self._options.num_warmup:
            await self._warm_up(self._options.num_warmup)
        for load in self._options.loads:
            await self._measure(load)

    def _check_dataset(self) -> None:
        """Raise BenchConfigError, before anything is measured, when the dataset cannot be used; loads are of a kind."""
        options = self._options
        find_arrivals(options.loads[0], self._dataset(options.seed), options.seed)

    async def _warm_up(self, num_requests: int) -> None:
        """Send other prompts than the loads have, those of a file begun otherwise: not every service keeps caches
        apart."""
        self._watcher.begin(None, num_requests)
        load = ClosedLoop(concurrency=_WARMUP_CONCURRENCY)
        word = f"({uuid.uuid4().hex})"
        sessions = (
            replace(
                each,
                think_s=0.0,
                calls=tuple(replace(call, prompt=begin_otherwise(call.prompt, word)) for call in each.calls),
            )
            for each in take_calls(self._dataset(self._options.seed + 1), num_requests)
        )
        run = await self._driver().run(load, sessions, seed=0)
        summary = summarize(run.records)
        if not summary.num_answered:
            raise BenchError(f"no request of the warm-up was answered: {describe_errors(summary)}")

    async def _measure(self, load: Load) -> None:
        options, driver = self._options, self._driver()
        self._watcher.begin(load, options.num_requests, options.duration_s)
        dataset = self._dataset(options.seed)
        run, is_short = None, False
        await self._observer.begin()
        try:
            sessions = take_calls(dataset, options.num_requests)
            run = await driver.run(load, sessions, seed=options.seed, duration_s=options.duration_s)
            await self._observer.end()
            is_short = self._is_short(run, dataset)
        finally:  # also when it is interrupted
            run = run or driver.so_far()
            if run.records:
                self._tell(load, run, is_short=is_short)

    def _is_short(self, run: Run, rest: Iterator[Session]) -> bool:
        """Whether the dataset, of which `rest` was not taken, ended before the flags that say how much."""
        is_all = run.is_over or self._options.dataset.has_end or run.num_calls == self._options.num_requests
        return not is_all and next(rest, None) is None

    def _tell(self, load: Load, run: Run, *, is_short: bool) -> None:
        summary = summarize(run.records, self._options.targets)
        utilization = self._observer.utilization(summary.duration_s)
        point = Point(
            load=load,
            summary=summary,
            cpu_share=run.cpu_share,
            num_unsent=run.num_unsent,
            is_short=is_short,
            utilization=utilization,
        )
        self._outcome.ranks_unknown = self._observer.unknown
        self._outcome.points.append(point)
        self._watcher.end(point)

    def _driver(self) -> Driver:
        return Driver(self._sender, cache_salt=f"weft-bench-{uuid.uuid4().hex}", on_answer=self._watcher.note)

    def _dataset(self, seed: int) -> Iterator[Session]:
        return make_sessions(self._options.dataset, vocab_size=self._vocab_size, seed=seed)


def _connect(target: Target) -> AbstractAsyncContextManager[Sender]:
    return connect_grpc(target) if target.protocol is Protocol.GRPC else connect_http(target)
