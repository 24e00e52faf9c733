"""What ranks of one axis do together. The same code runs on NCCL and gloo; on an axis of size 1 each is the identity.

Every rank of the axis makes the same calls in the same order. A peer that is gone or late raises CollectiveError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from time import perf_counter
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from parallel.errors import CollectiveError
from parallel.local_exchange import MAX_BYTES
from parallel.mesh import Axis, OneShot


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of every rank's x, the same bits on all of them. x must be contiguous and may be overwritten."""
    if axis.size == 1:
        return x
    if axis.stand_in is not None:
        return axis.stand_in(x)
    axis.counts["all_reduce"] += 1
    start_s = perf_counter()
    try:
        if axis.one_shot is not None and axis.one_shot.takes(x):
            return axis.one_shot.sum(x)
        if axis.local is not None and x.nbytes <= MAX_BYTES:
            return axis.local.sum(x)
        dist.all_reduce(x, group=axis.group)
    except (RuntimeError, OSError) as error:
        raise collective_error("all_reduce", axis, error) from error
    finally:
        axis.wait_s += perf_counter() - start_s
    return x


def gather_to_first(x: Tensor, axis: Axis, dim: int = 0) -> Tensor | None:
    """Every rank's x, joined along `dim` in rank order, on rank 0 of the axis; None on the others.

    Shapes are equal on all ranks.
    """
    if axis.size == 1:
        return x
    axis.counts["gather"] += 1
    is_first = axis.rank == 0
    parts = x.new_empty((axis.size, *x.shape)) if is_first else None
    with _translated("gather", axis):
        if axis.local is not None:
            axis.local.gather(x.contiguous(), parts)
        else:
            dist.gather(x.contiguous(), None if parts is None else list(parts.unbind(0)), group=axis.group, group_dst=0)
    return None if parts is None else parts.movedim(0, dim).flatten(dim, dim + 1)


def broadcast(x: Tensor, axis: Axis) -> Tensor:
    """The x of rank 0 of the axis, written into every rank's x, which must be contiguous."""
    if axis.size == 1:
        return x
    axis.counts["broadcast"] += 1
    with _translated("broadcast", axis):
        if axis.local is not None and x.nbytes <= MAX_BYTES:
            return x.copy_(axis.local.sum(x if axis.rank == 0 else x.zero_()))
        dist.broadcast(x, group=axis.group, group_src=0)
    return x


@runtime_checkable
class OneShotKernels(Protocol):
    """Kernels that add up in memory which the CPU ranks of one machine share."""

    @property
    def shared_rank_bytes(self) -> int:
        """What each rank needs of it; 0: they cannot here."""

    def make_one_shot(self, memory: mmap, axis: Axis) -> OneShot:
        """Return what adds up over the axis in this memory, which is zero, and nobody else's."""


def share_memory(axis: Axis, kernels: object) -> None:
    """Let ranks on one machine's CPUs add up as these kernels can, if all ranks' can. All ranks of the axis call it."""
    if axis.local is None or axis.group is None:
        return
    rank_bytes = kernels.shared_rank_bytes if isinstance(kernels, OneShotKernels) else 0
    axis.one_shot = None
    with _translated("sharing memory", axis):
        memory = axis.local.share_memory(rank_bytes * axis.size, axis.group)
    if memory is not None and isinstance(kernels, OneShotKernels):
        axis.one_shot = kernels.make_one_shot(memory, axis)


@contextmanager
def _translated(kind: str, axis: Axis) -> Iterator[None]:
    start_s = perf_counter()
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise collective_error(kind, axis, error) from error
    finally:
        axis.wait_s += perf_counter() - start_s


def collective_error(kind: str, axis: Axis, error: Exception) -> CollectiveError:
    """What to raise when ranks did not meet."""
    return CollectiveError(f"{kind} failed on rank {axis.rank} of {axis.size}: a peer died or took too long ({error})")
