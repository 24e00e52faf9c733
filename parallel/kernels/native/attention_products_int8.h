// The two products of attention in integers, where the cache is in 8 bits: queries and weights become integers of 16 bits
// in two parts of 8, so that of all that is rounded only the cache counts. Sums of integers are exact: vectors, matrix
// tiles and any order of tokens give the same bits.
//
//     score(row, token) = (256 * high + low of the row's query) . key * scale of the row * scale of the key
//     total(row, dim)   = sum over tokens of (256 * high + low of weight * scale of the value) * value * scale of the row

#pragma once

#include "amx.h"
#include "attention_tiles.h"
#include "cache_int8.h"
#include "matrix_int8.h"
#include "quantize.h"
#include "shuffles.h"

#ifdef WEFT_HAS_INT8

namespace weft::int8 {

constexpr int TOKENS = 64;           // that a tile of weights has in a row
constexpr float MOST_QUERY = 127 * 256;
constexpr float MOST_WEIGHT = 65535;  // * 127 * PARTITION is the largest sum: it has 31 bits

// Rows of queries.
struct Queries {
    int8_t *high, *low;  // [rows, head_dim]
    float* scales;
    int32_t* offsets;    // 128 times the sum of the row: what keys that are 128 too large add
};

template <class T>
void quantize_query(const Queries& to, int row, const T* x, int head_dim) {
    const float most = largest_magnitude(x, head_dim);
    const float inverse = 1 / most * MOST_QUERY;
    Words total{};  // that of several NaN wraps around
    for (int dim = 0; dim < head_dim; dim += LANES) {
        const Ints whole = to_nearest(load(x + dim) * inverse), high = (whole + 128) >> 8;
        store_low_bytes(to.high + int64_t(row) * head_dim + dim, high);
        store_low_bytes(to.low + int64_t(row) * head_dim + dim, whole - (high << 8));
        total = total + bit_cast<Words>(whole);
    }
    to.scales[row] = most / MOST_QUERY;
    to.offsets[row] = int32_t(uint32_t(sum(bit_cast<Ints>(total))) * 128u);
}

// The weights of a row times the scales of the values, which may overwrite them; returns what 1 stands for. `count` is
// rounded up to LANES.
inline float quantize_weights(uint8_t* high, uint8_t* low, float* weights, const float* scales, int count) {
    Ints most = broadcast(bit_cast<int32_t>(LEAST));
    for (int i = 0; i < count; i += LANES) {
        const Floats x = load(weights + i) * load(scales + i);
        most = larger(most, bit_cast<Ints>(x) & 0x7fffffff);  // a NaN is the largest
        store(weights + i, x);
    }
    const float largest_weight = bit_cast<float>(largest(most)), inverse = 1 / largest_weight * MOST_WEIGHT;
    for (int i = 0; i < count; i += LANES) {
        const Ints whole = to_nearest(load(weights + i) * inverse);
        store_low_bytes(high + i, whole >> 8);
        store_low_bytes(low + i, whole);
    }
    return largest_weight / MOST_WEIGHT;
}

// Lane i of the result is the sum of rows[i].
inline Ints sum_each(const Ints* rows) {
    Ints pairs[8], fours[4];
    for (int i = 0; i < 8; i++) pairs[i] = unpack_low<int32_t>(rows[2 * i], rows[2 * i + 1]) + unpack_high<int32_t>(rows[2 * i], rows[2 * i + 1]);
    for (int i = 0; i < 4; i++) fours[i] = unpack_low<int64_t>(pairs[2 * i], pairs[2 * i + 1]) + unpack_high<int64_t>(pairs[2 * i], pairs[2 * i + 1]);
    const auto add_halves = [](const Ints& a, const Ints& b) { return quarters_of<0, 2>(a, b) + quarters_of<1, 3>(a, b); };
    return add_halves(add_halves(fours[0], fours[1]), add_halves(fours[2], fours[3]));
}

inline Ints join(const Ints& high, const Ints& low) { return (high << 8) + low; }

// Scores of some rows with the keys of num_tokens <= LANES tokens, LANES of them a row. HEAD_DIM 0: not known when compiled.
template <int HEAD_DIM>
void score_keys(const int8_t* keys, int64_t token_stride, int num_tokens, const Floats& key_scales, const Queries& queries,
                int first_row, int num_rows, int runtime_head_dim, float scale, float* scores, int64_t scores_stride) {
    const int head_dim = HEAD_DIM ? HEAD_DIM : runtime_head_dim;
    for (int row = first_row; row < first_row + num_rows; row++, scores += scores_stride) {
        const int8_t *high = queries.high + int64_t(row) * head_dim, *low = queries.low + int64_t(row) * head_dim;
        Ints products[LANES];
        for (int token = 0; token < LANES; token++) {
            const int8_t* key = keys + std::min(token, num_tokens - 1) * token_stride;
            Ints of_high{}, of_low{};
            for (int dim = 0; dim < head_dim; dim += STEP) {
                const Ints larger = load_bits(key + dim) ^ int32_t(0x80808080);
                of_high = add_fours(of_high, larger, load_bits(high + dim));
                of_low = add_fours(of_low, larger, load_bits(low + dim));
            }
            products[token] = join(of_high, of_low);
        }
        store(scores, to_floats(sum_each(products) - queries.offsets[row]) * (key_scales * (queries.scales[row] * scale)));
    }
}

// Four tokens' values of STEP dims as [dim][token]: lane 4 l + i of mixed[j] has dim 16 l + 4 j + i.
inline void mix(Ints* mixed, const int8_t* const* tokens) {
    const Ints a = load_bits(tokens[0]), b = load_bits(tokens[1]), c = load_bits(tokens[2]), d = load_bits(tokens[3]);
    const Ints ab[2] = {unpack_low<int8_t>(a, b), unpack_high<int8_t>(a, b)};
    const Ints cd[2] = {unpack_low<int8_t>(c, d), unpack_high<int8_t>(c, d)};
    for (int i = 0; i < 2; i++) {
        mixed[2 * i] = unpack_low<int16_t>(ab[i], cd[i]);
        mixed[2 * i + 1] = unpack_high<int16_t>(ab[i], cd[i]);
    }
}

// Adds weight * value of num_tokens <= LANES tokens to the rows' totals, [rows][steps][j][lane] as `mix` has them.
template <int HEAD_DIM>
void add_values(const int8_t* values, int64_t token_stride, int num_tokens, const uint8_t* high, const uint8_t* low,
                int64_t weights_stride, int32_t* totals, int num_rows, int runtime_head_dim) {
    const int head_dim = HEAD_DIM ? HEAD_DIM : runtime_head_dim;
    constexpr int FOURS = LANES / 4;
    for (int dim = 0; dim < head_dim; dim += STEP) {
        Ints mixed[FOURS][4];
        for (int four = 0; four < FOURS; four++) {
            const int8_t* tokens[4];
            for (int i = 0; i < 4; i++) tokens[i] = values + std::min(4 * four + i, num_tokens - 1) * token_stride + dim;
            mix(mixed[four], tokens);
        }
        // behind the last token are the weights of others
        for (int row = 0; row < num_rows; row++) {
            int32_t weights[2][FOURS];
            copy_first_bytes(weights[0], high + row * weights_stride, num_tokens);
            copy_first_bytes(weights[1], low + row * weights_stride, num_tokens);
            int32_t* const to = totals + int64_t(row) * head_dim + dim;
            for (int j = 0; j < 4; j++) {
                Ints of_high{}, of_low = load_bits(to + j * LANES);
                for (int four = 0; four < FOURS; four++) {
                    of_high = add_fours(of_high, broadcast(weights[0][four]), mixed[four][j]);
                    of_low = add_fours(of_low, broadcast(weights[1][four]), mixed[four][j]);
                }
                store_bits(to + j * LANES, join(of_high, of_low));
            }
        }
    }
}

// The totals of a row in the order of dims, times what 1 stands for.
inline void write_totals(float* out, const int32_t* totals, float scale, int head_dim) {
    for (int dim = 0; dim < head_dim; dim += STEP) {
        Ints x[4], y[4];
        for (int j = 0; j < 4; j++) x[j] = load_bits(totals + dim + j * LANES);
        for (int i = 0; i < 2; i++) {
            y[i] = quarters_of<0, 1>(x[2 * i], x[2 * i + 1]);
            y[i + 2] = quarters_of<2, 3>(x[2 * i], x[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
            x[2 * i] = quarters_of<0, 2>(y[2 * i], y[2 * i + 1]);
            x[2 * i + 1] = quarters_of<1, 3>(y[2 * i], y[2 * i + 1]);
        }
        for (int l = 0; l < 4; l++) store(out + dim + l * LANES, to_floats(x[l]) * scale);
    }
}

// The keys of some heads, side by side in memory, as right-hand tiles [head][16 tokens][step][4 dims][token]; the first
// head of token i begins at keys + offsets[i]. For vectors they are unsigned.
inline void pack_keys(int8_t* packed, const int8_t* keys, const int64_t* offsets, int num_tokens, int num_heads, int head_dim) {
    const int32_t flips = use_tiles() ? 0 : int32_t(0x80808080);
    for (int token = 0; token < num_tokens; token += TILE)
        for (int head = 0; head < num_heads; head++) {
            int8_t* to = packed + (int64_t(head) * num_tokens + token) * head_dim;
            for (int dim = 0; dim < head_dim; dim += STEP, to += TILE * STEP) {
                Ints rows[TILE];
                for (int i = 0; i < TILE; i++) rows[i] = load_bits(keys + offsets[token + i] + head * head_dim + dim);
                transpose(rows);
                for (int i = 0; i < TILE; i++) store_bits(to + i * STEP, rows[i] ^ flips);
            }
        }
}

// The values of some heads as right-hand tiles [head][64 tokens][step][j][4 tokens][dim].
inline void pack_values(int8_t* packed, const int8_t* values, const int64_t* offsets, int num_tokens, int num_heads, int head_dim) {
    for (int token = 0; token < num_tokens; token += 4)
        for (int head = 0; head < num_heads; head++) {
            int8_t* to = packed + (int64_t(head) * num_tokens + token / TOKENS * TOKENS) * head_dim + token % TOKENS / 4 * STEP;
            for (int dim = 0; dim < head_dim; dim += STEP, to += TOKENS * STEP) {
                const int8_t* tokens[4];
                for (int i = 0; i < 4; i++) tokens[i] = values + offsets[token + i] + head * head_dim + dim;
                Ints mixed[4];
                mix(mixed, tokens);
                for (int j = 0; j < 4; j++) store_bits(to + j * TILE * STEP, mixed[j]);
            }
        }
}

#ifdef WEFT_HAS_AMX_INT8

// Both parts of 16 rows, and two right-hand tiles: 0 and 2 are the sums of the high parts, 1 and 3 those of the low ones.
struct TwoSums {
    alignas(64) int32_t parts[4][TILE * TILE];

    void take() {
        _tile_stored(0, parts[0], 64);
        _tile_stored(1, parts[1], 64);
        _tile_stored(2, parts[2], 64);
        _tile_stored(3, parts[3], 64);
    }
    Ints row(int side, int i) const { return join(load_bits(parts[2 * side] + i * TILE), load_bits(parts[2 * side + 1] + i * TILE)); }
};

inline void zero_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// As the function for vectors, for all tokens (a multiple of 2 * TILE) of one head: `packed` is as pack_keys has it.
inline void score_packed_keys_by_tiles(const int8_t* packed, int num_tokens, const float* key_scales, const Queries& queries,
                              int first_row, int num_rows, int head_dim, float scale, float* scores, int64_t scores_stride) {
    TwoSums sums;
    for (int row = 0; row < num_rows; row += TILE, scores += TILE * scores_stride) {
        const int8_t* high = queries.high + int64_t(first_row + row) * head_dim;
        const int8_t* low = queries.low + int64_t(first_row + row) * head_dim;
        const int rows = std::min(TILE, num_rows - row);
        for (int token = 0; token < num_tokens; token += 2 * TILE) {
            const int8_t* right = packed + int64_t(token) * head_dim;
            zero_tiles();
            for (int dim = 0; dim < head_dim; dim += STEP, right += TILE * STEP) {
                _tile_loadd(4, high + dim, head_dim);
                _tile_loadd(5, low + dim, head_dim);
                _tile_loadd(6, right, STEP);
                _tile_loadd(7, right + TILE * head_dim, STEP);
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 5, 6);
                _tile_dpbssd(2, 4, 7);
                _tile_dpbssd(3, 5, 7);
            }
            sums.take();
            for (int side = 0; side < 2; side++) {
                const Floats scales = load(key_scales + token + side * TILE);
                for (int i = 0; i < rows; i++)
                    store(scores + i * scores_stride + token + side * TILE,
                          to_floats(sums.row(side, i)) * (scales * (queries.scales[first_row + row + i] * scale)));
            }
        }
    }
}

// Likewise for values and all tokens, a multiple of TOKENS; totals as add_values has them.
inline void sum_packed_values_by_tiles(const int8_t* packed, int num_tokens, const uint8_t* high, const uint8_t* low,
                              int64_t weights_stride, int32_t* totals, int num_rows, int head_dim) {
    TwoSums sums;
    for (int row = 0; row < num_rows; row += TILE, high += TILE * weights_stride, low += TILE * weights_stride)
        for (int dim = 0; dim < head_dim; dim += 2 * TILE) {
            zero_tiles();
            for (int token = 0; token < num_tokens; token += TOKENS) {
                const int8_t* right = packed + int64_t(token) * head_dim + dim * TOKENS;
                _tile_loadd(4, high + token, weights_stride);
                _tile_loadd(5, low + token, weights_stride);
                _tile_loadd(6, right, STEP);
                _tile_loadd(7, right + TILE * STEP, STEP);
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 5, 6);
                _tile_dpbusd(2, 4, 7);
                _tile_dpbusd(3, 5, 7);
            }
            sums.take();
            for (int side = 0; side < 2; side++)
                for (int i = 0; i < std::min(TILE, num_rows - row); i++)
                    store_bits(totals + int64_t(row + i) * head_dim + dim + side * TILE, sums.row(side, i));
        }
}

#endif

// `Numbers` of panels_vectors.h: signed queries, unsigned keys.
#ifdef WEFT_HAS_FOURS
struct SignedFours : Alike {
    using Sum = int32_t;

