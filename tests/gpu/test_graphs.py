"""Decode steps replayed as CUDA graphs give what the reference gives. Not yet run."""

from pathlib import Path

import pytest
import torch
from helpers.graph_cases import check_decoder

from parallel.kernels.cuda_graphs import GraphedLayers
from parallel.kernels.select import select_kernels

pytestmark = pytest.mark.gpu


def test_replayed_steps_equal_reference(tmp_path: Path) -> None:
    device = torch.device("cuda")
    decoder = check_decoder(select_kernels(device, torch.float32), tmp_path, device, tolerance=2e-3)
    assert isinstance(decoder._run, GraphedLayers)
    assert len(decoder._run._graphs) == 2
