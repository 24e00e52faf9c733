// The same product by matrix tiles, where the CPU has them for bfloat16: 16 rows of the matrix, as they lie, times 16 rows of x.

#pragma once

#include "shuffles.h"
#include "targets.h"
#include "threads.h"
#include "vector.h"

#if !WEFT_IS_FLOAT16 && !WEFT_IS_FLOAT32 && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
#define WEFT_HAS_AMX

#include <algorithm>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft {

constexpr int TILE = 16;      // rows of a tile, and pairs of numbers in one of its rows
constexpr int TILE_K = 32;    // numbers in a row

#ifdef WEFT_HAS_AMX

// Whether the kernel lets this process use tiles; asked once.
inline bool may_use_tiles() {
    static const bool may = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return may;
}

// Eight tiles for as long as this lives, where they may be used: 0 to 3 for the sums of two tiles of x, 4 and 5, with two of the matrix, 6 and 7.
// What was configured before comes back: oneDNN remembers what it has set.
class TileScope {
  public:
    explicit TileScope(int first_rows = TILE, int second_rows = TILE) {
        Config config;
        config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(first_rows);
        config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(second_rows);
        begin(config);
    }
    // The right sides, and so the sums, are `num_columns` wide.
    static TileScope of_columns(int num_columns) {
        Config config;
        for (int tile : {0, 1, 2, 3, 6, 7}) config.column_bytes[tile] = uint16_t(num_columns * sizeof(float));
        return TileScope(config);
    }
    // One left side, 4, of `num_rows` and so many sums, 0 to 3; right sides from 5 on.
    static TileScope of_rows(int num_rows) {
        Config config;
        for (int tile : {0, 1, 2, 3, 4}) config.rows[tile] = uint8_t(num_rows);
        return TileScope(config);
    }
    ~TileScope() {
        if (may_use_tiles()) __asm__ volatile("ldtilecfg %0" ::"m"(before_));
    }
    TileScope(const TileScope&) = delete;

  private:
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
    };
    explicit TileScope(const Config& config) { begin(config); }

    void begin(const Config& config) {
        if (!may_use_tiles()) return;
        __asm__ volatile("sttilecfg %0" : "=m"(before_));  // the intrinsics do not tell the compiler of all 64 bytes
        __asm__ volatile("ldtilecfg %0" ::"m"(config));
    }

    Config before_;
};

// A quarter of the 2 KB that a step reads from memory later on, to the second-level cache. A core has few places for lines on
// their way, and waits when it asks for more at once: so a step asks for some between its tiles.
template <bool IS_FAR>
inline void ask_quarter(const void* step, int quarter) {
    if (!IS_FAR) return;
    const char* from = static_cast<const char*>(step) + quarter * 512;
    for (int line = 0; line < 512; line += 64) _mm_prefetch(from + line, _MM_HINT_T1);
}

// x in the layout of a right-hand tile: [TILE_K block][TILE rows of x][pair][row][2], rows past the last are 0.
inline const Number* pack_rows(const Number* x, int64_t x_row_stride, int num_rows, int num_in, Buffer<Number>& buffer) {
    const int row_blocks = (num_rows + TILE - 1) / TILE;
    Number* const packed = buffer.room(size_t(num_in) * row_blocks * TILE);
    Number* to = packed;
    for (int k = 0; k < num_in; k += TILE_K)
        for (int first = 0; first < row_blocks * TILE; first += TILE, to += TILE * TILE_K) {
            Ints rows[TILE] = {};
            for (int i = 0; i < std::min(TILE, num_rows - first); i++) rows[i] = load_bits(x + (first + i) * x_row_stride + k);
            transpose(rows);
            for (int pair = 0; pair < TILE; pair++) store_bits(to + pair * TILE_K, rows[pair]);
        }
    return packed;
}

// out[row, o .. o + 15] from sums[o][row]. A streamed row goes past the caches.
inline void write_transposed(float* out, int64_t num_out, int num_rows, const float* sums, bool is_streamed) {
    Ints rows[TILE];
    for (int i = 0; i < TILE; i++) rows[i] = load_bits(sums + i * TILE);
    transpose(rows);
    for (int row = 0; row < num_rows; row++, out += num_out)
        if (is_streamed)
            stream(out, rows[row]);
        else
            store_bits(out, rows[row]);
}

