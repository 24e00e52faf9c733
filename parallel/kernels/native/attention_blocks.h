// Blocks of rows against packed keys and values. By matrix tiles: while these multiply the queries of a block with the keys,
// vectors weigh the block before it.

#pragma once

#include "attention_tiles.h"

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

constexpr int BLOCK_ROWS = TILE;  // more would not stay in the first-level cache with their scores

// Some tokens of a partition and one key-value head, as pack_keys and pack_values have them.
struct PackedTokens {
    const Number *keys, *values;
    int num_tokens, head_dim;
};

// Some rows, and the tokens that one of them sees, in whole panels.
struct Block {
    const Number* q;  // [num_rows, head_dim], room for BLOCK_ROWS
    int num_rows;
    Span tokens;
    Running* running;  // of each row; the block's softmax is merged into it
    float* totals;     // [num_rows, head_dim]
};

#ifdef WEFT_HAS_AMX

// A tile of rows times one or two panels that lie `panel_stride` values apart: the sums [TILE][PANELS * PANEL]. Panels come from
// the second-level cache and do not enter the first-level one. Calls `meanwhile` with each step.
template <int PANELS, class Meanwhile>
void multiply_row_tile(float* sums, int64_t sums_stride, const Number* left, int64_t left_stride, const Number* panels,
                       int64_t panel_stride, int num_steps, const Meanwhile& meanwhile) {
    _tile_zero(0);
    _tile_zero(1);
    if (PANELS > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < num_steps; step++, left += STEP, panels += STEP_SIZE) {
        _tile_loadd(4, left, left_stride * int64_t(sizeof(*left)));
        _tile_stream_loadd(5, panels, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_stream_loadd(6, panels + STEP_SIZE / 2, 64);
        _tile_dpbf16ps(1, 4, 6);
        if (PANELS > 1) {
            _tile_stream_loadd(7, panels + panel_stride, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_stream_loadd(5, panels + panel_stride + STEP_SIZE / 2, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
        meanwhile();
    }
    const int64_t width = sums_stride * int64_t(sizeof(*sums));
    _tile_stored(0, sums, width);
    _tile_stored(1, sums + TILE, width);
    if (PANELS > 1) {
        _tile_stored(2, sums + 2 * TILE, width);
        _tile_stored(3, sums + 3 * TILE, width);
    }
}

#endif

// The same for any number of panels, and up to BLOCK_ROWS rows; by vectors, nothing is done meanwhile.
template <class Meanwhile>
void multiply_rows(float* sums, int64_t sums_stride, const Number* left, int64_t left_stride, int num_rows,
                   const Number* panels, int64_t panel_stride, int num_panels, int num_steps, [[maybe_unused]] const Meanwhile& meanwhile) {
#ifdef WEFT_HAS_AMX
    if (may_use_tiles()) {
        for (; num_panels > 1; num_panels -= 2, panels += 2 * panel_stride, sums += 2 * PANEL)
            multiply_row_tile<2>(sums, sums_stride, left, left_stride, panels, panel_stride, num_steps, meanwhile);
        if (num_panels) multiply_row_tile<1>(sums, sums_stride, left, left_stride, panels, panel_stride, num_steps, meanwhile);
        return;
    }
#endif
    static thread_local Buffer<float> buffer;
    float* const room = buffer.room(room_to_multiply(num_rows, num_steps * STEP));
    LeftVectors parts[BLOCK_ROWS];
    const auto part_of = [&](int row, int count) -> LeftVectors {
        return {reinterpret_cast<const char*>(left + row * left_stride), left_stride * int64_t(sizeof(*left)), 64, count};
    };
    for_each_part(num_rows, [&](int row, int count) {
        parts[row] = to_multiply(part_of(row, count), num_steps, room + room_to_multiply(row, num_steps * STEP));
    });
    for (; num_panels > 0; num_panels--, panels += panel_stride, sums += PANEL)
        for_each_part(num_rows, [&](int row, int) {
            const RightVectors right{reinterpret_cast<const char*>(panels), STEP_BYTES / 2, STEP_BYTES};
            multiply_vectors<Multiplied>(sums + row * sums_stride, sums_stride, parts[row], right, Close{}, num_steps);
        });
}

class Blocks {
  public:
    static Blocks& of_this_thread() {
        static thread_local Blocks blocks;
        return blocks;
    }

    // All blocks until the next one see these tokens; none is under way.
    void open(const PackedTokens& packed) {
        packed_ = packed;
        products_ = buffer_.room(size_t(BLOCK_ROWS) * packed.head_dim);
    }

    // search(row, softmax, scores) calls softmax.search.
    template <class Search>
    void add(const Block& block, float scale, const Search& search) {
        Work& work = works_[next_];
        next_ = 1 - next_;
        work.block = block;
        work.softmax.begin(scale);
        weighed_ = 0;
        const Span tokens = block.tokens;
        const int head_dim = packed_.head_dim;
        multiply_rows(work.scores + tokens.begin, STRIDE, block.q, head_dim, block.num_rows, packed_.keys + int64_t(tokens.begin) * head_dim,
                          int64_t(PANEL) * head_dim, (tokens.end - tokens.begin) / PANEL, head_dim / STEP, [&] { weigh_some(PACE); });
        finish();
        for (int row = 0; row < block.num_rows; row++) search(row, work.softmax, work.scores + row * STRIDE);
        work.softmax.settle(block.num_rows);
        pending_ = &work;
    }

    // The last block.
    void close() {
        weighed_ = 0;
        finish();
    }

  private:
    static constexpr int STRIDE = PARTITION + LANES, WEIGHTS_STRIDE = PER_LANE * STRIDE;  // of scores, of weights
    static constexpr int PACE = 1;                    // rows with each step of tiles

    struct Work {
        Block block;
        Softmax softmax;
        alignas(64) float scores[BLOCK_ROWS * STRIDE];  // weights take their place

        Number* weights() { return reinterpret_cast<Number*>(scores); }
    };

    void weigh_some(int most) {
        if (!pending_) return;
        const Block& block = pending_->block;
        for (const int end = std::min(block.num_rows, weighed_ + most); weighed_ < end; weighed_++)
            pending_->softmax.weigh(weighed_, pending_->weights() + weighed_ * WEIGHTS_STRIDE, pending_->scores + weighed_ * STRIDE, block.tokens);
    }

    void finish() {
        if (!pending_) return;
        weigh_some(BLOCK_ROWS);
        const Block& block = pending_->block;
        const int head_dim = packed_.head_dim, begin = block.tokens.begin;
        multiply_rows(products_, head_dim, pending_->weights() + begin, WEIGHTS_STRIDE, block.num_rows, packed_.values + int64_t(begin) * PANEL,
                          int64_t(PANEL) * packed_.num_tokens, head_dim / PANEL, (block.tokens.end - begin) / STEP, [] {});
        Running parts[BLOCK_ROWS];
        pending_->softmax.sum(parts, block.num_rows);
        merge_rows(block.running, block.totals, parts, products_, block.num_rows, head_dim);
        pending_ = nullptr;
    }

    PackedTokens packed_{};
    Work works_[2];
    Work* pending_ = nullptr;  // its scores are searched, not yet weighed
    int next_ = 0, weighed_ = 0;
    Buffer<float> buffer_;
    float* products_ = nullptr;
};

}  // namespace weft

#endif
