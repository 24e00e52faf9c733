"""The Python SDK, sync and async, against the gRPC front over a fake dispatcher on a loopback port."""

import asyncio
import math
import pickle
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import trustme
from helpers.certificates import inner_tls
from helpers.fake_dispatch import CACHED_TOKENS, EOS, FakeDispatch
from helpers.ports import unlisted_port
from weft.addresses import join_host_port, split_host_port

from router import client as client_module
from router.call import ChatMessage, Conversation
from router.client import (
    AsyncClient,
    BadRequestError,
    CallCancelledError,
    Client,
    ClientError,
    DeadlineError,
    Delta,
    ModelInfo,
    NotFoundError,
    OverloadedError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
)
from router.client_values import Collector, Finish, Usage
from router.client_wire import generate_request
from router.errors import DeadlineError as RouterDeadlineError
from router.errors import NoReplicaError, ReplicaFailedError, SlowClientError
from router.errors import OverloadedError as RouterOverloadedError
from router.server import GrpcListener
from router.tls import TlsFiles

MAX_MESSAGE_BYTES = 1 << 20
USER = {"role": "user", "content": "Hi"}
USAGE = Usage(prompt_tokens=2, cached_tokens=0, completion_tokens=2, queue_s=0, prefill_s=0, decode_s=0)


@pytest.fixture
def dispatch() -> FakeDispatch:
    return FakeDispatch()


@pytest_asyncio.fixture
async def target(dispatch: FakeDispatch) -> AsyncIterator[str]:
    """Address of a running gRPC front."""
    listener = GrpcListener(dispatch, host="127.0.0.1", port=0, max_message_bytes=MAX_MESSAGE_BYTES)
    await listener.start()
    try:
        yield listener.address
    finally:
        await listener.stop(0)


