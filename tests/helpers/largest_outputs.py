"""What a linear layer that can tell its largest outputs is held to: its own product."""

import torch
from torch import Tensor

from parallel.kernels.base import DrawnLinear, PackedLinear, SearchedLinear
from parallel.kernels.sampling import ChooseTokens, Draws, largest_outputs


def check_largest(linear: PackedLinear, x_TI: Tensor) -> Tensor:
    """The places of the largest outputs, which are those of the product."""
    assert isinstance(linear, SearchedLinear)
    values_T, indices_T = linear.largest(x_TI)
    expected_values_T, expected_indices_T = largest_outputs(linear(x_TI))
    torch.testing.assert_close(values_T, expected_values_T, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices_T, expected_indices_T)
    return indices_T


def check_drawn(linear: PackedLinear, x_TI: Tensor, draws: Draws, choose: ChooseTokens) -> Tensor:
    """What is drawn, by draws that limit nothing: what is chosen from the product."""
    assert isinstance(linear, DrawnLinear)
    indices_T = linear.drawn(x_TI, draws.noise)
    assert torch.equal(indices_T, choose(linear(x_TI), draws))
    return indices_T
