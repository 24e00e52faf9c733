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
constexpr int ROWS = 32;                             // that are packed together
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
    bool is_packed = false;  // as pack_left does
};

// Writes the sums of one row and panel, the bias added; `output` is the first of the panel. A streamed row goes past the
// caches.
inline void write_sums(BFloat16* out, const PackedMatrix& matrix, int64_t output, __m512 first, __m512 second,
                       bool is_streamed = false) {
    const bool has_two = output + LANES < matrix.num_out;
    if (matrix.bias) {
        first += (__m512)load(matrix.bias + output);
        if (has_two) second += (__m512)load(matrix.bias + output + LANES);
    }
    if (is_streamed)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out), (__m512i)_mm512_cvtne2ps_pbh(second, first));
    else if (has_two)
        _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(first));
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
        write_sums(out + row * matrix.num_out + panel * PANEL, matrix, panel * PANEL, first, second);
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

// Where a result goes: its rows, or, as the left side of the next product, packed.
struct Target {
    BFloat16* values;
    int64_t num_out;
    bool is_packed = false;

    int64_t row_stride() const { return is_packed ? PANEL : num_out; }
    BFloat16* at(int64_t row, int64_t panel) const {
        if (!is_packed) return values + row * num_out + panel * PANEL;
        return values + row / ROWS * ROWS * num_out + panel * ROWS * PANEL + row % ROWS * PANEL;
    }

    bool is_streamed(int64_t num_rows) const {
        return !is_packed && goes_past_caches(values, num_rows, num_out * int64_t(sizeof(BFloat16)));
    }
};

#ifdef WEFT_HAS_AMX

// Rows of x, two tiles of them in turn, as they lie.
struct LeftTiles {
    const BFloat16* first;   // of the rows [0, 16)
    const BFloat16* second;  // of the rows [16, 32), when there are such
    int64_t stride;          // between rows
};

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

