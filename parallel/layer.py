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

from parallel.host_memory import use_huge_pages
from parallel.kernels.base import ExpertWeights, Kernels
from parallel.kernels.linears import PackedExperts, PackedLinear
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
    int8_linears: bool = False
    """Linear layers, the head, and experts where the kernels can, multiply in 8 bits; routers stay as they are."""

    def empty(self, *shape: int, stays: bool = False) -> Tensor:
        """A new tensor for weights, not initialised; `stays`: where it is filled, and is read in every step."""
        weight = torch.empty(*shape, device=self.device, dtype=self.dtype)
        if stays and self.device.type == "cpu":
            use_huge_pages(weight)
        return weight

    def empty_linear(self, num_out: int, num_in: int) -> Tensor:
        """Return an empty weight [out, in] for `pack_linear`."""
        if self.int8_linears or self.device.type != "cpu":
            return self.empty(num_out, num_in)
        return self.kernels.empty_linear(num_out, num_in, self.dtype)

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
        """Lay out what the user may want in 8 bits; see `Kernels.pack_linear`."""
        lay_out = self.kernels.quantize_linear if self.int8_linears else self.kernels.pack_linear
        return lay_out(weight_OI, bias_O)

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        """Lay out experts, in 8 bits if the user wants it and the kernels can; see `Kernels.pack_experts`."""
        is_int8 = self.int8_linears and self.kernels.quantizes_experts
        return (self.kernels.quantize_experts if is_int8 else self.kernels.pack_experts)(weights)

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None, *, is_shared: bool) -> PackedLinear:
        """Lay out the head, in 8 bits if the user wants it, which is a copy; see `Kernels.pack_head`."""
        if self.int8_linears:
            return self.kernels.quantize_linear(weight_VE, bias_V, keeps_weight=is_shared)
        return self.kernels.pack_head(weight_VE, bias_V, is_shared=is_shared)


class Layer(Protocol):
    """A part of the decoder that owns weights."""

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The parameters of this rank and what fills them; `prefix` is the decoder's name of this layer."""

    def finish_loading(self) -> None:
        """Lay the weights out for the kernels; once, when they are filled and before the first call."""
