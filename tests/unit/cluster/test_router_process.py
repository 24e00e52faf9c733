"""A wanted router that is told to stop ends, whatever its process does."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import FakeClock, turns
from helpers.fake_actor import FakeMethod
from ray.exceptions import GetTimeoutError, RayError

from cluster.lifecycle import GroupState, RestartPolicy
from cluster.log_reader import LogReader
from cluster.rank_values import Outcome
from cluster.router_actor import RouterPlace
from cluster.router_process import RouterProcess
from router.config import RouterConfig


class FakeActor:
    def __init__(self, stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.stop = FakeMethod(lambda grace_s: stop())


class FakeRouterActor:
    """A router process that a controller before has started; it ends when it is told to stop."""

    def __init__(self) -> None:
        self.was_killed = False
        self.grace_s: float | None = None
        self.answers = asyncio.Event()
        self.was_stopped = asyncio.Event()
        self.ended = FakeMethod(self._ended)
        self.has_begun = FakeMethod(self._has_begun)
        self.ready = FakeMethod(self._ready)
        self.stop = FakeMethod(self._stop)

    def _ended(self) -> "asyncio.Task[Outcome]":
        return asyncio.create_task(self._end())

    async def _end(self) -> Outcome:
        await self.was_stopped.wait()
        return Outcome(message="stopped")

    async def _has_begun(self) -> bool:
        await self.answers.wait()
        return True

    async def _ready(self) -> RouterPlace:
        await self.answers.wait()
        return RouterPlace(pid=1, grpc_address="h:1", http_address=None, metrics_address=None)

    async def _stop(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.was_stopped.set()


class FakeRay:
    """Knows one actor; tells of it when a test says so."""

    def __init__(self, actor: FakeRouterActor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actor = actor
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.num_timeouts = 0
        monkeypatch.setattr("cluster.router_process.ray.get_actor", self.get_actor)
        monkeypatch.setattr("cluster.router_process.ray.kill", self.kill)

    def get_actor(self, name: str) -> FakeRouterActor:
        assert name == "router-0"
        if self.num_timeouts:
            self.num_timeouts -= 1
            raise GetTimeoutError("GCS is under high load")
        self.is_asked.set()
        assert self.may_answer.wait(10)
        return self.actor

    def kill(self, actor: FakeRouterActor, *, no_restart: bool) -> None:
        assert no_restart
        actor.was_killed = True


async def _dies() -> None:
    raise RayError("the actor died")


async def _hangs() -> None:
    await asyncio.Event().wait()


async def _ends_at(event: asyncio.Event) -> str:
    await event.wait()
    return "stopped"


def _running(actor: FakeActor, life: Coroutine[Any, Any, Any]) -> RouterProcess:
    router = _wanted(adopts=False)
    router._actor = actor
    router._place = RouterPlace(pid=1, grpc_address="", http_address=None, metrics_address=None)
    router._task = asyncio.create_task(life)
    return router


@pytest.mark.parametrize("answer", [_dies, _hangs])
async def test_a_router_that_does_not_answer_is_stopped_all_the_same(
    answer: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    router = _running(FakeActor(answer), _hangs())

    async with asyncio.timeout(10):
        await router.stop(grace_s=0.05)

    assert router._task is None
    assert router.lifecycle.state is not GroupState.READY


def _wanted(
    *, adopts: bool, kind: type[RouterProcess] = RouterProcess, clock: Callable[[], float] = lambda: 0.0
) -> RouterProcess:
    return kind(
        RouterConfig(control="127.0.0.1:1"),
        log_level="warning",
        policy=RestartPolicy(),
        clock=clock,
        on_change=lambda: None,
        adopts=adopts,
    )


@pytest.mark.parametrize("adopts", [False, True])
def test_router_that_a_controller_before_had_is_never_given_up(adopts: bool) -> None:
    router = _wanted(adopts=adopts)
    for _ in range(4):
        router.lifecycle.failed("its port is taken", 0.0)
    assert router.lifecycle.is_over is router.status().failed is not adopts


async def test_who_stops_a_router_that_is_being_stopped_sees_it_end() -> None:
    is_ending, may_end = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        try:
            await _hangs()
        finally:
            is_ending.set()
            await may_end.wait()

    router = _running(FakeActor(_hangs), live())
    async with asyncio.timeout(10), asyncio.TaskGroup() as stops:
        stops.create_task(router.stop(grace_s=0.0))
        await is_ending.wait()
        stops.create_task(router.stop(grace_s=5.0))
        await asyncio.sleep(0)
        may_end.set()

    assert router._task is None


async def test_a_router_that_finishes_its_requests_is_alive_and_drains() -> None:
    may_end = asyncio.Event()
    router = _running(FakeActor(_hangs), _ends_at(may_end))
    router.lifecycle.placed(0.0)
    router.lifecycle.ready(0.0)
    told = [router.status()]
    stopping = asyncio.create_task(router.stop(grace_s=60.0))
    await turns()
    told.append(router.status())
    may_end.set()
    async with asyncio.timeout(10):
        await stopping
    told.append(router.status())
    assert [(each.alive, each.draining, each.detail) for each in told] == [
        (True, False, ""), (True, True, "finishes its requests"), (False, False, "")
    ]  # fmt: skip


async def test_stop_during_an_adoption_lets_the_router_finish_first(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, clock = FakeRouterActor(), FakeClock()
    FakeRay(actor, monkeypatch).may_answer.set()
    router = _wanted(adopts=True, clock=clock)
    stopping = asyncio.create_task(router.stop(grace_s=60.0))  # before any pass
    await turns()
    clock.advance(20.0)
    actor.answers.set()
    async with asyncio.timeout(10):
        await stopping
    assert actor.grace_s == 40.0
    assert actor.was_killed
    assert not router.is_adopting
    assert router.lifecycle.state is GroupState.STOPPED


async def test_a_router_of_which_ray_does_not_tell_at_once_is_adopted_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.see_through._RETRY_S", 0.0)
    actor = FakeRouterActor()
    actor.answers.set()
    fake_ray = FakeRay(actor, monkeypatch)
    fake_ray.num_timeouts = 2
    fake_ray.may_answer.set()
    router = _wanted(adopts=True)
    router.reconcile()
    assert router.status().detail == "a new controller looks for its process"
    async with asyncio.timeout(10):
        while router.is_adopting:
            router.reconcile()
            await asyncio.sleep(0.001)
    assert router.status().alive, "its name would never be free for another one"
    await router.stop(grace_s=5.0)


async def test_broken_connections_to_its_process_cost_a_router_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.see_through._RETRY_S", 0.0)
    actor = FakeRouterActor()
    actor.answers.set()
    FakeRay(actor, monkeypatch).may_answer.set()
    methods = (actor.has_begun, actor.ready, actor.ended)
    for method in methods:
        method.break_once()
    router = _wanted(adopts=True)
    router.reconcile()
    assert router._task is not None
    async with asyncio.timeout(10):
        while not router.status().alive:
            await turns()
        await turns()
        assert not router._task.done()
        actor.was_stopped.set()
        assert await router._task == "stopped"
    assert [method.num_broken for method in methods] == [1, 1, 1]


async def test_stop_without_grace_during_an_adoption_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = FakeRouterActor()
    fake_ray = FakeRay(actor, monkeypatch)
    stopping = asyncio.create_task(_wanted(adopts=True).stop(grace_s=0.0))
    assert await asyncio.to_thread(fake_ray.is_asked.wait, 10)
    fake_ray.may_answer.set()
    async with asyncio.timeout(10):
        await stopping
    assert actor.was_killed


@pytest.mark.parametrize("adopts", [False, True])
async def test_router_that_is_not_ready_in_time_ends_and_another_life_begins(
    monkeypatch: pytest.MonkeyPatch, adopts: bool
) -> None:
    actor = FakeRouterActor()
    FakeRay(actor, monkeypatch).may_answer.set()
    monkeypatch.setattr("cluster.router_process._START_TIMEOUT_S", 0.05)
    num_made = 0

    class Router(RouterProcess):
        async def _create(self) -> bool:
            nonlocal num_made
            num_made += 1
            self._actor = actor
            return True

    clock = FakeClock()
    router = _wanted(adopts=adopts, kind=Router, clock=clock)
    router.reconcile()
    assert router._task is not None
    async with asyncio.timeout(10):
        assert await router._task == "not ready within 0.05 s"
    assert actor.was_killed
    monkeypatch.setattr("cluster.router_process._START_TIMEOUT_S", 60.0)
    actor.answers.set()
    router.reconcile()
    assert not router.is_adopting
    clock.advance(7.0)
    assert (router.record.last_failure, router.record.failed_ago_s) == ("not ready within 0.05 s", 7.0)
    assert router.status().last_failure.seconds_ago == 7.0
    await turns()
    await turns()  # the life begins, and is asked whether it is ready
    assert router.status().alive
    assert router.status().restarts == 1
    assert num_made == (1 if adopts else 2)
    await router.stop(grace_s=5.0)


async def test_log_of_a_router_that_died_is_known_beside_that_of_its_next_life(tmp_path: Path) -> None:
    reader = LogReader("here")
    for pid in (4711, 4712):
        (tmp_path / f"{pid}").write_text(f"life {pid}\n")
        router = _running(FakeActor(_hangs), _hangs())
        router._place = RouterPlace(
            pid=pid, grpc_address="", http_address=None, metrics_address=None,
            node_id="here", log_file=str(tmp_path / f"{pid}"),
        )  # fmt: skip
        reader.note(router.log_sources())
        await router.stop(grace_s=0.0)

    read = await reader.read("router", {}, 100)
    assert {name: piece.data for name, piece in read.items()} == {
        "router-0/4711": b"life 4711\n",
        "router-0/4712": b"life 4712\n",
    }
    assert (await reader.read("router-0", {}, 100)).keys() == read.keys()
    assert list(await reader.read("router-0/4711", {}, 100)) == ["router-0/4711"]
