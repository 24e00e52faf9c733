// `Number` as bfloat16, the upper half of a float32: widened, or multiplied by products of pairs where a CPU has them. In a line of
// pairs each lane has its own, as those products want it.

#pragma once

#include "number_type.h"

namespace weft {

inline float to_float(Number x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

// To nearest, ties to even; a NaN stays one.
inline void put(Number* place, float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    place->bits = uint16_t(x == x ? rounded : 0x7fc0);
}

inline Floats load(const Number* from) { return bit_cast<Floats>(load_half_words(&from->bits) << 16); }

// What each is stored as.
inline Words narrowed(const Floats& x) {
    const Words bits = bit_cast<Words>(x), is_number = bit_cast<Words>(x == x);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (rounded & is_number) | (0x7fc0u & ~is_number);
}

inline void store(Number* to, const Floats& x) { store_half_words(&to->bits, narrowed(x)); }

inline void round_both(Floats& first, Floats& second) {
#ifdef __AVX512BF16__
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    first = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16);
    second = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
#else
    first = bit_cast<Floats>(narrowed(first) << 16), second = bit_cast<Floats>(narrowed(second) << 16);
#endif
}

#if defined(__AVX512BF16__)
inline Ints pack_two(const Floats& first, const Floats& second) { return (Ints)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
#elif defined(WEFT_HAS_AVX512)
inline Ints pack_two(const Floats& first, const Floats& second) {
    const __m256i low = _mm512_cvtepi32_epi16((__m512i)narrowed(first)), high = _mm512_cvtepi32_epi16((__m512i)narrowed(second));
    return (Ints)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#elif defined(WEFT_HAS_AVX2)
inline Ints pack_two(const Floats& first, const Floats& second) {
    return {{(Ints::Half)pack_half_words(narrowed(first)), (Ints::Half)pack_half_words(narrowed(second))}};
}
#endif

#ifdef WEFT_HAS_PAIRS

inline Floats first_half(const Ints& line) { return bit_cast<Floats>(line << 16); }
inline Floats second_half(const Ints& line) { return bit_cast<Floats>(line & int32_t(0xffff0000)); }
inline Floats load_first_half(const void* line) { return first_half(load_bits(line)); }
inline Floats load_second_half(const void* line) { return second_half(load_bits(line)); }

inline void put_lane(Number* line, int lane, const Number* pair) { std::memcpy(line + 2 * lane, pair, 2 * sizeof(*pair)); }
inline void take_lane(Number* pair, const Number* line, int lane) { std::memcpy(pair, line + 2 * lane, 2 * sizeof(*pair)); }
inline Ints to_line(const Ints& pairs) { return pairs; }
inline void join_lines(Ints& a, Ints& b) { interleave<Number>(a, b); }

// By Intel's products of pairs, or with their bits but for what is too small for a normal number.
inline Floats add_products(const Floats& sums, const Ints& a, const Ints& b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    return multiply_add(first_half(a), first_half(b), multiply_add(second_half(a), second_half(b), sums));
#endif
}

#endif

}  // namespace weft
