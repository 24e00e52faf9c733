"""Who gets a core when all are busy: the threads that compute, before those that carry messages.

By default Linux lets a thread that wakes up push a running one aside. On a machine whose cores all compute, every frame
that a router or an event loop handles then stops an engine in the middle of a step, several times a token. Threads of
the class SCHED_BATCH (sched(7)) run at once where a core is idle, and else when a running thread's time is over.
"""

import os
from contextlib import suppress
from pathlib import Path


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
