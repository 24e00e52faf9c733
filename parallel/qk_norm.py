"""The norm over queries and keys between projection and rotation, for the heads of this rank."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from parallel.collectives import all_reduce
from parallel.description import DecoderDescription, NormKind, QKNormScope
from parallel.errors import UnsupportedModelError
from parallel.layer import LayerContext
from parallel.norm import make_norm
from parallel.shard import Piece, ShardedParameter


class QueryKeyNorm(Protocol):
    """Norms queries and keys of this rank."""

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, normed; the inputs may be views, and may be overwritten."""

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Yield those of `q_norm` and `k_norm` below the prefix."""

    def finish_loading(self) -> None:
        """Lay the weights out, once, when they are filled."""


def make_qk_norm(
    description: DecoderDescription, heads: range, kv_heads: range, *, context: LayerContext
) -> QueryKeyNorm | None:
    """The norm that a description asks for, for these heads of the model; None: it asks for none."""
    norm = description.qk_norm
    if norm is None:
        return None
    if norm.scope is not QKNormScope.ALL_HEADS:
        return HeadNorms(description, heads, kv_heads, context=context)
    if norm.kind is not NormKind.RMS:
        raise UnsupportedModelError(f"norm over all heads together is {norm.kind}; supported: {NormKind.RMS}")
    return AllHeadsNorm(description, heads, kv_heads, context=context)


class HeadNorms:
    """Each head is normed by itself; the weights are shared by all heads, or each has its own."""

    def __init__(
        self, description: DecoderDescription, heads: range, kv_heads: range, *, context: LayerContext
    ) -> None:
        norm, head_dim, eps = description.qk_norm, description.head_dim, description.norm_eps
        assert norm is not None, "made for descriptions with a norm"
        self._owns_weights = norm.scope is QKNormScope.OWN_HEAD
        self._heads = (description.num_heads, heads), (description.num_kv_heads, kv_heads)
        shapes = [(len(local), head_dim) if self._owns_weights else head_dim for _, local in self._heads]
        self._q_norm, self._k_norm = (make_norm(norm.kind, shape, eps, context=context) for shape in shapes)

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """See `QueryKeyNorm`."""
        return self._q_norm(q_TNH), self._k_norm(k_TKH)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """See `QueryKeyNorm`."""
        for name, norm, (num_heads, heads) in zip(
            ("q_norm", "k_norm"), (self._q_norm, self._k_norm), self._heads, strict=True
        ):
            for parameter in norm.sharded_parameters(f"{prefix}.{name}"):
                yield _of_heads(parameter, num_heads, heads) if self._owns_weights else parameter

    def finish_loading(self) -> None:
        """See `QueryKeyNorm`."""
        self._q_norm.finish_loading()
        self._k_norm.finish_loading()


class AllHeadsNorm:
    """RMSNorm over all heads of a token together; what the ranks know of its size is summed, in a small all-reduce.

    That is one more than the two of a layer, of two numbers per token. One rank knows all of it.
    """

    def __init__(
        self, description: DecoderDescription, heads: range, kv_heads: range, *, context: LayerContext
    ) -> None:
        self._axis = context.axis
        self._kernels = context.kernels
        self._eps = description.norm_eps
        self._weights = tuple(context.empty(len(local), description.head_dim) for local in (heads, kv_heads))
        self._num_heads = description.num_heads, description.num_kv_heads
        self._heads = heads, kv_heads
        # key-value heads that several ranks hold are in the sum several times, and count as often
        self._nums_summed = [context.axis.size * weight.numel() for weight in self._weights]

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """See `QueryKeyNorm`."""
        if self._axis.size == 1:
            q_weight, k_weight = self._weights
            return self._norm_alone(q_TNH, q_weight), self._norm_alone(k_TKH, k_weight)
        squares_T2 = all_reduce(self._kernels.sum_squares(q_TNH, k_TKH), self._axis)
        q_TNH, k_TKH = (
            self._kernels.norm_part(x_TNH, squares_T, weight_NH, num_summed=num_summed, eps=self._eps)
            for x_TNH, squares_T, weight_NH, num_summed in zip(
                (q_TNH, k_TKH), squares_T2.unbind(1), self._weights, self._nums_summed, strict=True
            )
        )
        return q_TNH, k_TKH

    def _norm_alone(self, x_TNH: Tensor, weight_NH: Tensor) -> Tensor:
        """All heads as one."""
        return self._kernels.rms_norm(x_TNH.flatten(1).unsqueeze(1), weight_NH.flatten(), self._eps).view(x_TNH.shape)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """See `QueryKeyNorm`; a source is flat, [N * H]."""
        for name, weight, num_heads, heads in zip(
            ("q_norm", "k_norm"), self._weights, self._num_heads, self._heads, strict=True
        ):
            head_dim = weight.shape[1]
            piece = Piece(
                source=f"{prefix}.{name}.weight",
                full_shape=(num_heads * head_dim,),
                dim=0,
                start=heads.start * head_dim,
                stop=heads.stop * head_dim,
            )
            yield ShardedParameter(tensor=weight.flatten(), pieces=(piece,))

    def finish_loading(self) -> None:
        """See `QueryKeyNorm`."""


def _of_heads(parameter: ShardedParameter, num_heads: int, heads: range) -> ShardedParameter:
    """The rows of these heads, of a full tensor [num_heads, H]."""
    (piece,) = parameter.pieces
    full_shape = (num_heads, *piece.full_shape[1:])
    pieces = (replace(piece, full_shape=full_shape, start=heads.start, stop=heads.stop),)
    return ShardedParameter(tensor=parameter.tensor, pieces=pieces)
