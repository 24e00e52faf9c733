// Where the result of a product goes: to memory, row by row or as the next product wants it; or nowhere, when all that is
// asked of a row is its largest output. A product is shared out in runs of rows times runs of panels:
//
//     share(row, rows, begin, end)    where rows [row, row + rows) of panels [begin, end) are written
//     finish(share, rows, end)        they are there
//
// Panels are runs of 32 outputs.

#pragma once

#include <atomic>
#include <cmath>
#include <vector>

#include "noise.h"
#include "sampling.h"

namespace weft {

constexpr int PANEL = 32;  // outputs
constexpr int ROWS = 32;   // that are packed together

template <class T>
struct Target {
    using Value = T;

    T* values;  // of first_row in first_panel
    int64_t num_out;
    bool is_packed = false;  // as the left side of the next product
    int64_t first_row = 0, first_panel = 0;
    int64_t stride = num_out;  // of rows that are not packed

    int64_t row_stride() const { return is_packed ? PANEL : stride; }
    T* at(int64_t row, int64_t panel) const {
        if (is_packed) return values + row / ROWS * ROWS * num_out + panel * ROWS * PANEL + row % ROWS * PANEL;
        return values + (row - first_row) * stride + (panel - first_panel) * PANEL;
    }
    // Where a column lies; up to the next multiple of PANEL those after it follow.
    T* place(int64_t row, int64_t column) const { return at(row, column / PANEL) + column % PANEL; }
    bool is_streamed(int64_t num_rows) const { return !is_packed && goes_past_caches(values, num_rows, num_out * int64_t(sizeof(T))); }

    Target share(int64_t, int64_t, int64_t, int64_t) const { return *this; }
    void finish(const Target&, int64_t, int64_t) const {}
};

// A share that only the thread that makes it looks at; the thread's next one takes its place.
template <class T>
Target<T> share_of_thread(int64_t row, int64_t rows, int64_t begin, int64_t end) {
    static thread_local Buffer<T> buffer;
    const int64_t width = (end - begin) * PANEL;
    return {buffer.room(size_t(rows * width)), width, false, row, begin};
}

// The largest output of a row, and the first place where it is, as one number: the larger one is the one to keep.
class Candidate {
  public:
    Candidate() = default;
    Candidate(float value, int64_t index) {
        const uint32_t bits = bit_cast<uint32_t>(value + 0.0f);  // of both zeros the positive one
        const uint32_t in_order = value != value ? UINT32_MAX : bits & SIGN ? ~bits : bits | SIGN;
        bits_ = uint64_t(in_order) << 32 | (UINT32_MAX - uint32_t(index));
    }

    bool operator<(const Candidate& other) const { return bits_ < other.bits_; }
    float value() const {
        const uint32_t bits = uint32_t(bits_ >> 32);
        return bit_cast<float>(bits & SIGN ? bits & ~SIGN : ~bits);  // of what a NaN became, a NaN
    }
    int64_t index() const { return UINT32_MAX - uint32_t(bits_); }

  private:
    static constexpr uint32_t SIGN = uint32_t(1) << 31;
    uint64_t bits_ = 0;
};

// Shares are looked through while they are in a cache, by the thread that made them.
template <class T>
struct Searched {
    using Value = T;

    std::atomic<Candidate>* best;  // of each row
    int64_t num_out;
    RowNoise noise = {};  // added to outputs in float32

    bool is_streamed(int64_t) const { return false; }

    Target<T> share(int64_t row, int64_t rows, int64_t begin, int64_t end) const { return share_of_thread<T>(row, rows, begin, end); }

    void finish(const Target<T>& share, int64_t rows, int64_t end) const {
        const int64_t first = share.first_panel * PANEL, count = std::min(end * PANEL, num_out) - first;
        for (int64_t row = share.first_row; row < share.first_row + rows; row++) {
            const T* const outputs = share.at(row, share.first_panel);
            Candidate known = best[row].load(std::memory_order_relaxed);
            Found of_share{0, 0};
            if (const Noise* drawn = noise.of(row))
                of_share = first_largest(outputs, count, *drawn, noise.first_token + first, known.value());
            else if (of_share.value = largest(outputs, count); !(Candidate(of_share.value, first) < known))  // wherever it is
                of_share.place = of_share.value == of_share.value ? first_of(outputs, of_share.value) : 0;
            const Candidate found(of_share.value, first + of_share.place);
            while (known < found && !best[row].compare_exchange_weak(known, found, std::memory_order_relaxed)) {
            }
        }
    }
    void leave_out(int64_t, int64_t) const {}  // panels of a row that cannot have it
};

// The largest output of each row, when a product has gone to `searched()`.
template <class T>
class Largest {
  public:
    Largest(int num_rows, int64_t num_out) : best_(static_cast<size_t>(num_rows)), num_out_(num_out) {}

    Searched<T> searched(const RowNoise& noise = {}) { return {best_.data(), num_out_, noise}; }

    // NaN where one of the outputs is; the index is -1 where the value is not finite.
    void write(float* values, int64_t* indices) const {
        for (size_t row = 0; row < best_.size(); row++) {
            const Candidate candidate = best_[row];
            values[row] = candidate.value();
            indices[row] = std::isfinite(values[row]) ? candidate.index() : -1;
        }
    }

  private:
    std::vector<std::atomic<Candidate>> best_;
    const int64_t num_out_;
};

// Calls multiply(Searched), and writes down what it found.
template <class T, class Multiply>
void find_largest(float* values, int64_t* indices, int num_rows, int64_t num_out, const Multiply& multiply, const RowNoise& noise = {}) {
    Largest<T> found(num_rows, num_out);
    multiply(found.searched(noise));
    found.write(values, indices);
}

}  // namespace weft
