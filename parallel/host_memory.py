"""Memory of the process: what its allocator keeps although it is free, pages that are large, and pages taken early."""

import ctypes
import mmap
import time
import weakref
from collections.abc import Callable
from threading import Thread, main_thread

import torch
from torch import Tensor

from parallel.available_memory import available_bytes, total_bytes

_HUGE_PAGE, _PIECE, _CACHE_LINE = 2 << 20, 64 << 20, 64
"""Bytes; a piece is what `HugePages` asks the system for at once."""
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_POPULATE_READ = 4, 14, 22  # of Linux
_LOOK_S = 0.1
_SCARCE = 0.1
"""Share of the memory that there is: no more is taken early when less is available."""

TakePages = Callable[[int, int, int], None]
"""Has the system give out pages, on idle cores only, and waits: their address, their size and that of one in bytes."""


def release_free_memory() -> None:
    """Give it back to the system, where the C library can: glibc keeps what lies between blocks that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HugePages:
    """Memory on the CPU for tensors that live long, in pages of 2 MB; in pages as usual on other systems than Linux.

    Weights are read once a step, and fewer addresses are then to be looked up (docs/experiments). The tensors lie
    one after the other: by itself each would have pages of 4 KB at both ends. The memory of a piece is given back when
    all its tensors are gone.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A new tensor of one dim, on the boundary of a cache line; not initialised."""
        num_bytes = num_elements * dtype.itemsize
        room = -(-num_bytes // _CACHE_LINE) * _CACHE_LINE
        if room > len(self._rest):
            self._rest = _map_piece(max(room, _PIECE))
        tensor, self._rest = self._rest[:num_bytes].view(dtype), self._rest[room:]
        return tensor


def _map_piece(num_bytes: int) -> Tensor:
    num_bytes = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    piece = torch.frombuffer(memory, dtype=torch.uint8)
    piece = piece[-piece.data_ptr() % _HUGE_PAGE :][:num_bytes]
    use_huge_pages(piece)
    return piece


def use_huge_pages(x: Tensor) -> None:
    """Ask for pages of 2 MB within a new tensor on the CPU, before it is filled; in vain where there is no Linux."""
    _advise_within(x.data_ptr(), x.nbytes, _MADV_HUGEPAGE)


def forget(x: Tensor) -> None:
    """Give the pages back that lie within a contiguous tensor on the CPU, whose values nobody reads again."""
    assert x.is_contiguous()
    _advise_within(x.data_ptr(), x.nbytes, _MADV_DONTNEED)


def forget_storage(x: Tensor) -> None:
    """Give the pages back of all the memory that a tensor on the CPU is a view into, which nobody reads again."""
    memory = x.untyped_storage()
    _advise_within(memory.data_ptr(), memory.nbytes(), _MADV_DONTNEED)


def read_now(x: Tensor) -> None:
    """Read the pages of a mapped file that a tensor is a view into, all at once; in vain before Linux 5.14.

    Left to page faults they come in pieces of 128 KB, each asked for when the one before is there.
    """
    if x.numel() > 0:
        _advise_pages(*_touched(x), _MADV_POPULATE_READ)


def populate_when_idle(rows_RBX: Tensor, is_resting: Callable[[], bool], take: TakePages) -> Thread:
    """Take the pages of new memory on the CPU before they are written, in a thread that has `take` do it.

    A step that writes a page first waits for the system to find and clear it. Blocks B are taken in their order, of all
    rows R, while `is_resting()`: a core is idle also where a rank waits a moment for another, and the system does not
    leave a page of 2 MB half cleared when that comes. The thread ends when the tensor is gone, memory is scarce, or the
    main thread has ended. It is none of low priority itself: others would wait for Python's lock while it waits for a
    core.
    """
    # no daemon: Python ends those wherever they are, and within torch that aborts the process
    thread = Thread(target=_populate, args=(weakref.ref(rows_RBX), is_resting, take), name="populate")
    thread.start()
    return thread


def _populate(get_rows: Callable[[], Tensor | None], is_resting: Callable[[], bool], take: TakePages) -> None:
    piece = 0
    while main_thread().is_alive() and (rows_RBX := get_rows()) is not None:  # main waits for it
        if not is_resting():
            del rows_RBX  # the memory belongs to somebody else
            time.sleep(_LOOK_S)
            continue
        num_blocks = -(-_HUGE_PAGE // rows_RBX[0, 0].nbytes)
        index, row = divmod(piece, len(rows_RBX))
        first = index * num_blocks
        if first >= rows_RBX.shape[1] or (row == 0 and available_bytes() < _SCARCE * total_bytes()):
            return
        take(*_touched(rows_RBX[row, first : first + num_blocks]), mmap.PAGESIZE)
        piece += 1
        del rows_RBX


def leave(x: Tensor) -> None:
    """Count them no longer as memory of this process; they stay in the system's cache of files.

    Linux maps a page of that cache whole, since 6.18 one of up to 2 MB, so that neighbours in the file are left too.
    """
    if x.numel() > 0:
        _advise_pages(*_touched(x, margin=_HUGE_PAGE), _MADV_DONTNEED)


def _touched(x: Tensor, margin: int = 0) -> tuple[int, int]:
    """Return address and bytes of the pages of x, and of those so many bytes around it that are of the same memory."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = x.untyped_storage()
    first = max(x.data_ptr() - margin, memory.data_ptr()) // mmap.PAGESIZE * mmap.PAGESIZE
    end = min(x.data_ptr() + (last + 1) * x.element_size() + margin, memory.data_ptr() + memory.nbytes())
    return first, end - first


def _advise_within(begin: int, num_bytes: int, advice: int) -> None:
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    _advise_pages(first, (begin + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE, advice)


def _advise_pages(first: int, size: int, advice: int) -> None:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and size > 0:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)
