"""Following the controller: replicas join and leave, the controller goes and comes back, caches are known."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from helpers.fake_control import FakeControl
from helpers.fake_replica import HASH_KEY, FakeReplica
from helpers.polling import until
from helpers.ports import unlisted_port
from helpers.router_harness import prompt_ids, router_config, running_router, text_request
from weft.block_hash import block_hashes, root_hash
from weft.v1 import control_pb2, replica_pb2

from router.directory import Directory, Membership, ModelRoute
from router.errors import ModelNotFoundError, NoReplicaError
from router.policy import RoundRobin
from router.prefix_index import ReplicaId
from router.route import ServedModel


@asynccontextmanager
async def running_directory(*addresses: str, control: str | None = None) -> AsyncIterator[Directory]:
    directory = Directory(router_config(*addresses, control=control), random.Random(0))
    task = asyncio.create_task(directory.run())
    await asyncio.sleep(0)
    try:
        yield directory
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_ready(directory: Directory, num_replicas: int) -> ModelRoute:
    async with asyncio.timeout(10):
        while True:
            try:
                route = directory.resolve("tiny")
                if route.num_ready == num_replicas:
                    return route
            except (NoReplicaError, ModelNotFoundError):
                pass
            await directory.wait_for_change(1)


def hashes_of(text: str) -> list[bytes]:
    return block_hashes(root_hash(HASH_KEY), prompt_ids(text), 4)


async def test_membership_is_not_known_before_the_controller_answered() -> None:
    async with FakeControl() as control, running_directory(control=control.address) as directory:
        with pytest.raises(NoReplicaError):
            directory.resolve("tiny")
        control.set_replicas({})
        route = await until_ready(directory, 0)
        assert route.max_context == 512
        with pytest.raises(ModelNotFoundError, match="model is 'other'; served: 'tiny'"):
            directory.resolve("other")
        assert control.watchers == ["router-0"]


async def test_replicas_join_and_leave() -> None:
    async with (
        FakeControl() as control,
        FakeReplica("a") as a,
        FakeReplica("b") as b,
        running_directory(control=control.address) as directory,
    ):
        control.set_replicas({"a": a.address})
        route = await until_ready(directory, 1)
        control.set_replicas({"a": a.address, "b": b.address})
        await until_ready(directory, 2)
        control.set_replicas({"b": b.address})
        await until_ready(directory, 1)
        assert set(route.links) == {"b"}
        await a.wait_until(lambda: not a.streams)
        assert b.num_connections == 1


async def test_replica_that_has_moved_is_dialled_where_it_is_now() -> None:
    async with (
        FakeControl() as control,
        FakeReplica("a") as old,
        FakeReplica("a") as new,
        running_directory(control=control.address) as directory,
    ):
        control.set_replicas({"a": old.address})
        await until_ready(directory, 1)
        control.set_replicas({"a": new.address})
        await new.wait_until(lambda: bool(new.streams))
        await old.wait_until(lambda: not old.streams)
        route = await until_ready(directory, 1)
        assert [link.endpoint.address for link in route.links.values()] == [new.address]


async def test_draining_replica_keeps_its_link_and_its_requests_and_gets_no_new_ones() -> None:
    async with (
        FakeControl() as control,
        FakeReplica("a", paused=True) as a,
        FakeReplica("b") as b,
        running_router(router_config(control=control.address)) as router,
    ):
        control.set_replicas({"a": a.address})
        await router.wait_ready(1)
        first = asyncio.create_task(router.generate(text_request("hello", max_tokens=6)))
        await until(lambda: bool(a.num_requests))
        control.set_replicas({"a": a.address, "b": b.address}, draining=["a"])
        for _ in range(3):
            answer = await router.generate(text_request("hello"))
            assert answer.finished is not None
            assert list(answer.finished.replica_ids) == ["b"]
        assert a.num_connections == 1
        a.resume()
        answer = await first
        assert answer.finished is not None
        assert list(answer.finished.replica_ids) == ["a"]
        control.set_replicas({"b": b.address})
        await a.wait_until(lambda: not a.streams)


async def test_replicas_of_a_model_that_is_no_longer_served_are_left() -> None:
    async with FakeControl() as control, FakeReplica("a") as a, running_directory(control=control.address) as directory:
        control.set_replicas({"a": a.address}, models=("tiny", "big"))
        await until_ready(directory, 1)
        membership = control_pb2.WatchReplicasResponse(
            version=9,
            models=[control_pb2.ServedModel(name="big", path="/big")],
            replicas=[control_pb2.ReplicaEndpoint(replica_id="a", model="tiny", address=a.address, draining=True)],
        )
        control.set_membership(membership)
        await a.wait_until(lambda: not a.streams)
        assert [route.name for route in directory.routes] == ["big"]


async def test_model_that_is_no_longer_served_is_not_found() -> None:
    async with FakeControl() as control, running_directory(control=control.address) as directory:
        control.set_replicas({}, models=("tiny", "big"))
        await until_ready(directory, 0)
        control.set_replicas({}, models=("big",))
        async with asyncio.timeout(10):
            while len(directory.routes) == 2:
                await directory.wait_for_change(1)
        with pytest.raises(ModelNotFoundError, match="served: 'big'"):
            directory.resolve("tiny")
        assert directory.resolve("").name == "big"


async def test_request_of_a_model_that_is_named_again_goes_on_at_its_new_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.demand.REPORT_S", 0.05)
    async with (
        FakeControl() as control,
        FakeReplica("a", paused=True) as a,
        FakeReplica("b") as b,
        running_router(router_config(control=control.address)) as router,
    ):
        control.set_replicas({"a": a.address})
        await router.wait_ready(1)
        asking = asyncio.create_task(router.generate(text_request("hello")))
        await a.wait_until(lambda: a.num_requests == 1)
        await a.step()
        control.set_replicas({}, models=("other",))
        await router.wait_ready(-1)
        control.set_replicas({"b": b.address})
        await router.wait_ready(1)
        num_reports = len(control.reports)
        await until(lambda: len(control.reports) > num_reports)
        assert control.num_held == 0, "its first replica still has it"
        a.break_streams()
        answer = await asking
    assert answer.finished is not None
    assert list(answer.finished.replica_ids) == ["a", "b"]


async def test_model_that_is_named_again_is_what_membership_says_now_also_to_requests_from_before() -> None:
    async with running_directory("127.0.0.1:1") as directory:
        route = directory.resolve("tiny")
        route.note_served(is_on_time=True)
        directory.apply(Membership(models=(), replicas=()))
        with pytest.raises(ModelNotFoundError):
            directory.resolve("tiny")
        other = ServedModel(name="tiny", path="/other", max_context=64)
        directory.apply(Membership(models=(other,), replicas=()))
        assert directory.resolve("tiny") is route
        assert (route.text.path, route.max_context, route.demand.num_finished) == ("/other", 64, 0)


async def test_last_membership_stays_while_the_controller_is_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "router.directory")
    control, port = FakeControl(), unlisted_port()
    async with (
        FakeReplica("a") as a,
        FakeReplica("b") as b,
        running_directory(control=f"127.0.0.1:{port}") as directory,
    ):
        await until(lambda: len(caplog.records) == 1)
        await control.start(port)
        control.set_replicas({"a": a.address})
        await until_ready(directory, 1)
        await control.stop()
        assert directory.is_ready
        restarted = FakeControl()
        await restarted.start(port)
        restarted.set_replicas({"a": a.address, "b": b.address})
        await until_ready(directory, 2)
        assert a.num_connections == 1, "the link to a replica does not care for the controller"
        await restarted.stop()
        await until(lambda: len(caplog.records) == 3)
    said = [message.partition(": ")[0] for message in caplog.messages]
    assert said == [f"controller at 127.0.0.1:{port}"] * 3, "each absence is told once, however often it is dialled"


async def test_replica_that_leaves_membership_finishes_its_requests() -> None:
    async with (
        FakeControl() as control,
        FakeReplica("a", paused=True) as a,
        running_router(router_config(control=control.address)) as router,
    ):
        control.set_replicas({"a": a.address})
        await router.wait_ready(1)
        answering = asyncio.create_task(router.generate(text_request("hello")))
        await a.wait_until(lambda: a.num_requests == 1)
        control.set_replicas({})
        await router.wait_ready(0)
        assert a.streams
        a.resume()
        answer = await answering
        await a.wait_until(lambda: not a.streams)
    assert answer.finished is not None
    assert list(answer.finished.replica_ids) == ["a"]


@pytest.mark.parametrize(
    ("replica_id", "model", "why"),
    [
        ("new", "tiny", "{} is replica new; wanted: old"),
        ("old", "big", "the replica serves model 'big'; wanted: 'tiny'"),
    ],
    ids=["id", "model"],
)
async def test_wrong_replica_at_an_address_is_not_used(
    caplog: pytest.LogCaptureFixture, replica_id: str, model: str, why: str
) -> None:
    async with (
        FakeControl() as control,
        FakeReplica(replica_id, model=model) as replica,
        running_directory(control=control.address) as directory,
    ):
        control.set_replicas({"old": replica.address})
        await replica.wait_until(lambda: replica.num_connections >= 2)
        assert not directory.is_ready
        told = f"replica old: not connected: {why.format(replica.address)}"
        assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [told], "once"
        replica.replica_id, replica.model = "old", "tiny"
        await until_ready(directory, 1)


async def test_index_follows_snapshot_events_and_the_end_of_the_stream() -> None:
    async with FakeReplica("a") as a:
        a.resident = set(hashes_of("a prompt of many blocks")[:3])
        async with running_directory(a.address) as directory:
            route = await until_ready(directory, 1)
            me = ReplicaId(a.address)
            assert route.hash_blocks(prompt_ids("a prompt of many blocks"), "") == hashes_of("a prompt of many blocks")
            assert route.index.match(hashes_of("a prompt of many blocks")) == {me: 3}
            a.evict(hashes_of("a prompt of many blocks")[2:3])
            await until(lambda: route.index.num_blocks(me) == 2)
            assert route.index.match(hashes_of("a prompt of many blocks")) == {me: 2}
            await a.die()
            await until_ready(directory, 0)
            assert len(route.index) == 0


async def test_requests_return_to_the_replica_that_holds_their_prefix() -> None:
    async with FakeReplica("a") as a, FakeReplica("b") as b:
        config = router_config(a.address, b.address, metrics_port=0)
        async with running_router(config) as router:
            await router.wait_ready(2)
            answers = [await router.generate(text_request("a long shared beginning, then " + end)) for end in "xyz"]
            salted = text_request("a long shared beginning, then x", cache_salt="other tenant")
            foreign = await router.generate(salted)
            predicted = await router.metric("weft_router_predicted_cached_tokens_total", model="tiny")
            cached = await router.metric("weft_router_cached_tokens_total", model="tiny")
            reasons = {labels["reason"]: n for labels, n in await router.series("weft_router_choices_total")}
    finished = [answer.finished for answer in answers if answer.finished]
    assert len({f.replica_ids[0] for f in finished}) == 1
    assert [f.usage.cached_tokens for f in finished] == [0, 28, 28]
    assert foreign.finished is not None
    assert foreign.finished.usage.cached_tokens == 0
    assert predicted == cached == 56
    assert reasons["prefix"] == 2


async def test_link_that_breaks_again_and_again_opens_its_breaker() -> None:
    async with FakeReplica("a") as a, running_directory(a.address) as directory:
        route = await until_ready(directory, 1)
        link = route.links[ReplicaId(a.address)]
        for num_before in (1, 2, 3):
            a.break_streams()
            await until(lambda: a.num_connections > num_before)  # noqa: B023 - awaited in this turn of the loop
            await until_ready(directory, 1)
        assert not link.takes_requests(0.0)


def test_replica_with_another_hash_is_served_without_the_index() -> None:
    route = ModelRoute(ServedModel(name="tiny", path="/tiny", max_context=0), RoundRobin())
    assert route.accept(replica_pb2.Snapshot(block_size=4, hash_key=b"k"))
    route.index.store(ReplicaId("a"), [b"x" * 16])
    assert route.accept(replica_pb2.Snapshot(block_size=4, hash_key=b"k")), "a second one like the first"
    assert not route.accept(replica_pb2.Snapshot(block_size=8, hash_key=b"k"))
    assert route.block_size == 4
    route.index.drop(ReplicaId("a"))
    assert route.accept(replica_pb2.Snapshot(block_size=8, hash_key=b"k"))
    assert route.block_size == 8


async def test_router_without_a_replica_of_the_model_says_so() -> None:
    async with FakeControl() as control, running_router(router_config(control=control.address)) as router:
        control.set_replicas({})
        await router.wait_ready(0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.generate(text_request("hello"))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
