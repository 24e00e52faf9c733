"""Leaving Ray: whoever presses Ctrl-C once more leaves none of its processes behind."""

import os
import signal

import pytest

from cluster import local_ray


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
