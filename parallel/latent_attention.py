"""Multi-head latent attention: all heads read one small vector per token, and only that is cached. arXiv:2405.04434.

Beside the letters of kernels/base.py: L rank of the latent, D plain dims of a head, A rotated dims (of all heads the
same key), C = L + A. Of a token the cache holds, on every rank of the tensor-parallel axis,

    | latent, L | rotated key, A |

as the one key-value head of all heads, which are divided over the ranks. Keys and values of the heads are never made: a
head's score with a token, (U latent) . q, is latent . (U^T q), so each query is brought into the space of latents; and
what the head attended to, a mean of latents, is brought into the space of its values afterwards. To the kernels a token
is its own value, so that they need to know nothing of this; of the result the last A dims mean nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel.attention import Angles, choose_rotation
from parallel.description import DecoderDescription, NormKind
from parallel.kernels.base import AttentionMeta, AttentionParams, HeadsLinear, LayerCache
from parallel.layer import LayerContext
from parallel.layer_groups import effective_window
from parallel.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from parallel.norm import make_norm
from parallel.shard import Piece, ShardedParameter, even_range


class LatentAttention:
    """Attention over cached latents for the heads of this rank; one all-reduce, at the output."""

    def __init__(self, description: DecoderDescription, layer_index: int, *, context: LayerContext) -> None:
        latent = description.latent_kv
        assert latent is not None, "made for descriptions with latent keys and values"
        hidden_size, num_heads = description.hidden_size, description.num_heads
        heads = even_range(num_heads, context.axis.rank, context.axis.size, what="num_heads")
        self._latent = latent
        self._heads_shape = (-1, len(heads), description.head_dim)
        downs = [] if latent.query_rank is None else [_whole("q_down", latent.query_rank)]
        downs.append(_whole("kv_down", latent.rank + latent.rotary_dim))
        self._down = ColumnParallelLinear(hidden_size, downs, has_bias=description.qkv_bias, context=context)
        self._query_norm = None
        if latent.query_rank is not None:
            self._query_norm = make_norm(NormKind.RMS, latent.query_rank, latent.norm_eps, context=context)
        self._latent_norm = make_norm(NormKind.RMS, latent.rank, latent.norm_eps, context=context)
        query_rows = range(heads.start * description.head_dim, heads.stop * description.head_dim)
        self._query = ColumnParallelLinear(
            latent.query_rank or hidden_size,
            [ColumnPart("q" if latent.query_rank is None else "q_up", num_heads * description.head_dim, query_rows)],
            has_bias=False,
            context=context,
        )
        self._key_up = _HeadMatrices("k_up", num_heads, heads, (latent.plain_dim, latent.rank), context)
        self._value_up = _HeadMatrices("v_up", num_heads, heads, (latent.value_dim, latent.rank), context)
        self._output = RowParallelLinear(
            num_heads * latent.value_dim,
            hidden_size,
            has_bias=description.output_bias,
            context=context,
            what="num_heads * value_dim",
        )
        self._rotate = choose_rotation(description.rotaries[layer_index], context.kernels)
        self._params = AttentionParams(
            scale=description.attention_scale or description.head_dim**-0.5,
            sliding_window=effective_window(description.sliding_windows[layer_index], description.max_context),
            soft_cap=description.attention_soft_cap,
        )
        self._kernels = context.kernels
        self._to_latents: HeadsLinear
        self._to_values: HeadsLinear

    def __call__(self, x_TE: Tensor, angles: Angles, cache: LayerCache, meta: AttentionMeta) -> Tensor:
        """Write this step's latents to the cache, attend, and project: [T, E], complete on every rank."""
        latent = self._latent
        down = self._down(x_TE)
        kv_TC = down[:, -(latent.rank + latent.rotary_dim) :]
        if self._query_norm is not None:
            x_TE = self._query_norm(down[:, : latent.query_rank])
        q_TNH = self._query(x_TE).view(self._heads_shape)
        q_TND, q_TNA = q_TNH.split_with_sizes((latent.plain_dim, latent.rotary_dim), -1)
        latent_TL, k_TA = kv_TC.split_with_sizes((latent.rank, latent.rotary_dim), -1)
        q_TNA, k_T1A = self._rotate(q_TNA, k_TA.unsqueeze(1), *angles)
        key_T1C = torch.cat((self._latent_norm(latent_TL).unsqueeze(1), k_T1A), -1)
        self._kernels.write_cache(key_T1C, key_T1C, cache, meta.slot_mapping)
        q_TNC = torch.cat((self._to_latents(q_TND), q_TNA), -1)
        attended_TNC = self._kernels.attention(q_TNC, cache, meta, self._params)
        return self._output(self._to_values(attended_TNC[..., : latent.rank]).flatten(1))

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """What leads to the latents, whole on every rank; the norms; this rank's heads of the rest."""
        yield from self._down.sharded_parameters(prefix)
        if self._query_norm is not None:
            yield from self._query_norm.sharded_parameters(f"{prefix}.q_down_norm")
        yield from self._latent_norm.sharded_parameters(f"{prefix}.kv_down_norm")
        yield from self._query.sharded_parameters(prefix)
        yield from self._key_up.sharded_parameters(prefix)
        yield from self._value_up.sharded_parameters(prefix)
        yield from self._output.sharded_parameters(f"{prefix}.output")

    def finish_loading(self) -> None:
        """Lay out the matrices."""
        for linear in (self._down, self._query, self._output):
            linear.finish_loading()
        self._to_latents = self._kernels.pack_heads(self._key_up.take())
        self._to_values = self._kernels.pack_heads(self._value_up.take().transpose(1, 2))


class _HeadMatrices:
    """A matrix [outputs, inputs] for each head of this rank; the source has them one under the other."""

    def __init__(self, name: str, num_heads: int, heads: range, shape: tuple[int, int], context: LayerContext) -> None:
        self._weight: Tensor | None = context.empty(len(heads), *shape, stays=True)
        self._name = name
        self._num_heads = num_heads
        self._heads = heads

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Yield those of this rank's heads."""
        assert self._weight is not None, "weights are gone after finish_loading"
        _, num_outputs, num_inputs = self._weight.shape
        piece = Piece(
            source=f"{prefix}.{self._name}.weight",
            full_shape=(self._num_heads * num_outputs, num_inputs),
            dim=0,
            start=self._heads.start * num_outputs,
            stop=self._heads.stop * num_outputs,
        )
        yield ShardedParameter(tensor=self._weight.flatten(0, 1), pieces=(piece,))

    def take(self) -> Tensor:
        """[heads, outputs, inputs], for whoever lays them out."""
        assert self._weight is not None, "taken once"
        weight, self._weight = self._weight, None
        return weight


def _whole(name: str, num_rows: int) -> ColumnPart:
    return ColumnPart(name, num_rows, range(num_rows))
