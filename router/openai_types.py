"""The OpenAI-compatible requests: what may be in them, and the calls they become. Values are checked by the dispatcher.

What is accepted follows what clients of open model servers send: the OpenAI fields, and the sampling fields beyond them
that `SamplingParams` has. A field that would change the output and that Weft does not serve yet is refused, never
dropped (openai_fields.py); fields that only label a request, and fields that nobody knows, change nothing.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from weft.limits import MAX_LOGPROBS
from weft.v1 import inference_pb2 as pb

from router.call import ChatMessage, Conversation, GenerateCall
from router.convert import check_num_messages, check_stop, check_template_kwargs_size, opens_turn
from router.errors import InvalidRequestError
from router.message_content import content_text, template_role
from router.openai_fields import NULL, is_set, read_json, refuse_unserved

MAX_CHOICES = 128
"""Choices of one HTTP request: prompts times n."""

_SEED_RANGE = 2**64
_RANDOM_SEED = -1
"""What clients of open model servers send for none."""

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""A variable of the chat template too, which comes before that of `chat_template_kwargs`."""

_MAX_PARTS = 8192
"""Parts of all contents of a conversation together: the million that a body may hold took 0.3 s, in which nobody is
served."""

R = TypeVar("R", "CompletionRequest", "ChatCompletionRequest")


