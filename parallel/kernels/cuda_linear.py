"""Linear layers on CUDA: torch multiplies many rows, Triton one row, which is a step that decodes one sequence, and few
rows in 8 bits, with what lies around the products.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.kernels.int8_linear import Int8Linear
from parallel.kernels.reference import ReferenceLinear
from parallel.kernels.triton_int8_linear import multiply_int8, quantize_rows, scale_sums
from parallel.kernels.triton_linear import multiply_row, multiply_row_gated

_MOST_INT8_ROWS = 64
"""Most rows of a product in 8 bits that is ours. More are for torch's, which takes multiples of 8."""


class CudaLinear(ReferenceLinear):
    """Implements `GatedLinear`.

    Args:
        weight_OI, bias_O: as they were loaded.
        silu_mul: as `Kernels.silu_mul`.
    """

    __slots__ = ("_silu_mul",)

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> None:
        super().__init__(weight_OI, bias_O)
        self._silu_mul = silu_mul

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, in] -> [T, out], dtype of x, bias added."""
        return multiply_row(x_TI, self._weight_OI, self._bias_O) if len(x_TI) == 1 else super().__call__(x_TI)

    def gated(self, x_TI: Tensor) -> Tensor:
        """See `GatedLinear`."""
        if len(x_TI) == 1:
            return multiply_row_gated(x_TI, self._weight_OI, self._bias_O)
        return self._silu_mul(super().__call__(x_TI))


class CudaInt8Linear(Int8Linear):
    """Implements `GatedLinear`, with the bits of its base. The arguments are as those of `CudaLinear`."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> None:
        super().__init__(weight_OI, bias_O)
        self._silu_mul = silu_mul

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `PackedLinear`."""
        if self._is_ours(x_TI):
            return self._multiply(x_TI, is_gated=False)
        num_rows = -(-len(x_TI) // 8) * 8
        integers_TI, scales_T = quantize_rows(x_TI, num_rows=num_rows)
        sums_TO = torch._int_mm(integers_TI, self._weight_OI.T)
        return scale_sums(sums_TO, scales_T, self._scales_O, self._bias_O, dtype=x_TI.dtype)

    def gated(self, x_TI: Tensor) -> Tensor:
        """See `GatedLinear`."""
        return self._multiply(x_TI, is_gated=True) if self._is_ours(x_TI) else self._silu_mul(self(x_TI))

    def _is_ours(self, x_TI: Tensor) -> bool:
        return len(x_TI) <= _MOST_INT8_ROWS or not self._is_integer

    def _multiply(self, x_TI: Tensor, *, is_gated: bool) -> Tensor:
        integers_TI, scales_T = quantize_rows(x_TI)
        return multiply_int8(
            *(integers_TI, scales_T),
            *(self._weight_OI, self._scales_O),
            self._bias_O,
            dtype=x_TI.dtype,
            is_gated=is_gated,
        )
