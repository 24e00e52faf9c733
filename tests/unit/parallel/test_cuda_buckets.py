"""What a step on a GPU is planned with, without a GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.kernels.cuda_buckets import (
    MAX_CHUNKS,
    MAX_PARTITION_SIZE,
    MAX_PARTITIONS,
    MIN_CHUNK_PARTITION_SIZE,
    MIN_CHUNKS,
    MIN_PARTITION_SIZE,
    MIXED_BUCKETS,
    NUM_CHUNK_PROGRAMS,
    NUM_DECODE_PROGRAMS,
    TOKEN_BUCKETS,
    StepBucket,
    choose_bucket,
    choose_mixed,
    choose_pieces,
    chunk_partition_size,
    fullest_context,
    largest_mixed,
    largest_pieces,
    largest_steps,
    num_partitions,
    partition_size,
    room_for_chunks,
)


@given(num_seqs=st.integers(1, 40_000), num_kv_heads=st.integers(1, 64), max_context_len=st.integers(513, 200_000))
def test_partitions_are_few_enough_and_no_larger_than_they_need_to_be(
    num_seqs: int, num_kv_heads: int, max_context_len: int
) -> None:
    size = partition_size(num_seqs, num_kv_heads, max_context_len, None)
    assert size >= MIN_PARTITION_SIZE
    assert num_seqs * num_partitions(max_context_len, None, size) <= max(MAX_PARTITIONS, num_seqs)
    if size > MIN_PARTITION_SIZE:
        num_smaller = num_seqs * num_partitions(max_context_len, None, size // 2)
        assert num_kv_heads * num_smaller > NUM_DECODE_PROGRAMS
    if size > MAX_PARTITION_SIZE:
        assert num_smaller > MAX_PARTITIONS


@given(
    num_tokens=st.integers(1, 8192),
    tokens_of_tile=st.integers(1, 128),
    num_kv_heads=st.integers(1, 64),
    max_context_len=st.integers(1, 200_000),
)
def test_contexts_of_chunks_are_cut_where_tiles_are_few(
    num_tokens: int, tokens_of_tile: int, num_kv_heads: int, max_context_len: int
) -> None:
    size = chunk_partition_size(num_tokens, tokens_of_tile, num_kv_heads, max_context_len)
    num_programs = (num_tokens // tokens_of_tile + 1) * num_kv_heads
    if size is None:
        halves_are_many = 2 * num_programs > NUM_CHUNK_PROGRAMS or 2 * num_tokens > MAX_PARTITIONS
        assert halves_are_many or max_context_len <= MIN_CHUNK_PARTITION_SIZE
        return
    num_parts = -(-max_context_len // size)
    assert num_parts > 1
    assert num_programs * num_parts <= NUM_CHUNK_PROGRAMS
    assert num_tokens * num_parts <= MAX_PARTITIONS
    if size > MIN_CHUNK_PARTITION_SIZE:
        num_smaller = -(-max_context_len // (size // 2))
        assert num_programs * num_smaller > NUM_CHUNK_PROGRAMS or num_tokens * num_smaller > MAX_PARTITIONS


def test_one_long_sequence_is_cut_into_many_partitions_and_short_ones_are_not_cut() -> None:
    assert num_partitions(65536, None, partition_size(1, 8, 65536, None)) == 64
    assert num_partitions(100_000, None, partition_size(256, 8, 100_000, None)) == 49, "one among many may be long"
    assert num_partitions(512, None, partition_size(1, 1, 512, None)) == 1


@given(max_num_seqs=st.integers(1, 4096), max_context=st.integers(1, 200_000), data=st.data())
def test_no_step_has_many_more_partitions_than_that_of_the_fullest_context(
    max_num_seqs: int, max_context: int, data: st.DataObject
) -> None:
    num_kv_heads = data.draw(st.integers(1, 64))

    def num_kept(num_seqs: int, context: int) -> int:
        return num_seqs * num_partitions(context, None, partition_size(num_seqs, num_kv_heads, context, None))

    num_seqs, context = data.draw(st.integers(1, max_num_seqs)), data.draw(st.integers(1, max_context))
    fullest = fullest_context(max_num_seqs, max_context)
    assert fullest <= max_context
    most = max(num_kept(max_num_seqs, fullest), NUM_DECODE_PROGRAMS)
    assert num_kept(num_seqs, context) <= most + max_num_seqs


@given(context=st.integers(1, 5000), window=st.integers(1, 6000), size=st.sampled_from([16, 512, 1024]))
def test_a_window_never_lies_in_more_partitions_than_counted(context: int, window: int, size: int) -> None:
    first = max(0, context - window)
    used = (context - 1) // size - first // size + 1
    assert used <= num_partitions(context, window, size)


@pytest.mark.parametrize("num_seqs", [1, 40, 256])
@pytest.mark.parametrize("context", [1, 512, 513, 5000, 131_072])
def test_a_short_window_is_not_cut_however_long_the_context(num_seqs: int, context: int) -> None:
    for window in (1, 128, 512):
        size = partition_size(num_seqs, 8, context, window)
        assert num_partitions(context, window, size) == 1
        assert size >= context
    assert partition_size(num_seqs, 8, context, 513) == partition_size(num_seqs, 8, context, None)


@pytest.mark.parametrize(("window", "expected"), [(None, 4), (2048, 4), (1024, 3), (1, 2)])
def test_a_window_bounds_the_partitions(window: int | None, expected: int) -> None:
    assert num_partitions(2000, window, 512) == expected


@given(num_tokens=st.integers(1, TOKEN_BUCKETS[-1]), max_context_len=st.integers(1, 200_000))
def test_a_bucket_holds_its_step_and_wastes_little(num_tokens: int, max_context_len: int) -> None:
    bucket = choose_bucket(num_tokens=num_tokens, num_decodes=num_tokens, max_context_len=max_context_len)
    assert bucket is not None
    assert num_tokens <= bucket.num_tokens <= 2 * num_tokens
    assert max_context_len <= bucket.max_context_len <= max(512, 4 * max_context_len)


@pytest.mark.parametrize(
    ("num_tokens", "num_decodes", "expected"),
    [
        (17, 17, StepBucket(24, 2048)),
        (256, 256, StepBucket(256, 2048)),
        (257, 257, None),
        (17, 16, None),
        (17, 0, None),
    ],
)
def test_only_steps_of_decodes_have_a_bucket(num_tokens: int, num_decodes: int, expected: StepBucket | None) -> None:
    assert choose_bucket(num_tokens=num_tokens, num_decodes=num_decodes, max_context_len=513) == expected


@given(max_num_seqs=st.integers(1, TOKEN_BUCKETS[-1]), max_context=st.integers(1, 200_000), data=st.data())
def test_the_largest_steps_leave_no_bucket_out(max_num_seqs: int, max_context: int, data: st.DataObject) -> None:
    steps = largest_steps(max_num_seqs=max_num_seqs, max_context=max_context)
    buckets = [bucket_of(step.num_tokens, step.max_context_len) for step in steps]
    assert len(set(buckets)) == len(buckets)
    assert steps[0] == StepBucket(max_num_seqs, max_context)
    num_seqs, context = data.draw(st.integers(1, max_num_seqs)), data.draw(st.integers(1, max_context))
    largest = steps[buckets.index(bucket_of(num_seqs, context))]
    assert num_seqs <= largest.num_tokens <= max_num_seqs
    assert context <= largest.max_context_len <= max_context


@given(num_tokens=st.integers(1, MIXED_BUCKETS[-1]))
def test_pieces_hold_their_step_and_waste_little(num_tokens: int) -> None:
    bucket = choose_pieces(num_tokens)
    assert bucket is not None
    assert bucket.is_in_pieces
    assert num_tokens <= bucket.num_tokens <= max(16, 2 * num_tokens)


@given(
    num_tokens=st.integers(1, MIXED_BUCKETS[-1]),
    num_chunks=st.integers(0, MIN_CHUNKS),
    max_context_len=st.integers(1, 200_000),
)
def test_a_bucket_with_chunks_holds_its_step(num_tokens: int, num_chunks: int, max_context_len: int) -> None:
    bucket = choose_mixed(num_tokens=num_tokens, num_chunks=num_chunks, max_context_len=max_context_len)
    assert bucket is not None
    assert num_tokens <= bucket.num_tokens <= max(16, 2 * num_tokens)
    assert num_chunks <= bucket.num_chunks
    assert max_context_len <= bucket.max_context_len <= max(512, 4 * max_context_len)


@pytest.mark.parametrize(("num_tokens", "num_chunks"), [(513, 1), (40, 5), (512, MAX_CHUNKS + 1)])
def test_large_steps_and_many_chunks_have_no_bucket(num_tokens: int, num_chunks: int) -> None:
    assert choose_mixed(num_tokens=num_tokens, num_chunks=num_chunks, max_context_len=600) is None


@given(max_num_tokens=st.integers(1, 4096), max_context=st.integers(1, 200_000), data=st.data())
def test_the_largest_steps_with_chunks_leave_no_bucket_out(
    max_num_tokens: int, max_context: int, data: st.DataObject
) -> None:
    steps = largest_mixed(max_num_tokens=max_num_tokens, max_context=max_context)
    buckets = [mixed_bucket_of(step.num_tokens, step.max_context_len) for step in steps]
    assert len(set(buckets)) == len(buckets)
    size = min(max_num_tokens, MIXED_BUCKETS[-1])
    assert steps[0] == StepBucket(size, max_context, room_for_chunks(size))
    num_tokens = data.draw(st.integers(1, min(max_num_tokens, MIXED_BUCKETS[-1])))
    context = data.draw(st.integers(1, max_context))
    largest = steps[buckets.index(mixed_bucket_of(num_tokens, context))]
    assert num_tokens <= largest.num_tokens <= max_num_tokens
    assert context <= largest.max_context_len <= max_context


def test_large_steps_are_not_in_pieces() -> None:
    assert choose_pieces(MIXED_BUCKETS[-1] + 1) is None


@given(max_num_tokens=st.integers(1, 4096), data=st.data())
def test_the_largest_pieces_leave_no_bucket_out(max_num_tokens: int, data: st.DataObject) -> None:
    steps = largest_pieces(max_num_tokens)
    buckets = [choose_pieces(step.num_tokens) for step in steps]
    assert len(set(buckets)) == len(buckets)
    assert steps[0].num_tokens == min(max_num_tokens, MIXED_BUCKETS[-1])
    assert all(step.is_in_pieces for step in steps)
    num_tokens = data.draw(st.integers(1, min(max_num_tokens, MIXED_BUCKETS[-1])))
    assert num_tokens <= steps[buckets.index(choose_pieces(num_tokens))].num_tokens


def bucket_of(num_seqs: int, context: int) -> StepBucket | None:
    return choose_bucket(num_tokens=num_seqs, num_decodes=num_seqs, max_context_len=context)


def mixed_bucket_of(num_tokens: int, context: int) -> StepBucket | None:
    return choose_mixed(num_tokens=num_tokens, num_chunks=1, max_context_len=context)
