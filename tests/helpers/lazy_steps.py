"""Steps of a runner for lazy_cuda.py: overlapped, recorded, with a host tier; and what a CPU says to them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.lazy_decoder import load_at_once
from helpers.plans import make_plan
from parallel.device.base import Device
from parallel.kernels.base import Kernels
from parallel.mesh import Mesh
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.model_runner import ModelRunner
from workers.overlap import StepExecution
from workers.plan import ModelOutput, NewSequence, ScheduledSequence, StepPlan
from workers.request import SamplingParams

NUM_BLOCKS, MAX_CONTEXT = 30, 64
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "eos_token_id": 2,
}
MAX_GRAPH_SIZE = 2
_DRAWN = SamplingParams(
    temperature=0.9, top_k=9, top_p=0.9, seed=4, logprobs=2, repetition_penalty=1.4, frequency_penalty=0.5
)
SAMPLING = [SamplingParams(temperature=0.0), _DRAWN]


def make_runner(folder: Path, device: Device, kernels: Kernels) -> ModelRunner:
    """Of three slots, which records steps of up to MAX_GRAPH_SIZE sequences on a GPU."""
    decoder = load_at_once(folder, device.torch_device, kernels)
    config = EngineConfig(
        model=str(folder),
        kernels="reference",
        max_cudagraph_capture_size=MAX_GRAPH_SIZE,
        cache=CacheConfig(num_blocks=NUM_BLOCKS, host_cache_bytes=100_000),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32, async_scheduling=True),
    )
    runner = ModelRunner(decoder, mesh=Mesh.single(), device=device, config=config)
    runner.allocate(NUM_BLOCKS)
    return runner


def make_plans() -> list[StepPlan]:
    """Two sequences whose tokens the rank alone knows; their first blocks leave and come back for a third one."""
    prompt = list(range(3, 20))
    new = [NewSequence(slot, prompt, 17, sampling, [2]) for slot, sampling in enumerate(SAMPLING)]
    plans = [
        make_plan(0, [], new[:1], [ScheduledSequence(0, 0, 17, [], [1, 2], True)]),
        make_plan(
            1, [], new[1:], [ScheduledSequence(0, 17, 1, [], [], True), ScheduledSequence(1, 0, 17, [], [3, 4], True)]
        ),
    ]
    third = NewSequence(2, prompt, 17, SAMPLING[0], [2])
    for number in range(2, 9):
        shares = [ScheduledSequence(slot, 16 + number - slot, 1, [], [], True) for slot in (0, 1)]
        saves, loads = [(1, 0), (3, 1)] * (number == 3), [(0, 9), (1, 10)] * (number == 5)
        if number == 6:
            shares.append(ScheduledSequence(2, 16, 1, [], [9, 11], True))
        plans.append(make_plan(number, [], [third] * (number == 6), shares, saves=saves, loads=loads))
    return plans


def run_overlapped(runner: ModelRunner) -> list[ModelOutput | None]:
    """On a GPU a step is started before the one before it is waited for."""
    outputs, waiting = [], []
    for plan in make_plans():
        waiting.append(runner.start(runner.prepare(plan)))
        if len(waiting) == 2 or runner.execution is not StepExecution.QUEUED:
            outputs.append(waiting.pop(0)())
    return [*outputs, *(wait() for wait in waiting)]


def check_outputs(outputs: Sequence[ModelOutput | None], expected: Sequence[ModelOutput | None]) -> None:
    """Raises AssertionError where a token is another one, or its log-probability is far off."""
    for mine, its in zip(outputs, expected, strict=True):
        assert mine is not None
        assert its is not None
        assert (mine.slots, mine.token_ids, mine.errors) == (its.slots, its.token_ids, {})
        assert mine.logprobs.keys() == its.logprobs.keys()
        for slot, other in its.logprobs.items():
            assert mine.logprobs[slot].logprob == pytest.approx(other.logprob, abs=1e-4)
