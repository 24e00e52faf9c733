"""The process mesh: which ranks work together on tensor (tp) and pipeline (pp) axes, as seen from this rank.

rank = stage * tp + tensor rank            tp = 2, pp = 2:      stage 0: ranks 0 1   <- a tp group
                                                                stage 1: ranks 2 3
                                                                pp groups: 0 2 and 1 3
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from parallel.errors import ParallelismError
from parallel.local_exchange import LocalExchange


class OneShot(Protocol):
    """Adds up what the ranks of one machine have, in memory that they share: each reads what all others have put there.

    The order is that of the ranks, so that all get the same bits.
    """

    def takes(self, x: Tensor) -> bool:
        """Whether this tensor is added up here; the same on all ranks, for the answer follows from what it is like."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, which is contiguous, one that it `takes`, and may be overwritten.

        Raises OSError or RuntimeError when a peer is gone or late.
        """


@dataclass(slots=True, kw_only=True, eq=False)
class Axis:
    """The ranks along one axis of the mesh that this rank talks to."""

    size: int = 1
    rank: int = 0
    """Rank of this process along the axis."""
    group: dist.ProcessGroup | None = None
    """Group of the axis in torch.distributed; None exactly when the size is 1."""
    local: LocalExchange | None = None
    """Faster exchange of small tensors, where all ranks of the axis are on one machine's CPUs."""
    one_shot: OneShot | None = None
    """Faster way for the all-reduces that it takes, where all ranks of the axis are on one machine."""
    counts: Counter[str] = field(default_factory=Counter)
    """Collectives called on this rank, by kind; on an axis of size 1 there are none."""
    stand_in: Callable[[Tensor], Tensor] | None = None
    """Takes the place of an all-reduce while layers are traced."""
    wait_s: float = 0.0
    """Time that the host spent in collectives: on a CPU until the slowest rank was there, on CUDA for the launch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """Both axes and the place of this rank on them."""

    tp: Axis
    pp: Axis

    @property
    def rank(self) -> int:
        """Rank of this process in the whole group."""
        return self.pp.rank * self.tp.size + self.tp.rank

    @property
    def world_size(self) -> int:
        """Ranks in the whole group."""
        return self.tp.size * self.pp.size

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has a part of the head."""
        return self.pp.rank == self.pp.size - 1

    @classmethod
    def single(cls) -> "Mesh":
        """One rank alone; needs no torch.distributed."""
        return cls(tp=Axis(), pp=Axis())

    @classmethod
    def from_world(cls, *, tensor_parallel: int, pipeline_parallel: int, timeout_s: float | None = None) -> "Mesh":
        """Split the initialised torch.distributed world; all its ranks call this with the same arguments.

        A collective that takes longer than `timeout_s` (None: the default of torch) fails.
        Raises ParallelismError when the world has another size.
        """
        world_size = dist.get_world_size()
        if world_size != tensor_parallel * pipeline_parallel:
            raise ParallelismError(
                f"tensor_parallel {tensor_parallel} x pipeline_parallel {pipeline_parallel} needs "
                f"{tensor_parallel * pipeline_parallel} ranks; there are {world_size}"
            )
        ranks = range(world_size)
        stages = [list(ranks[start : start + tensor_parallel]) for start in range(0, world_size, tensor_parallel)]
        columns = [list(ranks[start::tensor_parallel]) for start in range(tensor_parallel)]
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        return cls(tp=_axis(stages, timeout), pp=_axis(columns, timeout))


def _axis(groups: list[list[int]], timeout: timedelta | None) -> Axis:
    """The axis whose groups are these; torch wants every rank to create all of them, in the same order."""
    if len(groups[0]) == 1:
        return Axis()
    mine: tuple[list[int], dist.ProcessGroup] | None = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            mine = ranks, group
    assert mine is not None, "every rank is in one group of each axis"
    ranks, group = mine
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    axis = Axis(size=size, rank=rank, group=group)
    if dist.get_backend(group) == dist.Backend.GLOO:
        axis.local = LocalExchange.connect(group, rank, size, None if timeout is None else timeout.total_seconds())
    return axis
