"""Small all-reduces between the GPUs of one machine, one kernel each, by torch's symmetric memory. Never run on a GPU.

Each rank copies its tensor into memory that all ranks map, waits for the others, and adds up what all of them have, in
the order of the ranks, so that all get the same bits. It reads n - 1 tensors where a ring sends 2 (n - 1) / n of one,
but in one step in place of 2 (n - 1): for a few hundred kilobytes the steps are what takes time.

The kernel waits on the GPU, and the host has no part in it, so that a recorded graph may hold it. Ranks launch the same
ones in the same order, and no two at once, as NCCL wants it too. Whether it is used is agreed by all ranks of a group
when they meet; collectives.py asks `takes` for each tensor.
"""

import logging
import os

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

_MAX_BYTES = {2: 512 << 10, 4: 256 << 10, 8: 128 << 10}
"""Largest tensor, by number of ranks that torch has kernels for. Where other engines change to NCCL; not measured."""
_DTYPES = (torch.bfloat16, torch.float32)
_ALIGN_BYTES = 16
"""Alignment of a tensor's size and place: what one load of the kernel reads."""


class OneShotAllReduce:
    """One rank's part of the memory. Make it with `connect`."""

    def __init__(self, shared: Tensor, group_name: str) -> None:
        """`shared` are bytes that the ranks of the group have mapped."""
        self._shared = shared
        self._group_name = group_name

    @classmethod
    def connect(cls, group: dist.ProcessGroup, *, size: int, device: torch.device) -> "OneShotAllReduce | None":
        """Share memory between the ranks of an NCCL group on one machine, and hold its sums against NCCL's.

        All ranks call it. All get None, and the log the reason, where any of them cannot or the sums differ.
        """
        if size not in _MAX_BYTES:
            return None
        error: Exception | None = None
        shared, is_right = torch.empty(0), False
        try:
            shared = _allocate(_MAX_BYTES[size], device)
        except (ImportError, AttributeError, RuntimeError) as refusal:
            error = refusal
        if not _all_agree(error is None, group, device):  # before one waits for another that will not come
            _tell(error)
            return None
        one_shot = cls(shared, group.group_name)
        try:
            _map(shared, group)
            is_right = one_shot._is_right(group, device)
        except RuntimeError as refusal:
            error = refusal
        if _all_agree(is_right, group, device):
            return one_shot
        _tell(error)
        return None

    def takes(self, x: Tensor) -> bool:
        """Whether this tensor is added up here; the same on all ranks, for the answer follows from its shape."""
        size, offset = x.element_size(), x.storage_offset()
        is_aligned = x.nbytes % _ALIGN_BYTES == 0 and offset * size % _ALIGN_BYTES == 0
        return x.dtype in _DTYPES and is_aligned and 0 < x.nbytes <= len(self._shared)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, a new tensor, the same bits on all; x is contiguous, and one that it `takes`."""
        shared = self._shared.view(x.dtype)[: x.numel()].view(x.shape)
        total: Tensor = _add(shared, x, self._group_name)
        return total

    def _is_right(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Numbers whose sums are exact in each dtype; some sums after each other, as memory is used again."""
        is_right = True
        for dtype in _DTYPES:
            for num_bytes in (_ALIGN_BYTES, 4096, len(self._shared), len(self._shared)):
                x = torch.randint(-8, 9, (num_bytes // dtype.itemsize,), device=device).to(dtype)
                total, expected = self.sum(x), x.clone()
                dist.all_reduce(expected, group=group)
                is_right &= torch.equal(total, expected)
        return is_right


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Memory of this rank that others can map."""
    from torch.distributed import _symmetric_memory  # no public module yet

    torch.ops.symm_mem.one_shot_all_reduce_copy  # noqa: B018  # AttributeError where torch has none
    # ranks that see one GPU each all call theirs 0, which torch takes for one and the same
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    return _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)


def _map(shared: Tensor, group: dist.ProcessGroup) -> None:
    """Let all ranks of the group map it; each waits for the others."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.rendezvous(shared, group.group_name)


def _add(shared: Tensor, x: Tensor, group_name: str) -> Tensor:
    total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", group_name)
    return total


def _all_agree(mine: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    vote = torch.tensor([int(mine)], device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    return bool(vote.item())


def _tell(error: Exception | None) -> None:
    reason = "another rank cannot, or the sums are not NCCL's" if error is None else error
    logger.warning("small all-reduces are left to NCCL: %s", reason)
