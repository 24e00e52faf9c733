// What the kernels do with sixteen lanes: instructions of AVX512 and AVX2, and on other machines what the compiler makes of it;
// there nothing that wants an instruction of its own is here.

#pragma once

#include <algorithm>

#include "lanes.h"

namespace weft {

inline Floats choose(const Ints& is_first, const Floats& first, const Floats& second) {
    return bit_cast<Floats>((bit_cast<Ints>(first) & is_first) | (bit_cast<Ints>(second) & ~is_first));
}

// a where it is larger, else b: also where either is a NaN.
inline Floats larger(const Floats& a, const Floats& b) {
#if defined(WEFT_HAS_AVX512)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(WEFT_HAS_AVX2)
    return by_halves<Floats>([](auto a, auto b) { return _mm256_max_ps((__m256)a, (__m256)b); }, a, b);
#else
    return choose(a > b, a, b);
#endif
}

inline Ints larger(const Ints& a, const Ints& b) {
#if defined(WEFT_HAS_AVX512)
    return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(WEFT_HAS_AVX2)
    return by_halves([](auto a, auto b) { return _mm256_max_epi32((__m256i)a, (__m256i)b); }, a, b);
#else
    const Ints is_more = a > b;
    return (a & is_more) | (b & ~is_more);
#endif
}

inline float sum(const Floats& x) {
#ifdef WEFT_HAS_AVX512
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
#endif
}

inline int32_t sum(const Ints& x) {
#ifdef WEFT_HAS_AVX512
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    uint32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += uint32_t(x[lane]);
    return int32_t(total);
#endif
}

inline float largest(const Floats& x) {
#ifdef WEFT_HAS_AVX512
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
#endif
}

inline int32_t largest(const Ints& x) {
#ifdef WEFT_HAS_AVX512
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = std::max(most, int32_t(x[lane]));
    return most;
#endif
}

// Whether a mask has a lane.
inline bool has_any(const Ints& mask) {
#ifdef WEFT_HAS_AVX512
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
    return largest(mask & 1);
#endif
}

// Of whole numbers.
inline Ints to_whole(const Floats& x) {
#ifdef WEFT_HAS_AVX2
    return by_halves([](auto x) { return _mm256_cvttps_epi32((__m256)x); }, x);
#else
    return __builtin_convertvector(x, Ints);
#endif
}

inline Floats to_floats(const Ints& x) {
#ifdef WEFT_HAS_AVX2
    return by_halves<Floats>([](auto x) { return _mm256_cvtepi32_ps((__m256i)x); }, x);
#else
    return __builtin_convertvector(x, Floats);
#endif
}

inline Ints load_bytes(const int8_t* from) {
#ifdef WEFT_HAS_AVX2
    const auto half = [](const int8_t* from) { return (Ints::Half)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))); };
    return {{half(from), half(from + 8)}};
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(bytes, Ints);
#endif
}

inline Words load_half_words(const uint16_t* from) {
#ifdef WEFT_HAS_AVX2
    const auto half = [](const uint16_t* from) { return (Words::Half)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); };
    return {{half(from), half(from + 8)}};
#else
    typedef uint16_t HalfWords __attribute__((vector_size(32)));
    HalfWords halves;
    std::memcpy(&halves, from, sizeof(halves));
    return __builtin_convertvector(halves, Words);
#endif
}

#ifdef WEFT_HAS_AVX2
inline __m256i pack_half_words(const Words& x) {
    const __m256i mixed = _mm256_packus_epi32((__m256i)x.half[0], (__m256i)x.half[1]);
    return _mm256_permute4x64_epi64(mixed, 0xd8);
}
#endif

// Of words below 2^16.
inline void store_half_words(uint16_t* to, const Words& x) {
#ifdef WEFT_HAS_AVX2
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pack_half_words(x));
#else
    typedef uint16_t HalfWords __attribute__((vector_size(32)));
    const HalfWords halves = __builtin_convertvector(x, HalfWords);
    std::memcpy(to, &halves, sizeof(halves));
#endif
}

// a * b + c, rounded once where the CPU does so in one instruction. No compiler makes it of other sums (-ffp-contract=off): what is
// written in two places has the same bits in both.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
#if defined(WEFT_HAS_AVX512)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(WEFT_HAS_PAIRS)
    return by_halves<Floats>([](auto a, auto b, auto c) { return _mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }, a, b, c);
#else
    Floats result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = multiply_add(a[lane], b[lane], c[lane]);
    return result;
#endif
}

inline Floats multiply_add(const Floats& a, float b, const Floats& c) { return multiply_add(a, broadcast(b), c); }
inline Floats multiply_add(const Floats& a, float b, float c) { return multiply_add(a, broadcast(b), broadcast(c)); }
inline Floats multiply_add(const Floats& a, const Floats& b, float c) { return multiply_add(a, b, broadcast(c)); }

