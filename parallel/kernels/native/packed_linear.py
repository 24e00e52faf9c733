"""Linear layers whose weight is laid out for the compiled products (matrix.h)."""

import ctypes

import torch
from torch import Tensor

from parallel.host_memory import HugePages
from parallel.kernels.linears import Search, Sift
from parallel.kernels.native.library import LANES, Programs
from parallel.kernels.native.structures import Embedding, Table
from parallel.kernels.native.tape import Recorder, Tape

PANEL = 32
"""Outputs that are laid out together."""
_STEP = 32
_SCREEN_STEP = 64
"""Inputs, in 8 bits, that are laid out together."""
_SCREEN_OUTPUT_BYTES = 16
"""Scale, sum and bounds of an output."""
_LEAST_PANELS = 16
"""Least panels for each of the largest outputs that rows want: with fewer, most panels would have one that may be."""
_SMALL_WEIGHT = 1 << 14
"""Elements below which torch's product costs less than packing is worth."""


def can_pack(weight_OI: Tensor, programs: Programs | None) -> bool:
    """Whether the compiled products, if there are any, take this weight."""
    num_out, num_in = weight_OI.shape
    return weight_OI.is_contiguous() and _is_fit(num_out, num_in, weight_OI.dtype, programs)


def can_pack_in_place(num_out: int, num_in: int, dtype: torch.dtype, programs: Programs | None) -> bool:
    """Whether they do so without a copy."""
    return num_out % PANEL == 0 and _is_fit(num_out, num_in, dtype, programs)


def _is_fit(num_out: int, num_in: int, dtype: torch.dtype, programs: Programs | None) -> bool:
    if programs is None or dtype is not programs.dtype:
        return False
    return num_out % LANES == 0 and num_in % _STEP == 0 and num_out * num_in >= _SMALL_WEIGHT


