"""Decode steps are recorded before the first request, on a CPU that stands for a GPU, its recordings calling again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.checkpoint import load_decoder
from parallel.device.cpu import CpuDevice
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache, RunLayers
from parallel.kernels.cuda_buckets import StepBucket, choose_bucket
from parallel.kernels.cuda_graphs import GraphedLayers, Recording, Result
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.model_runner import ModelRunner
from workers.plan import NewSequence, ScheduledSequence, StepPlan
from workers.request import SamplingParams
from workers.stats import RankStats

MAX_CONTEXT = 600


class StandIn(CpuDevice):
    """Works by itself, as far as the runner knows. Recordings take of its memory what they are said to take."""

    works_by_itself = True

    def __init__(self) -> None:
        self.free_bytes = 1_000_000

    def free_memory_bytes(self) -> int:
        return self.free_bytes


class Kernels(ReferenceKernels):
    """Those of the reference, that fill up steps and record them as on a GPU."""

    def __init__(self, device: StandIn) -> None:
        self._device = device
        self.recorded: list[StepBucket] = []
        self._step = StepBucket(0, 0)

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        is_token = slot_mapping_T >= 0
        super().write_cache(k_TKH[is_token], v_TKH[is_token], cache, slot_mapping_T[is_token])

    def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        if not meta.context_lens_host:
            lengths = meta.context_lens.clamp(min=1)  # of what fills up a step, which nobody looks at
            starts = meta.query_starts.tolist()
            meta = replace(meta, context_lens=lengths, context_lens_host=lengths.tolist(), query_starts_host=starts)
        return super().attention(q_TNH, cache, meta, params)

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        def noted(
            x_TE: Tensor, angles: list[tuple[Tensor, ...]], caches: list[LayerCache], metas: list[AttentionMeta]
        ) -> Result:
            self._step = StepBucket(len(x_TE), metas[0].max_context_len)
            return run(x_TE, angles, caches, metas)

        return GraphedLayers(noted, self._record)  # type: ignore[arg-type]  # lists are sequences

    def _record(self, run: Callable[[], Result], memory: object) -> Recording:
        self._device.free_bytes -= 1000 if memory else 50_000
        result = run()
        self.recorded.append(self._step)

        def replay() -> None:
            for to, tensor in zip(result, run(), strict=True):
                to.copy_(tensor)

        return Recording(replay, result, memory or object())


def make_runner(*, max_num_seqs: int = 5, max_size: int = 256) -> tuple[ModelRunner, Kernels, RankStats]:
    folder, device, stats = Path(PACKAGED[DEFAULT_MODEL]), StandIn(), RankStats()
    kernels = Kernels(device)
    decoder = load_decoder(
        folder, mesh=Mesh.single(), device=device.torch_device, dtype=torch.float32, kernels=kernels,
        max_context=MAX_CONTEXT,
    )  # fmt: skip
    config = EngineConfig(
        model=str(folder),
        kernels="reference",
        max_context=MAX_CONTEXT,
        max_cudagraph_capture_size=max_size,
        cache=CacheConfig(num_blocks=200),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
    )
    return ModelRunner(decoder, mesh=Mesh.single(), device=device, config=config, stats=stats), kernels, stats


def test_every_decode_step_that_can_come_is_recorded_before_the_first_request() -> None:
    runner, kernels, stats = make_runner(max_num_seqs=5)
    runner.allocate(200)
    recorded = kernels.recorded.copy()
    assert recorded == [StepBucket(size, context) for context in (2048, 512) for size in (8, 4, 2, 1)]
    assert (stats.num_steps, stats.model_busy_s) == (0, 0.0), "these steps are nobody's"

    sampling, number = SamplingParams(temperature=0.0), 0
    for num_seqs in (1, 3, 5):
        for context in (3, 513):
            blocks = list(range(-(-context // 16)))
            prompts = [NewSequence(slot, [1] * (context - 1), context - 1, sampling, []) for slot in range(num_seqs)]
            chunks = [ScheduledSequence(slot, 0, context - 1, [], blocks, True) for slot in range(num_seqs)]
            runner.run(StepPlan(number, [], prompts, chunks))
            decodes = [ScheduledSequence(slot, context - 1, 1, [7], [], True) for slot in range(num_seqs)]
            output = runner.run(StepPlan(number + 1, [], [], decodes))
            assert output is not None
            assert len(output.sampled) == num_seqs
            number += 2
    assert kernels.recorded == recorded
    assert stats.num_steps == number


@pytest.mark.parametrize(("max_size", "sizes"), [(0, []), (1, [1]), (3, [4, 2, 1]), (64, [8, 4, 2, 1])])
def test_the_largest_size_is_a_setting(max_size: int, sizes: list[int]) -> None:
    runner, kernels, _ = make_runner(max_num_seqs=5, max_size=max_size)
    runner.allocate(200)
    assert kernels.recorded == [StepBucket(size, context) for context in (2048, 512) for size in sizes]


def test_memory_of_all_graphs_is_estimated_from_the_two_largest() -> None:
    runner, kernels, _ = make_runner(max_num_seqs=5)
    assert runner._measure_graph_bytes() == 50_000 + 7 * 1000
    assert kernels.recorded == [choose_bucket(num_tokens=n, num_decodes=n, max_context_len=MAX_CONTEXT) for n in (5, 4)]
    runner.allocate(200)
    assert len(kernels.recorded) == 2 + 8, "those of the small cache are of no use to the real one"


def test_without_graphs_there_is_nothing_to_measure() -> None:
    runner, kernels, _ = make_runner(max_size=0)
    assert runner._measure_graph_bytes() == 0
    assert kernels.recorded == []
