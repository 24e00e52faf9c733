// The experts of a layer: two products for each that a token chose. Pairs of a token and one of its experts are sorted by
// expert, so that each has a run of rows and its matrices are read once:
//
//     x [T, E] -> a row for each pair [R, E] -> gates times what they gate [R, I] -> down [R, E] -> times weights, summed [T, E]
//
// The shares of all runs make one section of the team: small experts are not shared out one by one, among cores that wait. In 8 bits
// the left sides of both products are quantized before them, row by row.

#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <vector>

#include "matrix_int8.h"
#include "products.h"

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

// Of X experts, one after the other: packed matrices of whole panels, and biases or null; in 8 bits all of them as one matrix. Mirrored
// by ctypes in structures.py.
struct ExpertMatrices {
    const void *into, *into_bias;  // [X][2I, E], gates and what they gate; [X, 2I]
    const void *down, *down_bias;  // [X][E, I]; [X, E]
    int64_t num_experts;
    int32_t hidden_size, inner_size;  // E and I, multiples of PANEL
    GateClamp clamp;
    int32_t is_int8;
};

// Of an expert from its logit: what it is chosen by, and its weight.
enum class ExpertScore : int32_t { SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID };

// How a router chooses among as many experts from a logit of each.
struct ExpertChoice {
    int32_t num_chosen;
    ExpertScore score;
    int32_t is_normalized;  // the weights of a token are divided by their sum
    float multiplier;       // of weights
    int32_t num_groups, num_chosen_groups;  // of neighbours: only those in the best groups are chosen; by sigmoids alone
    const float* bias;                      // of each expert, added to its sigmoid to choose; or null
    int32_t are_logits_float;               // not Numbers
};

struct ExpertLayer {
    ExpertMatrices matrices;
    ExpertChoice choice;
};

// Leaves those in the groups whose two best have the largest sums, of equal ones the first. arXiv:2412.19437, section 2.1.2.
inline void keep_best_groups(float* ranks, int64_t num_experts, const ExpertChoice& choice) {
    static thread_local Buffer<float> buffer;
    float* const sums = buffer.room(size_t(choice.num_groups));
    const int64_t size = num_experts / choice.num_groups;
    for (int group = 0; group < choice.num_groups; group++) {
        float best = -INFINITY, second = -INFINITY;
        for (int64_t i = group * size; i < (group + 1) * size; i++) {
            second = std::max(second, std::min(best, ranks[i]));
            best = std::max(best, ranks[i]);
        }
        sums[group] = best + second;
    }
    for (int left_out = choice.num_chosen_groups; left_out < choice.num_groups; left_out++) {
        const int64_t worst = std::min_element(std::reverse_iterator(sums + choice.num_groups), std::reverse_iterator(sums)).base() - 1 - sums;
        sums[worst] = INFINITY;
        std::fill_n(ranks + worst * size, size, -INFINITY);
    }
}

// The experts of a token, of equal ones the first, and their weights. Where a logit is NaN, all weights are.
template <class Logit>
void choose_experts(int64_t* experts, float* weights, const Logit* logits, int64_t num_experts, const ExpertChoice& choice) {
    static thread_local Buffer<float> buffer;
    float* const scores = buffer.room(size_t(2 * num_experts));
    float* const ranks = scores + num_experts;  // minus infinity: chosen already, or cannot be
    float of_all = 0, of_chosen = 0;
    if (choice.score == ExpertScore::SIGMOID) {
        for (int64_t i = 0; i < num_experts; i++) {
            of_all += scores[i] = 1.0f / (1.0f + std::exp(-to_float(logits[i])));
            ranks[i] = choice.bias ? scores[i] + choice.bias[i] : scores[i];
        }
        keep_best_groups(ranks, num_experts, choice);
    } else {
        float most = -INFINITY;
        for (int64_t i = 0; i < num_experts; i++) most = std::max(most, ranks[i] = to_float(logits[i]));
        for (int64_t i = 0; i < num_experts; i++) of_all += scores[i] = std::exp(ranks[i] - most);
    }
    for (int c = 0; c < choice.num_chosen; c++) {
        const int64_t best = std::max_element(ranks, ranks + num_experts) - ranks;
        experts[c] = best;
        of_chosen += weights[c] = scores[best] + (of_all - of_all);
        ranks[best] = -INFINITY;
    }
    constexpr float LEAST_SUM = 1e-20f;  // sigmoids may all be 0
    float divisor = of_all;
    if (choice.score == ExpertScore::SIGMOID) divisor = choice.is_normalized ? of_chosen + LEAST_SUM : 1.0f;
    else if (choice.is_normalized || choice.score == ExpertScore::SOFTMAX_OF_CHOSEN) divisor = of_chosen;
    for (int c = 0; c < choice.num_chosen; c++) weights[c] *= choice.multiplier / divisor;
}

