"""Wire messages to the router's values and back, and the check of every value that a client may set.

What depends on a model (prompt length, token ids in range) is checked here too, from numbers given as arguments.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from weft.limits import MAX_LOGPROBS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_TEMPERATURE
from weft.v1 import inference_pb2 as pb

from router.call import ChatMessage, Conversation, GenerateCall, GenerateDelta
from router.errors import ContextLengthError, InvalidRequestError
from router.message_content import template_role

MAX_REQUEST_ID_CHARS = 128

_MAX_CACHE_SALT_CHARS = 1024
_MAX_MESSAGES = 8192
_MAX_TEMPLATE_KWARGS_BYTES = 16 << 10

_ROLES = ("system", "user", "assistant", "tool")
"""What a message's role may be; a chat template may take fewer."""

_DEFAULTS: Mapping[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
}


def generate_call(request: pb.GenerateRequest, *, timeout_s: float | None) -> GenerateCall:
    """Return what a wire request asks for. Raises InvalidRequestError when it holds no prompt."""
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise InvalidRequestError("the request has no prompt; allowed: text, chat or token_ids", field="prompt")
    return GenerateCall(
        model=request.model,
        text=request.text if prompt == "text" else None,
        token_ids=request.token_ids.ids if prompt == "token_ids" else None,
        chat=conversation(request.chat) if prompt == "chat" else None,
        sampling=request.sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        request_id=request.request_id,
        timeout_s=timeout_s,
        target_ttft_s=request.target_ttft_s if request.HasField("target_ttft_s") else None,
        target_tpot_s=request.target_tpot_s if request.HasField("target_tpot_s") else None,
    )


def conversation(chat: pb.ChatPrompt) -> Conversation:
    """Return a wire conversation. Raises InvalidRequestError when it is too long, or its variables are no object."""
    check_num_messages(len(chat.messages))  # before each of them is looked at: 4 MiB hold 2 million empty ones
    return Conversation(
        messages=tuple(_message(each) for each in chat.messages),
        template_kwargs=_read_template_kwargs(chat.chat_template_kwargs_json),
        add_generation_prompt=opens_turn(
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
            continues=chat.continue_final_message,
        ),
        continue_final_message=chat.continue_final_message,
    )


def _message(message: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=template_role(message.role),
        content=message.content,
        name=message.name,
        reasoning_content=message.reasoning_content,
        tool_call_id=message.tool_call_id,
    )


def opens_turn(add_generation_prompt: bool | None, *, continues: bool) -> bool:
    """Return whether a prompt opens the assistant's turn; None: the client does not say. Raises InvalidRequestError."""
    if add_generation_prompt and continues:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message are both true; allowed: one of them",
            field="continue_final_message",
        )
    return not continues if add_generation_prompt is None else add_generation_prompt


def _read_template_kwargs(text: str) -> dict[str, Any]:
    if not text:
        return {}
    check_template_kwargs_size(len(text.encode()))
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(
            f'chat_template_kwargs_json: {error}; allowed: a JSON object, such as {{"enable_thinking": false}}',
            field="chat_template_kwargs",
        ) from error


def generate_response(delta: GenerateDelta) -> pb.GenerateResponse:
    """Return the wire form of a delta."""
    return pb.GenerateResponse(
        request_id=delta.request_id,
        model=delta.model,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        finished=delta.finished,
    )


