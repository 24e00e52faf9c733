"""One answer of a service with OpenAI's HTTP API, as its lines come, whoever reads them."""

from collections.abc import Iterator
from http import HTTPStatus

from bench.load.http_chunks import Chunk, ChunkError, ChunkUsage
from bench.load.records import CallError, ErrorKind, Usage

_KINDS = {
    HTTPStatus.UNAUTHORIZED: ErrorKind.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: ErrorKind.UNAUTHENTICATED,
    HTTPStatus.NOT_FOUND: ErrorKind.NOT_FOUND,
    HTTPStatus.TOO_MANY_REQUESTS: ErrorKind.OVERLOADED,
    HTTPStatus.SERVICE_UNAVAILABLE: ErrorKind.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: ErrorKind.TIMEOUT,
}
_KINDS_OF_TYPES = {
    "rate_limit_error": ErrorKind.OVERLOADED,
    "service_unavailable_error": ErrorKind.UNAVAILABLE,
    "timeout_error": ErrorKind.TIMEOUT,
    "invalid_request_error": ErrorKind.BAD_REQUEST,
}


class StreamedAnswer:
    """Follows the server-sent events of one answer."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether the service has said that nothing follows."""
        self._has_end = False
        self._usage: ChunkUsage | None = None

    def add(self, line: bytes) -> Iterator[bool]:
        """Take the next line; yields, for what came of the answer with it, whether that is a piece of text or only
        the answer's end.

        Raises CallError where the service ends the answer early, msgspec.DecodeError where it is not understood.
        """
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_over = self._has_end = True
            return
        chunk = Chunk.decode(data)
        if chunk.error is not None:
            raise CallError(_kind_of_error(chunk.error), chunk.reason)
        for choice in chunk.choices or ():
            if choice.is_given_up:
                raise CallError(ErrorKind.CANCELLED, f"the service ended the answer: {choice.finish_reason}")
            if choice.has_text or choice.is_last:
                yield choice.has_text
            self._has_end |= choice.is_last
        self._usage = chunk.usage or self._usage  # some services send it with each chunk

    def usage(self) -> Usage:
        """Return what a whole answer took. Raises CallError where it is none."""
        usage = self._usage
        if usage is None or not self._has_end:
            raise CallError(ErrorKind.UNAVAILABLE, "the answer broke off, or has no usage at its end")
        cached = 0 if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
        return Usage(
            prompt_tokens=usage.prompt_tokens, cached_tokens=cached or 0, completion_tokens=usage.completion_tokens
        )


def kind_of_status(status: int) -> ErrorKind:
    """Return what an HTTP status other than 200 means."""
    if status in _KINDS:
        return _KINDS[HTTPStatus(status)]
    return ErrorKind.BAD_REQUEST if 400 <= status < 500 else ErrorKind.SERVER


def _kind_of_error(error: ChunkError | str) -> ErrorKind:
    """Return the kind of an error that comes in the middle of a stream, where there is no status."""
    if isinstance(error, str):
        return ErrorKind.SERVER
    if isinstance(error.code, int) and 400 <= error.code < 600:
        return kind_of_status(error.code)
    return _KINDS_OF_TYPES.get(error.type or "", ErrorKind.SERVER)
