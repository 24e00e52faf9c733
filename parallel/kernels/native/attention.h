// Paged attention (arXiv:2309.06180) over the cache as it lies: no gather, each key and value read once per tile of rows.
//
// Row: one query head of one token. A tile of rows shares a sequence and a key-value head, and goes through the context in
// partitions of fixed length and place, each with a softmax of its own that is merged into the rows' running one
// (arXiv:2112.05682). A long context's partitions may be computed by several threads: they are merged in the same order, so
// a sequence's result never depends on what else is in the step or on the number of threads.

#pragma once

#include <type_traits>
#include <vector>

#include "attention_blocks.h"
#include "attention_plan.h"
#include "attention_products_int8.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "cache_int8.h"
#include "threads.h"

namespace weft {

// Whether the CPU has dot products for rows of this size, in tiles or vectors: then all that attends them does so here, with the
// same bits. is_int8: what the cache holds.
inline bool has_dot_products(int head_dim, bool is_int8) {
#ifdef WEFT_HAS_INT8
    if (is_int8) return head_dim % int8::STEP == 0;
#endif
#ifdef WEFT_HAS_PACKED_MATRIX
    return !is_int8 && head_dim % PANEL == 0;
#else
    return false;
#endif
}

template <class C>
struct Tensors {
    Target<Number> out;  // [tokens, heads, head_dim]
    const Number* q;
    int64_t q_token_stride;  // elements; heads are dense
    const C* keys;           // [blocks, block_size, kv heads, head_dim], dense; int8_t: as cache_int8.h says
    const C* values;
};

// Buffers of one thread; they only grow.
class Scratch {
  public:
    Buffer<float> scores, part, totals;
    Buffer<Number> packed;
    std::vector<Running> running;
#ifdef WEFT_HAS_PACKED_MATRIX
    Buffer<float> multiplied;        // rows, as to_multiply has them
    std::vector<LeftVectors> parts;  // of the rows
#endif
    const Tile* next = nullptr;   // that this thread is likely to compute after this one
    const void* asked = nullptr;  // the first of the keys that were asked for last, for a tile after the one that did it

    static Scratch& of_this_thread() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

template <class C>
class PagedAttention {
  public:
    PagedAttention(const Tensors<C>& tensors, const StepLayout& layout, const LayerParams& params, AttentionPlan& plan)
        : tensors_(tensors), layout_(layout), params_(params), plan_(plan), queries_{layout, params.window},
          group_(layout.num_heads / layout.num_kv_heads), token_stride_(int64_t(layout.num_kv_heads) * layout.head_dim),
          blocks_{layout.block_size, layout.num_kv_heads, layout.head_dim},
          block_stride_(IS_INT8 ? blocks_.stride() : blocks_.num_integers()) {}

    void run(Team& team) {
        const int64_t num_bundles = int64_t(plan_.bundles.size()), count = num_bundles + int64_t(plan_.tiles.size());
        team.for_each(count, [&](int64_t item) {
#ifdef WEFT_HAS_PACKED_MATRIX
            if (item < num_bundles) return compute(plan_.bundles[item]);
#endif
            const int64_t next = team.likely_after(item);
            Scratch::of_this_thread().next = next < count ? &plan_.tiles[next - num_bundles] : nullptr;
            compute(plan_.tiles[item - num_bundles]);
        });
    }

  private:
    static constexpr bool IS_INT8 = sizeof(C) == 1;

