"""The OpenAI-compatible front over a fake dispatcher: in process with httpx, on a socket with the `openai` package."""

import asyncio
import gzip
import json
import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
import uvicorn
from helpers.fake_dispatch import CACHED_TOKENS, EOS, FakeDispatch
from weft.v1 import inference_pb2 as pb

from router.call import ChatMessage, Conversation, TokenName
from router.errors import (
    DeadlineError,
    NoReplicaError,
    OverloadedError,
    ReplicaFailedError,
    RequestFailedError,
    RouterError,
)
from router.model_text import ModelText
from router.openai import create_app
from router.openai_types import MAX_CHOICES

MODEL = "fake/model"
MAX_BODY_BYTES = 100_000
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def dispatch() -> FakeDispatch:
    return FakeDispatch()


@pytest_asyncio.fixture
async def http(dispatch: FakeDispatch) -> AsyncIterator[httpx.AsyncClient]:
    """The front without a socket."""
    app = create_app(dispatch, max_body_bytes=MAX_BODY_BYTES)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
        yield client


@asynccontextmanager
async def serving(dispatch: FakeDispatch) -> AsyncIterator[str]:
    """Run the front on a free loopback port; yields its address."""
    app = create_app(dispatch, max_body_bytes=MAX_BODY_BYTES)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(server.serve())
    async with asyncio.timeout(10):
        while not server.started:  # noqa: ASYNC110 (uvicorn has no event to wait for)
            await asyncio.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(10):
            await running


@pytest_asyncio.fixture
async def url(dispatch: FakeDispatch) -> AsyncIterator[str]:
    async with serving(dispatch) as address:
        yield address


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The `openai` package, talking to the front over a socket."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


async def complete(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"} | fields)


async def chat(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": MODEL, "messages": [USER]} | fields)


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream, the last one "[DONE]" where it ended well."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


# The openai package over a socket


async def test_openai_lists_models(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]

    assert [(model.id, model.object, model.owned_by) for model in models] == [(MODEL, "model", "weft")]
    assert models[0].model_extra is not None
    assert models[0].model_extra["root"] == MODEL
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError, match="served: fake/model"):
        await client.models.retrieve("other/model")


async def test_openai_completion_has_text_usage_and_its_default_length(
    client: openai.AsyncOpenAI, dispatch: FakeDispatch
) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Hi", temperature=0, user="u")

    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", MODEL, "cmpl-")
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [("Hello world", "stop")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 12, 14)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS
    assert dispatch.calls[0].text == "Hi"
    assert dispatch.calls[0].sampling.max_tokens == 16
    assert dispatch.aborted == []


async def test_openai_completion_stream_ends_with_its_reason_and_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt="Hi", max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 5)


async def test_openai_chat_takes_every_form_of_content(client: openai.AsyncOpenAI, dispatch: FakeDispatch) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": None},
            {
                "role": "user",
                "content": [{"type": "text", "text": "One"}, "two"],  # type: ignore[list-item]
                "name": "U",
            },
        ],
        max_completion_tokens=5,
    )

    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert dispatch.calls[0].chat == Conversation(
        messages=(
            ChatMessage(role="system", content="Be brief."),
            ChatMessage(role="assistant", content=""),
            ChatMessage(role="user", content="One\ntwo", name="U"),
        )
    )
    assert dispatch.calls[0].sampling.max_tokens == 5


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_what_a_message_says_beside_its_content_arrives(
    http: httpx.AsyncClient, dispatch: FakeDispatch, name: str
) -> None:
    said = {"role": "assistant", "content": "a", name: "hm"}
    await chat(http, messages=[said, {"role": "tool", "content": "b", "tool_call_id": "c1"}])

    conversation = dispatch.calls[0].chat
    assert conversation is not None
    assert conversation.messages == (
        ChatMessage(role="assistant", content="a", reasoning_content="hm"),
        ChatMessage(role="tool", content="b", tool_call_id="c1"),
    )


async def test_variables_for_the_chat_template_arrive(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, dispatch: FakeDispatch
) -> None:
    variables = {"enable_thinking": False, "budget": 3, "names": ["é", None]}
    await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_body={"chat_template_kwargs": variables}
    )
    await chat(http, chat_template_kwargs=None)
    await chat(http, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high", "a": 1})
    await chat(http, continue_final_message=True)
    await chat(http, continue_final_message=True, add_generation_prompt=False)
    await chat(http, continue_final_message=None, add_generation_prompt=False)
    await http.post("/tokenize", json={"messages": [USER], "chat_template_kwargs": variables})
    await http.post("/tokenize", json={"messages": [USER], "reasoning_effort": "low"})

    given = [call.chat and call.chat.template_kwargs for call in dispatch.calls]
    assert given == [variables, {}, {"reasoning_effort": "low", "a": 1}, {}, {}, {}]
    ends = [(call.chat.add_generation_prompt, call.chat.continue_final_message) for call in dispatch.calls if call.chat]
    assert ends == [(True, False), (True, False), (True, False), (False, True), (False, True), (False, False)]
    messages = (ChatMessage(role="user", content="Hi"),)
    assert dispatch.tokenized == [
        Conversation(messages=messages, template_kwargs=each) for each in (variables, {"reasoning_effort": "low"})
    ]


async def test_openai_chat_stream_begins_with_the_role_and_ends_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    *told, usage = chunks
    assert told[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in told][-2:] == [None, "stop"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 12


async def test_openai_chat_stream_helper_accumulates(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "Hi"}]) as stream:
        final = await stream.get_final_completion()

    assert final.choices[0].message.content == "Hello world"
    assert final.choices[0].finish_reason == "stop"


