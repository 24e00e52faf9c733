"""Datasets from files of JSON lines, plain or gzip: prompts and conversations, and traces of production services.

A line of a prompt file has one of

    {"prompt": "text"}        {"token_ids": [1, 2]}        {"messages": [{"role": ..., "content": ...}, ...]}

and may have "output_length". Conversations with recorded replies are sent turn by turn, each time with all that was
said before. A line of a trace has

    {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [0, 1, 2]}

where "timestamp" and "hash_ids" may be missing; requests are taken in the order of their times. A hash id stands for a
block of 512 prompt tokens (the last one may be shorter): equal ids become equal tokens, so that a prefix cache finds
what it would have found. Mooncake's traces have this form (arXiv:2407.00079). Empty lines are passed over.
"""

import gzip
import json
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.errors import BenchConfigError
from bench.load.calls import Call, Chat, Lengths, Prompt, Session, draw_ids

HASH_BLOCK_TOKENS = 512
"""Prompt tokens that a hash id stands for."""

_CACHED_BLOCKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimits:
    """How lengths of a trace are changed, for models that are smaller than those it was recorded with."""

    scale: float = 1.0
    """Multiplies input lengths, output lengths and hash blocks."""
    max_input_tokens: int | None = None
    """Longer prompts are cut to this, after scaling; None: as they are."""
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise BenchConfigError(f"--length-scale is {self.scale:g}; allowed: more than 0, at most 1")

    def num_in(self, length: int) -> int:
        """Return the prompt tokens to send for a recorded length."""
        return self._fit(length, self.max_input_tokens)

    def num_out(self, length: int) -> int:
        """Return the tokens to generate for a recorded length."""
        return self._fit(length, self.max_output_tokens)

    def _fit(self, length: int, most: int | None) -> int:
        scaled = max(1, round(length * self.scale))
        return scaled if most is None else min(scaled, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceLine:
    num_in: int
    num_out: int
    hash_ids: tuple[int | str, ...]
    at_s: float | None


def read_prompts(
    path: Path, *, outputs: Lengths, think_s: float, rng: random.Random, has_end: bool
) -> Iterator[Session]:
    """The file's records in an order of their own; without an end then in another one, and so on.

    Raises BenchConfigError when the file cannot be used; it is read before this returns.
    """
    records: list[tuple[list[Prompt], int | None]] = []
    for where, record in _read_records(path):
        num_out = _number(record, "output_length", where, least=1) if "output_length" in record else None
        prompts = _prompts_of(record, where)
        if prompts:
            records.append((prompts, num_out))
    if not records:
        raise BenchConfigError(f"{path} has no prompts; allowed: at least one")
    return _shuffled(records, outputs, think_s, rng, has_end=has_end)


def read_trace(path: Path, *, limits: TraceLimits, vocab_size: int, seed: int) -> Iterator[Session]:
    """The trace's requests by their times; prompts are made one by one, since all of them may not fit into memory.

    Raises BenchConfigError when the file cannot be used; it is read before this returns.
    """
    lines = [_trace_line(record, where, limits) for where, record in _read_records(path)]
    if len({line.at_s is None for line in lines}) != 1:
        raise BenchConfigError(f"{path} has no requests, or times for some only; allowed: times for all or for none")
    lines.sort(key=lambda line: line.at_s or 0.0)
    block_tokens = max(1, round(HASH_BLOCK_TOKENS * limits.scale))

    @lru_cache(_CACHED_BLOCKS)
    def block_of(hash_id: int | str) -> tuple[int, ...]:
        return draw_ids(random.Random(f"block {seed} {hash_id}"), block_tokens, vocab_size)

    def prompt_of(index: int, line: _TraceLine) -> tuple[int, ...]:
        ids: list[int] = []
        for hash_id in line.hash_ids[: -(-line.num_in // block_tokens)]:
            ids += block_of(hash_id)
        if len(ids) < line.num_in:  # without hash ids, or rounded lengths
            ids += draw_ids(random.Random(f"own {seed} {index}"), line.num_in - len(ids), vocab_size)
        return tuple(ids[: line.num_in])

    return (
        Session(calls=(Call(prompt=prompt_of(index, line), num_out=line.num_out),), at_s=line.at_s)
        for index, line in enumerate(lines)
    )


def _shuffled(
    records: list[tuple[list[Prompt], int | None]],
    outputs: Lengths,
    think_s: float,
    rng: random.Random,
    *,
    has_end: bool,
) -> Iterator[Session]:
    while True:
        rng.shuffle(records)
        for prompts, num_out in records:
            calls = tuple(Call(prompt=each, num_out=num_out or outputs.draw(rng)) for each in prompts)
            yield Session(calls=calls, think_s=think_s)
        if has_end:
            return


def _prompts_of(record: Mapping[str, Any], where: str) -> list[Prompt]:
    """One prompt; of a conversation one for each recorded reply, and one for what has no reply yet."""
    match record:
        case {"prompt": str(text)} if text:
            return [_whole(text, where)]
        case {"token_ids": [*token_ids]} if token_ids and all(map(_is_token_id, token_ids)):
            return [tuple(token_ids)]
        case {"messages": [*messages]} if messages and all(map(_is_message, messages)):
            said = tuple({name: _whole(message[name], where) for name in ("role", "content")} for message in messages)
            ends = [index for index, message in enumerate(said) if index and message["role"] == "assistant"]
            if said[-1]["role"] != "assistant":
                ends.append(len(said))
            return [Chat(messages=said[:end]) for end in ends]
        case _:
            allowed = '"prompt" with a text, "token_ids" from 0 on, or "messages" with role and content, both texts'
            raise BenchConfigError(f"{where}: has {sorted(record)}; allowed: {allowed}")


def _whole(text: str, where: str) -> str:
    """Return the text where it can be encoded, else raise BenchConfigError: JSON may have half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r}, half of a surrogate pair"
        raise BenchConfigError(f"{where}: a text has {half}; allowed: both halves") from error
    return text


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_message(value: object) -> bool:
    match value:
        case {"role": str(), "content": str()}:
            return True
        case _:
            return False


def _trace_line(record: Mapping[str, Any], where: str, limits: TraceLimits) -> _TraceLine:
    hash_ids = record.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(isinstance(each, int | str) for each in hash_ids):
        raise BenchConfigError(f"{where}: hash_ids is {hash_ids!r}; allowed: a list of numbers or texts")
    return _TraceLine(
        num_in=limits.num_in(_number(record, "input_length", where)),
        num_out=limits.num_out(_number(record, "output_length", where)),
        hash_ids=tuple(_whole(each, where) if isinstance(each, str) else each for each in hash_ids),
        at_s=_milliseconds(record, where) / 1000 if "timestamp" in record else None,
    )


def _number(record: Mapping[str, Any], name: str, where: str, *, least: int = 0) -> int:
    value = record.get(name)
    if type(value) is not int or not least <= value < 2**31:
        raise BenchConfigError(f"{where}: {name} is {value!r}; allowed: a whole number, at least {least}, below 2**31")
    return value


def _milliseconds(record: Mapping[str, Any], where: str) -> float:
    value = record["timestamp"]
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise BenchConfigError(f"{where}: timestamp is {value!r}; allowed: milliseconds, at least 0")
    return float(value)


def _read_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each line's record, and where the line is, for messages."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield f"{path}:{number}", _read_object(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise BenchConfigError(f"{path} cannot be read: {error}") from error


def _read_object(line: bytes, where: str) -> Mapping[str, Any]:
    """Read UTF-8, with the mark of byte order that some programs begin a file with or without it."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise BenchConfigError(f"{where}: not JSON: {error}") from error
    except RecursionError as error:
        raise BenchConfigError(f"{where}: is nested too deeply: {error}") from error
    if not isinstance(record, dict):
        raise BenchConfigError(f"{where}: is a {type(record).__name__}; allowed: a JSON object")
    return record
