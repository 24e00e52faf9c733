// A product of quantized rows with a matrix in 8 bits that was laid out for it once, when it was loaded: sums of integers
// are exact, so that neither the order nor the number of rows changes a bit.
//
// The matrix [out, in] is cut into panels of 32 outputs, a panel into steps of 64 inputs, a step into two tiles of 16
// outputs; in a tile runs of four inputs follow each other, [run][output][4]. So a tile is the right-hand operand of a
// tile product (AMX), each of its rows that of a vector one (VNNI), and a panel is read from front to back.

#pragma once

#include "quantize.h"

#ifdef WEFT_HAS_INT8

#include "amx.h"

#if defined(WEFT_HAS_AMX) && defined(__AMX_INT8__)
#define WEFT_HAS_AMX_INT8
#endif

namespace weft::int8 {

constexpr int PANEL = 32;                   // outputs
constexpr int STEP_SIZE = PANEL * STEP;     // bytes of a panel's step
constexpr int PREFETCH = 4;                 // steps ahead

inline bool use_tiles() {
#ifdef WEFT_HAS_AMX_INT8
    return may_use_tiles();
#else
    return false;
#endif
}

inline int64_t num_panels(int64_t num_out) { return (num_out + PANEL - 1) / PANEL; }

template <class T>
struct Matrix {
    const int8_t* values;  // [panels][steps][2 tiles][16 runs][16 outputs][4]; 0 past the last output and input
    const float* scales;   // [panels][32]
    const int32_t* sums;   // [panels][32]: 128 times the sum of an output's weights
    const T* bias;         // [out], or null
    int64_t num_out;
    int num_in;

    // In one piece of memory, one after the other: as many bytes as int8_linear.py says.
    Matrix(const void* packed, const void* bias, int64_t num_out, int num_in)
        : values(static_cast<const int8_t*>(packed)),
          scales(reinterpret_cast<const float*>(values + num_panels(num_out) * num_steps(num_in) * STEP_SIZE)),
          sums(reinterpret_cast<const int32_t*>(scales + num_panels(num_out) * PANEL)),
          bias(static_cast<const T*>(bias)),
          num_out(num_out),
          num_in(num_in) {}

    const int8_t* panel(int64_t index) const { return values + index * num_steps(num_in) * STEP_SIZE; }
};

// Writes outputs [first, first + count) of the matrix, whose weights begin at `weight`; `first` is a multiple of PANEL.
template <class T>
void pack_matrix(const Matrix<T>& matrix, const T* weight, int64_t first, int64_t count, Team& team) {
    const int steps = num_steps(matrix.num_in);
    team.for_each(num_panels(count), [=](int64_t item) {
        static thread_local Buffer<int8_t> buffer;
        int8_t* row = buffer.room(size_t(steps) * STEP);
        const int64_t panel = first / PANEL + item;
        int8_t* to = const_cast<int8_t*>(matrix.panel(panel));
        float* scales = const_cast<float*>(matrix.scales) + panel * PANEL;
        int32_t* sums = const_cast<int32_t*>(matrix.sums) + panel * PANEL;
        for (int output = 0; output < PANEL; output++) {
            if (item * PANEL + output < count) {
                scales[output] = quantize_row(row, STEP, weight + (item * PANEL + output) * matrix.num_in, matrix.num_in, 0);
            } else {
                std::fill(row, row + steps * STEP, int8_t(0));
                scales[output] = 0;
            }
            int32_t sum = 0;
            for (int k = 0; k < steps * STEP; k++) sum += row[k];
            sums[output] = 128 * sum;
            int8_t* column = to + output / LANES * (STEP_SIZE / 2) + output % LANES * 4;
            for (int k = 0; k < steps * STEP; k += 4)
                std::memcpy(column + k / STEP * STEP_SIZE + k % STEP * LANES, row + k, 4);
        }
    });
}

// sum * x's scale * the output's scale + bias of 16 outputs, each step rounded: not contracted, for the same bits as torch.
template <class T>
inline Floats scaled(__m512i sums, float scale, const Matrix<T>& matrix, int64_t output) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512 product = _mm512_mul_round_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(scale), NEAREST);
    const __m512 result = _mm512_mul_round_ps(product, (__m512)load(matrix.scales + output), NEAREST);
    if (!matrix.bias) return (Floats)result;
    alignas(64) T rest[LANES] = {};
    const T* bias = matrix.bias + output;
    if (output + LANES > matrix.num_out) {
        std::memcpy(rest, bias, size_t(std::max<int64_t>(0, matrix.num_out - output)) * sizeof(T));
        bias = rest;
    }
    return (Floats)_mm512_add_round_ps(result, (__m512)load(bias), NEAREST);
}

