// `Number` as float16 (IEEE 754): widened, and multiplied in float32. In a line of pairs all first numbers come before all second
// ones, so that either half is widened at once.

#pragma once

#include "number_type.h"

namespace weft {

inline uint32_t to_mask(bool x) { return -uint32_t(x); }
template <class Mask>
inline Words to_mask(const Mask& x) { return bit_cast<Words>(x); }

// F is float or Floats, W uint32_t or Words, for these two. Numbers below the least normal one are made normal by a sum, which is exact.
template <class F, class W>
inline F widened(const W& bits) {
    const W magnitude = (bits & 0x7fffu) << 13, is_small = to_mask(magnitude < (1u << 23));
    const W is_special = to_mask(magnitude > (31u << 23) - 1);
    const W small = bit_cast<W>(bit_cast<F>(magnitude + (113u << 23)) - 0x1p-14f);
    const W other = magnitude + (112u << 23) + (is_special & (112u << 23));
    return bit_cast<F>((small & is_small) | (other & ~is_small) | (bits & 0x8000u) << 16);
}

// To nearest, ties to even; a NaN stays one.
template <class W, class F>
inline W narrowed(const F& x) {
    const W bits = bit_cast<W>(x), magnitude = bits & 0x7fffffffu;
    const W small = bit_cast<W>(bit_cast<F>(magnitude) + 0.5f) - 0x3f000000u;
    const W other = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const W is_small = to_mask(magnitude < (113u << 23)), is_large = to_mask(magnitude > 0x477fffffu);
    const W no_number = to_mask(magnitude > 0x7f800000u) & 0x200u;
    const W finite = (small & is_small) | (other & ~is_small);
    return (finite & ~is_large) | (0x7c00u & is_large) | no_number | ((bits >> 16) & 0x8000u);
}

inline float to_float(Number x) { return widened<float>(uint32_t(x.bits)); }
inline void put(Number* place, float x) { place->bits = uint16_t(narrowed<uint32_t>(x)); }

#ifdef WEFT_HAS_AVX512

inline Floats widened_lanes(const void* from) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from))); }
inline Floats first_half(const Ints& line) { return (Floats)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)line)); }
inline Floats second_half(const Ints& line) { return (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)line, 1)); }
inline __m256i narrowed_lanes(const Floats& x) { return _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Ints pack_two(const Floats& first, const Floats& second) {
    return (Ints)_mm512_inserti64x4(_mm512_castsi256_si512(narrowed_lanes(first)), narrowed_lanes(second), 1);
}

#elif defined(WEFT_HAS_AVX2)

inline Floats widened_lanes(const void* from) {
    const auto* const eights = static_cast<const __m128i*>(from);
    return {{(Floats::Half)_mm256_cvtph_ps(_mm_loadu_si128(eights)), (Floats::Half)_mm256_cvtph_ps(_mm_loadu_si128(eights + 1))}};
}
inline Floats widened_half(const Ints::Half& x) {
    const __m256i bits = (__m256i)x;
    return {{(Floats::Half)_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), (Floats::Half)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))}};
}
inline Floats first_half(const Ints& line) { return widened_half(line.half[0]); }
inline Floats second_half(const Ints& line) { return widened_half(line.half[1]); }
inline __m256i narrowed_lanes(const Floats& x) {
    const auto narrow = [](auto x) { return _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); };
    return _mm256_set_m128i(narrow(x.half[1]), narrow(x.half[0]));
}
inline Ints pack_two(const Floats& first, const Floats& second) {
    return {{(Ints::Half)narrowed_lanes(first), (Ints::Half)narrowed_lanes(second)}};
}

#endif

#ifdef WEFT_HAS_PAIRS

inline Floats load(const Number* from) { return widened_lanes(from); }
inline void store(Number* to, const Floats& x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrowed_lanes(x)); }
inline void round_both(Floats& first, Floats& second) {
    const Ints line = pack_two(first, second);
    first = first_half(line), second = second_half(line);
}

inline Floats load_first_half(const void* line) { return widened_lanes(line); }
inline Floats load_second_half(const void* line) { return widened_lanes(static_cast<const char*>(line) + 32); }

inline void put_lane(Number* line, int lane, const Number* pair) { line[lane] = pair[0], line[LANES + lane] = pair[1]; }
inline void take_lane(Number* pair, const Number* line, int lane) { pair[0] = line[lane], pair[1] = line[LANES + lane]; }

inline Ints to_line(const Ints& pairs) {
#ifdef WEFT_HAS_AVX512
    const __m512i x = (__m512i)pairs;
    return (Ints)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(x)), _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)), 1);
#else
    const Words words = bit_cast<Words>(pairs);
    return {{(Ints::Half)pack_half_words(words & 0xffffu), (Ints::Half)pack_half_words(words >> 16)}};
#endif
}

inline void join_lines(Ints& a, Ints& b) {
    const Ints high = quarters_of<2, 3>(a, b);
    a = quarters_of<0, 1>(a, b), b = high;
}

inline Floats add_products(const Floats& sums, const Ints& a, const Ints& b) {
    return multiply_add(first_half(a), first_half(b), multiply_add(second_half(a), second_half(b), sums));
}

#else

inline Floats load(const Number* from) { return widened<Floats>(load_half_words(&from->bits)); }
inline void store(Number* to, const Floats& x) { store_half_words(&to->bits, narrowed<Words>(x)); }
inline void round_both(Floats& first, Floats& second) {
    first = widened<Floats>(narrowed<Words>(first)), second = widened<Floats>(narrowed<Words>(second));
}

#endif

}  // namespace weft