// What experts give for some tokens.
class ExpertProducts {
  public:
    static constexpr int SECTIONS = 7;

    // Of all tokens [tokens, chosen]. Experts other than 0 .. X - 1 add nothing.
    void set_chosen(const int64_t* experts, const float* weights) {
        sort(experts, weights);
        for (const Run& run : runs_) add_products(run);
    }

    // Logits: [tokens, X], Numbers or floats as the choice says.
    void choose(const void* logits, int64_t row_bytes, const ExpertChoice& choice, Team& team) {
        const auto choose = [=](int64_t token, const auto* row) {
            choose_experts(&experts_[token * num_chosen_], &weights_[token * num_chosen_], row, matrices_.num_experts, choice);
        };
        team.for_each(divide_up(x_.count, TOGETHER), [=](int64_t item) {
            for (int64_t token = item * TOGETHER; token < std::min<int64_t>(x_.count, (item + 1) * TOGETHER); token++) {
                const void* const row = static_cast<const char*>(logits) + token * row_bytes;
                if (choice.are_logits_float) choose(token, static_cast<const float*>(row));
                else choose(token, static_cast<const Number*>(row));
            }
        });
        team.for_each(1, [=](int64_t) { set_chosen(experts_.data(), weights_.data()); });
    }

    virtual void run(Team& team) const = 0;
    virtual ~ExpertProducts() = default;

  protected:
    // Rows: [most_rows, E], later of results: a row's result takes its place.
    ExpertProducts(Number* out, const LeftRows& x, const ExpertMatrices& matrices, int64_t num_chosen, Number* rows, int num_threads)
        : x_(x), matrices_(matrices), num_threads_(num_threads), rows_(rows), out_(out), num_chosen_(num_chosen),
          experts_(size_t(x.count * num_chosen)), weights_(experts_.size()), summands_(experts_.size()), num_summands_(size_t(x.count)) {}

    // Rows of one expert. They may lie in blocks.
    struct Run {
        int64_t expert, first_pair, first_row;
        int count;
        bool has_blocks;

        int64_t room() const { return has_blocks ? divide_up(count, ROWS) * ROWS : count; }
    };

    struct Pair {
        int64_t token, run;
    };

    struct Summand {
        int64_t row;
        float weight;
    };

    virtual bool has_blocks(int count) const = 0;
    virtual void add_products(const Run& run) = 0;

    // Rows of all experts together, for any choice.
    static int64_t most_rows(int64_t num_tokens, int64_t num_chosen, const ExpertMatrices& matrices) {
        const int64_t num_pairs = num_tokens * num_chosen;
        return num_pairs + (ROWS - 1) * std::min(matrices.num_experts, num_pairs);
    }

    // Calls work(run, row of the run, token) for each pair.
    template <class Work>
    void for_each_pair(Team& team, const Work& work) const {
        const int64_t num_pairs = int64_t(pairs_.size());
        team.for_each(divide_up(num_pairs, TOGETHER), [&](int64_t item) {
            for (int64_t i = item * TOGETHER; i < std::min(num_pairs, (item + 1) * TOGETHER); i++) {
                const Run& run = runs_[pairs_[i].run];
                work(run, int(i - run.first_pair), pairs_[i].token);
            }
        });
    }

