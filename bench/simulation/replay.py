"""Recorded decisions, decided again: production modules are told what they were told, and must answer the same.

weft replay /var/log/weft/decisions                 every recording in the folder
weft replay tiny-0.1-20261122-110503-4711-9f3a1c.decisions --json
"""

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
from weft.recording import SUFFIX, Recording, RecordingError

from bench.errors import BenchConfigError, BenchError
from bench.simulation.quiet_loggers import only_errors
from bench.simulation.replayed_modules import KINDS, Replay, ReplayedKind

_MAX_SHOWN = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first decision that is another one now."""

    call: int
    """Number of the call, from 1."""
    kind: str
    time_s: float | None
    """Time of the recorded clock."""
    place: str
    """Where in the decision it is."""
    recorded: str
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one file."""

    path: str
    kind: str
    calls: dict[str, int]
    """How many calls of each kind were decided again."""
    num_equal: int
    recorded_s: float
    """Time from the first call to the last, by the recorded clock."""
    replay_s: float
    is_torn: bool
    """Whether the last frame is not whole: the process died while it wrote."""
    difference: Difference | None


class _Answers:
    """What the module hands over during one call: that call with its decision."""

    def __init__(self) -> None:
        self._answer: msgspec.Struct | None = None

    def begin(self, kind: str, header: msgspec.Struct) -> None:
        pass

    def write(self, frame: msgspec.Struct) -> None:
        self._answer = frame

    def take(self) -> msgspec.Struct | None:
        answer, self._answer = self._answer, None
        return answer


def replay_file(path: Path) -> Outcome:
    """Decide everything in a file again, up to the first difference. Raises RecordingError."""
    recording = Recording(path)
    try:
        kind = KINDS.get(recording.kind)
        if kind is None:
            raise RecordingError(f"{path}: of {recording.kind!r}; allowed: {', '.join(KINDS)}")
        return _replay(recording, kind)
    finally:
        recording.close()


def _replay(recording: Recording, kind: ReplayedKind) -> Outcome:
    begin_s = time.perf_counter()
    answers = _Answers()
    module = kind.build(recording.read_header(kind.header), answers)
    calls: Counter[str] = Counter()
    first_s, last_s = math.inf, 0.0
    difference = None
    for call in recording.read_frames(kind.call):
        calls[_name(call)] += 1
        now_s = getattr(call, "now_s", None)
        if now_s is not None:
            first_s, last_s = min(first_s, now_s), now_s
        found = _repeat(module, call, answers)
        if found is not None:
            place, recorded, now = found
            difference = Difference(
                call=calls.total(), kind=_name(call), time_s=now_s, place=place, recorded=recorded, now=now
            )
            break
    return Outcome(
        path=str(recording.path),
        kind=recording.kind,
        calls=dict(calls),
        num_equal=calls.total() - (difference is not None),
        recorded_s=max(0.0, last_s - first_s),
        replay_s=time.perf_counter() - begin_s,
        is_torn=recording.is_torn,
        difference=difference,
    )


def _repeat(module: Replay, call: msgspec.Struct, answers: _Answers) -> tuple[str, str, str] | None:
    """Make a call; return where its decision differs from the recorded one, and both."""
    failure = ""
    try:
        module.repeat(call)
    except Exception as error:  # as when it was recorded; or the call cannot be made here, and nothing was answered
        failure = f"{type(error).__name__}: {error}"
    return first_difference(call, answers.take() or failure)


def first_difference(recorded: Any, now: Any, place: str = "") -> tuple[str, str, str] | None:
    """Return where two values differ first, and both of them there as text; None where they are equal."""
    if recorded == now:
        return None
    if type(recorded) is type(now):
        for name, one, other in _parts(recorded, now):
            found = first_difference(one, other, place + name)
            if found is not None:
                return found
    return place.removeprefix("."), _shown(recorded), _shown(now)


def _parts(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of two values of the same type, by name."""
    names: Sequence[str] = ()
    if isinstance(one, msgspec.Struct):
        names = one.__struct_fields__
    elif dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
    elif isinstance(one, list | tuple):
        for i, (first, second) in enumerate(zip_longest(one, other, fillvalue="nothing")):
            yield f"[{i}]", first, second
    for name in names:
        yield f".{name}", getattr(one, name), getattr(other, name)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _name(call: msgspec.Struct) -> str:
    return str(call.__struct_config__.tag)


# The command


def replay(paths: Sequence[Path], *, as_json: bool) -> None:
    """Replay files, and those in folders, and tell how it went. Raises BenchError where a decision is another one."""
    try:
        with only_errors("workers.roster"):  # it warns of each preemption
            outcomes = [replay_file(path) for path in _chosen(paths)]
    except RecordingError as error:
        raise BenchConfigError(str(error)) from error
    if as_json:
        print(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=2))
    else:
        _print(outcomes)
    num_different = sum(outcome.difference is not None for outcome in outcomes)
    if num_different:
        raise BenchError(f"{num_different} of {len(outcomes)} recordings are decided otherwise")


def files_in(folder: Path) -> list[Path]:
    """Return the recordings in a folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def _chosen(paths: Sequence[Path]) -> list[Path]:
    files = [file for path in paths for file in (files_in(path) if path.is_dir() else [path])]
    if not files:
        raise RecordingError(f"{', '.join(map(str, paths))}: no recording; wanted: files that end in {SUFFIX}")
    return files


def _print(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        calls = ", ".join(f"{num} {name}" for name, num in outcome.calls.items()) or "there is none"
        torn = "; its last frame is torn" if outcome.is_torn else ""
        print(f"{outcome.path}: {outcome.kind}, {outcome.recorded_s:.1f} s, replayed in {outcome.replay_s:.2f} s{torn}")
        print(f"  {outcome.num_equal} of {sum(outcome.calls.values())} decisions are equal: {calls}")
        found = outcome.difference
        if found is not None:
            at = "" if found.time_s is None else f" at {found.time_s:.3f} s"
            print(f"  call {found.call}, {found.kind}{at}, is decided otherwise")
            print(f"    in        {found.place or 'all of it'}")
            print(f"    recorded  {found.recorded}")
            print(f"    now       {found.now}")
