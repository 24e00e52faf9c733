"""The feed-forward block: what leads in is column-parallel, what leads out row-parallel; one all-reduce."""

from collections.abc import Callable, Iterator

from torch import Tensor

from parallel.description import Activation, DecoderDescription
from parallel.layer import LayerContext
from parallel.linear import ColumnParallelLinear, PartialRowParallelLinear, RowParallelLinear, even_parts
from parallel.shard import ShardedParameter


class MLP:
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202), gate and up in one matrix; or down(act(up(x)))."""

    def __init__(
        self,
        description: DecoderDescription,
        *,
        context: LayerContext,
        inner_size: int | None = None,
        is_partial: bool = False,
    ) -> None:
        """`inner_size` None: that of the description. `is_partial`: the all-reduce is left to the caller."""
        hidden_size, inner_size = description.hidden_size, inner_size or description.intermediate_size
        names = ("gate", "up") if description.is_mlp_gated else ("up",)
        parts = even_parts([(name, inner_size) for name in names], context, what="intermediate_size")
        self._into = ColumnParallelLinear(hidden_size, parts, has_bias=description.mlp_bias, context=context)
        self._down = (PartialRowParallelLinear if is_partial else RowParallelLinear)(
            inner_size, hidden_size, has_bias=description.mlp_bias, context=context, what="intermediate_size"
        )
        self._is_swiglu = description.is_mlp_gated and description.activation is Activation.SILU
        kernels = context.kernels
        self._activate = (kernels.gated if description.is_mlp_gated else kernels.activated)(description.activation)
        self._into_activated: Callable[[Tensor], Tensor] = lambda x_TE: self._activate(self._into(x_TE))

    def __call__(self, x_TE: Tensor) -> Tensor:
        """[T, E] -> [T, E], complete on every rank of the axis, or this rank's summand where it is partial."""
        return self._down(self._into_activated(x_TE))

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Yield those of gate, up and down."""
        yield from self._into.sharded_parameters(prefix)
        yield from self._down.sharded_parameters(f"{prefix}.down")

    def finish_loading(self) -> None:
        """Lay out the matrices."""
        self._into.finish_loading()
        if self._is_swiglu and (gated := self._into.gated) is not None:
            self._into_activated = gated
        self._down.finish_loading()
