"""How the processes of a cluster log: one line an event, on stderr, where Ray or the shell collects it."""

import logging

LEVELS = ("debug", "info", "warning", "error")
"""What --log-level takes."""


def configure_logging(level: str) -> None:
    """Send the records of this process to stderr, from `level` on."""
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(name)s: %(message)s", force=True)
    for package in ("cluster", "workers", "parallel", "router"):
        logging.getLogger(package).setLevel(level.upper())
