"""Which prompts a benchmark sends: the kinds of datasets, and those that are made up here. Deterministic by seed.

dataset_files.py reads the kinds that come from files.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from bench.errors import BenchConfigError
from bench.load.calls import Call, Lengths, Session, draw_ids
from bench.load.dataset_files import TraceLimits, read_prompts, read_trace
from bench.load.workloads import WORKLOADS, make_workload


class DatasetKind(StrEnum):
    """Where prompts come from."""

    RANDOM = "random"
    """Random token ids."""
    SHARED_PREFIX = "shared-prefix"
    """Random token ids after one of a few long prefixes."""
    SESSIONS = "sessions"
    """Conversations: each call repeats what was said before, replies included, and adds to it."""
    PROMPTS = "prompts"
    """A file of prompts or conversations, JSON lines."""
    TRACE = "trace"
    """A file of lengths, times and, where it has them, hash ids, JSON lines."""
    W1 = "W1"
    W2 = "W2"
    W3 = "W3"
    W4 = "W4"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """Everything that says which prompts are sent. Each kind looks at what concerns it."""

    kind: DatasetKind = DatasetKind.RANDOM
    file: Path | None = None
    """File of the kinds `prompts` and `trace`."""
    has_end: bool = False
    """No flag says how much is sent: the dataset's own end does, and `prompts` are sent once, not again and again."""
    inputs: Lengths = field(default_factory=lambda: Lengths(low=128, high=128))
    """Prompt tokens of each call, after what it shares with others."""
    outputs: Lengths = field(default_factory=lambda: Lengths(low=64, high=64))
    """Tokens to generate; a trace, and a file's own `output_length`, count more."""
    prefix_tokens: int = 512
    """Length of the prefixes of `shared-prefix`, and of the system prompt of `sessions`."""
    num_prefixes: int = 1
    """How many different prefixes there are."""
    turns: Lengths = field(default_factory=lambda: Lengths(low=2, high=5))
    """Calls of each of the `sessions`."""
    think_s: float = 0.0
    """Pause between the calls of a session."""
    limits: TraceLimits = field(default_factory=TraceLimits)
    """How a trace is made to fit a small model."""

    def __post_init__(self) -> None:
        if (self.file is None) == (self.kind in (DatasetKind.PROMPTS, DatasetKind.TRACE)):
            seen = "missing" if self.file is None else str(self.file)
            raise BenchConfigError(f"--file is {seen}; allowed: one with --dataset prompts or trace, none with others")

    @property
    def is_workload(self) -> bool:
        """Whether it is one of W1 to W4, which are sent whole unless a flag says how much."""
        return self.kind in WORKLOADS


def make_sessions(options: DatasetOptions, *, vocab_size: int, seed: int) -> Iterator[Session]:
    """The sessions, one after the other as they are wanted; only traces, W1 to W4 and `has_end` come to an end.

    Args:
        options: which.
        vocab_size: token ids are below it.
        seed: of all that is random in them.

    Raises:
        BenchConfigError: the file cannot be read, or is not what it should be.
    """
    rng = random.Random(f"{options.kind} {seed}")
    match options.kind:
        case DatasetKind.RANDOM:
            return _random_sessions(options, vocab_size, rng)
        case DatasetKind.SHARED_PREFIX:
            return _shared_prefix_sessions(options, vocab_size, rng)
        case DatasetKind.SESSIONS:
            return _conversations(options, vocab_size, rng)
        case DatasetKind.PROMPTS:
            assert options.file is not None, "checked when the options were made"
            return read_prompts(
                options.file, outputs=options.outputs, think_s=options.think_s, rng=rng, has_end=options.has_end
            )
        case DatasetKind.TRACE:
            assert options.file is not None, "checked when the options were made"
            return read_trace(options.file, limits=options.limits, vocab_size=vocab_size, seed=seed)
        case DatasetKind.W1 | DatasetKind.W2 | DatasetKind.W3 | DatasetKind.W4:
            calls = make_workload(options.kind, vocab_size=vocab_size, seed=seed)
            return (Session(calls=(call,)) for call in calls)


def take_calls(sessions: Iterator[Session], number: int | None) -> Iterator[Session]:
    """Sessions with exactly so many calls together, or with all there are where that is fewer or `number` is None."""
    if number is None:
        yield from sessions
        return
    while number > 0:
        session = next(sessions, None)
        if session is None:
            return
        calls = session.calls[:number]
        number -= len(calls)
        yield Session(calls=calls, at_s=session.at_s, think_s=session.think_s)


def _random_sessions(options: DatasetOptions, vocab_size: int, rng: random.Random) -> Iterator[Session]:
    while True:
        prompt = draw_ids(rng, options.inputs.draw(rng), vocab_size)
        yield Session(calls=(Call(prompt=prompt, num_out=options.outputs.draw(rng)),))


def _shared_prefix_sessions(options: DatasetOptions, vocab_size: int, rng: random.Random) -> Iterator[Session]:
    prefixes = _prefixes(options, vocab_size, rng)
    while True:
        prompt = rng.choice(prefixes) + draw_ids(rng, options.inputs.draw(rng), vocab_size)
        yield Session(calls=(Call(prompt=prompt, num_out=options.outputs.draw(rng)),))


def _conversations(options: DatasetOptions, vocab_size: int, rng: random.Random) -> Iterator[Session]:
    """Yield conversations whose recorded replies are made up too, so that every engine is sent the same prompts."""
    prefixes = _prefixes(options, vocab_size, rng)
    while True:
        history = rng.choice(prefixes)
        calls = []
        for _ in range(options.turns.draw(rng)):
            history += draw_ids(rng, options.inputs.draw(rng), vocab_size)
            call = Call(prompt=history, num_out=options.outputs.draw(rng))
            history += draw_ids(rng, call.num_out, vocab_size)
            calls.append(call)
        yield Session(calls=tuple(calls), think_s=options.think_s)


def _prefixes(options: DatasetOptions, vocab_size: int, rng: random.Random) -> list[tuple[int, ...]]:
    return [draw_ids(rng, options.prefix_tokens, vocab_size) for _ in range(options.num_prefixes)]
