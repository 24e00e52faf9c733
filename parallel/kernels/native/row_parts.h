// Parts of rows of logits, so that one row is work for several threads, and the runs of tokens in them.

#pragma once

#include <algorithm>

#include "sampling.h"

namespace weft {

constexpr int RUN = 2 * LANES;       // tokens of which the largest logit is known, or one bound of all
constexpr int64_t CHUNK = 32 * RUN;  // tokens, of which parts have whole numbers

struct RowSpan {
    int64_t begin, size;  // of a row
};

// Rows of `size` tokens.
struct RowParts {
    const int64_t size, num, part_size, num_runs;

    RowParts(int64_t num_rows, int64_t row_size, int num_threads)
        : size(row_size), num(choose(num_rows, row_size, num_threads)), part_size(((size - 1) / num / CHUNK + 1) * CHUNK),
          num_runs((size - 1) / RUN + 1) {}

    RowSpan span(int64_t part) const {
        const int64_t begin = std::min(part * part_size, size);
        return {begin, std::min(part_size, size - begin)};
    }

    // Calls stages(for_each_row, for_each_part), which call work(row) or work(row, part) for all of them, one stage after the other; where
    // parts are whole rows all stages of one at a time, which is then in a cache.
    template <class Stages>
    void run(Team& team, int64_t num_rows, const Stages& stages) const {
        if (num == 1)
            return team.for_each(num_rows, [&](int64_t row) {
                stages([&](const auto& work) { work(row); }, [&](const auto& work) { work(row, int64_t(0)); });
            });
        stages([&](const auto& work) { team.for_each(num_rows, work); },
               [&](const auto& work) { team.for_each(num_rows * num, [&](int64_t item) { work(item / num, item % num); }); });
    }

    // Of a part the largest of each run, and of all. None but the last one where one is NaN: then the row has no token.
    float find_most_of_runs(float* most_of_runs, const float* row, int64_t part) const {
        const RowSpan all = span(part);
        float most = -INFINITY;
        for (int64_t begin = all.begin; begin < all.begin + all.size; begin += RUN) {
            const float of_run = largest(row + begin, std::min<int64_t>(RUN, size - begin));
            if (of_run != of_run) return of_run;
            most_of_runs[begin / RUN] = of_run;
            most = std::max(most, of_run);
        }
        return most;
    }

  private:
    static int64_t choose(int64_t num_rows, int64_t size, int num_threads) {
        constexpr int64_t LEAST = 8 * CHUNK;
        return num_rows >= num_threads ? 1 : std::max<int64_t>(1, std::min<int64_t>(num_threads, size / LEAST));
    }
};

}  // namespace weft
