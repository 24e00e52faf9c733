"""Random paged caches: sequences of given lengths in scattered blocks, and the same keys and values densely."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.kernels.base import AttentionMeta, LayerCache


@dataclass(frozen=True, kw_only=True)
class PagedLayout:
    """A step over a paged cache, and what is in it."""

    meta: AttentionMeta
    cache: LayerCache
    """Slots that belong to no token hold NaN: reading one spoils the result."""
    keys: list[Tensor]
    """[context, K, H] of each sequence."""
    values: list[Tensor]


def make_meta(spans: Sequence[tuple[int, int]], *, block_size: int, num_blocks: int, seed: int = 0) -> AttentionMeta:
    """A step of sequences of (query, context) lengths, those of one query first, in shuffled blocks except block 0."""
    generator = torch.Generator().manual_seed(seed)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = [[free.pop() for _ in range(-(-context // block_size))] for _, context in spans]
    width = max(map(len, tables))
    starts, slots = [0], []
    for (query, context), table in zip(spans, tables, strict=True):
        starts.append(starts[-1] + query)
        slots += [table[i // block_size] * block_size + i % block_size for i in range(context - query, context)]
    return AttentionMeta(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in spans], dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        num_decodes=sum(query == 1 for query, _ in spans),
        max_query_len=max(query for query, _ in spans),
        max_context_len=max(context for _, context in spans),
        query_starts_host=starts,
        context_lens_host=[context for _, context in spans],
    )


def make_layout(
    spans: Sequence[tuple[int, int]],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedLayout:
    """As `make_meta`, with every token's key and value in the cache."""
    spans = sorted(spans, key=lambda span: span[0] != 1)
    num_blocks = sum(-(-context // block_size) for _, context in spans) + 2
    meta = make_meta(spans, block_size=block_size, num_blocks=num_blocks, seed=seed)
    unused = torch.full((num_blocks, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    cache = LayerCache(unused.clone(), unused.clone())
    generator = torch.Generator().manual_seed(seed + 1)
    keys, values = [], []
    for table, (_, context) in zip(meta.block_tables.tolist(), spans, strict=True):
        keys.append(torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype))
        values.append(torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype))
        slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(context)])
        cache.k_BPKH.flatten(0, 1)[slots] = keys[-1]
        cache.v_BPKH.flatten(0, 1)[slots] = values[-1]
    return PagedLayout(meta=meta, cache=cache, keys=keys, values=values)


def meta_of_one(meta: AttentionMeta, row: int) -> AttentionMeta:
    """A step of this sequence alone."""
    context = meta.context_lens_host[row]
    start, stop = meta.query_starts_host[row : row + 2]
    return AttentionMeta(
        query_starts=torch.tensor([0, stop - start], dtype=torch.int32),
        context_lens=meta.context_lens[row : row + 1],
        block_tables=meta.block_tables[row : row + 1],
        slot_mapping=meta.slot_mapping[start:stop],
        num_decodes=int(stop - start == 1),
        max_query_len=stop - start,
        max_context_len=context,
        query_starts_host=[0, stop - start],
        context_lens_host=[context],
    )


def without_unseen_blocks(meta: AttentionMeta, window: int, *, block_size: int) -> AttentionMeta:
    """The same step for a group of layers with a window: entries out of sight lead to block 0, which holds NaN."""
    tables = meta.block_tables.clone()
    starts, contexts = meta.query_starts_host, meta.context_lens_host
    for row, context in enumerate(contexts):
        first_query = context - (starts[row + 1] - starts[row])
        tables[row, : max(0, first_query - window + 1) // block_size] = 0
    return replace(meta, block_tables=tables)
