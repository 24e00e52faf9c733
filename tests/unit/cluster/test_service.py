"""What a service does where Ray is not as it should be; the rest is in the end-to-end tests."""

import threading

import pytest

from cluster import service as service_module
from cluster.errors import ControllerError
from cluster.service import Service


class SilentClient:
    """A controller that never answers: its call ends when the channel is closed."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def shut_down(self, grace_s: float) -> None:
        assert self.is_closed.wait(60)
        raise ControllerError("the call was cancelled")

    def close(self) -> None:
        self.is_closed.set()


def test_shut_down_waits_for_nobody_where_a_local_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "has_local_ray_died", lambda: True)
    service = Service.__new__(Service)
    service.client = SilentClient()  # type: ignore[assignment]
    service.shut_down(60.0)
    assert service.client.is_closed.is_set()  # type: ignore[attr-defined]
