// Products with packed matrices by vectors, where there are no matrix tiles. Terms are those of panels.h.
//
// Some rows have their sums with all 32 outputs of a panel in registers, while the panel goes by from front to back. Each
// sum takes its inputs in their order, however many rows there are, so that the bits of a row do not depend on the others.
//
// What is multiplied is told by `Numbers`:
//     Sum, Vector             a sum, and 16 of them
//     LEFT_BYTES              that a row has for each four of an output
//     PARTS                   in which these are multiplied, one part after the other
//     IN_PARTS                whether panels may pass in parts
//     left<PART>(from)        those of a row, in all lanes
//     right<PART>(from)       four bytes of each of 16 outputs
//     add(sums, left, right)  adds their products

#pragma once

#include <vector>

#include "panels.h"

#ifdef WEFT_HAS_PAIRS

namespace weft {

#ifdef WEFT_HAS_AVX512
constexpr int MOST_VECTOR_ROWS = 12, MOST_WHOLE_ROWS = 12;  // whose sums fill 24 of the 32 registers
constexpr int MOST_UNROLLED_ROWS = 2;
constexpr int VECTOR_PREFETCH = 2;  // steps ahead
#else
constexpr int MOST_VECTOR_ROWS = 6, MOST_WHOLE_ROWS = 3;  // 12 of the 16; of more than three half a panel passes, then the other
constexpr int MOST_UNROLLED_ROWS = 0;
constexpr int VECTOR_PREFETCH = 1;
#endif

inline int num_passes(int num_rows) { return num_rows > MOST_WHOLE_ROWS ? 2 : 1; }

// `Numbers` whose rows are as their outputs are.
struct Alike {
    using Vector = Ints;
    static constexpr int LEFT_BYTES = 4, PARTS = 1;
    static constexpr bool IN_PARTS = false;

    template <int PART>
    static Ints left(const char* from) {
        int32_t four;
        std::memcpy(&four, from, sizeof(four));
        return broadcast(four);
    }
    template <int PART>
    static Ints right(const char* from) {
        return load_bits(from);
    }
};

#if defined(WEFT_HAS_AVX2) && !defined(WEFT_HAS_FOURS)
// Integers of 8 bits, as pairs of 16: two of each four, then the others.
template <bool ARE_ROWS_SIGNED, bool ARE_OUTPUTS_SIGNED>
struct FoursAsPairs {
    using Sum = int32_t;
    using Vector = Ints;
    static constexpr int LEFT_BYTES = 4, PARTS = 2;
    static constexpr bool IN_PARTS = false;

    template <int PART>
    static Ints left(const char* from) {
        return to_pairs<PART == 1, ARE_ROWS_SIGNED>(Alike::left<PART>(from));
    }
    template <int PART>
    static Ints right(const char* from) {
        return to_pairs<PART == 1, ARE_OUTPUTS_SIGNED>(load_bits(from));
    }
    static Ints add(const Ints& sums, const Ints& left, const Ints& right) { return add_pairs(sums, left, right); }
};
#endif

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

    static constexpr bool IS_FAR = true, PASSES_ONCE = false, is_begun = false;
    static constexpr int64_t RUN = RUN_BYTES;
    Lines take() const { return ahead->take(); }
};

// A part of one, whose sums may have been begun.
struct PartOfFar : Far {
    bool is_begun;
};

// One that comes from memory and is not wanted again.
struct Passing {
    const char* following;

    static constexpr bool IS_FAR = true, PASSES_ONCE = true, is_begun = false;
    static constexpr int64_t RUN = RUN_BYTES;
    static Lines take() { return {}; }
};

// What is no panel, but as two tiles are.
struct Close {
    static constexpr const char* following = nullptr;
    static constexpr bool IS_FAR = false, PASSES_ONCE = false, is_begun = false;
    static constexpr int64_t RUN = 64;
    static Lines take() { return {}; }
};

template <class Place>
inline void ask_for(const char* line) {
    _mm_prefetch(line, Place::PASSES_ONCE ? ONCE : _MM_HINT_T0);
}

// The sums of some rows with WIDTH times 16 outputs.
template <class Numbers, int NUM_ROWS, int WIDTH>
struct Totals {
    typename Numbers::Vector sums[NUM_ROWS][WIDTH] = {};

    // Adds products of four bytes of each output.
    void add(const char* row, int64_t row_stride, const char* outputs, int64_t to_second) {
        add_part<0>(row, row_stride, outputs, to_second);
        if constexpr (Numbers::PARTS > 1) add_part<1>(row, row_stride, outputs, to_second);
    }

