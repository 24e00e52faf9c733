"""Bounds of settings, where values are made in Python; files are read by the same types (test_config.py)."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le
from weft.bounds import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    colour: Literal["red", "blue"] = "red"
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    port: Annotated[int, Ge(0), Le(65535)] | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, ValueError)


@pytest.mark.parametrize(
    "changes", [{}, {"colour": "blue"}, {"share": 0.1}, {"port": 0}, {"port": 65535}, {"text": ""}]
)
def test_what_types_allow_is_taken(changes: dict[str, object]) -> None:
    assert Settings(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "green"}, "colour is 'green'; allowed: 'red', 'blue'"),
        ({"colour": None}, "colour is None; allowed: 'red', 'blue'"),
        ({"share": 0}, "share is 0; allowed: more than 0, at most 1"),
        ({"share": 1.5}, "share is 1.5; allowed: more than 0, at most 1"),
        ({"share": math.nan}, "share is nan; allowed: more than 0, at most 1"),
        ({"port": -1}, "port is -1; allowed: 0 to 65535"),
    ],
)
def test_what_they_do_not_allow_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**changes)  # type: ignore[arg-type]
