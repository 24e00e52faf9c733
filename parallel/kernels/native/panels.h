// What products with a packed matrix have in common, whatever their numbers are: the matrix is cut into panels of 32
// outputs, a panel into steps of 2 KB (64 bytes of every output), and rows into blocks of 32. So a step of a block times a
// step of a panel is four products of tiles.
//
// A `Product` says what is multiplied:
//     Sum, Value                                of a tile's sums, of the result
//     add_upper(), add_lower()                  tiles 0 and 1 += tile 4 x tiles 6 and 7; 2 and 3 += 5 x 6 and 7
//     num_out(), num_steps(), panel(i)          of the matrix
//     outputs(sums, row, panel, first, second)  what 32 sums mean: two vectors
//     gate(x), gated(x)                         what becomes of gates, and of what they gate
// Gated, the first half of the outputs are gates of the second: the result is gate(x) * gated(y), x and y rounded before. Mostly that
// is silu(x) * y.

#pragma once

#include <algorithm>
#include <immintrin.h>

#include "amx.h"
#include "targets.h"
#include "threads.h"
#include "vector.h"

namespace weft {

constexpr int64_t STEP_BYTES = 2048;   // of a panel, and of a block

// Of a step of a panel, a run is the same four bytes of each output: 64 bytes of the first 16, and as many, so much further, of
// the others. These make two tiles; where there are none they lie side by side, and a panel is read line by line: without that
// some CPUs read it 1.6 times as slowly (a Zen 4).
#ifdef WEFT_HAS_AMX
constexpr int64_t RUN_BYTES = 64, TO_SECOND = STEP_BYTES / 2;
#else
constexpr int64_t RUN_BYTES = 128, TO_SECOND = 64;
#endif

constexpr int PREFETCH = 4;            // steps ahead

inline int64_t divide_up(int64_t whole, int64_t by) { return (whole + by - 1) / by; }

inline int64_t num_panels(int64_t num_out) { return divide_up(num_out, PANEL); }

// Long sums of many rows are made in parts, of about as many steps, so that more rows stay near a core while panels pass.
struct Parts {
    static constexpr int MOST = 40;  // steps

    int num_steps, size;

    static Parts whole(int num_steps) { return {num_steps, num_steps}; }
    static Parts of(int num_steps) { return {num_steps, int(divide_up(num_steps, divide_up(num_steps, MOST)))}; }
    bool are_many() const { return size < num_steps; }
};

// Rows times panels [begin, end) of a result.
struct Share {
    int row, rows;
    int64_t begin, end;
};

// How a product is shared out: runs of rows times runs of panels of the result.
struct Shares {
    int num_rows, most_rows;
    int64_t panels, run, panel_runs, count;

    Shares(int num_rows, Parts parts, int64_t num_out, int num_threads) : num_rows(num_rows) {
#ifdef WEFT_HAS_AMX
        constexpr int64_t CACHED = 1024 * 1024;  // of a part of x stays near a core while panels pass
#else
        constexpr int64_t CACHED = 256 * 1024;   // CPUs without tiles have smaller caches, and are slower than panels come
#endif
        constexpr int64_t LEAST = 128 * 1024, MOST = 512 * 1024;  // of the matrix are read by an item
        constexpr int64_t RUN = 16;  // panels whose sums are kept between parts
        const int64_t panel_bytes = parts.num_steps * STEP_BYTES;
        most_rows = int(std::max<int64_t>(64, CACHED / (parts.size * 64) / 64 * 64));
        most_rows = int(divide_up(divide_up(num_rows, divide_up(num_rows, most_rows)), ROWS) * ROWS);
        panels = num_panels(num_out);
        run = std::max<int64_t>(1, std::clamp(panels * panel_bytes / (16 * num_threads), LEAST, num_rows > ROWS ? LEAST : MOST) / panel_bytes);
        if (parts.are_many()) run = divide_up(panels, divide_up(panels, RUN));
        panel_runs = divide_up(panels, run);
        count = divide_up(num_rows, most_rows) * panel_runs;
    }

