"""What a linear layer that can tell its largest outputs is held to: its own product."""

import torch
from torch import Tensor

from parallel.kernels.base import PackedLinear, SearchedLinear
from parallel.kernels.sampling import largest_outputs


def check_largest(linear: PackedLinear, x_TI: Tensor) -> Tensor:
    """The places of the largest outputs, which are those of the product."""
    assert isinstance(linear, SearchedLinear)
    values_T, indices_T = linear.largest(x_TI)
    expected_values_T, expected_indices_T = largest_outputs(linear(x_TI))
    torch.testing.assert_close(values_T, expected_values_T, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices_T, expected_indices_T)
    return indices_T
