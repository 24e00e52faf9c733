"""All layers of a decoder as one call of the compiled kernels (program.h), recorded when they run for the first time.

Saves what Python and torch cost between the operations, and the threads need not be woken for each of them. Where the
layers do more than the kernels can record (tape.py), they run as they are, as before.
"""

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel.description import Activation
from parallel.kernels.base import AttentionMeta, LayerCache, Lookup, RunLayers, StartedStep
from parallel.kernels.linears import Search, Sift, TableLinear
from parallel.kernels.native.library import Programs
from parallel.kernels.native.packed_linear import PANEL, NativeTable
from parallel.kernels.native.rank_sums import NativeAllReduce
from parallel.kernels.native.structures import (
    ACTIVATIONS,
    AnglesStep,
    Embedding,
    GroupStep,
    Kind,
    LayerStep,
    Operation,
    Step,
    StepLayout,
    Table,
    to_draw_array,
)
from parallel.kernels.native.tape import CannotRecordError, OnlyKernels, Recorder, Tape
from parallel.mesh import Axis

logger = logging.getLogger(__name__)

Angles = tuple[Tensor, ...]

_ALL = -1
"""Stands for all tokens where it is said how many are kept."""
_MOST_CONTEXT = 2048
"""Tokens up to which a chunk is attended here where there are no dot products for it; torch is faster beyond."""


class CompiledLayers:
    """Implements `RunLayers`: the layers as they are once, and their recording from then on."""

    def __init__(self, run: RunLayers, recorder: Recorder, programs: Programs, num_threads: int, axis: Axis) -> None:
        """`axis`: of the tensor-parallel ranks; where there are others, its `one_shot` is a NativeAllReduce."""
        self._run = run
        self._recorder = recorder
        self._programs = programs
        self._num_threads = num_threads
        self._axis = axis
        self._ranks = axis.one_shot if isinstance(axis.one_shot, NativeAllReduce) else None
        self._program: Program | None = None
        self._is_tried = False

    def __call__(
        self, x_TE: Tensor, angles: Sequence[Angles], caches: Sequence[LayerCache], metas: Sequence[AttentionMeta]
    ) -> tuple[Tensor, Tensor]:
        """See `RunLayers`."""
        if self._program is not None and self._program.is_fast(metas[0]):
            return self._program(x_TE, angles, caches, metas)
        if self._is_tried or x_TE.dtype is not self._programs.dtype:
            return self._run(x_TE, angles, caches, metas)
        return self._record(x_TE, angles, caches, metas)

    @property
    def starts_steps(self) -> bool:
        """See `StartedLayers`."""
        return self._program is not None and self._program.can_start

    def is_recorded(self, metas: Sequence[AttentionMeta]) -> bool:
        """See `StartedLayers`."""
        return self._program is not None and self._program.is_fast(metas[0])

    def can_start(self, metas: Sequence[AttentionMeta]) -> bool:
        """See `StartedLayers`."""
        return self.starts_steps and self.is_recorded(metas)

    def start(self, step: StartedStep) -> Callable[[], tuple[Tensor, Tensor, Tensor | None]]:
        """See `StartedLayers`."""
        assert self._program is not None, "is_recorded"
        return self._program.start(step)

    def _record(
        self, x_TE: Tensor, angles: Sequence[Angles], caches: Sequence[LayerCache], metas: Sequence[AttentionMeta]
    ) -> tuple[Tensor, Tensor]:
        self._is_tried = True
        self._recorder.tape = tape = Tape(x_TE, angles, caches)
        try:
            with OnlyKernels(self._recorder, tape):
                outputs = self._run(x_TE, angles, caches, metas)
        finally:
            self._recorder.tape = None
        try:
            if tape.failure is not None:
                raise CannotRecordError(tape.failure)
            if self._axis.one_shot is not self._ranks:
                raise CannotRecordError("another model's sums over ranks")
            self._program = Program(tape, outputs, caches, self._programs, self._num_threads, self._ranks)
        except CannotRecordError as error:
            logger.info("the layers run one operation at a time: %s", error)
        return outputs


