"""Flags that belong together: a frozen dataclass whose fields are options, which a command takes as one parameter."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

from typer.core import TyperCommand
from weft.addresses import split_host_port

from cluster.errors import ClusterConfigError


def check_address(flag: str, address: str) -> None:
    """Refuse what is no host:port, for gRPC would make something else of it. Raises ClusterConfigError."""
    try:
        split_host_port(address)
    except ValueError as error:
        raise ClusterConfigError(f"{flag}: {error}") from None


class WholeNamesCommand(TyperCommand):
    """A command whose help shows the names of its options whole: in a narrow terminal typer's tables cut them off."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, text and options, as without tables."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by what they are about."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                is_argument = parameter.param_type_name == "argument"
                name = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
                sections.setdefault(name, []).append(row)
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl(rows)


def read_object(flag: str, text: str | None) -> dict[str, Any] | None:
    """Return what a flag's JSON object holds, None where it is not given. Raises ClusterConfigError."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ClusterConfigError(f"{flag} is an object in too many others; allowed: a thousand, about") from error
    except ValueError as error:
        raise ClusterConfigError(f"{flag} is {text!r}, which is not JSON: {error}; allowed: an object") from error
    if not isinstance(value, dict):
        raise ClusterConfigError(f"{flag} is {text!r}; allowed: a JSON object")
    return value


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has the fields of each parameter that is a dataclass as options of its own."""
    own = inspect.signature(command).parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in own.items() if dataclasses.is_dataclass(each.annotation)
    }

    @functools.wraps(command)
    def run(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{field.name: options.pop(field.name) for field in dataclasses.fields(group)})
        command(**options)

    parameters = [each for name, one in own.items() for each in _expand(groups.get(name), one)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def given(flags: Any) -> dict[str, Any]:
    """Return the fields of a group whose values are not the defaults."""
    return {
        field.name: getattr(flags, field.name)
        for field in dataclasses.fields(flags)
        if getattr(flags, field.name) != field.default
    }


def _expand(group: Any, parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if group is None:
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
