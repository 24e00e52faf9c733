// A partition of attention by dot products of pairs: keys and values are packed once for all rows of a head, which go through
// them in blocks. Included by attention.h; inline, so that GCC makes of it what it made of the same inside the class.

#pragma once

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

// As attend_partition, by dot products of pairs: weights are rounded to 16 bits before they meet the values.
template <class C>
inline void PagedAttention<C>::attend_packed(const Tile& tile, int partition, const Number* q, Scratch& scratch, Running* running, float* totals) {
    const int head_dim = layout_.head_dim, rows = tile.num_queries * group_;
    const Span seen = tokens_of(tile, partition);
    const int begin = first_of_run(seen.begin);
    if (rows == 1) return attend_single_rows(tile, seen, q, scratch, running, totals);
    if (!may_use_tiles() && rows <= BLOCK_ROWS) return attend_few_rows(tile, seen, q, scratch, running, totals);
    std::fill_n(running, tile.num_kv_heads * rows, Running{});
    const PackedTokens packed = pack(tile, begin, seen, scratch);
    [[maybe_unused]] const TileScope scope = TileScope::of_rows(std::min(rows, TILE));
    Blocks& blocks = Blocks::of_this_thread();
    for (int head = 0; head < tile.num_kv_heads; head++) {
        const int64_t part = int64_t(head) * packed.num_tokens * head_dim;
        blocks.open({packed.keys + part, packed.values + part, packed.num_tokens, head_dim});
        for (int row = head * rows; row < (head + 1) * rows; row += BLOCK_ROWS) {
            const int64_t place = int64_t(row) * head_dim;
            add_block(tile, row, std::min(BLOCK_ROWS, (head + 1) * rows - row), begin, {0, packed.num_tokens}, q + place, running + row, totals + place);
        }
        blocks.close();
    }
}

// Rows [row, row + num_rows) of the tile; `seen` is counted from `begin` on.
template <class C>
inline void PagedAttention<C>::add_block(const Tile& tile, int row, int num_rows, int begin, Span seen, const Number* q, Running* running, float* totals) {
    const Span tokens{begin, std::min(begin + seen.end, (begin / PARTITION + 1) * PARTITION)};  // panels may end later
    const Span first = seen_by(tile, row, tokens), last = seen_by(tile, row + num_rows - 1, tokens);
    const bool see_the_same = first.begin == last.begin && first.end == last.end;
    Blocks::of_this_thread().add({q, num_rows, seen, running, totals}, softmax_scale(params_.scale),
                                 [&](int i, Softmax& softmax, float* scores) {
                                     const Span seen_by_row = see_the_same ? first : seen_by(tile, row + i, tokens);
                                     search(softmax, i, tile, row + i, tokens.begin, seen_by_row, scores, params_.scale);
                                 });
}

// Tokens from `begin` on, of which the tile sees `seen`.
template <class C>
inline PackedTokens PagedAttention<C>::pack(const Tile& tile, int begin, Span seen, Scratch& scratch) const {
    const int num_tokens = (seen.end - begin + PANEL - 1) / PANEL * PANEL;
    const int64_t size = int64_t(tile.num_kv_heads) * num_tokens * layout_.head_dim;
    Number* const packed = scratch.packed.room(2 * size);
    int64_t offsets[PARTITION];
    find_tokens(tile, begin, seen, num_tokens, offsets);
    pack_keys(packed, tensors_.keys, tensors_.values, offsets, num_tokens, tile.num_kv_heads, layout_.head_dim);
    pack_values(packed + size, tensors_.values, offsets, num_tokens, tile.num_kv_heads, layout_.head_dim);
    return {packed, packed + size, num_tokens, layout_.head_dim};
}

}  // namespace weft

#endif
