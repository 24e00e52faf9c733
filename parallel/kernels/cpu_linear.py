"""Linear layers on a CPU: weights laid out once for oneDNN where that is faster, plain `F.linear` elsewhere."""

import torch
from torch import Tensor

from parallel.kernels.linears import PackedLinear
from parallel.kernels.reference import ReferenceLinear

_SMALL_WEIGHT = 1 << 18
"""Elements of a weight below which the call costs more (15 us against 3) than the better layout saves."""


def pack_linear(weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
    """Choose the layout; measured in docs/experiments. A packed weight is a copy: the original may go."""
    if _is_packable(weight_OI):
        return OneDnnLinear(weight_OI, bias_O)
    return ReferenceLinear(weight_OI, bias_O)


def _is_packable(weight_OI: Tensor) -> bool:
    if not torch.backends.mkldnn.is_available() or weight_OI.numel() < _SMALL_WEIGHT:
        return False
    match weight_OI.dtype:
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case torch.float32:
            return True
        case _:
            return False


class OneDnnLinear:
    """A weight in oneDNN's own blocked layout, which AMX and AVX-512 read without reordering it in each call."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous())
        self._bias_O = bias_O
        self._linear = torch.ops.mkldnn._linear_pointwise.default  # looked up once: it is called for every layer

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `PackedLinear`."""
        out_TO: Tensor = self._linear(x_TI, self._packed, self._bias_O, "none", [], "")
        return out_TO
