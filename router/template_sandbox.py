"""Where a foreign Jinja template runs: it can compute, but reach nothing, and what it may spend is bounded.

jinja2's immutable sandbox keeps files, the network and the interpreter out of reach. On top of it the turns of all
loops, the length of the result, and what `*` and `**` make of a short text are limited. What a filter does within one
call is not: its work grows with its input, which the router bounds.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 1_000_000
"""Of all loops together: some seconds."""
MAX_CHARS = 1 << 24
"""Of the result, and of a repeated text; items of a repeated list."""
_MAX_BITS = 1 << 12  # of a power

_TURNS = "turns left"  # no name that a template could write
_COUNTED = "counted"


class SandboxedTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str, *, now: Callable[[], datetime]) -> None:
        """Compile with what chat templates expect to find around them.

        Args:
            source: Jinja text.
            now: the clock behind `strftime_now`.

        Raises:
            jinja2.TemplateError: the text is not a template.
        """

        def strftime_now(format: str) -> str:
            return now().strftime(format)

        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        environment.filters |= {"tojson": _tojson, _COUNTED: _counted}
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        self._template = environment.from_string(source)
        self.names = frozenset(environment.globals)
        """Of what is there for every template."""

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text. Raises whatever the template does, and TemplateError when it spends too much."""
        parts: list[str] = []
        num_chars = 0
        for part in self._template.generate({**variables, _TURNS: [MAX_TURNS]}):
            num_chars += len(part)
            if num_chars > MAX_CHARS:
                raise TemplateError(f"the text has more than {MAX_CHARS} characters")
            parts.append(part)
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Let every loop go through a filter that counts its turns."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            counted = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
            loop.iter = counted.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse a product or power that is far larger than its operands."""
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if hasattr(repeated, "__len__") and isinstance(times, int) and len(repeated) * times > MAX_CHARS:
                    raise TemplateError(f"a value is repeated {times} times; allowed: {MAX_CHARS} characters or items")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
            raise TemplateError(f"a power has more than {_MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    turns: list[int] = context[_TURNS]
    for item in items:
        turns[0] -= 1
        if turns[0] < 0:
            raise TemplateError(f"its loops take more than {MAX_TURNS} turns")
        yield item


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is: jinja's own filter escapes for HTML, which a model has never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; in serving, its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (jinja reads it from the class)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
