// A product with a matrix that was laid out for the dot products of lines (number.h), once, when it was loaded.
//
// The matrix [out, in] is cut into panels of 32 outputs, a panel into steps of 32 inputs; in a step the pairs of inputs follow
// each other, a line for 16 outputs and one for the others as panels.h says. So in bfloat16 16 outputs are the right-hand operand
// of a tile product (AMX), a pair of them that of a vector one, and a panel is read from front to back. A vector product takes
// the pairs as they are (AVX512_BF16), or as float32, half of each at a time (AVX512, AVX2), which a CPU may do faster.

#pragma once

#include "vector.h"

#ifdef WEFT_HAS_PAIRS
#define WEFT_HAS_PACKED_MATRIX

#include <algorithm>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "panels_vectors.h"
#include "threads.h"

namespace weft {

constexpr int STEP = int(64 / sizeof(Number));       // inputs
constexpr int64_t STEP_SIZE = int64_t(PANEL) * STEP;  // values of a panel's step, 2 KB

struct PackedMatrix {
    const Number* values;  // [panels][steps], each as place_of says; outputs past the last are 0
    const Number* bias;    // [out], or null
    int64_t num_out;         // a multiple of 16
    int num_in;              // a multiple of STEP
    GateClamp clamp = {};
};

// Of the line that has an output's numbers of a run in a step of its panel.
inline int64_t line_of(int output, int run) {
    return (run * RUN_BYTES + output / LANES * TO_SECOND) / int64_t(sizeof(Number));
}

// In place where `packed` is the weight, of whole panels: each lies where its outputs lay.
inline void pack_matrix(Number* packed, const Number* weight, int64_t num_out, int num_in, Team& team) {
    team.for_each(num_panels(num_out), [=](int64_t panel) {
        static thread_local Buffer<Number> buffer;
        const int64_t first = panel * PANEL * num_in, end = std::min(first + PANEL * num_in, num_out * num_in);
        Number* const rows = buffer.room(size_t(PANEL) * num_in);
        std::fill(std::copy(weight + first, weight + end, rows), rows + PANEL * num_in, Number{});
        Number* to = packed + first;
        for (int k = 0; k < num_in; k += STEP, to += STEP_SIZE)
            for (int run = 0; run < STEP / PER_LANE; run++)
                for (int output = 0; output < PANEL; output++)
                    put_lane(to + line_of(output, run), output % LANES, rows + output * num_in + k + PER_LANE * run);
    });
}

// Some rows of the matrix as they were before, [count, num_in]; zeros for an index that names none.
inline void unpack_rows(Number* rows, const int64_t* indices, int64_t count, const PackedMatrix& matrix, Team& team) {
    team.for_each(count, [=](int64_t i) {
        const int64_t output = indices[i];
        Number* to = rows + i * matrix.num_in;
        if (output < 0 || output >= matrix.num_out) {
            std::fill_n(to, matrix.num_in, Number{});
            return;
        }
        const Number* from = matrix.values + output / PANEL * PANEL * matrix.num_in + line_of(int(output % PANEL), 0);
        for (int k = 0; k < matrix.num_in; k += STEP, from += STEP_SIZE)
            for (int run = 0; run < STEP / PER_LANE; run++, to += PER_LANE) take_lane(to, from + line_of(0, run), int(output % LANES));
    });
}

// The same of a table that has them one after the other.
inline void copy_rows(Number* rows, const int64_t* indices, int64_t count, const Number* table, int64_t num_rows, int64_t width, Team& team) {
    team.for_each(count, [=](int64_t i) {
        Number* to = rows + i * width;
        if (indices[i] < 0 || indices[i] >= num_rows)
            std::fill_n(to, width, Number{});
        else
            std::copy_n(table + indices[i] * width, width, to);
    });
}

struct LeftRows {
    const Number* x;
    int64_t stride;
    int count;
    bool is_packed = false;  // as pack_left does
};

// The sums of a row and panel, and of a panel's outputs that there are: the bias is added.
inline void add_bias(const PackedMatrix& matrix, int64_t output, Floats& first, Floats& second) {
    if (!matrix.bias) return;
    first += load(matrix.bias + output);
    if (output + LANES < matrix.num_out) second += load(matrix.bias + output + LANES);
}

// [blocks of 32 rows][steps][2 tiles][16 rows][32 inputs]; rows past the last are not written. Rows of one tile.
inline void pack_tile(Number* packed, const LeftRows& left, int num_in, int64_t tile) {
    Number* to = packed + (tile / 2 * num_in * 2 + tile % 2 * STEP) * TILE;
    for (int row = int(tile) * TILE; row < std::min<int>(left.count, int(tile + 1) * TILE); row++, to += STEP)
        for (int k = 0; k < num_in; k += STEP)
            std::memcpy(to + int64_t(k) * ROWS, left.x + row * left.stride + k, STEP * sizeof(Number));
}

inline int64_t num_tiles(int64_t num_rows) { return divide_up(num_rows, TILE); }

inline void pack_left(Number* packed, LeftRows left, int num_in, Team& team) {
    team.for_each(num_tiles(left.count), [=](int64_t tile) { pack_tile(packed, left, num_in, tile); });
}

#if WEFT_IS_FLOAT32

// `Numbers` of panels_vectors.h.
struct Multiplied {
    using Sum = float;
    using Vector = Floats;
    static constexpr int LEFT_BYTES = 4, PARTS = 1;
    static constexpr bool IN_PARTS = true;

