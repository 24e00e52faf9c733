"""Linear layers in 8 bits, in plain torch: the definition that the compiled ones are tested against, and the fallback.

Weights are int8 with a float32 scale for each output; activations become int8 with a scale for each token when they
come. Both are symmetric: the largest magnitude is 127. Sums are integers, so neither the number of tokens nor threads
change a bit. LLM.int8(), arXiv:2208.07339, section 2, without its outliers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST = 2.0**-100
"""Least value that a row's largest magnitude counts as, so that its inverse is a number."""
_MOST = 127.0
_EXACT_INPUTS = 1024
"""Products of so many inputs, each at most 127 * 127, have a sum that float32 holds exactly."""
_INT_MM_ROWS = 32
"""Least rows for torch's integer product on CUDA: it takes no fewer than 17, and multiples of 8 of all else."""


def quantize_rows(x_RI: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [R, in], float32 scales [R, 1]) with x = integers * scale, rounded to nearest, ties to even.

    A row that has a NaN or an infinity has such a scale.
    """
    x_RI = x_RI.float()
    most_R1 = x_RI.abs().amax(1, keepdim=True).clamp_min(_LEAST)
    scales_R1 = most_R1 / torch.full_like(most_R1, _MOST)  # by a number, CUDA multiplies with its rounded inverse
    return (x_RI * (most_R1.reciprocal() * _MOST)).round().to(torch.int8), scales_R1


class Int8Linear:
    """Implements `PackedLinear` on any device; on CUDA by torch's integer product."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, scales_O1 = quantize_rows(weight_OI)
        self._scales_O = scales_O1.squeeze(1)
        self._bias_O = bias_O
        num_out, num_in = weight_OI.shape
        self._is_integer = _multiplies_integers(weight_OI.device) and num_out % 8 == 0 and num_in % 8 == 0

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `PackedLinear`: integer sums * the token's scale * the output's scale + bias in float32, then rounded."""
        integers_TI, scales_T1 = quantize_rows(x_TI)
        multiply = _multiply_integers if self._is_integer else _multiply_exactly
        out_TO = multiply(integers_TI, self._weight_OI).float().mul_(scales_T1).mul_(self._scales_O)
        if self._bias_O is not None:
            out_TO += self._bias_O
        return out_TO.to(x_TI.dtype)


def _multiplies_integers(device: torch.device) -> bool:
    """Whether torch's integer product is exact here: without VNNI it may clip sums of two products to 16 bits."""
    return device.type == "cuda" or (device.type == "cpu" and bool(torch.cpu._is_vnni_supported()))


def _multiply_integers(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    num_rows = len(x_TI)
    if x_TI.is_cuda and (num_rows < _INT_MM_ROWS or num_rows % 8):
        x_TI = F.pad(x_TI, (0, 0, 0, max(_INT_MM_ROWS, -(-num_rows // 8) * 8) - num_rows))
    return torch._int_mm(x_TI, weight_OI.T)[:num_rows]


def _multiply_exactly(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return the same sums of integers, from products in float32."""
    total_TO = x_TI.new_zeros(len(x_TI), len(weight_OI), dtype=torch.int32)
    for x, weight in zip(x_TI.split(_EXACT_INPUTS, 1), weight_OI.split(_EXACT_INPUTS, 1), strict=True):
        total_TO += F.linear(x.float(), weight.float()).int()
    return total_TO