    // Each token's summands are in the order of their experts, so that its bits do not depend on other tokens.
    void sort(const int64_t* experts, const float* weights) {
        const int64_t num_experts = matrices_.num_experts, num_pairs = x_.count * num_chosen_;
        const auto is_here = [=](int64_t pair) { return experts[pair] >= 0 && experts[pair] < num_experts; };
        std::vector<int64_t> ends(size_t(num_experts) + 1);
        for (int64_t pair = 0; pair < num_pairs; pair++)
            if (is_here(pair)) ends[experts[pair] + 1]++;
        std::partial_sum(ends.begin(), ends.end(), ends.begin());
        std::vector<int64_t> sorted(size_t(ends.back())), next(ends.begin(), ends.end() - 1);
        for (int64_t pair = 0; pair < num_pairs; pair++)
            if (is_here(pair)) sorted[next[experts[pair]]++] = pair;
        pairs_.reserve(sorted.size());
        int64_t first_row = 0;
        for (int64_t expert = 0; expert < num_experts; expert++) {
            const int count = int(ends[expert + 1] - ends[expert]);
            if (!count) continue;
            const Run run{expert, ends[expert], first_row, count, has_blocks(count)};
            for (int row = 0; row < count; row++) {
                const int64_t pair = sorted[run.first_pair + row], token = pair / num_chosen_;
                pairs_.push_back({token, int64_t(runs_.size())});
                summands_[token * num_chosen_ + num_summands_[token]++] = {first_row + row, weights[pair]};
            }
            runs_.push_back(run);
            first_row += run.room();
        }
    }

    void add_up(Team& team) const {
        const int64_t hidden_size = matrices_.hidden_size;
        team.for_each(x_.count, [=](int64_t token) {
            const Summand* const first = summands_.data() + token * num_chosen_;
            for (int64_t column = 0; column < hidden_size; column += PANEL) {
                Floats sums[2] = {};
                for (const Summand* summand = first; summand < first + num_summands_[token]; summand++) {
                    const Number* row = rows_ + summand->row * hidden_size + column;
                    sums[0] = multiply_add(load(row), summand->weight, sums[0]);
                    sums[1] = multiply_add(load(row + LANES), summand->weight, sums[1]);
                }
                store_two(out_ + token * hidden_size + column, sums[0], sums[1], false);
            }
        });
    }

    const LeftRows x_;
    const ExpertMatrices matrices_;
    const int num_threads_;
    Number* const rows_;

  private:
    static constexpr int64_t TOGETHER = 16;  // tokens, or rows
    Number* const out_;
    const int64_t num_chosen_;
    std::vector<int64_t> experts_;       // [tokens, chosen], where they are chosen here
    std::vector<float> weights_;
    std::vector<Summand> summands_;      // [tokens, chosen], of which each token has
    std::vector<int64_t> num_summands_;  // so many
    std::vector<Run> runs_;
    std::vector<Pair> pairs_;  // sorted by expert
};

class ExpertsInNumbers final : public ExpertProducts {
  public:
    static int64_t scratch_size(int64_t num_tokens, int64_t num_chosen, const ExpertMatrices& matrices) {
        return most_rows(num_tokens, num_chosen, matrices) * (matrices.hidden_size + matrices.inner_size) * int64_t(sizeof(Number));
    }

    ExpertsInNumbers(Number* out, const LeftRows& x, const ExpertMatrices& matrices, int64_t num_chosen, void* scratch, int num_threads)
        : ExpertProducts(out, x, matrices, num_chosen, static_cast<Number*>(scratch), num_threads),
          inner_(rows_ + most_rows(x.count, num_chosen, matrices) * matrices.hidden_size) {}

    void run(Team& team) const override {
        if (gathers()) gather(team);
        into_.run<true>(team);
        down_.run<false>(team);
        add_up(team);
    }

