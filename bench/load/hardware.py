"""What this machine can: the rates at which memory is read and matrices are multiplied, measured in this process.

python -m bench.load.hardware DTYPE QUANTIZATION     those of its CPUs, as JSON, for `weft bench serve`
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.device.base import Device
from parallel.device.cpu import CpuDevice
from parallel.kernels.cuda_graphs import CudaGraphs, Result
from parallel.kernels.cuda_pieces import Cut, call_at_once
from parallel.kernels.select import select_kernels

_ROUNDS = 5
_CPU_READ_BYTES = 512 << 20
_CPU_TOKENS, _CPU_FEATURES = 256, 4096
_GPU_READ_BYTES = 4 << 30
_GPU_TOKENS = _GPU_FEATURES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What the machine can at best, with as many threads as the process has."""

    read_bytes_per_s: float
    """Bytes a second of summing numbers that no cache holds."""
    flops_per_s: float
    """A large linear layer in the dtype of the model, or in 8 bits where its layers are, as the engine's kernels or
    torch do it, whichever is faster."""


def measure_ceiling(device: Device, dtype: torch.dtype, *, int8_linears: bool = False) -> Ceiling:
    """Measure; takes about a second, and memory for a moment."""
    is_cpu = device.torch_device.type == "cpu"
    read_bytes = _CPU_READ_BYTES if is_cpu else min(_GPU_READ_BYTES, device.free_memory_bytes() // 4)
    shape = (_CPU_TOKENS, _CPU_FEATURES) if is_cpu else (_GPU_TOKENS, _GPU_FEATURES)
    return Ceiling(
        read_bytes_per_s=_measure_read(device, read_bytes),
        flops_per_s=_measure_flops(device, dtype, *shape, int8_linears),
    )


def _measure_read(device: Device, num_bytes: int) -> float:
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device=device.torch_device)
    return numbers.nbytes / best_s(device, numbers.sum)


def _measure_flops(device: Device, dtype: torch.dtype, num_tokens: int, num_features: int, int8_linears: bool) -> float:
    x = torch.randn(num_tokens, num_features, device=device.torch_device).to(dtype)
    weight = torch.randn(num_features, num_features, device=device.torch_device).to(dtype)
    kernels = select_kernels(device.torch_device, dtype)
    if int8_linears:
        packed = kernels.quantize_linear(weight, None, keeps_weight=True)
    else:
        packed = kernels.pack_linear(weight, None)
    with torch.inference_mode():
        least_s = min(best_s(device, lambda: packed(x)), best_s(device, lambda: F.linear(x, weight)))
    return 2 * num_tokens * num_features**2 / least_s


def recorded(work: Callable[[], Tensor]) -> Callable[[], object]:
    """Record what a GPU does in a call as a CUDA graph, as the engine does, and return what replays it.

    The host has no part in a replay's time. It needs the tensors that the call reads.
    """

    def run(cut: Cut = call_at_once) -> Result:
        result = work()
        return result, result

    return CudaGraphs().record(run, None).replay


def best_s(device: Device, work: Callable[[], object]) -> float:
    """Return the shortest time of some rounds, without the first, which may pay for setting up."""
    times = []
    for _ in range(_ROUNDS + 1):
        device.synchronize()
        start_s = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - start_s)
    return min(times[1:])


if __name__ == "__main__":
    dtype, quantization = sys.argv[1:]
    ceiling = measure_ceiling(CpuDevice(), getattr(torch, dtype), int8_linears=quantization == "int8")
    print(json.dumps(dataclasses.asdict(ceiling)))
