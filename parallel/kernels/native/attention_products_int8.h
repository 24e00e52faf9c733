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
    const __m512 inverse = _mm512_set1_ps(1 / most * MOST_QUERY);
    __m512i sum = _mm512_setzero_si512();
    for (int dim = 0; dim < head_dim; dim += LANES) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)load(x + dim), inverse));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
        _mm_storeu_si128((__m128i*)(to.high + int64_t(row) * head_dim + dim), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i*)(to.low + int64_t(row) * head_dim + dim), _mm512_cvtepi32_epi8(low));
        sum = _mm512_add_epi32(sum, whole);
    }
    to.scales[row] = most / MOST_QUERY;
    to.offsets[row] = int32_t(uint32_t(_mm512_reduce_add_epi32(sum)) * 128u);
}

// The weights of a row times the scales of the values, which may overwrite them; returns what 1 stands for. `count` is
// rounded up to LANES.
inline float quantize_weights(uint8_t* high, uint8_t* low, float* weights, const float* scales, int count) {
    __m512i most = _mm512_set1_epi32(bit_cast<int32_t>(LEAST));
    for (int i = 0; i < count; i += LANES) {
        const Floats x = load(weights + i) * load(scales + i);
        most = _mm512_max_epi32(most, _mm512_and_si512((__m512i)x, _mm512_set1_epi32(0x7fffffff)));  // a NaN is the largest
        store(weights + i, x);
    }
    const float largest_weight = bit_cast<float>(_mm512_reduce_max_epi32(most));
    const __m512 inverse = _mm512_set1_ps(1 / largest_weight * MOST_WEIGHT);
    for (int i = 0; i < count; i += LANES) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)load(weights + i), inverse));
        _mm_storeu_si128((__m128i*)(high + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
        _mm_storeu_si128((__m128i*)(low + i), _mm512_cvtepi32_epi8(whole));
    }
    return largest_weight / MOST_WEIGHT;
}

// Lane i of the result is the sum of rows[i].
inline __m512i sum_each(const __m512i* rows) {
    __m512i pairs[8], fours[4];
    for (int i = 0; i < 8; i++)
        pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]),
                                    _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                    _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    const auto add_halves = [](__m512i a, __m512i b) {
        return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    };
    return add_halves(add_halves(fours[0], fours[1]), add_halves(fours[2], fours[3]));
}

inline __m512i join(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

// Scores of some rows with the keys of num_tokens <= LANES tokens, LANES of them a row. HEAD_DIM 0: not known when compiled.
template <int HEAD_DIM>
void score_keys(const int8_t* keys, int64_t token_stride, int num_tokens, __m512 key_scales, const Queries& queries,
                int first_row, int num_rows, int runtime_head_dim, float scale, float* scores, int64_t scores_stride) {
    const int head_dim = HEAD_DIM ? HEAD_DIM : runtime_head_dim;
    for (int row = first_row; row < first_row + num_rows; row++, scores += scores_stride) {
        const int8_t *high = queries.high + int64_t(row) * head_dim, *low = queries.low + int64_t(row) * head_dim;
        __m512i products[LANES];
        for (int token = 0; token < LANES; token++) {
            const int8_t* key = keys + std::min(token, num_tokens - 1) * token_stride;
            __m512i of_high = _mm512_setzero_si512(), of_low = of_high;
            for (int dim = 0; dim < head_dim; dim += STEP) {
                const __m512i larger = _mm512_xor_si512(_mm512_loadu_si512(key + dim), _mm512_set1_epi8(char(0x80)));
                of_high = _mm512_dpbusd_epi32(of_high, larger, _mm512_loadu_si512(high + dim));
                of_low = _mm512_dpbusd_epi32(of_low, larger, _mm512_loadu_si512(low + dim));
            }
            products[token] = join(of_high, of_low);
        }
        const __m512i sums = _mm512_sub_epi32(sum_each(products), _mm512_set1_epi32(queries.offsets[row]));
        const __m512 factors = _mm512_mul_ps(key_scales, _mm512_set1_ps(queries.scales[row] * scale));
        _mm512_storeu_ps(scores, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), factors));
    }
}

// Four tokens' values of STEP dims as [dim][token]: lane 4 l + i of mixed[j] has dim 16 l + 4 j + i.
inline void mix(__m512i* mixed, const int8_t* const* tokens) {
    const __m512i a = _mm512_loadu_si512(tokens[0]), b = _mm512_loadu_si512(tokens[1]);
    const __m512i c = _mm512_loadu_si512(tokens[2]), d = _mm512_loadu_si512(tokens[3]);
    const __m512i ab[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
    const __m512i cd[2] = {_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d)};
    for (int i = 0; i < 2; i++) {
        mixed[2 * i] = _mm512_unpacklo_epi16(ab[i], cd[i]);
        mixed[2 * i + 1] = _mm512_unpackhi_epi16(ab[i], cd[i]);
    }
}

