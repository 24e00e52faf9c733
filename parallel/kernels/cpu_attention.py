"""Paged attention on a CPU in plain torch: gather each sequence's keys and values, then call torch's blocked kernel.

What a step's sequences look like is planned once and shared by its layers; nothing here knows linear layers or norms.

What is in 8 bits (int8_cache.py) becomes numbers of the model's dtype when it is gathered.

Decodes are sorted by length and put into groups of about the same length, small enough that what is gathered is still
in the core's cache when it is read. The query heads that share a key-value head become rows of one product, so each
key and value is read once. Keys are gathered token by token, so nothing past the context is ever touched.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.host_arrays import Int64Array
from parallel.kernels.int8_cache import split_slots

BoolArray = npt.NDArray[np.bool_]

_GROUP_BYTES = 1 << 20
"""Keys and values gathered at once for a group of decodes: about half of a core's second-level cache."""
_MAX_PADDING = 1.25
"""Padded tokens of a group over its real ones."""
_QUERY_ROWS = 256
"""Query rows of a chunk that are masked together; rows further down see more keys."""


class _Gather:
    """Copies the keys and values of chosen slots, [slots, K, H], side by side into the workspace of all layers."""

    def __init__(self, slots: Tensor, workspace: tuple[Tensor, Tensor], shape: tuple[int, int]) -> None:
        """`slots` int64; `shape` (K, H) of one token."""
        self._slots = slots
        self.keys, self.values = (half[: len(slots) * shape[0] * shape[1]].view(-1, *shape) for half in workspace)

    def __call__(self, cache: LayerCache) -> None:
        """Fill `self.keys` and `self.values`, good until the next gather, from a layer's cache."""
        self._copy(self.keys, cache.k_BPKH, cache.k_scale_BPK)
        self._copy(self.values, cache.v_BPKH, cache.v_scale_BPK)

    def _copy(self, out: Tensor, half_BPKH: Tensor, scale_BPK: Tensor | None) -> None:
        if scale_BPK is None:
            torch.index_select(half_BPKH.flatten(0, 1), 0, self._slots, out=out)
        else:
            place = split_slots(self._slots, half_BPKH)
            torch.mul(half_BPKH[place], scale_BPK[place].unsqueeze(-1), out=out)


@dataclass(slots=True)
class _Group:
    """Decodes of about the same length."""

    gather: _Gather
    keys: Tensor
    """[S, K, L, H], of the gathered ones; `values` too."""
    values: Tensor
    mask: Tensor | None
    """[S, 1, 1, L], 0 or -inf; None: all have the same length."""


@dataclass(slots=True)
class _QueryBlock:
    """Rows of one sequence's chunk, and the keys that they see."""

    start: int
    stop: int
    keys: Tensor
    """[1, K, L, H], of the gathered ones; `values` too."""
    values: Tensor
    mask: Tensor | None
    """[rows, L], 0 or -inf; None: row i sees keys 0 .. i."""


@dataclass(slots=True)
class _Chunk:
    """More than one query token of one sequence."""

    gather: _Gather
    blocks: list[_QueryBlock]


@dataclass(slots=True)
class _Plan:
    """How the attention of one step is computed, for one sliding window."""

    num_decodes: int
    order: tuple[Tensor, Tensor] | None
    """[num_decodes] int64 each: the decodes from short to long, and the inverse; None: they already are."""
    group_sizes: list[int]
    groups: list[_Group]
    chunks: list[_Chunk]


