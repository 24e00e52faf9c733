// What a row that draws adds to each of its logits before the largest is taken; sampling.py says what it means, and `gumbel` there is
// the same to a few units in the last place.

#pragma once

#include "vector.h"

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
    Floats p = square * (1.0f / 9) + 1.0f / 7;
    p = p * square + 1.0f / 5;
    p = p * square + 1.0f / 3;
    p = p * square + 1.0f;
    return ratio * p * 2.0f + to_floats(exponent) * 0.693147181f;
}

// Of a normal number above 0; `rest`, where it is taken, is what this is more than 1.
inline Floats logarithm(Floats x, Floats rest, const Ints& takes_rest) {
    constexpr int32_t ROOT = 0x3f3504f3;  // of 1/2
    const Ints bits = bit_cast<Ints>(x), exponent = (bits - ROOT) >> 23;
    const Floats mantissa = bit_cast<Floats>(bits - (exponent << 23));
    return logarithm_of(choose(takes_rest, rest, mantissa - 1.0f), exponent);
}

// temperature * noise of tokens [first, first + count), up to a whole vector. One copy of the code, so that a token's is always the same.
__attribute__((noinline)) inline void find_noise(float* to, const Noise& noise, int64_t first, int64_t count) {
    constexpr float LARGEST = 1 - 0x1p-24f;
    constexpr uint32_t FIRST[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Words token = bit_cast<Words>(load_bits(FIRST)) + uint32_t(first);
    for (int64_t i = 0; i < count; i += LANES, token = token + uint32_t(LANES)) {
        const Words bits = mixed(mixed(token * 0x9e3779b1u + noise.key[0]) ^ noise.key[1]);
        Floats u = to_floats(bit_cast<Ints>(bits >> 1)) * 0x1p-31f + 0x1p-32f;
        u = choose(u > LARGEST, broadcast(LARGEST), u);
        const Floats waiting = -logarithm(1.0f - u, -u, u < 0.25f);  // until an event of a rate of 1
        store(to + i, logarithm(waiting, waiting, Ints{}) * -noise.temperature);
    }
}

// To outputs of whole vectors.
inline void add_noise(float* outputs, const Noise& noise, int64_t first, int64_t count) {
    constexpr int64_t PART = 8 * LANES;
    alignas(64) float added[PART];
    if (noise.temperature == 0) return;
    for (int64_t begin = 0; begin < count; begin += PART) {
        const int64_t size = std::min(PART, count - begin);
        find_noise(added, noise, first + begin, size);
        for (int64_t i = 0; i < size; i += LANES) store(outputs + begin + i, load(outputs + begin + i) + load(added + i));
    }
}
inline void add_noise(BFloat16*, const Noise&, int64_t, int64_t) {}  // nobody asks for it

}  // namespace weft
