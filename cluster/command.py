"""The entry of the `weft` command: Ctrl-C ends it without a word while it is still being imported, too."""

import signal

from cluster.imports import let_interrupts_end


def main() -> None:
    """Run the command line."""
    heard = let_interrupts_end()
    from cluster.cli import main as run

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    finally:
        let_interrupts_end()  # while Python ends
