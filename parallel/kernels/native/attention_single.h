// A partition of attention with one row a head, by matrix tiles and vectors or by vectors alone: neither keys nor values are packed, and they are
// read as fast as memory gives them. Included by attention.h.

#pragma once

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

constexpr int TOGETHER = 4;  // tokens whose values are added, of all heads, before those after them: about as they lie in memory

template <class C>
void PagedAttention<C>::attend_single_rows(const Tile& tile, Span seen, const Number* q, Scratch& scratch, Running* running, float* totals) {
    const int head_dim = layout_.head_dim, heads = tile.num_kv_heads;
    const int begin = first_of_run(seen.begin), count = seen.end - begin, num_unseen = seen.begin - begin;
    const int num_tokens = (count + TILE - 1) / TILE * TILE;
    int64_t offsets[PARTITION];
    find_tokens(tile, begin, seen, num_tokens, offsets);
    float* scores = scratch.scores.room(size_t(heads) * PARTITION);
    Upcoming upcoming;
    const bool is_asked = scratch.asked == tensors_.keys + offsets[0];
    ask_ahead(upcoming, tile, seen, is_asked, scratch);
    [[maybe_unused]] const TileScope scope = TileScope::of_columns(1);
    for (int token = num_unseen / TILE * TILE; token < num_tokens; token += TILE) {
        const bool is_together = token >= num_unseen && (begin + token) % layout_.block_size + TILE <= layout_.block_size;
        const int pace = !is_asked && token < AHEAD ? 2 : 1;
        for (int head = 0; head < heads; head++) {
            const Number* keys = is_together ? tensors_.keys + offsets[token] + head * head_dim : gather_keys(offsets + token, head, scratch);
            const int64_t stride = is_together ? token_stride_ : head_dim;
            score_row(scores + head * PARTITION + token, keys, stride, q + head * head_dim, head_dim, upcoming, pace);
        }
    }
    soften(tile, 0, heads, {begin, seen.end}, scores, PARTITION, params_.scale, running);
    for (int head = 0; head < heads; head++) round_weights(scores + head * PARTITION, (count + PANEL - 1) / PANEL * PANEL);
    std::fill(totals, totals + size_t(heads) * head_dim, 0.0f);
    const int together = may_use_tiles() ? PANEL : TOGETHER;
    for (int token = num_unseen / together * together; token < count; token += together)
        for (int head = 0; head < heads; head++) {
            const Number* values = tensors_.values + head * head_dim;
            float* to = totals + head * head_dim;
            const Weight* weights = reinterpret_cast<const Weight*>(scores + head * PARTITION) + token;
            const auto add = [&](auto lines, int dim) {
                const int num_tokens = std::min(together, count - token);
#ifdef WEFT_HAS_AMX
                if (may_use_tiles())
                    return add_step_of_values<lines>(to + dim, values + dim, offsets + token, scores + head * PARTITION + token, num_tokens, upcoming);
#endif
                add_some_values<lines>(to + dim, values + dim, offsets + token, weights, num_tokens, upcoming);
            };
            for (int dim = 0; dim + 2 * PANEL <= head_dim; dim += 2 * PANEL) add(std::integral_constant<int, 2>(), dim);
            if (head_dim % (2 * PANEL)) add(std::integral_constant<int, 1>(), head_dim - PANEL);
        }
    for (int head = 0; head < heads; head++) interleave(totals + head * head_dim, head_dim);
}

// What is read in the order in which it is: keys, values, and the first keys that this thread is likely to read after them.
// is_asked: the first keys here were asked for so.
template <class C>
void PagedAttention<C>::ask_ahead(Upcoming& upcoming, const Tile& tile, Span seen, bool is_asked, Scratch& scratch) const {
    add_tokens(upcoming, tensors_.keys, tile, is_asked ? std::min(seen.begin + AHEAD, seen.end) : seen.begin, seen.end);
    add_tokens(upcoming, tensors_.values, tile, seen.begin, seen.end);
    const int following = seen.begin / PARTITION + 1;
    const bool is_last = following == tile.first_partition + tile.num_partitions;
    const Tile* const next = is_last ? scratch.next : &tile;
    scratch.asked = nullptr;
    if (!next) return;
    const Span first = tokens_of(*next, is_last ? next->first_partition : following);
    add_tokens(upcoming, tensors_.keys, *next, first.begin, std::min(first.begin + AHEAD, first.end));
    scratch.asked = tensors_.keys + place(*next, first.begin);
}

// Tokens [begin, end) of a half, as far as the tile reads them.
template <class C>
void PagedAttention<C>::add_tokens(Upcoming& upcoming, const Number* half, const Tile& tile, int begin, int end) const {
    const int64_t size = int64_t(tile.num_kv_heads) * layout_.head_dim;
    for_each_run(tile, begin, {begin, end}, [&](int64_t offset, int64_t, int, int num_tokens) {
        if (size == token_stride_) return upcoming.add(half + offset, num_tokens * size);
        for (int i = 0; i < num_tokens; i++) upcoming.add(half + offset + i * token_stride_, size);
    });
}

// The keys of 16 tokens that lie in more than one block.
template <class C>
const Number* PagedAttention<C>::gather_keys(const int64_t* offsets, int head, Scratch& scratch) const {
    const int head_dim = layout_.head_dim;
    Number* const gathered = scratch.packed.room(size_t(TILE) * head_dim);
    for (int i = 0; i < TILE; i++) std::memcpy(gathered + i * head_dim, tensors_.keys + offsets[i] + head * head_dim, head_dim * sizeof(Number));
    return gathered;
}

}  // namespace weft

#endif
