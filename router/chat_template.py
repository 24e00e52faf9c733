"""A model's chat template: from messages to the prompt text. Knows nothing of token ids; tokenizer.py encodes the text.

The template comes with the model's weights, so the operator has chosen it as much as the weights. It runs in jinja2's
immutable sandbox: it can compute and it can spend time, but it cannot reach files, the network or the interpreter.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.call import ChatMessage
from router.errors import InvalidRequestError, ModelFilesError

ROLES = ("system", "user", "assistant", "tool")
"""What a message's role may be; a template may accept fewer."""

_DEFAULT = "default"


class ChatTemplate:
    """Renders conversations as the model was trained to see them. Safe to use from several threads."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """Compile `source`.

        Args:
            source: Jinja text.
            special_tokens: what the template may call by name: "bos_token", "eos_token" ...
            now: the clock behind the templates' `strftime_now`.

        Raises:
            jinja2.TemplateError: the text is not a template.
        """
        self._template = _compile(source, now)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt text, up to and with what opens the assistant's turn.

        Raises:
            InvalidRequestError: no messages, an unknown role, or the template refuses the conversation.
        """
        if not messages:
            raise InvalidRequestError("messages is empty; allowed: at least one message", field="messages")
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                allowed = ", ".join(repr(role) for role in ROLES)
                raise InvalidRequestError(
                    f"messages[{index}].role is {message.role!r}; allowed: {allowed}", field="messages"
                )
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[_as_dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {error}", field="messages"
            ) from error
        except Exception as error:  # the template is foreign code: what it computes may fail in any way
            raise InvalidRequestError(
                f"the model's chat template fails on this conversation: {type(error).__name__}: {error}",
                field="messages",
            ) from error


def load_chat_template(
    folder: Path, config: Mapping[str, Any], *, special_tokens: Mapping[str, str], now: Callable[[], datetime]
) -> ChatTemplate | None:
    """Find and compile a model's template: chat_template.jinja, else `chat_template` of tokenizer_config.json.

    Args:
        folder: the model's folder.
        config: its tokenizer_config.json.
        special_tokens: see ChatTemplate.
        now: see ChatTemplate.

    Returns:
        The template, or None where the model has none.

    Raises:
        ModelFilesError: there is one, and it is broken.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        origin = str(file)
        source: str | None = file.read_text(encoding="utf-8")
    else:
        origin = f"chat_template of {folder / 'tokenizer_config.json'}"
        source = _template_of_config(config.get("chat_template"), origin)
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens=special_tokens, now=now)
    except TemplateError as error:
        raise ModelFilesError(f"{origin} does not compile: {error}") from error


def _template_of_config(value: object, origin: str) -> str | None:
    """Return the template of a config entry: the text itself, or the one called "default" of a list of named ones."""
    match value:
        case None | str():
            return value
        case list():
            try:
                named = {str(entry["name"]): str(entry["template"]) for entry in value}
            except (TypeError, KeyError) as error:
                raise ModelFilesError(
                    f"{origin} is a list with an entry that lacks `name` or `template`; allowed: named templates"
                ) from error
            if _DEFAULT not in named:
                raise ModelFilesError(f"{origin} names {sorted(named)}; one of them must be {_DEFAULT!r}")
            return named[_DEFAULT]
        case _:
            raise ModelFilesError(f"{origin} is a {type(value).__name__}; allowed: text, or a list of named templates")


def _as_dict(message: ChatMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    return fields


def _compile(source: str, now: Callable[[], datetime]) -> Template:
    """Compile with what templates in the field expect to find around them."""

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


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
