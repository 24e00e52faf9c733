"""Weft's service beside vLLM's server: the same loads over OpenAI-compatible HTTP, in turns.

python -m bench.peers.served MODEL --rate 1,2,4 --concurrency 1,8,32 --rounds 3

MODEL is a folder or a hub id whose tokenizer knows all token ids of the model, so that every token shows as text. Both
services have all cores of this machine, and so has the load generator; whoever is not measured stands still (SIGSTOP).
Prompts are random and new in each round. Ends with one line of JSON. Linux only.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.load import load_tokenizer

from bench.errors import BenchConfigError, BenchError
from bench.free_ports import free_port, serve_command
from bench.load.arrivals import Load
from bench.load.datasets import DatasetOptions
from bench.load.flag_groups import LoadFlags
from bench.load.flags import parse_lengths, parse_loads
from bench.load.geometries import find_model
from bench.load.report import load_name
from bench.load.sender import Protocol, Target
from bench.load.serve import measure
from bench.load.serve_values import ServeOptions
from bench.load.statistics import Distribution, Summary, describe_errors
from bench.paused_service import PausedService, start_service
from bench.peers.catalog import WEFT, Start, default_venvs, find_start
from bench.plain_json import to_plain
from bench.result_line import add_json_flag, end_with_line
from bench.script import INTERRUPTED, count, length, make_parser, run_script
from workers.cores import give_way

_VLLM = "vllm"
_READY_TIMEOUT_S = 900.0
"""vLLM compiles when it first sees a model."""
_NUM_WARMUP = 16
_MIN_KNOWN = 0.9
"""Share of the model's tokens that its tokenizer must know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both are asked."""

    model: Path
    vocab_size: int
    """Token ids of the prompts are below it."""
    dtype: str
    loads: tuple[Load, ...]
    dataset: DatasetOptions
    duration_s: float
    rounds: int
    max_num_seqs: int
    vllm: Start
    """Of its environment."""

    @property
    def max_context(self) -> int:
        """The longest prompt with its output."""
        return self.dataset.inputs.high + self.dataset.outputs.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One service under one load, in one round."""

    service: str
    load: str
    summary: Summary


class Times(NamedTuple):
    """Seconds, over the requests of a load."""

    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One service under one load: medians over the rounds."""

    load: str
    service: str
    output_rate: float
    """Output tokens a second."""
    ttft: Times | None
    """None, as below: no request was answered."""
    tpot: Times | None
    weft_ratio: float | None
    """Weft's output tokens a second under this load over these; None: one of them gave none."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and end with a line of JSON."""
    args = _parse(arguments)
    options = _options(args)
    console = Console(stderr=True)
    measured: list[Measured] = []
    broke_off: KeyboardInterrupt | BenchError | None = None
    try:
        measure_both(options, measured, tell=lambda line: console.print(line, highlight=False, markup=False))
    except (KeyboardInterrupt, BenchError) as error:
        if not measured:
            raise
        broke_off = error
    rows = summarize(measured)
    _print(Console(), rows, title=f"{args.model}, {options.dtype}, over HTTP")
    fields = {
        "settings": {name: str(value) for name, value in vars(args).items()},
        "was_interrupted": broke_off is not None,
        "rows": to_plain(rows),
        "measured": to_plain(measured),
    }
    end_with_line("peers.served", fields, file=args.json)
    if isinstance(broke_off, BenchError):
        raise broke_off
    if broke_off is not None:
        sys.exit(INTERRUPTED)


def measure_both(options: Options, measured: list[Measured], *, tell: Callable[[str], None]) -> None:
    """Start both and let them take turns; every second round the other one is first. What is measured is added.

    Raises BenchError when one does not come up, or answers no request.
    """
    with ExitStack() as stack:
        services: dict[str, PausedService] = {}
        for name, start in {WEFT: _start_weft, _VLLM: _start_vllm}.items():
            services[name] = stack.enter_context(start(options))
            tell(f"{name} is ready")
        give_way()  # to the services on the same cores
        for service in services.values():
            _ask(service, options, options.loads[-1], seed=-1, num_warmup=_NUM_WARMUP)
        for index in range(options.rounds):
            for load in options.loads:
                for name in sorted(services, reverse=bool(index % 2)):
                    summary = _ask(services[name], options, load, seed=index)
                    measured.append(Measured(service=name, load=load_name(load), summary=summary))
                    tell(f"round {index + 1}, {load_name(load)}, {name}: {summary.output_rate:.1f} tokens/s")
                    if summary.errors:
                        tell(f"  {describe_errors(summary)}")


def summarize(measured: Sequence[Measured]) -> list[Row]:
    """Return a row for each load and service."""
    found: dict[tuple[str, str], list[Summary]] = {}
    for each in measured:
        found.setdefault((each.load, each.service), []).append(each.summary)
    rates = {key: statistics.median(each.output_rate for each in summaries) for key, summaries in found.items()}
    return [
        Row(
            load=load,
            service=service,
            output_rate=rates[load, service],
            ttft=_typical(each.ttft_s for each in summaries),
            tpot=_typical(each.tpot_s for each in summaries),
            weft_ratio=_ratio(rates.get((load, WEFT)), rates[load, service]),
        )
        for (load, service), summaries in found.items()
    ]


def _ratio(ours: float | None, theirs: float) -> float | None:
    return ours / theirs if ours and theirs else None


def _typical(rounds: Iterable[Distribution | None]) -> Times | None:
    known = [each for each in rounds if each is not None]
    if not known:
        return None
    return Times(statistics.median(each.p50 for each in known), statistics.median(each.p99 for each in known))


