"""What a stage's link counts; what it sends is in tests/distributed/test_decoder.py."""

import pytest
import torch

from parallel import pipeline
from parallel.mesh import Axis, Mesh
from parallel.pipeline import StageLink


class SlowLink:
    """Stands for torch.distributed: a call takes some seconds of a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def isend(self, _tensor: torch.Tensor, **_place: object) -> "SlowLink":
        """Give what can be waited for."""
        self.now_s += 1.0
        return self

    def wait(self) -> None:
        """Until it is received."""
        self.now_s += 5.0

    def recv(self, _tensor: torch.Tensor, **_place: object) -> None:
        """Receive nothing."""
        self.now_s += 3.0


def test_time_spent_on_neighbours_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowLink()
    monkeypatch.setattr(pipeline, "dist", slow)
    monkeypatch.setattr(pipeline, "perf_counter", lambda: slow.now_s)
    mesh = Mesh(tp=Axis(), pp=Axis(size=3, rank=1))
    link = StageLink(mesh, hidden_size=2, dtype=torch.float32, device=torch.device("cpu"))
    waited_s = []
    for _ in range(4):
        hidden = link.recv(1)
        link.send(hidden)
        waited_s.append(mesh.pp.wait_s)
    assert waited_s == [4.0, 8.0, 12.0, 21.0]  # the last waits for the first of three to be received
