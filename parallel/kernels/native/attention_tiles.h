// Attention of a chunk by matrix tiles: the two products of a partition, with keys and values as packed matrices (matrix.h).

#pragma once

#include "matrix.h"

#ifdef WEFT_HAS_AMX

namespace weft {

// Rows [0, 16) of 16 pairs of bf16 become columns.
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

// The keys of some heads, side by side in memory, each as a packed matrix [num_tokens, head_dim], one after the other. The
// first head of token i begins at keys + offsets[i]. All heads of a few tokens are packed before the next tokens, since so they lie.
inline void pack_keys(BFloat16* packed, const BFloat16* keys, const int64_t* offsets, int num_tokens, int num_heads, int head_dim) {
    for (int token = 0; token < num_tokens; token += TILE)
        for (int head = 0; head < num_heads; head++) {
            BFloat16* to = packed + (int64_t(head) * num_tokens + token / PANEL * PANEL) * head_dim + token % PANEL / TILE * (STEP_SIZE / 2);
            for (int dim = 0; dim < head_dim; dim += STEP, to += STEP_SIZE) {
                __m512i rows[TILE];
                for (int i = 0; i < TILE; i++) rows[i] = _mm512_loadu_si512(keys + offsets[token + i] + head * head_dim + dim);
                transpose_pairs(rows);
                for (int pair = 0; pair < TILE; pair++) _mm512_storeu_si512(to + pair * STEP, rows[pair]);
            }
        }
}

// The values of some heads, each as a packed matrix [head_dim, num_tokens].
inline void pack_values(BFloat16* packed, const BFloat16* values, const int64_t* offsets, int num_tokens, int num_heads,
                        int head_dim) {
    struct Places {
        uint16_t low[32], high[32];
    };
    static const Places places = [] {
        Places places;
        for (int i = 0; i < 32; i++) {
            places.low[i] = uint16_t(i / 2 + i % 2 * 32);
            places.high[i] = uint16_t(places.low[i] + 16);
        }
        return places;
    }();
    const __m512i low = _mm512_loadu_si512(places.low), high = _mm512_loadu_si512(places.high);
    for (int token = 0; token < num_tokens; token += 2) {
        const BFloat16 *even = values + offsets[token], *odd = values + offsets[token + 1];
        BFloat16* to = packed + token / STEP * STEP_SIZE + token % STEP * (STEP / 2);
        for (int dim = 0; dim < num_heads * head_dim; dim += PANEL, to += PANEL * num_tokens) {
            const __m512i first = _mm512_loadu_si512(even + dim), second = _mm512_loadu_si512(odd + dim);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, low, second));
            _mm512_storeu_si512(to + STEP_SIZE / 2, _mm512_permutex2var_epi16(first, high, second));
        }
    }
}

// out[row] = left[row] . matrix for num_rows rows, of which left and out have room for a multiple of 32.
inline void multiply_dense(float* out, int64_t out_stride, const BFloat16* left, int64_t left_stride, int num_rows,
                           const PackedMatrix& matrix) {
    for (int row = 0; row < num_rows; row += ROWS) {
        const BFloat16* first = left + row * left_stride;
        const LeftTiles tiles{first, first + TILE * left_stride, left_stride};
        for (int64_t panel = 0; panel < num_panels(matrix.num_out); panel++) {
            float* to = out + row * out_stride + panel * PANEL;
            if (num_rows - row > TILE)
                multiply_tiles<2, false>(to, out_stride, tiles, matrix, panel);
            else
                multiply_tiles<1, false>(to, out_stride, tiles, matrix, panel);
        }
    }
}

inline void to_bfloat16(BFloat16* to, const float* from, int count) {
    for (int i = 0; i < count; i += 2 * LANES)
        _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + LANES), _mm512_loadu_ps(from + i)));
}

}  // namespace weft

#endif
