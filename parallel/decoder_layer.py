"""One layer of a decoder: attention and MLP, how they follow each other, and what is normed where.

The residual stream is kept apart from what the last block added to it, so that one kernel adds and norms:

    x, residual -> add, norm -> attention -> add, norm -> MLP -> x', residual'

What is special to a model is a part of its own, chosen when the layer is built; a plain layer pays nothing for it.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from parallel.attention import Angles, Attention
from parallel.collectives import all_reduce
from parallel.description import DecoderDescription, NormPlace, ResidualKind
from parallel.kernels.base import AttentionMeta, LayerCache
from parallel.latent_attention import LatentAttention
from parallel.layer import Layer, LayerContext
from parallel.mlp import MLP
from parallel.moe import MoE
from parallel.norm import NoNorm, Norm, make_norm
from parallel.shard import ShardedParameter

AnyAttention = Attention | LatentAttention


class DecoderLayer(Protocol):
    """Attention and MLP, each added to the residual stream."""

    def __call__(
        self, x_TE: Tensor, residual_TE: Tensor | None, angles: Angles, cache: LayerCache, meta: AttentionMeta
    ) -> tuple[Tensor, Tensor]:
        """(what was added last, residual stream before it) -> the same after this layer; None: nothing added yet."""

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Yield those of both blocks and their norms."""

    def finish_loading(self) -> None:
        """Lay the weights out."""


def make_decoder_layer(
    description: DecoderDescription, layer_index: int, key_bias_NP: Tensor | None, *, context: LayerContext
) -> DecoderLayer:
    """The layer of this index, as the description wants it; for `key_bias_NP` see `Attention`."""
    attention = _make_attention(description, layer_index, key_bias_NP, context)
    if description.residual is not ResidualKind.SEQUENTIAL:
        return ParallelLayer(
            description, attention, MLP(description, context=context, is_partial=True), context=context
        )
    moe = description.moe_of_layer(layer_index)
    mlp = MLP(description, context=context) if moe is None else MoE(description, moe, context=context)
    return SequentialLayer(description, attention, mlp, context=context)


class SequentialLayer:
    """The MLP, or the experts, read what the attention has added to. Two all-reduces, one in each block."""

    def __init__(
        self, description: DecoderDescription, attention: AnyAttention, mlp: MLP | MoE, *, context: LayerContext
    ) -> None:
        self._attention_norm = _norm_before(description, context)
        self._mlp_norm = _norm_before(description, context)
        self._attention: Callable[..., Tensor] = attention
        self._mlp: Callable[[Tensor], Tensor] = mlp
        self._parts: list[tuple[str, Layer]] = [
            ("attention_norm", self._attention_norm),
            ("attention", attention),
            ("mlp_norm", self._mlp_norm),
            ("mlp", mlp),
        ]
        if description.norm_place is not NormPlace.BEFORE:
            after_attention, after_mlp = _norm(description, context), _norm(description, context)
            self._attention = _followed(self._attention, after_attention)
            self._mlp = _followed(self._mlp, after_mlp)
            self._parts += [("attention_post_norm", after_attention), ("mlp_post_norm", after_mlp)]
        if description.residual_multiplier != 1.0:
            self._attention = _multiplied(self._attention, description.residual_multiplier)
            self._mlp = _multiplied(self._mlp, description.residual_multiplier)

    def __call__(
        self, x_TE: Tensor, residual_TE: Tensor | None, angles: Angles, cache: LayerCache, meta: AttentionMeta
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        if residual_TE is None:
            residual_TE = x_TE
            x_TE = self._attention_norm(x_TE)
        else:
            x_TE, residual_TE = self._attention_norm.add(x_TE, residual_TE)
        x_TE = self._attention(x_TE, angles, cache, meta)
        x_TE, residual_TE = self._mlp_norm.add(x_TE, residual_TE)
        return self._mlp(x_TE), residual_TE

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """See `DecoderLayer`."""
        for name, part in self._parts:
            yield from part.sharded_parameters(f"{prefix}.{name}")

    def finish_loading(self) -> None:
        """See `DecoderLayer`."""
        for _, part in self._parts:
            part.finish_loading()


class ParallelLayer:
    """Attention and MLP read the same stream; their partial sums are added before one all-reduce completes both."""

    def __init__(
        self, description: DecoderDescription, attention: AnyAttention, mlp: MLP, *, context: LayerContext
    ) -> None:
        self._axis = context.axis
        self._attention_norm = _norm(description, context)
        has_mlp_norm = description.residual is ResidualKind.PARALLEL
        self._mlp_norm = _norm(description, context) if has_mlp_norm else None
        self._attention = attention
        self._mlp = mlp

    def __call__(
        self, x_TE: Tensor, residual_TE: Tensor | None, angles: Angles, cache: LayerCache, meta: AttentionMeta
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        if residual_TE is None:
            residual_TE = x_TE
            x_TE = self._attention_norm(x_TE)
        else:
            x_TE, residual_TE = self._attention_norm.add(x_TE, residual_TE)
        mlp_TE = self._mlp(x_TE if self._mlp_norm is None else self._mlp_norm(residual_TE))
        return all_reduce(mlp_TE.add_(self._attention(x_TE, angles, cache, meta)), self._axis), residual_TE

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """See `DecoderLayer`."""
        yield from self._attention_norm.sharded_parameters(f"{prefix}.attention_norm")
        yield from self._attention.sharded_parameters(f"{prefix}.attention")
        if self._mlp_norm is not None:
            yield from self._mlp_norm.sharded_parameters(f"{prefix}.mlp_norm")
        yield from self._mlp.sharded_parameters(f"{prefix}.mlp")

    def finish_loading(self) -> None:
        """See `DecoderLayer`."""
        self._attention_norm.finish_loading()
        self._attention.finish_loading()
        if self._mlp_norm is not None:
            self._mlp_norm.finish_loading()
        self._mlp.finish_loading()


def _make_attention(
    description: DecoderDescription, layer_index: int, key_bias_NP: Tensor | None, context: LayerContext
) -> AnyAttention:
    if description.latent_kv is not None:
        return LatentAttention(description, layer_index, context=context)
    return Attention(description, layer_index, key_bias_NP, context=context)


def _norm(description: DecoderDescription, context: LayerContext) -> Norm:
    return make_norm(description.norm, description.hidden_size, description.norm_eps, context=context)


def _norm_before(description: DecoderDescription, context: LayerContext) -> Norm:
    return NoNorm() if description.norm_place is NormPlace.AFTER else _norm(description, context)


def _followed(block: Callable[..., Tensor], norm: Norm) -> Callable[..., Tensor]:
    return lambda *inputs: norm(block(*inputs))


def _multiplied(block: Callable[..., Tensor], multiplier: float) -> Callable[..., Tensor]:
    return lambda *inputs: block(*inputs).mul_(multiplier)
