"""Norms, alone or with the addition to the residual stream before them. Every rank holds the whole weight."""

from collections.abc import Iterator
from typing import Protocol, assert_never

import torch
from torch import Tensor

from parallel.description import NormKind
from parallel.layer import LayerContext
from parallel.shard import ShardedParameter, replicated


class Norm(Protocol):
    """What stands between the residual stream and a block."""

    def __call__(self, x_TE: Tensor) -> Tensor:
        """The norm of x, which is left as it is; any leading dims."""

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); both inputs may be overwritten."""

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The whole weight."""

    def finish_loading(self) -> None:
        """Lay the weight out, once, when it is filled."""


def make_norm(kind: NormKind, shape: int | tuple[int, int], eps: float, *, context: LayerContext) -> Norm:
    """A norm over the last dim; with a shape [N, H], each of the N heads has its own weight."""
    match kind:
        case NormKind.RMS:
            return RMSNorm(shape, eps, context=context)
        case NormKind.RMS_PLUS_ONE:
            return PlusOneRMSNorm(shape, eps, context=context)
        case NormKind.LAYER:
            return LayerNorm(shape, eps, has_bias=True, context=context)
        case NormKind.LAYER_WITHOUT_BIAS:
            return LayerNorm(shape, eps, has_bias=False, context=context)
        case _:
            assert_never(kind)


class RMSNorm:
    """Scales the last dim to unit root mean square, then by a weight. arXiv:1910.07467."""

    def __init__(self, shape: int | tuple[int, int], eps: float, *, context: LayerContext) -> None:
        self._weight_E = _empty(shape, context.dtype, context)
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


class PlusOneRMSNorm(RMSNorm):
    """RMSNorm by 1 + the stored weight, in float32: 1 + a small number needs more bits than the number."""

    def __init__(self, shape: int | tuple[int, int], eps: float, *, context: LayerContext) -> None:
        super().__init__(shape, eps, context=context)
        self._weight_E = _empty(shape, torch.float32, context)

    def finish_loading(self) -> None:
        """Add the one, once."""
        self._weight_E.add_(1.0)


class LayerNorm:
    """Takes the mean away and scales to unit variance, then by a weight, and adds a bias. arXiv:1607.06450."""

    def __init__(self, shape: int | tuple[int, int], eps: float, *, has_bias: bool, context: LayerContext) -> None:
        self._weight_E = _empty(shape, context.dtype, context)
        self._bias_E = _empty(shape, context.dtype, context) if has_bias else None
        self._eps = eps
        self._layer_norm = context.kernels.layer_norm
        self._add_layer_norm = context.kernels.add_layer_norm

    def __call__(self, x_TE: Tensor) -> Tensor:
        """The norm of x, which is left as it is; any leading dims."""
        return self._layer_norm(x_TE, self._weight_E, self._bias_E, self._eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); both inputs may be overwritten."""
        return self._add_layer_norm(x_TE, residual_TE, self._weight_E, self._bias_E, self._eps)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The whole weight and bias."""
        yield replicated(f"{prefix}.weight", self._weight_E)
        if self._bias_E is not None:
            yield replicated(f"{prefix}.bias", self._bias_E)

    def finish_loading(self) -> None:
        """Nothing to lay out."""


class NoNorm:
    """Leaves the residual stream as it is, for layers that norm after their blocks only."""

    def __call__(self, x_TE: Tensor) -> Tensor:
        """x itself."""
        return x_TE

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, twice: the same tensor."""
        total_TE = residual_TE.add_(x_TE)
        return total_TE, total_TE

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """None."""
        yield from ()

    def finish_loading(self) -> None:
        """Nothing to lay out."""


def _empty(shape: int | tuple[int, int], dtype: torch.dtype, context: LayerContext) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=context.device)
