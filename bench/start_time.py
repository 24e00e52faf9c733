"""How long `weft serve` takes until it is READY, and when its processes and groups have come how far.

python -m bench.start_time [MODEL] [--rounds 3]                    Ray is started too
python -m bench.start_time [MODEL] --ray-address auto              on a Ray that runs already, say of `ray start --head`

The service takes free ports and is stopped after each round. READY is when the command says how to stop it. Times of
processes are those at which a process of that name was first seen. Linux only.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine

_ANY_PORTS = ("--port", "0", "--http-port", "0", "--metrics-port", "0", "--control-port", "0")
_READY = "Stop it with"
_PROCESSES = {
    "Ray's head runs": "gcs_server --",
    "Ray's node runs": "raylet --raylet_socket_name",
    "controller runs": "ray::Controller",
    "router runs": "ray::RouterActor",
    "rank runs": "ray::RankActor",
}
_STATES = {"group has its place": "starting processes", "rank begins": "loading the model"}
_INTERVAL_S = 0.01
_PAUSE_S = 3.0  # a controller keeps its name on Ray for a moment after it has ended


def main() -> None:
    """Start the service several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = str(Path.home() / ".cache/weft/models/llama-110m")
    parser.add_argument("model", nargs="?", default=default, help="as `weft serve` takes it")
    parser.add_argument("--ray-address", help="of a Ray that runs already")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    command = [sys.executable, "-m", "cluster.cli", "serve", args.model, *_ANY_PORTS]
    if args.ray_address is not None:
        command += ["--ray-address", args.ray_address]
    rounds = []
    for _ in range(args.rounds):
        rounds.append(_start(command))
        time.sleep(_PAUSE_S)
    table = Table("seconds until", "median", "all", title=f"weft serve {Path(args.model).name}")
    for name in sorted(rounds[0], key=lambda each: median(seen[each] for seen in rounds if each in seen)):
        values = [seen[name] for seen in rounds if name in seen]
        table.add_row(name, f"{median(values):.2f}", " ".join(f"{value:.2f}" for value in values))
    Console().print(table)
    print(json.dumps({"machine": describe_machine(), "load": os.getloadavg(), "rounds": rounds}))


def _start(command: list[str]) -> dict[str, float]:
    start_s = time.perf_counter()
    seen: dict[str, float] = {}
    is_ready = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        reader = threading.Thread(target=_read, args=(process, seen, start_s, is_ready))
        reader.start()
        before = _commands().keys()
        while not is_ready.wait(_INTERVAL_S) and process.poll() is None:
            for pid, line in _commands().items():
                for name, mark in _PROCESSES.items():
                    if pid not in before and mark in line:
                        seen.setdefault(name, time.perf_counter() - start_s)
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


def _commands() -> dict[str, str]:
    """The command lines of all processes, by pid."""
    commands = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                commands[entry.name] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended
                continue
    return commands


if __name__ == "__main__":
    main()
