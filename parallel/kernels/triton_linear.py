"""The product of one row with a matrix in Triton, which is bound by reading the matrix.

Each program has some outputs, and asks for the first piece of their weights before it waits for the kernel that
computes its input (triton_launch.py): weights flow while that one runs. Sums are float32. Shape letters as in base.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from parallel.kernels.triton_launch import launch_options, wait_for_input


def multiply_row(x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """[1, in] -> [1, out]: x W^T + b; rows of the weight are dense."""
    return _launch(x_1I, weight_OI, bias_O, is_gated=False)


def multiply_row_gated(x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """[1, in] -> [1, out / 2]: silu(first half) * second half of what `multiply_row` gives."""
    return _launch(x_1I, weight_OI, bias_O, is_gated=True)


def _launch(x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, is_gated: bool) -> Tensor:
    num_out, num_in = weight_OI.shape
    if is_gated:
        num_out //= 2
    tiles = choose_tiles(num_in, weight_OI.element_size(), is_gated=is_gated)
    out_1O = x_1I.new_empty(1, num_out)
    _multiply_row[triton.cdiv(num_out, tiles.num_out),](
        x_1I,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_1O,
        num_out,
        NUM_IN=num_in,
        TILE_OUT=tiles.num_out,
        TILE_IN=tiles.num_in,
        HAS_BIAS=bias_O is not None,
        IS_GATED=is_gated,
        num_warps=tiles.num_warps,
        **launch_options(x_1I.device),
    )
    return out_1O


class Tiles(NamedTuple):
    """The sizes that a launch is compiled for."""

    num_out: int
    num_in: int
    num_warps: int


def choose_tiles(num_in: int, element_size: int, *, is_gated: bool) -> Tiles:
    """Choose tiles for `num_in` inputs, weights of `element_size` bytes; gated, each output has two rows of weights.

    Measured on an H200 (docs/experiments/gpu-kernels.md).
    """
    size = triton.next_power_of_2(num_in)
    if is_gated and size <= 2048:
        size = min(1024, size)
        return Tiles(max(1, 4096 // (size * element_size)), size, 2)
    if is_gated:
        return Tiles(1, 4096 if size == 4096 else 2048, 4)
    if size > 4096:
        return Tiles(1, 4096, 4)
    size = min(2048, size)
    return Tiles(max(1, 16384 // (size * element_size)), size, 8)


@triton.jit(do_not_specialize=["num_out"])
def _multiply_row(
    x,  # [in]
    weight,  # [out, in]; gated: [2 out, in]
    bias,
    out,  # [out]
    num_out,
    NUM_IN: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """A tile of the outputs."""
    row = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    is_row = row < num_out
    rows = weight + row.to(tl.int64) * NUM_IN
    up_rows = rows + num_out.to(tl.int64) * NUM_IN
    piece = _load_piece(rows, is_row, 0, NUM_IN, TILE_IN)
    if IS_GATED:
        up_piece = _load_piece(up_rows, is_row, 0, NUM_IN, TILE_IN)
    wait_for_input(IS_EARLY)
    total = _times_x(x, piece, 0, NUM_IN, TILE_IN)
    if IS_GATED:
        up_total = _times_x(x, up_piece, 0, NUM_IN, TILE_IN)
    for start in range(TILE_IN, NUM_IN, TILE_IN):
        total += _times_x(x, _load_piece(rows, is_row, start, NUM_IN, TILE_IN), start, NUM_IN, TILE_IN)
        if IS_GATED:
            up_total += _times_x(x, _load_piece(up_rows, is_row, start, NUM_IN, TILE_IN), start, NUM_IN, TILE_IN)
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.sum(up_total, 1)
        if HAS_BIAS:
            up += tl.load(bias + num_out + row, mask=is_row, other=0.0).to(tl.float32)
        gate = result.to(out.dtype.element_ty).to(tl.float32)  # rounded as the product of many rows is
        result = gate * tl.sigmoid(gate) * up.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _load_piece(rows, is_row, start, NUM_IN: tl.constexpr, TILE_IN: tl.constexpr):
    """Load the weights of each row from `start` on."""
    column = start + tl.arange(0, TILE_IN)
    mask = is_row[:, None] & (column < NUM_IN)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _times_x(x, piece, start, NUM_IN: tl.constexpr, TILE_IN: tl.constexpr):
    """A piece of each row times that of x, float32."""
    column = start + tl.arange(0, TILE_IN)
    values = tl.load(x + column, mask=column < NUM_IN, other=0.0)
    return piece.to(tl.float32) * values.to(tl.float32)[None, :]
