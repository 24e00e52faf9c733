"""A model's chat template: from messages to the prompt text. Knows nothing of token ids; tokenizer.py encodes the text.

The template comes with the model's weights, so the operator has chosen it as much as the weights. All the same it runs
in a sandbox (template_sandbox.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from weft.tokenizer.declared import read_json_object

from router.call import ChatMessage, Conversation
from router.errors import InvalidRequestError, ModelFilesError
from router.template_sandbox import SandboxedTemplate

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
"""Files that hold a template, where tokenizer_config.json does not."""

_DEFAULT = "default"

_MARK = "\ue000the answer continues here\ue000"
"""Stands behind a message that is continued while it is rendered, and tells where the prompt ends."""

_PROBE = "a message to see whether it is shown"


class ChatTemplate:
    """Renders conversations as the model was trained to see them. Safe to use from several threads."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """Compile `source`.

        Args:
            source: Jinja text.
            special_tokens: what the template may call by name: "bos_token", "eos_token" ...
            now: the clock behind the templates' `strftime_now`.

        Raises:
            Exception: the text is not a template; Python may refuse one that jinja does not.
        """
        self._template = SandboxedTemplate(source, now=now)
        self._special_tokens = dict(special_tokens)
        self._reads_parts = not self._shows(_PROBE) and self._shows(_as_parts(_PROBE))

    def render(self, chat: Conversation) -> str:
        """Return the prompt text: up to and with what opens the assistant's turn, or where the conversation has it end.

        Its form was checked before (convert.py).

        Raises:
            InvalidRequestError: variables that are the template's own, or the template refuses the conversation, or
                leaves out the message that is to be continued.
        """
        messages = [*chat.messages]
        if chat.continue_final_message:  # the blank shows whether the template trims messages
            messages[-1] = replace(messages[-1], content=f"{messages[-1].content}{_MARK} ")
        own = self._own_variables(
            [self._as_dict(message) for message in messages], add_generation_prompt=chat.add_generation_prompt
        )
        if taken := sorted(chat.template_kwargs.keys() & (own.keys() | self._template.names)):
            raise InvalidRequestError(
                f"chat_template_kwargs sets {', '.join(taken)}; allowed: names that are not the template's own",
                field="chat_template_kwargs",
            )
        try:
            text = self._template.render({**chat.template_kwargs, **own})
            text.encode()  # what is no Unicode, the tokenizer refuses
        except TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {error}", field="messages"
            ) from error
        except Exception as error:  # the template is foreign code: what it computes may fail in any way
            raise InvalidRequestError(
                f"the model's chat template fails on this conversation: {type(error).__name__}: {error}",
                field="messages",
            ) from error
        return _cut(text) if chat.continue_final_message else text

    def _own_variables(self, messages: list[dict[str, object]], *, add_generation_prompt: bool) -> dict[str, object]:
        return {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _as_dict(self, message: ChatMessage) -> dict[str, object]:
        content = _as_parts(message.content) if self._reads_parts else message.content
        fields: dict[str, object] = {"role": message.role, "content": content}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if value := getattr(message, name):
                fields[name] = value
        if message.reasoning_content:
            fields["thinking"] = message.reasoning_content  # as the template of gpt-oss calls it
        return fields

    def _shows(self, content: object) -> bool:
        """Return whether the template writes the content of a user's message, given in this form."""
        own = self._own_variables([{"role": "user", "content": content}], add_generation_prompt=True)
        try:
            return _PROBE in self._template.render(own)
        except Exception:  # as in `render`
            return False


def _cut(text: str) -> str:
    """Return what is before the last mark, without other marks, and trimmed where the template trims the message."""
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequestError(
            "continue_final_message is true, and the model's chat template does not show the last message; "
            "allowed: a last message that it shows",
            field="continue_final_message",
        )
    before = before.replace(f"{_MARK} ", "").replace(_MARK, "")  # of a template that shows the message twice
    return before if after.startswith(" ") else before.rstrip()


def load_chat_template(
    folder: Path, config: Mapping[str, Any], *, special_tokens: Mapping[str, str], now: Callable[[], datetime]
) -> ChatTemplate | None:
    """Find and compile a model's template.

    It is chat_template.jinja, else `chat_template` of tokenizer_config.json, else that of chat_template.json, where the
    processors of models with images keep it.

    Args:
        folder: the model's folder.
        config: its tokenizer_config.json.
        special_tokens: see ChatTemplate.
        now: see ChatTemplate.

    Returns:
        The template, or None where the model has none.

    Raises:
        ModelFilesError, TokenizerError: there is one, and it is broken.
    """
    source, origin = _find_source(folder, config)
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens=special_tokens, now=now)
    except Exception as error:  # jinja makes Python of it, which refuses more than jinja does
        raise ModelFilesError(f"{origin} does not compile: {type(error).__name__}: {error}") from error


def _find_source(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the text, None where there is none, and where it was found."""
    if (file := folder / "chat_template.jinja").is_file():
        try:
            return file.read_text(encoding="utf-8"), str(file)
        except ValueError as error:
            raise ModelFilesError(f"{file} is not UTF-8: {error}") from error
    origin = f"chat_template of {folder / 'tokenizer_config.json'}"
    source = _choose(config.get("chat_template"), origin)
    if source is None and (file := folder / "chat_template.json").is_file():
        origin = f"chat_template of {file}"
        source = _choose(read_json_object(file).get("chat_template"), origin)
    return source, origin


def _choose(value: object, origin: str) -> str | None:
    """Return the template of an entry: the text itself, or the one called "default" of several named ones.

    Another one is usually called "tool_use", for conversations with tools; requests have none.
    """
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
        case dict():
            named = {str(name): str(template) for name, template in value.items()}
        case _:
            raise ModelFilesError(f"{origin} is a {type(value).__name__}; allowed: text, or named templates")
    if _DEFAULT not in named:
        raise ModelFilesError(f"{origin} names {sorted(named)}; one of them must be {_DEFAULT!r}")
    return named[_DEFAULT]


def _as_parts(text: str) -> list[dict[str, str]]:
    """Return a content as templates of models with images read it, which show nothing of a string."""
    return [{"type": "text", "text": text}]
