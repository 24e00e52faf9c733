"""All targets that depend on a machine, by one command: their benchmarks run one after the other.

python -m bench.targets [--device cuda] [--only NAME,NAME] [--json FILE]
python -m bench.targets --list

Nothing else should run meanwhile. Peers are those that `python -m bench.peers.install` has installed. What benchmarks
print is passed on; one that fails is told in the table, and the others go on. After Ctrl-C the table has those that had
ended. The file of --json gets the line of each benchmark too.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from bench.load.geometries import find_model
from bench.result_line import add_json_flag, append_line, end_with_line
from bench.script import INTERRUPTED, make_parser, run_script
from parallel.device.select import select_device

_PEERS = "llama.cpp,openvino,vllm"
_JSON = '{"benchmark": '


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What was wanted and what was measured, both in the unit that the name says."""

    name: str
    wanted: float | None
    """None: nothing is."""
    measured: float | None
    """None: it could not be measured, as where every round was contended."""
    is_limit: bool = False
    """Whether it may be at most what is wanted, not at least."""

    @property
    def is_met(self) -> bool | None:
        """None where that cannot be said."""
        if self.wanted is None or self.measured is None:
            return None
        return self.measured <= self.wanted if self.is_limit else self.measured >= self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark of this package, and how its line of JSON is read."""

    name: str
    command: str
    """What follows `python -m`; `{NAME}` is the folder of the geometry of that name."""
    read: Callable[[Mapping[str, Any]], Iterable[Target]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a benchmark."""

    benchmark: str
    command: str
    duration_s: float
    targets: tuple[Target, ...]
    failure: str | None


def _read_peers(wanted: Mapping[str, float], line: Mapping[str, Any]) -> Iterator[Target]:
    for workload in dict.fromkeys(row["workload"] for row in line["rows"]):
        best = line["best_peer"].get(workload)
        name = f"{workload}, times the rate of " + ("the best peer" if best is None else best["engine"])
        yield Target(name=name, wanted=wanted.get(workload), measured=best and best["ratio"])


def _read_served_share(line: Mapping[str, Any]) -> Iterator[Target]:
    for row in line["rows"]:
        yield Target(name=f"{row['workload']}, of the rate offline", wanted=0.85, measured=row["ratios"][1])


def _read_start(wanted_s: float, line: Mapping[str, Any]) -> Iterator[Target]:
    ready_s = median(each["READY"] for each in line["rounds"])
    yield Target(name="READY, s", wanted=wanted_s, measured=ready_s, is_limit=True)


def _read_load_rate(line: Mapping[str, Any]) -> Iterator[Target]:
    disk, loaded = (median(line["gb_per_s"][name]) for name in ("disk", "load, empty page cache"))
    yield Target(name="of the disk's rate", wanted=0.8, measured=loaded / disk)


def _read_idle_time(line: Mapping[str, Any]) -> Iterator[Target]:
    for row in line["rows"]:
        yield Target(name=f"idle, ranks: {row['ranks']}, %", wanted=2, measured=100 * row["idle_share"], is_limit=True)


def _read_overlap(line: Mapping[str, Any]) -> Iterator[Target]:
    (row,) = line["rows"]
    for name in ("engine", "served"):
        yield Target(name=f"idle, {name}, %", wanted=2, measured=100 * row[f"{name}_share"], is_limit=True)


def _read_step_time(line: Mapping[str, Any]) -> Iterator[Target]:
    for row in line["times"]:
        num_seqs = row["num_seqs"]
        yield Target(name=f"{num_seqs} sequences, ms", wanted=num_seqs / 256, measured=row["total_ms"], is_limit=True)


def _read_plan_time(line: Mapping[str, Any]) -> Iterator[Target]:
    (row,) = line["groups"]
    yield Target(name="to the last of 4 ranks, us", wanted=100, measured=row["last_us"], is_limit=True)


def _read_roofline(line: Mapping[str, Any]) -> Iterator[Target]:
    for phase in line["phases"]:
        yield Target(name=f"{phase['name']}, of the limit", wanted=phase["target"], measured=phase["share"])
    (shortest, first_s), *_, (longest, last_s) = line["attention_s"].items()
    name = f"attention of {longest} tokens, times that of {shortest}"
    yield Target(name=name, wanted=line["growth_target"], measured=last_s / first_s, is_limit=True)


def _peers(name: str, flags: str, **wanted: float) -> Benchmark:
    return Benchmark(name=name, command=f"bench.peers {flags} --peers {_PEERS}", read=partial(_read_peers, wanted))


_INT8 = "--dtype int8 --weft-kv-cache-dtype int8"

ON_CPU = (
    _peers("peers-110m", "--geometry llama-110m --rounds 3", W1=1.1, W2=1.3, W3=1.4),
    _peers("peers-110m-int8", f"--geometry llama-110m {_INT8} --rounds 2", W2=1.3, W3=1.3),
    _peers("peers-0.5b", "--geometry qwen2.5-0.5b --rounds 1", W1=1.0, W2=1.1, W3=1.1),
    _peers("peers-0.5b-int8", f"--geometry qwen2.5-0.5b {_INT8} --rounds 1", W2=1.3, W3=1.3),
    Benchmark(name="served", command="bench.served_share llama-110m --rounds W1:6,W2:2,W3:4", read=_read_served_share),
    Benchmark(name="start-cold", command="bench.start_time {llama-110m}", read=partial(_read_start, 8)),
    Benchmark(
        name="start-warm", command="bench.start_time {llama-110m} --new-ray --warm", read=partial(_read_start, 2)
    ),
    Benchmark(name="start-new-ray", command="bench.start_time {llama-110m} --new-ray", read=partial(_read_start, 2)),
    Benchmark(name="load-110m", command="bench.load_rate {llama-110m}", read=_read_load_rate),
    Benchmark(name="load-0.5b", command="bench.load_rate {qwen2.5-0.5b}", read=_read_load_rate),
    Benchmark(name="idle", command="bench.idle_time --requests 256 --async auto --rounds 2", read=_read_idle_time),
    Benchmark(name="overlap", command="bench.overlap --step 5 --running 256", read=_read_overlap),
    Benchmark(name="step", command="bench.step_time --policy fcfs", read=_read_step_time),
    Benchmark(name="plan", command="bench.plan_time --ranks 4", read=_read_plan_time),
    Benchmark(name="plan-5ms", command="bench.plan_time --ranks 4 --pause-ms 5", read=_read_plan_time),
)
"""What a CPU is measured by; targets are those of a Zen 4 of two cores."""

