"""One step's tensors, as the model takes them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel.kernels.base import AttentionMeta
from parallel.kernels.host_arrays import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What the model and the sampler take in one step."""

    token_ids: Tensor
    """[T] int64, on the device. Where `fed_rows` says, anything: those tokens are being sampled."""
    positions: Tensor
    """[T] int64, on the device: where in its sequence each token is."""
    metas: list[AttentionMeta]
    """Meta of each group of layers."""
    sample_rows: Tensor | None
    """[S] int64, on the device: the packed tokens after which sequences sample; None: all of them, in order."""
    fed_rows: Tensor
    """int64, on the device: the packed tokens that are the last ones sampled in `fed_slots`, known there only."""
    fed_slots: Tensor
    """int64, on the device: the slot whose last sampled token each of `fed_rows` is."""
    sample_slots: Int64Array
    """[S], on the host: the slots that sample, in the plan's order."""
    sample_slots_device: Tensor
    """`sample_slots` on the device."""
    sample_positions: Int64Array
    """[S], on the host: the absolute position of each token to be sampled."""


def to_tensors(arrays: Iterable[npt.NDArray[np.integer]], dtype: type[np.integer]) -> list[Tensor]:
    """The arrays as tensors on the host, contiguous and of this dtype; copied only where they are not."""
    return [torch.from_numpy(np.ascontiguousarray(array, dtype)) for array in arrays]