@pytest_asyncio.fixture
async def client(target: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(target, timeout_s=20) as client:
        yield client


async def test_no_proxy_is_asked_for_a_router_of_this_machine(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    port = target.rpartition(":")[2]
    for address in (target, f"localhost:{port}"):
        assert await with_sync(address, lambda client: client.models())
        async with AsyncClient(address, timeout_s=20) as client:
            assert await client.models()


@dataclass
class Wire:
    """Carries bytes to a target, until it is cut: then both ends hear nothing any more, not even of an end."""

    target: str
    address: str = ""
    is_cut: bool = False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = split_host_port(self.target)
        answers, requests = await asyncio.open_connection(host, port)
        await asyncio.gather(self._carry(reader, requests), self._carry(answers, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            if not self.is_cut:
                writer.write(chunk)
        writer.close()


@asynccontextmanager
async def wire_to(target: str) -> AsyncIterator[Wire]:
    wire = Wire(target)
    async with await asyncio.start_server(wire.carry, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        wire.address = join_host_port(host, port)
        yield wire


async def with_sync(target: str, work: Callable[[Client], Any]) -> Any:
    """Run sync client code in a thread: the server lives on this loop."""

    def run() -> Any:
        with Client(target, timeout_s=20) as client:
            return work(client)

    return await asyncio.to_thread(run)


def delta(*token_ids: int, text: str = "", finish: Finish | None = None) -> Delta:
    return Delta(request_id="r", model="m", text=text, token_ids=token_ids, logprobs=(), finish=finish)


async def test_complete_gives_text_tokens_usage_and_times(client: AsyncClient) -> None:
    answer = await client.complete("Hi", model="fake/model", request_id="mine")

    assert (answer.text, answer.token_ids) == ("Hello world", (*b"Hello world", EOS))
    assert (answer.finish_reason, answer.stopped_by, answer.replica_ids) == ("stop", EOS, ("replica-0",))
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (2, CACHED_TOKENS)
    assert answer.usage.completion_tokens == 12
    assert (answer.request_id, answer.model) == ("mine", "fake/model")
    assert answer.ttft_s is not None
    assert answer.tpot_s is not None
    assert 0 < answer.tpot_s < answer.ttft_s + 1


async def test_sync_client_gives_the_same_as_the_async_one(client: AsyncClient, target: str) -> None:
    mine = await with_sync(target, lambda sync: sync.complete("Hi", request_id="mine", logprobs=2))
    theirs = await client.complete("Hi", request_id="mine", logprobs=2)

    assert replace(mine, ttft_s=None, tpot_s=None) == replace(theirs, ttft_s=None, tpot_s=None)


async def test_generate_streams_deltas_and_ends_with_finish(client: AsyncClient) -> None:
    deltas = [delta async for delta in client.generate("Hi", max_tokens=3, logprobs=1)]

    assert [delta.text for delta in deltas] == ["H", "e", "l", ""]
    assert [delta.finish is not None for delta in deltas] == [False, False, False, True]
    (position,) = deltas[0].logprobs
    assert (position.token_id, position.logprob, position.top) == (72, -0.5, ((72, -0.5),))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"prompt": "Hi"}, {"text": "Hi"}),
        ({"prompt": [1, 2]}, {"token_ids": [1, 2]}),
        ({"prompt": ()}, {"token_ids": []}),
        ({"prompt": "Hi", "chat_template_kwargs": {}, "continue_final_message": False}, {"text": "Hi"}),
        (
            {
                "messages": [
                    {"role": "user", "content": "Hi", "name": "U"},
                    {"role": "assistant", "content": "x", "reasoning_content": "hm"},
                    {"role": "tool", "content": "y", "tool_call_id": "c1"},
                ]
            },
            {
                "chat": Conversation(
                    messages=(
                        ChatMessage(role="user", content="Hi", name="U"),
                        ChatMessage(role="assistant", content="x", reasoning_content="hm"),
                        ChatMessage(role="tool", content="y", tool_call_id="c1"),
                    )
                )
            },
        ),
        (
            {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, {"role": "assistant"}]},
            {
                "chat": Conversation(
                    messages=(ChatMessage(role="user", content="a\nb"), ChatMessage(role="assistant", content=""))
                )
            },
        ),
        (
            {"messages": [USER], "continue_final_message": True},
            {
                "chat": Conversation(
                    messages=(ChatMessage(role="user", content="Hi"),),
                    add_generation_prompt=False,
                    continue_final_message=True,
                )
            },
        ),
        (
            {"messages": [USER], "add_generation_prompt": False},
            {"chat": Conversation(messages=(ChatMessage(role="user", content="Hi"),), add_generation_prompt=False)},
        ),
        (
            {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"think": False, "n": [1, "é"]}},
            {
                "chat": Conversation(
                    messages=(ChatMessage(role="user", content="Hi"),), template_kwargs={"think": False, "n": [1, "é"]}
                )
            },
        ),
    ],
)
async def test_every_form_of_prompt_arrives(
    client: AsyncClient, dispatch: FakeDispatch, prompt: dict[str, Any], expected: dict[str, Any]
) -> None:
    await client.complete(**prompt)

    (call,) = dispatch.calls
    given = {"text": call.text, "token_ids": call.token_ids, "chat": call.chat}
    assert {name: value for name, value in given.items() if value is not None} == expected


async def test_every_option_arrives(client: AsyncClient, dispatch: FakeDispatch) -> None:
    numbers: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.125, "seed": 2**64 - 1, "repetition_penalty": 1.5,
        "presence_penalty": -0.5, "frequency_penalty": 0.5, "max_tokens": 7, "min_tokens": 2, "logprobs": 3,
        "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    others: dict[str, Any] = {"priority": -2, "cache_salt": "pepper", "target_ttft_s": 0.5, "target_tpot_s": 0.25}
    await client.complete("Hi", **numbers, **others, stop="q", stop_token_ids=[4])
    await client.complete("Hi", stop=["a", "b"])

    first, second = dispatch.calls
    assert {name: getattr(first.sampling, name) for name in numbers} == numbers
    assert (list(first.sampling.stop), list(first.sampling.stop_token_ids)) == (["q"], [4])
    assert {name: getattr(first, name) for name in others} == others
    assert (second.target_ttft_s, second.target_tpot_s) == (None, None)
    assert list(second.sampling.stop) == ["a", "b"]
    assert [field.name for field, _ in second.sampling.ListFields()] == ["stop"]


