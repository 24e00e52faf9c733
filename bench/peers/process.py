"""The parent's half of the protocol: one worker process, started in its own environment, asked and ended.

worker.py is the other half, and describes the messages.
"""

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

from bench.errors import BenchError
from bench.peers.worker import Job, Loaded, Setup

_END_TIMEOUT_S = 10.0
_LOG_TAIL = 1500
"""Characters of a dead worker's log that its error shows."""


class WorkerError(BenchError):
    """A worker refused, failed, died or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One job done by one engine, timed inside the worker."""

    tokens: list[list[int]]
    wall_s: float
    others_cores: float | None
    """Cores that all other processes kept busy meanwhile; None where the system does not tell."""
    first_s: float | None
    """Time until the first token of all; None: the engine does not tell."""
    gaps: list[list[float]] | None


class Worker:
    """One engine in a process of its own. Between calls it computes nothing."""

    def __init__(self, name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        """Start the process; the engine is loaded by `load`. What it prints goes into `log`."""
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **environment},
                text=True,
            )
        assert self._process.stdout is not None
        self._replies: Queue[str | None] = Queue(maxsize=4)
        threading.Thread(
            target=_read, args=(self._process.stdout, self._replies), name=f"replies of {name}", daemon=True
        ).start()

    def load(self, setup: Setup, *, timeout_s: float) -> Loaded:
        """Convert and load the model. Raises WorkerError."""
        return Loaded(**self._ask({"do": "load", "setup": asdict(setup)}, timeout_s))

    def run(self, job: Job, *, timeout_s: float) -> Section:
        """Do a job and wait for it. Raises WorkerError."""
        return Section(**self._ask({"do": "run", "job": asdict(job)}, timeout_s))

    def close(self) -> None:
        """Ask it to end, and end it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write('{"do": "quit"}\n')
            self._process.stdin.close()
            self._process.wait(_END_TIMEOUT_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):  # dead already, or deaf
            self._process.kill()
            self._process.wait()

    def _ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
        except Empty:
            self._process.kill()  # its late answer would be taken for the next one's
            raise WorkerError(f"{self.name}: no answer to {message['do']!r} within {timeout_s:g} s") from None
        except (OSError, ValueError):
            line = None
        if line is None:
            raise WorkerError(f"{self.name}: the worker died (exit {self._process.wait()}): {self._tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self.name}: {reply['error']}; its log: {self._log}")
        answer: dict[str, Any] = reply["ok"]
        return answer

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_TAIL:].strip() or f"nothing in {self._log}"


def _read(stream: IO[str], replies: "Queue[str | None]") -> None:
    """Queue each line until the worker closes its end, then None."""
    for line in stream:
        replies.put(line)
    replies.put(None)
