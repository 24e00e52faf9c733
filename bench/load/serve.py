"""`weft bench serve`: one load after the other on a running service, and what each gave."""

import uuid
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from bench.load.arrivals import ClosedLoop, Load
from bench.load.datasets import DatasetOptions, make_sessions, take_calls
from bench.load.driver import Driver, Run
from bench.load.grpc_sender import connect_grpc
from bench.load.http_sender import connect_http
from bench.load.sender import Protocol, Sender, ServedModel, Target
from bench.load.statistics import Summary, Targets, summarize
from bench.load.watcher import ServeWatcher

SMALL_VOCAB_SIZE = 500
"""Token ids below this are known to about every model."""

_WARMUP_CONCURRENCY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Which loads on which service."""

    target: Target
    loads: tuple[Load, ...]
    """One after the other, each with the same prompts and none of the cached prefixes of those before it."""
    dataset: DatasetOptions
    num_requests: int | None
    """Of each load; None: all of the dataset, or as many as begin within the duration."""
    duration_s: float | None
    """Nothing is sent later than this."""
    num_warmup: int
    """Requests sent before, and not counted."""
    vocab_size: int | None
    """Random token ids are below it; None: the model's, or SMALL_VOCAB_SIZE where the service does not tell."""
    targets: Targets | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load and what it gave."""

    load: Load
    summary: Summary
    cpu_share: float
    """Of one core, that the load generator took."""


async def measure(options: ServeOptions, watcher: ServeWatcher | None = None) -> tuple[ServedModel, list[Point]]:
    """Run all loads.

    Raises BenchError when the service cannot be reached or serves no such model, BenchConfigError when the dataset
    cannot be used. Requests that fail are counted.
    """
    watcher = watcher or ServeWatcher()
    points = []
    async with _connect(options.target) as sender:
        model = await sender.find_model()
        vocab_size = options.vocab_size or model.vocab_size or SMALL_VOCAB_SIZE

        async def run(load: Load | None, num_requests: int | None, duration_s: float | None) -> Run:
            watcher.begin(load, num_requests)
            driver = Driver(sender, cache_salt=f"weft-bench-{uuid.uuid4().hex}", on_answer=watcher.note)
            sessions = take_calls(
                make_sessions(options.dataset, vocab_size=vocab_size, seed=options.seed), num_requests
            )
            load = load or ClosedLoop(concurrency=_WARMUP_CONCURRENCY)
            return await driver.run(load, sessions, seed=options.seed, duration_s=duration_s)

        if options.num_warmup:
            await run(None, options.num_warmup, None)
        for load in options.loads:
            gave = await run(load, options.num_requests, options.duration_s)
            points.append(Point(load=load, summary=summarize(gave.records, options.targets), cpu_share=gave.cpu_share))
    return model, points


def _connect(target: Target) -> AbstractAsyncContextManager[Sender]:
    return connect_grpc(target) if target.protocol is Protocol.GRPC else connect_http(target)
