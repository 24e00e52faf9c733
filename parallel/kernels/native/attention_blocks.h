// Blocks of rows against packed keys and values, by matrix tiles, in a pipeline: while tiles multiply the queries of a block
// with the keys, vectors weigh the block before it; while they multiply its weights with the values, the new block is searched.

#pragma once

#include "attention_tiles.h"

#ifdef WEFT_HAS_AMX

namespace weft {

// Some tokens of a partition and one key-value head, as pack_keys and pack_values have them.
struct PackedTokens {
    const BFloat16 *keys, *values;
    int num_tokens, head_dim;
};

// Up to ROWS rows, and the tokens that one of them sees, in whole panels.
struct Block {
    const BFloat16* q;  // [num_rows, head_dim], room for ROWS
    int num_rows;
    Span tokens;
    Running* running;  // of each row; the block's softmax is merged into it
    float* totals;     // [num_rows, head_dim]
};

class Blocks {
  public:
    static Blocks& of_this_thread() {
        static thread_local Blocks blocks;
        return blocks;
    }

    // All blocks until the next one see these tokens; none is under way.
    void open(const PackedTokens& packed) {
        packed_ = packed;
        products_.room(size_t(ROWS) * packed.head_dim);
    }

    // search(row, softmax, scores) calls softmax.search.
    template <class Search>
    void add(const Block& block, float scale, const Search& search) {
        Work& work = works_[next_];
        next_ = 1 - next_;
        work.block = block;
        work.softmax = Softmax<BFloat16>(scale);
        float* const scores = work.scores;
        int searched = 0;
        const auto search_some = [&](int most) {
            for (const int end = std::min(block.num_rows, searched + most); searched < end; searched++)
                search(searched, work.softmax, scores + searched * STRIDE);
        };
        weighed_ = 0;
        const LeftTiles left{reinterpret_cast<const char*>(block.q), packed_.head_dim * int64_t(sizeof(BFloat16)), 64, block.num_rows};
        for (int token = block.tokens.begin; token < block.tokens.end; token += PANEL)
            multiply(scores + token, STRIDE, left, packed_.keys + int64_t(token) * packed_.head_dim, packed_.head_dim / STEP,
                     [&] { weigh_some(PACE); });
        finish([&] { search_some(PACE); });
        search_some(ROWS);
        work.softmax.settle(block.num_rows);
        pending_ = &work;
    }

    // The last block.
    void close() {
        weighed_ = 0;
        finish([] {});
    }

  private:
    static constexpr int STRIDE = PARTITION + LANES;          // of scores
    static constexpr int WEIGHTS_STRIDE = PARTITION + STEP;
    static constexpr int PACE = 2;                            // rows with each step of tiles

    struct Work {
        Block block;
        Softmax<BFloat16> softmax;
        alignas(64) float scores[ROWS * STRIDE];
    };

    void weigh_some(int most) {
        if (!pending_) return;
        const Block& block = pending_->block;
        for (const int end = std::min(block.num_rows, weighed_ + most); weighed_ < end; weighed_++)
            pending_->softmax.weigh(weighed_, weights_ + weighed_ * WEIGHTS_STRIDE, pending_->scores + weighed_ * STRIDE, block.tokens);
    }

    template <class Meanwhile>
    void finish(const Meanwhile& meanwhile) {
        if (!pending_) return;
        weigh_some(ROWS);
        const Block& block = pending_->block;
        const int head_dim = packed_.head_dim, num_steps = (block.tokens.end - block.tokens.begin) / STEP;
        float* const products = products_.room(0);
        const LeftTiles left{reinterpret_cast<const char*>(weights_ + block.tokens.begin), WEIGHTS_STRIDE * int64_t(sizeof(BFloat16)), 64, block.num_rows};
        const BFloat16* values = packed_.values + int64_t(block.tokens.begin) * PANEL;
        for (int dim = 0; dim < head_dim; dim += PANEL, values += int64_t(packed_.num_tokens) * PANEL)
            multiply(products + dim, head_dim, left, values, num_steps, meanwhile);
        Running parts[ROWS];
        pending_->softmax.sum(parts, block.num_rows);
        for (int row = 0; row < block.num_rows; row++)
            merge(block.running[row], block.totals + size_t(row) * head_dim, parts[row], products + size_t(row) * head_dim, head_dim);
        pending_ = nullptr;
    }

    template <class Meanwhile>
    static void multiply(float* sums, int64_t stride, const LeftTiles& left, const BFloat16* packed, int num_steps, const Meanwhile& meanwhile) {
        const char* const values = reinterpret_cast<const char*>(packed);
        if (left.num_rows > TILE)
            multiply_tiles<2, false, Products>(sums, stride, left, values, values, num_steps, meanwhile);
        else
            multiply_tiles<1, false, Products>(sums, stride, left, values, values, num_steps, meanwhile);
    }

    PackedTokens packed_{};
    Work works_[2];
    Work* pending_ = nullptr;  // its scores are searched, not yet weighed
    int next_ = 0, weighed_ = 0;
    alignas(64) BFloat16 weights_[ROWS * WEIGHTS_STRIDE];
    Buffer<float> products_;
};

}  // namespace weft

#endif
