// The experts of a layer: two products for each that a token chose. Pairs of a token and one of its experts are sorted by
// expert, so that each has a run of rows and its matrices are read once:
//
//     x [T, E] -> a row for each pair [R, E] -> silu(gate) * up [R, I] -> down [R, E] -> times weights, summed [T, E]
//
// The shares of all runs make one section of the team: small experts are not shared out one by one, among cores that wait.

#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "matrix.h"

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

// Of X experts, one after the other: packed matrices of whole panels, and biases or null. Mirrored by ctypes in library.py.
struct ExpertMatrices {
    const void *into, *into_bias;  // [X][2I, E], gates and what they gate; [X, 2I]
    const void *down, *down_bias;  // [X][E, I]; [X, E]
    int64_t num_experts;
    int32_t hidden_size, inner_size;  // E and I, multiples of PANEL
};

struct ChosenExperts {
    const int64_t* experts;  // [tokens, chosen]; others than 0 .. X - 1 add nothing
    const float* weights;
    int64_t num_tokens, num_chosen;
};

class ExpertProducts {
  public:
    static constexpr int SECTIONS = 4;

    ExpertProducts(BFloat16* out, const LeftRows& x, const ExpertMatrices& matrices, const ChosenExperts& chosen, int num_threads)
        : out_(out), x_(x), hidden_size_(matrices.hidden_size), num_chosen_(chosen.num_chosen), summands_(chosen.num_tokens * chosen.num_chosen), num_summands_(chosen.num_tokens) {
        sort(matrices, chosen);
        static thread_local Buffer<BFloat16> buffers[3];
        int64_t num_rows = 0;
        for (const Run& run : runs_) num_rows = std::max(num_rows, run.first_row + run.room());
        const int64_t inner_size = matrices.inner_size;
        rows_ = buffers[0].room(size_t(num_rows * hidden_size_));
        BFloat16* const inner = buffers[1].room(size_t(num_rows * inner_size));
        results_ = buffers[2].room(size_t(num_rows * hidden_size_));
        const auto* into_bias = static_cast<const BFloat16*>(matrices.into_bias);
        const auto* down_bias = static_cast<const BFloat16*>(matrices.down_bias);
        for (const Run& run : runs_) {
            const auto matrix = [&](const void* all, const BFloat16* bias, int64_t num_out, int64_t num_in) {
                const auto* values = static_cast<const BFloat16*>(all) + run.expert * num_out * num_in;
                return PackedMatrix{values, bias ? bias + run.expert * num_out : nullptr, num_out, int(num_in)};
            };
            const LeftRows left = gathers() ? LeftRows{rows_ + run.first_row * hidden_size_, hidden_size_, run.count, run.is_packed} : x_;
            const Target<BFloat16> to_inner{inner + run.first_row * inner_size, inner_size, run.is_packed};
            const LeftRows of_inner{to_inner.values, inner_size, run.count, run.is_packed};
            const Target<BFloat16> to_results{results_ + run.first_row * hidden_size_, hidden_size_};
            into_.add(to_inner, left, matrix(matrices.into, into_bias, 2 * inner_size, hidden_size_), num_threads);
            down_.add(to_results, of_inner, matrix(matrices.down, down_bias, hidden_size_, inner_size), num_threads);
        }
    }

    void run(Team& team) const {
        if (gathers()) gather(team);
        into_.run<true>(team);
        down_.run<false>(team);
        add_up(team);
    }

  private:
    // Rows of one expert. They are packed where products want them so.
    struct Run {
        int64_t expert, first_pair, first_row;
        int count;
        bool is_packed;

        int64_t room() const { return is_packed ? divide_up(count, ROWS) * ROWS : count; }
    };

    struct Pair {
        int64_t token, run;
    };

    struct Summand {
        int64_t row;
        float weight;
    };

    // One product for each run.
    class Products {
      public:
        void add(const Target<BFloat16>& out, const LeftRows& left, const PackedMatrix& matrix, int num_threads) {
            const Shares shares(left.count, parts_of(left.is_packed, matrix.num_in), out.num_out, num_threads);
            products_.push_back({out, left, matrix, shares, num_shares_});
            num_shares_ += shares.count;
        }

        template <bool IS_GATED>
        void run(Team& team) const {
#ifdef WEFT_HAS_AMX
            if (may_use_tiles()) return run_by<SharesByTiles<IS_GATED, Target<BFloat16>>>(team);
#endif
            run_by<SharesByVectors<IS_GATED, Target<BFloat16>>>(team);
        }

      private:
        struct Product {
            Target<BFloat16> out;
            LeftRows left;
            PackedMatrix matrix;
            Shares shares;
            int64_t first_share;
        };

