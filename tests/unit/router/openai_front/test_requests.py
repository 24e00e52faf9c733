"""What may be asked, and how a request that is refused is told why."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from helpers.fake_dispatch import EOS, FakeDispatch
from helpers.openai_front import MODEL, USER, chat, complete, events

from router.openai_types import MAX_CHOICES, ChatCompletionRequest, CompletionRequest


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
        ({"eta_cutoff": 0.1}, "eta_cutoff", "allowed: 0"),
        ({"epsilon_cutoff": 0.1}, "epsilon_cutoff", "allowed: 0"),
        ({"tfs": 0.9}, "tfs", "allowed: 1"),
        ({"tfs_z": 0.9}, "tfs_z", "allowed: 1"),
        ({"mirostat": 2}, "mirostat", "mirostat is 2, which is not supported yet; allowed: 0"),
        ({"max_new_tokens": 5}, "max_new_tokens", "max_new_tokens is set; allowed: max_tokens"),
        ({"input_ids": [1]}, "input_ids", "input_ids is set; allowed: prompt"),
        ({"extra_body": {"ignore_eos": True}}, "extra_body", "goes into the body itself"),
        ({"nvext": {"ignore_eos": True}}, "nvext", "goes into the body itself"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "there are no extensions"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "for a prompt that is no conversation; allowed: max_t"),
        ({"top_logprobs": 2}, "top_logprobs", "for a prompt that is no conversation; allowed: logprobs, which is th"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "is no conversation; allowed: with messages"),
        ({"request_id": "i" * 113}, "request_id", "request_id has 113 characters; allowed: at most 112"),
        ({"request_id": "a\nb"}, "request_id", "request_id holds a line break"),
        ({"request_id": "caf\u00e9"}, "request_id", "allowed: ASCII"),
        ({"request_id": 7}, "request_id", "request_id has a value that is not allowed: Expected `str"),
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
        (
            {"messages": [{"role": "user", "content": [""] * num_parts} for num_parts in (4096, 4097)]},
            "messages",
            "the chat has 8193 parts of contents; allowed: at most 8192",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "messages[0] holds tool calls"),
        (
            {"messages": [USER, {"role": "assistant", "content": "So", "prefix": True}]},
            "messages",
            "messages[1].prefix is true; allowed: continue_final_message beside messages",
        ),
        ({"messages": [USER, {"role": "assistant", "partial": True}]}, "messages", "messages[1].partial is true"),
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
        ({"web_search_options": {}}, "web_search_options", "allowed: none, for there is no web search"),
        ({"include_reasoning": False}, "include_reasoning", "is false, which is not supported yet; allowed: true"),
        ({"watermarking": True}, "watermarking", "answers have no watermark"),
        ({"thinking_budget": 0}, "thinking_budget", "thinking is not bounded"),
        ({"thinking": {"type": "disabled"}}, "thinking", "has a variable for it, in chat_template_kwargs"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "is reasoning_effort"),
        ({"return_prompt_text": True}, "return_prompt_text", "is not returned"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "only text is taken"),
        ({"verbosity": "low"}, "verbosity", 'is "low", which is not supported yet; allowed: "medium"'),
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


@pytest.mark.parametrize("prompt", [[1], "a", 'with "quotes" in it\\'])
async def test_too_many_prompts_are_refused_before_they_are_made(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, prompt: object
) -> None:
    made: list[object] = []
    decode = msgspec.json.decode

    def note(data: bytes, *, type: Any, strict: bool) -> Any:
        made.append(type)
        return decode(data, type=type, strict=strict)

    monkeypatch.setattr("router.openai_fields.msgspec.json.decode", note)
    response = await complete(http, prompt=[prompt] * (2 * MAX_CHOICES + 2))

    assert re.match(r"(129|258) prompts with n=1 make (129|258) choices", response.json()["error"]["message"])
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
    nothing |= {"extra_body": {}, "nvext": None, "thinking": {}, "reasoning": None, "return_prompt_text": "false"}
    nothing |= {
        "tfs": 1,
        "eta_cutoff": 0,
        "include_reasoning": "true",
        "verbosity": "medium",
        "mm_processor_kwargs": {},
    }
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


async def test_byte_order_mark_before_the_body_is_passed_over(http: httpx.AsyncClient, dispatch: FakeDispatch) -> None:
    for body in (b'\xef\xbb\xbf{"prompt": "\xef\xbb\xbfHi"}', b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "Hi"}'):
        response = await http.post("/v1/completions", content=body)
    assert [call.text for call in dispatch.calls] == ["\ufeffHi"]
    assert response.status_code == 400, "only the first one is a mark"


async def test_missing_prompt_is_named(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"model": MODEL})

    assert response.json()["error"]["message"] == "prompt is missing; it is required"
    assert response.json()["error"]["param"] == "prompt"


MANUAL = Path(__file__).resolve().parents[4] / "docs/clients.md"


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatCompletionRequest)]
)
def test_the_manual_has_every_field_that_is_served(path: str, kind: type[msgspec.Struct]) -> None:
    section = MANUAL.read_text().partition("## What is served\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (both|`/v1/.+?`).*? \| (`.*) \|$", section, re.MULTILINE)
    told = [name for of, names in rows if of in ("both", f"`{path}`") for name in re.findall(r"`(\w+)`", names)]
    assert sorted(told) == sorted(kind.__struct_fields__)
