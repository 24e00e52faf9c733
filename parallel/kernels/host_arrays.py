"""Arrays of the host by their dtype, and their way to a device, for which the host does not wait."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor there; to a GPU through pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
