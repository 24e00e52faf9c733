"""A controller that comes after another one, whose machine was lost: what it serves, and what it tells Ray."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster import controller as module
from cluster.config import build_spec
from cluster.controller import Controller
from cluster.saved_state import SavedState, encode

ANY_PORTS = {"router": {"port": 0, "http_port": 0, "metrics_port": 0}, "controller": {"port": 0}}


class Ray:
    """The cluster that outlives its controllers: its store, and its autoscaler."""

    def __init__(self) -> None:
        self.saved: bytes | None = None
        self.asked: list[Sequence[dict[str, float]]] = []

    def load(self) -> bytes | None:
        return self.saved

    def save(self, data: bytes) -> None:
        self.saved = data

    def get_actor_id(self) -> str:
        return "an actor"

    def get_node_id(self) -> str:
        return "a node"

    was_current_actor_reconstructed = False


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    async def begin(_: Controller, listener: grpc.aio.Server) -> None:
        """Serve nobody, and form no groups."""
        await listener.start()
        await listener.stop(None)  # lets go of the port

    ray = Ray()
    monkeypatch.setattr(module, "ray", SimpleNamespace(get_runtime_context=lambda: ray))
    monkeypatch.setattr(module, "RayStateStore", lambda: ray)
    monkeypatch.setattr(module, "ask_ray", ray.asked.append)
    monkeypatch.setattr(Controller, "_begin", begin)
    for name in ("configure_logging", "take_spare", "give_way"):
        monkeypatch.setattr(module, name, lambda *_: None)
    return ray


async def start(*, takes_over: bool = False, **model: Any) -> tuple[Controller, bool]:
    """Start a controller of this model, which is lost in the end."""
    spec = build_spec({"models": [{"name": "m", **model}], "ray": {"address": "auto"}, **ANY_PORTS})
    controller = Controller(spec, "warning")
    _, goes_on = await controller.start(takes_over=takes_over)
    assert controller._metrics is not None
    await controller._metrics.close()
    return controller, goes_on


def served(controller: Controller) -> dict[str, int]:
    assert controller._state is not None
    return {name: section.replicas for name, section in controller._state.sections().items()}


async def test_a_service_that_is_taken_over_goes_on_with_its_models_and_settings(ray: Ray) -> None:
    for takes_over, replicas, expected in ((True, 2, (2, False)), (True, 3, (2, True)), (False, 4, (4, False))):
        controller, goes_on = await start(takes_over=takes_over, replicas=replicas)
        assert (served(controller), goes_on) == ({"m": expected[0]}, expected[1])


async def test_nothing_is_taken_over_of_a_service_that_was_stopped(ray: Ray) -> None:
    await start(replicas=2)
    ray.saved = encode(SavedState(ended_controller="another actor"))
    controller, goes_on = await start(takes_over=True, replicas=3)
    assert (served(controller), goes_on) == ({"m": 3}, False)


async def test_what_a_controller_before_has_asked_ray_for_is_taken_back(ray: Ray) -> None:
    for asked in ([], [[]]):
        controller, _ = await start()
        assert controller._nodes is not None
        await controller._nodes.want([])
        assert ray.asked == asked
