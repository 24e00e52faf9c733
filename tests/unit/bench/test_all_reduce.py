"""What an all-reduce costs: the arithmetic, the ways on a GPU as far as they go without one, and what is refused."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import all_reduce
from bench.errors import BenchConfigError, BenchError
from bench.load import hardware
from parallel.device.cpu import CpuMark
from parallel.kernels.cuda_graphs import Recording
from parallel.mesh import Axis


def test_rates_are_those_of_the_median() -> None:
    times_s = [number * 1e-6 for number in range(101, 0, -1)]
    timing = all_reduce.Timing.of(times_s, ranks=4, num_bytes=1 << 20, way="gloo")
    assert timing.median_us == pytest.approx(51)
    assert timing.p99_us == pytest.approx(100)
    assert timing.algorithm_gb_per_s == pytest.approx((1 << 20) / 51e-6 / 1e9)
    assert timing.bus_gb_per_s == pytest.approx(1.5 * timing.algorithm_gb_per_s), "2 (n - 1) / n of 4 ranks"


def test_two_ranks_send_each_byte_once() -> None:
    timing = all_reduce.Timing(ranks=2, num_bytes=4096, way="gloo", median_us=8, p99_us=9)
    assert timing.bus_gb_per_s == timing.algorithm_gb_per_s == 0.512


class FakeGpu:
    """Its time passes when it adds."""

    works_by_itself = True
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = Counter[str]()

    def mark(self) -> CpuMark:
        return CpuMark(self.now_s)

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    def add(self, x: Tensor) -> Tensor:
        self.now_s += 3.0
        self.calls["all_reduce"] += 1
        return x


class FakeGraphs:
    """A recording calls what was recorded again."""

    def record(self, run: Callable[[], Any], memory: Any) -> Recording:
        return Recording(run, run(), memory)


def test_a_replay_is_divided_by_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CudaGraphs", FakeGraphs)
    device: Any = FakeGpu()
    ways = all_reduce._ways(torch.zeros(8), Axis(size=2, stand_in=device.add), device)
    assert list(ways) == ["NCCL, eager", "NCCL, recorded"]
    num_calls: list[int] = []
    for measure in ways.values():
        device.calls.clear()
        assert set(measure()) == {3.0}, "of one all-reduce"
        assert device.calls["synchronize"] == 1
        num_calls.append(device.calls["all_reduce"])
    eager, recorded = num_calls
    assert recorded == eager**2 > eager, "as many in a graph as there are calls"


def test_shared_memory_is_measured_for_the_sizes_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CudaGraphs", FakeGraphs)
    device: Any = FakeGpu()
    one_shot: Any = SimpleNamespace(takes=lambda x: len(x) == 8)
    axis = Axis(size=2, stand_in=device.add, one_shot=one_shot)
    nccl = ["NCCL, eager", "NCCL, recorded"]
    assert list(all_reduce._ways(torch.zeros(8), axis, device)) == [*nccl, "one-shot, eager", "one-shot, recorded"]
    assert list(all_reduce._ways(torch.zeros(9), axis, device)) == nccl


def test_no_group_is_started_with_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "select_device", lambda name: SimpleNamespace(works_by_itself=True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(all_reduce, "measure_group", lambda *args: pytest.fail("a group was started"))
    with pytest.raises(BenchConfigError, match="--ranks is 2, and each rank needs a GPU of its own"):
        all_reduce.main(["--ranks", "2", "--device", "cuda"])


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--ranks", "1,2", "--ranks is 1,2; allowed: at least 2"),
        ("--ranks", "", "--ranks is ''; allowed: whole numbers"),
        ("--sizes", "4,0", "--sizes is 4,0; allowed: at least 1"),
        ("--sizes", "4,1e3", "--sizes is '4,1e3'; allowed: whole numbers"),
        ("--rounds", "0", "--rounds is 0; allowed: at least 1"),
        ("--json", "/no/such/folder/file", "cannot be written"),
    ],
)
def test_wrong_arguments_are_refused_by_name(flag: str, value: str, message: str) -> None:
    with pytest.raises((BenchConfigError, BenchError), match=message):
        all_reduce.main(["--device", "cpu", flag, value])
