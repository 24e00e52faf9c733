// Sixteen float32 lanes on any machine (the compiler splits them where registers are shorter), and the two element
// types of tensors. Vector extensions of GCC and Clang.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WEFT_HAS_PAIRS
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace weft {

constexpr int LANES = 16;

#ifdef __AVX512F__
// Where vectors have what they read soon from memory, and what they read once. In 32 KB of a first-level cache (a Zen 4) such lines
// cost much of the speed of memory, in 48 (a Zen 5) the second-level one does.
constexpr bool IS_FIRST_LEVEL_LARGE = WEFT_FIRST_LEVEL_KB >= 48;
constexpr _mm_hint SOON = IS_FIRST_LEVEL_LARGE ? _MM_HINT_T0 : _MM_HINT_T1, ONCE = IS_FIRST_LEVEL_LARGE ? _MM_HINT_NTA : _MM_HINT_T1;
#endif

// Memory that only grows, on the boundary of a cache line: tiles and vectors that cross one cost twice.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // At least `size` elements, whatever was in them.
    T* room(size_t size) {
        if (size > size_) {
            std::free(data_);
            const size_t unit = size * sizeof(T) < HUGE_PAGE ? LINE : HUGE_PAGE;
            const size_t bytes = (size * sizeof(T) + unit - 1) / unit * unit;
            data_ = static_cast<T*>(std::aligned_alloc(unit, bytes));
            size_ = bytes / sizeof(T);
#ifdef __linux__
            if (unit == HUGE_PAGE) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
        }
        return data_;
    }

  private:
    static constexpr size_t LINE = 64, HUGE_PAGE = 2 << 20;
    T* data_ = nullptr;
    size_t size_ = 0;
};

// Whether a result is best written past the caches, a line at a time. Rows that are far apart cost their own cache lines when
// so many of them are written, so much that it is faster to fetch what was written from memory again.
inline bool goes_past_caches(const void* out, int64_t num_rows, int64_t row_bytes) {
    constexpr int64_t LEAST = 4 << 20;  // bytes
    const bool is_on_lines = (reinterpret_cast<uintptr_t>(out) | uintptr_t(row_bytes)) % 64 == 0;
    return is_on_lines && num_rows * row_bytes > LEAST;
}

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t HalfWords __attribute__((vector_size(32)));

// The upper half of a float32.
struct BFloat16 {
    uint16_t bits;
};

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

inline void put(float* place, float x) { *place = x; }

// To nearest, ties to even; a NaN stays one.
inline void put(BFloat16* place, float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    place->bits = uint16_t(x == x ? rounded : 0x7fc0);
}

inline Floats broadcast(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}

inline Floats load(const BFloat16* from) {
    HalfWords halves;
    std::memcpy(&halves, from, sizeof(halves));
    return bit_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

inline void store(BFloat16* to, Floats x) {
    const Words bits = bit_cast<Words>(x);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words is_number = bit_cast<Words>(x == x);
    const HalfWords halves = __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), HalfWords);
    std::memcpy(to, &halves, sizeof(halves));
}

// Two vectors, one after the other; streamed: past the caches.
inline void store_two(float* to, Floats first, Floats second, bool is_streamed) {
#ifdef __AVX512F__
    if (is_streamed) {
        _mm512_stream_ps(to, (__m512)first);
        _mm512_stream_ps(to + LANES, (__m512)second);
        return;
    }
#endif
    store(to, first);
    store(to + LANES, second);
}

inline void store_two(BFloat16* to, Floats first, Floats second, bool is_streamed) {
#ifdef __AVX512BF16__
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    if (is_streamed)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), both);
    else
        _mm512_storeu_si512(to, both);
#else
    store(to, first);
    store(to + LANES, second);
#endif
}

// As they are when they have been stored as T.
template <class T>
inline void round_two(Floats& first, Floats& second) {
    if (sizeof(T) == sizeof(float)) return;
#ifdef __AVX512BF16__
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    first = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16);
    second = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
#else
    T both[2 * LANES];
    store_two(both, first, second, false);
    first = load(both), second = load(both + LANES);
#endif
}

