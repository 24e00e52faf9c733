// The two products of a partition of attention, with keys and values as packed matrices (matrix.h) for many rows, as they lie
// for one. By matrix tiles or, where there are none, by vectors: for one row with the bits that it has among many.

#pragma once

#include "attention_plan.h"
#include "matrix.h"
#include "shuffles.h"

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

constexpr int AHEAD = PANEL;  // tokens that are asked for before they are read

// The keys of some heads, side by side in memory, each as a packed matrix [num_tokens, head_dim], one after the other. The
// first head of token i begins at keys + offsets[i]. All heads of a few tokens are packed before the next tokens, since so
// they lie. Meanwhile the keys of later tokens are asked for, and the values of these.
inline void pack_keys(Number* packed, const Number* keys, const Number* values, const int64_t* offsets, int num_tokens,
                      int num_heads, int head_dim) {
    for (int token = 0; token < num_tokens; token += TILE)
        for (int head = 0; head < num_heads; head++) {
            Number* to = packed + (int64_t(head) * num_tokens + token / PANEL * PANEL) * head_dim + token % PANEL / TILE * (STEP_SIZE / 2);
            for (int dim = 0; dim < head_dim; dim += STEP, to += STEP_SIZE) {
                const int column = head * head_dim + dim;
                Ints rows[TILE];
                for (int i = 0; i < TILE; i++) {
                    rows[i] = load_bits(keys + offsets[token + i] + column);
                    _mm_prefetch(keys + offsets[std::min(token + i + AHEAD, num_tokens - 1)] + column, _MM_HINT_T0);
                    _mm_prefetch(values + offsets[token + i] + column, _MM_HINT_T1);
                }
                transpose(rows);
                for (int pair = 0; pair < TILE; pair++) store_bits(to + pair * STEP, to_line(rows[pair]));
            }
        }
}

// What lanes take of 32 dims: a line for the first 16 and one for the others, with a number of `from`, or a pair of both tokens.
inline void take_lines(Ints* lines, const Number* from, [[maybe_unused]] const Number* next) {
    lines[0] = load_bits(from);
#if WEFT_IS_FLOAT32
    lines[1] = load_bits(from + LANES);
#else
    lines[1] = load_bits(next);
    join_lines(lines[0], lines[1]);
#endif
}

// The values of some heads, each as a packed matrix [head_dim, num_tokens].
inline void pack_values(Number* packed, const Number* values, const int64_t* offsets, int num_tokens, int num_heads,
                        int head_dim) {
    for (int token = 0; token < num_tokens; token += PER_LANE) {
        const Number *from = values + offsets[token], *next = values + offsets[token + PER_LANE - 1];
        Number* to = packed + token / STEP * STEP_SIZE + token % STEP / PER_LANE * (PER_LANE * LANES);
        for (int dim = 0; dim < num_heads * head_dim; dim += PANEL, to += PANEL * num_tokens) {
            Ints lines[2];
            take_lines(lines, from + dim, next + dim);
            store_bits(to, lines[0]);
            store_bits(to + STEP_SIZE / 2, lines[1]);
        }
    }
}

// Memory that is read soon, in that order: asked for some lines at a time.
class Upcoming {
  public:
    // `size` values from here on, whole lines.
    void add(const Number* from, int64_t size) { runs_[count_++] = {from, from + size}; }

    template <Hint HINT>
    void ask(int num_lines) {
        for (; num_lines > 0; num_lines--, next_ += STEP) {
            if (next_ == end_) {
                if (run_ == count_) return;
                next_ = runs_[run_].begin;
                end_ = runs_[run_++].end;
                if (run_ < count_)  // a line of each page after it: addresses are looked up side by side, and early
                    for (auto line = runs_[run_].begin; line < runs_[run_].end && line < runs_[run_].begin + MOST_PAGES * PAGE; line += PAGE)
                        _mm_prefetch(line, HINT);
            }
            _mm_prefetch(next_, HINT);
        }
    }

  private:
    static constexpr int PAGE = 4096 / int(sizeof(Number)), MOST_PAGES = 8;

