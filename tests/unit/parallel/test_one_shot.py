"""When small all-reduces go through shared memory, and what makes all ranks leave them to NCCL. The sums need GPUs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel import one_shot
from parallel.collectives import all_reduce
from parallel.mesh import Axis, Mesh
from parallel.one_shot import OneShotAllReduce
from workers import rank as rank_module

CPU = torch.device("cpu")


class FakeGroup:
    """Of ranks that all have the same tensors."""

    group_name = "tp"

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.votes: list[int] = []
        self.others_agree = True

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        assert group is self
        if op == dist.ReduceOp.MIN:
            self.votes.append(int(x))
            x.mul_(self.others_agree)
        else:
            x.mul_(self.size)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group whose ranks share memory, and add up right."""
    group = FakeGroup()
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    monkeypatch.setattr(one_shot, "_allocate", lambda num_bytes, device: torch.zeros(num_bytes, dtype=torch.uint8))
    monkeypatch.setattr(one_shot, "_map", lambda shared, group: None)
    monkeypatch.setattr(one_shot, "_add", lambda shared, x, name: shared.copy_(x) * group.size)
    return group


def connect(group: Any, size: int = 2) -> OneShotAllReduce | None:
    return OneShotAllReduce.connect(group, size=size, device=CPU)


def test_what_adds_up_as_nccl_is_used(group: Any) -> None:
    made = connect(group)
    assert made is not None
    assert group.votes == [1, 1]
    x = torch.tensor([1.0, 2.0, 3.0, -4.0])
    assert made.sum(x).tolist() == [2.0, 4.0, 6.0, -8.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_sum_is_found(group: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    def add(shared: Tensor, x: Tensor, name: str) -> Tensor:
        total = x * 2
        if x.dtype is dtype and x.nbytes == 4096:
            total[-1] += 1
        return total

    monkeypatch.setattr(one_shot, "_add", add)
    assert connect(group) is None
    assert group.votes == [1, 0]


def _refuse(*_: Any) -> Any:
    raise RuntimeError("no peer access")


@pytest.mark.parametrize(("part", "votes"), [("_allocate", [0]), ("_map", [1, 0]), ("_add", [1, 0])])
def test_what_a_rank_cannot_no_rank_does(
    group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, votes: list[int]
) -> None:
    monkeypatch.setattr(one_shot, part, _refuse)
    assert connect(group) is None
    assert group.votes == votes
    assert "left to NCCL: no peer access" in caplog.text


def test_a_rank_that_could_leaves_it_with_the_others(group: Any, caplog: pytest.LogCaptureFixture) -> None:
    group.others_agree = False
    assert connect(group) is None
    assert "left to NCCL: another rank cannot, or the sums are not NCCL's" in caplog.text
    assert group.votes == [1], "it does not wait where the others do not come"


def test_torch_accepts_the_call() -> None:
    """Tensors without values: arguments and shapes are checked, nothing is computed."""
    shared = torch.empty(1024, dtype=torch.uint8, device="meta")
    x = torch.empty(3, 8, dtype=torch.bfloat16, device="meta")
    total = OneShotAllReduce(shared, "tp").sum(x)
    assert (total.shape, total.dtype) == (x.shape, x.dtype)


def test_torch_has_no_kernel_for_three_ranks(group: Any) -> None:
    assert connect(group, size=3) is None
    assert group.votes == []


def test_only_small_aligned_tensors_are_taken(group: Any) -> None:
    made = connect(group)
    assert made is not None
    largest = one_shot._MAX_BYTES[2]
    assert made.takes(torch.empty(largest // 2, dtype=torch.bfloat16))
    assert not made.takes(torch.empty(largest // 2 + 8, dtype=torch.bfloat16))
    assert not made.takes(torch.empty(8, dtype=torch.float16))
    assert not made.takes(torch.empty(3, 2)), "24 bytes"
    assert made.takes(torch.empty(12)[4:])
    assert not made.takes(torch.empty(9)[1:]), "not where a load of 16 bytes may begin"
    assert not made.takes(torch.empty(0))


def test_all_reduces_that_it_takes_go_there_and_the_others_to_nccl(group: Any) -> None:
    axis = Axis(size=2, group=group, one_shot=connect(group))
    small, large = torch.ones(4), torch.ones(one_shot._MAX_BYTES[2])
    assert all_reduce(small, axis).tolist() == [2.0] * 4
    assert small.tolist() == [1.0] * 4, "a new tensor"
    assert all_reduce(large, axis) is large
    assert axis.counts["all_reduce"] == 2


@pytest.mark.parametrize(("nodes", "is_shared"), [(b"aabb", True), (b"bbab", False), (b"abbb", True)])
def test_memory_is_shared_within_a_node(
    group: Any, monkeypatch: pytest.MonkeyPatch, nodes: bytes, is_shared: bool
) -> None:
    """The second of two stages."""
    monkeypatch.setattr(OneShotAllReduce, "connect", lambda *args, **kwargs: "connected")
    mesh = Mesh(tp=Axis(size=2, rank=1, group=group), pp=Axis(size=2, rank=1, group=group))
    device: Any = type("Device", (), {"torch_device": CPU})
    rank_module._share_memory(mesh, [bytes([node]) for node in nodes], device)
    assert (mesh.tp.one_shot == "connected") is is_shared
    assert mesh.pp.one_shot is None
