"""What is in the body of an OpenAI-compatible request: JSON to values, with errors that name the field at fault.

Fields that are not served, or not with every value, are listed here and refused; those that are, openai_types.py has.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from router.errors import InvalidRequestError

T = TypeVar("T")

NULL = msgspec.Raw(b"null")
"""Default of fields: one that is left out reads as null."""


def read_json(data: bytes | msgspec.Raw, kind: type[T], field: str = "") -> T:
    """Return what a body holds, or one of its fields. Raises InvalidRequestError.

    As with other model servers, a value may be written otherwise that can be meant in one way only: 2.0 or "2" for 2.
    """
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.ValidationError as error:
        message, at_fault = _explain(str(error), field)
        raise InvalidRequestError(message, field=at_fault) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}; allowed: a JSON object") from error


def _explain(message: str, field: str) -> tuple[str, str | None]:
    """Turn "Expected `int`, got `str` - at `$.n`" into a sentence that begins with the field, and that field."""
    problem, _, place = message.partition(" - at `")
    path = (field + place.rstrip("`").removeprefix("$")).removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", problem)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return f"{path} is missing; it is required", re.split(r"[.\[]", path)[0]
    if not path or path == "[...]":  # msgspec's name for a place that it does not know
        return f"the body is not what is allowed: {problem}", None
    return f"{path} has a value that is not allowed: {problem}", re.split(r"[.\[]", path)[0]


_UNSERVED: Mapping[str, str] = {
    "tools": "tool calls are not supported yet",
    "functions": "function calls are not supported yet",
    "logit_bias": "logit_bias is not supported yet",
    "suffix": "insertion is not supported",
    "use_beam_search": "beam search is not supported",
    "prompt_logprobs": "log-probabilities of the prompt are not supported yet",
    "guided_json": "guided decoding is not supported yet",
    "guided_regex": "guided decoding is not supported yet",
    "guided_choice": "guided decoding is not supported yet",
    "guided_grammar": "guided decoding is not supported yet",
    "structured_outputs": "guided decoding is not supported yet",
    "regex": "guided decoding is not supported yet",
    "ebnf": "guided decoding is not supported yet",
    "json_schema": "guided decoding is not supported yet",
    "guided_json_object": "guided decoding is not supported yet",
    "guided_whitespace_pattern": "guided decoding is not supported yet",
    "grammar": "guided decoding is not supported yet",
    "structural_tag": "guided decoding is not supported yet",
    "json_object": "guided decoding is not supported yet",
    "choice": "guided decoding is not supported yet",
    "stop_regex": "only strings and token ids stop a text",
    "no_stop_trim": "include_stop_str_in_output keeps what stops a text",
    "thinking_token_budget": "thinking is not bounded apart from the answer",
    "thinking_budget": "thinking is not bounded apart from the answer",
    "thinking": "a chat template that has thoughts to turn on or off has a variable for it, in chat_template_kwargs",
    "reasoning": "how much a model thinks is reasoning_effort, or a variable in chat_template_kwargs",
    "repetition_detection": "repetition_detection is not supported",
    "watermarking": "answers have no watermark",
    "lora_path": "adapters are not supported",
    "no_repeat_ngram_size": "no_repeat_ngram_size is not supported",
    "audio": "only text is generated",
    "mm_processor_kwargs": "only text is taken",
    "prediction": "predicted outputs are not supported",
    "prompt_embeds": "prompts are text or token ids",
    "truncate_prompt_tokens": "prompts are not truncated; send what fits into the context",
    "allowed_token_ids": "allowed_token_ids is not supported yet",
    "bad_words": "bad_words is not supported yet",
    "suppress_tokens": "suppress_tokens is not supported yet",
    "logits_processors": "logits processors are not supported",
    "custom_logit_processor": "logits processors are not supported",
    "logprob_token_ids": "log-probabilities are those of the chosen and the likeliest tokens",
    "prompt_logprob_token_ids": "log-probabilities of the prompt are not supported yet",
    "return_hidden_states": "hidden states are not returned",
    "chat_template": "the model's own chat template is used",
    "documents": "documents are not passed to the chat template",
    "return_token_ids": "token ids are returned over gRPC only",
    "return_tokens_as_token_ids": "token ids are returned over gRPC only",
    "return_token_strs": "only the ids of tokens are returned",
    "return_prompt_text": "the prompt of a conversation is not returned",
    "extra_body": "what is in it goes into the body itself, beside the other fields",
    "nvext": "what is in it goes into the body itself, beside the other fields",
    "vllm_xargs": "there are no extensions that read it",
}
"""Fields that are refused when they ask for something, and why."""


_UNSERVED_SAMPLING: Mapping[str, int] = {
    "typical_p": 1,
    "mirostat": 0,
    "xtc_probability": 0,
    "dry_multiplier": 0,
    "repeat_penalty": 1,
    "top_a": 0,
    "eta_cutoff": 0,
    "epsilon_cutoff": 0,
    "tfs": 1,
    "tfs_z": 1,
}
"""Numbers that are not served, and those that turn them off."""

_ELSEWHERE: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "input_ids": "prompt",
    "enable_thinking": "chat_template_kwargs with enable_thinking in it",
    "web_search_options": "none, for there is no web search",
}
"""Fields that are refused with any value, even an empty one, and those that say the same."""

_LIMITED = (
    *_UNSERVED_SAMPLING,
    "tool_choice",
    "function_call",
    "modalities",
    "add_special_tokens",
    "response_format",
    "best_of",
    "include_reasoning",
    "verbosity",
)
"""Fields of which some values are served."""

_OF_CONVERSATIONS: Mapping[str, str] = {
    "chat_template_kwargs": "with messages",
    "continue_final_message": "with messages",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs, which is their number",
}
"""Fields that a prompt without messages has not, and what it has."""

_OF_TEXTS: Mapping[str, str] = {"echo": "with prompt"}
"""Fields that a conversation has not."""

_FLAGS = (
    "use_beam_search",
    "no_stop_trim",
    "return_hidden_states",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_token_strs",
    "return_prompt_text",
    "add_special_tokens",
    "echo",
    "include_reasoning",
)
"""Fields that are true or false, in whatever way that is written."""

_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(_FLAGS, bool | None),
    **dict.fromkeys(_UNSERVED_SAMPLING, int | float | None),
    "best_of": int | None,
}

_Others = msgspec.defstruct(
    "_Others",
    [
        (name, _KINDS[name], None) if name in _KINDS else (name, msgspec.Raw, NULL)
        for name in dict.fromkeys((*_UNSERVED, *_LIMITED, *_ELSEWHERE, *_OF_CONVERSATIONS, *_OF_TEXTS))
    ],
    kw_only=True,
)
"""Most of these fields as they were written: a value of megabytes is not read. Fields that nobody knows are skipped."""

_MAX_READ_BYTES = 1024
_UNREAD = "a long value"


def _read_short(written: object) -> object:
    if not isinstance(written, msgspec.Raw):
        return written
    if written is NULL:  # as most are
        return None
    return read_json(written, object) if len(written) <= _MAX_READ_BYTES else _UNREAD


def is_set(written: object) -> bool:
    """Whether a field, as it was written or read, asks for something."""
    value = _read_short(written)
    return value is not None and value is not False and value not in ({}, [], "")


def refuse_unserved(
    body: bytes, *, add_special_tokens: tuple[bool | None, ...], has_messages: bool, n: int | None = None
) -> None:
    """Raise InvalidRequestError where a body asks for something that is not served.

    Args:
        body: of a request.
        add_special_tokens: the values of that field that are served; None: it is left out.
        has_messages: whether it is a conversation.
        n: of the request.
    """
    others = read_json(body, _Others)
    for name, reason in _UNSERVED.items():
        if is_set(getattr(others, name)):
            raise InvalidRequestError(f"{name} is set: {reason}", field=name)
    for name, instead in _ELSEWHERE.items():
        if _read_short(getattr(others, name)) is not None:
            raise InvalidRequestError(f"{name} is set; allowed: {instead}", field=name)
    for name, instead in (_OF_TEXTS if has_messages else _OF_CONVERSATIONS).items():
        if is_set(getattr(others, name)):
            seen = "conversation" if has_messages else "prompt that is no conversation"
            raise InvalidRequestError(f"{name} is set for a {seen}; allowed: {instead}", field=name)
    allowed_values: Mapping[str, tuple[object, ...]] = {
        "tool_choice": (None, "none", "auto"),
        "function_call": (None, "none", "auto"),
        "modalities": (None, [], ["text"]),
        "add_special_tokens": add_special_tokens,
        "response_format": (None, {"type": "text"}),
        "best_of": (None, 1, n),
        "include_reasoning": (None, True),
        "verbosity": (None, "medium"),
        **{name: (None, off) for name, off in _UNSERVED_SAMPLING.items()},
    }
    for name in _LIMITED:
        value, allowed = _read_short(getattr(others, name)), allowed_values[name]
        if value not in allowed:
            seen, *shown = (msgspec.json.encode(each).decode() for each in (value, *allowed) if each is not None)
            raise InvalidRequestError(
                f"{name} is {seen}, which is not supported yet; allowed: {', '.join(dict.fromkeys(shown))}", field=name
            )
