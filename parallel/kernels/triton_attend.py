"""The kernels of attention over the paged cache, in Triton: one of tiles of rows, and the merge of partitions.

What they are launched with, and what a program makes, is said in triton_attention.py.

Exponentials are powers of two: scores are multiplied by log2 e along with their scale. Keys and values lie alike, and
block after block. Shape letters as in base.py.
"""

import triton
import triton.language as tl

from parallel.kernels.triton_launch import wait_for_input

_LOG2_E = tl.constexpr(1.4426950408889634)
_SEQS_AT_ONCE = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_parts", "num_decodes", "num_seqs", "table_stride"])
def attend(
    q,  # [T, N, H]
    keys,  # [B, P, K, H]
    values,
    out,  # [T, N, H]; of partitions float32 [T, N, partitions, H]
    sums,  # float32 [T, N, partitions]: binary logarithms of the sums of exponentials
    query_starts,
    context_lens,
    block_tables,
    bias,
    sinks,
    scale,
    soft_cap,
    window,
    partition_size,
    num_parts,
    num_decodes,
    num_seqs,
    num_heads,
    num_group,
    q_token_stride,
    q_head_stride,
    slot_stride,  # of keys and of values
    kv_head_stride,
    table_stride,
    bias_stride,
    num_columns,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_PREFILL: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_BY_DISTANCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One tile of rows of one key-value head, over the whole context or some partitions of it.

    Where queries are and how long contexts, no kernel of a layer writes: that is read before the wait.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tile
    query_start = tile
    num_queries = 1
    first_query = 0
    if IS_PREFILL:
        first_token = tl.load(query_starts + num_decodes)
        seq = _sequence_of_tile(query_starts, tile, first_token, num_decodes, num_seqs, TILE_Q)
        query_start = tl.load(query_starts + seq)
        num_queries = tl.load(query_starts + seq + 1) - query_start
        first_query = (tile - (query_start - first_token) // TILE_Q - (seq - num_decodes)) * TILE_Q
    context_len = tl.load(context_lens + seq)
    table = block_tables + seq.to(tl.int64) * table_stride
    position = context_len - num_queries + first_query  # of the first query of the tile
    num_used = 1
    if not IS_PREFILL:
        num_used = _num_used(context_len, partition_size, window, HAS_WINDOW)
    elif IS_PARTIAL:
        num_used = tl.cdiv(tl.minimum(position + TILE_Q, context_len), partition_size)
    wait_for_input(IS_EARLY)
    if first_query < num_queries:
        row = tl.arange(0, TILE_Q * GROUP)
        query = first_query + row // GROUP
        head = kv_head * num_group + row % GROUP
        is_row = (query < num_queries) & (row % GROUP < num_group)
        dim = tl.arange(0, HEAD)
        token = (query_start + query).to(tl.int64)
        row_position = context_len - num_queries + query
        keys += kv_head * kv_head_stride
        values += kv_head * kv_head_stride
        factor = scale
        if not HAS_CAP and not HAS_BIAS:
            factor = scale * _LOG2_E
        q_tile = tl.load(
            q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
            mask=is_row[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        for part in range(tl.program_id(2), num_used, tl.num_programs(2)):
            begin, end = _find_span(
                *(position, context_len, window, partition_size, part),
                TILE_Q=TILE_Q,
                IS_CUT=IS_PARTIAL or not IS_PREFILL,
                HAS_WINDOW=HAS_WINDOW,
            )
            largest = tl.full((TILE_Q * GROUP,), float("-inf"), tl.float32)
            total = tl.zeros((TILE_Q * GROUP,), tl.float32)
            if HAS_SINKS:  # noqa: SIM102  # known when it is compiled, the other not
                if part == 0:
                    largest = tl.load(sinks + head, mask=is_row, other=0.0) * _LOG2_E
                    total = tl.full((TILE_Q * GROUP,), 1.0, tl.float32)
            mean = tl.zeros((TILE_Q * GROUP, HEAD), tl.float32)
            # blocks are known a tile ahead, so that keys are asked for without waiting for them
            next_block = _load_blocks(table, begin, end, BLOCK_SIZE, TILE_KEYS)
            whole_end = begin  # of the tiles that all rows see
            if IS_PREFILL and not HAS_WINDOW:
                whole_end = tl.maximum(begin, tl.minimum((position + 1) // TILE_KEYS * TILE_KEYS, end))
                for start in range(begin, whole_end, TILE_KEYS):
                    block = next_block
                    next_block = _load_blocks(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
                    total, largest, mean = _take_tile(
                        *(q_tile, keys, values, bias, block, start, end, row_position, head, is_row, window),
                        *(factor, soft_cap, total, largest, mean),
                        *(slot_stride, bias_stride, num_columns),
                        *(HEAD_DIM, BLOCK_SIZE, HEAD, TILE_KEYS),
                        *(True, HAS_WINDOW, HAS_CAP, HAS_BIAS, IS_BY_DISTANCE),
                    )
            for start in range(whole_end, end, TILE_KEYS):
                block = next_block
                next_block = _load_blocks(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
                total, largest, mean = _take_tile(
                    *(q_tile, keys, values, bias, block, start, end, row_position, head, is_row, window),
                    *(factor, soft_cap, total, largest, mean),
                    *(slot_stride, bias_stride, num_columns),
                    *(HEAD_DIM, BLOCK_SIZE, HEAD, TILE_KEYS),
                    *(False, HAS_WINDOW, HAS_CAP, HAS_BIAS, IS_BY_DISTANCE),
                )
            place = token * num_heads + head
            if IS_PARTIAL:
                place = place * num_parts + part
                tl.store(sums + place, largest + tl.log2(total), mask=is_row)
            mean = mean / total[:, None]
            tl.store(
                out + place[:, None] * HEAD_DIM + dim[None, :],
                mean.to(out.dtype.element_ty),
                mask=is_row[:, None] & (dim < HEAD_DIM)[None, :],
            )


@triton.jit
def _load_blocks(table, start, end, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """The blocks of the keys from `start` on."""
    key = start + tl.arange(0, TILE_KEYS)
    return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)


@triton.jit
def _take_tile(
    q_tile,
    keys,
    values,
    bias,
    block,
    start,
    end,
    row_position,
    head,
    is_row,
    window,
    factor,
    soft_cap,
    total,
    largest,
    mean,
    slot_stride,
    bias_stride,
    num_columns,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_BY_DISTANCE: tl.constexpr,
):
    """One tile of keys and values: the sum of exponentials, the largest score and the mean, with it. IS_WHOLE: all rows
    see all of it.
    """
    key = start + tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, HEAD)
    is_key = key < end
    place = (block * BLOCK_SIZE + key % BLOCK_SIZE).to(tl.int64)[:, None] * slot_stride + dim[None, :]
    if not IS_WHOLE:
        mask = is_key[:, None] & (dim < HEAD_DIM)[None, :]
        k_tile = tl.load(keys + place, mask=mask, other=0.0)
        v_tile = tl.load(values + place, mask=mask, other=0.0)
    elif HEAD == HEAD_DIM:
        k_tile = tl.load(keys + place)
        v_tile = tl.load(values + place)
    else:
        k_tile = tl.load(keys + place, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        v_tile = tl.load(values + place, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if HAS_CAP or HAS_BIAS:
        scores *= factor
        if HAS_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)  # tanh
        if HAS_BIAS:
            column = key[None, :] + tl.zeros_like(row_position)[:, None]
            if IS_BY_DISTANCE:
                column += num_columns - 1 - row_position[:, None]
            is_column = is_row[:, None] & is_key[None, :] & (column < num_columns)
            scores += tl.load(bias + head[:, None] * bias_stride + column, mask=is_column, other=0.0)
        factor = _LOG2_E
    if not IS_WHOLE:
        scores = _hide_unseen(scores, key, is_key, row_position, window, HAS_WINDOW=HAS_WINDOW)
    weights, shrink, total, largest = _soften(scores, factor, total, largest)
    mean = tl.dot(weights.to(v_tile.dtype), v_tile, mean * shrink[:, None], input_precision="ieee")
    return total, largest, mean


@triton.jit
def _num_used(context_len, partition_size, window, HAS_WINDOW: tl.constexpr):
    """Partitions that hold keys of a decoding sequence; of none where it has no context."""
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context_len - window, 0)
    return tl.cdiv(context_len, partition_size) - begin // partition_size


@triton.jit
def _find_span(
    position,
    context_len,
    window,
    partition_size,
    part,
    TILE_Q: tl.constexpr,
    IS_CUT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """The keys [begin, end) that a tile whose first query is at `position` looks at, of its partition only."""
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(position - window + 1, 0)
    end = tl.minimum(position + TILE_Q, context_len)
    if IS_CUT:
        part_begin = (begin // partition_size + part) * partition_size
        begin = tl.maximum(begin, part_begin)
        end = tl.minimum(end, part_begin + partition_size)
    return begin, end


@triton.jit
def _hide_unseen(scores, key, is_key, row_position, window, HAS_WINDOW: tl.constexpr):
    """The scores [rows, keys], minus infinity where the query is before the key, or the key before its window."""
    is_seen = is_key[None, :] & (key[None, :] <= row_position[:, None])
    if HAS_WINDOW:
        is_seen &= key[None, :] > row_position[:, None] - window
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _soften(scores, factor, total, largest):
    """A tile's exponentials, what earlier ones shrink by, their sum with it, and the largest score: softmax so far.

    Scores times `factor` are powers of two, and so is `largest`.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
    finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row may have seen no key yet
    weights = tl.exp2(scores * factor - finite[:, None])
    shrink = tl.exp2(largest - finite)
    return weights, shrink, total * shrink + tl.sum(weights, 1), new_largest


@triton.jit
def _sequence_of_tile(query_starts, tile, first_token, num_decodes, num_seqs, TILE_Q: tl.constexpr):
    """The last sequence past the decodes whose first tile is not after this one.

    Sequence s begins at tile (query_starts[s] - first_token) // TILE_Q + s - num_decodes. Many are looked at together:
    loads that wait for each other would take a program with nothing to do longer than all else.
    """
    num_begun = 0
    for start in range(num_decodes, num_seqs, _SEQS_AT_ONCE):
        seq = start + tl.arange(0, _SEQS_AT_ONCE)
        query_start = tl.load(query_starts + seq, mask=seq < num_seqs, other=0)
        first_tile = (query_start - first_token) // TILE_Q + seq - num_decodes
        num_begun += tl.sum(((first_tile <= tile) & (seq < num_seqs)).to(tl.int32), 0)
    return num_decodes + num_begun - 1


@triton.jit
def _num_used_of_chunk(query_starts, context_lens, token, num_decodes, num_seqs, partition_size):
    """Partitions that hold keys of a token of a chunk; of no other token, nor of a chunk that is not there."""
    first_token = tl.load(query_starts + num_decodes)
    num_used = 0
    if token >= first_token:
        seq = num_decodes - 1
        for start in range(num_decodes, num_seqs, _SEQS_AT_ONCE):
            other = start + tl.arange(0, _SEQS_AT_ONCE)
            query_start = tl.load(query_starts + other, mask=other < num_seqs, other=0)
            seq += tl.sum(((query_start <= token) & (other < num_seqs)).to(tl.int32), 0)
        end = tl.load(query_starts + seq + 1)
        num_seen = tl.load(context_lens + seq) - end + token + 1
        num_used = tl.where(token < end, tl.cdiv(num_seen, partition_size), 0)
    return num_used


@triton.jit(do_not_specialize=["num_parts", "num_decodes", "num_seqs"])
def merge(
    parts,  # float32 [T, N, partitions, H]
    sums,  # float32 [T, N, partitions]
    out,  # [T, N, H]
    query_starts,
    context_lens,
    num_parts,
    partition_size,
    window,
    num_decodes,
    num_seqs,
    head_dim,
    HEAD: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    IS_PREFILL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """The mean of one head's partitions, weighted by their sums; only those that hold keys are read."""
    wait_for_input(IS_EARLY)
    token = tl.program_id(0)
    row = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    if IS_PREFILL:
        num_used = _num_used_of_chunk(query_starts, context_lens, token, num_decodes, num_seqs, partition_size)
    else:
        num_used = _num_used(tl.load(context_lens + token), partition_size, window, HAS_WINDOW)
    dim = tl.arange(0, HEAD)
    is_dim = dim < head_dim
    largest = float("-inf")
    total = 0.0
    mean = tl.zeros((HEAD,), tl.float32)
    for start in range(0, num_used, TILE_PARTS):
        part = start + tl.arange(0, TILE_PARTS)
        is_part = part < num_used
        log_sum = tl.load(sums + row * num_parts + part, mask=is_part, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(log_sum, 0))
        weights = tl.exp2(log_sum - new_largest)
        shrink = tl.exp2(largest - new_largest)
        tile = tl.load(
            parts + (row * num_parts + part)[:, None] * head_dim + dim[None, :],
            mask=is_part[:, None] & is_dim[None, :],
            other=0.0,
        )
        mean = mean * shrink + tl.sum(tile * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        largest = new_largest
    size = tl.where(num_used > 0, head_dim, 0)
    tl.store(out + row * head_dim + dim, (mean / total).to(out.dtype.element_ty), mask=dim < size)
