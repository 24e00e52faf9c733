// A product with a matrix that was laid out for the dot products of bf16 pairs, once, when it was loaded.
//
// The matrix [out, in] is cut into panels of 32 outputs, a panel into steps of 32 inputs, a step into two tiles of 16
// outputs; in a tile the pairs of inputs follow each other, [pair][output][2]. So a tile is the right-hand operand of a
// tile product (AMX), each of its rows that of a vector one (AVX512_BF16), and a panel is read from front to back.

#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define WEFT_HAS_PACKED_MATRIX

#include <algorithm>
#include <immintrin.h>

#include "amx.h"
#include "threads.h"
#include "vector.h"

namespace weft {

constexpr int PANEL = 32;                            // outputs
constexpr int STEP = 32;                             // inputs
constexpr int PREFETCH = 4;                          // steps ahead
constexpr int64_t STEP_SIZE = int64_t(PANEL) * STEP;  // values of a panel's step, 2 KB

inline int64_t num_panels(int64_t num_out) { return (num_out + PANEL - 1) / PANEL; }

struct PackedMatrix {
    const BFloat16* values;  // [panels][steps][2 tiles][16 pairs][16 outputs][2]; outputs past the last are 0
    const BFloat16* bias;    // [out], or null
    int64_t num_out;         // a multiple of 16
    int num_in;              // a multiple of STEP
};

inline void pack_matrix(BFloat16* packed, const BFloat16* weight, int64_t num_out, int num_in, Team& team) {
    team.for_each(num_panels(num_out), [=](int64_t panel) {
        uint32_t* to = reinterpret_cast<uint32_t*>(packed + panel * num_in * PANEL);
        for (int k = 0; k < num_in; k += STEP)
            for (int tile = 0; tile < 2; tile++)
                for (int pair = 0; pair < STEP / 2; pair++)
                    for (int output = 0; output < LANES; output++, to++) {
                        const int64_t row = panel * PANEL + tile * LANES + output;
                        *to = 0;
                        if (row < num_out) std::memcpy(to, weight + row * num_in + k + 2 * pair, sizeof(*to));
                    }
    });
}

struct LeftRows {
    const BFloat16* x;
    int64_t stride;
    int count;
};

// Writes the sums of one row and panel, the bias added.
inline void write_sums(BFloat16* out, const PackedMatrix& matrix, int64_t output, __m512 first, __m512 second) {
    const bool has_two = output + LANES < matrix.num_out;
    if (matrix.bias) {
        first += (__m512)load(matrix.bias + output);
        if (has_two) second += (__m512)load(matrix.bias + output + LANES);
    }
    if (has_two)
        _mm512_storeu_si512(out + output, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + output), (__m256i)_mm512_cvtneps_pbh(first));
}

// ROWS rows of x times a panel. The inputs are shared out to CHAINS sums, so that few rows do not wait for the latency.
template <int ROWS, int CHAINS>
void multiply_panel(BFloat16* out, const BFloat16* x, int64_t x_stride, const PackedMatrix& matrix, int64_t panel) {
    const BFloat16* values = matrix.values + panel * matrix.num_in * PANEL;
    __m512 sums[CHAINS][ROWS][2] = {};
    for (int k = 0; k < matrix.num_in; k += STEP, values += STEP_SIZE) {
        for (int pair = 0; pair < STEP / 2; pair += CHAINS)
            for (int chain = 0; chain < CHAINS; chain++) {
                const BFloat16* from = values + (pair + chain) * 2 * LANES;
                __builtin_prefetch(from + PREFETCH * STEP_SIZE);  // the hardware looks less far ahead than memory is slow
                __builtin_prefetch(from + PREFETCH * STEP_SIZE + STEP_SIZE / 2);
                const __m512bh left = (__m512bh)_mm512_loadu_si512(from);
                const __m512bh right = (__m512bh)_mm512_loadu_si512(from + STEP_SIZE / 2);
                for (int row = 0; row < ROWS; row++) {
                    int32_t two;
                    std::memcpy(&two, x + row * x_stride + k + 2 * (pair + chain), sizeof(two));
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                    sums[chain][row][0] = _mm512_dpbf16_ps(sums[chain][row][0], both, left);
                    sums[chain][row][1] = _mm512_dpbf16_ps(sums[chain][row][1], both, right);
                }
            }
    }
    for (int row = 0; row < ROWS; row++) {
        __m512 first = sums[0][row][0], second = sums[0][row][1];
        for (int chain = 1; chain < CHAINS; chain++) first += sums[chain][row][0], second += sums[chain][row][1];
        write_sums(out + row * matrix.num_out, matrix, panel * PANEL, first, second);
    }
}

