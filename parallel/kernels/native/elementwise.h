// What is done between the matrix products, each in one pass over memory; float32 inside.

#pragma once

#include <algorithm>
#include <cmath>

#include "activations.h"
#include "targets.h"
#include "threads.h"
#include "vector.h"

namespace weft {

// Threads that are worth waking for so many elements.
inline int threads_for(int64_t num_elements, int num_threads) {
    constexpr int64_t GRAIN = 32 * 1024;
    return int(std::max<int64_t>(1, std::min<int64_t>(num_threads, num_elements / GRAIN)));
}

// Calls work(row) for rows, of which each thread has a run.
template <class Work>
void for_each_row(int64_t num_rows, int64_t row_size, Team& team, const Work& work) {
    constexpr int64_t GRAIN = 4 * 1024;  // of threads that are awake
    const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>({team.size(), num_rows, num_rows * row_size / GRAIN}));
    team.for_each(wanted, [&](int64_t item) {
        const int64_t end = num_rows * (item + 1) / wanted;
        for (int64_t row = num_rows * item / wanted; row < end; row++) work(row);
    });
}

// Rows of a matrix, or the heads of tokens: row (i, j) begins at i * outer_stride + j * size.
struct Rows {
    int64_t num_outer, num_inner, outer_stride, size;
};

// Those of row (i, j) at j * stride.
template <class W>
struct NormWeights {
    const W *weights, *biases;  // biases: null where there are none
    int64_t stride;
};

// out = x / sqrt(mean(x^2) + eps) * weight. Centered: the mean of x is taken away from it first, and the bias is added last. With a
// residual, x is added to it before all, and the sum is what is normed.
template <bool IS_CENTERED, class T, class W>
void norm(const Target<T>& out, const T* x, Rows rows, T* residual, const NormWeights<W>& of_rows, float eps, Team& team) {
    const int64_t size = rows.size;
    for_each_row(rows.num_outer, rows.num_inner * size, team, [=](int64_t outer) {
        for (int64_t inner = 0; inner < rows.num_inner; inner++) {
            const int64_t i = outer * rows.num_inner + inner;
            const T* from = x + outer * rows.outer_stride + inner * size;
            if (residual) {
                T* sum = residual + i * size;
#pragma omp simd
                for (int64_t k = 0; k < size; k++) put(sum + k, to_float(sum[k]) + to_float(from[k]));
                from = sum;
            }
            float mean = 0, squares = 0;
            if (IS_CENTERED) {
#pragma omp simd reduction(+ : mean)
                for (int64_t k = 0; k < size; k++) mean += to_float(from[k]);
                mean /= float(size);
            }
            const auto centered = [&](int64_t k) { return IS_CENTERED ? to_float(from[k]) - mean : to_float(from[k]); };
#pragma omp simd reduction(+ : squares)
            for (int64_t k = 0; k < size; k++) squares += centered(k) * centered(k);
            const float scale = 1.0f / std::sqrt(squares / float(size) + eps);
            const W* weight = of_rows.weights + inner * of_rows.stride;
            const W* bias = of_rows.biases ? of_rows.biases + inner * of_rows.stride : nullptr;
            const int64_t run = out.is_packed ? PANEL : size;
            for (int64_t k = 0; k < size; k += run) {
                T* to = out.place(i, k);
                if (bias) {
#pragma omp simd
                    for (int64_t j = 0; j < run; j++)
                        put(to + j, centered(k + j) * scale * to_float(weight[k + j]) + to_float(bias[k + j]));
                } else {
#pragma omp simd
                    for (int64_t j = 0; j < run; j++) put(to + j, centered(k + j) * scale * to_float(weight[k + j]));
                }
            }
        }
    });
}

// out = the sum of x^2, of rows of `size` columns.
template <class T>
void sum_squares(float* out, int64_t out_row_stride, const T* x, int64_t row_stride, int64_t num_rows, int64_t size, Team& team) {
    for_each_row(num_rows, size, team, [=](int64_t row) {
        const T* from = x + row * row_stride;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += to_float(from[i]) * to_float(from[i]);
        out[row * out_row_stride] = sum;
    });
}

// x = x / sqrt(squares / num_summed + eps) * weight, rows of `size` columns, which may be a part of those that were summed.
template <class T>
void norm_part(T* x, int64_t row_stride, const float* squares, int64_t squares_row_stride, const T* weight, int64_t num_rows, int64_t size,
               float num_summed, float eps, Team& team) {
    for_each_row(num_rows, size, team, [=](int64_t row) {
        T* to = x + row * row_stride;
        const float scale = 1.0f / std::sqrt(squares[row * squares_row_stride] / num_summed + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) put(to + i, to_float(to[i]) * scale * to_float(weight[i]));
    });
}

// Rows of `size` columns, in place.
template <class T>
void scale(T* x, int64_t row_stride, int64_t num_rows, int64_t size, float factor, Team& team) {
    for_each_row(num_rows, size, team, [=](int64_t row) {
        T* to = x + row * row_stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) put(to + i, to_float(to[i]) * factor);
    });
}

// Rows of `size` columns, in place: what is above the limit, or below minus the limit, becomes that. NaN stays.
template <class T>
void clamp(T* x, int64_t row_stride, int64_t num_rows, int64_t size, float limit, Team& team) {
    for_each_row(num_rows, size, team, [=](int64_t row) {
        T* to = x + row * row_stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const float value = to_float(to[i]);
            put(to + i, value > limit ? limit : value < -limit ? -limit : value);
        }
    });
}

