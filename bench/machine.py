"""What a measurement ran on, and whether it had the machine to itself."""

import os
import platform
import resource
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PROC_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How long something took, and how busy other processes were meanwhile."""

    wall_s: float
    others_cores: float | None
    """Cores that other processes kept busy on average; None where the system does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """CPU time of all cores since boot, in seconds."""

    used_s: float
    """Time that this machine's processes and its kernel used."""
    taken_s: float
    """Time in which there was work, and the host of a virtual machine gave the core to others."""


class Stopwatch:
    """Measures from its creation to `stop`."""

    def __init__(self) -> None:
        self._busy_s = _busy_seconds()
        self._own_s = _own_seconds()
        self._start_s = time.perf_counter()

    def stop(self) -> Span:
        """Return the time since creation."""
        wall_s = time.perf_counter() - self._start_s
        busy_s = _busy_seconds()
        if busy_s is None or self._busy_s is None:
            return Span(wall_s=wall_s, others_cores=None)
        others_s = (busy_s - self._busy_s) - (_own_seconds() - self._own_s)
        return Span(wall_s=wall_s, others_cores=max(0.0, others_s / wall_s))


def describe_machine() -> dict[str, Any]:
    """Return hardware, versions and commit, for the line of JSON that ends a benchmark. Imports no torch."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "weft": _version(),
        "commit": _commit(),
    }


def describe_torch() -> dict[str, Any]:
    """Return what torch computes with, in this process."""
    import torch  # takes seconds, and a load generator does without

    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def cpu_time() -> CpuTime | None:
    """Return the CPU time until now; None where the system does not tell."""
    try:
        first = _PROC_STAT.read_text().split("\n", 1)[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in first.split()[1:9])
    ticks = os.sysconf("SC_CLK_TCK")
    return CpuTime(used_s=(user + nice + system + irq + softirq) / ticks, taken_s=steal / ticks)


def _busy_seconds() -> float | None:
    """Return the time in which cores were busy since boot, for whomever."""
    cpu = cpu_time()
    return None if cpu is None else cpu.used_s + cpu.taken_s


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version() -> str | None:
    try:
        return version("weft")
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout that this file is tracked in; None where it was installed."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    return done.stdout.strip()
