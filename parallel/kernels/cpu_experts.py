"""Experts on a CPU: each expert's two matrices packed like those of any linear layer, only the chosen ones run."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from parallel.kernels.base import ExpertWeights
from parallel.kernels.cpu_linear import pack_linear
from parallel.kernels.linears import PackedLinear
from parallel.kernels.reference import pack_each


class CpuExperts:
    """Tokens are sorted by expert, so that each matrix is read once a step.

    Args:
        pack: lays out one matrix, with its bias.
    """

    def __init__(
        self, weights: ExpertWeights, pack: Callable[[Tensor, Tensor | None], PackedLinear] = pack_linear
    ) -> None:
        self._activate = weights.activate
        self._into = pack_each(weights.into_XJE, weights.into_bias_XJ, pack)
        self._down = pack_each(weights.down_XEI, weights.down_bias_XE, pack)

    def __call__(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """See `PackedExperts`."""
        total_TE = torch.zeros(x_TE.shape, dtype=torch.float32)
        if len(x_TE) == 1:
            self._add_one(x_TE, experts_TC, weights_TC, total_TE)
        else:
            self._add_many(x_TE, experts_TC, weights_TC, total_TE)
        return total_TE.to(x_TE.dtype)

    def _add_one(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor, total_TE: Tensor) -> None:
        """One token: nothing to sort or to gather; in the order of the experts, as among many tokens."""
        for expert, weight in sorted(zip(experts_TC[0].tolist(), weights_TC[0].tolist(), strict=True)):
            if 0 <= expert < len(self._into):
                total_TE.add_(self._run(expert, x_TE), alpha=weight)

    def _add_many(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor, total_TE: Tensor) -> None:
        num_experts, num_chosen = len(self._into), experts_TC.shape[1]
        sorted_X, order_X = experts_TC.flatten().sort(stable=True)
        tokens = order_X // num_chosen
        weights_X1 = weights_TC.flatten()[order_X].unsqueeze(1)
        starts = torch.searchsorted(sorted_X, torch.arange(num_experts + 1)).tolist()
        for expert, (start, stop) in enumerate(pairwise(starts)):
            if start < stop:
                mine = tokens[start:stop]
                result_TE = self._run(expert, x_TE[mine])
                total_TE.index_add_(0, mine, result_TE * weights_X1[start:stop])

    def _run(self, expert: int, x_TE: Tensor) -> Tensor:
        return self._down[expert](self._activate(self._into[expert](x_TE)))
