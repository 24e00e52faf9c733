"""The process of a router says by whom it was told to end."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from helpers.cluster import FakeClock

from cluster import router_actor
from cluster.router_actor import RouterActor
from router.app import BoundAddresses
from router.config import RouterConfig


@pytest.fixture
def graces_s() -> list[float]:
    """How long routers that were told to end gave the requests in flight."""
    return []


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, clock: FakeClock, graces_s: list[float]) -> RouterActor:
    """One whose router does nothing until it is told to end, and was not ready for 8 s then."""

    begun_s = clock()

    async def run_router(
        config: RouterConfig, *, stop: asyncio.Event, on_ready: Callable[..., None], grace_s: Callable[[], float]
    ) -> None:
        on_ready(BoundAddresses(grpc="h:1", http=None, metrics=None))
        await stop.wait()
        clock.now_s = begun_s + config.unready_s
        graces_s.append(grace_s())

    for name in ("configure_logging", "take_spare", "give_way", "on_sigterm", "RouterPlace"):
        monkeypatch.setattr(router_actor, name, lambda *_, **__: None)
    monkeypatch.setattr("router.app.run_router", run_router)
    monkeypatch.setattr(router_actor.ray, "get_runtime_context", lambda: _Context())
    return RouterActor(RouterConfig(control="127.0.0.1:1", grace_s=30.0, unready_s=8.0), "warning", clock=clock)


class _Context:
    def get_node_id(self) -> str:
        return "node"


@pytest.mark.parametrize(
    ("is_stopped", "message", "logged"),
    [(False, "was told to end by SIGTERM", ["router router-0 was sent SIGTERM"]), (True, "stopped", [])],
)
async def test_end_by_sigterm_is_told_unless_it_was_stopped_before(
    actor: RouterActor, caplog: pytest.LogCaptureFixture, is_stopped: bool, message: str, logged: list[str]
) -> None:
    caplog.set_level(logging.INFO, logger=router_actor.__name__)
    await actor.begin()
    if is_stopped:
        await actor.stop(0.0)
    actor._on_sigterm()
    async with asyncio.timeout(60):
        outcome = await actor.ended()
    assert outcome.message == message
    assert caplog.messages == logged


@pytest.mark.parametrize(("within_s", "grace_s"), [(None, 30.0), (20.0, 12.0), (5.0, 0.0)], ids=str)
async def test_time_in_which_it_is_not_ready_is_of_the_grace_that_it_is_told(
    actor: RouterActor, graces_s: list[float], within_s: float | None, grace_s: float
) -> None:
    await actor.begin()
    if within_s is None:
        actor._on_sigterm()
    else:
        await actor.stop(within_s)
    async with asyncio.timeout(60):
        await actor.ended()
    assert graces_s == [grace_s]


@pytest.mark.parametrize(("again_s", "grace_s"), [(14.0, 12.0), (60.0, 12.0), (4.0, 2.0), (1.0, 0.0)], ids=str)
async def test_router_that_is_told_again_while_it_is_not_ready_ends_by_the_earlier_time(
    actor: RouterActor, clock: FakeClock, graces_s: list[float], again_s: float, grace_s: float
) -> None:
    await actor.begin()
    await actor.stop(20.0)
    clock.advance(6.0)
    await actor.stop(again_s)  # as a new controller does, which goes on with the stop of the one before
    async with asyncio.timeout(60):
        await actor.ended()
    assert graces_s == [grace_s]
