"""How much memory the host has for this process: the machine, or the container that limits it to less."""

import os
from pathlib import Path

_MEMORY_INFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """The machine's memory, or less where a container is limited to less."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_number(_CGROUP / "memory.max")
    return installed if limit is None else min(installed, limit)


def available_bytes() -> int:
    """What can be taken without swapping, in the machine and in the container; all that there is where nothing tells.

    A container is charged for the files that its processes have read: the system drops them for who needs the memory.
    """
    available_kib = read_field(_MEMORY_INFO, "MemAvailable:")
    free = total_bytes() if available_kib is None else available_kib * 1024
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return free
    files = read_field(_CGROUP / "memory.stat", "inactive_file") or 0
    return max(0, min(free, limit - used + files))


def read_field(file: Path, name: str) -> int | None:
    """The number of the line `name 123` of a file of the system; None where it has no such line or is not there."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), None)


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
