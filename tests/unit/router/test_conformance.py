"""One suite over both front ends, gRPC and HTTP: what the replica gets, what the client sees, and every refusal.

A case that names no front compares all of them; the others run over each.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from grpc import StatusCode
from helpers.fake_replica import EOS, FakeReplica, certain_text, expected_tokens
from helpers.fronts import FRONT_NAMES, Answer, Front, RefusedError, TokenLogprob, Usage, ask, open_fronts
from helpers.polling import until
from helpers.router_harness import BOS, ByteTokenizer, prompt_ids, router_config, running_router, text_request
from weft.v1 import inference_pb2 as pb
from weft.v1.replica_pb2 import Submit

from router.config import AdmissionConfig, FailoverConfig, MetricsConfig
from router.keys import hash_key

Fronts = dict[str, Front]

HELLO = expected_tokens(prompt_ids("hello"), 1, 10)
each_front = pytest.mark.parametrize("name", FRONT_NAMES)


@asynccontextmanager
async def serving(*replicas: FakeReplica, **changes: object) -> AsyncIterator[Fronts]:
    """Run a router over replicas, and yield its front ends."""
    config = router_config(*(replica.address for replica in replicas), http_port=0, **changes)
    async with running_router(config) as router, open_fronts(router) as fronts:
        if "api_keys" not in changes:  # which hide whether a replica is ready
            await router.wait_ready(len(replicas))
        yield fronts


async def ask_all(fronts: Fronts, request: pb.GenerateRequest) -> Answer:
    """Ask every front end in turn, check that they answer alike, and return that answer."""
    answers = [await ask(front, request) for front in fronts.values()]
    assert answers[1:] == answers[:-1]
    return answers[0]


async def refusal(front: Front, request: pb.GenerateRequest, key: str | None = None) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        await ask(front, request, key)
    return refused.value


def chat(
    *messages: tuple[str, str],
    variables: str = "",
    opens: bool | None = None,
    continues: bool = False,
    **values: object,
) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    sampling = pb.SamplingParams(**values)  # type: ignore[arg-type]
    prompt = pb.ChatPrompt(
        messages=turns,
        chat_template_kwargs_json=variables,
        add_generation_prompt=opens,
        continue_final_message=continues,
    )
    return pb.GenerateRequest(model="tiny", chat=prompt, sampling=sampling)


def ids(*token_ids: int, **values: object) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(**values)  # type: ignore[arg-type]
    return pb.GenerateRequest(model="tiny", token_ids=pb.TokenIds(ids=token_ids), sampling=sampling)


def hello(*, max_tokens: int = 10, priority: int = 0, cache_salt: str = "", **values: object) -> pb.GenerateRequest:
    """Ask for an answer to "hello", HELLO unless sampling values change it."""
    request = text_request("hello", max_tokens=max_tokens, priority=priority, cache_salt=cache_salt)
    request.sampling.MergeFrom(pb.SamplingParams(**values))  # type: ignore[arg-type]
    return request


def asked(submit: Submit) -> Submit:
    """Return a submission without the request id."""
    bare = Submit()
    bare.CopyFrom(submit)
    bare.ClearField("request_id")
    return bare


def log_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    messages = [record.getMessage() for record in caplog.records if record.name == "router.request_log"]
    return [json.loads(message.removeprefix("request ended: ")) for message in messages]


# What the replica gets

SAMPLING: dict[str, object] = {
    "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.05, "repetition_penalty": 2.5, "min_tokens": 2,
    "presence_penalty": -0.5, "frequency_penalty": 0.3, "logprobs": 3, "stop": ["??", "!"], "stop_token_ids": [4, 5],
    "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
}  # fmt: skip
REQUESTS = {
    "text": hello(),
    "text of several bytes": text_request("né 🙂\n\0"),
    "token ids": ids(1, 2, 256, 299, max_tokens=3, seed=5),
    "chat": chat(("system", "be brief"), ("user", "hi"), ("assistant", "yes"), ("user", ""), max_tokens=3, seed=5),
    "chat of a developer": chat(("developer", "be brief"), ("user", "hi"), max_tokens=3, seed=5),
    "chat with variables": chat(("user", "hi"), variables='{"think": false, "é": [1, "a"]}', max_tokens=3, seed=5),
    "chat that goes on": chat(("user", "hi"), ("assistant", "I"), continues=True, max_tokens=3, seed=5),
    "chat without an opened turn": chat(("user", "hi"), opens=False, max_tokens=3, seed=5),
    "all sampling": hello(**SAMPLING),
    "all sampling of a chat": chat(("user", "hi"), max_tokens=4, seed=5, **SAMPLING),
    "greedy": hello(temperature=0),
    "largest seed": ids(1, max_tokens=1, seed=2**64 - 1),
    "exactly so many": hello(min_tokens=10, ignore_eos=True),
    "all that fits": ids(1, 2, 3, max_tokens=509, min_tokens=509, seed=5),
    "what the context leaves": ids(1, seed=5),
    "chat with what the context leaves": chat(("user", "hi"), seed=5),
    "high priority": hello(priority=-(2**31)),
    "low priority": hello(priority=2**31 - 1),
    "salt": hello(cache_salt="né"),
    "the only model": pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=2, seed=3)),
}


async def test_replica_gets_the_same_submission() -> None:
    async with FakeReplica("a") as a, serving(a) as fronts:
        for what, request in REQUESTS.items():
            a.submits.clear()
            for front in fronts.values():
                await ask(front, request)
            over_grpc, over_http, streamed = map(asked, a.submits)
            assert over_grpc == over_http == streamed, what
            assert (over_grpc.priority, over_grpc.cache_salt) == (request.priority, request.cache_salt), what
            assert over_grpc.sampling.seed == request.sampling.seed, what


async def test_seed_is_drawn_anew_where_none_is_asked_for() -> None:
    async with FakeReplica("a") as a, serving(a) as fronts:
        for front in fronts.values():
            await ask(front, ids(1, 2, max_tokens=1))
    assert len({submit.sampling.seed for submit in a.submits}) == len(fronts)
    for submit in a.submits:
        submit.sampling.ClearField("seed")
    assert len({asked(submit).SerializeToString(deterministic=True) for submit in a.submits}) == 1


@each_front
async def test_router_logs_the_request_id_that_the_client_sees(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica("a") as a, serving(a, metrics=MetricsConfig(log_requests=True)) as fronts:
        answer = await ask(fronts[name], hello())
    (line,) = log_lines(caplog)
    assert answer.request_id
    assert line["request_id"] in (answer.request_id, f"{answer.request_id}-0")  # HTTP numbers its choices


@each_front
async def test_request_id_is_the_one_that_the_client_chose(name: str) -> None:
    async with FakeReplica("a") as a, serving(a) as fronts:
        request = hello()
        request.request_id = "order-7"
        answer = await ask(fronts[name], request)
        assert answer.request_id in ("order-7", "cmpl-order-7")
        assert f"/{answer.request_id}" in a.submits[0].request_id
        request.request_id = "x" * 129
        with pytest.raises(RefusedError, match=r"(?i)request.id has 129 characters; allowed: at most 1") as error:
            await ask(fronts[name], request)
        assert error.value.code is StatusCode.INVALID_ARGUMENT


async def test_targets_are_those_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    request = hello()
    request.target_ttft_s, request.target_tpot_s = 1e-12, 1000.25
    async with FakeReplica("a") as a, serving(a, metrics=MetricsConfig(log_requests=True)) as fronts:
        for front in fronts.values():
            await ask(front, request)
    fields = ("target_ttft_s", "target_tpot_s", "result", "outcome", "generation_tokens")
    assert [[line[field] for field in fields] for line in log_lines(caplog)] == [
        [1e-12, 1000.25, "ttft_missed", "length", 10]
    ] * 3


# What the client sees


async def test_every_front_gives_the_same_answer_to_a_text() -> None:
    async with FakeReplica("a") as a, serving(a) as fronts:
        first = await ask(fronts["grpc"], hello())
        again = await ask_all(fronts, hello())
    assert first.token_ids == HELLO
    assert first == Answer(
        text=certain_text(HELLO, is_over=True),
        finish_reason="length",
        usage=Usage(prompt=6, cached=0, completion=10),
    )
    assert again.usage == Usage(prompt=6, cached=4, completion=10)


@pytest.mark.parametrize("request_name", ["token ids", "chat"])
async def test_every_front_gives_the_same_answer_to_token_ids_and_conversations(request_name: str) -> None:
    request = REQUESTS[request_name]
    async with FakeReplica("a") as a, serving(a) as fronts:
        await ask(fronts["grpc"], request)  # from here on the prompt is cached
        answer = await ask_all(fronts, request)
    prompt = a.submits[0].prompt_token_ids
    assert answer.text == certain_text(expected_tokens(prompt, 5, 3), is_over=True)
    assert answer.finish_reason == "length"
    assert answer.usage == Usage(prompt=len(prompt), cached=len(prompt) // 4 * 4, completion=3)


@pytest.mark.parametrize(("name", "num_texts"), [("grpc", 4), ("http", 1), ("http-stream", 4)])
async def test_pieces_come_with_their_steps_and_add_up_to_the_answer(name: str, num_texts: int) -> None:
    async with FakeReplica("a", paused=True) as a, serving(a) as fronts:
        answer = Answer()
        asking = asyncio.create_task(ask(fronts[name], hello(), into=answer))
        await a.wait_until(lambda: a.num_requests == 1)
        for step in range(10):
            await a.step()
            if num_texts > 1:
                seen = certain_text(HELLO[: step + 1], is_over=step == 9)
                await until(lambda seen=seen: answer.text == seen)  # type: ignore[misc]
        await asking
    assert answer.text == certain_text(HELLO, is_over=True)
    assert answer.num_texts == num_texts


@pytest.mark.parametrize(("keeps_it", "text"), [(False, HELLO[:3]), (True, HELLO[:5])])
async def test_stop_string_ends_the_answer_and_is_told(keeps_it: bool, text: list[int]) -> None:
    stop = "".join(map(chr, HELLO[3:5]))
    request = hello(stop=["??", stop], include_stop_str_in_output=keeps_it)
    async with FakeReplica("a") as a, serving(a) as fronts:
        await ask(fronts["grpc"], request)
        answer = await ask_all(fronts, request)
    assert (answer.text, answer.finish_reason, answer.stop) == ("".join(map(chr, text)), "stop", stop)
    assert answer.usage == Usage(prompt=6, cached=4, completion=5)


async def test_stop_token_ends_the_answer_and_is_told() -> None:
    request = hello(stop_token_ids=[0, HELLO[4]])
    async with FakeReplica("a") as a, serving(a) as fronts:
        await ask(fronts["grpc"], request)
        answer = await ask_all(fronts, request)
    assert (answer.text, answer.finish_reason) == ("".join(map(chr, HELLO[:4])), "stop")
    assert answer.stop == HELLO[4]


async def test_end_of_sequence_stops_unless_it_is_ignored() -> None:
    async with FakeReplica("a") as a, serving(a) as fronts:
        a.eos_position = 7
        await ask(fronts["grpc"], hello())
        ended = await ask_all(fronts, hello())
        ignored = await ask_all(fronts, hello(ignore_eos=True))
    assert (ended.text, ended.finish_reason, ended.stop) == ("".join(map(chr, HELLO[:7])), "stop", None)
    assert (ignored.text[7], len(ignored.text), ignored.finish_reason) == (chr(EOS), 10, "length")


@pytest.mark.parametrize("name", ["http", "http-stream"])
async def test_another_end_of_sequence_than_the_tokenizer_s_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "eos_token_id", BOS)
    async with FakeReplica("a") as a, serving(a) as fronts:
        a.eos_position = 7
        answer = await ask(fronts[name], hello())
    assert (answer.finish_reason, answer.stop) == ("stop", EOS)


@pytest.mark.parametrize("request_name", ["text", "chat"])
async def test_every_front_tells_the_same_logprobs(request_name: str) -> None:
    request = pb.GenerateRequest()
    request.CopyFrom(REQUESTS[request_name])
    request.sampling.logprobs = 2
    async with FakeReplica("a") as a, serving(a) as fronts:
        await ask(fronts["grpc"], request)
        answer = await ask_all(fronts, request)
    assert answer.logprobs == [
        TokenLogprob(token=token, logprob=-0.5, top={token: -0.5, chr(ord(token) + 1): -1.5}) for token in answer.text
    ]


async def test_names_of_tokens_need_no_place() -> None:
    """The answer has the only one."""
    request = hello(logprobs=5)
    async with FakeReplica("a") as a, serving(a, admission=AdmissionConfig(max_in_flight=1, max_queued=0)) as fronts:
        await ask(fronts["grpc"], request)
        answer = await ask_all(fronts, request)
    assert [len(position.top) for position in answer.logprobs] == [5] * 10


async def test_usage_so_far_is_that_of_the_end_at_the_end() -> None:
    body = {"prompt": "hello", "max_tokens": 4, "seed": 1, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, http_port=0)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}", timeout=20, verify=False) as http,
    ):
        await router.wait_ready(1)
        lines = (await http.post("/v1/completions", json=body)).text.split("\n\n")
    *_, end, usage = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    assert end["choices"][0]["finish_reason"] == "length"
    assert end["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert usage["usage"].items() >= end["usage"].items()


async def test_echo_of_token_ids_is_their_text_by_the_model_s_tokenizer() -> None:
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, http_port=0)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}", timeout=20, verify=False) as http,
    ):
        await router.wait_ready(1)
        body = {"prompt": [104, 105], "max_tokens": 3, "seed": 1}
        (plain,) = (await http.post("/v1/completions", json=body)).json()["choices"]
        (echoed,) = (await http.post("/v1/completions", json=body | {"echo": True})).json()["choices"]
    assert echoed["text"] == "hi" + plain["text"]


async def test_tokens_of_text_and_back() -> None:
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, http_port=0)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}", timeout=20, verify=False) as http,
    ):
        await router.wait_ready(1)
        turns = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
        varied = pb.ChatPrompt(messages=turns.messages, chat_template_kwargs_json='{"think": false}')
        user = {"role": "user", "content": "hi"}
        for request, body in (
            (pb.TokenizeRequest(text="hi"), {"prompt": "hi"}),
            (pb.TokenizeRequest(text=""), {"prompt": "", "add_special_tokens": True}),
            (pb.TokenizeRequest(text="hi", add_special_tokens=False), {"prompt": "hi", "add_special_tokens": False}),
            (pb.TokenizeRequest(chat=turns), {"messages": [user]}),
            (pb.TokenizeRequest(chat=varied), {"messages": [user], "chat_template_kwargs": {"think": False}}),
        ):
            over_grpc = await router.stub.Tokenize(request)
            assert (await http.post("/tokenize", json={"model": "tiny"} | body)).json() == {
                "count": len(over_grpc.token_ids),
                "max_model_len": over_grpc.max_context,
                "tokens": list(over_grpc.token_ids),
                "token_strs": None,
            }
            back = await router.stub.Detokenize(pb.DetokenizeRequest(token_ids=over_grpc.token_ids))
            answer = await http.post("/detokenize", json={"tokens": list(over_grpc.token_ids)})
            assert answer.json() == {"prompt": back.text}
        for name, request, body, code in (
            ("Tokenize", pb.TokenizeRequest(model="gpt", text="hi"), {"model": "gpt", "prompt": "hi"}, 404),
            ("Tokenize", pb.TokenizeRequest(chat=pb.ChatPrompt()), {"messages": []}, 400),
            ("Detokenize", pb.DetokenizeRequest(token_ids=[300]), {"tokens": [300]}, 400),
            ("Detokenize", pb.DetokenizeRequest(token_ids=[0] * 513), {"tokens": [0] * 513}, 400),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await getattr(router.stub, name)(request)
            answer = await http.post(f"/{name.lower()}", json=body)
            assert answer.status_code == code
            said = (refused.value.details() or "").replace("token_ids", "tokens")  # as either front calls the field
            assert answer.json()["error"]["message"] == said


async def test_tenants_share_no_prefix() -> None:
    async with FakeReplica("a") as a, serving(a) as fronts:
        used = []
        for salt in ("red", "blue", "red"):
            for front in fronts.values():
                answer = await ask(front, hello(cache_salt=salt))
                assert answer.usage is not None
                used.append(answer.usage.cached)
    assert used == [0, 4, 4] * 2 + [4] * 3


# What is refused

BAD_REQUESTS = {
    "unknown model": (
        pb.GenerateRequest(model="gpt", text="hi"), StatusCode.NOT_FOUND, "model is 'gpt'; served: 'tiny'",
    ),
    "unknown model with a long name": (
        pb.GenerateRequest(model="g" * 2000, text="hi"), StatusCode.NOT_FOUND,
        f"model is '{'g' * 290}... (1427 characters) ...{'g' * 283}'; served: 'tiny'",
    ),
    "empty text": (text_request(""), None, "the prompt is empty; allowed: at least one token"),
    "no token ids": (ids(), None, "the prompt is empty; allowed: at least one token"),
    "no messages": (chat(), None, "messages is empty; allowed: at least one message"),
    "no role": (
        chat(("user", "hi"), ("", "hm")), None,
        "messages[1].role is ''; allowed: 'system', 'user', 'assistant', 'tool'",
    ),
    "strange role": (
        chat(("wizard", "hi")), None, "messages[0].role is 'wizard'; allowed: 'system', 'user', 'assistant', 'tool'",
    ),
    "many messages": (chat(*[("user", "hi")] * 8193), None, "the chat has 8193 messages; allowed: at most 8192"),
    "too long": (
        ids(*[1] * 512), None, "the prompt has 512 tokens; allowed: at most 511, so that one more fits: this "
        "model's maximum context length is 512 tokens",
    ),
    "max_tokens too many": (
        ids(1, 2, 3, max_tokens=510), None, "max_tokens is 510 after a prompt of 3 tokens; allowed: at most 509: "
        "this model's maximum context length is 512 tokens",
    ),
    "id out of range": (ids(1, 300), None, "prompt[1] is 300; allowed: 0 to 299, the model's vocabulary"),
    "stop id out of range": (
        hello(stop_token_ids=[900]), None, "stop_token_ids[0] is 900; allowed: 0 to 299, the model's vocabulary",
    ),
    "many stop ids": (hello(stop_token_ids=[1] * 1025), None, "stop_token_ids has 1025 ids; allowed: at most 1024"),
    "long salt": (hello(cache_salt="s" * 1025), None, "cache_salt has 1025 characters; allowed: at most 1024"),
    "temperature": (hello(temperature=-1), None, "temperature is -1.0; allowed: 0 to 1e+36"),
    "hot": (hello(temperature=3e38), None, "temperature is 3e+38; allowed: 0 to 1e+36"),
    "top_p 0": (hello(top_p=0), None, "top_p is 0.0; allowed: more than 0, at most 1"),
    "top_p 2": (hello(top_p=2), None, "top_p is 2.0; allowed: more than 0, at most 1"),
    "top_k": (hello(top_k=-2), None, "top_k is -2; allowed: at least 1, or 0 or -1 for off"),
    "min_p": (hello(min_p=1.1), None, "min_p is 1.1; allowed: 0 to 1"),
    "repetition_penalty": (
        hello(repetition_penalty=0), None, "repetition_penalty is 0.0; allowed: a finite number, more than 0",
    ),
    "presence_penalty": (hello(presence_penalty=-2.5), None, "presence_penalty is -2.5; allowed: -2 to 2"),
    "frequency_penalty": (hello(frequency_penalty=3), None, "frequency_penalty is 3.0; allowed: -2 to 2"),
    "max_tokens 0": (hello(max_tokens=0), None, "max_tokens is 0; allowed: at least 1"),
    "max_tokens 0 of a chat": (chat(("user", "hi"), max_tokens=0), None, "max_tokens is 0; allowed: at least 1"),
    "min_tokens": (hello(min_tokens=-1), None, "min_tokens is -1; allowed: at least 0"),
    "min_tokens too many": (
        ids(1, 2, 3, min_tokens=510), None, "min_tokens is 510 after a prompt of 3 tokens; allowed: at most 509: "
        "this model's maximum context length is 512 tokens",
    ),
    "min over max": (hello(min_tokens=11), None, "min_tokens is 11; allowed: at most max_tokens (10)"),
    "logprobs": (hello(logprobs=21), None, "logprobs is 21; allowed: 0 to 20"),
    "many stops": (hello(stop=["x"] * 17), None, "stop has 17 strings; allowed: at most 16"),
    "empty stop": (hello(stop=["x", ""]), None, "stop holds a string of 0 characters; allowed: 1 to 1024"),
    "target 0": (
        pb.GenerateRequest(text="hi", target_ttft_s=0), None, "target_ttft_s is 0.0; allowed: a finite number, more "
        "than 0",
    ),
    "target": (
        pb.GenerateRequest(text="hi", target_tpot_s=-0.1), None, "target_tpot_s is -0.1; allowed: a finite number, "
        "more than 0",
    ),
}  # fmt: skip
"""Request, status (None: INVALID_ARGUMENT), message."""


async def test_what_does_not_fit_into_the_context_has_a_code_that_clients_know() -> None:
    long: dict[str, Any] = {"messages": [{"role": "user", "content": "a" * 512}]}
    short: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, http_port=0)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}/v1", timeout=20, verify=False) as http,
    ):
        await router.wait_ready(1)
        for path, body, param in (
            ("/chat/completions", long, "messages"),
            ("/chat/completions", short | {"max_completion_tokens": 510}, "max_completion_tokens"),
            ("/completions", {"prompt": "a" * 512}, "prompt"),
            ("/completions", {"prompt": [1, 2], "max_tokens": 511}, "max_tokens"),
        ):
            error = (await http.post(path, json=body)).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        error = (await http.post("/completions", json={"prompt": [300]})).json()["error"]
        assert (error["code"], error["param"]) == (None, "prompt")


async def test_param_is_what_an_http_client_calls_the_field() -> None:
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, http_port=0)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}", timeout=20, verify=False) as http,
    ):
        await router.wait_ready(1)
        for path, body, param, message in (
            ("/detokenize", {"tokens": [1, 300]}, "tokens", "tokens[1] is 300; allowed: 0 to 299, the model's"),
            ("/detokenize", {"tokens": [1] * 513}, "tokens", "there are 513 tokens; allowed: at most 512, the model's"),
            ("/v1/completions", {"prompt": "a", "temperature": 3e38}, "temperature", "temperature is 3e+38; allowed:"),
        ):
            error = (await http.post(path, json=body)).json()["error"]
            assert (error["param"], error["message"][: len(message)]) == (param, message)


@each_front
async def test_bad_request_is_refused_with_one_message(name: str) -> None:
    async with FakeReplica("a") as a, serving(a) as fronts:
        for what, (request, code, message) in BAD_REQUESTS.items():
            refused = await refusal(fronts[name], request)
            assert (refused.code, refused.message) == (code or StatusCode.INVALID_ARGUMENT, message), what
        assert (await ask(fronts[name], hello())).finish_reason == "length"
    assert len(a.submits) == 1, "no bad request reaches a replica"


SOON = FailoverConfig(new_request_wait_s=0.02, failover_wait_s=0.02)
REPLICA_REFUSALS = {
    StatusCode.INVALID_ARGUMENT: "scripted refusal",
    StatusCode.INTERNAL: "scripted refusal",
    StatusCode.DEADLINE_EXCEEDED: "the deadline passed after 0 tokens",
    StatusCode.UNAVAILABLE: "no replica of model 'tiny' was ready for 0.02 s",
    StatusCode.RESOURCE_EXHAUSTED: "all replicas of model 'tiny' are full",
}


@pytest.mark.parametrize("code", REPLICA_REFUSALS, ids=lambda code: code.name)
async def test_what_the_replica_refuses_has_one_status(code: StatusCode) -> None:
    async with FakeReplica("a") as a, serving(a, failover=SOON) as fronts:
        a.refusal = code
        refused = [await refusal(front, hello()) for front in fronts.values()]
    assert {(each.code, each.message) for each in refused} == {(code, REPLICA_REFUSALS[code])}
    if code is StatusCode.RESOURCE_EXHAUSTED:
        assert all(each.retry_after_ms is not None and each.retry_after_ms >= 100 for each in refused)
    else:
        assert {each.retry_after_ms for each in refused} == {None}


async def test_full_queue_refuses_with_a_hint() -> None:
    admission = AdmissionConfig(max_in_flight=1, max_queued=0)
    async with FakeReplica("a", paused=True) as a, serving(a, admission=admission) as fronts:
        asking = asyncio.create_task(ask(fronts["grpc"], hello()))
        await a.wait_until(lambda: a.num_requests == 1)
        refused = [await refusal(front, hello()) for front in fronts.values()]
        a.resume()
        await asking
    assert {each.code for each in refused} == {StatusCode.RESOURCE_EXHAUSTED}
    assert len({each.message for each in refused}) == 1
    assert all(each.retry_after_ms is not None and each.retry_after_ms >= 100 for each in refused)


@each_front
async def test_deadline_reaches_the_replica_and_ends_the_request(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logs = MetricsConfig(log_requests=True)
    async with FakeReplica("a", paused=True) as a, serving(a, metrics=logs) as fronts:
        while not a.submits:  # on a busy machine the deadline may pass on the way there
            with pytest.raises(RefusedError) as refused:
                await ask(fronts[name], hello(), timeout_s=0.3)
        await a.wait_until(lambda: a.num_requests == 0)
        a.resume()
        assert (await ask(fronts[name], hello(), timeout_s=3600)).finish_reason == "length"
    late, served = a.submits
    assert refused.value.code is StatusCode.DEADLINE_EXCEEDED
    assert 0 < late.timeout_s <= 0.35  # gRPC rounds up, here and below
    assert 3000 < served.timeout_s < 4000
    assert a.aborts == [late.request_id]
    assert [line["outcome"] for line in log_lines(caplog)][-2:] == ["deadline_exceeded", "length"]


@pytest.mark.parametrize(
    ("code", "message", "seen"),
    [
        (StatusCode.INTERNAL, "the sampler saw a NaN", "the sampler saw a NaN"),
        (StatusCode.DEADLINE_EXCEEDED, "late", "the deadline passed after 4 tokens"),
    ],
    ids=["internal", "deadline"],
)
@pytest.mark.parametrize(
    ("name", "text"), [("grpc", HELLO[:3]), ("http", []), ("http-stream", HELLO[:3])], ids=FRONT_NAMES
)
async def test_failure_in_mid_answer_keeps_what_was_sent(
    name: str, text: list[int], code: StatusCode, message: str, seen: str
) -> None:
    async with FakeReplica("a", paused=True) as a, serving(a) as fronts:
        answer = Answer()
        asking = asyncio.create_task(ask(fronts[name], hello(), into=answer))
        await a.wait_until(lambda: a.num_requests == 1)
        await a.step(4)
        await until(lambda: answer.text == certain_text(text))
        a.fail_requests(code, message)
        with pytest.raises(RefusedError, match=f"^{seen}$") as refused:
            await asking
    assert refused.value.code is code
    assert (answer.text, answer.finish_reason) == (certain_text(text), None)


# What breaks


@pytest.mark.parametrize(("name", "num_steps"), [(name, 0) for name in FRONT_NAMES] + [("grpc", 4), ("http-stream", 4)])
async def test_client_that_leaves_aborts_at_the_replica(name: str, num_steps: int) -> None:
    async with FakeReplica("a", paused=True) as a, serving(a) as fronts:
        answer = Answer()
        asking = asyncio.create_task(ask(fronts[name], hello(), into=answer))
        await a.wait_until(lambda: a.num_requests == 1)
        await a.step(num_steps)
        await until(lambda: answer.text == certain_text(HELLO[:num_steps]))
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await a.wait_until(lambda: a.num_requests == 0)
    assert a.aborts == [a.submits[0].request_id]


@each_front
async def test_replica_that_breaks_in_mid_stream_is_not_seen(name: str) -> None:
    async with FakeReplica("a", paused=True) as a, FakeReplica("b", paused=True) as b, serving(a, b) as fronts:
        answer = Answer()
        asking = asyncio.create_task(ask(fronts[name], hello(), into=answer))
        await until(lambda: bool(a.num_requests or b.num_requests))
        first, second = (a, b) if a.num_requests else (b, a)
        await first.step(4)
        if name != "http":
            await until(lambda: bool(answer.text))
        second.resume()
        first.break_streams()
        await asking
    assert answer == Answer(
        text=certain_text(HELLO, is_over=True),
        finish_reason="length",
        usage=Usage(prompt=6, cached=0, completion=10),
    )
    (moved,) = second.submits
    assert moved.sampling == first.submits[0].sampling
    assert list(moved.generated_token_ids) == HELLO[: len(moved.generated_token_ids)]


# Who may ask

PATIENT = FailoverConfig(new_request_wait_s=10.0)


@each_front
async def test_only_a_known_key_opens(name: str, tmp_path: Path) -> None:
    entry: dict[str, Any] = {"name": "alice", "sha256": hash_key("wk-alice"), "isolate_cache": True}
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [entry]}))
    async with FakeReplica("a") as a, serving(a, api_keys=str(path), failover=PATIENT) as fronts:
        none = await refusal(fronts[name], hello())
        wrong = await refusal(fronts[name], hello(), "wk-bob")
        answer = await ask(fronts[name], hello(cache_salt="x"), "wk-alice")
    assert (none.code, none.message) == (
        StatusCode.UNAUTHENTICATED,
        "the request has no API key; allowed: 'authorization: Bearer KEY'",
    )
    assert (wrong.code, wrong.message) == (StatusCode.UNAUTHENTICATED, "the API key is not known")
    assert answer.finish_reason == "length"
    assert [submit.cache_salt for submit in a.submits] == ["key/5/alice/x"]
