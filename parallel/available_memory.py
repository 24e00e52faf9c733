"""How much memory the host has for this process: the machine, or the container or unit that is limited to less."""

import os
from pathlib import Path

from parallel.control_groups import own_control_groups

_MEMORY_INFO = Path("/proc/meminfo")


def total_bytes() -> int:
    """The machine's memory, or less where a container is limited to less."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_read_number(group / "memory.max") for group in own_control_groups()]
    return min([installed, *(limit for limit in limits if limit is not None)])


def available_bytes() -> int:
    """What can be taken without swapping, in the machine and in the container; all that there is where nothing tells.

    A container is charged for the files that its processes have read: the system drops them for who needs the memory.
    """
    available_kib = read_field(_MEMORY_INFO, "MemAvailable:")
    free = total_bytes() if available_kib is None else available_kib * 1024
    for group in own_control_groups():
        limit, used = _read_number(group / "memory.max"), _read_number(group / "memory.current")
        if limit is not None and used is not None:
            files = read_field(group / "memory.stat", "inactive_file") or 0
            free = min(free, limit - used + files)
    return max(0, free)


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