    // The first panel of an item; of one past the last, as if rows went on.
    int64_t begin(int64_t item) const { return item % panel_runs * run; }

    Share share(int64_t item) const {
        const int row = int(item / panel_runs) * most_rows;
        return {row, std::min(most_rows, num_rows - row), begin(item), std::min(panels, begin(item) + run)};
    }
};

// Calls work(share, likely first panel of the same thread's next share) for each share.
template <class Work>
void for_each_share(int num_rows, Parts parts, int64_t num_out, Team& team, const Work& work) {
    if (!num_rows) return;
    const Shares shares(num_rows, parts, num_out, team.size());
    team.for_each(shares.count, [&](int64_t item) { work(shares.share(item), shares.begin(item + team.size())); });
}

// The outputs of a panel, of which there may be fewer.
template <class T>
void store_panel(T* to, Floats first, Floats second, int64_t count, bool is_streamed) {
    if (count >= PANEL) return store_two(to, first, second, is_streamed);
    alignas(64) T both[PANEL];
    store_two(both, first, second, false);
    std::memcpy(to, both, size_t(count) * sizeof(T));
}

// `ClampedGate` of description.py.
struct GateClamp {
    float alpha, limit;  // limit 0: gates are silu(x), and what they gate is as it is

    template <class T>
    Floats gate(const Floats& x) const {
        if (!limit) return silu<T>(x);
        const Floats clamped = choose(x > limit, broadcast(limit), x);
        return times_sigmoid<T>(clamped, clamped * alpha);
    }
    Floats gated(const Floats& x) const {
        if (!limit) return x;
        return choose(x > limit, broadcast(limit), choose(x < -limit, broadcast(-limit), x)) + 1.0f;
    }
};

enum class Becomes { RESULT, GATES, GATED };

// The sums of a block and a panel on their way, some rows with each step of the next block: to the result; as gates, in float32,
// to `gates`; or multiplied with those to the result.
template <Becomes BECOMES, class Product>
class Writer {
    using T = typename Product::Value;

  public:
    // Gates: [rows][PANEL], of the rows from `first_row` on.
    Writer(const Product& product, const Target<T>& out, int first_row, float* gates, bool is_streamed)
        : product_(product), out_(out), first_row_(first_row), gates_(gates), is_streamed_(is_streamed) {}

    // Rows of a panel of the matrix, which is `out_panel` of the result.
    void begin(int row, int count, int64_t panel, int64_t out_panel, const typename Product::Sum* sums) {
        row_ = row, end_ = row + count, panel_ = panel, sums_ = sums;
        to_ = out_.at(row, out_panel);
    }

    void write(int most) {
        for (const int last = std::min(end_, row_ + most); row_ < last; row_++, sums_ += PANEL, to_ += out_.row_stride()) {
            Floats first, second;
            product_.outputs(sums_, row_, panel_, first, second);
            write_row(first, second);
        }
    }

  private:
    void write_row(Floats first, Floats second) {
        if (BECOMES == Becomes::RESULT) return store_panel(to_, first, second, product_.num_out() - panel_ * PANEL, is_streamed_);
        float* const gates = gates_ + (row_ - first_row_) * PANEL;
        round_two<T>(first, second);
        const bool is_early = row_ % 2;  // half of the gates are made so now, the others later: as much work with each panel
        if (BECOMES == Becomes::GATES) {
            store(gates, is_early ? product_.gate(first) : first);
            store(gates + LANES, is_early ? product_.gate(second) : second);
            return;
        }
        Floats gate[2] = {load(gates), load(gates + LANES)};
        if (!is_early) gate[0] = product_.gate(gate[0]), gate[1] = product_.gate(gate[1]);
        store_two(to_, gate[0] * product_.gated(first), gate[1] * product_.gated(second), is_streamed_);
    }