// Vectors of heads, at x + token * token_stride + head * head_stride.
template <class T>
struct Heads {
    T* x;
    int64_t token_stride, head_stride;

    T* at(int64_t token, int64_t head) const { return x + token * token_stride + head * head_stride; }
};

// Each of `size` numbers.
template <class T>
void copy_heads(const Heads<T>& to, const Heads<T>& from, int64_t num_tokens, int64_t num_heads, int64_t size, Team& team) {
    for_each_row(num_tokens, num_heads * size, team, [=](int64_t token) {
        for (int64_t head = 0; head < num_heads; head++) std::copy_n(from.at(token, head), size, to.at(token, head));
    });
}

// x += y, rows of `size` columns.
template <class T>
void add(T* x, int64_t x_row_stride, const T* y, int64_t y_row_stride, int64_t num_rows, int64_t size, Team& team) {
    for_each_row(num_rows, 2 * size, team, [=](int64_t row) {
        T* to = x + row * x_row_stride;
        const T* from = y + row * y_row_stride;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) put(to + i, to_float(to[i]) + to_float(from[i]));
    });
}

// y *= sigmoid(x . weight), rows of `size` columns.
template <class T>
void gate_rows(T* y, int64_t y_row_stride, const T* x, int64_t x_row_stride, const T* weight, int64_t num_rows, int64_t size, Team& team) {
    for_each_row(num_rows, 2 * size, team, [=](int64_t row) {
        const T* from = x + row * x_row_stride;
        T* to = y + row * y_row_stride;
        float logit = 0;
#pragma omp simd reduction(+ : logit)
        for (int64_t i = 0; i < size; i++) logit += to_float(from[i]) * to_float(weight[i]);
        const float factor = 1.0f / (1.0f + std::exp(-logit));
#pragma omp simd
        for (int64_t i = 0; i < size; i++) put(to + i, to_float(to[i]) * factor);
    });
}

// The lanes that a row has; `load` gives zeros for others.
struct AllLanes {
    template <class T>
    Floats load(const T* from) const { return weft::load(from); }
    template <class T>
    void store(T* to, const Floats& x) const { weft::store(to, x); }
};

struct FirstLanes {
    int64_t count;

    template <class T>
    Floats load(const T* from) const {
        T values[LANES] = {};
        std::copy_n(from, count, values);
        return weft::load(values);
    }
    template <class T>
    void store(T* to, const Floats& x) const {
        T values[LANES];
        weft::store(values, x);
        std::copy_n(values, count, to);
    }
};

// Calls work(i, lanes) for i = 0, LANES, ... below `size`.
template <class Work>
void for_each_lanes(int64_t size, const Work& work) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) work(i, AllLanes{});
    if (i < size) work(i, FirstLanes{size - i});
}

// Rows of `size` columns, in place.
template <Activation ACTIVATION, class T>
void activate(T* x, int64_t row_stride, int64_t num_rows, int64_t size, Team& team) {
    for_each_row(num_rows, size, team, [=](int64_t row) {
        T* to = x + row * row_stride;
        for_each_lanes(size, [=](int64_t i, auto lanes) { lanes.store(to + i, activated<ACTIVATION, T>(lanes.load(to + i))); });
    });
}

// out = activation(first half) * second half.
template <Activation ACTIVATION, class T>
void gate(T* out, const T* gate_up, int64_t num_rows, int64_t size, Team& team) {
    for_each_row(num_rows, 2 * size, team, [=](int64_t row) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
        T* to = out + row * size;
        for_each_lanes(size, [=](int64_t i, auto lanes) {
            lanes.store(to + i, activated<ACTIVATION, T>(lanes.load(gate + i)) * lanes.load(up + i));
        });
    });
}

// Turns the pairs of each head in place: (i, half + i), or (2i, 2i + 1) where interleaved. Cosines and sines have a row for each
// token, or for each position.
template <class T>
void rotary(const Heads<T>& heads, int64_t num_tokens, int64_t num_heads, int64_t head_dim, const float* cos,
            const float* sin, int64_t half, const int64_t* positions, bool is_interleaved, Team& team) {
    for_each_row(num_tokens, num_heads * head_dim, team, [=](int64_t token) {
        const int64_t angles = (positions ? positions[token] : token) * half;
        const float *c = cos + angles, *s = sin + angles;
        for (int64_t head = 0; head < num_heads; head++) {
            T* x = heads.at(token, head);
            if (is_interleaved) {
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
                    put(x + 2 * i, a * c[i] - b * s[i]);
                    put(x + 2 * i + 1, b * c[i] + a * s[i]);
                }
            } else {
                T* y = x + half;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    const float a = to_float(x[i]), b = to_float(y[i]);
                    put(x + i, a * c[i] - b * s[i]);
                    put(y + i, b * c[i] + a * s[i]);
                }
            }
        }
    });
}

// Copies each token's key and value, `size` elements, to its slot.
template <class T>
void write_cache(T* keys, T* values, const T* k, const T* v, int64_t k_token_stride, int64_t v_token_stride,
                 const int64_t* slots, int64_t num_tokens, int64_t size, Team& team) {
    for_each_row(num_tokens, 2 * size, team, [=](int64_t token) {
        std::memcpy(keys + slots[token] * size, k + token * k_token_stride, size * sizeof(T));
        std::memcpy(values + slots[token] * size, v + token * v_token_stride, size * sizeof(T));
    });
}

}  // namespace weft
