"""Experts whose matrices are laid out for the compiled products; a layer's are one call of the library (experts.h)."""

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from parallel.description import Activation, MoeDescription, RouterScore
from parallel.host_memory import HugePages
from parallel.kernels.base import ExpertWeights
from parallel.kernels.native.int8_linear import pack_int8
from parallel.kernels.native.library import Int8Operations, Programs
from parallel.kernels.native.packed_linear import PANEL, NativeLinear, in_rows
from parallel.kernels.native.structures import EXPERT_SCORES, ExpertChoice, ExpertLayer, ExpertMatrices
from parallel.kernels.native.tape import Recorder, Tape


def can_pack_experts(weights: ExpertWeights, programs: Programs) -> bool:
    """Whether the compiled products take these experts."""
    both = (weights.into_XJE, weights.down_XEI)
    (_, num_gates, hidden_size), inner_size = weights.into_XJE.shape, weights.down_XEI.shape[2]
    is_whole = num_gates == 2 * inner_size and inner_size % PANEL == 0 and hidden_size % PANEL == 0
    are_dense = all(weight.dtype is programs.dtype and weight.is_contiguous() for weight in both)
    is_gate_known = weights.activation is Activation.SILU or weights.clamped_gate is not None
    return is_gate_known and is_whole and are_dense


class NativeExperts:
    """Implements `RoutingExperts`; the weights are laid out where they are, or, in 8 bits, given up.

    Args:
        int8: what multiplies in 8 bits; None: experts stay in the dtype of the model.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        programs: Programs,
        recorder: Recorder,
        num_threads: int,
        *,
        int8: Int8Operations | None = None,
    ) -> None:
        self._programs = programs
        self._recorder = recorder
        self._num_threads = num_threads
        if weights.clamped_gate is not None:
            for into in (weights.into_XJE, weights.into_bias_XJ):
                if into is not None:
                    _put_gates_first(into)
        into, down = (self._pack(weight.flatten(0, 1), int8) for weight in (weights.into_XJE, weights.down_XEI))
        self._kept = [into, down, weights.into_bias_XJ, weights.down_bias_XE]
        """What the library has addresses of."""
        num_experts, hidden_size, inner_size = weights.down_XEI.shape
        self._matrices = ExpertMatrices(
            into=into.data_ptr(),
            into_bias=_address(weights.into_bias_XJ),
            down=down.data_ptr(),
            down_bias=_address(weights.down_bias_XE),
            num_experts=num_experts,
            hidden_size=hidden_size,
            inner_size=inner_size,
            clamp_alpha=weights.clamped_gate.alpha if weights.clamped_gate else 0.0,
            clamp_limit=weights.clamped_gate.limit if weights.clamped_gate else 0.0,
            is_int8=int8 is not None,
        )

    def _pack(self, weight_OI: Tensor, int8: Int8Operations | None) -> Tensor:
        """Lay out the matrices of all experts, one under the other."""
        if int8 is not None:
            return pack_int8(weight_OI, int8, self._num_threads, memory=HugePages(), keeps_weight=False)
        address = weight_OI.data_ptr()
        self._programs.pack_matrix(address, address, *weight_OI.shape, self._num_threads)
        return weight_OI

    def __call__(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """See `PackedExperts`."""
        x_TE, experts_TC, weights_TC = in_rows(x_TE), experts_TC.contiguous(), weights_TC.contiguous()
        out_TE = x_TE.new_empty(x_TE.shape)
        self._programs.run_experts(
            *(out_TE.data_ptr(), x_TE.data_ptr(), x_TE.stride(0), len(x_TE), experts_TC.data_ptr()),
            *(weights_TC.data_ptr(), experts_TC.shape[1], ctypes.byref(self._matrices), self._num_threads),
        )
        return out_TE

    def routed_by(
        self, moe: MoeDescription, weight_XE: Tensor, bias_X: Tensor | None, choice_bias_X: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        """See `RoutingExperts`; where all experts are here, and nothing of the router is lost in the model's dtype."""
        dtype = self._programs.dtype
        if not all(x is None or torch.equal(x.to(dtype).to(x.dtype), x) for x in (weight_XE, bias_X)):
            return None
        is_by_logits = moe.num_chosen_groups == moe.num_groups and choice_bias_X is None
        if moe.num_experts != self._matrices.num_experts or not (is_by_logits or moe.score is RouterScore.SIGMOID):
            return None
        keeps_sums = weight_XE.dtype is torch.float32
        choice = ExpertChoice(
            num_chosen=moe.num_chosen,
            score=EXPERT_SCORES.index(moe.score),
            is_normalized=moe.is_normalized,
            multiplier=moe.weight_multiplier,
            num_groups=moe.num_groups,
            num_chosen_groups=moe.num_chosen_groups,
            bias=_address(choice_bias_X),
            are_logits_float=keeps_sums,
        )
        linear = NativeLinear(
            _in_whole_panels(weight_XE.to(dtype)),
            None if bias_X is None else _in_whole_panels(bias_X.to(dtype)),
            self._programs,
            self._recorder,
            self._num_threads,
            memory=HugePages(),
            keeps_sums=keeps_sums,
        )
        self._kept.append(choice_bias_X)
        return partial(self._route, linear, ExpertLayer(matrices=self._matrices, choice=choice))

    def _route(self, router: NativeLinear, layer: ExpertLayer, x_TE: Tensor) -> Tensor:
        x_TE = in_rows(x_TE)
        logits_TX = router(x_TE)
        out_TE = x_TE.new_empty(x_TE.shape)
        self._programs.choose_and_run_experts(
            *(out_TE.data_ptr(), x_TE.data_ptr(), x_TE.stride(0), len(x_TE)),
            *(logits_TX.data_ptr(), logits_TX.stride(0) * logits_TX.itemsize, ctypes.byref(layer), self._num_threads),
        )
        self._recorder.note(Tape.experts, out_TE, x_TE, logits_TX, layer)
        return out_TE


def _put_gates_first(into_XJ: Tensor) -> None:
    """Rows that alternate, of each expert, become all gates and then all that they gate, in place."""
    for expert in into_XJ:
        expert.copy_(torch.cat((expert[0::2], expert[1::2])))


def _in_whole_panels(x: Tensor) -> Tensor:
    """Return a copy with zeros after its rows, so that the compiled products take it, and lay it out where it is."""
    return torch.cat([x, x.new_zeros(-len(x) % PANEL, *x.shape[1:])])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
