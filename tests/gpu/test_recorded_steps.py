"""Steps are recorded before the first request, their memory is counted, and none makes the host wait."""

from typing import Any

import pytest
import torch
from helpers.plans import make_plan

from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.device.cuda import CudaDevice
from parallel.kernels.cuda_buckets import largest_mixed, largest_steps
from parallel.mesh import Mesh
from workers.config import CacheConfig, EngineConfig
from workers.plan import NewSequence, ScheduledSequence
from workers.rank import _load
from workers.request import SamplingParams

pytestmark = pytest.mark.gpu

_SLACK_BYTES = 256 << 20
"""What is taken only once the cache is there: code that the driver loads, and a step's tensors that torch keeps."""


def test_all_steps_are_recorded_inside_of_the_memory_that_was_counted() -> None:
    config = EngineConfig(
        model=str(PACKAGED[DEFAULT_MODEL]),
        device="cuda",
        dtype="bfloat16",
        attention_backend="triton",  # with a library steps with chunks are in pieces
        cache=CacheConfig(memory_fraction=0.3),
    )
    device = CudaDevice()
    runner = _load(config, Mesh.single(), int, None, None)
    runner.allocate(runner.choose_num_blocks())
    layers: Any = runner._decoder._run
    max_context = runner._decoder.description.max_context
    steps = [
        *largest_mixed(max_num_tokens=512, max_context=max_context),
        *largest_steps(max_num_seqs=256, max_context=max_context),
    ]
    assert len(layers._graphs) == len(steps)
    total_bytes = device.total_memory_bytes()
    assert total_bytes - device.free_memory_bytes() < 0.3 * total_bytes + _SLACK_BYTES


@pytest.mark.parametrize("max_size", [0, 256])
def test_a_whole_step_is_started_without_a_wait(max_size: int) -> None:
    config = EngineConfig(
        model=str(PACKAGED[DEFAULT_MODEL]),
        device="cuda",
        dtype="bfloat16",
        max_cudagraph_capture_size=max_size,
        cache=CacheConfig(num_blocks=200),
    )
    runner = _load(config, Mesh.single(), int, None, None)
    runner.allocate(200)
    wanted = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=5, seed=3, logprobs=2, min_tokens=9, repetition_penalty=1.2
    )
    for number in (0, 2):  # what is compiled or set up once is in the first two
        prompts = [NewSequence(slot, [1, 2, 3, 4], 4, wanted, [2]) for slot in range(3)]
        plans = [
            make_plan(number, [], prompts, [ScheduledSequence(slot, 0, 4, [], [slot], True) for slot in range(3)]),
            make_plan(number + 1, [], [], [ScheduledSequence(slot, 4, 1, [], [], True) for slot in range(3)]),
        ]
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            waits = [runner.start(runner.prepare(plan)) for plan in plans]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for wait in waits:
            assert wait() is not None