inline Floats choose(Ints is_first, Floats first, Floats second) {
    return bit_cast<Floats>((bit_cast<Ints>(first) & is_first) | (bit_cast<Ints>(second) & ~is_first));
}

// a where it is larger, else b: also where either is a NaN.
inline Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#endif
    return choose(a > b, a, b);
}

inline float sum(Floats x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#endif
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
}

inline float largest(Floats x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#endif
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

// e^x to 2 units in the last place; 0 below -87, and at most e^88. Split as 2^n e^r with |r| <= ln(2) / 2
// (Cody and Waite), e^r by its Taylor polynomial of degree 7. F is float or Floats, I int32_t or Ints.
template <class F, class I>
inline F exp_lanes(F x, F n, I exponent) {
    F r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    F p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * bit_cast<F>((exponent + 127) << 23);
}

inline Floats exponential(Floats x) {
    const Ints is_tiny = x < -87.0f;
    x = choose(is_tiny, broadcast(-87.0f), x);
    x = choose(x > 88.0f, broadcast(88.0f), x);
    const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats n = (x * 1.44269504f + shifter) - shifter;
    const Floats y = exp_lanes(x, n, __builtin_convertvector(n, Ints));
    return choose(is_tiny, Floats{}, y);
}

#ifdef __AVX512F__
// 2^x to 3e-6 of it, much finer than bf16: 2^r for 0 <= r < 1 by a polynomial, times 2^floor(x).
inline Floats power_of_two(Floats x) {
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Floats p = r * 1.34266659e-2f + 5.22425039e-2f;
    p = p * r + 0.241280192f;
    p = p * r + 0.693044846f;
    p = p * r + 1.0f;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
}
#endif

// x / (1 + e^-x), as finely as T asks for.
template <class T>
inline Floats silu(Floats x) {
#ifdef __AVX512F__
    if (sizeof(T) == 2) return x * (Floats)_mm512_rcp14_ps((__m512)(power_of_two(x * -1.44269504f) + 1.0f));  // to 7e-5 of it
#endif
    return x / (1.0f + exponential(-x));
}

inline float exponential(float x) {
    const bool is_tiny = x < -87.0f;
    x = is_tiny ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const float y = exp_lanes(x, n, int32_t(n));
    return is_tiny ? 0.0f : y;
}

// e^(x * scale - most), at most 1, as finely as T asks for; 0 where it would be too small for a normal number.
template <class T>
inline Floats exponential_from(Floats x, float scale, float most) {
#ifdef __AVX512F__
    if (sizeof(T) == 2) {
        constexpr float LOG2_E = 1.44269504f;
        const Floats y = x * (scale * LOG2_E) - most * LOG2_E;
        const __mmask16 is_seen = _mm512_cmp_ps_mask((__m512)y, (__m512)broadcast(-126.0f), _CMP_NLT_UQ);  // a NaN stays one
        return (Floats)_mm512_maskz_mov_ps(is_seen, (__m512)power_of_two(y));
    }
#endif
    return exponential(x * scale - most);
}

#ifdef WEFT_HAS_PAIRS
// The first and the second bf16 of each lane, as float32.
struct Halves {
    Floats first, second;

    static Halves of(__m512i pairs) {
        return {(Floats)_mm512_slli_epi32(pairs, 16), (Floats)_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)))};
    }
};

inline Floats add_products(Floats sums, const Halves& a, const Halves& b) {
    return (Floats)_mm512_fmadd_ps((__m512)a.second, (__m512)b.second, _mm512_fmadd_ps((__m512)a.first, (__m512)b.first, (__m512)sums));
}

// Adds both products of each lane's pairs of bf16, which are exact, in float32.
inline Floats add_products(Floats sums, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    return add_products(sums, Halves::of(a), Halves::of(b));
#endif
}
#endif

#ifdef __AVX512F__
// Rows [0, 16) of 16 pairs of bf16, or of float32, become columns.
inline void transpose_pairs(__m512i* rows) {
    __m512i other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            other[i + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0x88);
            other[i + j + 4] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        rows[j] = _mm512_shuffle_i32x4(other[j], other[j + 8], 0x88);
        rows[j + 8] = _mm512_shuffle_i32x4(other[j], other[j + 8], 0xdd);
    }
}
#endif

}  // namespace weft
