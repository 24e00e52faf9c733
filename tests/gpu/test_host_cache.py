"""Blocks come back from pinned memory bit for bit while the model's stream goes on writing."""

import pytest
import torch

from workers.host_cache import make_host_cache

pytestmark = pytest.mark.gpu


@torch.inference_mode()
def test_blocks_come_back_bit_for_bit() -> None:
    num_blocks, num_slots = 300, 400
    rows = torch.randn(48, num_blocks, 4096, device="cuda").to(torch.bfloat16)
    host = make_host_cache(rows, num_slots=num_slots)
    before = rows.clone()
    for _ in range(20):  # more than the buffers hold
        order = torch.randperm(num_blocks).tolist()
        slots = torch.randperm(num_slots)[:num_blocks].tolist()
        host.copy(list(zip(order, slots, strict=True)), [])
        rows.zero_()  # queued behind the saves
        host.copy([], list(zip(slots, order, strict=True)))
    torch.cuda.synchronize()
    assert torch.equal(rows, before)
