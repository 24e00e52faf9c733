"""Steps replayed as CUDA graphs, whole or in pieces, give what the reference gives."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.graph_cases import check_decoder

from parallel.device.cuda import CudaDevice
from parallel.kernels.base import RunLayers
from parallel.kernels.cuda import CudaKernels
from parallel.kernels.cuda_graphs import CudaGraphs, GraphedLayers
from parallel.kernels.select import select_kernels
from parallel.mesh import Axis

pytestmark = pytest.mark.gpu


def test_replayed_steps_equal_reference(tmp_path: Path) -> None:
    device = torch.device("cuda")
    kernels = select_kernels(device, torch.float32, attention_backend="triton")  # with a library chunks are in pieces
    decoder = check_decoder(kernels, tmp_path, device, tolerance=2e-3)
    assert isinstance(decoder._run, GraphedLayers)
    assert len(decoder._run._graphs) == 3 + 3, "decode steps, and steps with chunks"
    assert not any(bucket.is_in_pieces for bucket in decoder._run._graphs)


def test_steps_in_pieces_equal_reference(tmp_path: Path) -> None:
    """As where a library attends."""

    class InPieces(CudaKernels):
        def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
            return GraphedLayers(run, CudaGraphs().record, attention=self._cut_attention, counts=axis.counts)

    device = torch.device("cuda")
    decoder = check_decoder(InPieces(device), tmp_path, device, tolerance=2e-3)
    assert isinstance(decoder._run, GraphedLayers)
    assert sum(bucket.is_in_pieces for bucket in decoder._run._graphs) == 3


def test_collectives_of_nccl_are_recorded_and_let_go(tmp_path: Path) -> None:
    """Half a model, whose sums NCCL makes over one rank: as much of a group as one GPU can be."""
    device = CudaDevice().torch_device
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        axis = Axis(size=2, rank=0, group=dist.group.WORLD)
        kernels = select_kernels(device, torch.float32, attention_backend="triton")
        decoder = check_decoder(kernels, tmp_path, device, tolerance=2e-3, tp=axis)
        assert isinstance(decoder._run, GraphedLayers)
        assert [graph.collectives["all_reduce"] for graph in decoder._run._graphs.values()] == [4] * 6
        decoder.drop_recordings()
    finally:
        dist.destroy_process_group()  # waits for graphs that hold its collectives
