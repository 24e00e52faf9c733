"""Experts whose matrices are laid out for the compiled products; a layer's are one call of the library (experts.h)."""

import ctypes

import torch
from torch import Tensor

from parallel.description import Activation
from parallel.kernels.base import ExpertWeights
from parallel.kernels.native.library import ExpertMatrices, Programs
from parallel.kernels.native.packed_linear import PANEL


def can_pack_experts(weights: ExpertWeights) -> bool:
    """Whether the compiled products take these experts."""
    both = (weights.into_XJE, weights.down_XEI)
    (_, num_gates, hidden_size), inner_size = weights.into_XJE.shape, weights.down_XEI.shape[2]
    is_whole = num_gates == 2 * inner_size and inner_size % PANEL == 0 and hidden_size % PANEL == 0
    are_dense = all(weight.dtype is torch.bfloat16 and weight.is_contiguous() for weight in both)
    return weights.activation is Activation.SILU and is_whole and are_dense


class NativeExperts:
    """Implements `PackedExperts`; the weights are laid out where they are."""

    def __init__(self, weights: ExpertWeights, programs: Programs, num_threads: int) -> None:
        self._weights = weights
        self._run = programs.run_experts
        self._num_threads = num_threads
        for weight in (weights.into_XJE, weights.down_XEI):
            num_experts, num_out, num_in = weight.shape
            address = weight.data_ptr()
            programs.pack_matrix(address, address, num_experts * num_out, num_in, num_threads)
        self._matrices = ExpertMatrices(
            into=weights.into_XJE.data_ptr(),
            into_bias=_address(weights.into_bias_XJ),
            down=weights.down_XEI.data_ptr(),
            down_bias=_address(weights.down_bias_XE),
            num_experts=len(weights.down_XEI),
            hidden_size=weights.down_XEI.shape[1],
            inner_size=weights.down_XEI.shape[2],
        )

    def __call__(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """See `PackedExperts`."""
        x_TE = x_TE if x_TE.stride(1) == 1 else x_TE.contiguous()
        experts_TC, weights_TC = experts_TC.contiguous(), weights_TC.contiguous()
        out_TE = x_TE.new_empty(x_TE.shape)
        self._run(
            *(out_TE.data_ptr(), x_TE.data_ptr(), x_TE.stride(0), ctypes.byref(self._matrices)),
            *(experts_TC.data_ptr(), weights_TC.data_ptr(), *experts_TC.shape, self._num_threads),
        )
        return out_TE


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
