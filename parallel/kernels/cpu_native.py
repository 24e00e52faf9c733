"""The operations of the model on a CPU in C++ (native/), where plain torch is slow; the rest stays with cpu_fast.py.

Each is one pass over memory. What the compiled kernels do not take (odd head sizes) falls to plain torch.
"""

import ctypes
import mmap
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.description import Activation
from parallel.host_memory import HugePages
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
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.linears import PackedExperts, PackedLinear
from parallel.kernels.native.experts import NativeExperts, can_pack_experts
from parallel.kernels.native.heads_linear import NativeHeadsLinear, can_pack_heads
from parallel.kernels.native.int8_linear import NativeInt8Linear
from parallel.kernels.native.library import (
    LANES,
    AllReduces,
    Int8Operations,
    Operations,
    Programs,
    build_for,
    load_all_reduces,
    load_int8,
    load_operations,
    load_programs,
)
from parallel.kernels.native.packed_linear import NativeLinear, NativeTable, can_pack, can_pack_in_place, in_rows
from parallel.kernels.native.program import CompiledLayers
from parallel.kernels.native.rank_sums import NativeAllReduce
from parallel.kernels.native.structures import ACTIVATIONS, LayerParams, StepLayout
from parallel.kernels.native.tape import Recorder, Tape
from parallel.kernels.reference import rotate_then_write
from parallel.kernels.sampling import largest_outputs
from parallel.mesh import Axis, OneShot


