"""From a plan to tensors: ids, positions and attention meta, out of what this rank remembers of each slot (slots.py).

On a CPU a step that decodes what the step before did is made from that one's (decode_inputs.py). Letters are those of
slots.py.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import add

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel.kernels.base import AttentionMeta
from parallel.kernels.host_arrays import Int32Array, Int64Array, to_device
from workers.decode_inputs import DecodeRun
from workers.device_tables import DeviceTables
from workers.plan import ScheduledSequences, StepPlan
from workers.slots import NewEntries, Slots
from workers.step_inputs import StepInputs, to_tensors

_ALIGN_BYTES = 16


class InputBuilder:
    """Turns plans into tensors, in order; keeps the slots for that. One per rank."""

    def __init__(
        self, *, num_slots: int, max_context: int, block_size: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self._device = device
        self._slots = Slots(num_slots=num_slots, max_context=max_context, block_size=block_size, num_groups=num_groups)
        self._decodes = DecodeRun(self._slots)
        num_entries = self._slots.tables.shape[1]
        self._tables = (
            None
            if device.type == "cpu"
            else DeviceTables(num_slots=num_slots, num_entries=num_entries, num_groups=num_groups, device=device)
        )

    def build(self, plan: StepPlan) -> StepInputs:
        """Apply the plan to the slots and return its tensors."""
        token_ids = self._decodes.next_tokens(plan)
        if token_ids is None:
            self._decodes.end()
        for new in plan.new:
            self._slots.take(new)
        new_entries = None if self._tables is None else self._slots.new_entries(plan)
        self._slots.add_blocks(plan.scheduled)
        if token_ids is not None:
            return self._decodes.go_on(token_ids)
        self._slots.add_tokens(plan.scheduled)
        return self._make(plan.scheduled, new_entries)

    def look_ahead(self) -> None:
        """Make ready what a step after the last has in common with it; for a moment when nothing waits."""
        self._decodes.look_ahead()

    def _make(self, shares: ScheduledSequences, new_entries: NewEntries | None) -> StepInputs:
        slots, nums, samples = shares.slots, shares.nums_tokens, shares.samples
        ends = list(map(add, shares.starts, nums))
        query_starts = list(accumulate(nums, initial=0))
        slots_S, ends_S = np.array(slots, np.int64), np.array(ends, np.int64)
        last_rows_S = np.array(query_starts[1:], np.int64) - 1
        is_decode = max(nums) == 1
        if is_decode:
            slots_T, positions_T = slots_S, ends_S - 1
        else:
            slots_T = np.repeat(slots_S, nums)
            positions_T = np.arange(len(slots_T)) + np.repeat(ends_S - 1 - last_rows_S, nums)
        fed_S = (ends_S > self._slots.num_tokens[slots_S]).nonzero()[0]
        sampled_S = slice(None) if all(samples) else np.array(samples).nonzero()[0]
        sample_slots = slots_S[sampled_S]

        slot_mappings_GT = self._slots.slot_mappings(slots_T, positions_T)
        of_tables_int64, of_tables_int32 = self._arrays_of_tables(slots_S, max(ends), new_entries)
        sent_int64, sent_int32 = self._to_device(
            [
                self._slots.tokens[slots_T, positions_T],
                positions_T,
                last_rows_S[sampled_S],
                last_rows_S[fed_S],
                slots_S[fed_S],
                sample_slots,
                *slot_mappings_GT,
                *of_tables_int64,
            ],
            [np.array(query_starts), ends_S, *of_tables_int32],
        )
        token_ids, positions, sample_rows, fed_rows, fed_slots, sample_slots_device, *others = sent_int64
        slot_mappings = others[: len(slot_mappings_GT)]
        query_starts_device, context_lens, *of_tables = sent_int32
        block_tables = self._block_tables(others[len(slot_mappings_GT) :], of_tables, max(ends))
        metas = [
            AttentionMeta(
                query_starts=query_starts_device,
                context_lens=context_lens,
                block_tables=block_table,
                slot_mapping=slot_mapping,
                num_decodes=len(nums) if is_decode else next(i for i, num in enumerate(nums) if num > 1),
                max_query_len=max(nums),
                max_context_len=max(ends),
                query_starts_host=query_starts,
                context_lens_host=ends,
            )
            for block_table, slot_mapping in zip(block_tables, slot_mappings, strict=True)
        ]
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            metas=metas,
            sample_rows=None if is_decode and all(samples) else sample_rows,
            fed_rows=fed_rows,
            fed_slots=fed_slots,
            sample_slots=sample_slots,
            sample_slots_device=sample_slots_device,
            sample_positions=ends_S[sampled_S],
        )
        if inputs.sample_rows is None and self._device.type == "cpu":
            self._decodes.begin(inputs, slots=slots, slots_S=slots_S, ends_S=ends_S)
        return inputs

    def _arrays_of_tables(
        self, slots_S: Int64Array, max_context_len: int, new_entries: NewEntries | None
    ) -> tuple[list[Int64Array], list[Int32Array]]:
        """Return what is sent for the block tables: these, or where they stay on the device, what changes in them."""
        if new_entries is None:
            return [], [*self._slots.block_tables(slots_S, max_context_len)]
        return [slots_S, new_entries.taken_slots, new_entries.places], [new_entries.blocks]

    def _block_tables(self, sent_int64: list[Tensor], sent_int32: list[Tensor], max_context_len: int) -> list[Tensor]:
        """Return the table of each group of layers from what `_arrays_of_tables` said, which is on the device."""
        if self._tables is None:
            return sent_int32
        slots, taken_slots, places = sent_int64
        (blocks,) = sent_int32
        self._tables.update(taken_slots=taken_slots, places=places, blocks=blocks)
        return self._tables.take(slots, self._slots.num_entries(max_context_len))

    def _to_device(
        self, int64_arrays: list[npt.NDArray[np.integer]], int32_arrays: list[npt.NDArray[np.integer]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return all as tensors. To a GPU they go in one piece: a copy costs the same for few bytes as for many."""
        int64s, int32s = to_tensors(int64_arrays, np.int64), to_tensors(int32_arrays, np.int32)
        if self._device.type == "cpu":
            return int64s, int32s
        tensors = [*int64s, *int32s]
        packed, starts = _pack(tensors)
        sent = to_device(packed, self._device)
        ends = [start + tensor.nbytes for start, tensor in zip(starts, tensors, strict=True)]
        there = [
            sent[start:end].view(tensor.dtype).view(tensor.shape)
            for start, end, tensor in zip(starts, ends, tensors, strict=True)
        ]
        return there[: len(int64s)], there[len(int64s) :]


def _pack(tensors: Sequence[Tensor]) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Return the bytes of the host's tensors in one array, and where each begins: at a multiple of 16.

    Triton compiles a kernel anew where a pointer is not such a multiple, as it would be for some steps and not for
    others.
    """
    starts = list(accumulate((-(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for tensor in tensors), initial=0))
    packed = np.zeros(starts.pop(), np.uint8)
    for start, tensor in zip(starts, tensors, strict=True):
        packed[start : start + tensor.nbytes] = tensor.numpy().reshape(-1).view(np.uint8)
    return packed, starts
