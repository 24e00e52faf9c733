"""The block tables of all slots on a GPU: a step sends what is new in them, which is little, however long they are.

Letters as in slots.py.
"""

import torch
from torch import Tensor


class DeviceTables:
    """Block tables that stay on the device, changed and read in the order in which that is asked for."""

    def __init__(self, *, num_slots: int, num_entries: int, num_groups: int, device: torch.device) -> None:
        self._tables = torch.zeros(num_slots, num_entries, num_groups, dtype=torch.int32, device=device)

    def update(self, *, taken_slots: Tensor, places: Tensor, blocks: Tensor) -> None:
        """Note what a step changes, as `NewEntries` says."""
        if len(taken_slots):
            self._tables.index_fill_(0, taken_slots, 0)
        if len(blocks):
            self._tables.view(-1).scatter_(0, places, blocks)

    def take(self, slots_S: Tensor, num_entries: int) -> list[Tensor]:
        """Return the first entries [S, M] of these slots' tables, for each group of layers.

        Each has memory of its own, which begins at a multiple of 16 bytes, as Triton's kernels want it (inputs.py).
        """
        return [table.index_select(0, slots_S) for table in self._tables[:, :num_entries].unbind(2)]