class Program:
    """A tape made to run again. Holds the buffers of a step: one thread."""

    def __init__(
        self,
        tape: Tape,
        outputs: tuple[Tensor, Tensor],
        caches: Sequence[LayerCache],
        programs: Programs,
        num_threads: int,
        ranks: NativeAllReduce | None,
    ) -> None:
        """Raises CannotRecordError when the outputs are not what the tape says."""
        if len(tape.num_heads) != 1 or len({cache.k_BPKH.shape[1:] for cache in caches}) != 1:
            raise CannotRecordError("layers whose heads or caches differ")
        x, residual = (tape.read(output) for output in outputs)
        if residual.buffer != 0 or x.buffer == 0 or x.column or tape.widths[x.buffer] != tape.widths[0]:
            raise CannotRecordError("a residual stream that is not kept in place")
        self._output = x.buffer
        self._tape = tape  # keeps what the operations point to
        self._programs = programs
        self._ranks = ranks
        self._num_sums = sum(operation.kind == Kind.ALL_REDUCE for operation in tape.operations)
        self.can_start = programs.can_start(num_threads)
        """Whether other threads can begin it."""
        self._is_always_fast = programs.has_dot_products(caches[0].k_BPKH.shape[3], caches[0].k_scale_BPK is not None)
        operations = _fuse_gates(tape)
        self._operations = (Operation * len(operations))(*operations)
        self._caches: Sequence[LayerCache] = ()
        self._slots, self._slot_of_buffer = _share_memory(operations, tape.widths, self._output)
        self._arena = torch.empty(0, dtype=programs.dtype)
        self._widths = (ctypes.c_int64 * len(tape.widths))(*tape.widths)
        self._buffers = (ctypes.c_void_p * len(tape.widths))()
        self._layers = (LayerStep * len(caches))()
        self._groups = (GroupStep * len(caches))()
        """What each group of layers with a meta in common has in a step; as many as the step has metas are used."""
        self._num_groups = 0
        self._angles = (AnglesStep * tape.num_angles)()
        self._step = Step(
            buffers=ctypes.addressof(self._buffers),
            widths=ctypes.addressof(self._widths),
            layers=ctypes.addressof(self._layers),
            angles=ctypes.addressof(self._angles),
            num_threads=num_threads,
            searched=self._output,
            num_kept=_ALL,
        )
        self._x_TE = torch.empty(0, tape.widths[0], dtype=programs.dtype)
        self._values_T, self._found_T = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self._table: Tensor | TableLinear | None = None
        self._searched: NativeTable | None = None
        self._embedding, self._search_step = Embedding(), Table()
        self._draws: npt.NDArray[np.void] | None = None
        """Draws of the step that has been started: kept until it ends."""

    def is_fast(self, meta: AttentionMeta) -> bool:
        """Whether there is nothing better for a step."""
        is_decode = meta.num_decodes == len(meta.context_lens_host)
        return self._is_always_fast or is_decode or meta.max_context_len <= _MOST_CONTEXT

    def __call__(
        self, x_TE: Tensor, angles: Sequence[Angles], caches: Sequence[LayerCache], metas: Sequence[AttentionMeta]
    ) -> tuple[Tensor, Tensor]:
        """See `RunLayers`. x becomes the residual stream."""
        out_TE = self._place(x_TE, angles, None, caches, metas)
        self.check(self._programs.run(self._operations, len(self._operations), ctypes.byref(self._step)))
        return out_TE, x_TE

    def start(self, step: StartedStep) -> Callable[[], tuple[Tensor, Tensor, Tensor | None]]:
        """See `StartedLayers`."""
        try:
            x_TE = self._look_up(step.x) if isinstance(step.x, Lookup) else step.x
            num_rows = x_TE.shape[0]
            if step.rows_S is not None:
                self._step.kept = step.rows_S.data_ptr()
                self._step.num_kept = num_rows = step.rows_S.shape[0]
            found_S = None
            if isinstance(step.head, NativeTable) and step.search is not None:
                found_S = self._search(step.head, step.search, num_rows)
            out_TE = self._place(x_TE, step.angles, step.positions_T, step.caches, step.metas)
            result = out_TE[:num_rows], x_TE[:num_rows], found_S
            started = self._programs.start(self._operations, len(self._operations), ctypes.byref(self._step))
            return _Begun(self, started, result, step)
        finally:
            self._step.embedding = self._step.table = None  # of this step, which has its own copy by now
            self._step.num_kept = _ALL

    def finish(self, started: int) -> int:
        """Join what was started; a Meeting, as `check` takes it."""
        return self._programs.finish(started)

    def check(self, meeting: int) -> None:
        """Count what was added up over ranks. Raises CollectiveError when they did not meet."""
        if self._ranks is not None:
            self._ranks.note_program(self._num_sums, meeting)

    def _look_up(self, x: Lookup) -> Tensor:
        """Let the step begin with rows of a table; where they come."""
        if x.table is not self._table:
            self._table, self._embedding = x.table, _embedding(x.table)
        self._embedding.token_ids = x.indices_T.data_ptr()
        self._step.embedding = ctypes.addressof(self._embedding)
        num_tokens = x.indices_T.shape[0]
        if self._x_TE.shape[0] != num_tokens:
            self._x_TE = self._x_TE.new_empty(num_tokens, self._x_TE.shape[1])
        return self._x_TE

    def _search(self, table: NativeTable, search: Search | Sift, num_tokens: int) -> Tensor:
        """Let the step end with a search; where what it finds comes."""
        if table is not self._searched or self._found_T.shape[0] != num_tokens:
            self._values_T, self._found_T = torch.empty(num_tokens), torch.empty(num_tokens, dtype=torch.int64)
            self._searched, self._search_step = table, table.to_search(self._values_T, self._found_T)
        numbers, draws = None, None
        if isinstance(search, Sift):
            assert search.draws is not None, "they are known"
            numbers, draws = search.numbers, to_draw_array(search.draws)
        self._search_step.ask(search.noise, search.edits, numbers=numbers, draws=draws)
        self._draws = draws
        self._step.table = ctypes.addressof(self._search_step)
        return self._found_T

    def _place(
        self,
        x_TE: Tensor,
        angles: Sequence[Angles],
        positions_T: Tensor | None,
        caches: Sequence[LayerCache],
        metas: Sequence[AttentionMeta],
    ) -> Tensor:
        """Let the step point to these; where the result comes."""
        if caches is not self._caches:
            self._place_caches(caches)
        out_TE = torch.empty_like(x_TE)
        self._place_buffers(x_TE, out_TE)
        self._place_metas(metas)
        positions = None if positions_T is None else positions_T.data_ptr()
        for step, pair in zip(self._angles, angles, strict=True):
            if pair:
                step.cos, step.sin, step.half = pair[0].data_ptr(), pair[1].data_ptr(), pair[0].shape[1]
                step.positions = positions
        return out_TE

    def _place_caches(self, caches: Sequence[LayerCache]) -> None:
        self._caches = caches
        _, block_size, num_kv_heads, head_dim = caches[0].k_BPKH.shape
        (num_heads,) = self._tape.num_heads
        for layer, cache, group in zip(self._layers, caches, self._groups, strict=True):
            layer.keys, layer.values = cache.k_BPKH.data_ptr(), cache.v_BPKH.data_ptr()
            group.layout = StepLayout(
                block_size=block_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                num_threads=self._step.num_threads,
                is_int8=caches[0].k_scale_BPK is not None,
            )

    def _place_buffers(self, x_TE: Tensor, out_TE: Tensor) -> None:
        num_tokens = x_TE.shape[0]
        if num_tokens != self._step.num_tokens:
            needed = num_tokens * sum(self._slots)
            if len(self._arena) < needed:
                self._arena = self._arena.new_empty(needed)
            sizes = (num_tokens * width * self._arena.itemsize for width in self._slots)
            starts = list(accumulate(sizes, initial=self._arena.data_ptr()))
            for buffer, slot in self._slot_of_buffer.items():
                self._buffers[buffer] = starts[slot]
            self._step.num_tokens = num_tokens
        self._buffers[0] = x_TE.data_ptr()
        self._buffers[self._output] = out_TE.data_ptr()

    def _place_metas(self, metas: Sequence[AttentionMeta]) -> None:
        groups = {id(meta): meta for meta in metas}
        if len(groups) > 1 or self._num_groups != 1:
            places = {key: ctypes.addressof(group) for key, group in zip(groups, self._groups, strict=False)}
            for layer, meta in zip(self._layers, metas, strict=True):
                layer.group = places[id(meta)]
            self._num_groups = len(groups)
        for group, meta in zip(self._groups, groups.values(), strict=False):
            layout = group.layout
            layout.query_starts = meta.query_starts.data_ptr()
            layout.context_lens = meta.context_lens.data_ptr()
            layout.block_tables = meta.block_tables.data_ptr()
            layout.table_stride = meta.block_tables.stride(0)
            layout.num_sequences = len(meta.context_lens_host)
            group.slots = meta.slot_mapping.data_ptr()