async def test_openai_chat_logprobs_have_the_bytes_of_split_characters(
    client: openai.AsyncOpenAI, dispatch: FakeDispatch
) -> None:
    dispatch.reply = text = "Aé"
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
    )

    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(entry.token, entry.bytes) for entry in content] == [
        ("A", [65]), ("�", [0xC3]), ("�", [0xA9]), ("<eos>", list(b"<eos>"))
    ]  # fmt: skip
    assert b"".join(bytes(entry.bytes or ()) for entry in content[:-1]).decode() == text
    assert [(top.token, top.bytes) for top in content[1].top_logprobs] == [("�", [0xC3]), ("�", [0xC4])]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("A", -0.5), ("B", -1.5)]


async def test_openai_completion_logprobs_have_the_offsets_of_their_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Hi", logprobs=1, max_tokens=3, n=2)

    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "e", "l"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"H": -0.5}, {"e": -0.5}, {"l": -0.5}]
    assert logprobs.text_offset == [0, 1, 2]


async def test_character_of_several_tokens_comes_with_the_last_of_them(
    client: openai.AsyncOpenAI, dispatch: FakeDispatch
) -> None:
    dispatch.reply = "a 😀b"
    (choice,) = (await client.completions.create(model=MODEL, prompt="Hi", logprobs=2)).choices

    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", " ", "", "", "", "😀", "b", "<eos>"]
    assert choice.logprobs.text_offset == [0, 1, 2, 2, 2, 2, 3, 4]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[5] == {"😀": -0.5, "😁": -1.5}


async def test_openai_streamed_logprobs_equal_whole_ones(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "logprobs": 2}
    whole = (await client.completions.create(**asked)).choices[0].logprobs
    parts = [chunk.choices[0].logprobs async for chunk in await client.completions.create(**asked, stream=True)]

    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for part in parts if part is not None for value in getattr(part, field)]
        assert joined == getattr(whole, field)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_logprobs_of_a_whole_answer_are_rendered_as_they_come(
    http: httpx.AsyncClient, dispatch: FakeDispatch, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    named = asyncio.Event()

    async def token_names(text: ModelText, token_ids: Collection[int]) -> dict[int, TokenName]:
        named.set()
        return dict.fromkeys(token_ids, TokenName(b"a"))

    monkeypatch.setattr(dispatch, "token_names", token_names)
    dispatch.hold_after = 1
    prompt = {"prompt": "Hi", "logprobs": 1} if path == "completions" else {"messages": [USER], "logprobs": True}
    asking = asyncio.create_task(http.post(f"/v1/{path}", json=prompt))
    try:
        async with asyncio.timeout(10):  # else they hold up all streams at the end
            await named.wait()
    finally:
        asking.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_request_id_is_the_clients(
    client: openai.AsyncOpenAI, dispatch: FakeDispatch, *, stream: bool
) -> None:
    """For both to find it in their logs; without one each answer has a new one."""
    ids = []
    for headers in ({"X-Request-Id": "order-7"}, {}, {}):
        answer = await client.completions.create(model=MODEL, prompt="ab", stream=stream, extra_headers=headers)
        found = {chunk.id async for chunk in answer} if stream else {answer.id}
        ids += found
        assert dispatch.calls[-1].request_id == f"{ids[-1]}-0"
    assert ids[0] == "cmpl-order-7"
    assert len({*ids}) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [None, RequestFailedError("NaN"), ValueError("a bug")])
async def test_every_answer_has_the_id_by_which_the_log_knows_it(
    http: httpx.AsyncClient, dispatch: FakeDispatch, error: Exception | None, *, stream: bool
) -> None:
    dispatch.error = error
    for headers in ({"X-Request-Id": "order-7"}, {}):
        response = await http.post("/v1/completions", json={"prompt": "a", "stream": stream}, headers=headers)
        request_id = response.headers["x-request-id"]
        assert request_id == headers.get("X-Request-Id", request_id)
        assert dispatch.calls[-1].request_id == f"cmpl-{request_id}-0"


