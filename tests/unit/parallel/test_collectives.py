"""What the collectives of an axis count; what they give is in tests/distributed/test_collectives.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel import collectives
from parallel.collectives import all_reduce, broadcast, gather_to_first
from parallel.errors import CollectiveError
from parallel.mesh import Axis


class SlowGroup:
    """Stands for torch.distributed: a call takes two seconds of a clock of its own, and may fail."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.error: Exception | None = None

    def all_reduce(self, _tensor: Tensor, *_others: object, **_place: object) -> None:
        """Change nothing."""
        self.now_s += 2.0
        if self.error is not None:
            raise self.error

    gather = broadcast = all_reduce


@pytest.mark.parametrize("call", [all_reduce, broadcast, gather_to_first])
def test_time_spent_in_collectives_adds_up_in_seconds(
    call: Callable[[Tensor, Axis], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowGroup()
    monkeypatch.setattr(collectives, "dist", slow)
    monkeypatch.setattr(collectives, "perf_counter", lambda: slow.now_s)
    axis = Axis(size=2)
    for waited_s in (2.0, 4.0):
        call(torch.ones(3), axis)
        assert axis.wait_s == waited_s
    for error in (RuntimeError("gone"), TimeoutError("late")):
        slow.error = error
        with pytest.raises(CollectiveError, match=r"on rank 0 of 2: a peer died or took too long"):
            call(torch.ones(3), axis)
    assert axis.wait_s == 8.0
