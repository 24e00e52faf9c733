"""The half of the protocol that runs inside an engine's own environment: JSON lines on stdin and stdout, one at a time.

    {"do": "load", "setup": {...}}  ->  {"ok": {"packages": {...}, "dtype": "...", "note": "..."}}
    {"do": "run", "job": {...}}     ->  {"ok": {"tokens": [[...]], "wall_s": ..., "others_cores": ..., ...}}
    {"do": "quit"}                  ->  nothing; the process ends
    anything that fails             ->  {"error": "..."}

Standard library only: each engine brings packages of its own. process.py is the other half.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TextIO

from bench.machine import Stopwatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What an engine is loaded with."""

    model: str
    """A folder in Hugging Face layout."""
    dtype: str
    """"bfloat16", "float16", "float32" or "int8" (weights, and activations where the engine does that)."""
    cache: str
    """A folder for the converted checkpoint; it exists."""
    num_threads: int
    max_num_seqs: int
    """Requests in flight at once."""
    max_context: int
    """The longest prompt plus output."""
    cache_tokens: int
    """Keys and values of so many tokens fit every workload, nothing shared."""
    kv_cache_dtype: str = "auto"
    """"auto", or "int8": keys and values in 8 bits, which Weft alone is asked for."""
    device: str = "cpu"
    """"cpu" or "cuda"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; temperature comes before top-k and top-p."""

    temperature: float = 0.0
    """0: the most probable one, and top-k and top-p mean nothing."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    """Penalty of tokens that prompt or output have; 1: off."""

    @property
    def is_greedy(self) -> bool:
        """Whether no token is drawn."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Requests that are sent at once and run to their full length."""

    prompts: list[list[int]]
    num_out: list[int]
    """Tokens to generate, by request."""
    with_gaps: bool = False
    """Report how far the best token was ahead; only engines that are compared with can, and it costs time."""
    sampling: Sampling = Sampling()
    """How tokens of all requests are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What an engine says after loading."""

    packages: dict[str, str]
    """Versions of what computes."""
    dtype: str
    """What it computes in, in its own words."""
    note: str = ""
    """What a reader of its numbers should know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine gives back for a job."""

    tokens: list[list[int]]
    """Tokens that were generated, by request."""
    first_s: float | None = None
    """`time.perf_counter()` when the first token of all was there; None: this engine does not tell."""
    gaps: list[list[float]] | None = None
    """Log-probability of the best token less that of the second, by request and position."""


class PeerEngine(Protocol):
    """One engine with one model."""

    def describe(self) -> Loaded:
        """Return versions and settings that the numbers depend on."""
        ...

    def run(self, job: Job) -> Answer:
        """Generate; a job after another finds no prefix of it, since prompts differ."""
        ...


def serve_worker(load: Callable[[Setup], PeerEngine]) -> None:
    """Answer the parent until it says quit or goes away. Whatever an engine prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    answer_lines(sys.stdin, replies, load)
    replies.flush()
    os._exit(0)  # engines leave threads and atexit handlers that hang


def answer_lines(lines: TextIO, replies: TextIO, load: Callable[[Setup], PeerEngine]) -> None:
    """Run the loop of `serve_worker` over any two streams."""
    worker = _Worker(load)
    for line in lines:
        message = json.loads(line)
        if message["do"] == "quit":
            return
        replies.write(json.dumps(worker.answer(message)) + "\n")
        replies.flush()


def packages(*names: str) -> dict[str, str]:
    """Return the installed versions of packages."""
    return {name: version(name) for name in names}


def cached(folder: str, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of a converted checkpoint: made now where the cache has none, and put in place whole."""
    place = Path(folder) / name
    if not place.exists():
        scratch = place.with_name(f"{name}.{os.getpid()}.part")
        make(scratch)
        os.replace(scratch, place)
    return place


class _Worker:
    def __init__(self, load: Callable[[Setup], PeerEngine]) -> None:
        self._load = load
        self._engine: PeerEngine | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            match message["do"]:
                case "load":
                    self._engine = self._load(Setup(**message["setup"]))
                    return {"ok": asdict(self._engine.describe())}
                case "run":
                    assert self._engine is not None, "loaded before it runs"
                    job = message["job"]
                    sampling = Sampling(**job.pop("sampling", {}))
                    return {"ok": _timed(self._engine, Job(**job, sampling=sampling))}
                case other:
                    return {"error": f"do is {other!r}; allowed: 'load', 'run', 'quit'"}
        except Exception as error:  # whatever a peer raises is told, and the others go on
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}


def _timed(engine: PeerEngine, job: Job) -> dict[str, Any]:
    watch, started_s = Stopwatch(), time.perf_counter()
    answer = engine.run(job)
    span = watch.stop()
    _check(answer.tokens, job.num_out)
    return {
        "tokens": answer.tokens,
        "first_s": None if answer.first_s is None else answer.first_s - started_s,
        "gaps": answer.gaps,
        "wall_s": span.wall_s,
        "others_cores": span.others_cores,
    }


def _check(tokens: Sequence[Sequence[int]], num_out: Sequence[int]) -> None:
    """Check that each request has all of its tokens: an engine that stops early would look fast."""
    got = [len(each) for each in tokens]
    if got != list(num_out):
        raise ValueError(f"tokens by request are {got}; allowed: exactly those asked for, {list(num_out)}")