async def test_refusals_have_the_id_of_their_request(http: httpx.AsyncClient) -> None:
    for body, status in ((b"{", 400), (b"x" * (MAX_BODY_BYTES + 1), 413)):
        response = await http.post("/v1/completions", content=body, headers={"x-request-id": "order-7"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "order-7")
    assert "x-request-id" not in (await http.get("/v1/completions")).headers


async def test_openai_choices_of_a_prompt_have_seeds_that_follow_each_other(
    client: openai.AsyncOpenAI, dispatch: FakeDispatch
) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["a", "a"], n=2, seed=2**63 - 1, stop=[" w", "o"])

    assert [(choice.index, choice.text) for choice in answer.choices] == [(index, "Hell") for index in range(4)]
    seeds = {call.request_id[-1]: call.sampling.seed for call in dispatch.calls}
    assert seeds == {"0": 2**63 - 1, "1": 2**63, "2": 2**63 - 1, "3": 2**63}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 16)


async def test_openai_streams_choices_side_by_side(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=3, stream=True
    )
    texts, reasons = ["", "", ""], {}
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason

    assert texts == ["Hello world"] * 3
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_errors_are_typed(client: openai.AsyncOpenAI, dispatch: FakeDispatch, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=r"temperature is -1\.0") as bad:
        await client.completions.create(model=MODEL, prompt="Hi", temperature=-1, stream=stream)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="served: 'fake/model'") as unknown:
        await client.completions.create(model="other", prompt="Hi", stream=stream)
    assert unknown.value.code == "model_not_found"
    dispatch.error = OverloadedError("the queue is full", retry_after_s=1.2)
    with pytest.raises(openai.RateLimitError, match="the queue is full") as full:
        await client.completions.create(model=MODEL, prompt="Hi", stream=stream)
    assert full.value.response.headers["retry-after"] == "2"
    assert full.value.response.headers["retry-after-ms"] == "1200"


async def test_openai_sees_an_error_in_mid_stream(client: openai.AsyncOpenAI, dispatch: FakeDispatch) -> None:
    dispatch.error, dispatch.error_after = ReplicaFailedError("replicas failed"), 5
    stream = await client.completions.create(model=MODEL, prompt="Hi", stream=True)

    texts = [(await anext(stream)).choices[0].text for _ in range(5)]
    with pytest.raises(openai.APIError, match="replicas failed"):
        await anext(stream)

    assert "".join(texts) == "Hello"


async def test_openai_retries_when_overloaded(url: str, dispatch: FakeDispatch) -> None:
    dispatch.error = OverloadedError("the queue is full", retry_after_s=0.001)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt="Hi")

    assert len(dispatch.calls) == 3


# A client that goes away


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}])
async def test_leaving_while_nothing_has_come_aborts_the_calls(
    url: str, dispatch: FakeDispatch, fields: dict[str, Any]
) -> None:
    dispatch.hold_after = 0
    async with httpx.AsyncClient(base_url=url) as http:
        asking = asyncio.create_task(complete(http, **fields))
        await dispatch.wait_for_calls(fields.get("n", 1))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    await dispatch.wait_for_aborts(fields.get("n", 1))


@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_a_stream_in_the_middle_aborts_the_calls(url: str, dispatch: FakeDispatch, n: int) -> None:
    dispatch.hold_after = 3
    fields = {"model": MODEL, "prompt": "Hi", "stream": True, "n": n}
    async with httpx.AsyncClient(base_url=url) as http, http.stream("POST", "/v1/completions", json=fields) as stream:
        seen = 0
        async for line in stream.aiter_lines():
            seen += bool(line)
            if seen == 3 * n:
                break

    await dispatch.wait_for_aborts(n)


async def test_openai_closing_a_stream_aborts_the_call(client: openai.AsyncOpenAI, dispatch: FakeDispatch) -> None:
    dispatch.hold_after = 3
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    await anext(aiter(stream))
    await stream.close()

    await dispatch.wait_for_aborts(1)


async def test_one_choice_that_fails_aborts_the_others(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    dispatch.error = NoReplicaError("no replica is ready")

    response = await complete(http, n=3)

    assert response.status_code == 503
    assert len(dispatch.calls) == 3


# Shapes, in process


async def test_chat_stream_has_the_exact_chunks(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    dispatch.reply = "é"
    response = await chat(http, stream=True, stop=["x"])

    first, content, last, done = events(response)
    shared = {key: first[key] for key in ("id", "created")} | {"object": "chat.completion.chunk", "model": MODEL}

    def with_choice(**choice: Any) -> dict[str, Any]:
        return shared | {"choices": [{"index": 0, "logprobs": None, "finish_reason": None} | choice]}

    assert first == with_choice(delta={"role": "assistant", "content": ""})
    assert content == with_choice(delta={"content": "é"})
    assert last == with_choice(delta={}, finish_reason="stop", stop_reason=None)
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("Hi, ", ["Hi, "]), (["a", "b"], ["a", "b"]), ([72, 105, EOS], ["Hi<eos>"]), ([[65], [66, 67]], ["A", "BC"])],
)
async def test_echo_puts_the_text_of_each_prompt_before_its_choices(
    http: httpx.AsyncClient, prompt: Any, texts: list[str]
) -> None:
    expected = {2 * i + choice: f"{text}Hello" for i, text in enumerate(texts) for choice in range(2)}
    fields = {"prompt": prompt, "echo": True, "max_tokens": 5, "n": 2}

    whole = (await complete(http, **fields)).json()
    *chunks, _ = events(await complete(http, **fields, stream=True))

    assert {choice["index"]: choice["text"] for choice in whole["choices"]} == expected
    assert whole["usage"]["completion_tokens"] == 5 * len(expected)
    streamed = dict.fromkeys(expected, "")
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == expected


