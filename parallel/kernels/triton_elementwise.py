"""The operations between the matrix products in Triton, one launch each: norm, rotation, cache write, SiLU-mul.

Arithmetic is float32. Shape letters as in base.py. Each mirrors the operation of `Kernels` of its name.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel.kernels.base import LayerCache
from parallel.kernels.triton_launch import launch_options, wait_for_input

_TILE = 1024


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of [T, E], or of [T, N, H] with a weight [H] or [N, H]."""
    return _norm(x_TE, None, weight_E, eps)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual is written in place."""
    return _norm(x_TE, residual_TE, weight_E, eps), residual_TE


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(first half) * second half."""
    num_tokens, size = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    out_TI = gate_up_T2I.new_empty(num_tokens, size)
    if num_tokens:
        _silu_mul[num_tokens, triton.cdiv(size, _TILE)](
            gate_up_T2I, out_TI, gate_up_T2I.stride(0), size, TILE=_TILE, **launch_options(out_TI.device)
        )
    return out_TI


def rotary(
    q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, is_interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in place, by one launch."""
    num_heads, num_kv_heads, half = q_TNH.shape[1], k_TKH.shape[1], cos_TR.shape[-1]
    heads = min(16, triton.next_power_of_2(num_heads))
    num_q_tiles = triton.cdiv(num_heads, heads)
    if len(q_TNH):
        _rotary[len(q_TNH), num_q_tiles + triton.cdiv(num_kv_heads, heads)](
            q_TNH,
            k_TKH,
            cos_TR,
            sin_TR,
            *q_TNH.stride()[:2],
            *k_TKH.stride()[:2],
            cos_TR.stride(0),
            sin_TR.stride(0),
            num_heads,
            num_kv_heads,
            num_q_tiles,
            half,
            HEADS=heads,
            TILE=triton.next_power_of_2(half),
            IS_INTERLEAVED=is_interleaved,
            **launch_options(q_TNH.device),
        )
    return q_TNH, k_TKH


def write_cache(k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
    """A token whose slot is negative is written nowhere: such fill up the steps of a recorded graph."""
    num_tokens, num_heads, head_dim = k_TKH.shape
    if num_tokens:
        _write_cache[num_tokens, triton.cdiv(num_heads * head_dim, _TILE)](
            k_TKH,
            v_TKH,
            cache.k_BPKH,
            cache.v_BPKH,
            slot_mapping_T,
            *k_TKH.stride()[:2],
            *v_TKH.stride()[:2],
            *cache.k_BPKH.stride()[:3],
            *cache.v_BPKH.stride()[:3],
            num_heads * head_dim,
            head_dim,
            BLOCK_SIZE=cache.k_BPKH.shape[1],
            TILE=_TILE,
            **launch_options(k_TKH.device),
        )


def rotate_and_write(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    cache: LayerCache,
    slot_mapping_T: Tensor,
    *,
    is_interleaved: bool,
) -> Tensor:
    """The queries in place, keys and values into the cache, by one launch. As in `write_cache` for negative slots."""
    num_heads, (num_kv_heads, head_dim), half = q_TNH.shape[1], k_TKH.shape[1:], cos_TR.shape[-1]
    heads = min(16, triton.next_power_of_2(num_heads))
    num_q_tiles = triton.cdiv(num_heads, heads)
    if len(q_TNH):
        _rotate_and_write[len(q_TNH), num_q_tiles + triton.cdiv(num_kv_heads, heads)](
            q_TNH,
            k_TKH,
            v_TKH,
            cos_TR,
            sin_TR,
            cache.k_BPKH,
            cache.v_BPKH,
            slot_mapping_T,
            *q_TNH.stride()[:2],
            *k_TKH.stride()[:2],
            *v_TKH.stride()[:2],
            cos_TR.stride(0),
            sin_TR.stride(0),
            *cache.k_BPKH.stride()[:3],
            *cache.v_BPKH.stride()[:3],
            num_heads,
            num_kv_heads,
            num_q_tiles,
            half,
            head_dim,
            BLOCK_SIZE=cache.k_BPKH.shape[1],
            HEADS=heads,
            TILE=triton.next_power_of_2(half),
            HEAD=triton.next_power_of_2(head_dim),
            IS_INTERLEAVED=is_interleaved,
            HAS_REST=2 * half < head_dim,
            **launch_options(q_TNH.device),
        )
    return q_TNH


def _norm(x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, eps: float) -> Tensor:
    size = x_TE.shape[-1]
    num_heads = x_TE.shape[1] if x_TE.dim() == 3 else 1
    tile = triton.next_power_of_2(size)
    out = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    num_rows = x_TE.shape[0] * num_heads
    if num_rows:
        _rms_norm[num_rows,](
            x_TE,
            x_TE if residual_TE is None else residual_TE,
            weight_E,
            out,
            eps,
            x_TE.stride(0),
            x_TE.stride(1) if x_TE.dim() == 3 else 0,
            0 if residual_TE is None else residual_TE.stride(0),
            weight_E.stride(0) if weight_E.dim() == 2 else 0,
            num_heads,
            size,
            TILE=tile,
            HAS_RESIDUAL=residual_TE is not None,
            num_warps=min(16, max(1, tile // 512)),
            **launch_options(x_TE.device),
        )
    return out


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    eps,
    x_stride,
    x_head_stride,
    residual_stride,
    weight_stride,
    num_heads,
    size,
    TILE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One row: a token, or a head of one. Nobody writes the weight, which is read before the wait."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    column = tl.arange(0, TILE)
    is_column = column < size
    factors = tl.load(weight + head * weight_stride + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_input(IS_EARLY)
    values = tl.load(x + token * x_stride + head * x_head_stride + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + token * residual_stride + column
        values += tl.load(place, mask=is_column, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)  # the sum is rounded before it is normed
        tl.store(place, rounded, mask=is_column)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    tl.store(out + row * size + column, (values * scale * factors).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _silu_mul(gate_up, out, stride, size, TILE: tl.constexpr, IS_EARLY: tl.constexpr):
    """A tile of one row."""
    wait_for_input(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < size
    gate = tl.load(gate_up + row * stride + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _rotary(
    q,
    k,
    cos,
    sin,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    cos_stride,
    sin_stride,
    num_heads,
    num_kv_heads,
    num_q_tiles,
    half,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Some heads of one token: the first tiles are of queries, the others of keys."""
    wait_for_input(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos += token * cos_stride
    sin += token * sin_stride
    if tile < num_q_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        rows = q + token * q_stride + head * q_head_stride
        _turn(rows, rows, head < num_heads, cos, sin, half, TILE, IS_INTERLEAVED)
    else:
        head = (tile - num_q_tiles) * HEADS + tl.arange(0, HEADS)
        rows = k + token * k_stride + head * k_head_stride
        _turn(rows, rows, head < num_kv_heads, cos, sin, half, TILE, IS_INTERLEAVED)


@triton.jit
def _rotate_and_write(
    q,
    k,
    v,
    cos,
    sin,
    keys,
    values,
    slot_mapping,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    cos_stride,
    sin_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    num_heads,
    num_kv_heads,
    num_q_tiles,
    half,
    head_dim,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_REST: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Some heads of one token: the first tiles are of queries, the others of keys and values."""
    wait_for_input(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos += token * cos_stride
    sin += token * sin_stride
    if tile < num_q_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        rows = q + token * q_stride + head * q_head_stride
        _turn(rows, rows, head < num_heads, cos, sin, half, TILE, IS_INTERLEAVED)
    else:
        head = (tile - num_q_tiles) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slot_mapping + token)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        is_row = head < tl.where(slot >= 0, num_kv_heads, 0)
        dim = tl.arange(0, HEAD)
        rows = k + token * k_stride + head * k_head_stride
        to = keys + block * key_block_stride + offset * key_slot_stride + head * key_head_stride
        _turn(rows, to, is_row, cos, sin, half, TILE, IS_INTERLEAVED)
        if HAS_REST:
            _copy(rows, to, is_row, dim, (dim >= 2 * half) & (dim < head_dim))
        rows = v + token * v_stride + head * v_head_stride
        to = values + block * value_block_stride + offset * value_slot_stride + head * value_head_stride
        _copy(rows, to, is_row, dim, dim < head_dim)


@triton.jit
def _turn(rows, to, is_row, cos, sin, half, TILE: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """The pairs of these heads, by the angles of their token."""
    pair = tl.arange(0, TILE)
    is_pair = pair < half
    cos_row = tl.load(cos + pair, mask=is_pair, other=0.0)[None, :]
    sin_row = tl.load(sin + pair, mask=is_pair, other=0.0)[None, :]
    first = pair[None, :]
    second = first + half
    if IS_INTERLEAVED:
        first = 2 * pair[None, :]
        second = first + 1
    mask = is_row[:, None] & is_pair[None, :]
    x1 = tl.load(rows[:, None] + first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(rows[:, None] + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(to[:, None] + first, (x1 * cos_row - x2 * sin_row).to(to.dtype.element_ty), mask=mask)
    tl.store(to[:, None] + second, (x2 * cos_row + x1 * sin_row).to(to.dtype.element_ty), mask=mask)


@triton.jit
def _copy(rows, to, is_row, dim, is_dim):
    """Copy these dims of these heads."""
    mask = is_row[:, None] & is_dim[None, :]
    tl.store(to[:, None] + dim[None, :], tl.load(rows[:, None] + dim[None, :], mask=mask, other=0.0), mask=mask)


@triton.jit
def _write_cache(
    k,
    v,
    keys,
    values,
    slot_mapping,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    size,
    head_dim,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """A tile of all heads of one token, key and value."""
    wait_for_input(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head, dim = element // head_dim, element % head_dim
    mask = element < tl.where(slot >= 0, size, 0)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    key = tl.load(k + token * k_stride + head * k_head_stride + dim, mask=mask, other=0.0)
    tl.store(keys + block * key_block_stride + offset * key_slot_stride + head * key_head_stride + dim, key, mask=mask)
    value = tl.load(v + token * v_stride + head * v_head_stride + dim, mask=mask, other=0.0)
    place = values + block * value_block_stride + offset * value_slot_stride + head * value_head_stride + dim
    tl.store(place, value, mask=mask)
