"""Replicas of two revisions at once: a request's tokens go only to those whose tokenizer has made them."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
from helpers.fake_control import FakeControl
from helpers.fake_replica import HASH_KEY, FakeReplica, expected_tokens
from helpers.polling import until
from helpers.router_harness import ByteTokenizer, RunningRouter, prompt_ids, router_config, running_router, text_request
from weft.block_hash import block_hashes, root_hash
from weft.v1 import control_pb2
from weft.v1 import inference_pb2 as pb

from router.breaker import Breaker
from router.call import Conversation
from router.config import BreakerConfig, FailoverConfig, PolicyName
from router.errors import ModelFilesError
from router.model_text import ModelText
from router.policy import RoundRobin
from router.prefix_index import PrefixIndex, ReplicaId
from router.replica_book import ReplicaBook
from router.route import Route, ServedModel

OLD = ModelText(path="/m", digest="1-old", revision=1)
SAME = ModelText(path="/m-2", digest="1-old", revision=2)
NEW = ModelText(path="/m-2", digest="1-new", revision=2)
WIDE_ID = 299


def ready(name: str, text: ModelText | None, *, max_context: int = 512) -> ReplicaBook:
    book = ReplicaBook(ReplicaId(name), index=PrefixIndex(), breaker=Breaker(BreakerConfig()), on_change=lambda: None)
    book.text, book.max_context = text, max_context
    book.note_snapshot([])
    book.note_ready()
    return book


def route_to(*books: ReplicaBook) -> Route[ReplicaBook]:
    served = ServedModel(name="m", path=NEW.path, digest=NEW.digest, max_context=1024)
    route: Route[ReplicaBook] = Route(served, RoundRobin())
    for book in books:
        route.add(book)
    return route


def found(route: Route[ReplicaBook], text: ModelText | None = None) -> list[str]:
    return [book.replica_id for book in route.find(frozenset(), 0.0, text)]


def test_requests_are_made_for_what_most_replicas_run_and_of_as_many_for_the_newest() -> None:
    a, b, c = ready("a", OLD), ready("b", OLD), ready("c", NEW)
    route = route_to(a, b, c)
    assert (route.text, found(route), route.num_ready) == (OLD, ["a", "b"], 2)
    b.note_dismissed(True)
    route.note_change()
    assert (route.text, found(route), route.num_ready) == (NEW, ["c"], 1)
    assert found(route, OLD) == ["a"], "a request that was made for it stays there"
    route.remove(ReplicaId("c"))
    assert (route.text, found(route, NEW)) == (OLD, [])


def test_without_a_ready_replica_requests_are_made_for_the_revision_that_is_wanted() -> None:
    route = route_to()
    assert (route.text.path, route.text.digest, route.max_context) == (NEW.path, NEW.digest, 1024)


def test_replicas_of_alike_tokenizers_all_take_requests_wherever_their_folders_are() -> None:
    route = route_to(ready("a", OLD), ready("b", SAME))
    assert (route.text, found(route), found(route, OLD)) == (SAME, ["a", "b"], ["a", "b"])


def test_replicas_of_a_controller_that_tells_no_text_all_take_requests() -> None:
    route: Route[ReplicaBook] = Route(ServedModel(name="m", path="/m-2", max_context=512), RoundRobin())
    for name in "ab":
        route.add(ready(name, None))
    text = route.text
    route.update(ServedModel(name="m", path="/m-3", max_context=512))
    assert (route.text.path, found(route), found(route, text)) == ("/m-3", ["a", "b"], [])


def test_context_is_one_that_every_replica_takes_to_which_requests_go() -> None:
    route = route_to(ready("a", OLD, max_context=512), ready("b", SAME, max_context=256))
    assert route.max_context == 256
    route.remove(ReplicaId("b"))
    assert route.max_context == 512
    route.add(ready("c", NEW, max_context=1024))
    assert (route.text, route.max_context) == (NEW, 1024)


def test_vocabulary_is_that_of_the_tokenizer_that_requests_are_made_for() -> None:
    old = ready("a", OLD)
    old.vocab_size = 300
    route = route_to(old)
    assert route.vocab_size == 300
    route.remove(ReplicaId("a"))
    assert (route.text.is_like(NEW), route.max_context, route.vocab_size) == (True, 1024, None)
    route.update(ServedModel(name="m", path=OLD.path, digest=OLD.digest, max_context=0))
    assert (route.max_context, route.vocab_size) == (512, 300), "it is known from before"


class LateTokenizer(ByteTokenizer):
    """That of the new revision: another token before a prompt."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        return (257, *super().encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "?" * len(ids)

    def render_chat(self, chat: Conversation) -> tuple[int, ...]:
        return (257, *super().render_chat(chat))


def new_ids(text: str) -> list[int]:
    return [257, *text.encode()]


def load_tokenizer(text: ModelText) -> ByteTokenizer:
    return LateTokenizer() if text.digest == NEW.digest else ByteTokenizer()


