"""The sizes that a step on a GPU is planned with: partitions of a decode's context, and buckets of recorded graphs.

Pure arithmetic on the host; the kernels are in triton_attention.py, the graphs in cuda_graphs.py.
"""

PARTITION_SIZE = 512
"""Keys of a partition: at a batch of one, 64 k tokens of context are 128 partitions a key-value head."""
MAX_PARTITIONS = 32768
"""Over all sequences of a step: with 32 heads of 128, what waits to be merged takes 512 MiB."""


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