async def test_usage_is_null_until_the_last_chunk(http: httpx.AsyncClient) -> None:
    response = await complete(http, stream=True, max_tokens=2, stream_options={"include_usage": True})

    *chunks, usage, _ = events(response)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 4


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"stop": "wor"}, "wor"), ({"stop_token_ids": [EOS]}, EOS), ({"stop_token_ids": [1]}, None), ({}, None)],
)
async def test_stop_reason_is_what_the_client_asked_to_stop_at(
    http: httpx.AsyncClient, fields: dict[str, Any], reason: str | int | None
) -> None:
    (choice,) = (await complete(http, **fields)).json()["choices"]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


async def test_answer_that_no_token_stopped_has_no_stop_reason(http: httpx.AsyncClient) -> None:
    (choice,) = (await complete(http, max_tokens=2, stop_token_ids=[0])).json()["choices"]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


async def test_error_in_mid_stream_ends_it_without_done(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    dispatch.error, dispatch.error_after = ZeroDivisionError("a secret"), 1
    response = await complete(http, stream=True)

    assert response.status_code == 200
    assert events(response)[-1] == {
        "error": {"message": "internal error", "type": "server_error", "param": None, "code": None}
    }


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (NoReplicaError("x"), 503, "service_unavailable_error"),
        (DeadlineError("x"), 504, "timeout_error"),
        (RequestFailedError("x"), 500, "server_error"),
    ],
)
async def test_errors_keep_their_status(
    http: httpx.AsyncClient, dispatch: FakeDispatch, error: RouterError, status: int, kind: str
) -> None:
    dispatch.error = error
    response = await complete(http, stream=True)

    assert response.status_code == status
    assert response.json() == {"error": {"message": "x", "type": kind, "param": None, "code": None}}


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e10", "soon", ""])
async def test_deadline_that_is_none_is_refused(http: httpx.AsyncClient, dispatch: FakeDispatch, text: str) -> None:
    body = {"prompt": "hello"}
    response = await http.post("/v1/completions", json=body, headers={"X-Request-Timeout": text})

    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": f"X-Request-Timeout is {text!r}; allowed: seconds, more than 0 and at most 1000000000",
        "type": "invalid_request_error",
        "param": "X-Request-Timeout",
        "code": None,
    }
    assert dispatch.calls == []