def say(control: FakeControl, *replicas: tuple[FakeReplica, ModelText]) -> None:
    """Say that these run, where the new revision is wanted."""
    control.set_membership(
        control_pb2.WatchReplicasResponse(
            models=[control_pb2.ServedModel(name="tiny", path=NEW.path, text_digest=NEW.digest, max_context=512)],
            replicas=[
                control_pb2.ReplicaEndpoint(
                    replica_id=replica.replica_id,
                    model="tiny",
                    address=replica.address,
                    text=control_pb2.ModelText(path=text.path, digest=text.digest, revision=text.revision),
                )
                for replica, text in replicas
            ],
        )
    )


@asynccontextmanager
async def rolling(
    *replicas: tuple[FakeReplica, ModelText], load: Callable[[ModelText], ByteTokenizer] = load_tokenizer
) -> AsyncIterator[tuple[FakeControl, RunningRouter]]:
    async with FakeControl() as control:
        say(control, *replicas)
        config = router_config(
            control=control.address,
            http_port=0,
            metrics_port=0,
            policy=PolicyName.ROUND_ROBIN,
            failover=FailoverConfig(new_request_wait_s=5.0, failover_wait_s=0.5),
        )
        async with running_router(config, load_tokenizer=load) as router:
            yield control, router


def prompts(replicas: Sequence[FakeReplica]) -> list[list[list[int]]]:
    return [[list(submit.prompt_token_ids) for submit in replica.submits] for replica in replicas]


async def test_each_revision_gets_tokens_of_its_own_tokenizer() -> None:
    async with (
        FakeReplica("a") as a,
        FakeReplica("b") as b,
        FakeReplica("c") as c,
        rolling((a, OLD), (b, OLD)) as (control, router),
    ):
        await router.wait_ready(2)
        say(control, (a, OLD), (b, OLD), (c, NEW))
        await until(lambda: c.num_connections == 1)
        for _ in range(4):
            await router.generate(text_request("hi"))
        assert prompts([a, b, c]) == [[prompt_ids("hi")] * 2, [prompt_ids("hi")] * 2, []]
        asked = pb.TokenizeRequest(model="tiny", text="hi")
        assert list((await router.stub.Tokenize(asked)).token_ids) == prompt_ids("hi")
        say(control, (a, OLD), (c, NEW))
        await router.wait_ready(1)
        await router.generate(text_request("hi"))
        assert prompts([a, c]) == [[prompt_ids("hi")] * 2, [new_ids("hi")]]
        assert list((await router.stub.Tokenize(asked)).token_ids) == new_ids("hi")


async def test_request_that_has_begun_goes_on_only_with_its_own_tokenizer() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("b") as b,
        FakeReplica("c") as c,
        FakeReplica("d") as d,
        rolling((a, OLD)) as (control, router),
    ):
        await router.wait_ready(1)
        answering = asyncio.create_task(router.generate(text_request("hi", max_tokens=9)))
        await until(lambda: a.num_requests == 1)
        await a.step(3)
        say(control, (a, OLD), (b, OLD), (c, NEW), (d, NEW))
        await until(lambda: b.num_connections + c.num_connections + d.num_connections == 3)
        await a.die()
        answer = await answering
        assert answer.token_ids == expected_tokens(prompt_ids("hi"), 1, 9)
        assert prompts([b, c, d]) == [[prompt_ids("hi")], [], []]


@pytest.mark.parametrize("is_removed", [False, True], ids=["the model has another tokenizer", "the model is gone"])
async def test_answer_that_has_begun_goes_on_with_the_names_of_its_own_tokens(is_removed: bool) -> None:
    loaded: list[ModelText] = []

    def load_once(text: ModelText) -> ByteTokenizer:
        if text in loaded:
            raise ModelFilesError("the folder has other files now, or is gone")
        loaded.append(text)
        return load_tokenizer(text)

    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("c") as c,
        rolling((a, OLD), load=load_once) as (control, router),
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}") as http,
    ):
        await router.wait_ready(1)
        body = {"prompt": "hi", "max_tokens": 4, "seed": 1, "logprobs": 0}
        answering = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: a.num_requests == 1)
        await a.step(1)
        if is_removed:
            control.set_membership(control_pb2.WatchReplicasResponse())
            await router.wait_ready(-1)
        else:
            say(control, (c, NEW))
            await until(lambda: c.num_connections == 1)
            await router.wait_ready(1)
        a.resume()
        answer = await answering
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == bytes(expected_tokens(prompt_ids("hi"), 1, 4)).decode()


async def test_request_that_has_begun_fails_where_its_tokenizer_runs_no_longer() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("c") as c,
        rolling((a, OLD)) as (control, router),
    ):
        await router.wait_ready(1)
        answering = asyncio.create_task(router.generate(text_request("hi", max_tokens=9)))
        await until(lambda: a.num_requests == 1)
        await a.step(3)
        say(control, (c, NEW))
        await until(lambda: c.num_connections == 1)
        await a.die()
        with pytest.raises(grpc.aio.AioRpcError, match="no replica of model 'tiny' with the request's tokenizer was"):
            await answering
        assert c.submits == []


