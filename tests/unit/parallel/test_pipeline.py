"""What a link of stages counts, and says of a peer that is gone; what it sends, tests/distributed/test_decoder.py."""

import pytest
import torch

from parallel import pipeline
from parallel.errors import CollectiveError
from parallel.mesh import Axis, Mesh
from parallel.pipeline import StageLink


class SlowLink:
    """Stands for torch.distributed: a call takes some seconds of a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.fails_in = ""

    def isend(self, _tensor: torch.Tensor, **_place: object) -> "SlowLink":
        """Give what can be waited for."""
        self._call("isend", 1.0)
        return self

    def wait(self) -> None:
        """Until it is received."""
        self._call("wait", 5.0)

    def recv(self, _tensor: torch.Tensor, **_place: object) -> None:
        """Receive nothing."""
        self._call("recv", 3.0)

    def _call(self, name: str, time_s: float) -> None:
        self.now_s += time_s
        if name == self.fails_in:
            raise RuntimeError("connection closed")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowLink:
    slow = SlowLink()
    monkeypatch.setattr(pipeline, "dist", slow)
    monkeypatch.setattr(pipeline, "perf_counter", lambda: slow.now_s)
    return slow


def _link(mesh: Mesh) -> StageLink:
    return StageLink(mesh, hidden_size=2, dtype=torch.float32, device=torch.device("cpu"))


def test_time_spent_on_neighbours_is_counted(slow: SlowLink) -> None:
    mesh = Mesh(tp=Axis(), pp=Axis(size=3, rank=1))
    link = _link(mesh)
    waited_s = []
    for _ in range(4):
        hidden = link.recv(1)
        link.send(hidden)
        waited_s.append(mesh.pp.wait_s)
    assert waited_s == [4.0, 8.0, 12.0, 21.0]  # the last waits for the first of three to be received


@pytest.mark.parametrize(
    ("fails_in", "message"),
    [
        ("recv", "stage 1 cannot receive from stage 0: connection closed"),
        ("isend", "stage 1 cannot send to stage 2: connection closed"),
        ("wait", "stage 1 cannot send to stage 2: connection closed"),
    ],
)
def test_a_neighbour_that_is_gone_is_a_collective_error(slow: SlowLink, fails_in: str, message: str) -> None:
    link = _link(Mesh(tp=Axis(), pp=Axis(size=3, rank=1)))
    for _ in range(3):
        link.send(link.recv(1))
    slow.fails_in = fails_in
    with pytest.raises(CollectiveError, match=message):
        link.send(link.recv(1))


def test_what_was_sent_to_a_neighbour_that_is_gone_is_a_collective_error(slow: SlowLink) -> None:
    link = _link(Mesh(tp=Axis(), pp=Axis(size=2)))
    link.send(torch.ones(1, 2))
    slow.fails_in = "wait"
    with pytest.raises(CollectiveError, match="stage 0 lost the next stage: connection closed"):
        link.flush()