def nested(depth: int) -> dict[str, Any]:
    """A mapping in so many others."""
    return reduce(lambda inner, _: {"in": inner}, range(depth), {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "both missing"),
        ({"prompt": "Hi", "messages": []}, "both given"),
        ({"prompt": "Hi", "temprature": 1}, "unknown options ['temprature']"),
        ({"prompt": "Hi", "max_tokens": 2**40}, "max_tokens does not fit its field: Value out of range"),
        ({"prompt": "Hi", "seed": -1}, "Value out of range: -1; allowed: integers from 0 to 2**64 - 1"),
        ({"prompt": "Hi", "stop_token_ids": [-1]}, "-1; allowed: integers from 0 to 2**32 - 1"),
        ({"prompt": "Hi", "priority": 2**31}, "2147483648; allowed: integers from -2**31 to 2**31 - 1"),
        ({"prompt": "Hi", "temperature": "hot"}, "temperature does not fit its field"),
        ({"prompt": "Hi", "temperature": 10**400}, "temperature does not fit its field: int too large"),
        ({"prompt": "Hi", "ignore_eos": 2**70}, "ignore_eos does not fit its field"),
        ({"prompt": "Hi", "stop": [1]}, "stop does not fit its field"),
        ({"prompt": [-1]}, "prompt does not fit"),
        ({"prompt": [USER]}, "; allowed: a text or token ids; a conversation is messages"),
        ({"prompt": b"Hi"}, "prompt is of type bytes; allowed: text or token ids"),
        ({"prompt": "Hi", "model": 5}, "model does not fit its field"),
        ({"messages": USER}, "messages[0] is of type str; allowed: a mapping with role and content"),
        ({"messages": [("user", "Hi")]}, "messages[0] is of type tuple"),
        ({"messages": [{"content": "Hi"}]}, "messages[0] has the keys ['content']"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing; allowed: a string or a list of text par"),
        ({"messages": [USER, {"role": "user", "content": None}]}, "messages[1].content is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is of type int; allowed: a string or"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is a part of type 'image_url'; allo"),
        ({"messages": [{"role": 3, "content": "Hi"}]}, "does not fit"),
        ({"messages": [{"role": "user", "content": "Hi", "tool": "x"}]}, "messages[0] has the keys"),
        ({"prompt": "Hi", "chat_template_kwargs": {"think": False}}, "allowed: with messages"),
        ({"prompt": "Hi", "continue_final_message": True}, "continue_final_message with a prompt that is no conver"),
        ({"messages": [USER], "chat_template_kwargs": {"think": {1}}}, "does not fit"),
        ({"messages": [USER], "chat_template_kwargs": {"think": math.nan}}, "chat_template_kwargs does not fit"),
        ({"messages": [USER], "chat_template_kwargs": nested(200_000)}, "chat_template_kwargs does not fit"),
    ],
)
def test_what_cannot_be_sent_is_refused_here(arguments: dict[str, Any], said: str) -> None:
    prompt, messages = arguments.pop("prompt", None), arguments.pop("messages", None)

    with pytest.raises(BadRequestError) as caught:
        generate_request(prompt, messages, arguments)  # type: ignore[arg-type]

    assert said in str(caught.value)


async def test_what_cannot_be_sent_to_be_tokenized_is_refused_here(client: AsyncClient, target: str) -> None:
    for work in (
        lambda sync: sync.tokenize("\ud800"),
        lambda sync: sync.tokenize([{"role": "user", "content": "\ud800"}]),
        lambda sync: sync.tokenize([USER], chat_template_kwargs={"think": {1}}),
        lambda sync: sync.detokenize([-1]),
        lambda sync: sync.detokenize("Hi"),
        lambda sync: sync.complete("Hi", timeout_s="5"),
        lambda sync: sync.complete("Hi", timeout_s=10**5000),
    ):
        with pytest.raises(BadRequestError, match="does not fit"):
            await with_sync(target, work)
    with pytest.raises(BadRequestError, match="does not fit"):
        await client.tokenize("\ud800")
    with pytest.raises(BadRequestError, match="allowed: with messages"):
        await client.tokenize("Hi", chat_template_kwargs={"think": False})
    with pytest.raises(BadRequestError, match="unexpected keyword argument 'modle'"):
        await client.tokenize([USER], modle="tiny")  # type: ignore[call-arg]
    with pytest.raises(BadRequestError, match="does not fit"):
        await client.detokenize([-1])
    with pytest.raises(BadRequestError, match="is of type int; allowed: a mapping with role and content"):
        await client.tokenize([1, 2])  # type: ignore[list-item]


@pytest.mark.parametrize("timeout_s", [math.inf, math.nan, 1e18])
async def test_deadline_that_never_comes_is_none(client: AsyncClient, timeout_s: float) -> None:
    with pytest.raises(BadRequestError, match="allowed: at most 1000000000, or None for no deadline"):
        await client.complete("Hi", timeout_s=timeout_s)
    with pytest.raises(BadRequestError, match="timeout_s is"):
        AsyncClient(timeout_s=timeout_s)
    with pytest.raises(BadRequestError, match="timeout_s is"):
        Client(timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        (RouterOverloadedError("full", retry_after_s=1.5002), OverloadedError, "full"),
        (NoReplicaError("none ready"), UnavailableError, "none ready"),
        (RouterDeadlineError("too late"), DeadlineError, "too late"),
        (ReplicaFailedError("broken"), ServerError, "broken"),
        (SlowClientError("took nothing"), CallCancelledError, "took nothing"),
        (ZeroDivisionError("a secret"), ServerError, "internal error"),
    ],
)
async def test_statuses_become_typed_errors(
    client: AsyncClient, target: str, dispatch: FakeDispatch, raised: Exception, expected: type[ClientError], said: str
) -> None:
    dispatch.error, dispatch.error_after = raised, 2

    for work in (client.complete("Hi"), with_sync(target, lambda sync: sync.complete("Hi"))):
        with pytest.raises(expected) as caught:
            await work
        assert said in str(caught.value)
        expected_s = 1.501 if expected is OverloadedError else None
        assert caught.value.retry_after_s == expected_s, "who comes back sooner is refused again"


