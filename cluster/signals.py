"""Signals that end a process: in a Ray actor with an event loop, and in the command that serves.

Ray's own handler of SIGTERM waits for the running calls of an actor, and ours last as long as the actor does. Python
lets only the main thread install another one, and in an asyncio actor that thread belongs to Ray. What faulthandler
registers is installed from any thread: it writes a traceback to a file, which here is a pipe that the event loop reads.
"""

import asyncio
import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | int | None
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ONE_MOMENT_S = 0.5
"""Signals of one moment are one: a key pressed twice, or what reaches a process both by itself and with its group."""

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


class Interrupts:
    """Signals as KeyboardInterrupts: one for those of a moment, so that who begins to end things then is let be."""

    def __init__(self) -> None:
        self._last_s = -math.inf
        self._is_unseen = False

    def check(self) -> None:
        """Raise KeyboardInterrupt where the last one was lost: what is raised in a weak reference's callback is."""
        if self._is_unseen:
            raise KeyboardInterrupt

    def note_seen(self) -> None:
        """Say that the KeyboardInterrupt was caught: `check` raises no other until a signal comes again."""
        self._is_unseen = False

    def raise_one(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now_s = time.monotonic()
        if now_s - self._last_s >= _ONE_MOMENT_S:
            self._last_s, self._is_unseen = now_s, True
            raise KeyboardInterrupt


@contextmanager
def signals_as_interrupts() -> Iterator[Interrupts]:
    """Turn SIGINT, SIGTERM, and SIGHUP (a terminal that is closed) into KeyboardInterrupt; SIGHUP not under nohup."""
    interrupts = Interrupts()
    with _handlers(interrupts.raise_one):
        yield interrupts


@contextmanager
def deaf_to_signals() -> Iterator[None]:
    """Let nobody interrupt what ends processes: those that it has not come to would stay."""
    with _handlers(signal.SIG_IGN):
        yield


@contextmanager
def signals_wait() -> Iterator[None]:
    """Handle a signal that comes meanwhile when this is over; one that comes again a moment later, at once."""
    own = {number: handler for number in _ENDING if callable(handler := signal.getsignal(number))}
    came: tuple[signal.Signals, float] | None = None

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal came
        now_s = time.monotonic()
        if came is None:
            came = signal.Signals(number), now_s
        elif now_s - came[1] >= _ONE_MOMENT_S:
            own[signal.Signals(number)](number, frame)

    _set(dict.fromkeys(own, wait))
    try:
        yield
    finally:
        _set(own)
        if came is not None:
            own[came[0]](came[0], None)


@contextmanager
def _handlers(handler: _Handler) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _ENDING}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    _set(dict.fromkeys(before, handler))
    try:
        yield
    finally:
        _set(before)


def _set(handlers: Mapping[signal.Signals, _Handler]) -> None:
    if threading.current_thread() is threading.main_thread():  # no other may
        for number, handler in handlers.items():
            if handler is not None:  # not set from Python
                signal.signal(number, handler)
