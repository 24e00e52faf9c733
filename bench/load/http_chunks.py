"""What a service with OpenAI's HTTP API streams: the parts of its chunks that a load generator looks at."""

import msgspec
from msgspec import Struct


class _Details(Struct):
    cached_tokens: int | None = 0


class ChunkUsage(Struct):
    """Tokens of a request, which the last chunk tells."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    """What comes before an answer, under the one name or the other."""
    reasoning: str | None = None
    tool_calls: list[object] | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class ChunkChoice(Struct):
    """What a chunk has of one answer."""

    text: str | None = None
    """Text of a completion."""
    delta: _Delta | None = None
    """Part of a chat's answer."""
    finish_reason: str | None = None
    """Why it ends; some services have an empty text until it does."""

    @property
    def is_last(self) -> bool:
        """Whether the answer ends with it."""
        return bool(self.finish_reason)

    @property
    def is_given_up(self) -> bool:
        """Whether vLLM, SGLang or Weft end it unfinished: a short answer would else look like a fast one."""
        return self.finish_reason in ("abort", "error")

    @property
    def has_text(self) -> bool:
        """Whether a piece of the answer comes with it: the first chunk of a chat may have none."""
        return bool(self.text or (self.delta and self.delta.has_text))


class ChunkError(Struct):
    """Why an answer ends early, or a request was refused."""

    message: str | None = ""
    type: str | None = ""
    code: object = None
    """The HTTP status, or any word."""


class Chunk(Struct):
    """One event of a stream, or the body of a refusal."""

    choices: list[ChunkChoice] | None = None
    usage: ChunkUsage | None = None
    error: ChunkError | str | None = None
    """Some services have only a text."""
    kind: object = msgspec.field(default=None, name="object")
    """"error": the event is the error itself, as of vLLM."""

    @property
    def reason(self) -> str:
        """What the error says; empty: there is none, or it says nothing."""
        return self.error if isinstance(self.error, str) else (self.error and self.error.message) or ""

    @staticmethod
    def decode(data: bytes) -> "Chunk":
        """Read JSON. Raises msgspec.DecodeError."""
        try:
            chunk = _DECODER.decode(data)
            if chunk.kind == "error" and chunk.error is None:
                chunk.error = _ERROR_DECODER.decode(data)
            return chunk
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(f"it is not UTF-8: {error}") from error


def refusal_of(body: bytes) -> str:
    """Return what a refusal says, in OpenAI's form or as it is."""
    try:
        chunk = Chunk.decode(body)
    except msgspec.DecodeError:
        chunk = Chunk()
    return chunk.reason or body.decode(errors="replace")[:500]


_DECODER = msgspec.json.Decoder(Chunk)
_ERROR_DECODER = msgspec.json.Decoder(ChunkError)