// As multiply_rows; num_out a multiple of 32, num_in of TILE_K.
template <class Result>
void multiply_rows_by_tiles(const Result& result, const Number* x, int64_t x_row_stride, int num_rows,
                            const Number* weight, int num_in, int num_threads) {
    constexpr int64_t RUN = 256;        // outputs of an item
    constexpr int AHEAD = 2 * TILE_K;   // inputs
    static thread_local Buffer<Number> buffer;
    const Number* packed = pack_rows(x, x_row_stride, num_rows, num_in, buffer);
    const int row_blocks = (num_rows + TILE - 1) / TILE;
    const int64_t weight_stride = int64_t(num_in) * sizeof(Number);
    const int64_t num_out = result.num_out, runs = (num_out + RUN - 1) / RUN;
    bool is_streamed = false;
    if constexpr (Result::IS_KEPT) is_streamed = reinterpret_cast<uintptr_t>(result.values) % 64 == 0;
    // A line of each of eight of 32 rows, to the second-level cache, a little before it is read. Far ahead, in the order of
    // memory, is slower: the prefetchers of the CPU, which reach no further than the next page, then have no part in it.
    const auto ask_rows = [num_in](const Number* ahead, int quarter) {
        for (int row = quarter * 8; row < quarter * 8 + 8; row++) _mm_prefetch(ahead + int64_t(row) * num_in, _MM_HINT_T1);
    };
    on_team(num_threads, 1, [=](Team& team) { team.for_each(runs, [=, &team](int64_t item) {
        const TileScope scope;
        alignas(64) float sums[TILE * TILE];
        const int64_t end = std::min(num_out, (item + 1) * RUN), following = team.likely_after(item) * RUN;
        const auto out = result.share(0, num_rows, item * RUN / PANEL, end / PANEL);
        for (int64_t o = item * RUN; o < end; o += 2 * TILE)
            for (int block = 0; block < row_blocks; block += 2) {
                const bool has_two = block + 1 < row_blocks;
                const Number* const next = weight + (o + 2 * TILE < end ? o + 2 * TILE : following) * num_in;
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int k = 0; k < num_in; k += TILE_K) {
                    const Number* left = weight + o * num_in + k;
                    const Number* right = packed + (size_t(k / TILE_K) * row_blocks + block) * TILE * TILE_K;
                    const Number* ahead = k + AHEAD < num_in ? left + AHEAD : next + k + AHEAD - num_in;
                    ask_rows(ahead, 0);
                    _tile_loadd(4, left, weight_stride);
                    ask_rows(ahead, 1);
                    _tile_loadd(5, left + TILE * num_in, weight_stride);
                    ask_rows(ahead, 2);
                    _tile_loadd(6, right, 64);
                    ask_rows(ahead, 3);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 5, 6);
                    if (has_two) {
                        _tile_loadd(7, right + TILE * TILE_K, 64);
                        _tile_dpbf16ps(2, 4, 7);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
                const int64_t stride = out.row_stride();
                float* const to = out.at(block * TILE, o / PANEL);
                const int first_rows = std::min(TILE, num_rows - block * TILE);
                _tile_stored(0, sums, 64);
                write_transposed(to, stride, first_rows, sums, is_streamed);
                _tile_stored(1, sums, 64);
                write_transposed(to + TILE, stride, first_rows, sums, is_streamed);
                if (has_two) {
                    const int rows = std::min(TILE, num_rows - (block + 1) * TILE);
                    _tile_stored(2, sums, 64);
                    write_transposed(to + TILE * stride, stride, rows, sums, is_streamed);
                    _tile_stored(3, sums, 64);
                    write_transposed(to + TILE * stride + TILE, stride, rows, sums, is_streamed);
                }
            }
        if (is_streamed) _mm_sfence();  // before others are told that it is done
        result.finish(out, num_rows, end / PANEL);
    }); });
}

#else

inline bool may_use_tiles() { return false; }

class TileScope {
  public:
    explicit TileScope(int = TILE, int = TILE) {}
    static TileScope of_columns(int) { return TileScope(); }
    static TileScope of_rows(int) { return TileScope(); }
};

#endif

}  // namespace weft
