"""Steps of a runner on a GPU whose streams run late, or early: recorded, overlapped, with a host tier; as on a CPU."""

from pathlib import Path
from random import Random

import pytest
import torch
from helpers.lazy_cuda import DEVICE, EARLY, lazy_cuda
from helpers.lazy_decoder import GraphedKernels
from helpers.lazy_steps import CONFIG, MAX_GRAPH_SIZE, check_outputs, make_runner, run_overlapped
from helpers.triton_programs import interpret

from parallel.device.cpu import CpuDevice
from parallel.device.cuda import CudaDevice
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.sampling import IN_TORCH
from parallel.random_model import write_random_model
from workers import cuda_host_cache, model_runner
from workers.host_cache import PlainHostCache, make_host_cache


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
        runner = make_runner(model, CudaDevice(), GraphedKernels(max_num_seqs=MAX_GRAPH_SIZE))
        assert runner._decoder.num_recorded == 2 + 2, "in pieces, and whole"
        num_waits = cuda.num_waits
        outputs = run_overlapped(runner)
        assert cuda.num_waits - num_waits == len(outputs), "for the tokens of each, and for nothing else"
        del runner  # while there is the device, to which it gives memory back
    check_outputs(outputs, expected)


_WHOLE = """
import tempfile
from pathlib import Path
import torch
from helpers.lazy_cuda import lazy_cuda
from helpers.lazy_steps import CONFIG, MAX_GRAPH_SIZE, check_outputs, make_runner, run_overlapped
from helpers.lazy_triton import interpreted_on
from parallel.device.cpu import CpuDevice
from parallel.device.cuda import CudaDevice
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.select import select_kernels
from parallel.random_model import write_random_model

with tempfile.TemporaryDirectory() as scratch:
    folder = Path(scratch) / "model"
    write_random_model(folder, CONFIG | {"num_hidden_layers": 1}, 0, torch.float32)
    expected = run_overlapped(make_runner(folder, CpuDevice(), ReferenceKernels()))
    with lazy_cuda() as cuda, interpreted_on(cuda) as kernels:
        device = CudaDevice()
        chosen = select_kernels(device.torch_device, torch.float32, max_graph_size=MAX_GRAPH_SIZE)
        runner = make_runner(folder, device, chosen)
        assert runner._decoder.num_recorded == 2 + 2, "in pieces, and whole"
        num_waits = cuda.num_waits
        outputs = run_overlapped(runner)
        assert cuda.num_waits - num_waits == len(outputs), "for the tokens of each, and for nothing else"
        del runner  # while there is the device, to which it gives memory back
    check_outputs(outputs, expected)
    layers = {"_rms_norm", "_rotate_and_write", "attend", "_silu_mul", "_multiply_row"}
    assert kernels >= {*layers, "_edit", "_cut", "_gather", "_limit", "_find_largest"}, kernels
"""


def test_steps_of_the_kernels_for_cuda_give_the_tokens_of_a_cpu() -> None:
    """Everything that a step on a GPU is, but products of several rows, which are torch's, and the GPU."""
    interpret(_WHOLE)


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
        del host  # while there is the device, to which it gives memory back
