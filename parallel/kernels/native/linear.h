// A product of few rows with a matrix as it lies, [out, in]: as fast as memory gives the matrix.

#pragma once

#include <algorithm>

#include "attention_vectors.h"
#include "targets.h"
#include "threads.h"

namespace weft {

// sums[row * OUTS + o] = x[row] . weight[o] for ROWS rows of x and OUTS rows of the matrix: each that is loaded is used
// for all of the other, and LANES sums are under way at once.
template <int ROWS, int OUTS, class T>
void multiply_tile(const T* x, int64_t x_row_stride, const T* weight, int num_in, float* sums) {
    static_assert(ROWS * OUTS == LANES);
    Floats totals[LANES] = {};
    int i = 0;
#ifdef WEFT_HAS_PAIRS_IN_LINES
    if constexpr (sizeof(T) == 2)
        for (; i + 2 * LANES <= num_in; i += 2 * LANES)
#pragma GCC unroll 16  // else GCC keeps the sums in memory
            for (int o = 0; o < OUTS; o++) {
                const Ints w = load_bits(weight + int64_t(o) * num_in + i);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++) {
                    const Ints other = load_bits(x + row * x_row_stride + i);
                    totals[row * OUTS + o] = add_products(totals[row * OUTS + o], w, other);
                }
            }
#endif
    for (; i < num_in; i += LANES)
#pragma GCC unroll 16
        for (int o = 0; o < OUTS; o++) {
            const Floats w = load(weight + int64_t(o) * num_in + i);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) totals[row * OUTS + o] = multiply_add(w, load(x + row * x_row_stride + i), totals[row * OUTS + o]);
        }
    Floats lanes[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) lanes[k] = totals[k];
    store(sums, sum_each(lanes));
}

// The same for one run of outputs and all rows of x, from `row` on. ROWS rows at a time while there are so many, then half of
// them.
template <int ROWS, class T>
void multiply_run(const Target<float>& out, const T* x, int64_t x_row_stride, int row, int num_rows, const T* weight,
                  int64_t begin, int64_t end, int num_in) {
    constexpr int OUTS = LANES / ROWS;
    for (int64_t o = begin; o < end; o += LANES) {  // what is read here stays in the first-level cache for all rows
        int first = row;
        for (; first + ROWS <= num_rows; first += ROWS)
            for (int64_t part = o; part < o + LANES; part += OUTS) {
                float sums[LANES];
                multiply_tile<ROWS, OUTS>(x + first * x_row_stride, x_row_stride, weight + part * num_in, num_in, sums);
                for (int r = 0; r < ROWS; r++)
                    std::copy(sums + r * OUTS, sums + (r + 1) * OUTS, out.at(first + r, part / PANEL) + part % PANEL);
            }
        if constexpr (ROWS > 1)
            if (first < num_rows) multiply_run<ROWS / 2>(out, x, x_row_stride, first, num_rows, weight, o, o + LANES, num_in);
    }
}

// Rows up to which this is faster than torch's product with a matrix that is not laid out for it.
inline int most_rows() {
#ifdef WEFT_HAS_PACKED_MATRIX
    return 64;
#else
    return 4;
#endif
}

// result[row, o] = x[row] . weight[o], in float32. num_in and the outputs are multiples of LANES.
template <class Result, class T>
void multiply_rows(const Result& result, const T* x, int64_t x_row_stride, int num_rows, const T* weight, int num_in,
                   int num_threads) {
    const int64_t num_out = result.num_out;
    constexpr int64_t RUN = 16 * LANES;  // outputs of an item
    on_team(num_threads, 1, [=](Team& team) {
        team.for_each((num_out + RUN - 1) / RUN, [=](int64_t item) {
            const int64_t begin = item * RUN, end = std::min(num_out, begin + RUN);
            const auto out = result.share(0, num_rows, begin / PANEL, (end + PANEL - 1) / PANEL);
            multiply_run<4>(out, x, x_row_stride, 0, num_rows, weight, begin, end, num_in);
            result.finish(out, num_rows, (end + PANEL - 1) / PANEL);
        });
    });
}

}  // namespace weft
