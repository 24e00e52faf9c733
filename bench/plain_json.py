"""Values of any kind as JSON has them: what benchmarks put into their line."""

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

_SECRETS = ("api_key",)


def to_plain(value: Any) -> Any:
    """Return values as JSON has them; infinite numbers as text, secrets not at all."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: to_plain(each) for name, each in fields.items() if name not in _SECRETS}
    match value:
        case Enum():
            return value.value
        case Mapping():
            return {str(key): to_plain(each) for key, each in value.items()}
        case list() | tuple():
            return [to_plain(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
        case Path():
            return str(value)
        case _:
            return value