// A streamed row goes past the caches.
inline void store_two(float* to, Floats first, Floats second, bool is_streamed) {
    if (is_streamed) {
        _mm512_stream_ps(to, (__m512)first);
        _mm512_stream_ps(to + LANES, (__m512)second);
        return;
    }
    store(to, first);
    store(to + LANES, second);
}

inline void store_two(BFloat16* to, Floats first, Floats second, bool is_streamed) {
#ifdef __AVX512BF16__
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    if (is_streamed)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), both);
    else
        _mm512_storeu_si512(to, both);
#else
    store(to, first);
    store(to + LANES, second);
#endif
}

// What becomes of the sums [row][32] of a panel: scaled, or, where the first half of the outputs are gates of the second,
// silu(gate) * up of what is scaled and rounded. A panel of the result takes `num_panels` panels of the matrix.
struct Plain {
    static constexpr int num_panels = 1;
    template <class T>
    static int64_t num_out(const Matrix<T>& matrix) {
        return matrix.num_out;
    }
    template <class T>
    static int64_t panel(const Matrix<T>&, int64_t panel, int) {
        return panel;
    }
    template <class T>
    static void write(T* out, const Matrix<T>& matrix, int64_t panel, float scale, const int32_t* sums, const int32_t*,
                      bool is_streamed) {
        const int64_t output = panel * PANEL, count = matrix.num_out - output;
        const Floats first = scaled(_mm512_load_si512(sums), scale, matrix, output);
        const Floats second = scaled(_mm512_load_si512(sums + LANES), scale, matrix, output + LANES);
        if (count >= PANEL) return store_two(out + output, first, second, is_streamed);
        alignas(64) T both[PANEL];
        store_two(both, first, second, false);
        std::memcpy(out + output, both, size_t(count) * sizeof(T));
    }
};

struct Gated {
    static constexpr int num_panels = 2;
    template <class T>
    static int64_t num_out(const Matrix<T>& matrix) {
        return matrix.num_out / 2;
    }
    template <class T>
    static int64_t panel(const Matrix<T>& matrix, int64_t panel, int which) {
        return panel + which * (matrix.num_out / 2 / PANEL);
    }
    template <class T>
    static void write(T* out, const Matrix<T>& matrix, int64_t panel, float scale, const int32_t* gates, const int32_t* ups,
                      bool is_streamed) {
        alignas(64) T rounded[2][PANEL];
        for (int which = 0; which < 2; which++)
            Plain::write(rounded[which] - Gated::panel(matrix, panel, which) * PANEL, matrix, Gated::panel(matrix, panel, which),
                         scale, which ? ups : gates, nullptr, false);
        store_two(out + panel * PANEL, gated<T>(load(rounded[0]), load(rounded[1])),
                  gated<T>(load(rounded[0] + LANES), load(rounded[1] + LANES)), is_streamed);
    }
};

#ifdef WEFT_HAS_AMX_INT8

// What is done with the sums of a panel while tiles already make the next ones: vectors and tiles work side by side.
template <class Result, class T>
class Epilogue {
  public:
    Epilogue(T* out, const Left& left, const Matrix<T>& matrix, bool is_streamed)
        : out_(out), left_(left), matrix_(matrix), is_streamed_(is_streamed), pace_(1 + Left::ROWS / (Result::num_panels * left.num_steps)) {}

    // The sums of another panel of the result will be in `first`, and those that it gates in `second`, [rows][PANEL].
    void begin(int64_t panel, const int32_t* first, const int32_t* second) {
        finish();
        panel_ = panel, first_ = first, second_ = second, num_ready_ = num_done_ = 0;
    }
    void add_rows(int count) { num_ready_ += count; }

    // A few rows, once for each step of a block.
    void advance() {
        for (int i = 0; i < pace_ && num_done_ < num_ready_; i++) write();
    }
    void finish() {
        while (num_done_ < num_ready_) write();
        if (is_streamed_) _mm_sfence();  // before others are told that it is done
    }

  private:
    void write() {
        const int row = num_done_++;
        Result::write(out_ + row * Result::num_out(matrix_), matrix_, panel_, left_.scales[row], first_ + row * PANEL,
                      second_ + row * PANEL, is_streamed_);
    }

    T* const out_;
    const Left left_;
    const Matrix<T> matrix_;
    const bool is_streamed_;
    const int pace_;  // rows
    int64_t panel_ = 0;
    const int32_t *first_ = nullptr, *second_ = nullptr;
    int num_ready_ = 0, num_done_ = 0;
};

