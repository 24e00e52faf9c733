"""How much of the time a model stands still under backlog: between its computations, while requests are there.

python -m bench.idle_time [MODEL] [--tensor-parallel 1,2] [--requests 32,256] [--async auto,on,off] [--rounds 3]

MODEL is as in `weft bench offline`. All requests are there at once: 32 to 256 tokens in, 16 to 128 out, greedy. Ranks
are processes of this machine; the idle share is that of rank 0 over a round, where 2 % is the target. The first round
warms up. Without a backlog ranks sleep, which counts as nothing.
"""

import argparse
import gc
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.load.calls import Lengths
from bench.load.datasets import DatasetOptions, make_sessions, take_calls
from bench.load.engine_run import run_engine
from bench.load.geometries import find_model
from bench.result_line import end_with_line
from bench.script import check_gpus, count, counts, make_parser, run_script
from cluster.config import build_section
from workers.config import EngineConfig
from workers.engine import Engine
from workers.engine_builder import build_engine
from workers.rank import Rendezvous, follow_group
from workers.request import SamplingParams
from workers.stats import RankStats

_DATASET = DatasetOptions(inputs=Lengths(low=32, high=256), outputs=Lengths(low=16, high=128))
_SAMPLING = SamplingParams(temperature=0, ignore_eos=True)
_LOOKS_AHEAD = {"auto": None, "on": True, "off": False}
_END_TIMEOUT_S = 10.0


def main() -> None:
    """Measure each way to run the model."""
    parser = make_parser("bench.idle_time", __doc__)
    parser.add_argument("model", nargs="?", default="llama-110m")
    parser.add_argument("--tensor-parallel", type=counts, default=[1, 2], help="sizes of the group (1,2)")
    parser.add_argument("--requests", type=counts, default=[32, 256], help="requests at once (32,256)")
    parser.add_argument(
        "--async",
        type=_ways,
        default=["auto", "on"],
        dest="asynchronous",
        help="whether steps are planned ahead; auto: as by default (auto,on)",
    )
    parser.add_argument("--rounds", type=count, default=3)
    args = parser.parse_args()
    folder = find_model(args.model)
    if torch.cuda.is_available():
        check_gpus("--tensor-parallel", args.tensor_parallel, torch.cuda.device_count())
    table = Table("ranks", "planned ahead", "requests", "idle", "idle ms a step", "busy ms a step", "tokens/s")
    rows = []
    for num_ranks in args.tensor_parallel:
        for asynchronous in args.asynchronous:
            config = _config(folder, num_ranks, looks_ahead=_LOOKS_AHEAD[asynchronous])
            for num_requests, measured in _measure_group(config, args.requests, args.rounds).items():
                rows.append({"ranks": num_ranks, "async": asynchronous, "requests": num_requests, **measured})
                idle, *rest = measured.values()
                table.add_row(
                    str(num_ranks), asynchronous, str(num_requests), f"{idle:.2%}", *(f"{x:.2f}" for x in rest)
                )
    Console().print(table)
    end_with_line("idle_time", {"rows": rows})


def _ways(text: str) -> list[str]:
    """Read which ways are compared, for argparse."""
    if unknown := set(text.split(",")) - _LOOKS_AHEAD.keys():
        raise argparse.ArgumentTypeError(f"{min(unknown)!r}; allowed: {', '.join(_LOOKS_AHEAD)}")
    return text.split(",")


def _config(folder: Path, num_ranks: int, *, looks_ahead: bool | None) -> EngineConfig:
    section = {
        "path": str(folder),
        "tensor_parallel": num_ranks,
        "scheduler": {"async_scheduling": looks_ahead, "max_num_seqs": 256},
    }
    return build_section(section).to_spec(hash_key=b"bench").engine


def _measure_group(config: EngineConfig, requests: Sequence[int], num_rounds: int) -> dict[int, dict[str, float]]:
    """Return the medians for each number of requests, and keep nothing of the group."""
    with _group(config) as (engine, stats):
        return {num_requests: _measure(engine, stats, num_requests, num_rounds) for num_requests in requests}


@contextmanager
def _group(config: EngineConfig) -> Iterator[tuple[Engine, RankStats]]:
    """Yield a group whose other ranks are processes of this machine, and what its rank 0 counts."""
    gc.collect()  # recorded steps of the group before refer to themselves, and on a GPU it had most of the memory
    num_others = config.parallel.world_size - 1
    rendezvous = Rendezvous.open() if num_others else None
    context = multiprocessing.get_context("spawn")
    processes = []
    if rendezvous is not None:
        for rank in range(1, num_others + 1):
            arguments = {"rank": rank, "host": rendezvous.host, "port": rendezvous.port}
            processes.append(context.Process(target=follow_group, args=(config,), kwargs=arguments, daemon=True))
            processes[-1].start()
    stats = RankStats()
    engine = build_engine(config, rendezvous=rendezvous, rank_stats=stats)
    try:
        yield engine, stats
    finally:
        engine.close()
        for process in processes:
            process.join(_END_TIMEOUT_S)


def _measure(engine: Engine, stats: RankStats, num_requests: int, num_rounds: int) -> dict[str, float]:
    """Return the medians over the rounds."""
    rounds = [_run_once(engine, stats, num_requests, index) for index in range(num_rounds + 1)][1:]
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _run_once(engine: Engine, stats: RankStats, num_requests: int, index: int) -> dict[str, float]:
    sessions = list(take_calls(make_sessions(_DATASET, vocab_size=engine.vocab_size, seed=index), num_requests))
    busy_s, idle_s, num_steps = stats.model_busy_s, stats.model_idle_s, stats.num_steps
    start_s = time.perf_counter()
    records = run_engine(engine, sessions, _SAMPLING, cache_salt=f"{num_requests} {index}")
    took_s = time.perf_counter() - start_s
    busy_s, idle_s = stats.model_busy_s - busy_s, stats.model_idle_s - idle_s
    num_steps = stats.num_steps - num_steps
    return {
        "idle_share": idle_s / (busy_s + idle_s),
        "idle_ms": 1e3 * idle_s / num_steps,
        "busy_ms": 1e3 * busy_s / num_steps,
        "tokens_per_s": sum(record.usage.completion_tokens for record in records if record.usage) / took_s,
    }


if __name__ == "__main__":
    run_script(main)