    template <int PART>
    void add_part(const char* row, int64_t row_stride, const char* outputs, int64_t to_second) {
        decltype(Numbers::template right<PART>(outputs)) right[WIDTH];
        for (int i = 0; i < WIDTH; i++) right[i] = Numbers::template right<PART>(outputs + i * to_second);
#pragma GCC unroll 16  // else GCC keeps the sums in memory
        for (int i = 0; i < NUM_ROWS; i++) {
            const auto left = Numbers::template left<PART>(row + i * row_stride);
            for (int j = 0; j < WIDTH; j++) sums[i][j] = Numbers::add(sums[i][j], left, right[j]);
        }
    }

    void read(const typename Numbers::Sum* from, int64_t stride) {
#pragma GCC unroll 16
        for (int i = 0; i < NUM_ROWS; i++, from += stride)
            for (int j = 0; j < WIDTH; j++) sums[i][j] = bit_cast<typename Numbers::Vector>(load_bits(from + j * LANES));
    }

    void write(typename Numbers::Sum* to, int64_t stride) const {
#pragma GCC unroll 16
        for (int i = 0; i < NUM_ROWS; i++, to += stride)
            for (int j = 0; j < WIDTH; j++) store(to + j * LANES, sums[i][j]);
    }
};

// NUM_ROWS rows times 32 outputs: the sums [rows][PANEL]. ROW_STRIDE: of the left side, where it is known now; else 0. A function of
// its own, whatever is around it: else GCC may keep sums in memory for want of registers.
template <class Numbers, int NUM_ROWS, int64_t ROW_STRIDE, class Place>
__attribute__((noinline)) void multiply_so_many_vectors(typename Numbers::Sum* sums, int64_t sums_stride, const LeftVectors& left,
                              const RightVectors& right, const Place& place, int num_steps) {
    constexpr int WIDTH = NUM_ROWS > MOST_WHOLE_ROWS ? 1 : 2;
    const int64_t row_stride = ROW_STRIDE ? ROW_STRIDE : left.row_stride, to_second = right.second;
    for (int first_output = 0; first_output < PANEL; first_output += WIDTH * LANES) {
        Totals<Numbers, NUM_ROWS, WIDTH> totals;
        if (place.is_begun) totals.read(sums + first_output, sums_stride);
        const char *row = left.first, *values = right.first + first_output / LANES * to_second;
        for (int step = 0; step < num_steps; step++, values += right.step_stride, row += left.step_stride) {
            const int later = step + VECTOR_PREFETCH - num_steps;
            const char* ahead = later < 0 ? values + VECTOR_PREFETCH * STEP_BYTES : place.following + later * STEP_BYTES;
            const Lines asked = place.take();
            for (int run = 0; run < 16; run++) {
                if (run < asked.count) _mm_prefetch(asked.first + run * 64, _MM_HINT_T1);
                if (Place::IS_FAR) {  // the hardware looks less far ahead than memory is slow
                    ask_for<Place>(ahead + run * 128);
                    if (WIDTH > 1) ask_for<Place>(ahead + run * 128 + 64);
                }
                totals.add(row + run * Numbers::LEFT_BYTES, row_stride, values + run * Place::RUN, to_second);
            }
        }
        totals.write(sums + first_output, sums_stride);
    }
}

// The same for so few rows that only memory counts, and a panel that passes once: a step is all written out, and the one
// after it is asked for, so that as many loads are under way as there can be. With several parts there is too much to do
// after GCC asks for all of a step at its beginning: the loop above is faster.
template <class Numbers, int NUM_ROWS>
void multiply_unrolled_vectors(typename Numbers::Sum* sums, int64_t sums_stride, const LeftVectors& left, const char* values,
                               const Passing& place, int num_steps) {
    Totals<Numbers, NUM_ROWS, 2> totals;
    const char* row = left.first;
    const char* const last = values + (num_steps - 1) * STEP_BYTES;
    for (; values <= last; values += STEP_BYTES, row += left.step_stride) {
        const char* const ahead = values < last ? values + STEP_BYTES : place.following;
#pragma GCC unroll 16
        for (int run = 0; run < 16; run++) {
            ask_for<Passing>(ahead + run * 128);
            ask_for<Passing>(ahead + run * 128 + 64);
            totals.add(row + run * Numbers::LEFT_BYTES, left.row_stride, values + run * RUN_BYTES, TO_SECOND);
        }
    }
    totals.write(sums, sums_stride);
}

