"""The gRPC face: what a good call gives, and what only gRPC has; what HTTP has too is in test_conformance.py."""

import asyncio
import sys
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from helpers.fake_control import FakeControl
from helpers.fake_replica import FakeReplica, certain_text, expected_tokens
from helpers.polling import GUARD_S, poll
from helpers.router_harness import (
    SMALLEST_WINDOW,
    ByteTokenizer,
    RunningRouter,
    prompt_ids,
    router_config,
    running_router,
    text_request,
)
from weft.v1 import inference_pb2 as pb
from weft.v1.inference_pb2_grpc import InferenceStub

from router.config import ClientConfig
from router.errors import DeadlineError
from router.server import _abort, _abort_unexpected

NAN = float("nan")


def tiny(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": "tiny", "text": "hi", **fields})  # type: ignore[arg-type]


def sampled(**values: object) -> pb.GenerateRequest:
    return tiny(sampling=pb.SamplingParams(**values))  # type: ignore[arg-type]


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(model="tiny", chat=pb.ChatPrompt(messages=turns))


BAD_INPUTS = {
    "no prompt": (pb.GenerateRequest(model="tiny"), "the request has no prompt; allowed: text, chat or token_ids"),
    "temperature nan": (sampled(temperature=NAN), "temperature is nan; allowed: 0 to 1e+36"),
    "temperature inf": (sampled(temperature=float("inf")), "temperature is inf; allowed: 0 to 1e+36"),
    "target nan": (tiny(target_tpot_s=NAN), "target_tpot_s is nan; allowed: a finite number, more than 0"),
    "target inf": (tiny(target_tpot_s=float("inf")), "target_tpot_s is inf; allowed: a finite number, more than 0"),
    "top_p nan": (sampled(top_p=NAN), "top_p is nan; allowed: more than 0, at most 1"),
    "frequency_penalty": (sampled(frequency_penalty=NAN), "frequency_penalty is nan; allowed: -2 to 2"),
    "id of two lines": (tiny(request_id="a\nb"), "request_id holds a line break, or another character that cannot be"),
    "long id": (tiny(request_id="x" * 129), "request_id has 129 characters; allowed: at most 128"),
}
"""What only gRPC can ask for; the rest is in test_conformance.py."""


async def test_bad_input_is_refused_with_what_was_seen_and_what_is_allowed() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        for name, (request, message) in BAD_INPUTS.items():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await router.generate(request)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert (error.value.details() or "").startswith(message), name
        answer = await router.generate(text_request("hi"))
    assert answer.num_finished == 1, "bad requests disturb no good one"
    assert len(a.submits) == 1, "no bad request reaches a replica"


class _GoneContext:
    """Of a call whose client has gone."""

    async def abort(self, *args: object) -> None:
        raise grpc.aio.InternalError("execute_batch")


async def test_long_conversation_is_refused_before_its_messages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr("router.convert.ChatMessage", lambda **fields: read.append(fields))
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        messages = pb.ChatPrompt(messages=[pb.ChatMessage()] * 8193)
        for call in (
            router.generate(pb.GenerateRequest(model="tiny", chat=messages)),
            router.stub.Tokenize(pb.TokenizeRequest(model="tiny", chat=messages)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="the chat has 8193 messages; allowed: at most 8192"):
                await call
    assert not read, "4 MiB hold 2 million empty messages; reading them stops all streams for seconds"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("[1]", "chat_template_kwargs_json: Expected `object`, got `array`; allowed: a JSON object, such as"),
        ("{", "chat_template_kwargs_json: Input data was truncated; allowed: a JSON object"),
        pytest.param(
            '{"a": ' + "[" * 4000 + "]" * 4000 + "}",
            "chat_template_kwargs_json: maximum recursion depth exceeded",
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python reads what 16 KiB hold"),
        ),
        ('{"a": "' + "é" * 8200 + '"}', "chat_template_kwargs has 16409 bytes; allowed: at most 16384"),
    ],
)
async def test_what_is_no_variables_for_a_chat_template_is_refused(variables: str, said: str) -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        turns = [pb.ChatMessage(role="user", content="hi")]
        chat = pb.ChatPrompt(messages=turns, chat_template_kwargs_json=variables)
        for call in (
            router.generate(pb.GenerateRequest(model="tiny", chat=chat)),
            router.stub.Tokenize(pb.TokenizeRequest(model="tiny", chat=chat)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in (refused.value.details() or "")


async def test_conversation_opens_a_turn_or_goes_on() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        turns = [pb.ChatMessage(role="user", content="hi")]
        chat = pb.ChatPrompt(messages=turns, add_generation_prompt=True, continue_final_message=True)
        with pytest.raises(grpc.aio.AioRpcError, match="are both true; allowed: one of them"):
            await router.generate(pb.GenerateRequest(model="tiny", chat=chat))


async def test_ids_that_cannot_be_served_are_counted_and_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[object] = []
    for module in ("convert", "dispatch", "server"):
        monkeypatch.setattr(f"router.{module}.tuple", looked_at.append, raising=False)
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        ids = [1] * (1 << 20)
        for call, message in (
            (router.generate(pb.GenerateRequest(model="tiny", token_ids=pb.TokenIds(ids=ids))), "has 1048576 tokens"),
            (router.stub.Detokenize(pb.DetokenizeRequest(model="tiny", token_ids=ids)), "there are 1048576 token_ids"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=message):
                await call
    assert not looked_at, "4 MiB hold 4 million; a tuple of them is made in 0.13 s, in which nobody is served"


async def test_error_that_no_client_is_there_to_read_ends_the_call_quietly() -> None:
    for abort, error in ((_abort, DeadlineError("late")), (_abort_unexpected, grpc.aio.InternalError("write"))):
        with pytest.raises(asyncio.CancelledError):  # what gRPC logs nothing of
            await abort(_GoneContext(), error)  # type: ignore[arg-type]


async def test_message_over_the_cap_is_refused() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.generate(tiny(text="x" * (10 << 20)))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4194304" in (error.value.details() or "")
        assert (await router.generate(text_request("hi"))).num_finished == 1


async def test_message_that_cannot_be_read_is_refused_as_any_other(caplog: pytest.LogCaptureFixture) -> None:
    cut = tiny(text="a").SerializeToString().replace(b"\x01a", b"\x01\xf0")  # within a character
    assert len(cut) == tiny(text="a").ByteSize()
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics_port=0)) as router:
        await router.wait_ready(1)
        for name in ("Generate", "Tokenize", "Detokenize"):
            call = router.channel.unary_unary(f"/weft.v1.Inference/{name}")
            with pytest.raises(grpc.aio.AioRpcError, match="the message cannot be read: Error parsing") as refused:
                await call(cut if name != "Detokenize" else b"\x0a\x01\xf0", timeout=GUARD_S)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert await router.metric("weft_router_requests_total", model="", outcome="invalid_argument") == 1
        assert (await router.generate(text_request("hi"))).num_finished == 1
    assert "Traceback" not in caplog.text


async def test_answer_streams_text_tokens_logprobs_and_usage() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        request = text_request("hello", max_tokens=7, request_id="mine", cache_salt="s", priority=3)
        request.model = ""
        request.sampling.logprobs = 0
        responses = [response async for response in router.stub.Generate(request)]
    tokens = expected_tokens(prompt_ids("hello"), 1, 7)
    assert [t for r in responses for t in r.token_ids] == tokens
    assert "".join(r.text for r in responses) == certain_text(tokens, is_over=True)
    assert [p.chosen.token_id for r in responses for p in r.logprobs] == tokens
    assert {(r.request_id, r.model) for r in responses} == {("mine", "tiny")}
    finished = responses[-1].finished
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert list(finished.replica_ids) == [a.address]
    assert finished.usage == pb.Usage(
        prompt_tokens=6, cached_tokens=0, completion_tokens=7, queue_s=0.25, prefill_s=0.5, decode_s=1.0
    )
    (submit,) = a.submits
    assert (submit.cache_salt, submit.priority, submit.timeout_s) == ("s", 3, 0)


async def test_defaults_come_from_the_request_then_the_model_then_the_protocol() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        await router.generate(sampled(temperature=0.5, top_k=-1, max_tokens=1))
        await router.generate(sampled(max_tokens=1))
        await router.generate(tiny())
    given, drawn, whole = (submit.sampling for submit in a.submits)
    assert (given.temperature, given.top_k) == (0.5, 0)
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.repetition_penalty) == (1, 40, 1, 1)
    assert drawn.skip_special_tokens
    assert drawn.HasField("ignore_eos")
    assert not drawn.HasField("logprobs")
    assert len({given.seed, drawn.seed, whole.seed}) == 3
    assert whole.max_tokens == 512 - 3


