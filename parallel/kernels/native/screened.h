// The largest outputs of a few rows, one of each or several, exact though most of the matrix is read in 8 bits only. With w of an
// output as integers times a scale, and x as such a row or the sum of two, what a sum may be off is bounded (Cauchy and Schwarz):
//
//     |w . x - w' . x'|  <=  |w - w'| |x| + |w'| |x - x'|
//
// What a row that draws adds to an output, it adds to both bounds, and what is done to some outputs first is done to their bounds, which
// it leaves in order, as rounding does. A row that wants k outputs gets none below the k-th largest of what panels have at least. Panels
// that may reach that are then multiplied as ever, and only those are looked at.

#pragma once

#include "edits.h"
#include "matrix.h"
#include "matrix_int8.h"

#if defined(WEFT_HAS_PACKED_MATRIX) && defined(WEFT_HAS_INT8)
#define WEFT_HAS_SCREEN

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

namespace weft {

constexpr int SCREEN_SECTIONS = 3;     // of a team: rows become integers, the product in 8 bits, what is made certain
constexpr int SIFT_SECTIONS = 4;       // the same, and before the last one what the several largest are at least

// Rows up to which this is faster than the product itself.
inline int most_screened_rows() { return int8::use_tiles() ? 48 : 512; }

// Rows of integers for a row of x. Two leave fewer panels to multiply again; but by vectors products of more than a few rows are
// slower than memory, and then one is faster.
inline int num_integer_rows(int num_rows) { return int8::use_tiles() || num_rows <= 4 ? 2 : 1; }

// Rows up to which this is faster for several outputs of each, too: with one row of integers most panels stay open.
inline int most_sifted_rows() { return int8::use_tiles() ? most_screened_rows() : 4; }

// A copy of a matrix in 8 bits, whose outputs are whole panels; as many bytes as packed_linear.py says.
struct Screen {
    int8::Matrix<float> matrix;
    float *errors, *norms;  // [out]: at least |w - w'|, and |w'|

