// The most probable tokens of rows of logits, and what makes probabilities of logits.

#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "row_parts.h"

namespace weft {

// As what a team does. Sums are made by chunks, and then of these in order: no number of threads or rows changes a bit.
class Ranking {
  public:
    static constexpr int SECTIONS = 3;  // of a team

    // Of rows [num_rows] of `logits`: totals [num_rows], the logarithm of the sum of all e^logit, NaN where a row has no token; and the
    // `number` largest logits, with their tokens, from the largest down, the first ones of equals.
    Ranking(float* totals, float* values, int64_t* tokens, const float* logits, int64_t row_stride, const int64_t* rows, int64_t num_rows,
            int64_t size, int64_t number, int num_threads)
        : totals_(totals), values_(values), tokens_(tokens), logits_(logits), row_stride_(row_stride), rows_(rows), num_rows_(num_rows),
          number_(number), parts_(num_rows, size, num_threads), most_(size_t(num_rows * parts_.num)) {
        static thread_local Buffer<float> most_room;
        static thread_local Buffer<double> sum_room;
        most_of_runs_ = most_room.room(size_t(num_rows * parts_.num_runs));
        sums_ = sum_room.room(size_t(num_rows * num_chunks()));
    }

    void run(Team& team) {
        parts_.run(team, num_rows_, [&](const auto& for_each_row, const auto& for_each_part) {
            for_each_part([&](int64_t row, int64_t part) {
                most_[size_t(row * parts_.num + part)] = parts_.find_most_of_runs(most_of_runs_of(row), logits_of(row), part);
            });
            for_each_part([&](int64_t row, int64_t part) { sum_chunks(row, part); });
            for_each_row([&](int64_t row) { finish(row); });
        });
    }

  private:
    struct Token {
        float value;
        int64_t place;
        bool operator<(const Token& other) const { return value > other.value || (value == other.value && place < other.place); }
    };

    int64_t num_chunks() const { return (parts_.size - 1) / CHUNK + 1; }
    const float* logits_of(int64_t row) const { return logits_ + rows_[row] * row_stride_; }
    float* most_of_runs_of(int64_t row) const { return most_of_runs_ + row * parts_.num_runs; }

    // NaN where one is.
    float largest_of(int64_t row) const {
        float most = -INFINITY;
        for (int64_t part = 0; part < parts_.num; part++) {
            const float of_part = most_[size_t(row * parts_.num + part)];
            if (!(of_part <= most)) most = of_part;
            if (most != most) break;
        }
        return most;
    }

    void sum_chunks(int64_t row, int64_t part) const {
        const float most = largest_of(row);
        if (!std::isfinite(most)) return;
        const RowSpan all = parts_.span(part);
        for (int64_t begin = all.begin; begin < all.begin + all.size; begin += CHUNK)
            sums_[row * num_chunks() + begin / CHUNK] = sum_of_weights(logits_of(row) + begin, std::min(CHUNK, parts_.size - begin), most);
    }

    // One copy of the code, so that a sum always has the same bits.
    __attribute__((noinline)) static double sum_of_weights(const float* logits, int64_t count, float most) {
        alignas(64) float last[LANES];
        Floats total[2] = {};
        int64_t i = 0;
        for (; i + RUN <= count; i += RUN)
            for (int k = 0; k < 2; k++) total[k] += exponential(load(logits + i + k * LANES) - most);
        for (; i < count; i += LANES) {
            const int64_t left = std::min<int64_t>(LANES, count - i);
            std::fill(std::copy_n(logits + i, left, last), last + LANES, -INFINITY);
            total[0] += exponential(load(last) - most);
        }
        return double(sum(total[0] + total[1]));
    }

    void finish(int64_t row) const {
        float* const values = values_ + row * number_;
        int64_t* const tokens = tokens_ + row * number_;
        const float most = largest_of(row);
        if (!std::isfinite(most)) {
            totals_[row] = NAN;
            std::fill_n(values, number_, NAN), std::fill_n(tokens, number_, 0);
            return;
        }
        double total = 0;
        for (int64_t chunk = 0; chunk < num_chunks(); chunk++) total += sums_[row * num_chunks() + chunk];
        totals_[row] = float(double(most) + std::log(total));
        if (number_ == 0) return;
        static thread_local std::vector<Token> found;
        find_candidates(found, row);
        std::partial_sort(found.begin(), found.begin() + number_, found.end());
        for (int64_t i = 0; i < number_; i++) values[i] = found[size_t(i)].value, tokens[i] = found[size_t(i)].place;
    }

    // All tokens with a logit that as many runs reach as tokens are wanted.
    void find_candidates(std::vector<Token>& found, int64_t row) const {
        static thread_local std::vector<float> most;
        most.assign(most_of_runs_of(row), most_of_runs_of(row) + parts_.num_runs);
        float least = -INFINITY;
        if (number_ <= parts_.num_runs) {
            const auto last = most.begin() + number_ - 1;
            std::nth_element(most.begin(), last, most.end(), std::greater<float>());
            least = *last;
        }
        found.clear();
        for (int64_t run = 0; run < parts_.num_runs; run++) {
            if (most_of_runs_of(row)[run] < least) continue;
            for (int64_t place = run * RUN; place < std::min((run + 1) * RUN, parts_.size); place++)
                if (logits_of(row)[place] >= least) found.push_back({logits_of(row)[place], place});
        }
    }

    float *const totals_, *const values_;
    int64_t* const tokens_;
    const float* const logits_;
    const int64_t row_stride_;
    const int64_t* const rows_;
    const int64_t num_rows_, number_;
    const RowParts parts_;
    std::vector<float> most_;  // [rows][parts]
    float* most_of_runs_;      // [rows][runs]
    double* sums_;             // [rows][chunks]
};

}  // namespace weft
