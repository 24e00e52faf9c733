"""The entry of the `weft` command: Ctrl-C ends it without a word while it is still being imported, too."""

import signal


def main() -> None:
    """Run the command line."""
    hears_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not with `nohup` or `&`
    if hears_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cluster.cli import main as run

    if hears_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
