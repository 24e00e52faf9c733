"""What the `openai` package gets over a socket."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from helpers.fake_dispatch import CACHED_TOKENS, EOS, FakeDispatch
from helpers.openai_front import MAX_BODY_BYTES, MODEL, USER, chat

from router.call import ChatMessage, Conversation, TokenName
from router.errors import (
    DeadlineError,
    OverloadedError,
    ReplicaFailedError,
    RequestFailedError,
    RouterError,
)


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


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [([EOS], ["a", " a"], [0, 1]), ([EOS] * 9, ["a", " a"], [0, 1]), ([97, *[EOS] * 9], [" a", " a"], [0, 2])],
)
async def test_offsets_count_no_space_that_the_first_word_has_not(
    client: openai.AsyncOpenAI,
    dispatch: FakeDispatch,
    monkeypatch: pytest.MonkeyPatch,
    prompt: list[int],
    tokens: list[str],
    offsets: list[int],
) -> None:
    def token_name(token_id: int) -> TokenName:
        return TokenName(b"<eos>", is_special=True) if token_id == EOS else TokenName(b" a", first_data=b"a")

    monkeypatch.setattr(dispatch, "token_name", token_name)
    dispatch.reply = "aa"
    (choice,) = (await client.completions.create(model=MODEL, prompt=prompt, logprobs=1, max_tokens=2)).choices

    assert choice.logprobs is not None
    assert (choice.logprobs.tokens, choice.logprobs.text_offset) == (tokens, offsets)


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

    def token_name(token_id: int) -> TokenName:
        named.set()
        return TokenName(b"a")

    monkeypatch.setattr(dispatch, "token_name", token_name)
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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("headers", "expected"), [({}, "order-7"), ({"x-request-id": ""}, "order-7"), ({"x-request-id": "mine"}, "mine")]
)
async def test_body_has_the_id_where_the_header_has_none(
    http: httpx.AsyncClient, dispatch: FakeDispatch, path: str, headers: dict[str, str], expected: str
) -> None:
    body = {"prompt": "a", "messages": [USER], "request_id": "order-7"}
    response = await http.post(path, json=body, headers=headers)
    assert response.headers["x-request-id"] == expected
    assert response.json()["id"].partition("-")[2] == expected
    assert dispatch.calls[-1].request_id == f"{response.json()['id']}-0"

    dispatch.error = RequestFailedError("NaN")
    assert (await http.post(path, json=body, headers=headers)).headers["x-request-id"] == expected


async def test_refusals_have_the_id_of_their_request(http: httpx.AsyncClient) -> None:
    for body, status in ((b"{", 400), (b"x" * (MAX_BODY_BYTES + 1), 413)):
        response = await http.post("/v1/completions", content=body, headers={"x-request-id": "order-7"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "order-7")
    assert "x-request-id" not in (await http.get("/v1/completions")).headers


async def test_an_id_that_is_too_long_is_refused_and_the_refusal_has_another(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "x" * 113})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "X-Request-Id has 113 characters; allowed: at most 112"
    assert len(response.headers["x-request-id"]) == 32


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


@pytest.mark.parametrize("kind", [DeadlineError, ReplicaFailedError])
async def test_openai_does_not_ask_again_after_its_deadline_nor_break_more_replicas(
    client: openai.AsyncOpenAI, dispatch: FakeDispatch, kind: type[RouterError]
) -> None:
    dispatch.error = kind("no more")
    with pytest.raises(openai.InternalServerError, match="no more"):
        await client.with_options(max_retries=2).completions.create(model=MODEL, prompt="Hi")

    assert len(dispatch.calls) == 1


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
