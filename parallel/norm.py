"""RMSNorm, alone or with the addition to the residual stream before it. Every rank holds the whole weight."""

from collections.abc import Iterator

from torch import Tensor

from parallel.layer import LayerContext
from parallel.shard import ShardedParameter, replicated


class RMSNorm:
    """Scales the last dim to unit root mean square, then by a weight. arXiv:1910.07467."""

    def __init__(self, size: int, eps: float, *, context: LayerContext) -> None:
        self._weight_E = context.empty(size)
        self._eps = eps
        self._rms_norm = context.kernels.rms_norm
        self._add_rms_norm = context.kernels.add_rms_norm

    def __call__(self, x_TE: Tensor) -> Tensor:
        """The norm of x, which is left as it is; any leading dims."""
        return self._rms_norm(x_TE, self._weight_E, self._eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); both inputs may be overwritten."""
        return self._add_rms_norm(x_TE, residual_TE, self._weight_E, self._eps)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The whole weight."""
        yield replicated(f"{prefix}.weight", self._weight_E)

    def finish_loading(self) -> None:
        """Nothing to lay out."""
