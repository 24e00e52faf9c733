// Matrix tiles, where the CPU has them for bfloat16.

#pragma once

#include "vector.h"

#if !WEFT_IS_FLOAT16 && !WEFT_IS_FLOAT32 && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
#define WEFT_HAS_AMX

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft {

constexpr int TILE = 16;  // rows of a tile, and pairs of numbers in one of its rows

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