        template <class MultiplyShare>
        void run_by(Team& team) const {
            std::optional<MultiplyShare> multiply;  // of the product that this thread is at
            const Product* at = nullptr;
            team.for_each(num_shares_, [&](int64_t item) {
                const Product& product = product_of(item);
                if (&product != at) multiply.emplace(product.out, product.left, product.matrix);
                at = &product;
                (*multiply)(product.shares.share(item - product.first_share), panel_after(product, item + team.size()));
            });
        }

        const Product& product_of(int64_t item) const {
            const auto is_before = [](int64_t item, const Product& product) { return item < product.first_share; };
            return *(std::upper_bound(products_.begin(), products_.end(), item, is_before) - 1);
        }

        // Where a share begins, as a panel of this product's matrix; the others' lie in one row with it.
        int64_t panel_after(const Product& product, int64_t item) const {
            const Product& next = product_of(std::min(item, num_shares_ - 1));
            return (next.matrix.values - product.matrix.values) / (PANEL * product.matrix.num_in) + next.shares.begin(item - next.first_share);
        }

        std::vector<Product> products_;
        int64_t num_shares_ = 0;
    };

    // One token is read where it is.
    bool gathers() const { return num_summands_.size() > 1; }

    // Each token's summands are in the order of their experts, so that its bits do not depend on other tokens.
    void sort(const ExpertMatrices& matrices, const ChosenExperts& chosen) {
        const int64_t num_experts = matrices.num_experts, num_pairs = chosen.num_tokens * chosen.num_chosen;
        const auto is_here = [=](int64_t expert) { return expert >= 0 && expert < num_experts; };
        std::vector<int64_t> ends(size_t(num_experts) + 1);
        for (int64_t i = 0; i < num_pairs; i++)
            if (is_here(chosen.experts[i])) ends[chosen.experts[i] + 1]++;
        std::partial_sum(ends.begin(), ends.end(), ends.begin());
        std::vector<int64_t> sorted(size_t(ends.back()));
        std::vector<int64_t> next(ends.begin(), ends.end() - 1);
        for (int64_t i = 0; i < num_pairs; i++)
            if (is_here(chosen.experts[i])) sorted[next[chosen.experts[i]]++] = i;
        pairs_.reserve(sorted.size());
        int64_t first_row = 0;
        for (int64_t expert = 0; expert < num_experts; expert++) {
            const int count = int(ends[expert + 1] - ends[expert]);
            if (!count) continue;
            const Run run{expert, ends[expert], first_row, count, needs_packing(count)};
            for (int row = 0; row < count; row++) {
                const int64_t pair = sorted[run.first_pair + row], token = pair / num_chosen_;
                pairs_.push_back({token, int64_t(runs_.size())});
                summands_[token * num_chosen_ + num_summands_[token]++] = {first_row + row, chosen.weights[pair]};
            }
            runs_.push_back(run);
            first_row += run.room();
        }
    }

    void gather(Team& team) const {
        constexpr int64_t TOGETHER = 16;
        team.for_each(divide_up(int64_t(pairs_.size()), TOGETHER), [=](int64_t item) {
            for (int64_t i = item * TOGETHER; i < std::min(int64_t(pairs_.size()), (item + 1) * TOGETHER); i++) {
                const Run& run = runs_[pairs_[i].run];
                const Target<BFloat16> to{rows_ + run.first_row * hidden_size_, hidden_size_, run.is_packed};
                const BFloat16* from = x_.x + pairs_[i].token * x_.stride;
                for (int64_t panel = 0; panel < hidden_size_ / PANEL; panel++)
                    std::copy_n(from + panel * PANEL, PANEL, to.at(i - run.first_pair, panel));
            }
        });
    }

    void add_up(Team& team) const {
        team.for_each(int64_t(num_summands_.size()), [=](int64_t token) {
            const Summand* const first = summands_.data() + token * num_chosen_;
            for (int64_t column = 0; column < hidden_size_; column += PANEL) {
                Floats sums[2] = {};
                for (const Summand* summand = first; summand < first + num_summands_[token]; summand++) {
                    const BFloat16* row = results_ + summand->row * hidden_size_ + column;
                    sums[0] += broadcast(summand->weight) * load(row);
                    sums[1] += broadcast(summand->weight) * load(row + LANES);
                }
                store_two(out_ + token * hidden_size_ + column, sums[0], sums[1], false);
            }
        });
    }

    BFloat16* const out_;
    const LeftRows x_;
    const int64_t hidden_size_, num_chosen_;
    std::vector<Summand> summands_;      // [tokens, chosen], of which each token has
    std::vector<int64_t> num_summands_;  // so many
    std::vector<Run> runs_;
    std::vector<Pair> pairs_;  // sorted by expert
    BFloat16 *rows_, *results_;
    Products into_, down_;
};

}  // namespace weft

#endif