class _Begun:
    """A program that other threads have begun. They use what this holds until it is called, or forgotten."""

    def __init__(
        self, program: Program, started: int, result: tuple[Tensor, Tensor, Tensor | None], step: StartedStep
    ) -> None:
        self._program = program
        self._started: int | None = started
        self._result = result
        self._step = step

    def __call__(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Join them, once; what it gives. Raises as `Program.check`."""
        self._program.check(self._finish())
        return self._result

    def __del__(self) -> None:
        """Join them, if nobody has."""
        if self._started is not None:
            self._finish()

    def _finish(self) -> int:
        assert self._started is not None, "called once"
        started, self._started = self._started, None
        return self._program.finish(started)


def _embedding(table: Tensor | TableLinear) -> Embedding:
    """Return what looks up rows of a table; which tokens' they are is not set."""
    if isinstance(table, NativeTable):
        return table.to_embed()
    assert isinstance(table, Tensor), "the only other kind of table here"
    return Embedding(values=table.data_ptr(), num_rows=len(table), is_packed=False)


_GATED = {Kind.MULTIPLY: Kind.MULTIPLY_GATED, Kind.MULTIPLY_INT8: Kind.MULTIPLY_GATED_INT8}


def _fuse_gates(tape: Tape) -> list[Operation]:
    """A product whose result is only read by the SiLU after it becomes one operation with that."""
    readers = Counter(place.buffer for operation in tape.operations for place in (operation.input, operation.second))
    fused: list[Operation] = []
    for operation in tape.operations:
        last = fused[-1] if fused else None
        if (
            last is not None
            and last.kind in _GATED
            and operation.kind == Kind.GATE
            and operation.flag == ACTIVATIONS.index(Activation.SILU)
            and last.output.buffer == operation.input.buffer
            and readers[last.output.buffer] == 1
            and last.num_out % (2 * PANEL) == 0
        ):
            fused[-1] = gated = Operation.from_buffer_copy(last)
            gated.kind, gated.output = _GATED[Kind(last.kind)], operation.output
        else:
            fused.append(operation)
    return fused


def _share_memory(
    operations: Sequence[Operation], widths: Sequence[int], output: int
) -> tuple[list[int], dict[int, int]]:
    """Widths of the slots, and the slot of each buffer; what is read no more makes room for the next of its width."""
    last_use: dict[int, int] = {}
    for index, operation in enumerate(operations):
        for place in (operation.input, operation.second, operation.output):
            last_use[place.buffer] = index
    slots: list[int] = []
    slot_of_buffer: dict[int, int] = {}
    free: dict[int, list[int]] = {}
    for index, operation in enumerate(operations):
        written = operation.output.buffer
        if written > 0 and written != output and written not in slot_of_buffer:
            width = widths[written]
            if free.get(width):
                slot_of_buffer[written] = free[width].pop()
            else:
                slot_of_buffer[written] = len(slots)
                slots.append(width)
        for buffer in {place.buffer for place in (operation.input, operation.second, operation.output)}:
            if buffer in slot_of_buffer and last_use[buffer] == index:
                free.setdefault(widths[buffer], []).append(slot_of_buffer[buffer])
    return slots, slot_of_buffer