  private:
    bool has_blocks(int count) const override { return needs_packing(count); }

    // One token is read where it is.
    bool gathers() const { return x_.count > 1; }

    void add_products(const Run& run) override {
        const int64_t hidden_size = matrices_.hidden_size, inner_size = matrices_.inner_size;
        const auto matrix = [&](const void* values, const void* bias, int64_t num_out, int64_t num_in, GateClamp clamp = {}) {
            const auto* of_all = static_cast<const Number*>(bias);
            return PackedMatrix{static_cast<const Number*>(values) + run.expert * num_out * num_in,
                                of_all ? of_all + run.expert * num_out : nullptr, num_out, int(num_in), clamp};
        };
        Number* const rows = rows_ + run.first_row * hidden_size;
        const Target<Number> inner{inner_ + run.first_row * inner_size, inner_size, run.has_blocks};
        const LeftRows left = gathers() ? LeftRows{rows, hidden_size, run.count, run.has_blocks} : x_;
        into_.add(inner, left, matrix(matrices_.into, matrices_.into_bias, 2 * inner_size, hidden_size, matrices_.clamp), num_threads_);
        const LeftRows of_inner{inner.values, inner_size, run.count, run.has_blocks};
        down_.add({rows, hidden_size}, of_inner, matrix(matrices_.down, matrices_.down_bias, hidden_size, inner_size), num_threads_);
    }

    void gather(Team& team) const {
        const int64_t hidden_size = matrices_.hidden_size;
        for_each_pair(team, [=](const Run& run, int row, int64_t token) {
            const Target<Number> to{rows_ + run.first_row * hidden_size, hidden_size, run.has_blocks};
            const Number* from = x_.x + token * x_.stride;
            for (int64_t panel = 0; panel < hidden_size / PANEL; panel++) std::copy_n(from + panel * PANEL, PANEL, to.at(row, panel));
        });
    }

    Number* const inner_;
    ProductsOfRuns<InNumbers> into_, down_;
};

#ifdef WEFT_HAS_INT8

struct In8Bits {
    using Left = int8::Left;
    using Matrix = int8::Matrix<Number>;

    static int num_rows(const Left& left) { return left.num_rows; }
    static Parts parts_of(const Left& left, const Matrix&) { return int8::parts_of(left); }
    static int64_t panel_size(const Matrix& matrix) { return int8::num_steps(matrix.num_in) * int64_t(int8::STEP_SIZE); }

    template <bool IS_GATED, class Work>
    static void choose_shares(const Work& work) {
#ifdef WEFT_HAS_AMX_INT8
        if (int8::use_tiles()) return work(TypeOf<int8::SharesByTiles<IS_GATED, Target<Number>>>{});
#endif
        work(TypeOf<int8::SharesByVectors<IS_GATED, Target<Number>>>{});
    }
};

class ExpertsIn8Bits final : public ExpertProducts {
  public:
    static int64_t scratch_size(int64_t num_tokens, int64_t num_chosen, const ExpertMatrices& matrices) {
        const int64_t hidden_size = matrices.hidden_size, inner_size = matrices.inner_size;
        const int64_t of_row = (hidden_size + inner_size) * int64_t(sizeof(Number)) + row_size(hidden_size) + row_size(inner_size) + 2 * int64_t(sizeof(float));
        return most_rows(num_tokens, num_chosen, matrices) * of_row;
    }

    ExpertsIn8Bits(Number* out, const LeftRows& x, const ExpertMatrices& matrices, int64_t num_chosen, void* scratch, int num_threads)
        : ExpertProducts(out, x, matrices, num_chosen, static_cast<Number*>(scratch), num_threads),
          all_into_(matrices.into, matrices.into_bias, 2 * matrices.inner_size * matrices.num_experts, matrices.hidden_size),
          all_down_(matrices.down, matrices.down_bias, matrices.hidden_size * matrices.num_experts, matrices.inner_size) {
        const int64_t most = most_rows(x.count, num_chosen, matrices);
        inner_ = rows_ + most * matrices.hidden_size;
        quantized_x_ = reinterpret_cast<int8_t*>(inner_ + most * matrices.inner_size);
        quantized_inner_ = quantized_x_ + most * row_size(matrices.hidden_size);
        scales_ = reinterpret_cast<float*>(quantized_inner_ + most * row_size(matrices.inner_size));
        inner_scales_ = scales_ + most;
        all_into_.clamp = matrices.clamp;
    }

