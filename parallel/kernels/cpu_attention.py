"""Paged attention on a CPU in plain torch: gather each sequence's keys and values, then call torch's blocked kernel.

What a step's sequences look like is planned once and shared by its layers; nothing here knows linear layers or norms.

Decodes are sorted by length and put into groups of about the same length, small enough that what is gathered is still
in the core's cache when it is read. The query heads that share a key-value head become rows of one product, so each
key and value is read once. Keys are gathered token by token, so nothing past the context is ever touched.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache

_GROUP_BYTES = 1 << 20
"""Keys and values gathered at once for a group of decodes: about half of a core's second-level cache."""
_MAX_PADDING = 1.25
"""Padded tokens of a group over its real ones."""
_QUERY_ROWS = 256
"""Query rows of a chunk that are masked together; rows further down see more keys."""


@dataclass(slots=True)
class _Group:
    """Decodes of about the same length, `start : stop` in sorted order."""

    start: int
    stop: int
    slots: Tensor
    """[(stop - start) * length] int64."""
    length: int
    mask: Tensor | None
    """[stop - start, 1, 1, length], 0 or -inf; None: all have this very length."""


@dataclass(slots=True)
class _QueryBlock:
    """Rows of one sequence's chunk, and the keys that they see."""

    start: int
    stop: int
    first_key: int
    """Of the gathered ones."""
    last_key: int
    mask: Tensor | None
    """[rows, keys], 0 or -inf; None: row i sees keys 0 .. i."""


@dataclass(slots=True)
class _Chunk:
    """More than one query token of one sequence."""

    slots: Tensor
    """[keys] int64."""
    blocks: list[_QueryBlock]


@dataclass(slots=True)
class _Plan:
    """How the attention of one step is computed, for one sliding window."""

    order: Tensor | None
    """[num_decodes] int64, the decodes from short to long; None: they already are."""
    groups: list[_Group]
    chunks: list[_Chunk]


