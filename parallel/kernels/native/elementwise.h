// What is done between the matrix products, each in one pass over memory; float32 inside.

#pragma once

#include <algorithm>
#include <cmath>

#include "targets.h"
#include "threads.h"
#include "vector.h"

namespace weft {

// Threads that are worth waking for so many elements.
inline int threads_for(int64_t num_elements, int num_threads) {
    constexpr int64_t GRAIN = 32 * 1024;
    return int(std::max<int64_t>(1, std::min<int64_t>(num_threads, num_elements / GRAIN)));
}

// Calls work(begin, end) for runs of rows.
template <class Work>
void for_each_run_of_rows(int64_t num_rows, int64_t row_size, Team& team, const Work& work) {
    constexpr int64_t GRAIN = 4 * 1024;  // of threads that are awake
    const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>({team.size(), num_rows, num_rows * row_size / GRAIN}));
    team.for_each(wanted, [&](int64_t item) { work(num_rows * item / wanted, num_rows * (item + 1) / wanted); });
}

// Rows of a matrix, or the heads of tokens: row (i, j) begins at i * outer_stride + j * size.
struct Rows {
    int64_t num_outer, num_inner, outer_stride, size;
};

// out = x / sqrt(mean(x^2) + eps) * weight, the weight of (i, j) at j * weight_stride. With a residual, x is added to it
// first, and the sum is what is normed.
template <class T, class W>
void rms_norm(const Target<T>& out, const T* x, Rows rows, T* residual, const W* weights, int64_t weight_stride, float eps,
              Team& team) {
    const int64_t size = rows.size, row_size = rows.num_inner * size;
    for_each_run_of_rows(rows.num_outer, row_size, team, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin * rows.num_inner; i < end * rows.num_inner; i++) {
            const int64_t outer = i / rows.num_inner, inner = i % rows.num_inner;
            const T* from = x + outer * rows.outer_stride + inner * size;
            if (residual) {
                T* sum = residual + i * size;
#pragma omp simd
                for (int64_t k = 0; k < size; k++) put(sum + k, to_float(sum[k]) + to_float(from[k]));
                from = sum;
            }
            float squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t k = 0; k < size; k++) squares += to_float(from[k]) * to_float(from[k]);
            const float scale = 1.0f / std::sqrt(squares / float(size) + eps);
            const W* weight = weights + inner * weight_stride;
            const int64_t run = out.is_packed ? PANEL : size;
            for (int64_t k = 0; k < size; k += run) {
                T* to = out.place(i, k);
#pragma omp simd
                for (int64_t j = 0; j < run; j++) put(to + j, to_float(from[k + j]) * scale * to_float(weight[k + j]));
            }
        }
    });
}

// Rows of `size` columns, in place.
template <class T>
void scale(T* x, int64_t row_stride, int64_t num_rows, int64_t size, float factor, Team& team) {
    for_each_run_of_rows(num_rows, size, team, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            T* to = x + row * row_stride;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) put(to + i, to_float(to[i]) * factor);
        }
    });
}

// What the sigmoid of GELU by tanh is of, arXiv:1606.08415: 0.5 (1 + tanh y) is the sigmoid of 2 y.
template <class Number>
inline Number of_gelu_tanh(Number x) {
    return x * (x * x * (2 * 0.7978845608f * 0.044715f) + 2 * 0.7978845608f);
}

// out = activation(first half) * second half.
template <bool IS_GELU_TANH, class T>
void gate(T* out, const T* gate_up, int64_t num_rows, int64_t size, Team& team) {
    const auto of_sigmoid = [](auto x) { return IS_GELU_TANH ? of_gelu_tanh(x) : x; };
    for_each_run_of_rows(num_rows, 2 * size, team, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T *gate = gate_up + row * 2 * size, *up = gate + size;
            T* to = out + row * size;
            int64_t i = 0;
            for (; i + LANES <= size; i += LANES) {
                const Floats x = load(gate + i);
                store(to + i, times_sigmoid<T>(x, of_sigmoid(x)) * load(up + i));
            }
            for (; i < size; i++) {
                const float x = to_float(gate[i]);
                put(to + i, x / (1.0f + exponential(-of_sigmoid(x))) * to_float(up[i]));
            }
        }
    });
}

// Turns the pairs of each head in place: (i, half + i), or (2i, 2i + 1) where interleaved. Cosines and sines have a row for each
// token, or for each position.
template <class T>
void rotary(T* heads, int64_t token_stride, int64_t num_tokens, int64_t num_heads, int64_t head_dim, const float* cos,
            const float* sin, int64_t half, const int64_t* positions, bool is_interleaved, Team& team) {
    for_each_run_of_rows(num_tokens, num_heads * head_dim, team, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            const int64_t angles = (positions ? positions[token] : token) * half;
            const float *c = cos + angles, *s = sin + angles;
            for (int64_t head = 0; head < num_heads; head++) {
                T* x = heads + token * token_stride + head * head_dim;
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
        }
    });
}

// Copies each token's key and value, `size` elements, to its slot.
template <class T>
void write_cache(T* keys, T* values, const T* k, const T* v, int64_t k_token_stride, int64_t v_token_stride,
                 const int64_t* slots, int64_t num_tokens, int64_t size, Team& team) {
    for_each_run_of_rows(num_tokens, 2 * size, team, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            std::memcpy(keys + slots[token] * size, k + token * k_token_stride, size * sizeof(T));
            std::memcpy(values + slots[token] * size, v + token * v_token_stride, size * sizeof(T));
        }
    });
}

}  // namespace weft
