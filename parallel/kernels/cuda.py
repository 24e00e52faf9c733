"""The operations of the model on CUDA: FlashAttention or FlashInfer if installed, Triton kernels, else the reference's.

Run on an H200 (docs/experiments/gpu-kernels.md) without the libraries; elsewhere Triton's interpreter and its compiler
check the kernels.
"""

import importlib
import logging
from typing import Any, TypeVar

import torch
from torch import Tensor

from parallel.errors import DeviceError
from parallel.kernels.attention_trial import attends
from parallel.kernels.base import AttentionMeta, AttentionParams, ExpertWeights, LayerCache, RunLayers
from parallel.kernels.cuda_buckets import TOKEN_BUCKETS
from parallel.kernels.cuda_graphs import CudaGraphs, GraphedLayers
from parallel.kernels.cuda_pieces import CutAttention
from parallel.kernels.flash_attention import FlashAttention
from parallel.kernels.flashinfer_attention import FlashInfer
from parallel.kernels.grouped_experts import GroupedExperts, GroupedLinear, is_fast_in_torch, torch_grouped_linear
from parallel.kernels.linears import PackedExperts, PackedLinear
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis

_Library = TypeVar("_Library", FlashAttention, FlashInfer)

ATTENTION_BACKENDS = ("auto", "flash-attention", "flashinfer", "triton")

logger = logging.getLogger(__name__)


