"""Arrays of the host on their way to a device, without the host waiting for it."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor there; to a GPU through pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
