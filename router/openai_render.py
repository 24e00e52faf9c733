"""The OpenAI-compatible answers: JSON shapes of completions, chat completions, their chunks, models and errors.

Pure but for the names of tokens, which come from the dispatcher; openai.py sends what is built here.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from weft.v1 import inference_pb2 as pb

from router.call import Dispatch, GenerateCall, GenerateDelta, ModelCard, TokenName, TokenReader
from router.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ReplicaFailedError,
    RouterError,
    UnauthenticatedError,
)
from router.finish_reason import finish_reason
from router.text_pieces import TextPieces

Json = dict[str, Any]

_NUM_LAST_TOKENS = 8
"""So many tokens of a prompt tell in which character it ends, even where some have no text."""

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""

_ERROR_TYPES = {
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")
"""Headers of an answer that say when to try again, in seconds and in milliseconds, or that it is no use to."""


class Choice:
    """One choice of an answer, as it grows."""

    def __init__(self, index: int, sampling: pb.SamplingParams) -> None:
        self.index = index
        self.has_begun = False
        self.text: list[str] = []
        self.logprobs: Json = {}
        """Log-probabilities of the whole choice, in the form of the answer."""
        skips_special = sampling.skip_special_tokens or not sampling.HasField("skip_special_tokens")
        self.pieces = TextPieces(skips_special=skips_special)
        """Makes text of single tokens; has the tokens rendered so far."""
        self.prompt_token_ids: tuple[int, ...] = ()
        self.num_tokens = 0
        """Tokens rendered so far, in a stream."""
        self.finished: pb.Finished | None = None
        self.tokenizer: TokenReader
        """Of its tokens; set by its first delta."""


class Renderer(ABC):
    """Builds one answer, whole or in chunks."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(
        self,
        calls: Sequence[GenerateCall],
        *,
        response_id: str,
        created: int,
        choices_per_prompt: int,
        echoes: bool,
        include_usage: bool,
        include_usage_so_far: bool,
        dispatch: Dispatch,
    ) -> None:
        self._calls = calls
        self._id = response_id
        self._created = created
        self._choices_per_prompt = choices_per_prompt
        self._echoes = echoes
        self._prompt_texts: dict[int, str] = {}  # by the prompt's number
        self._include_usage = include_usage
        self._include_usage_so_far = include_usage_so_far
        self._dispatch = dispatch
        self._choices = [Choice(index, call.sampling) for index, call in enumerate(calls)]
        self._model = ""

    @abstractmethod
    async def chunks(self, index: int, delta: GenerateDelta) -> list[Json]:
        """Return the chunks that tell of one delta of a choice; none where there is nothing to tell yet."""

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> Json: ...

    @abstractmethod
    async def _logprobs(self, choice: Choice, logprobs: Sequence[pb.TokenLogprobs]) -> Json:
        """Return the log-probabilities of the next tokens; those of further ones are added to the ends of its lists."""

    async def add(self, index: int, delta: GenerateDelta) -> None:
        """Keep one delta of a choice for `whole`."""
        choice = self._note(index, delta)
        choice.text.append(await self._beginning(choice) + delta.text)
        if delta.logprobs:  # rendered as they come: those of a whole answer would hold up all streams for a second
            _append(choice.logprobs, await self._logprobs(choice, delta.logprobs))

    def whole(self) -> Json:
        """Return the whole answer, from all deltas added."""
        choices = [self._whole_choice(choice) for choice in self._choices]
        return self._envelope(self.object_name, choices) | {"usage": self._usage()}

    def usage_chunk(self) -> Json | None:
        """Return the chunk that ends a stream with its usage, where it was asked for."""
        if not self._include_usage:
            return None
        return self._envelope(self.chunk_object_name, []) | {"usage": self._usage()}

    def _note(self, index: int, delta: GenerateDelta) -> Choice:
        self._model = delta.model
        choice = self._choices[index]
        choice.finished = delta.finished
        choice.prompt_token_ids = delta.prompt_token_ids
        choice.tokenizer = delta.tokenizer
        return choice

    async def _beginning(self, choice: Choice) -> str:
        """Return what comes before the text of a choice's next delta: before the first its prompt, if echoed."""
        if not self._echoes or choice.has_begun:
            return ""
        choice.has_begun = True
        number = choice.index // self._choices_per_prompt
        if number not in self._prompt_texts:
            call = self._calls[choice.index]
            self._prompt_texts[number] = (
                await self._dispatch.prompt_text(choice.tokenizer, call.token_ids or ())
                if call.text is None
                else call.text
            )
        return self._prompt_texts[number]

    def _chunk(self, choice: Choice, shown: Json) -> Json:
        chunk = self._envelope(self.chunk_object_name, [shown])
        if self._include_usage:
            chunk["usage"] = _usage_so_far(choice) if self._include_usage_so_far else None
        return chunk

    def _envelope(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self) -> Json:
        """Sum over all choices; each prompt counts once, however many choices it has."""
        usages = []
        for choice in self._choices:
            assert choice.finished is not None, "a call's last delta has `finished`"
            usages.append(choice.finished.usage)
        of_prompts = usages[:: self._choices_per_prompt]
        prompt_tokens = sum(usage.prompt_tokens for usage in of_prompts)
        completion_tokens = sum(usage.completion_tokens for usage in usages)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in of_prompts)},
        }

    async def _token_names(self, choice: Choice, logprobs: Sequence[pb.TokenLogprobs]) -> dict[int, TokenName]:
        token_ids = {each.token_id for position in logprobs for each in (position.chosen, *position.top)}
        return await self._dispatch.token_names(choice.tokenizer, token_ids)

    def _ending(self, choice: Choice) -> Json:
        """Return why a choice ended: the OpenAI reason, and the stop string or the stop token that did it.

        The end-of-sequence token of the tokenizer is told only where the client asked to stop at it.
        """
        finished = choice.finished
        if finished is None:
            return {"finish_reason": None, "stop_reason": None}
        stop_reason: str | int | None = None
        if finished.HasField("stop_string"):
            stop_reason = finished.stop_string
        elif finished.HasField("stop_token_id"):
            asked = self._calls[choice.index].sampling.stop_token_ids
            is_told = finished.stop_token_id != choice.tokenizer.eos_token_id or finished.stop_token_id in asked
            stop_reason = finished.stop_token_id if is_told else None
        return {"finish_reason": finish_reason(finished.reason), "stop_reason": stop_reason}


