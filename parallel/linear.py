"""Linear layers split over the tensor-parallel axis. Megatron-LM, arXiv:1909.08053, section 3.

A column-parallel layer holds some outputs of the matrix and needs no communication; a row-parallel one holds some
inputs, and its results are partial sums that one all-reduce completes. A pair of them, with anything elementwise
between, costs that one all-reduce.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from parallel.collectives import all_reduce
from parallel.kernels.linears import GatedLinear, PackedLinear
from parallel.layer import LayerContext
from parallel.shard import Piece, ShardedParameter, even_range, kv_head_range, replicated


class ColumnPart(NamedTuple):
    """One source matrix of a fused column-parallel layer."""

    name: str
    """Name of the source, below the layer's own; empty: the layer is this one matrix."""
    num_rows: int
    """Rows of the full matrix: its outputs."""
    rows: range
    """Rows of this rank."""


class ColumnParallelLinear:
    """y = x W^T + b with the outputs divided over the axis; W may be several matrices one under the other.

        q | k | v  of rank 0   [rows of q, rows of k, rows of v] x in
        q | k | v  of rank 1   ...

    [T, in] on every rank -> [T, outputs of this rank].
    """

    def __init__(self, in_features: int, parts: Sequence[ColumnPart], *, has_bias: bool, context: LayerContext) -> None:
        self._parts = tuple(parts)
        self._in_features = in_features
        num_rows = sum(len(part.rows) for part in parts)
        self._weight_OI: Tensor | None = context.empty_linear(num_rows, in_features)
        self._bias_O: Tensor | None = context.empty(num_rows) if has_bias else None
        self._context = context
        self._linear: PackedLinear

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, in] -> [T, outputs of this rank]."""
        return self._linear(x_TI)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The fused weight and bias of this rank."""
        assert self._weight_OI is not None, "weights are gone after finish_loading"
        yield ShardedParameter(tensor=self._weight_OI, pieces=self._pieces(prefix, "weight", (self._in_features,)))
        if self._bias_O is not None:
            yield ShardedParameter(tensor=self._bias_O, pieces=self._pieces(prefix, "bias", ()))

    def finish_loading(self) -> None:
        """Hand weight and bias to the kernels."""
        assert self._weight_OI is not None, "finish_loading is called once"
        self._linear = self._context.pack_linear(self._weight_OI, self._bias_O)
        self._weight_OI = self._bias_O = None

    @property
    def gated(self) -> Callable[[Tensor], Tensor] | None:
        """`GatedLinear.gated` of gate and up, if the kernels have it; after `finish_loading`."""
        return self._linear.gated if isinstance(self._linear, GatedLinear) else None

    def _pieces(self, prefix: str, leaf: str, tail: tuple[int, ...]) -> tuple[Piece, ...]:
        pieces = []
        offset = 0
        for part in self._parts:
            pieces.append(
                Piece(
                    source=".".join(filter(None, (prefix, part.name, leaf))),
                    full_shape=(part.num_rows, *tail),
                    dim=0,
                    start=part.rows.start,
                    stop=part.rows.stop,
                    offset=offset,
                )
            )
            offset += len(part.rows)
        return tuple(pieces)


def even_parts(parts: Sequence[tuple[str, int]], context: LayerContext, *, what: str) -> list[ColumnPart]:
    """Matrices (name, outputs) that are each divided evenly; ParallelismError names `what` does not divide."""
    axis = context.axis
    return [ColumnPart(name, rows, even_range(rows, axis.rank, axis.size, what=what)) for name, rows in parts]


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values in one column-parallel matrix, divided by heads.

    With more ranks than key-value heads, neighbouring ranks hold the same head: see `kv_head_range`.
    [T, E] -> [T, (N + 2 K) * H], queries first, for the N query and K key-value heads of this rank.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        has_bias: bool,
        context: LayerContext,
    ) -> None:
        axis = context.axis
        heads = even_range(num_heads, axis.rank, axis.size, what="num_heads")
        kv_heads = kv_head_range(num_kv_heads, axis.rank, axis.size)
        self.heads = heads
        """Query heads of the whole model that this rank has."""
        self.kv_heads = kv_heads
        parts = [
            ColumnPart("q", num_heads * head_dim, _rows(heads, head_dim)),
            ColumnPart("k", num_kv_heads * head_dim, _rows(kv_heads, head_dim)),
            ColumnPart("v", num_kv_heads * head_dim, _rows(kv_heads, head_dim)),
        ]
        super().__init__(hidden_size, parts, has_bias=has_bias, context=context)


class RowParallelLinear:
    """y = x W^T + b with the inputs divided over the axis: [T, inputs of this rank] -> [T, out] on every rank.

    One all-reduce, after which the bias is added, once.
    """

    def __init__(
        self, in_features: int, out_features: int, *, has_bias: bool, context: LayerContext, what: str = "in_features"
    ) -> None:
        self._axis = context.axis
        self._in_features = in_features
        self._columns = even_range(in_features, self._axis.rank, self._axis.size, what=what)
        self._weight_OI: Tensor | None = context.empty_linear(out_features, len(self._columns))
        self._bias_O = context.empty(out_features) if has_bias else None
        self._context = context
        self._linear: PackedLinear

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, inputs of this rank] -> [T, out], complete on every rank."""
        y_TO = all_reduce(self._linear(x_TI), self._axis)
        return y_TO if self._bias_O is None else y_TO.add_(self._bias_O)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The weight's columns of this rank, and the whole bias."""
        assert self._weight_OI is not None, "weights are gone after finish_loading"
        piece = Piece(
            source=f"{prefix}.weight",
            full_shape=(self._weight_OI.shape[0], self._in_features),
            dim=1,
            start=self._columns.start,
            stop=self._columns.stop,
        )
        yield ShardedParameter(tensor=self._weight_OI, pieces=(piece,))
        if self._bias_O is not None:
            yield replicated(f"{prefix}.bias", self._bias_O)

    def finish_loading(self) -> None:
        """Hand the weight to the kernels; the bias too where no all-reduce comes between."""
        assert self._weight_OI is not None, "finish_loading is called once"
        is_whole = self._axis.size == 1
        self._linear = self._context.pack_linear(self._weight_OI, self._bias_O if is_whole else None)
        self._weight_OI = None
        if is_whole:
            self._bias_O = None


class PartialRowParallelLinear(RowParallelLinear):
    """RowParallelLinear without its all-reduce: ranks get summands, and the caller sums several layers' at once.

    The bias is in the summand of the first rank.
    """

    def __init__(
        self, in_features: int, out_features: int, *, has_bias: bool, context: LayerContext, what: str = "in_features"
    ) -> None:
        has_bias = has_bias and context.axis.rank == 0
        super().__init__(in_features, out_features, has_bias=has_bias, context=context, what=what)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, inputs of this rank] -> [T, out], this rank's summand."""
        return self._linear(x_TI)

    def finish_loading(self) -> None:
        """Hand the weight and the bias to the kernels."""
        assert self._weight_OI is not None, "finish_loading is called once"
        self._linear = self._context.pack_linear(self._weight_OI, self._bias_O)
        self._weight_OI = self._bias_O = None


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
