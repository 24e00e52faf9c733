"""What linear layers on CUDA must do, for any device: used on a GPU and in Triton's interpreter."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from helpers.elementwise_cases import TOLERANCES
from parallel.kernels.cuda import CudaKernels
from parallel.kernels.int8_linear import Int8Linear
from parallel.kernels.linears import GatedLinear, PackedLinear
from parallel.kernels.reference import ReferenceKernels, ReferenceLinear


class LinearCase(NamedTuple):
    """A layer and the rows it multiplies."""

    num_in: int
    num_out: int
    has_bias: bool
    num_rows: int

    @property
    def name(self) -> str:
        """For pytest."""
        return f"{self.num_rows} x {self.num_in} -> {self.num_out}" + (" + bias" if self.has_bias else "")

    def check(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises AssertionError where a result is not the reference's, which in 8 bits means each bit."""
        weight, x = (_random(num, self.num_in, dtype, device) for num in (self.num_out, self.num_rows))
        weight *= self.num_in**-0.5
        x *= torch.arange(1, self.num_rows + 1, device=device)[:, None]
        bias = _random(1, self.num_out, dtype, device)[0] if self.has_bias else None
        kernels = CudaKernels(device)
        meant = ReferenceLinear(weight, bias)(x)
        _assert_close(kernels.pack_linear(weight, bias), x, meant)
        meant = Int8Linear(weight, bias)(x)
        packed = kernels.quantize_linear(weight, bias)
        assert torch.equal(packed(x), meant)
        assert isinstance(packed, GatedLinear)
        assert torch.equal(packed.gated(x), kernels.silu_mul(meant))


def linear_cases() -> Iterator[LinearCase]:
    """Inputs of one piece of a program and of several, whole and not; one output, and more than a tile has."""
    layers = (64, 6, True), (100, 34, False), (5000, 4, True), (8192, 2, False), (6144, 40, True)
    for num_in, num_out, has_bias in layers:
        for num_rows in (1, 5, 20, 70):
            yield LinearCase(num_in, num_out, has_bias, num_rows)


def check_gate_of_one_row(dtype: torch.dtype, device: torch.device) -> None:
    """Raises AssertionError where gate and up are not rounded before they are multiplied, as of many rows."""
    weight = torch.zeros(4, 64, dtype=dtype, device=device)
    weight[:, 0] = 1
    weight[:2, 1] = weight[2:, 2] = torch.finfo(dtype).eps * 0.4
    kernels = CudaKernels(device)
    packed = kernels.pack_linear(weight, None)
    assert isinstance(packed, GatedLinear)
    for other in (1, 2):  # in float32 the gate, then up, is a little more than 1
        x = torch.zeros(1, 64, dtype=dtype, device=device)
        x[0, [0, other]] = 1
        assert torch.equal(packed.gated(x), kernels.silu_mul(torch.ones(1, 4, dtype=dtype, device=device)))


def _assert_close(packed: PackedLinear, x: Tensor, meant: Tensor) -> None:
    assert isinstance(packed, GatedLinear)
    tolerance = TOLERANCES[x.dtype]
    for actual, expected in ((packed(x), meant), (packed.gated(x), ReferenceKernels().silu_mul(meant))):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * 4)


def _random(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(num_rows)).to(device, dtype)
