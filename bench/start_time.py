"""How long `weft serve` takes until it is READY, and when its processes and groups have come how far.

python -m bench.start_time [MODEL] [--rounds 3]                    Ray is started too
python -m bench.start_time [MODEL] --ray-address auto              on a Ray that runs already, say of `ray start --head`
python -m bench.start_time [MODEL] --new-ray [--warm]              on a Ray of `ray start --head` for each round

With --warm each of them is made ready by `weft warm` first, whose time is told too and not part of the others. The
service takes free ports and is stopped after each round. READY is when the command says how to stop it. Times of
processes are those at which a process of that name was first seen. Beside them it is told what CPU all of this machine
used until READY, and what the host of a virtual machine gave to others meanwhile. Python's byte code is kept, as it is
by default, whatever PYTHONDONTWRITEBYTECODE says here. Linux only.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.free_ports import free_port, serve_command
from bench.machine import cpu_time
from bench.result_line import end_with_line
from bench.script import count, make_parser, run_script

_READY = "Stop it with"
_PROCESSES = {
    "Ray's head runs": "gcs_server --",
    "Ray's node runs": "raylet --raylet_socket_name",
    "controller runs": "ray::Controller",
    "router runs": "ray::RouterActor",
    "rank runs": "ray::RankActor",
}
_STATES = {"group has its place": "starting processes", "rank begins": "loading the model"}
_CPU = {"CPU used": "used by this machine", "CPU taken": "that the host gave to others"}
_INTERVAL_S = 0.01
_RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
_RAY_SETTLES_S = 12.0  # after `ray start` its processes still import
_PAUSE_S = 3.0  # Ray clears up for a moment after a command has ended; a controller keeps its name until then


def main() -> None:
    """Start the service several times."""
    parser = make_parser("bench.start_time", __doc__)
    default = str(Path.home() / ".cache/weft/models/llama-110m")
    parser.add_argument("model", nargs="?", default=default, help="as `weft serve` takes it")
    parser.add_argument("--ray-address", help="of a Ray that runs already")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--new-ray", action="store_true", help="start one for each round, and end it")
    parser.add_argument("--warm", action="store_true", help="with --new-ray: `weft warm` first")
    args = parser.parse_args()
    if args.warm and not args.new_ray:
        parser.error("--warm: allowed with --new-ray")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    rounds = [_round(args) for _ in range(args.rounds)]
    table = Table("seconds until", "median", "all", title=f"weft serve {Path(args.model).name}")
    names = rounds[0].keys() - _CPU.keys()
    for name in sorted(names, key=lambda each: median(seen[each] for seen in rounds if each in seen)):
        values = [seen[name] for seen in rounds if name in seen]
        table.add_row(name, f"{median(values):.2f}", " ".join(f"{value:.2f}" for value in values))
    console = Console()
    console.print(table)
    for name, text in _CPU.items():
        told = " ".join(f"{seen[name]:.1f}" for seen in rounds)
        console.print(f"seconds of CPU {text}: {told}", highlight=False)
    end_with_line("start_time", {"load": os.getloadavg(), "rounds": rounds})


def _round(args: argparse.Namespace) -> dict[str, float]:
    command = serve_command(args.model)
    if not args.new_ray:
        command += [] if args.ray_address is None else ["--ray-address", args.ray_address]
        seen = _start(command)
        time.sleep(_PAUSE_S)
        return seen
    with _new_ray() as address:
        seen = {}
        if args.warm:
            start_s = time.perf_counter()
            subprocess.run([*command[:3], "warm", "--ray-address", address], check=True)
            seen["weft warm, before"] = time.perf_counter() - start_s
            time.sleep(_PAUSE_S)
        return seen | _start([*command, "--ray-address", address])


@contextmanager
def _new_ray() -> Iterator[str]:
    """Yield a Ray head on loopback, ended with everything that it has started."""
    os.environ.update(_RAY_ENVIRONMENT)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        port, client_port = free_port("127.0.0.2"), free_port("127.0.0.2")
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--include-dashboard=false"]
        command += [f"--port={port}", f"--ray-client-server-port={client_port}", "--node-ip-address=127.0.0.2"]
        with subprocess.Popen([*command, f"--temp-dir={folder}"], stdout=subprocess.DEVNULL) as process:
            try:
                time.sleep(_RAY_SETTLES_S)
                yield f"127.0.0.2:{port}"
            finally:
                process.terminate()
                process.wait()
        for pid, line in _commands(_pids()).items():
            if folder in line:
                os.kill(int(pid), signal.SIGKILL)


def _start(command: list[str]) -> dict[str, float]:
    others = _pids()
    start_s, start_cpu = time.perf_counter(), _cpu()
    seen: dict[str, float] = {}
    is_ready = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        reader = threading.Thread(target=_read, args=(process, seen, start_s, is_ready))
        reader.start()
        while not is_ready.wait(_INTERVAL_S) and process.poll() is None:
            for line in _commands(_pids() - others).values():
                for name, mark in _PROCESSES.items():
                    if mark in line:
                        seen.setdefault(name, time.perf_counter() - start_s)
        seen |= {name: after - before for name, before, after in zip(_CPU, start_cpu, _cpu(), strict=True)}
        process.send_signal(signal.SIGINT)
        process.wait()
        reader.join()
    if "READY" not in seen:
        sys.exit("the service did not become READY")
    return seen


def _read(process: "subprocess.Popen[str]", seen: dict[str, float], start_s: float, is_ready: threading.Event) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        now_s = time.perf_counter() - start_s
        for name, mark in _STATES.items():
            if mark in line:
                seen.setdefault(name, now_s)
        if _READY in line:
            seen["READY"] = now_s
            is_ready.set()
        if line.startswith("Error"):
            print(line, end="", file=sys.stderr)


def _cpu() -> tuple[float, float]:
    """Return the times that `_CPU` names."""
    cpu = cpu_time()
    assert cpu is not None, "Linux tells it"
    return cpu.used_s, cpu.taken_s


def _pids() -> set[str]:
    return {name for name in os.listdir("/proc") if name.isdigit()}


def _commands(pids: set[str]) -> dict[str, str]:
    """Return the command lines of these processes."""
    commands = {}
    for pid in pids:
        try:
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
    return commands


if __name__ == "__main__":
    run_script(main)
