// Sixteen lanes of 32 bits: one register where there is AVX512, two where there is AVX2; on other machines the compiler splits
// them. What the kernels do with them is in wide.h, and how they change places in shuffles.h.
//
// Vector extensions of GCC and Clang.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WEFT_HAS_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
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
    WEFT_OPERATOR(Mask, <=)
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

}  // namespace weft
