"""Paged attention on a CPU in plain torch: gather each sequence's keys and values, then call torch's blocked kernel.

What a step's sequences look like is planned once and shared by its layers; nothing here knows linear layers or norms.

Decodes are sorted by length and put into groups of about the same length, small enough that what is gathered is still
in the core's cache when it is read. The query heads that share a key-value head become rows of one product, so each
key and value is read once. Keys are gathered token by token, so nothing past the context is ever touched.
"""

from dataclasses import dataclass

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
    tables = meta.block_tables.long()
    contexts, starts = meta.context_lens_host, meta.query_starts_host
    lengths = [context if window is None else min(context, window) for context in contexts[: meta.num_decodes]]
    order = sorted(range(meta.num_decodes), key=lengths.__getitem__)
    groups = []
    for start, stop in _group_lengths([lengths[row] for row in order], max_tokens=_GROUP_BYTES // token_bytes):
        rows = order[start:stop]
        length = lengths[rows[-1]]
        slots_SL, mask = _decode_slots(
            tables[rows],
            contexts=[contexts[row] for row in rows],
            lengths=[lengths[row] for row in rows],
            block_size=block_size,
            dtype=dtype,
        )
        groups.append(_Group(start=start, stop=stop, slots=slots_SL.flatten(), length=length, mask=mask))
    chunks = [
        _make_chunk(starts[row], starts[row + 1], contexts[row], tables[row], block_size, dtype, window)
        for row in range(meta.num_decodes, len(contexts))
    ]
    is_sorted = order == list(range(meta.num_decodes))
    return _Plan(order=None if is_sorted else torch.tensor(order), groups=groups, chunks=chunks)


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


def _decode_slots(
    tables_SM: Tensor, *, contexts: list[int], lengths: list[int], block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Slots of the last tokens of each row, [S, longest], and the mask that hides the padding; lengths ascend.

    A row that is shorter repeats its first token in front:     t0 t0 t0 t1 ... tn
    """
    positions_SL = torch.arange(-lengths[-1], 0) + torch.tensor(contexts)[:, None]
    firsts_S1 = torch.tensor(contexts)[:, None] - torch.tensor(lengths)[:, None]
    mask = None if lengths[0] == lengths[-1] else _additive(positions_SL < firsts_S1, dtype)[:, None, None]
    positions_SL = positions_SL.maximum(firsts_S1)
    return tables_SM.gather(1, positions_SL // block_size) * block_size + positions_SL % block_size, mask


def _make_chunk(
    start: int, stop: int, context: int, table: Tensor, block_size: int, dtype: torch.dtype, window: int | None
) -> _Chunk:
    """The chunk that is the packed rows `start : stop`, the last tokens of a context."""
    first_query = context - (stop - start)
    first = 0 if window is None else max(0, first_query - window + 1)
    positions = torch.arange(first, context)
    slots = table[positions // block_size] * block_size + positions % block_size
    if first_query == 0 and (window is None or window >= context):
        return _Chunk(slots=slots, blocks=[_QueryBlock(start, stop, 0, context, None)])
    blocks = []
    for offset in range(0, stop - start, _QUERY_ROWS):
        queries = torch.arange(first_query + offset, min(first_query + offset + _QUERY_ROWS, context))
        lowest = first if window is None else max(first, int(queries[0]) - window + 1)
        keys = torch.arange(lowest, int(queries[-1]) + 1)
        hidden = keys > queries[:, None]
        if window is not None:
            hidden |= keys <= queries[:, None] - window
        rows = (start + offset, start + offset + len(queries))
        blocks.append(_QueryBlock(*rows, lowest - first, int(keys[-1]) + 1 - first, _additive(hidden, dtype)))
    return _Chunk(slots=slots, blocks=blocks)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