    struct Run {
        const Number *begin, *end;
    };

    Run runs_[2 * PARTITION + PANEL];
    int count_ = 0, run_ = 0;
    const Number *next_ = nullptr, *end_ = nullptr;
};

#if WEFT_IS_FLOAT32

// STEP numbers of a row: one, or a pair, is multiplied with what lanes have.
class StepOfRow {
  public:
    explicit StepOfRow(const float* x) : x_(x) {}

    Floats add(const Floats& sums, int i, const Ints& numbers) const { return multiply_add(broadcast(x_[i]), bit_cast<Floats>(numbers), sums); }

  private:
    const float* const x_;
};

using Weight = float;  // of a value, rounded

// Adds weight * value of a token, or of two, to 32 dims.
inline void add_values(Floats* sums, const Weight* weights, const float* values, const float*) {
    for (int i = 0; i < 2; i++) sums[i] = multiply_add(broadcast(weights[0]), load(values + i * LANES), sums[i]);
}

// Dims of a row in order again.
inline void sort_dims(Ints&, Ints&) {}

#elif WEFT_IS_FLOAT16

class StepOfRow {
  public:
    explicit StepOfRow(const Number* x) { store_two(x_, load(x), load(x + LANES), false); }

    Floats add(const Floats& sums, int pair, const Ints& pairs) const {
        const Ints line = to_line(pairs);
        const Floats part = multiply_add(broadcast(x_[2 * pair + 1]), second_half(line), sums);
        return multiply_add(broadcast(x_[2 * pair]), first_half(line), part);
    }

  private:
    alignas(64) float x_[STEP];
};

using Weight = float;

inline void add_values(Floats* sums, const Weight* weights, const Number* even, const Number* odd) {
    for (int i = 0; i < 2; i++) {
        const Floats part = multiply_add(broadcast(weights[1]), load(odd + i * LANES), sums[i]);
        sums[i] = multiply_add(broadcast(weights[0]), load(even + i * LANES), part);
    }
}

inline void sort_dims(Ints&, Ints&) {}

#else

// A pair, in all lanes.
inline Ints two_of(const Number* x) { return broadcast(bit_cast<int32_t>(*reinterpret_cast<const Number(*)[2]>(x))); }

class StepOfRow {
  public:
    explicit StepOfRow(const Number* x) : x_(x) {}

    Floats add(const Floats& sums, int pair, const Ints& pairs) const { return add_products(sums, two_of(x_ + 2 * pair), pairs); }

  private:
    const Number* const x_;
};

using Weight = Number;

inline void add_values(Floats* sums, const Weight* weights, const Number* even, const Number* odd) {
    const Ints two = two_of(weights), a = load_bits(even), b = load_bits(odd);
    sums[0] = add_products(sums[0], two, unpack_low<int16_t>(a, b));
    sums[1] = add_products(sums[1], two, unpack_high<int16_t>(a, b));
}

inline void sort_dims(Ints& first, Ints& second) {
    if (may_use_tiles()) return interleave<int32_t>(first, second);
    interleave<Quarter>(first, second);
}

#endif

// Scores of one row of q with 16 tokens. By tiles the keys are the left side of the product as they lie, q is the only column of
// the right one; by vectors keys are transposed on their way. Meanwhile `pace` times as many lines are asked for.
inline void score_row(float* scores, const Number* keys, int64_t token_stride, const Number* q, int head_dim, Upcoming& upcoming, int pace) {
#ifdef WEFT_HAS_AMX
    if (may_use_tiles()) {
        upcoming.ask<_MM_HINT_T1>(pace * TILE * head_dim / STEP);
        _tile_zero(0);
        for (int dim = 0; dim < head_dim; dim += STEP) {
            _tile_loadd(4, keys + dim, token_stride * int64_t(sizeof(Number)));
            _tile_loadd(6, q + dim, 2 * sizeof(Number));
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores, sizeof(float));
        return;
    }
#endif
    Floats sums{};
    for (int dim = 0; dim < head_dim; dim += STEP) {
        Ints rows[TILE];
        for (int i = 0; i < TILE; i++) {
            rows[i] = load_bits(keys + i * token_stride + dim);
            upcoming.ask<SOON>(pace);  // evenly: many at once hold up the loads after them
        }
        transpose(rows);
        const StepOfRow step(q + dim);
        for (int pair = 0; pair < TILE; pair++) sums = step.add(sums, pair, rows[pair]);
    }
    store(scores, sums);
}

