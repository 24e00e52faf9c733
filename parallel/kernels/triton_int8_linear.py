"""Linear layers in 8 bits in Triton, to the bit what int8_linear.py says. Not tuned.

Rows are quantized by one launch and multiplied by another, which scales its sums before it writes them. Shape letters
as in base.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel.kernels.triton_launch import launch_options, wait_for_input

_EXACT = {"enable_fp_fusion": False}
"""Options that round a product before anything is added to it, as torch does."""
_TILE = 1024


class Tiles(NamedTuple):
    """The sizes that a product is compiled for."""

    num_rows: int
    num_out: int
    num_in: int
    num_stages: int


def choose_tiles(num_rows: int, *, is_gated: bool) -> Tiles:
    """Choose tiles for `num_rows`: few are bound by reading the weight, of which several pieces are under way then."""
    if num_rows <= 16:
        return Tiles(16, 16, 256 if is_gated else 512, 4)
    return Tiles(64, 64, 128, 3) if is_gated else Tiles(64, 32, 256, 4)


def quantize_rows(x_TI: Tensor, *, num_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """(int8 [T, in], float32 scales [T]) as the reference's, but of more rows in all, whose numbers mean nothing."""
    num_tokens, num_in = x_TI.shape
    integers_TI = x_TI.new_empty(num_rows or num_tokens, num_in, dtype=torch.int8)
    scales_T = x_TI.new_empty(num_tokens, dtype=torch.float32)
    tile = triton.next_power_of_2(num_in)
    if num_tokens:
        _quantize[num_tokens,](
            x_TI,
            integers_TI,
            scales_T,
            x_TI.stride(0),
            num_in,
            TILE=tile,
            num_warps=min(16, max(1, tile // 512)),
            **_EXACT,
            **launch_options(x_TI.device),
        )
    return integers_TI, scales_T


def multiply_int8(
    integers_TI: Tensor,
    scales_T: Tensor,
    weight_OI: Tensor,
    weight_scales_O: Tensor,
    bias_O: Tensor | None,
    *,
    dtype: torch.dtype,
    is_gated: bool = False,
) -> Tensor:
    """[T, out] of this dtype; gated, [T, out / 2]: silu(first half) * second half of that."""
    (num_rows, num_in), num_out = integers_TI.shape, len(weight_OI) // (2 if is_gated else 1)
    out_TO = weight_scales_O.new_empty(num_rows, num_out, dtype=dtype)
    tiles = choose_tiles(num_rows, is_gated=is_gated)
    if num_rows:
        _multiply[triton.cdiv(num_out, tiles.num_out), triton.cdiv(num_rows, tiles.num_rows)](
            integers_TI,
            scales_T,
            weight_OI,
            weight_scales_O,
            weight_scales_O if bias_O is None else bias_O,
            out_TO,
            num_rows,
            num_out,
            NUM_IN=num_in,
            TILE_ROWS=tiles.num_rows,
            TILE_OUT=tiles.num_out,
            TILE_IN=tiles.num_in,
            HAS_BIAS=bias_O is not None,
            IS_GATED=is_gated,
            num_stages=tiles.num_stages,
            **_EXACT,
            **launch_options(integers_TI.device),
        )
    return out_TO


def scale_sums(
    sums_TO: Tensor, scales_T: Tensor, weight_scales_O: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    """[T, out] of this dtype from integer sums, which may have more rows."""
    num_rows, num_out = len(scales_T), sums_TO.shape[1]
    out_TO = sums_TO.new_empty(num_rows, num_out, dtype=dtype)
    if num_rows:
        _scale[num_rows, triton.cdiv(num_out, _TILE)](
            sums_TO,
            scales_T,
            weight_scales_O,
            weight_scales_O if bias_O is None else bias_O,
            out_TO,
            num_out,
            TILE=_TILE,
            HAS_BIAS=bias_O is not None,
            **_EXACT,
            **launch_options(sums_TO.device),
        )
    return out_TO


@triton.jit
def _quantize(x, integers, scales, x_stride, num_in, TILE: tl.constexpr, IS_EARLY: tl.constexpr):
    """Quantize one row."""
    wait_for_input(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    is_column = column < num_in
    values = tl.load(x + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(values), 0), 7.888609052210118e-31)  # 2 ** -100
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0
    most = tl.where(has_nan, float("nan"), most)
    scaled = values * (tl.div_rn(1.0, most) * 127.0)
    nearest = (scaled + 12582912.0) - 12582912.0  # of 1.5 * 2 ** 23 the last bit is one: ties go to even
    tl.store(integers + row * num_in + column, nearest.to(tl.int8), mask=is_column)
    tl.store(scales + row, tl.div_rn(most, 127.0))


@triton.jit(do_not_specialize=["num_rows", "num_out"])
def _multiply(
    x,  # int8 [T, in]
    scales,  # float32 [T]
    weight,  # int8 [out, in]; gated: [2 out, in]
    weight_scales,
    bias,
    out,  # [T, out]
    num_rows,
    num_out,
    NUM_IN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """A tile of the result."""
    wait_for_input(IS_EARLY)
    column = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row, is_column = row < num_rows, column < num_out
    rows = x + row.to(tl.int64)[:, None] * NUM_IN
    columns = weight + column.to(tl.int64)[None, :] * NUM_IN
    up_columns = columns + num_out.to(tl.int64) * NUM_IN
    total = tl.zeros((TILE_ROWS, TILE_OUT), tl.int32)
    up_total = tl.zeros((TILE_ROWS, TILE_OUT), tl.int32)
    for start in range(0, NUM_IN, TILE_IN):
        inner = start + tl.arange(0, TILE_IN)
        is_inner = inner < NUM_IN
        mask = is_inner[:, None] & is_column[None, :]
        x_tile = tl.load(rows + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0)
        total = tl.dot(x_tile, tl.load(columns + inner[:, None], mask=mask, other=0), total, out_dtype=tl.int32)
        if IS_GATED:
            up_tile = tl.load(up_columns + inner[:, None], mask=mask, other=0)
            up_total = tl.dot(x_tile, up_tile, up_total, out_dtype=tl.int32)
    row_scales = tl.load(scales + row, mask=is_row, other=0.0)[:, None]
    result = _scaled(total, row_scales, weight_scales, bias, column, is_column, HAS_BIAS).to(out.dtype.element_ty)
    if IS_GATED:
        gate = result.to(tl.float32)
        up = _scaled(up_total, row_scales, weight_scales, bias, num_out + column, is_column, HAS_BIAS)
        result = gate * tl.sigmoid(gate) * up.to(out.dtype.element_ty).to(tl.float32)
    place = out + row.to(tl.int64)[:, None] * num_out + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _scale(
    sums, scales, weight_scales, bias, out, num_out, TILE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EARLY: tl.constexpr
):
    """A tile of one row."""
    wait_for_input(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < num_out
    total = tl.load(sums + row * num_out + column, mask=is_column, other=0)[None, :]
    row_scales = tl.load(scales + row + tl.zeros((1, 1), tl.int32))
    result = _scaled(total, row_scales, weight_scales, bias, column, is_column, HAS_BIAS)
    place = out + row * num_out + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_column[None, :])


@triton.jit
def _scaled(total, row_scales, weight_scales, bias, column, is_column, HAS_BIAS: tl.constexpr):
    """Sums [rows, columns] times the scales [rows, 1] and those of the columns, and the bias, in float32."""
    result = total.to(tl.float32) * row_scales
    result *= tl.load(weight_scales + column, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return result
