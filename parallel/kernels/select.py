"""Chooses the kernels of a process, once, from its device and what the user asks for."""

import logging

import torch

from parallel.errors import DeviceError
from parallel.kernels.base import Kernels
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.reference import ReferenceKernels

NAMES = ("auto", "reference", "cpu")

logger = logging.getLogger(__name__)


def select_kernels(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Kernels:
    """The kernels called `name`; "auto" takes the fastest that this device and dtype have.

    Raises DeviceError when the name is not known or its kernels do not run on the device.
    """
    if name not in NAMES:
        raise DeviceError(f"kernels are {name!r}; allowed: {', '.join(NAMES)}")
    if name == "cpu" and device.type != "cpu":
        raise DeviceError(f"kernels are 'cpu' on device {device}; allowed there: auto, reference")
    kernels = ReferenceKernels() if name == "reference" or device.type != "cpu" else CpuKernels()
    logger.info("%s for %s on %s", type(kernels).__name__, dtype, device)
    return kernels
