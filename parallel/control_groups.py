"""The control groups of Linux, of version 2, whose limits hold for this process: a container's, a systemd unit's."""

import os
from contextlib import suppress
from pathlib import Path

_MOUNT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def own_control_groups() -> list[Path]:
    """Folders of the group that this process is in and of all around it, as far as it sees them; each may limit it.

    A container sees its own as the outermost; a unit or a batch job is in one within those of the machine.
    """
    own = ""
    with suppress(OSError):
        lines = map(os.fsdecode, _OWN.read_bytes().splitlines())
        own = next((line for line in lines if line.startswith("0::")), "").removeprefix("0::")
    names = [name for name in own.split("/") if name]
    return [_MOUNT.joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def refused_processes() -> str:
    """Say which of these groups has refused processes or threads, and what it allows; empty: none has."""
    for group in own_control_groups():
        with suppress(OSError):
            limit, events = (group / "pids.max").read_text().strip(), (group / "pids.events").read_text().split()
            if "max" in events[:-1] and events[events.index("max") + 1] != "0":
                return f"{group} allows {limit} processes and threads (pids.max), and has refused more"
    return ""