// 16 or 32 rows, as the tiles are configured, times a panel: the sums [rows][PANEL]. IS_FAR: the panel comes from memory,
// not from a cache, and `following` after it. Calls `meanwhile` with each step, before there are new sums.
template <int ROW_TILES, bool IS_FAR, class Meanwhile>
void multiply_tiles(float* sums, int64_t sums_stride, LeftTiles left, const PackedMatrix& matrix, int64_t panel,
                    int64_t following, const Meanwhile& meanwhile) {
    const int64_t width = sums_stride * int64_t(sizeof(float));
    float* lower = sums + TILE * sums_stride;
    const BFloat16* values = matrix.values + panel * matrix.num_in * PANEL;
    const BFloat16* later = matrix.values + following * matrix.num_in * PANEL - matrix.num_in * PANEL;
    const BFloat16 *first = left.first, *second = left.second;
    const int64_t stride = left.stride * int64_t(sizeof(BFloat16));
    _tile_zero(0);
    _tile_zero(1);
    if (ROW_TILES > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < matrix.num_in; k += STEP, values += STEP_SIZE, first += STEP, second += STEP) {
        const BFloat16* ahead = (k + PREFETCH * STEP < matrix.num_in ? values : later + k * PANEL) + PREFETCH * STEP_SIZE;
        ask_quarter<IS_FAR>(ahead, 0);
        _tile_loadd(4, first, stride);
        ask_quarter<IS_FAR>(ahead, 1);
        _tile_loadd(6, values, 64);
        ask_quarter<IS_FAR>(ahead, 2);
        _tile_loadd(7, values + STEP_SIZE / 2, 64);
        _tile_dpbf16ps(0, 4, 6);
        ask_quarter<IS_FAR>(ahead, 3);
        _tile_dpbf16ps(1, 4, 7);
        if (ROW_TILES > 1) {
            _tile_loadd(5, second, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        meanwhile();
    }
    _tile_stored(0, sums, width);
    _tile_stored(1, sums + TILE, width);
    if (ROW_TILES > 1) {
        _tile_stored(2, lower, width);
        _tile_stored(3, lower + TILE, width);
    }
}

inline void write_row(BFloat16* out, const PackedMatrix& matrix, int64_t panel, const float* sums, bool is_streamed = false) {
    write_sums(out, matrix, panel * PANEL, _mm512_load_ps(sums), _mm512_load_ps(sums + TILE), is_streamed);
}

// silu(gate) * up of one row, where the first half of the outputs are gates of the second.
inline void write_gated_row(BFloat16* out, const PackedMatrix& matrix, int64_t panel, const BFloat16* gates, const float* ups) {
    alignas(64) BFloat16 rounded[PANEL];
    write_row(rounded, matrix, panel, ups);
    for (int i = 0; i < PANEL; i += LANES) store(out + i, gated<BFloat16>(load(gates + i), load(rounded + i)));
}

// The panel of the ups of a panel of gates.
inline int64_t panel_of_ups(const PackedMatrix& matrix, int64_t panel) { return panel + matrix.num_out / 2 / PANEL; }

// The sums of a block of 32 rows and a panel on their way to the result, some rows with each step of the next block.
struct Waiting {
    const PackedMatrix* matrix;
    int64_t panel;
    const float* sums;
    BFloat16* out;
    int64_t stride;
    const BFloat16* gates;  // [rows][PANEL], of ups
    bool is_streamed;
    int rows = 0;  // that are not written yet

    template <bool IS_GATED>
    void write(int most) {
        for (int row = 0; row < std::min(rows, most); row++, sums += PANEL, out += stride) {
            if (IS_GATED)
                write_gated_row(out, *matrix, panel, gates + row * PANEL, sums);
            else
                write_row(out, *matrix, panel, sums, is_streamed);
        }
        if (IS_GATED) gates += most * PANEL;
        rows -= std::min(rows, most);
    }
};

// Few rows, as they lie: the panels pass once, as fast as memory gives them. What becomes of a panel's sums is done with the
// steps of the next one, so that memory is never waited for with nothing asked of it.
template <bool IS_GATED>
void multiply_few_rows(Target out, LeftRows left, const PackedMatrix& matrix, int64_t begin, int64_t end, int64_t following) {
    alignas(64) float sums[ROWS * PANEL];
    alignas(64) BFloat16 gates[ROWS * PANEL];
    const int pace = (ROWS * STEP + matrix.num_in - 1) / matrix.num_in;  // rows a step
    for (int row = 0; row < left.count; row += ROWS) {
        const int rows = std::min(ROWS, left.count - row);
        const TileScope scope(std::min(rows, TILE), std::max(rows - TILE, 1));
        const BFloat16* first = left.x + row * left.stride;
        const LeftTiles tiles{first, first + TILE * left.stride, left.stride};
        Waiting waiting{};
        const auto multiply_panel = [&](int64_t panel, int64_t following, auto write) {
            if (rows > TILE)
                multiply_tiles<2, true>(sums, PANEL, tiles, matrix, panel, following, [&] { write(pace); });
            else
                multiply_tiles<1, true>(sums, PANEL, tiles, matrix, panel, following, [&] { write(pace); });
        };
        const auto write_rows = [&](int most) { waiting.write<IS_GATED>(most); };
        const auto write_gates = [&](int most) { waiting.write<false>(most); };
        for (int64_t panel = begin; panel < end; panel++) {
            const int64_t next = panel + 1 < end ? panel + 1 : following, ups = IS_GATED ? panel_of_ups(matrix, panel) : 0;
            BFloat16* const to = out.at(row, panel);
            multiply_panel(panel, IS_GATED ? ups : next, write_rows);
            waiting = {&matrix, panel, sums, IS_GATED ? gates : to, IS_GATED ? PANEL : out.row_stride(), nullptr, false, rows};
            if (!IS_GATED) continue;
            multiply_panel(ups, next, write_gates);
            waiting = {&matrix, ups, sums, to, out.row_stride(), gates, false, rows};
        }
        write_rows(ROWS);
    }
}

// Asks for a panel in the second-level cache, some lines with each step of another.
struct Ahead {
    const char *next, *end;
    int lines;  // a step

    Ahead(const PackedMatrix& matrix, int64_t panel, int num_blocks)
        : next(reinterpret_cast<const char*>(matrix.values + panel * matrix.num_in * PANEL)),
          end(next + int64_t(matrix.num_in) * PANEL * int64_t(sizeof(BFloat16))), lines((32 + num_blocks - 1) / num_blocks) {}

    void ask() {
        for (int line = 0; line < lines && next < end; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    }
};

// A tile that streams by does not enter the first-level cache, nor, from farther away, the second-level one. The
// intrinsics want the tile's number as it is written.
#define WEFT_LOAD_TILE(IS_KEPT, TILE_NUMBER, FROM) \
    if (IS_KEPT)                                   \
        _tile_loadd(TILE_NUMBER, FROM, 64);        \
    else                                           \
        _tile_stream_loadd(TILE_NUMBER, FROM, 64);

template <bool IS_LEFT_KEPT, bool IS_PANEL_KEPT>
void multiply_step(const BFloat16* left, const BFloat16* values) {
    WEFT_LOAD_TILE(IS_LEFT_KEPT, 4, left)
    WEFT_LOAD_TILE(IS_PANEL_KEPT, 6, values)
    WEFT_LOAD_TILE(IS_PANEL_KEPT, 7, values + STEP_SIZE / 2)
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    WEFT_LOAD_TILE(IS_LEFT_KEPT, 5, left + TILE * STEP)
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

#undef WEFT_LOAD_TILE

// What of a block comes from no farther away than the second-level cache.
struct Near {
    bool left, panel;
};

// 32 packed rows times a panel. The second-level cache gives one of two operands as fast as tiles are multiplied, not
// both: so the beginning of the panel stays in the first-level cache, and what goes by does not enter it.
template <bool IS_GATED>
void multiply_block(float* sums, const BFloat16* left, const BFloat16* values, int num_steps, Near near, Waiting& waiting,
                    Ahead& ahead) {
    constexpr int KEPT = 16;  // steps, 32 KB
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int rows_a_step = num_steps < ROWS ? 2 : 1;
    const auto run = [&](auto multiply, int step, int end) {
        for (; step < end; step++, left += ROWS * STEP, values += STEP_SIZE) {
            multiply(left, values);
            ahead.ask();
            waiting.write<IS_GATED>(rows_a_step);
        }
    };
    const int num_kept = near.panel ? std::min(KEPT, num_steps) : num_steps;
    if (near.left) {
        run(multiply_step<false, true>, 0, num_kept);
        run(multiply_step<false, false>, num_kept, num_steps);
    } else {
        run(multiply_step<true, true>, 0, num_kept);
        run(multiply_step<true, false>, num_kept, num_steps);
    }
    waiting.write<IS_GATED>(ROWS);
    _tile_stored(0, sums, PANEL * sizeof(float));
    _tile_stored(1, sums + TILE, PANEL * sizeof(float));
    _tile_stored(2, sums + TILE * PANEL, PANEL * sizeof(float));
    _tile_stored(3, sums + TILE * PANEL + TILE, PANEL * sizeof(float));
}

// Packed rows, as many as the second-level cache keeps, and the panel whose product with them is wanted next.
struct Pass {
    const BFloat16* packed;
    int num_rows;
    bool is_near;  // the rows are in the second-level cache
    int64_t next_panel;
};

// All rows of a pass times a panel of the matrix: to `out`, gated where there are gates.
template <bool IS_GATED>
void multiply_panel_by_tiles(BFloat16* out, int64_t block_stride, int64_t row_stride, bool is_streamed, const BFloat16* gates,
                             const Pass& pass, const PackedMatrix& matrix, int64_t panel) {
    alignas(64) float sums[2][ROWS * PANEL];
    const int num_blocks = (pass.num_rows + ROWS - 1) / ROWS;
    Ahead ahead(matrix, pass.next_panel, num_blocks);
    Waiting waiting{};
    const BFloat16* values = matrix.values + panel * matrix.num_in * PANEL;
    for (int block = 0; block < num_blocks; block++) {
        const int row = block * ROWS;
        float* to = sums[block % 2];
        const Near near{pass.is_near, block > 0};
        const BFloat16* left = pass.packed + int64_t(row) * matrix.num_in;
        multiply_block<IS_GATED>(to, left, values, matrix.num_in / STEP, near, waiting, ahead);
        waiting = {&matrix, panel, to, out + block * block_stride, row_stride, IS_GATED ? gates + row * PANEL : nullptr,
                   is_streamed, std::min(ROWS, pass.num_rows - row)};
    }
    waiting.write<IS_GATED>(ROWS);
}

// Many rows, packed. `following` is the panel that is likely to be wanted after `end`; is_near: this thread has just read
// these rows.
template <bool IS_GATED>
void multiply_many_rows(Target out, int row, int num_rows, const BFloat16* packed, const PackedMatrix& matrix, int64_t begin,
                        int64_t end, int64_t following, bool is_streamed, bool is_near) {
    const TileScope scope;
    const int64_t block_stride = ROWS * out.num_out, row_stride = out.row_stride();
    for (int64_t panel = begin; panel < end; panel++) {
        const int64_t next = panel + 1 < end ? panel + 1 : following;
        BFloat16* to = out.at(row, panel);
        Pass pass{packed, num_rows, is_near || panel > begin, next};
        if (!IS_GATED) {
            multiply_panel_by_tiles<false>(to, block_stride, row_stride, is_streamed, nullptr, pass, matrix, panel);
            continue;
        }
        static thread_local Buffer<BFloat16> buffer;
        BFloat16* gates = buffer.room(size_t(num_rows) * PANEL);
        pass.next_panel = panel_of_ups(matrix, panel);
        multiply_panel_by_tiles<false>(gates, ROWS * PANEL, PANEL, false, nullptr, pass, matrix, panel);
        const Pass of_ups{packed, num_rows, true, next};
        multiply_panel_by_tiles<true>(to, block_stride, row_stride, false, gates, of_ups, matrix, panel_of_ups(matrix, panel));
    }
    if (is_streamed) _mm_sfence();  // before others are told that it is done
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

    Shares(int num_rows, int num_in, int64_t num_out, int num_threads) {
        constexpr int64_t CACHED = 1024 * 1024;  // of x stays near a core while all panels pass
        constexpr int64_t LEAST = 128 * 1024, MOST = 512 * 1024;  // of the matrix are read by an item
        const int64_t panel_bytes = int64_t(num_in) * PANEL * int64_t(sizeof(BFloat16));
        most_rows = std::max<int>(64, CACHED / (num_in * int(sizeof(BFloat16))) / 64 * 64);
        panels = num_panels(num_out);
        run = std::max<int64_t>(1, std::clamp(panels * panel_bytes / (16 * num_threads), LEAST, num_rows > ROWS ? LEAST : MOST) / panel_bytes);
        panel_runs = (panels + run - 1) / run;
        count = (num_rows + most_rows - 1) / most_rows * panel_runs;
    }
};

// Calls work(first row, rows, first panel, panels' end, likely first panel of the same thread's next share) for each share.
template <class Work>
void for_each_share(int num_rows, int num_in, int64_t num_out, Team& team, const Work& work) {
    const Shares shares(num_rows, num_in, num_out, team.size());
    team.for_each(shares.count, [&](int64_t item) {
        const int row = int(item / shares.panel_runs) * shares.most_rows;
        const int64_t begin = item % shares.panel_runs * shares.run;
        const int64_t following = (item + team.size()) % shares.panel_runs * shares.run;
        work(row, std::min(shares.most_rows, num_rows - row), begin, std::min(shares.panels, begin + shares.run), following);
    });
}

#ifdef WEFT_HAS_AMX

// Left: packed, or it becomes so in `scratch` where there are many rows.
template <bool IS_GATED>
void multiply_by_tiles(Target out, LeftRows left, const PackedMatrix& matrix, BFloat16* scratch, Team& team) {
    const bool is_packed = needs_packing(left.count), is_streamed = out.is_streamed(left.count);
    if (is_packed && !left.is_packed) pack_left(scratch, left, matrix.num_in, team);
    const BFloat16* packed = left.is_packed ? left.x : scratch;
    int last_row = -1;  // that this thread has read
    const auto work = [=, &last_row](int row, int rows, int64_t begin, int64_t end, int64_t following) {
        if (is_packed)
            multiply_many_rows<IS_GATED>(out, row, rows, packed + int64_t(row) * matrix.num_in, matrix, begin, end, following,
                                         is_streamed, row == last_row);
        else
            multiply_few_rows<IS_GATED>({out.at(row, 0), out.num_out}, {left.x + row * left.stride, left.stride, rows}, matrix,
                                        begin, end, following);
        last_row = row;
    };
    for_each_share(left.count, matrix.num_in, out.num_out, team, work);
}

#endif

// out[row, o] = x[row] . weight[o] + bias[o], sums in float32.
inline void multiply(Target out, LeftRows left, const PackedMatrix& matrix, BFloat16* scratch, Team& team) {
#ifdef WEFT_HAS_AMX
    if (may_use_tiles()) return multiply_by_tiles<false>(out, left, matrix, scratch, team);
#endif
    for_each_share(left.count, matrix.num_in, matrix.num_out, team, [=](int row, int rows, int64_t begin, int64_t end, int64_t) {
        const LeftRows part{left.x + row * left.stride, left.stride, rows};
        for (int64_t panel = begin; panel < end; panel++)
            multiply_panel_by_vectors(out.values + row * matrix.num_out, part, matrix, panel);
    });
}

// silu(gate) * up of such a product whose outputs are the gates, and as many that they gate; half of them a multiple of
// PANEL. The same bits as one after the other. Only where there are matrix tiles.
inline void multiply_gated(Target out, LeftRows left, const PackedMatrix& matrix, BFloat16* scratch, Team& team) {
#ifdef WEFT_HAS_AMX
    multiply_by_tiles<true>(out, left, matrix, scratch, team);
#endif
}

}  // namespace weft

#endif
