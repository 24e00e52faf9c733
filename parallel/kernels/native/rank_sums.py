"""Sums over the CPU ranks of one machine, in memory that all of them map: all_reduce.h."""

import ctypes
import mmap
from collections.abc import Callable, Mapping
from ctypes import addressof
from enum import IntEnum

import torch
from torch import Tensor

from parallel.collectives import collective_error
from parallel.kernels.native.structures import SharedRanks
from parallel.kernels.native.tape import Recorder, Tape
from parallel.mesh import Axis


class Meeting(IntEnum):
    """How ranks met; `Meeting` of all_reduce.h."""

    DONE = 0
    GONE = 1
    LATE = 2
    UNEQUAL = 3


_REASONS = {
    Meeting.GONE: "another rank is gone",
    Meeting.LATE: "another rank is late",
    Meeting.UNEQUAL: "another rank adds up a tensor of another size",
}


class NativeAllReduce:
    """Implements `OneShot`, for one model: what it adds up goes onto the tape of the model's kernels.

    Args:
        sums: the compiled sums by dtype.
        memory: what the ranks share, zero.
        axis: the ranks; they are on one machine.
        recorder: of the kernels.
        num_threads: of torch's OpenMP pool.
    """

    def __init__(
        self,
        sums: Mapping[torch.dtype, Callable[..., int]],
        memory: mmap.mmap,
        axis: Axis,
        recorder: Recorder,
        num_threads: int,
    ) -> None:
        assert axis.local is not None, "ranks that share memory are on one machine"
        self._sums = sums
        self._axis = axis
        self._local = axis.local  # keeps the sockets open
        self._recorder = recorder
        self._num_threads = num_threads
        self._sockets = (ctypes.c_int32 * axis.size)(*self._local.sockets)
        self._memory = (ctypes.c_char * len(memory)).from_buffer(memory)  # keeps it mapped
        self.ranks = SharedRanks(
            memory=addressof(self._memory),
            sockets=addressof(self._sockets),
            rank=axis.rank,
            num_ranks=axis.size,
            timeout_us=round(self._local.timeout_s * 1e6),
        )
        """What compiled code needs to know; where the sums stand."""

    def takes(self, x: Tensor) -> bool:
        """See `OneShot.takes`."""
        return x.dtype in self._sums and x.is_contiguous()

    def sum(self, x: Tensor) -> Tensor:
        """See `OneShot.sum`; in place."""
        meeting = self._sums[x.dtype](addressof(self.ranks), x.data_ptr(), x.numel(), self._num_threads)
        self.ranks.waited_ns = 0  # the caller takes the time
        if meeting:
            raise ConnectionError(_REASONS[Meeting(meeting)])
        self._recorder.note(Tape.all_reduce, x, self.ranks)
        return x

    def note_program(self, num_sums: int, meeting: int) -> None:
        """Count what a program has added up, and how long it waited. CollectiveError where the ranks did not meet."""
        self._axis.counts["all_reduce"] += num_sums
        self._axis.wait_s += self.ranks.waited_ns / 1e9
        self.ranks.waited_ns = 0
        if meeting:
            raise collective_error("all_reduce", self._axis, ConnectionError(_REASONS[Meeting(meeting)]))