// The same for 1 to MOST rows, a number that is known when it runs.
template <class Numbers, int MOST = MOST_VECTOR_ROWS, class Place>
void multiply_vectors(typename Numbers::Sum* sums, int64_t sums_stride, const LeftVectors& left, const RightVectors& right,
                      const Place& place, int num_steps) {
    if (left.num_rows == MOST) {
        if constexpr (Place::PASSES_ONCE && MOST <= MOST_UNROLLED_ROWS && Numbers::PARTS == 1)
            return multiply_unrolled_vectors<Numbers, MOST>(sums, sums_stride, left, right.first, place, num_steps);
        constexpr int64_t PACKED = 16 * Numbers::LEFT_BYTES;
        if (Place::IS_FAR && left.row_stride == PACKED)  // with places that the compiler knows, none is lost to registers
            return multiply_so_many_vectors<Numbers, MOST, PACKED>(sums, sums_stride, left, right, place, num_steps);
        return multiply_so_many_vectors<Numbers, MOST, 0>(sums, sums_stride, left, right, place, num_steps);
    }
    if constexpr (MOST > 1) multiply_vectors<Numbers, MOST - 1>(sums, sums_stride, left, right, place, num_steps);
}

// Calls work(first row, rows) for parts of some rows, about equally many in each that is of the same block of `most`.
template <class Work>
void for_each_part(int num_rows, const Work& work, int most = ROWS) {
    for (int block = 0; block < num_rows; block += most) {
        const int rows = std::min(most, num_rows - block), num_parts = int(divide_up(rows, MOST_VECTOR_ROWS));
        for (int part = 0; part < num_parts; part++) {
            const int first = rows * part / num_parts;
            work(block + first, rows * (part + 1) / num_parts - first);
        }
    }
}

// Rows from `first_row` on, some at a time, times panels [begin, end) of the result. A panel passes for each of these, or one part
// of it does and then the next, and meanwhile the next panel comes to the second-level cache, an equal part of it each time.
template <bool IS_GATED, class Product>
void multiply_by_vectors(const Target<typename Product::Value>& out, int first_row, const std::vector<LeftVectors>& rows, const Product& product,
                         Parts parts, int64_t begin, int64_t end, int64_t following, bool is_streamed) {
    using Numbers = typename Product::Numbers;
    using Sum = typename Product::Sum;
    static thread_local Buffer<Sum> sums_buffer;
    static thread_local Buffer<float> gates_buffer;
    const int num_steps = parts.num_steps;
    int num_asks = 0, num_rows = 0;
    for (const LeftVectors& some : rows) num_asks += num_steps * num_passes(some.num_rows), num_rows += some.num_rows;
    Sum* const sums = sums_buffer.room(size_t(num_rows) * PANEL);
    float* const gates = IS_GATED ? gates_buffer.room(size_t(num_rows) * PANEL) : nullptr;
    const auto multiply = [&](int64_t panel, int64_t next, int64_t out_panel, auto writer) {
        Ahead ahead(product.panel(next), num_steps, num_asks);
        for (int step = 0; step < num_steps; step += parts.size) {
            const int count = std::min(parts.size, num_steps - step);
            const char* const values = product.panel(panel) + step * STEP_BYTES;
            const char* const after = step + count < num_steps ? values + count * STEP_BYTES : product.panel(next);
            int row = 0;
            for (const LeftVectors& some : rows) {
                Sum* const to = sums + row * PANEL;
                if (num_asks == num_steps && !parts.are_many()) {
                    multiply_vectors<Numbers>(to, PANEL, some, {values}, Passing{after}, num_steps);
                } else {
                    const LeftVectors left{some.first + step * some.step_stride, some.row_stride, some.step_stride, some.num_rows};
                    const Far far{&some != &rows.back() ? values : after, &ahead};
                    if constexpr (Numbers::IN_PARTS)
                        multiply_vectors<Numbers>(to, PANEL, left, {values}, PartOfFar{far, step > 0}, count);
                    else
                        multiply_vectors<Numbers>(to, PANEL, left, {values}, far, count);
                }
                if (step + count == num_steps) {
                    writer.begin(first_row + row, some.num_rows, panel, out_panel, to);
                    writer.write(some.num_rows);
                }
                row += some.num_rows;
            }
        }
    };
    for (int64_t panel = begin; panel < end; panel++) {
        const int64_t next = panel + 1 < end ? panel + 1 : following, ups = panel + product.num_out() / 2 / PANEL;
        if (IS_GATED) {
            multiply(panel, ups, panel, Writer<Becomes::GATES, Product>(product, out, first_row, gates, false));
            multiply(ups, next, panel, Writer<Becomes::GATED, Product>(product, out, first_row, gates, is_streamed));
        } else {
            multiply(panel, next, panel, Writer<Becomes::RESULT, Product>(product, out, first_row, nullptr, is_streamed));
        }
    }
    if (is_streamed) _mm_sfence();  // before others are told that it is done
}

}  // namespace weft

#endif
