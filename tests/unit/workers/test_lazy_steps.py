"""Steps of a runner on a GPU whose streams run late, or early: recorded, overlapped, with a host tier; as on a CPU."""

from pathlib import Path
from random import Random

import pytest
import torch
from helpers.lazy_cuda import DEVICE, EARLY, lazy_cuda
from helpers.lazy_decoder import GraphedKernels, load_at_once

from parallel.device.base import Device
from parallel.device.cpu import CpuDevice
from parallel.device.cuda import CudaDevice
from parallel.kernels.base import Kernels
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.sampling import IN_TORCH
from parallel.mesh import Mesh
from parallel.random_model import write_random_model
from workers import cuda_host_cache, model_runner
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.host_cache import PlainHostCache, make_host_cache
from workers.model_runner import ModelRunner
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
SAMPLING = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_k=9, top_p=0.9, seed=4, logprobs=2)]


def make_runner(folder: Path, device: Device, kernels: Kernels) -> ModelRunner:
    decoder = load_at_once(folder, device.torch_device, kernels)
    config = EngineConfig(
        model=str(folder),
        kernels="reference",
        max_cudagraph_capture_size=2,
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
        StepPlan(0, [], new[:1], [ScheduledSequence(0, 0, 17, [], [1, 2], True)]),
        StepPlan(
            1, [], new[1:], [ScheduledSequence(0, 17, 1, [], [], True), ScheduledSequence(1, 0, 17, [], [3, 4], True)]
        ),
    ]
    third = NewSequence(2, prompt, 17, SAMPLING[0], [2])
    for number in range(2, 9):
        shares = [ScheduledSequence(slot, 16 + number - slot, 1, [], [], True) for slot in (0, 1)]
        saves, loads = [(1, 0), (3, 1)] * (number == 3), [(0, 9), (1, 10)] * (number == 5)
        if number == 6:
            shares.append(ScheduledSequence(2, 16, 1, [], [9, 11], True))
        plans.append(StepPlan(number, [], [third] * (number == 6), shares, saves=saves, loads=loads))
    return plans


def run_overlapped(runner: ModelRunner) -> list[ModelOutput | None]:
    """A step is started before the one before it is waited for."""
    outputs, waiting = [], []
    for plan in make_plans():
        waiting.append(runner.start(runner.prepare(plan)))
        if len(waiting) == 2:
            outputs.append(waiting.pop(0)())
    return [*outputs, *(wait() for wait in waiting)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    write_random_model(folder, CONFIG, 0, torch.float32)
    return folder


@pytest.mark.parametrize("early", EARLY)
def test_steps_give_the_tokens_of_a_cpu_in_whatever_order_streams_run(
    model: Path, early: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "select_sampling", lambda *_: IN_TORCH)
    expected = run_overlapped(make_runner(model, CpuDevice(), ReferenceKernels()))
    with lazy_cuda(early=early) as cuda:
        runner = make_runner(model, CudaDevice(), GraphedKernels(max_num_seqs=2))
        assert runner._decoder.num_recorded == 2 + 2, "in pieces, and whole"
        num_waits = cuda.num_waits
        outputs = run_overlapped(runner)
        assert cuda.num_waits - num_waits == len(outputs), "for the tokens of each, and for nothing else"
    for mine, its in zip(outputs, expected, strict=True):
        assert mine is not None
        assert its is not None
        for one, other in zip(mine.sampled, its.sampled, strict=True):
            assert (one.slot, one.token_id, one.error) == (other.slot, other.token_id, None)
            if other.logprobs is not None:
                assert one.logprobs is not None
                assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


@pytest.mark.parametrize("num_at_once", [1, 2, 40])
@pytest.mark.parametrize("early", EARLY)
def test_blocks_come_back_bit_for_bit_in_whatever_order_streams_run(
    early: tuple[str, ...], num_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many copies are queued before the host waits for one, and the model writes to the cache meanwhile."""
    monkeypatch.setattr(cuda_host_cache, "_BUFFER_BYTES", num_at_once * 6 * 10 * 4)
    rows = torch.randn(6, 20, 10)
    random, plain = Random(1), PlainHostCache(rows, num_slots=8)
    with lazy_cuda(early=early) as cuda:
        there = rows.to(DEVICE)
        host = make_host_cache(there, num_slots=8)
        num_waits = cuda.num_waits
        for step in range(12):
            saves = list(zip(random.sample(range(20), 5), random.sample(range(8), 5), strict=True))
            loads = list(zip(random.sample(range(8), 4), random.sample(range(20), 4), strict=True))
            plain.copy(saves, loads)
            host.copy(saves, loads)
            for cache in (rows, there):
                cache[:, step].add_(1.0)
        assert cuda.num_waits == num_waits
        assert torch.equal(there.cpu(), rows)