inline void round_in_float(float* x, int count) {
    for (int i = 0; i < count; i += 2 * LANES) {
        Floats first = load(x + i), second = load(x + i + LANES);
        round_two<Number>(first, second);
        store_two(x + i, first, second, false);
    }
}

// As numbers, in the same place; whole runs of 32.
inline void store_numbers(float* x, int count) {
    if (PER_LANE == 1) return;
    Number* const numbers = reinterpret_cast<Number*>(x);
    for (int i = 0; i < count; i += 2 * LANES) store_two(numbers + i, load(x + i), load(x + i + LANES), false);
}

// Weights of a row, in whole runs of 32, as they meet the values: for tiles still float32, for vectors `Weight` in the same place.
inline void round_weights(float* weights, int count) {
    if (PER_LANE == 1) return;
    if (may_use_tiles() || sizeof(Weight) == sizeof(float)) return round_in_float(weights, count);
    store_numbers(weights, count);
}

// Adds weight * value of at most 32 tokens to LINES * 32 dims of a row by vectors. Of each 32 dims `totals` has, in bfloat16, the
// first four of each eight first.
template <int LINES>
void add_some_values(float* totals, const Number* values, const int64_t* offsets, const Weight* weights, int num_tokens,
                     Upcoming& upcoming) {
    Floats sums[2 * LINES];
    for (int i = 0; i < 2 * LINES; i++) sums[i] = load(totals + i * LANES);
    for (int token = 0; token < num_tokens; token += PER_LANE) {
        upcoming.ask<SOON>(2 * LINES);
        const Number* from = values + offsets[token];
        const Number* next = values + offsets[std::min(token + PER_LANE - 1, num_tokens - 1)];  // the weight of none is 0
        for (int line = 0; line < LINES; line++) add_values(sums + 2 * line, weights + token, from + line * PANEL, next + line * PANEL);
    }
    for (int i = 0; i < 2 * LINES; i++) store(totals + i * LANES, sums[i]);
}

#ifdef WEFT_HAS_AMX

// The same beside matrix tiles, with the bits of one of their steps: even and odd tokens apart. Of each 32 dims `totals` has the
// even ones first.
template <int LINES>
void add_step_of_values(float* totals, const Number* values, const int64_t* offsets, const float* weights, int num_tokens,
                        Upcoming& upcoming) {
    Floats even_sums[2 * LINES] = {}, odd_sums[2 * LINES] = {};
    const auto add = [&](Floats* sums, int token) {
        upcoming.ask<_MM_HINT_T1>(LINES);
        const Floats weight = broadcast(weights[token]);
        for (int line = 0; line < LINES; line++) {
            const Ints both = load_bits(values + offsets[token] + line * STEP);
            sums[2 * line] = multiply_add(weight, first_half(both), sums[2 * line]);
            sums[2 * line + 1] = multiply_add(weight, second_half(both), sums[2 * line + 1]);
        }
    };
    int token = 0;
    for (; token + 2 <= num_tokens; token += 2) {
        add(even_sums, token);
        add(odd_sums, token + 1);
    }
    if (token < num_tokens) add(even_sums, token);
    for (int i = 0; i < 2 * LINES; i++)
        store(totals + i * LANES, load(totals + i * LANES) + (even_sums[i] + odd_sums[i]));
}

#endif

// The dims of a row in order again.
inline void interleave(float* totals, int head_dim) {
    for (int dim = 0; dim < head_dim; dim += PANEL) {
        Ints first = load_bits(totals + dim), second = load_bits(totals + dim + LANES);
        sort_dims(first, second);
        store_bits(totals + dim, first);
        store_bits(totals + dim + LANES, second);
    }
}

}  // namespace weft

#endif