class CpuPagedAttention:
    """Computes `Kernels.attention` without a soft cap. Holds the plan of the step in progress: one thread only."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        """`context_lens_host` of the step in progress: all its metas have this one object."""
        self._plans: dict[tuple[int, int | None, bool, torch.Size], tuple[AttentionMeta, _Plan]] = {}
        self._workspaces: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def __call__(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`."""
        if params.soft_cap is not None:
            raise ValueError(f"soft_cap is {params.soft_cap}; this kernel allows: None")
        plan = self._plan(q_TNH.dtype, cache, meta, params.sliding_window)
        if not plan.chunks:
            return _attend_decodes(q_TNH, cache, plan, params.scale)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        if plan.groups:
            num = plan.num_decodes
            out_TNH[:num] = _attend_decodes(q_TNH[:num], cache, plan, params.scale)
        for chunk in plan.chunks:
            _attend_chunk(q_TNH, out_TNH, cache, chunk, params.scale)
        return out_TNH

    def attend_chunks(
        self, q_TNH: Tensor, out_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams
    ) -> None:
        """Fill the rows of the sequences that are no decodes; as `Kernels.attention` otherwise."""
        for chunk in self._plan(q_TNH.dtype, cache, meta, params.sliding_window, has_decodes=False).chunks:
            _attend_chunk(q_TNH, out_TNH, cache, chunk, params.scale)

    def _plan(
        self,
        dtype: torch.dtype,
        cache: LayerCache,
        meta: AttentionMeta,
        window: int | None,
        *,
        has_decodes: bool = True,
    ) -> _Plan:
        if meta.context_lens_host is not self._lengths:
            self._lengths = meta.context_lens_host
            self._plans.clear()
        key = (id(meta), window, has_decodes, cache.k_BPKH.shape)
        if key not in self._plans:  # the meta is kept with its plan, so that no other one gets its id
            self._plans[key] = meta, _Planner(dtype, cache, meta, window, self._workspace).plan(has_decodes=has_decodes)
        return self._plans[key][1]

    def _workspace(self, dtype: torch.dtype, cache: LayerCache, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Room for the keys and the values of this many tokens, at least."""
        token_size = cache.k_BPKH.shape[2:].numel()
        workspace = self._workspaces.get(dtype)
        if workspace is None or len(workspace[0]) < num_tokens * token_size:
            # kept, so that its pages are faulted in once; half as much again, so that a growing context seldom grows it
            size = (num_tokens + num_tokens // 2) * token_size
            workspace = self._workspaces[dtype] = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        return workspace


def _attend_decodes(q_SNH: Tensor, cache: LayerCache, plan: _Plan, scale: float) -> Tensor:
    """[S, N, H] -> the same; query heads of one key-value head are rows of one product: [S, K, N // K, H]."""
    num_sequences, num_heads, head_dim = q_SNH.shape
    num_kv_heads = cache.k_BPKH.shape[2]
    if plan.order is not None:
        q_SNH = q_SNH.index_select(0, plan.order[0])
    parts = q_SNH.view(num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim).split(plan.group_sizes)
    results = []
    for q_SKGH, group in zip(parts, plan.groups, strict=True):
        group.gather(cache)
        results.append(
            F.scaled_dot_product_attention(q_SKGH, group.keys, group.values, attn_mask=group.mask, scale=scale)
        )
    out_SKGH = results[0] if len(results) == 1 else torch.cat(results)
    out_SNH = out_SKGH.reshape(num_sequences, num_heads, head_dim)
    return out_SNH if plan.order is None else out_SNH.index_select(0, plan.order[1])


def _attend_chunk(q_TNH: Tensor, out_TNH: Tensor, cache: LayerCache, chunk: _Chunk, scale: float) -> None:
    chunk.gather(cache)
    shares_heads = q_TNH.shape[1] != cache.k_BPKH.shape[2]
    for block in chunk.blocks:
        result_1NTH = F.scaled_dot_product_attention(
            q_TNH[block.start : block.stop].transpose(0, 1).unsqueeze(0),
            block.keys,
            block.values,
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scale,
            enable_gqa=shares_heads,
        )
        out_TNH[block.start : block.stop] = result_1NTH[0].transpose(0, 1)


class _Planner:
    """Makes the plan of one step and one sliding window."""

    def __init__(
        self,
        dtype: torch.dtype,
        cache: LayerCache,
        meta: AttentionMeta,
        window: int | None,
        workspace: Callable[[torch.dtype, LayerCache, int], tuple[Tensor, Tensor]],
    ) -> None:
        self._meta = meta
        self._window = window
        self._dtype = dtype
        self._block_size, num_kv_heads, head_dim = cache.k_BPKH.shape[1:]
        self._token_shape = num_kv_heads, head_dim
        self._token_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
        chunk_contexts = meta.context_lens_host[meta.num_decodes :]
        most = max(_GROUP_BYTES // self._token_bytes, *meta.context_lens_host[: meta.num_decodes], *chunk_contexts, 1)
        self._workspace = workspace(dtype, cache, most)

    def plan(self, *, has_decodes: bool) -> _Plan:
        """The plan, of the decodes too or of the chunks only."""
        meta = self._meta
        chunks = [self._chunk(row) for row in range(meta.num_decodes, len(meta.context_lens_host))]
        if not meta.num_decodes or not has_decodes:
            return _Plan(num_decodes=0, order=None, group_sizes=[], groups=[], chunks=chunks)
        order, sizes, groups = self._groups()
        is_sorted = bool((order[1:] > order[:-1]).all())
        both = torch.from_numpy(order), torch.from_numpy(order.argsort())
        return _Plan(
            num_decodes=meta.num_decodes,
            order=None if is_sorted else both,
            group_sizes=sizes,
            groups=groups,
            chunks=chunks,
        )

    def _groups(self) -> tuple[Int64Array, list[int], list[_Group]]:
        """Sort the decodes and cut them into groups: order, sizes, groups.

        Each row of a group has the group's length; one that is shorter repeats its first token in front, masked:

            t0 t0 t0 t1 ... tn
        """
        contexts = np.array(self._meta.context_lens_host[: self._meta.num_decodes])
        lengths = contexts if self._window is None else np.minimum(contexts, self._window)
        order = lengths.argsort(kind="stable")
        contexts, lengths = contexts[order], lengths[order]
        sizes = _group_sizes(lengths.tolist(), max_tokens=_GROUP_BYTES // self._token_bytes)
        stops = np.cumsum(sizes)
        padded = np.repeat(lengths[stops - 1], sizes)

        # the slots of all rows in one piece: a step has many short rows, and each call costs more than its numbers
        ends = padded.cumsum()
        positions = np.arange(ends[-1]) + np.repeat(contexts - ends, padded)
        firsts = np.repeat(contexts - lengths, padded)
        is_padding = positions < firsts
        slots = self._slots(np.repeat(order, padded), np.maximum(positions, firsts))

        groups = []
        for size, stop in zip(sizes, stops.tolist(), strict=True):
            length = int(padded[stop - 1])
            part = slice(int(ends[stop - 1]) - size * length, int(ends[stop - 1]))
            mask = is_padding[part].reshape(size, 1, 1, length) if lengths[stop - size] != length else None
            groups.append(self._group(slots[part], size, mask))
        return order, sizes, groups

    def _group(self, slots: Int64Array, size: int, hidden: BoolArray | None) -> _Group:
        gather = self._gather(slots)
        shape = (size, -1, *self._token_shape)
        keys, values = (half.view(shape).transpose(1, 2) for half in (gather.keys, gather.values))
        return _Group(gather, keys, values, None if hidden is None else self._additive(hidden))

    def _chunk(self, row: int) -> _Chunk:
        """The chunk of a sequence: the last tokens of its context."""
        start, stop = self._meta.query_starts_host[row : row + 2]
        context, window = self._meta.context_lens_host[row], self._window
        first_query = context - (stop - start)
        first = 0 if window is None else max(0, first_query - window + 1)
        gather = self._gather(self._slots(np.full(context - first, row), np.arange(first, context)))
        keys, values = (half.transpose(0, 1).unsqueeze(0) for half in (gather.keys, gather.values))
        if first_query == 0 and (window is None or window >= context):
            return _Chunk(gather, [_QueryBlock(start, stop, keys, values, None)])
        blocks = []
        for offset in range(0, stop - start, _QUERY_ROWS):
            queries = np.arange(first_query + offset, min(first_query + offset + _QUERY_ROWS, context))[:, None]
            lowest = first if window is None else max(first, int(queries[0, 0]) - window + 1)
            positions = np.arange(lowest, int(queries[-1, 0]) + 1)
            hidden = positions > queries
            if window is not None:
                hidden |= positions <= queries - window
            seen = slice(lowest - first, lowest - first + len(positions))
            rows = (start + offset, start + offset + len(queries))
            blocks.append(_QueryBlock(*rows, keys[:, :, seen], values[:, :, seen], self._additive(hidden)))
        return _Chunk(gather, blocks)

    def _slots(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Where these positions of these sequences are in the cache."""
        blocks = positions // self._block_size
        tables_SM = self._meta.block_tables.numpy()
        return tables_SM[rows, blocks].astype(np.int64) * self._block_size + (positions - blocks * self._block_size)

    def _gather(self, slots: Int64Array) -> _Gather:
        return _Gather(torch.from_numpy(slots), self._workspace, self._token_shape)

    def _additive(self, hidden: BoolArray) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))


def _group_sizes(lengths: list[int], *, max_tokens: int) -> list[int]:
    """Cut ascending lengths into runs that waste little and hold at most `max_tokens`, or one sequence."""
    sizes = []
    size, total = 0, 0
    for length in lengths:
        padded = length * (size + 1)
        if size and (padded > max_tokens or padded > _MAX_PADDING * (total + length)):
            sizes.append(size)
            size, total = 0, 0
        size += 1
        total += length
    return [*sizes, size]
