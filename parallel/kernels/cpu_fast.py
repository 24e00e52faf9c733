"""The operations of the model on a CPU, in plain torch without a compiler, with as few calls as torch allows.

At batch 1 a layer of a small model takes some 500 µs, so each call of a few µs counts; at large batches the
temporaries do. Meaning and fallback are reference.py's; attention and linear layers have files of their own.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.activation import activation_function
from parallel.description import Activation
from parallel.kernels.base import (
    AttentionMeta,
    AttentionParams,
    ExpertWeights,
    HeadsLinear,
    LayerCache,
    RowGate,
    RunLayers,
)
from parallel.kernels.cpu_attention import CpuPagedAttention
from parallel.kernels.cpu_experts import CpuExperts
from parallel.kernels.cpu_linear import pack_linear
from parallel.kernels.int8_linear import Int8Linear
from parallel.kernels.linears import PackedExperts, PackedLinear
from parallel.kernels.reference import ReferenceKernels, ReferenceLinear, rotate_then_write
from parallel.mesh import Axis


class CpuKernels:
    """Fast `Kernels` for a CPU. Holds what the layers of a step share: one object per model, one thread."""

    name = "cpu"
    attention_backend = "torch"
    quantizes_experts = True

    def __init__(self, slowness: str = "") -> None:
        """`slowness`: see `Kernels`."""
        self.slowness = slowness
        self._reference = ReferenceKernels()
        self._attention = CpuPagedAttention()
        self._eps: dict[float, Tensor] = {}

    def empty_linear(self, num_out: int, num_in: int, dtype: torch.dtype) -> Tensor:
        """Anywhere."""
        return torch.empty(num_out, num_in, dtype=dtype)

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        return pack_linear(weight_OI, bias_O)

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None, *, is_shared: bool) -> PackedLinear:
        """See `Kernels.pack_head`."""
        return ReferenceLinear(weight_VE, bias_V) if is_shared else pack_linear(weight_VE, bias_V)

    def quantize_linear(self, weight_OI: Tensor, bias_O: Tensor | None, *, keeps_weight: bool = False) -> Int8Linear:
        """See `Kernels.quantize_linear`."""
        return Int8Linear(weight_OI, bias_O)

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        """See `Kernels.pack_experts`."""
        return CpuExperts(weights)

    def quantize_experts(self, weights: ExpertWeights) -> PackedExperts:
        """See `Kernels.quantize_experts`."""
        return CpuExperts(weights, Int8Linear)

    def pack_gate(self, weight_1E: Tensor) -> RowGate:
        """See `Kernels.pack_gate`."""
        linear = self.pack_linear(weight_1E, None)
        return lambda y_TE, x_TE: y_TE.mul_(linear(x_TE).sigmoid_())

    def pack_heads(self, weight_NIO: Tensor) -> HeadsLinear:
        """See `Kernels.pack_heads`."""
        return self._reference.pack_heads(weight_NIO)

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        eps_1 = self._eps.get(eps)
        if eps_1 is None:
            eps_1 = self._eps[eps] = torch.tensor([eps], dtype=torch.float32)
        x32_TE = x_TE.float()
        norm_T1 = torch.linalg.vector_norm(x32_TE, 2, -1, True)
        scale_T1 = torch.addcmul(eps_1, norm_T1, norm_T1, value=1 / x_TE.shape[-1]).rsqrt_()
        if x32_TE is x_TE:
            return (x_TE * scale_T1).mul_(weight_E)
        return x32_TE.mul_(scale_T1).mul_(weight_E).to(x_TE.dtype)

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`; the residual is written in place."""
        residual_TE.add_(x_TE)
        return self.rms_norm(residual_TE, weight_E, eps), residual_TE

    def sum_squares(self, *tensors_TNH: Tensor) -> Tensor:
        """See `Kernels.sum_squares`."""
        return self._reference.sum_squares(*tensors_TNH)

    def norm_part(self, x_TNH: Tensor, squares_T: Tensor, weight_NH: Tensor, *, num_summed: int, eps: float) -> Tensor:
        """See `Kernels.norm_part`."""
        return self._reference.norm_part(x_TNH, squares_T, weight_NH, num_summed=num_summed, eps=eps)

    def layer_norm(self, x_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float) -> Tensor:
        """See `Kernels.layer_norm`."""
        if weight_E.dim() != 1:
            return self._reference.layer_norm(x_TE, weight_E, bias_E, eps)
        return F.layer_norm(x_TE, weight_E.shape, weight_E, bias_E, eps)

    def add_layer_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_layer_norm`; the residual is written in place."""
        residual_TE.add_(x_TE)
        return self.layer_norm(residual_TE, weight_E, bias_E, eps), residual_TE

    def rotary(
        self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, is_interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.rotary`."""
        if is_interleaved or 2 * cos_TR.shape[-1] != q_TNH.shape[-1]:
            return self._reference.rotary(q_TNH, k_TKH, cos_TR, sin_TR, is_interleaved=is_interleaved)
        both = _side_by_side(q_TNH, k_TKH)
        if both is None:
            return _rotate(q_TNH, cos_TR, sin_TR), _rotate(k_TKH, cos_TR, sin_TR)
        num_heads = q_TNH.shape[1]
        rotated = _rotate(both, cos_TR, sin_TR)
        return rotated[:, :num_heads], rotated[:, num_heads:]

    rotate_and_write = rotate_then_write

    def activated(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """See `Kernels.activated`."""
        return activation_function(activation)

    def gated(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """See `Kernels.gated`."""
        return self.silu_mul if activation is Activation.SILU else self._reference.gated(activation)

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
        return F.silu(gate_TI).mul_(up_TI)

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        """See `Kernels.write_cache`."""
        if cache.k_scale_BPK is not None:
            self._reference.write_cache(k_TKH, v_TKH, cache, slot_mapping_T)
            return
        cache.k_BPKH.flatten(0, 1).index_copy_(0, slot_mapping_T, k_TKH)
        cache.v_BPKH.flatten(0, 1).index_copy_(0, slot_mapping_T, v_TKH)

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        """See `Kernels.compile_layers`."""
        return run

    def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`."""
        if not params.is_plain:
            return self._reference.attention(q_TNH, cache, meta, params)
        return self._attention(q_TNH, cache, meta, params)