async def test_bad_values_and_unknown_models_are_told_apart(client: AsyncClient, target: str) -> None:
    with pytest.raises(BadRequestError, match=r"temperature is -1\.0; allowed"):
        await client.complete("Hi", temperature=-1)
    with pytest.raises(NotFoundError, match="served: 'fake/model'") as caught:
        await client.tokenize("Hi", model="other")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    with pytest.raises(NotFoundError):
        await with_sync(target, lambda sync: sync.detokenize([1], model="other"))


async def test_message_that_is_too_large_is_the_callers_fault(client: AsyncClient) -> None:
    with pytest.raises(BadRequestError, match="larger than max") as caught:
        await client.complete("x" * (2 * MAX_MESSAGE_BYTES))

    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_nobody_there_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        async with AsyncClient(f"127.0.0.1:{taken.getsockname()[1]}") as client:
            with pytest.raises(UnavailableError):
                await client.models()


async def test_router_that_is_gone_without_a_word_is_unavailable(
    target: str, dispatch: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"grpc.keepalive_time_ms": 500}
    soon = [(name, times.get(name, value)) for name, value in client_module._CHANNEL_OPTIONS]
    monkeypatch.setattr(client_module, "_CHANNEL_OPTIONS", [*soon, ("grpc.http2.ping_timeout_ms", 500)])
    dispatch.hold_after = 1

    async with wire_to(target) as wire, AsyncClient(wire.address) as client:
        deltas = client.generate("Hi")
        await anext(deltas)
        wire.is_cut = True

        with pytest.raises(UnavailableError):
            async with asyncio.timeout(20):
                await anext(deltas)