#ifdef WEFT_HAS_PAIRS

// sums + a * b, where all registers are taken by sums: each stays in its own.
inline Floats accumulate(const Floats& sums, const Floats& a, const Floats& b) {
#ifdef WEFT_HAS_AVX512
    return multiply_add(a, b, sums);
#else
    return by_halves<Floats>(
        [](auto sums, auto a, auto b) {
            asm("vfmadd231ps %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
            return sums;
        },
        sums, a, b);
#endif
}

// To the nearest; out of range, and of a NaN, the least number.
inline Ints to_nearest(const Floats& x) {
#ifdef WEFT_HAS_AVX512
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#else
    return by_halves([](auto x) { return _mm256_cvtps_epi32((__m256)x); }, x);
#endif
}

#ifdef WEFT_HAS_AVX2
inline __m128i pack_bytes(const Ints& x) {
    const __m256i mixed = _mm256_packs_epi32((__m256i)x.half[0], (__m256i)x.half[1]);
    const __m256i in_order = _mm256_permute4x64_epi64(mixed, 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
}
#endif

// What fits into 8 bits, else the nearest that does; the bits of `flip` are changed in each.
inline void store_saturated_bytes(int8_t* to, const Ints& x, int flip) {
#ifdef WEFT_HAS_AVX512
    const __m128i bytes = _mm512_cvtsepi32_epi8((__m512i)x);
#else
    const __m128i bytes = pack_bytes(x);
#endif
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_xor_si128(bytes, _mm_set1_epi8(char(flip))));
}

// The lowest 8 bits.
inline void store_low_bytes(void* to, const Ints& x) {
#ifdef WEFT_HAS_AVX512
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x));
#else
    _mm_storeu_si128(static_cast<__m128i*>(to), pack_bytes(x << 24 >> 24));
#endif
}

// The first `count` of LANES; behind them is 0.
inline Floats load_first(const float* from, int count) {
#ifdef WEFT_HAS_AVX512
    return (Floats)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
#else
    Floats x{};
    std::memcpy(&x, from, size_t(count) * sizeof(float));
    return x;
#endif
}

// The first `count` of 16 bytes; behind them is 0.
inline void copy_first_bytes(void* to, const void* from, int count) {
#ifdef WEFT_HAS_AVX512
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm_maskz_loadu_epi8(__mmask16((1u << count) - 1), from));
#else
    std::memset(to, 0, 16);
    std::memcpy(to, from, size_t(count));
#endif
}

// Past the caches; `to` is on the boundary of a cache line.
inline void stream(void* to, const Ints& x) {
#ifdef WEFT_HAS_AVX512
    _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)x);
#else
    _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)x.half[0]);
    _mm256_stream_si256(static_cast<__m256i*>(to) + 1, (__m256i)x.half[1]);
#endif
}

#ifdef WEFT_HAS_AVX2
// Of each lane's four bytes the first and third, or the second and fourth, as a pair of 16 bits.
template <bool IS_ODD, bool IS_SIGNED>
inline Ints to_pairs(const Ints& fours) {
    return by_halves(
        [](auto fours) {
            const __m256i x = (__m256i)fours;
            if (IS_SIGNED) return _mm256_srai_epi16(IS_ODD ? x : _mm256_slli_epi16(x, 8), 8);
            return IS_ODD ? _mm256_srli_epi16(x, 8) : _mm256_and_si256(x, _mm256_set1_epi16(0xff));
        },
        fours);
}

// Adds to each lane the products of its pair; as accumulate.
inline Ints add_pairs(const Ints& sums, const Ints& a, const Ints& b) {
    return by_halves(
        [](auto sums, auto a, auto b) {
            const __m256i products = _mm256_madd_epi16((__m256i)a, (__m256i)b);
            asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(products));  // GCC would add products of two pairs first, and keep them till then
            return sums;
        },
        sums, a, b);
}
#endif

#if !defined(WEFT_HAS_AVX512) || defined(WEFT_HAS_FOURS)
// Adds to each lane the products of its four bytes, those of a unsigned, those of b signed.
inline Ints add_fours(const Ints& sums, const Ints& a, const Ints& b) {
#if defined(WEFT_HAS_AVX512)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(WEFT_HAS_FOURS)
    return by_halves([](auto sums, auto a, auto b) { return _mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b); }, sums, a, b);
#else
    return add_pairs(add_pairs(sums, to_pairs<false, false>(a), to_pairs<false, true>(b)), to_pairs<true, false>(a), to_pairs<true, true>(b));
#endif
}
#endif

#endif

}  // namespace weft