class CompletionRenderer(Renderer):
    """Answers of /v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    async def chunks(self, index: int, delta: GenerateDelta) -> list[Json]:
        """See Renderer."""
        choice = self._note(index, delta)
        choice.num_tokens += len(delta.token_ids)
        text = await self._beginning(choice) + delta.text
        if not (text or delta.logprobs or delta.finished):
            return []
        logprobs = await self._logprobs(choice, delta.logprobs) if delta.logprobs else None
        return [self._chunk(choice, self._choice(choice, text, logprobs))]

    def _whole_choice(self, choice: Choice) -> Json:
        return self._choice(choice, "".join(choice.text), choice.logprobs or None)

    def _choice(self, choice: Choice, text: str, logprobs: Json | None) -> Json:
        return {"index": choice.index, "text": text, "logprobs": logprobs} | self._ending(choice)

    async def _logprobs(self, choice: Choice, logprobs: Sequence[pb.TokenLogprobs]) -> Json:
        await self._take_prompt(choice)
        names = await self._token_names(choice, logprobs)
        tokens, offsets, top = [], [], []
        for number, position in enumerate(logprobs, start=1):
            is_last = number == len(logprobs) and choice.finished is not None
            alternatives: dict[str, float] = {}
            for each in (*position.top, position.chosen):  # two tokens may add the same: the more probable one counts
                piece = choice.pieces.peek(names[each.token_id], is_last=is_last)
                alternatives.setdefault(piece, _json_logprob(each))
            top.append(alternatives)
            offsets.append(choice.pieces.offset)
            tokens.append(choice.pieces.push(names[position.chosen.token_id], is_last=is_last))
        return {
            "tokens": tokens,
            "token_logprobs": [_json_logprob(position.chosen) for position in logprobs],
            "top_logprobs": [_encode(alternatives) for alternatives in top],
            "text_offset": offsets,
        }

    async def _take_prompt(self, choice: Choice) -> None:
        """Before any text, go on where the prompt ends, which its last tokens tell unless none of them has one."""
        for token_ids in (choice.prompt_token_ids[-_NUM_LAST_TOKENS:], choice.prompt_token_ids):
            if choice.pieces.is_at_start:
                names = await self._dispatch.token_names(choice.tokenizer, set(token_ids))
                choice.pieces.take_prompt([names[token_id] for token_id in token_ids])


class ChatRenderer(Renderer):
    """Answers of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    _has_begun = False

    async def chunks(self, index: int, delta: GenerateDelta) -> list[Json]:
        """See Renderer. A choice's first chunk holds its role, its last one the finish reason and no content."""
        choice = self._note(index, delta)
        chunks = []
        if not self._has_begun:
            self._has_begun = True
            begin = {"role": "assistant", "content": ""}
            for each in self._choices:  # of one conversation
                each.prompt_token_ids = delta.prompt_token_ids
            chunks = [self._delta_chunk(each, begin, None, with_ending=False) for each in self._choices]
        choice.num_tokens += len(delta.token_ids)
        if delta.text or delta.logprobs:
            logprobs = await self._logprobs(choice, delta.logprobs) if delta.logprobs else None
            chunks.append(self._delta_chunk(choice, {"content": delta.text}, logprobs, with_ending=False))
        if delta.finished is not None:
            chunks.append(self._delta_chunk(choice, {}, None, with_ending=True))
        return chunks

    def _whole_choice(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": choice.logprobs or None} | self._ending(choice)

    def _delta_chunk(self, choice: Choice, content: Json, logprobs: Json | None, *, with_ending: bool) -> Json:
        ending = self._ending(choice) if with_ending else {"finish_reason": None}
        return self._chunk(choice, {"index": choice.index, "delta": content, "logprobs": logprobs} | ending)

    async def _logprobs(self, choice: Choice, logprobs: Sequence[pb.TokenLogprobs]) -> Json:
        names = await self._token_names(choice, logprobs)

        def entry(each: pb.Logprob) -> Json:
            data = names[each.token_id].data
            return {"token": data.decode(errors="replace"), "logprob": _json_logprob(each), "bytes": list(data)}

        content = [
            _encode(entry(position.chosen) | {"top_logprobs": [entry(each) for each in position.top]})
            for position in logprobs
        ]
        return {"content": content, "refusal": None}


def render_model(card: ModelCard, created: int) -> Json:
    """Return one model as /v1/models tells it."""
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": "weft",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_context,
        "ready_replicas": card.ready_replicas,
    }


