// A partition of attention over a cache in 8 bits, by the products of attention_products_int8.h. Included by attention.h.

#pragma once

#ifdef WEFT_HAS_INT8

namespace weft {

template <class C>
void PagedAttention<C>::attend_integers(const Tile& tile, int partition, const Number* q, Running* running, float* totals) {
    const int head_dim = layout_.head_dim, rows = tile.num_queries * group_, num_rows = tile.num_kv_heads * rows;
    const Span seen = tokens_of(tile, partition);
    const int begin = first_of_run(seen.begin), end = seen.end;
    int8::AttentionScratch& scratch = int8::AttentionScratch::of_this_thread();
    const size_t rows_size = size_t(num_rows + ROOM) * head_dim;
    int8_t* const parts = scratch.queries.room(2 * rows_size);
    const int8::Queries queries{parts, parts + rows_size, scratch.query_scales.room(num_rows), scratch.offsets.room(num_rows)};
    for (int row = 0; row < num_rows; row++) int8::quantize_query(queries, row, q + size_t(row) * head_dim, head_dim);
    const int weights_stride = PARTITION;
    uint8_t* const high = scratch.weights.room(2 * size_t(num_rows + ROOM) * weights_stride);
    uint8_t* const low = high + size_t(num_rows + ROOM) * weights_stride;
    const int num_tokens = (end - begin + int8::TOKENS - 1) / int8::TOKENS * int8::TOKENS;
    const int stride = PARTITION + LANES;  // of scores and of scales
    float* const scores = Scratch::of_this_thread().scores.room(size_t(num_rows) * stride);
    float* const key_scales = scratch.key_scales.room(size_t(tile.num_kv_heads) * stride);
    float* const value_scales = scratch.value_scales.room(size_t(tile.num_kv_heads) * stride);
    float* const weight_scales = scratch.weight_scales.room(num_rows);
    int32_t* const sums = scratch.totals.room(rows_size);

    const auto take_scales = [&](int token, int count) {
        const float *of_keys = scales(tensors_.keys, tile, begin + token), *of_values = scales(tensors_.values, tile, begin + token);
        for (int head = 0; head < tile.num_kv_heads; head++, of_keys += layout_.block_size, of_values += layout_.block_size) {
            store(key_scales + head * stride + token, load_first(of_keys, count));
            store(value_scales + head * stride + token, load_first(of_values, count));
        }
    };
    const auto soften_heads = [&](int first, int count) {
        soften(tile, first * rows, count * rows, {begin, end}, scores + size_t(first) * rows * stride, stride, 1, running + first * rows);
        // before the first token and behind the last one is what was there before, which may be the NaN of another request
        for (int head = first; head < first + count; head++) {
            std::fill_n(value_scales + head * stride, seen.begin - begin, 0.0f);
            std::fill_n(value_scales + head * stride + end - begin, LANES, 0.0f);
        }
        for (int row = first * rows; row < (first + count) * rows; row++) {
            float* const of_row = scores + size_t(row) * stride;
            uint8_t *const to_high = high + size_t(row) * weights_stride, *const to_low = low + size_t(row) * weights_stride;
            weight_scales[row] = int8::quantize_weights(to_high, to_low, of_row, value_scales + row / rows * stride, end - begin);
            const int written = (end - begin + LANES - 1) / LANES * LANES;
            std::fill(to_high + written, to_high + num_tokens, 0);
            std::fill(to_low + written, to_low + num_tokens, 0);
        }
    };
    if (rows >= LEAST_TILE_ROWS) {
        const size_t head_size = size_t(num_tokens) * head_dim;
        int8_t* const packed_keys = scratch.packed.room(2 * tile.num_kv_heads * head_size);
        int8_t* const packed_values = packed_keys + tile.num_kv_heads * head_size;
        int64_t offsets[PARTITION];
        find_tokens(tile, begin, seen, num_tokens, offsets);
        for_each_run(tile, begin, seen, [&](int64_t, int64_t, int token, int count) { take_scales(token, count); });
        int8::pack_keys(packed_keys, tensors_.keys, offsets, num_tokens, tile.num_kv_heads, head_dim);
        int8::pack_values(packed_values, tensors_.values, offsets, num_tokens, tile.num_kv_heads, head_dim);
        const TileScope scope(std::min(rows, TILE), std::min(rows, TILE));
        for (int head = 0; head < tile.num_kv_heads; head++) {
            const size_t row = size_t(head) * rows;
            int8::score_packed_keys(packed_keys + head * head_size, num_tokens, key_scales + head * stride, queries, int(row),
                                    rows, head_dim, params_.scale, scores + row * stride, stride);
            soften_heads(head, 1);
            int8::sum_packed_values(packed_values + head * head_size, num_tokens, high + row * weights_stride,
                                    low + row * weights_stride, weights_stride, sums + row * head_dim, rows, head_dim);
        }
    } else {
        const auto score = [&](auto known_head_dim) {
            for_each_run(tile, begin, seen, [&](int64_t offset, int64_t next, int token, int count) {
                take_scales(token, count);
                for (int head = 0; head < tile.num_kv_heads; head++, offset += head_dim) {
                    if (next >= 0) prefetch(tensors_.keys + next + head * head_dim, token_stride_, head_dim);
                    int8::score_keys<known_head_dim>(tensors_.keys + offset, token_stride_, count,
                                                     load(key_scales + head * stride + token), queries,
                                                     head * rows, rows, head_dim, params_.scale,
                                                     scores + size_t(head) * rows * stride + token, stride);
                }
            });
        };
        const auto add = [&](auto known_head_dim) {
            for_each_run(tile, begin, seen, [&](int64_t offset, int64_t next, int token, int count) {
                for (int head = 0; head < tile.num_kv_heads; head++, offset += head_dim) {
                    if (next >= 0) prefetch(tensors_.values + next + head * head_dim, token_stride_, head_dim);
                    const size_t row = size_t(head) * rows, place = row * weights_stride + token;
                    int8::add_values<known_head_dim>(tensors_.values + offset, token_stride_, count, high + place, low + place,
                                                     weights_stride, sums + row * head_dim, rows, head_dim);
                }
            });
        };
        head_dim == 64 ? score(std::integral_constant<int, 64>()) : score(std::integral_constant<int, 0>());
        soften_heads(0, tile.num_kv_heads);
        std::fill_n(sums, size_t(num_rows) * head_dim, 0);
        head_dim == 64 ? add(std::integral_constant<int, 64>()) : add(std::integral_constant<int, 0>());
    }
    for (int row = 0; row < num_rows; row++)
        int8::write_totals(totals + size_t(row) * head_dim, sums + size_t(row) * head_dim, weight_scales[row], head_dim);
}

#ifdef WEFT_HAS_PACKED_MATRIX

// Of a bundle, as attention_chunks.h has them.
template <class C>
void PagedAttention<C>::attend_integers(const Bundle& bundle, int num_rows, const Number* q, Running* running, float* totals) {
    const int head_dim = layout_.head_dim;
    int8::AttentionScratch& scratch = int8::AttentionScratch::of_this_thread();
    const size_t rows_size = size_t(num_rows + ROOM) * head_dim;
    int8_t* const parts = scratch.queries.room(2 * rows_size);
    const int8::Queries queries{parts, parts + rows_size, scratch.query_scales.room(num_rows), scratch.offsets.room(num_rows)};
    for (int row = 0; row < num_rows; row++) int8::quantize_query(queries, row, q + size_t(row) * head_dim, head_dim);
    constexpr int ROOM_TOKENS = PARTITION + int8::TOKENS;
    float* const scores = Scratch::of_this_thread().scores.room(ROWS * ROOM_TOKENS);
    uint8_t* const high = scratch.weights.room(2 * ROWS * ROOM_TOKENS);
    uint8_t* const low = high + ROWS * ROOM_TOKENS;
    float* const key_scales = scratch.key_scales.room(ROOM_TOKENS);
    float* const value_scales = scratch.value_scales.room(ROOM_TOKENS);
    int32_t* const sums = scratch.totals.room(ROWS * head_dim);
    float* const products = Scratch::of_this_thread().part.room(head_dim);
    int8_t *keys = nullptr, *values = nullptr;
    const auto open = [&](const Tile& piece, int begin, Span seen) {
        const int num_tokens = (seen.end - begin + int8::TOKENS - 1) / int8::TOKENS * int8::TOKENS;
        keys = scratch.packed.room(2 * size_t(num_tokens) * head_dim), values = keys + size_t(num_tokens) * head_dim;
        int64_t offsets[PARTITION];
        find_tokens(piece, begin, seen, num_tokens, offsets);
        std::fill_n(key_scales, seen.begin - begin, 0.0f);
        std::fill_n(value_scales, num_tokens, 0.0f);
        for_each_run(piece, begin, seen, [&](int64_t, int64_t, int token, int count) {
            std::copy_n(scales(tensors_.keys, piece, begin + token), count, key_scales + token);
            std::copy_n(scales(tensors_.values, piece, begin + token), count, value_scales + token);
        });
        int8::pack_keys(keys, tensors_.keys, offsets, num_tokens, 1, head_dim);
        int8::pack_values(values, tensors_.values, offsets, num_tokens, 1, head_dim);
    };
    const auto add = [&](const Tile& piece, int first_row, int row_of_piece, int count, int begin, Span seen) {
        int8::score_packed_keys(keys + seen.begin * head_dim, seen.end - seen.begin, key_scales + seen.begin, queries, first_row, count,
                                head_dim, params_.scale, scores + seen.begin, ROOM_TOKENS);
        Running part[ROWS];
        soften(piece, row_of_piece, count, {begin, begin + seen.end}, scores, ROOM_TOKENS, 1, part);
        const Span steps{seen.begin / int8::TOKENS * int8::TOKENS, (seen.end + int8::TOKENS - 1) / int8::TOKENS * int8::TOKENS};
        float weight_scales[ROWS];
        for (int row = 0; row < count; row++) {
            float* const of_row = scores + row * ROOM_TOKENS;
            std::fill(of_row + seen.end, of_row + steps.end, 0.0f);
            const int64_t place = row * ROOM_TOKENS + steps.begin;
            weight_scales[row] = int8::quantize_weights(high + place, low + place, of_row + steps.begin, value_scales + steps.begin, steps.end - steps.begin);
        }
        int8::sum_packed_values(values + steps.begin * head_dim, steps.end - steps.begin, high + steps.begin, low + steps.begin, ROOM_TOKENS,
                                sums, count, head_dim);
        for (int row = 0; row < count; row++) {
            int8::write_totals(products, sums + row * head_dim, weight_scales[row], head_dim);
            merge(running[first_row + row], totals + size_t(first_row + row) * head_dim, part[row], products, head_dim);
        }
    };
    const TileScope scope;
    for_each_block(bundle, open, add, [] {});
}

#endif

}  // namespace weft

#endif
