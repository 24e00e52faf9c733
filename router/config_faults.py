"""What is wrong with a user's settings, in words: a line for each fault, which begins with its dotted path."""

import dataclasses
import json
import math
from collections.abc import Sequence
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

NO_BLANKS = r"^[^\x00-\x20\x7f]*$"
"""Pattern of names."""

LARGEST = 10**15
"""No setting has a use for more, of bytes or of seconds, and whoever computes with more may not have room for it."""


def check_sizes(data: object, error: type[Exception], place: tuple[str | int, ...] = ()) -> None:
    """Raise `error` for the first number within mappings and lists that is too large for any setting."""
    match data:
        case dict():
            for key, value in data.items():
                check_sizes(value, error, (*place, str(key)))
        case list():
            for index, value in enumerate(data):
                check_sizes(value, error, (*place, index))
        case int() | float() if LARGEST < abs(data) < math.inf:
            raise error(f"{_dotted(place)}: {_shown(data)}; allowed: at most {LARGEST:.0e}")


def describe_faults(kind: type[BaseModel], error: ValidationError) -> str:
    """Return the lines for data that are no such section."""
    return "\n".join(_describe(kind, fault) for fault in _innermost(error.errors()))


def _innermost(faults: Sequence[Any]) -> list[Any]:
    """Leave out what only follows from a fault further inside, such as a list left without valid entries."""
    places = [fault["loc"] for fault in faults]
    return [
        fault
        for fault, place in zip(faults, places, strict=True)
        if not any(len(other) > len(place) and other[: len(place)] == place for other in places)
    ]


def _describe(kind: type[BaseModel], fault: Any) -> str:
    path = _dotted(fault["loc"])
    match fault["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{path}: unknown key; allowed: {_keys(_section_at(kind, fault['loc'][:-1]))}"
        case "missing":
            return f"{path}: missing"
        case "too_short":
            return f"{path}: {_shown(fault['input'])}; allowed: at least {fault['ctx']['min_length']} entries"
        case "string_pattern_mismatch" if fault["ctx"]["pattern"] == NO_BLANKS:
            return f"{path}: {_shown(fault['input'])}; allowed: no blanks or control characters in it"
        case "value_error":
            return f"{path}: {fault['ctx']['error']}"
        case _:
            allowed = fault["msg"].removeprefix("Input should be ").removeprefix("String should have ")
            return f"{path}: {_shown(fault['input'])}; allowed: {allowed}"


def _dotted(loc: tuple[str | int, ...]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".") or "the file"


def _shown(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _section_at(kind: type[BaseModel], loc: tuple[str | int, ...]) -> Any:
    section: Any = kind
    for part in loc:
        section = _field_types(section)[part] if isinstance(part, str) else get_args(section)[0]
        if isinstance(section, UnionType):
            section = get_args(section)[0]  # `... | None`
    return section


def _field_types(section: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(section):
        return {field.name: field.type for field in dataclasses.fields(section)}
    return {name: field.annotation for name, field in section.model_fields.items()}


def _keys(section: Any) -> str:
    return ", ".join(_field_types(section))
