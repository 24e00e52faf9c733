"""Starts a worker for each engine, lets them take turns, and collects what they did.

Knows processes and workloads; what the numbers mean is in comparison.py.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.load.calls import Call
from bench.load.workloads import make_workload
from bench.peers.catalog import WEFT, find_start
from bench.peers.comparison import SMALL_GAP, Agreement, Measured, compare_tokens, interleave
from bench.peers.process import Section, Worker, WorkerError
from bench.peers.worker import Job, Loaded, Sampling, Setup

_LOAD_TIMEOUT_S = 1800.0
"""Limit of loading: the first load converts the checkpoint."""
_RUN_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is compared on what."""

    model: Path
    dtype: str
    peers: tuple[str, ...]
    workloads: tuple[str, ...]
    rounds: int
    num_threads: int
    venvs: Path
    seed: int
    weft_kv_cache_dtype: str
    """What Weft alone keeps keys and values in: "auto" or "int8"."""
    device: str
    """"cpu" or "cuda"."""
    sampling: Sampling
    """Sampling of the timed rounds; tokens are compared where all take the most probable ones."""
    settle_s: float
    """Pause before each section: thread pools of the engine before spin for up to 0.2 s, then sleep."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Everything that was seen."""

    loaded: dict[str, Loaded] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Engines that could not be started or loaded, or failed, and why."""
    measured: list[Measured] = field(default_factory=list)
    agreements: dict[str, dict[str, Agreement]] = field(default_factory=dict)
    """How the tokens of each workload and peer compare with Weft's."""
    was_interrupted: bool = False
    """Whether it ended before the last round, by Ctrl-C or as Weft failed."""
    failure: WorkerError | None = None


def measure(options: Options, *, tell: Callable[[str], None]) -> Outcome:
    """Run the whole comparison; `tell` gets a line for each thing that happens.

    Ctrl-C ends the rounds early, and so does a failure of Weft. Raises WorkerError when nothing was measured before it.
    """
    outcome = Outcome()
    with _started(options, outcome, tell) as workers:
        run = _Run(options, outcome, workers, tell)
        for workload in options.workloads:
            run.compare(workload)
        try:
            for index, workload, engine in interleave([WEFT, *options.peers], options.workloads, options.rounds):
                run.section(index, workload, engine)
        except (KeyboardInterrupt, WorkerError) as error:
            if not outcome.measured:
                raise
            outcome.was_interrupted = True
            outcome.failure = error if isinstance(error, WorkerError) else None
            tell(f"{outcome.failure or 'interrupted'}; medians are of the rounds till then")
    return outcome


class _Run:
    def __init__(
        self, options: Options, outcome: Outcome, workers: dict[str, Worker], tell: Callable[[str], None]
    ) -> None:
        self._options = options
        self._outcome = outcome
        self._workers = workers
        self._tell = tell
        self._vocab_size = int(_model_config(options.model)["vocab_size"])

    def compare(self, workload: str) -> None:
        """Warm every engine up, untimed, and compare the greedy tokens of all with Weft's."""
        calls = self._calls(workload, 0)
        reference = self._workers[WEFT].run(_job(calls, Sampling(), with_gaps=True), timeout_s=_RUN_TIMEOUT_S)
        assert reference.gaps is not None
        agreements = self._outcome.agreements.setdefault(workload, {})
        for engine in list(self._workers):
            section = self._ask(engine, calls, Sampling())
            if self._options.sampling != Sampling():
                self._ask(engine, calls, self._options.sampling)
            if section is not None and engine != WEFT:
                agreements[engine] = compare_tokens(
                    reference.tokens, reference.gaps, section.tokens, small_gap=SMALL_GAP[self._options.dtype]
                )
                self._tell(f"{workload} {engine}: {describe_agreement(agreements[engine])}")

    def section(self, index: int, workload: str, engine: str) -> None:
        """Time one run."""
        calls = self._calls(workload, index)
        section = self._ask(engine, calls, self._options.sampling)
        if section is None:
            return
        measured = Measured(
            round=index,
            workload=workload,
            engine=engine,
            num_requests=len(calls),
            num_tokens=sum(call.num_out for call in calls),
            wall_s=section.wall_s,
            others_cores=section.others_cores,
            first_s=section.first_s,
        )
        self._outcome.measured.append(measured)
        contended = f", contended: others used {measured.others_cores:.2f} cores" if measured.is_contended else ""
        self._tell(f"round {index} {workload} {engine}: {measured.rate:.1f} tokens/s{contended}")

    def _ask(self, engine: str, calls: Sequence[Call], sampling: Sampling) -> Section | None:
        worker = self._workers.get(engine)
        if worker is None:
            return None
        time.sleep(self._options.settle_s)
        try:
            return worker.run(_job(calls, sampling), timeout_s=_RUN_TIMEOUT_S)
        except WorkerError as error:
            if engine == WEFT:
                raise
            self._tell(f"{engine} is left out from here on: {error}")
            self._outcome.skipped[engine] = str(error)
            self._workers.pop(engine).close()
            return None

    def _calls(self, workload: str, index: int) -> tuple[Call, ...]:
        return make_workload(workload, vocab_size=self._vocab_size, seed=self._options.seed + index)