    const Product product_;
    const Target<T> out_;
    const int first_row_;
    float* const gates_;
    const bool is_streamed_;
    int row_ = 0, end_ = 0;
    int64_t panel_ = 0;
    const typename Product::Sum* sums_ = nullptr;
    T* to_ = nullptr;
};

// Lines of 64 bytes that follow each other.
struct Lines {
    const char* first = nullptr;
    int count = 0;
};

// Asks for a panel, or a part of it, in the second-level cache: some lines each time, so that `num_asks` get them all.
class Ahead {
  public:
    Ahead(const char* from, int num_steps, int num_asks)
        : next_(from), end_(next_ + num_steps * STEP_BYTES), lines_(int(divide_up(num_steps * STEP_BYTES / 64, num_asks))) {}

    void ask() {
        const Lines lines = take();
        for (int line = 0; line < lines.count; line++) _mm_prefetch(lines.first + line * 64, _MM_HINT_T1);
    }

    // The lines of the next time, for who asks for them himself.
    Lines take() {
        const Lines lines{next_, int(std::min<int64_t>(lines_, (end_ - next_) / 64))};
        next_ += lines.count * 64;
        return lines;
    }

  private:
    const char *next_, *const end_;
    const int lines_;  // each time
};

#ifdef WEFT_HAS_AMX

// Up to 32 rows, in two tiles. Strides in bytes.
struct LeftTiles {
    const char* first;
    int64_t row_stride, step_stride;
    int num_rows;
};

// The tiles times a panel: the sums [rows][PANEL]. IS_FAR: the panel comes from memory, not from a cache, and `following`
// after it. Calls `meanwhile` with each step.
template <int ROW_TILES, bool IS_FAR, class Product, class Meanwhile>
void multiply_tiles(typename Product::Sum* sums, int64_t sums_stride, const LeftTiles& left, const char* values,
                    const char* following, int num_steps, const Meanwhile& meanwhile) {
    const int64_t width = sums_stride * int64_t(sizeof(*sums));
    const char *first = left.first, *second = first + TILE * left.row_stride;
    _tile_zero(0);
    _tile_zero(1);
    if (ROW_TILES > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < num_steps; step++, values += STEP_BYTES, first += left.step_stride, second += left.step_stride) {
        const int later = step + PREFETCH - num_steps;
        const char* ahead = later < 0 ? values + PREFETCH * STEP_BYTES : following + later * STEP_BYTES;
        ask_quarter<IS_FAR>(ahead, 0);
        _tile_loadd(4, first, left.row_stride);
        ask_quarter<IS_FAR>(ahead, 1);
        _tile_loadd(6, values, 64);
        ask_quarter<IS_FAR>(ahead, 2);
        _tile_loadd(7, values + STEP_BYTES / 2, 64);
        Product::add_upper();
        ask_quarter<IS_FAR>(ahead, 3);
        if (ROW_TILES > 1) {
            _tile_loadd(5, second, left.row_stride);
            Product::add_lower();
        }
        meanwhile();
    }
    _tile_stored(0, sums, width);
    _tile_stored(1, sums + TILE, width);
    if (ROW_TILES > 1) {
        _tile_stored(2, sums + TILE * sums_stride, width);
        _tile_stored(3, sums + TILE * sums_stride + TILE, width);
    }
}

// Few rows: the panels pass once, as fast as memory gives them. What becomes of a panel's sums is done with the steps of
// the next one, so that memory is never waited for with nothing asked of it.
template <bool IS_GATED, class Product>
void multiply_few_rows(const Target<typename Product::Value>& out, int row, const LeftTiles& left, const Product& product,
                       int64_t begin, int64_t end, int64_t following) {
    alignas(64) typename Product::Sum sums[ROWS * PANEL];
    alignas(64) float gates[ROWS * PANEL];
    const int num_steps = product.num_steps(), pace = (ROWS + num_steps - 1) / num_steps;
    const TileScope scope(std::min(left.num_rows, TILE), std::max(left.num_rows - TILE, 1));
    const auto multiply = [&](int64_t panel, int64_t next, auto& writer) {
        const auto write = [&] { writer.write(pace); };
        if (left.num_rows > TILE)
            multiply_tiles<2, true, Product>(sums, PANEL, left, product.panel(panel), product.panel(next), num_steps, write);
        else
            multiply_tiles<1, true, Product>(sums, PANEL, left, product.panel(panel), product.panel(next), num_steps, write);
    };
    Writer<IS_GATED ? Becomes::GATED : Becomes::RESULT, Product> writer(product, out, row, gates, false);
    Writer<Becomes::GATES, Product> gates_writer(product, out, row, gates, false);
    for (int64_t panel = begin; panel < end; panel++) {
        const int64_t next = panel + 1 < end ? panel + 1 : following, ups = panel + product.num_out() / 2 / PANEL;
        multiply(panel, IS_GATED ? ups : next, writer);
        if (IS_GATED) {
            gates_writer.begin(row, left.num_rows, panel, panel, sums);
            multiply(ups, next, gates_writer);
        }
        writer.begin(row, left.num_rows, IS_GATED ? ups : panel, panel, sums);
    }
    writer.write(ROWS);
}

// A tile that streams by does not enter the first-level cache, nor, from farther away, the second-level one. The
// intrinsics want the tile's number as it is written.
#define WEFT_LOAD_TILE(IS_KEPT, TILE_NUMBER, FROM) \
    if (IS_KEPT)                                   \
        _tile_loadd(TILE_NUMBER, FROM, 64);        \
    else                                           \
        _tile_stream_loadd(TILE_NUMBER, FROM, 64);

template <class Product, bool IS_LEFT_KEPT, bool IS_PANEL_KEPT>
void multiply_step(const char* left, const char* values) {
    WEFT_LOAD_TILE(IS_LEFT_KEPT, 4, left)
    WEFT_LOAD_TILE(IS_PANEL_KEPT, 6, values)
    WEFT_LOAD_TILE(IS_PANEL_KEPT, 7, values + STEP_BYTES / 2)
    Product::add_upper();
    WEFT_LOAD_TILE(IS_LEFT_KEPT, 5, left + STEP_BYTES / 2)
    Product::add_lower();
}

#undef WEFT_LOAD_TILE

// What of a block comes from no farther away than the second-level cache.
struct Near {
    bool left, panel;
};

// A block times a part of a panel: the sums [32 rows][PANEL], begun or continued. The second-level cache gives one of two
// operands as fast as tiles are multiplied, not both: so the beginning of the panel's part stays in the first-level
// cache, and what goes by does not enter it. Calls `meanwhile` with each step.
template <class Product, class Meanwhile>
void multiply_block(typename Product::Sum* sums, const char* left, const char* values, int num_steps, Near near,
                    bool is_begun, const Meanwhile& meanwhile) {
    constexpr int KEPT = 16;  // steps, 32 KB
    constexpr int64_t WIDTH = PANEL * sizeof(*sums);
    if (is_begun) {
        _tile_loadd(0, sums, WIDTH);
        _tile_loadd(1, sums + TILE, WIDTH);
        _tile_loadd(2, sums + TILE * PANEL, WIDTH);
        _tile_loadd(3, sums + TILE * PANEL + TILE, WIDTH);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const auto run = [&](auto multiply, int step, int end) {
        for (; step < end; step++, left += STEP_BYTES, values += STEP_BYTES) {
            multiply(left, values);
            meanwhile();
        }
    };
    const int num_kept = near.panel ? std::min(KEPT, num_steps) : num_steps;
    if (near.left) {
        run(multiply_step<Product, false, true>, 0, num_kept);
        run(multiply_step<Product, false, false>, num_kept, num_steps);
    } else {
        run(multiply_step<Product, true, true>, 0, num_kept);
        run(multiply_step<Product, true, false>, num_kept, num_steps);
    }
    _tile_stored(0, sums, WIDTH);
    _tile_stored(1, sums + TILE, WIDTH);
    _tile_stored(2, sums + TILE * PANEL, WIDTH);
    _tile_stored(3, sums + TILE * PANEL + TILE, WIDTH);
}

// Many rows, packed.
struct LeftBlocks {
    const char* values;
    int first_row, num_rows;
    bool is_near;  // they are in the second-level cache
};

// The steps [first, first + count) of a panel, whose `next` ones are asked for meanwhile.
struct PanelPart {
    int64_t panel;
    int first, count;
    const char* next;
};

// The rows times a part of a panel. Totals: [rows][PANEL], of what is made in parts; else null. The writer gets what is
// whole.
template <class Product, class Writer>
void multiply_panel(const LeftBlocks& left, const Product& product, PanelPart part, int64_t out_panel,
                    typename Product::Sum* totals, Writer writer) {
    alignas(64) typename Product::Sum sums[2][ROWS * PANEL];
    const int num_steps = product.num_steps(), pace = (ROWS + part.count - 1) / part.count;
    const char* values = product.panel(part.panel) + part.first * STEP_BYTES;
    const bool is_whole = part.first + part.count == num_steps;
    Ahead ahead(part.next, part.count, part.count * int(divide_up(left.num_rows, ROWS)));
    for (int row = 0; row < left.num_rows; row += ROWS) {
        auto* to = totals ? totals + row * PANEL : sums[row / ROWS % 2];
        const char* from = left.values + (row / ROWS * int64_t(num_steps) + part.first) * STEP_BYTES;
        multiply_block<Product>(to, from, values, part.count, {left.is_near, row > 0}, part.first > 0, [&] {
            ahead.ask();
            writer.write(pace);
        });
        writer.write(ROWS);
        if (is_whole) writer.begin(left.first_row + row, std::min(ROWS, left.num_rows - row), part.panel, out_panel, to);
    }
    writer.write(ROWS);
}

// `following` is the panel that is likely to be wanted after `end`.
template <bool IS_GATED, class Product>
void multiply_many_rows(const Target<typename Product::Value>& out, LeftBlocks left, const Product& product, Parts parts,
                        int64_t begin, int64_t end, int64_t following, bool is_streamed) {
    using Sum = typename Product::Sum;
    static thread_local Buffer<float> gates_buffer;
    static thread_local Buffer<Sum> totals_buffer;
    const int64_t size = (left.num_rows + ROWS - 1) / ROWS * ROWS * PANEL;
    float* gates = IS_GATED ? gates_buffer.room(size_t(size)) : nullptr;
    Sum* totals = parts.are_many() ? totals_buffer.room(size_t(size * (end - begin) * (IS_GATED ? 2 : 1))) : nullptr;
    const TileScope scope;
    for (int first = 0; first < parts.num_steps; first += parts.size) {
        const int count = std::min(parts.size, parts.num_steps - first);
        Sum* to = totals;
        const auto multiply = [&](int64_t panel, int64_t next, int64_t out_panel, auto writer) {
            multiply_panel(left, product, {panel, first, count, product.panel(next) + first * STEP_BYTES}, out_panel, to, writer);
            left.is_near = true;
            if (to) to += size;
        };
        if (first) left.is_near = false;
        for (int64_t panel = begin; panel < end; panel++) {
            const int64_t next = panel + 1 < end ? panel + 1 : following, ups = panel + product.num_out() / 2 / PANEL;
            if (IS_GATED) {
                multiply(panel, ups, panel, Writer<Becomes::GATES, Product>(product, out, left.first_row, gates, false));
                multiply(ups, next, panel, Writer<Becomes::GATED, Product>(product, out, left.first_row, gates, is_streamed));
            } else {
                multiply(panel, next, panel, Writer<Becomes::RESULT, Product>(product, out, left.first_row, nullptr, is_streamed));
            }
        }
    }
    if (is_streamed) _mm_sfence();  // before others are told that it is done
}

#endif

}  // namespace weft
