"""Requests whose replica breaks go on elsewhere: the client sees the tokens and the text of an undisturbed run."""

import asyncio
import gc
import random
import weakref
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from helpers.fake_replica import FakeReplica, certain_text, expected_tokens
from helpers.polling import until
from helpers.router_harness import Answer, RunningRouter, prompt_ids, router_config, running_router, text_request
from weft.recording import RecordingConfig
from weft.v1 import inference_pb2 as pb

from bench.simulation.replay import files_in, replay_file
from router import flight
from router.config import FailoverConfig, LinkConfig, PolicyName
from router.inbox import Inbox
from router.turns import Turns


def check_whole(answer: Answer, text: str, *, max_tokens: int, seed: int = 1) -> None:
    tokens = expected_tokens(prompt_ids(text), seed, max_tokens)
    assert answer.token_ids == tokens
    assert answer.text == certain_text(tokens, is_over=True)
    assert answer.num_finished == 1


def holder(*replicas: FakeReplica) -> FakeReplica:
    return next(replica for replica in replicas if replica.num_requests)


async def start(router: RunningRouter, request: pb.GenerateRequest, *replicas: FakeReplica) -> asyncio.Task[Answer]:
    """Send a request and return when a replica has it."""
    task = asyncio.create_task(router.generate(request))
    await until(lambda: any(replica.num_requests for replica in replicas))
    return task


async def test_stream_continues_elsewhere_with_the_same_tokens_and_text() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("b", paused=True) as b,
        running_router(router_config(a.address, b.address)) as router,
    ):
        await router.wait_ready(2)
        answering = await start(router, text_request("hello", max_tokens=11), a, b)
        first = holder(a, b)
        second = b if first is a else a
        await first.step(4)
        second.resume()
        first.break_streams()
        answer = await answering

    check_whole(answer, "hello", max_tokens=11)
    (moved,) = second.submits
    num_seen = len(moved.generated_token_ids)
    assert list(moved.generated_token_ids) == answer.token_ids[:num_seen]
    assert moved.sampling == first.submits[0].sampling
    assert answer.finished is not None
    assert answer.finished.replica_ids[-1] == second.address


async def test_usage_spans_all_replicas_of_a_request() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("b", paused=True) as b,
        running_router(router_config(a.address, b.address)) as router,
    ):
        await router.wait_ready(2)
        call = aiter(router.stub.Generate(text_request("hello", max_tokens=6)))
        answer = Answer()
        await until(lambda: bool(a.num_requests or b.num_requests))
        first = holder(a, b)
        second = b if first is a else a
        await first.step(2)
        while len(answer.token_ids) < 2:
            answer.add(await anext(call))
        second.resume()
        await first.die()
        async for response in call:
            answer.add(response)

    check_whole(answer, "hello", max_tokens=6)
    assert answer.finished is not None
    usage = answer.finished.usage
    assert list(answer.finished.replica_ids) == [first.address, second.address]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (6, 6, 0)
    assert 0.5 < usage.prefill_s < 60.0
    assert 1.0 < usage.decode_s < 60.0
    assert list(second.submits[0].generated_token_ids) == answer.token_ids[:2]


async def test_lone_replica_that_comes_back_gets_its_requests_again() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        running_router(router_config(a.address)) as router,
    ):
        await router.wait_ready(1)
        answering = await start(router, text_request("hello", max_tokens=9), a)
        await a.step(5)
        a.break_streams()
        a.resume()
        answer = await answering

    check_whole(answer, "hello", max_tokens=9)
    assert a.num_connections == 2


async def test_request_that_comes_before_the_first_replica_waits_for_it_and_may_fill_its_context() -> None:
    a = FakeReplica("a", max_context=20)
    port = int((await a.start()).rpartition(":")[2])
    await a.die()
    async with running_router(router_config(a.address, failover=FailoverConfig(new_request_wait_s=60.0))) as router:
        answering = asyncio.create_task(router.generate(pb.GenerateRequest(model="tiny", text="hello")))
        await router.stub.ListModels(pb.ListModelsRequest())  # what came before it has begun
        await a.start(port)
        answer = await answering
    await a.die()
    (submit,) = a.submits
    assert submit.sampling.max_tokens == len(answer.token_ids) == 20 - len(prompt_ids("hello"))