@contextmanager
def _started(options: Options, outcome: Outcome, tell: Callable[[str], None]) -> Iterator[dict[str, Worker]]:
    """Yield the workers of all engines that could be loaded, one after the other; all end with the block."""
    workers: dict[str, Worker] = {}
    try:
        for name in (WEFT, *options.peers):
            try:
                start = find_start(name, venvs=options.venvs, num_threads=options.num_threads, device=options.device)
                log = options.venvs / "logs" / f"{name}.log"
                workers[name] = Worker(name, start.command, environment=start.environment, log=log)
                outcome.loaded[name] = workers[name].load(_setup(name, options), timeout_s=_LOAD_TIMEOUT_S)
            except BenchError as error:
                if name == WEFT:
                    raise
                tell(f"{name} is skipped: {error}")
                outcome.skipped[name] = str(error)
                if name in workers:
                    workers.pop(name).close()
            else:
                tell(f"{name}: {_describe(outcome.loaded[name])}")
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def _setup(name: str, options: Options) -> Setup:
    """Return sizes that hold for all workloads, so that every engine gets the same."""
    cache = options.venvs / "checkpoints" / f"{options.model.name}-{_digest(options.model)}" / name
    cache.mkdir(parents=True, exist_ok=True)
    jobs = [make_workload(workload, vocab_size=1, seed=0) for workload in options.workloads]
    lengths = [[len(call.prompt) + call.num_out for call in calls if isinstance(call.prompt, tuple)] for calls in jobs]
    return Setup(
        model=str(options.model),
        dtype=options.dtype,
        cache=str(cache),
        num_threads=options.num_threads,
        max_num_seqs=max(map(len, jobs)),
        max_context=max(map(max, lengths)),
        cache_tokens=max(map(sum, lengths)),
        kv_cache_dtype=options.weft_kv_cache_dtype if name == WEFT else "auto",
        device=options.device,
    )


def _digest(model: Path) -> str:
    """Return a digest of the folder's files, by names, sizes and times: a model that changes is converted anew."""
    stats = {file.name: file.stat() for file in sorted(model.iterdir()) if file.suffix in (".json", ".safetensors")}
    seen = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()])
    return hashlib.blake2b(seen.encode(), digest_size=6).hexdigest()


def _job(calls: Sequence[Call], sampling: Sampling, *, with_gaps: bool = False) -> Job:
    prompts = [list(call.prompt) for call in calls if isinstance(call.prompt, tuple)]
    return Job(prompts=prompts, num_out=[call.num_out for call in calls], with_gaps=with_gaps, sampling=sampling)


def describe_agreement(agreement: Agreement) -> str:
    """Say in words how tokens compare."""
    return (
        f"{agreement.num_same} of {agreement.num_requests} answers are Weft's, {agreement.num_close} leave it at a "
        f"small gap, {agreement.num_far} at a larger one (widest {agreement.widest_gap:.3f}); "
        f"{agreement.mean_prefix:.0%} of tokens before that"
    )


def _describe(loaded: Loaded) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in loaded.packages.items())
    return f"{versions}, {loaded.dtype}" + (f" ({loaded.note})" if loaded.note else "")


def _model_config(model: Path) -> Mapping[str, Any]:
    config: Mapping[str, Any] = json.loads((model / "config.json").read_text())
    return config