    template <int PART>
    static Floats left(const char* from) {
        float number;
        std::memcpy(&number, from, sizeof(number));
        return broadcast(number);
    }
    template <int PART>
    static Floats right(const char* from) {
        return bit_cast<Floats>(load_bits(from));
    }
    static Floats add(const Floats& sums, const Floats& left, const Floats& right) { return accumulate(sums, left, right); }
};

constexpr bool ARE_COPIED = true;  // so that rows lie side by side: apart they would take each other's place in the first-level cache

#else

// `Numbers` of panels_vectors.h, of rows as they are.
struct Pairs : Alike {
    using Sum = float;
    using Vector = Floats;

    static Floats add(const Floats& sums, const Ints& left, const Ints& right) { return add_products(sums, left, right); }
};

// Of rows in float32; in the order of add_products.
struct PairsOfFloats {
    using Sum = float;
    using Vector = Floats;
    static constexpr int LEFT_BYTES = 8, PARTS = 2;
    static constexpr bool IN_PARTS = false;

    template <int PART>
    static Floats left(const char* from) {
        float two[2];
        std::memcpy(two, from, sizeof(two));
        return broadcast(two[1 - PART]);
    }
    template <int PART>
    static Floats right(const char* from) {
        return PART ? load_first_half(from) : load_second_half(from);
    }
    static Floats add(const Floats& sums, const Floats& left, const Floats& right) { return accumulate(sums, left, right); }
};

// Whether rows are best multiplied in float32. Intel's CPUs begin a product of pairs every second cycle at most, and two of float32 in
// each.
#if defined(__AVX512BF16__) && !WEFT_IS_FLOAT16
constexpr bool ARE_COPIED = IS_INTEL;
#else
constexpr bool ARE_COPIED = true;
#endif
using Multiplied = std::conditional_t<ARE_COPIED, PairsOfFloats, Pairs>;

#endif

// Whether rows are copied first into steps that each lie in one piece: for tiles, and for what is read by more than a few panels as it is.
inline bool needs_packing(int64_t num_rows) {
    if (may_use_tiles()) return num_rows > 2 * ROWS;
    return !ARE_COPIED && num_rows > 4;
}

// Rows as `Multiplied` has them: as they are, or in float32, [steps][rows][32 inputs] in `room`.
inline LeftVectors to_multiply(const LeftVectors& left, int num_steps, float* room) {
    if (!ARE_COPIED) return left;
    float* to = room;
    for (int step = 0; step < num_steps; step++)
        for (int row = 0; row < left.num_rows; row++, to += STEP) {
            const auto* from = reinterpret_cast<const Number*>(left.row(row) + step * left.step_stride);
            for (int i = 0; i < STEP; i += LANES) store(to + i, load(from + i));
        }
    constexpr int64_t ROW_BYTES = STEP * sizeof(float);
    return {reinterpret_cast<const char*>(room), ROW_BYTES, left.num_rows * ROW_BYTES, left.num_rows};
}

// Values of room for that.
inline size_t room_to_multiply(int num_rows, int num_in) { return ARE_COPIED ? size_t(num_rows) * num_in : 0; }

// `Product`; see panels.h. V: of the result.
template <class V>
struct Products {
    using Numbers = Multiplied;
    using Sum = float;
    using Value = V;
    PackedMatrix matrix;

#ifdef WEFT_HAS_AMX
    static void add_upper() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    static void add_lower() {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
#endif
    int64_t num_out() const { return matrix.num_out; }
    int num_steps() const { return matrix.num_in / STEP; }
    const char* panel(int64_t panel) const { return reinterpret_cast<const char*>(matrix.values + panel * matrix.num_in * PANEL); }
    void outputs(const float* sums, int, int64_t panel, Floats& first, Floats& second) const {
        first = load(sums), second = load(sums + LANES);
        add_bias(matrix, panel * PANEL, first, second);
    }
    Floats gate(const Floats& x) const { return matrix.clamp.template gate<V>(x); }
    Floats gated(const Floats& x) const { return matrix.clamp.gated(x); }
};

// Values of room that `multiply` wants for so many rows.
inline int64_t scratch_size(int64_t num_rows, int num_in) {
    return needs_packing(num_rows) ? (num_rows + ROWS - 1) / ROWS * ROWS * num_in : 0;
}

constexpr int MULTIPLY_SECTIONS = 2;  // of a team, at most

// How long sums are made of some rows, by tiles.
inline Parts parts_of(const LeftRows& left, int num_in) {
    const int num_steps = num_in / STEP;
    return left.is_packed && may_use_tiles() ? Parts::of(num_steps) : Parts::whole(num_steps);
}

#ifdef WEFT_HAS_AMX

// What a thread does of a product: share after share. Left: packed where there are many rows.
template <bool IS_GATED, class Result>
class SharesByTiles {
  public:
    SharesByTiles(const Result& result, const LeftRows& left, const PackedMatrix& matrix)
        : result_(result), left_(left), products_{matrix}, is_streamed_(result.is_streamed(left.count)) {}