async def test_chat_goes_through_the_template() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        await router.generate(chat(("system", "be"), ("user", "hi")))
    assert bytes(a.submits[0].prompt_token_ids) == b"<system>be<user>hi"


async def test_text_and_conversations_become_tokens_and_tokens_text() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        plain = await router.stub.Tokenize(pb.TokenizeRequest(text="hi"))
        bare = await router.stub.Tokenize(pb.TokenizeRequest(model="tiny", text="hi", add_special_tokens=False))
        turns = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
        rendered = await router.stub.Tokenize(pb.TokenizeRequest(chat=turns))
        text = await router.stub.Detokenize(pb.DetokenizeRequest(token_ids=plain.token_ids))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.stub.Detokenize(pb.DetokenizeRequest(token_ids=[300]))
        with pytest.raises(grpc.aio.AioRpcError, match="there are 513 token_ids; allowed: at most 512"):
            await router.stub.Detokenize(pb.DetokenizeRequest(token_ids=[0] * 513))
    assert list(plain.token_ids) == prompt_ids("hi")
    assert plain.max_context == 512
    assert bytes(bare.token_ids) == b"hi"
    assert bytes(rendered.token_ids) == b"<user>hi"
    assert text.text == "hi"
    assert error.value.details() == "token_ids[0] is 300; allowed: 0 to 299, the model's vocabulary"