    Screen(void* memory, int64_t num_out, int num_in)
        : matrix(memory, nullptr, num_out, num_in),
          errors(const_cast<float*>(reinterpret_cast<const float*>(matrix.sums + num_out))),
          norms(errors + num_out) {}
};

// What sums in float32 may be off, of |w| |x|: of the product itself, and of the bounds. Squares below the least number are lost.
inline float rounding_share(int num_in) { return float(num_in + 16) * 0x1p-23f; }
inline float rounded_up(double x) { return float(x * (1 + 0x1p-10) + 0x1p-54); }

// One row, of whole vectors, as integers, `flip` as in quantize_row: x - scale * q goes to `rest`.
template <class T>
inline float quantize_with_rest(int8_t* to, int64_t step_stride, float* rest, const T* x, int num_in, int flip) {
    const float scale = int8::quantize_row(to, step_stride, x, num_in, flip);
    for (int i = 0; i < num_in; i += LANES) {
        const int8_t* const integers = to + i / int8::STEP * step_stride + i % int8::STEP;
        // an unsigned one is 128 too large, as a signed one of 8 bits it is 128 too small or too large
        const Ints ones = flip ? (load_bytes(integers) & 0xff) - 128 : load_bytes(integers);
        store(rest + i, multiply_add(to_floats(ones), -scale, load(x + i)));
    }
    return scale;
}

inline double norm(const float* x, int size) {
    Floats squares{};
    for (int i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    return std::sqrt(double(sum(squares)));
}

inline void make_screen(const Screen& screen, const Number* weight, int64_t num_out, int num_in, Team& team) {
    const int8::Matrix<Number> matrix(screen.matrix.values, nullptr, num_out, num_in);
    team.for_each(num_out / PANEL, [=](int64_t panel) {
        static thread_local Buffer<int8_t> integers;
        static thread_local Buffer<float> rests;
        int8_t* const row = integers.room(size_t(int8::num_steps(num_in)) * int8::STEP);
        float* const rest = rests.room(size_t(num_in));
        Team alone(nullptr, 1);
        int8::pack_matrix(matrix, weight + panel * PANEL * num_in, panel * PANEL, PANEL, alone);
        for (int64_t output = panel * PANEL; output < (panel + 1) * PANEL; output++) {
            const float scale = quantize_with_rest(row, int8::STEP, rest, weight + output * num_in, num_in, 0);
            screen.errors[output] = rounded_up(norm(rest, num_in));
            for (int i = 0; i < num_in; i += LANES) store(rest + i, load(row + i) * scale);
            screen.norms[output] = rounded_up(norm(rest, num_in)) + screen.errors[output];  // so that it is at least |w| as well
        }
    });
}

// Those edits by panels, of the tokens from the first one on.
class PanelEdits {
  public:
    PanelEdits(const Edits& edits, int64_t num_rows, int64_t num_out, int64_t first_token)
        : edits_(edits), num_out_(num_out), first_token_(first_token) {
        if (!edits.starts) return;
        static thread_local std::vector<int64_t> first, next;
        first.assign(size_t(num_rows * panels()), NONE), next.resize(size_t(edits.starts[num_rows]));
        first_ = first.data(), next_ = next.data();
    }

    // Before a row's panels are asked for.
    void sort(int64_t row) const {
        if (!edits_.has(row)) return;
        for (int64_t i = edits_.starts[row]; i < edits_.starts[row + 1]; i++) {
            const int64_t output = edits_.tokens[i] - first_token_;
            if (output < 0 || output >= num_out_) continue;
            int64_t& first = first_[row * panels() + output / PANEL];
            next_[i] = first, first = i;
        }
    }

    bool has(int64_t row, int64_t panel) const { return edits_.has(row) && first_[row * panels() + panel] != NONE; }

    // Of a panel's outputs.
    void apply(float* outputs, int64_t row, int64_t panel) const {
        for (int64_t i = first_[row * panels() + panel]; i != NONE; i = next_[i]) {
            float& output = outputs[edits_.tokens[i] - first_token_ - panel * PANEL];
            output = edited(output, edits_.factors[row], edits_.offsets[i]);
        }
    }

  private:
    static constexpr int64_t NONE = -1;
    int64_t panels() const { return num_out_ / PANEL; }

    const Edits edits_;
    const int64_t num_out_, first_token_;
    int64_t *first_ = nullptr, *next_ = nullptr;  // [rows][panels], and of each edit another one of its panel
};

// What a row's bounds are made of.
struct ScreenedRow {
    float norm, error;  // |x|; |x - x'|, and what rounding may add
};

// Where the product in 8 bits goes, one or two rows of it for each of x: what the outputs of a panel are at most, and the largest
// that one of them is at least, of all or also of each panel.
struct Bounds {
    using Value = float;

    const Screen& screen;
    const ScreenedRow* rows;
    float* most;                // [rows][panels]
    std::atomic<float>* least;  // [rows]
    float* least_of_panels;     // [rows][panels]; null: not asked for
    RowNoise noise;
    const PanelEdits& edits;
    int64_t num_out;
    int num_parts;  // rows of integers for each of x

    bool is_streamed(int64_t) const { return false; }

    Target<float> share(int64_t row, int64_t num_rows, int64_t begin, int64_t end) const {
        return share_of_thread<float>(row, num_rows, begin, end);
    }

    void finish(const Target<float>& share, int64_t num_rows, int64_t end) const {
        for (int64_t row = share.first_row / num_parts; row < (share.first_row + num_rows) / num_parts; row++) {
            const Noise* const drawn = noise.of(row);
            alignas(64) float added[PANEL] = {}, most_added[LANES];
            float known = least[row].load(std::memory_order_relaxed), found = known;
            Floats least_of_share = broadcast(-INFINITY);
            for (int64_t panel = share.first_panel; panel < end; panel++) {
                const int64_t run = (panel - share.first_panel) % LANES, place = row * (num_out / PANEL) + panel;
                if (drawn && run == 0)
                    bound_noise(most_added, *drawn, noise.first_token + panel * PANEL, std::min<int64_t>(LANES, end - panel));
                PanelBounds bounds = bounds_of(share, row, panel, ZEROS);
                if (drawn) {
                    most[place] = bounds.above + most_added[run];
                    if (most[place] < found && !least_of_panels) continue;
                    find_noise(added, *drawn, noise.first_token + panel * PANEL, PANEL);
                    bounds = bounds_of(share, row, panel, added);
                }
                most[place] = bounds.above;
                if (least_of_panels) least_of_panels[place] = largest(bounds.below);
                least_of_share = larger(bounds.below, least_of_share);
                if (drawn) found = std::max(found, largest(least_of_share));
            }
            found = std::max(found, largest(least_of_share));
            while (known < found && !least[row].compare_exchange_weak(known, found, std::memory_order_relaxed)) {
            }
        }
    }

  private:
    static_assert(PANEL == RUN);
    static constexpr float ZEROS[PANEL] = {};

    struct PanelBounds {
        float above;  // infinite where a bound is no number
        Floats below;
    };

    PanelBounds bounds_of(const Target<float>& share, int64_t row, int64_t panel, const float* added) const {
        alignas(64) float upper[PANEL], lower[PANEL];
        for (int i = 0; i < PANEL; i += LANES) {
            const int64_t output = panel * PANEL + i;
            Floats value = load(share.at(num_parts * row, panel) + i);
            if (num_parts > 1) value += load(share.at(num_parts * row + 1, panel) + i);
            const Floats off = load(screen.errors + output) * rows[row].norm + load(screen.norms + output) * rows[row].error;
            store(upper + i, value + off), store(lower + i, value - off);
        }
        if (edits.has(row, panel)) edits.apply(upper, row, panel), edits.apply(lower, row, panel);
        Floats above = broadcast(-INFINITY), below = above;
        Ints is_number = above == above;
        for (int i = 0; i < PANEL; i += LANES) {
            const Floats upper_score = load(upper + i) + load(added + i);
            is_number &= upper_score == upper_score;
            above = larger(upper_score, above);
            below = larger(load(lower + i) + load(added + i), below);
        }
        return {has_any(~is_number) ? INFINITY : largest(above), below};
    }
};

// Where outputs go of which a row wants only the largest: to memory, -inf in place of others.
struct Sifted {
    float* values;  // [rows][out]
    int64_t num_out;

    void finish(const Target<float>& share, int64_t, int64_t) const {
        std::copy_n(share.values, PANEL, values + share.first_row * num_out + share.first_panel * PANEL);
    }
    void leave_out(int64_t row, int64_t panel) const { std::fill_n(values + row * num_out + panel * PANEL, PANEL, -INFINITY); }
};

// A search for the largest outputs in float32 of at most most_screened_rows(). One at a time in the thread that makes it.
class ScreenedSearch {
  public:
    // `numbers`, of the largest outputs that the rows want, are below the number of panels; null: one each.
    ScreenedSearch(const LeftRows& left, const PackedMatrix& packed, const Screen& screen, const RowNoise& noise, const Edits& edits,
                   const int32_t* numbers = nullptr)
        : left_(left), packed_(packed), screen_(screen), noise_(noise), edits_(edits, left.count, packed.num_out, noise.first_token),
          numbers_(numbers), num_parts_(num_integer_rows(left.count)),
          integers_(room_for_integers(num_parts_ * left.count, packed.num_in)), rows_(size_t(left.count)), least_(size_t(left.count)) {
        static thread_local Buffer<float> room;
        const int64_t size = left.count * panels();
        most_ = room.room(size_t(numbers ? 2 * size : size));
        if (numbers) least_of_panels_ = most_ + size;
        for (std::atomic<float>& each : least_) each = -INFINITY;
    }

    template <class Result>
    void run(const Result& result, Team& team) {
        team.for_each(left_.count, [&](int64_t row) { quantize(int(row)), edits_.sort(row); });
        const Bounds bounds{screen_, rows_.data(), most_, least_.data(), least_of_panels_, noise_, edits_, packed_.num_out, num_parts_};
        int8::multiply<false>(bounds, integers_, screen_.matrix, team);
        if (numbers_) team.for_each(left_.count, [&](int64_t row) { find_least(int(row)); });
        team.for_each(panels(), [&](int64_t panel) {
            static thread_local std::vector<int> open;
            open.clear();
            for (int row = 0; row < left_.count; row++) {
                if (!(most_[row * panels() + panel] < least_[row].load(std::memory_order_relaxed)))
                    open.push_back(row);
                else
                    result.leave_out(row, panel);
            }
            if (!open.empty()) make_certain(result, open, panel);
        });
    }

  private:
    static int8::Left room_for_integers(int64_t num_rows, int num_in) {
        static thread_local int8::Scratch scratch;
        return scratch.room(num_rows, num_in);
    }

    int64_t panels() const { return packed_.num_out / PANEL; }
    const Number* x(int row) const { return left_.x + row * left_.stride; }

    void quantize(int row) {
        static thread_local Buffer<float> rests;
        const int num_in = packed_.num_in, flip = int8::use_tiles() ? 0 : 0x80;
        float* const rest = rests.room(2 * size_t(num_in));
        for (int k = 0; k < num_in; k += LANES) store(rest + k, load(x(row) + k));
        const double norm_of_x = norm(rest, num_in);
        const int64_t stride = integers_.step_stride();
        const int first = num_parts_ * row;
        integers_.scales[first] = quantize_with_rest(integers_.row(first), stride, rest, x(row), num_in, flip);
        if (num_parts_ > 1) integers_.scales[first + 1] = quantize_with_rest(integers_.row(first + 1), stride, rest + num_in, rest, num_in, flip);
        for (int part = 0; part < num_parts_; part++) integers_.finish_row(first + part);
        const double error = norm(rest + (num_parts_ - 1) * num_in, num_in);
        rows_[row] = {rounded_up(norm_of_x), rounded_up(error + rounding_share(num_in) * norm_of_x)};
    }

    // What the last output that a row wants is at least. The row's `least_of_panels_` lose their order.
    void find_least(int row) {
        if (numbers_[row] <= 1) return;
        float *const begin = least_of_panels_ + row * panels(), *const last = begin + numbers_[row] - 1;
        std::nth_element(begin, last, begin + panels(), std::greater<float>());
        least_[row] = *last;
    }

    template <class Result>
    void make_certain(const Result& result, const std::vector<int>& open, int64_t panel) const {
        static thread_local Buffer<Number> room;
        static thread_local Buffer<float> room_for_outputs;
        const int num_in = packed_.num_in, count = int(open.size());
        Number* const rows = room.room(size_t(count * num_in + scratch_size(count, num_in)));
        float* const outputs = room_for_outputs.room(size_t(count) * PANEL);
        for (int i = 0; i < count; i++) std::copy_n(x(open[i]), num_in, rows + i * num_in);
        const PackedMatrix one{packed_.values + panel * PANEL * num_in, nullptr, PANEL, num_in};
        Team alone(nullptr, 1);
        multiply(Target<float>{outputs, PANEL}, {rows, num_in, count}, one, rows + count * num_in, alone);
        for (int i = 0; i < count; i++) {
            if (edits_.has(open[i], panel)) edits_.apply(outputs + i * PANEL, open[i], panel);
            result.finish(Target<float>{outputs + i * PANEL, PANEL, false, open[i], panel}, 1, panel + 1);
        }
    }

    const LeftRows left_;
    const PackedMatrix packed_;
    const Screen screen_;
    const RowNoise noise_;
    const PanelEdits edits_;
    const int32_t* const numbers_;
    const int num_parts_;
    const int8::Left integers_;
    float *most_, *least_of_panels_ = nullptr;  // as in Bounds
    std::vector<ScreenedRow> rows_;
    std::vector<std::atomic<float>> least_;
};

}  // namespace weft

#endif
