"""Marks tell a GPU's own time, without a wait of the host."""

import pytest
import torch

from parallel.device.cuda import CudaDevice

pytestmark = pytest.mark.gpu


def test_marks_lie_in_the_order_of_the_work() -> None:
    device = CudaDevice()
    x = torch.randn(4096, 4096, device="cuda")
    first = device.mark()
    for _ in range(20):
        x = (x @ x).clamp(-1, 1)
    second, third = device.mark(), device.mark()
    assert third.seconds_since(first) is None, "20 products of matrices are not done yet"
    device.synchronize()
    took_s, gap_s = second.seconds_since(first), third.seconds_since(second)
    assert took_s is not None
    assert gap_s is not None
    assert 0 <= gap_s < took_s
