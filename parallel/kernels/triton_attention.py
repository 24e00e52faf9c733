"""Attention over the paged cache in Triton: split-KV decode, and prefill of chunks, as one kernel and a merge.

Tuned on an H200 (docs/experiments/gpu-kernels.md). The kernels are in triton_attend.py. Shape letters as in base.py.

A program makes one tile of rows: the queries of TILE_Q neighbouring tokens of one sequence, for all G query heads that
share a key-value head, so that each key is read once for all of them (row = token * GROUP + head):

    decode   one token a sequence; its context is cut into partitions, a program for each, whose results `merge` puts
             together (FlashDecoding, arXiv:2311.01282, section 2)
    prefill  tiles of the sequences' new tokens, each of which walks its whole context (arXiv:2307.08691); where there
             are few tiles, contexts are cut as in a decode

Partitions begin at multiples of their size, which follows from the number of sequences and the longest context of a
step or of its recording (`partition_size`): steps of one size give the same bits, whatever else is in them.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.cuda_buckets import MIN_CONTEXT_BUCKET, chunk_partition_size, num_partitions, partition_size
from parallel.kernels.triton_attend import attend, merge
from parallel.kernels.triton_launch import launch_options

MAX_HEAD_DIM = 256
"""Larger heads do not fit in the shared memory of a multiprocessor."""

_TILE_BYTES = 16384
"""Bytes of one tile of keys, in shared memory: there are two tiles (keys and values), each several times."""
_LARGE_SHARED_BYTES = 160 << 10
"""Shared memory of a program on GPUs of data centers since Ampere. Others since then have 99 KB."""
_MANY_PROGRAMS = 256
"""So many programs of a decode keep a GPU's memory busy though each has little under way."""
_MOST_PROGRAMS = 8192
"""Most programs of a decode: where there are more partitions each program has several. A recorded step has partitions
for the longest context of its bucket; a program that finds none takes about 0.7 us of one of 400 places (computed for
an H100)."""
_MIN_SIZE = 16  # of each side of a product in tensor cores


class Tiles(NamedTuple):
    """The sizes that a launch is compiled for."""

    head: int
    """Dims of a head, filled up."""
    group: int
    """Query heads of a key-value head, filled up."""
    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int
    """Tiles of keys and values that are on their way or being computed with."""