// 16 or 32 rows, as the tiles are configured, times `steps` steps of a panel; the sums [rows][PANEL] are begun or
// continued. IS_FAR: the panel comes from memory, not from a cache.
template <int ROW_TILES, bool IS_FAR, class Epilogue>
void multiply_tiles(int32_t* sums, const int8_t* x, int64_t x_stride, const int8_t* values, int steps, bool is_begun,
                    Epilogue& epilogue) {
    constexpr int64_t WIDTH = PANEL * sizeof(int32_t);
    int32_t* lower = sums + TILE * PANEL;
    if (!is_begun) {
        _tile_zero(0);
        _tile_zero(1);
        if (ROW_TILES > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums, WIDTH);
        _tile_loadd(1, sums + TILE, WIDTH);
        if (ROW_TILES > 1) {
            _tile_loadd(2, lower, WIDTH);
            _tile_loadd(3, lower + TILE, WIDTH);
        }
    }
    for (int step = 0; step < steps; step++, values += STEP_SIZE, x += x_stride) {
        const int8_t* ahead = values + PREFETCH * STEP_SIZE;
        ask_quarter<IS_FAR>(ahead, 0);
        _tile_loadd(4, x, STEP);
        ask_quarter<IS_FAR>(ahead, 1);
        _tile_loadd(6, values, 64);
        ask_quarter<IS_FAR>(ahead, 2);
        _tile_loadd(7, values + STEP_SIZE / 2, 64);
        _tile_dpbssd(0, 4, 6);
        ask_quarter<IS_FAR>(ahead, 3);
        _tile_dpbssd(1, 4, 7);
        if (ROW_TILES > 1) {
            _tile_loadd(5, x + TILE * STEP, STEP);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
        epilogue.advance();
    }
    _tile_stored(0, sums, WIDTH);
    _tile_stored(1, sums + TILE, WIDTH);
    if (ROW_TILES > 1) {
        _tile_stored(2, lower, WIDTH);
        _tile_stored(3, lower + TILE, WIDTH);
    }
}

// A part of a panel that fits the first-level cache stays there while all rows pass.
template <class Result, class T>
void multiply_panels_by_tiles(T* out, const Left& left, const Matrix<T>& matrix, int64_t begin, int64_t end, bool is_streamed) {
    constexpr int PART = 12;  // steps
    using Work = Epilogue<Result, T>;
    static thread_local Buffer<int32_t> buffer;
    const int64_t size = int64_t(left.num_rows + Left::ROWS) * PANEL, x_stride = left.step_stride();
    int32_t* room = buffer.room(size_t(2 * size * Result::num_panels));  // for a panel that is made, and one that is written
    const int most_steps = left.num_rows <= Left::ROWS ? left.num_steps : PART;
    const TileScope scope(std::min(left.height, TILE), std::max(left.height - TILE, 1));
    Work epilogue(out, left, matrix, is_streamed);
    for (int64_t panel = begin; panel < end; panel++) {
        int32_t* sums = room + (panel - begin) % 2 * size * Result::num_panels;
        for (int i = 0; i < Result::num_panels; i++)
            for (int step = 0; step < left.num_steps; step += most_steps) {
                const int steps = std::min(most_steps, left.num_steps - step);
                const bool is_last = i == Result::num_panels - 1 && step + steps == left.num_steps;
                const int8_t* values = matrix.panel(Result::panel(matrix, panel, i)) + int64_t(step) * STEP_SIZE;
                if (is_last) epilogue.begin(panel, sums, sums + i * size);
                for (int row = 0; row < left.num_rows; row += Left::ROWS) {
                    const int rows = std::min(Left::ROWS, left.num_rows - row);
                    const auto multiply = rows <= TILE ? (row ? multiply_tiles<1, false, Work> : multiply_tiles<1, true, Work>)
                                                       : (row ? multiply_tiles<2, false, Work> : multiply_tiles<2, true, Work>);
                    multiply(sums + i * size + row * PANEL, left.row(row) + step * x_stride, x_stride, values, steps, step > 0, epilogue);
                    if (is_last) epilogue.add_rows(rows);
                }
            }
    }
    epilogue.finish();
}

#endif

// ROWS unsigned rows times a panel. The inputs are shared out to CHAINS sums, so that few rows do not wait for the latency.
template <int ROWS, int CHAINS>
void multiply_vectors(int32_t* sums, const int8_t* x, int64_t x_stride, const int8_t* values, int steps, const int32_t* excess) {
    __m512i totals[CHAINS][ROWS][2] = {};
    for (int step = 0; step < steps; step++, values += STEP_SIZE, x += x_stride)
        for (int run = 0; run < STEP / 4; run += CHAINS)
            for (int chain = 0; chain < CHAINS; chain++) {
                const int8_t* from = values + (run + chain) * 64;
                __builtin_prefetch(from + PREFETCH * STEP_SIZE);  // the hardware looks less far ahead than memory is slow
                __builtin_prefetch(from + PREFETCH * STEP_SIZE + STEP_SIZE / 2);
                const __m512i first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(from + STEP_SIZE / 2);
                for (int row = 0; row < ROWS; row++) {
                    int32_t four;
                    std::memcpy(&four, x + row * STEP + (run + chain) * 4, sizeof(four));
                    const __m512i all = _mm512_set1_epi32(four);
                    totals[chain][row][0] = _mm512_dpbusd_epi32(totals[chain][row][0], all, first);
                    totals[chain][row][1] = _mm512_dpbusd_epi32(totals[chain][row][1], all, second);
                }
            }
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) {
            __m512i total = totals[0][row][half];
            for (int chain = 1; chain < CHAINS; chain++) total = _mm512_add_epi32(total, totals[chain][row][half]);
            total = _mm512_sub_epi32(total, _mm512_loadu_si512(excess + half * LANES));
            _mm512_store_si512(sums + row * PANEL + half * LANES, total);
        }
}

