"""Requests over OpenAI-compatible HTTP, streamed.

Only text is seen: a token without text of its own (a part of a character, say) shows with the next one. So gaps are
those between pieces of text, and the numbers of tokens come from the usage at the end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from bench.errors import BenchError
from bench.load.calls import Call, Chat
from bench.load.http_answer import StreamedAnswer, kind_of_status
from bench.load.http_chunks import refusal_of
from bench.load.records import CallError, ErrorKind, Usage
from bench.load.sender import Received, ServedModel, Target, choose_model
from router.open_files import allow_connections

_END_TIMEOUT_S = 0.01
"""For the end of a response that is complete: a slot of a closed loop waits for it."""

_KEEP_ALIVE_S = 4.0
"""Connections that nobody used for longer are left: many services end them after 5 s, and a request that is on its way
then, as with a think time of 5 s, would fail."""


@asynccontextmanager
async def connect_http(target: Target) -> AsyncIterator["HttpSender"]:
    """Connect for the length of the block. Raises RouterConfigError when a TLS file cannot be used."""
    allow_connections()
    tls = True if target.tls is None else target.tls.context
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,  # as many connections as there are requests
            ssl=tls,
            keepalive_timeout=_KEEP_ALIVE_S,
        ),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        headers={} if target.api_key is None else {"authorization": f"Bearer {target.api_key}"},
    ) as session:
        yield HttpSender(session, target)


class HttpSender:
    """Implements `Sender`; see there."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self._target = target
        self._base = target.address.rstrip("/").removesuffix("/v1")
        self._server_name = None if target.tls is None else target.tls.server_name
        self._model = target.model

    async def find_model(self) -> ServedModel:
        """See `Sender`."""
        url = f"{self._base}/v1/models"
        try:
            async with self._session.get(url, server_hostname=self._server_name) as response:
                content = await response.read()
                if response.status != HTTPStatus.OK:
                    said = " ".join(refusal_of(content).split()) or "and no more"  # one line, of a page of HTML too
                    raise BenchError(f"{url} gives no list of models: status {response.status}, {said}")
                models = _Models.decode(content)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # also of a host's name, or of no JSON
            reason = str(error) or repr(error)
            if "status line" in reason:  # of which aiohttp shows the bytes
                reason = "what answers speaks no HTTP/1.1; is it the port of gRPC?"
            raise BenchError(f"{url} gives no list of models: {reason}") from error
        self._model = choose_model(self._target, [model.id for model in models.data])
        return ServedModel(name=self._model, vocab_size=None)

    async def send(self, call: Call, cache_salt: str, received: Received) -> Usage:
        """See `Sender`."""
        path, body = self._request(call, cache_salt)
        try:
            async with self._session.post(
                f"{self._base}{path}",
                data=msgspec.json.encode(body),
                headers={"content-type": "application/json"},
                server_hostname=self._server_name,
            ) as response:
                if response.status != HTTPStatus.OK:
                    message = refusal_of(await response.read()) or f"status {response.status}, and no more"
                    raise CallError(kind_of_status(response.status), message)
                return await _read_answer(response.content, received)
        except (msgspec.DecodeError, HttpProcessingError) as error:  # the latter also for a line without end
            raise CallError(ErrorKind.OTHER, f"the answer is not understood: {error}") from error
        except TimeoutError as error:
            raise CallError(ErrorKind.TIMEOUT, f"no answer within {self._target.timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise CallError(ErrorKind.UNAVAILABLE, str(error) or repr(error)) from error

    def _request(self, call: Call, cache_salt: str) -> tuple[str, dict[str, Any]]:
        body = {
            "model": self._model,
            "max_tokens": call.num_out,
            **self._target.sampling,
            **({"ignore_eos": True} if self._target.ignore_eos else {}),  # services may refuse what they do not know
            "cache_salt": cache_salt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._target.targets_s,
        }
        if isinstance(call.prompt, Chat):
            return "/v1/chat/completions", body | {"messages": call.prompt.messages}
        return "/v1/completions", body | {"prompt": call.prompt}


async def _read_answer(content: aiohttp.StreamReader, received: Received) -> Usage:
    """Follow the server-sent events to their end."""
    answer = StreamedAnswer()
    async for line in content:
        for has_text in answer.add(line):
            received(int(has_text))
        if answer.is_over:
            await _read_rest(content)
            break
    return answer.usage()


async def _read_rest(content: aiohttp.StreamReader) -> None:
    """Read to the end, without which the next request would have to connect anew; a server that never ends is left."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            await content.read()


class _Model(Struct):
    id: str


class _ModelList(Struct):
    data: list[_Model]


_Models = msgspec.json.Decoder(_ModelList)
