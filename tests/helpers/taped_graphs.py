"""CUDA graphs on a CPU: what is recorded are torch's operations, whose results stay where they were."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.errors import DeviceError
from parallel.kernels.base import AttentionMeta, AttentionParams, ExpertWeights, LayerCache, RunLayers
from parallel.kernels.cuda_graphs import GraphedLayers, Recordable, Recording
from parallel.kernels.cuda_pieces import CutAttention
from parallel.kernels.grouped_experts import GroupedExperts, torch_grouped_linear
from parallel.kernels.linears import PackedExperts
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis


class OperationTape(TorchDispatchMode):
    """Keeps the operations called while it is entered; none may bring a number to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot wait for the device"
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        places = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

        def call() -> None:
            tensors = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for place, tensor in zip(places, tensors, strict=True):
                if place.data_ptr() != tensor.data_ptr():  # not a view, nor written in place
                    place.copy_(tensor)

        self._calls.append(call)
        return result

    def replay(self) -> None:
        for call in self._calls:
            call()


def record_operations(run: Recordable, memory: object) -> Recording:
    """As `CudaGraphs.record`: a run that counts, then one in pieces, of whose attention nothing is called."""
    run()
    parts: list[Callable[[], None]] = []
    with ExitStack() as piece:

        def begin() -> None:
            parts.append(piece.enter_context(OperationTape()).replay)

        def cut(between: Callable[[], None]) -> None:
            piece.close()
            parts.append(between)
            begin()

        begin()
        result = run(cut)

    def replay() -> None:
        for part in parts:
            part()

    return Recording(replay, result, memory)


class TapedKernels(ReferenceKernels):
    """Those of the reference, recorded where they can be: attention wants lengths. Block 0 must be nobody's.

    Args:
        max_num_seqs: of steps that are tried whole.
    """

    def __init__(self, *, max_num_seqs: int = 0) -> None:
        self._max_num_seqs = max_num_seqs
        self._cut_attention = CutAttention(self._attend)

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        super().write_cache(k_TKH, v_TKH, cache, slot_mapping_T.clamp(min=0))

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        return GroupedExperts(weights, torch_grouped_linear)

    def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        return self._cut_attention(q_TNH, cache, meta, params)

    def _attend(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        if not meta.context_lens_host:
            raise DeviceError("attention is planned on the host")
        return super().attention(q_TNH, cache, meta, params)

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        return GraphedLayers(
            run, record_operations, attention=self._cut_attention, counts=axis.counts, max_num_seqs=self._max_num_seqs
        )
