"""A mixture of experts in place of the MLP: a router, the experts, and what every token passes besides; one all-reduce.

Tensor parallel, every rank has a part of the inner dims of every expert; expert parallel, it has some experts whole.
Either way each rank adds up what it has of a token's experts, and the sum over the ranks is the block's result: tokens
are not sent to their experts, for every rank of the axis has all of them already.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from parallel.activation import clamped_gate
from parallel.collectives import all_reduce
from parallel.description import DecoderDescription, MoeDescription
from parallel.expert_router import Router
from parallel.kernels.base import ExpertWeights, RowGate
from parallel.kernels.linears import PackedExperts, RoutingExperts
from parallel.layer import LayerContext
from parallel.mlp import MLP
from parallel.shard import Piece, ShardedParameter, expert_ranges, replicated


class MoE:
    """sum over a token's experts of weight * expert(x), and the shared MLP. arXiv:1701.06538, arXiv:2401.06066."""

    def __init__(self, description: DecoderDescription, moe: MoeDescription, *, context: LayerContext) -> None:
        self._axis = context.axis
        self._router = Router(moe, description.hidden_size, context=context)
        self._experts = Experts(description, moe, context=context)
        self._shared: MLP | GatedMLP | None = None
        if moe.shared_intermediate_size is not None:
            shared = MLP(description, context=context, inner_size=moe.shared_intermediate_size, is_partial=True)
            self._shared = GatedMLP(shared, description.hidden_size, context=context) if moe.is_shared_gated else shared

    def __call__(self, x_TE: Tensor) -> Tensor:
        """[T, E] -> [T, E], complete on every rank of the axis."""
        y_TE = self._experts(x_TE, self._router)
        if self._shared is not None:
            y_TE += self._shared(x_TE)
        return all_reduce(y_TE, self._axis)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Yield those of the router, this rank's experts, and the shared MLP."""
        yield from self._router.sharded_parameters(f"{prefix}.router")
        yield from self._experts.sharded_parameters(f"{prefix}.experts")
        if self._shared is not None:
            yield from self._shared.sharded_parameters(f"{prefix}.shared")

    def finish_loading(self) -> None:
        """Lay the matrices out."""
        self._experts.finish_loading(self._router)
        self._router.finish_loading()
        if self._shared is not None:
            self._shared.finish_loading()


class GatedMLP:
    """What an MLP gives, times the sigmoid of one logit per token, which every rank computes."""

    def __init__(self, mlp: MLP, hidden_size: int, *, context: LayerContext) -> None:
        self._mlp = mlp
        self._kernels = context.kernels
        self._gate_1E: Tensor | None = context.empty(1, hidden_size)
        self._gate: RowGate

    def __call__(self, x_TE: Tensor) -> Tensor:
        """[T, E] -> [T, E], this rank's summand."""
        return self._gate(self._mlp(x_TE), x_TE)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Yield those of the MLP, and the gate's."""
        assert self._gate_1E is not None, "weights are gone after finish_loading"
        yield from self._mlp.sharded_parameters(prefix)
        yield replicated(f"{prefix}_gate.weight", self._gate_1E)

    def finish_loading(self) -> None:
        """Lay the matrices out."""
        assert self._gate_1E is not None, "finish_loading is called once"
        self._mlp.finish_loading()
        self._gate = self._kernels.pack_gate(self._gate_1E)
        self._gate_1E = None


class Experts:
    """This rank's experts, or its part of all of them; see `expert_ranges`."""

    def __init__(self, description: DecoderDescription, moe: MoeDescription, *, context: LayerContext) -> None:
        axis, hidden_size = context.axis, description.hidden_size
        self._moe = moe
        self._ids, self._inner = expert_ranges(moe, axis.rank, axis.size, expert_parallel=context.expert_parallel)
        num_experts, num_inner = len(self._ids), len(self._inner)
        # where a part of each expert is here, the sum over the ranks has its bias once: from the first
        has_down_bias = moe.expert_bias and (context.expert_parallel or axis.rank == 0)
        self._weights: ExpertWeights | None = ExpertWeights(
            into_XJE=context.empty(num_experts, 2 * num_inner, hidden_size, stays=True),
            down_XEI=context.empty(num_experts, hidden_size, num_inner, stays=True),
            into_bias_XJ=context.empty(num_experts, 2 * num_inner) if moe.expert_bias else None,
            down_bias_XE=context.empty(num_experts, hidden_size) if has_down_bias else None,
            activate=_activate(description, moe, context),
            activation=description.activation if moe.clamped_gate is None else None,
            clamped_gate=moe.clamped_gate,
        )
        self._context = context
        self._packed: PackedExperts
        self._route: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x_TE: Tensor, router: Router) -> Tensor:
        """[T, E] -> [T, E], this rank's summand of what the experts give that the router chooses."""
        if self._route is not None:
            return self._route(x_TE)
        experts_TC, weights_TC = router(x_TE)  # of the whole layer
        if self._ids.start:
            experts_TC = experts_TC - self._ids.start
        return self._packed(x_TE, experts_TC, weights_TC)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Yield those of each expert that is here."""
        assert self._weights is not None, "weights are gone after finish_loading"
        weights = self._weights
        for row, expert in enumerate(self._ids):
            name = f"{prefix}.{expert}"
            yield self._into(name, "weight", weights.into_XJE[row])
            if weights.into_bias_XJ is not None:
                yield self._into(name, "bias", weights.into_bias_XJ[row])
            down_EI = weights.down_XEI[row]
            piece = Piece(
                source=f"{name}.down.weight",
                full_shape=(len(down_EI), self._moe.intermediate_size),
                dim=1,
                start=self._inner.start,
                stop=self._inner.stop,
            )
            yield ShardedParameter(tensor=down_EI, pieces=(piece,))
            if weights.down_bias_XE is not None:
                yield replicated(f"{name}.down.bias", weights.down_bias_XE[row])

    def finish_loading(self, router: Router) -> None:
        """Hand all experts to the kernels, before the router's weight."""
        assert self._weights is not None, "finish_loading is called once"
        self._packed = self._context.pack_experts(self._weights)
        if isinstance(self._packed, RoutingExperts):
            self._route = self._packed.routed_by(self._moe, *router.weights)
        self._weights = None

    def _into(self, name: str, leaf: str, tensor: Tensor) -> ShardedParameter:
        """Gate and up of one expert: one under the other, or row by row in turn as the checkpoint has them."""
        full_rows, tail = self._moe.intermediate_size, tuple(tensor.shape[1:])
        start, stop = self._inner.start, self._inner.stop
        if self._moe.clamped_gate is not None:
            pieces = [
                Piece(
                    source=f"{name}.gate_up.{leaf}",
                    full_shape=(2 * full_rows, *tail),
                    dim=0,
                    start=2 * start,
                    stop=2 * stop,
                )
            ]
        else:
            pieces = [
                Piece(
                    source=f"{name}.{part}.{leaf}",
                    full_shape=(full_rows, *tail),
                    dim=0,
                    start=start,
                    stop=stop,
                    offset=offset,
                )
                for part, offset in (("gate", 0), ("up", stop - start))
            ]
        return ShardedParameter(tensor=tensor, pieces=tuple(pieces))


def _activate(
    description: DecoderDescription, moe: MoeDescription, context: LayerContext
) -> Callable[[Tensor], Tensor]:
    if moe.clamped_gate is not None:
        return clamped_gate(moe.clamped_gate)
    return context.kernels.gated(description.activation)