class StreamOptions(Struct, kw_only=True):
    """`stream_options` of a request."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Message(Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    tool_call_id: str | None = None
    tool_calls: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    prefix: bool | None = None
    """Other services continue a final message that has this; here `continue_final_message` says so."""
    partial: bool | None = None
    """Another name of `prefix`."""


class GenerationRequest(Struct, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    n: NumChoices | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    # Beyond OpenAI's own
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    target_ttft_s: float | None = None
    target_tpot_s: float | None = None
    request_id: str | None = None
    """Counts where the header X-Request-Id is not set."""

    @property
    def num_choices(self) -> int:
        """`n`, with its default."""
        return 1 if self.n is None else self.n

    @property
    def max_tokens_name(self) -> str:
        """What the client calls the field `max_tokens`."""
        return "max_tokens"

    @property
    def echoes(self) -> bool:
        """Whether each choice begins with its prompt."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def include_usage_so_far(self) -> bool:
        """Whether every chunk of such a stream holds the usage of its choice until then."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def _sampling(self) -> pb.SamplingParams:
        sampling = pb.SamplingParams()
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                setattr(sampling, name, value)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        stop_token_ids = self.stop_token_ids or []
        check_stop(stop, stop_token_ids)  # before each choice has a copy: those of 4 MiB took 3 GB
        sampling.stop.extend(stop)
        sampling.stop_token_ids.extend(stop_token_ids)
        return sampling

    def _check_num_choices(self, num_prompts: int) -> None:
        num_choices = num_prompts * self.num_choices
        if num_choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n={self.num_choices} make {num_choices} choices; "
                f"allowed: at most {MAX_CHOICES}",
                field="n",
            )

    def _expand(
        self, prompts: list[dict[str, Any]], sampling: pb.SamplingParams, response_id: str
    ) -> Iterator[GenerateCall]:
        """Yield `n` calls for each prompt; with a seed, choice i of a prompt has the seed + i."""
        seed = None if self.seed == _RANDOM_SEED else self.seed
        if seed is not None and not -_SEED_RANGE // 2 <= seed < _SEED_RANGE:
            raise InvalidRequestError(f"seed is {seed}; allowed: an integer of 64 bits", field="seed")
        for prompt_index, prompt in enumerate(prompts):
            for choice in range(self.num_choices):
                own = pb.SamplingParams()
                own.CopyFrom(sampling)
                if seed is not None:
                    own.seed = (seed + choice) % _SEED_RANGE
                yield GenerateCall(
                    model=self.model or "",
                    sampling=own,
                    priority=self.priority or 0,
                    cache_salt=self.cache_salt or "",
                    target_ttft_s=self.target_ttft_s,
                    target_tpot_s=self.target_tpot_s,
                    request_id=f"{response_id}-{prompt_index * self.num_choices + choice}",
                    counts_prompt=choice == 0,
                    **prompt,
                )


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


_PROMPTS = "a string, a list of strings, token ids, or a list of token id lists"


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: msgspec.Raw
    """A string, a list of strings, token ids, or a list of token id lists."""
    max_tokens: Int32 | None = 16
    """An explicit null: what is left of the model's context."""
    logprobs: Int32 | None = None
    echo: bool | None = False
    """Whether the answer's text begins with the prompt's."""

    @property
    def echoes(self) -> bool:
        """See GenerationRequest."""
        return bool(self.echo)

    def calls(self, response_id: str) -> tuple[GenerateCall, ...]:
        """Return a call for each choice, in the order of their indices; choices of one prompt lie side by side."""
        sampling = self._sampling()
        if self.max_tokens is not None:
            sampling.max_tokens = self.max_tokens
        if self.logprobs is not None:
            if self.echo:
                raise InvalidRequestError(
                    f"echo is true and logprobs is {self.logprobs}, which would be those of the prompt too and are not "
                    "supported yet; allowed: echo without logprobs",
                    field="echo",
                )
            sampling.logprobs = self.logprobs
        return tuple(self._expand(self._prompts(), sampling, response_id))

    def _prompts(self) -> list[dict[str, Any]]:
        """Return the prompt fields of GenerateCall for each prompt."""
        first = re.match(rb"(\[?)\s*(.?)", self.prompt, re.DOTALL)
        assert first is not None, "it matches whatever there is"
        prompts: list[dict[str, Any]]
        match first[1] + first[2]:
            case b"[]":
                raise InvalidRequestError(f"prompt is an empty list; allowed: {_PROMPTS}", field="prompt")
            case b"[[":
                self._check_num_choices(bytes(self.prompt).count(b"[") - 1)  # to make a million lists takes 0.6 s
                prompts = [{"token_ids": ids} for ids in read_json(self.prompt, list[list[TokenId]], "prompt")]
            case b'["':
                self._check_num_choices(_least_strings(bytes(self.prompt)))
                texts = read_json(self.prompt, list[str], "prompt")
                self._check_num_choices(len(texts))
                prompts = [{"text": text} for text in texts]
            case begin if begin.startswith(b"["):
                prompts = [{"token_ids": read_json(self.prompt, list[TokenId], "prompt")}]
            case b'"':
                prompts = [{"text": read_json(self.prompt, str, "prompt")}]
            case _:
                seen = bytes(self.prompt)[:40].decode(errors="replace")
                raise InvalidRequestError(f"prompt is {seen}; allowed: {_PROMPTS}", field="prompt")
        return prompts


def _least_strings(json: bytes) -> int:
    """Return how many there are in JSON's text at least; exactly, where none holds a quote or ends with a backslash."""
    return (json.count(b'"') - json.count(b'\\"') + 1) // 2


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = False
    top_logprobs: Int32 | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: msgspec.Raw = NULL
    add_generation_prompt: bool | None = None
    """null: true, unless the final message is continued."""
    continue_final_message: bool | None = False

    @property
    def max_tokens_name(self) -> str:
        """See GenerationRequest."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def calls(self, response_id: str) -> tuple[GenerateCall, ...]:
        """Return a call for each choice, in the order of their indices."""
        sampling = self._sampling()
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if max_tokens is not None:
            sampling.max_tokens = max_tokens
        if self.logprobs:
            sampling.logprobs = self._num_top_logprobs()
        elif self.top_logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {self.top_logprobs} and logprobs is not true; allowed: top_logprobs with logprobs",
                field="top_logprobs",
            )
        return tuple(self._expand([{"chat": _to_chat(self)}], sampling, response_id))

    def _num_top_logprobs(self) -> int:
        number = self.top_logprobs or 0
        if not 0 <= number <= MAX_LOGPROBS:  # checked here: the call has another name for it
            raise InvalidRequestError(f"top_logprobs is {number}; allowed: 0 to {MAX_LOGPROBS}", field="top_logprobs")
        return number


class TokenizeRequest(Struct, kw_only=True):
    """The body of POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: msgspec.Raw = NULL
    add_generation_prompt: bool | None = None
    """null: true, unless the final message is continued."""
    continue_final_message: bool | None = False

    @property
    def content(self) -> str | Conversation:
        """What is to become tokens."""
        if (self.prompt is None) == (self.messages is None):
            seen = "neither" if self.prompt is None else "both"
            raise InvalidRequestError(f"{seen} of prompt and messages is set; allowed: one of them", field="prompt")
        if self.prompt is not None:
            return self.prompt
        if self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens is true with messages; allowed: false, the chat template adds them",
                field="add_special_tokens",
            )
        return _to_chat(self)


