"""Memory of the process: what its allocator keeps although it is free, and pages that are large."""

import ctypes
import mmap

from torch import Tensor

_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_POPULATE_READ = 4, 14, 22  # of Linux


def release_free_memory() -> None:
    """Give it back to the system, where the C library can: glibc keeps what lies between blocks that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def use_huge_pages(x: Tensor) -> None:
    """Ask for pages of 2 MB under a new tensor on the CPU, before it is filled; in vain on other systems than Linux.

    Weights are read once a step, and fewer addresses are then to be looked up (docs/performance.md).
    """
    _advise(x, _MADV_HUGEPAGE)


def forget(x: Tensor) -> None:
    """Give the pages back that lie within a contiguous tensor on the CPU, whose values nobody reads again."""
    _advise(x, _MADV_DONTNEED)


def read_now(x: Tensor) -> None:
    """Read the pages of a mapped file that a tensor is a view into, all at once; in vain before Linux 5.14.

    Left to page faults they come in pieces of 128 KB, each asked for when the one before is there.
    """
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if x.numel() > 0:
        first = x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        _advise_pages(first, x.data_ptr() + (last + 1) * x.element_size() - first, _MADV_POPULATE_READ)


def _advise(x: Tensor, advice: int) -> None:
    first = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    _advise_pages(first, (x.data_ptr() + x.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE, advice)


def _advise_pages(first: int, size: int, advice: int) -> None:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and size > 0:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)
