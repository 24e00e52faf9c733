"""The energy of a GPU, where NVML tells it (NVIDIA GPUs from Volta on, with the package nvidia-ml-py)."""

from typing import Any, Self

import torch


class GpuEnergy:
    """The meter of one GPU, or of nothing."""

    def __init__(self, nvml: Any = None, handle: Any = None) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Return the meter of a device; it tells nothing on a CPU, without the package, or where the driver refuses."""
        if device.type != "cuda":
            return cls()
        try:
            import pynvml  # of the extra `bench`
        except ImportError:
            return cls()
        try:
            pynvml.nvmlInit()
            # by its id: NVML counts GPUs that CUDA_VISIBLE_DEVICES hides
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        except pynvml.NVMLError:
            return cls()
        return cls(pynvml, handle)

    def read_j(self) -> float | None:
        """Joules since the driver was loaded; None where nothing tells."""
        if self._nvml is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        except self._nvml.NVMLError:
            return None
