"""The border between the engine and a kind of device: memory, dtype, time, and who computes what is started there."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the work of a device."""

    def seconds_since(self, earlier: Self) -> float | None:
        """The device's time from an earlier mark to this one; None while it has not come to this one."""


class Device(Protocol):
    """One rank's device."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this rank live."""

    @property
    def collective_backend(self) -> str:
        """The torch.distributed backend for this device: "gloo" or "nccl"."""

    @property
    def works_by_itself(self) -> bool:
        """Whether work is queued on the device while the host goes on; else the thread that starts work does it."""

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """What `--dtype auto` means here."""

    def total_memory_bytes(self) -> int:
        """Memory that this rank may plan with."""

    def free_memory_bytes(self) -> int:
        """Memory free now, over all processes."""

    def peak_memory_bytes(self) -> int:
        """The most that this process has held on the device since `reset_peak_memory`."""

    def reset_peak_memory(self) -> None:
        """Start a new measurement for `peak_memory_bytes`."""

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    def mark(self) -> Mark:
        """Mark the end of the work queued so far. Never waits."""

    def start_copy(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Queue a copy of the device's tensors to the host, after the work queued so far; the result waits for it."""
