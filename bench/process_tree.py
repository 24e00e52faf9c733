"""Memory of a process and all its descendants, shared pages counted once (proportional set size). Linux only.

python -m bench.process_tree PID                what it uses now, one line a process
python -m bench.process_tree -- make demo       runs the command, reports the peak of its whole tree
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.result_line import end_with_line
from bench.script import make_parser

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process."""

    pid: int
    command: str
    pss_bytes: int
    """Private pages, and of each shared page its share."""
    private_bytes: int
    """What would be free if only this process ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMemory:
    """A process and its descendants at one moment."""

    processes: tuple[ProcessMemory, ...]

    @property
    def pss_bytes(self) -> int:
        """Memory of the whole tree."""
        return sum(process.pss_bytes for process in self.processes)


@dataclass(slots=True)
class Peak:
    """The largest tree seen so far."""

    memory: TreeMemory = field(default_factory=lambda: TreeMemory(processes=()))

    def observe(self, memory: TreeMemory) -> None:
        """Keep a tree if it is larger."""
        if memory.pss_bytes > self.memory.pss_bytes:
            self.memory = memory


def measure_tree(pid: int) -> TreeMemory:
    """Return the memory of `pid` and its descendants now; those that end meanwhile are left out."""
    measured = (_measure(each) for each in find_tree(pid))
    return TreeMemory(processes=tuple(process for process in measured if process is not None))


@contextmanager
def watch_tree(pid: int, *, interval_s: float) -> Iterator[Peak]:
    """Sample the tree of `pid` in a thread until the block ends; the yielded peak is final then."""
    peak = Peak()
    done = threading.Event()

    def sample() -> None:
        while not done.wait(interval_s):
            peak.observe(measure_tree(pid))

    peak.observe(measure_tree(pid))
    thread = threading.Thread(target=sample, name="process-tree", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Let processes whose parents end, such as daemons, become children of this one meanwhile: so its tree has them."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def find_tree(root: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            parent = _parent(int(entry.name))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def main() -> None:
    """Measure a running process, or run a command and measure it."""
    parser = make_parser("bench.process_tree", __doc__)
    parser.add_argument("target", nargs="+", metavar="PID | -- COMMAND", help="a process id, or a command to run")
    parser.add_argument("--interval", type=float, default=0.25, help="seconds between samples of a command")
    args = parser.parse_args()
    if not 0 < args.interval < math.inf:
        parser.error(f"--interval is {args.interval:g}; allowed: seconds, more than 0")
    if not (_PROC / "self" / "smaps_rollup").exists():
        sys.exit("no /proc/self/smaps_rollup here; process trees are measured on Linux only")
    status = 0
    if len(args.target) == 1 and args.target[0].isdigit():
        memory = measure_tree(int(args.target[0]))
        if not memory.processes:
            sys.exit(f"no process {args.target[0]} that this user may read")
    else:
        try:
            status, memory = _run(args.target, args.interval)
        except OSError as error:
            parser.error(f"{args.target[0]} cannot be run: {error.strerror}")
    _report(memory)
    sys.exit(status)


def _run(command: list[str], interval_s: float) -> tuple[int, TreeMemory]:
    with (
        adopting_orphans(),
        subprocess.Popen(command) as process,
        watch_tree(os.getpid(), interval_s=interval_s) as peak,
    ):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command decides what an interrupt means
        status = process.wait()
    own = os.getpid()
    return status, TreeMemory(processes=tuple(each for each in peak.memory.processes if each.pid != own))


def _parent(pid: int) -> int | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])  # pid (name, which may hold anything) state ppid


def _measure(pid: int) -> ProcessMemory | None:
    folder = _PROC / str(pid)
    try:
        fields = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # ended, a zombie, or somebody else's
        return None
    kilobytes = {name: int(value.split()[0]) for name, value in fields.items()}
    return ProcessMemory(
        pid=pid,
        command=command or "?",
        pss_bytes=kilobytes["Pss"] << 10,
        private_bytes=(kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) << 10,
    )


def _report(memory: TreeMemory) -> None:
    table = Table("pid", "command", "PSS MB", "private MB", title="process tree")
    for column in table.columns[2:]:
        column.justify = "right"
    for process in sorted(memory.processes, key=lambda process: -process.pss_bytes):
        numbers = (f"{each / 1e6:.0f}" for each in (process.pss_bytes, process.private_bytes))
        table.add_row(str(process.pid), process.command[:60], *numbers)
    table.add_row("", f"{len(memory.processes)} processes", f"{memory.pss_bytes / 1e6:.0f}", "", style="bold")
    Console().print(table)
    end_with_line("process_tree", {"processes": len(memory.processes), "pss_bytes": memory.pss_bytes})


if __name__ == "__main__":
    main()
