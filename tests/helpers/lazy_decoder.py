"""Decoders on the GPU of lazy_cuda.py: loaded by one thread, their steps recorded, attention and experts in torch."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.taped_graphs import TapedKernels
from parallel import checkpoint
from parallel.decoder import Decoder
from parallel.kernels.base import AttentionMeta, AttentionParams, ExpertWeights, Kernels, LayerCache, RunLayers
from parallel.kernels.cuda_graphs import CudaGraphs, GraphedLayers
from parallel.kernels.grouped_experts import GroupedExperts
from parallel.kernels.linears import PackedExperts
from parallel.mesh import Axis, Mesh


class GraphedKernels(TapedKernels):
    """Recorded as on a GPU, whole steps too: attention without lengths on the host reads all blocks of the tables."""

    def _attend(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        if meta.context_lens_host:
            return super()._attend(q_TNH, cache, meta, params)
        num_group = q_TNH.shape[1] // cache.k_BPKH.shape[2]
        keys, values = (
            half[meta.block_tables.long()].flatten(1, 2).repeat_interleave(num_group, 2) for half in cache[:2]
        )
        is_hidden = torch.arange(keys.shape[1], device=q_TNH.device) >= meta.context_lens[:, None]
        scores = (torch.einsum("snh,scnh->snc", q_TNH, keys) * params.scale).masked_fill(is_hidden[:, None], -torch.inf)
        return torch.einsum("snc,scnh->snh", scores.softmax(-1), values.masked_fill(is_hidden[..., None, None], 0.0))

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        return GroupedExperts(weights, _multiply_rows)

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        return GraphedLayers(run, CudaGraphs().record, attention=self._cut_attention, max_num_seqs=self._max_num_seqs)


class _AtOnce:
    """Runs what is submitted."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future

    def shutdown(self, *, cancel_futures: bool) -> None:
        pass


def load_at_once(folder: Path, device: torch.device, kernels: Kernels) -> Decoder:
    """A float32 decoder, read in the thread of the caller: the device belongs to one."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(checkpoint, "ThreadPoolExecutor", _AtOnce)
        return checkpoint.load_decoder(folder, mesh=Mesh.single(), device=device, dtype=torch.float32, kernels=kernels)


def _multiply_rows(x_RI: Tensor, weight_XOI: Tensor, ends_X: Tensor) -> Tensor:
    """A `GroupedLinear`: torch's tells shapes in bfloat16 only."""
    rows_R = torch.arange(len(x_RI), dtype=torch.int32, device=x_RI.device)
    expert_R = torch.searchsorted(ends_X, rows_R, right=True).clamp(max=len(weight_XOI) - 1)
    return torch.einsum("ri,roi->ro", x_RI, weight_XOI[expert_R])