def _rotate(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate every head by its token's angles, in float32."""
    num_tokens, num_heads, head_dim = x_TNH.shape
    x_TN2R = x_TNH.view(num_tokens, num_heads, 2, head_dim // 2).float()
    x1_TNR, x2_TNR = x_TN2R.unbind(2)
    rotated_TN2R = x_TN2R * cos_TR[:, None, None]
    sin_T1R = sin_TR[:, None]
    rotated_TN2R[:, :, 0].addcmul_(x2_TNR, sin_T1R, value=-1)
    rotated_TN2R[:, :, 1].addcmul_(x1_TNR, sin_T1R)
    return rotated_TN2R.view(num_tokens, num_heads, head_dim).to(x_TNH.dtype)


def _side_by_side(q_TNH: Tensor, k_TKH: Tensor) -> Tensor | None:
    """Queries and keys as one [T, N + K, H] view, where they are neighbours in the output of one fused product."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    is_neighbour = (
        k_TKH.storage_offset() == q_TNH.storage_offset() + num_heads * head_dim
        and q_TNH.stride() == k_TKH.stride()
        and q_TNH.stride()[1:] == (head_dim, 1)
        and q_TNH.dtype == k_TKH.dtype
        and q_TNH.untyped_storage().data_ptr() == k_TKH.untyped_storage().data_ptr()
    )
    if not is_neighbour:
        return None
    return q_TNH.as_strided((num_tokens, num_heads + num_kv_heads, head_dim), q_TNH.stride())
