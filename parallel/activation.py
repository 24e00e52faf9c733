"""The nonlinear functions of MLPs."""

from collections.abc import Callable
from functools import partial
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.description import Activation, ClampedGate


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


def clamped_gate(gate: ClampedGate) -> Callable[[Tensor], Tensor]:
    """The function [T, 2I] -> [T, I] of a clamped gate, on any device."""
    alpha, limit = gate.alpha, gate.limit

    def multiply(gate_up_T2I: Tensor) -> Tensor:
        gate_TI = gate_up_T2I[..., 0::2].clamp(max=limit)
        up_TI = gate_up_T2I[..., 1::2].clamp(min=-limit, max=limit)
        return (up_TI + 1) * (gate_TI * torch.sigmoid(gate_TI * alpha))

    return multiply
