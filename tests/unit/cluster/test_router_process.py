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


@pytest.mark.parametrize("answer", [_dies, _hangs])
async def test_a_router_that_does_not_answer_is_stopped_all_the_same(
    answer: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    router = RouterProcess(
        RouterConfig(control="127.0.0.1:1"),
        log_level="warning",
        policy=RestartPolicy(),
        clock=lambda: 0.0,
        on_change=lambda: None,
    )
    router._actor = FakeActor(answer)
    router._place = RouterPlace(pid=1, grpc_address="", http_address=None, metrics_address=None)
    router._task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]

    async with asyncio.timeout(10):
        await router.stop(grace_s=0.05)

    assert router._task is None
    assert router.lifecycle.state is not GroupState.READY
