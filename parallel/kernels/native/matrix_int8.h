// A product of quantized rows with a matrix in 8 bits that was laid out for it once, when it was loaded: sums of integers
// are exact, so that neither the order nor the number of rows changes a bit.
//
// The matrix [out, in] is cut into panels of 32 outputs, a panel into steps of 64 inputs; in a step runs of four inputs follow
// each other, [run][output][4], of 16 outputs and of the others as panels.h says. So 16 outputs are the right-hand operand of
// a tile product (AMX), a run of them that of a vector one (VNNI), and a panel is read from front to back.

#pragma once

#include "quantize.h"

#ifdef WEFT_HAS_INT8

#include "amx.h"
#include "panels_vectors.h"

#if defined(WEFT_HAS_AMX) && defined(__AMX_INT8__)
#define WEFT_HAS_AMX_INT8
#endif

namespace weft::int8 {

constexpr int STEP_SIZE = PANEL * STEP;  // bytes of a panel's step

inline bool use_tiles() {
#ifdef WEFT_HAS_AMX_INT8
    return may_use_tiles();
#else
    return false;
#endif
}

template <class T>
struct Matrix {
    const int8_t* values;  // [panels][steps][16 runs][32 outputs][4], or as tiles; 0 past the last output and input
    const float* scales;   // [panels][32]
    const int32_t* sums;   // [panels][32]: 128 times the sum of an output's weights
    const T* bias;         // [out], or null
    int64_t num_out;
    int num_in;
    GateClamp clamp = {};

    // In one piece of memory, one after the other: as many bytes as int8_linear.py says.
    Matrix(const void* packed, const void* bias, int64_t num_out, int num_in)
        : values(static_cast<const int8_t*>(packed)),
          scales(reinterpret_cast<const float*>(values + num_panels(num_out) * num_steps(num_in) * STEP_SIZE)),
          sums(reinterpret_cast<const int32_t*>(scales + num_panels(num_out) * PANEL)),
          bias(static_cast<const T*>(bias)),
          num_out(num_out),
          num_in(num_in) {}

    // The outputs of some panels.
    Matrix slice(int64_t first_panel, int64_t count) const {
        Matrix part = *this;
        const int64_t first = first_panel * PANEL;
        part.values = panel(first_panel), part.scales += first, part.sums += first, part.num_out = count * PANEL;
        if (bias) part.bias += first;
        return part;
    }
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
            int8_t* column = to + output / LANES * TO_SECOND + output % LANES * 4;
            for (int k = 0; k < steps * STEP; k += 4)
                std::memcpy(column + k / STEP * STEP_SIZE + k % STEP / 4 * RUN_BYTES, row + k, 4);
        }
    });
}

// sum * x's scale * the output's scale + bias of 16 outputs, each step rounded, for the same bits as torch.
template <class T>
inline Floats scaled(const Ints& sums, float scale, const Matrix<T>& matrix, int64_t output) {
    const Floats result = to_floats(sums) * scale * load(matrix.scales + output);
    if (!matrix.bias) return result;
    alignas(64) T rest[LANES] = {};
    const T* bias = matrix.bias + output;
    if (output + LANES > matrix.num_out) {
        std::memcpy(rest, bias, size_t(std::max<int64_t>(0, matrix.num_out - output)) * sizeof(T));
        bias = rest;
    }
    return result + load(bias);
}

// `Numbers` of panels_vectors.h; rows are unsigned.
#ifdef WEFT_HAS_FOURS
struct Fours : Alike {
    using Sum = int32_t;

    static Ints add(const Ints& sums, const Ints& four, const Ints& right) { return add_fours(sums, four, right); }
};
using Multiplied = Fours;
#else
struct Fours : FoursAsPairs<false, true> {};

// Of rows that are pairs already; see `Left`.
struct Multiplied : Fours {
    static constexpr int LEFT_BYTES = 8;

    template <int PART>
    static Ints left(const char* from) {
        return Alike::left<PART>(from + 4 * PART);
    }
};
#endif

