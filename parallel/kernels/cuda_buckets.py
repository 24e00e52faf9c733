"""The sizes that a step on a GPU is planned with: partitions of a decode's context, and buckets of recorded graphs.

Pure arithmetic on the host; the kernels are in triton_attention.py, the graphs in cuda_graphs.py.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

MIN_PARTITION_SIZE, MAX_PARTITION_SIZE = 256, 2048
"""Keys of a partition: fewer are not worth their merging; with more, one long context among many would hold up all."""
NUM_DECODE_PROGRAMS = 512
"""About so many programs, each with a partition of a key-value head, keep a GPU's memory busy: four for each of 132
multiprocessors. Measured on an H200 (docs/experiments/gpu-kernels.md)."""
NUM_CHUNK_PROGRAMS = 264
"""The same of chunks: two for each multiprocessor, where one or two fit at a time."""
MIN_CHUNK_PARTITION_SIZE = 512
"""Keys that a tile of a chunk's queries is not cut below: whole tiles of keys, which have up to 128."""
MAX_PARTITIONS = 16384
"""Most partitions of all sequences of a step, or of all tokens of chunks: with 32 heads of 128, what waits to be
merged takes 256 MiB."""
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Decoding sequences that graphs of whole steps are recorded for."""
MIXED_BUCKETS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
"""Tokens of other steps that are recorded, whole or in pieces: as far as a step may wait for its host.