def check_call(call: GenerateCall) -> None:
    """Check what can be checked before the prompt's tokens are known. Raises InvalidRequestError."""
    num_prompts = sum(prompt is not None for prompt in (call.text, call.token_ids, call.chat))
    if num_prompts != 1:
        raise InvalidRequestError(
            f"the request has {num_prompts} prompts; allowed: one of text, chat and token_ids", field="prompt"
        )
    check_request_id("request_id", call.request_id)
    if len(call.cache_salt) > _MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt has {len(call.cache_salt)} characters; allowed: at most {_MAX_CACHE_SALT_CHARS}",
            field="cache_salt",
        )
    if call.chat is not None:
        check_chat(call.chat)
    elif not (call.text or call.token_ids):
        raise InvalidRequestError("the prompt is empty; allowed: at least one token", field="prompt")
    for name, target_s in (("target_ttft_s", call.target_ttft_s), ("target_tpot_s", call.target_tpot_s)):
        if target_s is not None and not 0 < target_s < math.inf:
            raise _refused(name, target_s, "a finite number, more than 0")
    check_sampling(call.sampling)


def check_request_id(name: str, request_id: str, max_chars: int = MAX_REQUEST_ID_CHARS) -> None:
    """Check the id that a client chose; `name` is what it calls that. Raises InvalidRequestError."""
    if len(request_id) > max_chars:
        raise InvalidRequestError(f"{name} has {len(request_id)} characters; allowed: at most {max_chars}", field=name)
    if not request_id.isprintable():  # it is in the log as it is
        raise InvalidRequestError(f"{name} holds a line break, or another character that cannot be printed", field=name)


def check_chat(chat: Conversation) -> None:
    """Check the form of a conversation; in which order roles may come, the model's chat template says."""
    if not chat.messages:
        raise InvalidRequestError("messages is empty; allowed: at least one message", field="messages")
    for index, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            allowed = ", ".join(map(repr, _ROLES))
            raise InvalidRequestError(
                f"messages[{index}].role is {message.role!r}; allowed: {allowed}", field="messages"
            )


def check_num_messages(num_messages: int) -> None:
    """Check the length of a conversation. Raises InvalidRequestError."""
    if num_messages > _MAX_MESSAGES:
        raise InvalidRequestError(
            f"the chat has {num_messages} messages; allowed: at most {_MAX_MESSAGES}", field="messages"
        )


def check_template_kwargs_size(num_bytes: int) -> None:
    """Check how long the JSON of a chat template's variables is. Raises InvalidRequestError."""
    if num_bytes > _MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequestError(
            f"chat_template_kwargs has {num_bytes} bytes; allowed: at most {_MAX_TEMPLATE_KWARGS_BYTES}",
            field="chat_template_kwargs",
        )


