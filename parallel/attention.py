"""Self-attention over the paged cache: heads are divided over the tensor-parallel axis; one all-reduce, at the output.

Builds on `Kernels` for everything that touches the cache. Shape letters as in kernels/base.py.
"""

from collections.abc import Iterator

from torch import Tensor

from parallel.description import DecoderDescription
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.layer import LayerContext
from parallel.linear import QKVParallelLinear, RowParallelLinear
from parallel.norm import RMSNorm
from parallel.shard import ShardedParameter


class Attention:
    """Grouped-query attention (arXiv:2305.13245) with rotary positions, for the heads of this rank."""

    def __init__(self, description: DecoderDescription, layer_index: int, *, context: LayerContext) -> None:
        hidden_size, head_dim = description.hidden_size, description.head_dim
        self._qkv = QKVParallelLinear(
            hidden_size,
            num_heads=description.num_heads,
            num_kv_heads=description.num_kv_heads,
            head_dim=head_dim,
            has_bias=description.qkv_bias,
            context=context,
        )
        self._output = RowParallelLinear(
            description.num_heads * head_dim,
            hidden_size,
            has_bias=description.output_bias,
            context=context,
            what="num_heads * head_dim",
        )
        self._norms: tuple[RMSNorm, RMSNorm] | None = None
        if description.qk_norm:
            eps = description.norm_eps
            self._norms = RMSNorm(head_dim, eps, context=context), RMSNorm(head_dim, eps, context=context)
        num_heads, num_kv_heads = self._qkv.num_local_heads, self._qkv.num_local_kv_heads
        self._heads_shape = (-1, num_heads + 2 * num_kv_heads, head_dim)
        self._heads_split = (num_heads, num_kv_heads, num_kv_heads)
        self._params = AttentionParams(scale=head_dim**-0.5, sliding_window=description.sliding_windows[layer_index])
        self._kernels = context.kernels

    def __call__(self, x_TE: Tensor, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, meta: AttentionMeta) -> Tensor:
        """Write this step's keys and values to the cache, attend, and project: [T, E], complete on every rank."""
        kernels = self._kernels
        heads = self._qkv(x_TE).view(self._heads_shape)
        q_TNH, k_TKH, v_TKH = heads.split_with_sizes(self._heads_split, 1)
        if self._norms is not None:
            q_TNH, k_TKH = self._norms[0](q_TNH), self._norms[1](k_TKH)
        q_TNH, k_TKH = kernels.rotary(q_TNH, k_TKH, cos_TR, sin_TR)
        kernels.write_cache(k_TKH, v_TKH, cache, meta.slot_mapping)
        attended_TNH = kernels.attention(q_TNH, cache, meta, self._params)
        return self._output(attended_TNH.flatten(1))

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Those of the projections and, where the model has them, of the norms of queries and keys."""
        yield from self._qkv.sharded_parameters(prefix)
        if self._norms is not None:
            yield from self._norms[0].sharded_parameters(f"{prefix}.q_norm")
            yield from self._norms[1].sharded_parameters(f"{prefix}.k_norm")
        yield from self._output.sharded_parameters(f"{prefix}.output")

    def finish_loading(self) -> None:
        """Lay out the matrices."""
        self._qkv.finish_loading()
        self._output.finish_loading()
