"""One request over HTTP, to services that answer in their own ways: what is taken for a token, an end, an error."""

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.errors import BenchError
from bench.load import http_sender
from bench.load.calls import Call
from bench.load.http_sender import HttpSender, connect_http
from bench.load.records import CallError, ErrorKind, Usage
from bench.load.sender import Protocol, Target


@asynccontextmanager
async def answering(complete: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[HttpSender]:
    """A connection to a service that answers like this."""
    service = web.Application()
    service.add_routes([web.post("/v1/completions", complete)])
    async with TestServer(service) as server:
        where = Target(protocol=Protocol.HTTP, address=f"http://{server.host}:{server.port}", timeout_s=20.0)
        async with connect_http(where) as sender:
            yield sender


def streamed(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


ONE_TOKEN = {
    "choices": [{"text": "a", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


async def test_thoughts_and_calls_of_tools_are_tokens_over_http() -> None:
    deltas = [{"reasoning_content": "a"}, {"reasoning": "b"}, {"tool_calls": [{"index": 0}]}, {"content": "c"}, {}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}})
    received: list[int] = []

    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=streamed(*events))

    async with answering(complete) as sender:
        told = await sender.send(Call(prompt=(1,), num_out=4), "", received.append)
    assert (received, told.completion_tokens) == ([1, 1, 1, 1], 4)


async def test_answers_that_end_after_they_are_done_leave_the_connection_to_the_next() -> None:
    seen, clients = asyncio.Event(), set()

    async def complete(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        clients.add(request.transport.get_extra_info("peername"))
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(streamed(ONE_TOKEN))
        await seen.wait()  # the end comes apart, as from servers that write it when their generator is over
        seen.clear()
        return response

    async with answering(complete) as sender:
        for _ in range(3):
            await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: seen.set())
    assert len(clients) == 1


async def test_a_connection_that_the_service_may_be_about_to_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn, of vLLM and SGLang, ends one that was idle for 5 s, whatever is on its way then."""
    assert http_sender._KEEP_ALIVE_S < 5
    monkeypatch.setattr(http_sender, "_KEEP_ALIVE_S", 0.0)
    clients = set()

    async def complete(request: web.Request) -> web.Response:
        assert request.transport is not None
        clients.add(request.transport.get_extra_info("peername"))
        return web.Response(body=streamed(ONE_TOKEN))

    async with answering(complete) as sender:
        for _ in range(2):
            await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)
    assert len(clients) == 2


async def test_service_that_never_ends_an_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.http_sender._END_TIMEOUT_S", 0.05)
    is_over = asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(streamed(ONE_TOKEN))
        await is_over.wait()
        return response

    async with answering(complete) as sender:
        usage = await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)
        is_over.set()
    assert usage.completion_tokens == 1


async def test_more_requests_than_a_pool_has_connections_are_sent_at_once() -> None:
    number = 101  # aiohttp has 100, unless told otherwise
    all_came, num_came = asyncio.Event(), 0

    async def complete(request: web.Request) -> web.Response:
        nonlocal num_came
        num_came += 1
        if num_came == number:
            all_came.set()
        await all_came.wait()
        return web.Response(body=streamed(ONE_TOKEN))

    async with answering(complete) as sender:
        await asyncio.gather(*(sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None) for _ in range(number)))


async def test_as_many_connections_are_made_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))  # as shells begin
    try:
        async with connect_http(Target(protocol=Protocol.HTTP, address="http://127.0.0.1:1")):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("details", "cached"), [({"cached_tokens": 3}, 3), ({"cached_tokens": None}, 0), ({}, 0), (None, 0)]
)
async def test_end_without_text_is_a_time_and_usage_is_the_last_that_came(
    details: dict[str, int | None] | None, cached: int
) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": details}
    first, end = {"choices": [{"text": "a"}]}, {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}
    received: list[int] = []

    async def complete(request: web.Request) -> web.Response:
        empty = b': ping\n\ndata:{"choices": [{"text": ""}]}\n\n'
        return web.Response(body=empty * 2 + streamed(first, end, {"choices": []}))

    async with answering(complete) as sender:
        told = await sender.send(Call(prompt=(1,), num_out=2), "", received.append)
    assert (received, told) == ([1, 0], Usage(prompt_tokens=5, cached_tokens=cached, completion_tokens=2))


@pytest.mark.parametrize("is_whole", [True, False])
async def test_an_answer_whose_reason_to_end_is_an_empty_text_goes_on(is_whole: bool) -> None:
    pieces = [{"choices": [{"text": text, "finish_reason": ""}]} for text in ("", "a", "b")]
    end = {"choices": [{"text": "", "finish_reason": "stop" if is_whole else ""}], "usage": ONE_TOKEN["usage"]}
    received: list[int] = []

    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=streamed(*pieces, end).removesuffix(b"data: [DONE]\n\n"))

    async with answering(complete) as sender:
        with nullcontext() if is_whole else pytest.raises(CallError, match="the answer broke off"):
            await sender.send(Call(prompt=(1,), num_out=2), "", received.append)
    assert received == ([1, 1, 0] if is_whole else [1, 1])


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_the_service_gives_up_is_a_failure(reason: str) -> None:
    """However soon it came: it keeps no target, and its few tokens count nowhere."""

    async def complete(request: web.Request) -> web.Response:
        end = {"choices": [{"text": "", "finish_reason": reason}], "usage": ONE_TOKEN["usage"]}
        return web.Response(body=streamed({"choices": [{"text": "a"}]}, end))

    async with answering(complete) as sender:
        with pytest.raises(CallError, match=f"^the service ended the answer: {reason}$") as failed:
            await sender.send(Call(prompt=(1,), num_out=4), "", lambda _: None)
    assert failed.value.kind is ErrorKind.CANCELLED


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize(("code", "kind"), [(400, ErrorKind.BAD_REQUEST), (None, ErrorKind.SERVER)])
@pytest.mark.parametrize("is_flat", [True, False])
async def test_error_of_vllm_is_told_by_its_code(code: int | None, kind: ErrorKind, is_flat: bool, status: int) -> None:
    error = {"object": "error", "message": "sorry", "type": "OwnError", "param": None, "code": code}
    body = error if is_flat else {"error": error}

    async def complete(request: web.Request) -> web.Response:
        return web.json_response(body, status=400) if status == 400 else web.Response(body=streamed(ONE_TOKEN, body))

    async with answering(complete) as sender:
        with pytest.raises(CallError, match=r"^sorry$") as failed:
            await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)
    assert failed.value.kind is (kind if status == 200 else ErrorKind.BAD_REQUEST)


async def test_a_chunk_may_have_no_choices() -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=streamed({"choices": None}, {}, ONE_TOKEN, {"choices": None}))

    async with answering(complete) as sender:
        assert await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)


@pytest.mark.parametrize(
    ("error", "reason"), [("sorry", "sorry"), ({"message": "sorry", "type": None}, "sorry"), ({"message": None}, "")]
)
async def test_error_in_another_form_is_told_too(error: object, reason: str) -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=streamed(ONE_TOKEN, {"error": error}))

    async with answering(complete) as sender:
        with pytest.raises(CallError) as failed:
            await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)
    assert (failed.value.kind, str(failed.value)) == (ErrorKind.SERVER, reason)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rate_limit_error", ErrorKind.OVERLOADED),
        ("service_unavailable_error", ErrorKind.UNAVAILABLE),
        ("timeout_error", ErrorKind.TIMEOUT),
        ("invalid_request_error", ErrorKind.BAD_REQUEST),
        ("server_error", ErrorKind.SERVER),
    ],
)
async def test_error_within_an_answer_fails_it_by_its_type(name: str, kind: ErrorKind) -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=streamed(ONE_TOKEN, {"error": {"message": "sorry", "type": name}}))

    async with answering(complete) as sender:
        with pytest.raises(CallError, match="sorry") as failed:
            await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)
    assert failed.value.kind is kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ErrorKind.BAD_REQUEST),
        (401, ErrorKind.UNAUTHENTICATED),
        (403, ErrorKind.UNAUTHENTICATED),
        (404, ErrorKind.NOT_FOUND),
        (429, ErrorKind.OVERLOADED),
        (499, ErrorKind.BAD_REQUEST),
        (500, ErrorKind.SERVER),
        (503, ErrorKind.UNAVAILABLE),
        (504, ErrorKind.TIMEOUT),
    ],
)
async def test_refusal_fails_a_request_by_its_status(status: int, kind: ErrorKind) -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "sorry"}}, status=status)

    async with answering(complete) as sender:
        with pytest.raises(CallError, match=r"^sorry$") as failed:
            await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)
    assert failed.value.kind is kind


async def test_service_that_hangs_up_is_unavailable() -> None:
    async def complete(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with answering(complete) as sender:
        with pytest.raises(CallError, match="Server disconnected") as failed:
            await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)
    assert failed.value.kind is ErrorKind.UNAVAILABLE


async def test_refusal_in_another_form_is_told_as_it_is() -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=b"<html>" + b"x" * 1000, status=502)

    async with answering(complete) as sender:
        with pytest.raises(CallError) as failed:
            await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)
    assert str(failed.value) == "<html>" + "x" * 494


async def test_refusal_that_says_nothing_is_told_by_its_status() -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.Response(status=502)

    async with answering(complete) as sender:
        with pytest.raises(CallError, match=r"^status 502, and no more$"):
            await sender.send(Call(prompt=(1,), num_out=1), "", lambda _: None)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "the request has no API key"}}', "status 401, the request has no API key"),
        (b"<html>\n<h1>Who is it?</h1>\n</html>\n", "status 401, <html> <h1>Who is it\\?</h1> </html>"),
        (b"", "status 401, and no more"),
    ],
)
async def test_list_of_models_that_is_refused_tells_what_the_service_says(body: bytes, reason: str) -> None:
    async def models(request: web.Request) -> web.Response:
        return web.Response(status=401, body=body)

    service = web.Application()
    service.add_routes([web.get("/v1/models", models)])
    async with TestServer(service) as server:
        where = Target(protocol=Protocol.HTTP, address=f"http://{server.host}:{server.port}")
        async with connect_http(where) as sender:
            with pytest.raises(BenchError, match=f"/v1/models gives no list of models: {reason}$"):
                await sender.find_model()


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("a..b", "idna"),
        (f"{'a' * 64}.com", "idna"),
        ("user:secret@127.0.0.1:1", "Cannot combine AUTHORIZATION"),
    ],
)
async def test_an_address_that_cannot_be_asked_is_told_in_a_line(host: str, reason: str) -> None:
    where = Target(protocol=Protocol.HTTP, address=f"http://{host}", api_key="k")
    async with connect_http(where) as sender:
        with pytest.raises(BenchError, match=rf"/v1/models gives no list of models: .*{reason}"):
            await sender.find_model()
