"""Packed weights mean what those who packed them meant."""

import pytest
import torch
from torch import Tensor

from parallel.quantization.fp8 import Fp8TilePacking
from parallel.quantization.mxfp4 import Mxfp4Packing, unpack


def _random_blocks(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(120, 135, shape, dtype=torch.uint8, generator=generator)


def test_mxfp4_equals_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = _random_blocks(2, 6, 3)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(unpack(blocks, scales), expected.transpose(1, 2))


def test_mxfp4_numbers_by_hand() -> None:
    block = torch.zeros(1, 16, dtype=torch.uint8)
    block[0, :3] = torch.tensor([0x21, 0xF7, 0x80], dtype=torch.uint8)
    numbers = unpack(block, torch.tensor([128], dtype=torch.uint8))
    assert numbers.shape == (32,)
    assert numbers[:6].tolist() == [1.0, 2.0, 12.0, -12.0, 0.0, 0.0]
    assert unpack(block, torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert unpack(block, torch.tensor([0], dtype=torch.uint8))[0] == 2.0**-128


@pytest.mark.parametrize("columns", [range(96), range(32, 64), range(40, 90), range(5, 6)])
def test_mxfp4_reads_any_part(columns: range) -> None:
    blocks, scales = _random_blocks(6, 3)
    part = Mxfp4Packing().read(blocks, scales, range(2, 5), columns)
    assert torch.equal(part, unpack(blocks, scales)[2:5, columns.start : columns.stop])


@pytest.mark.parametrize(
    ("rows", "columns"), [(range(300), range(200)), (range(100, 260), range(130, 200)), (range(129, 130), range(1))]
)
def test_fp8_tiles_are_scaled(rows: range, columns: range) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator)
    expected = values.float()
    for i in range(3):
        for j in range(2):
            expected[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scales[i, j]
    part = Fp8TilePacking().read(values, scales, rows, columns)
    assert torch.equal(part, expected[rows.start : rows.stop, columns.start : columns.stop])
