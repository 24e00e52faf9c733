"""From a plan to tensors: ids, positions and attention meta, out of what this rank remembers of each slot.

Host state is numpy, so that a step costs a few vectorized operations however many sequences it has. Array letters as
in parallel/kernels/base.py: T packed tokens, S sequences of the step, M entries of the longest table; G groups of
layers, each of which has its own block in an entry.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel.kernels.base import AttentionMeta
from workers.plan import NewSequence, StepPlan

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step's tensors."""

    token_ids: Tensor
    """[T] int64, on the device. Where `fed_rows` says, anything: those tokens are being sampled."""
    positions: Tensor
    """[T] int64, on the device."""
    metas: list[AttentionMeta]
    """One for each group of layers."""
    sample_rows: Tensor | None
    """int64, on the device: the packed tokens after which sequences sample; None: all of them, in order."""
    fed_rows: Tensor
    """int64, on the device: the packed tokens that are the last ones sampled in `fed_slots`, known there only."""
    fed_slots: Tensor
    """int64, on the device."""
    sample_slots: Int64Array
    """The slots that sample, in the plan's order."""
    sample_slots_device: Tensor
    """The same, on the device."""
    sample_positions: Int64Array
    """The absolute position of each token to be sampled."""


class InputBuilder:
    """The tokens and block tables of every slot, kept by applying plans in order. One per rank."""

    def __init__(
        self, *, num_slots: int, max_context: int, block_size: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self._block_size = block_size
        self._device = device
        max_entries = -(-max_context // block_size)
        # Untouched pages of zeros cost no memory.
        self._tokens = np.zeros((num_slots, max_context), np.int32)
        self._tables = np.zeros((num_slots, max_entries, num_groups), np.int32)
        self._num_tokens = np.zeros(num_slots, np.int64)
        self._num_blocks = np.zeros(num_slots, np.int64)

    def build(self, plan: StepPlan) -> StepInputs:
        """Apply the plan to the slots and return its tensors."""
        for new in plan.new:
            self._take_slot(new)
        shares = plan.scheduled
        slots = np.array([share.slot for share in shares], np.int64)
        starts = np.array([share.start for share in shares], np.int64)
        nums = np.array([share.num_tokens for share in shares], np.int64)
        samples = np.array([share.samples for share in shares], np.bool_)
        _append(self._tokens, self._num_tokens, slots, [share.new_token_ids for share in shares])
        tables = self._tables.reshape(len(self._tables), -1)
        _append(tables, self._num_blocks, slots, [share.new_blocks for share in shares])
        fed = starts + nums > self._num_tokens[slots]
        return self._to_tensors(slots, starts, nums, samples, fed)

    def _take_slot(self, new: NewSequence) -> None:
        num_tokens = len(new.token_ids)
        self._tokens[new.slot, :num_tokens] = new.token_ids
        self._num_tokens[new.slot] = num_tokens
        self._tables[new.slot].reshape(-1)[: self._num_blocks[new.slot]] = 0
        self._num_blocks[new.slot] = 0

    def _to_tensors(
        self,
        slots: Int64Array,
        starts: Int64Array,
        nums: Int64Array,
        samples: npt.NDArray[np.bool_],
        fed: npt.NDArray[np.bool_],
    ) -> StepInputs:
        ends, query_ends = starts + nums, np.cumsum(nums)
        num_seqs, num_tokens = len(slots), int(query_ends[-1])
        num_decodes = num_seqs if num_tokens == num_seqs else int(np.argmax(nums > 1))
        if num_decodes == num_seqs:
            positions, token_slots = starts, slots
        else:
            positions = np.arange(num_tokens) + np.repeat(starts - query_ends + nums, nums)
            token_slots = np.repeat(slots, nums)
        block_index = positions // self._block_size
        slots_GT = self._tables[token_slots, block_index].T * np.int64(self._block_size)
        slots_GT += positions - block_index * self._block_size
        max_context_len = int(ends.max())
        tables_GSM = self._tables[slots, : -(-max_context_len // self._block_size)].transpose(2, 0, 1)
        query_starts = np.zeros(num_seqs + 1, np.int64)
        query_starts[1:] = query_ends
        all_sample = num_decodes == num_seqs and bool(samples.all())
        sample_rows = np.empty(0, np.int64) if all_sample else query_ends[samples] - 1
        sample_slots = slots[samples]
        fed_rows, fed_slots = query_ends[fed] - 1, slots[fed]

        token_ids = self._tokens[token_slots, positions]
        wide = self._to_device(
            [token_ids, positions, sample_rows, fed_rows, fed_slots, sample_slots, *slots_GT], np.int64
        )
        narrow = self._to_device([query_starts, ends, *(table.reshape(-1) for table in tables_GSM)], np.int32)
        max_query_len, query_starts_host, context_lens_host = int(nums.max()), query_starts.tolist(), ends.tolist()
        metas = [
            AttentionMeta(
                query_starts=narrow[0],
                context_lens=narrow[1],
                block_tables=block_table.view(num_seqs, -1),
                slot_mapping=slot_mapping,
                num_decodes=num_decodes,
                max_query_len=max_query_len,
                max_context_len=max_context_len,
                query_starts_host=query_starts_host,
                context_lens_host=context_lens_host,
            )
            for block_table, slot_mapping in zip(narrow[2:], wide[6:], strict=True)
        ]
        return StepInputs(
            token_ids=wide[0],
            positions=wide[1],
            metas=metas,
            sample_rows=None if all_sample else wide[2],
            fed_rows=wide[3],
            fed_slots=wide[4],
            sample_slots=sample_slots,
            sample_slots_device=wide[5],
            sample_positions=ends[samples],
        )

    def _to_device(self, arrays: list[npt.NDArray[np.integer]], dtype: type[np.integer]) -> list[Tensor]:
        """Copy the arrays in one piece: a copy to a device costs the same for few bytes as for many."""
        packed = torch.from_numpy(np.concatenate(arrays, dtype=dtype, casting="unsafe"))
        if self._device.type == "cuda":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        return list(torch.split(packed, [array.size for array in arrays]))


def _append(rows: Int32Array, lengths: Int64Array, slots: Int64Array, additions: list[list[int]]) -> None:
    """Continue the row of each slot with its addition, all by one indexed write; `lengths` is how full rows are."""
    values = np.fromiter(chain.from_iterable(additions), np.int32)
    if not len(values):
        return
    nums = np.array([len(addition) for addition in additions], np.int64)
    firsts = lengths[slots] - np.cumsum(nums) + nums  # where a row goes on, less what is in `values` before that
    rows[np.repeat(slots, nums), np.arange(len(values)) + np.repeat(firsts, nums)] = values
    lengths[slots] += nums
