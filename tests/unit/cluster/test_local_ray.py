"""Joining Ray where nobody is, and leaving it: whoever presses Ctrl-C once more leaves none of its processes behind."""

import os
import signal
import socket

import pytest

from cluster import local_ray
from cluster.errors import RayError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_signal_interrupts_the_end_of_ray(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def shut_down() -> None:
        os.kill(os.getpid(), number)
        ended.append(True)

    monkeypatch.setattr(local_ray.ray, "shutdown", shut_down)
    before = signal.getsignal(number)
    local_ray.leave_ray()
    assert ended == [True]
    assert signal.getsignal(number) is before


def test_an_address_where_nothing_listens_is_told_before_ray_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(local_ray.ray, "init", lambda **settings: asked.append(settings["address"]))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for nobody in (address, f"ray://{address}", "127.0.0.1:port"):
            with pytest.raises(RayError, match="cannot be joined"):
                local_ray.join_ray(nobody, log_to_driver=False)
        assert asked == []
        listener.listen()
        for somebody in (address, f"ray://{address}", "auto"):
            local_ray.join_ray(somebody, log_to_driver=False)
    assert asked == [address, f"ray://{address}", "auto"]