ON_CUDA = (
    Benchmark(
        name="roofline",
        command="bench.roofline --model llama3-8b --device cuda --set max_context=4096",
        read=_read_roofline,
    ),
    Benchmark(
        name="peers-8b",
        command="bench.peers --geometry llama3-8b --device cuda --peers transformers --rounds 2",
        read=partial(_read_peers, {}),
    ),
    Benchmark(
        name="idle",
        command="bench.idle_time llama3-8b --tensor-parallel 1 --requests 256 --async auto --rounds 2",
        read=_read_idle_time,
    ),
)
"""What a GPU is measured by; targets are those of an H200."""

_BY_DEVICE = {"cpu": ON_CPU, "cuda": ON_CUDA}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks, print a table, and end with a line of JSON."""
    args = _parse(arguments)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if args.list:
        for each in args.only:
            console.print(f"{each.name:16} python -m {each.command}")
        return
    select_device(args.device)  # a benchmark would write its model first, or take a CPU
    results: list[Result] = []
    try:
        for benchmark in args.only:
            console.print(f"\n{benchmark.name}: python -m {benchmark.command}")
            results.append(run(benchmark, tell=print, file=args.json))
    except KeyboardInterrupt:
        _end(args, results, status=INTERRUPTED)
    _end(args, results, status=int(any(result.failure for result in results)))


def run(benchmark: Benchmark, *, tell: Callable[[str], object], file: Path | None = None) -> Result:
    """Run a benchmark in a process of its own; `tell` gets each line that it prints, the file the one of JSON.

    Raises KeyboardInterrupt when the process has ended after Ctrl-C, which a terminal sends to it too, and BenchError
    when the file cannot be written.
    """
    start_s = time.perf_counter()
    line = None
    variables = os.environ | {"COLUMNS": str(Console().width)}
    with subprocess.Popen(_command(benchmark), stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        try:
            for text in process.stdout:
                if not text.startswith(_JSON):
                    tell(text.rstrip())
                    continue
                line = json.loads(text)
                if file is not None:
                    append_line(text.rstrip(), file)
        except KeyboardInterrupt:
            process.communicate()
            raise
    failure = None
    if process.returncode or line is None:
        failure = f"ended with status {process.returncode}" + (" and no line of JSON" if line is None else "")
    return Result(
        benchmark=benchmark.name,
        command=benchmark.command,
        duration_s=time.perf_counter() - start_s,
        targets=() if failure else tuple(benchmark.read(line or {})),
        failure=failure,
    )


def _command(benchmark: Benchmark) -> list[str]:
    words = [str(find_model(word[1:-1])) if word.startswith("{") else word for word in shlex.split(benchmark.command)]
    return [sys.executable, "-m", *words]


def _end(args: argparse.Namespace, results: Sequence[Result], *, status: int) -> NoReturn:
    table = Table("benchmark", "minutes", "target", "wanted", "measured", "")
    for column in table.columns[3:5]:
        column.justify = "right"
    for result in results:
        lead = (result.benchmark, f"{result.duration_s / 60:.1f}")
        if result.failure:
            table.add_row(*lead, result.failure, "", "", "FAILED")
        for target in result.targets:
            table.add_row(*lead, *_cells(target))
            lead = ("", "")
    Console().print(table)
    ran = {result.benchmark for result in results}
    fields = {
        "device": args.device,
        "not_run": [each.name for each in args.only if each.name not in ran],
        "results": [asdict(result) for result in results],
    }
    end_with_line("targets", fields, file=args.json)
    sys.exit(status)


def _cells(target: Target) -> tuple[str, ...]:
    wanted = "" if target.wanted is None else ("at most " if target.is_limit else "") + f"{target.wanted:g}"
    measured = "-" if target.measured is None else f"{target.measured:.{2 if target.measured < 100 else 0}f}"
    return target.name, wanted, measured, {True: "met", False: "MISSED", None: ""}[target.is_met]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.targets", __doc__)
    parser.add_argument("--device", choices=[*_BY_DEVICE], default="cpu", help="what is measured (%(default)s)")
    parser.add_argument("--only", help="benchmarks, by the names of --list, with commas (all)")
    parser.add_argument("--list", action="store_true", help="only print the names and commands of the benchmarks")
    add_json_flag(parser)
    args = parser.parse_args(arguments)
    benchmarks = {each.name: each for each in _BY_DEVICE[args.device]}
    names = list(benchmarks) if args.only is None else args.only.split(",")
    if unknown := [name for name in names if name not in benchmarks]:
        parser.error(f"--only: {unknown[0]!r}; allowed: {', '.join(benchmarks)}")
    args.only = [benchmarks[name] for name in dict.fromkeys(names)]
    return args


if __name__ == "__main__":
    run_script(main)