template <class Result, class T>
void multiply_panels_by_vectors(T* out, const Left& left, const Matrix<T>& matrix, int64_t begin, int64_t end) {
    constexpr int MOST = 8;
    alignas(64) int32_t sums[Result::num_panels][MOST * PANEL];
    const int64_t num_out = Result::num_out(matrix);
    for (int64_t panel = begin; panel < end; panel++)
        for (int row = 0, rows; row < left.num_rows; row += rows) {
            rows = std::min(left.num_rows, row / Left::ROWS * Left::ROWS + Left::ROWS) - row;  // of this block
            rows = rows >= MOST ? MOST : rows >= 4 ? 4 : 1;
            const auto multiply = rows == MOST ? multiply_vectors<MOST, 1> : rows == 4 ? multiply_vectors<4, 2> : multiply_vectors<1, 4>;
            for (int i = 0; i < Result::num_panels; i++) {
                const int64_t from = Result::panel(matrix, panel, i);
                multiply(sums[i], left.row(row), left.step_stride(), matrix.panel(from), left.num_steps, matrix.sums + from * PANEL);
            }
            for (int r = 0; r < rows; r++)
                Result::write(out + (row + r) * num_out, matrix, panel, left.scales[row + r], sums[0] + r * PANEL,
                              sums[Result::num_panels - 1] + r * PANEL, false);
        }
}

// Quantizes rows of x; all threads of the team call it.
template <class T>
void quantize(const Left& left, const T* x, int64_t stride, int num_in, Team& team) {
    const int flip = use_tiles() ? 0 : 0x80;
    for_each_run_of_rows(left.num_rows, num_in, team, [=](int64_t begin, int64_t end) {
        for (int row = int(begin); row < int(end); row++)
            left.scales[row] = quantize_row(left.row(row), left.step_stride(), x + row * stride, num_in, flip);
    });
}

constexpr int MULTIPLY_SECTIONS = 2;  // of a team: `quantize`, `multiply`

// out[row, o] = sum of row and weight[o] in integers * both scales + bias[o]. Shared out in runs of rows times runs of panels.
template <class Result, class T>
void multiply(T* out, const Left& left, const Matrix<T>& matrix, Team& team) {
    constexpr int64_t CACHED = 1024 * 1024;  // bytes of x stay near a core while all panels pass
    constexpr int64_t RUN = 128 * 1024;     // bytes of the matrix are read by an item
    const int64_t in_bytes = int64_t(left.num_steps) * STEP, num_out = Result::num_out(matrix);
    const int most_rows = int(std::max<int64_t>(64, CACHED / in_bytes / 64 * 64));
    const int64_t panels = num_panels(num_out), run = std::max<int64_t>(1, RUN / (in_bytes * PANEL));
    const int64_t panel_runs = (panels + run - 1) / run;
    const bool is_streamed = goes_past_caches(out, left.num_rows, num_out * int64_t(sizeof(T)));
    team.for_each((left.num_rows + most_rows - 1) / most_rows * panel_runs, [=](int64_t item) {
        const int row = int(item / panel_runs) * most_rows;
        const Left part = left.part(row, std::min(most_rows, left.num_rows - row));
        const int64_t begin = item % panel_runs * run, end = std::min(panels, begin + run);
#ifdef WEFT_HAS_AMX_INT8
        if (use_tiles()) return multiply_panels_by_tiles<Result>(out + row * num_out, part, matrix, begin, end, is_streamed);
#endif
        multiply_panels_by_vectors<Result>(out + row * num_out, part, matrix, begin, end);
    });
}

// Rows that are quantized for a product.
class Scratch {
  public:
    Left room(int64_t num_rows, int num_in) {
        return {values_.room(size_t(Left::size(num_rows, num_in))), scales_.room(size_t(num_rows)), int(num_rows), num_in};
    }

  private:
    Buffer<int8_t> values_;
    Buffer<float> scales_;
};

}  // namespace weft::int8

#endif