async def test_gap_in_the_frame_numbers_breaks_the_stream() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        running_router(router_config(a.address)) as router,
    ):
        await router.wait_ready(1)
        answering = await start(router, text_request("hello", max_tokens=9), a)
        await a.step(2)
        a.skip_frame()
        a.resume()
        answer = await answering

    check_whole(answer, "hello", max_tokens=9)
    assert a.num_connections == 2


async def test_silent_replica_is_taken_for_dead() -> None:
    link = LinkConfig(backoff_s=0.01, max_backoff_s=0.05, stall_timeout_s=0.2)
    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("b", paused=True) as b,
        running_router(router_config(a.address, b.address, link=link)) as router,
    ):
        await router.wait_ready(2)
        answering = await start(router, text_request("hello"), a, b)
        (b if holder(a, b) is a else a).resume()
        check_whole(await answering, "hello", max_tokens=10)


async def test_silent_replica_is_found_by_requests_that_wait_shorter_than_its_silence() -> None:
    link = LinkConfig(backoff_s=0.01, max_backoff_s=0.05, stall_timeout_s=0.2)
    async with (
        FakeReplica("a", paused=True) as a,
        running_router(router_config(a.address, link=link)) as router,
    ):
        await router.wait_ready(1)
        async with asyncio.timeout(10):
            while a.num_connections == 1:
                with pytest.raises(grpc.aio.AioRpcError):
                    await router.generate(text_request("hello"), timeout_s=0.05)


async def test_request_that_breaks_every_replica_fails_after_bounded_attempts() -> None:
    failover = FailoverConfig(max_attempts=3, new_request_wait_s=2, failover_wait_s=5)
    async with (
        FakeReplica("a", paused=True) as a,
        running_router(router_config(a.address, failover=failover)) as router,
    ):
        await router.wait_ready(1)
        a.before_step = a.break_streams
        a.resume()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.generate(text_request("poison"))

    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert "3 replicas broke under the request" in (error.value.details() or "")
    assert len(a.submits) == 3


@pytest.mark.parametrize("refusal", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_replica_that_refuses_is_left_for_another_one(refusal: grpc.StatusCode) -> None:
    async with (
        FakeReplica("a") as a,
        FakeReplica("b") as b,
        running_router(router_config(a.address, b.address, policy=PolicyName.ROUND_ROBIN, metrics_port=0)) as router,
    ):
        await router.wait_ready(2)
        a.refusal = refusal
        answers = [await router.generate(text_request(f"hello {i}")) for i in range(4)]
        assert await router.metric("weft_router_retries_total", model="tiny") == len(a.submits)

    for i, answer in enumerate(answers):
        check_whole(answer, f"hello {i}", max_tokens=10)
    assert a.submits
    assert all(list(answer.finished.replica_ids) == [b.address] for answer in answers if answer.finished)


async def test_all_replicas_full_is_overload_with_a_hint() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics_port=0)) as router:
        await router.wait_ready(1)
        a.refusal = grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.generate(text_request("hello"))
        assert await router.metric("weft_router_retries_total", model="tiny") == 1, "though nobody else could be tried"

    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = dict(error.value.trailing_metadata() or ())
    assert int(metadata["retry-after-ms"]) >= 100


async def test_draining_replica_keeps_its_requests_and_gets_no_new_ones() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("b", paused=True) as b,
        running_router(router_config(a.address, b.address, policy=PolicyName.ROUND_ROBIN)) as router,
    ):
        await router.wait_ready(2)
        answering = await start(router, text_request("hello"), a, b)
        first = holder(a, b)
        second = b if first is a else a
        first.drain()
        await router.wait_ready(1)
        second.resume()
        for _ in range(2):
            check_whole(await router.generate(text_request("hello")), "hello", max_tokens=10)
        first.resume()
        check_whole(await answering, "hello", max_tokens=10)

    assert (len(first.submits), len(second.submits)) == (1, 2)