async def test_timeout_is_a_deadline_that_the_router_sees(
    client: AsyncClient, target: str, dispatch: FakeDispatch
) -> None:
    dispatch.hold_after = 1

    # long enough for the calls to arrive on a busy machine: one that does not is never seen by the router
    errors = await asyncio.gather(
        client.complete("Hi", timeout_s=1.5),
        with_sync(target, lambda sync: sync.complete("Hi", timeout_s=1.5)),
        return_exceptions=True,
    )

    assert [type(error) for error in errors] == [DeadlineError, DeadlineError]
    assert {str(error) for error in errors} == {"the call did not end within 1.5 s"}
    await dispatch.wait_for_aborts(2)
    for call in dispatch.calls:
        assert call.timeout_s is not None
        assert 0 < call.timeout_s < 1.6  # gRPC rounds up on the wire


async def test_timeout_of_the_client_holds_where_a_call_names_none(
    client: AsyncClient, target: str, dispatch: FakeDispatch
) -> None:
    await client.complete("Hi")
    await client.complete("Hi", timeout_s=5)
    await client.complete("Hi", timeout_s=None)

    default, own, none = (call.timeout_s for call in dispatch.calls)
    assert default is not None
    assert 10 < default < 21  # gRPC rounds up on the wire
    assert own is not None
    assert own < 6
    assert none is None or none > 1e6


async def test_leaving_the_loop_cancels_the_call(client: AsyncClient, target: str, dispatch: FakeDispatch) -> None:
    dispatch.hold_after = 2

    async for _ in client.generate("Hi"):
        break
    await dispatch.wait_for_aborts(1)

    def leave(sync: Client) -> str:
        for delta in sync.generate("Hi"):
            return delta.text
        return ""

    assert await with_sync(target, leave) == "H"
    await dispatch.wait_for_aborts(2)


async def test_closing_the_generator_cancels_while_the_client_lives(target: str, dispatch: FakeDispatch) -> None:
    dispatch.hold_after = 2
    loop = asyncio.get_running_loop()

    def leave(sync: Client) -> None:
        deltas = sync.generate("Hi")
        next(deltas)
        deltas.close()
        asyncio.run_coroutine_threadsafe(dispatch.wait_for_aborts(1), loop).result()

    await with_sync(target, leave)


async def test_cancelling_the_task_cancels_the_call(client: AsyncClient, dispatch: FakeDispatch) -> None:
    dispatch.hold_after = 0
    asking = asyncio.create_task(client.complete("Hi"))
    await dispatch.wait_for_calls(1)

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    await dispatch.wait_for_aborts(1)


async def test_closing_the_client_ends_its_calls(target: str, dispatch: FakeDispatch) -> None:
    dispatch.hold_after = 1
    client = Client(target)
    asking = asyncio.create_task(asyncio.to_thread(client.complete, "Hi"))
    await dispatch.wait_for_calls(1)

    client.close()

    with pytest.raises(CallCancelledError, match=r"^the client was closed$"):
        await asking
    await dispatch.wait_for_aborts(1)


@pytest.mark.parametrize("hold_after", [0, 1])
async def test_closing_the_async_client_ends_its_calls(target: str, dispatch: FakeDispatch, hold_after: int) -> None:
    dispatch.hold_after = hold_after
    client = AsyncClient(target)
    asking = asyncio.create_task(client.complete("Hi"))
    await dispatch.wait_for_calls(1)

    await client.close()

    with pytest.raises(CallCancelledError, match=r"^the client was closed$"):
        await asking
    await dispatch.wait_for_aborts(1)


async def test_cancelled_task_stays_cancelled_though_the_client_is_closed(target: str, dispatch: FakeDispatch) -> None:
    dispatch.hold_after = 0
    client = AsyncClient(target)
    asking = asyncio.create_task(client.complete("Hi"))
    await dispatch.wait_for_calls(1)

    asking.cancel()
    await client.close()

    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_closed_client_makes_no_calls(target: str) -> None:
    client, sync = AsyncClient(target), Client(target)
    await client.close()
    sync.close()

    for call in (client.complete("Hi"), client.models(), client.tokenize("Hi"), client.wait_ready(10)):
        with pytest.raises(CallCancelledError, match="the client was closed"):
            await call
    for work in (lambda: sync.complete("Hi"), sync.models, lambda: sync.tokenize("Hi"), lambda: sync.wait_ready(10)):
        with pytest.raises(CallCancelledError, match="the client was closed"):
            await asyncio.to_thread(work)


