// What attention computes with vectors: scores of keys, the softmax of a partition, sums of values. Terms are those of
// attention.h.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cache_int8.h"
#include "shuffles.h"
#include "vector.h"

namespace weft {

inline Floats soft_capped(Floats x, float cap) {
    return cap - (2.0f * cap) / (exponential(x * (2.0f / cap)) + 1.0f);  // cap * tanh(x / cap)
}

// Lane i of the result is all lanes of rows[i], joined; rows are overwritten.
template <class Join>
inline Floats join_each(Floats* rows, const Join& join) {
    for (int width = LANES / 2; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) {
            const Floats a = rows[2 * i], b = rows[2 * i + 1];
            rows[i] = join(even_lanes(a, b), odd_lanes(a, b));
        }
    return rows[0];
}

inline Floats sum_each(Floats* rows) {
    return join_each(rows, [](Floats a, Floats b) { return a + b; });
}

// The product of one row of q with one key, before its lanes are summed.
template <int HEAD_DIM, class T, class C>
inline Floats multiply(const T* q, const C* key, int runtime_head_dim) {
    const int head_dim = HEAD_DIM ? HEAD_DIM : runtime_head_dim;
    Floats total = load(key) * load(q);
    for (int dim = LANES; dim < head_dim; dim += LANES) total = multiply_add(load(key + dim), load(q + dim), total);
    return total;
}

// Multiplies what each row has of some tokens by a number of each token.
inline void scale_tokens(float* rows, int64_t stride, int num_rows, const float* scales, int num_tokens) {
    for (int row = 0; row < num_rows; row++)
        for (int token = 0; token < num_tokens; token++) rows[row * stride + token] *= scales[token];
}

// The hardware does not foresee where the next tokens of a head lie.
template <class T>
void prefetch(const T* heads, int64_t token_stride, int head_dim) {
    for (int token = 0; token < LANES; token++)
        for (int dim = 0; dim < head_dim; dim += int(64 / sizeof(T))) __builtin_prefetch(heads + token * token_stride + dim);
}

// Scores of num_rows rows of q with the keys of num_tokens <= LANES tokens. Writes LANES scores a row; only the first
// num_tokens mean something. HEAD_DIM 0: not known when compiled.
template <int HEAD_DIM, class T, class C>
void score_keys(const C* keys, int64_t token_stride, int num_tokens, const C* next_keys, const T* q, int num_rows,
                int head_dim, float scale, float* scores, int64_t scores_stride) {
    for (int row = 0; row < num_rows; row++) {
        Floats products[LANES];
        for (int token = 0; token < LANES; token++)
            products[token] =
                multiply<HEAD_DIM>(q + row * head_dim, keys + std::min(token, num_tokens - 1) * token_stride, head_dim);
        store(scores + row * scores_stride, sum_each(products) * scale);
    }
    if (next_keys) prefetch(next_keys, token_stride, head_dim);
}

// Adds weight * value of each token to ROWS rows, WIDTH vectors of the head at a time.
template <int ROWS, int WIDTH, class T>
void add_values(const T* values, int64_t token_stride, int num_tokens, const float* weights, int64_t weights_stride,
                float* totals, int head_dim) {
    for (int dim = 0; dim < head_dim; dim += WIDTH * LANES) {
        Floats sums[ROWS][WIDTH];
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < WIDTH; i++) sums[row][i] = load(totals + row * head_dim + dim + i * LANES);
        for (int token = 0; token < num_tokens; token++) {
            const T* value = values + token * token_stride + dim;
            Floats part[WIDTH];
            for (int i = 0; i < WIDTH; i++) part[i] = load(value + i * LANES);
            for (int row = 0; row < ROWS; row++) {
                const Floats weight = broadcast(weights[row * weights_stride + token]);
                for (int i = 0; i < WIDTH; i++) sums[row][i] = multiply_add(weight, part[i], sums[row][i]);
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < WIDTH; i++) store(totals + row * head_dim + dim + i * LANES, sums[row][i]);
    }
}

template <int WIDTH, class T>
void add_values_to_rows(const T* values, int64_t token_stride, int num_tokens, const float* weights,
                        int64_t weights_stride, float* totals, int num_rows, int head_dim) {
    int row = 0;
    for (; row + 4 <= num_rows; row += 4)
        add_values<4, WIDTH>(values, token_stride, num_tokens, weights + row * weights_stride, weights_stride,
                             totals + row * head_dim, head_dim);
    for (; row < num_rows; row++)
        add_values<1, WIDTH>(values, token_stride, num_tokens, weights + row * weights_stride, weights_stride,
                             totals + row * head_dim, head_dim);
}

// The running softmax of one row: the largest score, and the sum of e^(score - largest).
struct Running {
    float most = -INFINITY;
    float sum = 0;
};

// Adds a partition's softmax (its sums in `part_totals`) to the running one. factor: e^-|difference of their largest scores|.
inline void merge(Running& running, float* totals, const Running& part, const float* part_totals, int head_dim, float factor) {
    if (part.sum == 0) return;
    if (running.sum == 0) {
        running = part;
        std::copy_n(part_totals, head_dim, totals);
        return;
    }
    const bool is_more = part.most > running.most;
    const float old = is_more ? factor : 1, fresh = is_more ? 1 : factor;
    running = {std::max(running.most, part.most), multiply_add(running.sum, old, part.sum * fresh)};
    for (int dim = 0; dim < head_dim; dim += LANES)
        store(totals + dim, multiply_add(load(totals + dim), old, load(part_totals + dim) * fresh));
}

inline void merge(Running& running, float* totals, const Running& part, const float* part_totals, int head_dim) {
    merge(running, totals, part, part_totals, head_dim, exponential(-std::fabs(part.most - running.most)));
}

// The same for up to LANES rows that follow each other, whose factors are made together.
inline void merge_rows(Running* running, float* totals, const Running* parts, const float* part_totals, int num_rows, int head_dim) {
    alignas(64) float distances[LANES] = {}, factors[LANES];
    for (int row = 0; row < num_rows; row++) distances[row] = -std::fabs(parts[row].most - running[row].most);
    store(factors, exponential(load(distances)));
    for (int row = 0; row < num_rows; row++, totals += head_dim, part_totals += head_dim)
        merge(running[row], totals, parts[row], part_totals, head_dim, factors[row]);
}

// Tokens, counted from where scores begin.
struct Span {
    int begin, end;
};

// Makes the scores of what a row sees final, where a cap or a bias is wanted.
inline void cap_and_bias(float* scores, Span seen, float scale, float soft_cap, const float* bias) {
    for (int i = seen.begin / LANES * LANES; i < seen.end; i += LANES) {
        Floats x = load(scores + i) * scale;
        if (soft_cap != 0) x = soft_capped(x, soft_cap);
        if (bias) {
            Floats added{};
            std::memcpy(&added, bias + i, sizeof(float) * std::min(LANES, seen.end - i));
            x += added;
        }
        store(scores + i, x);
    }
}

// The softmax of some rows over the tokens of a partition: all rows are searched for their largest score, then weighed. The
// bits of a row do not depend on those beside it.
class Softmax {
  public:
    static constexpr int MOST_ROWS = 2 * LANES;
    static constexpr int RUN = 2 * LANES;  // tokens

