"""A CPU that stands for a GPU that records steps: its recordings call the layers again."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.checkpoint import load_decoder
from parallel.device.cpu import CpuDevice
from parallel.errors import DeviceError, GraphCaptureError
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache, RunLayers
from parallel.kernels.cuda_buckets import StepBucket
from parallel.kernels.cuda_graphs import GraphedLayers, Recording, Result
from parallel.kernels.cuda_pieces import CutAttention
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.model_runner import ModelRunner
from workers.stats import RankStats

MAX_CONTEXT = 600


class StandIn(CpuDevice):
    """Works by itself, as far as the runner knows. Recordings take of its memory what they are said to take."""

    works_by_itself = True

    def __init__(self) -> None:
        self.free_bytes = 1_000_000

    def free_memory_bytes(self) -> int:
        return self.free_bytes


class RecordingKernels(ReferenceKernels):
    """Those of the reference, that fill up steps and record them as on a GPU.

    Args:
        device: whose memory recordings take.
        max_size: as that of `CudaKernels`.
        records_chunks: as that of `GraphedLayers`.
        fails_at: so many steps are recorded, and no more.
    """

    def __init__(
        self, device: StandIn, *, max_size: int = 256, records_chunks: bool = True, fails_at: int | None = None
    ) -> None:
        self._device = device
        self._max_size = max_size
        self._records_chunks = records_chunks
        self._fails_at = fails_at
        self.is_planned_on_host = False
        """Attention needs a step's lengths on the host."""
        self.recorded: list[StepBucket] = []
        self._step = StepBucket(0, 0)
        self._counts: Counter[str] = Counter()
        self._cut_attention = CutAttention(self._attend)

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        is_token = slot_mapping_T >= 0
        super().write_cache(k_TKH[is_token], v_TKH[is_token], cache, slot_mapping_T[is_token])

    def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        return self._cut_attention(q_TNH, cache, meta, params)

    def _attend(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        if meta.context_lens_host:
            return super().attention(q_TNH, cache, meta, params)
        if self.is_planned_on_host:
            raise DeviceError("attention is planned on the host")
        step = step_of_recorded(meta)
        out_TNH = torch.full_like(q_TNH, torch.nan)  # of what fills up a step, which nobody looks at
        num_tokens = step.query_starts_host[-1]
        out_TNH[:num_tokens] = super().attention(q_TNH[:num_tokens], cache, step, params)
        return out_TNH

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        if not self._max_size:
            return run

        def noted(
            x_TE: Tensor, angles: list[tuple[Tensor, ...]], caches: list[LayerCache], metas: list[AttentionMeta]
        ) -> Result:
            num_chunks = len(metas[0].context_lens) - metas[0].num_decodes
            self._step = StepBucket(
                len(x_TE), metas[0].max_context_len, 0 if metas[0].context_lens_host else num_chunks
            )
            return run(x_TE, angles, caches, metas)

        self._counts = axis.counts
        layers: Any = noted  # lists are sequences
        return GraphedLayers(
            layers,
            self._record,
            attention=self._cut_attention,
            counts=axis.counts,
            max_num_seqs=self._max_size,
            records_chunks=self._records_chunks,
        )

    def _record(self, run: Callable[[], Result], memory: object) -> Recording:
        result = run()
        self._device.free_bytes -= 1000 if memory else 50_000
        if len(self.recorded) == self._fails_at:
            raise GraphCaptureError("out of memory")
        self.recorded.append(self._step)

        def replay() -> None:
            before = self._counts.copy()
            for to, tensor in zip(result, run(), strict=True):
                to.copy_(tensor)
            self._counts.clear()  # on a GPU nothing is called again
            self._counts.update(before)

        return Recording(replay, result, memory or object())


def step_of_recorded(meta: AttentionMeta) -> AttentionMeta:
    """The step that was copied into the buffers of a recording, as an eager step has it."""
    is_real = meta.context_lens > 0
    num_decodes = int(is_real[: meta.num_decodes].sum())
    lens = meta.query_starts.diff()[is_real]
    lens[:num_decodes] = 1
    starts, contexts = [0, *lens.cumsum(0).tolist()], meta.context_lens[is_real]
    return replace(
        meta,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=contexts,
        block_tables=meta.block_tables[is_real],
        num_decodes=num_decodes,
        query_starts_host=starts,
        context_lens_host=contexts.tolist(),
    )


def make_runner(
    folder: Path = PACKAGED[DEFAULT_MODEL],
    *,
    mesh: Mesh | None = None,
    max_num_seqs: int = 5,
    max_size: int = 256,
    records_chunks: bool = True,
) -> tuple[ModelRunner, RecordingKernels, RankStats]:
    """One rank of a model, not allocated yet."""
    device, stats, mesh = StandIn(), RankStats(), mesh or Mesh.single()
    kernels = RecordingKernels(device, max_size=max_size, records_chunks=records_chunks)
    decoder = load_decoder(
        folder, mesh=mesh, device=device.torch_device, dtype=torch.float32, kernels=kernels, max_context=MAX_CONTEXT
    )
    config = EngineConfig(
        model=str(folder),
        kernels="reference",
        max_context=MAX_CONTEXT,
        max_cudagraph_capture_size=max_size,
        cache=CacheConfig(num_blocks=200),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
    )
    return ModelRunner(decoder, mesh=mesh, device=device, config=config, stats=stats), kernels, stats