inline void multiply_panel_by_vectors(BFloat16* out, LeftRows left, const PackedMatrix& matrix, int64_t panel) {
    const BFloat16* x = left.x;
    int row = 0;
    const auto next = [&](auto multiply, int rows) {
        multiply(out + row * matrix.num_out, x + row * left.stride, left.stride, matrix, panel);
        row += rows;
    };
    while (left.count - row >= 8) next(multiply_panel<8, 1>, 8);
    if (left.count - row >= 4) next(multiply_panel<4, 2>, 4);
    while (left.count - row >= 1) next(multiply_panel<1, 4>, 1);
}

#ifdef WEFT_HAS_AMX

// Rows of x, two tiles of them in turn: as they lie, or packed.
struct LeftTiles {
    const BFloat16* first;   // of the rows [0, 16)
    const BFloat16* second;  // of the rows [16, 32), when there are such
    int64_t stride;          // between rows
    int64_t step;            // between the inputs of two steps
};

constexpr int ROWS = 2 * TILE;

// What is read by more than a few panels is worth being copied into tiles that each lie in one piece.
inline bool needs_packing(int64_t num_rows) { return num_rows > 2 * ROWS; }

// [blocks of 32 rows][steps][2 tiles][16 rows][32 inputs]; rows past the last are not written.
inline void pack_left(BFloat16* packed, LeftRows left, int num_in, Team& team) {
    team.for_each((left.count + TILE - 1) / TILE, [=](int64_t item) {
        BFloat16* to = packed + (item / 2 * num_in * 2 + item % 2 * STEP) * TILE;
        for (int row = int(item) * TILE; row < std::min<int>(left.count, int(item + 1) * TILE); row++, to += STEP)
            for (int k = 0; k < num_in; k += STEP)
                std::memcpy(to + int64_t(k) * ROWS, left.x + row * left.stride + k, STEP * sizeof(BFloat16));
    });
}

