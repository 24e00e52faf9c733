"""`weft bench offline`: it measures, shows the report and keeps its line, also of what there is after Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from bench.load.datasets import DatasetKind
from bench.load.flag_groups import GoalFlags, OfflineFlags, PromptFlags
from bench.load.flags import find_idle, parse_datasets, parse_targets
from bench.load.offline import OfflineOptions, OfflineResult, measure_offline
from bench.load.progress import OfflineProgress
from bench.load.report import offline_line, print_offline, short_dataset, warn, warn_idle
from bench.result_line import append_line, check_line_file
from cluster.operate import parse_settings

_DEFAULT_NUM_REQUESTS = 32


def run_offline(engine: OfflineFlags, prompts: PromptFlags, goals: GoalFlags, *, json_file: Path | None) -> None:
    """Measure every dataset, and tell what was measured.

    Raises what `measure_offline` raises, BenchConfigError for a flag, and BenchError when the file cannot be written.
    """
    console = Console()
    options = _parse(engine, prompts, goals)
    warn_idle(console, _find_idle(engine, prompts, options))
    if json_file is not None:
        check_line_file(json_file)

    def tell(result: OfflineResult) -> None:
        if json_file is not None:  # first: whoever reads the tables may have closed the pipe
            append_line(offline_line(options, result), json_file)
        print_offline(console, engine.model, result)
        num_calls = min(repeats[0].summary.num_requests for repeats in result.repeats.values())
        if engine.dataset == DatasetKind.TRACE and num_calls < (engine.num_requests or 0):
            warn(console, short_dataset(num_calls))

    with _until_terminated(), OfflineProgress(console) as watcher:
        measure_offline(options, tell, watcher)


@contextmanager
def _until_terminated() -> Iterator[None]:
    """Let SIGTERM end the measuring as Ctrl-C does: what was measured is told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(engine: OfflineFlags, prompts: PromptFlags, goals: GoalFlags) -> OfflineOptions:
    settings = {
        "dtype": engine.dtype,
        "quantization": engine.quantization,
        "device": engine.device,
        "num_threads": engine.threads,
        **parse_settings([f"cache.dtype={engine.kv_cache_dtype}", *(engine.settings or [])]),
    }
    is_bounded = engine.num_requests is not None
    return OfflineOptions(
        model=engine.model,
        settings=settings,
        datasets=parse_datasets(engine.workload or [], engine.dataset, prompts, is_bounded=is_bounded),
        num_requests=engine.num_requests or _DEFAULT_NUM_REQUESTS,
        repeats=engine.repeats,
        temperature=prompts.temperature,
        top_k=prompts.top_k or 0,
        top_p=1.0 if prompts.top_p is None else prompts.top_p,
        repetition_penalty=1.0 if prompts.repetition_penalty is None else prompts.repetition_penalty,
        ignore_eos=prompts.ignore_eos,
        targets=parse_targets(goals),
        seed=prompts.seed,
    )


def _find_idle(engine: OfflineFlags, prompts: PromptFlags, options: OfflineOptions) -> list[str]:
    """Return the flags that are given and that nothing looks at."""
    idle = find_idle([each.kind for each in options.datasets], prompts)
    if engine.num_requests is not None and all(each.is_workload for each in options.datasets):
        idle.append("--num-requests")
    return idle
