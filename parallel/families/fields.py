"""Typed reading of the fields of a config.json: a wrong one is refused with what was seen and what is allowed."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.errors import ConfigError
from parallel.position_description import MAX_INT32

_COUNTED = ("num_hidden_layers", "num_attention_heads", "first_k_dense_replace")
_MAX_COUNTED = 1 << 14
"""Most layers and heads: they are described one by one, before anything is compared with the weights."""
_MAX_NUMBER = 3.4e38
"""The largest of float32, in which models compute; products of two have room in Python's own numbers."""


class Fields:
    """Reads the fields of one JSON object; null counts as absent unless said. All methods raise ConfigError."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def renamed(self, **names: str) -> "Fields":
        """Return the same fields under other names too: `renamed(hidden_size="n_embd")`. Those under the new name count
        more; errors say the new name.
        """
        values = dict(self._values)
        for name, old in names.items():
            if values.get(name) is None and values.get(old) is not None:
                values[name] = values[old]
        return Fields(values, self._prefix)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    @property
    def is_empty(self) -> bool:
        """Whether the object has no entries."""
        return not self._values

    def with_defaults(self, **defaults: Any) -> "Fields":
        """Return the same fields, with these values where there is none."""
        given = {name: value for name, value in self._values.items() if value is not None or name not in defaults}
        return Fields({**defaults, **given}, self._prefix)

    def without(self, *names: str) -> "Fields":
        """Return the same fields without these."""
        return Fields({name: value for name, value in self._values.items() if name not in names}, self._prefix)

    def value(self, name: str) -> object:
        """Return whatever the field holds; None when absent."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`, at most what there is room for; required unless there is a default."""
        value = self._get(name, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._error(name, value, f"an integer of at least {minimum}")
        maximum = _MAX_COUNTED if name in _COUNTED else MAX_INT32
        if value > maximum:
            raise self._error(name, value, f"an integer of at most {maximum}")
        return value

    def nullable_integer(self, name: str, default: int) -> int | None:
        """An integer of at least 1, or null; here null and absent differ."""
        return self.integer(name, default) if name in self or name not in self._values else None

    def limit(self, name: str, default: int | None) -> int | None:
        """An integer of at least 1, or null: there is no limit; here null and absent differ. All that are more than
        MAX_INT32 limit as little as that does."""
        value = self._values.get(name, default)
        if value is None:
            return None
        return MAX_INT32 if isinstance(value, int) and value > MAX_INT32 else self.integer(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number more than 0; required unless there is a default."""
        return self._number(name, self._get(name, default, "a number"))

    def optional_number(self, name: str) -> float | None:
        """A finite number more than 0, or None when absent."""
        return self.number(name) if name in self else None

    def nonzero_number(self, name: str) -> float | None:
        """A finite number more than 0, or None when absent or 0."""
        value = self._values.get(name)
        return None if value == 0 and not isinstance(value, bool) else self.optional_number(name)

    def nullable_number(self, name: str, default: float) -> float | None:
        """A finite number more than 0, or null; here null and absent differ."""
        return self.number(name, default) if name in self or name not in self._values else None

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers more than 0; required."""
        values = self._get(name, None, "a list of numbers")
        if not isinstance(values, list):
            raise self._error(name, values, "a list of numbers")
        return tuple(self._number(f"{name}[{i}]", value) for i, value in enumerate(values))

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers of at least 0; empty when absent."""
        values = self._values.get(name) or []
        if not isinstance(values, list) or any(
            isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values
        ):
            raise self._error(name, values, "a list of integers of at least 0")
        return tuple(values)

    def boolean(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def nullable_boolean(self, name: str, default: bool) -> bool:
        """A boolean; null is false, absent is not."""
        return self.boolean(name, default) if name in self or name not in self._values else False

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required unless there is a default."""
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self._error(name, value, "a string")
        return value

    def optional_texts(self, name: str, *, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list of strings out of `allowed`, or None when absent."""
        if name not in self:
            return None
        values = self._values[name]
        if not isinstance(values, list) or any(value not in allowed for value in values):
            raise self._error(name, values, f"a list of {', '.join(map(repr, allowed))}")
        return tuple(values)

    def nested(self, name: str) -> "Fields":
        """The fields of the object under `name`; empty when absent."""
        value = self._get(name, {}, "an object")
        if not isinstance(value, Mapping):
            raise self._error(name, value, "an object")
        return Fields(value, prefix=f"{self._prefix}{name}.")

    def _get(self, name: str, default: Any, allowed: str) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self._prefix}{name} is missing; allowed: {allowed}")
        return default

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # of an integer
                number = math.inf
            if 0 < number <= _MAX_NUMBER:
                return number
            if _MAX_NUMBER < number < math.inf:
                raise self._error(name, value, f"a number of at most {_MAX_NUMBER}")
        raise self._error(name, value, "a finite number more than 0")

    def _error(self, name: str, value: object, allowed: str) -> ConfigError:
        seen = repr(value)
        seen = seen if len(seen) <= 80 else seen[:80] + "..."
        return ConfigError(f"{self._prefix}{name} is {seen}; allowed: {allowed}")


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of the encoding as well as of the JSON
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds {type(value).__name__}; allowed: a JSON object")
    return value