def _ask(service: PausedService, options: Options, load: Load, *, seed: int, num_warmup: int = 0) -> Summary:
    with service.awake():
        asked = ServeOptions(
            target=Target(protocol=Protocol.HTTP, address=service.address),
            loads=(load,),
            dataset=options.dataset,
            num_requests=None,
            duration_s=options.duration_s,
            num_warmup=num_warmup,
            vocab_size=options.vocab_size,
            targets=None,
            seed=seed,
        )
        (point,) = asyncio.run(measure(asked)).points
    return point.summary


def _start_weft(options: Options) -> AbstractContextManager[PausedService]:
    command = [*serve_command(options.model), "--dtype", options.dtype]
    command += ["--max-num-seqs", str(options.max_num_seqs), "--max-context", str(options.max_context)]
    return start_service(command, _find_http, timeout_s=_READY_TIMEOUT_S)


def _find_http(said: str) -> str | None:
    """Return where `weft serve` answers, once it is ready."""
    address = re.search(r"^ *OpenAI HTTP +(http://\S+)$", said, re.MULTILINE)
    return address[1] if address is not None and "Stop it with" in said else None


def _start_vllm(options: Options) -> AbstractContextManager[PausedService]:
    cores = sorted(os.sched_getaffinity(0))
    address = f"127.0.0.1:{free_port()}"
    command = [options.vllm.command[0], "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
    command += ["--dtype", options.dtype, "--enable-prefix-caching", "--max-num-seqs", str(options.max_num_seqs)]
    command += ["--max-model-len", str(options.max_context), "--host", "127.0.0.1", "--port", address.split(":")[1]]
    environment = {
        **options.vllm.environment,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # as it is for a server by default
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # by default it leaves one core to the server alone
    }
    url = f"http://{address}"
    return start_service(
        command, lambda said: url if _answers(url) else None, timeout_s=_READY_TIMEOUT_S, environment=environment
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return True
    except OSError:
        return False


def _vocab_size(model: Path) -> int:
    """Return the model's number of tokens. Raises BenchConfigError where its tokenizer does not know them all."""
    config = json.loads((model / "config.json").read_text())
    wanted: int = config["vocab_size"]
    try:
        known = load_tokenizer(model, encodes=False).tokenizer.get_vocab_size()
    except TokenizerError as error:
        raise BenchConfigError(f"the tokenizer of {model}: {error}") from error
    if known < _MIN_KNOWN * wanted:
        raise BenchConfigError(
            f"the tokenizer of {model} has {known} of {wanted} tokens: most answers would have no text to be seen; "
            "allowed: a tokenizer of the model's size, as `weft make-model --tokenizer` copies one"
        )
    return min(known, wanted)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.peers.served", __doc__)
    parser.add_argument("model", help="as `weft serve` takes it")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="(%(default)s)")
    parser.add_argument("--rate", help="arrivals a second, at random times, with commas between")
    parser.add_argument("--concurrency", help="requests that run at any time, with commas between")
    parser.add_argument("--input-tokens", default="32-256", help="a number or a range (%(default)s)")
    parser.add_argument("--output-tokens", default="16-128", help="a number or a range (%(default)s)")
    parser.add_argument("--duration", type=length, default=12.0, help="seconds of each load (%(default)g)")
    parser.add_argument("--rounds", type=count, default=3, help="(%(default)s)")
    parser.add_argument("--max-num-seqs", type=count, default=64, help="requests that run at once (%(default)s)")
    parser.add_argument("--venvs", type=Path, default=default_venvs(), help="where vLLM's is (%(default)s)")
    add_json_flag(parser)
    args = parser.parse_args(arguments)
    if not args.duration:
        parser.error("--duration is 0; allowed: seconds, more than 0")
    return args


def _options(args: argparse.Namespace) -> Options:
    loads: list[Load] = []
    if args.rate is not None:
        loads += parse_loads(LoadFlags(rate=args.rate))
    if args.concurrency is not None or not loads:
        loads += parse_loads(LoadFlags(concurrency=args.concurrency))
    model = find_model(args.model)
    return Options(
        model=model,
        vocab_size=_vocab_size(model),
        dtype=args.dtype,
        loads=tuple(loads),
        dataset=DatasetOptions(
            inputs=parse_lengths("--input-tokens", args.input_tokens),
            outputs=parse_lengths("--output-tokens", args.output_tokens),
        ),
        duration_s=args.duration,
        rounds=args.rounds,
        max_num_seqs=args.max_num_seqs,
        vllm=find_start(
            _VLLM, venvs=args.venvs.expanduser().absolute(), num_threads=len(os.sched_getaffinity(0)), device="cpu"
        ),
    )


def _print(console: Console, rows: Sequence[Row], *, title: str) -> None:
    columns = ("load", "service", "tokens/s", "ratio", "TTFT ms\np50, p99", "TPOT ms\np50, p99")
    table = Table(*columns, title=title, caption="ratio: Weft's tokens/s over it")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        ratio = "-" if row.weft_ratio is None else f"{row.weft_ratio:.2f}"
        table.add_row(row.load, row.service, f"{row.output_rate:.1f}", ratio, _ms(row.ttft), _ms(row.tpot))
    console.print(table)


def _ms(times: Times | None) -> str:
    return "-" if times is None else ", ".join(f"{each * 1000:.1f}" for each in times)


if __name__ == "__main__":
    run_script(main)
