"""Chooses the device of a process, once."""

import torch

from parallel.device.base import Device
from parallel.device.cpu import CpuDevice
from parallel.device.cuda import CudaDevice
from parallel.errors import DeviceError

NAMES = ("auto", "cpu", "cuda")


def select_device(name: str, local_rank: int = 0) -> Device:
    """The device called `name`; "auto" takes CUDA where there is one.

    Args:
        name: one of NAMES.
        local_rank: which of the GPUs that this process sees.

    Raises:
        DeviceError: the name is not known, or there is no such device.
    """
    if name not in NAMES:
        raise DeviceError(f"device is {name!r}; allowed: {', '.join(NAMES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device is 'cuda', but this process sees no GPU; allowed: auto, cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return CpuDevice()
    return CudaDevice(local_rank)
