"""Services on ports that nobody has, as benchmarks start them."""

import socket
import sys
from pathlib import Path

_ANY_PORTS = ("--port", "0", "--http-port", "0", "--metrics-port", "0", "--control-port", "0")


def serve_command(model: str | Path) -> list[str]:
    """Return the command of a `weft serve` of its own, on free ports."""
    return [sys.executable, "-m", "cluster.cli", "serve", str(model), *_ANY_PORTS]


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this address that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
