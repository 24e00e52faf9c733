// Rows in 8 bits: every row has a scale of its own, the largest of its magnitudes over 127. int8_linear.py says the same
// in torch, bit for bit.

#pragma once

#include "elementwise.h"
#include "shuffles.h"
#include "threads.h"
#include "vector.h"

#if (defined(WEFT_HAS_FOURS) && defined(__AVX512VL__)) || defined(WEFT_HAS_AVX2)
#define WEFT_HAS_INT8

#include <algorithm>

namespace weft::int8 {

constexpr int STEP = 64;               // inputs that one vector holds
constexpr float LEAST = 0x1p-100f;     // of a largest magnitude, so that its inverse is a number
constexpr float MOST = 127.0f;

inline int num_steps(int num_in) { return (num_in + STEP - 1) / STEP; }

// The largest magnitude; NaN where there is one, for its bits are larger than those of any number.
template <class T>
inline float largest_magnitude(const T* x, int64_t size) {
    Ints most{};
    const auto add = [&](const T* x) { most = larger(most, bit_cast<Ints>(load(x)) & 0x7fffffff); };
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) add(x + i);
    if (i < size) {
        T rest[LANES] = {};
        std::memcpy(rest, x + i, size_t(size - i) * sizeof(T));
        add(rest);
    }
    return bit_cast<float>(std::max(largest(most), bit_cast<int32_t>(LEAST)));
}

#if defined(WEFT_HAS_AVX512) && !WEFT_IS_FLOAT32
// Twice as many at a time.
inline float largest_magnitude(const Number* x, int64_t size) {
    __m512i most = _mm512_setzero_si512();
    const __m512i mask = _mm512_set1_epi16(0x7fff);
    for (int64_t i = 0; i < size; i += 32) {
        const __mmask32 lanes = size - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (size - i)) - 1;
        most = _mm512_max_epu16(most, _mm512_and_si512(mask, _mm512_maskz_loadu_epi16(lanes, x + i)));
    }
    const Ints both = (Ints)most;
    return bit_cast<float>(std::max(largest(larger(bit_cast<Ints>(first_half(both)), bit_cast<Ints>(second_half(both)))), bit_cast<int32_t>(LEAST)));
}
#endif

// Up to STEP values as integers, the bits of `flip` changed in each; those past the last are 0.
template <class T>
inline void round_step(int8_t* to, const T* x, int size, float inverse, int flip) {
    alignas(64) T rest[STEP] = {};
    if (size < STEP) {
        std::memcpy(rest, x, size_t(size) * sizeof(T));
        x = rest;
    }
    for (int i = 0; i < STEP; i += LANES) store_saturated_bytes(to + i, to_nearest(load(x + i) * inverse), flip);
}

// A row, its steps `step_stride` bytes apart; returns its scale. `flip` is 0, or 0x80 to make the integers unsigned by
// adding 128.
template <class T>
inline float quantize_row(int8_t* to, int64_t step_stride, const T* x, int num_in, int flip) {
    const float most = largest_magnitude(x, num_in), inverse = 1 / most * MOST;
    for (int k = 0; k < num_in; k += STEP, to += step_stride) round_step(to, x + k, num_in - k, inverse, flip);
    return most / MOST;
}

// Quantized rows, [blocks of 32 rows][steps][rows][64 inputs]: 16 rows of a step are a tile in one piece. One block is
// as high as it has rows. Where vectors multiply pairs of 16 bits, the inputs are such: of each four the first and third, then the others.
struct Left {
    static constexpr int ROWS = 32;
#ifdef WEFT_HAS_FOURS
    static constexpr int ROW_BYTES = STEP;
#else
    static constexpr int ROW_BYTES = 2 * STEP;
#endif

    int8_t* values;
    float* scales;
    int num_rows, num_steps, height;

    Left(int8_t* values, float* scales, int num_rows, int num_in)
        : values(values), scales(scales), num_rows(num_rows), num_steps(int8::num_steps(num_in)), height(std::min(num_rows, ROWS)) {}

    static int64_t size(int64_t num_rows, int num_in) {
        const int64_t rows = num_rows <= ROWS ? num_rows : (num_rows + ROWS - 1) / ROWS * ROWS;
        return rows * int8::num_steps(num_in) * ROW_BYTES;
    }
    int64_t step_stride() const { return int64_t(height) * ROW_BYTES; }
    int8_t* row(int i) const { return values + i / ROWS * num_steps * step_stride() + i % ROWS * ROW_BYTES; }

    // When its 64 bytes of each step are there.
    void finish_row([[maybe_unused]] int i) const {
#ifndef WEFT_HAS_FOURS
        int8_t* bytes = row(i);
        for (int step = 0; step < num_steps; step++, bytes += step_stride()) {
            Ints first = to_pairs<false, false>(load_bits(bytes)), second = to_pairs<true, false>(load_bits(bytes));
            interleave<int32_t>(first, second);
            store_bits(bytes, first);
            store_bits(bytes + STEP, second);
        }
#endif
    }
};

}  // namespace weft::int8

#endif
