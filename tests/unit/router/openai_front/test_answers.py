"""The form of answers, streams and errors, and clients that go away."""

import asyncio
import math
from typing import Any

import httpx
import openai
import pytest
from helpers.fake_dispatch import CACHED_TOKENS, EOS, FakeDispatch
from helpers.openai_front import MODEL, chat, complete, events
from weft.v1 import inference_pb2 as pb

from router.call import GenerateCall, GenerateDelta, TokenName
from router.errors import (
    DeadlineError,
    NoReplicaError,
    OverloadedError,
    RequestFailedError,
    RouterError,
    UnauthenticatedError,
)
from router.openai_render import CompletionRenderer


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


async def test_whole_answers_have_the_exact_form(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    dispatch.reply = "é"
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    usage |= {"prompt_tokens_details": {"cached_tokens": CACHED_TOKENS}}
    ending = {"finish_reason": "stop", "stop_reason": None}
    message = {"role": "assistant", "content": "é", "refusal": None}
    for ask, name, content in (
        (complete, "text_completion", {"text": "é"}),
        (chat, "chat.completion", {"message": message}),
    ):
        answer = (await ask(http)).json()
        shared = {key: answer[key] for key in ("id", "created")} | {"object": name, "model": MODEL, "usage": usage}
        assert answer == shared | {"choices": [{"index": 0, "logprobs": None} | content | ending]}


async def test_completion_stream_has_the_exact_chunks(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    dispatch.reply = "é"

    content, last, done = events(await complete(http, stream=True))

    shared = {key: content[key] for key in ("id", "created")} | {"object": "text_completion", "model": MODEL}
    choice = {"index": 0, "logprobs": None, "stop_reason": None}
    assert content == shared | {"choices": [choice | {"text": "é", "finish_reason": None}]}
    assert last == shared | {"choices": [choice | {"text": "", "finish_reason": "stop"}]}
    assert done == "[DONE]"


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


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reason_is_another_end_of_sequence_than_the_tokenizer_s(
    http: httpx.AsyncClient, dispatch: FakeDispatch, *, stream: bool
) -> None:
    dispatch.eos_token_id = EOS + 1
    response = await complete(http, stream=stream)

    (choice,) = (events(response)[-2] if stream else response.json())["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", EOS)


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
    ("error", "status", "kind", "code"),
    [
        (NoReplicaError("x"), 503, "service_unavailable_error", None),
        (DeadlineError("x"), 504, "timeout_error", None),
        (RequestFailedError("x"), 500, "server_error", None),
        (OverloadedError("x", retry_after_s=1), 429, "rate_limit_error", "rate_limit_exceeded"),
        (UnauthenticatedError("x"), 401, "invalid_request_error", "invalid_api_key"),
    ],
)
async def test_errors_keep_their_status(
    http: httpx.AsyncClient, dispatch: FakeDispatch, error: RouterError, status: int, kind: str, code: str | None
) -> None:
    dispatch.error = error
    response = await complete(http, stream=True)

    assert response.status_code == status
    assert response.json() == {"error": {"message": "x", "type": kind, "param": None, "code": code}}


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


async def test_streamed_logprobs_of_a_chat_equal_whole_ones(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    dispatch.reply = "Aé"
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}

    (whole,) = (await chat(http, **asked)).json()["choices"]
    *chunks, _ = events(await chat(http, **asked, stream=True))

    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    joined = [entry for part in parts for entry in part["content"]]
    assert len(joined) == 4
    assert whole["logprobs"] == {"content": joined, "refusal": None}


@pytest.mark.parametrize(
    ("fields", "offset"), [({}, 1), ({"skip_special_tokens": True}, 1), ({"skip_special_tokens": False}, 4)]
)
async def test_offsets_count_special_tokens_where_the_text_has_them(
    http: httpx.AsyncClient,
    dispatch: FakeDispatch,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    offset: int,
) -> None:
    def token_name(token_id: int) -> TokenName:
        return TokenName(b"<x>", is_special=True) if token_id == ord(" ") else TokenName(bytes([token_id]))

    monkeypatch.setattr(dispatch, "token_name", token_name)
    dispatch.reply = "a b"
    (choice,) = (await complete(http, logprobs=0, max_tokens=3, **fields)).json()["choices"]

    assert choice["logprobs"]["tokens"] == ["a", "<x>", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, offset]


async def test_last_token_alone_tells_of_a_character_that_was_cut(dispatch: FakeDispatch) -> None:
    call = GenerateCall(model=MODEL, text="Hi", sampling=pb.SamplingParams())
    renderer = CompletionRenderer(
        (call,),
        response_id="x",
        created=0,
        choices_per_prompt=1,
        echoes=False,
        include_usage=False,
        include_usage_so_far=False,
        dispatch=dispatch,
    )
    token_ids = tuple("éé".encode()[:3])
    (chunk,) = await renderer.chunks(
        0,
        GenerateDelta(
            request_id="x",
            model=MODEL,
            token_ids=token_ids,
            tokenizer=dispatch,
            logprobs=tuple(pb.TokenLogprobs(chosen=pb.Logprob(token_id=each)) for each in token_ids),
            finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH),
        ),
    )
    assert chunk["choices"][0]["logprobs"]["tokens"] == ["", "é", "\ufffd"]
