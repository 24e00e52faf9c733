// Memory and what is stored there, and the functions of softmax and SiLU on sixteen float32 lanes.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "number.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace weft {

#ifdef WEFT_HAS_PAIRS
constexpr bool IS_INTEL = WEFT_IS_INTEL;

using Hint = decltype(_MM_HINT_T0);  // of a prefetch; compilers have types of their own for it

// Where vectors have what they read soon from memory, and what they read once. In 32 KB of a first-level cache (a Zen 4) such lines
// cost much of the speed of memory, in 48 (a Zen 5) the second-level one does; an Intel (Emerald Rapids) reads half as fast by `prefetchnta`.
constexpr bool IS_FIRST_LEVEL_LARGE = WEFT_FIRST_LEVEL_KB >= 48, IS_SECOND_LEVEL_SLOW = IS_FIRST_LEVEL_LARGE && !IS_INTEL;
constexpr Hint SOON = IS_FIRST_LEVEL_LARGE ? _MM_HINT_T0 : _MM_HINT_T1, ONCE = IS_SECOND_LEVEL_SLOW ? _MM_HINT_NTA : _MM_HINT_T1;
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

inline Floats load(const int8_t* from) { return to_floats(load_bytes(from)); }

// Two vectors, one after the other; streamed: past the caches.
inline void store_two(float* to, Floats first, Floats second, bool is_streamed) {
#ifdef WEFT_HAS_PAIRS
    if (is_streamed) {
        stream(to, bit_cast<Ints>(first));
        stream(to + LANES, bit_cast<Ints>(second));
        return;
    }
#endif
    store(to, first);
    store(to + LANES, second);
}

#if !WEFT_IS_FLOAT32
inline void store_two(Number* to, Floats first, Floats second, [[maybe_unused]] bool is_streamed) {
#ifdef WEFT_HAS_PAIRS
    const Ints both = pack_two(first, second);
    if (is_streamed) return stream(to, both);
    store_bits(to, both);
#else
    store(to, first);
    store(to + LANES, second);
#endif
}
#endif

// As they are when they have been stored as T.
template <class T>
inline void round_two([[maybe_unused]] Floats& first, [[maybe_unused]] Floats& second) {
#if !WEFT_IS_FLOAT32
    if (sizeof(T) == sizeof(Number)) round_both(first, second);
#endif
}

// e^x to 2 units in the last place; 0 below -87, and at most e^88. Split as 2^n e^r with |r| <= ln(2) / 2
// (Cody and Waite), e^r by its Taylor polynomial of degree 7. F is float or Floats, I int32_t or Ints.
template <class F, class I>
inline F exp_lanes(F x, F n, I exponent) {
    F r = multiply_add(n, -0.693359375f, x);
    r = multiply_add(n, 2.12194440e-4f, r);
    F p = multiply_add(r, 1.0f / 5040, 1.0f / 720);
    p = multiply_add(p, r, 1.0f / 120);
    p = multiply_add(p, r, 1.0f / 24);
    p = multiply_add(p, r, 1.0f / 6);
    p = multiply_add(p, r, 0.5f);
    p = multiply_add(p, r, 1.0f);
    p = multiply_add(p, r, 1.0f);
    return p * bit_cast<F>((exponent + 127) << 23);
}

inline Floats exponential(Floats x) {
    const Ints is_tiny = x < -87.0f;
    x = choose(is_tiny, broadcast(-87.0f), x);
    x = choose(x > 88.0f, broadcast(88.0f), x);
    const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats n = multiply_add(x, 1.44269504f, shifter) - shifter;
    const Floats y = exp_lanes(x, n, to_whole(n));
    return choose(is_tiny, Floats{}, y);
}

#ifdef WEFT_HAS_PAIRS
// 2^x to 3e-6 of it, much finer than 16 bits, where that is a normal number: 2^r for 0 <= r < 1 by a polynomial, times 2^floor(x).
inline Floats power_of_two(Floats x) {
#ifdef WEFT_HAS_AVX512
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    x = by_halves<Floats>(  // a NaN stays one
        [](auto x) { return _mm256_min_ps(_mm256_set1_ps(127.5f), _mm256_max_ps(_mm256_set1_ps(-126.0f), (__m256)x)); }, x);
    const Floats whole = by_halves<Floats>([](auto x) { return _mm256_floor_ps((__m256)x); }, x), r = x - whole;
#endif
    Floats p = multiply_add(r, 1.34266659e-2f, 5.22425039e-2f);
    p = multiply_add(p, r, 0.241280192f);
    p = multiply_add(p, r, 0.693044846f);
    p = multiply_add(p, r, 1.0f);
#ifdef WEFT_HAS_AVX512
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return p * bit_cast<Floats>((to_whole(whole) + 127) << 23);
#endif
}
#endif

// x / (1 + e^-y), as finely as T asks for.
template <class T>
inline Floats times_sigmoid(Floats x, Floats y) {
#if defined(WEFT_HAS_AVX512)
    if (sizeof(T) == 2) return x * (Floats)_mm512_rcp14_ps((__m512)(power_of_two(y * -1.44269504f) + 1.0f));  // to 7e-5 of it
#elif defined(WEFT_HAS_PAIRS)
    if (sizeof(T) == 2) return x / (power_of_two(y * -1.44269504f) + 1.0f);
#endif
    return x / (1.0f + exponential(-y));
}

template <class T>
inline Floats silu(Floats x) {
    return times_sigmoid<T>(x, x);
}

inline float exponential(float x) {
    if (x != x) return x;  // has no exponent
    const bool is_tiny = x < -87.0f;
    x = is_tiny ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = multiply_add(x, 1.44269504f, 12582912.0f) - 12582912.0f;
    const float y = exp_lanes(x, n, int32_t(n));
    return is_tiny ? 0.0f : y;
}

// e^(x * scale - most), at most 1, as finely as T asks for; 0 where it would be too small for a normal number.
template <class T>
inline Floats exponential_from(Floats x, float scale, float most) {
#ifdef WEFT_HAS_PAIRS
    if (sizeof(T) == 2) {
        constexpr float LOG2_E = 1.44269504f;
        const Floats y = multiply_add(x, scale * LOG2_E, -most * LOG2_E);
#ifdef WEFT_HAS_AVX512
        const __mmask16 is_seen = _mm512_cmp_ps_mask((__m512)y, (__m512)broadcast(-126.0f), _CMP_NLT_UQ);  // a NaN stays one
        return (Floats)_mm512_maskz_mov_ps(is_seen, (__m512)power_of_two(y));
#else
        return bit_cast<Floats>(bit_cast<Ints>(power_of_two(y)) & ~(y < -126.0f));
#endif
    }
#endif
    return exponential(multiply_add(x, scale, -most));
}

}  // namespace weft
