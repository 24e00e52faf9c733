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


def test_who_interrupts_a_shut_down_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(service_module, "has_local_ray_died", interrupt)
    client = SilentClient()
    service = Service.__new__(Service)
    service.client = client  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        service.shut_down(60.0)
    assert not client.is_closed.is_set()
    client.close()


def test_shut_down_waits_for_nobody_where_a_local_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "has_local_ray_died", lambda: True)
    client = SilentClient()
    service = Service.__new__(Service)
    service.client = client  # type: ignore[assignment]
    service.shut_down(60.0)
    assert client.is_closed.is_set()
