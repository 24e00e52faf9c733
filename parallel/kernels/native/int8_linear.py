"""A linear layer in 8 bits whose weight is laid out for the compiled products (matrix_int8.h)."""

import torch
from torch import Tensor

from parallel.host_memory import HugePages, forget
from parallel.kernels.linears import Search
from parallel.kernels.native.library import Int8Operations
from parallel.kernels.native.packed_linear import PANEL, in_rows
from parallel.kernels.native.tape import Recorder, Tape

_STEP = 64
"""Inputs that are laid out together."""
_OUTPUT_BYTES = 8
"""Bytes of an output beside its weights: a scale, and the sum of the weights."""
_PACKED_AT_ONCE = 1 << 19
"""Elements."""


def pack_int8(
    weight_OI: Tensor, operations: Int8Operations, num_threads: int, *, memory: HugePages, keeps_weight: bool
) -> Tensor:
    """Lay out a weight; for `keeps_weight` see `NativeInt8Linear`."""
    num_out, num_in = weight_OI.shape
    num_panels, num_steps = -(-num_out // PANEL), -(-num_in // _STEP)
    packed = memory.empty(num_panels * PANEL * (num_steps * _STEP + _OUTPUT_BYTES), torch.int8)
    weight_OI = weight_OI.contiguous()
    step = max(1, _PACKED_AT_ONCE // num_in // PANEL) * PANEL
    for start in range(0, num_out, step):
        rows = weight_OI[start : start + step]
        operations.pack(packed.data_ptr(), num_out, num_in, rows.data_ptr(), start, len(rows), num_threads)
        if not keeps_weight:
            forget(rows)  # so that a matrix is never there twice
    return packed


class NativeInt8Linear:
    """Implements `DrawnLinear` with the bits of `Int8Linear`.

    Args:
        keeps_weight: the caller goes on using the weight; else its memory is given up while it is packed.
    """

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        operations: Int8Operations,
        recorder: Recorder,
        num_threads: int,
        *,
        memory: HugePages,
        keeps_weight: bool,
    ) -> None:
        self._num_out, self._num_in = weight_OI.shape
        self._packed = pack_int8(weight_OI, operations, num_threads, memory=memory, keeps_weight=keeps_weight)
        self._bias_O = None if bias_O is None else bias_O.contiguous()
        self._multiply = operations.multiply
        self._largest = operations.largest
        self._recorder = recorder
        self._num_threads = num_threads

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `PackedLinear`."""
        x_TI = in_rows(x_TI)
        out_TO = x_TI.new_empty(len(x_TI), self._num_out)
        self._multiply(
            *(out_TO.data_ptr(), x_TI.data_ptr(), x_TI.stride(0), len(x_TI), self._packed.data_ptr()),
            *(None if self._bias_O is None else self._bias_O.data_ptr(), self._num_out, self._num_in),
            self._num_threads,
        )
        self._recorder.note(Tape.multiply_int8, out_TO, x_TI, self._packed, self._bias_O)
        return out_TO

    def largest(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """See `SearchedLinear`."""
        return self.drawn(x_TI, Search(None), 0)

    most_edited_rows = 0
    """See `DrawnLinear`."""

    def drawn(self, x_TI: Tensor, search: Search, first_token: int) -> tuple[Tensor, Tensor]:
        """See `DrawnLinear`."""
        assert search.edits is None, "most_edited_rows"
        x_TI = in_rows(x_TI)
        values_T, indices_T = x_TI.new_empty(len(x_TI), dtype=torch.float32), torch.empty(len(x_TI), dtype=torch.int64)
        self._largest(
            *(values_T.data_ptr(), indices_T.data_ptr(), x_TI.data_ptr(), x_TI.stride(0), len(x_TI)),
            *(self._packed.data_ptr(), None if self._bias_O is None else self._bias_O.data_ptr()),
            *(self._num_out, self._num_in),
            *(None if search.noise is None else search.noise.ctypes.data, first_token, self._num_threads),
        )
        return values_T, indices_T