@pytest.mark.parametrize("how", ["stream breaks", "request is refused"])
async def test_replicas_that_leave_as_planned_are_not_taken_for_broken(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        old = [await stack.enter_async_context(FakeReplica(f"r{i}", paused=True)) for i in range(6)]
        config = router_config(*(replica.address for replica in old), metrics_port=0)
        router = await stack.enter_async_context(running_router(config))
        await router.wait_ready(6)
        answering = await start(router, text_request("hello", max_tokens=30), *old)
        while len(old) > 1:
            await until(lambda: any(replica.num_requests for replica in old))
            leaving = holder(*old)
            old.remove(leaving)
            await leaving.step(2)
            leaving.drain()
            await router.wait_ready(len(old))
            if how == "stream breaks":
                leaving.break_streams()
            else:
                leaving.fail_requests(grpc.StatusCode.UNAVAILABLE, "the replica goes away")
        old[0].resume()
        check_whole(await answering, "hello", max_tokens=30)
        assert config.failover.max_attempts < 5
        assert await router.metric("weft_router_failovers_total", model="tiny") == 0
    assert not [record for record in caplog.records if record.name == "router.flight"]


@pytest.mark.parametrize("policy", PolicyName)
async def test_every_request_ends_once_and_whole_under_random_failures(policy: PolicyName, tmp_path: Path) -> None:
    rng = random.Random(policy)

    def fail_sometimes(replica: FakeReplica) -> None:
        if rng.random() < 0.05:
            rng.choice((replica.break_streams, replica.skip_frame))()

    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(FakeReplica(f"r{i}")) for i in range(3)]
        for replica in replicas:
            replica.before_step = partial(fail_sometimes, replica)
        config = router_config(
            *(replica.address for replica in replicas),
            failover=FailoverConfig(max_attempts=1000, new_request_wait_s=10, failover_wait_s=10),
            policy=policy,
            recording=RecordingConfig(folder=str(tmp_path)),
            metrics_port=0,
        )
        router = await stack.enter_async_context(running_router(config))
        await router.wait_ready(3)

        async def ask(i: int) -> None:
            request = text_request(f"prompt {i % 5}", max_tokens=5 + i, seed=i)
            if i % 6 == 5:  # a client that leaves
                call = router.stub.Generate(request)
                await call.read()
                call.cancel()
            else:
                check_whole(await router.generate(request), f"prompt {i % 5}", max_tokens=5 + i, seed=i)

        await asyncio.gather(*(ask(i) for i in range(30)))
        await until(lambda: not any(replica.num_requests for replica in replicas))
        outcomes = await router.outcomes(30)

    assert sum(outcomes.values()) == 30
    assert outcomes["length"] >= 25
    assert outcomes.keys() <= {"length", "cancelled"}
    assert sum(replica.num_connections for replica in replicas) > 6, "the failures did happen"
    (replayed,) = map(replay_file, files_in(tmp_path))
    assert replayed.difference is None
    assert replayed.calls["policy"] == 1
    assert replayed.calls["breaker"] == 3
    assert replayed.calls["route"] > 30
    assert replayed.calls["enter"] == replayed.calls["leave"] == 30


async def test_replica_that_fails_amid_an_answer_has_broken_and_is_not_the_next() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("b", paused=True) as b,
        running_router(router_config(a.address, b.address, metrics_port=0, policy=PolicyName.LEAST_LOADED)) as router,
    ):
        await router.wait_ready(2)
        answering = await start(router, text_request("hello", max_tokens=8), a, b)
        first = holder(a, b)
        second = b if first is a else a
        other = await start(router, text_request("others", max_tokens=8), second)
        await first.step(3)
        first.fail_requests(grpc.StatusCode.UNAVAILABLE, "its group has failed")
        await until(lambda: second.num_requests == 2)
        second.resume()
        check_whole(await answering, "hello", max_tokens=8)
        check_whole(await other, "others", max_tokens=8)
        assert await router.metric("weft_router_failovers_total", model="tiny") == 1


