"""How the processes of a cluster log: one line an event, on stderr, where Ray or the shell collects it."""

import logging
import os

LEVELS = ("debug", "info", "warning", "error")
"""The levels that --log-level takes."""


def configure_logging(level: str) -> None:
    """Send the records of this process to stderr, from `level` on."""
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(name)s: %(message)s", force=True)
    for package in ("cluster", "workers", "parallel", "router"):
        logging.getLogger(package).setLevel(level.upper())


def own_log() -> str:
    """Return the file that stderr of this process goes to; empty when it is none."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""
