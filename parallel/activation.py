"""The nonlinear functions of MLPs."""

from collections.abc import Callable
from functools import partial
from typing import assert_never

import torch.nn.functional as F
from torch import Tensor

from parallel.description import Activation


def activation_function(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The function, elementwise, on any device."""
    match activation:
        case Activation.SILU:
            return F.silu
        case Activation.GELU:
            return F.gelu
        case Activation.GELU_TANH:
            return partial(F.gelu, approximate="tanh")
        case Activation.RELU:
            return F.relu
        case _:
            assert_never(activation)
