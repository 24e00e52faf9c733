"""What a setting may be, said once, on its type: `Literal`, or `Annotated` with bounds.

    replicas: Annotated[int, Ge(1)]

pydantic reads the same from the type, for files of settings and for the schema of the chart.
"""

import functools
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le

Bound: TypeAlias = Ge | Gt | Le


def check_fields(settings: Any, error: type[Exception]) -> None:
    """Raise `error` for the first field of a dataclass that its type does not allow."""
    kind: Any = type(settings)
    for name, rule in _rules(kind).items():
        value = getattr(settings, name)
        if not rule.allows(value):
            raise error(f"{name} is {value!r}; allowed: {rule.allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    is_optional: bool
    choices: tuple[object, ...]
    """Values that are allowed; empty: all that the bounds take."""
    bounds: tuple[Bound, ...]

    def allows(self, value: Any) -> bool:
        if value is None and self.is_optional:
            return True
        return value in self.choices if self.choices else all(_is_within(value, bound) for bound in self.bounds)

    @property
    def allowed(self) -> str:
        if self.choices:
            return ", ".join(map(repr, self.choices))
        match self.bounds:
            case (Ge(ge=least), Le(le=most)):
                return f"{least} to {most}"
        return ", ".join(_said(bound) for bound in self.bounds)


@functools.cache
def _rules(kind: type) -> dict[str, _Rule]:
    """Return a rule for each field that has one."""
    rules = {name: _rule(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    return {name: rule for name, rule in rules.items() if rule.choices or rule.bounds}


def _rule(hint: Any) -> _Rule:
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices: list[object] = []
    bounds: list[Bound] = []
    for arm in arms:
        if get_origin(arm) is Literal:
            choices += get_args(arm)
        elif get_origin(arm) is Annotated:
            bounds += (each for each in get_args(arm)[1:] if isinstance(each, Bound))
    return _Rule(is_optional=NoneType in arms, choices=tuple(choices), bounds=tuple(bounds))


def _is_within(value: Any, bound: Bound) -> bool:
    match bound:  # a NaN fails every comparison, and so is not within
        case Ge(ge=least):
            return bool(value >= least)
        case Gt(gt=below):
            return bool(value > below)
        case Le(le=most):
            return bool(value <= most)


def _said(bound: Bound) -> str:
    match bound:
        case Ge(ge=least):
            return f"at least {least}"
        case Gt(gt=below):
            return f"more than {below}"
        case Le(le=most):
            return f"at most {most}"