// `Product` of 8 bits; see panels.h.
template <class T>
struct Products {
    using Numbers = Multiplied;
    using Sum = int32_t;
    using Value = T;
    Matrix<T> matrix;
    const float* scales;  // of the rows
    bool is_unsigned = false;  // they, for vectors

#ifdef WEFT_HAS_AMX_INT8
    static void add_upper() {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
    }
    static void add_lower() {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
#endif
    int64_t num_out() const { return matrix.num_out; }
    int num_steps() const { return int8::num_steps(matrix.num_in); }
    const char* panel(int64_t panel) const { return reinterpret_cast<const char*>(matrix.panel(panel)); }
    void outputs(const int32_t* sums, int row, int64_t panel, Floats& first, Floats& second) const {
        const auto half = [&](int64_t output) {
            const Ints x = load_bits(sums + output % PANEL);
            return scaled(is_unsigned ? x - load_bits(matrix.sums + output) : x, scales[row], matrix, output);
        };
        first = half(panel * PANEL), second = half(panel * PANEL + LANES);
    }
    Floats gate(const Floats& x) const { return matrix.clamp.template gate<T>(x); }
    Floats gated(const Floats& x) const { return matrix.clamp.gated(x); }
};

// Quantizes rows of x; all threads of the team call it.
template <class T>
void quantize(const Left& left, const T* x, int64_t stride, int num_in, Team& team) {
    const int flip = use_tiles() ? 0 : 0x80;
    for_each_row(left.num_rows, num_in, team, [=](int64_t row) {
        left.scales[row] = quantize_row(left.row(int(row)), left.step_stride(), x + row * stride, num_in, flip);
        left.finish_row(int(row));
    });
}

constexpr int MULTIPLY_SECTIONS = 2;  // of a team: `quantize`, `multiply`

// How long sums are made of these rows.
inline Parts parts_of(const Left& left) {
    const bool are_in_parts = use_tiles() && left.num_rows > Left::ROWS;
    return are_in_parts ? Parts::of(left.num_steps) : Parts::whole(left.num_steps);
}

#ifdef WEFT_HAS_AMX_INT8

// What a thread does of a product: share after share.
template <bool IS_GATED, class Result, class T = typename Result::Value>
class SharesByTiles {
  public:
    SharesByTiles(const Result& result, const Left& left, const Matrix<T>& matrix)
        : result_(result), left_(left), products_{matrix, left.scales}, is_streamed_(result.is_streamed(left.num_rows)) {}

    void operator()(Share share, int64_t following) {
        const auto [row, rows, begin, end] = share;
        const auto out = result_.share(row, rows, begin, end);
        const char* values = reinterpret_cast<const char*>(left_.row(row));
        if (left_.num_rows <= Left::ROWS) {
            multiply_few_rows<IS_GATED>(out, row, {values, STEP, left_.step_stride(), rows}, products_, begin, end, following);
        } else {
            const Parts parts = parts_of(left_);
            const LeftBlocks blocks{values, row, rows, row == last_row_ && !parts.are_many()};
            multiply_many_rows<IS_GATED>(out, blocks, products_, parts, begin, end, following, is_streamed_);
            last_row_ = row;
        }
        result_.finish(out, rows, end);
    }

  private:
    const Result result_;
    const Left left_;
    const Products<T> products_;
    const bool is_streamed_;
    int last_row_ = -1;  // that this thread has read
};

#endif

// The same without tiles.
template <bool IS_GATED, class Result, class T = typename Result::Value>
class SharesByVectors {
  public:
    SharesByVectors(const Result& result, const Left& left, const Matrix<T>& matrix)
        : result_(result), left_(left), products_{matrix, left.scales, true}, is_streamed_(result.is_streamed(left.num_rows)) {}

    void operator()(Share share, int64_t following) {
        const auto out = result_.share(share.row, share.rows, share.begin, share.end);
        parts_.clear();
        for_each_part(share.rows, [&](int first, int count) {
            const char* row = reinterpret_cast<const char*>(left_.row(share.row + first));
            parts_.push_back({row, Left::ROW_BYTES, left_.step_stride(), count});
        });
        multiply_by_vectors<IS_GATED>(out, share.row, parts_, products_, parts_of(left_), share.begin, share.end, following, is_streamed_);
        result_.finish(out, share.rows, share.end);
    }

  private:
    const Result result_;
    const Left left_;
    const Products<T> products_;
    const bool is_streamed_;
    std::vector<LeftVectors> parts_;
};

// result[row, o] = sum of row and weight[o] in integers * both scales + bias[o]; gated, where the first half of the outputs
// are gates of the second.
template <bool IS_GATED, class Result, class T>
void multiply(const Result& result, const Left& left, const Matrix<T>& matrix, Team& team) {
    const auto share_out = [&](auto multiply_share) {
        const auto work = [&](Share share, int64_t following) { multiply_share(share, following); };
        for_each_share(left.num_rows, parts_of(left), result.num_out, team, work);
    };
#ifdef WEFT_HAS_AMX_INT8
    if (use_tiles()) return share_out(SharesByTiles<IS_GATED, Result, T>(result, left, matrix));
#endif
    share_out(SharesByVectors<IS_GATED, Result, T>(result, left, matrix));
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