class CpuPagedAttention:
    """Computes `Kernels.attention` without a soft cap. Holds the plan of the step in progress: one thread only."""

    def __init__(self) -> None:
        self._meta: AttentionMeta | None = None
        self._plans: dict[tuple[int | None, torch.dtype, torch.Size], _Plan] = {}
        self._workspaces: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def __call__(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`."""
        if params.soft_cap is not None:
            raise ValueError(f"soft_cap is {params.soft_cap}; this kernel allows: None")
        plan = self._plan(q_TNH.dtype, cache, meta, params.sliding_window)
        if not plan.chunks and len(plan.groups) == 1 and plan.order is None:
            return self._attend_group(q_TNH, cache, plan.groups[0], params.scale).reshape(q_TNH.shape)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        if plan.groups:
            self._attend_decodes(q_TNH, out_TNH, cache, plan, params.scale)
        for chunk in plan.chunks:
            self._attend_chunk(q_TNH, out_TNH, cache, chunk, params.scale)
        return out_TNH

    def _attend_decodes(self, q_TNH: Tensor, out_TNH: Tensor, cache: LayerCache, plan: _Plan, scale: float) -> None:
        sorted_q = q_TNH if plan.order is None else q_TNH.index_select(0, plan.order)
        sorted_out = out_TNH if plan.order is None else torch.empty_like(sorted_q)
        num_kv_heads = cache.k_BPKH.shape[2]
        for group in plan.groups:
            result = self._attend_group(sorted_q[group.start : group.stop], cache, group, scale)
            sorted_out[group.start : group.stop].unflatten(1, (num_kv_heads, -1)).copy_(result)
        if plan.order is not None:
            out_TNH.index_copy_(0, plan.order, sorted_out)

    def _attend_group(self, q_SNH: Tensor, cache: LayerCache, group: _Group, scale: float) -> Tensor:
        """[S, N, H] -> [S, K, N // K, H]."""
        num_sequences, num_heads, head_dim = q_SNH.shape
        num_kv_heads = cache.k_BPKH.shape[2]
        keys, values = self._gather(cache, group.slots)
        shape = (num_sequences, group.length, num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(
            q_SNH.view(num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim),
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
        )

    def _attend_chunk(self, q_TNH: Tensor, out_TNH: Tensor, cache: LayerCache, chunk: _Chunk, scale: float) -> None:
        keys_LKH, values_LKH = self._gather(cache, chunk.slots)
        keys_KLH, values_KLH = keys_LKH.transpose(0, 1), values_LKH.transpose(0, 1)
        shares_heads = q_TNH.shape[1] != keys_KLH.shape[0]
        for block in chunk.blocks:
            result_1NTH = F.scaled_dot_product_attention(
                q_TNH[block.start : block.stop].transpose(0, 1).unsqueeze(0),
                keys_KLH[:, block.first_key : block.last_key].unsqueeze(0),
                values_KLH[:, block.first_key : block.last_key].unsqueeze(0),
                attn_mask=block.mask,
                is_causal=block.mask is None,
                scale=scale,
                enable_gqa=shares_heads,
            )
            out_TNH[block.start : block.stop].copy_(result_1NTH[0].transpose(0, 1))

    def _gather(self, cache: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these slots, [slots, K, H] each; good until the next call."""
        num_kv_heads, head_dim = cache.k_BPKH.shape[2:]
        shape = (len(slots), num_kv_heads, head_dim)
        needed = len(slots) * num_kv_heads * head_dim
        workspace = self._workspaces.get(cache.k_BPKH.dtype)
        if workspace is None or len(workspace[0]) < needed:
            # kept, so that the pages are faulted in once; half as much again, so that a growing context seldom grows it
            size = needed + needed // 2
            workspace = (torch.empty(size, dtype=cache.k_BPKH.dtype), torch.empty(size, dtype=cache.v_BPKH.dtype))
            self._workspaces[cache.k_BPKH.dtype] = workspace
        keys, values = workspace[0][:needed].view(shape), workspace[1][:needed].view(shape)
        torch.index_select(cache.k_BPKH.flatten(0, 1), 0, slots, out=keys)
        torch.index_select(cache.v_BPKH.flatten(0, 1), 0, slots, out=values)
        return keys, values

    def _plan(self, dtype: torch.dtype, cache: LayerCache, meta: AttentionMeta, window: int | None) -> _Plan:
        if meta is not self._meta:
            self._meta = meta
            self._plans.clear()
        key = (window, dtype, cache.k_BPKH.shape)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _make_plan(dtype, cache, meta, window)
        return plan


def _make_plan(dtype: torch.dtype, cache: LayerCache, meta: AttentionMeta, window: int | None) -> _Plan:
    block_size, num_kv_heads, head_dim = cache.k_BPKH.shape[1:]
    token_bytes = 2 * num_kv_heads * head_dim * cache.k_BPKH.element_size()
    contexts, starts = meta.context_lens_host, meta.query_starts_host
    order, groups = _make_groups(meta, block_size, dtype, window, max_tokens=_GROUP_BYTES // token_bytes)
    chunks = [
        _make_chunk(
            range(starts[row], starts[row + 1]), contexts[row], meta.block_tables[row], block_size, dtype, window
        )
        for row in range(meta.num_decodes, len(contexts))
    ]
    return _Plan(order=order, groups=groups, chunks=chunks)


def _make_groups(
    meta: AttentionMeta, block_size: int, dtype: torch.dtype, window: int | None, *, max_tokens: int
) -> tuple[Tensor | None, list[_Group]]:
    """Sort the decodes and cut them into groups.

    Each row of a group has the group's length; one that is shorter repeats its first token in front, masked:

        t0 t0 t0 t1 ... tn
    """
    if not meta.num_decodes:
        return None, []
    contexts = np.array(meta.context_lens_host[: meta.num_decodes])
    lengths = contexts if window is None else np.minimum(contexts, window)
    order = lengths.argsort(kind="stable")
    contexts, lengths = contexts[order], lengths[order]
    bounds = _group_lengths(lengths.tolist(), max_tokens=max_tokens)
    padded = np.concatenate([np.full(stop - start, lengths[stop - 1]) for start, stop in bounds])

    # the slots of all rows in one piece: a step has many short rows, and each call costs more than its numbers
    ends = padded.cumsum()
    rows = np.repeat(np.arange(len(order)), padded)
    positions = np.arange(ends[-1]) + np.repeat(contexts - ends, padded)
    firsts = np.repeat(contexts - lengths, padded)
    is_padding = positions < firsts
    np.maximum(positions, firsts, out=positions)
    blocks = positions // block_size
    slots = (
        meta.block_tables.numpy()[order[rows], blocks].astype(np.int64) * block_size + positions - blocks * block_size
    )

    groups = []
    for start, stop in bounds:
        length, part = int(padded[start]), slice(ends[start] - padded[start], ends[stop - 1])
        mask = None
        if lengths[start] != length:
            mask = _additive(torch.from_numpy(is_padding[part]).view(stop - start, 1, 1, length), dtype)
        groups.append(_Group(start, stop, torch.from_numpy(slots[part]), length, mask))
    is_sorted = bool((order[1:] > order[:-1]).all())
    return None if is_sorted else torch.from_numpy(order), groups


def _group_lengths(lengths: list[int], *, max_tokens: int) -> list[tuple[int, int]]:
    """Cut ascending lengths into runs that waste little and hold at most `max_tokens`, or one sequence."""
    groups = []
    start, total = 0, 0
    for index, length in enumerate(lengths):
        padded = length * (index + 1 - start)
        if index > start and (padded > max_tokens or padded > _MAX_PADDING * (total + length)):
            groups.append((start, index))
            start, total = index, 0
        total += length
    if lengths:
        groups.append((start, len(lengths)))
    return groups


def _make_chunk(
    rows: range, context: int, table_M: Tensor, block_size: int, dtype: torch.dtype, window: int | None
) -> _Chunk:
    """The chunk that is these packed rows, the last tokens of a context."""
    first_query = context - len(rows)
    first = 0 if window is None else max(0, first_query - window + 1)
    positions = torch.arange(first, context)
    blocks = positions // block_size
    slots = table_M.index_select(0, blocks).long() * block_size + (positions - blocks * block_size)
    if first_query == 0 and (window is None or window >= context):
        return _Chunk(slots=slots, blocks=[_QueryBlock(rows.start, rows.stop, 0, context, None)])
    query_blocks = []
    for offset in range(0, len(rows), _QUERY_ROWS):
        queries = torch.arange(first_query + offset, min(first_query + offset + _QUERY_ROWS, context))
        lowest = first if window is None else max(first, int(queries[0]) - window + 1)
        keys = torch.arange(lowest, int(queries[-1]) + 1)
        hidden = keys > queries[:, None]
        if window is not None:
            hidden |= keys <= queries[:, None] - window
        start, stop = rows.start + offset, rows.start + offset + len(queries)
        bounds = (lowest - first, int(keys[-1]) + 1 - first)
        query_blocks.append(_QueryBlock(start, stop, *bounds, _additive(hidden, dtype)))
    return _Chunk(slots=slots, blocks=query_blocks)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
