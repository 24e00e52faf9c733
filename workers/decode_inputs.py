"""Steps that decode what the step before did, each made from that one's tensors.

On a CPU the model waits for its inputs, and most steps are such: the same sequences, one token further. Letters as in
slots.py.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from parallel.kernels.host_arrays import Int32Array, Int64Array
from workers.plan import StepPlan
from workers.slots import Slots
from workers.step_inputs import StepInputs, to_tensors

_MOST_LEARNT = 64
"""After so many steps one is made anew, so that few tokens wait to be noted in the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decodes:
    """A step in which every sequence computed one token and sampled, for one of the same sequences after it."""

    slots: list[int]
    slots_S: Int64Array  # noqa: N815
    ends_S: Int64Array  # noqa: N815
    token_ids_S: Int64Array  # noqa: N815
    """The memory of `inputs.token_ids`; the next two are that of slot mappings and block tables, one for each group."""
    slot_mappings: list[Int64Array]
    tables: list[Int32Array]
    learnt: list[list[int]]
    """For each step the token of each sequence that is not noted in its slot yet."""
    rows_in_new_blocks: list[int]
    """Rows of sequences whose token is the first of a block."""
    inputs: StepInputs


class DecodeRun:
    """Steps that decode the same sequences, each made from the one before, for as long as they go on. One thread."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._last: _Decodes | None = None
        self._after: _Decodes | None = None
        """The step after the last one, as far as `look_ahead` has made it."""

    def begin(self, inputs: StepInputs, *, slots: list[int], slots_S: Int64Array, ends_S: Int64Array) -> None:
        """Note a step, on a CPU, in which every sequence computes one token and samples."""
        self._last = _Decodes(
            slots=slots,
            slots_S=slots_S,
            ends_S=ends_S,
            token_ids_S=inputs.token_ids.numpy(),
            rows_in_new_blocks=[],
            slot_mappings=[meta.slot_mapping.numpy() for meta in inputs.metas],
            tables=[meta.block_tables.numpy() for meta in inputs.metas],
            learnt=[],
            inputs=inputs,
        )

    def end(self) -> None:
        """Append to the slots what the steps since `begin` were told; the next one is made anew."""
        last, self._last, self._after = self._last, None, None
        if last is not None and last.learnt:
            self._slots.add_steps(last.slots_S, last.learnt)

    def next_tokens(self, plan: StepPlan) -> list[int] | None:
        """Return the token that each share comes with, if the step decodes the sequences of the last one; else None.

        All of them sampled: with the one token that each comes with it has one to compute, and samples again. A new
        sequence, in the slot of one of them, comes with none.
        """
        last, shares = self._last, plan.scheduled
        goes_on = (
            last is not None
            and len(last.learnt) < _MOST_LEARNT
            and shares.slots == last.slots
            and not shares.more_learnt
        )
        return shares.learnt if goes_on else None

    def go_on(self, token_ids: list[int]) -> StepInputs:
        """Return the inputs of the next step, whose blocks are in the slots; `token_ids` are its `next_tokens`.

        Tokens that the step before took from `fed_slots`, as the host did not know them, this one takes from there too.
        """
        last = self._last
        assert last is not None, "next_tokens"
        after = self._after or self._step_after(last)
        after.token_ids_S[:] = token_ids
        for row in after.rows_in_new_blocks:
            self._enter_block(after, row)
        last.learnt.append(token_ids)
        self._last, self._after = after, None
        return after.inputs

    def look_ahead(self) -> None:
        """Make ready what the next step has in common with the last; for a moment when nothing waits."""
        if self._last is not None:
            self._after = self._step_after(self._last)

    def _step_after(self, last: _Decodes) -> _Decodes:
        """Make the step after `last`, without its tokens and the blocks that it begins."""
        ends_S = last.ends_S + 1
        before = last.inputs.metas
        positions = before[0].context_lens_host
        tables, block_tables = last.tables, [meta.block_tables for meta in before]
        if before[0].max_context_len >= tables[0].shape[1] * self._slots.block_size:  # it needs longer ones
            block_tables = to_tensors(self._slots.block_tables(last.slots_S, before[0].max_context_len + 1), np.int32)
            tables = [block_table.numpy() for block_table in block_tables]
        slot_mappings = [slot_mapping + 1 for slot_mapping in last.slot_mappings]
        context_lens, ends = torch.from_numpy(ends_S.astype(np.int32)), ends_S.tolist()
        metas = [
            replace(
                meta,
                context_lens=context_lens,
                block_tables=block_table,
                slot_mapping=torch.from_numpy(slot_mapping),
                max_context_len=meta.max_context_len + 1,
                context_lens_host=ends,
            )
            for meta, block_table, slot_mapping in zip(before, block_tables, slot_mappings, strict=True)
        ]
        token_ids_S = np.empty(len(positions), np.int64)
        inputs = replace(
            last.inputs,
            token_ids=torch.from_numpy(token_ids_S),
            positions=torch.from_numpy(last.ends_S),
            metas=metas,
            sample_positions=ends_S,
        )
        block_size = self._slots.block_size
        return replace(
            last,
            ends_S=ends_S,
            token_ids_S=token_ids_S,
            rows_in_new_blocks=[row for row, position in enumerate(positions) if not position % block_size],
            slot_mappings=slot_mappings,
            tables=tables,
            inputs=inputs,
        )

    def _enter_block(self, step: _Decodes, row: int) -> None:
        """Let a sequence's token be the first of a block. Tables keep their memory: it lies past earlier contexts."""
        block_size = self._slots.block_size
        entry = int(step.ends_S[row] - 1) // block_size
        for group, block in enumerate(self._slots.tables[step.slots[row], entry].tolist()):
            step.slot_mappings[group][row] = block * block_size
            step.tables[group][row, entry] = block