def choose_tiles(
    head_dim: int,
    num_group: int,
    element_size: int,
    *,
    partition: int,
    is_cut: bool,
    num_programs: int,
    has_bias: bool,
    shared_bytes: int,
) -> Tiles:
    """Choose tiles for heads of this size, of which `num_group` share keys and values of `element_size` bytes.

    Args:
        head_dim, num_group, element_size: as said.
        partition: most keys that are read of a partition; 0: a prefill.
        is_cut: contexts of a decode have several partitions. With few keys in each they have one kind of tiles, however
            many programs: recorded steps never have another, so that a larger step would be compiled anew.
        num_programs: sequences of a decode, times key-value heads.
        has_bias: biases of a tile lie in shared memory too.
        shared_bytes: shared memory that a program can have.
    """
    head = max(_MIN_SIZE, triton.next_power_of_2(head_dim))
    group = triton.next_power_of_2(num_group)
    is_prefill, has_room = partition == 0, shared_bytes >= _LARGE_SHARED_BYTES and not has_bias
    num_keys = max(_MIN_SIZE, min(64 if has_bias else 128, _TILE_BYTES // (head * element_size)))
    if is_prefill and element_size == 2:
        rows, num_warps, num_stages = (128, 8, 3) if has_room else (64, 4, 2)
    elif is_prefill:
        rows, num_warps, num_stages = 32, 4, 2
    elif has_bias or group > 2 * _MIN_SIZE:
        rows, num_warps, num_stages = _MIN_SIZE, 4, 2
    elif not is_cut and partition <= MIN_CONTEXT_BUCKET and num_programs >= _MANY_PROGRAMS:
        num_keys = max(_MIN_SIZE, num_keys // 2)
        rows, num_warps, num_stages = _MIN_SIZE, 2, 3
    else:
        rows, num_warps, num_stages = _MIN_SIZE, 4, 4 if has_room and partition > MIN_CONTEXT_BUCKET else 3
    rows = max(rows, group)
    return Tiles(head, group, rows // group, num_keys, num_warps, num_stages)


def triton_attention(q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
    """See `Kernels.attention`; for heads of up to MAX_HEAD_DIM. Nothing waits for the device."""
    call = _Call(q_TNH, cache, meta, params, torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device))
    if meta.num_decodes:
        _decode(call)
    if len(meta.context_lens) > meta.num_decodes:
        _prefill(call)
    return call.out_TNH


class _Call(NamedTuple):
    """What attention is asked for, and where its result goes."""

    q_TNH: Tensor  # noqa: N815
    cache: LayerCache
    meta: AttentionMeta
    params: AttentionParams
    out_TNH: Tensor  # noqa: N815


class _Cut(NamedTuple):
    """How the contexts of a launch are cut."""

    size: int
    """Keys of a partition."""
    num_parts: int
    """The most partitions of a context; 1: results are not merged."""


def _decode(call: _Call) -> None:
    meta, num_seqs, num_kv_heads = call.meta, call.meta.num_decodes, call.cache.k_BPKH.shape[2]
    window = call.params.sliding_window
    size = partition_size(num_seqs, num_kv_heads, meta.max_context_len, window)
    cut = _Cut(size, num_partitions(meta.max_context_len, window, size))
    most_keys = min(size, window or size)
    tiles = _tiles(call, partition=most_keys, is_cut=cut.num_parts > 1, num_programs=num_seqs * num_kv_heads)
    num_programs = min(cut.num_parts, max(1, _MOST_PROGRAMS // (num_seqs * num_kv_heads)))
    _attend(call, (num_seqs, num_kv_heads, num_programs), tiles, cut, is_prefill=False)


def _prefill(call: _Call) -> None:
    meta, num_tokens, num_kv_heads = call.meta, len(call.q_TNH), call.cache.k_BPKH.shape[2]
    tiles = _tiles(call, partition=0, is_cut=False, num_programs=0)
    # each sequence has at most one tile more than its share of the tokens, which in a recorded step may be all of them
    num_tiles = num_tokens // tiles.num_queries + len(meta.context_lens) - meta.num_decodes
    cut = _Cut(0, 1)
    if call.params.sliding_window is None:
        size = chunk_partition_size(num_tokens, tiles.num_queries, num_kv_heads, meta.max_context_len)
        cut = _Cut(size, -(-meta.max_context_len // size)) if size else cut
    _attend(call, (num_tiles, num_kv_heads, cut.num_parts), tiles, cut, is_prefill=True)


def _attend(call: _Call, grid: tuple[int, int, int], tiles: Tiles, cut: _Cut, *, is_prefill: bool) -> None:
    out_TNH, meta, num_parts = call.out_TNH, call.meta, cut.num_parts
    if num_parts == 1:
        _launch(call, grid, tiles, cut, out_TNH, is_prefill=is_prefill)
        return
    num_tokens, (num_heads, head_dim) = len(out_TNH) if is_prefill else meta.num_decodes, out_TNH.shape[1:]
    parts_TNCH = out_TNH.new_empty(num_tokens, num_heads, num_parts, head_dim, dtype=torch.float32)
    sums_TNC = out_TNH.new_empty(num_tokens, num_heads, num_parts, dtype=torch.float32)
    _launch(call, grid, tiles, cut, parts_TNCH, sums_TNC, is_prefill=is_prefill)
    merge[num_tokens, num_heads](
        parts_TNCH,
        sums_TNC,
        out_TNH,
        meta.query_starts,
        meta.context_lens,
        num_parts,
        cut.size,
        call.params.sliding_window or 0,
        meta.num_decodes,
        len(meta.context_lens),
        head_dim,
        HEAD=triton.next_power_of_2(head_dim),
        TILE_PARTS=16 if num_parts <= 16 else 64,
        IS_PREFILL=is_prefill,
        HAS_WINDOW=call.params.sliding_window is not None,
        num_warps=4 if num_parts <= 16 else 8,
        **launch_options(out_TNH.device),
    )


def _tiles(call: _Call, *, partition: int, is_cut: bool, num_programs: int) -> Tiles:
    num_heads, head_dim = call.q_TNH.shape[1:]
    return choose_tiles(
        head_dim,
        num_heads // call.cache.k_BPKH.shape[2],
        call.q_TNH.element_size(),
        partition=partition,
        is_cut=is_cut,
        num_programs=num_programs,
        has_bias=call.params.key_bias_NP is not None,
        shared_bytes=_shared_bytes(call.q_TNH.device),
    )


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program can have, as far as torch tells."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def _launch(
    call: _Call,
    grid: tuple[int, int, int],
    tiles: Tiles,
    cut: _Cut,
    out: Tensor,
    sums: Tensor | None = None,
    *,
    is_prefill: bool,
) -> None:
    """Run `attend`; with sums it leaves partitions to be merged."""
    q_TNH, cache, meta, params = call[:4]
    num_heads, head_dim = q_TNH.shape[1:]
    block_size, num_kv_heads = cache.k_BPKH.shape[1:3]
    bias, sinks = params.key_bias_NP, params.sinks_N
    none: Any = q_TNH  # a pointer that is not followed
    attend[grid](
        q_TNH,
        cache.k_BPKH,
        cache.v_BPKH,
        out,
        none if sums is None else sums,
        meta.query_starts,
        meta.context_lens,
        meta.block_tables,
        none if bias is None else bias,
        none if sinks is None else sinks,
        params.scale,
        params.soft_cap or 0.0,
        params.sliding_window or 0,
        cut.size,
        cut.num_parts,
        meta.num_decodes,
        len(meta.context_lens),
        num_heads,
        num_heads // num_kv_heads,
        *q_TNH.stride()[:2],
        *cache.k_BPKH.stride()[1:3],
        meta.block_tables.stride(0),
        0 if bias is None else bias.stride(0),
        0 if bias is None else bias.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HEAD=tiles.head,
        GROUP=tiles.group,
        TILE_Q=tiles.num_queries,
        TILE_KEYS=tiles.num_keys,
        IS_PREFILL=is_prefill,
        IS_PARTIAL=sums is not None,
        HAS_WINDOW=params.sliding_window is not None,
        HAS_CAP=params.soft_cap is not None,
        HAS_BIAS=bias is not None,
        IS_BY_DISTANCE=params.is_bias_by_distance,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(out.device),
    )
