"""From a plan to tensors: ids, positions and attention meta, out of what this rank remembers of each slot.

Host state is numpy, so that a step costs a few vectorized operations however many sequences it has. They are as few
different ones as will do: since the last step the model's weights have pushed everything else out of the caches, and a
function of numpy or torch that a step calls for the first time takes 20 to 100 us, not 1. On a CPU, where the model
waits for its inputs, a step that decodes what the step before did is made from that one's.

Array letters as in parallel/kernels/base.py: T packed tokens, S sequences of the step, M entries of the longest table;
G groups of layers, each of which has its own block in an entry.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel.kernels.base import AttentionMeta
from parallel.kernels.host_arrays import to_device
from workers.plan import NewSequence, ScheduledSequence, StepPlan

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

_MOST_LEARNT = 64
"""Steps after which one is made anew, so that little waits to be noted."""
_FEW = 4
"""Rows up to which it is faster to write one by one."""
_ALIGN_BYTES = 16


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decodes:
    """A step in which every sequence computed one token and sampled, for one of the same sequences after it."""

    slots: list[int]
    slots_S: Int64Array  # noqa: N815
    ends_S: Int64Array  # noqa: N815
    token_ids_S: Int64Array  # noqa: N815
    """The memory of those of `inputs`, as are the next two."""
    slot_mappings: list[Int64Array]
    tables: list[Int32Array]
    learnt: list[list[int]]
    """Tokens of each sequence, step by step, that are not among those of its slot yet."""
    rows_in_new_blocks: list[int]
    """Sequences whose token is the first of a block."""
    inputs: StepInputs


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
        self._decodes: _Decodes | None = None  # the last step, if it was such a one and on a CPU
        self._after: _Decodes | None = None
        """What may come after it."""

    def build(self, plan: StepPlan) -> StepInputs:
        """Apply the plan to the slots and return its tensors."""
        last, shares = self._decodes, plan.scheduled
        token_ids = None if last is None or plan.new else _next_tokens(last, shares)
        if token_ids is None:
            self._note_learnt()
        for new in plan.new:
            self._take_slot(new)
        tables = self._tables.reshape(len(self._tables), -1)
        _append(tables, self._num_blocks, {share.slot: share.new_blocks for share in shares if share.new_blocks})
        if last is not None and token_ids is not None:
            return self._go_on(last, token_ids)
        learnt = {share.slot: token_ids for share in shares if (token_ids := share.new_token_ids)}
        _append(self._tokens, self._num_tokens, learnt)
        return self._to_tensors(
            slots=[share.slot for share in shares],
            nums=[share.num_tokens for share in shares],
            ends=[share.start + share.num_tokens for share in shares],
            samples=[share.samples for share in shares],
        )

    def look_ahead(self) -> None:
        """Make ready what a step after the last has in common with it; for a moment when nothing waits."""
        if self._decodes is not None and not self._outgrows(self._decodes):
            self._after = self._step_after(self._decodes)

    def _take_slot(self, new: NewSequence) -> None:
        num_tokens = len(new.token_ids)
        self._tokens[new.slot, :num_tokens] = new.token_ids
        self._num_tokens[new.slot] = num_tokens
        self._tables[new.slot].reshape(-1)[: self._num_blocks[new.slot]] = 0
        self._num_blocks[new.slot] = 0

    def _to_tensors(self, *, slots: list[int], nums: list[int], ends: list[int], samples: list[bool]) -> StepInputs:
        query_starts = list(accumulate(nums, initial=0))
        slots_S, ends_S = np.array(slots, np.int64), np.array(ends, np.int64)
        last_rows_S = np.array(query_starts[1:], np.int64) - 1
        is_decode = max(nums) == 1
        if is_decode:
            slots_T, positions_T = slots_S, ends_S - 1
        else:
            slots_T = np.repeat(slots_S, nums)
            positions_T = np.arange(len(slots_T)) + np.repeat(ends_S - 1 - last_rows_S, nums)
        fed_S = (ends_S > self._num_tokens[slots_S]).nonzero()[0]
        sampled_S = slice(None) if all(samples) else np.array(samples).nonzero()[0]
        sample_slots = slots_S[sampled_S]

        sent_int64, sent_int32 = self._to_device(
            [
                self._tokens[slots_T, positions_T],
                positions_T,
                last_rows_S[sampled_S],
                last_rows_S[fed_S],
                slots_S[fed_S],
                sample_slots,
                *self._slot_mappings(slots_T, positions_T),
            ],
            [np.array(query_starts), ends_S, *self._block_tables(slots_S, max(ends))],
        )
        token_ids, positions, sample_rows, fed_rows, fed_slots, sample_slots_device, *slot_mappings = sent_int64
        query_starts_device, context_lens, *block_tables = sent_int32
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
        goes_on = inputs.sample_rows is None and self._device.type == "cpu"
        if goes_on:
            self._decodes = _Decodes(
                slots=slots,
                slots_S=slots_S,
                ends_S=ends_S,
                token_ids_S=token_ids.numpy(),
                rows_in_new_blocks=[],
                slot_mappings=[meta.slot_mapping.numpy() for meta in metas],
                tables=[meta.block_tables.numpy() for meta in metas],
                learnt=[],
                inputs=inputs,
            )
        return inputs

    def _go_on(self, last: _Decodes, token_ids: list[int]) -> StepInputs:
        """Return the inputs of the step after `last`; `token_ids` are what the leader has learnt of each sequence.

        Whose last token was not known in that step, its last one is not known in this.
        """
        after = self._after or self._step_after(last)
        after.token_ids_S[:] = token_ids
        for row in after.rows_in_new_blocks:
            self._enter_block(after, row)
        last.learnt.append(token_ids)
        self._decodes, self._after = after, None
        return after.inputs

    def _step_after(self, last: _Decodes) -> _Decodes:
        """All of the step after `last` but its tokens, and the blocks that it begins."""
        ends_S = last.ends_S + 1
        before = last.inputs.metas
        positions = before[0].context_lens_host
        tables, block_tables = last.tables, [meta.block_tables for meta in before]
        if self._outgrows(last):
            block_tables = _to_tensors(self._block_tables(last.slots_S, before[0].max_context_len + 1), np.int32)
            tables = [block_table.numpy() for block_table in block_tables]
        slot_mappings = [slot_mapping + 1 for slot_mapping in last.slot_mappings]
        context_lens, ends = torch.from_numpy(ends_S.astype(np.int32)), [position + 1 for position in positions]
        metas = [
            AttentionMeta(
                query_starts=meta.query_starts,
                context_lens=context_lens,
                block_tables=block_table,
                slot_mapping=torch.from_numpy(slot_mapping),
                num_decodes=meta.num_decodes,
                max_query_len=1,
                max_context_len=meta.max_context_len + 1,
                query_starts_host=meta.query_starts_host,
                context_lens_host=ends,
            )
            for meta, block_table, slot_mapping in zip(before, block_tables, slot_mappings, strict=True)
        ]
        token_ids_S = np.empty(len(positions), np.int64)
        inputs = StepInputs(
            token_ids=torch.from_numpy(token_ids_S),
            positions=torch.from_numpy(last.ends_S),
            metas=metas,
            sample_rows=None,
            fed_rows=last.inputs.fed_rows,
            fed_slots=last.inputs.fed_slots,
            sample_slots=last.slots_S,
            sample_slots_device=last.inputs.sample_slots_device,
            sample_positions=ends_S,
        )
        return _Decodes(
            slots=last.slots,
            slots_S=last.slots_S,
            ends_S=ends_S,
            token_ids_S=token_ids_S,
            rows_in_new_blocks=[row for row, position in enumerate(positions) if not position % self._block_size],
            slot_mappings=slot_mappings,
            tables=tables,
            learnt=last.learnt,
            inputs=inputs,
        )

    def _outgrows(self, last: _Decodes) -> bool:
        """Whether the step after `last` needs longer block tables."""
        num_entries: int = last.tables[0].shape[1]
        return last.inputs.metas[0].max_context_len >= num_entries * self._block_size

    def _enter_block(self, step: _Decodes, row: int) -> None:
        """Let a sequence's token be the first of a block. Tables keep their memory: it lies past earlier contexts."""
        entry = int(step.ends_S[row] - 1) // self._block_size
        for group, block in enumerate(self._tables[step.slots[row], entry].tolist()):
            step.slot_mappings[group][row] = block * self._block_size
            step.tables[group][row, entry] = block

    def _note_learnt(self) -> None:
        """Append to the slots what steps that went on from each other were told; the next one is made anew."""
        last, self._decodes, self._after = self._decodes, None, None
        if last is not None and last.learnt:
            columns = self._num_tokens[last.slots_S] + np.arange(len(last.learnt))[:, None]
            self._tokens[last.slots_S, columns] = last.learnt
            self._num_tokens[last.slots_S] += len(last.learnt)

    def _slot_mappings(self, slots_T: Int64Array, positions_T: Int64Array) -> Int64Array:
        """[G, T]"""
        blocks_TG = self._tables[slots_T, positions_T // self._block_size]
        return blocks_TG.T * np.int64(self._block_size) + positions_T % self._block_size

    def _block_tables(self, slots_S: Int64Array, max_context_len: int) -> Int32Array:
        """[G, S, M]"""
        return self._tables[slots_S, : -(-max_context_len // self._block_size)].transpose(2, 0, 1)

    def _to_device(
        self, int64_arrays: list[npt.NDArray[np.integer]], int32_arrays: list[npt.NDArray[np.integer]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return all as tensors. To a GPU they go in one piece: a copy costs the same for few bytes as for many."""
        int64s, int32s = _to_tensors(int64_arrays, np.int64), _to_tensors(int32_arrays, np.int32)
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


def _to_tensors(arrays: Iterable[npt.NDArray[np.integer]], dtype: type[np.integer]) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array, dtype)) for array in arrays]


def _next_tokens(last: _Decodes, shares: list[ScheduledSequence]) -> list[int] | None:
    """The token that each share comes with, if the step goes on from `last` with the same sequences."""
    if len(last.learnt) == _MOST_LEARNT or [share.slot for share in shares] != last.slots:
        return None
    token_ids = []
    for share in shares:
        if share.num_tokens != 1 or not isinstance(share.learnt, int) or not share.samples:
            return None
        token_ids.append(share.learnt)
    return token_ids


def _append(rows: Int32Array, lengths: Int64Array, additions: dict[int, list[int]]) -> None:
    """Continue rows by their additions, all with one indexed write; `lengths` is how full each row is."""
    if len(additions) <= _FEW:
        for slot, addition in additions.items():
            start = int(lengths[slot])
            rows[slot, start : start + len(addition)] = addition
            lengths[slot] = start + len(addition)
        return
    values = list(chain.from_iterable(additions.values()))
    slots = np.array(list(additions), np.int64)
    if len(values) == len(slots):
        rows[slots, lengths[slots]] = values
        lengths[slots] += 1
        return
    nums = np.array([len(addition) for addition in additions.values()], np.int64)
    firsts = lengths[slots] - np.cumsum(nums) + nums  # where a row goes on, less what is in `values` before that
    rows[np.repeat(slots, nums), np.arange(len(values)) + np.repeat(firsts, nums)] = values
    lengths[slots] += nums