def render_error(error: RouterError) -> Json:
    """Return the body of an error answer, or of the event that ends a stream."""
    field = error.field if isinstance(error, InvalidRequestError) else None
    code = None
    if isinstance(error, ModelNotFoundError):
        field, code = "model", "model_not_found"
    elif isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    elif isinstance(error, OverloadedError):
        code = "rate_limit_exceeded"
    elif isinstance(error, UnauthenticatedError):
        code = "invalid_api_key"
    return error_body(str(error), error.http_status, param=field, code=code)


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> Json:
    """Return the body of an error answer with this HTTP status."""
    default = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    kind = _ERROR_TYPES.get(HTTPStatus(status), default)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_headers(error: RouterError) -> dict[str, str]:
    """Return the headers of an error answer: whether and when to try again, where known, or that a key is wanted."""
    match error:
        case UnauthenticatedError():
            return {"www-authenticate": "Bearer"}
        case OverloadedError():
            seconds, milliseconds = math.ceil(error.retry_after_ms / 1000), error.retry_after_ms
            return {"retry-after": str(seconds), "retry-after-ms": str(milliseconds)}
        # After a status from 500 on the openai packages try again: each time with the whole deadline, and of a request
        # that breaks replicas with as many of them as it may break.
        case DeadlineError() | ReplicaFailedError():
            return {"x-should-retry": "false"}
    return {}


def _usage_so_far(choice: Choice) -> Json:
    num_prompt_tokens = len(choice.prompt_token_ids)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": choice.num_tokens,
        "total_tokens": num_prompt_tokens + choice.num_tokens,
    }


def _append(whole: Json, part: Json) -> None:
    for name, value in part.items():
        if isinstance(value, list):
            whole.setdefault(name, []).extend(value)
        else:
            whole[name] = value


def _encode(value: Json) -> msgspec.Raw:
    """Return what belongs to one position as JSON: a tenth of the memory, and of what is left to do at the end."""
    return msgspec.Raw(msgspec.json.encode(value))


def _json_logprob(each: pb.Logprob) -> float:
    return max(each.logprob, _LOWEST_LOGPROB)
