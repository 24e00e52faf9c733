"""Joining Ray where nobody is, and leaving it: whoever presses Ctrl-C once more leaves none of its processes behind."""

import os
import signal
import socket
from types import SimpleNamespace

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


class Process:
    returncode = -9

    def poll(self) -> int:
        return self.returncode


class Node:
    """A node of Ray whose own process ends at once."""

    num_ended = 0

    def __init__(self) -> None:
        self.all_processes = {"raylet": [SimpleNamespace(process=Process())]}
        raise RuntimeError("it does not come up")

    def kill_all_processes(self, *, check_alive: bool) -> None:
        Node.num_ended += 1


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_a_ray_that_does_not_come_up_is_started_again(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, told = [], []

    def start(**settings: object) -> None:
        attempts.append(settings["address"])
        if len(attempts) <= num_failures:
            local_ray.ray_node.Node()

    monkeypatch.setattr(local_ray.ray_node, "Node", Node)
    monkeypatch.setattr(Node, "num_ended", 0)
    monkeypatch.setattr(local_ray, "give_way", lambda: None)
    monkeypatch.setattr(local_ray.os, "environ", {})
    monkeypatch.setattr(local_ray.ray, "init", start)
    monkeypatch.setattr(local_ray.logger, "warning", lambda message, *args: told.append(message % args))
    if num_failures < 2:
        local_ray.start_local_ray(log_to_driver=False)
    else:
        with pytest.raises(RayError, match=r"it does not come up \(raylet had ended with -9\)"):
            local_ray.start_local_ray(log_to_driver=False)
    assert attempts == ["local"] * min(num_failures + 1, 2)
    assert ["it does not come up (raylet had ended with -9)" in line for line in told] == [True] * (num_failures > 0)
    assert Node.num_ended == num_failures
    assert local_ray.ray_node.Node is Node