async def test_replica_that_leaves_again_after_it_gave_tokens_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(flight, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with FakeReplica("a", paused=True) as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        answering = await start(router, text_request("hello", max_tokens=8), a)
        for _ in range(2):
            await a.step(2)
            now_s += 2 * FailoverConfig().failover_wait_s
            a.drain()
            await router.wait_ready(0)
            a.fail_requests(grpc.StatusCode.UNAVAILABLE, "it goes away")
            a.is_draining = False  # when it is back
            a.break_streams()
            await until(lambda: a.num_requests == 1 or answering.done())
        a.resume()
        check_whole(await answering, "hello", max_tokens=8)


async def test_usage_tells_what_was_cached_where_the_request_began() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("b", paused=True) as b,
        running_router(router_config(a.address, b.address)) as router,
    ):
        await router.wait_ready(2)
        answering = await start(router, text_request("hello world", max_tokens=6), a, b)
        first = holder(a, b)
        second = b if first is a else a
        await first.step(2)
        second.resident |= set(second._hashes(first.submits[0]))  # of others' requests
        second.resume()
        first.break_streams()
        answer = await answering
        assert answer.finished is not None
        assert answer.finished.usage.cached_tokens == 0


async def test_deadline_that_the_replica_sees_first_is_one() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        a.finish_reason = pb.FINISH_REASON_ABORT
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await router.generate(text_request("hello", max_tokens=1), timeout_s=0.1)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("inline_tokens", [8192, 0])
async def test_salted_prompt_is_predicted_where_it_is_but_for_its_last_token(
    monkeypatch: pytest.MonkeyPatch, inline_tokens: int
) -> None:
    monkeypatch.setattr("router.flight._INLINE_HASH_TOKENS", inline_tokens)  # 0: off the event loop
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics_port=0)) as router:
        await router.wait_ready(1)
        asked = text_request("seven c", max_tokens=2, cache_salt="s")  # eight tokens, two blocks
        for _ in range(2):
            await router.generate(asked)
        assert await router.metric("weft_router_predicted_cached_tokens_total", model="tiny") == 7
        assert await router.metric("weft_router_cached_tokens_total", model="tiny") == 8, "by the word of the replica"
        assert await router.metric("weft_router_prompt_tokens_total", model="tiny") == 16


async def test_replica_owes_what_it_does_not_hold_of_a_request_until_it_has_said_so_itself() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics_port=0)) as router:
        await router.wait_ready(1)
        asked = text_request("seven c", max_tokens=2)  # eight tokens, two blocks
        await router.generate(asked)
        a.pause()
        answering = await start(router, asked, a)
        labels = {"model": "tiny", "replica": a.address}
        assert await router.metric("weft_router_replica_pending_tokens", **labels) == 1
        a.resume()
        await answering


async def test_replica_owes_the_tokens_too_of_a_request_that_moves_to_it() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        FakeReplica("b", paused=True) as b,
        running_router(router_config(a.address, b.address, metrics_port=0)) as router,
    ):
        await router.wait_ready(2)
        call = aiter(router.stub.Generate(text_request("hello", max_tokens=9)))  # six tokens
        await until(lambda: bool(a.num_requests or b.num_requests))
        first = holder(a, b)
        second = b if first is a else a
        await first.step(3)
        await anext(call)
        await first.die()
        await until(lambda: second.num_requests == 1)
        num_generated = len(second.submits[0].generated_token_ids)
        assert num_generated > 0
        labels = {"model": "tiny", "replica": second.address}
        assert await router.metric("weft_router_replica_pending_tokens", **labels) == 6 + num_generated


async def test_replica_is_told_how_much_time_is_left() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        await router.generate(text_request("hello", max_tokens=1), timeout_s=60.0)
        assert 30 < a.submits[0].timeout_s < 90


async def test_request_that_has_ended_keeps_nothing_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: weakref.WeakSet[Inbox] = weakref.WeakSet()

    class WatchedInbox(Inbox):
        def __init__(self, turns: Turns) -> None:
            super().__init__(turns)
            kept.add(self)

    def is_gone() -> bool:
        gc.collect()
        return not kept

    monkeypatch.setattr("router.replica.Inbox", WatchedInbox)
    async with FakeReplica("a", paused=True) as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        answering = asyncio.create_task(router.generate(text_request("hello"), timeout_s=600.0))
        await until(lambda: a.num_requests == 1)
        assert len(kept) == 1
        a.resume()
        await answering
        await until(is_gone)
