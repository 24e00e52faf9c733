"""Caches of more than 2**31 elements, of which only the pages of a few sequences are ever touched."""

import mmap
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from helpers.paged_layout import make_layout
from parallel.kernels.base import AttentionMeta, AttentionParams, CacheEntry, LayerCache

BLOCK_SIZE = 16
_ONLY_ADDRESSES = 0x4000  # MAP_NORESERVE on Linux

WriteCache = Callable[[Tensor, Tensor, LayerCache, Tensor], None]
Attend = Callable[[Tensor, LayerCache, AttentionMeta, AttentionParams], Tensor]


def check_past_32_bits(write_cache: WriteCache, attend: Attend, dtype: torch.dtype, entry: CacheEntry) -> None:
    """Attention over the last blocks of a cache of more than 2**31 elements gives the bits that a small cache gives."""
    spans = [(1, 300), (1, 33), (9, 60), (40, 40)]
    layout = make_layout(
        spans, num_kv_heads=entry.num_heads, head_dim=entry.head_dim, block_size=BLOCK_SIZE, dtype=dtype
    )
    num_blocks = len(layout.cache.k_BPKH)
    q_TNH = torch.randn(layout.meta.query_starts_host[-1], 2 * entry.num_heads, entry.head_dim).to(dtype)
    more = 2**31 // (BLOCK_SIZE * entry.num_heads * entry.head_dim)
    outputs = []
    for offset in (0, more):
        memory = _addresses((num_blocks + offset) * BLOCK_SIZE * entry.num_elements, entry.dtype)
        cache = entry.lay_out(memory, BLOCK_SIZE)
        meta = replace(
            layout.meta,
            block_tables=layout.meta.block_tables + offset,
            slot_mapping=layout.meta.slot_mapping + offset * BLOCK_SIZE,
            context_lens_host=[*layout.meta.context_lens_host],
        )
        for keys, values, table in zip(layout.keys, layout.values, meta.block_tables, strict=True):
            position = torch.arange(len(keys))
            slots = table[position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
            write_cache(keys, keys if entry.is_key_value else values, cache, slots)
        outputs.append(attend(q_TNH, cache, meta, AttentionParams(scale=0.1)))
    assert torch.equal(*outputs)


def _addresses(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros, for which there is memory only where they are written."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _ONLY_ADDRESSES
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize, flags=kind), dtype=dtype)