    void operator()(Share share, int64_t following) {
        const auto [row, rows, begin, end] = share;
        const auto out = result_.share(row, rows, begin, end);
        if (left_.is_packed) {
            const Parts parts = parts_of(left_, products_.matrix.num_in);
            const char* values = reinterpret_cast<const char*>(left_.x + int64_t(row) * products_.matrix.num_in);
            const LeftBlocks blocks{values, row, rows, row == last_row_ && !parts.are_many()};
            multiply_many_rows<IS_GATED>(out, blocks, products_, parts, begin, end, following, is_streamed_);
            last_row_ = row;
        } else {
            for (int first = row; first < row + rows; first += ROWS) {
                const char* values = reinterpret_cast<const char*>(left_.x + first * left_.stride);
                const LeftTiles tiles{values, left_.stride * int64_t(sizeof(Number)), 64, std::min(row + rows - first, ROWS)};
                multiply_few_rows<IS_GATED>(out, first, tiles, products_, begin, end, following);
            }
        }
        result_.finish(out, rows, end);
    }

  private:
    const Result result_;
    const LeftRows left_;
    const Products<typename Result::Value> products_;
    const bool is_streamed_;
    int last_row_ = -1;  // that this thread has read
};

#endif

// Some rows from `row` on, of one block.
inline LeftVectors vectors_of(const LeftRows& left, int row, int count, int num_in) {
    if (!left.is_packed) return {reinterpret_cast<const char*>(left.x + row * left.stride), left.stride * int64_t(sizeof(Number)), 64, count};
    const Number* const block = left.x + row / ROWS * ROWS * int64_t(num_in);
    return {reinterpret_cast<const char*>(block + row % ROWS * STEP), 64, STEP_BYTES, count};
}

// The rows of a thread's shares, of which the next one often has the same.
class RowsOfShares {
  public:
    RowsOfShares(const LeftRows& left, int num_in) : left_(left), num_in_(num_in) {}

