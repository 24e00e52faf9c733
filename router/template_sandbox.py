"""Where a foreign Jinja template runs: it can compute, but reach nothing, and what it may spend is bounded.

jinja2's immutable sandbox keeps files, the network and the interpreter out of reach. On top of it there is a budget of
turns, which loops, calls and filters take, and of characters, which whatever makes a text or a list takes. Widths are
limited, and what multiplies a text is counted before it is made.

Not bounded: the time of one operation, which grows with its input of at most MAX_CHARS; what slices take; lists that
hold one list many times over; and what formats, `expandtabs`, `indent`, `wordwrap`, `urlize`, `tojson` and `xmlattr`
make of long arguments.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import partial, wraps
from itertools import chain
from string import Formatter
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_environment
from jinja2.environment import Environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 1_000_000
"""Most turns of loops, calls and filters together: some seconds of work."""
MAX_CHARS = 1 << 24
"""Most characters of the result, and of each value on the way to it."""
MAX_CHARS_MADE = 1 << 31
"""Most characters of all values on the way together."""
_ITEM_CHARS = 8  # what an item of a list counts as: its pointer
_MAX_BITS = 1 << 12  # the most of a product or power
_MAX_WIDTH = 999

_COUNTED = "counted"
_JOINED = "joined"
_WITH_WIDTH = frozenset(
    ["batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "zfill"]
)
"""Filters and methods whose numbers say how much they make."""
_REFUSED = frozenset(["encode", "to_bytes", "translate"])
"""Methods that would make what is not counted: bytes, which have methods of their own, and texts of a character map."""
_PERCENT_WIDTH = re.compile(r"%(?:\(.*?\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?")


class _Budget:
    """What a rendering has left."""

    def __init__(self) -> None:
        self._turns = MAX_TURNS
        self._chars = MAX_CHARS_MADE

    def take_turn(self) -> None:
        self._turns -= 1
        if self._turns < 0:
            raise TemplateError(f"its loops, calls and filters take more than {MAX_TURNS} turns")

    def take(self, num_chars: int) -> None:
        self._chars -= num_chars
        if num_chars > MAX_CHARS or self._chars < 0:
            allowed = f"{MAX_CHARS} characters, and {MAX_CHARS_MADE} of all together"
            raise TemplateError(f"it makes too long a text or list; allowed: {allowed}")

    def take_made(self, value: object) -> None:
        if isinstance(value, str):
            self.take(len(value))
        elif isinstance(value, list | tuple | dict):
            self.take(len(value) * _ITEM_CHARS)


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")
"""Unset while a template is compiled: jinja then computes constants ahead, and leaves to the rendering what fails, as
whatever takes from the budget does."""


class SandboxedTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str, *, now: Callable[[], datetime]) -> None:
        """Compile with what chat templates expect to find around them.

        Args:
            source: Jinja text.
            now: the clock behind `strftime_now`.

        Raises:
            Exception: the text is not a template: TemplateError, or what Python says of the code made of it.
        """

        def strftime_now(format: str) -> str:
            return now().strftime(format)

        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        environment.filters |= {"tojson": _tojson, "join": _join, "replace": _replaced, "format": _formatted}
        environment.filters = {name: _bounded(name, each) for name, each in environment.filters.items()}
        environment.filters |= {_COUNTED: _counted, _JOINED: _joined_as_text}
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        del environment.globals["lipsum"]  # a million words at one call
        self._template = environment.from_string(source)
        self.names = frozenset(environment.globals)
        """Names of what is there for every template."""

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text. Raises whatever the template does, and TemplateError when it spends too much."""
        token = _BUDGET.set(_Budget())
        try:
            parts: list[str] = []
            num_chars = 0
            for part in self._template.generate(variables):
                num_chars += len(part)
                if num_chars > MAX_CHARS:
                    raise TemplateError(f"the text has more than {MAX_CHARS} characters")
                parts.append(part)
            return "".join(parts)
        finally:
            _BUDGET.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what a macro, a block or a recursive loop writes."""
        return _joined("", parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Let every loop and every `~` go through a filter that counts what it takes."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._filtered(loop.iter, _COUNTED)
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [self._filtered(nodes.List(concat.nodes, lineno=concat.lineno), _JOINED)]
        return tree

    def _filtered(self, node: nodes.Node, name: str) -> nodes.Filter:
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        made.set_environment(self)
        return made

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have it."""
        return attr not in _REFUSED and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what the sandbox allows, within the budget."""
        budget = _BUDGET.get()
        budget.take_turn()
        name = getattr(obj, "__name__", "")
        if isinstance(obj, LoopContext):
            args = tuple(map(_counted, args))
            kwargs = {key: _counted(items) if key == "iterable" else items for key, items in kwargs.items()}
        elif name in _WITH_WIDTH:
            _check_widths(chain(args, kwargs.values()))
        elif name in _METHODS and isinstance(text := getattr(obj, "__self__", None), str):
            obj = partial(_METHODS[name], text)
        result = super().call(context, obj, *args, **kwargs)
        budget.take_made(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse `format` of a text that asks for much, or hides in braces how much."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            for _, _, spec, _ in Formatter().parse(value.__self__):
                if spec and "{" in spec:
                    raise TemplateError("a format takes its width from an argument; allowed: widths that it says")
                _check_widths(map(int, re.findall(r"\d+", spec or "")))
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse a product or power that is far larger than its operands, and too long a sum or format."""
        if operator != "+":
            _check_operands(operator, left, right)
        result = self.binop_table[operator](left, right)
        _BUDGET.get().take_made(result)
        return result


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        _check_percent_widths(left)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * right > _MAX_BITS:
            raise TemplateError(f"a power has more than {_MAX_BITS} bits")
    elif operator == "*" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TemplateError(f"a product has more than {_MAX_BITS} bits")
    elif operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if hasattr(repeated, "__len__") and isinstance(times, int) and len(repeated) * times > MAX_CHARS:
                raise TemplateError(f"a value is repeated {times} times; allowed: {MAX_CHARS} characters or items")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _BUDGET.get()
    for item in items:
        budget.take_turn()
        yield item


