"""Waiting for a service whose controller answers, or does not."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorAlreadyExistsError
from weft.v1 import control_pb2

from cluster import service
from cluster.config import ClusterSpec, build_spec
from cluster.control_client import ControlClient
from cluster.errors import ControllerError, StartError
from cluster.service import Service

READY = control_pb2.GetStatusResponse(routers=[control_pb2.RouterStatus(alive=True)])


class Controller:
    """A controller that lives, and whose answers follow each other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def status(self) -> control_pb2.GetStatusResponse:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return cast(control_pb2.GetStatusResponse, answer)


def service_with(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service.__new__(Service)
    service.client = cast(ControlClient, controller)
    monkeypatch.setattr(service, "is_alive", lambda: True)
    monkeypatch.setattr("cluster.service._POLL_S", 0.0)
    return service


def test_controller_that_is_slow_to_answer_does_not_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(ControllerError("DEADLINE_EXCEEDED"), READY)
    service_with(controller, monkeypatch).wait_ready(timeout_s=5)
    assert controller.answers == [READY]


def test_start_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match="not ready within 0 s"):
        service_with(Controller(ControllerError("away")), monkeypatch).wait_ready(timeout_s=0)


def test_second_service_on_a_ray_cluster_is_told_what_to_do_about_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(_: ClusterSpec, **__: object) -> None:
        raise ActorAlreadyExistsError("The name controller (namespace=weft) is already taken.")

    monkeypatch.setattr(service, "check_spec", lambda spec: spec)
    monkeypatch.setattr(service, "join_ray", lambda *_, **__: None)
    monkeypatch.setattr(service, "leave_ray", lambda: None)
    monkeypatch.setattr(service.ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env={}))
    monkeypatch.setattr(service, "_create_controller", create)
    with pytest.raises(StartError, match="has a Weft already; allowed: one, so `weft stop` it first, or --take-over"):
        Service.start(build_spec({"ray": {"address": "auto"}}))