async def test_ids_are_those_of_the_replicas_vocabulary_and_of_the_tokenizers_where_none_was_there_yet() -> None:
    class SmallTokenizer(ByteTokenizer):
        vocab_size = 280

    async with (
        FakeControl() as control,
        FakeReplica("a") as a,
        running_router(router_config(control=control.address), load_tokenizer=lambda _: SmallTokenizer()) as router,
    ):
        control.set_replicas({})
        await router.wait_ready(0)
        asked = pb.DetokenizeRequest(model="tiny", token_ids=[*b"hi", 290])
        with pytest.raises(grpc.aio.AioRpcError, match=r"token_ids\[2\] is 290; allowed: 0 to 279"):
            await router.stub.Detokenize(asked)
        control.set_replicas({"a": a.address})
        await router.wait_ready(1)
        assert (await router.stub.Detokenize(asked)).text == "hi"


async def test_failed_request_says_why_and_others_go_on() -> None:
    async with FakeReplica("a", paused=True) as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        answering = asyncio.create_task(router.generate(text_request("bad")))
        await a.wait_until(lambda: a.num_requests == 1)
        a.fail_requests(grpc.StatusCode.INTERNAL, "the sampler saw a NaN")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await answering
        a.resume()
        assert (await router.generate(text_request("good"))).num_finished == 1
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert error.value.details() == "the sampler saw a NaN"


