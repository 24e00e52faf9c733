"""Small all-reduces through memory that two GPUs share, called and recorded, are those of NCCL. Not yet run."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from parallel.collectives import all_reduce
from parallel.device.cuda import CudaDevice
from parallel.kernels.cuda_graphs import CudaGraphs, Result
from parallel.kernels.cuda_pieces import Cut, call_at_once
from parallel.mesh import Axis
from parallel.one_shot import OneShotAllReduce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_sums_are_those_of_nccl_called_and_recorded(tmp_path: Path) -> None:
    spawn(_be_rank, args=(str(tmp_path / "store"),), nprocs=2)


def _be_rank(rank: int, file: str) -> None:
    device = CudaDevice(rank).torch_device
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    one_shot = OneShotAllReduce.connect(group, size=2, device=device)
    assert one_shot is not None, "two GPUs of one machine share memory"
    _check(Axis(size=2, rank=rank, group=group, one_shot=one_shot), device)
    dist.destroy_process_group()


@torch.inference_mode()
def _check(axis: Axis, device: torch.device) -> None:
    """One graph with four sums after each other, replayed with other numbers."""
    x = torch.zeros(24, 1024, dtype=torch.bfloat16, device=device)

    def run(cut: Cut = call_at_once) -> Result:
        total = x
        for _ in range(4):
            total = all_reduce(total, axis)
        return total, total

    recording = CudaGraphs().record(run, None)
    for _ in range(3):
        numbers = torch.randint(-3, 4, x.shape, device=device)
        expected: Tensor = numbers.clone()
        dist.all_reduce(expected, group=axis.group)
        x.copy_(numbers)
        recording.replay()
        assert torch.equal(recording.result[0], expected.bfloat16() * 8)
        assert torch.equal(all_reduce(x, axis), expected.bfloat16())
