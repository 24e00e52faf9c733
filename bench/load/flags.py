"""From the texts of flags to the values that they mean. Raises BenchConfigError, which names the flag."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from bench.errors import BenchConfigError
from bench.load.arrivals import ClosedLoop, Load, OpenLoop, Replay
from bench.load.calls import Lengths
from bench.load.dataset_files import TraceLimits
from bench.load.datasets import DatasetKind, DatasetOptions
from bench.load.statistics import Targets

DEFAULT_CONCURRENCY = 8

_Kind = TypeVar("_Kind", bound=StrEnum)
_Number = TypeVar("_Number", int, float)


def choose(flag: str, text: str, kinds: type[_Kind]) -> _Kind:
    """One of a closed set."""
    try:
        return kinds(text)
    except ValueError:
        raise BenchConfigError(f"{flag} is {text!r}; allowed: {', '.join(kinds)}") from None


def parse_lengths(flag: str, text: str) -> Lengths:
    """A number, or a range as in 32-256."""
    low, dash, high = text.partition("-")
    try:
        lengths = Lengths(low=int(low), high=int(high if dash else low))
    except ValueError:
        lengths = Lengths(low=0, high=0)
    if not 1 <= lengths.low <= lengths.high:
        raise BenchConfigError(f"{flag} is {text!r}; allowed: a number, or a range as in 32-256, from 1 on")
    return lengths


def parse_dataset(
    name: str,
    file: Path | None,
    *,
    inputs: str,
    outputs: str,
    prefix_tokens: int,
    num_prefixes: int,
    turns: str,
    think_s: float,
    scale: float,
    max_input_tokens: int | None,
    max_output_tokens: int | None,
) -> DatasetOptions:
    """The flags of prompts together."""
    return DatasetOptions(
        kind=choose("--dataset", name, DatasetKind),
        file=file,
        inputs=parse_lengths("--input-tokens", inputs),
        outputs=parse_lengths("--output-tokens", outputs),
        prefix_tokens=prefix_tokens,
        num_prefixes=num_prefixes,
        turns=parse_lengths("--turns", turns),
        think_s=think_s,
        limits=TraceLimits(scale=scale, max_input_tokens=max_input_tokens, max_output_tokens=max_output_tokens),
    )


def parse_loads(
    *, rate: str | None, burstiness: float, concurrency: str | None, replay: bool, speed: float
) -> tuple[Load, ...]:
    """Open loops, closed loops, or a replay: one kind only."""
    given = [
        flag for flag, is_set in (("--rate", rate), ("--concurrency", concurrency), ("--replay", replay)) if is_set
    ]
    if len(given) > 1:
        raise BenchConfigError(f"{' and '.join(given)} are given; allowed: one of them")
    if replay:
        return (Replay(speed=speed),)
    if rate is not None:
        return tuple(OpenLoop(rate=each, burstiness=burstiness) for each in _numbers("--rate", rate, float))
    numbers = _numbers("--concurrency", concurrency or str(DEFAULT_CONCURRENCY), int)
    return tuple(ClosedLoop(concurrency=each) for each in numbers)


def parse_targets(ttft_ms: float | None, tpot_ms: float | None) -> Targets | None:
    """What requests must keep for goodput; None: nobody asks."""
    if ttft_ms is None and tpot_ms is None:
        return None
    return Targets(
        ttft_s=None if ttft_ms is None else ttft_ms / 1000, tpot_s=None if tpot_ms is None else tpot_ms / 1000
    )


def _numbers(flag: str, text: str, kind: Callable[[str], _Number]) -> list[_Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise BenchConfigError(f"{flag} is {text!r}; allowed: a number, or several as in 1,4,16") from None
