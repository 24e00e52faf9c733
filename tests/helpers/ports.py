"""Ports for programs that are told theirs before they listen."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def unlisted_port() -> int:
    """Return a free port of 127.0.0.1, where there are such one that the system gives nobody who asks for any.

    One that it has given could be another connection's by the time that a program listens on it.
    """
    lowest = int(_GIVEN_OUT.read_text().split()[0]) if _GIVEN_OUT.exists() else 32768
    kept_back = range(max(1024, lowest - 10_000), lowest)
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.choice(kept_back) if kept_back else 0))
            port: int = probe.getsockname()[1]
            return port