async def test_unexpected_error_tells_nothing_of_the_inside(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    dispatch.error = ZeroDivisionError("a secret")
    response = await complete(http)

    assert response.status_code == 500
    assert "secret" not in response.text


async def test_impossible_token_has_a_logprob_that_json_can_say(
    http: httpx.AsyncClient, dispatch: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = pb.TokenLogprobs(chosen=pb.Logprob(token_id=65, logprob=-math.inf))
    monkeypatch.setattr("helpers.fake_dispatch._logprobs", lambda *_: never)

    (choice,) = (await complete(http, logprobs=0, max_tokens=1)).json()["choices"]

    assert choice["logprobs"]["token_logprobs"] == [-9999.0]


# What may be asked


async def test_every_sampling_field_arrives(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    numbers: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2,
        "presence_penalty": -0.5, "frequency_penalty": 0.5, "max_tokens": 7, "seed": 9, "logprobs": 3,
    }  # fmt: skip
    flags = {"ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True}
    lists = {"stop": ["q", "z"], "stop_token_ids": [4, 5]}
    others = {"priority": -2, "cache_salt": "pepper", "target_ttft_s": 0.5, "target_tpot_s": 1}
    await complete(http, **numbers, **flags, **lists, **others)

    (call,) = dispatch.calls
    arrived = {name: getattr(call.sampling, name) for name in numbers | flags}
    assert arrived == numbers | flags
    assert (list(call.sampling.stop), list(call.sampling.stop_token_ids)) == (["q", "z"], [4, 5])
    assert {name: getattr(call, name) for name in others} == others
    assert call.model == MODEL


async def test_what_is_not_asked_stays_unset(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    await chat(http, temperature=None, model=None)

    (call,) = dispatch.calls
    assert call.sampling.ListFields() == []
    assert (call.model, call.priority, call.cache_salt) == ("", 0, "")
    assert (call.target_ttft_s, call.target_tpot_s) == (None, None)


async def test_null_max_tokens_leaves_the_rest_of_the_context(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    await complete(http, max_tokens=None)

    assert not dispatch.calls[0].sampling.HasField("max_tokens")


async def test_seed_of_minus_one_is_none(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    await complete(http, seed=-1, n=2)

    assert not any(call.sampling.HasField("seed") for call in dispatch.calls)


async def test_negative_seed_is_taken_as_its_64_bits(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    await complete(http, seed=-2, n=3)

    assert sorted(call.sampling.seed for call in dispatch.calls) == [0, 2**64 - 2, 2**64 - 1]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", [("one", None)]),
        (["one", "two"], [("one", None), ("two", None)]),
        ([1, 2], [(None, [1, 2])]),
        ([[1], [2, 3]], [(None, [1]), (None, [2, 3])]),
        ([[]], [(None, [])]),
    ],
)
async def test_every_form_of_prompt_becomes_a_call_for_each(
    http: httpx.AsyncClient, dispatch: FakeDispatch, prompt: Any, expected: list[Any]
) -> None:
    for indent in (None, 2):
        dispatch.calls.clear()
        response = await http.post("/v1/completions", content=json.dumps({"prompt": prompt}, indent=indent))

        assert response.status_code == 200
        assert [(call.text, call.token_ids) for call in dispatch.calls] == expected


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"max_tokens": "many"}, "max_tokens", "max_tokens has a value that is not allowed: Expected `int"),
        ({"max_tokens": 2**31}, "max_tokens", "<= 2147483647"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"temperature": "hot"}, "temperature", "temperature has"),
        ({"temperature": -1}, "temperature", "temperature is -1.0"),
        ({"target_tpot_s": "fast"}, "target_tpot_s", "target_tpot_s has"),
        ({"n": 0}, "n", "`int` >= 1"),
        ({"n": MAX_CHOICES + 1}, "n", f"<= {MAX_CHOICES}"),
        ({"prompt": ["a"] * 65, "n": 2}, "n", "make 130 choices; allowed: at most 128"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": 3}, "prompt", "prompt is 3; allowed: a string, a list of strings, token ids, or a list of token"),
        ({"prompt": None}, "prompt", "prompt is null; allowed: a string, a list of strings"),
        ({"prompt": [1, "a"]}, "prompt", "prompt[1] has a value that is not allowed: Expected `int`, got `str`"),
        ({"prompt": ["a", [1]]}, "prompt", "prompt[1] has a value that is not allowed: Expected `str`, got `array`"),
        ({"prompt": [[1], "a"]}, "prompt", "prompt[1] has a value that is not allowed: Expected `array`, got `str`"),
        ({"prompt": [[1, [2]]]}, "prompt", "prompt[0][1] has a value that is not allowed: Expected `int`"),
        ({"prompt": {"a": "x" * 80}}, "prompt", 'prompt is {"a":"' + "x" * 34 + "; allowed: a string"),
        ({"prompt": [-1]}, "prompt", "prompt[0] has"),
        ({"prompt": [2**32]}, "prompt", "<= 4294967295"),
        ({"stop": [1]}, "stop", "stop[0] has"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", ">= 0"),
        ({"seed": 2**64}, "seed", "64 bits"),
        ({"seed": 0.5}, "seed", "seed has"),
        ({"stream": "yes"}, "stream", "stream has"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options", "stream is not true"),
        ({"echo": True, "logprobs": 0}, "echo", "echo is true and logprobs is 0, which would be those of the prompt"),
        ({"echo": True, "max_tokens": 0}, "max_tokens", "max_tokens is 0; allowed: at least 1"),
        ({"echo": "yes"}, "echo", "Expected `bool"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "allowed: with messages"),
        ({"continue_final_message": True}, "continue_final_message", "allowed: with messages"),
        ({"best_of": 4}, "best_of", "best_of is 4"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported yet"),
        ({"guided_json": {"type": "object"}}, "guided_json", "not supported yet"),
        ({"regex": "a+"}, "regex", "not supported yet"),
        ({"ebnf": "root ::= 'a'"}, "ebnf", "not supported yet"),
        ({"add_special_tokens": False}, "add_special_tokens", "allowed: true"),
        ({"use_beam_search": "true"}, "use_beam_search", "beam search is not supported"),
        ({"use_beam_search": "perhaps"}, "use_beam_search", "use_beam_search has a value that is not allowed"),
        ({"grammar": "root ::= 'a'"}, "grammar", "guided decoding is not supported yet"),
        ({"stop_regex": "a+"}, "stop_regex", "only strings and token ids"),
        ({"thinking_token_budget": 0}, "thinking_token_budget", "not bounded apart"),
        ({"suppress_tokens": [5]}, "suppress_tokens", "not supported yet"),
        ({"typical_p": 0.5}, "typical_p", "typical_p is 0.5, which is not supported yet; allowed: 1"),
        ({"mirostat": 2}, "mirostat", "mirostat is 2, which is not supported yet; allowed: 0"),
        ({"max_new_tokens": 5}, "max_new_tokens", "max_new_tokens is set; allowed: max_tokens"),
        ({"input_ids": [1]}, "input_ids", "input_ids is set; allowed: prompt"),
    ],
)
async def test_completion_that_is_refused_names_the_field(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str, said: str
) -> None:
    response = await complete(http, **fields)

    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": "Hi"}, "messages", "messages has"),
        ({"messages": [{"content": "Hi"}]}, "messages", "messages[0].role is missing"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "messages[0].content has"),
        ({"messages": [{"role": "user", "content": ["a", 3]}]}, "messages", "messages[0].content[1] has"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "content[0] has no text"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages", "content[0] is no part; allowed"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "messages[0].content[0] is a part of type 'image_url'",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "messages[0] holds tool calls"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported yet"),
        ({"tool_choice": "required"}, "tool_choice", '"required"'),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"modalities": ["audio"]}, "modalities", "audio"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; allowed: 0 to 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs is -1; allowed: 0 to 20"),
        ({"logprobs": 2}, "logprobs", "Expected `bool"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "the model's own"),
        ({"echo": True}, "echo", "echo is set for a conversation; allowed: with prompt"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt", "Expected `bool"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "add_generation_prompt and continue_final_message are both true; allowed: one of them",
        ),
        ({"enable_thinking": False}, "enable_thinking", "allowed: chat_template_kwargs with enable_thinking in it"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "Invalid enum value 'much'"),
        ({"chat_template_kwargs": ["think"]}, "chat_template_kwargs", "chat_template_kwargs has a value"),
        ({"chat_template_kwargs": {"a": "x" * 17_000}}, "chat_template_kwargs", "17008 bytes; allowed: at most 16384"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
        ({"max_completion_tokens": 0, "stream": True}, "max_completion_tokens", "max_completion_tokens is 0"),
    ],
)
async def test_chat_that_is_refused_names_the_field(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str, said: str
) -> None:
    response = await chat(http, **fields)

    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        ("/tokenize", {}, "prompt", "neither of prompt and messages is set; allowed: one of them"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt", "both of prompt and messages is set"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "prompt has a value that is not allowed"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens", "allowed: false"),
        ("/tokenize", {"messages": [USER], "tools": [{}]}, "tools", "not supported yet"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages", "messages[0].content is missing"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "with messages"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": 1}, "chat_template_kwargs", "has a value"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs", "only the ids"),
        ("/detokenize", {}, "tokens", "tokens is missing; it is required"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "tokens[0] has a value that is not allowed"),
    ],
)
async def test_tokenizing_that_is_refused_names_the_field(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    response = await http.post(path, json=fields)

    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert said in error["message"]


@pytest.mark.parametrize(("name", "body"), [("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [97]})])
async def test_tokenizing_ends_at_its_deadline(
    http: httpx.AsyncClient, dispatch: FakeDispatch, monkeypatch: pytest.MonkeyPatch, name: str, body: dict[str, Any]
) -> None:
    async def wait(*args: object, **kwargs: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(dispatch, name, wait)
    headers = {"x-request-timeout": "0.02", "x-request-id": "order-7"}
    response = await http.post(f"/{name}", json=body, headers=headers)

    assert (response.status_code, response.headers["x-request-id"]) == (504, "order-7")
    assert response.json()["error"]["message"] == "the deadline passed before the answer was there"


async def test_allowed_values_are_told_once_each(http: httpx.AsyncClient) -> None:
    for n, allowed in ((1, "1"), (2, "1, 2")):
        response = await complete(http, n=n, best_of=4)
        expected = f"best_of is 4, which is not supported yet; allowed: {allowed}"
        assert response.json()["error"]["message"] == expected


async def test_every_chunk_has_the_usage_so_far_where_it_is_asked_for(
    http: httpx.AsyncClient, dispatch: FakeDispatch
) -> None:
    dispatch.reply = "né"
    options = {"include_usage": True, "continuous_usage_stats": True}
    of_text = events(await complete(http, stream=True, stream_options=options))
    of_chat = events(await chat(http, stream=True, stream_options=options, n=2))

    told = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in of_text[:-1]]
    assert told == [(2, 1), (2, 3), (2, 4), (2, 4)], "no chunk for half a character; then the end and the sum"
    for index in (0, 1):
        own = [chunk["usage"] for chunk in of_chat[:-2] if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in own] == [0, 1, 3, 4]
        assert {usage["total_tokens"] - usage["completion_tokens"] for usage in own} == {2}
    assert of_chat[-2]["usage"]["completion_tokens"] == 8
    alone = events(await complete(http, stream=True, stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in chunk for chunk in alone[:-1]), (
        "as with vLLM it says more of include_usage, and nothing alone"
    )


async def test_detokenized_text_has_the_special_tokens(http: httpx.AsyncClient) -> None:
    response = await http.post("/detokenize", json={"tokens": [72, 105, EOS]})

    assert response.json() == {"prompt": "Hi<eos>"}, "as from other model servers: the prompt that was tokenized"


@pytest.mark.parametrize("two", ["2.0", "2e0", '"2"'])
async def test_integer_may_be_written_as_clients_without_integers_do(
    http: httpx.AsyncClient, dispatch: FakeDispatch, two: str
) -> None:
    """R and Lua have only floats, and so have JavaScript's numbers in some serializers; forms in browsers have text."""
    body = f'"max_tokens": {two}, "top_k": {two}, "seed": {two}, "n": {two}, "stop_token_ids": [{two}]'
    for prompt in ('"text"', "[1, 2.0]", "[[2.0]]"):
        response = await http.post("/v1/completions", content=f'{{"prompt": {prompt}, {body}}}')
        assert response.status_code == 200, response.text
    assert (await http.post("/detokenize", content='{"tokens": [72.0, 105]}')).json() == {"prompt": "Hi"}

    samplings = [call.sampling for call in dispatch.calls]
    assert [(each.max_tokens, each.top_k, each.seed, *each.stop_token_ids) for each in samplings] == [
        (2, 2, 2, 2), (2, 2, 3, 2)
    ] * 3  # fmt: skip
    assert [call.token_ids for call in dispatch.calls[2::2]] == [[1, 2], [2]]


async def test_text_is_never_taken_for_something_else(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    for content in ("null", "2.0", "true", [{"type": "text", "text": "null"}]):
        response = await chat(http, messages=[{"role": "user", "content": content, "name": "null"}], cache_salt="null")
        assert response.status_code == 200
        assert (await complete(http, prompt=content if isinstance(content, str) else "null", stop="2")).is_success

    said = [call.chat.messages[0] for call in dispatch.calls if call.chat]
    assert [(message.content, message.name) for message in said] == [
        ("null", "null"), ("2.0", "null"), ("true", "null"), ("null", "null")
    ]  # fmt: skip
    assert [call.text for call in dispatch.calls if not call.chat] == ["null", "2.0", "true", "null"]
    assert {call.cache_salt for call in dispatch.calls if call.chat} == {"null"}


@pytest.mark.parametrize("number", ["1e999", "9" * 500])
@pytest.mark.parametrize("field", ["temperature", "logit_bias"])
async def test_number_that_is_no_number_here_is_refused(http: httpx.AsyncClient, field: str, number: str) -> None:
    response = await http.post("/v1/completions", content=f'{{"prompt": "a", "{field}": {number}}}')

    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert "out of range" in error["message"] or error["message"].startswith(f"{field} is set")


async def test_field_that_nobody_knows_is_not_read(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b'{"prompt": "a", "foo": [1e999, "\xff"]}')

    assert response.status_code == 200, "to read megabytes for nothing stops all streams meanwhile"


async def test_long_value_of_a_field_that_is_not_served_is_refused_unread(http: httpx.AsyncClient) -> None:
    tools = "[" + "1e999, " * 1000 + "1]"
    response = await http.post("/v1/completions", content=f'{{"prompt": "a", "tools": {tools}}}')

    assert response.json()["error"]["message"] == "tools is set: tool calls are not supported yet"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a"] * 17}, "stop has 17 strings; allowed: at most 16"),
        ({"stop": "a" * 1025}, "stop holds a string of 1025 characters; allowed: 1 to 1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids has 1025 ids; allowed: at most 1024"),
    ],
)
async def test_too_much_to_stop_at_is_refused_before_each_choice_has_a_copy(
    http: httpx.AsyncClient, dispatch: FakeDispatch, fields: dict[str, Any], message: str
) -> None:
    response = await complete(http, n=MAX_CHOICES, **fields)

    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
    assert not dispatch.calls, "4 MiB of it would be 3 GB"


async def test_too_many_prompts_are_refused_before_they_are_made(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    decode = msgspec.json.decode

    def note(data: bytes, *, type: Any, strict: bool) -> Any:
        made.append(type)
        return decode(data, type=type, strict=strict)

    monkeypatch.setattr("router.openai_fields.msgspec.json.decode", note)
    response = await complete(http, prompt=[[1]] * (MAX_CHOICES + 1))

    assert response.json()["error"]["message"].startswith("129 prompts with n=1 make 129 choices")
    assert not [kind for kind in made if "list" in str(kind)], "a million lists are 0.6 s, in which nobody is served"


async def test_calls_of_tools_are_refused_unread(http: httpx.AsyncClient) -> None:
    calls = "[" + "1e999, " * 1000 + "1]"
    message = f'{{"role": "assistant", "content": "", "tool_calls": {calls}}}'
    response = await http.post("/v1/chat/completions", content=f'{{"messages": [{message}]}}')

    assert response.json()["error"]["message"] == "messages[0] holds tool calls, which are not supported yet"


async def test_long_request_id_is_refused_with_its_own_length(http: httpx.AsyncClient) -> None:
    for num_chars, status in ((112, 200), (113, 400)):
        response = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "i" * num_chars})
        assert response.status_code == status
    assert response.json()["error"]["message"] == "X-Request-Id has 113 characters; allowed: at most 112"


async def test_request_id_that_cannot_be_printed_is_refused_by_the_name_of_its_header(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "a\tb"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "X-Request-Id")
    assert error["message"].startswith("X-Request-Id holds a line break, or another character")


async def test_fields_that_ask_for_nothing_are_accepted(http: httpx.AsyncClient) -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s"}
    nothing = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {}, "echo": False}
    nothing |= {"stop_regex": "", "typical_p": 1.0, "mirostat": 0, "repeat_penalty": 1, "enable_thinking": None}
    nothing |= {"use_beam_search": "false", "return_token_ids": 0, "best_of": "1", "top_a": "0"}
    unknown = {"a_field_of_next_year": {"deep": [1, 2]}}

    response = await chat(http, **labels, **nothing, **unknown, add_special_tokens=False, modalities=["text"])

    assert response.status_code == 200

    for options in (None, {}, {"include_usage": False}, {"include_obfuscation": False}):
        assert (await chat(http, stream_options=options)).status_code == 200, options

    response = await chat(http, stream=True, stream_options={"include_usage": None, "continuous_usage_stats": None})

    assert events(response)[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b"\xff\xfe", b'{"x": ' + b"[" * 50_000, b'"\\ud800"']
)
async def test_body_that_is_no_json_object_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post("/v1/completions", content=body)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_missing_prompt_is_named(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"model": MODEL})

    assert response.json()["error"]["message"] == "prompt is missing; it is required"
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("has_length", [True, False])
async def test_body_that_is_too_large_is_refused(url: str, dispatch: FakeDispatch, has_length: bool) -> None:
    body = json.dumps({"prompt": "x" * 1_500_000}).encode()

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    async with httpx.AsyncClient(base_url=url) as http:
        response = await http.post("/v1/completions", content=body if has_length else parts())
        assert response.status_code == 413
        assert "larger than 100000 bytes" in response.json()["error"]["message"]
        assert (await complete(http)).status_code == 200

    assert len(dispatch.calls) == 1


@pytest.mark.parametrize("encoding", ["gzip", "deflate, gzip", "utf-8"])
async def test_body_that_is_packed_is_refused(http: httpx.AsyncClient, encoding: str) -> None:
    body = gzip.compress(b'{"prompt": "Hi"}')
    response = await http.post("/v1/completions", content=body, headers={"content-encoding": encoding})

    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    error = response.json()["error"]
    assert error["message"] == f"Content-Encoding is {encoding!r}; allowed: none, plain JSON"
    assert error["type"] == "invalid_request_error"
    response = await http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers={"content-encoding": "identity"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/completions/", "/v1/models/fake/", "/tokenize/", "/chat/completions", "//", "/v1"]
)
async def test_path_that_is_not_served_is_told_and_nobody_is_sent_elsewhere(http: httpx.AsyncClient, path: str) -> None:
    """A redirect would name the scheme that the router sees, plain http behind a proxy that ends TLS."""
    for method in ("GET", "POST"):
        response = await http.request(method, f"http://weft{path}", json={"prompt": "Hi"})

        assert response.status_code in (404, 405)
        assert "location" not in response.headers
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        if response.status_code == 404 and "models" not in path:
            assert error["message"].startswith(f"{method} {path} is not served; allowed: /v1/models, /v1/models/")
            assert "/v1/chat/completions, /tokenize" in error["message"]


async def test_pages_of_other_origins_may_ask_only_where_the_operator_says_so(dispatch: FakeDispatch) -> None:
    page = {"origin": "https://app.example"}
    preflight = page | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    for allowed, told in (((), None), (("*",), "*"), (("https://app.example", "http://b"), "https://app.example")):
        app = create_app(dispatch, allowed_origins=allowed)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as http:
            asked = await http.options("/v1/completions", headers=preflight)
            assert asked.is_success == bool(allowed)
            if allowed:
                assert asked.headers["access-control-allow-headers"] == preflight["access-control-request-headers"]
            answers = [
                asked,
                await http.post("/v1/completions", json={"prompt": "Hi"}, headers=page),
                await http.post("/v1/completions", json={"prompt": "Hi", "stream": True}, headers=page),
                await http.post("/v1/completions", json={}, headers=page),
                await http.get("/v1/nothing", headers=page),
            ]
            assert [answer.headers.get("access-control-allow-origin") for answer in answers] == [told] * 5
            if allowed:
                assert "X-Request-Id" in answers[1].headers["access-control-expose-headers"]
                assert not any("access-control-allow-credentials" in answer.headers for answer in answers)

            other = await http.post(
                "/v1/completions", json={"prompt": "Hi"}, headers={"origin": "https://evil.example"}
            )
            assert other.headers.get("access-control-allow-origin") == ("*" if allowed == ("*",) else None)


async def test_unknown_path_and_method_answer_in_the_same_form(http: httpx.AsyncClient) -> None:
    for response, status in (
        (await http.get("/v1/nothing"), 404),
        (await http.get("/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_health_readiness_and_version(dispatch: FakeDispatch) -> None:
    is_ready = False
    transport = httpx.ASGITransport(create_app(dispatch, ready=lambda: is_ready))
    async with httpx.AsyncClient(transport=transport, base_url="http://weft") as http:
        for path in ("/health", "/ping"):
            response = await http.get(path)
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
        assert (await http.get("/ready")).status_code == 503
        is_ready = True
        assert (await http.get("/ready")).status_code == 200
        assert "version" in (await http.get("/version")).json()


async def test_ready_follows_the_models_by_default(http: httpx.AsyncClient) -> None:
    assert (await http.get("/ready")).json() == {"ready": True}