class DetokenizeRequest(Struct, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


def parse_tokenize_request(body: bytes) -> TokenizeRequest:
    """Return the request in a JSON body. Raises InvalidRequestError as `parse_request`."""
    request = read_json(body, TokenizeRequest)
    refuse_unserved(body, add_special_tokens=(None, True, False), has_messages=request.messages is not None)
    return request


def parse_detokenize_request(body: bytes) -> DetokenizeRequest:
    """Return the request in a JSON body. Raises InvalidRequestError as `parse_request`."""
    return read_json(body, DetokenizeRequest)


def parse_request(body: bytes, kind: type[R]) -> R:
    """Return the request in a JSON body.

    Raises:
        InvalidRequestError: the body is not JSON, a field has the wrong type, or asks for something not served.
    """
    request = read_json(body, kind)
    has_messages = isinstance(request, ChatCompletionRequest)
    refuse_unserved(body, add_special_tokens=(None, not has_messages), has_messages=has_messages, n=request.n)
    if (request.include_usage or request.include_usage_so_far) and not request.stream:
        raise InvalidRequestError("stream_options is set and stream is not true; allowed: both", field="stream_options")
    return request


def _to_chat(asked: ChatCompletionRequest | TokenizeRequest) -> Conversation:
    messages = asked.messages or []
    check_num_messages(len(messages))
    _check_num_parts(messages)
    written = asked.chat_template_kwargs
    check_template_kwargs_size(len(written))
    template_kwargs = read_json(written, dict[str, Any], "chat_template_kwargs") if is_set(written) else {}
    if asked.reasoning_effort is not None:
        template_kwargs["reasoning_effort"] = asked.reasoning_effort
    continues = bool(asked.continue_final_message)
    return Conversation(
        messages=tuple(_to_chat_message(index, message) for index, message in enumerate(messages)),
        template_kwargs=template_kwargs,
        add_generation_prompt=opens_turn(asked.add_generation_prompt, continues=continues),
        continue_final_message=continues,
    )


def _check_num_parts(messages: Sequence[Message]) -> None:
    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if num_parts > _MAX_PARTS:
        raise InvalidRequestError(
            f"the chat has {num_parts} parts of contents; allowed: at most {_MAX_PARTS}", field="messages"
        )


def _to_chat_message(index: int, message: Message) -> ChatMessage:
    if is_set(message.tool_calls) or is_set(message.function_call):
        raise InvalidRequestError(f"messages[{index}] holds tool calls, which are not supported yet", field="messages")
    for name, is_continued in (("prefix", message.prefix), ("partial", message.partial)):
        if is_continued:
            raise InvalidRequestError(
                f"messages[{index}].{name} is true; allowed: continue_final_message beside messages", field="messages"
            )
    return ChatMessage(
        role=template_role(message.role),
        content=content_text(message.content, role=message.role, place=f"messages[{index}].content"),
        name=message.name or "",
        reasoning_content=message.reasoning_content or message.reasoning or "",
        tool_call_id=message.tool_call_id or "",
    )
