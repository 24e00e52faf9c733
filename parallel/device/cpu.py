"""The CPU as a device: memory belongs to every process of the machine, or of the container that limits it."""

import logging
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from parallel.available_memory import available_bytes, read_field, total_bytes

_PROC_SELF = Path("/proc/self")
_SLOW_IN_BFLOAT16 = ("DEFAULT", "NO AVX", "AVX2")
"""CPU capabilities, as torch names them, whose bfloat16 products are many times slower than those of float32."""

logger = logging.getLogger(__name__)


class CpuMark(NamedTuple):
    """A moment."""

    at_s: float

    def seconds_since(self, earlier: Self) -> float:
        """Seconds between the two marks."""
        return self.at_s - earlier.at_s


class CpuDevice:
    """Implements `Device`; see there. Where there is no /proc (macOS), peaks cannot be reset."""

    torch_device = torch.device("cpu")
    collective_backend = "gloo"
    works_by_itself = False

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """Return the checkpoint's; float32 for dtypes that torch is slow in here: float16, bfloat16 without AVX512."""
        capability = torch.backends.cpu.get_cpu_capability()
        is_slow = checkpoint_dtype is torch.float16 or capability in _SLOW_IN_BFLOAT16
        if not is_slow or checkpoint_dtype is torch.float32:
            return checkpoint_dtype
        logger.info("float32 for weights in %s, in which this CPU (%s) is slow", checkpoint_dtype, capability)
        return torch.float32

    def total_memory_bytes(self) -> int:
        """The machine's memory, or less where a container is limited to less."""
        return total_bytes()

    def free_memory_bytes(self) -> int:
        """What new allocations can have without swapping, in the machine and in the container."""
        return available_bytes()

    def peak_memory_bytes(self) -> int:
        """The largest resident size of this process."""
        peak = read_field(_PROC_SELF / "status", "VmHWM:")
        if peak is not None:
            return peak * 1024
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak_memory(self) -> None:
        """Start again from the present resident size."""
        file = _PROC_SELF / "clear_refs"
        if file.exists():
            file.write_text("5")  # proc(5): resets VmHWM

    def synchronize(self) -> None:
        """Return at once: nothing is queued on a CPU."""

    def mark(self) -> CpuMark:
        """Mark this moment: nothing is queued."""
        return CpuMark(time.perf_counter())

    def start_copy(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Return them at once: they are on the host already."""
        return lambda: list(tensors)
