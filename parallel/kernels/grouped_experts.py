"""Experts as two grouped matrix products over all of them: for accelerators, where the host must not wait.

Pairs of a token and one of its experts are sorted by expert; where each expert's rows end stays on the device:

    rows   | expert 0 | expert 2 ....... | expert 3 | experts of other ranks |
    ends              ^ 0, 1             ^ 2        ^ 3

What the grouped product does past the last end is not said, so that those rows are struck out of the sum.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kernels.base import ExpertWeights

GroupedLinear = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [R, in], weight [X, out, in], ends [X] int32) -> [R, out]: rows up to ends[0] by expert 0, and so on."""


class GroupedExperts:
    """Implements `PackedExperts` on any device; no shape depends on what the tokens chose."""

    def __init__(self, weights: ExpertWeights, grouped_linear: GroupedLinear) -> None:
        self._weights = weights
        self._grouped_linear = grouped_linear
        self._experts_X = torch.arange(len(weights.into_XJE), device=weights.into_XJE.device)

    def __call__(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """See `PackedExperts`; R are the T * C pairs."""
        weights, (num_tokens, num_chosen) = self._weights, experts_TC.shape
        num_experts = len(self._experts_X)
        is_here_TC = (experts_TC >= 0) & (experts_TC < num_experts)
        sorted_R, order_R = experts_TC.where(is_here_TC, num_experts).flatten().sort(stable=True)
        ends_X = torch.searchsorted(sorted_R, self._experts_X, right=True, out_int32=True)
        row_expert_R = sorted_R.clamp(max=num_experts - 1)

        gate_up_RJ = self._grouped_linear(x_TE[order_R // num_chosen], weights.into_XJE, ends_X)
        if weights.into_bias_XJ is not None:
            gate_up_RJ = gate_up_RJ + weights.into_bias_XJ[row_expert_R]
        result_RE = self._grouped_linear(weights.activate(gate_up_RJ), weights.down_XEI, ends_X)
        if weights.down_bias_XE is not None:
            result_RE = result_RE + weights.down_bias_XE[row_expert_R]

        weighted_RE = result_RE.float() * weights_TC.flatten()[order_R].unsqueeze(1)
        weighted_RE = weighted_RE.where((sorted_R < num_experts).unsqueeze(1), 0.0)
        pairs_RE = torch.empty_like(weighted_RE).index_copy_(0, order_R, weighted_RE)
        return pairs_RE.view(num_tokens, num_chosen, -1).sum(1).to(x_TE.dtype)


def torch_grouped_linear(x_RI: Tensor, weight_XOI: Tensor, ends_X: Tensor) -> Tensor:
    """A `GroupedLinear`. On CUDA see `is_fast_in_torch`; elsewhere torch runs one product after the other."""
    return F.grouped_mm(x_RI, weight_XOI.mT, offs=ends_X)


def is_fast_in_torch(weight_XOI: Tensor) -> bool:
    """Whether torch has a kernel of its own for this on CUDA; without it, it copies the ends to the host and waits."""
    is_aligned = weight_XOI.shape[1] % 8 == 0 and weight_XOI.shape[2] % 8 == 0  # rows of 16 bytes
    is_covered = torch.cuda.get_device_capability(weight_XOI.device)[0] in (9, 10)  # Hopper, Blackwell
    return weight_XOI.dtype is torch.bfloat16 and is_aligned and is_covered