class CudaKernels(ReferenceKernels):
    """`Kernels` for a GPU. What is installed is looked up once, here. No operation makes the host wait.

    Args:
        device: the GPU.
        attention_backend: what attends where it can; "auto": the first that there is of FlashAttention on Hopper,
            FlashInfer, and our own Triton kernels, which also take what the libraries do not.
        max_graph_size: sequences of the largest decode step that is recorded as a CUDA graph; 0: no step is recorded.
        multiplies_rows: products of one row are ours; else torch's, which its compiler sees.

    Raises DeviceError when the backend is not known or cannot be had.
    """

    name = "cuda"
    quantizes_experts = False

    def __init__(
        self,
        device: torch.device,
        attention_backend: str = "auto",
        *,
        max_graph_size: int = TOKEN_BUCKETS[-1],
        multiplies_rows: bool = True,
    ) -> None:
        self._max_graph_size = max_graph_size
        self._library = _find_library(device, attention_backend)
        self._attention: Any = _import_triton("triton_attention")
        if attention_backend == "triton" and self._attention is None:
            raise DeviceError("attention backend 'triton' is not installed; allowed here: auto")
        without_library = "torch" if self._attention is None else "triton"
        self.attention_backend = without_library if self._library is None else self._library.name
        self._elementwise: Any = _import_triton("triton_elementwise")
        self._linear: Any = _import_triton("cuda_linear")
        self._multiplies_rows = multiplies_rows
        self._cut_attention = CutAttention(self._attend)

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        if self._linear is None or not self._multiplies_rows:
            return super().pack_linear(weight_OI, bias_O)
        packed: PackedLinear = self._linear.CudaLinear(weight_OI, bias_O, self.silu_mul)
        return packed

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None, *, is_shared: bool) -> PackedLinear:
        """See `Kernels.pack_head`."""
        return self.pack_linear(weight_VE, bias_V)

    def quantize_linear(self, weight_OI: Tensor, bias_O: Tensor | None, *, keeps_weight: bool = False) -> PackedLinear:
        """See `Kernels.quantize_linear`."""
        if self._linear is None:
            return super().quantize_linear(weight_OI, bias_O)
        packed: PackedLinear = self._linear.CudaInt8Linear(weight_OI, bias_O, self.silu_mul)
        return packed

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        """See `Kernels.pack_experts`."""
        return GroupedExperts(weights, _choose_grouped_linear(weights))

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        if self._elementwise is None:
            return super().rms_norm(x_TE, weight_E, eps)
        normed_TE: Tensor = self._elementwise.rms_norm(x_TE, weight_E, eps)
        return normed_TE

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`; the residual is written in place."""
        if self._elementwise is None:
            return super().add_rms_norm(x_TE, residual_TE, weight_E, eps)
        normed_TE, residual_TE = self._elementwise.add_rms_norm(x_TE, residual_TE, weight_E, eps)
        return normed_TE, residual_TE

    def rotary(
        self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, is_interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.rotary`; written in place."""
        if self._elementwise is None:
            return super().rotary(q_TNH, k_TKH, cos_TR, sin_TR, is_interleaved=is_interleaved)
        q_TNH, k_TKH = self._elementwise.rotary(q_TNH, k_TKH, cos_TR, sin_TR, is_interleaved=is_interleaved)
        return q_TNH, k_TKH

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        if self._elementwise is None:
            return super().silu_mul(gate_up_T2I)
        out_TI: Tensor = self._elementwise.silu_mul(gate_up_T2I)
        return out_TI

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        """See `Kernels.write_cache`."""
        if self._elementwise is None:
            super().write_cache(k_TKH, v_TKH, cache, slot_mapping_T)
        else:
            self._elementwise.write_cache(k_TKH, v_TKH, cache, slot_mapping_T)

    def rotate_and_write(
        self,
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
        """See `Kernels.rotate_and_write`; the queries are written in place."""
        inputs = q_TNH, k_TKH, v_TKH, cos_TR, sin_TR, cache, slot_mapping_T
        if self._elementwise is None:
            return super().rotate_and_write(*inputs, is_interleaved=is_interleaved)
        rotated_TNH: Tensor = self._elementwise.rotate_and_write(*inputs, is_interleaved=is_interleaved)
        return rotated_TNH

    def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`."""
        return self._cut_attention(q_TNH, cache, meta, params)

    def _attend(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        if self._library is not None and self._library.takes(q_TNH, meta, params):
            return self._library(q_TNH, cache, meta, params)
        if self._attention is None or q_TNH.shape[-1] > self._attention.MAX_HEAD_DIM:
            if not meta.context_lens_host:
                raise DeviceError(f"attention over heads of {q_TNH.shape[-1]} is planned on the host")
            return super().attention(q_TNH, cache, meta, params)
        out_TNH: Tensor = self._attention.triton_attention(q_TNH, cache, meta, params)
        return out_TNH

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        """See `Kernels.compile_layers`.

        A graph holds its layers' collectives. All are all-reduces of [T, E], of expert-parallel layers too, so that a
        bucket says their sizes. One whose size comes from the data (an all-to-all of routed tokens) must not be
        recorded: layers that have one would have to be left as they are here.
        """
        has_kernels = self._attention is not None and self._elementwise is not None  # whose cache write skips tokens
        if not has_kernels or not self._max_graph_size:
            return run
        return GraphedLayers(
            run,
            CudaGraphs().record,
            attention=self._cut_attention,
            counts=axis.counts,
            max_num_seqs=self._max_graph_size,
            records_chunks=self._library is None,
        )


def _find_library(device: torch.device, backend: str) -> FlashAttention | FlashInfer | None:
    """The library that this backend means; None: no library."""
    match backend:
        case "auto":
            return _find(FlashAttention, device) or _find(FlashInfer, device)
        case "flash-attention":
            if (flash_attention := _find(FlashAttention, device)) is None:
                raise DeviceError(
                    "attention backend 'flash-attention' needs a Hopper GPU and the package flash_attn_interface; "
                    "allowed here: auto, flashinfer, triton"
                )
            return flash_attention
        case "flashinfer":
            if (flashinfer := _find(FlashInfer, device)) is None:
                raise DeviceError(
                    "attention backend 'flashinfer' needs the package flashinfer, and what it compiles with; "
                    "allowed here: auto, flash-attention, triton"
                )
            return flashinfer
        case "triton":
            return None
        case _:
            raise DeviceError(f"attention backend is {backend!r}; allowed: {', '.join(ATTENTION_BACKENDS)}")


def _find(library: type[_Library], device: torch.device) -> _Library | None:
    """Return one that attends here; None: there is none."""
    found = library.find(device)
    if found is None or (device.type == "cuda" and not attends(found, device)):
        return None
    return library.find(device)  # a new one: what the trial has kept is let go


def _import_triton(name: str) -> Any:
    """The module of this name, which needs Triton; None: torch came without it."""
    try:
        return importlib.import_module(f"parallel.kernels.{name}")
    except ModuleNotFoundError as error:
        logger.warning("plain torch, which is slower, in place of %s: %s", name, error)
        return None


def _choose_grouped_linear(weights: ExpertWeights) -> GroupedLinear:
    if is_fast_in_torch(weights.into_XJE) and is_fast_in_torch(weights.down_XEI):
        return torch_grouped_linear
    from parallel.kernels.triton_grouped_linear import triton_grouped_linear  # comes with torch where there is CUDA

    return triton_grouped_linear
