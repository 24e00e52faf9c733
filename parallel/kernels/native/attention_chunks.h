// Attention of chunks: bundles of rows go through a key-value head partition by partition, each packed once for
// all rows that see the same of it. Included by attention.h.

#pragma once

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

// For each partition and each piece that sees some of it: open(piece, begin, seen tokens) where they are others than those of
// the piece before, close() before that and at the end, and add(piece, row of the bundle, row of the piece, rows, begin, span from
// there on that the rows see, in whole panels). A partition begins at the same tokens for all rows that there are, so that the bits
// of a row do not depend on its bundle.
template <class C>
template <class Open, class Add, class Close>
void PagedAttention<C>::for_each_block(const Bundle& bundle, const Open& open, const Add& add, const Close& close) const {
    int last_partition = 0, first_partition = INT32_MAX;
    for_each_piece(bundle, [&](const Tile& piece, int) {
        first_partition = std::min(first_partition, queries_.first_seen(piece.sequence, piece.first_query) / PARTITION);
        last_partition = std::max(last_partition, queries_.position(piece.sequence, piece.first_query + piece.num_queries - 1) / PARTITION);
    });
    for (int partition = first_partition; partition <= last_partition; partition++) {
        Tile opened{};
        Span open_tokens{0, 0};
        for_each_piece(bundle, [&](const Tile& piece, int first_row) {
            const int num_rows = piece.num_queries * group_;
            const Span seen = tokens_of(piece, partition);
            const int begin = first_of_run(seen.begin);
            if (seen.begin >= seen.end) return;
            if (seen.begin != open_tokens.begin || seen.end != open_tokens.end || !is_same(opened, piece, seen)) {
                close();
                open(piece, begin, seen);
                opened = piece, open_tokens = seen;
            }
            for (int row = 0; row < num_rows; row += BLOCK_ROWS) {
                const int rows = std::min(BLOCK_ROWS, num_rows - row);
                const int first_query = piece.first_query + row / group_, last_query = piece.first_query + (row + rows - 1) / group_;
                const int first = std::max(seen.begin, queries_.first_seen(piece.sequence, first_query)) - begin;
                const int end = std::min(seen.end, queries_.position(piece.sequence, last_query) + 1) - begin;
                if (first < end) add(piece, first_row + row, row, rows, begin, Span{first / PANEL * PANEL, (end + PANEL - 1) / PANEL * PANEL});
            }
        });
        close();
    }
}

// Whether these tokens of two sequences lie in the same blocks.
template <class C>
bool PagedAttention<C>::is_same(const Tile& tile, const Tile& other, Span tokens) const {
    const auto table = [&](const Tile& of, int token) { return layout_.block_tables + of.sequence * layout_.table_stride + token / layout_.block_size; };
    return std::equal(table(tile, tokens.begin), table(tile, tokens.end - 1) + 1, table(other, tokens.begin));
}

// visit(piece, its first row in the bundle)
template <class C>
template <class Visit>
void PagedAttention<C>::for_each_piece(const Bundle& bundle, const Visit& visit) const {
    for (int i = bundle.first_piece, row = 0; i < bundle.first_piece + bundle.num_pieces; i++) {
        Tile piece = plan_.pieces[i];
        piece.first_kv_head = bundle.kv_head;
        visit(piece, row);
        row += piece.num_queries * group_;
    }
}

template <class C>
void PagedAttention<C>::compute(const Bundle& bundle) {
    const int head_dim = layout_.head_dim;
    Scratch& scratch = Scratch::of_this_thread();
    static thread_local Buffer<Number> queries;
    size_t num_rows = 0;
    for_each_piece(bundle, [&](const Tile& piece, int) { num_rows += size_t(piece.num_queries) * group_; });
    Number* const q = queries.room((num_rows + ROOM) * head_dim);
    float* const totals = scratch.totals.room(num_rows * head_dim);
    scratch.running.assign(num_rows, Running{});
    Running* const running = scratch.running.data();
    for_each_piece(bundle, [&](const Tile& piece, int row) { copy_queries(piece, q + size_t(row) * head_dim); });
#ifdef WEFT_HAS_INT8
    if constexpr (IS_INT8) attend_integers(bundle, int(num_rows), q, running, totals);
#endif
    if constexpr (!IS_INT8) attend_packed(bundle, q, running, totals);
    for_each_piece(bundle, [&](const Tile& piece, int row) { write(piece, running + row, totals + size_t(row) * head_dim); });
}

template <class C>
void PagedAttention<C>::attend_packed(const Bundle& bundle, const Number* q, Running* running, float* totals) {
    Blocks& blocks = Blocks::of_this_thread();
    const TileScope scope;
    for_each_block(
        bundle, [&](const Tile& piece, int begin, Span seen) { blocks.open(pack(piece, begin, seen, Scratch::of_this_thread())); },
        [&](const Tile& piece, int row, int row_of_piece, int count, int begin, Span seen) {
            const size_t place = size_t(row) * layout_.head_dim;
            add_block(piece, row_of_piece, count, begin, seen, q + place, running + row, totals + place);
        },
        [&] { blocks.close(); });
}

}  // namespace weft

#endif
