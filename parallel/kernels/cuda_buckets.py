"""The sizes that a step on a GPU is planned with: partitions of a decode's context, and buckets of recorded graphs.

Pure arithmetic on the host; the kernels are in triton_attention.py, the graphs in cuda_graphs.py.
"""

from bisect import bisect_left
from typing import NamedTuple

PARTITION_SIZE = 512
"""Keys of a partition: at a batch of one, 64 k tokens of context are 128 partitions a key-value head."""
MAX_PARTITIONS = 16384
"""Over all sequences of a step: with 32 heads of 128, what waits to be merged takes 256 MiB."""
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Decoding sequences that graphs are recorded for; a larger step keeps the device busy without."""
MIN_CONTEXT_BUCKET = 512
"""The context of a graph is this times a power of four: what is past a sequence's own costs programs that end at once,
and each further bucket a graph for every number of tokens."""


class StepBucket(NamedTuple):
    """What one recorded graph runs: up to so many sequences of one token each, with contexts up to so long."""

    num_tokens: int
    max_context_len: int


def choose_bucket(*, num_tokens: int, num_decodes: int, max_context_len: int) -> StepBucket | None:
    """The smallest bucket that holds a step; None: it has chunks of prompts, or too many tokens."""
    if num_decodes != num_tokens or not 0 < num_tokens <= TOKEN_BUCKETS[-1]:
        return None
    context = MIN_CONTEXT_BUCKET
    while context < max_context_len:
        context *= 4
    return StepBucket(TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, num_tokens)], context)


def largest_steps(*, max_num_seqs: int, max_context: int) -> list[StepBucket]:
    """The largest step of each bucket that steps of these limits are in: longest contexts first, then most tokens."""
    sizes = [min(size, max_num_seqs) for size in TOKEN_BUCKETS[: bisect_left(TOKEN_BUCKETS, max_num_seqs) + 1]]
    contexts, context = [], MIN_CONTEXT_BUCKET
    while context < max_context:
        contexts.append(context)
        context *= 4
    contexts.append(max_context)
    return [StepBucket(size, context) for context in reversed(contexts) for size in reversed(sizes)]


def partition_size(num_seqs: int, max_context_len: int) -> int:
    """Keys of a partition: PARTITION_SIZE, doubled until the partitions of all sequences are few enough."""
    size = PARTITION_SIZE
    while num_seqs * -(-max_context_len // size) > MAX_PARTITIONS and size < max_context_len:
        size *= 2
    return size


def num_partitions(max_context_len: int, sliding_window: int | None, size: int) -> int:
    """The most partitions that one query's keys lie in; those of a window may begin in the middle of one."""
    count = -(-max_context_len // size)
    return count if sliding_window is None else min(count, -(-sliding_window // size) + 1)