def _bounded(name: str, template_filter: Callable[..., Any]) -> Callable[..., Any]:
    has_width = name in _WITH_WIDTH

    @wraps(template_filter)  # with the mark that says what jinja passes before the value
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.take_turn()
        if has_width:
            _check_widths(chain(args[1:], kwargs.values()))
        result = template_filter(*args, **kwargs)
        budget.take_made(result)
        return result

    return bounded


def _check_widths(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, int) and value > _MAX_WIDTH:
            raise TemplateError(f"a width is {value}; allowed: at most {_MAX_WIDTH}")


def _check_percent_widths(text: str) -> None:
    for widths in _PERCENT_WIDTH.findall(text.replace("%%", "")):
        if "*" in widths:
            raise TemplateError("a format takes its width from an argument; allowed: widths that it says")
        _check_widths(int(width) for width in widths if width)


def _joined(separator: str, parts: Iterable[str]) -> str:
    parts = list(parts)
    _BUDGET.get().take(len(separator) * len(parts) + sum(map(len, parts)))
    return separator.join(parts)


def _joined_as_text(parts: Iterable[object]) -> str:
    return _joined("", map(str, parts))


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return _joined(str(d), map(str, value))


def _replaced(text: object, old: object, new: object, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    _BUDGET.get().take(text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _formatted(text: object, *args: object, **kwargs: object) -> str:
    _check_percent_widths(str(text))
    return str(text) % (kwargs or args)


_METHODS: Mapping[str, Callable[..., str]] = {"join": _joined, "replace": _replaced}
"""Methods of texts that stand in for Python's."""


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
