// What a row that draws adds to each of its logits before the largest is taken; sampling.py says what it means, and `gumbel` there is
// the same to a few units in the last place.

#pragma once

#include "row_parts.h"

namespace weft {

// Of a row; mirrored by NOISE in sampling.py.
struct Noise {
    float temperature;  // 0: none
    uint32_t key[2];
};

// Of the rows of a product whose outputs are the tokens from the first one on.
struct RowNoise {
    const Noise* of_rows = nullptr;  // null: none
    int64_t first_token = 0;

    // Null where a row draws nothing.
    const Noise* of(int64_t row) const { return of_rows && of_rows[row].temperature > 0 ? of_rows + row : nullptr; }
};

inline Words mixed(Words x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0xd35a2d97u;
    return x ^ (x >> 15);
}

// log(1 + rest) + exponent * log(2), where 1 + rest lies between the roots of 1/2 and 2; as 2 atanh(rest / (2 + rest)), which is as fine
// where the rest is small.
inline Floats logarithm_of(Floats rest, Ints exponent) {
    const Floats ratio = rest / (rest + 2.0f), square = ratio * ratio;
    Floats p = multiply_add(square, 1.0f / 9, 1.0f / 7);
    p = multiply_add(p, square, 1.0f / 5);
    p = multiply_add(p, square, 1.0f / 3);
    p = multiply_add(p, square, 1.0f);
    return multiply_add(to_floats(exponent), 0.693147181f, ratio * p * 2.0f);
}

// Of a normal number above 0; `rest`, where it is taken, is what this is more than 1.
inline Floats logarithm(Floats x, Floats rest, const Ints& takes_rest) {
    constexpr int32_t ROOT = 0x3f3504f3;  // of 1/2
    const Ints bits = bit_cast<Ints>(x), exponent = (bits - ROOT) >> 23;
    const Floats mantissa = bit_cast<Floats>(bits - (exponent << 23));
    return logarithm_of(choose(takes_rest, rest, mantissa - 1.0f), exponent);
}

// Of each token a number in (0, 1).
inline Floats uniform(const Noise& noise, const Words& token) {
    constexpr float LARGEST = 1 - 0x1p-24f;
    const Words bits = mixed(mixed(token * 0x9e3779b1u + noise.key[0]) ^ noise.key[1]);
    const Floats u = multiply_add(to_floats(bit_cast<Ints>(bits >> 1)), 0x1p-31f, 0x1p-32f);
    return choose(u > LARGEST, broadcast(LARGEST), u);
}

// temperature * noise of these; the less u, the more it is, but for its last digits.
inline Floats noise_of(const Floats& u, float temperature) {
    const Floats waiting = -logarithm(1.0f - u, -u, u < 0.25f);  // until an event of a rate of 1
    return logarithm(waiting, waiting, Ints{}) * -temperature;
}

inline Words tokens_from(int64_t first) {
    constexpr uint32_t FIRST[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return bit_cast<Words>(load_bits(FIRST)) + uint32_t(first);
}

// temperature * noise of tokens [first, first + count), up to a whole vector. One copy of the code, so that a token's is always the same.
__attribute__((noinline)) inline void find_noise(float* to, const Noise& noise, int64_t first, int64_t count) {
    Words token = tokens_from(first);
    for (int64_t i = 0; i < count; i += LANES, token = token + uint32_t(LANES))
        store(to + i, noise_of(uniform(noise, token), noise.temperature));
}

// What that is at most in each of up to LANES runs of tokens from the first one on, by the logarithms of one vector for all. Lanes past
// these mean nothing.
__attribute__((noinline)) inline void bound_noise(float* to, const Noise& noise, int64_t first, int64_t num_runs) {
    constexpr float LAST_DIGITS = 0x1p-13f;  // of a temperature of 1
    alignas(64) float least[LANES];
    store(least, broadcast(0.5f));  // past the runs: something that has a logarithm
    for (int64_t run = 0; run < num_runs; run++) {
        const Words token = tokens_from(first + run * RUN);
        least[run] = -largest(larger(-uniform(noise, token), -uniform(noise, token + uint32_t(LANES))));
    }
    store(to, noise_of(load(least), noise.temperature) + LAST_DIGITS * noise.temperature);
}

// The first largest of these logits and what is added to them; below `least`, anything smaller. NaN as in first_largest.
template <class T>
Found first_largest(const T* logits, int64_t size, const Noise& noise, int64_t first_token, float least) {
    alignas(64) float most_added[LANES], added[RUN], scores[RUN];
    Found found{-INFINITY, 0};
    for (int64_t begin = 0; begin < size; begin += RUN) {
        const int64_t run = begin / RUN % LANES, count = std::min<int64_t>(RUN, size - begin);
        if (run == 0) bound_noise(most_added, noise, first_token + begin, std::min<int64_t>(LANES, (size - begin - 1) / RUN + 1));
        if (largest(logits + begin, count) + most_added[run] < std::max(found.value, least)) continue;  // a NaN is looked at
        find_noise(added, noise, first_token + begin, count);
        for (int64_t i = 0; i < count; i++) scores[i] = to_float(logits[begin + i]) + added[i];
        const float of_run = largest(scores, count);
        if (of_run != of_run) return {of_run, begin};
        if (of_run > found.value) found = {of_run, begin + first_of(scores, of_run)};
    }
    return found;
}

}  // namespace weft
