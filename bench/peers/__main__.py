"""Weft's engine beside other engines: the same prompts, in turns, one process at a time.

python -m bench.peers --geometry llama-110m --dtype bfloat16 --peers transformers,llama.cpp,openvino,vllm --rounds 5

Each engine runs in an environment of its own (`python -m bench.peers.install PEER` makes it). Rounds in which another
process was busy are marked and do not count. Ends with one line of JSON.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.errors import BenchConfigError
from bench.load.geometries import find_model
from bench.load.workloads import DEFAULT_WORKLOADS, WORKLOADS
from bench.peers.catalog import PEERS, WEFT, check_peers, default_venvs
from bench.peers.comparison import SMALL_GAP
from bench.peers.measure import Options, measure
from bench.peers.report import make_report, print_report
from bench.peers.worker import Sampling
from bench.result_line import add_json_flag, end_with_line
from bench.script import INTERRUPTED, make_parser, run_script
from workers.errors import InvalidRequestError
from workers.request import SamplingParams


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, and end with a line of JSON."""
    args = _parse(arguments)
    console = Console(stderr=True)
    options = _options(args)
    outcome = measure(options, tell=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))
    print_report(Console(), outcome)
    end_with_line("peers", make_report(options, outcome), file=args.json)
    if outcome.failure is not None:
        raise outcome.failure
    if outcome.was_interrupted:
        sys.exit(INTERRUPTED)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.peers", __doc__)
    peers = [name for name in PEERS if name != WEFT]
    parser.add_argument(
        "--geometry",
        default="llama-110m",
        help="llama-110m, qwen2.5-0.5b, qwen3-moe-0.5b, llama3-8b, or a model's folder",
    )
    parser.add_argument("--dtype", choices=list(SMALL_GAP), default="bfloat16", help="what all engines compute in")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where all engines compute (%(default)s)"
    )
    parser.add_argument(
        "--weft-kv-cache-dtype", choices=["auto", "int8"], default="auto", help="keys and values of Weft (%(default)s)"
    )
    parser.add_argument("--peers", default=",".join(peers), help=f"engines, of {', '.join(peers)} (all)")
    parser.add_argument(
        "--workloads", default=",".join(DEFAULT_WORKLOADS), help=f"of {', '.join(WORKLOADS)} (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that is not (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most probable tokens (%(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="where tokens are drawn; 0: off (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="where tokens are drawn; 1: off (%(default)s)")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="1: off (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads of each engine (the cores of this process)")
    parser.add_argument("--venvs", type=Path, default=default_venvs(), help="where the environments are (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the prompts; each round has the next (%(default)s)"
    )
    parser.add_argument("--settle", type=float, default=0.5, help="seconds between two runs (%(default)s)")
    add_json_flag(parser)
    return parser.parse_args(arguments)


def _options(args: argparse.Namespace) -> Options:
    workloads = _names(args.workloads)
    unknown = [name for name in workloads if name not in WORKLOADS]
    if unknown or not workloads:
        raise BenchConfigError(f"--workloads is {args.workloads!r}; allowed: {', '.join(WORKLOADS)}")
    peers = _names(args.peers)
    check_peers(peers)
    if not 0 <= args.settle < math.inf:
        raise BenchConfigError(f"--settle is {args.settle:g}; allowed: seconds, at least 0")
    if args.rounds < 1:
        raise BenchConfigError(f"--rounds is {args.rounds}; allowed: at least 1")
    num_threads = len(os.sched_getaffinity(0)) if args.threads is None else args.threads
    if num_threads < 1:
        raise BenchConfigError(f"--threads is {num_threads}; allowed: at least 1")
    return Options(
        model=find_model(args.geometry),
        dtype=args.dtype,
        peers=peers,
        workloads=workloads,
        rounds=args.rounds,
        num_threads=num_threads,
        venvs=args.venvs.expanduser().absolute(),
        seed=args.seed,
        weft_kv_cache_dtype=args.weft_kv_cache_dtype,
        device=args.device,
        sampling=_sampling(args),
        settle_s=args.settle,
    )


def _sampling(args: argparse.Namespace) -> Sampling:
    sampling = Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, repetition_penalty=args.repetition_penalty
    )
    try:
        SamplingParams(**asdict(sampling))
    except InvalidRequestError as error:
        raise BenchConfigError(str(error)) from error
    return sampling


def _names(given: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))


if __name__ == "__main__":
    run_script(main)
