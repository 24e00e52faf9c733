// Sixteen lanes of 32 bits, and what the kernels do with them: one register where there is AVX512, two where there is AVX2; on
// other machines the compiler splits them, and nothing here that wants an instruction of its own is there.
//
// Vector extensions of GCC and Clang. A quarter is four lanes, 128 bits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WEFT_HAS_AVX512
#elif defined(__AVX2__) && defined(__FMA__)
#define WEFT_HAS_AVX2
#endif
#if (defined(WEFT_HAS_AVX512) && defined(__AVX512VNNI__)) || (defined(WEFT_HAS_AVX2) && defined(__AVXVNNI__))
#define WEFT_HAS_FOURS  // products of four bytes of each lane, by one instruction
#endif
#if defined(WEFT_HAS_AVX512) || defined(WEFT_HAS_AVX2)
#define WEFT_HAS_PAIRS
#include <immintrin.h>
#endif

namespace weft {

constexpr int LANES = 16;

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

#ifdef WEFT_HAS_AVX2

// Lanes in two registers: GCC keeps a vector in memory that is longer than its registers.
template <class T>
struct Halved {
    typedef T Half __attribute__((vector_size(32)));
    typedef Halved<int32_t> Mask;

    Half half[2];

    T operator[](int lane) const { return half[lane / 8][lane % 8]; }

#define WEFT_OPERATOR(RESULT, OP)                                                                                        \
    friend RESULT operator OP(const Halved& a, const Halved& b) { return {{a.half[0] OP b.half[0], a.half[1] OP b.half[1]}}; } \
    friend RESULT operator OP(const Halved& a, T b) { return {{a.half[0] OP b, a.half[1] OP b}}; }                       \
    friend RESULT operator OP(T a, const Halved& b) { return {{a OP b.half[0], a OP b.half[1]}}; }
    WEFT_OPERATOR(Halved, +)
    WEFT_OPERATOR(Halved, -)
    WEFT_OPERATOR(Halved, *)
    WEFT_OPERATOR(Halved, /)
    WEFT_OPERATOR(Halved, &)
    WEFT_OPERATOR(Halved, |)
    WEFT_OPERATOR(Halved, ^)
    WEFT_OPERATOR(Mask, ==)
    WEFT_OPERATOR(Mask, !=)
    WEFT_OPERATOR(Mask, <)
    WEFT_OPERATOR(Mask, >)
#undef WEFT_OPERATOR
    friend Halved operator<<(const Halved& a, int bits) { return {{a.half[0] << bits, a.half[1] << bits}}; }
    friend Halved operator>>(const Halved& a, int bits) { return {{a.half[0] >> bits, a.half[1] >> bits}}; }
    friend Halved operator-(const Halved& a) { return {{-a.half[0], -a.half[1]}}; }
    friend Halved operator~(const Halved& a) { return {{~a.half[0], ~a.half[1]}}; }
    Halved& operator+=(const Halved& other) { return *this = *this + other; }
    Halved& operator&=(const Halved& other) { return *this = *this & other; }
    Halved& operator|=(const Halved& other) { return *this = *this | other; }
};

using Floats = Halved<float>;
using Ints = Halved<int32_t>;
using Words = Halved<uint32_t>;

// GCC copies 64 bytes by way of memory, 16 at a time.
template <class To, class T>
inline To bit_cast(const Halved<T>& from) {
    using Half = typename To::Half;
    return {{(Half)from.half[0], (Half)from.half[1]}};
}

template <class Wide>
inline Wide load_64(const void* from) {
    using Half = typename Wide::Half;
    const auto* const halves = static_cast<const __m256i*>(from);
    return {{(Half)_mm256_loadu_si256(halves), (Half)_mm256_loadu_si256(halves + 1)}};
}

template <class T>
inline void store_64(void* to, const Halved<T>& x) {
    auto* const halves = static_cast<__m256i*>(to);
    _mm256_storeu_si256(halves, (__m256i)x.half[0]);
    _mm256_storeu_si256(halves + 1, (__m256i)x.half[1]);
}

// What `work` makes of each half.
template <class Result = Ints, class Work, class... Wide>
inline Result by_halves(const Work& work, const Wide&... wide) {
    using Half = typename Result::Half;
    return {{(Half)work(wide.half[0]...), (Half)work(wide.half[1]...)}};
}

#else

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

#endif

inline Floats broadcast(float x) { return x - Floats{}; }
inline Ints broadcast(int32_t x) { return x - Ints{}; }

#ifndef WEFT_HAS_AVX2
template <class Wide>
inline Wide load_64(const void* from) {
    Wide x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}

template <class Wide>
inline void store_64(void* to, const Wide& x) {
    std::memcpy(to, &x, sizeof(x));
}
#endif

inline Floats load(const float* from) { return load_64<Floats>(from); }
inline void store(float* to, const Floats& x) { store_64(to, x); }
inline void store(int32_t* to, const Ints& x) { store_64(to, x); }

// 64 bytes, whatever they are.
inline Ints load_bits(const void* from) { return load_64<Ints>(from); }
inline void store_bits(void* to, const Ints& x) { store_64(to, x); }

inline Floats choose(const Ints& is_first, const Floats& first, const Floats& second) {
    return bit_cast<Floats>((bit_cast<Ints>(first) & is_first) | (bit_cast<Ints>(second) & ~is_first));
}

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

#ifdef WEFT_HAS_PAIRS

// a * b + c, rounded once.
inline Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
#ifdef WEFT_HAS_AVX512
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return by_halves<Floats>([](auto a, auto b, auto c) { return _mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }, a, b, c);
#endif
}

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

// A product that is rounded, whatever the compiler would make of it and a sum.
inline Floats multiply_rounded(const Floats& a, const Floats& b) {
#ifdef WEFT_HAS_AVX512
    return (Floats)_mm512_mul_round_ps((__m512)a, (__m512)b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Floats product = a * b;
    asm("" : "+x"(product.half[0]), "+x"(product.half[1]));
    return product;
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
