// Rows in 8 bits: every row has a scale of its own, the largest of its magnitudes over 127. int8_linear.py says the same
// in torch, bit for bit.

#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WEFT_HAS_INT8

#include <algorithm>
#include <immintrin.h>

#include "elementwise.h"
#include "threads.h"
#include "vector.h"

namespace weft::int8 {

constexpr int STEP = 64;               // inputs that one vector holds
constexpr float LEAST = 0x1p-100f;     // of a largest magnitude, so that its inverse is a number
constexpr float MOST = 127.0f;

inline int num_steps(int num_in) { return (num_in + STEP - 1) / STEP; }

// The largest magnitude; NaN where there is one, for its bits are larger than those of any number.
inline float largest_magnitude(const BFloat16* x, int64_t size) {
    __m512i most = _mm512_setzero_si512();
    const __m512i mask = _mm512_set1_epi16(0x7fff);
    for (int64_t i = 0; i < size; i += 32) {
        const __mmask32 lanes = size - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (size - i)) - 1;
        most = _mm512_max_epu16(most, _mm512_and_si512(mask, _mm512_maskz_loadu_epi16(lanes, x + i)));
    }
    const __m512i even = _mm512_slli_epi32(most, 16), odd = _mm512_and_si512(most, _mm512_set1_epi32(int(0xffff0000)));
    const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(even, odd));
    return bit_cast<float>(std::max(bits, bit_cast<uint32_t>(LEAST)));
}

inline float largest_magnitude(const float* x, int64_t size) {
    __m512i most = _mm512_setzero_si512();
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 lanes = __mmask16(size - i >= LANES ? 0xffff : (1 << (size - i)) - 1);
        most = _mm512_max_epu32(most, _mm512_and_si512(mask, _mm512_maskz_loadu_epi32(lanes, x + i)));
    }
    return bit_cast<float>(std::max(uint32_t(_mm512_reduce_max_epu32(most)), bit_cast<uint32_t>(LEAST)));
}

// Up to STEP values as integers; those past the last are 0.
template <class T>
inline __m512i round_step(const T* x, int size, __m512 inverse) {
    alignas(64) T rest[STEP] = {};
    if (size < STEP) {
        std::memcpy(rest, x, size_t(size) * sizeof(T));
        x = rest;
    }
    const auto part = [=](int i) {
        return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps((__m512)load(x + i), inverse)));
    };
    const __m256i first = _mm256_set_m128i(part(LANES), part(0)), second = _mm256_set_m128i(part(3 * LANES), part(2 * LANES));
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

// A row, its steps `step_stride` bytes apart; returns its scale. `flip` is 0, or 0x80 to make the integers unsigned by
// adding 128.
template <class T>
inline float quantize_row(int8_t* to, int64_t step_stride, const T* x, int num_in, int flip) {
    const float most = largest_magnitude(x, num_in);
    const __m512 inverse = _mm512_set1_ps(1 / most * MOST);
    const __m512i flips = _mm512_set1_epi8(char(flip));
    for (int k = 0; k < num_in; k += STEP, to += step_stride)
        _mm512_storeu_si512(to, _mm512_xor_si512(round_step(x + k, num_in - k, inverse), flips));
    return most / MOST;
}

// Quantized rows, [blocks of 32 rows][steps][rows][64 inputs]: 16 rows of a step are a tile in one piece. One block is
// as high as it has rows.
struct Left {
    static constexpr int ROWS = 32;

    int8_t* values;
    float* scales;
    int num_rows, num_steps, height;

    Left(int8_t* values, float* scales, int num_rows, int num_in)
        : values(values), scales(scales), num_rows(num_rows), num_steps(int8::num_steps(num_in)), height(std::min(num_rows, ROWS)) {}

    static int64_t size(int64_t num_rows, int num_in) {
        const int64_t rows = num_rows <= ROWS ? num_rows : (num_rows + ROWS - 1) / ROWS * ROWS;
        return rows * int8::num_steps(num_in) * STEP;
    }
    int64_t step_stride() const { return int64_t(height) * STEP; }
    int8_t* row(int i) const { return values + i / ROWS * num_steps * step_stride() + i % ROWS * STEP; }
};

}  // namespace weft::int8

#endif
