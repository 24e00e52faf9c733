"""MXFP4, as gpt-oss stores its experts: blocks of 32 numbers of 4 bits with one scale, a power of two.

A row of the matrix is [blocks, 16] bytes, the earlier number of each pair in the low half, and [blocks] scales. Numbers
are sign, two bits of exponent, one of mantissa (E2M1); scales are an exponent, biased by 127 (E8M0). OCP Microscaling
Formats (MX) 1.0, sections 5.3.3 and 5.4.1.
"""

import torch
from torch import Tensor

from parallel.quantization.packing import Slice, Stored

BLOCK_SIZE = 32

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])
_PAIRS = torch.stack([_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)], dim=-1)
"""[256, 2]: the two numbers in each byte."""
_SCALES = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
_SCALES[255] = torch.nan
"""What each scale stands for; the last one is no number."""


class Mxfp4Packing:
    """Beside `name`: `name`_blocks and `name`_scales."""

    def stored(self, name: str, shape: tuple[int, int]) -> tuple[Stored, Stored]:
        """See `Packing`. The last block of a row is whole whatever the number of columns."""
        num_rows, num_columns = shape
        num_blocks = -(-num_columns // BLOCK_SIZE)
        return (
            Stored(f"{name}_blocks", (num_rows, num_blocks, BLOCK_SIZE // 2), ("U8",)),
            Stored(f"{name}_scales", (num_rows, num_blocks), ("U8",)),
        )

    def read(self, values: Slice, scales: Slice, rows: range, columns: range) -> Tensor:
        """See `Packing`. Reads whole blocks."""
        first, last = columns.start // BLOCK_SIZE, -(-columns.stop // BLOCK_SIZE)
        index = slice(rows.start, rows.stop), slice(first, last)
        offset = columns.start - first * BLOCK_SIZE
        return unpack(values[index], scales[index])[:, offset : offset + len(columns)]


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., G, 16] and [..., G] -> float32 [..., 32 G]."""
    pairs = _PAIRS[blocks.int()].flatten(-2)
    return pairs.mul_(_SCALES[scales.int()].unsqueeze(-1)).flatten(-2)
