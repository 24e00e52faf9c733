"""Which cores a rank computes on, and who gets one when all are busy: threads that compute, before those with messages.

By default Linux lets a thread that wakes up push a running one aside. On a machine whose cores all compute, every frame
that a router or an event loop handles then stops an engine in the middle of a step, several times a token. Threads of
the class SCHED_BATCH (sched(7)) run at once where a core is idle, and else when a running thread's time is over.
"""

import os
from contextlib import suppress
from pathlib import Path

from parallel.control_groups import own_control_groups

_CPUS = Path("/sys/devices/system/cpu")


def threads_per_rank(num_ranks: int, num_cpus: float | None = None) -> int:
    """Share the cores that this process may use among the ranks of a machine, at least one thread for each.

    A core counts once, however many hyperthreads it has: they share its vector units, which one thread keeps busy, and
    every thread is one more that a step waits for.

    Args:
        num_ranks: how many compute on this machine.
        num_cpus: how many CPUs they may use together, hyperthreads counted; None: those that this process may use.
    """
    bounds = [_num_cores(), num_cpus, _cpu_limit()]
    return max(1, int(min(bound for bound in bounds if bound is not None)) // max(1, num_ranks))


def _num_cores() -> int:
    """Count the cores whose CPUs this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpu: int) -> str:
    try:
        return (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:  # a sandbox tells nothing of the machine
        return str(cpu)


def _cpu_limit() -> float | None:
    """How many CPUs' time a container or a unit is given; None: it is not limited, or nothing tells."""
    limits = [_read_limit(group / "cpu.max") for group in own_control_groups()]
    return min((limit for limit in limits if limit is not None), default=None)


def _read_limit(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # absent, or "max"
        return None


def give_way() -> None:
    """Let threads that run keep their cores when one of this process wakes up: all it has now, and those they start.

    Changes nothing where there are no such classes (macOS) or the process may not change its own.
    """
    if hasattr(os, "SCHED_BATCH"):
        for task in Path("/proc/self/task").iterdir():
            _set_class(int(task.name), os.SCHED_BATCH)


def compute_here() -> None:
    """Undo `give_way` for the calling thread and those that it starts."""
    if hasattr(os, "SCHED_OTHER"):
        _set_class(0, os.SCHED_OTHER)


def _set_class(thread: int, policy: int) -> None:
    with suppress(OSError):  # it has ended, or a sandbox forbids it
        os.sched_setscheduler(thread, policy, os.sched_param(0))
