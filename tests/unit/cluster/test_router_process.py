"""A wanted router that is told to stop ends, whatever its process does."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from ray.exceptions import RayError

from cluster.lifecycle import GroupState, RestartPolicy
from cluster.router_actor import RouterPlace
from cluster.router_process import RouterProcess
from router.config import RouterConfig


class FakeMethod:
    def __init__(self, answer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.remote = answer


class FakeActor:
    def __init__(self, stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.stop = FakeMethod(stop)


async def _dies() -> None:
    raise RayError("the actor died")


async def _hangs() -> None:
    await asyncio.Event().wait()


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


def _wanted(*, adopts: bool) -> RouterProcess:
    return RouterProcess(
        RouterConfig(control="127.0.0.1:1"),
        log_level="warning",
        policy=RestartPolicy(),
        clock=lambda: 0.0,
        on_change=lambda: None,
        adopts=adopts,
    )


@pytest.mark.parametrize("adopts", [False, True])
def test_router_that_a_controller_before_had_is_never_given_up(adopts: bool) -> None:
    life = _wanted(adopts=adopts).lifecycle
    for _ in range(4):
        life.failed("its port is taken", 0.0)
    assert life.is_over is not adopts


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
