"""All layers of a small step as one launch: a CUDA graph for each bucket of steps, recorded when it is first met:
ahead of all requests, where `ModelRunner.allocate` runs a step of each. Where attention cannot be recorded, or a
library is better at it, there are graphs of what lies between attentions (cuda_pieces.py).

A graph reads and writes where it was recorded, so that each has tensors of its own (`_Buffers`) into which a step is
copied. What fills it up to the bucket's size are sequences without context, whose keys go nowhere: their slot is
negative. Larger steps run as they are: they keep the device busy by themselves.

Tensor-parallel ranks record their all-reduces with the layers. NCCL wants such a graph recorded by all ranks and
launched by all: they meet the same buckets in the same order, for a step's bucket follows from the plan alone. What
crosses stages, the embedding and the head stay outside. A rank that fails to record ends its group: the others have
recorded, and wait for its launch.

Which step has which bucket is said in cuda_buckets.py. Without a GPU buckets, padding, collectives and the following of
caches are tested with recordings that call the layers, or their operations, again.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from parallel.errors import DeviceError, GraphCaptureError
from parallel.kernels.base import AttentionMeta, LayerCache, RunLayers
from parallel.kernels.cuda_buckets import TOKEN_BUCKETS, StepBucket, choose_bucket, choose_mixed, choose_pieces
from parallel.kernels.cuda_pieces import Cut, CutAttention, call_at_once

logger = logging.getLogger(__name__)

Angles = Sequence[tuple[Tensor, ...]]
Result = tuple[Tensor, Tensor]


class Recording(NamedTuple):
    """What was recorded."""

    replay: Callable[[], None]
    """Computes `result` anew."""
    result: Result
    memory: Any
    """Where what is in between lies; recordings may share it while one of them lives."""


class Recordable(Protocol):
    """What can be recorded."""

    def __call__(self, cut: Cut = call_at_once) -> Result:
        """What is recorded is in pieces where it calls `cut`."""


Record = Callable[[Recordable, Any], Recording]
"""(a function, memory of recordings that live, None: new memory) calls the function at least once, and returns what
does the same again."""


class GraphedLayers:
    """Implements `RecordedLayers`. One thread.

    Args:
        run: the layers, one operation at a time. It raises DeviceError where it needs a step's lengths on the host,
            which a graph does not have (its metas' host lists are empty); from then on nothing is recorded whole.
            That lies with the model, so that tensor-parallel ranks agree.
        record: `CudaGraphs().record` on a GPU.
        attention: what `run` calls; None: steps are recorded whole, or not at all.
        counts: the collectives that `run` calls, by kind; those of a replay are added.
        max_num_seqs: the largest step of decodes alone.
        records_chunks: chunks of prompts are recorded with their attention, which is given room for them (`_Buffers`).
    """

    def __init__(
        self,
        run: RunLayers,
        record: Record,
        *,
        attention: CutAttention | None = None,
        counts: Counter[str] | None = None,
        max_num_seqs: int = TOKEN_BUCKETS[-1],
        records_chunks: bool = False,
    ) -> None:
        self._run = run
        self._record = record
        self._attention = attention
        self._counts = Counter() if counts is None else counts
        self._max_num_seqs = max_num_seqs
        self._records_chunks = records_chunks
        self._graphs: dict[StepBucket, _Graph] = {}
        self._memory: Any = None
        self._tables: list[Tensor] = []
        """Block tables of each group of layers, for the largest of the recordings, which share them."""
        self._places: list[tuple[int, torch.Size]] = []
        self._is_refused = False

    def __call__(
        self, x_TE: Tensor, angles: Angles, caches: Sequence[LayerCache], metas: Sequence[AttentionMeta]
    ) -> Result:
        """See `RunLayers`."""
        num_tokens = len(x_TE)
        self._follow(caches)
        graph = self._find(x_TE, angles, caches, metas)
        if graph is None:
            return self._run(x_TE, angles, caches, metas)
        buffers, recording, collectives = graph
        buffers.fill(x_TE, angles, metas)
        recording.replay()
        self._counts.update(collectives)
        added_TE, residual_TE = recording.result
        return added_TE[:num_tokens], residual_TE[:num_tokens]

    @property
    def num_recorded(self) -> int:
        """See `RecordedLayers`."""
        return len(self._graphs)

    @property
    def records_whole_steps(self) -> bool:
        """See `RecordedLayers`; false from the first that was refused on."""
        return not self._is_refused

    @property
    def records_chunks(self) -> bool:
        """See `RecordedLayers`."""
        return self._records_chunks and not self._is_refused

    def _find(
        self, x_TE: Tensor, angles: Angles, caches: Sequence[LayerCache], metas: Sequence[AttentionMeta]
    ) -> "_Graph | None":
        """Return the recording for a step, made if there is none; None: it is not recorded."""
        while (bucket := self._choose(len(x_TE), metas[0])) is not None:
            if bucket in self._graphs or self._add_graph(bucket, x_TE, angles, caches, metas):
                return self._graphs[bucket]
        return None

    def _choose(self, num_tokens: int, meta: AttentionMeta) -> StepBucket | None:
        """None: the step is not recorded."""
        num_decodes, max_context_len = meta.num_decodes, meta.max_context_len
        if num_tokens <= self._max_num_seqs and not self._is_refused:
            whole = choose_bucket(num_tokens=num_tokens, num_decodes=num_decodes, max_context_len=max_context_len)
            if whole is not None:
                return whole
        if self.records_chunks:
            num_chunks = len(meta.context_lens) - num_decodes
            return choose_mixed(num_tokens=num_tokens, num_chunks=num_chunks, max_context_len=max_context_len)
        return None if self._attention is None else choose_pieces(num_tokens)

    def _follow(self, caches: Sequence[LayerCache]) -> None:
        """Drop all graphs where the caches are others than before."""
        places = [(tensor.data_ptr(), tensor.shape) for cache in caches for tensor in cache[:2]]
        if places != self._places:
            self._places = places
            self._graphs.clear()
            self._tables.clear()
            self._memory = None

    def _take_tables(self, bucket: StepBucket, cache: LayerCache, metas: Sequence[AttentionMeta]) -> list[Tensor]:
        """Return room for the block tables of each group of layers."""
        shape = bucket.num_tokens + bucket.num_chunks, -(-bucket.max_context_len // cache.k_BPKH.shape[1])
        if not self._tables or any(have < want for have, want in zip(self._tables[0].shape, shape, strict=True)):
            self._tables = [meta.block_tables.new_zeros(shape) for meta in _distinct(metas)]
        return [table[: shape[0], : shape[1]] for table in self._tables]

    def _add_graph(
        self,
        bucket: StepBucket,
        x_TE: Tensor,
        angles: Angles,
        caches: Sequence[LayerCache],
        metas: Sequence[AttentionMeta],
    ) -> bool:
        """Return whether it was recorded: not where steps turn out to be refused whole."""
        buffers = _Buffers(bucket, x_TE, angles, metas, self._take_tables(bucket, caches[0], metas))
        buffers.fill(x_TE, angles, metas)  # recording runs the layers, which write to the caches
        attention = self._attention if bucket.is_in_pieces else None
        collectives: Counter[str] = Counter()

        def run(cut: Cut = call_at_once) -> Result:
            before = self._counts.copy()
            with nullcontext() if attention is None else attention.cutting(cut, lambda: buffers.step_metas):
                result = self._run(buffers.x_TE, buffers.angles, caches, buffers.metas)
            collectives.clear()
            collectives.update(self._counts - before)
            return result

        try:
            recording = self._record(run, self._memory)
        except DeviceError as error:
            if bucket.is_in_pieces:
                raise
            logger.info("steps are not recorded as whole graphs: %s", error)
            self._is_refused = True
            return False
        logger.debug("recorded a graph of %d tokens, contexts up to %d and %d chunks", *bucket)
        self._graphs[bucket] = _Graph(buffers, recording, collectives)
        self._memory = recording.memory
        return True


class CudaGraphs:
    """Records CUDA graphs, all in one stream: libraries keep tens of megabytes for each stream that they have met."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def record(self, run: Recordable, memory: Any) -> Recording:
        """Run once beside the current stream, where kernels are compiled, libraries set up and NCCL connects as these
        sizes want it, then record: a graph, and one more for each cut.

        `memory` is a pool of torch's; without a graph that lives a pool cannot be recorded into again.
        Raises GraphCaptureError where the run went well, but not the recording.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if memory is None:
            memory = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                run()
        finally:  # what is refused may have been begun
            current.wait_stream(self._stream)
        parts: list[Callable[[], None]] = []
        try:
            with _without_collector(), ExitStack() as piece:

                def begin() -> None:
                    graph = torch.cuda.CUDAGraph()
                    # of this thread only is refused what cannot be recorded: torch's watchdog of NCCL queries events
                    # in its own
                    piece.enter_context(
                        torch.cuda.graph(graph, pool=memory, stream=self._stream, capture_error_mode="thread_local")
                    )
                    parts.append(graph.replay)

                def cut(between: Callable[[], None]) -> None:
                    piece.close()
                    parts.append(between)
                    begin()

                begin()
                result = run(cut)
        except RuntimeError as error:
            reason = error.__context__ or error  # what comes out is often that the recording was cut short
            raise GraphCaptureError(
                f"a step cannot be recorded as a CUDA graph: {reason}; "
                "allowed: a smaller memory_fraction or max_cudagraph_capture_size, whose 0 records none"
            ) from error

        def replay() -> None:
            for part in parts:
                part()

        return Recording(replay, result, memory)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's collector may come upon compiled kernels, and to unload one breaks off what is being recorded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Graph(NamedTuple):
    """The recording of a bucket, and what it needs."""

    buffers: "_Buffers"
    recording: Recording
    collectives: Counter[str]
    """Collectives of one replay, by kind."""


class _Buffers:
    """The inputs of one recording. Those of a whole step are as many sequences as its bucket has tokens, of one token
    each, and after them its chunks, whose tokens follow those of the sequences that have a context. Those of one in
    pieces are without what only attention reads.

        tokens          d d d c c c c c - -      two chunks after three decodes, in a bucket of ten tokens
        context_lens    5 9 7 0 0 0 0 0 0 0 | 40 3 0 ..
        query_starts    0 1 2 3 4 5 6 7 8 9 | 3 6 8 8 ..
    """

    def __init__(
        self,
        bucket: StepBucket,
        x_TE: Tensor,
        angles: Angles,
        metas: Sequence[AttentionMeta],
        tables: Sequence[Tensor],
    ) -> None:
        size, num_seqs = bucket.num_tokens, bucket.num_tokens + bucket.num_chunks
        self.step_metas = metas
        """Metas of the step that was copied in last."""
        self._bucket = bucket
        self.x_TE = x_TE.new_zeros(size, x_TE.shape[1])
        self.angles = [tuple(table.new_zeros(size, table.shape[1]) for table in kind) for kind in angles]
        context_lens = metas[0].context_lens.new_zeros(num_seqs)
        query_starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=x_TE.device)
        self._groups = [
            AttentionMeta(
                query_starts=query_starts,
                context_lens=context_lens,
                block_tables=table,
                slot_mapping=meta.slot_mapping.new_zeros(size),
                num_decodes=size,
                max_query_len=size if bucket.num_chunks else 1,
                max_context_len=bucket.max_context_len,
                query_starts_host=[],
                context_lens_host=[],
            )
            for meta, table in zip(_distinct(metas), tables, strict=True)
        ]
        group_of = {id(meta): group for meta, group in zip(_distinct(metas), self._groups, strict=True)}
        self.metas = [group_of[id(meta)] for meta in metas]

    def fill(self, x_TE: Tensor, angles: Angles, metas: Sequence[AttentionMeta]) -> None:
        """Copy a step in; what is past it has no context and no slot."""
        num_tokens = len(x_TE)
        self.step_metas = metas
        self.x_TE[:num_tokens].copy_(x_TE)
        for mine, kind in zip(self.angles, angles, strict=True):
            for to, table in zip(mine, kind, strict=True):
                to[:num_tokens].copy_(table)
        for group, meta in zip(self._groups, _distinct(metas), strict=True):
            group.slot_mapping[:num_tokens].copy_(meta.slot_mapping)
            group.slot_mapping[num_tokens:].fill_(-1)
            if not self._bucket.is_in_pieces:
                self._fill_rows(group.block_tables[:, : meta.block_tables.shape[1]], meta.block_tables, meta)
        if not self._bucket.is_in_pieces:
            self._fill_lengths(self._groups[0], metas[0])

    def _fill_lengths(self, mine: AttentionMeta, meta: AttentionMeta) -> None:
        mine.context_lens.zero_()
        self._fill_rows(mine.context_lens, meta.context_lens, meta)
        if self._bucket.num_chunks:
            starts, ends = mine.query_starts[self._bucket.num_tokens :], meta.query_starts[meta.num_decodes :]
            starts[: len(ends)].copy_(ends)
            starts[len(ends) :].copy_(ends[-1])

    def _fill_rows(self, mine: Tensor, rows: Tensor, meta: AttentionMeta) -> None:
        """Copy what decodes and what chunks have to where each begin."""
        num_decodes, first_chunk = meta.num_decodes, self._bucket.num_tokens
        mine[:num_decodes].copy_(rows[:num_decodes])
        if self._bucket.num_chunks:
            chunks = rows[num_decodes:]
            mine[first_chunk : first_chunk + len(chunks)].copy_(chunks)


def _distinct(metas: Sequence[AttentionMeta]) -> list[AttentionMeta]:
    """Return one meta for each group of layers, in the order of their first layers."""
    return list({id(meta): meta for meta in metas}.values())
