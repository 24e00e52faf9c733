"""Loggers that are kept quiet for a while: they tell each event once, and a simulation has thousands."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_errors(*names: str) -> Iterator[None]:
    """Let the loggers of these names tell errors only, until the end of the block."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
