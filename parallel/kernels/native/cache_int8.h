// The paged cache in 8 bits. int8_cache.py says the same in torch, bit for bit.
//
// A block of keys, or of values, is [block_size, kv heads, head_dim] integers and behind them [kv heads, block_size]
// float32 scales: the largest magnitude of a token's head over 127. A head's scales lie side by side, for a vector of
// tokens at a time wants them.

#pragma once

#include <algorithm>
#include <cmath>

#include "elementwise.h"
#include "threads.h"
#include "vector.h"

namespace weft {

// Where things lie in the blocks of a half of the cache.
struct Int8Blocks {
    int64_t block_size, num_heads, head_dim;

    int64_t num_integers() const { return block_size * num_heads * head_dim; }  // of a block, whose scales come then
    int64_t stride() const { return block_size * num_heads * (head_dim + int64_t(sizeof(float))); }
};

// One head of a token, a multiple of LANES; returns its scale.
template <class T>
float quantize_head(int8_t* to, const T* x, int64_t head_dim) {
    constexpr float LEAST = 0x1p-100f;  // of a largest magnitude, so that its inverse is a number
    Ints most{};
    for (int64_t dim = 0; dim < head_dim; dim += LANES) {
        const Ints bits = bit_cast<Ints>(load(x + dim)) & 0x7fffffff;  // those of a NaN are larger than any number's
        most = larger(most, bits);
    }
    const int32_t largest_bits = std::max(largest(most), bit_cast<int32_t>(LEAST));
    const float magnitude = bit_cast<float>(largest_bits), inverse = 1 / magnitude * 127.0f;
    for (int64_t dim = 0; dim < head_dim; dim += LANES) {
        float scaled[LANES];
        const Floats of_lanes = load(x + dim) * inverse;
        store(scaled, bit_cast<Floats>(bit_cast<Ints>(of_lanes) & (of_lanes == of_lanes)));  // 0 for a NaN, which is no integer
#pragma omp simd
        for (int lane = 0; lane < LANES; lane++) to[dim + lane] = int8_t(int32_t(__builtin_rintf(scaled[lane])));
    }
    return magnitude / 127.0f;
}

// As write_cache.
template <class T>
void write_cache_int8(int8_t* keys, int8_t* values, const T* k, const T* v, int64_t k_token_stride,
                      int64_t v_token_stride, const int64_t* slots, int64_t num_tokens, Int8Blocks blocks, Team& team) {
    const auto write = [=](int8_t* half, int64_t slot, const T* heads) {
        const int64_t offset = slot % blocks.block_size;
        int8_t* const block = half + slot / blocks.block_size * blocks.stride();
        float* const scales = reinterpret_cast<float*>(block + blocks.num_integers());
        for (int64_t head = 0; head < blocks.num_heads; head++)
            scales[head * blocks.block_size + offset] = quantize_head(
                block + (offset * blocks.num_heads + head) * blocks.head_dim, heads + head * blocks.head_dim, blocks.head_dim);
    };
    for_each_row(num_tokens, 2 * blocks.num_heads * blocks.head_dim, team, [=](int64_t token) {
        write(keys, slots[token], k + token * k_token_stride);
        write(values, slots[token], v + token * v_token_stride);
    });
}

}  // namespace weft
