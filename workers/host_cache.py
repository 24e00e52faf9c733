"""The memory of the prefix cache's host tier on one rank: copies blocks to slots and back. Which ones, plans say.

Array letters: R rows of the cache (the keys, or the values, of a plane), B blocks, S slots, X numbers of a row's block.
A slot is one piece of memory, so that an unused one costs none and a device copies it at once.
"""

import weakref
from typing import Protocol

from torch import Tensor

from workers.cuda_host_cache import CudaHostCache, pin, unpin
from workers.kv_cache import lazy_zeros

Copy = tuple[int, int]
"""(from, to): numbers of a block and a slot, or of a slot and a block."""


class HostCache(Protocol):
    """The slots of the host tier on one rank."""

    def copy(self, saves: list[Copy], loads: list[Copy]) -> None:
        """Copy blocks to slots, then slots to blocks, as if at once: before what earlier steps wrote is overwritten,
        and before later ones read. No slot is saved to twice, no block loaded to twice.
        """


class PlainHostCache:
    """Implements `HostCache` on a CPU."""

    def __init__(self, rows_RBX: Tensor, *, num_slots: int) -> None:
        num_rows, _, num_elements = rows_RBX.shape
        self._rows_RBX = rows_RBX
        self._slots_SRX = lazy_zeros((num_slots, num_rows, num_elements), rows_RBX.dtype)

    def copy(self, saves: list[Copy], loads: list[Copy]) -> None:
        """Copy now. One operation for each block: twice as fast as to index all, which copies them twice."""
        for block, slot in saves:
            self._slots_SRX[slot].copy_(self._rows_RBX[:, block])
        for slot, block in loads:
            self._rows_RBX[:, block].copy_(self._slots_SRX[slot])


def make_host_cache(rows_RBX: Tensor, *, num_slots: int) -> HostCache:
    """Return slots for the blocks of a rank's cache, with memory of their own.

    Args:
        rows_RBX: the cache, as block_rows returns it.
        num_slots: at least 1.

    Raises:
        EngineConfigError: CUDA cannot pin so much memory.
    """
    if rows_RBX.device.type == "cuda":
        num_rows, _, num_elements = rows_RBX.shape
        slots_SRX = lazy_zeros((num_slots, num_rows, num_elements), rows_RBX.dtype)
        pin(slots_SRX)
        host = CudaHostCache(rows_RBX, slots_SRX)
        weakref.finalize(host, unpin, slots_SRX.data_ptr()).atexit = False  # while it still has the slots
        return host
    return PlainHostCache(rows_RBX, num_slots=num_slots)
