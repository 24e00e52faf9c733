"""The host tier of a rank's cache on CUDA: pinned slots, copies beside the model on a stream of their own.

Tested on a CPU with streams that take notes, and with ones that run as late, or as early, as they may. Array letters as
in host_cache.py.

    model's stream   gather ──> layers              scatter ──> layers
                       │                               ▲
    copy stream        └──> buffer to slot    slot to buffer

A save is gathered into a buffer on the GPU by the model's stream, before the layers of its plan; to the host it goes
while they run. A load comes into another buffer while earlier steps run, and the model's stream puts it into its block.
So all access to the cache is the model's stream's, in the order of the plans, and all access to the slots is the copy
stream's: neither needs more than one event for each use of a buffer.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from workers.errors import EngineConfigError

_BUFFER_BYTES = 32 << 20
"""Size of each of four buffers: what a step saves or loads beyond two of them waits for the bus."""


class CudaHostCache:
    """Implements `HostCache` of host_cache.py. Call it in the stream in which the model computes."""

    def __init__(self, rows_RBX: Tensor, slots_SRX: Tensor) -> None:
        """`slots_SRX` is pinned."""
        self._blocks_BRX = rows_RBX.transpose(0, 1)
        self._slots_SRX = slots_SRX
        self._stream = torch.cuda.Stream(rows_RBX.device)
        slot_bytes = slots_SRX[0].numel() * slots_SRX.element_size()
        self._num_at_once = min(len(slots_SRX), max(1, _BUFFER_BYTES // slot_bytes))
        self._to_save, self._to_load = self._make_buffers(), self._make_buffers()
        # torch gives the buffers memory that earlier work of the model's stream may still read
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """Queue the copies; see HostCache."""
        size = self._num_at_once
        for start in range(0, len(saves), size):
            self._save(next(self._to_save), saves[start : start + size])
        for start in range(0, len(loads), size):
            self._load(next(self._to_load), loads[start : start + size])

    def _save(self, buffer: "_Buffer", saves: Sequence[tuple[int, int]]) -> None:
        computing = torch.cuda.current_stream(self._stream.device)
        computing.wait_event(buffer.is_free)
        blocks = self._index([block for block, _ in saves])
        torch.index_select(self._blocks_BRX, 0, blocks, out=buffer.blocks_NRX[: len(saves)])
        buffer.is_full.record(computing)
        self._stream.wait_event(buffer.is_full)
        with torch.cuda.stream(self._stream):
            for i, (_, slot) in enumerate(saves):
                self._slots_SRX[slot].copy_(buffer.blocks_NRX[i], non_blocking=True)
        buffer.is_free.record(self._stream)

    def _load(self, buffer: "_Buffer", loads: Sequence[tuple[int, int]]) -> None:
        computing = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_event(buffer.is_free)
        with torch.cuda.stream(self._stream):
            for i, (slot, _) in enumerate(loads):
                buffer.blocks_NRX[i].copy_(self._slots_SRX[slot], non_blocking=True)
        buffer.is_full.record(self._stream)
        computing.wait_event(buffer.is_full)
        blocks = self._index([block for _, block in loads])
        self._blocks_BRX.index_copy_(0, blocks, buffer.blocks_NRX[: len(loads)])
        buffer.is_free.record(computing)

    def _index(self, blocks: list[int]) -> Tensor:
        """The numbers as a tensor on the device, without a wait for it."""
        return torch.tensor(blocks).pin_memory().to(self._blocks_BRX.device, non_blocking=True)

    def _make_buffers(self) -> Iterator["_Buffer"]:
        """Make two buffers, to be used in turns: one is copied while the other is filled."""
        shape = self._num_at_once, *self._slots_SRX.shape[1:]
        return cycle([_Buffer(self._blocks_BRX.new_empty(shape)) for _ in range(2)])


class _Buffer:
    """Memory on the GPU on the way between cache and slots. An event that was never recorded holds nobody up."""

    def __init__(self, blocks_NRX: Tensor) -> None:
        self.blocks_NRX = blocks_NRX
        self.is_full = torch.cuda.Event()
        self.is_free = torch.cuda.Event()


def pin(x: Tensor) -> None:
    """Let CUDA copy from and to a tensor's memory directly, until it is unpinned. All its pages are then used.

    torch's own pinned memory comes in powers of two.
    """
    result = torch.cuda.cudart().cudaHostRegister(x.data_ptr(), x.numel() * x.element_size(), 0)
    if int(result) != 0:
        num_bytes = x.numel() * x.element_size()
        raise EngineConfigError(
            f"host_cache_bytes: CUDA cannot pin {num_bytes} bytes ({result}); allowed: what the host has free"
        )


def unpin(address: int) -> None:
    """Undo `pin`, before the memory that begins there is given back: CUDA would take what comes there next for it."""
    torch.cuda.synchronize()  # copies may be under way
    torch.cuda.cudart().cudaHostUnregister(address)
