"""The clients' ends of calls to the two fronts, without sockets: they read at their own pace, and may leave."""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
from weft.v1 import inference_pb2 as pb

HTTP_ERRORS = {
    "rate_limit_exceeded": "RESOURCE_EXHAUSTED",
    "service_unavailable_error": "UNAVAILABLE",
    "timeout_error": "DEADLINE_EXCEEDED",
    "server_error": "INTERNAL",
    "model_not_found": "NOT_FOUND",
}


async def dawdle(rng: random.Random) -> None:
    """Read slowly, now and then."""
    if rng.random() < 0.3:
        await asyncio.sleep(rng.choice((0, 0.01, 0.2, 2)))


class AbortedError(Exception):
    """The handler of a call ended it with the status that is the message."""


class GrpcEnd:
    """What a gRPC handler has of its call."""

    def __init__(self, rng: random.Random, *, authorization: str, timeout_s: float | None) -> None:
        self.written: list[pb.GenerateResponse] = []
        self._rng = rng
        self._timeout_s = timeout_s
        self._authorization = authorization

    def time_remaining(self) -> float | None:
        return self._timeout_s

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return (("authorization", self._authorization),)

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    async def write(self, response: pb.GenerateResponse) -> None:
        self.written.append(response)
        await dawdle(self._rng)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object = ()) -> None:
        raise AbortedError(code.name)


class HttpEnd:
    """A client of the HTTP front."""

    def __init__(self, rng: random.Random, body: bytes, *, authorization: str, timeout_s: float | None) -> None:
        headers = [(b"authorization", authorization.encode())]
        if timeout_s is not None:
            headers.append((b"x-request-timeout", str(timeout_s).encode()))
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": headers,
            "query_string": b"",
        }
        self.scope |= {"http_version": "1.1", "scheme": "http", "root_path": "", "raw_path": b"/v1/completions"}
        self.has_left = False
        self.is_over = False
        self._rng = rng
        self._body: bytes | None = body
        self._data = b""
        self._end = asyncio.Event()
        self._is_stream = False
        self._leaves_s = rng.choice((0, 0.1, 1, 5)) if rng.random() < 0.2 else None

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._leaves_s):
                await self._end.wait()
        self.has_left |= not self.is_over
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        assert not self.is_over
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._is_stream = headers[b"content-type"].startswith(b"text/event-stream")
            return
        self._data += message["body"]
        await dawdle(self._rng)
        if not message.get("more_body", False):
            self.is_over = True
            self._end.set()

    def answers(self) -> list[Any]:
        if not self._is_stream:
            return [json.loads(self._data)]
        lines = self._data.decode().split("\n\n")
        assert lines.pop() == ""
        data = [line.removeprefix("data: ") for line in lines]
        if data[-1] == "[DONE]":
            data.pop()
        else:
            assert "error" in json.loads(data[-1])
        return [json.loads(each) for each in data]
