"""A grouped matrix product in Triton, for GPUs and dtypes for which torch has none that stays on the device.

Its tiles are not tuned on such a GPU.

A program makes one tile of the result. Tiles never span two experts: expert x has ceil(rows / tile rows) of them, so
that there are at most ceil(R / tile rows) + X, whatever was chosen; those past the last end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_IN = 32


def triton_grouped_linear(x_RI: Tensor, weight_XOI: Tensor, ends_X: Tensor) -> Tensor:
    """A `GroupedLinear`; the sums are made in float32."""
    num_rows, num_in = x_RI.shape
    num_experts, num_out, _ = weight_XOI.shape
    tile_rows, tile_out = (16 if num_rows <= 16 * num_experts else 64), 64
    starts_X = torch.cat([ends_X.new_zeros(1), ends_X[:-1]])
    tile_ends_X = ((ends_X - starts_X + tile_rows - 1) // tile_rows).cumsum(0)
    out_RO = x_RI.new_empty(num_rows, num_out)
    grid = (triton.cdiv(num_rows, tile_rows) + num_experts, triton.cdiv(num_out, tile_out))
    _multiply[grid](
        x_RI.contiguous(),
        weight_XOI,
        out_RO,
        starts_X,
        ends_X,
        tile_ends_X,
        num_experts,
        num_in,
        num_out,
        TILE_ROWS=tile_rows,
        TILE_OUT=tile_out,
        TILE_IN=_TILE_IN,
        EXPERTS=triton.next_power_of_2(num_experts),
    )
    return out_RO


@triton.jit
def _multiply(
    x,
    weight,
    out,
    starts,
    ends,
    tile_ends,
    num_experts,
    num_in,
    num_out,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    tile = tl.program_id(0)
    all_experts = tl.arange(0, EXPERTS)
    all_tile_ends = tl.load(tile_ends + all_experts, mask=all_experts < num_experts, other=2**31 - 1)
    expert = tl.sum((all_tile_ends <= tile).to(tl.int32), axis=0)
    if expert < num_experts:
        end = tl.load(ends + expert)
        first_tile = tl.load(tile_ends + expert - 1, mask=expert > 0, other=0)
        rows = tl.load(starts + expert) + (tile - first_tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        columns = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
        is_row, is_column = (rows < end)[:, None], (columns < num_out)[None, :]
        weight += expert.to(tl.int64) * num_out * num_in
        total = tl.zeros((TILE_ROWS, TILE_OUT), dtype=tl.float32)
        for start in range(0, num_in, TILE_IN):
            inner = start + tl.arange(0, TILE_IN)
            is_inner = inner < num_in
            x_tile = tl.load(
                x + rows.to(tl.int64)[:, None] * num_in + inner[None, :], mask=is_row & is_inner[None, :], other=0.0
            )
            weight_tile = tl.load(
                weight + columns[None, :] * num_in + inner[:, None], mask=is_column & is_inner[:, None], other=0.0
            )
            total = tl.dot(x_tile, weight_tile, total, input_precision="ieee")
        tl.store(
            out + rows.to(tl.int64)[:, None] * num_out + columns[None, :],
            total.to(out.dtype.element_ty),
            mask=is_row & is_column,
        )