class NativeCpuKernels:
    """Implements `Kernels`. Holds the layout of the step in progress: one object per model, one thread.

    Args:
        operations: the compiled kernels; what is not of their dtype is torch's business.
        programs: the compiled products and programs; None: the CPU has not the instructions.
        num_threads: of torch's OpenMP pool, which the kernels share.
        int8: the compiled products in 8 bits; None: the CPU has not the instructions.
        all_reduces: the compiled sums over ranks; None: the system has not the means.
    """

    name = "cpu-native"
    attention_backend = "native"
    slowness = ""
    quantizes_experts = True

    def __init__(
        self,
        operations: Operations,
        programs: Programs | None,
        num_threads: int,
        int8: Int8Operations | None = None,
        all_reduces: AllReduces | None = None,
    ) -> None:
        self._int8 = int8
        self._all_reduces = all_reduces
        self._operations = operations
        self._programs = programs
        self._num_threads = num_threads
        self._recorder = Recorder()
        self._memory = HugePages()
        self._torch = CpuKernels()
        self._chunks = CpuPagedAttention()
        self._params: dict[int, tuple[AttentionParams, LayerParams]] = {}
        self._lengths: list[int] = []
        """`context_lens_host` of the step in progress: all its metas have this one object."""
        self._layouts: dict[tuple[int, int, int, torch.Size, torch.dtype], tuple[AttentionMeta, StepLayout]] = {}

    @classmethod
    def build(cls, dtype: torch.dtype = torch.bfloat16) -> "NativeCpuKernels":
        """Compile where needed, and load what a model in `dtype` wants. Raises DeviceError when this machine cannot."""
        library = build_for(dtype)
        return cls(
            load_operations(library),
            load_programs(library),
            torch.get_num_threads(),
            load_int8(library),
            load_all_reduces(library),
        )

    def empty_linear(self, num_out: int, num_in: int, dtype: torch.dtype) -> Tensor:
        """See `Kernels.empty_linear`."""
        if can_pack_in_place(num_out, num_in, dtype, self._programs):
            return self._memory.empty(num_out * num_in, dtype).view(num_out, num_in)
        return self._torch.empty_linear(num_out, num_in, dtype)

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        if self._programs is not None and can_pack(weight_OI, self._programs):
            return NativeLinear(
                *(weight_OI, bias_O, self._programs, self._recorder, self._num_threads), memory=self._memory
            )
        return self._torch.pack_linear(weight_OI, bias_O)

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None, *, is_shared: bool) -> PackedLinear:
        """See `Kernels.pack_head`."""
        num_out, num_in = weight_VE.shape
        is_dense = weight_VE.is_contiguous() and bias_V is None
        can_pack_here = is_dense and can_pack_in_place(num_out, num_in, weight_VE.dtype, self._programs)
        if self._programs is not None and can_pack_here:
            return NativeTable(weight_VE, self._programs, self._num_threads, memory=self._memory)
        if not is_shared:
            return self.pack_linear(weight_VE, bias_V)
        if not self._knows(weight_VE) or not is_dense or num_out % LANES or num_in % LANES:
            return self._torch.pack_head(weight_VE, bias_V, is_shared=True)
        return RowLinear(weight_VE, self._operations, self._num_threads)

    def quantize_linear(self, weight_OI: Tensor, bias_O: Tensor | None, *, keeps_weight: bool = False) -> PackedLinear:
        """See `Kernels.quantize_linear`."""
        if self._int8 is None or not self._knows(weight_OI):
            return self._torch.quantize_linear(weight_OI, bias_O, keeps_weight=keeps_weight)
        return NativeInt8Linear(
            *(weight_OI, bias_O, self._int8, self._recorder, self._num_threads),
            memory=self._memory,
            keeps_weight=keeps_weight,
        )

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        """See `Kernels.pack_experts`."""
        if self._programs is not None and can_pack_experts(weights, self._programs):
            return NativeExperts(weights, self._programs, self._recorder, self._num_threads)
        return self._torch.pack_experts(weights)

    def quantize_experts(self, weights: ExpertWeights) -> PackedExperts:
        """See `Kernels.quantize_experts`."""
        if self._programs is not None and self._int8 is not None and can_pack_experts(weights, self._programs):
            return NativeExperts(weights, self._programs, self._recorder, self._num_threads, int8=self._int8)
        return self._torch.quantize_experts(weights)

    def pack_gate(self, weight_1E: Tensor) -> RowGate:
        """See `Kernels.pack_gate`."""
        in_torch = self._torch.pack_gate(weight_1E)
        if not self._knows(weight_1E):
            return in_torch
        weight_E = weight_1E.flatten()

        def gate(y_TE: Tensor, x_TE: Tensor) -> Tensor:
            if y_TE.stride(1) != 1 or x_TE.stride(1) != 1 or y_TE.shape != x_TE.shape:
                return in_torch(y_TE, x_TE)
            self._operations.gate_rows(
                *(y_TE.data_ptr(), y_TE.stride(0), x_TE.data_ptr(), x_TE.stride(0), weight_E.data_ptr()),
                *(*x_TE.shape, self._num_threads),
            )
            self._recorder.note(Tape.gate_rows, y_TE, x_TE, weight_E)
            return y_TE

        return gate

    def pack_heads(self, weight_NIO: Tensor) -> HeadsLinear:
        """See `Kernels.pack_heads`."""
        if self._programs is not None and can_pack_heads(weight_NIO, self._programs):
            return NativeHeadsLinear(weight_NIO, self._programs, self._recorder, self._num_threads, memory=self._memory)
        return self._torch.pack_heads(weight_NIO)

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        """See `Kernels.compile_layers`."""
        if self._programs is None or (axis.size > 1 and not isinstance(axis.one_shot, NativeAllReduce)):
            return run
        return CompiledLayers(run, self._recorder, self._programs, self._num_threads, axis)

    @property
    def shared_rank_bytes(self) -> int:
        """See `collectives.OneShotKernels`."""
        return 0 if self._all_reduces is None else self._all_reduces.rank_bytes

    def make_one_shot(self, memory: mmap.mmap, axis: Axis) -> OneShot:
        """See `collectives.OneShotKernels`."""
        assert self._all_reduces is not None, "shared_rank_bytes"
        return NativeAllReduce(self._all_reduces.sums, memory, axis, self._recorder, self._num_threads)

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        if self._can_norm(x_TE, weight_E):
            return self._rms_norm(x_TE, None, weight_E, eps)
        return self._torch.rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`; the residual is written in place."""
        if self._can_norm(x_TE, weight_E) and residual_TE.is_contiguous():
            return self._rms_norm(x_TE, residual_TE, weight_E, eps), residual_TE
        return self._torch.add_rms_norm(x_TE, residual_TE, weight_E, eps)

    def sum_squares(self, *tensors_TNH: Tensor) -> Tensor:
        """See `Kernels.sum_squares`."""
        if not self._knows(tensors_TNH[0]) or not all(map(_has_dense_heads, tensors_TNH)):
            return self._torch.sum_squares(*tensors_TNH)
        num_tokens, num_columns = len(tensors_TNH[0]), len(tensors_TNH)
        sums = tensors_TNH[0].new_empty(num_tokens, num_columns, dtype=torch.float32)
        for column, x_TNH in enumerate(tensors_TNH):
            self._operations.sum_squares(
                *(sums.data_ptr() + column * sums.itemsize, num_columns, x_TNH.data_ptr(), x_TNH.stride(0)),
                *(num_tokens, x_TNH.shape[1:].numel(), self._num_threads),
            )
            self._recorder.note(Tape.sum_squares, sums, column, x_TNH)
        return sums

    def norm_part(self, x_TNH: Tensor, squares_T: Tensor, weight_NH: Tensor, *, num_summed: int, eps: float) -> Tensor:
        """See `Kernels.norm_part`; written in place."""
        if not self._knows(x_TNH) or not _has_dense_heads(x_TNH) or weight_NH.dtype is not x_TNH.dtype:
            return self._torch.norm_part(x_TNH, squares_T, weight_NH, num_summed=num_summed, eps=eps)
        self._operations.norm_part(
            *(x_TNH.data_ptr(), x_TNH.stride(0), squares_T.data_ptr(), squares_T.stride(0), weight_NH.data_ptr()),
            *(len(x_TNH), x_TNH.shape[1:].numel(), num_summed, eps, self._num_threads),
        )
        self._recorder.note(Tape.norm_part, x_TNH, squares_T, weight_NH, num_summed, eps)
        return x_TNH

    def layer_norm(self, x_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float) -> Tensor:
        """See `Kernels.layer_norm`."""
        if self._can_layer_norm(x_TE, weight_E, bias_E):
            return self._layer_norm(x_TE, None, weight_E, bias_E, eps)
        return self._torch.layer_norm(x_TE, weight_E, bias_E, eps)

    def add_layer_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_layer_norm`; the residual is written in place."""
        if self._can_layer_norm(x_TE, weight_E, bias_E) and residual_TE.is_contiguous():
            return self._layer_norm(x_TE, residual_TE, weight_E, bias_E, eps), residual_TE
        return self._torch.add_layer_norm(x_TE, residual_TE, weight_E, bias_E, eps)

    def rotary(
        self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, is_interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.rotary`; written in place."""
        if self._can_rotate(q_TNH, k_TKH, cos_TR):
            return self._rotate(q_TNH, k_TKH, cos_TR, sin_TR, is_interleaved=is_interleaved)
        return self._torch.rotary(q_TNH, k_TKH, cos_TR, sin_TR, is_interleaved=is_interleaved)

    rotate_and_write = rotate_then_write

    def activated(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """See `Kernels.activated`; written in place."""
        return partial(self._activate, activation)

    def gated(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """See `Kernels.gated`."""
        return partial(self._gate, activation)

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        return self._gate(Activation.SILU, gate_up_T2I)

    def _activate(self, activation: Activation, x_TI: Tensor) -> Tensor:
        if not self._knows(x_TI) or x_TI.dim() != 2 or x_TI.stride(1) != 1:
            return self._torch.activated(activation)(x_TI)
        number = ACTIVATIONS.index(activation)
        self._operations.activate(x_TI.data_ptr(), x_TI.stride(0), *x_TI.shape, number, self._num_threads)
        self._recorder.note(Tape.activate, x_TI, activation)
        return x_TI

    def _gate(self, activation: Activation, gate_up_T2I: Tensor) -> Tensor:
        if not self._knows(gate_up_T2I) or not gate_up_T2I.is_contiguous():
            return self._torch.gated(activation)(gate_up_T2I)
        num_rows, size = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
        out_TI = gate_up_T2I.new_empty(num_rows, size)
        number = ACTIVATIONS.index(activation)
        self._operations.gate(out_TI.data_ptr(), gate_up_T2I.data_ptr(), num_rows, size, number, self._num_threads)
        self._recorder.note(Tape.gate, out_TI, gate_up_T2I, activation)
        return out_TI

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        """See `Kernels.write_cache`."""
        num_tokens, num_kv_heads, head_dim = k_TKH.shape
        is_int8 = cache.k_scale_BPK is not None
        is_known = _has_dense_heads(k_TKH) and _has_dense_heads(v_TKH) and _is_dense(cache)
        if not self._knows(k_TKH) or not is_known or (is_int8 and head_dim % LANES):
            self._torch.write_cache(k_TKH, v_TKH, cache, slot_mapping_T)
            return
        block_size = cache.k_BPKH.shape[1]
        sizes = (block_size, num_kv_heads, head_dim) if is_int8 else (num_kv_heads * head_dim,)
        (self._operations.write_cache_int8 if is_int8 else self._operations.write_cache)(
            *(cache.k_BPKH.data_ptr(), cache.v_BPKH.data_ptr(), k_TKH.data_ptr(), v_TKH.data_ptr()),
            *(k_TKH.stride(0), v_TKH.stride(0), slot_mapping_T.data_ptr(), num_tokens, *sizes, self._num_threads),
        )
        self._recorder.note(Tape.write_cache, k_TKH, v_TKH, cache)

    def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`."""
        is_known = self._knows(q_TNH) and q_TNH.shape[2] % LANES == 0
        if not is_known or not (_has_dense_heads(q_TNH) and _is_dense(cache)):
            return self._torch.attention(q_TNH, cache, meta, params)
        out_TNH = q_TNH.new_empty(q_TNH.shape)
        self._recorder.note(Tape.attention, out_TNH, q_TNH, cache, self._layer_params(params))
        num_sequences = len(meta.context_lens_host)
        is_fast = self._operations.has_dot_products(q_TNH.shape[2], cache.k_scale_BPK is not None)
        if meta.num_decodes < num_sequences and params.is_plain and not is_fast and self._recorder.tape is None:
            # torch's blocked kernel is faster for long chunks
            self._chunks.attend_chunks(q_TNH, out_TNH, cache, meta, params)
            num_sequences = meta.num_decodes
        if num_sequences:
            layout = self._layout(q_TNH.shape[1], num_sequences, cache, meta)
            self._operations.attention(
                *(out_TNH.data_ptr(), q_TNH.data_ptr(), q_TNH.stride(0)),
                *(cache.k_BPKH.data_ptr(), cache.v_BPKH.data_ptr()),
                *(ctypes.byref(layout), ctypes.byref(self._layer_params(params))),
            )
        return out_TNH

    def _knows(self, x: Tensor) -> bool:
        return x.dtype is self._operations.dtype

    def _can_norm(self, x: Tensor, weight: Tensor) -> bool:
        is_known = self._knows(x) and (weight.dtype is x.dtype or weight.dtype is torch.float32)
        are_rows = x.stride(1) == 1 if x.dim() == 2 else _has_dense_heads(x)
        return is_known and weight.is_contiguous() and are_rows

    def _rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = x.new_empty(x.shape)
        size = x.shape[-1]
        self._operations.rms_norm(
            *(out.data_ptr(), x.data_ptr(), x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.stride(0), size),
            *(None if residual is None else residual.data_ptr(), weight.data_ptr()),
            *(size if weight.dim() == 2 else 0, weight.dtype is torch.float32, eps, self._num_threads),
        )
        self._recorder.note(Tape.rms_norm, out, x, residual, weight, eps)
        return out

    def _can_layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        is_bias_known = bias is None or (bias.dtype is x.dtype and bias.is_contiguous())
        return is_bias_known and weight.dtype is x.dtype and self._can_norm(x, weight)

    def _layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        out = x.new_empty(x.shape)
        size = x.shape[-1]
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in (residual, weight, bias))
        self._operations.layer_norm(
            *(out.data_ptr(), x.data_ptr(), x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.stride(0), size),
            *(*addresses, size if weight.dim() == 2 else 0, eps, self._num_threads),
        )
        self._recorder.note(Tape.layer_norm, out, x, residual, weight, bias, eps)
        return out

    def _can_rotate(self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor) -> bool:
        is_known = self._knows(q_TNH) and k_TKH.dtype is q_TNH.dtype and cos_TR.is_contiguous()
        return is_known and q_TNH.stride(2) == 1 and k_TKH.stride(2) == 1

    def _rotate(
        self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, is_interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        for x in (q_TNH, k_TKH):
            self._operations.rotary(
                *(x.data_ptr(), *x.stride()[:2], *x.shape, cos_TR.data_ptr(), sin_TR.data_ptr(), cos_TR.shape[1]),
                *(is_interleaved, self._num_threads),
            )
            self._recorder.note(Tape.rotary, x, cos_TR, is_interleaved=is_interleaved)
        return q_TNH, k_TKH

    def _layout(self, num_heads: int, num_sequences: int, cache: LayerCache, meta: AttentionMeta) -> StepLayout:
        if meta.context_lens_host is not self._lengths:
            self._lengths = meta.context_lens_host
            self._layouts.clear()
        key = (id(meta), num_heads, num_sequences, cache.k_BPKH.shape, cache.k_BPKH.dtype)
        if key not in self._layouts:
            _, block_size, num_kv_heads, head_dim = cache.k_BPKH.shape
            layout = StepLayout(
                query_starts=meta.query_starts.data_ptr(),
                context_lens=meta.context_lens.data_ptr(),
                block_tables=meta.block_tables.data_ptr(),
                table_stride=meta.block_tables.stride(0),
                num_sequences=num_sequences,
                block_size=block_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                num_threads=self._num_threads,
                is_int8=cache.k_scale_BPK is not None,
            )
            self._layouts[key] = meta, layout  # the meta is kept, so that no other one gets its id
        return self._layouts[key][1]

    def _layer_params(self, params: AttentionParams) -> LayerParams:
        known = self._params.get(id(params))
        if known is None:
            bias, sinks = params.key_bias_NP, params.sinks_N
            made = LayerParams(
                scale=params.scale,
                soft_cap=params.soft_cap or 0.0,
                window=params.sliding_window or 0,
                own_column=bias.shape[1] - 1 if bias is not None and params.is_bias_by_distance else -1,
                key_bias=None if bias is None else bias.data_ptr(),
                key_bias_stride=0 if bias is None else bias.stride(0),
                sinks=None if sinks is None else sinks.data_ptr(),
            )
            known = self._params[id(params)] = params, made  # the tensors that `made` points to stay alive
        return known[1]


class RowLinear:
    """Implements `SearchedLinear`. A weight as it was loaded, read at the speed of memory.

    By dot products of pairs the result is float32, some rows at a time. Where there are none, more than a few rows
    are torch's business, and results are rounded as there.
    """

    def __init__(self, weight_OI: Tensor, operations: Operations, num_threads: int) -> None:
        self._weight_OI = weight_OI
        self._operations = operations
        self._num_threads = num_threads

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `PackedLinear`."""
        num_out, num_in = self._weight_OI.shape
        is_fast, most_rows = self._operations.has_dot_products(num_in, False), self._operations.most_rows
        if not is_fast and len(x_TI) > most_rows:
            return F.linear(x_TI, self._weight_OI)
        x_TI = in_rows(x_TI)
        out_TO = x_TI.new_empty(len(x_TI), num_out, dtype=torch.float32)
        for rows, out in zip(x_TI.split(most_rows), out_TO.split(most_rows), strict=True):
            self._operations.multiply_rows(
                *(out.data_ptr(), rows.data_ptr(), rows.stride(0), len(rows)),
                *(self._weight_OI.data_ptr(), num_out, num_in, self._num_threads),
            )
        return out_TO if is_fast else out_TO.to(x_TI.dtype)

    def largest(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """See `SearchedLinear`."""
        num_out, num_in = self._weight_OI.shape
        if not self._operations.has_dot_products(num_in, False):
            return largest_outputs(self(x_TI))
        x_TI = in_rows(x_TI)
        values_T, indices_T = x_TI.new_empty(len(x_TI), dtype=torch.float32), torch.empty(len(x_TI), dtype=torch.int64)
        for start in range(0, len(x_TI), self._operations.most_rows):
            rows = x_TI[start : start + self._operations.most_rows]
            self._operations.largest_of_rows(
                *(values_T[start:].data_ptr(), indices_T[start:].data_ptr()),
                *(rows.data_ptr(), rows.stride(0), len(rows), self._weight_OI.data_ptr(), num_out, num_in),
                self._num_threads,
            )
        return values_T, indices_T


def _has_dense_heads(x_TNH: Tensor) -> bool:
    """Each token's heads lie side by side; tokens may be far apart."""
    return x_TNH.dim() == 3 and x_TNH.stride(2) == 1 and x_TNH.stride(1) == x_TNH.shape[2]


def _is_dense(cache: LayerCache) -> bool:
    """The halves lie as `CacheEntry.lay_out` lays them out; what is in 8 bits always does."""
    if cache.k_scale_BPK is not None:
        return True
    return cache.k_BPKH.is_contiguous() and cache.v_BPKH.is_contiguous()
