"""One CUDA GPU as a device."""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from parallel.errors import DeviceError


class CudaMark:
    """An event in the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_since(self, earlier: Self) -> float | None:
        """The GPU's time between the two, once it has come to this one."""
        return earlier._event.elapsed_time(self._event) / 1e3 if self._event.query() else None


class CudaDevice:
    """Implements `Device`; see there. Makes its GPU the current one of the calling thread."""

    collective_backend = "nccl"
    works_by_itself = True

    def __init__(self, local_rank: int = 0) -> None:
        num_devices = torch.cuda.device_count()
        if not 0 <= local_rank < num_devices:
            raise DeviceError(f"GPU {local_rank} asked for; this process sees {num_devices}")
        self.torch_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.torch_device)

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the checkpoint; float16 for bfloat16 on GPUs before Ampere, which have none."""
        is_old = torch.cuda.get_device_capability(self.torch_device) < (8, 0)
        return torch.float16 if is_old and checkpoint_dtype is torch.bfloat16 else checkpoint_dtype

    def total_memory_bytes(self) -> int:
        """The GPU's memory."""
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def free_memory_bytes(self) -> int:
        """Return what is free on the GPU; what torch keeps for itself but does not use counts as free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def peak_memory_bytes(self) -> int:
        """The most that torch's allocator had in use."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak_memory(self) -> None:
        """Start again from what is in use now."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.torch_device)

    def mark(self) -> CudaMark:
        """An event after what is queued."""
        return CudaMark()

    def start_copy(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Copy into pinned memory, so that neither the host nor later work waits for it."""
        copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> list[Tensor]:
            copied.synchronize()
            return copies

        return wait