    void run(Team& team) const override {
        for_each_pair(team, [=](const Run& run, int row, int64_t token) { quantize(of_x(run), row, x_.x + token * x_.stride, matrices_.hidden_size); });
        into_.run<true>(team);
        const int64_t inner_size = matrices_.inner_size;
        for_each_pair(team, [=](const Run& run, int row, int64_t) {
            quantize(of_inner(run), row, inner_ + (run.first_row + row) * inner_size, int(inner_size));
        });
        down_.run<false>(team);
        add_up(team);
    }

  private:
    // Bytes of a row that is quantized.
    static int64_t row_size(int64_t num_in) { return int64_t(int8::num_steps(int(num_in))) * int8::Left::ROW_BYTES; }

    static void quantize(const int8::Left& left, int row, const Number* from, int num_in) {
        left.scales[row] = int8::quantize_row(left.row(row), left.step_stride(), from, num_in, int8::use_tiles() ? 0 : 0x80);
        left.finish_row(row);
    }

    bool has_blocks(int count) const override { return count > int8::Left::ROWS; }

    int8::Left of_x(const Run& run) const {
        const int num_in = matrices_.hidden_size;
        return {quantized_x_ + run.first_row * row_size(num_in), scales_ + run.first_row, run.count, num_in};
    }
    int8::Left of_inner(const Run& run) const {
        const int num_in = matrices_.inner_size;
        return {quantized_inner_ + run.first_row * row_size(num_in), inner_scales_ + run.first_row, run.count, num_in};
    }

    void add_products(const Run& run) override {
        const int64_t hidden_size = matrices_.hidden_size, inner_size = matrices_.inner_size;
        const auto of_expert = [&](const int8::Matrix<Number>& all, int64_t num_out) {
            return all.slice(run.expert * num_out / PANEL, num_out / PANEL);
        };
        into_.add({inner_ + run.first_row * inner_size, inner_size}, of_x(run), of_expert(all_into_, 2 * inner_size), num_threads_);
        down_.add({rows_ + run.first_row * hidden_size, hidden_size}, of_inner(run), of_expert(all_down_, hidden_size), num_threads_);
    }

    int8::Matrix<Number> all_into_, all_down_;  // of all experts, one after the other
    Number* inner_;
    int8_t *quantized_x_, *quantized_inner_;
    float *scales_, *inner_scales_;
    ProductsOfRuns<In8Bits> into_, down_;
};

#endif

// Bytes of scratch memory for any choice.
inline int64_t experts_scratch_size(int64_t num_tokens, int64_t num_chosen, const ExpertMatrices& matrices) {
#ifdef WEFT_HAS_INT8
    if (matrices.is_int8) return ExpertsIn8Bits::scratch_size(num_tokens, num_chosen, matrices);
#endif
    return ExpertsInNumbers::scratch_size(num_tokens, num_chosen, matrices);
}

// Scratch: on the boundary of a cache line.
inline std::unique_ptr<ExpertProducts> make_expert_products(Number* out, const LeftRows& x, const ExpertMatrices& matrices, int64_t num_chosen,
                                                            void* scratch, int num_threads) {
#ifdef WEFT_HAS_INT8
    if (matrices.is_int8) return std::make_unique<ExpertsIn8Bits>(out, x, matrices, num_chosen, scratch, num_threads);
#endif
    return std::make_unique<ExpertsInNumbers>(out, x, matrices, num_chosen, scratch, num_threads);
}

}  // namespace weft

#endif
