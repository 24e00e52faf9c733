"""Ranks record steps together, on a CPU that stands for a GPU, its recordings calling again."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import exact_config, in_group
from helpers.gloo_pool import GlooPool, RankFailedError
from helpers.plans import make_plan
from helpers.recording import MAX_CONTEXT, RecordingKernels, StandIn, make_runner

from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.errors import GraphCaptureError
from parallel.kernels.cuda_buckets import StepBucket
from parallel.mesh import Mesh
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.executor import Executor
from workers.plan import NewSequence, ScheduledSequence
from workers.request import SamplingParams

PROMPT = [1, 5, 9, 20, 31]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one rank did."""

    recorded: list[StepBucket]
    graph_bytes: int
    token_ids: list[list[int]]
    """Of each step, where this rank samples."""
    logprobs: list[list[float]]
    collectives: list[Counter[str]]
    """On each axis, of the steps after allocation."""


def serve(mesh: Mesh, max_size: int) -> Served:
    """Two sequences, twelve decode steps; in two of them a third one's prompt comes besides."""
    runner, kernels, _ = make_runner(mesh=mesh, max_num_seqs=3, max_size=max_size)
    graph_bytes = runner._rehearsal().measure_graph_bytes()
    kernels.recorded.clear()
    runner.allocate(200)
    recorded, before = kernels.recorded.copy(), [axis.counts.copy() for axis in (mesh.tp, mesh.pp)]
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    prompts = [NewSequence(slot, PROMPT[slot:], len(PROMPT) - slot, sampling, []) for slot in (0, 1)]
    chunks = [ScheduledSequence(slot, 0, len(PROMPT) - slot, [], [slot, slot + 2], True) for slot in (0, 1)]
    outputs = [runner.run(make_plan(0, [], prompts, chunks))]
    late = NewSequence(2, [*range(50, 80)], 30, sampling, [])
    late_chunks = {4: ScheduledSequence(2, 0, 19, [], [4, 5], False), 5: ScheduledSequence(2, 19, 11, [], [], True)}
    for number in range(12):
        fed = 40 + 3 * number  # not what was sampled, which not every rank knows
        decodes = [ScheduledSequence(s, len(PROMPT) - s + number, 1, [fed + s], [], True) for s in (0, 1)]
        more = [late_chunks[number]] if number in late_chunks else []
        outputs.append(runner.run(make_plan(number + 1, [], [late] if number == 4 else [], decodes + more)))
    if not mesh.is_last_stage:
        runner._link.flush()
    assert kernels.recorded == recorded, "nothing is recorded later"
    sampled = [output for output in outputs if output is not None]
    return Served(
        recorded=recorded,
        graph_bytes=graph_bytes,
        token_ids=[output.token_ids for output in sampled],
        logprobs=[[one.logprob for one in output.logprobs.values()] for output in sampled],
        collectives=[axis.counts - old for axis, old in zip((mesh.tp, mesh.pp), before, strict=True)],
    )


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_ranks_record_the_same_steps_and_serve_as_without(gloo_pool: GlooPool, tp: int, pp: int) -> None:
    recorded: list[Served] = gloo_pool.run(serve, 256, tp=tp, pp=pp)
    called: list[Served] = gloo_pool.run(serve, 0, tp=tp, pp=pp)
    whole = [StepBucket(size, context) for context in (2048, 512) for size in (4, 2, 1)]
    steps = [*[StepBucket(size, context, 4) for context in (2048, 512) for size in (64, 32, 16)], *whole]
    assert [rank.recorded for rank in recorded] == [steps] * (tp * pp)
    assert [rank.graph_bytes for rank in recorded] == [50_000 + (5 + 6) * 1000] * (tp * pp)
    assert [rank.recorded for rank in called] == [[]] * (tp * pp)
    sampler = (pp - 1) * tp
    assert [len(step) for step in called[sampler].token_ids] == [2] * 6 + [3] + [2] * 6
    assert [rank.token_ids for rank in recorded] == [rank.token_ids for rank in called]
    for one, other in zip(recorded[sampler].logprobs, called[sampler].logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)  # a step that is filled up is added up in another order
    assert [rank.collectives for rank in recorded] == [rank.collectives for rank in called]
    assert recorded[0].collectives[0]["all_reduce"] > 0


def test_a_rank_that_cannot_record_fails_the_start_with_its_reason(
    gloo_pool: GlooPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = exact_config(
        Path(PACKAGED[DEFAULT_MODEL]),
        cache=CacheConfig(num_blocks=200),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64),
        tp=2,
        max_context=MAX_CONTEXT,
    )
    monkeypatch.setattr("helpers.engines.be_rank", _be_rank_that_cannot_record)
    with pytest.raises(RankFailedError, match="GroupFailedError: rank 1 failed: GraphCaptureError: out of memory"):
        in_group(gloo_pool, config, _never, may_die=True)


def _never(executor: Executor, config: EngineConfig) -> None:
    raise AssertionError("the group does not start")


def _be_rank_that_cannot_record(rank: int, *args: Any) -> Any:
    from helpers.engines import be_rank

    device = StandIn()
    kernels = RecordingKernels(device, fails_at=2 if rank == 1 else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.rank.select_device", lambda *args: device)
        patch.setattr("workers.rank._select_kernels", lambda *args: kernels)
        try:
            return be_rank(rank, *args)
        except GraphCaptureError:
            os._exit(1)  # as a rank of a cluster does
