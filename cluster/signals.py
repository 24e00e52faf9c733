"""SIGTERM in a Ray actor with an event loop.

Ray's own handler waits for the running calls of an actor, and ours last as long as the actor does. Python lets only the
main thread install another one, and in an asyncio actor that thread belongs to Ray. What faulthandler registers is
installed from any thread: it writes a traceback to a file, which here is a pipe that the event loop reads.
"""

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable

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
