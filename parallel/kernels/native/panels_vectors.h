// Products with packed matrices by vectors, where there are no matrix tiles. Terms are those of panels.h.
//
// Some rows have their sums with all 32 outputs of a panel in registers, while the panel goes by from front to back. Each
// sum takes its inputs in their order, however many rows there are, so that the bits of a row do not depend on the others.
//
// What is multiplied is told by `Numbers`:
//     Sum, Vector             a sum, and 16 of them in a register
//     LEFT_BYTES              that a row has for each four of an output
//     left(from)              those, in all lanes
//     right(from)             four bytes of each of 16 outputs
//     add(sums, left, right)  adds their products

#pragma once

#include "panels.h"

#ifdef __AVX512F__

namespace weft {

constexpr int MOST_VECTOR_ROWS = 12;  // whose sums fill 24 of the 32 registers
constexpr int MOST_UNROLLED_ROWS = 2;
constexpr int VECTOR_PREFETCH = 2;    // steps ahead

// `Numbers` whose rows are as their outputs are.
struct Alike {
    static constexpr int LEFT_BYTES = 4;

    static __m512i left(const char* from) {
        int32_t four;
        std::memcpy(&four, from, sizeof(four));
        return _mm512_set1_epi32(four);
    }
    static __m512i right(const char* from) { return _mm512_loadu_si512(from); }
};

// Up to 32 rows, 16 * LEFT_BYTES of each a step. Strides in bytes.
struct LeftVectors {
    const char* first;
    int64_t row_stride, step_stride;
    int num_rows;

    const char* row(int i) const { return first + i * row_stride; }
};

// What 32 outputs have: 64 bytes for each four of a row, of the first 16 outputs and, `second` bytes further, of the others.
struct RightVectors {
    const char* first;
    int64_t second = TO_SECOND, step_stride = STEP_BYTES;  // as in a panel
};

// A panel that comes from farther away than the first-level cache, and what is asked for while it passes.
struct Far {
    const char* following;  // passes after it
    Ahead* ahead;

    static constexpr bool IS_FAR = true, PASSES_ONCE = false;
    static constexpr int64_t RUN = RUN_BYTES;
    Lines take() const { return ahead->take(); }
};

// One that comes from memory and is not wanted again.
struct Passing {
    const char* following;

    static constexpr bool IS_FAR = true, PASSES_ONCE = true;
    static constexpr int64_t RUN = RUN_BYTES;
    static Lines take() { return {}; }
};

// What is no panel, but as two tiles are.
struct Close {
    static constexpr const char* following = nullptr;
    static constexpr bool IS_FAR = false, PASSES_ONCE = false;
    static constexpr int64_t RUN = 64;
    static Lines take() { return {}; }
};

template <class Place>
inline void ask_for(const char* line) {
    _mm_prefetch(line, Place::PASSES_ONCE ? ONCE : _MM_HINT_T0);
}

// The sums of some rows with 32 outputs.
template <class Numbers, int NUM_ROWS>
struct Totals {
    typename Numbers::Vector sums[NUM_ROWS][2] = {};

    // Adds products of four bytes of each output.
    void add(const char* row, int64_t row_stride, const char* first_outputs, const char* second_outputs) {
        const auto first = Numbers::right(first_outputs), second = Numbers::right(second_outputs);
#pragma GCC unroll 16  // else GCC keeps the sums in memory
        for (int i = 0; i < NUM_ROWS; i++) {
            const auto all = Numbers::left(row + i * row_stride);
            sums[i][0] = Numbers::add(sums[i][0], all, first);
            sums[i][1] = Numbers::add(sums[i][1], all, second);
        }
    }

