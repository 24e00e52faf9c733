// How sixteen lanes change places. A quarter is four lanes, 128 bits.

#pragma once

#include "lanes.h"

namespace weft {

// Every second lane of a, then of b: from the first one on, from the second.
inline Floats even_lanes(const Floats& a, const Floats& b) {
#ifdef WEFT_HAS_AVX2
    const auto of = [](const Floats& x) {
        const __m256d mixed = (__m256d)_mm256_shuffle_ps((__m256)x.half[0], (__m256)x.half[1], 0x88);
        return (Floats::Half)_mm256_permute4x64_pd(mixed, 0xd8);
    };
    return {{of(a), of(b)}};
#else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}
inline Floats odd_lanes(const Floats& a, const Floats& b) {
#ifdef WEFT_HAS_AVX2
    const auto of = [](const Floats& x) {
        const __m256d mixed = (__m256d)_mm256_shuffle_ps((__m256)x.half[0], (__m256)x.half[1], 0xdd);
        return (Floats::Half)_mm256_permute4x64_pd(mixed, 0xd8);
    };
    return {{of(a), of(b)}};
#else
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#endif
}

#ifdef WEFT_HAS_PAIRS

// Of each quarter, the elements of T of its first or second half by turns with those of b.
template <class T>
inline Ints unpack_low(const Ints& a, const Ints& b) {
#ifdef WEFT_HAS_AVX512
    const __m512i x = (__m512i)a, y = (__m512i)b;
    if (sizeof(T) == 1) return (Ints)_mm512_unpacklo_epi8(x, y);
    if (sizeof(T) == 2) return (Ints)_mm512_unpacklo_epi16(x, y);
    if (sizeof(T) == 4) return (Ints)_mm512_unpacklo_epi32(x, y);
    return (Ints)_mm512_unpacklo_epi64(x, y);
#else
    return by_halves(
        [](auto a, auto b) {
            const __m256i x = (__m256i)a, y = (__m256i)b;
            if (sizeof(T) == 1) return _mm256_unpacklo_epi8(x, y);
            if (sizeof(T) == 2) return _mm256_unpacklo_epi16(x, y);
            if (sizeof(T) == 4) return _mm256_unpacklo_epi32(x, y);
            return _mm256_unpacklo_epi64(x, y);
        },
        a, b);
#endif
}

template <class T>
inline Ints unpack_high(const Ints& a, const Ints& b) {
#ifdef WEFT_HAS_AVX512
    const __m512i x = (__m512i)a, y = (__m512i)b;
    if (sizeof(T) == 1) return (Ints)_mm512_unpackhi_epi8(x, y);
    if (sizeof(T) == 2) return (Ints)_mm512_unpackhi_epi16(x, y);
    if (sizeof(T) == 4) return (Ints)_mm512_unpackhi_epi32(x, y);
    return (Ints)_mm512_unpackhi_epi64(x, y);
#else
    return by_halves(
        [](auto a, auto b) {
            const __m256i x = (__m256i)a, y = (__m256i)b;
            if (sizeof(T) == 1) return _mm256_unpackhi_epi8(x, y);
            if (sizeof(T) == 2) return _mm256_unpackhi_epi16(x, y);
            if (sizeof(T) == 4) return _mm256_unpackhi_epi32(x, y);
            return _mm256_unpackhi_epi64(x, y);
        },
        a, b);
#endif
}

// Quarters I and J of a, then of b; I < J.
template <int I, int J>
inline Ints quarters_of(const Ints& a, const Ints& b) {
#ifdef WEFT_HAS_AVX512
    return (Ints)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, I | J << 2 | I << 4 | J << 6);
#else
    const auto of = [](const Ints& x) {
        constexpr int CHOICE = I % 2 | (2 + J % 2) << 4;
        return (Ints::Half)_mm256_permute2x128_si256((__m256i)x.half[I / 2], (__m256i)x.half[J / 2], CHOICE);
    };
    return {{of(a), of(b)}};
#endif
}

struct Quarter {
    int32_t lanes[4];
};

// The elements of T of both by turns: `a` gets those of their first halves, `b` of their second ones.
template <class T>
inline void interleave(Ints& a, Ints& b) {
#ifdef WEFT_HAS_AVX512
    struct Places {
        uint16_t low[32], high[32];
    };
    static constexpr Places places = [] {
        Places places{};
        constexpr int SIZE = sizeof(T) / 2;
        for (int i = 0; i < 32; i++) {
            places.low[i] = uint16_t(i / SIZE / 2 * SIZE + i % SIZE + i / SIZE % 2 * 32);
            places.high[i] = uint16_t(places.low[i] + 16);
        }
        return places;
    }();
    const __m512i x = (__m512i)a, y = (__m512i)b;
    a = (Ints)_mm512_permutex2var_epi16(x, (__m512i)load_bits(places.low), y);
    b = (Ints)_mm512_permutex2var_epi16(x, (__m512i)load_bits(places.high), y);
#else
    const auto join = [](auto first, auto second) -> Ints {
        const __m256i x = (__m256i)first, y = (__m256i)second;
        return {{(Ints::Half)_mm256_permute2x128_si256(x, y, 0x20), (Ints::Half)_mm256_permute2x128_si256(x, y, 0x31)}};
    };
    if (sizeof(T) == sizeof(Quarter)) {
        const Ints high = join(a.half[1], b.half[1]);
        a = join(a.half[0], b.half[0]), b = high;
        return;
    }
    const Ints low = unpack_low<T>(a, b), high = unpack_high<T>(a, b);
    a = join(low.half[0], high.half[0]), b = join(low.half[1], high.half[1]);
#endif
}

#ifdef WEFT_HAS_AVX2
// Eight rows of eight lanes become columns: as many as there are registers for.
inline void transpose_block(__m256i* rows) {
    __m256i pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        rows[j] = _mm256_permute2x128_si256(fours[j], fours[j + 4], 0x20);
        rows[j + 4] = _mm256_permute2x128_si256(fours[j], fours[j + 4], 0x31);
    }
}
#endif

// Rows [0, 16) of 16 lanes become columns.
inline void transpose(Ints* rows) {
#ifdef WEFT_HAS_AVX512
    Ints other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = unpack_low<int32_t>(rows[i], rows[i + 1]);
        other[i + 1] = unpack_high<int32_t>(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = unpack_low<int64_t>(other[i + j], other[i + j + 2]);
            rows[i + 2 * j + 1] = unpack_high<int64_t>(other[i + j], other[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            other[i + j] = quarters_of<0, 2>(rows[i + j], rows[i + j + 4]);
            other[i + j + 4] = quarters_of<1, 3>(rows[i + j], rows[i + j + 4]);
        }
    for (int j = 0; j < 8; j++) {
        rows[j] = quarters_of<0, 2>(other[j], other[j + 8]);
        rows[j + 8] = quarters_of<1, 3>(other[j], other[j + 8]);
    }
#else
    __m256i blocks[2][2][8];
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            for (int row = 0; row < 8; row++) blocks[i][j][row] = (__m256i)rows[8 * i + row].half[j];
            transpose_block(blocks[i][j]);
        }
    for (int i = 0; i < 2; i++)
        for (int row = 0; row < 8; row++) rows[8 * i + row] = {{(Ints::Half)blocks[0][i][row], (Ints::Half)blocks[1][i][row]}};
#endif
}

#endif

}  // namespace weft
