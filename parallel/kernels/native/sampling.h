// The largest logit of each row.

#pragma once

#include <algorithm>
#include <cmath>

#include "threads.h"
#include "vector.h"

namespace weft {

// The largest of `size` numbers; NaN where one of them is.
template <class T>
float largest(const T* row, int64_t size) {
    Floats lanes[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
    Ints is_nan{};
    int64_t i = 0;
    const auto add = [&](int k, Floats x) {
        is_nan |= x != x;
        lanes[k] = larger(x, lanes[k]);
    };
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int k = 0; k < 4; k++) add(k, load(row + i + k * LANES));
    for (; i + LANES <= size; i += LANES) add(0, load(row + i));
    float most = largest(larger(larger(lanes[0], lanes[1]), larger(lanes[2], lanes[3])));
    for (; i < size; i++) {
        const float x = to_float(row[i]);
        if (x != x) return NAN;
        most = std::max(most, x);
    }
    return has_any(is_nan) ? NAN : most;
}

// Where `value` is first, which is in the row.
template <class T>
int64_t first_of(const T* row, float value) {
    int64_t first = 0;
    while (to_float(row[first]) != value) first++;
    return first;
}

// Where the first of the largest is, in [0, size); -1 where a NaN is in the row or the largest is infinite.
template <class T>
int64_t first_largest(const T* row, int64_t size) {
    constexpr int64_t PART = 64 * LANES;
    float most = -INFINITY;
    int64_t first = 0;  // of the part that has it
    for (int64_t begin = 0; begin < size; begin += PART) {
        const float of_part = largest(row + begin, std::min(PART, size - begin));
        if (of_part != of_part) return -1;
        if (of_part > most) most = of_part, first = begin;
    }
    return std::isinf(most) ? -1 : first + first_of(row + first, most);
}

template <class T>
void choose_largest(int64_t* token_ids, const T* logits, int64_t row_stride, int64_t num_rows, int64_t size, Team& team) {
    team.for_each(num_rows, [=](int64_t row) { token_ids[row] = first_largest(logits + row * row_stride, size); });
}

}  // namespace weft
