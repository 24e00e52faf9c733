"""Signals that end a process: in a Ray actor with an event loop, and in the command that serves.

Ray's own handler of SIGTERM waits for the running calls of an actor, and ours last as long as the actor does. Python
lets only the main thread install another one, and in an asyncio actor that thread belongs to Ray. What faulthandler
registers is installed from any thread: it writes a traceback to a file, which here is a pipe that the event loop reads.
"""

import asyncio
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_PIPES: list[int] = []  # the handler writes for as long as the process lives


def on_sigterm(callback: Callable[[], None]) -> None:
    """Call `callback` in the running event loop at the first SIGTERM; the process goes on. To be called once."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    _PIPES.extend((reader, writer))
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        loop.remove_reader(reader)
        callback()

    loop.add_reader(reader, on_readable)
    faulthandler.register(signal.SIGTERM, file=writer, all_threads=False, chain=False)


@contextmanager
def signals_as_interrupts() -> Iterator[Callable[[], None]]:
    """Turn SIGTERM and SIGINT into KeyboardInterrupt; yields what sets this up again after Ray has set its own."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def arm() -> None:
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    arm()
    try:
        yield arm
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