def check_sampling(sampling: pb.SamplingParams) -> None:
    """Check every value that the client set. Raises InvalidRequestError."""
    _check(sampling, "temperature", 0, MAX_TEMPERATURE, f"0 to {MAX_TEMPERATURE:g}")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise _refused("top_p", sampling.top_p, "more than 0, at most 1")
    _check(sampling, "top_k", -1, math.inf, "at least 1, or 0 or -1 for off")
    _check(sampling, "min_p", 0, 1, "0 to 1")
    if sampling.HasField("repetition_penalty") and not 0 < sampling.repetition_penalty < math.inf:
        raise _refused("repetition_penalty", sampling.repetition_penalty, "a finite number, more than 0")
    _check(sampling, "presence_penalty", -2, 2, "-2 to 2")
    _check(sampling, "frequency_penalty", -2, 2, "-2 to 2")
    _check(sampling, "max_tokens", 1, math.inf, "at least 1")
    _check(sampling, "min_tokens", 0, math.inf, "at least 0")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise _refused("min_tokens", sampling.min_tokens, f"at most max_tokens ({sampling.max_tokens})")
    _check(sampling, "logprobs", 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
    check_stop(sampling.stop, sampling.stop_token_ids)


def check_stop(stop: Sequence[str], stop_token_ids: Sequence[int]) -> None:
    """Check what ends an answer. Raises InvalidRequestError."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(stop)} strings; allowed: at most {MAX_STOP_STRINGS}", field="stop")
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(stop_token_ids)} ids; allowed: at most {MAX_STOP_TOKEN_IDS}",
            field="stop_token_ids",
        )
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"stop holds a string of {len(text)} characters; allowed: 1 to {MAX_STOP_STRING_CHARS}", field="stop"
            )


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Check that every id is one of the model's. Raises InvalidRequestError that names `name` and the first bad id."""
    if token_ids and max(token_ids) >= vocab_size:
        position, token_id = next((i, t) for i, t in enumerate(token_ids) if t >= vocab_size)
        raise InvalidRequestError(
            f"{name}[{position}] is {token_id}; allowed: 0 to {vocab_size - 1}, the model's vocabulary", field=name
        )


def check_num_token_ids(num_token_ids: int, max_context: int) -> None:
    """Check that ids to make text of could be one sequence. Raises InvalidRequestError; 0: the context is not known."""
    if 0 < max_context < num_token_ids:  # each of a message's million ids may stand for 128 characters
        raise InvalidRequestError(
            f"there are {num_token_ids} token_ids; allowed: at most {max_context}, the model's context",
            field="token_ids",
        )


def check_length(num_tokens: int, sampling: pb.SamplingParams, max_context: int, *, prompt_field: str) -> None:
    """Check that prompt and output fit into the model's context. Raises InvalidRequestError, ContextLengthError."""
    if num_tokens == 0:
        raise InvalidRequestError("the prompt is empty; allowed: at least one token", field=prompt_field)
    if num_tokens >= max_context:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens; allowed: at most {max_context - 1}, so that one more fits: "
            f"{_longest(max_context)}",
            field=prompt_field,
        )
    if sampling.HasField("max_tokens") and num_tokens + sampling.max_tokens > max_context:
        raise ContextLengthError(
            f"max_tokens is {sampling.max_tokens} after a prompt of {num_tokens} tokens; allowed: at most "
            f"{max_context - num_tokens}: {_longest(max_context)}",
            field="max_tokens",
        )
    if sampling.min_tokens > max_context - num_tokens:
        raise ContextLengthError(
            f"min_tokens is {sampling.min_tokens} after a prompt of {num_tokens} tokens; allowed: at most "
            f"{max_context - num_tokens}: {_longest(max_context)}",
            field="min_tokens",
        )


def _longest(max_context: int) -> str:
    """Say how long prompt and answer may be, in OpenAI's words: some clients know by them why they were refused."""
    return f"this model's maximum context length is {max_context} tokens"


def complete_sampling(
    sampling: pb.SamplingParams, model_defaults: Mapping[str, float | int], *, max_tokens: int, seed: int
) -> pb.SamplingParams:
    """Return a copy with every field set that has a default.

    Args:
        sampling: checked before.
        model_defaults: of the model's generation_config; they come before the protocol's.
        max_tokens: for a request that sets none.
        seed: drawn for this request.
    """
    complete = pb.SamplingParams()
    for defaults in (_DEFAULTS, model_defaults):
        for name, value in defaults.items():
            setattr(complete, name, value)
    complete.max_tokens = max(max_tokens, sampling.min_tokens)
    complete.seed = seed
    complete.MergeFrom(sampling)
    complete.top_k = max(complete.top_k, 0)
    if not sampling.HasField("min_tokens"):  # the client's own values were checked against each other
        complete.min_tokens = min(complete.min_tokens, complete.max_tokens)
    return complete


def _check(sampling: pb.SamplingParams, name: str, low: float, high: float, allowed: str) -> None:
    if not sampling.HasField(name):  # type: ignore[arg-type]
        return
    value = getattr(sampling, name)
    if not low <= value <= high or math.isinf(value):  # a NaN fails the comparison
        raise _refused(name, value, allowed)


def _refused(name: str, value: float, allowed: str) -> InvalidRequestError:
    # A wire float of 0.7 reads back as 0.699999988; seven digits are what it holds.
    seen = float(f"{value:.7g}") if isinstance(value, float) else value
    return InvalidRequestError(f"{name} is {seen}; allowed: {allowed}", field=name)