    // Those from `row` on, as Multiplied has them, until this thread asks for others.
    const std::vector<LeftVectors>& parts_of(int row, int num_rows) {
        if (row == row_) return parts_;
        static thread_local Buffer<float> buffer;
        float* room = buffer.room(room_to_multiply(num_rows, num_in_));
        row_ = row;
        parts_.clear();
        for_each_part(num_rows, [&](int first, int count) {
            parts_.push_back(to_multiply(vectors_of(left_, row + first, count, num_in_), num_in_ / STEP, room));
            room += room_to_multiply(count, num_in_);
        }, left_.is_packed ? ROWS : num_rows);
        return parts_;
    }

  private:
    const LeftRows left_;
    const int num_in_;
    int row_ = -1;
    std::vector<LeftVectors> parts_;
};

// Those of a share by vectors. In float32 24 KB of a panel, which the first-level cache keeps while rows pass.
inline Parts parts_by_vectors(int num_rows, int num_in) {
    constexpr int SIZE = 12;
    const int num_steps = num_in / STEP;
    return Multiplied::IN_PARTS && num_rows > MOST_VECTOR_ROWS ? Parts{num_steps, SIZE} : Parts::whole(num_steps);
}

// The same without tiles.
template <bool IS_GATED, class Result>
class SharesByVectors {
  public:
    SharesByVectors(const Result& result, const LeftRows& left, const PackedMatrix& matrix)
        : result_(result), rows_(left, matrix.num_in), products_{matrix}, parts_(parts_by_vectors(left.count, matrix.num_in)), is_streamed_(result.is_streamed(left.count)) {}

    void operator()(Share share, int64_t following) {
        const auto [row, rows, begin, end] = share;
        const auto out = result_.share(row, rows, begin, end);
        multiply_by_vectors<IS_GATED>(out, row, rows_.parts_of(row, rows), products_, parts_, begin, end, following, is_streamed_);
        result_.finish(out, rows, end);
    }

  private:
    const Result result_;
    RowsOfShares rows_;
    const Products<typename Result::Value> products_;
    const Parts parts_;
    const bool is_streamed_;
};

// result[row, o] = x[row] . weight[o] + bias[o], sums in float32. Gated: silu(gate) * up of such a product whose outputs are the
// gates, and as many that they gate; half of them a multiple of PANEL. The same bits as one after the other. Left: packed, or it
// becomes so in `scratch` where there are many rows.
template <bool IS_GATED = false, class Result>
void multiply(const Result& result, LeftRows left, const PackedMatrix& matrix, Number* scratch, Team& team) {
    if (needs_packing(left.count) && !left.is_packed) {
        pack_left(scratch, left, matrix.num_in, team);
        left = {scratch, matrix.num_in, left.count, true};
    }
    const auto share_out = [&](auto multiply_share) {
        const auto work = [&](Share share, int64_t following) { multiply_share(share, following); };
        for_each_share(left.count, parts_of(left, matrix.num_in), result.num_out, team, work);
    };
#ifdef WEFT_HAS_AMX
    if (may_use_tiles()) return share_out(SharesByTiles<IS_GATED, Result>(result, left, matrix));
#endif
    share_out(SharesByVectors<IS_GATED, Result>(result, left, matrix));
}

}  // namespace weft

#endif
