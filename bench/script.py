"""What the scripts here have in common on their command lines: a parser, numbers, GPUs, and errors in one line."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence

from bench.errors import BenchConfigError
from cluster.errors import ClusterConfigError, ClusterError
from parallel.errors import ParallelError
from workers.errors import EngineError

INTERRUPTED = 130
"""The exit status after an interrupt, as a shell has it for SIGINT."""


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script, which is run by `python -m`."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def count(text: str) -> int:
    """Read a whole number of at least 1, for argparse."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number, at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Read numbers as `count` does, with commas between."""
    return [count(part) for part in text.split(",")]


def length(text: str) -> float:
    """Read a finite number of at least 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number, at least 0")
    return value


def lengths(text: str) -> list[float]:
    """Read numbers as `length` does, with commas between."""
    return [length(part) for part in text.split(",")]


def check_gpus(flag: str, ranks: Sequence[int], num_gpus: int) -> None:
    """Raises BenchConfigError for a group with more ranks than GPUs: NCCL gives no two ranks the same."""
    if max(ranks) > num_gpus:
        raise BenchConfigError(
            f"{flag} is {','.join(map(str, ranks))}, and each rank needs a GPU of its own; "
            f"this process sees {num_gpus}; allowed: fewer ranks"
        )


def run_script(main: Callable[[], object]) -> None:
    """Run a script; its error is told in one line, and the exit status is that of the `weft` command."""
    try:
        main()
    except ClusterConfigError as error:
        _fail(error, 2)
    except (ClusterError, ParallelError, EngineError) as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _fail(error: Exception, status: int) -> None:
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(status)