async def test_sync_client_serves_many_threads(target: str, dispatch: FakeDispatch) -> None:
    def work(sync: Client) -> list[str]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda index: sync.complete(f"prompt {index}", max_tokens=5).text, range(24)))

    assert await with_sync(target, work) == ["Hello"] * 24
    assert {call.text for call in dispatch.calls} == {f"prompt {index}" for index in range(24)}


async def test_both_clients_make_tokens_of_text_and_text_of_tokens(
    client: AsyncClient, target: str, dispatch: FakeDispatch
) -> None:
    messages = [USER]

    assert await client.tokenize("Hi") == (72, 105, EOS)
    assert await client.tokenize("Hi", add_special_tokens=False) == (72, 105)
    assert await client.tokenize(messages) == (72, 105, EOS)
    await client.tokenize(messages, chat_template_kwargs={"think": False})
    await with_sync(target, lambda sync: sync.tokenize(messages, chat_template_kwargs={"think": None}))
    chats = [chat for chat in dispatch.tokenized[-2:] if isinstance(chat, Conversation)]
    assert [chat.template_kwargs for chat in chats] == [{"think": False}, {"think": None}]
    assert await client.detokenize([72, 105, EOS]) == "Hi"
    assert await client.detokenize([72, EOS], skip_special_tokens=False) == "H<eos>"
    assert await with_sync(target, lambda sync: sync.tokenize("Hi")) == (72, 105, EOS)
    assert await with_sync(target, lambda sync: sync.tokenize(messages)) == (72, 105, EOS)
    assert await with_sync(target, lambda sync: sync.detokenize((72, 105))) == "Hi"


async def test_both_clients_list_the_models_served(client: AsyncClient, target: str) -> None:
    expected = [ModelInfo(name="fake/model", max_context=64, vocab_size=257, ready_replicas=1)]

    assert await client.models() == expected
    assert await with_sync(target, lambda sync: sync.models()) == expected


async def test_wait_ready_returns_when_the_replicas_are_there(
    client: AsyncClient, target: str, dispatch: FakeDispatch
) -> None:
    ready = dispatch.model
    dispatch.model = replace(ready, ready_replicas=0)
    waiting = [
        asyncio.create_task(client.wait_ready(20, model="fake/model", replicas=2)),
        asyncio.create_task(with_sync(target, lambda sync: sync.wait_ready(20, replicas=2))),
    ]
    done, _ = await asyncio.wait(waiting, timeout=0.3)
    assert not done

    dispatch.model = replace(ready, ready_replicas=2)

    await asyncio.gather(*waiting)


async def test_wait_ready_waits_for_a_router_that_is_not_there_yet(dispatch: FakeDispatch) -> None:
    port = unlisted_port()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        waiting = asyncio.create_task(client.wait_ready(20))
        done, _ = await asyncio.wait((waiting,), timeout=0.2)
        assert not done
        listener = GrpcListener(dispatch, host="127.0.0.1", port=port, max_message_bytes=MAX_MESSAGE_BYTES)
        await listener.start()
        try:
            await waiting
        finally:
            await listener.stop(0)


async def test_wait_ready_waits_for_ever_where_it_is_told_so(client: AsyncClient, target: str) -> None:
    async with asyncio.timeout(20):
        await client.wait_ready(math.inf)
        await with_sync(target, lambda sync: sync.wait_ready(math.inf))


async def test_wait_ready_gives_up_in_time(client: AsyncClient, target: str) -> None:
    started = time.monotonic()

    with pytest.raises(DeadlineError, match=r"nobody had no 1 ready replicas within 0\.2 s"):
        await client.wait_ready(0.2, model="nobody")
    with pytest.raises(DeadlineError, match="3 ready replicas"):
        await with_sync(target, lambda sync: sync.wait_ready(0.2, replicas=3))
    async with AsyncClient("127.0.0.1:1") as lost:
        with pytest.raises(DeadlineError, match=r"^no model had 1 ready replicas within 0\.2 s: .*Connection refused"):
            await lost.wait_ready(0.2)

    assert time.monotonic() - started < 10