    static Ints add(const Ints& sums, const Ints& four, const Ints& right) { return add_fours(sums, right, four); }
};
#else
struct SignedFours : FoursAsPairs<true, false> {};
#endif

// Both parts of some rows times 32 outputs; finish(row, side, sums of 16) for each.
template <class Numbers, class Finish>
void multiply_two_parts(const LeftVectors& high, const LeftVectors& low, const RightVectors& right, int num_steps, const Finish& finish) {
    alignas(64) int32_t parts[2][MOST_VECTOR_ROWS * PANEL];
    for_each_part(high.num_rows, [&](int row, int count) {
        multiply_vectors<Numbers>(parts[0], PANEL, {high.row(row), high.row_stride, STEP, count}, right, Close{}, num_steps);
        multiply_vectors<Numbers>(parts[1], PANEL, {low.row(row), low.row_stride, STEP, count}, right, Close{}, num_steps);
        for (int i = 0; i < count; i++)
            for (int side = 0; side < 2; side++) {
                const int place = i * PANEL + side * LANES;
                finish(row + i, side, join(load_bits(parts[0] + place), load_bits(parts[1] + place)));
            }
    });
}

// As the function for single tokens, for all tokens (a multiple of 2 * TILE) of one head: `packed` is as pack_keys has it.
inline void score_packed_keys(const int8_t* packed, int num_tokens, const float* key_scales, const Queries& queries,
                              int first_row, int num_rows, int head_dim, float scale, float* scores, int64_t scores_stride) {
#ifdef WEFT_HAS_AMX_INT8
    if (use_tiles())
        return score_packed_keys_by_tiles(packed, num_tokens, key_scales, queries, first_row, num_rows, head_dim, scale, scores, scores_stride);
#endif
    const auto rows = [&](const int8_t* part) -> LeftVectors {
        return {reinterpret_cast<const char*>(part + int64_t(first_row) * head_dim), head_dim, STEP, num_rows};
    };
    for (int token = 0; token < num_tokens; token += 2 * TILE) {
        const RightVectors right{reinterpret_cast<const char*>(packed + int64_t(token) * head_dim), TILE * head_dim, TILE * STEP};
        multiply_two_parts<SignedFours>(rows(queries.high), rows(queries.low), right, head_dim / STEP, [&](int row, int side, const Ints& sums) {
            const Floats factors = load(key_scales + token + side * TILE) * (queries.scales[first_row + row] * scale);
            store(scores + row * scores_stride + token + side * TILE, to_floats(sums - queries.offsets[first_row + row]) * factors);
        });
    }
}

// Likewise for values and all tokens, a multiple of TOKENS; totals as add_values has them.
inline void sum_packed_values(const int8_t* packed, int num_tokens, const uint8_t* high, const uint8_t* low,
                              int64_t weights_stride, int32_t* totals, int num_rows, int head_dim) {
#ifdef WEFT_HAS_AMX_INT8
    if (use_tiles()) return sum_packed_values_by_tiles(packed, num_tokens, high, low, weights_stride, totals, num_rows, head_dim);
#endif
    const auto rows = [&](const uint8_t* part) -> LeftVectors { return {reinterpret_cast<const char*>(part), weights_stride, STEP, num_rows}; };
    for (int dim = 0; dim < head_dim; dim += 2 * TILE) {
        const RightVectors right{reinterpret_cast<const char*>(packed + dim * TOKENS), TILE * STEP, int64_t(TOKENS) * head_dim};
        multiply_two_parts<Fours>(rows(high), rows(low), right, num_tokens / TOKENS, [&](int row, int side, const Ints& sums) {
            store_bits(totals + int64_t(row) * head_dim + dim + side * TILE, sums);
        });
    }
}

// Buffers of one thread; they only grow.
class AttentionScratch {
  public:
    Buffer<int8_t> queries, packed;
    Buffer<uint8_t> weights;
    Buffer<float> query_scales, key_scales, value_scales, weight_scales;
    Buffer<int32_t> offsets, totals;

    static AttentionScratch& of_this_thread() {
        static thread_local AttentionScratch scratch;
        return scratch;
    }
};

}  // namespace weft::int8

#endif