A layer of 8 B in bf16 reads 436 MB, 91 us at 4.8 TB/s, and computes 0.73 us a token at 600 TFLOP/s. Its host, if each
of some ten operations takes it 10 us, needs 100 us: it is the slower up to about 140 tokens, and of a layer of a
quarter of that (a model of 2 B, or four tensor-parallel ranks) up to 550. Products have tiles of 64 or 128 rows, so
that filling up to a multiple of 64 costs little.
"""
MIN_CHUNKS, MAX_CHUNKS = 4, 16
"""Chunks of prompts that a recorded step has room for, one for each 16 tokens: a chunk that is not there costs a
program for each partition and key-value head, which takes a multiprocessor some microseconds (computed)."""
MIN_CONTEXT_BUCKET = 512
"""The context of a graph is this times a power of four: what is past a sequence's own costs programs that end at once,
and each further bucket a graph for every number of tokens."""


class StepBucket(NamedTuple):
    """What one recording runs: up to so many sequences of one token each, with contexts up to so long."""

    num_tokens: int
    max_context_len: int
    """0: any step of up to so many tokens, recorded in pieces, without its attention."""
    num_chunks: int = 0
    """Besides up to so many chunks of prompts, of as many tokens in all."""

    @property
    def is_in_pieces(self) -> bool:
        """Attention is called between what is recorded."""
        return self.max_context_len == 0


def choose_bucket(*, num_tokens: int, num_decodes: int, max_context_len: int) -> StepBucket | None:
    """The smallest bucket that holds a step; None: it has chunks of prompts, or too many tokens."""
    if num_decodes != num_tokens or not 0 < num_tokens <= TOKEN_BUCKETS[-1]:
        return None
    return StepBucket(TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, num_tokens)], _context_bucket(max_context_len))


def choose_mixed(*, num_tokens: int, num_chunks: int, max_context_len: int) -> StepBucket | None:
    """The smallest bucket with chunks that holds a step; None: it has too many of them, or too many tokens, or none."""
    pieces = choose_pieces(num_tokens)
    if pieces is None or num_chunks > room_for_chunks(pieces.num_tokens):
        return None
    return StepBucket(pieces.num_tokens, _context_bucket(max_context_len), room_for_chunks(pieces.num_tokens))


def room_for_chunks(num_tokens: int) -> int:
    """How many chunks a recorded step of so many tokens has room for."""
    return min(max(num_tokens // 16, MIN_CHUNKS), MAX_CHUNKS)


def choose_pieces(num_tokens: int) -> StepBucket | None:
    """The smallest bucket of those in pieces that holds a step; None: it has too many tokens, or none."""
    if not 0 < num_tokens <= MIXED_BUCKETS[-1]:
        return None
    return StepBucket(MIXED_BUCKETS[bisect_left(MIXED_BUCKETS, num_tokens)], 0)


def largest_steps(*, max_num_seqs: int, max_context: int) -> list[StepBucket]:
    """The largest step of each bucket of decodes that steps of these limits are in: longest contexts first, then most
    tokens.
    """
    sizes = _largest_sizes(TOKEN_BUCKETS, max_num_seqs)
    return [StepBucket(size, context) for context in _largest_contexts(max_context) for size in sizes]


def largest_mixed(*, max_num_tokens: int, max_context: int) -> list[StepBucket]:
    """The same of the buckets with chunks."""
    sizes = _largest_sizes(MIXED_BUCKETS, max_num_tokens)
    return [
        StepBucket(size, context, room_for_chunks(size)) for context in _largest_contexts(max_context) for size in sizes
    ]


def largest_pieces(max_num_tokens: int) -> list[StepBucket]:
    """The largest step of each bucket of those that are recorded in pieces, largest first."""
    return [StepBucket(size, 0) for size in _largest_sizes(MIXED_BUCKETS, max_num_tokens)]


def _context_bucket(max_context_len: int) -> int:
    context = MIN_CONTEXT_BUCKET
    while context < max_context_len:
        context *= 4
    return context


def _largest_contexts(max_context: int) -> list[int]:
    """The longest context in each bucket that one is in, longest first."""
    contexts = [max_context]
    while (context := _context_bucket(contexts[-1]) // 4) >= MIN_CONTEXT_BUCKET:
        contexts.append(context)
    return contexts


def _largest_sizes(buckets: Sequence[int], most: int) -> list[int]:
    """The largest number up to `most` in each bucket that one is in, largest first."""
    return [min(size, most) for size in reversed(buckets[: bisect_left(buckets, most) + 1])]


def partition_size(num_seqs: int, num_kv_heads: int, max_context_len: int, sliding_window: int | None) -> int:
    """Keys of a partition: so many that the partitions of all sequences are about as many programs as a GPU needs, and
    not too many to keep. What is read of short contexts, and by short windows of longer ones, is not cut.
    """
    size = MIN_CONTEXT_BUCKET
    if min(max_context_len, sliding_window or max_context_len) <= MIN_CONTEXT_BUCKET:
        while size < max_context_len:
            size *= 2
        return size
    size = MIN_PARTITION_SIZE
    while num_seqs * num_kv_heads * max_context_len > NUM_DECODE_PROGRAMS * size and size < MAX_PARTITION_SIZE:
        size *= 2
    while num_seqs * -(-max_context_len // size) > MAX_PARTITIONS and size < max_context_len:
        size *= 2
    return size


def chunk_partition_size(num_tokens: int, tokens_of_tile: int, num_kv_heads: int, max_context_len: int) -> int | None:
    """Keys of a partition for tiles of chunks, one chunk or few: a short one after a long context has too few tiles to
    keep a GPU busy. None: whole contexts.
    """
    num_tiles = num_tokens // tokens_of_tile + 1
    most = min(NUM_CHUNK_PROGRAMS // (num_tiles * num_kv_heads), MAX_PARTITIONS // num_tokens)
    size = MIN_CHUNK_PARTITION_SIZE
    while most > 1 and -(-max_context_len // size) > most:
        size *= 2
    return size if most > 1 and size < max_context_len else None


def fullest_context(num_seqs: int, max_context: int) -> int:
    """The context with which so many decoding sequences have about the most partitions: past it they grow."""
    return min(max_context, max(1, MAX_PARTITIONS // num_seqs) * MAX_PARTITION_SIZE)


def num_partitions(max_context_len: int, sliding_window: int | None, size: int) -> int:
    """The most partitions that one query's keys lie in; those of a window may begin in the middle of one."""
    count = -(-max_context_len // size)
    return count if sliding_window is None else min(count, -(-sliding_window // size) + 1)