async def test_prompt_that_is_being_prepared_is_made_anew_by_the_tokenizer_that_has_come_meanwhile() -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
            is_asked.set()
            assert may_answer.wait(10)
            return (WIDE_ID, *super().encode(text, add_special_tokens=False))

    def load(text: ModelText) -> ByteTokenizer:
        return LateTokenizer() if text.digest == NEW.digest else SlowTokenizer()

    async with (
        FakeReplica("a") as a,
        FakeReplica("c", vocab_size=WIDE_ID) as c,
        rolling((a, OLD), load=load) as (control, router),
    ):
        await router.wait_ready(1)
        answering = asyncio.create_task(router.generate(text_request("hi")))
        await until(is_asked.is_set)
        say(control, (c, NEW))
        await until(lambda: c.num_connections == 1)
        await router.wait_ready(1)
        may_answer.set()
        await answering
        assert prompts([a, c]) == [[], [new_ids("hi")]]


async def test_request_that_waits_is_made_again_for_the_replica_that_comes() -> None:
    async with FakeReplica("a") as a, FakeReplica("c") as c, rolling() as (control, router):
        await router.wait_ready(0)
        answering = asyncio.create_task(router.generate(text_request("hi")))
        await until(lambda: control.num_held == 1)
        say(control, (a, OLD))
        assert (await answering).token_ids == expected_tokens(prompt_ids("hi"), 1, 10)
        say(control, (c, NEW))
        await until(lambda: c.num_connections == 1)
        await router.wait_ready(1)
        assert (await router.generate(text_request("hi"))).token_ids == expected_tokens(new_ids("hi"), 1, 10)
        assert prompts([a, c]) == [[prompt_ids("hi")], [new_ids("hi")]]


async def test_request_that_is_made_again_keeps_its_id_and_has_blocks_of_its_new_tokens() -> None:
    async with (
        FakeReplica("a") as a,
        FakeReplica("c", paused=True) as c,
        rolling((a, OLD)) as (control, router),
    ):
        c.resident = set(block_hashes(root_hash(HASH_KEY), new_ids("seven c"), 4))
        a.refusal = grpc.StatusCode.UNAVAILABLE
        await router.wait_ready(1)
        answering = asyncio.create_task(router.generate(text_request("seven c")))
        await until(lambda: bool(a.submits))
        say(control, (c, NEW))
        await until(lambda: c.num_requests == 1)
        assert await router.metric("weft_router_replica_pending_tokens", model="tiny", replica="c") == 1
        c.resume()
        await answering
        request_ids = {submit.request_id.split("/")[-1] for submit in (*a.submits, *c.submits)}
        assert len(request_ids) == 1


async def test_conversation_that_is_made_again_has_its_variables() -> None:
    turns = [pb.ChatMessage(role="user", content="hi")]
    chat = pb.ChatPrompt(messages=turns, chat_template_kwargs_json='{"think": false}')
    request = pb.GenerateRequest(model="tiny", chat=chat, sampling=pb.SamplingParams(max_tokens=2, seed=1))
    async with FakeReplica("a") as a, FakeReplica("c") as c, rolling() as (control, router):
        await router.wait_ready(0)
        answering = asyncio.create_task(router.generate(request))
        await until(lambda: control.num_held == 1)
        say(control, (a, OLD))
        await answering
        say(control, (c, NEW))
        await until(lambda: c.num_connections == 1)
        await router.wait_ready(1)
        await router.generate(request)
        rendered = list(b"[think=False]<user>hi")
        assert prompts([a, c]) == [[rendered], [[257, *rendered]]]


async def test_tokenizer_is_kept_as_long_as_a_replica_runs_it_and_no_longer() -> None:
    loaded: dict[str, weakref.ref[ByteTokenizer]] = {}

    def load(text: ModelText) -> ByteTokenizer:
        tokenizer = load_tokenizer(text)
        loaded[text.digest] = weakref.ref(tokenizer)
        return tokenizer

    def is_kept(text: ModelText) -> bool:
        gc.collect()
        return loaded[text.digest]() is not None

    async with (
        FakeReplica("a") as a,
        FakeReplica("c") as c,
        rolling((a, OLD), load=load) as (control, router),
    ):
        await router.wait_ready(1)
        await router.generate(text_request("hi"))
        say(control, (a, OLD), (c, NEW))
        await until(lambda: c.num_connections == 1)
        await router.wait_ready(1)
        await router.generate(text_request("hi"))
        assert (is_kept(OLD), is_kept(NEW)) == (True, True)
        say(control, (c, NEW))
        await until(lambda: not is_kept(OLD))
        assert (await router.generate(text_request("hi"))).token_ids == expected_tokens(new_ids("hi"), 1, 10)
        assert is_kept(NEW)
