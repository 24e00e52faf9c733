"""A service of one's own, all of whose processes stand still (SIGSTOP) while it is not measured. Linux only."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.errors import BenchError
from bench.process_tree import adopting_orphans, find_tree

_END_TIMEOUT_S = 30.0
_SETTLE_S = 0.3
"""Pause after processes were stopped for a while: their timers have much to do."""
_LOOK_S = 0.1
_LOG_TAIL = 2000
"""Characters of the log of a service that did not become ready."""


@dataclass(frozen=True, slots=True)
class PausedService:
    """A service that is ready, and stands still."""

    address: str
    pids: tuple[int, ...]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let its processes run for the length of the block."""
        self._send(signal.SIGCONT)
        try:
            time.sleep(_SETTLE_S)
            yield
        finally:
            self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def start_service(
    command: Sequence[str],
    find_address: Callable[[str], str | None],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[PausedService]:
    """Start a service, wait until it is ready, and end it with the block.

    Args:
        command: what starts it; it ends by SIGINT.
        find_address: from what it has printed to the address that it answers at; None while it is not ready.
        timeout_s: limit of its start.
        environment: variables besides those of this process.

    Raises:
        BenchError: it ended, or was not ready in time.
    """
    before = set(find_tree(os.getpid()))
    with (
        adopting_orphans(),
        tempfile.NamedTemporaryFile("r") as log,
        subprocess.Popen(
            command, stdout=log.fileno(), stderr=log.fileno(), env={**os.environ, **(environment or {})}
        ) as process,
    ):
        try:
            address = _wait(process, Path(log.name), find_address, timeout_s)
            service = PausedService(address, tuple(_begun_since(before)))
            service._send(signal.SIGSTOP)
            yield service
        finally:
            _end(process, before)


def _begun_since(before: set[int]) -> list[int]:
    return sorted(set(find_tree(os.getpid())) - before)


def _wait(
    process: "subprocess.Popen[bytes]", log: Path, find_address: Callable[[str], str | None], timeout_s: float
) -> str:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s and process.poll() is None:
        address = find_address(log.read_text(errors="replace"))
        if address is not None:
            return address
        time.sleep(_LOOK_S)
    raise BenchError(f"the service did not become ready:\n{log.read_text(errors='replace')[-_LOG_TAIL:]}")


def _end(process: "subprocess.Popen[bytes]", before: set[int]) -> None:
    for pid in _begun_since(before):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for pid in _begun_since(before):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
