"""What every parallel layer is built from, and what every layer offers to those who load it.

Layers are plain objects, not `torch.nn.Module`s: a decode step calls ten of them per decoder layer, and to look up and
call a submodule takes 1.6 us, an object 0.1 us.

A layer lives in two phases: its parameters are filled (`sharded_parameters`, by a checkpoint loader), then
`finish_loading` hands them to the kernels, and from then on the layer can be called.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallel.kernels.base import Kernels
from parallel.mesh import Axis
from parallel.shard import ShardedParameter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerContext:
    """Where a layer lives: its tensor-parallel axis and what that divides, kernels, device and dtype."""

    axis: Axis
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    expert_parallel: bool = False
    """Each rank of the axis has some experts whole; else a part of every one."""

    def empty(self, *shape: int) -> Tensor:
        """A new tensor for weights, not initialised."""
        return torch.empty(*shape, device=self.device, dtype=self.dtype)


class Layer(Protocol):
    """A part of the decoder that owns weights."""

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The parameters of this rank and what fills them; `prefix` is the decoder's name of this layer."""

    def finish_loading(self) -> None:
        """Lay the weights out for the kernels; once, when they are filled and before the first call."""