// Adds weight * value of num_tokens <= LANES tokens to the rows' totals, [rows][steps][j][lane] as `mix` has them.
template <int HEAD_DIM>
void add_values(const int8_t* values, int64_t token_stride, int num_tokens, const uint8_t* high, const uint8_t* low,
                int64_t weights_stride, int32_t* totals, int num_rows, int runtime_head_dim) {
    const int head_dim = HEAD_DIM ? HEAD_DIM : runtime_head_dim;
    constexpr int FOURS = LANES / 4;
    for (int dim = 0; dim < head_dim; dim += STEP) {
        __m512i mixed[FOURS][4];
        for (int four = 0; four < FOURS; four++) {
            const int8_t* tokens[4];
            for (int i = 0; i < 4; i++) tokens[i] = values + std::min(4 * four + i, num_tokens - 1) * token_stride + dim;
            mix(mixed[four], tokens);
        }
        // behind the last token are the weights of others
        const __mmask16 is_there = __mmask16((1u << num_tokens) - 1);
        for (int row = 0; row < num_rows; row++) {
            alignas(16) uint32_t weights[2][FOURS];
            _mm_store_si128((__m128i*)weights[0], _mm_maskz_loadu_epi8(is_there, high + row * weights_stride));
            _mm_store_si128((__m128i*)weights[1], _mm_maskz_loadu_epi8(is_there, low + row * weights_stride));
            int32_t* const to = totals + int64_t(row) * head_dim + dim;
            for (int j = 0; j < 4; j++) {
                __m512i of_high = _mm512_setzero_si512(), of_low = _mm512_loadu_si512(to + j * LANES);
                for (int four = 0; four < FOURS; four++) {
                    of_high = _mm512_dpbusd_epi32(of_high, _mm512_set1_epi32(int(weights[0][four])), mixed[four][j]);
                    of_low = _mm512_dpbusd_epi32(of_low, _mm512_set1_epi32(int(weights[1][four])), mixed[four][j]);
                }
                _mm512_storeu_si512(to + j * LANES, join(of_high, of_low));
            }
        }
    }
}

// The totals of a row in the order of dims, times what 1 stands for.
inline void write_totals(float* out, const int32_t* totals, float scale, int head_dim) {
    for (int dim = 0; dim < head_dim; dim += STEP) {
        __m512i x[4], y[4];
        for (int j = 0; j < 4; j++) x[j] = _mm512_loadu_si512(totals + dim + j * LANES);
        for (int i = 0; i < 2; i++) {
            y[i] = _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0x44);      // lanes 0, 1 of both
            y[i + 2] = _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0xee);  // 2, 3
        }
        for (int i = 0; i < 2; i++) {
            x[2 * i] = _mm512_shuffle_i32x4(y[2 * i], y[2 * i + 1], 0x88);
            x[2 * i + 1] = _mm512_shuffle_i32x4(y[2 * i], y[2 * i + 1], 0xdd);
        }
        for (int l = 0; l < 4; l++)
            _mm512_storeu_ps(out + dim + l * LANES, _mm512_mul_ps(_mm512_cvtepi32_ps(x[l]), _mm512_set1_ps(scale)));
    }
}

// The keys of some heads, side by side in memory, as right-hand tiles [head][16 tokens][step][4 dims][token]; the first
// head of token i begins at keys + offsets[i]. For vectors they are unsigned.
inline void pack_keys(int8_t* packed, const int8_t* keys, const int64_t* offsets, int num_tokens, int num_heads, int head_dim) {
    const __m512i flips = _mm512_set1_epi8(char(use_tiles() ? 0 : 0x80));
    for (int token = 0; token < num_tokens; token += TILE)
        for (int head = 0; head < num_heads; head++) {
            int8_t* to = packed + (int64_t(head) * num_tokens + token) * head_dim;
            for (int dim = 0; dim < head_dim; dim += STEP, to += TILE * STEP) {
                __m512i rows[TILE];
                for (int i = 0; i < TILE; i++) rows[i] = _mm512_loadu_si512(keys + offsets[token + i] + head * head_dim + dim);
                transpose_pairs(rows);
                for (int i = 0; i < TILE; i++) _mm512_storeu_si512(to + i * STEP, _mm512_xor_si512(rows[i], flips));
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
                __m512i mixed[4];
                mix(mixed, tokens);
                for (int j = 0; j < 4; j++) _mm512_storeu_si512(to + j * TILE * STEP, mixed[j]);
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
    __m512i row(int side, int i) const {
        return join(_mm512_load_si512(parts[2 * side] + i * TILE), _mm512_load_si512(parts[2 * side + 1] + i * TILE));
    }
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
                const __m512 scales = _mm512_loadu_ps(key_scales + token + side * TILE);
                for (int i = 0; i < rows; i++) {
                    const __m512 factors = _mm512_mul_ps(scales, _mm512_set1_ps(queries.scales[first_row + row + i] * scale));
                    _mm512_storeu_ps(scores + i * scores_stride + token + side * TILE,
                                     _mm512_mul_ps(_mm512_cvtepi32_ps(sums.row(side, i)), factors));
                }
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
                    _mm512_storeu_si512(totals + int64_t(row + i) * head_dim + dim + side * TILE, sums.row(side, i));
        }
}

#endif

// `Numbers` of panels_vectors.h: signed queries, unsigned keys.
struct SignedFours : Alike {
    using Sum = int32_t;
    using Vector = __m512i;

    static Vector add(Vector sums, __m512i four, __m512i right) { return _mm512_dpbusd_epi32(sums, right, four); }
};

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
                finish(row + i, side, join(_mm512_load_si512(parts[0] + place), _mm512_load_si512(parts[1] + place)));
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
        multiply_two_parts<SignedFours>(rows(queries.high), rows(queries.low), right, head_dim / STEP, [&](int row, int side, __m512i sums) {
            const __m512i products = _mm512_sub_epi32(sums, _mm512_set1_epi32(queries.offsets[first_row + row]));
            const __m512 factors = _mm512_mul_ps(_mm512_loadu_ps(key_scales + token + side * TILE), _mm512_set1_ps(queries.scales[first_row + row] * scale));
            _mm512_storeu_ps(scores + row * scores_stride + token + side * TILE, _mm512_mul_ps(_mm512_cvtepi32_ps(products), factors));
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
        multiply_two_parts<Fours>(rows(high), rows(low), right, num_tokens / TOKENS, [&](int row, int side, __m512i sums) {
            _mm512_storeu_si512(totals + int64_t(row) * head_dim + dim + side * TILE, sums);
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