    // Rows of a tile are ordered by key-value head, then query, then query head of the group.
    void compute(const Tile& tile) {
        Scratch& scratch = Scratch::of_this_thread();
        const int num_rows = tile.num_kv_heads * tile.num_queries * group_;
        const size_t totals_size = size_t(num_rows) * layout_.head_dim;
        static thread_local Buffer<Number> buffer;
        const Number* q = gather(tile, buffer);
        if (tile.is_shared) return compute_shared(tile, q, scratch);
        if (tile.split >= 0) {
            Splits::Open& open = plan_.splits.open[tile.split];
            const int first = queries_.first_seen(tile.sequence, tile.first_query) / PARTITION;
            const size_t place = open.place + size_t(tile.first_partition - first) * num_rows;
            attend_partition(tile, tile.first_partition, q, scratch, &plan_.splits.running[place],
                             &plan_.splits.totals[place * layout_.head_dim]);
            if (open.missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_split(tile, open);
            return;
        }
        std::vector<Running>& running = scratch.running;
        running.assign(2 * num_rows, Running{});
        float* totals = scratch.totals.room(totals_size);
        attend_partition(tile, tile.first_partition, q, scratch, running.data(), totals);
        for (int partition = tile.first_partition + 1; partition < tile.first_partition + tile.num_partitions; partition++) {
            float* part = scratch.part.room(totals_size);
            attend_partition(tile, partition, q, scratch, &running[num_rows], part);
            for (int row = 0; row < num_rows; row++)
                merge(running[row], totals + size_t(row) * layout_.head_dim, running[num_rows + row],
                      part + size_t(row) * layout_.head_dim, layout_.head_dim);
        }
        write(tile, running.data(), totals);
    }

    // attention_chunks.h
    void compute(const Bundle& bundle);
    void attend_packed(const Bundle& bundle, const Number* q, Running* running, float* totals);
    void attend_integers(const Bundle& bundle, int num_rows, const Number* q, Running* running, float* totals);
    template <class Visit>
    void for_each_piece(const Bundle& bundle, const Visit& visit) const;
    template <class Open, class Add, class Close>
    void for_each_block(const Bundle& bundle, const Open& open, const Add& add, const Close& close) const;
    bool is_same(const Tile& tile, const Tile& other, Span tokens) const;

    void compute_shared(const Tile& tile, const Number* q, Scratch& scratch) {
        const int head_dim = layout_.head_dim, rows = tile.num_queries * group_;
        std::vector<Running>& running = scratch.running;
        running.resize(rows);
        float* totals = scratch.totals.room(size_t(rows) * head_dim);
        attend_partition(tile, tile.first_partition, q, scratch, running.data(), totals);
        for (int i = 0; i < tile.num_queries; i++) {
            Splits::Open& open = plan_.splits.open[tile.split + i];
            const size_t place = open.place + size_t(tile.first_partition) * layout_.num_heads + tile.first_kv_head * group_;
            std::copy_n(&running[i * group_], group_, &plan_.splits.running[place]);
            std::copy_n(totals + size_t(i) * group_ * head_dim, size_t(group_) * head_dim, &plan_.splits.totals[place * head_dim]);
            const Tile whole{tile.sequence + i, tile.first_query + i, 1, 0, layout_.num_kv_heads, 0, 1, tile.split + i};
            if (open.missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_split(whole, open);
        }
    }

    void finish_split(const Tile& tile, Splits::Open& open) {
        const int num_rows = tile.num_kv_heads * group_, head_dim = layout_.head_dim;
        open.missing.store(open.num_tiles, std::memory_order_relaxed);  // for the next layer
        Running* running = &plan_.splits.running[open.place];
        float* totals = &plan_.splits.totals[open.place * head_dim];
        for (int partition = 1; partition < open.num_partitions; partition++)
            for (int row = 0; row < num_rows; row++) {
                const size_t other = size_t(partition) * num_rows + row;
                merge(running[row], totals + size_t(row) * head_dim, running[other], totals + other * head_dim, head_dim);
            }
        write(tile, running, totals);
    }

    // The queries of a tile side by side; those of a single token lie so already.
    const Number* gather(const Tile& tile, Buffer<Number>& buffer) const {
        const int heads = tile.num_kv_heads * group_, head_dim = layout_.head_dim;
        const Number* first = tensors_.q + tile.first_query * tensors_.q_token_stride + int64_t(tile.first_kv_head) * group_ * head_dim;
        if (tile.num_queries == 1 && group_ <= ROOM / 2) return first;  // more rows may be read than there are
        Number* const gathered = buffer.room((size_t(heads) * tile.num_queries + ROOM) * head_dim);
        copy_queries(tile, gathered);
        return gathered;
    }

    void copy_queries(const Tile& tile, Number* to) const {
        const int heads = tile.num_kv_heads * group_, head_dim = layout_.head_dim;
        const Number* first = tensors_.q + tile.first_query * tensors_.q_token_stride + int64_t(tile.first_kv_head) * group_ * head_dim;
        const size_t group_size = size_t(group_) * head_dim;
        for (int head = 0; head < heads; head += group_)
            for (int query = 0; query < tile.num_queries; query++, to += group_size)
                std::memcpy(to, first + query * tensors_.q_token_stride + head * head_dim, group_size * sizeof(Number));
    }

    void attend_partition(const Tile& tile, int partition, const Number* q, Scratch& scratch, Running* running, float* totals) {
#ifdef WEFT_HAS_INT8
        if constexpr (IS_INT8)
            if (layout_.head_dim % int8::STEP == 0) return attend_integers(tile, partition, q, running, totals);
#endif
#ifdef WEFT_HAS_PACKED_MATRIX
        if constexpr (!IS_INT8)
            if (has_dot_products(layout_.head_dim, false)) return attend_packed(tile, partition, q, scratch, running, totals);
#endif
        switch (layout_.head_dim) {
            case 64: return attend_partition<64>(tile, partition, q, scratch, running, totals);
            case 128: return attend_partition<128>(tile, partition, q, scratch, running, totals);
            default: return attend_partition<0>(tile, partition, q, scratch, running, totals);
        }
    }

    template <int HEAD_DIM>
    void attend_partition(const Tile& tile, int partition, const Number* q, Scratch& scratch, Running* running, float* totals) {
        const int head_dim = HEAD_DIM ? HEAD_DIM : layout_.head_dim;
        const int rows_a_head = tile.num_queries * group_, num_rows = tile.num_kv_heads * rows_a_head;
        const Span seen = tokens_of(tile, partition);
        const int begin = first_of_run(seen.begin);
        const int64_t scores_stride = PARTITION + LANES;
        float* scores = scratch.scores.room(size_t(num_rows) * scores_stride);

        for_each_run(tile, begin, seen, [&](int64_t offset, int64_t next, int token, int num_tokens) {
            for (int head = 0; head < tile.num_kv_heads; head++, offset += head_dim) {
                float* const of_head = scores + head * rows_a_head * scores_stride + token;
                score_keys<HEAD_DIM>(tensors_.keys + offset, token_stride_, num_tokens,
                                     next < 0 ? nullptr : tensors_.keys + next + head * head_dim,
                                     q + size_t(head) * rows_a_head * head_dim, rows_a_head, head_dim, params_.scale,
                                     of_head, scores_stride);
                if constexpr (IS_INT8)
                    scale_tokens(of_head, scores_stride, rows_a_head, scales(tensors_.keys, tile, begin + token, head), num_tokens);
            }
        });
        soften(tile, 0, num_rows, {begin, seen.end}, scores, scores_stride, 1, running);
        std::fill(totals, totals + size_t(num_rows) * head_dim, 0.0f);
        for_each_run(tile, begin, seen, [&](int64_t offset, int64_t next, int token, int num_tokens) {
            for (int head = 0; head < tile.num_kv_heads; head++, offset += head_dim) {
                if (next >= 0) prefetch(tensors_.values + next + head * head_dim, token_stride_, head_dim);
                float* const weights = scores + head * rows_a_head * scores_stride + token;
                if constexpr (IS_INT8)
                    scale_tokens(weights, scores_stride, rows_a_head, scales(tensors_.values, tile, begin + token, head), num_tokens);
                float* to = totals + size_t(head) * rows_a_head * head_dim;
                const C* values = tensors_.values + offset;
                if (head_dim % (4 * LANES) == 0)
                    add_values_to_rows<4>(values, token_stride_, num_tokens, weights, scores_stride, to, rows_a_head, head_dim);
                else
                    add_values_to_rows<1>(values, token_stride_, num_tokens, weights, scores_stride, to, rows_a_head, head_dim);
            }
        });
    }

#ifdef WEFT_HAS_PACKED_MATRIX
    // As attend_partition, by dot products of pairs: attention_packed.h.
    void attend_packed(const Tile& tile, int partition, const Number* q, Scratch& scratch, Running* running, float* totals);
    void add_block(const Tile& tile, int row, int num_rows, int begin, Span seen, const Number* q, Running* running, float* totals);
    PackedTokens pack(const Tile& tile, int begin, Span seen, Scratch& scratch) const;

    // As attend_packed, a few rows a head: attention_few.h.
    void attend_few_rows(const Tile& tile, Span seen, const Number* q, Scratch& scratch, Running* running, float* totals);

    // The same, one row a head: attention_single.h.
    void attend_single_rows(const Tile& tile, Span seen, const Number* q, Scratch& scratch, Running* running, float* totals);
    void ask_ahead(Upcoming& upcoming, const Tile& tile, Span seen, bool is_asked, Scratch& scratch) const;
    void add_tokens(Upcoming& upcoming, const Number* half, const Tile& tile, int begin, int end) const;
    const Number* gather_keys(const int64_t* offsets, int head, Scratch& scratch) const;
#endif

    // The tokens of a partition that the tile sees.
    Span tokens_of(const Tile& tile, int partition) const {
        const int last_query = tile.first_query + tile.num_queries - 1;
        return {std::max(partition * PARTITION, queries_.first_seen(tile.sequence, tile.first_query)),
                std::min((partition + 1) * PARTITION, queries_.position(tile.sequence, last_query) + 1)};
    }

    // Where scores begin whose first token that is seen is `token`: a window begins anywhere, and what a row sees has to lie in
    // the same lanes and pairs for a single token, a chunk, and the rows beside it in one.
    static int first_of_run(int token) { return token / Softmax::RUN * Softmax::RUN; }

    // Where the tile's first head of each of num_tokens tokens from `begin` on begins; those that are not seen, whose blocks may
    // be another's by now, are the first or the last one that is.
    void find_tokens(const Tile& tile, int begin, Span seen, int num_tokens, int64_t* offsets) const {
        int i = seen.begin - begin;
        for (int token = seen.begin; token < seen.end;) {
            const int64_t first = place(tile, token);
            const int block_end = std::min(seen.end, token - token % layout_.block_size + layout_.block_size);
            for (int j = 0; token < block_end; token++, j++) offsets[i++] = first + j * token_stride_;
        }
        std::fill_n(offsets, seen.begin - begin, offsets[seen.begin - begin]);
        for (; i < num_tokens; i++) offsets[i] = offsets[seen.end - begin - 1];
    }

    // As attend_partition, by integers: attention_int8.h.
    void attend_integers(const Tile& tile, int partition, const Number* q, Running* running, float* totals);

    // The softmax of rows [first, first + count) of the tile over some tokens: their scores become weights, in whole runs.
    void soften(const Tile& tile, int first, int count, Span tokens, float* scores, int64_t stride, float scale, Running* running) const {
        constexpr int RUN = Softmax::RUN, MOST = Softmax::MOST_ROWS;
        const int num_tokens = (tokens.end - tokens.begin + RUN - 1) / RUN * RUN;
        for (; count > 0; first += MOST, count -= MOST, scores += MOST * stride, running += MOST) {
            const int num_rows = std::min(count, MOST);
            Softmax softmax;
            softmax.begin(softmax_scale(scale));
            for (int i = 0; i < num_rows; i++) search(softmax, i, tile, first + i, tokens.begin, seen_by(tile, first + i, tokens), scores + i * stride, scale);
            softmax.settle(num_rows);
            for (int i = 0; i < num_rows; i++) softmax.weigh(i, scores + i * stride, scores + i * stride, {0, num_tokens});
            softmax.sum(running, num_rows);
        }
    }

    // What is left to multiply after cap_and_bias.
    float softmax_scale(float scale) const { return params_.soft_cap != 0 || params_.key_bias ? 1 : scale; }

    // What a row of the tile sees of some tokens, counted from the first of them.
    Span seen_by(const Tile& tile, int row, Span tokens) const {
        const int query = tile.first_query + row / group_ % tile.num_queries;
        return {std::max(tokens.begin, queries_.first_seen(tile.sequence, query)) - tokens.begin,
                std::min(tokens.end, queries_.position(tile.sequence, query) + 1) - tokens.begin};
    }

    // The column of key_bias that the key of position 0 has for a row of the tile.
    int first_column(const Tile& tile, int row) const {
        if (params_.own_column < 0) return 0;
        const int query = tile.first_query + row / group_ % tile.num_queries;
        const int sequence = tile.is_shared ? tile.sequence + query - tile.first_query : tile.sequence;
        return params_.own_column - queries_.position(sequence, query);
    }

    void search(Softmax& softmax, int place, const Tile& tile, int row, int begin, Span seen, float* scores, float scale) const {
        if (params_.soft_cap != 0 || params_.key_bias) {
            const int head = (tile.first_kv_head + row / (group_ * tile.num_queries)) * group_ + row % group_;
            const float* bias = nullptr;
            if (params_.key_bias) bias = params_.key_bias + head * params_.key_bias_stride + begin + first_column(tile, row);
            cap_and_bias(scores, seen, scale, params_.soft_cap, bias);
        }
        softmax.search(place, scores, seen);
    }

    // Calls visit(offset of the first token's first head, the same of the next run or -1, token - begin, tokens) for runs
    // of at most LANES seen tokens that lie in one block.
    template <class Visit>
    void for_each_run(const Tile& tile, int begin, Span seen, Visit visit) const {
        for (int token = seen.begin; token < seen.end;) {
            const int room = layout_.block_size - token % layout_.block_size;
            const int num_tokens = std::min({LANES, room, seen.end - token});
            const int next = token + num_tokens;
            visit(place(tile, token), next < seen.end ? place(tile, next) : -1, token - begin, num_tokens);
            token = next;
        }
    }

    // Where the first of the tile's heads of a token begins in keys and values.
    int64_t place(const Tile& tile, int token) const {
        return block_of(tile, token) * block_stride_ + token % layout_.block_size * token_stride_ +
               int64_t(tile.first_kv_head) * layout_.head_dim;
    }

    int64_t block_of(const Tile& tile, int token) const {
        return layout_.block_tables[tile.sequence * layout_.table_stride + token / layout_.block_size];
    }

    // Of a half in 8 bits, the scales of one of the tile's heads from a token on; those of the next head lie block_size further.
    const float* scales(const C* half, const Tile& tile, int token, int head = 0) const {
        const C* const of_block = half + block_of(tile, token) * block_stride_ + blocks_.num_integers();
        return reinterpret_cast<const float*>(of_block) + (tile.first_kv_head + head) * layout_.block_size + token % layout_.block_size;
    }

    void write(const Tile& tile, const Running* running, const float* totals) const {
        const int head_dim = layout_.head_dim;
        int row = 0;
        for (int head = tile.first_kv_head * group_; head < (tile.first_kv_head + tile.num_kv_heads) * group_; head += group_)
            for (int query = 0; query < tile.num_queries; query++)
                for (int member = 0; member < group_; member++, row++) {
                    const float factor = final_factor(running[row], head + member);
                    const int64_t token = tile.first_query + query;
                    const int64_t column = int64_t(head + member) * head_dim;
                    for (int dim = 0; dim < head_dim; dim += LANES)
                        store(tensors_.out.place(token, column + dim), load(totals + dim) * factor);
                    totals += head_dim;
                }
    }

    // One over the sum of all weights, a sink's among them: it takes its share and adds no value.
    float final_factor(const Running& running, int head) const {
        if (!params_.sinks) return 1.0f / running.sum;
        const float most = std::max(running.most, params_.sinks[head]);
        const float scale = exponential(running.most - most);
        return scale / multiply_add(running.sum, scale, exponential(params_.sinks[head] - most));
    }

    static constexpr int ROOM = 32;  // rows past the last that matrix tiles may touch
    const Tensors<C> tensors_;
    const StepLayout& layout_;
    const LayerParams& params_;
    AttentionPlan& plan_;
    const Queries queries_;
    const int group_;
    const int64_t token_stride_;
    const Int8Blocks blocks_;
    const int64_t block_stride_;
};

// Whether a step's chunks are bundled, and their keys and values packed.
inline bool packs_chunks(const StepLayout& layout) {
#ifdef WEFT_HAS_PACKED_MATRIX
    return has_dot_products(layout.head_dim, layout.is_int8);
#else
    return false;
#endif
}

// One layer, whatever its cache holds; in attention.cpp.
void attend(const Target<Number>& out, const Number* q, int64_t q_token_stride, const void* keys, const void* values,
            const StepLayout& layout, const LayerParams& params, AttentionPlan& plan, Team& team);

}  // namespace weft

#include "attention_chunks.h"
#include "attention_few.h"
#include "attention_int8.h"
#include "attention_packed.h"
#include "attention_single.h"
