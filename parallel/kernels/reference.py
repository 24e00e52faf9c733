"""Every operation in plain torch, on any device: the definition that the fast kernels are tested against.

Written for clearness; attention loops over sequences and works in float32. Shape letters as in base.py, and
G query heads per key-value head, Q queries and C keys of one sequence.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.activation import activation_function
from parallel.description import Activation
from parallel.kernels.base import (
    AttentionMeta,
    AttentionParams,
    ExpertWeights,
    HeadsLinear,
    Kernels,
    LayerCache,
    RowGate,
    RunLayers,
)
from parallel.kernels.int8_cache import write_half
from parallel.kernels.int8_linear import Int8Linear
from parallel.kernels.linears import PackedExperts, PackedLinear
from parallel.mesh import Axis

_MOST_SCORE_BYTES = 256 << 20
"""Bytes of the scores of a piece of a sequence's queries, of which attention has up to three copies at a time. The
queries of a chunk are taken in such pieces, or its scores would grow with the context, which no profiling run can
foresee."""


class ReferenceLinear:
    """A weight as it was loaded."""

    __slots__ = ("_bias_O", "_weight_OI")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, in] -> [T, out], dtype of x, bias added."""
        return F.linear(x_TI, self._weight_OI, self._bias_O)


class ReferenceExperts:
    """One expert after the other; `pack` lays out one matrix, with its bias."""

    def __init__(
        self, weights: ExpertWeights, pack: Callable[[Tensor, Tensor | None], PackedLinear] = ReferenceLinear
    ) -> None:
        self._activate = weights.activate
        self._into = pack_each(weights.into_XJE, weights.into_bias_XJ, pack)
        self._down = pack_each(weights.down_XEI, weights.down_bias_XE, pack)

    def __call__(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """See `PackedExperts`."""
        total_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        for expert, (into, down) in enumerate(zip(self._into, self._down, strict=True)):
            tokens, choices = torch.where(experts_TC == expert)
            if len(tokens):
                result_TE = down(self._activate(into(x_TE[tokens]))).float() * weights_TC[tokens, choices].unsqueeze(1)
                total_TE.index_add_(0, tokens, result_TE)
        return total_TE.to(x_TE.dtype)


def pack_each(
    weight_XOI: Tensor, bias_XO: Tensor | None, pack: Callable[[Tensor, Tensor | None], PackedLinear]
) -> list[PackedLinear]:
    """The matrix of each expert, laid out by `pack`."""
    biases = [None] * len(weight_XOI) if bias_XO is None else list(bias_XO.unbind())
    return [pack(weight, bias) for weight, bias in zip(weight_XOI.unbind(), biases, strict=True)]


def rotate_then_write(
    kernels: Kernels,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    cache: LayerCache,
    slot_mapping_T: Tensor,
    *,
    is_interleaved: bool,
) -> Tensor:
    """`Kernels.rotate_and_write` of kernels that have no operation for both: one after the other."""
    q_TNH, k_TKH = kernels.rotary(q_TNH, k_TKH, cos_TR, sin_TR, is_interleaved=is_interleaved)
    kernels.write_cache(k_TKH, v_TKH, cache, slot_mapping_T)
    return q_TNH


class ReferenceKernels:
    """Implements `Kernels`; see there for what each operation means."""

    name = "reference"
    attention_backend = "torch"
    slowness = ""
    quantizes_experts = True

    def empty_linear(self, num_out: int, num_in: int, dtype: torch.dtype) -> Tensor:
        """Anywhere."""
        return torch.empty(num_out, num_in, dtype=dtype)

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
        """Keep the weight as it is."""
        return ReferenceLinear(weight_OI, bias_O)

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None, *, is_shared: bool) -> PackedLinear:
        """Keep the weight as it is."""
        return ReferenceLinear(weight_VE, bias_V)

    def quantize_linear(self, weight_OI: Tensor, bias_O: Tensor | None, *, keeps_weight: bool = False) -> PackedLinear:
        """See `Kernels.quantize_linear`."""
        return Int8Linear(weight_OI, bias_O)

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        """Keep them as they are."""
        return ReferenceExperts(weights)

    def quantize_experts(self, weights: ExpertWeights) -> PackedExperts:
        """See `Kernels.quantize_experts`."""
        return ReferenceExperts(weights, Int8Linear)

    def pack_gate(self, weight_1E: Tensor) -> RowGate:
        """See `Kernels.pack_gate`."""
        linear = self.pack_linear(weight_1E, None)
        return lambda y_TE, x_TE: y_TE.mul_(linear(x_TE).sigmoid_())

    def pack_heads(self, weight_NIO: Tensor) -> HeadsLinear:
        """See `Kernels.pack_heads`."""
        return lambda x_TNI: torch.bmm(x_TNI.transpose(0, 1), weight_NIO).transpose(0, 1)

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, in float32."""
        x32 = x_TE.float()
        scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (scaled * weight_E.float()).to(x_TE.dtype)

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        total_TE = x_TE + residual_TE
        return self.rms_norm(total_TE, weight_E, eps), total_TE

    def sum_squares(self, *tensors_TNH: Tensor) -> Tensor:
        """See `Kernels.sum_squares`."""
        return torch.stack([x_TNH.float().square().sum((1, 2)) for x_TNH in tensors_TNH], dim=-1)

    def norm_part(self, x_TNH: Tensor, squares_T: Tensor, weight_NH: Tensor, *, num_summed: int, eps: float) -> Tensor:
        """See `Kernels.norm_part`."""
        scale_T11 = torch.rsqrt(squares_T / num_summed + eps)[:, None, None]
        return (x_TNH.float() * scale_T11 * weight_NH.float()).to(x_TNH.dtype)

    def layer_norm(self, x_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias, in float32."""
        normed = F.layer_norm(x_TE.float(), x_TE.shape[-1:], eps=eps) * weight_E.float()
        return (normed if bias_E is None else normed + bias_E.float()).to(x_TE.dtype)

    def add_layer_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(layer_norm(x + residual), x + residual)."""
        total_TE = x_TE + residual_TE
        return self.layer_norm(total_TE, weight_E, bias_E, eps), total_TE

    def rotary(
        self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, is_interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """Turn the pairs (x[i], x[R + i]) of every head, or (x[2i], x[2i + 1]), by the angle of i."""
        rotate = _rotate_interleaved if is_interleaved else _rotate
        return rotate(q_TNH, cos_TR, sin_TR), rotate(k_TKH, cos_TR, sin_TR)

    rotate_and_write = rotate_then_write

    def activated(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """See `Kernels.activated`."""
        return activation_function(activation)

    def gated(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """activation(first half) * second half."""
        if activation is Activation.SILU:
            return self.silu_mul
        function = activation_function(activation)

        def multiply(gate_up_T2I: Tensor) -> Tensor:
            gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
            return function(gate_TI) * up_TI

        return multiply

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """silu(first half) * second half."""
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate_TI) * up_TI

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        """Store each token's key and value at its slot."""
        if cache.k_scale_BPK is not None and cache.v_scale_BPK is not None:
            write_half(k_TKH, cache.k_BPKH, cache.k_scale_BPK, slot_mapping_T)
            write_half(v_TKH, cache.v_BPKH, cache.v_scale_BPK, slot_mapping_T)
            return
        cache.k_BPKH.view(-1, *k_TKH.shape[1:]).index_copy_(0, slot_mapping_T, k_TKH)
        cache.v_BPKH.view(-1, *v_TKH.shape[1:]).index_copy_(0, slot_mapping_T, v_TKH)

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        """See `Kernels.compile_layers`."""
        return run

    def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Attend each query token to its own sequence's cached keys and values, causally."""
        num_heads, num_kv_heads = q_TNH.shape[1], cache.k_BPKH.shape[2]
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads over {num_kv_heads} key-value heads; allowed: a multiple")
        block_size = cache.k_BPKH.shape[1]
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        for sequence, (start, stop) in enumerate(pairwise(meta.query_starts_host)):
            context_len = meta.context_lens_host[sequence]
            first_block = _first_seen(context_len - (stop - start), params) // block_size
            first_key = first_block * block_size
            table = meta.block_tables[sequence, first_block : -(-context_len // block_size)]
            num_keys = context_len - first_key
            k_CKH = _read(cache.k_BPKH, cache.k_scale_BPK, table)[:num_keys].float()
            v_CKH = k_CKH
            if cache.v_BPKH is not cache.k_BPKH:
                v_CKH = _read(cache.v_BPKH, cache.v_scale_BPK, table)[:num_keys].float()
            num_queries = max(1, _MOST_SCORE_BYTES // (num_heads * num_keys * k_CKH.element_size()))
            for first in range(start, stop, num_queries):
                own = slice(first, min(first + num_queries, stop))
                out_TNH[own] = _attend(q_TNH[own], k_CKH, v_CKH, num_keys - (stop - first), first_key, params)
        return out_TNH


def _read(half_BPKH: Tensor, scale_BPK: Tensor | None, table: Tensor) -> Tensor:
    """Return the keys or values of these blocks, float32 where they are in 8 bits."""
    numbers = half_BPKH[table] if scale_BPK is None else half_BPKH[table] * scale_BPK[table].unsqueeze(-1)
    return numbers.flatten(0, 1)


def _rotate(x_TXH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    half = cos_TR.shape[-1]
    x1, x2, rest = x_TXH.float().split_with_sizes([half, half, x_TXH.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1).to(x_TXH.dtype)


def _rotate_interleaved(x_TXH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    num_turned = 2 * cos_TR.shape[-1]
    turned, rest = x_TXH[..., :num_turned].float(), x_TXH[..., num_turned:]
    x1, x2 = turned[..., 0::2], turned[..., 1::2]
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    pairs = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
    return torch.cat([pairs.flatten(-2).to(x_TXH.dtype), rest], dim=-1)


def _first_seen(query: int, params: AttentionParams) -> int:
    """The first position that the query at this position sees."""
    return 0 if params.sliding_window is None else max(0, query - params.sliding_window + 1)


def _attend(
    q_QNH: Tensor, k_CKH: Tensor, v_CKH: Tensor, first_query: int, first_key: int, params: AttentionParams
) -> Tensor:
    """Neighbouring queries of one sequence, the first of them that of key `first_query`; its keys and values, float32,
    are those from position `first_key` on.
    """
    num_queries, _, head_dim = q_QNH.shape
    num_keys, num_kv_heads, _ = k_CKH.shape
    q_KGQH = q_QNH.float().reshape(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    k_KHC = k_CKH.permute(1, 2, 0)
    v_KCH = v_CKH.transpose(0, 1)
    keys = torch.arange(num_keys, device=q_QNH.device)
    queries = keys[first_query : first_query + num_queries, None]
    # the queries of all heads that share a key-value head are rows of one product
    scores_KGQC = (q_KGQH.flatten(1, 2) @ k_KHC).unflatten(1, q_KGQH.shape[1:3]) * params.scale
    if params.soft_cap is not None:
        scores_KGQC = params.soft_cap * torch.tanh(scores_KGQC / params.soft_cap)
    if params.key_bias_NP is not None:
        last_column = params.key_bias_NP.shape[1] - 1
        columns = keys[None] + first_key
        if params.is_bias_by_distance:
            columns = (keys - queries + last_column).clamp(max=last_column)  # those of later keys are hidden anyway
        scores_KGQC = scores_KGQC + params.key_bias_NP[:, columns].unflatten(0, (num_kv_heads, -1))
    is_hidden = keys > queries
    if params.sliding_window is not None:
        is_hidden |= keys <= queries - params.sliding_window
    scores_KGQC = scores_KGQC.masked_fill(is_hidden, float("-inf"))
    if params.sinks_N is not None:
        sinks_KGQ1 = params.sinks_N.view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_queries, -1)
        scores_KGQC = torch.cat([scores_KGQC, sinks_KGQ1], dim=-1)
    weights_KGQC = scores_KGQC.softmax(-1)[..., :num_keys]
    out_KGQH: Tensor = (weights_KGQC.flatten(1, 2) @ v_KCH).unflatten(1, q_KGQH.shape[1:3])
    return out_KGQH.permute(2, 0, 1, 3).flatten(1, 2).to(q_QNH.dtype)