async def test_wait_ready_tells_why_the_router_could_not_be_reached(dispatch: FakeDispatch, tmp_path: Path) -> None:
    files = inner_tls(trustme.CA(), tmp_path, name="localhost")
    listener = GrpcListener(
        dispatch,
        host="127.0.0.1",
        port=0,
        max_message_bytes=MAX_MESSAGE_BYTES,
        tls=TlsFiles(cert_file=files.cert_file, key_file=files.key_file),
    )
    await listener.start()
    target, mistaken = listener.address, grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())

    def wait() -> None:
        with Client(target, credentials=mistaken) as client:
            client.wait_ready(1)

    try:
        with pytest.raises(DeadlineError, match="CERTIFICATE_VERIFY_FAILED") as caught:
            await asyncio.to_thread(wait)
        assert isinstance(caught.value.__cause__, UnavailableError)
        async with AsyncClient(target, credentials=mistaken) as client:
            with pytest.raises(DeadlineError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.wait_ready(1)
    finally:
        await listener.stop(0)


def test_error_comes_out_of_another_process_as_it_was() -> None:
    error = OverloadedError("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=1.5)

    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), again.code, again.retry_after_s) == (
        OverloadedError,
        "full",
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        1.5,
    )


def test_times_are_taken_where_tokens_come() -> None:
    now = 100.0
    collector = Collector(lambda: now)
    finish = Finish(reason="length", stopped_by=None, usage=USAGE, replica_ids=("a", "b"))
    for at, each in (
        (101.0, delta()),
        (102.0, delta(1, text="a")),
        (104.0, delta(2, 3, 4, text="b")),
        (109.0, delta(finish=finish)),
    ):
        now = at
        collector.add(each)

    completion = collector.completion()

    assert (completion.ttft_s, completion.tpot_s) == (2.0, 2.0 / 3)
    assert (completion.text, completion.token_ids) == ("ab", (1, 2, 3, 4))
    assert completion.replica_ids == ("a", "b")


def test_times_that_too_few_tokens_have_are_none() -> None:
    finish = Finish(reason="stop", stopped_by="x", usage=USAGE, replica_ids=("a",))
    nothing, one, two = (Collector(lambda: 1.0) for _ in range(3))
    nothing.add(delta(finish=finish))
    one.add(delta(1, finish=finish))
    two.add(delta(1, 2, finish=finish))

    assert (nothing.completion().ttft_s, nothing.completion().tpot_s) == (None, None)
    assert (one.completion().ttft_s, one.completion().tpot_s) == (0.0, None)
    assert (two.completion().ttft_s, two.completion().tpot_s) == (0.0, 0.0)


@pytest.mark.parametrize("api_key", ["wk-1\n", "wk-ä"])
def test_key_that_no_header_can_hold_is_told_at_once(api_key: str) -> None:
    with pytest.raises(UnauthenticatedError, match="holds a line break, or another character"):
        Client("127.0.0.1:1", api_key=api_key)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_address_and_key_that_are_no_text_are_told_at_once(kind: type[Client | AsyncClient]) -> None:
    for target in (None, 50051, b"127.0.0.1:50051"):
        with pytest.raises(
            BadRequestError, match=rf"target is of type {type(target).__name__}; allowed: text, host:po"
        ):
            kind(target)  # type: ignore[arg-type]
    for api_key in (5, b"wk-1"):
        with pytest.raises(UnauthenticatedError, match=rf"API key is of type {type(api_key).__name__}; allowed: text"):
            kind("127.0.0.1:1", api_key=api_key)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_name_of_a_certificate_is_refused_in_plain_text(kind: type[Client | AsyncClient]) -> None:
    with pytest.raises(BadRequestError, match="tls_name is 'weft' where no certificate is shown; allowed: with creden"):
        kind("127.0.0.1:1", tls_name="weft")