class NativeLinear:
    """Implements `SearchedLinear`; the weight is laid out in panels of 32 outputs, in place where they are whole.

    Args:
        keeps_sums: results are float32, not rounded to the dtype of the weight.
    """

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        programs: Programs,
        recorder: Recorder,
        num_threads: int,
        *,
        memory: HugePages,
        keeps_sums: bool = False,
    ) -> None:
        self._num_out, self._num_in = weight_OI.shape
        self._dtype = torch.float32 if keeps_sums else weight_OI.dtype
        self._packed = weight_OI.view(-1)
        if self._num_out % PANEL:  # the last panel is filled up
            self._packed = memory.empty(-(-self._num_out // PANEL) * PANEL * self._num_in, weight_OI.dtype)
        self._bias_O = None if bias_O is None else bias_O.contiguous()
        self._multiply = programs.multiply_float32 if keeps_sums else programs.multiply
        self._largest = programs.largest
        self._recorder = recorder
        self._num_threads = num_threads
        programs.pack_matrix(self._packed.data_ptr(), weight_OI.data_ptr(), self._num_out, self._num_in, num_threads)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `PackedLinear`."""
        x_TI = in_rows(x_TI)
        out_TO = x_TI.new_empty(len(x_TI), self._num_out, dtype=self._dtype)
        self._multiply(
            *(out_TO.data_ptr(), x_TI.data_ptr(), x_TI.stride(0), len(x_TI), self._packed.data_ptr()),
            *(None if self._bias_O is None else self._bias_O.data_ptr(), self._num_out, self._num_in),
            self._num_threads,
        )
        self._recorder.note(Tape.multiply, out_TO, x_TI, self._packed, self._bias_O)
        return out_TO

    def largest(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """See `SearchedLinear`."""
        x_TI = in_rows(x_TI)
        values_T, indices_T = x_TI.new_empty(len(x_TI), dtype=torch.float32), torch.empty(len(x_TI), dtype=torch.int64)
        self._largest(
            *(values_T.data_ptr(), indices_T.data_ptr(), x_TI.data_ptr(), x_TI.stride(0), len(x_TI)),
            *(self._packed.data_ptr(), None if self._bias_O is None else self._bias_O.data_ptr()),
            *(self._num_out, self._num_in, self._num_threads),
        )
        return values_T, indices_T


class NativeTable:
    """Implements `TableLinear`, `SiftedLinear`, `ScreenedLinear`: the weight, of whole panels, is laid out where it is.

    Results are float32, for any number of rows the same bits. A copy in 8 bits, half as large, tells where the largest
    outputs of few rows may be, so that most of the weight is not read.
    """

    def __init__(self, weight_OI: Tensor, programs: Programs, num_threads: int, *, memory: HugePages) -> None:
        self._num_out, self._num_in = weight_OI.shape
        self._weight_OI = weight_OI
        self._programs = programs
        self._num_threads = num_threads
        address = weight_OI.data_ptr()
        self._screen: Tensor | None = None
        if programs.make_screen is not None:
            num_bytes = self._num_out * (-(-self._num_in // _SCREEN_STEP) * _SCREEN_STEP + _SCREEN_OUTPUT_BYTES)
            self._screen = memory.empty(num_bytes, torch.int8)
            programs.make_screen(self._screen.data_ptr(), address, self._num_out, self._num_in, num_threads)
        programs.pack_matrix(address, address, self._num_out, self._num_in, num_threads)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `PackedLinear`."""
        x_TI = in_rows(x_TI)
        out_TO = x_TI.new_empty(len(x_TI), self._num_out, dtype=torch.float32)
        self._programs.multiply_float32(
            *(out_TO.data_ptr(), x_TI.data_ptr(), x_TI.stride(0), len(x_TI), self._weight_OI.data_ptr(), None),
            *(self._num_out, self._num_in, self._num_threads),
        )
        return out_TO

    def largest(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """See `SearchedLinear`."""
        return self.drawn(x_TI, Search(None), 0)

    def drawn(self, x_TI: Tensor, search: Search, first_token: int) -> tuple[Tensor, Tensor]:
        """See `DrawnLinear`."""
        x_TI = in_rows(x_TI)
        values_T, indices_T = torch.empty(len(x_TI), dtype=torch.float32), torch.empty(len(x_TI), dtype=torch.int64)
        table = self.to_search(values_T, indices_T)
        table.ask(search.noise, search.edits, first_token)
        self._programs.search_table(ctypes.byref(table), x_TI.data_ptr(), x_TI.stride(0), len(x_TI), self._num_threads)
        return values_T, indices_T

    @property
    def most_edited_rows(self) -> int:
        """See `DrawnLinear`."""
        return self._programs.most_screened_rows

    def can_sift(self, sift: Sift) -> bool:
        """See `SiftedLinear`."""
        is_few = 0 < len(sift.numbers) <= self._programs.most_sifted_rows
        return is_few and int(sift.numbers.sum()) * PANEL * _LEAST_PANELS <= self._num_out

    def sifted(self, x_TI: Tensor, sift: Sift, first_token: int) -> Tensor:
        """See `SiftedLinear`."""
        assert self._programs.sift_table is not None, "can_sift"
        x_TI = in_rows(x_TI)
        out_TO = torch.empty(len(x_TI), self._num_out, dtype=torch.float32)
        table = self._to_read()
        table.ask(sift.noise, sift.edits, first_token)
        self._programs.sift_table(
            *(ctypes.byref(table), out_TO.data_ptr(), sift.numbers.ctypes.data),
            *(x_TI.data_ptr(), x_TI.stride(0), len(x_TI), self._num_threads),
        )
        return out_TO

    def spared_bytes(self, num_rows: int) -> int:
        """See `ScreenedLinear`."""
        if self._screen is None or not 0 < num_rows <= self._programs.most_screened_rows:
            return 0
        return self._weight_OI.nbytes - self._screen.nbytes

    def to_search(self, values_T: Tensor, indices_T: Tensor) -> Table:
        """What a program takes to find the largest outputs of its rows, or what it `ask`s; they go to these tensors."""
        table = self._to_read()
        table.largest, table.indices = values_T.data_ptr(), indices_T.data_ptr()
        return table

    def _to_read(self) -> Table:
        return Table(
            values=self._weight_OI.data_ptr(),
            screen=None if self._screen is None else self._screen.data_ptr(),
            num_out=self._num_out,
            num_in=self._num_in,
        )

    def to_embed(self) -> Embedding:
        """What a program takes to begin with rows of it, but for which ones."""
        return Embedding(values=self._weight_OI.data_ptr(), num_rows=self._num_out, is_packed=True)

    def rows(self, indices_T: Tensor) -> Tensor:
        """See `TableLinear`."""
        indices_T = indices_T.contiguous()
        rows_TI = self._weight_OI.new_empty(len(indices_T), self._num_in)
        self._programs.unpack_rows(
            *(rows_TI.data_ptr(), indices_T.data_ptr(), len(indices_T)),
            *(self._weight_OI.data_ptr(), self._num_out, self._num_in, self._num_threads),
        )
        return rows_TI


def in_rows(x_TI: Tensor) -> Tensor:
    """Return it so that the columns of a row follow each other."""
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
