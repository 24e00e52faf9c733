"""The entry of the `weft` command: Ctrl-C ends it without a word while it is still being imported, too."""

import importlib.util
import signal
import sys

from cluster.imports import let_interrupts_end


def main() -> None:
    """Run the command line; one line tells of a package that is not here, as Ray beside a router or a client alone."""
    heard = let_interrupts_end()
    try:
        from cluster.cli import main as run

        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except ModuleNotFoundError as error:
        package = (error.name or "cluster").partition(".")[0]
        if importlib.util.find_spec(package) is not None:  # it is installed, and lacks a module that we thought it had
            raise
        sys.exit(f"Error: this command needs the Python package {package!r}, which is not installed here")
    finally:
        let_interrupts_end()  # while Python ends
