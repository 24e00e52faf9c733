"""What one router carries, and what happens beyond: `python -m bench.router_load`.

python -m bench.router_load [--running 64,256,512,1024] [--front grpc|http]

Replicas that compute nothing (replicas.py) give each request a token a step, 10 ms, to one router process, which gives
it to a client that costs next to nothing (streams.py): the router's CPU is what can run out. While so many streams run,
another request comes ten times a second, for one token: its TTFT holds a step, and half of one on average until that
begins. `late`: what a message had waited for since the step of its last token. A message may hold several tokens: what
is too much for the router is to be merged, so that tokens stay as fresh and newcomers are served as soon. Linux only.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.errors import BenchError
from bench.load.statistics import percentile
from bench.paused_service import PausedService, start_service
from bench.result_line import add_json_flag, end_with_line
from bench.router_load.streams import GrpcStreams, HttpStreams, Message, Streams
from bench.script import count, counts, length, make_parser, run_script

_MODEL = Path(__file__).parents[2] / "cluster/default_model/weights"
_STREAMS_A_REPLICA = 256
_PROBE_S = 0.1
_LOOK_S = 0.01
_START_TIMEOUT_S = 180.0
_SETTLE_S = 1.0
_MORE_THAN_COME = 1 << 19
_PORTS = {"grpc": r"^gRPC (\S+):(\d+)", "http": r"OpenAI http://(\S+):(\d+)/"}


@dataclass(slots=True)
class _Seen:
    """What came in a time."""

    num_messages: int = 0
    num_tokens: int = 0
    late_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One load."""

    running: int
    replicas: int
    tokens_per_s: float
    messages_per_s: float
    cores: float
    """CPU that the router took."""
    ttft_ms: tuple[float, float]
    """p50 and p99, as `late_ms`."""
    late_ms: tuple[float, float]


def main() -> None:
    """Measure each load."""
    parser = make_parser("bench.router_load", __doc__)
    parser.add_argument("--running", type=counts, default=[64, 256, 512, 1024], help="streams (64,256,512,1024)")
    parser.add_argument("--front", choices=_PORTS, default="grpc", help="of the router (%(default)s)")
    parser.add_argument("--step", type=length, default=10.0, help="milliseconds (%(default)g)")
    parser.add_argument("--seconds", type=count, default=8, help="that are measured (%(default)s)")
    add_json_flag(parser)
    args = parser.parse_args()
    rows = [_measure(running, args) for running in args.running]
    table = Table(title=f"one router, {args.front}, a step of {args.step:g} ms", caption="TTFT, late: p50, p99")
    for name in ("streams", "tokens/s", "a message", "CPU, cores", "µs a token", "TTFT, ms", "late, ms"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    Console().print(table)
    fields = {"front": args.front, "step_ms": args.step, "rows": [asdict(row) for row in rows]}
    end_with_line("router_load", fields, file=args.json)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.running),
        f"{row.tokens_per_s:,.0f}",
        f"{row.tokens_per_s / row.messages_per_s:.1f}",
        f"{row.cores:.2f}",
        f"{row.cores / row.tokens_per_s * 1e6:.0f}",
        "{:.0f}, {:.0f}".format(*row.ttft_ms),
        "{:.0f}, {:.0f}".format(*row.late_ms),
    )


def _measure(running: int, args: argparse.Namespace) -> Row:
    replicas = -(-running // _STREAMS_A_REPLICA)
    with _router(replicas, args.step, running) as (router, said):
        found = re.search(_PORTS[args.front], said, re.MULTILINE)
        assert found is not None
        host, port = found[1], int(found[2])
        with closing(GrpcStreams(host, port) if args.front == "grpc" else HttpStreams(host, port)) as streams:
            _start(streams, running)
            seen, begin_s, begin_cpu_s = _Seen(), time.monotonic(), _cpu_s(router)
            _watch(streams, seen, begin_s + args.seconds)
            wall_s, cpu_s = time.monotonic() - begin_s, _cpu_s(router) - begin_cpu_s
    return Row(
        running=running,
        replicas=replicas,
        tokens_per_s=seen.num_tokens / wall_s,
        messages_per_s=seen.num_messages / wall_s,
        cores=cpu_s / wall_s,
        ttft_ms=_two(seen.ttft_s),
        late_ms=_two(seen.late_s),
    )


@contextmanager
def _router(num_replicas: int, step_ms: float, running: int) -> Iterator[tuple[int, str]]:
    """A router with its replicas: its process, and where it listens."""
    command = [sys.executable, "-m", "bench.router_load.replicas", str(num_replicas), f"{step_ms:g}"]
    with start_service(command, _first_line, timeout_s=_START_TIMEOUT_S) as replicas:
        command = [sys.executable, "-m", "router", "--port", "0", "--http-port", "0", "--metrics-port", "-1"]
        command += ["--model", f"stand-in={_MODEL},{replicas.address.replace(' ', ',')}"]
        command += ["--settings", f'{{"admission": {{"max_in_flight": {2 * running + 64}}}}}', "--log-level", "error"]
        with (
            start_service(command, _first_line, timeout_s=_START_TIMEOUT_S) as router,
            replicas.awake(),
            router.awake(),
        ):
            yield _pid(router), router.address


def _first_line(said: str) -> str | None:
    line, end, _ = said.partition("\n")
    return line if end else None


def _pid(service: PausedService) -> int:
    (pid,) = service.pids
    return pid


def _start(streams: Streams, running: int) -> None:
    """Begin all streams, and return when each has had a token, and the storm of them is over."""
    silent = {streams.start(_MORE_THAN_COME) for _ in range(running)}
    due_s = time.monotonic() + _START_TIMEOUT_S
    while silent:
        silent.difference_update(message.stream for message in streams.receive(_LOOK_S))
        if time.monotonic() > due_s:
            raise BenchError(f"{len(silent)} of {running} streams had no token within {_START_TIMEOUT_S:g} s")
    _watch(streams, _Seen(), time.monotonic() + _SETTLE_S)


def _watch(streams: Streams, seen: _Seen, end_s: float) -> None:
    probes: dict[int, float] = {}  # by stream: when each was sent
    probe_s = time.monotonic()
    while (now_s := time.monotonic()) < end_s:
        if now_s >= probe_s:
            probe_s += _PROBE_S
            probes[streams.start(1)] = now_s
        for message in streams.receive(_LOOK_S):
            _note(message, probes, seen)
    seen.ttft_s += [end_s - since_s for since_s in probes.values()]  # at least that


def _note(message: Message, probes: dict[int, float], seen: _Seen) -> None:
    now_s = time.monotonic()
    sent_s = probes.pop(message.stream, None)
    if sent_s is not None:
        seen.ttft_s.append(now_s - sent_s)
    stamps = message.text.split()
    seen.num_messages += 1
    seen.num_tokens += len(stamps)
    seen.late_s.append(now_s - float(stamps[-1]))


def _two(values_s: list[float]) -> tuple[float, float]:
    found = sorted(values_s)
    return percentile(found, 0.5) * 1e3, percentile(found, 0.99) * 1e3


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    run_script(main)