    // scale: what scores are multiplied by; positive.
    void begin(float scale) { scale_ = scale; }

    // What is not seen becomes -inf in the first and the last run of tokens.
    void search(int row, float* scores, Span seen) {
        const Span runs = seen.begin < seen.end ? Span{seen.begin / RUN * RUN, (seen.end + RUN - 1) / RUN * RUN} : Span{0, 0};
        Floats first = broadcast(-INFINITY), second = first;
        if (runs.begin < runs.end) {
            std::fill(scores + runs.begin, scores + seen.begin, -INFINITY);
            std::fill(scores + seen.end, scores + runs.end, -INFINITY);
        }
        for (int i = runs.begin; i < runs.end; i += RUN) {
            first = larger(load(scores + i), first);
            second = larger(load(scores + i + LANES), second);
        }
        lanes_[row] = larger(first, second);
        runs_[row] = runs;
    }

    // After the search of all rows.
    void settle(int num_rows) {
        for (int row = 0; row < num_rows; row += LANES) {
            const Floats most = join_each(lanes_ + row, [](const Floats& a, const Floats& b) { return larger(a, b); }) * scale_;
            store(most_ + row, choose(most == -INFINITY, Floats{}, most));  // nothing is seen: all weights become 0
        }
    }

    // The weights of a row, of tokens that begin and end runs; they may take the place of its scores.
    template <class W>
    void weigh(int row, W* weights, const float* scores, Span tokens) {
        const Span runs = runs_[row];
        const float scale = scale_, most = most_[row];
        Floats first{}, second{};
        for (int i = tokens.begin; i < runs.begin; i += RUN) store_two(weights + i, Floats{}, Floats{}, false);
        for (int i = runs.begin; i < runs.end; i += RUN) {
            const Floats x = exponential_from<Number>(load(scores + i), scale, most);
            const Floats y = exponential_from<Number>(load(scores + i + LANES), scale, most);
            first += x;
            second += y;
            store_two(weights + i, x, y, false);
        }
        for (int i = runs.end; i < tokens.end; i += RUN) store_two(weights + i, Floats{}, Floats{}, false);
        lanes_[row] = first + second;
    }

    // After all rows were weighed.
    void sum(Running* running, int num_rows) {
        for (int row = 0; row < num_rows; row += LANES) {
            float sums[LANES];
            store(sums, sum_each(lanes_ + row));
            for (int i = 0; i < std::min(LANES, num_rows - row); i++) running[row + i] = {most_[row + i], sums[i]};
        }
    }

  private:
    float scale_;
    Span runs_[MOST_ROWS];
    Floats lanes_[MOST_ROWS];
    alignas(64) float most_[MOST_ROWS];
};

}  // namespace weft
