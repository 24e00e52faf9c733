"""Self-attention over the paged cache: heads are divided over the tensor-parallel axis; one all-reduce, at the output.

Builds on `Kernels` for everything that touches the cache. Shape letters as in kernels/base.py.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from parallel.description import DecoderDescription, ResidualKind
from parallel.kernels.base import AttentionMeta, AttentionParams, Kernels, LayerCache
from parallel.layer import LayerContext
from parallel.layer_groups import effective_window
from parallel.linear import PartialRowParallelLinear, QKVParallelLinear, RowParallelLinear
from parallel.position_description import RotaryDescription
from parallel.qk_norm import make_qk_norm
from parallel.shard import Piece, ShardedParameter

Angles = tuple[Tensor, ...]
"""Cosines and sines of a step's positions for one layer, float32 [T, R] each; empty where the layer does not rotate."""


class Attention:
    """Grouped-query attention (arXiv:2305.13245) for the heads of this rank.

    Args:
        description, layer_index: of the whole model.
        key_bias_NP: what each head of this rank adds to the scores of a key (alibi.py); None: nothing.
        context: where it lives.
    """

    def __init__(
        self, description: DecoderDescription, layer_index: int, key_bias_NP: Tensor | None, *, context: LayerContext
    ) -> None:
        hidden_size, head_dim = description.hidden_size, description.head_dim
        self._qkv = QKVParallelLinear(
            hidden_size,
            num_heads=description.num_heads,
            num_kv_heads=description.num_kv_heads,
            head_dim=head_dim,
            has_bias=description.qkv_bias,
            context=context,
        )
        is_parallel = description.residual is not ResidualKind.SEQUENTIAL
        self._output = (PartialRowParallelLinear if is_parallel else RowParallelLinear)(
            description.num_heads * head_dim,
            hidden_size,
            has_bias=description.output_bias,
            context=context,
            what="num_heads * head_dim",
        )
        self._project = self._qkv if description.qkv_clip is None else _clipped(self._qkv, description.qkv_clip)
        self._norm = make_qk_norm(description, self._qkv.heads, self._qkv.kv_heads, context=context)
        self._store = _choose_store(description.rotaries[layer_index], context.kernels)
        self._sinks = _Sinks(description, self._qkv.heads, context) if description.has_attention_sinks else None
        num_heads, num_kv_heads = len(self._qkv.heads), len(self._qkv.kv_heads)
        self._heads_shape = (-1, num_heads + 2 * num_kv_heads, head_dim)
        self._heads_split = (num_heads, num_kv_heads, num_kv_heads)
        self._params = AttentionParams(
            scale=description.attention_scale or head_dim**-0.5,
            sliding_window=effective_window(description.sliding_windows[layer_index], description.max_context),
            soft_cap=description.attention_soft_cap,
            key_bias_NP=key_bias_NP,
            is_bias_by_distance=description.alibi is not None and description.alibi.is_by_distance,
            sinks_N=None if self._sinks is None else self._sinks.scores_N,
        )
        self._kernels = context.kernels

    def __call__(self, x_TE: Tensor, angles: Angles, cache: LayerCache, meta: AttentionMeta) -> Tensor:
        """Write this step's keys and values to the cache, attend, and project: [T, E], complete on every rank.

        Where the residual is parallel, the result is this rank's summand only.
        """
        heads = self._project(x_TE).view(self._heads_shape)
        q_TNH, k_TKH, v_TKH = heads.split_with_sizes(self._heads_split, 1)
        if self._norm is not None:
            q_TNH, k_TKH = self._norm(q_TNH, k_TKH)
        q_TNH = self._store(q_TNH, k_TKH, v_TKH, *angles, cache, meta.slot_mapping)
        attended_TNH = self._kernels.attention(q_TNH, cache, meta, self._params)
        return self._output(attended_TNH.flatten(1))

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Yield those of the projections and, where the model has them, the norms of queries and keys and the sinks."""
        yield from self._qkv.sharded_parameters(prefix)
        if self._norm is not None:
            yield from self._norm.sharded_parameters(prefix)
        if self._sinks is not None:
            yield from self._sinks.sharded_parameters(prefix)
        yield from self._output.sharded_parameters(f"{prefix}.output")

    def finish_loading(self) -> None:
        """Lay out the matrices."""
        self._qkv.finish_loading()
        if self._norm is not None:
            self._norm.finish_loading()
        self._output.finish_loading()


class _Sinks:
    """The learned score of each head of this rank that stands for no token."""

    def __init__(self, description: DecoderDescription, heads: range, context: LayerContext) -> None:
        self.scores_N = torch.empty(len(heads), dtype=torch.float32, device=context.device)
        """[N] float32, whatever the dtype of the model, as the scores of attention are."""
        self._num_heads = description.num_heads
        self._heads = heads

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Yield those of this rank's heads."""
        start, stop = self._heads.start, self._heads.stop
        piece = Piece(source=f"{prefix}.sinks", full_shape=(self._num_heads,), dim=0, start=start, stop=stop)
        yield ShardedParameter(tensor=self.scores_N, pieces=(piece,))


def _choose_store(rotary: RotaryDescription | None, kernels: Kernels) -> Callable[..., Tensor]:
    """The operation (q, k, v, *angles, cache, slot mapping) -> q of a layer: keys and values are in the cache then."""
    if rotary is not None:
        return partial(kernels.rotate_and_write, is_interleaved=rotary.is_interleaved)

    def store(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> Tensor:
        kernels.write_cache(k_TKH, v_TKH, cache, slot_mapping_T)
        return q_TNH

    return store


def choose_rotation(rotary: RotaryDescription | None, kernels: Kernels) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operation (q, k, *angles) -> (q, k) of a layer."""
    if rotary is None:
        return _leave
    return partial(kernels.rotary, is_interleaved=rotary.is_interleaved)


def _leave(q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
    return q_TNH, k_TKH


def _clipped(linear: Callable[[Tensor], Tensor], limit: float) -> Callable[[Tensor], Tensor]:
    return lambda x_TE: linear(x_TE).clamp_(-limit, limit)
