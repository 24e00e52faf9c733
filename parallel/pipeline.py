"""Hidden states between neighbouring stages: each tensor-parallel rank has a link to the same rank of the next stage.

Knows tensors and neighbours; when to send what is the plan's business. A stage receives batches in the order in which
they were sent.
"""

from collections import deque
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.errors import CollectiveError
from parallel.mesh import Mesh


class StageLink:
    """This rank's links to the stages before and after it."""

    def __init__(self, mesh: Mesh, *, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._axis = mesh.pp
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, hidden_TE: Tensor) -> None:
        """Start sending to the next stage and return; the tensor is kept alive until it has gone, do not write to it.

        At most one batch per stage is under way: with more, waits until the oldest was received.
        Raises CollectiveError when the next stage is gone.
        """
        axis = self._axis
        assert axis.rank + 1 < axis.size, "the last stage sends to nobody"
        start_s = perf_counter()
        try:
            # the receiver takes batches in order and waits for nothing from this rank, so this cannot deadlock
            while len(self._sending) >= axis.size:
                self._wait_oldest()
            work = dist.isend(hidden_TE, group=axis.group, group_dst=axis.rank + 1)
        except RuntimeError as error:
            raise CollectiveError(f"stage {axis.rank} cannot send to stage {axis.rank + 1}: {error}") from error
        assert work is not None
        axis.counts["send"] += 1
        axis.wait_s += perf_counter() - start_s
        self._sending.append((work, hidden_TE))

    def recv(self, num_tokens: int) -> Tensor:
        """Wait for the previous stage's next batch, [num_tokens, E]. Raises CollectiveError when that stage is gone."""
        axis = self._axis
        assert axis.rank > 0, "the first stage receives from nobody"
        hidden_TE = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        start_s = perf_counter()
        try:
            dist.recv(hidden_TE, group=axis.group, group_src=axis.rank - 1)
        except RuntimeError as error:
            raise CollectiveError(f"stage {axis.rank} cannot receive from stage {axis.rank - 1}: {error}") from error
        axis.counts["recv"] += 1
        axis.wait_s += perf_counter() - start_s
        return hidden_TE

    def flush(self) -> None:
        """Wait until everything sent was received. Raises CollectiveError when the next stage is gone."""
        try:
            while self._sending:
                self._wait_oldest()
        except RuntimeError as error:
            raise CollectiveError(f"stage {self._axis.rank} lost the next stage: {error}") from error

    def _wait_oldest(self) -> None:
        work, _ = self._sending.popleft()
        work.wait()