async def test_client_that_does_not_read_is_given_up_and_one_that_waits_is_not() -> None:
    async with FakeReplica("a", paused=True) as a:
        config = router_config(a.address, metrics_port=0, clients=ClientConfig(write_timeout_s=0.2))
        async with (
            running_router(config) as router,
            grpc.aio.insecure_channel(router.addresses.grpc, SMALLEST_WINDOW) as channel,
        ):
            await router.wait_ready(1)
            waiting = asyncio.create_task(router.generate(text_request("waits")))
            await a.wait_until(lambda: a.num_requests == 1)
            stuck = InferenceStub(channel).Generate(text_request("does not read"))
            await a.wait_until(lambda: a.num_requests == 2)
            await a.step()
            assert await stuck.read() is not grpc.aio.EOF
            await a.step()
            assert await router.outcomes(1) == {"cancelled": 1}
            await a.wait_until(lambda: a.num_requests == 1)
            a.resume()
            assert (await waiting).num_finished == 1
            assert await stuck.read() is not grpc.aio.EOF
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stuck.read()
    assert error.value.code() is grpc.StatusCode.CANCELLED
    assert error.value.details() == "the client took nothing of the answer for 0.2 s"


async def test_any_time_to_write_can_be_set() -> None:
    config = router_config("127.0.0.1:1", clients=ClientConfig(write_timeout_s=1e9))
    async with running_router(config) as router:
        assert router.addresses.grpc


@pytest.mark.parametrize(("write_timeout_s", "lasts_s"), [(0.2, 10), (60.0, 60)])
async def test_connection_without_room_lasts_as_long_as_a_client_may_take_nothing(
    write_timeout_s: float, lasts_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC hands this time to the system, which ends a connection that acknowledges nothing for so long."""
    options: dict[str, object] = {}
    make_server = grpc.aio.server

    def server(**arguments: Any) -> grpc.aio.Server:
        options.update(arguments["options"])
        return make_server(**arguments)

    monkeypatch.setattr("grpc.aio.server", server)
    async with running_router(router_config("127.0.0.1:1", clients=ClientConfig(write_timeout_s=write_timeout_s))):
        assert options["grpc.keepalive_timeout_ms"] == lasts_s * 1000


async def test_no_ready_replica_is_unavailable_after_a_bounded_wait() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        await a.die()
        await router.wait_ready(0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.generate(text_request("hello"))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error.value.details() == "no replica of model 'tiny' was ready for 0.5 s"


async def check_health(router: RunningRouter, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(router.channel)  # type: ignore[no-untyped-call]
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def test_liveness_always_serves_and_readiness_follows_the_replicas() -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await poll(lambda: check_health(router, "weft.v1.Inference"), serving)
        await a.die()
        await poll(lambda: check_health(router, "weft.v1.Inference"), not_serving)
        assert await check_health(router, "") == serving


async def test_watcher_that_does_not_read_keeps_nobody_from_hearing_that_readiness_changed() -> None:
    request = health_pb2.HealthCheckRequest(service="weft.v1.Inference")
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await poll(router.is_ready, True)
        async with grpc.aio.insecure_channel(router.addresses.grpc, SMALLEST_WINDOW) as channel:
            stalled = health_pb2_grpc.HealthStub(channel).Watch(request)  # type: ignore[no-untyped-call]
            await stalled.initial_metadata()  # comes with the answer
            watching = health_pb2_grpc.HealthStub(router.channel).Watch(request, timeout=GUARD_S)  # type: ignore[no-untyped-call]
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
            await a.die()
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_one_watcher_too_many_is_refused_until_another_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.server._MAX_STREAMS", 2)
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        stub = health_pb2_grpc.HealthStub(router.channel)  # type: ignore[no-untyped-call]
        watching = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=GUARD_S) for _ in range(2)]
        for call in watching:
            await call.read()

        async def code_of_next() -> grpc.StatusCode | None:
            call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=GUARD_S)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                return error.code()
            return None

        assert await code_of_next() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await check_health(router, "") == health_pb2.HealthCheckResponse.SERVING
        watching[0].cancel()
        await poll(code_of_next, None)


async def test_reflection_lists_the_services() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)  # type: ignore[no-untyped-call]
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        response: Message = await anext(aiter(call))
    names = {service.name for service in response.list_services_response.service}  # type: ignore[attr-defined]
    assert {"weft.v1.Inference", "grpc.health.v1.Health"} <= names