// 16 or 32 rows, as the tiles are configured, times inputs [begin, end) of a panel; the sums [rows][PANEL] are begun or
// continued. IS_FAR: the panel comes from memory, not from a cache.
template <int ROW_TILES, bool IS_FAR>
void multiply_tiles(float* sums, int64_t sums_stride, LeftTiles left, const PackedMatrix& matrix, int64_t panel, int begin,
                    int end) {
    const int64_t width = sums_stride * int64_t(sizeof(float));
    float* lower = sums + TILE * sums_stride;
    const BFloat16* values = matrix.values + (panel * matrix.num_in + begin) * PANEL;
    const BFloat16 *first = left.first + begin / STEP * left.step, *second = left.second + begin / STEP * left.step;
    const int64_t stride = left.stride * int64_t(sizeof(BFloat16));
    if (begin == 0) {
        _tile_zero(0);
        _tile_zero(1);
        if (ROW_TILES > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums, width);
        _tile_loadd(1, sums + TILE, width);
        if (ROW_TILES > 1) {
            _tile_loadd(2, lower, width);
            _tile_loadd(3, lower + TILE, width);
        }
    }
    for (int k = begin; k < end; k += STEP, values += STEP_SIZE, first += left.step, second += left.step) {
        if (IS_FAR)
            for (int line = 0; line < STEP_SIZE; line += 32)
                _mm_prefetch(reinterpret_cast<const char*>(values + PREFETCH * STEP_SIZE + line), _MM_HINT_T1);
        _tile_loadd(4, first, stride);
        _tile_loadd(6, values, 64);
        _tile_loadd(7, values + STEP_SIZE / 2, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (ROW_TILES > 1) {
            _tile_loadd(5, second, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, width);
    _tile_stored(1, sums + TILE, width);
    if (ROW_TILES > 1) {
        _tile_stored(2, lower, width);
        _tile_stored(3, lower + TILE, width);
    }
}

// What becomes of the sums: written as they are, or, where the first half of the outputs are gates of the second, as
// silu(gate) * up. Of both, a panel of the result takes the sums of `num_panels` panels of the matrix.
struct Plain {
    static constexpr int num_panels = 1;
    static int64_t panel(const PackedMatrix&, int64_t panel, int) { return panel; }
    static void write(BFloat16* out, const PackedMatrix& matrix, int64_t panel, const float* sums, const float*) {
        write_sums(out, matrix, panel * PANEL, _mm512_load_ps(sums), _mm512_load_ps(sums + TILE));
    }
    static int64_t num_out(const PackedMatrix& matrix) { return matrix.num_out; }
};

struct Gated {
    static constexpr int num_panels = 2;
    static int64_t panel(const PackedMatrix& matrix, int64_t panel, int which) {
        return panel + which * (matrix.num_out / 2 / PANEL);
    }
    static void write(BFloat16* out, const PackedMatrix& matrix, int64_t panel, const float* gates, const float* ups) {
        alignas(64) BFloat16 rounded[2][PANEL];
        for (int which = 0; which < 2; which++) {
            const int64_t first = Gated::panel(matrix, panel, which) * PANEL;
            const float* sums = which ? ups : gates;
            write_sums(rounded[which] - first, matrix, first, _mm512_load_ps(sums), _mm512_load_ps(sums + TILE));
        }
        for (int i = 0; i < PANEL; i += LANES)
            store(out + panel * PANEL + i, gated(load(rounded[0] + i), load(rounded[1] + i)));
    }
    static int64_t num_out(const PackedMatrix& matrix) { return matrix.num_out / 2; }
};

// Few rows, as they lie: the panels pass once, as fast as memory gives them.
template <class Result>
void multiply_few_rows(BFloat16* out, LeftRows left, const PackedMatrix& matrix, int64_t begin, int64_t end) {
    alignas(64) float sums[Result::num_panels][ROWS * PANEL];
    const int64_t num_out = Result::num_out(matrix);
    for (int row = 0; row < left.count; row += ROWS) {
        const int rows = std::min(ROWS, left.count - row);
        const TileScope scope(std::min(rows, TILE), std::max(rows - TILE, 1));
        const BFloat16* first = left.x + row * left.stride;
        const LeftTiles tiles{first, first + TILE * left.stride, left.stride, STEP};
        for (int64_t panel = begin; panel < end; panel++) {
            for (int i = 0; i < Result::num_panels; i++)
                if (rows > TILE)
                    multiply_tiles<2, true>(sums[i], PANEL, tiles, matrix, Result::panel(matrix, panel, i), 0, matrix.num_in);
                else
                    multiply_tiles<1, true>(sums[i], PANEL, tiles, matrix, Result::panel(matrix, panel, i), 0, matrix.num_in);
            for (int r = 0; r < rows; r++)
                Result::write(out + (row + r) * num_out, matrix, panel, sums[0] + r * PANEL,
                              sums[Result::num_panels - 1] + r * PANEL);
        }
    }
}

// Many rows, packed: a part of a panel that fits the first-level cache stays there while all of them pass.
template <class Result>
void multiply_many_rows(BFloat16* out, const BFloat16* packed, int num_rows, const PackedMatrix& matrix, int64_t begin,
                        int64_t end) {
    constexpr int PART = 256;  // inputs
    static thread_local Buffer<float> buffer;
    const size_t size = size_t(num_rows + ROWS) * PANEL;
    float* sums = buffer.room(size * Result::num_panels);
    const int64_t num_out = Result::num_out(matrix);
    const TileScope scope;
    for (int64_t panel = begin; panel < end; panel++)
        for (int i = 0; i < Result::num_panels; i++)
            for (int part = 0; part < matrix.num_in; part += PART) {
                const int end_of_part = std::min(part + PART, matrix.num_in);
                const bool is_last = i == Result::num_panels - 1 && end_of_part == matrix.num_in;
                for (int row = 0; row < num_rows; row += ROWS) {
                    const BFloat16* first = packed + int64_t(row) * matrix.num_in;
                    const LeftTiles tiles{first, first + TILE * STEP, STEP, ROWS * STEP};
                    float* to = sums + i * size + size_t(row) * PANEL;
                    multiply_tiles<2, false>(to, PANEL, tiles, matrix, Result::panel(matrix, panel, i), part, end_of_part);
                    for (int r = row; is_last && r < std::min(row + ROWS, num_rows); r++)
                        Result::write(out + r * num_out, matrix, panel, sums + size_t(r) * PANEL, sums + (i * size + size_t(r) * PANEL));
                }
            }
}

#endif

// Values of room that `multiply` wants for so many rows.
inline int64_t scratch_size(int64_t num_rows, int num_in) {
#ifdef WEFT_HAS_AMX
    if (may_use_tiles() && needs_packing(num_rows)) return (num_rows + ROWS - 1) / ROWS * ROWS * num_in;
#endif
    return 0;
}

constexpr int MULTIPLY_SECTIONS = 2;  // of a team, at most

// How a product is shared out: runs of rows times runs of panels of the result.
struct Shares {
    int most_rows;
    int64_t panels, run, panel_runs, count;

    Shares(int num_rows, int num_in, int64_t num_out) {
        constexpr int64_t CACHED = 512 * 1024;  // of x stays near a core while all panels pass
        constexpr int64_t RUN = 128 * 1024;     // of the matrix are read by an item
        most_rows = std::max<int>(64, CACHED / (num_in * int(sizeof(BFloat16))) / 64 * 64);
        panels = num_panels(num_out);
        run = std::max<int64_t>(1, RUN / (int64_t(num_in) * PANEL * int64_t(sizeof(BFloat16))));
        panel_runs = (panels + run - 1) / run;
        count = (num_rows + most_rows - 1) / most_rows * panel_runs;
    }
};

// Calls work(first row, rows, first panel, panels' end) for each share.
template <class Work>
void for_each_share(int num_rows, int num_in, int64_t num_out, Team& team, const Work& work) {
    const Shares shares(num_rows, num_in, num_out);
    team.for_each(shares.count, [&](int64_t item) {
        const int row = int(item / shares.panel_runs) * shares.most_rows;
        const int64_t begin = item % shares.panel_runs * shares.run;
        work(row, std::min(shares.most_rows, num_rows - row), begin, std::min(shares.panels, begin + shares.run));
    });
}

#ifdef WEFT_HAS_AMX

template <class Result>
void multiply_by_tiles(BFloat16* out, LeftRows left, const PackedMatrix& matrix, BFloat16* scratch, Team& team) {
    const bool is_packed = needs_packing(left.count);
    if (is_packed) pack_left(scratch, left, matrix.num_in, team);
    const int64_t num_out = Result::num_out(matrix);
    for_each_share(left.count, matrix.num_in, num_out, team, [=](int row, int rows, int64_t begin, int64_t end) {
        BFloat16* to = out + row * num_out;
        if (is_packed)
            multiply_many_rows<Result>(to, scratch + int64_t(row) * matrix.num_in, rows, matrix, begin, end);
        else
            multiply_few_rows<Result>(to, LeftRows{left.x + row * left.stride, left.stride, rows}, matrix, begin, end);
    });
}

#endif

// out[row, o] = x[row] . weight[o] + bias[o], sums in float32.
inline void multiply(BFloat16* out, LeftRows left, const PackedMatrix& matrix, BFloat16* scratch, Team& team) {
#ifdef WEFT_HAS_AMX
    if (may_use_tiles()) return multiply_by_tiles<Plain>(out, left, matrix, scratch, team);
#endif
    for_each_share(left.count, matrix.num_in, matrix.num_out, team, [=](int row, int rows, int64_t begin, int64_t end) {
        const LeftRows part{left.x + row * left.stride, left.stride, rows};
        for (int64_t panel = begin; panel < end; panel++)
            multiply_panel_by_vectors(out + row * matrix.num_out, part, matrix, panel);
    });
}

// silu(gate) * up of such a product whose outputs are the gates, and as many that they gate; half of them a multiple of
// PANEL. The same bits as one after the other. Only where there are matrix tiles.
inline void multiply_gated(BFloat16* out, LeftRows left, const PackedMatrix& matrix, BFloat16* scratch, Team& team) {
#ifdef WEFT_HAS_AMX
    multiply_by_tiles<Gated>(out, left, matrix, scratch, team);
#endif
}

}  // namespace weft

#endif