    void write(typename Numbers::Sum* to, int64_t stride) const {
#pragma GCC unroll 16
        for (int i = 0; i < NUM_ROWS; i++, to += stride) {
            std::memcpy(to, &sums[i][0], sizeof(sums[i][0]));
            std::memcpy(to + LANES, &sums[i][1], sizeof(sums[i][1]));
        }
    }
};

// NUM_ROWS rows times 32 outputs: the sums [rows][PANEL]. ROW_STRIDE: of the left side, where it is known now; else 0.
template <class Numbers, int NUM_ROWS, int64_t ROW_STRIDE, class Place>
void multiply_so_many_vectors(typename Numbers::Sum* sums, int64_t sums_stride, const LeftVectors& left,
                              const RightVectors& right, const Place& place, int num_steps) {
    Totals<Numbers, NUM_ROWS> totals;
    const char *row = left.first, *values = right.first;
    const int64_t row_stride = ROW_STRIDE ? ROW_STRIDE : left.row_stride, to_second = right.second;
    for (int step = 0; step < num_steps; step++, values += right.step_stride, row += left.step_stride) {
        const int later = step + VECTOR_PREFETCH - num_steps;
        const char* ahead = later < 0 ? values + VECTOR_PREFETCH * STEP_BYTES : place.following + later * STEP_BYTES;
        const Lines asked = place.take();
        for (int run = 0; run < 16; run++) {
            if (run < asked.count) _mm_prefetch(asked.first + run * 64, _MM_HINT_T1);
            if (Place::IS_FAR) {  // the hardware looks less far ahead than memory is slow
                ask_for<Place>(ahead + run * 128);
                ask_for<Place>(ahead + run * 128 + 64);
            }
            const char* const first = values + run * Place::RUN;
            totals.add(row + run * Numbers::LEFT_BYTES, row_stride, first, first + to_second);
        }
    }
    totals.write(sums, sums_stride);
}

// The same for so few rows that only memory counts, and a panel that passes once: a step is all written out, and the one
// after it is asked for, so that as many loads are under way as there can be.
template <class Numbers, int NUM_ROWS>
void multiply_unrolled_vectors(typename Numbers::Sum* sums, int64_t sums_stride, const LeftVectors& left, const char* values,
                               const Passing& place, int num_steps) {
    Totals<Numbers, NUM_ROWS> totals;
    const char* row = left.first;
    const char* const last = values + (num_steps - 1) * STEP_BYTES;
    for (; values <= last; values += STEP_BYTES, row += left.step_stride) {
        const char* const ahead = values < last ? values + STEP_BYTES : place.following;
#pragma GCC unroll 16
        for (int run = 0; run < 16; run++) {
            ask_for<Passing>(ahead + run * 128);
            ask_for<Passing>(ahead + run * 128 + 64);
            const char* const first = values + run * RUN_BYTES;
            totals.add(row + run * Numbers::LEFT_BYTES, left.row_stride, first, first + TO_SECOND);
        }
    }
    totals.write(sums, sums_stride);
}

// The same for 1 to MOST rows, a number that is known when it runs.
template <class Numbers, int MOST = MOST_VECTOR_ROWS, class Place>
void multiply_vectors(typename Numbers::Sum* sums, int64_t sums_stride, const LeftVectors& left, const RightVectors& right,
                      const Place& place, int num_steps) {
    if (left.num_rows == MOST) {
        if constexpr (Place::PASSES_ONCE && MOST <= MOST_UNROLLED_ROWS)
            return multiply_unrolled_vectors<Numbers, MOST>(sums, sums_stride, left, right.first, place, num_steps);
        constexpr int64_t PACKED = 16 * Numbers::LEFT_BYTES;
        if (Place::IS_FAR && left.row_stride == PACKED)  // with places that the compiler knows, none is lost to registers
            return multiply_so_many_vectors<Numbers, MOST, PACKED>(sums, sums_stride, left, right, place, num_steps);
        return multiply_so_many_vectors<Numbers, MOST, 0>(sums, sums_stride, left, right, place, num_steps);
    }
    if constexpr (MOST > 1) multiply_vectors<Numbers, MOST - 1>(sums, sums_stride, left, right, place, num_steps);
}

// Parts of blocks of rows that `for_each_part` gives.
inline int num_parts_of(int num_rows) {
    return num_rows / ROWS * int(divide_up(ROWS, MOST_VECTOR_ROWS)) + int(divide_up(num_rows % ROWS, MOST_VECTOR_ROWS));
}

// Calls work(first row, rows) for parts of some rows, about equally many in each.
template <class Work>
void for_each_part(int num_rows, const Work& work) {
    const int num_parts = int(divide_up(num_rows, MOST_VECTOR_ROWS));
    for (int part = 0; part < num_parts; part++) {
        const int first = num_rows * part / num_parts;
        work(first, num_rows * (part + 1) / num_parts - first);
    }
}

// Rows times panels [begin, end) of the result. rows(i, count): LeftVectors of so many from i on. A panel passes once for each
// part of the rows, and meanwhile the next one comes to the second-level cache, an equal part of it each time.
template <bool IS_GATED, class Product, class Rows>
void multiply_rows_by_vectors(const Target<typename Product::Value>& out, int first_row, int num_rows, const Rows& rows,
                              const Product& product, int64_t begin, int64_t end, int64_t following, bool is_streamed) {
    using Numbers = typename Product::Numbers;
    alignas(64) typename Product::Sum sums[MOST_VECTOR_ROWS * PANEL];
    alignas(64) float gates[MOST_VECTOR_ROWS * PANEL];
    const int num_steps = product.num_steps(), num_parts = num_parts_of(num_rows), num_asks = num_steps * num_parts;
    for (int64_t panel = begin; panel < end; panel++) {
        const int64_t next = panel + 1 < end ? panel + 1 : following, ups = panel + product.num_out() / 2 / PANEL;
        Ahead ahead(product.panel(next), num_steps, num_asks), ahead_ups(product.panel(next + ups - panel), num_steps, num_asks);
        int part = 0;
        for (int block = 0; block < num_rows; block += ROWS)
            for_each_part(std::min(ROWS, num_rows - block), [&](int first, int count) {
                const auto multiply = [&](const LeftVectors& left, int64_t current, int64_t after, Ahead& meanwhile) {
                    const char *values = product.panel(current), *following = product.panel(after);
                    if (num_parts == 1) return multiply_vectors<Numbers>(sums, PANEL, left, {values}, Passing{following}, num_steps);
                    multiply_vectors<Numbers>(sums, PANEL, left, {values}, Far{following, &meanwhile}, num_steps);
                };
                const int row = first_row + block + first;
                const LeftVectors left = rows(row, count);
                const int64_t after = ++part < num_parts ? panel : next;
                if (IS_GATED) {
                    multiply(left, panel, ups, ahead);
                    Writer<Becomes::GATES, Product> writer(product, out, row, gates, false);
                    writer.begin(row, count, panel, panel, sums);
                    writer.write(count);
                }
                multiply(left, IS_GATED ? ups : panel, after, IS_GATED ? ahead_ups : ahead);
                Writer<IS_GATED ? Becomes::GATED : Becomes::RESULT, Product> writer(product, out, row, gates, is_streamed);
                writer.begin(row, count, IS_GATED ? ups : panel, panel, sums);
                writer.write(count);
            });
    }
    if (is_streamed) _mm_sfence();  // before others are told that it is done
}

}  // namespace weft

#endif
