"""What a service gives of what its engine gives alone, on the same cores: client, router and Ray take the rest.

python -m bench.served_share [MODEL] [--rounds W1:16,W2:6,W3:12]

MODEL is as in `weft bench offline`. Engine and service take turns, run by run, with the same prompts: all processes of
the service are stopped (SIGSTOP) while the engine runs, which sleeps otherwise. The ratio is that of neighbours; its
target is 0.85. The first round of each workload warms up. Linux only.
"""

import argparse
import asyncio
import math
import multiprocessing
import re
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.free_ports import serve_command
from bench.load.arrivals import OpenLoop
from bench.load.datasets import DatasetKind, DatasetOptions, make_sessions, take_calls
from bench.load.engine_run import run_engine
from bench.load.geometries import find_model
from bench.load.sender import Protocol, Target
from bench.load.serve import measure
from bench.load.serve_values import ServeOptions
from bench.load.statistics import summarize
from bench.load.workloads import WORKLOADS
from bench.paused_service import PausedService, start_service
from bench.result_line import end_with_line
from bench.script import count, make_parser, run_script
from cluster.config import build_section
from workers.cores import give_way
from workers.engine_builder import build_engine
from workers.request import SamplingParams

_READY_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0


def main() -> None:
    """Measure each workload."""
    parser = make_parser("bench.served_share", __doc__)
    parser.add_argument("model", nargs="?", default="llama-110m")
    parser.add_argument("--rounds", type=_rounds, default="W1:16,W2:6,W3:12", help="of each workload (%(default)s)")
    args = parser.parse_args()
    folder = find_model(args.model)
    table = Table("workload", "rounds", "offline", "served", "ratio", "quartiles", title=f"tokens/s, {folder.name}")
    rows = []
    with _engine(folder) as engine, _service(folder) as service:
        give_way()  # as `weft bench serve` does
        for name, rounds in args.rounds.items():
            pairs = [_run_round(engine, service, DatasetKind(name), number) for number in range(rounds + 1)][1:]
            row = _summarize(pairs)
            rows.append({"workload": name, **row, "pairs": pairs})
            low, middle, high = row["ratios"]
            speeds = (f"{statistics.median(side):.1f}" for side in zip(*pairs, strict=True))
            table.add_row(name, str(rounds), *speeds, f"{middle:.3f}", f"{low:.3f}, {high:.3f}")
    Console().print(table)
    end_with_line("served_share", {"rows": rows})


def _rounds(text: str) -> dict[str, int]:
    """Read the rounds of each workload, for argparse."""
    rounds = {}
    for part in text.split(","):
        name, _, number = part.partition(":")
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{part!r}; allowed: {', '.join(WORKLOADS)}, with rounds, as W1:16")
        rounds[name] = count(number)
    return rounds


class _Engine:
    """Runs workloads in a process of its own, which sleeps in between."""

    def __init__(self, connection: "Connection[tuple[DatasetKind, int], float]") -> None:
        self._connection = connection

    def run(self, kind: DatasetKind, seed: int) -> float:
        """Return output tokens a second."""
        self._connection.send((kind, seed))
        return self._connection.recv()


def _run_served(service: PausedService, kind: DatasetKind, seed: int) -> float:
    """Send all requests at once; return output tokens a second."""
    options = ServeOptions(
        target=Target(protocol=Protocol.GRPC, address=service.address),
        loads=(OpenLoop(rate=math.inf),),
        dataset=DatasetOptions(kind=kind),
        num_requests=None,
        duration_s=None,
        num_warmup=0,
        vocab_size=None,
        targets=None,
        seed=seed,
    )
    with service.awake():
        (point,) = asyncio.run(measure(options)).points
    return point.summary.output_rate


def _run_round(engine: _Engine, service: PausedService, kind: DatasetKind, number: int) -> tuple[float, float]:
    """Return (offline, served), each of them measured first in every second round."""
    if number % 2:
        offline = engine.run(kind, number)
        return offline, _run_served(service, kind, number)
    served = _run_served(service, kind, number)
    return engine.run(kind, number), served


def _summarize(pairs: list[tuple[float, float]]) -> dict[str, list[float]]:
    ratios = [served / offline for offline, served in pairs]
    return {"ratios": statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3}


@contextmanager
def _engine(folder: Path) -> Iterator[_Engine]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_engine, args=(theirs, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()  # it is loaded
        yield _Engine(ours)
    finally:
        ours.close()
        process.join(_END_TIMEOUT_S)


def _run_engine(connection: "Connection[float, tuple[DatasetKind, int]]", folder: Path) -> None:
    engine = build_engine(build_section({"path": str(folder)}).to_spec(hash_key=b"bench").engine)
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    connection.send(0.0)
    try:
        while True:
            kind, seed = connection.recv()
            sessions = make_sessions(DatasetOptions(kind=kind), vocab_size=engine.vocab_size, seed=seed)
            records = run_engine(engine, list(take_calls(sessions, None)), sampling, cache_salt=f"{kind} {seed}")
            connection.send(summarize(records).output_rate)
    except EOFError:
        engine.close()


def _service(folder: Path) -> AbstractContextManager[PausedService]:
    """Return a `weft serve` of its own, on free ports."""
    return start_service(serve_command(folder), _find_grpc, timeout_s=_READY_TIMEOUT_S)


def _find_grpc(said: str) -> str | None:
    """Return its gRPC address, from when it is ready on."""
    address = re.search(r"^ *gRPC +(\S+)$", said, re.MULTILINE)
    return address[1] if address is not None and "Stop it with" in said else None


if __name__ == "__main__":
    run_script(main)
