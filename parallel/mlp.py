"""The gated feed-forward block: gate and up in one column-parallel matrix, down row-parallel; one all-reduce."""

from collections.abc import Iterator

from torch import Tensor

from parallel.description import DecoderDescription
from parallel.layer import LayerContext
from parallel.linear import ColumnParallelLinear, RowParallelLinear, even_parts
from parallel.shard import ShardedParameter


class GatedMLP:
    """down(silu(gate(x)) * up(x)). arXiv:2002.05202."""

    def __init__(self, description: DecoderDescription, *, context: LayerContext) -> None:
        hidden_size, inner_size = description.hidden_size, description.intermediate_size
        parts = even_parts((("gate", inner_size), ("up", inner_size)), context, what="intermediate_size")
        self._gate_up = ColumnParallelLinear(hidden_size, parts, has_bias=description.mlp_bias, context=context)
        self._down = RowParallelLinear(
            inner_size, hidden_size, has_bias=description.mlp_bias, context=context, what="intermediate_size"
        )
        self._silu_mul = context.kernels.silu_mul

    def __call__(self, x_TE: Tensor) -> Tensor:
        """[T, E] -> [T, E], complete on every rank of the axis."""
        return self._down(self._silu_mul(self._gate_up(x_TE)))

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Those of gate, up and down."""
        yield from self._gate_up.sharded_parameters(prefix)
        yield from self._down.sharded_parameters(f"{prefix}.down")

    def finish_loading(self) -> None:
        """Lay out the matrices."""
        self._gate_up.finish_loading()
        self._down.finish_loading()
